"""Attacks on our own sandboxes: one file per class, each promise of THREAT_MODEL.md tried with every runtime."""
