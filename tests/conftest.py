"""How this repository's tests are spread over processes. Fixtures and the leak check are in `atoll.testing.plugin`."""

from __future__ import annotations

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With `--dist loadfile`, put together what belongs together, which is mostly a file."""
    from tests.spreading import Spread

    return Spread(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
