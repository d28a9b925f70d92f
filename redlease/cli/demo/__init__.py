"""`redlease demo`: eight processes share three permits, two of them are killed, and what happened is judged."""
