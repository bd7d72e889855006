"""How long a sandbox takes to pause and resume, and to sleep and wake."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack

import atoll
from atoll.contract.model import RuntimeName
from bench.lab import Lab
from bench.results import Point, Row, Section, Spread, Table, Target, Value, growth, ratio
from bench.sampling import timed

HOW = """\
*Freeze* is `pause()`, until no process of the sandbox runs any more. *Thaw* is the first request to a paused
sandbox, until it has answered, compared with the same request to a running one: the list of its commands, which the
guest knows without starting a process, and then `true`. On the host, the same with a `cat` that is stopped and
continued by signals, and answers by echoing. *Sleep* is `sleep()`, until the sandbox is on disk and none of its
processes runs, and *wake* the first `true` after that; compared with a new sandbox until its first `true`. With
runsc the processes are saved and continue. All interleaved."""

NEW = "a new one, `true`"
HOST = "host, SIGSTOP and SIGCONT"
PROCESSES: Sequence[int] = (0, 100, 900)
FEWER_PROCESSES: Mapping[RuntimeName, Sequence[int]] = {"runsc": (0, 50)}
"""`PROCESSES` of slower runtimes."""
BOUND = Value(number=0.005, unit="s")

Samples = dict[tuple[str, str], list[float]]


async def measure(lab: Lab) -> Section:
    samples: Samples = {}
    async with AsyncExitStack() as stack:
        boxes = {name: await stack.enter_async_context(lab.sandbox(name)) for name in lab.runtimes}
        takes: dict[str, Callable[[], Awaitable[dict[str, float]]]] = {}
        with _Cat() as cat:
            takes[HOST] = cat.take
            for name, box in boxes.items():
                takes[f"Atoll, {name}"] = _Frozen(box).take
            rounds = lab.amount(50, 8)
            with lab.progress("freeze and thaw, interleaved", rounds) as advance:
                for _ in range(rounds):
                    for label, take in takes.items():
                        for step, seconds in (await take()).items():
                            samples.setdefault((label, step), []).append(seconds)
                    advance()
        grown = growth("Freeze and thaw with more processes inside", await _crowded(lab), each="process")
        cold = await _cold(lab, boxes)
    return Section(
        subject="sleep",
        title="Pause, sleep and wake",
        how=HOW,
        tables=(_warm(samples), grown, cold),
        targets=tuple(
            Target(
                what=f"{step} with {name}, median",
                bound=BOUND,
                at_most=True,
                measured=Value(number=Spread.of(samples[f"Atoll, {name}", step]).median, unit="s"),
            )
            for name in lab.runtimes
            for step in ("freeze", "thaw")
        ),
    )


def _warm(samples: Samples) -> Table:
    rows = []
    for (label, step), taken in samples.items():
        spread = Spread.of(taken)
        host = samples.get((HOST, step))
        rows.append(
            Row(
                label=f"{label}: {step}",
                cells=(
                    Value(number=spread.median, unit="s"),
                    Value(number=spread.p90, unit="s"),
                    Value(number=spread.p99, unit="s"),
                    ratio(spread.median, Spread.of(host).median) if host else None,
                    Value(number=spread.count),
                ),
            )
        )
    columns = ("", "median", "p90", "p99", "against host", "n")
    return Table(title="Freeze and thaw", columns=columns, rows=tuple(rows))


class _Frozen:
    """A sandbox that is frozen and thawed."""

    def __init__(self, box: atoll.Sandbox) -> None:
        self._box = box

    async def take(self) -> dict[str, float]:
        box = self._box
        freeze = await timed(box.pause())
        taken = {"freeze": freeze, "thaw": await timed(box.processes()), "running": await timed(box.processes())}
        await box.pause()
        thaw = await timed(box.exec(["true"]))
        return {**taken, "thaw, `true`": thaw, "running, `true`": await timed(box.exec(["true"]))}


class _Cat:
    """A process of the host that echoes its input, and can be stopped."""

    def __enter__(self) -> _Cat:
        self._process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    async def take(self) -> dict[str, float]:
        start = time.perf_counter()
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)
        stopped = time.perf_counter()
        self._process.send_signal(signal.SIGCONT)
        self._asked()
        thawed = time.perf_counter()
        self._asked()
        return {"freeze": stopped - start, "thaw": thawed - stopped, "running": time.perf_counter() - thawed}

    def _asked(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"?")
        self._process.stdout.read(1)


# ---- with many processes ----


async def _crowded(lab: Lab) -> dict[str, list[Point]]:
    series: dict[str, list[Point]] = {}
    for runtime in lab.runtimes:
        if runtime == "runc":  # the same kernel freezer as with crun
            continue
        for count in FEWER_PROCESSES.get(runtime, PROCESSES):
            async with lab.sandbox(runtime) as box:
                if count:
                    line = f"i=0; while [ $i -lt {count} ]; do sleep 1000 & i=$((i+1)); done; echo up; wait"
                    async with await box.spawn(line) as process:
                        async for _ in process:
                            break
                frozen = _Frozen(box)
                rounds = lab.amount(10, 3)
                with lab.progress(f"{count} processes in {runtime}", rounds):
                    taken = [await frozen.take() for _ in range(rounds)]
            for step in ("freeze", "thaw"):
                point = Point(label=f"{count} processes", amount=count, samples=tuple(each[step] for each in taken))
                series.setdefault(f"{runtime}: {step}", []).append(point)
    return series


# ---- cold ----


async def _cold(lab: Lab, boxes: Mapping[RuntimeName, atoll.Sandbox]) -> Table:
    samples: Samples = {}
    rounds = lab.amount(10, 2)
    with lab.progress("sleep and wake, interleaved", rounds) as advance:
        for _ in range(rounds):
            for name, box in boxes.items():
                for step, seconds in (
                    ("sleep", await timed(box.sleep())),
                    ("wake, `true`", await timed(box.exec(["true"]))),
                    (NEW, await _new(lab, name)),
                ):
                    samples.setdefault((f"Atoll, {name}", step), []).append(seconds)
            advance()
    rows = []
    for (label, step), taken in samples.items():
        spread = Spread.of(taken)
        rows.append(
            Row(
                label=f"{label}: {step}",
                cells=(
                    Value(number=spread.median, unit="s"),
                    Value(number=spread.p90, unit="s"),
                    ratio(spread.median, Spread.of(samples[label, NEW]).median),
                    Value(number=spread.count),
                ),
            )
        )
    return Table(
        title="Sleep and wake, on disk", columns=("", "median", "p90", "against a new one", "n"), rows=tuple(rows)
    )


async def _new(lab: Lab, runtime: RuntimeName) -> float:
    start = time.perf_counter()
    box = await lab.create(runtime)
    try:
        await box.exec(["true"])
        return time.perf_counter() - start
    finally:
        await lab.destroy([box])
