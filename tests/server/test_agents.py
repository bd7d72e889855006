"""What is stored of agents: configs in versions, secrets, turns message by message, and those that a process left."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import sqlalchemy as sa
from pydantic import SecretStr
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.usage import RequestUsage

from atoll.agents.events import TextEvent, Tokens
from atoll.contract.errors import ConfigNotFound, Conflict, ConversationNotFound, InvalidRequest
from atoll.contract.model import Limits
from atoll.contract.network import NetworkPolicy
from atoll.contract.secret import Secret
from atoll.server import chat, configs
from atoll.server.chat import MAX_EVENT_BYTES, TurnRun
from atoll.server.configs import AgentConfig, AgentDefinition
from atoll.server.conversations import OpenTurn
from atoll.server.server import Server
from atoll.server.tables import agent_configs, bundles, chat_messages, chat_turns, conversations
from atoll.server.tenants import Tenant, TenantPolicy
from atoll.server.turns import ChatInput
from atoll.settings import Settings
from tests.serve.test_platform_contract import packed

SCRIPT = {"step": [{"call": [{"tool": "look", "input": {"at": 1}}]}, {"text": "Seen."}]}
CALLS = [ToolCallPart("look", {"at": 1}, "call_1"), ToolCallPart("look", {"at": 2}, "call_2")]


@pytest.fixture
async def server(settings: Settings, tmp_path: Path) -> AsyncIterator[Server]:
    (tmp_path / "script.json").write_text(json.dumps(SCRIPT))
    async with Server.open(settings.model_copy(update={"agent_models": f"script:{tmp_path}/*"})) as server:
        yield server


@pytest.fixture
async def tenant(server: Server) -> Tenant:
    return await server.tenants.get("default")


def definition(tmp_path: Path, **fields: Any) -> AgentDefinition:
    model = {"provider": "script", "model": f"{tmp_path}/script.json"}
    return AgentDefinition.model_validate({"name": "Eye", "model": model, "tools_config": ("look",), **fields})


@pytest.fixture
async def config(server: Server, tenant: Tenant, tmp_path: Path) -> AgentConfig:
    return await server.configs.create(tenant, definition(tmp_path), {})


def answer(*parts: Any) -> ModelResponse:
    return ModelResponse(parts=list(parts), usage=RequestUsage(input_tokens=10, output_tokens=5))


async def begin(server: Server, config: AgentConfig, message: str = "Look.", **options: Any) -> OpenTurn:
    given = {"conversation": None, "request": "request", **options}
    return await server.conversations.begin("default", config, message, **given)


def contents(message: ModelMessage) -> list[object]:
    return [getattr(part, "content", None) for part in message.parts]


async def roles(server: Server, turn: OpenTurn) -> list[str]:
    return [message.role for message in await server.conversations.messages(turn.conversation)]


async def test_a_turn_is_stored_message_by_message(server: Server, config: AgentConfig) -> None:
    stored = server.conversations
    turn = await begin(server, config)
    assert await roles(server, turn) == ["user"]
    spent = await stored.answered(turn, answer(*CALLS), status="running")
    assert (spent.of_turn, spent.of_config, spent.of_tenant) == (15, 15, 15)
    await stored.add_result(turn, ToolReturnPart("look", "second", "call_2"))
    assert await roles(server, turn) == ["user", "assistant", "tool"]
    await stored.add_result(turn, ToolReturnPart("look", "first", "call_1"))
    await stored.end(turn.id, "interrupted")
    turn = await stored.resume("default", config, turn.conversation, request="again")
    assert contents(turn.history[-1]) == ["first", "second"]
    await stored.answered(turn, answer(TextPart("Seen.")), status="done")
    shown = await stored.turn("default", config.id, turn.id)
    assert (shown.status, shown.response, shown.steps, shown.usage.total) == ("done", "Seen.", 2, 30)
    assert (await server.configs.get("default", config.id)).tokens_spent == 30


async def test_of_a_process_that_died_calls_without_results_are_interrupted_and_none_is_lost(
    server: Server, settings: Settings, config: AgentConfig
) -> None:
    """As if the process of `server` had been killed: its lock is gone, its rows are there."""
    turn = await begin(server, config)
    await server.conversations.answered(turn, answer(*CALLS), status="running")
    await server.conversations.add_result(turn, ToolReturnPart("look", "first", "call_1"))
    with pytest.raises(Conflict, match="is under way"):
        await begin(server, config, conversation=turn.conversation)
    async with Server.open(settings) as next_one:
        assert (await next_one.conversations.turn("default", config.id, turn.id)).status == "running"
        await server.idempotency.aclose()
        assert (await next_one.conversations.turn("default", config.id, turn.id)).status == "interrupted"
        await next_one.conversations.recover()
        shown = await next_one.conversations.messages(turn.conversation)
        assert [(each.tool_call_id, each.outcome) for each in shown if each.role == "tool"] == [
            ("call_1", "success"),
            ("call_2", "interrupted"),
        ]
        resumed = await next_one.conversations.resume("default", config, turn.conversation, request="again")
        assert (resumed.id, resumed.steps, resumed.tokens.total) == (turn.id, 1, 15)
        await next_one.conversations.recover()
        assert (await next_one.conversations.turn("default", config.id, turn.id)).status == "running"
        assert len(await next_one.conversations.messages(turn.conversation)) == len(shown)


async def test_a_turn_of_a_dead_process_makes_way_for_the_next_message(
    server: Server, settings: Settings, config: AgentConfig
) -> None:
    turn = await begin(server, config)
    await server.idempotency.aclose()
    async with Server.open(settings) as next_one:
        later = await begin(next_one, config, "Again.", conversation=turn.conversation, request="later")
        (request,) = later.history
        assert contents(request) == ["Look.", "Again."]
        assert await next_one.conversations.turn_of_request("default", config.id, "later") == later.id


async def test_of_many_messages_at_once_one_begins_a_turn(server: Server, config: AgentConfig) -> None:
    first = await begin(server, config)
    await server.conversations.answered(first, answer(TextPart("Seen.")), status="done")
    begun: list[OpenTurn] = []
    refused: list[Conflict] = []

    async def again() -> None:
        try:
            begun.append(await begin(server, config, conversation=first.conversation))
        except Conflict as error:
            refused.append(error)

    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(again)
    assert (len(begun), len(refused)) == (1, 19)


async def test_chat_runs_turns_and_those_that_are_under_way_are_interrupted_by_its_end(
    server: Server, tenant: Tenant, config: AgentConfig
) -> None:
    first = await (await server.chat.start(tenant, config.id, ChatInput(message="Look."), request="a")).answer()
    (call,) = first.tool_calls
    results = [ToolReturnPart("look", "something", call.id)]
    given = ChatInput(conversation=first.conversation_id, results=results)
    run = await server.chat.start(tenant, config.id, given, request="b")
    assert (await run.answer()).response == "Seen."
    assert await server.chat.answer("default", config.id, first.turn_id) == await run.answer()
    await server.chat.aclose()
    with pytest.raises(Conflict, match="stopping"):
        await server.chat.start(tenant, config.id, ChatInput(message="Look."), request="c")


async def test_what_is_removed_takes_everything_with_it(server: Server, config: AgentConfig) -> None:
    turn = await begin(server, config)
    with pytest.raises(ConversationNotFound):
        await server.conversations.delete("other", turn.conversation)
    await server.conversations.delete("default", turn.conversation)
    with pytest.raises(ConversationNotFound):
        await server.conversations.answered(turn, answer(TextPart("late")), status="done")
    await begin(server, config)
    await server.chat.delete_config("default", config.id)
    with pytest.raises(ConfigNotFound):
        await server.configs.get("default", config.id)
    async with server.database.read() as connection:
        for table in (agent_configs, conversations, chat_turns, chat_messages):
            assert (await connection.execute(sa.select(sa.func.count()).select_from(table))).scalar_one() == 0


async def test_a_tenant_takes_its_agents_and_bundles_with_it(server: Server, tmp_path: Path) -> None:
    acme = await server.tenants.create("acme", policy=TenantPolicy(images=("host",)))
    bundle, _ = await server.bundles.add("acme", _in_pieces(packed()))
    given = {"provisioning_bundle": {"url": bundle.url, "sha256": bundle.sha256}}
    tools = ("read_file", "write_file")
    made = definition(tmp_path, agent_type="sandboxed", tools_config=tools, **given)
    config = await server.configs.create(acme, made, {})
    with pytest.raises(Conflict, match="config"):
        await server.bundles.delete("acme", bundle.bundle_id)
    await server.conversations.begin("acme", config, "Look.", conversation=None, request="request")
    with pytest.raises(InvalidRequest, match="has 1 bundles, 1 agent configs; remove them first"):
        await server.delete_tenant("acme")
    await server.delete_tenant("acme", destroy=True)
    async with server.database.read() as connection:
        for table in (agent_configs, bundles, conversations):
            assert (await connection.execute(sa.select(sa.func.count()).select_from(table))).scalar_one() == 0


async def _in_pieces(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def test_a_message_to_a_config_that_is_deleted_meanwhile_finds_none(server: Server, config: AgentConfig) -> None:
    await server.configs.delete("default", config.id)
    with pytest.raises(ConfigNotFound):
        await begin(server, config)


async def test_limits_and_network_of_a_workspace_are_changed_as_the_rest(
    server: Server, tenant: Tenant, tmp_path: Path
) -> None:
    made = await server.configs.create(tenant, definition(tmp_path, agent_type="sandboxed", tools_config=("bash",)), {})
    limits, network = Limits(memory_bytes=1 << 28), NetworkPolicy(allow=("example.com",))
    changes = {"workspace_limits": limits, "workspace_network": network}
    changed = await server.configs.update(tenant, made.id, changes, {})
    assert (changed.workspace_limits, changed.workspace_network) == (limits, network)


async def test_a_tenant_that_is_deleted_has_its_turns_cancelled(server: Server, tmp_path: Path) -> None:
    acme = await server.tenants.create("acme")
    made = await server.configs.create(acme, definition(tmp_path), {})
    asked = anyio.Event()

    async def never(*_: object) -> None:
        asked.set()
        await anyio.sleep_forever()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.chat, "_drive", never)  # a model that takes its time
        run = await server.chat.start(acme, made.id, ChatInput(message="Look."), request="a")
        await asked.wait()
    await server.delete_tenant("acme", destroy=True)
    assert run.is_cancelled
    with pytest.raises(Conflict, match="cancelled"):
        await run.answer()


async def test_of_many_turns_that_begin_at_once_no_more_run_than_a_tenant_may_have(
    server: Server, tenant: Tenant, config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "MAX_TURNS", 3)
    started: list[chat.TurnRun] = []
    refused: list[Conflict] = []

    async def never(*_: object) -> None:
        await anyio.sleep_forever()

    async def start(number: int) -> None:
        try:
            started.append(
                await server.chat.start(tenant, config.id, ChatInput(message="Look."), request=f"request-{number}")
            )
        except Conflict as error:
            refused.append(error)

    monkeypatch.setattr(server.chat, "_drive", never)
    async with anyio.create_task_group() as tasks:
        for number in range(10):
            tasks.start_soon(start, number)
    assert (len(started), len(refused)) == (3, 7)


async def test_secrets_are_encrypted_changed_one_by_one_and_shown_by_name_only(
    server: Server, tenant: Tenant, tmp_path: Path
) -> None:
    made = await server.configs.create(
        tenant,
        definition(tmp_path, agent_type="sandboxed", tools_config=("echo",)),
        {"A": SecretStr("value-of-a"), "B": Secret("value-of-b", hosts=["api.example.com"])},
    )
    assert made.workspace_secret_names == ("A", "B")
    assert "value-of" not in made.model_dump_json()
    secrets = await server.configs.secrets("default", made.id)
    assert secrets.in_clear["A"].get_secret_value() == "value-of-a"
    assert secrets.outside["B"].hosts == ("api.example.com",)
    changed = await server.configs.update(tenant, made.id, {}, {"A": None, "C": SecretStr("value-of-c")})
    assert (changed.version, changed.workspace_secret_names) == (2, ("B", "C"))
    named = await server.configs.update(tenant, made.id, {"name": "Named"}, {})
    assert named.workspace_secret_names == ("B", "C")
    assert (await server.configs.secrets("default", made.id)).version == 2
    async with server.database.read() as connection:
        stored = str((await connection.execute(sa.select(agent_configs))).all())
    assert "value-of" not in stored
    with pytest.raises(ConfigNotFound):
        await server.configs.secrets("other", made.id)
    with pytest.raises(InvalidRequest, match="has no workspace"):
        await server.configs.update(tenant, made.id, {"agent_type": "client-side", "tools_config": []}, {})


async def test_of_two_changes_at_once_one_is_told_of_the_other(
    server: Server, tenant: Tenant, config: AgentConfig
) -> None:
    outcomes: list[str] = []

    async def rename(name: str) -> None:
        try:
            await server.configs.update(tenant, config.id, {"name": name}, {}, version=1)
            outcomes.append("changed")
        except Conflict:
            outcomes.append("refused")

    async with anyio.create_task_group() as tasks:
        for name in ("One", "Two"):
            tasks.start_soon(rename, name)
    assert sorted(outcomes) == ["changed", "refused"]
    assert (await server.configs.get("default", config.id)).version == 2


async def test_a_client_that_comes_back_late_is_told_that_events_are_lost(config: AgentConfig) -> None:
    run = TurnRun(OpenTurn("turn_1", "talk", "default", config.id, 1, 0, Tokens()), streams=True)
    for number in range(4):
        run.emit(TextEvent(text=str(number) * (MAX_EVENT_BYTES // 3)))
    run.finish(ConversationNotFound("gone"))
    seen = [(id, None if event is None else event.model_dump()["text"][0]) async for id, event in run.follow("0-1")]
    assert seen == [("0-2", None), ("0-3", "2"), ("0-4", "3")]
    with pytest.raises(ConversationNotFound):
        await run.answer()


async def test_what_a_tenants_configs_take_is_bounded(
    server: Server, config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await server.tenants.get("default")
    large = {"system_prompt": "c" * 2000}
    monkeypatch.setattr(configs, "MAX_TENANT_BYTES", 4000)
    changed = await server.configs.update(tenant, config.id, large, {})
    with pytest.raises(InvalidRequest, match="with all of their versions"):
        await server.configs.update(tenant, config.id, {"name": "Other"}, {})
    monkeypatch.setattr(configs, "MAX_DEFINITION_BYTES", 1000)
    with pytest.raises(InvalidRequest, match="1000 bytes as JSON"):
        await server.configs.update(tenant, config.id, {"name": "Other"}, {})
    assert (await server.configs.get("default", config.id)).version == changed.version
