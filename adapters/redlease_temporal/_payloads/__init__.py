"""The payloads in users' histories: append-only."""
