"""Archives both ways, and archives that mean harm."""

from __future__ import annotations

import errno
import io
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.guest.client import Guest


def archive(*entries: Callable[[tarfile.TarFile], None], kind: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as tar:
        for entry in entries:
            entry(tar)
    return out.getvalue()


def file(name: str, data: bytes = b"data", **more: Any) -> Callable[[tarfile.TarFile], None]:
    def add(tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        for key, value in more.items():
            setattr(info, key, value)
        tar.addfile(info, io.BytesIO(data))

    return add


def special(name: str, kind: bytes, linkname: str = "", **more: Any) -> Callable[[tarfile.TarFile], None]:
    def add(tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, linkname
        for key, value in more.items():
            setattr(info, key, value)
        tar.addfile(info)

    return add


def unpack(guest: Guest, data: bytes, path: Path, **more: Any) -> dict:
    return guest.run("TAR_IN", data, PATH=str(path), **more).end


LONG = "/".join(["directory-with-a-long-name"] * 12) + "/file"


def make_tree(root: Path) -> None:
    (root / "sub" / "empty").mkdir(parents=True)
    (root / "a").write_bytes(b"alpha")
    (root / "a").chmod(0o4751)
    os.utime(root / "a", ns=(1, 1_234_567_890_123_456_789))
    (root / "big").write_bytes(os.urandom(3_000_001))
    os.link(root / "a", root / "hard")
    (root / "soft").symlink_to("sub/nowhere")
    (root / "sub").chmod(0o500)
    os.mkfifo(root / "fifo")
    (root / LONG).parent.mkdir(parents=True)
    (root / LONG).write_bytes(b"long")
    with open(os.path.join(bytes(root), b"\xff\n\xe2"), "wb") as nasty:
        nasty.write(b"nasty")


def test_what_goes_out_is_a_proper_archive(guest: Guest, tmp_path: Path) -> None:
    make_tree(tmp_path / "tree")
    stream = guest.run("TAR_OUT", PATH=str(tmp_path / "tree"))
    assert "ERRNO" not in stream.end
    with tarfile.open(fileobj=io.BytesIO(stream.out)) as tar:
        names = tar.getnames()
        assert names[0] == "tree"
        assert f"tree/{LONG}" in names
        content: Any = tar.extractfile("tree/big")
        assert content.read() == (tmp_path / "tree" / "big").read_bytes()
        info = tar.getmember("tree/a")
        assert info.mode == 0o4751
        assert abs(info.mtime - 1_234_567_890.123456789) < 1e-6
        assert tar.getmember("tree/hard").linkname == "tree/a"
        assert tar.getmember("tree/soft").linkname == "sub/nowhere"
        assert "tree/fifo" not in names
        assert os.fsdecode(b"tree/\xff\n\xe2") in names


def test_out_and_in_gives_the_same_tree(guest: Guest, tmp_path: Path) -> None:
    source, copy = tmp_path / "tree", tmp_path / "made" / "copy"
    make_tree(source)
    stream = guest.run("TAR_OUT", PATH=str(source), INSIDE=1)
    end = unpack(guest, stream.out, copy)
    os.unlink(source / "fifo")
    assert end["COUNT"] == sum(len(d) + len(f) for _, d, f in os.walk(source))

    def picture(root: Path) -> dict:
        out = {}
        for path in sorted(root.rglob("*"), key=bytes):
            info = path.lstat()
            content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
            out[str(path.relative_to(root))] = (info.st_mode, info.st_mtime_ns, content, info.st_nlink)
        return out

    os.utime(source / "soft", ns=(0, (copy / "soft").lstat().st_mtime_ns), follow_symlinks=False)
    assert picture(copy) == picture(source)
    assert (copy / "a").stat().st_ino == (copy / "hard").stat().st_ino


def test_a_single_file_or_link_can_go_out(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    (tmp_path / "link").symlink_to("file")
    for name, kind in (("file", tarfile.REGTYPE), ("link", tarfile.SYMTYPE)):
        stream = guest.run("TAR_OUT", PATH=str(tmp_path / name))
        with tarfile.open(fileobj=io.BytesIO(stream.out)) as tar:
            (member,) = tar.getmembers()
            assert (member.name, member.type) == (name, kind)
    assert guest.run("TAR_OUT", PATH=str(tmp_path / "file"), INSIDE=1).end["ERRNO"] == errno.ENOTDIR


def test_an_unreadable_file_fails_the_archive(guest: Guest, tmp_path: Path) -> None:
    for directory in [tmp_path, *tmp_path.parents]:
        if directory not in (Path("/"), Path("/tmp")):
            directory.chmod(0o755)
    (tmp_path / "file").touch(0o600)
    end = guest.run("TAR_OUT", PATH=str(tmp_path), USER="nobody").end
    assert end["ERRNO"] == errno.EACCES
    assert b"file" in end["MESSAGE"]


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_every_common_format_comes_in(guest: Guest, tmp_path: Path, kind: int) -> None:
    name = "d" * 120 + "/" + "f" * 90 if kind == tarfile.USTAR_FORMAT else "n" * 150 + "/" + "f" * 120
    target = "t" * (90 if kind == tarfile.USTAR_FORMAT else 300)
    data = archive(file(name, b"x" * 1000, mtime=77), special("link", tarfile.SYMTYPE, target), kind=kind)
    end = unpack(guest, data, tmp_path)
    assert end == {"SIZE": 1000, "COUNT": 2}
    assert (tmp_path / name).read_bytes() == b"x" * 1000
    assert (tmp_path / name).stat().st_mtime == 77
    assert os.readlink(tmp_path / "link") == target


@pytest.mark.parametrize("name", ["/abs", "../up", "a/../../up", "a/..", ".."])
def test_names_that_lead_outside_are_refused(guest: Guest, tmp_path: Path, name: str) -> None:
    inside = tmp_path / "inside"
    assert unpack(guest, archive(file(name)), inside)["ERRNO"] == errno.EXDEV
    assert sorted(os.listdir(tmp_path)) == ["inside"]
    assert not Path("/abs").exists()


def test_names_through_a_link_are_refused(guest: Guest, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    inside = tmp_path / "inside"
    for target in (str(outside), "../outside", "."):
        data = archive(special("link", tarfile.SYMTYPE, target), file("link/file"))
        assert unpack(guest, data, inside)["ERRNO"] == errno.EXDEV
        data = archive(special("link", tarfile.SYMTYPE, target), special("link", tarfile.DIRTYPE))
        assert unpack(guest, data, inside)["ERRNO"] == errno.EXDEV
    assert os.listdir(outside) == []


def test_a_file_replaces_a_link_and_does_not_write_through_it(guest: Guest, tmp_path: Path) -> None:
    victim, inside = tmp_path / "victim", tmp_path / "inside"
    victim.write_bytes(b"kept")
    data = archive(special("name", tarfile.SYMTYPE, str(victim)), file("name", b"mine"))
    assert "ERRNO" not in unpack(guest, data, inside)
    assert victim.read_bytes() == b"kept"
    assert (inside / "name").read_bytes() == b"mine"


def test_hard_links_stay_inside(guest: Guest, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    (tmp_path / "victim").write_bytes(b"secret")
    for target in ("../victim", "/etc/passwd", "a/../../victim"):
        assert unpack(guest, archive(special("name", tarfile.LNKTYPE, target)), inside)["ERRNO"] == errno.EXDEV
    data = archive(special("up", tarfile.SYMTYPE, ".."), special("name", tarfile.LNKTYPE, "up/victim"))
    assert unpack(guest, data, inside)["ERRNO"] == errno.EXDEV
    data = archive(file("first", b"x"), special("second", tarfile.LNKTYPE, "first"))
    assert unpack(guest, data, inside)["COUNT"] == 2
    assert (inside / "second").read_bytes() == b"x"
    assert not (inside / "name").exists()


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_devices_are_refused(guest: Guest, tmp_path: Path, kind: bytes) -> None:
    assert unpack(guest, archive(special("dev", kind, devmajor=1, devminor=3)), tmp_path)["ERRNO"] == errno.EPERM
    assert os.listdir(tmp_path) == []


def test_setuid_is_roots_to_give(guest: Guest, tmp_path: Path) -> None:
    for directory in [tmp_path, *tmp_path.parents]:
        if directory not in (Path("/"), Path("/tmp")):
            directory.chmod(0o755)
    data = archive(file("tool", mode=0o6755))
    unpack(guest, data, tmp_path / "root")
    assert stat.S_IMODE((tmp_path / "root" / "tool").stat().st_mode) == 0o6755
    (tmp_path / "user").mkdir()
    os.chown(tmp_path / "user", 65534, 65534)
    unpack(guest, data, tmp_path / "user", USER="nobody")
    assert stat.S_IMODE((tmp_path / "user" / "tool").stat().st_mode) == 0o755


def test_read_only_directories_can_be_filled(guest: Guest, tmp_path: Path) -> None:
    for directory in [tmp_path, *tmp_path.parents]:
        if directory not in (Path("/"), Path("/tmp")):
            directory.chmod(0o755)
    os.chown(tmp_path, 65534, 65534)
    data = archive(special("d", tarfile.DIRTYPE, mode=0o555, mtime=1000), file("d/file"))
    assert unpack(guest, data, tmp_path, USER="nobody")["COUNT"] == 2
    info = (tmp_path / "d").stat()
    assert stat.S_IMODE(info.st_mode) == 0o555
    assert info.st_mtime == 1000


def test_sparse_files_are_refused(guest: Guest, tmp_path: Path) -> None:
    data = archive(file("sparse", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.name": "x"}))
    assert unpack(guest, data, tmp_path)["ERRNO"] == errno.EOPNOTSUPP
    raw = bytearray(archive(file("sparse"), kind=tarfile.GNU_FORMAT))
    raw[156:157] = b"S"
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw[:512])
    assert unpack(guest, bytes(raw), tmp_path)["ERRNO"] == errno.EOPNOTSUPP


@pytest.mark.parametrize("cut", [100, 512, 700, 1024 + 200])
def test_an_archive_that_is_cut_short_is_an_error(guest: Guest, tmp_path: Path, cut: int) -> None:
    data = archive(file("first", b"x" * 600))[:cut]
    assert unpack(guest, data, tmp_path)["ERRNO"] == errno.EINVAL


def test_garbage_is_no_archive(guest: Guest, tmp_path: Path) -> None:
    assert unpack(guest, os.urandom(5000), tmp_path)["ERRNO"] == errno.EINVAL
    assert unpack(guest, b"", tmp_path) == {"SIZE": 0, "COUNT": 0}


def test_absurd_sizes_are_refused(guest: Guest, tmp_path: Path) -> None:
    for size in ("99999999999999999999", "-1", "1x"):
        data = archive(file("file", b"x", pax_headers={"size": size}))
        assert unpack(guest, data, tmp_path)["ERRNO"] == errno.EINVAL
