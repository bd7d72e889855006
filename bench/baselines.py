"""Baselines without Atoll: start `true` once, with more or less isolation, and remove everything.

Each gets the minimum that it needs: a root of `true` and its libraries, no limits, no user namespace, no seccomp
filter of its own, no layers. A sandbox has all of these, so its ratio to them includes the price of isolation.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench import docker
from bench.machine import is_hybrid

HOST = "host, subprocess.run"
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
    """All baselines, prepared in a directory. A context manager: ends the Docker engine that it has started."""

    def __init__(self, directory: Path) -> None:
        self.absent: list[Absent] = []
        self._numbers = itertools.count()
        self._bundle = directory / "bundle"
        self._roots = directory / "runs"
        self._ends = ExitStack()
        self.docker: docker.Docker | None = None
        """Its commands and its HTTP interface, for figures of other kinds. None: see `absent`."""
        small_root(self._bundle / "rootfs")
        (self._bundle / "config.json").write_text(json.dumps(_OCI_CONFIG))
        self.all = [Baseline(HOST, lambda: ["/bin/true"])]
        self._add("bwrap", "bwrap --unshare-all", self._bwrap)
        self._add("crun", "crun run", self._crun)
        self._add("runc", "runc run", self._runc)
        self._add_docker()

    def __enter__(self) -> Baselines:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

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
        try:
            self.docker = self._ends.enter_context(docker.engine(self._bundle / "rootfs"))
        except docker.Unavailable as error:
            self.absent.append(Absent(label, str(error)))
            return
        self.all.append(Baseline(label, self.docker.run_command, slow=True))


def small_root(root: Path) -> Path:
    """Make a root of `true` and `sleep`, their libraries, and the directories that runtimes expect."""
    for name in ("bin", "dev", "proc", "sys"):
        (root / name).mkdir(parents=True)
    for program in ("/bin/true", "/bin/sleep"):
        shutil.copy(program, root / "bin")
        linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
        for library in re.findall(r"(/\S+)", linked):
            target = root / library.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)
    return root
