"""Server-sent events: answers that go on.

Owns the format, keep-alives, and the ends of a stream: its source is exhausted, its client is gone, its key was
revoked, or the server stops. At most one event is held in memory: a slow client slows its source. Used by all routes
that stream.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, NamedTuple, Self

import anyio
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from atoll.contract.errors import Unauthenticated
from atoll.surfaces.rest.caller import Caller
from atoll.surfaces.rest.errors import answer_to, failures
from atoll.surfaces.rest.pages import plain

KEEP_ALIVE_S = 15.0
CHECK_KEY_S = 1.0
GOODBYE_S = 0.5
"""How long a client may take to read why its stream ends."""
MEDIA_TYPE = "text/event-stream"
STREAMED = "x-streamed"
"""In the OpenAPI document, until `openapi.py` has written what it means."""


def streams(data: Any) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that streams, with what the `data` of its events are."""
    return {
        **failures(),
        200: {
            "model": data,
            "description": "A stream of events. The schema is that of the `data` of each.",
            STREAMED: True,
        },
    }


class ServerEvent(NamedTuple):
    """One event. `data` is anything that is JSON, or a model."""

    event: str
    data: object
    id: str | None = None

    def encode(self) -> bytes:
        head = f"event: {self.event}\n" if self.id is None else f"event: {self.event}\nid: {self.id}\n"
        return b"%sdata: %s\n\n" % (head.encode(), to_json(plain(self.data)))


BEGUN = ServerEvent("begun", None)


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

    @classmethod
    async def begin(cls, caller: Caller, events: AsyncGenerator[ServerEvent, None]) -> Self:
        """The answer to a request that may still fail: the generator yields `BEGUN` first, which is not sent, and what
        it raises before that is raised here, where it can be an answer with a status of its own."""
        await anext(events)
        return cls(caller, events)

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

        async def watch_key(scope: anyio.CancelScope) -> None:
            nonlocal failed
            failed = await revoked(self._caller)
            scope.cancel()

        async def keep_alive() -> None:
            while True:
                await anyio.sleep(max(0.1, last + KEEP_ALIVE_S - anyio.current_time()))
                if anyio.current_time() - last >= KEEP_ALIVE_S:
                    await write(b": keep-alive\n\n")

        gone = True
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch_client, tasks.cancel_scope)
                tasks.start_soon(watch_key, tasks.cancel_scope)
                tasks.start_soon(keep_alive)
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
            with anyio.move_on_after(GOODBYE_S):  # it may not read
                await write(ServerEvent("error", body).encode())
        if not gone:
            await send({"type": "http.response.body", "body": b""})


async def revoked(caller: Caller) -> Unauthenticated:
    """Returns when the caller's key is no longer valid, with the reason: for all that goes on for long."""
    while True:
        await anyio.sleep(CHECK_KEY_S)
        try:
            await caller.require_valid()
        except Unauthenticated as error:
            return error
