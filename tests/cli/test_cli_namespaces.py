"""`--namespace`: a command sees the sandboxes of one namespace, and `ls --all-namespaces` those of all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atoll.runtime.state.running import find_running
from tests.cli.driving import Atoll

pytestmark = pytest.mark.local("a namespace of a server is a tenant, which has to exist")

TEAM = ("--namespace", "team")


@pytest.fixture
def both(atoll: Atoll, box: str) -> Iterator[str]:
    """The name of a sandbox here, and of another in the namespace `team`."""
    atoll(*TEAM, "create", box)
    yield box
    atoll("rm", "--force", box, *TEAM)


def test_a_name_means_another_sandbox_in_another_namespace(atoll: Atoll, both: str) -> None:
    atoll("exec", both, *TEAM, "-c", "echo theirs > note")
    assert b"No such file" in atoll("exec", both, "--", "cat", "note", status=1).stderr
    assert atoll.text(*TEAM, "exec", both, "--", "cat", "note") == "theirs\n"
    assert atoll.text("exec", both, *TEAM, "-c", "hostname") == f"{both}\n"
    here, there = (atoll.json("inspect", both, *words)["namespace"] for words in ((), TEAM))
    assert (here, there) == ("default", "team")
    atoll("rm", both, *TEAM)
    assert b"no sandbox is named" in atoll("exec", both, *TEAM, "--", "true", status=125).stderr
    assert atoll("exec", both, "--", "true").returncode == 0


def test_the_namespace_comes_from_the_environment_too(atoll: Atoll, both: str, monkeypatch: pytest.MonkeyPatch) -> None:
    atoll("exec", both, *TEAM, "-c", "echo theirs > note")
    monkeypatch.setitem(atoll.env, "ATOLL_NAMESPACE", "team")
    assert atoll.text("exec", both, "--", "cat", "note") == "theirs\n"
    assert atoll.text("ls", "-q") == f"{both}\n"
    assert both in atoll.text("ls", "-q", "--namespace", "default").splitlines()
    monkeypatch.setitem(atoll.env, "ATOLL_NAMESPACE", "Team")
    assert b"ATOLL_NAMESPACE='Team': 'Team' is not a name for a namespace" in atoll("ls", status=2).stderr


def test_exec_needs_no_engine_in_a_namespace_either(atoll: Atoll, both: str) -> None:
    here, there = (find_running(str(atoll.state_dir), both, namespace) for namespace in ("default", "team"))
    assert here is not None
    assert there is not None
    assert here.id != there.id
    assert find_running(str(atoll.state_dir), f"team:{both}") is None
    started = atoll.start("exec", both, *TEAM, "-c", "echo ready; sleep 1000")
    started.read_until(b"ready\n")
    atoll("rm", both, *TEAM)
    assert started.wait() == 125
    assert started.errors().decode() == f"error: sandbox {both!r} was destroyed\n"


def test_ls_shows_all_namespaces_when_asked(atoll: Atoll, both: str) -> None:
    header, *rows = atoll.text("ls", "--all-namespaces").splitlines()
    assert header.split()[:2] == ["NAMESPACE", "NAME"]
    assert {("default", both), ("team", both)} <= {tuple(row.split()[:2]) for row in rows}
    assert {f"default {both}", f"team {both}"} <= set(atoll.text("ls", "-A", "-q").splitlines())
    found = [each["namespace"] for each in atoll.json("ls", "-A", "--json") if each["name"] == both]
    assert found == ["default", "team"]
    assert [each["name"] for each in atoll.json("ls", *TEAM, "--json")] == [both]


def test_a_name_that_is_none_is_a_wrong_command_line(atoll: Atoll) -> None:
    said = atoll("ls", "--namespace", "a_b", status=2).stderr.decode()
    assert "Invalid value for '--namespace': 'a_b' is not a name for a namespace; allowed are 1 to 32" in said


def test_gc_says_how_to_remove_a_damaged_record_of_another_namespace(atoll: Atoll, both: str) -> None:
    there = find_running(str(atoll.state_dir), both, "team")
    assert there is not None
    (atoll.state_dir / "sandboxes" / there.id / "manifest.json").write_text("{}")
    assert f"(`atoll rm {there.id} --namespace team` removes it)" in atoll("gc").stderr.decode()
    atoll("rm", there.id, *TEAM)
    assert atoll.json("gc", "--json")["unreadable"] == {}
