"""Webhooks: events delivered to the URLs of tenants, signed, until they are acknowledged.

Owns who wants which events, the deliveries, their signatures and retries, and which addresses may be called. A delivery
is written in the transaction of its event (`enqueue`), so that none is lost; it is attempted until an answer is 2xx,
and never after that answer was stored. Only if this process dies between an answer and its commit is a delivery sent
again: its id, in the header Atoll-Delivery, is the same each time.

The URL is a tenant's, and hostile: redirects are not followed, and nothing of the answer but its status is kept. Not
here: which address is connected to (`outgoing.py`), events (`events.py`), and HTTP routes.
"""

from __future__ import annotations

import builtins
import hashlib
import hmac
import json
import random
import secrets
import ssl
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal
from urllib.parse import SplitResult

import anyio
import h11
import sqlalchemy as sa
from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncConnection

from atoll.contract.errors import AtollError, Conflict, Forbidden, InvalidRequest, WebhookNotFound
from atoll.contract.frozen import Frozen
from atoll.contract.network import NetworkPolicy, read_host
from atoll.runtime.egress.policy import PolicyEvaluator, Refusal
from atoll.runtime.secrets.vault import SandboxSecrets, Vault
from atoll.server import outgoing
from atoll.server.database import Database
from atoll.server.events import EVENT_TYPES, EventType, SandboxEvent
from atoll.server.tables import webhook_deliveries, webhooks

SIGNATURE_HEADER = "Atoll-Signature"
MAX_WEBHOOKS = 20
"""Of one tenant."""
MAX_PENDING = 10_000
"""Deliveries of one webhook that are still to be made. Further ones fail at once."""
KEPT_DELIVERIES = 1000
"""Of one webhook that are done."""
DELAYS_S = (5.0, 30.0, 120.0, 600.0, 1800.0, 7200.0, 21_600.0, 43_200.0)
"""Between attempts, each up to a quarter longer or shorter. After the last, a delivery has failed."""
ATTEMPT_TIMEOUT_S = 15.0
_LEASE_S = 60.0
"""An attempt of a process that died is made again after this, if it was not the first."""
_AT_ONCE = 16
_AT_ONCE_PER_WEBHOOK = 2
_AT_ONCE_PER_TENANT = 4
"""Of all its webhooks: hosts that never answer must not take the places of other tenants."""
_IDLE_S = 15.0
_PRUNE_S = 600.0
_SEALED_AS = "webhook"
_SEEDED = random.SystemRandom()


class Webhook(Frozen):
    """A URL that gets the events of a tenant."""

    id: str
    url: str
    types: tuple[EventType, ...] = ()
    """Empty: all."""
    disabled: bool = False
    """True: events of this time are not delivered, not even later."""
    created_at: datetime


class WebhookDelivery(Frozen):
    """An event on its way to a webhook."""

    id: int
    webhook: str
    event: int | None = None
    """Unset: it is a test."""
    type: str
    status: Literal["pending", "delivered", "failed"]
    attempts: int
    created_at: datetime
    next_attempt_at: datetime | None = None
    """Unset: there is none."""
    delivered_at: datetime | None = None
    response_status: int | None = None
    """Of the last attempt. Unset: there was no answer."""
    error: str | None = None
    """Why the last attempt failed."""


class Webhooks:
    """The webhooks of all tenants of a server. `allow` are rules for addresses that are not public."""

    def __init__(
        self, database: Database, state_dir: Path, key: SecretStr | None, *, allow: Sequence[str] = ()
    ) -> None:
        self._database = database
        self._vault = Vault(state_dir, key)
        self._policy = PolicyEvaluator(NetworkPolicy(allow=("*", *allow)))
        self._wake = anyio.Event()
        self._running: Counter[str] = Counter()
        """Attempts under way, by webhook."""
        self._running_of: Counter[str] = Counter()
        """And by tenant."""
        self._pruned_at = float("-inf")
        self.delays_s: Sequence[float] = DELAYS_S

    # ---- records ----

    async def create(self, tenant: str, url: str, types: Sequence[EventType] = ()) -> tuple[Webhook, SecretStr]:
        """A new webhook and the secret that signs its deliveries, which is shown once.

        Raises:
            InvalidRequest: the URL is not one that can be called.
            Conflict: the tenant has too many webhooks.
            Forbidden: its address is not public, and the operator does not allow it.
        """
        self._check_url(url)
        _check_types(types)
        secret = f"whsec_{secrets.token_urlsafe(32)}"
        made = Webhook(
            id=f"wh_{secrets.token_hex(8)}", url=url, types=tuple(dict.fromkeys(types)), created_at=datetime.now(UTC)
        )
        sealed = self._vault.seal(SandboxSecrets(env={_SEALED_AS: secret}))
        async with self._database.write(durable=True) as connection:
            count = sa.select(sa.func.count()).select_from(webhooks).where(webhooks.c.tenant == tenant)
            if (await connection.execute(count)).scalar_one() >= MAX_WEBHOOKS:
                raise Conflict(f"a tenant may have {MAX_WEBHOOKS} webhooks; delete one first")
            row = {**made.model_dump(), "types": list(made.types), "tenant": tenant, "secret": sealed}
            await connection.execute(sa.insert(webhooks).values(row))
        return made, SecretStr(secret)

    async def get(self, tenant: str, id: str) -> Webhook:
        """
        Raises:
            WebhookNotFound: the tenant has none with this id.
        """
        async with self._database.read() as connection:
            return _webhook(await self._row(connection, tenant, id))

    async def list(self, tenant: str) -> builtins.list[Webhook]:
        """By age."""
        query = sa.select(webhooks).where(webhooks.c.tenant == tenant).order_by(webhooks.c.created_at, webhooks.c.id)
        async with self._database.read() as connection:
            return [_webhook(row) for row in await connection.execute(query)]

    async def update(
        self,
        tenant: str,
        id: str,
        *,
        url: str | None = None,
        types: Sequence[EventType] | None = None,
        disabled: bool | None = None,
    ) -> Webhook:
        """Change what is given.

        Raises:
            WebhookNotFound: the tenant has none with this id.
            InvalidRequest, Forbidden: as `create`.
        """
        if url is not None:
            self._check_url(url)
        _check_types(types or ())
        given = {"url": url, "types": None if types is None else [*dict.fromkeys(types)], "disabled": disabled}
        changes = {name: value for name, value in given.items() if value is not None}
        async with self._database.write() as connection:
            row = await self._row(connection, tenant, id)
            if changes:
                await connection.execute(sa.update(webhooks).where(webhooks.c.id == id).values(changes))
                row = await self._row(connection, tenant, id)
            return _webhook(row)

    async def delete(self, tenant: str, id: str) -> None:
        """Delete a webhook with its deliveries. One that is under way may still arrive.

        Raises:
            WebhookNotFound: the tenant has none with this id.
        """
        async with self._database.write(durable=True) as connection:
            await self._row(connection, tenant, id)
            await connection.execute(sa.delete(webhook_deliveries).where(webhook_deliveries.c.webhook == id))
            await connection.execute(sa.delete(webhooks).where(webhooks.c.id == id))

    async def deliveries(
        self, tenant: str, id: str, *, before: int | None = None, limit: int = 100
    ) -> builtins.list[WebhookDelivery]:
        """The latest first; those `before` an id, for the next page.

        Raises:
            WebhookNotFound: the tenant has none with this id.
        """
        query = sa.select(webhook_deliveries).where(webhook_deliveries.c.webhook == id)
        if before is not None:
            query = query.where(webhook_deliveries.c.id < before)
        async with self._database.read() as connection:
            await self._row(connection, tenant, id)
            rows = await connection.execute(query.order_by(webhook_deliveries.c.id.desc()).limit(limit))
            return [_delivery(row) for row in rows]

    async def test(self, tenant: str, id: str) -> WebhookDelivery:
        """Send something of the type `test` to a webhook, whatever types it wants.

        Raises:
            WebhookNotFound: the tenant has none with this id.
        """
        body = json.dumps({"id": None, "type": "test", "tenant": tenant, "time": datetime.now(UTC).isoformat()})
        async with self._database.write() as connection:
            await self._row(connection, tenant, id)
            row = _new_delivery(id, None, "test", body)
            insert = sa.insert(webhook_deliveries).values(row).returning(webhook_deliveries)
            made = _delivery((await connection.execute(insert)).one())
        self.wake()
        return made

    async def _row(self, connection: AsyncConnection, tenant: str, id: str) -> sa.Row[Any]:
        found = (await connection.execute(sa.select(webhooks).where(webhooks.c.id == id))).one_or_none()
        if found is None or found.tenant != tenant:
            raise WebhookNotFound(id)
        return found

    # ---- what is to be delivered ----

    async def enqueue(self, connection: AsyncConnection, written: Sequence[SandboxEvent]) -> None:
        """Write the deliveries of events, in their transaction."""
        tenants = {event.tenant for event in written}
        query = sa.select(webhooks.c.id, webhooks.c.tenant, webhooks.c.types).where(
            webhooks.c.tenant.in_(tenants), webhooks.c.disabled.is_(False)
        )
        rows = [
            _new_delivery(webhook.id, event.id, event.type, event.model_dump_json())
            for webhook in await connection.execute(query)
            for event in written
            if event.tenant == webhook.tenant and (not webhook.types or event.type in webhook.types)
        ]
        if rows:
            await connection.execute(sa.insert(webhook_deliveries), rows)

    def wake(self) -> None:
        """Have deliveries looked for now."""
        waiting, self._wake = self._wake, anyio.Event()
        waiting.set()

    async def deliver(self) -> None:
        """Make deliveries, until this is cancelled. One process does so at a time."""
        await self._free_interrupted()
        async with anyio.create_task_group() as tasks:
            while True:
                wake = self._wake
                for claimed in await self._claim():
                    self._running[claimed.webhook] += 1
                    self._running_of[claimed.tenant] += 1
                    tasks.start_soon(self._attempt, claimed)
                if time.monotonic() - self._pruned_at > _PRUNE_S:
                    self._pruned_at = time.monotonic()
                    await self.prune()
                with anyio.move_on_after(await self._until_due()):
                    await wake.wait()

    async def _claim(self) -> builtins.list[sa.Row[Any]]:
        """Deliveries that are due, for this process alone until their lease is over."""
        table, now = webhook_deliveries, datetime.now(UTC)
        due = sa.and_(table.c.status == "pending", table.c.next_attempt_at <= now)
        async with self._database.read() as connection:
            of_tenants = sa.select(table.c.webhook, webhooks.c.tenant).join(webhooks).where(due).distinct()
            waiting = (await connection.execute(of_tenants)).all()
        claimed: list[sa.Row[Any]] = []
        busy = Counter(self._running_of)
        for webhook, tenant in sorted(waiting, key=lambda each: busy[each.tenant]):
            free = min(
                _AT_ONCE_PER_WEBHOOK - self._running[webhook],
                _AT_ONCE_PER_TENANT - busy[tenant],
                _AT_ONCE - self._running.total() - len(claimed),
            )
            if free <= 0:
                continue
            query = (
                sa.select(table, webhooks.c.url, webhooks.c.secret, webhooks.c.tenant)
                .join(webhooks, webhooks.c.id == table.c.webhook)
                .where(due, table.c.webhook == webhook)
                .order_by(table.c.id)
                .limit(free)
            )
            async with self._database.write() as connection:
                for row in (await connection.execute(query)).all():
                    mine = sa.and_(table.c.id == row.id, table.c.next_attempt_at == row.next_attempt_at, due)
                    lease = {"next_attempt_at": now + timedelta(seconds=_LEASE_S)}
                    if (await connection.execute(sa.update(table).where(mine).values(lease))).rowcount:
                        claimed.append(row)
                        busy[tenant] += 1
        return claimed

    async def _free_interrupted(self) -> None:
        """Have first attempts of a process that died made now, not at the end of their lease."""
        table, now = webhook_deliveries, datetime.now(UTC)
        interrupted = sa.and_(table.c.status == "pending", table.c.attempts == 0, table.c.next_attempt_at > now)
        async with self._database.write() as connection:
            await connection.execute(sa.update(table).where(interrupted).values(next_attempt_at=now))

    async def _until_due(self) -> float:
        query = sa.select(sa.func.min(webhook_deliveries.c.next_attempt_at)).where(
            webhook_deliveries.c.status == "pending"
        )
        async with self._database.read() as connection:
            due = (await connection.execute(query)).scalar_one_or_none()
        wait_s = _IDLE_S if due is None else (due - datetime.now(UTC)).total_seconds()
        # What is due and waits for a free place is begun when an attempt ends, which wakes this.
        return _IDLE_S if wait_s <= 0 and self._running.total() else min(max(wait_s, 0.02), _IDLE_S)

    async def _attempt(self, delivery: sa.Row[Any]) -> None:
        status, error = None, None
        try:
            secret = self._vault.open(delivery.secret).env[_SEALED_AS]
            with anyio.fail_after(ATTEMPT_TIMEOUT_S):
                status = await self._post(delivery, secret)
            if not 200 <= status < 300:
                error = f"the answer was {status}; it has to be 2xx"
        except TimeoutError:
            error = f"there was no answer within {ATTEMPT_TIMEOUT_S:g} s"
        except ssl.SSLError as failure:
            error = f"TLS failed: {failure.reason or 'the connection was closed'}"
        except (AtollError, ValueError) as failure:
            error = str(failure)
        except (OSError, anyio.BrokenResourceError, anyio.EndOfStream, anyio.ClosedResourceError):
            error = "the connection could not be made, or was cut"
        except h11.RemoteProtocolError:
            error = "the answer was not HTTP"
        finally:
            self._running[delivery.webhook] -= 1
            self._running_of[delivery.tenant] -= 1
        await self._store(delivery, status, error)
        self.wake()

    async def _store(self, delivery: sa.Row[Any], status: int | None, error: str | None) -> None:
        attempts, now = delivery.attempts + 1, datetime.now(UTC)
        values: dict[str, Any] = {"attempts": attempts, "response_status": status, "error": error}
        if error is None:
            values |= {"status": "delivered", "delivered_at": now, "next_attempt_at": None}
        elif attempts > len(self.delays_s):
            values |= {"status": "failed", "next_attempt_at": None}
        else:
            delay_s = self.delays_s[attempts - 1] * _SEEDED.uniform(0.75, 1.25)
            values |= {"next_attempt_at": now + timedelta(seconds=delay_s)}
        # An acknowledgement is on the disk before anything else happens.
        async with self._database.write(durable=error is None) as connection:
            mine = webhook_deliveries.c.id == delivery.id
            await connection.execute(sa.update(webhook_deliveries).where(mine).values(values))

    async def prune(self) -> None:
        """Remove deliveries that were done long ago; fail those of webhooks that take none."""
        table = webhook_deliveries
        async with self._database.write() as connection:
            for webhook in (await connection.execute(sa.select(table.c.webhook).distinct())).scalars().all():
                done = sa.and_(table.c.webhook == webhook, table.c.status != "pending")
                pending = sa.and_(table.c.webhook == webhook, table.c.status == "pending")
                too_old = await _id_at(connection, done, KEPT_DELIVERIES)
                if too_old is not None:
                    await connection.execute(sa.delete(table).where(done, table.c.id <= too_old))
                too_many = await _id_at(connection, pending, MAX_PENDING)
                if too_many is not None:
                    failed = {"status": "failed", "next_attempt_at": None, "error": "too many deliveries were waiting"}
                    await connection.execute(sa.update(table).where(pending, table.c.id <= too_many).values(failed))

    # ---- one attempt ----

    def _check_url(self, url: str) -> SplitResult:
        split = _split(url)
        host = read_host(split.hostname or "")
        if not isinstance(host, str) or host == "localhost" or host.endswith(".localhost"):
            address = host if not isinstance(host, str) else ip_address("127.0.0.1")
            if isinstance(self._policy.allowed_addresses(address, outgoing.port_of(split), [address]), Refusal):
                raise Forbidden(
                    "webhooks may call public addresses only; the operator can allow others (webhook_allow)"
                )
        return split

    async def _post(self, delivery: sa.Row[Any], secret: str) -> int:
        split = _split(delivery.url)
        refused = "the address is not public; the operator can allow others (webhook_allow)"
        stream = await outgoing.connect(split, self._policy, refused=refused)
        try:
            return await _exchange(stream, split, delivery, secret)
        finally:
            await anyio.aclose_forcefully(stream)


async def _exchange(stream: anyio.abc.ByteStream, split: SplitResult, delivery: sa.Row[Any], secret: str) -> int:
    """The status of the answer. Nothing else of it is read."""
    body = delivery.body.encode()
    connection = h11.Connection(our_role=h11.CLIENT)
    headers = [
        ("Host", split.netloc.rpartition("@")[2]),
        ("Content-Type", "application/json"),
        ("Content-Length", str(len(body))),
        ("User-Agent", "Atoll-Webhooks"),
        ("Atoll-Delivery", str(delivery.id)),
        ("Atoll-Event", delivery.type),
        (SIGNATURE_HEADER, sign(secret, body, int(time.time()))),
        ("Connection", "close"),
    ]
    request = h11.Request(method="POST", target=outgoing.target_of(split), headers=headers)
    sent = (connection.send(request), connection.send(h11.Data(data=body)), connection.send(h11.EndOfMessage()))
    await stream.send(b"".join(part or b"" for part in sent))
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Response):
            return int(event.status_code)
        if event is h11.NEED_DATA:
            connection.receive_data(await stream.receive())
        elif not isinstance(event, h11.InformationalResponse):
            raise h11.RemoteProtocolError("no answer")


def sign(secret: str, body: bytes, moment: int) -> str:
    """The value of the header Atoll-Signature: HMAC-SHA256 over the time, a dot and the body."""
    digest = hmac.new(secret.encode(), f"{moment}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={moment},v1={digest}"


def _split(url: str) -> SplitResult:
    return outgoing.split_url(url, example="https://example.com/hook")


def _check_types(types: Sequence[str]) -> None:
    if wrong := [each for each in types if each not in EVENT_TYPES]:
        raise InvalidRequest(f"types: {wrong[0]!r} is not a type of events; there are {', '.join(EVENT_TYPES)}")


def _new_delivery(webhook: str, event: int | None, type: str, body: str) -> dict[str, Any]:
    now = datetime.now(UTC)
    return {
        "webhook": webhook,
        "event": event,
        "type": type,
        "body": body,
        "status": "pending",
        "attempts": 0,
        "created_at": now,
        "next_attempt_at": now,
    }


async def _id_at(connection: AsyncConnection, where: sa.ColumnElement[bool], place: int) -> int | None:
    """The id of the delivery at a place, the latest being the first."""
    table = webhook_deliveries
    query = sa.select(table.c.id).where(where).order_by(table.c.id.desc()).offset(place).limit(1)
    found: int | None = (await connection.execute(query)).scalar_one_or_none()
    return found


def _webhook(row: sa.Row[Any]) -> Webhook:
    return Webhook.model_validate({name: getattr(row, name) for name in Webhook.field_names()})


def _delivery(row: sa.Row[Any]) -> WebhookDelivery:
    return WebhookDelivery.model_validate({name: getattr(row, name) for name in WebhookDelivery.field_names()})
