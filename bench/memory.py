"""The memory of an idle sandbox."""

from __future__ import annotations

import time

import anyio

import atoll
from atoll.contract.model import RuntimeName
from bench.footprint import Footprint, measure as measure_footprint, sandbox_processes
from bench.lab import Lab
from bench.machine import memory_kb
from bench.results import Row, Section, Table, Target, Value
from bench.sampling import at_most

HOW = """\
The given number of sandboxes is created, each runs `true` once, and then nothing happens until their sizes stop
changing. The proportional set size (`/proc/PID/smaps_rollup`) of a sandbox is that of its keeper and all its
descendants: the guest (with runsc: gVisor's kernel, in which it runs) and other processes of the runtime. Pages that
sandboxes share are divided among them. *Of the machine* is the decrease of MemAvailable, including kernel memory,
page cache and this program's own connections, divided by the number; it includes everything else that happens on the
machine, and is left out where MemAvailable has increased."""

SETTLE_S = 20.0
MANY = 50
FEWER = {"runsc": 10}
"""How many are alive at once with runtimes whose sandboxes are larger."""


async def measure(lab: Lab) -> Section:
    rows = []
    target = None
    for runtime in lab.runtimes:
        for count in (1, FEWER.get(runtime, MANY)):
            row, footprint = await _alive(lab, runtime, count)
            rows.append(row)
            if runtime == lab.fastest and count > 1:
                target = Target(
                    what=f"an idle sandbox with {runtime}: guest and keeper, {count} alive",
                    bound=Value(number=0.3e6, unit="B"),
                    at_most=True,
                    measured=Value(number=footprint.total / count, unit="B"),
                )
    columns = ("", "alive", "keeper", "guest", "other processes", "together", "of the machine")
    table = Table(title="Proportional set size of an idle sandbox", columns=columns, rows=tuple(rows))
    return Section(
        subject="memory",
        title="Memory of an idle sandbox",
        how=HOW,
        tables=(table,),
        targets=(target,) if target else (),
    )


async def _alive(lab: Lab, runtime: RuntimeName, count: int) -> tuple[Row, Footprint]:
    made: list[atoll.Sandbox] = []

    async def one() -> None:
        sandbox = await lab.create(runtime)
        made.append(sandbox)
        await sandbox.exec(["true"])
        advance()

    async with lab.sandbox(runtime):  # so that programs are already in the page cache
        before = memory_kb("MemAvailable")
        try:
            with lab.progress(f"{count} × {runtime}", count) as advance:
                async with at_most(4) as start:
                    for _ in range(count):
                        await start(one)
            footprint = await settled(lab, made)
            used = (before - memory_kb("MemAvailable")) * 1024
        finally:
            await lab.destroy(made)
    return row_of(f"Atoll, {runtime}", footprint, count, used), footprint


async def settled(lab: Lab, sandboxes: list[atoll.Sandbox]) -> Footprint:
    """Their sizes, once two readings a second apart are equal. Buffers are freed after some time without traffic."""
    processes = sandbox_processes(lab.engine.state_dir, [sandbox.id for sandbox in sandboxes])
    footprint = measure_footprint(processes)
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        await anyio.sleep(1.2)
        processes = sandbox_processes(lab.engine.state_dir, processes)
        now = measure_footprint(processes)
        if abs(now.total - footprint.total) <= footprint.total // 200:
            return now
        footprint = now
    return footprint


def row_of(label: str, footprint: Footprint, count: int, used: int) -> Row:
    parts = (footprint.keepers, footprint.guests, footprint.others, footprint.total)
    each = [Value(number=part / count, unit="B") for part in parts]
    return Row(
        label=label, cells=(Value(number=count), *each, Value(number=used / count, unit="B") if used > 0 else None)
    )
