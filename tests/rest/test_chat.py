"""Agents over REST: configs in versions, turns with tools of the client, conversations, and what is refused."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from atoll.server.conversations import Conversations
from atoll.server.tenants import Quotas
from atoll.testing.waiting import eventually
from tests.agents.conftest import Anthropic
from tests.agents.messages_api import MessagesApi, Refuse, Say
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
    assert [each["role"] for each in shown["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    assert shown["messages"][1]["tool_calls"] == [call]
    assert [(turn["status"], turn["version"]) for turn in shown["turns"]] == [("done", 1), ("done", 1)]


async def test_results_of_one_answer_keep_the_order_of_their_calls(client: httpx2.AsyncClient, config: str) -> None:
    first = await say(client, config, message="two at once")
    write, read = first["tool_calls"]
    results = [
        {"tool_call_id": read["id"], "name": "read_file", "content": "no such file", "is_error": True},
        {"tool_call_id": write["id"], "name": "write_file", "content": "first"},
    ]
    done = await say(client, config, conversation_id=first["conversation_id"], tool_results=results)
    assert done["response"] == "Both."


async def test_the_system_prompt_has_its_placeholders_filled_and_other_braces_as_they_are(
    client: httpx2.AsyncClient, config: str
) -> None:
    assert (await say(client, config, message="who are you"))["response"] == "Me."


async def test_results_that_are_not_awaited_are_refused_by_name(client: httpx2.AsyncClient, config: str) -> None:
    first = await say(client, config, message="two at once")
    talk, (write, read) = first["conversation_id"], first["tool_calls"]
    right = {"tool_call_id": write["id"], "name": "write_file", "content": "first"}
    awaited = f"awaited are the results of {write['id']} (write_file), {read['id']} (read_file)"
    for results, message in (
        ([right], f"the result of {read['id']} (read_file) is missing"),
        ([right, right], f"the result of {write['id']!r} is given twice"),
        ([{**right, "tool_call_id": "call_x"}], "no call 'call_x' waits for a result"),
        ([{**right, "name": "read_file"}], f"the call {write['id']!r} is of 'write_file', not of 'read_file'"),
    ):
        status, told = await refused(client, config, conversation_id=talk, tool_results=results)
        assert status == 400
        assert message in told
        assert awaited in told
    status, told = await refused(client, config, conversation_id=talk, message="Never mind.")
    assert status == 409
    assert f"waits for the results of {write['id']} (write_file)" in told
    assert "send them as tool_results, or cancel the turn" in told
    ended = (await client.post(f"/api/v1/chat/{config}/turns/{first['turn_id']}/cancel")).json()
    assert (ended["status"], ended["tool_calls"]) == ("cancelled", [])
    status, told = await refused(client, config, conversation_id=talk, tool_results=[right])
    assert (status, "no call of this conversation waits" in told) == (409, True)
    shown = (await client.get(f"/api/v1/conversations/{talk}")).json()["messages"]
    assert [each["outcome"] for each in shown if each["role"] == "tool"] == ["interrupted", "interrupted"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "give one of message, tool_results and resume"),
        ({"message": "a", "resume": True}, "give one of message, tool_results and resume"),
        ({"message": "  "}, "the message is empty"),
        ({"resume": True}, "conversation_id is missing"),
        ({"tool_results": [{"tool_call_id": "c", "name": "n", "content": "x"}]}, "conversation_id is missing"),
        ({"message": "a", "stream": True}, "there is no such field"),
    ],
)
async def test_a_body_says_one_thing(
    client: httpx2.AsyncClient, config: str, body: dict[str, Any], message: str
) -> None:
    status, told = await refused(client, config, **body)
    assert (status, message in told) == (400, True), told


async def test_a_request_that_is_wrong_in_several_ways_says_so_at_once(client: httpx2.AsyncClient) -> None:
    answer = await client.post("/api/v1/configs", json={"nam": "x", "budget": 7})
    told = answer.json()["message"]
    assert "body.name: it is required" in told
    assert "body.nam: there is no such field" in told
    assert "body.budget: it has to be a JSON object" in told
    torn = await client.post("/api/v1/configs", content=b'{"a', headers={"Content-Type": "application/json"})
    assert "it is not valid JSON: Unterminated string" in torn.json()["message"]


async def test_a_conversation_belongs_to_its_config(client: httpx2.AsyncClient, config: str, scripts: Path) -> None:
    unknown = "11111111-1111-1111-1111-111111111111"
    assert (await refused(client, config, conversation_id=unknown, message="Hello"))[0] == 404
    talk = (await say(client, config, message="Hello"))["conversation_id"]
    other = await create(client, site(scripts, name="Other"))
    assert (await refused(client, other, conversation_id=talk, message="Hello"))[0] == 404
    listed = (await client.get("/api/v1/conversations", params={"config_id": other})).json()
    assert listed == {"items": [], "next": None}
    assert (await client.delete(f"/api/v1/conversations/{talk}")).status_code == 204
    assert (await refused(client, config, conversation_id=talk, message="Hello"))[0] == 404


async def test_lists_of_conversations_and_their_messages_come_in_pages(
    client: httpx2.AsyncClient, scripts: Path
) -> None:
    config = await create(client, site(scripts, name="Pages"))
    talks = [(await say(client, config, message="Hello"))["conversation_id"] for _ in range(3)]
    found: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = (await client.get("/api/v1/conversations", params={"config_id": config, "limit": 2, **after})).json()
        found += [each["id"] for each in page["items"]]
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    assert sorted(found) == sorted(talks)
    assert {each["status"] for each in page["items"]} == {"done"}
    first = (await client.get(f"/api/v1/conversations/{talks[0]}", params={"limit": 1})).json()
    rest = await client.get(f"/api/v1/conversations/{talks[0]}", params={"limit": 1, "after": first["next"]})
    assert first["messages"][0]["content"] == "Hello"
    assert (rest.json()["messages"][0]["content"], rest.json()["next"]) == ("Good day.", None)


# --------------------------------------------------------------------------------------------- requests that come again


async def test_a_request_that_is_sent_again_is_answered_again_and_done_once(
    client: httpx2.AsyncClient, config: str
) -> None:
    answers = [
        await client.post(
            f"/api/v1/chat/{config}", json={"message": "Hello"}, headers={"Idempotency-Key": "hello-once"}
        )
        for _ in range(2)
    ]
    assert answers[0].json() == answers[1].json()
    assert answers[1].headers["idempotency-replayed"] == "true"
    talk = answers[0].json()["conversation_id"]
    assert len((await client.get(f"/api/v1/conversations/{talk}")).json()["messages"]) == 2
    async with client.stream(
        "POST",
        f"/api/v1/chat/{config}",
        json={"message": "Hello"},
        headers={"Idempotency-Key": "hello-once", "Accept": "text/event-stream"},
    ) as stream:
        seen = [event async for event in read_events(stream)]
    assert [event["event"] for event in seen] == ["turn", "end"]
    assert seen[-1]["data"] == answers[0].json()


async def test_events_tell_a_turn_as_it_happens_and_a_client_that_lost_some_gets_the_rest(
    client: httpx2.AsyncClient, config: str
) -> None:
    async with client.stream(
        "POST",
        f"/api/v1/chat/{config}",
        json={"message": "Hello"},
        headers={"Accept": "text/event-stream", "Idempotency-Key": "streamed"},
    ) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        seen = [event async for event in read_events(stream)]
    kinds = [event["event"] for event in seen]
    assert (kinds[0], kinds[-2:]) == ("turn", ["usage", "end"])
    assert "".join(event["data"]["text"] for event in seen if event["event"] == "text") == "Good day."
    assert seen[-1]["data"]["response"] == "Good day."
    turn = seen[0]["data"]["turn_id"]
    path = f"/api/v1/chat/{config}/turns/{turn}/events"
    async with client.stream("GET", path, headers={"Last-Event-ID": seen[1]["id"]}) as stream:
        later = [event async for event in read_events(stream)]
    assert later[1:] == seen[2:]
    again = await client.post(
        f"/api/v1/chat/{config}", json={"message": "Hello"}, headers={"Idempotency-Key": "streamed"}
    )
    assert again.json() == seen[-1]["data"]


# ------------------------------------------------------------------------------------------ a model that takes its time


@pytest.fixture
async def slow(client: httpx2.AsyncClient, scripts: Path) -> str:
    """A config whose model is reached over HTTP."""
    model = {"provider": "anthropic", "model": "claude-test", "max_tokens": 1000, "temperature": 0.5}
    return await create(client, site(scripts, model_config=model, budget={"turn_tokens": 200, "tokens": 1000}))


async def test_one_turn_of_a_conversation_is_under_way_at_a_time(
    client: httpx2.AsyncClient, slow: str, anthropic: Anthropic
) -> None:
    answered = threading.Event()
    api = anthropic([Say("one"), Say("two", after=answered), Say("three")])
    talk = (await say(client, slow, message="1"))["conversation_id"]
    second: list[dict[str, Any]] = []

    async def ask() -> None:
        second.append(await say(client, slow, conversation_id=talk, message="2"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await eventually(lambda: len(api.requests) == 2, "the model was asked")
        answer = await client.post(f"/api/v1/chat/{slow}", json={"conversation_id": talk, "message": "3"})
        assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
        turn = answer.json()["details"]["turn_id"]
        assert f"GET …/turns/{turn}/events" in answer.json()["message"]
        answered.set()
    assert second[0]["turn_id"] == turn
    assert (await say(client, slow, conversation_id=talk, message="3"))["response"] == "three"
    assert (api.requests[0]["temperature"], api.requests[0]["max_tokens"]) == (0.5, 1000)
    assert api.complaints == []


async def test_a_turn_goes_on_when_its_client_leaves_and_ends_when_it_is_cancelled(
    served: Served, client: httpx2.AsyncClient, slow: str, anthropic: Anthropic
) -> None:
    answered, never = threading.Event(), threading.Event()
    api = anthropic([Say("late", after=answered), Say("never", after=never)])
    for number, message in enumerate(("late", "never"), 1):
        async with served.client() as leaving, anyio.create_task_group() as tasks:
            tasks.start_soon(_post, leaving, slow, message)
            await eventually(partial(_asked, api, number), "the model was asked")
            tasks.cancel_scope.cancel()
        (newest, *_) = (await client.get("/api/v1/conversations", params={"config_id": slow})).json()["items"]
        turn = (await client.get(f"/api/v1/conversations/{newest['id']}")).json()["turns"][0]
        assert turn["status"] == "running"
        path = f"/api/v1/chat/{slow}/turns/{turn['id']}"
        if message == "late":
            answered.set()

            async def status(path: str = path) -> bool:
                return bool((await client.get(path)).json()["response"] == "late")

            await eventually(status, "the turn has ended")
        else:
            assert (await client.post(f"{path}/cancel")).json()["status"] == "cancelled"
            never.set()


def _asked(api: MessagesApi, times: int) -> bool:
    return len(api.requests) == times


async def _post(client: httpx2.AsyncClient, config: str, message: str) -> None:
    await client.post(f"/api/v1/chat/{config}", json={"message": message})


async def test_a_turn_whose_model_failed_is_resumed_and_its_message_is_not_said_twice(
    client: httpx2.AsyncClient, slow: str, anthropic: Anthropic
) -> None:
    api = anthropic([Refuse(400, "invalid_request_error", "broken"), Refuse(401, "authentication_error"), Say("fine")])
    failed = await client.post(f"/api/v1/chat/{slow}", json={"message": "1"}, headers={"Idempotency-Key": "failing"})
    assert (failed.status_code, failed.json()["code"]) == (502, "model_failed")
    assert "broken" in failed.json()["message"]
    (talk,) = (await client.get("/api/v1/conversations", params={"config_id": slow})).json()["items"]
    assert talk["status"] == "failed"
    hidden = await client.post(f"/api/v1/chat/{slow}", json={"resume": True, "conversation_id": talk["id"]})
    assert "the server's log has the reason" in hidden.json()["message"]
    again = await client.post(f"/api/v1/chat/{slow}", json={"message": "1"}, headers={"Idempotency-Key": "failing"})
    assert again.json()["response"] == "fine"
    assert [each["role"] for each in api.requests[-1]["messages"]] == ["user"]
    assert (await refused(client, slow, conversation_id=talk["id"], resume=True))[0] == 409


async def test_what_a_provider_says_of_the_server_stays_here(
    client: httpx2.AsyncClient, slow: str, anthropic: Anthropic
) -> None:
    """Of its key, its account and its address, also where the model is only asked again."""
    api = anthropic([Say("Well", breaks="drops"), Refuse(401, "x", "bad key sk-123")])
    async with client.stream(
        "POST", f"/api/v1/chat/{slow}", json={"message": "1"}, headers={"Accept": "text/event-stream"}
    ) as stream:
        seen = [event async for event in read_events(stream)]
    assert {"turn", "text", "retry", "error"} == {event["event"] for event in seen}
    (retry,) = [event["data"] for event in seen if event["event"] == "retry"]
    assert retry["reason"] == "the model is not available now"
    told = json.dumps(seen)
    assert not [word for word in ("secret", "sk-", api.url, "claude-test") if word in told]


async def test_budgets_end_a_turn_and_then_a_config(
    client: httpx2.AsyncClient, slow: str, anthropic: Anthropic
) -> None:
    call = ("write_file", {"path": "x"})
    anthropic([Say(calls=[call]), Say(calls=[call]), Say("no"), Say("big", input_tokens=900)])
    first = await say(client, slow, message="1")
    talk = first["conversation_id"]
    assert first["usage"] == {"input": 100, "output": 20, "cache_read": 0, "cache_write": 0}

    def result(answer: dict[str, Any]) -> list[dict[str, str]]:
        return [{"tool_call_id": each["id"], "name": each["name"], "content": "ok"} for each in answer["tool_calls"]]

    second = await say(client, slow, conversation_id=talk, tool_results=result(first))
    answer = await client.post(f"/api/v1/chat/{slow}", json={"conversation_id": talk, "tool_results": result(second)})
    assert (answer.status_code, answer.json()["code"]) == (403, "budget_exceeded")
    assert answer.json()["details"] == {"budget": "turn_tokens", "used": 240, "allowed": 200}
    await say(client, slow, conversation_id=talk, message="2")
    await say(client, slow, conversation_id=talk, message="3")
    assert (await refused(client, slow, message="4"))[0] == 403
    assert (await client.get(f"/api/v1/configs/{slow}")).json()["tokens_spent"] == 240 + 120 + 920


async def test_a_conversation_does_not_grow_without_end(
    client: httpx2.AsyncClient, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await say(client, config, message="two at once")
    talk, calls = first["conversation_id"], first["tool_calls"]
    results = [{"tool_call_id": call["id"], "name": call["name"], "content": "x" * 900_000} for call in calls]
    monkeypatch.setitem(Conversations.give.__globals__, "MAX_CONVERSATION_CHARS", 1_000_000)
    status, told = await refused(client, config, conversation_id=talk, tool_results=results)
    assert (status, "a conversation may have 1000000 characters, and this has 18" in told) == (400, True)
    shown = (await client.get(f"/api/v1/conversations/{talk}")).json()
    assert [each["role"] for each in shown["messages"]] == ["user", "assistant"]  # nothing of it was stored
    assert shown["turns"][0]["status"] == "waiting"


async def test_the_tenants_quota_of_tokens_is_spent_by_turns(
    served: Served, scripts: Path, anthropic: Anthropic
) -> None:
    key = await served.tenant("thrifty", quotas=Quotas(model_tokens=130))
    anthropic([Say("one"), Say("two")])
    model = {"provider": "anthropic", "model": "claude-sonnet-5-5"}
    async with served.client(key) as client:
        config = await create(client, site(scripts, model_config=model))
        await say(client, config, message="1")
        await say(client, config, message="2")
        answer = await client.post(f"/api/v1/chat/{config}", json={"message": "3"})
        assert (answer.status_code, answer.json()["code"]) == (403, "quota_exceeded")
        assert (await client.get("/api/v1/me")).json()["usage"]["model_tokens"] == 240


async def test_turns_of_a_tenant_that_is_disabled_end(
    served: Served, client: httpx2.AsyncClient, scripts: Path, anthropic: Anthropic
) -> None:
    key, never = await served.tenant("late-payer"), threading.Event()
    api = anthropic([Say("never", after=never)])
    model = {"provider": "anthropic", "model": "claude-test"}
    async with served.client(key) as theirs, anyio.create_task_group() as tasks:
        config = await create(theirs, site(scripts, model_config=model))
        tasks.start_soon(_post, theirs, config, "1")
        await eventually(partial(_asked, api, 1), "the model was asked")
        (talk,) = (await theirs.get("/api/v1/conversations")).json()["items"]
        assert (await client.patch("/api/v1/tenants/late-payer", json={"disabled": True})).status_code == 200

        async def status() -> bool:
            return (await served.server.conversations.get("late-payer", talk["id"])).status == "cancelled"

        await eventually(status, "the turn was cancelled")
        never.set()


async def test_a_call_of_a_tool_that_is_not_there_is_answered_to_the_model(
    client: httpx2.AsyncClient, slow: str, anthropic: Anthropic
) -> None:
    await client.patch(f"/api/v1/configs/{slow}", json={"budget": {}})
    api = anthropic([Say(calls=[("write_fiel", {}), ("write_file", {"path": "x"})]), Say("done")])
    first = await say(client, slow, message="1")
    (call,) = first["tool_calls"]
    results = [{"tool_call_id": call["id"], "name": "write_file", "content": "ok"}]
    assert (await say(client, slow, conversation_id=first["conversation_id"], tool_results=results))["response"]
    told = [block["content"] for block in api.requests[-1]["messages"][-1]["content"]]
    assert "did you mean 'write_file'?" in str(told[0])
    assert api.complaints == []


# ------------------------------------------------------------------------------------------------------------- configs


async def test_a_change_makes_a_version_and_turns_say_which_they_used(
    client: httpx2.AsyncClient, scripts: Path
) -> None:
    config = await create(client, site(scripts))
    path = f"/api/v1/configs/{config}"
    first = await client.get(path)
    assert first.headers["etag"] == '"1"'
    talk = (await say(client, config, message="Hello"))["conversation_id"]
    waiting = await say(client, config, message="Write the site.")
    changed = await client.patch(path, json={"name": "Better"}, headers={"If-Match": '"1"'})
    assert (changed.status_code, changed.json()["version"], changed.headers["etag"]) == (200, 2, '"2"')
    lost = await client.patch(path, json={"name": "Worse"}, headers={"If-Match": '"1"'})
    assert (lost.status_code, lost.json()["details"]["version"]) == (409, 2)
    assert (await client.patch(path, json={"name": "Worse", "version": 1})).status_code == 409
    assert (await client.patch(path, json={"name": "Better"})).json()["version"] == 2
    assert (await say(client, config, conversation_id=talk, message="Hello"))["version"] == 2
    results = [{"tool_call_id": waiting["tool_calls"][0]["id"], "name": "write_file", "content": "ok"}]
    done = await say(client, config, conversation_id=waiting["conversation_id"], tool_results=results)
    assert done["version"] == 1
    versions = (await client.get(f"{path}/versions")).json()["items"]
    assert [(each["version"], each["name"]) for each in versions] == [(2, "Better"), (1, "Site Editor")]
    page = (await client.get(f"{path}/versions", params={"limit": 1})).json()
    assert (await client.get(f"{path}/versions", params={"after": page["next"]})).json()["items"] == versions[1:]
    turns = (await client.get(f"/api/v1/conversations/{talk}")).json()["turns"]
    assert [turn["version"] for turn in turns] == [1, 2]
    assert config in [each["id"] for each in (await client.get("/api/v1/configs")).json()["items"]]
    assert (await client.delete(path)).status_code == 204
    assert (await client.get(path)).status_code == 404
    assert (await client.get(f"/api/v1/conversations/{talk}")).status_code == 404


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"tool_config": []}, 400, "there is no such field"),
        ({"agent_type": "hosted"}, 400, "it should be 'client-side' or 'sandboxed'"),
        (
            {"system_prompt": "Hello {user_name}"},
            400,
            "the placeholder {user_name} has no value; there are {tenant_name}, {agent_name}, {date}",
        ),
        (
            {"system_prompt": "{a}" * 30_000, "template_vars": {"a": "x" * 16_000}},
            400,
            "480090000 characters with template_vars filled in; it may have 100000",
        ),
        ({"template_vars": {"date": "today"}}, 400, "'date' is given by the server"),
        ({"tools_config": ["a", "a"]}, 400, "'a' is named twice"),
        ({"tools_config": ["no spaces"]}, 400, "the name of a tool has 1 to 64 letters, digits"),
        ({"tools_config": [{"name": "a", "input_schema": {"type": "array"}}]}, 400, "of the type 'object'"),
        ({"workspace_secrets": {"TOKEN": "x"}}, 400, "a client-side agent has no workspace"),
        ({"workspace_image": "host"}, 400, "a client-side agent has no workspace"),
        ({"model_config": {"provider": "ollama", "model": "m"}}, 403, "the model 'ollama:m' is not allowed"),
        ({"model_config": {"provider": "script", "model": "/etc/passwd"}}, 403, "is not allowed on this server"),
        ({"agent_type": "sandboxed", "tools_config": ["mine"]}, 400, "'mine' is not known here"),
        ({"agent_type": "sandboxed", "tools_config": ["echo"], "workspace_image": "nope:1"}, 201, ""),
        (
            {"agent_type": "sandboxed", "tools_config": [], "workspace_network": {"allow": ["10.0.0.1"]}},
            403,
            "the network rule '10.0.0.1' is not allowed",
        ),
    ],
)
async def test_a_config_that_is_not_right_is_refused_with_the_reason(
    client: httpx2.AsyncClient, scripts: Path, fields: dict[str, Any], status: int, message: str
) -> None:
    answer = await client.post("/api/v1/configs", json=site(scripts, **fields))
    assert (answer.status_code, message in answer.text.replace('\\"', '"')) == (status, True), answer.text


async def test_template_vars_are_filled_in_once(client: httpx2.AsyncClient, slow: str, anthropic: Anthropic) -> None:
    api = anthropic([Say("ok")])
    fields = {"system_prompt": "Of {owner} on {date}: {{kept}} {} {0}", "template_vars": {"owner": "{date}"}}
    assert (await client.patch(f"/api/v1/configs/{slow}", json=fields)).status_code == 200
    await say(client, slow, message="1")
    told = json.dumps(api.requests[0]["system"])
    assert f"Of {{date}} on {datetime.now(UTC):%Y-%m-%d}: {{{{kept}}}} {{}} {{0}}" in told


async def test_what_a_model_is_told_of_a_clients_tool(
    client: httpx2.AsyncClient, slow: str, anthropic: Anthropic
) -> None:
    api = anthropic([Say("ok")])
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    tools = ["plain", {"name": "read_page", "description": "Reads a page.", "input_schema": schema}]
    assert (await client.patch(f"/api/v1/configs/{slow}", json={"tools_config": tools})).status_code == 200
    await say(client, slow, message="1")
    plain, declared = api.requests[0]["tools"]
    assert (plain["name"], plain["input_schema"]["type"]) == ("plain", "object")
    assert (declared["name"], declared["description"]) == ("read_page", "Reads a page.")
    assert declared["input_schema"]["required"] == ["path"]


async def test_results_may_have_parts_and_images_are_shown(
    client: httpx2.AsyncClient, slow: str, anthropic: Anthropic
) -> None:
    api = anthropic([Say(calls=[("read_file", {"path": "x"})]), Say("seen")])
    first = await say(client, slow, message="1")
    (call,) = first["tool_calls"]
    image = "data:image/png;base64,iVBORw0KGgo="
    parts = [
        {"kind": "text", "content": "Here it is:"},
        {"kind": "image-url", "url": image},
        {"kind": "web-url", "url": "https://example.com/page"},
    ]
    given = {"tool_call_id": call["id"], "name": "read_file"}
    talk = first["conversation_id"]
    wrong = [{**given, "content": [{"kind": "image-url", "content": "x"}]}]
    assert (await refused(client, slow, conversation_id=talk, tool_results=wrong))[0] == 400
    assert await say(client, slow, conversation_id=talk, tool_results=[{**given, "content": parts}])
    blocks = api.requests[-1]["messages"][-1]["content"]
    assert image.partition(",")[2] in json.dumps(blocks)
    assert "[web] https://example.com/page" in json.dumps(blocks)
    shown = (await client.get(f"/api/v1/conversations/{talk}")).json()["messages"][2]
    assert "[image: image/png, 8 bytes]" in shown["content"]
    assert api.complaints == []


async def test_scopes_say_who_may_read_change_and_chat(served: Served, client: httpx2.AsyncClient, config: str) -> None:
    made = await client.post("/api/v1/keys", json={"name": "reader", "scopes": ["agents:read"]})
    async with served.client(made.json()["text"]) as reader:
        assert (await reader.get(f"/api/v1/configs/{config}")).status_code == 200
        assert (await reader.patch(f"/api/v1/configs/{config}", json={})).status_code == 403
        status, told = await refused(reader, config, message="Hello")
        assert (status, "the scope 'chat'" in told) == (403, True)


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("chat", {"message": "x", "conversation_id": "123"}, "is not the id of a conversation, such as 01a1ed9d-"),
        ("chat", {"tool_results": []}, "tool_results: it should have at least 1 item, not 0"),
        ("configs", {"tools_config": ["a b"]}, "tools_config.0: the name of a tool has 1 to 64 letters, digits, '_'"),
        ("configs", {"name": "a\nb"}, "name: a name has 1 to 100 characters, all of one line"),
        (
            "configs",
            {"model_config": {"provider": "A", "model": "b"}},
            "provider: the name of a provider has lower-case",
        ),
        (
            "configs",
            {"provisioning_bundle": {"url": "x", "sha256": "y"}},
            "sha256: it is not a SHA-256: 64 hexadecimal",
        ),
    ],
)
async def test_what_a_field_refuses_is_said_in_words(
    client: httpx2.AsyncClient, slow: str, path: str, body: dict[str, Any], told: str
) -> None:
    if path == "configs":
        answer = await client.patch(f"/api/v1/configs/{slow}", json=body)
    else:
        answer = await client.post(f"/api/v1/chat/{slow}", json=body)
    assert answer.status_code == 400
    message = answer.json()["message"]
    assert told in message
    assert not re.search(r"pattern|constrained|ToolDeclaration|should match|\[A-Z", message)
