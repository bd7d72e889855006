"""Egress: network policy, proxy, the process that serves it, and the audit log."""
