"""Starts and ends keepers: the command lines of the program `keeper`, and the files in a sandbox's directory.

Owns what every driver that uses the keeper needs, whatever runtime the keeper then starts: the FIFOs, the directories
of overlays, the mappings of user ids, the listening socket, the lock. Not here: requests to a running keeper
(`keeper_client.py`), the runtime's own arguments (`oci.py`, `bwrap.py`), mounting (`keeper/launch.c`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.abc
import anyio.to_thread

from atoll.contract.driver import BindMount, Filesystem, Launch
from atoll.contract.errors import LaunchFailed, SandboxError, Unenforceable
from atoll.drivers import storage
from atoll.drivers.cgroups import Cgroups
from atoll.drivers.locks import lock_within, try_lock
from atoll.drivers.machine import KEEPER, PROGRAM_PATH, Machine

BIN = KEEPER.parent
"""Our own compiled programs: the guest, the keeper, and a library for old versions of gVisor."""
ID_COUNT = 65535
"""Ids of a sandbox's range that exist inside. The one after them is the keeper's: nothing inside can be it."""
MACHINE_IDS = 0x0FFF_0000
"""Host ids below all ranges, which no sandbox has: they own the files of the machine's own layers."""
MOUNT_IDS = 0x0FFD_0000
"""Host ids likewise, which no sandbox has: they own the files of volumes, and in a mounted directory of the host what
other users inside than its owner write. The same for all sandboxes, so that all of them see the same owners."""
_COVERS = ("/mnt", "/media", "/srv", "/dev/shm")
_END_S = 10
_LAST_FIFO_FD = 63
"""The FIFOs are standard streams of the runtime and of the guest, and low numbers in gVisor. Programs of the host may
have thousands of descriptors, which would take a second to look at."""
MAX_OUTPUT_BYTES = 256 * 1024
"""What is kept of a program's output. Root inside may write to the streams of a program that runs in its sandbox."""
_RUN_FILES = ("in", "out", "sock", "pid", ".pid", "ended", "runtime.log", "keeper.log")
"""Files of one run in a sandbox's directory; the next run makes them again. A killed runc leaves `.pid`."""


class HostFile(NamedTuple):
    """A file of the host that the runtime finds as `COVER/name`, and that appears inside, read-only."""

    name: str
    source: Path
    destination: str


class KeeperCommand:
    """The program `keeper` on this machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._cgroups = Cgroups(machine)

    def line(self, verb: str, *arguments: str) -> list[str]:
        return [str(KEEPER), verb, *arguments, *([] if self._machine.root else ["--rootless"])]

    def maps(self, id_base: int) -> list[str]:
        """The options for a sandbox's mapping of user ids."""
        machine = self._machine
        if machine.root:
            return [word for kind in ("--uid", "--gid") for word in (kind, "0", str(id_base), str(ID_COUNT))]
        words = []
        for kind, own, more in (
            ("--uid", os.getuid(), machine.subuids),
            ("--gid", os.getgid(), machine.subgids),
        ):
            words += [kind, "0", str(own), "1"]
            if more is not None and not machine.single_id:
                words += [kind, "1", str(more.start), str(ID_COUNT - 1)]
        return words

    def nsexec_command(self, *command: str) -> list[str]:
        """The command line that runs a program where a runtime would run: see `LayerStore.owner_command`."""
        return [*self.line("nsexec", *([] if self._machine.root else self.maps(0))), "--", *command]

    def volume_command(self, *command: str) -> list[str]:
        """The command line that runs a program as root of a namespace where the files of a volume have their owners.

        As root on the host, it has no other rights there: what it works on is its current directory, or open. It is
        killed when the calling thread ends.
        """
        ids = ("0", str(MOUNT_IDS), str(ID_COUNT))
        maps = ["--uid", *ids, "--gid", *ids] if self._machine.root else self.maps(0)
        return [str(KEEPER), "nsexec", "--rootless", "--ephemeral", *maps, "--", *command]

    async def run_nsexec(
        self,
        *command: str,
        within_s: float = 60,
        pass_fds: tuple[int, ...] = (),
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a program as `nsexec_command` does, and wait for it. Of each stream the first MAX_OUTPUT_BYTES are kept.

        Raises:
            SandboxError: it did not end in time.
        """
        full_env = {"PATH": PROGRAM_PATH} | dict(env or {})
        stdout, stderr = bytearray(), bytearray()
        try:
            with anyio.fail_after(within_s):
                async with (
                    await anyio.open_process(
                        self.nsexec_command(*command), stdin=subprocess.DEVNULL, env=full_env, pass_fds=pass_fds
                    ) as process,
                    anyio.create_task_group() as group,
                ):
                    for stream, kept in ((process.stdout, stdout), (process.stderr, stderr)):
                        if stream is not None:
                            group.start_soon(_collect, stream, kept)
                    code = await process.wait()
        except TimeoutError:
            raise SandboxError(f"{Path(command[0]).name} did not end within {within_s:g} s") from None
        return subprocess.CompletedProcess(command, code, bytes(stdout), bytes(stderr))

    # ---- starting ----

    def choose_cover(self, directory: Path, *needed: Path | str) -> str:
        """A directory whose contents the runtime does not need: mounts hide it in the runtime's mount namespace.

        It needs the sandbox's `directory`, and others.

        Raises:
            LaunchFailed: every candidate holds something that it needs.
        """
        return _choose_cover(BIN, directory.parent, *needed)

    def prepare(self, launch: Launch) -> None:
        """Make the FIFOs and the overlays' directories of a run."""
        for name in _RUN_FILES:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{launch.directory}/{name}")
        for name in ("in", "out"):
            os.mkfifo(f"{launch.directory}/{name}", 0o600)
        for part in ("upper", "work"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(f"{launch.active_layer}/{part}")
            for fs in launch.filesystems:
                if not os.path.exists(f"{launch.active_layer}/{part}/{fs.key}"):
                    self._make_part(launch, part, fs)

    def _make_part(self, launch: Launch, part: str, fs: Filesystem) -> None:
        # Renamed when it is complete: a process killed before that must not leave one that the host owns.
        new = f"{launch.active_layer}/new"
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(new)
        mode, uid, gid = 0o755, launch.id_base, launch.id_base
        below = fs.layers[0]
        if isinstance(below.owner, int) and below.owner:  # a sandbox wrote it, and may have changed these
            seen = below.path.stat()
            mode = stat.S_IMODE(seen.st_mode)
            uid, gid = (each - below.owner + launch.id_base for each in (seen.st_uid, seen.st_gid))
        os.mkdir(new)
        if part == "upper":
            # Inside, the upper's own directory replaces the image's: its owner and mode are seen.
            os.chmod(new, mode)
        if self._machine.root:
            os.chown(new, uid, gid)
        os.rename(new, f"{launch.active_layer}/{part}/{fs.key}")

    def start(
        self,
        launch: Launch,
        cover: str,
        files: Sequence[HostFile],
        options: Sequence[str],
        runtime: Sequence[str],
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start the keeper of a sandbox, which starts the command `runtime`. Takes about a millisecond.

        Raises:
            LaunchFailed: the keeper did not start.
            SandboxError: another keeper holds the sandbox's lock.
        """
        directory = launch.directory
        line = self.line("start", "--dir", str(directory), "--active-layer", str(launch.active_layer), "--cover", cover)
        for file in files:
            line += ["--file", file.name, str(file.source)]
        if launch.ephemeral:
            line.append("--ephemeral")
        if launch.limits.disk_bytes is not None:
            line += ["--disk", str(launch.limits.disk_bytes)]
        if launch.lifetime is not None:
            line += ["--expires-at", str(launch.lifetime.ends_ms), "--renewal", str(launch.lifetime.renewal_ms)]
            line += ["--freeze-at-end"] if launch.lifetime.freezes else []
        if launch.memory is not None:
            line += ["--epoch", str(time.time_ns() // 1000)]
        if self._machine.root:
            line += ["--confine", str(launch.id_base + ID_COUNT), "--machine", str(MACHINE_IDS)]
        for path in self._cgroups.keepers():
            line += ["--keeper-cgroup", str(path)]
        line += [*self.maps(launch.id_base), *options]
        for fs in launch.filesystems:
            layers = [word for layer in fs.layers for word in (str(layer.path), str(layer.owner))]
            line += ["--overlay", fs.key, fs.target, str(len(fs.layers)), *layers]
        for mount in launch.mounts:
            line += ["--mount", *self._mount_words(mount, launch.id_base)]
        with _listener(directory) as listener, _held_lock(directory) as lock:
            line += ["--listen", str(listener.fileno()), "--lock", str(lock), "--", *runtime]
            line, variables = self._cgroups.launcher(line, {"PATH": PROGRAM_PATH} | dict(env or {}))
            # The keeper detaches at once, so neither a thread nor a child watcher is needed.
            started = subprocess.run(
                line,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(listener.fileno(), lock),
                env=variables,
                check=False,
            )
        if started.returncode != 0:
            raise LaunchFailed(f"the keeper did not start: {started.stderr.decode(errors='replace').strip()}")

    def _mount_words(self, mount: BindMount, id_base: int) -> list[str]:
        words = [str(mount.source), "ro" if mount.read_only else "rw"]
        if not self._machine.root:  # root inside is this user, whose files need no mapping
            return [*words, "0", "0"]
        if not mount.read_only:
            self._require_mappable(mount.source)
        owner = mount.owner
        ids = [(None, 0)] * 2 if owner is None else [(owner.uid, owner.uid_inside), (owner.gid, owner.gid_inside)]
        maps = [_mount_maps(id_base, *each) for each in ids]
        counts = [len(each) for each in maps]
        return [*words, *map(str, [*counts, *(number for each in maps for piece in each for number in piece)])]

    def _require_mappable(self, source: Path) -> None:
        """
        Raises:
            Unenforceable: the file system of `source` cannot be id-mapped.
        """
        tried = subprocess.run(
            self.line("idmap", "--", str(source)), capture_output=True, env={"PATH": PROGRAM_PATH}, check=False
        )
        if tried.returncode == 0:
            return
        reason = tried.stderr.decode(errors="replace").strip().removeprefix("keeper: ")
        if not reason.endswith(os.strerror(errno.EINVAL)):
            raise LaunchFailed(f"the directory cannot be mounted: {reason}")
        raise Unenforceable(
            f"{source} cannot be mounted for writing: its file system, {storage.filesystem_name(source)}, has no "
            "id-mapped mounts; mount it read-only, or use a directory on ext4, XFS, btrfs or tmpfs",
        )

    async def end(self, directory: Path, *, patience_s: float) -> None:
        """Wait until no keeper works on `directory`; after `patience_s`, end it.

        Raises:
            SandboxError: it does not end.
        """
        try:
            lock = os.open(directory / "keeper.lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            if await _freed_within(lock, patience_s):
                return
            # On SIGTERM, a keeper that is still starting the sandbox also ends what it has started.
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ValueError, ProcessLookupError):
                    os.kill(int(os.pread(lock, 32, 0)), number)
                if await _freed_within(lock, 5):
                    return
            raise SandboxError("the sandbox's keeper does not end", hint=f"see {directory}/keeper.log")
        finally:
            os.close(lock)
            self._cgroups.remove_keepers()


def _mount_maps(id_base: int, disk: int | None, inside: int) -> list[tuple[int, int, int]]:
    """Which ids on disk are which ids of a sandbox's range: first id on disk, first id of the range, and how many.

    The id `inside` is `disk`, all others are of the range `MOUNT_IDS`.
    """
    if disk is None:
        return [(MOUNT_IDS, id_base, ID_COUNT)]
    after = inside + 1
    pieces = [
        (disk, id_base + inside, 1),
        (MOUNT_IDS, id_base, inside),
        (MOUNT_IDS + after, id_base + after, ID_COUNT - after),
    ]
    return [piece for piece in pieces if piece[2]]


@cache
def _choose_cover(*needed: Path | str) -> str:
    paths = [os.path.realpath(path) + "/" for path in needed]
    for candidate in _COVERS:
        if os.path.isdir(candidate) and not any(path.startswith(candidate + "/") for path in paths):
            return candidate
    raise LaunchFailed(f"none of {', '.join(_COVERS)} can be used for mounts", hint=f"mkdir {_COVERS[0]}")


async def end_process(pid: int, is_it: Callable[[], bool], *, kill: bool = True) -> None:
    """Kill a process that need not be a child, and wait for its end; without `kill`, only wait.

    `is_it` is asked when the process is held: false if the number may have become another's before that.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if is_it():
            if kill:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            await anyio.wait_readable(process)
    finally:
        os.close(process)


async def _freed_within(lock: int, timeout_s: float) -> bool:
    """Whether a keeper's lock is free in time: its end is waited for, and copies of the lock are polled."""
    begun = anyio.current_time()
    if timeout_s and not try_lock(lock):
        with contextlib.suppress(ValueError), anyio.move_on_after(timeout_s):
            await end_process(int(os.pread(lock, 32, 0)), lambda: not try_lock(lock), kill=False)
    return await lock_within(lock, max(0.0, begun + timeout_s - anyio.current_time()))


@contextlib.contextmanager
def _listener(directory: Path) -> Iterator[socket.socket]:
    """The socket that clients connect to, bound before the keeper starts, so that no client connects too early.

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
    """`keeper.lock`, locked. The keeper inherits the lock and holds it until it ends."""
    fd = os.open(directory / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not try_lock(fd):
            raise SandboxError("another keeper works on this sandbox", hint=str(directory))
        yield fd
    finally:
        os.close(fd)


async def _collect(stream: anyio.abc.ByteReceiveStream, into: bytearray) -> None:
    """Read a stream to its end, so that its writer is not held up, and keep its beginning."""
    async for chunk in stream:
        into += chunk[: MAX_OUTPUT_BYTES - len(into)]


# ---- what a killed keeper leaves ----


async def kill_holders(directory: Path) -> None:
    """Kill the processes of a sandbox whose keeper was killed, also if that was in the middle of the start.

    What is still starting may fork while it is looked for, and inherits the FIFO. So this ends only when none has been
    found twice: the first look may have missed one whose parent ended meanwhile.
    """
    if _has_ended(directory):
        return
    clear = 0
    while clear < 2:
        found = await anyio.to_thread.run_sync(_holders, directory)
        clear = 0 if found else clear + 1
        for pid in found:
            await kill_holder(pid, directory)


def _has_ended(directory: Path) -> bool:
    """Whether there was no run, or its keeper has written that it has ended, after which nothing of it is left."""
    return not (directory / "in").exists() or _size(directory / "ended") > 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _holders(directory: Path) -> list[int]:
    """The processes that have a sandbox's FIFO open."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and _has_open(int(name), directory / "in")]


def _has_open(pid: int, fifo: Path) -> bool:
    with contextlib.suppress(OSError):
        wanted = fifo.stat()
        for name in os.listdir(f"/proc/{pid}/fd"):
            if int(name) > _LAST_FIFO_FD:
                continue
            with contextlib.suppress(OSError):
                seen = os.stat(f"/proc/{pid}/fd/{name}")
                if (seen.st_dev, seen.st_ino) == (wanted.st_dev, wanted.st_ino):
                    return True
    return False


async def kill_holder(pid: int, directory: Path) -> None:
    """Kill a process of the sandbox, and wait for its end: with the first, all of its PID namespace have ended.

    Raises:
        SandboxError: it does not end.
    """
    with anyio.move_on_after(_END_S):
        await end_process(pid, lambda: _has_open(pid, directory / "in"))
        return
    raise SandboxError("a process of the sandbox does not end", hint=f"kill -9 {pid}")
