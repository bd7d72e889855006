"""`ps`, `wait` and `kill`: what runs in sandboxes, its end, and how to bring it about."""

from __future__ import annotations

import signal

import pytest

from atoll.testing.waiting import wait_until
from tests.cli.driving import Atoll


def test_ps_shows_what_runs_first_and_then_the_latest_that_ended(atoll: Atoll, box: str) -> None:
    for number in range(12):
        atoll("exec", box, "--", "echo", f"call-{number}")
    runs = atoll.text("exec", box, "--detach", "-c", "sleep 1000 & wait").strip()
    atoll("exec", box, "--", "sh", "-c", "exit 3", status=3)
    shown = atoll.json("ps", box, "--json")
    commands = {command["id"]: command for command in shown["commands"]}
    assert shown["commands"][0]["id"] == int(runs)
    assert commands[int(runs)]["exit_code"] is None
    assert commands[max(commands)]["exit_code"] == 3
    assert any(process["command"] == "sleep 1000" for process in shown["processes"])
    running, ended = atoll.text("ps", box).split("ended commands")
    assert running.splitlines()[0].split() == ["ID", "PID", "PPID", "UID", "S", "MEMORY", "CPU", "COMMAND"]
    assert any(line.split()[0] == runs for line in running.splitlines())
    assert "sleep 1000" in running
    assert "/guest" not in running
    assert ", the latest 10 of 13; --all shows all\n" in ended
    assert "exit 3" in ended
    assert "call-0" not in ended
    everything = atoll.text("ps", "--all", box)
    assert "call-0" in everything
    assert "/guest" in everything


def test_ps_without_a_name_shows_all_sandboxes_and_wakes_none(atoll: Atoll) -> None:
    first, second, asleep = atoll.box(), atoll.box(), atoll.box()
    atoll("stop", asleep)
    for box in (first, second):
        atoll("exec", box, "--detach", "--", "sleep", "1000")
    rows = {line.split()[0]: line for line in atoll.text("ps").splitlines()[1:]}
    assert {first, second} <= rows.keys()
    assert rows[first].endswith("sleep 1000")
    assert asleep not in rows
    assert {each["sandbox"] for each in atoll.json("ps", "--json")} >= {first, second}
    assert atoll("ps", asleep).stderr.decode() == f"{asleep} is shutdown: nothing runs in it\n"
    [info] = [info for info in atoll.json("ls", "--json") if info["name"] == asleep]
    assert info["status"] == "shutdown"


def test_wait_ends_with_the_status_of_the_command_and_may_print_its_output(atoll: Atoll, box: str) -> None:
    line = "echo out; echo err >&2; until test -e go; do sleep 0.05; done; exit 5"
    number = atoll.text("exec", box, "--detach", "-c", line).strip()
    timed_out = atoll("wait", box, number, "--timeout", "100ms", status=124)
    assert timed_out.stderr.decode().startswith(f"command {number} still runs after 0.1 s")
    waiting = atoll.start("wait", box, number, "--output")
    waiting.read_until(b"out\n")
    atoll("exec", box, "--", "touch", "go")
    assert waiting.wait() == 5
    assert waiting.errors() == b"err\n"
    ended = atoll.json("wait", box, number, "--json", "-o", status=5)
    assert (ended["id"], ended["exit_code"], ended["stdout"], ended["stderr"]) == (int(number), 5, "out\n", "err\n")
    atoll("wait", box)  # the latest, `touch`, which has ended
    assert b"has no command with number 999" in atoll("wait", box, "999", status=125).stderr


@pytest.mark.parametrize(
    ("words", "number"), [([], signal.SIGTERM), (["-s", "int"], signal.SIGINT), (["-9"], signal.SIGKILL)]
)
def test_kill_sends_a_signal_to_commands_with_their_children(
    atoll: Atoll, box: str, words: list[str], number: signal.Signals
) -> None:
    # A shell sets its children in the background to ignore SIGINT.
    child = ["python3", "-c", "import subprocess; subprocess.run(['sleep', '1000'])"]
    started = [atoll.text("exec", box, "--detach", "--", *child).strip() for _ in range(2)]
    wait_until(lambda: atoll.text("ps", box).count(" sleep 1000") == 2, "both run")
    assert atoll.text("kill", *words, box, *started).split() == started
    atoll("wait", box, started[1], status=128 + number)
    wait_until(lambda: not atoll.runs(box, "sleep 1000"), "their children have ended too")
    assert b"has ended: exit " in atoll("kill", box, started[0], status=1).stderr


def test_kill_says_which_commands_there_are_and_what_else_could_be_meant(atoll: Atoll, box: str) -> None:
    assert b"has no command with number 99; it has: none" in atoll("kill", box, "99", status=1).stderr
    said = atoll("kill", box, status=2).stderr.decode()
    assert f"`atoll ps {box}`" in said
    assert f"`atoll rm {box}`" in said
    assert b"'NOPE' is not a signal" in atoll("kill", "-NOPE", box, "1", status=2).stderr
    assert b"'one' is not a whole number" in atoll("kill", box, "one", status=2).stderr
