"""Files inside a sandbox.

Owns the file operations of the protocol, what their results mean, and which error an errno from inside becomes. Every
operation runs as a user of the sandbox, in a process that serves it alone, so the kernel decides permissions and a
hanging file system inside blocks nothing else. Not here: connections (`connection.py`, `stream.py`), commands
(`process.py`), and the file system of the host (`copying.py`). Used by `sandbox.py`, `egress/` and `secrets/`.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import posixpath
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
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
    SandboxError,
    UserNotFound,
)
from atoll.contract.model import FileChange, FileEntry, FileKind, FileStat, Match
from atoll.contract.protocol import (
    Change,
    Fields,
    FileType,
    Op,
    Problem,
    Tag,
    decode_xattrs,
    encode_fields,
    encode_xattrs,
)
from atoll.runtime.guest import copying, regex
from atoll.runtime.guest.connection import OpenStream
from atoll.runtime.guest.frames import name_user
from atoll.runtime.guest.process_end import too_many_processes
from atoll.runtime.guest.stream import ResultLimit, Stream

MAX_READ_BYTES = 256 * 1024 * 1024
"""The largest result of `read_bytes`."""
MAX_EXCLUDES = 256
"""Patterns of `exclude`."""
MAX_CONTEXT = 100
"""Lines around a match of `grep`, before and after."""
MAX_CONTEXT_BYTES = 8192
"""What the guest sends of the lines before, and after, a match."""
MAX_XATTR_NAME = 255
"""Bytes of the name of an extended attribute, as the kernel says."""
MAX_ENTRIES = 1_000_000
"""Entries or matches that one call returns at most."""

AnyPath = str | os.PathLike[str]
_Parsed = TypeVar("_Parsed")


class _FileAttributes(TypedDict):
    kind: FileKind
    size: int
    mode: int
    uid: int
    gid: int
    mtime: datetime
    target: str | None
    xattrs: dict[str, bytes]


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
    (Op.WRITE, errno.EOPNOTSUPP): "its file system keeps no extended attributes",
    (Op.LIST, errno.ENOTDIR): "use stat or read",
    (Op.MKDIR, errno.ENOENT): "use parents=True to make the directories above it",
    (Op.MKDIR, errno.EEXIST): "remove it first, or use parents=True to accept an existing directory",
    (Op.REMOVE, errno.EISDIR): "use recursive=True to remove it with its contents",
    (Op.REMOVE, errno.ENOTEMPTY): "use recursive=True to remove it with its contents",
    (Op.RENAME, errno.ENOENT): "the source must exist, and the target's directory too, or use parents=True",
    (Op.RENAME, errno.EXDEV): "the target is on another file system; copy it and remove the source",
    (Op.SYMLINK, errno.EEXIST): "remove it first",
    (Op.TAR_IN, errno.EXDEV): "an entry of the archive would be written outside of it",
    (Op.TAR_IN, errno.EPERM): "the archive holds a device, or would replace an entry that may not be replaced",
}


class Files:
    """The files of a sandbox.

    A relative path begins where commands start: at the sandbox's own directory (`info.cwd`), else the user's home.
    `user=None` is the sandbox's own user. Paths are text; bytes in
    them that are not UTF-8 are surrogates, as everywhere in Python. All methods raise, besides what they say:

    Raises:
        PathNotFound, PathExists, PathIsDirectory, PathNotDirectory, PermissionDenied, DiskFull, FileError: the kernel
            inside refused it; `errno` and `path` say why and where.
        InvalidRequest: an argument is wrong, or there is no such user.
        SandboxDied, GuestProtocolError: the sandbox is gone.
    """

    def __init__(self, opener: OpenStream, user: str, cwd: str | None = None) -> None:
        self._open = opener
        self._user = user
        self._cwd = cwd

    # ------------------------------------------------------------------------------------------------ contents

    async def read_bytes(
        self, path: AnyPath, *, offset: int = 0, limit: int | None = None, user: str | None = None
    ) -> bytes:
        """The bytes of a regular file from `offset`, at most `limit`.

        Raises:
            InvalidRequest: it would be more than 256 MiB at once; `stream` has no such limit.
        """
        ask = MAX_READ_BYTES + 1 if limit is None else min(limit, MAX_READ_BYTES + 1)
        fields = self._read_fields(path, offset, ask, user)
        buffer = io.BytesIO()

        def sink(_channel: int, data: bytes) -> None:
            if buffer.tell() + len(data) > ask:
                raise GuestProtocolError("the guest sent more of a file than was requested")
            buffer.write(data)

        async with await self._open(Op.READ, fields, sink=sink) as stream:
            await stream.ended()
            self._check(stream, Op.READ, path, user)
        if buffer.tell() > MAX_READ_BYTES:
            raise InvalidRequest(
                f"{os.fspath(path)}: more than {MAX_READ_BYTES} bytes; read it in parts with offset and limit, "
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
            raise InvalidRequest(f"the encoding {encoding!r} or the error handler {errors!r} does not exist") from None

    async def stream(
        self, path: AnyPath, *, offset: int = 0, limit: int | None = None, user: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The bytes of a regular file of any size, in chunks, with bounded memory."""
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
        xattrs: Mapping[str, bytes] | None = None,
        xattr_prefix: str | None = None,
        user: str | None = None,
    ) -> int:
        """Write a regular file and return its size now.

        With `atomic`, the write is visible when all of it is on the disk; if it fails, is cancelled or the sandbox
        dies, the file is as it was. Appending is not atomic. With `parents`, missing directories are made; with
        `exclusive`, an existing file is refused. `mode` unset: 0644 for a new file, unchanged for an old one.

        With `xattr_prefix` (`user.` and more), the file's extended attributes whose names begin with it are replaced by
        `xattrs`, before anything is written. These have names that begin with it, and take 4096 bytes at most.

        Raises:
            FileError: the file system keeps no extended attributes, and there are some to set.
        """
        prefix = check_xattr_prefix(xattr_prefix)
        fields = self._fields(
            user,
            (Tag.PATH, self._path(path)),
            (Tag.MODE, check_mode(mode)),
            (Tag.APPEND, _flag(append)),
            (Tag.ATOMIC, _flag(atomic and not append)),
            (Tag.PARENTS, _flag(parents)),
            (Tag.EXCLUSIVE, _flag(exclusive)),
            (Tag.XATTR_PREFIX, prefix),
            (Tag.XATTRS, _xattrs(xattrs, prefix)),
        )
        async with await self._open(Op.WRITE, fields, receive=(), send=(0,)) as stream:
            result = await self._send(stream, data, Op.WRITE, path, user)
            if xattrs and Tag.COUNT not in result:
                raise SandboxError(
                    f"{os.fspath(path)} was written without its extended attributes: an older Atoll started this "
                    "sandbox; put it to sleep and wake it first"
                )
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
            raise InvalidRequest(f"the encoding {encoding!r} does not exist") from None
        return await self.write_bytes(
            path, data, mode=mode, append=append, atomic=atomic, parents=parents, exclusive=exclusive, user=user
        )

    # --------------------------------------------------------------------------------------------------- names

    async def stat(
        self, path: AnyPath, *, follow: bool = True, xattr_prefix: str | None = None, user: str | None = None
    ) -> FileStat:
        """The attributes of `path`; with `follow`, those of a symlink's target.

        With `xattr_prefix`, also the extended attributes whose names begin with it, as far as they fit into 4096 bytes.
        """
        prefix = check_xattr_prefix(xattr_prefix)
        result, stream = await self._call(Op.STAT, path, user, (Tag.FOLLOW, int(follow)), (Tag.XATTR_PREFIX, prefix))
        with stream.fail_on_violation():
            return FileStat(**_attributes(result, prefix))

    async def exists(self, path: AnyPath, *, user: str | None = None) -> bool:
        """Whether `path` exists. A symlink without a target does not count."""
        try:
            await self.stat(path, user=user)
        except (PathNotFound, PathNotDirectory):
            return False
        return True

    async def list(
        self, path: AnyPath = ".", *, xattr_prefix: str | None = None, user: str | None = None
    ) -> builtins.list[FileEntry]:
        """The entries of a directory, in no particular order, without `.` and `..`. Symlinks are not followed.

        With `xattr_prefix`, each has its extended attributes, as in `stat`.

        Raises:
            InvalidRequest: there are more than a million entries.
        """
        prefix = check_xattr_prefix(xattr_prefix)
        fields = self._fields(user, (Tag.PATH, self._path(path)), (Tag.XATTR_PREFIX, prefix))
        return await self._gather(
            Op.LIST, fields, path, user, lambda each: _entry(each, prefix), "use glob with a pattern and a limit"
        )

    async def mkdir(
        self, path: AnyPath, *, parents: bool = True, mode: int | None = None, user: str | None = None
    ) -> None:
        """Make a directory; with `parents`, also those above it, and an existing one is accepted."""
        await self._call(Op.MKDIR, path, user, (Tag.PARENTS, _flag(parents)), (Tag.MODE, check_mode(mode)))

    async def remove(
        self, path: AnyPath, *, recursive: bool = False, missing_ok: bool = False, user: str | None = None
    ) -> None:
        """Remove a file, a symlink (never its target) or an empty directory; with `recursive`, any directory."""
        await self._call(Op.REMOVE, path, user, (Tag.RECURSIVE, _flag(recursive)), (Tag.MISSING_OK, _flag(missing_ok)))

    async def rename(self, source: AnyPath, target: AnyPath, *, parents: bool = False, user: str | None = None) -> None:
        """Rename `source` to `target`, atomically; an existing file or empty directory is replaced."""
        await self._call(Op.RENAME, source, user, (Tag.TO, self._path(target)), (Tag.PARENTS, _flag(parents)))

    async def symlink(self, path: AnyPath, target: AnyPath, *, user: str | None = None) -> None:
        """Make a symlink at `path` to `target`, which need not exist."""
        await self._call(Op.SYMLINK, path, user, (Tag.TARGET, check_path(target)))

    async def chmod(self, path: AnyPath, mode: int, *, user: str | None = None) -> None:
        """Set the permission bits."""
        await self._call(Op.CHMOD, path, user, (Tag.MODE, check_mode(mode)))

    async def chown(self, path: AnyPath, owner: str, *, recursive: bool = False, user: str | None = None) -> None:
        """Give `path` to a user inside and to that user's group; with `recursive`, also all that is below it.

        `owner` is a name, `uid` or `uid:gid`. Symlinks are given away themselves, never what they lead to. The kernel
        lets only root do this (`user="root"`).

        Raises:
            InvalidRequest: there is no such owner.
        """
        await self._call(Op.CHOWN, path, user, (Tag.OWNER, check_owner(owner)), (Tag.RECURSIVE, _flag(recursive)))

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
        """The entries that match below `cwd`, relative to it, sorted by bytes within each directory.

        `*`, `?` and `[…]` match within a name, `**` any number of directories, `{a,b}` either. A name that begins
        with a dot matches only a pattern that does, or with `hidden`. At most `limit` entries are returned; if there
        are exactly as many, there may be more.
        """
        return await self._find(
            Op.GLOB, cwd, user, limit, (Tag.PATTERN, pattern), (Tag.HIDDEN, _flag(hidden)), parse=_entry
        )

    async def grep(
        self,
        pattern: str,
        path: AnyPath = ".",
        *,
        literal: bool = False,
        ignore_case: bool = False,
        context: int = 0,
        include: str | None = None,
        hidden: bool = False,
        limit: int = 1000,
        user: str | None = None,
    ) -> builtins.list[Match]:
        """Lines that match a regular expression, in a file or in all files below a directory.

        Expressions mean what they mean in Python, JavaScript and ripgrep, with classes (`\\d`, `\\w`, `\\s`, `\\b`) of
        ASCII; look-around is refused, as is all that would match across lines (`regex.py`). With `literal`, lines that
        contain `pattern` as it is. `context` is how many lines around each match are returned with it. `include` is a
        glob on the file's name (`*.py`) or, with a slash, on its path relative to `path` (`src/*.py`, `**/test/*.py`),
        as in `glob`. Binary files are skipped. Paths are relative to `path`, or `path` itself where that is a file. At
        most `limit` matches are returned; if there are exactly as many, there may be more.

        Raises:
            InvalidRequest: the pattern is not a regular expression, or one that cannot be searched for.
        """
        if not 0 <= context <= MAX_CONTEXT:
            raise InvalidRequest(f"context is {context}; it may be 0 to {MAX_CONTEXT} lines")
        expression, ignore_case = regex.translate(
            regex.escape(pattern) if literal else pattern, ignore_case=ignore_case
        )

        def parse(record: Fields) -> Match:
            return Match(
                path=record.path(Tag.NAME) or os.fspath(path),
                line=record.count(Tag.LINE),
                text=record.raw(Tag.TEXT)[:4096].decode("utf-8", "replace"),
                before=_context_lines(record, Tag.BEFORE, context),
                after=_context_lines(record, Tag.AFTER, context),
            )

        return await self._find(
            Op.GREP,
            path,
            user,
            limit,
            (Tag.PATTERN, expression),
            (Tag.CONTEXT, context or None),
            (Tag.IGNORE_CASE, _flag(ignore_case)),
            (Tag.INCLUDE, include),
            (Tag.HIDDEN, _flag(hidden)),
            parse=parse,
            confirmed=Tag.CONTEXT if context else None,
        )

    @asynccontextmanager
    async def watch(
        self, path: AnyPath = ".", *, recursive: bool = True, user: str | None = None
    ) -> AsyncIterator[AsyncIterator[FileChange]]:
        """The changes at or below `path` from the entry of the context on.

        A slow reader gets `lost` once when the kernel had to drop events: read the tree again then.
        """
        fields = self._fields(user, (Tag.PATH, self._path(path)), (Tag.RECURSIVE, _flag(recursive)))
        async with await self._open(Op.WATCH, fields) as stream:
            changes = _Changes(lambda: self._check(stream, Op.WATCH, path, user), stream)
            await changes.ready()
            yield changes

    # ------------------------------------------------------------------------------------------------ archives

    async def tar_out(
        self, path: AnyPath, *, inside: bool = False, exclude: Sequence[str] = (), user: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        """A pax tar of a file or a directory; with `inside`, of its contents. Sockets, pipes and devices are left out.

        So is what matches a glob of `exclude`, a directory with all that is in it: a name at any depth (`*.pyc`,
        `node_modules`) or, with a slash, a path relative to the directory (`build/*.o`, `**/test/data`).

        Its reader must treat it as hostile, because the sandbox made it. `download` does.
        """
        excludes = [(Tag.EXCLUDE, check_pattern(pattern)) for pattern in exclude]
        if len(excludes) > MAX_EXCLUDES:
            raise InvalidRequest(f"exclude has {len(excludes)} patterns; it may have {MAX_EXCLUDES}")
        fields = self._fields(user, (Tag.PATH, self._path(path)), (Tag.INSIDE, _flag(inside)), *excludes)
        async with await self._open(Op.TAR_OUT, fields) as stream:
            while (data := await stream.next_bytes()) is not None:
                yield data
            self._check(stream, Op.TAR_OUT, path, user)
            if excludes and Tag.COUNT not in await stream.ended():
                raise SandboxError(
                    "nothing was excluded: an older Atoll started this sandbox; put it to sleep and wake it first"
                )

    async def tar_in(self, path: AnyPath, chunks: AsyncIterable[bytes], *, user: str | None = None) -> int:
        """Unpack a tar into the directory `path`, which is made if missing. Returns the bytes of files written.

        Nothing is written outside of it. What was unpacked before an error stays.

        Raises:
            PermissionDenied: an entry would lead outside, or is a device.
        """
        fields = self._fields(user, (Tag.PATH, self._path(path)))
        async with await self._open(Op.TAR_IN, fields, receive=(), send=(0,)) as stream:
            result = await self._send(stream, chunks, Op.TAR_IN, path, user)
            with stream.fail_on_violation():
                return result.count(Tag.SIZE)

    async def upload(self, local: Path | str, path: AnyPath, *, user: str | None = None) -> int:
        """Copy a file or a directory of this machine into the sandbox, as `cp -r` does. Returns the bytes of files.

        Into an existing directory (or a path that ends with `/`), under its own name; else as `path`.
        Symlinks below a directory are copied as symlinks; sockets, pipes and devices are left out.

        Raises:
            OSError: a local file cannot be read.
        """
        return await copying.upload(self, Path(local), os.fspath(path), user)

    async def download(
        self,
        path: AnyPath,
        local: Path | str,
        *,
        exclude: Sequence[str] = (),
        user: str | None = None,
        limit_bytes: int = copying.MAX_DOWNLOAD_BYTES,
    ) -> int:
        """Copy a file or a directory of the sandbox to this machine, as `cp -r` does. Returns the bytes of files.

        Into an existing directory, under its own name; else as `local`. Nothing that the sandbox sends is written
        outside of that: no absolute names, no `..`, no path through symlinks; set-id bits are dropped and everything
        belongs to the caller. A file, or a new directory, appears when all of it has arrived. Of a directory, what
        matches a glob of `exclude` is left out, as in `tar_out`.

        Raises:
            PermissionDenied: a symlink leads outside of what is copied.
            InvalidRequest: there is more than `limit_bytes`, or it is more than 512 directories deep.
            OSError: a local file cannot be written.
        """
        return await copying.download(self, os.fspath(path), Path(local), exclude, user, limit_bytes)

    # ---------------------------------------------------------------------------------------------- the protocol

    def _fields(self, user: str | None, *fields: tuple[Tag, int | str | bytes | None]) -> bytes:
        return encode_fields(((Tag.USER, name_user(self._user if user is None else user)), *fields))

    def _path(self, path: AnyPath) -> str:
        text = check_path(path)
        return text if self._cwd is None else posixpath.join(self._cwd, text)

    def _read_fields(self, path: AnyPath, offset: int, limit: int | None, user: str | None) -> bytes:
        if offset < 0 or (limit is not None and limit < 0):
            raise InvalidRequest(f"offset is {offset} and limit is {limit}; neither may be negative")
        return self._fields(user, (Tag.PATH, self._path(path)), (Tag.OFFSET, offset or None), (Tag.LIMIT, limit))

    async def _call(
        self, op: Op, path: AnyPath, user: str | None, *fields: tuple[Tag, int | str | None]
    ) -> tuple[Fields, Stream]:
        payload = self._fields(user, (Tag.PATH, self._path(path)), *fields)
        async with await self._open(op, payload, receive=()) as stream:
            result = await stream.ended()
        self._check(stream, op, path, user)
        return result, stream

    async def _send(
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
                raise GuestProtocolError("the guest reported a file as written before all of it was sent")
        return result

    async def _find(
        self,
        op: Op,
        path: AnyPath,
        user: str | None,
        limit: int,
        *fields: tuple[Tag, int | str | None],
        parse: Callable[[Fields], _Parsed],
        confirmed: Tag | None = None,
    ) -> builtins.list[_Parsed]:
        if not 1 <= limit <= MAX_ENTRIES:
            raise InvalidRequest(f"limit is {limit}; it may be 1 to {MAX_ENTRIES}")
        payload = self._fields(user, (Tag.PATH, self._path(path)), (Tag.LIMIT, limit), *fields)
        return await self._gather(
            op, payload, path, user, parse, "use a smaller limit", expected=limit, confirmed=confirmed
        )

    async def _gather(
        self,
        op: Op,
        payload: bytes,
        path: AnyPath,
        user: str | None,
        parse: Callable[[Fields], _Parsed],
        advice: str,
        *,
        expected: int = MAX_ENTRIES + 1,
        confirmed: Tag | None = None,
    ) -> builtins.list[_Parsed]:
        async with await self._open(op, payload) as stream:
            try:
                found = await stream.collect(parse, min(expected, MAX_ENTRIES))
            except ResultLimit as error:
                if expected <= MAX_ENTRIES and error.limit == expected:
                    with stream.fail_on_violation():
                        raise GuestProtocolError("the guest returned more results than the limit") from None
                raise InvalidRequest(f"{os.fspath(path)}: {error}; {advice}") from None
            self._check(stream, op, path, user)
            if confirmed is not None and confirmed not in await stream.ended():
                raise SandboxError(
                    f"{confirmed.name.lower()} is not known to this sandbox, which an older Atoll started; put it to "
                    "sleep and wake it first"
                )
        return found

    def _check(self, stream: Stream, op: Op, path: AnyPath, user: str | None) -> None:
        if problem := stream.problem():
            raise _error(op, problem, os.fspath(path), self._user if user is None else user)


class _Changes:
    """The changes that a watch sees, as an async iterator."""

    def __init__(self, check: Callable[[], None], stream: Stream) -> None:
        self._check = check
        self._stream = stream
        self._unread: deque[FileChange] = deque()

    async def ready(self) -> None:
        records = await self._stream.next_records()
        if records is None:
            self._check()
        with self._stream.fail_on_violation():
            if not records or records[0].integer(Tag.CHANGE) != Change.READY:
                raise GuestProtocolError("the guest did not report that a watch is ready")
            self._unread.extend(map(_change, records[1:]))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> FileChange:
        while not self._unread:
            records = await self._stream.next_records()
            if records is None:
                self._check()
                raise StopAsyncIteration
            with self._stream.fail_on_violation():
                self._unread.extend(map(_change, records))
        return self._unread.popleft()


# --------------------------------------------------------------------------------------------------- requests in


def check_path(path: AnyPath) -> str:
    """Return `path` as text if it is allowed.

    Raises:
        InvalidRequest: it is empty.
    """
    text = os.fspath(path)
    if not text:
        raise InvalidRequest("the path is empty; '.' is the directory that commands start in")
    return text


def check_owner(owner: str) -> str:
    """Return `owner` if it is allowed.

    Raises:
        InvalidRequest: it is empty.
    """
    if not owner:
        raise InvalidRequest("the owner is empty; give a user's name, uid or uid:gid")
    return owner


def check_pattern(pattern: str) -> str:
    """Return a glob pattern if it is allowed.

    Raises:
        InvalidRequest: it is empty.
    """
    if not pattern:
        raise InvalidRequest("a pattern is empty")
    return pattern


def check_mode(mode: int | None) -> int | None:
    """Return `mode` if it is allowed.

    Raises:
        InvalidRequest: it is not.
    """
    if mode is not None and not 0 <= mode <= 0o7777:
        raise InvalidRequest(f"mode is {mode:#o}; it may be 0 to 0o7777")
    return mode


def check_xattr_prefix(prefix: str | None) -> str | None:
    """Return what the names of extended attributes begin with if it is allowed.

    Raises:
        InvalidRequest: it is not.
    """
    if prefix is None:
        return None
    size = len(prefix.encode("utf-8", "replace"))
    if not prefix.startswith("user.") or not len("user.") < size < MAX_XATTR_NAME:
        raise InvalidRequest(
            f"{prefix[:300]!r} cannot begin the names of extended attributes: 'user.' and at least one character more"
        )
    return prefix


def _xattrs(xattrs: Mapping[str, bytes] | None, prefix: str | None) -> bytes | None:
    """The field XATTRS."""
    if not xattrs:
        return None
    for name in xattrs:
        if prefix is None or not name.startswith(prefix):
            raise InvalidRequest(f"the extended attribute {name[:300]!r} does not begin with xattr_prefix={prefix!r}")
        if len(name.encode("utf-8", "replace")) > MAX_XATTR_NAME:
            raise InvalidRequest(
                f"the extended attribute {name[:300]!r} has a name of more than {MAX_XATTR_NAME} bytes"
            )
    return encode_xattrs({name.removeprefix(prefix or ""): value for name, value in xattrs.items()})


def _flag(value: bool) -> int | None:
    return 1 if value else None


# --------------------------------------------------------------------------------------------------- results out


def _kind(record: Fields) -> FileKind:
    kind = _KINDS.get(record.integer(Tag.KIND))
    if kind is None:
        raise GuestProtocolError(f"the guest sent a file of kind {record.integer(Tag.KIND)}")
    return kind


def _entry(record: Fields, xattr_prefix: str | None = None) -> FileEntry:
    return FileEntry(name=record.path(Tag.NAME), **_attributes(record, xattr_prefix))


def _attributes(record: Fields, xattr_prefix: str | None) -> _FileAttributes:
    """A guest that sends extended attributes without being asked for them is not believed."""
    has_xattrs = xattr_prefix is not None and Tag.XATTRS in record
    xattrs = decode_xattrs(record.raw(Tag.XATTRS)) if has_xattrs else {}
    return {
        "kind": _kind(record),
        "size": record.count(Tag.SIZE),
        "mode": record.count(Tag.MODE) & 0o7777,
        "uid": record.count(Tag.UID),
        "gid": record.count(Tag.GID),
        "mtime": record.time_ns(Tag.MTIME_NS),
        "target": record.path(Tag.TARGET) if Tag.TARGET in record else None,
        "xattrs": {f"{xattr_prefix}{name}": value for name, value in xattrs.items()},
    }


def _context_lines(record: Fields, tag: Tag, count: int) -> tuple[str, ...]:
    """The lines around a match. A guest that sends more than it was asked for is not believed."""
    if not count or tag not in record:
        return ()
    lines = record.raw(tag)[:MAX_CONTEXT_BYTES].decode("utf-8", "replace").split("\n")
    return tuple(lines[-count:] if tag is Tag.BEFORE else lines[:count])


def _change(record: Fields) -> FileChange:
    change = _CHANGES.get(record.integer(Tag.CHANGE))
    if change is None:
        raise GuestProtocolError(f"the guest sent a change of kind {record.integer(Tag.CHANGE)}")
    return FileChange(
        change=change,
        path=record.path(Tag.NAME) if Tag.NAME in record else "",
        kind=_kind(record) if Tag.KIND in record else None,
    )


def _error(op: Op, problem: Problem, path: str, user: str) -> AtollError:
    if problem.no_such_user:
        return UserNotFound(user)
    if op is Op.CHOWN and problem.number == errno.ENOENT and problem.about == "no such owner":
        return InvalidRequest(f"{path}: there is no such owner in the sandbox")
    if op is Op.GREP and problem.number == errno.EINVAL and problem.about != path:  # else the path is no regular file
        return InvalidRequest(f"the pattern is not a regular expression: {problem.about or problem.words}")
    number = problem.number
    if number == errno.EAGAIN and problem.about == "starting a worker":
        return too_many_processes(f"{path}: what works on files could not be started")
    text = f"{path}: {problem.words}"
    if problem.about and problem.about != path:
        text += f" ({problem.about})"
    if advice := _ADVICE.get((op, number)):
        text += f"; {advice}"
    elif number in {errno.EACCES, errno.EPERM}:
        text += f" for user {user!r}"
    return FILE_ERRORS.get(number, FileError)(text, number=number, path=path)
