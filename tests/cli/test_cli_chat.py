"""`configs` and `chat`: with the data of the machine, and with a server of ATOLL_URL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.testing.server import running_server
from tests.cli.driving import Atoll

pytestmark = pytest.mark.local("it works with a server of its own, and without one")

SCRIPT = {
    "step": [{"call": [{"tool": "look", "input": {"at": "sea"}}]}, {"text": "You saw: it is calm."}],
    "conversation": [{"prompt": "Hello", "step": [{"text": "Good day."}, {"text": "Good night."}]}],
}


@pytest.fixture(params=["local", "server"])
def atoll(request: pytest.FixtureRequest, tmp_path: Path, atoll: Atoll) -> Iterator[Atoll]:
    """With a state directory of its own, and models that are files."""
    (tmp_path / "script.json").write_text(json.dumps(SCRIPT))
    (tmp_path / "agent.json").write_text(
        json.dumps(
            {
                "name": "Eye",
                "model_config": {"provider": "script", "model": f"{tmp_path}/script.json"},
                "tools_config": ["look"],
            }
        )
    )
    kept = dict(atoll.env)
    state_dir, models = tmp_path / "state", f"script:{tmp_path}/*"
    try:
        if request.param == "local":
            atoll.env |= {"ATOLL_STATE_DIR": str(state_dir), "ATOLL_AGENT_MODELS": models}
            yield atoll
        else:
            with running_server(state_dir, environment={"ATOLL_AGENT_MODELS": models}) as server:
                atoll.env |= {"ATOLL_URL": server.url, "ATOLL_API_KEY": server.key}
                del atoll.env["ATOLL_STATE_DIR"]
                yield atoll
    finally:
        atoll.env.clear()
        atoll.env |= kept


@pytest.fixture
def config(atoll: Atoll, tmp_path: Path) -> str:
    return atoll.text("configs", "create", f"{tmp_path}/agent.json").strip()


def lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def test_configs_are_made_changed_shown_and_removed(atoll: Atoll, config: str, tmp_path: Path) -> None:
    assert [each["id"] for each in atoll.json("configs", "--json")] == [config]
    assert f"{config}  Eye   client-side  script:" in atoll.text("configs", "ls")
    (tmp_path / "change.json").write_text('{"name": "Other Eye"}')
    changed = atoll.json("configs", "update", config, f"{tmp_path}/change.json", "--version", "1", "--json")
    assert (changed["name"], changed["version"]) == ("Other Eye", 2)
    refused = atoll("configs", "update", config, f"{tmp_path}/change.json", "--version", "1", status=2).stderr
    assert b"has version 2 by now, not 1" in refused
    assert json.loads(atoll.text("configs", "show", config))["tools_config"] == ["look"]
    assert atoll.text("configs", "rm", config) == f"{config}\n"
    assert b"no agent config has the id" in atoll("configs", "show", config, status=1).stderr
    (tmp_path / "wrong.json").write_text('{"name": "Eye", "tool_config": []}')
    assert b"there is no such field" in atoll("configs", "create", f"{tmp_path}/wrong.json", status=2).stderr


def test_a_message_is_answered_on_standard_output_and_the_conversation_goes_on(atoll: Atoll, config: str) -> None:
    first = atoll("chat", config, "Hello")
    assert first.stdout == b"Good day.\n"
    talk = first.stderr.decode().strip().rpartition(" ")[2]
    assert atoll.text("chat", config, "And?", "--conversation", talk) == "Good night.\n"


def test_a_program_sends_the_results_of_calls(atoll: Atoll, config: str, tmp_path: Path) -> None:
    asked = lines(atoll("chat", config, "Look", "--json", status=1).stdout.decode())
    assert [each["type"] for each in asked] == ["tool_call", "usage", "answer"]
    (call,) = asked[-1]["tool_calls"]
    (tmp_path / "results.json").write_text(
        json.dumps([{"tool_call_id": call["id"], "name": "look", "content": "it is calm"}])
    )
    given = ("--conversation", asked[-1]["conversation_id"], "--results", f"{tmp_path}/results.json")
    assert atoll.text("chat", config, *given) == "You saw: it is calm.\n"


def test_conversations_are_listed_and_what_is_no_id_of_one_is_said_to_be_none(atoll: Atoll, config: str) -> None:
    assert b"no conversations; `atoll chat" in atoll("chat", config, "--list").stderr
    talk = atoll("chat", config, "Hello").stderr.decode().strip().rpartition(" ")[2]
    (listed,) = atoll.json("chat", config, "--list", "--json")
    assert (listed["id"], listed["status"]) == (talk, "done")
    header, row = atoll.text("chat", config, "--list").splitlines()
    assert header.split() == ["CONVERSATION", "LAST", "TURN", "UPDATED"]
    assert row.split()[:2] == [talk, "done"]
    refused = atoll("chat", config, "Hello", "--conversation", "123", status=2).stderr.decode()
    assert "'123' is not the id of a conversation, such as 01a1ed9d-c3b5-7d27-9f97-1c333b66f9c5" in refused
    assert f"`atoll chat {config} --list` lists them" in refused
    assert b"--list takes no message" in atoll("chat", config, "Hello", "--list", status=2).stderr
    assert b"no agent config has the id 'nope'" in atoll("chat", "nope", "--list", status=1).stderr


def test_on_a_terminal_the_user_is_asked_for_the_results(atoll: Atoll, config: str) -> None:
    terminal = atoll.terminal("chat", config)
    terminal.read_until(b"> ")
    terminal.type(b"Look\n")
    terminal.read_until(b'The result of look {"at": "sea"}: ')
    terminal.type(b"it is calm\n")
    terminal.read_until(b"You saw: it is calm.")
    terminal.read_until(b"> ")
    terminal.type(b"\n")
    terminal.read_until(b"conversation ")
    assert terminal.wait() == 0


def test_what_does_not_fit_together_is_refused(atoll: Atoll, config: str) -> None:
    assert b"no message was given" in atoll("chat", config, status=2).stderr
    assert b"need --conversation" in atoll("chat", config, "--resume", status=2).stderr
    assert b"give one of MESSAGE" in atoll("chat", config, "Hello", "--resume", status=2).stderr
    assert b"no agent config has the id 'nope'" in atoll("chat", "nope", "Hello", status=1).stderr
