"""Making, listing, looking at and destroying sandboxes; what images and the machine offer."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from atoll.runtime.state import known
from atoll.testing.waiting import wait_until
from tests.cli.driving import PROGRAM, Atoll


def test_create_prints_the_name_and_ls_shows_it(atoll: Atoll) -> None:
    name = atoll.create()
    header, *rows = atoll.text("ls").splitlines()
    assert header.split() == ["NAME", "STATUS", "RUNTIME", "CREATED", "USED", "IMAGE"]
    [row] = [row for row in rows if row.startswith(f"{name} ")]
    assert "running" in row
    assert "ago" in row or "just now" in row
    assert row.endswith("host")
    assert "\x1b" not in header
    assert [row.split()[0] for row in rows] == atoll.names() == [info["name"] for info in atoll.json("ls", "--json")]


def test_create_without_a_name_makes_one_up(atoll: Atoll) -> None:
    name = atoll.text("create").strip()
    assert name in atoll.names()
    assert atoll.text("rm", name) == f"{name}\n"
    assert name not in atoll.names()


def test_what_happens_at_the_end_of_a_lifetime_is_chosen_shown_and_changed(atoll: Atoll) -> None:
    lifetime = ("--ttl", "1h", "--on-expiry", "sleep", "--ttl-renewed-by-use")
    name = atoll.create(*lifetime)
    shown = atoll.json("stat", name, "--json")
    assert (shown["ttl_s"], shown["on_expiry"], shown["ttl_renewed_by_use"]) == (3600, "sleep", True)
    assert ", sleeps" in atoll.text("ls")
    changed = atoll.json("update", name, "--on-expiry", "destroy", "--no-ttl-renewed-by-use", "--json")
    assert (changed["ttl_s"], changed["on_expiry"], changed["ttl_renewed_by_use"]) == (3600, "destroy", False)
    assert b"it must be 'destroy', 'sleep' or 'pause'" in atoll("update", name, "--on-expiry", "stop", status=2).stderr
    assert b"give ttl_s, too" in atoll("create", "--on-expiry", "sleep", status=2).stderr


def test_create_and_ls_in_json_are_the_same_sandbox(atoll: Atoll) -> None:
    name = atoll.new_name()
    created = atoll.json("create", name, "--memory", "128m", "--pids", "64", "--json")
    assert created["limits"] == {**created["limits"], "memory_bytes": 128 * 1024**2, "pids": 64}
    [listed] = [info for info in atoll.json("ls", "--json") if info["name"] == name]
    assert listed == created
    created, used = (datetime.fromisoformat(listed[when]) for when in ("created_at", "last_used_at"))
    assert created.tzinfo is not None
    assert created <= used


def test_a_taken_name_is_status_1_with_what_to_do(atoll: Atoll, box: str) -> None:
    done = atoll("create", box, status=1)
    assert done.stderr.decode().startswith(f"error: a sandbox named '{box}' exists already")
    assert atoll.json("create", box, "--json", status=1)["error"]["code"] == "sandbox_exists"


def test_a_sandbox_keeps_its_variables_and_user(atoll: Atoll) -> None:
    name = atoll.create("--env", "A=1", "--user", "root")
    assert atoll.text("exec", name, "-c", "echo $A; id -un") == "1\nroot\n"


def test_variables_come_from_a_file_and_options_override_it(atoll: Atoll, tmp_path: Path) -> None:
    (tmp_path / "env").write_text("A=1\nB=2\n")
    (tmp_path / "more").write_text("B=5\n")
    name = atoll.create("--env-file", str(tmp_path / "env"), "--env", "A=3")
    assert atoll.text("exec", name, "--env-file", str(tmp_path / "more"), "-c", "echo $A $B") == "3 5\n"


def test_a_user_that_the_image_does_not_have_is_refused_and_leaves_nothing(atoll: Atoll) -> None:
    name = atoll.new_name()
    assert b"there is no user 'nosuch'" in atoll("create", name, "--user", "nosuch", status=2).stderr
    assert name not in atoll.names()


def test_what_cannot_have_an_effect_is_warned_of(atoll: Atoll, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(atoll.env, "KEY", "a-secret-value")
    name = atoll.new_name()
    limits = ("--memory", "100t", "--cpus", "1000")
    said = atoll("create", name, *limits, "--secret", "KEY@api.example.com").stderr.decode()
    assert "warning: --memory is 100 TiB, and this machine has " in said
    assert "warning: --cpus is 1000, and this machine has " in said
    assert "warning: --secret KEY is for api.example.com, which no --allow rule allows" in said
    allowed = ("--allow", "*.example.com", "--secret", "KEY@api.example.com")
    assert atoll("create", atoll.new_name(), *allowed).stderr == b""


def test_a_sandbox_that_is_unused_is_paused_after_the_time_that_was_asked_for(atoll: Atoll) -> None:
    name = atoll.create("--pause-after", "300ms")
    wait_until(lambda: atoll.json("inspect", name)["status"] == "paused", "it is paused")
    assert atoll.text("exec", name, "--", "echo", "on") == "on\n"


def test_a_sandbox_has_sudo_if_it_was_asked_for(atoll: Atoll) -> None:
    name = atoll.create("--sudo")
    assert atoll.json("inspect", name)["sudo"] is True
    assert atoll.text("exec", name, "--", "sudo", "id", "-un") == "root\n"
    assert atoll.text("run", "--sudo", "-c", "id -un; sudo id -un") == "user\nroot\n"
    without = atoll.create()
    assert atoll.json("inspect", without)["sudo"] is False
    assert atoll("exec", without, "--", "sudo", "id", "-un", status=None).returncode != 0


def test_a_name_of_a_process_cannot_steer_the_terminal(atoll: Atoll, box: str) -> None:
    atoll("exec", box, "--detach", "-c", "exec -a $'\\e[2Jevil\\nrow' sleep 1000")
    text = atoll.text("ps", box)
    assert "\x1b" not in text
    assert "[2Jevil\\nrow" in text


def test_stat_shows_what_is_used_and_the_limits(atoll: Atoll) -> None:
    name = atoll.create("--memory", "256m", "--cpus", "1.5", "--pids", "100")
    atoll("exec", name, "-c", "head -c 3000000 /dev/zero > file")
    usage = atoll.json("stat", name, "--json")
    assert usage["disk_bytes"] >= 3_000_000
    assert usage["limits"]["cpus"] == 1.5
    text = atoll.text("stat", name)
    assert "of 256.0 MiB" in text
    assert "limited to 1.5 cores" in text
    assert "of 100, threads and the guest's own included" in text


def test_inspect_is_all_that_is_known_as_json_and_does_not_wake(atoll: Atoll, box: str) -> None:
    atoll("checkpoint", box, "clean")
    atoll("stop", box)
    shown = atoll.json("inspect", box)
    assert (shown["name"], shown["status"], shown["limits"]["pids"]) == (box, "shutdown", 1024)
    assert shown["usage"]["disk_bytes"] >= 0
    assert [each["label"] for each in shown["checkpoints"]] == ["clean"]
    assert atoll.json("inspect", box)["status"] == "shutdown"
    atoll("checkpoints", box, "--delete", "clean")
    assert atoll.json("inspect", "no-such", "--json", status=1)["error"]["code"] == "sandbox_not_found"


def test_top_shows_the_busiest_first_once_or_until_ctrl_c(atoll: Atoll) -> None:
    busy, idle = atoll.box(), atoll.box()
    atoll("exec", busy, "--detach", "-c", "while :; do :; done")
    rows = atoll.json("top", "--json", busy, idle)
    assert [row["name"] for row in rows] == [busy, idle]
    assert rows[0]["cpu_percent"] > rows[1]["cpu_percent"]
    header, *lines = atoll.text("top", idle).splitlines()
    assert header.split() == ["NAME", "STATUS", "CPU", "MEMORY", "OF", "PIDS", "DISK"]
    assert [line.split()[0] for line in lines] == [idle]
    terminal = atoll.terminal("top", "--interval", "200ms")
    terminal.read_until(busy.encode())
    terminal.read_until(busy.encode())
    terminal.type(b"\x03")
    assert terminal.wait() == 0
    assert terminal.seen.endswith(b"\x1b[?25h\x1b[?1049l")
    assert b"'no-such'" in atoll("top", "no-such", status=1).stderr


def test_rm_destroys_all_it_can_and_tells_what_it_could_not(atoll: Atoll) -> None:
    first, second = atoll.create(), atoll.create()
    done = atoll("rm", first, "not-there", second, status=1)
    assert done.stdout.decode().split() == [first, second]
    assert b"'not-there'" in done.stderr
    assert {first, second}.isdisjoint(atoll.names())
    assert atoll("rm", "--force", "not-there").stdout == b""
    third = atoll.box()
    assert atoll.text("rm", "--force", "not-there", third) == f"{third}\n"
    assert atoll.json("rm", "--json", "not-there", status=1)["errors"][0]["code"] == "sandbox_not_found"


@pytest.fixture
def lone(atoll: Atoll, tmp_path: Path, give_host_image: Callable[[Path], Path]) -> Atoll:
    """The command line on a state directory that no other test uses."""
    return Atoll(give_host_image(tmp_path / "own"), tmp_path, atoll.nursery)


def test_an_empty_list_is_empty_and_says_how_to_begin(lone: Atoll) -> None:
    done = lone("ls")
    assert done.stdout == b""
    assert b"atoll create" in done.stderr
    assert lone.json("ls", "--json") == []
    assert lone.text("ls", "-q") == ""


def test_all_asks_on_a_terminal_and_says_which_they_are(lone: Atoll) -> None:
    for name in ("one", "another"):
        lone("create", name)
    terminal = lone.terminal("rm", "--all")
    terminal.read_until(b"Destroy all 2 sandboxes (another, one)? [y/N]: ")
    terminal.type(b"n\r")
    assert terminal.wait() == 1
    terminal = lone.terminal("rm", "--all")
    terminal.read_until(b"[y/N]: ")
    terminal.type(b"\x03")
    assert terminal.wait() == 130
    assert terminal.seen.endswith(b"\r\n")  # where the prompt of a shell follows
    assert lone.names() == ["another", "one"]
    lone("checkpoint", "one", "clean")
    done = lone("rm", "--all")
    assert done.stdout == b"another\none\n"
    assert done.stderr == b"one: 1 checkpoint of it is kept; `atoll checkpoints one --delete-all` deletes them\n"
    assert lone.names() == []
    assert lone("rm", "--all").stderr == b"no sandboxes\n"
    lone("checkpoints", "one", "--delete", "clean")
    assert not os.listdir(lone.state_dir / "sandboxes")
    lone.close()


def test_the_state_directory_can_be_given_on_the_command_line(atoll: Atoll, tmp_path: Path) -> None:
    other = tmp_path / "other"  # There is nothing yet: not the directory, and no image either.
    assert atoll.text("create", "here", "--state-dir", str(other)) == "here\n"
    assert "here" not in atoll.names()
    assert atoll.text("ls", "-q", "--state-dir", str(other)) == "here\n"
    assert atoll.text("exec", "here", "--state-dir", str(other), "--", "echo", "1") == "1\n"
    atoll("rm", "here", "--state-dir", str(other))


def test_a_state_directory_that_cannot_be_is_a_sentence(atoll: Atoll, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = atoll("ls", "--state-dir", str(tmp_path / "file" / "below"), status=2)
    assert done.stderr.startswith(b"error: ")
    assert b"Traceback" not in done.stderr


@pytest.mark.local("doctor is about this machine")
def test_doctor_names_what_it_looked_at_and_which_runtimes_work(atoll: Atoll) -> None:
    report = atoll.json("doctor", "--json")
    assert report["runtimes"]
    assert all(set(finding) == {"topic", "ok", "detail", "fix"} for finding in report["diagnostics"])
    text = atoll.text("doctor")
    assert "✓" in text
    assert ", ".join(report["runtimes"]) in text
    if "bwrap" in report["runtimes"]:
        assert "bwrap (only by name)" in text
        assert "used only if it is requested by name" in text


def test_a_listing_that_is_not_read_to_the_end_is_no_error(atoll: Atoll, box: str) -> None:
    line = '"$@" | true'
    script = f"set -o pipefail; {line}"
    done = subprocess.run(
        ["bash", "-c", script, "bash", *PROGRAM, "ls"], capture_output=True, env=atoll.env, check=False
    )
    assert done.returncode in {0, 141}
    assert done.stderr == b""


def test_an_image_is_imported_listed_used_and_removed(lone: Atoll, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "busybox").write_bytes(Path("/bin/busybox").read_bytes())
    (root / "bin" / "busybox").chmod(0o755)
    (root / "bin" / "sh").symlink_to("busybox")
    (root / "marker").write_text("imported\n")
    subprocess.run(["tar", "-C", str(root), "-cf", str(tmp_path / "root.tar"), "."], check=True)
    reference = lone.text("images", "import", str(tmp_path / "root.tar"), "mine:1").strip()
    assert reference in lone.text("images", "ls")
    assert known.images(known.NamespaceView(lone.state_dir)) == ["host", reference]  # what a shell completes
    assert [image["reference"] for image in lone.json("images", "ls", "--json")].count(reference) == 1
    assert lone.text("run", "--image", "mine:1", "--", "busybox", "cat", "/marker") == "imported\n"
    assert lone.text("images", "rm", "mine:1") == "mine:1\n"
    assert reference not in lone.text("images", "ls", "-q")


def test_an_image_that_cannot_be_had_is_a_sentence(atoll: Atoll) -> None:
    done = atoll("images", "pull", "127.0.0.1:1/no/such:1", status=1)
    assert done.stderr.splitlines()[-1].startswith((b"error: ", b"hint: "))
    assert b"Traceback" not in done.stderr
    lines = atoll("images", "pull", "127.0.0.1:1/no/such:1", "--json", status=1).stdout
    assert json.loads(lines)["error"]["code"] == "image_unavailable"


def test_a_sandbox_whose_record_cannot_be_read_is_listed_with_the_reason_and_removed(atoll: Atoll, box: str) -> None:
    name = atoll.create()
    [id] = [info["id"] for info in atoll.json("ls", "--json") if info["name"] == name]
    (atoll.state_dir / "sandboxes" / id / "manifest.json").write_text("")
    [row] = [row for row in atoll.text("ls").splitlines() if row.startswith(f"{name} ")]
    assert "error: its record cannot be read: " in row
    assert {info["name"]: info["status"] for info in atoll.json("ls", "--json")}[box] == "running"
    assert list(atoll.json("gc", "--json")["unreadable"]) == [id]
    assert f"`atoll rm {id}` removes it" in atoll("gc").stderr.decode()
    assert atoll.text("rm", name) == f"{name}\n"
    assert atoll.json("gc", "--json")["unreadable"] == {}


@pytest.mark.local("a server refuses these labels of a client")
def test_labels_of_a_server_are_in_no_table(atoll: Atoll) -> None:
    name = atoll.create("--label", "team=search", "--label", "atoll.dev/record=abc")
    assert "team=search" in atoll.text("ls", "--label", "team")
    assert "atoll.dev" not in atoll.text("ls") + atoll.text("stat", name)
    assert atoll.json("inspect", name)["labels"] == {"team": "search", "atoll.dev/record": "abc"}


def test_labels_and_lifetime_are_shown_filtered_by_and_changed(atoll: Atoll, box: str) -> None:
    name = atoll.create("--label", "team=search", "--label", "stage=ci", "--ttl", "2h")
    header, row = atoll.text("ls", "--label", "team=search", "--label", "stage").splitlines()
    assert header.split() == ["NAME", "STATUS", "RUNTIME", "CREATED", "USED", "EXPIRES", "LABELS", "IMAGE"]
    assert "in 2h 0m" in row or "in 1h 59m" in row
    assert "stage=ci, team=search" in row
    assert atoll.text("ls", "-q", "--label", "team=other") == ""
    changed = atoll.json(
        "update", name, "--memory", "100m", "--label", "team=infra", "--remove-label", "stage", "--json"
    )
    assert (changed["limits"]["memory_bytes"], changed["labels"]) == (100 * 1024**2, {"team": "infra"})
    assert atoll.text("update", name, "--ttl", "none") == f"{name} is updated\n"
    shown = atoll.json("stat", name, "--json")
    assert (shown["labels"], shown["expires_at"], shown["limits"]["memory_bytes"]) == (
        {"team": "infra"},
        None,
        100 * 1024**2,
    )
    assert "labels     team=infra\n" in atoll.text("stat", name)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("update", "BOX"), "nothing to change is given; give a limit"),
        (("update", "BOX", "--label", "team"), "the label 'team' has no value; write KEY=VALUE"),
        (("update", "BOX", "--label", "a b=c"), "'a b' is not a key for a label"),
        (("update", "BOX", "--ttl", "soon"), "'soon' is not a duration"),
        (("create", "--ttl", "10ms"), "ttl_s is 0.01; it must be at least 1"),
        (("update", "BOX", "--open-files", "128"), "put the sandbox to sleep first"),
    ],
)
def test_a_wrong_label_lifetime_or_change_is_refused(atoll: Atoll, box: str, words: tuple[str, ...], told: str) -> None:
    done = atoll(*(box if word == "BOX" else word for word in words), status=None)
    assert done.returncode in (1, 2)
    assert told in done.stderr.decode()
