"""A Python function as a tool: its schema, its arguments, its result."""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import enum
import functools
import math
import threading
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import pytest
from hypothesis import given, settings, strategies as st
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from atoll import InvalidRequest, ToolCallError, ToolCallerType, ToolRegistry

CODE = ToolCallerType.CODE_EXECUTION
AT_LEAST_ONE: Any = Field(5, ge=1)
ONE_ITEM: Any = Field(default_factory=lambda: [1])


class Region(enum.Enum):
    EAST = "east"
    WEST = "west"


class Item(BaseModel):
    """One line of an order."""

    name: str
    price: Decimal
    count: Annotated[int, Field(ge=1)] = 1


class Order(BaseModel):
    id: uuid.UUID
    items: list[Item]
    placed: dt.datetime
    parent: Order | None = None


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)

    day: dt.date


@dataclasses.dataclass
class Point:
    x: float
    y: float = 0.0


class Row(TypedDict):
    key: str
    value: int


class Pair(NamedTuple):
    left: int
    right: str


T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    items: list[T]
    next: int | None = None


@pytest.fixture
def registry() -> ToolRegistry:
    return ToolRegistry()


async def given_back(registry: ToolRegistry, function: Callable[..., Any], **arguments: Any) -> Any:
    registry.register(function, name="tool_under_test")
    try:
        return await registry.call("tool_under_test", arguments, caller=CODE)
    finally:
        registry.remove("tool_under_test")


# ----------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("kind", "sent", "got"),
    [
        (int, 3, 3),
        (int, "3", 3),
        (float, 3, 3.0),
        (bool, True, True),
        (int | None, None, None),
        (Region, "east", Region.EAST),
        (Literal["a", 1], 1, 1),
        (dt.datetime, "2025-01-02T03:04:05Z", dt.datetime(2025, 1, 2, 3, 4, 5, tzinfo=dt.UTC)),
        (dt.date, "2025-01-02", dt.date(2025, 1, 2)),
        (dt.timedelta, "PT1M", dt.timedelta(minutes=1)),
        (Decimal, "1.10", Decimal("1.10")),
        (bytes, base64.b64encode(b"\xff\xfe\xfb").decode(), b"\xff\xfe\xfb"),
        (set[int], [1, 1, 2], {1, 2}),
        (tuple[int, str], [1, "a"], (1, "a")),
        (dict[int, str], {"1": "a"}, {1: "a"}),
        (Point, {"x": 1}, Point(1.0)),
        (Row, {"key": "a", "value": 1}, {"key": "a", "value": 1}),
        (Pair, [1, "a"], Pair(1, "a")),
        (Item, {"name": "a", "price": "1.5"}, Item(name="a", price=Decimal("1.5"))),
        (Page[Point], {"items": [{"x": 1}]}, Page[Point](items=[Point(1.0)])),
        (Strict, {"day": "2025-01-02"}, Strict(day=dt.date(2025, 1, 2))),
        (Point | Item, {"name": "a", "price": 1}, Item(name="a", price=Decimal(1))),
        (Any, {"a": [1, None]}, {"a": [1, None]}),
    ],
    ids=str,
)
async def test_an_argument_comes_as_the_type_of_its_parameter(
    registry: ToolRegistry, kind: Any, sent: object, got: object
) -> None:
    seen = []

    async def function(value) -> None:
        seen.append(value)

    function.__annotations__["value"] = kind
    await given_back(registry, function, value=sent)
    assert seen == [got]
    assert type(seen[0]) is type(got)


async def test_a_parameter_without_annotation_takes_anything(registry: ToolRegistry) -> None:
    async def function(value):
        return value

    assert await given_back(registry, function, value={"a": [1, "x"]}) == {"a": [1, "x"]}


async def test_annotations_may_name_classes_of_the_function_around(registry: ToolRegistry) -> None:
    class Local(BaseModel):
        n: int

    @registry.register
    async def double(value: Local) -> Local:
        return Local(n=value.n * 2)

    assert await registry.call("double", {"value": {"n": 2}}, caller=CODE) == {"n": 4}


async def test_names_where_the_decorator_stands_mean_nothing_to_functions_of_other_modules(
    registry: ToolRegistry,
) -> None:
    module: dict[str, Any] = {}
    exec("from __future__ import annotations\nSize = int\nasync def grow(size: Size) -> Size: return size + 1", module)
    Size = str  # noqa: F841, N806
    registry.register(module["grow"])
    assert await registry.call("grow", {"size": 1}, caller=CODE) == 2


async def test_defaults_are_the_functions_own(registry: ToolRegistry) -> None:
    nothing = object()

    async def function(a: Any = nothing, b: int = AT_LEAST_ONE, c: list[int] = ONE_ITEM):
        return [a is nothing, b, c]

    assert await given_back(registry, function) == [True, 5, [1]]
    with pytest.raises(ToolCallError, match="b is 0: it should be greater than or equal to 1"):
        await given_back(registry, function, b=0)


async def test_null_means_the_default_also_inside_of_a_model(registry: ToolRegistry) -> None:
    async def function(item: Item, year: int = 2025, maybe: int | None = 3):
        return [item.count, year, maybe]

    sent = {"item": {"name": "a", "price": 1, "count": None}, "year": None, "maybe": None}
    assert await given_back(registry, function, **sent) == [1, 2025, None]
    with pytest.raises(ToolCallError, match=r"item\.name is None: it should be a valid string"):
        await given_back(registry, function, item={"name": None, "price": 1})


async def test_positional_only_and_keyword_only_parameters_are_called_by_name(registry: ToolRegistry) -> None:
    async def function(a: int, b: int = 2, c: int = 3, /, d: int = 4, *, e: int = 5):
        return [a, b, c, d, e]

    assert await given_back(registry, function, a=1) == [1, 2, 3, 4, 5]
    assert await given_back(registry, function, a=1, c=7, e=9) == [1, 2, 7, 4, 9]


async def test_annotated_keywords_of_any_name_are_validated(registry: ToolRegistry) -> None:
    async def function(a: int, **more: int):
        return [a, more]

    assert await given_back(registry, function, a=1, x="2") == [1, {"x": 2}]
    with pytest.raises(ToolCallError, match="x is 'no': it should be a valid integer"):
        await given_back(registry, function, a=1, x="no")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "region is missing"),
        ({"region": "north"}, "region is 'north': it should be 'east' or 'west'"),
        ({"regio": "east"}, "there is no field 'regio'; did you mean 'region'?"),
        ({"region": "east", "year": 3000}, "year is 3000: it should be less than or equal to 2100"),
        ({"region": "east", "items": [{"name": 1, "price": 1}]}, "items.0.name is 1: it should be a valid string"),
    ],
)
async def test_invalid_arguments_are_explained(registry: ToolRegistry, arguments: dict[str, Any], said: str) -> None:
    async def function(region: Region, year: Annotated[int, Field(le=2100)] = 2025, items: list[Item] | None = None):
        raise AssertionError

    with pytest.raises(ToolCallError) as caught:
        await given_back(registry, function, **arguments)
    assert caught.value.type == "InvalidArguments"
    assert said in caught.value.message
    assert "It takes region (value, required), year (integer, default 2025)" in caught.value.message


# --------------------------------------------------------------------------------------------------- hostile arguments


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE = {
    "deep": (nested(300), "nested deeper than 200 levels"),
    "deeper": (nested(100_000), "nested too deep"),
    "nan": (math.nan, "hold NaN or an infinity"),
    "inf": ([{"a": -math.inf}], "hold NaN or an infinity"),
    "large": ("x" * 5_000_000, "take 5,000,012 bytes as JSON; allowed are 4,194,304"),
    "surrogate": ("\ud800", "half of a surrogate pair"),
    "digits": (10**5000, "more than 4,300 digits"),
    "object": (object(), "are not JSON"),
}


@pytest.mark.parametrize("which", HOSTILE)
async def test_arguments_that_are_no_json_are_refused(registry: ToolRegistry, which: str) -> None:
    value, said = HOSTILE[which]
    called = []

    async def function(value: Any) -> None:
        called.append(value)

    with pytest.raises(ToolCallError, match=said) as caught:
        await given_back(registry, function, value=value)
    assert caught.value.type == "InvalidArguments"
    assert len(caught.value.message) < 500
    assert not called


async def test_a_wrong_value_is_quoted_in_part(registry: ToolRegistry) -> None:
    async def function(value: int) -> None: ...

    with pytest.raises(ToolCallError) as caught:
        await given_back(registry, function, value="x" * 100_000)
    assert len(caught.value.message) < 500


class Node(BaseModel):
    child: Node | None = None


async def test_a_model_that_holds_itself_is_bounded_too(registry: ToolRegistry) -> None:
    async def depth(node: Node) -> int:
        levels = 0
        while node.child is not None:
            levels, node = levels + 1, node.child
        return levels

    def chain(length: int) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for _ in range(length):
            value = {"child": value}
        return value

    assert await given_back(registry, depth, node=chain(100)) == 100
    with pytest.raises(ToolCallError, match="nested deeper than 200 levels"):
        await given_back(registry, depth, node=chain(250))


# -------------------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize(
    ("kind", "returned", "sent"),
    [
        (list[Item], [Item(name="a", price=Decimal("1.50"))], [{"name": "a", "price": "1.50", "count": 1}]),
        (Point, Point(1.0), {"x": 1.0, "y": 0.0}),
        (Point, {"x": 1, "y": 2}, {"x": 1, "y": 2}),
        (Region, Region.WEST, "west"),
        (dt.date, dt.date(2025, 1, 2), "2025-01-02"),
        (bytes, b"\xff\xfe\xfb", "//77"),
        (dict[str, list[bytes]], {"a": [b"\xff\xfe\xfb"]}, {"a": ["//77"]}),
        (tuple[int, bytes | None], (1, b"\xff\xfe\xfb"), [1, "//77"]),
        (set[int], {1}, [1]),
        (dict[int, str], {1: "a"}, {"1": "a"}),
        (list[float], [math.nan, 1.0, math.inf], [None, 1.0, None]),
        (Any, {"when": dt.date(2025, 1, 2), "nan": math.nan}, {"when": "2025-01-02", "nan": None}),
        (None, None, None),
        (str, "caf\u00e9 \U0001f600", "caf\u00e9 \U0001f600"),
        (str, "a\udcff", "a\\xff"),
        ("nothing", {"a": (1, {2}), "b": Point(1.0)}, {"a": [1, [2]], "b": {"x": 1.0, "y": 0.0}}),
        ("nothing", b"\xff", "_w=="),
    ],
    ids=str,
)
async def test_a_result_is_written_by_its_annotation(
    registry: ToolRegistry, kind: Any, returned: object, sent: object
) -> None:
    async def function():
        return returned

    if kind != "nothing":
        function.__annotations__["return"] = kind
    assert await given_back(registry, function) == sent


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (object(), "returned a object that cannot be JSON: Unable to serialize unknown type: <class 'object'>"),
        (nested(300), "returned a list that cannot be JSON: Maximum serialization depth exceeded"),
        (10**5000, "more than 4,300 digits|digits"),
        ("x" * (17 * 1024 * 1024), "take 17,825,794 bytes as JSON; allowed are 16,777,216"),
    ],
    ids=["object", "deep", "digits", "large"],
)
async def test_a_result_that_is_no_json_is_an_error_of_the_call(
    registry: ToolRegistry, returned: object, said: str
) -> None:
    async def function():
        return returned

    with pytest.raises(ToolCallError, match=said) as caught:
        await given_back(registry, function)
    assert caught.value.type == "InvalidResult"
    assert len(caught.value.message) < 500


# --------------------------------------------------------------------------------------------------- refused signatures


def starred(*names: str) -> None: ...
def any_keywords(**kwargs) -> None: ...
def yields():
    yield 1


async def yields_too():
    yield 1


def with_connection(connection: threading.Thread) -> None: ...
def returns_thread() -> threading.Thread:
    raise NotImplementedError


def unknown_name(value: Unheard) -> None: ...  # type: ignore[name-defined]  # noqa: F821


class TextBytes(BaseModel):
    data: bytes


def text_bytes(value: TextBytes) -> None: ...
def with_alias(value: Annotated[int, Field(alias="other")]) -> None: ...


class Service:
    async def ping(self, host: str) -> str:
        """Ask a host."""
        return f"{host}: pong"

    async def __call__(self, a: int) -> int:
        """Call the service."""
        return a + 1


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (starred, r"takes \*names, and JSON arguments have names; take a list instead: names: list\[...\]"),
        (any_keywords, r"takes \*\*kwargs of any type; annotate it"),
        (yields, "is a generator, and a call has one result: return a list"),
        (yields_too, "is a generator"),
        (with_connection, "has a type that cannot be JSON: .*bind what is not for the code with functools.partial"),
        (returns_thread, "has a type that cannot be JSON"),
        (unknown_name, "the annotations of the function 'unknown_name' cannot be read: name 'Unheard'"),
        (text_bytes, r"uses TextBytes.data, whose bytes would travel as text; give the pydantic model that holds"),
        (threading.get_ident, "the function 'get_ident' has no signature: .*; write a function around it"),
        (with_alias, "has an alias for 'value'"),
        (Service.ping, r"takes 'self': register a method of an object, as in registry.register\(thing.ping\)"),
        (Service, "'Service' is a class; register a function that makes one"),
        ("text", r"'text' is no function; texts are keywords: register\(description=…\)"),
    ],
)
def test_a_signature_that_json_cannot_call_is_refused_with_the_fix(
    registry: ToolRegistry, function: Any, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        registry.register(function)
    assert len(registry) == 0


async def test_methods_objects_and_partials_are_functions_too(registry: ToolRegistry) -> None:
    service = Service()
    registry.register(service.ping)
    registry.register(service, name="service")

    def search(text: str, key: str, limit: int = 3) -> str:
        return f"{text} {key} {limit}"

    registry.register(functools.partial(search, key="s3cret"), name="search")
    assert await registry.call("ping", {"host": "a"}, caller=CODE) == "a: pong"
    assert await registry.call("service", {"a": 1}, caller=CODE) == 2
    assert await registry.call("search", {"text": "x"}, caller=CODE) == "x s3cret 3"
    assert registry["service"].description == "Call the service."
    with pytest.raises(ToolCallError, match="there is no field 'key'"):
        await registry.call("search", {"text": "x", "key": "mine"}, caller=CODE)
    assert "s3cret" not in registry.documentation()
    assert "key" not in registry["search"].input_schema["properties"]


# -------------------------------------------------------------------------------------------------------------- texts


def google(region: str, year: int) -> str:
    """The sales of a region.

    They are counted once.

    Args:
        region: Which region,
            by its name.
        year (int): The year.

    Returns:
        The sales.
    """
    return ""


def numpy(region: str, year: int) -> str:
    """The sales of a region.

    They are counted once.

    Parameters
    ----------
    region : str
        Which region,
        by its name.
    year
        The year.

    Returns
    -------
    str
        The sales.
    """
    return ""


def sphinx(region: str, year: int) -> str:
    """The sales of a region.

    They are counted once.

    :param region: Which region,
        by its name.
    :param int year: The year.
    :returns: The sales.
    """
    return ""


@pytest.mark.parametrize("function", [google, numpy, sphinx])
def test_docstrings_of_three_styles_are_read(registry: ToolRegistry, function: Callable[..., Any]) -> None:
    registry.register(function)
    tool = registry[function.__name__]
    assert tool.description == "The sales of a region.\n\nThey are counted once."
    assert tool.output_description == "The sales."
    about = tool.input_schema["properties"]
    assert " ".join(about["region"]["description"].split()) == "Which region, by its name."
    assert about["year"]["description"] == "The year."


def test_notes_and_errors_of_a_docstring_stay_in_the_description(registry: ToolRegistry) -> None:
    @registry.register
    def refund(sale: int) -> None:
        """Pay back a sale.

        Note:
            It cannot be undone.

        Raises:
            LookupError: there is no such sale.
        """

    said = "Pay back a sale.\n\nNote: It cannot be undone.\n\nRaises LookupError: there is no such sale."
    assert registry["refund"].description == said


def test_texts_that_are_given_take_precedence(registry: ToolRegistry) -> None:
    registry.register(google, description="Other.", output_description="Text.")
    assert registry["google"].description == "Other."
    assert registry["google"].output_description == "Text."


def test_the_schema_has_no_private_keys_and_no_titles(registry: ToolRegistry) -> None:
    @registry.register
    def function(price: Decimal, tags: set[str], order: Order, title: str = "x") -> dict[str, set[int]]:
        return {}

    tool = registry["function"]
    assert "x-atoll" not in str(tool.input_schema) + str(tool.output_schema)
    assert tool.input_schema["properties"]["title"] == {"type": "string", "default": "x"}
    assert tool.input_schema["required"] == ["price", "tags", "order"]
    assert tool.output_schema == {
        "type": "object",
        "additionalProperties": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    }


# --------------------------------------------------------------------------------------------------------- round trips

JSON_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | JSON_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(JSON_TEXT, inner, max_size=4),
    max_leaves=20,
)
ECHO = ToolRegistry()


@ECHO.register
async def echo_any(value: Any) -> Any:
    return value


@ECHO.register
async def echo_plain(value):
    return value


@ECHO.register
async def echo_order(order: Order) -> Order:
    assert isinstance(order, Order)
    return order


@ECHO.register
async def echo_typed(
    texts: list[str], numbers: dict[str, int], data: bytes, points: tuple[Point, ...], when: dt.datetime | None
) -> tuple[list[str], dict[str, int], bytes, tuple[Point, ...], dt.datetime | None]:
    return texts, numbers, data, points, when


@given(JSON)
@settings(max_examples=60, deadline=None)
async def test_any_json_comes_back_as_it_was_sent(value: Any) -> None:
    assert await ECHO.call("echo_any", {"value": value}, caller=CODE) == value
    assert await ECHO.call("echo_plain", {"value": value}, caller=CODE) == value


ORDERS = st.builds(
    Order,
    id=st.uuids(),
    items=st.lists(
        st.builds(
            Item,
            name=JSON_TEXT,
            price=st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**6), max_value=10**6),
            count=st.integers(1, 2**70),
        ),
        max_size=3,
    ),
    placed=st.datetimes(timezones=st.just(dt.UTC)),
    parent=st.none(),
)


@given(ORDERS)
@settings(max_examples=40, deadline=None)
async def test_a_model_comes_back_as_it_was_sent(order: Order) -> None:
    answer = await ECHO.call("echo_order", {"order": order.model_dump(mode="json")}, caller=CODE)
    assert Order.model_validate(answer) == order


@given(
    st.lists(JSON_TEXT, max_size=3),
    st.dictionaries(JSON_TEXT, st.integers(), max_size=3),
    st.binary(max_size=20),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    st.none() | st.datetimes(),
)
@settings(max_examples=40, deadline=None)
async def test_typed_arguments_come_back_as_they_were_sent(
    texts: list[str], numbers: dict[str, int], data: bytes, xs: list[float], when: dt.datetime | None
) -> None:
    sent = {
        "texts": texts,
        "numbers": numbers,
        "data": base64.b64encode(data).decode(),
        "points": [{"x": x, "y": 0.0} for x in xs],
        "when": None if when is None else when.isoformat(),
    }
    answer: Any = await ECHO.call("echo_typed", sent, caller=CODE)
    assert answer[:4] == [texts, numbers, sent["data"], sent["points"]]
    assert (answer[4] and dt.datetime.fromisoformat(answer[4])) == when
