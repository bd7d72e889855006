"""From claiming a warm sandbox to its first command, compared with creating one."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from functools import partial

import anyio

import atoll
from atoll.contract.model import RuntimeName
from bench.lab import Lab
from bench.results import Section, Spread, Target, Value, times
from bench.sampling import Contender, in_turns

HOW = """\
A create until its first command (`true`) has answered: of a sandbox that is claimed from a warm pool, interleaved
with one that has to be created, because its limit on open files is different. Before each, the pool is full again
and no refill is in progress; destroying is not timed."""

POOL_SIZE = 2
OTHER = atoll.Limits(open_files=1000)


async def measure(lab: Lab) -> Section:
    contenders = []
    async with AsyncExitStack() as stack:
        for runtime in lab.runtimes:
            await lab.engine.warm(POOL_SIZE, runtime=runtime)
            stack.push_async_callback(lab.engine.warm, 0, runtime=runtime)
            every = 5 if runtime == "runsc" else 1
            contenders += [
                Contender(f"created, {runtime}", partial(_once, lab, runtime, OTHER), every=every),
                Contender(f"claimed, {runtime}", partial(_once, lab, runtime, None), every=every),
            ]
        rounds = lab.amount(100, 10)
        with lab.progress("created and claimed, interleaved", rounds) as advance:
            samples = await in_turns(contenders, rounds, advance)
    targets = []
    if claimed := samples.get("claimed, crun"):
        median = Value(number=Spread.of(claimed).median, unit="s")
        what = "warm sandbox → first command with crun, median"
        targets.append(Target(what=what, bound=Value(number=0.0025, unit="s"), at_most=True, measured=median))
    tables = [
        times(
            f"With {runtime}",
            {name: samples[name] for name in (f"created, {runtime}", f"claimed, {runtime}")},
            against=f"created, {runtime}",
        )
        for runtime in lab.runtimes
    ]
    return Section(
        subject="warm",
        title="Warm sandbox → first command",
        how=HOW,
        tables=tuple(tables),
        targets=tuple(targets),
    )


async def _once(lab: Lab, runtime: RuntimeName, limits: atoll.Limits | None) -> float:
    await _full(lab)
    start = time.perf_counter()
    sandbox = await lab.engine.create(runtime=runtime, limits=limits)
    try:
        await sandbox.exec(["true"])
        return time.perf_counter() - start
    finally:
        await lab.destroy([sandbox])


async def _full(lab: Lab) -> None:
    while any(warm_pool.ready < warm_pool.count for warm_pool in await lab.engine.warm_pools()):
        await anyio.sleep(0.01)
