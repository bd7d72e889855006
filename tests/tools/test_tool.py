"""One tool and sets of them: schemas, arguments that do not fit, names, order, errors, and the protocols."""

from __future__ import annotations

import json
import logging
from typing import Any

import anyio
import pytest
from hypothesis import given, settings, strategies as st
from pydantic import Field

from atoll import InvalidRequest, PathNotFound
from atoll.contract.errors import AtollError
from atoll.tools import export
from atoll.tools.tool import Hints, ImagePart, Input, KeyedQueue, Result, TextPart, Tool, ToolResult, ToolSet
from atoll.tools.vocabularies import choose


class GreetInput(Input):
    title: str
    """What is greeted."""
    times: int = Field(default=1, ge=1, le=3)
    """How often."""
    loud: bool = False


class Greeting(Result):
    said: str
    note: str | None = None


async def greet(args: GreetInput, context: object) -> Greeting:
    said = " ".join([f"hello {args.title}"] * args.times)
    return Greeting(said=said.upper() if args.loud else said)


GREET = Tool("greet", "Greets.", GreetInput, Greeting, greet, hints=Hints(read_only=True, idempotent=True))


def made(name: str, handler: Any, **options: Any) -> Tool:
    return Tool(name, "For a test.", GreetInput, None, handler, **options)


def test_the_input_model_is_the_schema() -> None:
    assert GREET.input_schema() == {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "title": {"type": "string", "description": "What is greeted."},
            "times": {"type": "integer", "default": 1, "minimum": 1, "maximum": 3, "description": "How often."},
            "loud": {"type": "boolean", "default": False},
        },
        "required": ["title"],
    }


async def test_a_result_is_text_and_data_and_null_is_the_default() -> None:
    tools = ToolSet([GREET])
    for arguments in ({"title": "you", "times": 2, "loud": None}, '{"title": "you", "times": 2}'):
        result = await tools.handle_tool_call("greet", arguments)
        assert result == ToolResult(
            content='{"said":"hello you hello you"}', structured={"said": "hello you hello you"}
        )


NESTED: list[object] = []
for _ in range(10_000):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, ["title is missing", "times (integer, default 1)", "title (string, required)"]),
        ({"title": "x", "times": 9}, ["times is 9", "less than or equal to 3"]),
        ({"title": "x", "time": 2}, ["no field 'time'", "did you mean 'times'?"]),
        ({"title": None}, ["title is None"]),
        ({"title": ["x" * 1000]}, ["title is", "..."]),
        ([1], ["are [1]", "must be an object"]),
        ("{", ["not JSON"]),
        ("[" * 100_000, ["not JSON"]),
        ("7", ["are 7"]),
        ({"title": "x", "times": 10**5000}, ["times is a value (int)"]),
        ({"title": NESTED}, ["title is a value (list)"]),
    ],
)
async def test_arguments_that_do_not_fit_are_explained(arguments: object, said: list[str]) -> None:
    result = await ToolSet([GREET]).handle_tool_call("greet", arguments)
    assert result.is_error
    assert len(result.text) < 1000
    for each in said:
        assert each in result.text
    assert result.structured == {"error": {"code": "invalid_request", "retryable": False}}


async def test_an_unknown_tool_is_an_error_that_suggests_the_nearest() -> None:
    result = await ToolSet([GREET]).handle_tool_call("gret", {})
    assert result.is_error
    assert result.text == "there is no tool 'gret' (tools: greet); did you mean 'greet'?"
    assert (await ToolSet().handle_tool_call("x" * 100_000)).text.endswith("(tools: none)")


async def test_an_error_is_an_answer_and_a_fault_of_ours_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def missing(args: GreetInput, context: object) -> str:
        raise PathNotFound(f"{args.title}: no such file", number=2)

    async def broken(args: GreetInput, context: object) -> str:
        raise ZeroDivisionError("secret detail")

    class Place:
        abilities = frozenset({"sea"})

        def explain(self, error: AtollError) -> str:
            return f"{error.message}, here"

    tools = ToolSet([made("missing", missing), made("broken", broken)], Place())
    result = await tools.handle_tool_call("missing", {"title": "f\udcff\ud800"})
    assert (result.text, result.is_error) == ("f\\udcff\\ud800: no such file, here", True)
    assert result.structured == {"error": {"code": "path_not_found", "retryable": False}}
    with caplog.at_level(logging.CRITICAL):
        result = await tools.handle_tool_call("broken", {"title": "x"})
    assert result.is_error
    assert "secret" not in result.text
    assert "Traceback" not in result.text


async def test_bytes_that_are_no_text_are_shown() -> None:
    result = await ToolSet([GREET]).handle_tool_call("greet", {"title": "a\udcff"})
    assert json.loads(result.text) == {"said": "hello a\\xff"} == result.structured


def test_names_are_unique_and_those_of_built_ins_are_taken() -> None:
    with pytest.raises(InvalidRequest, match="two tools are named 'greet'"):
        ToolSet([GREET, GREET])
    with pytest.raises(InvalidRequest, match="two tools are named 'greet'"):
        ToolSet([GREET]) | ToolSet([GREET])
    for name in ("bash", "shell", "sprite_fork"):
        with pytest.raises(InvalidRequest, match="built-in"):
            made(name, greet)
    with pytest.raises(InvalidRequest, match="has no tool"):
        made("bash", greet, vocabulary="agent")
    for name in ("", "a b", "x" * 65, "ä"):
        with pytest.raises(InvalidRequest, match="allowed are"):
            made(name, greet)
    with pytest.raises(InvalidRequest, match="no description"):
        Tool("x", " ", GreetInput, None, greet)


def test_sets_are_joined_and_cut() -> None:
    both = ToolSet([GREET]) | ToolSet([made("other", greet)])
    assert [tool.name for tool in both] == ["greet", "other"]
    assert [tool.name for tool in both.only("other")] == ["other"]
    assert [tool.name for tool in both.without("other")] == ["greet"]
    assert "greet" in both
    assert both["greet"] is GREET
    with pytest.raises(InvalidRequest, match="did you mean 'other'"):
        both.without("othr")


def test_a_tool_that_needs_what_is_not_there_is_not_offered() -> None:
    class Place:
        abilities = frozenset({"pool"})

        def explain(self, error: AtollError) -> str:
            return error.message

    tools = [made("plain", greet), made("pooled", greet, needs=frozenset({"pool"})), made("no", greet, needs={"x"})]
    assert [tool.name for tool in ToolSet(tools, Place())] == ["plain", "pooled"]
    assert [tool.name for tool in ToolSet(tools)] == ["plain"]


async def test_calls_of_a_batch_run_side_by_side_but_take_turns_for_one_thing() -> None:
    running: list[str] = []
    most = 0
    both = anyio.Event()
    order: dict[str, list[int]] = {"a": [], "b": []}

    async def work(args: GreetInput, context: object) -> str:
        nonlocal most
        assert args.title not in running
        running.append(args.title)
        most = max(most, len(running))
        if len(running) == 2:
            both.set()
        await both.wait()
        await anyio.lowlevel.checkpoint()
        order[args.title].append(args.times)
        running.remove(args.title)
        return str(args.times)

    tools = ToolSet([made("work", work, serialize_by=lambda args, context: args.title)])
    calls = [("work", {"title": name, "times": times}) for times in (3, 1, 2) for name in ("a", "b")]
    with anyio.fail_after(5):
        results = await tools.handle_batch([*calls, ("work", {"title": "c", "times": 0})])
    assert [result.text for result in results[:-1]] == ["3", "3", "1", "1", "2", "2"]
    assert results[-1].is_error
    assert order == {"a": [3, 1, 2], "b": [3, 1, 2]}
    assert most == 2


async def test_a_cancelled_batch_does_not_block_later_calls() -> None:
    stuck = anyio.Event()

    async def work(args: GreetInput, context: object) -> str:
        if args.loud:
            stuck.set()
            await anyio.sleep_forever()
        return "done"

    tools = ToolSet([made("work", work, serialize_by=lambda args, context: args.title)])
    async with anyio.create_task_group() as group:
        group.start_soon(
            tools.handle_batch, [("work", {"title": "a", "loud": True}), ("work", {"title": "a"}), ("work", {})]
        )
        await stuck.wait()
        group.cancel_scope.cancel()
    with anyio.fail_after(5):
        assert (await tools.handle_tool_call("work", {"title": "a"})).text == "done"


async def test_a_ticket_that_stops_waiting_does_not_let_the_next_one_pass() -> None:
    turns = KeyedQueue()
    first, second, third = turns.take("x"), turns.take("x"), turns.take("x")
    went = []

    async def go() -> None:
        async with third:
            went.append(3)

    async with anyio.create_task_group() as group, first:
        with anyio.move_on_after(0):
            async with second:
                went.append(2)
        group.start_soon(go)
        await anyio.wait_all_tasks_blocked()
        assert went == []
    assert went == [3]
    assert len(turns) == 0


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(["greet", "", "x"]) | st.text(),
    arguments=_JSON | st.fixed_dictionaries({"title": _JSON}, optional={"times": _JSON, "loud": _JSON}) | st.binary(),
)
def test_whatever_comes_in_an_answer_comes_out(name: str, arguments: object) -> None:
    result = anyio.run(ToolSet([GREET]).handle_tool_call, name, arguments)
    for protocol in ("anthropic", "openai-chat", "openai-responses", "mcp"):
        json.dumps(export.result(result, protocol, "id"), ensure_ascii=False).encode()


def test_each_protocol_gets_its_shape() -> None:
    (anthropic,) = export.definitions([GREET], "anthropic")
    assert anthropic == {"name": "greet", "description": "Greets.", "input_schema": GREET.input_schema()}
    (chat,) = export.definitions([GREET], "openai-chat")
    function = {"name": "greet", "description": "Greets.", "parameters": GREET.input_schema(), "strict": False}
    assert chat == {"type": "function", "function": function}
    assert export.definitions([GREET], "openai-responses") == [{"type": "function", **function}]
    (mcp,) = export.definitions([GREET], "mcp")
    assert mcp["inputSchema"] == GREET.input_schema()
    assert mcp["outputSchema"]["required"] == ["said"]
    assert mcp["annotations"] == {
        "readOnlyHint": True,
        "destructiveHint": False,
        "idempotentHint": True,
        "openWorldHint": False,
    }
    assert "outputSchema" not in export.definitions([made("x", greet)], "mcp")[0]


def test_a_protocol_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    wrong: Any = "gemini"
    for use in (lambda: export.definitions([], wrong), lambda: export.result(ToolResult(content=""), wrong)):
        with pytest.raises(InvalidRequest, match="allowed are 'anthropic', 'openai-chat', 'openai-responses', 'mcp'"):
            use()


def test_results_are_written_for_each_protocol() -> None:
    good = ToolResult(content='{"a":1}', structured={"a": 1})
    bad = ToolResult(content="no", is_error=True, structured={"error": {}})
    seen = ToolResult(content=(TextPart(text="look"), ImagePart(data="AAAA", mime_type="image/png")))
    assert export.result(good, "anthropic", "t1") == {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": '{"a":1}',
        "is_error": False,
    }
    assert export.result(seen, "anthropic", "t1")["content"][1]["source"]["media_type"] == "image/png"
    assert export.result(bad, "openai-chat", "c") == {"role": "tool", "tool_call_id": "c", "content": "Error: no"}
    assert export.result(bad, "openai-responses", "c")["output"] == "Error: no"
    assert export.result(seen, "openai-responses", "c") == {
        "type": "function_call_output",
        "call_id": "c",
        "output": [
            {"type": "input_text", "text": "look"},
            {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
        ],
    }
    assert export.result(seen, "openai-chat", "c")["content"] == "look\n[an image, image/png]"
    assert export.image_message([good, bad]) is None
    assert export.image_message([good, seen]) == {
        "role": "user",
        "content": [
            {"type": "text", "text": "The images that the tools have returned:"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        ],
    }
    assert export.result(good, "mcp") == {
        "content": [{"type": "text", "text": '{"a":1}'}],
        "isError": False,
        "structuredContent": {"a": 1},
    }
    assert export.result(bad, "mcp") == {"content": [{"type": "text", "text": "no"}], "isError": True}
    assert export.result(seen, "mcp")["content"][1] == {"type": "image", "data": "AAAA", "mimeType": "image/png"}


def test_vocabularies_are_chosen_if_there_are_such_and_no_name_is_theirs_both() -> None:
    assert choose(["sprites", "coding", "sprites"]) == ("sprites", "coding")
    assert choose(["agent"]) == ("agent",)
    with pytest.raises(InvalidRequest, match=r"no vocabulary 'codign'; available: .*; did you mean 'coding'\?"):
        choose(["agent", "codign"])
    with pytest.raises(InvalidRequest, match="no vocabulary is chosen"):
        choose([])
    with pytest.raises(InvalidRequest, match="coding and agent cannot be offered together: both have a tool 'glob'"):
        choose(["coding", "sprites", "agent"])
