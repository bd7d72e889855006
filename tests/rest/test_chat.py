"""Agents over REST: configs in versions, turns with tools of the client, conversations, and what is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from atoll.contract.errors import ModelUnavailable
from atoll.server.tenants import Quotas
from tests.rest.serving import Served, read_events, serving

WRITE = {"path": "data/site.json", "content": "{}"}
SCRIPT: dict[str, Any] = {
    "step": [
        {"call": [{"tool": "write_file", "input": WRITE}]},
        {"text": "It is written.", "expect": {"result": [{"contains": ["ok"]}]}},
        {"text": "As you said.", "expect": {"prompt": ["again"]}},
    ],
    "conversation": [
        {"prompt": "Hello", "step": [{"text": "Good day."}, {"text": "Good night."}]},
        {
            "prompt": "two at once",
            "step": [
                {
                    "call": [
                        {"tool": "write_file", "input": {"path": "a"}},
                        {"tool": "read_file", "input": {"path": "b"}},
                    ]
                },
                {"text": "Both.", "expect": {"result": [{"contains": ["first"]}, {"error": True}]}},
            ],
        },
        {
            "prompt": "who are you",
            "step": [{"text": "Me.", "expect": {"instructions": ["You are Site Editor of default", "{ braces }"]}}],
        },
    ],
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("scripts")
    (directory / "site.json").write_text(json.dumps(SCRIPT))
    return directory


@pytest.fixture(scope="module")
async def served(make_state_dir: Callable[[], Path], scripts: Path) -> AsyncIterator[Served]:
    async with serving(make_state_dir(), agent_models=f"anthropic:* script:{scripts}/*") as served:
        yield served


@pytest.fixture(scope="module")
async def client(served: Served) -> AsyncIterator[httpx2.AsyncClient]:
    async with served.client() as client:
        yield client


def site(scripts: Path, **fields: Any) -> dict[str, Any]:
    return {
        "name": "Site Editor",
        "system_prompt": "You are {agent_name} of {tenant_name}. { braces }",
        "model_config": {"provider": "script", "model": f"{scripts}/site.json"},
        "tools_config": ["read_file", "write_file"],
        **fields,
    }


async def create(client: httpx2.AsyncClient, body: dict[str, Any]) -> str:
    made = await client.post("/api/v1/configs", json=body)
    assert made.status_code == 201, made.text
    return str(made.json()["id"])


@pytest.fixture(scope="module")
async def config(client: httpx2.AsyncClient, scripts: Path) -> str:
    return await create(client, site(scripts))


async def say(client: httpx2.AsyncClient, config: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(f"/api/v1/chat/{config}", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def refused(client: httpx2.AsyncClient, config: str, **body: Any) -> tuple[int, str]:
    answer = await client.post(f"/api/v1/chat/{config}", json=body)
    return answer.status_code, answer.json()["message"]


# --------------------------------------------------------------------------------------------------------------- turns


async def test_a_turn_stops_at_a_call_and_goes_on_with_its_result(client: httpx2.AsyncClient, config: str) -> None:
    first = await say(client, config, message="Write the site.")
    assert first["response"] is None
    (call,) = first["tool_calls"]
    assert (call["name"], call["arguments"]) == ("write_file", WRITE)
    talk = first["conversation_id"]
    done = await say(
        client,
        config,
        conversation_id=talk,
        tool_results=[{"tool_call_id": call["id"], "name": "write_file", "content": "ok"}],
    )
    assert (done["response"], done["tool_calls"], done["conversation_id"]) == ("It is written.", [], talk)
    assert (done["turn_id"], done["steps"]) == (first["turn_id"], 2)
    again = await say(client, config, conversation_id=talk, message="Say it again.")
    assert (again["response"], again["steps"]) == ("As you said.", 1)
    shown = (await client.get(f"/api/v1/conversations/{talk}")).json()
    assert [each["role"] for each in shown["messages"]] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert shown["messages"][1]["tool_calls"] == [call]
    assert [(turn["status"], turn["version"]) for turn in shown["turns"]] == [("done", 1), ("done", 1)]
