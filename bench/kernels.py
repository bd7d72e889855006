"""What executes code and answers its calls without Atoll: a subprocess with pipes, `docker exec`, and ipykernel.

All have the same face, so that they are measured in the same way. They execute code that is given as text, one after
another in one process, and code can ask the host for something: `call(value)`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from bench import docker

PYTHON = "/usr/bin/python3" if os.access("/usr/bin/python3", os.X_OK) else sys.executable
"""The interpreter that sandboxes of the image `host` have, too."""
CONTAINER = "bench-code"
_HOST_PROGRAMS = [f"--volume={path}:{path}:ro" for path in ("/usr", "/lib", "/lib64") if Path(path).exists()]

_LOOP = """
import json, sys
def call(value):
    print(json.dumps({"call": value}), flush=True)
    return json.loads(sys.stdin.readline())
names = {"call": call}
for line in iter(sys.stdin.readline, ""):
    exec(json.loads(line), names)
    print(json.dumps({"done": names.get("times")}), flush=True)
"""


def timed_calls(count: int, call: str) -> str:
    """Code that makes so many calls one after another, and has the time of each in `times`."""
    return (
        f"import time\ntimes = []\nfor number in range({count}):\n"
        f"    start = time.perf_counter()\n    {call}\n    times.append(time.perf_counter() - start)\n"
    )


class PeerKernel(Protocol):
    """A process that executes code. Made by a factory, whose time is that of its start."""

    def execute(self, code: str) -> Any: ...

    def call_times(self, count: int) -> list[float]:
        """How long calls took, one after another, as the code sees it."""

    @property
    def pid(self) -> int | None:
        """None: it is in a container."""

    def close(self) -> None: ...


class PipeKernel:
    """The loop above behind two pipes, and a loop on the host that reads a line and answers it."""

    def __init__(self, wrapper: Sequence[str] = (), *, python: str = PYTHON) -> None:
        self._is_wrapped = bool(wrapper)
        self._process = subprocess.Popen(
            [*wrapper, python, "-c", _LOOP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int | None:
        return None if self._is_wrapped else self._process.pid

    def execute(self, code: str) -> Any:
        self._send(code)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "call" not in message:
                return message["done"]
            self._send(message["call"])
        raise RuntimeError("the process that executes code has ended")

    def _send(self, value: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def call_times(self, count: int) -> list[float]:
        times: list[float] = self.execute(timed_calls(count, "call(number)"))
        return times

    def close(self) -> None:
        with self._process:  # closes the pipes, at which the loop ends, and waits
            pass


class IpyKernel:
    """ipykernel as Jupyter uses it. Its code can ask the host only for a line of input."""

    def __init__(self, directory: Path) -> None:
        from jupyter_client.manager import KernelManager  # type: ignore[import-not-found]  # see `ipykernel_is_missing`

        directory.mkdir(exist_ok=True)
        environment = {**os.environ, "IPYTHONDIR": str(directory), "JUPYTER_RUNTIME_DIR": str(directory)}
        self._manager = KernelManager(connection_file=str(directory / f"kernel-{id(self)}.json"))
        self._manager.start_kernel(
            env=environment, extra_arguments=["--HistoryManager.enabled=False"], stderr=subprocess.DEVNULL
        )
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)  # what it publishes before would be lost, and waited for

    @property
    def pid(self) -> int | None:
        found: int | None = getattr(self._manager.provisioner, "pid", None)
        return found

    def execute(self, code: str) -> Any:
        printed: list[str] = []

        def hear(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])

        reply = self._client.execute_interactive(
            code, allow_stdin=True, stdin_hook=lambda _: self._client.input("1"), output_hook=hear, timeout=60
        )
        if reply["content"]["status"] != "ok":
            raise RuntimeError(f"ipykernel: {reply['content']}")
        return "".join(printed)

    def call_times(self, count: int) -> list[float]:
        code = timed_calls(count, "input()") + "import json\nprint(json.dumps(times))"
        times: list[float] = json.loads(self.execute(code))
        return times

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


def ipykernel_is_missing() -> str | None:
    """Why ipykernel cannot be measured. None: it can."""
    if all(importlib.util.find_spec(name) for name in ("ipykernel", "jupyter_client")):
        return None
    return "ipykernel is not installed here: `.venv/bin/pip install ipykernel` adds it, and 29 packages (75 MB)"


@contextmanager
def container_with_python(engine: docker.Docker) -> Iterator[list[str]]:
    """A running container with this machine's programs. Gives the command line that runs one there."""
    start = ["run", "--detach", "--name", CONTAINER, "--network=none", *_HOST_PROGRAMS, docker.IMAGE]
    done = subprocess.run(
        engine.command(*start, "/usr/bin/sleep", "1000000"), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise docker.Unavailable(f"no container with this machine's programs: {done.stderr.strip()[-200:]}")
    try:
        yield engine.command("exec", "--interactive", CONTAINER)
    finally:
        with suppress(OSError):
            subprocess.run(engine.command("rm", "--force", CONTAINER), capture_output=True, check=False)
