"""The program that is sent into a workspace, as a module of this process: how it reads and writes JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.bundles import dispatch

Codec = tuple[Callable[[bytes], Any], Callable[[Any], str], Callable[[Any], str]]


@pytest.fixture(params=["_json", "json"])
def codec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Codec:
    """By the parts that are written in C, and as it is where they are not what they were."""
    if request.param == "json":
        monkeypatch.setitem(sys.modules, "_json", None)
    path = Path(dispatch.__file__).parent / "inside" / "dispatcher.py"
    names: dict[str, Any] = {"__name__": "atoll_dispatcher"}
    exec(compile(path.read_text(), str(path), "exec"), names)
    assert (names["from_json"] is json.loads) == (request.param == "json")
    made: Codec = names["from_json"], names["to_json"], names["to_readable_json"]
    return made


VALUES = [
    {},
    {"a": [1, -2.5, 1e300, True, False, None, 'é\n"\\\x00\ud800'], "b": {"c": {}}},
    [10**40, 0.1, -0.0],
    {1: "key", None: 2, False: 3, 1.5: 4},
    "text",
    ("a", "tuple"),
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_are_written_and_read_as_json_does(codec: Codec, value: Any) -> None:
    read, write, write_readable = codec
    assert write(value) == json.dumps(value)
    assert write_readable(value) == json.dumps(value, ensure_ascii=False)
    assert read(b" " + write(value).encode() + b"\r") == json.loads(json.dumps(value))
    assert read(b'{"n": NaN}')["n"] is not None
    assert math.isnan(read(b"NaN"))
    assert read(b"-Infinity") == -math.inf


WHAT = ["nan", "an object", "a key that is a tuple", "a set", "a circle", "bytes"]


def circular() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


@pytest.mark.parametrize("value", [math.nan, object(), {(1, 2): 3}, {"a": {1, 2}}, circular(), b"bytes"], ids=WHAT)
def test_what_json_does_not_have_is_refused(codec: Codec, value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        codec[2](value)


@pytest.mark.parametrize(
    "line", [b"", b"{", b"nope", b'{"a": 1} more', b'{"a": 1,}', b"\xff", b'"\n"', b"[1 2]"], ids=repr
)
def test_what_is_no_json_is_refused(codec: Codec, line: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of any kind
        codec[0](line)
