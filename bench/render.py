"""Renders results for a terminal and as Markdown, and writes the page `RESULTS`. Not here: what was measured.

The page has two parts, each written by a run of its own that keeps the other: the benchmarks, and the soak run, whose
part is between two comments.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table as Grid

from bench.results import Cell, Machine, Report, Section, Table, Target, Value

INTRODUCTION = """\
Written by `make bench`, which repeats all of it on your machine; `python -m bench --help` shows how to run parts of
it. Figures are compared with what the same machine does without Atoll, interleaved in the same loop, so that noise
affects both."""

RESULTS = Path(__file__).parent / "RESULTS.md"
SOAK, SOAK_END = "<!-- written by `make soak` -->", "<!-- end of what `make soak` has written -->"

_SCALES = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "B": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
    "B/s": ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")),
}


def text(cell: Cell) -> str:
    """A cell with three significant digits and its unit."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    number, unit = cell.number, cell.unit
    if number == 0:
        return "0"
    if unit in _SCALES:
        scales = _SCALES[unit]
        factor, name = next((scale for scale in scales if abs(number) >= scale[0]), scales[-1])
        return f"{_digits(number / factor)} {name}"
    if unit == "×":
        return f"{_digits(number)} ×"
    if unit == "1/s":
        return f"{_digits(number)} /s"
    return f"{number:,.0f}".replace(",", " ")


def _digits(number: float) -> str:
    magnitude = abs(number)
    if magnitude >= 100:
        return f"{number:.0f}"
    return f"{number:.1f}" if magnitude >= 10 else f"{number:.2f}"


def verdict(target: Target) -> str:
    return "reached" if target.reached else "not reached"


def _bound(target: Target) -> str:
    return f"{'≤' if target.at_most else '≥'} {text(target.bound)}"


# ---- in a terminal ----


def show_machine(console: Console, machine: Machine, load: tuple[float, float, float]) -> None:
    for line in _machine_lines(machine):
        console.print(line, highlight=False)
    console.print(f"load average at start: {_load(load)}", highlight=False)


def show_section(console: Console, section: Section) -> None:
    if section.failure:
        console.print(f"[red]{section.title}: failed:[/red] {section.failure}", highlight=False)
    for table in section.tables:
        console.print(
            _grid(
                f"{section.title}: {table.title}", table.columns, (_cells(table, row) for row in range(len(table.rows)))
            )
        )
        if table.note:
            console.print(f"  {table.note}", highlight=False, style="dim")
    if section.targets:
        show_targets(console, section.targets)


def show_targets(console: Console, targets: Iterable[Target]) -> None:
    for target in targets:
        colour = "green" if target.reached else "red"
        figures = f"{text(target.measured)} (target {_bound(target)})"
        console.print(f"  [{colour}]{verdict(target)}[/{colour}]  {target.what}: {figures}", highlight=False)


def _grid(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Grid:
    grid = Grid(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        grid.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid


def _cells(table: Table, number: int) -> tuple[str, ...]:
    row = table.rows[number]
    return (row.label, *map(text, row.cells))


# ---- as Markdown ----


def markdown(report: Report) -> str:
    """The whole report as a Markdown page."""
    parts = [
        "# Benchmark results",
        INTRODUCTION,
        "\n".join(
            [
                f"- measured {report.started_at:%Y-%m-%d %H:%M} UTC, in {text(Value(number=report.took_s, unit='s'))}",
                *(f"- {line}" for line in _machine_lines(report.machine)),
                f"- load average at the start: {_load(report.load_at_start)}, at the end: {_load(report.load_at_end)}",
            ]
        ),
        "## Targets",
        _targets(report.targets),
    ]
    for section in report.sections:
        parts += [f"## {section.title}", *_section(section)]
    return "\n\n".join(parts) + "\n"


def write_report(report: Report, page: Path = RESULTS) -> None:
    """Write the page with a new report. What a soak run has written stays."""
    page.write_text(markdown(report) + _parts(page)[1])


def write_soak(section: Section, began: datetime, machine: Machine, page: Path = RESULTS) -> None:
    """Write the page with the section of a new soak run. What the benchmarks have written stays."""
    facts = [f"- measured {began:%Y-%m-%d %H:%M} UTC, in {text(Value(number=section.took_s, unit='s'))}"]
    facts += [f"- {line}" for line in _machine_lines(machine)]
    parts = [SOAK, f"## {section.title}", "\n".join(facts), *_section(section)]
    parts += [_targets(section.targets), SOAK_END]
    page.write_text(_parts(page)[0].rstrip("\n") + "\n\n" + "\n\n".join(parts) + "\n")


def _parts(page: Path) -> tuple[str, str]:
    """What is written on the page by the benchmarks, and by the soak run with an empty line before it."""
    whole = page.read_text() if page.exists() else "# Benchmark results\n"
    before, begin, rest = whole.partition(SOAK)
    soak, end, after = rest.partition(SOAK_END)
    if not (begin and end):
        return whole, ""
    return before + after.lstrip("\n"), f"\n{begin}{soak}{end}\n"


def _section(section: Section) -> list[str]:
    parts = [section.how.replace("\n", " ")]
    if section.failure:
        parts.append(f"**Failed:** {section.failure}")
    for table in section.tables:
        parts += [f"### {table.title}", _rows(table.columns, (_cells(table, row) for row in range(len(table.rows))))]
        if table.note:
            parts.append(table.note)
    return parts


def _targets(targets: Iterable[Target]) -> str:
    return _rows(
        ("target", "bound", "measured", ""),
        ((target.what, _bound(target), text(target.measured), verdict(target)) for target in targets),
    )


def _rows(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    rule = ("---", *("--:" for _ in columns[1:]))
    return "\n".join("| " + " | ".join(line) + " |" for line in itertools.chain((columns, rule), rows))


def _machine_lines(machine: Machine) -> list[str]:
    memory = text(Value(number=machine.memory_bytes, unit="B"))
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return [
        f"{machine.cores} cores of {machine.cpu}, {memory} of memory, as {machine.user}",
        f"Linux {machine.kernel}, cgroups {machine.cgroups}, state directory on {machine.filesystem}, {machine.python}",
        versions,
    ]


def _load(load: tuple[float, float, float]) -> str:
    return " ".join(f"{number:.2f}" for number in load)
