"""Turns of programs that were written for hosted programmatic calling, with Anthropic's client as it is."""

from __future__ import annotations

import json

import anyio
import pytest

from atoll import CodeConfig, Engine
from tests.messages.serving import (
    CODE,
    NOW,
    SALES,
    HostedClient,
    Tools,
    answers,
    blocks,
    client,
    runs,
    says,
    script,
    serving,
    text,
)

pytestmark = pytest.mark.anyio
AMOUNTS = {"east": 10, "west": 30, "north": 20}
LOOP = """
import json
best = None
for region in ("east", "west", "north"):
    row = json.loads(await query_sales({"region": region}))
    if best is None or row["amount"] > best["amount"]:
        best = row
        if row["amount"] >= 30:
            break
print(best["region"])
"""
GATHER = """
import asyncio, json
rows = await asyncio.gather(*(query_sales({"region": region}) for region in ("east", "west", "north")))
print(sum(json.loads(row)["amount"] for row in rows))
"""


def query_sales(region: str) -> str:
    return json.dumps({"region": region, "amount": AMOUNTS[region], "padding": "x" * 1000})


TOOLS: Tools = {"query_sales": query_sales, "now": lambda: "12:00"}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streaming"])
async def test_a_paused_turn_is_resumed_until_code_and_model_have_ended(host: Engine, streams: bool) -> None:
    model = script(runs(LOOP, text="I look it up."), says("In the west.", "west"))
    async with serving(host, model) as url, client(url) as anthropic:
        program = HostedClient(anthropic, streams=streams)
        last = await program.run("Where was the most sold?", TOOLS)
        first = program.messages[1]["content"]
        assert [block.type for block in first] == ["text", "server_tool_use", "tool_use"]
        assert first[1].id.startswith("srvtoolu_")
        assert (first[1].name, first[1].input) == ("code_execution", {"code": LOOP})
        assert first[2].caller.model_dump() == {"type": "code_execution_20260120", "tool_id": first[1].id}
        assert [[call.input for call in calls] for calls in program.pauses] == [
            [{"region": "east"}],
            [{"region": "west"}],
        ]
        assert blocks(last) == ["code_execution_tool_result", "text"]
        assert last.content[0].tool_use_id == first[1].id
        result = last.content[0].content
        assert (result.type, result.stdout, result.stderr, result.return_code) == (
            "code_execution_result",
            "west\n",
            "",
            0,
        )
        assert (text(last), last.stop_reason, last.model) == ("In the west.", "end_turn", "claude-opus-5")
        assert last.container.id == program.container
        assert last.container.expires_at.tzinfo is not None
        assert streams or last._request_id.startswith("req_")
        assert last.usage.output_tokens > 0


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streaming"])
async def test_parallel_calls_come_in_one_pause(host: Engine, streams: bool) -> None:
    async with serving(host, script(runs(GATHER), says("60.", "60"))) as url, client(url) as anthropic:
        program = HostedClient(anthropic, streams=streams)
        await program.run("How much was sold?", TOOLS)
        [calls] = program.pauses
        assert sorted(call.input["region"] for call in calls) == ["east", "north", "west"]
        assert len({call.caller.tool_id for call in calls}) == 1


async def test_variables_persist_in_a_container_and_results_of_calls_are_not_shown_to_the_model(host: Engine) -> None:
    model = script(runs(LOOP), says("West.", "west"), runs("print(best['amount'])"), says("It was 30.", "30"))
    async with serving(host, model) as url, client(url) as anthropic:
        program = HostedClient(anthropic)
        await program.run("Where?", TOOLS)
        container = program.container
        last = await program.run("How much?", TOOLS)
        assert (text(last), program.container) == ("It was 30.", container)
        assert blocks(last) == ["server_tool_use", "code_execution_tool_result", "text"]


@pytest.mark.parametrize("code", [GATHER, "print(60)"], ids=["paused", "not paused"])
async def test_calls_of_the_model_itself_pass_through_beside_code(host: Engine, code: str) -> None:
    results = ("12:00", "60") if code == GATHER else ("60", "12:00")
    model = script(runs(code, {"tool": "now"}, tools=["now"]), says("60 at noon.", *results))
    async with serving(host, model) as url, client(url) as anthropic:
        program = HostedClient(anthropic, tools=[CODE, SALES, NOW])
        last = await program.run("How much, and when?", TOOLS)
        assert text(last) == "60 at noon."
        [calls] = program.pauses
        callers = sorted(call.caller.type for call in calls)
        assert callers == ["code_execution_20260120"] * 3 * (code == GATHER) + ["direct"]
        assert program.messages[1]["content"][0].type == "server_tool_use"


async def test_code_of_one_answer_runs_one_after_the_other_also_over_a_pause(host: Engine) -> None:
    second = {"tool": "execute_code", "input": {"code": "print(best['region'], 'again')"}}
    async with (
        serving(host, script(runs(LOOP, second), says("Twice.", "west", "west again"))) as url,
        client(url) as anthropic,
    ):
        program = HostedClient(anthropic)
        last = await program.run("Where?", TOOLS)
        assert blocks(last) == ["code_execution_tool_result", "code_execution_tool_result", "text"]


async def test_an_error_of_the_code_is_a_result_and_a_failed_call_can_be_caught(host: Engine) -> None:
    asks = "await query_sales({'region': 'east'})"
    catches = f"try:\n    {asks}\nexcept ToolError as error:\n    print('caught:', error)\n1 / 0"
    async with (
        serving(host, script(runs(catches), says("It failed.", "ZeroDivisionError"))) as url,
        client(url) as anthropic,
    ):
        program = HostedClient(anthropic)
        program.messages.append({"role": "user", "content": "Go"})
        paused = await program.create()
        result = answers({paused.content[-1].id: "no such table"})
        result["content"][0]["is_error"] = True
        program.messages.append(result)
        last = await program.create()
        output = last.content[0].content
        assert (output.stdout, output.return_code) == ("caught: no such table\n", 1)
        assert "ZeroDivisionError" in output.stderr
        assert text(last) == "It failed."


async def test_a_call_that_is_not_answered_is_a_timeout_in_the_code(host: Engine) -> None:
    waits = "try:\n    await query_sales({'region': 'east'})\nexcept TimeoutError as error:\n    print(error)"
    model = script(runs(waits), says("Too late.", "not answered"))
    async with serving(host, model, call_timeout_s=0.1) as url, client(url) as anthropic:
        program = HostedClient(anthropic)
        program.messages.append({"role": "user", "content": "Go"})
        paused = await program.create()
        await anyio.sleep(0.2)
        program.messages.append(answers({paused.content[-1].id: "late"}))
        last = await program.create()
        assert last.content[0].tool_use_id == paused.content[0].id
        assert "query_sales was not answered within 0.1 s" in last.content[0].content.stdout


async def test_time_in_which_code_waits_for_the_client_does_not_count(host: Engine) -> None:
    model = script(
        runs("await query_sales({'region': 'east'})\nprint('on')"),
        says("On.", "on"),
        runs("while True: pass"),
        says("Over.", "its time was over"),
    )
    async with serving(host, model, config=CodeConfig(timeout_s=0.5)) as url, client(url) as anthropic:
        program = HostedClient(anthropic)
        program.messages.append({"role": "user", "content": "Go"})
        paused = await program.create()
        await anyio.sleep(0.6)
        program.messages.append(answers({paused.content[-1].id: "late"}))
        assert (await program.create()).content[0].content.stdout == "on\n"
        last = await program.run("Again", TOOLS)
        assert last.content[1].content.model_dump() == {
            "type": "code_execution_tool_result_error",
            "error_code": "execution_time_exceeded",
        }
