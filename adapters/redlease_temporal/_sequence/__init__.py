"""Sequences: the items of a resource, one at a time."""
