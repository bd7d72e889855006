"""Every test of the suite runs on asyncio, is checked for leaks, and fails when it blocks.

`anyio_backend` is here and not in the plugin, where anyio's own fixture of this name would win.
"""

from __future__ import annotations

import pytest

from atoll.testing.plugin import check_for_leaks

BLOCKED_AFTER_S = 120
"""Above `TEST_BOUND_S`: a test that blocks the event loop cannot be cancelled and is ended by pytest-timeout."""


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> None:
    check_for_leaks(collector, name, obj)
    if collector.istestfunction(obj, name):
        pytest.mark.timeout(BLOCKED_AFTER_S)(obj)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
