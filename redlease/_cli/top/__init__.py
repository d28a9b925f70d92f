"""`redlease top`: all resources, live."""
