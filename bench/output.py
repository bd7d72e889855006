"""Throughput of a command's output."""

from __future__ import annotations

import shlex
import statistics
import subprocess
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial

import atoll
from atoll.contract.model import RuntimeName
from bench.lab import Lab
from bench.results import Row, Section, Table, Target, Value, ratio
from bench.sampling import Contender, in_turns

HOW = """\
A command that writes zeros, started with `spawn` and read event by event to its exit; on the host the same command with
`subprocess.Popen` and reads of up to 1 MiB from its pipe. Interleaved. `dd bs=1M` writes large blocks: that is the
throughput of Atoll. `head -c` writes 8 KiB at a time, two system calls each: with gVisor that is the speed of system
calls inside, which the same command with its output to `/dev/null` inside, where nothing leaves the sandbox, shows."""

HOST = "host, subprocess.Popen"
BLOCK = 1024 * 1024
BOUNDS: dict[RuntimeName, float] = {"crun": 400e6, "runsc": 200e6}
"""Bytes per second of large blocks."""


async def measure(lab: Lab) -> Section:
    blocks = lab.amount(500, 100)
    size = blocks * BLOCK
    large = ["dd", "if=/dev/zero", "bs=1M", f"count={blocks}", "status=none"]
    small = ["head", "-c", str(size), "/dev/zero"]
    async with AsyncExitStack() as stack:
        boxes = {runtime: await stack.enter_async_context(lab.sandbox(runtime)) for runtime in lab.runtimes}
        tables, rates = [], {}
        for command, title in ((large, "in blocks of 1 MiB"), (small, "in blocks of 8 KiB")):
            found = await _throughput(lab, boxes, command, size)
            rates[title] = found
            rows = tuple(
                Row(label=label, cells=(Value(number=rate, unit="B/s"), ratio(rate, found[HOST])))
                for label, rate in found.items()
            )
            columns = ("", "throughput", "against host")
            tables.append(
                Table(title=f"{size // 1_000_000} MB of standard output, {title}", columns=columns, rows=rows)
            )
    targets = [
        Target(
            what=f"output with {name}, in blocks of 1 MiB",
            bound=Value(number=bound, unit="B/s"),
            at_most=False,
            measured=Value(number=rates["in blocks of 1 MiB"][f"Atoll, {name}"], unit="B/s"),
        )
        for name, bound in BOUNDS.items()
        if name in boxes
    ]
    return Section(subject="output", title="Output", how=HOW, tables=tuple(tables), targets=tuple(targets))


async def _throughput(
    lab: Lab, boxes: Mapping[RuntimeName, atoll.Sandbox], command: list[str], size: int
) -> dict[str, float]:
    contenders = [Contender(HOST, partial(_host, command, size))]
    for runtime, box in boxes.items():
        every = 2 if runtime == "runsc" else 1
        contenders.append(Contender(f"Atoll, {runtime}", partial(_box, box, command, size), every=every))
        if runtime == "runsc":
            contenders.append(Contender("inside runsc, to /dev/null", partial(_inside, box, command), every=every))
    rounds = lab.amount(5, 2)
    with lab.progress(f"{size // 1_000_000} MB from {command[0]}, interleaved", rounds) as advance:
        samples = await in_turns(contenders, rounds, advance)
    return {label: size / statistics.median(taken) for label, taken in samples.items()}


async def _inside(box: atoll.Sandbox, command: list[str]) -> float:
    start = time.perf_counter()
    result = await box.exec(f"{shlex.join(command)} > /dev/null")
    if result.exit_code:
        raise RuntimeError(f"{command[0]} failed with {result.exit_code}: {result.stderr}")
    return time.perf_counter() - start


async def _host(command: list[str], size: int) -> float:
    start = time.perf_counter()
    seen = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        while data := process.stdout.read(1024 * 1024):
            seen += len(data)
    taken = time.perf_counter() - start
    if seen != size:
        raise RuntimeError(f"{seen} bytes came, not {size}")
    return taken


async def _box(box: atoll.Sandbox, command: list[str], size: int) -> float:
    start = time.perf_counter()
    seen = 0
    async with await box.spawn(command, keep=False) as process:
        async for event in process:
            if isinstance(event, atoll.Output):
                seen += len(event.data)
    taken = time.perf_counter() - start
    if seen != size:
        raise RuntimeError(f"{seen} bytes came, not {size}")
    return taken
