"""A soak run: many sandboxes that are busy for a long time. `make soak`; not part of `python -m bench` and of CI.

Owns what the sandboxes do, what is recorded of this process meanwhile, and when the run has failed: after any error, if
the memory or the descriptors of this process grow, or if anything is left at the end (`atoll.testing.leaks`). Writes
its own section of `bench/RESULTS.md`, which a run of the benchmarks keeps, as this keeps theirs (`render.py`).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import anyio
from anyio.abc import ByteStream, SocketAttribute
from rich.console import Console

import atoll
from atoll.drivers import oci
from atoll.testing.leaks import Ledger
from bench.lab import Lab, open_lab
from bench.machine import describe
from bench.render import RESULTS, show_machine, show_section, write_soak
from bench.results import Row, Section, Table, Target, Unit, Value
from bench.sampling import at_most

HOW = """\
Each sandbox does one thing after the other, chosen at random, and checks what it gets: commands, files, requests to a
server on the host's loopback through its egress policy, pause and resume, sleep and wake, checkpoints that are restored
and deleted, forks, and its end and a new one in its place. All belong to one process, whose memory and descriptors are
recorded every {every:g} s. The first {warm_up:.0%} of the time is warm-up. Growth is the difference of the means of the
second and the first half of the rest; it counts only if the fitted line of the second half rises too."""

SAMPLE_S = 5.0
WARM_UP = 0.2
HEAVY_AT_ONCE = 8
"""Operations that start or copy a sandbox. With more, each takes longer and none ends earlier."""
LIGHT_AT_ONCE = 32
PATIENCE_S = 120.0
"""How long one operation may take. On a machine that is busy to the limit, each waits for the others."""
SHOWN_ERRORS = 20
MOST_MEMORY_GROWTH, LEAST_MEMORY_BYTES = 0.05, 10e6
MOST_DESCRIPTOR_GROWTH, LEAST_DESCRIPTORS = 0.05, 20.0
PROXY = 1023


# ---- what is recorded ----


class Sample(NamedTuple):
    """This process at one moment."""

    at_s: float
    memory_bytes: float
    descriptors: float
    threads: float


class Durations:
    """A histogram, which does not grow with the number of its samples: that would be found as a leak."""

    STEP = 1.1
    LEAST_S = 1e-5

    def __init__(self) -> None:
        self._counts = [0] * 200
        self.count = 0
        self.most_s = 0.0

    def add(self, seconds: float) -> None:
        steps = math.log(max(seconds, self.LEAST_S) / self.LEAST_S, self.STEP)
        self._counts[min(int(steps), len(self._counts) - 1)] += 1
        self.count += 1
        self.most_s = max(self.most_s, seconds)

    def quantile(self, share: float) -> float:
        seen = 0
        for number, count in enumerate(self._counts):
            seen += count
            if seen >= share * self.count:
                return float(self.LEAST_S * self.STEP ** (number + 0.5))
        return self.most_s


@dataclass
class Log:
    """What has happened so far."""

    durations: dict[str, Durations] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)

    @property
    def operations(self) -> int:
        return sum(each.count for each in self.durations.values())


def take_sample(began: float) -> Sample:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)  # what was freed and is kept for later is no growth
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(
        time.monotonic() - began,
        pages * os.sysconf("SC_PAGESIZE"),
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
    )


def growth(points: Sequence[tuple[float, float]]) -> float:
    """How much a figure has grown, from (time, figure): 0 if it does not rise any more in the second half."""
    if len(points) < 8:
        return 0.0
    first, second = points[: len(points) // 2], points[len(points) // 2 :]
    slope = statistics.linear_regression(*zip(*second, strict=True)).slope
    return max(0.0, _mean(second) - _mean(first)) if slope > 0 else 0.0


def _mean(points: Sequence[tuple[float, float]]) -> float:
    return statistics.fmean(figure for _, figure in points)


# ---- what a sandbox does ----


class Busy:
    """One sandbox, or rather one after the other, and what it must contain."""

    def __init__(self, soak: Soak, number: int) -> None:
        self._soak = soak
        self._number = number
        self._chance = random.Random(number)
        self._content = ""
        self._box: atoll.Sandbox | None = None

    async def run(self) -> None:
        await self._soak.timed("create", self._create, heavy=True)
        light = ((self._command, 30), (self._files, 20), (self._egress, 10), (self._pause, 4))
        heavy = ((self._sleep, 3), (self._checkpoint, 2), (self._fork, 2), (self._replace, 1))
        choices = [action for action, _ in (*light, *heavy)]
        weights = [weight for _, weight in (*light, *heavy)]
        while not self._soak.is_over:
            (action,) = self._chance.choices(choices, weights)
            is_heavy = action in {each for each, _ in heavy}
            if not await self._soak.timed(action.__name__.strip("_"), action, heavy=is_heavy):
                await self._soak.timed("replace", self._replace, heavy=True)

    async def _create(self) -> None:
        policy = atoll.NetworkPolicy(allow=f"127.0.0.1:{self._soak.port}")
        self._box = await self._soak.engine.create(runtime=self._soak.runtime, network=policy)
        self._content = ""
        await self._write_note()

    @property
    def box(self) -> atoll.Sandbox:
        if self._box is None:
            raise RuntimeError("the sandbox could not be created")
        return self._box

    async def _write_note(self) -> None:
        self._content = f"{self._chance.random()}"
        await self.box.files.write_text("note", self._content)

    async def _check_note(self, box: atoll.Sandbox | None = None) -> None:
        found = (await (box or self.box).exec(["cat", "note"], timeout_s=PATIENCE_S)).stdout
        require(found == self._content, f"the note is {found!r}, not {self._content!r}")

    async def _command(self) -> None:
        size = self._chance.randrange(100_000)
        line = f"head -c {size} /dev/zero | tr '\\0' x; echo err >&2; exit {size % 7}"
        result = await self.box.exec(line, timeout_s=PATIENCE_S)
        require(len(result.stdout) == size, f"{len(result.stdout)} bytes of output, not {size}")
        require((result.stderr, result.exit_code) == ("err\n", size % 7), f"{result.stderr!r}, {result.exit_code}")

    async def _files(self) -> None:
        data = self._chance.randbytes(self._chance.randrange(200_000))
        path = f"files/{self._chance.randrange(20)}"
        await self.box.files.write_bytes(path, data)
        require(await self.box.files.read_bytes(path) == data, "a file is not what was written")
        await self.box.files.list("files")
        if self._chance.random() < 0.3:
            await self.box.files.remove("files", recursive=True)
        await self._write_note()

    async def _egress(self) -> None:
        word = f"{self._chance.random()}"
        target = f"127.0.0.1:{self._soak.port}"
        ask = (
            f"exec 3<>/dev/tcp/127.0.0.1/{PROXY}; printf 'CONNECT {target} HTTP/1.0\\r\\n\\r\\n{word}\\n' >&3; cat <&3"
        )
        result = await self.box.exec(["bash", "-c", ask], timeout_s=PATIENCE_S)
        said = result.stdout.rpartition("\r\n\r\n")[2]
        require(said == f"{word}\n", f"the server said {result.stdout!r} {result.stderr!r}")

    async def _pause(self) -> None:
        await self.box.pause()
        if self._chance.random() < 0.5:
            await self.box.resume()
        await self._check_note()

    async def _sleep(self) -> None:
        await self.box.sleep()
        if self._chance.random() < 0.5:
            await self.box.wake()
        await self._check_note()

    async def _checkpoint(self) -> None:
        kept = self._content
        made = await self.box.checkpoint()
        await self._write_note()
        if self._chance.random() < 0.5:
            await self.box.restore(made.id)
            self._content = kept
        await self._soak.engine.delete_checkpoint(made.id)
        await self._check_note()

    async def _fork(self) -> None:
        (fork,) = await self.box.fork()
        try:
            await self._check_note(fork)
        finally:
            await fork.destroy()

    async def _replace(self) -> None:
        if self._box is not None:
            await self._box.destroy()
            self._box = None
        await self._create()

    async def end(self) -> None:
        if self._box is not None:
            await self._box.destroy()
            self._box = None


def require(condition: bool, problem: str) -> None:
    if not condition:
        raise WrongResult(problem)


class WrongResult(Exception):
    """A sandbox gave something else than it must."""


class Soak:
    """The run: its end, its sandboxes, and its log."""

    def __init__(self, lab: Lab, port: int, *, minutes: float, sandboxes: int) -> None:
        self.engine = lab.engine
        self.runtime = lab.fastest
        self.port = port
        self.log = Log()
        self._console = lab.console
        self._minutes = minutes
        self._busy = [Busy(self, number) for number in range(sandboxes)]
        self._heavy = anyio.Semaphore(HEAVY_AT_ONCE)
        self._light = anyio.Semaphore(LIGHT_AT_ONCE)
        self._began = time.monotonic()

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self._began > self._minutes * 60

    async def run(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._record)
            async with anyio.create_task_group() as workers:
                for busy in self._busy:
                    workers.start_soon(busy.run)
            group.cancel_scope.cancel()
        async with at_most(HEAVY_AT_ONCE) as start:
            for busy in self._busy:
                await start(busy.end)

    async def timed(self, name: str, action: Callable[[], Awaitable[None]], *, heavy: bool) -> bool:
        """Do it when it is its turn, and note how long it took or what went wrong. Returns whether it went well."""
        async with self._heavy if heavy else self._light:
            if self.is_over:
                return True
            start = time.perf_counter()
            try:
                with anyio.fail_after(PATIENCE_S):
                    await action()
            except Exception as error:  # noqa: BLE001 - the run goes on, and fails at its end
                problem = f"{name}: {type(error).__name__}: {error}"
                self.log.errors[problem] += 1
                self._console.print(f"  [red]{problem}[/red]", highlight=False)
                return False
            self.log.durations.setdefault(name, Durations()).add(time.perf_counter() - start)
            return True

    async def _record(self) -> None:
        shown = 0
        while True:
            sample = take_sample(self._began)
            self.log.samples.append(sample)
            if int(sample.at_s / 60) > shown:
                shown = int(sample.at_s / 60)
                self._console.print(f"  minute {shown} of {self._minutes:g}: {self._state(sample)}", highlight=False)
            await anyio.sleep(SAMPLE_S)

    def _state(self, sample: Sample) -> str:
        return (
            f"{self.log.operations} operations, {self.log.errors.total()} errors, {sample.memory_bytes / 1e6:.0f} MB, "
            f"{sample.descriptors:g} descriptors, {sample.threads:g} threads, load {os.getloadavg()[0]:.1f}"
        )


# ---- the run and its result ----


async def soak(lab: Lab, *, minutes: float, sandboxes: int) -> Section:
    """Run it.

    Returns its section, whose `failure` says what went wrong.
    """
    ledger = Ledger()
    ledger.watch(lab.engine.state_dir)
    start = time.perf_counter()
    try:
        async with _server() as port:
            async with lab.sandbox():
                pass
            gc.collect()
            before = ledger.look()
            run = Soak(lab, port, minutes=minutes, sandboxes=sandboxes)
            await run.run()
            gc.collect()
            left = await ledger.settled(before)
    finally:
        ledger.close()
    section = describe_run(run.log, left, minutes=minutes, sandboxes=sandboxes, runtime=lab.fastest)
    return section.model_copy(update={"took_s": time.perf_counter() - start})


def describe_run(log: Log, left: Sequence[str], *, minutes: float, sandboxes: int, runtime: str) -> Section:
    """The section of a run: what was done, this process over time, and whether the run has failed."""
    settled = [sample for sample in log.samples if sample.at_s >= WARM_UP * minutes * 60] or log.samples
    memory = [(sample.at_s, sample.memory_bytes) for sample in settled]
    descriptors = [(sample.at_s, sample.descriptors) for sample in settled]
    targets = (
        _target("errors", 0, log.errors.total()),
        _target("things left at the end", 0, len(left)),
        _target(
            "growth of this process's memory",
            max(MOST_MEMORY_GROWTH * memory[0][1], LEAST_MEMORY_BYTES),
            growth(memory),
            is_bytes=True,
        ),
        _target(
            "growth of this process's descriptors",
            max(MOST_DESCRIPTOR_GROWTH * descriptors[0][1], LEAST_DESCRIPTORS),
            growth(descriptors),
        ),
    )
    problems = [f"{count} × {problem}" for problem, count in log.errors.most_common(SHOWN_ERRORS)]
    problems += [f"left: {line}" for line in left[:SHOWN_ERRORS]]
    problems += [f"{target.what}: {target.measured.number:.0f}" for target in targets[2:] if not target.reached]
    done = Table(
        title="Operations",
        columns=("", "number", "median", "p99", "most"),
        rows=tuple(
            Row(
                label=name,
                cells=(
                    Value(number=each.count),
                    Value(number=each.quantile(0.5), unit="s"),
                    Value(number=each.quantile(0.99), unit="s"),
                    Value(number=each.most_s, unit="s"),
                ),
            )
            for name, each in sorted(log.durations.items(), key=lambda item: -item[1].count)
        ),
        note=f"At most {HEAVY_AT_ONCE} that start or copy a sandbox at once, and {LIGHT_AT_ONCE} others; waiting for "
        "their turn is not counted. To one part in ten.",
    )
    shown = log.samples[:: max(1, len(log.samples) // 10)]
    over_time = Table(
        title="The process over time",
        columns=("minute", "memory", "descriptors", "threads"),
        rows=tuple(
            Row(
                label=f"{sample.at_s / 60:.1f}",
                cells=(
                    Value(number=sample.memory_bytes, unit="B"),
                    Value(number=sample.descriptors),
                    Value(number=sample.threads),
                ),
            )
            for sample in shown
        ),
    )
    return Section(
        subject="soak",
        title=f"Soak: {sandboxes} sandboxes with {runtime}, busy for {minutes:g} minutes",
        how=HOW.format(every=SAMPLE_S, warm_up=WARM_UP),
        tables=(done, over_time),
        targets=targets,
        failure="; ".join(problems) or None,
    )


def _target(what: str, bound: float, measured: float, *, is_bytes: bool = False) -> Target:
    unit: Unit = "B" if is_bytes else ""
    return Target(
        what=f"soak: {what}",
        bound=Value(number=bound, unit=unit),
        at_most=True,
        measured=Value(number=measured, unit=unit),
    )


@asynccontextmanager
async def _server() -> AsyncIterator[int]:
    """Answers each connection with the first line that it is sent."""

    async def answer(stream: ByteStream) -> None:
        async with stream:
            line = b""
            while not line.endswith(b"\n"):
                line += await stream.receive()
            await stream.send(line)

    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1", backlog=1024) as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, answer)
        yield listener.extra(SocketAttribute.local_port)
        group.cancel_scope.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="how long it runs  [default: 30]")
    parser.add_argument("--sandboxes", type=int, default=200, help="how many sandboxes  [default: 200]")
    parser.add_argument("--runtime", choices=[traits.name for traits in oci.RUNTIMES], help="[default: the fastest]")
    parser.add_argument("--no-results", action="store_true", help="do not write bench/RESULTS.md")
    options = parser.parse_args()
    console = Console(soft_wrap=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes background jobs ignore it
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # sandboxes are destroyed either way
    try:
        return anyio.run(_main, options, console)
    except KeyboardInterrupt:
        console.print("stopped; nothing is left running", highlight=False)
        return 130


async def _main(options: argparse.Namespace, console: Console) -> int:
    runtimes = [options.runtime] if options.runtime else [traits.name for traits in oci.RUNTIMES]
    began, load = datetime.now(UTC), os.getloadavg()
    async with open_lab(console, quick=False, runtimes=runtimes) as lab:
        machine = describe(lab.engine.state_dir)
        show_machine(console, machine, load)
        section = await soak(lab, minutes=options.minutes, sandboxes=options.sandboxes)
    show_section(console, section)
    if not options.no_results:
        write_soak(section, began, machine)
        console.print(f"written to {RESULTS.parent.name}/{RESULTS.name}", highlight=False)
    return 1 if section.failure else 0


if __name__ == "__main__":
    sys.exit(main())
