"""Code that waits for calls which a client makes.

Owns an execution that runs in a task of its own: its calls of the client's tools wait here until a later request brings
their results, and a client that is gone can ask for it again. Not here: executing (`executor.py`), and what clients see
of it (the surfaces). Used by `surfaces/messages/` and `surfaces/rest/`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import pydantic_core

from atoll.code.results import ExecutionResult
from atoll.contract.errors import SandboxError, ToolCallError

SETTLE_S = 0.02
"""Code that has made calls and no further one for so long counts as waiting. Calls that come later are told next."""
_MAX_SETTLE_S = 0.5
_MAX_PENDING_BYTES = 16 * 1024 * 1024
"""The arguments of calls that wait, together: they are all in one answer."""


@dataclass(eq=False)
class ClientCall:
    """A call by code that the client has to make."""

    id: str
    tool: str
    """As the client named it."""
    input: Mapping[str, Any]
    size_bytes: int
    answer: asyncio.Future[Any] = field(repr=False)


class PausableExecution:
    """Code that runs, waits for the client, or has ended. `running` is what runs it."""

    CALL_PREFIX = "toolu_"
    """Of the ids of calls."""

    def __init__(self, id: str, running: Coroutine[Any, Any, ExecutionResult]) -> None:
        self.id = id
        self.later: list[tuple[str, str]] = []
        """Code of the same answer of the model that runs after it: ids and texts."""
        self._calls: dict[str, ClientCall] = {}
        """Calls that wait."""
        self._known: set[str] = set()
        """All calls that it has made."""
        self._changed = asyncio.Event()
        self._made_at = 0.0
        self._task = asyncio.create_task(running)
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[ExecutionResult]) -> None:
        if not task.cancelled():
            task.exception()  # seen, though the client may never ask
        for call in self._calls.values():  # of tasks that the code did not wait for
            if not call.answer.done():
                call.answer.set_exception(ToolCallError("NotAwaited", "the code ended before this call was answered"))
        self._changed.set()

    @property
    def has_ended(self) -> bool:
        return self._task.done()

    @property
    def was_interrupted(self) -> bool:
        return self._task.cancelled()

    async def call(self, tool: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        """Have the client make a call, and wait for its result.

        Raises:
            ToolCallError: the client said that it failed, or did not answer in time.
        """
        if self.has_ended:
            raise ToolCallError("NotAllowed", "no code runs now that could call tools")
        size = len(pydantic_core.to_json(arguments))
        if size + sum(call.size_bytes for call in self._calls.values()) > _MAX_PENDING_BYTES:
            raise ToolCallError(
                "ArgumentsTooLarge",
                f"the arguments of calls that wait may take {_MAX_PENDING_BYTES} bytes together; make fewer at a time",
            )
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        call = ClientCall(f"{self.CALL_PREFIX}{secrets.token_hex(12)}", tool, arguments, size, future)
        self._calls[call.id] = call
        self._known.add(call.id)
        self.begin_waiting()
        try:
            await self.announce(call)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise ToolCallError("TimeoutError", f"{tool} was not answered within {timeout_s:g} s") from None
        finally:
            self._calls.pop(call.id, None)
            self._changed.set()

    async def announce(self, call: ClientCall) -> None:
        """Tell the client of a call, if it listens. For surfaces that have such clients."""

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for the client."""
        return bool(self._calls)

    def begin_waiting(self) -> None:
        """Something else waits, from now on."""
        self._made_at = time.monotonic()
        self._changed.set()

    def has_made(self, id: str) -> bool:
        """Whether this is one of its calls, answered or not."""
        return id in self._known

    def answer(self, id: str, value: Any) -> None:
        """Give a call its result. Does nothing if it has one, or was given up."""
        call = self._calls.pop(id, None)
        if call is not None and not call.answer.done():
            call.answer.set_result(value)

    def fail(self, id: str, message: str) -> None:
        """Let a call fail. Does nothing if it has a result, or was given up."""
        call = self._calls.pop(id, None)
        if call is not None and not call.answer.done():
            call.answer.set_exception(ToolCallError("ToolError", message or f"{call.tool} failed"))

    @property
    def waiting(self) -> list[ClientCall]:
        """The calls that wait now."""
        return list(self._calls.values())

    async def settled(self) -> list[ClientCall]:
        """Wait until it can go no further: the calls that it waits for. None: it has ended."""
        began: float | None = None
        while not self.has_ended:
            self._changed.clear()
            if self.is_waiting:
                now = time.monotonic()
                began = now if began is None else began
                left_s = min(self._made_at + SETTLE_S, began + _MAX_SETTLE_S) - now
                if left_s <= 0:
                    return list(self._calls.values())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._changed.wait()
            else:
                began = None
                await self._changed.wait()
        return []

    async def result(self) -> ExecutionResult:
        """The result of an execution that has ended.

        Raises:
            AtollError: it could not be run, or was interrupted.
        """
        if self.was_interrupted:
            raise SandboxError("the code was interrupted")
        return await asyncio.shield(self._task)

    async def ended(self) -> None:
        """Wait until it has ended, however."""
        await asyncio.wait([self._task])

    async def cancel(self) -> None:
        """Interrupt it, if it has not ended. Variables of the session stay."""
        if not self._task.done():
            self.give_up()
            await asyncio.wait([self._task])

    def give_up(self) -> None:
        """Begin to interrupt it."""
        self._task.cancel()
