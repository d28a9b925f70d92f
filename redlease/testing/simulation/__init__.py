"""Deterministic simulation: clients, their network and their server in virtual time, with faults."""
