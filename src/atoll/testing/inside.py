"""What tests do in and to sandboxes: wait for processes, read streams, measure memory, start other host processes.

Used by the suite and by this repository's tests. Not here: fixtures (`plugin.py`), leaks (`leaks.py`).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.abc

from atoll.testing import leaks
from atoll.testing.waiting import BOUND_S, SLOWNESS, eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll import Output, Process, Sandbox, SystemProcess


async def running(sandbox: Sandbox, marker: str) -> list[SystemProcess]:
    """Processes inside whose command contains `marker`, zombies excluded."""
    return [process for process in await sandbox.ps() if marker in process.command and process.state != "Z"]


async def until_running(sandbox: Sandbox, marker: str) -> list[SystemProcess]:
    return await eventually(lambda: running(sandbox, marker), f"{marker} runs")


async def wait_tree_exit(sandbox: Sandbox, marker: str) -> None:
    async def gone() -> bool:
        return not await running(sandbox, marker)

    await eventually(gone, f"{marker} is gone")


async def output_of(process: Process, stream: str = "stdout") -> bytes:
    """All that a process writes to one stream."""
    from atoll import Output

    return b"".join([event.data async for event in process if isinstance(event, Output) and event.stream == stream])


async def collect(process: Process, into: list[Output]) -> None:
    """Append each piece of output to a list, which also holds what came before an error."""
    from atoll import Output

    async for event in process:
        if isinstance(event, Output):
            into += [event]


async def read_until(process: Process, text: bytes) -> bytes:
    """What a process writes to stdout until `text` is in it."""
    from atoll import Output

    seen = b""
    with anyio.fail_after(BOUND_S):
        async for event in process:
            if isinstance(event, Output) and event.stream == "stdout":
                seen += event.data
                if text in seen:
                    return seen
    raise AssertionError(f"the process exited without writing {text!r}; it wrote {seen!r}")


def contiguous(events: list[Output]) -> bool:
    """Whether each piece begins where the one before it ended."""
    return all(a.offset + len(a.data) == b.offset for a, b in pairwise(events))


# ---- memory ----


class Peak:
    """By how much a process's peak resident memory has exceeded what it had when this was created."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._before = self._read("VmRSS")

    @property
    def growth_bytes(self) -> int:
        return self._read("VmHWM") - self._before

    def _read(self, key: str) -> int:
        for line in Path(f"/proc/{self._pid}/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
        raise AssertionError(f"/proc/{self._pid}/status has no {key}")


def keeper_pid(state_dir: Path, sandbox: Sandbox) -> int:
    return int((state_dir / "sandboxes" / sandbox.id / "keeper.lock").read_text())


# ---- connections ----


def _connections() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    peer = copy.getpeername()
                    is_keeper = copy.family == socket.AF_UNIX and str(peer).endswith("/sock")
                    if is_keeper or (copy.family == socket.AF_INET and peer[1] in leaks.POOLED_PORTS):
                        yield int(name), link


@contextmanager
def connections_made() -> Iterator[list[int]]:
    """The descriptors of connections to keepers, or to the server, that are opened in the context."""
    before = {link for _, link in _connections()}
    made: list[int] = []
    yield made
    made += [fd for fd, link in _connections() if link not in before]


def cut(fd: int) -> None:
    """Break a connection that is in use."""
    with socket.socket(fileno=os.dup(fd)) as copy:
        copy.shutdown(socket.SHUT_RDWR)


# ---- other host processes ----

python = [sys.executable]
"""The command that runs a client's Python code. With a nursery, Atoll is already imported there."""
_PRELUDE = """
import os, sys
import anyio, atoll

def say(*words):
    print(*words, flush=True)

say(os.getpid())

async def main():
    async with atoll.open(sys.argv[1], settings=atoll.Settings(runtime=sys.argv[2])) as engine:
"""


class Client:
    """Another host process that uses the same state directory."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self._process = process
        self._rest = b""
        self.pid = 0
        """The process that uses Atoll. What was started may be the nursery's `born.py`, which has another pid."""
        self.stdin = process.stdin

    async def line(self) -> str:
        """The next line of its output."""
        assert self._process.stdout is not None
        with anyio.fail_after(30 * SLOWNESS):
            while b"\n" not in self._rest:
                try:
                    self._rest += await self._process.stdout.receive()
                except anyio.EndOfStream:
                    raise AssertionError(f"the client exited; its stderr: {await self._errors()}") from None
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    async def ends(self) -> int:
        """Wait until it exits, and return its exit status."""
        with anyio.fail_after(30 * SLOWNESS):
            return await self._process.wait()

    async def succeeds(self) -> None:
        status = await self.ends()
        assert status == 0, await self._errors()

    async def _errors(self) -> str:
        assert self._process.stderr is not None
        return b"".join([chunk async for chunk in self._process.stderr]).decode(errors="replace")


@asynccontextmanager
async def client(
    state_dir: Path, runtime_name: str, body: str, *arguments: str, env: Mapping[str, str] | None = None
) -> AsyncIterator[Client]:
    """A Python process that runs `body` with an open `engine`. It is killed at the end if it still runs."""
    lines = [f"        {line}" for line in body.strip().splitlines()]
    program = _PRELUDE + "\n".join(lines) + "\n\nanyio.run(main)\n"
    started = python if env is None else [sys.executable]  # some of the environment is read when Atoll is imported
    command = [*started, "-c", program, str(state_dir), runtime_name, *arguments]
    async with await anyio.open_process(command, env={**os.environ, **(env or {})}) as process:
        client = Client(process)
        try:
            client.pid = int(await client.line())
            yield client
        finally:
            with suppress(ProcessLookupError):
                if process.returncode is None:
                    os.kill(client.pid or process.pid, signal.SIGKILL)
