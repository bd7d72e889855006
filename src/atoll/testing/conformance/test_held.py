"""What a process may hold when it is saved: each kind survives, or the save is refused and nothing changes."""

from __future__ import annotations

import json
from datetime import timedelta

import anyio
import pytest

from atoll import Engine, NotCheckpointable, Process, Sandbox, SandboxDied, SandboxError
from atoll.contract.model import RuntimeName
from atoll.testing.inside import read_until, running
from atoll.testing.waiting import eventually

pytestmark = pytest.mark.runtimes("runsc")

HOLDER = """
import ctypes, fcntl, json, mmap, os, select, shutil, signal, socket, struct, subprocess, sys, tempfile, threading, time

libc = ctypes.CDLL(None, use_errno=True)

def made(number):
    if number < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return number

def file(path):
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.write(fd, b"kept" * 1024)
    return fd

held = {kind: {} for kind in json.loads(sys.argv[1])}
for kind, code in json.loads(sys.argv[1]).items():
    exec(code, {**globals(), "check": lambda: True, "its": held[kind]}, held[kind])
print("holding", flush=True)
while not os.path.exists("/tmp/go"):
    time.sleep(0.02)
failed = []
for kind, names in held.items():
    try:
        if not eval(names.get("check", "True"), {**globals(), **names}):
            failed.append(kind)
    except Exception as error:
        failed.append(f"{kind}: {error!r}")
done = "/tmp/done" + sys.argv[2]
with open(done + ".new", "w") as file:
    json.dump(failed, file)
os.rename(done + ".new", done)
time.sleep(31536000)
"""
"""Holds each kind of its first argument. When there is /tmp/go, it says in /tmp/done, with its second argument at the
end of that name, which it has no more."""

SAVABLE = {
    "pipe": "r, w = os.pipe(); os.write(w, b'kept'); check = 'os.read(r, 4) == b\"kept\"'",
    "FIFO": "os.mkfifo('fifo'); f = os.open('fifo', os.O_RDWR); os.write(f, b'kept'); check = 'os.read(f, 4)'",
    "socketpair": "a, b = socket.socketpair(); a.send(b'kept'); check = 'b.recv(4)'",
    "Unix socket": "s = socket.socket(socket.AF_UNIX); s.bind('sock'); s.listen(); c = socket.socket(socket.AF_UNIX); "
    "c.connect('sock'); c.send(b'kept'); os.unlink('sock'); check = 's.accept()[0].recv(4)'",
    "UDP socket": "s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('127.0.0.1', 7001)); "
    "s.sendto(b'kept', ('127.0.0.1', 7001)); check = 's.recv(4)'",
    "listening TCP socket": "s = socket.create_server(('127.0.0.1', 7002)); "
    "check = 'socket.create_connection((\"127.0.0.1\", 7002))'",
    "connected TCP socket": "s = socket.create_server(('127.0.0.1', 7003)); "
    "c = socket.create_connection(('127.0.0.1', 7003)); a, _ = s.accept(); c.send(b'kept'); "
    'check = \'a.recv(4) == b"kept" and a.send(b"back") and c.recv(4) == b"back"\'',
    "eventfd": "e = os.eventfd(3); check = 'os.eventfd_read(e) == 3'",
    "timerfd": "t = made(libc.timerfd_create(1, 0)); "
    "made(libc.timerfd_settime(t, 0, struct.pack('qqqq', 0, 1000, 0, 1000), None)); check = 'os.read(t, 8)'",
    "signalfd": "m = ctypes.create_string_buffer(128); libc.sigemptyset(m); libc.sigaddset(m, 12); "
    "libc.sigprocmask(0, m, None); f = made(libc.signalfd(-1, m, 0)); "
    "check = 'os.kill(os.getpid(), 12) or os.read(f, 128)[0] == 12'",
    "inotify": "f = made(libc.inotify_init()); os.mkdir('seen'); made(libc.inotify_add_watch(f, b'seen', 0x100)); "
    "check = 'os.mkdir(\"seen/x\") or os.read(f, 4096)'",
    "inotify of a deleted directory": "f = made(libc.inotify_init()); os.mkdir('w'); "
    "made(libc.inotify_add_watch(f, b'w', 0x100)); os.rmdir('w')",
    "epoll": "r, w = os.pipe(); e = select.epoll(); e.register(r, 1); check = 'os.write(w, b\"x\") and e.poll(5)'",
    "memfd": "m = os.memfd_create('m'); os.write(m, b'kept'); check = 'os.pread(m, 4, 0) == b\"kept\"'",
    "mapped memfd": "m = os.memfd_create('m'); os.write(m, bytes(4096)); q = mmap.mmap(m, 4096); os.close(m); "
    "q[:4] = b'kept'; check = 'q[:4] == b\"kept\"'",
    "shared memory": "q = mmap.mmap(-1, 4096); q[:4] = b'kept'; check = 'q[:4] == b\"kept\"'",
    "POSIX shared memory that was unlinked": "f = file('/dev/shm/x'); q = mmap.mmap(f, 4096); os.unlink('/dev/shm/x'); "
    "check = 'q[:4] == b\"kept\"'",
    "System V shared memory": "i = made(libc.shmget(0, 4096, 0o1600)); libc.shmat.restype = ctypes.c_void_p; "
    "q = libc.shmat(i, None, 0); ctypes.memmove(q, b'kept', 4); libc.shmctl(i, 0, None); "
    "check = 'ctypes.string_at(q, 4) == b\"kept\"'",
    "deleted file on a tmpfs": "f = file('/tmp/x'); os.unlink('/tmp/x'); check = 'os.pread(f, 4, 0) == b\"kept\"'",
    "pseudo-terminal": "m, s = os.openpty(); os.write(m, b'kept\\n'); check = 'os.read(s, 5) == b\"kept\\\\n\"'",
    "file that was renamed": "f = file('r'); os.rename('r', 'r2'); check = 'os.pread(f, 4, 0) == b\"kept\"'",
    "file whose name says that it is deleted": "f = file('n (deleted)'); check = 'os.pread(f, 4, 0) == b\"kept\"'",
    "mapped file": "f = file('m'); q = mmap.mmap(f, 4096); os.close(f); check = 'q[:4] == b\"kept\"'",
    "lock": "f = file('l'); fcntl.flock(f, 2); check = 'os.pread(f, 4, 0) == b\"kept\"'",
    "directory that is being read": "d = os.scandir('/usr/bin'); next(d); check = 'next(d)'",
    "entry in /proc of a dead process": "p = subprocess.Popen(['sleep', '99']); f = os.open(f'/proc/{p.pid}/stat', 0); "
    "p.kill(); p.wait()",
    "stopped child": "p = subprocess.Popen(['sleep', '31536051']); p.send_signal(19); check = 'p.poll() is None'",
    "thread that waits": "e = threading.Event(); t = threading.Thread(target=e.wait, daemon=True); t.start(); "
    "check = 'e.set() or t.join() or True'",
}
UNSAVABLE = {
    "deleted file": ("f = file('x'); os.unlink('x')", "/home/user/x (deleted)"),
    "deleted file of the image": ("f = os.open('/etc/nsswitch.conf', 0); os.unlink('/etc/nsswitch.conf')", "/etc/nss"),
    "deleted file with another name": ("f = file('x'); os.link('x', 'y'); os.unlink('x')", "/home/user/x (deleted)"),
    "replaced file": ("f = file('x'); os.close(file('y')); os.rename('y', 'x')", "/home/user/x (deleted)"),
    "file in a deleted tree": (
        "os.makedirs('a/b'); f = file('a/b/x'); shutil.rmtree('a')",
        "/home/user/a/b/x (deleted)",
    ),
    "file with a path longer than PATH_MAX": (
        "for _ in range(25): os.mkdir('d' * 200), os.chdir('d' * 200)\nf = file('x'); os.unlink('x'); os.chdir('/')",
        "/home/user/ddd",
    ),
    "deleted FIFO": ("os.mkfifo('x'); f = os.open('x', os.O_RDWR); os.unlink('x')", "/home/user/x (deleted)"),
    "deleted directory": ("os.mkdir('d'); f = os.open('d', 0); os.rmdir('d')", "/home/user/d (deleted)"),
    "deleted working directory": ("os.mkdir('d'); os.chdir('d'); os.rmdir('../d')", "/home/user/d (deleted)"),
    "deleted root directory": (
        "os.mkdir('d'); p = os.fork() or (os.chroot('d'), time.sleep(99)); time.sleep(0.2); os.rmdir('d')",
        "/home/user/d (deleted)",
    ),
    "deleted program": (
        "shutil.copy('/bin/sleep', 'x'); p = subprocess.Popen(['./x', '99']); time.sleep(0.2); os.unlink('x')",
        "/home/user/x (deleted)",
    ),
    "deleted mapping": (
        "f = file('x'); libc.mmap(None, ctypes.c_size_t(4096), 1, 2, f, ctypes.c_long(0)); os.close(f); os.unlink('x')",
        "/home/user/x (deleted)",
    ),
    "deleted mapping that is shared": (
        "f = file('x'); q = mmap.mmap(f, 4096); os.close(f); os.unlink('x')",
        "/home/user/x (deleted)",
    ),
    "deleted file that is locked": ("f = file('x'); fcntl.flock(f, 2); os.unlink('x')", "/home/user/x (deleted)"),
    "path of a deleted file": (
        "os.close(file('x')); f = os.open('x', os.O_PATH); os.unlink('x')",
        "/home/user/x (deleted)",
    ),
    "path of a deleted symlink": (
        "os.symlink('nowhere', 'x'); f = os.open('x', os.O_PATH | os.O_NOFOLLOW); os.unlink('x')",
        "/home/user/x (deleted)",
    ),
    "deleted file of a thread with descriptors of its own": (
        (
            "e = threading.Event(); t = threading.Thread(target=lambda: (libc.unshare(0x400), file('x'), "
            "os.unlink('x'), its['e'].set(), time.sleep(31536000)), daemon=True); t.start(); e.wait()"
        ),
        "/home/user/x (deleted)",
    ),
    "deleted working directory of a thread": (
        (
            "os.mkdir('d'); e = threading.Event(); t = threading.Thread(target=lambda: (libc.unshare(0x200), "
            "os.chdir('d'), its['e'].set(), time.sleep(31536000)), daemon=True); t.start(); e.wait(); os.rmdir('d')"
        ),
        "/home/user/d (deleted)",
    ),
    "deleted file of a process whose first thread has ended": (
        (
            "p = subprocess.Popen(['python3', '-c', 'import ctypes, os, threading, time; f = os.open(\"x\", 66); "
            "threading.Thread(target=lambda: time.sleep(31536000)).start(); ctypes.CDLL(None).syscall(60, 0)'])\n"
            "while not os.path.exists('x'): time.sleep(0.02)\n"
            "while 'Z' not in open(f'/proc/{p.pid}/stat').read(): time.sleep(0.02)\n"
            "os.unlink('x')"
        ),
        "/home/user/x (deleted)",
    ),
    "deleted file in a PID namespace": (
        (
            "made(libc.unshare(0x30000000)); p = subprocess.Popen(['python3', '-c', 'import os, time; "
            'f = os.open("/tmp/../root/x", 66); time.sleep(31536000)\'])\n'
            "while not os.path.exists('/root/x'): time.sleep(0.02)\n"
            "os.unlink('/root/x')"
        ),
        "/root/x (deleted)",
    ),
    "io_uring": ("b = ctypes.create_string_buffer(256); f = made(libc.syscall(425, 4, b))", "an io_uring"),
}
"""What holds it, and what the error says of it."""
QUEUE = "m = ctypes.CDLL('librt.so.1', use_errno=True); q = made(m.mq_open(b'/q', 0o102, 0o600, None))"
IN_FLIGHT = (
    "a, b = socket.socketpair(); f = file('x'); os.unlink('x'); socket.send_fds(a, [b'x'], [f]); os.close(f); q = 0"
)
"""A deleted file that is in no process's list: it was sent to one that has not received it."""


async def hold(sandbox: Sandbox, kinds: dict[str, str], *, name: str = "") -> Process | None:
    """A process that holds them. None: there is no such thing here."""
    process = await sandbox.spawn(
        ["python3", "-c", HOLDER, json.dumps(kinds), name], user="root", cwd="/home/user", keep=True
    )
    try:
        await read_until(process, b"holding")
    except AssertionError:
        return None
    return process


@pytest.fixture
def saves_all(engine: Engine, runtime_name: RuntimeName) -> bool:
    return engine.runtimes()[runtime_name].saves_epoll_waiters


async def test_what_can_be_saved_survives(engine: Engine, saves_all: bool, as_root: None) -> None:
    kinds = {**SAVABLE, "message queue": QUEUE} if saves_all else {**SAVABLE}
    if not saves_all:  # a process with an epoll descriptor and a TCP socket may wait for that, and is refused
        del kinds["epoll"]
    async with await engine.create("holding") as sandbox:
        process = await hold(sandbox, kinds)
        assert process is not None
        await process.detach()
        await sandbox.sleep()
        await sandbox.files.write_text("/tmp/go", "")

        async def done() -> bool:
            return await sandbox.files.exists("/tmp/done")

        await eventually(done, "it has looked at what it holds")
        assert json.loads(await sandbox.files.read_text("/tmp/done")) == []


async def test_what_cannot_be_saved_is_refused_and_nothing_changes(
    engine: Engine, saves_all: bool, as_root: None
) -> None:
    kinds = {**UNSAVABLE, **({} if saves_all else {"message queue": (QUEUE, "a message queue")})}
    async with await engine.create("refused") as sandbox:
        for kind, (code, words) in kinds.items():
            process = await hold(sandbox, {kind: code})
            if process is None:
                assert kind in ("io_uring", "deleted file in a PID namespace"), f"{kind} cannot be made"
                continue
            with pytest.raises(NotCheckpointable) as caught:
                await sandbox.checkpoint()
            assert words in caught.value.message, kind
            assert any(command in caught.value.message for command in ("(./x 99)", "(python3 -c", "()")), kind
            await sandbox.kill(process.id)
            await process.wait()
            await sandbox.exec("rm -rf x y a d*", user="root", cwd="/home/user")
        assert await engine.checkpoints() == []
        await sandbox.sleep()
        assert (await sandbox.exec("echo awake")).stdout == "awake\n"


async def test_a_sandbox_that_cannot_be_saved_pauses_or_shuts_down(engine: Engine, as_root: None) -> None:
    async with await engine.create("held") as sandbox:

        async def status() -> str:
            return next(info.status for info in await engine.list() if info.name == "held")

        process = await hold(sandbox, {"deleted file": UNSAVABLE["deleted file"][0]})
        assert process is not None
        for save in (sandbox.sleep, sandbox.checkpoint, sandbox.fork):
            with pytest.raises(NotCheckpointable, match=r"\(python3 -c .* holds /home/user/x \(deleted\)"):
                await save()
            assert await status() == "running"
        assert await running(sandbox, "python3 -c")
        await process.detach()
        while not await engine.sleep_unused("held", timedelta(0)):
            await anyio.sleep(0.01)
        for save in (sandbox.sleep, sandbox.checkpoint):
            assert await status() == "paused"
            with pytest.raises(NotCheckpointable):
                await save()
        assert await status() == "paused"
        assert await running(sandbox, "python3 -c")
        await sandbox.shutdown()
        assert await status() == "shutdown"
        await sandbox.wake()
        assert not await running(sandbox, "python3 -c")
        assert not list((engine.state_dir / "sandboxes" / sandbox.id).glob("memory-*"))


@pytest.mark.parametrize("operation", ["sleep", "checkpoint", "fork"])
async def test_a_save_that_fails_all_the_same_leaves_an_error_and_all_files(
    engine: Engine, operation: str, as_root: None
) -> None:
    async with await engine.create("failing") as sandbox:
        await sandbox.files.write_text("f", "kept")
        process = await hold(sandbox, {"in flight": IN_FLIGHT})
        assert process is not None
        with pytest.raises(SandboxError, match="could not write the sandbox's processes to disk") as caught:
            await getattr(sandbox, operation)()
        assert "goroutine" not in str(caught.value)
        (info,) = [info for info in await engine.list() if info.name == "failing"]
        assert (info.status, info.pid) == ("error", None)
        assert info.reason is not None
        assert "processes to disk" in info.reason
        assert not list((engine.state_dir / "sandboxes" / sandbox.id).glob("memory-*"))
        assert not list((engine.state_dir / "checkpoints").iterdir())
        assert await engine.checkpoints() == []
        with pytest.raises(SandboxDied, match="processes to disk"):
            await sandbox.exec("true")
        await sandbox.wake()
        assert await sandbox.files.read_text("f") == "kept"
        await sandbox.sleep()
        assert await sandbox.files.read_text("f") == "kept"
