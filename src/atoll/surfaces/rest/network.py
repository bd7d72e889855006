"""The network of a sandbox over REST: the policy of its egress, the audit log of its connections, and its ports.

Not here: what the tenant may allow (`atoll.server.policy`), and how previews are served (`surfaces/serve/`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header
from fastapi.responses import Response

from atoll.contract.network import AuditRecord, NetworkPolicy
from atoll.server.policy import check_network
from atoll.surfaces.rest.caller import ApiRoute, Caller, Reader, Writer
from atoll.surfaces.rest.errors import failures
from atoll.surfaces.rest.event_stream import MEDIA_TYPE, EventStream, ServerEvent
from atoll.surfaces.rest.pages import After, JsonBody, Limit, Page, RequestBody, answer, page_answer
from atoll.surfaces.rest.sandboxes import SandboxPath, describe, find

router = APIRouter(prefix="/api/v1/sandboxes/{sandbox}", tags=["network"], route_class=ApiRoute)


class SandboxNetwork(RequestBody):
    policy: NetworkPolicy | None
    """Null: no connection leaves the sandbox."""


@router.get("/network", operation_id="sandboxes_get_network", response_model=SandboxNetwork, responses=failures(404))
async def get_network(caller: Reader, sandbox: SandboxPath) -> Response:
    """The policy of a sandbox's egress."""
    return answer({"policy": (await describe(await find(caller, sandbox))).network})


@router.put(
    "/network",
    operation_id="sandboxes_set_network",
    response_model=SandboxNetwork,
    responses=failures(404, 409, 422),
)
async def set_network(caller: Writer, sandbox: SandboxPath, body: Annotated[SandboxNetwork, JsonBody()]) -> Response:
    """Set the policy of its egress. Open connections that it does not allow are cut."""
    found = await find(caller, sandbox)
    policy = check_network(caller.tenant.policy, body.policy)
    await caller.engine.set_network(found.name, policy)
    info = await describe(found)
    await caller.server.events.record(caller.tenant.name, "updated", info, what="network")
    return answer({"policy": info.network})


@router.get(
    "/network/audit",
    operation_id="sandboxes_network_audit",
    response_model=Page[AuditRecord],
    responses={**failures(404), 200: {"content": {MEDIA_TYPE: {"schema": {"type": "string"}}}}},
)
async def network_audit(
    caller: Reader,
    sandbox: SandboxPath,
    limit: Limit = 100,
    after: After = None,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> Response:
    """Connections that programs inside asked for, the oldest first. As server-sent events it goes on with new ones."""
    found = await find(caller, sandbox)
    if MEDIA_TYPE in accept:
        return EventStream(caller, _followed(caller, found.name))
    records = await caller.engine.audit(found.name)
    return page_answer(records, lambda each: f"{each.time.timestamp():017.6f} {each.id}", limit, after)


async def _followed(caller: Caller, name: str) -> AsyncIterator[ServerEvent]:
    async for record in caller.engine.follow_audit(name):
        yield ServerEvent("connection", record, record.id)
