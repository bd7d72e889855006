"""What is on disk, and which process may change it."""
