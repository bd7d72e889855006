"""`warm`, and what others make of sandboxes that wait."""

from __future__ import annotations

from tests.cli.driving import Atoll


def test_sandboxes_wait_are_taken_put_up_again_and_ended(atoll: Atoll) -> None:
    assert b"no warm pools" in atoll("warm").stderr
    (warm_pool,) = atoll.json("warm", "--count", "2", "--memory", "256m", "--json")
    assert (warm_pool["image"], warm_pool["count"], warm_pool["ready"]) == ("host", 2, 2)
    assert warm_pool["limits"]["memory_bytes"] == 256 << 20
    try:
        assert atoll.json("ls", "--json") == []
        assert atoll.json("rm", "--all", "--force", "--json") == {"removed": [], "errors": []}
        assert atoll.json("gc", "--json") == {"freed": []}
        waiting = ids(atoll)
        taken = atoll.json("create", "taken", "--memory", "256m", "--json")
        assert taken["id"] in waiting
        assert atoll.text("exec", "taken", "hostname") == "taken\n"
        assert atoll.text("run", "--memory", "256m", "--", "hostname") != "taken\n"
        header, row = atoll.text("warm").splitlines()
        assert header.split() == ["READY", "RUNTIME", "LIMITS", "IMAGE"]
        assert row.startswith("2 of 2"), "who takes one puts up another"
        assert not ids(atoll) & {taken["id"]}
        atoll("rm", "taken")
        atoll("warm", "--all", status=2)
        atoll("warm", "--count", "1001", status=1)
    finally:
        assert atoll.json("warm", "--count", "0", "--all", "--json") == []
    assert ids(atoll) == set()


def ids(atoll: Atoll) -> set[str]:
    return {path.name.partition(".")[2] for path in (atoll.state_dir / "warm").iterdir()}
