"""Records on disk of another version, or that are damaged: each is refused with a sentence that says which it is."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import atoll
from atoll import InvalidRequest, SandboxError
from atoll.runtime.lifecycle.warm_pool import WarmPoolSpec
from atoll.runtime.state.checkpoints import CheckpointRecord
from atoll.runtime.state.loop_storage import LoopStorageRecord
from atoll.runtime.state.records import StoredRecord, read_record
from atoll.runtime.state.store import Manifest

if TYPE_CHECKING:
    from atoll import Engine, Sandbox

DAMAGED = {
    "empty": b"",
    "cut short": b'{"version": 3, "id": "a',
    "not an object": b"[3]",
    "not text": b"\xff\xfe",
    "without a version": b'{"id": "a"}',
    "with a version that is no number": b'{"version": "3"}',
    "with a version that is no whole number": b'{"version": true}',
}


@contextmanager
def holding(path: Path, content: bytes) -> Iterator[None]:
    """While the context lasts, a file has another content."""
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


def with_version(path: Path, version: int, **more: object) -> bytes:
    return json.dumps({**json.loads(path.read_bytes()), "version": version, **more}).encode()


@pytest.fixture(scope="module")
async def writer(state_dir: Path) -> AsyncIterator[Engine]:
    """The engine that writes the records."""
    async with atoll.open(state_dir) as engine:
        yield engine


@pytest.fixture(scope="module")
async def sandbox(writer: Engine) -> AsyncIterator[Sandbox]:
    async with await writer.create("recorded") as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
async def checkpoint(writer: Engine, sandbox: Sandbox) -> AsyncIterator[str]:
    made = await sandbox.checkpoint("first")
    yield made.id
    await writer.delete_checkpoint(made.id)


@pytest.fixture
async def another(state_dir: Path, sandbox: Sandbox) -> AsyncIterator[Engine]:
    """An engine that has not read anything yet."""
    async with atoll.open(state_dir) as engine:
        yield engine


async def refusal(
    path: Path, content: bytes, engine: Engine, read: Callable[[Engine], Awaitable[object]]
) -> SandboxError:
    with holding(path, content), pytest.raises(SandboxError) as caught:
        await read(engine)
    return caught.value


def check_refusals(what: str, model: type[StoredRecord], newer: SandboxError, older: SandboxError) -> None:
    known = model.VERSION
    assert newer.message == (
        f"{what} was written by a newer Atoll (record version {known + 1}, this one reads up to {known}); "
        "upgrade Atoll to use it"
    )
    assert older.message.startswith(
        f"{what} was written by an older Atoll (record version {known - 1}, this one reads only {known}), "
        "and older records are not converted"
    )


async def test_a_sandbox_of_another_version_is_refused_and_says_which(
    another: Engine, state_dir: Path, sandbox: Sandbox
):
    path = state_dir / "sandboxes" / sandbox.id / "manifest.json"
    newer = with_version(path, Manifest.VERSION + 1, invented_later=1)
    refusals = [
        await refusal(path, content, another, lambda engine: engine.get("recorded"))
        for content in (newer, with_version(path, Manifest.VERSION - 1))
    ]
    check_refusals(f"sandbox {sandbox.id}", Manifest, *refusals)
    assert str(path) in str(refusals[0].hint)
    layers = set(os.listdir(state_dir / "layers"))
    with holding(path, newer):
        await another.gc()
    assert set(os.listdir(state_dir / "layers")) == layers  # what it names must stay
    assert (await (await another.get("recorded")).exec("echo here")).stdout == "here\n"


@pytest.mark.parametrize("kind", DAMAGED)
async def test_a_damaged_manifest_is_refused_with_its_path_and_the_reason(
    another: Engine, state_dir: Path, sandbox: Sandbox, kind: str
):
    path = state_dir / "sandboxes" / sandbox.id / "manifest.json"
    error = await refusal(path, DAMAGED[kind], another, lambda engine: engine.get("recorded"))
    assert error.message == f"the record of sandbox {sandbox.id} cannot be read"
    assert str(error.hint).startswith(f"{path}: ")
    assert len(str(error.hint)) > len(f"{path}: ")


async def test_a_manifest_with_an_unknown_field_is_refused_with_the_field(
    another: Engine, state_dir: Path, sandbox: Sandbox
):
    path = state_dir / "sandboxes" / sandbox.id / "manifest.json"
    content = with_version(path, Manifest.VERSION, odd_field=1)
    error = await refusal(path, content, another, lambda engine: engine.get("recorded"))
    assert "odd_field" in str(error.hint)


async def test_a_checkpoint_of_another_version_is_refused_and_says_which(
    another: Engine, state_dir: Path, checkpoint: str
):
    path = state_dir / "checkpoints" / checkpoint / "checkpoint.json"
    refusals = [
        await refusal(path, with_version(path, version), another, lambda engine: engine.restore("recorded", "first"))
        for version in (CheckpointRecord.VERSION + 1, CheckpointRecord.VERSION - 1)
    ]
    check_refusals(f"checkpoint {checkpoint}", CheckpointRecord, *refusals)
    error = await refusal(path, b"{", another, lambda engine: engine.restore("recorded", checkpoint))
    assert error.message == f"the record of checkpoint {checkpoint} cannot be read"
    assert str(path) in str(error.hint)


async def test_a_warm_pool_of_another_version_is_refused_and_says_which(another: Engine, state_dir: Path):
    await another.warm(1)
    try:
        (path,) = (state_dir / "warm-pools").glob("*.json")
        known = WarmPoolSpec.VERSION
        for version, reason in ((known + 1, "it was written by a newer"), (known - 1, "it was written by an older")):
            with holding(path, with_version(path, version)):
                (shown,) = await another.warm_pools()
            assert str(shown.reason).startswith(f"its record cannot be read: {reason} Atoll (record version {version}")
        with holding(path, b"{}"):
            (shown,) = await another.warm_pools()
        assert shown.reason == "its record cannot be read: it has no record version"
    finally:
        await another.warm(0)


async def test_a_warm_sandbox_of_a_newer_version_is_neither_claimed_nor_removed(another: Engine, state_dir: Path):
    await another.warm(1)
    try:
        (entry,) = (state_dir / "warm").iterdir()
        path = state_dir / "sandboxes" / entry.name.partition(".")[2] / "manifest.json"
        with holding(path, with_version(path, Manifest.VERSION + 1, invented_later=1)):
            async with await another.create() as sandbox:
                assert sandbox.id not in entry.name
            await another.wait_refilled()
            assert entry.exists()
        async with await another.create() as sandbox:
            assert entry.name.endswith(sandbox.id)
    finally:
        await another.warm(0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"version": LoopStorageRecord.VERSION + 1}, "was written by a newer Atoll"),
        ({"version": LoopStorageRecord.VERSION - 1}, "was written by an older Atoll"),
        ({"version": LoopStorageRecord.VERSION, "filesystem": "ntfs", "size_bytes": 1}, "cannot be read"),
        ({}, "cannot be read"),
    ],
)
async def test_a_state_directory_whose_storage_cannot_be_understood_is_not_opened(
    tmp_path: Path, content: dict[str, object], message: str
):
    (tmp_path / "storage.json").write_text(json.dumps(content))
    with pytest.raises(InvalidRequest, match=message) as caught:
        async with atoll.open(tmp_path):
            pytest.fail("it was opened")
    assert str(tmp_path / "storage.json") in str(caught.value.hint)


def test_a_shortage_of_this_process_is_not_taken_for_a_damaged_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.json"
    path.write_text("{}")

    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match="too many") as caught:
        read_record(path, LoopStorageRecord, "it")
    assert not isinstance(caught.value, SandboxError)
