"""The layer that makes a sandbox out of any root file system, and how such a tree is read without being fooled.

Over every image but `host` stands one small generated layer: the account `user`, its home, name resolution that is
ours, mount points. To make it, the image's own accounts are read, and images are hostile: a link in one may point at
a file of this machine, a file may be a pipe or a device. So every path is followed here step by step, as it would be
followed inside: no link ever leads out of the tree.

Refuses to know where images come from and where the layer is stored. Above it stands `images.py`.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

RECIPE = 1
"""Raise it when `generate` makes something else from the same image."""

HOSTS = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
RESOLV_CONF = "# No name server: names are resolved by the proxy on the other side of the sandbox.\n"

ACCOUNT_FILES = ("etc/passwd", "etc/group")
"""What of the image goes into the layer: when one of them changes, the layer is out of date."""

_READ_LIMIT_BYTES = 1024 * 1024
_LINK_LIMIT = 40
_OPEN = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class ResolvedPath(NamedTuple):
    """Something in an image, found as it would be found inside."""

    path: tuple[str, ...]
    """Where it really is, below the root, all links followed."""
    status: os.stat_result
    content: bytes | None
    """Of a file that is small enough, if it was asked for."""

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.status.st_mode)


def find(root: Path, path: str, *, read: bool = False) -> ResolvedPath | None:
    """Find `path` in the root file system `root`, following links as if `root` were `/`.

    None: it does not exist, or leads through too many links. Nothing is ever opened but directories, and with `read`
    a regular file; so neither a pipe nor a device in an image can stall or disturb the machine.

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


def generate(root: Path, layer: Path, *, rootless: bool) -> None:
    """Make in the existing, empty directory `layer` what is to stand over the image `root`.

    Directories that the image has keep their mode and owner. `etc/hosts`, `etc/resolv.conf` and the mount points are
    ours in any case. Accounts are the image's own and `user` (1000, 1000, `/home/user`), unless it has one of that
    name; another name of 1000 stays as it is. What stands in their place and is no file is replaced.

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
        _write(etc / "hosts", HOSTS.encode())
        _write(etc / "resolv.conf", RESOLV_CONF.encode())
        shell = "/bin/bash" if _is_program(root, "bin/bash") else "/bin/sh"
        user = f"user:x:1000:1000:user:/home/user:{shell}\n"
        nobody = "nobody:x:65534:65534:nobody:/nonexistent:/sbin/nologin\n"
        _add_account(root, etc / "passwd", "etc/passwd", user, f"root:x:0:0:root:/root:{shell}\n{nobody}")
        _add_account(root, etc / "group", "etc/group", "user:x:1000:\n", "root:x:0:\nnogroup:x:65534:\n")
    home = _cover(root, layer, "home", rootless=rootless)
    if home is not None and find(root, "home/user") is None:
        (home / "user").mkdir()
        (home / "user").chmod(0o755)
        if not rootless:
            os.chown(home / "user", 1000, 1000)


def cleanse(root: Path, *, check: Callable[[], None]) -> int:
    """Take out of an unpacked image what only the machine should make, and return its size in bytes.

    Device nodes go: the driver mounts everything `nodev`, so they are of no use inside, and here they would be doors
    to the machine's disks. Attributes by which an overlay is steered (opaque directories, redirections) go too: they
    are the machine's own. Set-user-id bits stay, as the driver mounts `nosuid` with no new privileges.

    Raises:
        OSError: the tree cannot be read.
    """
    total = 0
    linked: set[int] = set()
    stack = [root]
    while stack:
        directory = stack.pop()
        check()
        _let_in(directory)
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


def _let_in(path: Path) -> None:
    """Let the owner into a directory that shuts its owner out.

    Only an ordinary user needs it, to read and later to remove the tree. Inside, the owner is root, who is let in
    anywhere: nothing changes there.
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
    # The way from a descriptor that only names a file to one that reads the very same file.
    with open(f"/proc/self/fd/{fd}", "rb") as file:
        return file.read(_READ_LIMIT_BYTES)


def _cover(root: Path, layer: Path, name: str, *, rootless: bool) -> Path | None:
    """The layer's directory that covers the image's `name`, wherever links lead it. None: it is not a directory."""
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
    # What is not a file would make those wait who read it, the runtime among them.
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
