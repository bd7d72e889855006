"""Warnings here are mostly Inspect's own, of code that is not ours to correct: they are shown, and are no errors."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "default")
