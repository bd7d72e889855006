"""A state that watchers follow: server-sent events in which the newest state wins.

Owns versions of the state, how often it is sent, what a watcher gets when it connects again, and the ends of streams.
Not here: what the state is, and the other end (`static/live.js`). Used by all pages that change.

A watcher gets the state as it is now, then again after changes, each time as a whole. Nothing is queued: while a slow
one takes a state, any number of changes become the next one. An event's id names this server and the version: who
comes again with the present one has it already, and who comes from a server before this one gets everything.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

INTERVAL_S = 0.1
"""Between two states that one watcher gets."""
KEEP_ALIVE_S = 15.0
RETRY_MS = 500
"""After which a browser connects again."""
MAX_WATCHERS = 128
MAX_STATE_BYTES = 32 * 1024 * 1024
_FRESH_S = 0.5


class LiveState:
    """A state with versions. `make` gives it as it is now, as JSON has it."""

    def __init__(
        self,
        make: Callable[[], dict[str, Any]],
        too_large: Callable[[int], dict[str, Any]],
        *,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """`too_large` gives the state in place of one with so many bytes."""
        self._make = make
        self._too_large = too_large
        self._interval_s = interval_s
        self._instance = secrets.token_hex(6)
        self._version = 1
        self._changed = anyio.Event()
        self._closed = False
        self._made: tuple[int, float, bytes] | None = None
        self.watchers = 0

    @property
    def id(self) -> str:
        """Names the present version."""
        return f"{self._instance}-{self._version}"

    def changed(self) -> None:
        """Tell watchers that the state is another one."""
        self._version += 1
        before, self._changed = self._changed, anyio.Event()
        before.set()

    def close(self) -> None:
        """End all streams, and begin none."""
        self._closed = True
        self._changed.set()

    def current(self) -> tuple[str, bytes]:
        """The id of the present version, and the state as JSON in one line."""
        now = time.monotonic()
        if self._made is None or self._made[0] != self._version or now - self._made[1] > _FRESH_S:
            encoded = json.dumps(self._make(), separators=(",", ":")).encode()
            if len(encoded) > MAX_STATE_BYTES:
                encoded = json.dumps(self._too_large(len(encoded))).encode()
            self._made = (self._version, now, encoded)
        return self.id, self._made[2]

    async def events(self, last_id: str | None) -> AsyncGenerator[bytes]:
        """What one watcher gets. `last_id` is that of the last event that it has."""
        yield b"retry: %d\n\n" % RETRY_MS
        seen = last_id
        while not self._closed:
            changed = self._changed
            if seen != self.id:
                seen, state = self.current()
                yield b"event: state\nid: %s\ndata: %s\n\n" % (seen.encode(), state)
                await anyio.sleep(self._interval_s)
            else:
                with anyio.move_on_after(KEEP_ALIVE_S):
                    await changed.wait()
                if seen == self.id and not self._closed:
                    yield b": still here\n\n"


class LiveStream(Response):
    """The answer to one watcher. It ends when the watcher is gone, or the state is closed."""

    media_type = "text/event-stream"

    def __init__(self, state: LiveState, last_id: str | None) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._state = state
        self._last_id = last_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._state.watchers += 1
        try:
            async with anyio.create_task_group() as tasks:

                async def watch() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    tasks.cancel_scope.cancel()

                tasks.start_soon(watch)
                async with aclosing(self._state.events(self._last_id)) as events:
                    async for event in events:
                        await send({"type": "http.response.body", "body": event, "more_body": True})
                tasks.cancel_scope.cancel()
        finally:
            self._state.watchers -= 1
        await send({"type": "http.response.body", "body": b"", "more_body": False})
