"""Cells of JavaScript: what persists, what is shown, calls, interrupts, and code that damages its kernel."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import playwright
import pytest

from atoll import Engine, InvalidRequest, Mount
from atoll.code.messages import CallMessage
from atoll.code.session import CodeSession
from tests.code.test_session import STUBS, Handler, error, handler, printed

pytestmark = pytest.mark.runtimes("crun", "runsc")


@pytest.fixture(scope="module")
async def kernel(engine: Engine) -> AsyncIterator[CodeSession]:
    """One session for the tests that leave nothing behind."""
    async with await engine.create() as sandbox:
        session = await CodeSession.start(sandbox, Handler(), stubs=STUBS, language="javascript")
        yield session
        await session.aclose()


@pytest.fixture
async def own(kernel: CodeSession) -> AsyncIterator[CodeSession]:
    """A session for one test, in the sandbox of the others."""
    session = await CodeSession.start(kernel.sandbox, Handler(), stubs=STUBS, language="javascript")
    yield session
    await session.aclose()


async def shown(session: CodeSession, code: str) -> str | None:
    """The value of a cell that went well."""
    outcome = await session.run(code, timeout_s=30)
    assert outcome.error is None, outcome.error.traceback
    return next((part.data["text/plain"] for part in outcome.parts if part.role == "value"), None)


# ---- cells


async def test_declarations_persist_and_may_be_repeated_in_any_form(kernel: CodeSession) -> None:
    await printed(kernel, "const x = 1; let [y, {z = 3}] = [2, {}]; function f() { return x }; class K { v = 5 }")
    assert await shown(kernel, "[x, y, z, f(), new K().v]") == "[ 1, 2, 3, 1, 5 ]"
    await printed(kernel, "let x = 6; const f = () => x; class y {}; function K() {}")
    assert await shown(kernel, "[f(), typeof y, new K().v]") == "[ 6, 'function', undefined ]"
    await printed(
        kernel, "const { x, ...rest } = await echo({ x: 7, q: 8 });\nasync function f() { return x + rest.q }\nlet n"
    )
    assert await shown(kernel, "await f()") == "15"
    assert await shown(kernel, "n") is None
    await printed(
        kernel,
        "if (await echo(true)) { var v1, v2 = 2 }\nfor (var [i] of [[5]]) { var v3 = i }\nfor (var j = 0; j < 3;) j++",
    )
    assert await shown(kernel, "[v1, v2, v3, i, j]") == "[ undefined, 2, 5, 5, 3 ]"
    assert (await error(kernel, "const broken = null.x")).error is not None
    assert await shown(kernel, "const broken = 1; broken") == "1"
    assert await shown(kernel, "const navigator = 'mine', crypto = require('crypto'); navigator") == "'mine'"


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("1 + 1", "2"),
        ("1 + 1;", "2"),
        ("undefined", None),
        ("var hidden = 5", None),
        ("{a: 1}", "{ a: 1 }"),
        ("await echo('v')", "'v'"),
        ("const a = await echo(2)\na\n  .toFixed(1)\n", "'2.0'"),
        ("const b = await echo(1); // why\n[b]", "[ 1 ]"),
        ("async function main() { return await echo('main') }\nmain();", "'main'"),
        ("for (const i of [1, 2]) { await (async () => i)() }\n/a[/]`/.test('a/`') && `${`}${1}`}`", "'}1'"),
        ("import os, { cpus as all } from 'node:os'\n[os.cpus === all, typeof all]", "[ true, 'function' ]"),
        ("(await import('node:path')).basename('/a/b') + typeof import.meta.url", "'bstring'"),
    ],
)
async def test_the_value_of_the_last_expression_is_shown(kernel: CodeSession, code: str, value: str | None) -> None:
    assert await shown(kernel, code) == value


async def test_modules_are_found_from_the_working_directory(kernel: CodeSession) -> None:
    await kernel.sandbox.files.write_text("own.cjs", "module.exports = 'required'")
    await kernel.sandbox.files.write_text("own.mjs", "export default 'imported'")
    await kernel.sandbox.files.write_text("node_modules/dep/index.js", "exports.name = 'dep'", parents=True)
    code = "import own from './own.mjs'\nimport { name } from 'dep'\n"
    code += "console.log(own, name, require('./own.cjs'), require('dep'), (await import('./own.mjs')).default)"
    assert await printed(kernel, code) == "imported dep required { name: 'dep' } imported\n"


async def test_an_error_has_the_codes_lines_and_no_frames_of_the_kernel(kernel: CodeSession) -> None:
    cases = {
        "function f(n) {\n  return n.x.y\n}\n\nf({})": ("TypeError", 2, "return n.x.y"),
        "const a = 1\nasync function g() {\n  await fail()\n}\nawait g()": ("ToolError", 3, "ValueError: it failed"),
        "let a = 1\nlet b = = 2": ("SyntaxError", 2, "let b = = 2"),
        "await echo(1)\nlet b = = 2": ("SyntaxError", 2, "let b = = 2"),
        "throw new Error('outer', { cause: new TypeError('inner') })": ("Error", 1, "caused by TypeError: inner"),
        "await new Promise(r => setTimeout(() => {\n  null.x\n}, 1))": ("TypeError", 2, "null.x"),
        "throw 'a string'": ("Thrown", None, "'a string'"),
    }
    for code, (type, line, text) in cases.items():
        failed = (await error(kernel, code)).error
        assert failed is not None
        assert (failed.type, failed.line) == (type, line), failed
        assert text in failed.traceback
        assert "atoll" not in failed.traceback
        assert "node:internal" not in failed.traceback


async def test_exit_ends_the_cell_and_not_the_session(kernel: CodeSession) -> None:
    await printed(kernel, "var kept = 7; process.exit()")
    failed = (await error(kernel, "async function main() { process.exit(3) }\nmain(); await echo(1)")).error
    assert failed is not None
    assert (failed.type, failed.message) == ("ProcessExit", "process.exit(3)")
    assert await shown(kernel, "kept") == "7"


async def test_reading_input_fails_at_once(kernel: CodeSession) -> None:
    for code in ("process.stdin.on('data', () => {})", "require('fs').readFileSync(0)"):
        failed = (await error(kernel, code)).error
        assert failed is not None
        assert "standard input" in failed.message


async def test_timers_and_promises_go_on_between_cells(kernel: CodeSession) -> None:
    await printed(kernel, "var ticks = 0; var timer = setInterval(() => ticks++, 1); echo('later').then(v => late = v)")
    with anyio.fail_after(30):
        while await shown(kernel, "ticks > 4 && late") != "'later'":
            await anyio.sleep(0.01)
    await printed(kernel, "clearInterval(timer)")


async def test_output_belongs_to_the_cell_and_streams_are_whole_again(kernel: CodeSession) -> None:
    code = "console.log('ö'); console.error('e'); require('child_process').execSync('echo child', { stdio: 'inherit' })"
    outcome = await kernel.run(code, timeout_s=30)
    assert outcome.stdout.text()[0] == "ö\nchild\n"
    assert outcome.stderr.text()[0] == "e\n"
    await kernel.run("process.stdout.end(); process.stderr.destroy()", timeout_s=30)
    assert await printed(kernel, "console.log('back')") == "back\n"


async def test_values_are_shown_in_their_own_forms(kernel: CodeSession) -> None:
    forms = "{ 'text/html': '<b>1</b>', 'image/png': Buffer.from('png') }"
    code = f"display({{ [Symbol.for('Jupyter.display')]: () => ({forms}) }})"
    (part,) = (await kernel.run(code, timeout_s=30)).parts
    assert part.role == "display"
    assert part.data["text/html"] == "<b>1</b>"
    assert part.data["image/png"] == "cG5n"


async def test_files_in_the_outbox_are_named(kernel: CodeSession) -> None:
    code = "require('fs').mkdirSync('outbox/d', { recursive: true }); require('fs').writeFileSync('outbox/d/ö', '12')"
    assert (await kernel.run(code)).outbox == (("d/ö", 2),)
    assert (await kernel.run("1")).outbox == ()


async def test_words_are_completed(kernel: CodeSession) -> None:
    assert await kernel.complete("x = JSON.str") == ("JSON.str", ("JSON.stringify",))
    assert "echo" in (await kernel.complete("ech"))[1]


# ---- calls


async def test_calls_take_positions_or_one_object(kernel: CodeSession) -> None:
    code = "console.log(await echo(1), await echo({ value: 2 }), await echo({ a: 3 }), await echo(new Set([4])))"
    assert await printed(kernel, code) == "1 2 { a: 3 } [ 4 ]\n"
    assert await shown(kernel, "await sale()") == "[ { region: 'East', day: '2026-01-31', total: 10.5 } ]"
    refused = {
        "await echo(1, 2, 3)": "it takes value, other",
        "await echo()": "it lacks value",
        "await echo(() => 1)": "a function is not JSON",
        "await echo('x'.repeat(5e6))": "a call may take 4194304",
        "const c = []; c.push(c); await echo(c)": "contains itself",
        "await echo(echo(1))": "write `await` before it",
    }
    for code, text in refused.items():
        failed = (await error(kernel, code)).error
        assert failed is not None
        assert failed.type == "TypeError"
        assert text in failed.message
        assert failed.line == 1


async def test_calls_run_at_the_same_time(kernel: CodeSession) -> None:
    assert await shown(kernel, "(await Promise.all(Array.from({ length: 50 }, () => pause(0.05)))).length") == "50"
    assert handler(kernel).most_at_once >= 20


async def test_a_failed_call_can_be_caught(kernel: CodeSession) -> None:
    code = "try { await fail() } catch (e) { console.log(e instanceof ToolError, e.message, e.type) }"
    assert await printed(kernel, code) == "true ValueError: it failed ValueError\n"


async def test_a_forgotten_await_is_named(kernel: CodeSession) -> None:
    outcome = await kernel.run("let x = 1\necho(1)\nconst used = echo(2); await used; echo(3).then(() => 1); x")
    assert outcome.warnings == ("echo(...) on line 2 was not awaited: write `await echo(...)`",)
    failed = (await error(kernel, "for (const row of echo([1])) {}")).error
    assert failed is not None
    assert "write `await`" in failed.message
    outcome = await kernel.run(
        "\nPromise.reject(new Error('lost')); const handled = Promise.reject(1)\nhandled.catch(() => 1); 5"
    )
    assert outcome.warnings == ("a promise was rejected on line 2, and nothing awaits it: Error: lost",)


# ---- limits


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("console.log('begun')\nfunction f() {\n  while (true) {}\n}\nf()", 3),
        ("console.log('begun')\nawait echo(1)\nfor (;;) ;", 3),
        ("console.log('begun')\nawait require('timers/promises').setTimeout(1)\nfor (;;) ;", 3),
        ("console.log('begun')\nawait never()", 2),
        ("console.log('begun')\nawait new Promise(() => {})", None),
    ],
)
async def test_a_cell_is_interrupted_where_it_is_and_variables_survive(
    kernel: CodeSession, code: str, line: int | None
) -> None:
    await printed(kernel, "var survivor = await echo(1)")
    outcome = await error(kernel, code, timeout_s=0.2)
    assert outcome.timed_out
    assert outcome.kernel_lost is None
    assert outcome.stdout.text()[0] == "begun\n"
    assert outcome.error is not None
    assert (outcome.error.type, outcome.error.line) == ("Interrupted", line)
    assert await shown(kernel, "await require('timers/promises').setTimeout(1); survivor + await echo(1)") == "2"


async def test_a_cell_that_cannot_be_interrupted_is_killed(own: CodeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.code.session.GRACE_S", 0.2)
    monkeypatch.setattr("atoll.code.session.DUMP_S", 0.1)
    code = "console.log('stuck'); require('child_process').execSync('sleep 600')"
    outcome = await own.run(code, timeout_s=0.3)
    assert outcome.timed_out
    assert outcome.stdout.text()[0] == "stuck\n"
    with anyio.fail_after(30):
        while own.is_alive:  # the time to notice a kill is short here
            await anyio.sleep(0.01)


# ---- code that damages its kernel


@pytest.mark.parametrize(
    "code",
    [
        "require('fs').writeSync(3, 'no message\\n')",
        """require('fs').writeSync(3, '{"t":"done","cell":"x"}\\n')""",
        "require('fs').writeSync(3, '[1]\\n'.repeat(10000)); for (;;) ;",
        "const all = Buffer.alloc(1 << 20, 'x'); for (let i = 0; i < 64; i++) require('fs').writeSync(3, all)",
        "JSON.stringify = () => 'junk'; JSON.parse = () => null; require('fs').closeSync(3); await echo(1)",
        "process.reallyExit(9)",
        "process.removeAllListeners('uncaughtException'); setImmediate(() => { throw 1 }); await never()",
    ],
)
async def test_a_damaged_channel_ends_the_kernel_and_nothing_else(own: CodeSession, code: str) -> None:
    outcome = await error(own, code, timeout_s=5)
    assert outcome.kernel_lost is not None
    assert not own.is_alive
    assert {call.tool for call in handler(own).calls} <= {"echo", "never"}


async def test_a_forged_call_is_checked_like_any_other(own: CodeSession) -> None:
    forged = '{"t":"call","call":77,"cell":1,"tool":"rm -rf /","args":{}}'
    await own.run(f"require('fs').writeSync(3, {forged + chr(10)!r}); await echo(1)", timeout_s=30)
    assert [call.tool for call in handler(own).calls] == ["rm -rf /", "echo"]


async def test_rebound_builtins_do_not_stop_the_kernel(own: CodeSession) -> None:
    code = (
        "JSON.parse = JSON.stringify = () => { throw new Error('rebound') }; setImmediate = setTimeout = null\n"
        "Promise = null; Error.prepareStackTrace = () => 5; process.stdout.write = () => true; echo = 1\n"
        "process.on('SIGINT', () => {})"
    )
    await own.run(code, timeout_s=30)
    failed = (await error(own, "for (;;) ;", timeout_s=0.3)).error
    assert failed is not None
    outcome = await own.run("1 + 1", timeout_s=30)
    assert outcome.parts[0].data == {"text/plain": "2"}
    failed = (await error(own, "null.x")).error
    assert failed is not None
    assert failed.type == "TypeError"


# ---- coming back


async def test_another_handle_goes_on_with_variables_and_calls_that_wait(kernel: CodeSession) -> None:
    sandbox = kernel.sandbox
    first = await CodeSession.start(sandbox, Handler(), stubs=STUBS, language="javascript")
    await printed(first, "const kept = 'variable'")
    async with anyio.create_task_group() as group:
        group.start_soon(first.run, "const answer = await never()\nconsole.log(kept, answer)")
        with anyio.fail_after(30):
            while not handler(first).calls:
                await anyio.sleep(0.01)
        await first.detach()
        group.cancel_scope.cancel()

    class Later(Handler):
        async def _answer(self, call: CallMessage) -> dict[str, Any]:
            return {"value": f"{call.tool} answered"}

    second = await CodeSession.attach(sandbox, first.process_id, Later(), language="javascript")
    assert second.is_waiting
    outcome = await second.finish(timeout_s=30)
    assert outcome.error is None
    assert outcome.stdout.text()[0] == "variable never answered\n"
    assert await printed(second, "console.log(kept)") == "variable\n"
    await second.aclose()


async def test_an_image_without_node_is_refused(kernel: CodeSession) -> None:
    with pytest.raises(InvalidRequest, match="the image has no node9"):
        await CodeSession.start(kernel.sandbox, Handler(), stubs=STUBS, language="javascript", interpreter="node9")
    with pytest.raises(InvalidRequest, match="there is no language 'cobol'"):
        await CodeSession.start(kernel.sandbox, Handler(), stubs=STUBS, language="cobol")  # type: ignore[arg-type]


# ---- TypeScript

TYPED = """
interface Point { x: number; y?: number }
const far: Point = { x: 7 };
function sub<T extends Point>(a: T, b: Point): number { return a.x - b.x }
await Promise.resolve(sub(far, { x: 5 } as Point));
"""


async def of_typescript(session: CodeSession, code: str) -> tuple[list[str], str]:
    """The value of a cell of TypeScript, and the message of its error."""
    outcome = await session.run(code, timeout_s=60, is_typescript=True)
    assert outcome.stderr.text()[0] == ""
    return [part.data["text/plain"] for part in outcome.parts], outcome.error.message if outcome.error else ""


async def test_types_are_taken_off_by_a_node_that_can(engine: Engine) -> None:
    newer = Path(playwright.__file__).parent / "driver/node"  # the image's own may be older
    async with await engine.create(mounts=[Mount(source=str(newer.parent), target="/opt/node")]) as sandbox:
        session = await CodeSession.start(
            sandbox, Handler(), stubs=STUBS, language="javascript", interpreter="/opt/node/node"
        )
        assert await of_typescript(session, TYPED) == (["2"], "")
        assert await of_typescript(session, "far.x satisfies number") == (["7"], "")
        assert (await of_typescript(session, "let x: = 5"))[1]
        assert "the package typescript" in (await of_typescript(session, "enum E { A }"))[1]
        assert await shown(session, "sub(far, far)") == "0"


async def test_types_are_taken_off_by_the_package_typescript(engine: Engine) -> None:
    compiler = Path(__file__).parents[2] / "clients/typescript/node_modules/typescript"
    target = "/opt/work/node_modules/typescript"
    async with await engine.create(mounts=[Mount(source=str(compiler), target=target)]) as sandbox:
        session = await CodeSession.start(sandbox, Handler(), stubs=STUBS, language="javascript", cwd="/opt/work")
        assert await of_typescript(session, TYPED) == (["2"], "")
        assert await of_typescript(session, "enum E { A = 4 }\nE.A") == (["4"], "")
        assert (await of_typescript(session, "let x: = 5"))[1]


async def test_without_what_can_take_types_off_the_cell_says_so(kernel: CodeSession) -> None:
    if await shown(kernel, "typeof require('node:module').stripTypeScriptTypes") == "'function'":
        assert await of_typescript(kernel, TYPED) == (["2"], "")
    else:
        assert "Write JavaScript instead" in (await of_typescript(kernel, TYPED))[1]
    assert await shown(kernel, "1 + 1") == "2"
