"""`exec` in a sandbox that stays, from several command lines at once."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from atoll.testing.waiting import wait_until
from tests.cli.driving import Atoll


def test_what_one_command_leaves_the_next_one_finds(atoll: Atoll, box: str) -> None:
    atoll("exec", box, "-c", "echo 1 > file")
    assert atoll.text("exec", box, "--", "cat", "file") == "1\n"


def test_options_may_stand_before_and_after_the_name(atoll: Atoll, box: str) -> None:
    for words in (
        ["--user", "root", "-e", "A=1", box, "--"],
        [box, "--user", "root", "-eA=1", "--"],
        [box, "--user=root", "-e", "A=1"],
        ["-u", "root", box, "-ne", "A=1"],
    ):
        assert atoll.text("exec", *words, "sh", "-c", "echo $(id -un) $A $0", "-x") == "root 1 -x\n", words


def test_a_sandbox_that_is_not_there_is_status_125_and_named(atoll: Atoll) -> None:
    done = atoll("exec", "not-there", "--", "true", status=125)
    assert b"'not-there'" in done.stderr
    assert atoll.json("exec", "not-there", "--json", "--", "true", status=125)["error"]["code"] == "sandbox_not_found"


def test_a_child_in_the_background_does_not_hold_up_the_end_and_lives_on(atoll: Atoll, box: str) -> None:
    assert atoll.text("exec", box, "-c", "sleep 1000 & echo started") == "started\n"
    assert atoll.runs(box, "sleep 1000")


def test_detach_prints_a_number_and_the_command_lives_on(atoll: Atoll, box: str) -> None:
    number = int(atoll.text("exec", box, "--detach", "-c", "echo hello; exec sleep 1000"))
    assert atoll.runs(box, "sleep 1000")
    wait_until(lambda: atoll.text("logs", box, str(number)) == "hello\n", "its output is kept")
    started = atoll.json("exec", box, "--detach", "--json", "--", "true")
    assert started["id"] > number


def test_ctrl_c_kills_the_tree_and_leaves_the_sandbox(atoll: Atoll, box: str) -> None:
    started = atoll.start("exec", box, "-c", "setsid sleep 1000 & echo ready; sleep 1000")
    started.read_until(b"ready\n")
    started.send_signal(signal.SIGINT)
    assert started.wait() == 130
    wait_until(lambda: not atoll.runs(box, "sleep 1000"), "the tree is gone")
    atoll("exec", box, "--", "true")


def test_a_time_out_kills_the_tree_and_leaves_the_sandbox(atoll: Atoll, box: str) -> None:
    atoll("exec", box, "--timeout", "500ms", "-c", "setsid sleep 1000 & sleep 1000", status=124)
    wait_until(lambda: not atoll.runs(box, "sleep 1000"), "the tree is gone")


def test_a_long_command_does_not_hold_up_another_command_line(atoll: Atoll, box: str) -> None:
    long = atoll.start("exec", box, "-c", "echo ready; sleep 1000")
    long.read_until(b"ready\n")
    assert atoll.text("exec", box, "--", "echo", "beside") == "beside\n"
    path = atoll.scratch / "file"
    path.write_text("content")
    atoll("cp", str(path), f"{box}:copy")
    assert atoll.text("exec", box, "--", "cat", "copy") == "content"
    assert atoll.runs(box, "sleep 1000")
    assert atoll.text("ps", box).count("sleep 1000") >= 1
    assert long.process.poll() is None


def test_a_command_line_that_is_killed_takes_its_command_along_and_nothing_else(atoll: Atoll, box: str) -> None:
    first = atoll.start("exec", box, "-c", "echo ready; sleep 1111")
    second = atoll.start("exec", box, "-c", "echo ready; sleep 2222; echo end")
    first.read_until(b"ready\n")
    second.read_until(b"ready\n")
    first.process.kill()
    wait_until(lambda: not atoll.runs(box, "sleep 1111"), "the first one's command is gone")
    assert atoll.runs(box, "sleep 2222")
    atoll("exec", box, "--", "pkill", "-f", "^sleep 2222")
    second.read_until(b"end\n")
    assert second.wait() == 0


def test_a_command_whose_output_nobody_reads_does_not_hold_up_another(atoll: Atoll, box: str) -> None:
    flood = atoll.start("exec", box, "--", "yes")
    flood.read_until(b"y\n")
    assert len(atoll("exec", box, "-c", "head -c 3000000 /dev/zero").stdout) == 3_000_000


@pytest.mark.parametrize(("command", "done"), [("rm", "was destroyed"), ("stop", "was shut down")])
def test_a_destroyed_sandbox_is_an_error_that_says_so_and_never_an_exit_status(
    atoll: Atoll, box: str, command: str, done: str
) -> None:
    started = atoll.start("exec", box, "-c", "echo ready; sleep 1000")
    started.read_until(b"ready\n")
    atoll(command, box)
    assert started.wait() == 125
    assert started.errors().decode() == f"error: sandbox {box!r} {done}\n"


def test_input_is_that_of_the_loop_unless_it_is_asked_for(atoll: Atoll, box: str) -> None:
    loop = """printf 'a\\nb\\n' | while read line; do "$@" exec "$BOX" -- sh -c "cat; echo got $line"; done"""
    command = ["sh", "-c", loop, "sh", *atoll.nursery.program]
    done = subprocess.run(command, env={**atoll.env, "BOX": box}, capture_output=True, check=True)
    assert done.stdout == b"got a\ngot b\n"
    assert atoll("exec", "-i", box, "--", "cat", input=b"data").stdout == b"data"
    assert atoll("exec", "-n", box, "--", "cat", input=b"data").stdout == b""


def test_a_time_out_counts_from_the_beginning_even_if_the_guest_is_stopped(atoll: Atoll) -> None:
    box = atoll.create("--runtime", "crun")
    pid = next(each["pid"] for each in atoll.json("ls", "--json") if each["name"] == box)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        done = atoll("exec", box, "--timeout", "1s", "--", "true", status=125)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert b"does not answer" in done.stderr
    assert time.monotonic() - began < 20
    assert atoll.text("exec", box, "--", "echo", "on") == "on\n"
