"""schemathesis finds nothing: every operation of the document, with valid and invalid requests, alone and one after the
other along the links, on both databases.

All of its checks are on (`schemathesis.toml`), and that every error has one shape. Two tenants must not see each
other's objects. `ATOLL_FUZZ_EXAMPLES` is how many requests each operation gets when they are generated at random, and
`ATOLL_FUZZ_SEED` repeats a run: `make fuzz-rest`.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from atoll.testing.server import RunningServer, running_server
from tests.postgresql import running as postgresql_running

EXAMPLES = os.environ.get("ATOLL_FUZZ_EXAMPLES", "3")
SEED = os.environ.get("ATOLL_FUZZ_SEED") or str(secrets.randbits(32))
CONFIG = Path(__file__).with_name("schemathesis.toml")
PEERS = ("first", "second")
TENANT = {"policy": {"images": ["host"], "max_limits": {"memory_bytes": 2**30}}, "quotas": {"sandboxes": 6}}


@pytest.fixture(params=["sqlite", "postgresql"])
def server(request: pytest.FixtureRequest, make_state_dir: Callable[[], Path]) -> Iterator[RunningServer]:
    if request.param == "sqlite":
        yield from _serving(make_state_dir(), {})
        return
    with postgresql_running() as postgresql:
        yield from _serving(make_state_dir(), {"ATOLL_DATABASE_URL": postgresql.create()})


def _serving(state_dir: Path, environment: dict[str, str]) -> Iterator[RunningServer]:
    with running_server(state_dir, environment=environment) as server:
        yield server
        with httpx2.Client(base_url=f"{server.url}/api/v1/", headers=server.headers, timeout=60) as operator:
            for tenant in [each["name"] for each in _items(operator, "tenants")]:
                _empty(operator, tenant)


def _items(client: httpx2.Client, path: str, **headers: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (
        client.get(path, params={"limit": 1000}, headers=headers).raise_for_status().json()["items"]
    )
    return found


def _empty(operator: httpx2.Client, tenant: str) -> None:
    operator.patch(f"tenants/{tenant}", json={"quotas": {}, "disabled": False}).raise_for_status()
    header = {"Atoll-Tenant": tenant}
    for pool in _items(operator, "warm-pools", **header):
        operator.put("warm-pools", json={**pool, "count": 0}, headers=header)
    for kind, key in (("sandboxes", "name"), ("checkpoints", "id"), ("volumes", "name")):
        for each in _items(operator, kind, **header):
            operator.delete(f"{kind}/{each[key]}", headers=header)


def _users(server: RunningServer) -> list[tuple[str, str]]:
    """Names and keys: two tenants, and the operator for what no tenant may do."""
    users = []
    with httpx2.Client(base_url=f"{server.url}/api/v1/", headers=server.headers, timeout=60) as operator:
        for tenant in PEERS:
            operator.post("tenants", json={"name": tenant, **TENANT}).raise_for_status()
            body = {"name": tenant, "role": "admin"}
            made = operator.post("keys", json=body, headers={"Atoll-Tenant": tenant}).raise_for_status().json()
            users.append((tenant, made["text"]))
    return [*users, ("operator", server.key)]


def run(server: RunningServer, directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run schemathesis with these options against a server."""
    users = _users(server)
    auth = directory / "auth.json"
    auth.write_text(
        json.dumps(
            {"auth": [{"name": name, "fixedHeaders": [{"name": "X-API-Key", "value": key}]} for name, key in users]}
        )
    )
    kept = ["default", *PEERS, *(key.split("_")[1] for _, key in users)]
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "schemathesis.cli",
            "--config-file",
            CONFIG,
            "run",
            f"{server.url}/openapi.json",
            *options,
        ],
        env={**os.environ, "ATOLL_FUZZ_AUTH": str(auth), "ATOLL_FUZZ_KEPT": " ".join(kept)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def test_schemathesis_finds_nothing(server: RunningServer, tmp_path: Path) -> None:
    options = ("--checks", "all", "--max-examples", EXAMPLES, "--seed", SEED, "--no-color", "--workers", "2")
    done = run(server, tmp_path, *options)
    assert done.returncode == 0, f"{done.stdout}\nagain: ATOLL_FUZZ_SEED={SEED}"
    assert "Traceback" not in server.log.read_text()
