"""The engines of tenants: closed when nobody uses them, and not before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from atoll.contract.errors import InvalidRequest
from atoll.server.engines import TenantEngines
from atoll.settings import Settings


class Holder:
    """Such as a request."""


async def test_an_engine_that_nobody_uses_is_closed_and_opened_again_when_it_is_asked_for(
    make_state_dir: Callable[[], Path], any_settings: Settings
) -> None:
    engines = TenantEngines(any_settings.model_copy(update={"state_dir": make_state_dir()}))
    first = await engines.get("acme")
    await engines.close_unused(60)
    assert await engines.get("acme") is first, "it was just used"

    holder = Holder()
    engines.hold("acme", holder)
    await engines.close_unused(0)
    assert await engines.get("acme") is first, "a request is under way"
    del holder

    box = await first.create("box")
    await engines.close_unused(0)
    assert await engines.get("acme") is first, "it is connected to a sandbox"
    await first.sleep("box")
    await engines.close_unused(0)
    again = await engines.get("acme")
    assert again is not first
    with pytest.raises(InvalidRequest, match="the engine is closed"):
        await box.exec("true")
    assert (await (await again.get("box")).exec("echo awake")).stdout == "awake\n"
    await again.destroy("box")

    await again.warm(1)
    await engines.close_unused(0)
    assert await engines.get("acme") is again, "it keeps a warm pool filled"
    await again.remove_warm_pools()
    default = await engines.get("default")
    await engines.close_unused(0)
    assert await engines.get("default") is default, "it watches the sandboxes of all"
    await engines.aclose()


async def test_who_asks_for_an_engine_while_it_is_closed_gets_an_open_one(
    make_state_dir: Callable[[], Path], any_settings: Settings
) -> None:
    engines = TenantEngines(any_settings.model_copy(update={"state_dir": make_state_dir()}))

    async def use() -> None:
        for _ in range(50):
            engine = await engines.get("acme")
            engines.hold("acme", holder := Holder())
            await anyio.sleep(0)
            assert await engine.list() == []
            engine._tasks.require_open()
            del holder

    async def close() -> None:
        for _ in range(100):
            await engines.close_unused(0)
            await anyio.sleep(0)

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(use)
        tasks.start_soon(close)
    await engines.aclose()
