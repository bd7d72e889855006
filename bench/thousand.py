"""A thousand sandboxes alive at once, all of them answering, without leftovers after they are destroyed."""

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
from bench.results import Row, Section, Table, Target, Value
from bench.sampling import at_most, timed

HOW = """\
Created by one process, several at once, each idle from then on; when all exist, each is asked to `echo` its own
number and the answer is compared. Then all are destroyed, and leftover processes, cgroups, mounts, directories and
open files of this program are searched for; any leftover fails the run. Memory as in the section above."""

AT_ONCE = 8


async def measure(lab: Lab) -> Section:
    count = lab.amount(1000, 50)
    runtime = lab.fastest
    made: list[atoll.Sandbox] = []
    answered = 0

    async def make() -> None:
        made.append(await lab.create(runtime))
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
            making = await timed(_all(AT_ONCE, [make] * count))
        lab.remember(made)
        with lab.progress(f"asking {count}", count) as advance:
            asking = await timed(_all(32, [partial(ask, box, number) for number, box in enumerate(made)]))
        with lab.progress("measuring their memory", 1) as advance:
            footprint = await settled(lab, made)
        used = (before - memory_kb("MemAvailable")) * 1024
        own = _own_memory() - own
    finally:
        with lab.progress(f"destroying {len(made)}", len(made)) as advance:
            start = time.perf_counter()
            await lab.destroy(made, advance)
            destroying = time.perf_counter() - start
    made.clear()
    gc.collect()
    if left := [*lab.leftovers(), *_more_files(open_files)]:
        raise RuntimeError(f"{len(left)} things are left after all were destroyed: {', '.join(left[:8])}")
    rows = []
    for label, number, taken in (
        (f"created, {AT_ONCE} at once", count, making),
        ("answered an `echo`, 32 at once", answered, asking),
        ("destroyed, 8 at once", count, destroying),
    ):
        cells = (Value(number=number), Value(number=taken, unit="s"), Value(number=taken / count, unit="s"))
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
    return Section(
        subject="thousand",
        title=f"{count} sandboxes at once",
        how=HOW,
        tables=(
            Table(title=f"{count} with {runtime}", columns=("", "number", "time", "each"), rows=tuple(rows)),
            memory,
        ),
        targets=(
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


async def _all(limit: int, operations: list[Callable[[], Awaitable[None]]]) -> None:
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
