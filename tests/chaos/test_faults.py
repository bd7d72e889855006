"""A disk that is full, and a runtime that fails, does nothing, dies or hangs: what was there stays, nothing is left."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest

import atoll
from atoll.contract.model import RuntimeName
from atoll.drivers import keeper_client, keeper_command, machine
from atoll.runtime.guest import connection as link
from atoll.testing.leaks import Ledger
from atoll.testing.waiting import eventually
from tests.chaos.orphans import orphans

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a disk, and freezes sandboxes: needs root")
DISK_BYTES = 48 << 20


async def is_clean(ledger: Ledger, state_dir: Path) -> None:
    """Nothing belongs to nobody."""
    left: list[str] = []

    def none() -> bool:
        left[:] = orphans(ledger, state_dir)
        return not left

    with suppress(AssertionError):
        await eventually(none, "nothing is left", bound_s=10)
    assert not left


async def read(state_dir: Path) -> str:
    """What stands in the sandbox, as one sees it who has no connection to a run that somebody else has ended."""
    async with atoll.open(state_dir) as engine:
        return await (await engine.get("kept")).files.read_text("f")


async def end(engine: atoll.Engine) -> None:
    for info in await engine.list():
        await engine.destroy(info.name)
    for checkpoint in await engine.checkpoints():
        await engine.delete_checkpoint(checkpoint.id)
    await engine.gc()


# ---- a full disk ----


@pytest.fixture
def disk(tmp_path: Path, ledger: Ledger, give_host_image: Callable[[Path], Path]) -> Iterator[Path]:
    """A state directory on a small disk of its own."""
    image = tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-N", "4096", image], check=True)
    place = Path(tempfile.mkdtemp(prefix="atoll-disk-"))
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    state_dir = place / "state"
    try:
        state_dir.mkdir(mode=0o700)
        ledger.watch(state_dir)
        yield give_host_image(state_dir)
    finally:
        ledger.end_processes_of(state_dir)
        ledger.unwatch(state_dir)
        subprocess.run(["umount", place], check=True)
        place.rmdir()


def fill(place: Path) -> Path:
    """Take all the room that is left."""
    ballast = place / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
        with suppress(OSError):
            os.fsync(file.fileno())
    return ballast


async def refused(call: Callable[[], Awaitable[object]]) -> None:
    """It fails, and the error says why."""
    with pytest.raises((atoll.AtollError, OSError)) as caught:
        await call()
    assert "space" in str(caught.value), repr(caught.value)


async def test_on_a_full_disk_nothing_is_lost_and_all_goes_on_when_there_is_room(disk: Path, ledger: Ledger) -> None:
    async with atoll.open(disk) as engine:
        running, asleep, doomed = [await engine.create(name) for name in ("running", "asleep", "doomed")]
        for sandbox in (running, asleep, doomed):
            await sandbox.files.write_text("f", f"{sandbox.name} before")
        kept = await running.checkpoint("kept")
        await running.files.write_text("f", "running after")
        pid = (await running.spawn(["sleep", "31530001"])).pid
        await asleep.sleep()
        unused = disk / "images" / "unpacked" / ("0" * 64)
        unused.mkdir()
        os.utime(unused, (0, 0))
        ballast = fill(disk)

        await refused(lambda: engine.create("new"))
        await refused(lambda: running.checkpoint("second"))
        await refused(lambda: running.fork(2))
        await refused(lambda: running.files.write_bytes("big", bytes(100_000)))
        await refused(asleep.wake)
        await refused(lambda: running.restore("kept"))
        await refused(running.sleep)
        # What there was is there: running, asleep, and as a checkpoint.
        assert {info.name: info.status for info in await engine.list()} == {
            "running": "running",
            "asleep": "sleeping",
            "doomed": "running",
        }
        assert await running.files.read_text("f") == "running after"
        assert any(process.pid == pid for process in await running.ps())
        assert [each.id for each in await engine.checkpoints()] == [kept.id]
        # Room can be made.
        await engine.gc()
        await engine.destroy("doomed")
        async with atoll.open(disk) as another:
            assert len(await another.list()) == 2

        ballast.unlink()
        assert await asleep.files.read_text("f") == "asleep before"
        await running.restore("kept")
        assert await running.files.read_text("f") == "running before"
        (fork,) = await running.fork(1, checkpoint="kept")
        assert await fork.files.read_text("f") == "running before"
        await running.sleep()
        assert await running.files.read_text("f") == "running before"
        await engine.gc()
        assert not unused.exists()
        await is_clean(ledger, disk)
        await end(engine)
    await is_clean(ledger, disk)
    assert [line for line in ledger.all_of(disk) if not line.startswith("mount")] == []


# ---- a runtime that does not do as it is told ----

FAKES = {
    "fails": "echo the-runtime-says-no >&2; exit 3",
    "does nothing": "exit 0",
    "is killed in the middle": '{program} "$@" & sleep 0.0$(($$ % 7)); kill -9 $!; kill -9 $$',
    "hangs": "exec sleep 31530002",
}


Broken = Callable[[str, str], AbstractAsyncContextManager[atoll.Engine]]


@pytest.fixture
def with_fake(runtime_name: RuntimeName, state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Broken:
    """Opens the state directory with a program that, told one of some verbs, does as one of FAKES does."""

    @asynccontextmanager
    async def opened(kind: str, verbs: str) -> AsyncIterator[atoll.Engine]:
        program = machine.find_program(runtime_name)
        fake = tmp_path / kind.replace(" ", "-") / runtime_name
        fake.parent.mkdir(exist_ok=True)
        words = FAKES[kind].format(program=program)
        cases = "|".join(f'*" {verb} "*' for verb in verbs.split())
        fake.write_text(f'#!/bin/sh\ncase " $* " in {cases}) {words} ;; esac\nexec {program} "$@"\n')
        fake.chmod(0o755)
        with monkeypatch.context() as patch:
            for module in (machine, keeper_command):
                patch.setattr(module, "PROGRAM_PATH", f"{fake.parent}:{machine.PROGRAM_PATH}")
            async with atoll.open(state_dir, settings=atoll.Settings(runtime=runtime_name)) as engine:
                engine.runtimes()
                yield engine

    return opened


@pytest.mark.parametrize(
    ("runtime_name", "kind"),
    [
        ("crun", "fails"),
        ("crun", "does nothing"),
        ("crun", "is killed in the middle"),
        ("runc", "fails"),
        ("runc", "does nothing"),
        ("runc", "is killed in the middle"),
        ("runsc", "is killed in the middle"),
    ],
    indirect=["runtime_name"],
)
async def test_a_runtime_that_fails_loses_nothing_and_leaves_nothing(
    engine: atoll.Engine, runtime_name: RuntimeName, state_dir: Path, ledger: Ledger, with_fake: Broken, kind: str
) -> None:
    sandbox = await engine.create("kept")
    await sandbox.files.write_text("f", "before")
    await sandbox.checkpoint("before")
    await sandbox.files.write_text("f", "after")
    await sandbox.sleep()
    async with with_fake(kind, "run restore") as broken:
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: broken.create("new"),
            lambda: broken.wake("kept"),
            lambda: broken.restore("kept", "before"),
            lambda: broken.fork("kept", 2, checkpoint="before"),
        ]
        for call in calls:
            with pytest.raises(atoll.LaunchFailed) as caught:
                await call()
            assert kind != "fails" or "the-runtime-says-no" in str(caught.value)
            assert [(info.name, info.status) for info in await broken.list()] == [("kept", "sleeping")]
    assert await read(state_dir) == "after"

    # A container that the runtime does not delete, though it was told to, is noticed; the next who can does it.
    # With crun and runsc, all that there is of a sandbox is in its cgroup: it is ended without them.
    told = kind != "is killed in the middle" and runtime_name == "runc"

    def noticed() -> AbstractContextManager[object]:
        if told:
            return pytest.raises(atoll.SandboxError, match="could not delete")
        return suppress(atoll.SandboxError)

    async with with_fake(kind, "delete") as broken:
        with noticed():
            await broken.sleep("kept")
    assert await read(state_dir) == "after"
    async with with_fake(kind, "delete") as broken:
        with noticed():
            await broken.destroy("kept")
    await engine.gc()
    assert await engine.list() == []
    await end(engine)
    await is_clean(ledger, state_dir)


@pytest.mark.parametrize("runtime_name", ["crun", "runsc"], indirect=True)
async def test_a_runtime_that_hangs_holds_up_nothing_for_ever(
    engine: atoll.Engine,
    state_dir: Path,
    ledger: Ledger,
    with_fake: Broken,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who waits for a start gives up, after a time that is long for people and short here; or cancels before that."""
    sandbox = await engine.create("kept")
    await sandbox.files.write_text("f", "before")
    await sandbox.sleep()
    async with with_fake("hangs", "run restore") as broken:
        calls: list[Callable[[], Awaitable[object]]] = [lambda: broken.create("new"), lambda: broken.wake("kept")]
        for call in calls:
            with anyio.move_on_after(0.2) as scope:
                await call()
            assert scope.cancelled_caught
        for module, bound in ((link, "HANDSHAKE_S"), (keeper_client, "_START_S")):
            assert getattr(module, bound) <= 40
            monkeypatch.setattr(module, bound, 0.5)
        for call in calls:
            with pytest.raises(atoll.LaunchFailed, match=r"handshake timed out|does not answer"):
                await call()
        assert [(info.name, info.status) for info in await broken.list()] == [("kept", "sleeping")]
        monkeypatch.undo()
    assert await read(state_dir) == "before"
    await end(engine)
    await is_clean(ledger, state_dir)
