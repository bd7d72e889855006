"""`shell` and `-t`: the terminal belongs to the command while it runs, and is what it was afterwards."""

from __future__ import annotations

import re
import signal
import subprocess

import pytest

from atoll.testing.waiting import wait_until
from tests.cli.driving import PROGRAM, Atoll

CTRL_C, CTRL_D = b"\x03", b"\x04"


def test_a_shell_echoes_runs_and_returns_its_status(atoll: Atoll, box: str) -> None:
    terminal = atoll.terminal("shell", box)
    terminal.type(b"echo $((40 + 2)); tty\r")
    terminal.read_until(b"42\r\n")
    terminal.read_until(b"/dev/pts/")
    terminal.type(b"exit 5\r")
    assert terminal.wait() == 5
    assert terminal.is_restored()


def test_a_shell_whose_input_is_no_terminal_runs_what_it_reads_and_ends(atoll: Atoll, box: str) -> None:
    assert atoll("shell", box, stdin=subprocess.DEVNULL).stdout == b""
    done = atoll("shell", box, input=b"cd /tmp\npwd\ntest -t 0 || echo no terminal\nexit 3\n", status=3)
    assert (done.stdout, done.stderr) == (b"/tmp\nno terminal\n", b"")
    assert atoll("shell", box, "--", "cat", input=b"data").stdout == b"data"


def test_the_end_of_the_input_ends_a_shell_on_a_terminal_too(atoll: Atoll, box: str) -> None:
    done = atoll("exec", "-t", box, "--", "bash", "--norc", input=b"echo $((40 + 2))\n")
    assert b"42\r\n" in done.stdout


def test_after_ctrl_c_the_prompt_is_on_a_line_of_its_own(atoll: Atoll, box: str) -> None:
    terminal = atoll.terminal("exec", box, "-c", "echo ready; sleep 1000")
    terminal.read_until(b"ready\r\n")
    terminal.type(CTRL_C)
    assert terminal.wait() == 130
    assert terminal.seen == b"^C\r\n"


def test_keys_reach_the_command_and_not_us(atoll: Atoll, box: str) -> None:
    terminal = atoll.terminal("shell", box)
    terminal.type(b"exec sh -c \"trap 'echo caught; exit 7' INT; echo r''eady; while :; do sleep 0.1; done\"\r")
    terminal.read_until(b"ready\r\n")
    assert terminal.is_raw()
    terminal.type(CTRL_C)
    terminal.read_until(b"caught")
    assert terminal.wait() == 7
    assert terminal.is_restored()


def test_the_size_is_passed_on_and_follows(atoll: Atoll, box: str) -> None:
    terminal = atoll.terminal("shell", box, rows=31, cols=97)
    terminal.type(b"stty size\r")
    terminal.read_until(b"31 97\r\n")
    # Without job control the shell is in the terminal's foreground, where the kernel sends the news.
    terminal.type(b"exec sh -c \"trap 'stty size; exit' WINCH; echo r''eady; while :; do sleep 0.1; done\"\r")
    terminal.read_until(b"ready\r\n")
    terminal.resize(40, 120)
    terminal.read_until(b"40 120\r\n")
    assert terminal.wait() == 0


def test_what_is_typed_ahead_is_not_lost(atoll: Atoll, box: str) -> None:
    terminal = atoll.terminal("shell", box)
    terminal.type(b"echo a''head; exit\n")
    terminal.read_until(b"ahead\r\n")
    assert terminal.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_terminal_is_restored_when_we_are_told_to_end(atoll: Atoll, box: str, number: signal.Signals) -> None:
    terminal = atoll.terminal("shell", box)
    terminal.type(b"echo r''eady; sleep 1000\r")
    terminal.read_until(b"ready\r\n")
    terminal.process.send_signal(number)
    assert terminal.wait() == 128 + number
    assert terminal.is_restored()
    wait_until(lambda: not atoll.runs(box, "sleep 1000"), "what ran in the shell is gone")


def test_the_terminal_is_restored_when_the_sandbox_is_destroyed(atoll: Atoll, box: str) -> None:
    terminal = atoll.terminal("shell", box)
    terminal.type(b"echo r''eady\r")
    terminal.read_until(b"ready\r\n")
    atoll("rm", box)
    assert terminal.wait() == 125
    assert terminal.is_restored()
    assert f"error: sandbox {box!r} was destroyed".encode() in re.sub(rb"\x1b\[[0-9]*m", b"", terminal.seen)


def test_a_terminal_for_a_command_is_a_terminal(atoll: Atoll, box: str) -> None:
    line = "test -t 0 && test -t 1 && test -t 2 && echo $TERM"
    terminal = atoll.terminal("exec", box, "-t", "--", "sh", "-c", line)
    terminal.read_until(b"xterm\r\n")
    assert terminal.wait() == 0
    assert terminal.is_restored()


def test_without_t_a_command_has_no_terminal_and_ctrl_c_ends_it(atoll: Atoll, box: str) -> None:
    terminal = atoll.terminal("exec", "-i", box, "--", "sh", "-c", "test -t 0 || echo none; sleep 1000")
    terminal.read_until(b"none\r\n")
    assert terminal.is_restored()
    terminal.type(CTRL_C)
    assert terminal.wait() == 130
    wait_until(lambda: not atoll.runs(box, "sleep 1000"), "the command's tree is gone")


def test_an_idle_terminal_does_not_hold_up_the_end(atoll: Atoll, box: str) -> None:
    terminal = atoll.terminal("exec", "-i", box, "--", "echo", "done")
    terminal.read_until(b"done")
    assert terminal.wait() == 0


def test_an_end_of_file_from_the_keyboard_ends_the_input(atoll: Atoll, box: str) -> None:
    terminal = atoll.terminal("exec", "-i", box, "--", "sh", "-c", "echo ready; cat; echo end")
    terminal.read_until(b"ready\r\n")
    terminal.type(b"word\n" + CTRL_D)
    terminal.read_until(b"word\r\nword\r\nend\r\n")
    assert terminal.wait() == 0


def test_a_terminal_can_be_had_without_having_one(atoll: Atoll, box: str) -> None:
    done = atoll("exec", box, "-t", "--", "sh", "-c", "stty size; tty", stdin=subprocess.DEVNULL)
    assert done.stdout.startswith(b"24 80\r\n/dev/pts/")


def test_tables_fit_a_terminal_of_80_columns(atoll: Atoll, box: str) -> None:
    atoll("exec", box, "--detach", "--", "sleep", "1" + "0" * 200)
    terminal = atoll.terminal("ps", box, cols=80)
    assert terminal.wait() == 0
    lines = terminal.seen.decode().replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.endswith("…") for line in lines)


def test_a_job_in_the_background_leaves_the_terminal_to_others(atoll: Atoll, box: str) -> None:
    script = 'set -m; "$@" & read line; echo "read $line"; wait'
    command = [*PROGRAM, "exec", "-i", box, "--", "sh", "-c", "cat; echo cat ended"]
    terminal = atoll.on_terminal("sh", "-c", script, "sh", *command)
    terminal.read_until(b"cat ended\r\n")
    terminal.type(b"word\r")
    terminal.read_until(b"read word\r\n")
    assert terminal.wait() == 0


def test_after_a_stop_the_keys_reach_the_command_again(atoll: Atoll, box: str) -> None:
    terminal = atoll.terminal("shell", box)
    terminal.type(b"echo r''eady\r")
    terminal.read_until(b"ready\r\n")
    terminal.process.send_signal(signal.SIGSTOP)
    terminal.set_mode(terminal.mode)
    terminal.process.send_signal(signal.SIGCONT)
    wait_until(terminal.is_raw, "the terminal is raw again")
    terminal.type(b"exit\r")
    assert terminal.wait() == 0
    assert terminal.is_restored()


def test_a_sandbox_outlives_the_terminal_it_was_made_on(atoll: Atoll) -> None:
    name = atoll.new_name()
    terminal = atoll.terminal("create", name)
    assert terminal.wait() == 0
    terminal.close()
    atoll("exec", name, "--", "true")
