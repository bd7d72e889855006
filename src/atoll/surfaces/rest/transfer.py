"""Archives over REST: bodies of any size, with bounded memory.

Owns how bytes get from a program on this machine to a client and back: through a pipe, so that the slower side sets the
pace; a client that is gone ends the work, and one that takes or sends nothing for `STALL_S` is cut. What holds a lock
that others wait for goes through a file without a name instead, so that no client can hold it. Also the routes for
sandboxes; those for volumes are in `volumes.py`.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import anyio
import anyio.to_thread
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from atoll.contract.errors import Forbidden, InvalidRequest
from atoll.contract.model import Limits, RuntimeName, SandboxInfo
from atoll.server.policy import check_image, check_limits, check_runtime
from atoll.server.server import TRANSFER_PREFIX
from atoll.surfaces.door.middleware import take_any_body
from atoll.surfaces.rest.caller import ApiRoute, Caller, Reader, Writer
from atoll.surfaces.rest.errors import failures
from atoll.surfaces.rest.pages import MAX_INTEGER, NameField, answer
from atoll.surfaces.rest.sandboxes import SandboxPath, describe, effective_limits, find, reserved

router = APIRouter(prefix="/api/v1/sandboxes", tags=["archives"], route_class=ApiRoute)
T = TypeVar("T")
STALL_S = 30.0
_CHUNK_BYTES = 256 * 1024
_PIPE_BYTES = 1024 * 1024
ARCHIVE_TYPE = "application/zstd"
BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
BINARY_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/octet-stream": BINARY}}}


# --- to a client


class PipedResponse(Response):
    """What `write` writes to a file, as it is written. It fails as an answer if nothing has been sent, else by an end
    of the connection."""

    def __init__(self, write: Callable[[BinaryIO], Awaitable[object]], media_type: str, file_name: str) -> None:
        self._write = write
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.body = b""
        self.init_headers({"content-disposition": f'attachment; filename="{file_name}"'})
        del self.headers["content-length"]

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        reading, writing = open_pipe()
        failed: Exception | None = None

        async def write() -> None:
            nonlocal failed
            try:
                with os.fdopen(writing, "wb", buffering=0) as target:
                    await self._write(target)
            except BrokenPipeError:
                pass
            except Exception as error:  # noqa: BLE001 - raised below, where it can be answered
                failed = error

        async def watch(work: anyio.CancelScope) -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            work.cancel()

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(write)
                tasks.start_soon(watch, tasks.cancel_scope)
                begun = False
                while data := await read_pipe(reading):
                    with anyio.fail_after(STALL_S):
                        if not begun:
                            begun = True
                            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                tasks.cancel_scope.cancel()
        finally:
            os.close(reading)
        if failed is not None:
            raise failed
        await send({"type": "http.response.body", "body": b""})


async def sent_file(
    caller: Caller, file_name: str, media_type: str, write: Callable[[Path], Awaitable[object]]
) -> Response:
    """What `write` writes to the path of a new file, once it is complete."""
    with tempfile.TemporaryDirectory(prefix=TRANSFER_PREFIX, dir=caller.server.directory) as directory:
        path = Path(directory) / "file"
        await write(path)
        file = path.open("rb")

    async def copy(target: BinaryIO) -> None:
        with file:
            while data := await anyio.to_thread.run_sync(file.read, _CHUNK_BYTES):
                await _write_all(target.fileno(), data)

    return PipedResponse(copy, media_type, file_name)


# --- from a client


@asynccontextmanager
async def received(caller: Caller, request: Request) -> AsyncIterator[str]:
    """The path of a file with the whole body, which has no name."""
    with tempfile.TemporaryFile(dir=caller.server.directory) as file:
        async for data in body_of(request):
            await anyio.to_thread.run_sync(file.write, data)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


async def _give_body(request: Request, read: Callable[[BinaryIO], Awaitable[T]]) -> T:
    """What `read` makes of a file with the body, as it comes."""
    reading, writing = open_pipe()
    os.set_blocking(reading, True)  # a program reads it
    failed: Exception | None = None
    made: list[T] = []

    async def copy(work: anyio.CancelScope) -> None:
        nonlocal failed
        try:
            async for data in body_of(request):
                await _write_all(writing, data)
        except BrokenPipeError:
            pass  # its reader has refused it, and says why
        except (InvalidRequest, HTTPException) as error:
            failed = error
            work.cancel()
        finally:
            os.close(writing)

    with os.fdopen(reading, "rb", buffering=0) as source:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(copy, tasks.cancel_scope)
            try:
                made.append(await read(source))
            except Exception as error:  # noqa: BLE001 - raised below, not as a group
                failed = error
            tasks.cancel_scope.cancel()
    if failed is not None:
        raise failed
    return made[0]


async def body_of(request: Request) -> AsyncIterator[bytes]:
    """
    Raises:
        InvalidRequest: the client has gone before it was complete.
        HTTPException: 408, the client has sent nothing for too long.
    """
    take_any_body(request.scope)
    pieces = request.stream()
    while True:
        try:
            with anyio.fail_after(STALL_S):
                data = await anext(pieces, None)
        except ClientDisconnect:
            raise InvalidRequest("the body ended before it was complete") from None
        except TimeoutError:
            raise HTTPException(408, f"nothing of the body came for {STALL_S:g} s") from None
        if data is None:
            return
        if data:
            yield data


def open_pipe() -> tuple[int, int]:
    """A pipe whose reading end does not block."""
    reading, writing = os.pipe()
    with suppress(OSError):  # the system's limit may be lower
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    os.set_blocking(reading, False)
    return reading, writing


async def read_pipe(fd: int) -> bytes:
    """The next bytes of a pipe. Empty: its writers are gone."""
    while True:
        try:
            return os.read(fd, _CHUNK_BYTES)
        except BlockingIOError:
            await anyio.wait_readable(fd)


async def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    os.set_blocking(fd, False)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            await anyio.wait_writable(fd)


# -------------------------------------------------------------------------------------------------------------- routes


@router.get(
    "/{sandbox}/export",
    operation_id="sandboxes_export",
    response_class=Response,
    responses={**failures(404, 409, 422), 200: {"content": {ARCHIVE_TYPE: BINARY}}},
)
async def export(
    caller: Reader,
    sandbox: SandboxPath,
    checkpoint: Annotated[str | None, Query(max_length=255, description="As it was then; unset: as it is now.")] = None,
) -> Response:
    """A sandbox in one file. It goes on."""
    found = await find(caller, sandbox)
    return PipedResponse(
        lambda target: caller.engine.export(found.name, target, checkpoint=checkpoint),
        ARCHIVE_TYPE,
        f"{found.name}.atoll",
    )


@router.post(
    "/import",
    status_code=201,
    operation_id="sandboxes_import",
    response_model=SandboxInfo,
    responses=failures(404, 409, 413, 422, 507),
    openapi_extra=BINARY_BODY,
)
async def import_sandbox(
    request: Request,
    caller: Writer,
    name: Annotated[NameField | None, Query(description="Unset: the name in the file.")] = None,
    image: Annotated[str | None, Query(max_length=4096, description="Unset: the one with the file's digest.")] = None,
    runtime: Annotated[RuntimeName | None, Query()] = None,
    memory_bytes: Annotated[int | None, Query(ge=8 * 1024 * 1024, le=MAX_INTEGER)] = None,
    cpus: Annotated[float | None, Query(ge=0.01, le=1024)] = None,
    pids: Annotated[int | None, Query(ge=4, le=4_000_000)] = None,
    open_files: Annotated[int | None, Query(ge=16, le=1_048_576)] = None,
    disk_bytes: Annotated[int | None, Query(ge=16 * 1024 * 1024, le=MAX_INTEGER)] = None,
    limit_bytes: Annotated[
        int | None, Query(ge=0, le=MAX_INTEGER, description="The most that it may be unpacked.")
    ] = None,
) -> Response:
    """Create a sandbox from a file that export wrote. Nothing in it is trusted."""
    policy = caller.tenant.policy
    if image is not None:
        check_image(policy, image)
    given = Limits(memory_bytes=memory_bytes, cpus=cpus, pids=pids, open_files=open_files, disk_bytes=disk_bytes)
    limits, chosen = check_limits(policy, given), check_runtime(policy, runtime)
    wanted = None if limits == Limits() else limits
    counted = {name or f"import-{os.urandom(4).hex()}": effective_limits(caller, limits, chosen)}
    async with reserved(caller, counted):
        made = await _give_body(
            request,
            lambda source: caller.engine.import_(
                source, name, image=image, limits=wanted, runtime=chosen, limit_bytes=limit_bytes
            ),
        )
    try:
        check_image(policy, made.info.image)
        if policy.max_ttl_s is not None:
            await caller.engine.update(made.name, ttl_s=policy.max_ttl_s)
    except Forbidden:
        await caller.engine.destroy(made.name)
        raise
    info = await describe(made)
    await caller.server.events.saw(caller.tenant.name, info)
    caller.note(resource=f"sandboxes/{info.name}")
    return answer(info, 201, {"Location": f"/api/v1/sandboxes/{info.name}"})
