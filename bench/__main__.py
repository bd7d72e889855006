"""Runs the benchmarks: all of them, or the chosen ones."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import anyio
from rich.console import Console

from atoll.drivers import oci
from bench import (
    checkpoints,
    code,
    commands,
    creation,
    e2b,
    egress,
    files,
    forks,
    mcp,
    memory,
    output,
    platform,
    previews,
    reactive,
    saving,
    server,
    sleeping,
    startup,
    thousand,
    tools,
    warm,
)
from bench.btrfs import keep_mounts_apart
from bench.lab import Lab, open_lab
from bench.machine import describe
from bench.render import show_machine, show_section, show_targets, write_report
from bench.results import Report, Section

RUNTIMES = tuple(traits.name for traits in oci.RUNTIMES)

WIDTH = 140
SUBJECTS: dict[str, Callable[[Lab], Awaitable[Section]]] = {
    "create": creation.measure,
    "warm": warm.measure,
    "exec": commands.measure,
    "files": files.measure,
    "output": output.measure,
    "egress": egress.measure,
    "preview": previews.measure,
    "memory": memory.measure,
    "sleep": sleeping.measure,
    "checkpoint": checkpoints.measure,
    "save": saving.measure,
    "fork": forks.measure,
    "thousand": thousand.measure,
    "tools": tools.measure,
    "mcp": mcp.measure,
    "code": code.measure,
    "server": server.measure,
    "platform": platform.measure,
    "reactive": reactive.measure,
    "e2b": e2b.measure,
    "startup": startup.measure,
}


def main() -> int:
    options = _parser().parse_args()
    console = Console(file=sys.stderr if options.json == "-" else sys.stdout)
    if not console.is_terminal:
        console = Console(file=console.file, width=WIDTH)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes background jobs ignore it
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # sandboxes are destroyed either way
    keep_mounts_apart()
    try:
        report = anyio.run(_run, options, console)
    except KeyboardInterrupt:
        console.print("stopped; nothing is left running", highlight=False)
        return 130
    if options.json:
        text = report.model_dump_json(indent=2)
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(text + "\n")
    complete = not options.quick and not options.only and not options.runtime and not options.many
    if complete and not options.no_results:
        write_report(report)
        console.print("written to bench/RESULTS.md", highlight=False)
    return 1 if any(section.failure for section in report.sections) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure Atoll, compared with this machine without it. A full run writes "
        "bench/RESULTS.md. Exits with 1 if a measurement failed; a missed target is not a failure.",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=SUBJECTS,
        metavar="SUBJECT",
        help=f"measure only this subject; repeatable. One of: {', '.join(SUBJECTS)}",
    )
    parser.add_argument(
        "--runtime", action="append", choices=RUNTIMES, metavar="NAME", help="measure only this runtime; repeatable"
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the samples, to check that everything works")
    parser.add_argument(
        "--many",
        type=int,
        metavar="N",
        help="have N sandboxes alive at once, instead of 1000, in the subject `thousand`; 5000 take 4 GB and minutes",
    )
    parser.add_argument("--json", metavar="FILE", help="also write all results as JSON; '-' is standard output")
    parser.add_argument("--no-results", action="store_true", help="do not write bench/RESULTS.md")
    return parser


async def _run(options: argparse.Namespace, console: Console) -> Report:
    started_at, start, load = datetime.now(UTC), time.perf_counter(), os.getloadavg()
    sections = []
    async with open_lab(console, quick=options.quick, runtimes=options.runtime or RUNTIMES) as lab:
        lab.many = options.many
        machine = describe(lab.engine.state_dir)
        show_machine(console, machine, load)
        for subject, measure in SUBJECTS.items():
            if not options.only or subject in options.only:
                console.print()
                sections.append(await _measured(lab, subject, measure))
                show_section(console, sections[-1])
    report = Report(
        started_at=started_at,
        took_s=time.perf_counter() - start,
        quick=options.quick,
        machine=machine,
        load_at_start=load,
        load_at_end=os.getloadavg(),
        sections=tuple(sections),
    )
    if len(sections) > 1:
        console.print("\n[bold]Targets[/bold]")
        show_targets(console, report.targets)
    return report


async def _measured(lab: Lab, subject: str, measure: Callable[[Lab], Awaitable[Section]]) -> Section:
    start = time.perf_counter()
    try:
        section = await measure(lab)
    except Exception as error:  # noqa: BLE001 - one subject that fails must not take the others with it
        words = _words(error).replace(str(lab.engine.state_dir.parent), "…")  # the page is published
        section = Section(subject=subject, title=subject, how="", failure=words)
    return section.model_copy(update={"took_s": time.perf_counter() - start})


def _words(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(dict.fromkeys(map(_words, error.exceptions)))
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
