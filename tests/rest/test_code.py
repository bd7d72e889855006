"""Code over REST: sessions that keep their variables, calls that the client answers, approvals, and ends."""

from __future__ import annotations

from typing import Any

import anyio
import httpx2
import pytest

from atoll.surfaces.rest import code
from atoll.testing.waiting import eventually
from tests.rest.serving import Served, read_events

EVENTS = {"Accept": "text/event-stream"}
TOOL = {
    "name": "lookup",
    "description": "Look a word up.",
    "input_schema": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
}


async def _session(client: httpx2.AsyncClient, box: str, **options: Any) -> str:
    """The path of a new session."""
    made = await client.post(f"/api/v1/sandboxes/{box}/code/sessions", json=options)
    assert made.status_code == 201, made.text
    return made.headers["location"]


async def _execute(client: httpx2.AsyncClient, path: str, text: str, **options: Any) -> dict[str, Any]:
    ran = await client.post(f"{path}/execute", json={"code": text, **options})
    assert ran.status_code == 200, ran.text
    return ran.json()


async def test_a_session_keeps_its_variables(client: httpx2.AsyncClient, box: str) -> None:
    path = await _session(client, box, cwd="/tmp", env={"A": "b"})
    first = await _execute(client, path, "import os; x = 20; print(os.getcwd(), os.environ['A'])")
    assert (first["status"], first["result"]["output"]) == ("ended", "/tmp b\n")
    second = await _execute(client, path, "x * 2 + 2")
    assert second["result"]["parts"][0]["data"]["text/plain"] == "42"
    wrong = (await _execute(client, path, "1 / 0"))["result"]
    assert (wrong["success"], wrong["error"]["type"]) == (False, "ZeroDivisionError")
    late = (await _execute(client, path, "while True: pass", timeout_s=0.3))["result"]
    assert late["timed_out"] is True
    assert (await _execute(client, path, "print(x)"))["result"]["output"] == "20\n"
    found = (await client.get(path)).json()
    assert (found["sandbox"], found["language"], found["executions"]) == (box, "python", 5)
    listed = (await client.get(f"/api/v1/sandboxes/{box}/code/sessions")).json()["items"]
    assert found["id"] in [each["id"] for each in listed]
    again = await client.get(f"{path}/executions/{second['id']}")
    assert again.json() == second
    assert (await client.delete(path)).status_code == 204
    gone = await client.post(f"{path}/execute", json={"code": "1"})
    assert (gone.status_code, gone.json()["code"]) == (404, "code_session_not_found")


async def test_files_in_the_outbox_are_named_and_can_be_read(client: httpx2.AsyncClient, box: str) -> None:
    path = await _session(client, box)
    made = "import os; os.makedirs('outbox', exist_ok=True); open('outbox/plot.bin', 'wb').write(bytes(range(256)))"
    result = (await _execute(client, path, made))["result"]
    assert result["files"] == [{"path": "plot.bin", "size_bytes": 256}]
    read = await client.get(f"/api/v1/sandboxes/{box}/files", params={"path": "outbox/plot.bin"})
    assert read.content == bytes(range(256))
    await client.delete(path)


async def test_a_call_waits_for_its_result(client: httpx2.AsyncClient, box: str) -> None:
    path = await _session(client, box, tools=[TOOL])
    waiting = await _execute(client, path, "a = await lookup(word='sea'); print(a['depth'] + 1)")
    [call] = waiting["calls"]
    assert (waiting["status"], call["tool"], call["arguments"]) == ("waiting", "lookup", {"word": "sea"})
    busy = await client.post(f"{path}/execute", json={"code": "1"})
    assert (busy.status_code, busy.json()["code"]) == (409, "code_session_busy")
    unknown = await client.post(f"{path}/results", json={"results": [{"id": "call_none", "value": 1}]})
    assert unknown.status_code == 400
    given = {"results": [{"id": call["id"], "value": {"depth": 11}}]}
    assert (await client.post(f"{path}/results", json=given)).status_code == 204
    ended = (await client.get(f"{path}/executions/{waiting['id']}", params={"wait_s": 20})).json()
    assert (ended["status"], ended["result"]["output"]) == ("ended", "12\n")
    assert ended["result"]["calls"][0]["tool"] == "lookup"
    assert (await client.post(f"{path}/results", json=given)).status_code == 204, "it has one already"
    await client.delete(path)


async def test_events_have_output_calls_and_the_end(client: httpx2.AsyncClient, box: str) -> None:
    path = await _session(client, box, tools=[TOOL])
    text = "print('before', flush=True)\ntry:\n    await lookup(word='x')\nexcept Exception as error:\n    print(error)"
    seen: list[tuple[str, Any]] = []
    with anyio.fail_after(20):
        async with client.stream("POST", f"{path}/execute", json={"code": text}, headers=EVENTS) as answer:
            async for each in read_events(answer):
                seen.append((each["event"], each["data"]))
                if each["event"] == "call":
                    failed = {"results": [{"id": each["data"]["id"], "error": "no such word"}]}
                    assert (await client.post(f"{path}/results", json=failed)).status_code == 204
    assert seen[0][0] == "execution"
    said = "".join(data["text"] for event, data in seen if event == "stdout")
    assert said == "before\nno such word\n"
    assert seen[-1][0] == "end"
    assert seen[-1][1]["result"]["output"] == said
    assert seen[-1][1]["id"] == seen[0][1]["id"]
    await client.delete(path)


async def test_an_approval_is_listed_and_answered(client: httpx2.AsyncClient, box: str) -> None:
    path = await _session(client, box, tools=[{**TOOL, "needs_approval": True}])
    approvals = f"/api/v1/sandboxes/{box}/code/approvals"
    waiting = await _execute(client, path, "print(await lookup(word='sea'))")
    assert (waiting["status"], waiting["calls"]) == ("waiting", [])
    [asked] = (await client.get(approvals)).json()["items"]
    assert waiting["approvals"] == [asked["id"]]
    assert (asked["tool"], asked["arguments"], asked["sandbox"]) == ("lookup", {"word": "sea"}, box)
    allowed = {"allowed": True, "arguments": {"word": "ocean"}}
    assert (await client.post(f"{approvals}/{asked['id']}", json=allowed)).status_code == 204
    told = (await client.get(f"{path}/executions/{waiting['id']}", params={"wait_s": 20})).json()
    [call] = told["calls"]
    assert call["arguments"] == {"word": "ocean"}
    await client.post(f"{path}/results", json={"results": [{"id": call["id"], "value": "deep"}]})
    ended = (await client.get(f"{path}/executions/{waiting['id']}", params={"wait_s": 20})).json()
    assert ended["result"]["output"] == "deep\n"
    refused = await _execute(
        client, path, "try:\n    await lookup(word='sea')\nexcept Exception as error:\n    print(error)"
    )
    [asked] = (await client.get(approvals)).json()["items"]
    await client.post(f"{approvals}/{asked['id']}", json={"allowed": False, "reason": "too wet"})
    ended = (await client.get(f"{path}/executions/{refused['id']}", params={"wait_s": 20})).json()
    assert "too wet" in ended["result"]["output"]
    again = await client.post(f"{approvals}/{asked['id']}", json={"allowed": True})
    assert (again.status_code, again.json()["code"]) == (404, "approval_not_found")
    await client.delete(path)


async def test_code_goes_on_without_its_client_and_can_be_interrupted(
    client: httpx2.AsyncClient, served: Served, box: str
) -> None:
    path = await _session(client, box)
    text = "y = 7\nprint('going', flush=True)\nimport time\ntime.sleep(60)"
    async with (
        served.client() as other,
        other.stream("POST", f"{path}/execute", json={"code": text}, headers=EVENTS) as answer,
    ):
        events = read_events(answer)
        begun = await anext(events)
        assert (await anext(events))["data"]["text"].startswith("going")
    execution = f"{path}/executions/{begun['data']['id']}"
    assert (await client.get(execution)).json()["status"] == "running"
    assert (await client.post(f"{path}/interrupt")).status_code == 204
    ended = (await client.get(execution)).json()
    assert (ended["status"], ended["result"]["error"]["type"]) == ("ended", "Interrupted")
    assert (await _execute(client, path, "print(y)"))["result"]["output"] == "7\n"
    await client.delete(path)


async def test_a_session_that_is_not_used_ends_with_its_process(
    client: httpx2.AsyncClient, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "_SWEEP_S", 0.1)

    async def kernels() -> int:
        found = (await client.get(f"/api/v1/sandboxes/{box}/processes", params={"limit": 1000})).json()["items"]
        return sum(each["live"] and "atoll-kernel" in each["command"] for each in found)

    before = await kernels()
    path = await _session(client, box, idle_timeout_s=1)
    assert await kernels() == before + 1

    async def has_ended() -> bool:
        return await kernels() == before

    await eventually(has_ended, "the kernel was ended")
    assert (await client.get(path)).status_code == 404


@pytest.mark.parametrize(
    ("language", "text", "said"), [("bash", "x=5; echo $x", "5\n"), ("javascript", "console.log(6)", "6\n")]
)
async def test_other_languages(client: httpx2.AsyncClient, box: str, language: str, text: str, said: str) -> None:
    path = await _session(client, box, language=language)
    assert (await _execute(client, path, text))["result"]["output"] == said
    await client.delete(path)


async def test_another_sandbox_or_tenant_does_not_have_the_session(
    client: httpx2.AsyncClient, served: Served, box: str
) -> None:
    path = await _session(client, box)
    id = path.rpartition("/")[2]
    (await client.post("/api/v1/sandboxes", json={"name": "beside"})).raise_for_status()
    beside = await client.get(f"/api/v1/sandboxes/beside/code/sessions/{id}")
    never = await client.get("/api/v1/sandboxes/beside/code/sessions/ses_never")
    assert beside.status_code == never.status_code == 404
    assert beside.json()["code"] == never.json()["code"] == "code_session_not_found"
    await client.delete("/api/v1/sandboxes/beside")
    async with served.client(await served.tenant("code-other")) as other:
        assert (await other.get(path)).json()["code"] == "sandbox_not_found"
    for wrong in (
        {"language": "cobol"},
        {"tools": [{**TOOL, "name": "not a name"}]},
        {"tools": [TOOL, TOOL]},
        {"idle_timeout_s": 0},
        {"network": "*"},
    ):
        refused = await client.post(f"/api/v1/sandboxes/{box}/code/sessions", json=wrong)
        assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request"), wrong
    await client.delete(path)
