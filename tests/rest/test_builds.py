"""Builds and templates over REST: files uploaded, steps run, logs followed, builds cancelled, and remembered."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from atoll.builds import uploads
from atoll.contract.model import Build, Limits
from atoll.server import builds as server_builds
from atoll.server.builds import BuildRecord, BuildStates
from atoll.server.keys import KeyScope
from atoll.server.tenants import Quotas, TenantPolicy
from atoll.testing.waiting import BOUND_S, eventually
from tests.rest.serving import Served, read_events, serving

BUILDS, TEMPLATES = "/api/v1/builds", "/api/v1/templates"
ENDED = ("ready", "failed", "cancelled", "interrupted")
LONG = "FROM host\nRUN echo first\nRUN echo begun; sleep 1000"


def tar_of(**files: str) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name.replace("__", "."))
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return content.getvalue()


@pytest.fixture(autouse=True)
async def nothing_is_left(served: Served) -> AsyncIterator[None]:
    yield
    for tenant in await served.server.tenants.list():
        engine = await served.server.engines.get(tenant.name)
        for template in await engine.templates.list():
            await engine.templates.remove(template.name)
        for build in await served.server.builds.list(tenant.name):
            await served.server.builds.cancel(tenant.name, build.id)
        for info in await engine.list():
            await engine.destroy(info.name, checkpoints=True)
        for each in await engine.checkpoints():
            await engine.delete_checkpoint(each.id)


async def upload(client: httpx2.AsyncClient, content: bytes) -> str:
    name = hashlib.sha256(content).hexdigest()
    answer = await client.put(f"{BUILDS}/files/{name}", content=content, headers={"Content-Type": "application/x-tar"})
    assert answer.status_code == 204, answer.text
    return name


async def begin(client: httpx2.AsyncClient, dockerfile: str, name: str = "web", **body: Any) -> dict[str, Any]:
    answer = await client.post(BUILDS, json={"name": name, "dockerfile": dockerfile, **body})
    assert answer.status_code == 201, answer.text
    build: dict[str, Any] = answer.json()
    assert answer.headers["location"] == f"{BUILDS}/{build['id']}"
    return build


async def events_of(client: httpx2.AsyncClient, build: str, **options: Any) -> list[dict[str, Any]]:
    async with client.stream("GET", f"{BUILDS}/{build}/events", **options) as answer:
        assert answer.status_code == 200
        return [each async for each in read_events(answer)]


async def finished(client: httpx2.AsyncClient, build: dict[str, Any]) -> dict[str, Any]:
    ended: dict[str, Any] = (await events_of(client, build["id"]))[-1]["data"]
    assert ended == (await client.get(f"{BUILDS}/{build['id']}")).json()
    assert ended["status"] in ENDED
    return ended


async def has_begun(client: httpx2.AsyncClient, build: dict[str, Any]) -> None:
    async def seen() -> bool:
        lines = (await client.get(f"{BUILDS}/{build['id']}/log")).json()["items"]
        return any(line["text"] == "begun" for line in lines)

    await eventually(seen, "the step runs")


async def test_a_dockerfile_and_an_archive_become_a_template(client: httpx2.AsyncClient) -> None:
    files = await upload(client, tar_of(page__html="hi\n", other__txt="no\n"))
    assert (await client.get(f"{BUILDS}/files/{files}")).json() == {"files": files}
    dockerfile = "FROM host\nARG WHO=you\nRUN printf 'made for %s' $WHO | tee /who\nCOPY *.html /srv/\nCMD sleep 1000"
    build = await begin(client, dockerfile, tags=["default", "v1"], files=files, arguments={"WHO": "me"})
    assert (build["status"], build["steps"], build["ended_at"]) == ("building", 3, None)
    told = await events_of(client, build["id"])
    assert [each["event"] for each in told] == ["log"] * (len(told) - 1) + ["done"]
    assert [int(each["id"]) for each in told[:-1]] == list(range(1, len(told)))
    lines = [(each["data"]["kind"], each["data"]["step"], each["data"]["text"]) for each in told[:-1]]
    assert ("step", 2, "[2/3] RUN printf 'made for %s' $WHO | tee /who") in lines
    assert ("output", 2, "made for me") in lines
    done = told[-1]["data"]
    assert (done["status"], done["reason"], done["version"]["build_id"]) == ("ready", None, build["id"])
    template = (await client.get(f"{TEMPLATES}/web")).json()
    assert set(template["versions"]) == {"default", "v1"}
    assert template["versions"]["v1"] == done["version"]
    (await client.post("/api/v1/sandboxes", json={"name": "box", "image": "template:web:v1"})).raise_for_status()
    command = {"command": "cat /who; ls /srv"}
    assert (await client.post("/api/v1/sandboxes/box/exec", json=command)).json()["stdout"] == "made for mepage.html\n"
    again = await begin(client, dockerfile, "other", files=files, arguments={"WHO": "me"})
    cached = [
        each["data"]["step"] for each in await events_of(client, again["id"]) if each["data"].get("kind") == "cached"
    ]
    assert cached == [2, 3]


async def test_a_plan_is_built_and_a_log_is_read_in_pages_and_from_the_middle(client: httpx2.AsyncClient) -> None:
    run = {"kind": "run", "command": ["sh", "-c", "seq 5"]}
    answer = await client.post(BUILDS, json={"name": "web", "plan": {"steps": [run]}})
    build = answer.json()
    await finished(client, build)
    first = (await client.get(f"{BUILDS}/{build['id']}/log", params={"limit": 3})).json()
    rest = (await client.get(f"{BUILDS}/{build['id']}/log", params={"after": first["next"]})).json()
    lines = first["items"] + rest["items"]
    assert [line["number"] for line in lines] == list(range(1, len(lines) + 1))
    assert [line["text"] for line in lines if line["kind"] == "output"] == ["1", "2", "3", "4", "5"]
    assert rest["next"] is None
    resumed = await events_of(client, build["id"], headers={"Last-Event-ID": "2"})
    assert resumed[0]["id"] == "3"
    ended = await events_of(client, build["id"], params={"follow": False, "after": 10_000})
    assert [each["event"] for each in ended] == ["done"]
    listed = (await client.get(BUILDS, params={"limit": 1000})).json()["items"]
    assert build["id"] in [each["id"] for each in listed]


async def test_tags_are_set_and_removed(client: httpx2.AsyncClient) -> None:
    await finished(client, await begin(client, "FROM host\nRUN true"))
    tagged = await client.put(f"{TEMPLATES}/web/tags/stable", json={"version": "default"})
    assert set(tagged.json()["versions"]) == {"default", "stable"}
    assert (await client.put(f"{TEMPLATES}/web/tags/x", json={"version": "none"})).status_code == 404
    assert (await client.put(f"{TEMPLATES}/web/tags/Not%20one", json={})).status_code == 400
    assert (await client.delete(f"{TEMPLATES}/web/tags/none")).json()["code"] == "template_not_found"
    assert (await client.delete(f"{TEMPLATES}/web/tags/default")).status_code == 204
    assert [each["name"] for each in (await client.get(TEMPLATES)).json()["items"]] == ["web"]
    assert (await client.delete(f"{TEMPLATES}/web")).status_code == 204
    gone = await client.get(f"{TEMPLATES}/web")
    assert (gone.status_code, gone.json()["message"]) == (404, "no template is named 'web'")
    assert len((await client.post(f"{TEMPLATES}/gc")).json()["removed"]) == 1


async def test_a_build_that_fails_says_in_which_step_and_what_it_printed(client: httpx2.AsyncClient) -> None:
    ended = await finished(client, await begin(client, "FROM host\nRUN true\nRUN echo why; exit 3"))
    assert (ended["status"], ended["failed_step"], ended["version"]) == ("failed", 2, None)
    assert ended["reason"] == "step 2 of 2: RUN echo why; exit 3 failed with exit code 3:\nwhy"
    assert (await client.get(f"{TEMPLATES}/web")).status_code == 404


async def test_a_cancelled_build_leaves_only_the_results_of_complete_steps(
    served: Served, client: httpx2.AsyncClient
) -> None:
    build = await begin(client, LONG)
    await has_begun(client, build)
    cancelled = (await client.post(f"{BUILDS}/{build['id']}/cancel")).json()
    assert (cancelled["status"], cancelled["step"]) == ("cancelled", 2)
    assert (await client.post(f"{BUILDS}/{build['id']}/cancel")).json() == cancelled
    engine = await served.server.engines.get("default")
    assert await engine.list() == []
    assert len(await engine.checkpoints()) == 1
    assert await finished(client, build) == cancelled


async def test_a_build_can_be_cancelled_while_its_sandbox_is_made(served: Served, client: httpx2.AsyncClient) -> None:
    engine = await served.server.engines.get("default")
    for requests in range(6):  # at any moment
        build = await begin(client, "FROM host\nRUN sleep 1000", cache=False)
        for _ in range(requests):
            await client.get(f"{BUILDS}/{build['id']}")
        with anyio.fail_after(BOUND_S):
            assert (await client.post(f"{BUILDS}/{build['id']}/cancel")).json()["status"] == "cancelled"
        assert await engine.list() == []


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"dockerfile": "FROM host\nHEALTHCHECK NONE"}, 422, "line 2: HEALTHCHECK is not supported"),
        ({"dockerfile": "FROM host\nCOPY a /b"}, 422, "line 2: COPY needs a directory with files"),
        ({"dockerfile": "FROM host\nCOPY a /b", "files": "0" * 64}, 422, "are not there; upload them first"),
        ({"dockerfile": "RUN true"}, 422, "line 1: RUN comes before FROM"),
        ({"dockerfile": "FROM host\nWORKDIR " + '"\\' * 50_000}, 422, "line 2: WORKDIR is longer than"),
        ({"dockerfile": "FROM host\nARG " + " ".join("a" * 300)}, 422, "the Dockerfile cannot be built: steps"),
        ({}, 400, "give one of plan and dockerfile"),
        ({"dockerfile": "FROM host", "plan": {}}, 400, "give one of plan and dockerfile"),
        ({"plan": {}, "arguments": {"A": "b"}}, 400, "a plan has its own"),
        ({"plan": {"image": "template:none"}}, 404, "no template is named"),
        ({"plan": {"steps": [{"kind": "mount"}]}}, 400, "mount"),
        ({"dockerfile": "FROM host", "runtime": "docker"}, 422, "docker"),
    ],
)
async def test_what_cannot_be_built_is_refused_before_it_begins(
    client: httpx2.AsyncClient, body: dict[str, Any], status: int, said: str
) -> None:
    answer = await client.post(BUILDS, json={"name": "web", **body})
    assert answer.status_code == status, answer.text
    assert said in answer.json()["message"]
    assert not [each for each in (await client.get(BUILDS)).json()["items"] if each["status"] == "building"]


async def test_a_build_has_what_the_policy_and_the_quotas_of_its_tenant_allow(served: Served) -> None:
    policy = TenantPolicy(images=("host",), max_limits=Limits(memory_bytes=1 << 30))
    key = await served.tenant("bound", policy=policy)
    async with served.client(key) as client:
        for body in (
            {"dockerfile": "FROM python:3"},
            {"dockerfile": "FROM host", "network": {"allow": ["example.com"]}},
            {"dockerfile": "FROM host", "limits": {"memory_bytes": 1 << 40}},
        ):
            answer = await client.post(BUILDS, json={"name": "web", **body})
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), answer.text
        await served.server.tenants.update("bound", quotas=Quotas(sandboxes=0))
        ended = await finished(client, await begin(client, "FROM host\nRUN true"))
        assert ended["status"] == "failed"
        assert "quota of sandboxes" in ended["reason"]
    refused: tuple[list[KeyScope], ...] = (["sandboxes:read"], ["sandboxes:write"], ["volumes"])
    for scopes in refused:
        _, weak = await served.server.keys.create("weak", tenant="bound", role="member", scopes=scopes)
        async with served.client(weak.get_secret_value()) as client:
            answer = await client.post(BUILDS, json={"name": "web", "dockerfile": "FROM host"})
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")


async def test_as_many_builds_of_a_tenant_run_as_may(
    served: Served, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_builds, "MAX_RUNNING", 1)
    build = await begin(client, LONG)
    refused = await client.post(BUILDS, json={"name": "web", "dockerfile": LONG})
    assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
    await client.post(f"{BUILDS}/{build['id']}/cancel")


async def test_a_repeated_request_begins_one_build(client: httpx2.AsyncClient) -> None:
    body, key = {"name": "web", "dockerfile": "FROM host\nRUN true"}, {"Idempotency-Key": uuid.uuid4().hex}
    first = await client.post(BUILDS, json=body, headers=key)
    again = await client.post(BUILDS, json=body, headers=key)
    assert again.json() == first.json()
    assert again.headers["idempotency-replayed"] == "true"
    await finished(client, first.json())


async def test_builds_are_in_the_audit_log(client: httpx2.AsyncClient) -> None:
    build = await begin(client, LONG)
    await client.post(f"{BUILDS}/{build['id']}/cancel")
    written = (await client.get("/api/v1/audit", params={"limit": 5})).json()["items"]
    actions = {(each["action"], each["resource"], each["details"].get("build")) for each in written}
    assert {("builds_create", "templates/web", build["id"]), ("builds_cancel", "templates/web", build["id"])} <= actions


async def test_an_upload_is_bounded_and_named_by_a_hash(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.surfaces.rest.builds.MAX_UPLOAD_BYTES", 1000)
    name = "ab" * 32

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield bytes(100)

    for content, status in ((endless(), 413), (bytes(2000), 413), (b"", 400)):
        answer = await client.put(f"{BUILDS}/files/{name}", content=content)
        assert answer.status_code == status, answer.text
        assert (await client.get(f"{BUILDS}/files/{name}")).json()["code"] == "build_not_found"
    assert (await client.put(f"{BUILDS}/files/..%2Fx", content=b"x")).status_code in (400, 404)
    assert uploads.MAX_UPLOAD_BYTES > 1000


async def test_a_build_is_remembered_after_a_restart_and_an_interrupted_one_is_said_to_be_that(
    make_state_dir: Callable[[], Path],
) -> None:
    state_dir = make_state_dir()
    async with serving(state_dir) as served, served.client() as client:
        key = served.key
        done = await finished(client, await begin(client, "FROM host\nRUN echo kept"))
        running = await begin(client, LONG, "other")
        await has_begun(client, running)
    killed = str(uuid.uuid4())
    states = BuildStates(state_dir / "server" / "build-states")
    states.write(
        "default",
        BuildRecord(
            build=Build(id=killed, template="web", tags=("a",), status="building", created_at=datetime.now(UTC)),
            instance="0123456789abcdef",
        ),
    )
    async with serving(state_dir) as served, served.client(key) as client:
        assert (await client.get(f"{BUILDS}/{done['id']}")).json() == done
        log = (await client.get(f"{BUILDS}/{done['id']}/log")).json()["items"]
        assert "kept" in [line["text"] for line in log]
        for id in (running["id"], killed):
            ended = (await events_of(client, id))[-1]
            assert (ended["event"], ended["data"]["status"]) == ("done", "interrupted")
            assert "the build was interrupted" in ended["data"]["reason"]
            assert (await client.post(f"{BUILDS}/{id}/cancel")).json()["status"] == "interrupted"
        again = await begin(client, LONG, "other")
        await has_begun(client, again)
        lines = (await client.get(f"{BUILDS}/{again['id']}/log")).json()["items"]
        assert [line["step"] for line in lines if line["kind"] == "cached"] == [1], "the finished step stays"
        await client.post(f"{BUILDS}/{again['id']}/cancel")
        listed = (await client.get(BUILDS)).json()["items"]
        statuses = ["ready", "interrupted", "interrupted", "cancelled"]
        assert [each["status"] for each in listed] == statuses
        await client.delete(f"{TEMPLATES}/web")
        await client.post(f"{TEMPLATES}/gc")


async def test_states_of_builds_are_kept_up_to_a_number_and_unreadable_ones_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_builds, "MAX_REMEMBERED", 2)
    states = BuildStates(tmp_path)
    ids = [str(uuid.uuid4()) for _ in range(3)]
    for number, id in enumerate(ids):
        build = Build(id=id, template="web", tags=(), status="ready", created_at=datetime.now(UTC))
        states.write("t", BuildRecord(build=build, instance="x"))
        os.utime(tmp_path / "t" / f"{id}.json", (number, number))
    last = Build(id=ids[2], template="web", tags=(), status="ready", created_at=datetime.now(UTC))
    states.write("t", BuildRecord(build=last, instance="x"))
    assert {each.build.id for each in states.all("t")} == set(ids[1:])
    (tmp_path / "t" / f"{ids[1]}.json").write_text(json.dumps({"version": 1}))
    assert [each.build.id for each in states.all("t")] == ids[2:]
    assert states.read("t", "../t") is None
    states.remove_all("t")
    assert states.all("t") == []


async def test_a_client_that_goes_away_does_not_end_a_build(client: httpx2.AsyncClient) -> None:
    build = await begin(client, "FROM host\nRUN echo begun; while [ ! -e /go ]; do sleep 0.05; done; echo went")
    async with client.stream("GET", f"{BUILDS}/{build['id']}/events") as answer, aclosing(read_events(answer)) as told:
        async for each in told:
            if each["data"]["text"] == "begun":
                break
    (info,) = (await client.get("/api/v1/sandboxes")).json()["items"]
    files = f"/api/v1/sandboxes/{info['name']}/files"
    (await client.put(files, params={"path": "/go", "user": "root"}, content=b"")).raise_for_status()
    assert (await finished(client, build))["status"] == "ready"


@pytest.mark.parametrize(("sudo", "status"), [(True, "ready"), (False, "failed")])
async def test_steps_have_sudo_if_it_was_asked_for(client: httpx2.AsyncClient, sudo: bool, status: str) -> None:
    build = await begin(client, "FROM host\nUSER user\nRUN sudo id -u", sudo=sudo)
    events = await events_of(client, build["id"])
    assert (await client.get(f"{BUILDS}/{build['id']}")).json()["status"] == status, events
