"""`@concurrency`: at most so many workflows open at once."""
