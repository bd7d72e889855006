"""The command line on a real state directory, with real pipes and terminals.

What a test is about goes through the command line: the program itself where it runs beside the test or on a terminal,
and a copy of one that was started before (`nursery`) where it is run to its end. The sandbox that a test stands on,
and the look at whether a process still runs, come from the API in this process.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio

import atoll
from atoll.testing.nursery import Nursery
from atoll.testing.waiting import wait_until

BOUND_S = 60.0
PROGRAM = [sys.executable, "-m", "atoll.surfaces.cli"]


class Started:
    """A command line that runs beside the test."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.seen = b""

    def read_until(self, text: bytes, bound_s: float = BOUND_S) -> bytes:
        """Return all output so far once `text` is in it."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        deadline = time.monotonic() + bound_s
        while text not in self.seen:
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(fd, 65536) if ready else b""
            if not data:
                raise AssertionError(f"{text!r} did not come; there came {self.seen!r}")
            self.seen += data
        return self.seen

    def wait(self, bound_s: float = BOUND_S) -> int:
        return self.process.wait(bound_s)

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def type(self, text: bytes) -> None:
        """Write to its input."""
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def end_input(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def errors(self) -> bytes:
        """Return all that it wrote to standard error, once it has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def stop_reading(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


class Terminal:
    """A command line on a terminal of its own, with the test at the keyboard."""

    def __init__(self, arguments: list[str], env: dict[str, str], rows: int = 24, cols: int = 80) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(rows, cols)
        self.mode = termios.tcgetattr(self.slave)
        self._closed = False
        self.seen = b""
        self.process = subprocess.Popen(
            arguments,
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env=env,
            start_new_session=True,
            preexec_fn=_take_terminal,  # noqa: PLW1509 - these tests have one thread
        )

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def read_until(self, text: bytes, bound_s: float = BOUND_S) -> bytes:
        """Return what came up to and including `text`; what follows is for the next call."""
        deadline = time.monotonic() + bound_s
        while text not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(f"{text!r} did not come; there came {self.seen!r}")
            self.seen += os.read(self.master, 65536)
        end = self.seen.index(text) + len(text)
        seen, self.seen = self.seen[:end], self.seen[end:]
        return seen

    def wait(self, bound_s: float = BOUND_S) -> int:
        """Wait for the end, reading on so that it is not held up."""
        wait_until(lambda: self._drained() and self.process.poll() is not None, "the command line ends", bound_s)
        return self.process.returncode

    def _drained(self) -> bool:
        while select.select([self.master], [], [], 0)[0]:
            try:
                self.seen += os.read(self.master, 65536)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                break
        return True

    def set_mode(self, mode: list[Any]) -> None:
        termios.tcsetattr(self.slave, termios.TCSANOW, mode)

    def is_raw(self) -> bool:
        return not termios.tcgetattr(self.slave)[3] & termios.ICANON

    def is_restored(self) -> bool:
        return termios.tcgetattr(self.slave) == self.mode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if not self._closed:
            self._closed = True
            os.close(self.master)
            os.close(self.slave)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Atoll:
    """The command line, on one state directory."""

    def __init__(self, state_dir: Path, scratch: Path, nursery: Nursery) -> None:
        self.nursery = nursery
        self.state_dir = state_dir
        self.scratch = scratch
        self.env = {**os.environ, "ATOLL_STATE_DIR": str(state_dir), "NO_COLOR": ""}
        self._open: list[Started | Terminal] = []
        self._numbers = itertools.count(1)
        self._names: list[str] = []
        self._stem = f"t{os.getpid()}-{time.monotonic_ns() % 10**9}"

    def __call__(
        self, *arguments: str, input: bytes = b"", status: int | None = 0, bound_s: float = BOUND_S, **options: Any
    ) -> subprocess.CompletedProcess[bytes]:
        """Run it to its end and check its exit status (None: whatever it is)."""
        options.setdefault("input", input)
        if "stdin" in options:
            del options["input"]
        done = subprocess.run(
            [*self.nursery.program, *arguments],
            check=False,
            capture_output=True,
            env=self.env,
            timeout=bound_s,
            **options,
        )
        if status is not None:
            assert done.returncode == status, f"{arguments}: {done.returncode}\n{done.stdout!r}\n{done.stderr!r}"
        return done

    def json(self, *arguments: str, status: int | None = 0, **options: Any) -> Any:
        """Run it and return the JSON that it prints."""
        done = self(*arguments, status=status, **options)
        return json.loads(done.stdout)

    def text(self, *arguments: str, **options: Any) -> str:
        return self(*arguments, **options).stdout.decode()

    def start(self, *arguments: str, **options: Any) -> Started:
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        popen: Any = subprocess.Popen  # Its overloads cannot see that no option makes text of bytes.
        started = Started(popen([*PROGRAM, *arguments], env=self.env, **options))
        self._open.append(started)
        return started

    def terminal(self, *arguments: str, rows: int = 24, cols: int = 80) -> Terminal:
        return self.on_terminal(*PROGRAM, *arguments, rows=rows, cols=cols)

    def on_terminal(self, *arguments: str, rows: int = 24, cols: int = 80) -> Terminal:
        """Start any program on a terminal."""
        terminal = Terminal(list(arguments), {**self.env, "TERM": "xterm"}, rows, cols)
        self._open.append(terminal)
        return terminal

    def new_name(self) -> str:
        """A name that no test has used; whatever bears it is destroyed after the test."""
        name = f"{self._stem}-{next(self._numbers)}"
        self._names.append(name)
        return name

    def create(self, *options: str) -> str:
        """A new sandbox, by the command line."""
        name = self.new_name()
        assert self.text("create", name, *options) == f"{name}\n"
        return name

    @property
    def has_hints(self) -> bool:
        """Whether errors come with hints. They are the operator's: a server does not send them."""
        return "ATOLL_URL" not in self.env

    def box(self) -> str:
        """A new sandbox."""
        name = self.new_name()

        async def create() -> None:
            async with atoll.open(self.state_dir) as engine:
                await engine.create(name)

        anyio.run(create)
        return name

    def names(self) -> list[str]:
        return self.text("ls", "-q").split()

    def runs(self, box: str, text: str) -> bool:
        """Whether a process in a sandbox has `text` in its command."""

        async def look() -> bool:
            async with atoll.open(self.state_dir) as engine:
                return any(text in process.command for process in await (await engine.get(box)).ps())

        return anyio.run(look)

    def close(self) -> None:
        for each in self._open:
            each.close()
        if self._names:
            anyio.run(self._destroy, self._names)

    async def _destroy(self, names: list[str]) -> None:
        async with atoll.open(self.state_dir) as engine:
            for name in names:
                with suppress(atoll.SandboxNotFound):
                    await engine.destroy(name)
