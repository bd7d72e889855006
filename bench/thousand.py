"""A thousand sandboxes alive at once, or many thousands: all of them answer, and nothing is left of them.

Owns what must not grow with their number too: creating, destroying, listing, and the memory of each.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial

import atoll
from bench.lab import Lab
from bench.machine import memory_kb
from bench.memory import row_of, settled
from bench.results import Row, Section, Table, Target, Value, ratio
from bench.sampling import at_most, timed

HOW = """\
Created by one process, several at once, each idle from then on; when all exist, each is asked to `echo` its own
number and the answer is compared. Then all are destroyed, and leftover processes, cgroups, mounts, directories and
open files of this program are searched for; any leftover fails the run. Memory as in the section above. Growth
compares, per sandbox, the first tenth that is created with the last, and a tenth that is destroyed while the others
live with one that is destroyed while all others sleep on disk. They are listed for the second time, so that their
manifests have been read. `--many` sets their number."""

AT_ONCE = 8


async def measure(lab: Lab) -> Section:
    count = lab.many or lab.amount(1000, 50)
    runtime = lab.fastest
    made: list[atoll.Sandbox] = []
    answered = 0
    tenth = count // 10
    created: list[float] = []
    listed: dict[str, float] = {}

    async def make() -> None:
        made.append(await lab.create(runtime))
        created.append(time.perf_counter())
        advance()

    async def ask(sandbox: atoll.Sandbox, number: int) -> None:
        nonlocal answered
        result = await sandbox.exec(["echo", str(number)])
        answered += result.stdout == f"{number}\n"
        advance()

    async with lab.sandbox(runtime):
        pass
    gc.collect()
    open_files = _open_files()
    before = memory_kb("MemAvailable")
    own = _own_memory()
    try:
        with lab.progress(f"creating {count}, {AT_ONCE} at once", count) as advance:
            begun = time.perf_counter()
            making = await timed(_all(AT_ONCE, [make] * count))
        lab.remember(made)
        with lab.progress(f"asking {count}", count) as advance:
            asking = await timed(_all(32, [partial(ask, box, number) for number, box in enumerate(made)]))
        with lab.progress("measuring their memory", 1) as advance:
            footprint = await settled(lab, made)
        used = (before - memory_kb("MemAvailable")) * 1024
        own = _own_memory() - own
        with lab.progress(f"pausing {count}, and listing them", count) as advance:
            listed["running"] = await _list(lab, {"running"})
            await _all(AT_ONCE, [partial(lab.engine.pause, box.name) for box in made])
            listed["paused"] = await _list(lab, {"paused"})
        with lab.progress(f"destroying {tenth}, and putting the others to sleep", count) as advance:
            crowded = await timed(lab.destroy(made[:tenth])) / tenth
            await _all(AT_ONCE, [partial(lab.engine.sleep, box.name) for box in made[2 * tenth :]])
            listed["nine of ten asleep"] = await _list(lab, {"paused", "sleeping"})
            alone = await timed(lab.destroy(made[tenth : 2 * tenth])) / tenth
        made = made[2 * tenth :]
    finally:
        with lab.progress(f"destroying the remaining {len(made)}", len(made)) as advance:
            await lab.destroy(made, advance)
    made.clear()
    gc.collect()
    if left := [*lab.leftovers(), *_more_files(open_files)]:
        raise RuntimeError(f"{len(left)} things are left after all were destroyed: {', '.join(left[:8])}")
    rows = []
    for label, number, taken in (
        (f"created, {AT_ONCE} at once", count, making),
        ("answered an `echo`, 32 at once", answered, asking),
        *((f"listed, {status}", count, taken) for status, taken in listed.items()),
    ):
        cells = (Value(number=number), Value(number=taken, unit="s"), Value(number=taken / number, unit="s"))
        rows.append(Row(label=label, cells=cells))
    rows.append(Row(label="left afterwards: processes, cgroups, mounts, files", cells=(Value(number=0), None, None)))
    memory = Table(
        title="Memory per sandbox",
        columns=(
            "",
            "alive",
            "keeper",
            "guest",
            "other processes",
            "together",
            "of the machine",
            "of which this program",
        ),
        rows=(_with_own(row_of(f"Atoll, {runtime}", footprint, count, used), own / count),),
    )
    first = (created[tenth - 1] - begun) / tenth
    last = (created[-1] - created[-1 - tenth]) / tenth
    grown = [(f"create, {AT_ONCE} at once", first, last), ("destroy, 8 at once", alone, crowded)]
    growth = Table(
        title="Growth",
        columns=("", "with few others", "with nearly all others", "ratio"),
        rows=tuple(
            Row(label=label, cells=(Value(number=few, unit="s"), Value(number=many, unit="s"), ratio(many, few)))
            for label, few, many in grown
        ),
    )
    return Section(
        subject="thousand",
        title=f"{count} sandboxes at once",
        how=HOW,
        tables=(
            Table(title=f"{count} with {runtime}", columns=("", "number", "time", "each"), rows=tuple(rows)),
            memory,
            growth,
        ),
        targets=(
            *(
                Target(
                    what=f"{label}: with nearly {count} others against few",
                    bound=Value(number=1.3, unit="×"),
                    at_most=True,
                    measured=ratio(many, few),
                )
                for label, few, many in grown
            ),
            *(
                Target(
                    what=f"{count} sandboxes listed, {status}",
                    bound=Value(number=0.2, unit="s"),
                    at_most=True,
                    measured=Value(number=taken, unit="s"),
                )
                for status, taken in listed.items()
            ),
            Target(
                what=f"memory of the machine per sandbox, {count} alive",
                bound=Value(number=0.5e6, unit="B"),
                at_most=True,
                measured=Value(number=used / count, unit="B"),
            ),
            Target(
                what=f"{count} sandboxes alive at once, and all answer",
                bound=Value(number=count),
                at_most=False,
                measured=Value(number=answered),
            ),
            Target(
                what=f"an idle sandbox with {runtime}: guest and keeper, {count} alive",
                bound=Value(number=0.3e6, unit="B"),
                at_most=True,
                measured=Value(number=footprint.total / count, unit="B"),
            ),
        ),
    )


async def _list(lab: Lab, statuses: set[str]) -> float:
    """How long a list takes of sandboxes that were listed before. They must have these statuses."""
    if (found := {info.status for info in await lab.engine.list()}) != statuses:
        raise RuntimeError(f"the sandboxes are {', '.join(found)}, not {', '.join(statuses)}")
    return await timed(lab.engine.list())


async def _all(limit: int, operations: list[Callable[[], Awaitable[object]]]) -> None:
    async with at_most(limit) as start:
        for operation in operations:
            await start(operation)


def _with_own(row: Row, own: float) -> Row:
    return Row(label=row.label, cells=(*row.cells, Value(number=own, unit="B")))


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _more_files(before: int) -> list[str]:
    now = _open_files()
    return [f"{now - before} open files of this program"] if now > before else []


def _own_memory() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
