"""An engine that asks before it creates: what a tenant's programs use that are not routes, such as MCP sessions.

Owns that every sandbox that comes into being through it is within the policy and the quotas of the tenant, as those
that are created over REST. What can neither create nor widen one is the engine's; all else is refused, and done over
REST. Used by `surfaces/serve/`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack, cast

from atoll.contract.errors import Forbidden
from atoll.contract.model import Limits
from atoll.runtime.interface import CreateOptions, Engine
from atoll.runtime.lifetimes import AwaitableContext
from atoll.server.policy import check_create, check_inherited

if TYPE_CHECKING:
    from atoll.runtime.engine import LocalEngine
    from atoll.runtime.sandbox import Sandbox
    from atoll.server.server import Server


_PASSED = frozenset(
    {
        *("namespace", "state_dir", "default_image", "default_runtime", "images", "runtimes"),
        *("effective_limits", "check_options"),
        *("get", "list", "wait_refilled", "pause", "resume", "sleep", "wake", "shutdown", "sleep_unused", "destroy"),
        *("checkpoint", "checkpoints", "delete_checkpoint", "export", "audit", "follow_audit", "_session", "_tasks"),
    }
)
"""What can neither create a sandbox nor give one more."""


def admitting(server: Server, tenant: str, engine: LocalEngine) -> Engine:
    """The engine of a tenant, for what is not a route."""
    return cast("Engine", _AdmittingEngine(server, tenant, engine))


class _AdmittingEngine:
    def __init__(self, server: Server, tenant: str, engine: LocalEngine) -> None:
        self._server = server
        self._tenant = tenant
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        if name not in _PASSED:
            raise Forbidden(f"{name} of an engine is not for programs of a tenant; it is done over REST")
        return getattr(self._engine, name)

    pool = Engine.pool
    get_or_create = Engine.get_or_create

    def create(self, name: str | None = None, **options: Unpack[CreateOptions]) -> AwaitableContext[Sandbox]:
        return AwaitableContext(self._create(name or f"sandbox-{os.urandom(4).hex()}", options))

    async def _create(self, name: str, options: CreateOptions) -> Sandbox:
        if options.get("from_checkpoint") is not None:
            raise Forbidden("a sandbox from a checkpoint is created over REST")
        tenant = await self._server.tenants.get(self._tenant)
        admitted = check_create(
            tenant.policy,
            image=options.get("image") or self._engine.default_image,
            mounts=options.get("mounts") or (),
            network=options.get("network"),
            runtime=options.get("runtime"),
            limits=options.get("limits") or Limits(),
            ttl_s=options.get("ttl_s"),
        )
        given: dict[str, Any] = {**options, **{each: getattr(admitted, each) for each in type(admitted).field_names()}}
        limits = self._engine.effective_limits(admitted.limits, admitted.runtime)
        async with self._server.quotas.reserve(tenant, self._engine, {name: limits}):
            return await self._engine.create(name, **given)

    async def fork(
        self, source: str, count: int = 1, *, checkpoint: str | None = None, names: Sequence[str] | None = None
    ) -> list[Sandbox]:
        tenant = await self._server.tenants.get(self._tenant)
        if checkpoint is None:
            info = (await self._engine.get(source)).info
            limits = check_create(
                tenant.policy,
                image=info.image,
                mounts=info.mounts,
                network=info.network,
                runtime=info.runtime,
                limits=info.limits,
            ).limits
        else:
            limits = check_inherited(tenant.policy, self._engine.inherited_spec(checkpoint, source)).limits
        names = names or [f"{source[:50]}-{os.urandom(4).hex()}" for _ in range(count)]
        async with self._server.quotas.reserve(tenant, self._engine, dict.fromkeys(names, limits)):
            return await self._engine.fork(source, count, checkpoint=checkpoint, names=names)

    async def restore(self, name: str, checkpoint: str, *, foreign: bool = False) -> Sandbox:
        if foreign:
            raise Forbidden("a sandbox is restored to another's checkpoint over REST")
        return await self._engine.restore(name, checkpoint)
