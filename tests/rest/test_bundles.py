"""Bundles over REST: uploaded as they come, the same once, per tenant, and deleted with all that is of them."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import sqlalchemy as sa

from atoll.bundles.archive import MAX_BUNDLE_BYTES
from atoll.bundles.workspace import Workspace, WorkspaceInstance, WorkspaceSpec
from atoll.contract.errors import BundleFailed, QuotaExceeded
from atoll.server import bundles as stored_bundles
from atoll.server.tables import bundles, metadata
from atoll.server.tenants import Quotas, TenantPolicy
from tests.bundles.making import manifest, packed
from tests.origin import TestAuthority, origin
from tests.rest.serving import Served

BUNDLES = "/api/v1/bundles"
GZIP = {"Content-Type": "application/gzip"}
SOURCE = 'def run(path: str):\n    """Read it."""\n    return {"ok": True, "content": path}\n'


def made(word: str) -> bytes:
    return packed(f"{SOURCE}# {word}\n", manifest("run"))


async def upload(client: httpx2.AsyncClient, content: bytes) -> dict[str, Any]:
    answer = await client.post(BUNDLES, content=content, headers=GZIP)
    assert answer.status_code in (200, 201), answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_an_upload_is_answered_with_what_a_config_names(client: httpx2.AsyncClient) -> None:
    content = made("first")
    answer = await client.post(BUNDLES, content=content, headers=GZIP)
    body = answer.json()
    assert answer.status_code == 201
    assert answer.headers["location"] == f"{BUNDLES}/{body['bundle_id']}"
    assert body["bundle_id"].startswith("bdl_")
    assert {**body, "bundle_id": ""} == {
        "bundle_id": "",
        "sha256": hashlib.sha256(content).hexdigest(),
        "size_bytes": len(content),
    }
    again = await client.post(BUNDLES, content=content, headers=GZIP)
    assert (again.status_code, again.json()) == (200, body)

    found = (await client.get(answer.headers["location"])).json()
    assert found["url"] == f"nap-bundle://{body['bundle_id']}"
    assert found["manifest"]["tools"][0]["entrypoint"] == "tools.main:run"
    assert found["tools"] == [
        {
            "name": "run",
            "description": "Read it.",
            "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        }
    ]
    listed = (await client.get(BUNDLES)).json()["items"]
    assert [each["bundle_id"] for each in listed] == [body["bundle_id"]]
    assert (await client.delete(answer.headers["location"])).status_code == 204
    gone = await client.get(answer.headers["location"])
    assert (gone.status_code, gone.json()["code"]) == (404, "bundle_not_found")


async def test_uploads_and_deletions_are_in_the_audit_log(client: httpx2.AsyncClient) -> None:
    body = await upload(client, made("audited"))
    await client.delete(f"{BUNDLES}/{body['bundle_id']}")
    written = (await client.get("/api/v1/audit", params={"limit": 5})).json()["items"]
    actions = {(each["action"], each["resource"]) for each in written}
    resource = f"bundles/{body['bundle_id']}"
    assert {("bundles_create", resource), ("bundles_delete", resource)} <= actions


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"not gzip", GZIP, 422, "bundle_failed"),
        (b"", GZIP, 400, "invalid_request"),
        (made("x"), {"Content-Type": "application/json"}, 415, "unsupported_media_type"),
        (packed(SOURCE, manifest("run", more=1)), GZIP, 422, "bundle_failed"),
    ],
    ids=lambda value: "content" if isinstance(value, bytes) else None,
)
async def test_what_is_no_bundle_is_refused(
    served: Served, client: httpx2.AsyncClient, content: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    answer = await client.post(BUNDLES, content=content, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    if code == "bundle_failed":
        assert answer.json()["details"] == {"reason": "bundle_manifest_invalid"}
    directory = served.server.directory / "bundles" / "default"
    assert not [path.name for path in directory.glob("*")]


async def test_a_body_above_the_cap_is_refused_before_and_while_it_comes(client: httpx2.AsyncClient) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(80):
            yield b"\0" * (1 << 20)

    answer = await client.post(BUNDLES, content=endless(), headers=GZIP)
    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")
    answer = await client.post(BUNDLES, content=b"\0" * (MAX_BUNDLE_BYTES + 1), headers=GZIP)
    assert (answer.status_code, answer.json()["message"]) == (413, f"the body may have {MAX_BUNDLE_BYTES} bytes")


async def test_a_key_needs_the_scope(served: Served) -> None:
    _, key = await served.server.keys.create("no bundles", tenant="default", role="member", scopes=["volumes"])
    async with served.client(key.get_secret_value()) as client:
        answer = await client.post(BUNDLES, content=made("scope"), headers=GZIP)
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")


async def test_a_bundle_that_a_row_refers_to_is_not_deleted(served: Served, client: httpx2.AsyncClient) -> None:
    body = await upload(client, made("used"))
    # Any table that refers to it, as configs do.
    users = sa.Table("users_of_bundles", sa.MetaData(), sa.Column("bundle", sa.Text))
    reference = f"CREATE TABLE users_of_bundles (bundle TEXT REFERENCES {bundles.name}(id))"
    assert bundles.name in metadata.tables
    async with served.server.database.write() as connection:
        await connection.execute(sa.text(reference))
        await connection.execute(sa.insert(users).values(bundle=body["bundle_id"]))
    answer = await client.delete(f"{BUNDLES}/{body['bundle_id']}")
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    assert (await client.get(f"{BUNDLES}/{body['bundle_id']}")).status_code == 200
    async with served.server.database.write() as connection:
        await connection.execute(sa.text("DROP TABLE users_of_bundles"))
    assert (await client.delete(f"{BUNDLES}/{body['bundle_id']}")).status_code == 204


async def test_deleting_a_bundle_removes_its_bytes_and_what_was_built(
    served: Served, client: httpx2.AsyncClient
) -> None:
    body = await upload(client, made("built"))
    engine = await served.server.engines.get("default")
    stored = await served.server.bundles.get("default", body["bundle_id"])
    file = served.server.bundles.file("default", stored)
    assert file.path.read_bytes() == made("built")

    async def record(_instance: WorkspaceInstance) -> None: ...

    workspace = Workspace(engine, WorkspaceSpec(sandbox="built", bundle=file), record)
    result = await workspace.tools(["run"]).handle_tool_call("run", {"path": "there"})
    await workspace.destroy()
    assert result.content == "there"
    assert [(each.label or "")[:39] for each in await engine.checkpoints()] == [f"bundle-{body['sha256'][:32]}"]
    assert (await client.delete(f"{BUNDLES}/{body['bundle_id']}")).status_code == 204
    assert await engine.checkpoints() == []
    assert not file.path.exists()


async def test_bundles_and_what_was_built_of_them_count_for_the_quota_of_disk(served: Served) -> None:
    one, two = made("counted, one"), made("counted, two")
    key = await served.tenant("full", quotas=Quotas(disk_bytes=len(one) + 200))
    tenant, engine = await served.server.tenants.get("full"), await served.server.engines.get("full")
    async with served.client(key) as client:
        body = await upload(client, one)
        assert (await client.get("/api/v1/me")).json()["usage"]["disk_bytes"] == len(one)
        refused = await client.post(BUNDLES, content=two, headers=GZIP)
        told = refused.json()
        assert (refused.status_code, told["code"]) == (403, "quota_exceeded")
        assert "remove sandboxes, volumes or tool bundles that are not needed" in told["message"]
        assert told["details"] == {
            "quota": "disk_bytes",
            "used": len(one),
            "asked": len(two),
            "allowed": len(one) + 200,
        }
        assert [each.name for each in (served.server.directory / "bundles" / "full").iterdir()] == [
            f"{body['sha256']}.tgz"
        ]
        assert (await client.post(BUNDLES, content=one, headers=GZIP)).json() == body  # it takes no more
        with pytest.raises(QuotaExceeded):
            async with served.server.quotas.reserve_volume(tenant, engine, "v", 1 << 20):
                pass

        async def record(_instance: WorkspaceInstance) -> None: ...

        stored = await served.server.bundles.get("full", body["bundle_id"])
        spec = WorkspaceSpec(sandbox="counted", bundle=served.server.bundles.file("full", stored))
        workspace = Workspace(engine, spec, record)
        assert (await workspace.tools(["run"]).handle_tool_call("run", {"path": "there"})).content == "there"
        await workspace.destroy()
        (built,) = await engine.checkpoints()
        assert built.size_bytes
        assert (await client.get("/api/v1/me")).json()["usage"]["disk_bytes"] == len(one) + built.size_bytes
        assert (await client.delete(f"{BUNDLES}/{body['bundle_id']}")).status_code == 204
        assert (await client.get("/api/v1/me")).json()["usage"]["disk_bytes"] == 0
        await upload(client, two)
    await served.server.delete_tenant("full", destroy=True)


async def test_what_a_killed_process_has_left_is_removed(
    served: Served, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = await upload(client, made("kept"))
    directory = served.server.directory / "bundles" / "default"
    (directory / "upload-0011").write_bytes(b"half")
    (directory / f"{'0' * 64}.tgz").write_bytes(b"deleted before")
    monkeypatch.setattr(stored_bundles, "_ABANDONED_S", -1.0)
    monkeypatch.setattr(stored_bundles, "_TIDY_S", 0.0)
    await served.server.bundles.tidy()
    assert [path.name for path in directory.iterdir()] == [f"{body['sha256']}.tgz"]
    await client.delete(f"{BUNDLES}/{body['bundle_id']}")


async def test_a_handle_is_resolved_by_its_tenant_and_digest(served: Served, client: httpx2.AsyncClient) -> None:
    body = await upload(client, made("handle"))
    handle = f"nap-bundle://{body['bundle_id']}"
    store = served.server.bundles
    assert (await store.resolve("default", handle, body["sha256"])).bundle_id == body["bundle_id"]
    await served.tenant("another")
    for tenant, url, sha256, reason in (
        ("another", handle, body["sha256"], "bundle_fetch_failed"),
        ("default", handle, "0" * 64, "bundle_integrity_failed"),
        ("default", "nap-bundle://bdl_no", body["sha256"], "bundle_fetch_failed"),
        ("default", "http://example.com/b.tgz", "0" * 64, "bundle_fetch_failed"),
        ("default", "file:///etc/passwd", "0" * 64, "bundle_fetch_failed"),
        ("default", "https://127.0.0.1/b.tgz", "0" * 64, "bundle_fetch_failed"),
        ("another", "https://example.com/b.tgz", "0" * 64, "bundle_fetch_failed"),
    ):
        with pytest.raises(BundleFailed) as failed:
            await store.resolve(tenant, url, sha256)
        assert failed.value.reason == reason, url
        assert "127.0.0.1" not in failed.value.message or "127.0.0.1" in url
    await client.delete(f"{BUNDLES}/{body['bundle_id']}")


async def test_a_tenant_is_deleted_with_its_bundles(served: Served) -> None:
    key = await served.tenant("short-lived", policy=TenantPolicy())
    async with served.client(key) as client:
        await upload(client, made("theirs"))
    async with served.client() as operator:
        refused = await operator.delete("/api/v1/tenants/short-lived")
        assert "has 1 bundles" in refused.json()["message"]
        gone = await operator.delete("/api/v1/tenants/short-lived", params={"destroy": True})
        assert gone.status_code == 204, gone.text
    assert not (served.server.directory / "bundles" / "short-lived").exists()


async def test_a_url_is_fetched_once_where_the_policy_allows_its_host(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = TestAuthority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    content = made("fetched")
    digest = hashlib.sha256(content).hexdigest()
    await served.tenant("fetching", policy=TenantPolicy(networks=("localhost", "127.0.0.1")))
    await served.tenant("public-only", policy=TenantPolicy(networks=("*",)))
    store = served.server.bundles
    async with origin(authority.server_context("localhost")) as there:
        there.stored = content
        url = f"https://localhost:{there.port}"

        async def refused(tenant: str, path: str, sha256: str) -> tuple[str, str]:
            with pytest.raises(BundleFailed) as failed:
                await store.resolve(tenant, url + path, sha256)
            return failed.value.reason, failed.value.message

        # A name that is allowed, and an address that is not: nothing is sent there.
        reason, message = await refused("public-only", "/stored", digest)
        assert (reason, "does not let the server fetch from localhost" in message) == ("bundle_fetch_failed", True)
        assert there.connections == 0
        assert (await refused("fetching", "/stored", "0" * 64))[0] == "bundle_integrity_failed"
        reason, message = await refused("fetching", "/moved", digest)
        assert (reason, "the answer of the bundle's host was 302" in message) == ("bundle_fetch_failed", True)
        found = await store.resolve("fetching", f"{url}/stored", digest)
        asked = len(there.asked)
        assert found.sha256 == digest
        assert await store.resolve("fetching", f"{url}/stored", digest) == found
        assert len(there.asked) == asked  # its bytes are here
    assert [path.name for path in (served.server.directory / "bundles" / "fetching").iterdir()] == [f"{digest}.tgz"]
    reason, _ = await refused("fetching", "/other", "1" * 64)
    assert reason == "bundle_fetch_failed"  # nothing listens there any more
