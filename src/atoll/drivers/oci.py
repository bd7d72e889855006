"""Isolation by an OCI runtime: crun, runc or runsc (gVisor), as root or as an ordinary user.

Knows the OCI configuration, what differs between the three, and where a sandbox's cgroup is. The security-critical
work is theirs; mounts and the guest's stream are the keeper's (`keeper/`). Refuses to know names, images and the
protocol. Above it stands `runtime/engine.py`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import mmap
import os
import re
import resource
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread

from atoll.contract.driver import Capabilities, Diagnostic, Launch, Layer
from atoll.contract.errors import LaunchFailed, SandboxError, Unenforceable
from atoll.contract.model import Limits, RuntimeName, Usage
from atoll.drivers import seccomp, storage
from atoll.drivers.cgroups import Cgroups
from atoll.drivers.hostname import set_hostname
from atoll.drivers.keeper_client import freezing, reconfigure, wait_ready
from atoll.drivers.locks import is_held, lock_within, try_lock
from atoll.drivers.machine import Machine, read_machine
from atoll.settings import program_environment

RUNTIMES: tuple[RuntimeName, ...] = ("crun", "runc", "runsc")
"""Fastest first."""
ID_COUNT = 65535
"""Ids of a sandbox's range that exist inside. The one after them is the keeper's: nothing inside can be it."""
MACHINE_IDS = 0x0FFF_0000
"""Host ids that no sandbox has, below those of all ranges: whom the files of the machine's own layers belong to."""
GUEST_INSIDE = "/run/atoll/guest"
_BIN = Path(__file__).resolve().parent.parent / "_bin"
_SEARCH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])
_COVERS = ("/mnt", "/media", "/srv", "/dev/shm")
_STATX_MENDED = "20240101"
"""A gVisor of this date or later knows AT_NO_AUTOMOUNT; for some older ones the help is not needed, but harmless."""
_GVISOR_THREADS = 16384
"""gVisor makes several threads on the host for each process inside, and never gives them back. No limit on processes
can be made of that, but a bound: a sandbox that reaches it ends, before the machine runs out."""
_OF_A_RUN = ("in", "out", "sock", "pid", ".pid", "ended", "runtime.log", "keeper.log")
"""What a start leaves in a sandbox's directory, and the next one makes anew. `.pid` is runc's, if it is killed."""
_SAVE_S = 600
_WAITERS = b"endpoint still has waiters upon save"
"""How long gigabytes may take to be written, or a million files to be removed."""
_PACKAGES = {"crun": "crun", "runc": "runc", "runsc": "runsc"}

_CAPABILITIES = [
    f"CAP_{name}"
    for name in (
        "CHOWN DAC_OVERRIDE FOWNER FSETID KILL NET_BIND_SERVICE SETFCAP SETGID SETPCAP SETUID SYS_CHROOT".split()
    )
]
"""What a package manager needs, and the guest. Without SYS_PTRACE nobody inside can reach into the guest."""

_MASKED = """
/proc/acpi /proc/asound /proc/interrupts /proc/kcore /proc/keys /proc/latency_stats /proc/sched_debug /proc/scsi
/proc/timer_list /proc/timer_stats /sys/devices/virtual/powercap /sys/firmware /sys/kernel/debug
""".split()
_READ_ONLY = "/proc/bus /proc/fs /proc/irq /proc/sys /proc/sysrq-trigger".split()


class _File(NamedTuple):
    name: str
    source: Path
    destination: str

    def mount(self, cover: str) -> dict[str, object]:
        options = ["bind", "ro", "nosuid", "nodev"]
        return {
            "destination": self.destination,
            "type": "bind",
            "source": f"{cover}/{self.name}",
            "options": options,
        }


def find_program(name: str) -> str | None:
    return shutil.which(name, path=_SEARCH)


class OciDriver:
    """One OCI runtime. Implements `contract.driver.Driver`."""

    def __init__(self, name: RuntimeName, state_dir: Path, machine: Machine) -> None:
        program = find_program(name)
        if program is None:
            raise FileNotFoundError(name)
        self._name: RuntimeName = name
        self._program = program
        self._machine = machine
        self._root = state_dir / "run" / name
        self._layers = state_dir / "layers"
        self._cgroups = Cgroups(machine)
        self._born_in_cgroup = name != "runc"
        """runc cannot be told to leave cgroups alone: it moves the sandbox there itself, which takes longer."""
        in_cgroup = machine.controllers
        self._capabilities = Capabilities(
            memory_limit="memory" in in_cgroup,
            cpu_limit="cpu" in in_cgroup,
            # gVisor's own threads come and go with what runs in it: their number says little about that.
            pids_limit="pids" in in_cgroup and name != "runsc",
            id_range=machine.root,
            process_oom=name != "runsc",
            memory_checkpoint=name == "runsc" and machine.root,
            freeze="memory" in in_cgroup,
            disk_limit=False,
        )

    @property
    def name(self) -> RuntimeName:
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        # Another program may give the layers another file system while this one runs.
        can = storage.look(self._layers, root=self._machine.root).limits
        return self._capabilities.model_copy(update={"disk_limit": can})

    # ---- starting ----

    async def launch(self, launch: Launch) -> None:
        self._check_limits(launch.limits)
        if launch.limits.disk_bytes is not None:
            storage.prepare_quota(launch.active_layer, root=self._machine.root)
        directory = launch.directory
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        cover = self._cover(directory)
        self._prepare(launch)
        files = self._files(directory)
        (directory / "config.json").write_text(json.dumps(self._config(launch, cover, files)))
        command = self._keeper(
            "start", "--dir", str(directory), "--active-layer", str(launch.active_layer), "--cover", cover
        )
        for inside in files:
            command += ["--file", inside.name, str(inside.source)]
        if launch.ephemeral:
            command.append("--ephemeral")
        if launch.limits.disk_bytes is not None:
            command += ["--disk", str(launch.limits.disk_bytes)]
        if launch.memory is not None:
            command += ["--epoch", str(time.time_ns() // 1000)]
        if self._machine.root:
            command += ["--confine", str(launch.id_base + ID_COUNT), "--machine", str(MACHINE_IDS)]
        command += self._maps(launch.id_base)
        if self._born_in_cgroup:
            for path in self._cgroups.make(launch.id):
                command += ["--cgroup", str(path)]
        if self._capabilities.freeze:
            command += ["--freezer", *self._cgroups.freezer(launch.id)]
            if launch.pause_after_s is not None:
                command += ["--pause-after", str(max(1, round(launch.pause_after_s * 1000)))]
        for setting, value in self._cgroups.settings(launch.id, self._bounded(launch.limits)):
            command += ["--limit", str(setting), value]
        for fs in launch.filesystems:
            layers = [word for layer in fs.layers for word in (str(layer.path), str(layer.owner))]
            command += ["--overlay", fs.key, fs.target, str(len(fs.layers)), *layers]
        with _listener(directory) as listener, _held_lock(directory) as lock:
            command += ["--listen", str(listener.fileno()), "--lock", str(lock), "--", self._program, *self._flags()]
            run = ["run", "--detach", "--pid-file", str(directory / "pid"), "--bundle", str(directory), launch.id]
            if launch.memory is not None:
                run[0:1] = ["restore", "--image-path", str(launch.memory.path)]
            # The keeper leaves this process at once, so this is a matter of a millisecond: no thread, no child watcher.
            started = subprocess.run(  # noqa: ASYNC221
                [*command, *run],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(listener.fileno(), lock),
                env={"PATH": _SEARCH, "XDG_RUNTIME_DIR": str(self._root)},
                check=False,
            )
        if started.returncode != 0:
            raise LaunchFailed(f"the keeper did not start: {started.stderr.decode(errors='replace').strip()}")
        if launch.memory is not None or launch.wait_ready:
            await wait_ready(directory)
        if launch.memory is not None and launch.memory.hostname != launch.hostname:
            async with self.setting_hostname(launch.id, launch.directory, launch.hostname, launch.id_base):
                pass

    @contextlib.asynccontextmanager
    async def setting_hostname(self, id: str, directory: Path, hostname: str, id_base: int) -> AsyncIterator[None]:
        said: str | None
        if self._name == "runsc":
            # The host's kernel knows nothing of this hostname. The runtime is asked to start one inside who may set it.
            yield
            order = [self._program, *self._flags(), "exec", "--user", "0:0", "--cap", "CAP_SYS_ADMIN", id]
            done = await self._within(*order, GUEST_INSIDE, "--hostname", hostname)
            failed, said = done.returncode != 0, done.stderr.decode(errors="replace").strip()[-500:]
        elif self._machine.root:
            # Root can enter the namespace alone, which a thread does for itself: no process has to be started.
            naming = self._namer.submit(set_hostname, self.pid(directory), id_base, hostname)
            try:
                yield
            finally:
                said = naming.result()  # it is there by now
            failed = said is not None
        else:
            child = self._begin_naming(directory, hostname, os.getuid())
            try:
                yield
            finally:  # it takes a millisecond, and has ended by now or is about to
                failed, said = child.wait() != 0, f"see {directory}/keeper.log"
        if failed:
            raise LaunchFailed(f"the sandbox could not be given its hostname: {said}")

    @cached_property
    def _namer(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "atoll-namer")

    def _begin_naming(self, directory: Path, hostname: str, owner: int) -> subprocess.Popen[bytes]:
        words = [str(_BIN / "keeper"), "hostname", "--owner", str(owner), "--", str(self.pid(directory)), hostname]
        with open(directory / "keeper.log", "ab") as log:
            # Python starts it in the fastest way if it need not close what is closed on its own.
            return subprocess.Popen(words, stderr=log, env={}, close_fds=False)

    async def reconfigure(self, directory: Path, *, ephemeral: bool, pause_after_s: float | None) -> None:
        await reconfigure(directory, ephemeral=ephemeral, pause_after_s=pause_after_s)

    def _bounded(self, limits: Limits) -> Limits:
        if self._name != "runsc" or "pids" not in self._machine.controllers:
            return limits
        return limits.model_copy(update={"pids": _GVISOR_THREADS})

    def _check_limits(self, limits: Limits) -> None:
        able = self._capabilities
        for limit, value, can in (
            ("memory", limits.memory_bytes, able.memory_limit),
            ("CPU", limits.cpus, able.cpu_limit),
            ("pids", limits.pids, able.pids_limit),
        ):
            if value is not None and not can:
                why = "no cgroup controller for it may be used by this user"
                fix = "run as root on a machine with cgroups"
                if limit.lower() in self._machine.controllers:
                    why, fix = "runsc keeps its processes from the host's eyes", "limit memory instead, or use crun"
                raise Unenforceable(
                    f"a {limit} limit cannot be enforced here: {why}; leave the limit out, or {fix}",
                    hint="atoll doctor",
                    limit=limit.lower(),
                )
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if limits.open_files is not None and limits.open_files > hard:
            raise Unenforceable(
                f"a process here can have at most {hard} open files; ask for fewer, or raise the limit of this user",
                hint="ulimit -Hn",
                limit="open_files",
            )

    def _cover(self, directory: Path) -> str:
        """A directory that may be hidden from the runtime, in its private mount namespace, behind the mounts."""
        needed = [str(directory), str(self._root), self._program, str(_BIN)]
        for candidate in _COVERS:
            if os.path.isdir(candidate) and not any(os.path.realpath(p).startswith(candidate + "/") for p in needed):
                return candidate
        raise LaunchFailed(f"none of {', '.join(_COVERS)} can serve as a place for mounts", hint=f"mkdir {_COVERS[0]}")

    def _prepare(self, launch: Launch) -> None:
        for name in _OF_A_RUN:
            (launch.directory / name).unlink(missing_ok=True)
        for name in ("in", "out"):
            os.mkfifo(launch.directory / name, 0o600)
        for fs in launch.filesystems:
            for part in ("upper", "work"):
                path = launch.active_layer / part / fs.key
                if path.exists():
                    continue
                # In place when it is whole: who was killed before that must not leave one that belongs to the host.
                new = launch.active_layer / "new"
                with contextlib.suppress(FileNotFoundError):
                    new.rmdir()
                new.mkdir()
                mode, uid, gid = 0o755, launch.id_base, launch.id_base
                below = fs.layers[0]
                if isinstance(below.owner, int) and below.owner:  # what a sandbox left, which may have changed it
                    seen = below.path.stat()
                    mode = stat.S_IMODE(seen.st_mode)
                    uid, gid = (each - below.owner + launch.id_base for each in (seen.st_uid, seen.st_gid))
                if part == "upper":
                    # An upper's own directory stands for the image's: its owner and mode are what is seen inside.
                    new.chmod(mode)
                if self._machine.root:
                    os.chown(new, uid, gid)
                path.parent.mkdir(exist_ok=True)
                new.rename(path)

    def _maps(self, id_base: int) -> list[str]:
        machine = self._machine
        if machine.root:
            ranges = [["0", str(id_base), str(ID_COUNT)]]
            return [word for kind in ("--uid", "--gid") for numbers in ranges for word in (kind, *numbers)]
        words = ["--uid", "0", str(os.getuid()), "1"]
        if machine.subuids and machine.subgids:
            words += ["--uid", "1", str(machine.subuids.start), str(ID_COUNT - 1)]
        words += ["--gid", "0", str(os.getgid()), "1"]
        if machine.subuids and machine.subgids:
            words += ["--gid", "1", str(machine.subgids.start), str(ID_COUNT - 1)]
        return words

    def _keeper(self, verb: str, *arguments: str) -> list[str]:
        return [str(_BIN / "keeper"), verb, *arguments, *([] if self._machine.root else ["--rootless"])]

    def _flags(self) -> list[str]:
        flags = ["--root", str(self._root)]
        if self._name == "crun":
            flags.append("--cgroup-manager=disabled")
        elif self._name == "runsc":
            flags += ["--network=none", "--ignore-cgroups"]
        return flags

    # ---- the OCI configuration ----

    def _config(self, launch: Launch, cover: str, files: list[_File]) -> dict[str, object]:
        machine, limits = self._machine, launch.limits
        single_id = not machine.root and not (machine.subuids and machine.subgids)
        user_ids = "0:0" if single_id else "1000:1000"
        guest = [GUEST_INSIDE, "--home", f"{user_ids}:/home/user", "--user", f"user:{user_ids}:/home/user"]
        if limits.open_files is not None:
            guest += ["--open-files", str(limits.open_files)]
        namespaces = [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]
        linux: dict[str, object] = {
            "namespaces": namespaces,
            "maskedPaths": _MASKED,
            "readonlyPaths": _READ_ONLY,
            "seccomp": seccomp.profile(),
        }
        if machine.root:
            # runsc makes one of its own: its processes are not seen by the host's kernel anyway.
            namespaces.append({"type": "user"} | ({} if self._name == "runsc" else {"path": f"{cover}/userns"}))
            mapping = [{"containerID": 0, "hostID": launch.id_base, "size": ID_COUNT}]
            linux |= {"uidMappings": mapping, "gidMappings": mapping}
            if not self._born_in_cgroup:
                linux["cgroupsPath"] = f"/atoll/{launch.id}"
        if machine.cgroup_mode == "v2":
            namespaces.append({"type": "cgroup"})
        annotations = {}
        if self._name == "crun" and (program := seccomp.compiled(self._root.parent)):
            # crun takes this in place of the list. One that does not know the annotation compiles the list.
            annotations["run.oci.seccomp_bpf_data"] = base64.b64encode(program).decode()
        capabilities = dict.fromkeys(("bounding", "effective", "permitted"), _CAPABILITIES)
        return {
            "ociVersion": "1.0.2",
            "hostname": launch.hostname,
            "annotations": annotations,
            "process": {
                "terminal": False,
                "user": {"uid": 0, "gid": 0},
                "args": guest,
                # With HOME given, a runtime does not look for it in the image's /etc/passwd.
                "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"],
                "cwd": "/",
                "capabilities": capabilities,
                "noNewPrivileges": True,
            },
            "root": {"path": f"{cover}/root", "readonly": False},
            "mounts": self._mounts(cover, files, single_id),
            "linux": linux,
        }

    def _mounts(self, cover: str, files: list[_File], single_id: bool) -> list[dict[str, object]]:
        safe = ["nosuid", "noexec", "nodev"]
        scratch = ["nosuid", "nodev", "mode=755", "size=64m"]
        terminals = ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]
        return [
            {"destination": "/proc", "type": "proc", "source": "proc", "options": safe},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=64k"]},
            {
                "destination": "/dev/pts",
                "type": "devpts",
                "source": "devpts",
                "options": terminals if single_id else [*terminals, "gid=5"],
            },
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": [*safe, "mode=1777", "size=64m"]},
            {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": safe},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": [*safe, "ro"]},
            {"destination": "/run", "type": "tmpfs", "source": "tmpfs", "options": scratch},
            *(file.mount(cover) for file in files),
        ]

    def _files(self, directory: Path) -> list[_File]:
        """What of the host's is put into the sandbox, read-only."""
        files = [_File("guest", _BIN / "guest", GUEST_INSIDE)]
        if self._lacks_no_automount:
            preload = directory / "ld.so.preload"
            preload.write_text("/run/atoll/statx.so\n")
            files += [
                _File("statx.so", _BIN / "statx.so", "/run/atoll/statx.so"),
                _File("preload", preload, "/etc/ld.so.preload"),
            ]
        return files

    @cached_property
    def _lacks_no_automount(self) -> bool:
        """Whether this is a gVisor under which `ls` fails unless `statx.so` helps it."""
        if self._name != "runsc":
            return False
        asking = [self._program, "--version"]
        said = subprocess.run(asking, capture_output=True, text=True, env=program_environment(), check=False).stdout
        date = re.search(r"\b(20\d{6})\b", said)
        return date is not None and date[1] < _STATX_MENDED

    # ---- ending ----

    async def stop(self, id: str, directory: Path) -> None:
        with anyio.CancelScope(shield=True):
            self._cgroups.thaw(id)  # what is frozen does not die
            if self.pid(directory) is None:
                await self._end_keeper(directory, patience_s=0)
            if self._name != "crun":
                # These two kill, too, but look only every 100 ms whether what they have killed is gone.
                await self._cgroups.kill(id)
            await self._delete(id)
            await self._end_keeper(directory, patience_s=2)
            await self._cgroups.remove(id)

    async def destroy(self, id: str, directory: Path, *more: Path) -> None:
        with anyio.CancelScope(shield=True):
            await self.stop(id, directory)
            await self.remove(directory, *more)

    async def remove(self, *paths: Path) -> None:
        there = [path for path in paths if path.exists() and not await anyio.to_thread.run_sync(storage.remove, path)]
        if there:
            ended = storage.projects(there)
            await self._within("rm", "-rf", "--one-file-system", "--", *map(str, there), within_s=_SAVE_S)
            storage.release(self._layers, ended)

    async def copy(self, source: Path, target: Path, *, earlier: Path | None = None) -> None:
        if await anyio.to_thread.run_sync(storage.snapshot, source, target):
            await self.remove(target / "work")
            return
        storage.make(target)
        await self._make_layer("copy", str(source), str(target), *([] if earlier is None else [str(earlier)]))

    async def merge(self, layers: Sequence[Layer], target: Path, owner: int) -> None:
        storage.make(target)
        lowest_first = [word for layer in reversed(layers) for word in (str(layer.path), self._owner(layer.owner))]
        await self._make_layer("merge", str(target), self._owner(owner), *lowest_first)

    def _owner(self, id: int | str) -> str:
        """Of a layer, as the keeper sees it: without ranges of ids, all layers have the same."""
        return str(id) if self._machine.root else "0"

    async def _make_layer(self, verb: str, *words: str) -> None:
        maps = [] if self._machine.root else self._maps(0)
        command = [*self._keeper(verb, *maps), "--", *words]
        done = await anyio.run_process(command, env=program_environment(), check=False)
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip()[-500:]
            raise SandboxError(f"what the sandbox wrote could not be copied: {said}")

    def in_userns(self, *command: str) -> list[str]:
        return [*self._keeper("nsexec", *([] if self._machine.root else self._maps(0))), "--", *command]

    # ---- standing still ----

    async def freeze(self, directory: Path) -> None:
        self._require_freezer()
        async with freezing(directory, "pause"):
            pass

    @contextlib.asynccontextmanager
    async def frozen(self, directory: Path) -> AsyncIterator[None]:
        self._require_freezer()
        async with freezing(directory, "hold"):
            yield

    def loses_waiting(self) -> bool:
        return self._name == "runsc" and self._refuses_waiters

    @cached_property
    def _refuses_waiters(self) -> bool:
        """gVisor did until 2023 or so. Whether this one does, what it would say tells."""
        with open(self._program, "rb") as program, mmap.mmap(program.fileno(), 0, access=mmap.ACCESS_READ) as text:
            return text.find(_WAITERS) >= 0

    async def save(self, id: str, directory: Path, image: Path, *, lock: int) -> None:
        await self.remove(image)  # gVisor takes no directory that a save before has used
        image.mkdir(mode=0o700)
        async with freezing(directory, "quiesce"):
            command = [self._program, *self._flags(), "checkpoint", "--image-path", str(image), id]
            done = await self._within(*command, within_s=_SAVE_S, pass_fds=(lock,))
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip()[-500:]
            raise SandboxError(f"{self._name} could not write the sandbox's processes to disk: {said}")

    def _require_freezer(self) -> None:
        if not self._capabilities.freeze:
            raise Unenforceable(
                "a sandbox cannot be frozen here: no cgroup may be used by this user; put it to sleep, or run as root",
                hint="atoll doctor",
            )

    def last_used(self, directory: Path) -> tuple[datetime | None, bool]:
        try:
            noted_ms, streams = struct.unpack("<qq", (directory / "activity").read_bytes())
        except (OSError, struct.error):
            return None, False
        return datetime.fromtimestamp(noted_ms / 1000, UTC), streams > 0 and self.pid(directory) is not None

    def is_frozen(self, id: str) -> bool:
        return self._cgroups.is_frozen(id)

    async def _delete(self, id: str) -> None:
        """Have the runtime end and forget the container. That there is none is fine."""
        known = any((self._root / name).exists() for name in (id, f"{id}_sandbox:{id}.state"))
        # runsc has nothing besides its processes, all of them in the cgroup, and the two files that `_forget` removes.
        # Asked to delete them, it waits until somebody has reaped its gofer: without a keeper, whenever PID 1 does.
        if not known or (self._name == "runsc" and self._machine.controllers):
            self._forget(id)
            return
        done = await self._within(self._program, *self._flags(), "delete", "--force", id)
        if (self._root / id).exists():  # whatever it says of itself
            said = done.stderr.decode(errors="replace").strip()[-500:] or f"exit code {done.returncode}"
            raise SandboxError(f"{self._name} could not delete the sandbox: {said}", id=id)
        self._forget(id)

    def _forget(self, id: str) -> None:
        """runsc leaves the lock of a container that it did not finish making, or did not delete itself."""
        for left in self._root.glob(f"{id}_sandbox:*"):
            left.unlink(missing_ok=True)

    async def _within(
        self, *command: str, within_s: float = 60, pass_fds: tuple[int, ...] = ()
    ) -> subprocess.CompletedProcess[bytes]:
        """Run something where the runtime runs: in a private mount namespace and, rootless, in the user namespace."""
        full = self.in_userns(*command)
        try:
            with anyio.fail_after(within_s):
                env = {"PATH": _SEARCH, "XDG_RUNTIME_DIR": str(self._root)}
                return await anyio.run_process(full, check=False, env=env, pass_fds=pass_fds)
        except TimeoutError:
            raise SandboxError(f"{Path(command[0]).name} did not end within {within_s:g} s") from None

    async def _end_keeper(self, directory: Path, *, patience_s: float) -> None:
        """Wait until no keeper works on `directory`; after `patience_s`, end it."""
        try:
            lock = os.open(directory / "keeper.lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            if await lock_within(lock, patience_s):
                return
            # Told to, one that is still starting the sandbox ends what it has started with it.
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ValueError, ProcessLookupError):
                    os.kill(int(os.pread(lock, 32, 0)), number)
                if await lock_within(lock, 5):
                    return
            raise SandboxError("the sandbox's keeper does not end", hint=f"see {directory}/keeper.log")
        finally:
            os.close(lock)

    # ---- looking ----

    def pid(self, directory: Path) -> int | None:
        # A number alone may be another process's by now; one that a living keeper watches over is not.
        if not is_held(directory / "keeper.lock"):
            return None
        try:
            if (directory / "ended").stat().st_size:  # its keeper is about to leave too
                return None
            return int((directory / "pid").read_text())
        except (OSError, ValueError):
            return None

    def oom_kills(self, id: str) -> int | None:
        return self._cgroups.oom_kills(id)

    async def size(self, path: Path) -> int:
        disk = await self._within("du", "-s", "--block-size=1", "--", str(path))
        return int((disk.stdout.split() or [b"0"])[0])

    async def usage(self, id: str, active_layer: Path) -> Usage:
        return Usage(
            memory_bytes=self._cgroups.read(id, "memory/memory.usage_in_bytes", "memory.current"),
            memory_peak_bytes=self._cgroups.read(id, "memory/memory.max_usage_in_bytes", "memory.peak"),
            cpu_s=self._cgroups.cpu_s(id),
            pids=self._cgroups.read(id, "pids/pids.current", "pids.current"),
            disk_bytes=await self.size(active_layer / "upper"),
            oom_kills=self.oom_kills(id),
        )


@contextlib.contextmanager
def _listener(directory: Path) -> Iterator[socket.socket]:
    """The socket that clients connect to, bound before the keeper starts so that nobody comes too early.

    Bound through the directory's descriptor: a Unix address holds 107 bytes, a state directory's path may be longer.
    """
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    previous = os.umask(0o177)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(f"/proc/self/fd/{fd}/sock")
            listener.listen(128)
            yield listener
    finally:
        os.umask(previous)
        os.close(fd)


@contextlib.contextmanager
def _held_lock(directory: Path) -> Iterator[int]:
    """`keeper.lock`, locked. The keeper inherits the lock and holds it for as long as it lives."""
    fd = os.open(directory / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not try_lock(fd):
            raise SandboxError("another keeper works on this sandbox", hint=str(directory))
        yield fd
    finally:
        os.close(fd)


def find_drivers(state_dir: Path, machine: Machine | None = None) -> dict[RuntimeName, OciDriver]:
    """The runtimes that are installed and that this machine lets us use, fastest first."""
    machine = machine or read_machine()
    if not machine.user_namespaces or not (machine.id_mapped_overlay or not machine.root):
        return {}
    usable = [name for name in RUNTIMES if find_program(name)]
    if not machine.root and not (machine.subuids and machine.subgids):
        # gVisor runs its own processes as another user id than root's, and there is none.
        usable = [name for name in usable if name != "runsc"]
    return {name: OciDriver(name, state_dir, machine) for name in usable}


def examine(state_dir: Path, machine: Machine | None = None) -> list[Diagnostic]:
    """What this machine can do for isolation and, for each lack, what mends it."""
    machine = machine or read_machine()
    findings = [
        Diagnostic(
            topic=name,
            ok=find_program(name) is not None,
            detail=find_program(name) or "not installed",
            fix=None if find_program(name) else f"apt-get install {_PACKAGES[name]}",
        )
        for name in RUNTIMES
    ]
    kernel = ".".join(map(str, machine.kernel))
    recent = machine.kernel >= (5, 19)
    findings += [
        Diagnostic(
            topic="kernel",
            ok=recent,
            detail=f"Linux {kernel}" + ("" if recent else "; id-mapped overlays need 5.19"),
            fix=None if recent else "install a newer kernel",
        ),
        Diagnostic(
            topic="user namespaces",
            ok=machine.user_namespaces,
            detail="may be made" if machine.user_namespaces else "may not be made by this user",
            fix=None
            if machine.user_namespaces
            else "sysctl -w user.max_user_namespaces=10000 kernel.unprivileged_userns_clone=1"
            " kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    ]
    missing = sorted({"memory", "cpu", "pids"} - machine.controllers)
    findings.append(
        Diagnostic(
            topic="cgroups",
            ok=not missing,
            detail=f"{machine.cgroup_mode}; limits on {', '.join(sorted(machine.controllers)) or 'nothing'} can be set",
            fix=None if not missing else "run as root for limits on " + ", ".join(missing),
        )
    )
    overlay = "overlay" in Path("/proc/filesystems").read_text().split()
    findings.append(
        Diagnostic(
            topic="overlay",
            ok=overlay,
            detail="in the kernel" if overlay else "not loaded",
            fix=None if overlay else "modprobe overlay",
        )
    )
    if machine.root:
        findings.append(Diagnostic(topic="ids", ok=True, detail="each sandbox has a range of user ids of its own"))
    else:
        ranged = bool(machine.subuids and machine.subgids and find_program("newuidmap"))
        mend = "apt-get install uidmap && usermod --add-subuids 100000-165535 --add-subgids 100000-165535"
        findings.append(
            Diagnostic(
                topic="ids",
                ok=ranged,
                detail="a range from /etc/subuid" if ranged else "one user id for all inside",
                fix=None if ranged else f"{mend} {os.getuid()}",
            )
        )
    below = storage.look(state_dir / "layers", root=machine.root)
    detail = f"{below.filesystem}; " + ("what a sandbox writes can be limited" if below.limits else str(below.lack))
    findings.append(Diagnostic(topic="disk limits", ok=below.limits, detail=detail, fix=below.fix))
    return findings


if sys.platform != "linux":
    raise ImportError("Atoll's sandboxes need Linux; on other systems, run it in a Linux virtual machine")
