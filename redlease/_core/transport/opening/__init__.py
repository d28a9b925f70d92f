"""Opens the connections of a client to a server, and finds out how it can work with it."""
