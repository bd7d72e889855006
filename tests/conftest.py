"""What is particular to this repository's tests: leak checks by directory, reports, and how xdist spreads them.

Fixtures and the leak check itself are in `atoll.testing.plugin`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.testing.plugin import check_for_leaks

CHECKED_FOR_LEAKS = {Path(__file__).parent / "attacks", Path(__file__).parent / "conformance"}
REPORTED = "reported"
"""The name of a test's property that is printed at the end, though the test passed."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "proves(*fields): the fields of tools' schemas that a test is about")


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> None:
    if collector.path.parent in CHECKED_FOR_LEAKS:
        check_for_leaks(collector, name, obj)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests report, such as what a run within a run skipped."""
    for report in terminalreporter.getreports("passed"):
        lines = [value for name, value in report.user_properties if name == REPORTED]
        if lines and report.when == "call":
            terminalreporter.section(report.nodeid.partition("::")[2], sep="-")
            for line in lines:
                terminalreporter.line(str(line))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With `--dist loadfile`, put together what belongs together, which is mostly a file."""
    from tests.spreading import Spread

    return Spread(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
