"""schemathesis finds nothing: every operation of the document, with valid and invalid requests, alone and one after the
other along the links, on both databases.

All of its checks are on, and that every error has one shape (`schemathesis.toml`, `schemathesis_hooks.py`). It is run
with a key of a tenant, whose objects another tenant must not see, and with one of the operator for what no tenant may
do. Here it is short, and each time the same; `make fuzz-rest` draws `ATOLL_FUZZ_EXAMPLES` requests for each operation,
and asks that each operation is carried out at least once. `ATOLL_FUZZ_SEED` repeats a run.
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
from tests.bundles.making import manifest, packed

EXAMPLES = os.environ.get("ATOLL_FUZZ_EXAMPLES")
GIVEN_SEED = os.environ.get("ATOLL_FUZZ_SEED")
SEED = GIVEN_SEED or str(secrets.randbits(32))
CONFIG = Path(__file__).with_name("schemathesis.toml")
PEERS = ("first", "second")
"""Tenants. Requests are those of the first."""
TENANT = {"policy": {"images": ["host"], "max_limits": {"memory_bytes": 2**30}}, "quotas": {"sandboxes": 60}}
OPERATED = ("tag=tenants", "operation-id=host_gc", "operation-id=images_remove")
"""What only the operator may do."""
ALSO_OPERATED = ("tag=keys", "tag=audit", "tag=webhooks")
"""What the operator may do more of."""
SHORT = {("sqlite", "first"): "examples,stateful", ("postgresql", "operator"): "fuzzing,stateful"}
"""What is run each time, and in which phases. `coverage`, the bounds of every parameter and field, takes a minute."""
STEPS: list[dict[str, Any]] = [{"text": "Good day."}] * 1000
DONE = {"text": "Done.", "expect": {"result": [{"error": "any"}]}}
SCRIPT = {
    "step": STEPS,
    "conversation": [
        {"prompt": "call", "step": [{"call": [{"tool": "write_file"}]}, DONE, *STEPS]},
        {"prompt": "boot", "step": [{"call": [{"tool": "bash", "input": {"command": "true"}}]}, DONE, *STEPS]},
    ],
}
BUNDLE = packed('def run():\n    """Do nothing."""\n    return {"ok": True, "content": ""}\n', manifest("run"))
"""Of the model: it answers whatever it is told, and is done with a call that failed."""
LONG = [(database, user) for database in ("sqlite", "postgresql") for user in ("first", "operator")]


@pytest.fixture
def server(database: str, make_state_dir: Callable[[], Path], tmp_path: Path) -> Iterator[RunningServer]:
    script = tmp_path / "script.json"
    script.write_text(json.dumps(SCRIPT))
    variables = {"ATOLL_MODEL": f"script:{script}"}
    if database == "sqlite":
        yield from serve(make_state_dir(), variables)
        return
    with postgresql.running() as other:
        yield from serve(make_state_dir(), {**variables, "ATOLL_DATABASE_URL": other.create()})


def serve(state_dir: Path, environment: dict[str, str]) -> Iterator[RunningServer]:
    """A server that is empty again at the end."""
    with running_server(state_dir, environment=environment) as server:
        yield server
        with client_of(server, server.key) as operator:
            for tenant in items(operator, "tenants"):
                empty(operator, tenant["name"])


def client_of(server: RunningServer, key: str) -> httpx2.Client:
    return httpx2.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": key}, timeout=60)


def items(client: httpx2.Client, path: str, **headers: str) -> list[dict[str, Any]]:
    answer = client.get(path, params={"limit": 1000}, headers=headers).raise_for_status()
    found: list[dict[str, Any]] = answer.json()["items"]
    return found


def empty(operator: httpx2.Client, tenant: str) -> None:
    """Remove what there is of a tenant."""
    operator.patch(f"tenants/{tenant}", json={"quotas": {}, "disabled": False}).raise_for_status()
    header = {"Atoll-Tenant": tenant}
    operator.delete("warm-pools", headers=header)
    for each in items(operator, "configs", **header):
        operator.delete(f"configs/{each['id']}", headers=header)
    for each in items(operator, "builds", **header):
        operator.post(f"builds/{each['id']}/cancel", headers=header)
    for kind, key in (("templates", "name"), ("sandboxes", "name"), ("checkpoints", "id"), ("volumes", "name")):
        for each in items(operator, kind, **header):
            operator.delete(f"{kind}/{each[key]}", headers=header)


def make(client: httpx2.Client, path: str, **body: Any) -> dict[str, Any]:
    made: dict[str, Any] = client.post(path, json=body).raise_for_status().json()
    return made


def upload(client: httpx2.Client) -> dict[str, Any]:
    headers = {"Content-Type": "application/gzip"}
    made: dict[str, Any] = client.post("bundles", content=BUNDLE, headers=headers).raise_for_status().json()
    return made


def build(client: httpx2.Client, name: str) -> dict[str, Any]:
    made = make(client, "builds", name=name, plan={"steps": [{"kind": "run", "command": ["true"]}]})
    events = client.get(f"builds/{made['id']}/events").raise_for_status().text
    assert '"status":"ready"' in events, events
    return made


def make_tenants(operator: httpx2.Client) -> dict[str, str]:
    """Their names and the keys of their administrators."""
    users = {}
    for tenant in PEERS:
        make(operator, "tenants", name=tenant, **TENANT)
        body = {"name": tenant, "role": "admin"}
        made = operator.post("keys", json=body, headers={"Atoll-Tenant": tenant}).raise_for_status()
        users[tenant] = made.json()["text"]
    return users


def make_one_of_each(client: httpx2.Client) -> dict[str, Any]:
    """Ids of things that exist, by the parameter of a path."""
    # Not as root: a request for `/` would take the sandbox apart.
    demo = make(client, "sandboxes", name="demo", user="user")
    process = make(client, "sandboxes/demo/processes", command="trap '' $(seq 64); sleep infinity", stdin=True)
    session = make(client, "sandboxes/demo/code/sessions")
    execution = make(client, f"sandboxes/demo/code/sessions/{session['id']}/execute", code="1")
    client.put("sandboxes/demo/files", params={"path": "/tmp/mine"}, content=b"mine").raise_for_status()
    config = make(client, "configs", name="agent", tools_config=["write_file"])["id"]
    talk = make(client, f"chat/{config}", message="call")
    sandboxed = make(client, "configs", name="worker", agent_type="sandboxed", tools_config=["bash"])["id"]
    make(client, f"chat/{sandboxed}", message="boot")
    (instance,) = items(client, f"configs/{sandboxed}/workspace/instances")
    make(client, "sandboxes", name="restored")
    files = "ab" * 32
    client.put(f"builds/files/{files}", content=BUNDLE).raise_for_status()
    return {
        "template": "web",
        "tag": "default",
        "build": build(client, "web")["id"],
        "removable": [build(client, f"removable-{number}")["template"] for number in range(3)],
        "files": files,
        "restored": "restored",
        "restored_checkpoint": make(client, "sandboxes/restored/checkpoints")["id"],
        "config": config,
        "sandboxed": sandboxed,
        "conversation": talk["conversation_id"],
        "turn": talk["turn_id"],
        "external_id": instance["external_id"],
        "bundle": upload(client)["bundle_id"],
        "sandbox": demo["name"],
        "name": demo["name"],
        "id": demo["id"],
        "process": process["id"],
        "session": session["id"],
        "execution": execution["id"],
        "checkpoint": make(client, "sandboxes/demo/checkpoints")["id"],
        "volume": make(client, "volumes", name="cache")["name"],
        "webhook": make(client, "webhooks", url="https://hook.invalid/")["webhook"]["id"],
        "key": make(client, "keys", name="key")["key"]["id"],
    }


def environment(server: RunningServer, directory: Path, user: str) -> dict[str, str]:
    """What `schemathesis.toml` and the hooks are told."""
    with client_of(server, server.key) as operator:
        users = {**make_tenants(operator), "operator": server.key}
        ids: dict[str, Any] = {"tenant": make(operator, "tenants", name="third")["name"]}
    with client_of(server, users["first"]) as client:
        if user != "operator":
            ids = make_one_of_each(client)
        archived = make(client, "sandboxes", name="archived")["name"]
        archive = directory / "archive.atoll"
        archive.write_bytes(client.get(f"sandboxes/{archived}/export").raise_for_status().content)
        client.delete(f"sandboxes/{archived}").raise_for_status()
    bundle = directory / "bundle.tgz"
    bundle.write_bytes(BUNDLE)
    headers = {name: [{"name": "X-API-Key", "value": key}] for name, key in users.items()}
    auth = directory / "auth.json"
    auth.write_text(json.dumps({"auth": [{"name": name, "fixedHeaders": headers[name]} for name in users]}))
    return {
        "ATOLL_FUZZ_ARCHIVE": str(archive),
        "ATOLL_FUZZ_BUNDLE": str(bundle),
        "ATOLL_FUZZ_AUTH": str(auth),
        "ATOLL_FUZZ_IDS": json.dumps(ids),
        "ATOLL_FUZZ_KEPT": " ".join(["default", *PEERS, *(key.split("_")[1] for key in users.values())]),
        "ATOLL_FUZZ_KEY": users[user],
        "ATOLL_FUZZ_USER": user,
        "HYPOTHESIS_STORAGE_DIRECTORY": str(directory),
    }


def schemathesis(url: str, variables: dict[str, str], *options: str) -> None:
    """Run it with all checks."""
    httpx2.get(f"{url}/openapi.json", timeout=60).raise_for_status()  # made now: schemathesis waits for 10 s
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run", "--checks", "all"]
    done = subprocess.run(
        [*command, "--no-color", *options, f"{url}/openapi.json"],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\nagain: ATOLL_FUZZ_SEED={SEED}"


@pytest.mark.timeout(0 if EXAMPLES else 300)
@pytest.mark.parametrize(("database", "user"), LONG if EXAMPLES else SHORT)
def test_schemathesis_finds_nothing(server: RunningServer, database: str, user: str, tmp_path: Path) -> None:
    if user == "operator":
        options = [f"--include-{each}" for each in (*OPERATED, *ALSO_OPERATED)]
    else:
        options = [f"--exclude-{each}" for each in OPERATED]
    if EXAMPLES is None:
        options += ["--max-examples", "3", "--phases", SHORT[database, user]]
        options += ["--seed", SEED] if GIVEN_SEED else ["--generation-deterministic"]
    else:
        options += ["--max-examples", EXAMPLES, "--seed", SEED]
    schemathesis(server.url, environment(server, tmp_path, user), *options)
    assert "Traceback" not in server.log.read_text()
