"""Run code that calls tools: sessions, budgets, approvals.

Owns `CodeExecutor`: which sandbox a session has, how long it is kept, and what every call is checked for before a tool
runs (caller, size, budget, approval). Not here: what a result has, and what a model is shown of it (`results.py`), the
kernel and its channel (`session.py`), what a tool takes and does (`registry.py`), how approvals are stored
(`approvals.py`) and what is recorded (`audit.py`). Used by `tool.py`, `agents/` and the surfaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import anyio
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atoll.code.approvals import ApprovalRequest, Approver, denial, try_to_withdraw
from atoll.code.languages import KERNEL_MARK
from atoll.code.messages import CallMessage
from atoll.code.registry import ToolCallerType, ToolRegistry
from atoll.code.results import CallRecord, ExecutionFailure, ExecutionResult, OutboxFile, rich_part
from atoll.code.session import CellOutcome, CodeSession, OnCellOutput
from atoll.contract.documented import Documented
from atoll.contract.errors import (
    AtollError,
    InvalidRequest,
    NotCheckpointable,
    SandboxDied,
    SandboxNotFound,
    ToolCallError,
)
from atoll.contract.frozen import refusal
from atoll.contract.model import Limits
from atoll.contract.network import NetworkPolicy
from atoll.runtime.engine import open as open_engine
from atoll.runtime.interface import Engine
from atoll.runtime.sandbox import Sandbox

_MAX_OUTBOX_FILES = 32
_MAX_OUTBOX_BYTES = 32 * 1024 * 1024
_MAX_KEPT_BYTES = 64 * 1024 * 1024
"""What the arguments in the records of one execution may take. Records beyond it have none."""
_MAX_WAITING = 100
"""Calls of a session that wait for an approval."""
_LEASE_MARGIN_S = 120.0
"""How much longer than unused sessions those live whose process is gone."""
_MAX_CLOSED = 256
"""Ids of closed sessions that are remembered, so that an error can say what became of one."""
_REFILL_S = 0.1
"""After a prepared session was taken: its first cell goes first, and then the next session is prepared."""

_log = logging.getLogger(__name__)


class CodeConfig(Documented):
    """What code may use, and how long its session is kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    language: Literal["python", "javascript", "bash"] = "python"
    """What cells are written in."""
    image: str | None = None
    """The image of a session's sandbox. Unset: the engine's default. It needs the language's interpreter."""
    runtime: str | None = None
    """Its runtime. Unset: the engine's default."""
    memory_bytes: int = 256 * 1024 * 1024
    """Its memory."""
    cpus: float = 0.5
    """Its processors."""
    network: NetworkPolicy | None = None
    """The egress policy. Unset: there is no egress."""
    env: Mapping[str, str] = Field(default_factory=dict)
    """Variables of its environment."""
    timeout_s: float | None = 60.0
    """Time of one execution, after which it is interrupted. Unset: no limit."""
    output_limit_bytes: int = 65536
    """What is kept of stdout and of stderr: head and tail. The whole is a file in the sandbox then."""
    max_calls: int = 1000
    """Calls of tools in one execution."""
    max_concurrent_calls: int = 128
    """Calls that run on the host at a time. Others wait."""
    max_result_bytes: int = 16 * 1024 * 1024
    """The longest result of a call, as JSON."""
    session_timeout_seconds: float = 270.0
    """A session that was not used for so long is closed. Sessions that a killed process leaves behind end a little
    later than that by themselves."""
    cleanup_interval_seconds: float = 60.0
    """How often the cleanup task looks for such sessions."""
    enable_session_reuse: bool = True
    """False: every execution has a session of its own, whatever is asked for."""
    max_sessions: int = 100
    """Sessions that are open at a time."""
    prepared_sessions: int = 0
    """Sessions that are started before they are needed, and wait."""
    approval_ttl_s: float = 7 * 86400.0
    """How long a session is kept that waits for an approval, or was suspended, also if its process is gone."""
    anthropic_compatible: bool = False
    """True: stubs take one dict and return a text, as those of the hosted product do."""
    ephemeral: bool = False
    """True: a session's sandbox ends with this process, however that ends. Such a session cannot be suspended."""

    if not TYPE_CHECKING:  # type checkers know the fields

        def __init__(self, **given: Any) -> None:
            try:
                super().__init__(**given)
            except ValidationError as error:
                raise refusal(type(self), error) from None


class SessionInfo(BaseModel):
    """A session that is open."""

    model_config = ConfigDict(frozen=True)

    id: str
    sandbox: str
    """The name of its sandbox."""
    language: str
    version: str
    """Of the language."""
    created_at: datetime
    last_used_at: datetime
    executions: int


class ExecutionAudit(Protocol):
    """Is told of executions and calls."""

    def execution(self, session_id: str, cell: int, code: str, result: ExecutionResult) -> None: ...

    def call(self, session_id: str, cell: int, record: CallRecord) -> None: ...


class _Session:
    """A session of the executor: its kernel, its sandbox, and the calls of its executions."""

    def __init__(
        self,
        executor: CodeExecutor,
        id: str,
        sandbox: Sandbox,
        *,
        owns_sandbox: bool = True,
        is_ephemeral: bool = False,
        leaves_kernel: bool = False,
        user: str | None = None,
        cwd: str | None = None,
    ) -> None:
        self.id = id
        self.sandbox = sandbox
        self.owns_sandbox = owns_sandbox
        self.is_ephemeral = is_ephemeral
        self.leaves_kernel = leaves_kernel
        """Whether its kernel runs on when it is closed."""
        self.user = user
        self.cwd = cwd
        self.kernel: CodeSession | None = None
        self.created_at = datetime.now(UTC)
        self.used = time.monotonic()
        self.used_at = self.created_at
        self.executions = 0
        self.busy = 0
        self.turn = anyio.Lock()
        """Executions have it one after the other: code and calls below are those of one."""
        self.code = ""
        self.calls: list[CallRecord] = []
        self.waiting: dict[int, ApprovalRequest] = {}
        """Calls that wait for an approval now."""
        self.loss_is_told = False
        """Whether a result has said that the variables of its last kernel are lost."""
        self.goes_on = False
        """Whether calls that wait are taken up again, here or elsewhere, after they are cancelled."""
        self.expires = 0.0
        """When its sandbox ends by itself, by the monotonic clock."""
        self._made = 0
        self._kept_bytes = 0
        self._executor = executor
        self._slots = asyncio.Semaphore(executor.config.max_concurrent_calls)  # anyio's would yield for each call

    def begin(self, code: str) -> None:
        self.code, self.calls, self._made, self._kept_bytes = code, [], 0, 0
        self.executions += 1
        self.touch()

    def touch(self) -> None:
        self.used, self.used_at = time.monotonic(), datetime.now(UTC)

    async def handle(self, call: CallMessage) -> dict[str, Any]:
        """Make a call of the code. The one place that every call passes through; it trusts nothing in it."""
        started_at, began = datetime.now(UTC), time.perf_counter()
        self._made += 1
        number, execution = self._made, self.executions
        answer = _failure("Cancelled", "nothing waits for it any more")
        try:
            answer = await self._answer(call, number)
        finally:
            failed = answer.get("error")
            record = CallRecord(
                tool=call.tool,
                arguments=call.arguments,
                started_at=started_at,
                duration_s=time.perf_counter() - began,
                result_bytes=len(answer.get("json", "")),
                error=None if failed is None else f"{failed['type']}: {failed['message']}",
            )
            # Of those beyond the budget, the first.
            if not self.goes_on and number <= self._executor.config.max_calls + 1:
                self._keep(record, call.held_bytes)
                try:
                    self._executor.record_call(self.id, execution, record)
                except OSError as error:
                    _log.error("a call of %s could not be recorded", call.tool, exc_info=error)
                    answer = _failure("AuditFailed", f"{call.tool} was called, but that could not be recorded")
        return answer

    def _keep(self, record: CallRecord, held_bytes: int) -> None:
        self._kept_bytes += held_bytes
        fits = self._kept_bytes <= _MAX_KEPT_BYTES
        self.calls.append(record if fits else record.model_copy(update={"arguments": {}}))

    async def _answer(self, call: CallMessage, number: int) -> dict[str, Any]:
        config, registry = self._executor.config, self._executor.registry
        try:
            self._check(call, number)
            arguments: Mapping[str, Any] = call.arguments
            if call.tool in registry and registry[call.tool].needs_approval:
                registry.check(call.tool, arguments, caller=ToolCallerType.CODE_EXECUTION)  # before a person is asked
                arguments = await self._approved(call)
            async with self._slots:
                with self._clock(call.tool):
                    text = await registry.call_encoded(
                        call.tool,
                        arguments,
                        caller=ToolCallerType.CODE_EXECUTION,
                        as_text=config.anthropic_compatible,
                    )
            if len(text) > config.max_result_bytes:
                raise ToolCallError(  # noqa: TRY301 - all refusals become answers here
                    "ResultTooLarge", f"the result takes {len(text)} bytes; it may take {config.max_result_bytes}"
                )
            return {"json": text}
        except ToolCallError as error:
            return _failure(error.type, error.message)

    def _check(self, call: CallMessage, number: int) -> None:
        limit = self._executor.config.max_calls
        if call.refusal is not None:
            raise ToolCallError("InvalidRequest", call.refusal)
        if number > limit:
            raise ToolCallError("BudgetExceeded", f"an execution may make {limit} calls of tools")

    def _clock(self, tool: str) -> AbstractContextManager[None]:
        """A context for a call: while it waits for others, the time of the code stands still."""
        registry, kernel = self._executor.registry, self.kernel
        if kernel is None or tool not in registry or registry[tool].is_timed:
            return contextlib.nullcontext()
        return kernel.time_paused()

    async def _approved(self, call: CallMessage) -> Mapping[str, Any]:
        approver, kernel = self._executor.approver, self.kernel
        if approver is None or kernel is None:
            raise ToolCallError("ApprovalRequired", f"{call.tool} needs an approval, and there is no approver here")
        if len(self.waiting) >= _MAX_WAITING:
            raise ToolCallError("TooManyApprovals", f"{_MAX_WAITING} calls wait for an approval; await some of them")
        request = ApprovalRequest(
            session_id=self.id,
            sandbox=self.sandbox.name,
            process_id=kernel.process_id,
            code=self.code,
            cell=call.cell,
            call=call.call,
            tool=call.tool,
            arguments=call.arguments,
        )
        self.waiting[call.call] = request
        try:
            with kernel.time_paused():
                await self._executor.keep_alive(self)
                decision = await approver.decide(request)
        except asyncio.CancelledError:
            if not self.goes_on:
                self._executor.withdraw(request)
            raise
        except Exception as error:  # the approver is the caller's own: code must not wait for ever
            _log.error("the approver failed for %s", call.tool, exc_info=error)
            raise ToolCallError("ApprovalFailed", f"the approver of {call.tool} failed") from error
        finally:
            del self.waiting[call.call]
        if not decision.allowed:
            raise denial(request, decision)
        return call.arguments if decision.arguments is None else decision.arguments


class CodeExecutor:
    """Runs code in sandboxes, and the tools that it calls here.

    Use it as a context manager, or call `aclose`. Without an `engine` it opens one of its own.
    """

    def __init__(
        self,
        registry: ToolRegistry,
        config: CodeConfig | None = None,
        *,
        engine: Engine | None = None,
        approver: Approver | None = None,
        audit: ExecutionAudit | None = None,
    ) -> None:
        self.registry = registry
        self.config = config or CodeConfig()
        self.approver = approver
        self._audit = audit
        self._engine = engine
        self._owns_engine = engine is None
        self._opening = anyio.Lock()
        self._sessions: dict[str, _Session] = {}
        self._closed: deque[str] = deque(maxlen=_MAX_CLOSED)
        self._ready: deque[_Session] = deque()
        self._background: set[asyncio.Task[None]] = set()
        self._withdrawing: set[asyncio.Task[None]] = set()
        self._cleanup: asyncio.Task[None] | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._is_closed = False

    async def __aenter__(self) -> Self:
        self._refill()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # ------------------------------------------------------------------------------------------------- executing

    async def execute(
        self,
        code: str,
        session_id: str | None = None,
        reuse_session: bool = False,
        *,
        timeout_s: float | None = None,
        on_output: OnCellOutput | None = None,
    ) -> tuple[ExecutionResult, str | None]:
        """Run code to its end. Returns the result, and the id of the session if it is still open.

        With `session_id` it runs in that session, where variables, imports and files of earlier executions are. With
        `reuse_session` a new session is kept for later executions. Otherwise its session is closed afterwards. What the
        code does wrong is in the result; it raises nothing.

        Raises:
            InvalidRequest: there is no such session, there are too many, or the image has no interpreter.
            SandboxError: the sandbox failed.
        """
        reuse = self.config.enable_session_reuse and (reuse_session or session_id is not None)
        session = await self._new_session(once=not reuse) if session_id is None else self._find(session_id)
        session.busy += 1
        try:
            result = await self._run(session, code, timeout_s or self.config.timeout_s, on_output)
        except BaseException:
            if not reuse:
                with anyio.CancelScope(shield=True):
                    await self.close_session(session.id)
            raise
        finally:
            session.busy -= 1
            session.touch()
        if reuse or result.suspended:
            return result, session.id
        await self.close_session(session.id)
        return result, None

    async def open_session(
        self,
        sandbox: Sandbox | None = None,
        *,
        user: str | None = None,
        cwd: str | None = None,
        leave_running: bool = False,
    ) -> str:
        """A new session, for later executions. Returns its id. With `sandbox` it runs there, and leaves it when it is
        closed; without, it has one of its own.

        `user` and `cwd` are those of the code, in a sandbox that is given. With `leave_running` it goes on with the
        session that was left there so before, variables included, and is left so again when it is closed.

        Raises:
            InvalidRequest: there are too many, or the image has no interpreter; or the session that was left there is
                used by another process, or waits for one.
            SandboxError: the sandbox failed.
        """
        if sandbox is None:
            return (await self._new_session()).id
        session = _Session(
            self,
            f"code-{secrets.token_hex(5)}",
            sandbox,
            owns_sandbox=False,
            leaves_kernel=leave_running,
            user=user,
            cwd=cwd,
        )
        found = await self._kernels_in(sandbox) if leave_running else []
        if not found:
            await self._start_kernel(session)
        else:
            session.kernel = await CodeSession.attach(
                sandbox, found[-1], session, language=self.config.language, only_idle=True
            )
            if len(self.registry):
                session.kernel.set_stubs(self._stubs())
            session.executions = session.kernel.cells
        self._sessions[session.id] = session
        return session.id

    async def interrupt(self, session_id: str) -> None:
        """Interrupt the code that runs in a session, as Ctrl-C would. Does nothing if none runs.

        Raises:
            InvalidRequest: there is no such session.
        """
        kernel = self._find(session_id).kernel
        if kernel is not None:
            await kernel.interrupt()

    async def complete(self, session_id: str, code: str) -> tuple[str, tuple[str, ...]]:
        """The word at the end of `code`, and what it may become in a session, for a prompt.

        Raises:
            InvalidRequest: there is no such session.
        """
        kernel = self._find(session_id).kernel
        return ("", ()) if kernel is None else await kernel.complete(code)

    async def _run(
        self, session: _Session, code: str, timeout_s: float | None, on_output: OnCellOutput | None
    ) -> ExecutionResult:
        async with session.turn:
            kernel, replaced = session.kernel, False
            if kernel is None or not kernel.is_alive:
                kernel, replaced = await self._next_kernel(session)
            session.begin(code)
            outcome = await kernel.run(
                code, timeout_s=timeout_s, output_limit_bytes=self.config.output_limit_bytes, on_output=on_output
            )
            session.loss_is_told = outcome.kernel_lost is not None
            return await self._finished(session, replace(outcome, replaced=True) if replaced else outcome)

    async def _next_kernel(self, session: _Session) -> tuple[CodeSession, bool]:
        """The kernel for a session whose last one cannot be reached: the same, if its sandbox slept and was woken; else
        a new one. True: that variables are lost has not been told yet."""
        try:
            return await self._reach_kernel(session)
        except SandboxDied:  # gVisor ends with a process that uses up its memory; the files are there
            if not session.owns_sandbox or session.is_ephemeral:
                raise
            session.sandbox = await (await self.engine()).wake(session.sandbox.name)
            return await self._reach_kernel(session)

    async def _reach_kernel(self, session: _Session) -> tuple[CodeSession, bool]:
        last = session.kernel
        if last is not None and last.is_cut_off and last.process_id in await self._kernels_in(session.sandbox):
            await last.detach()
            session.kernel = await CodeSession.attach(
                session.sandbox, last.process_id, session, stubs=self._stubs(), language=self.config.language
            )
            return session.kernel, False
        return await self._start_kernel(session), last is not None and not session.loss_is_told

    async def _finished(self, session: _Session, outcome: CellOutcome) -> ExecutionResult:
        await self._withdrawn()
        result = await self._result(session, outcome)
        if self._audit is not None and not result.suspended:
            self._audit.execution(session.id, session.executions, session.code, result)
        return result

    async def _result(self, session: _Session, outcome: CellOutcome) -> ExecutionResult:
        error = outcome.error
        output, _ = outcome.stdout.text()
        stderr, _ = outcome.stderr.text()
        return ExecutionResult(
            success=error is None and not outcome.suspended,
            output=output,
            stderr=stderr,
            error=None
            if error is None
            else ExecutionFailure(type=error.type, message=error.message, traceback=error.traceback, line=error.line),
            parts=tuple(rich_part(part) for part in outcome.parts),
            warnings=outcome.warnings,
            calls=tuple(session.calls),
            files=await self._outbox(session.sandbox, outcome.outbox),
            duration_s=outcome.duration_s,
            timed_out=outcome.timed_out,
            out_of_memory=outcome.out_of_memory,
            session_replaced=outcome.kernel_lost is not None or outcome.replaced,
            suspended=outcome.suspended,
            output_file=outcome.output_files.get("stdout"),
        )

    async def _outbox(self, sandbox: Sandbox, named: tuple[tuple[str, int], ...]) -> tuple[OutboxFile, ...]:
        """The files that the kernel has named. The names are hostile: a file is read as the sandbox's own user."""
        found: list[OutboxFile] = []
        left = _MAX_OUTBOX_BYTES
        for path, _ in named[:_MAX_OUTBOX_FILES]:
            if path.startswith("/") or ".." in path.split("/"):
                continue
            with contextlib.suppress(AtollError):
                stat = await sandbox.files.stat(f"outbox/{path}", follow=False)
                if stat.kind != "file":
                    continue
                data = None
                if stat.size <= left:
                    data = await sandbox.files.read_bytes(f"outbox/{path}", limit=left)
                    left -= len(data)
                found.append(OutboxFile(path=path, size_bytes=stat.size, data=data))
        return tuple(found)

    # -------------------------------------------------------------------------------------- to disk, and as copies

    async def suspend(self, session_id: str) -> None:
        """Put a session to disk, with its variables and with code that waits for an approval. The execution that waits
        returns with `suspended`. `resume` goes on with it, here or in another process, at any later time.

        Raises:
            NotCheckpointable: its runtime cannot save processes, so that its variables would be lost. Nothing changed.
            InvalidRequest: there is no such session, or its code runs and waits for no approval.
        """
        session, engine = self._find(session_id), await self.engine()
        runtime = session.sandbox.info.runtime
        if not engine.runtimes()[runtime].memory_checkpoint:
            raise NotCheckpointable(
                f"{runtime} cannot save processes, so the variables of session {session_id!r} would be lost; "
                "sessions that are to wait on disk need the runtime runsc"
            )
        if session.busy and not session.waiting:
            raise InvalidRequest(
                f"session {session_id!r} runs code that waits for no approval; wait until it has ended"
            )
        if session.is_ephemeral or not session.owns_sandbox:
            raise InvalidRequest(
                f"session {session_id!r} ends with its execution, or is in a sandbox of its user; suspend one that was "
                "opened with reuse_session=True"
            )
        session.goes_on = True
        if session.kernel is not None:
            await session.kernel.suspend()
        await session.sandbox.update(ttl_s=self.config.approval_ttl_s)
        await engine.sleep(session.sandbox.name)
        self._sessions.pop(session_id, None)

    async def resume(self, session_id: str, *, timeout_s: float | None = None) -> ExecutionResult | None:
        """Take up a session that was suspended, or that a process has left behind which is gone.

        If its code waits for an approval, the approver is asked again, and this returns the result of the execution
        when it has ended. None: nothing waits, and the session can be used.

        Raises:
            InvalidRequest: no sandbox has this session, or another process uses it.
        """
        engine = await self.engine()
        try:
            sandbox = await engine.wake(session_id)
        except SandboxNotFound:
            raise InvalidRequest(f"there is no session {session_id!r} to take up: its sandbox is gone") from None
        session, kernel = await self._adopt(sandbox)
        if not kernel.is_waiting:
            return None
        session.code = kernel.running_code
        session.busy += 1
        try:
            outcome = await kernel.finish(timeout_s=timeout_s or self.config.timeout_s)
        finally:
            session.busy -= 1
            session.touch()
        return await self._finished(session, outcome)

    async def fork_session(self, session_id: str, count: int = 1) -> list[str]:
        """Copies of a session that go on from its state, variables included. Returns their ids.

        Raises:
            NotCheckpointable: its runtime cannot copy processes.
            InvalidRequest: there is no such session, or it runs code.
        """
        session, engine = self._find(session_id), await self.engine()
        runtime = session.sandbox.info.runtime
        if not engine.runtimes()[runtime].memory_checkpoint:
            raise NotCheckpointable(
                f"{runtime} cannot copy processes, so copies of session {session_id!r} would lack its variables; "
                "sessions that are to be forked need the runtime runsc"
            )
        if session.busy or session.kernel is None:
            raise InvalidRequest(f"session {session_id!r} runs code; fork it when that has ended")
        process_id = session.kernel.process_id
        session.goes_on = True
        await session.kernel.detach()
        names = [f"code-{secrets.token_hex(5)}" for _ in range(count)]
        try:
            forks = await engine.fork(session.sandbox.name, count, names=names)
        finally:
            session.goes_on = False
            session.kernel = await CodeSession.attach(
                session.sandbox, process_id, session, language=self.config.language
            )
        return [(await self._adopt(fork))[0].id for fork in forks]

    async def _adopt(self, sandbox: Sandbox) -> tuple[_Session, CodeSession]:
        """A session of this executor from a sandbox in which a kernel runs."""
        found = await self._kernels_in(sandbox)
        if not found:
            raise InvalidRequest(f"the sandbox {sandbox.name!r} has no code session: no kernel runs in it")
        session = _Session(self, sandbox.name, sandbox)
        kernel = await CodeSession.attach(
            sandbox, found[-1], session, stubs=self._stubs(), language=self.config.language
        )
        session.kernel = kernel
        session.executions = kernel.cells
        self._sessions[session.id] = session
        self._start_renewal()
        await self.keep_alive(session)
        return session, kernel

    async def _kernels_in(self, sandbox: Sandbox) -> list[int]:
        """The processes of kernels of this language that run in a sandbox, the newest last."""
        mark = f"{KERNEL_MARK} {self.config.language}"
        return [each.id for each in await sandbox.processes() if each.live and mark in each.command]

    # -------------------------------------------------------------------------------------------------- sessions

    async def _new_session(self, *, once: bool = False) -> _Session:
        """A session. `once`: for one execution."""
        if self._is_closed:
            raise InvalidRequest("the executor is closed; make another")
        if len(self._sessions) >= self.config.max_sessions:
            raise InvalidRequest(
                f"{len(self._sessions)} sessions are open, and there may be {self.config.max_sessions}; close one"
            )
        session = self._ready.popleft() if self._ready else await self._create(once=once)
        self._sessions[session.id] = session
        self._refill(_REFILL_S)
        return session

    async def _create(self, *, once: bool = False) -> _Session:
        engine = await self.engine()
        config, id = self.config, f"code-{secrets.token_hex(5)}"
        may_wait = self.approver is not None and any(tool.needs_approval for tool in self.registry)
        is_ephemeral = config.ephemeral or (once and not may_wait)
        sandbox = await engine.create(
            id,
            image=config.image,
            runtime=config.runtime,
            limits=Limits(memory_bytes=config.memory_bytes, cpus=config.cpus),
            network=config.network,
            env=config.env,
            ephemeral=is_ephemeral,
            ttl_s=None if is_ephemeral else self._lease_s,
        )
        session = _Session(self, id, sandbox, is_ephemeral=is_ephemeral)
        session.expires = time.monotonic() + self._lease_s
        self._start_renewal()
        try:
            await self._start_kernel(session)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await sandbox.destroy()
            raise
        return session

    async def refresh_tools(self, session_id: str) -> None:
        """Show a session the tools that the registry has now: those that were added or removed since it began.

        Raises:
            InvalidRequest: there is no such session.
        """
        kernel = self._find(session_id).kernel
        if kernel is not None and kernel.is_alive:  # a new kernel gets the tools of now anyway
            kernel.set_stubs(self._stubs())

    async def _start_kernel(self, session: _Session) -> CodeSession:
        if session.kernel is not None:
            await session.kernel.detach()
        kernel = await CodeSession.start(
            session.sandbox,
            session,
            stubs=self._stubs(),
            language=self.config.language,
            env=self.config.env,
            user=session.user,
            cwd=session.cwd,
        )
        session.kernel = kernel
        return kernel

    # Sessions are leased: what a killed process leaves behind ends by itself, at the end of its sandbox's lifetime.

    @property
    def _lease_s(self) -> float:
        return self.config.session_timeout_seconds + _LEASE_MARGIN_S

    def _start_renewal(self) -> None:
        if self._renewal is None:
            self._renewal = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 4)
            for session in [*self._sessions.values(), *self._ready]:
                await self.keep_alive(session)

    async def keep_alive(self, session: _Session) -> None:
        """Let the sandbox of a session live on, and longer if a call waits for an approval. Seldom does something."""
        lifetime_s = self.config.approval_ttl_s if session.waiting else self._lease_s
        if not session.owns_sandbox or session.is_ephemeral or session.goes_on:
            return
        if lifetime_s / 2 < session.expires - time.monotonic() <= lifetime_s:
            return
        with contextlib.suppress(AtollError):  # its sandbox is gone, which the next execution tells
            await session.sandbox.update(ttl_s=lifetime_s)
            session.expires = time.monotonic() + lifetime_s

    def _stubs(self) -> Mapping[str, Any]:
        tools, models = self.registry.stubs(anthropic_compatible=self.config.anthropic_compatible)
        return {"tools": tools, "models": models}

    @property
    def prepared(self) -> int:
        """Sessions that wait to be used."""
        return len(self._ready)

    def _refill(self, after_s: float = 0) -> None:
        missing = self.config.prepared_sessions - len(self._ready) - len(self._background)
        for _ in range(max(0, missing) if not self._is_closed else 0):
            task = asyncio.create_task(self._prepare(after_s))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _prepare(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        with contextlib.suppress(AtollError):  # the caller that needs one gets the error
            self._ready.append(await self._create())

    async def engine(self) -> Engine:
        """The engine that has the sandboxes."""
        async with self._opening:
            if self._engine is None:
                self._engine = await open_engine()
            return self._engine

    def _find(self, session_id: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is not None:
            return session
        if session_id in self._closed:
            raise InvalidRequest(
                f"the session {session_id!r} was closed, or not used for {self.config.session_timeout_seconds:g} s; "
                "begin a new one without session_id"
            )
        known = ", ".join(map(repr, list(self._sessions)[:8])) or "none are open"
        raise InvalidRequest(f"there is no session {session_id!r} (sessions: {known})")

    def get_session(self, session_id: str) -> SessionInfo | None:
        """The session, or None if it is not open."""
        session = self._sessions.get(session_id)
        return None if session is None else self._info(session)

    @property
    def active_sessions(self) -> dict[str, SessionInfo]:
        """The sessions that are open, by id."""
        return {id: self._info(session) for id, session in self._sessions.items()}

    def _info(self, session: _Session) -> SessionInfo:
        return SessionInfo(
            id=session.id,
            sandbox=session.sandbox.name,
            language=self.config.language,
            version="" if session.kernel is None else session.kernel.version,
            created_at=session.created_at,
            last_used_at=session.used_at,
            executions=session.executions,
        )

    async def close_session(self, session_id: str) -> bool:
        """End a session and its sandbox. False: it was not open."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        self._closed.append(session_id)
        await self._end(session)
        return True

    async def _end(self, session: _Session) -> None:
        with anyio.CancelScope(shield=True):
            if not session.owns_sandbox:
                if session.kernel is not None:
                    await (session.kernel.detach() if session.leaves_kernel else session.kernel.aclose())
            else:
                if session.kernel is not None:
                    await session.kernel.detach()  # it dies with its sandbox
                await session.sandbox.destroy()
            await self._withdrawn()

    async def close_all_sessions(self) -> int:
        """End all sessions. Returns how many there were."""
        ids = list(self._sessions)
        for id in ids:
            await self.close_session(id)
        return len(ids)

    def start_cleanup_task(self) -> None:
        """Close sessions that are not used, from now on. Does nothing if it runs."""
        if self._cleanup is None or self._cleanup.done():
            self._cleanup = asyncio.create_task(self._clean_up())

    async def stop_cleanup_task(self) -> None:
        """End that task. Does nothing if it does not run."""
        if self._cleanup is not None:
            self._cleanup.cancel()
            await asyncio.wait([self._cleanup])
            self._cleanup = None

    async def _clean_up(self) -> None:
        while True:
            await asyncio.sleep(self.config.cleanup_interval_seconds)
            await self.close_expired_sessions()

    async def close_expired_sessions(self) -> int:
        """Close the sessions that were not used for `session_timeout_seconds`. Returns how many."""
        oldest = time.monotonic() - self.config.session_timeout_seconds
        expired = [id for id, session in self._sessions.items() if not session.busy and session.used < oldest]
        for id in expired:
            await self.close_session(id)
        return len(expired)

    def withdraw(self, request: ApprovalRequest) -> None:
        """Take a request back, soon: the caller is being cancelled, and may be so again."""
        if self.approver is not None:
            task = asyncio.create_task(try_to_withdraw(self.approver, request))
            self._withdrawing.add(task)
            task.add_done_callback(self._withdrawing.discard)

    async def _withdrawn(self) -> None:
        if self._withdrawing:
            await asyncio.wait(self._withdrawing)

    def record_call(self, session_id: str, cell: int, record: CallRecord) -> None:
        if self._audit is not None:
            self._audit.call(session_id, cell, record)

    async def aclose(self) -> None:
        """End everything that this has started. Closing twice does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        with anyio.CancelScope(shield=True):
            await self.stop_cleanup_task()
            if self._renewal is not None:
                self._background.add(self._renewal)
            for task in list(self._background):
                task.cancel()
            if self._background:
                await asyncio.wait(self._background)
            while self._ready:
                await self._end(self._ready.popleft())
            await self.close_all_sessions()
            if self._owns_engine and self._engine is not None:
                await self._engine.aclose()


def _failure(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"type": kind, "message": message}}
