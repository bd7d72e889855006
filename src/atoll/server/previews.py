"""Previews of the server: ports of sandboxes at URLs that stay the same until they are taken back.

Owns which ports are exposed, under which names, with which tokens, and keeps them in the database: a restart changes no
URL. Names are those of the engine's previews (`label_of` in `runtime/previews/router.py`). Not here: how a request is
passed on (`runtime/previews/`), and the address (`surfaces/serve/previews.py` sets it when the server listens). Used by
`server.py` and `surfaces/`.

One process serves a state directory, so what it holds in memory is what the database has. A preview belongs to a
sandbox and not to its name: another sandbox that gets the name later does not get the URL.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import anyio
import sqlalchemy as sa

from atoll.contract.errors import SandboxDied, SandboxNotFound
from atoll.contract.model import Preview
from atoll.runtime.http1 import Headers
from atoll.runtime.previews.router import (
    PARAMETER,
    PREFIX,
    ExposedPort,
    check_port,
    find_exposed,
    label_of,
    wait_listening,
)
from atoll.server.tables import previews as table

if TYPE_CHECKING:
    from atoll.runtime.guest.ports import PortConnection
    from atoll.runtime.sandbox import Sandbox
    from atoll.server.database import Database
    from atoll.server.engines import TenantEngines

MAX_LABEL_CHARS = 63


@dataclass(frozen=True)
class PreviewAddress:
    """Where clients reach previews."""

    url: str = "http://127.0.0.1:8080"
    """Of the server."""
    domain: str = "atoll.localhost"
    """Previews are at names below it."""

    @property
    def scheme(self) -> str:
        return self.url.partition(":")[0]

    def urls(self, label: str, token: str) -> tuple[str, str]:
        """The URL by host name and that by path. Both are by path if the label is too long for a host name."""
        by_path = f"{self.url}{PREFIX}{label}/?{PARAMETER}={token}"
        if len(label) > MAX_LABEL_CHARS:
            return by_path, by_path
        port = self.url.rpartition("]")[2].partition("//")[2].partition(":")[2] or self.url.rpartition("]:")[2]
        suffix = f":{port}" if port.isdecimal() else ""
        return f"{self.scheme}://{label}.{self.domain}{suffix}/?{PARAMETER}={token}", by_path


class ServerPreviews:
    """The previews of all tenants."""

    def __init__(self, database: Database, engines: TenantEngines) -> None:
        self._database = database
        self._engines = engines
        self._exposed: dict[str, ExposedPort] = {}
        self._of: dict[tuple[str, str, int], str] = {}
        """The label of each, by tenant, id of the sandbox, and port."""
        self._exposing = anyio.Lock()
        self.address = PreviewAddress()
        self.on_request: Callable[[], Headers] = list
        """Called for each request of a preview. Gives headers that its response gets."""

    async def load(self) -> None:
        """Take up those of before. Called once, when the server opens."""
        async with self._database.read() as connection:
            for row in (await connection.execute(sa.select(table))).all():
                self._remember(row.tenant, row.sandbox_id, row.sandbox, row.port, row.token)

    async def expose(self, tenant: str, sandbox: Sandbox, port: int, *, wait_s: float = 0) -> Preview:
        """Expose a port of a sandbox, at the URL that it has had, if it is exposed already.

        Raises:
            InvalidRequest: it is not a port.
            PortRefused: nothing listened on it within `wait_s`.
            DatabaseUnavailable: the database does not answer.
        """
        check_port(port, wait_s)
        key = (tenant, sandbox.id, port)
        if wait_s > 0:
            known = self._of.get(key)
            await wait_listening(
                self._exposed[known] if known else self._make(*key[:2], sandbox.name, port, ""), wait_s
            )
        async with self._exposing:  # of requests at the same time, the first makes the URL of all
            label = self._of.get(key)
            if label is None:
                token = secrets.token_urlsafe(24)
                await self._store(tenant, sandbox, port, token)
                label = label_of(tenant, sandbox.name, port)
                self._forget(label)
                self._remember(tenant, sandbox.id, sandbox.name, port, token)
            return self._shown(label)

    async def _store(self, tenant: str, sandbox: Sandbox, port: int, token: str) -> None:
        """In the place of one that an earlier sandbox of this name had."""
        stale = (table.c.tenant == tenant) & (table.c.sandbox == sandbox.name) & (table.c.port == port)
        row = {
            "tenant": tenant,
            "sandbox_id": sandbox.id,
            "sandbox": sandbox.name,
            "port": port,
            "token": token,
            "created_at": datetime.now(UTC),
        }
        async with self._database.write(durable=True) as connection:
            await connection.execute(sa.delete(table).where(stale))
            await connection.execute(sa.insert(table).values(row))

    async def list(self, tenant: str, sandbox: Sandbox | None = None) -> list[Preview]:
        """The previews of a tenant, or of one of its sandboxes, by sandbox and port."""
        found = [
            self._shown(label)
            for (owner, id, _port), label in self._of.items()
            if owner == tenant and (sandbox is None or sandbox.id == id)
        ]
        return sorted(found, key=lambda preview: (preview.sandbox, preview.port))

    async def take_back(self, tenant: str, sandbox_id: str, port: int | None = None) -> bool:
        """End a preview, or all of a sandbox, and what is under way through it. False: there was none."""
        ended = [key for key in self._of if key[:2] == (tenant, sandbox_id) and port in (None, key[2])]
        if not ended:
            return False
        mine = (table.c.tenant == tenant) & (table.c.sandbox_id == sandbox_id)
        async with self._database.write(durable=True) as connection:
            await connection.execute(sa.delete(table).where(mine if port is None else mine & (table.c.port == port)))
        for key in ended:
            self._forget(self._of[key])
        return True

    # ------------------------------------------------------------------------------ the site of `PreviewRouter`

    @property
    def scheme(self) -> bytes:
        return self.address.scheme.encode()

    @property
    def cookie(self) -> bytes:
        return b"atoll-preview-server"

    def begin(self) -> Headers:
        return self.on_request()

    def label_of_host(self, host: bytes) -> str | None:
        name = host.partition(b":")[0]
        below = f".{self.address.domain}".encode()
        label = name[: -len(below)]
        if not name.endswith(below) or not label[:1].isdigit() or b"-" not in label or b"." in label:
            return None
        return label.decode("ascii", "replace")

    def find(self, label: str, offered: Iterable[bytes]) -> ExposedPort | None:
        return find_exposed(self._exposed, label, offered)

    # ---------------------------------------------------------------------------------------------------- parts

    def _make(self, tenant: str, sandbox_id: str, name: str, port: int, token: str) -> ExposedPort:
        preview = Preview(sandbox=name, port=port, url="", path_url="", token=token)
        return ExposedPort(sandbox_id, name, partial(self._dial, tenant, sandbox_id, name), preview)

    def _remember(self, tenant: str, sandbox_id: str, name: str, port: int, token: str) -> None:
        label = label_of(tenant, name, port)
        self._exposed[label] = self._make(tenant, sandbox_id, name, port, token)
        self._of[tenant, sandbox_id, port] = label

    def _forget(self, label: str) -> None:
        exposed = self._exposed.pop(label, None)
        if exposed is not None:
            self._of = {key: each for key, each in self._of.items() if each != label}
            for exchange in list(exposed.exchanges):
                exchange.cancel()

    def _shown(self, label: str) -> Preview:
        preview = self._exposed[label].preview
        url, path_url = self.address.urls(label, preview.token)
        return preview.model_copy(update={"url": url, "path_url": path_url})

    async def _dial(self, tenant: str, sandbox_id: str, name: str, port: int, address: str) -> PortConnection:
        """Connect to a port of a sandbox, which is woken. One that was destroyed takes its previews with it."""
        engine = await self._engines.get(tenant)
        sandbox: Sandbox | None = None
        with suppress(SandboxNotFound):
            sandbox = await engine.get(name)
        if sandbox is None or sandbox.id != sandbox_id:
            await self.take_back(tenant, sandbox_id)
            raise SandboxDied(f"the sandbox {name!r} was destroyed")
        return await sandbox.dial(port, address)
