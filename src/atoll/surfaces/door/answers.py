"""Errors as HTTP answers: the HTTP status of an error, the one shape of its body, and request ids.

Owns `status_of`, the shape that all errors of the server have, and how an error is written where no app answers. Used
by the door below the apps (`connection.py`), by its middleware (`middleware.py`) and by every HTTP surface but those
whose protocol has a shape of its own (MCP, Messages).
"""

from __future__ import annotations

import json
import secrets
from http import HTTPStatus
from typing import Any

REQUEST_ID_HEADER = "Atoll-Request-Id"
_ALLOWED = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
"""By the door. An app says which of them a path has."""


def new_request_id() -> str:
    return f"req_{secrets.token_hex(8)}"


def error_body(code: str, message: str, request_id: str, details: dict[str, Any] | None = None) -> dict[str, Any]:
    """The shape of every error of the server."""
    return {"code": code, "message": message, "details": details or {}, "request_id": request_id}


def error_bytes(status: int, code: str, message: str) -> bytes:
    """A whole response with an error, after which the connection is closed. For where no app answers."""
    request_id = new_request_id()
    body = json.dumps(error_body(code, message, request_id)).encode()
    allowed = f"Allow: {_ALLOWED}\r\n" if status == HTTPStatus.METHOD_NOT_ALLOWED else ""
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{allowed}Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{REQUEST_ID_HEADER}: {request_id}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
