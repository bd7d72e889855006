"""Models whose JSON schema describes each field with the string below it.

pydantic can do so itself (`use_attribute_docstrings`), but reads the source of every class when the class is made, and
walks the stack for it: a fifth of the time in which the server starts. Here the source is read when a schema is asked
for. Used by the inputs and results of tools, and by the bodies of REST requests.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from inspect import cleandoc
from pathlib import Path

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


class Documented(BaseModel):
    """The base of such models. A description that a field is given (`Field(description=…)`) comes first."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler, /) -> JsonSchemaValue:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        texts = _texts_of(cls)
        for name, field in cls.model_fields.items():
            shown = properties.get(field.serialization_alias or field.alias or name) or properties.get(name)
            if shown is not None and field.description is None and name in texts:
                shown["description"] = texts[name]
        return schema


def _texts_of(cls: type[BaseModel]) -> dict[str, str]:
    """By field: the string below the annotation that it has in this class, or in the nearest class that has one."""
    texts: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if (
            issubclass(owner, Documented)
            and (module := sys.modules.get(owner.__module__)) is not None
            and module.__file__
        ):
            found = _texts_in(module.__file__).get(owner.__qualname__.partition("[")[0], {})
            texts |= {name: text for name, text in found.items() if text is not None}
            for name in [name for name, text in found.items() if text is None]:
                texts.pop(name, None)
    return texts


@cache
def _texts_in(path: str) -> Mapping[str, Mapping[str, str | None]]:
    """Of the classes of a module, by their qualified names: their fields, each with its string or None. None of a
    module whose source is not installed."""
    try:
        source = Path(path).read_text(encoding="utf-8")
    except OSError:
        return {}
    return dict(_classes(ast.parse(source).body, ""))


def _classes(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, dict[str, str | None]]]:
    for stmt in body:
        if not isinstance(stmt, ast.ClassDef):
            continue
        fields: dict[str, str | None] = {}
        last: str | None = None
        for each in stmt.body:
            match each:
                case ast.AnnAssign(target=ast.Name(id=name)):
                    fields[name], last = None, name
                case ast.Expr(value=ast.Constant(value=str(text))) if last is not None:
                    fields[last], last = cleandoc(text), None
                case _:
                    last = None
        yield f"{prefix}{stmt.name}", fields
        yield from _classes(stmt.body, f"{prefix}{stmt.name}.")
