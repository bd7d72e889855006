"""What this machine supports: kernel, user ids, cgroups, installed programs.

Owns where Linux reports these. Not here: runtimes (`oci.py`, `bwrap.py`), what is wrong with a machine (`doctor.py`).
Every driver imports this module first, so it also refuses other systems than Linux.
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

if sys.platform != "linux":
    raise ImportError("Atoll's sandboxes need Linux; on other systems, run it in a Linux virtual machine")

import pwd

if TYPE_CHECKING:
    from ctypes import CDLL

PROGRAM_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])
"""Where programs of the host are searched for. An unprivileged user's PATH often lacks the last three."""
KEEPER = Path(__file__).resolve().parent.parent / "_bin" / "keeper"
CGROUP_ROOT = Path("/sys/fs/cgroup")
CgroupMode = Literal["v1", "v2", "none"]
_TMPFS, _CGROUP2 = 0x01021994, 0x63677270
_SYSCTLS = Path("/proc/sys")
APPARMOR_RESTRICTION = "kernel/apparmor_restrict_unprivileged_userns"
_OWN_CGROUP = Path("/proc/self/cgroup")
_LINGER = Path("/var/lib/systemd/linger")
_RUN_USER = Path("/run/user")


class IdRange(NamedTuple):
    start: int
    size: int


class Machine(NamedTuple):
    root: bool
    kernel: tuple[int, int]
    cgroup_mode: CgroupMode
    """`v1` also stands for hybrid machines: the controllers that count are v1 there."""
    controllers: frozenset[str]
    """Those of memory, cpu and pids whose limits this user may set."""
    cgroup_parent: Path | None
    """The v2 cgroup in which this user's `atoll` is: the root, or what systemd delegates to an unprivileged user. None:
    this user has none, or they are v1."""
    needs_scope: bool
    """A process of this one's may not enter `cgroup_parent` by itself: the user's systemd has to start it there."""
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


@cache
def libc() -> CDLL:
    """The C library, for system calls that Python does not have. Loading it takes as long as ten of them."""
    from ctypes import CDLL

    return CDLL(None, use_errno=True)


def filesystem_type(path: Path) -> int:
    """The magic number of the file system at `path`, or 0."""
    import ctypes

    buffer = (ctypes.c_long * 32)()
    return int(buffer[0]) if libc().statfs(os.fsencode(path), ctypes.byref(buffer)) == 0 else 0


class _CgroupAccess(NamedTuple):
    mode: CgroupMode
    controllers: frozenset[str] = frozenset()
    parent: Path | None = None
    needs_scope: bool = False


def _cgroups(root: bool) -> _CgroupAccess:
    kind = filesystem_type(CGROUP_ROOT)
    wanted = ("memory", "cpu", "pids")
    if kind == _CGROUP2:
        parent = CGROUP_ROOT if root else delegated_cgroup()
        if not os.access(parent, os.W_OK):
            return _CgroupAccess("v2")
        offered = (parent / "cgroup.controllers").read_text().split()
        outside = not root and not _is_below(parent)
        usable = not outside or lingers()
        return _CgroupAccess("v2", frozenset(c for c in wanted if usable and c in offered), parent, outside and usable)
    if kind == _TMPFS:
        usable_v1 = (c for c in wanted if os.access(CGROUP_ROOT / c, os.W_OK) and (CGROUP_ROOT / c / "tasks").exists())
        return _CgroupAccess("v1", frozenset(usable_v1 if root else ()))
    return _CgroupAccess("none")


def delegated_cgroup() -> Path:
    """The cgroup that systemd delegates to an unprivileged user, if it runs a service manager for that user."""
    uid = os.geteuid()
    return CGROUP_ROOT / "user.slice" / f"user-{uid}.slice" / f"user@{uid}.service"


def own_cgroup() -> str:
    """The cgroup of this process by which systemd knows its unit, as a path from the hierarchy's root."""
    lines = [line.split(":", 2) for line in _OWN_CGROUP.read_text().splitlines()]
    paths = {name: path for _, name, path in lines if name in ("", "name=systemd")}
    return paths.get("name=systemd", paths.get("", "/"))


def _is_below(cgroup: Path) -> bool:
    """Whether this process is below `cgroup`, so that the kernel lets it enter other cgroups there."""
    return (own_cgroup() + "/").startswith(f"/{cgroup.relative_to(CGROUP_ROOT)}/")


def lingers() -> bool:
    """Whether the user's systemd stays when the user logs out, and with it all processes that it has started."""
    uid = os.geteuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return False
    running = (_RUN_USER / str(uid) / "systemd" / "private").exists()
    return (_LINGER / name).exists() and running and find_program("systemd-run") is not None


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
            if found.size >= 65535:
                return found
    return None


def _user_namespaces(root: bool) -> bool:
    try:
        if int(sysctl("user/max_user_namespaces") or "0") == 0:
            return False
    except ValueError:
        return False
    if root:
        return True
    return sysctl("kernel/unprivileged_userns_clone") != "0" and not _apparmor_denies_user_namespaces()


def sysctl(name: str) -> str | None:
    """A setting of the kernel. None: this kernel does not have it."""
    try:
        return (_SYSCTLS / name).read_text().strip()
    except OSError:
        return None


def _apparmor_denies_user_namespaces() -> bool:
    """Whether AppArmor denies unprivileged user namespaces, as Ubuntu's does, to our keeper.

    The setting alone does not tell: a profile may permit it, and cannot be read without privilege. So it is tried, in
    a few milliseconds, where the setting is on.
    """
    if sysctl(APPARMOR_RESTRICTION) != "1":
        return False
    import subprocess  # loaded only where it is needed: every command reads the machine

    maps = ["--uid", "0", str(os.getuid()), "1", "--gid", "0", str(os.getgid()), "1"]
    attempt = [str(KEEPER), "nsexec", *maps, "--rootless", "--", "/bin/true"]
    try:
        return subprocess.run(attempt, capture_output=True, env={"PATH": PROGRAM_PATH}, check=False).returncode != 0
    except OSError:
        return True


def read_machine() -> Machine:
    """Read what the machine supports. Takes well under a millisecond; the answer holds for the life of the process."""
    root = os.geteuid() == 0
    cgroups = _cgroups(root)
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return Machine(
        root=root,
        kernel=(int(release[1]), int(release[2])) if release else (0, 0),
        cgroup_mode=cgroups.mode,
        controllers=cgroups.controllers,
        cgroup_parent=cgroups.parent,
        needs_scope=cgroups.needs_scope,
        user_namespaces=_user_namespaces(root),
        subuids=None if root else _sub_ids(Path("/etc/subuid")),
        subgids=None if root else _sub_ids(Path("/etc/subgid")),
    )
