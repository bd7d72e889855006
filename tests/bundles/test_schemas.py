"""What a model is told about a tool, from its source alone."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import pytest

from atoll.bundles.manifest import ManifestTool
from atoll.bundles.schemas import describe, parse

OPEN = {"type": "object", "properties": {}, "additionalProperties": True}


def schema_of(source: str, **more: Any) -> Any:
    tool = ManifestTool(name="a_tool", entrypoint="tools.main:run", **more)
    return describe(tool, parse(dedent(source))).input_schema


def test_the_manifest_counts_before_the_source() -> None:
    tool = ManifestTool(
        name="run",
        entrypoint="tools.main:run",
        description="Mine.",
        input_schema={"properties": {"path": {"type": "string"}}},
    )
    told = describe(tool, parse("def run(other: int):\n    '''Theirs.'''\n"))
    assert told.description == "Mine."
    assert told.input_schema == {"type": "object", "properties": {"path": {"type": "string"}}}


def test_the_description_is_the_first_paragraph_of_the_docstring_else_the_name() -> None:
    tool = ManifestTool(name="read_it", entrypoint="tools.main:run")
    assert describe(tool, parse('def run(args):\n    """Read\n    it.\n\n    More."""')).description == "Read it."
    assert describe(tool, parse("def run(args): ...")).description == "read it"


def test_a_dict_is_described_by_the_docstring() -> None:
    assert schema_of(
        '''
        def run(args: dict[str, object]) -> dict[str, object]:
            """Read a file.

            Args:
                path (str): Which one.
                limit (int, optional): How much
                    of it.
            """
        '''
    ) == {
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "Which one."},
            "limit": {"type": "integer", "description": "How much of it."},
        },
        "additionalProperties": True,
    }


@pytest.mark.parametrize(
    "declared",
    [
        "class Options(TypedDict):",
        "@dataclass\nclass Options:",
        "class Options(BaseModel):",
        "class Above(Base):\n    path: str\n\nclass Options(Above):",
    ],
)
def test_a_class_of_the_module_is_described_by_its_fields(declared: str) -> None:
    fields = (
        "    path: str\n    '''Which one.'''\n    limit: int | None = 5\n    kinds: list[Literal['a', 'b']] = field()\n"
    )
    schema = schema_of(f"{declared}\n{fields}\nasync def run(args: 'Options') -> dict: ...")
    assert schema["properties"] == {
        "path": {"type": "string", "description": "Which one."},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": 5},
        "kinds": {"type": "array", "items": {"enum": ["a", "b"]}},
    }
    assert schema["required"] == ["path", "kinds"]


def test_parameters_are_described_by_name() -> None:
    assert schema_of(
        '''
        def run(path: str, *, lines: "list[int]" = (), mode: Annotated[Mode, Field(description="How.")] = "r", **more):
            """Read.

            Args:
                path: Which one.
            """

        class Mode(Enum):
            READ = "r"
            WRITE = "w"
        '''
    ) == {
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "Which one."},
            "lines": {"type": "array", "items": {"type": "integer"}},
            "mode": {"enum": ["r", "w"], "description": "How.", "default": "r"},
        },
        "required": ["path"],
        "additionalProperties": True,
    }
    one = schema_of("def run(path: str): ...")
    assert one == {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


@pytest.mark.parametrize(
    "source",
    [
        "def run(args): ...",
        "from .other import run",
        "def run(args: Elsewhere): ...",
        "not python at all (",
        "def run(args: 'also ('): ...",
        "x = " + "(" * 5000,
        "def run(args: " + "-" * 20_000 + "1): ...",
        "def run(args: " + "list[" * 90 + "int" + "]" * 90 + "): ...",
        "class A(A): ...\ndef run(a: A): ...",
        "\0",
        "",
    ],
)
def test_what_a_source_does_not_say_is_left_open(source: str) -> None:
    schema = schema_of(source)
    assert schema == OPEN or schema["type"] == "object"


def test_classes_that_name_each_other_end_somewhere() -> None:
    schema = schema_of("class A(TypedDict):\n    b: 'B'\nclass B(TypedDict):\n    a: A\ndef run(args: A): ...")
    assert "properties" in schema["properties"]["b"]
