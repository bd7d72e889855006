"""Sandboxes over REST: create, list, get, update, delete, and the verbs of their life.

Owns the fields of a create, idempotent creation (a sandbox is found again by a reserved label, which no answer shows),
and what the tenant's policy and quotas are asked. Not here: checkpoints and forks (`checkpoints.py`), what happens inside
(`exec.py`, `files.py`, …), network and ports (`network.py`), usage (`usage.py`).
"""

from __future__ import annotations

import hashlib
import os
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Path, Query, Request
from fastapi.responses import Response
from pydantic import Field, SecretStr

from atoll.contract.errors import InvalidRequest, SandboxExists, SandboxNotFound
from atoll.contract.model import MAX_TTL_S, Limits, Mount, RuntimeName, SandboxInfo, Status
from atoll.contract.network import NetworkPolicy
from atoll.contract.secret import Secret
from atoll.runtime.sandbox import Sandbox
from atoll.surfaces.rest.caller import ApiRoute, Caller, Reader, Writer
from atoll.surfaces.rest.errors import failures
from atoll.surfaces.rest.idempotent import IdempotencyKey, once
from atoll.surfaces.rest.pages import After, JsonBody, Limit, Page, RequestBody, answer, page_answer

RESERVED = "atoll.dev/"
"""Labels that callers can neither set nor see."""
REQUEST_LABEL = "atoll.dev/request"
TUNNEL_HEADER = "Atoll-Tunnel"
"""Sent by `atoll.connect`, whose connection to the sandbox an ephemeral one can be tied to."""
router = APIRouter(prefix="/api/v1/sandboxes", tags=["sandboxes"], route_class=ApiRoute)

SandboxPath = Annotated[str, Path(description="The name or the id of a sandbox.", max_length=255, examples=["demo"])]
OnExpiry = Literal["destroy", "sleep"]


class SecretInput(RequestBody):
    """A value that stays outside: the sandbox has a placeholder, which is replaced only in requests to `hosts`."""

    value: SecretStr
    """Never shown again."""
    hosts: list[str] = Field(min_length=1, max_length=64)
    header: str = "authorization"


class SandboxCreate(RequestBody):
    """The options of a sandbox. What is left out is the tenant's, or the server's default."""

    name: str | None = Field(default=None, examples=["demo"])
    """Unset: the server chooses one."""
    image: str | None = None
    limits: Limits | None = None
    env: dict[str, str] = Field(default_factory=dict)
    secrets: dict[str, SecretInput] = Field(default_factory=dict)
    """By the variable that has the placeholder inside. Written only: no answer shows them."""
    secret_env: dict[str, SecretStr] = Field(default_factory=dict)
    """Variables that it has in clear. Written only."""
    user: str | None = None
    cwd: str | None = None
    runtime: RuntimeName | None = None
    pause_after_s: float | None = Field(default=None, gt=0, le=1_000_000)
    network: NetworkPolicy | None = None
    """Unset: no connection leaves it."""
    labels: dict[str, str] = Field(default_factory=dict)
    ttl_s: float | None = Field(default=None, ge=1, le=MAX_TTL_S)
    """Its lifetime. Unset: the tenant's maximum, if there is one, else until it is deleted."""
    on_expiry: OnExpiry = "destroy"
    """What happens at the end of its lifetime."""
    ttl_renewed_by_use: bool = False
    """Whether each use begins the lifetime anew."""
    mounts: list[Mount] = Field(default_factory=list, max_length=16)
    from_checkpoint: str | None = None
    ephemeral: bool = False
    """It ends with the client's connection: for clients that have one, which send the header Atoll-Tunnel."""


class SandboxUpdate(RequestBody):
    """What is left out stays as it is."""

    labels: dict[str, str | None] = Field(default_factory=dict)
    """Set; null removes one."""
    ttl_s: float | None = Field(default=None, ge=1, le=MAX_TTL_S)
    """Its lifetime from now on. Unset: it stays."""
    no_ttl: bool = False
    """It lives until it is deleted, where the tenant's policy has no maximum."""
    on_expiry: OnExpiry | None = None
    ttl_renewed_by_use: bool | None = None
    limits: Limits | None = None


class SandboxExtend(RequestBody):
    ttl_s: float = Field(ge=1, le=MAX_TTL_S)
    """Its lifetime from now on."""


# --------------------------------------------------------------------------------------------------------------- names


async def find(caller: Caller, wanted: str) -> Sandbox:
    """The sandbox of this name or id.

    Raises:
        SandboxNotFound: the tenant has none.
    """
    try:
        return await caller.engine.get(wanted)
    except (SandboxNotFound, InvalidRequest):
        name = next((each.name for each in await caller.engine.list() if each.id == wanted), None)
        if name is None:
            raise SandboxNotFound(wanted, []) from None
        return await caller.engine.get(name)


async def describe(sandbox: Sandbox) -> SandboxInfo:
    """A sandbox as it is now."""
    await sandbox.status()
    return shown(sandbox.info)


def shown(info: SandboxInfo) -> SandboxInfo:
    """As an answer shows it: without reserved labels."""
    if not any(label.startswith(RESERVED) for label in info.labels):
        return info
    labels = {name: value for name, value in info.labels.items() if not name.startswith(RESERVED)}
    return info.model_copy(update={"labels": labels})


def check_labels_given(labels: dict[str, str] | dict[str, str | None]) -> None:
    """
    Raises:
        InvalidRequest: one is reserved.
    """
    for label in labels:
        if label.startswith(RESERVED):
            raise InvalidRequest(f"the label {label!r} is reserved: labels may not begin with {RESERVED}", label=label)


# -------------------------------------------------------------------------------------------------------------- routes

_LINKS = {
    operation: {"operationId": operation, "parameters": {"sandbox": "$response.body#/name"}}
    for operation in ("sandboxes_get", "sandboxes_update", "sandboxes_delete", "sandboxes_exec", "checkpoints_create")
}


@router.post(
    "",
    status_code=201,
    operation_id="sandboxes_create",
    response_model=SandboxInfo,
    response_description="It was created, and answers.",
    responses={**failures(404, 409, 413, 422), 201: {"links": _LINKS}},
)
async def create(
    request: Request,
    caller: Writer,
    body: Annotated[SandboxCreate, JsonBody()],
    key: IdempotencyKey = None,
    tunnel: Annotated[bool, Header(alias=TUNNEL_HEADER, description="Sent by atoll.connect.")] = False,
) -> Response:
    """Create a sandbox and wait until it answers."""
    if body.ephemeral and not tunnel:
        raise InvalidRequest(
            "ephemeral: a REST client has no connection that the sandbox could end with; set ttl_s, or use atoll.connect"
        )
    check_labels_given(body.labels)
    async with once(caller, request, key, resource=body.name) as made:
        if made.replay is not None:
            return made.replay
        label = None if key is None else hashlib.sha256(f"{caller.tenant.name}\n{key}".encode()).hexdigest()[:32]
        sandbox = await _interrupted(caller, made.name, label) if made.is_interrupted else None
        if sandbox is None:
            sandbox = await _create(caller, body, made.name or body.name, label)
        await caller.server.events.saw(caller.tenant.name, sandbox.info)
        caller.note(resource=f"sandboxes/{sandbox.name}")
        return made.give(answer(shown(sandbox.info), 201, {"Location": f"/api/v1/sandboxes/{sandbox.name}"}))


async def _interrupted(caller: Caller, name: str | None, label: str | None) -> Sandbox | None:
    """What an interrupted request has made. None: nothing."""
    if name is None:
        return None
    try:
        sandbox = await caller.engine.get(name)
    except SandboxNotFound:
        return None
    await sandbox.status()
    if sandbox.info.labels.get(REQUEST_LABEL) != label:
        raise SandboxExists(name)
    await sandbox.connect()
    return sandbox


async def _create(caller: Caller, body: SandboxCreate, name: str | None, label: str | None) -> Sandbox:
    name = name or f"sandbox-{os.urandom(4).hex()}"
    allowed = caller.tenant.policy.check_create(body)
    labels = body.labels if label is None else {**body.labels, REQUEST_LABEL: label}
    secrets = {each: Secret(one.value, hosts=one.hosts, header=one.header) for each, one in body.secrets.items()}
    limits = caller.engine.effective_limits(allowed.limits, allowed.runtime)
    async with caller.server.quotas.reserve(caller.tenant, caller.engine, {name: limits}):
        return await caller.engine.create(
            name,
            image=body.image,
            limits=allowed.limits,
            env=body.env,
            secrets=secrets,
            secret_env=body.secret_env,
            user=body.user,
            cwd=body.cwd,
            runtime=allowed.runtime,
            pause_after_s=body.pause_after_s,
            network=body.network,
            labels=labels,
            ttl_s=allowed.ttl_s,
            mounts=body.mounts,
            from_checkpoint=body.from_checkpoint,
            ephemeral=body.ephemeral,
        )
