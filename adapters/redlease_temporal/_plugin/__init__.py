"""The wiring: what the plugin adds to workers and clients."""
