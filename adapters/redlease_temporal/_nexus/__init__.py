"""The lock service: a Nexus service, for workflows of any language and namespace."""
