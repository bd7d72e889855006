"""What `atoll doctor` says about machines that are not like this one."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from atoll.contract.driver import Diagnostic
from atoll.drivers import doctor, machine, oci, registry
from atoll.drivers.machine import KEEPER, read_machine


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


# ---- user namespaces ----


@pytest.fixture
def restricted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The settings of a kernel on which AppArmor restricts user namespaces, as on Ubuntu 24.04. Returns the keeper."""
    (tmp_path / "sys" / "user").mkdir(parents=True)
    (tmp_path / "sys" / "user" / "max_user_namespaces").write_text("95000\n")
    (tmp_path / "sys" / "kernel").mkdir()
    (tmp_path / "sys" / "kernel" / "apparmor_restrict_unprivileged_userns").write_text("1\n")
    monkeypatch.setattr(machine, "_SYSCTLS", tmp_path / "sys")
    keeper = tmp_path / "keeper"
    monkeypatch.setattr(machine, "KEEPER", keeper)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    return keeper


def _program(path: Path, status: int) -> None:
    path.write_text(f'#!/bin/sh\n[ "$1" = nsexec ] && exit {status}\nexit 9\n')
    path.chmod(0o755)


def test_where_apparmor_denies_user_namespaces_doctor_says_which_profile_or_setting_permits_them(
    tmp_path: Path, restricted: Path
) -> None:
    _program(restricted, status=1)
    found = _finding("user namespaces", tmp_path)
    assert not found.ok
    assert "AppArmor" in found.detail
    fix = str(found.fix)
    assert f"profile atoll-keeper {KEEPER} flags=(unconfined)" in fix
    assert "userns," in fix
    assert "apparmor_parser -r /etc/apparmor.d/atoll-keeper" in fix
    assert "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0" in fix


def test_user_namespaces_are_allowed_where_a_profile_of_apparmor_permits_them_to_the_keeper(
    tmp_path: Path, restricted: Path
) -> None:
    _program(restricted, status=0)
    assert _finding("user namespaces", tmp_path).ok


def test_without_the_compiled_keeper_a_restriction_of_apparmor_is_taken_at_its_word(
    tmp_path: Path, restricted: Path
) -> None:
    assert not restricted.exists()
    assert not _finding("user namespaces", tmp_path).ok


# ---- systemd ----


@pytest.mark.parametrize(
    ("cgroup", "named"),
    [("/system.slice/ci.service", "ci.service"), ("/user.slice/user-1000.slice/session-4.scope", "the service")],
)
def test_where_keepers_cannot_leave_their_unit_doctor_names_it_and_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, named: str
) -> None:
    (tmp_path / "cgroup").write_text(f"0::{cgroup}\n")
    monkeypatch.setattr(machine, "_OWN_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(doctor, "_SYSTEMD", tmp_path)
    user = read_machine()._replace(root=False, cgroup_mode="v2", controllers=frozenset())
    found = {each.topic: each for each in doctor.examine(tmp_path, user, {})}
    assert not found["systemd"].ok
    assert named in found["systemd"].detail
    assert "KillMode=process" in str(found["systemd"].fix)
    assert "loginctl enable-linger" in str(found["systemd"].fix)
    assert "loginctl enable-linger" in str(found["cgroups"].fix)


def test_a_machine_without_systemd_hears_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SYSTEMD", tmp_path / "none")
    assert "systemd" not in {each.topic for each in doctor.examine(tmp_path, read_machine(), {})}
