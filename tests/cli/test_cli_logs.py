"""`logs`: what a command printed, while it runs and after it has ended."""

from __future__ import annotations

import json
import signal

from atoll.testing.waiting import wait_until
from tests.cli.driving import Atoll


def test_the_latest_command_is_shown_without_a_number(atoll: Atoll, box: str) -> None:
    first = atoll.text("exec", box, "--detach", "--", "echo", "first").strip()
    wait_until(lambda: atoll.text("logs", box) == "first\n", "the first is kept")
    atoll("exec", box, "--detach", "--", "echo", "second")
    wait_until(lambda: atoll.text("logs", box) == "second\n", "the second is kept")
    assert atoll.text("logs", box, first) == "first\n"


def test_output_and_errors_come_apart(atoll: Atoll, box: str) -> None:
    atoll("exec", box, "-c", "echo out; echo err >&2")
    done = atoll("logs", box)
    assert (done.stdout, done.stderr) == (b"out\n", b"err\n")


def test_without_follow_it_ends_though_the_command_runs(atoll: Atoll, box: str) -> None:
    atoll("exec", box, "--detach", "-c", "echo early; exec sleep 1000")
    wait_until(lambda: atoll.text("logs", box) == "early\n", "what was printed so far is shown")
    atoll("exec", box, "--detach", "--", "sleep", "1000")
    assert atoll.text("logs", box) == ""


def test_follow_goes_on_until_the_command_ends(atoll: Atoll, box: str) -> None:
    line = "echo first; until test -e go; do sleep 0.05; done; echo second"
    number = atoll.text("exec", box, "--detach", "-c", line).strip()
    following = atoll.start("logs", box, number, "-f")
    following.read_until(b"first\n")
    atoll("exec", box, "--", "touch", "go")
    following.read_until(b"second\n")
    assert following.wait() == 0


def test_whoever_stops_following_does_not_stop_the_command(atoll: Atoll, box: str) -> None:
    foreground = atoll.start("exec", box, "-c", "echo ready; sleep 1000")
    foreground.read_until(b"ready\n")
    number = str(max(c["id"] for c in atoll.json("ps", box, "--json")["commands"]))
    for end in (signal.SIGINT, signal.SIGKILL):
        following = atoll.start("logs", box, number, "-f")
        following.read_until(b"ready\n")
        following.send_signal(end)
        assert following.wait() in {130, -signal.SIGKILL}
    assert atoll.runs(box, "sleep 1000")
    assert foreground.process.poll() is None


def test_a_follower_that_does_not_read_does_not_hold_up_the_command(atoll: Atoll, box: str) -> None:
    line = "until test -e go; do sleep 0.05; done; head -c 20000000 /dev/zero; echo end > end"
    number = atoll.text("exec", box, "--detach", "-c", line).strip()
    atoll.start("logs", box, number, "-f")
    atoll("exec", box, "--", "touch", "go")
    wait_until(lambda: atoll("exec", box, "--", "test", "-e", "end", status=None).returncode == 0, "the command ends")


def test_an_offset_skips_what_was_seen(atoll: Atoll, box: str) -> None:
    atoll("exec", box, "-c", "printf 0123456789; printf abcdef >&2")
    done = atoll("logs", box, "--since-offset", "4,2")
    assert (done.stdout, done.stderr) == (b"456789", b"cdef")
    assert atoll("logs", box, "--since-offset", "10").stdout == b""


def test_json_says_where_to_go_on(atoll: Atoll, box: str) -> None:
    atoll("exec", box, "-c", "echo out; echo err >&2; exit 3", status=3)
    logs = atoll.json("logs", box, "--json")
    assert (logs["stdout"], logs["stderr"], logs["exit_code"], logs["live"]) == ("out\n", "err\n", 3, False)
    assert (logs["stdout_offset"], logs["stdout_next"], logs["stderr_next"]) == (0, 4, 4)


def test_follow_in_json_is_an_event_a_line(atoll: Atoll, box: str) -> None:
    atoll("exec", box, "--", "echo", "out")
    events = [json.loads(line) for line in atoll.text("logs", box, "-f", "--json").splitlines()]
    assert events[0] == {"event": "output", "stream": "stdout", "offset": 0, "data": "out\n"}
    assert (events[-1]["event"], events[-1]["exit_code"]) == ("exited", 0)


def test_output_that_is_no_longer_kept_is_told(atoll: Atoll, box: str) -> None:
    atoll("exec", box, "-c", "head -c 5000000 /dev/zero")
    done = atoll("logs", box)
    kept = len(done.stdout)
    assert 0 < kept < 5_000_000
    assert done.stderr.decode() == f"[{5_000_000 - kept} bytes of stdout are no longer kept]\n"


def test_no_such_command_is_status_1_and_says_which_there_are(atoll: Atoll, box: str) -> None:
    assert b"no command has been started" in atoll("logs", box, status=1).stderr
    atoll("exec", box, "--", "true")
    assert b"has no command with number 999" in atoll("logs", box, "999", status=1).stderr
    assert atoll.json("logs", box, "999", "--json", status=1)["error"]["code"] == "process_not_found"
