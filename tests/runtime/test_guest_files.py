"""Files in the real guest, without isolation, below a temporary directory."""

from __future__ import annotations

import os
import tarfile
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path

import anyio
import pytest

from atoll.contract.errors import (
    FileError,
    InvalidRequest,
    PathExists,
    PathIsDirectory,
    PathNotDirectory,
    PathNotFound,
    PermissionDenied,
)
from atoll.runtime.guest.files import Files
from atoll.runtime.sandbox import Sandbox

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(os.geteuid() != 0, reason="the guest changes users")]

MIB = 1024 * 1024


@pytest.fixture
def files(sandbox: Sandbox) -> Files:
    return sandbox.files


# ------------------------------------------------------------------------------------------------------------ contents


@pytest.mark.parametrize("size", [0, 1, 65536, 65537, 5 * MIB + 3])
async def test_a_file_is_read_as_it_was_written(files: Files, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    assert await files.write_bytes(tmp_path / "f", data) == size
    assert await files.read_bytes(tmp_path / "f") == data
    assert b"".join([piece async for piece in files.stream(tmp_path / "f")]) == data
    assert (tmp_path / "f").read_bytes() == data


async def test_a_part_of_a_file_is_read(files: Files, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    assert await files.read_bytes(tmp_path / "f", offset=3, limit=4) == b"3456"
    assert await files.read_bytes(tmp_path / "f", offset=8) == b"89"
    assert await files.read_bytes(tmp_path / "f", offset=50) == b""
    assert await files.read_bytes(tmp_path / "f", limit=0) == b""
    with pytest.raises(InvalidRequest):
        await files.read_bytes(tmp_path / "f", offset=-1)


async def test_text_keeps_its_newlines_and_what_is_not_text_is_refused(files: Files, tmp_path: Path) -> None:
    await files.write_text(tmp_path / "t", "grün\r\nblau\n")
    assert await files.read_text(tmp_path / "t") == "grün\r\nblau\n"
    (tmp_path / "b").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="read_bytes"):
        await files.read_text(tmp_path / "b")
    assert await files.read_text(tmp_path / "b", errors="replace") == "\ufffd\ufffd"
    with pytest.raises(InvalidRequest):
        await files.read_text(tmp_path / "t", encoding="no-such")


async def test_a_file_is_written_from_pieces_that_come(files: Files, tmp_path: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for i in range(100):
            yield b"%d" % i * 1000

    expected = b"".join(b"%d" % i * 1000 for i in range(100))
    assert await files.write_bytes(tmp_path / "f", pieces()) == len(expected)
    assert (tmp_path / "f").read_bytes() == expected


async def test_a_write_that_fails_half_way_leaves_the_file_as_it_was(files: Files, tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"new" * 50_000
        raise RuntimeError("no more")

    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(RuntimeError, match="no more"):
        await files.write_bytes(tmp_path / "f", broken())
    assert (tmp_path / "f").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


async def test_how_a_file_is_written_is_as_asked(files: Files, tmp_path: Path) -> None:
    await files.write_bytes(tmp_path / "a/b/c", b"x", mode=0o600)
    assert (tmp_path / "a/b/c").stat().st_mode & 0o777 == 0o600
    assert await files.write_bytes(tmp_path / "a/b/c", b"y", append=True) == 2
    assert (tmp_path / "a/b/c").read_bytes() == b"xy"
    with pytest.raises(PathExists):
        await files.write_bytes(tmp_path / "a/b/c", b"z", exclusive=True)
    with pytest.raises(PathNotFound):
        await files.write_bytes(tmp_path / "no/d", b"z", parents=False)
    with pytest.raises(InvalidRequest):
        await files.write_bytes(tmp_path / "a/b/c", b"z", mode=0o10000)


async def test_a_relative_path_is_below_the_users_home(files: Files) -> None:
    listed = {entry.name for entry in await files.list()}
    assert listed == {entry.name for entry in await files.list("/root")}


# --------------------------------------------------------------------------------------------------------------- names


async def test_what_stands_at_a_path_is_told(files: Files, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    (tmp_path / "f").chmod(0o640)
    os.utime(tmp_path / "f", (1_000_000_000, 1_000_000_000))
    (tmp_path / "l").symlink_to("f")
    (tmp_path / "nowhere").symlink_to("missing")
    os.mkfifo(tmp_path / "pipe")
    status = await files.stat(tmp_path / "l")
    assert (status.kind, status.size, status.mode, status.uid) == ("file", 5, 0o640, 0)
    assert status.mtime.timestamp() == 1_000_000_000
    link = await files.stat(tmp_path / "l", follow=False)
    assert (link.kind, link.target) == ("symlink", "f")
    assert (await files.stat(tmp_path / "pipe")).kind == "fifo"
    assert await files.exists(tmp_path / "f")
    assert not await files.exists(tmp_path / "missing")
    assert not await files.exists(tmp_path / "f" / "below")
    assert not await files.exists(tmp_path / "nowhere")


async def test_names_of_any_bytes_come_back_as_they_are(files: Files, tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff\xfe"
    Path(os.fsdecode(name)).write_bytes(b"odd")
    (entry,) = await files.list(tmp_path)
    assert os.fsencode(entry.name) == b"\xff\xfe"
    assert await files.read_bytes(f"{tmp_path}/{entry.name}") == b"odd"


async def test_a_large_directory_is_listed(files: Files, tmp_path: Path) -> None:
    for i in range(3000):
        (tmp_path / f"file-{i:04}").touch()
    entries = await files.list(tmp_path)
    assert sorted(entry.name for entry in entries) == [f"file-{i:04}" for i in range(3000)]


async def test_names_are_made_changed_and_removed(files: Files, tmp_path: Path) -> None:
    await files.mkdir(tmp_path / "a/b")
    await files.mkdir(tmp_path / "a/b")
    with pytest.raises(PathExists):
        await files.mkdir(tmp_path / "a/b", parents=False)
    await files.write_text(tmp_path / "a/f", "x")
    await files.rename(tmp_path / "a/f", tmp_path / "a/g")
    await files.rename(tmp_path / "a/g", tmp_path / "new/h", parents=True)
    await files.symlink(tmp_path / "l", "new/h")
    await files.chmod(tmp_path / "new/h", 0o600)
    assert (tmp_path / "l").read_text() == "x"
    assert (tmp_path / "new/h").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileError, match="recursive=True"):
        await files.remove(tmp_path / "a")
    await files.remove(tmp_path / "l")
    await files.remove(tmp_path / "a", recursive=True)
    await files.remove(tmp_path / "a", missing_ok=True)
    with pytest.raises(PathNotFound):
        await files.remove(tmp_path / "a")
    assert os.listdir(tmp_path) == ["new"]


async def test_errors_say_what_was_wrong_and_what_would_help(files: Files, tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(PathNotFound) as missing:
        await files.read_bytes(tmp_path / "missing")
    assert missing.value.message == f"{tmp_path}/missing: no such file or directory"
    with pytest.raises(PathIsDirectory, match="use list"):
        await files.read_bytes(tmp_path)
    with pytest.raises(PathNotDirectory):
        await files.list(tmp_path / "f")
    with pytest.raises(InvalidRequest, match="nobody-here"):
        await files.read_bytes(tmp_path / "f", user="nobody-here")
    with pytest.raises(PermissionDenied, match="daemon"):
        await files.read_bytes("/etc/shadow", user="daemon")
    with pytest.raises(InvalidRequest):
        await files.read_bytes("")
    with pytest.raises(FileError):
        await files.read_bytes("/dev/zero")
    with pytest.raises(FileError):
        await files.read_bytes("/" + "x" * 300)


# ------------------------------------------------------------------------------------------------------------- finding


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("a.py", "b.txt", "sub/c.py", "sub/deep/d.py", ".hidden/e.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"first\nimport {name}\nlast IMPORT\n")
    return tmp_path


async def test_patterns_find_names(files: Files, tree: Path) -> None:
    async def names(pattern: str, **options: bool | int) -> list[str]:
        return sorted(entry.name for entry in await files.glob(pattern, cwd=tree, **options))  # type: ignore[arg-type]

    assert await names("*.py") == ["a.py"]
    assert await names("**/*.py") == ["a.py", "sub/c.py", "sub/deep/d.py"]
    assert await names("**/*.py", hidden=True) == [".hidden/e.py", "a.py", "sub/c.py", "sub/deep/d.py"]
    assert await names("*.{py,txt}") == ["a.py", "b.txt"]
    assert len(await names("**/*.py", limit=2)) == 2
    with pytest.raises(PathNotFound):
        await files.glob("*", cwd=tree / "missing")
    with pytest.raises(InvalidRequest):
        await files.glob("*", limit=0)


async def test_expressions_find_lines(files: Files, tree: Path) -> None:
    matches = await files.grep("^import", tree)
    assert sorted((match.path, match.line, match.text) for match in matches) == [
        ("a.py", 2, "import a.py"),
        ("b.txt", 2, "import b.txt"),
        ("sub/c.py", 2, "import sub/c.py"),
        ("sub/deep/d.py", 2, "import sub/deep/d.py"),
    ]
    assert len(await files.grep("import", tree, include="*.txt", ignore_case=True)) == 2
    assert [match.path for match in await files.grep("first", tree / "a.py")] == [str(tree / "a.py")]
    assert len(await files.grep("i", tree, limit=3)) == 3
    with pytest.raises(InvalidRequest, match="pattern"):
        await files.grep("(", tree)


async def test_changes_are_seen_from_entry_on(files: Files, tmp_path: Path) -> None:
    async with files.watch(tmp_path) as changes:
        (tmp_path / "sub").mkdir()
        with anyio.fail_after(10):
            seen = await anext(changes)
            assert (seen.change, seen.path, seen.kind) == ("created", "sub", "directory")
            (tmp_path / "f").write_text("x")
            while (seen.change, seen.path) != ("modified", "f"):
                seen = await anext(changes)
            (tmp_path / "f").unlink()
            while (seen.change, seen.path) != ("deleted", "f"):
                seen = await anext(changes)
    with pytest.raises(PathNotFound):
        async with files.watch(tmp_path / "missing"):
            pass


# ------------------------------------------------------------------------------------------------------------ archives


async def test_a_directory_goes_out_as_a_tar_and_comes_in_again(
    files: Files, tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copy = tmp_path_factory.mktemp("copy") / "of/it"
    (tree / "link").symlink_to("a.py")
    (tree / ("long" * 50)).write_text("x")
    archive = b"".join([piece async for piece in files.tar_out(tree, inside=True)])
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        assert {"a.py", "sub/c.py", "link", "long" * 50} <= {name.removeprefix("./") for name in tar.getnames()}

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(archive), 1000):
            yield archive[start : start + 1000]

    size = await files.tar_in(copy, pieces())
    assert size == sum(path.stat().st_size for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
    assert (copy / "sub/deep/d.py").read_text() == (tree / "sub/deep/d.py").read_text()
    assert (copy / "link").readlink() == Path("a.py")


async def test_a_tar_that_leads_outside_is_refused_inside_too(files: Files, tmp_path: Path) -> None:
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo("../escaped")
        info.size = 1
        tar.addfile(info, BytesIO(b"x"))

    async def pieces() -> AsyncIterator[bytes]:
        yield buffer.getvalue()

    with pytest.raises(PermissionDenied):
        await files.tar_in(tmp_path / "into", pieces())
    assert not (tmp_path / "escaped").exists()


# ------------------------------------------------------------------------------------------------------------ transfer


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A directory of this machine, apart from the one that plays the sandbox's."""
    path = tmp_path / "local"
    path.mkdir()
    return path


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    path = tmp_path / "inside"
    path.mkdir()
    return path


def make_tree(root: Path) -> None:
    (root / "sub/empty").mkdir(parents=True)
    (root / "sub/script").write_text("#!/bin/sh\n")
    (root / "sub/script").chmod(0o755)
    (root / "data").write_bytes(os.urandom(3 * MIB + 1))
    (root / "link").symlink_to("sub/script")
    (root / ("long" * 60)).write_text("x")
    os.mkfifo(root / "pipe")
    os.link(root / "data", root / "same")


def same(left: Path, right: Path) -> None:
    names = {path.relative_to(left) for path in left.rglob("*") if not path.is_fifo()}
    assert names == {path.relative_to(right) for path in right.rglob("*")}
    for name in names:
        a, b = left / name, right / name
        assert a.is_symlink() == b.is_symlink()
        if a.is_symlink():
            assert a.readlink() == b.readlink()
        elif a.is_file():
            assert a.read_bytes() == b.read_bytes()
            assert a.stat().st_mode & 0o777 == b.stat().st_mode & 0o777


async def test_a_directory_is_uploaded_and_downloaded_whole(files: Files, local: Path, inside: Path) -> None:
    (local / "tree").mkdir()
    make_tree(local / "tree")
    size = await files.upload(local / "tree", inside / "new")
    assert size >= 6 * MIB
    same(local / "tree", inside / "new")
    assert await files.download(inside / "new", local / "back") == size
    same(local / "tree", local / "back")


async def test_what_is_copied_into_a_directory_keeps_its_name(files: Files, local: Path, inside: Path) -> None:
    (local / "tree").mkdir()
    (local / "tree/f").write_text("x")
    (local / "one").write_text("y")
    await files.upload(local / "tree", inside)
    await files.upload(local / "one", inside)
    await files.upload(local / "one", f"{inside}/fresh/")
    assert (inside / "tree/f").read_text() == "x"
    assert (inside / "one").read_text() == (inside / "fresh/one").read_text() == "y"
    (local / "into").mkdir()
    await files.download(inside / "tree", local / "into")
    await files.download(inside / "one", local / "into")
    assert (local / "into/tree/f").read_text() == "x"
    assert (local / "into/one").read_text() == "y"


async def test_a_file_is_copied_with_its_mode_and_without_its_set_id_bits(
    files: Files, local: Path, inside: Path
) -> None:
    (local / "tool").write_bytes(b"x" * MIB)
    (local / "tool").chmod(0o755)
    assert await files.upload(local / "tool", inside / "tool") == MIB
    assert (inside / "tool").stat().st_mode & 0o7777 == 0o755
    (inside / "tool").chmod(0o4755)
    assert await files.download(inside / "tool", local / "deep/er/tool") == MIB
    assert (local / "deep/er/tool").stat().st_mode & 0o7777 == 0o755


async def test_a_download_into_what_is_there_merges_and_follows_no_symlink(
    files: Files, local: Path, inside: Path
) -> None:
    (inside / "tree/sub").mkdir(parents=True)
    (inside / "tree/sub/new").write_text("new")
    (inside / "tree/file").write_text("new")
    (local / "elsewhere").mkdir()
    (local / "precious").write_text("old")
    (local / "tree").mkdir()
    (local / "tree/kept").write_text("kept")
    (local / "tree/file").symlink_to("../precious")
    await files.download(inside / "tree", local)
    assert (local / "precious").read_text() == "old"
    assert (local / "tree/file").read_text() == "new"
    assert (local / "tree/kept").read_text() == "kept"
    (local / "tree/sub/new").unlink()
    (local / "tree/sub").rmdir()
    (local / "tree/sub").symlink_to("../elsewhere")
    with pytest.raises(NotADirectoryError):
        await files.download(inside / "tree", local)
    assert os.listdir(local / "elsewhere") == []
    assert not [name for name in os.listdir(local) if name.startswith(".atoll")]


@pytest.mark.parametrize("target", ["/etc/passwd", "../..", "sub/../../x"])
async def test_a_symlink_that_leads_outside_is_not_downloaded(
    files: Files, local: Path, inside: Path, target: str
) -> None:
    (inside / "tree/sub").mkdir(parents=True)
    (inside / "tree/bad").symlink_to(target)
    with pytest.raises(PermissionDenied, match="leads outside"):
        await files.download(inside / "tree", local / "tree")
    assert os.listdir(local) == []


async def test_more_than_the_limit_is_not_downloaded(files: Files, local: Path, inside: Path) -> None:
    (inside / "tree").mkdir()
    with (inside / "tree/huge").open("wb") as file:
        file.truncate(10**12)
    for what in ("tree", "tree/huge"):
        with pytest.raises(InvalidRequest, match="limit_bytes"):
            await files.download(inside / what, local / "copy", limit_bytes=MIB)
    assert os.listdir(local) == []


async def test_what_is_neither_a_file_nor_a_directory_is_not_copied(files: Files, local: Path, inside: Path) -> None:
    os.mkfifo(local / "pipe")
    os.mkfifo(inside / "pipe")
    with pytest.raises(InvalidRequest):
        await files.upload(local / "pipe", inside)
    with pytest.raises(InvalidRequest):
        await files.download(inside / "pipe", local)
    with pytest.raises(FileNotFoundError):
        await files.upload(local / "missing", inside)
    with pytest.raises(PathNotFound):
        await files.download(inside / "missing", local)
