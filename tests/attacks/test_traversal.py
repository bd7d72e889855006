"""Leading the file API astray: symlinks, hostile archives, names that are swapped while an operation runs as root."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from atoll.contract.errors import AtollError, FileError
from atoll.runtime.sandbox import Sandbox
from tests.attacks.programs import PROBE, running, shell


def _rounds(sandbox: Sandbox) -> range:
    """How often a race is run. gVisor is slower, and loses sooner if it loses at all."""
    return range(12 if sandbox.info.runtime == "runsc" else 40)


async def _chunks(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _archive(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, content in entries:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _entry(
    name: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"owned", link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = link
    info.mode = 0o6777
    info.devmajor, info.devminor = 1, 3
    return info, content if kind == tarfile.REGTYPE else b""


HOSTILE = {
    "an absolute name": [_entry("/tmp/escaped")],
    "dot dot": [_entry("../escaped")],
    "dot dot within": [_entry("a/../../escaped")],
    "dot dot as a directory": [_entry("..", tarfile.DIRTYPE), _entry("../escaped")],
    "through a symlink": [_entry("s", tarfile.SYMTYPE, link="/tmp"), _entry("s/escaped")],
    "through a relative symlink": [_entry("s", tarfile.SYMTYPE, link=".."), _entry("s/escaped")],
    "through two symlinks": [
        _entry("a", tarfile.SYMTYPE, link=".."),
        _entry("b", tarfile.SYMTYPE, link="a/.."),
        _entry("b/escaped"),
    ],
    "onto a symlink": [_entry("s", tarfile.SYMTYPE, link="/tmp/escaped"), _entry("s")],
    "a hard link to outside": [_entry("h", tarfile.LNKTYPE, link="/etc/passwd")],
    "a hard link above": [_entry("h", tarfile.LNKTYPE, link="../../../etc/passwd"), _entry("h")],
    "a hard link through a symlink": [
        _entry("s", tarfile.SYMTYPE, link="/etc"),
        _entry("h", tarfile.LNKTYPE, link="s/passwd"),
        _entry("h"),
    ],
    "a hard link to a symlink": [
        _entry("s", tarfile.SYMTYPE, link="/tmp/escaped"),
        _entry("h", tarfile.LNKTYPE, link="s"),
        _entry("h"),
    ],
    "a character device": [_entry("d", tarfile.CHRTYPE)],
    "a block device": [_entry("d", tarfile.BLKTYPE)],
}


@pytest.mark.parametrize("user", ["user", "root"])
async def test_an_archive_writes_nothing_outside_of_its_directory(prey: Sandbox, user: str) -> None:
    passwd = await prey.files.read_bytes("/etc/passwd")
    for what, entries in HOSTILE.items():
        target = f"/tmp/in-{user}/{abs(hash(what))}/x"
        with suppress(FileError):
            await prey.files.tar_in(target, _chunks(_archive(*entries)), user=user)
            # Taking it is fine where nothing leads out: `onto a symlink` may replace the link.
            assert what in {"onto a symlink", "a hard link to a symlink"}, what
        said = await shell(prey, "find /tmp -name 'escaped*'", user="root")
        assert said.stdout == "", what
        assert await prey.files.read_bytes("/etc/passwd") == passwd, what


async def test_an_archive_brings_no_setuid_root_file_for_a_user(prey: Sandbox) -> None:
    await prey.files.tar_in("/tmp/suid", _chunks(_archive(_entry("f"))))
    status = await prey.files.stat("/tmp/suid/f")
    assert status.uid == 1000


async def test_garbage_and_half_archives_are_refused(prey: Sandbox) -> None:
    whole = _archive(_entry("f", content=b"x" * 5000))
    huge = bytearray(whole)
    huge[124:136] = b"77777777777\0"
    wrong = bytearray(whole)
    wrong[0] ^= 1
    for data in (b"garbage" * 1000, os.urandom(4096), whole[:700], whole[:513], bytes(wrong), bytes(huge)):
        with anyio.fail_after(15):
            with pytest.raises(AtollError):
                await prey.files.tar_in("/tmp/garbage", _chunks(data))
    assert await prey.files.tar_in("/tmp/garbage", _chunks(whole)) == 5000


async def test_an_upload_follows_no_symlink_of_the_hosts(prey: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("outside")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "link").symlink_to(tmp_path / "secret")
    await prey.files.upload(tree, "/tmp/uploaded")
    said = await shell(prey, "cat /tmp/uploaded/link /tmp/uploaded/tree/link; find /tmp/uploaded -type l")
    assert "outside" not in said.stdout
    assert "link" in said.stdout


@pytest.mark.parametrize("target", ["/etc/hostname", "../../../../../../etc/hostname", "../outside"])
async def test_a_download_brings_no_symlink_that_leads_out(victim: Sandbox, tmp_path: Path, target: str) -> None:
    (tmp_path / "outside").write_text("untouched")
    await shell(victim, f"mkdir -p /tmp/d/sub && ln -s '{target}' /tmp/d/link && echo x > /tmp/d/file")
    with suppress(FileError):
        await victim.files.download("/tmp/d", tmp_path / "out")
    link = tmp_path / "out" / "link"
    assert not link.is_symlink() or (tmp_path / "out") in link.resolve().parents
    assert (tmp_path / "outside").read_text() == "untouched"


async def test_a_download_keeps_no_setuid_bits_and_no_foreign_owner(victim: Sandbox, tmp_path: Path) -> None:
    await shell(
        victim, "mkdir /tmp/d && cp /bin/true /tmp/d/f && chmod 6777 /tmp/d/f && chmod 7777 /tmp/d", user="root"
    )
    await victim.files.download("/tmp/d", tmp_path / "tree", user="root")
    await victim.files.download("/tmp/d/f", tmp_path / "file", user="root")
    for path in (tmp_path / "tree", tmp_path / "tree" / "f", tmp_path / "file"):
        status = path.lstat()
        assert status.st_mode & 0o7000 == 0
        assert (status.st_uid, status.st_gid) == (os.geteuid(), os.getegid())


async def test_a_download_does_not_write_through_a_symlink_that_stands_there(victim: Sandbox, tmp_path: Path) -> None:
    victim_file = tmp_path / "precious"
    victim_file.write_text("precious")
    out = tmp_path / "out"
    out.mkdir()
    (out / "f").symlink_to(victim_file)
    (out / "sub").symlink_to(tmp_path)
    await shell(victim, "mkdir -p /tmp/out/sub && echo owned > /tmp/out/f && echo owned > /tmp/out/sub/precious")
    with suppress(OSError):
        await victim.files.download("/tmp/out", tmp_path)
    assert victim_file.read_text() == "precious"


# ---- races: a user's process swaps names while root's operation runs ----

_STAGE = """
set -e
mkdir -p /root/precious/sub; echo precious > /root/precious/file; echo precious > /root/precious/sub/file
chmod -R go-rwx /root
"""


@pytest.fixture
async def staged(victim: Sandbox) -> Sandbox:
    """A sandbox in which root owns something that a user may neither see nor change."""
    assert (await shell(victim, _STAGE, user="root")).ok
    return victim


async def _precious(sandbox: Sandbox) -> list[str]:
    said = await shell(
        sandbox, "cd /root/precious && find . -printf '%P %u %m\\n' | sort; cat file sub/file", user="root"
    )
    assert said.ok, f"something precious is gone: {said.stderr}"
    return said.stdout.splitlines()


async def test_removing_as_root_does_not_follow_a_name_that_is_swapped(staged: Sandbox) -> None:
    before = await _precious(staged)
    await shell(staged, "ln -s /root/precious /tmp/link")
    async with running(staged, PROBE, "swap", "/tmp/tree/sub", "/tmp/link"):
        for _ in _rounds(staged):
            await shell(staged, "mkdir -p /tmp/tree/sub/sub/sub; : > /tmp/tree/sub/file; : > /tmp/tree/sub/sub/file")
            try:
                await staged.files.remove("/tmp/tree", recursive=True, missing_ok=True, user="root")
            except FileError:
                continue
    assert await _precious(staged) == before


async def test_unpacking_as_root_does_not_follow_a_name_that_is_swapped(staged: Sandbox) -> None:
    before = await _precious(staged)
    archive = _archive(*[_entry(f"sub/f{i}") for i in range(20)], *[_entry(f"sub/sub/f{i}") for i in range(20)])
    await shell(staged, "mkdir -p /tmp/tree/sub; ln -s /root/precious /tmp/link")
    async with running(staged, PROBE, "swap", "/tmp/tree/sub", "/tmp/link"):
        for _ in _rounds(staged):
            try:
                await staged.files.tar_in("/tmp/tree", _chunks(archive), user="root")
            except FileError:
                continue
    assert await _precious(staged) == before


async def test_packing_as_root_does_not_follow_a_name_that_is_swapped(staged: Sandbox) -> None:
    await shell(staged, "mkdir -p /tmp/tree/sub/sub; echo mine > /tmp/tree/sub/file; ln -s /root/precious /tmp/link")
    async with running(staged, PROBE, "swap", "/tmp/tree/sub", "/tmp/link"):
        for _ in _rounds(staged):
            packed = b""
            try:
                async for chunk in staged.files.tar_out("/tmp/tree", user="root"):
                    packed += chunk
            except FileError:
                continue
            finally:
                assert b"precious\n" not in packed


async def test_searching_as_root_does_not_follow_a_name_that_is_swapped(staged: Sandbox) -> None:
    await shell(staged, "mkdir -p /tmp/tree/sub/sub; echo mine > /tmp/tree/sub/file; ln -s /root/precious /tmp/link")
    async with running(staged, PROBE, "swap", "/tmp/tree/sub", "/tmp/link"):
        for _ in _rounds(staged):
            try:
                found = await staged.files.grep("precious", "/tmp/tree", user="root")
            except FileError:
                continue
            assert not found


@pytest.mark.parametrize("atomic", [True, False])
async def test_a_user_reaches_nothing_through_symlinks_that_the_kernel_would_deny(prey: Sandbox, atomic: bool) -> None:
    await shell(prey, "mkdir -p /tmp/l; ln -sf /etc/passwd /tmp/l/file; ln -sfn /etc /tmp/l/dir")
    before = await prey.files.read_bytes("/etc/passwd")
    for path in ("/tmp/l/file", "/tmp/l/dir/passwd", "/tmp/l/dir/new"):
        with suppress(FileError):
            await prey.files.write_bytes(path, b"owned", atomic=atomic)
    assert await prey.files.read_bytes("/etc/passwd") == before
    assert not await prey.files.exists("/etc/new")


async def test_names_with_a_nul_never_reach_the_kernel(prey: Sandbox) -> None:
    with pytest.raises(ValueError, match="NUL"):
        await prey.files.read_bytes("/etc/hosts\0/../shadow")
    with pytest.raises(ValueError, match="NUL"):
        await prey.exec(["cat", "/etc/hosts\0x"])
