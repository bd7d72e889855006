"""WATCH."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from tests.guest.client import Guest, N, Stream, records

CHANGES = {value: name[7:].lower() for name, value in N.items() if name.startswith("CHANGE_")}


def watch(guest: Guest, path: Path, **more: Any) -> Stream:
    stream = guest.open("WATCH", PATH=str(path), **more)
    guest.until(lambda: len(changes(stream)) > 0 or stream.end is not None)
    assert changes(stream)[0] == ("ready", "")
    return stream


def changes(stream: Stream) -> list[tuple[str, str]]:
    return [(CHANGES[r["CHANGE"]], os.fsdecode(r["NAME"])) for r in records(stream.out)]


def until(stream: Stream, *wanted: tuple[str, str]) -> None:
    stream.guest.until(lambda: all(one in changes(stream) for one in wanted))


def test_changes_in_a_directory_are_told(guest: Guest, tmp_path: Path) -> None:
    stream = watch(guest, tmp_path)
    file = tmp_path / "file"
    file.write_text("x")
    until(stream, ("created", "file"), ("modified", "file"))
    file.chmod(0o600)
    until(stream, ("attributes", "file"))
    file.rename(tmp_path / "other")
    until(stream, ("moved_from", "file"), ("moved_to", "other"))
    (tmp_path / "other").unlink()
    until(stream, ("deleted", "other"))
    stream.reset()
    assert stream.wait()["ERRNO"] == 125


def test_a_tree_is_followed_as_it_grows(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    stream = watch(guest, tmp_path, RECURSIVE=1)
    (tmp_path / "old" / "file").touch()
    until(stream, ("created", "old/file"))
    wanted = []
    for i in range(50):
        path = tmp_path / f"new{i}" / "a" / "b"
        path.mkdir(parents=True)
        (path / "file").touch()
        wanted += [("created", f"new{i}"), ("created", f"new{i}/a/b"), ("created", f"new{i}/a/b/file")]
    until(stream, *wanted)
    told = [change for change in changes(stream) if change[0] == "created"]
    assert len(told) == len(set(told)), "told twice"


def test_a_moved_tree_is_followed_under_its_new_name(guest: Guest, tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    (inside / "a" / "sub").mkdir(parents=True)
    (outside / "came" / "sub").mkdir(parents=True)
    stream = watch(guest, inside, RECURSIVE=1)
    (inside / "a").rename(inside / "b")
    until(stream, ("moved_from", "a"), ("moved_to", "b"))
    (inside / "b" / "sub" / "file").touch()
    until(stream, ("created", "b/sub/file"))
    (outside / "came").rename(inside / "came")
    until(stream, ("moved_to", "came"), ("created", "came/sub"))
    (inside / "came" / "sub" / "file").touch()
    until(stream, ("created", "came/sub/file"))
    (inside / "b").rename(outside / "left")
    until(stream, ("moved_from", "b"))
    (outside / "left" / "sub" / "unseen").touch()
    (inside / "last").touch()
    until(stream, ("created", "last"))
    assert not any("unseen" in name for _, name in changes(stream))


def test_a_file_and_the_end_of_what_is_watched_are_told(guest: Guest, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    stream = watch(guest, file)
    file.write_text("y")
    until(stream, ("modified", ""))
    file.unlink()
    until(stream, ("deleted", ""))
    gone = tmp_path / "dir"
    gone.mkdir()
    stream = watch(guest, gone, RECURSIVE=1)
    shutil.rmtree(gone)
    until(stream, ("deleted", ""))


def test_kinds_are_told(guest: Guest, tmp_path: Path) -> None:
    stream = watch(guest, tmp_path)
    (tmp_path / "dir").mkdir()
    (tmp_path / "link").symlink_to("x")
    until(stream, ("created", "dir"), ("created", "link"))
    kinds = {r["NAME"]: r["KIND"] for r in records(stream.out) if r["CHANGE"] == N["CHANGE_CREATED"]}
    assert kinds == {b"dir": N["KIND_DIRECTORY"], b"link": N["KIND_SYMLINK"]}


def test_a_reader_that_does_not_read_is_told_that_it_lost_some(guest: Guest, tmp_path: Path) -> None:
    stream = guest.open("WATCH", window=100, auto=False, PATH=str(tmp_path))
    guest.until(lambda: len(stream.out) > 0)
    for name in ("a", "b"):
        (tmp_path / name).touch()
    for _ in range(15000):
        os.chmod(tmp_path / "a", 0o600)
        os.chmod(tmp_path / "b", 0o600)
    stream.auto = True
    stream.give(1 << 20)

    def complete() -> bool:
        try:
            return ("lost", "") in changes(stream)
        except Exception:  # noqa: BLE001  a record is still on its way
            return False

    guest.until(complete)


def test_what_is_not_there_cannot_be_watched(guest: Guest, tmp_path: Path) -> None:
    assert guest.run("WATCH", PATH=str(tmp_path / "none")).end["ERRNO"] == 2
