"""Speak to a guest: frames, streams, and the operations on processes, files and ports."""
