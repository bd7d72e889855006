"""Processes over REST: spawned, read from any byte, written to, signalled, and gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio
import httpx2

from tests.rest.serving import read_events


async def _spawn(client: httpx2.AsyncClient, box: str, command: str, **options: Any) -> str:
    """The path of a new process."""
    made = await client.post(f"/api/v1/sandboxes/{box}/processes", json={"command": command, **options})
    assert made.status_code == 201, made.text
    assert made.headers["location"].endswith(f"/processes/{made.json()['id']}")
    return made.headers["location"]


async def _output(client: httpx2.AsyncClient, path: str, **request: Any) -> list[dict[str, Any]]:
    async with client.stream("GET", f"{path}/output", **request) as answer:
        assert answer.status_code == 200, await answer.aread()
        return [each async for each in read_events(answer)]


async def test_a_process_goes_on_after_its_request(client: httpx2.AsyncClient, box: str) -> None:
    path = await _spawn(client, box, "read line; echo got $line; echo bad >&2; exit 5", stdin=True)
    found = (await client.get(path)).json()
    assert (found["exit_code"], found["live"]) == (None, True)
    listed = (await client.get(f"/api/v1/sandboxes/{box}/processes", params={"limit": 1000})).json()
    assert found["id"] in [each["id"] for each in listed["items"]]
    waited = await client.get(f"{path}/wait", params={"timeout_s": 0.01})
    assert waited.json()["exit_code"] is None
    assert (await client.post(f"{path}/stdin", content=b"he")).status_code == 204
    assert (await client.post(f"{path}/stdin", content=b"llo\n", params={"eof": "true"})).status_code == 204
    assert (await client.get(f"{path}/wait")).json()["exit_code"] == 5
    events = await _output(client, path)
    assert [(each["event"], each["data"].get("text")) for each in events] == [
        ("stdout", "got hello\n"),
        ("stderr", "bad\n"),
        ("exit", None),
    ]
    assert events[-1]["data"]["exit_code"] == 5
    assert (await client.delete(path)).json()["code"] == "process_not_found"


async def test_output_goes_on_at_the_byte_after_the_last_event(client: httpx2.AsyncClient, box: str) -> None:
    path = await _spawn(client, box, r"printf 'one\303'; sleep 0.3; printf '\251two'; printf err >&2")
    await client.get(f"{path}/wait")
    whole = await _output(client, path, params={"stdout_offset": 0, "stderr_offset": 0})
    assert "".join(each["data"]["text"] for each in whole if each["event"] == "stdout") == "oneétwo"
    cut = await _output(client, path, headers={"Last-Event-ID": "3-1"})
    assert [(each["event"], each["data"].get("text"), each["id"]) for each in cut] == [
        ("stdout", "étwo", "8-1"),
        ("stderr", "rr", "8-3"),
        ("exit", None, "8-3"),
    ]
    assert (cut[0]["data"]["offset"], cut[1]["data"]["offset"]) == (3, 1)
    # One that ended in the middle of a character is named by the byte before it.
    async with client.stream("GET", f"{path}/output", params={"stdout_offset": 0}) as answer:
        first = await anext(read_events(answer))
    assert first["id"].partition("-")[0] in ("3", "8")
    assert (await client.get(f"{path}/output", headers={"Last-Event-ID": "x"})).status_code == 400


async def test_what_is_no_longer_kept_is_a_gap(client: httpx2.AsyncClient, box: str) -> None:
    path = await _spawn(client, box, "yes | head -c 300000")
    total = (await client.get(f"{path}/wait")).json()["stdout_total"]
    events = await _output(client, path, params={"stdout_offset": 100, "encoding": "base64"})
    assert events[0]["event"] == "gap"
    begin = events[0]["data"]["offset"]
    assert (events[0]["data"]["stream"], total) == ("stdout", 300000)
    assert begin == total - 65536
    assert events[-1]["event"] == "exit"
    assert events[1]["data"]["offset"] == begin
    beyond = await _output(client, path, params={"stdout_offset": total + 5})
    assert [each["event"] for each in beyond] == ["exit"]


async def test_output_until_now_is_read_without_waiting(client: httpx2.AsyncClient, box: str) -> None:
    path = await _spawn(client, box, "echo begun; exec sleep 60")
    with anyio.fail_after(20):
        while not (events := await _output(client, path, params={"follow": "false"})):
            pass
    assert [each["data"]["text"] for each in events] == ["begun\n"]
    assert (await client.delete(path)).status_code == 204
    assert (await client.get(path)).json()["exit_code"] == 137


async def test_a_terminal_is_resized_and_signalled_by_number(client: httpx2.AsyncClient, box: str) -> None:
    command = "trap 'stty size' WINCH; trap 'echo got usr1; exit 6' USR1; echo ready; while :; do sleep 0.05; done"
    path = await _spawn(client, box, command, pty={"rows": 24, "cols": 80})
    seen = ""
    with anyio.fail_after(20):
        async with client.stream("GET", f"{path}/output", params={"stdout_offset": 0}) as answer:
            async for each in read_events(answer):
                seen += each["data"].get("text", "")
                if seen == "ready\r\n":
                    assert (await client.post(f"{path}/resize", json={"rows": 40, "cols": 132})).status_code == 204
                elif seen.endswith("40 132\r\n"):
                    assert (await client.post(f"{path}/signal", json={"signal": 10})).status_code == 204
    assert seen.endswith("got usr1\r\n")
    assert (await client.get(path)).json()["exit_code"] == 6


async def test_what_needs_one_process_too_many_is_refused(client: httpx2.AsyncClient) -> None:
    made = await client.post("/api/v1/sandboxes", json={"name": "crowded", "limits": {"pids": 24}})
    assert made.status_code == 201, made.text
    spawn = {"command": ["sleep", "60"]}
    spawned = [await client.post("/api/v1/sandboxes/crowded/processes", json=spawn) for _ in range(24)]
    executed = await client.post("/api/v1/sandboxes/crowded/exec", json=spawn)
    for answer in (spawned[-1], executed):
        assert (answer.status_code, answer.json()["code"]) == (409, "too_many_processes"), answer.text
    assert (await client.delete("/api/v1/sandboxes/crowded")).status_code == 204


async def test_input_reaches_a_process_with_a_long_command_line(client: httpx2.AsyncClient, box: str) -> None:
    path = await _spawn(client, box, "read line; echo got $line # " + "x" * 200_000, stdin=True)
    assert (await client.post(f"{path}/stdin", content=b"it\n", params={"eof": "true"})).status_code == 204
    assert (await client.get(f"{path}/wait")).json()["exit_code"] == 0
    assert (await _output(client, path))[0]["data"]["text"] == "got it\n"


async def test_one_request_at_a_time_writes_to_a_process(client: httpx2.AsyncClient, box: str) -> None:
    path = await _spawn(client, box, "read line; echo $line; sleep 60", stdin=True)

    async def never_ending() -> AsyncIterator[bytes]:
        yield b"first\n"
        await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(client.post, f"{path}/stdin", content=never_ending()))
        with anyio.fail_after(20):
            while not await _output(client, path, params={"follow": "false"}):
                pass
        busy = await client.post(f"{path}/stdin", content=b"second")
        assert (busy.status_code, busy.json()["code"]) == (409, "conflict")
        tasks.cancel_scope.cancel()
    assert (await client.delete(path)).status_code == 204


async def test_the_last_signal_is_sent(client: httpx2.AsyncClient, box: str) -> None:
    path = await _spawn(client, box, "exec sleep 60")
    assert (await client.post(f"{path}/signal", json={"signal": 64})).status_code == 204
    assert (await client.get(f"{path}/wait")).json()["exit_code"] == 192


async def test_a_process_that_takes_no_input_or_is_gone_says_so(client: httpx2.AsyncClient, box: str) -> None:
    none = f"/api/v1/sandboxes/{box}/processes/999999"
    for request in (
        client.get(none),
        client.delete(none),
        client.get(f"{none}/output"),
        client.get(f"{none}/wait"),
        client.post(f"{none}/stdin", content=b"x"),
        client.post(f"{none}/signal", json={"signal": 15}),
        client.post(f"{none}/resize", json={"rows": 1, "cols": 1}),
    ):
        answer = await request
        assert (answer.status_code, answer.json()["code"]) == (404, "process_not_found"), answer.text
    path = await _spawn(client, box, "exec sleep 60")
    with anyio.fail_after(20):
        assert (await client.post(f"{path}/stdin", content=bytes(1_000_000))).status_code == 204, "it is dropped"
    assert (await client.post(f"{path}/resize", json={"rows": 5, "cols": 5})).status_code == 204
    assert (await client.post(f"{path}/signal", json={"signal": 65})).status_code == 400
    assert (await client.get(f"/api/v1/sandboxes/{box}/processes/0")).status_code == 400
    assert (await client.delete(path)).status_code == 204
