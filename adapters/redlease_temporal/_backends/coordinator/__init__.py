"""Resources kept by one workflow each."""
