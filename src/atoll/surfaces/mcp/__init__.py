"""MCP: sandboxes for clients of the protocol, on standard streams or over HTTP.

`session.py` is what one client session offers; `stdio.py` and `http.py` carry its messages. They use the official SDK,
which the extra `atoll[mcp]` installs. Used by `atoll mcp`, and by programs that mount `app` in a server of their own.
"""

from __future__ import annotations

from atoll.surfaces.mcp.http import app
from atoll.surfaces.mcp.session import ServerConfig

__all__ = ["ServerConfig", "app"]
