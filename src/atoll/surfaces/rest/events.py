"""Events over REST: server-sent events of one sandbox, or of all of a tenant.

A client that comes back with `Last-Event-ID` gets what it has missed. Not here: the events (`atoll.server.events`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.responses import Response

from atoll.server.events import EventType, SandboxEvent
from atoll.surfaces.rest.caller import ApiRoute, Caller, Reader
from atoll.surfaces.rest.errors import failures
from atoll.surfaces.rest.event_stream import EventStream, ServerEvent, streams
from atoll.surfaces.rest.pages import MAX_INTEGER
from atoll.surfaces.rest.sandboxes import SandboxPath, find

router = APIRouter(prefix="/api/v1", tags=["events"], route_class=ApiRoute)

LastEventId = Annotated[
    str | None,
    Header(
        alias="Last-Event-ID",
        pattern=r"^[0-9]{1,18}$",
        description="The id of the last event that the client has: it goes on after it.",
    ),
]
AfterEvent = Annotated[
    int | None,
    Query(ge=0, le=MAX_INTEGER, description="As Last-Event-ID. 0: all that are kept. Unset: what happens from now on."),
]
Types = Annotated[list[EventType] | None, Query(max_length=32, description="Only events of these types.")]
Follow = Annotated[bool, Query(description="False: the stream ends when all events that are kept have been sent.")]


@router.get("/events", operation_id="events_stream", response_class=Response, responses=streams(SandboxEvent))
async def all_events(
    caller: Reader,
    types: Types = None,
    after: AfterEvent = None,
    follow: Follow = True,
    last_event_id: LastEventId = None,
) -> Response:
    """What happens to the sandboxes of the tenant."""
    return EventStream(caller, await _stream(caller, None, types, after, last_event_id, follow=follow))


@router.get(
    "/sandboxes/{sandbox}/events",
    operation_id="sandboxes_events",
    response_class=Response,
    responses={**failures(404), **streams(SandboxEvent)},
)
async def events_of_one(
    caller: Reader,
    sandbox: SandboxPath,
    types: Types = None,
    after: AfterEvent = None,
    follow: Follow = True,
    last_event_id: LastEventId = None,
) -> Response:
    """What happens to a sandbox, until it is gone."""
    found = await find(caller, sandbox)
    return EventStream(caller, await _stream(caller, found.id, types, after, last_event_id, follow=follow))


async def _stream(
    caller: Caller,
    sandbox_id: str | None,
    types: list[EventType] | None,
    after: int | None,
    last_event_id: str | None,
    *,
    follow: bool,
) -> AsyncIterator[ServerEvent]:
    if last_event_id is not None:
        after = int(last_event_id)
    events, tenant = caller.server.events, caller.tenant.name
    start = await events.latest() if after is None else after

    async def stored() -> AsyncIterator[ServerEvent]:
        reached = start
        while batch := await events.read(tenant, reached, sandbox_id=sandbox_id, types=types):
            for event in batch:
                yield _sent(event)
            reached = batch[-1].id

    async def followed() -> AsyncIterator[ServerEvent]:
        async for event in events.follow(tenant, start, sandbox_id=sandbox_id, types=types):
            yield _sent(event)
            if sandbox_id is not None and _is_last(event):
                return

    return followed() if follow else stored()


def _sent(event: SandboxEvent) -> ServerEvent:
    return ServerEvent(event.type, event, str(event.id))


def _is_last(event: SandboxEvent) -> bool:
    return event.type == "destroyed" or (event.type == "expired" and event.details.get("on_expiry") == "destroy")
