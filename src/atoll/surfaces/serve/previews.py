"""Previews on the server's port: connections that the door hands on as they are.

Owns which requests are for a preview: by host name, PORT-NAME below the server's domain, or by a path below /preview/;
and that ports of E2B's sandboxes, PORT-ID below the domain, are E2B's (`surfaces/e2b/ports.py`). Not here: which
previews there are (`atoll.server.previews`), and how a request is passed on (`runtime/previews/`). Used by
`process.py`.
"""

from __future__ import annotations

import h11

from atoll.runtime.http1 import Headers
from atoll.runtime.previews.proxy import PreviewResponse, Upstream, header, serve_client
from atoll.runtime.previews.router import PREFIX, PreviewRouter
from atoll.server.previews import ServerPreviews
from atoll.surfaces.door.answers import REQUEST_ID_HEADER, new_request_id
from atoll.surfaces.door.connection import RawClient
from atoll.surfaces.door.heads import RequestHead
from atoll.surfaces.e2b.ports import PLANE_PORTS, SandboxPorts, host_target
from atoll.surfaces.serve.logs import begin_request


class PreviewHandler:
    """The door's `RawHandler` for previews."""

    def __init__(self, previews: ServerPreviews) -> None:
        self._previews = previews
        self.ports: SandboxPorts | None = None
        """Those of E2B's sandboxes. Set before the server listens."""
        previews.on_request = _begin

    def claims(self, head: RequestHead) -> bool:
        if (target := host_target(head.host)) is not None:
            return target.port not in PLANE_PORTS
        return self._previews.label_of_host(head.host) is not None or head.target.startswith(PREFIX.encode())

    async def serve(self, client: RawClient) -> None:
        await serve_client(client, _EitherRouter(PreviewRouter(self._previews, client.peer), self.ports, client.peer))


class _EitherRouter:
    """The proxy's `Router` for a connection that may have requests of both kinds."""

    def __init__(self, previews: PreviewRouter, ports: SandboxPorts | None, peer: str) -> None:
        self._previews = previews
        self._ports = ports
        self._peer = peer

    def route(self, request: h11.Request) -> Upstream | PreviewResponse:
        target = host_target(header(request.headers, b"host"))
        if target is not None and self._ports is not None:
            return self._ports.route(request, target, self._peer, _begin())
        return self._previews.route(request)

    def refuse(self, status: int, reason: str) -> PreviewResponse:
        return self._previews.refuse(status, reason)


def _begin() -> Headers:
    """Every request has an id, in its answer and in all that is logged of it."""
    request_id = new_request_id()
    begin_request(request_id)  # the task ends with the connection, and the next request binds another
    return [(REQUEST_ID_HEADER.encode(), request_id.encode())]
