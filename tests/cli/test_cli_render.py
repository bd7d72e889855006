"""What people see is readable, and nothing from a sandbox steers their terminal."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from atoll.contract.errors import InvalidRequest
from atoll.surfaces.cli import render

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("elapsed", "said"),
    [
        (timedelta(milliseconds=500), "just now"),
        (timedelta(seconds=-5), "just now"),
        (timedelta(seconds=1), "1 second ago"),
        (timedelta(seconds=59), "59 seconds ago"),
        (timedelta(minutes=3, seconds=10), "3 minutes ago"),
        (timedelta(hours=1), "1 hour ago"),
        (timedelta(days=2), "2 days ago"),
        (timedelta(days=20), "2 weeks ago"),
        (timedelta(days=800), "2 years ago"),
    ],
)
def test_times_are_said_as_people_say_them(elapsed: timedelta, said: str) -> None:
    assert render.ago(NOW - elapsed, NOW) == said


def test_sizes_and_durations_are_short() -> None:
    assert [render.human_bytes(n) for n in (None, 0, 1023, 1024, 1536 * 1024**2)] == [
        "?",
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 GiB",
    ]
    assert [render.human_seconds(s) for s in (0.123, 12.4, 200, 7500)] == ["0.12 s", "12 s", "3m 20s", "2h 5m"]


def test_a_piped_table_is_aligned_complete_and_plain(capfd: pytest.CaptureFixture[str]) -> None:
    long = "x" * 200
    render.table(("NAME", "COMMAND"), [("a", long), ("日本", "\x1b[2Jsh\n")], flex=1)
    assert capfd.readouterr().out == f"NAME  COMMAND\na     {long}\n日本  \\x1b[2Jsh\\n\n"


def test_json_is_ascii_and_keeps_bytes_that_are_no_text(capfd: pytest.CaptureFixture[str]) -> None:
    render.emit_json({"name": "caf\u00e9\udcff\x9b"})
    out = capfd.readouterr().out
    assert out.isascii()
    assert json.loads(out) == {"name": "caf\u00e9\udcff\x9b"}


def test_an_error_is_a_line_with_a_hint_below(capfd: pytest.CaptureFixture[str]) -> None:
    render.failure(InvalidRequest("it is\x1b[31m wrong", hint="do it right"), as_json=False)
    assert capfd.readouterr().err == "error: it is\\x1b[31m wrong\nhint: do it right\n"


def test_an_error_in_json_has_code_message_and_hint(capfd: pytest.CaptureFixture[str]) -> None:
    render.failure(InvalidRequest("wrong", hint="do it right", field="x"), as_json=True)
    captured = capfd.readouterr()
    error = json.loads(captured.out)["error"]
    assert (error["code"], error["message"], error["hint"]) == ("invalid_request", "wrong", "do it right")
    assert error["details"] == {"field": "x"}
    assert captured.err == ""


def test_progress_without_a_terminal_is_a_line_at_the_start_and_one_at_the_end(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with render.ProgressBars() as bars:
        for done in (0, 10, 1024, 2048, 2048):
            bars("layer 1", done, 2048)
        bars("unpacking", 0, None)
        bars("unpacking", 5, None)
    captured = capfd.readouterr()
    assert captured.err == "layer 1\nlayer 1: 2.0 KiB, done\nunpacking\n"
    assert captured.out == ""
