"""The control plane, through the newest E2B SDK."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, cast

import httpx2
import pytest
from e2b import (
    AuthenticationException,
    NotFoundException,
    Sandbox,
    SandboxException,
    SandboxQuery,
    SandboxState,
)

from atoll.testing.server import RunningServer
from atoll.testing.waiting import BOUND_S


@pytest.fixture
def box() -> Iterator[Sandbox]:
    made = Sandbox.create(timeout=120)
    yield made
    made.kill()


def listed(**query: object) -> list[str]:
    pages = Sandbox.list(query=SandboxQuery(**query), limit=2)  # type: ignore[arg-type]
    found = []
    while pages.has_next:
        found += [each.sandbox_id for each in pages.next_items()]
    return found


def test_a_sandbox_lives_from_create_to_kill() -> None:
    made = Sandbox.create(timeout=60, metadata={"who": "me"})
    assert made.sandbox_id.isalnum()
    assert made.sandbox_id == made.sandbox_id.lower()
    info = made.get_info()
    assert (info.template_id, info.state, info.metadata) == ("base", SandboxState.RUNNING, {"who": "me"})
    assert 50 < (info.end_at - info.started_at).total_seconds() < 70
    assert made.is_running()
    assert made.kill()
    assert not made.kill()
    assert not made.is_running()
    with pytest.raises(NotFoundException):
        Sandbox.get_info(made.sandbox_id)


def test_metadata_are_any_texts_and_lists_filter_by_them_in_pages() -> None:
    mark = uuid.uuid4().hex
    boxes = [Sandbox.create(timeout=60, metadata={"mark": mark, "text": f"a=b&c d/é {i}"}) for i in range(3)]
    assert listed(metadata={"mark": mark}) == [each.sandbox_id for each in reversed(boxes)]
    assert listed(metadata={"mark": mark, "text": "a=b&c d/é 1"}) == [boxes[1].sandbox_id]
    assert listed(metadata={"mark": "other"}) == []
    boxes[0].pause()
    assert listed(metadata={"mark": mark}, state=[SandboxState.PAUSED]) == [boxes[0].sandbox_id]
    assert len(listed(metadata={"mark": mark}, state=[SandboxState.RUNNING])) == 2
    for each in boxes:
        each.kill()


def test_connect_only_ever_lengthens_the_timeout(box: Sandbox) -> None:
    before = box.get_info().end_at
    Sandbox.connect(box.sandbox_id, timeout=10)
    assert box.get_info().end_at == before
    Sandbox.connect(box.sandbox_id, timeout=600)
    assert (box.get_info().end_at - before).total_seconds() > 400
    box.set_timeout(30)
    assert box.get_info().end_at < before


def test_a_paused_sandbox_answers_when_it_is_connected_to_and_not_before(box: Sandbox) -> None:
    assert box.pause()
    assert not box.pause()
    assert box.get_info().state == SandboxState.PAUSED
    assert not box.is_running()
    assert box.connect(timeout=60).is_running()
    assert box.get_info().state == SandboxState.RUNNING


def test_a_fork_and_a_snapshot_are_sandboxes_of_their_own(box: Sandbox) -> None:
    [fork] = box.fork(timeout=60)
    assert isinstance(fork, Sandbox)
    assert fork.sandbox_id != box.sandbox_id
    assert fork.is_running()
    snapshot = box.create_snapshot()
    again = Sandbox.create(snapshot.snapshot_id, timeout=60, metadata={"from": "snapshot"})
    assert again.get_info().metadata == {"from": "snapshot"}
    assert [each.snapshot_id for each in Sandbox.list_snapshots(box.sandbox_id).next_items()] == [snapshot.snapshot_id]
    fork.kill()
    again.kill()
    assert Sandbox.delete_snapshot(snapshot.snapshot_id)
    assert not Sandbox.delete_snapshot(snapshot.snapshot_id)


def test_the_network_can_be_closed_and_what_has_no_equal_is_refused(box: Sandbox) -> None:
    box.update_network({"deny_out": ["0.0.0.0/0"], "allow_out": ["example.com"]})
    network = box.get_info().network
    assert network is not None
    assert network["allow_out"] == ["example.com"]
    with pytest.raises(SandboxException, match="501: the field 'egressProxy'"):
        box.update_network({"egress_proxy": {"address": "proxy.example.com:1080"}})
    with pytest.raises(SandboxException, match="501: the field 'dnsServers'"):
        box.update_network({"dns_servers": ["192.0.2.53"]})
    box.update_network({"dns_servers": []})  # names are resolved outside: none of the sandbox's own is reached anyway


def test_metrics_say_what_the_sandbox_uses(box: Sandbox) -> None:
    latest = box.get_metrics()[-1]
    assert latest.cpu_count >= 1
    assert 0 < latest.mem_used < latest.mem_total
    box.commands.run("head -c 30000000 /dev/zero > cached")
    assert 25_000_000 < box.get_metrics()[-1].mem_cache <= box.get_metrics()[-1].mem_used


def test_a_wrong_key_and_an_unknown_template_are_refused() -> None:
    with pytest.raises(AuthenticationException):
        Sandbox.create(api_key="e2b_" + "0" * 40)
    with pytest.raises(SandboxException, match="404: there is no template or snapshot 'no-such-template'"):
        Sandbox.create("no-such-template")


def test_where_the_image_has_no_mcp_gateway_nothing_is_left() -> None:
    mark = {"mark": uuid.uuid4().hex}
    with pytest.raises(SandboxException, match="Failed to start MCP gateway"):
        Sandbox.create("base", timeout=60, metadata=mark, mcp=cast("Any", {"any": {}}))
    assert listed(metadata=mark) == []


def test_the_same_idempotency_key_makes_one_sandbox() -> None:
    key = uuid.uuid4().hex
    first, second = (Sandbox.create(timeout=60, idempotency_key=key) for _ in range(2))
    assert first.sandbox_id == second.sandbox_id
    assert second.is_running()
    first.kill()


def test_older_sdks_paths_work_and_unknown_ones_say_so(server: RunningServer) -> None:
    with httpx2.Client(base_url=server.url, headers=server.headers, timeout=BOUND_S) as client:
        made = client.post("/sandboxes", json={"templateID": "base"})
        assert made.status_code == 201
        id = made.json()["sandboxID"]
        assert client.post(f"/sandboxes/{id}/connect", json={"timeout": 60}).status_code == 200
        assert id in [each["sandboxID"] for each in client.get("/sandboxes").json()]
        for path in ("/volumes", "/secrets", f"/sandboxes/{id}/logs"):
            answer = client.get(path)
            assert (answer.status_code, answer.json()["code"]) == (501, 501), path
        assert client.delete(f"/sandboxes/{id}").status_code == 204
        assert client.get("/sandboxes", headers={"X-API-Key": "none"}).status_code == 401
