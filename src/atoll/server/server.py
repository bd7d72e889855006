"""The server's parts, opened together: what a surface of `atoll serve` is given.

Owns the order in which they open and close. Not here: what each does, and HTTP. Used by `surfaces/rest/` and
`surfaces/serve/`, and by the commands `atoll tenants` and `atoll keys`, which need no running server.
"""

from __future__ import annotations

import logging
import os
import pwd
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio
import anyio.to_thread
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from atoll.code.audit import CodeAudit
from atoll.contract.errors import (
    AtollError,
    CheckpointNotFound,
    ConfigNotFound,
    Forbidden,
    InvalidRequest,
    SandboxNotFound,
    TemplateNotFound,
    TenantExists,
    TenantNotFound,
    VolumeNotFound,
)
from atoll.contract.model import SandboxInfo
from atoll.runtime.interface import Engine
from atoll.runtime.lifetimes import AwaitableContext
from atoll.runtime.secrets.vault import Vault
from atoll.runtime.state.known import namespaces
from atoll.runtime.state.running import SANDBOX_ID
from atoll.runtime.state.store import StateStore
from atoll.server.audit import AuditEvent, AuditTrail
from atoll.server.builds import TemplateBuilds
from atoll.server.bundles import Bundles
from atoll.server.configs import AgentConfigs
from atoll.server.database import Database
from atoll.server.engines import TenantEngines
from atoll.server.events import Events
from atoll.server.history import UsageHistory
from atoll.server.idempotency import Idempotency
from atoll.server.keys import ApiKeys
from atoll.server.previews import ServerPreviews
from atoll.server.quotas import QuotaLedger
from atoll.server.tables import chat_turns
from atoll.server.tenants import DEFAULT_TENANT, Tenant, TenantPolicy, Tenants
from atoll.server.webhooks import Webhooks
from atoll.server.workspaces import Workspaces
from atoll.settings import Settings

if TYPE_CHECKING:
    from pydantic import SecretStr

    from atoll.runtime.sandbox import Sandbox
    from atoll.server.chat import Chat
    from atoll.server.conversations import Conversations

_OPEN_POLICY = TenantPolicy(images=("host", "*"), networks=("*", "registries"))
"""Of the tenant `default` when it is made: that of the operator, who has all of it on the local command line. No
directory of the machine: clients of the server are elsewhere."""
_RETRY_S = 1.0
_TRANSFER_S = 24 * 3600.0
TRANSFER_PREFIX = "transfer-"
"""Of directories below `Server.directory` with a file that is on its way to a client."""
_ROUNDS = 3
_MAX_WHERE = 10_000
_log = logging.getLogger(__name__)


class Server:
    """One open server. Any number may be open on one state directory, for a while: during a restart."""

    def __init__(self, settings: Settings, database: Database, idempotency: Idempotency) -> None:
        self.settings = settings
        self.database = database
        self.tenants = Tenants(database)
        self.keys = ApiKeys(database)
        self.quotas = QuotaLedger(database)
        self.audit = AuditTrail(database)
        self.idempotency = idempotency
        self.engines = TenantEngines(settings)
        self.webhooks = Webhooks(
            database, settings.resolve_state_dir(), settings.secrets_key, allow=settings.webhook_rules()
        )
        self.events = Events(database, self.list_sandboxes, self.webhooks.enqueue)
        self.events.on_commit = self.webhooks.wake
        self.history = UsageHistory(self.list_sandboxes, self._get_sandbox)
        self.previews = self.engines.publisher = ServerPreviews(database, self.engines)
        self.directory = settings.resolve_state_dir() / "server"
        """What the server itself keeps, such as files on their way to a client."""
        self.bundles = Bundles(database, self.tenants, self.quotas, self.engines, self.directory / "bundles")
        self.builds = TemplateBuilds(self.engines, self.quotas, self.directory, idempotency)
        vault = Vault(settings.resolve_state_dir(), settings.secrets_key)
        self.configs = AgentConfigs(database, vault, self.bundles, settings)
        self.workspaces = Workspaces(
            database, self.tenants, self.quotas, self.engines, self.configs, self.bundles, self.directory
        )
        self._store = StateStore(settings.resolve_state_dir())
        self._chats = anyio.Event()
        """Set: there is `chat`."""
        self._where: dict[str, tuple[str, str]] = {}
        """The tenant and the name of sandboxes that were found by their ids. A sandbox keeps both."""
        self.first_key: SecretStr | None = None
        """The text of the first key of the server's administrators, if it was made now. It is to be shown once."""

    @classmethod
    def open(cls, settings: Settings | None = None, *, makes_key: bool = True) -> AwaitableContext[Server]:
        """The server over the state directory of `settings`; `async with` closes it.

        If there has never been one, it makes the tenant `default` and, with `makes_key`, a key of the server's
        administrators (`first_key`).

        Raises:
            InvalidRequest: the state directory or a setting cannot be used, or the database is of a newer version.
            DatabaseUnavailable: the database does not answer.
        """
        return AwaitableContext(cls._open(settings or Settings.from_environment(), makes_key))

    @classmethod
    async def _open(cls, settings: Settings, makes_key: bool) -> Server:
        state_dir = settings.resolve_state_dir()
        try:
            StateStore(state_dir)  # it is this user's, and no other's
        except OSError as error:
            raise InvalidRequest(f"the state directory {state_dir} cannot be used: {error.strerror}") from error
        async with AsyncExitStack() as undo:
            database = await Database.open(settings.database_url, state_dir)
            undo.push_async_callback(database.aclose)
            idempotency = await Idempotency.open(database, state_dir)
            undo.push_async_callback(idempotency.aclose)
            server = cls(settings, database, idempotency)
            await server._make_default_tenant()
            await server.previews.load()
            server.first_key = await server.keys.create_first("first") if makes_key else None
            undo.pop_all()
        return server

    async def _make_default_tenant(self) -> None:
        if not any(tenant.name == DEFAULT_TENANT for tenant in await self.tenants.list()):
            with suppress(TenantExists):  # another process has just made it
                await self.tenants.create(DEFAULT_TENANT, policy=_OPEN_POLICY)

    @cached_property
    def conversations(self) -> Conversations:
        """Needs `load_chat`."""
        from atoll.server.conversations import Conversations

        return Conversations(self.database, self.quotas, self.idempotency.instance, self._is_alive)

    @cached_property
    def chat(self) -> Chat:
        """Needs `load_chat`."""
        from atoll.server.chat import Chat

        self._chats.set()
        return Chat(self.settings, self.configs, self.conversations, self.workspaces, self.quotas, self.tenants)

    async def load_chat(self) -> None:
        """Import what chats need, which takes most of a second the first time, while other requests are served."""
        if "chat" not in self.__dict__:
            await anyio.to_thread.run_sync(import_module, "atoll.server.chat")

    async def _recover_turns(self) -> None:
        """Complete the turns of processes that died, if there are any."""
        running = sa.select(chat_turns.c.id).where(chat_turns.c.status == "running").limit(1)
        async with self.database.read() as connection:
            found = (await connection.execute(running)).one_or_none()
        if found is not None:
            await self.load_chat()
            await self.conversations.recover()

    async def _end_disabled(self) -> None:
        """End the turns of tenants that are disabled. Before a client chats, there are none."""
        await self._chats.wait()
        await self.chat.end_disabled()

    async def run(self) -> None:
        """What goes on while a server serves: watching sandboxes, deliveries, samples. Until it is cancelled."""
        await anyio.to_thread.run_sync(_remove_abandoned_transfers, self.directory)
        await self._recover_turns()
        async with anyio.create_task_group() as tasks:
            for part in (
                self.events.watch,
                self.events.poll,
                self.webhooks.deliver,
                self.history.sample,
                self.engines.close_idle,
                self.bundles.tidy,
                self.workspaces.release_unused,
                self._end_disabled,
            ):
                tasks.start_soon(_again, part)

    async def list_sandboxes(self) -> dict[str, list[SandboxInfo]]:
        """The sandboxes of all tenants. No engine is opened for it but that of the tenant `default`."""
        used = await anyio.to_thread.run_sync(namespaces, self.settings.resolve_state_dir())
        engine = await self.engines.get(DEFAULT_TENANT)
        return {
            tenant.name: await engine.list_in(tenant.name) if tenant.name in used else []
            for tenant in await self.tenants.list()
        }

    def _is_alive(self, instance: str, turn: str) -> bool:
        own = instance == self.idempotency.instance
        return self.chat.is_running(turn) if own else self.idempotency.is_alive(instance)

    async def find_sandbox(self, id: str) -> tuple[Tenant, Sandbox]:
        """The sandbox of this id and its tenant, whosever it is: for a surface whose clients have a credential of the
        sandbox itself, which it has to check.

        Raises:
            SandboxNotFound: none has it.
            Forbidden: its tenant is disabled.
        """
        where = self._where.get(id)
        if where is None:
            if not SANDBOX_ID.fullmatch(id) or (manifest := self._store.read(id)) is None:
                raise SandboxNotFound(id, [])
            where = manifest.namespace, manifest.spec.name
        try:
            tenant = await self.tenants.get(where[0])
            sandbox = await self._get_sandbox(*where)
        except (SandboxNotFound, TenantNotFound):
            self._where.pop(id, None)
            raise SandboxNotFound(id, []) from None
        if sandbox.id != id:
            raise SandboxNotFound(id, [])
        if tenant.disabled:
            raise Forbidden(f"the tenant {tenant.name!r} is disabled")
        if len(self._where) >= _MAX_WHERE:
            self._where.clear()
        self._where[id] = where
        return tenant, sandbox

    def sandbox_ids(self) -> list[str]:
        """The ids of the sandboxes of all tenants, whatever becomes of them meanwhile."""
        return self._store.sandbox_ids()

    async def _get_sandbox(self, tenant: str, name: str) -> Sandbox:
        return await (await self.engines.get(tenant)).get(name)

    async def delete_tenant(self, name: str, *, destroy: bool = False) -> None:
        """Delete a tenant: its record, its keys and its agents, whose turns are cancelled; with `destroy`, all that it
        has too: sandboxes, checkpoints, templates, volumes, warm pools and bundles. Its keys are refused from the
        beginning on. It can be called again if it is interrupted.

        Raises:
            TenantNotFound: there is none of this name.
            InvalidRequest: it has any of these, or it is the tenant `default`.
        """
        await self.tenants.require_removable(name)
        engine = await self.engines.get(name)
        left = {
            **await _contents(engine),
            "bundles": len(await self.bundles.list(name)),
            "agent configs": len(await self.configs.list(name)),
        }
        if any(left.values()) and not destroy:
            has = ", ".join(f"{count} {what}" for what, count in left.items() if count)
            raise InvalidRequest(
                f"the tenant {name!r} has {has}; remove them first, or ask to have all of it destroyed"
            )
        await self.tenants.update(name, disabled=True)
        self.keys.forget()
        await self.load_chat()
        await self.chat.end_tenant(name)
        await self.builds.end_tenant(name)
        for config in await self.configs.list(name):
            with suppress(ConfigNotFound):
                await self.chat.delete_config(name, config.id)
        for _ in range(_ROUNDS):  # a request that had begun may have made more
            if not any((await _contents(engine)).values()):
                break
            await _destroy_contents(engine)
        CodeAudit(engine.state_dir, name).clear()
        await self.tenants.delete(name)
        await self.bundles.remove_all(name)
        self.keys.forget()
        await self.engines.close(name)

    async def record_local(self, action: str, resource: str, tenant: str | None) -> None:
        """Record in the audit log what a user of this machine did, on the command line."""
        user = pwd.getpwuid(os.getuid()).pw_name
        event = AuditEvent(
            request_id=os.urandom(8).hex(),
            tenant=tenant,
            action=action,
            resource=resource,
            status=200,
            details={"command_line_of": user},
        )
        await self.audit.record(event)

    async def aclose(self) -> None:
        """Close all parts, from any task. Sandboxes go on."""
        async with AsyncExitStack() as closing:
            closing.push_async_callback(self.database.aclose)
            closing.push_async_callback(self.idempotency.aclose)
            closing.push_async_callback(self.audit.aclose)
            closing.push_async_callback(self.engines.aclose)
            closing.push_async_callback(self.workspaces.aclose)
            closing.push_async_callback(self.builds.aclose)
            if "chat" in self.__dict__:
                closing.push_async_callback(self.chat.aclose)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _remove_abandoned_transfers(directory: Path) -> None:
    """Files on their way to clients of a process that died: after a day, none is still under way."""
    for path in directory.glob(f"{TRANSFER_PREFIX}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _TRANSFER_S:
                shutil.rmtree(path)


async def _again(part: Callable[[], Awaitable[None]]) -> None:
    """Go on when the database does not answer for a while, or a tenant is deleted in between."""
    while True:
        try:
            await part()
        except* (AtollError, OSError, IntegrityError) as failed:
            _log.warning("%s failed and is begun again: %s", part.__qualname__, failed.exceptions[0])
        await anyio.sleep(_RETRY_S)


async def _contents(engine: Engine) -> dict[str, int]:
    """How much a namespace has of what belongs to one."""
    return {
        "sandboxes": len(await engine.list()),
        "checkpoints": len(await engine.checkpoints()),
        "volumes": len(await engine.volumes.list()),
        "warm pools": len(await engine.warm_pools()),
        "templates": len(await engine.templates.list()),
    }


async def _destroy_contents(engine: Engine) -> None:
    await engine.remove_warm_pools()
    for template in await engine.templates.list():
        with suppress(TemplateNotFound):
            await engine.templates.remove(template.name)
    for sandbox in await engine.list():
        with suppress(SandboxNotFound):
            await engine.destroy(sandbox.name, checkpoints=True)
    for checkpoint in await engine.checkpoints():
        with suppress(CheckpointNotFound):
            await engine.delete_checkpoint(checkpoint.id)
    for volume in await engine.volumes.list():
        with suppress(VolumeNotFound):
            await engine.volumes.remove(volume.name)
