"""What `atoll doctor` says about machines that are not like this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.contract.driver import Diagnostic
from atoll.drivers import doctor
from atoll.drivers.machine import read_machine


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
