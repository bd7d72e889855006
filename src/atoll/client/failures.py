"""The errors of a server, as the classes that a local engine raises.

Owns the way from the body of an answer (`code`, `message`, `details`) to an error: by a closed table of the classes of
`contract/errors.py`, never by a name that is imported. Not here: the way there (`surfaces/rest/errors.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache

from atoll.contract.errors import (
    AtollError,
    BuildFailed,
    BundleFailed,
    FileError,
    InvalidRequest,
    SandboxNotFound,
    ServerUnavailable,
    ToolCallError,
    UserNotFound,
)

_SHOWN = 200
_ATTRIBUTES: dict[type[AtollError], dict[str, object]] = {
    SandboxNotFound: {"name": "", "known": []},
    UserNotFound: {"user": ""},
    ToolCallError: {"type": ""},
    BuildFailed: {"step": None},
    BundleFailed: {"reason": ""},
}
"""What some classes have besides, and its value where an answer does not say it."""
_ALIASES: dict[str, type[AtollError]] = {"too_large": InvalidRequest}
"""Codes that only answers have."""

_HINTS = {
    "CERTIFICATE_VERIFY_FAILED": "if the server signed its own certificate, ATOLL_CA_FILE names the file of its "
    "authority: server/tls/ca.pem in the server's state directory",
    "WRONG_VERSION_NUMBER": "the server does not speak TLS at this port; if it has none, its address begins with http://",
    "All connection attempts failed": "is `atoll serve` running there, and is the address right?",
}
"""What to do about a connection that failed for a reason that has these words."""


def error_of(status: int, body: bytes) -> AtollError:
    """The error in the body of an answer with this status."""
    try:
        told = json.loads(body)
        code, message, details = told["code"], told["message"], told.get("details") or {}
        request_id = told.get("request_id")
    except (ValueError, TypeError, KeyError):
        code, message, details, request_id = None, None, {}, None
    if not isinstance(code, str) or not isinstance(message, str) or not isinstance(details, dict):
        shown = body[:_SHOWN].decode("utf-8", "replace")
        return ServerUnavailable(
            f"the server answered with status {status}, not as Atoll's does: {shown!r}; is the address right?",
            status=status,
        )
    return _made(_classes().get(code, AtollError), message, request_id, details, status)


def _made(
    kind: type[AtollError], message: str, request_id: object, details: dict[str, object], status: int
) -> AtollError:
    """Without the constructor of its class, which composes the message that the server has composed already."""
    error = kind.__new__(kind, message)
    hint = None if request_id is None or status < 500 else f"the server's log has the request {request_id}"
    AtollError.__init__(error, message, hint=hint, **{str(name): value for name, value in details.items()})
    if isinstance(error, FileError):
        number, path = details.get("errno"), details.get("path")
        error.errno = number if isinstance(number, int) else None
        error.path = path if isinstance(path, str) else None
    for name, default in _ATTRIBUTES.get(kind, {}).items():
        setattr(error, name, details.get(name, default))
    return error


@cache
def _classes() -> dict[str, type[AtollError]]:
    return {kind.code: kind for kind in _kinds(AtollError)} | _ALIASES


def _kinds(kind: type[AtollError]) -> Iterator[type[AtollError]]:
    for each in kind.__subclasses__():
        yield from _kinds(each)
        if "code" in vars(each) and each.__module__ == AtollError.__module__:
            yield each


def unreachable(error: BaseException | None, url: str | None = None, *, sent: bool = True) -> ServerUnavailable:
    """The error of a server that cannot be reached, or that went away. `sent`: it may have got the request."""
    reason = str(error) or type(error).__name__ if error is not None else "the connection was closed"
    hint = next((hint for part, hint in _HINTS.items() if part in reason), None)
    server = "the server" if url is None else f"the server {url}"
    return ServerUnavailable(f"{server} cannot be reached: {reason}", hint=hint, sent=sent)
