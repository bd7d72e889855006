"""Previews on the server's port: connections that the door hands on as they are.

Owns which requests are for a preview: by host name, PORT-NAME below the server's domain, or by a path below /preview/.
Not here: which previews there are (`atoll.server.previews`), and how a request is passed on (`runtime/previews/`). Used
by `process.py`.
"""

from __future__ import annotations

from atoll.runtime.http1 import Headers
from atoll.runtime.previews.proxy import serve_client
from atoll.runtime.previews.router import PREFIX, PreviewRouter
from atoll.server.previews import ServerPreviews
from atoll.surfaces.door.answers import REQUEST_ID_HEADER, new_request_id
from atoll.surfaces.door.connection import RawClient
from atoll.surfaces.door.heads import RequestHead
from atoll.surfaces.serve.logs import begin_request


class PreviewHandler:
    """The door's `RawHandler` for previews."""

    def __init__(self, previews: ServerPreviews) -> None:
        self._previews = previews
        previews.on_request = _begin

    def claims(self, head: RequestHead) -> bool:
        return self._previews.label_of_host(head.host) is not None or head.target.startswith(PREFIX.encode())

    async def serve(self, client: RawClient) -> None:
        await serve_client(client, PreviewRouter(self._previews, client.peer))


def _begin() -> Headers:
    """Every request has an id, in its answer and in all that is logged of it."""
    request_id = new_request_id()
    begin_request(request_id)  # the task ends with the connection, and the next request binds another
    return [(REQUEST_ID_HEADER.encode(), request_id.encode())]
