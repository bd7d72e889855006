"""Leaving a mounted directory of the host: links, `..`, other mounts, devices, set-user-id files, sockets."""

from __future__ import annotations

import io
import os
import socket
import stat
import subprocess
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.contract.errors import AtollError, InvalidRequest, LaunchFailed
from atoll.contract.model import Mount, Output
from atoll.drivers.keeper_command import MOUNT_IDS
from atoll.runtime.interface import Engine
from atoll.runtime.sandbox import Sandbox
from tests.attacks.programs import shell

pytestmark = pytest.mark.usefixtures("as_root")

OWNER = 12345
SECRET = "precious"
KMSG = os.makedev(1, 11)


@contextmanager
def tmpfs_on(path: Path) -> Iterator[None]:
    """A file system of the host with a secret, mounted on `path`."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=777", "secret", path], check=True)
    try:
        (path / "secret").write_text(SECRET)
        yield
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, probe_program: bytes) -> Iterator[Path]:
    """A directory with `source`, which is mounted, and `outside`, which is not and has a secret."""
    place = tmp_path_factory.mktemp("place")
    source, outside = place / "source", place / "outside"
    for directory in (source, outside, source / "sub", source / "covered", source / "covered-later"):
        directory.mkdir()
    (outside / "secret").write_text(SECRET)
    (source / "file").write_text("mine")
    (source / "absolute").symlink_to(outside / "secret")
    (source / "relative").symlink_to("../outside/secret")
    (source / "upwards").symlink_to("..")
    for name in ("suid-root", "suid-owner"):
        (source / name).write_bytes(probe_program)
    os.mknod(source / "kmsg", 0o666 | stat.S_IFCHR, KMSG)
    for path in (place, *place.rglob("*")):
        os.chown(path, OWNER, OWNER, follow_symlinks=False)
        if path.is_dir():
            path.chmod(0o755)
    os.chown(source / "suid-root", MOUNT_IDS, MOUNT_IDS)
    for name in ("suid-root", "suid-owner"):
        (source / name).chmod(0o6755)
    (source / "kmsg").chmod(0o666)
    # As machines with systemd have it: what is mounted later below a shared mount appears in its copies.
    subprocess.run(["mount", "--bind", place, place], check=True)
    subprocess.run(["mount", "--make-shared", place], check=True)
    try:
        with tmpfs_on(source / "covered"):
            yield place
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.fixture(scope="module")
async def inmate(engine: Engine, place: Path) -> AsyncIterator[Sandbox]:
    """A sandbox with the directory, to write, to read, and with another of the same file system."""
    mounts = [
        Mount(source=str(place / "source"), target="/work", read_only=False),
        Mount(source=str(place / "source"), target="/docs"),
        Mount(source=str(place / "source" / "sub"), target="/sub", read_only=False),
    ]
    async with await engine.create(mounts=mounts) as sandbox:
        yield sandbox


@pytest.mark.parametrize("user", ["user", "root"])
async def test_symlinks_and_dots_lead_into_the_sandboxs_own_root(inmate: Sandbox, place: Path, user: str) -> None:
    for path in ("absolute", "relative", "upwards/outside/secret", "../outside/secret", "sub/../../outside/secret"):
        for mount in ("/work", "/docs"):
            found = await shell(inmate, f"cat {mount}/{path}", user=user)
            assert not found.ok, path
            assert SECRET not in found.stdout
    await shell(inmate, f"ln -sf {place}/outside/secret /work/planted", user=user)
    assert not (await shell(inmate, "cat /work/planted; rm /work/planted", user=user)).stdout
    # From the directory's own descriptor too.
    code = (
        "import os; up = os.open('..', 0, dir_fd=os.open('/work', 0)); print(os.fstat(up).st_ino, os.stat('/').st_ino)"
    )
    above, root = (await inmate.exec(["python3", "-c", code], user=user)).stdout.split()
    assert above == root


async def test_a_directory_that_the_host_moves_out_of_the_mount_leads_nowhere(inmate: Sandbox, place: Path) -> None:
    (place / "source" / "moving").mkdir(mode=0o755)
    os.chown(place / "source" / "moving", OWNER, OWNER)
    line = "cd /work/moving && echo there; read _; cat ../secret ../../outside/secret; ls ..; echo done"
    async with await inmate.spawn(line, stdin=True, keep=False) as process:
        seen, moved = b"", False
        async for event in process:
            seen += event.data if isinstance(event, Output) and event.stream == "stdout" else b""
            if b"there" in seen and not moved:
                moved = True
                (place / "source" / "moving").rename(place / "outside" / "moving")
                await process.stdin.send(b"\n")
    (place / "outside" / "moving").rmdir()
    assert seen.startswith(b"there")
    assert seen.endswith(b"done\n")
    assert SECRET.encode() not in seen
    assert b"secret" not in seen


@pytest.mark.parametrize("user", ["user", "root"])
async def test_hard_links_do_not_leave_a_mount(inmate: Sandbox, user: str) -> None:
    for pair in ("/work/file /tmp/linked", "/etc/passwd /work/linked", "/work/file /sub/linked", "/docs/file /work/x"):
        failed = await shell(inmate, f"ln {pair}", user=user)
        assert not failed.ok, pair
        assert "cross-device" in failed.stderr or "not permitted" in failed.stderr, failed.stderr


@pytest.mark.parametrize("user", ["user", "root"])
async def test_other_mounts_of_the_host_below_it_are_not_there(inmate: Sandbox, place: Path, user: str) -> None:
    look = "ls -A /work/covered /docs/covered /work/covered-later; cat /work/covered*/secret"
    with tmpfs_on(place / "source" / "covered-later"):
        found = await shell(inmate, look, user=user)
        assert SECRET not in found.stdout
        assert "secret\n" not in found.stdout


@pytest.mark.parametrize("user", ["user", "root"])
async def test_a_device_of_the_host_in_it_cannot_be_opened(inmate: Sandbox, user: str) -> None:
    for path in ("/work/kmsg", "/docs/kmsg"):
        failed = await shell(inmate, f"head -c 1 {path}; echo x > {path}", user=user)
        assert not failed.ok
        assert not failed.stdout


async def test_set_user_id_files_in_it_give_nothing(inmate: Sandbox) -> None:
    for name, user, id in (("suid-root", "user", 1000), ("suid-owner", "daemon", 1)):
        for mount in ("/work", "/docs"):
            said = await inmate.exec([f"{mount}/{name}", "rights"], user=user, cwd="/", timeout_s=10)
            assert said.ok, said
            rights = dict(line.split() for line in said.stdout.splitlines())
            assert (rights["euid"], rights["ruid"]) == (str(id), str(id))


async def test_a_read_only_mount_stays_so_for_root(inmate: Sandbox, place: Path) -> None:
    for line in (
        "mount -o remount,rw /docs",
        "mount -o remount,bind,rw /docs",
        "umount /docs",
        "mount --bind /work /docs",
    ):
        assert not (await shell(inmate, line, user="root")).ok
    assert not (await shell(inmate, "echo changed > /docs/file", user="root")).ok
    assert (place / "source" / "file").read_text() == "mine"


@pytest.mark.parametrize("user", ["user", "root"])
async def test_a_socket_of_another_user_of_the_host_cannot_be_connected_to(
    inmate: Sandbox, place: Path, user: str
) -> None:
    path = place / "source" / "service"
    with socket.socket(socket.AF_UNIX) as service:
        service.bind(str(path))
        path.chmod(0o777)
        service.listen()
        code = "import socket; socket.socket(socket.AF_UNIX).connect('/work/service')"
        failed = await inmate.exec(["python3", "-c", code], user=user)
        path.unlink()
    assert failed.exit_code == 1, failed
    assert "Error" in failed.stderr


async def test_a_path_that_has_become_a_symlink_is_not_mounted_again(engine: Engine, tmp_path: Path) -> None:
    """A sandbox that has a parent directory mounted must not choose what is mounted in another."""
    outside, parent = tmp_path / "outside", tmp_path / "parent"
    source = parent / "source"
    for directory in (outside / "source", source):
        directory.mkdir(parents=True)
    (outside / "source" / "secret").write_text(SECRET)
    mounts = [Mount(source=str(source), target="/work")]
    async with await engine.create(mounts=mounts) as sandbox:
        for moved, link in ((source, outside / "source"), (parent, outside)):
            await sandbox.sleep()
            moved.rename(tmp_path / "away")
            moved.symlink_to(link)
            with pytest.raises(LaunchFailed, match="symlink"):
                await sandbox.exec("cat /work/secret")
            moved.unlink()
            (tmp_path / "away").rename(moved)
            assert (await sandbox.exec("ls /work")).stdout == ""


async def test_the_state_directory_is_not_mounted_by_any_name(engine: Engine, tmp_path: Path) -> None:
    state = engine.state_dir
    link, alias = tmp_path / "link", tmp_path / "alias"
    link.symlink_to(state)
    alias.mkdir()
    subprocess.run(["mount", "--bind", state, alias], check=True)
    try:
        for source in (state, state.parent, state / "layers", link, link / "sandboxes", alias, alias / "layers"):
            with pytest.raises(InvalidRequest, match="state directory"):
                await engine.create(mounts=[Mount(source=str(source), target="/work")])
    finally:
        subprocess.run(["umount", alias], check=True)


@pytest.mark.parametrize("target", ["../" * 20 + "tmp/atoll-escaped", "/tmp/atoll-escaped", "/proc/self/root"])
async def test_an_image_that_makes_the_target_a_symlink_gains_nothing(
    engine: Engine, probe_program: bytes, tmp_path: Path, target: str
) -> None:
    image, source = tmp_path / "image.tar", tmp_path / "source"
    source.mkdir()
    with tarfile.open(image, "w") as tar:
        for name, kind in (("bin", tarfile.DIRTYPE), ("bin/probe", tarfile.REGTYPE), ("work", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.linkname = kind, 0o755, target if kind == tarfile.SYMTYPE else ""
            info.size = len(probe_program) if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(probe_program))
    try:
        mounts = [Mount(source=str(source), target="/work/deep", read_only=False)]
        async with await engine.create(image=f"tar:{image}", mounts=mounts) as sandbox:
            assert (await sandbox.exec(["/bin/probe", "rights"], timeout_s=10)).ok
    except AtollError:
        pass  # refused
    finally:
        await engine.images.remove(f"tar:{image}")
    assert not Path("/tmp/atoll-escaped").exists()
    assert os.listdir(source) == []


async def test_a_volume_shows_a_sandbox_nothing_but_itself(engine: Engine, tmp_path: Path) -> None:
    await engine.volumes.create("mine")
    await engine.volumes.create("theirs")
    try:
        async with await engine.create(mounts=[Mount(source="volume:mine", target="/data")]) as sandbox:
            done = await shell(sandbox, "cd /data && ln -s ../.. up && ls -A . .. up/ up/../..", user="root")
            assert done.ok
            assert "layer" not in done.stdout
            assert "theirs" not in done.stdout
            await shell(sandbox, "cd /data && ln -s /etc/shadow link; mkfifo pipe; mknod null c 1 3", user="root")
            await engine.volumes.export("mine", tmp_path / "mine.tar")
            with tarfile.open(tmp_path / "mine.tar") as tar:
                kinds = {member.name: member.type for member in tar}
            assert kinds["./link"] == tarfile.SYMTYPE, "a link is a link, also in a tar of the volume"
        for name in ("../names", "mine/../theirs", "/etc", ".", ""):
            with pytest.raises(AtollError):
                await engine.create(mounts=[Mount(source=f"volume:{name}", target="/data")])
    finally:
        await engine.volumes.remove("mine")
        await engine.volumes.remove("theirs")
