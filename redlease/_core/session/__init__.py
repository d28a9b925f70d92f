"""What one client keeps alive: leases, queue places, pending requests."""
