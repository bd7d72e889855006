"""The process: one per state directory, settings and where they came from, its log, its end, and what goes on."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from configparser import ConfigParser
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx2
import pytest
from websockets.asyncio.client import connect as terminal_at
from websockets.exceptions import ConnectionClosed

from atoll import NetworkPolicy, open as engine_of
from atoll.drivers import locks
from atoll.surfaces.serve import logs
from atoll.testing.server import RunningServer, running_server
from atoll.testing.waiting import BOUND_S, eventually, wait_until
from tests.docs.test_deploy import CONFINEMENT
from tests.serve.conftest import answers, connect, read_all

ATOLL = [sys.executable, "-m", "atoll.surfaces.cli"]
HEAVY = frozenset(
    "pydantic_ai anthropic openai griffe mcp rich numpy PIL alembic asyncpg cryptography atoll.agents.loop "
    "atoll.agents.models atoll.server.chat atoll.server.conversations atoll.tools.coding atoll.tools.pool "
    "atoll.surfaces.mcp.http atoll.surfaces.messages.http sqlalchemy.dialects.postgresql".split()
)
"""What takes long to import, and what a server does without until a client asks for what needs it."""


def atoll(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    return subprocess.run([*ATOLL, *words], capture_output=True, text=True, env={**plain, **environment}, check=False)


def test_a_second_server_of_a_state_directory_is_refused(strict_server: RunningServer) -> None:
    refused = atoll("serve", "--listen", "127.0.0.1:0", "--state-dir", str(strict_server.state_dir))
    assert refused.returncode == 2
    assert f"process {strict_server.pid}" in refused.stderr
    assert "--state-dir" in refused.stderr


def test_an_address_that_is_taken_is_named(strict_server: RunningServer, make_state_dir: Callable[[], Path]) -> None:
    taken = f"127.0.0.1:{strict_server.port}"
    refused = atoll("serve", "--listen", taken, "--state-dir", str(make_state_dir()))
    assert refused.returncode == 2
    assert taken in refused.stderr
    assert "--listen" in refused.stderr


def test_each_setting_shows_where_it_came_from_and_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.touch(mode=0o600)
    file.write_text('domain = "boxes.example.com"\nlisten = "0.0.0.0:9000"\nmcp_token = "sixteen-characters"\n')
    shown = atoll("config", "--json", "--config", str(file), ATOLL_LISTEN="127.0.0.1:7000", ATOLL_HOSTS="a, b")
    found = {each["name"]: (each["value"], each["origin"]) for each in json.loads(shown.stdout)}
    assert found["domain"] == ("boxes.example.com", str(file))
    assert found["listen"] == ("127.0.0.1:7000", "ATOLL_LISTEN")
    assert found["hosts"] == (["a", "b"], "ATOLL_HOSTS")
    assert found["mcp_token"] == ("********", str(file))
    assert found["connections"] == (2048, "default")
    assert "sixteen" not in shown.stdout + atoll("config", "--config", str(file)).stdout


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("nonsense = 1\n", 0o600, "unknown setting 'nonsense'"),
        ("listen = \n", 0o600, "not valid TOML"),
        ('listen = "here"\n', 0o600, "listen='here'"),
        ('mcp_token = "sixteen-characters"\n', 0o644, "chmod 600"),
        ('mcp_token = "short"\n', 0o600, "fewer than 16 characters"),
        ('tls_cert = "/a.pem"\n', 0o600, "tls_cert and tls_key"),
    ],
)
def test_settings_that_are_wrong_are_refused_without_their_secrets(
    tmp_path: Path, text: str, mode: int, said: str
) -> None:
    file = tmp_path / "server.toml"
    file.write_text(text)
    file.chmod(mode)
    refused = atoll("config", "--config", str(file))
    assert refused.returncode == 2
    assert said in refused.stderr
    assert "sixteen" not in refused.stderr


def test_the_unit_is_one_that_systemd_accepts() -> None:
    shown = atoll(
        "serve", "--install", "--dry-run", "--json", "--listen", "0.0.0.0:8443", "--tls-self-signed=a.example"
    )
    assert shown.returncode == 0, shown.stderr
    unit = json.loads(shown.stdout)["unit"]
    assert "--listen=0.0.0.0:8443 --tls-self-signed=a.example" in unit
    parsed = ConfigParser()
    parsed.read_string(unit)
    assert CONFINEMENT.items() - parsed["Service"].items() <= {
        ("statedirectory", "atoll"),
        ("statedirectorymode", "0700"),
    }
    assert parsed["Service"]["killmode"] == "process"


def log_lines(server: RunningServer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log.read_text().splitlines()]


def test_every_line_of_a_request_has_its_id_and_none_a_secret(strict_server: RunningServer) -> None:
    secret = "abcdefghijklmnopqrstuvwxyz"
    sent = {"Authorization": f"Bearer atoll_abcdefgh_{secret}"}
    answer = httpx2.get(f"{strict_server.url}/api/v1/sandboxes?atoll_token={secret}", headers=sent)
    assert answer.status_code == 401
    id = answer.headers["Atoll-Request-Id"]
    wait_until(lambda: id in strict_server.log.read_text(), "the request is logged")
    mine = [each for each in log_lines(strict_server) if each.get("request_id") == id]
    assert [(each["event"], each["path"], each["status"]) for each in mine] == [("request", "/api/v1/sandboxes", 401)]
    httpx2.get(strict_server.url + "/api/v1/me", headers=strict_server.headers)
    text = strict_server.log.read_text()
    assert secret not in text
    assert strict_server.key.rpartition("_")[2] not in text


def test_the_log_says_what_a_model_needs_without_a_trace_of_the_server(strict_server: RunningServer) -> None:
    with httpx2.Client(base_url=strict_server.url, headers=strict_server.headers, timeout=BOUND_S) as client:
        model = {"provider": "openai", "model": "none"}
        config = client.post("/api/v1/configs", json={"name": "A", "model_config": model}).json()["id"]
        answer = client.post(f"/api/v1/chat/{config}", json={"message": "Hello"})
    assert (answer.status_code, answer.json()["code"]) == (503, "model_unavailable")
    id = answer.headers["Atoll-Request-Id"]
    wait_until(lambda: id in strict_server.log.read_text(), "the request is logged")
    lines = log_lines(strict_server)
    assert any("set OPENAI_API_KEY" in line["event"] for line in lines)
    assert not [line for line in lines if line.get("request_id") == id and "exception" in line]


def test_what_others_wrote_begins_no_line_of_the_log_and_hides_no_secret() -> None:
    path = "/api/\x1b[2J\nb [info] a"
    given = {"msg": "it failed:\nx %s", "args": ("Bearer abcdefghijkl",), "levelname": "INFO", "path": path, "ms": 1.5}
    record = logging.makeLogRecord(given)
    record.exc_info = (ValueError, ValueError("password=hunter22"), None)
    first, *rest = logs.formatter("text").format(record).splitlines()
    assert first.endswith(r"Z [info] it failed:\nx Bearer [hidden] [None] path='/api/\x1b[2J\nb [info] a' ms=1.5")
    assert rest == ["ValueError: password=[hidden]"]
    line = json.loads(logs.formatter("json").format(record))
    assert (line["event"], line["path"]) == ("it failed:\nx Bearer [hidden]", path)
    assert line["exception"] == "ValueError: password=[hidden]"


def test_a_start_imports_nothing_that_only_some_requests_need(make_state_dir: Callable[[], Path]) -> None:
    state_dir = make_state_dir()
    with running_server(state_dir):
        pass  # the first one makes the database
    with running_server(state_dir, environment={"PYTHONPROFILEIMPORTTIME": "1"}) as server:
        found = httpx2.get(f"{server.url}/api/v1/sandboxes", headers=server.headers, timeout=BOUND_S)
        assert found.json()["items"] == []
    lines = [each for each in server.log.read_text().splitlines() if each.startswith("import time:")]
    modules = [each.rpartition("|")[2].strip() for each in lines]
    imported = {name.rsplit(".", cut)[0] for name in modules for cut in range(name.count(".") + 1)}
    assert {"atoll.surfaces.serve.app", "fastapi", "sqlalchemy"} <= imported
    assert imported & HEAVY == set()


async def test_sandboxes_are_taken_up_at_the_start_and_go_on_at_the_end_which_is_in_order(
    make_state_dir: Callable[[], Path],
) -> None:
    state_dir = make_state_dir()
    async with engine_of(state_dir) as engine:
        sandbox = await engine.create("kept", network=NetworkPolicy(allow=["example.com"]))
        process = await sandbox.spawn(["sleep", "1000"])
    egress = state_dir / "sandboxes" / sandbox.id / "egress.lock"
    assert not locks.is_held(egress)
    with running_server(state_dir) as server, connect(server) as stream, connect(server) as idle:
        await eventually(lambda: locks.is_held(egress), "the server serves its egress")
        key = f"X-API-Key: {server.key}\r\n".encode()
        stream.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n" + key + b"\r\n")
        assert stream.recv(4096).startswith(b"HTTP/1.1 200")
        idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert server.stop() == 128 + signal.SIGTERM
        said = read_all(stream)
        assert b"event: error" in said
        assert b"the server is stopping" in said
        assert said.endswith(b"0\r\n\r\n"), "a complete answer, not one that was cut off"
        assert [each.status for each in answers(read_all(idle))] == [200]
    async with engine_of(state_dir) as engine:
        again = await engine.get("kept")
        assert [each.id for each in await again.processes()] == [process.id]
        await again.destroy()


async def test_after_a_crash_terminals_go_on_and_code_sessions_are_said_to_be_gone(
    make_state_dir: Callable[[], Path],
) -> None:
    server = RunningServer(make_state_dir(), (), {})
    server.start()
    box = "/api/v1/sandboxes/kept"
    try:
        async with httpx2.AsyncClient(base_url=server.url, headers=server.headers, timeout=BOUND_S) as client:
            (await client.post("/api/v1/sandboxes", json={"name": "kept"})).raise_for_status()
            made = await client.post(f"{box}/code/sessions", json={})
            assert made.status_code == 201, made.text
            session = f"{box}/code/sessions/{made.json()['id']}"
            url = f"{server.url.replace('http', 'ws', 1)}{box}/terminal"
            async with terminal_at(url, additional_headers=server.headers) as terminal:
                started = json.loads(await terminal.recv())
                await anyio.to_thread.run_sync(server.kill)
                with anyio.fail_after(BOUND_S), suppress(ConnectionClosed):
                    while True:
                        await terminal.recv()
            await anyio.to_thread.run_sync(server.start)
            gone = await client.post(f"{session}/execute", json={"code": "1"})
            assert (gone.status_code, gone.json()["code"]) == (404, "code_session_not_found")
            again = f"{url}?process={started['process']}&offset=0"
            async with terminal_at(again, additional_headers=server.headers) as terminal:
                await terminal.send(b"echo $((6 * 7))\n")
                seen = b""
                with anyio.fail_after(BOUND_S):
                    while b"42\r\n" not in seen:
                        message = await terminal.recv()
                        seen += message if isinstance(message, bytes) else b""
            (kernel,) = [
                each["id"]
                for each in (await client.get(f"{box}/processes")).json()["items"]
                if each["live"] and each["id"] != started["process"]
            ]
            assert (await client.delete(f"{box}/processes/{kernel}")).status_code == 204
            assert (await client.delete(box)).status_code == 204
    finally:
        server.stop()


def test_metrics_count_requests_and_are_for_keys_of_the_server(strict_server: RunningServer) -> None:
    httpx2.get(strict_server.url + "/healthz")
    answer = httpx2.get(strict_server.url + "/metrics", headers=strict_server.headers)
    assert answer.status_code == 200
    for line in (
        'route="/healthz",status="200"',
        "atoll_request_seconds_bucket",
        "atoll_memory_bytes",
        "atoll_refused",
    ):
        assert line in answer.text


def test_a_stream_of_bytes_that_is_not_http_gets_an_answer(strict_server: RunningServer) -> None:
    with connect(strict_server) as connected:
        connected.sendall(os.urandom(2000).replace(b"\r", b"x") + b"\r\n\r\n")
        assert answers(read_all(connected))[0].status == 400
    with connect(strict_server) as connected:
        connected.sendall(b"\x16\x03\x01\x02\x00\x01")  # as TLS begins: no end of a head will come
        (answer,) = answers(read_all(connected))
    assert answer.status == 400
    assert b"use http://" in answer.body
