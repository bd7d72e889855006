"""Sandboxes of a server: `atoll.connect()`.

Owns the engine that asks a server instead of a state directory of this machine. A sandbox of a server is the same class
as any other (`runtime/sandbox.py`); what differs is its owner (`sandboxes.py`), whose connection to the guest is a
WebSocket (`tunnel.py`). Operations on sandboxes by name are requests (`engine.py`, over `http.py`). Not here: the
server's end (`surfaces/rest/`). Needs the extra `client`.
"""
