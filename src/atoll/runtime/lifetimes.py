"""How long an engine and what it gives live: values to await or to enter, and background tasks that any task may end.

Owns `AwaitableContext`, which `atoll.open()` and `Engine.create` return, and `BackgroundTasks`, in which an engine does
what outlives a call: serve connections, refill warm pools, recover. Not here: what those tasks do. Used by the whole of
`runtime/`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Self, TypeVar, TypeVarTuple, Unpack

import anyio
import anyio.abc

from atoll.contract.errors import InvalidRequest

T = TypeVar("T", bound=AbstractAsyncContextManager[Any, Any])
Arguments = TypeVarTuple("Arguments")


class AwaitableContext(Coroutine[Any, Any, T]):
    """A value that is being made: `await` gives it, `async with` gives it and ends it after the block.

    It is a coroutine too, so that `asyncio.create_task` and `TaskGroup.create_task` take it.
    """

    def __init__(self, making: Coroutine[Any, Any, T]) -> None:
        self._making = making
        self._made: T | None = None

    def __await__(self) -> Generator[Any, Any, T]:
        return self._making.__await__()

    def send(self, value: Any) -> Any:
        return self._making.send(value)

    def throw(self, *error: Any) -> Any:
        return self._making.throw(*error)

    def close(self) -> None:
        self._making.close()

    async def __aenter__(self) -> T:
        self._made = await self._making
        entered: T = await self._made.__aenter__()
        return entered

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self._made is None:
            return None
        swallowed: bool | None = await self._made.__aexit__(kind, error, trace)
        return swallowed


class BackgroundTasks:
    """Tasks that live until `close`. They run in a task group whose host is a task of its own.

    So the task that closes need not be the one that opened, as in two cells of a notebook or two fixtures of a test.
    The first task that fails cancels the others; `close` raises what it raised.
    """

    def __init__(self, group: anyio.abc.TaskGroup, host: asyncio.Task[None], closing: asyncio.Event) -> None:
        self._group = group
        self._host = host
        self._closing = closing

    @classmethod
    async def open(cls) -> Self:
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[anyio.abc.TaskGroup] = loop.create_future()
        closing = asyncio.Event()

        async def hold() -> None:
            async with anyio.create_task_group() as group:
                opened.set_result(group)
                await closing.wait()
                group.cancel_scope.cancel()

        host = loop.create_task(hold(), name="atoll engine")
        try:
            return cls(await asyncio.shield(opened), host, closing)
        except asyncio.CancelledError:
            host.cancel()
            raise

    def start_soon(
        self, function: Callable[[Unpack[Arguments]], Coroutine[Any, Any, object]], *arguments: *Arguments
    ) -> None:
        """Run a function in a task of its own.

        Raises:
            InvalidRequest: the engine is closed, or one of its tasks has failed.
        """
        self.require_open()
        self._group.start_soon(function, *arguments)

    async def start(self, function: Callable[..., Coroutine[Any, Any, object]], *arguments: object) -> None:
        """`start_soon`, and wait until the function has called `task_status.started()`.

        Raises:
            InvalidRequest: as `start_soon`.
            Whatever the function raises before it has started.
        """
        self.require_open()
        await self._group.start(function, *arguments)

    def require_open(self) -> None:
        """
        Raises:
            InvalidRequest: the engine is closed, or one of its tasks has failed.
        """
        if self._host.done() or self._closing.is_set():
            raise InvalidRequest("the engine is closed; open another with atoll.open()")

    async def close(self) -> None:
        """Cancel the tasks and wait for their end, also if the caller is cancelled. Closing twice does nothing.

        Raises:
            ExceptionGroup: tasks have failed.
        """
        again = self._closing.is_set()
        self._closing.set()
        cancelled: asyncio.CancelledError | None = None
        with anyio.CancelScope(shield=True):
            while not self._host.done():
                try:
                    await asyncio.wait([self._host])
                except asyncio.CancelledError as error:
                    cancelled = error
        if cancelled is not None:
            raise cancelled
        if not again and not self._host.cancelled() and (failure := self._host.exception()) is not None:
            raise failure
