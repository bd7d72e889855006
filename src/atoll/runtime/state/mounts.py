"""Mounts of a sandbox: which directories of the host it may see, found once and recorded.

Owns the rules for a mount's source and target, and what is recorded of it: the path without symlinks, and whose files
are whose. Not here: mounting (`drivers/keeper/launch.c`), which opens the recorded path anew at each start and refuses
a symlink in it, and who may ask for a mount: callers of `Engine.create` and operators, never a model. Used by
`provisioning.py` and `lifecycle/`.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from atoll.contract.driver import BindMount, Driver, MountOwner
from atoll.contract.errors import InvalidRequest, Unenforceable
from atoll.contract.frozen import Frozen
from atoll.contract.model import Mount, ResolvedMount
from atoll.drivers.keeper_command import ID_COUNT, MOUNT_IDS
from atoll.drivers.machine import filesystem_type

_HOST_ONLY = ("/proc", "/sys", "/dev", "/run")
"""The machine's own: neither these nor what is below them is a directory of files."""
_KERNEL_FILESYSTEMS = {
    *(0x9FA0, 0x62656572, 0x27E0EB, 0x63677270, 0x1CD1, 0x64626720, 0x74726163, 0x73636673, 0xCAFE4A11),
    *(0x62656570, 0x42494E4D, 0xDE5E81E4, 0x19800202, 0x6E736673),
}
"""proc, sysfs, cgroup, cgroup2, devpts, debugfs, tracefs, securityfs, bpf, configfs, binfmt_misc, efivarfs, mqueue and
nsfs, wherever they are mounted."""
_USED_INSIDE = ("/proc", "/sys", "/dev", "/run", "/var/run")
"""Where Atoll and the runtimes mount inside: nothing is mounted there or below."""
_SYSTEM_INSIDE = {
    *("/", "/bin", "/boot", "/etc", "/home", "/home/user", "/lib", "/lib32", "/lib64", "/libx32", "/root", "/sbin"),
    *("/tmp", "/usr", "/var"),
}
"""Directories inside that hold more than a mount could: their subdirectories can be mounted on."""


class PinnedMount(Frozen):
    """A mount as it was found when its sandbox was created."""

    mount: Mount
    """With a path that has no symlinks, and `read_only` set."""
    owner: MountOwner | None = None
    """Unset: of a volume, and where all sandboxes share the ids of the user who runs Atoll."""

    def bound(self, volume_path: Callable[[str], Path]) -> BindMount:
        """For a start of the sandbox.

        Raises:
            What `volume_path` does for a volume that does not exist.
        """
        name = self.mount.volume
        return BindMount(
            source=Path(self.mount.source) if name is None else volume_path(name),
            target=self.mount.target,
            read_only=self.mount.is_read_only,
            owner=self.owner,
        )


def pin(
    mounts: Sequence[Mount],
    driver: Driver,
    state_dir: Path,
    ids_inside: tuple[int, int],
    volume_path: Callable[[str], Path],
) -> tuple[PinnedMount, ...]:
    """Find the directories that `mounts` mean now, for a sandbox whose user has `ids_inside`.

    A mount comes after one that it is inside of.

    Raises:
        InvalidRequest: a source or a target is not allowed, or they contradict each other.
        Unenforceable: the driver has no mounts, or cannot make one writable for the sandbox's user.
    """
    if mounts and not driver.capabilities.mounts:
        raise Unenforceable(f"the runtime {driver.name} cannot mount directories; leave the mounts out, or use crun")
    found: dict[str, PinnedMount] = {}
    for mount in sorted(mounts, key=lambda each: _target(each.target)):
        target = _target(mount.target)
        if target in found:
            raise InvalidRequest(f"two mounts have the target {target}; give each mount a target of its own")
        changes: dict[str, object] = {"target": target, "read_only": mount.is_read_only}
        owner = None
        if mount.volume is None:
            path, seen = _find_directory(mount.source, state_dir)
            if isinstance(mount, ResolvedMount) and path != mount.source:
                raise _cannot_mount(mount.source, "it changed after it was checked; try again")
            changes["source"] = path
            owner = _owner_of(path, seen, driver, ids_inside, writes=not mount.is_read_only)
        pinned = PinnedMount(mount=mount.model_copy(update=changes), owner=owner)
        pinned.bound(volume_path)  # the volume exists
        for outer in found.values():
            _require_mount_point(pinned, outer, volume_path)
        found[target] = pinned
    return tuple(found.values())


# ---- targets ----


def _target(target: str) -> str:
    """
    Raises:
        InvalidRequest: nothing can be mounted there.
    """
    if not target.startswith("/") or ".." in target.split("/") or "\0" in target or "\n" in target:
        raise InvalidRequest(f"the target {target!r} of a mount is not an absolute path without '..', such as /work")
    clean = posixpath.normpath("/" + target.lstrip("/"))
    if clean in _SYSTEM_INSIDE or any(_is_below(clean, path) for path in _USED_INSIDE):
        raise InvalidRequest(
            f"nothing can be mounted on {clean}, which the sandbox itself uses; choose another target, such as /work "
            "or /home/user/project"
        )
    return clean


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory + "/")


def _require_mount_point(inner: PinnedMount, outer: PinnedMount, volume_path: Callable[[str], Path]) -> None:
    """
    Raises:
        InvalidRequest: the one is inside the other, and its directory is missing there: it would be made on the host.
    """
    if not _is_below(inner.mount.target, outer.mount.target):
        return
    place = outer.bound(volume_path).source
    for part in Path(inner.mount.target).relative_to(outer.mount.target).parts:
        place /= part
        if not (os.path.lexists(place) and stat.S_ISDIR(place.lstat().st_mode)):
            raise InvalidRequest(
                f"the target {inner.mount.target} is inside the mount on {outer.mount.target}, where there is no such "
                f"directory; make it first: mkdir -p {place}"
            )


# ---- sources ----


def _find_directory(source: str, state_dir: Path) -> tuple[str, os.stat_result]:
    """The path of a directory of the host, with all symlinks followed, and its status.

    Raises:
        InvalidRequest: it is none that may be mounted.
    """
    try:
        path = os.path.realpath(source, strict=True)
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise _cannot_mount(source, _why(error)) from None
    try:
        if os.readlink(f"/proc/self/fd/{fd}") != path:
            raise _cannot_mount(source, "it changed while it was resolved; try again")
        seen = os.fstat(fd)
        kind = filesystem_type(Path(f"/proc/self/fd/{fd}"))
    finally:
        os.close(fd)
    if path == "/" or kind in _KERNEL_FILESYSTEMS or any(_is_below(path, each) for each in _HOST_ONLY):
        raise _cannot_mount(source, "it is the machine's own: its root, /proc, /sys, /dev, /run, or in one of them")
    if not os.access(path, os.R_OK | os.X_OK):
        raise _cannot_mount(source, "this user may not read it")
    state = os.stat(state_dir)
    if any(os.path.samestat(state, each) for each in _status_upwards(path)) or any(
        os.path.samestat(seen, each) for each in _status_upwards(os.path.realpath(state_dir))
    ):
        raise _cannot_mount(source, f"it is, has in it or is in the state directory {state_dir}")
    return path, seen


def _why(error: OSError | ValueError) -> str:
    number = getattr(error, "errno", None)
    if number == errno.ENOENT:
        return "there is no such directory"
    if number == errno.ENOTDIR:
        return "it is not a directory; copy a file in instead (files.upload, atoll cp)"
    return getattr(error, "strerror", None) or str(error)


def _cannot_mount(source: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{source} cannot be mounted: {why}", source=source)


def _status_upwards(path: str) -> Iterator[os.stat_result]:
    """The status of a directory, and of each that it is in. Not paths: one directory may be mounted in two places."""
    yield os.stat(path)
    while (parent := os.path.dirname(path)) != path:
        path = parent
        yield os.stat(path)


def _owner_of(
    path: str, seen: os.stat_result, driver: Driver, ids_inside: tuple[int, int], *, writes: bool
) -> MountOwner | None:
    able = driver.capabilities
    uid, gid = ids_inside
    if not able.id_range:
        if writes and able.several_users and uid != 0:
            raise Unenforceable(
                f"{path} cannot be mounted for writing: without root on the host, its files are root's inside, and the "
                "sandbox's user is another; create the sandbox with user='root' (--user root), or mount it read-only"
            )
        return None
    for kind, id in (("user", seen.st_uid), ("group", seen.st_gid)):
        if MOUNT_IDS <= id <= MOUNT_IDS + ID_COUNT:
            raise _cannot_mount(
                path, f"it belongs to the {kind} id {id}, which a sandbox gave it; give it an owner first: chown -R"
            )
    return MountOwner(uid=seen.st_uid, gid=seen.st_gid, uid_inside=uid, gid_inside=gid)
