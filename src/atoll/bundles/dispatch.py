"""The dispatcher of a workspace as the host sees it: start it, make calls, and believe nothing that it says.

Owns the process inside, which answer belongs to which call, the time limit that holds even if the dispatcher does not
keep it, and what its output is passed on to. Not here: how a call is made (`inside/dispatcher.py`), what a model sees
of a result (`results.py`), and when a dispatcher is started (`workspace.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any, cast

import anyio
import pydantic_core

from atoll.bundles.manifest import ManifestTool
from atoll.bundles.results import read_result
from atoll.code.messages import MAX_ARGUMENTS_BYTES, ChannelViolation, count_values, encode
from atoll.contract.errors import AtollError, BundleFailed, SandboxError
from atoll.contract.model import Exited, Output
from atoll.runtime.guest.process import Process
from atoll.runtime.guest.stream import ProcessChannel
from atoll.runtime.sandbox import Sandbox
from atoll.tools.tool import ToolResult, failure, readable

BUNDLE_DIRECTORY = "/home/user/bundle"
"""Where the files of a bundle are inside, with what was installed for it. The home of the user can be written to in
every image."""
WORKSPACE = "/workspace"
MAX_RESULT_BYTES = 8 * 1024 * 1024
"""Of one call, as JSON."""
MAX_LINE_BYTES = MAX_RESULT_BYTES + 64 * 1024
MAX_CALLS = 32
"""At the same time in one workspace. Others wait."""
START_S = 60.0
"""How long importing all tools may take."""
GRACE_S = 10.0
"""How long the dispatcher may take to end a call whose time is over, before it is killed itself."""
_MAX_VALUES = 10_000
"""Values of one message: a result has few, and its content is text."""
_MAX_TEXT_CHARS = 16 * 1024

_PROGRAM = (
    "#atoll-dispatcher\n"
    "import os,sys,marshal\n"
    "def r(n):\n"
    " b=b''\n"
    " while len(b)<n:\n"
    "  d=os.read(3,n-len(b))\n"
    "  if not d:sys.exit(0)\n"
    "  b+=d\n"
    " return b\n"
    "m=sys.modules.get('_frozen_importlib_external')\n"
    "m=getattr(m,'MAGIC_NUMBER',b'')\n"
    "x=r(4)==m\n"
    "t,c=(r(int(r(8)))for _ in'tc')\n"
    "g={'__name__':'atoll_dispatcher'}\n"
    "exec(marshal.loads(c)if x else compile(t,'<atoll dispatcher>','exec'),g)\n"
    "g['main'](b'')\n"
)
"""Reads the dispatcher from its channel: as an argument it would be in every list of processes. It comes as text, which
any interpreter can compile, and compiled, for one with the bytecode of this one, where that saves 6 ms."""

OnToolOutput = Callable[[bytes], None]
"""Receives what tools print."""


class Dispatcher:
    """A dispatcher that runs. Get one from `start`; it ends with `aclose`, or with the connection to its sandbox."""

    def __init__(self, process: Process, on_output: OnToolOutput) -> None:
        self._process = process
        self._channel = cast("ProcessChannel", process.channel(0))
        self._on_output = on_output
        self._buffer = bytearray()
        self._nonce = secrets.token_hex(16)
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._lost: asyncio.Future[str] = loop.create_future()
        self._answers: dict[int, asyncio.Future[ToolResult]] = {}
        self._calls = 0
        self._sending = anyio.Lock()
        self._slots = anyio.Semaphore(MAX_CALLS)
        self._reading = asyncio.create_task(self._read_output())
        self._channel.listen(self._hear)

    @classmethod
    async def start(
        cls, sandbox: Sandbox, tools: Sequence[ManifestTool], *, python: str, on_output: OnToolOutput
    ) -> Dispatcher:
        """Start a dispatcher that has imported all tools. If this fails or is cancelled, none runs.

        Raises:
            BundleFailed: `bundle_entrypoint_invalid`; a module cannot be imported. The message ends with the traceback.
            SandboxError: it did not start.
        """
        command = (python, "-c", _PROGRAM)
        process = await sandbox.spawn(command, cwd=WORKSPACE, channels=1, keep=False)
        dispatcher = cls(process, on_output)
        try:
            await dispatcher._greet(tools)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await dispatcher.aclose()
            raise
        return dispatcher

    @property
    def is_alive(self) -> bool:
        return not self._lost.done()

    @property
    def is_busy(self) -> bool:
        return bool(self._answers)

    async def _greet(self, tools: Sequence[ManifestTool]) -> None:
        hello = {
            "t": "hello",
            "nonce": self._nonce,
            "root": BUNDLE_DIRECTORY,
            "cwd": WORKSPACE,
            "env": {
                "NODE_PATH": f"{BUNDLE_DIRECTORY}/node/lib/node_modules",
                "VIRTUAL_ENV": f"{BUNDLE_DIRECTORY}/venv",
            },
            "path": [f"{BUNDLE_DIRECTORY}/venv/bin", f"{BUNDLE_DIRECTORY}/node/bin"],
            "tools": [{"name": tool.name, "entrypoint": tool.entrypoint} for tool in tools],
            "result_bytes": MAX_RESULT_BYTES,
        }
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self._channel.send(_source() + encode(hello))
        await self._first(self._ready, START_S)
        if self._lost.done():
            why = self._lost.result()
            raise SandboxError(f"the dispatcher of the tools did not start: {why}{_hint(why)}")
        if not self._ready.done():
            raise BundleFailed("bundle_entrypoint_invalid", f"the tools could not be imported within {START_S:g} s")
        errors = _errors(self._ready.result())
        if errors:
            raise BundleFailed("bundle_entrypoint_invalid", "\n".join(errors[:3]))

    async def call(self, tool: str, arguments: Mapping[str, Any], timeout_s: float) -> ToolResult:
        """Make a call. What goes wrong in it is its result. If this is cancelled, the call is killed inside.

        Raises:
            SandboxError: the sandbox is gone.
        """
        try:
            encoded = pydantic_core.to_json(dict(arguments))
        except (ValueError, pydantic_core.PydanticSerializationError) as error:
            return failure(f"the arguments of {tool} cannot be sent as JSON: {error}", "invalid_request")
        if len(encoded) > MAX_ARGUMENTS_BYTES:
            return failure(
                f"the arguments of {tool} take {len(encoded)} bytes; they may take {MAX_ARGUMENTS_BYTES}",
                "invalid_request",
            )
        async with self._slots:
            self._calls += 1
            number = self._calls
            answer: asyncio.Future[ToolResult] = asyncio.get_running_loop().create_future()
            self._answers[number] = answer
            try:
                await self._send(
                    b'{"t":"call","call":%d,"tool":%b,"timeout_s":%b,"args":%b}\n'
                    % (number, pydantic_core.to_json(tool), pydantic_core.to_json(timeout_s), encoded)
                )
                waited_s = START_S + timeout_s + GRACE_S  # an edited module is imported first
                await self._first(answer, waited_s)
                if answer.done():
                    return answer.result()
                if not self._lost.done():
                    self._lose("it did not end a call whose time was over")
                    await self._kill()
                    return failure(f"{tool} did not end within {timeout_s:g} s, and was killed", "timeout")
            except asyncio.CancelledError:
                with anyio.move_on_after(GRACE_S, shield=True):
                    await self._send(encode({"t": "cancel", "call": number}))
                raise
            finally:
                del self._answers[number]
        return failure(
            f"{tool} was interrupted: the process that makes the calls of the workspace ended ({self._lost.result()})",
            "crashed",
            retryable=True,
        )

    async def aclose(self) -> None:
        """End it with all that tools have started. Does not raise."""
        self._lose("it was ended")
        await self._kill()
        self._reading.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _first(self, awaited: asyncio.Future[Any], timeout_s: float) -> None:
        """Wait until it is done, the dispatcher is gone, or the time is over."""
        both: list[asyncio.Future[Any]] = [awaited, self._lost]
        await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    async def _kill(self) -> None:
        with contextlib.suppress(AtollError, anyio.ClosedResourceError):
            await self._process.kill()

    async def _send(self, message: bytes) -> None:
        async with self._sending:
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await self._channel.send(message)

    # ---- what comes from inside ----

    def _hear(self, data: bytes) -> None:
        """Take what the dispatcher has sent. The connection calls it: it raises nothing."""
        if self._lost.done():
            return
        try:
            *lines, rest = data.split(b"\n")
            for line in lines:
                self._buffer += line
                self._take(bytes(self._buffer))
                self._buffer.clear()
            self._buffer += rest
            _check_length(self._buffer)
        except ChannelViolation as error:
            self._lose(f"a tool damaged its channel to the host: {error}")
            self._ending = asyncio.create_task(self._kill())

    _ending: asyncio.Task[None] | None = None

    def _take(self, line: bytes) -> None:
        _check_length(line)
        if count_values(line, _MAX_VALUES) > _MAX_VALUES:
            raise ChannelViolation(f"a message has more than {_MAX_VALUES} values")
        try:
            message = pydantic_core.from_json(line, allow_inf_nan=False)
        except ValueError as error:
            raise ChannelViolation(f"a line is no JSON: {error}") from None
        if not isinstance(message, dict):
            raise ChannelViolation("a line is no JSON object")
        kind = message.get("t")
        if kind == "ready":
            if message.get("nonce") == self._nonce and not self._ready.done():
                self._ready.set_result(message)
            return
        number = message.get("call")
        if kind not in {"done", "failed"} or not isinstance(number, int):
            raise ChannelViolation("a message is of an unknown kind")
        answer = self._answers.get(number)
        if answer is not None and not answer.done():
            answer.set_result(read_result(message) if kind == "done" else _failure(message))

    async def _read_output(self) -> None:
        try:
            async for event in self._process:
                if isinstance(event, Output):
                    self._on_output(event.data)
                elif isinstance(event, Exited):
                    memory = "the workspace used up its memory" if event.out_of_memory else None
                    self._lose(memory or f"it ended with exit code {event.exit_code}")
        except (SandboxError, anyio.ClosedResourceError) as error:
            self._lose(f"the sandbox is gone: {error}")

    def _lose(self, why: str) -> None:
        if not self._lost.done():
            self._lost.set_result(why)


def _hint(why: str) -> str:
    if why != "it ended with exit code 127":
        return ""
    return "; the image has no python3 on its PATH, or a variable or secret of the config has replaced PATH"


def _check_length(line: bytes | bytearray) -> None:
    if len(line) > MAX_LINE_BYTES:
        raise ChannelViolation(f"a message is longer than {MAX_LINE_BYTES} bytes")


_KINDS = {
    "import": "cannot be used",
    "arguments": "does not take these arguments",
    "shape": "returned what is no result",
    "raised": "raised an error",
    "too_large": "returned too much",
    "timeout": "took too long",
    "crashed": "crashed",
    "unknown": "is not in the bundle",
}
"""The kinds of failures that a dispatcher tells, in words that follow the tool."""


def _failure(message: dict[str, Any]) -> ToolResult:
    kind, text = message.get("kind"), message.get("message")
    if kind not in _KINDS or not isinstance(text, str):
        raise ChannelViolation("a failure is of an unknown kind")
    return failure(f"the tool {_KINDS[kind]}: {readable(text[:_MAX_TEXT_CHARS])}", kind)


def _errors(ready: dict[str, Any]) -> list[str]:
    errors = ready.get("errors")
    if not isinstance(errors, list):
        raise SandboxError("the dispatcher of the tools sent what is no message")
    found = []
    for each in errors[:100]:
        tool, message = (each.get("tool"), each.get("message")) if isinstance(each, dict) else (None, None)
        if isinstance(tool, str) and isinstance(message, str):
            tail = readable(message[-_MAX_TEXT_CHARS // 4 :]).strip()
            found.append(f"the module of the tool {readable(tool[:64])} cannot be imported:\n{tail}")
    return found


@cache
def _source() -> bytes:
    text = Path(__file__).with_name("inside").joinpath("dispatcher.py").read_bytes()
    compiled = marshal.dumps(compile(text, "<atoll dispatcher>", "exec", dont_inherit=True, optimize=0))
    return b"%b%8d%b%8d%b" % (MAGIC_NUMBER, len(text), text, len(compiled), compiled)
