"""`pattern`: reactive patterns in a terminal, in a pipe and as JSON."""

from __future__ import annotations

import signal
from pathlib import Path
from urllib.request import urlopen
from xml.etree import ElementTree as ET

import pytest

from tests.cli.driving import Atoll

ROOT = Path(__file__).parents[2]
RUNNER = str(ROOT / "examples/patterns/python_runner.py")


def test_a_pattern_is_run_to_rest_and_its_view_is_printed(atoll: Atoll) -> None:
    text = atoll.text("pattern", "run", RUNNER, "--set", "code=print(6 * 7)")
    assert text == "Python Runner\n═════════════\ncode: print(6 * 7)\n42\n"
    answer = atoll.json("pattern", "run", RUNNER, "--set", "code=print(6 * 7)", "--json")
    assert answer["name"] == "Python Runner"
    assert answer["outputs"]["run"] == {"stdout": "42\n", "stderr": "", "exit_code": 0}
    assert answer["errors"] == {}


def test_the_graph_of_a_pattern_is_a_table_a_drawing_or_json(atoll: Atoll) -> None:
    header, *lines = atoll.text("pattern", "graph", RUNNER).splitlines()
    assert header.split() == ["NAME", "KIND", "STATE", "RUNS", "LAST", "RUN", "READS"]
    (run,) = [line.split() for line in lines if line.startswith("run ")]
    assert (run[1:4], run[-1]) == (["exec", "done", "1"], "code")
    assert ET.fromstring(atoll.text("pattern", "graph", RUNNER, "--svg")).tag.endswith("svg")
    nodes = {node["name"]: node for node in atoll.json("pattern", "graph", RUNNER, "--json")}
    assert nodes["run"]["inputs"] == [nodes["code"]["id"]]


FAILS = """
from atoll import reactive
@reactive.pattern(number=1)
def fails(number):
    return {"bad": reactive.computed(lambda: 1 / (number.get() - 1)), "good": number}
"""


def test_an_output_that_fails_is_the_exit_status(atoll: Atoll, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    file = str(tmp_path / "fails.py")
    done = atoll("pattern", "run", file, status=1)
    assert b"bad: ZeroDivisionError" in done.stderr
    answer = atoll.json("pattern", "run", file, "--json", status=1)
    assert answer["outputs"] == {"bad": None, "good": 1}
    assert atoll.json("pattern", "run", file, "--set", "number=3", "--json")["outputs"]["bad"] == 0.5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.py"], b"there is no file missing.py"),
        ([RUNNER, "--set", "code"], b"--set code: write NAME=VALUE"),
        ([RUNNER, "--set", "x=1"], b"has no input 'x'; it has code"),
        ([f"{RUNNER}:other"], b"has no pattern 'other'; it has python_runner"),
        ([RUNNER, "--allow", "a b"], b"is not a network rule"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(atoll: Atoll, words: list[str], message: bytes) -> None:
    assert message in atoll("pattern", "run", *words, status=2).stderr


def test_a_terminal_shows_what_runs(atoll: Atoll, tmp_path: Path) -> None:
    flag = tmp_path / "code.py"
    flag.write_text("import time\nprint('half', flush=True)\ntime.sleep(0.7)\nprint('whole')\n")
    terminal = atoll.terminal("pattern", "run", RUNNER, "--set", f"code={flag.read_text()}")
    terminal.read_until(b"run  running")
    terminal.read_until(b"  half")
    terminal.read_until(b"whole")
    assert terminal.wait() == 0


def test_an_interrupted_pattern_leaves_nothing(atoll: Atoll) -> None:
    terminal = atoll.terminal(
        "pattern", "run", RUNNER, "--set", "code=print('x', flush=True); input = open('/dev/zero').read()"
    )
    terminal.read_until(b"run  running")
    terminal.type(b"\x03")
    assert terminal.wait() == 130
    assert atoll.names() == []


def test_a_pattern_is_served_until_it_is_interrupted(atoll: Atoll) -> None:
    server = atoll.start("pattern", "serve", RUNNER, "--set", "code=print(6 * 7)", "--listen", "127.0.0.1:0")
    url = server.read_until(b"\n").decode().strip()
    with urlopen(url) as page:
        assert "<h1>Python Runner</h1>" in page.read().decode()
    with urlopen(f"{url}events") as events:
        while b'"text":"42\\n"' not in events.readline():
            pass
        server.send_signal(signal.SIGINT)
        assert server.wait() == 130
    assert atoll.names() == []


def test_what_is_not_set_is_entered_on_the_page(atoll: Atoll, tmp_path: Path) -> None:
    file = tmp_path / "plain.py"
    file.write_text("from atoll import reactive\n@reactive.pattern\ndef plain(word):\n    return {'word': word}\n")
    assert b"needs its input word" in atoll("pattern", "run", str(file), status=2).stderr
    server = atoll.start("pattern", "serve", str(file), "--listen", "127.0.0.1:0")
    with urlopen(server.read_until(b"\n").decode().strip()) as page:
        assert "<h1>plain</h1>" in page.read().decode()
    server.send_signal(signal.SIGINT)
    assert server.wait() == 130


def test_a_page_that_others_could_reach_needs_a_token(atoll: Atoll) -> None:
    done = atoll("pattern", "serve", RUNNER, "--listen", "0.0.0.0:0", status=2)
    assert b"ATOLL_PATTERN_TOKEN" in done.stderr
    assert b"give an address and a port" in atoll("pattern", "serve", RUNNER, "--listen", "here", status=2).stderr
