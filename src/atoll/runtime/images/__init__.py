"""From an image reference to read-only layers."""
