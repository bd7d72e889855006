"""The suite runs on asyncio. Here and not in the plugin, where anyio's own fixture of this name would win."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
