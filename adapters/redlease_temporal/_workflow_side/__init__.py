"""Code that runs inside users' workflows, for any backend."""
