"""Connect RPC with JSON: how calls of E2B's SDKs are read, answered, kept alive and ended.

Owns the protocol: unary calls, streams of the server and of the client, frames, time-outs, error codes, and which error
of Atoll has which code. Not here: what calls do (`processes.py`, `filesystem.py`), and who may make them
(`routing.py`). There is no compression and no protobuf: the SDKs use neither.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from atoll.contract.errors import AtollError, SandboxDied, SandboxNotFound
from atoll.runtime.sandbox import Sandbox
from atoll.surfaces.door.connection import DISCONNECT
from atoll.surfaces.e2b.control import E2bBody, require_known
from atoll.surfaces.rest.errors import answer_to, request_id

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
STREAM_TYPE = "application/connect+json"
PING_HEADER = "keepalive-ping-interval"
_DEFAULT_PING_S = 90.0
_END_FLAG = 2
_WATCH_AFTER_S = 0.05
"""A short call ends before its client could leave."""
_HTTP_STATUS: Mapping[str, int] = {
    "canceled": 499,
    "unknown": 500,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "unimplemented": 501,
    "internal": 500,
    "unavailable": 503,
    "unauthenticated": 401,
}
_CODES: Mapping[str, str] = {
    "user_not_found": "unauthenticated",
    "path_not_found": "not_found",
    "process_not_found": "not_found",
    "path_exists": "already_exists",
    "path_is_directory": "invalid_argument",
    "path_not_directory": "invalid_argument",
    "permission_denied": "permission_denied",
    "disk_full": "resource_exhausted",
    "rate_limited": "resource_exhausted",
    "quota_exceeded": "resource_exhausted",
    "exec_timeout": "deadline_exceeded",
    "sandbox_died": "unavailable",
    "sandbox_not_found": "unavailable",
    "sandbox_shutdown": "unavailable",
    "guest_unresponsive": "unavailable",
    "guest_protocol_error": "unavailable",
}
"""Of Atoll's errors. One that is not here is `invalid_argument` if the caller can change it, else `internal`."""
_BY_STATUS: Mapping[int, str] = {400: "invalid_argument", 404: "not_found", 501: "unimplemented"}
RpcMessage = dict[str, Any]
Parsed = TypeVar("Parsed", bound=E2bBody)


class RpcError(Exception):
    """A call that fails with a code of Connect."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True)
class RpcCall:
    """One call: the sandbox that it is for, and what its headers say."""

    sandbox: Sandbox
    user: str | None
    """Unset: the sandbox's own."""
    timeout_s: float | None
    """Unset: none."""
    ping_s: float
    """After so long without an event, one is sent that says nothing."""


RpcUnary = Callable[[RpcCall, bytes], Awaitable[RpcMessage]]
RpcServerStream = Callable[[RpcCall, bytes], AsyncGenerator[RpcMessage, None]]
RpcClientStream = Callable[[RpcCall, AsyncIterator[bytes]], Awaitable[RpcMessage]]


@dataclass(frozen=True)
class RpcMethods:
    """The methods of a service, by their paths."""

    unary: Mapping[str, RpcUnary]
    streams: Mapping[str, RpcServerStream]
    client_streams: Mapping[str, RpcClientStream]

    def __or__(self, other: RpcMethods) -> RpcMethods:
        return RpcMethods(
            {**self.unary, **other.unary},
            {**self.streams, **other.streams},
            {**self.client_streams, **other.client_streams},
        )

    def __contains__(self, path: str) -> bool:
        return path in self.unary or path in self.streams or path in self.client_streams

    async def serve(self, sandbox: Sandbox, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call, whatever becomes of it."""
        request = Request(scope, receive)
        path = scope["path"]
        is_unary = path in self.unary
        try:
            call = read_call(request, sandbox)
            _require_type(request, "application/json" if is_unary else STREAM_TYPE)
            if is_unary:
                with anyio.fail_after(call.timeout_s):
                    answer = await self.unary[path](call, await request.body())
                await JSONResponse(answer)(scope, receive, send)
                return
            if path in self.client_streams:
                with anyio.fail_after(call.timeout_s):
                    answer = await self.client_streams[path](call, _frames(request))
                body = frame(answer) + frame({}, _END_FLAG)
                await Response(body, media_type=STREAM_TYPE)(scope, receive, send)
                return
            body = await request.body()
        except ClientDisconnect:
            return
        except (AtollError, RpcError, HTTPException, TimeoutError) as error:
            await _refuse(error, scope, receive, send, is_unary=is_unary)
            return
        await _stream(self.streams[path], call, _only_frame(body), scope, receive, send)


def parse(kind: type[Parsed], body: bytes) -> Parsed:
    """A message.

    Raises:
        RpcError: it is not one, or a field has a wrong value.
        HTTPException: it asks for something that is not known here.
    """
    try:
        found = kind.model_validate_json(body or b"{}", strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise RpcError("invalid_argument", f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    require_known(found)
    return found


def _require_type(request: Request, expected: str) -> None:
    if request.headers.get("content-type", "").partition(";")[0].strip() != expected:
        raise RpcError("unimplemented", f"this method takes {expected}, and no other encoding")


def read_call(request: Request, sandbox: Sandbox) -> RpcCall:
    """What the headers of a request say.

    Raises:
        RpcError: one of them is not valid.
    """
    milliseconds = request.headers.get("connect-timeout-ms")
    if milliseconds is not None and not (milliseconds.isdecimal() and len(milliseconds) <= 10):
        raise RpcError("invalid_argument", "Connect-Timeout-Ms is not a number of milliseconds")
    ping = request.headers.get(PING_HEADER, "")
    ping_s = float(ping) if ping.isdecimal() and 0 < len(ping) <= 4 and int(ping) else _DEFAULT_PING_S
    timeout_s = int(milliseconds) / 1000 if milliseconds and int(milliseconds) else None
    return RpcCall(sandbox, basic_user(request), timeout_s, ping_s)


def basic_user(request: Request) -> str | None:
    """The user of `Authorization: Basic`. None: it is not said.

    Raises:
        RpcError: it cannot be read.
    """
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[0] or None
    except (binascii.Error, UnicodeDecodeError):
        raise RpcError("unauthenticated", "the Authorization header cannot be read") from None


def rpc_error(error: Exception, request_id: str) -> RpcError:
    """The error of Connect for an exception."""
    if isinstance(error, RpcError):
        return error
    if isinstance(error, TimeoutError) and not isinstance(error, AtollError):
        return RpcError("deadline_exceeded", "context deadline exceeded")
    answer = answer_to(error, request_id)
    said = json.loads(bytes(answer.body))
    code = _CODES.get(said["code"]) or _BY_STATUS.get(answer.status_code)
    return RpcError(code or ("internal" if answer.status_code >= 500 else "invalid_argument"), said["message"])


def frame(message: RpcMessage, flag: int = 0) -> bytes:
    data = json.dumps(message, separators=(",", ":")).encode()
    return struct.pack(">BI", flag, len(data)) + data


# -------------------------------------------------------------------------------------------------------------- streams


async def _stream(
    method: RpcServerStream, call: RpcCall, message: bytes | RpcError, scope: Scope, receive: Receive, send: Send
) -> None:
    """Send what a method yields. A client that leaves cancels it.

    If the sandbox ends meanwhile, the response is cut off, as when E2B's daemon ends with its sandbox: SDKs ask for the
    sandbox's health then, and say that it is gone.
    """
    headers = [(b"content-type", STREAM_TYPE.encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    last: RpcMessage = {}
    with anyio.CancelScope() as cancelling:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            cancelling.cancel()

        watching: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        timer = loop.call_later(_WATCH_AFTER_S, lambda: watching.append(loop.create_task(watch())))
        try:
            if isinstance(message, RpcError):
                raise message
            async with aclosing(method(call, message)) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": frame(event), "more_body": True})
        except (SandboxDied, SandboxNotFound):
            scope["extensions"][DISCONNECT]["now"]()
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        except (AtollError, RpcError, HTTPException, TimeoutError) as error:
            said = rpc_error(error, request_id(scope))
            last = {"error": {"code": said.code, "message": said.message}}
        finally:
            timer.cancel()
            for task in watching:
                task.cancel()
        await send({"type": "http.response.body", "body": frame(last, _END_FLAG), "more_body": False})


async def _refuse(error: Exception, scope: Scope, receive: Receive, send: Send, *, is_unary: bool) -> None:
    said = rpc_error(error, request_id(scope))
    body = {"code": said.code, "message": said.message}
    if is_unary:
        await JSONResponse(body, _HTTP_STATUS[said.code])(scope, receive, send)
    else:
        await Response(frame({"error": body}, _END_FLAG), media_type=STREAM_TYPE)(scope, receive, send)


def _only_frame(body: bytes) -> bytes | RpcError:
    if len(body) < 5 or body[0] != 0 or len(body) != 5 + int.from_bytes(body[1:5]):
        return RpcError("invalid_argument", "the body is not one message, uncompressed, in an envelope")
    return body[5:]


async def _frames(request: Request) -> AsyncIterator[bytes]:
    """The messages of a client's stream, as they come.

    Raises:
        RpcError: one is too large, compressed, or cut off.
    """
    buffer = bytearray()
    async for chunk in request.stream():
        buffer += chunk
        while len(buffer) >= 5:
            size = int.from_bytes(buffer[1:5])
            if buffer[0] & 1 or size > MAX_MESSAGE_BYTES:
                raise RpcError(
                    "invalid_argument", f"a message is compressed, or has more than {MAX_MESSAGE_BYTES} bytes"
                )
            if len(buffer) < 5 + size:
                break
            flag, message = buffer[0], bytes(buffer[5 : 5 + size])
            del buffer[: 5 + size]
            if not flag & _END_FLAG:
                yield message
    if buffer:
        raise RpcError("invalid_argument", "the stream ends within a message")


async def next_or_ping(events: Any, ping_s: float) -> Any:
    """The next of some events. None: nothing happened for so long.

    Raises:
        StopAsyncIteration: there are no more.
    """
    with suppress(TimeoutError), anyio.fail_after(ping_s):
        return await events.__anext__()
    return None
