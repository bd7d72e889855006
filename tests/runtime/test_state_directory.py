"""The state directory: private to its owner, and not stopped by files that are not Atoll's."""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import atoll
from atoll import InvalidRequest, SandboxError

if TYPE_CHECKING:
    from atoll import Engine


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def open_once(path: Path) -> None:
    async with atoll.open(path) as engine:
        assert await engine.list() == []


async def refusal(path: Path) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await open_once(path)
    return caught.value.message


async def test_all_directories_are_private_to_their_owner(tmp_path: Path) -> None:
    state = tmp_path / "state"
    before = os.umask(0)
    try:
        await open_once(state)
    finally:
        os.umask(before)
    assert {path.name: mode(path) for path in [state, *state.iterdir()] if path.is_dir() and mode(path) != 0o700} == {}
    assert (state / "run").is_dir()


@pytest.mark.parametrize("given", [0o755, 0o775, 0o777])
async def test_an_empty_directory_is_made_private(tmp_path: Path, given: int) -> None:
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(given)
    await open_once(state)
    assert mode(state) == 0o700


async def test_the_root_of_a_new_file_system_is_made_private(tmp_path: Path) -> None:
    (tmp_path / "state/lost+found").mkdir(parents=True)
    (tmp_path / "state").chmod(0o755)
    await open_once(tmp_path / "state")
    assert mode(tmp_path / "state") == 0o700


async def test_a_state_directory_that_others_can_read_is_made_private(tmp_path: Path) -> None:
    await open_once(tmp_path / "state")
    for path in (tmp_path / "state", tmp_path / "state/run", tmp_path / "state/names"):
        path.chmod(0o755)
    await open_once(tmp_path / "state")
    assert {mode(tmp_path / name) for name in ("state", "state/run", "state/names")} == {0o700}


@pytest.mark.parametrize("given", [0o722, 0o770, 0o1777])
async def test_a_state_directory_that_others_can_write_to_is_refused_with_the_fix(tmp_path: Path, given: int) -> None:
    state = tmp_path / "state"
    await open_once(state)
    state.chmod(given)
    message = await refusal(state)
    assert f"other users can write to the state directory {state} (mode {given:04o})" in message
    assert f"chmod 700 {state}" in message
    assert mode(state) == given, "it is the owner who has to look"


async def test_a_directory_with_other_files_that_others_read_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    other = tmp_path / "srv"
    other.mkdir()
    other.chmod(0o755)
    (other / "www").mkdir()
    assert "holds other files" in await refusal(other)
    assert (mode(other), os.listdir(other)) == (0o755, ["www"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
async def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    os.chown(tmp_path / "state", 12345, 12345)
    assert "belongs to the user 12345" in await refusal(tmp_path / "state")


# ---- what is not ours ----


@pytest.fixture(scope="module")
async def engine(make_state_dir: Callable[[], Path]) -> AsyncIterator[Engine]:
    async with atoll.open(make_state_dir()) as engine:
        yield engine


DIRECTORIES = (
    "names",
    "ids",
    "uncommitted",
    "warm",
    "groups",
    "in-progress",
    "sandboxes",
    "temporary-leases",
    "leases",
    "checkpoints",
    "warm-pools",
)


@pytest.mark.parametrize("directory", DIRECTORIES)
async def test_files_and_directories_that_are_not_ours_stop_no_command(engine: Engine, directory: str) -> None:
    place = engine.state_dir / directory
    names = ["stray file", "atoll-0123456789abcdef"]
    for name in names:
        (place / name).write_text("")
    (place / "stray directory").mkdir()
    try:
        async with atoll.open(engine.state_dir) as another, await another.create("box") as box:
            await another.gc()
            assert (await box.exec("true")).exit_code == 0
            assert "box" in [info.name for info in await another.list()]
            (fork,) = await another.fork("box", names=["forked"])
            await fork.destroy()
            await box.checkpoint("first")
            await another.delete_checkpoint("first", sandbox="box")
    finally:
        for name in names:
            (place / name).unlink(missing_ok=True)
        if (place / "stray directory").exists():
            (place / "stray directory").rmdir()


@pytest.mark.parametrize("kind", ["a path", "the parent", "a file", "a directory"])
async def test_a_name_that_does_not_lead_to_an_id_is_shown_freed_and_never_followed(
    engine: Engine, tmp_path: Path, kind: str
) -> None:
    entry = engine.state_dir / "names" / "odd"
    (tmp_path / "kept").touch()
    if kind in ("a path", "the parent"):
        entry.symlink_to(tmp_path if kind == "a path" else "..")
    elif kind == "a file":
        entry.touch()
    else:
        entry.mkdir()
    (shown,) = await engine.list()
    assert (shown.name, shown.id, shown.status) == ("odd", "", "error")
    assert "its entry is not a symlink to the id of a sandbox" in str(shown.reason)
    for use in (engine.get, engine.checkpoint, engine.sleep, engine.pause, engine.audit):
        with pytest.raises(SandboxError, match="the name 'odd' cannot be resolved"):
            await use("odd")
    await engine.destroy("odd")
    assert await engine.list() == []
    assert os.listdir(tmp_path) == ["kept"]
    assert engine.state_dir.joinpath("sandboxes").is_dir()
