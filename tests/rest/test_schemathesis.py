"""schemathesis finds nothing: every operation of the document, with valid and invalid requests, alone and one after the
other along the links, on both databases.

All of its checks are on (`schemathesis.toml`), and that every error has one shape. Two tenants must not see each
other's objects. Here each database gets a part of it; `make fuzz-rest` gives all of it to both, with
`ATOLL_FUZZ_EXAMPLES` random requests for each operation. `ATOLL_FUZZ_SEED` repeats a run.
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
from tests import postgresql

EXAMPLES = os.environ.get("ATOLL_FUZZ_EXAMPLES")
SEED = os.environ.get("ATOLL_FUZZ_SEED") or str(secrets.randbits(32))
CONFIG = Path(__file__).with_name("schemathesis.toml")
PHASES = {"sqlite": "coverage,stateful", "postgresql": "examples,fuzzing,stateful"}
"""`coverage` tries the bounds of every parameter and field; it would be the same for the other database."""
PEERS = ("first", "second")
TENANT = {"policy": {"images": ["host"], "max_limits": {"memory_bytes": 2**30}}, "quotas": {"sandboxes": 30}}
OPERATED = [
    "--include-tag",
    "tenants",
    "--include-tag",
    "keys",
    "--include-tag",
    "audit",
    "--include-operation-id",
    "images_remove",
]
OPERATED += ["--include-operation-id", "host_gc"]
"""What only the operator can do all of."""

Fuzz = Callable[..., None]


@pytest.fixture(params=PHASES)
def database(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(database: str, make_state_dir: Callable[[], Path]) -> Iterator[RunningServer]:
    if database == "sqlite":
        yield from serve(make_state_dir(), {})
        return
    with postgresql.running() as other:
        yield from serve(make_state_dir(), {"ATOLL_DATABASE_URL": other.create()})


def serve(state_dir: Path, environment: dict[str, str]) -> Iterator[RunningServer]:
    """A server that is empty again at the end."""
    with running_server(state_dir, environment=environment) as server:
        yield server
        with operator_of(server) as operator:
            for tenant in items(operator, "tenants"):
                empty(operator, tenant["name"])


def operator_of(server: RunningServer) -> httpx2.Client:
    return httpx2.Client(base_url=f"{server.url}/api/v1/", headers=server.headers, timeout=60)


def items(client: httpx2.Client, path: str, **headers: str) -> list[dict[str, Any]]:
    answer = client.get(path, params={"limit": 1000}, headers=headers).raise_for_status()
    found: list[dict[str, Any]] = answer.json()["items"]
    return found


def empty(operator: httpx2.Client, tenant: str) -> None:
    """Remove what there is of a tenant."""
    operator.patch(f"tenants/{tenant}", json={"quotas": {}, "disabled": False}).raise_for_status()
    header = {"Atoll-Tenant": tenant}
    operator.delete("warm-pools", headers=header)
    for kind, key in (("sandboxes", "name"), ("checkpoints", "id"), ("volumes", "name")):
        for each in items(operator, kind, **header):
            operator.delete(f"{kind}/{each[key]}", headers=header)


def users_of(operator: httpx2.Client) -> dict[str, str]:
    """Names and keys: two tenants, and the operator for what no tenant may do."""
    users = {}
    for tenant in PEERS:
        operator.post("tenants", json={"name": tenant, **TENANT}).raise_for_status()
        body = {"name": tenant, "role": "admin"}
        made = operator.post("keys", json=body, headers={"Atoll-Tenant": tenant}).raise_for_status()
        users[tenant] = made.json()["text"]
    return users


def make_one_of_each(client: httpx2.Client) -> dict[str, Any]:
    """Ids of things that exist, by the parameter of a path."""

    def made(path: str, **body: Any) -> dict[str, Any]:
        answer: dict[str, Any] = client.post(path, json=body).raise_for_status().json()
        return answer

    # Not as root: a request for `/` would take the sandbox apart.
    demo = made("sandboxes", name="demo", user="user")
    sandbox = demo["name"]
    process = made(f"sandboxes/{sandbox}/processes", command="trap '' $(seq 64); sleep infinity", stdin=True)
    session = made(f"sandboxes/{sandbox}/code/sessions")
    execution = made(f"sandboxes/{sandbox}/code/sessions/{session['id']}/execute", code="1")
    return {
        "sandbox": sandbox,
        "id": demo["id"],
        "name": sandbox,
        "process": process["id"],
        "session": session["id"],
        "execution": execution["id"],
        "checkpoint": made(f"sandboxes/{sandbox}/checkpoints")["id"],
        "volume": made("volumes", name="cache")["name"],
        "webhook": made("webhooks", url="https://hook.invalid/")["webhook"]["id"],
        "key": made("keys", name="key")["key"]["id"],
    }


@pytest.fixture
def fuzz(server: RunningServer, tmp_path: Path) -> Fuzz:
    with operator_of(server) as operator:
        users = {**users_of(operator), "operator": server.key}
        operator.post("tenants", json={"name": "third"}).raise_for_status()
    with httpx2.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": users["first"]}, timeout=60) as client:
        ids = make_one_of_each(client)
        archive = tmp_path / "demo.atoll"
        archive.write_bytes(client.get("sandboxes/demo/export").raise_for_status().content)
    tar = tmp_path / "empty.tar"
    tar.write_bytes(bytes(1024))
    bodies = {"sandboxes_import": archive, "volumes_import": tar, "files_unpack": tar}
    auth = tmp_path / "auth.json"
    headers = {name: [{"name": "X-API-Key", "value": key}] for name, key in users.items()}
    auth.write_text(json.dumps({"auth": [{"name": name, "fixedHeaders": headers[name]} for name in users]}))
    kept = ["default", *PEERS, *(key.split("_")[1] for key in users.values())]

    def run(user: str, *options: str) -> None:
        """Run schemathesis with these options against the server."""
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run", *options]
        done = subprocess.run(
            [*command, "--checks", "all", "--seed", SEED, "--no-color", f"{server.url}/openapi.json"],
            env={
                **os.environ,
                "ATOLL_FUZZ_AUTH": str(auth),
                "ATOLL_FUZZ_USER": user,
                "ATOLL_FUZZ_KEY": users[user],
                "ATOLL_FUZZ_KEPT": " ".join(kept),
                "ATOLL_FUZZ_BODIES": json.dumps(bodies, default=str),
                "ATOLL_FUZZ_IDS": json.dumps({"tenant": "third"} if user == "operator" else ids),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        Path(f"/tmp/fuzz-out-{user}.txt").write_text(done.stdout)
        assert done.returncode == 0, f"{done.stdout}\nagain: ATOLL_FUZZ_SEED={SEED}"

    return run


@pytest.mark.timeout(0 if EXAMPLES else 300)
@pytest.mark.parametrize(("user", "options"), [("first", []), ("operator", OPERATED)], ids=["tenant", "operator"])
def test_schemathesis_finds_nothing(
    server: RunningServer, database: str, fuzz: Fuzz, user: str, options: list[str]
) -> None:
    limits = ["--max-examples", EXAMPLES or "3"]
    if EXAMPLES is None:
        limits += ["--phases", PHASES[database]]
    fuzz(user, *options, *limits)
    assert "Traceback" not in server.log.read_text()
