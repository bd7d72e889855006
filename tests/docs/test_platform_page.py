"""`docs/platform.md` is true: its commands run against a server whose models answer from a list."""

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
        with running_server(state_dir, environment=environment) as server:
            blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
            script = "\n".join(["set -euo pipefail", *blocks])
            script = script.replace("http://127.0.0.1:8080", server.url).replace("atoll_KEY", server.key)
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            done = subprocess.run(
                ["bash", "-c", script],
                cwd=tmp_path,
                env={**os.environ, "PATH": path},
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
            )
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{server.log.read_text()[-3000:]}"
        assert (api.complaints, api.answers) == ([], [])
    lines = done.stdout.splitlines()
    assert json.loads("".join(lines[:5])) | {"conversation_id": ""} == {
        "response": "Good day.",
        "tool_calls": [],
        "conversation_id": "",
    }
    assert '"The site is begun."' in lines
    assert '"It has eight words."' in lines
    assert "8" in str(api.requests[5]["messages"][-1])
    assert '"running"' in lines
    assert "Nothing new." in lines
    anyio.run(remove_built, state_dir)


async def remove_built(state_dir: Path) -> None:
    """What was built of bundles is kept for the next workspace, with or without a server."""
    async with open_engine(state_dir) as engine:
        assert await engine.list() == []
        for checkpoint in await engine.checkpoints():
            await engine.delete_checkpoint(checkpoint.id)
