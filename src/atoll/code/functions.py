"""A Python function as a tool.

Owns how a signature and a docstring become a schema and a `ToolShape`, how the arguments of a call become the types of
the parameters, and how a result becomes JSON. Not here: who may call, time limits, and errors for the code
(`registry.py`); how types are written (`stubs.py`). Used by `registry.py`.

pydantic does the work, once per function: a `TypedDict` of the parameters validates arguments, and one with the field
`value` serialises results. Both are in JSON mode, so that a strict model takes a date as text and `bytes` are base64.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, NotRequired, Required, Self

import pydantic_core
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError
from pydantic.fields import FieldInfo
from typing_extensions import TypedDict

from atoll.code.shapes import (
    ANY,
    MarkedSchema,
    SchemaReader,
    Shape,
    ToolParameter,
    ToolShape,
    is_name,
    merge_models,
    settle_dicts,
    without_marks,
)
from atoll.contract.errors import InvalidRequest, ToolCallError
from atoll.tools.tool import explain_invalid, readable_all, untitle

MAX_ARGUMENTS_BYTES = 4 * 1024 * 1024
MAX_RESULT_BYTES = 16 * 1024 * 1024
"""A result as JSON. It is held twice on its way."""

_CONFIG = ConfigDict(extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")
_Placing = Literal["any", "positional", "keyword"]
_PLACINGS: dict[Any, _Placing] = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
}
_SECTIONS = re.compile(r"^\s*(:\w+[^:\n]*:|[A-Z]\w+( \w+)?:\s*$|-{3,}\s*$)", re.MULTILINE)
"""What looks like a section of a docstring: Sphinx, Google or NumPy. Without one there is nothing to parse."""
_NO_DEFAULT = inspect.Parameter.empty
_typed_dict: Any = TypedDict
"""With fields that are known only now, which type checkers refuse."""


@dataclass(frozen=True)
class DocTexts:
    """The texts of a docstring."""

    description: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    returns: str = ""
    types: Mapping[str, str] = field(default_factory=dict)
    """Of parameters, as the docstring writes them."""


class Scope(NamedTuple):
    """The names where a decorator stands: annotations may use classes of the function around."""

    names: Mapping[str, Any]
    module: Mapping[str, Any]

    @classmethod
    def of_caller(cls, depth: int) -> Self:
        """`depth` 1: where the function that calls this was called."""
        frame = sys._getframe(depth + 1)  # noqa: SLF001 - the only way; pydantic does the same
        return cls(frame.f_locals, frame.f_globals)


class FunctionTool:
    """A function, ready to be called with JSON.

    Raises:
        InvalidRequest: its signature cannot be described in JSON; the message says what to change.
    """

    def __init__(self, function: Callable[..., Any], name: str, scope: Scope | None = None) -> None:
        self.function = function
        self.name = name
        self._what = f"the function {getattr(function, '__qualname__', name)!r}"
        if isinstance(function, type):
            raise InvalidRequest(f"{function.__qualname__!r} is a class; register a function that makes one")
        called, bound = _unwrapped(function)
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            raise InvalidRequest(f"{self._what} is a generator, and a call has one result: return a list")
        self.is_async = inspect.iscoroutinefunction(called)
        inner = inspect.unwrap(called)
        self.texts = read_docstring(inspect.getdoc(inner) or "")
        self._parameters, self._rest = self._read_signature(function, bound)
        hints = self._hints(inner, scope)
        self._arguments = self._adapter("Arguments", *self._argument_types(hints))
        returned = hints.get("return", _NO_DEFAULT)
        self._result = None if returned is _NO_DEFAULT else self._adapter("Result", {"value": returned})
        self._serializer = None
        if self._result is not None:
            # With the config at the root, too: what a union or `Any` holds is serialised by that.
            self._serializer = pydantic_core.SchemaSerializer(
                self._result.core_schema, pydantic_core.CoreConfig(ser_json_bytes="base64")
            )
        self.input_schema, self.output_schema, self.shape = self._describe()
        self._fixes_base64 = _has_bytes(self.shape)
        self._positional = [each for each in self._parameters if each.kind is inspect.Parameter.POSITIONAL_ONLY]
        self._validate = self._arguments.validator.validate_json

    # ------------------------------------------------------------------------------------------------------ signatures

    def _read_signature(
        self, function: Callable[..., Any], bound: frozenset[str]
    ) -> tuple[list[inspect.Parameter], inspect.Parameter | None]:
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{self._what} has no signature: {error}; write a function around it") from None
        parameters, rest = [], None
        for each in signature.parameters.values():
            if each.kind is inspect.Parameter.VAR_POSITIONAL:
                raise InvalidRequest(
                    f"{self._what} takes *{each.name}, and JSON arguments have names; "
                    f"take a list instead: {each.name}: list[...]"
                )
            if each.kind is inspect.Parameter.VAR_KEYWORD:
                if each.annotation is _NO_DEFAULT:
                    raise InvalidRequest(
                        f"{self._what} takes **{each.name} of any type; annotate it (**{each.name}: str), or name "
                        "the arguments"
                    )
                rest = each
            elif each.name in bound:
                continue  # a partial has set it: not for the code, which must not even see it
            elif each.name in {"self", "cls"} and each.annotation is _NO_DEFAULT:
                raise InvalidRequest(
                    f"{self._what} takes {each.name!r}: register a method of an object, as in "
                    f"registry.register(thing.{self.name})"
                )
            elif not is_name(each.name):
                raise InvalidRequest(f"{self._what} has the parameter {each.name!r}; use ASCII letters, digits and '_'")
            else:
                parameters.append(each)
        return parameters, rest

    def _hints(self, inner: Callable[..., Any], scope: Scope | None) -> dict[str, Any]:
        # Names of the decorator's place mean something only to functions of the same module.
        names = None
        if scope is not None and getattr(inner, "__globals__", None) is scope.module:
            names = dict(scope.names)
        try:
            return typing.get_type_hints(inner, localns=names, include_extras=True)
        except (NameError, TypeError, SyntaxError, AttributeError) as error:
            raise InvalidRequest(f"the annotations of {self._what} cannot be read: {error}") from None

    def _argument_types(self, hints: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        types: dict[str, Any] = {}
        for each in self._parameters:
            kind = hints.get(each.name, Any)
            required = each.default is _NO_DEFAULT
            if isinstance(each.default, FieldInfo):
                kind = typing.Annotated[kind, each.default]
                required = each.default.is_required()
            types[each.name] = Required[kind] if required else NotRequired[kind]
        return types, _NO_DEFAULT if self._rest is None else hints[self._rest.name]

    def _adapter(self, name: str, types: dict[str, Any], rest: Any = _NO_DEFAULT) -> TypeAdapter[Any]:
        made: Any
        if rest is _NO_DEFAULT:
            made = _typed_dict(name, types)
            made.__pydantic_config__ = _CONFIG
        else:
            made = _typed_dict(name, types, extra_items=rest)
            made.__pydantic_config__ = ConfigDict(**{**_CONFIG, "extra": "allow"})
        try:
            return TypeAdapter(made)
        except (PydanticUserError, PydanticUndefinedAnnotation) as error:
            raise self._unfit(error) from None

    def _unfit(self, error: Exception) -> InvalidRequest:
        said = str(error).partition("\n")[0].partition(". Set `arbitrary")[0]
        return InvalidRequest(
            f"{self._what} has a type that cannot be JSON: {said}. Use types that pydantic knows; bind what is not for "
            "the code with functools.partial; return plain data"
        )

    def _describe(self) -> tuple[dict[str, Any], dict[str, Any] | None, ToolShape]:
        try:
            given = self._arguments.json_schema(schema_generator=MarkedSchema)
            returned = self._result and self._result.json_schema(mode="serialization", schema_generator=MarkedSchema)
        except PydanticUserError as error:
            raise self._unfit(error) from None
        for schema in (given, returned):
            self._refuse_text_bytes(schema)
        given.setdefault("properties", {})
        for each in self._parameters:
            if each.name not in given["properties"]:
                raise InvalidRequest(f"{self._what} has an alias for {each.name!r}; code calls by the parameter's name")
            self._complete(given["properties"][each.name], each)
        reader = SchemaReader(self.name, foreign=False)
        by_name = {each.name: each for each in reader.parameters(given)}
        rest = None
        if self._rest is not None:
            shape = reader.shape({**given, "properties": {}, "type": "object"}, "rest").inner[0]
            rest = ToolParameter(self._rest.name, shape, required=False)
        writer = SchemaReader(self.name, foreign=False)
        returns, output = ANY, None
        if returned:
            about = returned["properties"]["value"]
            returns = writer.shape({**about, "$defs": returned.get("$defs", {})}, "result")
            output = without_marks({**about, "$defs": returned["$defs"]} if "$defs" in returned else about)
            untitle(output)
        models, renamed = merge_models(reader.models, writer.models)
        parameters = tuple(
            replace(renamed(by_name[each.name]), placing=_PLACINGS.get(each.kind, "any")) for each in self._parameters
        )
        described = ToolShape(parameters, rest and renamed(rest), returns, settle_dicts(models))
        given = without_marks(given)
        untitle(given)
        return given, output, described

    def _refuse_text_bytes(self, schema: Any) -> None:
        """Bytes of a pydantic model are text unless it says otherwise, and code gets and gives them as base64."""
        for name, model in ((schema or {}).get("$defs") or {}).items():
            for name_inside, about in (model.get("properties") or {}).items():
                if '"format": "binary"' in json.dumps(about, default=str):
                    raise InvalidRequest(
                        f"{self._what} uses {name}.{name_inside}, whose bytes would travel as text; give the "
                        "pydantic model that holds them model_config = ConfigDict(ser_json_bytes='base64', "
                        "val_json_bytes='base64')"
                    )

    def _complete(self, about: dict[str, Any], parameter: inspect.Parameter) -> None:
        """What the annotation does not say: the default, and the text of the docstring."""
        if parameter.default is not _NO_DEFAULT and not isinstance(parameter.default, FieldInfo):
            default = _shown_default(parameter.default)
            if default is not _NO_DEFAULT:
                about["default"] = default
        if "description" not in about and self.texts.parameters.get(parameter.name):
            about["description"] = self.texts.parameters[parameter.name]

    # ----------------------------------------------------------------------------------------------------------- calls

    def read(self, arguments: Mapping[str, object]) -> dict[str, Any]:
        """The arguments as the function takes them. For one with a default, null means the default.

        Raises:
            ToolCallError: they are invalid.
        """
        text = encode(arguments, f"the arguments of {self.name}", MAX_ARGUMENTS_BYTES, "InvalidArguments")
        try:
            return self._validate(text)  # type: ignore[no-any-return]
        except ValidationError as error:
            found = error.errors(include_url=False)
        if found[0]["type"] == "json_invalid":
            raise ToolCallError("InvalidArguments", f"the arguments of {self.name} {_why_no_json(found[0]['msg'])}")
        nulls = [each["loc"] for each in found if each["input"] is None and each["type"] != "missing"]
        if nulls and (fewer := _without(json.loads(text), nulls)) is not None:
            try:
                return self._arguments.validate_json(json.dumps(fewer))  # type: ignore[no-any-return]
            except ValidationError:
                pass
        raise ToolCallError("InvalidArguments", explain_invalid(self.name, found, self.input_schema))

    def bind(self, values: dict[str, Any]) -> Callable[[], Any]:
        """The call, still to be made."""
        if not self._positional:
            return functools.partial(self.function, **values)
        given = [index for index, each in enumerate(self._positional) if each.name in values]
        before = self._positional[: max(given, default=-1) + 1]
        positional = [values.pop(each.name, each.default) for each in before]
        return functools.partial(self.function, *positional, **values)

    def write(self, value: object) -> object:
        """A result as JSON has it: by the annotation, or without one as what it is. NaN and infinities are None.

        Raises:
            ToolCallError: it cannot be JSON.
        """
        try:
            if self._serializer is None:
                plain = pydantic_core.to_jsonable_python(value, bytes_mode="base64", inf_nan_mode="null")
            else:
                plain = self._serializer.to_python({"value": value}, mode="json", warnings="none")["value"]
        except (ValueError, TypeError, RecursionError) as error:  # pydantic's are ValueErrors
            raise ToolCallError(
                "InvalidResult", f"{self.name} returned a {type(value).__name__} that cannot be JSON: {error}"
            ) from error
        return _standard_base64(plain, self.shape.returns, self.shape) if self._fixes_base64 else plain


# ---------------------------------------------------------------------------------------------------------------- JSON


def _plain(value: object) -> object:
    return pydantic_core.to_jsonable_python(value, bytes_mode="base64")


_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_plain).encode


def encode(value: object, what: str, limit_bytes: int, kind: str) -> str:
    """`value` as JSON in ASCII.

    Raises:
        ToolCallError: of the type `kind`: it is no JSON, or longer than the limit.
    """
    try:
        text = _encode(value)
    except RecursionError:
        raise ToolCallError(kind, f"{what} are nested too deep") from None
    except (ValueError, TypeError) as error:
        raise ToolCallError(kind, f"{what} {_why_no_json(str(error))}") from None
    if len(text) > limit_bytes:
        raise ToolCallError(kind, f"{what} take {len(text):,} bytes as JSON; allowed are {limit_bytes:,}")
    return text


def checked_result(name: str, value: object) -> tuple[object, str]:
    """What a tool returned, if it is JSON, and that JSON in ASCII. NaN and infinities become None, halves of surrogate
    pairs their escapes.

    Raises:
        ToolCallError: it is no JSON, or too long.
    """
    what = f"the data that {name} returned"
    try:
        text = encode(value, what, MAX_RESULT_BYTES, "InvalidResult")
    except ToolCallError as error:
        if "NaN" not in error.message:
            raise
        value = _finite(value)
        text = encode(value, what, MAX_RESULT_BYTES, "InvalidResult")
    if "\\ud" in text:
        value = readable_all(value)
        text = encode(value, what, MAX_RESULT_BYTES, "InvalidResult")
    return value, text


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list) else value


_REASONS = (
    ("Out of range float", "hold NaN or an infinity, which JSON cannot have; pass null"),
    ("recursion limit", "are nested deeper than 200 levels"),
    ("depth exceeded", "are nested too deep"),
    ("Circular reference", "contain themselves"),
    ("surrogate", "hold half of a surrogate pair, which is no character"),
    ("hex escape", "hold half of a surrogate pair, which is no character"),
    ("digits", "hold a number of more than 4,300 digits; pass it as a string"),
)


def _why_no_json(said: str) -> str:
    for part, reason in _REASONS:
        if part in said:
            return reason
    return f"are not JSON: {said}"


def _without(arguments: Any, places: list[tuple[int | str, ...]]) -> Any:
    """The arguments without the fields at these places. None: one of them is not a field of an object."""
    for place in places:
        at = arguments
        for part in place[:-1]:
            try:
                at = at[part]
            except (KeyError, IndexError, TypeError):  # a part of the place names a type of a union
                return None
        if not isinstance(at, dict) or at.pop(place[-1], 0) is not None:
            return None
    return arguments


def _has_bytes(shape: ToolShape) -> bool:
    parts = [shape.returns, *(field.shape for model in shape.models.values() for field in model.fields)]
    return any(each.value == "bytes" and each.kind == "scalar" for part in parts for each in _flat(part))


def _flat(shape: Shape) -> list[Shape]:
    return [shape, *(each for inner in shape.inner for each in _flat(inner))]


_ALPHABET = str.maketrans("-_", "+/")


def _standard_base64(value: Any, shape: Shape, tool: ToolShape) -> Any:
    """pydantic writes base64 with the alphabet for URLs; a kernel reads the standard one."""
    if shape.kind == "scalar" and shape.value == "bytes" and isinstance(value, str):
        return value.translate(_ALPHABET)
    if shape.kind == "model" and isinstance(value, dict):
        shapes = {each.name: each.shape for each in tool.models[shape.value].fields}
        return {key: _standard_base64(each, shapes.get(key, ANY), tool) for key, each in value.items()}
    if shape.kind == "dict" and isinstance(value, dict):
        return {key: _standard_base64(each, shape.inner[0], tool) for key, each in value.items()}
    if shape.kind in {"list", "set"} and isinstance(value, list):
        return [_standard_base64(each, shape.inner[0], tool) for each in value]
    if shape.kind == "tuple" and isinstance(value, list):
        return [_standard_base64(each, inner, tool) for each, inner in zip(value, shape.inner, strict=False)]
    if shape.kind == "union" and len(inner := [each for each in shape.inner if each.value != "None"]) == 1:
        return _standard_base64(value, inner[0], tool)
    return value


# ---------------------------------------------------------------------------------------------------------- inspection


def _unwrapped(function: Callable[..., Any]) -> tuple[Callable[..., Any], frozenset[str]]:
    """The function that runs, and the names of arguments that partials have set."""
    bound: set[str] = set()
    inner: Any = function
    while True:
        if isinstance(inner, functools.partial):
            bound |= set(inner.keywords)
            inner = inner.func
        elif inspect.ismethod(inner):
            inner = inner.__func__
        elif callable(inner) and not inspect.isroutine(inner) and not isinstance(inner, type):
            inner = type(inner).__call__
        else:
            return inner, frozenset(bound)


def _shown_default(value: object) -> Any:
    try:
        plain = pydantic_core.to_jsonable_python(value, bytes_mode="base64", inf_nan_mode="strings")
        text = json.dumps(plain)
    except (ValueError, TypeError, RecursionError):
        return _NO_DEFAULT
    return plain if len(text) <= 1000 else _NO_DEFAULT


def read_docstring(text: str) -> DocTexts:
    """The texts of a docstring, without its indentation, in the style of Google, NumPy or Sphinx."""
    if not _SECTIONS.search(text):
        return DocTexts(text, {})
    import griffe

    style: Literal["sphinx", "numpy", "google"] = "google"
    if re.search(r"^\s*:(param|parameter|arg|argument|returns?|raises?|type|rtype)\b[^:\n]*:", text, re.MULTILINE):
        style = "sphinx"
    elif re.search(r"^\s*(Parameters|Returns|Raises|Yields|Other Parameters)\n\s*-{3,}\s*$", text, re.MULTILINE):
        style = "numpy"
    options: dict[str, Any] = {"warnings": False}
    if style == "google":
        options |= {"returns_named_value": False, "returns_multiple_items": False}
    parameters: dict[str, str] = {}
    types: dict[str, str] = {}
    texts: list[str] = []
    returns = ""
    for section in griffe.Docstring(text, lineno=1).parse(style, **options):
        if isinstance(section, griffe.DocstringSectionParameters):
            for each in section.value:
                parameters.setdefault(each.name.lstrip("*"), str(each.description).strip())
                if each.annotation is not None:
                    types.setdefault(each.name.lstrip("*"), str(each.annotation))
        elif isinstance(section, griffe.DocstringSectionReturns):
            returns = returns or " ".join(str(each.description).strip() for each in section.value)
        elif isinstance(section, griffe.DocstringSectionRaises):
            texts += [f"Raises {each.annotation}: {str(each.description).strip()}" for each in section.value]
        elif isinstance(section, griffe.DocstringSectionAdmonition):
            texts.append(f"{section.title or section.value.kind}: {section.value.contents.strip()}")
        elif isinstance(section, griffe.DocstringSectionText):
            texts.append(section.value.strip())
    return DocTexts("\n\n".join(texts), parameters, returns, types)
