"""`Limits`: what is set is enforced, or the create is refused; and what `stat` says about use."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from pydantic import ValidationError

from atoll import Capabilities, Engine, Limits, Sandbox, SandboxDied, Unenforceable
from atoll.contract.model import RuntimeName
from atoll.testing.inside import running, wait_tree_exit
from atoll.testing.plugin import LeakCheck
from atoll.testing.waiting import eventually

MIB = 1024 * 1024
CGROUPS = Path("/sys/fs/cgroup")

EAT = "head -c 400000000 /dev/zero | tail"
"""`tail` keeps all of a line in memory."""


def cgroup_value(sandbox: Sandbox, v1: str, v2: str) -> str:
    """A setting of the sandbox's cgroup."""
    if (CGROUPS / "cgroup.controllers").exists():
        return (CGROUPS / "atoll" / f"{sandbox.id}.1" / v2).read_text().strip()
    controller, file = v1.split("/")
    return (CGROUPS / controller / "atoll" / f"{sandbox.id}.1" / file).read_text().strip()


# ---- what is in force ----


async def test_the_defaults_are_in_force_and_told(shared: Sandbox, capabilities: Capabilities) -> None:
    limits = shared.info.limits
    assert limits.memory_bytes == (2048 * MIB if capabilities.memory_limit else None)
    assert limits.pids == (1024 if capabilities.pids_limit else None)
    assert limits.cpus is None
    assert limits.open_files is None
    if capabilities.memory_limit:
        assert cgroup_value(shared, "memory/memory.limit_in_bytes", "memory.max") == str(2048 * MIB)


@pytest.mark.usefixtures("can_limit")
async def test_the_limits_that_were_set_are_in_force_and_told(
    engine: Engine, capabilities: Capabilities, as_root: None
) -> None:
    assert capabilities.memory_limit, "root can set limits on every machine that the tests are for"
    pids = 300 if capabilities.pids_limit else None
    limits = Limits(memory_bytes=300 * MIB, cpus=0.5, pids=pids, open_files=128)
    async with await engine.create(limits=limits) as sandbox:
        assert sandbox.info.limits == limits
        assert cgroup_value(sandbox, "memory/memory.limit_in_bytes", "memory.max") == str(300 * MIB)
        quota = cgroup_value(sandbox, "cpu/cpu.cfs_quota_us", "cpu.max").split()[0]
        period = cgroup_value(sandbox, "cpu/cpu.cfs_period_us", "cpu.max").split()[-1]
        assert int(quota) / int(period) == 0.5
        # Where there is no limit for processes, there is still a bound far above what a sandbox needs.
        bound = int(cgroup_value(sandbox, "pids/pids.max", "pids.max"))
        assert bound in range(300, 311) if pids is not None else bound in range(16384, 16400)
        assert (await sandbox.exec("ulimit -n; ulimit -Hn")).stdout == "128\n128\n"
        assert sandbox.info.pid is not None
        assert str(sandbox.info.pid) in cgroup_value(sandbox, "memory/cgroup.procs", "cgroup.procs").split()
        # The next process reads the limits from the manifest.
        [info] = [info for info in await engine.list() if info.name == sandbox.name]
        assert info.limits == limits


async def test_swap_is_no_way_around_the_memory_limit(sandbox: Sandbox, as_root: None) -> None:
    try:
        value = cgroup_value(sandbox, "memory/memory.memsw.limit_in_bytes", "memory.swap.max")
    except FileNotFoundError:
        assert "SwapTotal:             0 kB" in Path("/proc/meminfo").read_text()
        return
    assert value in {"0", str(2048 * MIB)}


@pytest.mark.parametrize(
    "wrong",
    [{"memory_bytes": 1024}, {"cpus": 0.0}, {"cpus": -1.0}, {"pids": 0}, {"open_files": 1}, {"disk": 5}],
    ids=repr,
)
def test_a_limit_that_cannot_be_is_refused_when_it_is_written_down(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Limits.model_validate(wrong)


# ---- memory ----


@pytest.mark.usefixtures("can_limit")
async def test_running_out_of_memory_ends_the_command_and_not_the_sandbox(
    engine: Engine, capabilities: Capabilities, as_root: None
) -> None:
    async with await engine.create(limits=Limits(memory_bytes=64 * MIB)) as sandbox:
        if not capabilities.process_oom:
            # The documented difference: memory belongs to gVisor's kernel as a whole. Either the sandbox ends, or the
            # command's allocation fails. A dead sandbox never looks like an exit code.
            try:
                result = await sandbox.exec(EAT)
            except SandboxDied as error:
                died: SandboxDied | None = error
            else:
                died = None
                assert result.exit_code != 0
            if died is not None:
                assert "out of memory" in died.message

                async def reported() -> bool:
                    with pytest.raises(SandboxDied) as caught:  # "connection lost" until its keeper has ended
                        await sandbox.exec("echo alive")
                    return "out of memory" in caught.value.message

                await eventually(reported, "later calls say why it has ended")
                (info,) = [info for info in await engine.list() if info.name == sandbox.name]
                assert (info.status, info.reason) == ("error", "out of memory: it reached its memory limit")
                await sandbox.wake()
            assert (await sandbox.exec("echo alive")).stdout == "alive\n"
            return
        result = await sandbox.exec(EAT)
        assert result.exit_code == 137
        assert result.out_of_memory
        assert (await sandbox.exec("echo alive")).stdout == "alive\n"
        usage = await sandbox.stat()
        assert usage.oom_kills is not None
        assert usage.oom_kills >= 1
        process = await sandbox.spawn(["tail", "/dev/zero"])
        exited = await process.wait()
        assert (exited.exit_code, exited.signal, exited.out_of_memory) == (137, 9, True)
        # A kill for another reason is not reported as out of memory.
        result = await sandbox.exec("kill -9 $$")
        assert (result.exit_code, result.out_of_memory) == (137, False)


@pytest.mark.usefixtures("can_limit")
async def test_running_out_of_memory_in_one_sandbox_is_not_felt_in_another(
    engine: Engine, shared: Sandbox, capabilities: Capabilities, as_root: None
) -> None:
    limits = Limits(memory_bytes=64 * MIB)
    async with await engine.create(limits=limits) as small, await shared.spawn("exec sleep 31536901", keep=False):
        async with anyio.create_task_group() as group:

            async def eat() -> None:
                try:
                    assert (await small.exec(EAT)).exit_code != 0
                except SandboxDied:
                    assert not capabilities.process_oom

            group.start_soon(eat)
            for _ in range(10):
                assert (await shared.exec("echo fine")).stdout == "fine\n"
        assert await running(shared, "sleep 31536901")
    usage = await shared.stat()
    assert usage.oom_kills in {0, None}


# ---- processes, files, processors ----


async def test_no_more_processes_than_the_limit_can_be_started_and_the_sandbox_lives_on(
    engine: Engine, capabilities: Capabilities, as_root: None
) -> None:
    if not capabilities.pids_limit:
        with pytest.raises(Unenforceable):
            await engine.create(limits=Limits(pids=50))
        return
    async with await engine.create(limits=Limits(pids=50)) as sandbox:
        bomb = await sandbox.spawn("i=0; while [ $i -lt 200 ]; do sleep 31536902 & i=$((i+1)); done; wait")

        async def full() -> bool:
            return ((await sandbox.stat()).pids or 0) >= 50

        await eventually(full, "the limit of processes is reached")
        for _ in range(10):
            assert ((await sandbox.stat()).pids or 0) <= 60, "there are more processes than the limit"
        # Listing and killing need no new process.
        (found,) = await sandbox.processes()
        assert found.id == bomb.id
        await sandbox.kill(found.id)
        await bomb.wait()
        await wait_tree_exit(sandbox, "sleep 31536902")
        assert (await sandbox.exec("echo alive")).stdout == "alive\n"


@pytest.mark.core
async def test_no_more_files_than_the_limit_can_be_open(engine: Engine) -> None:
    async with await engine.create(limits=Limits(open_files=16)) as sandbox:
        assert (await sandbox.exec("ulimit -n")).stdout == "16\n"
        assert (await sandbox.exec("ulimit -n", user="root")).stdout == "16\n"
        result = await sandbox.exec(["bash", "-c", 'for i in {10..30}; do eval "exec $i</dev/null" || exit 9; done'])
        assert result.exit_code != 0
        assert "many open files" in result.stderr or "Bad file descriptor" in result.stderr
        # The guest itself still works: the limit applies to commands only.
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(sandbox.exec, "true")


@pytest.mark.usefixtures("can_limit")
async def test_a_limit_on_processors_slows_a_loop_down(engine: Engine, as_root: None) -> None:
    loop = "i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done"
    async with await engine.create(limits=Limits(cpus=0.1)) as slow:
        before = (await slow.stat()).cpu_s
        result = None
        with anyio.move_on_after(1.5):
            result = await slow.exec(f"while :; do {loop}; done", timeout_s=None)
        assert result is None
        after = (await slow.stat()).cpu_s
        assert before is not None
        assert after is not None
        assert after - before < 0.8, "a tenth of a CPU for 1.5 s is 0.15 s of CPU time"


# ---- limits that this machine cannot enforce ----


@pytest.mark.core
@pytest.mark.rootless
@pytest.mark.parametrize(
    "limits", [Limits(memory_bytes=64 * MIB), Limits(cpus=0.5), Limits(pids=100)], ids=["memory", "cpus", "pids"]
)
async def test_a_limit_that_cannot_be_kept_is_refused_and_nothing_is_left(
    engine: Engine, capabilities: Capabilities, limits: Limits, leak_check: LeakCheck
) -> None:
    assert not capabilities.memory_limit, "this user may use cgroups, which this test does not cover"
    with pytest.raises(Unenforceable) as caught:
        await engine.create("refused", limits=limits)
    assert caught.value.message
    await leak_check.back_to_start()
    assert [info.name for info in await engine.list() if info.name == "refused"] == []


@pytest.mark.core
@pytest.mark.rootless
async def test_more_open_files_than_the_user_may_have_are_refused(engine: Engine) -> None:
    with pytest.raises(Unenforceable):
        await engine.create(limits=Limits(open_files=1_048_576))


# ---- what it uses ----


@pytest.mark.core
async def test_stat_says_what_the_sandbox_uses(sandbox: Sandbox, capabilities: Capabilities) -> None:
    usage = await sandbox.stat()
    assert usage.disk_bytes < 5 * MIB
    if not capabilities.memory_limit:
        assert (usage.memory_bytes, usage.cpu_s, usage.pids, usage.oom_kills) == (None, None, None, None)
    else:
        assert usage.memory_bytes is not None
        assert usage.memory_peak_bytes is not None
        assert 0 < usage.memory_bytes <= usage.memory_peak_bytes < 1024 * MIB
        assert usage.oom_kills == 0
        assert usage.pids is not None
        assert usage.pids >= 1
    await sandbox.exec("head -c 10000000 /dev/urandom > file; sync file")
    assert 10_000_000 <= (await sandbox.stat()).disk_bytes < 20_000_000
    await sandbox.files.remove("file")
    assert (await sandbox.stat()).disk_bytes < 5 * MIB


@pytest.mark.usefixtures("can_limit")
async def test_processor_time_and_processes_are_counted(
    sandbox: Sandbox, runtime_name: RuntimeName, as_root: None
) -> None:
    before = await sandbox.stat()
    assert before.cpu_s is not None
    assert before.pids is not None
    await sandbox.exec("i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done")
    async with await sandbox.spawn(
        "for i in 1 2 3 4 5 6 7 8 9 10; do sleep 31536903 & done; echo ready; wait", keep=False
    ):

        async def more() -> bool:
            now = await sandbox.stat()
            return (now.pids or 0) >= (before.pids or 0) + (10 if runtime_name != "runsc" else 1)

        await eventually(more, "its processes are counted")
    after = await sandbox.stat()
    assert after.cpu_s is not None
    assert after.cpu_s > before.cpu_s + 0.02


@pytest.mark.usefixtures("can_limit")
async def test_memory_that_is_used_is_counted(sandbox: Sandbox, as_root: None) -> None:
    # `tail` holds all of it in memory and cannot write it, as its output is not read.
    async with await sandbox.spawn("head -c 100000000 /dev/zero | tail -c 80000000 | sleep 31536904", keep=False):

        async def counted() -> bool:
            usage = await sandbox.stat()
            return (usage.memory_bytes or 0) >= 80_000_000 <= (usage.memory_peak_bytes or 0)

        await eventually(counted, "80 MB are counted")
