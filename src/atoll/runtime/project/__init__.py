"""A project: a directory of this machine that is copied into a sandbox, and what was changed there on its way back."""
