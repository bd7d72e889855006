"""`process.Process` of E2B's daemon: commands and terminals.

Owns the translation of its calls, and what E2B remembers of a command and Atoll does not: its tag, its arguments, and
that its time-out kills it also when its client is gone. All of that is in memory; the commands themselves belong to
their sandbox, and go on when this server is started anew. Not here: the protocol (`connect.py`).

A command is found by its pid, which a sandbox may use again: the newest counts. `Connect` gets the output from then on,
and the end of a command that has ended, as long as the sandbox remembers it (the last 64).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import math
import signal as signals
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
from pydantic import Field

from atoll.contract.errors import AtollError, PathNotDirectory, PathNotFound, ProcessNotFound
from atoll.contract.model import Exited, Output, ProcessInfo
from atoll.runtime.guest.process import Process
from atoll.runtime.sandbox import Sandbox
from atoll.surfaces.e2b.connect import RpcCall, RpcError, RpcMessage, RpcMethods, next_or_ping, parse
from atoll.surfaces.e2b.control import E2bBody
from atoll.surfaces.e2b.record import own_variables

SERVICE = "/process.Process"
MAX_KNOWN = 1024
"""Commands of one sandbox that are remembered. The oldest are forgotten first, with their time-outs."""
MAX_CONFIG_CHARS = 8 * 1024
"""Of a command's arguments and environment, each with 16 more, if they are to be remembered: there may be 256 KiB."""
_NEW_ONLY = 2**53
_KEEPALIVE: RpcMessage = {"event": {"keepalive": {}}}
_SIGNALS = {"SIGNAL_SIGTERM": signals.SIGTERM, "SIGNAL_SIGKILL": signals.SIGKILL}
_SIGNAL_WORDS: dict[int, str] = {
    signals.SIGHUP: "hangup",
    signals.SIGINT: "interrupt",
    signals.SIGQUIT: "quit",
    signals.SIGILL: "illegal instruction",
    signals.SIGTRAP: "trace/breakpoint trap",
    signals.SIGABRT: "aborted",
    signals.SIGBUS: "bus error",
    signals.SIGFPE: "floating point exception",
    signals.SIGKILL: "killed",
    signals.SIGUSR1: "user defined signal 1",
    signals.SIGSEGV: "segmentation fault",
    signals.SIGUSR2: "user defined signal 2",
    signals.SIGPIPE: "broken pipe",
    signals.SIGALRM: "alarm clock",
    signals.SIGTERM: "terminated",
}
"""As E2B's daemon words them."""


class ProcessConfig(E2bBody):
    cmd: str = ""
    args: list[str] = Field(default_factory=list)
    envs: dict[str, str] = Field(default_factory=dict)
    cwd: str | None = None


class PtySize(E2bBody):
    cols: int = Field(default=80, ge=1, le=65535)
    rows: int = Field(default=24, ge=1, le=65535)


class PtyBody(E2bBody):
    size: PtySize | None = None


class StartRequest(E2bBody):
    process: ProcessConfig
    pty: PtyBody | None = None
    tag: str | None = Field(default=None, max_length=1024)
    stdin: bool | None = None


class ProcessSelector(E2bBody):
    pid: int | None = None
    tag: str | None = None


class SelectedRequest(E2bBody):
    process: ProcessSelector


class UpdateRequest(SelectedRequest):
    pty: PtyBody | None = None


class ProcessInputBody(E2bBody):
    stdin: str | None = None
    pty: str | None = None


class SendInputRequest(SelectedRequest):
    input: ProcessInputBody = Field(default_factory=ProcessInputBody)


class SignalRequest(SelectedRequest):
    signal: str = "SIGNAL_UNSPECIFIED"


class StreamStart(E2bBody):
    process: ProcessSelector


class StreamData(E2bBody):
    input: ProcessInputBody


class StreamInputRequest(E2bBody):
    start: StreamStart | None = None
    data: StreamData | None = None
    keepalive: dict[str, Any] | None = None


@dataclass
class _KnownCommand:
    """What is remembered of a command."""

    config: ProcessConfig | None
    """Unset: it is too long to be remembered."""
    tag: str | None
    is_terminal: bool
    takes_input: bool
    timed_out: bool = False
    timer: asyncio.TimerHandle | None = None
    writing: anyio.Lock = field(default_factory=anyio.Lock)

    def forget(self) -> None:
        """From now on it has no time-out."""
        if self.timer is not None:
            self.timer.cancel()


class ProcessService:
    """The service, for all sandboxes."""

    def __init__(self) -> None:
        self._known: dict[str, OrderedDict[int, _KnownCommand]] = {}
        """By the id of the sandbox, then by that of the command."""
        self._kills: set[asyncio.Task[None]] = set()

    def methods(self) -> RpcMethods:
        return RpcMethods(
            {
                f"{SERVICE}/List": self._list,
                f"{SERVICE}/Update": self._update,
                f"{SERVICE}/SendInput": self._send_input,
                f"{SERVICE}/SendSignal": self._send_signal,
                f"{SERVICE}/CloseStdin": self._close_stdin,
            },
            {f"{SERVICE}/Start": self._start, f"{SERVICE}/Connect": self._connect},
            {f"{SERVICE}/StreamInput": self._stream_input},
        )

    def aclose(self) -> None:
        """Commands go on. Those with a time-out that is not over have none from now on."""
        self.forget_gone(())

    def forget_gone(self, sandboxes: Collection[str]) -> None:
        """Forget the commands of all other sandboxes."""
        for id in [id for id in self._known if id not in sandboxes]:
            for known in self._known.pop(id).values():
                known.forget()

    def _recall(self, sandbox: Sandbox, id: int) -> _KnownCommand | None:
        of_sandbox = self._known.get(sandbox.id)
        return None if of_sandbox is None else of_sandbox.get(id)

    # ---------------------------------------------------------------------------------------------------- start

    async def _start(self, call: RpcCall, body: bytes) -> AsyncGenerator[RpcMessage, None]:
        wanted = parse(StartRequest, body)
        config, sandbox = wanted.process, call.sandbox
        if not config.cmd:
            raise RpcError("invalid_argument", "process.cmd is missing")
        size = wanted.pty.size or PtySize() if wanted.pty is not None else None
        takes_input = wanted.stdin is not False or size is not None
        try:
            process = await sandbox.spawn(
                [config.cmd, *config.args],
                env={**own_variables(sandbox), **config.envs},
                cwd=config.cwd or None,
                user=call.user,
                stdin=takes_input,
                pty=None if size is None else (size.rows, size.cols),
            )
        except (PathNotFound, PathNotDirectory):
            raise RpcError("invalid_argument", f"cwd '{config.cwd}' does not exist or is not a directory") from None
        chars = sum(map(len, (config.cmd, config.cwd or "", *config.args, *config.envs, *config.envs.values())))
        kept = config if chars + 16 * (len(config.args) + len(config.envs)) <= MAX_CONFIG_CHARS else None
        known = _KnownCommand(kept, wanted.tag, size is not None, takes_input)
        self._remember(sandbox, process.id, known, call.timeout_s)
        if takes_input:
            # Its input belongs to the request that sends some next, for as long as that takes.
            await process.detach()
            process = await sandbox.attach(process.id, stdout_offset=0, stderr_offset=0)
        async for event in self._events(process, known, call, is_own=True):
            yield event

    def _remember(self, sandbox: Sandbox, id: int, known: _KnownCommand, timeout_s: float | None) -> None:
        of_sandbox = self._known.setdefault(sandbox.id, OrderedDict())
        of_sandbox[id] = known
        while len(of_sandbox) > MAX_KNOWN:
            of_sandbox.popitem(last=False)[1].forget()
        if timeout_s is not None:
            loop = asyncio.get_running_loop()
            known.timer = loop.call_later(timeout_s, self._expire, sandbox, id, known)

    def _expire(self, sandbox: Sandbox, id: int, known: _KnownCommand) -> None:
        known.timed_out = True

        async def kill() -> None:
            with suppress(AtollError):  # it has ended, or its sandbox has
                await sandbox.kill(id)

        task = asyncio.get_running_loop().create_task(kill())
        self._kills.add(task)
        task.add_done_callback(self._kills.discard)

    async def _events(
        self, process: Process, known: _KnownCommand | None, call: RpcCall, *, is_own: bool
    ) -> AsyncGenerator[RpcMessage, None]:
        """What happens to a command. When its reader leaves, it goes on."""
        is_terminal = known is not None and known.is_terminal
        # The time-out of a command is a timer of its own, which kills it; that of `Connect` ends the stream only.
        left_s = math.inf if is_own or call.timeout_s is None else call.timeout_s
        deadline = anyio.current_time() + left_s
        try:
            yield {"event": {"start": {"pid": process.pid}}}
            while True:
                try:
                    event = await next_or_ping(process, min(call.ping_s, deadline - anyio.current_time()))
                except StopAsyncIteration:
                    return
                if event is None and anyio.current_time() >= deadline:
                    raise RpcError("deadline_exceeded", "context deadline exceeded")
                if event is None:
                    yield _KEEPALIVE
                elif isinstance(event, Output):
                    stream = "pty" if is_terminal else event.stream
                    yield {"event": {"data": {stream: base64.b64encode(event.data).decode()}}}
                elif isinstance(event, Exited):
                    if known is not None:
                        known.forget()
                    if is_own and known is not None and known.timed_out:
                        raise RpcError("deadline_exceeded", "context deadline exceeded")
                    yield {"event": {"end": _end(event)}}
        finally:
            with anyio.CancelScope(shield=True), suppress(AtollError):
                await process.detach()

    # -------------------------------------------------------------------------------------------------- connect

    async def _connect(self, call: RpcCall, body: bytes) -> AsyncGenerator[RpcMessage, None]:
        wanted = parse(SelectedRequest, body).process
        info = await self._find(call.sandbox, wanted)
        known = self._recall(call.sandbox, info.id)
        process = await call.sandbox.attach(
            info.id, stdout_offset=info.stdout_total, stderr_offset=info.stderr_total, lossless=False
        )
        async for event in self._events(process, known, call, is_own=False):
            yield event

    async def _find(self, sandbox: Sandbox, wanted: ProcessSelector, *, runs: bool = False) -> ProcessInfo:
        """
        Raises:
            ProcessNotFound: there is none; or it has ended, and it has to run.
        """
        found = [
            each
            for each in await sandbox.processes()
            if (each.pid == wanted.pid if wanted.pid is not None else self._tag(sandbox, each.id) == wanted.tag)
            and not (runs and each.exit_code is not None)
        ]
        if not found or (wanted.pid is None and wanted.tag is None):
            what = f"pid {wanted.pid}" if wanted.pid is not None else f"tag {wanted.tag}"
            raise RpcError("not_found", f"process with {what} not found")
        return max(found, key=lambda each: each.id)

    def _tag(self, sandbox: Sandbox, id: int) -> str | None:
        known = self._recall(sandbox, id)
        return known.tag if known is not None else None

    # ---------------------------------------------------------------------------------------------------- unary

    async def _list(self, call: RpcCall, _body: bytes) -> RpcMessage:
        shown = []
        for each in await call.sandbox.processes():
            if each.exit_code is not None:
                continue
            known = self._recall(call.sandbox, each.id)
            config = (known.config if known is not None else None) or ProcessConfig(cmd=each.command)
            entry: RpcMessage = {"pid": each.pid, "config": config.model_dump(exclude_none=True)}
            if known is not None and known.tag is not None:
                entry["tag"] = known.tag
            shown.append(entry)
        return {"processes": shown}

    async def _update(self, call: RpcCall, body: bytes) -> RpcMessage:
        wanted = parse(UpdateRequest, body)
        info = await self._find(call.sandbox, wanted.process, runs=True)
        if wanted.pty is not None and wanted.pty.size is not None:
            size = wanted.pty.size
            async with await self._attach(call.sandbox, info.id, stdin=False) as process:
                await process.resize(size.rows, size.cols)
        return {}

    async def _send_input(self, call: RpcCall, body: bytes) -> RpcMessage:
        wanted = parse(SendInputRequest, body)
        info = await self._find(call.sandbox, wanted.process, runs=True)
        await self._write(call.sandbox, info.id, _input(wanted.input))
        return {}

    async def _send_signal(self, call: RpcCall, body: bytes) -> RpcMessage:
        wanted = parse(SignalRequest, body)
        signal = _SIGNALS.get(wanted.signal)
        if signal is None:
            raise RpcError("unimplemented", f"invalid signal: {wanted.signal}")
        info = await self._find(call.sandbox, wanted.process, runs=True)
        await call.sandbox.kill(info.id, signal, tree=signal == signals.SIGKILL)
        return {}

    async def _close_stdin(self, call: RpcCall, body: bytes) -> RpcMessage:
        info = await self._find(call.sandbox, parse(SelectedRequest, body).process, runs=True)
        await self._write(call.sandbox, info.id, None)
        return {}

    async def _stream_input(self, call: RpcCall, messages: AsyncIterator[bytes]) -> RpcMessage:
        id: int | None = None
        async for body in messages:
            wanted = parse(StreamInputRequest, body)
            if wanted.start is not None:
                id = (await self._find(call.sandbox, wanted.start.process, runs=True)).id
            elif wanted.data is not None:
                if id is None:
                    raise RpcError("invalid_argument", "the stream has to begin with a start event")
                await self._write(call.sandbox, id, _input(wanted.data.input))
        return {}

    # ---------------------------------------------------------------------------------------------------- input

    async def _attach(self, sandbox: Sandbox, id: int, *, stdin: bool) -> Process:
        return await sandbox.attach(id, stdout_offset=_NEW_ONLY, stderr_offset=_NEW_ONLY, stdin=stdin, lossless=False)

    async def _write(self, sandbox: Sandbox, id: int, data: bytes | None) -> None:
        """Write to the input of a command, or, with None, close it. One request at a time."""
        known = self._recall(sandbox, id)
        if known is not None and not known.takes_input:
            raise RpcError("failed_precondition", "stdin not enabled or closed")
        writing = known.writing if known is not None else anyio.Lock()
        async with writing, await self._attach(sandbox, id, stdin=True) as process:
            try:
                if data is None:
                    await process.stdin.aclose()
                else:
                    await process.stdin.send(data)
            except anyio.BrokenResourceError:
                raise ProcessNotFound(f"process {id} has ended", id=id) from None


def _input(body: ProcessInputBody) -> bytes:
    try:
        return base64.b64decode(body.stdin or body.pty or "", validate=True)
    except binascii.Error:
        raise RpcError("invalid_argument", "the input is not base64") from None


def _end(event: Exited) -> RpcMessage:
    if event.signal is not None:
        word = _SIGNAL_WORDS.get(event.signal, f"signal {event.signal}")
        return {"exitCode": -1, "exited": False, "status": f"signal: {word}", "error": f"signal: {word}"}
    end: RpcMessage = {"exitCode": event.exit_code, "exited": True, "status": f"exit status {event.exit_code}"}
    return end | ({"error": end["status"]} if event.exit_code else {})
