"""Start, sleep, checkpoint, recover, and keep warm."""
