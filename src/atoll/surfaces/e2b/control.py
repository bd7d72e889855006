"""Routes of E2B's control plane: what each passes before it is carried out, and what an error looks like.

Owns the order of checks (key, tenant, rate, scope, body), the entry in the audit log, and the shape of errors: `code`
(the HTTP status), `message`, `error_code` (Atoll's). Not here: who a caller is (`surfaces/rest/caller.py`), and what is
safe to say of an error (`surfaces/rest/errors.py`): an answer says no more than REST does.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from atoll.contract.errors import AtollError
from atoll.server.keys import KeyScope
from atoll.surfaces.rest.caller import Caller, identify
from atoll.surfaces.rest.errors import answer_to, request_id

ControlHandler = Callable[[Request, Caller], Awaitable[Response]]
Body = TypeVar("Body", bound="E2bBody")
_CONFLICTS = frozenset({"idempotency_mismatch", "outcome_unknown"})
_MISSING = frozenset({"checkpoint_not_found", "image_unavailable", "template_not_found"})
_SAFE_METHODS = frozenset({"GET", "HEAD"})


class E2bBody(BaseModel):
    """The base of JSON bodies, whose fields are written in camelCase. A field that is not known is refused if it asks
    for something."""

    model_config = ConfigDict(frozen=True, extra="allow", hide_input_in_errors=True, alias_generator=to_camel)


def route(path: str, method: str, action: str, scope: KeyScope, handler: ControlHandler) -> Route:
    """A route. `action` is its name in the audit log."""

    async def endpoint(request: Request) -> Response:
        try:
            caller = await identify(request)
        except (AtollError, HTTPException) as error:
            return error_response(error, request)
        status = 500
        try:
            caller.key.require(scope)
            response = await handler(request, caller)
            status = response.status_code
        except (AtollError, HTTPException, RequestValidationError) as error:
            response = error_response(error, request)
            status = response.status_code
        finally:
            if method not in _SAFE_METHODS:
                await caller.record(request, f"e2b_{action}", status)
        return response

    return Route(path, endpoint, methods=[method], name=action)


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The JSON body of a request. None at all is one without fields.

    Raises:
        RequestValidationError: it is not JSON, or a field has a wrong value.
        HTTPException: it asks for something that is not known here.
    """
    try:
        body = kind.model_validate_json(await request.body() or b"{}", strict=True)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False, include_input=False)) from None
    require_known(body)
    return body


def require_known(body: E2bBody) -> None:
    """
    Raises:
        HTTPException: the body, or a part of it, asks for something that is not known here.
    """
    for name, value in (body.model_extra or {}).items():
        if value not in (None, {}, [], False):
            raise HTTPException(501, f"the field {name[:64]!r} is not supported by this server")
    for part in vars(body).values():
        _require_known_in(part)


def _require_known_in(part: object) -> None:
    if isinstance(part, E2bBody):
        require_known(part)
    elif isinstance(part, dict | list):
        for each in part.values() if isinstance(part, dict) else part:
            _require_known_in(each)


def error_body(error: Exception, request_id: str) -> tuple[int, dict[str, Any], dict[str, str]]:
    """The status, the body and the headers for an exception."""
    answer = answer_to(error, request_id)
    said = json.loads(bytes(answer.body))
    status = answer.status_code
    if said["code"] in _CONFLICTS:
        status = 409
    elif said["code"] in _MISSING:
        status = 404
    headers = {name: value for name, value in answer.headers.items() if name in ("retry-after", "www-authenticate")}
    return status, {"code": status, "message": said["message"], "error_code": said["code"]}, headers


def error_response(error: Exception, request: Request) -> JSONResponse:
    """The answer to a request that ended with this exception."""
    status, body, headers = error_body(error, request_id(request.scope))
    return JSONResponse(body, status, headers)


def not_supported(what: str) -> ControlHandler:
    """A handler that says so."""

    async def refuse(_request: Request, _caller: Caller) -> Response:
        raise HTTPException(501, f"{what} not supported by this server")

    return refuse
