"""A sandbox as its user sees it: commands, files, ports, and its end.

Owns the public keywords of a command, when to connect, and what the loss of a connection or the death of a sandbox
means. A dead sandbox never looks like a command's output: it raises. Not here: what is sent to the guest (`guest/`),
how a sandbox is created (`provisioning.py`), and which ones are open (`connections.py`, the `SandboxOwner`). Used by
`engine.py` and every layer above.
"""

from __future__ import annotations

import logging
import shlex
import signal as signals
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream

from atoll.contract.errors import (
    AtollError,
    GuestProtocolError,
    GuestUnresponsive,
    LaunchFailed,
    SandboxDied,
    SandboxError,
)
from atoll.contract.model import (
    Checkpoint,
    ExecBytes,
    ExecResult,
    ExportResult,
    Limits,
    OnExpiry,
    Preview,
    ProcessInfo,
    SandboxInfo,
    Status,
    SystemProcess,
    Usage,
)
from atoll.contract.network import AuditRecord, NetworkPolicy
from atoll.contract.protocol import Op, encode_text
from atoll.runtime.guest import ports, process
from atoll.runtime.guest.connection import GuestConnection
from atoll.runtime.guest.exec_request import (
    OUTPUT_LIMIT_BYTES,
    Environment,
    ExecRequest,
    OwnVariables,
    check_timeout,
    shell_line,
    start_directory,
    sudo_user,
)
from atoll.runtime.guest.flow import Failure, Sink
from atoll.runtime.guest.live_text import TextCallback
from atoll.runtime.guest.ports import Listener, PortConnection
from atoll.runtime.guest.process import OomWatch, Process, to_bytes, to_result
from atoll.runtime.guest.stream import Stream

if TYPE_CHECKING:
    from atoll.runtime.archive.export import ArchiveFile
    from atoll.runtime.egress.server import EgressServer
    from atoll.runtime.guest.files import Files
    from atoll.runtime.images.fetch import ProgressCallback
    from atoll.runtime.interface import Engine
    from atoll.runtime.lifetimes import BackgroundTasks
    from atoll.runtime.previews.forward import DialPort
    from atoll.runtime.project.project import ProjectCopy
    from atoll.tools.tool import ToolSet

LOGIN_SHELL = shell_line("-l")

_log = logging.getLogger(__name__)
READY_S = 60.0
"""How long a new sandbox may take until its ready command succeeds."""
_READY_INTERVAL_S = 0.1
_READY_OUTPUT_BYTES = 4096
_MAX_OOM_WATCHES = 256
_CONNECTION_FAILURES = (SandboxDied, GuestUnresponsive)
"""After these the next call connects again."""


class SandboxOwner(Protocol):
    """What a sandbox needs of the engine that opened it: its only way there. `Connections` implements it."""

    @property
    def engine(self) -> Engine:
        """The public operations on sandboxes by name: `sandbox.pause()` is `engine.pause(sandbox.name)`."""

    @property
    def tasks(self) -> BackgroundTasks:
        """Where a connection is served, for as long as the engine is open."""

    async def connect(self, id: str) -> ByteStream:
        """A connection to the sandbox's keeper. A sleeping sandbox is woken."""

    def take_start(self, id: str) -> Sequence[str]:
        """The start command that the caller is to run, since the sandbox was started without it. It is given once.
        Empty: there is none."""

    def oom_kills(self, id: str) -> int | None:
        """How many of its processes the kernel has killed for memory. None: not known."""

    async def usage(self, id: str, *, disk: bool = True) -> Usage:
        """What the sandbox uses now."""

    async def current_info(self, info: SandboxInfo) -> SandboxInfo:
        """The sandbox as `Engine.list` would show it now."""

    def why_ended(self, info: SandboxInfo) -> str | None:
        """What was done to a sandbox that has ended, in words that follow its name. None: it ended by itself."""

    async def destroy(self, info: SandboxInfo) -> None:
        """End the sandbox and remove all of it. Does nothing if it is gone, even if another has its name now."""

    async def stop(self, id: str) -> None:
        """End the processes of a sandbox that broke the protocol. Its files stay. Does not raise."""

    async def expose(self, info: SandboxInfo, port: int, dial: DialPort, *, wait_s: float) -> Preview:
        """See `Sandbox.expose`."""

    async def unexpose(self, info: SandboxInfo, port: int) -> None:
        """See `Sandbox.unexpose`."""

    async def list_previews(self, info: SandboxInfo) -> list[Preview]:
        """See `Sandbox.previews`."""


class GuestRelay:
    """A connection to a guest for a client on another machine, and what is said to that client besides."""

    __slots__ = ("environment", "oom_kills", "stream", "why_ended")

    def __init__(
        self,
        stream: ByteStream,
        environment: Callable[[], Awaitable[Environment]],
        oom_kills: Callable[[], int | None],
        why_ended: Callable[[], str | None],
    ) -> None:
        self.stream = stream
        """Frames, as the keeper sends and takes them."""
        self.environment = environment
        """Gives the environment of its next command. This process serves the sandbox's egress then."""
        self.oom_kills = oom_kills
        self.why_ended = why_ended


class Sandbox:
    """A sandbox that runs. Get one from `Engine.create` or `Engine.get`.

    Connects when first used, and again when the connection was lost but the sandbox lives. All methods may be called
    from many tasks at once. As a context manager it destroys the sandbox at the end. All methods but `destroy` raise,
    besides what they say:

    Raises:
        SandboxDied: the sandbox has ended, or the connection was lost during the call ("connection lost": then the
            next call connects again, and processes that are kept can be attached to).
        GuestUnresponsive: it runs, but its guest has sent nothing for 30 s during the call, not even the answer to a
            ping; for 5 s, if the call's time was over and a command was to be killed. The next call tries again.
        LaunchFailed: it never started.
        GuestProtocolError: it broke the protocol. Its processes are ended, and every later call raises this.
        InvalidRequest: an argument is wrong.
    """

    def __init__(
        self,
        info: SandboxInfo,
        owner: SandboxOwner,
        *,
        env: Mapping[str, str] | None,
        egress: EgressServer | None = None,
    ) -> None:
        """`env` is the environment of its commands; None: the other end of its connection adds it."""
        self.info = info
        self._owner = owner
        self._oom_kills = partial(owner.oom_kills, info.id)
        self._env = dict(env or {})
        self._environment = OwnVariables() if env is None else Environment(env, sudo=_sudo_user(info))
        self._egress = egress
        self._egress_env: Mapping[str, str] = {}
        """The proxy's variables that `_environment` includes."""
        self._connection: GuestConnection | None = None
        self._connecting = anyio.Lock()
        self._failure: Failure | None = None
        self._oom_watches: OrderedDict[int, OomWatch] = OrderedDict()

    @cached_property
    def files(self) -> Files:
        """The files of the sandbox, as its user sees them."""
        from atoll.runtime.guest.files import Files

        return Files(self._open, self.info.user, self.info.cwd)

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def id(self) -> str:
        return self.info.id

    def __repr__(self) -> str:
        return f"Sandbox({self.name!r})"

    async def copy_project(
        self,
        directory: Path | str,
        path: str | None = None,
        *,
        limit_bytes: int | None = None,
        limit_files: int | None = None,
    ) -> ProjectCopy:
        """Copy a directory of this machine into the sandbox, without what git ignores. Its `diff` is what was changed
        there, its `apply` brings that back.

        `path` unset: under the directory's own name, where commands start. The rest is as in `Project`.

        Raises:
            InvalidRequest: it is not a directory, is too large, or `path` exists and is not empty.
            OSError: a file of it cannot be read.
        """
        from atoll.runtime.project.project import MAX_PROJECT_BYTES, MAX_PROJECT_FILES, Project

        project = Project(
            directory,
            limit_bytes=MAX_PROJECT_BYTES if limit_bytes is None else limit_bytes,
            limit_files=MAX_PROJECT_FILES if limit_files is None else limit_files,
        )
        return await project.copy_in(self.files, path or project.name)

    # ------------------------------------------------------------------------------------------------- commands

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bytes | str | None = None,
        merge_stderr: bool = False,
        timeout_s: float | None = None,
        output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
        on_stdout: Callable[[str], None] | None = None,
        on_stderr: Callable[[str], None] | None = None,
    ) -> ExecResult:
        """Run a command to its end. A string is a line for the shell, a sequence a program and its arguments.

        Returns when the main process ends, even if it left processes running in the background. A program that cannot
        be started is exit code 127 or 126, as in a shell. stdout and stderr are kept up to `output_limit_bytes` each,
        head and tail; any amount passes with bounded memory. `cwd=None` is the sandbox's own (`info.cwd`), else the
        user's home; a relative one begins there. `stdin=None` is empty.
        With `merge_stderr`, stderr is part of stdout, in the order of writing.
        A time-out and a cancellation kill the command with all that it started, before this returns.

        `on_stdout` and `on_stderr` are called with each piece of output while the command runs. They must not block. If
        one of them raises, the command is killed as for a time-out, and this raises the same.

        Raises:
            ExecTimeout: it did not end within `timeout_s`; `result` holds its output until then.
            PathNotFound, PathNotDirectory, PermissionDenied: `cwd` cannot be used.
            SandboxError: how it ended is not known.
        """
        out = None if on_stdout is None else TextCallback(on_stdout)
        err = None if on_stderr is None else TextCallback(on_stderr)
        request = ExecRequest(
            command,
            self._user(user),
            env=env,
            cwd=self._directory(cwd),
            stdin=_stdin(stdin),
            merge_stderr=merge_stderr,
            timeout_s=timeout_s,
            output_limit_bytes=output_limit_bytes,
            on_stdout=out,
            on_stderr=err,
        )
        ran = await process.run(self._open, request, await self._command_environment(), self._oom_kills)
        for callback in (out, err):
            if callback is not None:
                callback.finish()
        return to_result(*ran)

    async def exec_bytes(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bytes | str | None = None,
        merge_stderr: bool = False,
        timeout_s: float | None = None,
        output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
        on_stdout: Callable[[bytes], None] | None = None,
        on_stderr: Callable[[bytes], None] | None = None,
    ) -> ExecBytes:
        """`exec`, with the output as bytes. `ExecTimeout.result` is text here too."""
        request = ExecRequest(
            command,
            self._user(user),
            env=env,
            cwd=self._directory(cwd),
            stdin=_stdin(stdin),
            merge_stderr=merge_stderr,
            timeout_s=timeout_s,
            output_limit_bytes=output_limit_bytes,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
        )
        return to_bytes(*await process.run(self._open, request, await self._command_environment(), self._oom_kills))

    async def spawn(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool = False,
        merge_stderr: bool = False,
        pty: tuple[int, int] | None = None,
        keep: bool = True,
        channels: int = 0,
        start_timeout_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Process:
        """Start a command and return while it runs.

        `pty` gives it a terminal of so many rows and columns; its output is then all stdout. With `keep` it outlives
        this handle, this connection and this program, until it ends or is killed. `channels` is a number of extra
        two-way byte streams, at descriptors 3 and up of the process. If this is cancelled, nothing of the command runs.
        With `merge_stderr`, stderr is part of stdout. `start_timeout_s` is how long connecting (and waking, if the
        sandbox sleeps) and starting may take together. `timeout_s` is how long it may run: then it is killed with all
        that it started, and reading its end raises `ExecTimeout`. That holds as long as the handle is open: a process
        that is detached from has no limit.

        Raises:
            ExecTimeout: it did not start within `start_timeout_s`; nothing of it runs.
            GuestUnresponsive: it did not start within `start_timeout_s`, and it is not known whether it runs.
            PathNotFound, PathNotDirectory, PermissionDenied: `cwd` cannot be used.
        """
        request = ExecRequest(
            command,
            self._user(user),
            env=env,
            cwd=self._directory(cwd),
            stdin=stdin,
            merge_stderr=merge_stderr,
            pty=pty,
            keep=keep,
            channels=channels,
        )
        watch = OomWatch(self._oom_kills)
        environment = await self._command_environment()
        check_timeout(timeout_s)
        started = await process.spawn(self._open, request, environment, watch, start_timeout_s=start_timeout_s)
        started.set_time_limit(timeout_s)
        self._oom_watches[started.id] = watch
        if len(self._oom_watches) > _MAX_OOM_WATCHES:
            self._oom_watches.popitem(last=False)
        return started

    async def shell(
        self,
        *,
        rows: int = 24,
        cols: int = 80,
        user: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        command: str | Sequence[str] | None = None,
    ) -> Process:
        """A terminal with a login shell (bash where there is one, else sh) or `command`. It ends with its handle.

        Raises:
            PathNotFound, PathNotDirectory, PermissionDenied: `cwd` cannot be used.
        """
        return await self.spawn(
            LOGIN_SHELL if command is None else command, env=env, cwd=cwd, user=user, pty=(rows, cols), keep=False
        )

    async def attach(
        self,
        process_id: int,
        *,
        stdout_offset: int | None = None,
        stderr_offset: int | None = None,
        stdin: bool = False,
        channels: int = 0,
        lossless: bool = True,
    ) -> Process:
        """A handle of a process that was spawned before, by this program or another, running or recently ended.

        Output is replayed from the offsets; unset means the oldest that is kept. What is no longer kept is a `Gap`.
        With `lossless` the process waits for this reader; without, a reader that falls behind sees a `Gap`.
        `channels` is the number of extra channels that it was spawned with, to go on with them: at the first byte that
        was not sent to the client before. One client at a time has stdin and the channels.
        The end of its context detaches.

        Raises:
            ProcessNotFound: no such process is known.
            InvalidRequest: `stdin` or `channels` are requested, and another client has them.
        """
        return await process.attach(
            self._open,
            process_id,
            stdout_offset=stdout_offset,
            stderr_offset=stderr_offset,
            stdin=stdin,
            channels=channels,
            lossless=lossless,
            user=self.info.user,
            watch=self._oom_watches.get(process_id) or OomWatch(self._oom_kills),
        )

    async def processes(self) -> list[ProcessInfo]:
        """The commands that were started through the API: those that run, and the last that ended."""
        return await process.list_processes(self._open, self.name)

    async def ps(self) -> list[SystemProcess]:
        """All processes in the sandbox."""
        return await process.list_system_processes(self._open, self.name)

    async def kill(self, process_id: int, signal: int = signals.SIGKILL, *, tree: bool = True) -> None:
        """Send a signal to a spawned process, with `tree` to every process that it started as well.

        SIGKILL with `tree` also reaches processes that they fork meanwhile.

        Raises:
            ProcessNotFound: no such process is known, or it has ended.
        """
        await process.send_signal(self._open, process_id, signal, tree=tree)

    # ---------------------------------------------------------------------------------------------------- ports

    async def dial(self, port: int, host: str = "127.0.0.1") -> PortConnection:
        """Connect to a port inside, on `127.0.0.1` or `::1`.

        Raises:
            PortRefused: nothing listens there.
        """
        return await ports.dial(self._open, port, host)

    @asynccontextmanager
    async def listen(self, port: int = 0, host: str = "127.0.0.1") -> AsyncIterator[Listener]:
        """Listen on a port inside; 0 is any that is free. Connections are accepted from entry on.

        A connection that is not accepted within 30 s is closed.

        Raises:
            PortRefused: the port is taken.
        """
        async with ports.listen(self._open, port, host) as listener:
            yield listener

    async def expose(self, port: int, *, wait_s: float = 0) -> Preview:
        """Let clients of the host reach the server on a port inside, with the preview's URL or token and not without.

        HTTP/1.1, with streams both ways and WebSockets, to `127.0.0.1` or `::1` inside, whichever is listened on. A
        request wakes the sandbox, which counts as used while one is in progress. With `wait_s` this returns once
        a server listens; without, requests before that get an error page. A port that is exposed already keeps its
        preview. It ends with `unexpose`, the sandbox or this engine, and no other process serves it.

        Raises:
            PortRefused: nothing listened within `wait_s`. The port is not exposed then, if it was not before.
            InvalidRequest: the port or `wait_s` is not allowed, or the address in the settings cannot be used.
        """
        return await self._owner.expose(self.info, port, self.dial, wait_s=wait_s)

    def forward(self, port: int, local_port: int = 0) -> AbstractAsyncContextManager[int]:
        """Forward a TCP port on the host's 127.0.0.1 to a port inside, while the context lasts. Gives the port on the
        host: `local_port`, or any free port if that is 0.

        Bytes pass unchanged, in any protocol, to `127.0.0.1` or `::1` inside, whichever is listened on. A connection
        wakes the sandbox, which counts as used while one is open; if nothing listens inside, it is reset. **There is no
        token**: every program on this machine may connect, those of other users too, and so may pages in a browser. For
        HTTP, `expose` is safer.

        Raises:
            InvalidRequest: a port is not allowed, or the port on the host is taken.
        """
        from atoll.runtime.previews.forward import ForwardedPort

        return ForwardedPort(self._owner.tasks, port, self.dial).listening(local_port)

    async def unexpose(self, port: int) -> None:
        """End a preview at once: its token is no longer valid, and its open connections are cut.

        Does nothing if the port is not exposed.
        """
        await self._owner.unexpose(self.info, port)

    async def previews(self) -> list[Preview]:
        """The ports that this process exposes, by number."""
        return await self._owner.list_previews(self.info)

    # ----------------------------------------------------------------------------------------- the sandbox itself

    @property
    def _is_connected(self) -> bool:
        """Whether there is a connection to its guest."""
        return self._connection is not None and self._connection.failure is None

    async def connect(self) -> None:
        """Connect now rather than with the first call. Does nothing if there is a connection."""
        if not self._is_connected:
            await self._connect()

    async def stat(self, *, disk: bool = True) -> Usage:
        """What the sandbox uses now. Without `disk`, whose files are counted one by one, that is 0."""
        return await self._owner.usage(self.id, disk=disk)

    async def status(self) -> Status:
        """Its status now. `info` is up to date then. Neither connects to the sandbox nor wakes or resumes it.

        Raises:
            SandboxDied: it was destroyed.
        """
        self.info = await self._owner.current_info(self.info)
        return self.info.status

    async def destroy(self) -> None:
        """End every process in it and remove all that it wrote. Calls in progress raise `SandboxDied`."""
        if self._failure is None:
            self._failure = Failure(SandboxDied, f"sandbox {self.name!r} was destroyed")
        if self._connection is not None:
            self._connection.fail(self._failure)
        await self._owner.destroy(self.info)

    async def update(
        self,
        *,
        labels: Mapping[str, str | None] | None = None,
        ttl_s: float | None = None,
        on_expiry: OnExpiry | None = None,
        ttl_renewed_by_use: bool | None = None,
        limits: Limits | None = None,
    ) -> SandboxInfo:
        """As `Engine.update`."""
        return await self._owner.engine.update(
            self.name,
            labels=labels,
            ttl_s=ttl_s,
            on_expiry=on_expiry,
            ttl_renewed_by_use=ttl_renewed_by_use,
            limits=limits,
        )

    async def pause(self) -> None:
        """As `Engine.pause`."""
        await self._owner.engine.pause(self.name)

    async def resume(self) -> None:
        """As `Engine.resume`."""
        await self._owner.engine.resume(self.name)

    async def sleep(self) -> None:
        """As `Engine.sleep`."""
        await self._owner.engine.sleep(self.name)

    async def wake(self) -> None:
        """As `Engine.wake`."""
        await self._owner.engine.wake(self.name)

    async def shutdown(self) -> None:
        """As `Engine.shutdown`."""
        await self._owner.engine.shutdown(self.name)

    async def checkpoint(self, label: str | None = None, *, move: bool = False) -> Checkpoint:
        """As `Engine.checkpoint`."""
        return await self._owner.engine.checkpoint(self.name, label, move=move)

    async def checkpoints(self) -> list[Checkpoint]:
        """As `Engine.checkpoints`, of this sandbox."""
        return await self._owner.engine.checkpoints(self.name)

    async def restore(self, checkpoint: str, *, foreign: bool = False) -> None:
        """As `Engine.restore`."""
        await self._owner.engine.restore(self.name, checkpoint, foreign=foreign)

    async def fork(
        self, count: int = 1, *, checkpoint: str | None = None, names: Sequence[str] | None = None
    ) -> list[Sandbox]:
        """As `Engine.fork`."""
        return await self._owner.engine.fork(self.name, count, checkpoint=checkpoint, names=names)

    async def export(
        self, target: ArchiveFile, *, checkpoint: str | None = None, progress: ProgressCallback | None = None
    ) -> ExportResult:
        """As `Engine.export`."""
        return await self._owner.engine.export(self.name, target, checkpoint=checkpoint, progress=progress)

    async def set_network(self, policy: NetworkPolicy | None) -> None:
        """As `Engine.set_network`."""
        await self._owner.engine.set_network(self.name, policy)

    async def audit(self) -> list[AuditRecord]:
        """As `Engine.audit`."""
        return await self._owner.engine.audit(self.name)

    def tools(self) -> ToolSet:
        """The agent's tools bound to this sandbox, to be offered to a model."""
        from atoll.tools.pool import sandbox_tools

        return sandbox_tools(self)

    async def aclose(self) -> None:
        """Disconnect and leave the sandbox as it is. The next call connects again."""
        self._disconnect()
        await anyio.lowlevel.checkpoint()

    def _disconnect(self) -> None:
        """`aclose`, for a caller that cannot await."""
        if self._connection is not None:
            self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.destroy()

    # ---------------------------------------------------------------------------------------------- the connection

    async def relay(self) -> GuestRelay:
        """A connection of its own to the guest, for a server that passes frames on to a client elsewhere.

        While it is open, this process should serve the egress: so it is connected too.

        Raises:
            what connecting raises.
        """
        await self.connect()
        stream = await self._owner.connect(self.id)
        return GuestRelay(stream, self._served_environment, self._oom_kills, lambda: self._owner.why_ended(self.info))

    async def _served_environment(self) -> Environment:
        await self.connect()
        return await self._command_environment()

    async def _open(
        self,
        op: Op,
        fields: bytes,
        *,
        receive: Iterable[int] = (1,),
        send: Iterable[int] = (),
        dedicated: Iterable[int] = (),
        sink: Sink | None = None,
    ) -> Stream:
        connection = self._connection
        if connection is None or connection.failure is not None:
            connection = await self._connect()
        return await connection.open(op, fields, receive=receive, send=send, dedicated=dedicated, sink=sink)

    async def _connect(self) -> GuestConnection:
        """The connection that all calls share, made if there is none. A sandbox that was woken for it has its start
        command again."""
        connection = await self._connect_once()
        if command := self._owner.take_start(self.id):
            try:
                await self.spawn(command)
            except AtollError as error:  # what is inside must not keep its owner out
                _log.warning("the start command of sandbox %s could not be run: %s", self.name, error)
        return connection

    async def _begin(self, start: Sequence[str], ready: Sequence[str], *, timeout_s: float = READY_S) -> None:
        """Run the start command of a new sandbox, and wait until the ready command succeeds.

        Raises:
            LaunchFailed: it did not within `timeout_s`, or one of them is no program.
        """
        started = await self.spawn(start) if start else None
        last: ExecResult | None = None
        try:
            with anyio.fail_after(timeout_s):
                while ready:
                    last = await self.exec(ready, merge_stderr=True, output_limit_bytes=_READY_OUTPUT_BYTES)
                    if last.exit_code == 0:
                        return
                    await anyio.sleep(_READY_INTERVAL_S)
        except TimeoutError:
            said = f"; it last ended with {last.exit_code}: {last.stdout.strip()[-500:]}" if last else ""
            what = "" if started is None else f"; what the start command {_words(start)} printed is in its logs"
            raise LaunchFailed(
                f"the ready command {_words(ready)} of sandbox {self.name!r} did not succeed within {timeout_s:g} s"
                f"{said}{what}"
            ) from None

    async def _connect_once(self) -> GuestConnection:
        """The connection that all calls share, made if there is none. It may make this process serve the egress."""
        async with self._connecting:
            if self._connection is not None:
                if self._connection.failure is None:
                    return self._connection
                self._record_failure(self._connection)
            self._require_alive()
            name = f"sandbox {self.name!r}"
            try:
                stream = await self._owner.connect(self.id)
            except OSError as error:
                if isinstance(error, AtollError):
                    raise
                raise SandboxDied(f"{name} cannot be reached: {error}") from error
            connection = GuestConnection(stream, name, why_ended=lambda: self._owner.why_ended(self.info))
            try:
                await connection.handshake()
            except SandboxError:
                await self._finish(connection)
                raise
            try:
                self._require_alive()  # it may have been destroyed meanwhile
            except SandboxError:
                await anyio.aclose_forcefully(stream)
                raise
            self._connection = connection
            self._owner.tasks.start_soon(self._serve, connection)
            if self._egress is not None:
                await self._egress.connected(connection, ports.listen_idle)
            return connection

    def _forget_failure(self) -> None:
        """Forget the recorded failure: the sandbox has been restarted."""
        if self._failure is not None and self._failure.kind is not SandboxDied:
            self._failure = self._connection = None

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise self._failure.error()

    async def _serve(self, connection: GuestConnection) -> None:
        try:
            await connection.run()
        finally:
            await self._finish(connection)

    def _record_failure(self, connection: GuestConnection) -> None:
        """A failed launch or a violation of the protocol ends the sandbox; a lost connection does not, and neither does
        a guest that does not answer for now."""
        failure = connection.failure
        if self._failure is None and failure is not None and failure.kind not in _CONNECTION_FAILURES:
            self._failure = failure

    async def _finish(self, connection: GuestConnection) -> None:
        self._record_failure(connection)
        failure = self._failure
        if failure is not None and failure is connection.failure and failure.kind is GuestProtocolError:
            # A guest that broke the protocol cannot be relied on to kill processes; they end with the sandbox.
            await self._owner.stop(self.id)

    # ----------------------------------------------------------------------------------------------------- commands

    async def _command_environment(self) -> Environment:
        """The environment of commands under the policy in the manifest, which is applied first."""
        if self._egress is not None:
            await self._egress.apply_policy()
            if (variables := self._egress.env()) != self._egress_env:
                self._egress_env = variables
                self._environment = Environment({**variables, **self._env}, sudo=_sudo_user(self.info))
        return self._environment

    def _user(self, user: str | None) -> str:
        return self.info.user if user is None else user

    def _directory(self, cwd: str | None) -> str | None:
        return start_directory(self.info.cwd, cwd)


def _sudo_user(info: SandboxInfo) -> str | None:
    return sudo_user(info.user) if info.sudo else None


def _words(command: Sequence[str]) -> str:
    return shlex.join(command)[:200]


def _stdin(stdin: bytes | str | None) -> bytes | bool:
    if stdin is None:
        return False
    return encode_text(stdin, "stdin") if isinstance(stdin, str) else stdin
