"""What all blocking clients of a process stand on: the background thread, and what interrupts its callers."""
