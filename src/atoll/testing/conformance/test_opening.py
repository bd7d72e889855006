"""Opening and closing an engine, and creating a sandbox: to await, or as a context."""

from __future__ import annotations

import asyncio
from pathlib import Path

import anyio
import pytest

import atoll
from atoll import Engine

pytestmark = pytest.mark.runtimes("crun")


@pytest.fixture
def settings(engine: Engine) -> atoll.Settings:
    return atoll.Settings(runtime=next(iter(engine.runtimes())))


async def test_an_engine_that_was_awaited_is_closed_by_another_task(state_dir: Path, settings: atoll.Settings) -> None:
    opened = await asyncio.create_task(atoll.open(state_dir, settings=settings))
    box = await opened.create()
    await box.exec("true")
    await box.destroy()
    await asyncio.create_task(opened.aclose())
    await opened.aclose()


async def test_a_closed_engine_starts_nothing(state_dir: Path, settings: atoll.Settings, engine: Engine) -> None:
    async with engine.create() as box:
        opened = await atoll.open(state_dir, settings=settings)
        handle = await opened.get(box.name)
        await opened.aclose()
        with pytest.raises(atoll.InvalidRequest, match="the engine is closed"):
            await handle.exec("true")


async def test_what_the_block_of_an_engine_raises_is_raised_as_it_is(state_dir: Path, settings: atoll.Settings) -> None:
    async def block() -> None:
        async with atoll.open(state_dir, settings=settings) as opened:
            await opened.list()
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await block()


async def test_a_cancelled_block_closes_its_engine(state_dir: Path, settings: atoll.Settings) -> None:
    with anyio.CancelScope() as scope:
        async with atoll.open(state_dir, settings=settings) as opened:
            scope.cancel()
            await anyio.sleep_forever()
    with pytest.raises(atoll.InvalidRequest, match="the engine is closed"):
        await opened.create()


async def test_a_sandbox_is_destroyed_after_the_block_that_created_it(engine: Engine) -> None:
    async with engine.create("for-a-block") as box:
        assert (await box.exec("hostname")).stdout == "for-a-block\n"
    assert "for-a-block" not in [info.name for info in await engine.list()]


async def test_sandboxes_are_created_in_tasks(engine: Engine) -> None:
    async with asyncio.TaskGroup() as group:
        created = [group.create_task(engine.create()) for _ in range(2)]
    for box in await asyncio.gather(*created):
        await box.destroy()


async def test_a_wrong_argument_is_refused_when_the_creation_is_awaited(engine: Engine) -> None:
    creation = engine.create("No Such Name")
    with pytest.raises(atoll.InvalidRequest, match="No Such Name"):
        await creation


async def test_getting_or_creating_gives_all_callers_one_sandbox(engine: Engine) -> None:
    boxes = await asyncio.gather(*(engine.get_or_create("wanted", env={"A": "1"}) for _ in range(5)))
    assert {box.id for box in boxes} == {boxes[0].id}
    assert (await (await engine.get_or_create("wanted", env={"A": "2"})).exec("echo $A")).stdout == "1\n"
    await boxes[0].destroy()
