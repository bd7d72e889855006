"""`atoll run`: a command in a sandbox that ends with it, indistinguishable at its streams from one on this machine."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import termios
from pathlib import Path

import pytest

from atoll.testing.waiting import wait_until
from tests.cli.driving import PROGRAM, Atoll


@pytest.mark.parametrize("code", [0, 1, 3, 255])
def test_the_exit_status_is_the_commands_own(atoll: Atoll, code: int) -> None:
    atoll("run", "--", "sh", "-c", f"exit {code}", status=code)


def test_a_command_that_a_signal_ended_is_128_and_the_signal(atoll: Atoll) -> None:
    atoll("run", "-c", "kill -TERM $$", status=143)


def test_a_command_that_does_not_exist_is_127_with_what_a_shell_says(atoll: Atoll) -> None:
    assert b"no-such-program" in atoll("run", "--", "no-such-program", status=127).stderr


def test_output_and_errors_come_apart_and_byte_for_byte(atoll: Atoll) -> None:
    done = atoll("run", "--", "sh", "-c", r"printf '\000\377\n'; printf 'caf\351' >&2")
    assert done.stdout == b"\x00\xff\n"
    assert done.stderr == b"caf\xe9"


def test_words_are_passed_as_they_are_and_only_c_is_a_shell_line(atoll: Atoll) -> None:
    assert atoll.text("run", "--", "echo", "$HOME", "a  b", "*") == "$HOME a  b *\n"
    assert atoll.text("run", "-c", "echo $((1 + 1)) | tr 2 3") == "3\n"
    assert b"echo 1" in atoll("run", "--", "echo 1", status=127).stderr


def test_the_commands_own_options_need_no_dashes_before_it(atoll: Atoll) -> None:
    assert atoll.text("run", "python3", "-c", "print(1)") == "1\n"
    assert atoll.text("run", "-e", "A=1", "sh", "-c", "echo $A --json", "-t") == "1 --json\n"


def test_user_directory_and_variables_are_as_asked(atoll: Atoll) -> None:
    line = "id -un; pwd; echo $A-$B"
    assert atoll.text("run", "-c", line) == "user\n/home/user\n-\n"
    text = atoll.text("run", "--user", "root", "--cwd", "/tmp", "--env", "A=1", "-e", "B=x=y", "-c", line)
    assert text == "root\n/tmp\n1-x=y\n"


def test_ten_megabytes_pass_through_from_input_to_output(atoll: Atoll) -> None:
    data = random.Random(1).randbytes(10 * 1024 * 1024)
    done = atoll("run", "-i", "--", "cat", input=data)
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(data).digest()


def test_a_file_is_read_from_where_it_stands(atoll: Atoll, tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(b"first\nsecond\nthird\n")
    with path.open("rb", buffering=0) as file:
        file.read(6)
        assert atoll("run", "-i", "--", "cat", stdin=file).stdout == b"second\nthird\n"


def test_an_output_file_is_appended_to_where_it_was(atoll: Atoll, tmp_path: Path) -> None:
    path = tmp_path / "output"
    path.write_bytes(b"first\n")
    with path.open("ab") as file:
        subprocess.run([*PROGRAM, "run", "--", "echo", "second"], stdout=file, env=atoll.env, check=True)
    assert path.read_bytes() == b"first\nsecond\n"


def test_no_input_is_an_end_of_file(atoll: Atoll) -> None:
    assert atoll("run", "-i", "--", "cat", stdin=subprocess.DEVNULL).stdout == b""
    assert atoll("run", "--", "cat", input=b"not for it").stdout == b""


def test_it_ends_with_the_command_though_its_input_stays_open(atoll: Atoll) -> None:
    started = atoll.start("run", "-i", "--", "echo", "done", stdin=subprocess.PIPE)
    assert started.wait() == 0


def test_it_ends_when_the_command_reads_only_some_of_an_endless_input(atoll: Atoll) -> None:
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as endless:
        assert atoll("run", "-i", "--", "head", "-n", "1", stdin=endless.stdout).stdout == b"y\n"
        endless.kill()


def test_input_is_passed_on_as_it_comes(atoll: Atoll) -> None:
    started = atoll.start("run", "-i", "--", "cat", stdin=subprocess.PIPE)
    for word in (b"one\n", b"two\n"):
        started.type(word)
        started.read_until(word)
    started.end_input()
    assert started.wait() == 0


def test_output_comes_as_it_is_written(atoll: Atoll) -> None:
    started = atoll.start("run", "-ic", "echo first; read line; echo $line", stdin=subprocess.PIPE)
    started.read_until(b"first\n")
    started.type(b"second\n")
    started.read_until(b"second\n")
    assert started.wait() == 0


def test_flags_of_the_callers_streams_are_left_alone(atoll: Atoll) -> None:
    read_in, write_in = os.pipe()
    read_out, write_out = os.pipe()
    process = subprocess.Popen([*PROGRAM, "run", "-i", "--", "cat"], stdin=read_in, stdout=write_out, env=atoll.env)
    os.write(write_in, b"x")
    assert os.read(read_out, 10) == b"x"
    assert os.get_blocking(read_in)
    assert os.get_blocking(write_out)
    os.close(write_in)
    assert process.wait(60) == 0
    for fd in (read_in, read_out, write_out):
        os.close(fd)


def test_a_reader_that_leaves_ends_the_command_quietly(atoll: Atoll) -> None:
    box = atoll.box()
    started = atoll.start("exec", box, "--", "yes")
    started.read_until(b"y\n")
    started.stop_reading()
    assert started.wait() == 128 + signal.SIGPIPE
    assert started.errors() == b""
    wait_until(lambda: not atoll.runs(box, "yes"), "yes is gone")


def test_a_time_out_kills_the_tree_and_is_status_124(atoll: Atoll) -> None:
    done = atoll("run", "--timeout", "700ms", "-c", "echo so far; sleep 1000 & sleep 1000", status=124)
    assert done.stdout == b"so far\n"
    assert done.stderr.startswith(b"error: the command timed out after 0.7 s")


def test_a_time_out_in_json_has_the_error_and_what_was_printed(atoll: Atoll) -> None:
    done = atoll.json("run", "--json", "--timeout", "0.7", "-c", "echo so far; sleep 1000", status=124)
    assert done["error"]["code"] == "exec_timeout"
    assert done["result"]["timed_out"] is True
    assert done["result"]["stdout"] == "so far\n"


def test_json_is_one_object_with_everything(atoll: Atoll) -> None:
    done = atoll.json("run", "--json", "-ic", "cat; echo caf\u00e9; printf '\\377' >&2; exit 3", status=3, input=b"in ")
    assert (done["stdout"], done["stderr"], done["exit_code"]) == ("in caf\u00e9\n", "\ufffd", 3)
    assert done["signal"] is None
    assert done["timed_out"] is False
    assert done["duration_s"] > 0


def test_nothing_is_left_of_the_sandbox(atoll: Atoll) -> None:
    name = atoll.new_name()
    atoll("run", "--name", name, "--", "true")
    assert name not in atoll.names()
    atoll("run", "--name", name, "--", "false", status=1)
    assert name not in atoll.names()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_with_all_that_it_started(atoll: Atoll, number: signal.Signals) -> None:
    name = atoll.new_name()
    started = atoll.start("run", "--name", name, "-c", "setsid sleep 1000 & echo ready; sleep 1000")
    started.read_until(b"ready\n")
    started.send_signal(number)
    assert started.wait() == 128 + number
    assert name not in atoll.names()


def test_a_signal_reaches_it_though_nobody_reads_its_output(atoll: Atoll) -> None:
    name = atoll.new_name()
    started = atoll.start("run", "--name", name, "--", "yes")
    started.read_until(b"y\n")
    assert started.process.stdout is not None
    pipe = started.process.stdout.fileno()
    wait_until(lambda: unread_bytes(pipe) >= 65536, "the pipe is full")
    started.send_signal(signal.SIGTERM)
    assert started.wait() == 143
    assert name not in atoll.names()


def test_a_signal_reaches_it_though_nobody_reads_the_socket_it_writes_to(atoll: Atoll, box: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        started = atoll.start("exec", box, "--", "yes", stdout=theirs)
        assert ours.recv(2) == b"y\n"
        wait_until(lambda: is_full(theirs), "the socket is full")
        started.send_signal(signal.SIGTERM)
        assert started.wait() == 143


def unread_bytes(fd: int) -> int:
    (count,) = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4))
    return int(count)


def is_full(end: socket.socket) -> bool:
    return not select.select([], [end], [], 0)[1]


def test_a_signal_that_was_ignored_before_stays_ignored(atoll: Atoll) -> None:
    started = atoll.start(
        "run", "-ic", "echo ready; read line; exit 7", stdin=subprocess.PIPE, preexec_fn=_ignore_hangups
    )
    started.read_until(b"ready\n")
    started.send_signal(signal.SIGHUP)
    started.type(b"\n")
    assert started.wait() == 7


def _ignore_hangups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_a_killed_command_line_leaves_no_sandbox(atoll: Atoll) -> None:
    name = atoll.new_name()
    started = atoll.start("run", "--name", name, "-c", "echo ready; sleep 1000")
    started.read_until(b"ready\n")
    started.process.kill()
    wait_until(lambda: name not in atoll.names(), "the ephemeral sandbox is gone")


def test_keep_leaves_the_sandbox_and_its_files(atoll: Atoll) -> None:
    name = atoll.new_name()
    atoll("run", "--keep", "--name", name, "-c", "echo 1 > file; exit 4", status=4)
    assert atoll.text("exec", name, "--", "cat", "file") == "1\n"


def test_keep_without_a_name_says_which_it_was(atoll: Atoll) -> None:
    done = atoll("run", "--keep", "--", "true")
    name = done.stderr.decode().split()[-1]
    assert name in atoll.names()
    atoll("rm", name)


@pytest.mark.parametrize(
    ("words", "said", "status"),
    [
        (["--name", "Not A Name", "--", "true"], "Not A Name", 2),
        (["--memory", "512", "--", "true"], "--memory is 512 bytes; it must be at least 8 MiB; did you mean 512m?", 2),
        (["--memory", "1k", "--", "true"], "--memory is 1 KiB; it must be at least 8 MiB", 2),
        (["--cpus", "2000", "--", "true"], "--cpus is 2,000; it must be at most 1,024", 2),
        (["--pids", "0", "--", "true"], "--pids is 0; it must be at least 4", 2),
        (["--runtime", "qemu", "--", "true"], "crun", 2),
        (["--user", "nobody-such", "--", "true"], "nobody-such", 2),
        (["--env", "1A=x", "--", "true"], "1A", 2),
        (["--pause-after", "100d", "--", "true"], "the time until it is paused is 8640000.0; it must be above 0", 2),
        (["--secret", "NOT_SET_HERE@example.com", "--", "true"], "NOT_SET_HERE is not set", 2),
        (["--cwd", "/no/such/place", "--", "true"], "/no/such/place", 125),
        (["--image", "dir:/no/such/tree", "--", "true"], "/no/such/tree", 125),
    ],
)
def test_wrong_input_is_status_2_and_our_own_failure_125_in_one_sentence(
    atoll: Atoll, words: list[str], said: str, status: int
) -> None:
    done = atoll("run", *words, status=status)
    assert done.stderr.startswith(b"error: ")
    assert said in done.stderr.decode()
    assert b"Traceback" not in done.stderr
    error = json.loads(atoll("run", "--json", *words, status=status).stdout)["error"]
    assert said in error["message"]
    assert set(error) >= {"code", "message", "hint", "retryable", "details"}


def test_a_memory_limit_is_enforced_and_told(atoll: Atoll) -> None:
    line = "import sys; b = bytearray(256 * 1024 * 1024); sys.stdout.write('survived')"
    done = atoll.json("run", "--memory", "64m", "--json", "--", "python3", "-c", line, status=137)
    assert done["out_of_memory"] is True
    assert done["stdout"] == ""
    said = atoll("run", "--memory", "64m", "--name", name := atoll.new_name(), "--", "python3", "-c", line, status=137)
    assert said.stderr.decode() == f"killed: sandbox {name!r} reached its memory limit of 64.0 MiB (--memory)\n"


@pytest.mark.parametrize("limit", [24, 32, 48, 63, 64, 80, 100, 101, 128, 256])
@pytest.mark.local("sandboxes take descriptors of the server")
def test_with_few_descriptors_all_output_comes_or_an_error_names_the_limit(atoll: Atoll, limit: int) -> None:
    command = ["sh", "-c", "echo out; echo err >&2; exit 3"]
    done = subprocess.run(
        ["/bin/sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *PROGRAM, "run", "--", *command],
        check=False,
        capture_output=True,
        env=atoll.env,
        timeout=60,
    )
    if limit < 64:
        assert done.returncode == 125
        assert f"at most {limit} open files".encode() in done.stderr
    else:
        assert (done.returncode, done.stdout, done.stderr) == (3, b"out\n", b"err\n")
