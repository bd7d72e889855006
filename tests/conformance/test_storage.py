"""What sandboxes write, on file systems that can do more than hold it: limits, snapshots, and one in a file.

The file systems are small, in sparse files, and mounted as an operator of the machine would: a btrfs with quotas, and
an XFS, with project quotas if the kernel has them. What cannot be limited must be refused, and the tests see to that.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, cast

import anyio
import pytest

import atoll
from atoll import Capabilities, DiskFull, Engine, InvalidRequest, Limits, Mount, Sandbox, Unenforceable
from atoll.contract.model import RuntimeName
from atoll.runtime.state.checkpoints import Checkpoints
from atoll.runtime.state.store import StateStore
from atoll.runtime.state.volumes import VolumeStore
from atoll.testing.leaks import BOUND_S, Ledger
from atoll.testing.waiting import eventually

pytestmark = pytest.mark.usefixtures("as_root")

MIB = 1 << 20
LIMIT = 16 * MIB
SIZE = 1 << 30
SUBVOLUME = 256
"""The inode number of every subvolume's own directory."""
FILL = """
import os, sys
written = 0
try:
    with open("filling", "ab", buffering=0) as file:
        while written < int(sys.argv[1]):
            written += file.write(bytes(1 << 20))
        os.fsync(file.fileno())
    print(written, 0)
except OSError as error:
    print(written, error.errno)
"""


class Mounted(NamedTuple):
    kind: str
    path: Path

    @property
    def state_dir(self) -> Path:
        return self.path / "state"

    @property
    def full(self) -> int:
        """What a program is told that writes beyond its limit."""
        return errno.EDQUOT if self.kind == "btrfs" else errno.ENOSPC


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=BOUND_S).stdout


@pytest.fixture(scope="session", params=["btrfs", "xfs"])
def mounted(request: pytest.FixtureRequest, ledger: Ledger) -> Iterator[Mounted]:
    """A file system with a state directory on it."""
    root = Path(tempfile.mkdtemp(prefix="atoll-storage-"))
    file, path = root / "image", root / "mounted"
    path.mkdir()
    with open(file, "wb") as made:
        made.truncate(SIZE)
    run(f"mkfs.{request.param}", "-q", file)
    if (
        request.param == "btrfs"
        or subprocess.run(["mount", "-o", "loop,prjquota", file, path], capture_output=True, check=False).returncode
    ):
        run("mount", "-o", "loop", file, path)
    try:
        if request.param == "btrfs":
            run("btrfs", "quota", "enable", path)
        found = Mounted(request.param, path)
        ledger.watch(found.state_dir)
        yield found
        left = ledger.all_of(found.state_dir)
        ledger.end_processes_of(found.state_dir)
        ledger.unwatch(found.state_dir)
        assert not left, left
    finally:
        subprocess.run(["umount", path], check=False, capture_output=True)
        shutil.rmtree(root, ignore_errors=True)  # with the place of the mount, it goes from all namespaces


@pytest.fixture(scope="module")
async def stored(
    mounted: Mounted, runtime_name: RuntimeName, give_host_image: Callable[[Path], Path]
) -> AsyncIterator[Engine]:
    """A runtime over a state directory on that file system."""
    if not (mounted.state_dir / "images").exists():
        mounted.state_dir.chmod(0o700)
        give_host_image(mounted.state_dir)
    async with atoll.open(mounted.state_dir, settings=atoll.Settings(runtime=runtime_name)) as engine:
        yield engine
        for info in await engine.list():
            with suppress(LookupError):
                await engine.destroy(info.name)


@pytest.fixture
def able(stored: Engine, runtime_name: RuntimeName) -> Capabilities:
    return stored.runtimes()[runtime_name]


@pytest.fixture
def can_be_frozen(able: Capabilities, runtime_name: RuntimeName) -> None:
    """For tests of what is copied while it runs."""
    if not able.freeze:
        pytest.skip(f"{runtime_name} declares that it cannot freeze a sandbox here")


async def fill(sandbox: Sandbox, most: int = 2 * LIMIT) -> tuple[int, int]:
    """Write until it fails. How much was written, and the error, or 0 when `most` was."""
    result = await sandbox.exec(["python3", "-c", FILL, str(most)])
    assert result.ok, result.stderr
    written, number = result.stdout.split()
    return int(written), int(number)


async def test_a_sandbox_that_fills_its_disk_is_told_and_nobody_else_notices(
    mounted: Mounted, stored: Engine, able: Capabilities
) -> None:
    if not able.disk_limit:
        with pytest.raises(Unenforceable, match=r"a disk limit cannot be enforced here: .* is on xfs.*init --size"):
            await stored.create(limits=Limits(disk_bytes=LIMIT))
        assert os.listdir(mounted.state_dir / "layers") == []
        return
    async with (
        await stored.create(limits=Limits(disk_bytes=LIMIT)) as full,
        await stored.create(limits=Limits(disk_bytes=LIMIT)) as neighbour,
    ):
        assert full.info.limits.disk_bytes == LIMIT
        written, number = await fill(full)
        assert number == mounted.full
        assert LIMIT - 4 * MIB <= written <= LIMIT
        with pytest.raises(DiskFull):
            await full.files.write_bytes("more", bytes(4 * MIB))
        assert await fill(neighbour, LIMIT // 2) == (LIMIT // 2, 0)
        host = mounted.path / "hosts"
        host.write_bytes(bytes(2 * LIMIT))
        host.unlink()
        # What it deletes, it has again.
        assert (await full.exec("rm filling && sync")).ok
        assert await fill(full, LIMIT // 2) == (LIMIT // 2, 0)
        # The limit of a sandbox that runs can be changed, both ways.
        await full.update(limits=Limits(disk_bytes=2 * LIMIT))
        assert await fill(full, LIMIT) == (LIMIT, 0)
        await full.update(limits=Limits(disk_bytes=LIMIT))
        with pytest.raises(DiskFull):
            await full.files.write_bytes("more", bytes(4 * MIB))


async def test_a_volume_has_a_size_which_all_its_sandboxes_share(
    mounted: Mounted, stored: Engine, able: Capabilities
) -> None:
    if not able.disk_limit:
        with pytest.raises(Unenforceable, match=r"a disk limit cannot be enforced here: .* is on xfs.*init --size"):
            await stored.volumes.create("small", LIMIT)
        assert os.listdir(mounted.state_dir / "layers") == os.listdir(mounted.state_dir / "volumes") == []
        return
    await stored.volumes.create("small", LIMIT)
    mounts = [Mount(source="volume:small", target="/data")]
    async with await stored.create(mounts=mounts, cwd="/data") as one, await stored.create(mounts=mounts) as other:
        written, number = await fill(one)
        assert (number, written <= LIMIT) == (mounted.full, True)
        assert not (await other.exec("head -c 4M /dev/zero > /data/more")).ok, "it is full for both"
        assert (await other.exec("head -c 20M /dev/zero > own")).ok
        assert (await one.exec("rm -f filling more && sync")).ok
        assert await fill(one, LIMIT // 2) == (LIMIT // 2, 0)
    assert cast("VolumeStore", stored.volumes).sizes() == {"small": LIMIT}
    volume = await stored.volumes.get("small")
    assert (volume.size_bytes, volume.used_bytes >= LIMIT // 2) == (LIMIT, True)
    with pytest.raises(InvalidRequest, match="1 volumes"):
        await stored.storage.init(SIZE)
    await stored.volumes.remove("small")


@pytest.mark.usefixtures("can_be_frozen")
async def test_a_limit_holds_after_sleep_and_restore_and_in_forks(
    mounted: Mounted, stored: Engine, able: Capabilities
) -> None:
    limits = Limits(disk_bytes=LIMIT) if able.disk_limit else None
    full, most = (mounted.full, 2 * LIMIT) if able.disk_limit else (0, MIB)
    async with await stored.create("limited", limits=limits) as sandbox:
        await sandbox.exec("echo first > state")
        checkpoint = await sandbox.checkpoint()
        assert (await fill(sandbox, most))[1] == full
        await sandbox.sleep()
        assert (await fill(sandbox, MIB))[1] == full
        (fork,) = await sandbox.fork(1)
        async with fork:
            assert fork.info.limits.disk_bytes == (LIMIT if limits else None)
            assert (await fork.exec("cat state; mv state moved; rm filling")).stdout == "first\n"
            assert (await fill(fork, most))[1] == full
        # Full as it woke, it can still put that right.
        assert (await sandbox.exec("rm filling && sync && echo second > state")).ok
        await sandbox.restore(checkpoint.id)
        assert (await sandbox.exec("cat state")).stdout == "first\n"
        assert (await fill(sandbox, most))[1] == full
    await stored.delete_checkpoint(checkpoint.id)


@pytest.mark.usefixtures("can_be_frozen")
async def test_a_copy_of_a_running_sandbox_shares_what_it_wrote_and_is_gone_without_a_trace(
    mounted: Mounted, stored: Engine
) -> None:
    layers = mounted.state_dir / "layers"
    async with await stored.create("sharing") as sandbox:
        assert (await fill(sandbox, 64 * MIB)) == (64 * MIB, 0)
        run("sync", "-f", mounted.path)
        before = shutil.disk_usage(mounted.path).used
        checkpoint = await sandbox.checkpoint()
        run("sync", "-f", mounted.path)
        assert shutil.disk_usage(mounted.path).used - before < 40 * MIB  # with runsc there is its memory
        copy, *_ = Checkpoints(StateStore(mounted.state_dir)).read(checkpoint.id).layers
        found = layers / copy.id
        assert not (found / "work").exists() or checkpoint.with_memory
        if mounted.kind == "btrfs":
            assert {each.lstat().st_ino for each in layers.iterdir()} == {SUBVOLUME}
            inodes = [each.lstat().st_ino for each in layers.glob("*/upper/*/home/user/filling")]
            # A snapshot is the same tree, not another one that holds the same.
            assert len(set(inodes)) == 1
            assert len(inodes) == (1 if checkpoint.with_memory else 2)
        await sandbox.exec("echo changed > filling")
        await sandbox.restore(checkpoint.id)
        assert (await sandbox.files.stat("filling")).size == 64 * MIB
    await stored.delete_checkpoint(checkpoint.id)
    await eventually(lambda: os.listdir(layers) == [], "the layers are removed")
    if mounted.kind == "btrfs":
        run("btrfs", "subvolume", "sync", mounted.path)
        assert run("btrfs", "subvolume", "list", "-d", mounted.path) == ""
        assert run("btrfs", "subvolume", "list", mounted.path) == ""
        await eventually(lambda: _quota_groups(mounted.path) == ["0/5"], "the quota groups are removed")


def _quota_groups(path: Path) -> list[str]:
    return [line.split()[0] for line in run("btrfs", "qgroup", "show", path).splitlines() if "/" in line.split()[0]]


@pytest.mark.parametrize("kind", ["btrfs", "xfs"])
async def test_a_file_system_in_a_file_is_made_found_again_and_removed(
    kind: Literal["btrfs", "xfs"], make_state_dir: Callable[[], Path]
) -> None:
    state_dir, elsewhere = make_state_dir(), make_state_dir()
    image, layers = state_dir / "storage.img", state_dir / "layers"
    image.write_bytes(b"what somebody left who was killed")
    async with atoll.open(state_dir) as engine:
        assert engine.storage.info().image is None
        with pytest.raises(InvalidRequest, match="must be at least"):
            await engine.storage.init(MIB)
        made = await engine.storage.init(SIZE, kind)
        assert (made.filesystem, made.image, made.reflinks, made.snapshots) == (kind, image, True, kind == "btrfs")
        assert image.stat().st_blocks * 512 < SIZE // 4
        assert {able.disk_limit for able in engine.runtimes().values()} == {made.disk_limit}
        with pytest.raises(InvalidRequest, match="already"):
            await engine.storage.init(SIZE)
        limits = Limits(disk_bytes=LIMIT) if made.disk_limit else None
        kept = await engine.create("kept", limits=limits)
        await kept.exec("echo kept > file")
        await kept.sleep()
        with pytest.raises(InvalidRequest, match=r"while there are 1 sandboxes; remove them first"):
            await engine.storage.remove()
    run("umount", layers)  # as a reboot does
    assert os.listdir(layers) == []

    async def reopen() -> None:
        async with atoll.open(state_dir) as engine:
            assert [info.name for info in await engine.list()] == ["kept"]

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(reopen)
    assert _mounts(layers) == 1
    async with atoll.open(state_dir) as engine:
        found = await engine.get("kept")
        assert (await found.exec("cat file")).stdout == "kept\n"
        if limits:
            assert (await fill(found))[1] == Mounted(kind, layers).full
        await found.destroy()
        # One that was started while this was mounted, elsewhere, does not keep it.
        async with atoll.open(elsewhere) as another, await another.create():
            await engine.storage.remove()
            assert engine.storage.info().image is None
            assert str(state_dir) not in run("losetup", "--list", "--noheadings", "--output", "BACK-FILE")
    assert _mounts(layers) == 0
    assert [name for name in os.listdir(state_dir) if name.startswith("storage.") and name != "storage.lock"] == []


def _mounts(path: Path) -> int:
    return [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()].count(str(path))
