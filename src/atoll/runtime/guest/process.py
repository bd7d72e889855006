"""Commands in a sandbox: how one is asked for, how its output is collected, and the handle of one that runs.

Knows the fields of SPAWN and ATTACH, what END of a process means, and how much output is kept. Refuses to know
connections (`link.py` and `stream.py` below) and which sandbox it is in (`sandbox.py` above). No exit code is made up
here: a command whose end the guest did not report raises.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import math
import signal as signals
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import anyio
import anyio.lowlevel
from anyio.abc import ByteSendStream, ByteStream

from atoll.contract.errors import (
    FILE_ERRORS,
    AtollError,
    ExecTimeout,
    GuestProtocolError,
    InvalidRequest,
    SandboxDied,
    SandboxError,
)
from atoll.contract.inside import DEFAULT_PATH
from atoll.contract.model import Event, ExecBytes, ExecResult, Exited, Gap, Output, Truncation, check_env
from atoll.runtime.guest.connection import OpenStream
from atoll.runtime.guest.frames import (
    FIRST_CHANNEL,
    MAX_CHANNELS,
    Action,
    EventKind,
    Fields,
    Op,
    Problem,
    Tag,
    encode_fields,
    name_user,
)
from atoll.runtime.guest.stream import Connection, Stream

DEFAULT_TERM = "xterm-256color"
KILL_S = 10.0
"""How long a command that was killed may take to be gone."""

STDOUT, STDERR = 1, 2
_NAMES: dict[int, Literal["stdout", "stderr"]] = {STDOUT: "stdout", STDERR: "stderr"}


# ------------------------------------------------------------------------------------------------------- asking


class Environment:
    """What every command in a sandbox finds in its environment, ready to be sent."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = {"PATH": DEFAULT_PATH, "LANG": "C.UTF-8"} | check_env(dict(env))
        self._encoded = _encode_env(self._env)

    def encode(self, env: Mapping[str, str] | None, *, terminal: bool) -> bytes:
        """The fields for a command with `env` of its own on top.

        Raises:
            InvalidRequest: a name or a value of `env` cannot be given to a process.
        """
        if not env and not terminal:
            return self._encoded
        merged = self._env | check_env(dict(env or {}))
        if terminal:
            merged.setdefault("TERM", DEFAULT_TERM)
        return _encode_env(merged)


def _encode_env(env: Mapping[str, str]) -> bytes:
    return encode_fields((Tag.ENV, f"{key}={value}") for key, value in env.items())


@dataclass(frozen=True, slots=True)
class Command:
    """A process to be started. A string is a line for the shell, a sequence a program and its arguments."""

    command: str | Sequence[str]
    env: bytes
    """As `Environment.encode` gives it."""
    user: str
    cwd: str | None = None
    """None: the user's home."""
    stdin: bool = False
    pty: tuple[int, int] | None = None
    """Rows and columns of a terminal."""
    keep: bool = False
    """True: it outlives the stream that started it."""
    channels: int = 0
    quiet: bool = False
    """True: nobody waits to hear that it has started."""

    def encode(self) -> bytes:
        """The fields of SPAWN.

        Raises:
            InvalidRequest: there is no command, it holds a NUL, or a number is out of range.
        """
        if not 0 <= self.channels <= MAX_CHANNELS:
            raise InvalidRequest(f"channels is {self.channels}; a process may have 0 to {MAX_CHANNELS}")
        fields: list[tuple[Tag, int | str | None]] = [
            (Tag.USER, name_user(self.user)),
            (Tag.CWD, self.cwd),
            (Tag.STDIN, 1 if self.stdin else None),
            (Tag.KEEP, 1 if self.keep else None),
            (Tag.QUIET, 1 if self.quiet else None),
            (Tag.CHANNELS, self.channels or None),
        ]
        if self.pty is not None:
            rows, cols = check_size(*self.pty)
            fields += [(Tag.PTY_ROWS, rows), (Tag.PTY_COLS, cols)]
        if isinstance(self.command, str):
            if not self.command.strip():
                raise InvalidRequest("the command is empty; give a line for the shell, or a list of arguments")
            fields.append((Tag.SHELL, self.command))
        else:
            if not self.command or not self.command[0]:
                raise InvalidRequest("the command is empty; its first argument must name a program")
            fields += [(Tag.ARGV, argument) for argument in self.command]
        return encode_fields(fields) + self.env


def check_size(rows: int, cols: int) -> tuple[int, int]:
    """Return the size of a terminal if there can be one.

    Raises:
        InvalidRequest: there cannot.
    """
    if not (1 <= rows <= 65535 and 1 <= cols <= 65535):
        raise InvalidRequest(f"a terminal of {rows} rows and {cols} columns cannot be; both may be 1 to 65535")
    return rows, cols


# ----------------------------------------------------------------------------------------------------- its end


class OomWatch:
    """Tells whether the kernel has ended a process for memory since this was made."""

    def __init__(self, kills: Callable[[], int | None]) -> None:
        self._kills = kills
        # None: the machine cannot tell, or the sandbox sleeps, and nothing has ended in it since it will have woken.
        self._before = kills() or 0

    def caused(self, exited: Exited) -> bool:
        """Whether memory is why the process ended so. A shell says 137 of a child that was killed."""
        if exited.exit_code != 128 + signals.SIGKILL:
            return False
        now = self._kills()
        return now is not None and now > self._before


def read_end(result: Fields, command: str | Sequence[str], cwd: str | None, user: str) -> tuple[Exited, bool]:
    """How a process ended, and whether the host had asked for it.

    Raises:
        InvalidRequest: the request was wrong, or there is no such user.
        FileError: the working directory cannot be used.
        SandboxError: how it ended is not known.
        GuestProtocolError: END of a process says something else.
    """
    if problem := result.problem():
        raise _start_error(problem, command, cwd, user)
    signal = result.within(Tag.SIGNAL, 1, 64) if Tag.SIGNAL in result else None
    exited = Exited(
        exit_code=128 + signal if signal is not None else result.within(Tag.EXIT_CODE, 0, 255),
        signal=signal,
        duration_s=result.count(Tag.DURATION_US) / 1e6,
        stdout_total=result.count(Tag.OUT_TOTAL),
        stderr_total=result.count(Tag.ERR_TOTAL),
    )
    return exited, result.flag(Tag.KILLED)


def _start_error(problem: Problem, command: str | Sequence[str], cwd: str | None, user: str) -> AtollError:
    what = command if isinstance(command, str) else " ".join(command)
    what = what if len(what) <= 80 else what[:77] + "..."
    number = problem.number
    if number == errno.ECHILD:
        return SandboxError(f"{what!r} was lost: what watched over it was killed, so how it ended is not known")
    if number == errno.ECANCELED:
        return SandboxError(f"{what!r} was given up before it ended, so how it ended is not known")
    if problem.no_such_user:
        return InvalidRequest(f"there is no user {user!r} in the sandbox")
    if number in FILE_ERRORS and cwd is not None:
        return FILE_ERRORS[number](f"{cwd}: not a directory to work in: {problem.words}", number=number, path=cwd)
    if number == errno.EINVAL:
        return InvalidRequest(f"{what!r} cannot be started as {user!r}: {problem.reason}")
    return SandboxError(f"{what!r} could not be started: {problem.reason}")


# ------------------------------------------------------------------------------------------------------ output


class Collector:
    """Keeps the head and the tail of an output of any length: no more than `limit_bytes` are given back."""

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
        """The same as text. No character is torn at the cut; `Truncation` says what is missing from the text."""
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


# ------------------------------------------------------------------------------------------------- run to its end


async def run(
    opener: OpenStream,
    command: Command,
    *,
    stdin: bytes | None,
    timeout_s: float | None,
    output_limit_bytes: int,
    oom: Callable[[], int | None],
    on_output: Callable[[bytes], None] | None = None,
) -> tuple[Exited, Collector, Collector]:
    """Run a command to its end and collect its output. When it returns or raises, nothing of it runs.

    Raises:
        ExecTimeout: it did not end in time.
        and what `read_end` and the link raise.
    """
    if timeout_s is not None and not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise InvalidRequest(f"timeout_s is {timeout_s}; it must be above 0, or None for no limit")
    if output_limit_bytes < 0:
        raise InvalidRequest(f"output_limit_bytes is {output_limit_bytes}; it must not be negative")
    out, err = Collector(output_limit_bytes), Collector(output_limit_bytes)

    def sink(channel: int, data: bytes) -> None:
        (out if channel == STDOUT else err).add(data)
        if on_output is not None:
            on_output(data)

    fields = command.encode()
    watch = OomWatch(oom)
    stream = await opener(Op.SPAWN, fields, receive=(STDOUT, STDERR), send=(0,) if stdin is not None else (), sink=sink)
    timed_out, ended = False, False
    try:
        async with stream:
            with anyio.move_on_after(timeout_s):
                if stdin is not None:
                    await _feed(stream, stdin)
                await stream.ended()
                ended = True
            if stream.result is None:
                timed_out = True
                stream.control((Tag.ACTION, Action.SIGNAL), (Tag.SIGNAL, signals.SIGKILL), (Tag.TREE, 1))
                with anyio.move_on_after(KILL_S):
                    await stream.ended()
            if stream.result is None:
                raise SandboxError(f"the command ran into its time limit of {timeout_s:g} s and could not be killed")
            with stream.fail_on_violation():
                exited, killed = read_end(stream.result, command.command, command.cwd, command.user)
    finally:
        if not ended:
            await wait_tree_exit(opener, stream)
    if timed_out:
        raise ExecTimeout(
            f"the command did not end within {timeout_s:g} s; it and all that it started have been killed",
            to_result(exited, out, err, timed_out=True),
        )
    if not killed and watch.caused(exited):
        exited = exited.model_copy(update={"out_of_memory": True})
    return exited, out, err


async def wait_tree_exit(opener: OpenStream, stream: Stream) -> None:
    """Wait until nothing is left of a process that was killed, whatever is cancelled meanwhile.

    END tells of the main process alone. An order to kill the tree is answered when that is empty.
    """
    if stream.result is None or Tag.PROC not in stream.result:
        return
    with anyio.move_on_after(KILL_S, shield=True), contextlib.suppress(SandboxError):
        with stream.fail_on_violation():
            process_id = stream.result.integer(Tag.PROC)
        order = encode_fields(((Tag.PROC, process_id), (Tag.SIGNAL, signals.SIGKILL), (Tag.TREE, 1)))
        async with await opener(Op.SIGNAL, order, receive=()) as answer:
            await answer.ended()


async def _feed(stream: Stream, stdin: bytes) -> None:
    try:
        await stream.send(stdin)
    except anyio.BrokenResourceError:
        return  # it ended without reading all of it, as any program may
    stream.send_eof()


def to_result(exited: Exited, out: Collector, err: Collector, *, timed_out: bool = False) -> ExecResult:
    """The outcome of a command, with its output as text."""
    stdout, stdout_cut = out.text()
    stderr, stderr_cut = err.text()
    return ExecResult(
        exit_code=exited.exit_code,
        signal=exited.signal,
        duration_s=exited.duration_s,
        timed_out=timed_out,
        out_of_memory=exited.out_of_memory,
        stdout=stdout,
        stderr=stderr,
        stdout_cut=stdout_cut,
        stderr_cut=stderr_cut,
    )


def to_bytes(exited: Exited, out: Collector, err: Collector) -> ExecBytes:
    """The outcome of a command, with its output as it came."""
    out_head, out_tail, stdout_cut = out.finish()
    err_head, err_tail, stderr_cut = err.finish()
    return ExecBytes(
        exit_code=exited.exit_code,
        signal=exited.signal,
        duration_s=exited.duration_s,
        out_of_memory=exited.out_of_memory,
        stdout=out_head + out_tail,
        stderr=err_head + err_tail,
        stdout_cut=stdout_cut,
        stderr_cut=stderr_cut,
    )


# ----------------------------------------------------------------------------------------------- while it runs


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
        """Say that no more comes: the process reads an end of file. The second time it does nothing."""
        self._stream.send_eof()
        await anyio.lowlevel.checkpoint()


class Process:
    """A command that was started or attached to.

    An async iterator of what happens to it, in order: `Output`, `Gap` where output is missing, and `Exited` last.
    Whoever iterates slowly slows the process down, and nothing is lost; a process whose output nobody reads stands
    still once a megabyte waits. As a context manager it leaves as it was asked for: one that is kept is detached from
    and runs on, any other is killed with all that it started.
    """

    def __init__(
        self,
        opener: OpenStream,
        stream: Stream,
        started: Fields,
        command: Command,
        watch: OomWatch,
        *,
        offsets: tuple[int | None, int | None] = (0, 0),
    ) -> None:
        self.id = started.within(Tag.PROC, 1, 2**53)
        """What `attach` takes. Never used twice in one sandbox."""
        self.pid = started.within(Tag.PID, 1, 2**31)
        """The main process, as the sandbox numbers it."""
        self.stdin: ProcessInput | None = ProcessInput(stream) if command.stdin or command.pty else None
        """None: its input is empty, or was not asked for."""
        self._opener = opener
        self._stream = stream
        self._command = command
        self._watch = watch
        # An offset that was not asked for is the oldest that is kept: the first gap only says where that is.
        self._silent = {channel for channel, offset in zip((STDOUT, STDERR), offsets, strict=True) if offset is None}
        self._offsets = {channel: offset or 0 for channel, offset in zip((STDOUT, STDERR), offsets, strict=True)}
        self._exited: Exited | None = None
        self._told = False
        self._detached = False
        self._killed = False
        self._channels = [
            Connection(stream, receive=FIRST_CHANNEL + i, send=FIRST_CHANNEL + i, owner=False)
            for i in range(command.channels)
        ]
        self._untaken = set(range(command.channels))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """The next event; `Exited` is the last.

        Raises:
            SandboxDied, GuestProtocolError: the sandbox is gone. What was read before may be incomplete.
            SandboxError: how the process ended is not known.
            anyio.ClosedResourceError: it was detached from.
        """
        with self._stream.fail_on_violation():
            while not self._told:
                event = await self._next()
                if event is not None:
                    self._told = isinstance(event, Exited)
                    return event
        raise StopAsyncIteration

    async def wait(self) -> Exited:
        """Wait for the end of the main process. Output that nobody has read yet is dropped.

        Raises:
            SandboxDied, GuestProtocolError: the sandbox is gone.
            SandboxError: how the process ended is not known.
            anyio.ClosedResourceError: it was detached from.
        """
        with self._stream.fail_on_violation():
            while self._exited is None:
                await self._next()
        return self._exited

    def channel(self, i: int) -> ByteStream:
        """Extra channel `i`: what the process finds at descriptor 3+i.

        The end of the process waits until what it wrote there has been read. A channel that has not been taken by the
        time somebody waits for output or for the end is nobody's: what comes on it is dropped.

        Raises:
            InvalidRequest: it was not started with so many.
        """
        if not 0 <= i < len(self._channels):
            raise InvalidRequest(f"the process has {len(self._channels)} extra channels; there is no number {i}")
        self._untaken.discard(i)
        return self._channels[i]

    async def signal(self, signal: int, *, tree: bool = False) -> None:
        """Send a signal to the main process, or to every process that it started as well.

        Returns when the signal is on its way. Does nothing if the process has ended.

        Raises:
            InvalidRequest: there is no such signal.
        """
        check_signal(signal)
        self._killed |= signal == signals.SIGKILL
        self._stream.control((Tag.ACTION, Action.SIGNAL), (Tag.SIGNAL, signal), (Tag.TREE, int(tree)))
        await anyio.lowlevel.checkpoint()

    async def kill(self) -> None:
        """Kill it with all that it started. Returns when that is on its way; `wait` says when it has happened."""
        await self.signal(signals.SIGKILL, tree=True)

    async def resize(self, rows: int, cols: int) -> None:
        """Tell the process that its terminal has another size now.

        Raises:
            InvalidRequest: it has no terminal, or there is no such size.
        """
        check_size(rows, cols)
        if self._command.pty is None:
            raise InvalidRequest("the process has no terminal; spawn it with pty=(rows, cols)")
        self._stream.control((Tag.ACTION, Action.RESIZE), (Tag.PTY_ROWS, rows), (Tag.PTY_COLS, cols))
        await anyio.lowlevel.checkpoint()

    async def detach(self) -> None:
        """Leave it running. `Sandbox.attach` takes it up again. Does nothing if it has ended.

        Raises:
            InvalidRequest: it was spawned with `keep=False`.
        """
        if not self._command.keep:
            raise InvalidRequest("the process was spawned with keep=False and cannot outlive this handle; kill it")
        if self._exited is None:
            self._detached = True
            await self._stream.abandon()

    async def aclose(self) -> None:
        """Detach if it is kept, else kill it with all that it started and wait until it is gone, at most 10 s."""
        if self._command.keep:
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

    async def _next(self) -> Event | None:
        if self._exited is not None:
            return self._exited
        while self._untaken:
            self._stream.discard(FIRST_CHANNEL + self._untaken.pop())
        item = None if self._detached else await self._stream.next()
        if self._detached:
            raise anyio.ClosedResourceError
        if isinstance(item, tuple):
            channel, data = item
            offset = self._offsets[channel]
            self._offsets[channel] = offset + len(data)
            self._silent.discard(channel)
            return Output(stream=_NAMES[channel], data=data, offset=offset)
        if item is not None:
            return self._gap(item)
        if self._stream.result is None:
            raise SandboxDied("the process was given up")
        exited, killed = read_end(self._stream.result, self._command.command, self._command.cwd, self._command.user)
        if not killed and not self._killed and self._watch.caused(exited):
            exited = exited.model_copy(update={"out_of_memory": True})
        self._exited = exited
        return exited

    def _gap(self, event: Fields) -> Gap | None:
        if event.integer(Tag.EVENT) != EventKind.GAP:
            raise GuestProtocolError("the guest sent an event that no running process has")
        channel = event.within(Tag.CHANNEL, STDOUT, STDERR)
        offset = event.count(Tag.OFFSET)
        silent = channel in self._silent
        self._silent.discard(channel)
        self._offsets[channel] = offset
        return None if silent else Gap(stream=_NAMES[channel], offset=offset)


def check_signal(signal: int) -> int:
    """Return `signal` if there is such a one.

    Raises:
        InvalidRequest: there is not.
    """
    if not 1 <= signal <= 64:
        raise InvalidRequest(f"there is no signal {signal}; they are numbered 1 to 64")
    return signal
