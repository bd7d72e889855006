"""The results of a run, as data: numbers and their units. Not here: how they are shown (`render.py`).

Times are in seconds, sizes in bytes; `render.py` chooses readable units. The whole `Report` can be written as JSON.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, computed_field

Unit = Literal["s", "B", "B/s", "1/s", "×", ""]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Value(Frozen):
    number: float
    unit: Unit = ""


Cell = Value | str | None
"""None: the cell is empty."""


class Row(Frozen):
    label: str
    cells: tuple[Cell, ...]


class Table(Frozen):
    title: str
    columns: tuple[str, ...]
    """The column titles, that of the label first."""
    rows: tuple[Row, ...]
    note: str | None = None


class Target(Frozen):
    """A figure with a bound, and its measured value."""

    what: str
    bound: Value
    at_most: bool
    """True: the figure may not be above the bound. False: not below it."""
    measured: Value

    @computed_field  # type: ignore[prop-decorator]
    @property
    def reached(self) -> bool:
        if self.at_most:
            return self.measured.number <= self.bound.number
        return self.measured.number >= self.bound.number


class Section(Frozen):
    """One subject."""

    subject: str
    title: str
    how: str
    """How the numbers were measured: what was timed, what was not, and what it is compared with."""
    tables: tuple[Table, ...] = ()
    targets: tuple[Target, ...] = ()
    failure: str | None = None
    """Why it could not be measured. Unset: it was."""
    took_s: float = 0.0


class Machine(Frozen):
    kernel: str
    cpu: str
    cores: int
    memory_bytes: int
    python: str
    cgroups: str
    user: str
    filesystem: str
    """Of the state directory."""
    versions: dict[str, str]
    """Of Atoll and of every program that is measured."""


class Report(Frozen):
    started_at: datetime
    took_s: float
    quick: bool
    machine: Machine
    load_at_start: tuple[float, float, float]
    load_at_end: tuple[float, float, float]
    sections: tuple[Section, ...]

    @property
    def targets(self) -> list[Target]:
        return [target for section in self.sections for target in section.targets]


class Spread(Frozen):
    """Statistics of many samples."""

    count: int
    median: float
    p90: float
    p99: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        if len(samples) < 2:
            return cls(count=len(samples), median=samples[0], p90=samples[0], p99=samples[0])
        cuts = statistics.quantiles(samples, n=100, method="inclusive")
        return cls(count=len(samples), median=statistics.median(samples), p90=cuts[89], p99=cuts[98])


def times(title: str, samples: Mapping[str, Sequence[float]], *, against: str, note: str | None = None) -> Table:
    """A table of durations, each with its ratio to the one whose label, up to a comma, is `against`."""
    reference = Spread.of(samples[against])
    rows = []
    for label, taken in samples.items():
        if not taken:
            continue
        spread = Spread.of(taken)
        rows.append(
            Row(
                label=label,
                cells=(
                    Value(number=spread.median, unit="s"),
                    Value(number=spread.p90, unit="s"),
                    Value(number=spread.p99, unit="s"),
                    Value(number=spread.median / reference.median, unit="×"),
                    Value(number=spread.count),
                ),
            )
        )
    columns = ("", "median", "p90", "p99", f"against {against.partition(',')[0]}", "n")
    return Table(title=title, columns=columns, rows=tuple(rows), note=note)


class Point(Frozen):
    """The samples of one size, of a subject that is measured at several sizes."""

    label: str
    amount: float
    """How much larger it is than the first point, in files, megabytes or copies."""
    samples: tuple[float, ...]
    beside: tuple[float, ...] = ()
    """Samples of the same without Atoll, interleaved. Empty: there is no such baseline."""


def growth(
    title: str, series: Mapping[str, Sequence[Point]], *, each: str, against: str | None = None, note: str | None = None
) -> Table:
    """A table of how durations grow: relative to the first point of the series, and per added `each`."""
    rows = []
    for label, points in series.items():
        first = Spread.of(points[0].samples)
        for number, point in enumerate(points):
            spread = Spread.of(point.samples)
            more = (spread.median - first.median) / point.amount if number and point.amount else None
            cells: list[Cell] = [
                Value(number=spread.median, unit="s"),
                Value(number=min(point.samples), unit="s"),
                Value(number=max(point.samples), unit="s"),
                ratio(spread.median, first.median),
                None if more is None else Value(number=max(more, 0.0), unit="s"),
            ]
            if against is not None:
                cells.append(ratio(spread.median, Spread.of(point.beside).median) if point.beside else None)
            rows.append(Row(label=f"{label}, {point.label}", cells=(*cells, Value(number=spread.count))))
    columns = ["", "median", "least", "most", "against the first", f"for each {each}"]
    columns += [f"against {against}"] if against is not None else []
    return Table(title=title, columns=(*columns, "n"), rows=tuple(rows), note=note)


def ratio(value: float, reference: float) -> Value:
    return Value(number=value / reference, unit="×")
