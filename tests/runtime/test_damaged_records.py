"""A record that cannot be read concerns its own sandbox, checkpoint or warm pool: it is shown, and can be removed."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import atoll
from atoll import CheckpointNotFound, GcResult, SandboxError, SandboxNotFound
from atoll.runtime.state.records import remove_record

if TYPE_CHECKING:
    from atoll import Engine


def _newer(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "version": 99, "invented_later": 1}))


def _replaced_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def _full_directory(path: Path) -> None:
    path.mkdir()
    (path / "file").touch()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(os.urandom(100)),
    "newer": _newer,
    "with an unknown field": lambda path: path.write_text(json.dumps({**json.loads(path.read_bytes()), "odd": 1})),
    "a directory": _replaced_by(_full_directory),
    "a pipe": _replaced_by(os.mkfifo),
    "a symlink to itself": _replaced_by(lambda path: path.symlink_to(path)),
    "a symlink to nowhere": _replaced_by(lambda path: path.symlink_to("/nowhere")),
}
LOST = {**DAMAGES, "missing": lambda path: path.unlink()}


@pytest.fixture(scope="module")
async def engine(make_state_dir: Callable[[], Path]) -> AsyncIterator[Engine]:
    async with atoll.open(make_state_dir()) as engine:
        yield engine


def names_in(directory: Path) -> set[str]:
    return set(os.listdir(directory))


@pytest.mark.parametrize("kind", LOST)
async def test_a_sandbox_whose_manifest_cannot_be_read_is_shown_and_destroyed_and_others_go_on(
    engine: Engine, kind: str
) -> None:
    state = engine.state_dir
    async with await engine.create("whole") as whole:
        damaged = await engine.create("damaged")
        await engine.checkpoint("damaged", "before")
        await engine.sleep("damaged")
        await engine.wake("damaged")
        pid = (await engine.list("damaged"))[0].pid
        layers = names_in(state / "layers")
        LOST[kind](state / "sandboxes" / damaged.id / "manifest.json")
        async with atoll.open(state) as another:
            by_name = {info.name: info for info in await another.list()}
            shown = by_name["damaged"]
            assert (shown.id, shown.status, by_name["whole"].status) == (damaged.id, "error", "running")
            assert str(shown.reason).startswith("its record cannot be read: " if kind in DAMAGES else "its record is")
            assert shown.pid == pid
            with pytest.raises((SandboxError, SandboxNotFound)):
                await another.get("damaged")
            assert list(await another.unreadable_records()) == [damaged.id]
            assert await another.gc() == GcResult()
            assert names_in(state / "layers") == layers, "what it may refer to stays"
            (fork,) = await another.fork("whole", names=["forked"])
            await fork.destroy()
            assert (await (await another.get("whole")).exec("echo on")).stdout == "on\n"
            async with await another.create("new") as new:
                assert (await new.exec("true")).exit_code == 0
            (checkpoint,) = await another.checkpoints()
            await another.delete_checkpoint(checkpoint.id)
            await another.destroy("damaged")
            assert [info.name for info in await another.list()] == ["whole"]
            await another.gc()
        assert pid is not None
        assert not Path(f"/proc/{pid}").exists()
        assert names_in(state / "sandboxes") == {whole.id}
        assert len(names_in(state / "ids")) == len(names_in(state / "layers")) == 1
        assert not names_in(state / "uncommitted")


@pytest.mark.parametrize("kind", ["empty", "a directory"])
async def test_a_sandbox_is_destroyed_by_its_id_also_if_its_manifest_cannot_be_read(engine: Engine, kind: str) -> None:
    damaged = await engine.create("damaged")
    DAMAGES[kind](engine.state_dir / "sandboxes" / damaged.id / "manifest.json")
    await engine.destroy(damaged.id)
    assert await engine.list() == []
    assert not engine.state_dir.joinpath("names/damaged").is_symlink()
    for wrong in (damaged.id, "atoll-0000000000000000", "nobody"):
        with pytest.raises(SandboxNotFound):
            await engine.destroy(wrong)
    whole = await engine.create("whole")
    await engine.destroy(whole.id)
    assert await engine.list() == []


async def test_an_open_sandbox_whose_manifest_cannot_be_read_destroys_itself(engine: Engine) -> None:
    async with await engine.create("damaged") as damaged:
        DAMAGES["empty"](engine.state_dir / "sandboxes" / damaged.id / "manifest.json")
    assert await engine.list() == []


@pytest.mark.parametrize("kind", DAMAGES)
async def test_a_checkpoint_whose_record_cannot_be_read_is_shown_and_deleted_and_others_go_on(
    engine: Engine, kind: str
) -> None:
    state = engine.state_dir
    async with await engine.create("box") as box:
        damaged = await box.checkpoint("first")
        await box.files.write_bytes("file", b"1")
        whole = await box.checkpoint("second")
        layers = names_in(state / "layers")
        DAMAGES[kind](state / "checkpoints" / damaged.id / "checkpoint.json")
        shown = {each.id: each for each in await engine.checkpoints()}
        assert set(shown) == {damaged.id, whole.id}
        assert str(shown[damaged.id].reason).startswith("its record cannot be read: ")
        assert shown[whole.id].reason is None
        assert [each.id for each in await engine.checkpoints("box")] == [whole.id]
        assert await engine.gc() == GcResult()
        assert names_in(state / "layers") == layers
        for wanted in (damaged.id, "first"):
            with pytest.raises(SandboxError):
                await engine.restore("box", wanted)
        await engine.restore("box", "second")
        (fork,) = await engine.fork("box", checkpoint="second", names=["forked"])
        await fork.destroy()
        await engine.delete_checkpoint(damaged.id)
        assert [each.id for each in await engine.checkpoints()] == [whole.id]
        await engine.gc()
        assert names_in(state / "checkpoints") == {whole.id}
        with pytest.raises(CheckpointNotFound):
            await engine.delete_checkpoint(damaged.id)
        await engine.delete_checkpoint(whole.id)
    await engine.gc()


@pytest.mark.parametrize("kind", DAMAGES)
async def test_a_warm_pool_whose_record_cannot_be_read_is_shown_and_removed_and_others_go_on(
    engine: Engine, kind: str
) -> None:
    await engine.warm(1)
    (path,) = (engine.state_dir / "warm-pools").glob("*.json")
    DAMAGES[kind](path)
    async with atoll.open(engine.state_dir) as another:
        (shown,) = await another.warm_pools()
        assert str(shown.reason).startswith("its record cannot be read: ")
        assert (shown.ready, shown.count) == (1, 0)
        assert await another.gc() == GcResult()
        async with await another.create("box") as box:
            assert (await box.exec("true")).exit_code == 0
        await another.remove_warm_pools()
        assert await another.warm_pools() == []
        await another.gc()
    assert not names_in(engine.state_dir / "warm")
    assert not names_in(engine.state_dir / "sandboxes")


async def test_a_damaged_warm_pool_is_set_anew_and_one_of_a_newer_atoll_only_removed(engine: Engine) -> None:
    await engine.warm(1)
    (path,) = (engine.state_dir / "warm-pools").glob("*.json")
    DAMAGES["a directory"](path)
    assert (await engine.warm(1)).ready == 1
    DAMAGES["newer"](path)
    with pytest.raises(SandboxError, match="written by a newer Atoll"):
        await engine.warm(1)
    await engine.warm(0)
    assert not names_in(engine.state_dir / "sandboxes")


async def test_an_abandoned_sandbox_whose_manifest_cannot_be_read_is_collected(engine: Engine) -> None:
    abandoned = await engine.create("abandoned")
    await engine.sleep("abandoned")
    manifest = engine.state_dir / "sandboxes" / abandoned.id / "manifest.json"
    os.symlink(abandoned.id, engine.state_dir / "uncommitted" / abandoned.id)
    before = manifest.read_bytes()
    DAMAGES["newer"](manifest)
    assert await engine.remove_abandoned() == []
    manifest.write_bytes(before)
    remove_record(manifest)
    manifest.mkdir()
    assert await engine.remove_abandoned() == [abandoned.id]
    assert not names_in(engine.state_dir / "sandboxes")
    await engine.gc()
