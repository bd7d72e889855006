"""The vocabulary `code`: `execute_code`, field by field."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from atoll import Engine
from atoll.code.vocabulary import code_tools
from atoll.tools.tool import ToolSet
from tests.tools.conftest import Caller

if TYPE_CHECKING:
    from atoll.runtime.sandbox_pool import SandboxPool


@pytest.fixture(scope="module")
def tools(pool: SandboxPool) -> ToolSet:
    return code_tools(pool, pool.tools())


@pytest.mark.proves("execute_code.code", "execute_code->success", "execute_code->output", "execute_code->value")
async def test_variables_persist_and_files_are_those_of_the_sandbox(
    tools: ToolSet, pool: SandboxPool, call: Caller
) -> None:
    await (await pool.get()).files.write_text("data.txt", "6\n7\n")
    first = await call(tools, "execute_code", code="rows = [int(line) for line in open('data.txt')]\nprint(rows)")
    assert (first["success"], first["output"], first["calls"]) == (True, "[6, 7]\n", 0)
    second = await call(tools, "execute_code", code="rows[0] * rows[1]")
    assert second["value"] == "42"


@pytest.mark.proves("execute_code->traceback", "execute_code->session_replaced")
async def test_what_code_does_wrong_is_a_result(tools: ToolSet, call: Caller) -> None:
    await call(tools, "execute_code", code="kept = 1")
    failed = await call(tools, "execute_code", code="undefined")
    assert not failed["success"]
    assert failed["traceback"].endswith("NameError: name 'undefined' is not defined\n")
    assert not failed["session_replaced"]
    assert (await call(tools, "execute_code", code="import os\nkept, os._exit(3)"))["session_replaced"]
    again = await call(tools, "execute_code", code="kept")
    assert "NameError" in again["traceback"]
    assert not again["session_replaced"], "it is told once"


@pytest.mark.proves("execute_code.timeout", "execute_code->timed_out")
async def test_a_time_out_interrupts_and_variables_survive(tools: ToolSet, call: Caller) -> None:
    late = await call(tools, "execute_code", code="x = 1\nimport time\ntime.sleep(60)", timeout=1)
    assert late["timed_out"]
    assert (await call(tools, "execute_code", code="x"))["value"] == "1"
    assert "timeout" in await call.error(tools, "execute_code", code="1", timeout=0)


@pytest.mark.proves("execute_code->calls")
async def test_code_calls_the_tools_beside_it(tools: ToolSet, call: Caller) -> None:
    code = "import asyncio\ndone = await asyncio.gather(*(shell(f'echo {n}') for n in range(3)))\ndone[2]['stdout']"
    result = await call(tools, "execute_code", code=code)
    assert (result["calls"], result["value"]) == (3, "'2\\n'")
    assert "async def read_file(" in tools["execute_code"].description


@pytest.fixture
async def session(host: Engine) -> AsyncIterator[str]:
    yield "kept-code"
    await host.destroy("kept-code.default")


async def test_a_kept_session_goes_on_with_its_variables(host: Engine, session: str, call: Caller) -> None:
    for code, said in (("kept = 7", None), ("kept", "7")):
        async with host.pool(session) as pool:
            assert (await call(code_tools(pool), "execute_code", code=code)).get("value") == said


async def test_what_only_looks_like_a_session_is_left_alone(
    host: Engine, session: str, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.code.session.START_S", 5.0)  # how long the answer of what is no kernel is waited for
    async with host.pool(session) as pool:
        fake = await (await pool.get()).spawn("sleep 1000 #atoll-kernel python", keep=True)
        await fake.detach()
        assert (await call(code_tools(pool), "execute_code", code="6 * 7"))["value"] == "42"
