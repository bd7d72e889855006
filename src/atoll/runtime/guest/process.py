"""Commands in a sandbox: the run to the end, the collected output, and the handle of a running process.

Owns the operations SPAWN, ATTACH, SIGNAL, PROCS and PS of the protocol, the time limit of a command, and how much
output is kept. Not here: what is asked for (`exec_request.py`), what its END means (`process_end.py`), connections
(`connection.py`, `stream.py`) and which sandbox a command runs in (`sandbox.py`). Used by `sandbox.py`,
`connections.py` and `surfaces/cli/`.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import errno
import signal as signals
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Literal, Self, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import ByteSendStream, ByteStream

from atoll.contract.errors import (
    AtollError,
    ExecTimeout,
    GuestProtocolError,
    InvalidRequest,
    ProcessNotFound,
    SandboxDied,
    SandboxError,
)
from atoll.contract.model import (
    ExecBytes,
    ExecResult,
    Exited,
    Gap,
    Output,
    ProcessEvent,
    ProcessInfo,
    SystemProcess,
    Truncation,
)
from atoll.contract.protocol import (
    FIRST_CHANNEL,
    MAX_CHANNELS,
    Action,
    EventKind,
    Fields,
    Op,
    Tag,
    encode_fields,
    encode_text,
)
from atoll.runtime.guest.connection import OpenStream
from atoll.runtime.guest.exec_request import (
    OUTPUT_LIMIT_BYTES,
    Environment,
    ExecRequest,
    check_signal,
    check_size,
    check_timeout,
)
from atoll.runtime.guest.live_text import LineSplitter
from atoll.runtime.guest.process_end import (
    KILL_S,
    KILL_TREE,
    decode_end,
    encode_tree_kill,
    not_started,
    start_unanswered,
    timed_out,
)
from atoll.runtime.guest.stream import ProcessChannel, ResultLimit, SilenceWatch, Stream

MAX_PROCESSES = 1_000_000
"""Processes that one call lists."""

STDOUT, STDERR = 1, 2
_NAMES: dict[int, Literal["stdout", "stderr"]] = {STDOUT: "stdout", STDERR: "stderr"}
_Parsed = TypeVar("_Parsed")


# ---------------------------------------------------------------------------------------------------------- the end


class OomWatch:
    """Whether the kernel has killed a process of the sandbox for memory since this was made."""

    def __init__(self, kills: Callable[[], int | None]) -> None:
        self._kills = kills
        # None: the machine has no counter, or the sandbox sleeps and its counter will start at 0.
        self._before = kills() or 0

    def caused(self, exited: Exited) -> bool:
        """Whether the process ended because of it. A shell exits with 137 when its child was killed."""
        if exited.exit_code != 128 + signals.SIGKILL:
            return False
        now = self._kills()
        return now is not None and now > self._before


class TimeLimit:
    """Kills a command's process tree when its time is over. A context around the wait for its end.

    The one place that enforces a time-out and makes `ExecTimeout`: `run` uses it, and the command line's `exec`, which
    passes output on while the command runs, uses it through `Process.time_limit`.
    """

    __slots__ = ("_elapsed_s", "_on_expiry", "_silence", "_stream", "_timer", "expired", "timeout_s")

    def __init__(
        self,
        stream: Stream,
        timeout_s: float | None,
        on_expiry: Callable[[], None] | None = None,
        *,
        elapsed_s: float = 0,
    ) -> None:
        self.timeout_s = check_timeout(timeout_s)
        self._elapsed_s = elapsed_s
        self.expired = False
        """True: the command had not ended in time, and the order to kill it was sent."""
        self._stream = stream
        self._on_expiry = on_expiry
        self._silence: SilenceWatch | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        if self.timeout_s is not None:
            left_s = max(0.0, self.timeout_s - self._elapsed_s)
            self._timer = asyncio.get_running_loop().call_later(left_s, self._expire)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._silence is not None:
            self._silence.__exit__()

    def _expire(self) -> None:
        if self._stream.result is None:
            self.expired = True
            if self._on_expiry is not None:
                self._on_expiry()
            self._stream.control(*KILL_TREE)
            self._silence = SilenceWatch(self._stream).__enter__()

    def error(self, result: ExecResult) -> ExecTimeout:
        """The error of a command that was killed, with its output until then."""
        return timed_out(self.timeout_s or 0, result)


def read_end(result: Fields, request: ExecRequest) -> tuple[Exited, bool]:
    """How a process ended, and whether the host had asked for it. Raises what `decode_end` raises."""
    end = decode_end(result, request)
    exited = Exited(
        exit_code=end.exit_code,
        signal=end.signal,
        duration_s=end.duration_s,
        stdout_total=end.stdout_total,
        stderr_total=end.stderr_total,
    )
    return exited, end.killed


# ------------------------------------------------------------------------------------------------------ output


class Collector:
    """Keeps the head and the tail of an output of any length, at most `limit_bytes` together."""

    def __init__(self, limit_bytes: int) -> None:
        self.total = 0
        self._tail_limit = limit_bytes // 2
        self._head_limit = limit_bytes - self._tail_limit
        self._slack = self._tail_limit // 4 + 65536
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > self._tail_limit + self._slack:
                del self._tail[: len(self._tail) - self._tail_limit]

    def finish(self) -> tuple[bytes, bytes, Truncation | None]:
        """Head, tail, and what was left out between them."""
        head, tail = bytes(self._head), bytes(self._tail[max(0, len(self._tail) - self._tail_limit) :])
        left_out = self.total - len(head) - len(tail)
        if not left_out:
            return head, tail, None
        return head, tail, Truncation(start=len(head), end=len(head) + left_out, total=self.total)

    def text(self) -> tuple[str, Truncation | None]:
        """The same as text. No character is split at the cut; `Truncation` says which bytes the text lacks."""
        head, tail, cut = self.finish()
        if cut is None:
            return (head + tail).decode("utf-8", "replace"), None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        first = decoder.decode(head)
        torn = len(decoder.getstate()[0])
        skip = 0
        while skip < min(3, len(tail)) and tail[skip] & 0xC0 == 0x80:
            skip += 1
        cut = Truncation(start=cut.start - torn, end=cut.end + skip, total=cut.total)
        line = f"[{cut.bytes} bytes left out: {cut.start} to {cut.end} of {cut.total}]"
        return f"{first}\n{line}\n{tail[skip:].decode('utf-8', 'replace')}", cut


# --------------------------------------------------------------------------------------------------- run to the end


async def run(
    opener: OpenStream, request: ExecRequest, environment: Environment, oom_kills: Callable[[], int | None]
) -> tuple[Exited, Collector, Collector]:
    """Run a command to its end and collect its output. When it raises, nothing of the command runs.

    Raises:
        ExecTimeout: it did not end in time.
        and what `read_end` and the connection raise.
    """
    fields = request.encode(environment, no_started_event=True)
    limit_bytes, stdin = request.output_limit_bytes, request.stdin
    out, err = Collector(limit_bytes), Collector(limit_bytes)
    callbacks = OutputCallbacks(request.on_stdout, request.on_stderr)

    def sink(channel: int, data: bytes) -> None:
        if channel == STDOUT:
            out.add(data)
        elif channel == STDERR:
            err.add(data)
        callbacks.call(channel, data)

    watch = OomWatch(oom_kills)
    script = request.script() if request.is_long else None
    scripts = () if script is None else (FIRST_CHANNEL,)
    send = scripts if stdin is False else (0, *scripts)
    stream = await opener(Op.SPAWN, fields, receive=(STDOUT, STDERR), send=send, dedicated=scripts, sink=sink)
    limit = TimeLimit(stream, request.timeout_s)
    ended = False
    try:
        async with stream:
            with _patience(limit.timeout_s), limit, callbacks:
                if script is not None:
                    await _feed(stream, script, FIRST_CHANNEL)
                if not isinstance(stdin, bool):
                    await _feed(stream, stdin)
                await stream.ended()
                ended = not limit.expired
            callbacks.raise_failure()
            if stream.result is None:
                raise SandboxError(f"the command timed out after {limit.timeout_s:g} s and could not be killed")
            with stream.fail_on_violation():
                exited, killed = read_end(stream.result, request)
    finally:
        if not ended:
            await wait_tree_exit(opener, stream)
    if limit.expired:
        raise limit.error(to_result(exited, out, err, timed_out=True))
    if not killed and watch.caused(exited):
        exited = exited.model_copy(update={"out_of_memory": True})
    return exited, out, err


class OutputCallbacks:
    """The functions that are called with a command's output, and a context that ends when one of them fails.

    They are called where frames are dispatched: an error there would end the connection that all calls share.
    """

    __slots__ = ("_failure", "_on_stderr", "_on_stdout", "_scope")

    def __init__(self, on_stdout: Callable[[bytes], None] | None, on_stderr: Callable[[bytes], None] | None) -> None:
        self._on_stdout, self._on_stderr = on_stdout, on_stderr
        self._scope = anyio.CancelScope() if on_stdout or on_stderr else None
        self._failure: Exception | None = None

    def call(self, channel: int, data: bytes) -> None:
        function = self._on_stdout if channel == STDOUT else self._on_stderr if channel == STDERR else None
        if function is None or self._scope is None or self._failure is not None:
            return
        try:
            function(data)
        except Exception as error:  # noqa: BLE001 - raised by `raise_failure`, where the caller can catch it
            self._failure = error
            self._scope.cancel()

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> None:
        if self._scope is not None:
            self._scope.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._scope.__exit__(kind, error, trace) if self._scope is not None else None


def _patience(timeout_s: float | None) -> contextlib.AbstractContextManager[object]:
    """Bounds the wait for a command whose tree is killed at its time-out. Without one there is no scope to pay for."""
    return contextlib.nullcontext() if timeout_s is None else anyio.move_on_after(timeout_s + KILL_S)


async def wait_tree_exit(opener: OpenStream, stream: Stream) -> None:
    """Wait until the process tree of a killed command is empty, shielded from cancellation.

    END reports the main process alone. An order to kill the tree is answered when the tree is empty.
    """
    if stream.result is None:
        return
    with anyio.move_on_after(KILL_S, shield=True), contextlib.suppress(SandboxError):
        with stream.fail_on_violation():
            order = encode_tree_kill(stream.result)
        if order is not None:
            async with await opener(Op.SIGNAL, order, receive=()) as answer:
                await answer.ended()


async def _feed(stream: Stream, data: bytes, channel: int = 0) -> None:
    try:
        await stream.send(data, channel)
    except anyio.BrokenResourceError:
        return  # it ended without reading all of its input, as any program may
    stream.send_eof(channel)


def to_result(exited: Exited, out: Collector, err: Collector, *, timed_out: bool = False) -> ExecResult:
    """The outcome of a command, with its output as text."""
    stdout, stdout_truncation = out.text()
    stderr, stderr_truncation = err.text()
    return ExecResult(
        exit_code=exited.exit_code,
        signal=exited.signal,
        duration_s=exited.duration_s,
        timed_out=timed_out,
        out_of_memory=exited.out_of_memory,
        stdout=stdout,
        stderr=stderr,
        stdout_truncation=stdout_truncation,
        stderr_truncation=stderr_truncation,
    )


def to_bytes(exited: Exited, out: Collector, err: Collector) -> ExecBytes:
    """The outcome of a command, with its output as bytes."""
    out_head, out_tail, stdout_truncation = out.finish()
    err_head, err_tail, stderr_truncation = err.finish()
    return ExecBytes(
        exit_code=exited.exit_code,
        signal=exited.signal,
        duration_s=exited.duration_s,
        out_of_memory=exited.out_of_memory,
        stdout=out_head + out_tail,
        stderr=err_head + err_tail,
        stdout_truncation=stdout_truncation,
        stderr_truncation=stderr_truncation,
    )


# ------------------------------------------------------------------------------------------------ start and attach


async def spawn(
    opener: OpenStream,
    request: ExecRequest,
    environment: Environment,
    watch: OomWatch,
    *,
    start_timeout_s: float | None = None,
) -> Process:
    """Start a command. If this fails or is cancelled, nothing of the command runs.

    Raises:
        ExecTimeout: its start was not reported in time.
        GuestUnresponsive: neither its start nor its end was reported in time.
        and what `read_end` and the connection raise.
    """
    check_timeout(start_timeout_s)
    stream: Stream | None = None
    try:
        with anyio.move_on_after(start_timeout_s):
            stream = await _open_spawn(opener, request, environment)
            process = await _started(opener, stream, request, watch)
            if request.keep:
                stream.drop_unread()
            if request.is_long:
                channel = FIRST_CHANNEL + request.channels
                await _feed(stream, request.script(), channel)
                stream.discard(channel)
            return process
    except BaseException:
        if stream is not None:
            await _kill_started(opener, stream)
        raise
    if stream is not None and not await _kill_started(opener, stream):
        raise start_unanswered(start_timeout_s or 0)
    raise not_started(start_timeout_s or 0)


async def _kill_started(opener: OpenStream, stream: Stream) -> bool:
    """Kill a command whose start was not reported yet. False: its end is not known."""
    stream.control(*KILL_TREE)
    await stream.abandon()
    await wait_tree_exit(opener, stream)
    return stream.result is not None


async def _open_spawn(opener: OpenStream, request: ExecRequest, environment: Environment) -> Stream:
    channels = range(FIRST_CHANNEL, FIRST_CHANNEL + request.channels + request.is_long)
    return await opener(
        Op.SPAWN,
        request.encode(environment),
        receive=(STDOUT, STDERR),
        send=(*(() if request.stdin is False and request.pty is None else (0,)), *channels),
        dedicated=channels,
    )


async def attach(
    opener: OpenStream,
    process_id: int,
    *,
    stdout_offset: int | None,
    stderr_offset: int | None,
    stdin: bool,
    channels: int,
    lossless: bool,
    user: str,
    watch: OomWatch,
) -> Process:
    """A handle of a process that was spawned before. See `Sandbox.attach`."""
    if not 0 <= channels <= MAX_CHANNELS:
        raise InvalidRequest(f"channels is {channels}; a process may have 0 to {MAX_CHANNELS}")
    for offset in (stdout_offset, stderr_offset):
        if offset is not None and offset < 0:
            raise InvalidRequest(f"an offset is {offset}; it must not be negative")
    fields = encode_fields(
        (
            (Tag.PROC, process_id),
            (Tag.OUT_OFFSET, stdout_offset or 0),
            (Tag.ERR_OFFSET, stderr_offset or 0),
            (Tag.LOSSLESS, 1 if lossless else None),
            (Tag.STDIN, 1 if stdin or channels else None),  # who writes to it has its channels too
        )
    )
    request = ExecRequest(f"process {process_id}", user=user, stdin=stdin, keep=True, channels=channels)
    extra = range(FIRST_CHANNEL, FIRST_CHANNEL + channels)
    send = (*((0,) if stdin else ()), *extra)
    # How many it has is not known here: that of a long command is one more than those that were asked for.
    unwanted = range(extra.stop, FIRST_CHANNEL + MAX_CHANNELS) if stdin or channels else ()
    stream = await opener(Op.ATTACH, fields, receive=(STDOUT, STDERR), send=send, dedicated=(*extra, *unwanted))
    for channel in unwanted:
        stream.discard(channel)
    try:
        offsets = (stdout_offset, stderr_offset)
        return await _started(opener, stream, request, watch, attached_to=process_id, offsets=offsets)
    except BaseException:
        await stream.abandon()
        raise


async def _started(
    opener: OpenStream,
    stream: Stream,
    request: ExecRequest,
    watch: OomWatch,
    *,
    attached_to: int | None = None,
    offsets: tuple[int | None, int | None] = (0, 0),
) -> Process:
    """The handle, once the guest has reported the start. If it reports an end instead, the reason is raised."""
    event = await stream.next_event(EventKind.STARTED)
    with stream.fail_on_violation():
        if event is not None:
            is_attached = attached_to is not None
            return Process(opener, stream, event, request, watch, offsets=offsets, is_attached=is_attached)
        result = await stream.ended()
        problem = result.problem()
        if attached_to is not None and problem is not None and problem.number == errno.ESRCH:
            raise _no_process(attached_to)
        if attached_to is not None and problem is not None and problem.number == errno.EBUSY:
            raise InvalidRequest(
                f"another client has the stdin and the channels of process {attached_to}; attach without to read along"
            )
        read_end(result, request)
        raise GuestProtocolError("the guest reported the end of a process without its start")


async def send_signal(opener: OpenStream, process_id: int, signal: int, *, tree: bool) -> None:
    """Send a signal to a spawned process, with `tree` to every process that it started as well.

    Raises:
        ProcessNotFound: no such process is known, or it has ended.
    """
    fields = encode_fields(((Tag.PROC, process_id), (Tag.SIGNAL, check_signal(signal)), (Tag.TREE, int(tree))))
    async with await opener(Op.SIGNAL, fields, receive=()) as stream:
        await stream.ended()
    if problem := stream.problem():
        if problem.number == errno.ESRCH:
            raise _no_process(process_id)
        raise SandboxError(f"signal {signal} could not be sent to process {process_id}: {problem.reason}")


def _no_process(process_id: int) -> ProcessNotFound:
    return ProcessNotFound(f"no command has the number {process_id}, or it has ended", id=process_id)


# ------------------------------------------------------------------------------------------------------------ lists


async def list_processes(opener: OpenStream, sandbox: str) -> list[ProcessInfo]:
    """The commands that were started through the API. `sandbox` is the name for error messages."""
    return await _list(opener, sandbox, Op.PROCS, _process_info)


async def list_system_processes(opener: OpenStream, sandbox: str) -> list[SystemProcess]:
    """All processes in the sandbox."""
    return await _list(opener, sandbox, Op.PS, _system_process)


async def list_epoll_waiters(opener: OpenStream, sandbox: str) -> list[SystemProcess]:
    """The processes that have a TCP socket and may wait for it with epoll. Does not count as use of the sandbox."""
    return await _list(opener, sandbox, Op.PS, _system_process, encode_fields(((Tag.WAITING, 1), (Tag.IDLE, 1))))


async def _list(
    opener: OpenStream, sandbox: str, op: Op, parse: Callable[[Fields], _Parsed], fields: bytes = b""
) -> list[_Parsed]:
    async with await opener(op, fields) as stream:
        try:
            found = await stream.collect(parse, MAX_PROCESSES)
        except ResultLimit as error:
            raise SandboxError(f"the processes of sandbox {sandbox!r} cannot be listed: {error}") from None
    if problem := stream.problem():
        raise SandboxError(f"the processes of sandbox {sandbox!r} cannot be listed: {problem.reason}")
    return found


def _process_info(record: Fields) -> ProcessInfo:
    exit_code = None
    if Tag.SIGNAL in record:
        exit_code = 128 + record.within(Tag.SIGNAL, 1, 64)
    elif Tag.EXIT_CODE in record:
        exit_code = record.within(Tag.EXIT_CODE, 0, 255)
    return ProcessInfo(
        id=record.count(Tag.PROC),
        pid=record.count(Tag.PID),
        command=record.text(Tag.COMMAND),
        uid=record.count(Tag.UID),
        started_at=record.time_us(Tag.STARTED_US),
        ended_at=record.time_us(Tag.ENDED_US) if Tag.ENDED_US in record else None,
        exit_code=exit_code,
        stdout_total=record.count(Tag.OUT_TOTAL),
        stderr_total=record.count(Tag.ERR_TOTAL),
        live=record.flag(Tag.LIVE),
    )


def _system_process(record: Fields) -> SystemProcess:
    return SystemProcess(
        pid=record.count(Tag.PID),
        ppid=record.count(Tag.PPID),
        uid=record.count(Tag.UID),
        state=record.text(Tag.STATE, 1),
        command=record.text(Tag.COMMAND),
        rss_bytes=record.count(Tag.RSS_BYTES),
        cpu_s=record.count(Tag.CPU_US) / 1e6,
        started_at=record.time_us(Tag.STARTED_US),
    )


# ------------------------------------------------------------------------------------------------ while it runs


class ProcessInput(ByteSendStream):
    """The standard input of a process."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def send(self, item: bytes) -> None:
        """Send all of it, as fast as the process reads. For a terminal these are keystrokes.

        Raises:
            anyio.BrokenResourceError: the process has ended.
            anyio.ClosedResourceError: it was closed, or the process was detached from.
            SandboxDied, GuestProtocolError: the sandbox is gone.
        """
        await self._stream.send(item)

    async def aclose(self) -> None:
        """Close it: the process reads an end of file. Does nothing the second time."""
        self._stream.send_eof()
        await anyio.lowlevel.checkpoint()


class Process:
    """A command that was started or attached to.

    An async iterator of what happens to it, in order: `Output`, `Gap` where output is missing, and `Exited` last.
    A slow reader slows the process down, and nothing is lost: it blocks once a megabyte is unread. A kept process whose
    handle was never read from goes on nevertheless: the newest half megabyte of its output is kept for a first reader,
    and the rest is a `Gap`. At the end of its context, a process that is kept is detached from and runs on; any other
    is killed with all that it started.
    """

    def __init__(
        self,
        opener: OpenStream,
        stream: Stream,
        started: Fields,
        request: ExecRequest,
        watch: OomWatch,
        *,
        offsets: tuple[int | None, int | None] = (0, 0),
        is_attached: bool = False,
    ) -> None:
        self.id: int = started.within(Tag.PROC, 1, 2**53)
        """The argument of `attach`. Never used twice in one sandbox."""
        self.pid: int = started.within(Tag.PID, 1, 2**31)
        """The main process, as the sandbox numbers it."""
        self.takes_input: bool = request.stdin is not False or request.pty is not None
        """Whether there is a `stdin`. Without it, its input is empty or another client's."""
        self._opener = opener
        self._stream = stream
        self._request = request
        self._watch = watch
        self._is_attached = is_attached
        # An offset that is unset means the oldest output that is kept: the first gap only reports where that is.
        self._gap_expected = {
            channel for channel, offset in zip((STDOUT, STDERR), offsets, strict=True) if offset is None
        }
        self._offsets = {channel: offset or 0 for channel, offset in zip((STDOUT, STDERR), offsets, strict=True)}
        self._exited: Exited | None = None
        self._exit_returned = False
        self._detached = False
        self._killed = False
        self._limit: TimeLimit | None = None
        self._channels = [
            ProcessChannel(stream, receive=FIRST_CHANNEL + i, send=FIRST_CHANNEL + i) for i in range(request.channels)
        ]
        self._unused_channels = set(range(request.channels))

    @property
    def stdin(self) -> ProcessInput:
        """Its standard input.

        Raises:
            InvalidRequest: it was started, or attached to, without one.
        """
        if not self.takes_input:
            raise InvalidRequest("the process has no stdin here; spawn it, or attach to it, with stdin=True")
        return ProcessInput(self._stream)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ProcessEvent:
        """The next event; `Exited` is the last.

        Raises:
            SandboxDied, GuestProtocolError: the sandbox is gone. What was read before may be incomplete.
            SandboxError: how the process ended is not known.
            ExecTimeout: it was killed because its time was over (`spawn(timeout_s=…)`), in place of `Exited`.
            anyio.ClosedResourceError: it was detached from.
        """
        with self._stream.fail_on_violation():
            while not self._exit_returned:
                event = await self._next()
                if event is not None:
                    self._exit_returned = isinstance(event, Exited)
                    await self._require_in_time()
                    return event
        raise StopAsyncIteration

    async def lines(self, stream: Literal["stdout", "stderr"] | None = None) -> AsyncGenerator[str, None]:
        """Its output line by line, as it comes, until it ends: of both streams, or of one. `wait` then has its end.

        Lines are text without their ends. A line above a million characters comes in parts. Output that is no longer
        kept (`Gap`) is skipped.

        Raises:
            What iterating over the process raises.
        """
        splitters = {name: LineSplitter() for name in _NAMES.values() if stream in (None, name)}
        async for event in self:
            if isinstance(event, Output) and event.stream in splitters:
                for line in splitters[event.stream].feed(event.data):
                    yield line
        for splitter in splitters.values():
            for line in splitter.finish():
                yield line

    async def wait(self) -> Exited:
        """Wait for the end of the main process. Unread output is dropped.

        Raises:
            SandboxDied, GuestProtocolError: the sandbox is gone.
            SandboxError: how the process ended is not known.
            ExecTimeout: it was killed because its time was over (`spawn(timeout_s=…)`).
            anyio.ClosedResourceError: it was detached from.
        """
        with self._stream.fail_on_violation():
            while self._exited is None:
                await self._next()
        await self._require_in_time()
        return self._exited

    async def communicate(
        self, stdin: bytes | str | None = None, *, output_limit_bytes: int = OUTPUT_LIMIT_BYTES
    ) -> ExecResult:
        """Send `stdin` and close it, read all output from here on, and wait for the end: what `Sandbox.exec` returns.

        Output is kept up to `output_limit_bytes` of each stream, head and tail. A `Gap` in it is not shown.

        Raises:
            InvalidRequest: `stdin` is given, and it was started, or attached to, without one.
            ExecTimeout: its time was over (`spawn(timeout_s=…)`); `result` holds the output until then.
            and what `wait` raises.
        """
        text = encode_text(stdin, "stdin") if isinstance(stdin, str) else stdin
        if text is not None and not self.takes_input:
            _ = self.stdin  # raises
        collectors = {"stdout": Collector(output_limit_bytes), "stderr": Collector(output_limit_bytes)}
        failure: AtollError | None = None

        async def feed() -> None:
            with contextlib.suppress(AtollError):  # what is wrong, the reader is told too
                await _feed(self._stream, text or b"")

        async with anyio.create_task_group() as group:
            if self.takes_input:
                group.start_soon(feed)
            try:
                async for event in self:
                    if isinstance(event, Output):
                        collectors[event.stream].add(event.data)
            except AtollError as error:
                failure = error
            group.cancel_scope.cancel()
        if self._limit is not None and self._limit.expired and self._exited is not None:
            raise self._limit.error(to_result(self._exited, *collectors.values(), timed_out=True))
        if failure is not None:
            raise failure
        return to_result(await self.wait(), *collectors.values())

    def channel(self, i: int) -> ByteStream:
        """Extra channel `i`: what the process finds at descriptor 3+i.

        The end of the process is reported when what it wrote there has been read. Get it before output or the end is
        awaited: from then on, what comes on the other channels is dropped.

        Raises:
            InvalidRequest: it was not started with so many.
        """
        if not 0 <= i < len(self._channels):
            raise InvalidRequest(f"the process has {len(self._channels)} extra channels; there is no number {i}")
        self._unused_channels.discard(i)
        return self._channels[i]

    async def signal(self, signal: int, *, tree: bool = False) -> None:
        """Send a signal to the main process, with `tree` to every process that it started as well.

        Returns when the order is sent. Does nothing if the process has ended.

        Raises:
            InvalidRequest: there is no such signal.
        """
        check_signal(signal)
        self._killed |= signal == signals.SIGKILL
        self._stream.control((Tag.ACTION, Action.SIGNAL), (Tag.SIGNAL, signal), (Tag.TREE, int(tree)))
        await anyio.lowlevel.checkpoint()

    async def kill(self) -> None:
        """Kill it with all that it started. Returns when the order is sent; `wait` returns when it has ended."""
        await self.signal(signals.SIGKILL, tree=True)

    def time_limit(self, timeout_s: float | None, *, elapsed_s: float = 0) -> TimeLimit:
        """A context in which the process is killed with all that it started if it has not ended after so long.

        `elapsed_s` of the time are over already, if its start counts.
        Go on reading to its end, then raise `TimeLimit.error` if `TimeLimit.expired`. None: no limit.

        Raises:
            InvalidRequest: the time is not above 0.
        """
        return TimeLimit(self._stream, timeout_s, self._mark_killed, elapsed_s=elapsed_s)

    def set_time_limit(self, timeout_s: float | None) -> None:
        """From now on, kill it if it has not ended after so long, as long as this handle is open. None: no limit.

        Raises:
            InvalidRequest: the time is not above 0.
        """
        self._end_limit()
        self._limit = None if timeout_s is None else self.time_limit(timeout_s).__enter__()

    def _end_limit(self) -> None:
        if self._limit is not None:
            self._limit.__exit__()

    async def _require_in_time(self) -> None:
        if self._limit is not None and self._limit.expired and self._exited is not None:
            await wait_tree_exit(self._opener, self._stream)
            raise self._limit.error(to_result(self._exited, Collector(0), Collector(0), timed_out=True))

    def _mark_killed(self) -> None:
        self._killed = True

    async def resize(self, rows: int, cols: int) -> None:
        """Change the size of its terminal. Of a process that was attached to it is not known whether it has one: if it
        has none, nothing happens.

        Raises:
            InvalidRequest: it was spawned without a terminal, or the size is not allowed.
        """
        check_size(rows, cols)
        if self._request.pty is None and not self._is_attached:
            raise InvalidRequest("the process has no terminal; spawn it with pty=(rows, cols)")
        self._stream.control((Tag.ACTION, Action.RESIZE), (Tag.PTY_ROWS, rows), (Tag.PTY_COLS, cols))
        await anyio.lowlevel.checkpoint()

    async def detach(self) -> None:
        """Leave it running. `Sandbox.attach` gives a new handle. Does nothing if it has ended.

        Raises:
            InvalidRequest: it was spawned with `keep=False`.
        """
        if not self._request.keep:
            raise InvalidRequest("the process was spawned with keep=False and cannot outlive this handle; kill it")
        self._end_limit()
        if self._exited is None:
            self._detached = True
            await self._stream.abandon()

    async def aclose(self) -> None:
        """Detach if it is kept, else kill it with all that it started and wait until it has ended, at most 10 s."""
        self._end_limit()
        if self._request.keep:
            await self.detach()
        elif self._exited is None:
            self._detached = True
            await self._stream.abandon(KILL_S)
            await wait_tree_exit(self._opener, self._stream)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _next(self) -> ProcessEvent | None:
        if self._exited is not None:
            return self._exited
        while self._unused_channels:
            self._stream.discard(FIRST_CHANNEL + self._unused_channels.pop())
        self._stream.keep_unread()
        if self._stream.dropped:
            channel, missing = self._stream.dropped.popitem()
            self._offsets[channel] += missing
            return Gap(stream=_NAMES[channel], offset=self._offsets[channel])
        item = None if self._detached else await self._stream.next()
        if self._detached:
            raise anyio.ClosedResourceError
        if isinstance(item, tuple):
            channel, data = item
            offset = self._offsets[channel]
            self._offsets[channel] = offset + len(data)
            self._gap_expected.discard(channel)
            return Output(stream=_NAMES[channel], data=data, offset=offset)
        if item is not None:
            return self._gap(item)
        if self._stream.result is None:
            raise SandboxDied("the handle of the process was abandoned")
        exited, killed = read_end(self._stream.result, self._request)
        if not killed and not self._killed and self._watch.caused(exited):
            exited = exited.model_copy(update={"out_of_memory": True})
        self._exited = exited
        self._end_limit()
        return exited

    def _gap(self, event: Fields) -> Gap | None:
        if event.integer(Tag.EVENT) != EventKind.GAP:
            raise GuestProtocolError("the guest sent an event that a running process does not have")
        channel = event.within(Tag.CHANNEL, STDOUT, STDERR)
        offset = event.count(Tag.OFFSET)
        expected = channel in self._gap_expected
        self._gap_expected.discard(channel)
        self._offsets[channel] = offset
        return None if expected else Gap(stream=_NAMES[channel], offset=offset)
