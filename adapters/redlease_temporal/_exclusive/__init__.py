"""`@exclusive`: at most so many runs of an activity at once."""
