"""The programs that run inside: texts that `code/session.py` sends to an interpreter of the image."""
