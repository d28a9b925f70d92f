"""Resources of a lock service, which is reached through Nexus."""
