"""Cells of bash: one shell that stays, whatever a cell does to end it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

from atoll import Engine, InvalidRequest
from atoll.code.session import CodeSession
from tests.code.test_session import STUBS, Handler, error, handler, printed

pytestmark = pytest.mark.runtimes("crun", "runsc")


@pytest.fixture(scope="module")
async def shell(engine: Engine) -> AsyncIterator[CodeSession]:
    """One session for the tests that leave nothing behind."""
    async with await engine.create() as sandbox:
        session = await CodeSession.start(sandbox, Handler(), stubs=STUBS, language="bash")
        yield session
        await session.aclose()


@pytest.fixture
async def own(shell: CodeSession) -> AsyncIterator[CodeSession]:
    """A session for one test, in the sandbox of the others."""
    session = await CodeSession.start(shell.sandbox, Handler(), stubs=STUBS, language="bash")
    yield session
    await session.aclose()


STATE = (
    "cd /tmp; plain='a  b'; export EXPORTED=c; declare -A map=([k]='v w'); list=(1 '2 3')\n"
    'f() { echo "$plain|$EXPORTED|${map[k]}|${list[1]}|$PWD"; }'
)
KEPT = "a  b|c|v w|2 3|/tmp\n"


@pytest.mark.runtimes("crun")
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("true", 0),
        ("exit", 0),
        ("g() { exit 3; }; g", 3),
        ("set -euo pipefail\nfalse | true\necho never", 1),
        ("set -u; echo $nothing", 127),
        ("${nothing:?is needed}", 127),
        ("break 9", 0),
        ("continue", 0),
        ("if true; then", 2),
        ("exec >/dev/null 2>&1 3>&1; echo hidden; exit 4", 4),
        ("trap 'exit 5' EXIT; unset BASH PATH; exit 6", 6),
    ],
)
async def test_what_a_cell_sets_stays_however_it_ends(own: CodeSession, code: str, status: int) -> None:
    await printed(own, STATE)
    outcome = await own.run(code, timeout_s=30)
    assert outcome.kernel_lost is None
    assert (0 if outcome.error is None else outcome.error.message) == (status and f"exit status {status}")
    assert await printed(own, 'f; echo "$-"') == KEPT + "hBc\n"
    assert await printed(own, "bash -c 'echo $EXPORTED$plain'" if code[:4] != "trap" else "echo c") == "c\n"


async def test_a_failure_has_its_status_and_line(shell: CodeSession) -> None:
    cases = {
        "true\n\nls /nonexistent\n": (2, 3, "line 3: ls /nonexistent"),
        "set -e\necho x\n(exit 7)\necho y": (7, 3, "line 3: (exit 7)"),
        "false\n[ 1 = 2 ] && echo x": (1, 1, "line 1: false"),
        "missing_command 'ö'": (127, 1, "line 1: missing_command 'ö'"),
    }
    for code, (status, line, text) in cases.items():
        failed = (await error(shell, code)).error
        assert failed is not None
        assert (failed.type, failed.message, failed.line) == ("ExitStatus", f"exit status {status}", line)
        assert failed.traceback == f"{text}\nExitStatus: exit status {status}"
    assert await printed(shell, "false\necho $LINENO") == "2\n"
    outcome = await shell.run("\nif fi")
    assert "line 2: syntax error" in outcome.stderr.text()[0]


async def test_output_belongs_to_the_cell_and_background_jobs_go_on(shell: CodeSession) -> None:
    outcome = await shell.run(
        "printf 'out'; echo err >&2; (until [ -e /tmp/go ]; do read -t 0.01; done; echo later) &", timeout_s=30
    )
    assert (outcome.stdout.text()[0], outcome.stderr.text()[0]) == ("out", "err\n")
    assert await printed(shell, "touch /tmp/go; wait; echo now") == "later\nnow\n"
    assert await printed(shell, "sleep 300 &\nkept=$!; exit 0") == ""
    assert await printed(shell, "kill -0 $kept && kill $kept && echo there") == "there\n"


async def test_descriptors_and_traps_are_the_cells(shell: CodeSession) -> None:
    assert await printed(shell, "exec 3>/tmp/three 7>/tmp/seven; echo a >&7; trap 'echo bye' EXIT; exit 0") == "bye\n"
    assert await printed(shell, "echo b >&7; cat /tmp/seven") == "a\nb\n"
    assert await printed(shell, "(trap 'echo inner' EXIT; :); exec >/tmp/log; echo hidden") == "inner\n"
    assert await printed(shell, "cat /tmp/log") == "hidden\n"


async def test_there_is_no_input(shell: CodeSession) -> None:
    assert await printed(shell, 'read -r line || echo "none: $line"; cat') == "none: \n"


async def test_files_in_the_outbox_are_named(own: CodeSession) -> None:
    outcome = await own.run(
        'cd; mkdir -p outbox/d; echo 1 > outbox/a; echo é > "outbox/d/é\'\\" 😀"; cd /tmp', timeout_s=30
    )
    assert dict(outcome.outbox) == {"a": 2, "d/é'\" 😀": 3}
    assert (await own.run("exit 1")).outbox == ()
    assert dict((await own.run("echo 22 > ~/outbox/a")).outbox) == {"a": 3}


@pytest.mark.parametrize(
    "code",
    [
        "sleep 600",
        "f() { while :; do :; done; }; f",
        "sleep 600 | cat",
        "read -r x < <(sleep 600)",
        "trap '' INT; while :; do :; done",
    ],
)
async def test_an_interrupt_ends_the_foreground_and_keeps_the_session(
    shell: CodeSession, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    if "trap" in code:
        monkeypatch.setattr("atoll.code.session.GRACE_S", 0.2)
    await printed(shell, "sleep 300 & job=$!; survivor=1")
    outcome = await error(shell, f"echo begun\n{code}", timeout_s=0.2)
    assert outcome.timed_out
    assert outcome.kernel_lost is None
    assert outcome.stdout.text()[0] == "begun\n"
    assert outcome.error is not None
    assert outcome.error.type == "Interrupted"
    assert await printed(shell, "kill -0 $job && kill $job && echo $survivor") == "1\n"


@pytest.mark.parametrize(
    ("code", "lost"),
    [
        ("echo 'no message' >&247", True),
        ('echo \'{"t":"done","cell":"x"}\' >&247; sleep 60', True),
        ("head -c 64000000 /dev/zero >&247", True),
        ("exec 247>&-", True),
        ("exec echo replaced", True),
        ("kill -9 $$", True),
        ("trap '' INT USR2; while :; do :; done", True),
        ("printf() { :; }; read() { :; }; eval() { :; }; trap() { :; }; exit() { :; }; echo() { :; }", False),
        ("__atoll_end() { :; }; __atoll_next() { :; }", True),
    ],
)
async def test_a_damaged_shell_ends_itself_and_nothing_else(
    own: CodeSession, monkeypatch: pytest.MonkeyPatch, code: str, lost: bool
) -> None:
    monkeypatch.setattr("atoll.code.session.GRACE_S", 0.2)
    monkeypatch.setattr("atoll.code.session.DUMP_S", 0.1)
    outcome = await own.run(code, timeout_s=0.3)
    assert (outcome.timed_out or outcome.error is not None) == lost
    with anyio.fail_after(30):
        while own.is_alive == lost:  # the time to notice a kill is short here
            await anyio.sleep(0.01)
    assert handler(own).calls == []


async def test_another_handle_goes_on_with_the_shell(shell: CodeSession) -> None:
    first = await CodeSession.start(shell.sandbox, Handler(), stubs=STUBS, language="bash")
    await printed(first, STATE)
    await first.detach()
    second = await CodeSession.attach(shell.sandbox, first.process_id, Handler(), language="bash")
    assert not second.is_waiting
    assert await printed(second, "f") == KEPT
    await second.aclose()


async def test_code_of_any_bytes_arrives(shell: CodeSession) -> None:
    text = "tab\t 'quotes\" \\n $HOME 日本 \r" + "x" * 20_000
    assert await printed(shell, f"cat <<'END'\n{text}\nEND\n") == f"{text}\n"
    assert await printed(shell, "echo a\0b") == "ab\n"
    assert await printed(shell, "") == ""


async def test_an_image_without_bash_is_refused(shell: CodeSession) -> None:
    with pytest.raises(InvalidRequest, match="the image has no bash9"):
        await CodeSession.start(shell.sandbox, Handler(), stubs=STUBS, language="bash", interpreter="bash9")
    assert await shell.complete("ec") == ("", ())


async def test_an_interrupted_wait_of_the_host_interrupts_the_cell(shell: CodeSession) -> None:
    with anyio.move_on_after(0.2) as scope:
        await shell.run("count=0; while :; do count=$((count + 1)); done")
    assert scope.cancelled_caught
    assert await printed(shell, "echo $((count > 0))") == "1\n"
