"""What a run promises, whatever the model: order, budgets, approval, cancellation, and a conversation that is whole."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, TextPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

import atoll
from atoll.agents.events import AgentEvent, TextEvent, ToolCallEvent, ToolResultEvent
from atoll.agents.loop import MAX_CALLS_PER_ANSWER
from atoll.agents.script import Script, scripted
from atoll.testing.waiting import eventually
from atoll.tools.tool import Input, Tool, ToolSet
from tests.agents.conftest import Anthropic
from tests.agents.messages_api import Say

if TYPE_CHECKING:
    from atoll.runtime.sandbox_pool import SandboxPool

pytestmark = pytest.mark.anyio


def says(*steps: dict[str, Any]) -> Any:
    """A model that says this."""
    return scripted(Script.model_validate({"step": steps}))


def calls(tool: str, **input: Any) -> dict[str, Any]:
    return {"tool": tool, "input": input}


def outcomes(history: atoll.History) -> list[str]:
    return [
        part.outcome
        for message in history.messages
        if isinstance(message, ModelRequest)
        for part in message.parts
        if isinstance(part, ToolReturnPart)
    ]


# ------------------------------------------------------------------------------------------------------------ calling


async def test_calls_of_one_step_run_side_by_side(pool: SandboxPool) -> None:
    # Each waits for the other: one after the other they would run into their time limits.
    model = says(
        {
            "call": [
                calls("shell", command="mkfifo -m 600 a b; echo x > a; cat b", timeout_ms=20000),
                calls("shell", command="while ! [ -p b ]; do sleep 0.01; done; cat a; echo y > b", timeout_ms=20000),
            ]
        },
        {"expect": {"result": [{"fields": {"exit_code": 0}}, {"fields": {"exit_code": 0}}]}, "text": "Both."},
    )
    assert (await atoll.Agent(model, pool.tools()).run("Go")).text == "Both."


async def test_writes_to_one_file_are_done_in_the_order_of_their_calls(pool: SandboxPool) -> None:
    writes = [calls("write_file", path="order", content=f"{number} ", append=True) for number in range(20)]
    await atoll.Agent(says({"call": writes}, {"text": "Done."}), pool.tools()).run("Go")
    box = await pool.get()
    assert (await box.files.read_text("/home/user/order")).split() == [str(number) for number in range(20)]


async def test_a_call_that_means_nothing_is_answered_and_the_run_goes_on(
    pool: SandboxPool, anthropic: Anthropic
) -> None:
    api = anthropic(
        [
            Say("", [("shel", {"command": "true"}), ("shell", {"comand": "true"}), ("browse", {"port": "x"})]),
            Say("I see."),
        ]
    )
    answer = await atoll.Agent("anthropic:x", pool.tools()).run("Go")
    assert answer.text == "I see."
    said = [block["content"][0]["text"] for block in api.requests[1]["messages"][-1]["content"]]
    assert "did you mean 'shell'?" in said[0]
    assert "did you mean 'command'?" in said[1]
    assert "port" in said[2]


async def test_more_calls_than_one_answer_may_make_are_not_made(pool: SandboxPool) -> None:
    writes = [calls("write_file", path=f"many/{number}", content="x") for number in range(MAX_CALLS_PER_ANSWER + 2)]
    expected = [
        *[{}] * MAX_CALLS_PER_ANSWER,
        *[{"error": True, "contains": [f"may have {MAX_CALLS_PER_ANSWER} calls"]}] * 2,
    ]
    model = says({"call": writes}, {"expect": {"result": expected}, "text": "Enough."})
    assert (await atoll.Agent(model, pool.tools()).run("Go")).text == "Enough."
    assert len(await (await pool.get()).files.list("/home/user/many")) == MAX_CALLS_PER_ANSWER


async def test_an_answer_that_its_provider_gave_up_is_asked_for_again() -> None:
    tries: list[str] = []

    async def gives_up(messages: list[ModelMessage], about: AgentInfo) -> ModelResponse:
        tries.append("x")
        return ModelResponse(parts=[TextPart("Half")], finish_reason="error" if len(tries) == 1 else "stop")

    events: list[AgentEvent] = []
    await atoll.Agent(FunctionModel(gives_up)).run("Hello", on_event=events.append)
    assert [event.type for event in events] == ["retry", "text", "usage"]


async def test_no_tools_are_a_plain_conversation() -> None:
    history = atoll.History()
    agent = atoll.Agent(says({"text": "Hello."}, {"expect": {"prompt": ["again"]}, "text": "Hello again."}))
    await agent.run("Hello", history=history)
    assert (await agent.run("And again", history=history)).text == "Hello again."
    assert await atoll.generate_text("Hello", model=says({"text": "Hi."})) == "Hi."


async def test_one_agent_has_many_conversations_at_once(pool: SandboxPool) -> None:
    agent = atoll.Agent(
        says(
            {"call": [calls("shell", command="echo $RANDOM")]},
            {"expect": {"result": [{"keep": {"out": "stdout"}}]}, "text": "${out}"},
        ),
        pool.tools(),
    )
    found: list[str] = []

    async def one() -> None:
        found.append((await agent.run("Go")).text)

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(one)
    assert len(set(found)) > 1


# ------------------------------------------------------------------------------------------------------------ budgets


async def test_steps_that_are_used_up_end_the_run_and_it_can_go_on(pool: SandboxPool) -> None:
    model = says({"call": [calls("sandbox_list")]}, {"call": [calls("sandbox_list")]}, {"text": "At last."})
    history = atoll.History()
    with pytest.raises(atoll.BudgetExceeded, match="2 steps"):
        await atoll.Agent(model, pool.tools(), steps=2).run("Go", history=history)
    assert outcomes(history) == ["success", "success"]
    assert (await atoll.Agent(model, pool.tools(), steps=2).run(None, history=history)).text == "At last."


@pytest.mark.parametrize("wrong", [0, -1])
def test_a_budget_that_lets_nothing_be_said_is_refused(wrong: int) -> None:
    with pytest.raises(atoll.InvalidRequest, match="above 0"):
        atoll.Budget(wrong)
    with pytest.raises(atoll.InvalidRequest, match="at least 1"):
        atoll.Agent(says({"text": "Hi."}), steps=wrong)


# ----------------------------------------------------------------------------------------------------------- approval


async def test_what_is_not_approved_is_not_done_and_only_what_destroys_is_asked_about(pool: SandboxPool) -> None:
    asked: list[tuple[str, Any]] = []

    async def approve(tool: Tool, input: dict[str, Any]) -> bool:
        asked.append((tool.name, input.get("path")))
        return input.get("path") != "unwanted"

    model = says(
        {
            "call": [
                calls("write_file", path="wanted", content="x"),
                calls("sandbox_list"),
                calls("write_file", path="unwanted", content="x"),
            ]
        },
        {"expect": {"result": [{}, {}, {"error": True, "contains": ["refused"]}]}, "text": "As you wish."},
    )
    events: list[AgentEvent] = []
    history = atoll.History()
    answer = await atoll.Agent(model, pool.tools(), approve=approve).run("Go", history=history, on_event=events.append)
    assert answer.text == "As you wish."
    assert asked == [("write_file", "wanted"), ("write_file", "unwanted")]
    assert outcomes(history) == ["success", "success", "denied"]
    assert sum(isinstance(event, ToolResultEvent) for event in events) == 3
    box = await pool.get()
    assert await box.files.exists("/home/user/wanted")
    assert not await box.files.exists("/home/user/unwanted")


# ------------------------------------------------------------------------------------------------------- cancellation

ENDLESS = "sleep 4711 & sleep 4711; wait"


async def is_sleeping(pool: SandboxPool) -> bool:
    return any("4711" in each.command for each in await (await pool.get()).ps())


async def test_leaving_a_stream_ends_what_runs_and_the_conversation_is_whole(pool: SandboxPool) -> None:
    history = atoll.History()
    model = says(
        {"call": [calls("sandbox_list"), calls("shell", command=ENDLESS)]},
        {"expect": {"prompt": ["on"], "result": [{}, {"error": True, "contains": ["interrupted"]}]}, "text": "I see."},
    )
    agent = atoll.Agent(model, pool.tools())
    async with agent.stream("Go", history=history) as stream:
        async for event in stream:
            if isinstance(event, ToolResultEvent):
                break
        await eventually(lambda: is_sleeping(pool), "the command runs")
    assert not await is_sleeping(pool)
    assert outcomes(history) == ["success", "interrupted"]
    history = atoll.History.parse(history.dump())
    assert (await agent.run("Go on", history=history)).text == "I see."


async def test_a_run_that_is_cancelled_ends_what_runs(pool: SandboxPool) -> None:
    history = atoll.History()
    agent = atoll.Agent(says({"call": [calls("shell", command=ENDLESS)]}), pool.tools())
    async with anyio.create_task_group() as group:

        async def run() -> None:
            await agent.run("Go", history=history)

        group.start_soon(run)
        await eventually(lambda: is_sleeping(pool), "the command runs")
        group.cancel_scope.cancel()
    assert not await is_sleeping(pool)
    assert outcomes(history) == ["interrupted"]


async def test_wherever_a_run_is_left_its_conversation_can_be_gone_on_with(anthropic: Anthropic) -> None:
    async def waits(ask: Input, context: None) -> str:
        await anyio.lowlevel.checkpoint()
        return "waited"

    api = anthropic([])
    agent = atoll.Agent("anthropic:x", ToolSet([Tool("wait", "Waits.", Input, None, waits)]))
    calls: Any = [("wait", {}), ("wait", {}), ("none", {})]
    for events in itertools.count():
        history = atoll.History()
        api.answers = [Say("I wait.", calls, thinking="Hm"), Say("", [("wait", {})]), Say("So.")]
        async with agent.stream("Go", history=history) as stream:
            for _ in range(events):
                if await anext(stream, None) is None:
                    assert events > 10
                    return
        if history:  # else it was left before it began
            api.answers = [Say("", [("wait", {})]), Say("On.")]
            answer = await agent.run("Go on", history=atoll.History.parse(history.dump()))
            assert (answer.text, api.complaints) == ("On.", []), f"left after {events} events"


async def test_an_error_of_the_receiver_of_events_is_raised_unchanged(pool: SandboxPool) -> None:
    agent = atoll.Agent(says({"call": [calls("sandbox_list")]}, {"text": "Done."}), pool.tools())

    async def read() -> None:
        async with agent.stream("Go") as stream:
            async for _ in stream:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await read()

    def fails(event: AgentEvent) -> None:
        if isinstance(event, ToolResultEvent):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await agent.run("Go", on_event=fails)

    class Leaves(BaseException):
        pass

    def leaves(event: AgentEvent) -> None:
        if isinstance(event, ToolResultEvent):
            raise Leaves

    with pytest.raises(Leaves):
        await agent.run("Go", on_event=leaves)


async def test_an_answer_is_there_when_the_stream_has_ended(pool: SandboxPool) -> None:
    async with atoll.Agent(says({"text": "Well then."}), pool.tools()).stream("Go") as stream:
        with pytest.raises(atoll.InvalidRequest, match="not ended"):
            _ = stream.answer
        said = "".join([event.text async for event in stream if isinstance(event, TextEvent)])
    assert said == stream.answer.text == "Well then."


# ------------------------------------------------------------------------------------------------------ conversations


async def test_a_conversation_is_saved_and_gone_on_with(pool: SandboxPool, tmp_path: Path) -> None:
    model = says(
        {"call": [calls("shell", command="echo kept")]},
        {"expect": {"result": [{"keep": {"out": "stdout"}}]}, "text": "Once."},
        {"text": "Again: ${out}"},
    )
    history = atoll.History()
    await atoll.Agent(model, pool.tools()).run("Go", history=history)
    path = tmp_path / "conversation.json"
    history.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    loaded = atoll.History.load(path)
    assert (len(loaded), loaded.text) == (4, "Once.")
    assert (await atoll.Agent(model, pool.tools()).run("Once more", history=loaded)).text == "Again: kept\n"


def test_what_others_put_in_its_way_neither_reads_nor_spoils_a_conversation(tmp_path: Path) -> None:
    history, path, link = atoll.History(), tmp_path / "talk.json", tmp_path / "link"
    (tmp_path / "talk.json.new").write_text("open to all")
    history.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    link.symlink_to("talk.json")
    path.write_text("replaced below")
    history.save(link)
    assert link.is_symlink()
    assert len(atoll.History.load(path)) == 0
    (tmp_path / "place").mkdir()
    with pytest.raises(IsADirectoryError):
        history.save(tmp_path / "place")
    assert not list(tmp_path.glob(".atoll-*")), "nothing is left of what failed"


@pytest.mark.parametrize("endless", ["fifo", "/dev/zero"])
def test_what_has_no_end_is_no_conversation(tmp_path: Path, endless: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(atoll.InvalidRequest, match="not a regular file"):
        atoll.History.load(tmp_path / endless)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a saved conversation"),
        ("[]", "has no field 'atoll_history'"),
        ('{"messages": []}', "has no field 'atoll_history'"),
        ('{"atoll_history": 99, "messages": []}', "version 99"),
        ('{"atoll_history": 1, "messages": [{"kind": "request", "parts": [{"part_kind": "x"}]}]}', "invalid at"),
        ('{"atoll_history": 1}', "invalid at"),
        ("[" * 100_000, "not a saved conversation"),
    ],
)
def test_what_is_no_conversation_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(atoll.InvalidRequest, match=words):
        atoll.History.load(tmp_path / "file")


async def test_a_conversation_belongs_to_one_run_at_a_time(pool: SandboxPool) -> None:
    history = atoll.History()
    agent = atoll.Agent(says({"text": "One two."}, {"text": "Three."}), pool.tools())
    async with agent.stream("Go", history=history) as stream:
        await anext(stream)
        with pytest.raises(atoll.InvalidRequest, match="another run"):
            await agent.run("Go", history=history)
        _ = [event async for event in stream]
    assert (await agent.run("Go on", history=history)).text == "Three."


@pytest.mark.parametrize("streams", [True, False], ids=["streaming", "whole"])
async def test_text_that_no_protocol_carries_is_shown_as_what_it_is(
    pool: SandboxPool, anthropic: Anthropic, tmp_path: Path, streams: bool
) -> None:
    api = anthropic([Say("Odd \ud800", [("shell", {"command": "echo \udcff"})]), Say("Fine.")])
    agent, history = atoll.Agent("anthropic:x", pool.tools()), atoll.History()
    if streams:
        async with agent.stream("Look \udcfe", history=history) as stream:
            _ = [event async for event in stream]
    else:
        await agent.run("Look \udcfe", history=history)
    assert "Look \\xfe" in api.requests[0]["messages"][0]["content"][0]["text"]
    assert "Odd \\ud800" in str(api.requests[1]["messages"][1]["content"][0]["text"])
    history.save(tmp_path / "odd")
    assert len(atoll.History.load(tmp_path / "odd")) == len(history)


async def test_a_run_needs_something_to_answer() -> None:
    agent = atoll.Agent(says({"text": "Hello."}))
    for prompt in (None, "", "  \n"):
        with pytest.raises(atoll.InvalidRequest, match="prompt"):
            await agent.run(prompt)
    history = atoll.History()
    await agent.run("Hello", history=history)
    with pytest.raises(atoll.InvalidRequest, match="give a prompt"):
        await agent.run(None, history=history)


# ------------------------------------------------------------------------------------------------------------ children


@pytest.fixture
async def place(pool: SandboxPool) -> Any:
    box = await pool.get()
    await box.exec("mkdir -p /home/user/code/inner && echo secret > /home/user/outside")
    return box


async def test_a_child_works_in_its_directory_and_its_answer_comes_back(place: Any) -> None:
    from atoll.tools.coding import coding_tools
    from atoll.tools.tasks import TaskEvent, Tasks

    script = {
        "step": [
            {"call": [calls("task", prompt="Count the files", role="worker", cwd="code")]},
            {"expect": {"result": [{"contains": ["There is 1 file."]}]}, "text": "One."},
        ],
        "conversation": [
            {
                "prompt": "Count the files",
                "step": [
                    {
                        "expect": {"instructions": ["You work in /home/user/code"], "tools": ["bash", "write"]},
                        "call": [calls("write", path="made", content="x"), calls("read", path="../outside")],
                    },
                    {"expect": {"result": [{}, {"error": True}]}, "text": "There is 1 file."},
                ],
            }
        ],
    }
    model = scripted(Script.model_validate(script))
    budget = atoll.Budget()
    events: list[TaskEvent] = []
    tasks = Tasks(atoll.Children(model, budget=budget), on_event=events.append)
    answer = await atoll.Agent(model, coding_tools(place, tasks=tasks)).run("How many?", budget=budget)
    assert answer.text == "One."
    assert await place.files.read_text("/home/user/code/made") == "x"
    kinds = [event.kind for event in events]
    assert (kinds[0], kinds[-1], kinds.count("usage"), kinds.count("tool_result")) == ("started", "ended", 2, 2)
    assert len({event.task for event in events}) == 1
    assert budget.spent.total > answer.tokens.total


async def test_an_explorer_gets_no_tool_that_changes_something(place: Any) -> None:
    from atoll.tools.coding import coding_tools
    from atoll.tools.tasks import Tasks

    script = {
        "step": [{"call": [calls("task", prompt="Explore", role="explorer")]}, {"text": "Fine."}],
        "conversation": [{"prompt": "Explore", "step": [{"expect": {"tools": ["bash"]}, "text": "No."}]}],
    }
    model = scripted(Script.model_validate(script))
    agent = atoll.Agent(model, coding_tools(place, tasks=Tasks(atoll.Children(model))))
    events: list[AgentEvent] = []
    with pytest.raises(atoll.ScriptFailed):  # what failed is the parent's script, which expects no error
        await agent.run("Go", on_event=events.append)
    (result,) = [event.result.text for event in events if isinstance(event, ToolResultEvent)]
    assert "'bash' is not offered (offered: read, grep, glob)" in result


async def test_a_child_ends_with_its_parent(pool: SandboxPool, place: Any) -> None:
    from atoll.tools.coding import coding_tools
    from atoll.tools.tasks import Tasks

    script = {
        "step": [{"call": [calls("task", prompt="Sleep")]}],
        "conversation": [{"prompt": "Sleep", "step": [{"call": [calls("bash", command=ENDLESS)]}]}],
    }
    model = scripted(Script.model_validate(script))
    tasks = Tasks(atoll.Children(model))
    async with atoll.Agent(model, coding_tools(place, tasks=tasks)).stream("Go") as stream:
        async for event in stream:
            if isinstance(event, ToolCallEvent):
                break
        await eventually(lambda: is_sleeping(pool), "the child's command runs")
    assert not await is_sleeping(pool)
    assert tasks.running == {}


# ------------------------------------------------------------------------------------------------------------- scripts


async def failing(script: dict[str, Any], pool: SandboxPool, prompt: str = "Go") -> str:
    with pytest.raises(atoll.ScriptFailed) as raised:
        await atoll.Agent(scripted(Script.model_validate(script)), pool.tools(), "Be kind.").run(prompt)
    return raised.value.message


async def test_a_script_says_what_it_was_not_shown(pool: SandboxPool) -> None:
    shell = {"call": [calls("shell", command="echo one; exit 2")]}
    missing = {"call": [calls("read_file", path="/none")]}

    def after(first: dict[str, Any], **result: Any) -> dict[str, Any]:
        return {"step": [first, {"expect": {"result": [result]}, "text": "x"}]}

    assert "the prompt should contain 'nice'" in await failing({"step": [{"expect": {"prompt": ["nice"]}}]}, pool)
    assert "instructions should contain" in await failing({"step": [{"expect": {"instructions": ["cruel"]}}]}, pool)
    assert "'bash' is not offered" in await failing({"step": [{"call": [calls("bash", command="x")]}]}, pool)
    assert "should contain 'two'" in await failing(after(shell, contains=["two"]), pool)
    assert "should have exit_code 0, but has 2" in await failing(after(shell, fields={"exit_code": 0}), pool)
    assert "is not an error" in await failing(after(shell, error=True), pool)
    assert "is an error" in await failing({"step": [missing, {"text": "x"}]}, pool)
    assert "no field 'url' to keep" in await failing(after(shell, keep={"u": "url"}), pool)
    assert "another one was requested" in await failing({"step": [shell]}, pool)
    assert "1 results were expected" in await failing({"step": [{"expect": {"result": [{}]}, "text": "x"}]}, pool)


async def test_values_that_were_kept_come_into_later_steps_and_other_variables_are_the_shells(
    pool: SandboxPool,
) -> None:
    script = {
        "step": [
            {"call": [calls("write_file", path="kept", content="four")]},
            {
                "expect": {"result": [{"keep": {"size": "size"}}]},
                "call": [calls("read_file", path="kept", limit="${size}")],
            },
            {"call": [calls("shell", command="x=5; echo ${x} ${size}")]},
            {"expect": {"result": [{"fields": {"stdout": "5 4\n"}}]}, "text": "${size} bytes"},
        ]
    }
    answer = await atoll.Agent(scripted(Script.model_validate(script)), pool.tools()).run("Go")
    assert answer.text == "4 bytes"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "a.toml",
            "[[step]]\ntxet = 'x'",
            "at step 1, txet: there is no such key; allowed are expect, text, call; did you mean 'text'",
        ),
        ("a.toml", "[[step]]\n[[step.call]]\ntool='x'\nargs={}", "at step 1, call 1, args: .* allowed are tool, input"),
        ("a.json", '{"steps": [{"cal": []}]}', "at steps 1, cal: .* did you mean 'call'"),
        (
            "a.toml",
            "stepps = 3",
            "at stepps: there is no such key; allowed are step, conversation; did you mean 'step'",
        ),
        ("a.toml", "[[step]\n", "not well-formed"),
        ("a.json", "{", "not well-formed"),
        ("a.json", "[" * 100_000, "not well-formed"),
        ("a.toml", "a = " + "[" * 10_000, "not well-formed"),
        ("a.toml", "[[conversation]]\nprompt = 'x'", "at conversation 1, step: it is missing"),
        ("a.toml", "\udcff", "cannot be read"),
    ],
)
def test_a_script_that_is_wrong_says_where(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(atoll.InvalidRequest, match=words):
        atoll.Agent(f"script:{tmp_path / name}")


def test_a_script_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(atoll.InvalidRequest, match=r"none\.toml cannot be read: No such file or directory$"):
        atoll.Agent(f"script:{tmp_path}/none.toml")


async def test_a_script_is_json_too(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"step": [{"text": "Hello."}]}))
    assert (await atoll.Agent(f"script:{path}").run("Hello")).text == "Hello."
