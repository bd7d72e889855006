"""MCP over two byte streams, one message per line.

Owns how lines become messages, the errors for lines that are not messages, and the limits for a client that does not
read. Not here: the streams themselves (the command line passes its standard streams) and the client session
(`session.py`). Used by `atoll mcp`.

The SDK's own reader of standard input is a thread that cannot be cancelled; this is none.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import mcp_types as types
import pydantic_core
from mcp.server.lowlevel import Server
from mcp.shared.message import ServerMessageMetadata, SessionMessage
from pydantic import ValidationError

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""The largest message, on streams and over HTTP."""
MAX_LAST_ANSWERS_S = 2
"""How long a client has to read the last responses after it closed its side."""
MAX_PENDING_REQUESTS = 256
"""Requests without a response, or whose response the client has not read. Further requests are refused."""
MAX_UNREAD_S = 10
"""How long a message may wait because the client does not read responses. After that its session ends."""
_log = logging.getLogger(__name__)


async def serve(server: Server[Any], received: AsyncIterator[bytes], send: Callable[[bytes], Awaitable[None]]) -> None:
    """Serve one client until its input ends. Calls that still run then are cancelled.

    The number of pending messages is limited: the session of a client that does not read its responses is ended.

    Raises:
        what `received` and `send` raise, which ends the session.
    """
    to_server, inward = anyio.create_memory_object_stream[SessionMessage | Exception]()
    outward, from_server = anyio.create_memory_object_stream[SessionMessage]()
    errors = outward.clone()
    pending = 0

    async def answered() -> None:
        nonlocal pending
        pending -= 1

    async def receive_messages() -> None:
        nonlocal pending
        async with to_server, errors:
            async for line in _lines(received):
                message = _read(line)
                if isinstance(message, types.JSONRPCRequest) and pending >= MAX_PENDING_REQUESTS:
                    why = f"{MAX_PENDING_REQUESTS} requests are pending; read responses before you send more"
                    message = _error_response(message.id, types.INTERNAL_ERROR, why)
                pending += isinstance(message, types.JSONRPCRequest | _ErrorResponse)
                with anyio.move_on_after(MAX_UNREAD_S) as unread:
                    if isinstance(message, _ErrorResponse):
                        await errors.send(SessionMessage(message))
                    elif message is not None:
                        metadata = ServerMessageMetadata(on_request_unanswered=answered)
                        await to_server.send(SessionMessage(message, metadata))
                if unread.cancelled_caught:
                    _log.warning("the client sends requests but does not read responses; its session is ended")
                    tasks.cancel_scope.cancel()

    all_sent = anyio.Event()

    async def send_messages() -> None:
        async with from_server:
            async for each in from_server:
                await send(each.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                if isinstance(each.message, types.JSONRPCResponse | types.JSONRPCError):
                    await answered()
        all_sent.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send_messages)
        tasks.start_soon(receive_messages)
        await server.run(inward, outward, server.create_initialization_options())
        with anyio.move_on_after(MAX_LAST_ANSWERS_S):  # a client that reads nothing must not keep its sandboxes
            await all_sent.wait()
        tasks.cancel_scope.cancel()


async def _lines(received: AsyncIterator[bytes]) -> AsyncIterator[bytes | None]:
    """Lines, and None for each line that is longer than `MAX_MESSAGE_BYTES`."""
    kept, skipping = bytearray(), False
    async for data in received:
        *ended, rest = data.split(b"\n")
        for piece in ended:
            kept += piece
            if not skipping:
                yield bytes(kept) if len(kept) <= MAX_MESSAGE_BYTES else None
            kept.clear()
            skipping = False
        if not skipping:
            kept += rest
            if len(kept) > MAX_MESSAGE_BYTES:
                yield None
                kept.clear()
                skipping = True
    if kept and not skipping:
        yield bytes(kept)


class _ErrorResponse(types.JSONRPCError):
    """The error response for a message that is not accepted. A class of its own, because clients send errors too."""


def _read(line: bytes | None) -> types.JSONRPCMessage | _ErrorResponse | None:
    """The message in a line, None for an empty line, or the error response for an invalid one."""
    if line is None:
        return _error_response(None, types.INVALID_REQUEST, f"the message is larger than {MAX_MESSAGE_BYTES >> 20} MiB")
    if not line.strip():
        return None
    try:
        message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValidationError:
        try:
            parsed = pydantic_core.from_json(line)
        except ValueError as error:
            return _error_response(None, types.PARSE_ERROR, f"a message must be JSON on one line: {error}")
        why = "the message is JSON, but not a request, response or notification"
        return _error_response(request_id(parsed), types.INVALID_REQUEST, why)
    # With an invalid id it looks like a notification, and the client would wait for ever.
    if isinstance(message, types.JSONRPCNotification) and b'"id"' in line and "id" in pydantic_core.from_json(line):
        return _error_response(None, types.INVALID_REQUEST, "the id of a request must be a string or an integer")
    return message


def request_id(message: object) -> str | int | None:
    """The id for a response to this message. None: it has no valid id."""
    id = message.get("id") if isinstance(message, dict) else None
    return id if isinstance(id, str | int) and not isinstance(id, bool) else None


def _error_response(id: str | int | None, code: int, message: str) -> _ErrorResponse:
    return _ErrorResponse(jsonrpc="2.0", id=id, error=types.ErrorData(code=code, message=message))
