"""Secret values, which stay outside of sandboxes."""
