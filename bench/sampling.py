"""Takes times on a noisy machine: contenders that are compared run interleaved, in one loop.

Noise that lasts longer than one turn affects all contenders alike, and the median removes shorter noise.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

Advance = Callable[[], None]


@dataclass(frozen=True)
class Contender:
    label: str
    take: Callable[[], Awaitable[float]]
    """Run once and return the seconds that it took. Untimed preparation and cleanup belong here too."""
    every: int = 1
    """1: in every round. N, for slow contenders: only in every Nth round."""


async def in_turns(contenders: Sequence[Contender], rounds: int, advance: Advance) -> dict[str, list[float]]:
    """Samples of all contenders, in rounds. Each round begins with a different contender."""
    samples: dict[str, list[float]] = {contender.label: [] for contender in contenders}
    for number in range(rounds):
        first = number % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            if number % contender.every == 0:
                samples[contender.label].append(await contender.take())
        advance()
    return samples


async def timed(awaitable: Awaitable[object]) -> float:
    start = time.perf_counter()
    await awaitable
    return time.perf_counter() - start


def program(command: Sequence[str] | Callable[[], Sequence[str]], **environment: str) -> Callable[[], Awaitable[float]]:
    """A program from start to end, as `subprocess.run` waits for it, for `Contender.take`."""

    async def take() -> float:
        argv = command() if callable(command) else command
        start = time.perf_counter()
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
            env=environment or None,
        )
        taken = time.perf_counter() - start
        if done.returncode != 0:
            raise RuntimeError(
                f"{argv[0]} failed with {done.returncode}: {done.stderr.decode(errors='replace')[-500:]}"
            )
        return taken

    return take


async def throughput(operation: Callable[[], Awaitable[object]], at_once: int, seconds: float) -> float:
    """How many operations end per second, with `at_once` of them in progress all the time."""
    ended = 0
    start = time.perf_counter()
    deadline = start + seconds

    async def work() -> None:
        nonlocal ended
        while time.perf_counter() < deadline:
            await operation()
            ended += 1

    async with anyio.create_task_group() as group:
        for _ in range(at_once):
            group.start_soon(work)
    return ended / (time.perf_counter() - start)


@asynccontextmanager
async def at_most(limit: int) -> AsyncIterator[Callable[[Callable[[], Awaitable[object]]], Awaitable[None]]]:
    """Starts operations, no more than `limit` at once. Leaving waits for all of them."""
    slots = anyio.Semaphore(limit)

    async def work(operation: Callable[[], Awaitable[object]]) -> None:
        try:
            await operation()
        finally:
            slots.release()

    async with anyio.create_task_group() as group:

        async def start(operation: Callable[[], Awaitable[object]]) -> None:
            await slots.acquire()
            group.start_soon(work, operation)

        yield start
