"""What users hold: the semaphore and the lock, and what is made of them."""
