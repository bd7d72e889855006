"""What models and kernels are told of tools: documentation, stubs, search."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any, Literal, NotRequired

import pytest
from hypothesis import given, settings, strategies as st
from pydantic import BaseModel, Field, computed_field
from typing_extensions import TypedDict

from atoll import ToolCallerType, ToolRegistry
from atoll.code.shapes import SchemaReader, ToolShape
from atoll.code.stubs import StubWriter, ToolText

CODE = ToolCallerType.CODE_EXECUTION


class Sale(BaseModel):
    """A sale."""

    id: int
    amount: Decimal = Field(description="In euro.")
    at: datetime
    tags: set[str] = set()
    refund_of: Sale | None = None


@dataclass
class Blob:
    data: bytes
    name: str = "x"


class Row(TypedDict):
    key: str
    value: NotRequired[int]


class Dated(TypedDict):
    day: date


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


def sales_registry() -> ToolRegistry:
    registry = ToolRegistry()

    @registry.register
    async def query_sales(
        region: Literal["east", "west"], year: Annotated[int, Field(ge=1990)] = 2025, *, limit: int | None = None
    ) -> list[Sale]:
        """The sales of a region in one year. They are counted once.

        Args:
            region: Which region.
            year: The year.

        Returns:
            The sales, oldest first.
        """
        return []

    @registry.register(needs_approval=True)
    def store(blob: Blob, rows: list[Row], when: dict[str, Sale] | None = None, **labels: str) -> tuple[Blob, int]:
        return blob, 1

    return registry


DOCUMENTATION = '''\
The code can call these tools, which are async functions. Every call must be awaited: `result = await \
query_sales(...)`. Independent calls run in parallel with `await asyncio.gather(...)`. Only what the code prints is \
seen; results of calls stay in the code until it prints them. A call that fails raises ToolError: its text says why, \
its `type` is the name of the error.

```python
@dataclass
class Sale:
    """A sale."""
    id: int
    amount: Decimal  # In euro.
    at: datetime
    tags: set[str] = set()
    refund_of: Sale | None = None

async def query_sales(region: Literal["east", "west"], year: int = 2025, *, limit: int | None = None) -> list[Sale]:
    """The sales of a region in one year. They are counted once.

    Args:
        region: Which region.
        year: The year. (>= 1990)

    Returns:
        The sales, oldest first.
    """

@dataclass
class Blob:
    data: bytes
    name: str = "x"

class Row(TypedDict):
    key: str
    value: NotRequired[int]

async def store(blob: Blob, rows: list[Row], when: dict[str, Sale] | None = None, **labels: str) -> tuple[Blob, int]:
    """A call waits until a person has allowed it."""
```
'''


def python_of(documentation: str) -> ast.Module:
    return ast.parse(documentation.partition("```python\n")[2].rpartition("```")[0])


def test_the_documentation_is_typed_stubs() -> None:
    assert sales_registry().documentation() == DOCUMENTATION
    python_of(DOCUMENTATION)


def test_the_documentation_is_the_same_bytes_in_every_process() -> None:
    program = (
        "from tests.code.test_stubs import *; r = sales_registry(); print(r.documentation(), json.dumps(r.stubs()))"
    )
    printed = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        printed.add(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, env=env).stdout)
    (text,) = printed
    assert text.decode().startswith(DOCUMENTATION)


def test_the_kernel_gets_names_types_and_help() -> None:
    stubs, models = sales_registry().stubs()
    query, store, search = stubs
    assert {**query, "doc": ""} == {
        "name": "query_sales",
        "params": [["region", True], ["year", False], ["limit", False]],
        "var": None,
        "returns": ["list", ["model", "Sale"]],
        "doc": "",
        "mode": "native",
    }
    assert query["doc"].startswith("@dataclass\nclass Sale:\n")
    assert "async def query_sales(" in query["doc"]
    assert (store["var"], store["returns"]) == ("labels", ["tuple", [["model", "Blob"], "any"]])
    assert (search["name"], search["params"]) == ("search_tools", [["query", True], ["limit", False]])
    assert models == {
        "Sale": {
            "fields": [
                ["id", "any"],
                ["amount", ["decimal"]],
                ["at", ["datetime"]],
                ["tags", ["set", "any"]],
                ["refund_of", ["optional", ["model", "Sale"]]],
            ],
            "optional": ["tags", "refund_of"],
        },
        "Blob": {"fields": [["data", ["bytes"]], ["name", "any"]], "optional": ["name"]},
    }
    json.dumps([stubs, models])


@pytest.mark.parametrize(
    ("kind", "text", "wire"),
    [
        (dict[str, list[date]], "dict[str, list[date]]", ["dict", ["list", ["date"]]]),
        (dict[int, str], "dict[str, str]", "any"),
        (frozenset[int], "set[int]", ["set", "any"]),
        (tuple[int, ...], "list[int]", "any"),
        (Row | None, "Row | None", "any"),
        (Dated, "Dated", ["model", "Dated"]),
        (Cat | Dog | None, "Cat | Dog | None", ["union", [["model", "Cat"], ["model", "Dog"]]]),
        (int | str, "int | str", "any"),
        (datetime | None, "datetime | None", ["optional", ["datetime"]]),
        (Literal["a", 1, None], 'Literal["a", 1] | None', "any"),
        (None, "None", "any"),
        (Any, "Any", "any"),
        (list, "list[Any]", "any"),
    ],
    ids=str,
)
def test_types_are_written_as_code_sees_them(kind: Any, text: str, wire: Any) -> None:
    registry = ToolRegistry()

    def function(): ...

    function.__annotations__["return"] = kind
    registry.register(function, name="tool")
    (stub, _), _ = registry.stubs()
    assert f"async def tool() -> {text}:" in registry.documentation()
    assert stub["returns"] == wire


def test_hosted_stubs_take_one_dict_and_return_a_string() -> None:
    registry = sales_registry()
    stubs, models = registry.stubs(anthropic_compatible=True)
    assert [(stub["mode"], stub["returns"]) for stub in stubs] == [("anthropic", "any")] * 3
    assert models == {}
    text = registry.documentation(anthropic_compatible=True)
    python_of(text)
    assert "`result = await query_sales({...})`" in text
    assert "async def query_sales(input: dict) -> str:" in text
    assert '        region (Literal["east", "west"], required): Which region.\n' in text
    assert "        year (int, default 2025): The year. (>= 1990)\n" in text
    assert "    Returns:\n        list[Sale], as JSON. The sales, oldest first.\n" in text
    assert "class Sale(TypedDict):" in text
    assert "    at: str\n    tags: NotRequired[list[str]]\n" in text


def test_equal_models_of_several_tools_are_one_and_different_ones_have_two_names() -> None:
    registry = ToolRegistry()

    def first():
        class Thing(BaseModel):
            a: int

        @registry.register
        def one(thing: Thing) -> Thing:
            raise NotImplementedError

        @registry.register
        def two() -> list[Thing]:
            raise NotImplementedError

    def second():
        class Thing(BaseModel):
            b: str

        @registry.register
        def three() -> Thing:
            raise NotImplementedError

    first()
    second()
    registry.register(lambda: 1, name="Thing3")
    text = registry.documentation()
    assert re.findall(r"class (\w+):", text) == ["Thing", "Thing2"]
    assert "def two() -> list[Thing]" in text
    assert "def three() -> Thing2" in text
    assert set(registry.stubs()[1]) == {"Thing", "Thing2"}


def test_a_model_that_is_written_with_other_fields_than_it_is_read_has_two_names() -> None:
    registry = ToolRegistry()

    class Basket(BaseModel):
        prices: list[Annotated[Decimal, Field(ge=0)]]

        @computed_field
        def total(self) -> Decimal:
            return sum(self.prices, Decimal())

    class Visit(BaseModel):
        basket: Basket
        at: datetime

    @registry.register
    def pay(visit: Visit, sale: Sale | None = None) -> list[Visit | Sale]:
        return [visit]

    text = registry.documentation()
    assert re.findall(r"class (\w+):", text) == ["BasketInput", "VisitInput", "Sale", "Basket", "Visit"]
    assert "def pay(visit: VisitInput, sale: Sale | None = None) -> list[Visit | Sale]" in text
    assert "class VisitInput:\n    basket: BasketInput\n" in text
    assert "class Basket:\n    prices: list[Decimal]\n    total: Decimal\n" in text


def test_a_model_does_not_hide_a_tool_or_a_builtin() -> None:
    registry = ToolRegistry()

    class Warning(BaseModel):
        a: int

    class Fetch(BaseModel):
        b: int

    @registry.register(name="Fetch")
    def fetch(warning: Warning) -> Fetch:
        raise NotImplementedError

    text = registry.documentation()
    assert re.findall(r"class (\w+):", text) == ["Warning2", "Fetch2"]


def many(count: int) -> ToolRegistry:
    registry = ToolRegistry()
    for number in range(count):
        registry.register(
            lambda customer, limit=3: None,
            name=f"tool_{number}",
            description=f"Does thing number {number}. And explains it at length, " + "so that it takes space, " * 10,
        )
    return registry


def test_much_documentation_is_progressive() -> None:
    text = many(100).documentation()
    assert len(text) <= 16_000
    assert 'There are 100 tools. `print(await search_tools("what it should do"))` finds those that fit' in text
    assert "`help(tool)` prints all about one" in text
    assert "tool_7(customer, limit=…): Does thing number 7.\n" in text
    assert "must be awaited" in text
    assert "async def" not in text
    names = many(100).documentation(limit_chars=2500)
    assert len(names) <= 2500
    assert "tool_98, tool_99\n" in names
    few = many(1000).documentation(limit_chars=2500)
    assert len(few) <= 2500
    assert re.search(r"tool_0, tool_1, .*, and \d+ more\n$", few)


def test_no_tools_are_told_too() -> None:
    assert ToolRegistry().documentation() == "There are no tools to call.\n"


@pytest.mark.parametrize(
    "text", ['ends with "', '"""', "back\\slash \\", "tab\tand\x00control\x1b[31m", "\u2028line", "", "```\nfence"]
)
def test_any_description_leaves_the_stubs_valid(text: str) -> None:
    registry = ToolRegistry()
    registry.register(lambda a: a, name="tool", description=text, output_description=text)
    module = python_of(registry.documentation())
    (function,) = module.body
    assert isinstance(function, ast.AsyncFunctionDef)
    assert "\x1b" not in registry.documentation()


# -------------------------------------------------------------------------------------------------------------- search


def test_search_ranks_by_words_of_name_description_and_parameters() -> None:
    registry = ToolRegistry()

    @registry.register
    def query_sales(region: str) -> list[Sale]:
        """Sales of one region."""
        return []

    @registry.register
    def send_mail(recipient: str, text: str) -> None:
        """Send a message about sales to a customer."""

    @registry.register
    def weather(city: str) -> str:
        """The weather."""
        return ""

    @registry.register(allowed_callers=["direct"])
    def secret_sales() -> None:
        """Sales, not for code."""

    assert [each["name"] for each in registry.search("sale in a region")][:2] == ["query_sales", "send_mail"]
    assert [each["name"] for each in registry.search("RECIPIENTS")] == ["send_mail"]
    assert [each["name"] for each in registry.search("sendMail")] == ["send_mail"]
    assert registry.search("weather") == [
        {"name": "weather", "signature": "async def weather(city: str) -> str", "description": "The weather."}
    ]
    assert registry.search("nothing like it") == []
    assert len(registry.search("", limit=2)) == 2
    assert len(registry.search("sales", limit=-5)) == 1


async def test_code_searches_by_a_call() -> None:
    registry = many(100)
    found: Any = await registry.call("search_tools", {"query": "thing 42"}, caller=CODE)
    assert found[0]["name"] == "tool_42"
    assert len(found) == 8
    assert len(await registry.call("search_tools", {"query": "thing", "limit": 10**9}, caller=CODE)) == 50  # type: ignore[arg-type]


@given(st.text(max_size=200))
@settings(max_examples=50, deadline=None)
def test_any_query_is_answered(query: str) -> None:
    SEARCHED.search(query)


SEARCHED = many(5)


# ------------------------------------------------------------------------------------------------------ foreign schemas

SCHEMAS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just("string") | st.just("#/$defs/a"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "properties", "items", "anyOf", "allOf", "enum", "const", "$ref", "$defs", "a", "b-c",
                 "additionalProperties", "prefixItems", "required", "default", "description", "title", "minimum"]
            ),
            inner | st.sampled_from(["object", "array", "string", "null"]),
            max_size=5,
        )
    ),
    max_leaves=25,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["a", "class", "x-y"]), SCHEMAS, max_size=3), SCHEMAS)
@settings(max_examples=150, deadline=None)
def test_any_foreign_schema_gives_stubs_that_parse(properties: dict[str, Any], output: Any) -> None:
    reader = SchemaReader("tool", foreign=True)
    parameters = reader.parameters({"properties": {"a": properties}, "$defs": properties})
    shape = ToolShape(parameters, None, reader.shape(output, "result"), reader.models)
    writer = StubWriter([ToolText("tool", shape)])
    ast.parse(writer.describe(ToolText("tool", shape)))
    json.dumps([writer.stubs(), writer.models()])


def test_a_foreign_schema_becomes_a_typed_line() -> None:
    reader = SchemaReader("find_users", foreign=True)
    schema = {
        "type": "object",
        "properties": {
            "page": {"type": "integer", "default": 1, "minimum": 1},
            "filter": {
                "type": "object",
                "description": "What to find.",
                "properties": {
                    "name": {"type": ["string", "null"]},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["name"],
            },
            "sort": {"enum": ["name", "age"]},
            "tree": {"$ref": "#/$defs/Tree"},
            "since": {"type": "string", "format": "date-time"},
            "extra": {"type": "object", "additionalProperties": {"type": "number"}},
        },
        "required": ["filter"],
        "$defs": {
            "Tree": {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}}}
        },
    }
    shape = ToolShape(reader.parameters(schema), None, reader.shape({"type": "array"}, "result"), reader.models)
    tool = ToolText("find_users", shape)
    assert (
        StubWriter([tool]).describe(tool)
        == '''\
class FindUsersFilter(TypedDict):
    name: str | None
    tags: NotRequired[list[str]]

class Tree(TypedDict):
    children: NotRequired[list[Tree]]

async def find_users(filter: FindUsersFilter, page: int = 1, sort: Literal["name", "age"] = ..., tree: Tree = ..., \
since: str = ..., extra: dict[str, float] = ...) -> list[Any]:
    """Args:
        filter: What to find.
        page: (>= 1)
    """'''
    )
