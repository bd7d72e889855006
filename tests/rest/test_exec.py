"""Commands over REST: results, events, time-outs, clients that leave, and requests that are repeated."""

from __future__ import annotations

import base64
import json

import anyio
import httpx2
import pytest

from atoll.testing.waiting import eventually
from tests.rest.serving import Served, read_events

EVENTS = {"Accept": "text/event-stream"}


async def test_a_command_is_run_to_its_end(client: httpx2.AsyncClient, box: str) -> None:
    body = {
        "command": "cat; echo $GREETING; pwd; id -un; echo bad >&2; exit 3",
        "env": {"GREETING": "hej"},
        "cwd": "/tmp",
        "user": "root",
        "stdin": "given\n",
    }
    ran = await client.post(f"/api/v1/sandboxes/{box}/exec", json=body)
    assert ran.status_code == 200, ran.text
    result = ran.json()
    assert result.pop("duration_s") > 0
    assert result == {
        "exit_code": 3,
        "signal": None,
        "timed_out": False,
        "out_of_memory": False,
        "stdout": "given\nhej\n/tmp\nroot\n",
        "stderr": "bad\n",
        "stdout_truncation": None,
        "stderr_truncation": None,
    }


async def test_output_that_is_no_text_is_sent_as_base64(client: httpx2.AsyncClient, box: str) -> None:
    raw = bytes(range(256)) * 4
    body = {"command": ["cat"], "stdin_base64": base64.b64encode(raw).decode(), "encoding": "base64"}
    result = (await client.post(f"/api/v1/sandboxes/{box}/exec", json=body)).json()
    assert base64.b64decode(result["stdout"]) == raw
    short = (await client.post(f"/api/v1/sandboxes/{box}/exec", json={**body, "output_limit_bytes": 10})).json()
    assert base64.b64decode(short["stdout"]) == raw[:5] + raw[-5:]
    assert short["stdout_truncation"] == {"start": 5, "end": 1019, "total": 1024}


@pytest.mark.parametrize("encoding", ["text", "base64"])
async def test_a_time_out_is_a_result_with_the_output_until_then(
    client: httpx2.AsyncClient, box: str, encoding: str
) -> None:
    body = {"command": "echo begun; sleep 60", "timeout_s": 0.3, "encoding": encoding}
    ran = await client.post(f"/api/v1/sandboxes/{box}/exec", json=body)
    assert ran.status_code == 200
    result = ran.json()
    assert (result["timed_out"], result["exit_code"], result["signal"]) == (True, 137, 9)
    assert result["stdout"] == ("begun\n" if encoding == "text" else base64.b64encode(b"begun\n").decode())


async def test_what_is_wrong_with_a_command_is_told_in_the_one_shape(client: httpx2.AsyncClient, box: str) -> None:
    for body, status, code in (
        ({"command": ""}, 400, "invalid_request"),
        ({"command": []}, 400, "invalid_request"),
        ({"command": "true", "user": "nobody-here"}, 404, "user_not_found"),
        ({"command": "true", "cwd": "/none"}, 404, "path_not_found"),
        ({"command": "true", "timeout_s": 0}, 400, "invalid_request"),
        ({"command": "true", "shell": "bash"}, 400, "invalid_request"),
        ({"command": "true", "stdin": "a", "stdin_base64": "YQ=="}, 400, "invalid_request"),
        ({"command": "true", "env": {"A=B": "c"}}, 400, "invalid_request"),
        ({"command": "\ud800"}, 400, "invalid_request"),
        ({"command": "a\0b"}, 400, "invalid_request"),
    ):
        for headers in ({}, EVENTS):
            refused = await client.post(
                f"/api/v1/sandboxes/{box}/exec",
                content=json.dumps(body),
                headers={"Content-Type": "application/json", **headers},
            )
            assert (refused.status_code, refused.json()["code"]) == (status, code), (body, refused.text)
            assert {*refused.json()} == {"code", "message", "details", "request_id"}


async def test_events_come_while_the_command_runs(client: httpx2.AsyncClient, box: str) -> None:
    # An é is split between two writes: no character is torn.
    body = {
        "command": r"printf 'a\303'; sleep 0.2; printf '\251'; echo b >&2; read line; echo $line; exit 4",
        "stdin": "x\n",
    }
    async with client.stream("POST", f"/api/v1/sandboxes/{box}/exec", json=body, headers=EVENTS) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [each async for each in read_events(answer)]
    said = {"stdout": "", "stderr": ""}
    for each in events[:-1]:
        said[each["event"]] += each["data"]["text"]
    assert said == {"stdout": "aéx\n", "stderr": "b\n"}
    assert events[-1]["event"] == "end"
    assert (events[-1]["data"]["exit_code"], events[-1]["data"]["timed_out"]) == (4, False)


async def test_events_end_with_a_time_out(client: httpx2.AsyncClient, box: str) -> None:
    body = {"command": "printf begun; sleep 60", "timeout_s": 0.3, "encoding": "base64"}
    async with client.stream("POST", f"/api/v1/sandboxes/{box}/exec", json=body, headers=EVENTS) as answer:
        events = [each async for each in read_events(answer)]
    assert [each["event"] for each in events] == ["stdout", "end"]
    assert events[0]["data"] == {"base64": base64.b64encode(b"begun").decode()}
    assert events[1]["data"]["timed_out"] is True


@pytest.mark.parametrize("headers", [{}, EVENTS])
async def test_a_command_is_killed_when_its_client_leaves(
    client: httpx2.AsyncClient, box: str, headers: dict[str, str], served: Served
) -> None:
    mark = f"77{len(headers)}.5"

    async def runs() -> bool:
        found = (await client.get(f"/api/v1/sandboxes/{box}/ps")).json()["items"]
        return any(each["command"] == f"sleep {mark}" for each in found)

    async with anyio.create_task_group() as tasks, served.client() as other:

        async def send() -> None:
            async with other.stream(
                "POST", f"/api/v1/sandboxes/{box}/exec", json={"command": f"sleep {mark} & wait"}, headers=headers
            ) as answer:
                await answer.aread()

        tasks.start_soon(send)
        await eventually(runs, "the command runs")
        tasks.cancel_scope.cancel()

    async def is_gone() -> bool:
        return not await runs()

    await eventually(is_gone, "the command was killed")


async def test_a_repeated_request_is_not_carried_out_twice(client: httpx2.AsyncClient, box: str) -> None:
    body = {"command": "echo x >> once.txt; wc -l < once.txt"}
    for replayed in (None, "true"):
        ran = await client.post(f"/api/v1/sandboxes/{box}/exec", json=body, headers={"Idempotency-Key": "exec-1"})
        assert (ran.status_code, ran.json()["stdout"]) == (200, "1\n")
        assert ran.headers.get("idempotency-replayed") == replayed
    other = await client.post(
        f"/api/v1/sandboxes/{box}/exec", json={"command": "true"}, headers={"Idempotency-Key": "exec-1"}
    )
    assert other.status_code == 422
    events = await client.post(
        f"/api/v1/sandboxes/{box}/exec", json=body, headers={"Idempotency-Key": "exec-2", **EVENTS}
    )
    assert events.status_code == 400


async def test_what_a_tenants_commands_hold_of_their_output_at_once_is_bounded(
    client: httpx2.AsyncClient, box: str
) -> None:
    path, largest = f"/api/v1/sandboxes/{box}/exec", {"output_limit_bytes": 16 << 20}
    refused: list[dict[str, object]] = []

    async def hold() -> None:
        answer = await client.post(path, json={"command": "sleep infinity", **largest})
        if answer.status_code == 403:
            refused.append(answer.json())

    async with anyio.create_task_group() as tasks:
        for _ in range(33):
            tasks.start_soon(hold)
        await eventually(lambda: len(refused) == 1, "one command too many is refused")
        small = await client.post(path, json={"command": "echo still served", "output_limit_bytes": 0})
        assert small.status_code == 200
        tasks.cancel_scope.cancel()
    assert refused[0]["code"] == "quota_exceeded"
    assert refused[0]["details"] == {"quota": "output_bytes", "used": 1 << 30, "asked": 32 << 20, "allowed": 1 << 30}

    async def is_free() -> bool:
        return (await client.post(path, json={"command": "true", **largest})).status_code == 200

    await eventually(is_free, "what commands held is free again when their clients have left")
