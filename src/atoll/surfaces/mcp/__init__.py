"""MCP: sandboxes for whatever client speaks the protocol, over its standard streams or over HTTP.

`session` is what one client is served, `stdio` and `http` are how its messages come, and `listening` is where. All of
it stands on the official SDK, which the extra `atoll[mcp]` installs. Below stand `tools` and `runtime`; above it the
command line, and a server that has this as one of its parts.
"""

from __future__ import annotations

from atoll.surfaces.mcp.http import app
from atoll.surfaces.mcp.session import ServerConfig

__all__ = ["ServerConfig", "app"]
