"""Code that turns against what a call is checked for: approvals, the budget, and the record of what it did."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from atoll import Engine, ToolRegistry
from atoll.code.approvals import ApprovalDecision, ApprovalRequest, Approver, StoredApprovals
from atoll.code.audit import CodeAudit
from atoll.code.executor import CodeConfig, CodeExecutor
from atoll.contract.errors import InvalidRequest
from atoll.testing.waiting import eventually

pytestmark = pytest.mark.runtimes("crun")

SEND = (
    "import asyncio, json, os, time\n"
    "send = lambda m: display.__self__.channel.socket.sendall(json.dumps(m).encode() + b'\\n')\n"
    "call = lambda i, tool, **args: send({'t': 'call', 'call': i, 'cell': 7, 'tool': tool, 'args': args})\n"
)


class Desk:
    """An executor whose tools note that they ran, with records of it in a directory."""

    def __init__(self, engine: Engine, directory: Path) -> None:
        self.ran: list[Any] = []
        registry = ToolRegistry()
        registry.register(self._note, name="note")
        registry.register(self._note, name="pay", needs_approval=True)
        self.approvals = StoredApprovals(engine.state_dir)
        self.audit = CodeAudit(directory)
        config = CodeConfig(ephemeral=True, max_calls=50)
        self.executor = CodeExecutor(registry, config, engine=engine, approver=self.approvals, audit=self.audit)

    def _note(self, value: object = None) -> object:
        self.ran.append(value)
        return value

    async def one_request(self) -> str:
        await eventually(lambda: len(self.approvals.list()) == 1, "there is one request")
        return self.approvals.list()[0].id


@pytest.fixture
async def desk(engine: Engine, tmp_path: Path) -> AsyncIterator[Desk]:
    desk = Desk(engine, tmp_path)
    yield desk
    await desk.executor.aclose()


@pytest.mark.parametrize("end", ["os._exit(3)", "print('over')"])
async def test_code_that_ends_while_a_call_waits_holds_nobody_up(desk: Desk, end: str) -> None:
    code = f"{SEND}task = asyncio.ensure_future(pay(1))\nawait asyncio.sleep(0.3)\n{end}"
    with anyio.fail_after(20):
        result, _ = await desk.executor.execute(code, timeout_s=10)
    assert not result.timed_out
    assert not desk.approvals.list()  # nobody is asked about code that is gone
    assert not desk.ran


async def test_a_request_that_code_takes_back_cannot_be_allowed_for_a_later_call(desk: Desk) -> None:
    wait = "while not os.path.exists('go'): await asyncio.sleep(0.02)\n"
    code = SEND + "call(1000, 'pay', value=1)\nawait note(1)\n" + wait
    again = "send({'t': 'cancel', 'call': 1000})\nawait asyncio.sleep(0.5)\nprint(await note(2))"
    id = await desk.executor.open_session()
    async with asyncio.TaskGroup() as group:
        group.create_task(desk.executor.execute(code + again, id, timeout_s=30))
        asked = await desk.one_request()
        sandbox = await (await desk.executor.engine()).get(id)
        await sandbox.files.write_text("go", "")
        await eventually(lambda: not desk.approvals.list(), "the request is gone")
        with pytest.raises(InvalidRequest, match="no approval has"):
            await desk.approvals.allow(asked)
    assert 1 in desk.ran  # by note
    assert len(desk.ran) == 2


async def test_requests_beyond_what_a_person_can_read_are_refused(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.code.executor._MAX_WAITING", 3)
    code = SEND + "for i in range(20): call(1000 + i, 'pay', value=i)\nawait asyncio.sleep(1)"
    result, _ = await desk.executor.execute(code, timeout_s=20)
    assert sum("TooManyApprovals" in (record.error or "") for record in result.calls) == 17
    assert not desk.ran


async def test_an_approver_that_fails_is_an_answer(engine: Engine, tmp_path: Path) -> None:
    class Broken(Approver):
        async def decide(self, request: ApprovalRequest) -> ApprovalDecision:
            raise OSError("no space left")

        async def withdraw(self, request: ApprovalRequest) -> None:
            raise OSError("no space left")

    desk = Desk(engine, tmp_path)
    desk.executor.approver = Broken()
    async with desk.executor as executor:
        result, _ = await executor.execute("await pay(1)", timeout_s=20)
    assert not result.timed_out
    assert result.error is not None
    assert "ApprovalFailed" in result.error.message
    assert not desk.ran


async def test_an_approval_of_one_is_none_of_true(desk: Desk) -> None:
    id = await desk.executor.open_session()
    request = ApprovalRequest(id, id, 1, "", 1, 1, "pay", {"value": 1})
    with anyio.move_on_after(0.2):
        await desk.approvals.decide(request)
    await desk.approvals.allow(await desk.one_request())
    other = ApprovalRequest(id, id, 1, "", 1, 1, "pay", {"value": True})
    with anyio.move_on_after(0.3) as waiting:
        await desk.approvals.decide(other)
    assert waiting.cancelled_caught
    await desk.approvals.withdraw(other)
    assert (await desk.approvals.decide(request)).allowed


async def test_calls_beyond_the_budget_are_not_kept(desk: Desk) -> None:
    code = SEND + "for i in range(2000): call(1000 + i, 'note', value='x' * 1000)\nawait asyncio.sleep(0.5)"
    result, _ = await desk.executor.execute(code, timeout_s=30)
    assert len(desk.ran) == 50
    assert len(result.calls) == 51
    assert sum("BudgetExceeded" in (record.error or "") for record in result.calls) == 1


async def test_a_flood_of_calls_does_not_hide_the_next_ones_from_the_audit_log(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.code.audit.MAX_FILE_BYTES", 100_000)
    flood = "await asyncio.gather(*(note('x' * 8000) for _ in range(40)))"
    _, id = await desk.executor.execute(SEND + flood, reuse_session=True, timeout_s=30)
    assert id is not None
    await desk.executor.execute("await note('hidden')", id, timeout_s=30)
    assert "hidden" in str(desk.audit.read(id))
    assert desk.audit.sessions() == [id]


async def test_a_call_is_recorded_with_the_execution_that_made_it(desk: Desk) -> None:
    _, id = await desk.executor.execute(SEND + "call(1000, 'note')\nawait note()", reuse_session=True, timeout_s=30)
    assert id is not None
    assert {entry.cell for entry in desk.audit.read(id)} == {1}  # it said 7
