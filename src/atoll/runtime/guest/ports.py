"""Ports inside a sandbox: connect to one, or listen on one.

Owns the operations DIAL, LISTEN and ACCEPT of the protocol and the byte connection that they give. Not here: how bytes
travel (`stream.py`, `connection.py`), which clients of the host may reach a port (`previews/`), and the proxy behind
the egress port (`egress/`). Used by `sandbox.py`, `previews/` and `egress/`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Self

import anyio

from atoll.contract.errors import InvalidRequest, PortRefused, SandboxError
from atoll.contract.protocol import EventKind, Op, Tag, encode_fields
from atoll.runtime.guest.connection import GuestConnection, OpenStream
from atoll.runtime.guest.stream import ChannelStream, Stream

_SENT, _RECEIVED = 0, 1
_HOSTS = frozenset({"127.0.0.1", "::1"})


class PortConnection(ChannelStream):
    """A connection to a port inside, or from a client inside.

    `aclose` abandons it: what was sent and not yet read by the other side may be lost. To be sure that all arrived,
    call `send_eof` and receive to the end first, or call `finish`.
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream, receive=_RECEIVED, send=_SENT)

    async def _next(self) -> bytes:
        try:
            return await super()._next()
        except anyio.EndOfStream:
            if self._stream.problem() is not None:
                raise anyio.BrokenResourceError from None
            raise

    def is_quiet(self) -> bool:
        """Whether it is open both ways, as far as this side knows, and no bytes wait to be received."""
        return not self._closed and not self._rest and self._stream.is_quiet(_RECEIVED)

    async def finish(self, within_s: float) -> None:
        """Close it when the other side has read all that was sent and has closed its own direction, or after so long.

        What the other side still sends is dropped.
        """
        with anyio.move_on_after(within_s):
            try:
                await self.send_eof()
                while True:
                    await self.receive()
            except anyio.EndOfStream:
                with contextlib.suppress(SandboxError):
                    await self._stream.ended()
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                pass
        await self.aclose()

    def abort(self) -> None:
        self._closed = True
        self._stream.send_eof(_SENT)
        self._stream.reset()


class Listener:
    """A port inside on which this process listens: an async iterator of connections."""

    def __init__(self, port: int, stream: Stream, opener: OpenStream) -> None:
        self.port = port
        self._stream = stream
        self._open = opener

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PortConnection:
        """The next connection. One that was closed before it could be accepted is skipped.

        Raises:
            SandboxDied, GuestProtocolError: the sandbox is gone.
        """
        while (event := await self._stream.next_event(EventKind.ACCEPTED)) is not None:
            with self._stream.fail_on_violation():
                connection = event.count(Tag.CONN)
            try:
                fields = encode_fields(((Tag.CONN, connection),))
                return await _connected(self._open, Op.ACCEPT, fields, "a connection")
            except PortRefused:
                continue
        raise StopAsyncIteration


async def dial(opener: OpenStream, port: int, host: str) -> PortConnection:
    """Connect to a port inside.

    Raises:
        PortRefused: nothing listens there.
        InvalidRequest: the port or the host is wrong.
    """
    fields = encode_fields(((Tag.PORT, _check_port(port, 1)), (Tag.HOST, _check_host(host))))
    return await _connected(opener, Op.DIAL, fields, f"{host}:{port}")


def listen(opener: OpenStream, port: int, host: str) -> AbstractAsyncContextManager[Listener]:
    """Listen on a port inside; 0 is any that is free. Entering raises `PortRefused` if the port is taken.

    Raises:
        InvalidRequest: the port or the host is wrong.
    """
    fields = encode_fields(((Tag.PORT, _check_port(port, 0)), (Tag.HOST, _check_host(host))))
    return _listening(opener, fields, f"{host}:{port}")


def listen_idle(connection: GuestConnection, port: int) -> AbstractAsyncContextManager[Listener]:
    """Listen over this very connection, without counting as use of the sandbox: it may pause or sleep all the same."""
    return _listening(connection.open, encode_fields(((Tag.PORT, port), (Tag.IDLE, 1))), f"port {port}")


@asynccontextmanager
async def _listening(opener: OpenStream, fields: bytes, what: str) -> AsyncIterator[Listener]:
    async with await opener(Op.LISTEN, fields, receive=()) as stream:
        event = await stream.next_event(EventKind.LISTENING)
        if event is None:
            raise PortRefused(f"cannot listen on {what} inside: {_reason(stream)}")
        with stream.fail_on_violation():
            port = event.within(Tag.PORT, 1, 65535)
        yield Listener(port, stream, opener)


async def _connected(opener: OpenStream, op: Op, fields: bytes, what: str) -> PortConnection:
    stream = await opener(op, fields, receive=(), send=(_SENT,), dedicated=(_RECEIVED,))
    connected = False
    try:
        connected = await stream.next_event(EventKind.CONNECTED) is not None
    finally:
        if not connected:
            stream.reset()
    if connected:
        return PortConnection(stream)
    raise PortRefused(f"{what} inside: {_reason(stream)}; is something listening there?")


def _reason(stream: Stream) -> str:
    problem = stream.problem()
    return problem.reason if problem else "it ended"


def _check_port(port: int, low: int) -> int:
    if not low <= port <= 65535:
        raise InvalidRequest(f"the port is {port}; it may be {low} to 65535")
    return port


def _check_host(host: str) -> str:
    if host not in _HOSTS:
        raise InvalidRequest(f"the host is {host!r}; a sandbox has '127.0.0.1' and '::1'")
    return host
