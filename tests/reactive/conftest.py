"""A graph for each test, on the engine of its module; and a site."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from atoll.reactive import Graph
from tests.reactive.site import Site, serving_site

if TYPE_CHECKING:
    from atoll import Engine


@pytest.fixture
async def graph(host: Engine) -> AsyncIterator[Graph]:
    """The current graph of a test. When it has ended, no sandbox is left."""
    async with Graph(host) as graph:
        yield graph
    assert await host.list() == []


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serving_site() as site:
        yield site
