"""`@exclusive`: a limit on the runs of an activity at once."""
