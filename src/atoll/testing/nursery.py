"""Programs that use Atoll without the start of Python: a process that has imported it and makes copies of itself.

A command line spends a third of a second with importing and a fraction of that with what it was asked for, and the
tests run hundreds of them. `born.py` is started in its place, hands its standard streams, arguments, environment and
working directory to the nursery, and ends as the copy ends that the nursery made for it. The copy does what the command
line does, or runs the code that follows `-c`, and leaves by the interpreter's own way out. What it cannot show is how
the interpreter starts. A signal for what was started does not reach the copy, unless it kills: tests about signals
start the program itself, or send them to the copy.
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

MODULES = ("streaming", "terminal", "conversation")
_BORN = Path(__file__).with_name("born.py")
_STREAMS = 3


class Nursery:
    """The process that has all imported, and these modules `besides`, as the tests see it. It ends when they do."""

    def __init__(self, directory: Path, *besides: str) -> None:
        place = directory / "nursery"
        command = [sys.executable, "-m", __name__, str(place), *besides]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        while not place.exists():
            assert self._process.poll() is None, "the nursery did not start"
            time.sleep(0.01)
        self.program = [sys.executable, "-I", "-S", str(_BORN), str(place)]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _serve(place: str) -> list[str]:
    """Make copies until standard input ends. Returns in each copy, with its arguments."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place + ".new")
    listener.listen()
    os.rename(place + ".new", place)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The copies' parents are waited for by nobody.
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
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as this process is
    sys.stdout = _text(1, line_buffering=os.isatty(1))
    sys.stderr = _text(2, line_buffering=True)
    return list(arguments)


def _text(fd: int, *, line_buffering: bool) -> io.TextIOWrapper:
    return io.TextIOWrapper(open(fd, "wb", closefd=False), encoding="utf-8", line_buffering=line_buffering)


def _tell_end(caller: socket.socket, copy: int) -> None:
    """Wait for the copy, or for whoever wanted it to go away, and say how it ended."""
    gone, ended = select.poll(), os.pidfd_open(copy)
    gone.register(caller, 0)  # Its end of writing is no news; that it hung up is.
    gone.register(ended, select.POLLIN)
    if ended not in dict(gone.poll()):
        os.kill(copy, signal.SIGKILL)
    _, status = os.waitpid(copy, 0)
    caller.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


if __name__ == "__main__":
    from atoll.surfaces import cli
    from atoll.surfaces.cli import app, commands

    for _name in (*(f"{cli.__name__}.{_name}" for _name in MODULES), "atoll.runtime.engine", "asyncio", *sys.argv[2:]):
        importlib.import_module(_name)
    for _name in app.MODULES:
        importlib.import_module(f"{commands.__name__}.{_name}")
    gc.collect()
    gc.freeze()
    _arguments = _serve(sys.argv[1])
    if _arguments[:1] != ["-c"]:
        sys.exit(cli.main(_arguments))
    _, _code, *_rest = _arguments
    sys.argv = ["-c", *_rest]
    exec(compile(_code, "<string>", "exec"), {"__name__": "__main__"})
