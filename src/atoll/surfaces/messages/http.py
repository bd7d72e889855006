"""The Messages API over HTTP: an ASGI app with `POST /v1/messages`, and its server.

Owns requests and answers as HTTP has them: body limits, request ids, event streams, the end of a turn whose client is
gone, and the one function that makes errors of ours errors of this API (`_translated`). Not here: what a request is
answered with (`turn.py`), and who may send one (`surfaces/door/`). Used by programs that mount `app`.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc
from pydantic import SecretStr
from pydantic_ai import exceptions
from pydantic_ai.models import Model
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from atoll.agents import models
from atoll.agents.loop import DEFAULT_STEPS
from atoll.code.executor import CodeConfig
from atoll.contract.errors import AtollError, ModelFailed, ModelUnavailable
from atoll.runtime.interface import Engine
from atoll.surfaces import door
from atoll.surfaces.door import LOOPBACK, HttpGuard
from atoll.surfaces.messages.answer import StreamedAnswer, WholeAnswer
from atoll.surfaces.messages.containers import Containers, owner_of
from atoll.surfaces.messages.turn import MessagesTurn
from atoll.surfaces.messages.wire import ApiError, MessagesRequest

PATH = "/v1/messages"
MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_CONTAINERS = 64
MAX_CONTAINERS_PER_KEY = 32
DEFAULT_IDLE_S = 300.0
"""A container that no request used for so long ends."""
CALL_TIMEOUT_S = 270.0
"""A call by code that the client did not answer for so long is a TimeoutError in the code."""
TOKEN_VARIABLE = "ATOLL_MESSAGES_TOKEN"  # noqa: S105 - the name of a variable
KEY_HEADER = "x-api-key"
_PING_S = 10.0
_GRACE_S = 5
_VERSION = re.compile(r"\d{4}-\d{2}-\d{2}")
_log = logging.getLogger(__name__)


def app(
    engine: Engine,
    model: str | Model,
    *,
    config: CodeConfig | None = None,
    token: SecretStr | Sequence[SecretStr] | None = None,
    hosts: Sequence[str] | None = LOOPBACK,
    containers: int = MAX_CONTAINERS,
    containers_per_key: int = MAX_CONTAINERS_PER_KEY,
    idle_s: float = DEFAULT_IDLE_S,
    call_timeout_s: float = CALL_TIMEOUT_S,
    steps: int = DEFAULT_STEPS,
) -> Starlette:
    """The ASGI app, at `/v1/messages`. The end of its lifespan ends all containers: a program that mounts it has to run
    `app.router.lifespan_context(app)`.

    `model` answers, whichever model a request names. `config` is what code may use. `hosts` and `token` are those of
    `HttpGuard`; with several tokens each client has its own containers. Without a token, clients are told apart by the
    key that they send. `steps` is how often the model is asked in one request, after which the client has to continue.

    Raises:
        InvalidRequest: as `HttpGuard` and `models.resolve`; or the language of `config` is not Python.
    """
    guard = HttpGuard(hosts, token, token_variable=TOKEN_VARIABLE, key_header=KEY_HEADER)
    held = Containers(
        engine,
        config or CodeConfig(),
        idle_s=idle_s,
        call_timeout_s=call_timeout_s,
        limit=containers,
        limit_per_owner=containers_per_key,
    )
    endpoint = MessagesEndpoint(models.resolve(model), held, guard, steps=steps)
    made = Starlette(
        routes=[Route(PATH, endpoint=endpoint), Route("/{path:path}", endpoint=_nowhere)],
        lifespan=lambda _app: endpoint.running(),
    )
    made.state.endpoint = endpoint
    return made


async def listen(
    engine: Engine,
    model: str | Model,
    address: str,
    port: int,
    *,
    token: SecretStr | Sequence[SecretStr] | None = None,
    on_ready: Callable[[str], None] = lambda _url: None,
    **options: Any,
) -> None:
    """Serve the app at an address until this is cancelled. `on_ready` receives the URL, which is a client's `base_url`;
    the rest is as in `app`.

    Raises:
        InvalidRequest: as `app`; or other machines can reach the address, and there is no token.
        OSError: the address or port cannot be listened on.
    """
    address = "127.0.0.1" if address == "localhost" else address
    first = token if token is None or isinstance(token, SecretStr) else next(iter(token), None)
    hosts = door.accepted_hosts(address, first, token_variable=TOKEN_VARIABLE)
    served = app(engine, model, token=token, hosts=hosts, **options)
    await door.listen(
        served, address, port, on_ready=on_ready, on_stop=served.state.endpoint.end_all, grace_s=_GRACE_S
    )  # fmt: skip


class MessagesEndpoint:
    """Answers requests, as an ASGI app, while it is `running`."""

    def __init__(
        self,
        model: Model,
        containers: Containers,
        guard: HttpGuard,
        *,
        steps: int,
        on_tokens: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """`on_tokens` is told what the model has used for each request, also for one that failed."""
        self.containers = containers
        self._on_tokens = on_tokens
        self._model = model
        self._guard = guard
        self._steps = steps
        self._turns: set[anyio.CancelScope] = set()
        self._is_running = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer requests within this context. All containers have ended when it is left."""
        async with models.connected(self._model), self.containers.running():
            self._is_running = True
            try:
                yield
            finally:
                self.end_all()

    def end_all(self) -> None:
        """Begin to end all turns, and accept no new one."""
        self._is_running = False
        for turn in list(self._turns):
            turn.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = f"req_{secrets.token_hex(12)}"
        answer = _HttpAnswer(send, request_id)
        request = Request(scope, receive)
        try:
            refusal = self._guard.refusal(request)
            if refusal is not None:
                await answer.error(ApiError(refusal.status, refusal.message), dict(refusal.headers))
                return
            if request.method != "POST":
                await answer.error(ApiError(405, f"the method {request.method} is not allowed"), {"Allow": "POST"})
                return
            if not self._is_running:
                await answer.error(ApiError(503, "the server is stopping, or has not started"))
                return
            body = await _body(request)
            if body is None:
                return
            parsed = MessagesRequest.parse(body)
            await self._answer(parsed, owner_of(self._guard.credential(request)), receive, answer)
        except ApiError as error:
            await answer.error(error)

    async def _answer(self, request: MessagesRequest, owner: bytes, receive: Receive, answer: _HttpAnswer) -> None:
        """Run a turn. It is cancelled when its client is gone; code that waits or runs stays in its container."""
        failed: ApiError | None = ApiError(503, "the server is stopping, or the client is gone")
        async with anyio.create_task_group() as tasks:
            self._turns.add(tasks.cancel_scope)
            tasks.start_soon(_watch, receive, tasks.cancel_scope)
            try:
                await (self._stream if request.body.stream else self._whole)(request, owner, answer)
                failed = None
            except Exception as error:  # noqa: BLE001 - the one place where errors become answers
                failed = _translated(error)
            finally:
                self._turns.discard(tasks.cancel_scope)
                tasks.cancel_scope.cancel()
        if failed is not None:
            await answer.error(failed)

    async def _run(self, turn: MessagesTurn) -> None:
        try:
            await turn.run()
        finally:
            if self._on_tokens is not None and turn.used.total:
                with anyio.CancelScope(shield=True):
                    await self._on_tokens(turn.used.total)

    async def _whole(self, request: MessagesRequest, owner: bytes, answer: _HttpAnswer) -> None:
        writer = WholeAnswer(request.body.model)
        await self._run(MessagesTurn(self._model, self.containers, request, owner, writer, steps=self._steps))
        await answer.json(200, writer.message)

    async def _stream(self, request: MessagesRequest, owner: bytes, answer: _HttpAnswer) -> None:
        sending, events = anyio.create_memory_object_stream[dict[str, Any]](16)
        writer = StreamedAnswer(request.body.model, sending)
        turn = MessagesTurn(self._model, self.containers, request, owner, writer, steps=self._steps)
        failed: Exception | None = None

        async def run() -> None:
            nonlocal failed
            async with sending:
                try:
                    await self._run(turn)
                except Exception as error:  # noqa: BLE001 - raised below, when what came before it is sent
                    failed = error

        async with events, anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            while True:
                event: dict[str, Any] | None = None
                with anyio.move_on_after(_PING_S):
                    try:
                        event = await events.receive()
                    except anyio.EndOfStream:
                        break
                if event is None and not writer.has_begun:
                    await writer.begin()  # its event is the next one
                else:
                    await answer.event(event or {"type": "ping"})
        if failed is not None:
            raise failed
        await answer.end()


class _HttpAnswer:
    """Sends the answer to one request."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self._streaming = False

    async def json(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        await self._start(status, "application/json", {"content-length": str(len(data)), **(headers or {})})
        await self._send({"type": "http.response.body", "body": data})

    async def error(self, error: ApiError, headers: dict[str, str] | None = None) -> None:
        """As an answer or, if one is being streamed, as its last event."""
        if self._streaming:
            await self.event(error.body(self._request_id))
            await self.end()
        else:
            await self.json(error.status, error.body(self._request_id), headers)

    async def event(self, event: dict[str, Any]) -> None:
        if not self._streaming:
            self._streaming = True
            await self._start(200, "text/event-stream; charset=utf-8", {"cache-control": "no-cache"})
        data = f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, kind: str, headers: dict[str, str]) -> None:
        given = {"content-type": kind, "request-id": self._request_id, **headers}
        encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in given.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})


async def _watch(receive: Receive, turn: anyio.CancelScope) -> None:
    """End the turn when its client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    turn.cancel()


async def _body(request: Request) -> bytes | None:
    """The body. None: the client left before it was whole.

    Raises:
        ApiError: it is too large, or of an API without a version.
    """
    if not _VERSION.fullmatch(request.headers.get("anthropic-version", "")):
        raise ApiError(400, "anthropic-version: this header is required, with a version such as 2023-06-01")
    length = request.headers.get("content-length", "0")
    too_large = ApiError(413, f"the body may have {MAX_BODY_BYTES} bytes")
    if not length.isdecimal() or len(length) > 12 or int(length) > MAX_BODY_BYTES:
        raise too_large
    data = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return None
        data += message.get("body", b"")
        if len(data) > MAX_BODY_BYTES:
            raise too_large
        if not message.get("more_body"):
            return bytes(data)


async def _nowhere(_request: Request) -> Any:
    from starlette.responses import JSONResponse

    error = ApiError(404, f"there is nothing at this path; messages are at {PATH}")
    return JSONResponse(error.body(f"req_{secrets.token_hex(12)}"), error.status)


def _translated(error: Exception) -> ApiError:
    """An error as clients see it. What it says of this machine, of the provider and of others stays in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ModelUnavailable):
        _log.warning("the model is not available: %s", error.message)
        return ApiError(529, "the model is not available now; try again later")
    is_missing = isinstance(error.__cause__, exceptions.ModelNotFoundError)  # clients do not choose the model
    if isinstance(error, ModelFailed) and models.is_of_request(error) and not is_missing:
        return ApiError(400, error.message)
    if isinstance(error, AtollError) and not isinstance(error, ModelFailed) and door.status_of(error) < 500:
        _log.warning("a request failed: %s", error.message)
    else:
        _log.error("a request failed", exc_info=error)
    return ApiError(500, "the request failed here; the server's log has the reason")
