"""`storage`, `storage init`, `storage remove` and `--disk`: what is said. What is done, the conformance suite tells."""

from __future__ import annotations

import os

import pytest

from tests.cli.driving import Atoll

pytestmark = pytest.mark.local("storage is the machine's")


def test_storage_tells_what_the_layers_stand_on_and_whether_disks_can_be_limited(atoll: Atoll) -> None:
    told = atoll.json("storage", "--json")
    assert told["path"].endswith("/layers")
    assert told["image"] is None
    assert 0 < told["free_bytes"] <= told["total_bytes"]
    lines = dict(line.split("  ", 1) for line in atoll.text("storage").splitlines())
    assert lines["file system"].strip() == told["filesystem"]
    (finding,) = [each for each in atoll.json("doctor", "--json")["diagnostics"] if each["topic"] == "disk limits"]
    assert (finding["ok"], finding["fix"]) == (told["disk_limit"], told["fix"])
    if told["disk_limit"]:
        name = atoll.create("--disk", "64m")
        assert atoll.json("stat", name, "--json")["limits"]["disk_bytes"] == 64 << 20
    else:
        refused = atoll.json("create", "--disk", "64m", "--json", status=1)["error"]
        assert (refused["code"], refused["details"]) == ("unenforceable", {"limit": "disk"})
        assert told["missing"] in refused["message"]
        assert told["fix"] in refused["message"]
    assert b"--disk is 1 KiB; it must be at least 16 MiB" in atoll("create", "--disk", "1k", status=2).stderr


def test_storage_that_cannot_be_made_is_refused_with_what_to_do(atoll: Atoll) -> None:
    atoll.box()
    assert b"it must be one of btrfs, xfs" in atoll("storage", "init", "--size", "1g", "--fs", "fat", status=2).stderr
    assert b"--size" in atoll("storage", "init", status=2).stderr
    refused = atoll("storage", "init", "--size", "1g", status=None).stderr
    assert (b"remove them first" if os.geteuid() == 0 else b"by root") in refused
    refused = atoll("storage", "remove", status=None).stderr
    assert (b"atoll rm --all" if os.geteuid() == 0 else b"by root") in refused
