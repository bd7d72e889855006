"""The server's log: lines for people, or JSON objects for programs, with the id of the request in each.

Owns the format, and that no line has a key or a token. All modules write with `logging`; nothing else has to know.
Used by `process.py`.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor

from atoll.surfaces.door.middleware import DoneRequest

_SECRETS = re.compile(
    r"(atoll_[A-Za-z0-9]{4,}_)[A-Za-z0-9_-]{16,}"
    r"|((?:atoll_token|atoll-token|atoll-preview-[a-z0-9]+|x-api-key|password|secret)[\"']?\s*[=:]\s*[\"']?)[^\s&\"';,]+"
    r"|(\b(?:Bearer|Basic) )[^\s\"',]{8,}"
    r"|(://[^/\s:@]*:)[^@\s/]+(?=@)",
    re.IGNORECASE,
)
_requests = structlog.stdlib.get_logger("atoll.requests")


def configure(kind: str, level: str, stream: TextIO | None = None) -> None:
    """Write the log of this process to a stream, standard error if none is given."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.ExtraAdder(),
    ]
    last: Processor = (
        structlog.processors.JSONRenderer()
        if kind == "json"
        else structlog.dev.ConsoleRenderer(
            colors=False, pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
        )
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            _without_secrets,
            last,
        ],
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("uvicorn.error", "uvicorn.access", "uvicorn.asgi", "alembic", "sqlalchemy", "aiosqlite", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def redact(text: str) -> str:
    """A text without keys, tokens and passwords."""
    return _SECRETS.sub(lambda found: f"{next(filter(None, found.groups()), '')}[hidden]", text)


def _without_secrets(_logger: Any, _method: str, event: EventDict) -> EventDict:
    return {name: redact(value) if isinstance(value, str) else value for name, value in event.items()}


def begin_request(request_id: str) -> Callable[[], None]:
    """All lines of this task and those that it starts have the id, until what is returned is called."""
    tokens = structlog.contextvars.bind_contextvars(request_id=request_id)
    return lambda: structlog.contextvars.reset_contextvars(**tokens)


def log_request(done: DoneRequest) -> None:
    """One line for each request: without its query, which may have a token."""
    scope = done.scope
    key = scope["state"].get("key")
    client = scope.get("client")
    said = {"tenant": getattr(scope["state"].get("caller"), "tenant", None), "key": getattr(key, "id", None)}
    known = {name: getattr(value, "name", value) for name, value in said.items() if value is not None}
    write = _requests.warning if done.status >= 500 else _requests.info
    if scope["path"] in ("/healthz", "/readyz", "/metrics"):
        write = _requests.debug
    write(
        "request",
        method=scope.get("method", "WEBSOCKET"),
        path=scope["path"][:512],
        status=done.status,
        ms=round(done.seconds * 1000, 1),
        client=client[0] if client else None,
        **known,
    )
