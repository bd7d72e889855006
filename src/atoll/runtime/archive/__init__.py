"""A sandbox in one file, for another machine."""
