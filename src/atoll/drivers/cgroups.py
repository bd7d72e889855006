"""Makes, limits, reads, freezes and removes the cgroup of a sandbox, and the one that all keepers share.

Owns the files of cgroup v1 and v2. Not here: which processes are in one (`oci.py`, the keeper), and where an
unprivileged user's are (`machine.py`). A sandbox's cgroup is `atoll/<id>`, in each v1 hierarchy that is used, or in the
one of v2. Keepers are in `atoll/keepers` where systemd knows processes by their cgroup, so that none is killed with the
unit that has started it (`docs/design/0016-systemd.md`).

crun and runsc do not manage cgroups for us: the keeper's child *begins* in the cgroup and becomes the runtime there.
Moving a process into a v1 cgroup from outside waits for an RCU grace period, some ten milliseconds, half of what a
whole start takes; a thread that moves itself, or a child that is born in a v2 cgroup, does not wait. The limits are
set when the runtime is done and before the guest gets its first frame, so that they bind the sandbox and not the
runtime's own memory and threads. `docs/design/0002-cgroups.md` has the figures.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
from pathlib import Path

import anyio

from atoll.contract.errors import InvalidRequest, LaunchFailed, SandboxError
from atoll.contract.model import Limits
from atoll.drivers.locks import read_small
from atoll.drivers.machine import CGROUP_ROOT, PROGRAM_PATH, Machine, find_program

_V1 = ("memory", "cpu", "cpuacct", "pids", "freezer")
_V2 = ("memory", "cpu", "pids")
_SYSTEMD_V1 = ("unified", "systemd")
"""The hierarchies by which systemd knows processes on a machine with v1: hybrid machines have both."""
_INIT_CGROUP = Path("/proc/1/cgroup")
_OPTIONAL = ("memory.memsw.limit_in_bytes", "memory.swap.max", "memory.kmem.tcp.limit_in_bytes")
"""Files that a kernel may lack. One that does not account for swap has no swap that could evade the limit."""
_PERIOD_US = 100_000
_POLL_S = 0.002
_KILL_POLLS, _REMOVE_POLLS = 1000, 5000
_MOVES = 10
"""How often processes are moved out of the way: some may be forked meanwhile."""


class Cgroups:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._mode = machine.cgroup_mode if machine.controllers or machine.cgroup_parent else "none"
        self._parents: list[Path] = []
        self._keepers: list[Path] = []
        if self._mode == "v1":
            hierarchies = {os.path.realpath(CGROUP_ROOT / name) for name in _V1}
            self._parents = [Path(path) / "atoll" for path in sorted(hierarchies) if os.path.isdir(path)]
            of_systemd = [CGROUP_ROOT / name for name in _SYSTEMD_V1]
            usable = (path for path in of_systemd if os.access(path / "cgroup.procs", os.W_OK))
            self._keepers = [path / "atoll" / "keepers" for path in usable]
        elif self._mode == "v2":
            self._v2 = (machine.cgroup_parent or CGROUP_ROOT) / "atoll"
            self._parents = [self._v2]
            self._keepers = [self._v2 / "keepers"]

    def paths(self, id: str) -> list[Path]:
        return [parent / id for parent in self._parents]

    def make(self, id: str) -> list[Path]:
        """Make the sandbox's cgroup. Returns the directories that its first process has to be in.

        Raises:
            LaunchFailed: the machine refused.
        """
        if not self._machine.controllers:
            return []
        self.make_parents()
        try:
            for path in self.paths(id):
                path.mkdir()
        except OSError as error:
            raise LaunchFailed(f"cannot make a cgroup: {error}", hint="atoll doctor") from error
        return self.paths(id)

    def make_parents(self) -> None:
        """Make the cgroups above those of sandboxes, and complete those that a killed process has left half-made.

        Raises:
            LaunchFailed: the machine refused.
        """
        try:
            for parent in self._parents:
                if not parent.is_dir():
                    parent.mkdir(exist_ok=True)
                if self._mode == "v2":
                    for above in (parent.parent, parent):
                        self._enable_controllers(above)
        except OSError as error:
            raise LaunchFailed(f"cannot make a cgroup: {error}", hint="atoll doctor") from error

    def _enable_controllers(self, above: Path) -> None:
        """v2: a controller must be enabled in the cgroups above the one that uses it."""
        file = above / "cgroup.subtree_control"
        enabled = file.read_text().split()
        missing = [name for name in _V2 if name in self._machine.controllers and name not in enabled]
        for _ in range(_MOVES):
            if not missing:
                return
            try:
                file.write_text(" ".join(f"+{name}" for name in missing))
                return
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                if not _is_root_of_container(above):
                    break
            _move_processes(above, above / "init")
        raise LaunchFailed(
            f"the cgroup controllers {', '.join(missing)} cannot be enabled in {above}: processes are in it; "
            "move them to a cgroup below it",
            hint=f"mkdir -p {above}/init && xargs -rn1 <{above}/cgroup.procs >{above}/init/cgroup.procs",
        )

    # ---- keepers ----

    def keepers(self) -> list[Path]:
        """The cgroups that a new keeper has to be in, one per hierarchy. It makes them itself.

        Raises:
            LaunchFailed: the machine refused to make the cgroups above.
        """
        if not self._machine.controllers:
            return []
        try:
            for path in self._keepers:
                path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise LaunchFailed(f"cannot make a cgroup: {error}", hint="atoll doctor") from error
        return self._keepers

    def remove_keepers(self) -> None:
        """Remove the cgroup of keepers if none is left."""
        for path in self._keepers:
            with contextlib.suppress(OSError):
                path.rmdir()

    def remove_parents(self) -> None:
        """Remove the cgroups above those of sandboxes and keepers, unless there are any, of any state directory."""
        self.remove_keepers()
        parents = {*self._parents, *(path.parent for path in self._keepers)}
        if self._mode == "v1":
            parents |= {CGROUP_ROOT / name / "atoll" for name in os.listdir(CGROUP_ROOT)}  # see `remove`
        for path in parents:
            with contextlib.suppress(OSError):
                path.rmdir()

    def try_out(self) -> None:
        """Do what a new sandbox's cgroup and keeper need, short of making them.

        Raises:
            LaunchFailed: the machine refused.
        """
        self.make_parents()
        self.keepers()
        if self._machine.needs_scope:
            command, env = self.launcher(["/bin/true"], {"PATH": PROGRAM_PATH})
            tried = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
            if tried.returncode != 0:
                raise LaunchFailed(
                    f"the user's systemd starts no scope: {tried.stderr.strip()}", hint=" ".join(command)
                )

    def launcher(self, keeper: list[str], env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        """The command that starts a keeper, and its environment.

        The kernel lets an unprivileged process enter another cgroup only if it may also write to the one above both. In
        the session of a login it may not: there the user's systemd starts the keeper, in a scope that ends when the
        keeper has moved on.
        """
        if not self._machine.needs_scope:
            return keeper, env
        scope = [find_program("systemd-run") or "systemd-run", "--user", "--scope", "--quiet", "--collect"]
        scope += [f"--setenv={name}={value}" for name, value in env.items()]
        return [*scope, "--", *keeper], env | {"XDG_RUNTIME_DIR": f"/run/user/{os.geteuid()}"}

    # ---- limits ----

    def settings(self, id: str, limits: Limits) -> list[tuple[Path, str]]:
        """Which value to write to which file for `limits` to be enforced, in order.

        Raises:
            LaunchFailed: the machine refused to make the cgroup above.
        """
        if self._machine.controllers:
            self.make_parents()
        v2 = self._mode == "v2"
        wanted: list[tuple[str, str, str, str | None]] = []
        if limits.memory_bytes is not None:
            size = str(limits.memory_bytes)
            wanted.append(("memory", "memory.limit_in_bytes", "memory.max", size))
            # No swap beyond the limit. v1 counts memory and swap together, v2 swap alone.
            wanted.append(("memory", "memory.memsw.limit_in_bytes", "memory.swap.max", "0" if v2 else size))
            if not v2:
                # v2 counts socket buffers as memory. v1 counts those of TCP by themselves, and those of UDP not at all.
                wanted.append(("memory", "memory.kmem.tcp.limit_in_bytes", "", size))
        if limits.cpus is not None:
            quota = str(max(1000, int(limits.cpus * _PERIOD_US)))
            wanted.append(("cpu", "cpu.cfs_quota_us", "cpu.max", f"{quota} {_PERIOD_US}" if v2 else quota))
        if limits.pids is not None:
            wanted.append(("pids", "pids.max", "pids.max", str(limits.pids + 1)))  # the guest is one of them
        settings = []
        for controller, v1_file, v2_file, value in wanted:
            path = self._v2 / id / v2_file if v2 else CGROUP_ROOT / controller / "atoll" / id / v1_file
            optional = path.name in _OPTIONAL
            if value is not None and (not optional or (path.parents[1] / path.name).exists()):
                settings.append((path, value))
        return settings

    def change(self, id: str, changes: Limits) -> None:
        """Enforce `changes`, the limits that are set, in the cgroup of a sandbox that runs. None of its processes ends.

        Raises:
            InvalidRequest: it uses more memory than the new limit, and the kernel could not free enough.
            SandboxError: the kernel refused.
        """
        self._require_memory(id, changes)
        left = self.settings(id, changes)
        # v1 keeps memory and swap together above memory alone: raised, they are set in the other order than lowered.
        for last in (False, True):
            failed = []
            for path, value in left:
                try:
                    path.write_text(value)
                except OSError as error:
                    if error.errno == errno.EBUSY and path.name == "memory.limit_in_bytes":
                        raise _uses_more(changes) from error
                    if last:
                        raise SandboxError(f"the limit {path.name} = {value} could not be set: {error}") from error
                    failed.append((path, value))
            left = failed

    def _require_memory(self, id: str, changes: Limits) -> None:
        """v2 kills processes until a new limit holds. What is only cached is given back before that."""
        if self._mode != "v2" or changes.memory_bytes is None:
            return
        used, cached, shared = (
            self.read(id, "", file, key) or 0
            for file, key in (("memory.current", None), ("memory.stat", "file"), ("memory.stat", "shmem"))
        )
        if used - (cached - shared) > changes.memory_bytes:
            raise _uses_more(changes)

    def read(self, id: str, v1: str, v2: str, key: str | None = None) -> int | None:
        """A number from the sandbox's cgroup: the whole file, or the value of `key`. None: not accounted for here."""
        if self._mode == "none":
            return None
        if self._mode == "v2":
            path = f"{self._v2}/{id}/{v2}"
        else:
            controller, file = v1.split("/")
            path = f"{CGROUP_ROOT}/{controller}/atoll/{id}/{file}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            text = os.read(fd, 4096).decode()
        finally:
            os.close(fd)
        if key is None:
            return int(text)
        return next((int(line.split()[1]) for line in text.splitlines() if line.split()[0] == key), None)

    def cache_bytes(self, id: str) -> int | None:
        return self.read(id, "memory/memory.stat", "memory.stat", "file" if self._mode == "v2" else "total_cache")

    def oom_kills(self, id: str) -> int | None:
        return self.read(id, "memory/memory.oom_control", "memory.events", "oom_kill")

    def oom_file(self, id: str) -> Path:
        """For the keeper: the file that has the number of out-of-memory kills."""
        if self._mode == "v2":
            return self._v2 / id / "memory.events"
        return CGROUP_ROOT / "memory" / "atoll" / id / "memory.oom_control"

    def runtime_path(self, id: str) -> str | None:
        """The sandbox's cgroup as a runtime wants it, that moves the sandbox there: from a hierarchy's root."""
        if not self._machine.controllers and not self._machine.root:
            return None
        parent = self._machine.cgroup_parent or CGROUP_ROOT
        return f"/{(parent / 'atoll' / id).relative_to(CGROUP_ROOT)}"

    def cpu_s(self, id: str) -> float | None:
        if self._mode == "v2":
            micro = self.read(id, "", "cpu.stat", "usage_usec")
            return None if micro is None else micro / 1e6
        nano = self.read(id, "cpuacct/cpuacct.usage", "")
        return None if nano is None else nano / 1e9

    def _freezer(self, id: str) -> str:
        if self._mode == "v2":
            return f"{self._v2}/{id}/cgroup.freeze"
        return f"{CGROUP_ROOT}/freezer/atoll/{id}/freezer.state"

    def is_frozen(self, id: str) -> bool:
        return self._mode != "none" and read_small(self._freezer(id)).strip() not in (b"", b"0", b"THAWED")

    def freezer(self, id: str) -> list[str]:
        """For the keeper: the file to write, the values that freeze and thaw, the file to read, its line if frozen."""
        file = self._freezer(id)
        if self._mode == "v2":
            return [file, "1", "0", str(Path(file).with_name("cgroup.events")), "frozen 1"]
        return [file, "FROZEN", "THAWED", file, "FROZEN"]

    def thaw(self, id: str) -> None:
        if self._mode != "none":
            with contextlib.suppress(FileNotFoundError):
                Path(self._freezer(id)).write_text("0" if self._mode == "v2" else "THAWED")

    async def kill(self, id: str) -> None:
        """Kill the processes in the sandbox's cgroup, and wait some seconds for their end. No cgroup is no error."""
        for _ in range(_KILL_POLLS):
            if not any(_killed(path) for path in self.paths(id)):
                return
            await anyio.sleep(_POLL_S)

    async def remove(self, id: str) -> None:
        """Kill what is left in the sandbox's cgroup and remove it. No cgroup is no error.

        Raises:
            SandboxError: a process in it does not end.
        """
        everywhere = [f"{path}/{id}" for path in self._parents]
        if self._mode == "v1":  # runc makes one in every hierarchy, also in those that are not used here
            everywhere = [f"{CGROUP_ROOT}/{name}/atoll/{id}" for name in os.listdir(CGROUP_ROOT)]
        for _ in range(_REMOVE_POLLS):
            left = [path for path in everywhere if not _removed(path)]
            if not left:
                return
            for path in left:
                _killed(path)
            await anyio.sleep(_POLL_S)
        raise SandboxError("processes of the sandbox do not end", hint=f"see cgroup.procs in {self.paths(id)}")


def _uses_more(changes: Limits) -> InvalidRequest:
    return InvalidRequest(
        f"the sandbox uses more memory now than {changes.memory_bytes} bytes; end some of its processes, or allow more"
    )


def _is_root_of_container(cgroup: Path) -> bool:
    """Whether a container's first process is in this cgroup, which then is the container's, with no one to manage it.

    `cgroup.type` is missing in the kernel's own root; a service manager, such as systemd, leaves the root to be in a
    cgroup below; and a process that has entered a cgroup namespace without a PID namespace sees another PID 1.
    """
    try:
        return cgroup == CGROUP_ROOT and (cgroup / "cgroup.type").exists() and _INIT_CGROUP.read_text() == "0::/\n"
    except OSError:
        return False


def _move_processes(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for pid in (source / "cgroup.procs").read_text().split():
        if pid == "0":  # of a process outside of our PID namespace, which cannot be moved; written, it would mean us
            continue
        with contextlib.suppress(ProcessLookupError):
            (target / "cgroup.procs").write_text(pid)


def _killed(path: Path | str) -> bool:
    """Kill the processes in a cgroup. Whether there were any."""
    try:
        with open(f"{path}/cgroup.procs") as file:
            pids = file.read().split()
    except OSError:
        return False
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(int(pid), signal.SIGKILL)
    return bool(pids)


def _removed(path: str) -> bool:
    try:
        os.rmdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return True
