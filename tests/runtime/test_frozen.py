"""Models without pydantic: what they accept by themselves, pydantic accepts with the same result."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
import traceback
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from hypothesis import example, given, settings, strategies as st
from pydantic import BaseModel, SecretStr, ValidationError

from atoll.code.executor import CodeConfig
from atoll.contract import frozen
from atoll.contract.driver import Layer
from atoll.contract.errors import InvalidRequest
from atoll.contract.frozen import AfterValidator, Field, Frozen, FrozenRequest, pydantic_model
from atoll.contract.model import ExecBytes, FileEntry, Limits, Mount, SandboxInfo, SandboxSpec
from atoll.contract.network import NetworkPolicy
from atoll.runtime.state.store import Manifest
from atoll.settings import Settings


def refuse_seven(value: int) -> int:
    if value == 7:
        raise ValueError("not seven")
    return value + 1


class Inner(Frozen):
    """What is inside."""

    KIND: ClassVar[int] = 3
    number: int = Field(default=1, ge=0, le=100)


class Every(Frozen):
    """A field of every kind that models have."""

    flag: bool = False
    number: int = 0
    share: float | None = Field(default=None, gt=0, le=8)
    text: str = ""
    name: Annotated[str, Field(pattern=r"^[a-z]{1,3}$")] = "a"
    short: str = Field(default="ab", min_length=2, max_length=4)
    data: bytes = b""
    choice: Literal["one", "two"] | None = None
    version: Literal[1] = 1
    owner: int | Literal["machine"] = 0
    path: Path = Path("/")
    moment: datetime | None = None
    inner: Inner = Inner()
    inners: tuple[Inner, ...] = ()
    stamp: tuple[int, int] = (0, 0)
    env: dict[str, str] = Field(default_factory=dict)
    checked: Annotated[int, AfterValidator(refuse_seven)] = 0
    network: NetworkPolicy | None = None


_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 200),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=-3)), None])),
    st.sampled_from(
        [
            "one",
            "two",
            "machine",
            "abc",
            "abc\n",
            "1",
            "true",
            "/etc",
            "2026-01-02T03:04:05Z",
            "2026-13-02T03:04:05Z",
            "2026-01-02T03:04:05.123456+02:00",
            "2026-01-02",
            "20260102T030405Z",
            "nan",
            "a.example",
            "\ud800",
        ]
    ),
    st.just(Path("/tmp")),
    st.just(Inner(number=4)),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from(["number", "allow", "other"]), inner, max_size=2),
    ),
    max_leaves=4,
)


def by_pydantic(given: dict[str, Any]) -> dict[str, Any]:
    return dict(pydantic_model(Every)(**given))


@settings(max_examples=1500, deadline=None)
@given(st.dictionaries(st.sampled_from([*Every.field_names(), "unknown"]), _VALUES, max_size=2))
@example({"number": True})
@example({"name": "ab\n"})
@example({"inner": {"number": 101}})
@example({"owner": "machine", "version": 1.0})
@example({"checked": 7})
def test_a_value_that_is_accepted_without_pydantic_is_one_that_pydantic_accepts_unchanged(
    given: dict[str, Any],
) -> None:
    try:
        without = frozen._exact_fields(Every, given)
    except frozen._Unsure:
        return
    assert repr(without) == repr(by_pydantic(given)).replace("TzInfo(0)", "datetime.timezone.utc").replace(
        "TzInfo(7200)", "datetime.timezone(datetime.timedelta(seconds=7200))"
    )


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(st.sampled_from(Every.field_names()), _VALUES, max_size=3))
def test_what_is_dumped_without_pydantic_is_what_pydantic_dumps(given: dict[str, Any]) -> None:
    try:
        made = Every(**given)
    except ValidationError:
        return
    same = pydantic_model(Every).model_construct(**vars(made))
    for chosen in ({}, {"exclude_none": True}, {"include": {"inner", "moment"}}, {"exclude": {"data"}}):
        for mode in ("python", "json"):
            try:
                expected = same.model_dump(mode=mode, **chosen)
            except ValueError:  # bytes that are not UTF-8, or a surrogate, cannot be in JSON
                continue
            assert repr(made.model_dump(mode=mode, **chosen)) == repr(expected)


@pytest.mark.parametrize(
    ("model", "wrong"),
    [
        (Limits, {"pids": "many"}),
        (Limits, {"memory_bytes": 1}),
        (Limits, {"ram": 1}),
        (SandboxSpec, {"name": "No"}),
        (SandboxSpec, {"name": "a", "limits": {"cpus": 0}}),
        (SandboxSpec, {"name": "a", "network": {"allow": ["http://x"]}}),
        (Layer, {"path": 3, "owner": "guest"}),
        (SandboxInfo, {}),
    ],
)
def test_what_is_wrong_is_refused_with_the_error_of_pydantic(model: type[Frozen], wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as ours:
        model.model_validate(wrong)
    with pytest.raises(InvalidRequest if issubclass(model, FrozenRequest) else ValidationError) as made:
        model(**wrong)
    with pytest.raises(ValidationError) as theirs:
        pydantic_model(model)(**wrong)
    assert str(ours.value) == str(theirs.value)
    assert issubclass(model, FrozenRequest) or str(made.value) == str(theirs.value)
    assert ours.value.title == model.__name__


@pytest.mark.parametrize(
    ("model", "wrong", "said"),
    [
        (
            Limits,
            {"memory_bytes": "512m"},
            "memory_bytes is '512m'; it must be a whole number of bytes: 512 << 20 is 512 MiB",
        ),
        (Limits, {"memory_bytes": 1}, "memory_bytes is 1; it must be at least 8388608"),
        (Limits, {"cpus": "all"}, "cpus is 'all'; it must be a number"),
        (Limits, {"memory": 1 << 30}, "Limits has no field memory; did you mean memory_bytes?"),
        (Mount, {"source": "."}, "Mount needs the field target"),
        (Mount, {"source": "", "target": "/a"}, "source is ''; it must not be empty"),
        (Mount, {"source": ".", "target": "/a", "read_only": "no idea"}, "read_only is 'no idea'; it must be True or"),
        (NetworkPolicy, {"allow": 3}, "allow is 3; it must be a Sequence"),
        (NetworkPolicy, {"allow": ["a b"]}, "'a b' is not a network rule: "),
        (Settings, {"project_mib": 0}, "project_mib is 0; it must be at least 1"),
        (CodeConfig, {"timeout": 1, "language": "python"}, "CodeConfig has no field timeout; did you mean timeout_s?"),
        (CodeConfig, {"language": "perl"}, "language is 'perl'; it must be 'python', 'javascript' or 'bash'"),
    ],
)
def test_what_a_caller_makes_is_refused_in_words_that_say_what_is_allowed(
    model: type[Any], wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{re.escape(said)}") as error:
        model(**wrong)
    assert "pydantic" not in str(error.value)


def test_a_setting_that_is_a_secret_is_not_in_the_message() -> None:
    token = "hunter2"
    with pytest.raises(InvalidRequest, match="mcp_token is wrong") as error:
        Settings(mcp_token=SecretStr(token))
    assert token not in "".join(traceback.format_exception(error.value))


def test_fields_cannot_be_set_or_deleted() -> None:
    limits = Limits(pids=5)
    with pytest.raises(ValidationError, match="frozen"):
        limits.pids = 6  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        del limits.pids
    with pytest.raises(ValidationError, match="frozen"):
        limits.other = 1
    assert limits.pids == 5


def test_models_are_values() -> None:
    one, same, other = Limits(pids=5), Limits(pids=5), Limits(pids=6)
    assert one == same != other
    assert hash(one) == hash(same)
    assert {one, same, other} == {one, other}
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one.model_copy() == one
    assert one.model_copy(update={"pids": 6}) == other
    assert repr(Layer(path=Path("/a"))) == "Layer(path=PosixPath('/a'), owner=0)"
    assert Limits() != Inner()


def test_a_field_that_is_not_shown_is_not_shown() -> None:
    class Hidden(Frozen):
        shown: str
        value: str = Field(repr=False)

    assert repr(Hidden(shown="a", value="b")).endswith("Hidden(shown='a')")


def test_a_default_that_is_made_belongs_to_one_model() -> None:
    assert SandboxSpec(name="a").env is not SandboxSpec(name="b").env
    given = {"A": "1"}
    assert SandboxSpec(name="a", env=given).env is not given


def test_models_are_fields_of_pydantic_models() -> None:
    class Outer(BaseModel):
        limits: Limits
        files: tuple[FileEntry, ...] = ()

    limits = Limits(cpus=1.5)
    assert Outer(limits=limits).limits is limits
    read = Outer.model_validate({"limits": {"cpus": "1.5"}})
    assert read.limits == limits
    assert type(read.limits) is Limits
    assert read.model_dump(mode="json")["limits"] == limits.model_dump(mode="json")
    with pytest.raises(ValidationError) as error:
        Outer.model_validate({"limits": {"cpus": -1}})
    assert error.value.errors()[0]["loc"] == ("limits", "cpus")
    described = Outer.model_json_schema()["$defs"]["Limits"]
    assert described["description"] == Limits.__doc__
    assert described["additionalProperties"] is False


def test_bytes_that_are_not_text_are_not_dumped_as_json() -> None:
    result = ExecBytes(exit_code=0, duration_s=1.0, stdout=b"\xff", stderr=b"ok")
    assert result.model_dump()["stdout"] == b"\xff"
    with pytest.raises(ValueError, match="utf-8"):
        result.model_dump(mode="json")


def test_records_and_settings_are_read_without_pydantic() -> None:
    """Importing pydantic takes longer than everything else that a command does."""
    script = """
import os, sys
from atoll.runtime.state.store import Manifest
from atoll.settings import Settings

os.environ["ATOLL_RUNTIME"] = "crun"
assert Settings.from_environment().runtime == "crun"
manifest = Manifest.model_validate(
    dict(id="atoll-0123456789abcdef", namespace="default", runtime="crun",
         spec=dict(name="a", network=dict(allow=["a.example"])),
         limits=dict(memory_bytes=2**31, cpus=1.5), env={"A": "b"}, user="user", cwd="/srv", image_digest="sha256:0",
         active_layer="layer-1",
         base=[dict(target="/", key="root", layers=[dict(path="/usr", owner="machine")])],
         layers=[dict(id="layer-0", owner=3)], id_slot=3, created_at="2026-01-02T03:04:05.678901Z"))
assert Manifest.model_validate(manifest.model_dump(mode="json")) == manifest
assert "pydantic" not in sys.modules and "pydantic_core" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_model_of_ours_can_be_a_pydantic_model() -> None:
    for model in (Manifest, Settings, SandboxInfo, ExecBytes):
        assert tuple(pydantic_model(model).model_fields) == model.field_names()
