"""The types of a tool's arguments and result, read from JSON schemas.

Owns `Shape`, which the documentation writes as Python (`list[Sale]`) and the kernel is given as data
(`["list", ["model", "Sale"]]`), and the reader that makes shapes of a JSON schema. The schema is either one that
pydantic made of annotations (`MarkedSchema` adds what JSON schemas do not say) or one of a foreign server, which may be
anything: what is not understood is `Any`. Not here: names of models across tools, and texts (`stubs.py`). Used by
`functions.py`, `registry.py`, `mcp_tools.py` and `stubs.py`.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

MARK = "x-atoll"
"""The key with which `MarkedSchema` says what Python type a part of a schema was."""
_MAX_DEPTH = 8
"""How deep unnamed objects of a foreign schema are described. Deeper ones are `dict[str, Any]`."""
_MAX_LITERALS = 40
"""The longest enumeration that is written out. A longer one is described by the type of its values."""

_MAX_PARTS = 10_000
"""Parts of one tool's schemas that are read. References let a short schema have any number; the rest is `Any`."""

ShapeKind = Literal["any", "plain", "literal", "list", "set", "dict", "tuple", "union", "model", "scalar"]


@dataclass(frozen=True, slots=True)
class Shape:
    """A type. Equal shapes of one tool are the same type."""

    kind: ShapeKind
    inner: tuple[Shape, ...] = ()
    value: Any = None
    """Of `plain` and `scalar` the type's name, of `literal` the values, of `model` its key in `ToolShape.models`."""


ANY = Shape("any")
NONE = Shape("plain", value="None")
_PLAIN = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
_FORMATS = {"date-time": "datetime", "date": "date", "base64url": "bytes"}
"""Strings that become an object inside. Only of pydantic's schemas: a foreign server's texts stay texts."""


@dataclass(frozen=True, slots=True)
class ToolParameter:
    """A parameter of a tool, or a field of a model."""

    name: str
    shape: Shape
    required: bool = True
    default: str | None = None
    """The default as Python, if it is short. None: it has none, or none that can be shown."""
    description: str = ""
    placing: Literal["any", "positional", "keyword"] = "any"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A class of named fields: a dataclass inside, or a dict whose keys are known."""

    name: str
    """The name that it would like to have."""
    fields: tuple[ToolParameter, ...]
    description: str = ""
    is_dict: bool = False


@dataclass(frozen=True, slots=True)
class ToolShape:
    """The signature of a tool."""

    parameters: tuple[ToolParameter, ...] = ()
    rest: ToolParameter | None = None
    """`**rest`: further arguments by any name."""
    returns: Shape = ANY
    models: Mapping[str, ModelShape] = field(default_factory=dict)


class MarkedSchema(GenerateJsonSchema):
    """pydantic's schemas, with what Python type a part was where JSON has no word for it (`MARK`)."""

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> JsonSchemaValue:
        return {**super().decimal_schema(schema), MARK: "decimal"}

    def set_schema(self, schema: core_schema.SetSchema) -> JsonSchemaValue:
        return {**super().set_schema(schema), MARK: "set"}

    def frozenset_schema(self, schema: core_schema.FrozenSetSchema) -> JsonSchemaValue:
        return {**super().frozenset_schema(schema), MARK: "set"}

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> JsonSchemaValue:
        return {**super().typed_dict_schema(schema), MARK: "dict"}


def without_marks(schema: Any) -> Any:
    """A copy of a schema of `MarkedSchema` for others."""
    if isinstance(schema, dict):
        return {key: without_marks(value) for key, value in schema.items() if key != MARK}
    return [without_marks(each) for each in schema] if isinstance(schema, list) else schema


def is_name(text: str) -> bool:
    """Whether code can write `text` as a name."""
    return text.isascii() and text.isidentifier() and not keyword.iskeyword(text)


def camel(*words: str) -> str:
    """`CamelCase` of some words, as the name of a class."""
    parts = [part for word in words for part in re.split(r"[^A-Za-z0-9]+", word) if part]
    made = "".join(part[0].upper() + part[1:] for part in parts)[:60] or "Model"
    return made if is_name(made) else f"Model{made}"[:60]


class SchemaReader:
    """Reads the JSON schemas of one tool. The models that are found are in `models`, in the order of their use."""

    def __init__(self, tool: str, *, foreign: bool) -> None:
        self._tool = tool
        self._foreign = foreign
        self.models: dict[str, ModelShape] = {}
        self._open: list[str] = []
        self._definitions: Mapping[str, Any] = {}
        self._parts = 0

    def parameters(self, schema: Mapping[str, Any]) -> tuple[ToolParameter, ...]:
        """The properties of an object as parameters, those that are required first."""
        self._use(schema)
        return self._fields(schema, [])

    def shape(self, schema: Any, name: str) -> Shape:
        """The type that a schema describes. `name` is for an object that has no name."""
        self._use(schema)
        return self._read(schema, [name])

    def _use(self, schema: Any) -> None:
        found = {}
        if isinstance(schema, dict):
            for key in ("definitions", "$defs"):
                if isinstance(schema.get(key), dict):
                    found.update(schema[key])
        self._definitions = found

    def _fields(self, schema: Mapping[str, Any], path: list[str]) -> tuple[ToolParameter, ...]:
        required = schema.get("required")
        names = set(map(str, required)) if isinstance(required, list) else set()
        fields = []
        for name, about in schema["properties"].items():
            about = about if isinstance(about, dict) else {}
            default = written(about["default"]) if "default" in about else None
            shape = self._read(about, [*path, str(name)])
            fields.append(ToolParameter(str(name), shape, name in names, default, described(about)))
        return tuple(sorted(fields, key=lambda each: not each.required))

    def _read(self, schema: Any, path: list[str]) -> Shape:
        self._parts += 1
        if not isinstance(schema, dict) or self._parts > _MAX_PARTS:
            return ANY
        if isinstance(schema.get("$ref"), str):
            return self._named(schema["$ref"], path)
        if schema.get(MARK) == "decimal":
            return Shape("scalar", value="decimal")
        for key in ("enum", "const"):
            if key in schema:
                return self._literal(schema[key] if key == "enum" else [schema[key]])
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                return _union(self._read(each, path) for each in schema[key])
        if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1:
            return self._read(schema["allOf"][0], path)
        kind = schema.get("type")
        if isinstance(kind, list):
            return _union(self._read({**schema, "type": each}, path) for each in kind)
        if kind == "array" or (kind is None and "items" in schema):
            return self._array(schema, path)
        if kind == "object" or (kind is None and "properties" in schema):
            return self._object(schema, path)
        if kind == "string" and not self._foreign and schema.get("format") in _FORMATS:
            return Shape("scalar", value=_FORMATS[schema["format"]])
        return Shape("plain", value=_PLAIN[kind]) if isinstance(kind, str) and kind in _PLAIN else ANY

    def _named(self, reference: str, path: list[str]) -> Shape:
        key = reference.rpartition("/")[2]
        found = self._definitions.get(key)
        if not isinstance(found, dict) or not reference.startswith("#/"):
            return ANY
        if key in self.models:
            return Shape("model", value=key)
        if key in self._open:  # a type that contains itself, and is no class
            return Shape("model", value=key) if _has_fields(found) else ANY
        self._open.append(key)
        try:
            if not _has_fields(found):
                return self._read(found, path)
            title = str(found.get("title") or key)
            self._add(key, key.strip("_") if "__" not in key and is_name(key.strip("_")) else title, found, [key])
            return Shape("model", value=key)
        finally:
            self._open.remove(key)

    def _array(self, schema: dict[str, Any], path: list[str]) -> Shape:
        places = schema.get("prefixItems")
        if isinstance(places, list) and not schema.get("items"):
            return Shape("tuple", tuple(self._read(each, path) for each in places)) if places else Shape("list", (ANY,))
        kind: ShapeKind = "set" if schema.get(MARK) == "set" else "list"
        return Shape(kind, (self._read(schema.get("items"), [*path, "item"]),))

    def _object(self, schema: dict[str, Any], path: list[str]) -> Shape:
        if not _has_fields(schema):
            further = schema.get("additionalProperties")
            return Shape("dict", (self._read(further, [*path, "value"]),))
        if len(path) > _MAX_DEPTH:
            return Shape("dict", (ANY,))
        title = schema.get("title") if not self._foreign else None
        wanted = str(title) if title else camel(self._tool, *path)
        key = wanted
        while key in self.models or key in self._open:
            key += "_"
        self._open.append(key)
        self._add(key, wanted, {**schema, "description": ""}, path)  # the field that has it is described
        self._open.remove(key)
        return Shape("model", value=key)

    def _add(self, key: str, name: str, schema: dict[str, Any], path: list[str]) -> None:
        fields = self._fields(schema, path)
        is_dict = self._foreign or schema.get(MARK) == "dict"
        name = name if is_name(name) else camel(name)
        self.models[key] = ModelShape(name, fields, one_line(schema.get("description")), is_dict)

    def _literal(self, values: Any) -> Shape:
        if not isinstance(values, list) or not all(isinstance(each, str | int | None) for each in values):
            return ANY
        if len(values) > _MAX_LITERALS:
            kinds = dict.fromkeys("None" if each is None else type(each).__name__ for each in values)
            return _union(Shape("plain", value=kind) for kind in kinds)
        chosen = tuple(dict.fromkeys((type(each), each) for each in values if each is not None))
        found = [Shape("literal", value=tuple(value for _, value in chosen))] if chosen else []
        return _union([*found, NONE] if None in values else found)


def _has_fields(schema: Mapping[str, Any]) -> bool:
    """Whether an object has fields that can be names in Python."""
    fields = schema.get("properties")
    return schema.get("type", "object") == "object" and isinstance(fields, dict) and bool(fields) and all(
        isinstance(name, str) and is_name(name) for name in fields
    )  # fmt: skip


def _union(shapes: Iterator[Shape] | list[Shape]) -> Shape:
    flat: dict[Shape, None] = {}
    for each in shapes:
        flat.update(dict.fromkeys(each.inner if each.kind == "union" else (each,)))
    if ANY in flat or not flat:
        return ANY
    if NONE in flat:
        del flat[NONE]
        flat[NONE] = None
    return next(iter(flat)) if len(flat) == 1 else Shape("union", tuple(flat))


def merge_models(
    given: Mapping[str, ModelShape], returned: Mapping[str, ModelShape]
) -> tuple[dict[str, ModelShape], Callable[[ToolParameter], ToolParameter]]:
    """The models of arguments and of results together, and how a parameter refers to them.

    A model of both is one, unless its fields differ: a computed field is only in results. Then the arguments have
    another model, `…Input`.
    """
    different = {key for key in given if key in returned and bare(given[key]) != bare(returned[key])}
    grows = True
    while grows:
        found = {key for key, model in given.items() if key in returned and different & set(_models_of(model))}
        grows = not found <= different
        different |= found
    keys = {key: f"{key} input" for key in different}

    def shape(each: Shape) -> Shape:
        value = keys.get(each.value, each.value) if each.kind == "model" else each.value
        return Shape(each.kind, tuple(shape(inner) for inner in each.inner), value)

    def renamed(each: ToolParameter) -> ToolParameter:
        return replace(each, shape=shape(each.shape)) if keys else each

    merged: dict[str, ModelShape] = {}
    for key, model in given.items():
        fields = tuple(map(renamed, model.fields))
        name = f"{model.name}Input" if key in different else model.name
        merged[keys.get(key, key)] = replace(model, name=name, fields=fields)
    return {**merged, **{key: model for key, model in returned.items() if key not in merged}}, renamed


def bare(model: ModelShape) -> ModelShape:
    """A model without its texts, which may differ between schemas for arguments and for results."""
    return replace(
        model, description="", fields=tuple(replace(each, description="", default=None) for each in model.fields)
    )


def _models_of(model: ModelShape) -> Iterator[str]:
    for each in model.fields:
        yield from model_keys(each.shape)


def model_keys(shape: Shape) -> Iterator[str]:
    """The models that a type names."""
    if shape.kind == "model":
        yield shape.value
    for each in shape.inner:
        yield from model_keys(each)


def settle_dicts(models: Mapping[str, ModelShape]) -> dict[str, ModelShape]:
    """Models whose dicts hold what JSON cannot (dates, dataclasses) become dataclasses: the kernel makes those."""
    settled = dict(models)
    changed = True
    while changed:
        changed = False
        for key, model in settled.items():
            if model.is_dict and any(_converts(each.shape, settled) for each in model.fields):
                settled[key] = ModelShape(model.name, model.fields, model.description)
                changed = True
    return settled


def _converts(shape: Shape, models: Mapping[str, ModelShape]) -> bool:
    if shape.kind == "model":
        return not models[shape.value].is_dict
    return shape.kind in {"scalar", "set", "tuple"} or any(_converts(each, models) for each in shape.inner)


# --------------------------------------------------------------------------------------------------------------- texts


def one_line(text: object, most: int = 300) -> str:
    """A text of a schema in one line, without what a terminal or a docstring would take for a sign of its own."""
    if not isinstance(text, str):
        return ""
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= most else line[: most - 1] + "…"


def written(value: object, most: int = 60) -> str | None:
    """A default of JSON as Python. None: it is too long to show."""
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
    return text if len(text) <= most and text.isprintable() else None


_BOUNDS = (
    ("minimum", ">= {}"),
    ("exclusiveMinimum", "> {}"),
    ("maximum", "<= {}"),
    ("exclusiveMaximum", "< {}"),
    ("multipleOf", "a multiple of {}"),
    ("minLength", "at least {} characters"),
    ("maxLength", "at most {} characters"),
    ("pattern", "matches {}"),
    ("minItems", "at least {} items"),
    ("maxItems", "at most {} items"),
)
_TOLD_FORMATS = {"duration": "an ISO 8601 duration", "time": "an ISO 8601 time", "uuid": "a UUID", "uri": "a URI"}


def described(schema: Mapping[str, Any]) -> str:
    """The description of a parameter, with its bounds."""
    choices = [each for each in schema.get("anyOf") or () if isinstance(each, dict)]
    bounds = []
    for part in choices[:1] if schema.get(MARK) == "decimal" else [schema, *choices]:
        if "prefixItems" in part:
            continue
        bounds += [
            "not empty" if key in {"minLength", "minItems"} and part[key] == 1 else text.format(part[key])
            for key, text in _BOUNDS
            if isinstance(part.get(key), int | float | str)
        ]
        kind = part.get("format")
        bounds += [_TOLD_FORMATS[kind]] if isinstance(kind, str) and kind in _TOLD_FORMATS else []
    text = one_line(schema.get("description"))
    told = one_line(", ".join(dict.fromkeys(bounds)), 120)
    return " ".join(filter(None, [text, f"({told})" if told else ""]))
