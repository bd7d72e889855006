"""`/files`: the files of a sandbox.

Owns how paths and names are written in URLs and JSON, conditional and partial reads, and the headers that keep a file
from being a page of this server. Contents are raw bodies, streamed both ways with bounded memory. Not here: the file
operations (`atoll.runtime.guest.files`).

A path is bytes, and JSON is text. In an answer a name is text, with U+FFFD for what is no UTF-8; where that has lost
something, the field of the same name with `_base64` has the bytes, and is unset otherwise. In a request, `path_base64`
can be given instead of `path`, and so for every other path. Control characters are as JSON escapes them.

A file comes from a sandbox, and so may be made to attack who looks at it: it is never given a type by which a browser
would run it (`Content-Disposition: attachment`, `nosniff`, a sandboxing policy).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import posixpath
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Annotated, Any, ClassVar, NamedTuple, Self
from urllib.parse import quote, unquote_to_bytes

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from pydantic import Base64Bytes, Field
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from atoll.contract.errors import AtollError, InvalidRequest
from atoll.contract.model import FileChange, FileEntry, FileKind, FileStat, Match
from atoll.runtime.guest.files import MAX_CONTEXT, MAX_EXCLUDES, Files
from atoll.surfaces.door.middleware import take_any_body
from atoll.surfaces.rest.caller import ApiRoute, Caller, Executor, Reader
from atoll.surfaces.rest.errors import failures
from atoll.surfaces.rest.event_stream import BEGUN, MEDIA_TYPE, EventStream, ServerEvent
from atoll.surfaces.rest.exec import until_left
from atoll.surfaces.rest.pages import JsonBody, NonemptyField, RequestBody, TextField
from atoll.surfaces.rest.sandboxes import SandboxPath, find

MAX_FOUND = 10_000
"""Entries or matches of one answer."""
_FRESH_S = 2.0
"""A file that was changed less than so long ago may be changed again within one tick of its clock: its ETag is weak."""
_CONTENT_HEADERS = {
    "content-security-policy": "sandbox; default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "private, no-cache",
}
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")
_BINARY: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_TAR: dict[str, Any] = {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}
_log = logging.getLogger(__name__)

router = APIRouter(prefix="/api/v1/sandboxes/{sandbox}/files", tags=["files"], route_class=ApiRoute)


# --------------------------------------------------------------------------------------------------------------- names


class ShownName(NamedTuple):
    """A name as JSON has it."""

    text: str
    base64: str | None


def shown(name: str) -> ShownName:
    """A name as JSON has it, from one whose bytes that are no UTF-8 are surrogates."""
    raw = name.encode("utf-8", "surrogateescape")
    try:
        return ShownName(raw.decode(), None)
    except UnicodeDecodeError:
        return ShownName(raw.decode("utf-8", "replace"), base64.b64encode(raw).decode())


def _path(text: str | None, raw: bytes | None, what: str = "path") -> str:
    if (text is None) == (raw is None):
        raise InvalidRequest(f"give {what}, or {what}_base64 for bytes that are no UTF-8, and not both")
    return text if raw is None else raw.decode("utf-8", "surrogateescape")  # type: ignore[return-value]


def _decoded(value: str | None, what: str) -> bytes | None:
    try:
        return None if value is None else base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{what} is not base64") from None


class GivenPath:
    """A path in a query, which is looked at once the sandbox is known: one that does not exist is told first."""

    default: ClassVar[str | None] = None

    def __init__(
        self,
        request: Request,
        path: Annotated[NonemptyField | None, Query(description="A relative path begins where commands start.")] = None,
        path_base64: Annotated[str | None, Query(description="The bytes of the path, where they are no UTF-8.")] = None,
    ) -> None:
        self._query = request.scope["query_string"]
        self._path = path
        self._path_base64 = path_base64

    @property
    def text(self) -> str:
        """
        Raises:
            InvalidRequest: there is none, there are two, or it is not what it claims to be.
        """
        try:  # what is no UTF-8 in a query would be replaced without a word, and another file be meant
            unquote_to_bytes(self._query).decode()
        except UnicodeDecodeError:
            raise InvalidRequest("the query is not UTF-8; give the bytes of a path as path_base64") from None
        if self._path is None and self._path_base64 is None and self.default is not None:
            return self.default
        return _path(self._path, _decoded(self._path_base64, "path_base64"))


class GivenDirectory(GivenPath):
    """The same; unset, it is the directory that commands start in."""

    default: ClassVar[str | None] = "."


QueryPath = Annotated[GivenPath, Depends()]
QueryDirectory = Annotated[GivenDirectory, Depends()]
QueryUser = Annotated[TextField | None, Query(description="The user inside. Unset: the sandbox's own.")]
QueryMode = Annotated[str | None, Query(pattern="^0?[0-7]{1,4}$", description="Permission bits, in octal: 0644.")]
QueryLimit = Annotated[int, Query(ge=1, le=MAX_FOUND)]


class _PathBody(RequestBody):
    path: NonemptyField | None = None
    """A relative path begins where commands start."""
    path_base64: Base64Bytes | None = None
    """The bytes of the path, where they are no UTF-8, instead of `path`."""
    user: TextField | None = None
    """The user inside. Unset: the sandbox's own."""

    @property
    def source(self) -> str:
        return _path(self.path, self.path_base64)


class _TwoPathsBody(_PathBody):
    target: NonemptyField | None = None
    target_base64: Base64Bytes | None = None
    """The bytes of the target, where they are no UTF-8, instead of `target`."""

    @property
    def destination(self) -> str:
        return _path(self.target, self.target_base64, "target")


# -------------------------------------------------------------------------------------------------------------- answers


class StatBody(RequestBody):
    """The attributes of a file."""

    kind: FileKind
    size: int
    mode: int
    """Permission bits, with set-id and sticky, as a number: 420 is 0644."""
    uid: int
    gid: int
    mtime: datetime
    target: str | None = None
    """The target of a symlink. Unset: it is not a symlink."""
    target_base64: str | None = None
    """Its bytes, where they are no UTF-8."""


class EntryBody(StatBody):
    """A file in a list."""

    name: str
    """Relative to the directory that was listed, or searched."""
    name_base64: str | None = None
    """Its bytes, where they are no UTF-8."""


class EntryList(RequestBody):
    items: list[EntryBody]
    next: str | None = None
    """The `after` of the next page. Unset: these are the last."""


class MatchBody(RequestBody):
    """A line that was found."""

    path: str
    path_base64: str | None = None
    """Its bytes, where they are no UTF-8."""
    line: int
    """From 1."""
    text: str
    """At most 4096 bytes of it."""
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


class MatchList(RequestBody):
    items: list[MatchBody]
    next: str | None = None
    """Always unset: a larger `limit` finds more."""


class WrittenBody(RequestBody):
    """What was written."""

    size: int
    """Of the file now; of an archive, the bytes of the files in it."""


def _stat_fields(stat: FileStat) -> dict[str, Any]:
    target = None if stat.target is None else shown(stat.target)
    return {
        "kind": stat.kind,
        "size": stat.size,
        "mode": stat.mode,
        "uid": stat.uid,
        "gid": stat.gid,
        "mtime": stat.mtime,
        "target": target and target.text,
        "target_base64": target and target.base64,
    }


def _entry_fields(entry: FileEntry) -> dict[str, Any]:
    name = shown(entry.name)
    return {**_stat_fields(entry), "name": name.text, "name_base64": name.base64}


def _match_fields(match: Match) -> dict[str, Any]:
    path = shown(match.path)
    return {**match.model_dump(), "path": path.text, "path_base64": path.base64}


# ------------------------------------------------------------------------------------------------------------- contents


class FileStream(Response):
    """The contents of a file, or an archive, in chunks of up to 256 KiB. Get one from `begin`.

    What goes wrong in the middle, or a key that is revoked, cuts the answer off: it is not ended properly, which
    clients notice by its length or by its last chunk.
    """

    def __init__(
        self,
        caller: Caller,
        chunks: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        *,
        status: int = 200,
        media_type: str = "application/octet-stream",
    ) -> None:
        self.status_code = status
        self.media_type = media_type
        self.background = None
        self.init_headers(headers)
        self._caller = caller
        self._chunks = chunks
        self._first = b""

    @classmethod
    async def begin(
        cls, caller: Caller, chunks: AsyncGenerator[bytes, None], headers: dict[str, str], **options: Any
    ) -> Self:
        """The answer, once there are first bytes, or none. What goes wrong before that is raised here."""
        stream = cls(caller, chunks, headers, **options)
        stream._first = await anext(chunks, b"")
        return stream

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        length = self.headers.get("content-length")
        left_bytes = None if length is None else int(length) - len(self._first)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            with until_left(self._caller, receive) as left:
                async with aclosing(self._chunks) as chunks:
                    async for chunk in chunks:
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                        if left_bytes is not None:
                            left_bytes -= len(chunk)
        except AtollError as error:
            _log.warning("request %s was cut off: %s", self._caller.request_id, error)
            return
        if not left() and not left_bytes:  # else the file has become shorter meanwhile
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _etag(stat: FileStat) -> str:
    moment = int(stat.mtime.timestamp() * 1e6)
    mark = hashlib.sha256(f"{moment}-{stat.size}-{stat.mode}-{stat.uid}-{stat.gid}".encode()).hexdigest()[:24]
    fresh = abs((datetime.now(UTC) - stat.mtime).total_seconds()) < _FRESH_S
    return f'W/"{mark}"' if fresh else f'"{mark}"'


def _is_among(etag: str, header: str) -> bool:
    """The weak comparison of RFC 9110: whether a client has this version."""
    given = {each.strip().removeprefix("W/") for each in header.split(",")}
    return "*" in given or etag.removeprefix("W/") in given


class Span(NamedTuple):
    """Bytes of a file: from `start` up to, not including, `end`."""

    start: int
    end: int


def _span(header: str, size: int) -> Span | None:
    """The bytes that a Range header asks for. None: it is not one that is understood, and all are sent.

    Raises:
        HTTPException: there are none: 416.
    """
    found = _RANGE.fullmatch(header.strip().replace(" ", ""))
    if found is None or not any(found.groups()):
        return None
    first, last = found.groups()
    if not first:
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), size if not last else min(size, int(last) + 1)
        if last and int(last) < int(first):
            return None
    if start >= end:
        raise HTTPException(416, "the range is not within the file", {"Content-Range": f"bytes */{size}"})
    return Span(start, end)


def _disposition(path: str, suffix: str = "") -> str:
    name = posixpath.basename(path.rstrip("/")) or "files"
    raw = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace") + suffix
    return f"attachment; filename*=UTF-8''{quote(raw, safe='')}"


_READ_HEADERS: dict[str, Any] = {
    "ETag": {"schema": {"type": "string"}},
    "Last-Modified": {"schema": {"type": "string"}},
    "Accept-Ranges": {"schema": {"type": "string"}},
    "Content-Disposition": {"schema": {"type": "string"}},
}


@router.get(
    "",
    operation_id="files_read",
    response_class=Response,
    responses={
        200: {"description": "The contents.", "content": _BINARY, "headers": _READ_HEADERS},
        206: {"description": "The bytes of the range.", "content": _BINARY, "headers": _READ_HEADERS},
        304: {"description": "The client has this version.", "model": None},
        **failures(404, 409, 416, 502, 504),
    },
)
@router.head("", operation_id="files_head", response_class=Response, include_in_schema=False)
async def read_file(
    caller: Reader,
    sandbox: SandboxPath,
    path: QueryPath,
    request: Request,
    user: QueryUser = None,
    range: Annotated[str | None, Header()] = None,
    if_range: Annotated[str | None, Header()] = None,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """The contents of a regular file of any size, or one range of them.

    A file whose size the kernel does not know, as those in /proc, is sent whole and without a length. If a file is
    changed while it is read, the answer may be cut off, which its length shows.
    """
    files, name = (await find(caller, sandbox)).files, path.text
    stat = await files.stat(name, user=user)
    etag = _etag(stat)
    headers = {
        **_CONTENT_HEADERS,
        "etag": etag,
        "last-modified": format_datetime(stat.mtime.astimezone(UTC), usegmt=True),
        "content-disposition": _disposition(name),
    }
    if stat.kind == "file" and if_none_match is not None and _is_among(etag, if_none_match):
        return Response(status_code=304, headers=headers)
    if stat.kind != "file" or not stat.size:
        # A directory and the like raise what reading them raises.
        return await FileStream.begin(caller, files.stream(name, user=user), headers)
    headers["accept-ranges"] = "bytes"
    if_range_holds = if_range is None or (if_range == etag and not etag.startswith("W/"))
    span = _span(range, stat.size) if range is not None and if_range_holds else None
    start, end = span or Span(0, stat.size)
    if span is not None:
        headers["content-range"] = f"bytes {start}-{end - 1}/{stat.size}"
    headers["content-length"] = str(end - start)
    status = 200 if span is None else 206
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type="application/octet-stream")
    return await FileStream.begin(
        caller, files.stream(name, offset=start, limit=end - start, user=user), headers, status=status
    )


@router.put(
    "",
    operation_id="files_write",
    response_model=WrittenBody,
    responses=failures(404, 409, 413, 502, 504, 507),
    openapi_extra={"requestBody": {"content": _BINARY}},
)
async def write_file(
    caller: Executor,
    sandbox: SandboxPath,
    path: QueryPath,
    request: Request,
    user: QueryUser = None,
    mode: QueryMode = None,
    owner: Annotated[
        NonemptyField | None, Query(description="Given to this user: NAME, UID, UID:GID. Needs an absolute path.")
    ] = None,
    append: Annotated[bool, Query(description="Add to the file. Not atomic.")] = False,
    exclusive: Annotated[bool, Query(description="Refuse a file that exists.")] = False,
    parents: Annotated[bool, Query(description="Make the directories above it.")] = True,
) -> dict[str, Any]:
    """Write a file: the body of the request is its contents, of any size.

    The file is replaced when all of it has arrived and is on the disk; if the request breaks off, it is as it was.
    """
    files, name = (await find(caller, sandbox)).files, path.text
    if owner is not None and not name.startswith("/"):  # it is root who gives it, with another home
        raise InvalidRequest("owner is given, and the path is relative; give an absolute one")
    size = await files.write_bytes(
        name,
        _body(request),
        mode=None if mode is None else int(mode, 8),
        append=append,
        exclusive=exclusive,
        parents=parents,
        user=user,
    )
    if owner is not None:
        await files.chown(name, owner, user="root")
    return {"size": size}


async def _body(request: Request) -> AsyncGenerator[bytes, None]:
    """The body of a request, of any size, as it comes. A client that leaves in the middle has sent no end: nothing is
    written."""
    take_any_body(request.scope)
    async for chunk in request.stream():
        if chunk:
            yield chunk


@router.delete("", operation_id="files_remove", status_code=204, responses=failures(404, 409, 502, 504))
async def remove_file(
    caller: Executor,
    sandbox: SandboxPath,
    path: QueryPath,
    user: QueryUser = None,
    recursive: Annotated[bool, Query(description="Also a directory that is not empty.")] = False,
    missing_ok: bool = False,
) -> Response:
    """Remove a file, a symlink (never its target) or a directory."""
    await (await find(caller, sandbox)).files.remove(path.text, recursive=recursive, missing_ok=missing_ok, user=user)
    return Response(status_code=204)


# ----------------------------------------------------------------------------------------------------------- attributes


@router.get("/stat", operation_id="files_stat", response_model=StatBody, responses=failures(404, 409, 502, 504))
async def stat_file(
    caller: Reader,
    sandbox: SandboxPath,
    path: QueryPath,
    user: QueryUser = None,
    follow: Annotated[bool, Query(description="False: of a symlink itself.")] = True,
) -> dict[str, Any]:
    """The attributes of a file, a directory or a symlink."""
    return _stat_fields(await (await find(caller, sandbox)).files.stat(path.text, follow=follow, user=user))


@router.get("/list", operation_id="files_list", response_model=EntryList, responses=failures(404, 409, 502, 504))
async def list_directory(
    caller: Reader,
    sandbox: SandboxPath,
    path: QueryDirectory,
    user: QueryUser = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    after: Annotated[str | None, Query(description="`next` of the page before.")] = None,
) -> dict[str, Any]:
    """The entries of a directory by the bytes of their names, without `.` and `..`. Symlinks are not followed."""
    last = _decoded(after, "after")
    found = [
        (raw, each)
        for each in await (await find(caller, sandbox)).files.list(path.text, user=user)
        if (raw := each.name.encode("utf-8", "surrogateescape")) > (last or b"")
    ]
    found.sort(key=lambda pair: pair[0])
    page = found[:limit]
    return {
        "items": [_entry_fields(entry) for _, entry in page],
        "next": base64.b64encode(page[-1][0]).decode() if len(found) > limit else None,
    }


class MkdirBody(_PathBody):
    parents: bool = True
    """Make the directories above it too, and accept one that exists."""
    mode: int | None = Field(default=None, ge=0, le=0o7777)


class RenameBody(_TwoPathsBody):
    parents: bool = False
    """Make the directories above the target."""


class SymlinkBody(_TwoPathsBody):
    pass


class ChmodBody(_PathBody):
    mode: int = Field(ge=0, le=0o7777)


class ChownBody(_PathBody):
    owner: NonemptyField
    """NAME, UID or UID:GID. The kernel lets only root do this: `"user": "root"`."""
    recursive: bool = False


@router.post("/mkdir", operation_id="files_mkdir", status_code=204, responses=failures(404, 409, 502, 504, 507))
async def make_directory(caller: Executor, sandbox: SandboxPath, body: Annotated[MkdirBody, JsonBody()]) -> Response:
    """Make a directory."""
    files = (await find(caller, sandbox)).files
    await files.mkdir(body.source, parents=body.parents, mode=body.mode, user=body.user)
    return Response(status_code=204)


@router.post("/rename", operation_id="files_rename", status_code=204, responses=failures(404, 409, 502, 504, 507))
async def rename_file(caller: Executor, sandbox: SandboxPath, body: Annotated[RenameBody, JsonBody()]) -> Response:
    """Rename `path` to `target`, atomically. A file or an empty directory that is there is replaced."""
    files = (await find(caller, sandbox)).files
    await files.rename(body.source, body.destination, parents=body.parents, user=body.user)
    return Response(status_code=204)


@router.post("/symlink", operation_id="files_symlink", status_code=204, responses=failures(404, 409, 502, 504, 507))
async def make_symlink(caller: Executor, sandbox: SandboxPath, body: Annotated[SymlinkBody, JsonBody()]) -> Response:
    """Make a symlink at `path` to `target`, which need not exist."""
    await (await find(caller, sandbox)).files.symlink(body.source, body.destination, user=body.user)
    return Response(status_code=204)


@router.post("/chmod", operation_id="files_chmod", status_code=204, responses=failures(404, 409, 502, 504))
async def change_mode(caller: Executor, sandbox: SandboxPath, body: Annotated[ChmodBody, JsonBody()]) -> Response:
    """Set the permission bits."""
    await (await find(caller, sandbox)).files.chmod(body.source, body.mode, user=body.user)
    return Response(status_code=204)


@router.post("/chown", operation_id="files_chown", status_code=204, responses=failures(404, 409, 502, 504))
async def change_owner(caller: Executor, sandbox: SandboxPath, body: Annotated[ChownBody, JsonBody()]) -> Response:
    """Give a file to a user inside and to that user's group. A symlink is given away itself."""
    files = (await find(caller, sandbox)).files
    await files.chown(body.source, body.owner, recursive=body.recursive, user=body.user)
    return Response(status_code=204)


# -------------------------------------------------------------------------------------------------------------- finding


@router.get("/glob", operation_id="files_glob", response_model=EntryList, responses=failures(404, 409, 502, 504))
async def find_files(
    caller: Reader,
    sandbox: SandboxPath,
    pattern: Annotated[str, Query(min_length=1)],
    path: QueryDirectory,
    user: QueryUser = None,
    hidden: Annotated[bool, Query(description="Also names that begin with a dot.")] = False,
    limit: QueryLimit = 1000,
) -> dict[str, Any]:
    """The files below `path` that match a pattern: `*`, `?`, `[…]`, `{a,b}` within a name, `**` any directories.

    If there are as many as `limit`, there may be more.
    """
    files = (await find(caller, sandbox)).files
    found = await files.glob(pattern, cwd=path.text, hidden=hidden, limit=limit, user=user)
    return {"items": [_entry_fields(each) for each in found]}


@router.get("/grep", operation_id="files_grep", response_model=MatchList, responses=failures(404, 409, 502, 504))
async def search_files(
    caller: Reader,
    sandbox: SandboxPath,
    pattern: Annotated[str, Query(min_length=1)],
    path: QueryDirectory,
    user: QueryUser = None,
    literal: Annotated[bool, Query(description="The pattern is a text, not a regular expression.")] = False,
    ignore_case: bool = False,
    context: Annotated[int, Query(ge=0, le=MAX_CONTEXT, description="Lines around each match.")] = 0,
    include: Annotated[str | None, Query(min_length=1, description="A glob of the files to search.")] = None,
    hidden: Annotated[bool, Query(description="Also files whose names begin with a dot.")] = False,
    limit: QueryLimit = 1000,
) -> dict[str, Any]:
    """The lines that match a regular expression, in a file or in all text files below a directory.

    If there are as many as `limit`, there may be more.
    """
    found = await (await find(caller, sandbox)).files.grep(
        pattern,
        path.text,
        literal=literal,
        ignore_case=ignore_case,
        context=context,
        include=include,
        hidden=hidden,
        limit=limit,
        user=user,
    )
    return {"items": [_match_fields(each) for each in found]}


@router.get(
    "/watch",
    operation_id="files_watch",
    response_class=EventStream,
    responses={
        200: {
            "description": (
                "The event `ready`, then `change` for each change: {change, path, path_base64, kind}. `change` is "
                "created, modified, deleted, moved_from, moved_to, attributes, or lost: read the tree again then."
            ),
            "content": {MEDIA_TYPE: {"schema": {"type": "string"}}},
        },
        **failures(404, 409, 502, 504),
    },
)
async def watch_files(
    caller: Reader,
    sandbox: SandboxPath,
    path: QueryDirectory,
    user: QueryUser = None,
    recursive: bool = True,
) -> Response:
    """The changes at or below a path, from now on."""
    files = (await find(caller, sandbox)).files
    return await EventStream.begin(caller, _changes(files, path.text, recursive=recursive, user=user))


async def _changes(files: Files, path: str, *, recursive: bool, user: str | None) -> AsyncGenerator[ServerEvent, None]:
    async with files.watch(path, recursive=recursive, user=user) as changes:
        yield BEGUN
        yield ServerEvent("ready", {})
        async for change in changes:
            yield ServerEvent("change", _change_fields(change))


def _change_fields(change: FileChange) -> dict[str, Any]:
    path = shown(change.path)
    return {"change": change.change, "path": path.text, "path_base64": path.base64, "kind": change.kind}


# ------------------------------------------------------------------------------------------------------------- archives


@router.get(
    "/archive",
    operation_id="files_archive",
    response_class=Response,
    responses={200: {"description": "A pax tar.", "content": _TAR}, **failures(404, 409, 502, 504)},
)
async def read_archive(
    caller: Reader,
    sandbox: SandboxPath,
    path: QueryDirectory,
    user: QueryUser = None,
    inside: Annotated[bool, Query(description="Of the contents of the directory, without its own name.")] = False,
    exclude: Annotated[
        list[NonemptyField], Query(max_length=MAX_EXCLUDES, description="Globs of what is left out.")
    ] = [],  # noqa: B006 - FastAPI copies it
) -> Response:
    """A tar of a file or a directory, as it is read. The sandbox made it: unpack it with care.

    An archive that is cut off by an error is not ended properly: neither the tar nor the transfer.
    """
    files = (await find(caller, sandbox)).files
    headers = {**_CONTENT_HEADERS, "content-disposition": _disposition(path.text, ".tar")}
    chunks = files.tar_out(path.text, inside=inside, exclude=exclude, user=user)
    return await FileStream.begin(caller, chunks, headers, media_type="application/x-tar")


@router.put(
    "/archive",
    operation_id="files_unpack",
    response_model=WrittenBody,
    responses=failures(404, 409, 413, 502, 504, 507),
    openapi_extra={"requestBody": {"content": _TAR}},
)
async def unpack_archive(
    caller: Executor, sandbox: SandboxPath, path: QueryDirectory, request: Request, user: QueryUser = None
) -> dict[str, Any]:
    """Unpack a tar, the body of the request, into a directory, which is made if it is missing.

    Nothing is written outside of it. What was unpacked before an error stays.
    """
    files = (await find(caller, sandbox)).files
    return {"size": await files.tar_in(path.text, _body(request), user=user)}
