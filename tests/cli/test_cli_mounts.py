"""`--mount` and `volumes`: what is shown, and what is said when it is wrong."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest

from tests.cli.driving import Atoll

ROOT = os.geteuid() == 0


def test_the_current_directory_is_mounted_and_shown(atoll: Atoll, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("from here")
    tmp_path.chmod(0o755)
    name = atoll.create("--mount", f"{tmp_path}:/work")
    assert atoll.text("exec", name, "--", "cat", "/work/file") == "from here"
    shown = {"source": str(tmp_path), "target": "/work", "read_only": True}
    assert atoll.json("stat", name, "--json")["mounts"] == [shown]
    assert [each["mounts"] for each in atoll.json("ls", "--json") if each["name"] == name] == [[shown]]
    assert f"{tmp_path}:/work:ro" in atoll.text("stat", name)
    words = ("run", "--mount", f"{tmp_path}:/work:rw", *(() if ROOT else ("--user", "root")), "--", "sh", "-c")
    assert atoll.text(*words, "echo made > /work/made; cat /work/made") == "made\n"
    assert (tmp_path / "made").stat().st_uid == tmp_path.stat().st_uid
    done = atoll("checkpoint", name)
    assert b"mounts are not in the checkpoint: /work" in done.stderr
    (made,) = atoll.json("checkpoints", name, "--json")
    assert made["without_mounts"] == ["/work"]
    atoll("checkpoints", "--delete", done.stdout.decode().strip())
    done = atoll("export", name, str(tmp_path / "box.tar.zst"))
    assert b"mounts are not exported: /work" in done.stderr
    atoll("rm", name)


def test_an_agent_starts_in_the_directory_that_it_may_write_to(atoll: Atoll, tmp_path: Path) -> None:
    script, project = tmp_path / "script.toml", tmp_path / "project"
    project.mkdir()
    look = '[[step]]\n[[step.call]]\ntool = "shell"\ninput.command = "pwd; touch made"\n[[step]]\ntext = "{at}"'
    script.write_text(f'{look}\n[[step.expect.result]]\nkeep = {{ at = "stdout" }}'.replace("{at}", "${at}"))
    words = ("agent", "--model", f"script:{script}", *(() if ROOT else ("--user", "root")), "hi")
    assert atoll.text(*words, "--mount", f"{tmp_path}:/data", "--mount", f"{project}:/work:rw") == "/work\n"
    assert (project / "made").stat().st_uid == project.stat().st_uid
    assert atoll.text(*words, "--mount", f"{project}:/work:rw", "--cwd", "/tmp") == "/tmp\n"


@pytest.mark.local("a server says only what its operator allows")
def test_a_directory_that_does_not_exist_is_named(atoll: Atoll) -> None:
    refused = atoll.json("create", "--mount", "/no/such:/work", "--json", status=2)["error"]
    assert (refused["code"], refused["details"]) == ("invalid_request", {"source": "/no/such"})


def test_a_wrong_mount_is_refused_with_what_is_allowed(atoll: Atoll, tmp_path: Path) -> None:
    assert (
        b"'/srv:work' is not a mount; write SOURCE:/TARGET" in atoll("create", "--mount", "/srv:work", status=2).stderr
    )
    assert (
        b"nothing can be mounted on /etc" in atoll("run", "--mount", f"{tmp_path}:/etc", "--", "true", status=2).stderr
    )
    missing = atoll("create", "--mount", "volume:none:/data", status=1).stderr
    assert b"no volume is named 'none'" in missing
    assert (b"hint: atoll volumes create none" in missing) == atoll.has_hints


def test_volumes_are_created_listed_exported_imported_and_removed(atoll: Atoll, tmp_path: Path) -> None:
    assert atoll.json("volumes", "--json") == []
    assert b"no volumes" in atoll("volumes").stderr
    assert atoll.text("volumes", "create", "cache") == "cache\n"
    assert b"exists already" in atoll("volumes", "create", "cache", status=1).stderr
    assert b"'Cache' is not a name for a volume" in atoll("volumes", "create", "Cache", status=2).stderr
    name = atoll.create("--mount", "volume:cache:/data")
    atoll("exec", name, "--", "sh", "-c", "echo kept > /data/file")
    (shown,) = atoll.json("volumes", "ls", "--json")
    assert (shown["name"], shown["size_bytes"], shown["sandboxes"]) == ("cache", None, [name])
    assert name in atoll.text("volumes")
    assert f"mounted by {name!r}".encode() in atoll("volumes", "rm", "cache", status=1).stderr
    target = tmp_path / "cache.tar"
    told = atoll.json("volumes", "export", "cache", str(target), "--json")
    assert told == {"volume": "cache", "file": str(target), "size_bytes": target.stat().st_size}
    with tarfile.open(target) as tar:
        assert sorted(tar.getnames()) == [".", "./file"]
    assert json.loads(atoll.text("volumes", "import", str(target), "copy", "--json"))["name"] == "copy"
    assert atoll.text("run", "--mount", "volume:copy:/data:ro", "--", "cat", "/data/file") == "kept\n"
    atoll("rm", name)
    told = atoll.json("volumes", "rm", "cache", "copy", "other", "--json", status=1)
    assert told["removed"] == ["cache", "copy"]
    assert [each["code"] for each in told["errors"]] == ["volume_not_found"]
    assert atoll.text("volumes", "ls", "-q") == ""


@pytest.mark.local("storage is the machine's")
def test_a_size_is_enforced_or_refused(atoll: Atoll) -> None:
    if atoll.json("storage", "--json")["disk_limit"]:
        assert atoll.json("volumes", "create", "small", "--size", "64m", "--json")["size_bytes"] == 64 << 20
        atoll("volumes", "rm", "small")
    else:
        refused = atoll.json("volumes", "create", "small", "--size", "64m", "--json", status=1)["error"]
        assert refused["code"] == "unenforceable"
        assert atoll.json("volumes", "--json") == []
