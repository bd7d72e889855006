"""The door: what every HTTP surface shares, before its own routes.

| module | owns |
|---|---|
| `listening.py` | listening, TLS, the start and end of a server |
| `connection.py` | one connection: time limits, connections per client, bodies, WebSockets, who answers |
| `heads.py` | which heads of requests are refused |
| `guard.py` | host names, origins and tokens; the HTTP status of an error |
| `middleware.py` | the same for the apps of `atoll serve`: request ids, hosts, body limits, the end of streams |
| `answers.py` | errors as HTTP answers |

Used by `mcp/http.py`, `messages/http.py` and `serve/`.
"""

from __future__ import annotations

from atoll.surfaces.door.guard import LOOPBACK, HttpGuard, HttpRefusal, OpenGuard, accepted_hosts, status_of
from atoll.surfaces.door.listening import listen

__all__ = ["LOOPBACK", "HttpGuard", "HttpRefusal", "OpenGuard", "accepted_hosts", "listen", "status_of"]
