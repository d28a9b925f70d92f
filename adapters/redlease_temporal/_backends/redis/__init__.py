"""Resources kept in Redis; relays act there for workflow runs."""
