"""`python`, `run --code`, `exec --code`, `approvals` and `trace`: code on the command line."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import anyio
import pytest

from atoll.code.approvals import ApprovalRequest, StoredApprovals
from atoll.code.audit import CodeAudit
from atoll.code.languages import LanguageName
from atoll.code.results import CallRecord, ExecutionFailure, ExecutionResult
from atoll.surfaces.cli.repl import is_complete
from atoll.testing.waiting import wait_until
from tests.cli.driving import Atoll

CTRL_C, CTRL_D = b"\x03", b"\x04"
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
IMAGE = f"""
class Chart:
    def _repr_png_(self):
        import base64
        return base64.b64decode("{PNG}")
"""

# ------------------------------------------------------------------------------------------------------------- a file


def test_a_file_of_code_runs_as_one_cell(atoll: Atoll, box: str, tmp_path: Path) -> None:
    file = tmp_path / "cell.py"
    file.write_text("import asyncio, sys\nprint('out')\nprint('err', file=sys.stderr)\nawait asyncio.sleep(0)\n6 * 7")
    done = atoll("exec", box, "--code", str(file))
    assert (done.stdout, done.stderr) == (b"out\n42\n", b"err\n")
    done = atoll("exec", "--code", "-", box, input=b"open('left', 'w')\n1 / 0", status=1)
    assert done.stderr.decode().endswith(
        'File "<cell 1>", line 2, in <module>\n    1 / 0\n    ~~^~~\nZeroDivisionError: division by zero\n'
    )
    assert atoll.text("exec", box, "--", "ls") == "left\n"
    assert not atoll.runs(box, "#atoll-kernel"), "its kernel ended with it"


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("exit(7)", 7, ""),
        ("exit('no data')", 1, "no data\n"),
        ("import time\ntime.sleep(60)", 124, "the code was interrupted after 0.5 s (--timeout)"),
        ("import os\nos.environ['GREETING'], os.getcwd()", 0, ""),
    ],
)
def test_the_exit_status_says_how_code_ended(atoll: Atoll, box: str, code: str, status: int, said: str) -> None:
    limit = "0.5s" if status == 124 else "30s"
    words = ("exec", box, "--code", "-", "--timeout", limit, "--env", "GREETING=hello", "--cwd", "/tmp")
    done = atoll(*words, input=code.encode(), status=status)
    assert said in done.stderr.decode()
    assert done.stdout.decode() == ("('hello', '/tmp')\n" if status == 0 else "")


def test_what_code_shows_and_leaves_in_its_outbox_is_saved(atoll: Atoll, box: str, tmp_path: Path) -> None:
    code = IMAGE + (
        "import os\nos.makedirs('outbox/.git', exist_ok=True)\nopen('outbox/a.csv', 'w').write('1,2')\n"
        "open('outbox/.git/hook', 'w').write('x')\nChart()"
    )
    out = tmp_path / "out"
    done = atoll("exec", box, "--code", "-", "--out", str(out), input=code.encode())
    assert done.stdout.decode().split() == [str(out / "image-1.png"), str(out / "a.csv")]
    assert (out / "image-1.png").read_bytes().startswith(b"\x89PNG")
    assert not (out / ".git").exists()
    assert b"outbox/.git/hook is not saved" in done.stderr
    shown = atoll.json("exec", box, "--code", "-", "--out", str(out), "--json", input=code.encode())
    assert shown["saved"] == [str(out / "image-2.png")]
    assert shown["success"]
    assert [sorted(part["data"]) for part in shown["parts"]] == [["image/png", "text/plain"]]


def test_run_with_code_makes_a_sandbox_and_removes_it(atoll: Atoll) -> None:
    assert atoll.text("run", "--code", "-", input=b"import socket; print(socket.gethostname())").startswith("sandbox-")
    assert [name for name in atoll.names() if name.startswith("sandbox-")] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--code", "a.py", "--", "true"], "both code (--code) and a command were given"),
        (["--code", "a.py", "-t"], "are for commands; leave them out with --code"),
        (["--out", "d", "--", "true"], "--out and --language are for --code FILE"),
        (["--language", "bash", "--", "true"], "--out and --language are for --code FILE"),
        (["--code", "a", "--language", "perl"], "--language is perl; there are python, javascript, bash"),
        (["--code", "/nowhere/a.py"], "cannot read the code from /nowhere/a.py: No such file"),
    ],
)
def test_options_that_do_not_fit_are_refused(atoll: Atoll, words: list[str], said: str) -> None:
    assert said in atoll("exec", "box", *words, status=2).stderr.decode()


# ----------------------------------------------------------------------------------------------------------- a prompt


def test_a_prompt_keeps_its_variables_for_the_next_time(atoll: Atoll, box: str, tmp_path: Path) -> None:
    screen = atoll.terminal("python", box)
    screen.read_until(b">>> ")
    screen.type(b"number = 41\n")
    screen.read_until(b">>> ")
    screen.type(b"for n in range(2):\n")
    screen.read_until(b"... ")
    screen.type(b"    print('n is', n)\n\n")
    screen.read_until(b"n is 1\r\n")
    screen.type(b"numb\t + 1\n")
    screen.read_until(b"number + 1\r\n42\r\n")
    screen.type(b"1 / 0\n")
    screen.read_until(b"ZeroDivisionError: division by zero\r\n")
    screen.read_until(b">>> ")
    screen.type(b"import time; print('be' 'gun'); time.sleep(4321)\n")
    screen.read_until(b"begun\r\n")
    screen.type(CTRL_C)
    screen.read_until(b"KeyboardInterrupt: the cell was interrupted\r\n")
    screen.read_until(b">>> ")
    screen.type(IMAGE.strip().encode() + b"\n\nChart()\n")
    path = screen.read_until(b".png\r\n").decode().split()[-1]
    assert Path(path).read_bytes().startswith(b"\x89PNG")
    shutil.rmtree(Path(path).parent)
    screen.read_until(b">>> ")
    screen.type(b"abandoned" + CTRL_C)
    screen.read_until(b">>> ")
    screen.type(CTRL_D)
    assert screen.wait() == 0
    assert screen.is_restored()
    again = atoll.terminal("python", box)
    again.read_until(b"with the variables of before")
    again.type(b"number\n")
    again.read_until(b"\r\n41\r\n")
    again.type(b"\x1b[A\x1b[A\n")  # two lines up: what was typed before it
    again.read_until(b"Chart()\r\n")
    again.type(b"exit()\n")
    assert again.wait() == 0


def test_a_prompt_without_a_name_has_a_sandbox_of_its_own(atoll: Atoll) -> None:
    screen = atoll.terminal("python")
    screen.read_until(b"which is destroyed at the end")
    screen.read_until(b">>> ")
    assert len([name for name in atoll.names() if name.startswith("sandbox-")]) == 1
    screen.process.send_signal(signal.SIGTERM)
    assert screen.wait() == 128 + signal.SIGTERM
    assert screen.is_restored()
    wait_until(lambda: not [name for name in atoll.names() if name.startswith("sandbox-")], "it is destroyed")


def test_without_a_terminal_all_of_the_input_is_one_cell(atoll: Atoll) -> None:
    name = atoll.new_name()
    done = atoll("python", name, input=b"def f():\n    x = 1\n\n    return x\nf()")
    assert done.stdout == b"1\n"
    assert f"created the sandbox {name}".encode() in done.stderr
    assert b"exists; leave out the options" in atoll("python", name, "--image", "host", input=b"1", status=2).stderr
    assert "--json" not in atoll.text("python", "--help")


def test_a_prompt_speaks_bash_too(atoll: Atoll, box: str) -> None:
    screen = atoll.terminal("python", box, "--language", "bash")
    screen.read_until(b">>> ")
    screen.type(b"cd /tmp; for n in 1 2; do\n")
    screen.read_until(b"... ")
    screen.type(b"echo $n of $PWD; done\n")
    screen.read_until(b"2 of /tmp\r\n>>> ")
    screen.type(CTRL_D)
    assert screen.wait() == 0


def test_the_suffix_of_a_file_says_its_language(atoll: Atoll, box: str, tmp_path: Path) -> None:
    for name, code, said in (("a.mjs", "await 6 * 7", "42\n"), ("a.sh", "echo $((6 * 7))", "42\n")):
        (tmp_path / name).write_text(code)
        assert atoll.text("exec", box, "--code", str(tmp_path / name)) == said
    assert atoll.text("exec", box, "--code", "-", "--language", "bash", input=b"echo $BASH_VERSINFO") != ""


@pytest.mark.parametrize(
    ("language", "lines", "complete"),
    [
        ("javascript", ["f(x => {"], False),
        ("javascript", ["f(x => {", "})"], True),
        ("javascript", ["f(x => {", ""], True),
        ("bash", ["for n in 1 2; do"], False),
        ("bash", ["for n in 1 2; do", "echo $n; done"], True),
        ("bash", ["echo ${x} \\"], False),
        ("bash", ["echo ${x}"], True),
    ],
)
def test_other_languages_go_on_in_the_next_line(language: LanguageName, lines: list[str], complete: bool) -> None:
    assert is_complete(lines, language) is complete


@pytest.mark.parametrize(
    ("lines", "complete"),
    [
        (["x = 1"], True),
        (["await f()"], True),
        (["def f():"], False),
        (["if x: y"], False),
        (["if x: y", ""], True),
        (["def f():", "    return 1"], False),
        (["def f():", "    return 1", ""], True),
        (["x = '''", "", "y"], False),
        (["f(", "1)"], False),
        (["f(", "1)", ""], True),
        (["x ="], True),
        (["%timeit f()"], True),
        (["def f():\n    x = 1\n\n    return x\n\nf()"], True),
    ],
)
def test_a_cell_is_complete_when_python_would_run_it(lines: list[str], complete: bool) -> None:
    assert is_complete(lines) is complete


# ------------------------------------------------------------------------------------------------ approvals and traces


@pytest.fixture
def waiting(state_dir: Path, box: str) -> str:
    """The id of an approval that waits."""
    store = StoredApprovals(state_dir)
    request = ApprovalRequest("code-x", box, 1, "await pay(\n\x1b[2J7)", 1, 1, "pay", {"amount": 7, "to": "Ada"})

    async def ask() -> None:
        with anyio.move_on_after(0.01):
            await store.decide(request)

    anyio.run(ask)
    (approval,) = store.list()
    return approval.id


def test_approvals_are_listed_shown_and_decided(atoll: Atoll, waiting: str, state_dir: Path) -> None:
    assert f'{waiting}  code-x   pending  just now  pay(amount=7, to="Ada")' in atoll.text("approvals")
    (listed,) = atoll.json("approvals", "ls", "--json", "--session", "code-x")
    assert (listed["id"], listed["status"], listed["arguments"]) == (waiting, "pending", {"amount": 7, "to": "Ada"})
    text = atoll.text("approvals", "show", waiting[:5])
    assert '"amount": 7' in text
    assert "  await pay(\n  \\x1b[2J7)\n" in text, "what code wrote does not steer the terminal"
    assert b"is not JSON" in atoll("approvals", "allow", waiting, "--arguments", "{", status=2).stderr
    assert b"must be an object" in atoll("approvals", "allow", waiting, "--arguments", "[1]", status=2).stderr
    assert b"no approval has the id 'zz'" in atoll("approvals", "allow", "zz", status=2).stderr
    decided = atoll.json("approvals", "allow", waiting, "--arguments", '{"amount": 5, "to": "Ada"}', "--json")
    assert (decided["status"], decided["changed_arguments"]["amount"]) == ("allowed", 5)
    assert b"is allowed already" in atoll("approvals", "deny", waiting, status=2).stderr
    (state_dir / "approvals" / f"{waiting}.json").unlink()
    assert atoll.json("approvals", "--json") == []


def test_a_denial_has_a_reason(atoll: Atoll, waiting: str, state_dir: Path) -> None:
    assert atoll.text("approvals", "deny", waiting, "--reason", "too much") == f"{waiting}  denied  pay\n"
    assert json.loads((state_dir / "approvals" / f"{waiting}.json").read_text())["reason"] == "too much"
    atoll("rm", str(json.loads((state_dir / "approvals" / f"{waiting}.json").read_text())["sandbox"]))
    assert atoll.json("approvals", "--json") == [], "its sandbox is gone"
    assert not (state_dir / "approvals" / f"{waiting}.json").exists()


def test_a_trace_is_drawn_in_the_terminal_and_as_a_page(atoll: Atoll, state_dir: Path, tmp_path: Path) -> None:
    audit, began = CodeAudit(state_dir), "2025-01-01T00:00:00Z"
    for number in range(3):
        arguments = {"region": "<b>" * 200, "number": number}
        record = CallRecord.model_validate(
            {"tool": "query", "arguments": arguments, "started_at": began, "duration_s": 0.5, "result_bytes": 10}
        )
        audit.call("code-trace", 1, record)
    audit.execution(
        "code-trace", 1, "for n in range(3):\n    await query(n)", ExecutionResult(success=True, output="x")
    )
    failure = ExecutionFailure(type="KeyError", message="'x'", traceback="Traceback\nKeyError: 'x'")
    audit.execution("code-trace", 2, "{}['x']", ExecutionResult(success=False, output="", error=failure))
    (listed,) = [each for each in atoll.json("trace", "--json") if each["session_id"] == "code-trace"]
    assert (listed["executions"], listed["calls"]) == (2, 3)
    assert "code-trace" in atoll.text("trace")
    screen = atoll.terminal("trace", "code-trace", cols=72)
    assert screen.wait() == 0
    lines = screen.seen.decode().splitlines()
    assert max(map(len, lines)) <= 72
    assert any("✗ cell 2" in line for line in lines)
    assert len(atoll.json("trace", "code-trace", "--json")) == 5
    page = tmp_path / "trace.html"
    assert atoll.text("trace", "code-trace", "--html", str(page)) == f"{page}\n"
    assert "<b>" not in page.read_text()
    assert "<script" not in page.read_text()
    assert b"no session 'code-none' has a trace" in atoll("trace", "code-none", status=2).stderr
    assert b"--html needs a session" in atoll("trace", "--html", "x", status=2).stderr
