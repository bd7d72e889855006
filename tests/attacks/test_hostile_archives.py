"""Files made to fool whoever imports them as a sandbox. Each is refused, says why, and leaves nothing."""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path
from typing import Any, Protocol, TypeVar

import anyio
import pytest

from atoll.contract.errors import ArchiveRefused, AtollError, ImageUnavailable, InvalidRequest, Unenforceable
from atoll.contract.model import RuntimeName
from atoll.runtime.interface import Engine
from tests.attacks.archives import ROOT, directory, manifest, member, packed, whole

Thing = TypeVar("Thing")
ESCAPED = Path("/tmp/atoll-escaped")
UP = b"../" * 20
MIB = 2**20


def at(name: bytes, kind: bytes = b"0", content: bytes = b"", **more: Any) -> bytes:
    return member(ROOT + b"/" + name, kind, content, **more)


def symlink(name: bytes, target: bytes) -> bytes:
    return at(name, b"2", link=target)


def hard_link(name: bytes, target: bytes) -> bytes:
    return at(name, b"1", link=target)


def with_xattr(name: bytes, value: bytes, kind: bytes = b"0") -> bytes:
    return at(b"f", kind, pax=[(b"SCHILY.xattr." + name, value)])


def with_hex_xattr(name: str) -> bytes:
    return at(b"f", pax=[(b"ATOLL.xattr." + name.encode(), b"x")])


def sparse(table: bytes, size: int, data: bytes = b"") -> bytes:
    pax = [(b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0"), (b"GNU.sparse.realsize", b"%d" % size)]
    return at(b"f", content=table + bytes(-len(table) % 512) + data, pax=pax)


ACL = struct.pack("<IHHI", 2, 0x02, 7, 65535)
WHITEOUT = [(b"ATOLL.kind", b"whiteout")]
DEEP = b"/".join([b"d"] * 5000)
NAMES = {
    "absolute": whole(member(b"/tmp/atoll-escaped")),
    "upwards from the top": whole(member(UP + b"tmp/atoll-escaped")),
    "upwards from a layer": whole(at(UP + b"tmp/atoll-escaped")),
    "upwards by one": whole(at(b"..", b"5"), at(b"../atoll-escaped")),
    "itself": whole(at(b".", b"5")),
    "nothing": whole(at(b"a/", b"5")),
    "twice a slash": whole(at(b"/tmp")),
    "a NUL": whole(member(b"x", pax=[(b"path", ROOT + b"/a\0b")])),
    "longer than a name can be": whole(member(b"x", pax=[(b"path", ROOT + b"/" + b"n" * 300)])),
    "absurdly deep": whole(member(b"x", pax=[(b"path", ROOT + b"/" + DEEP)])),
    "a layer that there is not": whole(directory(b"layers/1/root")),
    "a part that there is not": whole(directory(b"layers/0/etc")),
    "a part of the layer's own": whole(directory(b"layers/0/../work")),
    "none at all": whole(member(b"")),
    "where it is not ready": whole(member(b"layers/0/usr/f")),
}
LINKS = {
    "a file below a symlink": whole(symlink(b"out", b"/tmp"), at(b"out/atoll-escaped")),
    "a directory below a symlink": whole(symlink(b"out", b"/tmp"), at(b"out/atoll-escaped", b"5")),
    "a directory over a symlink": whole(symlink(b"out", b"/tmp"), at(b"out", b"5"), at(b"out/atoll-escaped")),
    "a file over a symlink": whole(symlink(b"out", b"/tmp/atoll-escaped"), at(b"out", content=b"x")),
    "to the host's": whole(hard_link(b"stolen", b"/etc/shadow")),
    "upwards": whole(hard_link(b"stolen", ROOT + b"/" + UP + b"etc/shadow")),
    "through a symlink": whole(symlink(b"etc", b"/etc"), hard_link(b"stolen", ROOT + b"/etc/shadow")),
    "to another part": whole(directory(b"layers/0/usr"), member(b"layers/0/usr/f", b"1", link=ROOT + b"/f")),
    "to a directory": whole(at(b"d", b"5"), hard_link(b"stolen", ROOT + b"/d")),
    "to a whiteout": whole(at(b"w", pax=WHITEOUT), hard_link(b"stolen", ROOT + b"/w")),
    "to nothing": whole(hard_link(b"stolen", ROOT + b"/none")),
    "with a name beyond the tree": whole(at(b"f"), member(b"/tmp/atoll-escaped", b"1", link=ROOT + b"/f")),
}
KINDS = {
    **{
        f"of kind {kind.decode()!r}": whole(at(b"sda", kind, spoil=(329, b"0000010\x000000000\0")))
        for kind in (b"3", b"4")
    },
    **{
        f"of kind {kind.decode()!r}": whole(at(b"f", kind, b"x"))
        for kind in (b"7", b"L", b"K", b"S", b"V", b"g", b"\0")
    },
    "a whiteout with data": whole(at(b"w", content=b"x", pax=WHITEOUT)),
    "a kind of its own": whole(at(b"w", pax=[(b"ATOLL.kind", b"device")])),
    "a pipe with data": whole(at(b"p", b"6", b"x")),
    "an opaque file": whole(at(b"f", pax=[(b"ATOLL.opaque", b"1")])),
    "twice the same file": whole(at(b"f"), at(b"f")),
    "twice the same directory": whole(at(b"d", b"5"), at(b"d", b"5")),
    "a file, then in it": whole(at(b"f"), at(b"f/g")),
    "back in a directory": whole(at(b"a", b"5"), at(b"b", b"5"), at(b"a/f")),
    "without its directory": whole(at(b"a/f")),
    "twice the same layer": whole(directory(ROOT)),
    "a layer that is a file": whole(member(ROOT), root=False),
}
OWNERS = {
    "beyond the range": whole(at(b"f", mode=b"0004755", uid=b"0177777")),
    "of the host": whole(at(b"f", mode=b"0004755", uid=b"3641100")),
    "negative": whole(at(b"f", uid=b"\xff" * 8)),
    "not a number": whole(at(b"f", uid=b"root\0\0\0")),
    "a mode that is none": whole(at(b"f", mode=b"0100644")),
    "in an access control list": whole(with_xattr(b"system.posix_acl_access", ACL)),
    "a malformed list": whole(with_xattr(b"system.posix_acl_access", b"\2\0\0\0\1")),
    "an opaque mark": whole(with_xattr(b"trusted.overlay.opaque", b"y", b"5")),
    "a redirection": whole(with_xattr(b"trusted.overlay.redirect", b"/etc", b"5")),
    "a user's redirection": whole(with_xattr(b"user.overlay.redirect", b"/etc", b"5")),
    "a security label": whole(with_xattr(b"security.selinux", b"x")),
    "a capability for the host": whole(
        with_xattr(b"security.capability", struct.pack("<6I", 0x3000001, 1, 0, 0, 0, 0))
    ),
    "a capability that is none": whole(with_xattr(b"security.capability", b"x" * 20)),
    "a redirection in hexadecimal digits": whole(with_hex_xattr(b"trusted.overlay.redirect=".hex())),
    "a user's redirection in hexadecimal digits": whole(with_hex_xattr(b"user.overlay.=".hex())),
    "hexadecimal digits without need": whole(with_hex_xattr(b"user.x".hex())),
    "other hexadecimal digits": whole(with_hex_xattr("757365722E783D")),
    "digits that are none": whole(with_hex_xattr("757365722g")),
    "no digits": whole(with_hex_xattr("")),
    "a NUL in hexadecimal digits": whole(with_hex_xattr(b"user.=\0".hex())),
    "an attribute without a name": whole(with_xattr(b"user.", b"x")),
}
HEADERS = {
    "an absurd one": whole(member(b"pax", b"x", b"1" * 2 * MIB), at(b"f")),
    "one that claims more": whole(member(b"pax", b"x", size=b"77777777777"), at(b"f")),
    "a record that claims more": whole(member(b"pax", b"x", b"99 path=x\n"), at(b"f")),
    "a record of nothing": whole(member(b"pax", b"x", b"0 \n"), at(b"f")),
    "a record without end": whole(member(b"pax", b"x", b"1" * 600), at(b"f")),
    "twice the same": whole(at(b"f", pax=[(b"mtime", b"1.000000000"), (b"mtime", b"2.000000000")])),
    "an unknown one": whole(at(b"f", pax=[(b"uid", b"0")])),
    "a time that is none": whole(at(b"f", pax=[(b"mtime", b"soon")])),
    "a time beyond time": whole(at(b"f", pax=[(b"mtime", b"9999999999999.000000000")])),
    "a wrong checksum": whole(at(b"f")[:148] + b"000000\0 " + at(b"f")[156:]),
    "no magic": whole(at(b"f", spoil=(257, b"tar"))),
    "a prefix": whole(at(b"f", spoil=(345, b"/tmp"))),
    "a size that is none": whole(at(b"f", size=b"-1")),
    "two in a row": whole(member(b"pax", b"x", b""), member(b"pax", b"x", b""), at(b"f")),
    "a file size beyond all": whole(at(b"f", pax=[(b"size", b"9" * 19)])),
    "holes beyond the end": whole(sparse(b"1\n5\n10\n", 10, b"x" * 10)),
    "holes that overlap": whole(sparse(b"2\n0\n5\n2\n5\n", 10, b"x" * 10)),
    "holes without end": whole(sparse(b"999999999\n" + b"0\n0\n" * 9999, 10)),
    "holes that are none": whole(sparse(b"one\n", 10)),
    "holes in a number": whole(sparse(b"1" * 512, 10)),
    "holes as large as all": whole(sparse(b"0\n", 2**62)),
}
ORIGIN = {"reference": "host", "digest": f"sha256:{'0' * 64}"}
MANIFESTS = {
    "none": whole(first=b""),
    "not the first": whole(first=member(b"other")),
    "as a directory": whole(first=directory(b"atoll-sandbox.json")),
    "as a link": whole(first=member(b"atoll-sandbox.json", b"2", link=b"/etc/passwd")),
    "not JSON": whole(first=member(b"atoll-sandbox.json", content=b"\xff\xfe{")),
    "without end": whole(first=member(b"atoll-sandbox.json", content=b" " * 2 * MIB)),
    "nested": whole(first=member(b"atoll-sandbox.json", content=b"[" * 500_000)),
    "of another format": whole(first=manifest(format="docker")),
    "of a later version": whole(first=manifest(version=4)),
    "with more": whole(first=manifest(memory="/etc/passwd")),
    "a name that leads up": whole(first=manifest(name="../../etc")),
    "a digest that leads up": whole(first=manifest(image={**ORIGIN, "digest": "sha256:../../../../etc"})),
    "too many layers": whole(first=manifest(layers=[{"trees": ["root"]}] * 65)),
    "an environment that is none": whole(first=manifest(env={"A=B": "c"})),
    "a runtime that is none": whole(first=manifest(runtime="/bin/sh")),
    "two of them": whole(manifest()),
}
GOOD = whole(at(b"etc", b"5"), at(b"etc/f", content=b"x" * 100_000))
SUM_AT = len(GOOD) - 1024 - 1024
ENDS = {
    "no checksum": GOOD[:SUM_AT] + bytes(1024),
    "no end": GOOD[:SUM_AT],
    "another checksum": GOOD[: SUM_AT + 512] + b"0" * 64 + GOOD[SUM_AT + 576 :],
    "a byte is another": GOOD[:9000] + b"y" + GOOD[9001:],
    "something behind it": GOOD + bytes(512),
    "a member behind it": GOOD[:-1024] + at(b"late") + bytes(1024),
    "something between": whole(at(b"f", content=b"x")[:-1] + b"x"),
}
CLASSES = {
    "names": NAMES,
    "links": LINKS,
    "kinds": KINDS,
    "owners": OWNERS,
    "headers": HEADERS,
    "manifests": MANIFESTS,
    "ends": ENDS,
}
REASONS = {"malformed", "truncated", "checksum", "version", "unsafe", "too_large"}


class Share(Protocol):
    def __call__(self, things: list[Thing]) -> list[Thing]: ...


@pytest.fixture
def share(engine: Engine, runtime_name: RuntimeName) -> Share:
    """What reads a file is the same for all runtimes: so each that there is tries its share of what is to be tried."""
    usable = list(engine.runtimes())

    def of(things: list[Thing]) -> list[Thing]:
        return things[usable.index(runtime_name) :: len(usable)]

    return of


async def refused(engine: Engine, data: bytes, **options: Any) -> ArchiveRefused:
    with pytest.raises(ArchiveRefused, match="cannot be imported") as caught:
        await engine.import_(io.BytesIO(data), "hostile", **options)
    assert caught.value.details["reason"] in REASONS
    return caught.value


@pytest.mark.parametrize("kind", CLASSES)
async def test_a_file_with_a_trap_is_refused_and_leaves_nothing(engine: Engine, share: Share, kind: str) -> None:
    before = os.listdir(engine.state_dir / "layers")
    passed: list[str] = []

    async def try_one(trap: str, data: bytes) -> None:
        async with limiter:
            try:
                error = await refused(engine, packed(data))
            except BaseException as unexpected:  # noqa: BLE001 - named below, with the trap that did it
                passed.append(f"{trap}: {unexpected!r}")
            else:
                assert str(engine.state_dir) not in error.message

    limiter = anyio.CapacityLimiter(4)
    async with anyio.create_task_group() as group:
        for trap, data in share(list(CLASSES[kind].items())):
            group.start_soon(try_one, trap, data)
    assert not passed
    assert not ESCAPED.exists()
    assert os.listdir(engine.state_dir / "layers") == before
    assert not any(info.name == "hostile" for info in await engine.list())


async def test_what_the_traps_are_made_of_is_taken(engine: Engine) -> None:
    """Otherwise they would be refused for nothing that this is about."""
    holes = [(b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0"), (b"GNU.sparse.realsize", b"4099")]
    good = whole(
        at(b"etc", b"5", mode=b"0000755"),
        at(b"etc/f", content=b"x" * 1000, uid=b"0001750", pax=[(b"mtime", b"1.500000000")]),
        symlink(b"out", b"/tmp"),
        hard_link(b"twin", ROOT + b"/etc/f"),
        at(b"sparse", content=b"1\n4096\n3\n".ljust(512, b"\0") + b"end", pax=holes),
        at(b"srv", pax=WHITEOUT),
    )
    async with await engine.import_(io.BytesIO(packed(good))) as sandbox:
        assert sandbox.name == "hostile"
        said = await sandbox.exec(
            "stat -c '%u %h %s' /etc/f; wc -c < /sparse; tail -c 3 /sparse; ls -d /srv; readlink /out"
        )
        assert said.stdout == "1000 2 1000\n4099\nend/tmp\n"
        assert "No such file" in said.stderr


async def test_a_bomb_is_refused_before_it_is_large(engine: Engine, share: Share) -> None:
    large = whole(at(b"zeros", content=bytes(64 * MIB)))
    many = whole(*(at(b"f%d" % number) for number in range(1000)))
    wordy = whole(*(at(b"h%d" % number, pax=[(b"SCHILY.xattr.user.x", bytes(900_000))]) for number in range(3)))
    for data, limit_bytes in share([(large, 8 * MIB), (many, 2 * MIB), (wordy, MIB // 2)]):
        most = 0

        def watch(_: str, done: int, total: int | None) -> None:
            nonlocal most
            most = max(most, done)

        small = packed(data)
        assert len(small) < len(data) // 20
        error = await refused(engine, small, limit_bytes=limit_bytes, progress=watch)
        assert error.details["reason"] == "too_large"
        assert "--limit" in str(error.hint)
        assert most <= limit_bytes


async def test_a_file_that_is_cut_short_or_spoiled_anywhere_is_refused(engine: Engine, share: Share) -> None:
    data = packed(whole(at(b"noise", content=os.urandom(100_000))))
    for size in share([0, 20, len(data) // 2]):
        assert (await refused(engine, data[:size])).details["reason"] == "truncated"
    spoiled = [data[:byte] + bytes([data[byte] ^ 1]) + data[byte + 1 :] for byte in (30, len(data) - 2)]
    for other in share([data[:-1], *spoiled, data + data, data + b"more", whole()]):
        await refused(engine, other)


async def test_a_file_decides_nothing_about_this_machine(
    engine: Engine, runtime_name: RuntimeName, share: Share, tmp_path: Path
) -> None:
    """Neither what of this machine it stands on, nor what is fetched for it, nor how much of it it may use."""
    (tmp_path / "secret").write_text("precious")

    async def fails(**changes: object) -> AtollError:
        with pytest.raises(AtollError) as caught:
            await engine.import_(io.BytesIO(packed(whole(first=manifest(**changes)))), "hostile")
        return caught.value

    paths = [f"dir:{tmp_path}", "tar:/etc/shadow", "oci:/etc"]
    for reference in share([*paths, "127.0.0.1:1/evil:latest", "evil/image", "localhost/host"]):
        error = await fails(image={**ORIGIN, "reference": reference})
        assert isinstance(error, ImageUnavailable)
        assert "--image" in error.message
    able = engine.runtimes()[runtime_name]
    for name, value, can in (("memory_bytes", 2**50, able.memory_limit), ("pids", 4_000_000, able.pids_limit)):
        error = await fails(limits={name: value})
        assert isinstance(error, InvalidRequest if can else Unenforceable)
        assert not can or str(value) in error.message
    assert not any(info.name == "hostile" for info in await engine.list())
