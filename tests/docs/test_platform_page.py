"""`docs/platform.md` is true: its commands run against a server whose models answer from a list, and as the page says
to try them without a provider."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio

from atoll.runtime.engine import open as open_engine
from atoll.testing.server import running_server
from tests.agents.messages_api import Say, serving

PAGE = Path(__file__).parents[2] / "docs/platform.md"
ANSWERS = (
    Say("Good day."),
    Say(calls=[("write_file", {"path": "data/site.json", "content": "{}"})]),
    Say("The site is begun."),
    Say(calls=[("write", {"path": "haiku.txt", "content": "old pond\na frog leaps in\nwater's sound"})]),
    Say(calls=[("count_words", {"path": "haiku.txt"})]),
    Say("It has eight words."),
    Say("More."),
    Say("Nothing new."),
)


def test_the_commands_of_the_page_run(make_state_dir: Callable[[], Path], tmp_path: Path) -> None:
    state_dir = make_state_dir()
    with serving(ANSWERS) as api:
        environment = {"ANTHROPIC_BASE_URL": api.url, "ANTHROPIC_API_KEY": "test-key"}
        lines = run_page(state_dir, environment, tmp_path)
        assert (api.complaints, api.answers) == ([], [])
    assert json.loads("".join(lines[:5])) | {"conversation_id": ""} == {
        "response": "Good day.",
        "tool_calls": [],
        "conversation_id": "",
    }
    check(lines)
    assert "8" in str(api.requests[5]["messages"][-1])
    anyio.run(remove_built, state_dir)


def test_the_commands_of_the_page_run_with_its_scripted_model(
    make_state_dir: Callable[[], Path], tmp_path: Path
) -> None:
    (named,) = re.findall(r"`ATOLL_MODEL=script:(\S+) atoll serve`", PAGE.read_text())
    state_dir = make_state_dir()
    check(run_page(state_dir, {"ATOLL_MODEL": f"script:{PAGE.parents[1] / named}"}, tmp_path))
    anyio.run(remove_built, state_dir)


def run_page(state_dir: Path, environment: dict[str, str], cwd: Path) -> list[str]:
    """What the commands print, with a server of their own."""
    with running_server(state_dir, environment=environment) as server:
        blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
        script = "\n".join(["set -euo pipefail", *blocks])
        script = script.replace("http://127.0.0.1:8080", server.url).replace("atoll_KEY", server.key)
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=cwd,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{server.log.read_text()[-3000:]}"
    return done.stdout.splitlines()


def check(lines: list[str]) -> None:
    assert '"The site is begun."' in lines
    assert '"It has eight words."' in lines
    assert '"running"' in lines
    assert "Nothing new." in lines


async def remove_built(state_dir: Path) -> None:
    """What was built of bundles is kept for the next workspace, with or without a server."""
    async with open_engine(state_dir) as engine:
        assert await engine.list() == []
        for checkpoint in await engine.checkpoints():
            await engine.delete_checkpoint(checkpoint.id)
