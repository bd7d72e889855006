"""Reactive graphs: from a change to rest, at two sizes, beside reaktiv; and an `exec` node that runs again."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import anyio

from atoll import reactive
from bench.lab import Lab
from bench.results import Cell, Row, Section, Spread, Table, Target, Value, ratio

HOW = """\
Each graph has one cell. A fan is nodes that read it; a chain is nodes that each read the one before; a lattice has
layers of ten, each of whose nodes reads two of the layer before. A node adds up what it reads, modulo a prime. Timed is
`cell.set` until every node has its new value. Beside it reaktiv on the same graphs, which computes what is read: with
an effect that reads the last nodes, as its programs observe a change; and with the last nodes read by hand after it.
Where it fails, or one change takes it longer than a second, that is said. An `exec` node runs `echo N` in a sandbox of
its own, which the graph has prepared from a warm pool: from `cell.set` to the result, with the fastest runtime."""

SIZES = (1_000, 10_000)
SHAPES = ("fan", "chain", "lattice")
LAYER = 10
PRIME = 1_000_003
PATIENCE_S = 1.0


async def measure(lab: Lab) -> Section:
    rows: list[Row] = []
    targets = []
    for shape in SHAPES:
        medians = []
        for size in SIZES:
            ours = Spread.of(await _ours(shape, size, lab.amount(30, 5)))
            medians.append(ours.median)
            theirs = [_theirs(shape, size, lab.amount(10, 3), effect=effect) for effect in (True, False)]
            rows.append(
                Row(
                    label=f"{shape}, {size:,} nodes",
                    cells=(
                        Value(number=ours.median, unit="s"),
                        Value(number=ours.p90, unit="s"),
                        Value(number=ours.median / size, unit="s"),
                        *theirs,
                    ),
                )
            )
        targets += [
            Target(
                what=f"reactive: a {shape} of 1,000 nodes, from a change to rest, median",
                bound=Value(number=0.020, unit="s"),
                at_most=True,
                measured=Value(number=medians[0], unit="s"),
            ),
            Target(
                what=f"reactive: a {shape} of ten times the nodes, against ten times the time",
                bound=Value(number=1.5, unit="×"),
                at_most=True,
                measured=ratio(medians[1], 10 * medians[0]),
            ),
        ]
    reruns = Spread.of(await _reruns(lab))
    targets.append(
        Target(
            what="reactive: an exec node runs again, with a prepared sandbox, median",
            bound=Value(number=0.008, unit="s"),
            at_most=True,
            measured=Value(number=reruns.median, unit="s"),
        )
    )
    columns = ("", "median", "p90", "for each node", "reaktiv, effect", "reaktiv, read")
    commands = Row(
        label=f"`echo`, {lab.fastest}",
        cells=(
            Value(number=reruns.median, unit="s"),
            Value(number=reruns.p90, unit="s"),
            Value(number=reruns.p99, unit="s"),
            Value(number=reruns.count),
        ),
    )
    return Section(
        subject="reactive",
        title="Reactive graphs",
        how=HOW,
        tables=(
            Table(title="From a change to rest", columns=columns, rows=tuple(rows)),
            Table(title="An exec node runs again", columns=("", "median", "p90", "p99", "n"), rows=(commands,)),
        ),
        targets=tuple(targets),
    )


def _build(
    shape: str, size: int, source: Any, make: Callable[[Callable[[], int]], Any], read: Callable[[Any], int]
) -> list[Any]:
    """The nodes that nothing reads."""

    def add(*nodes: Any) -> Any:
        return make(lambda: sum(map(read, nodes)) % PRIME + 1)

    if shape == "fan":
        return [add(source) for _ in range(size)]
    if shape == "chain":
        node = source
        for _ in range(size):
            node = add(node)
        return [node]
    layer = [source] * LAYER
    for _ in range(size // LAYER):
        layer = [add(layer[number], layer[(number + 1) % LAYER]) for number in range(LAYER)]
    return layer


async def _ours(shape: str, size: int, rounds: int) -> list[float]:
    samples = []
    async with reactive.Graph():
        source = reactive.cell(0)
        last = _build(shape, size, source, reactive.computed, reactive.Node.get)
        gc.collect()
        for number in range(1, rounds + 1):
            before = last[-1].get()
            start = time.perf_counter()
            source.set(number)
            samples.append(time.perf_counter() - start)
            assert last[-1].get() != before
    return samples


def _theirs(shape: str, size: int, rounds: int, *, effect: bool) -> Cell:
    if importlib.util.find_spec("reaktiv") is None:
        return "not installed: `.venv/bin/pip install reaktiv` adds it"
    # With an effect, its time for a lattice doubles with each layer: small ones say whether a large one ever ends.
    for layers in range(4, 30, 2) if shape == "lattice" and effect else ():
        samples = _their_samples(shape, layers * LAYER, 1, effect=True)
        if samples and samples[0] > PATIENCE_S:
            return f"{samples[0]:.1f} s at {layers * LAYER} nodes"
    try:
        samples = _their_samples(shape, size, rounds, effect=effect)
    except RecursionError:
        return "RecursionError"
    return Value(number=Spread.of(samples).median, unit="s")


def _their_samples(shape: str, size: int, rounds: int, *, effect: bool) -> list[float]:
    """
    Raises:
        RecursionError: the graph is too deep for it.
    """
    reaktiv = importlib.import_module("reaktiv")
    source = reaktiv.Signal(0)
    last = _build(shape, size, source, reaktiv.Computed, lambda node: node())
    seen: list[int] = []

    def read() -> None:
        seen.append(sum(node() for node in last))

    read()  # in an effect, the error would be printed and forgotten
    observer = reaktiv.Effect(read) if effect else None
    samples = []
    for number in range(1, rounds + 1):
        start = time.perf_counter()
        source.set(number)
        if observer is None:
            read()
        samples.append(time.perf_counter() - start)
        assert seen[-1] != seen[-2]
    if observer is not None:
        observer.dispose()
    return samples


async def _reruns(lab: Lab) -> list[float]:
    await lab.engine.warm(2, runtime=lab.fastest)
    samples = []
    try:
        async with reactive.Graph(lab.engine):
            number = reactive.cell(0)
            run = reactive.exec(reactive.computed(lambda: f"echo {number.get()}"))
            await run
            number.set(-1)
            await run
            rounds = lab.amount(200, 20)
            used: set[str] = set()
            with lab.progress("an exec node runs again", rounds) as advance:
                for value in range(1, rounds + 1):
                    await _prepared(lab, used)
                    start = time.perf_counter()
                    number.set(value)
                    result = await run
                    samples.append(time.perf_counter() - start)
                    assert result.stdout == f"{value}\n"
                    advance()
    finally:
        await lab.engine.warm(0, runtime=lab.fastest)
    return samples


async def _prepared(lab: Lab, used: set[str]) -> None:
    """Wait until the pool is full, what was used is gone, and the next sandbox is prepared. That counts as used."""
    while True:
        names = {box.name for box in await lab.engine.list()}
        full = all(pool.ready >= pool.count for pool in await lab.engine.warm_pools())
        if full and len(names) == 1 and not names & used:
            break
        await anyio.sleep(0.01)
    used |= names
    await anyio.sleep(0.1)
