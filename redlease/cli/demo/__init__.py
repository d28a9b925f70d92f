"""`redlease demo`: eight processes share three slots, two of them are killed, and what happened is judged."""
