"""The example that `make demo` plays: eight steps, two sandboxes, one page. With the script, and with a model."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest
from examples import workflow
from rich.console import Console

from atoll.agents.script import Script
from tests.agents.conftest import Anthropic
from tests.agents.messages_api import Say

if TYPE_CHECKING:
    from atoll import Engine

pytestmark = pytest.mark.anyio


async def played(host: Engine) -> str:
    output = io.StringIO()
    await workflow.play(host, Console(file=output, width=500))
    assert await host.list() == []
    return output.getvalue()


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATOLL_MODEL", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)


async def test_the_workflow_is_played_offline_and_shows_what_the_url_serves(host: Engine) -> None:
    said = await played(host)
    assert "model: script:" in said
    assert "<h1>Hello from workflow.frontend</h1>" in said
    assert said.count("✓") == 8
    assert "✗" not in said


async def test_with_a_key_the_same_workflow_is_a_models(host: Engine, anthropic: Anthropic) -> None:
    steps = Script.load(workflow.SCRIPT).steps
    api = anthropic([Say(step.text, [(call.tool, call.input) for call in step.calls]) for step in steps])
    said = await played(host)
    assert "model: anthropic:claude" in said
    assert api.complaints == []
    assert api.requests[0]["model"].startswith("claude")
    assert api.requests[0]["messages"][0]["content"][0]["text"] == workflow.PROMPT
    assert "<h1>Hello from workflow.frontend</h1>" in said
