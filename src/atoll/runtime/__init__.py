"""Sandboxes with names, over drivers: the behaviour that every kind of isolation shares.

Knows the guest's protocol, images, the state directory and who may do what when. Refuses to know how isolation is
made (`drivers/`) and who asks (`surfaces/`).
"""
