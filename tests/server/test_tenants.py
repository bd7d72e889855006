"""Tenants: their records, and policies that cannot be."""

from __future__ import annotations

import pytest

from atoll.contract.errors import InvalidRequest, TenantExists, TenantNotFound
from atoll.contract.model import Limits
from atoll.server import database
from atoll.server.server import Server
from atoll.server.tenants import Quotas, TenantPolicy
from atoll.settings import Settings
from atoll.testing.waiting import eventually


async def test_a_tenant_is_kept_as_it_was_made(settings: Settings, server: Server) -> None:
    policy = TenantPolicy(
        images=("host", "python:3.*"),
        mounts=("/srv/data", "/srv/out:rw"),
        networks=("*.example.com:443",),
        runtimes=("runsc",),
        max_ttl_s=3600,
        default_limits=Limits(cpus=0.5),
        max_limits=Limits(memory_bytes=2**30, cpus=2),
    )
    quotas = Quotas(sandboxes=3, cpus=1.5, requests_per_minute=60)
    made = await server.tenants.create("acme", policy=policy, quotas=quotas)
    async with Server.open(settings) as other:
        assert await other.tenants.get("acme") == made
        assert [tenant.name for tenant in await other.tenants.list()] == ["acme", "default"]
    with pytest.raises(TenantExists):
        await server.tenants.create("acme")


async def test_a_change_is_seen_by_other_processes(
    settings: Settings, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "RECENT_S", 0.05)
    await server.tenants.create("acme")
    async with Server.open(settings) as other:
        assert (await other.tenants.get("acme")).quotas.sandboxes is None
        changed = await server.tenants.update("acme", quotas=Quotas(sandboxes=1))
        assert changed == await server.tenants.get("acme")

        async def is_seen() -> bool:
            return await other.tenants.get("acme") == changed

        await eventually(is_seen, "seen", bound_s=1)
        await server.tenants.delete("acme")
        with pytest.raises(TenantNotFound):
            await server.tenants.get("acme")
    for change in (server.tenants.update, server.tenants.delete):
        with pytest.raises(TenantNotFound):
            await change("acme")


async def test_the_tenant_default_is_always_there(server: Server) -> None:
    with pytest.raises(InvalidRequest, match="cannot be deleted"):
        await server.delete_tenant("default")
    with pytest.raises(InvalidRequest, match="cannot be disabled"):
        await server.tenants.update("default", disabled=True)


@pytest.mark.parametrize("name", ["", "A", "-a", "a_b", "a.b", "a/b", "a" * 33, "ä", "a\n"])
async def test_a_name_that_no_namespace_has_is_refused(server: Server, name: str) -> None:
    with pytest.raises(InvalidRequest, match="not a name for a tenant"):
        await server.tenants.create(name)


@pytest.mark.parametrize(
    "policy",
    [
        {"mounts": ["data"]},
        {"mounts": ["/"]},
        {"mounts": ["/srv/../etc"]},
        {"mounts": ["/srv/"]},
        {"mounts": ["//srv"]},
        {"mounts": ["/srv\0"]},
        {"mounts": ["volume:x"]},
        {"images": [""]},
        {"images": ["a b"]},
        {"networks": ["http://example.com"]},
        {"networks": ["10.0.0.0/33"]},
        {"runtimes": []},
        {"max_ttl_s": 0},
        {"unknown": 1},
    ],
    ids=str,
)
def test_a_policy_that_cannot_be_is_refused(policy: dict) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - pydantic's, or ours
        TenantPolicy.model_validate(policy)
