"""Requests that may be repeated: `Idempotency-Key`.

Owns the header, what a request is compared by, and how a stored answer is sent again. Not here: the rows
(`atoll.server.idempotency`), and how an interrupted request finds what it made (the route).
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

from fastapi import Header, Request
from starlette.responses import Response

from atoll.contract.errors import OutcomeUnknown
from atoll.surfaces.rest.caller import Caller

if TYPE_CHECKING:
    from atoll.server.idempotency import IdempotentEntry

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        pattern=r"^[!-~]+$",
        description="The same key with the same request gets the same answer for a day, and nothing is done twice.",
    ),
]
REPLAYED_HEADER = "Idempotency-Replayed"


class OnceAnswer:
    """The answer to a request that may be repeated: stored when it is given, or the one that was stored."""

    def __init__(self, entry: IdempotentEntry | None) -> None:
        self._entry = entry

    @property
    def replay(self) -> Response | None:
        """The answer that was given before. None: the request is to be carried out."""
        replay = self._entry.replay if self._entry is not None else None
        if replay is None:
            return None
        return Response(
            replay.body, replay.status, {REPLAYED_HEADER: "true"}, "application/json" if replay.body else None
        )

    @property
    def name(self) -> str | None:
        """The name of what is to be made, the same each time. None: the request has no key."""
        return self._entry.resource if self._entry is not None else None

    @property
    def is_interrupted(self) -> bool:
        """True: a process died while it carried the request out."""
        return self._entry is not None and self._entry.interrupted

    def require_not_interrupted(self) -> None:
        """
        Raises:
            OutcomeUnknown: it was interrupted, and whether it was carried out cannot be told.
        """
        if self.is_interrupted:
            raise OutcomeUnknown(
                "the server ended while it carried this request out, and it is not known how far it came; look at the "
                "state, and send what is missing with a new key"
            )

    def give(self, response: Response, *, stored: Response | None = None) -> Response:
        """The answer, stored for the next time: as it is, or as `stored`, where it has a secret."""
        if self._entry is not None:
            kept = stored or response
            self._entry.complete(kept.status_code, bytes(kept.body))
        return response


@asynccontextmanager
async def once(
    caller: Caller, request: Request, key: str | None, *, resource: str | None = None
) -> AsyncIterator[OnceAnswer]:
    """Carry a request out once. `resource` is the name that the client chose for what is made.

    Raises:
        IdempotencyMismatch: the key was used with another request.
    """
    if key is None:
        yield OnceAnswer(None)
        return
    digest = hashlib.sha256(request.url.query.encode() + b"\n" + await request.body()).hexdigest()
    path = f"{request.method} {request.url.path}"
    async with caller.server.idempotency.once(caller.tenant.name, key, digest, path, resource=resource) as entry:
        yield OnceAnswer(entry)
