"""`/code`: code that runs in a session of a sandbox, keeps its variables, and may call tools of the client.

Owns the table of sessions (whose they are, how many there may be, when they end), executions, which belong to their
session and not to the connection that began them, calls of the client's tools, which wait for `…/results`, and
approvals. Not here: running code (`atoll.code.executor`), and waiting for the client (`atoll.code.pausable`).

Sessions are in the memory of this server: they end with it, when they are unused for their idle time, and with their
sandbox. Files stay. A session of another tenant, or of another sandbox, does not exist.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from fastapi import APIRouter, FastAPI, Header, Path, Query, Request, Response
from pydantic import Field

from atoll.code.approvals import ApprovalDecision, ApprovalRequest
from atoll.code.executor import CodeConfig, CodeExecutor
from atoll.code.languages import LanguageName
from atoll.code.pausable import ClientCall, PausableExecution
from atoll.code.registry import ToolRegistry
from atoll.code.results import CallRecord, ExecutionFailure, ExecutionResult, RichPart
from atoll.code.session import OnCellOutput
from atoll.contract.errors import (
    ApprovalNotFound,
    CodeSessionBusy,
    CodeSessionNotFound,
    Conflict,
    InvalidRequest,
    ToolCallError,
)
from atoll.surfaces.rest.caller import ApiRoute, Caller, Executor, Reader
from atoll.surfaces.rest.errors import failures
from atoll.surfaces.rest.event_stream import BEGUN, MEDIA_TYPE, EventStream, ServerEvent
from atoll.surfaces.rest.exec import CLIENT_LEFT, OutputEncoder, until_left, wants_events
from atoll.surfaces.rest.pages import (
    VARIABLE_KEYS,
    After,
    JsonBody,
    Limit,
    Page,
    RequestBody,
    TextField,
    answer,
    page_answer,
)
from atoll.surfaces.rest.sandboxes import SandboxPath, find
from atoll.tools.tool import readable, readable_all

if TYPE_CHECKING:
    from atoll.runtime.sandbox import Sandbox

MAX_SESSIONS = 16
"""Of one sandbox."""
MAX_TENANT_SESSIONS = 128
MAX_TOOLS = 128
MAX_CODE_CHARS = 1_000_000
MAX_WAIT_S = 3600.0
_MAX_REMEMBERED = 8
"""Executions of a session that have ended and can be asked for."""
_MAX_EVENTS = 64
"""Events that wait for a client to read them. Then the code waits, too."""
_SWEEP_S = 5.0
_INTERRUPTED = ExecutionResult(
    success=False, output="", error=ExecutionFailure(type="Interrupted", message="the code was interrupted")
)
_log = logging.getLogger(__name__)


# -------------------------------------------------------------------------------------------------------------- bodies


class ToolBody(RequestBody):
    """A tool of the client, which code can call as a function."""

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")
    description: str = Field(default="", max_length=16_384)
    input_schema: dict[str, Any] = Field(default_factory=dict)
    """The JSON schema of its arguments, an object. They are not checked against it here."""
    needs_approval: bool = False
    """Each call waits for an approval before the client is told of it."""


class SessionCreate(RequestBody):
    """A session of code."""

    language: LanguageName = "python"
    user: TextField | None = None
    """The user inside. Unset: the sandbox's own."""
    cwd: TextField | None = None
    """Where it begins. Unset: where commands of the sandbox start."""
    env: dict[str, TextField] = Field(default_factory=dict, json_schema_extra=VARIABLE_KEYS)
    tools: list[ToolBody] = Field(default_factory=list, max_length=MAX_TOOLS)
    timeout_s: float | None = Field(default=60.0, gt=0, le=86_400)
    """Of an execution that names no other. Time in which calls wait for the client does not count. Null: no limit."""
    output_limit_bytes: int = Field(default=65_536, ge=0, le=16 * 1024 * 1024)
    """What a result keeps of stdout and of stderr, head and tail."""
    max_calls: int = Field(default=1000, ge=0, le=100_000)
    """Calls of tools in one execution."""
    call_timeout_s: float = Field(default=300.0, gt=0, le=86_400)
    """How long the client may take to answer a call."""
    idle_timeout_s: float = Field(default=900.0, ge=1, le=86_400)
    """How long the session is kept without being used."""


class SessionBody(RequestBody):
    """A session that is open."""

    id: str
    sandbox: str
    """The name of its sandbox."""
    language: LanguageName
    version: str
    """Of the language."""
    tools: list[str]
    created_at: datetime
    last_used_at: datetime
    expires_at: datetime
    """When it ends, if it is not used until then."""
    executions: int


class ExecuteBody(RequestBody):
    code: str = Field(max_length=MAX_CODE_CHARS)
    timeout_s: float | None = Field(default=None, gt=0, le=86_400)
    """Unset: that of the session."""


class CallBody(RequestBody):
    """A call that waits for the client."""

    id: str
    tool: str
    arguments: dict[str, Any]


class CodeFile(RequestBody):
    """A file that code has left in the directory `outbox` of its working directory, where it can be read."""

    path: str
    """Relative to the outbox."""
    size_bytes: int


class ResultBody(RequestBody):
    """What became of an execution. Everything in it comes from the code."""

    success: bool
    output: str
    """stdout."""
    stderr: str
    error: ExecutionFailure | None
    parts: list[RichPart]
    """What was displayed; the value of the last line, if there is one, has the role `value`."""
    warnings: list[str]
    calls: list[CallRecord]
    files: list[CodeFile]
    duration_s: float
    timed_out: bool
    out_of_memory: bool
    session_replaced: bool
    """True: its process is gone, and with it the variables. Files are there."""
    output_file: str | None
    """Where in the sandbox the whole of stdout is, if `output` is not all of it."""


class ExecutionBody(RequestBody):
    """An execution."""

    id: str
    session: str
    status: Literal["running", "waiting", "ended"]
    """`waiting`: it goes on when the client has sent the results of `calls`, or an approval was decided."""
    calls: list[CallBody]
    approvals: list[str]
    """The ids of approvals that it waits for."""
    result: ResultBody | None
    """Set when it has ended."""


class CallResult(RequestBody):
    """The result of a call: `value`, or `error`."""

    id: str
    value: Any = None
    error: str | None = Field(default=None, max_length=65_536)
    """Why it failed; the code gets an exception with this message."""


class ResultsBody(RequestBody):
    results: list[CallResult] = Field(min_length=1, max_length=1024)


class ApprovalBody(RequestBody):
    """A call of a tool that waits for an approval."""

    id: str
    session: str
    sandbox: str
    tool: str
    arguments: dict[str, Any]
    code: str
    """The code that makes the call."""
    asked_at: datetime


class DecisionBody(RequestBody):
    allowed: bool
    reason: str = Field(default="", max_length=16_384)
    """Why not; the code sees it."""
    arguments: dict[str, Any] | None = None
    """The arguments to use instead. Unset: those of the code."""


# ------------------------------------------------------------------------------------------------------------- sessions


class RestExecution(PausableExecution):
    """An execution of a session, and the events that its client has not read."""

    CALL_PREFIX = "call_"

    def __init__(self, session: RestSession, body: ExecuteBody, *, with_events: bool) -> None:
        self.session = session
        self.approvals: dict[str, PendingApproval] = {}
        """Those that it waits for."""
        self._sender: MemoryObjectSendStream[ServerEvent] | None = None
        self.events: MemoryObjectReceiveStream[ServerEvent] | None = None
        if with_events:
            self._sender, self.events = anyio.create_memory_object_stream[ServerEvent](_MAX_EVENTS)
        self._encoders = {"stdout": OutputEncoder("text"), "stderr": OutputEncoder("text")}
        super().__init__(f"exe_{secrets.token_hex(8)}", self._run(body))

    async def _run(self, body: ExecuteBody) -> ExecutionResult:
        try:
            return await self.session.run(body, self._take_output)
        finally:
            if self._sender is not None:
                for stream, encoder in self._encoders.items():
                    if data := encoder.finish():
                        with suppress(anyio.WouldBlock, anyio.BrokenResourceError):
                            self._sender.send_nowait(ServerEvent(stream, data))
                self._sender.close()

    def _take_output(self, stream: Literal["stdout", "stderr"], data: bytes) -> Awaitable[None] | None:
        if self._sender is None:
            return None
        encoded = self._encoders[stream].encode(data)
        return None if encoded is None else self.tell(ServerEvent(stream, encoded))

    async def tell(self, event: ServerEvent) -> None:
        """Pass an event on, and wait while the client reads too slowly. One that is gone is told nothing."""
        if self._sender is not None:
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await self._sender.send(event)

    async def announce(self, call: ClientCall) -> None:
        await self.tell(ServerEvent("call", _call_fields(call)))

    @property
    def is_waiting(self) -> bool:
        return bool(self.approvals) or super().is_waiting

    async def describe(self) -> dict[str, Any]:
        """The fields of `ExecutionBody`.

        Raises:
            AtollError: the code could not be run.
        """
        result = None
        if self.has_ended:
            result = _result_fields(_INTERRUPTED if self.was_interrupted else await self.result())
        return {
            "id": self.id,
            "session": self.session.id,
            "status": "ended" if self.has_ended else "waiting" if self.is_waiting else "running",
            "calls": [] if self.has_ended else [_call_fields(each) for each in self.waiting],
            "approvals": [] if self.has_ended else [*self.approvals],
            "result": result,
        }


class PendingApproval:
    """A call that waits for an approval."""

    def __init__(self, execution: RestExecution, request: ApprovalRequest) -> None:
        self.id = f"apr_{secrets.token_hex(8)}"
        self.asked_at = datetime.now(UTC)
        self.execution = execution
        self.request = request
        self.decision: asyncio.Future[ApprovalDecision] = asyncio.get_running_loop().create_future()

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of `ApprovalBody`."""
        return {
            "id": self.id,
            "session": self.execution.session.id,
            "sandbox": self.request.sandbox,
            "tool": self.request.tool,
            "arguments": readable_all(dict(self.request.arguments)),
            "code": self.request.code,
            "asked_at": self.asked_at,
        }


class RestSession:
    """A session of one sandbox, with its tools and its last executions. The approver of its calls."""

    def __init__(self, caller: Caller, sandbox: Sandbox, body: SessionCreate) -> None:
        self.id = f"ses_{secrets.token_hex(16)}"
        self.tenant = caller.tenant.name
        self.sandbox = sandbox
        self.executions: dict[str, RestExecution] = {}
        """The last ones, by id; the last of them may be running."""
        self._body = body
        self._used = time.monotonic()
        self._executor = CodeExecutor(
            self._registry(),
            CodeConfig(
                language=body.language,
                env=body.env,
                timeout_s=body.timeout_s,
                output_limit_bytes=body.output_limit_bytes,
                max_calls=body.max_calls,
            ),
            engine=caller.engine,
            approver=self,
        )
        self._opened: str | None = None
        caller.server.engines.hold(self.tenant, self)

    def _registry(self) -> ToolRegistry:
        registry = ToolRegistry()
        for tool in self._body.tools:
            registry.declare(
                tool.name,
                tool.input_schema,
                partial(self._call, tool.name),
                description=tool.description,
                is_timed=False,
                needs_approval=tool.needs_approval,
                returns_text=False,
            )
        return registry

    async def open(self) -> None:
        """Start its kernel.

        Raises:
            InvalidRequest: the image does not have the language, or a tool cannot be described.
        """
        self._opened = await self._executor.open_session(self.sandbox, user=self._body.user, cwd=self._body.cwd)

    @property
    def running(self) -> RestExecution | None:
        last = next(reversed(self.executions.values()), None)
        return None if last is None or last.has_ended else last

    @property
    def is_expired(self) -> bool:
        return self.running is None and time.monotonic() > self._used + self._body.idle_timeout_s

    def touch(self) -> None:
        self._used = time.monotonic()

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of `SessionBody`."""
        info = None if self._opened is None else self._executor.get_session(self._opened)
        if info is None:
            raise CodeSessionNotFound(f"the session {self.id} has ended", id=self.id)
        left_s = self._used + self._body.idle_timeout_s - time.monotonic()
        return {
            "id": self.id,
            "sandbox": self.sandbox.name,
            "language": info.language,
            "version": info.version,
            "tools": [tool.name for tool in self._body.tools],
            "created_at": info.created_at,
            "last_used_at": info.last_used_at,
            "expires_at": datetime.now(UTC) + timedelta(seconds=left_s),
            "executions": info.executions,
        }

    def execute(self, body: ExecuteBody, *, with_events: bool) -> RestExecution:
        """Begin an execution.

        Raises:
            CodeSessionBusy: the one before has not ended.
        """
        if (running := self.running) is not None:
            raise CodeSessionBusy(
                f"the execution {running.id} of this session has not ended; wait for it, answer it, or interrupt it",
                execution=running.id,
            )
        self.touch()
        while len(self.executions) >= _MAX_REMEMBERED:
            self.executions.pop(next(iter(self.executions)))
        execution = RestExecution(self, body, with_events=with_events)
        self.executions[execution.id] = execution
        return execution

    def execution(self, id: str) -> RestExecution:
        """
        Raises:
            CodeSessionNotFound: it has no such execution, or a long time ago.
        """
        if (found := self.executions.get(id)) is None:
            raise CodeSessionNotFound(f"no execution of the session has the id {id!r}", id=id)
        self.touch()
        return found

    async def run(self, body: ExecuteBody, on_output: OnCellOutput) -> ExecutionResult:
        try:
            result, _ = await self._executor.execute(
                body.code, self._opened, timeout_s=body.timeout_s, on_output=on_output
            )
        finally:
            self.touch()
        return result

    async def _call(self, tool: str, arguments: Mapping[str, Any]) -> object:
        if (running := self.running) is None:
            raise ToolCallError("NotAllowed", "no code runs now that could call tools")
        return await running.call(tool, arguments, self._body.call_timeout_s)

    async def interrupt(self) -> None:
        """Interrupt what runs. Variables stay."""
        self.touch()
        if (running := self.running) is not None:
            await running.cancel()

    async def aclose(self) -> None:
        """End it, with what runs in it."""
        with anyio.CancelScope(shield=True):
            if (running := self.running) is not None:
                running.give_up()
            await self._executor.aclose()
            await self.interrupt()

    # As an approver.

    async def decide(self, request: ApprovalRequest) -> ApprovalDecision:
        if (running := self.running) is None:
            return ApprovalDecision(allowed=False, reason="no code runs now that could call tools")
        pending = PendingApproval(running, request)
        running.approvals[pending.id] = pending
        running.begin_waiting()
        try:
            await running.tell(ServerEvent("approval", pending.fields))
            return await pending.decision
        finally:
            del running.approvals[pending.id]

    async def withdraw(self, request: ApprovalRequest) -> None:
        pass  # it was forgotten when `decide` was cancelled


class CodeSessions:
    """The sessions of a server."""

    def __init__(self) -> None:
        self._sessions: dict[str, RestSession] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """End what expires, within this context. All sessions have ended when it is left."""
        sweeper = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                sweeper.cancel()
                await asyncio.wait([sweeper])
                await self._close(*self._sessions.values())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            await self._close(*(each for each in self._sessions.values() if each.is_expired))

    async def _close(self, *sessions: RestSession) -> None:
        for session in sessions:
            self._sessions.pop(session.id, None)
        ended = await asyncio.gather(*(each.aclose() for each in sessions), return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException):
                _log.error("ending a session of code failed", exc_info=error)

    def of(self, sandbox: Sandbox) -> list[RestSession]:
        """Those of a sandbox, the oldest first."""
        return [each for each in self._sessions.values() if each.sandbox.id == sandbox.id and not each.is_expired]

    def get(self, sandbox: Sandbox, id: str) -> RestSession:
        """
        Raises:
            CodeSessionNotFound: the sandbox has no such session, or has it no longer.
        """
        session = self._sessions.get(id)
        if session is None or session.sandbox.id != sandbox.id or session.is_expired:
            raise CodeSessionNotFound(f"no session of the sandbox has the id {id!r}, or it has ended", id=id)
        return session

    async def create(self, caller: Caller, sandbox: Sandbox, body: SessionCreate) -> RestSession:
        """
        Raises:
            Conflict: there are too many.
            InvalidRequest: the image does not have the language, or a tool is not allowed.
        """
        of_tenant = sum(each.tenant == caller.tenant.name for each in self._sessions.values())
        if len(self.of(sandbox)) >= MAX_SESSIONS or of_tenant >= MAX_TENANT_SESSIONS:
            raise Conflict(
                f"there are too many sessions of code: a sandbox may have {MAX_SESSIONS}, a tenant "
                f"{MAX_TENANT_SESSIONS}; end one"
            )
        session = RestSession(caller, sandbox, body)
        self._sessions[session.id] = session
        try:
            await session.open()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._close(session)
            raise
        session.touch()
        return session

    async def remove(self, session: RestSession) -> None:
        with anyio.CancelScope(shield=True):
            await self._close(session)


def _call_fields(call: ClientCall) -> dict[str, Any]:
    return {"id": call.id, "tool": call.tool, "arguments": readable_all(dict(call.input))}


def _result_fields(result: ExecutionResult) -> dict[str, Any]:
    fields: dict[str, Any] = readable_all(result.model_dump(exclude={"files", "suspended"}))
    files = [{"path": readable(each.path), "size_bytes": each.size_bytes} for each in result.files]
    return {**fields, "files": files}


# --------------------------------------------------------------------------------------------------------------- routes


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.code_sessions = sessions = CodeSessions()
    async with sessions.running():
        yield


router = APIRouter(prefix="/api/v1/sandboxes/{sandbox}/code", tags=["code"], route_class=ApiRoute, lifespan=_lifespan)
SessionPath = Annotated[str, Path(max_length=64)]
_WAIT = Annotated[
    float, Query(ge=0, le=MAX_WAIT_S, description="How long to wait until it has ended, or waits itself.")
]


def _sessions(request: Request) -> CodeSessions:
    sessions: CodeSessions = request.app.state.code_sessions
    return sessions


async def _session(request: Request, caller: Caller, sandbox: str, id: str) -> RestSession:
    return _sessions(request).get(await find(caller, sandbox), id)


@router.post(
    "/sessions",
    operation_id="code_sessions_create",
    status_code=201,
    response_model=SessionBody,
    responses=failures(404, 409, 502, 504),
)
async def create_session(
    request: Request, caller: Executor, sandbox: SandboxPath, body: Annotated[SessionCreate, JsonBody()]
) -> Response:
    """Begin a session: variables, imports and files of one execution are there for the next."""
    opened = await find(caller, sandbox)
    session = await _sessions(request).create(caller, opened, body)
    location = f"/api/v1/sandboxes/{opened.name}/code/sessions/{session.id}"
    return answer(session.fields, 201, {"Location": location})


@router.get(
    "/sessions",
    operation_id="code_sessions_list",
    response_model=Page[SessionBody],
    responses=failures(404, 409, 502, 504),
)
async def list_sessions(
    request: Request, caller: Reader, sandbox: SandboxPath, limit: Limit = 100, after: After = None
) -> Response:
    """The sessions of a sandbox that were begun through this API, by their id."""
    found = [each.fields for each in _sessions(request).of(await find(caller, sandbox))]
    return page_answer(found, lambda each: each["id"], limit, after)


@router.get(
    "/sessions/{session}",
    operation_id="code_sessions_get",
    response_model=SessionBody,
    responses=failures(404, 409, 502, 504),
)
async def get_session(request: Request, caller: Reader, sandbox: SandboxPath, session: SessionPath) -> Response:
    """A session."""
    return answer((await _session(request, caller, sandbox, session)).fields)


@router.delete(
    "/sessions/{session}",
    operation_id="code_sessions_delete",
    status_code=204,
    responses=failures(404, 409, 502, 504),
)
async def delete_session(request: Request, caller: Executor, sandbox: SandboxPath, session: SessionPath) -> Response:
    """End a session, with what runs in it. Files stay."""
    await _sessions(request).remove(await _session(request, caller, sandbox, session))
    return Response(status_code=204)


@router.post(
    "/sessions/{session}/execute",
    operation_id="code_execute",
    response_model=ExecutionBody,
    responses={
        200: {
            "description": (
                "The execution: it has ended, or waits for results of calls or for an approval. With `Accept: "
                "text/event-stream`: the events `execution` ({id}), `stdout` and `stderr` ({text}), `call`, "
                "`approval`, and at last `end` with the execution, or `error`."
            ),
            "content": {MEDIA_TYPE: {"schema": {"type": "string"}}},
        },
        **failures(404, 409, 502, 504),
    },
)
async def execute(
    request: Request,
    caller: Executor,
    sandbox: SandboxPath,
    session: SessionPath,
    body: Annotated[ExecuteBody, JsonBody()],
    accept: Annotated[str | None, Header(include_in_schema=False)] = None,
) -> Response:
    """Run code, and wait until it has ended or waits for the client.

    An execution belongs to its session: when the client leaves, it goes on, and can be asked for. What the code does
    wrong is in the result, and is no error.
    """
    opened = await _session(request, caller, sandbox, session)
    with_events = wants_events(accept)
    execution = opened.execute(body, with_events=with_events)
    if with_events:
        return await EventStream.begin(caller, _events(execution))
    return await _settled(request, caller, execution, MAX_WAIT_S)


async def _settled(request: Request, caller: Caller, execution: RestExecution, wait_s: float) -> Response:
    with until_left(caller, request.receive) as left, anyio.move_on_after(wait_s):
        await execution.settled()
    return Response(status_code=CLIENT_LEFT) if left() else answer(await execution.describe())


async def _events(execution: RestExecution) -> AsyncGenerator[ServerEvent, None]:
    if (events := execution.events) is None:
        return
    async with events:
        yield BEGUN
        yield ServerEvent("execution", {"id": execution.id})
        async for event in events:
            yield event
        await execution.ended()
        yield ServerEvent("end", await execution.describe())


@router.get(
    "/sessions/{session}/executions/{execution}",
    operation_id="code_executions_get",
    response_model=ExecutionBody,
    responses=failures(404, 409, 502, 504),
)
async def get_execution(
    request: Request,
    caller: Reader,
    sandbox: SandboxPath,
    session: SessionPath,
    execution: SessionPath,
    wait_s: _WAIT = 0.0,
) -> Response:
    """An execution: one of the last eight of its session. Fails as the execution did, if it could not be run."""
    found = (await _session(request, caller, sandbox, session)).execution(execution)
    return await _settled(request, caller, found, wait_s)


@router.post(
    "/sessions/{session}/results",
    operation_id="code_results",
    status_code=204,
    responses=failures(404, 409, 502, 504),
)
async def give_results(
    request: Request,
    caller: Executor,
    sandbox: SandboxPath,
    session: SessionPath,
    body: Annotated[ResultsBody, JsonBody()],
) -> Response:
    """Give calls their results. Those of calls that have one, or that nothing waits for any more, are dropped."""
    opened = await _session(request, caller, sandbox, session)
    opened.touch()
    last = next(reversed(opened.executions.values()), None)
    for result in body.results:
        if last is None or not last.has_made(result.id):
            raise InvalidRequest(f"{result.id!r} is no call of the session's last execution", id=result.id)
    for result in body.results:
        if last is not None and result.error is not None:
            last.fail(result.id, result.error)
        elif last is not None:
            last.answer(result.id, result.value)
    return Response(status_code=204)


@router.post(
    "/sessions/{session}/interrupt",
    operation_id="code_interrupt",
    status_code=204,
    responses=failures(404, 409, 502, 504),
)
async def interrupt(request: Request, caller: Executor, sandbox: SandboxPath, session: SessionPath) -> Response:
    """Interrupt the code that runs, as Ctrl-C would. Variables stay. Nothing happens if none runs."""
    await (await _session(request, caller, sandbox, session)).interrupt()
    return Response(status_code=204)


@router.get(
    "/approvals",
    operation_id="code_approvals_list",
    response_model=Page[ApprovalBody],
    responses=failures(404, 409, 502, 504),
)
async def list_approvals(
    request: Request, caller: Reader, sandbox: SandboxPath, limit: Limit = 100, after: After = None
) -> Response:
    """The calls in all sessions of a sandbox that wait for an approval, by their id."""
    opened = await find(caller, sandbox)
    return page_answer([each.fields for each in _approvals(request, opened)], lambda each: each["id"], limit, after)


@router.post(
    "/approvals/{approval}",
    operation_id="code_approvals_decide",
    status_code=204,
    responses=failures(404, 409, 502, 504),
)
async def decide(
    request: Request,
    caller: Executor,
    sandbox: SandboxPath,
    approval: SessionPath,
    body: Annotated[DecisionBody, JsonBody()],
) -> Response:
    """Allow a call, with other arguments if they are given, or refuse it."""
    opened = await find(caller, sandbox)
    found = next((each for each in _approvals(request, opened) if each.id == approval), None)
    if found is None or found.decision.done():
        raise ApprovalNotFound(f"no call waits for the approval {approval!r}", id=approval)
    caller.note(tool=found.request.tool, allowed=body.allowed)
    found.decision.set_result(ApprovalDecision(body.allowed, body.reason, body.arguments))
    return Response(status_code=204)


def _approvals(request: Request, sandbox: Sandbox) -> list[PendingApproval]:
    running = [each.running for each in _sessions(request).of(sandbox)]
    return [pending for each in running if each is not None for pending in each.approvals.values()]
