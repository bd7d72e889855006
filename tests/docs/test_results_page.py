"""`bench/RESULTS.md` has two authors, neither of which removes the other's part; what a soak run counts as growth."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from bench.render import markdown, write_report, write_soak
from bench.results import Machine, Report, Section
from bench.soak import Durations, Log, Sample, describe_run, growth

MACHINE = Machine(
    kernel="6",
    cpu="one",
    cores=2,
    memory_bytes=1,
    python="3",
    cgroups="v2",
    user="root",
    filesystem="ext4",
    versions={},
)


def report(title: str) -> Report:
    return Report(
        started_at=datetime.now(UTC),
        took_s=1,
        quick=False,
        machine=MACHINE,
        load_at_start=(0, 0, 0),
        load_at_end=(0, 0, 0),
        sections=(Section(subject="x", title=title, how="…"),),
    )


def soaked(title: str) -> Section:
    return Section(subject="soak", title=title, how="…")


def test_the_benchmarks_and_the_soak_run_keep_each_other_s_part_and_replace_their_own(tmp_path: Path) -> None:
    page = tmp_path / "RESULTS.md"
    write_soak(soaked("first soak"), datetime.now(UTC), MACHINE, page)
    write_report(report("first report"), page)
    write_soak(soaked("second soak"), datetime.now(UTC), MACHINE, page)
    write_report(report("second report"), page)
    write_report(report("third report"), page)
    text = page.read_text()
    assert text.startswith(markdown(report("third report")).partition("- measured")[0])
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## Targets",
        "## third report",
        "## second soak",
    ]
    assert text.count("<!--") == 2
    assert "\n\n\n" not in text


@pytest.mark.parametrize(
    ("figures", "grown"),
    [
        ([100.0] * 40, 0),
        ([100.0, 90.0] * 20, 0),
        ([float(number) for number in range(40)], 20),
        ([100.0] * 20 + [150.0] * 20, 0),  # a step, and no more: what is kept from then on
        ([200.0 - number for number in range(40)], 0),
    ],
)
def test_growth_is_what_still_rises(figures: list[float], grown: float) -> None:
    assert growth([(float(at), figure) for at, figure in enumerate(figures)]) == grown


def test_a_soak_run_fails_on_errors_leftovers_and_growth() -> None:
    def run(log: Log, left: list[str]) -> str | None:
        return describe_run(log, left, minutes=1, sandboxes=1, runtime="crun").failure

    steady = [Sample(at_s, 50e6, 30, 5) for at_s in range(60)]
    assert run(Log(samples=steady), []) is None
    assert "process 7" in str(run(Log(samples=steady), ["+ process 7"]))
    failed = Log(samples=steady)
    failed.errors["exec: no"] += 3
    assert "3 × exec: no" in str(run(failed, []))
    assert "memory" in str(run(Log(samples=[Sample(at_s, 50e6 + at_s * 1e6, 30, 5) for at_s in range(60)]), []))
    assert "descriptors" in str(run(Log(samples=[Sample(at_s, 50e6, 30 + at_s * 2, 5) for at_s in range(60)]), []))


def test_durations_are_counted_in_bounded_memory_to_one_part_in_ten() -> None:
    durations = Durations()
    for number in range(1, 1001):
        durations.add(number / 1000)
    durations.add(0)
    assert durations.count == 1001
    assert durations.most_s == 1
    assert durations.quantile(0.5) == pytest.approx(0.5, rel=0.1)
    assert durations.quantile(0.99) == pytest.approx(0.99, rel=0.1)
