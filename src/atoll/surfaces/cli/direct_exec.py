"""`exec` without an engine: a command in a sandbox that runs, sent to its keeper by this process itself.

Opening an engine takes four times as long as all that a short command needs. So where the engine would only connect to
the keeper and pass the command on, this does the same in `poll`, with nothing heavy imported: the same request, the
same rules of the connection and of its streams (`runtime/guest/`), the same errors. All else is left to the engine,
before anything is sent: a sandbox that sleeps or is changed, has a network policy or secrets, a terminal, `--json`,
`--detach`, a command too long for one frame. What is rare is imported when it happens.

Owns when a command is killed (time-out, a signal for us, output that is no longer read), as `streaming.py` does for
commands that the engine runs; a test compares the two. Used by `commands/exec.py`.
"""

from __future__ import annotations

import _socket  # `socket` takes long to import
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from types import FrameType as StackFrame
from typing import Any

from atoll import state_directory
from atoll.contract.errors import GuestProtocolError, InvalidRequest, SandboxError
from atoll.contract.inside import PROXY_ENV
from atoll.contract.protocol import EventKind, Fields, FrameType, Op, Tag, encode_frame
from atoll.runtime.guest.exec_request import Environment, ExecRequest, start_directory, sudo_user
from atoll.runtime.guest.flow import ANSWER_S, PING_AFTER_S, WINDOW, Failure, StreamState, unanswered
from atoll.runtime.guest.link import Link, encode_open
from atoll.runtime.guest.process_end import (
    KILL_S,
    KILL_TREE,
    SIGKILL,
    ProcessEnd,
    decode_end,
    encode_tree_kill,
    not_started,
    silent_result,
    start_unanswered,
    timed_out,
)
from atoll.runtime.state.running import RunningSandbox, find_running
from atoll.surfaces.cli import ENGINE_FAILED, render, report
from atoll.surfaces.cli.descriptors import (
    STDERR,
    STDIN,
    STDOUT,
    OutputDescriptor,
    read_input,
    stdin_offered,
    unblocked,
)

_HELLO_S = 0.25
"""How long the keeper of a sandbox that runs may take to say so. After that, the engine connects."""
_WATCH_S = 1.0
"""How often the network policy is looked at, which another process may set while the command runs."""
_RECEIVE_BYTES = 512 * 1024
_NEVER = float("inf")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DirectExec:
    """A command as the command line describes it, and the sandbox that it is to run in."""

    def __init__(self, state_dir: str, sandbox: RunningSandbox, request: ExecRequest, timeout_s: float | None) -> None:
        self.state_dir = state_dir
        self.sandbox = sandbox
        self.request = request
        self.timeout_s = timeout_s
        self.began = time.monotonic()


def attempt(
    state_dir: str | None,
    namespace: str | None,
    name: str,
    command: str | Sequence[str],
    *,
    env: Mapping[str, str],
    user: str | None,
    cwd: str | None,
    timeout_s: float | None,
    stdin: bool,
) -> int | None:
    """Run a command with our streams and return its exit status, or print an error and return that of an error.

    None: nothing was done, and the engine has to run it. `state_dir` and `namespace` unset: those of the engine.
    """
    where, within = state_directory.resolve_plain(state_dir), state_directory.resolve_plain_namespace(namespace)
    sandbox = find_running(where, name, within) if where is not None and within is not None else None
    if where is None or sandbox is None:
        return None
    request = ExecRequest(
        command,
        sandbox.user if user is None else user,
        env=env,
        cwd=start_directory(sandbox.cwd, cwd),
        stdin=stdin and stdin_offered(),
    )
    try:
        if request.is_long:
            return None
        variables = {**(PROXY_ENV if sandbox.refuses_inside else {}), **sandbox.env}
        environment = Environment(variables, sudo=sudo_user(sandbox.user) if sandbox.sudo else None)
        payload = encode_open(Op.SPAWN, request.encode(environment))
    except InvalidRequest:
        return None  # the engine says what is wrong
    wanted = DirectExec(where, sandbox, request, timeout_s)
    connection = _connect(sandbox)
    if connection is None:
        return None
    return report(lambda: _Running(connection, wanted).run(payload), as_json=False, failed=ENGINE_FAILED)


# ------------------------------------------------------------------------------------------------- the connection


class _Connection(Link):
    """A connection to a keeper. Nothing of it waits."""

    def __init__(self, connected: _socket.socket, sandbox: RunningSandbox) -> None:
        super().__init__(f"sandbox {sandbox.name!r}", sandbox.why_ended)
        self.socket = connected
        self._queue = bytearray()

    def poll(self) -> select.poll:
        """What waits for the connection, once all was sent that could be."""
        if self._queue:
            self.flush()
        waiting = select.poll()
        if self.failure is None:
            waiting.register(self.socket.fileno(), select.POLLIN | (select.POLLOUT if self._queue else 0))
        return waiting

    @property
    def is_behind(self) -> bool:
        """Whether the socket has not taken all frames yet."""
        return bool(self._queue)

    def post(self, *parts: bytes | memoryview) -> None:
        for part in parts:
            self._queue += part

    def post_now(self, *parts: bytes | memoryview) -> None:
        self.post(*parts)
        self.flush()

    def flush(self) -> None:
        """Send as much of the queue as the socket takes."""
        try:
            del self._queue[: self.socket.send(self._queue)]
        except BlockingIOError:
            pass
        except OSError:
            self._queue.clear()  # what comes next says why the connection ended

    def receive(self) -> None:
        """Take what has come."""
        try:
            data = self.socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.take(data)
        else:
            self.lose()


def _connect(sandbox: RunningSandbox) -> _Connection | None:
    """A connection on which the guest has said HELLO. None: it has not, or something else."""
    connected = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    connection = _Connection(connected, sandbox)
    connected.settimeout(_HELLO_S)
    try:
        fd = os.open(sandbox.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            connected.connect(f"/proc/self/fd/{fd}/sock")
        finally:
            os.close(fd)
        connection.receive()
    except OSError:
        pass
    if connection.ready and connection.failure is None:
        connected.setblocking(False)
        return connection
    connected.close()
    return None


# ---------------------------------------------------------------------------------------------------- the signals


class _Interrupted(Exception):
    """A signal tells this process to end."""


class _SignalWatch:
    """A context in which SIGINT, SIGTERM and SIGHUP are noted, and make `fd` readable.

    A second signal ends the process at once. One that our parent set to be ignored stays ignored (`nohup`).
    """

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _SignalWatch:
        self.fd, self._written = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._fd_before = signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        os.close(self.fd)
        os.close(self._written)

    def _note(self, number: int, _: StackFrame | None) -> None:
        if self.received:
            os._exit(128 + number)
        self.received = number


# ----------------------------------------------------------------------------------------------------- the command


class _Running:
    """The command, from OPEN to END."""

    def __init__(self, connection: _Connection, wanted: DirectExec) -> None:
        self._connection = connection
        self._wanted = wanted
        request = wanted.request
        self._stream = self._open_stream(receive=(STDOUT, STDERR), send=(STDIN,) if request.stdin else ())
        self._started = self._killed = False
        self._input = unblocked(STDIN, os.O_RDONLY) if request.stdin else None
        self._outputs = {STDOUT: OutputDescriptor(STDOUT), STDERR: OutputDescriptor(STDERR)}
        self._output: tuple[OutputDescriptor, memoryview] | None = None
        """What could not be written yet."""
        self._signals = _SignalWatch()
        self._egress = _Egress(wanted)

    def _open_stream(self, *, receive: Sequence[int], send: Sequence[int] = ()) -> StreamState:
        connection = self._connection
        stream = StreamState(connection, connection.new_number(), WINDOW, receive=receive, send=send)
        connection.add(stream)
        return stream

    def run(self, payload: bytes) -> int:
        """The exit status of the command. Leaving early, for any reason, kills its whole tree.

        Raises:
            ExecTimeout: the command timed out; its tree is dead.
            OutputClosed: our output is no longer read; its tree is dead.
            SandboxError: the sandbox failed.
            and what `decode_end` raises.
        """
        sandbox = self._wanted.sandbox
        kills = sandbox.oom_kills() or 0
        with self._signals, ExitStack() as stack:
            stack.callback(self._connection.socket.close)
            stack.callback(self._stop_violator)
            stack.callback(self._egress.close)
            try:
                self._connection.post_now(encode_frame(FrameType.OPEN, self._stream.number, payload))
                end = self._to_end()
            except _Interrupted:
                self._kill()
                if self._signals.received == signal.SIGINT:
                    render.end_line()
                return 128 + self._signals.received
            except BaseException:
                self._kill()
                raise
        if end.exit_code == 128 + SIGKILL and not end.killed and (sandbox.oom_kills() or 0) > kills:
            render.explain_memory_kill(sandbox.name, sandbox.memory_bytes)
        return end.exit_code

    def _to_end(self) -> ProcessEnd:
        """Pass input and output until the main process has ended and all that it wrote is written."""
        timeout_s = self._wanted.timeout_s or 0
        deadline = self._wanted.began + timeout_s if timeout_s else _NEVER
        while not (self._started or self._has_ended()):
            if time.monotonic() >= deadline:
                self._kill()
                raise not_started(timeout_s) if self._has_ended() else start_unanswered(timeout_s)
            self._wait(deadline)
            self._started = self._take_started()
        silence: _Silence | None = None
        while not self._has_ended() or self._stream.unread or self._output is not None:
            if silence is None and not self._has_ended() and time.monotonic() >= deadline:
                self._stream.control(*KILL_TREE)
                silence = _Silence(self._connection)
            if silence is not None and not self._has_ended() and silence.is_over():
                raise unanswered().error()
            self._wait(silence.until if silence is not None else deadline, passing=True)
        end = self._read_end()
        if silence is not None:
            raise timed_out(timeout_s, silent_result(end.exit_code, end.signal, end.duration_s))
        return end

    def _has_ended(self) -> bool:
        """Whether END has come."""
        return self._stream.result is not None

    def _read_end(self) -> ProcessEnd:
        with _Violations(self._connection):
            result = self._stream.result or Fields({})
            if not self._started and result.problem() is None:
                raise GuestProtocolError("the guest reported the end of a process without its start")
            return decode_end(result, self._wanted.request)

    def _take_started(self) -> bool:
        item = self._stream.take()
        if item is None:
            return False
        with _Violations(self._connection):
            if not isinstance(item, Fields) or item.integer(Tag.EVENT) != EventKind.STARTED:
                raise GuestProtocolError("the guest did not send the event STARTED when it had to")
        return True

    # ---- waiting ----

    def _wait(self, deadline: float, *, passing: bool = False) -> None:
        """Wait until something can be done, and do it. With `passing`, input and output are passed on.

        Raises:
            _Interrupted: a signal has come.
            OutputClosed: our output is no longer read.
            SandboxError: the connection has failed.
        """
        connection = self._connection
        if passing:
            self._write_output()
            if self._has_ended() and self._output is None:
                return
        if connection.failure is not None and not self._has_ended() and self._output is None:
            raise connection.failure.error()
        poll = connection.poll()
        poll.register(self._signals.fd, select.POLLIN)
        if self._output is not None:
            poll.register(self._output[0].fd, select.POLLOUT)
        feeds = passing and self._input is not None and not connection.is_behind and self._stream.credit() > 0
        if feeds and self._input is not None:
            poll.register(self._input, select.POLLIN)
        wait_s = max(0.0, min(deadline, self._egress.next_look) - time.monotonic())
        ready = {fd for fd, _ in poll.poll(wait_s * 1000)}
        if self._signals.received:
            raise _Interrupted
        self._egress.look()
        if connection.socket.fileno() in ready:
            connection.receive()
        if feeds and self._input in ready:
            self._feed()

    def _write_output(self) -> None:
        """Write what has come, in the order in which it came, as far as it is taken."""
        while True:
            if self._output is None:
                item = self._stream.take()
                if item is None:
                    return
                if isinstance(item, Fields):
                    with _Violations(self._connection):
                        if item.integer(Tag.EVENT) != EventKind.GAP:
                            raise GuestProtocolError("the guest sent an event that a running process does not have")
                    continue
                self._output = self._outputs[item[0]], memoryview(item[1])
            output, rest = self._output
            try:
                rest = rest[output.write(rest) :]
            except BlockingIOError:
                return
            self._output = (output, rest) if rest else None

    def _feed(self) -> None:
        """Pass on what there is of our input, as far as the command has room for it."""
        if self._input is None:
            return
        try:
            data = read_input(self._input, self._stream.credit())
        except BlockingIOError:
            return
        if data:
            self._stream.post_data(data)
        else:
            self._stream.send_eof()
            self._input = None

    # ---- ending it early ----

    def _kill(self) -> None:
        """Kill it with all that it started and wait until that is done, for at most 10 s each; less if the guest is
        silent."""
        if self._killed:
            return
        self._killed = True
        if not self._started:
            self._stream.control(*KILL_TREE)
        self._stream.reset()
        with suppress(SandboxError):
            self._wait_end(self._stream)
            order = None
            if self._stream.result is not None:
                with _Violations(self._connection):
                    order = encode_tree_kill(self._stream.result)
            if order is not None:
                answer = self._open_stream(receive=())
                self._connection.post(encode_frame(FrameType.OPEN, answer.number, encode_open(Op.SIGNAL, order)))
                self._wait_end(answer)

    def _wait_end(self, stream: StreamState) -> None:
        connection, silence = self._connection, _Silence(self._connection)
        deadline = time.monotonic() + KILL_S
        while stream.result is None and connection.failure is None and not silence.is_over():
            left_s = min(deadline, silence.until) - time.monotonic()
            if left_s <= 0 and silence.until > deadline:
                return
            if connection.poll().poll(max(0.0, left_s) * 1000):
                connection.receive()

    def _stop_violator(self) -> None:
        """End the processes of a guest that broke the protocol, as the engine does: it cannot be relied on to kill
        them."""
        failure = self._connection.failure
        if failure is None or failure.kind is not GuestProtocolError:
            return
        from pathlib import Path

        import anyio

        from atoll.drivers import registry

        sandbox = self._wanted.sandbox
        with suppress(SandboxError, OSError):
            driver = registry.available(Path(self._wanted.state_dir))[sandbox.runtime]
            anyio.run(driver.stop, sandbox.run_id, Path(sandbox.directory))


class _Violations:
    """A context in which a violation of the protocol fails the connection."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, GuestProtocolError):
            self._connection.fail(Failure(GuestProtocolError, error.message))


class _Silence:
    """Whether a guest that was told to end a command answers neither that nor a ping, or only pings for too long."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._heard: int | None = None
        self.until = time.monotonic() + PING_AFTER_S
        """When `is_over` has to be called next."""
        self._last = time.monotonic() + KILL_S

    def is_over(self) -> bool:
        if time.monotonic() < self.until:
            return False
        if self._heard is None:
            self._heard = self._connection.heard
            self._connection.ping()
            self.until += ANSWER_S
            return False
        if self._connection.heard == self._heard or self.until == self._last:
            return True
        self.until = self._last
        return False


class _Egress:
    """Serves the sandbox's egress as soon as it gets a network policy: by an engine, in a thread of its own."""

    def __init__(self, wanted: DirectExec) -> None:
        self._wanted = wanted
        self._seen = wanted.sandbox.manifest_version()
        self._serving: ExitStack | None = None
        self.next_look = time.monotonic() + _WATCH_S

    def look(self) -> None:
        """Look whether there is a policy now, once a second."""
        if time.monotonic() < self.next_look:
            return
        self.next_look = time.monotonic() + _WATCH_S
        if self._serving is not None or (seen := self._wanted.sandbox.manifest_version()) == self._seen:
            return
        self._seen = seen
        if self._wanted.sandbox.has_policy():
            from anyio.from_thread import start_blocking_portal

            with ExitStack() as stack:
                portal = stack.enter_context(start_blocking_portal())
                stack.callback(portal.start_task_soon(self._serve).cancel)
                self._serving = stack.pop_all()

    def close(self) -> None:
        if self._serving is not None:
            self._serving.close()

    async def _serve(self) -> None:
        import anyio

        from atoll.runtime.engine import open as open_engine

        with suppress(SandboxError):
            async with open_engine(self._wanted.state_dir, namespace=self._wanted.sandbox.namespace) as engine:
                sandbox = await engine.get(self._wanted.sandbox.name)
                await sandbox.connect()
                await anyio.sleep_forever()
