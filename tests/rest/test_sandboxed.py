"""Agents whose tools run here: the loop, its workspace, what is stored of both, and secrets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from atoll.contract.errors import QuotaExceeded
from atoll.server.tenants import Quotas
from tests.rest.serving import Served, read_events, serving
from tests.rest.test_chat import create, refused, say

SECRET = "swordfish-0123456789"


def step(tool: str, **given: Any) -> dict[str, Any]:
    return {"call": [{"tool": tool, "input": given}]}


def after(text: str, *parts: str, error: bool = False) -> dict[str, Any]:
    return {"text": text, "expect": {"result": [{"contains": list(parts), "error": error}]}}


SCRIPT: dict[str, Any] = {
    "conversation": [
        {"prompt": "echo", "step": [step("echo", text="sea"), after("Echoed.", "sea")]},
        {
            "prompt": "note",
            "step": [
                step("write", path="note.txt", content="tide"),
                step("bash", command="cat /workspace/note.txt; echo >> calls.log"),
                after("Noted.", "tide"),
            ],
        },
        {"prompt": "look", "step": [step("read", path="note.txt"), after("Still there.", "tide")]},
        {"prompt": "code", "step": [step("execute_code", code="x = 20\nprint(x * 2 + 2)"), after("Counted.", "42")]},
        {
            "prompt": "leak",
            "step": [step("bash", command="echo token=$TOKEN"), after("Hidden.", "token=[the secret TOKEN]")],
        },
    ]
}
TOOLS = ["echo", "get_current_time", "bash", "read", "write", "execute_code"]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("scripts")
    (directory / "sea.json").write_text(json.dumps(SCRIPT))
    return directory


@pytest.fixture(scope="module")
async def served(make_state_dir: Callable[[], Path], scripts: Path) -> AsyncIterator[Served]:
    async with serving(make_state_dir(), agent_models=f"script:{scripts}/*") as served:
        yield served
        async with served.client() as client:
            for each in (await client.get("/api/v1/configs")).json()["items"]:
                assert (await client.delete(f"/api/v1/configs/{each['id']}")).status_code == 204
        engine = await served.server.engines.get("default")
        assert await engine.list() == []
        assert await engine.volumes.list() == []
        for checkpoint in await engine.checkpoints():  # of bundles that were built
            await engine.delete_checkpoint(checkpoint.id)


@pytest.fixture(scope="module")
async def client(served: Served) -> AsyncIterator[httpx2.AsyncClient]:
    async with served.client() as client:
        yield client


def sailor(scripts: Path, **fields: Any) -> dict[str, Any]:
    model = {"provider": "script", "model": f"{scripts}/sea.json"}
    return {"name": "Sailor", "agent_type": "sandboxed", "model_config": model, "tools_config": TOOLS, **fields}


@pytest.fixture(scope="module")
async def config(client: httpx2.AsyncClient, scripts: Path) -> str:
    return await create(client, sailor(scripts, workspace_secrets={"TOKEN": SECRET}))


async def workspace(client: httpx2.AsyncClient, config: str) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get(f"/api/v1/configs/{config}/workspace")).json()
    return found


async def test_the_loop_runs_here_and_the_client_sees_the_reply(client: httpx2.AsyncClient, config: str) -> None:
    answer = await say(client, config, message="echo")
    assert (answer["response"], answer["tool_calls"], answer["steps"]) == ("Echoed.", [], 2)
    assert (await workspace(client, config))["state"] is None  # nothing has needed it


async def test_conversations_of_a_config_share_its_workspace(client: httpx2.AsyncClient, config: str) -> None:
    assert (await say(client, config, message="note"))["response"] == "Noted."
    assert (await say(client, config, message="look"))["response"] == "Still there."
    assert (await say(client, config, message="code"))["response"] == "Counted."
    found = await workspace(client, config)
    assert found["state"] == "running"
    (instance,) = (await client.get(f"/api/v1/configs/{config}/workspace/instances")).json()["items"]
    assert instance == found["instance"]
    assert (instance["state"], instance["reason"]) == ("running", None)
    path = f"/api/v1/configs/{config}/workspace/instances/{instance['external_id']}"
    assert (await client.get(path)).json()["ready_at"] is not None
    assert (await client.get(f"{path}x")).status_code == 404


async def test_a_workspace_that_sleeps_wakes_with_the_next_call_and_keeps_its_files(
    client: httpx2.AsyncClient, config: str
) -> None:
    name = (await workspace(client, config))["sandbox"]
    assert (await client.post(f"/api/v1/sandboxes/{name}/sleep")).status_code == 200
    assert (await workspace(client, config))["state"] == "sleeping"
    assert (await say(client, config, message="look"))["response"] == "Still there."
    assert (await workspace(client, config))["state"] == "running"


async def test_events_tell_the_calls_and_the_conversation_has_them(client: httpx2.AsyncClient, config: str) -> None:
    async with client.stream(
        "POST", f"/api/v1/chat/{config}", json={"message": "look"}, headers={"Accept": "text/event-stream"}
    ) as stream:
        seen = [event async for event in read_events(stream)]
    kinds = [event["event"] for event in seen if event["event"] != "text"]
    assert kinds == ["turn", "usage", "tool_call", "tool_result", "usage", "end"]
    shown = (await client.get(f"/api/v1/conversations/{seen[0]['data']['conversation_id']}")).json()["messages"]
    assert [(each["role"], each["name"]) for each in shown] == [
        ("user", None),
        ("assistant", None),
        ("tool", "read"),
        ("assistant", None),
    ]


async def test_a_secret_that_a_tool_prints_does_not_reach_the_model(client: httpx2.AsyncClient, config: str) -> None:
    answer = await say(client, config, message="leak")
    assert answer["response"] == "Hidden."
    shown = await client.get(f"/api/v1/conversations/{answer['conversation_id']}")
    assert SECRET not in shown.text


async def test_a_new_workspace_begins_without_the_files_of_the_old(client: httpx2.AsyncClient, scripts: Path) -> None:
    config = await create(client, sailor(scripts))
    assert (await say(client, config, message="note"))["response"] == "Noted."
    assert (await client.delete(f"/api/v1/configs/{config}/workspace")).status_code == 204
    assert (await workspace(client, config))["state"] == "destroyed"
    assert (await refused(client, config, message="look"))[0] == 502  # the script expects the file
    assert (await workspace(client, config))["state"] == "running"


async def test_limits_that_are_raised_later_count_for_the_quota(served: Served, scripts: Path) -> None:
    key = await served.tenant("small", quotas=Quotas(memory_bytes=5 << 29))
    async with served.client(key) as client:
        config = await create(client, sailor(scripts, workspace_limits={"memory_bytes": 1 << 28}))
        assert (await say(client, config, message="note"))["response"] == "Noted."
        more = await client.patch(f"/api/v1/configs/{config}", json={"workspace_limits": {"memory_bytes": 1 << 32}})
        assert more.status_code == 200
        _, told = await refused(client, config, message="look")
        assert "quota of memory_bytes does not suffice" in told
        assert (await client.get("/api/v1/me")).json()["usage"]["memory_bytes"] == 1 << 28
    await served.server.delete_tenant("small", destroy=True)


async def test_the_files_of_a_workspace_count_for_the_quota_of_disk(served: Served, scripts: Path) -> None:
    """Disk limits of sandboxes may not be enforceable here: what is asked of the ledger is what counts."""
    key = await served.tenant("narrow", quotas=Quotas(disk_bytes=1 << 30))
    tenant, engine = await served.server.tenants.get("narrow"), await served.server.engines.get("narrow")
    async with served.client(key) as client:
        unlimited = await create(client, sailor(scripts))
        _, told = await refused(client, unlimited, message="note")
        assert "would have no limit that could be counted; give it disk_bytes" in told
        created = await create(client, sailor(scripts, workspace_limits={"disk_bytes": 1 << 28}))
        config = await served.server.configs.get("narrow", created)
        async with served.server.workspaces.using("narrow", config):
            workspace = served.server.workspaces._open[created].workspace
            assert workspace.spec.build_limits.disk_bytes == 1 << 28
            assert workspace._admit_volume is not None
            async with workspace._admit_volume(config.sandbox, 1 << 28):
                assert (await served.server.quotas.usage(tenant, engine))["disk_bytes"] == 1 << 28
            with pytest.raises(QuotaExceeded):
                async with workspace._admit_volume(config.sandbox, 1 << 31):
                    pass
    await served.server.delete_tenant("narrow", destroy=True)


async def test_a_client_side_agent_has_no_workspace(client: httpx2.AsyncClient, scripts: Path) -> None:
    model = {"provider": "script", "model": f"{scripts}/sea.json"}
    config = await create(client, {"name": "Plain", "model_config": model})
    answer = await client.get(f"/api/v1/configs/{config}/workspace")
    assert (answer.status_code, "has no workspace" in answer.text) == (400, True)
