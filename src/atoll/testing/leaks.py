"""Finds leaks: processes, mounts, cgroups, directories and descriptors of sandboxes that outlive a test.

Other tests may run on the same machine. Processes and mounts are recognised by the state directory or the sandbox's id
in them, cgroups by the id. Every id that was ever used below a watched state directory is known, whichever process used
it, through inotify. This looks at the machine only and does not use the API. Not here: when it is asked (`plugin.py`).
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio

from atoll.testing.waiting import SLOWNESS

POOLED_PORTS: set[int] = set()
"""Ports of the tests' own servers: connections to them are kept and closed as requests come, and are not counted."""
BOUND_S = 10.0 * SLOWNESS
"""How long processes and directories that go by themselves may take."""

_CGROUPS = Path("/sys/fs/cgroup")
_WATCHED: tuple[str, ...] = (
    *("sandboxes", "names", "ids", "uncommitted", "warm", "groups", "in-progress", "temporary-leases", "leases"),
    *("warm-pools", "layers", "checkpoints", "expiries", "volumes", "approvals"),
)
_ELSEWHERE = ("/run", "/tmp", "/dev/shm")
_IN_CREATE, _IN_MOVED_TO = 0x100, 0x80
_EVENT = struct.Struct("iIII")
_NUMBERED = re.compile(r"^(socket|pipe|anon_inode):\[?([a-z_]*).*")

libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Snapshot:
    """The machine at one moment, as far as it belongs to watched state directories."""

    pids: frozenset[int]
    """All processes. One that is not among them is new."""
    things: Counter[str]
    """Everything else, each as a readable line."""


class Ledger:
    """The state directories of this test process, and what exists on the machine because of them."""

    def __init__(self) -> None:
        self._notes = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._notes < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._state_dirs: list[str] = []
        self._watches: dict[int, str] = {}
        self._ids: dict[str, str] = {}

    def close(self) -> None:
        os.close(self._notes)

    def watch(self, state_dir: Path) -> None:
        """Watch a state directory. It must have no sandboxes yet."""
        sandboxes = state_dir / "sandboxes"
        sandboxes.mkdir(mode=0o700, parents=True, exist_ok=True)
        watch = libc.inotify_add_watch(self._notes, os.fsencode(sandboxes), _IN_CREATE | _IN_MOVED_TO)
        if watch < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch", str(sandboxes))
        self._watches[watch] = str(state_dir)
        self._state_dirs.append(str(state_dir))

    def unwatch(self, state_dir: Path) -> None:
        self._state_dirs.remove(str(state_dir))

    def look(self) -> Snapshot:
        """The machine now. Takes about a millisecond."""
        ids = self._known_ids()
        things = Counter(self._directories())
        things.update(self._cgroups(ids))
        things.update(self._mounts(ids))
        things.update(_descriptors())
        return Snapshot(frozenset(_pids()), things)

    def difference(self, before: Snapshot) -> list[str]:
        """What was added (+) and removed (-) since `before`, a line each. Empty: the machine is as it was."""
        now = self.look()
        lines = [f"+ {thing}" for thing in (now.things - before.things).elements()]
        lines += [f"- {thing}" for thing in (before.things - now.things).elements()]
        lines += [f"+ {process}" for process in self._processes(now.pids - before.pids)]
        return sorted(lines)

    async def settled(self, before: Snapshot) -> list[str]:
        """`difference`, once it is empty or `BOUND_S` have passed."""
        deadline = time.monotonic() + BOUND_S
        pause_s = 0.001
        while (lines := self.difference(before)) and time.monotonic() < deadline:
            await anyio.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.05)
        return lines

    def all_of(self, state_dir: Path) -> list[str]:
        """Everything that exists because of a state directory, a line each, except images and empty directories."""
        ids = self._known_ids()
        mine = [line for line in self._directories() if str(state_dir) in line]
        mine += [line for line in self._mounts(ids) if str(state_dir) in line]
        mine += [line for line in self._processes(_pids()) if str(state_dir) in line]
        return mine + list(self._cgroups({id for id, of in self._ids.items() if of == str(state_dir)}))

    def end_processes_of(self, state_dir: Path) -> None:
        """Kill the processes of a state directory, so that a failed test leaves none running."""
        for line in self._processes(_pids()):
            if str(state_dir) in line:
                with suppress(ProcessLookupError):
                    os.kill(int(line.split()[1]), signal.SIGKILL)

    # ---- the parts ----

    def _known_ids(self) -> Set[str]:
        """Every id that was ever used."""
        with suppress(BlockingIOError):
            while events := os.read(self._notes, 65536):
                at = 0
                while at < len(events):
                    watch, _, _, length = _EVENT.unpack_from(events, at)
                    name = events[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
                    if name:  # empty: a watched directory or its file system was removed
                        self._ids[os.fsdecode(name)] = self._watches[watch]
                    at += _EVENT.size + length
        return self._ids.keys()

    def _directories(self) -> Iterator[str]:
        for state_dir in self._state_dirs:
            runtimes = [f"run/{name}" for name in _entries(f"{state_dir}/run")]
            for directory in (*_WATCHED, *runtimes):
                for name in _entries(f"{state_dir}/{directory}"):
                    yield f"directory entry {state_dir}/{directory}/{name}"
        # Runtimes also create sockets and locks in other places.
        for place in _ELSEWHERE:
            for name in os.listdir(place):
                if "atoll-" in name and any(id in name for id in self._ids):
                    yield f"directory entry {place}/{name}"

    def _cgroups(self, ids: Set[str]) -> Iterator[str]:
        # Those of an unprivileged user are below what systemd delegates.
        delegated = _CGROUPS.glob("user.slice/user-*.slice/user@*.service/atoll")
        for parent in (_CGROUPS / "atoll", *_CGROUPS.glob("*/atoll"), *delegated):
            with suppress(FileNotFoundError, NotADirectoryError):
                for name in os.listdir(parent):
                    if name.partition(".")[0] in ids:
                        yield f"cgroup {parent}/{name}"

    def _mounts(self, ids: Set[str]) -> Iterator[str]:
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            if "atoll" in line and self._is_ours(line, ids):
                yield f"mount {line}"

    def _processes(self, pids: Set[int]) -> Iterator[str]:
        """Those of `pids` that belong to us: by their command line, cgroup or open files, also if these were removed,
        or as our children."""
        ids = self._known_ids()
        for pid in sorted(pids):
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                command = (
                    Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                )
                stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
                state, parent = stat.rpartition(") ")[2].split()[:2]
                mine = (
                    int(parent) == os.getpid()
                    or self._is_ours(command, ids)
                    or (state != "Z" and self._is_ours(Path(f"/proc/{pid}/cgroup").read_text(), ids))
                    or any(self._is_ours(path, ids) for path in _open_files(pid))
                )
                # gVisor keeps such processes for later, as many as its sandbox has once needed.
                pooled = (
                    state in {"t", "S"} and "(exe)" in stat and self._is_alive(Path(f"/proc/{pid}/cgroup").read_text())
                )
                if mine and not pooled and not _is_idle_helper(pid, stat, parent):
                    yield f"process {pid} ({state}) {command[:300] or stat.split(')')[0]}"

    def _is_alive(self, cgroup: str) -> bool:
        """Whether the sandbox of this cgroup still exists."""
        names = {line.partition("/atoll/")[2].partition(".")[0] for line in cgroup.splitlines()} - {"", "keepers"}
        return any(
            os.path.exists(f"{state_dir}/sandboxes/{name}/manifest.json")
            for state_dir in self._state_dirs
            for name in names
        )

    def _is_ours(self, text: str, ids: Set[str]) -> bool:
        return any(state_dir in text for state_dir in self._state_dirs) or (
            "atoll-" in text and any(id in text for id in ids)
        )


def _entries(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _is_idle_helper(pid: int, stat: str, parent: str) -> bool:
    """Whether it is a child that a guest keeps for its next job: a supervisor without children, or a worker that waits
    for a message. A guest keeps a worker for a second, which no test has to wait for."""
    if Path(f"/proc/{parent}/comm").read_text() != "atoll-guest\n":
        return False
    if "(atoll-worker) S" in stat:
        # "0" is what an unprivileged user is shown.
        return Path(f"/proc/{pid}/wchan").read_text() in {"__skb_wait_for_more_packets", "0"}
    return "(atoll-supervise)" in stat and not Path(f"/proc/{pid}/task/{pid}/children").read_text()


def _open_files(pid: int) -> Iterator[str]:
    """The files that another process has open. Those of a process that we may not trace are not shown."""
    if pid == os.getpid():
        return
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed meanwhile, or its path is longer than can be shown
                yield os.readlink(f"/proc/{pid}/fd/{name}")


def _peer_port(descriptor: int) -> int | None:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family == socket.AF_INET:
            return int(connection.getpeername()[1])
    return None


def _descriptors() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one that listed them
            continue
        if POOLED_PORTS and target.startswith("socket:") and _peer_port(int(name)) in POOLED_PORTS:
            continue
        yield "descriptor to " + _NUMBERED.sub(r"a \1 \2", target).strip()
