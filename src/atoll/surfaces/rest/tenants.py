"""Tenants, keys, the audit log and the caller itself, over REST.

Who may: tenants are for keys of the server; keys and the audit log are for administrators, of their own tenant, or of
the server in the tenant that it acts in. No key can make one that may do more than itself.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response
from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, Field

from atoll.contract.errors import Conflict, Forbidden, InvalidRequest, KeyNotFound
from atoll.contract.frozen import Frozen, pydantic_model
from atoll.server.audit import AuditEvent
from atoll.server.keys import MEMBER_SCOPES, SCOPES, TENANT_ADMIN_SCOPES, ApiKey, KeyRole, KeyScope
from atoll.server.tenants import Quotas, Tenant, TenantPolicy
from atoll.surfaces.rest.caller import AnyCaller, ApiRoute, Caller, requires
from atoll.surfaces.rest.errors import failures
from atoll.surfaces.rest.idempotent import IdempotencyKey, once
from atoll.surfaces.rest.pages import (
    After,
    AfterNumber,
    JsonBody,
    Limit,
    Page,
    RequestBody,
    answer,
    page,
    page_answer,
)

router = APIRouter(prefix="/api/v1", route_class=ApiRoute)
Operator = Annotated[Caller, Depends(requires("tenants", operator=True))]
KeyKeeper = Annotated[Caller, Depends(requires("keys"))]
Auditor = Annotated[Caller, Depends(requires("audit"))]
TenantPath = Annotated[str, Path(description="The name of a tenant.", max_length=64)]
OfServer = Annotated[bool, Query(description="The keys of the server itself; for its own keys only.")]

F = TypeVar("F", bound=Frozen)
# As pydantic has them: the fields of a body are checked strictly, all the way down.
PolicyBody = pydantic_model(TenantPolicy)
QuotasBody = pydantic_model(Quotas)


class TenantCreate(RequestBody):
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$", examples=["acme"])
    policy: PolicyBody | None = None  # type: ignore[valid-type]
    """What it may ask for. Unset: the image `host`, no mounts, no network."""
    quotas: QuotasBody | None = None  # type: ignore[valid-type]
    """Unset: no limits."""


class TenantUpdate(RequestBody):
    """What is left out stays as it is; what is given is replaced as a whole."""

    disabled: bool | None = None
    policy: PolicyBody | None = None  # type: ignore[valid-type]
    quotas: QuotasBody | None = None  # type: ignore[valid-type]


class KeyCreate(RequestBody):
    name: str = Field(pattern=r"^[^\x00-\x1f\x7f]{1,100}$", examples=["ci"])
    role: KeyRole = "member"
    scopes: list[KeyScope] | None = Field(default=None, max_length=32)
    """Unset: all that the role has."""
    ttl_s: float | None = Field(default=None, ge=1, le=1e9)
    """When it expires. Unset: never."""
    server: bool = False
    """A key of the server itself, which may act in every tenant; for keys of the server only."""


class NewKey(Frozen):
    key: ApiKey
    text: str | None
    """What clients send. Shown this once: null when the answer is repeated for an idempotency key."""


class Me(Frozen):
    """Who sent the request, and what may be done with it."""

    key: ApiKey
    tenant: Tenant
    """The tenant that the request acts in."""
    usage: dict[str, float]
    """What counts for each of the tenant's quotas now."""


@router.get("/me", tags=["me"], operation_id="me", response_model=Me, responses=failures())
async def me(caller: AnyCaller) -> Response:
    """The key, the tenant, and what counts for its quotas."""
    usage = await caller.server.quotas.usage(caller.tenant, caller.engine)
    return answer(Me(key=caller.key, tenant=caller.tenant, usage=usage))


# ------------------------------------------------------------------------------------------------------------- tenants


@router.get(
    "/tenants", tags=["tenants"], operation_id="tenants_list", response_model=Page[Tenant], responses=failures()
)
async def list_tenants(caller: Operator, limit: Limit = 100, after: After = None) -> Response:
    """All tenants, by name."""
    return page_answer(await caller.server.tenants.list(), lambda tenant: tenant.name, limit, after)


@router.post(
    "/tenants",
    tags=["tenants"],
    status_code=201,
    operation_id="tenants_create",
    response_model=Tenant,
    responses=failures(409, 422),
)
async def create_tenant(
    request: Request, caller: Operator, body: Annotated[TenantCreate, JsonBody()], key: IdempotencyKey = None
) -> Response:
    """Create a tenant."""
    async with once(caller, request, key, resource=body.name) as made:
        if made.replay is not None:
            return made.replay
        made.require_not_interrupted()
        tenant = await caller.server.tenants.create(
            body.name, policy=_of(TenantPolicy, body.policy), quotas=_of(Quotas, body.quotas)
        )
        caller.note(resource=f"tenants/{tenant.name}")
        return made.give(answer(tenant, 201, {"Location": f"/api/v1/tenants/{tenant.name}"}))


@router.get(
    "/tenants/{tenant}", tags=["tenants"], operation_id="tenants_get", response_model=Tenant, responses=failures(404)
)
async def get_tenant(caller: Operator, tenant: TenantPath) -> Response:
    """One tenant."""
    return answer(await caller.server.tenants.get(tenant))


@router.patch(
    "/tenants/{tenant}",
    tags=["tenants"],
    operation_id="tenants_update",
    response_model=Tenant,
    responses=failures(404),
)
async def update_tenant(caller: Operator, tenant: TenantPath, body: Annotated[TenantUpdate, JsonBody()]) -> Response:
    """Change a tenant. Its sandboxes keep what they have."""
    changed = await caller.server.tenants.update(
        tenant, disabled=body.disabled, policy=_of(TenantPolicy, body.policy), quotas=_of(Quotas, body.quotas)
    )
    return answer(changed)


@router.delete(
    "/tenants/{tenant}",
    tags=["tenants"],
    status_code=204,
    operation_id="tenants_delete",
    responses=failures(404, 409),
)
async def delete_tenant(
    caller: Operator,
    tenant: TenantPath,
    destroy: Annotated[
        bool, Query(description="Whether its sandboxes are destroyed. Else one that has any stays.")
    ] = False,
) -> Response:
    """Delete a tenant, its keys and what belongs to it."""
    try:
        await caller.server.delete_tenant(tenant, destroy=destroy)
    except InvalidRequest as error:
        raise Conflict(error.message) from None
    return Response(status_code=204)


def _of(kind: type[F], given: BaseModel | None) -> F | None:
    return None if given is None else kind.model_validate(given.model_dump())


# ---------------------------------------------------------------------------------------------------------------- keys


def _owner(caller: Caller, server: bool) -> str | None:
    """The tenant whose keys are meant; None: the server."""
    if server:
        caller.require_operator()
        return None
    return caller.tenant.name


@router.get("/keys", tags=["keys"], operation_id="keys_list", response_model=Page[ApiKey], responses=failures())
async def list_keys(caller: KeyKeeper, server: OfServer = False, limit: Limit = 100, after: After = None) -> Response:
    """The keys of the tenant, also revoked ones; the oldest first."""
    found = await caller.server.keys.list(_owner(caller, server))
    return page_answer(found, lambda key: f"{key.created_at.timestamp():017.6f} {key.id}", limit, after)


@router.post(
    "/keys",
    tags=["keys"],
    status_code=201,
    operation_id="keys_create",
    response_model=NewKey,
    responses=failures(409, 422),
)
async def create_key(
    request: Request,
    caller: KeyKeeper,
    body: Annotated[KeyCreate, JsonBody()],
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Make a key. Its text is in this answer, and nowhere else."""
    owner = _owner(caller, body.server)
    of_role = SCOPES if owner is None else TENANT_ADMIN_SCOPES if body.role == "admin" else MEMBER_SCOPES
    asked = of_role if body.scopes is None else tuple(body.scopes)
    if more := [scope for scope in asked if scope not in caller.key.scopes]:
        raise Forbidden(f"a key cannot make one that may do more than itself; it does not have {', '.join(more)}")
    async with once(caller, request, idempotency_key) as made:
        if made.replay is not None:
            return made.replay
        made.require_not_interrupted()
        key, text = await caller.server.keys.create(
            body.name, tenant=owner, role=body.role, scopes=body.scopes, ttl_s=body.ttl_s
        )
        caller.note(resource=f"keys/{key.id}", role=key.role)
        return made.give(
            answer(NewKey(key=key, text=text.get_secret_value()), 201), stored=answer(NewKey(key=key, text=None), 201)
        )


KeyPath = Annotated[str, Path(description="The id of a key.", max_length=64)]


async def _key(caller: Caller, id: str) -> ApiKey:
    found = await caller.server.keys.get(id)
    if found.tenant != caller.tenant.name and not (caller.is_operator and found.tenant is None):
        raise KeyNotFound(id)
    return found


@router.get("/keys/{key}", tags=["keys"], operation_id="keys_get", response_model=ApiKey, responses=failures(404))
async def get_key(caller: KeyKeeper, key: KeyPath) -> Response:
    """One key, without its text."""
    return answer(await _key(caller, key))


@router.delete("/keys/{key}", tags=["keys"], operation_id="keys_revoke", response_model=ApiKey, responses=failures(404))
async def revoke_key(caller: KeyKeeper, key: KeyPath) -> Response:
    """Have a key refused from now on. Its streams end within two seconds."""
    found = await _key(caller, key)
    return answer(await caller.server.keys.revoke(found.id))


# --------------------------------------------------------------------------------------------------------------- audit


def _check_moment(given: object) -> object:
    """No number: as seconds or milliseconds since 1970, it would be one or the other by its size."""
    if not isinstance(given, str) or re.match(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ]", given) is None:
        raise ValueError("a time is a date, a time and a zone, such as 2026-01-31T12:00:00Z")
    return given


def _in_utc(given: datetime) -> datetime:
    try:
        return given.astimezone(UTC)
    except OverflowError:
        raise ValueError("the time is before the year 1 or after the year 9999") from None


Moment = Annotated[AwareDatetime, BeforeValidator(_check_moment), AfterValidator(_in_utc)]


@router.get("/audit", tags=["audit"], operation_id="audit_list", response_model=Page[AuditEvent], responses=failures())
async def audit(
    caller: Auditor,
    action: Annotated[str | None, Query(max_length=100, examples=["sandboxes_create"])] = None,
    key: Annotated[str | None, Query(max_length=64, description="The id of a key.")] = None,
    since: Annotated[Moment | None, Query()] = None,
    until: Annotated[Moment | None, Query()] = None,
    everyone: Annotated[bool, Query(description="Of all tenants; for keys of the server.")] = False,
    limit: Limit = 100,
    after: AfterNumber = None,
) -> Response:
    """Who did what, the latest first."""
    if everyone:
        caller.require_operator()
    found = await caller.server.audit.query(
        None if everyone else caller.tenant,
        before=None if after is None else int(after),
        limit=limit + 1,
        action=action,
        key=key,
        since=since,
        until=until,
    )
    return page(found[:limit], str(found[limit - 1].id) if len(found) > limit else None)
