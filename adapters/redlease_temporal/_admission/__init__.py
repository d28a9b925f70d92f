"""`@concurrency`: a limit on the workflows that are open at once."""
