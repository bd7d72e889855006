"""The registry: names, callers, calls and their errors, threads, and Atoll's own tools."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, assert_type

import anyio
import pytest

import atoll
from atoll import InvalidRequest, PathNotFound, Tool, ToolCallError, ToolCallerType, ToolRegistry, ToolSet
from atoll.code.registry import identifiers
from atoll.testing.waiting import BOUND_S
from atoll.tools.tool import ImagePart, Input, Result, TextPart, ToolResult

CODE = ToolCallerType.CODE_EXECUTION
DIRECT = ToolCallerType.DIRECT


@pytest.fixture
def registry() -> ToolRegistry:
    return ToolRegistry()


async def failure(
    registry: ToolRegistry, name: str, caller: ToolCallerType = CODE, /, **arguments: Any
) -> tuple[str, str]:
    with pytest.raises(ToolCallError) as caught:
        await registry.call(name, arguments, caller=caller)
    assert caught.value.code == "tool_call_failed"
    return caught.value.type, caught.value.message


# --------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["print", "open", "help", "search_tools", "asyncio", "ToolError", "list", "display"])
def test_a_name_that_would_hide_another_is_refused_with_the_fix(registry: ToolRegistry, name: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"must not hide; .*register\(name='{name}_tool'\)"):
        registry.register(lambda: None, name=name)


@pytest.mark.parametrize("name", ["get-user", "class", "1st", "größe", "x" * 65, "<lambda>", "a b"])
def test_a_name_that_code_cannot_call_is_refused(registry: ToolRegistry, name: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a name that code can call"):
        registry.register(lambda: None, name=name)


def test_two_tools_cannot_have_one_name(registry: ToolRegistry) -> None:
    registry.register(lambda: 1, name="one")
    with pytest.raises(InvalidRequest, match=r"a tool is named 'one' already; remove\(\) it, or give one of them"):
        registry.register(lambda: 2, name="one")
    registry.remove("one")
    registry.register(lambda: 2, name="one")
    with pytest.raises(InvalidRequest, match=r"there is no tool 'onee'; did you mean 'one'\?"):
        registry.remove("onee")


def test_names_of_others_become_identifiers_that_depend_on_the_names_alone() -> None:
    names = ["get-user", "get_user", "get.user", "import", "print", "1st", "é", "tool", "x" * 80]
    made = identifiers(names)
    assert made == identifiers(reversed(names))
    assert len(set(made.values())) == len(names)
    assert {name: made[name] for name in names[:6]} == {
        "get-user": "get_user_2",
        "get_user": "get_user",
        "get.user": "get_user_3",
        "import": "import_",
        "print": "print_",
        "1st": "tool_1st",
    }
    assert all(identifier.isidentifier() and len(identifier) <= 64 for identifier in made.values())
    assert identifiers(["get-user", "open"], "hub_") == {"get-user": "hub_get_user", "open": "hub_open"}


def test_the_decorator_returns_the_function_unchanged(registry: ToolRegistry) -> None:
    def plain(a: int) -> int:
        return a

    assert registry.register(plain) is plain
    assert registry.register(name="other")(plain) is plain
    assert [tool.name for tool in registry] == ["plain", "other"]
    assert len(registry) == 2
    assert "plain" in registry
    assert "nothing" not in registry
    assert registry["search_tools"].allowed_callers == {CODE}


async def test_a_type_checker_knows_the_decorated_function(registry: ToolRegistry) -> None:
    """`make check` runs the type checker on this."""

    @registry.register
    def one(a: int) -> str:
        return str(a)

    @registry.register(timeout_s=1, allowed_callers=["direct", ToolCallerType.CODE_EXECUTION])
    async def two(a: int) -> str:
        return str(a)

    assert assert_type(one(1), str) == "1"
    assert assert_type(await two(2), str) == "2"


# -------------------------------------------------------------------------------------------------------------- callers


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ([CODE], {CODE}),
        ("direct", {DIRECT}),
        (["direct", "code_execution_20260120"], {DIRECT, CODE}),
        (["code_execution_20250825", "code_execution_20260521"], {CODE}),
    ],
)
def test_callers_are_members_or_words_of_hosted_apis(registry: ToolRegistry, given: Any, allowed: set[Any]) -> None:
    registry.register(lambda: 1, name="one", allowed_callers=given)
    assert registry["one"].allowed_callers == allowed


def test_callers_that_do_not_exist_are_refused(registry: ToolRegistry) -> None:
    with pytest.raises(
        InvalidRequest, match="there is no caller 'cod'; allowed_callers has some of 'direct', 'code_ex"
    ):
        registry.register(lambda: 1, name="one", allowed_callers=["cod"])
    with pytest.raises(InvalidRequest, match="allowed_callers is empty"):
        registry.register(lambda: 1, name="one", allowed_callers=[])
    with pytest.raises(InvalidRequest, match="timeout_s is 0"):
        registry.register(lambda: 1, name="one", timeout_s=0)


async def test_a_tool_answers_only_those_who_may_call_it(registry: ToolRegistry) -> None:
    registry.register(lambda: 1, name="for_code")
    registry.register(lambda: 2, name="for_the_model", allowed_callers=[DIRECT])
    assert await registry.call("for_code", {}, caller=CODE) == 1
    assert await registry.call("for_the_model", {}, caller=DIRECT) == 2
    assert await failure(registry, "for_code", DIRECT) == ("NotAllowed", "for_code may be called by code only")
    said = "for_the_model may be called by the model itself, not by code"
    assert await failure(registry, "for_the_model") == ("NotAllowed", said)
    assert [stub["name"] for stub in registry.stubs()[0]] == ["for_code", "search_tools"]
    assert "for_the_model" not in registry.documentation()
    assert [tool.name for tool in registry.direct_tools()] == ["for_the_model"]
    assert await failure(registry, "search_tools", DIRECT, query="x") == (
        "NotAllowed", "search_tools may be called by code only",
    )  # fmt: skip


async def test_an_unknown_tool_is_named_with_the_nearest(registry: ToolRegistry) -> None:
    registry.register(lambda: 1, name="query_sales")
    said = "there is no tool 'query_sale'; did you mean 'query_sales'?"
    assert await failure(registry, "query_sale") == ("UnknownTool", said)
    kind, said = await failure(registry, "x" * 100_000)
    assert kind == "UnknownTool"
    assert len(said) < 300


async def test_check_says_beforehand_whether_a_call_would_be_made(registry: ToolRegistry) -> None:
    @registry.register(needs_approval=True)
    def refund(amount: int) -> None:
        raise AssertionError

    assert registry.check("refund", {"amount": 1}, caller=CODE).needs_approval
    for name, arguments, caller in [("refun", {}, CODE), ("refund", {"amount": "x"}, CODE), ("refund", {}, DIRECT)]:
        with pytest.raises(ToolCallError):
            registry.check(name, arguments, caller=caller)


# --------------------------------------------------------------------------------------------------------------- errors


async def test_what_a_tool_raises_is_type_and_text_for_the_code_and_a_traceback_for_the_log(
    registry: ToolRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    @registry.register
    async def fails(how: str) -> None:
        if how == "group":
            async with anyio.create_task_group() as group:
                group.start_soon(fails, "value")
        raise {
            "value": ValueError("no such region"),
            "silent": KeyError(),
            "long": ValueError("x" * 100_000),
            "ours": PathNotFound("/x is not there", number=2, path="/x"),
            "own": ToolCallError("Quota", "used up"),
            "exit": SystemExit(3),
            "cancelled": asyncio.CancelledError(),
            "stop": StopAsyncIteration(),
        }[how]

    with caplog.at_level(logging.ERROR):
        assert await failure(registry, "fails", how="value") == ("ValueError", "no such region")
    assert "Traceback" in caplog.text
    assert await failure(registry, "fails", how="group") == ("ValueError", "no such region")
    assert await failure(registry, "fails", how="silent") == ("KeyError", "KeyError")
    assert len((await failure(registry, "fails", how="long"))[1]) < 4100
    assert await failure(registry, "fails", how="ours") == ("PathNotFound", "/x is not there")
    assert await failure(registry, "fails", how="own") == ("Quota", "used up")
    assert (await failure(registry, "fails", how="exit"))[0] == "SystemExit"
    assert (await failure(registry, "fails", how="cancelled"))[0] == "CancelledError"
    assert (await failure(registry, "fails", how="stop"))[0] == "StopAsyncIteration"


@pytest.mark.parametrize("error", [ValueError("no"), StopIteration("no"), SystemExit("no")])
async def test_what_a_function_in_a_thread_raises_is_no_different(registry: ToolRegistry, error: BaseException) -> None:
    @registry.register
    def fails() -> None:
        raise error

    assert await failure(registry, "fails") == (type(error).__name__, "no")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


async def test_an_exception_without_words_is_named(registry: ToolRegistry) -> None:
    @registry.register
    async def fails() -> None:
        raise Unspeakable

    assert await failure(registry, "fails") == ("Unspeakable", "Unspeakable")


# --------------------------------------------------------------------------------------------------- time and threads


async def test_an_async_tool_that_times_out_is_cancelled(registry: ToolRegistry) -> None:
    ended = []

    @registry.register(timeout_s=0.05)
    async def waits() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(True)

    assert await failure(registry, "waits") == ("TimeoutError", "waits timed out after 0.05 s")
    assert ended


async def test_a_thread_that_times_out_is_left_and_counts_until_it_ends() -> None:
    registry = ToolRegistry(threads=1)
    go = threading.Event()

    @registry.register(timeout_s=0.05)
    def waits(for_it: bool) -> str:
        if for_it:
            go.wait(BOUND_S)
        return "done"

    assert (await failure(registry, "waits", for_it=True))[0] == "TimeoutError"
    assert (await failure(registry, "waits", for_it=False))[0] == "TimeoutError"  # the one thread is still taken
    go.set()
    with anyio.fail_after(BOUND_S):
        while True:
            try:
                assert await registry.call("waits", {"for_it": False}, caller=CODE) == "done"
                break
            except ToolCallError:
                continue


async def test_calls_that_are_cancelled_at_any_moment_give_their_threads_back() -> None:
    registry = ToolRegistry(threads=2)
    ran = []

    @registry.register
    def note(n: int) -> None:
        ran.append(n)

    for number in range(200):
        with anyio.move_on_after(number * 2e-6):
            await registry.call("note", {"n": number}, caller=CODE)
    with anyio.fail_after(BOUND_S):
        await asyncio.gather(*(registry.call("note", {"n": -1}, caller=CODE) for _ in range(8)))
    assert ran.count(-1) == 8
    assert len(ran) == len(set(ran)) + 7


async def test_cancelling_a_call_is_cancellation_and_no_error(registry: ToolRegistry) -> None:
    begun = anyio.Event()
    go = threading.Event()

    @registry.register
    async def waits() -> None:
        begun.set()
        await anyio.sleep_forever()

    @registry.register
    def blocks() -> None:
        go.wait(BOUND_S)

    for name in ("waits", "blocks"):
        with anyio.fail_after(BOUND_S), anyio.move_on_after(0.05) as scope:
            await registry.call(name, {}, caller=CODE)
        assert scope.cancelled_caught
    go.set()


async def test_functions_that_are_not_async_run_in_parallel_threads_with_the_callers_context(
    registry: ToolRegistry,
) -> None:
    barrier = threading.Barrier(3, timeout=BOUND_S)
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant")

    @registry.register
    def meets(name: str) -> list[str]:
        barrier.wait()
        return [name, tenant.get(), (threading.current_thread() is threading.main_thread() and "main") or "thread"]

    @registry.register
    async def sees() -> str:
        return tenant.get()

    tenant.set("acme")
    found = await asyncio.gather(*(registry.call("meets", {"name": name}, caller=CODE) for name in "abc"))
    assert found == [[name, "acme", "thread"] for name in "abc"]
    assert await registry.call("sees", {}, caller=CODE) == "acme"


async def test_a_function_that_returns_a_coroutine_is_awaited(registry: ToolRegistry) -> None:
    async def later() -> int:
        return 7

    registry.register(lambda n=1: later(), name="lazily")
    assert await registry.call("lazily", {}, caller=CODE) == 7


def test_a_registry_serves_one_event_loop_after_another(registry: ToolRegistry) -> None:
    registry.register(lambda at=0: [at, threading.get_ident()], name="ident")
    for _ in range(2):
        assert asyncio.run(registry.call("ident", {}, caller=CODE)) != [0, threading.get_ident()]


async def test_a_call_costs_little(registry: ToolRegistry) -> None:
    """The aim is 30 µs on a quiet machine, where it takes about 12. The bound is for a busy one."""

    @registry.register
    async def trivial(a: int) -> int:
        return a

    best = 1.0
    for _ in range(20):
        begun = time.perf_counter()
        for _ in range(100):
            await registry.call("trivial", {"a": 1}, caller=CODE)
        best = min(best, (time.perf_counter() - begun) / 100)
    assert best < 150e-6


# ------------------------------------------------------------------------------------------------------- Atoll's tools


class GreetInput(Input):
    title: str
    """Who is greeted."""
    times: int = 1


class Greeting(Result):
    said: str
    note: str | None = None


async def greet(given: GreetInput, context: object) -> Greeting:
    return Greeting(said=" ".join([given.title] * given.times))


async def show(given: Input, context: object) -> ToolResult:
    return ToolResult(content=(TextPart(text="a picture"), ImagePart(data="AA==", mime_type="image/png")))


async def fail(given: Input, context: object) -> str:
    raise PathNotFound("there is no /x", number=2, path="/x")


GREET = Tool("greet-one", "Greets.", GreetInput, Greeting, greet)
SHOW = Tool("show", "Shows.", Input, None, show)
FAIL = Tool("fail", "Fails.", Input, None, fail)


async def test_tools_of_atoll_give_data_or_text_and_raise_their_errors(registry: ToolRegistry) -> None:
    registry.add([GREET, SHOW])
    registry.add(FAIL, allowed_callers=["direct", "code_execution"], needs_approval=True, timeout_s=5)
    assert await registry.call("greet_one", {"title": "a", "times": 2}, caller=CODE) == {"said": "a a"}
    assert await registry.call("show", {}, caller=CODE) == "a picture\n[left out: an image, image/png]"
    assert await failure(registry, "fail") == ("PathNotFound", "there is no /x")
    kind, said = await failure(registry, "greet_one", titel="a")
    assert kind == "InvalidArguments"
    assert "did you mean 'title'?" in said
    assert registry["greet_one"].original_name == "greet-one"
    assert registry["fail"].timeout_s == 5
    assert "async def greet_one(title: str, times: int = 1) -> GreetOneResult:" in registry.documentation()
    assert (
        "class GreetOneResult(TypedDict):\n    said: str\n    note: NotRequired[str | None]" in registry.documentation()
    )


async def test_a_tool_set_keeps_its_context_and_its_order(registry: ToolRegistry) -> None:
    class View:
        abilities = frozenset({"sandbox"})

        def explain(self, error: atoll.AtollError) -> str:
            return f"as the model knows it: {error.message}"

    order: list[str] = []
    first_waits = anyio.Event()

    async def append(given: GreetInput, context: object) -> str:
        assert isinstance(context, View)
        if given.title == "first":
            await first_waits.wait()
        order.append(given.title)
        if given.title == "bad":
            raise PathNotFound("no /x", number=2)
        return "ok"

    tool = Tool("append", "Appends.", GreetInput, None, append, frozenset({"sandbox"}), serialize_by=lambda *_: "file")
    with pytest.raises(InvalidRequest, match="needs a context; add the ToolSet that binds it to one"):
        registry.add(tool)
    registry.add(ToolSet([tool], View()))
    async with anyio.create_task_group() as group:
        for title in ("first", "second"):
            group.start_soon(lambda title: registry.call("append", {"title": title}, caller=CODE), title)
        await anyio.wait_all_tasks_blocked()
        first_waits.set()
    assert order == ["first", "second"]
    assert await failure(registry, "append", title="bad") == ("PathNotFound", "as the model knows it: no /x")


# --------------------------------------------------------------------------------------------------------- direct calls


async def test_direct_tools_are_for_an_agent(registry: ToolRegistry) -> None:
    @registry.register(allowed_callers=["direct", "code_execution"])
    async def add(a: int, b: int = 1) -> int:
        """Add two numbers."""
        if a < 0:
            raise ValueError("negative")
        return a + b

    registry.add(GREET, allowed_callers=["direct"])
    tools = registry.direct_tools()
    assert [tool.name for tool in tools] == ["add", "greet-one"]
    assert tools["add"].input_schema() == {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert (await tools.handle_tool_call("add", '{"a": 2}')).text == "3"
    failed = await tools.handle_tool_call("add", {"a": -1})
    assert (failed.is_error, failed.text) == (True, "ValueError: negative")
    for wrong in ({"a": "x"}, "{", [1]):
        assert (await tools.handle_tool_call("add", wrong)).is_error
    assert (await tools.handle_tool_call("greet-one", {"title": "a"})).structured == {"said": "a"}


async def test_direct_tools_that_need_an_approval_are_for_an_agent_that_asks(registry: ToolRegistry) -> None:
    registry.register(lambda: 1, name="refund", allowed_callers=["direct"], needs_approval=True)
    registry.add(GREET, allowed_callers=["direct"], needs_approval=True)
    assert len(registry.direct_tools()) == 0
    asked = registry.direct_tools(approvals=True)
    assert [(tool.name, tool.hints.destructive) for tool in asked] == [("refund", True), ("greet-one", True)]
    assert (await asked.handle_tool_call("greet-one", {"title": "a"})).text == '{"said": "a"}'


async def test_a_result_as_text_is_the_text_or_its_json(registry: ToolRegistry) -> None:
    registry.register(lambda value: value, name="same")
    for value, text in [("a\n", "a\n"), ({"a": [1, None]}, '{"a": [1, null]}'), (None, "null"), ("é", "é")]:
        assert await registry.call("same", {"value": value}, caller=CODE, as_text=True) == text


# ------------------------------------------------------------------------------------ tools that another program runs


async def test_a_declared_tool_passes_its_arguments_on_and_is_described_by_its_schema(registry: ToolRegistry) -> None:
    passed: list[Any] = []

    async def run(arguments: Mapping[str, Any]) -> object:
        passed.append(arguments)
        return "done"

    schema = {"type": "object", "properties": {"region": {"type": "string"}}, "required": ["region"]}
    registry.declare("get_stock", schema, run, description="What is left.", original_name="get-stock", is_timed=False)
    assert "async def get_stock(region: str) -> str:" in registry.documentation()
    given = {"region": 1, "more": [None]}  # that program checks
    assert await registry.call("get_stock", given, caller=CODE) == "done"
    assert passed == [given]
    with pytest.raises(ToolCallError, match="by code only"):
        await registry.call("get_stock", {}, caller=DIRECT)
    with pytest.raises(InvalidRequest, match="not a name that code can call"):
        registry.declare("get-stock", schema, run)
    registry.declare("empty", {"type": "object", "properties": None}, run)
