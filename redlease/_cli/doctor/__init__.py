"""`redlease doctor`: examines a server and what redlease keeps there."""
