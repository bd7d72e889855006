"""`/processes`: commands that outlive their request.

Owns spawning and what is done to a process by its number: its output from any offset, its input, signals, the size of
its terminal, and waiting for its end. A process that is spawned here is kept: it belongs to its sandbox, and goes on
when the client, its connection or this server ends. Each request attaches, does its work and detaches again, so that
requests need no memory here, and another program can take over at any time. Not here: commands that end with their
request (`exec.py`), terminals (`terminal.py`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Annotated, Any

import anyio
from fastapi import APIRouter, Header, Path, Query, Request, Response
from pydantic import Field

from atoll.contract.errors import Conflict, InvalidRequest, ProcessNotFound
from atoll.contract.model import Gap, Output, ProcessInfo, SystemProcess
from atoll.surfaces.door.middleware import take_any_body
from atoll.surfaces.rest.caller import ApiRoute, Executor, Reader
from atoll.surfaces.rest.errors import failures
from atoll.surfaces.rest.event_stream import BEGUN, MEDIA_TYPE, EventStream, ServerEvent
from atoll.surfaces.rest.exec import CLIENT_LEFT, CommandBody, Encoding, OutputEncoder, until_left
from atoll.surfaces.rest.pages import MAX_INTEGER, After, JsonBody, Limit, Page, RequestBody, answer, page_answer
from atoll.surfaces.rest.sandboxes import SandboxPath, find

if TYPE_CHECKING:
    from atoll.runtime.sandbox import Sandbox

MAX_WAIT_S = 3600.0
NEW_OUTPUT_ONLY = MAX_INTEGER
"""An offset beyond what any process has written."""

ProcessId = Annotated[int, Path(ge=1, le=MAX_INTEGER, description="The `id` of the process, which is not its `pid`.")]

router = APIRouter(prefix="/api/v1/sandboxes/{sandbox}", tags=["processes"], route_class=ApiRoute)


class TerminalSize(RequestBody):
    rows: int = Field(ge=1, le=65535)
    cols: int = Field(ge=1, le=65535)


class SpawnBody(CommandBody):
    """A command to be started."""

    stdin: bool = False
    """True: it has an input, which `POST …/stdin` writes to. False: its input is empty."""
    pty: TerminalSize | None = None
    """A terminal of this size; its output is then all stdout, and it has an input."""


class SignalBody(RequestBody):
    signal: int = Field(ge=1, le=64)
    """By its number."""
    tree: bool = False
    """True: to every process that it started as well."""


@router.get(
    "/processes",
    operation_id="processes_list",
    response_model=Page[ProcessInfo],
    responses=failures(404, 409, 502, 504),
)
async def list_processes(caller: Reader, sandbox: SandboxPath, limit: Limit = 100, after: After = None) -> Response:
    """The commands that were started through the API: those that run, and the last 64 that ended, by number."""
    found = await (await find(caller, sandbox)).processes()
    return page_answer(found, lambda each: f"{each.id:016}", limit, after)


@router.post(
    "/processes",
    operation_id="processes_spawn",
    status_code=201,
    response_model=ProcessInfo,
    responses=failures(404, 409, 422, 502, 504),
)
async def spawn_process(caller: Executor, sandbox: SandboxPath, body: Annotated[SpawnBody, JsonBody()]) -> Response:
    """Start a command, and leave it running: it ends by itself, when it is killed, or with its sandbox."""
    opened = await find(caller, sandbox)
    process = await opened.spawn(
        body.command,
        env=body.env,
        cwd=body.cwd,
        user=body.user,
        merge_stderr=body.merge_stderr,
        stdin=body.stdin,
        pty=None if body.pty is None else (body.pty.rows, body.pty.cols),
    )
    await process.detach()
    return answer(
        await find_process(opened, process.id),
        201,
        {"Location": f"/api/v1/sandboxes/{opened.name}/processes/{process.id}"},
    )


@router.get(
    "/ps", operation_id="processes_ps", response_model=Page[SystemProcess], responses=failures(404, 409, 502, 504)
)
async def list_system_processes(
    caller: Reader, sandbox: SandboxPath, limit: Limit = 1000, after: After = None
) -> Response:
    """All processes in the sandbox, by their pid."""
    found = await (await find(caller, sandbox)).ps()
    return page_answer(found, lambda each: f"{each.pid:016}", limit, after)


@router.get(
    "/processes/{process}",
    operation_id="processes_get",
    response_model=ProcessInfo,
    responses=failures(404, 409, 502, 504),
)
async def get_process(caller: Reader, sandbox: SandboxPath, process: ProcessId) -> Response:
    """A command that was started through the API."""
    return answer(await find_process(await find(caller, sandbox), process))


@router.delete(
    "/processes/{process}", operation_id="processes_kill", status_code=204, responses=failures(404, 409, 502, 504)
)
async def kill_process(caller: Executor, sandbox: SandboxPath, process: ProcessId) -> Response:
    """Kill a process with all that it started. When this is answered, nothing of it is left."""
    await (await find(caller, sandbox)).kill(process)
    return Response(status_code=204)


@router.post(
    "/processes/{process}/signal",
    operation_id="processes_signal",
    status_code=204,
    responses=failures(404, 409, 502, 504),
)
async def signal_process(
    caller: Executor, sandbox: SandboxPath, process: ProcessId, body: Annotated[SignalBody, JsonBody()]
) -> Response:
    """Send a signal to a process."""
    await (await find(caller, sandbox)).kill(process, body.signal, tree=body.tree)
    return Response(status_code=204)


@router.post(
    "/processes/{process}/resize",
    operation_id="processes_resize",
    status_code=204,
    responses=failures(404, 409, 502, 504),
)
async def resize_process(
    caller: Executor, sandbox: SandboxPath, process: ProcessId, body: Annotated[TerminalSize, JsonBody()]
) -> Response:
    """Change the size of its terminal. Nothing happens to a process that has none."""
    opened = await find(caller, sandbox)
    async with await opened.attach(
        process, stdout_offset=NEW_OUTPUT_ONLY, stderr_offset=NEW_OUTPUT_ONLY, lossless=False
    ) as handle:
        await handle.resize(body.rows, body.cols)
    return Response(status_code=204)


@router.post(
    "/processes/{process}/stdin",
    operation_id="processes_stdin",
    status_code=204,
    responses=failures(404, 409, 413, 502, 504),
    openapi_extra={
        "requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
    },
)
async def write_stdin(
    caller: Executor,
    sandbox: SandboxPath,
    process: ProcessId,
    request: Request,
    eof: Annotated[bool, Query(description="True: the input ends after these bytes.")] = False,
) -> Response:
    """Write the body of the request, as it is, to the input of a process that was spawned with one.

    Answered when all of it was taken over: as fast as the process reads, but for the last 64 KiB. Bytes after the end
    of the input, or for a process that has ended or closed its input, are dropped. One request at a time writes.
    """
    take_any_body(request.scope)
    opened = await find(caller, sandbox)
    try:
        attached = await opened.attach(
            process, stdout_offset=NEW_OUTPUT_ONLY, stderr_offset=NEW_OUTPUT_ONLY, stdin=True, lossless=False
        )
    except InvalidRequest as error:  # another request writes
        raise Conflict(error.message) from None
    async with attached as handle:
        try:
            async for chunk in request.stream():
                if chunk:
                    await handle.stdin.send(chunk)
            if eof:
                await handle.stdin.aclose()
        except anyio.BrokenResourceError:
            raise ProcessNotFound(f"process {process} has ended", id=process) from None
    return Response(status_code=204)


@router.get(
    "/processes/{process}/wait",
    operation_id="processes_wait",
    response_model=ProcessInfo,
    responses=failures(404, 409, 502, 504),
)
async def wait_for_process(
    caller: Reader,
    sandbox: SandboxPath,
    process: ProcessId,
    request: Request,
    timeout_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 60.0,
) -> Response:
    """Wait until a process has ended, or for `timeout_s`: its `exit_code` is then still unset."""
    opened = await find(caller, sandbox)
    with until_left(caller, request.receive) as left:
        async with await opened.attach(
            process, stdout_offset=NEW_OUTPUT_ONLY, stderr_offset=NEW_OUTPUT_ONLY, lossless=False
        ) as handle:
            with anyio.move_on_after(timeout_s):
                await handle.wait()
    if left():
        return Response(status_code=CLIENT_LEFT)
    return answer(await find_process(opened, process))


@router.get(
    "/processes/{process}/output",
    operation_id="processes_output",
    response_class=EventStream,
    responses={
        200: {
            "description": (
                "The events `stdout` and `stderr` ({text} or {base64}, and the `offset` of its first byte), `gap` "
                "({stream, offset}: output before this offset is no longer kept), and `exit` with how it ended. Each "
                "has an id, with which `Last-Event-ID` goes on at the next byte."
            ),
            "content": {MEDIA_TYPE: {"schema": {"type": "string"}}},
        },
        **failures(404, 409, 502, 504),
    },
)
async def stream_output(
    caller: Reader,
    sandbox: SandboxPath,
    process: ProcessId,
    stdout_offset: Annotated[int | None, Query(ge=0, le=MAX_INTEGER)] = None,
    stderr_offset: Annotated[int | None, Query(ge=0, le=MAX_INTEGER)] = None,
    follow: Annotated[bool, Query(description="False: only what it has written until now.")] = True,
    encoding: Annotated[Encoding, Query()] = "text",
    last_event_id: Annotated[str | None, Header(pattern=r"^[0-9]{1,16}-[0-9]{1,16}$", examples=["70000-0"])] = None,
) -> Response:
    """The output of a process from an offset on, while it runs and after. Unset: from the oldest that is kept.

    The last 64 KiB of each stream are kept. A client that reads slowly slows the process down, and loses nothing.
    """
    if last_event_id is not None:
        stdout_offset, stderr_offset = map(int, last_event_id.split("-"))
    opened = await find(caller, sandbox)
    events = _output(opened, process, (stdout_offset, stderr_offset), follow=follow, encoding=encoding)
    return await EventStream.begin(caller, events)


async def _output(
    sandbox: Sandbox,
    process_id: int,
    offsets: tuple[int | None, int | None],
    *,
    follow: bool,
    encoding: Encoding,
) -> AsyncGenerator[ServerEvent, None]:
    info = await find_process(sandbox, process_id)
    totals = {"stdout": info.stdout_total, "stderr": info.stderr_total}
    # An offset that is not reached yet would be that of the next byte: where that is has to be known.
    first, second = (
        None if offset is None else min(offset, total) for offset, total in zip(offsets, totals.values(), strict=True)
    )
    encoders = {stream: OutputEncoder(encoding) for stream in totals}
    reached = {"stdout": first or 0, "stderr": second or 0}
    said = dict(reached)
    """How far the events before have come: less than what was reached where a character is torn."""

    def event(name: str, data: dict[str, Any]) -> ServerEvent:
        return ServerEvent(name, data, f"{said['stdout']}-{said['stderr']}")

    def last_words(stream: str) -> list[ServerEvent]:
        begin, data = said[stream], encoders[stream].finish()
        said[stream] = reached[stream]
        return [] if data is None else [event(stream, {**data, "offset": begin})]

    def is_enough() -> bool:
        return not follow and info.ended_at is None and all(reached[each] >= total for each, total in totals.items())

    async with await sandbox.attach(process_id, stdout_offset=first, stderr_offset=second) as handle:
        yield BEGUN
        while not is_enough():
            each = await anext(handle, None)
            if each is None:
                return
            if isinstance(each, Output):
                encoder, stream = encoders[each.stream], each.stream
                begin = each.offset - encoder.held_bytes
                data = encoder.encode(each.data)
                reached[stream] = each.offset + len(each.data)
                said[stream] = reached[stream] - encoder.held_bytes
                if data is not None:
                    yield event(stream, {**data, "offset": begin})
            elif isinstance(each, Gap):
                for words in last_words(each.stream):
                    yield words
                reached[each.stream] = said[each.stream] = each.offset
                yield event("gap", {"stream": each.stream, "offset": each.offset})
            else:
                for words in (*last_words("stdout"), *last_words("stderr")):
                    yield words
                yield event("exit", each.model_dump(mode="json"))
        for words in (*last_words("stdout"), *last_words("stderr")):
            yield words


async def find_process(sandbox: Sandbox, process_id: int) -> ProcessInfo:
    """
    Raises:
        ProcessNotFound: no command that was started through the API has this number.
    """
    for each in await sandbox.processes():
        if each.id == process_id:
            return each
    raise ProcessNotFound(f"no command has the number {process_id}", id=process_id)
