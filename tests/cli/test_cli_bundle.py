"""`atoll bundle`: an example that works, what is checked of a bundle, and where it is uploaded to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.testing.serving import ServerProcess
from tests.cli.driving import Atoll

pytestmark = pytest.mark.local("bundles are checked where sandboxes are; the push to a server has one of its own")

PAGE = json.dumps({"path": "index.html"})


@pytest.fixture
def example(atoll: Atoll, tmp_path: Path) -> Path:
    directory = tmp_path / "mine"
    assert atoll.text("bundle", "init", str(directory)) == f"{directory}\n"
    return directory


def test_the_example_is_checked_and_its_tool_called(atoll: Atoll, example: Path) -> None:
    called = atoll("bundle", "check", str(example), "--tool", "read_page", "--args", PAGE)
    assert called.stdout == b"<h1>A page</h1>\n\n"
    assert b"read_page: Read a page of the site.  (takes path)" in called.stderr
    told = atoll.json("bundle", "check", str(example), "--json")
    assert told["result"] is None
    assert told["tools"][0]["input_schema"]["properties"]["path"]["type"] == "string"
    assert atoll.json("ls", "--json") == atoll.json("checkpoints", "--json") == atoll.json("volumes", "--json") == []


def test_the_value_of_a_secret_is_shown_as_on_a_server(atoll: Atoll, example: Path) -> None:
    (example / "tools" / "read_page.py").write_text(
        "import os\n\n\ndef run(args):\n    print('log', os.environ['SHOP_KEY'])\n"
        "    return {'ok': True, 'content': os.environ['SHOP_KEY']}\n"
    )
    atoll.env["SHOP_KEY"] = "sk_shop_12345678"
    try:
        called = atoll("bundle", "check", str(example), "--tool", "read_page", "--secret-env", "SHOP_KEY")
    finally:
        del atoll.env["SHOP_KEY"]
    assert called.stdout == b"[the secret SHOP_KEY]\n"
    assert b"| log [the secret SHOP_KEY]" in called.stderr


def test_what_is_wrong_with_a_bundle_is_said(atoll: Atoll, example: Path) -> None:
    refused = atoll("bundle", "check", str(example), "--tool", "read_page", status=1)
    assert refused.stdout == b"path must be a string\n"
    assert b"did you mean 'read_page'?" in atoll("bundle", "check", str(example), "--tool", "read", status=2).stderr
    assert (
        b"--args is not JSON"
        in atoll("bundle", "check", str(example), "--tool", "read_page", "--args", "{", status=2).stderr
    )
    assert b"exists already" in atoll("bundle", "init", str(example), status=2).stderr
    assert b"there is no" in atoll("bundle", "push", str(example / "none"), status=2).stderr
    (example / "tools" / "read_page.py").write_text("import no_such_module\n")
    broken = atoll("bundle", "check", str(example), "--json", status=1)
    error = json.loads(broken.stderr or broken.stdout)["error"]
    assert (error["code"], error["details"]) == ("bundle_failed", {"reason": "bundle_entrypoint_invalid"})
    (example / "manifest.json").write_text("{}")
    assert b"schema_version is missing" in atoll("bundle", "check", str(example), status=1).stderr


@pytest.fixture
def own(atoll: Atoll, tmp_path: Path) -> Iterator[Atoll]:
    """With a state directory of the test's own, where a server has its data."""
    shared = atoll.env["ATOLL_STATE_DIR"]
    atoll.env["ATOLL_STATE_DIR"] = str(tmp_path / "state")
    yield atoll
    atoll.env["ATOLL_STATE_DIR"] = shared
    for name in ("ATOLL_URL", "ATOLL_API_KEY"):
        atoll.env.pop(name, None)


def test_a_bundle_is_pushed_to_a_server_and_to_a_state_directory(own: Atoll, example: Path, tmp_path: Path) -> None:
    here = own.json("bundle", "push", str(example), "--json")
    assert here["url"] == f"nap-bundle://{here['bundle_id']}"
    stored = tmp_path / "state" / "server" / "bundles" / "default" / f"{here['sha256']}.tgz"
    assert hashlib.sha256(stored.read_bytes()).hexdigest() == here["sha256"]
    assert own.json("bundle", "push", str(stored), "--json") == here
    with ServerProcess(tmp_path / "state") as server:
        own.env |= {"ATOLL_URL": server.url, "ATOLL_API_KEY": server.key}
        there = own.text("bundle", "push", str(example))
        assert json.loads("{" + there + "}")["provisioning_bundle"]["sha256"] == here["sha256"]
        (example / "manifest.json").write_text("{}")
        assert b"schema_version is missing" in own("bundle", "push", str(example), status=1).stderr
        assert b"works on the machine of the sandboxes" in own("bundle", "check", str(example), status=2).stderr
