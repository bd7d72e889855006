"""Tenants: who shares a server, what each may ask for, and how much of it.

Owns their records and the form of a policy. Not here: what a policy lets through (`policy.py`), and how quotas are kept
(`quotas.py`). A tenant is a namespace of the engine with its name: its sandboxes are the engine's to know, and deleting
a tenant that has any is for `Server.delete_tenant` to refuse. The tenant `default` is always there; it is the namespace
of the local command line.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from atoll.contract.errors import InvalidRequest, TenantExists, TenantNotFound
from atoll.contract.frozen import AfterValidator, Field, Frozen
from atoll.contract.model import MAX_TTL_S, Limits, RuntimeName
from atoll.contract.names import DEFAULT_NAMESPACE, NAMESPACE_RULE, is_namespace
from atoll.contract.network import parse_rule
from atoll.server.database import Database, RecentReads
from atoll.server.tables import tenants

DEFAULT_TENANT = DEFAULT_NAMESPACE
WRITABLE = ":rw"
_MAX_PATTERNS = 256


def check_tenant_name(name: str) -> str:
    """
    Raises:
        InvalidRequest: it is not a name for a tenant; the message says what is allowed.
    """
    if not is_namespace(name):
        raise InvalidRequest(f"{name!r} is not a name for a tenant; allowed are {NAMESPACE_RULE}", name=name)
    return name


def _check_images(images: tuple[str, ...]) -> tuple[str, ...]:
    for image in images:
        if not image or len(image) > 512 or re.search(r"[\s\x00-\x1f]", image):
            raise InvalidRequest(f"{image!r} is not a pattern for images; write host, python:3.* or ghcr.io/acme/*")
    return images


def _check_mounts(mounts: tuple[str, ...]) -> tuple[str, ...]:
    for mount in mounts:
        path = mount.removesuffix(WRITABLE)
        if (
            not path.startswith("/")
            or path != posixpath.normpath("/" + path.lstrip("/"))
            or path == "/"
            or "\0" in path
        ):
            raise InvalidRequest(
                f"{mount!r} is not a directory that may be mounted; write an absolute path without '..', not /, with "
                f"{WRITABLE} at its end if it may be mounted for writing"
            )
    return mounts


def _check_networks(rules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(parse_rule(rule)) for rule in rules))


class TenantPolicy(Frozen):
    """What a tenant may ask for. `policy.py` checks requests against it."""

    images: Annotated[tuple[str, ...], AfterValidator(_check_images)] = Field(
        default=("host",), max_length=_MAX_PATTERNS
    )
    """Images, as patterns: `host`, `python:3.*`, `ghcr.io/acme/*`, `dir:/srv/images/*`. `*` is any image of a registry
    with a domain name; `host`, images of this machine, and registries by address or port are named. Empty: none."""
    mounts: Annotated[tuple[str, ...], AfterValidator(_check_mounts)] = Field(default=(), max_length=_MAX_PATTERNS)
    """Directories of this machine that may be mounted, they and what is in them: read-only, or as asked for with `:rw`
    at the end. Volumes are the tenant's own. Empty: none."""
    networks: Annotated[tuple[str, ...], AfterValidator(_check_networks)] = Field(default=(), max_length=_MAX_PATTERNS)
    """Rules that a network policy may have, or narrower ones. `*` is any public host, no private address and no preset.
    Empty: no connection leaves its sandboxes."""
    runtimes: Annotated[tuple[RuntimeName, ...], Field(min_length=1)] | None = None
    """The first is that of sandboxes that name none. Unset: any of this machine."""
    max_ttl_s: float | None = Field(default=None, ge=1, le=MAX_TTL_S)
    """The longest lifetime of a sandbox, and that of one that asks for none. Unset: no end."""
    default_limits: Limits = Limits()
    """Limits of sandboxes that do not say: each that is unset here is that of `max_limits`, else the engine's."""
    max_limits: Limits = Limits()
    """The most that a sandbox may have. Unset: no bound."""


class Quotas(Frozen):
    """What the sandboxes of a tenant may use together. Unset: no limit.

    Memory, CPUs and disk are sums of limits, not of what is used at a moment, so that what was granted can be used.
    Sandboxes that sleep or are shut down count as those that run: any use wakes one. Warm pools count as the sandboxes
    that they keep ready, and volumes, tool bundles and what was built of these with their size for `disk_bytes`.
    """

    sandboxes: int | None = Field(default=None, ge=0)
    memory_bytes: int | None = Field(default=None, ge=0)
    cpus: float | None = Field(default=None, ge=0)
    disk_bytes: int | None = Field(default=None, ge=0)
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Requests to the server. As many may come at once after a minute without any."""
    model_tokens: int | None = Field(default=None, ge=0)
    """Tokens of models, in and out, in a calendar month (UTC)."""


class Tenant(Frozen):
    name: str
    created_at: datetime
    disabled: bool = False
    """True: its keys are refused, and turns of its agents are cancelled. Its sandboxes go on."""
    policy: TenantPolicy = TenantPolicy()
    quotas: Quotas = Quotas()


class Tenants:
    """The tenants of a server."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._recent = RecentReads(self._read)

    async def create(self, name: str, *, policy: TenantPolicy | None = None, quotas: Quotas | None = None) -> Tenant:
        """
        Raises:
            InvalidRequest: the name is not allowed.
            TenantExists: it is taken.
        """
        made = Tenant(
            name=check_tenant_name(name),
            created_at=datetime.now(UTC),
            policy=policy or TenantPolicy(),
            quotas=quotas or Quotas(),
        )
        try:
            async with self._database.write(durable=True) as connection:
                await connection.execute(sa.insert(tenants).values(_row(made)))
        except IntegrityError:
            raise TenantExists(name) from None
        return made

    async def get(self, name: str) -> Tenant:
        """As it was at most `RECENT_S` ago.

        Raises:
            TenantNotFound: there is none of this name.
        """
        return await self._recent.get(name)

    async def _read(self, name: str) -> Tenant:
        async with self._database.read() as connection:
            query = sa.select(tenants).where(tenants.c.name == name)
            found = (await connection.execute(query)).mappings().one_or_none()
        if found is None:
            raise TenantNotFound(name)
        return _tenant(found)

    async def list(self) -> list[Tenant]:
        """All of them, by name."""
        async with self._database.read() as connection:
            rows = (await connection.execute(sa.select(tenants).order_by(tenants.c.name))).mappings()
            return [_tenant(row) for row in rows]

    async def update(
        self,
        name: str,
        *,
        disabled: bool | None = None,
        policy: TenantPolicy | None = None,
        quotas: Quotas | None = None,
    ) -> Tenant:
        """Replace what is given. Sandboxes that exist keep what they have.

        Raises:
            TenantNotFound: there is none of this name.
            InvalidRequest: the tenant `default` would be disabled.
        """
        if disabled and name == DEFAULT_TENANT:
            raise InvalidRequest(f"the tenant {name!r} cannot be disabled: the server's administrators act in it")
        given: Mapping[str, Any] = {"disabled": disabled, "policy": policy, "quotas": quotas}
        changes = {key: value for key, value in given.items() if value is not None}
        async with self._database.write(durable=True) as connection:
            query = sa.select(tenants).where(tenants.c.name == name).with_for_update()
            found = (await connection.execute(query)).mappings().one_or_none()
            if found is None:
                raise TenantNotFound(name)
            changed = _tenant(found).model_copy(update=changes)
            if changes:
                await connection.execute(sa.update(tenants).where(tenants.c.name == name).values(_row(changed)))
        self._recent.forget(name)
        return changed

    async def require_removable(self, name: str) -> None:
        """
        Raises:
            TenantNotFound: there is none of this name.
            InvalidRequest: it is the tenant `default`.
        """
        if name == DEFAULT_TENANT:
            raise InvalidRequest(f"the tenant {name!r} cannot be deleted: it is that of the local command line")
        await self.get(name)

    async def delete(self, name: str) -> None:
        """Remove its record, its keys and all else that is stored for it, but for the audit log.

        Raises:
            TenantNotFound: there is none of this name.
            InvalidRequest: it is the tenant `default`.
        """
        await self.require_removable(name)
        async with self._database.write(durable=True) as connection:
            removed = await connection.execute(sa.delete(tenants).where(tenants.c.name == name))
            if removed.rowcount == 0:
                raise TenantNotFound(name)
        self._recent.forget(name)


def _row(tenant: Tenant) -> dict[str, Any]:
    values = tenant.model_dump(exclude={"policy", "quotas"})
    return {
        **values,
        "policy": tenant.policy.model_dump(mode="json"),
        "quotas": tenant.quotas.model_dump(mode="json"),
    }


def _tenant(row: sa.RowMapping) -> Tenant:
    return Tenant.model_validate(dict(row))
