"""Server-sent events: an answer that goes on until its events, its client or its key end.

Owns how an event is written, the comments that keep a quiet connection open, and the ends that are not the stream's
own: a client that is gone, a key that was revoked (noticed within two seconds), an error in the middle. Memory is
bounded: nothing is read from the source while the client does not read. Not here: which events there are (the routes).
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Self

import anyio
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from atoll.contract.errors import AtollError, Unauthenticated
from atoll.surfaces.rest.caller import Caller
from atoll.surfaces.rest.errors import answer_to

MEDIA_TYPE = "text/event-stream"
KEEP_ALIVE_S = 15.0
KEY_CHECK_S = 1.0
"""How often a key is looked at while a stream lasts."""
BEGUN = b""
"""What a generator yields first, when nothing is left that would make the request an error."""
_GOODBYE_S = 0.5
"""How long a client whose key was revoked may take to read the reason."""
_log = logging.getLogger(__name__)


def encode_event(event: str, data: object, id: str | None = None) -> bytes:
    """One event. `data` is anything that JSON has; its encoding has no line breaks."""
    head = f"event: {event}\n" if id is None else f"event: {event}\nid: {id}\n"
    return b"%sdata: %s\n\n" % (head.encode(), to_json(data))


class EventStream(Response):
    """An answer of events, encoded by `encode_event`. What the generator raises is the event `error`, and the end.

    Get one from `begin`.
    """

    media_type = MEDIA_TYPE

    def __init__(self, caller: Caller, events: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        self._caller = caller
        self._events = events
        self._sent_at = time.monotonic()
        self._refusal: AtollError | None = None

    @classmethod
    async def begin(cls, caller: Caller, events: AsyncGenerator[bytes, None]) -> Self:
        """The answer, once the generator has yielded `BEGUN`, which is not sent. What it raises before is raised here,
        where it can still be an answer with a status of its own."""
        await anext(events)
        return cls(caller, events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

        async def write(data: bytes) -> None:
            self._sent_at = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": True})

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_alive, write)
            tasks.start_soon(self._end_with_key, tasks.cancel_scope)
            tasks.start_soon(self._end_with_client, receive, tasks.cancel_scope)
            async with aclosing(self._events) as events:
                try:
                    async for event in events:
                        await write(event)
                except Exception as error:  # noqa: BLE001 - the status is sent: the stream itself has to say it
                    await write(self._error(error))
            tasks.cancel_scope.cancel()
        if self._refusal is not None:
            with anyio.move_on_after(_GOODBYE_S):
                await write(self._error(self._refusal))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _error(self, error: Exception) -> bytes:
        if not isinstance(error, AtollError):
            _log.error("request %s failed in its stream", self._caller.request_id, exc_info=error)
        return b"event: error\ndata: %s\n\n" % bytes(answer_to(error, self._caller.request_id).body)

    async def _keep_alive(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        while True:
            quiet_s = time.monotonic() - self._sent_at
            if quiet_s >= KEEP_ALIVE_S:
                await write(b": keep-alive\n\n")
                quiet_s = 0.0
            await anyio.sleep(KEEP_ALIVE_S - quiet_s)

    async def _end_with_key(self, scope: anyio.CancelScope) -> None:
        self._refusal = await revoked(self._caller)
        scope.cancel()

    async def _end_with_client(self, receive: Receive, scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()


async def revoked(caller: Caller) -> Unauthenticated:
    """Returns when the caller's key is no longer valid, with the reason."""
    while True:
        await anyio.sleep(KEY_CHECK_S)
        try:
            await caller.require_valid()
        except Unauthenticated as error:
            return error
