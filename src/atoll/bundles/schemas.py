"""What a model is told about the tools of a bundle: read from sources, of which nothing is executed.

Owns how a function's signature and docstring become a description and a JSON schema. Sources are parsed, never
imported: what cannot be known that way is left open, and the tool says itself what it takes. Not here: how the
arguments of a call reach the function, which has to fit what is promised here (`inside.py`). Used by `archive.py`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from atoll.bundles.manifest import ManifestTool
from atoll.code.functions import DocTexts, read_docstring
from atoll.tools.tool import StrictModel, readable_all

MAX_SOURCE_BYTES = 256 * 1024
"""The largest module that is parsed. The tools of a larger one take any arguments, as far as a model is told."""
MAX_SOURCES_BYTES = 512 * 1024
"""Of all modules of a bundle that are parsed. No thread of the process runs meanwhile: 256 KiB of dense source take up
to half a second."""
_MAX_DOCSTRING_CHARS = 16 * 1024
_MAX_DESCRIPTION_CHARS = 4096
_MAX_NESTING = 6
"""Of types in types. What is deeper may be anything."""
_OPEN: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": True}
_PLAIN: dict[str, dict[str, Any]] = {
    "str": {"type": "string"},
    "bytes": {"type": "string"},
    "Path": {"type": "string"},
    "UUID": {"type": "string", "format": "uuid"},
    "Decimal": {"type": "string"},
    "date": {"type": "string", "format": "date"},
    "datetime": {"type": "string", "format": "date-time"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "None": {"type": "null"},
}
_ARRAYS = frozenset(
    "list List tuple Tuple set Set frozenset FrozenSet Sequence MutableSequence Iterable Collection".split()
)
_MAPPINGS = frozenset("dict Dict Mapping MutableMapping".split())
_WRAPPERS = frozenset("Annotated Required NotRequired ReadOnly Final".split())
_UNIONS = frozenset("Optional Union Literal".split())


class ToolSchema(StrictModel):
    """A tool as a model sees it."""

    name: str
    description: str
    input_schema: dict[str, Any]
    """A JSON schema of the type `object`."""


def parse(source: str) -> ast.Module:
    """A module for `describe`, without anything in it if the source cannot be parsed."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])


def describe(tool: ManifestTool, module: ast.Module) -> ToolSchema:
    """What a model is told about a tool of this module: what the manifest says, else what the function does. Does not
    raise."""
    found, texts, schema = None, DocTexts(), None
    try:
        found = _function(module, tool.function)
        if found is not None:
            texts = read_docstring(inspect.cleandoc(ast.get_docstring(found) or "")[:_MAX_DOCSTRING_CHARS])
            schema = _SourceTypes(module).arguments(found, texts)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    first = " ".join(texts.description.strip().partition("\n\n")[0].split())
    described = tool.description or first or tool.name.replace("_", " ").replace("-", " ")
    return ToolSchema(
        name=tool.name,
        description=readable_all(described[:_MAX_DESCRIPTION_CHARS]),
        input_schema=readable_all(tool.input_schema or schema or _OPEN),
    )


def _function(module: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    functions = (each for each in module.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    return next((each for each in functions if each.name == name), None)


class _SourceTypes:
    """Types as a module writes them, as JSON schemas."""

    def __init__(self, module: ast.Module) -> None:
        self._classes = {each.name: each for each in module.body if isinstance(each, ast.ClassDef)}
        self._depth = 0

    def arguments(self, function: ast.FunctionDef | ast.AsyncFunctionDef, texts: DocTexts) -> dict[str, Any] | None:
        """The schema of what a function takes. None: nothing is known."""
        given = function.args
        parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs]
        if given.vararg is None and given.kwarg is None and len(parameters) == 1:
            annotation = _unwrapped(parameters[0].annotation)
            if _takes_all(annotation):
                return self._one_dict(annotation, parameters[0].arg, texts)
        defaults = _defaults(given)
        properties, required = {}, []
        for each in parameters:
            properties[each.arg] = self._type(each.annotation) | _described(texts.parameters.get(each.arg))
            if each.arg not in defaults:
                required.append(each.arg)
            elif (value := _constant(defaults[each.arg])) is not ...:
                properties[each.arg].setdefault("default", value)
        return _object(properties, required, open=given.kwarg is not None)

    def _one_dict(self, annotation: ast.expr | None, parameter: str, texts: DocTexts) -> dict[str, Any] | None:
        name = _name(annotation)
        if name in self._classes:
            found = self._class(self._classes[name])
            return found if found.get("type") == "object" else None
        documented = {name: text for name, text in texts.parameters.items() if name != parameter}
        if not documented:
            return None
        properties = {}
        for name, text in documented.items():
            properties[name] = self._written_type(texts.types.get(name, "")) | _described(text)
        return _object(properties, [], open=True)

    def _written_type(self, text: str) -> dict[str, Any]:
        """A type that a docstring names."""
        try:
            return self._type(ast.parse(text.strip(), mode="eval").body) if text else {}
        except (SyntaxError, ValueError):
            return {}

    def _type(self, node: ast.expr | None) -> dict[str, Any]:
        if node is None or self._depth >= _MAX_NESTING:
            return {}
        self._depth += 1
        try:
            return self._schema(node)
        finally:
            self._depth -= 1

    def _schema(self, node: ast.expr) -> dict[str, Any]:
        match node:
            case ast.Constant(value=None):
                return dict(_PLAIN["None"])
            case ast.Constant(value=str(text)):
                return self._written_type(text)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return _union([self._type(left), self._type(right)])
            case ast.Subscript():
                return self._subscript(_name(node.value) or "", node.slice)
        name = _name(node) or ""
        if name in self._classes:
            return self._class(self._classes[name])
        if name in _ARRAYS:
            return {"type": "array"}
        return {"type": "object"} if name in _MAPPINGS else dict(_PLAIN.get(name, {}))

    def _subscript(self, name: str, inner: ast.expr) -> dict[str, Any]:
        items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if not items:
            return {}
        if name in _WRAPPERS:
            return self._type(items[0]) | _described(next(_texts(items[1:]), None))
        if name == "Optional":
            return _union([self._type(items[0]), dict(_PLAIN["None"])])
        if name == "Union":
            return _union([self._type(each) for each in items])
        if name == "Literal":
            values = [value for each in items if (value := _constant(each)) is not ...]
            return {"enum": values} if len(values) == len(items) else {}
        if name in _ARRAYS:
            first = (
                {}
                if name.lower() == "tuple" and len(items) > 1 and not _is_ellipsis(items[1])
                else self._type(items[0])
            )
            return {"type": "array", "items": first} if first else {"type": "array"}
        if name in _MAPPINGS:
            value = self._type(items[-1])
            return {"type": "object", "additionalProperties": value} if value else {"type": "object"}
        return {}

    def _class(self, node: ast.ClassDef) -> dict[str, Any]:
        """A TypedDict, a dataclass, a model of pydantic, or an enum."""
        bases = [_name(base) or "" for base in node.bases]
        if any(base.endswith("Enum") for base in bases):
            values = [each.value for each in node.body if isinstance(each, ast.Assign)]
            known = [value for each in values if (value := _constant(each)) is not ...]
            return {"enum": known} if known and len(known) == len(values) else {}
        if self._depth >= _MAX_NESTING:
            return {"type": "object"}
        self._depth += 1
        try:
            properties, required = self._fields(node, set())
        finally:
            self._depth -= 1
        return _object(properties, required)

    def _fields(self, node: ast.ClassDef, seen: set[str]) -> tuple[dict[str, Any], list[str]]:
        properties: dict[str, Any] = {}
        required: list[str] = []
        seen.add(node.name)
        for base in node.bases:
            above = self._classes.get(_name(base) or "")
            if above is not None and above.name not in seen:
                inherited, needed = self._fields(above, seen)
                properties |= inherited
                required += needed
        optional = any(
            each.arg == "total" and isinstance(each.value, ast.Constant) and each.value.value is False
            for each in node.keywords
        )
        texts = read_docstring(inspect.cleandoc(ast.get_docstring(node) or "")[:_MAX_DOCSTRING_CHARS]).parameters
        for at, each in enumerate(node.body):
            if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
                continue
            name = each.target.id
            if name.startswith("_") or _name(_head(each.annotation)) == "ClassVar":
                continue
            text = _docstring_after(node.body, at) or texts.get(name)
            marked = _name(_head(each.annotation))
            properties[name] = self._type(each.annotation) | _described(text)
            is_needed, more = _default(each.value)
            properties[name] = more | properties[name]
            if marked == "Required" or (is_needed and not optional and marked != "NotRequired"):
                required.append(name)
        return properties, list(dict.fromkeys(required))


def _object(properties: Mapping[str, Any], required: list[str], *, open: bool = False) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": dict(properties)}
    if required:
        schema["required"] = required
    if open:
        schema["additionalProperties"] = True
    return schema


def _described(text: str | None) -> dict[str, Any]:
    return {"description": " ".join(text.split())[:_MAX_DESCRIPTION_CHARS]} if text and text.strip() else {}


def _union(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    if not all(schemas):
        return {}
    flat = [one for each in schemas for one in each.get("anyOf", [each])]
    different = [each for at, each in enumerate(flat) if each not in flat[:at]]
    return different[0] if len(different) == 1 else {"anyOf": different}


def _takes_all(annotation: ast.expr | None) -> bool:
    """Whether one parameter of this type is all arguments, rather than the one that has its name. The same decision as
    in `inside.py`, which sees the type itself."""
    if isinstance(annotation, ast.BinOp | ast.Constant):
        return False
    name = _name(_head(annotation))
    return name is None or name not in _PLAIN.keys() | _ARRAYS | _UNIONS


def _unwrapped(annotation: ast.expr | None) -> ast.expr | None:
    """An annotation that is written as a string, parsed; and what `Annotated` is around."""
    for _ in range(_MAX_NESTING):
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value.strip(), mode="eval").body
        elif isinstance(annotation, ast.Subscript) and _name(annotation.value) == "Annotated":
            annotation = annotation.slice.elts[0] if isinstance(annotation.slice, ast.Tuple) else annotation.slice
        else:
            break
    return annotation


def _head(annotation: ast.expr | None) -> ast.expr | None:
    return annotation.value if isinstance(annotation, ast.Subscript) else annotation


def _name(node: ast.expr | None) -> str | None:
    """`X` of `X` and of `typing.X`."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _constant(node: ast.expr) -> Any:
    """A value that JSON has, or `...`."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ...
    return value if isinstance(value, str | int | float | bool | None) else ...


def _texts(nodes: list[ast.expr]) -> Iterator[str]:
    """Descriptions in the metadata of `Annotated`: a string, or `Field(description=…)`."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Call):
            for each in node.keywords:
                if each.arg == "description" and isinstance(value := _constant(each.value), str):
                    yield value


def _defaults(given: ast.arguments) -> dict[str, ast.expr]:
    positional = [*given.posonlyargs, *given.args]
    found = dict(
        zip((each.arg for each in positional[len(positional) - len(given.defaults) :]), given.defaults, strict=True)
    )
    keywords = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    return found | {each.arg: default for each, default in keywords if default is not None}


def _default(value: ast.expr | None) -> tuple[bool, dict[str, Any]]:
    """Whether a field with this default must be given, and what else the default says: `Field(…)`, `field(…)`."""
    if value is None:
        return True, {}
    if isinstance(value, ast.Call) and (_name(value.func) or "").lower() == "field":
        described = _described(next(_texts([value]), None))
        given = [
            *value.args[:1],
            *(each.value for each in value.keywords if each.arg in {"default", "default_factory"}),
        ]
        return not given or _is_ellipsis(given[0]), described
    found = _constant(value)
    return False, {} if found is ... else {"default": found}


def _docstring_after(body: list[ast.stmt], at: int) -> str | None:
    following = body[at + 1] if at + 1 < len(body) else None
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        return following.value.value if isinstance(following.value.value, str) else None
    return None
