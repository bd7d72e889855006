"""`build` and `templates`: a template from a directory, and what becomes of one whose build is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from atoll.testing.waiting import wait_until
from tests.cli.driving import Atoll


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "context"
    root.mkdir()
    (root / "page.html").write_text("<h1>hi</h1>\n")
    (root / "Dockerfile").write_text(
        "FROM host\nARG WHO=you\nRUN echo built for $WHO | tee /who\nCOPY . /srv/\nCMD sleep 1000\n"
    )
    return root


def test_a_template_is_built_listed_used_and_removed(atoll: Atoll, root: Path) -> None:
    try:
        built = atoll("build", str(root), "--name", "web", "--build-arg", "WHO=me", "--ready", "pgrep -x sleep")
        assert built.stdout == b"template:web\n"
        said = built.stderr.decode()
        assert "[2/3] RUN echo built for $WHO | tee /who\n  built for me\n[3/3] COPY . /srv/\n" in said
        again = atoll("build", str(root / "Dockerfile"), "-t", "web:v2", "--build-arg", "WHO=me")
        assert again.stderr.count(b"the result is kept from before") == 2
        made = atoll.json("build", str(root), "--name", "web:other", "--no-cache", "--json")
        assert made["template"] == "template:web:other"
        assert made["start_command"][-1] == "sleep 1000"
        assert [line.split()[0] for line in atoll.text("templates").splitlines()] == [
            "TEMPLATE",
            "web",
            "web:v2",
            "web:other",
        ]
        assert "pgrep -x sleep" in atoll.text("templates", "show", "web")
        assert atoll.text("run", "--image", "template:web", "--", "cat", "/who", "/srv/page.html") == (
            "built for me\n<h1>hi</h1>\n"
        )
        script = root.parent / "script.json"
        call = {"tool": "bash", "input": {"command": "cat /who"}}
        script.write_text(json.dumps({"step": [{"call": [call]}, {"text": "Done."}]}))
        agent = atoll(*("agent", "--model", f"script:{script}", "--tools", "coding", "--image", "template:web", "go"))
        assert b"built for me" in agent.stderr
        assert agent.stdout == b"Done.\n"
        assert atoll.json("templates", "rm", "web:v2", "--json")["removed"] == ["web:v2"]
        assert list(atoll.json("templates", "ls", "--json")[0]["versions"]) == ["default", "other"]
        assert b"line 1: FROM scratch" in atoll("build", _dockerfile(root, "FROM scratch"), "-t", "x", status=1).stderr
        failed = atoll("build", _dockerfile(root, "FROM host\nRUN echo why; exit 4"), "-t", "x", status=1)
        assert b"step 1 of 1: RUN echo why; exit 4 failed with exit code 4:\nwhy" in failed.stderr
        wants = "FROM host\nRUN curl --fail --silent --show-error http://example.com/ >&2"
        offline = atoll("build", _dockerfile(root, wants), "-t", "x", status=1)
        assert b"no connection leaves a step unless the build allows it" not in failed.stderr
        assert b"no connection leaves a step unless the build allows it" in offline.stderr
        assert b"--name is missing" in atoll("build", str(root), status=2).stderr
        atoll("build", str(root), "--name", "../x", status=2)
        atoll("run", "--image", "template:unknown", "--", "true", status=125)
    finally:
        _clean(atoll)
    assert atoll.json("templates", "ls", "--json") == []


def _dockerfile(root: Path, text: str) -> str:
    (root / "other.Dockerfile").write_text(text)
    return str(root / "other.Dockerfile")


@pytest.mark.local  # of a server's, the server ends what is left
def test_a_build_that_is_killed_leaves_no_sandbox(atoll: Atoll, root: Path) -> None:
    try:
        started = atoll.start("build", _dockerfile(root, "FROM host\nRUN echo begun; sleep 1000"), "-t", "x")
        wait_until(lambda: bool(os.listdir(atoll.state_dir / "temporary-leases")), "the build has begun")
        wait_until(lambda: any(name.endswith(".step") for name in atoll.names()), "its sandbox runs")
        started.process.kill()
        started.wait()
        wait_until(lambda: atoll.names() == [], "its sandbox is removed")
    finally:
        _clean(atoll)


def test_ctrl_c_ends_a_build_wherever_it_runs(atoll: Atoll, root: Path) -> None:
    try:
        started = atoll.start("build", _dockerfile(root, "FROM host\nRUN echo begun; sleep 1000"), "-t", "x")
        wait_until(lambda: any(name.endswith(".step") for name in atoll.names()), "its sandbox runs")
        started.process.send_signal(signal.SIGINT)
        started.wait()
        wait_until(lambda: atoll.names() == [], "its sandbox is removed")
        assert atoll.json("templates", "ls", "--json") == []
    finally:
        _clean(atoll)


def test_more_of_the_command_line(atoll: Atoll, root: Path) -> None:
    try:
        done = atoll("build", str(root), "-f", "-", "-t", "x", "--build-arg", "TYPO=1", input=b"FROM host\nRUN true\n")
        assert b"warning: no ARG of the Dockerfile is named TYPO: --build-arg has no effect" in done.stderr
        again = atoll.json("build", str(root), "-f", "-", "-t", "x", "--json", input=b"FROM host\nRUN true\n")
        assert again["cached_steps"] == [1]
        assert atoll.text("templates", "tag", "x", "v1", "v2") == "x:v1\nx:v2\n"
        failed = atoll("build", _dockerfile(root, "FROM host\nRUN echo why; exit 4"), "-t", "x", "--json", status=1)
        error = json.loads(failed.stdout or failed.stderr)["error"]
        assert (error["code"], error["details"]["step"]) == ("build_failed", 1)
        offline = "FROM host\nRUN python3 -c 'import socket; socket.getaddrinfo(\"example.com\", 80)'"
        assert b"--allow registries" in atoll("build", _dockerfile(root, offline), "-t", "x", status=1).stderr
    finally:
        _clean(atoll)


def _clean(atoll: Atoll) -> None:
    for each in atoll.json("templates", "ls", "--json"):
        atoll("templates", "rm", each["name"])
    atoll("templates", "gc")
