"""Labels, users, lifetimes (`ttl_s`), and what can be changed of a sandbox that exists: `update`."""

from __future__ import annotations

import math
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from atoll import (
    Capabilities,
    Engine,
    InvalidRequest,
    Limits,
    Sandbox,
    SandboxDied,
    SandboxInfo,
    SandboxNotFound,
    Unenforceable,
    UserNotFound,
)
from atoll.contract.model import RuntimeName
from atoll.drivers import registry
from atoll.runtime.state.store import StateStore, now
from atoll.testing.inside import client
from atoll.testing.waiting import eventually

MIB = 1024 * 1024


async def names(engine: Engine, **labels: str | None) -> set[str]:
    return {info.name for info in await engine.list(labels=labels)}


async def info_of(engine: Engine, name: str) -> SandboxInfo:
    [info] = [info for info in await engine.list() if info.name == name]
    return info


# ---- labels ----


@pytest.mark.runtimes("crun")
async def test_sandboxes_are_found_by_all_of_the_labels_that_are_asked_for(engine: Engine, neighbour: Sandbox) -> None:
    async with engine.create(labels={"team": "search", "example.com/stage": "ci"}) as sandbox:
        assert sandbox.info.labels == {"team": "search", "example.com/stage": "ci"}
        assert await names(engine, team="search") == {sandbox.name}
        assert await names(engine, team=None) == {sandbox.name}
        assert await names(engine, team="search", **{"example.com/stage": "prod"}) == set()
        assert neighbour.name in await names(engine)


@pytest.mark.runtimes("crun")
async def test_labels_are_changed_one_by_one_and_forks_have_them(engine: Engine, sandbox: Sandbox) -> None:
    await sandbox.update(labels={"a": "1", "b": "2"})
    changed = await engine.update(sandbox.name, labels={"a": None, "c": ""})
    assert changed.labels == sandbox.info.labels == {"b": "2", "c": ""}
    await sandbox.sleep()
    assert await info_of(engine, sandbox.name) == await sandbox.update()  # nothing: it stays as it is
    assert await sandbox.status() == "sleeping"
    [fork] = await sandbox.fork()
    async with fork:
        assert fork.info.labels == {"b": "2", "c": ""}


@pytest.mark.runtimes("crun")
@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ({"Bad key": "x"}, "'Bad key' is not a key for a label"),
        ({"": "x"}, "'' is not a key for a label"),
        ({"k": "-x"}, "'-x' is not a value for the label 'k'"),
        ({"k": "x" * 64}, "up to 63 characters"),
        ({"Example.com/k": "x"}, "is not a key for a label"),
        ({"a" * 254 + "/k": "x"}, "is not a key for a label"),
        ({f"k{n}": "" for n in range(65)}, "65 labels are too many; a sandbox may have 64"),
    ],
)
async def test_labels_that_are_not_allowed_are_refused(
    engine: Engine, shared: Sandbox, labels: dict[str, str], told: str
) -> None:
    with pytest.raises(InvalidRequest, match=told):
        await engine.create(labels=labels)
    with pytest.raises(InvalidRequest, match=told):
        await shared.update(labels=dict(labels))
    assert shared.info.labels == {}


@pytest.mark.runtimes("crun")
async def test_a_user_that_does_not_exist_is_refused_at_create(engine: Engine) -> None:
    with pytest.raises(UserNotFound, match="there is no user 'nosuch' in the sandbox"):
        await engine.create("wrong", user="nosuch")
    assert "wrong" not in await names(engine)
    async with engine.create("wrong", user="1234") as sandbox:  # a uid needs no account
        assert (await sandbox.exec("id -u")).stdout == "1234\n"


# ---- lifetimes ----


async def test_a_sandbox_ends_with_its_lifetime_in_use_or_asleep(engine: Engine) -> None:
    used = await engine.create("used", ttl_s=600, labels={"kind": "short"})
    asleep = await engine.create("asleep", ttl_s=600)
    await asleep.sleep()
    assert used.info.expires_at is not None
    assert 590 < (used.info.expires_at - now()).total_seconds() <= 600
    changed = [await each.update(ttl_s=1) for each in (asleep, used)]
    assert await asleep.status() == "sleeping"
    with pytest.raises(SandboxDied, match="lifetime"):
        await used.exec("sleep 1000")
    assert all(info.expires_at is not None and info.expires_at <= now() for info in changed)
    assert {"used", "asleep"} & await names(engine) == set()
    for each in (used, asleep):
        with pytest.raises(SandboxDied, match="lifetime"):
            await each.exec("true")
        with pytest.raises(SandboxNotFound):
            await engine.get(each.name)
        with pytest.raises(SandboxNotFound):
            await engine.update(each.name, ttl_s=600)
    async with engine.create("used"):  # the name is free at once
        pass
    await eventually(lambda: not (engine.state_dir / "sandboxes" / asleep.id).exists(), "the other is removed")


@pytest.mark.runtimes("crun", "runsc")
async def test_a_lifetime_ends_without_any_process_of_the_host(engine: Engine, runtime_name: RuntimeName) -> None:
    async with client(engine.state_dir, runtime_name, "say((await engine.create('alone', ttl_s=1)).id)") as other:
        id = await other.line()
        await other.succeeds()
    ended = engine.state_dir / "sandboxes" / id / "ended"
    await eventually(lambda: ended.read_text().strip() == "its lifetime (ttl) is over", "its keeper ends it")
    assert "alone" not in await names(engine)  # which has its files removed, too
    await eventually(lambda: not ended.parent.exists(), "it is removed")


@pytest.mark.runtimes("crun")
async def test_a_claimed_warm_sandbox_has_the_labels_and_the_lifetime_that_were_asked_for(engine: Engine) -> None:
    await engine.warm(1)
    try:
        [warm] = [name.partition(".")[2] for name in os.listdir(engine.state_dir / "warm")]
        claimed = await engine.create(labels={"a": "b"}, ttl_s=1)
        assert (claimed.id, claimed.info.labels) == (warm, {"a": "b"})
        with pytest.raises(SandboxDied, match="lifetime"):
            await claimed.exec("sleep 1000")
    finally:
        await engine.wait_refilled()
        await engine.remove_warm_pools()


@pytest.mark.runtimes("crun")
async def test_a_lifetime_can_be_taken_away_and_survives_sleep(engine: Engine, sandbox: Sandbox) -> None:
    limited = await sandbox.update(ttl_s=3600)
    await sandbox.sleep()
    await sandbox.wake()
    assert (await sandbox.update(labels={"a": "b"})).expires_at == limited.expires_at
    [fork] = await sandbox.fork()
    async with fork:
        assert fork.info.expires_at is not None
        assert limited.expires_at is not None
        assert fork.info.expires_at > limited.expires_at  # its own lifetime, from its own beginning
    assert (await sandbox.update(ttl_s=math.inf)).expires_at is None
    assert (await sandbox.exec("true")).ok


@pytest.mark.runtimes("crun")
@pytest.mark.parametrize("ttl_s", [0, 0.5, -1, math.nan, 2e9])
async def test_a_lifetime_that_is_not_allowed_is_refused(engine: Engine, shared: Sandbox, ttl_s: float) -> None:
    with pytest.raises(InvalidRequest, match="ttl_s is"):
        await engine.create(ttl_s=ttl_s)
    with pytest.raises(InvalidRequest, match="ttl_s is"):
        await shared.update(ttl_s=ttl_s)
    assert shared.info.expires_at is None


@pytest.mark.runtimes("crun")
async def test_use_renews_a_lifetime_and_without_use_it_ends(engine: Engine) -> None:
    sandbox = await engine.create(ttl_s=1, ttl_renewed_by_use=True)
    began = now()
    assert (await sandbox.exec("sleep 2.3")).ok  # it does not end while it is used
    entry = os.readlink(engine.state_dir / "expiries" / sandbox.id)
    while (now() - began).total_seconds() < 4:
        assert (await sandbox.exec("true")).ok
        await anyio.sleep(0.3)
    assert os.readlink(engine.state_dir / "expiries" / sandbox.id) == entry, "nothing is written for a use"
    await sandbox.status()
    assert sandbox.info.expires_at is not None
    assert now() < sandbox.info.expires_at <= now() + timedelta(seconds=2)
    await eventually(lambda: not (engine.state_dir / "sandboxes" / sandbox.id).exists(), "it is removed")
    assert (now() - sandbox.info.expires_at).total_seconds() > -1


@pytest.mark.runtimes("crun")
async def test_what_happens_at_the_end_is_changed_without_changing_the_end(engine: Engine, sandbox: Sandbox) -> None:
    limited = await sandbox.update(ttl_s=3600)
    changed = await sandbox.update(on_expiry="sleep")
    assert (changed.on_expiry, changed.expires_at) == ("sleep", limited.expires_at)
    renewed = await sandbox.update(ttl_renewed_by_use=True)
    assert renewed.expires_at is not None
    assert limited.expires_at is not None
    assert renewed.expires_at - limited.expires_at < timedelta(seconds=30)
    [fork] = await sandbox.fork()
    async with fork:
        assert (fork.info.on_expiry, fork.info.ttl_renewed_by_use) == ("sleep", True)
    saved = await sandbox.checkpoint()
    async with engine.create(from_checkpoint=saved.id, ttl_s=60) as made:
        assert (made.info.ttl_s, made.info.on_expiry, made.info.ttl_renewed_by_use) == (60, "destroy", False)
    await engine.delete_checkpoint(saved.id)
    assert (await sandbox.update(on_expiry="destroy", ttl_s=math.inf)).expires_at is None


@pytest.mark.runtimes("crun")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"on_expiry": "sleep"}, "give ttl_s, too"),
        ({"ttl_renewed_by_use": True}, "give ttl_s, too"),
        ({"ttl_s": 60, "on_expiry": "explode"}, "it must be 'destroy', 'sleep' or 'pause'"),
        ({"ttl_s": 60, "on_expiry": "sleep", "ephemeral": True}, "an ephemeral sandbox cannot sleep"),
    ],
)
async def test_an_end_that_cannot_be_is_refused(engine: Engine, options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        await engine.create(**options)


@pytest.mark.usefixtures("can_freeze", "as_root")
@pytest.mark.runtimes("crun")
async def test_a_guest_that_does_not_end_with_its_lifetime_is_frozen_and_removed(engine: Engine) -> None:
    sandbox = await engine.create(ttl_s=3600)
    assert sandbox.info.pid is not None
    driver = registry.available(engine.state_dir)["crun"]
    await sandbox.update(ttl_s=1)
    os.kill(sandbox.info.pid, signal.SIGSTOP)  # as a hostile guest: it obeys no frame
    async with StateStore(engine.state_dir).working(sandbox.id):  # until then it is not removed
        await eventually(lambda: driver.is_frozen(f"{sandbox.id}.1"), "its keeper freezes it")
    assert sandbox.name not in await names(engine)
    directory = engine.state_dir / "sandboxes" / sandbox.id
    await eventually(lambda: not directory.exists(), "it is removed")
    assert not Path(f"/proc/{sandbox.info.pid}").exists()


# ---- limits ----


@pytest.mark.usefixtures("can_limit")
async def test_the_limits_of_a_running_sandbox_are_changed_and_kept(
    engine: Engine, sandbox: Sandbox, capabilities: Capabilities
) -> None:
    wanted = Limits(memory_bytes=300 * MIB, cpus=0.5, pids=64 if capabilities.pids_limit else None)
    for factor in (1, 3):  # once lower, once higher
        wanted = wanted.model_copy(update={"memory_bytes": 300 * MIB * factor, "cpus": 0.5 * factor})
        await sandbox.update(limits=wanted)
        assert (await sandbox.update(limits=Limits(cpus=wanted.cpus))).limits == sandbox.info.limits
        assert sandbox.info.limits == wanted
        assert (await sandbox.stat()).memory_bytes is not None
    if capabilities.pids_limit:
        forks = await sandbox.exec(["sh", "-c", "for i in $(seq 100); do sleep 9 & done"], merge_stderr=True)
        assert "fork" in forks.stdout
    await sandbox.update(limits=Limits(memory_bytes=100 * MIB))
    await sandbox.sleep()
    await sandbox.wake()
    assert (await engine.get(sandbox.name)).info.limits.memory_bytes == 100 * MIB
    if capabilities.process_oom:
        eaten = await sandbox.exec("head -c 300000000 /dev/zero | tail", timeout_s=20)
        assert eaten.out_of_memory


@pytest.mark.usefixtures("can_limit")
@pytest.mark.runtimes("crun", "runsc")
async def test_a_limit_below_what_is_used_is_refused_and_ends_nothing(engine: Engine, sandbox: Sandbox) -> None:
    hold = "x = bytearray(b'x') * (120 << 20); print('held', flush=True); input()"
    async with await sandbox.spawn(["python3", "-c", hold], stdin=True, keep=False) as hog:
        async for line in hog.lines():
            assert line == "held"
            break
        before = sandbox.info.limits
        with pytest.raises(InvalidRequest, match="uses more memory now than 67108864 bytes"):
            await sandbox.update(limits=Limits(memory_bytes=64 * MIB, cpus=1))
        assert (await info_of(engine, sandbox.name)).limits == before
        await hog.stdin.send(b"\n")
        assert (await hog.wait()).exit_code == 0


async def test_what_cannot_be_changed_is_refused_with_the_reason(
    engine: Engine, sandbox: Sandbox, capabilities: Capabilities
) -> None:
    with pytest.raises(Unenforceable, match="open files cannot be changed while the sandbox runs"):
        await sandbox.update(limits=Limits(open_files=128))
    if not capabilities.pids_limit:
        with pytest.raises(Unenforceable, match="a pids limit cannot be enforced here"):
            await sandbox.update(limits=Limits(pids=100))
    if not capabilities.disk_limit:
        with pytest.raises(Unenforceable, match="a disk limit cannot be enforced here"):
            await sandbox.update(limits=Limits(disk_bytes=64 * MIB))
    await sandbox.sleep()
    await sandbox.update(limits=Limits(open_files=128))
    if not capabilities.memory_checkpoint:  # saved processes keep theirs
        assert (await sandbox.exec("ulimit -n")).stdout == "128\n"
    assert (await engine.get(sandbox.name)).info.limits.open_files == 128
