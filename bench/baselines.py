"""Baselines without Atoll: start `true` once, with more or less isolation, and remove everything.

Each gets the minimum that it needs: a root of `true` and its libraries, no limits, no user namespace, no seccomp
filter of its own, no layers. A sandbox has all of these, so its ratio to them includes the price of isolation.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.machine import is_hybrid

HOST = "host, subprocess.run"
_DOCKER_IMAGE = "atoll-bench-true:latest"
_KEEPER = Path(__file__).resolve().parent.parent / "src" / "atoll" / "_bin" / "keeper"
_OCI_CONFIG = {
    "ociVersion": "1.0.2",
    "process": {
        "terminal": False,
        "user": {"uid": 0, "gid": 0},
        "args": ["/bin/true"],
        "env": ["PATH=/bin"],
        "cwd": "/",
        "noNewPrivileges": True,
    },
    "root": {"path": "rootfs", "readonly": True},
    "hostname": "true",
    "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
    "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
}


@dataclass(frozen=True)
class Baseline:
    label: str
    command: Callable[[], Sequence[str]]
    """The command line. Called for each run, as container ids are not reused."""
    slow: bool = False


@dataclass(frozen=True)
class Absent:
    """A baseline that does not work on this machine, and why."""

    label: str
    reason: str


class Baselines:
    """All baselines, prepared in a directory. A context manager: removes its image from Docker at the end."""

    def __init__(self, directory: Path) -> None:
        self.absent: list[Absent] = []
        self._numbers = itertools.count()
        self._bundle = directory / "bundle"
        self._roots = directory / "runs"
        self._imported = False
        _make_root(self._bundle / "rootfs")
        (self._bundle / "config.json").write_text(json.dumps(_OCI_CONFIG))
        self.all = [Baseline(HOST, lambda: ["/bin/true"])]
        self._add("bwrap", "bwrap --unshare-all", self._bwrap)
        self._add("crun", "crun run", self._crun)
        self._add("runc", "runc run", self._runc)
        self._add_docker()

    def __enter__(self) -> Baselines:
        return self

    def __exit__(self, *_: object) -> None:
        if self._imported:
            subprocess.run(["docker", "image", "rm", "--force", _DOCKER_IMAGE], capture_output=True, check=False)

    def _add(self, program: str, label: str, command: Callable[[str], Sequence[str]]) -> None:
        path = shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin")
        if path is None:
            self.absent.append(Absent(label, "not installed"))
            return
        done = subprocess.run(command(path), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            self.absent.append(Absent(label, f"does not run here: {done.stderr.strip()[-200:]}"))
            return
        self.all.append(Baseline(label, lambda: command(path)))

    def _id(self) -> str:
        return f"bench-{os.getpid()}-{next(self._numbers)}"

    def _bwrap(self, path: str) -> Sequence[str]:
        return [path, "--unshare-all", "--ro-bind", "/", "/", "/bin/true"]

    def _crun(self, path: str) -> Sequence[str]:
        # crun refuses hybrid cgroups. The keeper's `nsexec` hides them from it, which takes about a millisecond.
        wrapper = [str(_KEEPER), "nsexec", "--"] if is_hybrid() and os.geteuid() == 0 else []
        return [*wrapper, path, "--root", str(self._roots / "crun"), "run", "--bundle", str(self._bundle), self._id()]

    def _runc(self, path: str) -> Sequence[str]:
        return [path, "--root", str(self._roots / "runc"), "run", "--bundle", str(self._bundle), self._id()]

    def _add_docker(self) -> None:
        label = "docker run --rm"
        why = "not installed"
        with suppress(OSError, subprocess.TimeoutExpired):
            asked = ["docker", "version", "--format", "{{.Server.Version}}"]
            why = "no engine answers"
            if subprocess.run(asked, capture_output=True, check=False, timeout=10).returncode == 0:
                done = subprocess.run(
                    ["docker", "import", "-", _DOCKER_IMAGE],
                    input=_as_tar(self._bundle / "rootfs"),
                    capture_output=True,
                    check=False,
                    timeout=60,
                )
                why = done.stderr.decode(errors="replace").strip()[-200:]
                if done.returncode == 0:
                    self._imported = True
                    command = ["docker", "run", "--rm", "--network=none", _DOCKER_IMAGE, "/bin/true"]
                    self.all.append(Baseline(label, lambda: command, slow=True))
                    return
        self.absent.append(Absent(label, why))


def _make_root(root: Path) -> None:
    """`true`, its libraries, and the directories that runtimes expect."""
    for name in ("bin", "dev", "proc", "sys"):
        (root / name).mkdir(parents=True)
    shutil.copy("/bin/true", root / "bin" / "true")
    linked = subprocess.run(["ldd", "/bin/true"], capture_output=True, text=True, check=False).stdout
    for library in re.findall(r"(/\S+)", linked):
        target = root / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)


def _as_tar(root: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(root, arcname=".")
    return buffer.getvalue()
