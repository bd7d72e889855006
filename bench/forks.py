"""How long a fork takes, until all copies answer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import anyio

import atoll
from atoll.contract.model import RuntimeName
from bench.lab import Lab
from bench.results import Point, Section, Spread, Target, Value, growth

HOW = """\
A running sandbox that has written a hundred files is forked, all copies with one call, until each has answered
`true`; interleaved with as many new sandboxes created at once, until each has answered. Destroying them is not
timed. With runsc every copy continues with the processes of the sandbox: one `sleep`, besides the guest."""

COUNTS: Sequence[tuple[int, int]] = ((1, 9), (10, 5), (50, 3))
"""The number of copies, and how often."""
FEWER: Mapping[RuntimeName, Sequence[tuple[int, int]]] = {
    "runc": ((1, 5), (10, 3), (50, 1)),
    "runsc": ((1, 3), (10, 1), (50, 1)),
}
"""`COUNTS` of slower runtimes."""
BOUND = Value(number=2.5, unit="s")


async def measure(lab: Lab) -> Section:
    series: dict[str, list[Point]] = {}
    targets = []
    for runtime in lab.runtimes:
        async with lab.sandbox(runtime) as box:
            await box.exec("for i in $(seq 100); do echo $i > $i; done")
            await box.spawn(["sleep", "100000"])
            for count, rounds in FEWER.get(runtime, COUNTS)[: lab.amount(3, 2)]:
                point = await _point(lab, box, runtime, count, lab.amount(rounds, 1))
                series.setdefault(runtime, []).append(point)
                if runtime == "crun" and count == 50:
                    targets.append(
                        Target(
                            what="fork by 50 with crun, until all answer, median",
                            bound=BOUND,
                            at_most=True,
                            measured=Value(number=Spread.of(point.samples).median, unit="s"),
                        )
                    )
    table = growth("Fork, until all answer", series, each="copy", against="new ones")
    return Section(subject="fork", title="Forks", how=HOW, tables=(table,), targets=tuple(targets))


async def _point(lab: Lab, box: atoll.Sandbox, runtime: RuntimeName, count: int, rounds: int) -> Point:
    forks, fresh = [], []
    with lab.progress(f"{count} × {runtime}", rounds) as advance:
        for _ in range(rounds):
            forks.append(await _forked(lab, box, count))
            fresh.append(await _made(lab, runtime, count))
            advance()
    return Point(label=f"by {count}", amount=count - 1, samples=tuple(forks), beside=tuple(fresh))


async def _forked(lab: Lab, box: atoll.Sandbox, count: int) -> float:
    start = time.perf_counter()
    made = await box.fork(count)
    try:
        async with anyio.create_task_group() as group:
            for each in made:
                group.start_soon(each.exec, ["true"])
        return time.perf_counter() - start
    finally:
        await lab.destroy(made)


async def _made(lab: Lab, runtime: RuntimeName, count: int) -> float:
    made: list[atoll.Sandbox] = []

    async def one() -> None:
        made.append(await lab.create(runtime))
        await made[-1].exec(["true"])

    start = time.perf_counter()
    try:
        async with anyio.create_task_group() as group:
            for _ in range(count):
                group.start_soon(one)
        return time.perf_counter() - start
    finally:
        await lab.destroy(made)
