"""`Sandbox.files`: reading, writing and naming."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import anyio
import pytest

from atoll import (
    DiskFull,
    FileError,
    InvalidRequest,
    PathExists,
    PathIsDirectory,
    PathNotDirectory,
    PathNotFound,
    PermissionDenied,
    Sandbox,
)
from atoll.contract.model import RuntimeName
from atoll.testing.inside import Peak, keeper_pid, output_of
from atoll.testing.waiting import eventually

MIB = 1024 * 1024
ODD_NAMES = [
    "with space",
    "with\nnewline",
    "tab\tand 'quotes\"",
    "-dash",
    "*?[a]{b,c}",
    "ünï€😀",
    os.fsdecode(b"not-utf8-\xff\xfe"),
    "back\\slash",
    "x" * 255,
]


# ---- reading and writing ----


@pytest.mark.core
async def test_what_is_written_is_read_back_byte_for_byte(shared: Sandbox, here: str) -> None:
    data = bytes(range(256)) * 1000 + b"\r\n\0"
    assert await shared.files.write_bytes(f"{here}/binary", data) == len(data)
    assert await shared.files.read_bytes(f"{here}/binary") == data
    assert (await shared.exec_bytes(["cat", f"{here}/binary"])).stdout == data


@pytest.mark.core
async def test_an_empty_file_is_a_file(shared: Sandbox, here: str) -> None:
    assert await shared.files.write_bytes(f"{here}/empty", b"") == 0
    assert await shared.files.read_bytes(f"{here}/empty") == b""
    assert (await shared.files.stat(f"{here}/empty")).size == 0


async def test_text_keeps_its_newlines_and_its_encoding(shared: Sandbox, here: str) -> None:
    text = "a\nb\r\nc\rd\n€"
    await shared.files.write_text(f"{here}/text", text)
    assert await shared.files.read_bytes(f"{here}/text") == text.encode()
    assert await shared.files.read_text(f"{here}/text") == text
    await shared.files.write_text(f"{here}/latin", "é", encoding="latin-1")
    assert await shared.files.read_bytes(f"{here}/latin") == b"\xe9"
    assert await shared.files.read_text(f"{here}/latin", encoding="latin-1") == "é"


async def test_text_that_is_none_is_an_invalid_request_unless_errors_are_replaced(shared: Sandbox, here: str) -> None:
    await shared.files.write_bytes(f"{here}/not", b"a\xffb")
    with pytest.raises(InvalidRequest):
        await shared.files.read_text(f"{here}/not")
    assert await shared.files.read_text(f"{here}/not", errors="replace") == "a�b"
    with pytest.raises(InvalidRequest):
        await shared.files.write_text(f"{here}/not", "€", encoding="latin-1")
    assert await shared.files.read_bytes(f"{here}/not") == b"a\xffb"


@pytest.mark.core
async def test_a_part_of_a_file_can_be_read(shared: Sandbox, here: str) -> None:
    await shared.files.write_bytes(f"{here}/digits", b"0123456789")
    read = shared.files.read_bytes
    assert await read(f"{here}/digits", offset=3) == b"3456789"
    assert await read(f"{here}/digits", offset=3, limit=4) == b"3456"
    assert await read(f"{here}/digits", limit=0) == b""
    assert await read(f"{here}/digits", offset=10) == b""
    assert await read(f"{here}/digits", offset=1000) == b""
    assert await read(f"{here}/digits", offset=8, limit=1000) == b"89"
    with pytest.raises(InvalidRequest):
        await read(f"{here}/digits", offset=-1)
    with pytest.raises(InvalidRequest):
        await read(f"{here}/digits", limit=-1)


async def test_a_stream_reads_the_same_in_pieces(shared: Sandbox, here: str) -> None:
    data = os.urandom(3 * MIB + 17)
    await shared.files.write_bytes(f"{here}/big", data)
    assert b"".join([piece async for piece in shared.files.stream(f"{here}/big")]) == data
    part = b"".join([piece async for piece in shared.files.stream(f"{here}/big", offset=MIB, limit=MIB)])
    assert part == data[MIB : 2 * MIB]


async def test_a_stream_may_be_left_half_read(shared: Sandbox, here: str) -> None:
    await shared.exec(f"truncate -s 1G {here}/sparse")
    stream = shared.files.stream(f"{here}/sparse")
    async for piece in stream:
        assert piece
        break
    await stream.aclose()
    assert await shared.files.read_bytes(f"{here}/sparse", limit=3) == b"\0\0\0"


async def test_a_gibibyte_is_read_with_flat_memory(
    sandbox: Sandbox, state_dir: Path, runtime_name: RuntimeName
) -> None:
    # All runtimes transfer bytes in the same way, and gVisor is slow: only the fastest gets the whole gibibyte.
    size = 1024 * MIB if runtime_name == "crun" else 128 * MIB
    assert sandbox.info.pid is not None
    await sandbox.exec(["truncate", "-s", str(size), "sparse"])
    await sandbox.files.read_bytes("sparse", limit=MIB)
    peaks = {"this process": Peak(os.getpid())}
    if os.geteuid() == 0:
        peaks["the keeper"] = Peak(keeper_pid(state_dir, sandbox))
        if runtime_name != "runsc":
            peaks["the guest"] = Peak(sandbox.info.pid)
    total = 0
    async for piece in sandbox.files.stream("sparse"):
        total += len(piece)
    assert total == size
    grown = {who: peak.growth_bytes // MIB for who, peak in peaks.items()}
    assert all(growth < 16 for growth in grown.values()), grown


async def test_more_than_fits_into_memory_at_once_is_refused_with_a_way_out(shared: Sandbox, here: str) -> None:
    await shared.exec(f"truncate -s 300M {here}/large")
    peak = Peak(os.getpid())
    with pytest.raises(InvalidRequest, match="stream"):
        await shared.files.read_bytes(f"{here}/large")
    assert peak.growth_bytes < 600 * MIB
    assert len(await shared.files.read_bytes(f"{here}/large", offset=290 * MIB)) == 10 * MIB


async def test_a_write_takes_its_data_from_an_iterator_with_flat_memory(shared: Sandbox, here: str) -> None:
    piece = os.urandom(MIB)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield piece
        yield b""
        yield b"end"

    peak = Peak(os.getpid())
    assert await shared.files.write_bytes(f"{here}/poured", pieces()) == 64 * MIB + 3
    assert peak.growth_bytes < 16 * MIB
    assert await shared.files.read_bytes(f"{here}/poured", offset=63 * MIB) == piece + b"end"


@pytest.mark.core
async def test_a_write_replaces_appends_or_refuses(shared: Sandbox, here: str) -> None:
    write, path = shared.files.write_bytes, f"{here}/file"
    assert await write(path, b"a long first version") == 20
    assert await write(path, b"short") == 5
    assert await shared.files.read_bytes(path) == b"short"
    assert await write(path, b"er", append=True) == 7
    assert await shared.files.read_bytes(path) == b"shorter"
    assert await write(f"{here}/new", b"x", append=True) == 1
    with pytest.raises(PathExists) as caught:
        await write(path, b"never", exclusive=True)
    assert isinstance(caught.value, FileExistsError)
    assert (caught.value.errno, caught.value.path) == (errno.EEXIST, path)
    assert await write(f"{here}/fresh", b"x", exclusive=True) == 1
    assert await write(path, b"in place", atomic=False) == 8
    assert await shared.files.read_bytes(path) == b"in place"


async def test_a_write_in_place_keeps_the_inode_and_an_atomic_one_does_not_touch_readers(
    shared: Sandbox, here: str
) -> None:
    path = f"{here}/file"
    await shared.files.write_bytes(path, b"before")
    inode = (await shared.exec(["stat", "-c", "%i", path])).stdout
    await shared.files.write_bytes(path, b"in place", atomic=False)
    assert (await shared.exec(["stat", "-c", "%i", path])).stdout == inode
    async with await shared.spawn(f"exec 9<{path}; echo ready; read -r x; cat <&9", stdin=True, keep=False) as reader:
        async for _ in reader:
            break
        await shared.files.write_bytes(path, b"replaced")
        assert reader.stdin is not None
        await reader.stdin.send(b"\n")
        assert await output_of(reader) == b"in place"


@pytest.mark.core
async def test_missing_directories_are_made_unless_told_not_to(shared: Sandbox, here: str, user_id: int) -> None:
    await shared.files.write_bytes(f"{here}/a/b/c/file", b"x")
    stat = await shared.files.stat(f"{here}/a/b")
    assert (stat.kind, stat.mode, stat.uid) == ("directory", 0o755, user_id)
    with pytest.raises(PathNotFound, match="parents"):
        await shared.files.write_bytes(f"{here}/d/e/file", b"x", parents=False)
    assert not await shared.files.exists(f"{here}/d")


@pytest.mark.core
async def test_modes_are_as_asked_or_0644_for_new_and_unchanged_for_old_files(shared: Sandbox, here: str) -> None:
    async def mode(name: str) -> int:
        return (await shared.files.stat(f"{here}/{name}")).mode

    await shared.files.write_bytes(f"{here}/new", b"")
    assert await mode("new") == 0o644
    await shared.files.write_bytes(f"{here}/script", b"", mode=0o755)
    assert await mode("script") == 0o755
    for atomic in (True, False):
        await shared.files.write_bytes(f"{here}/script", b"#!/bin/sh\n", atomic=atomic)
        assert await mode("script") == 0o755
    await shared.files.write_bytes(f"{here}/script", b"", mode=0o600)
    assert await mode("script") == 0o600
    await shared.files.chmod(f"{here}/script", 0o4711)
    assert await mode("script") == 0o4711
    with pytest.raises(InvalidRequest):
        await shared.files.chmod(f"{here}/script", 0o10000)


async def test_a_replaced_file_keeps_its_owner(shared: Sandbox, here: str, single_id: bool) -> None:
    path = f"{here}/file"
    await shared.files.write_bytes(path, b"the user's")
    before = await shared.files.stat(path)
    await shared.files.write_bytes(f"/home/user/{path}", b"root's hand", user="root")
    after = await shared.files.stat(path)
    assert (after.uid, after.gid) == (before.uid, before.gid)
    assert after.mode == before.mode


async def test_root_gives_files_away(shared: Sandbox, here: str, single_id: bool) -> None:
    if single_id:
        pytest.skip("this machine gives a sandbox one user id")
    files, root = shared.files, f"/home/user/{here}"
    await files.write_text(f"{here}/tree/deep/file", "x")
    await files.symlink(f"{here}/tree/link", "/etc/passwd")

    async def owners(*names: str) -> set[tuple[int, int]]:
        found = [await files.stat(f"{root}/tree{name}", follow=False) for name in names]
        return {(each.uid, each.gid) for each in found}

    own = await files.stat(f"{here}/tree")
    everything = ("", "/deep", "/deep/file", "/link")
    with pytest.raises(PermissionDenied):
        await files.chown(f"{here}/tree", "root")
    await files.chown(f"{root}/tree", "root", user="root")
    assert await owners("") == {(0, 0)}
    assert await owners(*everything[1:]) == {(own.uid, own.gid)}
    await files.chown(f"{root}/tree", "12:34", recursive=True, user="root")
    assert await owners(*everything) == {(12, 34)}
    await files.chown(f"{root}/tree", "user", recursive=True, user="root")
    assert await owners(*everything) == {(own.uid, own.gid)}
    assert (await files.stat("/etc/passwd")).uid == 0
    for wrong in ("no-such-user", ""):
        with pytest.raises(InvalidRequest):
            await files.chown(f"{root}/tree", wrong, user="root")
    with pytest.raises(PathNotFound):
        await files.chown(f"{root}/nothing", "user", user="root")
    await files.chown(f"{root}/tree/deep/file", "0", recursive=True, user="root")
    assert await owners("/deep/file") == {(0, 0)}


async def test_a_file_is_written_as_whom_the_name_means_at_the_time(sandbox: Sandbox, single_id: bool) -> None:
    if single_id:
        pytest.skip("this machine gives a sandbox one user id")
    passwd = await sandbox.files.read_text("/etc/passwd")
    groups = await sandbox.files.read_text("/etc/group")
    for uid, gid, member_of in ((1234, 1234, 1235), (1234, 1235, 1234), (1235, 1235, 1236), (1235, 1235, 1237)):
        entry = f"clerk:x:{uid}:{gid}::/tmp:/bin/sh\n"
        await sandbox.files.write_text("/etc/passwd", passwd + entry, user="root")
        await sandbox.files.write_text("/etc/group", f"{groups}team:x:{member_of}:clerk\n", user="root")
        await sandbox.files.remove("/tmp/theirs", missing_ok=True, user="root")
        await sandbox.files.write_text("/tmp/theirs", "x", user="clerk")
        stat = await sandbox.files.stat("theirs", user="clerk")
        assert (stat.uid, stat.gid) == (uid, gid)
        await sandbox.files.write_text("/tmp/shared", "x", mode=0o640, user="root")
        await sandbox.files.chown("/tmp/shared", f"0:{member_of}", user="root")
        assert await sandbox.files.read_text("/tmp/shared", user="clerk") == "x"
        await sandbox.files.remove("/tmp/shared", user="root")


async def test_a_write_through_a_symlink_writes_what_it_leads_to(shared: Sandbox, here: str) -> None:
    await shared.files.write_bytes(f"{here}/target", b"old")
    await shared.files.symlink(f"{here}/link", "target")
    await shared.files.write_bytes(f"{here}/link", b"new")
    assert (await shared.files.stat(f"{here}/link", follow=False)).kind == "symlink"
    assert await shared.files.read_bytes(f"{here}/target") == b"new"


@pytest.mark.cancels
async def test_nothing_is_seen_of_an_atomic_write_that_was_cancelled(shared: Sandbox, here: str) -> None:
    await shared.files.write_bytes(f"{here}/file", b"whole")
    started = anyio.Event()

    async def never_ending() -> AsyncIterator[bytes]:
        yield bytes(MIB)
        started.set()
        await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(shared.files.write_bytes, f"{here}/file", never_ending())
        await started.wait()
        assert await shared.files.read_bytes(f"{here}/file") == b"whole"
        group.cancel_scope.cancel()

    async def alone() -> bool:
        return [entry.name for entry in await shared.files.list(here)] == ["file"]

    await eventually(alone, "the half-written file is gone")
    assert await shared.files.read_bytes(f"{here}/file") == b"whole"


async def test_an_error_of_the_callers_own_iterator_comes_through_and_nothing_is_written(
    shared: Sandbox, here: str
) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"half"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await shared.files.write_bytes(f"{here}/file", broken())

    async def empty() -> bool:
        return not await shared.files.list(here)

    await eventually(empty, "the write left no file")


async def test_readers_never_see_half_of_an_atomic_write(shared: Sandbox, here: str) -> None:
    path = f"{here}/flips"
    await shared.files.write_bytes(path, b"a" * 100_000)
    done = False

    async def write() -> None:
        nonlocal done
        for letter in b"bcdefghij":
            await shared.files.write_bytes(path, bytes([letter]) * 100_000)
        done = True

    async with anyio.create_task_group() as group:
        group.start_soon(write)
        while not done:
            data = await shared.files.read_bytes(path)
            assert len(data) == 100_000
            assert len(set(data)) == 1


# ---- names ----


@pytest.mark.core
@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
async def test_a_name_may_be_anything_that_linux_allows(shared: Sandbox, here: str, name: str) -> None:
    path = f"{here}/{name}"
    await shared.files.write_bytes(path, b"found")
    assert await shared.files.read_bytes(path) == b"found"
    [entry] = await shared.files.list(here)
    assert entry.name == name
    assert (await shared.files.stat(path)).size == 5
    assert (await shared.exec(["cat", path])).stdout == "found"
    await shared.files.rename(path, path[:-1] + "~")
    [entry] = await shared.files.list(here)
    assert entry.name == name[:-1] + "~"
    await shared.files.remove(f"{here}/{entry.name}")
    assert await shared.files.list(here) == []


async def test_a_name_that_is_too_long_is_an_error_with_its_number(shared: Sandbox, here: str) -> None:
    with pytest.raises(FileError) as caught:
        await shared.files.write_bytes(f"{here}/{'x' * 256}", b"")
    assert caught.value.errno == errno.ENAMETOOLONG


@pytest.mark.parametrize("path", ["", "a\0b"], ids=repr)
async def test_a_path_that_cannot_be_one_is_an_invalid_request(shared: Sandbox, path: str) -> None:
    for call in (
        shared.files.read_bytes,
        shared.files.stat,
        shared.files.list,
        shared.files.mkdir,
        shared.files.remove,
    ):
        with pytest.raises(InvalidRequest):
            await call(path)


@pytest.mark.core
async def test_relative_paths_are_from_the_users_home(shared: Sandbox, here: str) -> None:
    await shared.files.write_bytes(f"{here}/file", b"x")
    assert await shared.files.exists(f"/home/user/{here}/file")
    await shared.files.write_bytes("roots-own", b"y", user="root")
    assert await shared.files.read_bytes("/root/roots-own", user="root") == b"y"
    await shared.files.remove("roots-own", user="root")


# ---- stat and list ----


@pytest.mark.core
async def test_stat_says_kind_size_mode_owner_and_time(shared: Sandbox, here: str, user_id: int) -> None:
    await shared.files.write_bytes(f"{here}/file", b"12345", mode=0o640)
    await shared.exec(["touch", "-d", "2020-01-02T03:04:05.5Z", f"{here}/file"])
    stat = await shared.files.stat(f"{here}/file")
    assert (stat.kind, stat.size, stat.mode, stat.uid, stat.gid) == ("file", 5, 0o640, user_id, user_id)
    assert stat.mtime == datetime(2020, 1, 2, 3, 4, 5, 500_000, tzinfo=UTC)
    assert stat.target is None


@pytest.mark.core
async def test_stat_follows_symlinks_unless_told_not_to(shared: Sandbox, here: str) -> None:
    await shared.files.write_bytes(f"{here}/file", b"12345")
    await shared.files.symlink(f"{here}/link", "file")
    assert (await shared.files.stat(f"{here}/link")).kind == "file"
    link = await shared.files.stat(f"{here}/link", follow=False)
    assert (link.kind, link.target) == ("symlink", "file")
    await shared.files.symlink(f"{here}/dangling", "/no/such")
    assert (await shared.files.stat(f"{here}/dangling", follow=False)).target == "/no/such"
    with pytest.raises(PathNotFound):
        await shared.files.stat(f"{here}/dangling")
    assert not await shared.files.exists(f"{here}/dangling")
    with pytest.raises(PathExists):
        await shared.files.symlink(f"{here}/link", "elsewhere")


async def test_every_kind_of_file_is_told(shared: Sandbox, here: str) -> None:
    await shared.exec(["mkfifo", f"{here}/fifo"])
    assert (await shared.files.stat(f"{here}/fifo")).kind == "fifo"
    assert (await shared.files.stat("/dev/null")).kind == "char_device"
    assert (await shared.files.stat("/")).kind == "directory"


async def test_exists_is_false_for_what_cannot_exist_and_raises_for_what_cannot_be_known(
    shared: Sandbox, here: str, single_id: bool
) -> None:
    await shared.files.write_bytes(f"{here}/file", b"")
    assert await shared.files.exists(here)
    assert not await shared.files.exists(f"{here}/nothing")
    assert not await shared.files.exists(f"{here}/file/below")
    if not single_id:
        with pytest.raises(PermissionDenied):
            await shared.files.exists("/root/anything")


@pytest.mark.core
async def test_list_shows_entries_of_every_kind_without_following_them(
    shared: Sandbox, here: str, user_id: int
) -> None:
    await shared.files.write_bytes(f"{here}/.hidden", b"123")
    await shared.files.mkdir(f"{here}/directory")
    await shared.files.symlink(f"{here}/link", "/no/such")
    await shared.exec(["mkfifo", f"{here}/fifo"])
    entries = {entry.name: entry for entry in await shared.files.list(here)}
    assert {name: entry.kind for name, entry in entries.items()} == {
        ".hidden": "file",
        "directory": "directory",
        "link": "symlink",
        "fifo": "fifo",
    }
    assert entries[".hidden"].size == 3
    assert entries["link"].target == "/no/such"
    assert {entry.uid for entry in entries.values()} == {user_id}


async def test_a_directory_of_thousands_of_files_is_listed_whole(
    shared: Sandbox, here: str, runtime_name: RuntimeName
) -> None:
    many = 10_000 if runtime_name != "runsc" else 2_000
    await shared.exec(f"cd {here} && seq -f file-%05g 1 {many} | xargs touch")
    names = sorted(entry.name for entry in await shared.files.list(here))
    assert names == [f"file-{number:05}" for number in range(1, many + 1)]


# ---- making, renaming, removing ----


@pytest.mark.core
async def test_mkdir_makes_parents_and_is_content_with_what_is_there(shared: Sandbox, here: str) -> None:
    await shared.files.mkdir(f"{here}/a/b/c")
    await shared.files.mkdir(f"{here}/a/b/c")
    assert (await shared.files.stat(f"{here}/a/b/c")).kind == "directory"
    with pytest.raises(PathExists):
        await shared.files.mkdir(f"{here}/a", parents=False)
    with pytest.raises(PathNotFound):
        await shared.files.mkdir(f"{here}/x/y", parents=False)
    await shared.files.mkdir(f"{here}/private", mode=0o700)
    assert (await shared.files.stat(f"{here}/private")).mode == 0o700
    await shared.files.write_bytes(f"{here}/file", b"")
    with pytest.raises((PathExists, PathNotDirectory)):
        await shared.files.mkdir(f"{here}/file")


@pytest.mark.core
async def test_remove_takes_files_links_and_empty_directories_and_full_ones_on_request(
    shared: Sandbox, here: str
) -> None:
    files = shared.files
    await files.write_bytes(f"{here}/full/below/file", b"kept")
    await files.mkdir(f"{here}/empty")
    await files.symlink(f"{here}/link", "full")
    await files.remove(f"{here}/link")
    assert await files.read_bytes(f"{here}/full/below/file") == b"kept"
    await files.remove(f"{here}/empty")
    with pytest.raises(FileError) as caught:
        await files.remove(f"{here}/full")
    assert "recursive" in caught.value.message
    assert await files.exists(f"{here}/full/below/file")
    await files.remove(f"{here}/full", recursive=True)
    assert await files.list(here) == []
    with pytest.raises(PathNotFound):
        await files.remove(f"{here}/full", recursive=True)
    await files.remove(f"{here}/full", missing_ok=True)


async def test_a_recursive_remove_does_not_follow_symlinks(shared: Sandbox, here: str) -> None:
    await shared.files.write_bytes(f"{here}/precious/file", b"kept")
    await shared.files.mkdir(f"{here}/doomed")
    await shared.files.symlink(f"{here}/doomed/link", "../precious")
    await shared.files.remove(f"{here}/doomed", recursive=True)
    assert await shared.files.read_bytes(f"{here}/precious/file") == b"kept"


async def test_a_very_deep_directory_can_be_made_and_removed(shared: Sandbox, here: str) -> None:
    deep = "/".join(["d"] * 500)
    await shared.files.mkdir(f"{here}/{deep}")
    await shared.files.remove(f"{here}/d", recursive=True)
    assert await shared.files.list(here) == []


@pytest.mark.core
async def test_rename_moves_and_replaces_at_once(shared: Sandbox, here: str) -> None:
    files = shared.files
    await files.write_bytes(f"{here}/a", b"a")
    await files.write_bytes(f"{here}/b", b"b")
    await files.rename(f"{here}/a", f"{here}/b")
    assert await files.read_bytes(f"{here}/b") == b"a"
    assert not await files.exists(f"{here}/a")
    with pytest.raises(PathNotFound):
        await files.rename(f"{here}/b", f"{here}/new/place")
    await files.rename(f"{here}/b", f"{here}/new/place", parents=True)
    assert await files.read_bytes(f"{here}/new/place") == b"a"
    with pytest.raises(PathNotFound):
        await files.rename(f"{here}/nothing", f"{here}/c")
    await files.rename(f"{here}/new", f"{here}/moved")
    assert await files.read_bytes(f"{here}/moved/place") == b"a"


# ---- errors ----


@pytest.mark.core
async def test_a_directory_where_a_file_is_expected_and_the_other_way_round(shared: Sandbox, here: str) -> None:
    files = shared.files
    await files.write_bytes(f"{here}/file", b"x")
    with pytest.raises(PathIsDirectory) as caught:
        await files.read_bytes(here)
    assert isinstance(caught.value, IsADirectoryError)
    assert caught.value.path == here
    with pytest.raises(PathIsDirectory):
        [piece async for piece in files.stream(here)]
    for atomic in (True, False):
        with pytest.raises(PathIsDirectory):
            await files.write_bytes(here, b"x", atomic=atomic)
    with pytest.raises(PathNotDirectory) as wrong:
        await files.list(f"{here}/file")
    assert isinstance(wrong.value, NotADirectoryError)
    with pytest.raises(PathNotDirectory):
        await files.read_bytes(f"{here}/file/below")
    with pytest.raises(PathNotDirectory):
        await files.write_bytes(f"{here}/file/below", b"x")


@pytest.mark.core
async def test_a_missing_file_is_a_file_not_found_error_with_its_path(shared: Sandbox) -> None:
    with pytest.raises(PathNotFound) as caught:
        await shared.files.read_bytes("no/such/file")
    assert isinstance(caught.value, FileNotFoundError)
    assert (caught.value.errno, caught.value.path) == (errno.ENOENT, "no/such/file")
    assert "no/such/file" in caught.value.message
    with pytest.raises(PathNotFound):
        await shared.files.list("no/such/directory")
    with pytest.raises(PathNotFound):
        [piece async for piece in shared.files.stream("no/such/file")]
    with pytest.raises(PathNotFound):
        await shared.files.chmod("no/such/file", 0o600)


async def test_reading_and_writing_never_wait_for_a_pipe_or_a_device(shared: Sandbox, here: str) -> None:
    await shared.exec(["mkfifo", f"{here}/fifo"])
    with anyio.fail_after(20):
        for path in (f"{here}/fifo", "/dev/zero", "/dev/tty"):
            with pytest.raises(FileError):
                await shared.files.read_bytes(path)
        with pytest.raises(FileError):
            await shared.files.write_bytes(f"{here}/fifo", b"x", atomic=False)
        with pytest.raises(FileError):
            await shared.files.write_bytes("/dev/null", b"x", user="root")
    assert (await shared.files.stat("/dev/null")).kind == "char_device"


@pytest.mark.core
async def test_permissions_are_those_of_the_user(shared: Sandbox, here: str, single_id: bool) -> None:
    if single_id:
        pytest.skip("with one id for all, the user is root")
    files = shared.files
    secret = "/root/secret"
    await files.write_bytes(secret, b"s", mode=0o600, user="root")
    attempts: list[Callable[[], Awaitable[object]]] = [
        lambda: files.read_bytes(secret),
        lambda: files.stat(secret),
        lambda: files.list("/root"),
        lambda: files.write_bytes("/etc/new", b"x"),
        lambda: files.write_bytes("/etc/passwd", b"x", atomic=False),
        lambda: files.remove("/etc/passwd"),
        lambda: files.mkdir("/usr/new"),
        lambda: files.rename("/etc/passwd", f"{here}/passwd"),
        lambda: files.chmod("/etc/passwd", 0o777),
    ]
    for attempt in attempts:
        with pytest.raises(PermissionDenied) as caught:
            await attempt()
        assert isinstance(caught.value, PermissionError)
    assert await files.read_bytes(secret, user="root") == b"s"
    await files.remove(secret, user="root")
    await files.write_bytes(f"/home/user/{here}/roots", b"x", mode=0o600, user="root")
    assert (await files.stat(f"{here}/roots")).uid == 0
    with pytest.raises(PermissionDenied):
        await files.read_bytes(f"{here}/roots")


async def test_files_of_a_user_who_does_not_exist_are_an_invalid_request(shared: Sandbox) -> None:
    with pytest.raises(InvalidRequest, match="no-such-user"):
        await shared.files.read_bytes("/etc/passwd", user="no-such-user")


async def test_what_the_kernel_makes_up_is_read_to_its_end(shared: Sandbox) -> None:
    """Files of /proc have the size 0."""
    assert (await shared.files.read_text("/proc/self/status")).startswith("Name:")


async def test_a_hundred_files_at_once_are_each_themselves(shared: Sandbox, here: str) -> None:
    async def one(number: int) -> None:
        data = f"{number}:".encode() * 5000
        await shared.files.write_bytes(f"{here}/{number}", data)
        assert await shared.files.read_bytes(f"{here}/{number}") == data

    async with anyio.create_task_group() as group:
        for number in range(100):
            group.start_soon(one, number)
    assert len(await shared.files.list(here)) == 100


async def test_a_write_into_a_full_file_system_says_so_and_leaves_nothing(shared: Sandbox) -> None:
    path = "/dev/shm/large"  # 64 MiB at most
    with pytest.raises(DiskFull):
        await shared.files.write_bytes(path, bytes(80 * MIB), user="root")

    async def gone() -> bool:
        return await shared.files.list("/dev/shm") == []

    await eventually(gone, "no partial file is left")


async def test_extended_attributes_are_replaced_by_a_write_and_shown_when_asked_for(shared: Sandbox) -> None:
    path = "/dev/shm/attributed"  # memory keeps them with every runtime; gVisor's root does not
    one, two = {"user.mine.a": b"1", "user.mine.b": b"\0\xff"}, {"user.mine.b": b"2"}
    for atomic in (True, False):
        for wanted in (one, two, {}):
            await shared.files.write_bytes(path, b"x", atomic=atomic, xattrs=wanted, xattr_prefix="user.mine.")
            assert (await shared.files.stat(path, xattr_prefix="user.mine.")).xattrs == wanted
    await shared.files.write_bytes(path, b"x", xattrs=one, xattr_prefix="user.mine.")
    (entry,) = await shared.files.list("/dev/shm", xattr_prefix="user.mine.a")
    assert entry.xattrs == {}  # `user.mine.a` begins no other name
    (entry,) = await shared.files.list("/dev/shm", xattr_prefix="user.mine")
    assert entry.xattrs == one
    assert (await shared.files.stat(path)).xattrs == {}
    await shared.files.remove(path)


@pytest.mark.parametrize(
    ("xattrs", "prefix"),
    [
        ({"user.mine.a": b""}, None),
        ({"user.other.a": b""}, "user.mine."),
        ({"user.mine.": b""}, "user.mine."),
        ({"user.mine." + "x" * 250: b""}, "user.mine."),
        ({"user.mine.a": b"x" * 4096}, "user.mine."),
        ({}, "user."),
        ({}, "security.capability"),
    ],
)
async def test_wrong_extended_attributes_are_an_invalid_request(
    shared: Sandbox, here: str, xattrs: dict[str, bytes], prefix: str | None
) -> None:
    with pytest.raises(InvalidRequest):
        await shared.files.write_bytes(f"{here}/file", b"x", xattrs=xattrs, xattr_prefix=prefix)
    assert not await shared.files.exists(f"{here}/file")
