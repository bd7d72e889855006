"""Mounts that are refused before anything is started, each with a sentence that says why."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import atoll
from atoll import Engine, InvalidRequest, Mount
from atoll.contract.model import ResolvedMount
from atoll.drivers.keeper_command import MOUNT_IDS, _mount_maps
from atoll.runtime.images import overlay


@pytest.fixture(scope="module")
async def engine(state_dir: Path, any_settings: atoll.Settings) -> AsyncIterator[Engine]:
    async with atoll.open(state_dir, settings=any_settings) as engine:
        yield engine


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("/", "the machine's own"),
        ("/proc", "the machine's own"),
        ("/proc/self/root", "the machine's own"),
        ("/sys/kernel", "the machine's own"),
        ("/dev", "the machine's own"),
        ("/dev/shm", "the machine's own"),
        ("/run", "the machine's own"),
        ("/var/run", "the machine's own"),
        ("/no/such", "no such directory"),
        ("/etc/passwd", "not a directory"),
        ("/etc\0", "null"),
    ],
)
async def test_a_source_that_is_no_directory_of_files_is_refused(engine: Engine, source: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as refused:
        await engine.create(mounts=[Mount(source=source, target="/work")])
    assert refused.value.message.startswith(f"{source} cannot be mounted: ")


@pytest.mark.parametrize(
    "target",
    [
        *("/", "//", "/.", "work", "./work", "/work/../etc", "/etc", "/etc/", "//usr", "/home", "/home/user", "/tmp"),
        *("/proc", "/proc/self", "/sys/fs", "/dev/shm", "/run", "/run/atoll", "/var/run/atoll", "/wo\nrk", "/wo\0rk"),
    ],
)
async def test_a_target_that_the_sandbox_itself_uses_is_refused(engine: Engine, tmp_path: Path, target: str) -> None:
    with pytest.raises(InvalidRequest, match=r"target"):
        await engine.create(mounts=[Mount(source=str(tmp_path), target=target)])


async def test_a_source_that_was_checked_and_is_another_now_is_refused(engine: Engine, tmp_path: Path) -> None:
    """A tenant that writes to an allowed directory could put a symlink there, after its request was checked."""
    (tmp_path / "project").mkdir()
    checked = ResolvedMount(source=str(tmp_path / "project"), target="/work")
    (tmp_path / "project").rmdir()
    (tmp_path / "project").symlink_to("/etc")
    with pytest.raises(InvalidRequest, match="it changed after it was checked"):
        await engine.create(mounts=[checked])


async def test_mounts_that_contradict_each_other_are_refused(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="two mounts have the target /work"):
        await engine.create(mounts=[Mount(source=str(tmp_path), target=target) for target in ("/work", "/work/")])
    with pytest.raises(InvalidRequest, match="16"):
        await engine.create(mounts=[Mount(source=str(tmp_path), target=f"/work{n}") for n in range(17)])
    assert await engine.list() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root on the host")
async def test_a_directory_that_a_sandbox_gave_its_own_owner_is_refused(engine: Engine, tmp_path: Path) -> None:
    os.chown(tmp_path, MOUNT_IDS, MOUNT_IDS)
    with pytest.raises(InvalidRequest, match=f"user id {MOUNT_IDS}.*chown"):
        await engine.create(mounts=[Mount(source=str(tmp_path), target="/work", read_only=False)])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root on the host")
async def test_a_file_system_without_id_mapping_is_refused_for_writing_and_can_be_read(
    engine: Engine, tmp_path: Path
) -> None:
    """An overlay has none."""
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    (tmp_path / "lower" / "file").write_text("readable")
    merged = tmp_path / "merged"
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", merged], check=True)
    try:
        with pytest.raises(atoll.Unenforceable, match=r"overlay.*read-only.*ext4"):
            await engine.create(mounts=[Mount(source=str(merged), target="/work", read_only=False)])
        async with await engine.create(mounts=[Mount(source=str(merged), target="/work")]) as sandbox:
            assert (await sandbox.exec("cat /work/file")).stdout == "readable"
    finally:
        subprocess.run(["umount", merged], check=True)


@pytest.mark.parametrize("name", ["", "../x", "a/b", "Upper", "x" * 64])
async def test_a_name_that_no_volume_can_have_is_refused(engine: Engine, name: str) -> None:
    with pytest.raises(InvalidRequest, match="not a name for a volume"):
        await engine.volumes.create(name)
    with pytest.raises(InvalidRequest, match="at least"):
        await engine.volumes.create("small", 1)


async def test_a_volume_whose_record_cannot_be_read_is_listed_and_can_be_removed(engine: Engine) -> None:
    await engine.volumes.create("damaged")
    record = engine.state_dir / "volumes" / "damaged.json"
    record.write_text('{"version": 99}')
    (volume,) = await engine.volumes.list()
    assert "newer Atoll" in (volume.reason or "")
    assert (await engine.gc()).layers == (), "its files stay as long as it is there"
    assert "newer Atoll" in (await engine.unreadable_records())["volume:damaged"]
    await engine.volumes.remove("damaged")
    assert len((await engine.gc()).layers) == 1
    assert await engine.volumes.list() == []


def test_each_id_inside_is_stored_as_one_of_its_own() -> None:
    for inside in (0, 1, 1000, 65534):
        pieces = _mount_maps(1 << 28, 12345, inside)
        shown = {base + n for _, base, count in pieces for n in range(count)}
        disk = {first + n for first, _, count in pieces for n in range(count)}
        assert len(shown) == len(disk) == sum(count for *_, count in pieces) == 65535
        assert shown == set(range(1 << 28, (1 << 28) + 65535))


@pytest.mark.parametrize(
    ("user", "ids"),
    [
        ("user", (1000, 1000)),
        ("root", (0, 0)),
        ("app", (70, 71)),
        ("70", (70, 71)),
        ("app:staff", (70, 50)),
        ("app:9", (70, 9)),
        ("4321", (4321, 0)),
        ("ghost", None),
        ("app:ghosts", None),
        ("70000", None),
        ("odd", None),
    ],
)
def test_ids_are_those_of_the_images_accounts(tmp_path: Path, user: str, ids: tuple[int, int] | None) -> None:
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "passwd").write_text("root:x:0:0::/:/bin/sh\nuser:x:1000:1000::\napp:x:70:71::\nodd:x:-1:x::\nshort:x\n")
    (etc / "group").write_text("root:x:0:\nstaff:x:50:\n")
    assert overlay.find_ids([etc, tmp_path], user) == ids
