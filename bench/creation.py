"""From creation to the first command: sequential, and many at once."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

import anyio

import atoll
from atoll.contract.model import RuntimeName
from bench.baselines import HOST, Baseline, Baselines
from bench.lab import Lab
from bench.results import Row, Section, Spread, Table, Target, Value, times
from bench.sampling import Contender, in_turns, program

HOW = """\
A new sandbox from the image `host`, with the default limits, until its first command (`true`) has answered;
destroying it is not timed. The sequential figures are interleaved with the baselines, each of which starts `true`
once and removes everything again. The image was prepared before; the very first sandbox of a state directory is
reported separately. In a burst, one process requests all sandboxes at the same moment, and each time counts from
that moment."""


async def measure(lab: Lab) -> Section:
    first = await _first(lab)
    with Baselines(lab.scratch / "baselines") as baselines:
        table, target = await _sequential(lab, baselines)
        bursts = await _bursts(lab, baselines)
    alone = Table(
        title="The first sandbox of a new state directory",
        columns=("", "once"),
        rows=(
            Row(
                label=f"{lab.fastest}, including the preparation of the image `host`",
                cells=(Value(number=first, unit="s"),),
            ),
        ),
    )
    return Section(
        subject="create",
        title="Create → first command",
        how=HOW,
        tables=(table, bursts, alone),
        targets=(target,) if target else (),
    )


async def _first(lab: Lab) -> float:
    start = time.perf_counter()
    async with lab.sandbox():
        return time.perf_counter() - start


async def _once(lab: Lab, runtime: RuntimeName) -> float:
    start = time.perf_counter()
    sandbox = await lab.create(runtime)
    try:
        await sandbox.exec(["true"])
        return time.perf_counter() - start
    finally:
        await lab.destroy([sandbox])


async def _sequential(lab: Lab, baselines: Baselines) -> tuple[Table, Target | None]:
    contenders = [
        Contender(baseline.label, program(baseline.command), every=5 if baseline.slow else 1)
        for baseline in baselines.all
    ]
    contenders += [
        Contender(f"Atoll, {runtime}", partial(_once, lab, runtime), every=5 if runtime == "runsc" else 1)
        for runtime in lab.runtimes
    ]
    if baselines.docker is not None:
        contenders.append(Contender("Docker over HTTP", baselines.docker.take_create, every=5))
    rounds = lab.amount(60, 10)
    with lab.progress("create → first command, interleaved", rounds) as advance:
        samples = await in_turns(contenders, rounds, advance)
    absent = "; ".join(f"{missing.label}: {missing.reason}" for missing in baselines.absent)
    table = times("One after another", samples, against=HOST, note=absent or None)
    ours = samples.get("Atoll, crun")
    if not ours:
        return table, None
    return table, Target(
        what="create → first command with crun, median",
        bound=Value(number=0.025, unit="s"),
        at_most=True,
        measured=Value(number=Spread.of(ours).median, unit="s"),
    )


async def _bursts(lab: Lab, baselines: Baselines) -> Table:
    rows = []
    failures: Counter[str] = Counter()
    for baseline in baselines.all:
        if not baseline.slow:
            started = partial(_started, baseline, failures)
            rows.append(await _burst(lab, baseline.label, lab.amount(100, 20), started))
    for runtime in lab.runtimes:
        made: list[atoll.Sandbox] = []

        async def answered(runtime: RuntimeName = runtime, made: list[atoll.Sandbox] = made) -> None:
            sandbox = await lab.create(runtime)
            made.append(sandbox)
            await sandbox.exec(["true"])

        count = lab.amount(20, 4) if runtime == "runsc" else lab.amount(100, 20)
        try:
            rows.append(await _burst(lab, f"Atoll, {runtime}", count, answered))
        finally:
            await lab.destroy(made)
    return Table(
        title="All at once",
        columns=("", "at once", "median", "p99", "all answered", "per second"),
        rows=tuple(rows),
        note="; ".join(f"{label}: {count} failed" for label, count in failures.items()) or None,
    )


async def _started(baseline: Baseline, failures: Counter[str]) -> None:
    """Start a baseline once. A baseline may fail in a burst; a sandbox that fails fails the run."""
    done = await anyio.run_process(baseline.command(), stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        failures[baseline.label] += 1


async def _burst(lab: Lab, label: str, count: int, operation: Callable[[], Awaitable[object]]) -> Row:
    taken: list[float] = []

    async def one() -> None:
        await operation()
        taken.append(time.perf_counter() - start)
        advance()

    with lab.progress(f"{count} at once: {label}", count) as advance:
        start = time.perf_counter()
        async with anyio.create_task_group() as group:
            for _ in range(count):
                group.start_soon(one)
        total = time.perf_counter() - start
    spread = Spread.of(taken)
    return Row(
        label=label,
        cells=(
            Value(number=count),
            Value(number=spread.median, unit="s"),
            Value(number=spread.p99, unit="s"),
            Value(number=total, unit="s"),
            Value(number=count / total, unit="1/s"),
        ),
    )
