"""`exec` without an engine does what `exec` with one does, and leaves to the engine what it cannot do."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll import state_directory
from atoll.contract.protocol import EventKind, FrameType, Tag, Value, encode_fields, encode_frame
from atoll.runtime.state.running import find_running
from atoll.settings import Settings
from atoll.testing.waiting import wait_until
from tests.cli.driving import PROGRAM, Atoll
from tests.cli.test_cli_network import fetch

pytestmark = pytest.mark.local("without an engine, and without a server")

WITH_ENGINE = {"ATOLL_RUNTIME": "crun"}
"""A setting that has to be checked before the state directory is known, as those of an engine are."""
BYTES = random.Random(1).randbytes(3_000_000)
CASES: list[tuple[list[str], bytes]] = [
    (["--", "true"], b""),
    (["-c", "exit 255"], b""),
    (["-c", "kill -TERM $$"], b""),
    (["-c", "kill -KILL $$"], b""),
    (["--", "no-such-program"], b""),
    (["--", "/etc/passwd"], b""),
    (["--", ""], b""),
    (["-c", "env | sort; id -un; pwd; ulimit -a"], b""),
    (["-u", "root", "-w", "/tmp", "-e", "A=1", "-e", "B=x y", "-c", "env | sort; id -un; pwd"], b""),
    (["-e", "1A=x", "--", "true"], b""),
    (["-w", "sub", "--", "pwd"], b""),
    (["-w", "/not-there", "--", "true"], b""),
    (["-w", "/etc/passwd", "--", "true"], b""),
    (["-u", "nobody-there", "--", "true"], b""),
    (["-c", "for i in 1 2 3; do echo out $i; echo err $i >&2; done"], b""),
    (["-c", "head -c 4000000 /dev/zero; head -c 300000 /dev/zero >&2; exit 7"], b""),
    (["-i", "--", "cat"], BYTES),
    (["-i", "--", "head", "-c", "10"], BYTES),
    (["-i", "-c", "exec <&-; sleep 0.1; echo not read"], BYTES),
    (["-n", "--", "cat"], b"not for it"),
    (["-i", "-c", "cat >&2; echo end"], b"\x00\xff\n"),
    (["--timeout", "400ms", "-c", "echo so far; sleep 1000"], b""),
    (["--timeout", "60s", "-c", "exit 4"], b""),
    (["--", "echo", *["x" * 100_000] * 3], b""),  # more than one frame takes
]


@contextmanager
def with_engine(atoll: Atoll) -> Iterator[None]:
    atoll.env |= WITH_ENGINE
    try:
        yield
    finally:
        for name in WITH_ENGINE:
            del atoll.env[name]


def test_with_and_without_an_engine_a_command_does_and_says_the_same(atoll: Atoll, box: str) -> None:
    atoll("exec", box, "--", "mkdir", "sub")
    for words, given in CASES:
        direct = atoll("exec", box, *words, input=given, status=None)
        with with_engine(atoll):
            engine = atoll("exec", box, *words, input=given, status=None)
        shown = [word[:100] for word in words]
        assert direct.returncode == engine.returncode, shown
        assert direct.stdout == engine.stdout, shown
        assert direct.stderr == engine.stderr, shown
    assert not atoll.runs(box, "sleep 1000")


def test_with_and_without_an_engine_a_reader_that_leaves_and_a_signal_kill_the_tree(atoll: Atoll, box: str) -> None:
    for env in ({}, WITH_ENGINE):
        atoll.env |= env
        left = atoll.start("exec", box, "-c", "setsid sleep 1000 & yes")
        left.read_until(b"y\n")
        left.stop_reading()
        assert (left.wait(), left.errors()) == (128 + signal.SIGPIPE, b"")
        told = atoll.start("exec", box, "-c", "echo ready; setsid sleep 1000 & sleep 1000")
        told.read_until(b"ready\n")
        told.send_signal(signal.SIGTERM)
        assert (told.wait(), told.errors()) == (128 + signal.SIGTERM, b"")
        assert not atoll.runs(box, "sleep 1000")  # both had ended when the command line did


def test_a_signal_that_the_parent_ignores_is_ignored(atoll: Atoll, box: str) -> None:
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", ignoring, *PROGRAM, "exec", box, "-i", "-c", "echo ready; read line; echo $line"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=atoll.env) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        assert started.stdout.readline() == b"ready\n"
        started.send_signal(signal.SIGHUP)
        started.stdin.write(b"still there\n")
        started.stdin.close()
        assert started.stdout.read() == b"still there\n"


def test_the_output_may_be_a_socket_that_is_read_slowly(atoll: Atoll, box: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = "head -c 3000000 /dev/zero; echo end"
        process = subprocess.Popen([*PROGRAM, "exec", box, "-c", line], stdout=theirs.fileno(), env=atoll.env)
        theirs.close()
        assert sum(len(data) for data in iter(lambda: ours.recv(65536), b"")) == 3_000_004
        assert process.wait(60) == 0


def test_with_and_without_an_engine_sudo_works_where_it_was_asked_for(atoll: Atoll) -> None:
    name = atoll.create("--sudo")
    assert atoll.text("exec", name, "--", "sudo", "id", "-u") == "0\n"
    with with_engine(atoll):
        assert atoll.text("exec", name, "--", "sudo", "id", "-u") == "0\n"


def test_a_paused_sandbox_is_resumed_by_a_command(atoll: Atoll, box: str) -> None:
    atoll("pause", box)
    assert atoll.text("exec", box, "--", "echo", "on") == "on\n"


def test_a_sleeping_sandbox_is_woken_and_a_removed_one_is_not_found(atoll: Atoll, box: str) -> None:
    atoll("sleep", box)
    assert find_running(str(atoll.state_dir), box) is None
    assert atoll.text("exec", box, "--", "echo", "on") == "on\n"
    assert find_running(str(atoll.state_dir), box) is not None
    atoll("rm", box)
    assert b"no sandbox is named" in atoll("exec", box, "--", "true", status=125).stderr


def test_a_kill_for_memory_is_said(atoll: Atoll) -> None:
    box = atoll.create("--memory", "64m")
    done = atoll("exec", box, "--", "python3", "-c", "bytearray(200 << 20)", status=137)
    assert f"killed: sandbox {box!r} reached its memory limit of 64.0 MiB" in done.stderr.decode()
    with with_engine(atoll):
        again = atoll("exec", box, "--", "python3", "-c", "bytearray(200 << 20)", status=137)
    assert again.stderr == done.stderr
    assert atoll("exec", box, "-c", "kill -KILL $$", status=137).stderr == b""


def test_a_policy_that_is_set_while_a_command_runs_is_served_by_its_command_line(
    atoll: Atoll, box: str, port: int
) -> None:
    started = atoll.start("exec", box, "-c", f"echo ready; until {fetch(port)} | grep reached; do sleep 0.1; done")
    started.read_until(b"ready\n")
    atoll("network", box, "--allow", f"127.0.0.1:{port}")
    started.read_until(b"reached\n")
    assert started.wait() == 0
    assert find_running(str(atoll.state_dir), box) is None  # from now on the engine runs its commands


def test_a_state_directory_that_others_can_enter_is_left_to_the_engine(atoll: Atoll, box: str) -> None:
    state_dir = str(atoll.state_dir)
    assert find_running(state_dir, box) is not None
    atoll.state_dir.chmod(0o755)
    try:
        assert find_running(state_dir, box) is None
    finally:
        atoll.state_dir.chmod(0o700)


def test_a_record_that_this_atoll_did_not_write_is_left_to_the_engine(atoll: Atoll, box: str) -> None:
    found = find_running(str(atoll.state_dir), box)
    assert found is not None
    path = Path(found.directory) / "manifest.json"
    right = path.read_text()
    for wrong in (right.replace('"version": ', '"version": 9'), right[:-2], "[]", "7"):
        path.write_text(wrong)
        assert find_running(str(atoll.state_dir), box) is None
        assert b"cannot be read" in (said := atoll("exec", box, "--", "true", status=125).stderr) or b"newer" in said
    path.write_text(right)


def test_a_sandbox_whose_lifetime_is_over_is_left_to_the_engine(atoll: Atoll, box: str) -> None:
    found = find_running(str(atoll.state_dir), box)
    assert found is not None
    entry = atoll.state_dir / "expiries" / found.id
    moments = {"99999999999999": True, "99999999999999s": True, "1": False, "1s": False, "soon": False}
    moments |= {"1+60000": True, "1+60000s": True}  # use renews them, and it was used just now
    for moment, is_found in moments.items():
        entry.symlink_to(moment)
        assert (find_running(str(atoll.state_dir), box) is not None) == is_found
        entry.unlink()


def test_a_sandbox_that_is_put_to_sleep_or_removed_while_a_command_runs_is_said_to_be(atoll: Atoll) -> None:
    for verb, said in (("sleep", "was put to sleep"), ("rm", "was destroyed")):
        box = atoll.box()
        started = atoll.start("exec", box, "-c", "echo ready; sleep 1000")
        started.read_until(b"ready\n")
        atoll(verb, box)
        assert started.wait() == 125
        assert started.errors().decode() == f"error: sandbox {box!r} {said}\n"


def test_the_settings_that_have_to_be_checked_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    text = {
        "ATOLL_AGENT_MODELS",
        "ATOLL_IMAGE",
        "ATOLL_MODEL",
        state_directory.VARIABLE,
        state_directory.NAMESPACE_VARIABLE,
    }
    variables = {f"ATOLL_{name.upper()}" for name in Settings.field_names()}
    assert variables == text | set(state_directory.CHECKED)
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    assert state_directory.resolve_plain(None) == str(Settings().resolve_state_dir())
    monkeypatch.setenv("ATOLL_STATE_DIR", "~/here")
    assert state_directory.resolve_plain(None) == os.path.expanduser("~/here")
    assert state_directory.resolve_plain("there") == str(Path.cwd() / "there")
    monkeypatch.setenv("ATOLL_RUNTIME", "crun")
    assert state_directory.resolve_plain(None) is None


STARTED = encode_fields(((Tag.EVENT, EventKind.STARTED), (Tag.PROC, 1), (Tag.PID, 7)))


def ends(*fields: tuple[Tag, Value]) -> bytes:
    return encode_frame(FrameType.END, 1, encode_fields(fields))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        pytest.param(encode_frame(FrameType.EVENT, 1, STARTED) + ends((Tag.EXIT_CODE, 999)), "EXIT_CODE", id="code"),
        pytest.param(encode_frame(FrameType.DATA, 1, b"x", 1), "STARTED", id="output before the start"),
        pytest.param(encode_frame(FrameType.EVENT, 2, STARTED), "stream 2", id="another stream"),
        pytest.param(ends((Tag.EXIT_CODE, 0), (Tag.DURATION_US, 1)), "without its start", id="no start"),
        pytest.param(encode_frame(FrameType.EVENT, 1, STARTED) * 2, "does not have", id="a second start"),
        pytest.param(b"\xff" * 12, "frame of", id="no frame"),
    ],
)
def test_a_guest_that_breaks_the_protocol_is_stopped(atoll: Atoll, box: str, answer: bytes, said: str) -> None:
    found = find_running(str(atoll.state_dir), box)
    assert found is not None
    pid = int((Path(found.directory) / "pid").read_text())
    place = Path(found.directory) / "sock"
    shutil.move(place, place.with_name("moved"))
    with socket.socket(socket.AF_UNIX) as listener:
        fd = os.open(found.directory, os.O_PATH)
        listener.bind(f"/proc/self/fd/{fd}/sock")
        os.close(fd)
        listener.listen()

        def guest() -> None:
            with listener.accept()[0] as host:
                host.sendall(encode_frame(FrameType.HELLO, 0, encode_fields(((Tag.VERSION, 1), (Tag.EPOCH, 0)))))
                host.recv(65536)
                host.sendall(answer)
                while host.recv(65536):
                    pass

        thread = threading.Thread(target=guest)
        thread.start()
        done = atoll("exec", box, "--", "true", status=125)
        thread.join()
    assert said in done.stderr.decode()
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "the sandbox is stopped")
