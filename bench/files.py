"""Throughput of file transfers: large files, and many small ones."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

import anyio

import atoll
from atoll.contract.model import RuntimeName
from bench.lab import Lab
from bench.results import Row, Section, Table, Target, Unit, Value, ratio
from bench.sampling import timed

HOW = """\
Large files are written with `files.write_bytes(path, chunks)`, in chunks of 1 MiB, and read with
`files.stream(path)`; on the host with `open`, `write` and `read` in chunks of 1 MiB, on the same file system,
interleaved. A file is read right after it was written, so it comes from memory on both sides. Dirty pages of a write
are flushed (`sync`) before the next one, untimed. *Atomic* is the API's default: write a temporary file, fsync,
rename; the host then does the same. MB are 10⁶ bytes. Small files are written and read one after another with
`files.write_bytes` and `files.read_bytes`, each call awaited before the next."""

CHUNK = os.urandom(1024 * 1024)
SMALL = os.urandom(4096)
MIB = 1024 * 1024

SMALL_BOUNDS: dict[RuntimeName, tuple[float, float]] = {"crun": (1500, 3000), "runsc": (500, 500)}
"""Files of 4 KiB per second, written (not atomically) and read."""


async def measure(lab: Lab) -> Section:
    tables: list[Table] = []
    reads: list[float] = []
    async with AsyncExitStack() as stack:
        places: list[Place] = [Host(lab.scratch)]
        for runtime in lab.runtimes:
            if runtime != "runc":  # file operations are the same as with crun
                box = await stack.enter_async_context(lab.sandbox(runtime))
                places.append(Inside(f"Atoll, {runtime}", box))
        for size_mib, rounds in ((256, lab.amount(5, 2)), (lab.amount(1024, 512), lab.amount(3, 1))):
            table, read = await _large(lab, places[: None if size_mib == 256 else 2], size_mib * MIB, rounds)
            tables.append(table)
            reads.append(read)
        table, rates = await _small(lab, places)
        tables.append(table)
    targets = [_at_least(f"reading a file with {lab.fastest} (the slower of both sizes)", 400e6, min(reads), "B/s")]
    for name, bounds in SMALL_BOUNDS.items():
        if f"Atoll, {name}" in rates:
            for kind, bound, rate in zip(("written", "read"), bounds, rates[f"Atoll, {name}"], strict=True):
                targets.append(_at_least(f"files of 4 KiB {kind} with {name}, one after another", bound, rate, "1/s"))
    return Section(subject="files", title="Files", how=HOW, tables=tuple(tables), targets=tuple(targets))


def _at_least(what: str, bound: float, measured: float, unit: Unit) -> Target:
    return Target(
        what=what, bound=Value(number=bound, unit=unit), at_most=False, measured=Value(number=measured, unit=unit)
    )


class Place(Protocol):
    """Where files are: on the host, or in a sandbox."""

    label: str

    async def write(self, size: int, atomic: bool) -> None: ...

    async def read(self) -> int:
        """Read the file that was written last, in chunks. Returns its size."""
        ...

    async def put(self, number: int, atomic: bool) -> None: ...

    async def get(self, number: int) -> bytes: ...


class Host:
    label = "host, plain Python"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        (directory / "small").mkdir()

    async def write(self, size: int, atomic: bool) -> None:
        self._write("large", [CHUNK] * (size // len(CHUNK)), atomic)

    async def read(self) -> int:
        seen = 0
        with open(self._directory / "large", "rb", buffering=0) as file:
            while data := file.read(len(CHUNK)):
                seen += len(data)
        return seen

    async def put(self, number: int, atomic: bool) -> None:
        self._write(f"small/{number}", [SMALL], atomic)

    async def get(self, number: int) -> bytes:
        return (self._directory / "small" / str(number)).read_bytes()

    def _write(self, name: str, chunks: Sequence[bytes], atomic: bool) -> None:
        path = self._directory / name
        target = path.with_suffix(".new") if atomic else path
        with open(target, "wb", buffering=0) as file:
            file.writelines(chunks)
            if atomic:
                os.fsync(file.fileno())
        if atomic:
            target.rename(path)


class Inside:
    def __init__(self, label: str, box: atoll.Sandbox) -> None:
        self.label = label
        self._files = box.files

    async def write(self, size: int, atomic: bool) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(size // len(CHUNK)):
                yield CHUNK

        await self._files.write_bytes("large", chunks(), atomic=atomic)

    async def read(self) -> int:
        seen = 0
        async for data in self._files.stream("large"):
            seen += len(data)
        return seen

    async def put(self, number: int, atomic: bool) -> None:
        await self._files.write_bytes(f"small/{number}", SMALL, atomic=atomic)

    async def get(self, number: int) -> bytes:
        return await self._files.read_bytes(f"small/{number}")


# ---- large ----


async def _large(lab: Lab, places: Sequence[Place], size: int, rounds: int) -> tuple[Table, float]:
    """The table, and the read throughput of the fastest runtime."""
    taken: dict[tuple[str, str], list[float]] = {}
    with lab.progress(f"a file of {size // MIB} MiB, interleaved", rounds * len(places)) as advance:
        for _ in range(rounds):
            for place in places:
                for kind, seconds in (await _round(place, size)).items():
                    taken.setdefault((place.label, kind), []).append(seconds)
                advance()
    rates = {key: size / statistics.median(seconds) for key, seconds in taken.items()}
    rows = []
    for place in places:
        cells: list[Value] = []
        for kind in ("read", "write", "atomic"):
            rate = rates[place.label, kind]
            cells += [Value(number=rate, unit="B/s"), ratio(rate, rates[places[0].label, kind])]
        rows.append(Row(label=place.label, cells=tuple(cells)))
    columns = ("", "read", "against host", "write", "against host", "write, atomic", "against host")
    return Table(title=f"One file of {size // MIB} MiB", columns=columns, rows=tuple(rows)), rates[
        places[1].label, "read"
    ]


async def _round(place: Place, size: int) -> dict[str, float]:
    os.sync()
    atomic = await timed(place.write(size, atomic=True))
    os.sync()
    write = await timed(place.write(size, atomic=False))
    start = time.perf_counter()
    seen = await place.read()
    read = time.perf_counter() - start
    if seen != size:
        raise RuntimeError(f"{place.label}: {seen} bytes were read, {size} written")
    return {"atomic": atomic, "write": write, "read": read}


# ---- small ----


async def _small(lab: Lab, places: Sequence[Place]) -> tuple[Table, dict[str, tuple[float, float]]]:
    """The table, and by its rows how many files were written and read per second."""
    count = lab.amount(1000, 100)
    ways = [("", False, 1), (", atomic", True, 1), (", atomic, 16 at once", True, 16)]
    found: list[tuple[str, float, float]] = []
    with lab.progress(f"{count} files of 4 KiB", len(places) * len(ways)) as advance:
        for place in places:
            for suffix, atomic, at_once in ways:
                if at_once == 1 or place is not places[0]:
                    found.append((place.label + suffix, *await _many(place, count, atomic, at_once)))
                advance()
    _, host_write, host_read = found[0]
    rows = tuple(
        Row(
            label=label,
            cells=(
                Value(number=write, unit="1/s"),
                ratio(write, host_write),
                Value(number=read, unit="1/s"),
                ratio(read, host_read),
            ),
        )
        for label, write, read in found
    )
    columns = ("", "written", "against host", "read", "against host")
    table = Table(title=f"{count} files of 4 KiB, sequential unless stated otherwise", columns=columns, rows=rows)
    return table, {label: (write, read) for label, write, read in found}


async def _many(place: Place, count: int, atomic: bool, at_once: int) -> tuple[float, float]:
    """How many files are written and read per second."""

    async def put(number: int) -> None:
        await place.put(number, atomic)

    async def get(number: int) -> None:
        if await place.get(number) != SMALL:
            raise RuntimeError(f"{place.label}: a file is not what was written")

    os.sync()
    written = await timed(_each(count, at_once, put))
    read = await timed(_each(count, at_once, get))
    return count / written, count / read


async def _each(count: int, at_once: int, operation: Callable[[int], Awaitable[None]]) -> None:
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await operation(number)

    async with anyio.create_task_group() as group:
        for _ in range(at_once):
            group.start_soon(work)
