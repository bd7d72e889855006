"""`create`, `get`, `list`, `destroy` and `remove_abandoned`: how sandboxes are created, found and removed."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import anyio
import pytest

import atoll
from atoll import (
    Engine,
    ImageUnavailable,
    InvalidRequest,
    LaunchFailed,
    RuntimeUnavailable,
    Sandbox,
    SandboxDied,
    SandboxError,
    SandboxExists,
    SandboxNotFound,
)
from atoll.contract.model import RuntimeName
from atoll.drivers import registry
from atoll.drivers.machine import find_program
from atoll.testing.inside import client, until_running
from atoll.testing.plugin import LeakCheck
from atoll.testing.waiting import BOUND_S, SLOWNESS, eventually

# ---- creating ----


@pytest.mark.core
async def test_create_returns_a_sandbox_that_runs(engine: Engine, runtime_name: RuntimeName) -> None:
    began = datetime.now(UTC)
    async with await engine.create("first") as sandbox:
        info = sandbox.info
        assert (sandbox.name, info.name, sandbox.id) == ("first", "first", info.id)
        assert (info.runtime, info.image, info.user) == (runtime_name, "host", "user")
        assert began <= info.created_at <= datetime.now(UTC)
        assert info.pid is not None
        os.kill(info.pid, 0)
        assert (await sandbox.exec("echo works")).stdout == "works\n"
        [listed] = [one for one in await engine.list() if one.name == "first"]
        assert (listed.status, listed.reason) == ("running", None)
        assert listed.id == info.id


@pytest.mark.core
async def test_without_a_name_a_sandbox_gets_one_of_its_own(engine: Engine) -> None:
    async with await engine.create() as one, await engine.create() as other:
        assert one.name != other.name
        assert one.id != other.id
        assert {one.name, other.name} <= {info.name for info in await engine.list()}


@pytest.mark.parametrize("name", ["a", "0", "a.b_c-d", "x" * 63])
async def test_names_that_are_allowed(engine: Engine, name: str) -> None:
    async with await engine.create(name) as sandbox:
        assert (await sandbox.exec("hostname")).stdout == f"{name}\n"
        assert (await engine.get(name)).id == sandbox.id


@pytest.mark.parametrize(
    "name",
    ["", "A", "ä", "a b", "-a", ".a", "_a", "a/b", "../a", ".", "..", "a\n", "a\0", "x" * 64, "a$(id)", "a:b"],
    ids=ascii,
)
async def test_names_that_are_not_allowed_are_invalid_requests_that_say_the_rule(
    engine: Engine, name: str, leak_check: LeakCheck
) -> None:
    for call in (engine.create, engine.get, engine.destroy):
        with pytest.raises(InvalidRequest, match="lower-case"):
            await call(name)
    await leak_check.back_to_start()


@pytest.mark.core
async def test_a_name_is_taken_once(engine: Engine, leak_check: LeakCheck) -> None:
    async with await engine.create("taken") as sandbox:
        with pytest.raises(SandboxExists) as caught:
            await engine.create("taken")
        assert isinstance(caught.value, FileExistsError)
        assert caught.value.details["name"] == "taken"
        # The sandbox that has the name is not affected.
        assert (await sandbox.exec("echo fine")).stdout == "fine\n"
        assert (await engine.get("taken")).id == sandbox.id
    await leak_check.back_to_start()


async def test_of_many_creates_of_one_name_at_once_one_succeeds(engine: Engine, leak_check: LeakCheck) -> None:
    got: list[Sandbox] = []
    refused: list[SandboxExists] = []

    async def want() -> None:
        try:
            got.append(await engine.create("wanted"))
        except SandboxExists as error:
            refused.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(6):
            group.start_soon(want)
    assert (len(got), len(refused)) == (1, 5)
    assert (await got[0].exec("echo mine")).stdout == "mine\n"
    await got[0].destroy()
    await leak_check.back_to_start()


@pytest.mark.core
async def test_an_image_that_cannot_be_had_leaves_nothing(
    engine: Engine, tmp_path: Path, leak_check: LeakCheck
) -> None:
    (tmp_path / "file").write_text("no directory")
    for image in (f"dir:{tmp_path}/nothing", f"dir:{tmp_path}/file", f"tar:{tmp_path}/file"):
        with pytest.raises((ImageUnavailable, InvalidRequest)):
            await engine.create("imageless", image=image)
    await leak_check.back_to_start()


async def test_a_runtime_that_is_not_known_is_an_invalid_request(engine: Engine) -> None:
    with pytest.raises((InvalidRequest, RuntimeUnavailable)):
        await engine.create(runtime="qemu")


async def test_a_sandbox_is_made_whole_or_not_at_all_when_it_does_not_start(
    engine: Engine, as_root: None, leak_check: LeakCheck
) -> None:
    """An image on a file system that cannot be mounted in a sandbox. The launch fails after most of it was created."""
    with pytest.raises(LaunchFailed) as caught:
        await engine.create("broken", image="dir:/sys/class")
    assert "/sys/class" in caught.value.message
    await leak_check.back_to_start()
    with pytest.raises(SandboxNotFound):
        await engine.get("broken")


async def test_where_no_user_namespace_can_be_made_nothing_is_left(
    state_dir: Path, runtime_name: RuntimeName, tmp_path: Path, as_root: None, leak_check: LeakCheck
) -> None:
    """The kernel refuses user namespaces after chroot(); some machines refuse them by a setting."""
    body = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
NEWNS, BIND, REC, PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000
assert libc.unshare(NEWNS) == 0
assert libc.mount(b"none", b"/", None, REC | PRIVATE, None) == 0
assert libc.mount(b"/", os.fsencode(sys.argv[3]), None, BIND | REC, None) == 0
os.chroot(sys.argv[3])
try:
    await engine.create("refused")
except atoll.LaunchFailed as error:
    say("failed", " ".join(error.message.split()))
"""
    async with client(state_dir, runtime_name, body, str(tmp_path)) as other:
        said = await other.line()
        assert said.startswith("failed")
        assert "user namespace" in said
        await other.succeeds()
    await leak_check.back_to_start()


FAKES = {
    "says no": "echo the-runtime-says-no >&2; exit 3",
    "dies": "kill -9 $$",
    "says nothing and starts nothing": "exit 0",
}


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory for all user ids: some runtimes are started as a sandbox's root."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o777)
        yield path


def replace_run(runtime_name: RuntimeName, place: Path, command: str) -> dict[str, str]:
    """An environment in which starting a sandbox runs `command`; the runtime runs all other commands itself."""
    program = find_program(runtime_name)
    if program is None:
        pytest.skip(f"there is no program {runtime_name} that could be replaced")
    fake = place / runtime_name
    fake.write_text(f'#!/bin/sh\ncase " $* " in *" run "*|*" --as-pid-1 "*) {command} ;; esac\nexec {program} "$@"\n')
    fake.chmod(0o755)
    return {"PATH": f"{place}:{os.environ['PATH']}"}


@pytest.mark.parametrize("kind", FAKES)
async def test_a_runtime_that_fails_leaves_nothing(
    state_dir: Path, runtime_name: RuntimeName, open_path: Path, kind: str, leak_check: LeakCheck
) -> None:
    env = replace_run(runtime_name, open_path, FAKES[kind])
    body = """
try:
    await engine.create("failing")
    say("created")
except atoll.LaunchFailed as error:
    say("failed", " ".join(error.message.split()))
say(*[info.name for info in await engine.list() if info.name == "failing"], "listed")
"""
    async with client(state_dir, runtime_name, body, env=env) as other:
        said = await other.line()
        assert said.startswith("failed")
        if kind == "says no":
            assert "the-runtime-says-no" in said
        assert await other.line() == "listed"
        await other.succeeds()
    await leak_check.back_to_start()


@pytest.mark.core
async def test_a_create_that_is_cancelled_leaves_nothing_whenever_it_was(
    engine: Engine, runtime_name: RuntimeName, leak_check: LeakCheck
) -> None:
    longest_s = 0.3 if runtime_name == "runsc" else 0.06
    steps = 6 if runtime_name == "runsc" else 12
    for step in range(steps):
        with anyio.move_on_after(longest_s * step / steps):
            await engine.create("cancelled")
            await engine.destroy("cancelled")
        if "cancelled" in {info.name for info in await engine.list()}:
            # It was complete, and the destroy was cancelled: it can be destroyed again.
            await engine.destroy("cancelled")
    await leak_check.back_to_start()


async def test_a_create_that_is_cancelled_while_its_runtime_hangs_leaves_nothing(
    state_dir: Path, runtime_name: RuntimeName, open_path: Path, leak_check: LeakCheck
) -> None:
    env = replace_run(runtime_name, open_path, f"touch {open_path}/started; exec sleep 31537001")
    body = """
with anyio.CancelScope() as scope:
    async with anyio.create_task_group() as group:
        async def cancel():
            while not os.path.exists(sys.argv[3]):
                await anyio.sleep(0.01)
            scope.cancel()
        group.start_soon(cancel)
        await engine.create("hanging")
say("cancelled" if scope.cancelled_caught else "created")
"""
    async with client(state_dir, runtime_name, body, f"{open_path}/started", env=env) as other:
        assert await other.line() == "cancelled"
        await other.succeeds()
    await leak_check.back_to_start()


async def test_an_incomplete_sandbox_of_a_killed_process_is_reconciled_by_the_next(
    state_dir: Path, engine: Engine, runtime_name: RuntimeName, open_path: Path, leak_check: LeakCheck
) -> None:
    env = replace_run(runtime_name, open_path, f"touch {open_path}/started; exec sleep 31537002")
    body = 'await engine.create("half")'
    async with client(state_dir, runtime_name, body, env=env) as other:
        await eventually((open_path / "started").exists, "its runtime has started")
        other.send_signal(signal.SIGKILL)
        await other.ends()
    # The next process cannot end the hanging runtime: it times out by itself, or its keeper is stopped.
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        try:
            if b"31537002" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            continue

    async def collected() -> bool:
        await engine.remove_abandoned()
        return "half" not in {info.name for info in await engine.list()}

    await eventually(collected, "the incomplete sandbox is collected")
    await leak_check.back_to_start()
    async with await engine.create("half") as sandbox:
        assert (await sandbox.exec("echo whole")).stdout == "whole\n"


# ---- finding ----


@pytest.mark.core
async def test_get_finds_by_name_and_says_what_there_is_when_it_does_not(engine: Engine) -> None:
    async with await engine.create("findable") as sandbox:
        found = await engine.get("findable")
        assert found.id == sandbox.id
        assert (await found.exec("hostname")).stdout == "findable\n"
        with pytest.raises(SandboxNotFound) as caught:
            await engine.get("missing")
        assert isinstance(caught.value, LookupError)
        assert "findable" in caught.value.message
        with pytest.raises(SandboxNotFound):
            await engine.destroy("missing")


async def test_list_is_in_order_of_names(engine: Engine) -> None:
    async with await engine.create("beta"), await engine.create("alpha"):
        names = [info.name for info in await engine.list()]
        assert names == sorted(names)
        assert {"alpha", "beta"} <= set(names)


@pytest.mark.core
async def test_a_sandbox_persists_for_the_next_engine_with_its_files_and_processes(
    state_dir: Path, runtime_name: RuntimeName
) -> None:
    settings = atoll.Settings(runtime=runtime_name)
    async with atoll.open(state_dir, settings=settings) as first:
        sandbox = await first.create("persistent", env={"KEPT": "yes"})
        await sandbox.files.write_text("note", "still here")
        process = await sandbox.spawn("echo begun; exec sleep 31537003")
        await until_running(sandbox, "sleep 31537003")
    async with atoll.open(state_dir, settings=settings) as second:
        [info] = [info for info in await second.list() if info.name == "persistent"]
        assert (info.status, info.id, info.pid) == ("running", sandbox.id, sandbox.info.pid)
        found = await second.get("persistent")
        assert await found.files.read_text("note") == "still here"
        assert (await found.exec("echo $KEPT")).stdout == "yes\n"
        [running] = [one for one in await found.processes() if one.id == process.id]
        assert running.live
        assert running.pid == process.pid
        await second.destroy("persistent")


async def test_another_state_directory_knows_nothing_of_it(
    engine: Engine, runtime_name: RuntimeName, make_state_dir: Callable[[], Path], sandbox: Sandbox
) -> None:
    other_dir = make_state_dir()
    async with atoll.open(other_dir, settings=atoll.Settings(runtime=runtime_name)) as other:
        assert await other.list() == []
        with pytest.raises(SandboxNotFound):
            await other.get(sandbox.name)


async def test_a_state_directory_may_have_a_path_longer_than_a_socket_address(
    runtime_name: RuntimeName, make_state_dir: Callable[[], Path], state_dir: Path
) -> None:
    outer = make_state_dir()
    long = outer / ("long" * 30)
    long.mkdir()
    # This is not about images: use those that exist.
    (long / "images").symlink_to(state_dir / "images")
    settings = atoll.Settings(runtime=runtime_name)
    async with atoll.open(long, settings=settings) as engine, await engine.create("far-away") as sandbox:
        assert (await sandbox.exec("echo reached")).stdout == "reached\n"
    shutil.rmtree(long)


async def test_the_environment_says_where_and_with_what(
    state_dir: Path, runtime_name: RuntimeName, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_STATE_DIR", str(state_dir))
    monkeypatch.setenv("ATOLL_RUNTIME", runtime_name)
    async with atoll.open() as engine:
        assert engine.state_dir == state_dir
        assert (await engine.get(sandbox.name)).id == sandbox.id
        async with await engine.create() as other:
            assert other.info.runtime == runtime_name
    monkeypatch.setenv("ATOLL_RUNTIME", "qemu")
    with pytest.raises(InvalidRequest, match="ATOLL_RUNTIME"):
        async with atoll.open():
            pass


async def test_a_state_directory_that_cannot_be_used_is_an_invalid_request(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest):
        async with atoll.open(tmp_path / "file"):
            pass


async def test_a_sandbox_knows_its_status_and_is_not_woken_for_it(engine: Engine) -> None:
    sandbox = await engine.create("asked")
    assert await sandbox.status() == "running"
    await sandbox.sleep()
    for _ in range(2):
        assert await sandbox.status() == "sleeping"
    assert (sandbox.info.status, sandbox.info.pid) == ("sleeping", None)
    await sandbox.exec("true")
    assert await sandbox.status() == "running"
    listed = (await engine.list("asked"))[0]  # its use is noted shortly after it
    assert sandbox.info == listed.model_copy(update={"last_used_at": sandbox.info.last_used_at})
    pid = sandbox.info.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: not Path(f"/proc/{pid}").exists(), "its first process has ended")
    with anyio.fail_after(BOUND_S):
        while await sandbox.status() != "error":
            await anyio.sleep(0.01)
    assert sandbox.info.reason
    await sandbox.destroy()
    with pytest.raises(SandboxDied, match="destroyed"):
        await sandbox.status()


# ---- removing ----


@pytest.mark.core
async def test_destroy_leaves_nothing_and_frees_the_name(engine: Engine, leak_check: LeakCheck) -> None:
    for _ in range(2):
        sandbox = await engine.create("short-lived")
        pid = sandbox.info.pid
        assert pid is not None
        await sandbox.spawn("(setsid sleep 31537004 &) ; exec sleep 31537004")
        await sandbox.files.write_bytes("file", bytes(1000))
        await engine.destroy("short-lived")
        # Nothing is removed later: all is gone when it returns.
        assert not Path(f"/proc/{pid}").exists()
        assert "short-lived" not in {info.name for info in await engine.list()}
        with pytest.raises(SandboxNotFound):
            await engine.get("short-lived")
        with pytest.raises(SandboxNotFound):
            await engine.destroy("short-lived")
    await leak_check.back_to_start()


@pytest.mark.parametrize("damage", ["empty", "a directory"])
async def test_destroy_leaves_nothing_also_if_the_record_cannot_be_read(
    engine: Engine, leak_check: LeakCheck, damage: str
) -> None:
    sandbox = await engine.create("damaged")
    await engine.shutdown("damaged")
    await engine.wake("damaged")  # its second run
    await sandbox.spawn("(setsid sleep 31537014 &) ; exec sleep 31537014")
    pid = (await engine.list("damaged"))[0].pid
    record = engine.state_dir / "sandboxes" / sandbox.id / "manifest.json"
    record.unlink()
    if damage == "empty":
        record.touch()
    else:
        record.mkdir()
    (shown,) = await engine.list("damaged")
    assert (shown.status, shown.pid) == ("error", pid)
    await engine.destroy("damaged")
    assert not Path(f"/proc/{pid}").exists()
    assert await engine.list("damaged") == []
    await leak_check.back_to_start()


@pytest.mark.core
async def test_leaving_the_context_destroys(engine: Engine, leak_check: LeakCheck) -> None:
    async def fail_inside() -> None:
        async with await engine.create("in-context") as sandbox:
            await sandbox.exec("true")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail_inside()
    with pytest.raises(SandboxNotFound):
        await engine.get("in-context")
    await leak_check.back_to_start()


async def test_leaving_the_context_by_cancellation_destroys(engine: Engine, leak_check: LeakCheck) -> None:
    async with anyio.create_task_group() as group:

        async def hold() -> None:
            async with await engine.create("cancelled-context") as sandbox:
                await sandbox.exec("sleep 31537005")

        group.start_soon(hold)
        await eventually(
            lambda: any(name == "cancelled-context" for name in os.listdir(engine.state_dir / "names")), "it is there"
        )
        sandbox = await engine.get("cancelled-context")
        await until_running(sandbox, "sleep 31537005")
        group.cancel_scope.cancel()
    await leak_check.back_to_start()


@pytest.mark.core
async def test_running_commands_raise_when_their_sandbox_is_destroyed(engine: Engine) -> None:
    sandbox = await engine.create()
    told: list[SandboxDied] = []

    async def one() -> None:
        with pytest.raises(SandboxDied) as caught:
            await sandbox.exec("exec sleep 31537006")
        told.append(caught.value)

    async with anyio.create_task_group() as group:
        group.start_soon(one)
        await until_running(sandbox, "sleep 31537006")
        await sandbox.destroy()
    assert told
    with pytest.raises((SandboxDied, SandboxNotFound)):
        await sandbox.exec("true")


@pytest.mark.parametrize(("how", "why"), [("destroy", "was destroyed"), ("shutdown", "was shut down")])
async def test_what_another_engine_did_to_a_sandbox_is_the_reason_that_calls_raise(
    engine: Engine, how: str, why: str
) -> None:
    sandbox = await engine.create("shared-with-another")
    told: list[str] = []

    async def one() -> None:
        with pytest.raises(SandboxDied) as caught:
            await sandbox.exec("exec sleep 31537016")
        told.append(caught.value.message)

    async with atoll.open(engine.state_dir) as other, anyio.create_task_group() as group:
        group.start_soon(one)
        await until_running(sandbox, "sleep 31537016")
        await getattr(other, how)(sandbox.name)
    assert told == [f"sandbox {sandbox.name!r} {why}"]
    await sandbox.destroy()


async def test_destroying_twice_or_twice_at_once_is_the_same_as_once(engine: Engine, leak_check: LeakCheck) -> None:
    sandbox = await engine.create()
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(sandbox.destroy)
    await sandbox.destroy()
    await leak_check.back_to_start()


@pytest.mark.core
async def test_a_sandbox_that_died_is_an_error_with_a_reason_until_it_is_destroyed(
    engine: Engine, leak_check: LeakCheck
) -> None:
    sandbox = await engine.create("killed")
    assert sandbox.info.pid is not None
    os.kill(sandbox.info.pid, signal.SIGKILL)

    async def noticed() -> bool:
        [info] = [info for info in await engine.list() if info.name == "killed"]
        return info.status == "error" and bool(info.reason) and info.pid is None

    await eventually(noticed, "the sandbox is listed with the status error")
    with pytest.raises(SandboxDied):
        await (await engine.get("killed")).exec("true")
    with pytest.raises(SandboxExists):
        await engine.create("killed")
    await engine.destroy("killed")
    await leak_check.back_to_start()


@pytest.mark.core
async def test_a_sandbox_whose_keeper_died_can_be_destroyed(
    engine: Engine, state_dir: Path, leak_check: LeakCheck
) -> None:
    sandbox = await engine.create("keeperless")
    await sandbox.spawn("exec sleep 31537007")
    keeper = int((state_dir / "sandboxes" / sandbox.id / "keeper.lock").read_text())
    os.kill(keeper, signal.SIGKILL)
    with pytest.raises(SandboxDied), anyio.fail_after(30 * SLOWNESS):
        await sandbox.exec("sleep 31537008")
    await engine.destroy("keeperless")
    await leak_check.back_to_start()


@pytest.mark.core
async def test_a_keeper_that_is_killed_while_it_starts_a_sandbox_leaves_nothing(
    engine: Engine, state_dir: Path, leak_check: LeakCheck
) -> None:
    def locks() -> set[Path]:
        return set((state_dir / "sandboxes").glob("*/keeper.lock"))

    others = locks()

    async def kill_soon(delay_s: float) -> None:
        while True:
            await anyio.sleep(0.001)
            for lock in locks() - others:
                with suppress(OSError, ValueError):
                    keeper = int(lock.read_text())
                    await anyio.sleep(delay_s)
                    os.kill(keeper, signal.SIGKILL)
                    return

    began = anyio.current_time()
    await (await engine.create("whole")).destroy()
    start_s = anyio.current_time() - began
    moments = 10
    for number in range(moments):
        async with anyio.create_task_group() as group:
            group.start_soon(kill_soon, number / moments * start_s)
            with suppress(SandboxError):
                await engine.create("interrupted")
                await (await engine.get("interrupted")).exec("true")
        with suppress(SandboxNotFound):
            await engine.destroy("interrupted")

    await leak_check.back_to_start()


async def test_twenty_sandboxes_come_and_go_at_once(
    engine: Engine, runtime_name: RuntimeName, leak_check: LeakCheck
) -> None:
    async def one(number: int) -> None:
        async with await engine.create(f"many-{number}") as sandbox:
            assert (await sandbox.exec("hostname")).stdout == f"many-{number}\n"

    async with anyio.create_task_group() as group:
        for number in range(20 if runtime_name != "runsc" else 4):
            group.start_soon(one, number)
    await leak_check.back_to_start()


# ---- the machine ----


@pytest.mark.core
async def test_the_fastest_runtime_comes_first_and_is_the_default(
    state_dir: Path, runtime_name: RuntimeName, engine: Engine
) -> None:
    names = list(engine.runtimes())
    built_in = [name for name in registry.BUILT_IN if name in names]
    assert names[: len(built_in)] == built_in, "drivers of other packages come after the built-in ones"
    if runtime_name != names[0]:
        return
    async with atoll.open(state_dir, settings=atoll.Settings()) as plain, await plain.create() as sandbox:
        assert sandbox.info.runtime == names[0]


@pytest.mark.core
async def test_a_sandbox_may_name_its_runtime(engine: Engine, runtime_name: RuntimeName, state_dir: Path) -> None:
    settings = atoll.Settings()
    async with atoll.open(state_dir, settings=settings) as plain, await plain.create(runtime=runtime_name) as sandbox:
        assert sandbox.info.runtime == runtime_name


@pytest.mark.core
@pytest.mark.local("the server's machine is not shown to clients")
async def test_doctor_names_a_fix_for_everything_that_is_missing(engine: Engine, runtime_name: RuntimeName) -> None:
    findings = {finding.topic: finding for finding in engine.doctor()}
    if runtime_name in registry.BUILT_IN:
        assert findings[runtime_name].ok
    assert all(finding.detail for finding in findings.values())
    assert all(finding.ok or finding.fix for finding in findings.values())
