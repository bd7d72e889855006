"""MCP over two streams of bytes, a message a line.

Knows how lines become messages, and what is said of those that are none. Refuses to know whose streams they are: the
command line hands over its own. The SDK's reader of standard input is a thread that nobody can end; this is none.
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
"""Of one message, however it comes."""
MAX_LAST_ANSWERS_S = 2
"""How long answers may take to be read when nothing is asked any more."""
MAX_PENDING_REQUESTS = 256
"""Requests that wait for their answers, or whose answers wait to be read. More are refused."""
MAX_UNREAD_S = 10
"""How long a message may wait to be taken because a client reads no answers. It is not served any more then."""
_log = logging.getLogger(__name__)


async def serve(server: Server[Any], received: AsyncIterator[bytes], send: Callable[[bytes], Awaitable[None]]) -> None:
    """Serve one client until there is nothing more to be received. Calls that still run then are cancelled.

    What waits for the client, in number, is bounded: one that does not read its answers is not served for long.

    Raises:
        whatever `received` and `send` raise: the session is over then.
    """
    to_server, inward = anyio.create_memory_object_stream[SessionMessage | Exception]()
    outward, from_server = anyio.create_memory_object_stream[SessionMessage]()
    complaints = outward.clone()
    waiting = 0

    async def settle() -> None:
        nonlocal waiting
        waiting -= 1

    async def take() -> None:
        nonlocal waiting
        async with to_server, complaints:
            async for line in _lines(received):
                message = _read(line)
                if isinstance(message, types.JSONRPCRequest) and waiting >= MAX_PENDING_REQUESTS:
                    why = f"{MAX_PENDING_REQUESTS} requests are pending; read responses before you send more"
                    message = _complaint(message.id, types.INTERNAL_ERROR, why)
                waiting += isinstance(message, types.JSONRPCRequest | _Complaint)
                with anyio.move_on_after(MAX_UNREAD_S) as unread:
                    if isinstance(message, _Complaint):
                        await complaints.send(SessionMessage(message))
                    elif message is not None:
                        settling = ServerMessageMetadata(on_request_unanswered=settle)
                        await to_server.send(SessionMessage(message, settling))
                if unread.cancelled_caught:
                    _log.warning("the client asks and reads no answers; its session is ended")
                    tasks.cancel_scope.cancel()

    given = anyio.Event()

    async def give() -> None:
        async with from_server:
            async for each in from_server:
                await send(each.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                if isinstance(each.message, types.JSONRPCResponse | types.JSONRPCError):
                    await settle()
        given.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(give)
        tasks.start_soon(take)
        await server.run(inward, outward, server.create_initialization_options())
        with anyio.move_on_after(MAX_LAST_ANSWERS_S):  # a client that reads nothing any more would hold its sandboxes
            await given.wait()
        tasks.cancel_scope.cancel()


async def _lines(received: AsyncIterator[bytes]) -> AsyncIterator[bytes | None]:
    """Lines, and None for each that is longer than a message may be."""
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


class _Complaint(types.JSONRPCError):
    """What is answered to a message that is not taken. Errors that a client sends are other ones."""


def _read(line: bytes | None) -> types.JSONRPCMessage | _Complaint | None:
    """The message in a line, None of an empty one, or what is answered to one that is no message."""
    if line is None:
        return _complaint(None, types.INVALID_REQUEST, f"a message may have {MAX_MESSAGE_BYTES >> 20} MiB")
    if not line.strip():
        return None
    try:
        message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValidationError:
        try:
            parsed = pydantic_core.from_json(line)
        except ValueError as error:
            return _complaint(None, types.PARSE_ERROR, f"a message is JSON on one line, and this is none: {error}")
        why = "this is JSON, but no request, answer or notification"
        return _complaint(request_id(parsed), types.INVALID_REQUEST, why)
    # With an id that is none it looks like a notification, and who sent it would wait for ever.
    if isinstance(message, types.JSONRPCNotification) and b'"id"' in line and "id" in pydantic_core.from_json(line):
        return _complaint(None, types.INVALID_REQUEST, "the id of a request is a string or a whole number")
    return message


def request_id(message: object) -> str | int | None:
    """What an answer to this message is to say it answers. None: nothing in it can be that."""
    id = message.get("id") if isinstance(message, dict) else None
    return id if isinstance(id, str | int) and not isinstance(id, bool) else None


def _complaint(id: str | int | None, code: int, message: str) -> _Complaint:
    return _Complaint(jsonrpc="2.0", id=id, error=types.ErrorData(code=code, message=message))
