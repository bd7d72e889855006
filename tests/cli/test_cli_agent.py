"""`agent`: what is shown, asked, kept and cleaned up, with scripted models and real sandboxes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from atoll.agents.events import RetryEvent, TextEvent, Tokens, ToolCallEvent, ToolResultEvent
from atoll.agents.history import History
from atoll.agents.loop import Answer
from atoll.surfaces.cli import render, transcript
from atoll.surfaces.cli.conversation import _question
from atoll.testing.waiting import wait_until
from atoll.tools.pool import SHELL
from atoll.tools.tasks import TaskEvent
from atoll.tools.tool import ToolResult, ToolSet
from tests.cli.driving import Atoll

CTRL_C, CTRL_D = b"\x03", b"\x04"


@pytest.fixture
def script(tmp_path: Path) -> Any:
    """Writes a script and gives what `--model` is given."""

    def write(text: str) -> str:
        path = tmp_path / f"script-{len(list(tmp_path.iterdir()))}.toml"
        path.write_text(text)
        return f"script:{path}"

    return write


HELLO = """
[[step]]
text = "I look."
[[step.call]]
tool = "shell"
input.command = "echo so it is; echo twice >&2"
[[step.call]]
tool = "shell"
input.sandbox = "other"
input.command = "echo bad; exit 3"
[[step.call]]
tool = "read_file"
input.path = "none.txt"
[[step]]
text = "It is so."
expect.result = [{ contains = ["so it is"] }, { fields = { exit_code = 3 } }, { error = true }]
"""
FAMILY = """
[[step]]
[[step.call]]
tool = "task"
input.prompt = "child's work"
[[step]]
text = "The child is back."
expect.result = [{ error = "any" }]
[[conversation]]
prompt = "child's work"
[[conversation.step]]
text = "I begin.\\nNow I write."
[[conversation.step.call]]
tool = "write"
input = { path = "file", content = "by the child" }
[[conversation.step]]
text = "It is written."
expect.result = [{ error = "any" }]
"""
CAREFUL = """
[[step]]
[[step.call]]
tool = "task"
input.prompt = "child's work"
[[step]]
text = "The child is back."
[[conversation]]
prompt = "child's work"
[[conversation.step]]
[[conversation.step.call]]
tool = "write"
input = { path = "file", content = "by the child" }
[[conversation.step.call]]
tool = "bash"
input.command = "echo ran\\nexit 5"
[[conversation.step.call]]
tool = "write"
input = { path = "second", content = "x" }
[[conversation.step]]
text = "Two are written."
expect.result = [{}, { error = true, contains = ["refused"] }, {}]
"""
TURNS = """
[[step]]
text = "One."
[[step]]
text = "Two."
expect.prompt = ["second"]
"""
LONG = """
[[step]]
text = "This takes long."
[[step.call]]
tool = "shell"
input.command = "setsid sleep 4321 & sleep 4321"
[[step]]
text = "I was interrupted."
expect.prompt = ["go on"]
expect.result = [{ error = true, contains = ["interrupted"] }]
"""


CODE = """
[[step]]
[[step.call]]
tool = "execute_code"
input.code = '''
import asyncio
done = await asyncio.gather(*(shell(f"echo {n}; exit {n % 2}") for n in range(3)))
print([each["exit_code"] for each in done])
try:
    await sandbox_destroy("default")
except ToolError as error:
    print(error.type)
'''
[[step.call]]
tool = "shell"
input.command = "echo direct"
[[step]]
text = "Done."
expect.result = [{ contains = ["[0, 1, 0]"] }, {}]
"""


def sessions(atoll: Atoll) -> list[str]:
    """Names of sandboxes of conversations that have no name."""
    return [name for name in atoll.names() if name.startswith("agent-")]


# -------------------------------------------------------------------------------------------------------- what is shown


def test_the_text_is_the_output_and_what_is_done_is_told_beside_it(atoll: Atoll, script: Any) -> None:
    done = atoll("agent", "--model", script(HELLO), "hi")
    assert done.stdout == b"I look.\nIt is so.\n"
    told = done.stderr.decode()
    assert "\x1b" not in told
    assert "\r" not in told
    assert "  · shell  default  $ echo so it is; echo twice >&2\n" in told
    assert re.search(r"  ✓ shell  default  \$ echo so it is; echo twice >&2  [\d.]+ s\n    so it is\n    twice\n", told)
    assert re.search(r"  ✗ shell  other  \$ echo bad; exit 3  exit 3, [\d.]+ s\n    bad\n", told)
    assert re.search(r"  ✗ read_file  default  none.txt  [\d.]+ s\n    /home/user/none.txt: no such file", told)
    assert re.search(r"^2 steps · 100 tokens in, \d+ out · [\d.]+ s$", told, re.MULTILINE)
    assert sessions(atoll) == []


def test_every_event_is_a_line_of_json_and_the_last_one_the_answer(atoll: Atoll, script: Any) -> None:
    done = atoll("agent", "--json", "--tools", "coding,sprites", "--model", script(FAMILY), "hi")
    *events, answer = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.stderr == b""
    assert (answer["type"], answer["text"], answer["ended"], answer["steps"]) == (
        "answer",
        "The child is back.",
        "done",
        2,
    )
    assert answer["tokens"]["input"] == 200, "the child's are counted too"
    kinds = [event["kind"] for event in events if event["type"] == "task"]
    assert (kinds[0], kinds[-1]) == ("started", "ended")
    assert {"text", "tool_call", "tool_result", "usage"} < set(kinds)
    ended = [index for index, event in enumerate(events) if event["type"] == "task"][-1]
    assert events[ended + 1]["type"] == "tool_result", "what a child did is told before its result"
    assert sessions(atoll) == []


def test_a_failure_is_the_last_line_of_json(atoll: Atoll, script: Any) -> None:
    done = atoll("agent", "--json", "--model", script(TURNS.replace("One", "1")), "--steps", "1", "hi")
    assert json.loads(done.stdout.splitlines()[-1])["text"] == "1."
    done = atoll("agent", "--json", "--model", script(HELLO), "--steps", "1", "hi", status=1)
    error = json.loads(done.stdout.splitlines()[-1])["error"]
    assert error["code"] == "budget_exceeded"
    assert "--history" in error["hint"]


def test_children_are_told_with_their_ids_and_share_the_budget(atoll: Atoll, script: Any) -> None:
    told = atoll("agent", "--tools", "coding", "--model", script(FAMILY), "hi").stderr.decode()
    (id,) = set(re.findall(r"^    ([0-9a-f]{8}) ", told, re.MULTILINE))
    assert f"    {id} worker in /home/user\n    {id} I begin.\n    {id} Now I write.\n" in told
    assert re.search(rf"    {id} ✓ write  file  12 B, [\d.]+ s\n    {id} It is written.\n", told)
    assert re.search(r"  ✓ task  worker: child's work  [\d.]+ s\n    It is written.\n", told)
    words = ("--tools", "coding", "--model", script(FAMILY), "--tokens", "120", "hi")
    done = atoll("agent", *words, status=1)
    assert b"used up its 120 tokens" in done.stderr


def test_nothing_that_models_and_sandboxes_say_steers_the_terminal(atoll: Atoll, script: Any) -> None:
    hostile = r"\u001b[2J\u001b]0;title\u0007\u009b31m\u202e"
    text = rf"""
[[step]]
text = "hi {hostile}\r\n"
[[step.call]]
tool = "shell"
input.command = "printf '\\033[2J\\033]0;x\\007\\r\\233plain\\n'"
input.sandbox = "{hostile}"
[[step.call]]
tool = "shell"
input.command = "printf '\\033[2J\\033]0;x\\007\\033[31mred\\033[0m\\r\\n'; true {hostile}"
[[step]]
text = "done"
expect.result = [{{ error = true }}, {{}}]
"""
    done = atoll("agent", "--model", script(text), "hi")
    for stream in (done.stdout.decode(), done.stderr.decode()):
        assert not [c for c in stream if not c.isprintable() and c != "\n"]
    assert b"\n    red\n" in done.stderr, "colours are left out"
    assert rb"\u202e" in done.stdout, "what is unknown is written out"


def test_a_line_of_a_call_says_what_matters_of_it() -> None:
    assert transcript._outcome(ToolResult(content="", structured={"files": ["a", "b"]})) == (False, "2 files", [])
    assert transcript._outcome(ToolResult(content="", structured={"size": 2048})) == (False, "2.0 KiB", [])
    assert transcript._outcome(ToolResult(content="", structured={"url": "http://x"})) == (False, "", ["http://x"])
    long = "\n".join(map(str, range(20)))
    assert transcript._outcome(ToolResult(content="", structured={"output": long, "exitCode": 0}))[2] == [
        "17",
        "18",
        "19",
    ]


async def test_an_answer_that_broke_off_or_was_cut_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    shown = transcript.Screen(ToolSet(), "model")
    await shown.take(TextEvent(text="half an"))
    await shown.take(RetryEvent(reason="the connection broke", wait_s=0.5))
    await shown.take(TextEvent(text="an answer that is too"))
    await shown.end(Answer("", "length", 1, Tokens(), History()), transcript.TurnUsage(1, Tokens(input=5000), 3.0))
    out, err = capfd.readouterr()
    assert out == "half an\nan answer that is too\n"
    assert "  ↻ the answer broke off; retrying in 0.5 s: the connection broke\n" in err
    assert "the answer is truncated" in err
    assert "1 step · 5,000 tokens in, 0 out · 3.00 s\n" in err


async def test_a_call_of_a_child_may_be_called_as_one_of_its_parent(capfd: pytest.CaptureFixture[str]) -> None:
    shown = transcript.Screen(ToolSet(), "model")
    call = ToolCallEvent(id="call_0", tool="grep", input={"pattern": "the child's"})
    result = ToolResultEvent(id="call_0", tool="grep", result=ToolResult(content="x"), duration_s=1)
    await shown.take(ToolCallEvent(id="call_0", tool="task", input={"role": "worker", "prompt": "Look"}))
    shown.take_child(TaskEvent(task="task-1", kind="tool_call", data=call.model_dump(exclude={"type"})))
    shown.take_child(TaskEvent(task="task-1", kind="tool_result", data=result.model_dump(exclude={"type"})))
    await shown.take(result.model_copy(update={"tool": "task"}))
    told = capfd.readouterr().err
    assert "1 ✓ grep  the child's  1.00 s\n" in told
    assert "  ✓ task  worker: Look  1.00 s\n" in told


def test_a_question_cannot_be_made_to_look_like_another_one() -> None:
    padded = {"command": "rm -rf /" + " " * 56 + "May it? [y]es, [N]o\n" * 3, "odd\nname" * 30: "漢" * 100}
    *told, asked = _question(SHELL, padded, 24, 60).split("\n")
    assert asked == "May it? [y]es, [N]o, [a]lways for shell: "
    assert told[0] == "The model wants to call shell:"
    assert all(line.startswith("  ") and render.columns_of(line) <= 60 for line in told[1:-1])
    assert "rm -rf /" in told[2]
    assert "".join(line.strip() for line in told).count("漢") == 100
    hidden = _question(SHELL, {"command": "rm -rf /" + "\n" * 90 + "ls"}, 24, 80)
    assert "These are 93 lines, more than the terminal shows.\nMay it?" in hidden


# -------------------------------------------------------------------------------------------- what is asked and kept


@pytest.mark.parametrize("word", [["-"], []])
def test_the_prompt_may_come_from_standard_input(atoll: Atoll, script: Any, word: list[str]) -> None:
    model = script('[[step]]\ntext = "Yes."\nexpect.prompt = ["from\\nthe pipe"]')
    assert atoll("agent", "--model", model, *word, input=b"from\nthe pipe").stdout == b"Yes.\n"


def test_instructions_are_words_or_a_file(atoll: Atoll, script: Any, tmp_path: Path) -> None:
    model = script('[[step]]\ntext = "Aye."\nexpect.instructions = ["a pirate"]')
    (tmp_path / "told").write_text("You are\na pirate.")
    for word in ("You are a pirate.", f"@{tmp_path}/told"):
        assert atoll("agent", "--model", model, "--instructions", word, "hi").stdout == b"Aye.\n"


def test_the_system_prompt_describes_the_sandboxes_unless_it_is_replaced(
    atoll: Atoll, script: Any, tmp_path: Path
) -> None:
    told = '"You work for a user", "not the user\'s machine", "There is no network", "Image: host"'
    model = script(f'[[step]]\ntext = "Aye."\nexpect.instructions = [{told}]')
    assert atoll("agent", "--model", model, "hi").stdout == b"Aye.\n"
    model = script(f'[[step]]\ntext = "Aye."\nexpect.instructions = [{told}, "a pirate"]')
    assert atoll("agent", "--model", model, "--instructions", "You are a pirate.", "hi").stdout == b"Aye.\n"
    (tmp_path / "told").write_text("Only this.")
    model = script('[[step]]\ntext = "Aye."\nexpect.instructions = ["Only this.\\n\\nAnd that."]')
    words = ("agent", "--model", model, "--system", f"@{tmp_path}/told")
    assert atoll(*words, "--instructions", "And that.", "hi").stdout == b"Aye.\n"
    model = script('[[step]]\ntext = "Aye."\nexpect.instructions = ["Image: host"]')
    assert (
        "should contain 'Image: host', but is: 'Only this.'"
        in atoll("agent", "--model", model, "--system", "Only this.", "hi", status=1).stderr.decode()
    )


def test_a_conversation_is_kept_and_gone_on_with(atoll: Atoll, script: Any, tmp_path: Path) -> None:
    words = ("agent", "--model", script(TURNS), "--history", str(tmp_path / "kept.json"))
    assert atoll(*words, "first").stdout == b"One.\n"
    assert atoll(*words, "second").stdout == b"Two.\n"
    assert (tmp_path / "kept.json").stat().st_mode & 0o777 == 0o600


def test_a_spent_budget_says_how_to_go_on_and_that_works(atoll: Atoll, script: Any, tmp_path: Path) -> None:
    words = ("agent", "--model", script(HELLO), "--history", str(tmp_path / "kept talk.json"))
    done = atoll(*words, "--steps", "1", "hi", status=1)
    assert b"error: the run used up its 1 steps" in done.stderr
    assert f"hint: continue with: atoll agent --history '{tmp_path}/kept talk.json' 'go on'" in done.stderr.decode()
    assert atoll(*words, "go on").stdout == b"It is so.\n"


def test_a_session_with_a_name_keeps_its_sandboxes(atoll: Atoll, script: Any) -> None:
    session = atoll.new_name()
    write = 'tool = "shell"\ninput.command = "echo kept >> file; cat file"'
    model = script(f'[[step]]\n[[step.call]]\n{write}\n[[step]]\ntext = "Done."')
    atoll("agent", "--model", model, "--session", session, "hi")
    told = atoll("agent", "--model", model, "--session", session, "--memory", "1g", "hi").stderr.decode()
    assert "    kept\n    kept\n" in told
    assert f"{session}.default" in atoll.names()
    atoll("rm", f"{session}.default")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tools", "agent,coding"], "both have a tool 'glob'"),
        (["--tools", "codin"], "did you mean 'coding'?"),
        (["--steps", "0"], "--steps is 0"),
        (["--tokens", "0"], "--tokens is 0"),
        (["--ask"], "--ask needs a terminal"),
        (["--history", "/no/such/place/file"], "/no/such/place is not a writable directory"),
        (["--instructions", "@/no/such/file"], "cannot read the instructions from /no/such/file"),
        (["--model", "nobody:x"], "'nobody:x' is not the name of a model"),
        (["--model", "anthropic:x"], "set ANTHROPIC_API_KEY"),
        (["--secret-env", "A=-", "-"], "standard input, which holds a secret"),
        (["--cwd", "work"], "the working directory is 'work'; it must be an absolute path"),
        (["--mount", "/tmp:/etc"], "nothing can be mounted on /etc"),
        pytest.param(
            ["--mount", "/no/such:/work"],
            "/no/such cannot be mounted: there is no such directory",
            marks=pytest.mark.local("a server says only what its operator allows"),
        ),
    ],
)
def test_what_cannot_work_is_told_before_anything_is_done(
    atoll: Atoll, script: Any, words: list[str], said: str
) -> None:
    atoll.env.pop("ANTHROPIC_API_KEY", None)
    prompt = [] if "-" in words else ["hi"]
    done = atoll("agent", *prompt, "--model", script(TURNS), *words, status=2)
    assert said in done.stderr.decode().splitlines()[0]
    assert done.stdout == b""


def test_without_the_extra_it_says_what_to_install() -> None:
    program = "import sys; sys.modules['pydantic_ai'] = None\nfrom atoll.surfaces.cli import main\nsys.exit(main())"
    done = subprocess.run([sys.executable, "-c", program, "agent", "hi"], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"error: agents need packages that are not installed; install Atoll with its extra")
    assert done.stderr.endswith(b"pip install '/path/to/atoll[agents]'\n")


# ---------------------------------------------------------------------------------------------------------- how it ends


def test_a_signal_ends_it_with_its_sandboxes_and_keeps_the_conversation(
    atoll: Atoll, script: Any, tmp_path: Path
) -> None:
    words = ("agent", "--model", script(LONG), "--history", str(tmp_path / "kept.json"))
    started = atoll.start(*words, "hi")
    started.read_until(b"This takes long.")
    wait_until(lambda: any(atoll.runs(name, "sleep 4321") for name in sessions(atoll)), "the command runs")
    started.send_signal(signal.SIGTERM)
    assert started.wait() == 128 + signal.SIGTERM
    assert "✗ shell  default  $ setsid sleep 4321 & sleep 4321  cut off" in started.errors().decode()
    assert sessions(atoll) == []
    assert atoll(*words, "go on").stdout == b"I was interrupted.\n"


def test_a_conversation_that_cannot_be_kept_is_told_after_how_it_ended(
    atoll: Atoll, script: Any, tmp_path: Path
) -> None:
    (tmp_path / "place").mkdir()
    started = atoll.start("agent", "--model", script(LONG), "--history", str(tmp_path / "place" / "kept.json"), "hi")
    started.read_until(b"This takes long.")
    wait_until(lambda: any(atoll.runs(name, "sleep 4321") for name in sessions(atoll)), "the command runs")
    (tmp_path / "place").rmdir()
    started.send_signal(signal.SIGTERM)
    assert started.wait() == 1
    *_, ended, _, error = started.errors().decode().splitlines()
    assert ended.endswith("cut off")
    assert error.startswith(f"error: {tmp_path}/place/")
    assert sessions(atoll) == []


def test_on_a_terminal_turns_are_typed_and_ctrl_c_ends_one(atoll: Atoll, script: Any, tmp_path: Path) -> None:
    session, kept = atoll.new_name(), tmp_path / "kept.json"
    terminal = atoll.terminal(
        "agent", "--model", script(LONG), "--session", session, "--history", str(kept), rows=24, cols=40
    )
    terminal.read_until(b"> ")
    terminal.type(b"hi\n")
    drawn = terminal.read_until(b"1 s\x1b[K").decode()
    assert "This takes long.\r\n" in drawn
    assert re.search(r"\r  [⠀-⣿] shell  default  \$ setsid slee…  0 s\x1b\[K\x1b\[J", drawn)
    assert atoll.runs(f"{session}.default", "sleep 4321")
    terminal.type(CTRL_C)
    terminal.read_until(b"interrupted; what ran was ended")
    terminal.read_until(b"> ")
    wait_until(lambda: not atoll.runs(f"{session}.default", "sleep 4321"), "the whole tree is gone")
    assert "interrupted" in kept.read_text()
    terminal.type(b"go\ngo on\n")  # pasted: one prompt of two lines
    terminal.read_until(b"I was interrupted.\r\n")
    terminal.read_until(b"> ")
    terminal.type(b"too much\n")
    terminal.read_until(b"another one was requested")
    terminal.read_until(b"> ")
    terminal.type(b"\n")
    assert terminal.wait() == 0
    assert terminal.is_restored()
    atoll("rm", f"{session}.default")


def test_ask_asks_before_what_may_destroy_and_children_are_asked_for_too(atoll: Atoll, script: Any) -> None:
    terminal = atoll.terminal("agent", "--ask", "--tools", "coding", "--model", script(CAREFUL), "hi")
    terminal.read_until(b"wants to call task:\r\n  prompt: child's work\r\n")
    terminal.read_until(b"[a]lways for task: ")
    terminal.type(b"u\n")  # a slip is asked again
    terminal.read_until(b"Answer y, n or a. May it? [y]es, [N]o, [a]lways for task: ")
    terminal.type(b"y\n")
    terminal.read_until(b"path: file\r\n  content: by the child\r\n")
    terminal.read_until(b"[a]lways for write: ")
    terminal.type(b"a\n")
    terminal.read_until(b"  command:\r\n    echo ran\r\n    exit 5\r\n")
    terminal.read_until(b"[a]lways for bash: ")
    terminal.type(CTRL_D)  # no answer is a no, and the second `write` is not asked for
    seen = terminal.read_until(b"The child is back.").decode()
    assert "May it?" not in seen
    assert seen.count("✓\x1b[0m write") == 2
    assert terminal.wait() == 0
    assert sessions(atoll) == []


def test_what_is_typed_while_a_conversation_starts_is_not_its_first_prompt(atoll: Atoll, script: Any) -> None:
    terminal = atoll.terminal("agent", "--model", script('[[step]]\ntext = "Yes."\nexpect.prompt = ["late"]'))
    terminal.type(b"early\n")
    terminal.read_until("starting …".encode())
    terminal.read_until(b"An empty line ends the conversation.")
    terminal.read_until(b"> ")
    terminal.type(b"late\n")
    terminal.read_until(b"Yes.")
    terminal.read_until(b"> ")
    terminal.type(b"\n")
    assert terminal.wait() == 0


def test_a_ctrl_c_at_a_question_and_at_the_prompt_ends_each(atoll: Atoll, script: Any) -> None:
    terminal = atoll.terminal("agent", "--ask", "--model", script(HELLO))
    terminal.read_until(b"> ")
    terminal.type(b"hi\n")
    terminal.read_until(b"[a]lways for shell: ")
    terminal.type(CTRL_C)
    terminal.read_until(b"interrupted")
    terminal.read_until(b"> ")
    terminal.type(CTRL_C)
    assert terminal.wait() == 128 + signal.SIGINT
    assert sessions(atoll) == []


SERVES = """
[[step]]
[[step.call]]
tool = "shell"
input.command = "python3 -m http.server -b 127.0.0.1 8123 >/dev/null 2>&1 &"
[[step]]
[[step.call]]
tool = "browse"
input.port = 8123
[[step]]
text = "There."
"""


def test_on_a_terminal_ports_are_served_until_ctrl_c(atoll: Atoll, script: Any) -> None:
    terminal = atoll.terminal("agent", "--model", script(SERVES), "serve", cols=300)
    shown = terminal.read_until(b"ports are served until Ctrl-C").decode()
    url = urlsplit(re.findall(r"http://[\w.:/?=-]+", shown)[0])
    with closing(HTTPConnection("127.0.0.1", url.port or 0, timeout=10)) as client:
        client.request("GET", f"/?{url.query}", headers={"Host": url.netloc})
        assert client.getresponse().status < 400
    terminal.type(CTRL_C)
    assert terminal.wait() == 0
    assert sessions(atoll) == []
    piped = atoll("agent", "--model", script(SERVES), "serve")
    assert "ports are no longer served" in piped.stderr.decode()


# ----------------------------------------------------------------------------------------------------------------- code

WRITES = """
[[step]]
[[step.call]]
tool = "execute_code"
input.code = '''
for name in ("one", "two", "three"):
    try:
        print(await write(name, "by code"))
    except ToolError as error:
        print(error)
'''
[[step]]
text = "Written."
"""


def test_code_and_its_calls_are_shown_beside_direct_calls(atoll: Atoll, script: Any) -> None:
    model = script(CODE.replace('"default"', '"none"'))
    done = atoll("agent", "--code", "--model", model, "count")
    assert done.stdout == b"Done.\n"
    told = done.stderr.decode()
    assert "    │ import asyncio\n    │ done = await asyncio.gather(" in told
    assert re.search(r"    ↳ ✓ shell  default  \$ echo 2; exit 0  [\d.]+ s\n", told)
    assert re.search(r"    ↳ ✗ sandbox_destroy  none  [\d.]+ s\n    ↳   SandboxNotFound: ", told)
    assert re.search(r"  ✓ execute_code  import asyncio …  4 calls, [\d.]+ s\n    \[0, 1, 0\]\n", told)
    lines = [json.loads(line) for line in atoll.text("agent", "--code", "--json", "--model", model, "go").splitlines()]
    calls = [line for line in lines if line["type"] == "code_call"]
    assert [call["tool"] for call in calls] == ["shell"] * 3 + ["sandbox_destroy"]
    assert calls[-1]["error"].startswith("SandboxNotFound")
    newest = atoll.json("trace", "--json")[0]
    assert (newest["executions"], newest["calls"]) == (1, 4)


def test_calls_of_code_that_may_destroy_something_are_asked_about(atoll: Atoll, script: Any) -> None:
    screen = atoll.terminal("agent", "--code", "--ask", "--tools", "coding", "--model", script(WRITES), "write")
    screen.read_until(b"The model wants to call execute_code:")
    screen.read_until(b"[a]lways for execute_code: ")
    screen.type(b"y\n")
    for name, answer in ((b"one", b"y"), (b"two", b"n"), (b"three", b"a")):
        screen.read_until(b"The model's code wants to call write:")
        screen.read_until(b"path: " + name)
        screen.read_until(b"[a]lways for write: ")
        screen.type(answer + b"\n")
    screen.read_until(b"ApprovalDenied: write was not approved")
    screen.read_until(b"Written.")
    assert screen.wait() == 0
