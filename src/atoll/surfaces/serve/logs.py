"""The server's log: lines for people, or JSON objects for programs, with the id of the request in each.

Owns the format, and that no line has a key or a token. All modules write with `logging`; nothing else has to know.
Used by `process.py`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

from atoll.surfaces.door.middleware import DoneRequest

_SECRETS = re.compile(
    r"(atoll_[A-Za-z0-9]{4,}_)[A-Za-z0-9_-]{16,}"
    r"|((?:atoll_token|atoll-token|atoll-preview-[a-z0-9]+|x-api-key|password|secret)[\"']?\s*[=:]\s*[\"']?)[^\s&\"';,]+"
    r"|(\b(?:Bearer|Basic) )[^\s\"',]{8,}"
    r"|(://[^/\s:@]*:)[^@\s/]+(?=@)",
    re.IGNORECASE,
)
_requests = logging.getLogger("atoll.requests")
_request_id: ContextVar[str | None] = ContextVar("atoll_request_id", default=None)
_OF_LOGGING = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
"""What a record has besides the fields that it was given."""
_QUOTED = re.compile(r"[\s=\"']")


def configure(kind: str, level: str, stream: TextIO | None = None) -> None:
    """Write the log of this process to a stream, standard error if none is given."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter(kind))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("uvicorn.error", "uvicorn.access", "uvicorn.asgi", "alembic", "sqlalchemy", "aiosqlite", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def formatter(kind: str) -> logging.Formatter:
    """Of lines of this kind, `json` or `text`."""
    return _JsonLog() if kind == "json" else _TextLog()


class _LogLines(logging.Formatter):
    """What all lines have: the time, level and logger, the id of the request, and the record's own fields."""

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        given = {name: value for name, value in vars(record).items() if name not in _OF_LOGGING}
        if (id := _request_id.get()) is not None:
            given.setdefault("request_id", id)
        return {name: redact(value) if isinstance(value, str) else value for name, value in given.items()}

    def event(self, record: logging.LogRecord) -> str:
        return redact(record.getMessage().rstrip())

    def exception(self, record: logging.LogRecord) -> str | None:
        return redact(self.formatException(record.exc_info)) if record.exc_info and record.exc_info[0] else None

    def time(self, record: logging.LogRecord) -> str:
        return datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z")


class _JsonLog(_LogLines):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            **self.fields(record),
            "event": self.event(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "timestamp": self.time(record),
        }
        if (exception := self.exception(record)) is not None:
            line["exception"] = exception
        return json.dumps(line, default=str)


class _TextLog(_LogLines):
    """What others wrote begins no line and moves no cursor."""

    def format(self, record: logging.LogRecord) -> str:
        event = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in self.event(record))
        line = f"{self.time(record)} [{record.levelname.lower()}] {event} [{record.name}]"
        line += "".join(f" {name}={_shown(value)}" for name, value in self.fields(record).items())
        exception = self.exception(record)
        return line if exception is None else f"{line}\n{exception}"


def _shown(value: object) -> str:
    text = str(value)
    return repr(text) if not text.isprintable() or _QUOTED.search(text) else text


def redact(text: str) -> str:
    """A text without keys, tokens and passwords."""
    return _SECRETS.sub(lambda found: f"{next(filter(None, found.groups()), '')}[hidden]", text)


def begin_request(request_id: str) -> Callable[[], None]:
    """All lines of this task and those that it starts have the id, until what is returned is called."""
    token = _request_id.set(request_id)
    return lambda: _request_id.reset(token)


def log_request(done: DoneRequest) -> None:
    """One line for each request: without its query, which may have a token."""
    scope = done.scope
    key = scope["state"].get("key")
    client = scope.get("client")
    said = {"tenant": getattr(scope["state"].get("caller"), "tenant", None), "key": getattr(key, "id", None)}
    known = {name: getattr(value, "name", value) for name, value in said.items() if value is not None}
    level = logging.WARNING if done.status >= 500 else logging.INFO
    if scope["path"] in ("/healthz", "/readyz", "/metrics"):
        level = logging.DEBUG
    if not _requests.isEnabledFor(level):
        return
    about = {
        "method": scope.get("method", "WEBSOCKET"),
        "path": scope["path"][:512],
        "status": done.status,
        "ms": round(done.seconds * 1000, 1),
        "client": client[0] if client else None,
        **known,
    }
    _requests.log(level, "request", extra=about)
