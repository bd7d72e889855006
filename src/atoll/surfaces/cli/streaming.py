"""`run`, `exec`, `shell`, `logs` and `cp`: bytes that pass between a sandbox and this process.

It knows when a command has to die (its time is up, we were told to end, nobody reads) and what is passed on. It
refuses to know how bytes enter and leave this process (`terminal`), how files cross the boundary and where they land
(`Files`), and how things look (`render`). Output goes through as it came, byte for byte, and is never kept longer
than a chunk, except with `--json`, which has a limit.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import anyio

from atoll.contract.errors import InvalidRequest, ProcessNotFound
from atoll.contract.model import ExecResult, Exited, Gap, Output, ProcessInfo
from atoll.runtime.engine import open as open_engine
from atoll.runtime.guest.process import Collector, to_result
from atoll.surfaces.cli import render, terminal
from atoll.surfaces.cli.sandboxes import SandboxOptions, make
from atoll.surfaces.cli.values import CopySpec

if TYPE_CHECKING:
    from atoll.runtime.guest.files import Files
    from atoll.runtime.guest.process import Process, ProcessInput
    from atoll.runtime.sandbox import Sandbox

Stream = Literal["stdout", "stderr"]

CAPTURE_BYTES = 16 * 1024 * 1024
"""How much of each stream `--json` keeps: one half from the beginning, one from the end."""


@dataclass(frozen=True)
class Call:
    """A command as it was asked for."""

    command: str | Sequence[str]
    """A shell line, or the words of a command."""
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    cwd: str | None = None
    timeout_s: float | None = None
    tty: bool = False
    stdin: bool = True
    as_json: bool = False


async def run(state_dir: Path | None, making: SandboxOptions, call: Call, *, name: str | None, keep: bool) -> int:
    """Run a command in a sandbox of its own and return its exit status. Only `keep` leaves the sandbox behind."""
    async with open_engine(state_dir) as engine, AsyncExitStack() as stack:
        sandbox = await make(engine, making, name, ephemeral=not keep)
        if keep:
            if name is None:
                render.note(f"the sandbox is kept as {sandbox.name}")
        else:
            await stack.enter_async_context(sandbox)
        return await _drive(sandbox, call)


async def exec(state_dir: Path | None, name: str, call: Call) -> int:
    """Run a command in a sandbox that exists and return its exit status."""
    async with open_engine(state_dir) as engine:
        return await _drive(await engine.get(name), call)


async def detach(state_dir: Path | None, name: str, call: Call) -> int:
    """Start a command and leave it to itself. Its number is printed."""
    async with open_engine(state_dir) as engine:
        sandbox = await engine.get(name)
        process = await sandbox.spawn(
            call.command, env=_env(call), cwd=call.cwd, user=call.user, pty=_pty(call), keep=True
        )
        await process.detach()
        if call.as_json:
            render.emit_json({"sandbox": name, "id": process.id, "pid": process.pid})
        else:
            render.say(str(process.id))
    return 0


async def shell(state_dir: Path | None, name: str, call: Call) -> int:
    """Give the terminal to a shell in the sandbox until it ends, and return its exit status."""
    async with open_engine(state_dir) as engine:
        sandbox = await engine.get(name)
        rows, cols = terminal.terminal_size()
        process = await sandbox.shell(
            rows=rows, cols=cols, user=call.user, cwd=call.cwd, env=_env(call), command=call.command or None
        )
        exited = await _connect(process, call, _Through())
        return exited.exit_code


async def logs(
    state_dir: Path | None, name: str, number: int | None, since: tuple[int, int] | None, *, follow: bool, as_json: bool
) -> int:
    """Print what is kept of a command's output; with `follow`, go on until it ends. The command is never held up."""
    async with open_engine(state_dir) as engine:
        sandbox = await engine.get(name)
        info = _chosen(await sandbox.processes(), name, number)
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
    return 0


async def cp(state_dir: Path | None, journey: CopySpec, *, user: str | None, as_json: bool) -> int:
    """Copy a file or a directory, or one file from standard input or to standard output."""
    async with open_engine(state_dir) as engine:
        files = (await engine.get(journey.sandbox)).files
        if journey.inward and journey.is_stream:
            copied = await files.write_bytes(journey.inside, _stdin(), user=user)
        elif journey.inward:
            copied = await files.upload(Path(journey.here), journey.inside, user=user)
        elif journey.is_stream:
            copied = await _to_stdout(files, journey.inside, user)
        else:
            copied = await files.download(journey.inside, Path(journey.here), user=user)
    if as_json:
        ends = (journey.here, f"{journey.sandbox}:{journey.inside}")
        source, target = ends if journey.inward else ends[::-1]
        render.emit_json({"source": source, "target": target, "bytes": copied})
    return 0


async def _drive(sandbox: Sandbox, call: Call) -> int:
    """Run the call in the sandbox with our streams. Leaving early, for whatever reason, kills its whole tree."""
    sink = _Captured() if call.as_json else _Through()
    process = await sandbox.spawn(
        call.command,
        env=_env(call),
        cwd=call.cwd,
        user=call.user,
        stdin=call.stdin and terminal.stdin_offered(),
        pty=_pty(call),
        keep=False,
    )
    exited = await _connect(process, call, sink)
    if isinstance(sink, _Captured):
        result = sink.result(exited)
        render.emit_json({"sandbox": sandbox.name, "id": process.id, **result.model_dump(mode="json")})
    return exited.exit_code


async def _connect(process: Process, call: Call, sink: _Through | _Captured) -> Exited:
    """Pass input, output and window sizes until the main process ends.

    Raises:
        ExecTimeout: its time was up; its tree is dead.
        OutputClosed: nobody reads our output any more; its tree is dead.
    """
    exited: Exited | None = None
    limit = process.time_limit(call.timeout_s)
    with terminal.raw() if call.tty else nullcontext():
        async with process, anyio.create_task_group() as tasks:
            if process.stdin is not None and call.stdin and terminal.stdin_offered():
                tasks.start_soon(_feed, process.stdin)
            if call.tty:
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


async def _feed(stdin: ProcessInput) -> None:
    """Pass our input on until it ends or the command no longer wants it."""
    try:
        async for chunk in terminal.stdin_chunks():
            await stdin.send(chunk)
        await stdin.aclose()
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        pass


async def _resize(process: Process) -> None:
    async for rows, cols in terminal.size_changes():
        await process.resize(rows, cols)


async def _to_stdout(files: Files, path: str, user: str | None) -> int:
    outlet = terminal.Outlet(terminal.STDOUT)
    copied = 0
    async for chunk in files.stream(path, user=user):
        await outlet.write(chunk)
        copied += len(chunk)
    return copied


async def _stdin() -> AsyncIterator[bytes]:
    if terminal.stdin_offered():
        async for chunk in terminal.stdin_chunks():
            yield chunk


class _Through:
    """Output that goes on to our own streams as it comes."""

    def __init__(self) -> None:
        self._outlets = {"stdout": terminal.Outlet(terminal.STDOUT), "stderr": terminal.Outlet(terminal.STDERR)}

    async def take(self, output: Output) -> None:
        await self._outlets[output.stream].write(output.data)

    def result(self, exited: Exited, *, timed_out: bool = False) -> ExecResult:
        """How the command ended. Its output has gone on and is not in it."""
        return to_result(exited, Collector(0), Collector(0), timed_out=timed_out)


class _Captured:
    """Output that is kept for one JSON object at the end, a beginning and an end of it if it is long."""

    def __init__(self) -> None:
        self.stdout = Collector(CAPTURE_BYTES)
        self.stderr = Collector(CAPTURE_BYTES)

    async def take(self, output: Output) -> None:
        (self.stdout if output.stream == "stdout" else self.stderr).add(output.data)

    def result(self, exited: Exited, *, timed_out: bool = False) -> ExecResult:
        """How the command ended, and what it printed."""
        return to_result(exited, self.stdout, self.stderr, timed_out=timed_out)


class _LogReader:
    """What `logs` has seen so far, and whether that is what was asked for."""

    def __init__(self, info: ProcessInfo, since: tuple[int, int] | None, *, follow: bool, as_json: bool) -> None:
        self._info = info
        self._follow = follow
        self._lines = as_json and follow
        self._captured = _Captured() if as_json and not follow else None
        self._through = _Through()
        self._next = {"stdout": since[0] if since else 0, "stderr": since[1] if since else 0}
        self._start: dict[str, int] = {}
        self._ended = False

    def is_satisfied(self) -> bool:
        """True when nothing is left to wait for: the end, or what had been printed when we came."""
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
            await self._through.take(event)

    def _skip(self, stream: Stream, offset: int) -> None:
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


def _chosen(processes: Sequence[ProcessInfo], name: str, number: int | None) -> ProcessInfo:
    """The command that `logs` is about: the one with this number, or the latest."""
    if number is None:
        if not processes:
            raise InvalidRequest(f"no command has been started in {name} yet, so there is no output of one")
        return max(processes, key=lambda info: info.id)
    for info in processes:
        if info.id == number:
            return info
    known = ", ".join(str(info.id) for info in processes[-8:]) or "there are none"
    raise ProcessNotFound(f"no command of {name} has the number {number} (kept are: {known})", id=number)


def _env(call: Call) -> dict[str, str]:
    """The command's own variables. One with a terminal is told what kind it is."""
    variables = dict(call.env)
    if call.tty:
        variables.setdefault("TERM", os.environ.get("TERM") or "xterm")
    return variables


def _pty(call: Call) -> tuple[int, int] | None:
    return terminal.terminal_size() if call.tty else None
