"""What `atoll doctor` says about machines that are not like this one."""

from __future__ import annotations

import dataclasses
import errno
import os
import platform
from pathlib import Path

import pytest

from atoll.contract.driver import Diagnostic
from atoll.contract.errors import LaunchFailed
from atoll.contract.model import Limits
from atoll.drivers import cgroups, doctor, oci, registry
from atoll.drivers.machine import Machine, read_machine


def _finding(topic: str, state_dir: Path) -> Diagnostic:
    [found] = [each for each in doctor.examine(state_dir, read_machine(), {}) if each.topic == topic]
    return found


@pytest.mark.parametrize(("most", "ample"), [(2_465_620, False), (2**63 - 1, True)])
def test_a_machine_whose_open_files_one_sandbox_can_take_is_named_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, ample: bool
) -> None:
    (tmp_path / "file-max").write_text(f"{most}\n")
    monkeypatch.setattr(doctor, "_FILE_MAX", tmp_path / "file-max")
    found = _finding("open files", tmp_path)
    assert found.ok is ample
    assert ample or (f"{most} for all of this machine" in found.detail and "fs.file-max" in str(found.fix))


@pytest.mark.parametrize(("status", "ok"), [(0, True), (1, False)])
def test_overlay_may_be_a_module_that_is_loaded_when_first_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, ok: bool
) -> None:
    (tmp_path / "filesystems").write_text("nodev\tproc\n\text4\n")
    modprobe = tmp_path / "modprobe"
    modprobe.write_text(f'#!/bin/sh\n[ "$*" = "-n overlay" ] && exit {status}\nexit 9\n')
    modprobe.chmod(0o755)
    monkeypatch.setattr(doctor, "_FILE_SYSTEMS", tmp_path / "filesystems")
    monkeypatch.setattr(doctor, "find_program", lambda name: str(modprobe) if name == "modprobe" else None)
    found = _finding("overlay", tmp_path)
    assert (found.ok, found.fix) == (ok, None if ok else "modprobe overlay")


@pytest.mark.parametrize("old", [True, False])
def test_the_version_of_a_runtime_is_shown_and_of_an_old_one_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    runsc = tmp_path / "runsc"
    error = "endpoint still has waiters upon save" if old else ""
    runsc.write_text(f"#!/bin/sh\necho runsc version 0.0~2.0\necho spec 1\nexit\n{error}\n")
    runsc.chmod(0o755)
    for module in (doctor, oci):
        monkeypatch.setattr(module, "find_program", lambda name: str(runsc) if name == "runsc" else None)
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: {"VERSION_CODENAME": "trout"})
    [found] = [each for each in registry.doctor(tmp_path) if each.topic == "runsc"]
    assert found.ok
    assert found.detail.startswith(f"{runsc}, version 0.0~2.0")
    assert ("lacks: saving processes that wait" in found.detail) is old
    assert ("apt-get install runsc/trout-backports" in str(found.fix)) is old


# ---- cgroup v2, as files of a directory ----


@pytest.fixture
def v2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Machine]:
    root = tmp_path / "cgroup"
    root.mkdir()
    monkeypatch.setattr(cgroups, "CGROUP_ROOT", root)
    machine = dataclasses.replace(
        read_machine(), root=True, cgroup_mode="v2", controllers=frozenset({"memory", "cpu", "pids"})
    )
    return root, machine


def test_a_parent_cgroup_that_was_left_half_made_is_completed(v2: tuple[Path, Machine]) -> None:
    root, machine = v2
    (root / "cgroup.subtree_control").write_text("cpuset cpu memory\n")
    (root / "atoll").mkdir()
    (root / "atoll" / "cgroup.subtree_control").write_text("\n")
    cgroups.Cgroups(machine).make_parents()
    assert (root / "cgroup.subtree_control").read_text() == "+pids"
    assert (root / "atoll" / "cgroup.subtree_control").read_text() == "+memory +cpu +pids"


def test_where_processes_are_in_the_way_of_controllers_the_error_and_doctor_say_how_to_move_them(
    v2: tuple[Path, Machine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root, machine = v2
    (root / "cgroup.subtree_control").write_text("\n")
    (root / "atoll").mkdir()

    def write_text(path: Path, text: str) -> int:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    monkeypatch.setattr(Path, "write_text", write_text)
    made = cgroups.Cgroups(machine)
    with pytest.raises(LaunchFailed, match=r"memory, cpu, pids cannot be enabled .* processes are in it") as caught:
        made.make("sandbox")
    assert f"{root}/init/cgroup.procs" in str(caught.value.hint)
    with pytest.raises(LaunchFailed, match="processes are in it"):
        made.settings("sandbox", Limits(pids=5))
    [found] = [each for each in doctor.examine(tmp_path, machine, {}) if each.topic == "cgroups"]
    assert not found.ok
    assert found.fix == caught.value.hint
