"""Errors of the REST API: the one function that makes exceptions answers, and the shape that all of them have.

Owns the body `{"code", "message", "details", "request_id"}`, the status of each code, the request id, and how errors
are declared in the OpenAPI document. An answer never has a `hint`, a value that the caller sent in secret, or a name
that the caller did not send: `known` lists stay here. Not here: who may do what (`caller.py`).

`install` is called by whatever composes the app (`surfaces/serve/`); `error_answer` is for what refuses a request
before any route is chosen.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError, WebSocketRequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_jsonable_python
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketState

from atoll.contract.errors import (
    AtollError,
    CheckpointNotFound,
    InvalidRequest,
    ModelFailed,
    SandboxNotFound,
    TemplateNotFound,
    VolumeNotFound,
    told_elsewhere,
)
from atoll.surfaces.door import status_of
from atoll.tools.tool import readable, readable_all

REQUEST_ID_HEADER = "Atoll-Request-Id"
STATUS_BY_CODE: Mapping[str, int] = {
    "unauthenticated": 401,
    "forbidden": 403,
    "quota_exceeded": 403,
    "rate_limited": 429,
    "idempotency_mismatch": 422,
    "outcome_unknown": 409,
    "conflict": 409,
    "sandbox_shutdown": 409,
    "not_checkpointable": 409,
    "image_unavailable": 422,
    "archive_refused": 422,
    "build_failed": 422,
    "bundle_failed": 422,
    "runtime_unavailable": 422,
    "unenforceable": 422,
    "port_refused": 409,
    "too_many_processes": 409,
    "code_session_busy": 409,
    "budget_exceeded": 403,
    "model_failed": 502,
    "script_failed": 502,
    "sandbox_died": 502,
    "guest_protocol_error": 502,
    "guest_unresponsive": 504,
}
"""Where HTTP has a better status than `status_of` would give."""
CODE_BY_STATUS: Mapping[int, str] = {
    400: "invalid_request",
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    406: "not_acceptable",
    408: "request_timeout",
    413: "too_large",
    415: "unsupported_media_type",
    416: "range_not_satisfiable",
    421: "misdirected_request",
    426: "upgrade_required",
    429: "rate_limited",
    431: "headers_too_large",
    503: "unavailable",
}
"""Of errors that are HTTP's own, not Atoll's."""
_NOT_FOUND: Mapping[type[AtollError], str] = {
    SandboxNotFound: "no sandbox has the name or id {name!r}",
    CheckpointNotFound: "no checkpoint has the id or label {wanted!r}",
    TemplateNotFound: "no template is named {template!r}",
    VolumeNotFound: "no volume is named {name!r}",
}
"""Messages without the names that there are."""
_TOLD_ERRORS = 3
"""How many of the errors of an invalid request its message names; `details.errors` has them all."""
_HIDDEN_DETAILS = frozenset({"known", "labels", "available"})
_log = logging.getLogger(__name__)


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    model_config = ConfigDict(frozen=True, title="Error")

    code: str = Field(examples=["sandbox_not_found"])
    """Stable: programs may switch on it."""
    message: str = Field(examples=["no sandbox has the name or id 'demo'"])
    details: dict[str, Any] = Field(examples=[{"name": "demo"}])
    request_id: str = Field(examples=["req_0c8b4dd0f4a74b66"])
    """The same as in the header Atoll-Request-Id and in the server's log."""


# ---------------------------------------------------------------------------------------------------------- request id


def request_id(scope: MutableMapping[str, Any]) -> str:
    """The id of a request, made when it is first asked for."""
    state = scope.setdefault("state", {})
    found: str | None = state.get("request_id")
    if found is None:
        found = state["request_id"] = f"req_{secrets.token_hex(8)}"
    return found


class RequestIds:
    """Middleware: every answer has the request's id in the header Atoll-Request-Id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        header = (REQUEST_ID_HEADER.lower().encode(), request_id(scope).encode())

        async def with_id(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                headers = message.setdefault("headers", [])
                message["headers"] = [*(each for each in headers if each[0].lower() != header[0]), header]
            await send(message)

        await self._app(scope, receive, with_id)


# ------------------------------------------------------------------------------------------------------------- answers


def error_answer(
    status: int,
    message: str,
    request_id: str,
    *,
    code: str | None = None,
    details: Mapping[str, object] | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """An error in the one shape. `code` is that of the status if it is left out."""
    body = {
        "code": code or CODE_BY_STATUS.get(status, "error"),
        "message": readable(message),  # a path in it may be no UTF-8
        "details": to_jsonable_python(readable_all(dict(details or {})), fallback=str),
        "request_id": request_id,
    }
    return JSONResponse(body, status, headers=headers)


def answer_to(error: Exception, request_id: str) -> JSONResponse:
    """The answer to a request that ended with this exception."""
    if isinstance(error, AtollError):
        return _answer_to_ours(error, request_id)
    if isinstance(error, RequestValidationError | WebSocketRequestValidationError):
        return _answer_to_invalid(error, request_id)
    if isinstance(error, HTTPException):
        message = _HTTP_MESSAGES.get(error.status_code, str(error.detail))
        return error_answer(error.status_code, message, request_id, headers=error.headers)
    return error_answer(
        500,
        "the request failed here; the server's log has the reason, with the request id",
        request_id,
        code="internal",
    )


_HTTP_MESSAGES = {
    404: "there is nothing at this path; the paths are in /openapi.json, and as a page in /docs",
    405: "this path does not have this method; the header Allow names those that it has",
}


def error_status(error: Exception) -> int:
    """The HTTP status of the answer to an exception."""
    if isinstance(error, AtollError):
        return STATUS_BY_CODE.get(error.code) or status_of(error)
    if isinstance(error, RequestValidationError | WebSocketRequestValidationError):
        return 400
    return error.status_code if isinstance(error, HTTPException) else 500


def _answer_to_ours(error: AtollError, request_id: str) -> JSONResponse:
    details = {name: value for name, value in error.details.items() if name not in _HIDDEN_DETAILS}
    template = next((text for kind, text in _NOT_FOUND.items() if isinstance(error, kind)), None)
    message = told_elsewhere(error) if template is None else template.format(**details)
    status = error_status(error)
    headers = {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    retry_after_s = details.get("retry_after_s")
    if isinstance(retry_after_s, int | float):
        headers["Retry-After"] = str(max(1, -int(-retry_after_s // 1)))
    if status >= 500:
        # Of what a model or its provider did, our stack says nothing; the reason is in the line before.
        trace = None if isinstance(error, ModelFailed) else error
        _log.error("request %s failed: %s: %s", request_id, error.code, error.message, exc_info=trace)
    return error_answer(status, message, request_id, code=error.code, details=details, headers=headers)


def _answer_to_invalid(
    error: RequestValidationError | WebSocketRequestValidationError, request_id: str
) -> JSONResponse:
    """Without the values: one of them may be a secret."""
    found = [
        {"where": _where(each["loc"]), "message": _plain(each), "type": each["type"]} for each in error.errors()[:32]
    ]
    told = [": ".join(filter(None, (".".join(each["where"]), each["message"]))) for each in found[:_TOLD_ERRORS]]
    message = "; ".join(told) or "the request is not valid"
    return error_answer(400, message, request_id, code=InvalidRequest.code, details={"errors": found})


def _where(loc: Sequence[str | int]) -> list[str]:
    """Without the names that pydantic gives to the members of a union: those of functions have addresses of memory."""
    return [str(part) for part in loc if not (isinstance(part, str) and ("[" in part or part in _MEMBERS))]


_MEMBERS = frozenset({"constrained-str", "ToolDeclaration", "SecretInput", "secret-str"})
_SHOULD = re.compile("^(Input|String|List|Tuple|Dictionary|Set) should")
WORDS_FOR_PATTERNS: Mapping[str, str] = {
    r"^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$": "it is not the id of a conversation, such as "
    "01a1ed9d-c3b5-7d27-9f97-1c333b66f9c5; GET /api/v1/conversations?config_id=… lists them",
    "^[0-9a-f-]+$": "it is not the `next` of a page",
    r"^[0-9]{1,18}$": "it is not a number that an answer gave, such as the `next` of a page",
    r"^[A-Za-z0-9_-]{1,64}$": "the name of a tool has 1 to 64 letters, digits, '_' and '-'",
    r"^[A-Za-z_][A-Za-z0-9_]{0,63}$": "a name has 1 to 64 letters, digits and '_', and does not begin with a digit",
    r"^[^\x00-\x1f\x7f]{1,100}$": "a name has 1 to 100 characters, all of one line",
    r"^[a-z][a-z-]{0,31}$": "the name of a provider has lower-case letters and '-', such as anthropic",
    r"^[^\x00-\x20\x7f]+$": "the name of a model has no spaces",
    r"^[!-~]+$": "only visible characters of ASCII are allowed",
    r"^[0-9a-f]{64}$": "it is not a SHA-256: 64 hexadecimal digits, in lower case, as `sha256sum` prints it",
    r'^(\*|(W/)?"?[0-9]{1,9}"?)$': 'it is not a version, such as "3", or *',
    r"^[a-z0-9][a-z0-9-]{0,31}$": "a name has 1 to 32 lower-case letters, digits and '-', and does not begin with '-'",
    "^0?[0-7]{1,4}$": "permission bits are octal digits, such as 0644",
    r"^/[^\x00]*$": "it has to be an absolute path, such as /workspace",
    r"^[a-z][a-z0-9_-]{0,31}$": "the name of a runtime has 1 to 32 lower-case letters, digits, '_' and '-'",
    r"^[0-9]{1,16}-[0-9]{1,16}$": "it is not the id of an event, such as 70000-0",
}
"""What is said of a value that a field's regular expression refuses, which few people want to read."""


def words_for(pattern: str) -> str | None:
    """What is said of a value that this regular expression refuses."""
    if pattern.startswith("^https?://"):
        return "it is not a URL of a host, such as https://example.com/hook"
    return WORDS_FOR_PATTERNS.get(pattern)


def _plain(error: Mapping[str, Any]) -> str:
    """What is wrong with one value, for people who do not know pydantic."""
    match error["type"]:
        case "extra_forbidden":
            return "there is no such field; /docs has those that there are"
        case "missing":
            return "it is required"
        case "model_type" | "model_attributes_type" | "dict_type" | "dataclass_type":
            return "it has to be a JSON object"
        case "json_invalid":
            return f"it is not valid JSON: {error.get('ctx', {}).get('error', 'it ends too early')}"
        case "string_pattern_mismatch" if words := words_for(error["ctx"]["pattern"]):
            return words
    return _SHOULD.sub("it should", str(error["msg"]).removeprefix("Value error, ")).replace(" after validation", "")


# ------------------------------------------------------------------------------------------------------------- install


def install(app: FastAPI, *, check_key: Callable[[HTTPConnection], Any] | None = None) -> None:
    """Make every exception of the app an answer in the one shape, with a request id.

    `check_key` is awaited before it is said that a path below /api does not exist, and raises if the key is wrong.
    """

    async def handle(connection: Request, error: Exception) -> Response | None:
        if (
            check_key is not None
            and isinstance(error, HTTPException)
            and error.status_code in (404, 405)
            and connection.scope["path"].startswith("/api/")
        ):
            try:
                await check_key(connection)
            except AtollError as refused:
                error = refused
        if isinstance(error, HTTPException) and error.status_code == 405:
            error.headers = {"Allow": ", ".join(_methods(app, connection.scope))}
        return await _send(connection, answer_to(error, request_id(connection.scope)))

    for kind in (AtollError, RequestValidationError, WebSocketRequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)  # type: ignore[arg-type] # of both kinds of connections
    app.router.default = _not_found
    app.add_middleware(RequestIds)


async def _not_found(_scope: Scope, _receive: Receive, _send: Send) -> None:
    """No route has this path. Starlette's own would close a WebSocket without a word."""
    raise HTTPException(404)


def _methods(app: FastAPI, scope: Scope) -> list[str]:
    """The methods of a path. A route knows its own only, so the document is asked: `/sandboxes/import` is a path of its
    own there, and not that of a sandbox."""
    path = scope["path"]
    matching = [
        template
        for template in app.openapi()["paths"]
        if re.fullmatch(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(template)), path)
    ]
    if matching:
        own = min(matching, key=lambda each: each.count("{"))
        return sorted(method.upper() for method in app.openapi()["paths"][own])
    return [
        method
        for method in ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in app.router.routes)
    ]


async def _send(connection: HTTPConnection, answer: JSONResponse) -> Response | None:
    if not isinstance(connection, WebSocket):
        return answer
    if (
        connection.client_state is WebSocketState.CONNECTING
        and connection.application_state is WebSocketState.CONNECTING
    ):
        if "websocket.http.response" in connection.scope.get("extensions", {}):
            await connection.send_denial_response(answer)
        else:
            await connection.close(1008)
    elif connection.application_state is WebSocketState.CONNECTED:
        await connection.close(1011 if answer.status_code >= 500 else 1008, reason="the server's log has the reason")
    return None


# ------------------------------------------------------------------------------------------------- the OpenAPI document

_MEANINGS: Mapping[int, str] = {
    400: "The request is not valid.",
    401: "There is no valid key.",
    403: "The key, the tenant's policy or a quota does not allow it.",
    404: "There is none of this name or id, or no tenant of the name in Atoll-Tenant.",
    405: "The path does not have this method.",
    409: "The state of the resource does not allow it.",
    413: "The body is too large.",
    415: "The body is not of a type that is accepted.",
    416: "The range is not within the file.",
    422: "It is valid, but cannot be done: the image, the runtime or the limits are not available here.",
    429: "There were too many requests; Retry-After says when to try again.",
    500: "The sandbox or the server failed.",
    503: "The server stops, or its database or the model is not available; try again.",
    502: "The sandbox ended while the request was carried out, or the model failed.",
    504: "The sandbox, or what runs in it, did not answer in time.",
    507: "The disk, or the quota of the sandbox, is full.",
}


def failures(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that can fail with these, and with what every route can. `openapi.py` has the schema:
    with a model, FastAPI would make a validator for each of them, a thousand in all."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorBody.__name__}"}}}
    return {
        status: {"description": _MEANINGS[status], "content": content}
        for status in sorted({400, 401, 403, 404, 429, 500, 503, *statuses})
    }
