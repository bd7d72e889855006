"""Loop storage: a file system for the layers, in a file, for machines whose own has no snapshots and no quotas.

Owns the file, the loop device and the mount, and the order in which they are created and removed. Not here: layers
(`layers.py`), and what a file system can do for them (`drivers/storage.py`). Used by the engine.

    storage.img     the file system, sparse
    storage.json    says that it is to be mounted on `layers/`. Written last and removed first: without it, the file is
                    the rest of an interrupted operation
    storage.lock    held while it is created, mounted or removed

Opening the state directory mounts it if it is not mounted, as after a reboot. The loop device frees itself with the
last mount (autoclear), also if the process that set it up is killed before the first. One file has one device, however
many mount namespaces it is mounted in: a second one would let two file systems write to the same blocks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread

from atoll.contract.errors import InvalidRequest, RuntimeUnavailable, SandboxError, Unenforceable
from atoll.contract.model import StorageInfo
from atoll.drivers import storage
from atoll.drivers.locks import locked
from atoll.drivers.machine import find_program
from atoll.runtime.state.layers import Layers
from atoll.runtime.state.records import StoredRecord, read_record, sync, write_record
from atoll.settings import program_environment

StorageKind = Literal["btrfs", "xfs"]
SMALLEST_BYTES = 512 * 1024**2
"""The smallest size that both file systems can have."""

_MAKERS: dict[StorageKind, tuple[str, tuple[str, ...]]] = {
    # The file system below keeps one copy of everything too.
    "btrfs": ("btrfs-progs", ("mkfs.btrfs", "--quiet", "--force", "--metadata", "single")),
    "xfs": ("xfsprogs", ("mkfs.xfs", "-q", "-f", "-m", "reflink=1")),
}
_OPTIONS: dict[StorageKind, tuple[str, ...]] = {
    "btrfs": ("discard=async",),
    "xfs": ("discard,prjquota", "discard"),  # the second on kernels that were built without XFS's quotas
}
_MS_NOSUID, _MS_NODEV, _MS_NOATIME = 2, 4, 1024
_LOOP_GET_FREE, _LOOP_CONFIGURE, _LOOP_GET_STATUS = 0x4C82, 0x4C0A, 0x4C05
_LOOP_STATUS = struct.Struct("=QQQQQIIII64s64s32sQQ")
_LOOP_AUTOCLEAR, _LOOP_DIRECT = 4, 16
_LOCK_TIMEOUT_S = 60
_TRIES = 64
_RELEASE_S = 3.0


class LoopStorageRecord(StoredRecord):
    """The content of `storage.json`."""

    VERSION = 1
    filesystem: StorageKind
    size_bytes: int


class LoopStorage:
    """The file system of a state directory's layers. `engine.storage`."""

    def __init__(self, state_dir: Path, layers: Layers, remove_unreferenced: Callable[[], Awaitable[object]]) -> None:
        self._state_dir = state_dir
        self._layers = layers
        self._remove_unreferenced = remove_unreferenced

    def info(self) -> StorageInfo:
        """The file system that the layers are on, and what it can do."""
        place = self._state_dir / "layers"
        facts = storage.probe(place, root=os.geteuid() == 0)
        import shutil

        room = shutil.disk_usage(place)
        record = _read(self._state_dir)
        return StorageInfo(
            path=place,
            filesystem=facts.filesystem,
            total_bytes=room.total,
            free_bytes=room.free,
            reflinks=storage.shares_data(place),
            snapshots=facts.snapshots,
            disk_limit=facts.limits,
            missing=facts.missing,
            fix=facts.fix,
            image=None if record is None else _image(self._state_dir),
        )

    async def init(self, size_bytes: int, filesystem: StorageKind = "btrfs") -> StorageInfo:
        """Create a file system of `size_bytes` for the layers. When it fails or is cancelled, nothing has changed.

        Raises:
            InvalidRequest: the size is not allowed, there is one already, or there are sandboxes, checkpoints or
                volumes.
            RuntimeUnavailable: the program that creates such a file system is not on this machine.
            Unenforceable: this is not root.
            SandboxError: it could not be created or mounted.
        """
        self._require_root("created")
        maker = find_program(_MAKERS[filesystem][1][0])
        if maker is None:
            package, command = _MAKERS[filesystem]
            raise RuntimeUnavailable(
                f"{filesystem} cannot be created: the program {command[0]} is not installed",
                hint=f"apt-get install {package}",
            )
        async with self._exclusive():
            if _read(self._state_dir) is not None:
                raise InvalidRequest("the layers already have a file system of their own; remove it first")
            self._require_empty("moved to another file system")
            self._require_room(size_bytes)
            with anyio.CancelScope(shield=True):
                try:
                    await anyio.to_thread.run_sync(self._make, size_bytes, filesystem, maker)
                except BaseException:
                    if _is_mounted(self._state_dir):
                        _unmount(self._state_dir / "layers")
                    _remove_files(self._state_dir)
                    raise
        return self.info()

    async def remove(self) -> None:
        """Move the layers back to the file system of the state directory, and free the space of their own.

        Raises:
            InvalidRequest: there are sandboxes, checkpoints or volumes, or a program uses it.
            Unenforceable: this is not root.
        """
        self._require_root("removed")
        async with self._exclusive():
            self._require_empty("moved from their file system")
            if _read(self._state_dir) is not None and _is_mounted(self._state_dir):
                _unmount(self._state_dir / "layers")
            # Sandboxes of other state directories may have the mount in their namespaces: it ends with its directory.
            (self._state_dir / "layers").rmdir()
            (self._state_dir / "layers").mkdir(mode=0o700)
            image = _image(self._state_dir)
            with anyio.move_on_after(_RELEASE_S):
                while _has_device(image):  # noqa: ASYNC110 - the kernel frees it
                    await anyio.sleep(0.01)
            _remove_files(self._state_dir)

    def _make(self, size_bytes: int, filesystem: StorageKind, maker: str) -> None:
        image = _image(self._state_dir)
        image.unlink(missing_ok=True)  # of an interrupted `init`
        with open(image, "xb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.truncate(size_bytes)
        command = [maker, *_MAKERS[filesystem][1][1:], str(image)]
        made = subprocess.run(command, capture_output=True, env=program_environment(), check=False)
        if made.returncode != 0:
            output = made.stderr.decode(errors="replace").strip()[-500:]
            raise SandboxError(f"{_MAKERS[filesystem][1][0]} failed: {output}")
        sync(image)
        record = LoopStorageRecord(filesystem=filesystem, size_bytes=size_bytes)
        write_record(_record(self._state_dir), record, durable=True)
        _mount(self._state_dir, record)

    @contextlib.asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[None]:
        """Remove unreferenced layers, then hold the locks of the layers, exclusively, and of the storage."""
        await self._remove_unreferenced()
        async with self._layers.lock(exclusive=True), _locked(self._state_dir):
            yield

    def _require_root(self, done: str) -> None:
        if os.geteuid() != 0:
            raise Unenforceable(f"a file system can be {done} only by root", hint="sudo atoll storage")

    def _require_empty(self, done: str) -> None:
        for kind, mend in (
            ("sandboxes", "atoll rm --all"),
            ("checkpoints", "atoll checkpoints --delete ID"),
            ("volumes", "atoll volumes rm NAME"),
        ):
            count = len(os.listdir(self._state_dir / kind))
            if count:
                raise InvalidRequest(
                    f"the layers of {self._state_dir} cannot be {done} while there are {count} {kind}; remove them "
                    "first, or use another state directory",
                    hint=mend,
                )
        if os.listdir(self._state_dir / "layers"):
            raise InvalidRequest(
                f"there are unreferenced files in {self._state_dir / 'layers'}; remove them first", hint="atoll gc"
            )

    def _require_room(self, size_bytes: int) -> None:
        import shutil

        free = shutil.disk_usage(self._state_dir).free
        if not SMALLEST_BYTES <= size_bytes <= free:
            raise InvalidRequest(
                f"a file system of {size_bytes} bytes cannot be created in {self._state_dir}: the size must be at "
                f"least {SMALLEST_BYTES} and at most the {free} bytes that are free"
            )


async def mount(state_dir: Path) -> None:
    """Mount the file system of the layers, if they have one and it is not mounted.

    Raises:
        InvalidRequest: it cannot be mounted, or its record cannot be read.
        SandboxError: timed out waiting for another process that mounts it.
    """
    record = _read(state_dir)
    if record is None or _is_ready(state_dir, record):
        return
    async with _locked(state_dir):
        record = _read(state_dir)
        if record is None or _is_ready(state_dir, record):
            return
        try:
            await anyio.to_thread.run_sync(partial(_mount, state_dir, record))
        except (OSError, SandboxError) as error:
            raise InvalidRequest(
                f"the state directory {state_dir} cannot be used: its file system {_image(state_dir)} could not be "
                f"mounted: {error}",
                hint="mounting needs root and an undamaged file; see also 'dmesg'",
            ) from error


# ---- files ----


def _image(state_dir: Path) -> Path:
    return state_dir / "storage.img"


def _record(state_dir: Path) -> Path:
    return state_dir / "storage.json"


def _read(state_dir: Path) -> LoopStorageRecord | None:
    try:
        return read_record(_record(state_dir), LoopStorageRecord, f"the file system of {state_dir / 'layers'}")
    except SandboxError as error:
        raise InvalidRequest(error.message, hint=error.hint, **error.details) from error


def _remove_files(state_dir: Path) -> None:
    _record(state_dir).unlink(missing_ok=True)
    sync(state_dir)
    for left in (_image(state_dir), state_dir / "storage.new"):
        left.unlink(missing_ok=True)


def _locked(state_dir: Path) -> AbstractAsyncContextManager[None]:
    return locked(state_dir / "storage.lock", _LOCK_TIMEOUT_S, "setting up the storage of the layers")


# ---- mounts ----


def _is_mounted(state_dir: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return (state_dir / "layers").stat().st_dev != state_dir.stat().st_dev
    return False


def _is_ready(state_dir: Path, record: LoopStorageRecord) -> bool:
    if not _is_mounted(state_dir):
        return False
    return record.filesystem != "btrfs" or storage.probe(state_dir / "layers", root=True).limits


def _mount(state_dir: Path, record: LoopStorageRecord) -> None:
    place = state_dir / "layers"
    place.mkdir(mode=0o700, exist_ok=True)
    if not _is_mounted(state_dir):
        with _device(_image(state_dir)) as device:
            _mount_device(device, place, record.filesystem)
    place.chmod(0o700)
    if record.filesystem == "btrfs":
        try:
            storage.enable_quotas(place)
        except OSError as error:
            raise SandboxError(f"quotas could not be enabled: {error.strerror}") from error


def _mount_device(device: str, place: Path, filesystem: StorageKind) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    number = 0
    # Overlays on it have their own flags, and need no device to be opened for whiteouts.
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOATIME
    deadline = time.monotonic() + _RELEASE_S
    for options in _OPTIONS[filesystem]:
        while True:
            if libc.mount(device.encode(), os.fsencode(place), filesystem.encode(), flags, options.encode()) == 0:
                return
            number = ctypes.get_errno()
            if number != errno.EBUSY or time.monotonic() > deadline:
                break
            time.sleep(0.01)  # a mount of it in another namespace is being removed
    raise SandboxError(f"{filesystem} on {device}: {os.strerror(number)}")


def _unmount(place: Path) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(place), 0) != 0:
        number = ctypes.get_errno()
        if number == errno.EBUSY:
            raise InvalidRequest(
                f"{place} cannot be unmounted while a program uses it; end that program first",
                hint=f"fuser -vm {place}",
            )
        raise SandboxError(f"{place} could not be unmounted: {os.strerror(number)}")


# ---- loop devices ----


@contextlib.contextmanager
def _device(image: Path) -> Iterator[str]:
    """The loop device of the file `image`, or a new one. It frees itself unless it is mounted."""
    file = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    try:
        path, device = _device_of(image) or _new_device(file)
        try:
            yield path  # while it is open it does not free itself
        finally:
            os.close(device)
    finally:
        os.close(file)


def _new_device(file: int) -> tuple[str, int]:
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_TRIES):
            path = f"/dev/loop{fcntl.ioctl(control, _LOOP_GET_FREE)}"
            device = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            status = _LOOP_STATUS.pack(*[0] * 8, _LOOP_AUTOCLEAR | _LOOP_DIRECT, b"atoll", b"", b"", 0, 0)
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, struct.pack("=II", file, 0) + status + bytes(64))
                return path, device
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:  # else another process took it first
                    raise
    finally:
        os.close(control)
    raise SandboxError("no loop device is free", hint="losetup --list")


def _device_of(image: Path) -> tuple[str, int] | None:
    """The loop device of the file `image`, and a descriptor of it, if it has one."""
    try:
        seen = image.stat()
    except FileNotFoundError:
        return None
    for loop in Path("/sys/block").glob("loop*/loop"):
        path = f"/dev/{loop.parent.name}"
        with contextlib.suppress(OSError):
            device = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            status = bytearray(_LOOP_STATUS.size)
            with contextlib.suppress(OSError):
                fcntl.ioctl(device, _LOOP_GET_STATUS, status, True)
                if _LOOP_STATUS.unpack(status)[:2] == (seen.st_dev, seen.st_ino):
                    return path, device
            os.close(device)
    return None


def _has_device(image: Path) -> bool:
    found = _device_of(image)
    if found is not None:
        os.close(found[1])
    return found is not None
