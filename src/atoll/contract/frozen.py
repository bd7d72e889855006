"""Models: immutable values with typed fields, which are checked when they are made.

`Frozen` is the base of the data that the runtime takes, returns and stores. A model is declared as with pydantic, has
the same methods, and raises pydantic's errors. The difference is when pydantic is loaded: importing it and building its
schemas takes longer than running a command, and nearly all values are made by our own code, with the declared types.

So there are two steps. A value that is exactly what its field declares is accepted here. Everything else (a number in a
string, a number out of range, a field that does not exist) goes to a pydantic model with the same fields, which alone
decides what can be converted and what is refused. What is accepted here, pydantic would accept with the same result:
`tests/runtime/test_frozen.py` compares the two. Data that others wrote goes to pydantic always (`model_validate_json`).

`FrozenRequest` is the base of models that callers make themselves: what is wrong with one is an `InvalidRequest`.

Not here: the models (`model.py` and others), and models that only describe what is parsed, such as the inputs of tools.
They are plain pydantic. Used by every layer.
"""

from __future__ import annotations

import builtins
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path, PosixPath
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
)

from atoll.contract.errors import InvalidRequest

if TYPE_CHECKING:
    from typing import Self

    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

_M = TypeVar("_M", bound="Frozen")
_Check = Callable[[Any], Any]
"""Returns the value that a field gets, or raises `_Unsure`."""
_REQUIRED: Any = object()
# As we write it. pydantic reads more forms, and `datetime.fromisoformat` others again.
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{6})?(Z|[+-]\d\d:\d\d)", re.ASCII)
_PLAIN = (str, int, bool, bytes, NoneType)
_ALLOWED: Mapping[str, str] = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "bool": "True or False",
    "string": "text",
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "string_too_short": "at least {min_length} characters long",
    "string_too_long": "at most {max_length} characters long",
    "too_short": "at least {min_length} long",
    "too_long": "at most {max_length} long",
    "literal_error": "{expected}",
    "is_instance_of": "a {class}",
}
"""What a value must be, by the type of pydantic's error, or by what that begins with."""


class _Unsure(Exception):
    """It takes pydantic to say whether a value is right."""


class _NameOfPydantic:
    """Stands for a type that a module imports for type checkers only, from pydantic, such as `SecretStr`."""


class AfterValidator:
    """In `Annotated`: a function that is given the value, and returns it or raises `ValueError`."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self.function, handler(source))


class FieldSpec:
    """What `Field` declares: a default, bounds of the value, or that it is not shown."""

    def __init__(self, default: Any, default_factory: Callable[[], Any] | None, repr: bool, bounds: dict[str, Any]):
        self.default = default
        self.default_factory = default_factory
        self.repr = repr
        self.bounds = bounds

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic import Field

        return handler.generate_schema(Annotated[source, Field(**self.bounds)])


def Field(  # noqa: N802 - as pydantic calls it
    default: Any = _REQUIRED,
    *,
    default_factory: Callable[[], Any] | None = None,
    repr: bool = True,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    min_length: int | None = None,
    max_length: int | None = None,
    pattern: str | None = None,
) -> Any:
    """The default of a field, in a class; or its bounds, in `Annotated`. The bounds are those of a value that is not
    None."""
    bounds = {"ge": ge, "gt": gt, "le": le, "min_length": min_length, "max_length": max_length, "pattern": pattern}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    return FieldSpec(default, default_factory, repr, given)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
class Frozen:
    """The base of models: fields cannot be set, and unknown ones are refused."""

    def __init__(self, /, **given: Any) -> None:
        self.__dict__.update(_check_fields(type(self), given))

    @classmethod
    def model_validate(cls, value: Any) -> Self:
        """The model with these fields, from a mapping or another instance.

        Raises:
            pydantic.ValidationError: a field is missing, unknown or wrong.
        """
        if isinstance(value, cls):
            return value
        if type(value) is dict:
            try:
                return _make(cls, _exact_fields(cls, value))
            except _Unsure:
                pass
        return _converted(cls, pydantic_model(cls).model_validate(value))

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        """As `model_validate`, from the text of a JSON object."""
        return _converted(cls, pydantic_model(cls).model_validate_json(text))

    def model_dump(
        self,
        *,
        mode: Literal["python", "json"] = "python",
        include: set[str] | None = None,
        exclude: set[str] | None = None,
        exclude_none: bool = False,
    ) -> dict[str, Any]:
        """The fields in a dict, and models below in dicts of their own. `json`: only what JSON has."""
        chosen = {
            name: value
            for name, value in self.__dict__.items()
            if (include is None or name in include) and (exclude is None or name not in exclude)
        }
        try:
            dumped: dict[str, Any] = _dumped(chosen, mode == "json", exclude_none)
        except _Unsure:
            chooses: Any = {"include": include, "exclude": exclude, "exclude_none": exclude_none}
            return _as_pydantic(self).model_dump(mode=mode, **chooses)
        return dumped

    def model_dump_json(self, *, exclude_none: bool = False) -> str:
        """The fields as one line of JSON."""
        fields = self.model_dump(mode="json", exclude_none=exclude_none)
        return json.dumps(fields, separators=(",", ":"), ensure_ascii=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """The same with some fields replaced. The new values are not checked."""
        return _make(type(self), {**self.__dict__, **(update or {})})

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        return tuple(_fields(cls).all)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_as_pydantic(self), name, value)  # raises pydantic's error
        raise AttributeError(f"{name} cannot be set")

    def __delattr__(self, name: str) -> None:
        delattr(_as_pydantic(self), name)
        raise AttributeError(f"{name} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Frozen):
            return NotImplemented
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), *self.__dict__.values()))

    def __repr__(self) -> str:
        fields = _fields(type(self)).all
        shown = ", ".join(f"{name}={self.__dict__[name]!r}" for name, field in fields.items() if field.repr)
        return f"{type(self).__qualname__}({shown})"

    __str__ = __repr__

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """For pydantic models that have a field of this type."""
        from pydantic_core import core_schema

        schema = handler(pydantic_model(cls))

        def validate(value: Any, inner: Any) -> Any:
            return value if isinstance(value, cls) else _converted(cls, inner(value))

        return core_schema.no_info_wrap_validator_function(
            validate,
            schema,
            serialization=core_schema.wrap_serializer_function_ser_schema(
                lambda value, inner: inner(_as_pydantic(value)), schema=schema
            ),
        )


class FrozenRequest(Frozen):
    """The base of models that callers make.

    Raises:
        InvalidRequest: a field is missing, unknown or wrong; the message says what is allowed.
    """

    def __init__(self, /, **given: Any) -> None:
        problem = None
        try:
            super().__init__(**given)
        except ValueError as error:
            problem = refusal(type(self), error)
        if problem is not None:  # raised here, so that no traceback refers to a value, which may be a secret
            raise problem


def refusal(cls: type[Frozen] | type[BaseModel], error: ValueError) -> InvalidRequest:
    """pydantic's error about the fields of `cls`, for the caller: what is wrong with the first of them."""
    first: ErrorDetails = cast("ValidationError", error).errors()[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    fields = pydantic_model(cls).model_fields if issubclass(cls, Frozen) else cls.model_fields
    if first["type"] == "extra_forbidden":
        from difflib import get_close_matches

        near = get_close_matches(name, fields, cutoff=0.5)
        meant = f"did you mean {near[0]}?" if near else f"it has {', '.join(fields)}"
        return InvalidRequest(f"{cls.__name__} has no field {name}; {meant}", field=name)
    if first["type"] == "missing":
        return InvalidRequest(f"{cls.__name__} needs the field {name}", field=name)
    secret = name in fields and holds_secret(fields[name].annotation)
    return InvalidRequest(explain_invalid(first, shown=not secret), field=name)


def explain_invalid(error: ErrorDetails, *, shown: bool = True) -> str:
    """What is wrong with the value of a field, and what is allowed. The value is not `shown` if it is a secret."""
    bounds = error.get("ctx", {})
    if cause := bounds.get("error"):
        return str(cause)
    # Of a union, pydantic names the member too, in its own terms.
    where = ".".join(str(part) for part in error["loc"] if "[" not in str(part))
    kind = error["type"]
    allowed = _ALLOWED.get(kind) or _ALLOWED.get(kind.removesuffix("_type").removesuffix("_parsing"))
    rule = f"it must be {allowed.format(**bounds)}" if allowed else error["msg"].replace("Input should", "it should")
    if kind == "string_too_short" and bounds["min_length"] == 1:
        rule = "it must not be empty"
    if kind.startswith("int_") and where.endswith("_bytes"):
        rule += " of bytes: 512 << 20 is 512 MiB"
    return f"{where} is {error['input']!r}; {rule}" if shown else f"{where} is wrong; {rule}"


def holds_secret(annotation: object) -> bool:
    """Whether a field of this type may hold a `SecretStr`."""
    from pydantic import SecretStr

    return annotation is SecretStr or any(map(holds_secret, get_args(annotation)))


# ---- without pydantic ----


class _DeclaredField(NamedTuple):
    check: _Check
    default: Any
    default_factory: Callable[[], Any] | None
    repr: bool


class _Declaration(NamedTuple):
    all: Mapping[str, _DeclaredField]
    plain: bool
    """False: the class has validators of pydantic."""


def _check_fields(cls: type[Frozen], given: dict[str, Any]) -> dict[str, Any]:
    try:
        return _exact_fields(cls, given)
    except _Unsure:
        return dict(pydantic_model(cls)(**given))


def _exact_fields(cls: type[Frozen], given: Mapping[str, Any]) -> dict[str, Any]:
    fields = _fields(cls)
    if not fields.plain:
        raise _Unsure
    values = {}
    known = 0
    for name, field in fields.all.items():
        if name in given:
            known += 1
            values[name] = field.check(given[name])
        elif field.default_factory is not None:
            values[name] = field.default_factory()
        elif field.default is not _REQUIRED:
            values[name] = field.default
        else:
            raise _Unsure
    if known != len(given):
        raise _Unsure
    return values


def _make(cls: type[_M], values: Mapping[str, Any]) -> _M:
    made = object.__new__(cls)
    made.__dict__.update(values)
    return made


_known_fields: dict[type[Frozen], _Declaration] = {}
_pydantic_models: dict[type[Frozen], type[BaseModel]] = {}


def _fields(cls: type[Frozen]) -> _Declaration:
    if cls not in _known_fields:
        _known_fields[cls] = _read_fields(cls)
    return _known_fields[cls]


def _read_fields(cls: type[Frozen]) -> _Declaration:
    declared = _annotations(cls, lambda _: _NameOfPydantic)
    return _Declaration(
        {name: _declared(annotation, default) for name, (annotation, default) in declared.items()},
        plain=not any(_is_of_pydantic(member) for owner in _owners(cls) for member in vars(owner).values()),
    )


def _is_of_pydantic(member: object) -> bool:
    return type(member).__module__.partition(".")[0] == "pydantic"


def _declared(annotation: Any, default: Any) -> _DeclaredField:
    if not isinstance(default, FieldSpec):
        return _DeclaredField(_checker(annotation), default, None, repr=True)
    check = _bounded(_checker(annotation), default.bounds)
    return _DeclaredField(check, default.default, default.default_factory, default.repr)


class _Names(dict[str, Any]):
    """The names that annotations of a module may use: its own, and what `other` gives for those it does not have."""

    def __init__(self, module: str, other: Callable[[str], Any]) -> None:
        super().__init__(vars(sys.modules[module]))
        self._other = other

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return self._other(name)


def _annotations(cls: type[Frozen], other: Callable[[str], Any]) -> dict[str, tuple[Any, Any]]:
    """The types that the fields of `cls` declare, and the defaults, as they are in the class."""
    found: dict[str, tuple[Any, Any]] = {}
    for owner in _owners(cls):
        names = _Names(owner.__module__, other)
        for name, written in owner.__annotations__.items():
            annotation = eval(written, {}, names) if isinstance(written, str) else written  # noqa: S307 - our own code
            if get_origin(annotation) is not ClassVar:
                found[name] = annotation, vars(owner).get(name, _REQUIRED)
    return found


def _owners(cls: type[Frozen]) -> list[type[Frozen]]:
    """The models that `cls` has fields of, the base first."""
    return [
        owner for owner in reversed(cls.__mro__) if issubclass(owner, Frozen) and owner not in (Frozen, FrozenRequest)
    ]


def _checker(annotation: Any) -> _Check:
    """Of values that are what `annotation` says, or that our own JSON has for them."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _PLAIN:
        return _instance_check(annotation)
    if annotation is None:
        return _instance_check(NoneType)
    if origin is Annotated:
        check = _checker(arguments[0])
        for extra in arguments[1:]:
            check = _with_extra(check, extra)
        return check
    if origin in (Union, UnionType):
        return _union_check(arguments)
    if origin is Literal:
        return _literal_check(arguments)
    if origin is tuple and Ellipsis in arguments:
        return _sequence_check(_checker(arguments[0]), tuple)
    if origin is tuple:
        return _tuple_check([_checker(each) for each in arguments])
    if origin is Sequence:
        return _sequence_check(_checker(arguments[0]), None)
    if origin is dict:
        return _dict_check(_checker(arguments[0]), _checker(arguments[1]))
    if isinstance(annotation, type) and issubclass(annotation, Frozen):
        return _model_check(annotation)
    return _SIMPLE.get(annotation, _unsure)


def _unsure(_value: Any) -> Any:
    raise _Unsure


def _instance_check(kind: type) -> _Check:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise _Unsure
        return value

    return check


def _float(value: Any) -> float:
    if type(value) is not float and type(value) is not int:
        raise _Unsure
    return float(value)


def _path(value: Any) -> Path:
    if type(value) is PosixPath:
        return value
    if type(value) is not str:
        raise _Unsure
    return Path(value)


def _moment(value: Any) -> datetime:
    if type(value) is datetime:
        return value
    if type(value) is not str or not _MOMENT.fullmatch(value):
        raise _Unsure
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        raise _Unsure from None


_SIMPLE: Mapping[Any, _Check] = {float: _float, Path: _path, datetime: _moment}


def _literal_check(allowed: tuple[Any, ...]) -> _Check:
    kinds = {type(each) for each in allowed}

    def check(value: Any) -> Any:
        if type(value) not in kinds or value not in allowed:
            raise _Unsure
        return value

    return check


def _union_check(members: tuple[Any, ...]) -> _Check:
    others = [member for member in members if member is not NoneType]
    optional = len(others) < len(members)
    # Of several types that could each convert a value, pydantic takes the best.
    exact = len(others) == 1 or all(each in _PLAIN or get_origin(each) in (Literal, Sequence) for each in others)
    checks = [_checker(member) for member in others] if exact else []

    def check(value: Any) -> Any:
        if value is None and optional:
            return None
        for each in checks:
            try:
                return each(value)
            except _Unsure:
                continue
        raise _Unsure

    return check if len(checks) != 1 or not optional else _optional_check(checks[0])


def _optional_check(inner: _Check) -> _Check:
    return lambda value: None if value is None else inner(value)


def _sequence_check(element: _Check, kind: type | None) -> _Check:
    def check(value: Any) -> Any:
        if type(value) is not tuple and type(value) is not list:
            raise _Unsure
        return (kind or type(value))([element(each) for each in value])

    return check


def _tuple_check(elements: list[_Check]) -> _Check:
    def check(value: Any) -> Any:
        if (type(value) is not tuple and type(value) is not list) or len(value) != len(elements):
            raise _Unsure
        return tuple([element(each) for element, each in zip(elements, value, strict=True)])

    return check


def _dict_check(key: _Check, element: _Check) -> _Check:
    def check(value: Any) -> Any:
        if type(value) is not dict:
            raise _Unsure
        return {key(name): element(each) for name, each in value.items()}

    return check


def _model_check(model: type[Frozen]) -> _Check:
    def check(value: Any) -> Any:
        if isinstance(value, model):
            return value
        if type(value) is not dict:
            raise _Unsure
        return _make(model, _exact_fields(model, value))

    return check


def _with_extra(check: _Check, extra: Any) -> _Check:
    if isinstance(extra, FieldSpec):
        return _bounded(check, extra.bounds)
    if not isinstance(extra, AfterValidator):
        return _unsure

    def checked(value: Any) -> Any:
        try:
            return extra.function(check(value))
        except (ValueError, AssertionError):
            raise _Unsure from None

    return checked


def _bounded(check: _Check, bounds: Mapping[str, Any]) -> _Check:
    if not bounds:
        return check
    least, above, most = bounds.get("ge"), bounds.get("gt"), bounds.get("le")
    shortest, longest = bounds.get("min_length"), bounds.get("max_length")
    pattern = re.compile(bounds["pattern"]) if "pattern" in bounds else None

    def checked(value: Any) -> Any:
        value = check(value)
        if value is None:
            return None
        if (
            (least is not None and not value >= least)
            or (above is not None and not value > above)
            or (most is not None and not value <= most)
            or (shortest is not None and len(value) < shortest)
            or (longest is not None and len(value) > longest)
            # `$` is the end in pydantic's patterns, and may be before a newline in ours.
            or (pattern is not None and ("\n" in value or not pattern.search(value)))
        ):
            raise _Unsure
        return value

    return checked


def _dumped(value: Any, as_json: bool, exclude_none: bool) -> Any:
    kind = type(value)
    if kind in (str, int, bool, NoneType):
        return value
    if kind is dict:
        return {
            name: _dumped(each, as_json, exclude_none)
            for name, each in value.items()
            if each is not None or not exclude_none
        }
    if kind is tuple or kind is list:
        return (list if as_json else kind)([_dumped(each, as_json, exclude_none) for each in value])
    if isinstance(value, Frozen):
        return _dumped(value.__dict__, as_json, exclude_none)
    if kind in (float, bytes, datetime, PosixPath) and not as_json:
        return value
    if kind is float and value - value == 0:
        return value
    if kind is PosixPath:
        return str(value)
    if kind is datetime:
        return value.isoformat().removesuffix("+00:00") + ("" if value.utcoffset() else "Z" if value.tzinfo else "")
    raise _Unsure


# ---- with pydantic ----


def pydantic_model(cls: type[Frozen]) -> type[BaseModel]:
    """The pydantic model with the fields, validators, name and description of `cls`."""
    if cls not in _pydantic_models:
        _pydantic_models[cls] = _build_model(cls)
    return _pydantic_models[cls]


def _build_model(cls: type[Frozen]) -> type[BaseModel]:
    import pydantic

    fields = {
        name: (annotation, _of_pydantic(default))
        for name, (annotation, default) in _annotations(cls, lambda name: getattr(pydantic, name)).items()
    }
    validators = {
        name: member
        for owner in _owners(cls)
        for name, member in vars(owner).items()
        if _is_of_pydantic(member) and name not in fields
    }
    made: type[BaseModel] = pydantic.create_model(  # type: ignore[call-overload]
        cls.__name__,
        __config__=pydantic.ConfigDict(frozen=True, extra="forbid"),
        __doc__=cls.__doc__,
        __module__=cls.__module__,
        __validators__=validators,
        **fields,
    )
    return made


def _of_pydantic(default: Any) -> Any:
    from pydantic import Field

    if default is _REQUIRED:
        return ...
    if not isinstance(default, FieldSpec):
        return default
    if default.default_factory is not None:
        return Field(default_factory=default.default_factory, repr=default.repr, **default.bounds)
    value = ... if default.default is _REQUIRED else default.default
    return Field(value, repr=default.repr, **default.bounds)


def _converted(cls: type[_M], parsed: BaseModel) -> _M:
    return _make(cls, dict(parsed))


def _as_pydantic(value: Frozen) -> BaseModel:
    return pydantic_model(type(value)).model_construct(**value.__dict__)
