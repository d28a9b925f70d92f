"""Connections to a single server, to the masters of a cluster, and to a primary found through Sentinel."""
