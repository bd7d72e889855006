"""Describes the machine: enough to compare figures, nothing that identifies it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import atoll
from atoll.drivers.machine import read_machine
from atoll.drivers.registry import BUILT_IN
from bench.results import Machine


def describe(state_dir: Path) -> Machine:
    seen = read_machine()
    return Machine(
        kernel=platform.release(),
        cpu=_after_colon("/proc/cpuinfo", "model name") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory_kb("MemTotal") * 1024,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        cgroups=seen.cgroup_mode + (" (hybrid)" if is_hybrid() else ""),
        user="root" if seen.root else "an unprivileged user",
        filesystem=filesystem(state_dir),
        versions={"atoll": atoll.__version__} | {name: _version(name) for name in BUILT_IN},
    )


def memory_kb(key: str) -> int:
    """A line of /proc/meminfo."""
    return int((_after_colon("/proc/meminfo", key) or "0").split()[0])


def is_hybrid() -> bool:
    """Whether cgroup v1 is mounted with a v2 hierarchy beside it, which crun refuses."""
    return os.path.isdir("/sys/fs/cgroup/unified")


def _after_colon(path: str, key: str) -> str | None:
    found = re.search(rf"^{re.escape(key)}\s*:\s*(.*)$", Path(path).read_text(), re.MULTILINE)
    return found[1].strip() if found else None


def _version(program: str) -> str:
    path = shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin")
    if path is None:
        return "not installed"
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\d[\w.+~-]*", said)
    return found[0] if found else "unknown"


def filesystem(path: Path) -> str:
    """Which kind `path` is on."""
    done = subprocess.run(
        ["findmnt", "-n", "-o", "FSTYPE", "-T", str(path)], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "an unknown file system"
