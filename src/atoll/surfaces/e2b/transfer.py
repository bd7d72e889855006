"""/files of E2B's daemon: contents of files, read, written and put together, of any size; and /envs and /metrics.

Owns the forms in which files are sent (multipart, as they are, compressed), who may send them (a token, or a URL that
is signed for one file and one operation), and their errors: `code` and `message`. Bodies are never whole in memory. Not
here: names and attributes (`filesystem.py`), and what metadata of files are (`file_metadata.py`).
"""

from __future__ import annotations

import errno
import math
import os
import posixpath
import time
import zlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from pydantic import Field
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from atoll.contract.errors import FileError, InvalidRequest, PermissionDenied
from atoll.runtime.sandbox import Sandbox
from atoll.surfaces.door.middleware import take_any_body
from atoll.surfaces.e2b.accounts import ROOT, SandboxAccounts, as_user
from atoll.surfaces.e2b.connect import basic_user
from atoll.surfaces.e2b.control import E2bBody, read_body
from atoll.surfaces.e2b.file_metadata import METADATA_PREFIX, encode_metadata, given_metadata
from atoll.surfaces.e2b.filesystem import FilesystemService
from atoll.surfaces.e2b.tokens import TOKEN_HEADER, FileSignature, SandboxTokens
from atoll.tools.tool import readable

MAX_PARTS = 1000
"""Files in one request."""
MAX_HEADERS_BYTES = 16 * 1024
"""Of one part."""
MAX_BOUNDARY_BYTES = 256
_HEAD_BYTES = _INFLATED_BYTES = 1024 * 1024
_SIZED_BYTES = 1024 * 1024
"""Larger files are sent with their length, which spares both sides the framing of chunks."""


class ComposeRequest(E2bBody):
    source_paths: list[str] = Field(default_factory=list, alias="source_paths", max_length=MAX_PARTS)
    destination: str = ""
    username: str | None = None


class FileTransfer:
    """The routes, for all sandboxes."""

    def __init__(self, tokens: SandboxTokens, accounts: SandboxAccounts, filesystem: FilesystemService) -> None:
        self._tokens = tokens
        self._accounts = accounts
        self._filesystem = filesystem

    def signature(self, request: Request) -> FileSignature:
        """What a signed URL says.

        Raises:
            HTTPException: it is not signed.
            InvalidRequest: its expiration is not a number.
        """
        query = request.query_params
        text = query.get("signature")
        if not text:
            raise HTTPException(401, "missing signature query parameter")
        return FileSignature(
            text,
            path=query.get("path", ""),
            operation="write" if request.method == "POST" else "read",
            user=query.get("username", ""),
            expiration=query.get("signature_expiration"),
        )

    def require_signed(self, request: Request, sandbox_id: str) -> None:
        """
        Raises:
            HTTPException: it is not signed with this sandbox's token, or the signature has expired.
        """
        signature = self.signature(request)
        if not self._tokens.signed(sandbox_id, signature):
            raise HTTPException(401, "invalid signature")
        if signature.has_expired:
            raise HTTPException(401, "signature is already expired")

    # ------------------------------------------------------------------------------------------------------ reading

    async def read(self, request: Request, sandbox: Sandbox) -> Response:
        """GET /files: one file."""
        user = _user(request)
        path = await self._accounts.resolve(sandbox, _path(request), user)
        found = await as_user(user, lambda who: sandbox.files.stat(path, user=who))
        if found.kind == "directory":
            raise HTTPException(400, f"path '{readable(path)}' is a directory")
        if found.kind != "file":
            raise HTTPException(400, f"path '{readable(path)}' is not a regular file")
        accepted = request.headers.get("accept-encoding", "").replace(" ", "").lower()
        if "identity;q=0" in accepted and "gzip" not in accepted:
            raise HTTPException(406, "the encodings are gzip and identity; Accept-Encoding allows neither")

        # What a small file says of its size may be wrong (/proc, /sys): its end is found by reading it.
        size = found.size if found.size > _SIZED_BYTES else None

        async def read(who: str | None) -> tuple[bytes, AsyncGenerator[bytes, None]]:
            chunks = sandbox.files.stream(path, limit=size, user=who)
            return await anext(chunks, b""), chunks

        first, rest = await as_user(user, read)
        headers = {"Content-Type": "application/octet-stream", "Vary": "Accept-Encoding"}
        if request.method == "HEAD":
            await rest.aclose()
            return Response(headers={**headers, "Content-Length": str(found.size)})
        if accepted == "gzip":
            return StreamingResponse(_gzip(first, rest), headers={**headers, "Content-Encoding": "gzip"})
        if size is not None:
            headers["Content-Length"] = str(size)
        return StreamingResponse(_joined(first, rest), headers=headers)

    # ------------------------------------------------------------------------------------------------------ writing

    async def write(self, request: Request, sandbox: Sandbox) -> Response:
        """POST /files: one file as it is, or several as a form."""
        take_any_body(request.scope)
        user = _user(request)
        metadata = given_metadata(request.headers)
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        chunks = _decoded(request)
        if kind == b"application/octet-stream":
            return JSONResponse([await self._store(sandbox, _path(request), chunks, metadata, user)])
        if kind != b"multipart/form-data" or b"boundary" not in options:
            raise HTTPException(400, "the body has to be multipart/form-data or application/octet-stream")
        parts = _Parts(chunks, options[b"boundary"])
        stored: list[dict[str, Any]] = []
        while (name := await parts.next_file()) is not None:
            if len(stored) >= MAX_PARTS:
                raise HTTPException(400, f"the form has more than {MAX_PARTS} files")
            path = request.query_params.get("path") or name
            if not path:
                raise HTTPException(400, "a file of the form has no name, and the URL has no path")
            if any(each["path"] == path for each in stored):
                raise HTTPException(400, f"you cannot upload multiple files to the same path '{path[:4096]}'")
            stored.append(await self._store(sandbox, path, parts.content(), metadata, user))
        if not stored:
            raise HTTPException(400, "the form has no part named 'file'")
        return JSONResponse(stored)

    async def _store(
        self,
        sandbox: Sandbox,
        path: str,
        chunks: AsyncIterator[bytes],
        metadata: dict[str, str],
        user: str | None,
    ) -> dict[str, Any]:
        target = await self._accounts.resolve(sandbox, path, user)
        head = bytearray()
        async for chunk in chunks:
            head += chunk
            if len(head) > _HEAD_BYTES:
                break
        else:
            await self._store_small(sandbox, target, bytes(head), metadata, user)
            return _stored(target, metadata)
        # Who may write is found out before the bytes are passed on: they come once.
        await self._filesystem.make_parents(sandbox, target, user)
        writer = await as_user(user, lambda who: _may_write(sandbox, target, who))
        await _write(sandbox, target, _behind(bytes(head), chunks), metadata, writer)
        await _give(sandbox, target, writer, user)
        return _stored(target, metadata)

    async def _store_small(
        self, sandbox: Sandbox, target: str, data: bytes, metadata: dict[str, str], user: str | None
    ) -> None:
        try:
            await _write(sandbox, target, data, metadata, user)
        except PermissionDenied:
            await self._filesystem.make_parents(sandbox, target, user)
            await _write(sandbox, target, data, metadata, ROOT)
            await _give(sandbox, target, ROOT, user)

    async def compose(self, request: Request, sandbox: Sandbox) -> Response:
        """POST /files/compose: several files become one, in order, and are gone. If it fails, all are as they were."""
        body = await read_body(request, ComposeRequest)
        user = body.username or _user(request)
        if not body.source_paths:
            raise HTTPException(400, "source_paths must not be empty")
        if not body.destination:
            raise HTTPException(400, "destination is required")
        target = await self._accounts.resolve(sandbox, body.destination, user)
        sources = [await self._accounts.resolve(sandbox, each, user) for each in body.source_paths]
        for source in sources:
            if source == target:
                raise HTTPException(400, f"source path {readable(source)!r} cannot be the same as destination")
            found = await as_user(user, lambda who: sandbox.files.stat(source, user=who))  # noqa: B023 - awaited
            if found.kind != "file":
                raise HTTPException(400, f"source path is not a regular file: {readable(source)}")
        await self._filesystem.make_parents(sandbox, target, user)

        async def join(who: str | None) -> str | None:
            await sandbox.files.write_bytes(
                target, _contents(sandbox, sources, who), xattr_prefix=METADATA_PREFIX, user=who
            )
            return who

        await _give(sandbox, target, await as_user(user, join), user)
        for source in sources:
            await as_user(user, lambda who: sandbox.files.remove(source, missing_ok=True, user=who))  # noqa: B023
        return JSONResponse(_stored(target, {}))

    # ------------------------------------------------------------------------------------------------------- others

    async def envs(self, _request: Request, sandbox: Sandbox) -> Response:
        """GET /envs: the environment that commands begin with."""
        ran = await sandbox.exec_bytes(["env", "-0"])
        pairs = [each.partition(b"=") for each in ran.stdout.split(b"\0") if each]
        return JSONResponse(
            {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, _, value in pairs}
        )

    async def metrics(self, _request: Request, sandbox: Sandbox) -> Response:
        """GET /metrics: what the sandbox uses now."""
        used, limits = await sandbox.stat(disk=False), sandbox.info.limits
        memory = limits.memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return JSONResponse(
            {
                "ts": int(time.time()),
                "cpu_count": math.ceil(limits.cpus or os.cpu_count() or 1),
                "cpu_used_pct": 0.0,
                "mem_total": memory,
                "mem_used": used.memory_bytes or 0,
                "mem_total_mib": memory // 2**20,
                "mem_used_mib": (used.memory_bytes or 0) // 2**20,
            }
        )


def _stored(path: str, metadata: dict[str, str]) -> dict[str, Any]:
    stored = {"path": readable(path), "name": readable(posixpath.basename(path)), "type": "file"}
    return stored | ({"metadata": metadata} if metadata else {})


async def _write(
    sandbox: Sandbox, path: str, data: bytes | AsyncIterator[bytes], metadata: dict[str, str], user: str | None
) -> None:
    """Write in place, with these metadata and no others."""
    xattrs = encode_metadata(metadata)
    try:
        await sandbox.files.write_bytes(
            path, data, atomic=False, xattrs=xattrs, xattr_prefix=METADATA_PREFIX, user=user
        )
    except FileError as error:
        if error.errno != errno.EOPNOTSUPP or not metadata:
            raise
        raise HTTPException(501, f"the file system of {readable(path)} keeps no metadata of files") from None


async def _contents(sandbox: Sandbox, paths: list[str], user: str | None) -> AsyncIterator[bytes]:
    for path in paths:
        async for chunk in sandbox.files.stream(path, user=user):
            yield chunk


async def _give(sandbox: Sandbox, path: str, writer: str | None, user: str | None) -> None:
    """Give what root wrote to the user that it was written for."""
    owner = user or sandbox.info.user
    if writer == ROOT and owner != ROOT:
        await sandbox.files.chown(path, owner, user=ROOT)


async def _behind(head: bytes, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield head
    async for chunk in chunks:
        yield chunk


async def _may_write(sandbox: Sandbox, path: str, user: str | None) -> str | None:
    """The user, if it may write to this path: an empty append changes nothing of a file that is there.

    Raises:
        PermissionDenied: it may not.
    """
    if await sandbox.files.exists(path, user=user):
        await sandbox.files.write_bytes(path, b"", append=True, user=user)
    else:
        await sandbox.files.write_bytes(path, b"", atomic=False, parents=False, user=user)
    return user


def _user(request: Request) -> str | None:
    """The user that a request is made as. That of a signed one is signed: a header cannot choose another."""
    is_signed = TOKEN_HEADER not in request.headers
    return request.query_params.get("username") or (None if is_signed else basic_user(request))


def _path(request: Request) -> str:
    path = request.query_params.get("path")
    if not path:
        raise HTTPException(400, "the query parameter path is missing")
    return path


# --------------------------------------------------------------------------------------------------------------- bodies


async def _joined(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    try:
        yield first
        async for chunk in rest:
            yield chunk
    finally:
        await rest.aclose()


async def _gzip(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    packing = zlib.compressobj(1, wbits=31)
    async for chunk in _joined(first, rest):
        if packed := packing.compress(chunk):
            yield packed
    yield packing.flush()


async def _decoded(request: Request) -> AsyncIterator[bytes]:
    """The body of a request, unpacked if it is compressed. What it unpacks to is bounded by the disk it is written to.

    Raises:
        HTTPException: it cannot be unpacked.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise HTTPException(400, f"the encoding {encoding[:64]!r} is not supported; allowed are gzip and identity")
    unpacking = zlib.decompressobj(wbits=31) if encoding == "gzip" else None
    async for chunk in request.stream():
        if unpacking is None:
            if chunk:
                yield chunk
            continue
        try:
            while chunk and not unpacking.eof:
                if piece := unpacking.decompress(chunk, _INFLATED_BYTES):
                    yield piece
                chunk = unpacking.unconsumed_tail
        except zlib.error as error:
            raise HTTPException(400, f"the body is not gzip: {error}") from None
        if chunk or unpacking.unused_data:  # it would keep all that follows
            raise HTTPException(400, "the body is not gzip: something follows its end")
    if unpacking is not None and not unpacking.eof:
        raise HTTPException(400, "the body is not gzip: it is cut off")


class _Parts:
    """The files of a form, one after the other, as their bytes come."""

    def __init__(self, chunks: AsyncIterator[bytes], boundary: bytes) -> None:
        self._chunks = chunks
        self._events: deque[tuple[str, bytes]] = deque()
        self._header_bytes = 0
        self._name, self._value = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._ended = False
        if len(boundary) > MAX_BOUNDARY_BYTES:
            raise HTTPException(400, f"the boundary of the form has more than {MAX_BOUNDARY_BYTES} bytes")
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, begin, end: self._header(self._name, data[begin:end]),
                "on_header_value": lambda data, begin, end: self._header(self._value, data[begin:end]),
                "on_header_end": self._header_end,
                "on_headers_finished": lambda: self._events.append(("begin", self._file_name())),
                "on_part_data": lambda data, begin, end: self._events.append(("data", data[begin:end])),
                "on_part_end": lambda: self._events.append(("end", b"")),
                "on_end": lambda: self._events.append(("last", b"")),
            },
        )

    async def next_file(self) -> str | None:
        """The name of the next file. None: there is no more.

        Raises:
            HTTPException: the body is not a form, or is cut off.
        """
        while not self._ended:
            kind, data = await self._next()
            if kind == "begin" and data is not _NOT_A_FILE:
                return data.decode("utf-8", "surrogateescape")
            self._ended = kind == "last"
        return None

    async def content(self) -> AsyncIterator[bytes]:
        """The bytes of the file that `next_file` named."""
        while True:
            kind, data = await self._next()
            if kind == "data":
                yield data
            elif kind == "end":
                return

    async def _next(self) -> tuple[str, bytes]:
        while not self._events:
            chunk = await anext(self._chunks, None)
            if chunk is None:
                raise HTTPException(400, "the form is cut off: its last boundary is missing")
            try:
                self._parser.write(chunk)
            except MultipartParseError as error:
                raise HTTPException(400, f"the body is not a form: {str(error)[:200]}") from None
        return self._events.popleft()

    def _begin(self) -> None:
        self._headers.clear()
        self._header_bytes = 0

    def _header(self, text: bytearray, data: bytes) -> None:
        self._header_bytes += len(data)
        if self._header_bytes > MAX_HEADERS_BYTES:
            raise InvalidRequest(f"the headers of a part have more than {MAX_HEADERS_BYTES} bytes")
        text += data

    def _header_end(self) -> None:
        self._headers[bytes(self._name).lower()] = bytes(self._value)
        self._name.clear()
        self._value.clear()

    def _file_name(self) -> bytes:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        return options.get(b"filename", b"") if options.get(b"name") == b"file" else _NOT_A_FILE


_NOT_A_FILE = b"\0"
"""In place of the name of a part that is none of ours."""
