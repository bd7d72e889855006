"""`--allow`, `network` and `audit`: what may leave a sandbox, and what did."""

from __future__ import annotations

import json

from tests.cli.driving import Atoll


def fetch(port: int) -> str:
    """The machine's loopback from inside: what the sandbox has itself is not asked through a proxy."""
    return f"curl -sS --noproxy '' http://127.0.0.1:{port}/"


def test_a_command_reaches_what_it_is_allowed_and_is_told_what_else_it_would_need(atoll: Atoll, port: int) -> None:
    assert atoll.text("run", "--allow", f"127.0.0.1:{port}", "-c", fetch(port)) == "reached\n"
    said = atoll.text("run", "--allow", "example.com", "-c", fetch(port))
    assert said.endswith(f"to allow it, add the rule 127.0.0.1:{port}\n")


def test_a_policy_is_shown_and_changed_and_what_it_did_can_be_read(atoll: Atoll, port: int) -> None:
    name = atoll.create("--allow", "Example.com:443")
    assert atoll.text("network", name) == "example.com:443\n"
    assert "to allow it, add the rule" in atoll.text("exec", name, "-c", fetch(port))
    atoll("network", name, "--allow", f"127.0.0.1:{port}", "--remove", "example.com:443")
    assert atoll.json("network", name, "--json")["network"] == {"allow": [f"127.0.0.1:{port}"], "deny": []}
    assert atoll.text("exec", name, "-c", fetch(port)) == "reached\n"
    atoll("network", name, "--deny", "127.0.0.0/8")
    assert atoll.text("network", name) == f"127.0.0.1:{port}\nnot 127.0.0.0/8\n"
    assert "the policy denies 127.0.0.0/8" in atoll.text("exec", name, "-c", fetch(port))
    atoll("network", name, "--remove", "127.0.0.0/8")
    done = atoll("network", name, "--remove", "example.com", status=2)
    assert f"example.com is not a rule of this sandbox; its rules are: 127.0.0.1:{port}" in done.stderr.decode()
    atoll("network", name, "--none")
    assert "no egress is allowed" in atoll("network", name).stderr.decode()
    denied, allowed, denied_again = atoll.json("audit", name, "--json")
    assert (denied["verdict"], allowed["verdict"], denied_again["verdict"]) == ("denied", "allowed", "denied")
    assert allowed["received_bytes"] > 0
    header, *rows = atoll.text("audit", name).splitlines()
    assert header.split() == "TIME VERDICT VIA HOST ADDRESS SENT RECEIVED WHY".split()
    assert [row.split()[2] for row in rows] == ["denied", "allowed", "denied"]


def test_a_rule_that_is_almost_registries_is_pointed_out(atoll: Atoll) -> None:
    assert b"warning: the rule registry is for a host" in atoll("run", "--allow", "registry", "--", "true").stderr
    assert b"warning" not in atoll("run", "--allow", "registry.example.com", "--", "true").stderr


def test_records_can_be_followed(atoll: Atoll, port: int) -> None:
    name = atoll.create("--allow", f"127.0.0.1:{port}")
    following = atoll.start("audit", name, "--follow", "--json")
    atoll.text("exec", name, "-c", fetch(port))
    begun, ended = map(json.loads, following.read_until(b'Z"}\n').splitlines())
    assert begun["id"] == ended["id"]
    assert (begun["ended"], begun["received_bytes"]) == (None, 0)
    assert ended["received_bytes"] > 0
    atoll("rm", name)
    assert following.wait() == 0
