"""How long checkpoints of files take, by the amount written, on two file systems."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

import atoll
from bench.btrfs import Unavailable
from bench.lab import Lab
from bench.machine import filesystem
from bench.results import Point, Section, Spread, Table, Target, Value, growth
from bench.sampling import program, timed

HOW = """\
A new sandbox writes the given amount, which is flushed (`sync`). Then, each timed separately: a checkpoint while it
runs, which copies what was written, interleaved with `cp -a` of the same tree on the same file system; one more
checkpoint, with nothing changed in between; the sandbox is put to sleep, and a checkpoint of it then, which commits
the active layer without touching its files, interleaved with the host writing two files of 4 KiB and flushing and
renaming each, which is all that a commit has to wait for; that checkpoint is restored, until the sandbox answers
`true`; the same amount is written once more, and undone by restoring the same checkpoint again. Files have 1 KiB
each, in directories of a thousand. The btrfs is created for this in a sparse file on the first file system; there
`cp` shares data (`--reflink=always`), as Atoll's own copy does."""

COMMITTED = "stopped: checkpoint"
COPIED = "running: checkpoint"
NEXT = "running: the next checkpoint"
COPY = "cp -a"
SHARED = "cp -a --reflink"
FLUSHED = "two files, flushed"
RESTORED = "restore, `true`"
UNDONE = "undo the same amount, `true`"
UNDOINGS = 2
"""The number of rounds with this step, which takes longest."""
BOUND = Value(number=0.010, unit="s")
MIB = 1024 * 1024

_FILES = """
import os
data = os.urandom(1024)
for number in range({count}):
    if number % 1000 == 0:
        os.makedirs(f"{place}/{{number // 1000}}")
    with open(f"{place}/{{number // 1000}}/{{number}}", "wb", buffering=0) as file:
        file.write(data)
"""
_BYTES = """
import os
data = os.urandom({MIB})
with open("{place}", "wb", buffering=0) as file:
    for _ in range({count}):
        file.write(data)
"""


@dataclass(frozen=True)
class Size:
    label: str
    files: int
    mib: int
    rounds: int

    @property
    def amount(self) -> float:
        """Files, or megabytes."""
        return self.files or self.mib * MIB / 1e6

    async def write(self, box: atoll.Sandbox, place: str) -> None:
        """Write this amount inside the sandbox. It is on the disk when this returns."""
        if self.files or self.mib:
            script = _FILES if self.files else _BYTES
            text = script.format(place=place, count=self.files or self.mib, MIB=MIB)
            done = await box.exec(["python3", "-c", text])
            if done.exit_code != 0:
                raise RuntimeError(f"nothing could be written: {done.stderr[-300:]}")
        os.sync()


async def measure(lab: Lab) -> Section:
    sizes = (
        Size("0 files", 0, 0, lab.amount(7, 2)),
        Size("1 000 files", 1000, 0, lab.amount(5, 1)),
        Size("5 000 files" if lab.quick else "50 000 files", lab.amount(50_000, 5_000), 0, lab.amount(3, 1)),
        Size("128 MiB in a file" if lab.quick else "1 GiB in a file", 0, lab.amount(1024, 128), lab.amount(3, 1)),
    )
    name = filesystem(lab.engine.state_dir)
    tables, targets = await _measured(lab, name, sizes)
    if name != "btrfs":
        try:
            async with lab.on_btrfs() as other:
                more, others = await _measured(other, "btrfs", sizes)
                tables, targets = tables + more, targets + others
        except Unavailable as error:
            tables[-1] = tables[-1].model_copy(update={"note": f"Not measured on btrfs: {error}."})
    return Section(
        subject="checkpoint", title="Checkpoints of files", how=HOW, tables=tuple(tables), targets=tuple(targets)
    )


async def _measured(lab: Lab, name: str, sizes: Sequence[Size]) -> tuple[list[Table], list[Target]]:
    """The table and the target of one file system."""
    async with lab.sandbox():  # prepares the image
        pass
    host = SHARED if name == "btrfs" else COPY
    series: dict[str, list[Point]] = {}
    commits = []
    for size in sizes:
        with lab.progress(f"{size.label} on {name}", size.rounds) as advance:
            rounds = []
            for number in range(size.rounds):
                rounds.append(await _round(lab, host, size, number))
                advance()
        samples = {step: tuple(taken[step] for taken in rounds if step in taken) for step in rounds[0]}
        for step, taken in samples.items():
            beside = samples.get({COPIED: host, COMMITTED: FLUSHED}.get(step, ""), ())
            point = Point(label=size.label, amount=size.amount, samples=taken, beside=beside)
            series.setdefault(step, []).append(point)
        commits.append(Spread.of(samples[COMMITTED]).median)
    table = growth(f"On {name}, with {lab.fastest}", series, each="file, or MB", against="host")
    target = Target(
        what=f"checkpoint of a stopped sandbox on {name}, the slowest size",
        bound=BOUND,
        at_most=True,
        measured=Value(number=max(commits), unit="s"),
    )
    return [table], [target]


async def _round(lab: Lab, host: str, size: Size, number: int) -> dict[str, float]:
    copy_first = number % 2 == 0
    copy = lab.scratch / "copy"
    async with lab.sandbox() as box:
        await size.write(box, "/home/user/first")
        upper = _upper(lab, box)
        copied = program(["cp", "-a", *(["--reflink=always"] if host == SHARED else []), str(upper), str(copy)])
        taken = {}
        try:
            if copy_first:
                taken[COPIED] = await timed(box.checkpoint())
                os.sync()
            taken[host] = await copied()
            if not copy_first:
                os.sync()
                taken[COPIED] = await timed(box.checkpoint())
        finally:
            shutil.rmtree(copy, ignore_errors=True)
        os.sync()
        taken[NEXT] = await timed(box.checkpoint())
        await box.sleep()
        os.sync()
        taken[COMMITTED] = await timed(box.checkpoint("committed"))
        taken[FLUSHED] = _flushed(lab.scratch)
        taken[RESTORED] = await timed(_restored(box, "committed"))
        if number < UNDOINGS:
            await size.write(box, "/home/user/second")
            dropped = _upper(lab, box)
            taken[UNDONE] = await timed(_restored(box, "committed"))
            while dropped.exists():  # removed in the background; wait, so that it does not affect the next measurement
                await anyio.sleep(0.05)
        for checkpoint in await box.checkpoints():
            await lab.engine.delete_checkpoint(checkpoint.id)
    return {step: taken[step] for step in (COMMITTED, FLUSHED, COPIED, host, NEXT, RESTORED, UNDONE) if step in taken}


async def _restored(box: atoll.Sandbox, checkpoint: str) -> None:
    await box.restore(checkpoint)
    await box.exec(["true"])


def _flushed(directory: Path) -> float:
    start = time.perf_counter()
    for number in range(2):
        path = directory / f"flushed-{number}"
        with open(path.with_suffix(".new"), "wb", buffering=0) as file:
            file.write(bytes(4096))
            os.fsync(file.fileno())
        path.with_suffix(".new").rename(path)
    return time.perf_counter() - start


def _upper(lab: Lab, box: atoll.Sandbox) -> Path:
    """The upper directory of the sandbox's active layer."""
    state = lab.engine.state_dir
    manifest = json.loads((state / "sandboxes" / box.id / "manifest.json").read_text())
    return state / "layers" / str(manifest["active_layer"]) / "upper"
