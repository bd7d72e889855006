"""From creation to the first command: sequential, and many at once."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial

import anyio

import atoll
from atoll.contract.model import RuntimeName
from bench.baselines import HOST, Baseline, Baselines
from bench.lab import Lab
from bench.results import Row, Section, Spread, Table, Target, Value, ratio, times
from bench.sampling import Contender, in_turns, program, timed

HOW = """\
A new sandbox from the image `host`, with the default limits, until its first command (`true`) has answered;
destroying it is timed by itself, until nothing of it is left. The sequential figures are interleaved with the
baselines, each of which starts `true` once and removes everything again. The image was prepared before; the very
first sandbox of a state directory is reported separately. In a burst, one process requests all sandboxes at the
same moment, and each time counts from that moment."""


async def measure(lab: Lab) -> Section:
    first = await _first(lab)
    with Baselines(lab.scratch / "baselines") as baselines:
        tables, targets = await _sequential(lab, baselines)
        bursts, taken = await _bursts(lab, baselines)
    if "Atoll, crun" in taken and not lab.quick:
        targets.append(
            Target(
                what="a burst of 100 creates with crun, until all have answered",
                bound=Value(number=0.7, unit="s"),
                at_most=True,
                measured=Value(number=taken["Atoll, crun"], unit="s"),
            )
        )
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
        tables=(*tables, bursts, alone),
        targets=tuple(targets),
    )


async def _first(lab: Lab) -> float:
    start = time.perf_counter()
    async with lab.sandbox():
        return time.perf_counter() - start


async def _once(lab: Lab, runtime: RuntimeName, destroyed: list[float]) -> float:
    start = time.perf_counter()
    sandbox = await lab.create(runtime)
    try:
        await sandbox.exec(["true"])
        return time.perf_counter() - start
    finally:
        destroyed.append(await timed(lab.destroy([sandbox])))


async def _sequential(lab: Lab, baselines: Baselines) -> tuple[list[Table], list[Target]]:
    destroyed: dict[str, list[float]] = {f"Atoll, {runtime}": [] for runtime in lab.runtimes}
    contenders = [
        Contender(baseline.label, program(baseline.command), every=5 if baseline.slow else 1)
        for baseline in baselines.all
    ]
    contenders += [
        Contender(label, partial(_once, lab, runtime, destroyed[label]), every=5 if runtime == "runsc" else 1)
        for runtime, label in zip(lab.runtimes, destroyed, strict=True)
    ]
    if baselines.docker is not None:
        contenders.append(Contender("Docker over HTTP", baselines.docker.take_create, every=5))
    rounds = lab.amount(60, 10)
    with lab.progress("create → first command, interleaved", rounds) as advance:
        samples = await in_turns(contenders, rounds, advance)
    absent = "; ".join(f"{missing.label}: {missing.reason}" for missing in baselines.absent)
    reference = {HOST: samples[HOST]}
    tables = [
        times("One after another", samples, against=HOST, note=absent or None),
        times("Destroy", reference | destroyed, against=HOST),
    ]
    return tables, list(_targets(samples, destroyed))


def _targets(samples: Mapping[str, Sequence[float]], destroyed: Mapping[str, Sequence[float]]) -> Iterator[Target]:
    if not (ours := samples.get("Atoll, crun")):
        return
    create, destroy = Spread.of(ours).median, Spread.of(destroyed["Atoll, crun"]).median
    figures = [
        ("create → first command with crun, median", Value(number=0.012, unit="s"), Value(number=create, unit="s")),
        ("destroy with crun, median", Value(number=0.006, unit="s"), Value(number=destroy, unit="s")),
    ]
    for label, bound in (("crun run", 0.9), ("docker run --rm", 0.05)):
        if theirs := samples.get(label):
            what = f"create → first command with crun against `{label}`, medians"
            figures.append((what, Value(number=bound, unit="×"), ratio(create, Spread.of(theirs).median)))
    for what, bound_value, measured in figures:
        yield Target(what=what, bound=bound_value, at_most=True, measured=measured)


async def _bursts(lab: Lab, baselines: Baselines) -> tuple[Table, dict[str, float]]:
    """The table, and how long all of each burst took."""
    rows: list[Row] = []
    taken: dict[str, float] = {}
    failures: Counter[str] = Counter()
    for baseline in baselines.all:
        if not baseline.slow:
            started = partial(_started, baseline, failures)
            await _burst(lab, baseline.label, lab.amount(100, 20), started, rows, taken)
    for runtime in lab.runtimes:
        made: list[atoll.Sandbox] = []

        async def answered(runtime: RuntimeName = runtime, made: list[atoll.Sandbox] = made) -> None:
            sandbox = await lab.create(runtime)
            made.append(sandbox)
            await sandbox.exec(["true"])

        count = lab.amount(20, 4) if runtime == "runsc" else lab.amount(100, 20)
        try:
            await _burst(lab, f"Atoll, {runtime}", count, answered, rows, taken)
        finally:
            await lab.destroy(made)
    table = Table(
        title="All at once",
        columns=("", "at once", "median", "p99", "all answered", "per second"),
        rows=tuple(rows),
        note="; ".join(f"{label}: {count} failed" for label, count in failures.items()) or None,
    )
    return table, taken


async def _started(baseline: Baseline, failures: Counter[str]) -> None:
    """Start a baseline once. A baseline may fail in a burst; a sandbox that fails fails the run."""
    done = await anyio.run_process(baseline.command(), stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        failures[baseline.label] += 1


async def _burst(
    lab: Lab,
    label: str,
    count: int,
    operation: Callable[[], Awaitable[object]],
    rows: list[Row],
    totals: dict[str, float],
) -> None:
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
    totals[label] = total
    cells = (
        Value(number=count),
        Value(number=spread.median, unit="s"),
        Value(number=spread.p99, unit="s"),
        Value(number=total, unit="s"),
        Value(number=count / total, unit="1/s"),
    )
    rows.append(Row(label=label, cells=cells))
