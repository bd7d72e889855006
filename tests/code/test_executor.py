"""`CodeExecutor`: sessions, budgets, approvals, and what a model is shown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from atoll import (
    ApprovalDecision,
    ApprovalRequest,
    AskingApprover,
    CodeAudit,
    CodeConfig,
    CodeExecutor,
    Engine,
    InvalidRequest,
    NotCheckpointable,
    StoredApprovals,
    ToolCallerType,
    ToolRegistry,
    code_tool,
)
from atoll.code import trace

pytestmark = pytest.mark.runtimes("crun")
BOTH = pytest.mark.runtimes("crun", "runsc")
"""What runtimes may do in their own ways: processes that end, memory, sleep. Sessions themselves: test_session.py."""


@dataclass
class Sale:
    region: str
    revenue: float


@pytest.fixture(scope="module")
def registry() -> ToolRegistry:
    tools = ToolRegistry()

    @tools.register(description="Sales of a region.")
    def query_sales(region: str, year: int = 2025) -> list[Sale]:
        return [Sale(region, 10.0), Sale(region, float(year))]

    @tools.register
    async def broken() -> None:
        """Fails."""
        raise ValueError("no such table")

    @tools.register(allowed_callers=[ToolCallerType.DIRECT])
    def direct_only() -> str:
        """For the model alone."""
        raise AssertionError("code must not get here")

    @tools.register(needs_approval=True)
    def transfer(amount: int) -> str:
        """Moves money."""
        return f"moved {amount}"

    return tools


@pytest.fixture(scope="module")
async def executor(engine: Engine, registry: ToolRegistry) -> AsyncIterator[CodeExecutor]:
    async with CodeExecutor(registry, CodeConfig(max_calls=20), engine=engine) as executor:
        yield executor


async def test_an_execution_without_a_session_leaves_none(executor: CodeExecutor, engine: Engine) -> None:
    result, session = await executor.execute("print(1)")
    assert (result.success, result.output, session) == (True, "1\n", None)
    assert executor.active_sessions == {}
    assert [info.name for info in await engine.list("code-")] == []


@BOTH
async def test_a_session_keeps_its_variables(executor: CodeExecutor) -> None:
    _, session = await executor.execute("x = 10", reuse_session=True)
    assert session is not None
    result, again = await executor.execute("print(x + 5)", session_id=session)
    assert (result.output, again) == ("15\n", session)
    info = executor.get_session(session)
    assert info is not None
    assert info.executions == 2
    assert await executor.close_session(session)
    assert not await executor.close_session(session)
    with pytest.raises(InvalidRequest, match="was closed"):
        await executor.execute("print(x)", session_id=session)
    with pytest.raises(InvalidRequest, match="there is no session 'none'"):
        await executor.execute("1", session_id="none")


async def test_sessions_that_are_not_used_are_closed(engine: Engine, registry: ToolRegistry) -> None:
    config = CodeConfig(session_timeout_seconds=0.05, cleanup_interval_seconds=0.02)
    async with CodeExecutor(registry, config, engine=engine) as executor:
        executor.start_cleanup_task()
        await executor.execute("1", reuse_session=True)
        with anyio.fail_after(30):
            while executor.active_sessions:
                await anyio.sleep(0.02)
        await executor.stop_cleanup_task()


async def test_a_union_of_models_is_the_one_whose_fields_it_has(engine: Engine) -> None:
    tools = ToolRegistry()

    @dataclass
    class Cat:
        lives: int

    @dataclass
    class Dog:
        bark: str

    @tools.register
    async def animals() -> list[Cat | Dog]:
        """All animals."""
        return [Cat(9), Dog("loud")]

    async with CodeExecutor(tools, engine=engine) as executor:
        result, _ = await executor.execute("print([type(a).__name__ for a in await animals()])")
    assert result.output == "['Cat', 'Dog']\n"


async def test_tools_give_objects_and_only_what_is_printed_is_shown(executor: CodeExecutor) -> None:
    code = "rows = await query_sales('East')\nprint(sum(row.revenue for row in rows))"
    result, _ = await executor.execute(code)
    assert result.text == "2035.0"
    [call] = result.calls
    assert (call.tool, call.arguments, call.error) == ("query_sales", {"region": "East"}, None)
    assert call.result_bytes > 0


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("await query_sales(region=3)", "region"),
        ("await broken()", "ValueError: no such table"),
        ("await direct_only()", "name 'direct_only' is not defined"),
    ],
)
async def test_what_a_call_lacks_is_an_error_of_the_code(executor: CodeExecutor, code: str, said: str) -> None:
    result, _ = await executor.execute(code)
    assert not result.success
    assert said in result.text


async def test_code_cannot_call_a_tool_that_is_for_the_model_alone(executor: CodeExecutor) -> None:
    forged = (
        "import types\nstub = types.SimpleNamespace(__name__='direct_only', returns='any')\n"
        "await query_sales._calls.make(stub, {})"
    )
    result, _ = await executor.execute(forged)
    assert "NotAllowed: direct_only may be called by the model itself, not by code" in result.text
    unknown, _ = await executor.execute(forged.replace("direct_only", "no-identifier; import os"))
    assert "UnknownTool" in unknown.text


async def test_a_budget_of_calls_holds(executor: CodeExecutor) -> None:
    result, _ = await executor.execute("for _ in range(30): await query_sales('x')")
    assert not result.success
    assert "an execution may make 20 calls" in result.text
    assert len(result.calls) == 21


async def test_a_result_over_the_limit_is_an_error_of_the_code(engine: Engine, registry: ToolRegistry) -> None:
    async with CodeExecutor(registry, CodeConfig(max_result_bytes=60), engine=engine) as executor:
        result, _ = await executor.execute("await query_sales('x')")
        assert "ResultTooLarge: the result takes 6" in result.text
        assert result.calls[0].result_bytes == 0


async def test_executions_of_one_session_have_their_own_calls_and_budgets(executor: CodeExecutor) -> None:
    session, results = await executor.open_session(), {}

    async def run(name: str, times: int) -> None:
        code = f"for _ in range({times}): await query_sales('{name}')"
        results[name], _ = await executor.execute(code, session)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, "first", 15)
        tasks.start_soon(run, "second", 10)
    assert {name: (result.success, len(result.calls)) for name, result in results.items()} == {
        "first": (True, 15),
        "second": (True, 10),
    }
    await executor.close_session(session)


async def test_files_in_the_outbox_come_back_once(executor: CodeExecutor) -> None:
    _, session = await executor.execute("import os\nos.makedirs('outbox/sub', exist_ok=True)", reuse_session=True)
    first, _ = await executor.execute("open('outbox/sub/a.txt', 'w').write('data')", session_id=session)
    assert [(file.path, file.data) for file in first.files] == [("sub/a.txt", b"data")]
    second, _ = await executor.execute("os.symlink('/etc/passwd', 'outbox/link')", session_id=session)
    assert second.files == ()
    assert session is not None
    await executor.close_session(session)


@BOTH
async def test_a_killed_session_is_replaced_and_the_result_says_so(executor: CodeExecutor) -> None:
    _, session = await executor.execute("x = 1", reuse_session=True)
    assert session is not None
    result, _ = await executor.execute("import os; os._exit(1)", session_id=session)
    assert result.session_replaced
    assert "variables are lost" in result.text
    result, _ = await executor.execute("x", session_id=session)
    assert "NameError" in result.text
    await executor.close_session(session)


@BOTH
async def test_memory_used_up_is_told_and_the_session_goes_on_with_its_files(
    engine: Engine, registry: ToolRegistry
) -> None:
    config = CodeConfig(memory_bytes=64 << 20)
    async with CodeExecutor(registry, config, engine=engine) as executor:
        _, session = await executor.execute("open('kept', 'w').write('here')", reuse_session=True)
        code = "x = bytearray(400 << 20)"  # on gVisor the whole sandbox ends with it
        result, _ = await executor.execute(code, session)
        assert not result.success
        assert result.session_replaced
        assert "memory" in result.text
        again, _ = await executor.execute("print(open('kept').read())", session)
        assert again.output == "here\n"


async def test_a_language_is_chosen_by_the_config(engine: Engine, registry: ToolRegistry) -> None:
    code = "const rows = await query_sales({region: 'East'}); console.log(rows.length)"
    async with CodeExecutor(registry, CodeConfig(language="javascript"), engine=engine) as executor:
        assert (await executor.execute(code))[0].output == "2\n"
    async with CodeExecutor(registry, CodeConfig(language="bash"), engine=engine) as executor:
        _, session = await executor.execute("cd /tmp; X=1", reuse_session=True)
        assert (await executor.execute("echo $PWD $X", session_id=session))[0].output == "/tmp 1\n"


@BOTH
async def test_prepared_sessions_wait(engine: Engine, registry: ToolRegistry) -> None:
    async with CodeExecutor(registry, CodeConfig(prepared_sessions=1), engine=engine) as executor:
        with anyio.fail_after(60):
            while not executor.prepared:
                await anyio.sleep(0.01)
        result, _ = await executor.execute("print('ready')")
        assert result.output == "ready\n"


# ---- approvals


async def test_an_approval_is_asked_for_with_code_and_arguments(engine: Engine, registry: ToolRegistry) -> None:
    asked: list[ApprovalRequest] = []

    async def ask(request: ApprovalRequest) -> ApprovalDecision | bool:
        asked.append(request)
        if request.arguments["amount"] == 1:
            return True
        if request.arguments["amount"] == 2:
            return ApprovalDecision(allowed=True, arguments={"amount": 20})
        return ApprovalDecision(allowed=False, reason="too much")

    async with CodeExecutor(registry, engine=engine, approver=AskingApprover(ask)) as executor:
        code = "for n in (1, 2, 3):\n    print(await transfer(n))"
        result, _ = await executor.execute(code)
    assert result.output == "moved 1\nmoved 20\n"
    assert result.error is not None
    assert "ApprovalDenied: transfer was not approved: too much" in result.error.message
    assert [request.code for request in asked] == [code] * 3


async def test_without_an_approver_a_call_that_needs_one_fails(executor: CodeExecutor) -> None:
    result, _ = await executor.execute("await transfer(1)")
    assert "ApprovalRequired" in result.text
    result, _ = await executor.execute("await transfer('not a number')")
    assert "InvalidArguments" in result.text  # nobody is asked about a call that cannot be made


async def test_a_stored_approval_is_decided_by_another_process(engine: Engine, registry: ToolRegistry) -> None:
    store, other = StoredApprovals(engine.state_dir), StoredApprovals(engine.state_dir)
    async with CodeExecutor(registry, engine=engine, approver=store) as executor:
        _, session = await executor.execute("import asyncio", reuse_session=True)  # takes long on a busy machine
        code = "print(await asyncio.gather(transfer(5), transfer(6)))"
        task = asyncio.create_task(executor.execute(code, session, timeout_s=1.5))
        with anyio.fail_after(30):
            while len(other.list(session)) < 2:
                await anyio.sleep(0.02)
        await anyio.sleep(1.6)  # waiting does not count
        first, second = other.list(session)
        assert {first.arguments["amount"], second.arguments["amount"]} == {5, 6}
        await other.allow(first.id)
        with pytest.raises(InvalidRequest, match=r"allowed already|no approval"):
            await other.deny(first.id)
        await other.allow(second.id)
        result, _ = await task
    assert result.output == "['moved 5', 'moved 6']\n"
    assert other.list(session) == []


@pytest.mark.runtimes("runsc")
async def test_a_session_that_waits_goes_to_disk_and_is_resumed_elsewhere(
    engine: Engine, registry: ToolRegistry
) -> None:
    store = StoredApprovals(engine.state_dir)
    async with CodeExecutor(registry, engine=engine, approver=store) as executor:
        _, session = await executor.execute("kept = 'variable'", reuse_session=True)
        assert session is not None
        task = asyncio.create_task(executor.execute("print(kept, await transfer(7))", session_id=session))
        with anyio.fail_after(30):
            while not store.list(session):
                await anyio.sleep(0.02)
        await executor.suspend(session)
        result, _ = await task
        assert result.suspended
    assert [info.status for info in await engine.list(session)] == ["sleeping"]
    [approval] = store.list(session)
    assert approval.code == "print(kept, await transfer(7))"
    await store.allow(approval.id)
    async with CodeExecutor(registry, engine=engine, approver=StoredApprovals(engine.state_dir)) as later:
        resumed = await later.resume(session, timeout_s=30)
        assert resumed is not None
        assert resumed.output == "variable moved 7\n"
        assert (await later.execute("print(kept)", session_id=session))[0].output == "variable\n"


@pytest.mark.runtimes("crun")
async def test_a_runtime_that_would_lose_variables_refuses_to_suspend(executor: CodeExecutor) -> None:
    _, session = await executor.execute("x = 1", reuse_session=True)
    assert session is not None
    with pytest.raises(NotCheckpointable, match=r"variables .* would be lost"):
        await executor.suspend(session)
    with pytest.raises(NotCheckpointable, match="would lack its variables"):
        await executor.fork_session(session)
    assert (await executor.execute("print(x)", session_id=session))[0].output == "1\n"
    await executor.close_session(session)


@pytest.mark.runtimes("runsc")
async def test_forks_of_a_session_go_on_from_its_variables(executor: CodeExecutor) -> None:
    _, session = await executor.execute("x = 1", reuse_session=True)
    assert session is not None
    one, two = await executor.fork_session(session, 2)
    await executor.execute("x = 'one'", session_id=one)
    for id, expected in ((session, "1\n"), (one, "one\n"), (two, "1\n")):
        assert (await executor.execute("print(x)", session_id=id))[0].output == expected
        await executor.close_session(id)


@BOTH
async def test_a_session_whose_sandbox_slept_goes_on_or_says_what_is_lost(
    executor: CodeExecutor, engine: Engine, runtime_name: str
) -> None:
    _, session = await executor.execute("x = 1", reuse_session=True)
    assert session is not None
    await engine.sleep(session)
    result, _ = await executor.execute("x", session_id=session)
    if runtime_name == "runsc":
        assert result.text == "1"
    else:
        assert result.session_replaced
        assert "NameError" in result.text
    assert not (await executor.execute("1", session_id=session))[0].session_replaced, "it is told once"
    await executor.close_session(session)


# ---- audit and tool


async def test_every_execution_and_call_is_recorded(engine: Engine, registry: ToolRegistry) -> None:
    audit = CodeAudit(engine.state_dir)
    async with CodeExecutor(registry, engine=engine, audit=audit) as executor:
        _, session = await executor.execute("print(len(await query_sales('<b>')))", reuse_session=True)
        assert session is not None
        await executor.execute("1 / 0", session_id=session)
    entries = audit.read(session)
    assert [(entry.kind, entry.verdict.partition(":")[0], entry.tool) for entry in entries] == [
        ("execution", "ok", None),
        ("call", "ok", "query_sales"),
        ("execution", "ZeroDivisionError", None),
    ]
    text, page = trace.as_text(entries), trace.as_html(session, entries)
    assert "query_sales" in text
    assert "✗ cell 2" in text
    assert "<b>" not in page
    assert "&lt;b&gt;" in page


async def test_the_tool_keeps_one_session_for_its_calls(engine: Engine, registry: ToolRegistry, tmp_path: Path) -> None:
    executor = CodeExecutor(registry, engine=engine)
    async with code_tool(executor=executor) as tools:
        assert "async def query_sales(" in tools["execute_code"].description
        first = await tools.handle_tool_call("execute_code", {"code": "x = 2"})
        second = await tools.handle_tool_call("execute_code", {"code": "x * 21"})
        failed = await tools.handle_tool_call("execute_code", {"code": "y"})
    assert first.text == "[no output; print what you want to see]"
    assert second.text == "42"
    assert not failed.is_error, "as a command that fails: it is a result"
    assert failed.structured is not None
    assert not failed.structured["success"]
    assert "NameError" in failed.text
    await executor.aclose()
