"""What requests and answers have in common: JSON bodies, JSON answers, lists in pages, and deletions.

Owns the rule that a JSON body has exactly the declared types (`JsonBody`), how models become JSON (`answer`), and
cursors: `?limit=…&after=CURSOR` continues after the last item of the page before, whatever came or went since. Not
here: event streams (`event_stream.py`) and errors (`errors.py`).
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import core_schema, to_json
from starlette.responses import Response

from atoll.contract.errors import InvalidRequest
from atoll.contract.frozen import Frozen

T = TypeVar("T")
MAX_PAGE = 1000

Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="How many items a page has at most.")]
After = Annotated[str | None, Query(max_length=1024, description="`next` of the page before. Unset: the first page.")]


class Page(BaseModel, Generic[T]):
    """A part of a list."""

    model_config = ConfigDict(frozen=True)

    @classmethod
    def model_parametrized_name(cls, params: tuple[type[Any], ...]) -> str:
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
            return source.model_validate_json(json.dumps(value), strict=True)

        return core_schema.no_info_wrap_validator_function(validate, handler(source))


class RequestBody(BaseModel):
    """The base of JSON bodies: unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True)


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
    start = None if after is None else read_cursor(after)
    chosen = sorted((each for each in items if start is None or key(each) > start), key=key)[: limit + 1]
    more = len(chosen) > limit
    return page(chosen[:limit], cursor(key(chosen[limit - 1])) if more else None)


def page(items: Iterable[object], next: str | None) -> Response:
    """A page that was chosen elsewhere, such as by the database."""
    return answer({"items": [*items], "next": next})


def cursor(key: str) -> str:
    return base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")


def read_cursor(text: str) -> str:
    """
    Raises:
        InvalidRequest: no page had this as `next`.
    """
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise InvalidRequest("after: it is not the `next` of a page; leave it out for the first page") from None


def read_number(text: str) -> int:
    """The number that a cursor was made of.

    Raises:
        InvalidRequest: no page had this as `next`.
    """
    number = read_cursor(text)
    if not number.isascii() or not number.isdecimal() or len(number) > 18:
        raise InvalidRequest("after: it is not the `next` of a page; leave it out for the first page")
    return int(number)
