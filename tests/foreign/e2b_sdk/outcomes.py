"""A pytest plugin for E2B's tests: it writes what became of each. `inside.py` loads it where they run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


class Outcomes:
    """What became of each test: the worst of its set-up, itself and its end."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._outcomes: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        known = self._outcomes.setdefault(report.nodeid, {"outcome": "passed", "text": ""})
        if known["outcome"] == "passed" and report.outcome != "passed":
            known.update(outcome=report.outcome, text=str(report.longrepr)[-4000:])

    def pytest_sessionfinish(self) -> None:
        self._file.write_text(json.dumps(self._outcomes))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(Path(os.environ["E2B_OUTCOMES"])))
