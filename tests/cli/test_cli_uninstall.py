"""`uninstall`, and `doctor --fix` on a machine that lacks nothing. Installed from a wheel: tests/scripts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.drivers.doctor import missing_packages
from atoll.surfaces.cli import completion
from atoll.testing.plugin import STRICT
from tests.cli.driving import Atoll

pytestmark = pytest.mark.local("what is removed is this machine's")


@pytest.fixture
def elsewhere(
    atoll: Atoll, tmp_path: Path, give_host_image: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Another state directory, which the test may remove."""
    path = give_host_image(tmp_path / "elsewhere")
    monkeypatch.setitem(atoll.env, "ATOLL_STATE_DIR", str(path))
    return path


def test_uninstall_removes_what_nothing_else_can_read_and_the_storage_too(atoll: Atoll, elsewhere: Path) -> None:
    if os.geteuid() == 0:
        atoll("storage", "init", "--size", "512m")
    atoll("volumes", "create", "cache")
    atoll("create", "sleeper", "--mount", "volume:cache:/data")
    atoll("sleep", "sleeper")
    atoll("create", "damaged")
    (directory,) = [path for path in (elsewhere / "sandboxes").iterdir() if b'"damaged"' in _manifest(path)]
    (directory / "manifest.json").write_text("{}")
    atoll("checkpoint", "sleeper")
    theirs = ("--namespace", "team")
    atoll("volumes", "create", "cache", *theirs)
    atoll("create", "box", "--mount", "volume:cache:/data", *theirs)
    atoll("checkpoint", "box", *theirs)
    removed = atoll.json("uninstall", "--yes", "--json")
    assert removed["removed"] == [str(elsewhere)]
    assert removed["program"].startswith("rm -r ")
    assert not elsewhere.exists()
    assert str(elsewhere) not in Path("/proc/self/mountinfo").read_text()
    assert "there is no state directory" in atoll.text("uninstall")
    assert not elsewhere.exists()


def _manifest(sandbox: Path) -> bytes:
    return (sandbox / "manifest.json").read_bytes()


def test_uninstall_asks_first(atoll: Atoll, elsewhere: Path) -> None:
    atoll("volumes", "create", "data")
    atoll("create", "box", "--mount", "volume:data:/data")
    terminal = atoll.terminal("uninstall")
    question = f"Destroy 1 sandbox, 0 checkpoints, 1 volume, and remove {elsewhere} with all images? [y/N]: "
    terminal.read_until(question.encode())
    terminal.type(b"\n")
    assert terminal.wait() == 1
    assert b"Give --yes" in atoll("uninstall", status=2).stderr
    assert atoll.names() == ["box"]
    terminal = atoll.terminal("uninstall")
    terminal.read_until(question.encode())
    terminal.type(b"y\n")
    assert terminal.wait() == 0
    assert not elsewhere.exists()


def test_completion_can_be_removed_and_leaves_the_users_own_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".bashrc").write_text("alias ll='ls -l'\n")
    written = [completion.install(shell) for shell in ("bash", "fish")]
    assert str(written[0]) in (tmp_path / ".bashrc").read_text()
    assert sorted(completion.remove()) == sorted(written)
    assert (tmp_path / ".bashrc").read_text().strip() == "alias ll='ls -l'"
    assert completion.remove() == []


def test_doctor_fixes_nothing_where_nothing_is_missing(atoll: Atoll) -> None:
    if missing := missing_packages():
        (pytest.fail if STRICT else pytest.skip)(f"not installed: {missing}")
    done = atoll("doctor", "--fix")
    assert b"no distribution package is missing" in done.stderr
    assert b"runtimes that work" in done.stdout
    assert b"--yes is for --fix" in atoll("doctor", "--yes", status=2).stderr
