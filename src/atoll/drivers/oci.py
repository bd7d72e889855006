"""The driver for OCI runtimes: crun, runc and runsc (gVisor), as root or as an unprivileged user.

Owns the runtime's command line, what differs between the three (`RUNTIMES`), and when a sandbox's cgroup is made and
removed. The security-critical work is the runtimes'. Not here: the OCI configuration (`bundle.py`), the keeper, which
mounts and holds the guest's stream (`keeper_command.py`, `keeper_client.py`), layers (`layer_store.py`).
Used by `registry.py`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import anyio

from atoll.contract.driver import Capabilities, Launch
from atoll.contract.errors import LaunchFailed, NotCheckpointable, SandboxError, Unenforceable
from atoll.contract.inside import GUEST
from atoll.contract.model import Limits, RuntimeName, Usage
from atoll.drivers import bundle, seccomp, storage
from atoll.drivers.cgroups import Cgroups
from atoll.drivers.hostname import Hostnames
from atoll.drivers.keeper_client import KeeperSocket
from atoll.drivers.keeper_command import BIN, HostFile, KeeperCommand, end_process, kill_holders
from atoll.drivers.layer_store import OverlayLayerStore
from atoll.drivers.limits import check_change, check_limits
from atoll.drivers.machine import Machine, find_program
from atoll.settings import program_environment

_SAVE_S = 600
"""How long gigabytes of memory may take to be written to disk."""
_END_S = 10
"""How long a killed process may take to end, before what is left of its cgroup is killed."""
_LOOK_S = 10
"""How long the search for what cannot be saved may take. Then the save is tried."""


class RuntimeTraits(NamedTuple):
    """What differs between the OCI runtimes. No other line here depends on a runtime's name."""

    name: RuntimeName
    package: str
    """The Debian package that installs it."""
    flags: tuple[str, ...] = ()
    """Options before the verb."""
    flags_if_known: tuple[str, ...] = ()
    """Options before the verb that some versions do not know: they get those whose name and value `flags` shows."""
    starts_in_cgroup: bool = True
    """The keeper starts it in the sandbox's cgroup. False: it insists on moving the sandbox there, which is slower."""
    own_user_namespace: bool = False
    """It makes the sandbox's user namespace. False: it joins the keeper's."""
    needs_second_id: bool = False
    """It runs processes of its own as another user than root."""
    hides_processes: bool = False
    """The host's kernel does not see the processes inside: no limit on their number, an out-of-memory kill ends the
    sandbox, and the hostname is set by a command inside."""
    max_host_threads: int | None = None
    """A bound on the host threads of a runtime that hides processes and never gives threads back: a sandbox that
    reaches it ends, before the machine runs out. Unset: the limit on processes applies."""
    saves_memory: bool = False
    """Root can save running processes to disk, and resume them."""
    save_flags_if_known: tuple[str, ...] = ()
    """Options of `checkpoint` that some versions do not know."""
    mark_of_old: bytes | None = None
    """A text that only old versions of the program have. Those cannot save all processes (see `_require_savable`) and
    give keys and sizes of terminals no meaning. No version number tells: gVisor is known by the error that saving a
    process which waits for a TCP socket with `epoll` gave until about 2023."""
    old_lacks: str | None = None
    """What these old versions lack, for `atoll doctor`."""
    kill_before_delete: bool = False
    """Its `delete` polls every 100 ms for the end of what it killed: killing through the cgroup first is faster."""
    state_is_processes: bool = False
    """It keeps nothing besides its processes, all of them in the cgroup, and files that `_forget` removes. Its `delete`
    is not needed then: gVisor's waits until its parent has reaped a child, crun's takes longer than all the rest."""
    mounts_in_proc: bool = False
    """It accepts mounts below /proc."""
    runs_from_copy: bool = False
    """It starts itself anew from a read-only mount, so that nothing inside can write to its program. Started from one,
    it need not, which saves a fifth of its time."""
    seccomp_annotation: str | None = None
    """The annotation that takes a compiled filter. A version that does not know it compiles the list itself."""
    statx_fixed: str | None = None
    """The release date since when `statx` knows AT_NO_AUTOMOUNT; before that, `ls` needs `statx.so`."""


RUNTIMES = (
    RuntimeTraits(
        name="crun",
        package="crun",
        flags=("--cgroup-manager=disabled",),
        mounts_in_proc=True,
        runs_from_copy=True,
        state_is_processes=True,
        seccomp_annotation="run.oci.seccomp_bpf_data",
    ),
    RuntimeTraits(name="runc", package="runc", starts_in_cgroup=False, kill_before_delete=True),
    RuntimeTraits(
        name="runsc",
        package="runsc",
        flags=("--network=none", "--ignore-cgroups", "--oci-seccomp"),
        # Since 2023 it keeps what is written to `/` in a file of its own, and only a save of the processes has it.
        # Design note 15: the newer platform, systrap, wakes up a thousand times a second while nothing runs inside.
        # With directfs, gVisor's kernel opens the sandbox's files itself, and has user ids and capabilities for that.
        flags_if_known=("--overlay2=none", "--platform=ptrace", "--directfs=false"),
        own_user_namespace=True,
        needs_second_id=True,
        hides_processes=True,
        max_host_threads=16384,
        saves_memory=True,
        # Compressing takes several times as long as writing. An attacker's memory does not get smaller by it.
        save_flags_if_known=("--compression=none", "--exclude-committed-zero-pages=true"),
        mark_of_old=b"endpoint still has waiters upon save",
        old_lacks="saving processes that wait for the network (asyncio, node), Ctrl-C in terminals, fast saves",
        kill_before_delete=True,
        state_is_processes=True,
        statx_fixed="20240101",
    ),
)
"""Fastest first."""


def drivers(state_dir: Path, machine: Machine) -> Iterator[OciDriver]:
    """The runtimes that are installed and that this machine can use, fastest first."""
    if not machine.user_namespaces or (machine.root and not machine.id_mapped_overlay):
        return
    for traits in RUNTIMES:
        program = find_program(traits.name)
        if program is not None and not (traits.needs_second_id and machine.single_id):
            yield OciDriver(traits, program, state_dir, machine)


def find_older() -> dict[RuntimeName, str]:
    """The runtimes that are installed in an old version, and what that lacks."""
    installed = ((traits, find_program(traits.name)) for traits in RUNTIMES if traits.old_lacks)
    return {
        traits.name: traits.old_lacks
        for traits, program in installed
        if program and traits.old_lacks and _is_old(traits, program)
    }


def _is_old(traits: RuntimeTraits, program: str) -> bool:
    """Takes 5 ms."""
    if traits.mark_of_old is None:
        return False
    with open(program, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return text.find(traits.mark_of_old) >= 0


class OciDriver:
    """One OCI runtime. Implements `contract.driver.Driver`."""

    def __init__(self, traits: RuntimeTraits, program: str, state_dir: Path, machine: Machine) -> None:
        self._traits = traits
        self._program = program
        self._machine = machine
        self._root = state_dir / "run" / traits.name
        self._cgroups = Cgroups(machine)
        self._command = KeeperCommand(machine)
        self.layers = OverlayLayerStore(state_dir, machine)
        self.keeper = KeeperSocket(can_freeze="memory" in machine.controllers)
        self._hostnames = Hostnames(machine, self.keeper)
        self._capabilities: dict[bool, Capabilities] = {}

    @property
    def name(self) -> RuntimeName:
        return self._traits.name

    @property
    def capabilities(self) -> Capabilities:
        can_limit = self.layers.can_limit
        if can_limit not in self._capabilities:
            self._capabilities[can_limit] = self._declare(disk_limit=can_limit)
        return self._capabilities[can_limit]

    def _declare(self, *, disk_limit: bool) -> Capabilities:
        controllers, hides = self._machine.controllers, self._traits.hides_processes
        saves = self._traits.saves_memory and self._machine.root
        return Capabilities(
            memory_limit="memory" in controllers,
            cpu_limit="cpu" in controllers,
            pids_limit="pids" in controllers and not hides,
            id_range=self._machine.root,
            several_users=not self._machine.single_id,
            process_oom=not hides,
            memory_checkpoint=saves,
            saves_epoll_waiters=not saves or not self._is_old,
            terminal_keys=not self._is_old,
            freeze="memory" in controllers,
            mounts=True,
            sudo=True,
            disk_limit=disk_limit,
            chosen_by_default=True,
        )

    @cached_property
    def _is_old(self) -> bool:
        return _is_old(self._traits, self._program)

    # ---- starting ----

    async def launch(self, launch: Launch) -> None:
        check_limits(launch.limits, self.capabilities, self.name)
        if launch.limits.disk_bytes is not None:
            storage.prepare_quota(launch.active_layer, root=self._machine.root)
        directory = launch.directory
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        cover = self._command.choose_cover(directory, self._root, self._program)
        self._command.prepare(launch)
        files = self._files(directory)
        (directory / "config.json").write_text(json.dumps(self._config(launch, cover, files)))
        verb = ["run"] if launch.memory is None else ["restore", "--image-path", str(launch.memory.path)]
        run = [*verb, "--detach", "--pid-file", str(directory / "pid"), "--bundle", str(directory), launch.id]
        program, *options = self._runtime()
        if self._traits.runs_from_copy:
            files.append(HostFile(self.name, Path(program), ""))
            program = f"{cover}/{self.name}"
        scratch = [] if self._traits.hides_processes else ["--scratch", str(bundle.SCRATCH_BYTES)]
        self._command.start(
            launch, cover, files, [*scratch, *self._cgroup_options(launch)], [program, *options, *run], self._env()
        )
        if launch.memory is not None or launch.wait_ready:
            await self.keeper.wait_ready(directory)
        if launch.memory is not None and launch.memory.hostname != launch.hostname:
            async with self.setting_hostname(launch.id, launch.directory, launch.hostname, launch.id_base):
                pass

    def _runtime(self) -> list[str]:
        return [self._program, "--root", str(self._root), *self._flags]

    @cached_property
    def _flags(self) -> tuple[str, ...]:
        return (*self._traits.flags, *self._known(self._traits.flags_if_known, "flags"))

    @cached_property
    def _save_flags(self) -> tuple[str, ...]:
        return self._known(self._traits.save_flags_if_known, "help", "checkpoint")

    def _known(self, flags: tuple[str, ...], *help: str) -> tuple[str, ...]:
        """Those of `flags` that the program describes in the output of `help`, with the value if it is no switch."""
        if not flags:
            return ()
        described = dict(re.findall(r"^ +-(\S+).*\n(.*)", self._output(*help), re.MULTILINE))
        options = ((flag, *flag.lstrip("-").split("=")) for flag in flags)
        return tuple(
            flag
            for flag, name, value in options
            if name in described and (value in {"true", "false"} or re.search(rf"\b{value}\b", described[name]))
        )

    def _output(self, *words: str) -> str:
        """What the program prints about itself. Takes 20 ms."""
        command, env = [self._program, *words], program_environment()
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, check=False
        ).stdout

    def _env(self) -> dict[str, str]:
        return {"XDG_RUNTIME_DIR": str(self._root)}

    def _config(self, launch: Launch, cover: str, files: list[HostFile]) -> dict[str, object]:
        annotation = None
        if self._traits.seccomp_annotation and (program := seccomp.compiled(self._root.parent)):
            annotation = (self._traits.seccomp_annotation, program)
        return bundle.config(
            launch,
            self._machine,
            cover=cover,
            files=files,
            cgroup=None if self._traits.starts_in_cgroup else self._cgroups.runtime_path(launch.id),
            own_user_namespace=self._traits.own_user_namespace,
            own_kernel=self._traits.hides_processes,
            mounts_in_proc=self._traits.mounts_in_proc,
            refuse=self.capabilities.saves_epoll_waiters,  # the guest waits for the port so
            seccomp_annotation=annotation,
        )

    def _cgroup_options(self, launch: Launch) -> list[str]:
        """The keeper's options for the cgroup that the sandbox starts in, the freezer and the limits."""
        options = []
        if self._traits.starts_in_cgroup:
            for path in self._cgroups.make(launch.id):
                options += ["--cgroup", str(path)]
        if "memory" in self._machine.controllers:
            options += ["--freezer", *self._cgroups.freezer(launch.id)]
            if launch.pause_after_s is not None:
                options += ["--pause-after", str(max(1, round(launch.pause_after_s * 1000)))]
            if self._traits.hides_processes:
                options += ["--oom", str(self._cgroups.oom_file(launch.id))]
        limits = launch.limits
        if self._traits.max_host_threads is not None and "pids" in self._machine.controllers:
            limits = limits.model_copy(update={"pids": self._traits.max_host_threads})
        for file, value in self._cgroups.settings(launch.id, limits):
            options += ["--limit", str(file), value]
        return options

    def _files(self, directory: Path) -> list[HostFile]:
        if not self._traits.hides_processes:
            sys = (HostFile(path[1:], Path(path), path) for path in bundle.SYS_PATHS if os.path.isdir(path))
            return [HostFile(GUEST[1:], BIN / "guest", GUEST), *sys]
        files = [HostFile("guest", BIN / "guest", GUEST)]
        if self._needs_statx_library:
            preload = directory / "ld.so.preload"
            preload.write_text("/run/atoll/statx.so\n")
            files += [
                HostFile("statx.so", BIN / "statx.so", "/run/atoll/statx.so"),
                HostFile("preload", preload, "/etc/ld.so.preload"),
            ]
        return files

    @cached_property
    def _needs_statx_library(self) -> bool:
        if self._traits.statx_fixed is None:
            return False
        date = re.search(r"\b(20\d{6})\b", self._output("--version"))
        return date is not None and date[1] < self._traits.statx_fixed

    @contextlib.asynccontextmanager
    async def setting_hostname(self, id: str, directory: Path, hostname: str, id_base: int) -> AsyncIterator[None]:
        if not self._traits.hides_processes:
            async with self._hostnames.setting(directory, hostname, id_base):
                yield
            return
        yield
        order = ["exec", "--user", "0:0", "--cap", "CAP_SYS_ADMIN", id, GUEST, "--hostname", hostname]
        done = await self._command.run_nsexec(*self._runtime(), *order, env=self._env())
        if done.returncode != 0:
            error = done.stderr.decode(errors="replace").strip()[-500:]
            raise LaunchFailed(f"the sandbox's hostname could not be set: {error}")

    async def change_limits(self, id: str, active_layer: Path, changes: Limits, *, running: bool) -> None:
        check_change(changes, self.capabilities, self.name, running=running)
        if changes.disk_bytes is not None:
            storage.change_quota(active_layer, changes.disk_bytes, root=self._machine.root)
        if running:
            await anyio.to_thread.run_sync(self._cgroups.change, id, changes)  # freeing memory takes the kernel a while

    # ---- ending ----

    async def stop(self, id: str, directory: Path) -> None:
        with anyio.CancelScope(shield=True):
            self._cgroups.thaw(id)  # a frozen process does not die
            pid = self.pid(directory)
            if pid is None:
                await self._command.end(directory, patience_s=0)
                await kill_holders(directory)  # as a start that was killed may have left them
            elif self._is_kept_in_cgroup:
                with anyio.move_on_after(_END_S):  # with the first process, all of its PID namespace have ended
                    await end_process(pid, lambda: self.pid(directory) == pid)
            if self._traits.kill_before_delete or pid is None:
                await self._cgroups.kill(id)
            await self._delete(id, is_dead=pid is None)
            await self._command.end(directory, patience_s=2)
            await self._cgroups.remove(id)

    @property
    def _is_kept_in_cgroup(self) -> bool:
        """All that there is of a running sandbox is in its cgroup, and the runtime is not needed to end it."""
        return self._traits.state_is_processes and bool(self._machine.controllers)

    async def _delete(self, id: str, *, is_dead: bool) -> None:
        """Have the runtime end and forget the container. That there is none is fine.

        With `is_dead`, none of its processes is left: the runtime's record of it may be incomplete, since it was killed
        while it wrote it, and is removed if the runtime cannot read it.
        """
        known = any((self._root / name).exists() for name in (id, f"{id}_sandbox:{id}.state"))
        if not known or self._is_kept_in_cgroup:
            self._forget(id)
            return
        done = await self._command.run_nsexec(*self._runtime(), "delete", "--force", id, env=self._env())
        if is_dead:
            self._forget(id)
        if (self._root / id).exists():  # whatever its exit code
            error = done.stderr.decode(errors="replace").strip()[-500:] or f"exit code {done.returncode}"
            raise SandboxError(f"{self.name} could not delete the sandbox: {error}", id=id)
        self._forget(id)

    def _forget(self, id: str) -> None:
        """Remove the files of a container that the runtime did not delete itself."""
        import shutil

        shutil.rmtree(self._root / id, ignore_errors=True)
        if self._traits.hides_processes:  # gVisor's lock and control socket
            for left in (*self._root.glob(f"{id}_sandbox:*"), self._root / f"runsc-{id}.sock"):
                left.unlink(missing_ok=True)

    async def save(self, id: str, directory: Path, image: Path, *, lock: int) -> None:
        if not self.capabilities.memory_checkpoint:
            raise Unenforceable(f"{self.name} cannot save running processes here; use runsc as root")
        await self._require_savable(id)
        await self.layers.remove(image)  # gVisor refuses a directory that an earlier save has used
        image.mkdir(mode=0o700)
        flags = await anyio.to_thread.run_sync(lambda: self._save_flags)
        command = [*self._runtime(), "checkpoint", *flags, "--image-path", str(image), id]
        async with self.keeper.quiesced(directory):
            done = await self._command.run_nsexec(*command, within_s=_SAVE_S, pass_fds=(lock,), env=self._env())
        if done.returncode != 0:
            error = done.stderr.decode(errors="replace").strip().partition("\n")[0][:300]  # a stack trace follows
            raise SandboxError(f"{self.name} could not write the sandbox's processes to disk: {error}")

    async def _require_savable(self, id: str) -> None:
        """
        Raises:
            NotCheckpointable: a process holds something that this runtime cannot save: it would fail and end them all.
        """
        look = ["exec", "--user", "0:0", "--cap", "CAP_SYS_PTRACE", id, GUEST, "--unsavable"]
        if self._is_old:  # it loses message queues too
            look.append("queues")
        found: list[str] = []
        with contextlib.suppress(SandboxError):
            if self.is_frozen(id):
                self._cgroups.thaw(id)
            done = await self._command.run_nsexec(*self._runtime(), *look, within_s=_LOOK_S, env=self._env())
            # Root inside may have forged this: it is shown, and nothing else.
            found = [line for line in done.stdout.decode(errors="replace").splitlines() if line.count("\t") == 2]
        if found:
            held = (line.split("\t") for line in found[:3])
            shown = ", ".join(f"{pid[:10]} ({command[:60]}) holds {what[:200]}" for pid, what, command in held)
            raise NotCheckpointable(
                f"{self.name} cannot save these processes: {shown}; end them or have them close it first, or pause the "
                "sandbox instead"
            )

    # ---- reading ----

    def pid(self, directory: Path) -> int | None:
        return self.keeper.pid(directory)

    def is_frozen(self, id: str) -> bool:
        return self._cgroups.is_frozen(id)

    def oom_kills(self, id: str) -> int | None:
        return self._cgroups.oom_kills(id)

    async def usage(self, id: str, active_layer: Path | None) -> Usage:
        return Usage(
            memory_bytes=self._cgroups.read(id, "memory/memory.usage_in_bytes", "memory.current"),
            memory_peak_bytes=self._cgroups.read(id, "memory/memory.max_usage_in_bytes", "memory.peak"),
            cpu_s=self._cgroups.cpu_s(id),
            pids=self._cgroups.read(id, "pids/pids.current", "pids.current"),
            disk_bytes=0 if active_layer is None else await self.layers.size(active_layer / "upper"),
            oom_kills=self.oom_kills(id),
            cache_bytes=self._cgroups.cache_bytes(id),
        )
