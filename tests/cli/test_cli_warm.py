"""`warm`: a warm pool is kept, claimed from, refilled and removed."""

from __future__ import annotations

from tests.cli.driving import Atoll


def test_a_warm_pool_is_kept_claimed_from_refilled_and_removed(atoll: Atoll) -> None:
    assert b"no warm pools" in atoll("warm").stderr
    (warm_pool,) = atoll.json("warm", "--count", "2", "--memory", "256m", "--json")
    assert (warm_pool["image"], warm_pool["count"], warm_pool["ready"]) == ("host", 2, 2)
    assert warm_pool["limits"]["memory_bytes"] == 256 << 20
    try:
        assert atoll.json("ls", "--json") == []
        assert atoll.json("rm", "--all", "--force", "--json")["removed"] == []
        removed = atoll.json("gc", "--json")
        assert removed["sandboxes"] == removed["layers"] == []
        ready = ids(atoll)
        claimed = atoll.json("create", "claimed", "--memory", "256m", "--json")
        assert claimed["id"] in ready
        assert atoll.text("exec", "claimed", "hostname") == "claimed\n"
        assert atoll.text("run", "--memory", "256m", "--", "hostname") != "claimed\n"
        header, row = atoll.text("warm").splitlines()
        assert header.split() == ["READY", "RUNTIME", "LIMITS", "IMAGE"]
        assert row.startswith("2 of 2"), "the claim refilled the pool"
        assert not ids(atoll) & {claimed["id"]}
        atoll("rm", "claimed")
        atoll("warm", "--all", status=2)
        atoll("warm", "--count", "1001", status=2)
    finally:
        assert atoll.json("warm", "--count", "0", "--all", "--json") == []
    assert ids(atoll) == set()


def ids(atoll: Atoll) -> set[str]:
    return {path.name.partition(".")[2] for path in (atoll.state_dir / "warm").iterdir()}
