"""The guest where it belongs: as PID 1 of a container, under crun and under runsc, with nothing in it but busybox."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.guest.client import Guest, N, Stream, frame, wait_for

STRICT = os.environ.get("ATOLL_STRICT") == "1" or os.environ.get("CI") == "true"
APPLETS = "sh ls cat sleep kill echo id head setsid readlink true tty".split()
CAPABILITIES = [f"CAP_{name}" for name in "CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID SETPCAP".split()]
FIRST_ID = 300000


class Fifos:
    """The host's end of two FIFOs, in the clothes of a socket."""

    def __init__(self, directory: Path) -> None:
        self.ends = [os.open(directory / name, os.O_RDWR) for name in ("in", "out")]

    def fileno(self) -> int:
        return self.ends[1]

    def recv(self, size: int) -> bytes:
        return os.read(self.ends[1], size)

    def close(self) -> None:
        for end in self.ends:
            os.close(end)


class Inside(Guest):
    """A guest that a container runtime started."""

    def __init__(self, process: subprocess.Popen, directory: Path) -> None:
        self.sock, self.process = Fifos(directory), process
        self.buffer, self.pending = bytearray(), bytearray()
        self.streams, self.hellos, self.last, self.closed = {}, [], 0, False
        self.until(lambda: bool(self.hellos), 30)

    def send(self, data: bytes) -> None:
        waiting = bytes(self.pending) + data
        self.pending.clear()
        while waiting:
            waiting = waiting[os.write(self.sock.ends[0], waiting[:4096]) :]

    def sh(self, line: str, **more: Any) -> Stream:
        return self.open("SPAWN", SHELL=line, ENV=["PATH=/bin"], **more)

    def output(self, line: str, **more: Any) -> str:
        stream = self.sh(line, **more)
        stream.wait(30)
        return stream.out.decode() + stream.err.decode()


def make_bundle(directory: Path, binary: str, runtime: str) -> None:
    root = directory / "rootfs"
    for name in ("bin", "dev", "proc", "etc", "tmp", "root"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    shutil.copy(str(shutil.which("busybox")), root / "bin" / "busybox")
    for name in APPLETS:
        (root / "bin" / name).symlink_to("busybox")
    shutil.copy(binary, root / "guest")
    (root / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\n")
    linux: dict[str, Any] = {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")]}
    if runtime == "crun":
        linux["namespaces"].append({"type": "user"})
        linux["uidMappings"] = linux["gidMappings"] = [{"containerID": 0, "hostID": FIRST_ID, "size": 65536}]
        for path in [root, *root.rglob("*")]:
            os.lchown(path, FIRST_ID, FIRST_ID)
    process = {
        "args": ["/guest", "--home", "1000:1000:/home/agent"],
        "cwd": "/",
        "user": {"uid": 0, "gid": 0},
        "env": ["PATH=/bin"],
        "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), CAPABILITIES),
        "noNewPrivileges": True,
    }
    pts = ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
        {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": pts},
    ]
    config = {"ociVersion": "1.0.2", "process": process, "root": {"path": "rootfs"}, "mounts": mounts, "linux": linux}
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("in", "out"):
        os.mkfifo(directory / name, 0o600)


@pytest.fixture(scope="module", params=["crun", "runsc"])
def runtime(request: pytest.FixtureRequest) -> str:
    missing = [tool for tool in (request.param, "busybox") if not shutil.which(tool)]
    if missing or os.geteuid() != 0:
        (pytest.fail if STRICT else pytest.skip)(f"needs root and {missing}")
    return request.param


@pytest.fixture(scope="module")
def inside(binary: str, runtime: str) -> Iterator[Inside]:
    directory = Path(tempfile.mkdtemp(prefix="atoll-inside-"))
    directory.chmod(0o755)
    make_bundle(directory, binary, runtime)
    name, state = f"atoll-{directory.name}", directory / "state"
    tools = {
        # In a mount namespace of its own, because crun refuses the mixture of cgroups that some machines have.
        "crun": ["unshare", "-m", "sh", "-c", 'umount -l /sys/fs/cgroup/unified 2>/dev/null; exec "$@"', "-", "crun"],
        "runsc": ["runsc", "--network=none", "--ignore-cgroups"],
    }
    more = ["--cgroup-manager=disabled"] if runtime == "crun" else []
    with (directory / "log").open("wb") as log:
        ends = [os.open(directory / end, os.O_RDWR) for end in ("in", "out")]
        command = [*tools[runtime], f"--root={state}", *more, "run", f"--bundle={directory}", name]
        process = subprocess.Popen(command, stdin=ends[0], stdout=ends[1], stderr=log)
    guest: Inside | None = None
    try:
        guest = Inside(process, directory)
        yield guest
        guest.send(frame("SHUTDOWN", 0))
        assert process.wait(20) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        delete = [runtime, f"--root={state}", "delete", "--force", name]
        subprocess.run(delete, capture_output=True, check=False)
        for end in ends:
            os.close(end)
        if guest is not None:
            guest.sock.close()
        shutil.rmtree(directory, ignore_errors=True)


def commands(inside: Inside) -> list[bytes]:
    return [record["COMMAND"] for record in inside.records("PS")]


def test_it_is_the_first_process_and_serves(inside: Inside) -> None:
    assert inside.output("cat /proc/1/comm") == "atoll-guest\n"
    assert inside.output("id -u; pwd", USER="agent").split() == ["1000", "/home/agent"]
    assert inside.run("WRITE", b"x" * 300_000, PATH="file", USER="agent", ATOMIC=1).end["SIZE"] == 300_000
    assert inside.run("READ", PATH="/home/agent/file").out == b"x" * 300_000


def test_a_killed_tree_is_gone_with_all_its_daemons(inside: Inside) -> None:
    kept = inside.sh("(setsid sleep 555 &); echo up; exec sleep 556", KEEP=1)
    kept.until_out(b"up")
    for _ in range(5):
        stream = inside.sh(
            "(setsid sleep 777 &); (setsid sh -c '(setsid sleep 777 &); sleep 777' &); sleep 777 & sleep 777"
        )
        proc = stream.event("STARTED")["PROC"]
        assert inside.run("SIGNAL", PROC=proc, SIGNAL=int(signal.SIGKILL), TREE=1).end == {}
        assert stream.wait()["KILLED"] == 1
        assert b"sleep 777" not in commands(inside)
    assert {b"sleep 555", b"sleep 556"} <= set(commands(inside))
    inside.run("SIGNAL", PROC=kept.event("STARTED")["PROC"], SIGNAL=int(signal.SIGKILL), TREE=1)
    assert not {b"sleep 555", b"sleep 556"} & set(commands(inside))


def test_a_tree_lives_as_long_as_its_last_daemon(inside: Inside) -> None:
    stream = inside.sh("(setsid sleep 888 &); exit 3")
    assert stream.wait()["EXIT_CODE"] == 3
    proc = stream.event("STARTED")["PROC"]

    def live() -> int:
        return next(record["LIVE"] for record in inside.records("PROCS") if record["PROC"] == proc)

    wait_for(lambda: b"sleep 888" in commands(inside))
    assert live() == 1
    assert inside.run("SIGNAL", PROC=proc, SIGNAL=int(signal.SIGTERM), TREE=1).end == {}
    wait_for(lambda: live() == 0)
    assert b"sleep 888" not in commands(inside)


def test_orphans_of_a_killed_supervisor_are_ended_and_others_are_not(inside: Inside) -> None:
    other = inside.sh("(setsid sleep 333 &); echo up; exec sleep 333", KEEP=1)
    other.until_out(b"up")
    stream = inside.sh("(setsid sleep 444 &); echo up; exec sleep 444")
    stream.until_out(b"up")
    wait_for(lambda: commands(inside).count(b"sleep 333") == 2 and commands(inside).count(b"sleep 444") == 2)
    pid = stream.event("STARTED")["PID"]
    supervisor = next(record["PPID"] for record in inside.records("PS") if record["PID"] == pid)
    inside.output(f"kill -9 {supervisor}")
    assert stream.wait()["ERRNO"] == 10
    wait_for(lambda: b"sleep 444" not in commands(inside))
    assert commands(inside).count(b"sleep 333") == 2
    inside.run("SIGNAL", PROC=other.event("STARTED")["PROC"], SIGNAL=int(signal.SIGKILL), TREE=1)


def test_the_stream_to_the_host_is_out_of_reach(inside: Inside, runtime: str) -> None:
    attempt = "for i in 3 10 11 12; do (echo x > /proc/1/fd/$i) 2>&1; done; cat /proc/1/mem 2>&1 | head -c 100"
    as_agent = inside.output(attempt, USER="agent")
    assert as_agent.count("Permission denied") + as_agent.count("nonexistent") >= 4
    if runtime == "crun":  # gVisor of 2022 lets root open descriptors of PID 1, whatever it says about being dumpable
        as_root = inside.output(attempt)
        assert as_root.count("Permission denied") + as_root.count("nonexistent") >= 4


@pytest.mark.parametrize("runtime", ["crun"], indirect=True)  # under gVisor of 2022 root can, and the sandbox ends
def test_the_guest_cannot_be_killed_from_inside(inside: Inside) -> None:
    assert "still" in inside.output("kill -9 1; kill -STOP 1; kill -TERM 1; echo still")


def test_a_terminal_works(inside: Inside) -> None:
    stream = inside.sh("tty", PTY_ROWS=20, PTY_COLS=60, USER="agent")
    assert stream.wait()["EXIT_CODE"] == 0
    assert stream.out == b"/dev/pts/0\r\n"


def test_loopback_can_be_listened_on_and_dialled(inside: Inside) -> None:
    listening = inside.open("LISTEN", PORT=0)
    there = inside.open("DIAL", PORT=listening.event("LISTENING")["PORT"])
    there.event("CONNECTED")
    here = inside.open("ACCEPT", CONN=listening.event("ACCEPTED")["CONN"])
    there.send(b"ping")
    here.until_out(b"ping")
    here.eof()
    there.eof()
    assert (here.wait(), there.wait()) == ({}, {})
    listening.reset()
    assert N["EVENT_ACCEPTED"] in [event["EVENT"] for event in listening.events]
