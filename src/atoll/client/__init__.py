"""Sandboxes of a server: `atoll.connect()`.

Owns the engine that asks a server instead of a state directory of this machine. A sandbox of a server is the same class
as any other (`runtime/sandbox.py`); what differs is its owner (`sandboxes.py`), whose connection to the guest is a
WebSocket (`tunnel.py`). Operations on sandboxes by name are requests (`engine.py`, over `http.py`). Not here: the
server's end (`surfaces/rest/`). Needs the extra `client`.
"""

from importlib.util import find_spec as _find_spec

from atoll.contract.errors import install_extra as _install_extra

if _missing := [each for each in ("httpx2", "websockets") if _find_spec(each) is None]:
    raise ModuleNotFoundError(
        f"a server (ATOLL_URL, atoll.connect) needs {_missing[0]}, which is not installed; {_install_extra('client')}",
        name=_missing[0],
    )
