"""Export and import: a sandbox in one file, created in one state directory and imported into another."""

from __future__ import annotations

import io
import os
import shutil
import signal
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

import atoll
from atoll import (
    Capabilities,
    CheckpointNotFound,
    Engine,
    ImageUnavailable,
    Sandbox,
    SandboxExists,
    SandboxNotFound,
    Settings,
)
from atoll.contract.model import RuntimeName
from atoll.runtime.state.store import ID_BASE, IMPORTED_IDS
from atoll.testing.inside import client
from atoll.testing.plugin import LeakCheck
from atoll.testing.waiting import eventually

# In two layers: what the second changes of the first needs the special files of overlayfs.
FIRST = """
set -e
echo one > one; mkdir -p d/e gone full; echo two > d/e/two; touch gone/x full/x full/y
printf x > 'a name
with a newline'; printf x > "$(printf 'not utf-8: \\377')"; printf x > "$(head -c 250 /dev/zero | tr '\\0' n)"
rm -rf /usr/share/common-licenses; mkdir /usr/share/common-licenses; echo mine > /usr/share/common-licenses/GPL
rm /etc/nsswitch.conf; echo opt > /opt/file; chown 1234:1235 /opt/file; chmod 4755 /opt/file; chmod 711 /
"""
SECOND = """
set -e
ln one twin; ln -s one link; ln -s /nowhere far; mkfifo -m 640 pipe; mv d moved; rm -r gone; rm full/x; rm -r full
mkdir full; touch full/z; truncate -s 20M sparse; echo middle | dd of=sparse bs=1 seek=12345678 conv=notrunc 2>&1
head -c 300000 /dev/urandom > large; mkdir -m 1777 sticky; touch -d '2001-02-03 04:05:06.123456789' old
touch -d '1969-12-31 23:59:59.5' older; chown -h 7:65534 far; mv /usr/bin/env /usr/bin/env.real; mkdir -m 0 locked
"""
ATTRIBUTES = """
import os, struct, sys
acl = [(1, 6, -1), (2, 7, 1234), (4, 4, -1), (8, 5, 1235), (16, 7, -1), (32, 4, -1)]
for name, value in {
    "user.note": b"bytes \\0 and more",
    "user.a=b=": b"with =",
    "user.%3D": b"no escape",
    "user.overlay.opaque": b"y",
    "security.capability": struct.pack("<5I", 0x2000001, 1 << 10, 0, 0, 0),
    "system.posix_acl_access": struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in acl),
}.items():
    try:
        os.setxattr("large", name, value)
    except OSError as error:
        print(name, error.strerror)
"""
# All attributes of all files that were written, except those that belong to this file system alone.
LOOK = """
import hashlib, os, stat, sys
def tell(path):
    seen = os.lstat(path)
    kind = stat.S_IFMT(seen.st_mode)
    changed = seen.st_mtime_ns
    if sys.argv[1] == "runsc":  # it has named pipes in its own memory, not on disk, and times of directories too
        if kind == stat.S_IFIFO:
            return
        changed = 0 if kind == stat.S_IFDIR else changed
    content = ""
    if kind == stat.S_IFREG:
        content = hashlib.sha256(open(path, "rb").read()).hexdigest() + str(seen.st_nlink)
    elif kind == stat.S_IFLNK:
        content = os.readlink(path)
    xattrs = [] if kind == stat.S_IFLNK else [(name, os.getxattr(path, name)) for name in names(path)]
    size = 0 if kind == stat.S_IFDIR else seen.st_size
    print(ascii(path), oct(seen.st_mode), seen.st_uid, seen.st_gid, size, changed, content, xattrs)
def names(path):
    try:
        return sorted(name for name in os.listxattr(path) if "overlay" not in name)
    except OSError:
        return []
for root in ("/root", "/opt", "/usr/share/common-licenses", "/usr/bin/env.real"):
    tell(root)
    for place, directories, files in os.walk(root):
        for name in sorted(directories + files):
            tell(os.path.join(place, name))
print(oct(os.stat("/").st_mode), os.path.lexists("/etc/nsswitch.conf"), os.path.lexists("/usr/bin/env"))
"""


@pytest.fixture(scope="module")
async def anywhere(host: Engine) -> Engine:
    """For tests that would give the same with every runtime."""
    return host


async def do(sandbox: Sandbox, script: str) -> str:
    result = await sandbox.exec(script, user="root", cwd="/root")
    assert result.ok, result.stderr
    return result.stdout


async def look(sandbox: Sandbox) -> str:
    result = await sandbox.exec(["python3", "-c", LOOK, sandbox.info.runtime], user="root", cwd="/root")
    assert result.ok, result.stderr
    return result.stdout


def layers_of(engine: Engine) -> Path:
    return engine.state_dir / "layers"


@pytest.mark.usefixtures("can_freeze")
async def test_every_file_arrives_on_another_machine_as_it_was(
    engine: Engine, runtime_name: RuntimeName, as_root: None, make_state_dir: Callable[[], Path], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    async with await engine.create("traveller", env={"WHO": "me"}, limits=atoll.Limits(open_files=777)) as sandbox:
        await do(sandbox, FIRST)
        await sandbox.sleep()
        base = await sandbox.checkpoint("base")
        await do(sandbox, SECOND)
        without = (await sandbox.exec(["python3", "-c", ATTRIBUTES], user="root", cwd="/root")).stdout
        assert runtime_name == "runsc" or not without
        exported = await sandbox.export(file)
        assert (exported.sandbox, exported.image, exported.layers) == ("traveller", "host", 2)
        assert exported.size_bytes == file.stat().st_size < 1_000_000
        assert file.stat().st_mode & 0o777 == 0o600
        assert os.listdir(tmp_path) == ["file"]
        expected = await look(sandbox)
        await engine.delete_checkpoint(base.id)
    for name in ("'/root/moved/e/two'", "'/root/full/z'", "'/root/large'", "'/root/older'", "udcff"):
        assert name in expected
    assert "/root/gone" not in expected
    settings = atoll.Settings(runtime=runtime_name)
    async with atoll.open(make_state_dir(), settings=settings) as other:
        again = io.BytesIO()
        async with await other.import_(file) as first, await other.import_(str(file), "second") as second:
            assert (first.name, second.name) == ("traveller", "second")
            for copy in (first, second):
                assert (await look(copy)).splitlines() == expected.splitlines()
                assert copy.info.limits.open_files == 777
                assert (await copy.exec("echo $WHO; hostname; ulimit -n")).stdout == f"me\n{copy.name}\n777\n"
                await do(copy, "echo changed > one; rm -r full; echo more >> large")
            with pytest.raises(SandboxExists):
                await other.import_(file)
            (sparse, *_) = layers_of(other).glob("*/upper/root/root/sparse")
            assert sparse.stat().st_blocks * 512 < 1_000_000
            for path in layers_of(other).glob("*/upper/**/*"):
                seen = path.lstat()
                is_ours = seen.st_uid >= ID_BASE or IMPORTED_IDS <= seen.st_uid < IMPORTED_IDS + 65535
                assert is_ours or (stat.S_ISCHR(seen.st_mode) and seen.st_rdev == 0), path
            # An imported sandbox is like any other, and can be exported.
            await first.export(again)
        again.seek(0)
        async with await other.import_(again, "third") as third:
            assert (
                await do(third, "cat one; ls full 2>&1 | grep -c 'No such'; tail -c 5 large")
            ) == "changed\n1\nmore\n"
        assert os.listdir(layers_of(other)) == []


@pytest.mark.usefixtures("can_freeze")
async def test_a_checkpoint_travels_without_its_processes(
    engine: Engine, capabilities: Capabilities, as_root: None
) -> None:
    async with await engine.create("origin") as sandbox:
        await (await sandbox.spawn("echo then > f; exec sleep 1000")).detach()
        await sandbox.exec("until [ -s f ]; do sleep 0.01; done")
        checkpoint = await sandbox.checkpoint("then")
        await sandbox.files.write_text("f", "now")
        file = io.BytesIO()
        exported = await engine.export("origin", file, checkpoint="then")
        assert exported.without_processes is capabilities.memory_checkpoint
        assert (exported.checkpoint, exported.size_bytes) == ("then", None)
        await engine.delete_checkpoint(checkpoint.id)
        file.seek(0)
        async with await engine.import_(file, "copy") as copy:
            assert (await copy.exec("cat f; pgrep sleep")).stdout == "then\n"
        assert await sandbox.files.read_text("f") == "now"


@pytest.mark.core
async def test_one_that_sleeps_travels_without_waking(engine: Engine, tmp_path: Path, user_id: int) -> None:
    covered = "/usr/share/common-licenses"
    async with await engine.create("asleep") as sandbox:
        await sandbox.exec("echo text > f; chmod 640 f")
        await sandbox.exec(f"rm -r {covered}; mkdir {covered}; touch {covered}/z; rm /etc/nsswitch.conf", user="root")
        await sandbox.sleep()
        with open(tmp_path / "file", "wb") as file:
            file.write(b"before")
            await sandbox.export(file)
        assert {info.status for info in await engine.list() if info.name == "asleep"} == {"sleeping"}
        with open(tmp_path / "file", "rb") as file:
            assert file.read(6) == b"before"  # the object has read more than that
            async with await engine.import_(file, "awake") as copy:
                said = await copy.exec(f"cat f; stat -c '%a %u' f; ls {covered} /etc/nsswitch.conf")
                assert said.stdout == f"text\n640 {user_id}\n{covered}:\nz\n"
                assert said.stderr.count("No such file") == 1


async def test_a_process_that_is_killed_while_exporting_leaves_nothing(
    anywhere: Engine, tmp_path: Path, leak_check: LeakCheck
) -> None:
    async with await anywhere.create("source") as sandbox:
        await sandbox.exec("head -c 5000000 /dev/urandom > noise")
        await sandbox.sleep()
        await sandbox.export(tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    os.mkfifo(tmp_path / "pipe")
    body = "await engine.import_(sys.argv[3], 'half')"
    async with client(anywhere.state_dir, next(iter(anywhere.runtimes())), body, str(tmp_path / "pipe")) as other:
        with await anyio.to_thread.run_sync((tmp_path / "pipe").open, "wb", 0) as pipe:
            await anyio.to_thread.run_sync(pipe.write, data[:-100_000])
            with anyio.fail_after(20):
                while not list(layers_of(anywhere).glob("*/upper/root/home/user/noise")):
                    await anyio.sleep(0.01)
            pid = other.pid
            helpers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            assert len(helpers) == 2
            other.send_signal(signal.SIGKILL)
            await other.ends()
            await anywhere.gc()
    await eventually(
        lambda: not any(Path(f"/proc/{each}").exists() for each in helpers), "its helper processes have exited"
    )
    assert os.listdir(layers_of(anywhere)) == []
    assert await anywhere.list() == []
    # An export that is cancelled leaves nothing, at once.
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as source, os.fdopen(writing, "wb", buffering=0) as sink:
        sink.write(data[:1000])
        with anyio.move_on_after(0.3):
            await anywhere.import_(source, "half")
    assert os.listdir(layers_of(anywhere)) == []
    await leak_check.back_to_start()


async def test_a_file_is_there_when_it_is_whole(anywhere: Engine, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("as it was")

    def stop(what: str, done: int, total: int | None) -> None:
        raise KeyError(what)

    async with await anywhere.create("whole") as sandbox:
        await sandbox.exec("head -c 3000000 /dev/urandom > noise")
        await sandbox.sleep()
        with pytest.raises(KeyError, match="exporting whole"):
            await sandbox.export(file, progress=stop)
        assert file.read_text() == "as it was"
        assert os.listdir(tmp_path) == ["file"]
        for target in (tmp_path, tmp_path / "none" / "file"):
            with pytest.raises(OSError, match="directory"):
                await sandbox.export(target)
        with pytest.raises(CheckpointNotFound):
            await sandbox.export(file, checkpoint="none")
        heard: list[tuple[str, int, int | None]] = []
        await sandbox.export(file, progress=lambda *told: heard.append(told))
        assert heard
        size = file.stat().st_size
        heard.clear()
        async with await anywhere.import_(file, "copy", progress=lambda *told: heard.append(told)):
            assert all(done <= size == total for _, done, total in heard)
    with pytest.raises(SandboxNotFound):
        await anywhere.export("no-such-sandbox", file)
    with pytest.raises(FileNotFoundError):
        await anywhere.import_(tmp_path / "none")


async def test_the_image_has_to_be_there_and_is_known_by_its_digest(
    anywhere: Engine, any_settings: Settings, as_root: None, make_state_dir: Callable[[], Path], tmp_path: Path
) -> None:
    image = tmp_path / "image.tar"
    with tarfile.open(image, "w") as tar:
        tar.add("/bin/busybox", "bin/busybox")
        tar.addfile(tarfile.TarInfo("etc/base"))
    shutil.copy(image, tmp_path / "elsewhere.tar")
    cat = ["/bin/busybox", "cat"]
    async with await anywhere.create("plain", image=f"tar:{image}") as sandbox:
        await sandbox.files.write_text("/etc/mine", "text", user="root")
        await sandbox.sleep()
        await sandbox.export(tmp_path / "file")
    await anywhere.images.remove(f"tar:{image}")
    async with atoll.open(make_state_dir(), settings=any_settings) as other:
        digest = subprocess.run(["sha256sum", image], capture_output=True, text=True, check=True).stdout.split()[0]
        with pytest.raises(ImageUnavailable, match=f"sha256:{digest}.*images import"):
            await other.import_(tmp_path / "file")
        assert os.listdir(layers_of(other)) == []
        await other.images.import_(tmp_path / "elsewhere.tar", "team/plain:1")
        async with await other.import_(tmp_path / "file") as copy:
            assert copy.info.image.endswith("team/plain:1")
            assert (await copy.exec([*cat, "/etc/mine", "/etc/base"])).stdout == "text"
        # The caller may choose another image, and is responsible for it.
        async with await other.import_(tmp_path / "file", image="host") as copy:
            assert (await copy.exec("cat /etc/mine; ls /etc/base")).stdout == "text"
