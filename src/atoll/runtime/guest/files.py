"""Files inside a sandbox.

Knows the file operations of the protocol, what their results mean, and how an errno from inside becomes an error
that helps. Refuses to know connections (`link.py` and `stream.py` below), commands, and the file system of the host
(`transfer.py` beside it). Every operation runs as a user of the sandbox, in a process of its own, so permissions are
the kernel's to decide and no file system inside can hold up anything else.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Literal, Self, TypedDict, TypeVar

import anyio

from atoll.contract.errors import (
    FILE_ERRORS,
    AtollError,
    FileError,
    GuestProtocolError,
    InvalidRequest,
    PathNotDirectory,
    PathNotFound,
)
from atoll.contract.model import FileChange, FileEntry, FileKind, FileStat, Match
from atoll.contract.protocol import Change, Fields, FileType, Op, Problem, Tag, encode_fields
from atoll.runtime.guest import copying as transfer
from atoll.runtime.guest.connection import OpenStream
from atoll.runtime.guest.frames import name_user
from atoll.runtime.guest.stream import ResultLimit, Stream

READ_LIMIT_BYTES = 256 * 1024 * 1024
"""What `read_bytes` gives back at most."""
ENTRY_LIMIT = 1_000_000
"""Entries, matches and the like that one call gives back at most."""

AnyPath = str | os.PathLike[str]
_Found = TypeVar("_Found")


class _Attributes(TypedDict):
    kind: FileKind
    size: int
    mode: int
    uid: int
    gid: int
    mtime: datetime
    target: str | None


_KINDS: dict[int, FileKind] = {
    FileType.FILE: "file",
    FileType.DIRECTORY: "directory",
    FileType.SYMLINK: "symlink",
    FileType.FIFO: "fifo",
    FileType.SOCKET: "socket",
    FileType.CHAR_DEVICE: "char_device",
    FileType.BLOCK_DEVICE: "block_device",
}
_CHANGES: dict[int, Literal["created", "modified", "deleted", "moved_from", "moved_to", "attributes", "lost"]] = {
    Change.CREATED: "created",
    Change.MODIFIED: "modified",
    Change.DELETED: "deleted",
    Change.MOVED_FROM: "moved_from",
    Change.MOVED_TO: "moved_to",
    Change.ATTRIBUTES: "attributes",
    Change.LOST: "lost",
}
_ADVICE: dict[tuple[Op, int], str] = {
    (Op.READ, errno.EISDIR): "use list",
    (Op.WRITE, errno.EISDIR): "name a file in it",
    (Op.WRITE, errno.EEXIST): "write without exclusive=True to replace it",
    (Op.WRITE, errno.ENOENT): "write with parents=True to make its directory",
    (Op.LIST, errno.ENOTDIR): "use stat or read",
    (Op.MKDIR, errno.ENOENT): "use parents=True to make the directories above it",
    (Op.MKDIR, errno.EEXIST): "remove it first, or use parents=True if a directory that is there will do",
    (Op.REMOVE, errno.EISDIR): "use recursive=True to remove it with all that is in it",
    (Op.REMOVE, errno.ENOTEMPTY): "use recursive=True to remove it with all that is in it",
    (Op.RENAME, errno.ENOENT): "the source must exist, and the target's directory too, or use parents=True",
    (Op.RENAME, errno.EXDEV): "the target is on another file system; copy it and remove the source",
    (Op.SYMLINK, errno.EEXIST): "remove it first",
    (Op.TAR_IN, errno.EXDEV): "an entry of the archive would be written outside of it",
    (Op.TAR_IN, errno.EPERM): "the archive holds a device, or something that may not be replaced",
}


class Files:
    """The files of a sandbox.

    A relative path is taken from the user's home. `user=None` is the sandbox's own user. Paths are text; bytes in
    them that are not UTF-8 stand as surrogates, as everywhere in Python. All methods raise, besides what they say:

    Raises:
        PathNotFound, PathExists, PathIsDirectory, PathNotDirectory, PathDenied, DiskFull, FileError: the kernel
            inside said no; `errno` and `path` say what and where.
        InvalidRequest: an argument is wrong, or there is no such user.
        SandboxDied, GuestProtocolError: the sandbox is gone.
    """

    def __init__(self, opener: OpenStream, user: str) -> None:
        self._open = opener
        self._user = user

    # ------------------------------------------------------------------------------------------------ contents

    async def read_bytes(
        self, path: AnyPath, *, offset: int = 0, limit: int | None = None, user: str | None = None
    ) -> bytes:
        """The bytes of a regular file from `offset`, at most `limit`.

        Raises:
            InvalidRequest: it would be more than 256 MiB at once; `stream` has no such limit.
        """
        ask = READ_LIMIT_BYTES + 1 if limit is None else min(limit, READ_LIMIT_BYTES + 1)
        fields = self._read_fields(path, offset, ask, user)
        buffer = io.BytesIO()

        def sink(_channel: int, data: bytes) -> None:
            if buffer.tell() + len(data) > ask:
                raise GuestProtocolError("the guest sent more of a file than was asked for")
            buffer.write(data)

        async with await self._open(Op.READ, fields, sink=sink) as stream:
            await stream.ended()
            self._check(stream, Op.READ, path, user)
        if buffer.tell() > READ_LIMIT_BYTES:
            raise InvalidRequest(
                f"{os.fspath(path)}: more than {READ_LIMIT_BYTES} bytes; read it in parts with offset and limit, "
                "or use stream"
            )
        return buffer.getvalue()

    async def read_text(
        self, path: AnyPath, *, encoding: str = "utf-8", errors: str = "strict", user: str | None = None
    ) -> str:
        """The text of a regular file, its newlines as they are.

        Raises:
            InvalidRequest: it is not text in this encoding, or it is more than 256 MiB.
        """
        data = await self.read_bytes(path, user=user)
        try:
            return data.decode(encoding, errors)
        except UnicodeDecodeError as error:
            raise InvalidRequest(
                f"{os.fspath(path)}: not {encoding} text (byte {error.start}); use read_bytes, or errors='replace'"
            ) from None
        except LookupError:
            raise InvalidRequest(f"there is no encoding {encoding!r} or no error handler {errors!r}") from None

    async def stream(
        self, path: AnyPath, *, offset: int = 0, limit: int | None = None, user: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The bytes of a regular file of any size, in pieces, with bounded memory."""
        fields = self._read_fields(path, offset, limit, user)
        async with await self._open(Op.READ, fields) as stream:
            while (data := await stream.next_bytes()) is not None:
                yield data
            self._check(stream, Op.READ, path, user)

    async def write_bytes(
        self,
        path: AnyPath,
        data: bytes | bytearray | memoryview | AsyncIterable[bytes],
        *,
        mode: int | None = None,
        append: bool = False,
        atomic: bool = True,
        parents: bool = True,
        exclusive: bool = False,
        user: str | None = None,
    ) -> int:
        """Write a regular file and return its size now.

        With `atomic`, nothing of the write is seen until all of it is on the disk; if it fails, is cancelled or the
        sandbox dies, the file is as it was. Appending is not atomic. With `parents`, missing directories are made;
        with `exclusive`, a file that is there is refused. `mode` unset: 0644 for a new file, unchanged for an old one.
        """
        fields = self._fields(
            user,
            (Tag.PATH, check_path(path)),
            (Tag.MODE, check_mode(mode)),
            (Tag.APPEND, _flag(append)),
            (Tag.ATOMIC, _flag(atomic and not append)),
            (Tag.PARENTS, _flag(parents)),
            (Tag.EXCLUSIVE, _flag(exclusive)),
        )
        async with await self._open(Op.WRITE, fields, receive=(), send=(0,)) as stream:
            result = await self._pour(stream, data, Op.WRITE, path, user)
            with stream.fail_on_violation():
                return result.count(Tag.SIZE)

    async def write_text(
        self,
        path: AnyPath,
        text: str,
        *,
        encoding: str = "utf-8",
        mode: int | None = None,
        append: bool = False,
        atomic: bool = True,
        parents: bool = True,
        exclusive: bool = False,
        user: str | None = None,
    ) -> int:
        """`write_bytes` of the text, its newlines as they are.

        Raises:
            InvalidRequest: the text cannot be written in this encoding.
        """
        try:
            data = text.encode(encoding)
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text cannot be written as {encoding} (character {error.start})") from None
        except LookupError:
            raise InvalidRequest(f"there is no encoding {encoding!r}") from None
        return await self.write_bytes(
            path, data, mode=mode, append=append, atomic=atomic, parents=parents, exclusive=exclusive, user=user
        )

    # --------------------------------------------------------------------------------------------------- names

    async def stat(self, path: AnyPath, *, follow: bool = True, user: str | None = None) -> FileStat:
        """What stands at `path`; with `follow`, what a symlink there leads to."""
        result, stream = await self._call(Op.STAT, path, user, (Tag.FOLLOW, int(follow)))
        with stream.fail_on_violation():
            return _stat(result)

    async def exists(self, path: AnyPath, *, user: str | None = None) -> bool:
        """Whether something stands at `path`. A symlink that leads nowhere does not count."""
        try:
            await self.stat(path, user=user)
        except (PathNotFound, PathNotDirectory):
            return False
        return True

    async def list(self, path: AnyPath = ".", *, user: str | None = None) -> builtins.list[FileEntry]:
        """What is in a directory, in no particular order, without `.` and `..`. Symlinks are not followed.

        Raises:
            InvalidRequest: there are more than a million entries.
        """
        fields = self._fields(user, (Tag.PATH, check_path(path)))
        return await self._gather(Op.LIST, fields, path, user, _entry, "use glob with a pattern and a limit")

    async def mkdir(
        self, path: AnyPath, *, parents: bool = True, mode: int | None = None, user: str | None = None
    ) -> None:
        """Make a directory; with `parents`, also those above it, and one that is there already is fine."""
        await self._call(Op.MKDIR, path, user, (Tag.PARENTS, _flag(parents)), (Tag.MODE, check_mode(mode)))

    async def remove(
        self, path: AnyPath, *, recursive: bool = False, missing_ok: bool = False, user: str | None = None
    ) -> None:
        """Remove a file, a symlink (never what it leads to) or an empty directory; with `recursive`, a full one."""
        await self._call(Op.REMOVE, path, user, (Tag.RECURSIVE, _flag(recursive)), (Tag.MISSING_OK, _flag(missing_ok)))

    async def rename(self, source: AnyPath, target: AnyPath, *, parents: bool = False, user: str | None = None) -> None:
        """Rename `source` to `target`, at once; a file or an empty directory that is there is replaced."""
        await self._call(Op.RENAME, source, user, (Tag.TO, check_path(target)), (Tag.PARENTS, _flag(parents)))

    async def symlink(self, path: AnyPath, target: AnyPath, *, user: str | None = None) -> None:
        """Make a symlink at `path` that leads to `target`, which need not exist."""
        await self._call(Op.SYMLINK, path, user, (Tag.TARGET, check_path(target)))

    async def chmod(self, path: AnyPath, mode: int, *, user: str | None = None) -> None:
        """Set the permission bits."""
        await self._call(Op.CHMOD, path, user, (Tag.MODE, check_mode(mode)))

    # ------------------------------------------------------------------------------------------------- finding

    async def glob(
        self,
        pattern: str,
        *,
        cwd: AnyPath = ".",
        hidden: bool = False,
        limit: int = 10_000,
        user: str | None = None,
    ) -> builtins.list[FileEntry]:
        """What matches below `cwd`, named relative to it, sorted by bytes within each directory.

        `*`, `?` and `[…]` match within a name, `**` any number of directories, `{a,b}` either. A name that begins
        with a dot matches only a pattern that does, or with `hidden`. At most `limit` entries come back: as many as
        that mean that there may be more.
        """
        return await self._find(
            Op.GLOB, cwd, user, limit, (Tag.PATTERN, pattern), (Tag.HIDDEN, _flag(hidden)), read=_entry
        )

    async def grep(
        self,
        pattern: str,
        path: AnyPath = ".",
        *,
        ignore_case: bool = False,
        include: str | None = None,
        hidden: bool = False,
        limit: int = 1000,
        user: str | None = None,
    ) -> builtins.list[Match]:
        """Lines that match a POSIX extended regular expression, in a file or in all files below a directory.

        `include` is a glob on the file's name. Binary files are passed over. Paths are relative to `path`, or `path`
        itself where that is a file. At most `limit` matches come back: as many as that mean that there may be more.

        Raises:
            InvalidRequest: the pattern is not one.
        """

        def read(record: Fields) -> Match:
            return Match(
                path=record.path(Tag.NAME) or os.fspath(path),
                line=record.count(Tag.LINE),
                text=record.raw(Tag.TEXT)[:4096].decode("utf-8", "replace"),
            )

        return await self._find(
            Op.GREP,
            path,
            user,
            limit,
            (Tag.PATTERN, pattern),
            (Tag.IGNORE_CASE, _flag(ignore_case)),
            (Tag.INCLUDE, include),
            (Tag.HIDDEN, _flag(hidden)),
            read=read,
        )

    @asynccontextmanager
    async def watch(
        self, path: AnyPath = ".", *, recursive: bool = True, user: str | None = None
    ) -> AsyncIterator[AsyncIterator[FileChange]]:
        """What changes at or below `path`. Whatever happens after entry is seen.

        Whoever reads slowly is told `lost` once when the kernel had to drop something: look at the tree again then.
        """
        fields = self._fields(user, (Tag.PATH, check_path(path)), (Tag.RECURSIVE, _flag(recursive)))
        async with await self._open(Op.WATCH, fields) as stream:
            changes = _Changes(lambda: self._check(stream, Op.WATCH, path, user), stream)
            await changes.ready()
            yield changes

    # ------------------------------------------------------------------------------------------------ archives

    async def tar_out(
        self, path: AnyPath, *, inside: bool = False, user: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        """A pax tar of a file or a directory; with `inside`, of what is in it. Sockets, pipes and devices are left out.

        What reads it must treat it as hostile: the sandbox made it. `download` does.
        """
        fields = self._fields(user, (Tag.PATH, check_path(path)), (Tag.INSIDE, _flag(inside)))
        async with await self._open(Op.TAR_OUT, fields) as stream:
            while (data := await stream.next_bytes()) is not None:
                yield data
            self._check(stream, Op.TAR_OUT, path, user)

    async def tar_in(self, path: AnyPath, chunks: AsyncIterable[bytes], *, user: str | None = None) -> int:
        """Unpack a tar into the directory `path`, which is made if missing. Returns the bytes of files written.

        Nothing is written outside of it. What was unpacked before an error stays.

        Raises:
            PathDenied: an entry would lead outside, or is a device.
        """
        fields = self._fields(user, (Tag.PATH, check_path(path)))
        async with await self._open(Op.TAR_IN, fields, receive=(), send=(0,)) as stream:
            result = await self._pour(stream, chunks, Op.TAR_IN, path, user)
            with stream.fail_on_violation():
                return result.count(Tag.SIZE)

    async def upload(self, local: Path | str, path: AnyPath, *, user: str | None = None) -> int:
        """Copy a file or a directory of this machine into the sandbox, as `cp -r` does. Returns the bytes of files.

        Into a directory that is there (or a path that ends with `/`), under its own name; else it becomes `path`.
        Symlinks below a directory are copied as symlinks; sockets, pipes and devices are left out.

        Raises:
            OSError: a local file cannot be read.
        """
        return await transfer.upload(self, Path(local), os.fspath(path), user)

    async def download(
        self,
        path: AnyPath,
        local: Path | str,
        *,
        user: str | None = None,
        limit_bytes: int = transfer.DOWNLOAD_LIMIT_BYTES,
    ) -> int:
        """Copy a file or a directory of the sandbox to this machine, as `cp -r` does. Returns the bytes of files.

        Into a directory that is there, under its own name; else it becomes `local`. Nothing the sandbox sends leads
        to a write outside of that: no absolute names, no `..`, no way through symlinks; set-id bits are dropped and
        everything belongs to the caller. A file, or a directory that was not there, appears at once when all of it
        has arrived.

        Raises:
            PathDenied: a symlink leads outside of what is copied.
            InvalidRequest: there is more than `limit_bytes`.
            OSError: a local file cannot be written.
        """
        return await transfer.download(self, os.fspath(path), Path(local), user, limit_bytes)

    # ------------------------------------------------------------------------------------------------ the wire

    def _fields(self, user: str | None, *fields: tuple[Tag, int | str | None]) -> bytes:
        return encode_fields(((Tag.USER, name_user(self._user if user is None else user)), *fields))

    def _read_fields(self, path: AnyPath, offset: int, limit: int | None, user: str | None) -> bytes:
        if offset < 0 or (limit is not None and limit < 0):
            raise InvalidRequest(f"offset is {offset} and limit is {limit}; neither may be negative")
        return self._fields(user, (Tag.PATH, check_path(path)), (Tag.OFFSET, offset or None), (Tag.LIMIT, limit))

    async def _call(
        self, op: Op, path: AnyPath, user: str | None, *fields: tuple[Tag, int | str | None]
    ) -> tuple[Fields, Stream]:
        payload = self._fields(user, (Tag.PATH, check_path(path)), *fields)
        async with await self._open(op, payload, receive=()) as stream:
            result = await stream.ended()
        self._check(stream, op, path, user)
        return result, stream

    async def _pour(
        self,
        stream: Stream,
        data: bytes | bytearray | memoryview | AsyncIterable[bytes],
        op: Op,
        path: AnyPath,
        user: str | None,
    ) -> Fields:
        complete = False
        try:
            if isinstance(data, bytes | bytearray | memoryview):
                await stream.send(data)
            else:
                async for chunk in data:
                    await stream.send(chunk)
            stream.send_eof()
            complete = True
        except anyio.BrokenResourceError:
            if stream.result is None:
                raise  # it came from `data`
        result = await stream.ended()
        self._check(stream, op, path, user)
        if not complete:
            with stream.fail_on_violation():
                raise GuestProtocolError("the guest said that a file was written before all of it was sent")
        return result

    async def _find(
        self,
        op: Op,
        path: AnyPath,
        user: str | None,
        limit: int,
        *fields: tuple[Tag, int | str | None],
        read: Callable[[Fields], _Found],
    ) -> builtins.list[_Found]:
        if not 1 <= limit <= ENTRY_LIMIT:
            raise InvalidRequest(f"limit is {limit}; it may be 1 to {ENTRY_LIMIT}")
        payload = self._fields(user, (Tag.PATH, check_path(path)), (Tag.LIMIT, limit), *fields)
        return await self._gather(op, payload, path, user, read, "use a smaller limit", expected=limit)

    async def _gather(
        self,
        op: Op,
        payload: bytes,
        path: AnyPath,
        user: str | None,
        read: Callable[[Fields], _Found],
        advice: str,
        *,
        expected: int = ENTRY_LIMIT + 1,
    ) -> builtins.list[_Found]:
        async with await self._open(op, payload) as stream:
            try:
                found = await stream.collect(read, min(expected, ENTRY_LIMIT))
            except ResultLimit as error:
                if expected <= ENTRY_LIMIT and error.limit == expected:
                    with stream.fail_on_violation():
                        raise GuestProtocolError("the guest found more than it was asked for") from None
                raise InvalidRequest(f"{os.fspath(path)}: {error}; {advice}") from None
            self._check(stream, op, path, user)
        return found

    def _check(self, stream: Stream, op: Op, path: AnyPath, user: str | None) -> None:
        if problem := stream.problem():
            raise _error(op, problem, os.fspath(path), self._user if user is None else user)


class _Changes:
    """The changes that a watch sees, as an async iterator."""

    def __init__(self, check: Callable[[], None], stream: Stream) -> None:
        self._check = check
        self._stream = stream
        self._waiting: deque[FileChange] = deque()

    async def ready(self) -> None:
        records = await self._stream.next_records()
        if records is None:
            self._check()
        with self._stream.fail_on_violation():
            if not records or records[0].integer(Tag.CHANGE) != Change.READY:
                raise GuestProtocolError("the guest did not say that a watch is ready")
            self._waiting.extend(map(_change, records[1:]))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> FileChange:
        while not self._waiting:
            records = await self._stream.next_records()
            if records is None:
                self._check()
                raise StopAsyncIteration
            with self._stream.fail_on_violation():
                self._waiting.extend(map(_change, records))
        return self._waiting.popleft()


# --------------------------------------------------------------------------------------------------- requests in


def check_path(path: AnyPath) -> str:
    """Return `path` as text if it can be one.

    Raises:
        InvalidRequest: it is empty.
    """
    text = os.fspath(path)
    if not text:
        raise InvalidRequest("the path is empty; '.' is the user's home")
    return text


def check_mode(mode: int | None) -> int | None:
    """Return `mode` if those can be permission bits.

    Raises:
        InvalidRequest: they cannot.
    """
    if mode is not None and not 0 <= mode <= 0o7777:
        raise InvalidRequest(f"mode is {mode:#o}; it may be 0 to 0o7777")
    return mode


def _flag(value: bool) -> int | None:
    return 1 if value else None


# --------------------------------------------------------------------------------------------------- results out


def _kind(record: Fields) -> FileKind:
    kind = _KINDS.get(record.integer(Tag.KIND))
    if kind is None:
        raise GuestProtocolError(f"the guest sent a file of kind {record.integer(Tag.KIND)}")
    return kind


def _stat(record: Fields) -> FileStat:
    return FileStat(**_attributes(record))


def _entry(record: Fields) -> FileEntry:
    return FileEntry(name=record.path(Tag.NAME), **_attributes(record))


def _attributes(record: Fields) -> _Attributes:
    return {
        "kind": _kind(record),
        "size": record.count(Tag.SIZE),
        "mode": record.count(Tag.MODE) & 0o7777,
        "uid": record.count(Tag.UID),
        "gid": record.count(Tag.GID),
        "mtime": record.time_ns(Tag.MTIME_NS),
        "target": record.path(Tag.TARGET) if Tag.TARGET in record else None,
    }


def _change(record: Fields) -> FileChange:
    change = _CHANGES.get(record.integer(Tag.CHANGE))
    if change is None:
        raise GuestProtocolError(f"the guest saw a change of kind {record.integer(Tag.CHANGE)}")
    return FileChange(
        change=change,
        path=record.path(Tag.NAME) if Tag.NAME in record else "",
        kind=_kind(record) if Tag.KIND in record else None,
    )


def _error(op: Op, problem: Problem, path: str, user: str) -> AtollError:
    if problem.no_such_user:
        return InvalidRequest(f"there is no user {user!r} in the sandbox")
    if op is Op.GREP and problem.number == errno.EINVAL:
        return InvalidRequest(f"the pattern cannot be used: {problem.about or problem.words}")
    number = problem.number
    text = f"{path}: {problem.words}"
    if problem.about and problem.about != path:
        text += f" ({problem.about})"
    if advice := _ADVICE.get((op, number)):
        text += f"; {advice}"
    elif number in {errno.EACCES, errno.EPERM}:
        text += f" for user {user!r}"
    return FILE_ERRORS.get(number, FileError)(text, number=number, path=path)
