"""API keys: who a request comes from, and what it may do.

Owns their text, what is stored of it, and the scopes. Not here: where a request has its key, and the answers to those
without one (`surfaces/rest/caller.py`).

A key is `atoll_<id>_<secret>`. The id is no secret. The secret has 256 random bits, so its SHA-256 can be stored and
compared as it is: there are no guesses that a slow hash would hold up, and a key is checked with each request. A row
that was read is used for `RECENT_S`: a key that another process revokes is refused after that, one that this process
revokes at once.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import sqlalchemy as sa
from pydantic import SecretStr
from sqlalchemy.exc import IntegrityError

from atoll.contract.errors import Forbidden, InvalidRequest, KeyNotFound, TenantNotFound, Unauthenticated
from atoll.contract.frozen import Field, Frozen
from atoll.server.database import Database, RecentReads
from atoll.server.tables import api_keys, tenants

KeyScope = Literal[
    "sandboxes:read",
    "sandboxes:write",
    "sandboxes:exec",
    "volumes",
    "images",
    "bundles",
    "agents:read",
    "agents:write",
    "chat",
    "webhooks",
    "audit",
    "keys",
    "tenants",
]
KeyRole = Literal["admin", "member"]
SCOPES: tuple[KeyScope, ...] = KeyScope.__args__  # type: ignore[attr-defined] # a Literal's values
MEMBER_SCOPES: tuple[KeyScope, ...] = tuple(scope for scope in SCOPES if scope not in ("audit", "keys", "tenants"))
"""Of members: they use the tenant. The others administer it."""
TENANT_ADMIN_SCOPES: tuple[KeyScope, ...] = tuple(scope for scope in SCOPES if scope != "tenants")
"""Of a tenant's administrators. Tenants are for those of the server."""
PREFIX = "atoll"
USE_NOTED_S = 60
"""`last_used_at` is written at most this often."""
_ID_LENGTH, _SECRET_LENGTH = 12, 43  # 43 characters of 62 have 256 bits
_LETTERS = string.ascii_letters + string.digits
_ID_LETTERS = string.ascii_lowercase + string.digits
_TEXT = re.compile(rf"{PREFIX}_([a-z0-9]{{{_ID_LENGTH}}})_([A-Za-z0-9]{{{_SECRET_LENGTH}}})")
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,100}")
_MAX_NOTED = 10_000
_NO_DIGEST = "0" * 64


class ApiKey(Frozen):
    id: str
    tenant: str | None
    """Unset: a key of the server's administrators, who may act in each tenant."""
    name: str
    """What people call it. It need not be the only one of this name."""
    role: KeyRole
    scopes: tuple[KeyScope, ...]
    created_at: datetime
    expires_at: datetime | None = None
    """Unset: never."""
    revoked_at: datetime | None = None
    """Unset: it is not revoked."""
    last_used_at: datetime | None = None
    """To the minute. Unset: never."""

    def require(self, scope: KeyScope) -> None:
        """
        Raises:
            Forbidden: the key does not have the scope.
        """
        if scope not in self.scopes:
            raise Forbidden(
                f"this needs an API key with the scope {scope!r}; this key has {', '.join(self.scopes) or 'none'}",
                scope=scope,
            )


class _Known(Frozen):
    """What is stored of a key, as it was read."""

    key: ApiKey
    secret_sha256: str = Field(repr=False)
    tenant_disabled: bool


class ApiKeys:
    """The API keys of a server."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._recent = RecentReads(self._read)
        self._noted: dict[str, float] = {}

    async def create(
        self,
        name: str,
        *,
        tenant: str | None,
        role: KeyRole = "member",
        scopes: Sequence[KeyScope] | None = None,
        ttl_s: float | None = None,
    ) -> tuple[ApiKey, SecretStr]:
        """A new key, and its text, which is shown once and stored nowhere. `tenant` unset: the server's, an admin's.

        `scopes` unset: all that the role has. `ttl_s` unset: it does not expire.

        Raises:
            InvalidRequest: the name is not allowed, or the role does not have one of the scopes.
            TenantNotFound: there is no such tenant.
        """
        key, secret, row = _new_key(name, tenant, role, scopes, ttl_s)
        try:
            async with self._database.write(durable=True) as connection:
                await connection.execute(sa.insert(api_keys).values(row))
        except IntegrityError:
            raise TenantNotFound(tenant or "") from None
        self._recent.forget(key.id)
        return key, secret

    async def create_first(self, name: str) -> SecretStr | None:
        """The text of a new key of the server's administrators, if there has never been one. None: there has."""
        _, secret, row = _new_key(name, None, "admin", None, None)
        async with self._database.write(durable=True) as connection:
            if not self._database.is_sqlite:
                await connection.execute(sa.text("LOCK TABLE api_keys IN SHARE ROW EXCLUSIVE MODE"))
            query = sa.select(sa.func.count()).select_from(api_keys).where(api_keys.c.tenant.is_(None))
            if (await connection.execute(query)).scalar_one():
                return None
            await connection.execute(sa.insert(api_keys).values(row))
        return secret

    async def verify(self, text: str) -> ApiKey:
        """The key with this text. It is noted that it was used, to the minute.

        Raises:
            Unauthenticated: there is none, it is revoked or it has expired, without saying which.
            Forbidden: its tenant is disabled.
        """
        matched = _TEXT.fullmatch(text)
        known = await self._recent.get(matched[1]) if matched else None
        given = hashlib.sha256((matched[2] if matched else text).encode(errors="surrogateescape")).hexdigest()
        right = hmac.compare_digest(given, known.secret_sha256 if known else _NO_DIGEST)
        if not right or known is None or not _is_valid(known.key):
            raise Unauthenticated(
                "the API key is not valid: this server does not know it, or it was revoked, or it has expired; "
                "`atoll keys ls` on the server's machine lists the keys"
            )
        if known.tenant_disabled:
            raise Forbidden(f"the tenant {known.key.tenant!r} is disabled")
        if time.monotonic() - self._noted.get(known.key.id, -USE_NOTED_S) >= USE_NOTED_S:
            await self._note_use(known.key.id)
        return known.key

    async def get(self, id: str) -> ApiKey:
        """
        Raises:
            KeyNotFound: no key has this id.
        """
        async with self._database.read() as connection:
            query = sa.select(api_keys).where(api_keys.c.id == id)
            found = (await connection.execute(query)).mappings().one_or_none()
        if found is None:
            raise KeyNotFound(id)
        return _key(found)

    async def list(self, tenant: str | None = None, *, everyone: bool = False) -> list[ApiKey]:
        """The keys of a tenant, or of the server's administrators, or of `everyone`; the oldest first."""
        query = sa.select(api_keys).order_by(api_keys.c.created_at, api_keys.c.id)
        if not everyone:
            query = query.where(api_keys.c.tenant == tenant)
        async with self._database.read() as connection:
            return [_key(row) for row in (await connection.execute(query)).mappings()]

    async def revoke(self, id: str) -> ApiKey:
        """Have a key refused from now on; by other processes, after `RECENT_S`. Revoking it again changes nothing.

        Raises:
            KeyNotFound: no key has this id.
        """
        async with self._database.write(durable=True) as connection:
            unset = sa.and_(api_keys.c.id == id, api_keys.c.revoked_at.is_(None))
            await connection.execute(sa.update(api_keys).where(unset).values(revoked_at=datetime.now(UTC)))
        self._recent.forget(id)
        return await self.get(id)

    def forget(self) -> None:
        """Ask the database again for each key: their tenants have changed."""
        self._recent.forget_all()

    # ---- verifying ----

    async def _read(self, id: str) -> _Known | None:
        joined = api_keys.outerjoin(tenants)
        query = sa.select(api_keys, tenants.c.disabled).select_from(joined).where(api_keys.c.id == id)
        async with self._database.read() as connection:
            row = (await connection.execute(query)).mappings().one_or_none()
        if row is None:
            return None
        return _Known(key=_key(row), secret_sha256=row["secret_sha256"], tenant_disabled=bool(row["disabled"]))

    async def _note_use(self, id: str) -> None:
        if len(self._noted) >= _MAX_NOTED:
            self._noted.clear()
        self._noted[id] = time.monotonic()
        async with self._database.write() as connection:
            await connection.execute(
                sa.update(api_keys).where(api_keys.c.id == id).values(last_used_at=datetime.now(UTC))
            )


def _new_key(
    name: str, tenant: str | None, role: KeyRole, scopes: Sequence[KeyScope] | None, ttl_s: float | None
) -> tuple[ApiKey, SecretStr, dict[str, Any]]:
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"{name!r} is not a name for a key; allowed are 1 to 100 printable characters")
    if tenant is None and role != "admin":
        raise InvalidRequest("a key without a tenant is the server's administrators'; give a tenant, or the role admin")
    if ttl_s is not None and not 1 <= ttl_s <= 1e9:
        raise InvalidRequest(f"a key can expire after 1 s to 30 years; {ttl_s:g} s was asked for")
    allowed = SCOPES if tenant is None else TENANT_ADMIN_SCOPES if role == "admin" else MEMBER_SCOPES
    if wrong := [scope for scope in scopes or () if scope not in allowed]:
        raise InvalidRequest(f"the role {role} does not have the scope {wrong[0]!r}; it has {', '.join(allowed)}")
    created_at = datetime.now(UTC)
    key = ApiKey(
        id="".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH)),
        tenant=tenant,
        name=name,
        role=role,
        scopes=allowed if scopes is None else tuple(scope for scope in allowed if scope in scopes),
        created_at=created_at,
        expires_at=None if ttl_s is None else created_at + timedelta(seconds=ttl_s),
    )
    secret = "".join(secrets.choice(_LETTERS) for _ in range(_SECRET_LENGTH))
    row = {
        **key.model_dump(),
        "scopes": list(key.scopes),
        "secret_sha256": hashlib.sha256(secret.encode()).hexdigest(),
    }
    return key, SecretStr(f"{PREFIX}_{key.id}_{secret}"), row


def _is_valid(key: ApiKey) -> bool:
    return key.revoked_at is None and (key.expires_at is None or datetime.now(UTC) < key.expires_at)


def _key(row: sa.RowMapping) -> ApiKey:
    return ApiKey.model_validate({name: row[name] for name in ApiKey.field_names()})
