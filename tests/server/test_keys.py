"""API keys: what is stored of them, what they may do, and when they are refused."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from atoll.contract.errors import Forbidden, InvalidRequest, KeyNotFound, TenantNotFound, Unauthenticated
from atoll.server import database, keys, tables
from atoll.server.keys import MEMBER_SCOPES, SCOPES, TENANT_ADMIN_SCOPES, ApiKeys
from atoll.server.server import Server
from atoll.settings import Settings
from atoll.testing.waiting import eventually


async def test_a_key_is_made_at_the_first_start_only(settings: Settings) -> None:
    async with Server.open(settings) as server:
        assert server.first_key is not None
        key = await server.keys.verify(server.first_key.get_secret_value())
        assert (key.tenant, key.role, key.scopes) == (None, "admin", SCOPES)
        assert server.first_key.get_secret_value() not in repr(server.first_key)
    async with Server.open(settings) as server:
        assert server.first_key is None


async def test_a_key_has_the_scopes_of_its_role_or_fewer(server: Server) -> None:
    member, _ = await server.keys.create("ci", tenant="default")
    admin, _ = await server.keys.create("boss", tenant="default", role="admin")
    reader, _ = await server.keys.create("eye", tenant="default", scopes=["sandboxes:read"])
    assert (member.scopes, admin.scopes, reader.scopes) == (MEMBER_SCOPES, TENANT_ADMIN_SCOPES, ("sandboxes:read",))
    reader.require("sandboxes:read")
    with pytest.raises(Forbidden, match=r"scope 'sandboxes:exec'; this key has sandboxes:read"):
        reader.require("sandboxes:exec")
    assert [key.name for key in await server.keys.list("default")] == ["ci", "boss", "eye"]
    assert [key.name for key in await server.keys.list()] == ["first"]
    assert len(await server.keys.list(everyone=True)) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"role": "member", "scopes": ["keys"]}, "role member does not have the scope 'keys'"),
        ({"role": "admin", "scopes": ["tenants"]}, "role admin does not have the scope 'tenants'"),
        ({"role": "member", "tenant": None}, "give a tenant, or the role admin"),
        ({"ttl_s": 0}, "expire after 1 s"),
        ({"name": ""}, "not a name for a key"),
        ({"name": "a\nb"}, "not a name for a key"),
    ],
)
async def test_a_key_that_cannot_be_is_refused(server: Server, arguments: dict, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await server.keys.create(**{"name": "x", "tenant": "default", **arguments})


async def test_nothing_is_stored_from_which_a_key_could_be_made(server: Server) -> None:
    _, text = await server.keys.create("ci", tenant="default")
    *_, secret = text.get_secret_value().split("_")
    assert re.fullmatch(r"atoll_[a-z0-9]{12}_[A-Za-z0-9]{43}", text.get_secret_value())
    async with server.database.read() as connection:
        rows = (await connection.execute(sa.select(tables.api_keys))).all()
    assert secret not in repr(rows)


async def test_a_key_of_no_tenant_is_refused(server: Server) -> None:
    with pytest.raises(TenantNotFound):
        await server.keys.create("ci", tenant="nobody")


async def test_all_wrong_keys_get_the_same_answer(server: Server) -> None:
    key, text = await server.keys.create("ci", tenant="default")
    _, revoked = await server.keys.create("old", tenant="default")
    await server.keys.revoke(revoked.get_secret_value().split("_")[1])
    right = text.get_secret_value()
    wrong = ["", "x", "\udcff", right[:-1], f"{right}x", right[:-1] + ("a" if right[-1] != "a" else "b"), f" {right}"]
    wrong += [right.upper(), f"atoll_{'0' * 12}_{'0' * 43}", revoked.get_secret_value(), right + "\n", "A" * 100_000]
    messages = set()
    for each in wrong:
        with pytest.raises(Unauthenticated) as refused:
            await server.keys.verify(each)
        messages.add((str(refused.value), repr(refused.value.details)))
    assert len(messages) == 1
    assert (await server.keys.verify(right)).id == key.id


async def test_a_key_that_another_process_revokes_is_refused_within_a_second(
    settings: Settings, server: Server
) -> None:
    key, text = await server.keys.create("ci", tenant="default")
    async with Server.open(settings) as other:
        await other.keys.verify(text.get_secret_value())
        await server.keys.revoke(key.id)
        with pytest.raises(Unauthenticated):
            await server.keys.verify(text.get_secret_value())
        await eventually(lambda: is_refused(other.keys, text.get_secret_value()), "refused", bound_s=1.5)
    assert (await server.keys.get(key.id)).revoked_at is not None
    assert await server.keys.revoke(key.id) == await server.keys.get(key.id)
    with pytest.raises(KeyNotFound):
        await server.keys.revoke("nothing")


async def is_refused(of: ApiKeys, text: str) -> bool:
    try:
        await of.verify(text)
    except (Unauthenticated, Forbidden):
        return True
    return False


async def test_a_key_expires_while_it_is_cached(server: Server) -> None:
    key, text = await server.keys.create("ci", tenant="default", ttl_s=60)
    assert key.expires_at is not None
    assert key.expires_at - key.created_at == timedelta(seconds=60)
    soon = datetime.now(UTC) + timedelta(seconds=0.2)
    async with server.database.write() as connection:
        of_key = tables.api_keys.c.id == key.id
        await connection.execute(sa.update(tables.api_keys).where(of_key).values(expires_at=soon))
    assert (await server.keys.verify(text.get_secret_value())).id == key.id
    await eventually(lambda: is_refused(server.keys, text.get_secret_value()), "expired", bound_s=0.9)
    assert datetime.now(UTC) >= soon


async def test_the_keys_of_a_disabled_tenant_are_refused_and_those_of_a_deleted_one_are_gone(
    settings: Settings, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "RECENT_S", 0.05)
    await server.tenants.create("acme")
    key, text = await server.keys.create("ci", tenant="acme")
    async with Server.open(settings) as other:
        await other.tenants.update("acme", disabled=True)
    with pytest.raises(Forbidden, match="disabled"):
        await server.keys.verify(text.get_secret_value())
    await server.tenants.delete("acme")
    await server.tenants.create("acme")
    assert await server.keys.list("acme") == []
    with pytest.raises(KeyNotFound):
        await server.keys.get(key.id)
    await eventually(lambda: is_unknown(server.keys, text.get_secret_value()), "unknown", bound_s=1.5)


async def is_unknown(of: ApiKeys, text: str) -> bool:
    try:
        await of.verify(text)
    except Unauthenticated:
        return True
    except Forbidden:
        pass
    return False


async def test_the_last_use_is_noted_once_a_minute(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    key, text = await server.keys.create("ci", tenant="default")
    assert key.last_used_at is None
    await server.keys.verify(text.get_secret_value())
    first = (await server.keys.get(key.id)).last_used_at
    await server.keys.verify(text.get_secret_value())
    assert first is not None
    assert (await server.keys.get(key.id)).last_used_at == first
    monkeypatch.setattr(keys, "USE_NOTED_S", 0)
    await server.keys.verify(text.get_secret_value())
    assert (await server.keys.get(key.id)).last_used_at != first
