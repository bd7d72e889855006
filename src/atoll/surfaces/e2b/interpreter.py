"""The code interpreter of E2B (port 49999): /execute and /contexts, on Atoll's own kernels.

Owns contexts (a kernel each, started when it is first used), the lines of JSON in which an execution is told while it
runs, and the forms of results and charts. A context is in memory: when this server ends, its kernels end too. A client
that goes away interrupts what it runs, and the variables stay; when the sandbox ends, the connection does, as at E2B:
SDKs ask for its health then. Not here: kernels (`atoll.code.session`).

SDKs send the sandbox's token to /execute only; the other paths are open to whom the sandbox's ports are (`routing.py`).
"""

from __future__ import annotations

import asyncio
import codecs
import json
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, cast

import anyio
from anyio.streams.memory import MemoryObjectSendStream
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from atoll.code.languages import LanguageName
from atoll.code.messages import CallMessage, PartMessage
from atoll.code.session import CellOutcome, CodeSession, StreamName
from atoll.contract.errors import AtollError, SandboxDied, SandboxNotFound
from atoll.runtime.sandbox import Sandbox
from atoll.surfaces.door.connection import DISCONNECT
from atoll.surfaces.e2b.accounts import SandboxAccounts
from atoll.surfaces.e2b.control import E2bBody, read_body
from atoll.surfaces.e2b.record import own_variables

MAX_CONTEXTS = 32
"""Of one sandbox."""
MAX_CODE_CHARS = 4 * 1024 * 1024
KEEPALIVE_S = 5.0
KERNELS: Mapping[str, LanguageName] = {
    "python": "python",
    "javascript": "javascript",
    "typescript": "javascript",
    "bash": "bash",
}
"""Which kernel runs a language."""
_FROM_THE_START = ("python", "javascript")
_SHORT = {"py": "python", "js": "javascript", "ts": "typescript", "sh": "bash"}
_OUTPUT_KEPT_BYTES = 4096
"""All output is passed on as it comes; what is kept is for no one."""
_NO_TOOLS: Mapping[str, Any] = {"tools": [], "models": {}}
_CHART = "application/vnd.atoll.chart+json"
_DATA = "application/vnd.atoll.data+json"
_FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    _DATA: "data",
}
_CHART_TYPES = {"box": "box_and_whisker", "other": "unknown"}
Line = dict[str, Any]
_SANDBOX_ENDED: Line = {}


class ExecuteRequest(E2bBody):
    code: str = Field(max_length=MAX_CODE_CHARS)
    context_id: str | None = Field(default=None, alias="context_id")
    language: str | None = None
    env_vars: dict[str, str] | None = Field(default=None, alias="env_vars")


class ContextRequest(E2bBody):
    language: str | None = None
    cwd: str | None = Field(default=None, max_length=4095)


class _NoTools:
    """Code of an E2B client has no tools of Atoll."""

    async def handle(self, call: CallMessage) -> dict[str, Any]:
        return {"error": {"type": "NotImplementedError", "message": f"there is no tool {call.tool[:100]!r} here"}}


class InterpreterContext:
    """One context: a language, a directory, and a kernel once it is used."""

    def __init__(self, sandbox: Sandbox, id: str, language: str, cwd: str) -> None:
        self.sandbox = sandbox
        self.id = id
        self.language = language
        self.cwd = cwd
        self.count = 0
        """Of executions in the present kernel."""
        self._session: CodeSession | None = None
        self._starting = anyio.Lock()

    def shown(self) -> dict[str, str]:
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    async def session(self) -> CodeSession:
        """Its kernel, a new one if there is none.

        Raises:
            InvalidRequest: the image has no program for the language.
            SandboxError: the kernel did not start.
        """
        async with self._starting:
            if self._session is None or not self._session.is_alive:
                await self.restart()
                self._session = await CodeSession.start(
                    self.sandbox,
                    _NoTools(),
                    stubs=_NO_TOOLS,
                    language=KERNELS[self.language],
                    env=own_variables(self.sandbox),
                    cwd=self.cwd,
                )
            return self._session

    async def restart(self) -> None:
        """End its kernel. The next execution has a new one."""
        if self._session is not None:
            await self._session.aclose()
        self._session, self.count = None, 0


class CodeInterpreter:
    """The contexts of all sandboxes."""

    def __init__(self, accounts: SandboxAccounts) -> None:
        self._accounts = accounts
        self._contexts: dict[str, dict[str, InterpreterContext]] = {}
        """By the id of the sandbox, then by their own."""

    async def aclose(self) -> None:
        """End all kernels."""
        with anyio.CancelScope(shield=True), suppress(AtollError):
            for contexts in self._contexts.values():
                for context in contexts.values():
                    await context.restart()
        self._contexts.clear()

    async def answer(self, request: Request, sandbox: Sandbox) -> Response:
        """Answer a request of this port.

        Raises:
            HTTPException: there is no such path or context, or the language is not supported.
        """
        path, method = request.scope["path"].rstrip("/"), request.method
        if path == "/execute" and method == "POST":
            return await self._execute(request, sandbox)
        if path == "/contexts" and method == "GET":
            return JSONResponse([each.shown() for each in (await self._of(sandbox)).values()])
        if path == "/contexts" and method == "POST":
            body = await read_body(request, ContextRequest)
            return JSONResponse((await self._create(sandbox, body)).shown(), 201)
        parts = path.split("/")
        if parts[:2] == ["", "contexts"] and len(parts) == 3 and method == "DELETE":
            contexts = await self._of(sandbox)
            context = self._find(contexts, parts[2])
            del contexts[context.id]
            await context.restart()
            return Response(status_code=204)
        if parts[:2] == ["", "contexts"] and len(parts) == 4 and parts[3] == "restart" and method == "POST":
            await self._find(await self._of(sandbox), parts[2]).restart()
            return Response(status_code=204)
        raise HTTPException(404, f"{method} {path[:256]} is not a path of the code interpreter")

    # ----------------------------------------------------------------------------------------------------- contexts

    async def _of(self, sandbox: Sandbox) -> dict[str, InterpreterContext]:
        """The contexts of a sandbox. Those of Python and JavaScript are there from the start."""
        found = self._contexts.get(sandbox.id)
        if found is None:
            home = await self._accounts.resolve(sandbox, "~", None)
            found = self._contexts.setdefault(sandbox.id, {})
            for language in _FROM_THE_START:
                id = _default_id(sandbox, language)
                found.setdefault(id, InterpreterContext(sandbox, id, language, home))
        return found

    async def forget_gone(self, sandboxes: Collection[str]) -> None:
        """Forget the contexts of all other sandboxes."""
        for id in [id for id in self._contexts if id not in sandboxes]:
            for context in self._contexts.pop(id).values():
                with suppress(AtollError):
                    await context.restart()

    async def _create(self, sandbox: Sandbox, body: ContextRequest) -> InterpreterContext:
        language = _language(body.language)
        contexts = await self._of(sandbox)
        if len(contexts) >= MAX_CONTEXTS:
            raise HTTPException(400, f"the sandbox has {MAX_CONTEXTS} contexts; remove one first")
        cwd = await self._accounts.resolve(sandbox, body.cwd or "~", None)
        context = InterpreterContext(sandbox, str(uuid.uuid4()), language, cwd)
        contexts[context.id] = context
        return context

    def _find(self, contexts: dict[str, InterpreterContext], id: str) -> InterpreterContext:
        if id not in contexts:
            raise HTTPException(404, f"Context {id[:64]} not found")
        return contexts[id]

    async def _chosen(self, sandbox: Sandbox, body: ExecuteRequest) -> InterpreterContext:
        if body.context_id and body.language:
            raise HTTPException(400, "Only one of context_id or language can be provided")
        contexts = await self._of(sandbox)
        if body.context_id:
            return self._find(contexts, body.context_id)
        language = _language(body.language)
        id = _default_id(sandbox, language)
        if id not in contexts:
            home = await self._accounts.resolve(sandbox, "~", None)
            contexts[id] = InterpreterContext(sandbox, id, language, home)
        return contexts[id]

    # ---------------------------------------------------------------------------------------------------- executions

    async def _execute(self, request: Request, sandbox: Sandbox) -> Response:
        body = await read_body(request, ExecuteRequest)
        context = await self._chosen(sandbox, body)
        session = await context.session()
        cut_off: Callable[[], None] = request.scope["extensions"][DISCONNECT]["now"]
        return StreamingResponse(self._lines(context, session, body, cut_off), media_type="application/x-ndjson")

    async def _lines(
        self, context: InterpreterContext, session: CodeSession, body: ExecuteRequest, cut_off: Callable[[], None]
    ) -> AsyncGenerator[bytes, None]:
        """What happens, a line each. When the reader leaves, the code is interrupted."""
        sender, receiver = anyio.create_memory_object_stream[Line](64)
        running = asyncio.create_task(_run(context, session, body, sender))
        try:
            while True:
                try:
                    with anyio.fail_after(KEEPALIVE_S):
                        line = await receiver.receive()
                except TimeoutError:
                    line = {"type": "keepalive"}
                except anyio.EndOfStream:
                    break
                if line is _SANDBOX_ENDED:
                    cut_off()
                    return
                yield json.dumps(line, separators=(",", ":")).encode() + b"\n"
        finally:
            running.cancel()
            receiver.close()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([running])


async def _run(
    context: InterpreterContext, session: CodeSession, body: ExecuteRequest, sender: MemoryObjectSendStream[Line]
) -> None:
    """Run code and tell what happens. A slow reader holds the code up."""
    decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")}
    shown: list[PartMessage] = []

    async def pass_on(name: StreamName, text: str) -> None:
        while shown:
            await sender.send(_result(shown.pop(0)))
        if text:
            await sender.send({"type": name, "text": text, "timestamp": datetime.now(UTC).isoformat()})

    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        async with sender:
            context.count += 1
            await sender.send({"type": "number_of_executions", "execution_count": context.count})
            try:
                async with _variables(session, KERNELS[context.language], body.env_vars):
                    outcome = await session.run(
                        body.code,
                        is_typescript=context.language == "typescript",
                        output_limit_bytes=_OUTPUT_KEPT_BYTES,
                        on_output=lambda name, data: pass_on(name, decoders[name].decode(data)),
                        on_part=shown.append,
                    )
            except (SandboxDied, SandboxNotFound):
                await sender.send(_SANDBOX_ENDED)
                return
            except AtollError as error:
                await sender.send({"type": "error", "name": "SandboxError", "value": error.message, "traceback": ""})
            else:
                if outcome.kernel_lost is not None and await _has_ended(context.sandbox, session):
                    await sender.send(_SANDBOX_ENDED)
                    return
                for name, decoder in decoders.items():
                    await pass_on(cast("StreamName", name), decoder.decode(b"", True))
                if (failed := _error(outcome)) is not None:
                    await sender.send(failed)
            await sender.send({"type": "end_of_execution"})


async def _has_ended(sandbox: Sandbox, session: CodeSession) -> bool:
    try:
        await sandbox.status()
    except (SandboxDied, SandboxNotFound):
        return True
    return session.is_cut_off


class _variables:  # noqa: N801 - a context, used as a function
    """Variables of one execution: set before it, and as they were after it."""

    def __init__(self, session: CodeSession, language: LanguageName, env: Mapping[str, str] | None) -> None:
        self._session = session
        self._set, self._unset = _VARIABLES[language](dict(env)) if env else ("", "")

    async def __aenter__(self) -> None:
        if self._set:
            await self._session.run(self._set)

    async def __aexit__(self, *_: object) -> None:
        if self._unset and self._session.is_alive:
            with anyio.CancelScope(shield=True), suppress(AtollError):
                await self._session.run(self._unset)


def _python_variables(env: dict[str, str]) -> tuple[str, str]:
    keep = f"e = {env!r}\nos.atoll_before = {{n: os.environ.get(n) for n in e}}\nos.environ.update(e)"
    undo = "for n, v in os.atoll_before.items():\n os.environ.pop(n, None) if v is None else os.environ.update({n: v})"
    return tuple(f"exec({'import os' + chr(10) + code!r}, {{}})" for code in (keep, undo))  # type: ignore[return-value]


def _javascript_variables(env: dict[str, str]) -> tuple[str, str]:
    given = json.dumps(env)
    keep = f"void (process.atollBefore = Object.fromEntries(Object.keys({given}).map(n => [n, process.env[n]])))"
    undo = "for (const [n, v] of Object.entries(process.atollBefore)) "
    undo += "{ if (v === undefined) delete process.env[n]; else process.env[n] = v }"
    return f"{keep}; void Object.assign(process.env, {given})", undo


def _bash_variables(env: dict[str, str]) -> tuple[str, str]:
    import shlex

    return "; ".join(f"export {n}={shlex.quote(v)}" for n, v in env.items()), "unset " + " ".join(env)


_VARIABLES = {"python": _python_variables, "javascript": _javascript_variables, "bash": _bash_variables}


# ---------------------------------------------------------------------------------------------------------- translation


def _language(name: str | None) -> str:
    wanted = _SHORT.get((name or "python").lower(), (name or "python").lower())
    if wanted not in KERNELS:
        raise HTTPException(501, f"the language {wanted[:64]!r} is not supported; {', '.join(KERNELS)} are")
    return wanted


def _default_id(sandbox: Sandbox, language: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"atoll:{sandbox.id}/{language}"))


def _result(part: PartMessage) -> Line:
    line: Line = {"type": "result", "is_main_result": part.role == "value"}
    extra = {}
    for kind, form in part.data.items():
        if kind == _CHART:
            line["chart"] = _chart(form)
        elif kind in _FIELDS:
            line[_FIELDS[kind]] = form
        else:
            extra[kind] = form
    text = line.get("text")
    if isinstance(text, str) and len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        line["text"] = text[1:-1]
    return line | ({"extra": extra} if extra else {})


def _chart(data: object) -> object:
    if not isinstance(data, dict):
        return None
    kind = _CHART_TYPES.get(str(data.get("type")), data.get("type"))
    elements = data.get("elements", [])
    if kind == "superchart" and isinstance(elements, list):
        elements = [_chart(each) for each in elements]
    return {**data, "type": kind, "elements": elements}


def _error(outcome: CellOutcome) -> Line | None:
    if outcome.error is None:
        return None
    error = outcome.error
    return {"type": "error", "name": error.type, "value": error.message, "traceback": error.traceback}
