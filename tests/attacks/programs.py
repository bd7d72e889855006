"""How attacks are carried out: building the C programs, running Python inside, and reading what either found out."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from atoll.contract.model import ExecResult, Output
from atoll.runtime.guest.process import Process
from atoll.runtime.interface import Engine
from atoll.runtime.sandbox import Sandbox

PROBE = "/tmp/probe"
"""Where the probe is, inside."""
TIMEOUT_S = 30.0

GRANTED = 0
"""An attempt that succeeded."""
DENIED = frozenset({errno.EPERM, errno.EACCES})
ABSENT = frozenset({errno.ENOSYS})


def build(source: Path, directory: Path) -> bytes:
    """Compile a C program without dependencies and return it."""
    program = directory / source.stem
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-std=c11", "-O1", "-static", "-w", "-o", program, source], check=True, timeout=60)
    return program.read_bytes()


def top_of(engine: Engine, sandbox: Sandbox) -> Path:
    """The layer on the host that a sandbox writes to."""
    manifest = json.loads((engine.state_dir / "sandboxes" / sandbox.id / "manifest.json").read_text())
    return engine.state_dir / "layers" / str(manifest["active_layer"])


async def probe(sandbox: Sandbox, *arguments: str, user: str = "user") -> ExecResult:
    """Run the probe to its end."""
    return await sandbox.exec([PROBE, *arguments], user=user, timeout_s=TIMEOUT_S)


async def attempts(sandbox: Sandbox, *arguments: str, user: str = "user") -> dict[str, int]:
    """Run the probe and return what each attempt gave: an errno, 0 for success, a negative number for a signal."""
    result = await probe(sandbox, *arguments, user=user)
    assert result.exit_code == 0, result
    lines = [line.rsplit(" ", 1) for line in result.stdout.splitlines()]
    assert lines, "nothing was tried"
    return {name: int(number) for name, number in lines}


def unexpected(found: dict[str, int], allowed: frozenset[int]) -> dict[str, str]:
    """The attempts that gave something else than `allowed`, readable."""
    return {name: errno.errorcode.get(n, str(n)) for name, n in found.items() if n not in allowed}


async def python(sandbox: Sandbox, code: str, *arguments: str, user: str = "user") -> ExecResult:
    """Run Python code inside, to its end."""
    command = ["python3", "-I", "-S", "-c", code, *arguments]
    return await sandbox.exec(command, user=user, timeout_s=TIMEOUT_S)


async def shell(sandbox: Sandbox, line: str, *, user: str = "user") -> ExecResult:
    """Run a line of shell inside, to its end."""
    return await sandbox.exec(["/bin/sh", "-c", line], user=user, timeout_s=TIMEOUT_S)


@asynccontextmanager
async def running(sandbox: Sandbox, *command: str, user: str = "user") -> AsyncIterator[tuple[Process, str]]:
    """A program inside that has begun: the process and the first line that it printed. It is killed at the end."""
    async with await sandbox.spawn(list(command), user=user, keep=False) as process:
        said = b""
        while b"\n" not in said:
            event = await anext(process)
            assert isinstance(event, Output), f"{command} ended at once: {event}"
            said += event.data
        yield process, said.decode(errors="replace").splitlines()[0]


def host_processes(sandbox: Sandbox) -> list[int]:
    """The sandbox's processes, as the host numbers them: its first and all below that."""
    first = sandbox.info.pid
    assert first is not None
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(") ")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(name))
    found, left = [], [first]
    while left:
        pid = left.pop()
        found.append(pid)
        left += children.get(pid, [])
    return found


def status_of(pid: int) -> dict[str, str]:
    """/proc/PID/status on the host."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
