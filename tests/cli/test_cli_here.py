"""`agent --here`: a directory is copied in, and what the model did there is shown, and brought back or not."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll import ProjectChange, ProjectChanges
from atoll.runtime.project.changes import TreeFile
from atoll.runtime.project.selection import TreeEntry
from atoll.surfaces.cli import project_review
from atoll.testing.waiting import wait_until
from tests.cli.driving import Atoll

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256))
FIX = f'''
[[step]]
expect.instructions = ["copy of the user's project in /home/user/app", "shown what you changed there as a diff"]
text = "I look."
[[step.call]]
tool = "shell"
input.command = "pwd; ls -A; ! python3 -B -m unittest -q"
[[step.call]]
tool = "grep"
input.pattern = "a - b"
[[step]]
text = "I mend it."
expect.result = [
  {{ contains = ["/home/user/app\\n", "test_add.py"], fields = {{ exit_code = 0 }} }},
  {{ contains = ["add.py:2"] }},
]
[[step.call]]
tool = "edit_file"
input = {{ path = "add.py", old_text = "a - b", new_text = "a + b" }}
[[step]]
[[step.call]]
tool = "shell"
input.command = """
set -e
python3 -B -m unittest -q  # a .pyc of this second would pass for one of the changed file
mkdir -p plots
echo {base64.b64encode(PNG).decode()} | base64 -d > plots/a.png
chmod +x run
mv old new
rm gone
ln -s /etc/passwd out
"""
[[step]]
text = "The test passes."
expect.result = [{{ fields = {{ exit_code = 0 }} }}]
'''


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A git project with a test that fails."""
    root = tmp_path / "app"
    root.mkdir()
    for name, text in {
        "add.py": "def add(a, b):\n    return a - b\n",
        "test_add.py": "import unittest\nfrom add import add\n\n\nclass TestAdd(unittest.TestCase):\n"
        "    def test_add(self):\n        self.assertEqual(add(2, 2), 4)\n",
        "run": "#!/bin/sh\n",
        "old": "moved as it is\n",
        "gone": "1\n",
        "secret.env": "KEY=1\n",
        ".gitignore": "*.env\n__pycache__/\n",
    }.items():
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "fix.toml").write_text(FIX)
    return f"script:{tmp_path}/fix.toml"


def passes(app: Path) -> bool:
    words = [sys.executable, "-B", "-m", "unittest", "-q"]
    return subprocess.run(words, cwd=app, capture_output=True, check=False).returncode == 0


def changed(app: Path) -> bool:
    return (app / "new").exists()


def test_a_failing_test_is_mended_shown_and_applied_on_yes(atoll: Atoll, app: Path, script: str) -> None:
    assert not passes(app)
    screen = atoll.terminal("agent", f"--here={app}", "--model", script, "Make the test pass", cols=200)
    seen = screen.read_until(b"[y]es, [N]o: ").decode()
    assert not changed(app)
    screen.type(b"what\n")
    screen.read_until(b"[y]es, [N]o: ")
    screen.type(b"y\n")
    screen.read_until(b"applied to")
    assert screen.wait() == 0
    assert "\x1b[31m-    return a - b\x1b[0m\r\n\x1b[32m+    return a + b\x1b[0m\r\n" in seen
    for line in (
        *("modified  add.py (+1 −1)", "deleted   gone", "renamed   old → new", "mode      run (is now executable)"),
        *("added     plots/a.png (binary, 272 B)", "out: is a symlink to /etc/passwd, which leads out of the project"),
    ):
        assert line in seen
    assert passes(app)
    assert (app / "plots/a.png").read_bytes() == PNG
    assert os.access(app / "run", os.X_OK)
    assert changed(app)
    assert not (app / "gone").exists()
    assert not os.path.lexists(app / "out")
    assert (app / "secret.env").read_text() == "KEY=1\n"


def test_no_applies_nothing_and_saves_a_patch_that_git_applies(atoll: Atoll, app: Path, script: str) -> None:
    screen = atoll.terminal("agent", f"--here={app}", "--model", script, "Make the test pass", cols=200)
    screen.read_until(b"[y]es, [N]o: ")
    screen.type(b"\n")
    seen = screen.read_until(b"applies them").decode()
    assert screen.wait() == 0
    assert not changed(app)
    patch = Path(seen.rpartition("git apply ")[2].partition(" ")[0])
    assert patch.stat().st_mode & 0o077 == 0
    subprocess.run(["git", "apply", str(patch)], cwd=app, check=True)
    patch.unlink()
    assert passes(app)
    assert (app / "plots/a.png").read_bytes() == PNG


def test_what_the_user_changed_meanwhile_is_a_conflict_by_name(atoll: Atoll, app: Path, script: str) -> None:
    screen = atoll.terminal("agent", f"--here={app}", "--model", script, "Make the test pass", cols=200)
    screen.read_until(b"[y]es, [N]o: ")
    (app / "add.py").write_text("mine\n")
    screen.type(b"y\n")
    seen = screen.read_until(b"hint: ").decode()
    assert screen.wait() == 1
    assert "nothing was applied: changed here since the project was copied: add.py" in " ".join(seen.split())
    patch = Path(seen.rpartition("git apply ")[2].partition(" ")[0])
    assert b"GIT binary patch" in patch.read_bytes()
    patch.unlink()
    assert (app / "add.py").read_text() == "mine\n"
    assert not changed(app)


def test_a_program_gets_the_changes_as_data_and_may_apply_them_unasked(atoll: Atoll, app: Path, script: str) -> None:
    done = atoll("agent", "--json", "--here", str(app), "--apply", "--model", script, "Make the test pass")
    *_, answer, changes = [json.loads(line) for line in done.stdout.splitlines()]
    assert (answer["type"], changes["type"]) == ("answer", "changes")
    assert (changes["applied"], changes["conflicts"], changes["patch_file"]) == (True, [], None)
    assert {each["path"]: (each["change"], each["binary"], each["old_path"]) for each in changes["files"]} == {
        "add.py": ("modified", False, None),
        "gone": ("deleted", False, None),
        "new": ("renamed", False, "old"),
        "plots/a.png": ("added", True, None),
        "run": ("mode", False, None),
    }
    assert [each["path"] for each in changes["refused"]] == ["out"]
    assert "-    return a - b\n+    return a + b\n" in changes["diff"]
    assert passes(app)


def test_changes_may_only_be_shown_or_be_written_to_a_file(
    atoll: Atoll, app: Path, script: str, tmp_path: Path
) -> None:
    done = atoll("agent", "--no-apply", "--here", "--model", script, "Make the test pass", cwd=app)
    assert b"+    return a + b\n" in done.stderr
    assert b"\x1b" not in done.stderr
    assert b"git apply" not in done.stderr
    assert not changed(app)
    patch = tmp_path / "work.patch"
    atoll("agent", "--here", str(app), "--patch", str(patch), "--model", script, "Make the test pass")
    assert not changed(app)
    subprocess.run(["git", "apply", str(patch)], cwd=app, check=True)
    assert passes(app)


def test_an_interrupted_conversation_does_not_lose_the_work(atoll: Atoll, app: Path, tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text(
        "[[step]]\n[[step.call]]\ntool = 'shell'\ninput.command = 'echo work > new; sleep 4321'\n"
    )
    screen = atoll.terminal("agent", f"--here={app}", "--model", f"script:{tmp_path}/long.toml", "Work", cols=200)
    wait_until(lambda: any(atoll.runs(name, "sleep 4321") for name in atoll.names()), "it works")
    screen.type(b"\x03")
    seen = screen.read_until(b"applies them").decode()
    assert screen.wait() == 130
    patch = Path(seen.rpartition("git apply ")[2].partition(" ")[0])
    assert "+work\n" in patch.read_text()
    patch.unlink()


def test_a_model_that_destroys_its_sandbox_works_on_a_new_copy(atoll: Atoll, app: Path, tmp_path: Path) -> None:
    (tmp_path / "destroy.toml").write_text(
        "[[step]]\n[[step.call]]\ntool = 'shell'\ninput.command = 'rm -r *'\n"
        "[[step]]\n[[step.call]]\ntool = 'sandbox_destroy'\ninput.sandbox = 'default'\n"
        "[[step]]\n[[step.call]]\ntool = 'shell'\ninput.command = 'echo again > new'\n[[step]]\ntext = 'Done.'\n"
    )
    atoll("agent", "--here", str(app), "--apply", "--model", f"script:{tmp_path}/destroy.toml", "Go")
    assert (app / "new").read_text() == "again\n"
    assert (app / "add.py").exists()


def test_no_line_of_a_file_passes_for_one_of_ours(tmp_path: Path) -> None:
    hidden = "safe\rdiff --git a/x b/x\u2028+hidden\x1b[2K\x0bnext\n"
    (tmp_path / "new").write_text(hidden)
    entry = TreeEntry("file", size=(tmp_path / "new").stat().st_size)
    change = ProjectChange("new", "added", None, TreeFile(entry, tmp_path / "new"))
    many = [replace(change, path=f"new{number}") for number in range(500)]
    shown = "".join(project_review._shown(ProjectChanges((change,)), tmp_path))
    assert "\n+safe\\rdiff --git a/x b/x\\u2028+hidden\\x1b[2K\\x0bnext\n" in shown
    assert "added     new (+1 −0)\n" in shown
    shown = "".join(project_review._shown(ProjectChanges(tuple(many)), tmp_path))
    assert "its first 2000 lines are shown" in shown
    assert "and 400 more\n" in shown


def test_a_session_begins_with_the_directory_as_it_is_now(atoll: Atoll, app: Path, tmp_path: Path) -> None:
    def run(command: str) -> Any:
        text = f"[[step]]\n[[step.call]]\ntool = 'shell'\ninput.command = '{command}'\n[[step]]\ntext = 'Done.'\n"
        (tmp_path / "one.toml").write_text(text)
        words = ("agent", "--json", "--session", "kept", "--no-apply", "--here", str(app))
        done = atoll(*words, "--model", f"script:{tmp_path}/one.toml", "Go")
        return json.loads(done.stdout.splitlines()[-1])

    try:
        first = run("echo 1 > work; echo 2 > add.py; echo 3 > cache.env")
        assert [each["path"] for each in first["files"]] == ["add.py", "work"]
        (app / "mine").write_text("new")
        second = run("cat cache.env mine > both")
        assert [each["path"] for each in second["files"]] == ["both"]
        assert "+3\n+new" in second["diff"]
    finally:
        atoll("rm", "kept.default")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--apply",), "--apply needs --here"),
        (("--patch", "x"), "--patch needs --here"),
        (("--here", "/nowhere"), "/nowhere is not a directory"),
        (("--here", ".", "--apply", "--no-apply"), "--apply and --no-apply exclude each other"),
        (("--here", ".", "--patch", "/nowhere/x"), "its directory does not exist"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(
    atoll: Atoll, script: str, words: tuple[str, ...], said: str
) -> None:
    done = atoll("agent", *words, "--model", script, "prompt", status=2)
    assert said in done.stderr.decode()
