"""What the model behind is asked, and what becomes of its answers and its errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import anthropic
import pytest
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ThinkingPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from atoll import Engine
from atoll.agents import models
from tests.agents.messages_api import OVERLOADED, Refuse, Say, serving as anthropic_serving
from tests.messages.serving import (
    CODE,
    NOW,
    SALES,
    HostedClient,
    Tools,
    blocks,
    client,
    runs,
    says,
    script,
    serving,
    text,
)

pytestmark = pytest.mark.anyio
CODE_TWICE = "for region in ('east', 'west'):\n    print(await query_sales({'region': region}))"
TOOLS: Tools = {"query_sales": lambda region: f"[{region}]", "now": lambda: "12:00"}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streaming"])
async def test_the_real_api_accepts_what_a_turn_becomes(
    host: Engine, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    """Behind is a server that is as strict about results, roles and ids as the real one."""
    said = [
        Say("I look.", [("execute_code", {"code": CODE_TWICE}), ("now", {})], thinking="Hm."),
        Say("", [("execute_code", {"code": "print('again')"})]),
        Say("All seen."),
        Say("Nothing more."),
    ]
    with anthropic_serving(said) as api:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", api.url)
        monkeypatch.setenv("ANTHROPIC_API_KEY", "test-key")
        model = models.resolve("anthropic:claude-of-the-tests")
        async with serving(host, model) as url, client(url) as anthropic:
            program = HostedClient(anthropic, streams=streams, tools=[CODE, SALES, NOW], system="Be brief.")
            last = await program.run("Look", TOOLS)
            assert text(last) == "All seen."
            assert last.usage.input_tokens == 200
            assert last.usage.output_tokens == 40
            await program.run("And?", TOOLS)
        assert api.complaints == []
        first, second, _, fourth = api.requests
        assert first["max_tokens"] == 1000
        assert "Be brief." in str(first["system"])
        assert [tool["name"] for tool in first["tools"]] == ["execute_code", "now"]
        assert "async def query_sales(input: dict) -> str" in first["tools"][0]["description"]
        assert second["messages"][-1]["content"][1]["content"][0]["text"] == "[east]\n[west]"
        thinking = second["messages"][1]["content"][0]
        assert (thinking["type"], thinking["signature"]) == ("thinking", "c2lnbmVk")
        # What was sent before is sent again byte for byte, or it would not be found in the provider's cache.
        assert stripped(fourth["messages"])[: len(second["messages"])] == stripped(second["messages"])
        assert stripped(fourth["tools"]) == stripped(first["tools"])


def stripped(value: Any) -> Any:
    """Without marks for the cache, which move."""
    if isinstance(value, dict):
        return {key: stripped(each) for key, each in value.items() if key != "cache_control"}
    return [stripped(each) for each in value] if isinstance(value, list) else value


async def test_events_come_in_the_order_of_the_api(host: Engine) -> None:
    model = script(runs("print(1)", text="I look at it."), says("One.", "1"))
    async with serving(host, model) as url, client(url) as anthropic:
        stream: Any = await anthropic.messages.create(
            model="m", max_tokens=10, tools=[CODE], messages=[{"role": "user", "content": "Go"}], stream=True
        )
        events: list[Any] = [event async for event in stream]
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    started = [event.content_block.type for event in events if event.type == "content_block_start"]
    assert started == ["text", "server_tool_use", "code_execution_tool_result", "text"]
    assert [event.index for event in events if event.type == "content_block_stop"] == [0, 1, 2, 3]
    assert sum(kind == "content_block_delta" for kind in kinds) > 4  # text comes in pieces
    assert events[-2].delta.container.id.startswith("container_")


async def test_a_tool_that_must_be_called_is_forced_only_at_first(host: Engine) -> None:
    forced: list[Any] = []

    async def answer(messages: list[ModelMessage], about: AgentInfo) -> ModelResponse:
        forced.append((about.model_settings or {}).get("tool_choice"))
        if len(messages) == 1:
            return ModelResponse(parts=[ToolCallPart("execute_code", {"code": "print(1)"})])
        return ModelResponse(parts=[TextPart("Done.")])

    async with serving(host, FunctionModel(answer)) as url, client(url) as anthropic:
        for choice in ({"type": "any"}, {"type": "tool", "name": "code_execution"}, {"type": "none"}):
            await HostedClient(anthropic, tool_choice=choice).run("Go")
    assert forced == ["required", None, ["execute_code"], None, "none", "none"]


async def test_calls_that_cannot_be_made_are_told_to_the_model_and_not_to_the_client(host: Engine) -> None:
    model = says_parts(
        [ToolCallPart("query_sales", {"region": "east"}), ToolCallPart("now", "[1]")],
        [ToolCallPart("execute_code", {"cod": 1})],
        [TextPart("I give up.")],
    )
    async with serving(host, model) as url, client(url) as anthropic:
        last = await HostedClient(anthropic, tools=[CODE, SALES, NOW]).run("Go", TOOLS)
        assert blocks(last) == ["server_tool_use", "code_execution_tool_result", "text"]
        assert last.content[1].content.error_code == "invalid_tool_input"
        assert last.container is None


async def test_an_answer_that_was_cut_is_not_executed(host: Engine) -> None:
    cut = ModelResponse(parts=[TextPart("I"), ToolCallPart("execute_code", '{"code": "pri')], finish_reason="length")

    async def answer(messages: list[ModelMessage], about: AgentInfo) -> ModelResponse:
        return cut

    async with serving(host, FunctionModel(answer)) as url, client(url) as anthropic:
        last = await HostedClient(anthropic).run("Go")
        assert (blocks(last), last.stop_reason) == (["text"], "max_tokens")


async def test_a_turn_that_takes_too_many_steps_is_paused_and_can_go_on(host: Engine) -> None:
    model = script(runs("print(1)"), runs("print(2)"), says("Done.", "2"))
    async with serving(host, model, steps=2) as url, client(url) as anthropic:
        program = HostedClient(anthropic)
        assert (await program.run("Go")).stop_reason == "pause_turn"
        assert text(await program.create()) == "Done."


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streaming"])
async def test_errors_of_the_model_say_nothing_of_what_is_behind(
    host: Engine, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    with anthropic_serving([OVERLOADED] * 9) as api:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", api.url)
        monkeypatch.setenv("ANTHROPIC_API_KEY", "test-key")
        model = models.resolve("anthropic:claude-of-the-tests")
        async with serving(host, model) as url, client(url) as anthropic_client:
            with pytest.raises(anthropic.APIStatusError) as caught:
                await HostedClient(anthropic_client, streams=streams).run("Go")
    body: Any = caught.value.body
    assert (caught.value.status_code, body["error"]["type"]) == (529, "overloaded_error")
    assert api.url not in str(body)

    # The key, the account and the choice of the model are the operator's.
    refusals = [
        Refuse(401, "authentication_error", "invalid x-api-key sk-123"),
        Refuse(403, "permission_error", "of the account secret"),
        Refuse(404, "not_found_error", "model: secret"),
    ]
    with anthropic_serving(refusals) as api:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", api.url)
        model = models.resolve("anthropic:claude-of-the-tests")
        async with serving(host, model) as url, client(url) as anthropic_client:
            for _ in refusals:
                with pytest.raises(anthropic.APIStatusError) as caught:
                    await HostedClient(anthropic_client, streams=streams).run("Go")
                body = caught.value.body
                assert body["error"] == {
                    "type": "api_error",
                    "message": "the request failed here; the server's log has the reason",
                }
        assert len(api.requests) == 3

    async def fails(messages: list[ModelMessage], about: AgentInfo) -> ModelResponse:
        raise ModelHTTPError(401, "secret-model", body={"error": {"message": "bad key sk-123"}})

    async def fails_late(messages: list[ModelMessage], about: AgentInfo) -> AsyncIterator[str]:
        yield "Well"
        raise ModelHTTPError(401, "secret-model", body={"error": {"message": "bad key sk-123"}})

    async with serving(host, FunctionModel(fails, stream_function=fails_late)) as url, client(url) as anthropic_client:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await HostedClient(anthropic_client, streams=streams).run("Go")
    body = caught.value.body
    assert body["error"]["type"] == "api_error"
    assert "secret" not in str(body)
    assert "sk-" not in str(body)


def says_parts(*answers: Sequence[Any]) -> FunctionModel:
    async def answer(messages: list[ModelMessage], about: AgentInfo) -> ModelResponse:
        number = sum(isinstance(message, ModelResponse) for message in messages)
        return ModelResponse(parts=list(answers[number]))

    return FunctionModel(answer)


async def test_what_a_provider_needs_of_its_thinking_comes_back_to_it(host: Engine) -> None:
    thought = ThinkingPart("Hm.", id="rs_1", signature="sealed", provider_name="openai", provider_details={"a": [1]})
    seen: list[ThinkingPart] = []

    async def answer(messages: list[ModelMessage], about: AgentInfo) -> ModelResponse:
        seen.extend(part for message in messages for part in message.parts if isinstance(part, ThinkingPart))
        return ModelResponse(parts=[thought, TextPart("Hello.")])

    async with serving(host, FunctionModel(answer)) as url, client(url) as anthropic:
        program = HostedClient(anthropic)
        first = await program.run("Hello")
        await program.run("Again")
        assert seen == [thought]
        program.messages[1]["content"] = [{"type": "thinking", "thinking": "Hm.", "signature": "atoll1.e30x"}]
        await program.run("And again")
        assert seen[1] == ThinkingPart("Hm.")
        assert blocks(first) == ["thinking", "text"]
