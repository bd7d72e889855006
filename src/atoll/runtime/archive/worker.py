"""The file format of exported sandboxes: a program that packs layers into one, and unpacks untrusted files.

A tar, which the caller compresses: `atoll-sandbox.json` first, then the trees of the layers, and last `sha256`, the
digest of all bytes before it. A tree's name is `layers/<number>/<key>`, 0 being the layer on top. Each directory comes
before its content, and after the next one begins nothing more comes in it. Owners begin at 0, whichever ids the machine
gave the sandbox. Features of overlayfs are written as pax records, and created by the reader as its machine needs them:

    ATOLL.kind=whiteout   this path does not exist, whatever the layers below have
    ATOLL.kind=socket     a socket, whose listener is gone
    ATOLL.opaque=1        a directory that hides those of the same name below it
    SCHILY.xattr.NAME     user.*, security.capability without a root id, access control lists
    ATOLL.xattr.HEX       user.*, with "=" in its name, which ends the key of a record; since version 2
    GNU.sparse.*          a file with holes (GNU tar's format 1.0)

The reader accepts only what the writer writes: any other file is refused, not interpreted. Of a member's name it uses
the last part alone, in a directory that it has created itself and holds open: no name can lead elsewhere. It creates no
devices except whiteouts.

This program (`python worker.py pack|unpack FD`) needs only the standard library and `pax.py`. It runs in a user
namespace where files have the owners that they have inside, and whatever hostile input does to it ends with it. On
standard input and output it exchanges lines of JSON with `export.py`, which alone decides what is done with the trees.

Headers are not written with `tarfile.TarInfo.tobuf`: a binary attribute makes it add a `hdrcharset` record.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import resource
import select
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING or __name__ != "__main__":
    from atoll.runtime import pax
else:  # a program that was started by its path, alone: `python -I` does not search for modules beside it
    import importlib.util

    _spec = importlib.util.spec_from_file_location("pax", os.path.join(os.path.dirname(__file__), "..", "pax.py"))
    pax = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(pax)

FORMAT = "atoll-sandbox"
VERSIONS = (1, 2, 3)
MANIFEST = "atoll-sandbox.json"
CHECKSUM = "sha256"
MANIFEST_LIMIT_BYTES = 1024 * 1024
IDS = 65535
"""The number of user ids in a sandbox. The last, 65534, is that of files whose owner has no id inside."""

_BLOCK = 512
_CHUNK = 1024 * 1024
_HEADER_LIMIT_BYTES = 1024 * 1024
_PATH_LIMIT_BYTES = 64 * 1024
_DEEPEST = 4000
_EXTENTS = 100_000
_ENTRY_COST = 4096
"""Counted for each file in addition to its data, so that the limit of bytes limits the number of files too."""
_SPARE_BYTES, _SPARE_INODES = 256 * 1024 * 1024, 10_000
_REPORT_S = 0.1
_FILE, _LINK, _SYMLINK, _DIRECTORY, _FIFO, _PAX = b"0", b"1", b"2", b"5", b"6", b"x"
_XATTR = b"SCHILY.xattr."
_HEX_XATTR = b"ATOLL.xattr."
_ACLS = ("system.posix_acl_access", "system.posix_acl_default")
_READ_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TIME = re.compile(rb"(-?)(0|[1-9][0-9]{0,11})\.([0-9]{9})")
_OCTAL = re.compile(rb"([0-7]+)[ \0]*")
_ExtendedAttributes = dict[str, bytes]


class InvalidArchive(Exception):
    """The file is not what the writer writes. `reason` is one of those of `ArchiveRefused`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class OwnerIds(NamedTuple):
    """The mapping between owners in a file and owners on this disk."""

    base: int
    """The id on disk of owner 0. It is 0 in a user namespace, where files have the owners that they have inside."""
    is_single: bool
    """The namespace has one id only, which owns all files."""
    marks: str
    """The prefix of overlayfs's attributes."""

    @classmethod
    def here(cls, owner: int) -> OwnerIds:
        with open("/proc/self/uid_map") as file:
            mapped = sum(int(line.split()[2]) for line in file)
        if mapped > 2**31:
            return cls(owner, False, "trusted.overlay.")
        return cls(0, mapped == 1, "user.overlay.")

    def inside(self, id: int) -> int:
        return id - self.base if self.base <= id < self.base + IDS else IDS - 1

    def on_disk(self, id: int) -> int:
        return 0 if self.is_single else self.base + id


class ParentPipe:
    """The lines of JSON that are exchanged with `export.py`."""

    def __init__(self) -> None:
        self._due = 0.0
        self._hangup = select.poll()
        self._hangup.register(0, 0)

    def send(self, **line: object) -> None:
        os.write(1, json.dumps(line).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        line = sys.stdin.readline()
        if not line:
            raise SystemExit(1)
        order: dict[str, Any] = json.loads(line)
        return order

    def wait_for(self, fd: int, event: int) -> None:
        """Wait until `fd` can be read or written. Ends the program if the parent has ended."""
        both = select.poll()
        both.register(0, 0)
        both.register(fd, event)
        if any(ready == 0 for ready, _ in both.poll()):
            raise SystemExit(1)

    def is_due(self) -> bool:
        """Whether to report progress now, ten times a second. Ends the program if the parent has ended."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + _REPORT_S
        if self._hangup.poll(0):
            raise SystemExit(1)
        return True


# --- writing ------------------------------------------------------------------------------------------------------


class ArchiveWriter:
    def __init__(self, fd: int, parent: ParentPipe) -> None:
        self._fd = fd
        self._parent = parent
        self._buffer = bytearray()
        self._digest = hashlib.sha256()
        self._total = 0
        self.entries = 0

    def pack(self, manifest: bytes, trees: list[tuple[str, str, int]]) -> None:
        """Write a file. `trees` are names, paths, and the id on disk of owner 0."""
        self._put(MANIFEST.encode(), _FILE, size=len(manifest))
        self._write(manifest)
        self._pad(len(manifest))
        for name, path, owner in trees:
            self._tree(name.encode(), path, OwnerIds.here(owner))
        checksum = self._digest.hexdigest().encode() + b"\n"
        self._put(CHECKSUM.encode(), _FILE, size=len(checksum))
        self._write(checksum)
        self._pad(len(checksum))
        self._write(bytes(2 * _BLOCK))
        self._flush()

    def _tree(self, name: bytes, path: str, ids: OwnerIds) -> None:
        linked: dict[int, tuple[bytes, int]] = {}
        open_now: list[tuple[int, bytes, Iterator[str]]] = []
        try:
            self._enter(open_now, os.open(path, _READ_DIRECTORY), name, ids)
            while open_now:
                fd, place, names = open_now[-1]
                child = next(names, None)
                if child is None:
                    open_now.pop()
                    os.close(fd)
                    continue
                if self._parent.is_due():
                    self._parent.send(done=self._total)
                path_of_child = place + b"/" + os.fsencode(child)
                status = os.stat(child, dir_fd=fd, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    self._enter(open_now, os.open(child, _READ_DIRECTORY, dir_fd=fd), path_of_child, ids)
                elif not self._hard_link(path_of_child, status, linked):
                    self._leaf(fd, child, path_of_child, status, ids)
        finally:
            for fd, _, _ in open_now:
                os.close(fd)

    def _enter(self, open_now: list[tuple[int, bytes, Iterator[str]]], fd: int, path: bytes, ids: OwnerIds) -> None:
        if len(open_now) > _DEEPEST or len(path) > _PATH_LIMIT_BYTES:
            os.close(fd)
            raise OSError(errno.ENAMETOOLONG, "directories are nested too deeply", _shown(path))
        open_now.append((fd, path, iter(sorted(os.listdir(fd)))))
        attributes, is_opaque = _attributes_of(fd, path, ids)
        more = {b"ATOLL.opaque": b"1"} if is_opaque else {}
        self._put(path, _DIRECTORY, os.fstat(fd), ids, attributes=attributes, more=more)

    def _hard_link(self, path: bytes, status: os.stat_result, linked: dict[int, tuple[bytes, int]]) -> bool:
        """Write a file that was written under another name as a hard link to that one. Returns whether it was."""
        kind = status.st_mode
        if status.st_nlink < 2 or not (stat.S_ISREG(kind) or stat.S_ISLNK(kind) or stat.S_ISFIFO(kind)):
            return False
        known = linked.get(status.st_ino)
        if known is None:
            linked[status.st_ino] = path, status.st_nlink - 1
            return False
        first, left = known
        self._put(path, _LINK, link=first)
        if left > 1:
            linked[status.st_ino] = first, left - 1
        else:
            del linked[status.st_ino]
        return True

    def _leaf(self, directory: int, name: str, path: bytes, status: os.stat_result, ids: OwnerIds) -> None:
        kind = status.st_mode
        if stat.S_ISREG(kind):
            self._file(directory, name, path, ids)
        elif stat.S_ISLNK(kind):
            target = os.fsencode(os.readlink(name, dir_fd=directory))
            self._put(path, _SYMLINK, status, ids, link=target)
        elif stat.S_ISFIFO(kind):
            self._put(path, _FIFO, status, ids)
        elif stat.S_ISSOCK(kind):
            self._put(path, _FILE, status, ids, more={b"ATOLL.kind": b"socket"})
        elif stat.S_ISCHR(kind) and status.st_rdev == 0:
            self._put(path, _FILE, more={b"ATOLL.kind": b"whiteout"})
        else:
            raise OSError(errno.EPERM, "a device cannot be exported", _shown(path))

    def _file(self, directory: int, name: str, path: bytes, ids: OwnerIds) -> None:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        try:
            status = os.fstat(fd)
            if _is_hidden(status, ids):
                self._put(path, _FILE, status, ids)
                return
            attributes, _ = _attributes_of(fd, path, ids)
            extents = _extents(fd, status)
            if extents is None:
                self._put(path, _FILE, status, ids, size=status.st_size, attributes=attributes)
                self._data(fd, 0, status.st_size)
                self._pad(status.st_size)
                return
            numbers = [len(extents), *(number for extent in extents for number in extent)]
            table = b"".join(b"%d\n" % number for number in numbers)
            table += bytes(-len(table) % _BLOCK)
            size = len(table) + sum(length for _, length in extents)
            sparse = {b"major": b"1", b"minor": b"0", b"realsize": b"%d" % status.st_size}
            more = {b"GNU.sparse." + key: value for key, value in sparse.items()}
            self._put(path, _FILE, status, ids, size=size, attributes=attributes, more=more)
            self._write(table)
            for start, length in extents:
                self._data(fd, start, length)
            self._pad(size)
        finally:
            os.close(fd)

    def _data(self, fd: int, start: int, length: int) -> None:
        end = start + length
        while start < end:
            data = os.pread(fd, min(_CHUNK, end - start), start)
            if not data:
                raise OSError(errno.ESTALE, "a file became shorter while it was read")
            self._write(data)
            start += len(data)
            if self._parent.is_due():
                self._parent.send(done=self._total)

    def _put(
        self,
        path: bytes,
        kind: bytes,
        status: os.stat_result | None = None,
        ids: OwnerIds | None = None,
        *,
        size: int = 0,
        link: bytes = b"",
        attributes: _ExtendedAttributes | None = None,
        more: dict[bytes, bytes] | None = None,
    ) -> None:
        """Write the header of a member, with a pax header before it where one is needed."""
        self.entries += 1
        mode, uid, gid = 0o600, 0, 0
        records: dict[bytes, bytes] = {}
        if status is not None and ids is not None:
            mode, uid, gid = stat.S_IMODE(status.st_mode), ids.inside(status.st_uid), ids.inside(status.st_gid)
            if not ids.base <= status.st_uid < ids.base + IDS:
                mode &= 0o1777  # a file of the machine that was renamed inside: it must not run as the id that it gets
            records |= {b"mtime": _time_text(status.st_mtime_ns), b"atime": _time_text(status.st_atime_ns)}
        for key, value, field in ((b"path", path, 100), (b"linkpath", link, 100)):
            if len(value) > field or not value.isascii():
                records[key] = value
        if size >= 8**11:
            records[b"size"] = b"%d" % size
        records |= more or {}
        records |= {_attribute_key(name): value for name, value in (attributes or {}).items()}
        if records:
            content = b"".join(pax.encode_record(key, value) for key, value in records.items())
            if len(content) > _HEADER_LIMIT_BYTES:
                raise OSError(errno.E2BIG, "the attributes of a file are too large", _shown(path))
            self._write(_header(b"PaxHeaders/0", _PAX, len(content), 0o600, 0, 0, b""))
            self._write(content)
            self._pad(len(content))
        self._write(_header(path, kind, size if size < 8**11 else 0, mode, uid, gid, link))

    def _pad(self, size: int) -> None:
        self._write(bytes(-size % _BLOCK))

    def _write(self, data: bytes) -> None:
        self._digest.update(data)
        self._total += len(data)
        self._buffer += data
        if len(self._buffer) >= _CHUNK:
            self._flush()

    def _flush(self) -> None:
        with memoryview(self._buffer) as view:
            written = 0
            while written < len(view):
                self._parent.wait_for(self._fd, select.POLLOUT)
                with contextlib.suppress(BlockingIOError):
                    written += os.write(self._fd, view[written:])
        self._buffer.clear()


def _header(name: bytes, kind: bytes, size: int, mode: int, uid: int, gid: int, link: bytes) -> bytes:
    def shortened(text: bytes) -> bytes:
        return text[:100].decode("ascii", "replace").encode("ascii", "replace").ljust(100, b"\0")

    fields = b"%b%07o\0%07o\0%07o\0%011o\0%011o\0        %b%bustar\x0000"
    block = (fields % (shortened(name), mode, uid, gid, size, 0, kind, shortened(link))).ljust(_BLOCK, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def _time_text(nanoseconds: int) -> bytes:
    seconds, rest = divmod(abs(nanoseconds), 10**9)
    return b"%b%d.%09d" % (b"-" if nanoseconds < 0 else b"", seconds, rest)


def _is_hidden(status: os.stat_result, ids: OwnerIds) -> bool:
    """Whether no process inside could read a file: one of the machine's that was renamed inside."""
    return not ids.base <= status.st_uid < ids.base + IDS and not status.st_mode & stat.S_IROTH


def _extents(fd: int, status: os.stat_result) -> list[tuple[int, int]] | None:
    """The extents of data of a file with holes. None: it has no holes, or they save no space."""
    size = status.st_size
    if status.st_blocks * 512 >= size:
        return None
    found: list[tuple[int, int]] = []
    at = 0
    while at < size and len(found) < _EXTENTS:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break
        at = min(os.lseek(fd, start, os.SEEK_HOLE), size) if len(found) < _EXTENTS - 1 else size
        found.append((start, at - start))
    if found == [(0, size)]:
        return None
    return [*found, (size, 0)]


def _attributes_of(fd: int, path: bytes, ids: OwnerIds) -> tuple[_ExtendedAttributes, bool]:
    """The extended attributes that are exported, and whether a directory is opaque."""
    found: _ExtendedAttributes = {}
    is_opaque = False
    for name in os.listxattr(fd):
        if name == f"{ids.marks}opaque":
            is_opaque = os.getxattr(fd, name) == b"y"
        elif name in (f"{ids.marks}redirect", f"{ids.marks}metacopy"):
            raise OSError(errno.ENOTSUP, "only a part of a file is in this layer", _shown(path))
        elif name.startswith("user.") and not name.startswith("user.overlay."):
            found[name] = os.getxattr(fd, name)
        elif name == "security.capability":
            capability = _capability_inside(os.getxattr(fd, name), ids)
            if capability is not None:
                found[name] = capability
        elif name in _ACLS:
            found[name] = _acl_with(os.getxattr(fd, name), ids.inside)
    return found, is_opaque


def _capability_inside(value: bytes, ids: OwnerIds) -> bytes | None:
    """A file capability without its root id, or None if that is not the sandbox's."""
    if len(value) == 24 and struct.unpack_from("<I", value, 20)[0] == ids.base:
        return struct.pack("<I", 0x0200_0000 | value[0] & 1) + value[4:20]
    return value if len(value) == 20 else None


def _acl_with(value: bytes, mapped: Callable[[int], int]) -> bytes:
    """An access control list with the ids of users and groups in it changed.

    Raises:
        ValueError: it is not an access control list.
    """
    if len(value) % 8 != 4 or value[:4] != b"\2\0\0\0":
        raise ValueError("not an access control list")
    changed = bytearray(value)
    for at in range(4, len(value), 8):
        tag, _, id = struct.unpack_from("<HHI", value, at)
        if tag in (0x02, 0x08):
            struct.pack_into("<I", changed, at + 4, mapped(id))
    return bytes(changed)


def _attribute_key(name: str) -> bytes:
    """The key of the pax record with an extended attribute."""
    raw = os.fsencode(name)
    return _HEX_XATTR + raw.hex().encode() if b"=" in raw else _XATTR + raw


def _attribute_name(member: ArchiveMember, key: bytes) -> str | None:
    """The inverse of `_attribute_key`. None: it is the key of another record.

    Raises:
        InvalidArchive: it is not written as that function does.
    """
    if key.startswith(_XATTR):
        return os.fsdecode(key.removeprefix(_XATTR))
    if not key.startswith(_HEX_XATTR):
        return None
    with contextlib.suppress(ValueError):
        name = os.fsdecode(bytes.fromhex(key.removeprefix(_HEX_XATTR).decode("ascii")))
        if _attribute_key(name) == key:
            return name
    raise InvalidArchive("malformed", f"the name of an attribute of {member.shown} is malformed")


# --- reading ------------------------------------------------------------------------------------------------------


class ArchiveMember(NamedTuple):
    path: bytes
    kind: bytes
    size: int
    """The bytes that follow the header."""
    mode: int
    uid: int
    gid: int
    link: bytes
    records: dict[bytes, bytes]

    @property
    def shown(self) -> str:
        return _shown(self.path)

    @property
    def times(self) -> tuple[int, int]:
        """Access and modification, in nanoseconds."""
        modified = self._time(b"mtime", 0)
        return self._time(b"atime", modified), modified

    def _time(self, key: bytes, default: int) -> int:
        text = self.records.get(key)
        if text is None:
            return default
        match = _TIME.fullmatch(text)
        if match is None:
            raise InvalidArchive("malformed", f"the time of {self.shown} is malformed")
        value = int(match[2]) * 10**9 + int(match[3])
        return -value if match[1] else value


class ArchiveReader:
    """The members of a file, one after another, checked as far as that is possible without creating files."""

    def __init__(self, fd: int, parent: ParentPipe) -> None:
        self._fd = fd
        self._parent = parent
        self._buffer = b""
        self._at = 0
        self._digest = hashlib.sha256()
        self.total = 0
        self.limit_bytes: int | None = None
        self.entries = 0
        self.entry_limit: int | None = None

    def manifest(self) -> bytes:
        member = self._next()
        if member is None or member.path != MANIFEST.encode() or member.kind != _FILE:
            raise InvalidArchive("malformed", f"it does not begin with {MANIFEST}; it is not an exported sandbox")
        if member.size > MANIFEST_LIMIT_BYTES:
            raise InvalidArchive("malformed", f"its {MANIFEST} is larger than {MANIFEST_LIMIT_BYTES} bytes")
        return b"".join(self.data(member.size))

    def members(self) -> Iterator[ArchiveMember]:
        """All members of the trees. After the last one, every byte of the file was checked."""
        while (member := self._next()) is not None:
            yield member
        if self._take(2 * _BLOCK) != bytes(2 * _BLOCK) or self._fill():
            raise InvalidArchive("malformed", "data follows its end")

    def data(self, size: int) -> Iterator[bytes]:
        """The data of a member. The padding after it is checked and dropped."""
        left = size
        while left:
            chunk = self._take_some(min(left, _CHUNK))
            left -= len(chunk)
            yield chunk
        self.pad(size)

    def pad(self, size: int) -> None:
        if self._take(-size % _BLOCK).strip(b"\0"):
            raise InvalidArchive("malformed", "the padding between its members is not zero")

    def part(self, size: int) -> Iterator[bytes]:
        """A part of a member's data, without padding."""
        while size:
            chunk = self._take_some(min(size, _CHUNK))
            size -= len(chunk)
            yield chunk

    def _next(self) -> ArchiveMember | None:
        """The next member, or None after the checksum, which was right."""
        block = self._take_unseen(_BLOCK)
        records: dict[bytes, bytes] = {}
        _check_header(block)
        kind, size = block[156:157], _octal(block[124:136])
        if kind == _FILE and block[:100].rstrip(b"\0") == CHECKSUM.encode():
            self._check_sum(size)
            return None
        self._note(block)
        if kind == _PAX:
            if size > _HEADER_LIMIT_BYTES:
                raise InvalidArchive(
                    "malformed", f"the pax header of a member has more than {_HEADER_LIMIT_BYTES} bytes"
                )
            records = _pax_records(b"".join(self.data(size)))
            block = self._take(_BLOCK)
            _check_header(block)
            kind, size = block[156:157], _octal(block[124:136])
            if b"size" in records:
                size = _number(records[b"size"])
        if kind not in (_FILE, _LINK, _SYMLINK, _DIRECTORY, _FIFO):
            name = _shown(block[:100])
            raise InvalidArchive("unsafe", f"it has a member of the unknown type {_shown(kind)}, {name}")
        self._count_entry()
        member = ArchiveMember(
            path=records.get(b"path", block[:100].rstrip(b"\0")),
            kind=kind,
            size=size,
            mode=_octal(block[100:108]),
            uid=_octal(block[108:116]),
            gid=_octal(block[116:124]),
            link=records.get(b"linkpath", block[157:257].rstrip(b"\0")),
            records=records,
        )
        _check_member(member)
        return member

    def _check_sum(self, size: int) -> None:
        expected = self._digest.hexdigest().encode() + b"\n"
        if size != len(expected) or self._take(size) != expected:
            raise InvalidArchive("checksum", "its content was changed: the checksum differs")
        self.pad(size)

    def _count_entry(self) -> None:
        self.entries += 1
        if self.entry_limit is not None and self.entries > self.entry_limit:
            raise InvalidArchive(
                "too_large", f"it has more than {self.entry_limit} files, for which the disk has no room"
            )

    def _note(self, data: bytes) -> None:
        self._digest.update(data)
        self.total += len(data)
        if self.limit_bytes is not None and self.total + self.entries * _ENTRY_COST > self.limit_bytes:
            raise InvalidArchive("too_large", f"it has more than {self.limit_bytes // 2**20} MiB unpacked")

    def _take(self, size: int) -> bytes:
        data = self._take_unseen(size)
        self._note(data)
        return data

    def _take_some(self, most: int) -> bytes:
        if not self._fill():
            raise _truncated()
        data = self._buffer[self._at : self._at + most]
        self._at += len(data)
        self._note(data)
        return data

    def _take_unseen(self, size: int) -> bytes:
        parts = []
        while size:
            if not self._fill():
                raise _truncated()
            part = self._buffer[self._at : self._at + size]
            self._at += len(part)
            size -= len(part)
            parts.append(part)
        return b"".join(parts)

    def _fill(self) -> bool:
        """Have at least one byte in the buffer. False: the file has ended."""
        if self._at == len(self._buffer):
            self._parent.wait_for(self._fd, select.POLLIN)
            self._buffer, self._at = os.read(self._fd, _CHUNK), 0
        return self._at < len(self._buffer)


def _truncated() -> InvalidArchive:
    return InvalidArchive("truncated", "it is truncated")


def _check_header(block: bytes) -> None:
    if block == bytes(_BLOCK):
        raise InvalidArchive("truncated", "it ends without a checksum")
    checksum = _octal(block[148:156])
    if block[257:265] != b"ustar\x0000" or checksum != sum(block[:148]) + 8 * 32 + sum(block[156:]):
        raise InvalidArchive("malformed", "a header is malformed")
    if block[156:157] in (b"3", b"4"):
        raise InvalidArchive("unsafe", f"it has a device, {_shown(block[:100])}")
    if block[265:].strip(b"\0"):
        raise InvalidArchive("malformed", "a header has fields that an exported sandbox has not")


def _check_member(member: ArchiveMember) -> None:
    records = member.records
    known = {b"path", b"linkpath", b"size", b"mtime", b"atime"}
    if member.kind == _FILE:
        known |= {b"GNU.sparse.major", b"GNU.sparse.minor", b"GNU.sparse.realsize", b"ATOLL.kind"}
    if member.kind == _DIRECTORY:
        known |= {b"ATOLL.opaque"}
    if member.kind in (_FILE, _DIRECTORY):
        known |= {key for key in records if key.startswith((_XATTR, _HEX_XATTR))}
    unknown = set(records) - known
    if unknown:
        raise InvalidArchive("malformed", f"the header of {member.shown} has the unknown record {_shown(min(unknown))}")
    if member.kind != _FILE and member.size:
        raise InvalidArchive("malformed", f"{member.shown} has data and is not a file")
    if b"ATOLL.kind" in records and (records[b"ATOLL.kind"] not in (b"whiteout", b"socket") or member.size):
        raise InvalidArchive("malformed", f"{member.shown} is of an unknown kind")
    if records.get(b"ATOLL.opaque", b"1") != b"1":
        raise InvalidArchive("malformed", f"the header of {member.shown} is malformed")
    if member.mode > 0o7777 or member.uid >= IDS or member.gid >= IDS:
        raise InvalidArchive("unsafe", f"the owner or the mode of {member.shown} is out of range")


def _octal(field: bytes) -> int:
    match = _OCTAL.fullmatch(field)
    if match is None:
        raise InvalidArchive("malformed", "a number in a header is malformed")
    return int(match[1], 8)


def _number(text: bytes) -> int:
    try:
        return pax.parse_number(text)
    except pax.MalformedPax:
        raise InvalidArchive("malformed", "a number in a header is malformed") from None


def _pax_records(content: bytes) -> dict[bytes, bytes]:
    try:
        return pax.parse_records(content)
    except pax.MalformedPax as error:
        raise InvalidArchive("malformed", f"a header is malformed: {error}") from None


class ArchiveUnpacker:
    """Creates the trees of a file. `places` are their names and the directories to create them as."""

    def __init__(self, reader: ArchiveReader, places: dict[bytes, str | None], owner: int, parent: ParentPipe) -> None:
        self._reader = reader
        self._places = places
        self._ids = OwnerIds.here(owner)
        self._parent = parent
        self._tree = b""
        self._stack: list[tuple[bytes, int, ArchiveMember]] = []
        """The open directories, that of the tree first: names, descriptors, and the members with their attributes."""
        self._made: set[bytes] = set()

    def unpack(self) -> None:
        try:
            for member in self._reader.members():
                if self._parent.is_due():
                    self._parent.send(done=self._reader.total)
                    self._check_room()
                self._take(member)
            self._leave_until(0)
        finally:
            for _, fd, _ in self._stack:
                os.close(fd)
        for name in set(self._places) - self._made:
            self._tree = name
            self._begin(ArchiveMember(name, _DIRECTORY, 0, 0o755, 0, 0, b"", {}))
            self._leave_until(0)

    def _take(self, member: ArchiveMember) -> None:
        tree, parts = self._locate(member.path)
        if not parts:
            self._leave_until(0)
            self._tree = tree
            self._begin(member)
            return
        if self._places[tree] is None:
            where = os.fsdecode(tree.rpartition(b"/")[2])
            raise InvalidArchive(
                "image", f"it has files in /{where}, which is not a file system of its own in the image here"
            )
        if tree != self._tree or not self._stack:
            raise InvalidArchive("unsafe", f"{member.shown} does not follow its directory")
        above = [name for name, _, _ in self._stack[1:]]
        shared = 0
        for one, other in zip(above, parts[:-1], strict=False):
            if one != other:
                break
            shared += 1
        self._leave_until(shared + 1)
        if shared != len(parts) - 1:
            raise InvalidArchive("unsafe", f"{member.shown} does not follow its directory")
        try:
            self._make(member, parts[-1])
        except FileExistsError:
            raise InvalidArchive("unsafe", f"it has {member.shown} twice") from None

    def _locate(self, path: bytes) -> tuple[bytes, list[bytes]]:
        """The tree of a path, and the parts of the path below it."""
        parts = path.split(b"/")
        tree = b"/".join(parts[:3])
        if tree not in self._places:
            raise InvalidArchive("unsafe", f"{_shown(path)} is not in one of its layers")
        below = parts[3:]
        if len(below) > _DEEPEST or len(path) > _PATH_LIMIT_BYTES:
            raise InvalidArchive("unsafe", f"a path in it has more than {_DEEPEST} parts or {_PATH_LIMIT_BYTES} bytes")
        if any(part in (b"", b".", b"..") or b"\0" in part or len(part) > 255 for part in below):
            raise InvalidArchive("unsafe", f"{_shown(path)} is not a valid path")
        return tree, below

    def _begin(self, member: ArchiveMember) -> None:
        if member.kind != _DIRECTORY or self._tree in self._made:
            raise InvalidArchive("unsafe", f"it has {member.shown} twice, or not as a directory")
        self._made.add(self._tree)
        place = self._places[self._tree]
        if place is None:
            self._stack = []
            return
        os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
        os.mkdir(place, 0o700)
        self._stack = [(b"", os.open(place, _READ_DIRECTORY), member)]

    def _leave_until(self, depth: int) -> None:
        while len(self._stack) > depth:
            _, fd, member = self._stack[-1]
            self._finish(fd, member)
            os.close(fd)
            self._stack.pop()

    def _make(self, member: ArchiveMember, name: bytes) -> None:
        directory = self._stack[-1][1]
        special = member.records.get(b"ATOLL.kind")
        if member.kind == _DIRECTORY:
            os.mkdir(name, 0o700, dir_fd=directory)
            self._stack.append((name, os.open(name, _READ_DIRECTORY, dir_fd=directory), member))
        elif member.kind == _LINK:
            self._link(member, name, directory)
        elif special == b"whiteout":
            os.mknod(name, stat.S_IFCHR, device=0, dir_fd=directory)
        elif member.kind == _FILE and special is None:
            self._file(member, name, directory)
        else:
            if member.kind == _SYMLINK:
                if not 0 < len(member.link) < 4096 or b"\0" in member.link:
                    raise InvalidArchive("malformed", f"the target of the symlink {member.shown} is not a path")
                os.symlink(member.link, name, dir_fd=directory)
            else:
                kind = stat.S_IFSOCK if special else stat.S_IFIFO
                os.mknod(name, kind | 0o600, dir_fd=directory)
            uid, gid = self._ids.on_disk(member.uid), self._ids.on_disk(member.gid)
            os.chown(name, uid, gid, dir_fd=directory, follow_symlinks=False)
            if member.kind != _SYMLINK:
                os.chmod(name, member.mode, dir_fd=directory)
            os.utime(name, ns=member.times, dir_fd=directory, follow_symlinks=False)

    def _link(self, member: ArchiveMember, name: bytes, directory: int) -> None:
        tree, parts = self._locate(member.link)
        if tree != self._tree or not parts:
            raise InvalidArchive("unsafe", f"the hard link {member.shown} leads out of its layer")
        above = os.dup(self._stack[0][1])
        try:
            for part in parts[:-1]:
                below = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
                os.close(above)
                above = below
            kind = os.stat(parts[-1], dir_fd=above, follow_symlinks=False).st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISLNK(kind) or stat.S_ISFIFO(kind)):
                raise InvalidArchive("unsafe", f"the hard link {member.shown} leads to a file of another type")
            os.link(parts[-1], name, src_dir_fd=above, dst_dir_fd=directory, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            raise InvalidArchive("unsafe", f"the hard link {member.shown} comes before its target") from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise InvalidArchive("unsafe", f"the hard link {member.shown} leads through a symlink") from None
            raise
        finally:
            os.close(above)

    def _file(self, member: ArchiveMember, name: bytes, directory: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=directory)
        try:
            if any(key.startswith(b"GNU.sparse.") for key in member.records):
                self._sparse(member, fd)
            else:
                for chunk in self._reader.data(member.size):
                    self._write(fd, chunk)
            self._finish(fd, member)
        finally:
            os.close(fd)

    def _sparse(self, member: ArchiveMember, fd: int) -> None:
        size = _number(member.records.get(b"GNU.sparse.realsize", b""))
        extents, table_bytes = self._extents(member, size)
        if table_bytes + sum(length for _, length in extents) != member.size:
            raise InvalidArchive("malformed", f"the table of extents of {member.shown} is malformed")
        try:
            os.ftruncate(fd, size)
        except OSError as error:
            if error.errno in (errno.EFBIG, errno.EINVAL):
                raise InvalidArchive(
                    "too_large", f"{member.shown} is larger than a file can be on this file system"
                ) from None
            raise
        for start, length in extents:
            os.lseek(fd, start, os.SEEK_SET)
            for chunk in self._reader.part(length):
                self._write(fd, chunk)
        self._reader.pad(member.size)

    def _extents(self, member: ArchiveMember, size: int) -> tuple[list[tuple[int, int]], int]:
        """The extents of a file with holes, and the bytes of the table that lists them."""
        malformed = InvalidArchive("malformed", f"the table of extents of {member.shown} is malformed")
        table, taken = b"", 0

        def number() -> int:
            nonlocal table, taken
            while b"\n" not in table[:21]:
                if len(table) > 20 or taken + _BLOCK > member.size:
                    raise malformed
                table += b"".join(self._reader.part(_BLOCK))
                taken += _BLOCK
            text, _, table = table.partition(b"\n")
            return _number(text)

        count = number()
        if count > _EXTENTS + 1:
            raise malformed
        extents, end = [], 0
        for _ in range(count):
            start, length = number(), number()
            if start < end or start + length > size:
                raise malformed
            end = start + length
            extents.append((start, length))
        if any(table):
            raise malformed
        return extents, taken

    def _write(self, fd: int, data: bytes) -> None:
        while data:
            data = data[os.write(fd, data) :]
        if self._parent.is_due():
            self._parent.send(done=self._reader.total)
            self._check_room()

    def _finish(self, fd: int, member: ArchiveMember) -> None:
        """Set owner, attributes, mode and times of a file or directory: the owner first, since that clears others."""
        ids = self._ids
        os.fchown(fd, ids.on_disk(member.uid), ids.on_disk(member.gid))
        for key, value in member.records.items():
            if (name := _attribute_name(member, key)) is not None:
                checked = self._attribute(member, name, value)
                try:
                    os.setxattr(fd, name, checked)
                except OSError as error:
                    shown = _shown(os.fsencode(name))
                    raise InvalidArchive(
                        "malformed", f"the attribute {shown} of {member.shown} cannot be set here: {error.strerror}"
                    ) from None
        if b"ATOLL.opaque" in member.records:
            os.setxattr(fd, f"{ids.marks}opaque", b"y")
        os.fchmod(fd, member.mode)
        os.utime(fd, ns=member.times)

    def _attribute(self, member: ArchiveMember, name: str, value: bytes) -> bytes:
        if name.startswith("user.") and not name.startswith("user.overlay.") and "\0" not in name:
            return value
        try:
            if name == "security.capability" and len(value) == 20:
                (flags,) = struct.unpack_from("<I", value)
                if flags & ~1 == 0x0200_0000:
                    # In a user namespace the kernel adds the root id. Outside, without one, it would count for all.
                    root = struct.pack("<I", self._ids.base)
                    return value if not self._ids.base else struct.pack("<I", flags + 0x0100_0000) + value[4:] + root
            if name in _ACLS and len(value) <= 4 + 8 * 1024:
                return _acl_with(value, self._acl_id)
        except ValueError:
            pass
        raise InvalidArchive(
            "unsafe", f"{member.shown} has the attribute {_shown(os.fsencode(name))}, which is not allowed"
        )

    def _acl_id(self, id: int) -> int:
        if id >= IDS:
            raise ValueError("the id is out of range")
        return self._ids.on_disk(id)

    def _check_room(self) -> None:
        place = next(filter(None, self._places.values()), None)
        if place is not None and self._made:
            disk = os.statvfs(os.path.dirname(os.path.dirname(os.path.dirname(place))))
            if disk.f_bavail * disk.f_frsize < _SPARE_BYTES or (disk.f_files and disk.f_favail < _SPARE_INODES):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _shown(name: bytes) -> str:
    """A name for messages: short, and without control characters."""
    name = name.rstrip(b"\0")
    text = os.fsdecode(name[-200:])
    return ascii("…" + text if len(name) > 200 else text)


# --- the program --------------------------------------------------------------------------------------------------


def _pack(fd: int, parent: ParentPipe) -> None:
    order = parent.receive()
    writer = ArchiveWriter(fd, parent)
    writer.pack(order["manifest"].encode(), [(name, path, owner) for name, path, owner in order["trees"]])
    os.close(fd)
    parent.send(end={"entries": writer.entries})


def _unpack(fd: int, parent: ParentPipe) -> None:
    reader = ArchiveReader(fd, parent)
    parent.send(manifest=reader.manifest().decode())
    order = parent.receive()
    lock = os.open(order["lock"], os.O_RDWR | os.O_CLOEXEC)
    # Held until the end, also if the parent, which holds it too, is killed. The same call as in `drivers/locks.py`.
    fcntl.fcntl(lock, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0))
    reader.limit_bytes, reader.entry_limit = order["limit_bytes"], order["entry_limit"]
    places = {os.fsencode(name): place for name, place in order["places"].items()}
    ArchiveUnpacker(reader, places, order["owner"], parent).unpack()
    parent.send(end={"entries": reader.entries})


def main() -> int:
    os.umask(0)
    # One descriptor is open for each level of directories.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    parent = ParentPipe()
    try:
        fd = int(sys.argv[2])
        os.set_blocking(fd, False)  # so that the end of the parent is noticed while this waits
        {"pack": _pack, "unpack": _unpack}[sys.argv[1]](fd, parent)
    except InvalidArchive as refusal:
        parent.send(refused=str(refusal), reason=refusal.reason)
        return 1
    except BrokenPipeError:
        parent.send(failed="the reader of the file has ended", errno=errno.EPIPE)
        return 1
    except OSError as error:
        where = f" ({error.filename if isinstance(error.filename, str) else _shown(error.filename or b'')})"
        parent.send(failed=f"{error.strerror}{where if error.filename else ''}", errno=error.errno)
        return 1
    except (ValueError, OverflowError):
        parent.send(refused="it is malformed", reason="malformed")
        return 1
    return 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
