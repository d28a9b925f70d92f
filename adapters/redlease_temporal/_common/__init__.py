"""Code that runs outside of workflows, for any backend."""
