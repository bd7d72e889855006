"""Tars that a hostile sandbox made: nothing outside is written, whatever they hold."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from atoll.contract.errors import AtollError, InvalidRequest, PermissionDenied, SandboxError
from atoll.runtime.guest import copying
from atoll.runtime.guest.copying import TarUnpacker


def entry(
    name: str, data: bytes = b"", *, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.size = kind, link, mode, len(data)
    return info, data


def archive(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "around" / "root"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def unpack(root: Path) -> Callable[..., int]:
    def unpack(data: bytes, *, piece: int = 10_000, limit_bytes: int = 10**9) -> int:
        with TarUnpacker(root, "what", limit_bytes) as unpacker:
            for start in range(0, len(data), piece):
                unpacker.feed(data[start : start + piece])
            unpacker.finish()
            return unpacker.size

    return unpack


def test_a_tar_of_directories_inside_each_other_is_unpacked_up_to_a_depth(
    unpack: Callable[..., int], root: Path
) -> None:
    def nested(depth: int) -> bytes:
        return archive(*(entry("d/" * level + "d", kind=tarfile.DIRTYPE, mode=0o755) for level in range(depth)))

    unpack(nested(copying.MAX_DOWNLOAD_DEPTH))
    with pytest.raises(InvalidRequest, match="more than 512 levels deep"):
        unpack(nested(copying.MAX_DOWNLOAD_DEPTH + 1))
    with pytest.raises(InvalidRequest, match="more than 512 levels deep"):
        unpack(archive(entry("a/" * 600 + "file", b"1")))


def test_a_tree_is_discarded_whatever_its_depth_and_the_length_of_its_paths(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    root = tmp_path / "root"
    root.mkdir()
    fd = os.open(root, os.O_RDONLY)
    for level in range(3000):
        name = "long" * 20 if level % 2 else "a"
        os.mkdir(name, dir_fd=fd)
        os.symlink(outside, "link", dir_fd=fd)
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    copying._discard(root)
    assert os.listdir(tmp_path) == ["outside"]
    assert os.listdir(outside) == ["kept"]
    copying._discard(root)


@pytest.mark.parametrize("piece", [1, 511, 512, 513, 10**6])
def test_a_tar_is_unpacked_however_it_is_cut(unpack: Callable[..., int], root: Path, piece: int) -> None:
    data = archive(
        entry("dir", kind=tarfile.DIRTYPE, mode=0o755),
        entry("dir/file", b"x" * 1000, mode=0o640),
        entry("dir/empty"),
        entry("dir/link", kind=tarfile.SYMTYPE, link="file"),
        entry("deep/link", kind=tarfile.SYMTYPE, link="../dir/file"),
        entry("dir/hard", kind=tarfile.LNKTYPE, link="dir/file"),
        entry("no/parent/yet/" + "n" * 200, b"long"),
        entry("grün", b"unicode"),
    )
    assert unpack(data, piece=piece) == 1011
    umask = os.umask(0o022)
    os.umask(umask)
    assert (root / "dir/file").read_bytes() == b"x" * 1000
    assert (root / "dir/file").stat().st_mode & 0o7777 == 0o640 & ~umask
    assert (root / "dir/link").readlink() == Path("file")
    assert (root / "deep/link").read_bytes() == b"x" * 1000
    assert (root / "dir/hard").samefile(root / "dir/file")
    assert (root / "no/parent/yet" / ("n" * 200)).read_text() == "long"
    assert (root / "grün").read_text() == "unicode"


def test_zeros_are_written_as_holes_and_read_as_zeros(unpack: Callable[..., int], root: Path) -> None:
    data = b"a" + bytes(99_999) + b"b" * 5_000 + bytes(100_000)
    for piece in (512, 4096, 10_000, 10**6):
        unpack(archive(entry(f"file{piece}", data)), piece=piece)
        assert (root / f"file{piece}").read_bytes() == data
    assert (root / "file10000").stat().st_blocks * 512 < len(data)


def test_set_id_and_sticky_bits_are_dropped_and_directories_stay_usable(unpack: Callable[..., int], root: Path) -> None:
    unpack(
        archive(
            entry("tool", b"x", mode=0o6755),
            entry("shut", kind=tarfile.DIRTYPE, mode=0o1000),
            entry("shut/in", b"y"),
        )
    )
    assert (root / "tool").stat().st_mode & 0o7777 == 0o755
    assert (root / "shut").stat().st_mode & 0o7777 == 0o700


ATTACKS = {
    "an absolute name": [entry("/escaped", b"x")],
    "a name with ..": [entry("../escaped", b"x")],
    "a name with .. inside": [entry("a/../../escaped", b"x")],
    "a directory with ..": [entry("..", kind=tarfile.DIRTYPE)],
    "an absolute symlink": [entry("l", kind=tarfile.SYMTYPE, link="/etc")],
    "a symlink that leads up": [entry("l", kind=tarfile.SYMTYPE, link="..")],
    "a symlink that leads up from below": [entry("a/l", kind=tarfile.SYMTYPE, link="../..")],
    "a symlink that goes down and up": [entry("l", kind=tarfile.SYMTYPE, link="a/../../escaped")],
    "a symlink to nothing": [entry("l", kind=tarfile.SYMTYPE, link="")],
    "symlinks that lead up together": [
        entry("a/b/c/up", kind=tarfile.SYMTYPE, link="../../.."),
        entry("out", kind=tarfile.SYMTYPE, link="a/b/c/up/../escaped"),
    ],
    "a file through a symlink": [
        entry("a", kind=tarfile.DIRTYPE),
        entry("l", kind=tarfile.SYMTYPE, link="a"),
        entry("l/escaped", b"x"),
    ],
    "a file onto a symlink": [entry("l", kind=tarfile.SYMTYPE, link="f"), entry("l", b"x")],
    "a directory onto a symlink": [
        entry("l", kind=tarfile.SYMTYPE, link="a"),
        entry("l", kind=tarfile.DIRTYPE),
    ],
    "a file in a file": [entry("f", b"x"), entry("f/g", b"x")],
    "a file twice": [entry("f", b"x"), entry("f", b"y")],
    "a hard link outside": [entry("h", kind=tarfile.LNKTYPE, link="../../around")],
    "an absolute hard link": [entry("h", kind=tarfile.LNKTYPE, link="/etc/passwd")],
    "a hard link to a symlink": [
        entry("l", kind=tarfile.SYMTYPE, link="f"),
        entry("h", kind=tarfile.LNKTYPE, link="l"),
    ],
    "a hard link to a directory": [entry("d", kind=tarfile.DIRTYPE), entry("h", kind=tarfile.LNKTYPE, link="d")],
    "a hard link to nothing": [entry("h", kind=tarfile.LNKTYPE, link="missing")],
    "a character device": [entry("null", kind=tarfile.CHRTYPE)],
    "a block device": [entry("disk", kind=tarfile.BLKTYPE)],
    "a pipe": [entry("pipe", kind=tarfile.FIFOTYPE)],
    "a file without a name": [entry("./", b"x")],
}


@pytest.mark.parametrize("entries", ATTACKS.values(), ids=ATTACKS.keys())
def test_an_entry_that_leads_outside_is_refused(
    unpack: Callable[..., int], root: Path, entries: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    with pytest.raises(PermissionDenied):
        unpack(archive(*entries))
    assert os.listdir(root.parent) == ["root"]
    assert os.listdir(root.parent.parent) == ["around"]


def test_more_than_the_limit_is_refused_before_it_is_written(unpack: Callable[..., int], root: Path) -> None:
    with pytest.raises(InvalidRequest, match="limit_bytes"):
        unpack(archive(entry("a", b"x" * 600), entry("b", b"x" * 600)), limit_bytes=1000)
    assert not (root / "b").exists()


def test_too_many_entries_are_refused(unpack: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "MAX_DOWNLOAD_ENTRIES", 10)
    with pytest.raises(InvalidRequest):
        unpack(archive(*(entry(f"f{i}") for i in range(11))))


def resum(block: bytearray) -> bytes:
    """The header with its checksum put right."""
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def broken_headers() -> dict[str, bytes]:
    good = bytearray(archive(entry("f", b"x"))[:512])
    huge = bytearray(good)
    huge[156:157] = b"x"
    huge[124:136] = b"77777777777\0"
    negative = bytearray(good)
    negative[124:136] = b"\xff" * 12
    contents = bytearray(good)
    contents[156:157] = b"5"
    gnu = bytearray(good)
    gnu[257:265] = b"ustar  \0"
    summed = bytearray(good)
    summed[0] ^= 1
    pax = bytearray(good)
    pax[156:157] = b"x"
    pax[124:136] = b"%011o\0" % 9
    return {
        "an extension of many gigabytes": resum(huge),
        "a size that is none": resum(negative),
        "a directory with contents": resum(contents),
        "another format": resum(gnu),
        "a wrong checksum": bytes(summed),
        "an extension that is none": resum(pax) + b"99 path=x".ljust(512, b"\0"),
        "an extension of length 0": resum(pax) + b"0 path=xy".ljust(512, b"\0"),
        "half a header": bytes(good[:100]),
        "nothing": b"",
        "no end": archive(entry("f", b"x"))[:1024],
        "half a file": archive(entry("f", b"x" * 5000))[:2000],
        "something after the end": archive(entry("f", b"x")) + b"x" * 512,
    }


@pytest.mark.parametrize("data", broken_headers().values(), ids=broken_headers().keys())
def test_what_is_not_a_tar_is_refused(unpack: Callable[..., int], data: bytes) -> None:
    with pytest.raises(SandboxError):
        unpack(data)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(data=st.data())
def test_a_tar_that_was_tampered_with_is_unpacked_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    good = bytearray(
        archive(
            entry("d", kind=tarfile.DIRTYPE),
            entry("d/f", b"hello"),
            entry("n" * 150, b"x"),
            entry("l", kind=tarfile.SYMTYPE, link="d/f"),
        )
    )
    for _ in range(data.draw(st.integers(0, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    for start in range(0, len(good), 512):
        if good[start + 257 : start + 262] == b"ustar" and data.draw(st.booleans()):
            good[start : start + 512] = resum(good[start : start + 512])
    around = tmp_path_factory.mktemp("around")
    (around / "root").mkdir()
    with contextlib.suppress(AtollError, OSError), TarUnpacker(around / "root", "what", 10**6) as unpacker:
        unpacker.feed(bytes(good))
        unpacker.finish()
    assert os.listdir(around) == ["root"]
