"""cgroup v2 where it is not this machine's: as files of a directory. `scripts/vm/check` has the real one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from atoll.contract.errors import LaunchFailed
from atoll.contract.model import Limits
from atoll.drivers import cgroups, doctor, machine
from atoll.drivers.machine import Machine, read_machine

USER = "user.slice/user-1000.slice/user@1000.service"
ALL = frozenset({"memory", "cpu", "pids"})


@pytest.fixture
def v2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Machine]:
    root = tmp_path / "cgroup"
    root.mkdir()
    monkeypatch.setattr(cgroups, "CGROUP_ROOT", root)
    machine = read_machine()
    return root, machine._replace(root=True, cgroup_mode="v2", controllers=ALL, cgroup_parent=root, needs_scope=False)


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel does: no controller is enabled in a cgroup that has processes."""
    write = Path.write_text

    def write_text(path: Path, text: str) -> int:
        procs = path.with_name("cgroup.procs")
        if path.name == "cgroup.subtree_control" and procs.exists() and procs.read_text():
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        above = path.parents[1] / "cgroup.procs"
        if path.name == "cgroup.procs" and above.exists():  # a process is in one cgroup
            write(above, "".join(f"{pid}\n" for pid in above.read_text().split() if pid != text))
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", write_text)


def test_a_parent_cgroup_that_was_left_half_made_is_completed(v2: tuple[Path, Machine]) -> None:
    root, machine = v2
    (root / "cgroup.subtree_control").write_text("cpuset cpu memory\n")
    (root / "atoll").mkdir()
    (root / "atoll" / "cgroup.subtree_control").write_text("\n")
    cgroups.Cgroups(machine).make_parents()
    assert (root / "cgroup.subtree_control").read_text() == "+pids"
    assert (root / "atoll" / "cgroup.subtree_control").read_text() == "+memory +cpu +pids"


# ---- containers ----


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("init", ["0::/../../init.scope\n", "0::/init.scope\n"])
def test_where_processes_are_in_the_way_of_controllers_the_error_and_doctor_say_how_to_move_them(
    v2: tuple[Path, Machine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, init: str
) -> None:
    root, machine = v2
    (tmp_path / "init").write_text(init)
    monkeypatch.setattr(cgroups, "_INIT_CGROUP", tmp_path / "init")
    (root / "cgroup.type").write_text("domain\n")
    (root / "cgroup.subtree_control").write_text("\n")
    (root / "cgroup.procs").write_text("17\n18\n")
    (root / "atoll").mkdir()
    made = cgroups.Cgroups(machine)
    with pytest.raises(LaunchFailed, match=r"memory, cpu, pids cannot be enabled .* processes are in it") as caught:
        made.make("sandbox")
    assert f"{root}/init/cgroup.procs" in str(caught.value.hint)
    with pytest.raises(LaunchFailed, match="processes are in it"):
        made.settings("sandbox", Limits(pids=5))
    [found] = [each for each in doctor.examine(tmp_path, machine, {}) if each.topic == "cgroups"]
    assert not found.ok
    assert found.fix == caught.value.hint
    assert (root / "cgroup.procs").read_text() == "17\n18\n"


@pytest.mark.usefixtures("busy")
def test_in_a_container_its_processes_are_moved_out_of_the_way_of_controllers(
    v2: tuple[Path, Machine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root, machine = v2
    (tmp_path / "init").write_text("0::/\n")
    monkeypatch.setattr(cgroups, "_INIT_CGROUP", tmp_path / "init")
    (root / "cgroup.type").write_text("domain\n")
    (root / "cgroup.subtree_control").write_text("\n")
    (root / "cgroup.procs").write_text("1\n18\n")
    (root / "atoll").mkdir()
    (root / "atoll" / "cgroup.subtree_control").write_text("\n")
    cgroups.Cgroups(machine).make_parents()
    assert (root / "cgroup.procs").read_text() == ""
    assert (root / "init" / "cgroup.procs").read_text() == "18"
    assert (root / "cgroup.subtree_control").read_text() == "+memory +cpu +pids"


# ---- an unprivileged user to whom systemd delegates ----


@pytest.fixture
def delegated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    """Reads the machine as user 1000, whose process is in `own`."""
    root = tmp_path / "cgroup"
    for module in (machine, cgroups):
        monkeypatch.setattr(module, "CGROUP_ROOT", root)
    monkeypatch.setattr(machine, "filesystem_type", lambda path: 0x63677270)
    monkeypatch.setattr(machine, "_OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(machine, "_LINGER", tmp_path / "linger")
    monkeypatch.setattr(machine, "_RUN_USER", tmp_path / "run")
    monkeypatch.setattr(machine, "find_program", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: type("Entry", (), {"pw_name": "someone"}))
    (tmp_path / "linger").mkdir()

    def read(own: str, *, offered: str | None = "cpu memory pids", lingers: bool = False) -> Machine:
        (tmp_path / "own").write_text(f"0::/{own}\n")
        if offered is not None:
            (root / USER).mkdir(parents=True)
            (root / USER / "cgroup.controllers").write_text(f"{offered}\n")
        if lingers:
            (tmp_path / "linger" / "someone").touch()
            (tmp_path / "run" / "1000" / "systemd").mkdir(parents=True)
            (tmp_path / "run" / "1000" / "systemd" / "private").touch()
        return read_machine()

    return read


def test_a_user_in_a_unit_of_its_own_systemd_can_set_limits_and_needs_no_scope(
    delegated: Callable[..., Machine], tmp_path: Path
) -> None:
    seen = delegated(f"{USER}/app.slice/ci.service")
    assert (seen.cgroup_mode, seen.controllers, seen.needs_scope) == ("v2", ALL, False)
    made = cgroups.Cgroups(seen)
    assert made.paths("id") == [tmp_path / "cgroup" / USER / "atoll" / "id"]
    assert made.runtime_path("id") == f"/{USER}/atoll/id"
    assert made.launcher(["keeper"], {"A": "b"}) == (["keeper"], {"A": "b"})
    assert made.keepers() == [tmp_path / "cgroup" / USER / "atoll" / "keepers"]


def test_a_user_whose_systemd_stays_gets_keepers_started_in_a_scope_from_a_session(
    delegated: Callable[..., Machine],
) -> None:
    seen = delegated("user.slice/user-1000.slice/session-4.scope", lingers=True)
    assert (seen.controllers, seen.needs_scope) == (ALL, True)
    command, env = cgroups.Cgroups(seen).launcher(["keeper", "start"], {"XDG_RUNTIME_DIR": "/x"})
    assert command[1:3] == ["--user", "--scope"]
    assert command[-4:] == ["--setenv=XDG_RUNTIME_DIR=/x", "--", "keeper", "start"]
    assert env == {"XDG_RUNTIME_DIR": "/run/user/1000"}


def test_sandboxes_of_a_user_whose_systemd_ends_with_the_session_stay_in_the_session_without_limits(
    delegated: Callable[..., Machine], tmp_path: Path
) -> None:
    seen = delegated("user.slice/user-1000.slice/session-4.scope")
    assert (seen.controllers, seen.needs_scope) == (frozenset(), False)
    made = cgroups.Cgroups(seen)
    assert made.make("id") == made.keepers() == []
    assert made.runtime_path("id") is None
    # One that a unit of the same user has made is still found, read and removed.
    assert made.paths("id") == [tmp_path / "cgroup" / USER / "atoll" / "id"]


def test_what_systemd_does_not_delegate_is_not_offered_and_doctor_says_how_to_get_it(
    delegated: Callable[..., Machine], tmp_path: Path
) -> None:
    seen = delegated(f"{USER}/app.slice/ci.service", offered="memory pids")
    assert seen.controllers == {"memory", "pids"}
    (tmp_path / "cgroup" / USER / "cgroup.subtree_control").write_text("memory pids\n")
    (tmp_path / "cgroup" / USER / "atoll").mkdir()
    (tmp_path / "cgroup" / USER / "atoll" / "cgroup.subtree_control").write_text("memory pids\n")
    [found] = [each for each in doctor.examine(tmp_path, seen, {}) if each.topic == "cgroups"]
    assert not found.ok
    assert "Delegate=cpu memory pids" in str(found.fix)


def test_a_user_without_a_systemd_of_its_own_has_no_cgroups(delegated: Callable[..., Machine]) -> None:
    seen = delegated("system.slice/cron.service", offered=None)
    assert (seen.cgroup_mode, seen.controllers, seen.cgroup_parent) == ("v2", frozenset(), None)


# ---- keepers ----


def test_the_cgroup_of_keepers_goes_when_none_is_left_and_stays_while_one_is(v2: tuple[Path, Machine]) -> None:
    root, machine = v2
    made = cgroups.Cgroups(machine)
    [path] = made.keepers()
    made.remove_keepers()
    path.mkdir()
    (path / "keeper").mkdir()
    made.remove_keepers()
    assert path.exists()
    (path / "keeper").rmdir()
    made.remove_keepers()
    assert not path.exists()
    assert (root / "atoll").exists()


@pytest.mark.parametrize("mode", ["v1", "v2"])
def test_the_cgroups_above_go_with_the_last_sandbox_of_the_machine(
    v2: tuple[Path, Machine], mode: Literal["v1", "v2"]
) -> None:
    root, machine = v2
    hierarchies = [root / name for name in ("memory", "freezer", "systemd", "blkio")] if mode == "v1" else [root]
    for hierarchy in hierarchies:
        (hierarchy / "atoll" / "atoll-0").mkdir(parents=True)
    if mode == "v1":
        (root / "systemd" / "cgroup.procs").touch()
    made = cgroups.Cgroups(machine._replace(cgroup_mode=mode))
    made.remove_parents()
    assert all((hierarchy / "atoll" / "atoll-0").is_dir() for hierarchy in hierarchies), "another's sandbox"
    for hierarchy in hierarchies:
        (hierarchy / "atoll" / "atoll-0").rmdir()
    made.remove_parents()
    assert not [hierarchy for hierarchy in hierarchies if (hierarchy / "atoll").exists()]
