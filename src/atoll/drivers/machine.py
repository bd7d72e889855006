"""What this machine supports: kernel, user ids, cgroups, installed programs.

Owns where Linux reports these. Not here: runtimes (`oci.py`, `bwrap.py`), what is wrong with a machine (`doctor.py`).
Every driver imports this module first, so it also refuses other systems than Linux.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

if sys.platform != "linux":
    raise ImportError("Atoll's sandboxes need Linux; on other systems, run it in a Linux virtual machine")

import pwd

PROGRAM_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])
"""Where programs of the host are searched for. An unprivileged user's PATH often lacks the last three."""
CGROUP_ROOT = Path("/sys/fs/cgroup")
CgroupMode = Literal["v1", "v2", "none"]
_TMPFS, _CGROUP2 = 0x01021994, 0x63677270


@dataclass(frozen=True)
class IdRange:
    start: int
    count: int


@dataclass(frozen=True)
class Machine:
    root: bool
    kernel: tuple[int, int]
    cgroup_mode: CgroupMode
    """`v1` also stands for hybrid machines: the controllers that count are v1 there."""
    controllers: frozenset[str]
    """Those of memory, cpu and pids whose limits this user may set."""
    user_namespaces: bool
    subuids: IdRange | None
    subgids: IdRange | None
    """Ids that /etc/subuid and /etc/subgid give to this user. None for root, who needs none."""

    @property
    def single_id(self) -> bool:
        """Whether all users inside are one host user: an unprivileged user without a range of ids has no others."""
        return not self.root and not (self.subuids and self.subgids)

    @property
    def id_mapped_overlay(self) -> bool:
        return self.root and self.kernel >= (5, 19)


def find_program(name: str) -> str | None:
    """The path of a program of the host. None: it is not installed."""
    paths = (os.path.join(directory, name) for directory in PROGRAM_PATH.split(os.pathsep) if directory)
    return next((path for path in paths if os.access(path, os.X_OK) and os.path.isfile(path)), None)


def filesystem_type(path: Path) -> int:
    """The magic number of the file system at `path`, or 0."""
    import ctypes

    buffer = (ctypes.c_long * 32)()
    libc = ctypes.CDLL(None, use_errno=True)
    return int(buffer[0]) if libc.statfs(os.fsencode(path), ctypes.byref(buffer)) == 0 else 0


def _cgroups(root: bool) -> tuple[CgroupMode, frozenset[str]]:
    kind = filesystem_type(CGROUP_ROOT)
    wanted = ("memory", "cpu", "pids")
    if kind == _CGROUP2:
        try:
            offered = (CGROUP_ROOT / "cgroup.controllers").read_text().split()
        except OSError:
            return "none", frozenset()
        usable = root and os.access(CGROUP_ROOT, os.W_OK)
        return "v2", frozenset(c for c in wanted if usable and c in offered)
    if kind == _TMPFS:
        usable_v1 = (c for c in wanted if os.access(CGROUP_ROOT / c, os.W_OK) and (CGROUP_ROOT / c / "tasks").exists())
        return "v1", frozenset(usable_v1 if root else ())
    return "none", frozenset()


def _sub_ids(path: Path) -> IdRange | None:
    uid = os.getuid()
    try:
        names = {str(uid), pwd.getpwuid(uid).pw_name}
    except KeyError:
        names = {str(uid)}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        parts = line.split(":")
        if len(parts) == 3 and parts[0] in names and parts[1].isdigit() and parts[2].isdigit():
            found = IdRange(int(parts[1]), int(parts[2]))
            if found.count >= 65535:
                return found
    return None


def _user_namespaces(root: bool) -> bool:
    try:
        if int(Path("/proc/sys/user/max_user_namespaces").read_text()) == 0:
            return False
    except (OSError, ValueError):
        return False
    denials = (("kernel/unprivileged_userns_clone", "0"), ("kernel/apparmor_restrict_unprivileged_userns", "1"))
    for name, denied in denials:
        try:
            if not root and Path("/proc/sys", name).read_text().strip() == denied:
                return False
        except OSError:
            continue
    return True


def read_machine() -> Machine:
    """Read what the machine supports. Takes well under a millisecond; the answer holds for the life of the process."""
    root = os.geteuid() == 0
    mode, controllers = _cgroups(root)
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return Machine(
        root=root,
        kernel=(int(release[1]), int(release[2])) if release else (0, 0),
        cgroup_mode=mode,
        controllers=controllers,
        user_namespaces=_user_namespaces(root),
        subuids=None if root else _sub_ids(Path("/etc/subuid")),
        subgids=None if root else _sub_ids(Path("/etc/subgid")),
    )
