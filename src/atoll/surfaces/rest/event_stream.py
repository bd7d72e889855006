"""Server-sent events: answers that go on.

Owns the format, keep-alives, and the ends of a stream: its source is exhausted, its client is gone, its key was
revoked, or the server stops. At most one event is held in memory: a slow client slows its source. Used by all routes
that stream.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from atoll.contract.errors import Unauthenticated
from atoll.surfaces.rest.caller import Caller
from atoll.surfaces.rest.errors import answer_to, failures
from atoll.surfaces.rest.pages import plain

KEEP_ALIVE_S = 15.0
CHECK_KEY_S = 1.0
MEDIA_TYPE = "text/event-stream"


def streams(data: type) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that streams, with what the `data` of its events are."""
    return {
        **failures(),
        200: {"model": data, "description": "A stream of events. The schema is that of the `data` of each."},
    }


class ServerEvent(NamedTuple):
    """One event. `data` is anything that is JSON, or a model."""

    event: str
    data: object
    id: str | None = None

    def encode(self) -> bytes:
        lines = [f"event: {self.event}"]
        if self.id is not None:
            lines.append(f"id: {self.id}")
        lines.append(f"data: {json.dumps(plain(self.data), separators=(',', ':'))}")
        return "\n".join(lines).encode() + b"\n\n"


class EventStream(Response):
    """An answer of events. When the source raises, the last event is `error`, in the shape of all errors.

    When the key is revoked or expires, the stream ends so within two seconds.
    """

    media_type = MEDIA_TYPE

    def __init__(
        self,
        caller: Caller,
        events: AsyncIterator[ServerEvent],
        headers: Mapping[str, str] | None = None,
        status_code: int = 200,
    ) -> None:
        self._caller = caller
        self._events = events
        self.status_code = status_code
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        sending = anyio.Lock()
        last = anyio.current_time()

        async def write(data: bytes) -> None:
            nonlocal last
            async with sending:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                last = anyio.current_time()

        async def watch_client(scope: anyio.CancelScope) -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            scope.cancel()

        failed: Exception | None = None

        async def keep(scope: anyio.CancelScope) -> None:
            nonlocal failed
            while True:
                await anyio.sleep(CHECK_KEY_S)
                try:
                    await self._caller.require_valid()
                except Unauthenticated as error:
                    failed = error
                    scope.cancel()
                    return
                if anyio.current_time() - last >= KEEP_ALIVE_S:
                    await write(b": keep-alive\n\n")

        gone = True
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch_client, tasks.cancel_scope)
                tasks.start_soon(keep, tasks.cancel_scope)
                try:
                    async for event in self._events:
                        await write(event.encode())
                except Exception as error:  # noqa: BLE001 - a stream that has begun can only say it as an event
                    failed = error
                gone = False
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                if (close := getattr(self._events, "aclose", None)) is not None:
                    await close()
        if failed is not None:
            gone = False
            body: Any = json.loads(bytes(answer_to(failed, self._caller.request_id).body))
            await write(ServerEvent("error", body).encode())
        if not gone:
            await send({"type": "http.response.body", "body": b""})
