"""Sandboxes and the service manager's units: a unit is ended by killing all processes in its cgroup.

The cgroup of a unit is made here, in the hierarchies by which systemd knows processes, so no systemd is needed.
`scripts/vm/check` does the same with a real one.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll import Engine
from atoll.contract.model import RuntimeName
from atoll.drivers.machine import CGROUP_ROOT, read_machine
from atoll.testing.waiting import wait_until

ENTER = 'for each in $1; do echo 0 >"$each/cgroup.procs" || exit 9; done; shift; exec "$@"'
pytestmark = pytest.mark.usefixtures("as_root")


class _Unit:
    """A cgroup in each hierarchy by which systemd knows processes."""

    def __init__(self) -> None:
        mode = read_machine().cgroup_mode
        parents = [CGROUP_ROOT] if mode == "v2" else [CGROUP_ROOT / name for name in ("unified", "systemd")]
        name = f"unit-{secrets.token_hex(4)}.service"
        self.cgroups = [path / name for path in parents if (path / "cgroup.procs").exists()]
        for path in self.cgroups:
            path.mkdir()

    def run(self, *command: str) -> str:
        shell = ["sh", "-c", ENTER, "sh", " ".join(map(str, self.cgroups))]
        return subprocess.run([*shell, *command], check=True, capture_output=True, text=True).stdout

    @staticmethod
    def outside(*command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def pids(self) -> set[int]:
        return {int(pid) for path in self.cgroups for pid in (path / "cgroup.procs").read_text().split()}

    def end(self) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self.pids(), "the unit's processes end")


@pytest.fixture
def unit() -> Iterator[_Unit]:
    unit = _Unit()
    if not unit.cgroups:
        pytest.skip("this machine has no hierarchy by which systemd could know processes")
    yield unit
    unit.end()
    for path in unit.cgroups:
        path.rmdir()


async def test_a_sandbox_outlives_the_unit_that_created_it(
    engine: Engine, runtime_name: RuntimeName, state_dir: Path, unit: _Unit
) -> None:
    atoll = [sys.executable, "-m", "atoll", "--state-dir", str(state_dir)]
    for steps in (["create", "--runtime", runtime_name, "from-unit"],), (["sleep", "from-unit"], ["wake", "from-unit"]):
        for step in steps:
            unit.run(*atoll, *step)
        unit.end()
        assert unit.outside(*atoll, "exec", "from-unit", "--", "echo", "alive") == "alive\n"
    await engine.destroy("from-unit")


async def test_nothing_of_a_sandbox_is_in_the_cgroup_of_the_unit_that_created_it(
    engine: Engine, runtime_name: RuntimeName, state_dir: Path, unit: _Unit
) -> None:
    unit.run(
        *(
            sys.executable,
            "-m",
            "atoll",
            "--state-dir",
            str(state_dir),
            "create",
            "--runtime",
            runtime_name,
            "from-unit",
        )
    )
    sandbox = await engine.get("from-unit")
    async with await sandbox.spawn("sleep 600"):
        assert unit.pids() == set()
    await engine.destroy("from-unit")
