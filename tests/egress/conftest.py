"""A world on loopback, and servers in it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.egress.world import SITE, World, echo, mirror, serving


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """`example.com` answers HTTP on port 80 and echoes on 443, whatever its address; nobody else is there."""
    world = World()
    async with serving(mirror) as web, serving(echo) as tls:
        world.name("example.com", [SITE])
        world.servers = {("*", 80): web, ("*", 443): tls}
        yield world
