"""The workspaces of sandboxed agents: one for each config, whichever of its conversations uses it.

Owns which workspace belongs to a config, that one version of the config uses it at a time and within the tenant's
policy and quotas, what is stored of its instances, the tools of ours that work in it, and that all that comes back out
of it is searched for values of secrets. Not here: how a workspace is booted and put to sleep (`bundles/workspace.py`),
secrets at rest (`configs.py`), and how values are found (`redaction.py`).
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from atoll.bundles.archive import pack, read_bundle
from atoll.bundles.builtin import BUILTIN_TOOLS
from atoll.bundles.dispatch import WORKSPACE
from atoll.bundles.workspace import BundleFile, Workspace, WorkspaceInstance, WorkspaceSpec
from atoll.code.executor import CodeConfig, CodeExecutor
from atoll.code.registry import ToolRegistry
from atoll.code.tool import execute_code_tools
from atoll.contract.errors import AtollError, ConfigNotFound, Forbidden, SandboxNotFound, told_elsewhere
from atoll.contract.model import Limits
from atoll.contract.network import REGISTRIES, NetworkPolicy
from atoll.runtime.interface import Engine
from atoll.runtime.sandbox import Sandbox
from atoll.server.bundles import Bundles
from atoll.server.configs import WORKSPACE_TOOLS, AgentConfig, AgentConfigs, WorkspaceSecrets
from atoll.server.database import Database
from atoll.server.engines import TenantEngines
from atoll.server.policy import check_create, check_limits, check_network
from atoll.server.quotas import QuotaLedger
from atoll.server.redaction import SecretRedaction
from atoll.server.tables import workspace_instances
from atoll.server.tenants import Tenant, Tenants
from atoll.tools.tool import Input, Result, Tool, ToolResult, ToolSet
from atoll.tools.view import MAX_SHOWN_BYTES, last_name

MAX_INSTANCES = 100
"""Of one config that are kept."""
RELEASED_S = 900.0
"""How long this process holds a workspace that no turn uses. It sleeps by then."""
_NOTHING = 'def run(args):\n    """Does nothing."""\n    return {"ok": True, "content": ""}\n'


class Workspaces:
    """The workspaces of all configs of a server. `directory` is the server's own."""

    def __init__(
        self,
        database: Database,
        tenants: Tenants,
        quotas: QuotaLedger,
        engines: TenantEngines,
        configs: AgentConfigs,
        bundles: Bundles,
        directory: Path,
    ) -> None:
        self._database = database
        self._tenants = tenants
        self._quotas = quotas
        self._engines = engines
        self._configs = configs
        self._bundles = bundles
        self._plain = directory / "plain-bundle.tgz"
        self._open: dict[str, _OpenWorkspace] = {}
        self._opening: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)

    @asynccontextmanager
    async def using(self, tenant: str, config: AgentConfig) -> AsyncIterator[ToolSet]:
        """The tools of a config in its workspace, which is booted by the first call of one that needs it.

        Turns of one version share the workspace. One of another version waits until they have ended, as the workspace
        may have to be made anew for it.

        Raises:
            BundleFailed: its bundle is gone.
        """
        opened = await self._begin_use(tenant, config)
        try:
            yield opened.tools(config.tool_names)
        finally:
            opened.end_use()

    async def _begin_use(self, tenant: str, config: AgentConfig) -> _OpenWorkspace:
        while True:
            async with self._opening[config.id]:
                opened = self._open.get(config.id)
                if opened is not None and opened.version != config.version and not opened.is_used:
                    await opened.aclose()
                    opened = None
                if opened is None:
                    opened = self._open[config.id] = await self._make(tenant, config)
                if opened.version == config.version:
                    opened.begin_use()
                    return opened
            await opened.unused()  # not within the lock: the workspace can be removed meanwhile

    async def newest(self, tenant: str, config: AgentConfig) -> WorkspaceInstance | None:
        """The state of a config's workspace as it is now. None: it has never been booted."""
        opened = self._open.get(config.id)
        if opened is None:
            stored = await self.instances(config.id, limit=1)
            if not stored or stored[0].state in ("failed", "destroyed"):
                return stored[0] if stored else None
            async with self.using(tenant, config):
                opened = self._open[config.id]
        return await opened.newest()

    async def instances(self, config: str, *, limit: int = MAX_INSTANCES) -> list[WorkspaceInstance]:
        """The newest first."""
        await self._record_output(config)
        table = workspace_instances
        query = sa.select(table.c.data).where(table.c.config == config).order_by(table.c.created_at.desc())
        async with self._database.read() as connection:
            found = (await connection.execute(query.limit(limit))).scalars()
            return [WorkspaceInstance.model_validate(data) for data in found]

    async def instance(self, config: str, external_id: str) -> WorkspaceInstance:
        """
        Raises:
            ConfigNotFound: the config has no such instance.
        """
        await self._record_output(config)
        table = workspace_instances
        query = sa.select(table.c.data).where(table.c.config == config, table.c.external_id == external_id)
        async with self._database.read() as connection:
            data = (await connection.execute(query)).scalar_one_or_none()
        if data is None:
            raise ConfigNotFound(
                f"the agent config {config!r} has no workspace instance {external_id[:100]!r}", config=config
            )
        return WorkspaceInstance.model_validate(data)

    async def _record_output(self, config: str) -> None:
        if (opened := self._open.get(config)) is not None:
            await opened.workspace.record_output()

    async def destroy(self, tenant: str, config: AgentConfig) -> None:
        """Remove a config's workspace with its files. The next call makes another. Calls that are under way fail."""
        async with self._opening[config.id]:
            opened = self._open.pop(config.id, None)
            if opened is None:
                if not await self.instances(config.id, limit=1):
                    return
                opened = await self._make(tenant, config, is_ending=True)
            try:
                await opened.workspace.destroy()
            finally:
                await opened.aclose()

    async def release_unused(self) -> None:
        """Let go of workspaces that sleep, until this is cancelled: the engines of their tenants may be closed then."""
        while True:
            await anyio.sleep(RELEASED_S / 4)
            for config in [*self._open]:
                async with self._opening[config]:
                    if (opened := self._open.get(config)) is not None and opened.unused_s > RELEASED_S:
                        await self._open.pop(config).aclose()
                if config not in self._open:
                    self._opening.pop(config, None)

    async def release(self, tenant: str) -> None:
        """Let go of the workspaces of a tenant that is being deleted."""
        for config, opened in [*self._open.items()]:
            if opened.tenant == tenant:
                del self._open[config]
                await opened.aclose()

    async def aclose(self) -> None:
        """Let go of all of them. Their sandboxes go on, and sleep when they are unused."""
        with anyio.CancelScope(shield=True):
            for config in [*self._open]:
                await self._open.pop(config).aclose()

    async def _make(self, tenant: str, config: AgentConfig, *, is_ending: bool = False) -> _OpenWorkspace:
        secrets = await self._configs.secrets(tenant, config.id)
        engine = await self._engines.get(tenant)
        redacting = SecretRedaction(
            {**secrets.in_clear, **{name: each.value for name, each in secrets.outside.items()}}
        )

        async def record(instance: WorkspaceInstance) -> None:
            await self._store(config.id, await redacting.instance(instance))

        @asynccontextmanager
        async def admit(name: str, limits: Limits) -> AsyncIterator[None]:
            async with self._quotas.reserve(await self._tenants.get(tenant), engine, {name: limits}):
                yield

        @asynccontextmanager
        async def admit_volume(name: str, size_bytes: int | None) -> AsyncIterator[None]:
            async with self._quotas.reserve_volume(await self._tenants.get(tenant), engine, name, size_bytes):
                yield

        spec = WorkspaceSpec(sandbox=config.sandbox)
        if not is_ending:
            spec = await self._spec(await self._tenants.get(tenant), engine, config, secrets)
        last = next(iter(await self.instances(config.id, limit=1)), None)
        workspace = Workspace(engine, spec, record, last=last, admit=admit, admit_volume=admit_volume)
        self._engines.hold(tenant, workspace)
        opened = _OpenWorkspace(tenant, workspace, config.version, redacting)
        self._engines.hold(tenant, opened)
        return opened

    async def _spec(
        self, tenant: Tenant, engine: Engine, config: AgentConfig, secrets: WorkspaceSecrets
    ) -> WorkspaceSpec:
        """What it is made of, as the tenant's policy allows it now."""
        admitted = check_create(
            tenant.policy,
            image=config.workspace_image or engine.default_image,
            network=config.workspace_network,
            limits=config.workspace_limits,
        )
        given = config.provisioning_bundle
        if given is not None:
            stored = await self._bundles.resolve(tenant.name, given.url, given.sha256)
            bundle = self._bundles.file(tenant.name, stored)
        else:
            bundle = await self._plain_bundle()
        registries: NetworkPolicy | None = NetworkPolicy(allow=REGISTRIES)
        try:
            check_network(tenant.policy, registries)
        except Forbidden:
            registries = None
        return WorkspaceSpec(
            sandbox=config.sandbox,
            bundle=bundle,
            image=admitted.image,
            runtime=admitted.runtime,
            network=admitted.network,
            build_network=registries,
            limits=admitted.limits,
            build_limits=_build_limits(tenant, admitted.limits),
            secret_env=secrets.in_clear,
            secrets=secrets.outside,
            revision=str(secrets.version),
            labels={"agent-config": config.id},
        )

    async def _plain_bundle(self) -> BundleFile:
        """Of agents without a bundle of their own: its one tool is not offered, but their workspaces boot as others
        do."""
        if not self._plain.exists():
            await anyio.to_thread.run_sync(_write_plain_bundle, self._plain)
        found = await read_bundle(self._plain)
        return BundleFile(path=self._plain, sha256=found.sha256, manifest=found.manifest, tools=())

    async def _store(self, config: str, instance: WorkspaceInstance) -> None:
        table = workspace_instances
        data = instance.model_dump(mode="json")
        with suppress(IntegrityError):  # the config was deleted meanwhile
            async with self._database.write() as connection:
                known = sa.update(table).where(table.c.external_id == instance.external_id).values(data=data)
                if (await connection.execute(known)).rowcount:
                    return
                row = {
                    "external_id": instance.external_id,
                    "config": config,
                    "data": data,
                    "created_at": instance.created_at,
                }
                await connection.execute(sa.insert(table).values(row))
                of_config = sa.select(table.c.external_id).where(table.c.config == config)
                kept = of_config.order_by(table.c.created_at.desc()).limit(MAX_INSTANCES)
                old = sa.and_(table.c.config == config, table.c.external_id.not_in(kept))
                await connection.execute(sa.delete(table).where(old))


def _build_limits(tenant: Tenant, of_workspace: Limits) -> Limits:
    """The tenant's own: what is built serves all workspaces. Where there are none that its quota could count, those of
    the workspace that is built for."""
    limits = check_limits(tenant.policy, None)
    quotas = tenant.quotas
    missing = {
        quota: getattr(of_workspace, quota)
        for quota in ("disk_bytes", "cpus")
        if getattr(quotas, quota) is not None and getattr(limits, quota) is None
    }
    return limits.model_copy(update=missing)


def _write_plain_bundle(path: Path) -> None:
    manifest = {"schema_version": 1, "tools": [{"name": "nothing", "entrypoint": "tools.nothing:run"}]}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "tools").mkdir()
        (Path(directory) / "manifest.json").write_text(json.dumps(manifest))
        (Path(directory) / "tools" / "__init__.py").write_text("")
        (Path(directory) / "tools" / "nothing.py").write_text(_NOTHING)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.urandom(4).hex()}")
        with temporary.open("xb") as file:
            pack(Path(directory), file)
        temporary.replace(path)


class _OpenWorkspace:
    """A workspace that turns of one version of a config use."""

    def __init__(self, tenant: str, workspace: Workspace, version: int, redacting: SecretRedaction) -> None:
        self.tenant = tenant
        self.workspace = workspace
        self.version = version
        self._redacting = redacting
        self._users = 0
        self._used_at = time.monotonic()
        self._idle = anyio.Event()
        self._idle.set()
        self._executor: CodeExecutor | None = None
        self._own = _own_tools(WorkspaceContext(workspace))

    def begin_use(self) -> None:
        if self._users == 0:
            self._idle = anyio.Event()
        self._users += 1

    async def newest(self) -> WorkspaceInstance | None:
        """Its newest instance, as it is now and without values of secrets."""
        found = await self.workspace.refresh()
        return None if found is None else await self._redacting.instance(found)

    @property
    def unused_s(self) -> float:
        """For how long no turn has used it."""
        return 0.0 if self._users else time.monotonic() - self._used_at

    def end_use(self) -> None:
        self._users -= 1
        self._used_at = time.monotonic()
        if self._users == 0:
            self._idle.set()

    @property
    def is_used(self) -> bool:
        return self._users > 0

    async def unused(self) -> None:
        await self._idle.wait()

    def tools(self, names: tuple[str, ...]) -> ToolSet:
        """The bundle's come first: a tool of its own may have the name of one of ours."""
        bundle = self.workspace.spec.bundle
        in_bundle = () if bundle is None else tuple(tool.name for tool in bundle.tools)
        given = [name for name in names if name in in_bundle or name in BUILTIN_TOOLS]
        own = [name for name in names if name not in given and name in WORKSPACE_TOOLS]
        found = self.workspace.tools(given)
        if "execute_code" in own:
            own.remove("execute_code")
            found |= self._code()
        return (found | self._own.only(*own)).changing(self._redacting.result)

    def _code(self) -> ToolSet:
        if self._executor is None:
            config = CodeConfig(output_limit_bytes=MAX_SHOWN_BYTES)
            self._executor = CodeExecutor(ToolRegistry(), config, engine=self.workspace.engine)
        made, _ = execute_code_tools(self._executor, WorkspaceContext(self.workspace).sandbox)
        return made

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):
            if self._executor is not None:
                with suppress(AtollError):
                    await self._executor.aclose()
            await self.workspace.aclose()


class WorkspaceContext:
    """The tool context of a workspace, which is booted when a tool is first called."""

    abilities = frozenset({"sandbox"})

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def explain(self, error: AtollError) -> str:
        return "the workspace is gone" if isinstance(error, SandboxNotFound) else told_elsewhere(error)

    def in_use(self) -> AbstractAsyncContextManager[None]:
        return self._workspace.in_use()

    async def sandbox(self) -> Sandbox:
        await self._workspace.boot()
        return await self._workspace.engine.get(self._workspace.spec.sandbox)


def _own_tools(context: WorkspaceContext) -> ToolSet:
    """The tools of the vocabularies `coding` and `agent` that work in one sandbox."""
    from atoll.tools import coding, pool

    async def view(sandbox: Sandbox) -> Any:
        return coding.CodingView(sandbox, WORKSPACE)

    async def named(sandbox: Sandbox) -> Any:
        return pool.SandboxContext(sandbox)

    of_coding = [_lazily(tool, view) for tool in coding.FILE_TOOLS]
    names = {tool.name for tool in of_coding}
    of_pool = [_lazily(tool, named) for tool in pool.SANDBOX_TOOLS if tool.name not in names]
    return ToolSet([*of_coding, *of_pool], context)


def _lazily(tool: Tool, context_in: Callable[[Sandbox], Awaitable[Any]]) -> Tool:
    """A tool whose sandbox may not exist yet. Its keys do without one."""

    async def handler(args: Input, context: WorkspaceContext, **options: Any) -> Result | ToolResult | str:
        async with context.in_use():
            return await tool.handler(args, await context_in(await context.sandbox()), **options)

    def key(args: Any, _context: WorkspaceContext) -> str:
        return last_name(args.path)

    return replace(tool, handler=handler, serialize_by=tool.serialize_by and key)
