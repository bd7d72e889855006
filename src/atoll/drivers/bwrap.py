"""The driver for bubblewrap, for machines without an OCI runtime, as root or unprivileged. Used by name only.

It starts the same guest through the same keeper, on the same layers, as `oci.py` does. A sandbox has user, mount, PID,
network, IPC, UTS and cgroup namespaces; as root, its own range of user ids. Root inside has the same capabilities and
the same seccomp filter, cannot gain privileges, and has loopback alone for a network.

What it does not have, and why a sandbox never gets it without asking for it:
- No cgroups: no limit on memory, CPU time or the number of processes, no accounting of them, no freezing. A fork bomb
  or a full memory is the machine's. Processes are found by the guest's FIFO and end with the PID namespace.
- No saved processes: a checkpoint holds files.
- /proc/sys, /proc/bus, /proc/fs and /proc/irq are the host's, read-only (what depends on a namespace in them is shown
  for the sandbox's own).
- The tmpfs of /dev has no limit on its size, and its pseudo-terminals none on their number.

Not here: the keeper's part (`keeper_command.py`; `--foreground` in `keeper/keeper.c`), layers (`layer_store.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path, PurePath

import anyio

from atoll.contract.driver import Capabilities, Launch
from atoll.contract.errors import LaunchFailed, Unenforceable
from atoll.contract.inside import GUEST
from atoll.contract.model import Limits, RuntimeName, Usage
from atoll.drivers import bundle, seccomp, storage
from atoll.drivers.hostname import Hostnames
from atoll.drivers.keeper_client import KeeperSocket
from atoll.drivers.keeper_command import BIN, HostFile, KeeperCommand, kill_holder, kill_holders
from atoll.drivers.layer_store import OverlayLayerStore
from atoll.drivers.limits import check_change, check_limits
from atoll.drivers.machine import Machine, find_program

NAME: RuntimeName = "bwrap"
PACKAGE = "bubblewrap"
_FILTER_FD = 9
_SMALL_TMPFS = ("--size", str(64 * 1024 * 1024))
_MOUNTS = [
    *("--proc", "/proc", "--dev", "/dev", "--mqueue", "/dev/mqueue"),
    *("--perms", "1777", *_SMALL_TMPFS, "--tmpfs", "/dev/shm"),
    *("--perms", "0755", *_SMALL_TMPFS, "--tmpfs", "/run"),
]
_NAMESPACES = "--unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup-try --as-pid-1".split()
_WITH_FILTER = f'filter=$1; shift; exec "$@" {_FILTER_FD}<"$filter"'
"""bubblewrap takes the filter from a descriptor."""


def drivers(state_dir: Path, machine: Machine) -> Iterator[BwrapDriver]:
    """The driver, if bubblewrap is installed and this machine can use it."""
    if not machine.user_namespaces or (machine.root and not machine.id_mapped_overlay):
        return
    program, setpriv = find_program(NAME), find_program("setpriv")
    if program is not None and setpriv is not None:
        yield BwrapDriver(program, setpriv, state_dir, machine)


class BwrapDriver:
    """Implements `contract.driver.Driver`."""

    name = NAME

    def __init__(self, program: str, setpriv: str, state_dir: Path, machine: Machine) -> None:
        self._program = program
        self._setpriv = setpriv
        self._machine = machine
        self._run_dir = state_dir / "run"
        self._command = KeeperCommand(machine)
        self.layers = OverlayLayerStore(state_dir, machine)
        self.keeper = KeeperSocket(can_freeze=False)
        self._hostnames = Hostnames(machine, self.keeper)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            memory_limit=False,
            cpu_limit=False,
            pids_limit=False,
            id_range=self._machine.root,
            several_users=not self._machine.single_id,
            process_oom=True,
            memory_checkpoint=False,
            saves_epoll_waiters=True,
            terminal_keys=True,
            freeze=False,
            mounts=True,
            sudo=True,
            disk_limit=self.layers.can_limit,
            chosen_by_default=False,
        )

    # ---- starting ----

    async def launch(self, launch: Launch) -> None:
        check_limits(launch.limits, self.capabilities, self.name)
        if launch.memory is not None:
            raise LaunchFailed("bwrap cannot resume saved processes; use the runtime that saved them")
        if launch.limits.disk_bytes is not None:
            storage.prepare_quota(launch.active_layer, root=self._machine.root)
        self._run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        cover = self._command.choose_cover(launch.directory, self._program, self._setpriv)
        self._command.prepare(launch)
        files = [
            HostFile("guest", BIN / "guest", GUEST),
            HostFile("filter", self._filter(launch.directory), ""),
            HostFile(NAME, Path(self._program), ""),
        ]
        self._command.start(launch, cover, files, ["--foreground"], self._runtime(launch, cover))
        if launch.wait_ready:
            await self.keeper.wait_ready(launch.directory)

    def _filter(self, directory: Path) -> Path:
        """The compiled seccomp filter, in a file that root inside may read."""
        program = seccomp.compiled(self._run_dir)
        if program is None:
            raise LaunchFailed("bwrap needs libseccomp to filter system calls", hint="apt-get install libseccomp2")
        path = directory / "seccomp.bpf"
        path.write_bytes(program)
        path.chmod(0o644)
        return path

    def _runtime(self, launch: Launch, cover: str) -> list[str]:
        """The command that the keeper starts, as root of the sandbox's user namespace."""
        few = ",".join(f"+{name.removeprefix('CAP_').lower()}" for name in bundle.LINUX_CAPABILITIES)
        return [
            *("/bin/sh", "-c", _WITH_FILTER, "sh", f"{cover}/filter"),
            # bubblewrap leaves the bounding set as it is. Inheriting keeps for itself what the set lacks.
            *(self._setpriv, "--inh-caps", "+all", self._setpriv, "--bounding-set", f"-all,{few}"),
            *(f"{cover}/{NAME}", *_NAMESPACES, "--hostname", launch.hostname),
            *("--bind", f"{cover}/root", "/", *_MOUNTS, "--ro-bind", f"{cover}/guest", GUEST),
            *_sys(),
            *_hidden(),
            *_binds(launch, cover),
            *("--cap-drop", "ALL", *(word for name in bundle.LINUX_CAPABILITIES for word in ("--cap-add", name))),
            *(
                "--clearenv",
                *(w for name, value in bundle.GUEST_ENVIRONMENT.items() for w in ("--setenv", name, value)),
            ),
            *("--chdir", "/", "--seccomp", str(_FILTER_FD), "--", *bundle.guest_command(launch, self._machine)),
        ]

    def setting_hostname(
        self, id: str, directory: Path, hostname: str, id_base: int
    ) -> AbstractAsyncContextManager[None]:
        return self._hostnames.setting(directory, hostname, id_base)

    async def change_limits(self, id: str, active_layer: Path, changes: Limits, *, running: bool) -> None:
        check_change(changes, self.capabilities, self.name, running=running)
        if changes.disk_bytes is not None:
            storage.change_quota(active_layer, changes.disk_bytes, root=self._machine.root)

    # ---- ending ----

    async def stop(self, id: str, directory: Path) -> None:
        with anyio.CancelScope(shield=True):
            pid = self.pid(directory)
            if pid is None:
                # On SIGTERM, a keeper that is still starting the sandbox ends what it has started.
                await self._command.end(directory, patience_s=0)
                await kill_holders(directory)
            else:
                await kill_holder(pid, directory)
            await self._command.end(directory, patience_s=2)

    async def save(self, id: str, directory: Path, image: Path, *, lock: int) -> None:
        raise Unenforceable("bwrap cannot save running processes; use runsc as root")

    # ---- reading ----

    def pid(self, directory: Path) -> int | None:
        return self.keeper.pid(directory)

    def is_frozen(self, id: str) -> bool:
        return False

    def oom_kills(self, id: str) -> int | None:
        return None

    async def usage(self, id: str, active_layer: Path | None) -> Usage:
        return Usage(
            memory_bytes=None,
            memory_peak_bytes=None,
            cpu_s=None,
            pids=None,
            disk_bytes=0 if active_layer is None else await self.layers.size(active_layer / "upper"),
            oom_kills=None,
        )


def _sys() -> Iterator[str]:
    """/sys with what a sandbox sees of it."""
    yield from ("--perms", "0555", "--tmpfs", "/sys")
    for path in filter(os.path.isdir, bundle.SYS_PATHS):
        for parent in [*PurePath(path).parents][-3::-1]:  # those below /sys, the highest first
            yield from ("--perms", "0555", "--dir", str(parent))
        yield from ("--ro-bind", path, path)
    yield from ("--remount-ro", "/sys")


def _binds(launch: Launch, cover: str) -> Iterator[str]:
    for number, mount in enumerate(launch.mounts):
        for parent in [*PurePath(mount.target).parents][-2::-1]:  # bubblewrap would make them for root alone
            yield from ("--perms", "0755", "--dir", str(parent))
        kind = "--ro-bind" if mount.read_only else "--bind"
        yield from (kind, f"{cover}/{bundle.MOUNTS}/{number}", mount.target)


def _hidden() -> Iterator[str]:
    """Mounts over what of /proc must not be read, or written. A path that this kernel lacks cannot be mounted over."""
    for path in filter(os.path.exists, bundle.MASKED_PATHS):
        if os.path.isdir(path):
            yield from ("--perms", "0555", "--tmpfs", path, "--remount-ro", path)
        else:
            yield from ("--ro-bind", "/dev/null", path)
    for path in filter(os.path.exists, bundle.READ_ONLY_PATHS):
        yield from ("--ro-bind", path, path)
