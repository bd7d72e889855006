"""Archives of bundles that lead elsewhere, hide something, or grow without end."""

from __future__ import annotations

import ast
import gzip
import io
import json
import struct
import tarfile
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from atoll.bundles import schemas
from atoll.bundles.archive import LIMITS, MAX_ENTRIES, ArchiveLimits, read_bundle
from atoll.bundles.schemas import MAX_SOURCES_BYTES
from atoll.contract.errors import BundleFailed
from tests.bundles.making import entry, manifest, tar

pytestmark = pytest.mark.runtimes("crun")  # nothing of it comes to a sandbox: once is enough
GOOD = (entry("manifest.json", manifest("run")), entry("tools/main.py", b"def run(args): ...\n"))
Entries = Sequence[tuple[tarfile.TarInfo, bytes]]


async def refused(tmp_path: Path, content: bytes, limits: ArchiveLimits = LIMITS) -> str:
    (tmp_path / "made.tgz").write_bytes(content)
    with pytest.raises(BundleFailed) as failed:
        await read_bundle(tmp_path / "made.tgz", limits)
    return failed.value.message


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=kind, linkname=target)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([entry("../outside", b"x")], "leads outside of the archive"),
        ([entry("tools/../../outside", b"x")], "leads outside of the archive"),
        ([entry("/etc/passwd", b"x")], "leads outside of the archive"),
        ([entry("tools/a\\..\\b", b"x")], "has a character"),
        ([entry("tools/a\nb", b"x")], "has a character"),
        ([entry("tools/" + "d/" * 40 + "f", b"x")], "directories deep"),
        ([entry("tools/" + "n" * 2000, b"x")], "it may have 1024"),
        ([link("tools/x", "/etc/passwd")], "leads to '/etc/passwd', outside"),
        ([link("tools/x", "../../x")], "outside of the archive"),
        ([link("tools/x", "a/../../../x")], "outside of the archive"),
        ([link("tools/x", "")], "outside of the archive"),
        ([link("tools/x", "tools/main.py", tarfile.LNKTYPE)], "is a hard link"),
        ([entry("tools/x", type=tarfile.CHRTYPE, devmajor=1, devminor=3)], "is a device"),
        ([entry("tools/x", type=tarfile.BLKTYPE)], "is a device"),
        ([entry("tools/x", type=tarfile.FIFOTYPE)], "is a FIFO"),
        ([entry("tools/x", b"x", mode=0o4755)], "has a set-id bit"),
        ([entry("tools/x", b"x", mode=0o2755)], "has a set-id bit"),
        ([entry("manifest.json", manifest("other"))], "manifest.json is in the archive twice"),
        ([entry("./manifest.json", manifest("other"))], "manifest.json is in the archive twice"),
        ([entry("MANIFEST.json", manifest("other"))], "differ only in case or form"),
        ([entry("tools/ﬁle.py"), entry("tools/file.py")], "differ only in case or form"),
        ([link("tools/d", "main.py"), entry("tools/d/x", b"x")], "is not a directory, but the archive has"),
        ([entry("tools/main.py/x", b"x")], "is not a directory, but the archive has"),
        ([entry("manifest.json/x", b"x")], "is not a directory"),
    ],
)
async def test_an_entry_that_is_not_plainly_inside_is_refused(tmp_path: Path, more: Entries, expected: str) -> None:
    assert expected in await refused(tmp_path, gzip.compress(tar([*GOOD, *more])))


async def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    made = tar([*GOOD, entry("tools/zz", b"x")], tarfile.USTAR_FORMAT).replace(b"tools/zz", b"tools/\xff\xfe")
    header = made.index(b"tools/\xff\xfe")
    block = bytearray(made[header : header + 512])
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    made = made[:header] + bytes(block) + made[header + 512 :]
    assert "is not UTF-8" in await refused(tmp_path, gzip.compress(made))


async def test_too_many_entries_are_refused(tmp_path: Path) -> None:
    entries = [*GOOD, *(entry(f"tools/f{number}") for number in range(10))]
    content = gzip.compress(tar(entries))
    assert "more than 10 entries" in await refused(tmp_path, content, ArchiveLimits(entries=10))
    assert len((await read_bundle(tmp_path / "made.tgz", ArchiveLimits(entries=len(entries)))).tools) == 1
    many = gzip.compress(tar([*GOOD, *(entry(f"tools/f{number}") for number in range(MAX_ENTRIES - 1))]), 1)
    assert f"more than {MAX_ENTRIES} entries" in await refused(tmp_path, many)


def bomb(size_bytes: int) -> bytes:
    """A file of zeros in an archive a thousand times smaller."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb") as file:
        info = tarfile.TarInfo("tools/zeros")
        info.size = size_bytes
        file.write(tar(GOOD)[: 4 * 512] + info.tobuf())
        for _ in range(size_bytes >> 20):
            file.write(b"\0" * (1 << 20))
        file.write(b"\0" * 1024)
    return packed.getvalue()


async def test_a_bomb_is_refused_early_and_with_little_memory(tmp_path: Path) -> None:
    content = bomb(200 << 20)
    tracemalloc.start()
    assert "more than 100 times its size" in await refused(tmp_path, content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


async def test_much_that_compresses_well_enough_is_refused_by_its_size(tmp_path: Path) -> None:
    content = bomb(12 << 20)
    assert "unpacks to more than 8388608 bytes" in await refused(
        tmp_path, content, ArchiveLimits(unpacked_bytes=8 << 20)
    )
    assert len((await read_bundle(tmp_path / "made.tgz")).tools) == 1


def header(kind: bytes, size: int) -> bytes:
    info = tarfile.TarInfo("extension")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.USTAR_FORMAT)


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K"])
async def test_an_extension_of_any_size_is_not_read_into_memory(tmp_path: Path, kind: bytes) -> None:
    content = gzip.compress(header(kind, 1 << 30) + b"\0" * (4 << 20))
    tracemalloc.start()
    assert "a header of the archive has 1073741824 bytes" in await refused(tmp_path, content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def extended(**records: str) -> bytes:
    info = tarfile.TarInfo("tools/x")
    info.pax_headers = records
    return info.tobuf(tarfile.PAX_FORMAT)


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (extended(path="../outside"), "leads outside"),
        (extended(path="/etc/x"), "leads outside"),
        (extended(size="-1"), "the archive is damaged"),
        (extended(size="99999999999999999999"), "the archive is damaged"),
        (extended(**{"GNU.sparse.major": "1"}), "is a sparse file"),
        (header(b"S", 0), "is a sparse file"),
        (header(b"V", 0), "of an unknown type"),
        (header(b"x", 30) + b"30 path=a\n18 path=b\n".ljust(512, b"\0"), "the archive is damaged"),
        (header(b"g", 13) + b"13 path=evil\n".ljust(512, b"\0"), "a global header that names"),
        (b"\x80" * 512, "the archive is damaged"),
        (tarfile.TarInfo("x").tobuf()[:124] + b"\x80" + struct.pack(">11x") + b"\0" * 376, "the archive is damaged"),
    ],
    ids=lambda value: "content" if isinstance(value, bytes) else None,
)
async def test_headers_that_say_two_things_or_nonsense_are_refused(
    tmp_path: Path, between: bytes, expected: str
) -> None:
    content = gzip.compress(tar(GOOD)[: 4 * 512] + between + b"\0" * 1024)
    assert expected in await refused(tmp_path, content)


DENSE = {
    "deep": "x = " + "-" * 90_000 + "1",
    "long": "x = " + "<".join("1" * 120_000),
    "nested": "def run(args: " + "a[" * 20_000 + "int" + "]" * 20_000 + "): ...",
    "calls": "x = a" + "()" * 100_000,
    "branches": "if 1: pass\n" + "elif 1: pass\n" * 15_000,
}


async def test_sources_that_are_dear_to_parse_are_parsed_once_and_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []

    def parse(source: str) -> ast.Module:
        parsed.append(len(source))
        return schemas.parse(source)

    monkeypatch.setitem(read_bundle.__globals__, "parse", parse)
    files = {f"tools/{name}.py": f"{source}\ndef run(args): ...\n".encode() for name, source in DENSE.items()}
    tools = [{"name": f"{name}{number}", "entrypoint": f"tools.{name}:run"} for name in DENSE for number in range(20)]
    made = json.dumps({"schema_version": 1, "tools": tools}).encode()
    entries = [entry("manifest.json", made), *(entry(name, content) for name, content in files.items())]
    (tmp_path / "made.tgz").write_bytes(gzip.compress(tar(entries)))
    read = await read_bundle(tmp_path / "made.tgz")
    assert [tool.input_schema["type"] for tool in read.tools] == ["object"] * 100
    assert len(parsed) == len(DENSE)
    assert sum(parsed) <= MAX_SOURCES_BYTES < sum(map(len, files.values()))


async def test_a_second_archive_behind_the_first_is_refused(tmp_path: Path) -> None:
    whole = tar(GOOD)
    assert "data follows the end" in await refused(tmp_path, gzip.compress(whole + whole))
    assert "data follows the end" in await refused(tmp_path, gzip.compress(whole) + gzip.compress(whole))


async def test_random_damage_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    """Every flipped byte of the tar gives an error of ours, or a bundle that is read."""
    whole = bytearray(tar(GOOD, tarfile.USTAR_FORMAT)[: 5 * 512])
    outcomes: dict[str, int] = {}
    for at in range(0, len(whole), 7):
        changed: Any = bytearray(whole)
        changed[at] ^= 0x41
        (tmp_path / "made.tgz").write_bytes(gzip.compress(bytes(changed) + b"\0" * 1024, 1))
        try:
            await read_bundle(tmp_path / "made.tgz")
        except BundleFailed as error:
            outcomes[error.reason] = outcomes.get(error.reason, 0) + 1
    assert outcomes["bundle_manifest_invalid"] > 50
