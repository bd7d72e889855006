"""A connection to a guest through a server: a WebSocket whose binary messages are frames of the guest protocol.

Owns the client's end of a tunnel: the handshake and its refusal, keep-alive, and the facts that come as text messages.
Written on an asyncio protocol, not on a library's connection: what comes is passed on in the event loop's own callback,
and what is sent is written at once. Not here: the frames (`runtime/guest/`), and the server's end
(`surfaces/rest/tunnel.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

import anyio
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus, InvalidURI
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.uri import parse_uri

from atoll.client.failures import error_of, unreachable
from atoll.contract.errors import InvalidRequest
from atoll.runtime.guest.connection import DirectStream

OPEN_S = 60.0
"""How long the handshake may take. The server wakes a sleeping sandbox meanwhile."""
PING_S = 20.0
"""How often the server is asked for an answer, and how long it may take."""
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
_MAX_UNREAD_BYTES = 4 * 1024 * 1024
_HIGH_WATER_BYTES = 1024 * 1024

Fact = Mapping[str, object]


class Tunnel(DirectStream, asyncio.Protocol):
    """One WebSocket. Made by `open_tunnel`."""

    def __init__(self, protocol: ClientProtocol, headers: Mapping[str, str], on_fact: Callable[[Fact], None]) -> None:
        self._protocol = protocol
        self._headers = headers
        self._on_fact = on_fact
        self._transport: asyncio.Transport | None = None
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take: Callable[[bytes], None] | None = None
        self._lose: Callable[[], None] | None = None
        self._batch: list[bytes | memoryview] | None = None
        self._text: bytearray | None = None
        """Of a text message that is not complete. None: a binary one."""
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._changed = anyio.Event()
        self._lost = False
        self._writable = anyio.Event()
        self._writable.set()
        self._timer: asyncio.TimerHandle | None = None
        self._ping: bytes | None = None

    # ---- for `open_tunnel` ----

    async def opened(self) -> None:
        """
        Raises:
            AtollError: the server refused it; the error that it sent.
        """
        await self._opened
        self._timer = asyncio.get_running_loop().call_later(PING_S, self._send_ping)

    # ---- DirectStream ----

    def send_now(self, *parts: bytes | memoryview) -> bool:
        if self._lost or not self._writable.is_set():
            return False
        if self._batch is not None:
            self._batch.extend(parts)
            return True
        self._write_message(parts[0] if len(parts) == 1 else b"".join(parts))
        # The first goes at once; what else this round of the event loop brings is one message.
        self._batch = []
        asyncio.get_running_loop().call_soon(self._send_batch)
        return True

    def _send_batch(self) -> None:
        batch, self._batch = self._batch, None
        if batch and not self._lost:
            self._write_message(b"".join(batch))

    def deliver(self, take: Callable[[bytes], None], lose: Callable[[], None]) -> None:
        self._take, self._lose = take, lose
        while self._unread:
            take(self._unread.popleft())
        if self._transport is not None and not self._lost:
            self._transport.resume_reading()
        if self._lost:
            lose()

    async def send(self, item: bytes) -> None:
        await self._writable.wait()
        if self._lost:
            raise anyio.BrokenResourceError
        self._send_batch()
        self._write_message(item)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while not self._unread:
            if self._lost:
                raise anyio.EndOfStream
            self._changed = anyio.Event()
            await self._changed.wait()
        data = self._unread.popleft()
        if len(data) > max_bytes:
            self._unread.appendleft(data[max_bytes:])
            data = data[:max_bytes]
        self._unread_bytes -= len(data)
        if self._unread_bytes <= _MAX_UNREAD_BYTES and self._transport is not None and not self._lost:
            self._transport.resume_reading()
        return data

    async def send_eof(self) -> None:
        raise NotImplementedError("a tunnel ends in both directions at once")

    async def aclose(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._send_batch()
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(1000)
            self._flush()
        # What is still queued are frames of streams that the keeper resets anyway.
        if transport.get_write_buffer_size():
            transport.abort()
        else:
            transport.close()
        self._on_lost()

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        request = self._protocol.connect()
        request.headers.update(self._headers)
        self._protocol.send_request(request)
        self._flush()

    def data_received(self, data: bytes) -> None:
        protocol = self._protocol
        protocol.receive_data(data)
        for event in protocol.events_received():
            if isinstance(event, Frame):
                self._on_frame(event)
            elif isinstance(event, Response):
                self._on_response()
        self._flush()  # pongs, the answer to a close
        if protocol.parser_exc is not None or protocol.close_expected():
            self._end()

    def eof_received(self) -> bool:
        self._protocol.receive_eof()
        self._on_response()  # a refusal ends with the connection
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._opened.done():
            self._opened.set_exception(unreachable(exc))
        self._on_lost()

    def pause_writing(self) -> None:
        self._writable = anyio.Event()

    def resume_writing(self) -> None:
        self._writable.set()

    # ---- parts ----

    def _on_response(self) -> None:
        if self._opened.done():
            return
        failure = self._protocol.handshake_exc
        if failure is None:
            self._opened.set_result(None)
        elif isinstance(failure, InvalidStatus):
            answer = failure.response
            self._opened.set_exception(error_of(answer.status_code, bytes(answer.body or b"")))
        else:
            self._opened.set_exception(unreachable(failure))

    def _on_frame(self, frame: Frame) -> None:
        if frame.opcode in (Opcode.BINARY, Opcode.TEXT, Opcode.CONT):
            if frame.opcode is not Opcode.CONT:
                self._text = bytearray() if frame.opcode is Opcode.TEXT else None
            if self._text is None:
                self._on_bytes(bytes(frame.data))  # a part of a message is as good as the whole
                return
            self._text += frame.data
            if frame.fin:
                self._on_text(bytes(self._text))
        elif frame.opcode is Opcode.PONG and bytes(frame.data) == self._ping:
            self._ping = None

    def _on_bytes(self, data: bytes) -> None:
        if self._take is not None:
            self._take(data)
            return
        self._unread.append(data)
        self._unread_bytes += len(data)
        if self._unread_bytes > _MAX_UNREAD_BYTES and self._transport is not None:
            self._transport.pause_reading()
        self._changed.set()

    def _on_text(self, text: bytes) -> None:
        try:
            fact = json.loads(text)
        except ValueError:
            return  # of a newer server
        if isinstance(fact, dict):
            self._on_fact(fact)

    def _write_message(self, data: bytes | memoryview) -> None:
        if self._protocol.state is State.OPEN:
            self._protocol.send_binary(data)
            self._flush()

    def _flush(self) -> None:
        parts = self._protocol.data_to_send()
        if parts and self._transport is not None and not self._transport.is_closing():
            if len(parts) == 1:
                self._transport.write(parts[0])
            else:
                self._transport.write(b"".join(parts))

    def _send_ping(self) -> None:
        if self._lost or self._protocol.state is not State.OPEN:
            return
        if self._ping is not None:
            self._end()
            return
        self._ping = os.urandom(4)
        self._protocol.send_ping(self._ping)
        self._flush()
        self._timer = asyncio.get_running_loop().call_later(PING_S, self._send_ping)

    def _end(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._on_lost()

    def _on_lost(self) -> None:
        if self._lost:
            return
        self._lost = True
        if self._timer is not None:
            self._timer.cancel()
        self._writable.set()
        self._changed.set()
        if self._lose is not None:
            self._lose()


@cache
def _usual_trust() -> ssl.SSLContext:
    """The certificate authorities that this machine trusts. Reading them takes 30 ms."""
    return ssl.create_default_context()


async def open_tunnel(
    url: str, headers: Mapping[str, str], trust: ssl.SSLContext | None, on_fact: Callable[[Fact], None]
) -> Tunnel:
    """A tunnel to the guest of a sandbox, at the WebSocket `url`. `on_fact` gets what the server says besides.

    Raises:
        AtollError: the server refused it: the error that it sent, such as `SandboxNotFound` or `SandboxDied`.
        ServerUnavailable: the server cannot be reached.
    """
    try:
        uri = parse_uri(url)
    except InvalidURI as error:
        raise InvalidRequest(f"{url!r} is no address of a server") from error
    loop = asyncio.get_running_loop()
    protocol = ClientProtocol(uri, max_size=MAX_MESSAGE_BYTES)
    secure: dict[str, Any] = {"ssl": trust or _usual_trust(), "server_hostname": uri.host} if uri.secure else {}
    tunnel = Tunnel(protocol, headers, on_fact)
    try:
        with anyio.fail_after(OPEN_S):
            await loop.create_connection(lambda: tunnel, uri.host, uri.port, **secure)
            await tunnel.opened()
    except (OSError, TimeoutError) as error:
        await tunnel.aclose()
        if hasattr(error, "code"):
            raise
        raise unreachable(error) from error
    except BaseException:
        await tunnel.aclose()
        raise
    return tunnel
