"""`tenants` and `keys`: a server's data, with no server running."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from atoll.server.audit import AuditEvent
from atoll.server.server import Server
from atoll.settings import Settings
from tests.cli.driving import Atoll

pytestmark = pytest.mark.local("tenants and keys are on the server's own machine")


@pytest.fixture
def atoll(tmp_path: Path, atoll: Atoll) -> Iterator[Atoll]:
    """With a state directory of its own: there is one set of tenants in each."""
    shared = atoll.env["ATOLL_STATE_DIR"]
    atoll.env["ATOLL_STATE_DIR"] = str(tmp_path / "state")
    yield atoll
    atoll.env["ATOLL_STATE_DIR"] = shared


def test_a_tenant_is_made_changed_shown_and_removed(atoll: Atoll) -> None:
    words: tuple[str, ...] = (
        "--image",
        "host",
        "--image",
        "python:3.*",
        "--mount",
        "/srv:rw",
        "--network",
        "*.example.com",
    )
    words = (
        *words,
        "--max-ttl",
        "8h",
        "--max-memory",
        "1g",
        "--default-cpus",
        "0.5",
        "--sandboxes",
        "3",
        "--memory",
        "4g",
    )
    made = atoll.json("tenants", "create", "acme", *words, "--json")
    assert made["policy"]["images"] == ["host", "python:3.*"]
    assert made["policy"]["mounts"] == ["/srv:rw"]
    assert made["policy"]["max_limits"]["memory_bytes"] == 2**30
    assert made["policy"]["default_limits"]["cpus"] == 0.5
    assert (made["quotas"]["sandboxes"], made["quotas"]["memory_bytes"]) == (3, 2**32)
    assert atoll.json("tenants", "show", "acme", "--json") == made
    assert [each["name"] for each in atoll.json("tenants", "--json")] == ["acme", "default"]
    assert "acme     active" in atoll.text("tenants", "ls")

    changed = atoll.json("tenants", "update", "acme", "--memory", "none", "--mount", "none", "--disable", "--json")
    assert (changed["quotas"]["memory_bytes"], changed["policy"]["mounts"], changed["disabled"]) == (None, [], True)
    assert changed["policy"]["images"] == made["policy"]["images"]
    assert changed["quotas"]["sandboxes"] == 3
    shown = atoll.text("tenants", "show", "acme")
    assert "status                disabled" in shown
    assert "most memory           1.0 GiB" in shown

    assert atoll.text("tenants", "rm", "acme") == "acme\n"
    assert b"no tenant is named 'acme'" in atoll("tenants", "show", "acme", status=1).stderr


WRONG = {
    "create Acme": "'Acme' is not a name for a tenant; allowed are 1 to 32 characters",
    "create default": "a tenant named 'default' exists already",
    "create a --network http://x": "'http://x' is not a network rule",
    "create a --mount srv": "'srv' is not a directory that may be mounted",
    "create a --sandboxes many": "'many' is not a whole number",
    "create a --max-memory 3": "max_limits.memory_bytes is 3; it must be at least",
    "update default": "nothing to change is given",
    "update default --disable": "cannot be disabled",
    "rm default": "cannot be deleted",
}


def test_what_cannot_be_is_refused_with_what_is_allowed(atoll: Atoll) -> None:
    for words, message in WRONG.items():
        status = 1 if "exists" in message else 2
        assert message in atoll("tenants", *words.split(), status=status).stderr.decode()


def test_a_key_is_printed_once_works_and_is_revoked(atoll: Atoll, tmp_path: Path) -> None:
    text = atoll.text("keys", "create", "ci", "--ttl", "30d").strip()
    server_key = atoll.json("keys", "create", "boss", "--server", "--json")
    assert (server_key["tenant"], server_key["role"]) == (None, "admin")
    id = text.split("_")[1]
    listed = atoll("keys", "--json").stdout.decode() + atoll.text("keys") + atoll.text("keys", "show", id)
    assert id in listed
    assert text.split("_")[2] not in listed
    assert atoll.json("keys", "ls", "--tenant", "default", "--json")[0]["name"] == "ci"
    assert atoll.json("keys", "show", id, "--json")["expires_at"] is not None
    assert (
        b"leave out --tenant or --server" in atoll("keys", "create", "x", "--server", "--tenant", "a", status=2).stderr
    )
    assert b"does not have the scope 'keys'" in atoll("keys", "create", "x", "--scope", "keys", status=2).stderr
    assert atoll.text("keys", "revoke", id) == f"{id}\n"
    assert "revoked" in atoll.text("keys", "show", id)

    async def look() -> tuple[str | None, list[AuditEvent]]:
        async with Server.open(Settings(state_dir=tmp_path / "state")) as server:
            assert server.first_key is None  # there has been one of the server's administrators
            assert (await server.keys.verify(server_key["key"])).name == "boss"
            return id, await server.audit.query(None)

    _, events = anyio.run(look)
    assert [(event.action, event.resource) for event in events] == [
        ("keys_revoke", f"keys/{id}"),
        ("keys_create", f"keys/{server_key['id']}"),
        ("keys_create", f"keys/{id}"),
    ]


def test_looking_at_keys_leaves_the_first_key_to_the_first_start(atoll: Atoll, tmp_path: Path) -> None:
    assert atoll.json("keys", "--json") == []

    async def start() -> bool:
        async with Server.open(Settings(state_dir=tmp_path / "state")) as server:
            return server.first_key is not None

    assert anyio.run(start)


def test_the_data_of_a_server_elsewhere_is_not_mistaken_for_that_of_this_machine(atoll: Atoll) -> None:
    atoll.env["ATOLL_URL"] = "http://127.0.0.1:9"
    try:
        for words in (("keys", "create", "ci"), ("keys", "ls"), ("tenants", "create", "acme")):
            told = atoll(*words, status=2).stderr
            assert b"ATOLL_URL is http://127.0.0.1:9: run it there" in told
    finally:
        del atoll.env["ATOLL_URL"]
