"""Quotas: sums over sandboxes, with many requests at once; rates; tokens of models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from atoll.contract.errors import InvalidRequest, QuotaExceeded, RateLimited
from atoll.contract.model import Limits, WarmPool
from atoll.server import quotas as ledger
from atoll.server.server import Server
from atoll.server.tenants import Quotas, Tenant
from atoll.settings import Settings

MIB = 2**20


async def tenant_with(server: Server, **quotas: float) -> Tenant:
    return await server.tenants.update("default", quotas=Quotas.model_validate(quotas))


async def test_of_fifty_requests_at_once_as_many_get_in_as_there_is_room_for(
    make_state_dir: Callable[[], Path], any_settings: Settings
) -> None:
    """With real sandboxes: while one is made it is reserved, then listed too, and counted once throughout."""
    limits = Limits(memory_bytes=64 * MIB)
    made: list[str] = []
    refused: list[QuotaExceeded] = []
    async with Server.open(any_settings.model_copy(update={"state_dir": make_state_dir()})) as server:
        tenant = await tenant_with(server, sandboxes=4, memory_bytes=3 * 64 * MIB)
        engine = await server.engines.get("default")

        async def create(number: int) -> None:
            name = f"box{number}"
            try:
                async with server.quotas.reserve(tenant, engine, {name: engine.effective_limits(limits)}):
                    await engine.create(name, limits=limits)
                    made.append(name)
            except QuotaExceeded as error:
                refused.append(error)

        async with anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(create, number)
        assert (len(made), len(refused)) == (3, 47)
        assert refused[-1].details == {
            "quota": "memory_bytes",
            "used": 3 * 64 * MIB,
            "asked": 64 * MIB,
            "allowed": 3 * 64 * MIB,
        }
        used = {"sandboxes": 3, "memory_bytes": 3 * 64 * MIB, "cpus": 0, "disk_bytes": 0, "model_tokens": 0}
        assert await server.quotas.usage(tenant, engine) == used

        await engine.sleep(made[0])  # any use wakes it: it counts as before
        assert await server.quotas.usage(tenant, engine) == used
        await create(98)
        assert (len(made), refused[-1].details["quota"]) == (3, "memory_bytes")
        for name in made:
            await engine.destroy(name)


async def test_reservations_end_with_their_block_however_it_ends(server: Server) -> None:
    tenant = await tenant_with(server, sandboxes=1)
    engine = await server.engines.get("default")
    for _ in range(2):
        with pytest.raises(ValueError, match="failed"):
            async with server.quotas.reserve(tenant, engine, {"a": Limits()}):
                raise ValueError("failed")
    with anyio.CancelScope() as scope:
        async with server.quotas.reserve(tenant, engine, {"a": Limits()}):
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    async with server.quotas.reserve(tenant, engine, {"a": Limits()}):
        with pytest.raises(QuotaExceeded, match=r"quota of sandboxes does not suffice: 1 used, 2 asked for, 1 allowed"):
            async with server.quotas.reserve(tenant, engine, {"b": Limits(), "c": Limits()}):
                pass
    assert (await server.quotas.usage(tenant, engine))["sandboxes"] == 0


async def test_a_sandbox_without_a_limit_is_refused_where_there_is_a_quota_of_it(server: Server) -> None:
    engine = await server.engines.get("default")
    for quota, option in (("memory_bytes", "--memory"), ("cpus", "--cpus"), ("disk_bytes", "--disk")):
        tenant = await tenant_with(server, **{quota: 2**40})
        with pytest.raises(InvalidRequest, match=rf"give it {quota} \({option}\)"):
            async with server.quotas.reserve(tenant, engine, {"a": Limits()}):
                pass
    tenant = await tenant_with(server, cpus=1.5)
    async with server.quotas.reserve(tenant, engine, {"a": Limits(cpus=1), "b": Limits(cpus=0.5)}):
        with pytest.raises(QuotaExceeded, match=r"1.5 used, 0.01 asked for, 1.5 allowed"):
            async with server.quotas.reserve(tenant, engine, {"c": Limits(cpus=0.01)}):
                pass
        async with server.quotas.reserve(tenant, engine, {"a": Limits(cpus=0.5)}):
            pass  # no more than it has


async def test_disk_is_the_sum_of_sandboxes_and_volumes(server: Server) -> None:
    tenant = await tenant_with(server, disk_bytes=100 * MIB)
    engine = await server.engines.get("default")
    small, large = Limits(disk_bytes=40 * MIB), Limits(disk_bytes=80 * MIB)
    async with server.quotas.reserve_volume(tenant, engine, "v", 60 * MIB):
        assert (await server.quotas.usage(tenant, engine))["disk_bytes"] == 60 * MIB
        async with server.quotas.reserve(tenant, engine, {"a": small}):
            with pytest.raises(QuotaExceeded, match="quota of disk_bytes"):
                async with server.quotas.reserve_volume(tenant, engine, "w", 16 * MIB):
                    pass
        with pytest.raises(QuotaExceeded, match="quota of disk_bytes"):
            async with server.quotas.reserve(tenant, engine, {"a": large}):
                pass
    async with server.quotas.reserve(tenant, engine, {"a": large}):
        pass


async def test_a_volume_without_a_size_is_refused_where_there_is_a_quota_of_disk(server: Server) -> None:
    engine = await server.engines.get("default")
    tenant = await tenant_with(server, disk_bytes=2**40)
    with pytest.raises(InvalidRequest, match=r"the volume 'v' .* give it size_bytes \(--size\)"):
        async with server.quotas.reserve_volume(tenant, engine, "v", None):
            pass
    await engine.volumes.create("older")
    try:
        with pytest.raises(InvalidRequest, match=r"its volume 'older' is older and has no limit .* remove it first"):
            async with server.quotas.reserve_volume(tenant, engine, "v", 16 * MIB):
                pass
        other = await tenant_with(server, sandboxes=1)
        async with server.quotas.reserve_volume(other, engine, "v", None):
            pass  # it is no quota of disk
    finally:
        await engine.volumes.remove("older")


async def test_a_warm_pool_counts_as_the_sandboxes_that_it_keeps_ready(server: Server) -> None:
    engine = await server.engines.get("default")
    tenant = await tenant_with(server, sandboxes=3, memory_bytes=3 * 64 * MIB)
    limits = Limits(memory_bytes=64 * MIB)

    def pool(count: int, runtime: str = "crun") -> WarmPool:
        return WarmPool(image="host", runtime=runtime, limits=limits, count=count, ready=0)

    async with server.quotas.reserve_pool(tenant, engine, pool(2)):
        async with server.quotas.reserve_pool(tenant, engine, pool(3)):
            pass  # the same pool, one more
        with pytest.raises(QuotaExceeded, match="2 used, 2 asked for, 3 allowed"):
            async with server.quotas.reserve_pool(tenant, engine, pool(2, "runsc")):
                pass
        async with server.quotas.reserve(tenant, engine, {"a": limits}):
            with pytest.raises(QuotaExceeded, match="3 used, 1 asked for, 3 allowed"):
                async with server.quotas.reserve(tenant, engine, {"b": limits}):
                    pass
        async with server.quotas.reserve_pool(tenant, engine, pool(0, "runsc")):
            pass  # none is always allowed


async def test_requests_are_counted_by_the_minute_and_refused_until_one_fits(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("atoll.server.quotas.time.monotonic", lambda: now)
    tenant = Tenant(
        name="t", created_at=(await server.tenants.get("default")).created_at, quotas=Quotas(requests_per_minute=60)
    )
    for _ in range(60):
        server.quotas.check_rate(tenant)
    with pytest.raises(RateLimited, match=r"60 requests per minute; try again in 1.0 s") as refused:
        server.quotas.check_rate(tenant)
    assert refused.value.retry_after_s == 1
    now += refused.value.retry_after_s
    server.quotas.check_rate(tenant)
    server.quotas.check_rate(tenant.model_copy(update={"name": "other"}))
    with pytest.raises(RateLimited):
        server.quotas.check_rate(tenant)
    server.quotas.check_rate(tenant.model_copy(update={"quotas": Quotas()}))


async def test_tokens_are_counted_by_the_month(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = await tenant_with(server, model_tokens=100)
    await server.quotas.check_tokens(tenant)
    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(server.quotas.spend_tokens, "default", 10)
    with pytest.raises(QuotaExceeded, match="100 of 100 in this month"):
        await server.quotas.check_tokens(tenant)
    monkeypatch.setattr(ledger, "_month", lambda: "2099-01")
    await server.quotas.check_tokens(tenant)
    assert await server.quotas.spend_tokens("default", 7) == 7


async def test_an_engine_is_opened_once_and_closed_with_the_server(server: Server) -> None:
    async with anyio.create_task_group() as tasks:
        opened: list[Any] = []

        async def get() -> None:
            opened.append(await server.engines.get("default"))

        for _ in range(5):
            tasks.start_soon(get)
    assert len(set(map(id, opened))) == 1
    await server.aclose()
    with pytest.raises(InvalidRequest, match="the server is closed"):
        await server.engines.get("default")
    with pytest.raises(InvalidRequest, match="the engine is closed"):
        opened[0]._tasks.require_open()
