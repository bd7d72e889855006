"""A kernel in a sandbox: start it, run cells, interrupt them, and pass its calls on.

Owns the kernel's process, which output belongs to which cell, the time limit of a cell, and what happens when the
kernel dies or breaks the protocol: the result says so, and the next cell gets a new kernel in the same sandbox. A host
process that comes later attaches to a kernel that is still there, with its variables and the calls that wait. Not here:
what a call does and whether it is allowed (`CallHandler`, implemented by `executor.py`), and the messages
(`messages.py`). Used by `executor.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import re
import secrets
import signal as signals
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol, cast

import anyio

from atoll.code.languages import Language, LanguageName, language_of
from atoll.code.messages import (
    ANY_MARKER,
    MARKER,
    MAX_PARTS_BYTES,
    MAX_PENDING,
    MAX_PENDING_BYTES,
    CallMessage,
    CancelMessage,
    CellError,
    ChannelViolation,
    CompletionsMessage,
    DoneMessage,
    Message,
    MessageReader,
    PartMessage,
    ReadyMessage,
)
from atoll.contract.errors import AtollError, InvalidRequest, SandboxError
from atoll.contract.model import Exited, Output
from atoll.runtime.guest.process import Collector, Process
from atoll.runtime.guest.stream import ProcessChannel
from atoll.runtime.sandbox import Sandbox

START_S = 30.0
"""How long a kernel may take to start."""
GRACE_S = 2.0
"""How long an interrupted cell may take to end before its kernel is killed."""
DUMP_S = 0.5
"""How long a kernel that is to be killed may take to say where it is."""
MARKER_S = 5.0
"""How long output that was written before the end of a cell may take to arrive."""
MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""Results that the kernel has not read, above which no more calls are made."""
OUTPUT_DIRECTORY = "/tmp/atoll-output"
_MAX_DUMP_BYTES = 1 << 16
StreamName = Literal["stdout", "stderr"]


class CallHandler(Protocol):
    """What makes the calls of a session. Trusts nothing in them."""

    async def handle(self, call: CallMessage) -> dict[str, Any]:
        """What is sent to the code: `{"value": …}`, `{"json": "…"}` (a value that is encoded already) or
        `{"error": {"type": …, "message": …}}`."""


@dataclass(frozen=True, slots=True)
class CellOutcome:
    """What became of a cell."""

    stdout: Collector
    stderr: Collector
    parts: tuple[PartMessage, ...]
    error: CellError | None
    warnings: tuple[str, ...]
    outbox: tuple[tuple[str, int], ...]
    duration_s: float
    timed_out: bool = False
    kernel_lost: str | None = None
    """Why its kernel is gone, and with it the variables. None: it is there."""
    replaced: bool = False
    """True: the kernel of the cell before is gone, and it ran in a new one."""
    out_of_memory: bool = False
    suspended: bool = False
    """True: it has not ended, and the handle was given up."""
    output_files: Mapping[StreamName, str] = field(default_factory=dict)
    """Where the whole of an output is that was longer than its limit."""


class _OutputOfCell:
    """One output stream of a cell: what is kept, and the file that has the whole of it."""

    def __init__(self, sandbox: Sandbox, path: str, limit_bytes: int) -> None:
        self.collected = Collector(limit_bytes)
        self.path = path
        self.has_file = False
        self._sandbox = sandbox
        self._limit_bytes = limit_bytes
        self._head: bytearray | None = bytearray()
        self._unwritten = bytearray()

    async def add(self, data: bytes) -> None:
        self.collected.add(data)
        if self._head is not None:
            self._head += data
            if len(self._head) <= self._limit_bytes:
                return
            self._unwritten, self._head = self._head, None
            self.has_file = True
        elif self.has_file:
            self._unwritten += data
        if len(self._unwritten) > 1 << 20:
            await self.flush()

    async def flush(self) -> None:
        if not self._unwritten or not self.has_file:
            return
        try:
            await self._sandbox.files.write_bytes(self.path, bytes(self._unwritten), append=True, parents=True)
        except AtollError:  # its disk is full, say: there is no file then, and the result names none
            self.has_file = False
        self._unwritten.clear()


class _RunningCell:
    """A cell that runs."""

    def __init__(
        self,
        number: int,
        marker: str,
        sandbox: Sandbox,
        limit_bytes: int,
        on_output: OnCellOutput | None,
        on_part: OnCellPart | None = None,
    ) -> None:
        self.number = number
        self.on_part = on_part
        self.marker = marker.encode()
        directory = f"{OUTPUT_DIRECTORY}/{marker[-8:]}-cell-{number}"
        self.outputs: dict[StreamName, _OutputOfCell] = {
            "stdout": _OutputOfCell(sandbox, f"{directory}.stdout.txt", limit_bytes),
            "stderr": _OutputOfCell(sandbox, f"{directory}.stderr.txt", limit_bytes),
        }
        self.on_output = on_output
        self.parts: list[PartMessage] = []
        self.parts_bytes = 0
        self.dump: bytearray | None = None
        """What the kernel has written on stderr since it was asked where it is."""
        self.done: asyncio.Future[DoneMessage] = asyncio.get_running_loop().create_future()
        self.marked: dict[StreamName, asyncio.Event] = {"stdout": asyncio.Event(), "stderr": asyncio.Event()}

    async def add(self, stream: StreamName, data: bytes) -> None:
        if self.dump is not None and stream == "stderr":
            self.dump += data[: max(0, _MAX_DUMP_BYTES - len(self.dump))]
        elif data:
            await self.outputs[stream].add(data)
            if self.on_output is not None and (waiting := self.on_output(stream, data)) is not None:
                await waiting


OnCellOutput = Callable[[StreamName, bytes], Awaitable[None] | None]
"""Receives output while a cell runs. It must not raise, and must be fast or return what is awaited before more output
is taken."""


OnCellPart = Callable[[PartMessage], None]
"""Receives what a cell shows, while it runs. It must not raise, and must be fast."""


class CodeSession:
    """One kernel in one sandbox. Cells run one after the other, in the order in which they were given.

    Get one from `start` or `attach`; `aclose` ends the kernel, `detach` leaves it running.
    """

    def __init__(self, sandbox: Sandbox, process: Process, handler: CallHandler, *, language: Language) -> None:
        self.sandbox = sandbox
        self.handler = handler
        self.version = ""
        """The version of the kernel's language."""
        self._language = language
        self._process = process
        self._channel = cast("ProcessChannel", process.channel(0))
        self._reader = MessageReader()
        self._cells = 0
        self._running_code = ""
        self._cell: _RunningCell | None = None
        self._early: dict[StreamName, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._held: dict[StreamName, bytes] = {"stdout": b"", "stderr": b""}
        self._running = anyio.Lock()
        self._ready: asyncio.Future[ReadyMessage] = asyncio.get_running_loop().create_future()
        self._completions: asyncio.Future[CompletionsMessage] | None = None
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._calls_held: dict[int, int] = {}
        self._calls_bytes = 0
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._posted, self._sent = asyncio.Event(), asyncio.Event()
        self._paused = 0
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.is_cut_off = False
        """Whether the sandbox is gone or asleep, so that the kernel may be there again when it is woken."""
        self._out_of_memory = False
        self._detached = self._suspended = False
        self._replaying = self._only_idle = False
        """Whether output that comes may be that of earlier cells, which the guest has kept."""
        self._context = contextvars.copy_context()
        work = (self._write_channel(), self._read_output())
        self._tasks = [asyncio.create_task(each) for each in work]
        self._channel.listen(self._hear)

    # -------------------------------------------------------------------------------------------- start and end

    @classmethod
    async def start(
        cls,
        sandbox: Sandbox,
        handler: CallHandler,
        *,
        stubs: Mapping[str, Any],
        language: LanguageName = "python",
        interpreter: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
    ) -> CodeSession:
        """Start a kernel. `stubs` are the fields of the message `tools`. If this fails or is cancelled, none runs.

        `interpreter` is the program of the image that runs it. Unset: `python3`, `node` or `bash`.

        Raises:
            InvalidRequest: the image has no such program.
            SandboxError: the kernel did not start.
        """
        spoken = language_of(language, interpreter)
        process = await sandbox.spawn(
            spoken.command, env={"MPLBACKEND": "agg", **(env or {})}, cwd=cwd, user=user, channels=1, keep=True
        )
        session = cls(sandbox, process, handler, language=spoken)
        try:
            await session._greet(spoken.source + spoken.encode({"t": "tools", **stubs}))
        except BaseException:
            with anyio.CancelScope(shield=True):
                await session.aclose()
            raise
        return session

    @classmethod
    async def attach(
        cls,
        sandbox: Sandbox,
        process_id: int,
        handler: CallHandler,
        *,
        stubs: Mapping[str, Any] | None = None,
        language: LanguageName = "python",
        only_idle: bool = False,
    ) -> CodeSession:
        """Go on with a kernel that another process, or an earlier handle, has left running.

        Calls that wait are made again through `handler`, and the cell that waits for them goes on: see `finish`.
        Without `stubs` the code sees the tools that it saw before.

        Raises:
            ProcessNotFound: it has ended.
            InvalidRequest: another process uses it; or, with `only_idle`, code runs in it or waits for a call.
            SandboxError: it does not answer.
        """
        process = await sandbox.attach(process_id, channels=1)
        spoken = language_of(language)
        session = cls(sandbox, process, handler, language=spoken)
        session._replaying, session._only_idle = True, only_idle
        try:
            await session._greet(spoken.cut, b"" if stubs is None else spoken.encode({"t": "tools", **stubs}))
        except BaseException:
            with anyio.CancelScope(shield=True):
                await session.detach()
            raise
        return session

    @property
    def process_id(self) -> int:
        """The argument of `attach`."""
        return self._process.id

    @property
    def is_alive(self) -> bool:
        return not self._lost.done()

    @property
    def cells(self) -> int:
        """The number of its last cell."""
        return self._cells

    @property
    def is_waiting(self) -> bool:
        """Whether an earlier host has left a cell running."""
        return self._cell is not None

    @property
    def running_code(self) -> str:
        """The code of the cell that an earlier host has left running, as the kernel tells it."""
        return self._running_code

    async def aclose(self) -> None:
        """End the kernel with all that it started. Does not raise."""
        if self.is_alive:
            with contextlib.suppress(AtollError, anyio.ClosedResourceError):
                await self._process.kill()
                with anyio.move_on_after(GRACE_S, shield=True):
                    await asyncio.wait([self._lost])
        await self.detach()

    async def suspend(self) -> None:
        """`detach`, and let the cell that waits return as suspended."""
        self._suspended = True
        if not self._lost.done():
            self._lost.set_result("the session was suspended")
        await self.detach()

    async def detach(self) -> None:
        """Leave the kernel running, with what waits in it. Does not raise."""
        self._detached = True
        tasks = [*self._tasks, *self._calls.values()]
        for task in tasks:
            task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(AtollError, anyio.ClosedResourceError):
                await self._process.detach()

    async def _greet(self, before: bytes, after: bytes = b"") -> None:
        nonce = secrets.token_hex(16)
        self._reader.skip_until(nonce)
        try:
            with anyio.fail_after(START_S):
                await self._channel.send(before + self._language.encode({"t": "hello", "nonce": nonce}) + after)
                await _first(self._ready, self._lost)
        except TimeoutError:
            raise SandboxError(f"the kernel did not answer within {START_S:g} s") from None
        except anyio.BrokenResourceError:
            await asyncio.wait([self._lost])
        if not self._ready.done():
            raise self._no_kernel()
        ready = self._ready.result()
        self.version = ready.version
        if self._only_idle and (ready.running is not None or ready.calls):
            raise InvalidRequest(
                f"code runs in the session of sandbox {self.sandbox.name!r}, or waits for a call, which only the "
                "program that began it can make; `atoll approvals` shows the calls that wait for an approval"
            )
        self._resume(ready)

    def _no_kernel(self) -> AtollError:
        said = bytes(self._early["stderr"]).decode("utf-8", "replace").strip()
        if "not found" in said or "No such file" in said:
            program = self._language.command[0]
            return InvalidRequest(
                f"the image has no {program}, which cells of this language need; choose an image that has it"
            )
        return SandboxError(f"the kernel did not start: {said or self._lost.result()}")

    def _resume(self, ready: ReadyMessage) -> None:
        if ready.running is not None:
            number, marker, self._running_code = ready.running
            self._cells = number
            self._cell = _RunningCell(number, marker, self.sandbox, 1 << 20, None)
            self._cell.parts += ready.parts
            for call in ready.calls:
                self._take_call(call)
        elif ready.last is not None:
            self._cells = ready.last.cell

    # ------------------------------------------------------------------------------------------------- one cell

    async def run(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        output_limit_bytes: int = 1 << 20,
        on_output: OnCellOutput | None = None,
        on_part: OnCellPart | None = None,
        is_typescript: bool = False,
    ) -> CellOutcome:
        """Run a cell to its end. If this is cancelled, the cell is interrupted first, and its variables stay.

        Time in which a call waits for an approval does not count as time of the cell. With `is_typescript`, a kernel of
        JavaScript takes the types off the code; where the image has nothing that can, the cell ends with an error.

        Raises:
            SandboxError: the sandbox is gone.
        """
        async with self._running:
            self._cells += 1
            self._replaying = False
            marker = f"{MARKER}{secrets.token_hex(16)}"
            cell = self._cell = _RunningCell(self._cells, marker, self.sandbox, output_limit_bytes, on_output, on_part)
            for stream, early in self._early.items():  # what background tasks have printed between cells
                await cell.add(stream, ANY_MARKER.split(early)[-1])
                early.clear()
            asked: dict[str, Any] = {"t": "run", "cell": cell.number, "code": code, "marker": marker}
            message = self._language.encode({**asked, "typescript": True} if is_typescript else asked)
            return await self._follow(cell, timeout_s, message)

    async def finish(self, *, timeout_s: float | None = None) -> CellOutcome:
        """The outcome of the cell that an earlier host has left running.

        Raises:
            InvalidRequest: none is.
            SandboxError: the sandbox is gone.
        """
        async with self._running:
            if self._cell is None:
                raise InvalidRequest("no cell of an earlier process waits in this session")
            for stream, early in self._early.items():
                data = bytes(early)
                early.clear()
                await self._take_output(stream, data)
            return await self._follow(self._cell, timeout_s, None)

    async def _follow(self, cell: _RunningCell, timeout_s: float | None, message: bytes | None) -> CellOutcome:
        began = time.monotonic()
        timed_out = False
        try:
            if message is not None and self.is_alive:
                self._post(message)
            timed_out = not await self._ended(cell, timeout_s)
            if timed_out:
                await self._interrupt(cell)
            await self._settle(cell)
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                await self._interrupt(cell)
            raise
        finally:
            self._cell = None
        return self._outcome(cell, time.monotonic() - began, timed_out=timed_out)

    async def _ended(self, cell: _RunningCell, timeout_s: float | None) -> bool:
        """Wait for the end of the cell or of its kernel. False: its time is over."""
        left_s = timeout_s
        while not cell.done.done() and not self._lost.done():
            paused = self._paused > 0
            began = time.monotonic()
            changing = asyncio.ensure_future(self._resumed.wait() if paused else self._pausing())
            try:
                await _first(cell.done, self._lost, changing, timeout_s=None if paused else left_s)
            finally:
                changing.cancel()
            if left_s is not None and not paused:
                left_s -= time.monotonic() - began
                if left_s <= 0 and not self._paused:
                    return cell.done.done() or self._lost.done()
        return True

    async def _pausing(self) -> None:
        while not self._paused:
            self._pause_noticed = asyncio.Event()
            await self._pause_noticed.wait()

    _pause_noticed: asyncio.Event | None = None

    @contextlib.contextmanager
    def time_paused(self) -> Iterator[None]:
        """A context whose time does not count as time of the cell: a person is being asked."""
        self._paused += 1
        self._resumed.clear()
        if self._pause_noticed is not None:
            self._pause_noticed.set()
        try:
            yield
        finally:
            self._paused -= 1
            if not self._paused:
                self._resumed.set()

    async def interrupt(self) -> None:
        """Interrupt the cell that runs, as Ctrl-C would. Does nothing if none runs."""
        if self._cell is not None and self.is_alive:
            await self._process.signal(signals.SIGINT, tree=self._language.interrupts_children)

    async def _interrupt(self, cell: _RunningCell) -> None:
        """Interrupt the cell; if it does not end, have the kernel say where it is, and kill it."""
        ends: tuple[asyncio.Future[Any], ...] = (cell.done, self._lost)
        for signal, wait_s in ((signals.SIGINT, GRACE_S), (signals.SIGUSR2, DUMP_S), (signals.SIGKILL, GRACE_S)):
            if self._detached or any(each.done() for each in ends):
                return
            if signal == signals.SIGUSR2:
                cell.dump = bytearray()
            tree = signal == signals.SIGKILL or (signal == signals.SIGINT and self._language.interrupts_children)
            await self._process.signal(signal, tree=tree)
            await _first(*((self._lost,) if signal == signals.SIGKILL else ends), timeout_s=wait_s)

    async def _settle(self, cell: _RunningCell) -> None:
        """Wait for the output that was written before the end of the cell."""
        if cell.done.done() and not self._lost.done():
            with anyio.move_on_after(MARKER_S):
                for name in ("stdout", "stderr"):
                    if name in cell.done.result().streams:
                        marked = asyncio.ensure_future(cell.marked[name].wait())
                        await _first(marked, self._lost)
                        marked.cancel()
        for output in cell.outputs.values():
            await output.flush()

    def _outcome(self, cell: _RunningCell, duration_s: float, *, timed_out: bool) -> CellOutcome:
        done = cell.done.result() if cell.done.done() else None
        error = None if done is None else done.error
        lost = self._lost.result() if self._lost.done() and not self._suspended else None
        if lost is not None and done is None:
            error = CellError("SessionLost", lost, "", _dumped_line(cell.dump))
        return CellOutcome(
            stdout=cell.outputs["stdout"].collected,
            stderr=cell.outputs["stderr"].collected,
            parts=tuple(cell.parts),
            error=error,
            warnings=() if done is None else done.warnings,
            outbox=() if done is None else done.outbox,
            duration_s=duration_s,
            timed_out=timed_out,
            kernel_lost=lost,
            out_of_memory=self._out_of_memory,
            suspended=self._suspended and done is None,
            output_files={name: output.path for name, output in cell.outputs.items() if output.has_file},
        )

    async def complete(self, code: str) -> tuple[str, tuple[str, ...]]:
        """The word at the end of `code`, and what it may become."""
        async with self._running:
            if not self.is_alive:
                return "", ()
            self._completions = asyncio.get_running_loop().create_future()
            if not self._send({"t": "complete", "code": code}):
                return "", ()
            await _first(self._completions, self._lost, timeout_s=GRACE_S)
            if not self._completions.done():
                return "", ()
            found = self._completions.result()
            return found.word, found.found

    def set_stubs(self, stubs: Mapping[str, Any]) -> None:
        """Replace the tools that the code sees."""
        self._send({"t": "tools", **stubs})

    def _send(self, message: Mapping[str, Any]) -> bool:
        """False: this language has no such message."""
        if encoded := self._language.encode(message):
            self._post(encoded)
        return bool(encoded)

    def _post(self, message: bytes) -> None:
        """Send a message in its turn. Does not wait: the code may never read it."""
        self._unsent.append(message)
        self._unsent_bytes += len(message)
        self._posted.set()

    async def _write_channel(self) -> None:
        """Send messages one after the other: what waits for credit must not be mixed with the next, nor end halfway."""
        while True:
            await self._posted.wait()
            self._posted.clear()
            while self._unsent:
                message = self._unsent.popleft()
                with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    await self._channel.send(message)
                self._unsent_bytes -= len(message)
                self._sent.set()

    # --------------------------------------------------------------------------------------------- what comes in

    def _hear(self, data: bytes) -> None:
        """Take what the kernel has sent. The connection calls it, which all calls of the sandbox share: it raises
        nothing."""
        if self._lost.done() or self._detached:
            return
        try:
            for message in self._reader.feed(data):
                self._take(message)
            self._check_pending()
        except ChannelViolation as error:
            self._lose(f"the code damaged its channel to the host ({error}), so its process was ended")
            self._tasks.append(asyncio.create_task(self._process.kill()))

    def _check_pending(self) -> None:
        if len(self._calls) > MAX_PENDING:
            raise ChannelViolation(f"the code has more than {MAX_PENDING} calls without a result")

    def _take(self, message: Message) -> None:
        cell = self._cell
        match message:
            case CallMessage():
                self._take_call(message)
            case CancelMessage():
                self._cancel(message.call)
            case PartMessage():
                if cell is not None and message.cell == cell.number and len(cell.parts) < 10_000:
                    cell.parts_bytes += message.held_bytes
                    if cell.parts_bytes > MAX_PARTS_BYTES:
                        raise ChannelViolation(f"the values of a cell take more than {MAX_PARTS_BYTES} bytes")
                    cell.parts.append(message)
                    if cell.on_part is not None:
                        cell.on_part(message)
            case DoneMessage():
                if cell is not None and message.cell == cell.number and not cell.done.done():
                    cell.done.set_result(message)
            case ReadyMessage():
                if not self._ready.done():
                    self._ready.set_result(message)
            case CompletionsMessage():
                if self._completions is not None and not self._completions.done():
                    self._completions.set_result(message)

    def _take_call(self, call: CallMessage) -> None:
        if call.call in self._calls:
            raise ChannelViolation(f"the number {call.call} is used for two calls at once")
        if self._calls_bytes + call.held_bytes > MAX_PENDING_BYTES:
            why = f"calls without a result take more than {MAX_PENDING_BYTES} bytes; await some of them first"
            call = replace(call, arguments={}, held_bytes=0, refusal=why)
        self._calls_bytes += call.held_bytes
        self._calls[call.call] = asyncio.create_task(self._answer(call), context=self._context.copy())
        self._calls_held[call.call] = call.held_bytes

    def _cancel(self, number: int) -> None:
        if (task := self._calls.get(number)) is not None:
            task.add_done_callback(partial(self._forget, number))  # it may not have begun
            task.cancel()

    async def _answer(self, call: CallMessage) -> None:
        try:
            while self._unsent_bytes > MAX_UNSENT_BYTES:  # code that does not read its results gets no more of them
                self._sent.clear()
                await self._sent.wait()
            answer = await self.handler.handle(call)
            self._send({"t": "result", "call": call.call, **answer})
        finally:  # not in a callback of the task, which would cost each call a round of the event loop
            self._forget(call.call, asyncio.current_task())

    def _forget(self, number: int, task: asyncio.Task[None] | None) -> None:
        if self._calls.get(number) is task:
            del self._calls[number]
            self._calls_bytes -= self._calls_held.pop(number)

    async def _read_output(self) -> None:
        try:
            async for event in self._process:
                if isinstance(event, Output):
                    await self._take_output(event.stream, event.data)
                elif isinstance(event, Exited):
                    self._out_of_memory = event.out_of_memory
                    self._lose(_ending(event))
        except (SandboxError, anyio.ClosedResourceError) as error:
            self.is_cut_off = not self._lost.done()
            self._lose(f"the sandbox is gone: {error}")

    async def _take_output(self, stream: StreamName, data: bytes) -> None:
        """Give output to its cell. A cell's output ends at its marker; what comes later belongs to the next one."""
        data, self._held[stream] = self._held[stream] + data, b""
        cell = self._cell
        if self._replaying and cell is not None:
            before, own, after = data.partition(cell.marker)
            data = ANY_MARKER.split(before)[-1] + own + after
        if cell is None or cell.marked[stream].is_set():
            early = self._early[stream]
            early += data
            del early[: max(0, len(early) - (1 << 16))]
            return
        before, marker, after = data.partition(cell.marker)
        if marker:
            await cell.add(stream, before)
            cell.marked[stream].set()
            self._early[stream] += after
            return
        # What may be the beginning of the marker waits for the rest of it.
        at = data.rfind(b"\0", max(0, len(data) - len(cell.marker)))
        if at >= 0 and cell.marker.startswith(data[at:]):
            data, self._held[stream] = data[:at], data[at:]
        await cell.add(stream, data)

    def _lose(self, why: str) -> None:
        if not self._lost.done():
            self._lost.set_result(why)
            for number in self._calls:  # no code waits for them
                self._cancel(number)


async def _first(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Wait until one of them is done, or the time is over."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _ending(exited: Exited) -> str:
    if exited.out_of_memory:
        return "the session used up its memory, so its process was killed"
    if exited.signal == signals.SIGKILL:
        return "the session's process was killed"
    if exited.signal is not None:
        known = {each.value for each in signals.Signals}  # not all real-time signals have a name
        name = f" ({signals.Signals(exited.signal).name})" if exited.signal in known else ""
        return f"the session's process died of signal {exited.signal}{name}"
    return f"the session's process ended itself, with exit code {exited.exit_code}"


_DUMPED = re.compile(rb'File "<cell \d+>", line (\d{1,9})')


def _dumped_line(dump: bytearray | None) -> int | None:
    """The line of the cell that a killed kernel was at, as its fault handler has written it."""
    found = _DUMPED.search(dump or b"")
    return int(found[1]) if found else None
