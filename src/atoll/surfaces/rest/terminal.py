"""`/terminal`: a terminal over a WebSocket, which goes on after a broken connection.

Owns the messages, which connection has a terminal, and how long one is kept whose connection is gone. Bytes are binary
messages both ways; everything else is JSON in text messages:

    from the server   {"type": "started", "process": 7, "offset": 0}   first; the offset of the next byte of output
                      {"type": "gap", "offset": 70000}                 output before this offset is no longer kept
                      {"type": "exit", "exit_code": 0, …}              last, then the connection is closed (1000)
                      {"type": "error", "code": …, "message": …, …}    then the connection is closed
    from the client   {"type": "resize", "rows": 40, "cols": 120}
                      {"type": "signal", "signal": 2}                  to the process; a Ctrl-C is the byte 3

A client that counts the bytes of output connects again with `?process=…&offset=…` and misses nothing: the process is
kept for `KEPT_S` after its connection is gone, then killed. The newest connection has the terminal: an older one, whose
end was not noticed, is closed. A client that does not read holds up the process, and no memory. Not here: other
processes (`processes.py`), and the key, which may also come as a subprotocol (`caller.py`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Literal

import anyio
from fastapi import APIRouter, FastAPI, Query, WebSocket
from pydantic import Field, TypeAdapter, ValidationError
from starlette.websockets import WebSocketDisconnect

from atoll.contract.errors import AtollError, InvalidRequest
from atoll.contract.model import Gap, Output
from atoll.runtime.sandbox import LOGIN_SHELL
from atoll.surfaces.rest.caller import Caller, Executor
from atoll.surfaces.rest.errors import answer_to
from atoll.surfaces.rest.event_stream import revoked
from atoll.surfaces.rest.pages import MAX_INTEGER, RequestBody
from atoll.surfaces.rest.processes import find_process
from atoll.surfaces.rest.sandboxes import SandboxPath, find

if TYPE_CHECKING:
    from atoll.runtime.guest.process import Process
    from atoll.runtime.sandbox import Sandbox

KEPT_S = 300.0
"""How long a terminal is kept whose connection is gone."""
TAKEN_OVER, REVOKED, FAILED = 4409, 4401, 4500
"""Codes with which a connection is closed: another one has its terminal, its key was revoked, an `error` was sent."""
PROTOCOL = "atoll.terminal"
"""The subprotocol. Browsers need one to be accepted when they send the key as another."""
_PARAMETERS = ("rows", "cols", "command", "user", "cwd", "process", "offset")
_CLOSE_S = 0.5
"""How long a client may take to read why its connection is closed."""
_TAKE_OVER_S = 5.0


class ResizeMessage(RequestBody):
    type: Literal["resize"]
    rows: int = Field(ge=1, le=65535)
    cols: int = Field(ge=1, le=65535)


class SignalMessage(RequestBody):
    type: Literal["signal"]
    signal: int = Field(ge=1, le=64)


_MESSAGES: TypeAdapter[ResizeMessage | SignalMessage] = TypeAdapter(
    Annotated[ResizeMessage | SignalMessage, Field(discriminator="type")]
)


# ----------------------------------------------------------------------------------------------------------- terminals


class _Terminal:
    """One terminal, as this server knows it."""

    def __init__(self, sandbox: Sandbox, process_id: int, *, is_own: bool) -> None:
        self.turn = anyio.Lock()
        """Held while a connection takes it over."""
        self.connection: TerminalConnection | None = None
        self._sandbox = sandbox
        self._process_id = process_id
        self._is_own = is_own
        self._ending: asyncio.Task[None] | None = None

    def end_later(self, then: Callable[[], object]) -> None:
        """No connection has it: end it after a time, if it was started as a terminal here."""
        if self._is_own and self._ending is None:
            self._ending = asyncio.create_task(self._end())
            self._ending.add_done_callback(lambda task: None if task.cancelled() else then())
        elif not self._is_own:
            then()

    def keep(self) -> None:
        """Do not end it after all."""
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None

    async def _end(self) -> None:
        await asyncio.sleep(KEPT_S)
        with suppress(AtollError):  # it has ended, or its sandbox has
            await self._sandbox.kill(self._process_id)


class Terminals:
    """The terminals of one server, and the connections that have them."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], _Terminal] = {}

    def aclose(self) -> None:
        """Terminals that wait for a connection go on: their clients may come back to the next server."""
        for terminal in self._known.values():
            terminal.keep()

    @asynccontextmanager
    async def start(self, sandbox: Sandbox, process: Process) -> AsyncIterator[TerminalConnection]:
        """A connection to a terminal that was started for it."""
        terminal = self._known[sandbox.id, process.id] = _Terminal(sandbox, process.id, is_own=True)
        connection = terminal.connection = TerminalConnection(sandbox, process, 0)
        try:
            yield connection
        finally:
            await self._release(connection)

    @asynccontextmanager
    async def resume(self, sandbox: Sandbox, process_id: int, offset: int) -> AsyncIterator[TerminalConnection]:
        """A connection to a terminal that was started before. The one that has it is closed first.

        Raises:
            ProcessNotFound: no such process is known.
            InvalidRequest: another client than a terminal has its input.
        """
        info = await find_process(sandbox, process_id)
        key = (sandbox.id, process_id)
        terminal = self._known.setdefault(key, _Terminal(sandbox, process_id, is_own=False))
        async with terminal.turn:
            if (older := terminal.connection) is not None:
                older.close(TAKEN_OVER)
                with anyio.move_on_after(_TAKE_OVER_S):
                    await older.ended.wait()
            terminal.keep()
            begin = min(offset, info.stdout_total)
            try:
                process = await sandbox.attach(process_id, stdout_offset=begin, stderr_offset=0, stdin=True)
            except BaseException:
                terminal.end_later(lambda: self._known.pop(key, None))
                raise
            self._known[key] = terminal
            connection = terminal.connection = TerminalConnection(sandbox, process, begin)
        try:
            yield connection
        finally:
            await self._release(connection)

    async def _release(self, connection: TerminalConnection) -> None:
        with anyio.CancelScope(shield=True), suppress(AtollError):
            await connection.process.detach()
        connection.ended.set()
        key = (connection.sandbox.id, connection.process.id)
        terminal = self._known.get(key)
        if terminal is None or terminal.connection is not connection:
            return
        terminal.connection = None
        if connection.has_exited:
            del self._known[key]
        else:
            terminal.end_later(lambda: self._known.pop(key, None))


# ---------------------------------------------------------------------------------------------------------- connections


class TerminalConnection:
    """A WebSocket that has a terminal."""

    def __init__(self, sandbox: Sandbox, process: Process, offset: int) -> None:
        self.sandbox = sandbox
        self.process = process
        self.has_exited = False
        """Whether its client was told of the end of the process."""
        self.ended = anyio.Event()
        self._offset = offset
        self._scope = anyio.CancelScope()
        self._code = 1000
        self._last: Mapping[str, object] | None = None

    def close(self, code: int, last: Mapping[str, object] | None = None) -> None:
        """End it with this code, after a last message."""
        if not self._scope.cancel_called:
            self._code, self._last = code, last
            self._scope.cancel()

    async def serve(self, socket: WebSocket, caller: Caller) -> None:
        """Pass bytes on until the process, the connection or the key ends."""
        left = False
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._watch_key, caller)
                    tasks.start_soon(self._receive, socket)
                    await self._send(socket)
                    self.close(1000)
        except* WebSocketDisconnect:
            left = True
        except* AtollError as errors:
            self._code, self._last = FAILED, _error(_first(errors), caller)
        if left:
            return
        # A client that does not read is not waited for: the connection is cut when this returns.
        with anyio.move_on_after(_CLOSE_S), suppress(WebSocketDisconnect):
            if self._last is not None:
                await _tell(socket, self._last)
            await socket.close(self._code)

    async def _send(self, socket: WebSocket) -> None:
        await _tell(socket, {"type": "started", "process": self.process.id, "offset": self._offset})
        async for event in self.process:
            if isinstance(event, Output):
                await socket.send_bytes(event.data)
            elif isinstance(event, Gap):
                await _tell(socket, {"type": "gap", "offset": event.offset})
            else:
                self.has_exited = True
                await _tell(socket, {"type": "exit", **event.model_dump(mode="json")})

    async def _receive(self, socket: WebSocket) -> None:
        while True:
            message = await socket.receive()
            if message["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(message.get("code", 1005))
            if (data := message.get("bytes")) is None:
                await self._control(message["text"])
            else:
                with suppress(anyio.BrokenResourceError):  # it has ended, which the other direction tells
                    await self.process.stdin.send(data)

    async def _control(self, text: str) -> None:
        try:
            message = _MESSAGES.validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise InvalidRequest(f"a text message is not one that terminals take: {where}: {first['msg']}") from None
        if isinstance(message, ResizeMessage):
            await self.process.resize(message.rows, message.cols)
        else:
            await self.process.signal(message.signal)

    async def _watch_key(self, caller: Caller) -> None:
        self.close(REVOKED, _error(await revoked(caller), caller))


async def _tell(socket: WebSocket, message: Mapping[str, object]) -> None:
    await socket.send_text(json.dumps(message))


def _error(error: Exception, caller: Caller) -> Mapping[str, object]:
    return {"type": "error", **json.loads(bytes(answer_to(error, caller.request_id).body))}


def _first(errors: BaseExceptionGroup[AtollError]) -> AtollError:
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first  # type: ignore[return-value]


# --------------------------------------------------------------------------------------------------------------- routes


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.terminals = Terminals()
    try:
        yield
    finally:
        app.state.terminals.aclose()


router = APIRouter(prefix="/api/v1/sandboxes/{sandbox}", lifespan=_lifespan)


@router.websocket("/terminal")
async def open_terminal(
    socket: WebSocket,
    caller: Executor,
    sandbox: SandboxPath,
    rows: Annotated[int, Query(ge=1, le=65535)] = 24,
    cols: Annotated[int, Query(ge=1, le=65535)] = 80,
    command: str | None = None,
    user: str | None = None,
    cwd: str | None = None,
    process: Annotated[int | None, Query(ge=1, le=MAX_INTEGER)] = None,
    offset: Annotated[int, Query(ge=0, le=MAX_INTEGER)] = 0,
) -> None:
    """A terminal with a login shell, or `command`; or, with `process`, one that was started before."""
    terminals: Terminals = socket.app.state.terminals
    for name in socket.query_params:
        if name not in _PARAMETERS:
            raise InvalidRequest(f"unknown query parameter {name[:100]!r} (allowed: {', '.join(_PARAMETERS)})")
    opened = await find(caller, sandbox)
    if process is None:
        started = await opened.spawn(LOGIN_SHELL if command is None else command, user=user, cwd=cwd, pty=(rows, cols))
        holding = terminals.start(opened, started)
    else:
        holding = terminals.resume(opened, process, offset)
    async with holding as connection:
        await caller.record(socket, "terminal", 101)
        await socket.accept(PROTOCOL if PROTOCOL in socket.scope["subprotocols"] else None)
        if process is not None and {"rows", "cols"} <= {*socket.query_params}:
            await connection.process.resize(rows, cols)
        await connection.serve(socket, caller)
