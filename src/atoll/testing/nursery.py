"""A fork server: a process that has imported Atoll and forks a copy of itself for each program that a test starts.

A start of the command line spends a third of a second on imports and a fraction of that on the command, and the tests
start hundreds. They start `born.py` instead. It sends its standard streams, arguments, environment and working
directory to the nursery, and exits with the status of the copy that the nursery forked for it. The copy runs the
command line, or the code after `-c`, and exits through the interpreter's normal shutdown.

Not covered: how the interpreter starts. A signal to `born.py` does not reach the copy, unless it kills: tests of
signals start the program itself, or signal the copy.

Used by `plugin.py` for the suite's clients, and by the repository's tests of the command line and of MCP.
"""

from __future__ import annotations

import gc
import importlib
import io
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

_MODULES = ("asyncio", "atoll.runtime.engine")
_BORN = Path(__file__).with_name("born.py")
_STREAMS = 3


class Nursery:
    """The fork server, as the tests see it. It imports the engine and `modules`, and exits with the tests."""

    def __init__(self, directory: Path, *modules: str) -> None:
        place = directory / "nursery"
        command = [sys.executable, "-m", __name__, str(place), *modules]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        while not place.exists():
            status = self._process.poll()
            assert status is None, f"the nursery exited with {status} before it listened; stderr says why"
            time.sleep(0.01)
        self.program = [sys.executable, "-I", "-S", str(_BORN), str(place)]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _serve(place: str) -> list[str]:
    """Fork copies until standard input ends. Returns in each copy, with its arguments."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place + ".new")
    listener.listen()
    os.rename(place + ".new", place)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the copies' parents
    while True:
        ready, _, _ = select.select([listener.fileno(), 0], [], [])
        if 0 in ready:
            os._exit(0)
        caller, _ = listener.accept()
        if os.fork() == 0:
            break
        caller.close()
    listener.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    first, streams, _, _ = socket.recv_fds(caller, 65536, _STREAMS)
    arguments, env, cwd = marshal.loads(first + b"".join(iter(lambda: caller.recv(65536), b"")))
    if copy := os.fork():
        for fd in (*streams, 0, 1, 2):
            os.close(fd)
        _tell_end(caller, copy)
    caller.close()
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - open until this process exits
    sys.stdout = _text(1, line_buffering=os.isatty(1))
    sys.stderr = _text(2, line_buffering=True)
    return list(arguments)


def _text(fd: int, *, line_buffering: bool) -> io.TextIOWrapper:
    return io.TextIOWrapper(open(fd, "wb", closefd=False), encoding="utf-8", line_buffering=line_buffering)


def _tell_end(caller: socket.socket, copy: int) -> None:
    """Send the copy's exit status when it exits; kill it when its `born.py` disconnects."""
    gone, ended = select.poll(), os.pidfd_open(copy)
    gone.register(caller, 0)  # no event for the end of its writing, one for its disconnect
    gone.register(ended, select.POLLIN)
    if ended not in dict(gone.poll()):
        os.kill(copy, signal.SIGKILL)
    _, status = os.waitpid(copy, 0)
    caller.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


if __name__ == "__main__":
    for _name in (*_MODULES, *sys.argv[2:]):
        importlib.import_module(_name)
    gc.collect()
    gc.freeze()
    _arguments = _serve(sys.argv[1])
    if _arguments[:1] != ["-c"]:
        from atoll.surfaces import cli

        sys.exit(cli.main(_arguments))
    _, _code, *_rest = _arguments
    sys.argv = ["-c", *_rest]
    exec(compile(_code, "<string>", "exec"), {"__name__": "__main__"})
