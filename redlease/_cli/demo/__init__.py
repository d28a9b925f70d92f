"""`redlease demo`: eight processes share three permits, two are killed, and the promises are checked."""
