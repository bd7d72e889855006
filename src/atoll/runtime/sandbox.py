"""A sandbox as its user sees it: commands, files, ports, and its end.

Knows when to connect, what the death of a connection or of a sandbox means, and the operations on processes and
ports. Refuses to know how a sandbox is made, found and ended (`host.py` above, which hands in what is needed) and how
bytes travel (`link.py` and `stream.py` below). A dead sandbox never looks like a command's output: it raises.
"""

from __future__ import annotations

import errno
import logging
import signal as signals
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream, TaskGroup

from atoll.contract.errors import (
    AtollError,
    GuestProtocolError,
    InvalidRequest,
    PortRefused,
    ProcessNotFound,
    SandboxDied,
    SandboxError,
)
from atoll.contract.model import (
    Checkpoint,
    ExecBytes,
    ExecResult,
    Exited,
    ExportResult,
    Preview,
    ProcessInfo,
    SandboxInfo,
    SystemProcess,
    Usage,
)
from atoll.contract.network import AuditRecord, NetworkPolicy
from atoll.contract.protocol import FIRST_CHANNEL, Action, EventKind, Fields, Op, Tag, encode_fields, encode_text
from atoll.runtime.guest.connection import Link, OpenStream
from atoll.runtime.guest.files import ENTRY_LIMIT, Files
from atoll.runtime.guest.process import (
    STDERR,
    STDOUT,
    Collector,
    Command,
    Environment,
    OomWatch,
    Process,
    check_signal,
    read_end,
    run,
    to_bytes,
    to_result,
    wait_tree_exit,
)
from atoll.runtime.guest.stream import Connection, Failure, ResultLimit, Sink, Stream

if TYPE_CHECKING:
    from atoll.runtime.archive.export import ArchiveFile
    from atoll.runtime.egress.server import EgressServer
    from atoll.runtime.images.fetch import ProgressCallback
    from atoll.runtime.previews.router import Previews
    from atoll.tools.tool import ToolSet

OUTPUT_LIMIT_BYTES = 16 * 1024 * 1024
LOGIN_SHELL = "if command -v bash >/dev/null 2>&1; then exec bash -l; else exec sh -l; fi"

_WATCHES_KEPT = 256
_Found = TypeVar("_Found")
_log = logging.getLogger(__name__)


class SandboxOwner(Protocol):
    """What a sandbox needs of the runtime that it is one of."""

    async def pause(self, name: str) -> None: ...

    async def resume(self, name: str) -> Sandbox: ...

    async def sleep(self, name: str) -> None: ...

    async def wake(self, name: str) -> Sandbox: ...

    async def shutdown(self, name: str) -> None: ...

    async def checkpoint(self, name: str, label: str | None = None) -> Checkpoint: ...

    async def checkpoints(self, name: str | None = None) -> list[Checkpoint]: ...

    async def restore(self, name: str, checkpoint: str) -> Sandbox: ...

    async def fork(
        self, source: str, count: int = 1, *, checkpoint: str | None = None, names: Sequence[str] | None = None
    ) -> list[Sandbox]: ...

    async def export(
        self, name: str, target: ArchiveFile, *, checkpoint: str | None = None, progress: ProgressCallback | None = None
    ) -> ExportResult: ...

    async def set_network(self, name: str, policy: NetworkPolicy | None) -> None: ...

    async def audit(self, name: str) -> list[AuditRecord]: ...

    @property
    def ports(self) -> Previews: ...


class Sandbox:
    """A sandbox that runs. Get one from `Engine.create` or `Engine.get`.

    Connects when first used, and again when the connection was lost but the sandbox lives. All methods may be called
    from many tasks at once. As a context manager it destroys the sandbox at the end. All methods but `destroy` raise,
    besides what they say:

    Raises:
        SandboxDied: the sandbox has ended, or the connection was lost during the call ("connection lost": then the
            next call connects again, and processes that are kept can be attached to).
        LaunchFailed: it never started.
        GuestProtocolError: it broke the protocol. Its processes are ended, and every later call raises this.
        InvalidRequest: an argument is wrong.
    """

    def __init__(
        self,
        info: SandboxInfo,
        connect: Callable[[], Awaitable[ByteStream]],
        tasks: TaskGroup,
        *,
        env: Mapping[str, str],
        oom_kills: Callable[[], int | None],
        usage: Callable[[], Awaitable[Usage]],
        destroy: Callable[[], Awaitable[None]],
        stop: Callable[[], Awaitable[None]] | None = None,
        host: SandboxOwner | None = None,
        egress: EgressServer | None = None,
    ) -> None:
        self.info = info
        self.files = Files(self._open, info.user)
        self._connect = connect
        self._tasks = tasks
        self._env = dict(env)
        self._environment = Environment(env)
        self._egress = egress
        self._told: Mapping[str, str] = {}
        self._oom_kills = oom_kills
        self._usage = usage
        self._destroy = destroy
        self._stop = stop or destroy
        self._host = host
        self._link: Link | None = None
        self._connecting = anyio.Lock()
        self._ended: Failure | None = None
        self._watches: OrderedDict[int, OomWatch] = OrderedDict()

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def id(self) -> str:
        return self.info.id

    def __repr__(self) -> str:
        return f"Sandbox({self.name!r})"

    # ------------------------------------------------------------------------------------------------- commands

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bytes | str | None = None,
        timeout_s: float | None = None,
        output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
    ) -> ExecResult:
        """Run a command to its end. A string is a line for the shell, a sequence a program and its arguments.

        Returns when the main process ends, whatever it left running in the background. A program that cannot be
        started is exit code 127 or 126, as in a shell. stdout and stderr are kept up to `output_limit_bytes` each,
        head and tail; any amount passes with bounded memory. `cwd=None` is the user's home; `stdin=None` is empty.
        A time-out and a cancellation kill the command with all that it started, before this returns.

        Raises:
            ExecTimeout: it did not end within `timeout_s`; `result` holds its output until then.
            PathNotFound, PathNotDirectory, PathDenied: `cwd` cannot be used.
            SandboxError: how it ended is not known.
        """
        ended = await self._run(command, env, cwd, user, stdin, timeout_s, output_limit_bytes)
        return to_result(*ended)

    async def exec_bytes(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bytes | str | None = None,
        timeout_s: float | None = None,
        output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
        on_output: Callable[[bytes], None] | None = None,
    ) -> ExecBytes:
        """`exec`, with the output as it came. `ExecTimeout.result` is text here too.

        `on_output` hears each piece of it, of either stream, while the command runs. It must not raise.
        """
        ended = await self._run(command, env, cwd, user, stdin, timeout_s, output_limit_bytes, on_output)
        return to_bytes(*ended)

    async def spawn(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool = False,
        pty: tuple[int, int] | None = None,
        keep: bool = True,
        channels: int = 0,
    ) -> Process:
        """Start a command and return while it runs.

        `pty` gives it a terminal of so many rows and columns; its output is then all stdout. With `keep` it outlives
        this handle, this connection and this program, until it ends or is killed. `channels` are two-way byte streams
        besides, at descriptors 3 and up of the process. If this is cancelled, nothing of the command runs.

        Raises:
            PathNotFound, PathNotDirectory, PathDenied: `cwd` cannot be used.
        """
        request = await self._command(command, env, cwd, user, stdin=stdin, pty=pty, keep=keep, channels=channels)
        fields = request.encode()
        watch = OomWatch(self._oom_kills)
        stream = await self._open(
            Op.SPAWN,
            fields,
            receive=(STDOUT, STDERR),
            send=(*((0,) if stdin or pty else ()), *range(FIRST_CHANNEL, FIRST_CHANNEL + channels)),
            apart=range(FIRST_CHANNEL, FIRST_CHANNEL + channels),
        )
        try:
            process = await self._started(stream, request, watch)
        except BaseException:
            stream.control((Tag.ACTION, Action.SIGNAL), (Tag.SIGNAL, signals.SIGKILL), (Tag.TREE, 1))
            await stream.abandon()
            await wait_tree_exit(self._open, stream)
            raise
        self._watches[process.id] = watch
        if len(self._watches) > _WATCHES_KEPT:
            self._watches.popitem(last=False)
        return process

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
            PathNotFound, PathNotDirectory, PathDenied: `cwd` cannot be used.
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
        lossless: bool = True,
    ) -> Process:
        """Take up a process that was spawned before, by this program or another, running or ended lately.

        Output is replayed from the offsets; unset means the oldest that is kept. What is no longer kept is a `Gap`.
        With `lossless` the process waits for this reader; without, a reader that falls behind sees a `Gap`.
        Leaving detaches.

        Raises:
            ProcessNotFound: no such process is known.
            InvalidRequest: `stdin` is asked for, and somebody else has it.
        """
        for offset in (stdout_offset, stderr_offset):
            if offset is not None and offset < 0:
                raise InvalidRequest(f"an offset is {offset}; it must not be negative")
        fields = encode_fields(
            (
                (Tag.PROC, process_id),
                (Tag.OUT_OFFSET, stdout_offset or 0),
                (Tag.ERR_OFFSET, stderr_offset or 0),
                (Tag.LOSSLESS, 1 if lossless else None),
                (Tag.STDIN, 1 if stdin else None),
            )
        )
        watch = self._watches.get(process_id) or OomWatch(self._oom_kills)
        stream = await self._open(Op.ATTACH, fields, receive=(STDOUT, STDERR), send=(0,) if stdin else ())
        request = Command(command=f"process {process_id}", env=b"", user=self.info.user, stdin=stdin, keep=True)
        try:
            return await self._started(
                stream, request, watch, process_id=process_id, offsets=(stdout_offset, stderr_offset)
            )
        except BaseException:
            await stream.abandon()
            raise

    async def processes(self) -> list[ProcessInfo]:
        """The commands that were started through the API: those that run, and the last that ended."""
        return await self._collect(Op.PROCS, _process_info)

    async def ps(self) -> list[SystemProcess]:
        """All processes in the sandbox."""
        return await self._collect(Op.PS, _system_process)

    async def epoll_waiters(self) -> list[SystemProcess]:
        """The processes that have a TCP socket and may wait for it with `epoll`. To ask is no use of the sandbox."""
        return await self._collect(Op.PS, _system_process, encode_fields(((Tag.WAITING, 1), (Tag.IDLE, 1))))

    async def kill(self, process_id: int, signal: int = signals.SIGKILL, *, tree: bool = True) -> None:
        """Send a signal to a spawned process, with `tree` to every process that it started as well.

        SIGKILL with `tree` also reaches what they fork meanwhile.

        Raises:
            ProcessNotFound: no such process is known, or it has ended.
        """
        fields = encode_fields(((Tag.PROC, process_id), (Tag.SIGNAL, check_signal(signal)), (Tag.TREE, int(tree))))
        async with await self._open(Op.SIGNAL, fields, receive=()) as stream:
            await stream.ended()
        if problem := stream.problem():
            if problem.number == errno.ESRCH:
                raise _no_process(process_id)
            raise SandboxError(f"process {process_id} could not be sent signal {signal}: {problem.reason}")

    # ---------------------------------------------------------------------------------------------------- ports

    async def dial(self, port: int, host: str = "127.0.0.1") -> Connection:
        """Connect to a port inside, on `127.0.0.1` or `::1`.

        Raises:
            PortRefused: nothing listens there.
        """
        fields = encode_fields(((Tag.PORT, _check_port(port, 1)), (Tag.HOST, _check_host(host))))
        return await _connected(self._open, Op.DIAL, fields, f"{host}:{port}")

    @asynccontextmanager
    async def listen(self, port: int = 0, host: str = "127.0.0.1") -> AsyncIterator[Listener]:
        """Listen on a port inside; 0 is any that is free. Connections are accepted from entry on.

        A connection that is not taken within 30 s is closed.

        Raises:
            PortRefused: the port is taken.
        """
        fields = encode_fields(((Tag.PORT, _check_port(port, 0)), (Tag.HOST, _check_host(host))))
        async with _listening(self._open, fields, f"{host}:{port}") as listener:
            yield listener

    async def expose(self, port: int, *, wait_s: float = 0) -> Preview:
        """Let clients of the host reach the server on a port inside, with the preview's URL or token and not without.

        HTTP/1.1, with streams both ways and WebSockets, on `127.0.0.1` or `::1` inside, whichever is listened on. The
        sandbox is woken by a request, and counts as used while one is under way. With `wait_s` this returns once
        something listens; else whoever comes before is told that nothing does. A port that is exposed already keeps
        its preview. It ends with `unexpose`, the sandbox or this runtime, and is served by no other process.

        Raises:
            PortRefused: nothing listened within `wait_s`. The port is not exposed then, if it was not before.
            InvalidRequest: the port or `wait_s` is none, or previews cannot be served on the address in the settings.
        """
        return await self._owner.ports.expose(self.id, self.name, port, self.dial, wait_s=wait_s)

    async def unexpose(self, port: int) -> None:
        """End a preview at once: its token is worth nothing, and what is under way on it breaks off.

        Does nothing if the port is not exposed.
        """
        self._owner.ports.unexpose(self.id, port)
        await anyio.lowlevel.checkpoint()

    async def previews(self) -> list[Preview]:
        """The ports that this process exposes, by number."""
        await anyio.lowlevel.checkpoint()
        return self._owner.ports.of(self.id)

    # ----------------------------------------------------------------------------------------- the sandbox itself

    async def connect(self) -> None:
        """Connect now rather than with the first call. Does nothing if there is a connection."""
        if self._link is None or self._link.failure is not None:
            await self._connected_link()

    async def stat(self) -> Usage:
        """What the sandbox uses now."""
        return await self._usage()

    async def destroy(self) -> None:
        """End every process in it and remove all that it wrote. Calls under way raise `SandboxDied`."""
        if self._ended is None:
            self._ended = Failure(SandboxDied, f"sandbox {self.name!r} was destroyed")
        if self._link is not None:
            self._link.fail(self._ended)
        await self._destroy()

    async def pause(self) -> None:
        """As `Engine.pause`."""
        await self._owner.pause(self.name)

    async def resume(self) -> None:
        """As `Engine.resume`."""
        await self._owner.resume(self.name)

    async def sleep(self) -> None:
        """As `Engine.sleep`."""
        await self._owner.sleep(self.name)

    async def wake(self) -> None:
        """As `Engine.wake`."""
        await self._owner.wake(self.name)

    async def shutdown(self) -> None:
        """As `Engine.shutdown`."""
        await self._owner.shutdown(self.name)

    async def checkpoint(self, label: str | None = None) -> Checkpoint:
        """As `Engine.checkpoint`."""
        return await self._owner.checkpoint(self.name, label)

    async def checkpoints(self) -> list[Checkpoint]:
        """As `Engine.checkpoints`, of this sandbox."""
        return await self._owner.checkpoints(self.name)

    async def restore(self, checkpoint: str) -> None:
        """As `Engine.restore`."""
        await self._owner.restore(self.name, checkpoint)

    async def fork(
        self, count: int = 1, *, checkpoint: str | None = None, names: Sequence[str] | None = None
    ) -> list[Sandbox]:
        """As `Engine.fork`."""
        return await self._owner.fork(self.name, count, checkpoint=checkpoint, names=names)

    async def export(
        self, target: ArchiveFile, *, checkpoint: str | None = None, progress: ProgressCallback | None = None
    ) -> ExportResult:
        """As `Engine.export`."""
        return await self._owner.export(self.name, target, checkpoint=checkpoint, progress=progress)

    async def set_network(self, policy: NetworkPolicy | None) -> None:
        """As `Engine.set_network`."""
        await self._owner.set_network(self.name, policy)

    async def apply_policy(self) -> None:
        """Do at once what the policy says that holds now."""
        if self._egress is not None:
            await self._egress.apply_policy()

    @property
    def is_served_here(self) -> bool:
        """Whether what leaves it goes through this process."""
        return self._egress is not None and self._egress.is_served

    async def audit(self) -> list[AuditRecord]:
        """As `Engine.audit`."""
        return await self._owner.audit(self.name)

    def tools(self) -> ToolSet:
        """The agent's tools bound to this sandbox, to be offered to a model."""
        from atoll.tools.pool import sandbox_tools

        return sandbox_tools(self)

    @property
    def _owner(self) -> SandboxOwner:
        if self._host is None:
            raise InvalidRequest("this sandbox is not one of a runtime")
        return self._host

    async def aclose(self) -> None:
        """Disconnect and leave the sandbox as it is. The next call connects again."""
        self.disconnect()
        await anyio.lowlevel.checkpoint()

    def disconnect(self) -> None:
        """`aclose`, for who cannot wait."""
        if self._link is not None:
            self._link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.destroy()

    # --------------------------------------------------------------------------------------------------- the link

    async def _open(
        self,
        op: Op,
        fields: bytes,
        *,
        receive: Iterable[int] = (1,),
        send: Iterable[int] = (),
        apart: Iterable[int] = (),
        sink: Sink | None = None,
    ) -> Stream:
        link = self._link
        if link is None or link.failure is not None:
            link = await self._connected_link()
        return await link.open(op, fields, receive=receive, send=send, apart=apart, sink=sink)

    async def _connected_link(self) -> Link:
        async with self._connecting:
            if self._link is not None:
                if self._link.failure is None:
                    return self._link
                self._conclude(self._link)
                if self._link.gone and self._host is None:
                    raise self._link.failure.error()
            self._require_alive()
            name = f"sandbox {self.name!r}"
            try:
                stream = await self._connect()
            except OSError as error:
                if isinstance(error, AtollError):
                    raise
                raise SandboxDied(f"{name} cannot be reached: {error}") from error
            link = Link(stream, name)
            try:
                await link.greet()
            except SandboxError:
                await self._finish(link)
                raise
            try:
                self._require_alive()  # it may have been destroyed meanwhile
            except SandboxError:
                await anyio.aclose_forcefully(stream)
                raise
            self._link = link
            self._tasks.start_soon(self._serve, link)
            if self._egress is not None:
                await self._egress.connected(link, _listening_aside)
            return link

    def forget_failure(self) -> None:
        """The host has started it again: what it was found guilty of is over."""
        if self._ended is not None and self._ended.kind is not SandboxDied:
            self._ended = self._link = None

    def _require_alive(self) -> None:
        if self._ended is not None:
            raise self._ended.error()

    async def _serve(self, link: Link) -> None:
        try:
            await link.run()
        finally:
            await self._finish(link)

    def _conclude(self, link: Link) -> None:
        """A guest that is not to be trusted is the sandbox's end; a connection that was lost is not."""
        failure = link.failure
        if self._ended is None and failure is not None and failure.kind is not SandboxDied:
            self._ended = failure

    async def _finish(self, link: Link) -> None:
        self._conclude(link)
        if self._ended is None or self._ended is not link.failure or self._ended.kind is not GuestProtocolError:
            return
        # A guest that broke the protocol does not obey either; its processes end with the sandbox.
        with anyio.CancelScope(shield=True):
            try:
                await self._stop()
            except (AtollError, OSError):
                _log.exception("sandbox %s broke the protocol and could not be ended", self.id)

    # ------------------------------------------------------------------------------------------------------ parts

    async def _command(
        self,
        command: str | Sequence[str],
        env: Mapping[str, str] | None,
        cwd: str | None,
        user: str | None,
        *,
        stdin: bool = False,
        pty: tuple[int, int] | None = None,
        keep: bool = False,
        channels: int = 0,
        quiet: bool = False,
    ) -> Command:
        if self._egress is not None:
            await self._egress.apply_policy()
            if (told := self._egress.env()) != self._told:
                self._told, self._environment = told, Environment({**told, **self._env})
        return Command(
            command=command,
            env=self._environment.encode(env, terminal=pty is not None),
            user=self.info.user if user is None else user,
            cwd=cwd,
            stdin=stdin,
            pty=pty,
            keep=keep,
            channels=channels,
            quiet=quiet,
        )

    async def _run(
        self,
        command: str | Sequence[str],
        env: Mapping[str, str] | None,
        cwd: str | None,
        user: str | None,
        stdin: bytes | str | None,
        timeout_s: float | None,
        output_limit_bytes: int,
        on_output: Callable[[bytes], None] | None = None,
    ) -> tuple[Exited, Collector, Collector]:
        request = await self._command(command, env, cwd, user, stdin=stdin is not None, quiet=True)
        return await run(
            self._open,
            request,
            stdin=encode_text(stdin, "stdin") if isinstance(stdin, str) else stdin,
            timeout_s=timeout_s,
            output_limit_bytes=output_limit_bytes,
            oom=self._oom_kills,
            on_output=on_output,
        )

    async def _started(
        self,
        stream: Stream,
        request: Command,
        watch: OomWatch,
        *,
        process_id: int | None = None,
        offsets: tuple[int | None, int | None] = (0, 0),
    ) -> Process:
        event = await stream.next_event(EventKind.STARTED)
        with stream.fail_on_violation():
            if event is not None:
                return Process(self._open, stream, event, request, watch, offsets=offsets)
            result = await stream.ended()
            problem = result.problem()
            if process_id is not None and problem is not None and problem.number == errno.ESRCH:
                raise _no_process(process_id)
            if process_id is not None and problem is not None and problem.number == errno.EBUSY:
                raise InvalidRequest(
                    f"somebody else writes to the stdin of process {process_id}; attach without stdin to read along"
                )
            read_end(result, request.command, request.cwd, request.user)
            raise GuestProtocolError("the guest said that a process ended that it had not said was started")

    async def _collect(self, op: Op, read: Callable[[Fields], _Found], fields: bytes = b"") -> list[_Found]:
        async with await self._open(op, fields) as stream:
            try:
                found = await stream.collect(read, ENTRY_LIMIT)
            except ResultLimit as error:
                raise SandboxError(f"the processes of sandbox {self.name!r} cannot be listed: {error}") from None
        if problem := stream.problem():
            raise SandboxError(f"the processes of sandbox {self.name!r} cannot be listed: {problem.reason}")
        return found


class Listener:
    """A port inside on which the host listens: an async iterator of connections."""

    def __init__(self, port: int, stream: Stream, opener: OpenStream) -> None:
        self.port = port
        self._stream = stream
        self._open = opener

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Connection:
        """The next connection. Those that were closed again before they could be taken are passed over.

        Raises:
            SandboxDied, GuestProtocolError: the sandbox is gone.
        """
        while (event := await self._stream.next_event(EventKind.ACCEPTED)) is not None:
            with self._stream.fail_on_violation():
                connection = event.count(Tag.CONN)
            try:
                fields = encode_fields(((Tag.CONN, connection),))
                return await _connected(self._open, Op.ACCEPT, fields, "a connection")
            except PortRefused:
                continue
        raise StopAsyncIteration


@asynccontextmanager
async def _listening(opener: OpenStream, fields: bytes, what: str) -> AsyncIterator[Listener]:
    async with await opener(Op.LISTEN, fields, receive=()) as stream:
        event = await stream.next_event(EventKind.LISTENING)
        if event is None:
            raise PortRefused(f"cannot listen on {what} inside: {_reason(stream)}")
        with stream.fail_on_violation():
            chosen = event.within(Tag.PORT, 1, 65535)
        yield Listener(chosen, stream, opener)


def _listening_aside(link: Link, port: int) -> AbstractAsyncContextManager[Listener]:
    """Listen over this very connection, which is no use of the sandbox: it may sleep all the same."""
    fields = encode_fields(((Tag.PORT, port), (Tag.IDLE, 1)))
    return _listening(link.open, fields, f"port {port}")


async def _connected(opener: OpenStream, op: Op, fields: bytes, what: str) -> Connection:
    stream = await opener(op, fields, receive=(), send=(0,), apart=(1,))
    connected = False
    try:
        connected = await stream.next_event(EventKind.CONNECTED) is not None
    finally:
        if not connected:
            stream.reset()
    if connected:
        return Connection(stream, receive=1, send=0, owner=True)
    raise PortRefused(f"{what} inside: {_reason(stream)}; is something listening there?")


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


def _reason(stream: Stream) -> str:
    problem = stream.problem()
    return problem.reason if problem else "it ended"


def _no_process(process_id: int) -> ProcessNotFound:
    return ProcessNotFound(f"no process {process_id} is known; `processes` lists those that are")


def _check_port(port: int, low: int) -> int:
    if not low <= port <= 65535:
        raise InvalidRequest(f"the port is {port}; it may be {low} to 65535")
    return port


def _check_host(host: str) -> str:
    if host not in {"127.0.0.1", "::1"}:
        raise InvalidRequest(f"the host is {host!r}; a sandbox has '127.0.0.1' and '::1'")
    return host
