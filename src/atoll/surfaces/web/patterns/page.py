"""The page of a running pattern over HTTP: an ASGI app, and its server.

Owns the routes of the page, what its state is, and which actions it takes. Not here: who may open it (`web_guard.py`),
how the state gets to watchers (`live.py`), and what an action does (`reactive/rendering.py`). Used by
`atoll pattern serve`.

    GET  /                          the page, with the state of this moment as HTML
    GET  /events                    the state as server-sent events
    POST /actions                   {"id", "value"}: what a field or a button of the view does
    GET  /assets/{release}/{name}   scripts and styles

All who open the page see one pattern, and each may do what it offers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from atoll.contract.errors import AtollError
from atoll.reactive.nodes import NodeInfo
from atoll.reactive.patterns import RunningPattern
from atoll.reactive.rendering import MAX_INPUT_CHARS
from atoll.surfaces import door
from atoll.surfaces.door import status_of
from atoll.surfaces.door.answers import REQUEST_ID_HEADER, error_body, new_request_id
from atoll.surfaces.web.assets import WebAssets
from atoll.surfaces.web.document import document
from atoll.surfaces.web.live import MAX_WATCHERS, LiveState, LiveStream
from atoll.surfaces.web.patterns.view_html import view_html
from atoll.surfaces.web.web_guard import GuardedPages, WebGuard

TOKEN_VARIABLE = "ATOLL_PATTERN_TOKEN"  # noqa: S105 - the name of a variable
MAX_ACTION_BYTES = 6 * MAX_INPUT_CHARS + 4096
"""Of a request: JSON may write a character as six."""
MAX_NODES = 400
"""Of the graph that a page draws."""
_MAX_NAME_CHARS = 100
_MAX_ERROR_CHARS = 1000
_GRACE_S = 3
_SCRIPT = "pattern/page.js"
EARLY = (
    "static/connection.js",
    "static/drawing.js",
    "static/elapsed.js",
    "static/markup.js",
    "pattern/elements.js",
    "pattern/fields.js",
    "vendor/preact/preact.mjs",
    "vendor/preact/hooks.mjs",
    "vendor/htm/htm.mjs",
    "vendor/signals/signals.mjs",
    "vendor/signals-core/signals-core.mjs",
)
"""What the page loads before it shows anything live. Charts and the graph load more when they are shown."""


class PageAction(BaseModel):
    """The body of `POST /actions`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str = Field(max_length=100)
    value: str | None = None


class PatternPage:
    """The page of a pattern that runs in a graph."""

    def __init__(self, running: RunningPattern) -> None:
        self._running = running
        self._assets = WebAssets({"pattern": Path(__file__).parent / "static"})
        self.live = LiveState(self._state, self._too_large)

    def app(self, guard: WebGuard) -> Starlette:
        """The ASGI app. Its streams are fed while its lifespan runs."""
        routes = [
            Route("/", self._page, methods=["GET"]),
            Route("/events", self._events, methods=["GET"]),
            Route("/actions", self._act, methods=["POST"]),
            Route("/assets/{release}/{name:path}", self._assets.answer, methods=["GET"]),
        ]
        made = Starlette(routes=routes, lifespan=self._fed)
        made.add_middleware(GuardedPages, guard=guard)
        return made

    @asynccontextmanager
    async def _fed(self, _app: Starlette) -> AsyncIterator[None]:
        end = self._running.graph.subscribe(lambda _nodes: self.live.changed())
        try:
            yield
        finally:
            end()
            self.live.close()

    # ------------------------------------------------------------------------------------------------------ the state

    def _state(self) -> dict[str, Any]:
        """What a page shows: the title, the view (`reactive/rendering.py` describes its form), and the nodes."""
        running = self._running
        nodes = [node.info() for node in running.graph.nodes if node.kind != "view"]
        return {
            "release": self._assets.release,
            "title": running.name[:_MAX_NAME_CHARS],
            "view": running.view.tree(),
            "nodes": [_shown(info) for info in nodes[:MAX_NODES]],
            "more_nodes": max(len(nodes) - MAX_NODES, 0),
        }

    def _too_large(self, size: int) -> dict[str, Any]:
        error = f"the view has {size} bytes, which is more than a page can show; let it show less"
        return {
            "release": self._assets.release,
            "title": self._running.pattern.name,
            "view": {"type": "error", "text": error},
            "nodes": [],
            "more_nodes": 0,
        }

    # ------------------------------------------------------------------------------------------------------ the routes

    async def _page(self, _request: Request) -> Response:
        title, about = self._running.name[:_MAX_NAME_CHARS], self._running.pattern.description
        body = view_html(title, about, self._running.view.tree())
        return document(
            self._assets, body, title=title, script=_SCRIPT, styles=["pattern/page.css"], early=EARLY
        )  # fmt: skip

    async def _events(self, request: Request) -> Response:
        if self.live.watchers >= MAX_WATCHERS:
            return _error(503, "too_many_watchers", f"{MAX_WATCHERS} pages watch this already; close one")
        return LiveStream(self.live, request.headers.get("last-event-id"))

    async def _act(self, request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return _error(415, "invalid_request", "the Content-Type of an action is application/json")
        body = bytearray()
        try:
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_ACTION_BYTES:
                    return _error(413, "too_large", f"an action may have {MAX_ACTION_BYTES} bytes")
        except ClientDisconnect:
            return Response(None, 400)
        try:
            action = PageAction.model_validate_json(bytes(body))
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:4])
            return _error(400, "invalid_request", f"not an action, {{id, value}}: {wrong[:500]}")
        try:
            self._running.view.act(action.id, action.value)
        except AtollError as error:
            return _error(status_of(error), error.code, error.message)
        return JSONResponse({"state": self.live.id})


def accepted_hosts(address: str, token: SecretStr | None) -> Sequence[str] | None:
    """The `hosts` of a guard for a page at this address, which is an IP address or `localhost`.

    Raises:
        InvalidRequest: other machines can reach the address, and there is no token.
    """
    address = "127.0.0.1" if address == "localhost" else address
    return door.accepted_hosts(address, token, token_variable=TOKEN_VARIABLE)


async def listen(
    running: RunningPattern,
    address: str,
    port: int,
    *,
    token: SecretStr | None = None,
    on_ready: Callable[[str], None] = lambda _url: None,
) -> None:
    """Serve the page at an address until this is cancelled. `on_ready` receives its URL.

    Raises:
        InvalidRequest: other machines can reach the address, and there is no token.
        OSError: the address or port cannot be listened on.
    """
    guard = WebGuard(accepted_hosts(address, token), token, token_variable=TOKEN_VARIABLE)
    address = "127.0.0.1" if address == "localhost" else address
    page = PatternPage(running)
    app = page.app(guard)
    await door.listen(
        app, address, port, on_ready=lambda url: on_ready(f"{url}/"), on_stop=page.live.close, grace_s=_GRACE_S
    )  # fmt: skip


def _shown(info: NodeInfo) -> dict[str, Any]:
    fields = info._asdict()
    fields["name"] = info.name[:_MAX_NAME_CHARS]
    fields["error"] = None if info.error is None else info.error[:_MAX_ERROR_CHARS]
    return fields


def _error(status: int, code: str, message: str) -> Response:
    request_id = new_request_id()
    return JSONResponse(error_body(code, message, request_id), status, {REQUEST_ID_HEADER: request_id})
