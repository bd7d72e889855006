"""The REST API of `atoll serve`."""
