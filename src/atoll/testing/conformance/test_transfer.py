"""`tar_out`, `tar_in`, `upload` and `download`: whole trees in and out."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from atoll import FileError, InvalidRequest, PathNotFound, PermissionDenied, Sandbox
from atoll.testing.inside import Peak
from atoll.testing.waiting import eventually

MIB = 1024 * 1024
ODD_NAMES = ["with space", "new\nline", "ünï€", os.fsdecode(b"\xff\xfe"), "n" * 200, "-r"]


def make_tree(root: Path) -> dict[str, bytes]:
    """A tree with every kind of entry that source code may have. Returns the contents of its files."""
    contents = {f"odd/{name}": os.fsencode(name) for name in ODD_NAMES}
    contents |= {
        "script": b"#!/bin/sh\necho ran\n",
        "empty": b"",
        ".hidden/file": b"hidden",
        "deep/" + "/".join(["d" * 60] * 6) + "/file": b"deep",
        "large": os.urandom(3 * MIB + 5),
    }
    for name, data in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (root / "script").chmod(0o755)
    (root / "empty-directory").mkdir(mode=0o750)
    (root / "link").symlink_to("script")
    (root / "dangling").symlink_to("nowhere")
    return contents


def describe(root: Path) -> dict[str, object]:
    """What a copy of a tree has to preserve."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_dir():
            found[name] = ("directory", path.stat().st_mode & 0o777)
        else:
            found[name] = ("file", path.stat().st_mode & 0o777, path.read_bytes())
    return found


# ---- upload and download ----


@pytest.mark.core
async def test_a_tree_goes_in_and_comes_back_the_same(shared: Sandbox, here: str, tmp_path: Path) -> None:
    contents = make_tree(tmp_path / "tree")
    size = sum(map(len, contents.values()))
    assert await shared.files.upload(tmp_path / "tree", f"{here}/copy") == size
    assert (await shared.exec([f"{here}/copy/script"])).stdout == "ran\n"
    assert await shared.files.download(f"{here}/copy", tmp_path / "back") == size
    assert describe(tmp_path / "back") == describe(tmp_path / "tree")


@pytest.mark.parametrize(
    ("exclude", "left_out"),
    [
        (["*.pyc"], {"a.pyc", "src/b.pyc", "src/.c.pyc"}),
        (["node_modules", "*.md"], {"node_modules", "node_modules/deep", "node_modules/deep/d.js", "src/e.md"}),
        (["src/*.py"], {"src/f.py"}),
        (["**/deep"], {"node_modules/deep", "node_modules/deep/d.js"}),
        (["./src", "nothing/*"], {"src", "src/b.pyc", "src/.c.pyc", "src/e.md", "src/f.py"}),
        (["*.{md,js}", "src/f.*"], {"node_modules/deep/d.js", "src/e.md", "src/f.py"}),
        (["nothing"], set()),
    ],
)
async def test_a_copy_leaves_out_what_is_excluded(
    shared: Sandbox, here: str, tmp_path: Path, exclude: list[str], left_out: set[str]
) -> None:
    files = ["a.pyc", "g.py", "src/b.pyc", "src/.c.pyc", "src/e.md", "src/f.py", "node_modules/deep/d.js"]
    for name in files:
        await shared.files.write_text(f"{here}/tree/{name}", name)
    everything = {*files, "src", "node_modules", "node_modules/deep"}
    size = await shared.files.download(f"{here}/tree", tmp_path / "back", exclude=exclude)
    found = {str(path.relative_to(tmp_path / "back")) for path in (tmp_path / "back").rglob("*")}
    assert found == everything - left_out
    assert size == sum(len(name) for name in set(files) - left_out)
    packed = b"".join([piece async for piece in shared.files.tar_out(f"{here}/tree", exclude=exclude)])
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        assert set(tar.getnames()) == {"tree"} | {f"tree/{name}" for name in everything - left_out}


async def test_patterns_to_exclude_that_are_wrong_are_refused(shared: Sandbox, here: str, tmp_path: Path) -> None:
    await shared.files.mkdir(f"{here}/tree")
    for wrong in ([""], ["a"] * 257):
        with pytest.raises(InvalidRequest):
            await shared.files.download(f"{here}/tree", tmp_path / "back", exclude=wrong)
    assert not list(tmp_path.iterdir())


async def test_a_tree_that_is_too_deep_is_refused_and_nothing_is_left(
    shared: Sandbox, here: str, tmp_path: Path
) -> None:
    nest = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')"
    assert (await shared.exec(["python3", "-c", nest], cwd=here)).exit_code == 0
    for target in ("back", "existing"):
        (tmp_path / "existing").mkdir(exist_ok=True)
        with pytest.raises(InvalidRequest, match="more than 512 levels deep"):
            await shared.files.download(f"{here}/d", tmp_path / target)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["existing"]
    assert (await shared.exec(f"rm -rf {here}/d")).exit_code == 0


@pytest.mark.core
async def test_a_file_goes_in_and_comes_back_with_its_mode(shared: Sandbox, here: str, tmp_path: Path) -> None:
    data = os.urandom(MIB + 1)
    (tmp_path / "file").write_bytes(data)
    (tmp_path / "file").chmod(0o750)
    assert await shared.files.upload(tmp_path / "file", f"{here}/a/b/copy") == len(data)
    stat = await shared.files.stat(f"{here}/a/b/copy")
    assert (stat.size, stat.mode) == (len(data), 0o750)
    assert await shared.files.download(f"{here}/a/b/copy", tmp_path / "back") == len(data)
    assert (tmp_path / "back").read_bytes() == data
    assert (tmp_path / "back").stat().st_mode & 0o777 == 0o750


async def test_a_copy_into_a_directory_that_is_there_keeps_its_own_name(
    shared: Sandbox, here: str, tmp_path: Path
) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_text("x")
    (tmp_path / "single").write_text("y")
    await shared.files.upload(tmp_path / "tree", here)
    await shared.files.upload(tmp_path / "single", here)
    await shared.files.upload(tmp_path / "single", f"{here}/new/")
    assert await shared.files.read_text(f"{here}/tree/file") == "x"
    assert await shared.files.read_text(f"{here}/single") == "y"
    assert await shared.files.read_text(f"{here}/new/single") == "y"
    (tmp_path / "out").mkdir()
    await shared.files.download(f"{here}/tree", tmp_path / "out")
    await shared.files.download(f"{here}/single", tmp_path / "out")
    assert (tmp_path / "out/tree/file").read_text() == "x"
    assert (tmp_path / "out/single").read_text() == "y"


async def test_what_is_missing_is_an_error_on_either_side(shared: Sandbox, here: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await shared.files.upload(tmp_path / "nothing", f"{here}/copy")
    with pytest.raises(PathNotFound):
        await shared.files.download(f"{here}/nothing", tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []
    assert await shared.files.list(here) == []


async def test_a_download_never_leaves_half_of_a_tree(shared: Sandbox, here: str, tmp_path: Path) -> None:
    await shared.exec(f"mkdir {here}/tree && truncate -s 20M {here}/tree/a {here}/tree/b")
    with pytest.raises(InvalidRequest):
        await shared.files.download(f"{here}/tree", tmp_path / "copy", limit_bytes=30 * MIB)
    assert list(tmp_path.iterdir()) == []
    with anyio.move_on_after(0.02):
        await shared.files.download(f"{here}/tree", tmp_path / "copy")
    assert {path.name for path in tmp_path.iterdir()} <= {"copy"}, "a partial copy is left"
    if (tmp_path / "copy").exists():
        assert len(list((tmp_path / "copy").iterdir())) == 2


async def test_symlinks_that_lead_outside_do_not_come_out(shared: Sandbox, here: str, tmp_path: Path) -> None:
    await shared.exec(f"mkdir {here}/evil && ln -s /etc/passwd {here}/evil/absolute")
    with pytest.raises(PermissionDenied):
        await shared.files.download(f"{here}/evil", tmp_path / "one")
    await shared.exec(f"rm {here}/evil/* && ln -s ../../x {here}/evil/climbs")
    with pytest.raises(PermissionDenied):
        await shared.files.download(f"{here}/evil", tmp_path / "two")
    assert list(tmp_path.iterdir()) == []


async def test_set_id_bits_do_not_come_out(shared: Sandbox, here: str, tmp_path: Path) -> None:
    await shared.exec(f"mkdir {here}/tree && cp /bin/true {here}/tree/suid && chmod 6755 {here}/tree/suid")
    await shared.files.download(f"{here}/tree", tmp_path / "copy")
    assert (tmp_path / "copy/suid").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "copy/suid").stat().st_uid == os.getuid()
    await shared.files.download(f"{here}/tree/suid", tmp_path / "single")
    assert (tmp_path / "single").stat().st_mode & 0o7777 == 0o755


async def test_pipes_sockets_and_devices_are_left_out(shared: Sandbox, here: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("x")
    await shared.files.upload(tmp_path, f"{here}/in")
    assert [entry.name for entry in await shared.files.list(f"{here}/in")] == ["file"]
    await shared.exec(["mkfifo", f"{here}/in/pipe"])
    with anyio.fail_after(20):
        await shared.files.download(f"{here}/in", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]


async def test_hard_links_come_out_as_files_of_the_same_content(shared: Sandbox, here: str, tmp_path: Path) -> None:
    await shared.exec(f"mkdir {here}/tree && echo same > {here}/tree/a && ln {here}/tree/a {here}/tree/b")
    await shared.files.download(f"{here}/tree", tmp_path / "copy")
    assert (tmp_path / "copy/a").read_text() == (tmp_path / "copy/b").read_text() == "same\n"


async def test_a_large_file_passes_both_ways_with_flat_memory(shared: Sandbox, here: str, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    with (tmp_path / "tree/sparse").open("wb") as file:
        file.truncate(64 * MIB)
    peak = Peak(os.getpid())
    assert await shared.files.upload(tmp_path / "tree", f"{here}/tree") == 64 * MIB
    assert await shared.files.download(f"{here}/tree", tmp_path / "back") == 64 * MIB
    assert peak.growth_bytes < 24 * MIB
    status = (tmp_path / "back/sparse").stat()
    assert status.st_size == 64 * MIB
    assert status.st_blocks * 512 < MIB, "holes stay holes"


async def test_what_is_uploaded_belongs_to_the_user(
    shared: Sandbox, here: str, tmp_path: Path, user_id: int, single_id: bool
) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_text("x")
    await shared.files.upload(tmp_path / "tree", f"{here}/tree")
    await shared.files.upload(tmp_path / "tree/file", f"{here}/file")
    for path in ("tree", "tree/file", "file"):
        assert (await shared.files.stat(f"{here}/{path}")).uid == user_id
    if not single_id:
        with pytest.raises(PermissionDenied):
            await shared.files.upload(tmp_path / "tree", "/usr/tree")


# ---- tar ----


async def once(data: bytes, *, piece: int = 100_000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), piece):
        yield data[at : at + piece]


def make_tar(*entries: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for info, data in entries:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def entry(
    name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, target: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, target, 0o755 if kind == tarfile.DIRTYPE else 0o644
    return info, data


@pytest.mark.core
async def test_tar_out_is_a_tar_that_others_can_read(shared: Sandbox, here: str) -> None:
    name = os.fsdecode(b"odd \xff\n")
    await shared.files.write_bytes(f"{here}/tree/{name}", b"12345", mode=0o600)
    await shared.files.write_bytes(f"{here}/tree/{'long' * 50}/{'name' * 50}", b"x")
    await shared.files.symlink(f"{here}/tree/link", "somewhere")
    for inside in (False, True):
        data = b"".join([piece async for piece in shared.files.tar_out(f"{here}/tree", inside=inside)])
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            members = {member.name.removeprefix("./").removeprefix("tree/"): member for member in tar.getmembers()}
            names = {member.name for member in tar.getmembers()}
        assert any(member.startswith("tree") for member in names) != inside
        assert members[name].isfile()
        assert (members[name].size, members[name].mode & 0o777) == (5, 0o600)
        assert members["link"].issym()
        assert members["link"].linkname == "somewhere"
        assert f"{'long' * 50}/{'name' * 50}" in members
        assert not any(member.startswith(("/", "..")) for member in names)


async def test_tar_out_of_a_single_file_is_that_file(shared: Sandbox, here: str) -> None:
    await shared.files.write_bytes(f"{here}/file", b"12345")
    data = b"".join([piece async for piece in shared.files.tar_out(f"{here}/file")])
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert [(member.name, member.size) for member in tar.getmembers()] == [("file", 5)]


async def test_tar_out_of_nothing_is_not_found(shared: Sandbox, here: str) -> None:
    with pytest.raises(PathNotFound):
        [piece async for piece in shared.files.tar_out(f"{here}/nothing")]


@pytest.mark.core
@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
async def test_tar_in_unpacks_every_common_form_of_tar(shared: Sandbox, here: str, form: int) -> None:
    long = "d" * 90 + "/" + "f" * 90
    data = make_tar(
        entry("directory", kind=tarfile.DIRTYPE),
        entry("directory/file", b"content"),
        entry(long, b"long"),
        entry("link", kind=tarfile.SYMTYPE, target="directory/file"),
        entry("hard", kind=tarfile.LNKTYPE, target="directory/file"),
        entry("big", bytes(100_000)),
        form=form,
    )
    assert await shared.files.tar_in(f"{here}/new/place", once(data, piece=777)) == 100_011
    assert await shared.files.read_bytes(f"{here}/new/place/link") == b"content"
    assert await shared.files.read_bytes(f"{here}/new/place/hard") == b"content"
    assert await shared.files.read_bytes(f"{here}/new/place/{long}") == b"long"
    assert (await shared.files.stat(f"{here}/new/place/big")).size == 100_000


async def test_tar_in_replaces_files_that_are_there(shared: Sandbox, here: str) -> None:
    await shared.files.write_bytes(f"{here}/file", b"a longer old one")
    await shared.files.tar_in(here, once(make_tar(entry("file", b"new"))))
    assert await shared.files.read_bytes(f"{here}/file") == b"new"


@pytest.mark.core
@pytest.mark.parametrize(
    "entries",
    [
        [entry("../outside", b"x")],
        [entry("a/../../outside", b"x")],
        [entry("/home/user/outside", b"x")],
        [entry("link", kind=tarfile.SYMTYPE, target=".."), entry("link/outside", b"x")],
        [entry("link", kind=tarfile.SYMTYPE, target="/home/user"), entry("link/outside", b"x")],
        [entry("hard", kind=tarfile.LNKTYPE, target="../../.profile")],
        [entry("hard", kind=tarfile.LNKTYPE, target="/etc/passwd")],
        [entry("device", kind=tarfile.CHRTYPE)],
    ],
    ids=["up", "down and up", "absolute", "link up", "link absolute", "hard link up", "hard link absolute", "device"],
)
async def test_tar_in_writes_nothing_outside_and_no_devices(
    shared: Sandbox, here: str, entries: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    before = {one.name for one in await shared.files.list(".")}
    with pytest.raises(PermissionDenied):
        await shared.files.tar_in(f"{here}/inside", once(make_tar(*entries)))
    assert {one.name for one in await shared.files.list(".")} == before
    left = {one.name for one in await shared.files.list(here)}
    assert left <= {"inside"}
    assert {one.kind for one in await shared.files.glob("inside/**", cwd=here)} <= {"symlink", "directory"}


async def test_tar_in_of_what_is_no_tar_or_half_of_one_is_an_error(shared: Sandbox, here: str) -> None:
    with pytest.raises(FileError):
        await shared.files.tar_in(f"{here}/a", once(os.urandom(10_000)))
    with pytest.raises(FileError):
        await shared.files.tar_in(f"{here}/b", once(make_tar(entry("file", bytes(100_000)))[:50_000]))
    assert (await shared.exec("echo fine")).stdout == "fine\n"


async def test_tar_in_that_is_cancelled_ends(shared: Sandbox, here: str) -> None:
    started = anyio.Event()

    async def never_ending() -> AsyncIterator[bytes]:
        yield make_tar(entry("file", bytes(100_000)))[:5000]
        started.set()
        await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(shared.files.tar_in, f"{here}/half", never_ending())
        await started.wait()
        group.cancel_scope.cancel()

    async def idle() -> bool:
        return not any("tar" in process.command for process in await shared.ps() if process.pid != 1)

    await eventually(idle, "its worker is gone")
