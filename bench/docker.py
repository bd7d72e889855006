"""A Docker engine of the benchmarks' own, so that figures stand beside Docker's.

Owns the engine: it is started in a directory of its own where `dockerd` is installed, has one image that is imported
from a file and no network, and is ended and removed with all its data. An engine of the machine is never touched. Also
its HTTP interface, as far as it is measured: this is what Docker's SDKs call.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import itertools
import json
import os
import shutil
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

IMAGE = "atoll-bench:latest"
NAME = "bench"
"""The container that runs all the time, for `docker exec`."""
_SEARCH = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"
_START_S, _END_S = 30, 30
_PAUSE = ["/bin/sleep", "1000000"]
_NO_NETWORK = {"NetworkMode": "none"}


class Unavailable(Exception):
    """There is no Docker engine, and the message says why."""


class Docker:
    """A running engine, with the image and one running container."""

    def __init__(self, client: str, host: str) -> None:
        self._client = client
        self._socket = host
        self._numbers = itertools.count()

    def command(self, *words: str) -> list[str]:
        """A command line of Docker's client."""
        return [self._client, "--host", f"unix://{self._socket}", *words]

    def run_command(self) -> Sequence[str]:
        """Run `true` in a new container, and remove it."""
        return self.command("run", "--rm", "--network=none", IMAGE, "/bin/true")

    def exec_command(self) -> Sequence[str]:
        """Run `true` in the running container."""
        return self.command("exec", NAME, "/bin/true")

    # ---- its HTTP interface ----

    def create(self) -> str:
        """Create and start a container over HTTP. Returns its name."""
        name = f"bench-{next(self._numbers)}"
        spec = {"Image": IMAGE, "Cmd": _PAUSE, "HostConfig": _NO_NETWORK}
        self._request("POST", f"/containers/create?name={name}", spec)
        self._request("POST", f"/containers/{name}/start")
        return name

    async def take_create(self) -> float:
        """As a sandbox is measured, for `Contender.take`: create, start, `true`; removing it is not timed."""
        start = time.perf_counter()
        name = self.create()
        try:
            self.exec(name)
            return time.perf_counter() - start
        finally:
            self.remove(name)

    async def take_exec(self) -> float:
        """`true` in the running container, for `Contender.take`."""
        start = time.perf_counter()
        self.exec()
        return time.perf_counter() - start

    def exec(self, name: str = NAME) -> None:
        """Run `true` in a container over HTTP, and wait for its end."""
        asked = self._request("POST", f"/containers/{name}/exec", {"Cmd": ["/bin/true"], "AttachStdout": True})
        self._request("POST", f"/exec/{asked['Id']}/start", {"Detach": False, "Tty": False})
        ended = self._request("GET", f"/exec/{asked['Id']}/json")
        if ended["Running"] or ended["ExitCode"] != 0:
            raise RuntimeError(f"docker exec over HTTP: {ended}")

    def remove(self, name: str) -> None:
        self._request("DELETE", f"/containers/{name}?force=true")

    def _request(self, method: str, path: str, body: object = None) -> Any:
        connection = _UnixConnection(self._socket)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status >= 300:
            raise RuntimeError(f"docker, {method} {path}: {answer.status} {content.decode(errors='replace')[:300]}")
        return json.loads(content) if content.startswith((b"{", b"[")) else None


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


@contextlib.contextmanager
def engine(root: Path) -> Iterator[Docker]:
    """An engine with an image of the files below `root`. At the end nothing of it is left.

    Raises:
        Unavailable: Docker is not installed, or does not start here.
    """
    daemon, client = shutil.which("dockerd", path=_SEARCH), shutil.which("docker", path=_SEARCH)
    if daemon is None or client is None:
        raise Unavailable("not installed")
    if os.geteuid() != 0:
        raise Unavailable("only root can start an engine")
    # Its own directory: the path of a socket may have 107 characters.
    directory = Path(
        tempfile.mkdtemp(prefix="atoll-docker-", dir="/var/tmp" if os.access("/var/tmp", os.W_OK) else None)
    )
    try:
        with _daemon(daemon, directory):
            docker = Docker(client, str(directory / "sock"))
            _prepare(docker, root, directory)
            yield docker
            subprocess.run(docker.command("rm", "--force", NAME), capture_output=True, check=False)
    finally:
        _unmount_below(directory)
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _daemon(program: str, directory: Path) -> Iterator[None]:
    options = {
        "host": f"unix://{directory}/sock",
        "data-root": f"{directory}/data",
        "exec-root": f"{directory}/exec",
        "pidfile": f"{directory}/pid",
        "storage-driver": "overlay2",
        "iptables": "false",
        "ip6tables": "false",
        "bridge": "none",
    }
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen(
            [program, *(f"--{name}={value}" for name, value in options.items())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={"PATH": _SEARCH},
            start_new_session=True,  # Ctrl-C is for us; we end it
        )
    try:
        _wait_until_it_listens(process, directory)
        yield
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_it_listens(process: subprocess.Popen[bytes], directory: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(directory / "sock"))
            return
        time.sleep(0.05)
    last = (directory / "log").read_text(errors="replace").strip().splitlines()[-1:]
    said = " ".join(last).replace(str(directory), "…")[-200:]
    raise Unavailable(f"its engine does not start here: {said or 'it does not answer'}")


def _prepare(docker: Docker, root: Path, directory: Path) -> None:
    environment = {"PATH": _SEARCH, "HOME": str(directory)}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(root, arcname=".")
    start = docker.command("run", "--detach", "--name", NAME, "--network=none", IMAGE, *_PAUSE)
    for command, given in ((docker.command("import", "-", IMAGE), buffer.getvalue()), (start, b"")):
        done = subprocess.run(command, input=given, capture_output=True, check=False, timeout=120, env=environment)
        if done.returncode != 0:
            raise Unavailable(f"does not run here: {done.stderr.decode(errors='replace').strip()[-200:]}")


def _unmount_below(directory: Path) -> None:
    """What an engine that was killed has left."""
    places = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for place in reversed([each for each in places if each.startswith(f"{directory}/")]):
        subprocess.run(["umount", "--lazy", place], capture_output=True, check=False)
