"""The blocking face as the suite's tests use an engine: `await` calls it in a thread.

So one suite tests both faces: with `--atoll-face sync`, the fixtures of `plugin.py` give an engine of `atoll.sync` with
this around it. Not here: the blocking face itself (`atoll/sync.py`), which this undoes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import anyio.to_thread

from atoll.runtime.lifetimes import AwaitableContext
from atoll.sync import Blocking


class Unblocking:
    """An object of the blocking face whose methods are awaited."""

    def __init__(self, blocking: Any) -> None:
        self._blocking = blocking

    def __getattr__(self, name: str) -> Any:
        asynchronous = getattr(self._blocking._wrapped, name)
        value = getattr(self._blocking, "close" if name == "aclose" else name)
        if not inspect.isroutine(asynchronous):
            return _unblocked(value)

        def call(*arguments: Any, **named: Any) -> Any:
            given = {key: _blocked(each) for key, each in named.items()}
            blocking = partial(value, *map(_blocked, arguments), **given)
            return _Call(_in_thread(blocking)) if _is_awaited(asynchronous) else _unblocked(blocking())

        return call

    async def __aenter__(self) -> Any:
        entered = await anyio.to_thread.run_sync(self._blocking.__enter__)
        return self if entered is self._blocking else _unblocked(entered)

    async def __aexit__(self, *error: Any) -> bool | None:
        swallowed: bool | None = await anyio.to_thread.run_sync(self._blocking.__exit__, *error)
        return swallowed

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        end = object()
        value = await anyio.to_thread.run_sync(next, self._blocking, end)
        if value is end:
            raise StopAsyncIteration
        return _unblocked(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unblocking) and self._blocking == other._blocking

    def __hash__(self) -> int:
        return hash(self._blocking)

    def __repr__(self) -> str:
        return f"Unblocking({self._blocking!r})"


class _Call(AwaitableContext[Any]):
    """A call that is awaited, entered or iterated over."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self._made is None:
            self._made = await self
        return await self._made.__anext__()

    async def aclose(self) -> None:
        if self._made is not None:
            await anyio.to_thread.run_sync(self._made._blocking.close)


async def _in_thread(blocking: Callable[[], Any]) -> Any:
    return _unblocked(await anyio.to_thread.run_sync(blocking))


def _is_awaited(function: Any) -> bool:
    original = inspect.unwrap(function)
    returned = str(getattr(original, "__annotations__", {}).get("return", ""))
    return (
        inspect.iscoroutinefunction(original)
        or inspect.isasyncgenfunction(original)
        or returned.startswith(("AwaitableContext", "AbstractAsync", "AsyncIterator"))
    )


def _unblocked(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_unblocked(each) for each in value)
    return Unblocking(value) if isinstance(value, Blocking) else value


def _blocked(value: Any) -> Any:
    return value._blocking if isinstance(value, Unblocking) else value
