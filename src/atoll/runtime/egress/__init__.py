"""Connections that leave a sandbox: policy, proxy, audit log."""
