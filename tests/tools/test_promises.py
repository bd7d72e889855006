"""A schema is a promise: each of its fields has a test that proves it, and nothing that is sent breaks a tool."""

from __future__ import annotations

import ast
import json
import logging
import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from atoll.code.tool import ExecuteCodeInput
from atoll.code.vocabulary import code_tools
from atoll.tools import coding, export, pool as pool_vocabulary
from atoll.tools.coding import coding_tools
from atoll.tools.saving import SAVE_FILE
from atoll.tools.sprites import SPRITE_TOOLS, sprite_tools
from atoll.tools.tasks import TASK, Tasks
from atoll.tools.tool import Tool, ToolSet
from atoll.tools.vocabularies import VOCABULARIES
from atoll.tools.workspace import EDIT_FILE, GREP, SANDBOX_DESTROY, workspace_tools
from tests.tools.test_coding import Scripted

if TYPE_CHECKING:
    from atoll.runtime.sandbox_pool import SandboxPool
    from atoll.tools.export import ToolProtocol

PROTOCOLS: tuple[ToolProtocol, ...] = ("anthropic", "openai-chat", "openai-responses", "mcp")


@pytest.fixture(scope="module")
async def vocabularies(pool: SandboxPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ToolSet]:
    box = await pool.get()
    await box.exec("mkdir -p dir/sub; echo text > file; echo more > dir/file; mkfifo pipe; ln -s /etc link")
    return {
        "agent": pool.tools(),
        "workspace": workspace_tools(pool, save_dir=tmp_path_factory.mktemp("saved")),
        "coding": coding_tools(box, tasks=Tasks(Scripted())),
        "sprites": sprite_tools(pool),
        "code": code_tools(pool),
    }


# ------------------------------------------------------------------------------------------------------------- fields


def claimed(file: Path) -> set[str]:
    """The fields that the tests in a file say they prove."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "proves":
            found |= {str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)}
    return found


def promised(tools: ToolSet) -> Iterator[str]:
    for tool in tools:
        yield from (f"{tool.name}.{field}" for field in tool.input_schema()["properties"])
        output = tool.output_schema()
        assert output is not None, f"{tool.name} says nothing of what it gives back"
        for field, about in output["properties"].items():
            yield f"{tool.name}->{field}"
            if reference := about.get("items", {}).get("$ref"):
                items = output["$defs"][reference.rpartition("/")[2]]
                yield from (f"{tool.name}->{field}.{inner}" for inner in items["properties"])


async def test_every_field_of_every_schema_has_a_test(vocabularies: dict[str, ToolSet]) -> None:
    for vocabulary, tools in vocabularies.items():
        assert {tool.name for tool in tools} == VOCABULARIES[vocabulary].tool_names
        claims = claimed(Path(__file__).parent / f"test_{vocabulary}.py")
        if vocabulary == "workspace":  # the eight tools are the same: one of its tests compares them
            claims |= claimed(Path(__file__).parent / "test_agent.py")
        assert set(promised(tools)) - claims == set(), "fields without a test"
        assert claims - set(promised(tools)) == set(), "tests of fields that there are not"


async def test_what_transcripts_show_are_arguments_of_the_tools(vocabularies: dict[str, ToolSet]) -> None:
    for name, tools in vocabularies.items():
        vocabulary = VOCABULARIES[name].load()
        for tool, template in vocabulary.transcripts.items():
            shown = re.findall(r"\{(\w+)\}", template)
            assert shown
            assert set(shown) <= set(tools[tool].input_schema()["properties"])
        assert vocabulary.instructions.endswith(".")


async def test_schemas_say_all_that_a_client_needs(vocabularies: dict[str, ToolSet]) -> None:
    for tools in vocabularies.values():
        for tool in tools:
            schema = tool.input_schema()
            assert schema["additionalProperties"] is False
            assert 20 < len(tool.description) < 1000
            assert 0 < len(tool.title) < 30
            for name, about in schema["properties"].items():
                assert about["type"] in {"string", "number", "integer", "boolean"}, (tool.name, name)
                assert (name in schema.get("required", [])) != ("default" in about), (tool.name, name)
                assert about.get("maximum", 0) < 10**7, "a number that says nothing"
                assert "\n" not in about.get("description", "")
                if "timeout" in name:
                    assert re.search(r"\b(milli)?seconds\b", about["description"].lower()), (tool.name, name)
        for protocol in PROTOCOLS:
            json.dumps(export.definitions(tools, protocol), allow_nan=False)


# ------------------------------------------------------------------------------------------------------- hostile input

_WORDS = st.sampled_from(
    ["", ".", "..", "~", "-rf", "--", "$(id)", "`id`", "'\"", "a\0b", "\ud800", "\udcff", "\u202e", "x" * 5000, "e",
     "../../etc/passwd", "/proc/self/mem", "/dev/zero", "/dev/null", "/dev/full", "pipe", "link", "link/passwd", "file",
     "file/x", "dir", "dir/", "./dir//sub/../file", "/home/user", "dir/new/file", "x" * 300, "text", "[", "{", "(",
     "*", "{a,b", "**/*", "*.{py,", "[!a", "\\", "\n", "%s%n"]
)  # fmt: skip
_NUMBERS = st.sampled_from([1, 2, 3, 4, 100, 0, -1, 2**31, 2**62, 2**63, 10**400, 0.1, 1e308, "1", "x", True])
_ANYTHING = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None), max_size=50)
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(st.text(max_size=3), st.none(), max_size=2)
)
_TYPES: dict[str, st.SearchStrategy[Any]] = {
    "string": _WORDS | _WORDS | _WORDS | st.text(st.characters(codec=None), max_size=50) | _ANYTHING,
    "integer": _NUMBERS | _NUMBERS | _ANYTHING,
    "number": _NUMBERS | _NUMBERS | _ANYTHING,
    "boolean": st.booleans() | st.booleans() | _ANYTHING,
}
_SANDBOXES = st.sampled_from(
    ["default"] * 20 + ["", "No", "../x", "a b", "x" * 31, "x" * 100, "tools.default", "\ud800", "\0", None, 1]
)
_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "command": st.sampled_from(["true", "cat", "echo x; exit 9", "kill -9 $$", "head -c 200000 /dev/urandom"]) | _WORDS,
    "timeout": st.sampled_from([0.05, 0.05, 0.05, 50, 0, -1, float("nan"), 10**400, "x"]),
    "timeout_ms": st.sampled_from([50, 50, 50, 0, -1, float("nan"), 10**400, "x"]),
    # What is allowed here makes sandboxes, pulls images or waits: other tests do.
    **dict.fromkeys(("sandbox", "from_sandbox", "to_sandbox", "name", "newName"), _SANDBOXES),
    "image": st.sampled_from(["host", "", "dir:/", "tar:x", "oci:/x:y", "A", "127.0.0.1/x", "a:b:c", "x" * 600, "\0"]),
    "port": st.sampled_from([0, -1, 65536, 2**63, "x", "", None, 1.5, []]),
    "prompt": st.sampled_from(["", "bash {}", "nonsense", "task {}"]),
    "code": st.sampled_from(["1", "x = ", "1 / 0", "raise SystemExit(9)", "print('\ud800')", '"\\ud800"']) | _WORDS,
    "role": st.sampled_from(["worker", "reviewer", "", "boss", None, 1]),
}


def _arguments(schema: dict[str, Any]) -> st.SearchStrategy[object]:
    fields = {name: _FIELDS.get(name, _TYPES[about["type"]]) for name, about in schema["properties"].items()}
    always = {name: fields.pop(name) for name in ("timeout", "timeout_ms", "sandbox") if name in fields}
    likely = {name: fields.pop(name) for name in schema.get("required", ()) if name in fields}
    known = st.fixed_dictionaries({**always, **likely}, optional=fields)
    return (
        known | known.map(json.dumps) | known.map(lambda given: {**given, "more": 1}) | st.sampled_from([[], "", "{"])
    )


def _roams(arguments: object) -> bool:
    """Whether a search would go through all of the image, which only takes long."""
    if not isinstance(arguments, dict):
        return "/" in str(arguments)
    given = [arguments.get(key) for key in ("path", "cwd", "from_path", "pattern")]
    paths = [posixpath.normpath(posixpath.join("/home/user", each)) for each in given if isinstance(each, str)]
    return any(path.count("/") < 2 or path.startswith("//") for path in paths)


def _calls(tools: Iterable[Tool]) -> st.SearchStrategy[tuple[str, object]]:
    return st.one_of(
        [
            st.tuples(st.just(tool.name), _arguments(tool.input_schema()).filter(lambda given: not _roams(given)))
            for tool in tools
        ]
    )


async def _survives(tools: ToolSet, caplog: pytest.LogCaptureFixture, name: str, arguments: object) -> None:
    with caplog.at_level(logging.ERROR):
        result = await tools.handle_tool_call(name, arguments)
    assert not caplog.records, caplog.text
    assert (result.structured or {}).get("error", {}).get("code") != "internal"
    model = tools[name].result
    if not result.is_error and model is not None:
        model.model_validate(result.structured)
    else:
        assert "Traceback" not in result.text
        assert 10 < len(result.text) < 5000
    for protocol in PROTOCOLS:
        json.dumps(export.result(result, protocol, "id"), ensure_ascii=False, allow_nan=False).encode()


_many = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@_many
@given(call=_calls(pool_vocabulary.POOL_TOOLS))
async def test_no_input_breaks_the_agents_tools(
    vocabularies: dict[str, ToolSet], caplog: pytest.LogCaptureFixture, call: tuple[str, object]
) -> None:
    await _survives(vocabularies["agent"], caplog, *call)


@_many
@given(call=_calls((EDIT_FILE, GREP, SANDBOX_DESTROY, SAVE_FILE)))
async def test_no_input_breaks_the_tools_that_workspace_adds(
    vocabularies: dict[str, ToolSet], caplog: pytest.LogCaptureFixture, call: tuple[str, object]
) -> None:
    if call[0] != "sandbox_destroy" or "default" not in str(call[1]):  # others need it
        await _survives(vocabularies["workspace"], caplog, *call)


@_many
@given(call=_calls((*coding.FILE_TOOLS, TASK)))
async def test_no_input_breaks_the_coding_tools(
    vocabularies: dict[str, ToolSet], caplog: pytest.LogCaptureFixture, call: tuple[str, object]
) -> None:
    await _survives(vocabularies["coding"], caplog, *call)


@_many
@given(call=_calls(SPRITE_TOOLS))
async def test_no_input_breaks_the_sprites_tools(
    vocabularies: dict[str, ToolSet], caplog: pytest.LogCaptureFixture, call: tuple[str, object]
) -> None:
    await _survives(vocabularies["sprites"], caplog, *call)


@_many
@given(arguments=_arguments(ExecuteCodeInput.model_json_schema()))
async def test_no_input_breaks_the_code_tool(
    vocabularies: dict[str, ToolSet], caplog: pytest.LogCaptureFixture, arguments: object
) -> None:
    await _survives(vocabularies["code"], caplog, "execute_code", arguments)
