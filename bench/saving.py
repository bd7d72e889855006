"""How long saving running processes to disk and restoring them takes, by their memory."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import atoll
from atoll.contract.model import Output, RuntimeName
from atoll.runtime.engine import LocalEngine
from bench.lab import Lab
from bench.results import Point, Section, Spread, Target, Value, growth
from bench.sampling import timed

HOW = """\
A Python process inside holds the given number of megabytes of random bytes, each page of them touched. Timed:
`checkpoint()`, from the call until the sandbox has answered again, which is how long its processes are stopped; of
that, the part in which they are written to disk; `restore()` of that checkpoint over the running sandbox, until it
answers; `sleep()`, until the sandbox is on disk and none of its processes runs; and the first answer, which wakes
it. The answer is the list of its commands, which has to contain the process. The writing is compared with a file of
the same size, written by the host and flushed to disk (`fsync`), interleaved."""

MB = 1_000_000
SAVED = "checkpoint, until it is written"
STILL = "checkpoint, until it answers again"
RESTORED = "restore, until it answers"
SLEPT = "sleep"
WOKEN = "wake, until it answers"
FILE = "writing a file"
SAVE_BOUND = Value(number=0.250, unit="s")
RESTORE_BOUND = Value(number=0.350, unit="s")

_HOLD = "import os, time; held = os.urandom({count}); print('up', flush=True); time.sleep(1e6)"


async def measure(lab: Lab) -> Section:
    able = [name for name, able in lab.engine.runtimes().items() if able.memory_checkpoint]
    able = [name for name in able if name in lab.runtimes]
    if not able:
        return Section(
            subject="save", title="Checkpoints with processes", how="None of the chosen runtimes supports it."
        )
    runtime = able[0]
    series: dict[str, list[Point]] = {}
    for megabytes, rounds in (
        (10, lab.amount(9, 3)),
        (100, lab.amount(5, 1)),
        (lab.amount(500, 200), lab.amount(3, 1)),
    ):
        for step, point in (await _points(lab, runtime, megabytes, rounds)).items():
            series.setdefault(step, []).append(point)
    first = {step: Value(number=Spread.of(points[0].samples).median, unit="s") for step, points in series.items()}
    return Section(
        subject="save",
        title="Checkpoints with processes",
        how=HOW,
        tables=(growth(f"With {runtime}", series, each="MB", against=FILE),),
        targets=(
            Target(
                what=f"checkpoint with memory, {runtime}, 10 MB, until it is written, median",
                bound=SAVE_BOUND,
                at_most=True,
                measured=first[SAVED],
            ),
            Target(
                what=f"restore with memory, {runtime}, 10 MB, until it answers, median",
                bound=RESTORE_BOUND,
                at_most=True,
                measured=first[RESTORED],
            ),
        ),
    )


async def _points(lab: Lab, runtime: RuntimeName, megabytes: int, rounds: int) -> dict[str, Point]:
    taken: dict[str, list[float]] = {}
    files = []
    async with lab.sandbox(runtime) as box:
        async with await box.spawn(["python3", "-c", _HOLD.format(count=megabytes * MB)]) as process:
            async for event in process:
                if isinstance(event, Output):
                    break
        with lab.progress(f"{megabytes} MB in {runtime}", rounds) as advance:
            for _ in range(rounds):
                files.append(_written(lab.scratch / "file", megabytes))
                for step, seconds in (await _round(lab, runtime, box, process.id)).items():
                    taken.setdefault(step, []).append(seconds)
                advance()
    first = 10
    return {
        step: Point(
            label=f"{megabytes} MB",
            amount=megabytes - first,
            samples=tuple(samples),
            beside=tuple(files) if step == SAVED else (),
        )
        for step, samples in taken.items()
    }


async def _round(lab: Lab, runtime: RuntimeName, box: atoll.Sandbox, held: int) -> dict[str, float]:
    async def answers() -> None:
        if not any(each.id == held and each.exit_code is None for each in await box.processes()):
            raise RuntimeError("the process that held memory did not go on")

    async with _watched(lab, runtime) as saving:
        start = time.perf_counter()
        checkpoint = await box.checkpoint()
        await answers()
        still = time.perf_counter() - start
    start = time.perf_counter()
    await box.restore(checkpoint.id)
    await answers()
    restored = time.perf_counter() - start
    await lab.engine.delete_checkpoint(checkpoint.id)
    return {
        SAVED: saving[0],
        STILL: still,
        RESTORED: restored,
        SLEPT: await timed(box.sleep()),
        WOKEN: await timed(answers()),
    }


@asynccontextmanager
async def _watched(lab: Lab, runtime: RuntimeName) -> AsyncIterator[list[float]]:
    """Record how long each `save` of the driver takes."""
    assert isinstance(lab.engine, LocalEngine)
    driver = lab.engine.drivers()[runtime]
    save = driver.save
    taken: list[float] = []

    async def timed_save(*arguments: Any, **named: Any) -> None:
        taken.append(await timed(save(*arguments, **named)))

    with mock.patch.object(driver, "save", timed_save):
        yield taken


def _written(path: Path, megabytes: int) -> float:
    data = os.urandom(MB)
    os.sync()
    start = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        file.writelines(data for _ in range(megabytes))
        os.fsync(file.fileno())
    taken = time.perf_counter() - start
    path.unlink()
    return taken
