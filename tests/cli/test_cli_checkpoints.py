"""`sleep`, `wake`, `pause`, `resume`, `checkpoint`, `checkpoints`, `restore`, `fork` and `gc`."""

from __future__ import annotations

import os

from tests.cli.driving import Atoll


def test_a_sandbox_is_put_to_sleep_and_woken(atoll: Atoll) -> None:
    name = atoll.box()
    assert atoll.text("sleep", name) == f"{name} is sleeping\n"
    assert atoll.text("exec", name, "echo", "awake") == "awake\n"
    assert atoll.json("sleep", name, "--shutdown", "--json") == {"name": name, "status": "shutdown"}
    assert b"wake it first" in atoll("exec", name, "true", status=125).stderr
    assert atoll.text("wake", name) == f"{name} is running\n"
    assert atoll.text("exec", name, "echo", "awake") == "awake\n"
    atoll("sleep", "nobody", status=1)


def test_a_sandbox_is_paused_and_resumed_with_its_processes(atoll: Atoll) -> None:
    name = atoll.box()
    atoll("exec", name, "--detach", "-c", "while true; do date +%s%N > now; sleep 0.05; done")
    assert atoll.text("pause", name) == f"{name} is paused\n"
    assert atoll.json("pause", name, "--json") == {"name": name, "status": "paused"}
    assert [info["status"] for info in atoll.json("ls", "--json") if info["name"] == name] == ["paused"]
    assert atoll.text("resume", name) == f"{name} is running\n"
    assert atoll.json("--json", "resume", name) == {"name": name, "status": "running"}
    assert atoll.runs(name, "date +%s%N > now")
    atoll("sleep", name)
    assert b"wake it instead" in atoll("resume", name, status=2).stderr
    for command in ("pause", "resume"):
        assert atoll.json(command, "no-such", "--json", status=1)["error"]["code"] == "sandbox_not_found"


def test_checkpoints_are_made_drawn_gone_back_to_and_deleted(atoll: Atoll) -> None:
    name = atoll.box()
    atoll.text("exec", name, "-c", "echo 1 > f")
    first = atoll.text("checkpoint", name, "one").strip()
    atoll.text("exec", name, "-c", "echo 2 > f")
    second = atoll.json("checkpoint", name, "two", "--json")
    assert (second["parent"], second["label"], second["with_memory"]) == (first, "two", False)
    assert atoll.text("restore", name, "one") == f"{name} is restored to one\n"
    assert atoll.text("exec", name, "cat", "f") == "1\n"
    third = atoll.text("checkpoint", name, "three").strip()
    header, *rows = atoll.text("checkpoints", name).splitlines()
    assert header.split() == ["CHECKPOINT", "LABEL", "SANDBOX", "CREATED", "SIZE"]
    assert [row.split("  ")[0].strip() for row in rows] == [first, f"├─ {second['id']}", f"└─ {third}"]
    assert atoll.text("checkpoints", name, "--quiet").split() == [first, second["id"], third]
    made = atoll.text("fork", name, f"{name}-a", f"{name}-b", "--checkpoint", "two").split()
    assert made == [f"{name}-a", f"{name}-b"]
    assert atoll.text("exec", made[1], "cat", "f") == "2\n"
    atoll.text("rm", *made)
    assert atoll.text("checkpoints", name, "--delete", "one", "--delete", "two", "--delete", third).split() == [
        "one",
        "two",
        third,
    ]
    assert atoll.json("checkpoints", name, "--json") == []
    atoll("restore", name, "one", status=1)
    assert set(atoll.json("gc", "--json")) == {"sandboxes", "layers", "images", "downloads", "unreadable"}


def test_checkpoints_are_a_tree_whose_labels_are_unique_and_which_outlives_rm(atoll: Atoll) -> None:
    name, other = atoll.box(), atoll.box()
    first = atoll.text("checkpoint", name, "base").strip()
    second = atoll.text("checkpoint", name).strip()
    refused = atoll("checkpoint", name, "base", status=1).stderr.decode()
    assert f"the checkpoint {first} of this sandbox has the label 'base' already" in refused
    assert (f"hint: atoll checkpoint {name} base --move" in refused) == atoll.has_hints
    third = atoll.text("checkpoint", name, "base", "--move").strip()
    _, *rows = atoll.text("checkpoints", name).splitlines()
    assert rows[0].startswith(first)
    assert rows[1].startswith(f"└─ {second}")
    assert rows[2].startswith(f"   └─ {third}")
    assert "is not a label for a checkpoint" in atoll("checkpoint", name, "With Caps", status=None).stderr.decode()
    refused = atoll("restore", other, first, status=None).stderr.decode()
    assert f"the checkpoint {first} is not of this sandbox" in refused
    hint = f"atoll create NEW --from {first}, or atoll restore {other} {first} --foreign"
    assert (hint in refused) == atoll.has_hints
    done = atoll("rm", name)
    assert done.stdout.decode() == f"{name}\n"
    kept = f"{name}: 3 checkpoints of it are kept; `atoll checkpoints {name} --delete-all` deletes them"
    assert kept in done.stderr.decode()
    assert all(row.count(f"{name} (destroyed)") for row in atoll.text("checkpoints", name).splitlines()[1:])
    copy = atoll.text("create", f"{name}-copy", "--from", "base").strip()
    forked = atoll.text("fork", name, f"{name}-fork", "--checkpoint", "base").strip()
    assert atoll.text("run", "--from", third, "--", "id", "-un") == "user\n"
    assert atoll.json("rm", copy, forked, "--json") == {"removed": [copy, forked], "kept_checkpoints": {}, "errors": []}
    assert atoll.text("checkpoints", name, "--delete-all").split() == [first, second, third]
    atoll("checkpoint", other)
    assert atoll("rm", other, "--checkpoints").stderr == b""
    assert atoll("checkpoints", other, status=1).stderr.startswith(b"error: no sandbox is named")


def test_gc_says_what_and_how_many_it_removed(atoll: Atoll) -> None:
    atoll("gc")
    for number in range(2):
        (atoll.state_dir / "layers" / f"layer-{number:016x}").mkdir()
    tree = atoll.state_dir / "images/unpacked" / ("0" * 64)
    tree.mkdir()
    os.utime(tree, (0, 0))
    (atoll.state_dir / "sandboxes/atoll-0000000000000007").mkdir()
    assert atoll.text("gc") == "removed 1 sandbox, 2 layers, 1 image\n"
    assert atoll.text("gc") == "nothing to remove\n"
    (atoll.state_dir / "layers/layer-0000000000000007").mkdir()
    removed = atoll.json("gc", "--json")
    assert removed["layers"] == ["layer-0000000000000007"]
    assert (removed["sandboxes"], removed["images"], removed["downloads"]) == ([], [], [])


def test_a_checkpoint_whose_record_cannot_be_read_is_shown_with_the_reason_and_deleted(atoll: Atoll) -> None:
    name = atoll.box()
    damaged = atoll.text("checkpoint", name).strip()
    whole = atoll.text("checkpoint", name).strip()
    (atoll.state_dir / "checkpoints" / damaged / "checkpoint.json").write_text("{")
    reasons = {each["id"]: each["reason"] for each in atoll.json("checkpoints", "--json")}
    assert reasons[damaged].startswith("its record cannot be read: ")
    assert reasons[whole] is None
    [row] = [row for row in atoll.text("checkpoints").splitlines() if damaged in row]
    assert "error: its record cannot be read: " in row
    assert f"`atoll checkpoints --delete {damaged}` removes it" in atoll("gc").stderr.decode()
    assert atoll.text("checkpoints", "--delete", damaged) == f"{damaged}\n"
    assert [each["id"] for each in atoll.json("checkpoints", name, "--json")] == [whole]
    atoll("checkpoints", "--delete", whole)


def test_checkpoints_of_a_destroyed_sandbox_are_listed_and_an_unknown_name_is_an_error(atoll: Atoll) -> None:
    name = atoll.box()
    assert atoll.json("checkpoints", name, "--json") == []
    made = atoll.text("checkpoint", name, "kept").strip()
    atoll.text("rm", name)
    assert [(each["id"], each["label"]) for each in atoll.json("checkpoints", name, "--json")] == [(made, "kept")]
    refused = atoll.json("checkpoints", name, "--delete", "kepd", "--json", status=1)["error"]
    assert f"no checkpoint has the id or label 'kepd' (checkpoints: {made} with the label 'kept'" in refused["message"]
    assert atoll.text("checkpoints", name, "--delete", "kept") == "kept\n"
    assert atoll.json("checkpoints", name, "--json", status=1)["error"]["code"] == "sandbox_not_found"
    assert atoll("checkpoints", "no-such", status=1).stderr.startswith(b"error: no sandbox is named 'no-such'")
