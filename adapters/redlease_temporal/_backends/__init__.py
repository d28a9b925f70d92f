"""The backends that keep resources; none imports another."""
