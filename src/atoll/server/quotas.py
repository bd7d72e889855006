"""Quotas of tenants: what is used, what is being asked for, and what is refused.

Owns the sums, the rate of requests and the count of models' tokens. Not here: the quotas (`tenants.py`), and the limits
that the sums are of: those in force are in the records of sandboxes, warm pools and volumes, which the engine reads. So
nothing is counted twice or forgotten when a process dies in the middle: what exists is counted, and what is about to
exist is reserved in this process, which is the only one that creates for clients.

A sandbox counts with its limits for as long as it exists, whether it runs or sleeps. Any use wakes one that sleeps: a
command, a file, a preview, an MCP call. If its memory and CPUs were free while it slept, each of these would have to be
refused when others have taken them, or a tenant could have as many at work as it can wake. So waking and restoring ask
for nothing. A warm pool counts as the sandboxes that it keeps ready, a volume with its size for `disk_bytes`.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, NamedTuple

import anyio
import anyio.to_thread
import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from atoll.bundles.build import built_sizes
from atoll.contract.errors import InvalidRequest, QuotaExceeded, RateLimited
from atoll.contract.model import Limits, WarmPool
from atoll.server.database import Database
from atoll.server.tables import bundles, model_usage
from atoll.server.tenants import Quotas, Tenant

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

    from atoll.runtime.engine import LocalEngine

MAX_HELD_OUTPUT_BYTES = 1024**3
"""What one tenant's commands may hold of their output at once, until they are answered."""
_SUMS = ("memory_bytes", "cpus", "disk_bytes")
"""The quotas that are sums of the limit of the same name."""
_UNREADABLE = "unknown"
"""The runtime of a sandbox whose record cannot be read (`SandboxInfo`)."""
_OPTIONS = {"memory_bytes": "memory_bytes (--memory)", "cpus": "cpus (--cpus)", "disk_bytes": "disk_bytes (--disk)"}
_VOLUME_OPTION = "size_bytes (--size)"


class _Holder(NamedTuple):
    """Something that counts for quotas."""

    kind: Literal["sandbox", "volume", "warm pool", "bundle", "built bundle"]
    name: str


_Share = Mapping[str, float | None]
"""What a holder counts for each quota; 0 if it is left out. None: it has no limit that could be counted."""


class QuotaLedger:
    """What the tenants of one server use."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._reserved: defaultdict[str, dict[object, Mapping[_Holder, _Share]]] = defaultdict(dict)
        self._counting: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        self._buckets: dict[str, tuple[float, float]] = {}
        self._held_output: Counter[str] = Counter()

    def reserve(
        self, tenant: Tenant, engine: LocalEngine, wanted: Mapping[str, Limits]
    ) -> AbstractAsyncContextManager[None]:
        """While the block runs, count these sandboxes, by name, with these limits: new ones, or one that gets other
        limits. They are the limits in force (`Engine.effective_limits`).

        Of requests at the same time, exactly as many get in as there is room for.

        Raises:
            QuotaExceeded: there is no room; nothing is reserved.
            InvalidRequest: a quota is set, and a sandbox has no limit that could be counted.
        """
        return self._reserve(
            tenant, engine, {_Holder("sandbox", name): _of_limits(limits) for name, limits in wanted.items()}
        )

    def reserve_pool(self, tenant: Tenant, engine: LocalEngine, pool: WarmPool) -> AbstractAsyncContextManager[None]:
        """While the block runs, count a warm pool as one of this size.

        Raises:
            what `reserve` raises.
        """
        return self._reserve(tenant, engine, {_pool(pool): _of_limits(pool.limits, pool.count)})

    def reserve_volume(
        self, tenant: Tenant, engine: LocalEngine, name: str, size_bytes: int | None
    ) -> AbstractAsyncContextManager[None]:
        """While the block runs, count a volume of this size.

        Raises:
            what `reserve` raises.
        """
        return self._reserve(tenant, engine, {_Holder("volume", name): {"disk_bytes": size_bytes}})

    def reserve_bundle(
        self, tenant: Tenant, engine: LocalEngine, sha256: str, size_bytes: int
    ) -> AbstractAsyncContextManager[None]:
        """While the block runs, count a stored bundle.

        Raises:
            what `reserve` raises.
        """
        return self._reserve(tenant, engine, {_Holder("bundle", sha256): {"disk_bytes": size_bytes}})

    async def _stored(self, tenant: str, engine: LocalEngine) -> dict[_Holder, _Share]:
        """The bundles of a tenant, and what was built of them."""
        built = {
            _Holder("built bundle", each): {"disk_bytes": size} for each, size in (await built_sizes(engine)).items()
        }
        query = sa.select(bundles.c.sha256, bundles.c.size_bytes).where(bundles.c.tenant == tenant)
        async with self._database.read() as connection:
            rows = await connection.execute(query)
        return {**built, **{_Holder("bundle", row.sha256): {"disk_bytes": row.size_bytes} for row in rows}}

    @asynccontextmanager
    async def _reserve(
        self, tenant: Tenant, engine: LocalEngine, wanted: Mapping[_Holder, _Share]
    ) -> AsyncIterator[None]:
        place = object()
        if _is_counted(tenant.quotas):
            async with self._counting[tenant.name]:
                existing = await _existing(engine)
                if tenant.quotas.disk_bytes is not None:
                    existing |= await self._stored(tenant.name, engine)
                pending = list(self._reserved[tenant.name].values())
                _check(tenant.quotas, existing, pending, wanted)
                self._reserved[tenant.name][place] = wanted
        try:
            yield
        finally:
            self._reserved[tenant.name].pop(place, None)

    async def usage(self, tenant: Tenant, engine: LocalEngine) -> dict[str, float]:
        """What counts for each quota now, with reservations; `model_tokens` of this month."""
        pending = list(self._reserved[tenant.name].values())
        existing = {**await _existing(engine), **await self._stored(tenant.name, engine)}
        used = _sums(_counted(existing, pending))
        return {**used, "model_tokens": await self.tokens(tenant.name)}

    # ---- requests ----

    @contextmanager
    def hold_output(self, tenant: Tenant, size_bytes: int) -> Iterator[None]:
        """While the block runs, count what one command may hold of its output in this process.

        Raises:
            QuotaExceeded: with those that run it would be more than one tenant may hold.
        """
        used = self._held_output[tenant.name]
        if used + size_bytes > MAX_HELD_OUTPUT_BYTES:
            raise QuotaExceeded(
                "output_bytes",
                used=used,
                asked=size_bytes,
                allowed=MAX_HELD_OUTPUT_BYTES,
                message=f"the commands of this tenant may hold {MAX_HELD_OUTPUT_BYTES >> 20} MiB of output at once, "
                "output_limit_bytes each of stdout and of stderr; lower output_limit_bytes, or ask for events",
            )
        self._held_output[tenant.name] += size_bytes
        try:
            yield
        finally:
            self._held_output[tenant.name] -= size_bytes
            if not self._held_output[tenant.name]:
                del self._held_output[tenant.name]

    def check_rate(self, tenant: Tenant) -> None:
        """Count one request.

        Raises:
            RateLimited: there were too many; this one is not counted.
        """
        allowed = tenant.quotas.requests_per_minute
        if allowed is None:
            return
        now = time.monotonic()
        left, at = self._buckets.get(tenant.name, (float(allowed), now))
        left = min(float(allowed), left + (now - at) * allowed / 60)
        if left < 1:
            self._buckets[tenant.name] = left, now
            raise RateLimited(allowed, (1 - left) * 60 / allowed)
        self._buckets[tenant.name] = left - 1, now

    # ---- models ----

    async def check_tokens(self, tenant: Tenant) -> None:
        """Before a request to a model.

        Raises:
            QuotaExceeded: the tokens of this month are used up.
        """
        allowed = tenant.quotas.model_tokens
        if allowed is not None and (used := await self.tokens(tenant.name)) >= allowed:
            raise QuotaExceeded(
                "model_tokens",
                used=used,
                asked=1,
                allowed=allowed,
                message=f"the tenant's quota of model_tokens is used up: {used} of {allowed} in this month (UTC); wait "
                "for the next one, or have the quota raised",
            )

    async def spend_tokens(self, tenant: str, tokens: int) -> int:
        """Count tokens that a model has used. Returns those of this month."""
        async with self._database.write() as connection:
            return await connection.run_sync(self.spend_within, tenant, tokens)

    def spend_within(self, connection: sa.Connection, tenant: str, tokens: int) -> int:
        """As `spend_tokens`, in the caller's transaction."""
        insert = self._insert_usage()
        statement = insert.values(tenant=tenant, month=_month(), tokens=tokens).on_conflict_do_update(
            index_elements=[model_usage.c.tenant, model_usage.c.month],
            set_={"tokens": model_usage.c.tokens + insert.excluded.tokens},
        )
        total: int = connection.execute(statement.returning(model_usage.c.tokens)).scalar_one()
        return total

    def _insert_usage(self) -> sqlite.Insert | postgresql.Insert:
        if self._database.is_sqlite:
            return sqlite.insert(model_usage)
        from sqlalchemy.dialects import postgresql  # here: it would take a twentieth of a server's start

        return postgresql.insert(model_usage)

    async def tokens(self, tenant: str) -> int:
        """Tokens that models have used for a tenant in this month."""
        this_month = sa.and_(model_usage.c.tenant == tenant, model_usage.c.month == _month())
        async with self._database.read() as connection:
            used = (await connection.execute(sa.select(model_usage.c.tokens).where(this_month))).scalar_one_or_none()
        return used or 0


def _month() -> str:
    return f"{datetime.now(UTC):%Y-%m}"


def _is_counted(quotas: Quotas) -> bool:
    return any(getattr(quotas, quota) is not None for quota in ("sandboxes", *_SUMS))


async def _existing(engine: LocalEngine) -> dict[_Holder, _Share]:
    found: dict[_Holder, _Share] = {
        _Holder("sandbox", info.name): {"sandboxes": 1} if info.runtime == _UNREADABLE else _of_limits(info.limits)
        for info in await engine.list()
    }
    found.update({_pool(pool): _of_limits(pool.limits, pool.count) for pool in await engine.warm_pools()})
    sizes = await anyio.to_thread.run_sync(engine.volumes.sizes)
    return {**found, **{_Holder("volume", name): {"disk_bytes": size} for name, size in sizes.items()}}


def _of_limits(limits: Limits, count: int = 1) -> _Share:
    """Of so many sandboxes with these limits."""
    if count == 0:
        return {}
    each = {quota: getattr(limits, quota) for quota in _SUMS}
    return {"sandboxes": count, **{quota: None if limit is None else count * limit for quota, limit in each.items()}}


def _pool(pool: WarmPool) -> _Holder:
    return _Holder("warm pool", f"{pool.image} {pool.runtime} {pool.limits.model_dump_json(exclude_none=True)}")


def _counted(
    existing: Mapping[_Holder, _Share], pending: Iterable[Mapping[_Holder, _Share]]
) -> dict[_Holder, list[_Share]]:
    """All that may be in force for each: one that is being changed has its limits and those it is to have."""
    found = {holder: [share] for holder, share in existing.items()}
    for reservation in pending:
        for holder, share in reservation.items():
            found.setdefault(holder, []).append(share)
    return found


def _sums(counted: Mapping[_Holder, list[_Share]]) -> dict[str, float]:
    return {
        quota: sum(max(share.get(quota) or 0 for share in shares) for shares in counted.values())
        for quota in ("sandboxes", *_SUMS)
    }


def _check(
    quotas: Quotas,
    existing: Mapping[_Holder, _Share],
    pending: list[Mapping[_Holder, _Share]],
    wanted: Mapping[_Holder, _Share],
) -> None:
    limited = [quota for quota in ("sandboxes", *_SUMS) if getattr(quotas, quota) is not None]
    for quota in limited:
        for holder in _without_limit(wanted, quota):
            option = _VOLUME_OPTION if holder.kind == "volume" else _OPTIONS[quota]
            raise InvalidRequest(
                f"this tenant has a quota of {quota}, and the {holder.kind} {holder.name!r} would have no limit that "
                f"could be counted; give it {option}",
                quota=quota,
            )
        for holder in _without_limit(existing, quota):
            if holder in wanted:
                continue
            way_out = (
                f"give that sandbox {_OPTIONS[quota]}, or destroy it" if holder.kind == "sandbox" else "remove it first"
            )
            raise InvalidRequest(
                f"this tenant has a quota of {quota}, and its {holder.kind} {holder.name!r} is older and has no limit "
                f"that could be counted; {way_out}",
                quota=quota,
            )
    before, after = _sums(_counted(existing, pending)), _sums(_counted(existing, [*pending, wanted]))
    for quota in limited:
        allowed = getattr(quotas, quota)
        # What asks for no more is not refused, also when a quota was lowered below what is used.
        if after[quota] > max(allowed, before[quota]):
            raise QuotaExceeded(quota, used=before[quota], asked=after[quota] - before[quota], allowed=allowed)


def _without_limit(shares: Mapping[_Holder, _Share], quota: str) -> list[_Holder]:
    return [holder for holder, share in shares.items() if share.get(quota, 0) is None]
