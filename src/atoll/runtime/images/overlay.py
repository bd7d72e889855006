"""The layer that is generated above each image except `host`, and safe reading of files in an image.

Owns that layer: the account `user` and its home, our name resolution, mount points. To generate it, the image's
accounts are read, and images are hostile: a link may point at a file of this machine, a file may be a pipe or a device.
So each path is followed step by step as inside a sandbox: no link leads out of the image. Not here: where images come
from and where the layer is stored (`store.py`).
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

RECIPE = 2
"""Raise it when `generate` makes something else from the same image."""

HOSTS = "/run/hosts"
"""What `/etc/hosts` is a symlink to: it has the hostname in it, so the guest writes it (`guest/main.c`)."""
RESOLV_CONF = "# No name server: names are resolved by the proxy on the other side of the sandbox.\n"

ACCOUNT_FILES = ("etc/passwd", "etc/group")
"""The files of the image that go into the layer: when one of them changes, the layer is generated again."""

_READ_LIMIT_BYTES = 1024 * 1024
_LINK_LIMIT = 40
_IDS = 65535
"""How many user ids there are in a sandbox."""
_OPEN = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class ResolvedPath(NamedTuple):
    """A file or directory in an image, found as it would be found inside a sandbox."""

    path: tuple[str, ...]
    """Its path below the root, with all links followed."""
    status: os.stat_result
    content: bytes | None
    """The content of a regular file of at most 1 MiB, if it was to be read."""

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.status.st_mode)


def find(root: Path, path: str, *, read: bool = False) -> ResolvedPath | None:
    """Find `path` in the root file system `root`, following links as if `root` were `/`.

    None: it does not exist, or leads through too many links. Only directories are opened and, with `read`, a regular
    file; so neither a pipe nor a device in an image can block this process or disturb the machine.

    Raises:
        OSError: the tree cannot be read at all.
    """
    base = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    walked: list[tuple[str, int]] = []
    ahead = deque(path.split("/"))
    links = 0
    try:
        while ahead:
            name = ahead.popleft()
            if name in ("", "."):
                continue
            if name == "..":
                if walked:
                    os.close(walked.pop()[1])
                continue
            parent = walked[-1][1] if walked else base
            try:
                fd = os.open(name, _OPEN, dir_fd=parent)
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                return None
            walked.append((name, fd))
            if stat.S_ISLNK(os.fstat(fd).st_mode):
                links += 1
                if links > _LINK_LIMIT:
                    return None
                target = os.readlink("", dir_fd=fd)
                os.close(walked.pop()[1])
                while target.startswith("/") and walked:
                    os.close(walked.pop()[1])
                ahead.extendleft(reversed(target.split("/")))
        found = walked[-1][1] if walked else base
        status = os.fstat(found)
        content = _read(found, status) if read else None
        return ResolvedPath(tuple(name for name, _ in walked), status, content)
    finally:
        for _, fd in walked:
            os.close(fd)
        os.close(base)


def find_ids(roots: Sequence[Path], user: str) -> tuple[int, int] | None:
    """The user and group id that `user` means, a name or a number, with `:` and a group after it or without.

    `roots` are the layers of the image's root, the first on top. None: there is no such account, or it has an id that
    does not exist in a sandbox. As `users_find` in `guest/users.c`: a number needs no account, and has group 0 then.
    """
    name, _, group = user.partition(":")
    accounts, groups = (_entries(roots, path) for path in ACCOUNT_FILES)
    account = next((each for each in accounts if name in (each[0], each[2]) and each[3].isdecimal()), None)
    uid, gid = (account[2], account[3]) if account else (name, "0")
    if group:
        gid = next((each[2] for each in groups if each[0] == group), group)
    if not (uid.isdecimal() and gid.isdecimal() and max(int(uid), int(gid)) < _IDS):
        return None
    return int(uid), int(gid)


def _entries(roots: Sequence[Path], path: str) -> list[list[str]]:
    """The lines of the uppermost file `path`, each with at least four fields."""
    for root in roots:
        found = find(root, path, read=True)
        if found is not None:
            lines = (found.content or b"").decode(errors="replace").splitlines()
            return [fields for fields in (line.split(":") for line in lines) if len(fields) >= 4]
    return []


def generate(root: Path, layer: Path, *, rootless: bool) -> None:
    """Generate the layer above the image `root` in the existing, empty directory `layer`.

    Directories that the image has keep their mode and owner. `etc/hosts`, `etc/resolv.conf` and the mount points are
    always ours. Accounts are the image's own and `user` (1000, 1000, `/home/user`), unless it has one of that name;
    another name of 1000 stays as it is. An account file that is not a regular file is replaced.

    Raises:
        OSError: the disk is full, or the layer cannot be written.
    """
    layer.chmod(0o755)
    for name, mode in (("proc", 0o555), ("sys", 0o555), ("dev", 0o755), ("run", 0o755)):
        (layer / name).mkdir()
        (layer / name).chmod(mode)
    if not (root / "tmp").is_symlink():
        (layer / "tmp").mkdir()
        (layer / "tmp").chmod(0o1777)
    etc = _cover(root, layer, "etc", rootless=rootless)
    if etc is not None:
        (etc / "hosts").symlink_to(HOSTS)
        _write(etc / "resolv.conf", RESOLV_CONF.encode())
        shell = "/bin/bash" if _is_program(root, "bin/bash") else "/bin/sh"
        user = f"user:x:1000:1000:user:/home/user:{shell}\n"
        overflow = "nobody:x:65534:65534:nobody:/nonexistent:/sbin/nologin\n"
        _add_account(root, etc / "passwd", "etc/passwd", user, f"root:x:0:0:root:/root:{shell}\n{overflow}")
        _add_account(root, etc / "group", "etc/group", "user:x:1000:\n", "root:x:0:\nnogroup:x:65534:\n")
    home = _cover(root, layer, "home", rootless=rootless)
    if home is not None and find(root, "home/user") is None:
        (home / "user").mkdir()
        (home / "user").chmod(0o755)
        if not rootless:
            os.chown(home / "user", 1000, 1000)


def cleanse(root: Path, *, check: Callable[[], None]) -> int:
    """Remove device nodes and overlay attributes from an unpacked image, and return its size in bytes.

    The driver mounts all file systems `nodev`, so device nodes are of no use inside, and here they would give access to
    the machine's disks. Attributes that control an overlay (opaque directories, redirections) are set by the machine
    alone. Set-user-id bits stay, as the driver mounts `nosuid` with no new privileges.

    Raises:
        OSError: the tree cannot be read.
    """
    total = 0
    linked: set[int] = set()
    stack = [root]
    while stack:
        directory = stack.pop()
        check()
        _grant_access(directory)
        _cleanse_attributes(directory)
        with os.scandir(directory) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
                    os.unlink(entry.path)
                    continue
                if stat.S_ISDIR(status.st_mode):
                    stack.append(Path(entry.path))
                elif stat.S_ISREG(status.st_mode):
                    _cleanse_attributes(Path(entry.path))
                    if status.st_nlink > 1 and status.st_ino in linked:
                        continue
                    linked.add(status.st_ino)
                total += status.st_blocks * 512
    return total


def _grant_access(path: Path) -> None:
    """Give the owner access to a directory whose mode denies it.

    Only an unprivileged user needs that, to read and later to remove the image. Inside, the owner is root, which has
    access anyway: nothing changes there.
    """
    mode = stat.S_IMODE(os.lstat(path).st_mode)
    if mode & 0o700 != 0o700 and os.geteuid() != 0:
        os.chmod(path, mode | 0o700)


def _cleanse_attributes(path: Path) -> None:
    names = [name for name in os.listxattr(path) if name.startswith(("trusted.overlay.", "user.overlay."))]
    if names:
        mode = stat.S_IMODE(os.lstat(path).st_mode)
        os.chmod(path, mode | 0o600)
        for name in names:
            os.removexattr(path, name)
        os.chmod(path, mode)


def _read(fd: int, status: os.stat_result) -> bytes | None:
    if not stat.S_ISREG(status.st_mode) or status.st_size > _READ_LIMIT_BYTES:
        return None
    # An O_PATH descriptor cannot be read. This opens the same file again for reading.
    with open(f"/proc/self/fd/{fd}", "rb") as file:
        return file.read(_READ_LIMIT_BYTES)


def _cover(root: Path, layer: Path, name: str, *, rootless: bool) -> Path | None:
    """The layer's directory above the image's directory `name`, links followed. None: it is not a directory."""
    place = find(root, name)
    if place is None:
        (layer / name).mkdir()
        (layer / name).chmod(0o755)
        return layer / name
    if not place.is_directory:
        return None
    covering = layer
    for depth in range(len(place.path)):
        covering = covering / place.path[depth]
        if covering.exists():
            continue
        covering.mkdir()
        status = os.lstat(root.joinpath(*place.path[: depth + 1]))
        if not rootless:
            os.chown(covering, status.st_uid, status.st_gid)
        covering.chmod(stat.S_IMODE(status.st_mode))
    return covering


def _add_account(root: Path, target: Path, path: str, line: str, missing: str) -> None:
    place = find(root, path, read=True)
    # A pipe would block every program that reads it, the runtime among them.
    if place is None or not stat.S_ISREG(place.status.st_mode):
        _write(target, (missing + line).encode())
    elif place.content is not None:
        name = line.partition(":")[0].encode()
        if any(entry.partition(b":")[0] == name for entry in place.content.splitlines()):
            return
        end = b"" if place.content.endswith(b"\n") or not place.content else b"\n"
        _write(target, place.content + end + line.encode())


def _is_program(root: Path, path: str) -> bool:
    place = find(root, path)
    return place is not None and stat.S_ISREG(place.status.st_mode) and bool(place.status.st_mode & 0o111)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o644)
