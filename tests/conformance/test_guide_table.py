"""The guide's table of what is kept: it says what the drivers declare, which the suite's `test_kept.py` tests."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from atoll import Capabilities
from atoll.contract.model import RuntimeName
from atoll.testing.conformance.test_kept import EVENTS

GUIDE = Path(__file__).parents[2] / "docs/guide.md"


def table() -> dict[str, dict[str, str]]:
    """By event and runtime: what is kept."""
    lines = itertools.dropwhile(lambda line: not line.startswith("| after "), GUIDE.read_text().splitlines())
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in itertools.takewhile(bool, lines)]
    (_, *runtimes), _, *rest = rows
    return {event: dict(zip(runtimes, kept, strict=True)) for event, *kept in rest}


def test_the_table_has_a_row_for_each_event() -> None:
    assert table().keys() == EVENTS.keys()


@pytest.mark.parametrize("name", EVENTS)
async def test_the_table_says_what_is_kept(
    capabilities: Capabilities, runtime_name: RuntimeName, as_root: None, name: str
) -> None:
    row = table()[name]
    if runtime_name not in row:
        pytest.skip(f"the guide's table has no column for {runtime_name}")
    assert row[runtime_name] == EVENTS[name].kept(capabilities)
