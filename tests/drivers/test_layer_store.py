"""Removing directories of sandboxes: with and without a program that does it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.drivers import storage
from atoll.drivers.layer_store import OverlayLayerStore
from atoll.drivers.machine import read_machine

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root removes files of other users without a program")


def _tree(path: Path, files: int) -> Path:
    (path / "a" / "b").mkdir(parents=True)
    (path / "a" / "link").symlink_to(path.parent / "kept")
    for number in range(files):
        (path / "a" / "b" / str(number)).touch()
    return path


@as_root
def test_a_small_directory_is_removed_without_a_program_and_without_following_links(tmp_path: Path) -> None:
    kept = _tree(tmp_path / "kept", 1)
    assert storage.remove_few(_tree(tmp_path / "small", 3), 6)
    assert not (tmp_path / "small").exists()
    assert (kept / "a" / "b" / "0").exists()


@as_root
def test_a_large_directory_is_left_to_a_program(tmp_path: Path) -> None:
    assert not storage.remove_few(_tree(tmp_path / "large", 4), 6)
    assert (tmp_path / "large").exists()


@pytest.mark.parametrize("files", [3, 500])
async def test_directories_of_any_size_are_removed(tmp_path: Path, files: int) -> None:
    kept = _tree(tmp_path / "kept", 1)
    one, other = (_tree(tmp_path / name, files) for name in ("one", "other"))
    await OverlayLayerStore(tmp_path, read_machine()).remove(one, tmp_path / "missing", other)
    assert sorted(os.listdir(tmp_path)) == ["kept"]
    assert (kept / "a" / "b" / "0").exists()
