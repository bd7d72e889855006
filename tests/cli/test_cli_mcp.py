"""`atoll mcp`, as far as it is the command line's. What it serves is in tests/mcp."""

from __future__ import annotations

import subprocess
import sys

from tests.cli.driving import Atoll

WITHOUT = "import sys; sys.modules['mcp'] = None; from atoll.surfaces.cli import main; sys.exit(main(['mcp']))"


def test_without_the_extra_it_says_how_to_get_it(atoll: Atoll) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], env=atoll.env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: MCP needs mcp, which is not installed")
    assert "pip install '/path/to/atoll[mcp]'" in done.stderr


def test_what_others_could_reach_needs_a_token(atoll: Atoll) -> None:
    done = atoll("mcp", "--http", "0.0.0.0:0", status=2)
    assert b"0.0.0.0 can be reached from other machines" in done.stderr
    assert b"ATOLL_MCP_TOKEN" in done.stderr


def test_an_empty_name_is_no_name_for_a_session(atoll: Atoll) -> None:
    assert b"'' is not a session id" in atoll("mcp", "--session", "", status=2).stderr


def test_on_a_terminal_it_says_whom_it_waits_for(atoll: Atoll) -> None:
    terminal = atoll.terminal("mcp")
    terminal.read_until(b"waits for messages of the MCP client")
    terminal.type(b"\x04")
    assert terminal.wait() == 0


def test_directories_are_checked_before_a_client_comes(atoll: Atoll) -> None:
    for words in ([], ["--http", "127.0.0.1:0"]):
        refused = atoll("mcp", *words, "--mount", "/tmp:/etc", status=2).stderr
        assert b"nothing can be mounted on /etc" in refused
    assert b"/nowhere is not a directory" in atoll("mcp", "--upload", "/nowhere", status=2).stderr
    assert (
        b"/nowhere is not a directory that can be written to" in atoll("mcp", "--save-dir", "/nowhere", status=2).stderr
    )
    done = atoll("mcp", "--tools", "coding", "--save-dir", ".", status=2)
    assert b"--save-dir is for the tool save_file, which only the vocabulary workspace has" in done.stderr
