"""Previews of the server: one URL for a port, however many ask for it at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from atoll.contract.errors import PortRefused
from atoll.contract.model import Preview
from atoll.server.server import Server
from atoll.settings import Settings


async def test_of_requests_at_once_all_get_the_same_url(make_state_dir: Callable[[], Path], settings: Settings) -> None:
    async with Server.open(settings.model_copy(update={"state_dir": make_state_dir()})) as server:
        box = await (await server.engines.get("default")).create("box")
        found: list[Preview] = []

        async def expose() -> None:
            found.append(await server.previews.expose("default", box.info, 8000))

        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(expose)
        assert len({each.token for each in found}) == 1
        assert await server.previews.list("default", box.info) == [found[0]]
        await box.destroy()


async def test_a_url_may_be_taken_back_while_a_server_is_waited_for(
    make_state_dir: Callable[[], Path], settings: Settings
) -> None:
    async with Server.open(settings.model_copy(update={"state_dir": make_state_dir()})) as server:
        box = await (await server.engines.get("default")).create("box")
        before = await server.previews.expose("default", box.info, 8000)
        process = await box.spawn("read line; exec python3 -m http.server 8000", stdin=True)
        after: list[Preview] = []

        async def expose() -> None:
            after.append(await server.previews.expose("default", box.info, 8000, wait_s=60))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(expose)
            await anyio.wait_all_tasks_blocked()
            assert await server.previews.take_back("default", box.id, 8000)
            await process.stdin.send(b"\n")
        assert after[0].token != before.token
        with pytest.raises(PortRefused, match="nothing listened on port 9"):
            await server.previews.expose("default", box.info, 9, wait_s=0.1)
        await box.destroy()
