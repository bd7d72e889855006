"""Listing many sandboxes: what has not changed is not read again, and what has is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

import atoll
from atoll.runtime.state.store import StateStore


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of manifests, as they are read."""
    seen: list[str] = []
    read = StateStore.read

    def reading(self: StateStore, id: str) -> object:
        seen.append(id)
        return read(self, id)

    monkeypatch.setattr(StateStore, "read", reading)
    monkeypatch.setattr("atoll.runtime.state.store._CLOCK_STEP_NS", 0)
    return seen


@pytest.fixture
async def own(make_state_dir: Callable[[], Path]) -> AsyncIterator[atoll.Engine]:
    """An engine over a state directory of its own."""
    async with atoll.open(make_state_dir()) as engine:
        try:
            yield engine
        finally:
            for info in await engine.list():
                await engine.destroy(info.id)


async def test_only_manifests_that_have_changed_are_read_again(own: atoll.Engine, reads: list[str]) -> None:
    for name in ("one", "other"):
        await own.create(name)
        await own.sleep(name)
    first = await own.list()
    reads.clear()
    assert await own.list() == first
    assert reads == []
    await own.wake("one")
    reads.clear()
    assert [info.status for info in await own.list()] == ["running", "sleeping"]
    assert len(reads) == 1
    await own.destroy("one")
    assert [info.name for info in await own.list()] == ["other"]


async def test_a_new_sandbox_of_the_same_name_is_listed_with_its_own_record(
    own: atoll.Engine, reads: list[str]
) -> None:
    await own.create("one")
    before = (await own.list())[0]
    await own.destroy("one")
    created = await own.create("one", user="root")
    listed = (await own.list())[0]
    assert listed.id == created.id != before.id
    assert listed.user == "root"


async def test_garbage_collection_reads_only_manifests_that_have_changed(own: atoll.Engine, reads: list[str]) -> None:
    sandbox = await own.create("one")
    await own.unreadable_records()
    reads.clear()
    assert await own.unreadable_records() == {}
    assert reads == []
    (own.state_dir / "sandboxes" / sandbox.id / "manifest.json").write_text("damaged")
    assert list(await own.unreadable_records()) == [sandbox.id]
    assert reads == [sandbox.id]
