"""`POST /exec`: a command to its end, answered as one JSON object or as events while it runs.

Owns the request, what a time-out is (a result of the command, not an error of the request: 200 with `timed_out` and the
output until then), and the end of a command whose client is gone: it is killed with all that it started. Not here:
commands that outlive their request (`processes.py`), and running them (`atoll.runtime`).

An answer is encoded here, not by FastAPI: a short command takes about a millisecond, and validating its result a second
time would be a tenth of that.
"""

from __future__ import annotations

import asyncio
import base64
import codecs
from collections.abc import AsyncGenerator, Callable
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio
from fastapi import APIRouter, Header, Request, Response
from pydantic import Base64Bytes, Field, model_validator
from pydantic_core import to_json
from starlette.types import Receive

from atoll.contract.errors import AtollError, ExecTimeout, InvalidRequest
from atoll.contract.frozen import pydantic_model
from atoll.contract.model import ExecOutcome, ExecResult, Exited, Output
from atoll.runtime.guest.process import Collector, Process
from atoll.surfaces.rest.caller import ApiRoute, Caller, Executor
from atoll.surfaces.rest.errors import failures
from atoll.surfaces.rest.event_stream import BEGUN, MEDIA_TYPE, EventStream, ServerEvent, revoked
from atoll.surfaces.rest.idempotent import IdempotencyKey, once
from atoll.surfaces.rest.pages import VARIABLE_KEYS, JsonBody, RequestBody, TextField
from atoll.surfaces.rest.sandboxes import SandboxPath, find

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atoll.runtime.sandbox import Sandbox

MAX_OUTPUT_BYTES = 16 * 1024 * 1024
"""What one answer holds of stdout and of stderr. There is no such bound on events."""
MAX_STORED_BYTES = 1024 * 1024
"""The same of an answer that can be asked for again."""
CLIENT_LEFT = 499
"""The status of a request whose client has left, for the log and the audit: nginx's."""
_WATCH_AFTER_S = 0.05
"""A client is watched for leaving once its command has run for so long: most have ended by then, and a task for each
would cost a tenth of what they do."""

Encoding = Literal["text", "base64"]

router = APIRouter(prefix="/api/v1/sandboxes/{sandbox}", tags=["exec"], route_class=ApiRoute)


class CommandBody(RequestBody):
    """What every command has."""

    command: Annotated[TextField, Field(min_length=1)] | Annotated[list[TextField], Field(min_length=1)]
    """A string is a line for the shell, a list a program and its arguments."""
    env: dict[str, TextField] | None = Field(default=None, json_schema_extra=VARIABLE_KEYS)
    """Variables on top of the sandbox's environment."""
    cwd: TextField | None = None
    """The working directory. Unset: the sandbox's own, else the user's home."""
    user: TextField | None = None
    """The user inside. Unset: the sandbox's own."""
    merge_stderr: bool = False
    """True: stderr is part of stdout, in the order of writing."""


class ExecBody(CommandBody):
    """A command to be run to its end."""

    stdin: str | None = None
    """Its input, as text. Unset: it is empty."""
    stdin_base64: Base64Bytes | None = None
    """Its input, as bytes, instead of `stdin`."""
    timeout_s: float | None = Field(default=None, gt=0, le=1e9)
    """It is killed with all that it started if it has not ended after so long. Unset: no limit."""
    output_limit_bytes: int = Field(default=1024 * 1024, ge=0, le=MAX_OUTPUT_BYTES)
    """What is kept of stdout and of stderr, head and tail. Events have all of the output, whatever this is."""
    encoding: Encoding = "text"
    """Of stdout and stderr in the answer. As text, a byte that is no UTF-8 is U+FFFD."""

    @model_validator(mode="after")
    def _one_stdin(self) -> ExecBody:
        if self.stdin is not None and self.stdin_base64 is not None:
            raise ValueError("stdin and stdin_base64 are given; give one of them")
        return self

    @property
    def input(self) -> bytes | str | None:
        return self.stdin if self.stdin_base64 is None else self.stdin_base64


@router.post(
    "/exec",
    operation_id="sandboxes_exec",
    response_model=pydantic_model(ExecResult),
    responses={
        200: {
            "description": (
                "The command has ended, whatever its exit code, also if it was killed at its time-out (`timed_out`). "
                "With `Accept: text/event-stream`: the events `stdout` and `stderr` ({text} or {base64}) as output "
                "comes, then `end` with the outcome, or `error`."
            ),
            "content": {MEDIA_TYPE: {"schema": {"type": "string"}}},
        },
        **failures(404, 409, 422, 502, 504),
    },
)
async def run_command(
    request: Request,
    caller: Executor,
    sandbox: SandboxPath,
    body: Annotated[ExecBody, JsonBody()],
    key: IdempotencyKey = None,
    accept: Annotated[str | None, Header(include_in_schema=False)] = None,
) -> Response:
    """Run a command to its end. If the client leaves before that, the command is killed with all that it started."""
    opened = await find(caller, sandbox)
    if wants_events(accept):
        if key is not None:
            raise InvalidRequest("Idempotency-Key is given with Accept: text/event-stream; events cannot be repeated")
        return await EventStream.begin(caller, _events(opened, body))
    if key is not None and body.output_limit_bytes > MAX_STORED_BYTES:
        raise InvalidRequest(
            f"output_limit_bytes may be {MAX_STORED_BYTES} with an Idempotency-Key: the answer is stored"
        )
    async with once(caller, request, key) as made:
        if made.replay is not None:
            return made.replay
        made.require_not_interrupted()
        held = caller.server.quotas.hold_output(caller.tenant, 2 * body.output_limit_bytes)
        with held, until_left(caller, request.receive) as left:
            outcome = await _run(opened, body)
        if left():
            return made.give(Response(b"", CLIENT_LEFT))
        return made.give(Response(to_json(outcome), media_type="application/json"))


def wants_events(accept: str | None) -> bool:
    """Whether a request asks for events."""
    return accept is not None and MEDIA_TYPE in accept.lower()


@contextmanager
def until_left(caller: Caller, receive: Receive) -> Iterator[Callable[[], bool]]:
    """A context that is cancelled when the client has left, or its key was revoked. Gives a function that says,
    afterwards, whether it was. The body of the request must have been read."""
    watching: list[asyncio.Task[None]] = []

    async def watch_client() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    async def watch_key() -> None:
        await revoked(caller)
        scope.cancel()

    def begin() -> None:
        watching.extend((asyncio.create_task(watch_client()), asyncio.create_task(watch_key())))

    timer = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, begin)
    with anyio.CancelScope() as scope:
        try:
            yield lambda: scope.cancelled_caught
        finally:
            timer.cancel()
            for task in watching:
                task.cancel()


async def _run(sandbox: Sandbox, body: ExecBody) -> dict[str, Any]:
    """The fields of `ExecResult`."""
    as_text = body.encoding == "text"
    out, err = Collector(body.output_limit_bytes), Collector(body.output_limit_bytes)
    try:
        if as_text:
            result = await sandbox.exec(
                body.command,
                env=body.env,
                cwd=body.cwd,
                user=body.user,
                stdin=body.input,
                merge_stderr=body.merge_stderr,
                timeout_s=body.timeout_s,
                output_limit_bytes=body.output_limit_bytes,
            )
        else:  # through callbacks: the result of a command that timed out has text only
            ended = await sandbox.exec_bytes(
                body.command,
                env=body.env,
                cwd=body.cwd,
                user=body.user,
                stdin=body.input,
                merge_stderr=body.merge_stderr,
                timeout_s=body.timeout_s,
                output_limit_bytes=0,
                on_stdout=out.add,
                on_stderr=err.add,
            )
            return _encoded(ended, out, err)
    except ExecTimeout as error:
        if not as_text:
            return _encoded(error.result, out, err)
        result = error.result
    return result.model_dump(mode="json")


def _encoded(outcome: ExecOutcome, out: Collector, err: Collector) -> dict[str, Any]:
    fields = outcome.model_dump(mode="python", include={*ExecOutcome.field_names()})
    for name, collected in (("stdout", out), ("stderr", err)):
        head, tail, cut = collected.finish()
        fields[name] = base64.b64encode(head + tail).decode()
        fields[f"{name}_truncation"] = None if cut is None else cut.model_dump()
    return fields


# -------------------------------------------------------------------------------------------------------------- events


async def _events(sandbox: Sandbox, body: ExecBody) -> AsyncGenerator[ServerEvent, None]:
    """Ends with the command, and the command with it."""
    given = body.input
    process = await sandbox.spawn(
        body.command,
        env=body.env,
        cwd=body.cwd,
        user=body.user,
        stdin=given is not None,
        merge_stderr=body.merge_stderr,
        keep=False,
        timeout_s=body.timeout_s,
    )
    encoders = {"stdout": OutputEncoder(body.encoding), "stderr": OutputEncoder(body.encoding)}
    outcome: dict[str, Any] = {"timed_out": False, "stdout_truncation": None, "stderr_truncation": None}
    feeding = None if given is None else asyncio.create_task(_feed(process, given))
    try:
        yield BEGUN
        async for event in process:
            if isinstance(event, Output):
                if data := encoders[event.stream].encode(event.data):
                    yield ServerEvent(event.stream, data)
            elif isinstance(event, Exited):
                outcome |= event.model_dump(mode="json", exclude={"stdout_total", "stderr_total"})
    except ExecTimeout as error:
        outcome |= error.result.model_dump(mode="json", include={*ExecOutcome.field_names()})
    finally:
        if feeding is not None:
            feeding.cancel()
        await process.aclose()
    for stream, encoder in encoders.items():
        if data := encoder.finish():
            yield ServerEvent(stream, data)
    yield ServerEvent("end", outcome)


async def _feed(process: Process, given: bytes | str) -> None:
    # It may end without reading all of its input, as any program may; what else is wrong, the reader is told too.
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, AtollError):
        await process.stdin.send(given.encode() if isinstance(given, str) else given)
        await process.stdin.aclose()


class OutputEncoder:
    """Makes bytes that a process wrote the data of an event: text, without characters that are torn, or base64."""

    def __init__(self, encoding: Encoding) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace") if encoding == "text" else None

    @property
    def held_bytes(self) -> int:
        """Of a character that is not complete yet."""
        return 0 if self._decoder is None else len(self._decoder.getstate()[0])

    def encode(self, data: bytes) -> dict[str, str] | None:
        """None: there is nothing to be said yet."""
        if self._decoder is None:
            return {"base64": base64.b64encode(data).decode()}
        text = self._decoder.decode(data)
        return {"text": text} if text else None

    def finish(self) -> dict[str, str] | None:
        """There is no more output. A character that it broke off in is replaced."""
        text = "" if self._decoder is None else self._decoder.decode(b"", True)
        return {"text": text} if text else None
