"""What requests and answers have in common: JSON bodies, JSON answers, lists in pages, and deletions.

Owns the rule that a JSON body has exactly the declared types (`JsonBody`), how models become JSON (`answer`), and
cursors: `?limit=…&after=CURSOR` continues after the last item of the page before, whatever came or went since, because
a cursor is what the items are sorted by. Not
here: event streams (`event_stream.py`) and errors (`errors.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict
from pydantic_core import core_schema, to_json
from starlette.responses import Response

from atoll.contract.documented import Documented
from atoll.contract.frozen import Frozen

T = TypeVar("T")
MAX_PAGE = 1000
MAX_INTEGER = 2**53 - 1
"""Of numbers of bytes and offsets: beyond it, JavaScript and others read another number than was written."""

Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="How many items a page has at most.")]
_AFTER = "`next` of the page before. Unset: the first page."
After = Annotated[str | None, Query(max_length=8192, description=_AFTER)]
AfterNumber = Annotated[str | None, Query(pattern=r"^[0-9]{1,18}$", description=_AFTER)]


# Rules that `contract/` checks, with messages of its own, and that the OpenAPI document says too.
NameField = Annotated[str, Field(json_schema_extra={"pattern": r"^[a-z0-9][a-z0-9_.-]{0,62}$"})]
TextField = Annotated[str, Field(json_schema_extra={"pattern": r"^[^\x00]*$"})]
NonemptyField = Annotated[TextField, Field(min_length=1)]
LabelValueField = Annotated[
    str, Field(json_schema_extra={"pattern": r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$"})
]
LABEL_KEYS: JsonDict = {
    "propertyNames": {
        "pattern": r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"
    }
}
VARIABLE_KEYS: JsonDict = {"propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"}}


class Page(BaseModel, Generic[T]):
    """A part of a list."""

    model_config = ConfigDict(frozen=True)

    @classmethod
    def model_parametrized_name(cls, params: tuple[Any, ...]) -> str:
        return f"{params[0].__name__}Page"

    items: list[T]
    next: str | None = Field(description="The cursor of the next page, for `after`. Null: this is the last one.")


class JsonBody:
    """In `Annotated`: the body is parsed as JSON with exactly the declared types. `"5"` is no number."""

    def __get_pydantic_core_schema__(self, source: type[BaseModel], handler: Any) -> Any:
        def validate(value: Any, _inner: Any) -> Any:
            if isinstance(value, source):
                return value
            if isinstance(value, bytes):  # of another content type
                raise ValueError("the body has to be JSON, with the header Content-Type: application/json")  # noqa: TRY004 - becomes an error of validation
            try:
                text = json.dumps(_integral(value))
            except RecursionError:
                raise ValueError("the body is nested too deeply") from None
            return source.model_validate_json(text, strict=True)

        return core_schema.no_info_wrap_validator_function(validate, handler(source))


def _integral(value: Any) -> Any:
    """With 5.0 as 5: to JSON they are the same."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_integral(each) for each in value]
    if isinstance(value, dict):
        return {name: _integral(each) for name, each in value.items()}
    return value


class RequestBody(Documented):
    """The base of JSON bodies: unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


def answer(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer: a model, or a dict or list of them."""
    return Response(to_json(plain(value)), status, headers, media_type="application/json")


def plain(value: object) -> object:
    """Without models of ours, which pydantic would have to be asked about."""
    if isinstance(value, Frozen):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def page_answer(items: Iterable[T], key: Callable[[T], str], limit: int, after: str | None) -> Response:
    """The page of `items` that begins after the cursor. `key` sorts them, and no two have the same."""
    chosen = sorted((each for each in items if after is None or key(each) > after), key=key)[: limit + 1]
    return page(chosen[:limit], key(chosen[limit - 1]) if len(chosen) > limit else None)


def page(items: Iterable[object], next: str | None) -> Response:
    """A page that was chosen elsewhere, such as by the database."""
    return answer({"items": [*items], "next": next})
