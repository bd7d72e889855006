"""The network of a sandbox over REST: the policy of its egress, the audit log of its connections, and its ports.

Not here: what the tenant may allow (`atoll.server.policy`), and how previews are served (`surfaces/serve/`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Path
from fastapi.responses import Response
from pydantic import Field, SecretStr

from atoll.contract.model import Preview
from atoll.contract.network import AuditRecord, NetworkPolicy
from atoll.server.policy import check_network
from atoll.surfaces.rest.caller import ApiRoute, Caller, Executor, Reader, Writer
from atoll.surfaces.rest.errors import failures
from atoll.surfaces.rest.event_stream import MEDIA_TYPE, EventStream, ServerEvent
from atoll.surfaces.rest.pages import After, JsonBody, Limit, Page, RequestBody, answer, page_answer
from atoll.surfaces.rest.sandboxes import SandboxPath, describe, find

router = APIRouter(prefix="/api/v1/sandboxes/{sandbox}", route_class=ApiRoute)


class SandboxNetwork(RequestBody):
    policy: NetworkPolicy | None
    """Null: no connection leaves the sandbox."""


@router.get(
    "/network",
    tags=["network"],
    operation_id="sandboxes_get_network",
    response_model=SandboxNetwork,
    responses=failures(404),
)
async def get_network(caller: Reader, sandbox: SandboxPath) -> Response:
    """The policy of a sandbox's egress."""
    return answer({"policy": (await describe(await find(caller, sandbox))).network})


@router.put(
    "/network",
    tags=["network"],
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


class RequestHeaders(RequestBody):
    headers: dict[str, dict[str, SecretStr]] = Field(max_length=64)
    """By host: a name, `*.NAME` for all below one, or either with `http://` before it for requests without TLS."""


@router.put(
    "/network/headers",
    tags=["network"],
    operation_id="sandboxes_set_request_headers",
    status_code=204,
    response_class=Response,
    responses=failures(404, 409, 422),
)
async def set_request_headers(
    caller: Writer, sandbox: SandboxPath, body: Annotated[RequestHeaders, JsonBody()]
) -> Response:
    """Set headers in every request that it makes to some hosts, in place of those that were set before and of those
    that programs send. Values are in no answer. What a host shows of a request, the sandbox sees."""
    found = await find(caller, sandbox)
    await caller.engine.set_request_headers(found.name, body.headers)
    await caller.server.events.record(caller.tenant.name, "updated", await describe(found), what="headers")
    return Response(status_code=204)


@router.get(
    "/network/audit",
    tags=["network"],
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


# --------------------------------------------------------------------------------------------------------------- ports


class PortExpose(RequestBody):
    port: int = Field(ge=1, le=65535, examples=[8000])
    """The port inside."""
    wait_s: float = Field(default=0, ge=0, le=60)
    """How long to wait until something listens there. 0: not at all."""


PortPath = Annotated[int, Path(ge=1, le=65535, description="The port inside.")]


@router.get("/ports", tags=["ports"], operation_id="ports_list", response_model=Page[Preview], responses=failures(404))
async def list_ports(caller: Executor, sandbox: SandboxPath, limit: Limit = 100, after: After = None) -> Response:
    """The ports of a sandbox that are exposed, with their URLs and tokens, which is why it takes the scope of exec."""
    found = await find(caller, sandbox)
    previews = await caller.server.previews.list(caller.tenant.name, found.info)
    return page_answer(previews, lambda each: f"{each.port:05}", limit, after)


@router.post(
    "/ports",
    tags=["ports"],
    status_code=201,
    operation_id="ports_expose",
    response_model=Preview,
    responses=failures(404, 409, 422, 502, 504),
)
async def expose_port(caller: Writer, sandbox: SandboxPath, body: Annotated[PortExpose, JsonBody()]) -> Response:
    """Expose a port at a URL, which it keeps until it is taken back. Exposing it again gives the same."""
    found = await find(caller, sandbox)
    preview = await caller.server.previews.expose(caller.tenant.name, found.info, body.port, wait_s=body.wait_s)
    caller.note(port=body.port)
    return answer(preview, 201)


@router.delete("/ports/{port}", tags=["ports"], status_code=204, operation_id="ports_unexpose", responses=failures(404))
async def unexpose_port(caller: Writer, sandbox: SandboxPath, port: PortPath) -> Response:
    """Take a URL back, and cut what is under way through it. Does nothing if the port is not exposed."""
    found = await find(caller, sandbox)
    await caller.server.previews.take_back(caller.tenant.name, found.id, port)
    return Response(status_code=204)
