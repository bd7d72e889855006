"""Copies between this machine's files and a sandbox's.

Owns how a tar is packed, and how one from a hostile sandbox is unpacked: each name is split and walked one directory at
a time without following a symlink, into a new directory that is renamed into place at the end. Local work is done in
threads, in chunks, with bounded memory. Not here: the protocol (it uses `Files` like any caller). Used by `files.py`.

`tarfile` is not used to read: it keeps headers of any size in memory, and its filters had holes in several releases.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import tarfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from atoll.contract.errors import InvalidRequest, PathNotDirectory, PathNotFound, PermissionDenied, SandboxError
from atoll.runtime import pax

if TYPE_CHECKING:
    from atoll.runtime.guest.files import Files

MAX_DOWNLOAD_BYTES = 16 * 1024**3
"""What one download may write unless `limit_bytes` is given. A sparse file inside can have any size."""
MAX_DOWNLOAD_ENTRIES = 1_000_000
"""Files and directories of one download."""
MAX_DOWNLOAD_DEPTH = 512
"""Directories of one download that are inside each other. Linux allows more than most programs can remove again."""

_BLOCK = 512
_PIECE_BYTES = 1024 * 1024
_HOLE_BYTES = 4096
_MAX_EXTENSION_BYTES = 64 * 1024
_OCTAL = re.compile(rb" *([0-7]{1,12})[ \0]*")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


# ---------------------------------------------------------------------------------------------------------- upload


async def upload(files: Files, local: Path, path: str, user: str | None) -> int:
    """See `Files.upload`."""
    status = local.stat()
    target = path
    try:
        into = (await files.stat(path, user=user)).kind == "directory"
    except (PathNotFound, PathNotDirectory):
        into = path.endswith("/")
    if into and (name := _own_name(local)):
        target = f"{path.rstrip('/')}/{name}"
    if stat.S_ISDIR(status.st_mode):
        return await files.tar_in(target, _in_thread(_pack(local)), user=user)
    if not stat.S_ISREG(status.st_mode):
        raise InvalidRequest(f"{local}: is neither a file nor a directory")
    return await files.write_bytes(target, _in_thread(_read(local)), mode=status.st_mode & 0o777, user=user)


async def _in_thread(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (piece := await anyio.to_thread.run_sync(next, pieces, None)) is not None:
        yield piece


def _own_name(path: Path) -> str:
    """The last part of a path. Empty for `..` and `/`: then the contents are copied."""
    return "" if path.name in {"", ".."} else path.name


def _read(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


def _pack(root: Path) -> Iterator[bytes]:
    """A tar of the contents of `root`, in chunks. Only files, directories and symlinks are included."""
    pending: list[bytes] = []
    size = 0
    for part in _pack_below(root):
        pending.append(part)
        size += len(part)
        if size >= _PIECE_BYTES:
            yield b"".join(pending)
            pending.clear()
            size = 0
    yield b"".join(pending) + bytes(2 * _BLOCK)


def _pack_below(root: Path) -> Iterator[bytes]:
    # Not by recursion: a tree may be deeper than Python's stack.
    waiting = _names_below(root, "")
    while waiting:
        arcname = waiting.pop()
        path = root / arcname
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode):
            yield _header(arcname, status, tarfile.DIRTYPE)
            waiting += _names_below(path, arcname + "/")
        elif stat.S_ISLNK(status.st_mode):
            yield _header(arcname, status, tarfile.SYMTYPE, linkname=str(path.readlink()))
        elif stat.S_ISREG(status.st_mode):
            yield from _pack_file(path, arcname)


def _names_below(directory: Path, prefix: str) -> list[str]:
    with os.scandir(directory) as entries:
        return sorted((prefix + entry.name for entry in entries), reverse=True)


def _pack_file(path: Path, arcname: str) -> Iterator[bytes]:
    # It may have been replaced between lstat and open; O_NONBLOCK does not wait for the other end of a pipe.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb", buffering=0) as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return
        yield _header(arcname, status, tarfile.REGTYPE, size=status.st_size)
        left = status.st_size
        while left:
            piece = file.read(min(left, _PIECE_BYTES))
            if not piece:
                raise OSError(errno.EAGAIN, "the file became shorter while it was read", os.fspath(path))
            left -= len(piece)
            yield piece
        yield bytes(-status.st_size % _BLOCK)


def _header(name: str, status: os.stat_result, kind: bytes, *, size: int = 0, linkname: str = "") -> bytes:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.size = size
    info.mode = status.st_mode & 0o777
    info.mtime = int(status.st_mtime)
    info.linkname = linkname
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


# -------------------------------------------------------------------------------------------------------- download


async def download(
    files: Files, path: str, local: Path, exclude: Sequence[str], user: str | None, limit_bytes: int
) -> int:
    """See `Files.download`."""
    status = await files.stat(path, user=user)
    target = local
    if local.is_dir() and (name := _own_name(Path(path))):
        target = local / name
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename.
    part = target.parent / f".atoll-{secrets.token_hex(8)}"
    if status.kind == "directory":
        part.mkdir(mode=status.mode & 0o777 | 0o700)
        copy = _download_directory(files, path, part, exclude, user, limit_bytes)
    elif status.kind == "file":
        copy = _download_file(files, path, part, status.mode, user, limit_bytes)
    else:
        raise InvalidRequest(f"{path}: is a {status.kind}, neither a file nor a directory")
    try:
        size = await copy
        await anyio.to_thread.run_sync(_place, part, target)
        return size
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(_discard, part)


async def _download_file(files: Files, path: str, part: Path, mode: int, user: str | None, limit_bytes: int) -> int:
    size = 0
    fd = os.open(part, _NEW_FILE, mode & 0o777)
    try:
        async for piece in files.stream(path, user=user):
            size += len(piece)
            if size > limit_bytes:
                raise _too_much(path, limit_bytes)
            await anyio.to_thread.run_sync(_write_all, fd, piece)
    finally:
        os.close(fd)
    return size


async def _download_directory(
    files: Files, path: str, part: Path, exclude: Sequence[str], user: str | None, limit_bytes: int
) -> int:
    with TarUnpacker(part, path, limit_bytes) as unpacker:
        async for piece in files.tar_out(path, inside=True, exclude=exclude, user=user):
            await anyio.to_thread.run_sync(unpacker.feed, piece)
        unpacker.finish()
        return unpacker.size


def _too_much(path: str, limit_bytes: int) -> InvalidRequest:
    message = f"{path}: more than {limit_bytes} bytes; download less, or give a larger limit (limit_bytes, --limit)"
    return InvalidRequest(message, limit_bytes=limit_bytes)


def _write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of it. A piece of zeros becomes a hole, so that a sparse file inside does not fill the disk here."""
    view = memoryview(data)
    if len(view) >= _HOLE_BYTES and not view[0] and view == memoryview(bytes(len(view))):
        os.ftruncate(fd, os.lseek(fd, len(view), os.SEEK_CUR))
        return
    while view:
        view = view[os.write(fd, view) :]


def _place(part: Path, target: Path) -> None:
    """Move what was copied to its place. Symlinks at the target are replaced or refused, never followed."""
    try:
        there = stat.S_IFMT(target.lstat().st_mode)
    except FileNotFoundError:
        part.rename(target)
        return
    if not stat.S_ISDIR(part.lstat().st_mode):
        part.replace(target)
        return
    if there != stat.S_IFDIR:
        raise NotADirectoryError(errno.ENOTDIR, "a directory cannot replace a file", os.fspath(target))
    with os.scandir(part) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        _place(part / name, target / name)


def _discard(part: Path) -> None:
    try:
        part.unlink()
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        _remove_tree(part)


def _remove_tree(root: Path) -> None:
    """Remove a directory of any depth. Each directory inside is moved up to `root` before its parent is removed.

    Without recursion, without paths of more than one name, and with two descriptors.
    """
    top = os.open(root, _DIRECTORY)
    try:
        while names := os.listdir(top):
            for name in names:
                if not _is_directory(name, top):
                    os.unlink(name, dir_fd=top)
                    continue
                below = os.open(name, _DIRECTORY, dir_fd=top)
                try:
                    _empty_into(below, top)
                finally:
                    os.close(below)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    root.rmdir()


def _empty_into(directory: int, top: int) -> None:
    """Remove the files of a directory, and move its directories to `top`."""
    for name in os.listdir(directory):
        if _is_directory(name, directory):
            os.rename(name, secrets.token_hex(8), src_dir_fd=directory, dst_dir_fd=top)
        else:
            os.unlink(name, dir_fd=directory)


def _is_directory(name: str, parent: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)


class TarUnpacker:
    """Unpacks a tar that is fed to it into a directory, which must be new and writable by no one else.

    Nothing is written outside of it, whatever the tar holds. It accepts what the guest makes (ustar with pax
    extensions: files, directories, symlinks, hard links) and refuses everything else.
    """

    def __init__(self, root: Path, what: str, limit_bytes: int) -> None:
        self.size = 0
        """Bytes of files written."""
        self._what = what
        self._limit = limit_bytes
        self._entries = 0
        self._root = os.open(root, _DIRECTORY)
        self._parent: tuple[tuple[bytes, ...], int] = ((), self._root)
        self._file = -1
        self._file_left = 0
        self._skip = 0
        self._buffer = bytearray()
        self._wanted = _BLOCK
        self._extension: tuple[bytes, int] | None = None
        self._pax: dict[bytes, bytes] = {}
        self._zeros = 0

    def __enter__(self) -> TarUnpacker:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in {self._file, self._parent[1], self._root} - {-1}:
            os.close(fd)

    def feed(self, data: bytes) -> None:
        """Unpack the next bytes.

        Raises:
            PermissionDenied: an entry would lead outside, or is of a type that is refused.
            InvalidRequest: it is more than the limit, or deeper than `MAX_DOWNLOAD_DEPTH`.
            SandboxError: it is not a tar.
            OSError: it cannot be written here.
        """
        view = memoryview(data)
        while view:
            if self._file_left:
                piece = view[: self._file_left]
                _write_all(self._file, piece)
                self._file_left -= len(piece)
                if not self._file_left:
                    self._close_file()
            elif self._skip:
                piece = view[: self._skip]
                self._skip -= len(piece)
            else:
                piece = view[: self._wanted - len(self._buffer)]
                self._buffer += piece
                if len(self._buffer) == self._wanted:
                    block = bytes(self._buffer)
                    self._buffer.clear()
                    self._take(block)
            view = view[len(piece) :]

    def finish(self) -> None:
        """Check that the tar is complete.

        Raises:
            SandboxError: it is not.
        """
        if self._zeros < 2 or self._buffer or self._extension:
            raise _malformed("it ends too early")

    def _close_file(self) -> None:
        os.close(self._file)
        self._file = -1

    def _take(self, block: bytes) -> None:
        if self._extension is not None:
            kind, size = self._extension
            self._extension = None
            self._wanted = _BLOCK
            if kind == b"x":
                try:
                    self._pax = pax.parse_records(block[:size])
                except pax.MalformedPax as error:
                    raise _malformed(str(error)) from None
        elif not any(block):
            self._zeros += 1
        elif self._zeros:
            raise _malformed("data follows its end")
        else:
            self._take_header(block)

    def _take_header(self, block: bytes) -> None:
        if block[257:263] != b"ustar\0":
            raise _malformed("a header is not ustar")
        if _octal(block[148:156]) != sum(block) - sum(block[148:156]) + 8 * 0x20:
            raise _malformed("a header's checksum is wrong")
        kind, size = block[156:157], _octal(block[124:136])
        if kind in {b"x", b"g"}:
            if not 0 < size <= _MAX_EXTENSION_BYTES:
                raise _malformed(f"an extension has {size} bytes; it may have 1 to {_MAX_EXTENSION_BYTES}")
            self._extension = kind, size
            self._wanted = size + -size % _BLOCK
            return
        records, self._pax = self._pax, {}
        prefix, name = _text(block[345:500]), _text(block[:100])
        parts = self._parts(records.get(b"path", prefix + b"/" + name if prefix else name))
        link = records.get(b"linkpath", _text(block[157:257]))
        if b"size" in records:
            try:
                size = pax.parse_number(records[b"size"])
            except pax.MalformedPax as error:
                raise _malformed(str(error)) from None
        self._entries += 1
        if self._entries > MAX_DOWNLOAD_ENTRIES:
            raise InvalidRequest(f"{self._what}: more than {MAX_DOWNLOAD_ENTRIES} files and directories; download less")
        if kind not in {b"0", b"\0"} and size:
            raise _malformed("an entry that is not a file has contents")
        self._make(kind, parts, link, size, _octal(block[100:108]) & 0o777)

    def _make(self, kind: bytes, parts: tuple[bytes, ...], link: bytes, size: int, mode: int) -> None:
        if kind == b"5":
            if parts:
                self._make_directory(self._enter(parts[:-1]), parts, mode)
            return
        if not parts:
            raise self._refused(parts, "has no name")
        parent, name = self._enter(parts[:-1]), parts[-1]
        try:
            if kind in {b"0", b"\0"}:
                self.size += size
                if self.size > self._limit:
                    raise _too_much(self._what, self._limit)
                self._file = os.open(name, _NEW_FILE, mode, dir_fd=parent)
                self._file_left, self._skip = size, -size % _BLOCK
                if not size:
                    self._close_file()
            elif kind == b"2":
                os.symlink(self._inner_target(parts, link), name, dir_fd=parent)
            elif kind == b"1":
                self._make_link(parent, name, self._parts(link))
            else:
                raise self._refused(parts, f"is of type {kind!r}")
        except FileExistsError:
            raise self._refused(parts, "is in the archive twice") from None

    def _make_directory(self, parent: int, parts: tuple[bytes, ...], mode: int) -> None:
        try:
            os.mkdir(parts[-1], mode | 0o700, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(parts[-1], dir_fd=parent, follow_symlinks=False).st_mode):
                raise self._refused(parts, "is in the archive twice") from None

    def _make_link(self, parent: int, name: bytes, source: tuple[bytes, ...]) -> None:
        if not source:
            raise self._refused(source, "is the target of a hard link, and is not a file")
        fd = self._walk(source[:-1])
        try:
            if not stat.S_ISREG(os.stat(source[-1], dir_fd=fd, follow_symlinks=False).st_mode):
                raise self._refused(source, "is the target of a hard link, and is not a file")
            os.link(source[-1], name, src_dir_fd=fd, dst_dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            raise self._refused(source, "is the target of a hard link, and is not in the archive before it") from None
        finally:
            os.close(fd)

    def _enter(self, parts: tuple[bytes, ...]) -> int:
        """The directory `parts`, open, made if it is missing. The last one is kept open for the next entry."""
        if self._parent[0] != parts:
            fd = self._walk(parts)
            if self._parent[1] != self._root:
                os.close(self._parent[1])
            self._parent = (parts, fd)
        return self._parent[1]

    def _walk(self, parts: tuple[bytes, ...]) -> int:
        fd = os.dup(self._root)
        for depth, part in enumerate(parts, 1):
            try:
                try:
                    below = os.open(part, _DIRECTORY, dir_fd=fd)
                except FileNotFoundError:
                    os.mkdir(part, 0o755, dir_fd=fd)
                    below = os.open(part, _DIRECTORY, dir_fd=fd)
            except NotADirectoryError:  # O_NOFOLLOW with O_DIRECTORY gives this for a symlink too
                raise self._refused(
                    parts[:depth], "is not a directory, and the archive has an entry below it"
                ) from None
            finally:
                os.close(fd)
            fd = below
        return fd

    def _parts(self, name: bytes) -> tuple[bytes, ...]:
        parts = tuple(part for part in name.split(b"/") if part not in {b"", b"."})
        if name.startswith(b"/") or b".." in parts or b"\0" in name or len(name) > 4096:
            raise self._refused((name[:200],), "leads outside")
        if len(parts) > MAX_DOWNLOAD_DEPTH:
            raise InvalidRequest(
                f"{self._what}: directories more than {MAX_DOWNLOAD_DEPTH} levels deep cannot be downloaded; "
                "download a directory further down, or use tar_out"
            )
        return parts

    def _inner_target(self, parts: tuple[bytes, ...], target: bytes) -> bytes:
        """`target` if a symlink at `parts` cannot lead outside with it, also through other symlinks.

        All `..` must come first: they are then taken from real directories, of which there are enough above. What
        follows only goes down, through symlinks that were checked in the same way.
        """
        steps = [step for step in target.split(b"/") if step not in {b"", b"."}]
        ups = next((i for i, step in enumerate(steps) if step != b".."), len(steps))
        if target.startswith(b"/") or b".." in steps[ups:] or ups >= len(parts) or not target or b"\0" in target:
            raise self._refused(
                parts, f"is a symlink to {_show(target)}, which leads outside; remove it, or use tar_out"
            )
        return target

    def _refused(self, parts: tuple[bytes, ...], why: str) -> PermissionDenied:
        name = f"{self._what}/{_show(b'/'.join(parts))}"
        return PermissionDenied(f"{name}: {why}", number=errno.EXDEV, path=name)


def _malformed(why: str) -> SandboxError:
    return SandboxError(f"the sandbox sent an archive that cannot be read: {why}")


def _octal(field: bytes) -> int:
    match = _OCTAL.fullmatch(field)
    if match is None:
        raise _malformed("a number is malformed")
    return int(match[1], 8)


def _text(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def _show(name: bytes) -> str:
    text = name[:200].decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "\ufffd" for c in text)
