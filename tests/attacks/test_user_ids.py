"""User ids on the host: what a sandbox's processes and files belong to, and what another local user can do."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

import atoll
from atoll.contract.model import RuntimeName
from atoll.runtime.interface import Engine
from atoll.runtime.sandbox import Sandbox
from atoll.runtime.state.store import ID_BASE, ID_SLOTS, ID_STEP
from atoll.settings import Settings
from tests.attacks.programs import PROBE, host_processes, running, shell, status_of, top_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="as an unprivileged user there is one id for all sandboxes")
STRANGER = 54321
"""A user id that means nothing on any machine."""


def _range_of(engine: Engine, sandbox: Sandbox) -> range:
    manifest = json.loads((engine.state_dir / "sandboxes" / sandbox.id / "manifest.json").read_text())
    first = ID_BASE + manifest["id_slot"] * ID_STEP
    return range(first, first + ID_STEP)


async def test_two_sandboxes_have_ranges_that_do_not_meet(
    prey: Sandbox, bystander: Sandbox, engine: Engine, runtime_name: RuntimeName
) -> None:
    one, other = _range_of(engine, prey), _range_of(engine, bystander)
    if runtime_name != "runsc":
        for sandbox, ids in ((prey, one), (bystander, other)):
            inside, outside, count = map(int, Path(f"/proc/{sandbox.info.pid}/uid_map").read_text().split())
            assert (inside, outside) == (0, ids.start)
            assert outside + count < ids.stop, "the last one is the keeper's"
    for ids in (one, other):
        assert ID_BASE <= ids.start < ID_BASE + ID_SLOTS * ID_STEP
        assert (ids.start - ID_BASE) % ID_STEP == 0
    assert one.start >= other.stop or other.start >= one.stop


@pytest.mark.parametrize("user", ["user", "root"])
async def test_processes_belong_to_the_range_and_never_to_root(
    prey: Sandbox, engine: Engine, runtime_name: RuntimeName, user: str
) -> None:
    ids = _range_of(engine, prey)
    # gVisor's kernel gives itself to `nobody` of the host, whatever the sandbox; only its file server is in the range.
    allowed = {*ids, 65534} if runtime_name == "runsc" else set(ids)
    async with running(prey, PROBE, "hoard", "files", "1", user=user):
        seen = {pid: status_of(pid) for pid in host_processes(prey)}
        for status in seen.values():
            for kind in ("Uid", "Gid"):
                assert set(map(int, status[kind].split())) <= allowed, (status["Name"], status[kind])
            assert set(map(int, status["Groups"].split())) <= allowed, status["Name"]
    if runtime_name != "runsc":
        assert ids.start + (1000 if user == "user" else 0) in {int(s["Uid"].split()[0]) for s in seen.values()}


async def test_files_on_the_host_belong_to_the_range(sandbox: Sandbox, engine: Engine) -> None:
    ids = _range_of(engine, sandbox)
    await shell(
        sandbox, "echo x > /root/mine; echo x > /usr/made; chown 1000:1000 /usr/made; chmod 6755 /usr/made", user="root"
    )
    await sandbox.files.write_text("yours", "x")
    upper = top_of(engine, sandbox) / "upper"
    found = [path for path in upper.rglob("*") if path.name in {"mine", "made", "yours"}]
    assert len(found) == 3
    for path in found:
        status = path.lstat()
        assert status.st_uid in ids, path
        assert status.st_gid in ids, path


async def test_root_inside_owns_nothing_of_the_hosts(prey: Sandbox) -> None:
    """Files whose owner has no number inside belong to nobody, and nobody inside may change that."""
    said = await shell(prey, "touch /usr/local/mine; chown 70000:70000 /usr/local/mine && echo changed", user="root")
    assert said.stdout == ""


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A state directory in a place that everyone on the machine can come to."""
    with tempfile.TemporaryDirectory(prefix="atoll-open-") as place:
        Path(place).chmod(0o755)
        yield Path(place)


async def _as_stranger(program: Path, *arguments: str) -> str:
    """What the probe says when a user of the machine starts it who has nothing to do with Atoll."""
    done = await anyio.to_thread.run_sync(
        partial(
            subprocess.run,
            [program, *arguments],
            user=STRANGER,
            group=STRANGER,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    )
    return str(done.stdout)


@pytest.fixture
def strangers_probe(open_place: Path, probe_program: bytes) -> Path:
    path = open_place / "probe"
    path.write_bytes(probe_program)
    path.chmod(0o755)
    return path


async def test_another_user_of_the_machine_reaches_no_sandbox(
    open_place: Path, strangers_probe: Path, engine: Engine, prey: Sandbox, runtime_name: RuntimeName
) -> None:
    """Neither the keeper's socket, nor the stream, nor files that a setuid bit inside might have made useful.

    The state directory stands where everyone can come to, and was made by someone who did not think of its mode.
    """
    state = open_place / "state"
    state.mkdir(mode=0o755)
    (state / "images").symlink_to(engine.state_dir / "images")
    async with (
        atoll.open(state, settings=Settings(runtime=runtime_name)) as opened,
        await opened.create() as sandbox,
    ):
        await shell(sandbox, "cp /bin/true /usr/suid && chmod 6755 /usr/suid", user="root")
        own = state / "sandboxes" / sandbox.id
        paths = [own, *(own / name for name in ("sock", "in", "out", "manifest.json", "pid"))]
        paths += [top_of(opened, sandbox) / "upper/usr/suid", state / "checkpoints"]
        paths += [
            state / name for name in ("names", "ids", "uncommitted", "sandboxes", "layers", f"run/{runtime_name}")
        ]
        said = await _as_stranger(strangers_probe, "stranger", *map(str, paths))
    assert said.splitlines() == ["end"]


async def test_another_user_of_the_machine_can_neither_signal_nor_trace_a_sandbox(
    strangers_probe: Path, prey: Sandbox, engine: Engine
) -> None:
    keeper = int((engine.state_dir / "sandboxes" / prey.id / "keeper.lock").read_text())
    for pid in [keeper, *host_processes(prey)]:
        lines = (await _as_stranger(strangers_probe, "reach", str(pid))).splitlines()
        assert lines[-1] == "end -1"
        assert not [line for line in lines if line.endswith(" 0")]
