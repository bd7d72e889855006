"""How tests wait: for a condition, with a bound, never for a fixed time."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

import anyio

SLOWNESS = float(os.environ.get("ATOLL_TEST_SLOWNESS") or "1")
"""How much slower than usual this machine is: bounds are that much longer. An emulated one needs 20 and more."""
BOUND_S = 20.0 * SLOWNESS
"""Far above what any condition takes, so that only one that never holds reaches it."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05

T = TypeVar("T")


@overload
async def eventually(condition: Callable[[], Awaitable[T]], what: str, *, bound_s: float = ...) -> T: ...
@overload
async def eventually(condition: Callable[[], T], what: str, *, bound_s: float = ...) -> T: ...
async def eventually(condition: Callable[[], Any], what: str, *, bound_s: float = BOUND_S) -> Any:
    """Return what `condition` returns as soon as that is true.

    Raises:
        AssertionError: it was never true within `bound_s`.
    """
    deadline = time.monotonic() + bound_s
    pause_s = _FIRST_PAUSE_S
    while True:
        answer = condition()
        value = await answer if inspect.isawaitable(answer) else answer
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"timed out after {bound_s:g} s: {what}; the last value was {value!r}")
        await anyio.sleep(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


def wait_until(condition: Callable[[], bool], what: str, bound_s: float = BOUND_S) -> None:
    """`eventually`, for synchronous tests.

    Raises:
        AssertionError: it was never true within `bound_s`.
    """
    deadline = time.monotonic() + bound_s
    pause_s = _FIRST_PAUSE_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"timed out after {bound_s:g} s: {what}")
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
