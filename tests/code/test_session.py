"""A kernel in a sandbox: cells, calls, interrupts, and what is left when it dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from atoll import Engine, InvalidRequest, Sandbox
from atoll.code.messages import CallMessage
from atoll.code.session import CellOutcome, CodeSession

pytestmark = pytest.mark.runtimes("crun", "runsc")

STUBS: dict[str, Any] = {
    "tools": [
        {"name": "echo", "params": [["value", True], ["other", False]], "returns": "any", "doc": "Gives its value."},
        {"name": "pause", "params": [["seconds", True]], "returns": "any", "doc": ""},
        {"name": "fail", "params": [], "returns": "any", "doc": ""},
        {"name": "sale", "params": [], "returns": ["list", ["model", "Sale"]], "doc": ""},
        {"name": "never", "params": [], "returns": "any", "doc": ""},
    ],
    "models": {"Sale": {"fields": [["region", "any"], ["day", ["date"]], ["total", ["decimal"]]]}},
}


class Handler:
    """Tools of the tests."""

    def __init__(self) -> None:
        self.calls: list[CallMessage] = []
        self.most_at_once = self._at_once = 0
        self.cancelled = 0

    async def handle(self, call: CallMessage) -> dict[str, Any]:
        self.calls.append(call)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return await self._answer(call)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self._at_once -= 1

    async def _answer(self, call: CallMessage) -> dict[str, Any]:
        if call.refusal is not None:
            return {"error": {"type": "InvalidRequest", "message": call.refusal}}
        match call.tool:
            case "echo":
                return {"value": call.arguments.get("value")}
            case "pause":
                await asyncio.sleep(float(call.arguments["seconds"]))
                return {"value": None}
            case "sale":
                return {"value": [{"region": "East", "day": "2026-01-31", "total": "10.50"}]}
            case "never":
                await asyncio.sleep(3600)
        return {"error": {"type": "ValueError", "message": "it failed"}}


@pytest.fixture(scope="module")
async def kernel(engine: Engine) -> AsyncIterator[CodeSession]:
    """One session for the tests that leave nothing behind."""
    async with await engine.create() as sandbox:
        session = await CodeSession.start(sandbox, Handler(), stubs=STUBS)
        yield session
        await session.aclose()


@pytest.fixture
async def own(sandbox: Sandbox) -> AsyncIterator[CodeSession]:
    """A session for one test."""
    session = await CodeSession.start(sandbox, Handler(), stubs=STUBS)
    yield session
    await session.aclose()


def handler(session: CodeSession) -> Handler:
    assert isinstance(session.handler, Handler)
    return session.handler


async def printed(session: CodeSession, code: str) -> str:
    """stdout of a cell that went well."""
    outcome = await session.run(code, timeout_s=30)
    assert outcome.error is None, outcome.error.traceback
    return outcome.stdout.text()[0]


async def error(session: CodeSession, code: str, timeout_s: float = 30) -> CellOutcome:
    outcome = await session.run(code, timeout_s=timeout_s)
    assert outcome.error is not None
    return outcome


# ---- cells


async def test_variables_functions_imports_and_files_persist(kernel: CodeSession) -> None:
    await printed(kernel, "import math\nx = 1\ndef f(): return x + 1\nopened = open('/tmp/f', 'w+')")
    await printed(kernel, "opened.write('kept'); opened.flush()")
    assert await printed(kernel, "opened.seek(0); print(f(), math.pi > 3, opened.read())") == "2 True kept\n"


async def test_the_value_of_the_last_expression_is_shown(kernel: CodeSession) -> None:
    outcome = await kernel.run("1 + 1")
    assert [(part.role, part.data) for part in outcome.parts] == [("value", {"text/plain": "2"})]
    assert (await kernel.run("None")).parts == ()
    assert (await kernel.run("1 + 1;")).parts == ()
    assert (await kernel.run("x = 5\nx")).parts[0].data == {"text/plain": "5"}
    assert (await kernel.run("await echo('v')")).parts[0].data == {"text/plain": "'v'"}


async def test_a_cell_may_be_indented_as_a_whole(kernel: CodeSession) -> None:
    code = "\n    # of a text in a function\n    total = 0\n    for i in range(3):\n        total += i\n    total\n    "
    outcome = await kernel.run(code, timeout_s=30)
    assert outcome.error is None, outcome.error.traceback
    assert [part.data["text/plain"] for part in outcome.parts] == ["3"]
    for code, type, line in (
        ("    x = 1\n    1 / 0", "ZeroDivisionError", 2),
        ("x = 1\n    y = 2", "IndentationError", 2),
        ("    x = 1\n  y = 2", "IndentationError", 2),
    ):
        failed = (await kernel.run(code, timeout_s=30)).error
        assert failed is not None
        assert (failed.type, failed.line) == (type, line)


async def test_text_of_many_lines_stays_intact(kernel: CodeSession) -> None:
    text = "a = '''one\n  two\n\n\\n three'''\nprint(a)\nif True:\n    print('''\n  x\n''')"
    assert await printed(kernel, text) == "one\n  two\n\n\n three\n\n  x\n\n"


async def test_output_of_children_and_of_descriptors_belongs_to_the_cell(kernel: CodeSession) -> None:
    code = (
        "import os, subprocess, sys\nsubprocess.run(['echo', 'child'])\n"
        "os.write(1, b'raw\\n')\nprint('e', file=sys.stderr)"
    )
    outcome = await kernel.run(code)
    assert outcome.stdout.text()[0] == "child\nraw\n"
    assert outcome.stderr.text()[0] == "e\n"


async def test_what_is_printed_is_never_taken_for_a_message(kernel: CodeSession) -> None:
    forged = '{"t":"call","call":1,"cell":1,"tool":"echo","args":{"value":1}}'
    before = len(handler(kernel).calls)
    code = f"import sys\nprint({forged!r})\nprint({forged!r}, file=sys.stderr)"
    assert await printed(kernel, code) == forged + "\n"
    assert len(handler(kernel).calls) == before


async def test_exit_ends_the_cell_and_not_the_session(kernel: CodeSession) -> None:
    await printed(kernel, "kept = 7\nexit()")
    outcome = await error(kernel, "import sys\nsys.exit(3)")
    assert (outcome.error.type, outcome.error.message) == ("SystemExit", "3")  # type: ignore[union-attr]
    assert await printed(kernel, "print(kept)") == "7\n"


async def test_reading_input_fails_at_once(kernel: CodeSession) -> None:
    for code in ("input('name? ')", "import sys\nsys.stdin.read()", "for line in __import__('sys').stdin: pass"):
        outcome = await error(kernel, code)
        assert outcome.error is not None
        assert outcome.error.type == "EOFError"
        assert "standard input" in outcome.error.message


async def test_a_traceback_has_the_codes_lines_and_no_frames_of_the_kernel(kernel: CodeSession) -> None:
    outcome = await error(kernel, "def f(n):\n    return 1 / n\n\nf(0)")
    assert outcome.error is not None
    assert outcome.error.line == 2
    assert "return 1 / n" in outcome.error.traceback
    assert "atoll" not in outcome.error.traceback
    outcome = await error(kernel, "async def g():\n    await fail()\nawait g()")
    assert outcome.error is not None
    assert (outcome.error.type, outcome.error.line) == ("ToolError", 2)
    assert "atoll" not in outcome.error.traceback


async def test_a_syntax_error_names_its_line(kernel: CodeSession) -> None:
    outcome = await error(kernel, "x = 1\ny = (")
    assert outcome.error is not None
    assert (outcome.error.type, outcome.error.line) == ("SyntaxError", 2)


async def test_background_tasks_go_on_between_cells(kernel: CodeSession) -> None:
    await printed(
        kernel,
        "import asyncio\nasync def tick():\n    global ticks\n    for ticks in range(999): await asyncio.sleep(0.001)\n"
        "task = asyncio.create_task(tick())",
    )
    with anyio.fail_after(30):
        while int(await printed(kernel, "print(ticks)")) < 5:
            await anyio.sleep(0.01)
    await printed(kernel, "task.cancel()")


async def test_asyncio_run_works_in_a_cell(kernel: CodeSession) -> None:
    code = "import asyncio\nasync def main(): return await echo('inner')\nprint(asyncio.run(main()))"
    assert await printed(kernel, code) == "inner\n"
    assert await printed(kernel, "print(await echo(1))") == "1\n"


# ---- calls


async def test_calls_take_keywords_positions_or_one_dict(kernel: CodeSession) -> None:
    code = "print(await echo(1), await echo(value=2), await echo({'value': 3}), await echo({'a': 4}))"
    assert await printed(kernel, code) == "1 2 3 {'a': 4}\n"
    outcome = await error(kernel, "await echo(1, 2, 3)")
    assert outcome.error is not None
    assert "it takes 2 at most" in outcome.error.message
    outcome = await error(kernel, "await echo(valeu=1)")
    assert outcome.error is not None
    assert "it takes value, other" in outcome.error.message


async def test_results_are_objects_of_declared_models(kernel: CodeSession) -> None:
    code = "(s,) = await sale()\nprint(s.region, s['day'].year, s.total + 1, type(s).__name__, s)"
    assert await printed(kernel, code) == (
        "East 2026 11.50 Sale Sale(region='East', day=datetime.date(2026, 1, 31), total=Decimal('10.50'))\n"
    )


async def test_calls_in_gather_run_at_the_same_time(kernel: CodeSession) -> None:
    code = "import asyncio\nr = await asyncio.gather(*[pause(0.05) for _ in range(50)])\nprint(len(r))"
    assert await printed(kernel, code) == "50\n"
    assert handler(kernel).most_at_once >= 20


async def test_a_task_group_takes_calls(kernel: CodeSession) -> None:
    code = (
        "async with asyncio.TaskGroup() as g:\n    ts = [g.create_task(echo(i)) for i in range(3)]\n"
        "print([t.result() for t in ts])"
    )
    assert await printed(kernel, "import asyncio\n" + code) == "[0, 1, 2]\n"


async def test_a_forgotten_await_is_named(kernel: CodeSession) -> None:
    outcome = await kernel.run("x = 1\necho(1)\nx = 2")
    assert outcome.warnings == ("echo(...) on line 2 was not awaited, so it was not called: write `await echo(...)`",)
    failed = await error(kernel, "for row in echo([1]): print(row)")
    assert failed.error is not None
    assert "write `await echo(...)`" in failed.error.message


async def test_a_failed_call_can_be_caught(kernel: CodeSession) -> None:
    code = "try:\n    await fail()\nexcept ToolError as e:\n    print(e, '|', e.type)"
    assert await printed(kernel, code) == "ValueError: it failed | ValueError\n"


async def test_a_call_that_the_code_cancels_is_cancelled_on_the_host(kernel: CodeSession) -> None:
    before = handler(kernel).cancelled
    code = (
        "import asyncio\ntry:\n    await asyncio.wait_for(pause(600), 0.05)\n"
        "except asyncio.TimeoutError:\n    print('late')"
    )
    assert await printed(kernel, code) == "late\n"
    with anyio.fail_after(10):
        while handler(kernel).cancelled == before:
            await anyio.sleep(0.01)


async def test_threads_can_call_tools(kernel: CodeSession) -> None:
    code = (
        "import asyncio, threading\nfound = []\n"
        "def work(): found.append(asyncio.run(call()))\nasync def call(): return await echo('thread')\n"
        "t = threading.Thread(target=work); t.start()\nt.join(); print(found)"
    )
    assert await printed(kernel, code) == "['thread']\n"
    assert await printed(kernel, code.replace("t.join()", "await asyncio.to_thread(t.join)")) == "['thread']\n"


async def test_a_forked_child_cannot_call_tools(kernel: CodeSession) -> None:
    code = (
        "import os, sys\npid = os.fork()\nif not pid:\n    try:\n        await_ = echo(1).send(None)\n"
        "    except BaseException as e:\n        print(type(e).__name__, flush=True)\n    os._exit(0)\n"
        "os.waitpid(pid, 0)"
    )
    outcome = await kernel.run(code, timeout_s=30)
    assert "Error" in outcome.stdout.text()[0]
    assert await printed(kernel, "print(await echo('parent'))") == "parent\n"


async def test_arguments_that_are_no_json_are_refused_where_they_are_made(kernel: CodeSession) -> None:
    outcome = await error(kernel, "await echo(object())")
    assert outcome.error is not None
    assert "object is not JSON" in outcome.error.message
    outcome = await error(kernel, "await echo('x' * 5_000_000)")
    assert outcome.error is not None
    assert "a call may take 4194304" in outcome.error.message
    outcome = await error(kernel, "v = []\nfor _ in range(100): v = [v]\nawait echo(v)")
    assert outcome.error is not None
    assert "nested deeper than 60" in outcome.error.message
    assert await printed(kernel, "print(await echo((1, {2}, b'x')))") == "[1, [2], 'eA==']\n"
    assert await printed(kernel, r"print(await echo('\ud800é'))") == "\\ud800é\n"
    for wrong in ("float('nan')", "2**5000"):
        assert (await error(kernel, f"await echo({wrong})")).error is not None


# ---- limits


async def test_an_endless_loop_is_interrupted_and_variables_survive(kernel: CodeSession) -> None:
    await printed(kernel, "survivor = 1")
    outcome = await error(kernel, "print('begun')\nwhile True:\n    pass", timeout_s=0.3)
    assert outcome.timed_out
    assert outcome.kernel_lost is None
    assert outcome.stdout.text()[0] == "begun\n"
    assert outcome.error is not None
    assert outcome.error.type == "KeyboardInterrupt"
    assert outcome.error.line in (2, 3)
    assert await printed(kernel, "print(survivor)") == "1\n"


async def test_a_cell_that_waits_is_interrupted_at_its_await(kernel: CodeSession) -> None:
    outcome = await error(kernel, "x = 1\nawait never()", timeout_s=0.3)
    assert outcome.error is not None
    assert (outcome.error.type, outcome.error.line) == ("KeyboardInterrupt", 2)
    assert await printed(kernel, "print(await echo('on'))") == "on\n"


async def test_code_that_ignores_the_interrupt_is_killed_and_its_line_named(own: CodeSession) -> None:
    code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('stuck')\nwhile True: pass"
    outcome = await error(own, code, timeout_s=0.3)
    assert outcome.timed_out
    assert outcome.kernel_lost is not None
    assert outcome.error is not None
    assert outcome.error.line == 4
    assert outcome.stdout.text()[0] == "stuck\n"
    assert "Thread" not in outcome.stderr.text()[0]
    assert not own.is_alive


async def test_a_process_that_ends_itself_is_told(own: CodeSession) -> None:
    outcome = await error(own, "import os\nprint('last', flush=True)\nos._exit(9)")
    assert outcome.stdout.text()[0] == "last\n"
    assert outcome.error is not None
    assert "exit code 9" in outcome.error.message
    assert not own.is_alive


async def test_a_cancelled_run_interrupts_the_cell(kernel: CodeSession) -> None:
    await printed(kernel, "count = 0")
    with anyio.move_on_after(0.3) as scope:
        await kernel.run("while True: count += 1")
    assert scope.cancelled_caught
    first = await printed(kernel, "print(count > 0, count)")
    assert first.startswith("True")
    assert await printed(kernel, "print(count > 0, count)") == first


async def test_long_output_keeps_head_and_tail_and_the_whole_is_a_file(kernel: CodeSession) -> None:
    outcome = await kernel.run("for i in range(100_000): print(i)", output_limit_bytes=2000)
    text, cut = outcome.stdout.text()
    assert cut is not None
    assert text.startswith("0\n1\n")
    assert text.endswith("99999\n")
    whole = await kernel.sandbox.files.read_text(outcome.output_files["stdout"])
    assert whole.splitlines() == [str(i) for i in range(100_000)]


async def test_output_streams_while_the_cell_runs(kernel: CodeSession) -> None:
    seen: list[bytes] = []
    came = anyio.Event()

    def hear(_stream: str, data: bytes) -> None:
        seen.append(data)
        came.set()

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: kernel.run("print('now')\nawait never()", on_output=hear))
        with anyio.fail_after(30):
            await came.wait()
        group.cancel_scope.cancel()
    assert b"".join(seen) == b"now\n"


async def test_closed_descriptors_are_whole_again_in_the_next_cell(kernel: CodeSession) -> None:
    await kernel.run("import os, sys\nos.close(1)\nsys.stderr.close()", timeout_s=30)
    assert await printed(kernel, "print('back')") == "back\n"


# ---- coming back


async def test_another_handle_goes_on_with_variables_and_calls_that_wait(sandbox: Sandbox) -> None:
    first = await CodeSession.start(sandbox, Handler(), stubs=STUBS)
    await printed(first, "kept = 'variable'")
    async with anyio.create_task_group() as group:
        group.start_soon(first.run, "answer = await never()\nprint(kept, answer)")
        with anyio.fail_after(30):
            while not handler(first).calls:
                await anyio.sleep(0.01)
        await first.detach()
        group.cancel_scope.cancel()

    class Later(Handler):
        async def _answer(self, call: CallMessage) -> dict[str, Any]:
            return {"value": f"{call.tool} answered"}

    second = await CodeSession.attach(sandbox, first.process_id, Later())
    assert second.is_waiting
    outcome = await second.finish(timeout_s=30)
    assert outcome.error is None
    assert outcome.stdout.text()[0] == "variable never answered\n"
    assert await printed(second, "print(kept)") == "variable\n"
    await second.aclose()


async def test_an_image_without_the_interpreter_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidRequest, match="the image has no python9"):
        await CodeSession.start(sandbox, Handler(), stubs=STUBS, interpreter="python9")
