"""The loop with the real Anthropic client, through pydantic-ai, against a server that speaks the Messages API."""

from __future__ import annotations

import base64
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

import atoll
from atoll.agents.events import (
    AgentEvent,
    RetryEvent,
    TextEvent,
    ThinkingEvent,
    ToolCallEvent,
    ToolResultEvent,
    UsageEvent,
)
from atoll.contract.errors import BudgetExceeded, ModelFailed, ModelUnavailable
from atoll.tools.tool import Input, TextPart, Tool, ToolResult, ToolSet
from tests.agents.conftest import Anthropic
from tests.agents.messages_api import OVERLOADED, Raw, Refuse, Say
from tests.tools.test_coding import IMAGES

if TYPE_CHECKING:
    from atoll.runtime.sandbox_pool import SandboxPool

pytestmark = pytest.mark.anyio
# Unknown to pydantic-ai, and so asked without a stream when no stream is wanted.
MODEL = "anthropic:claude-of-the-tests"


async def play(
    pool: SandboxPool, prompt: str, *, streams: bool, **options: Any
) -> tuple[atoll.Answer, list[AgentEvent]]:
    agent = atoll.Agent(MODEL, pool.tools(), "Be brief.")
    events: list[AgentEvent] = []
    if not streams:
        return await agent.run(prompt, on_event=events.append, **options), events
    async with agent.stream(prompt, **options) as stream:
        events = [event async for event in stream]
    return stream.answer, events


def results(request: dict[str, Any]) -> list[dict[str, Any]]:
    return [block for block in request["messages"][-1]["content"] if block["type"] == "tool_result"]


def said(result: dict[str, Any]) -> str:
    (block,) = result["content"]
    return str(block["text"])


def texts(events: list[AgentEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextEvent))


@pytest.mark.parametrize("streams", [True, False], ids=["streaming", "whole"])
async def test_parallel_calls_run_and_their_results_come_back_in_one_message(
    pool: SandboxPool, anthropic: Anthropic, streams: bool
) -> None:
    api = anthropic(
        [
            Say(
                "Both at once.",
                [
                    ("shell", {"command": "echo one"}),
                    ("shell", {"command": "echo two >&2; exit 3"}),
                    ("read_file", {"path": "/no/such/file"}),
                ],
            ),
            Say("All is done."),
        ]
    )
    answer, events = await play(pool, "Do it", streams=streams)
    assert api.complaints == []
    assert (answer.text, answer.ended, answer.steps) == ("All is done.", "done", 2)
    assert answer.tokens == atoll.Tokens(input=200, output=40)

    first, second = api.requests
    assert first.get("stream", False) is streams
    assert first["model"] == "claude-of-the-tests"
    assert "Be brief." in str(first["system"])
    assert {tool["name"] for tool in first["tools"]} == {tool.name for tool in pool.tools()}
    one, two, three = results(second)
    assert said(one) == "one\n"
    assert said(two) == "two\n[exit code 3]"
    assert [result.get("is_error", False) for result in (one, two, three)] == [False, False, True]
    assert "/no/such/file" in str(three["content"])

    assert texts(events) == "Both at once.All is done."
    calls = [event for event in events if isinstance(event, ToolCallEvent)]
    assert [call.input.get("command") for call in calls if isinstance(call.input, dict)] == [
        "echo one",
        "echo two >&2; exit 3",
        None,
    ]
    done = {event.id: event.result.is_error for event in events if isinstance(event, ToolResultEvent)}
    assert done == {call.id: call.tool == "read_file" for call in calls}
    assert [event.step for event in events if isinstance(event, UsageEvent)] == [1, 2]


async def test_an_image_that_a_tool_reads_is_sent_as_an_image(pool: SandboxPool, anthropic: Anthropic) -> None:
    data = IMAGES["a.png"][0]
    await (await pool.get()).files.write_bytes("plot.png", data)
    api = anthropic([Say("I look.", [("read_file", {"path": "plot.png"})]), Say("A dot.")])
    answer, _ = await play(pool, "What is on it?", streams=True)
    assert (answer.text, api.complaints) == ("A dot.", [])
    (result,) = results(api.requests[1])
    assert [block["type"] for block in result["content"]] == ["text", "image"]
    source = result["content"][1]["source"]
    assert (source["media_type"], base64.b64decode(source["data"])) == ("image/png", data)


@pytest.mark.parametrize("streams", [True, False], ids=["streaming", "whole"])
async def test_an_overloaded_provider_is_asked_again(pool: SandboxPool, anthropic: Anthropic, streams: bool) -> None:
    api = anthropic([OVERLOADED, OVERLOADED, Say("Here I am.")])
    answer, _ = await play(pool, "Hello", streams=streams)
    assert answer.text == "Here I am."
    assert len(api.requests) == 3


@pytest.mark.parametrize("breaks", ["overloaded", "drops", "ends"])
async def test_an_answer_that_breaks_off_is_asked_for_again(
    pool: SandboxPool, anthropic: Anthropic, breaks: str
) -> None:
    api = anthropic([Say("Half of", breaks=breaks), Say("A whole answer.")])
    answer, events = await play(pool, "Hello", streams=True)
    assert answer.text == "A whole answer."
    assert len(api.requests) == 2
    assert [type(event) for event in events] == [TextEvent, TextEvent, RetryEvent, *[TextEvent] * 3, UsageEvent]
    assert [event.reason for event in events if isinstance(event, RetryEvent)] == [
        "the provider is overloaded; try again later (Overloaded)"
        if breaks == "overloaded"
        else f"the provider cannot be reached at {os.environ['ANTHROPIC_BASE_URL']}, or the connection was lost"
    ]


async def test_one_that_stays_overloaded_is_unavailable_and_nothing_is_lost(
    pool: SandboxPool, anthropic: Anthropic
) -> None:
    history = atoll.History()
    anthropic([Say("I look.", [("shell", {"command": "echo here"})]), *[OVERLOADED] * 3])
    with pytest.raises(ModelUnavailable, match="overloaded; try again later") as raised:
        await play(pool, "Hello", streams=False, history=history)
    assert raised.value.retryable
    api = anthropic([Say("Found.")])
    answer, _ = await play(pool, None, streams=False, history=history)  # type: ignore[arg-type]
    assert answer.text == "Found."
    assert "here" in str(results(api.requests[0])[0]["content"])


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (Refuse(401, "authentication_error", "invalid x-api-key"), "API key was refused"),
        (Refuse(404, "not_found_error", "model: claude-of-the-tests"), "no model of this name"),
        (Refuse(400, "invalid_request_error", "prompt is too long: 9 tokens > 8 maximum"), "start a new one"),
        (Refuse(400, "invalid_request_error", "tools.0: nonsense"), "refused .*tools.0: nonsense"),
    ],
)
async def test_a_request_that_is_refused_says_why(
    pool: SandboxPool, anthropic: Anthropic, refusal: Refuse, words: str
) -> None:
    anthropic([refusal])
    with pytest.raises(ModelFailed, match=words) as raised:
        await play(pool, "Hello", streams=True)
    assert not raised.value.retryable


async def test_thinking_is_an_event_of_its_own_and_is_sent_back(pool: SandboxPool, anthropic: Anthropic) -> None:
    api = anthropic([Say("Hm.", [("shell", {"command": "true"})], thinking="Let me see"), Say("Yes.")])
    answer, events = await play(pool, "Hello", streams=True)
    assert answer.text == "Yes."
    assert "".join(event.text for event in events if isinstance(event, ThinkingEvent)) == "Let me see"
    given_back = api.requests[1]["messages"][1]["content"][0]
    assert (given_back["type"], given_back["signature"]) == ("thinking", "c2lnbmVk")


async def test_a_call_that_was_cut_off_is_not_made(pool: SandboxPool, anthropic: Anthropic) -> None:
    calls = [("shell", {"command": "echo whole"}), ("shell", {"command": "echo this one is too long"})]
    api = anthropic([Say("", calls, stop_reason="max_tokens", cuts_call=True), Say("Shorter.")])
    answer, events = await play(pool, "Hello", streams=True)
    assert answer.text == "Shorter."
    whole, cut = results(api.requests[1])
    assert "whole" in str(whole["content"])
    assert cut["is_error"]
    assert "reached the output limit" in str(cut["content"])
    assert any(isinstance(event, ToolCallEvent) and isinstance(event.input, str) for event in events)


async def test_a_call_of_an_answer_that_was_withheld_is_not_made(pool: SandboxPool, anthropic: Anthropic) -> None:
    api = anthropic([Say("", [("shell", {"command": "echo done"})], stop_reason="refusal"), Say("Well.")])
    await play(pool, "Hello", streams=True)
    (withheld,) = results(api.requests[1])
    assert withheld["is_error"]
    assert "withheld the rest of the answer" in str(withheld["content"])


async def test_a_call_of_a_stream_that_ended_in_its_middle_is_not_made(pool: SandboxPool, anthropic: Anthropic) -> None:
    api = anthropic([Say("", [("shell", {"command": "echo done"})], breaks="ends"), Say("Well.")])
    answer, events = await play(pool, "Hello", streams=True)
    assert (answer.text, len(api.requests)) == ("Well.", 2)
    assert not any(isinstance(event, ToolCallEvent) for event in events)


@pytest.mark.parametrize("streams", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize(
    "said",
    [
        Say("", [("functions.shell", {}), ("", {}), ("x" * 300, {}), ("\ud800\x1b", {})]),
        Say("", [("shell", [1]), ("shell", 3), ("shell", "x"), ("shell", None), ("shell", {"command": None})]),
        Say("", [("shell", {"command": float("nan")}), ("shell", {"timeout_ms": float("inf")})]),
        Say("", [("shell", {"command": json.loads("[" * 300 + "]" * 300)})]),
        Say("", [("shell", {"timeout_ms": 10**4299})]),
        Say("", [("sandbox_list", {}), ("sandbox_list", {}), ("sandbox_list", {})], id="same"),
        Say("", [("sandbox_list", {})], id="\ud800"),
        Say(" \n", [("sandbox_list", {})]),
    ],
    ids=["names", "no objects", "no numbers", "depth", "digits", "the same ids", "no id", "blank text"],
)
async def test_what_a_provider_would_refuse_to_hear_again_does_not_end_a_conversation(
    pool: SandboxPool, anthropic: Anthropic, said: Say, streams: bool
) -> None:
    history = atoll.History()
    api = anthropic([said, Say("Well.")])
    answer, events = await play(pool, "Hello", streams=streams, history=history)
    assert (answer.text, api.complaints) == ("Well.", [])
    assert len({event.id for event in events if isinstance(event, ToolResultEvent)}) == len(said.calls)
    json.dumps([event.model_dump(mode="json") for event in events], allow_nan=False)
    assert len(atoll.History.parse(history.dump())) == 4


@pytest.mark.parametrize("said", ["", " \n", ToolResult(content=()), ToolResult(content=(TextPart(text=""),))])
async def test_a_result_that_says_nothing_is_given_as_such(anthropic: Anthropic, said: str | ToolResult) -> None:
    async def handle(ask: Input, context: None) -> str | ToolResult:
        return said

    api = anthropic([Say("", [("mute", {})]), Say("Well.")])
    answer = await atoll.Agent(MODEL, ToolSet([Tool("mute", "Says nothing.", Input, None, handle)])).run("Hello")
    assert (answer.text, api.complaints) == ("Well.", [])
    assert results(api.requests[1])[0]["content"][0]["text"] == "[blank]"


@pytest.mark.parametrize("streams", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize(
    "body",
    [
        "<html>Log in",
        "null",
        "[" * 100_000,
        '{"type": "message", "content": null}',
        'event: message_start\ndata: {"type": "message_start", "message": 5}\n\n',
        'event: content_block_delta\ndata: {"type": "content_block_stop", "index": 7}\n\n',
    ],
)
async def test_an_invalid_answer_is_an_error(pool: SandboxPool, anthropic: Anthropic, body: str, streams: bool) -> None:
    anthropic([Raw(body)])
    with pytest.raises(ModelFailed, match=r"^claude-of-the-tests: "):
        await play(pool, "Hello", streams=streams)


async def test_an_answer_that_is_too_long_says_that_it_was_cut(pool: SandboxPool, anthropic: Anthropic) -> None:
    anthropic([Say("And so on and", stop_reason="max_tokens")])
    answer, _ = await play(pool, "Tell me everything", streams=True)
    assert (answer.text, answer.ended) == ("And so on and", "length")


async def test_a_budget_of_tokens_ends_the_run_before_its_next_calls(pool: SandboxPool, anthropic: Anthropic) -> None:
    history = atoll.History()
    call = ("write_file", {"path": "counted", "content": "x", "append": True})
    anthropic([Say("One.", [call]), Say("Two.", [call], input_tokens=900), Say("Never.")])
    with pytest.raises(BudgetExceeded, match="500 tokens"):
        await play(pool, "Hello", streams=True, history=history, budget=500)
    box = await pool.get()
    assert await box.files.read_text("/home/user/counted") == "x"
    api = anthropic([Say("I see.")])
    answer, _ = await play(pool, "Go on", streams=True, history=history)
    assert answer.text == "I see."
    assert api.complaints == []
    assert "token budget is spent" in str(api.requests[0]["messages"][-1]["content"])


async def test_what_is_repeated_is_marked_for_the_providers_cache(pool: SandboxPool, anthropic: Anthropic) -> None:
    api = anthropic([Say("Hello.")])
    await play(pool, "Hello", streams=True)
    assert "ephemeral" in str(api.requests[0])
