"""Throughput of a command's output."""

from __future__ import annotations

import statistics
import subprocess
import time
from contextlib import AsyncExitStack
from functools import partial

import atoll
from bench.lab import Lab
from bench.results import Row, Section, Table, Value, ratio
from bench.sampling import Contender, in_turns

HOW = """\
`head -c 500000000 /dev/zero`, started with `spawn` and read event by event to its exit; on the host the same command
with `subprocess.Popen` and reads of up to 1 MiB from its pipe. Interleaved."""

HOST = "host, subprocess.Popen"


async def measure(lab: Lab) -> Section:
    size = lab.amount(500_000_000, 100_000_000)
    async with AsyncExitStack() as stack:
        contenders = [Contender(HOST, partial(_host, size))]
        for runtime in lab.runtimes:
            box = await stack.enter_async_context(lab.sandbox(runtime))
            contenders.append(
                Contender(f"Atoll, {runtime}", partial(_box, box, size), every=2 if runtime == "runsc" else 1)
            )
        rounds = lab.amount(5, 2)
        with lab.progress(f"{size // 1_000_000} MB of output, interleaved", rounds) as advance:
            samples = await in_turns(contenders, rounds, advance)
    rates = {label: size / statistics.median(taken) for label, taken in samples.items()}
    rows = tuple(
        Row(label=label, cells=(Value(number=rate, unit="B/s"), ratio(rate, rates[HOST])))
        for label, rate in rates.items()
    )
    table = Table(
        title=f"{size // 1_000_000} MB of standard output", columns=("", "throughput", "against host"), rows=rows
    )
    return Section(subject="output", title="Output", how=HOW, tables=(table,))


async def _host(size: int) -> float:
    start = time.perf_counter()
    seen = 0
    with subprocess.Popen(["head", "-c", str(size), "/dev/zero"], stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        while data := process.stdout.read(1024 * 1024):
            seen += len(data)
    taken = time.perf_counter() - start
    if seen != size:
        raise RuntimeError(f"{seen} bytes came, not {size}")
    return taken


async def _box(box: atoll.Sandbox, size: int) -> float:
    start = time.perf_counter()
    seen = 0
    async with await box.spawn(["head", "-c", str(size), "/dev/zero"], keep=False) as process:
        async for event in process:
            if isinstance(event, atoll.Output):
                seen += len(event.data)
    taken = time.perf_counter() - start
    if seen != size:
        raise RuntimeError(f"{seen} bytes came, not {size}")
    return taken
