"""A file system of the layers' own, in a file: for machines whose file system has no snapshots and no quotas.

Knows the file, the loop device and the mount, and in which order they come and go. Refuses to know what layers are,
and what a file system can do for them (`drivers/storage.py`).

    storage.img     the file system, sparse
    storage.json    that it is to be mounted on `layers/`. Written last and removed first: without it, what there is of
                    a file is the rest of something half done
    storage.lock    held by whoever makes, mounts or removes it

Whoever opens the state directory mounts what is not mounted, as after a reboot. The loop device frees itself with the
last mount (autoclear), also when whoever set it up is killed before the first. One file has one device, however many
mount namespaces it is mounted in: a second one would let two file systems write to the same blocks.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
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
from pydantic import ValidationError

from atoll.contract.errors import InvalidRequest, RuntimeUnavailable, SandboxError, Unenforceable
from atoll.contract.model import Frozen, StorageInfo
from atoll.drivers import storage
from atoll.drivers.locks import locked
from atoll.drivers.machine import find_program
from atoll.runtime.state.layers import Layers
from atoll.runtime.state.store import write_atomic
from atoll.settings import program_environment

Kind = Literal["btrfs", "xfs"]
SMALLEST_BYTES = 512 * 1024**2
"""What both kinds can be made in."""

_MAKERS: dict[Kind, tuple[str, tuple[str, ...]]] = {
    # What stands below keeps one copy of everything too.
    "btrfs": ("btrfs-progs", ("mkfs.btrfs", "--quiet", "--force", "--metadata", "single")),
    "xfs": ("xfsprogs", ("mkfs.xfs", "-q", "-f", "-m", "reflink=1")),
}
_OPTIONS: dict[Kind, tuple[str, ...]] = {
    "btrfs": ("discard=async",),
    "xfs": ("discard,prjquota", "discard"),  # the second on kernels that were built without XFS's quotas
}
_MS_NOSUID, _MS_NODEV, _MS_NOATIME = 2, 4, 1024
_LOOP_GET_FREE, _LOOP_CONFIGURE, _LOOP_GET_STATUS = 0x4C82, 0x4C0A, 0x4C05
_LOOP_STATUS = struct.Struct("=QQQQQIIII64s64s32sQQ")
_LOOP_AUTOCLEAR, _LOOP_DIRECT = 4, 16
_PATIENCE_S = 60
_TRIES = 64
_RELEASE_S = 3.0


class Record(Frozen):
    """What `storage.json` says."""

    version: int = 1
    filesystem: Kind
    size_bytes: int


class LoopStorage:
    """What the layers of a state directory stand on. `runtime.storage`."""

    def __init__(self, state_dir: Path, layers: Layers, tidy: Callable[[], Awaitable[object]]) -> None:
        self._state_dir = state_dir
        self._layers = layers
        self._tidy = tidy
        """Takes away layers that nobody names."""

    def look(self) -> StorageInfo:
        """What the layers stand on, and what that can do."""
        place = self._state_dir / "layers"
        facts = storage.probe(place, root=os.geteuid() == 0)
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
            lack=facts.missing,
            fix=facts.fix,
            image=None if record is None else _image(self._state_dir),
        )

    async def init(self, size_bytes: int, filesystem: Kind = "btrfs") -> StorageInfo:
        """Give the layers a file system of `size_bytes`. When it fails or is cancelled, all is as it was.

        Raises:
            InvalidRequest: the size does not fit, there is one already, or there are sandboxes or checkpoints.
            RuntimeUnavailable: the program that makes such a file system is not on this machine.
            Unenforceable: this is not root.
            SandboxError: the machine could not make or mount it.
        """
        self._require_root("made")
        maker = find_program(_MAKERS[filesystem][1][0])
        if maker is None:
            package, command = _MAKERS[filesystem]
            raise RuntimeUnavailable(
                f"{command[0]} is not on this machine, and makes such a file system", hint=f"apt-get install {package}"
            )
        async with self._alone():
            if _read(self._state_dir) is not None:
                raise InvalidRequest("the layers have a file system of their own already; remove it first")
            self._require_empty("put on another file system")
            self._require_room(size_bytes)
            with anyio.CancelScope(shield=True):
                try:
                    await anyio.to_thread.run_sync(self._make, size_bytes, filesystem, maker)
                except BaseException:
                    if _is_mounted(self._state_dir):
                        _unmount(self._state_dir / "layers")
                    _remove_files(self._state_dir)
                    raise
        return self.look()

    async def remove(self) -> None:
        """Put the layers back on the state directory's own file system, and free all that theirs took.

        Raises:
            InvalidRequest: there are sandboxes or checkpoints, or something else uses it.
            Unenforceable: this is not root.
        """
        self._require_root("removed")
        async with self._alone():
            self._require_empty("taken from their file system")
            if _read(self._state_dir) is not None and _is_mounted(self._state_dir):
                _unmount(self._state_dir / "layers")
            # Sandboxes of other state directories may have the mount in their namespaces. It goes with its place.
            (self._state_dir / "layers").rmdir()
            (self._state_dir / "layers").mkdir(mode=0o700)
            image = _image(self._state_dir)
            with anyio.move_on_after(_RELEASE_S):
                while _has_device(image):  # noqa: ASYNC110 - the kernel frees it
                    await anyio.sleep(0.01)
            _remove_files(self._state_dir)

    def _make(self, size_bytes: int, filesystem: Kind, maker: str) -> None:
        image = _image(self._state_dir)
        image.unlink(missing_ok=True)  # what somebody left half done
        with open(image, "xb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.truncate(size_bytes)
        command = [maker, *_MAKERS[filesystem][1][1:], str(image)]
        made = subprocess.run(command, capture_output=True, env=program_environment(), check=False)
        if made.returncode != 0:
            said = made.stderr.decode(errors="replace").strip()[-500:]
            raise SandboxError(f"{_MAKERS[filesystem][1][0]} failed: {said}")
        _sync(image)
        record = Record(filesystem=filesystem, size_bytes=size_bytes)
        write_atomic(_record(self._state_dir), record.model_dump_json())
        _sync(self._state_dir)
        _mount(self._state_dir, record)

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """With nobody else at work on layers, none of which is nobody's, and with the storage locked."""
        await self._tidy()
        async with self._layers.lock(exclusive=True), _locked(self._state_dir):
            yield

    def _require_root(self, done: str) -> None:
        if os.geteuid() != 0:
            raise Unenforceable(f"a file system can only be {done} by root", hint="sudo atoll storage")

    def _require_empty(self, done: str) -> None:
        for kind, mend in (("sandboxes", "atoll rm --all"), ("checkpoints", "atoll checkpoints --delete ID")):
            count = len(os.listdir(self._state_dir / kind))
            if count:
                raise InvalidRequest(
                    f"{count} {kind} are in {self._state_dir}, so its layers cannot be {done}; remove them first, or "
                    "use another state directory",
                    hint=mend,
                )
        if os.listdir(self._state_dir / "layers"):
            raise InvalidRequest(f"there are files in {self._state_dir / 'layers'} that nobody needs", hint="atoll gc")

    def _require_room(self, size_bytes: int) -> None:
        free = shutil.disk_usage(self._state_dir).free
        if not SMALLEST_BYTES <= size_bytes <= free:
            raise InvalidRequest(
                f"a file system of {size_bytes} bytes cannot be made in {self._state_dir}: it takes at least "
                f"{SMALLEST_BYTES}, and {free} are free"
            )


async def mount(state_dir: Path) -> None:
    """Mount the layers' own file system, if they have one and it is not mounted. Whoever else does it is waited for.

    Raises:
        InvalidRequest: it cannot be mounted.
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
                hint="are you root? is the file whole? 'dmesg' may tell more",
            ) from error


# ---- files ----


def _image(state_dir: Path) -> Path:
    return state_dir / "storage.img"


def _record(state_dir: Path) -> Path:
    return state_dir / "storage.json"


def _read(state_dir: Path) -> Record | None:
    try:
        return Record.model_validate_json(_record(state_dir).read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise InvalidRequest(f"{_record(state_dir)} cannot be read", hint=str(error)) from error


def _remove_files(state_dir: Path) -> None:
    _record(state_dir).unlink(missing_ok=True)
    _sync(state_dir)
    for left in (_image(state_dir), state_dir / "storage.new"):
        left.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _locked(state_dir: Path) -> AbstractAsyncContextManager[None]:
    return locked(state_dir / "storage.lock", _PATIENCE_S, "changing the storage")


# ---- mounts ----


def _is_mounted(state_dir: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return (state_dir / "layers").stat().st_dev != state_dir.stat().st_dev
    return False


def _is_ready(state_dir: Path, record: Record) -> bool:
    if not _is_mounted(state_dir):
        return False
    return record.filesystem != "btrfs" or storage.probe(state_dir / "layers", root=True).limits


def _mount(state_dir: Path, record: Record) -> None:
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
            raise SandboxError(f"its quotas could not be turned on: {error.strerror}") from error


def _mount_device(device: str, place: Path, filesystem: Kind) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    number = 0
    # Overlays on it have flags of their own; whiteouts are no devices that anybody opens.
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOATIME
    deadline = time.monotonic() + _RELEASE_S
    for options in _OPTIONS[filesystem]:
        while True:
            if libc.mount(device.encode(), os.fsencode(place), filesystem.encode(), flags, options.encode()) == 0:
                return
            number = ctypes.get_errno()
            if number != errno.EBUSY or time.monotonic() > deadline:
                break
            time.sleep(0.01)  # a mount of it in another namespace is just going
    raise SandboxError(f"{filesystem} on {device}: {os.strerror(number)}")


def _unmount(place: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(place), 0) != 0:
        number = ctypes.get_errno()
        if number == errno.EBUSY:
            raise InvalidRequest(f"some program still uses {place}; end it first", hint=f"fuser -vm {place}")
        raise SandboxError(f"{place} could not be unmounted: {os.strerror(number)}")


# ---- loop devices ----


@contextlib.contextmanager
def _device(image: Path) -> Iterator[str]:
    """A loop device with `image` in it, the one that it has or a new one. It frees itself unless it is mounted."""
    file = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    try:
        path, device = _device_of(image) or _new_device(file)
        try:
            yield path  # as long as it is open it cannot free itself
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
                if error.errno != errno.EBUSY:  # else another was quicker
                    raise
    finally:
        os.close(control)
    raise SandboxError("no loop device is free", hint="losetup --list")


def _device_of(image: Path) -> tuple[str, int] | None:
    """The loop device that has `image` in it, and a descriptor of it, if any has."""
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
