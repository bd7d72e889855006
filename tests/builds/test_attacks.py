"""Archives that an attacker uploads for a copy, and names that an attacker gives: nothing leaves the sandbox of the
build, nothing is left, and what is read is bounded."""

from __future__ import annotations

import gzip
import io
import tarfile
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from atoll.builds import uploads
from atoll.builds.builder import BuildOptions, NoArchives, build_template
from atoll.builds.dockerfile import parse_dockerfile
from atoll.builds.plan import BuildPlan, CopyStep, EnvStep, RunStep
from atoll.builds.uploads import UploadStore
from atoll.contract.errors import BuildFailed, Conflict, InvalidRequest
from atoll.contract.names import split_template
from atoll.runtime.engine import LocalEngine
from atoll.testing.waiting import eventually

NAME = "ab" * 32


def tar_of(*members: tuple[str, bytes, str]) -> bytes:
    """Entries: name, type, and the target or the content."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, kind, rest in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            if kind == tarfile.REGTYPE:
                info.size = len(rest)
                tar.addfile(info, io.BytesIO(rest.encode()))
            else:
                info.linkname = rest
                tar.addfile(info)
    return made.getvalue()


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    for begin in range(0, len(data), 65536):
        yield data[begin : begin + 65536]


async def copy(
    engine: LocalEngine, store: UploadStore, data: bytes, *sources: str, destination: str = "/copied/"
) -> None:
    await store.put("tenant", NAME, pieces(data))
    step = CopyStep(archive=NAME, sources=sources or (".",), are_patterns=True, destination=destination)
    plan = BuildPlan(image="host", steps=(step, RunStep(command=("sh", "-c", "test ! -e /outside && test ! -e /x"))))
    options = BuildOptions(runtime="crun")
    await build_template(engine, plan, store.of("tenant"), name="x", tags=["default"], options=options)


@pytest.mark.parametrize(
    "members",
    [
        [("../outside", tarfile.REGTYPE, "x")],
        [("a/../../outside", tarfile.REGTYPE, "x")],
        [("/outside", tarfile.REGTYPE, "x")],
        [("up", tarfile.SYMTYPE, "/"), ("up/outside", tarfile.REGTYPE, "x")],
        [("passwd", tarfile.LNKTYPE, "/etc/passwd")],
        [("device", tarfile.CHRTYPE, "")],
        [("block", tarfile.BLKTYPE, "")],
        [("pipe", tarfile.FIFOTYPE, "")],
    ],
)
async def test_entries_that_lead_outside_and_devices_are_refused(
    engine: LocalEngine, tmp_path: Path, members: list[tuple[str, bytes, str]]
) -> None:
    with pytest.raises(BuildFailed, match="step 1 of 2"):
        await copy(engine, UploadStore(tmp_path), tar_of(*members))


async def test_a_symlink_is_copied_as_one_and_a_source_leads_nowhere_else(engine: LocalEngine, tmp_path: Path) -> None:
    archive = tar_of(
        ("link", tarfile.SYMTYPE, "/etc"), ("a b;touch x", tarfile.REGTYPE, "1"), ("-rf", tarfile.REGTYPE, "2")
    )
    await copy(engine, UploadStore(tmp_path), archive)
    async with engine.create(image="template:x") as sandbox:
        assert (await sandbox.files.stat("/copied/link", follow=False)).kind == "symlink"
        assert sorted(each.name for each in await sandbox.files.list("/copied")) == ["-rf", "a b;touch x", "link"]
    for source in ("../etc", "/etc", "missing", "..", "link/../../etc"):
        with pytest.raises(BuildFailed, match="step 1 of 2"):
            await copy(engine, UploadStore(tmp_path), archive, source)


@pytest.mark.parametrize(
    "data",
    [
        b"not a tar",
        gzip.compress(b"not a tar", mtime=0),
        gzip.compress(tar_of(("a", tarfile.REGTYPE, "x" * 100_000)), mtime=0)[:-20],
        b"\x1f\x8b" + b"\xff" * 100,
        tar_of(("a", tarfile.REGTYPE, "x" * 10_000))[:1000],
    ],
)
async def test_damaged_archives_are_refused(engine: LocalEngine, tmp_path: Path, data: bytes) -> None:
    with pytest.raises(BuildFailed, match="step 1 of 2"):
        await copy(engine, UploadStore(tmp_path), data)


async def test_a_bomb_is_refused_before_it_is_unpacked(
    engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "_RATIO_FREE_BYTES", 1 << 20)
    header = tarfile.TarInfo("zeros")
    header.size = 1 << 30
    bomb = gzip.compress(header.tobuf() + bytes(64 << 20))
    with pytest.raises(BuildFailed, match="more than 200 times"):
        await copy(engine, UploadStore(tmp_path), bomb)


async def test_an_upload_is_bounded_and_only_hashes_are_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = UploadStore(tmp_path / "store")
    for name in ("../../etc/passwd", "*", "AB" * 32, "ab" * 31, ""):
        with pytest.raises(InvalidRequest):
            await store.put("tenant", name, pieces(b"x"))
        with pytest.raises(InvalidRequest):
            store.has("tenant", name)
    monkeypatch.setattr(uploads, "MAX_UPLOAD_BYTES", 1000)
    with pytest.raises(InvalidRequest, match="larger"):
        await store.put("tenant", NAME, pieces(bytes(70_000)))
    monkeypatch.setattr(uploads, "MAX_OWNED_BYTES", 1500)
    for digit in "123":
        await store.put("tenant", digit * 64, pieces(bytes(700)))
    kept = [digit for digit in "123" if store.has("tenant", digit * 64)]
    assert len(kept) == 2
    assert not store.has("other", kept[0] * 64)
    assert sum(each.stat().st_size for each in (tmp_path / "store" / "tenant").iterdir()) == 1400


BIG = "x" * 60_000
SLOW = {
    "a brace that is never closed": "FROM host\nENV A=$B${" + "A" * 60_000,
    "quotes that are never closed": "FROM host\nWORKDIR " + '"\\' * 30_000,
    "many here-documents": "FROM host\nRUN " + "<< " * 20_000,
    "many flags": "FROM host\nCOPY " + "--exclude=a " * 5_000 + "a b",
    "one long word": f"FROM host\nCOPY {BIG} b/",
    "many copies": f"FROM host\nENV A={BIG}\n" + "COPY $A b/\n" * 250,
}


@pytest.mark.parametrize("text", SLOW.values(), ids=SLOW)
def test_a_hostile_dockerfile_is_read_in_little_time(text: str) -> None:
    begun = time.process_time()
    with suppress(BuildFailed):
        parse_dockerfile(text, archive=NAME)
    assert time.process_time() - begun < 2


async def test_variables_that_grow_are_refused(engine: LocalEngine) -> None:
    more = {f"V{number}": "$A$A$A$A" for number in range(256)}
    text = f"FROM host\nENV A={BIG}\nENV " + " ".join(f"{name}={value}" for name, value in more.items())
    with pytest.raises(BuildFailed, match=r"line 3: the variables of the build have \d+ characters"):
        parse_dockerfile(text)
    with pytest.raises(BuildFailed, match="the variables of the build have"):
        parse_dockerfile(f"ARG A={BIG}\n" + "".join(f"ARG B{number}=$A$A\n" for number in range(20)) + "FROM host")
    plan = BuildPlan(image="host", steps=(EnvStep(variables={"A": BIG}), EnvStep(variables=more)))
    with pytest.raises(BuildFailed, match="step 2 of 2: the variables of the build have"):
        await build_template(engine, plan, NoArchives(), name="x", tags=["default"])


def test_names_of_templates_cannot_be_paths() -> None:
    for name in ("..", "../x", "a/b", "", ":", "a:", "a:b:c", "A", "x" * 64, "a\0", ".a"):
        with pytest.raises(InvalidRequest):
            split_template(name)


async def test_an_owner_has_few_uploads_under_way_and_those_that_end_make_room(tmp_path: Path) -> None:
    store, hold = UploadStore(tmp_path), anyio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"x"
        await hold.wait()
        raise ConnectionResetError

    async def upload() -> None:
        with suppress(ConnectionResetError):
            await store.put("tenant", NAME, slow())

    async with anyio.create_task_group() as tasks:
        for _ in range(uploads.MAX_UNFINISHED):
            tasks.start_soon(upload)
        await eventually(lambda: len([*tmp_path.glob("tenant/*")]) == uploads.MAX_UNFINISHED, "all have begun")
        with pytest.raises(Conflict, match="uploads are under way"):
            await store.put("tenant", NAME, pieces(b"x"))
        await store.put("other", NAME, pieces(b"x"))
        hold.set()
    await store.put("tenant", NAME, pieces(b"x"))
