"""Snapshots and quotas of the file system that holds the layers.

Owns the kinds of file systems and their system calls: btrfs (a layer is a subvolume, a limit belongs to its quota
group), project quotas (XFS, ext4), and all others, which have neither. Not here: copying without snapshots
(`layer_store.py`), and making such a file system (`runtime/state/loop_storage.py`).

Only root's layers are subvolumes, because an unprivileged user may not remove one. Everything else, also on btrfs, is
an ordinary directory to every function here, so layers of both kinds can exist beside each other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from atoll.contract.errors import Unenforceable
from atoll.drivers.machine import filesystem_type, libc

_BTRFS, _XFS, _EXT4 = 0x9123683E, 0x58465342, 0xEF53
_NAMES = {
    _BTRFS: "btrfs",
    _XFS: "xfs",
    _EXT4: "ext4",
    0x01021994: "tmpfs",
    0x2FC12FC1: "zfs",
    0xCA451A4E: "bcachefs",
    0xF2F52010: "f2fs",
    0x794C7630: "overlay",
    0x6969: "nfs",
    0x65735546: "fuse",
    0x4D44: "vfat",
    0x01021997: "9p",
    0xFF534D42: "cifs",
    0xFE534D42: "smb",
    0x2011BAB0: "exfat",
    0x5346544E: "ntfs",
}

_FICLONE = 0x40049409

_SUBVOLUME_INODE = 256
_VOLUME = struct.Struct("=q4088s")
_VOLUME_2 = struct.Struct("=qQQ32x4040s")
_SNAP_DESTROY, _SNAP_CREATE, _SUBVOL_CREATE = 0x5000940F, 0x50009417, 0x50009418
_INO_LOOKUP, _SYNC, _FS_INFO = 0xD0009412, 0x9408, 0x8400941F
_QUOTA_CTL, _QUOTA_ENABLE, _QUOTA_RESCAN = 0xC0109428, 1, 0x4040942C
_QGROUP_CREATE, _QGROUP_LIMIT, _MAX_REFERENCED = 0x4010942A, 0x8030942B, 1
_NO_LIMIT = 2**64 - 1
_DEEPEST_TREE = "8"

_XATTR = struct.Struct("=5I8x")
_GET_XATTR, _SET_XATTR, _PROJECT_INHERIT = 0x801C581F, 0x401C5820, 0x200
_SYS_QUOTACTL_FD, _PROJECT_QUOTA = 443, 2
_Q_GET, _Q_SET_LIMITS, _Q_STATE = 0x5803, 0x5804, 0x5808
_QUOTA = struct.Struct("=bbHI6Q16x3Q16x")
_HARD_LIMITS = 1 << 3 | 1 << 1
_ENFORCED = 1 << 5
_SECTOR, _BLOCK, _SPARE_FILES = 512, 4096, 1024


class Facts(NamedTuple):
    """What a file system offers to layers."""

    filesystem: str
    snapshots: bool
    """A layer is copied in constant time."""
    limits: bool
    """What is written to a layer can be limited."""
    missing: str | None = None
    """Why limits cannot be enforced. Unset: they can be."""
    fix: str | None = None
    """The command that fixes it."""


def probe(path: Path, *, root: bool) -> Facts:
    """What the file system of `path` offers. Takes some microseconds."""
    kind = filesystem_type(path)
    name = _name(kind)
    snapshots = kind == _BTRFS and root
    if not root:
        return Facts(name, snapshots, limits=False, missing="only root may set quotas", fix="run as root")
    if kind == _BTRFS:
        if _quota_groups(path) is not None:
            return Facts(name, snapshots, limits=True)
        return Facts(name, snapshots, False, "quotas of this btrfs are off", f"btrfs quota enable {path}")
    if kind in (_XFS, _EXT4) and _has_project_quotas(path):
        return Facts(name, snapshots, limits=True)
    missing = f"the state directory is on {name} without project quotas"
    if kind not in (_XFS, _EXT4):
        missing = f"the state directory is on {name}, which has no quotas for directories"
    return Facts(name, snapshots, False, missing, "atoll storage init --size 50G")


def filesystem_name(path: Path) -> str:
    """The name of the file system of `path`, or its magic number if it is none that people use."""
    return _name(filesystem_type(path))


def _name(kind: int) -> str:
    return _NAMES.get(kind, f"{kind:#x}")


def shares_data(path: Path) -> bool:
    """Whether files in the directory `path` can share data (reflinks). Tries it."""
    with contextlib.ExitStack() as stack:
        try:
            one, other = (os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600) for _ in range(2))
        except OSError:
            return False
        stack.callback(os.close, one)
        stack.callback(os.close, other)
        os.write(one, bytes(4096))
        try:
            fcntl.ioctl(other, _FICLONE, one)
        except OSError:
            return False
        return True


def make(path: Path) -> None:
    """Make the directory of a new layer."""
    if os.geteuid() == 0 and filesystem_type(path.parent) == _BTRFS:
        with _opened(path.parent) as parent:
            _ask(parent, _SUBVOL_CREATE, _VOLUME_2.pack(0, 0, 0, os.fsencode(path.name)))
        path.chmod(0o700)
    else:
        path.mkdir(mode=0o700)


def snapshot(source: Path, target: Path) -> bool:
    """Make `target` a snapshot of the layer `source`. False: this file system has none, and nothing is done."""
    if not is_subvolume(source):
        return False
    with _opened(target.parent) as parent, _opened(source) as origin:
        _ask(parent, _SNAP_CREATE, _VOLUME_2.pack(origin, 0, 0, os.fsencode(target.name)))
    if _quota_groups(target) is not None:
        _limit_group(target, _NO_LIMIT)  # the source's limit came with it
    return True


def remove(path: Path) -> bool:
    """Remove a layer in constant time. False: it is an ordinary directory, or removing failed."""
    if not is_subvolume(path):
        return False
    try:
        with _opened(path) as fd:
            group = _subvolume_id(fd)
        with _opened(path.parent) as parent:
            _ask(parent, _SNAP_DESTROY, _VOLUME.pack(0, os.fsencode(path.name)))
            # Kernels before 6.10 leave the group behind; later ones remove it themselves, when they have freed all.
            with contextlib.suppress(OSError):
                _ask(parent, _QGROUP_CREATE, struct.pack("=QQ", 0, group))
            # Otherwise the space is free after half a minute. START_SYNC would not wait for the commit, but sometimes
            # waits for that half a minute: it loses the wake-up of a kernel thread that is about to sleep.
            with contextlib.suppress(OSError):
                fcntl.ioctl(parent, _SYNC)
    except OSError:
        return False
    return True


def remove_few(path: Path, most: int) -> bool:
    """Remove a directory and all that is in it, if that is at most `most` entries. False: some of it is left.

    Neither symlinks nor mounts are followed, and nothing of a sandbox may run: what has more is for a program.
    """
    left = most

    def empty(fd: int, device: int) -> bool:
        nonlocal left
        entries = list(os.scandir(fd))
        left -= len(entries)
        if left < 0 or os.fstat(fd).st_dev != device:
            return False
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=fd)
                continue
            inner = os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            try:
                if not empty(inner, device):
                    return False
            finally:
                os.close(inner)
            os.rmdir(entry.name, dir_fd=fd)
        return True

    try:
        with _opened(path) as fd:
            if not empty(fd, os.fstat(fd).st_dev):
                return False
        path.rmdir()
    except OSError:
        return False
    return True


def prepare_quota(path: Path, *, root: bool) -> None:
    """Prepare the layer `path` for a limit on what is written to it. The limit holds once the keeper has set it.

    Raises:
        Unenforceable: it cannot be limited; the message says why and how to fix it.
    """
    facts = probe(path, root=root)
    if facts.limits and facts.filesystem == "btrfs" and is_subvolume(path):
        _keep_accounting(path)
        _limit_group(path, _NO_LIMIT)
        return
    if facts.limits and facts.filesystem != "btrfs" and _give_project(path):
        return
    raise _no_quota(facts)


def change_quota(path: Path, limit_bytes: int, *, root: bool) -> None:
    """Limit what is written to the layer `path`, in place of the limit that it has or has not. A sandbox may run on it.

    Raises:
        Unenforceable: it cannot be limited; the message says why and how to fix it.
    """
    facts = probe(path, root=root)
    if facts.limits and facts.filesystem == "btrfs" and is_subvolume(path):
        _keep_accounting(path)
        _limit_group(path, limit_bytes)
        return
    if facts.limits and facts.filesystem != "btrfs":
        with _opened(path) as fd:
            project = _XATTR.unpack(_ask(fd, _GET_XATTR, bytes(_XATTR.size)))[3]
            if project:
                _limit_project(fd, project, limit_bytes)
                return
            if not os.listdir(fd):
                return  # it has its project and its limit when a sandbox starts on it
    raise _no_quota(facts)


def _no_quota(facts: Facts) -> Unenforceable:
    missing = facts.missing or "the files that it already has are not under a quota"
    fix = facts.fix or "atoll fork NAME"
    return Unenforceable(
        f"a disk limit cannot be enforced here: {missing}; leave the limit out, or run: {fix}",
        hint="atoll storage",
        limit="disk",
    )


def limit(path: Path, size_bytes: int, *, root: bool) -> None:
    """Limit what is written to the layer `path`, which is empty, until it is removed.

    Raises:
        Unenforceable: as `prepare_quota`.
    """
    prepare_quota(path, root=root)
    with _opened(path) as fd:
        if is_subvolume(path):
            _ask(fd, _QGROUP_LIMIT, struct.pack("=6Q", 0, _MAX_REFERENCED, size_bytes, 0, 0, 0))
        else:
            _limit_project(fd, _project(fd), size_bytes)


# ---- btrfs ----


def enable_quotas(path: Path) -> None:
    """Turn on quota groups of a btrfs, which count what each subvolume refers to.

    Not its simple quotas: they charge a sandbox for files that it has deleted, as long as a checkpoint holds them.
    """
    if _quota_groups(path) is None:
        with _opened(path) as fd:
            _ask(fd, _QUOTA_CTL, struct.pack("=QQ", _QUOTA_ENABLE, 0))


def is_subvolume(path: Path) -> bool:
    try:
        return path.lstat().st_ino == _SUBVOLUME_INODE and filesystem_type(path) == _BTRFS
    except OSError:
        return False


def _subvolume_id(fd: int) -> int:
    answer = _ask(fd, _INO_LOOKUP, struct.pack("=QQ4080x", 0, _SUBVOLUME_INODE))
    return int(struct.unpack_from("=Q", answer)[0])


def _quota_groups(path: Path) -> Path | None:
    """Where the kernel reports the quota groups of the btrfs at `path`. None: quotas are off."""
    with _opened(path) as fd:
        answer = _ask(fd, _FS_INFO, bytes(1024))
    id = answer[16:32].hex()
    told = Path(f"/sys/fs/btrfs/{id[:8]}-{id[8:12]}-{id[12:16]}-{id[16:20]}-{id[20:]}/qgroups")
    try:
        return told if (told / "enabled").read_text().strip() != "0" else None
    except OSError:
        return told if told.is_dir() else None


def _limit_group(path: Path, limit_bytes: int) -> None:
    with _opened(path) as fd:
        _ask(fd, _QGROUP_LIMIT, struct.pack("=6Q", 0, _MAX_REFERENCED, limit_bytes, 0, 0, 0))


def _keep_accounting(path: Path) -> None:
    """Keep the kernel's accounting on: by default it stops when a large shared tree is removed, until a rescan."""
    groups = _quota_groups(path)
    if groups is None:
        return
    with contextlib.suppress(OSError):
        threshold = groups / "drop_subtree_threshold"
        if threshold.read_text().strip() != _DEEPEST_TREE:
            threshold.write_text(_DEEPEST_TREE)
        if (groups / "inconsistent").read_text().strip() != "0":
            with _opened(path) as fd:
                _ask(fd, _QUOTA_RESCAN, bytes(64))


# ---- project quotas ----


def _has_project_quotas(path: Path) -> bool:
    state = bytearray(256)
    state[0] = 1
    with _opened(path) as fd:
        return _quotactl(fd, _Q_STATE, 0, state) == 0 and bool(struct.unpack_from("=H", state, 2)[0] & _ENFORCED)


def _give_project(path: Path) -> bool:
    """Give the layer a project of its own, which all that is made in it inherits, without a limit.

    False: it already holds files without a project.
    """
    with _opened(path) as fd:
        flags, extent, _, project, shared_extent = _XATTR.unpack(_ask(fd, _GET_XATTR, bytes(_XATTR.size)))
        if not project and os.listdir(fd):
            return False
        if not project:
            project = _free_project(fd)
            flags |= _PROJECT_INHERIT
            _ask(fd, _SET_XATTR, _XATTR.pack(flags, extent, 0, project, shared_extent))
        _limit_project(fd, project, None)
        return True


def _project(fd: int) -> int:
    """The project of an open layer; 0: none."""
    return int(_XATTR.unpack(_ask(fd, _GET_XATTR, bytes(_XATTR.size)))[3])


def projects(paths: Iterable[Path]) -> list[int]:
    """The projects of layers that are about to be removed, for `release`."""
    found = []
    for path in paths:
        if path.is_dir() and not path.is_symlink() and filesystem_type(path) in (_XFS, _EXT4):
            with contextlib.suppress(OSError), _opened(path) as fd:
                found.append(_project(fd))
    return [project for project in found if project]


def release(path: Path, ended: Iterable[int]) -> None:
    """Remove the limits of projects that no layer on the file system of `path` uses any more."""
    for project in ended:
        with contextlib.suppress(OSError), _opened(path) as fd:
            _limit_project(fd, project, None)


def _free_project(fd: int) -> int:
    while True:
        import random

        project = random.SystemRandom().randrange(2**24, 2**31)  # administrators use small numbers
        record = bytearray(_QUOTA.size)
        if _quotactl(fd, _Q_GET, project, record) != 0:
            return project  # unknown to the kernel
        _, _, _, _, hard, soft, _, _, used, files, *_ = _QUOTA.unpack(record)
        if not (hard or soft or used or files):
            return project


def _limit_project(fd: int, project: int, limit_bytes: int | None) -> None:
    """As `limit_project` in `keeper/quota.c`. None: no limit."""
    blocks = files = 0
    if limit_bytes is not None:
        blocks, files = -(-limit_bytes // _SECTOR), limit_bytes // _BLOCK + _SPARE_FILES
    record = bytearray(_QUOTA.pack(1, _PROJECT_QUOTA, _HARD_LIMITS, project, blocks, 0, files, *([0] * 6)))
    number = _quotactl(fd, _Q_SET_LIMITS, project, record)
    if number:
        raise OSError(number, os.strerror(number))


def _quotactl(fd: int, command: int, id: int, record: bytearray) -> int:
    """0, or the errno."""
    import ctypes

    buffer = (ctypes.c_char * len(record)).from_buffer(record)
    done = libc().syscall(
        ctypes.c_long(_SYS_QUOTACTL_FD),
        ctypes.c_uint(fd),
        ctypes.c_uint(command << 8 | _PROJECT_QUOTA),
        ctypes.c_uint(id),
        buffer,
    )
    return 0 if done == 0 else ctypes.get_errno() or errno.EINVAL


def _ask(fd: int, request: int, record: bytes) -> bytes:
    """Make an ioctl, and return the record as the kernel changed it."""
    answer = bytearray(record)  # an immutable one may have 1024 bytes at most
    fcntl.ioctl(fd, request, answer, True)
    return bytes(answer)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
