"""How long a command takes: one at a time, and many."""

from __future__ import annotations

import subprocess
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial

import anyio

import atoll
from atoll.contract.model import RuntimeName
from bench.baselines import HOST, Baselines
from bench.lab import Lab
from bench.results import Cell, Row, Section, Spread, Table, Target, Value, ratio, times
from bench.sampling import Contender, in_turns, program, throughput, timed

HOW = """\
`sandbox.exec(["true"])` in a running sandbox, from Python to Python, interleaved with
`subprocess.run(["/bin/true"])` on the host and, where Docker is installed, with its engine's HTTP interface, which
Docker's SDKs use (create, start and inspect an exec); `exec("true")` is a shell command line and starts a shell. The
throughput is that of one Python process that keeps the given number of commands of one sandbox in progress for some
seconds; on the host it is `anyio.run_process`, which is how the same program would be written without sandboxes."""

AT_ONCE = (1, 8, 32)
HOST_BOUND = 1.2
"""`exec true` with the fastest runtime, against a host subprocess."""
RUNSC_BOUND_S = 0.005
"""`exec true` with gVisor, whose own fork and exec take most of it."""


async def measure(lab: Lab) -> Section:
    async with AsyncExitStack() as stack:
        boxes = {runtime: await stack.enter_async_context(lab.sandbox(runtime)) for runtime in lab.runtimes}
        contenders = [Contender(HOST, program(["/bin/true"]))]
        for runtime, box in boxes.items():
            every = 3 if runtime == "runsc" else 1
            contenders.append(Contender(f"Atoll, {runtime}", partial(_exec, box, ["true"]), every=every))
        contenders.append(
            Contender(f"Atoll, {lab.fastest}, as a shell line", partial(_exec, boxes[lab.fastest], "true"))
        )
        baselines = stack.enter_context(Baselines(lab.scratch / "commands"))
        if baselines.docker is not None:
            contenders.append(Contender("Docker over HTTP", baselines.docker.take_exec, every=10))
        rounds = lab.amount(1000, 100)
        with lab.progress("exec true, interleaved", rounds) as advance:
            samples = await in_turns(contenders, rounds, advance)
        table = await _throughput(lab, boxes)
    latency = times("One at a time", samples, against=HOST)
    ours = Spread.of(samples[contenders[1].label]).median
    targets = [
        Target(
            what=f"`exec true` with {lab.fastest}, median against a host subprocess",
            bound=Value(number=HOST_BOUND, unit="×"),
            at_most=True,
            measured=ratio(ours, Spread.of(samples[HOST]).median),
        )
    ]
    if gvisor := samples.get("Atoll, runsc"):
        targets.append(
            Target(
                what="`exec true` with runsc, median",
                bound=Value(number=RUNSC_BOUND_S, unit="s"),
                at_most=True,
                measured=Value(number=Spread.of(gvisor).median, unit="s"),
            )
        )
    return Section(
        subject="exec",
        title="Commands",
        how=HOW,
        tables=(latency, table),
        targets=tuple(targets),
    )


async def _exec(box: atoll.Sandbox, command: str | list[str]) -> float:
    return await timed(box.exec(command))


async def _throughput(lab: Lab, boxes: Mapping[RuntimeName, atoll.Sandbox]) -> Table:
    """Commands per second. If a sandbox ends under the load, that is its result, and the others are still measured."""
    seconds = lab.amount(4, 1)

    async def on_host() -> object:
        return await anyio.run_process(["/bin/true"], stdin=subprocess.DEVNULL)

    operations: dict[str, Callable[[], Awaitable[object]]] = {"host, anyio.run_process": on_host}
    operations |= {f"Atoll, {runtime}": partial(_exec, box, ["true"]) for runtime, box in boxes.items()}
    rates: dict[str, list[float | None]] = {label: [] for label in operations}
    failures = []
    with lab.progress("commands per second", len(AT_ONCE) * len(operations)) as advance:
        for at_once in AT_ONCE:
            for label, operation in operations.items():
                rate = None
                try:
                    rate = await throughput(operation, at_once, seconds)
                except* atoll.SandboxError as errors:
                    failures.append(f"{label}, {at_once} at once: {errors.exceptions[0]}")
                rates[label].append(rate)
                advance()
    host = next(iter(rates.values()))[-1]
    rows = []
    for label, found in rates.items():
        cells: list[Cell] = ["ended" if rate is None else Value(number=rate, unit="1/s") for rate in found]
        last = found[-1]
        rows.append(Row(label=label, cells=(*cells, ratio(last, host) if last and host else None)))
    columns = ("", *(f"{number} at once" for number in AT_ONCE), f"against host, {AT_ONCE[-1]} at once")
    return Table(title="Commands per second", columns=columns, rows=tuple(rows), note="; ".join(failures) or None)
