"""Approvals that outlive the process that asked, and what becomes of sessions whose process is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import UTC, datetime, timedelta

import anyio
import pytest

from atoll import (
    CodeConfig,
    CodeExecutor,
    Engine,
    ExecutionResult,
    InvalidRequest,
    NotCheckpointable,
    StoredApprovals,
    ToolRegistry,
)
from atoll.code.approvals import Approval
from atoll.contract.model import SandboxInfo
from atoll.testing import inside
from atoll.testing.waiting import BOUND_S

pytestmark = pytest.mark.runtimes("crun", "runsc")

_TOOLS = """
registry = atoll.ToolRegistry()

@registry.register(needs_approval=True)
def transfer(amount: int) -> str:
    'Moves money.'
    return f"moved {amount}"

approver = atoll.StoredApprovals(engine.state_dir)
executor = atoll.CodeExecutor(registry, engine=engine, approver=approver)
"""
ASKS = (
    _TOOLS
    + """
_, session = await executor.execute("import time\\nkept, began = ['variable'], time.monotonic()", reuse_session=True)
say(session)
await executor.execute("print('before')\\nprint(kept, await transfer(7))", session_id=session)
"""
)
GOES_ON = (
    _TOOLS
    + """
result = await executor.resume(sys.argv[3], timeout_s=30)
say(repr(result.output))
result, _ = await executor.execute("print(kept, time.monotonic() - began < 600)", session_id=sys.argv[3])
say(result.output.strip())
say(anyio.current_time())
await executor.aclose()
"""
)
AN_HOUR_S = 3600


async def asked(engine: Engine, session: str | None = None) -> Approval:
    """The approval that waits, once one does."""
    with anyio.fail_after(BOUND_S):
        while not (found := StoredApprovals(engine.state_dir).list(session)):
            await anyio.sleep(0.02)
    return found[0]


async def info(engine: Engine, session: str) -> SandboxInfo:
    (found,) = await engine.list(session)
    return found


def an_hour_passes(engine: Engine, sandbox: SandboxInfo, approval: Approval) -> None:
    """Move what is on disk an hour into the past, which is the same for the processes that come later."""
    record = engine.state_dir / "approvals" / f"{approval.id}.json"
    fields = json.loads(record.read_text())
    fields["asked_at"] = (approval.asked_at - timedelta(seconds=AN_HOUR_S)).isoformat()
    record.write_text(json.dumps(fields))
    expiry = engine.state_dir / "expiries" / sandbox.id
    earlier = int(os.readlink(expiry)) - AN_HOUR_S * 1000
    expiry.unlink()
    expiry.symlink_to(str(earlier))


async def test_an_approval_outlives_the_process_that_asked(
    engine: Engine, runtime_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with inside.client(engine.state_dir, runtime_name, ASKS) as host:
        session = await host.line()
        approval = await asked(engine, session)
        host.send_signal(signal.SIGKILL)
        await host.ends()
    kept = await info(engine, session)
    assert kept.expires_at is not None
    assert kept.expires_at - datetime.now(UTC) > timedelta(days=6)
    if runtime_name == "runsc":
        await engine.sleep(session)
        an_hour_passes(engine, kept, approval)
        # The clock by which programs measure time, for the process that goes on and all that it starts.
        clock = ["unshare", "--time", "--fork", f"--monotonic={AN_HOUR_S}", f"--boottime={AN_HOUR_S}", "--"]
        monkeypatch.setattr(inside, "python", [*clock, sys.executable])
    command = [sys.executable, "-m", "atoll.surfaces.cli", "--state-dir", str(engine.state_dir), "approvals"]
    shown = await anyio.run_process([*command, "show", approval.id])
    assert b"print(kept, await transfer(7))" in shown.stdout
    await anyio.run_process([*command, "allow", approval.id, "--arguments", '{"amount": 5}'])
    async with inside.client(engine.state_dir, runtime_name, GOES_ON, session) as later_host:
        assert await later_host.line() == repr("before\n['variable'] moved 5\n")
        assert await later_host.line() == "['variable'] True"
        assert (float(await later_host.line()) - time.monotonic() > AN_HOUR_S / 2) is (runtime_name == "runsc")
        await later_host.succeeds()
    assert StoredApprovals(engine.state_dir).list() == []
    assert await engine.list(session) == []


@pytest.fixture(scope="module")
def registry() -> ToolRegistry:
    tools = ToolRegistry()

    @tools.register(needs_approval=True)
    def transfer(amount: int) -> str:
        """Moves money."""
        return f"moved {amount}"

    return tools


@pytest.mark.runtimes("crun")
async def test_a_runtime_that_would_lose_the_variables_says_so_before_a_session_waits_on_disk(
    engine: Engine, registry: ToolRegistry
) -> None:
    store, results = StoredApprovals(engine.state_dir), list[ExecutionResult]()
    async with CodeExecutor(registry, engine=engine, approver=store) as executor, anyio.create_task_group() as tasks:

        async def execute() -> None:
            results.append((await executor.execute("print(await transfer(1))"))[0])

        tasks.start_soon(execute)
        approval = await asked(engine)
        with pytest.raises(NotCheckpointable, match=r"crun cannot save processes, .* need the runtime runsc"):
            await executor.suspend(approval.session_id)
        await store.allow(approval.id)
    assert results[0].output == "moved 1\n"


async def test_a_call_that_no_longer_waits_is_withdrawn(engine: Engine, registry: ToolRegistry) -> None:
    store = StoredApprovals(engine.state_dir)
    async with CodeExecutor(registry, engine=engine, approver=store) as executor:
        code = "import asyncio\nawait asyncio.wait_for(transfer(1), 0.1)"
        result, session = await executor.execute(code, reuse_session=True)
        assert "TimeoutError" in result.text
        assert store.list() == []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(executor.execute, "await transfer(2)", session)
            await asked(engine)
            await executor.interrupt(str(session))
        assert store.list() == []
        await executor.execute("asyncio.get_event_loop().create_task(transfer(3))\nawait asyncio.sleep(0)", session)
        await asked(engine)
    assert store.list() == [], "nor does one of a session that is closed"


async def test_an_approval_is_for_one_call_only(engine: Engine, registry: ToolRegistry) -> None:
    store = StoredApprovals(engine.state_dir)
    async with CodeExecutor(registry, engine=engine, approver=store) as executor:
        session = await executor.open_session()
        results = list[ExecutionResult]()

        async def execute(code: str) -> None:
            results.append((await executor.execute(code, session))[0])

        for _ in range(2):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(execute, "print(await transfer(1))")
                await store.allow((await asked(engine, session)).id)
        assert [result.output for result in results] == ["moved 1\n"] * 2


async def test_sessions_of_a_killed_process_end_by_themselves(engine: Engine, registry: ToolRegistry) -> None:
    def left_s(sandbox: SandboxInfo) -> float:
        assert sandbox.expires_at is not None
        return (sandbox.expires_at - datetime.now(UTC)).total_seconds()

    config = CodeConfig(session_timeout_seconds=100, approval_ttl_s=5000)
    async with CodeExecutor(registry, config, engine=engine) as executor:
        session = await executor.open_session()
        assert 100 < left_s(await info(engine, session)) < 400
        await engine.update(session, ttl_s=30)
        executor._sessions[session].expires = 0  # as if time had passed
        await executor.keep_alive(executor._sessions[session])
        assert left_s(await info(engine, session)) > 100
        seen = list[SandboxInfo]()

        before = {each.name for each in await engine.list("code-")}

        async def look() -> None:
            seen.extend(each for each in await engine.list("code-") if each.name not in before)

        once = ToolRegistry()
        once.register(look)
        async with CodeExecutor(once, config, engine=engine) as other:
            await other.execute("await look()")
        (one,) = seen
        assert one.expires_at is None, "one execution: its sandbox ends with its last client"
        with pytest.raises(InvalidRequest, match="no session"):
            await executor.suspend(one.name)
