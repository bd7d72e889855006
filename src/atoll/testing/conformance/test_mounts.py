"""Mounts and volumes: directories of the host inside, whose files they are, and what becomes of them over a life."""

from __future__ import annotations

import errno
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import atoll
from atoll import (
    ArchiveRefused,
    Capabilities,
    Engine,
    InvalidRequest,
    Mount,
    Sandbox,
    Unenforceable,
    VolumeExists,
    VolumeNotFound,
)
from atoll.contract.model import RuntimeName
from atoll.drivers.keeper_command import MOUNT_IDS
from atoll.testing.inside import client, running, until_running
from atoll.testing.waiting import eventually

OWNER = 12345
"""A user of the host that has no account."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of the host with a file in it; as root, another user's."""
    path = tmp_path_factory.mktemp("project")
    (path / "main.py").write_text("print('from the host')\n")
    path.chmod(0o755)
    if os.geteuid() == 0:
        for each in (path, path / "main.py"):
            os.chown(each, OWNER, OWNER)
    return path


@pytest.fixture(scope="module")
async def mounting(engine: Engine, project: Path, single_id: bool) -> AsyncIterator[Sandbox]:
    """A sandbox with the directory twice: to read, and to write."""
    mounts = [Mount(source=str(project), target="/docs"), Mount(source=str(project), target="/w/ork", read_only=False)]
    user = None if os.geteuid() == 0 or single_id else "root"
    async with await engine.create(mounts=mounts, user=user) as sandbox:
        yield sandbox


@pytest.mark.core
async def test_a_mounted_directory_can_be_read_and_not_written_unless_that_was_said(
    mounting: Sandbox, project: Path
) -> None:
    assert (await mounting.exec("python3 /docs/main.py")).stdout == "from the host\n"
    for user in (None, "root"):
        for line in ("echo x > /docs/new", "echo x >> /docs/main.py", "rm /docs/main.py", "chmod 777 /docs"):
            failed = await mounting.exec(line, user=user)
            assert not failed.ok, line
            assert "Read-only" in failed.stderr
    assert [mount.read_only for mount in mounting.info.mounts] == [True, False]
    assert mounting.info.mounts[0].source == os.path.realpath(project)


@pytest.mark.core
async def test_changes_are_seen_on_both_sides_at_once(mounting: Sandbox, project: Path) -> None:
    (project / "note").write_text("one")
    assert (await mounting.exec("cat /docs/note")).stdout == "one"
    (project / "note").write_text("another")
    assert (await mounting.exec("cat /w/ork/note; echo 42 > /w/ork/answer")).stdout == "another"
    assert (project / "answer").read_text() == "42\n"
    assert (await mounting.exec("cat /docs/answer; rm /w/ork/answer")).stdout == "42\n"
    assert not (project / "answer").exists()
    (project / "note").unlink()
    assert (await mounting.exec("cat /docs/note")).exit_code == 1


async def test_what_the_user_writes_belongs_outside_to_the_owner_of_the_directory(
    as_root: None, mounting: Sandbox, project: Path
) -> None:
    done = await mounting.exec("cd /w/ork && stat -c %u:%g . main.py && mkdir sub && echo x > sub/file && ln -s x link")
    assert done.stdout == "1000:1000\n1000:1000\n", done.stderr
    for path in (project / "sub", project / "sub" / "file", project / "link"):
        assert (path.lstat().st_uid, path.lstat().st_gid) == (OWNER, OWNER)
    await mounting.exec("touch /w/ork/roots", user="root")
    seen = (project / "roots").stat()
    assert (seen.st_uid, seen.st_gid) == (MOUNT_IDS, MOUNT_IDS), "an id that no user of the host has"
    done = await mounting.exec("chown user:user /w/ork/roots && rm -r /w/ork/sub /w/ork/link", user="root")
    assert done.ok, done.stderr
    assert (project / "roots").stat().st_uid == OWNER
    (project / "roots").unlink()


async def test_files_of_other_users_of_the_host_have_no_owner_inside(
    as_root: None, mounting: Sandbox, project: Path
) -> None:
    for name, mode in (("public", 0o644), ("private", 0o600)):
        (project / name).write_text(name)
        (project / name).chmod(mode)
    for user in ("user", "root"):
        done = await mounting.exec("cd /w/ork; stat -c %u private; cat public private; echo x > public", user=user)
        assert done.stdout == "65534\npublic", "neither has rights on it"
        assert done.stderr.count("denied") == 2, done.stderr
    for name in ("public", "private"):
        (project / name).unlink()


async def test_the_owner_is_whichever_user_the_sandbox_has(as_root: None, engine: Engine, project: Path) -> None:
    mounts = [Mount(source=str(project), target="/work", read_only=False)]
    for user, shown in (("root", "0:0"), ("daemon", "1:1"), ("4321:9", "4321:9")):
        async with await engine.create(mounts=mounts, user=user) as sandbox:
            done = await sandbox.exec("stat -c %u:%g /work/main.py; touch /work/made")
            assert (done.stdout, (project / "made").stat().st_uid) == (f"{shown}\n", OWNER), done.stderr
            (project / "made").unlink()


@pytest.mark.rootless
@pytest.mark.core
async def test_without_root_a_mount_can_be_written_by_root_inside_only(
    engine: Engine, project: Path, single_id: bool
) -> None:
    mounts = [Mount(source=str(project), target="/work", read_only=False)]
    if not single_id:
        with pytest.raises(Unenforceable, match="--user root"):
            await engine.create(mounts=mounts)
    async with await engine.create(mounts=mounts, user=None if single_id else "root") as sandbox:
        assert (await sandbox.exec("touch /work/made")).ok
    assert (project / "made").stat().st_uid == os.getuid()
    (project / "made").unlink()


async def test_mounts_hold_across_sleep_restore_and_fork_and_checkpoints_do_not_have_them(
    as_root: None, can_freeze: None, engine: Engine, capabilities: Capabilities, tmp_path: Path
) -> None:
    (tmp_path / "data").write_text("1")
    volume = await engine.volumes.create("holding")
    mounts = [
        Mount(source=str(tmp_path), target="/work", read_only=False),
        Mount(source="volume:holding", target="/data"),
    ]
    async with await engine.create(mounts=mounts) as sandbox:
        await sandbox.exec("echo kept > /data/kept")
        await (await sandbox.spawn("exec 3>>/work/log; while :; do sleep 31536043; done")).detach()
        await until_running(sandbox, "sleep 31536043")
        await sandbox.sleep()
        (tmp_path / "data").write_text("2")
        assert (await sandbox.exec("cat /work/data /data/kept")).stdout == "2kept\n"
        assert bool(await running(sandbox, "sleep 31536043")) == capabilities.memory_checkpoint
        checkpoint = await sandbox.checkpoint()
        assert checkpoint.without_mounts == ("/data", "/work")
        await sandbox.exec("echo later > /data/kept; echo 3 > /work/data")
        await sandbox.restore(checkpoint.id)
        assert (await sandbox.exec("cat /work/data /data/kept")).stdout == "3\nlater\n"
        (fork,) = await sandbox.fork()
        async with fork:
            assert fork.info.mounts == sandbox.info.mounts
            await fork.exec("echo fork > /data/from && rm /work/data")
            assert (await sandbox.exec("cat /data/from; ls /work")).stdout == "fork\nlog\n"
        await engine.delete_checkpoint(checkpoint.id)
    assert volume.used_bytes < (await engine.volumes.get("holding")).used_bytes
    await engine.volumes.remove("holding")


async def test_a_sandbox_restored_to_the_checkpoint_of_another_keeps_its_own_mounts(
    as_root: None, can_freeze: None, engine: Engine, tmp_path: Path
) -> None:
    mounts = [Mount(source=str(tmp_path), target="/work")]
    async with await engine.create(mounts=mounts) as one, await engine.create() as other:
        await other.exec("echo other > file")
        checkpoint = await other.checkpoint()
        await one.restore(checkpoint.id, foreign=True)
        assert (await one.exec("cat file; ls -d /work")).stdout == "other\n/work\n"
        assert [mount.target for mount in one.info.mounts] == ["/work"]
        await other.restore((await one.checkpoint()).id, foreign=True)
        assert not (await other.exec("mountpoint /work || test -e /work/.")).stdout.startswith("/work is a mountpoint")
        for each in await engine.checkpoints():
            await engine.delete_checkpoint(each.id)


@pytest.mark.runtimes("crun")
async def test_a_sandbox_with_mounts_is_not_a_warm_one(engine: Engine, tmp_path: Path) -> None:
    await engine.warm(1)
    try:
        async with await engine.create(mounts=[Mount(source=str(tmp_path), target="/work")]) as sandbox:
            assert (await sandbox.exec("ls -d /work")).ok
            assert [pool.ready for pool in await engine.warm_pools()] == [1]
    finally:
        await engine.warm(0)


# ---- volumes ----


@pytest.mark.core
async def test_several_sandboxes_write_to_a_volume_which_outlives_them(engine: Engine, tmp_path: Path) -> None:
    volume = await engine.volumes.create("shared")
    assert (volume.name, volume.size_bytes, volume.sandboxes) == ("shared", None, ())
    with pytest.raises(VolumeExists):
        await engine.volumes.create("shared")
    mount = Mount(source="volume:shared", target="/data")
    async with (
        await engine.create("one", mounts=[mount]) as one,
        await engine.create("two", mounts=[mount]) as two,
        await engine.create("three", mounts=[mount.model_copy(update={"read_only": True})]) as three,
    ):
        await one.exec("cd /data && echo 1 > first && mkdir sub && chmod 600 first")
        await two.exec("touch /data/roots", user="root")
        owners = "stat -c %U:%a /data /data/first /data/roots"
        assert (await two.exec(owners)).stdout == (await one.exec(owners)).stdout
        done = await two.exec("cat /data/first && echo 2 >> /data/first")
        assert (done.stdout, done.stderr) == ("1\n", ""), "it is the same user's in both"
        assert "Read-only" in (await three.exec("touch /data/third", user="root")).stderr
        assert (await three.exec("cat /data/first")).stdout == "1\n2\n"
        assert (await engine.volumes.get("shared")).sandboxes == ("one", "three", "two")
        with pytest.raises(InvalidRequest, match="'one', 'three', 'two'"):
            await engine.volumes.remove("shared")
    async with await engine.create(mounts=[mount]) as later:
        assert (await later.exec("cat /data/first")).stdout == "1\n2\n"
    assert await engine.volumes.export("shared", tmp_path / "shared.tar") == (tmp_path / "shared.tar").stat().st_size
    with tarfile.open(tmp_path / "shared.tar") as tar:
        owners_in_tar = {member.name: member.uid for member in tar}
    user = owners_in_tar["./first"]
    assert owners_in_tar == {".": user, "./first": user, "./roots": 0, "./sub": user}
    await engine.volumes.import_("copied", tmp_path / "shared.tar")
    mounts = [Mount(source="volume:copied", target="/data", read_only=True)]
    async with await engine.create(mounts=mounts) as reader:
        assert (await reader.exec("cat /data/first")).stdout == "1\n2\n"
    assert [volume.name for volume in await engine.volumes.list()] == ["copied", "shared"]
    for name in ("copied", "shared"):
        await engine.volumes.remove(name)
    with pytest.raises(VolumeNotFound):
        await engine.create(mounts=[mount])
    assert await engine.volumes.list() == []


@pytest.mark.runtimes("crun")
async def test_a_tar_that_is_none_leaves_no_volume(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "bad.tar").write_bytes(b"no tar" * 1000)
    with pytest.raises(ArchiveRefused, match="tar"):
        await engine.volumes.import_("bad", tmp_path / "bad.tar")
    with pytest.raises(VolumeNotFound):
        await engine.volumes.get("bad")


@pytest.mark.runtimes("crun")
async def test_a_process_that_is_killed_while_it_makes_a_volume_leaves_none(
    engine: Engine, state_dir: Path, runtime_name: RuntimeName, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDWR)
    try:
        body = f"await engine.volumes.import_('half', {str(pipe)!r})"
        async with client(state_dir, runtime_name, body):
            await eventually(lambda: list((state_dir / "layers").glob("*/files")), "it is being unpacked")
    finally:
        os.close(held)
    async with atoll.open(state_dir) as after:
        assert await after.volumes.list() == []
        await eventually(lambda: not list((state_dir / "layers").glob("*/files")), "its layer is removed")

    def has_reader() -> bool:
        try:
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            return error.errno != errno.ENXIO
        return True

    await eventually(lambda: not has_reader(), "the program that unpacks has ended too")


@pytest.mark.runtimes("crun")
async def test_a_mount_may_be_inside_another_where_there_is_a_directory_for_it(
    as_root: None, engine: Engine, tmp_path: Path
) -> None:
    await engine.volumes.create("inner")
    mounts = [Mount(source="volume:inner", target="/work/cache"), Mount(source=str(tmp_path), target="/work")]
    try:
        with pytest.raises(InvalidRequest, match="make it first"):
            await engine.create(mounts=mounts)
        (tmp_path / "cache").mkdir()
        async with await engine.create(mounts=mounts) as sandbox:
            assert (await sandbox.exec("touch /work/cache/file && ls /work/cache")).stdout == "file\n"
        assert os.listdir(tmp_path / "cache") == []
    finally:
        await engine.volumes.remove("inner")
