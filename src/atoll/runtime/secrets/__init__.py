"""Secrets: the vault, injection into requests, certificate authorities and CA bundles."""
