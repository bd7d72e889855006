"""Containers: code sessions that clients name, and executions in them that wait for the client.

Owns the table of containers: whose they are, how many there may be, when they end. Not here: executing
(`code/executor.py`), waiting for the client (`code/pausable.py`), and the blocks that clients see (`turn.py`). Used by
`turn.py` and `http.py`.

An id is 128 random bits, and is of use only to the client that made it: a container has an owner, which is a hash of
the key that its request came with. What belongs to another owner does not exist.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio

from atoll.code.executor import CodeConfig, CodeExecutor
from atoll.code.pausable import PausableExecution
from atoll.code.registry import ToolRegistry, identifiers
from atoll.code.results import ExecutionResult
from atoll.contract.errors import InvalidRequest, ToolCallError
from atoll.runtime.interface import Engine
from atoll.surfaces.messages.wire import ApiError, ClientTool

_MAX_REMEMBERED = 8
"""Executions of a container that have ended and can be asked for again, by a client that lost the answer."""
_log = logging.getLogger(__name__)


def owner_of(key: str) -> bytes:
    """The owner of what is made with this key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


# ---------------------------------------------------------------------------------------------------------- containers


class Container:
    """A code session with the tools of one client. One request at a time uses it."""

    def __init__(self, owner: bytes, executor: CodeExecutor, *, idle_s: float, call_timeout_s: float) -> None:
        self.id = f"container_{secrets.token_hex(16)}"
        self.owner = owner
        self.in_use = True
        self.executions: dict[str, PausableExecution] = {}
        """The last ones, by id; the last of them may be running."""
        self._executor = executor
        self._session_id: str | None = None
        self._tools: tuple[ClientTool, ...] | None = None
        self._idle_s = idle_s
        self._call_timeout_s = call_timeout_s
        self._used = time.monotonic()
        self.is_closed = False

    @property
    def expires_at(self) -> datetime:
        left_s = self._used + self._idle_s - time.monotonic()
        return datetime.now(UTC) + timedelta(seconds=left_s)

    @property
    def is_expired(self) -> bool:
        return not self.in_use and time.monotonic() > self._used + self._idle_s

    def touch(self) -> None:
        self._used = time.monotonic()

    def release(self) -> None:
        self.in_use = False
        self.touch()

    async def open(self, tools: tuple[ClientTool, ...]) -> None:
        await self.set_tools(tools)
        self._session_id = await self._executor.open_session()

    async def set_tools(self, tools: tuple[ClientTool, ...]) -> None:
        """Let code call these tools, and no others."""
        if tools == self._tools:
            return
        for old in list(self._executor.registry):
            self._executor.registry.remove(old.name)
        declare(self._executor.registry, tools, self)
        self._tools = tools
        if self._session_id is not None:
            await self._executor.refresh_tools(self._session_id)

    async def start(self, id: str, code: str) -> PausableExecution:
        """Run code. An execution that has not ended is interrupted first."""
        await self.interrupt()
        while len(self.executions) >= _MAX_REMEMBERED:
            self.executions.pop(next(iter(self.executions)))
        execution = self.executions[id] = PausableExecution(id, self.execute(code))
        return execution

    async def interrupt(self) -> None:
        """Interrupt the execution that has not ended, if there is one."""
        for execution in self.executions.values():
            await execution.cancel()

    async def execute(self, code: str) -> ExecutionResult:
        result, _ = await self._executor.execute(code, self._session_id)
        return result

    async def call(self, tool: ClientTool, arguments: Mapping[str, Any]) -> str:
        running = next(reversed(self.executions.values()), None)
        if running is None:
            raise ToolCallError("NotAllowed", "no code runs now that could call tools")
        text: str = await running.call(tool.name, arguments, self._call_timeout_s)
        return text

    async def aclose(self) -> None:
        """End it, with the code that waits in it."""
        self.is_closed = True
        with anyio.CancelScope(shield=True):
            for execution in self.executions.values():
                execution.give_up()
            await self._executor.aclose()
            await self.interrupt()


def declare(registry: ToolRegistry, tools: Sequence[ClientTool], container: Container | None = None) -> None:
    """Put the tools that code may call into a registry. Without a container they cannot be called, only described."""
    by_code = [tool for tool in tools if tool.by_code]
    names = identifiers([tool.name for tool in by_code])

    def running(tool: ClientTool) -> Any:
        async def run(arguments: Mapping[str, Any]) -> object:
            if container is None:
                raise ToolCallError("NotAllowed", "there is no container")
            return await container.call(tool, arguments)

        return run

    for tool in by_code:
        registry.declare(
            names[tool.name],
            tool.input_schema,
            running(tool),
            description=tool.description,
            original_name=tool.name,
            is_timed=False,
        )


class Containers:
    """All containers of an app."""

    def __init__(
        self,
        engine: Engine,
        config: CodeConfig,
        *,
        idle_s: float,
        call_timeout_s: float,
        limit: int,
        limit_per_owner: int,
    ) -> None:
        if config.language != "python":
            raise InvalidRequest(f"the language is {config.language}; hosted clients expect python")
        self._engine = engine
        self.config = config.model_copy(
            update={
                "anthropic_compatible": True,
                "ephemeral": True,
                "enable_session_reuse": True,
                "prepared_sessions": 0,
                "max_concurrent_calls": config.max_calls,  # all that wait are told to the client at once
            }
        )
        self._idle_s = idle_s
        self._call_timeout_s = call_timeout_s
        self._limit = limit
        self._limit_per_owner = limit_per_owner
        self._containers: dict[str, Container] = {}

    def __len__(self) -> int:
        return len(self._containers)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """End what expires, within this context. All containers have ended when it is left."""
        sweeper = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                sweeper.cancel()
                await asyncio.wait([sweeper])
                await self._close(list(self._containers.values()))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(10.0, self._idle_s / 4))
            await self._close([each for each in self._containers.values() if each.is_expired])

    async def _close(self, containers: Sequence[Container]) -> None:
        for container in containers:
            self._containers.pop(container.id, None)
        ended = await asyncio.gather(*(each.aclose() for each in containers), return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException):
                _log.error("ending a container failed", exc_info=error)

    async def take(self, id: str, owner: bytes) -> Container:
        """The container of this id, for one request. `release` gives it back.

        Raises:
            ApiError: the owner has none of this id, or another request uses it.
        """
        container = self._containers.get(id)
        if container is not None and container.is_expired:
            await self._close([container])
            container = None
        if container is None or container.owner != owner:
            raise ApiError(
                404,
                f"the container {id[:80]!r} does not exist: it has expired, or was never made; leave `container` out",
            )
        if container.in_use:
            raise ApiError(409, "another request uses this container; wait for its answer")
        container.in_use = True
        return container

    async def make(self, owner: bytes, tools: tuple[ClientTool, ...]) -> Container | None:
        """A new container, taken for the request that needs it. None: there are too many.

        Raises:
            SandboxError, CallerError: it could not be made.
        """
        own = sum(each.owner == owner for each in self._containers.values())
        if len(self._containers) >= self._limit or own >= self._limit_per_owner:
            return None
        executor = CodeExecutor(ToolRegistry(), self.config, engine=self._engine)
        container = Container(owner, executor, idle_s=self._idle_s, call_timeout_s=self._call_timeout_s)
        self._containers[container.id] = container
        try:
            await container.open(tools)
        except BaseException:
            await self.discard(container)
            raise
        return container

    async def discard(self, container: Container) -> None:
        """End a container."""
        with anyio.CancelScope(shield=True):
            await self._close([container])
