"""A running `atoll serve` for tests: a process of its own, at a free port, with its URL and its administrator's key.

Used by the tests of the server, of its clients and of its routes, and by programs that test their own clients.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from atoll.testing.waiting import BOUND_S


def key_file(state_dir: Path) -> Path:
    """Where the first key of a server is kept for later starts of it."""
    return state_dir.with_name(f"{state_dir.name}.key")


class RunningServer:
    """A server's process. It can be stopped, killed and started again, at the same address."""

    def __init__(
        self,
        state_dir: Path,
        flags: tuple[str, ...],
        environment: Mapping[str, str],
        *,
        python: str = sys.executable,
    ) -> None:
        """`python` has Atoll with the extra `server`, which this process may lack."""
        self.state_dir = state_dir
        self.url = ""
        self.key = ""
        """Of its administrator. It is kept beside the state directory: a server shows it at its first start only."""
        self.log = state_dir.with_name(f"{state_dir.name}.log")
        self._flags = flags
        self._environment = environment
        self._python = python
        self._process: subprocess.Popen[bytes] | None = None
        self._listen = "127.0.0.1:0"

    @property
    def pid(self) -> int:
        assert self._process is not None, "it is not running"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def headers(self) -> dict[str, str]:
        return {"X-API-Key": self.key}

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            AssertionError: it ended, or did not answer in time.
        """
        self.state_dir.parent.mkdir(parents=True, exist_ok=True)
        command = [
            self._python,
            "-m",
            "atoll.surfaces.cli",
            "serve",
            "--json",
            "--listen",
            self._listen,
            *self._flags,
        ]
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")},
            "ATOLL_STATE_DIR": str(self.state_dir),
            "XDG_CONFIG_HOME": str(self.state_dir / "config"),
            **self._environment,
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
        told = json.loads(self._first_line())
        assert "url" in told, f"the server did not start: {told}"
        self.url = told["url"]
        kept = key_file(self.state_dir)
        if told["key"] is not None:
            kept.touch(mode=0o600)
            kept.write_text(told["key"])
        self.key = kept.read_text()
        self._listen = f"{self._listen.rpartition(':')[0]}:{self.port}"

    def _first_line(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + BOUND_S
        said = b""
        while not said.endswith(b"\n"):
            left = deadline - time.monotonic()
            assert left > 0, f"the server did not start within {BOUND_S:g} s: {self.log.read_text()}"
            if select.select([self._process.stdout], [], [], left)[0]:
                data = os.read(self._process.stdout.fileno(), 65536)
                if not data:
                    status = self._process.wait()
                    raise AssertionError(f"the server ended with {status}: {self.log.read_text()}")
                said += data
        return said

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def stop(self) -> int:
        """End it in order. Returns its exit status."""
        return self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        try:
            status = process.wait(BOUND_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"the server did not end within {BOUND_S:g} s: {self.log.read_text()}") from None
        if process.stdout is not None:
            process.stdout.close()
        return status


@contextmanager
def running_server(
    state_dir: Path, *flags: str, environment: Mapping[str, str] | None = None, python: str = sys.executable
) -> Iterator[RunningServer]:
    """A server over a state directory, until the block is left. `flags` are of `atoll serve`, and a variable of the
    environment is a setting (`ATOLL_DOMAIN`). Sandboxes in the directory are the caller's to destroy."""
    server = RunningServer(state_dir, flags, environment or {}, python=python)
    try:
        server.start()
        yield server
    finally:
        server.stop()
