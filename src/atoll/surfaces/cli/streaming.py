"""The streams of a command in a sandbox, connected to the streams of this process.

Owns when a command is killed (time-out, a signal for us, output that is no longer read) and what is passed on. Output
is passed on byte for byte and never kept longer than a chunk, except with `--json`, which keeps at most `CAPTURE_BYTES`
of each stream. Not here: the arguments (`commands/exec.py`, which uses this), how bytes enter and leave this process
(`terminal.py`), how output looks (`render.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

import anyio

from atoll.contract.model import ExecResult, Exited, Gap, Output, ProcessInfo
from atoll.runtime.guest.process import Collector, to_result
from atoll.runtime.sandbox import LOGIN_SHELL
from atoll.surfaces.cli import TIMED_OUT, render, terminal

if TYPE_CHECKING:
    from atoll.runtime.guest.process import Process, ProcessInput
    from atoll.runtime.sandbox import Sandbox

CAPTURE_BYTES = 16 * 1024 * 1024
"""How much of each stream `--json` keeps: one half from the beginning, one from the end."""

_END_KEY, _END_KEY_AGAIN_S = b"\x04", 1.0
"""Ctrl-D."""


class ExecOptions(NamedTuple):
    """A command as the command line describes it."""

    command: str | Sequence[str]
    """A shell line, or the words of a command."""
    env: Mapping[str, str] = MappingProxyType({})
    user: str | None = None
    cwd: str | None = None
    timeout_s: float | None = None
    tty: bool = False
    stdin: bool = False
    """Whether it gets our input. False: its input is empty."""
    as_json: bool = False


async def detach(sandbox: Sandbox, options: ExecOptions) -> Process:
    """Start a command and leave it running. The sandbox keeps its output."""
    process = await sandbox.spawn(
        options.command, env=_env(options), cwd=options.cwd, user=options.user, pty=_pty(options), keep=True
    )
    await process.detach()
    return process


async def shell(sandbox: Sandbox, options: ExecOptions) -> int:
    """Give the terminal to a shell in the sandbox until it ends, and return its exit status.

    Without a terminal on our input the shell has a pipe: an end of file is a key on a terminal, which a shell that has
    not set up its terminal yet would not take for one.
    """
    options = options._replace(stdin=True)
    if not os.isatty(terminal.STDIN):
        return await run(sandbox, options._replace(command=options.command or LOGIN_SHELL, tty=False))
    rows, cols = terminal.terminal_size()
    process = await sandbox.shell(
        rows=rows, cols=cols, user=options.user, cwd=options.cwd, env=_env(options), command=options.command or None
    )
    exited = await _connect(process, options, _Passthrough())
    _explain(sandbox, exited)
    return exited.exit_code


async def logs(
    sandbox: Sandbox, info: ProcessInfo, since: tuple[int, int] | None, *, follow: bool, as_json: bool
) -> None:
    """Print the output that is kept of a command; with `follow`, continue until it ends. The command never waits."""
    reader = _LogReader(info, since, follow=follow, as_json=as_json)
    if not reader.is_satisfied():
        process = await sandbox.attach(
            info.id,
            stdout_offset=since[0] if since else None,
            stderr_offset=since[1] if since else None,
            lossless=False,
        )
        try:
            async for event in process:
                await reader.take(event)
                if reader.is_satisfied():
                    break
        finally:
            with anyio.CancelScope(shield=True):
                await process.detach()
    reader.finish()


async def wait(sandbox: Sandbox, info: ProcessInfo, *, output: bool, timeout_s: float | None, as_json: bool) -> int:
    """Wait until a command that runs, or has ended, ends, and return its exit status; 124 if it has not by then."""
    sink = _Captured() if as_json else _Passthrough()
    process = await sandbox.attach(info.id, lossless=False)
    exited: Exited | None = None
    with anyio.move_on_after(timeout_s):
        async with process:
            async for event in process:
                if isinstance(event, Output) and output:
                    await sink.take(event)
                elif isinstance(event, Exited):
                    exited = event
    if isinstance(sink, _Captured):
        kept = {"stdout": sink.stdout.text()[0], "stderr": sink.stderr.text()[0]} if output else {}
        ended = {"exit_code": None, "timed_out": True} if exited is None else exited.model_dump(mode="json")
        render.emit_json({"sandbox": sandbox.name, "id": info.id, **ended, **kept})
    elif exited is None:
        render.note(f"command {info.id} still runs after {timeout_s:g} s: {info.command}")
    else:
        _explain(sandbox, exited)
    return TIMED_OUT if exited is None else exited.exit_code


async def run(sandbox: Sandbox, options: ExecOptions) -> int:
    """Run a command with our streams and return its exit status. Leaving early, for any reason, kills its whole tree.

    Raises:
        ExecTimeout: the command timed out; its tree is dead.
        OutputClosed: our output is no longer read; its tree is dead.
    """
    sink = _Captured() if options.as_json else _Passthrough()
    began = anyio.current_time()
    process = await sandbox.spawn(
        options.command,
        env=_env(options),
        cwd=options.cwd,
        user=options.user,
        stdin=options.stdin and terminal.stdin_offered(),
        pty=_pty(options),
        keep=False,
        start_timeout_s=options.timeout_s,
    )
    exited = await _connect(process, options, sink, elapsed_s=anyio.current_time() - began)
    if isinstance(sink, _Captured):
        result = sink.result(exited)
        render.emit_json({"sandbox": sandbox.name, "id": process.id, **result.model_dump(mode="json")})
    else:
        _explain(sandbox, exited)
    return exited.exit_code


def _explain(sandbox: Sandbox, exited: Exited) -> None:
    if exited.out_of_memory:
        render.explain_memory_kill(sandbox.name, sandbox.info.limits.memory_bytes)


async def _connect(
    process: Process, options: ExecOptions, sink: _Passthrough | _Captured, *, elapsed_s: float = 0
) -> Exited:
    """Pass input, output and window sizes until the main process ends.

    Raises:
        ExecTimeout: the command timed out; its tree is dead.
        OutputClosed: our output is no longer read; its tree is dead.
    """
    exited: Exited | None = None
    limit = process.time_limit(options.timeout_s, elapsed_s=elapsed_s)
    with terminal.raw() if options.tty else nullcontext():
        async with process, anyio.create_task_group() as tasks:
            if process.takes_input and options.stdin and terminal.stdin_offered():
                tasks.start_soon(_feed, process.stdin, options.tty)
            if options.tty:
                tasks.start_soon(_resize, process)
            with limit:
                async for event in process:
                    if isinstance(event, Output):
                        await sink.take(event)
                    elif isinstance(event, Exited):
                        exited = event
            tasks.cancel_scope.cancel()
    if exited is None:
        raise AssertionError("the events of a process ended without its end")
    if limit.expired:
        raise limit.error(sink.result(exited, timed_out=True))
    return exited


async def _feed(stdin: ProcessInput, tty: bool) -> None:
    """Pass our input on until it ends or the command closes its end.

    On a terminal the end is a key. A program that sets up its terminal just then loses it, so it is pressed again.
    """
    try:
        async for chunk in terminal.stdin_chunks():
            await stdin.send(chunk)
        while tty:
            await stdin.send(_END_KEY)
            await anyio.sleep(_END_KEY_AGAIN_S)
        await stdin.aclose()
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        pass


async def _resize(process: Process) -> None:
    async for rows, cols in terminal.size_changes():
        await process.resize(rows, cols)


class _Passthrough:
    """Output that is written to our own streams as it comes."""

    def __init__(self) -> None:
        self._writers = {
            "stdout": terminal.OutputWriter(terminal.STDOUT),
            "stderr": terminal.OutputWriter(terminal.STDERR),
        }

    async def take(self, output: Output) -> None:
        await self._writers[output.stream].write(output.data)

    def result(self, exited: Exited, *, timed_out: bool = False) -> ExecResult:
        """How the command ended, without its output, which has been written."""
        return to_result(exited, Collector(0), Collector(0), timed_out=timed_out)


class _Captured:
    """Output that is kept for one JSON object at the end; of long output, its beginning and its end."""

    def __init__(self) -> None:
        self.stdout = Collector(CAPTURE_BYTES)
        self.stderr = Collector(CAPTURE_BYTES)

    async def take(self, output: Output) -> None:
        (self.stdout if output.stream == "stdout" else self.stderr).add(output.data)

    def result(self, exited: Exited, *, timed_out: bool = False) -> ExecResult:
        """How the command ended, and what it printed."""
        return to_result(exited, self.stdout, self.stderr, timed_out=timed_out)


class _LogReader:
    """What `logs` has read so far, and whether that is all that was requested."""

    def __init__(self, info: ProcessInfo, since: tuple[int, int] | None, *, follow: bool, as_json: bool) -> None:
        self._info = info
        self._follow = follow
        self._lines = as_json and follow
        self._captured = _Captured() if as_json and not follow else None
        self._passthrough = _Passthrough()
        self._next = {"stdout": since[0] if since else 0, "stderr": since[1] if since else 0}
        self._start: dict[str, int] = {}
        self._ended = False

    def is_satisfied(self) -> bool:
        """Whether all that was requested has been read: to the end, or what had been printed when we began."""
        if self._follow:
            return self._ended
        info = self._info
        return self._ended or (self._next["stdout"] >= info.stdout_total and self._next["stderr"] >= info.stderr_total)

    async def take(self, event: Output | Gap | Exited) -> None:
        if isinstance(event, Exited):
            self._ended = True
            if self._lines:
                render.emit_json({"event": "exited", **event.model_dump(mode="json")}, line=True)
            return
        if isinstance(event, Gap):
            self._skip(event.stream, event.offset)
            return
        if event.offset > self._next[event.stream]:
            self._skip(event.stream, event.offset)
        self._start.setdefault(event.stream, event.offset)
        self._next[event.stream] = event.offset + len(event.data)
        if self._lines:
            text = event.data.decode("utf-8", "replace")
            line = {"event": "output", "stream": event.stream, "offset": event.offset, "data": text}
            render.emit_json(line, line=True)
        elif self._captured is not None:
            await self._captured.take(event)
        else:
            await self._passthrough.take(event)

    def _skip(self, stream: Literal["stdout", "stderr"], offset: int) -> None:
        missing = offset - self._next[stream]
        self._next[stream] = max(offset, self._next[stream])
        if missing <= 0:
            return
        if self._lines:
            render.emit_json({"event": "gap", "stream": stream, "offset": offset}, line=True)
        elif self._captured is None:
            render.note(f"[{missing} bytes of {stream} are no longer kept]")

    def finish(self) -> None:
        """Print the object that `--json` promises, if it is one object."""
        if self._captured is None:
            return
        info = self._info
        render.emit_json(
            {
                "id": info.id,
                "command": info.command,
                "live": info.live,
                "exit_code": info.exit_code,
                "stdout": self._captured.stdout.text()[0],
                "stderr": self._captured.stderr.text()[0],
                "stdout_offset": self._start.get("stdout", self._next["stdout"]),
                "stderr_offset": self._start.get("stderr", self._next["stderr"]),
                "stdout_next": self._next["stdout"],
                "stderr_next": self._next["stderr"],
            }
        )


def _env(options: ExecOptions) -> dict[str, str]:
    """The command's own variables, with TERM if it has a terminal."""
    variables = dict(options.env)
    if options.tty:
        variables.setdefault("TERM", os.environ.get("TERM") or "xterm")
    return variables


def _pty(options: ExecOptions) -> tuple[int, int] | None:
    return terminal.terminal_size() if options.tty else None
