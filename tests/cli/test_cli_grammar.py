"""What may be typed, what is said when it is wrong, and how fast help comes."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from atoll.surfaces.cli.app import MODULES
from tests.cli.driving import PROGRAM, Atoll

COMMANDS = [name for names in MODULES.values() for name in names]
IMAGE_COMMANDS = "ls pull rm import".split()


def test_help_names_every_command(atoll: Atoll) -> None:
    text = atoll.text("--help")
    assert [command for command in COMMANDS if f"\n  {command} " not in text] == []
    assert atoll.text() == text


@pytest.mark.parametrize("command", [[c] for c in COMMANDS] + [["images", c] for c in IMAGE_COMMANDS])
def test_every_command_has_help_within_100_columns(atoll: Atoll, command: list[str]) -> None:
    text = atoll.text(*command, "--help")
    assert "Usage: atoll " + " ".join(command) in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_index_names_every_module_and_command() -> None:
    found = {}
    for module in MODULES:
        found[module] = tuple(import_module(f"atoll.surfaces.cli.commands.{module}").commands.commands)
    assert found == MODULES
    files = {path.stem for path in Path(import_module("atoll.surfaces.cli.commands").__path__[0]).glob("[a-z]*.py")}
    assert files == set(MODULES)


@pytest.mark.parametrize("command", [["ls"], ["images", "ls"], ["storage"]])
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


def test_help_imports_neither_pydantic_nor_asyncio_nor_rich() -> None:
    done = subprocess.run([sys.executable, "-X", "importtime", *PROGRAM[1:], "--help"], capture_output=True, check=True)
    imported = {line.rpartition(b"|")[2].strip().partition(b".")[0].decode() for line in done.stderr.splitlines()}
    assert not imported & {"pydantic", "anyio", "asyncio", "rich"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nonsense"], "nonsense"),
        (["exce", "box"], "exec"),
        (["run", "--memory", "5x", "--", "true"], "'5x' is not a size"),
        (["run", "--timeout", "soon", "--", "true"], "'soon' is not a duration"),
        (["run", "--cpus", "many", "--", "true"], "--cpus"),
        (["run", "--frobnicate", "--", "true"], "--frobnicate"),
        (["run"], "no command"),
        (["run", "-c", "true", "--", "true"], "both"),
        (["run", "-e", "=x", "--", "true"], "no name"),
        (["run", "--allow", "http://example.com", "--", "true"], "it is a URL"),
        (["network", "box", "--none", "--allow", "*"], "--none cannot be combined with --allow or --remove"),
        (["exec"], "NAME"),
        (["exec", "box", "--detach", "--timeout", "3", "--", "true"], "--timeout"),
        (["cp", "a", "b"], "neither"),
        (["cp", "a:x", "b:y"], "both in sandboxes"),
        (["rm"], "--all"),
        (["rm", "a", "--all"], "--all"),
        (["logs", "box", "--since-offset", "x"], "'x' is not an offset"),
        (["logs", "box", "one"], "ID"),
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


def test_closed_standard_streams_do_no_harm(atoll: Atoll) -> None:
    subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *PROGRAM, "version"], env=atoll.env, check=True)
