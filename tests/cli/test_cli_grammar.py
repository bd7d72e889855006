"""What may be typed, what is said when it is wrong, and how fast help comes."""

from __future__ import annotations

import inspect
import json
import re
import signal
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

from atoll.drivers import registry
from atoll.runtime.state import known, spec
from atoll.surfaces.cli import finish, terminal
from atoll.surfaces.cli.app import ALIASES, HEADINGS, MODULES
from atoll.surfaces.cli.grammar import Option, Parameter, Parser
from atoll.surfaces.cli.options import DEFAULT_TOOLS, RUNTIMES
from atoll.tools import vocabularies
from tests.cli.driving import PROGRAM, Atoll

COMMANDS = [name for names in MODULES.values() for name in names]
GROUPS = {
    "images": "ls pull rm import",
    "volumes": "ls create rm export import",
    "approvals": "ls show allow deny",
    "tenants": "ls show create update rm",
    "keys": "ls show create revoke",
    "bundle": "init check push",
}


def test_help_names_every_command(atoll: Atoll) -> None:
    text = atoll.text("--help")
    assert [command for command in COMMANDS if f"\n  {command} " not in text] == []
    assert atoll.text() == text
    headings = [line for line in text.splitlines() if re.fullmatch("[A-Z].*:", line)]
    assert headings == [*(f"{heading}:" for heading in HEADINGS.values()), "Options:"]
    assert HEADINGS.keys() <= MODULES.keys()


@pytest.mark.parametrize(
    "command", [[c] for c in COMMANDS] + [[g, c] for g, names in GROUPS.items() for c in names.split()]
)
def test_every_command_has_help_within_100_columns(atoll: Atoll, command: list[str]) -> None:
    text = atoll.text(*command, "--help")
    assert "Usage: atoll " + " ".join(command) in text
    assert max(map(len, text.splitlines())) <= 100
    assert not re.search(r"[{}<>]", text.replace("< script", "").replace("< setup", "")), "no raw types"


def test_the_index_names_every_module_and_command() -> None:
    found = {}
    for module in MODULES:
        found[module] = tuple(import_module(f"atoll.surfaces.cli.commands.{module}").commands.commands)
    assert found == MODULES
    files = {path.stem for path in Path(import_module("atoll.surfaces.cli.commands").__path__[0]).glob("[a-z]*.py")}
    assert files == set(MODULES)


@pytest.mark.parametrize("command", [["ls"], ["images", "ls"], ["volumes"], ["storage"]])
def test_json_and_the_state_directory_may_stand_before_and_after_a_command(
    atoll: Atoll, tmp_path: Path, command: list[str]
) -> None:
    options = ["--json", "--state-dir", str(tmp_path)]
    for number in range(len(command) + 1):
        shown = atoll.json(*command[:number], *options, *command[number:])
        assert shown["path"].startswith(str(tmp_path)) if command == ["storage"] else shown == []


def test_an_option_after_a_command_comes_before_the_same_one_in_front_of_it(atoll: Atoll, tmp_path: Path) -> None:
    shown = atoll.json("--state-dir", "/dev/null", "storage", "--json", "--state-dir", str(tmp_path))
    assert shown["path"].startswith(str(tmp_path))


@pytest.mark.parametrize("words", [["shell", "box"], ["mcp"]])
def test_a_command_without_json_output_refuses_it(atoll: Atoll, words: list[str]) -> None:
    for line in (["--json", *words], [*words, "--json"]):
        error = json.loads(atoll(*line, status=2).stdout)["error"]
        assert error["message"] == f"`atoll {words[0]}` has no JSON output; leave out --json"
    assert "--json" not in atoll.text(words[0], "--help")


def test_an_interrupt_before_the_work_begins_leaves_no_coroutine_to_warn_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> int:
        return 0

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    begun = work()
    monkeypatch.setattr(terminal, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        finish(begun, as_json=False, failed=1)
    assert inspect.getcoroutinestate(begun) == inspect.CORO_CLOSED


@pytest.mark.parametrize("module", ["atoll.contract.errors", "atoll.surfaces.cli.app", "atoll.surfaces.cli.terminal"])
def test_an_interrupt_while_it_starts_leaves_no_traceback(atoll: Atoll, module: str) -> None:
    """Ctrl-C at the moment when `module` is imported. What Python does before is not ours."""
    script = f"""
import os, signal, sys
class Interrupting:
    def find_spec(self, name, *rest):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from atoll.__main__ import program
sys.argv = ["atoll", "storage"]
program()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, env=atoll.env)
    assert done.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert done.stderr.strip() == b""


def test_only_the_module_of_the_command_is_imported() -> None:
    package = "atoll.surfaces.cli.commands."
    script = "import sys; from atoll.surfaces.cli import main; main(['ls', '--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    imported = done.stdout.splitlines()[-1].split()
    assert [name for name in imported if name.startswith(package)] == [f"{package}sandboxes"]
    assert not {"anyio", "asyncio", "rich"} & set(imported)


def test_as_a_module_it_ends_with_the_same_status() -> None:
    done = subprocess.run([sys.executable, "-m", "atoll", "nonsense"], capture_output=True, check=False)
    assert done.returncode == 2


HEAVY = frozenset(
    "pydantic pydantic_core typer rich mcp httpx h11 cryptography idna secrets tarfile tempfile shutil hashlib "
    "importlib.metadata atoll.tools atoll.agents atoll.runtime.images atoll.runtime.archive "
    "atoll.runtime.previews".split()
)
"""What takes long to import, and what a command in a sandbox does without. `anyio` and `asyncio` are not among them:
the engine is written with them, and they import `ssl` and `inspect` themselves. `exec` does without where it can."""
LOOP = frozenset({"anyio", "asyncio", "ssl", "dataclasses", "inspect"})
OPEN = "import atoll, anyio\nasync def main():\n    async with atoll.open(): pass\nanyio.run(main)"


def imported_by(script: str, *words: str, env: dict[str, str]) -> set[str]:
    """The modules that a Python program imports, and the packages that they are in."""
    run = f"import sys\n{script}\nprint('imported', *sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", run, *words], capture_output=True, check=True, text=True, env=env)
    modules = done.stderr.splitlines()[-1].removeprefix("imported ").split()
    return {name.rsplit(".", cut)[0] for name in modules for cut in range(name.count(".") + 1)}


def command_line(*words: str) -> str:
    return f"from atoll.surfaces.cli import main\nassert main({list(words)!r}) == 0"


@pytest.mark.local("what an engine of this machine imports")
def test_a_command_in_a_sandbox_imports_neither_what_is_heavy_nor_an_event_loop(atoll: Atoll) -> None:
    """A command takes a few milliseconds in its sandbox: what it waits for is what is imported here."""
    words = (
        "exec",
        "--user",
        "root",
        "-e",
        "A=1",
        "--timeout",
        "1m",
        "-w",
        "/tmp",
        atoll.box(),
        "-c",
        "cat >&2; echo $A",
    )
    unneeded = HEAVY | LOOP | {"ast", "copy", "datetime", "pathlib", "socket", "subprocess", "atoll.contract.model"}
    assert imported_by(command_line(*words), env=atoll.env) & unneeded == set()


@pytest.mark.local("what an engine of this machine imports")
def test_a_command_that_needs_the_engine_imports_nothing_heavy(atoll: Atoll) -> None:
    words = ("exec", atoll.box(), "--json", "--", "true")
    assert imported_by(command_line(*words), env=atoll.env) & HEAVY == set()


@pytest.mark.local("what an engine of this machine imports")
def test_a_new_sandbox_needs_images_and_nothing_else_that_is_heavy(atoll: Atoll) -> None:
    atoll.box()  # the first sandbox of a state directory prepares the image and the seccomp filter
    needed = {"atoll.runtime.images", "hashlib", "shutil"}
    assert imported_by(command_line("run", "--", "true"), env=atoll.env) & HEAVY <= needed


@pytest.mark.local("what an engine of this machine imports")
def test_opening_an_engine_imports_nothing_heavy(atoll: Atoll) -> None:
    assert imported_by(OPEN, env=atoll.env) & HEAVY == set()


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["exec", "--help"]])
def test_help_and_version_import_neither_what_is_heavy_nor_an_event_loop(atoll: Atoll, words: list[str]) -> None:
    unneeded = (HEAVY | LOOP) - {"dataclasses", "inspect"} if "--help" in words else HEAVY | LOOP
    assert imported_by(command_line(*words), env=atoll.env) & unneeded == set()


def test_what_help_says_without_importing_it_is_so() -> None:
    assert DEFAULT_TOOLS == vocabularies.DEFAULT
    assert RUNTIMES == registry.BUILT_IN


def test_the_help_of_a_sandbox_has_the_defaults(atoll: Atoll) -> None:
    text = " ".join(atoll.text("create", "--help").split())
    assert "512m, 1.5g. [default: 2g where it can be enforced]" in text
    assert "processes and threads. [default: 1024 where it can be enforced]" in text
    memory, pids = spec._MEMORY_BYTES, spec._PIDS
    assert (memory, pids) == (2 << 30, 1024)


@pytest.mark.parametrize(("alias", "words"), [*ALIASES.items()])
def test_other_names_of_commands_lead_to_them(atoll: Atoll, alias: str, words: tuple[str, ...]) -> None:
    assert atoll.text(alias, "--help") == atoll.text(*words, "--help")
    assert alias not in COMMANDS


def test_a_sandbox_is_stopped_and_started_and_deleted_by_these_names(atoll: Atoll, box: str) -> None:
    assert atoll.text("stop", box) == f"{box} is shutdown\n"
    assert box in atoll.text("list", "-q")
    assert atoll.text("start", box) == f"{box} is running\n"
    assert atoll.text("delete", box) == f"{box}\n"


def test_completion_imports_neither_what_is_heavy_nor_an_event_loop(atoll: Atoll) -> None:
    for line in ("atoll exec --", "atoll exec b", "atoll restore box c", "atoll run --image "):
        env = {**atoll.env, "_ATOLL_COMPLETE": "complete_bash", "_ATOLL_COMPLETE_ARGS": line}
        assert imported_by(command_line(), env=env) & (HEAVY | LOOP) - {"dataclasses", "inspect"} == set()


def test_what_completion_reads_is_where_the_engine_writes_it(atoll: Atoll, box: str) -> None:
    atoll("checkpoint", box, "clean")
    view = known.NamespaceView(atoll.state_dir)
    names = known.sandboxes(view)
    found = known.checkpoints(view, box)
    atoll("checkpoints", box, "--delete", "clean")
    assert names == atoll.names()
    assert [word for word, _ in found] == ["clean", found[0][1]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nonsense"], "nonsense"),
        (["exce", "box"], "`atoll exec`"),
        (["stopp", "box"], "Did you mean `atoll stop` or `atoll top`?"),
        (["snapshot", "box"], "Did you mean `atoll checkpoint`?"),
        (["stats"], "Did you mean `atoll top` or `atoll stat`?"),
        (["rename", "box", "new"], "Did you mean `atoll fork NAME NEW-NAME`?"),
        (["images", "pul"], "Did you mean `atoll images pull`?"),
        (["run", "--memory", "5x", "--", "true"], "'5x' is not a size"),
        (["run", "--timeout", "soon", "--", "true"], "'soon' is not a duration"),
        (["run", "--cpus", "many", "--", "true"], "--cpus"),
        (["run", "--frobnicate", "--", "true"], "--frobnicate"),
        (["run"], "no command"),
        (["run", "-c", "true", "--", "true"], "both"),
        (["run", "-e", "=x", "--", "true"], "no name"),
        (["run", "--allow", "http://example.com", "--", "true"], "it is a URL"),
        (["network", "box", "--none", "--allow", "*"], "--none cannot be combined with --allow, --deny or --remove"),
        (["exec"], "NAME"),
        (["exec", "box", "--detach", "--timeout", "3", "--", "true"], "--timeout"),
        (["cp", "a", "b"], "neither"),
        (["cp", "a", "b:y", "-"], "neither a nor - is in a sandbox"),
        (["fork", "box", "-n", "2", "new"], "--count 2 and names (new) were given; give one of them"),
        (["fork", "box", "-n", "0"], "--count is 0; it must be at least 1"),
        (["run", "--env-file", "/no/such", "--", "true"], "--env-file /no/such: No such file"),
        (["rm"], "--all"),
        (["rm", "a", "--all"], "--all"),
        (["logs", "box", "--since-offset", "x"], "'x' is not an offset"),
        (["logs", "box", "one"], "Invalid value for 'ID': 'one' is not a whole number"),
        (["mcp", "--tools", "agent,coding"], "agent and coding cannot be offered together: both have a tool 'glob'"),
        (["mcp", "--tools", "agnet"], "did you mean 'agent'?"),
        (["mcp", "--tools", ","], "no vocabulary is chosen"),
        (["mcp", "--http", "here"], "an address and a port"),
        (["mcp", "--http", ""], "an address and a port"),
        (["mcp", "--http", "--session", "x"], "--session is for one client"),
        (["mcp", "--idle", "3s"], "--idle needs --http"),
        (["mcp", "--secret", "KEY=-@example.com"], "standard input is for the MCP client"),
    ],
)
def test_a_wrong_command_line_is_status_2_and_one_sentence(atoll: Atoll, words: list[str], said: str) -> None:
    done = atoll(*words, status=2)
    first, *rest = done.stderr.decode().splitlines()
    assert first.startswith("error: ")
    assert said in first
    assert all(line.startswith("hint: ") for line in rest)
    assert done.stdout == b""


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["run", "-v", ".:/work", "--", "ls"], "`--mount SRC:DST` mounts a directory"),
        (["create", "--volume=.:/work"], "`--mount SRC:DST` mounts a directory"),
        (["run", "--rm", "--", "ls"], "leave it out: the sandbox of `atoll run` is always removed"),
        (["cp", "-r", ".", "box:"], "leave it out: a directory is copied with its content"),
        (["version", "-r"], "`atoll version --help` shows the arguments and options"),
    ],
)
def test_an_option_of_another_tool_is_refused_with_what_does_it_here(atoll: Atoll, words: list[str], hint: str) -> None:
    first, second = atoll(*words, status=2).stderr.decode().splitlines()
    assert first.startswith("error: No such option: -")
    assert second.startswith(f"hint: {hint}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--json", "--memory", "5x", "--", "true"], "'5x' is not a size"),
        (["cp", "a:x", "-", "--json"], "standard output"),
        (["exec", "--json"], "NAME"),
    ],
)
def test_a_wrong_command_line_with_json_is_an_object(atoll: Atoll, words: list[str], said: str) -> None:
    done = atoll(*words, status=2)
    assert said in json.loads(done.stdout)["error"]["message"]
    assert done.stderr == b""


@pytest.mark.parametrize("module", ["atoll", "atoll.surfaces.cli"])
def test_as_a_module_it_ends_with_its_status(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "nonsense"], capture_output=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: ")


def test_json_behind_the_dashes_is_the_commands_own(atoll: Atoll) -> None:
    assert atoll("run", "--memory", "5x", "--", "true", "--json", status=2).stdout == b""


def test_the_version_is_the_same_by_option_and_by_command(atoll: Atoll) -> None:
    text = atoll.text("--version")
    assert text.startswith("atoll ")
    assert atoll.text("version") == text
    assert text == f"atoll {atoll.json('version', '--json')['version']}\n"


def test_the_version_is_that_of_the_package(atoll: Atoll) -> None:
    assert atoll.text("--version") == f"atoll {version('atoll')}\n"


def test_a_missing_value_is_said_to_be_missing(atoll: Atoll) -> None:
    for words in (["run", "--memory"], ["exec", "box", "--timeout", "--", "true"], ["--state-dir"]):
        assert "requires an argument" in atoll(*words, status=2).stderr.decode()


@pytest.mark.parametrize("line", [["-qx"], ["--quie"], ["--quiet=1"], ["-q", "extra"], ["--", "-q"]])
def test_options_that_do_not_exist_are_refused(atoll: Atoll, line: list[str]) -> None:
    assert atoll("ls", *line, status=2).stderr.startswith(b"error: ")


@pytest.mark.parametrize(
    "words", [["-qc", "ab", "-e", "A=1"], ["-qcab", "-eA=1"], ["--shell=ab", "--env", "A=1", "-q"]]
)
def test_options_may_be_joined_with_flags_and_with_their_values(words: list[str]) -> None:
    line = Parameter("line", str | None, Option("--shell", "-c", help=""), None, required=False)
    env = Parameter("env", list[str] | None, Option("--env", "-e", help=""), None, required=False)
    quiet = Parameter("quiet", bool, Option("--quiet", "-q", help=""), False, required=False)
    parser = Parser([line, env, quiet], "atoll")
    assert parser.split([*words, "x", "--", "-q"], None) == (["x", "-q"], [])
    assert parser.values([]) == {"line": "ab", "env": ["A=1"], "quiet": True}


def test_the_installed_command_ends_with_the_status_and_all_output(atoll: Atoll) -> None:
    script = "from atoll.surfaces.cli import program; program()"
    for words, status in (["--help"], 0), (["nonsense"], 2):
        done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, check=False, env=atoll.env)
        assert done.returncode == status
        assert done.stdout.decode() == (atoll.text("--help") if status == 0 else "")
        assert bool(done.stderr) == bool(status)


COMPLETED = [
    ("atoll e", "exec export expose"),
    ("atoll images ", "ls pull rm import"),
    ("atoll --json images p", "pull"),
    ("atoll run --m", "--memory --mount"),
    ("atoll exec box --st", "--stdin --state-dir"),
    ("atoll storage ", "init remove"),
    ("atoll cp ", ""),
    ("atoll stop bo", "box-1 box-2"),
    ("atoll exec ", "box-1 box-2 other"),
    ("atoll exec --user root bo", "box-1 box-2"),
    ("atoll exec box-1 ", ""),
    ("atoll exec box-1 -- -", ""),
    ("atoll rm box-1 ", "box-2 other"),
    ("atoll cp ot", "other:"),
    ("atoll cp file ot", "other:"),
    ("atoll restore box-1 ", "clean cp-0123"),
    ("atoll restore other ", ""),
    ("atoll checkpoints --delete ", "cp-0123"),
    ("atoll volumes rm ca", "cache"),
    ("atoll volumes create ", ""),
    ("atoll run --runtime ru", "runc runsc"),
    ("atoll create --image ", "host docker.io/library/python:3.12"),
    ("atoll create ", ""),
    ("atoll --state-dir /nowhere exec ", ""),
    ("atoll ls --namespace ", "default team"),
    ("atoll --namespace team exec ", "theirs"),
    ("atoll restore theirs --namespace team ", "cp-89ab"),
    ("atoll volumes rm --namespace team ", "shared"),
    ("atoll nonsense ", ""),
]


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A state directory with names in it. The records have what completion reads, and garbage besides."""
    for name in ("box-1", "box-2", "other", "team:theirs"):
        (tmp_path / "names").mkdir(exist_ok=True)
        (tmp_path / "names" / name).symlink_to("atoll-0123")
    records = {
        "checkpoints/cp-0123/checkpoint.json": {"checkpoint": {"label": "clean", "sandbox": "box-1"}},
        "checkpoints/team:cp-89ab/checkpoint.json": {"checkpoint": {"sandbox": "theirs"}},
        "volumes/cache.json": {},
        "volumes/team:shared.json": {},
        "images/references/0123.json": {"image": {"reference": "docker.io/library/python:3.12"}},
        "images/references/4567.json": ["garbage"],
    }
    for path, record in records.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(json.dumps(record))
    (tmp_path / "checkpoints/cp-4567").mkdir()
    return tmp_path


@pytest.mark.parametrize(("line", "words"), COMPLETED)
@pytest.mark.local("names are completed from the state directory")
def test_a_shell_is_told_the_words_that_may_follow(atoll: Atoll, filled: Path, line: str, words: str) -> None:
    for shell, separated in ("bash", line.replace(" ", "\n")), ("fish", line):
        env = {
            **atoll.env,
            "ATOLL_STATE_DIR": str(filled),
            "_ATOLL_COMPLETE": f"complete_{shell}",
            "_ATOLL_COMPLETE_ARGS": separated,
        }
        done = subprocess.run(atoll.nursery.program, capture_output=True, check=True, env=env)
        assert [each.partition("\t")[0] for each in done.stdout.decode().split("\n") if each] == words.split()


@pytest.mark.parametrize(("shell", "place"), [("bash", ".bash_completions/atoll.sh"), ("zsh", ".zfunc/_atoll")])
def test_completion_is_installed_for_the_shell_that_asks(atoll: Atoll, tmp_path: Path, shell: str, place: str) -> None:
    env = {**atoll.env, "HOME": str(tmp_path), "SHELL": f"/bin/{shell}"}
    for _ in range(2):
        subprocess.run([*PROGRAM, "--install-completion"], env=env, check=True, capture_output=True)
    shown = subprocess.run([*PROGRAM, "--show-completion"], env=env, check=True, capture_output=True).stdout.decode()
    assert (tmp_path / place).read_text() == shown
    assert len((tmp_path / f".{shell}rc").read_text().splitlines()) == 1


def test_bash_completes_with_the_script(atoll: Atoll) -> None:
    env = {**atoll.env, "SHELL": "/bin/bash", "PATH": f"{Path(sys.executable).parent}:{atoll.env['PATH']}"}
    script = """
        eval "$(atoll --show-completion)"
        COMP_WORDS=(atoll images pu) COMP_CWORD=2
        _atoll_completion atoll
        echo "${COMPREPLY[@]}"
    """
    done = subprocess.run(["bash", "-c", script], env=env, check=True, capture_output=True)
    assert done.stdout == b"pull\n"


def test_a_shell_without_a_script_is_an_error(atoll: Atoll) -> None:
    env = {**atoll.env, "SHELL": "/bin/tcsh"}
    done = subprocess.run([*PROGRAM, "--show-completion"], env=env, check=False, capture_output=True)
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: there is no completion for the shell 'tcsh'")


def test_closed_standard_streams_do_no_harm(atoll: Atoll) -> None:
    subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *PROGRAM, "version"], env=atoll.env, check=True)
