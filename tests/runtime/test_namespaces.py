"""Namespaces: the same names in two of one state directory, and nothing of one is found from the other.

The walk calls every public method of an engine and of its volumes with what belongs to the other namespace, and expects
exactly the answer for something that never was. A new method must be added to it.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest

import atoll
from atoll.code.approvals import ApprovalRequest, StoredApprovals
from atoll.code.audit import CodeAudit
from atoll.code.results import CallRecord
from atoll.contract.errors import AtollError, InvalidRequest, SandboxDied, SandboxNotFound
from atoll.contract.model import Limits, Mount, TemplateVersion
from atoll.runtime.engine import LocalEngine
from atoll.runtime.interface import Engine
from atoll.runtime.previews.router import label_of
from atoll.runtime.state.templates import TemplateStore
from atoll.runtime.state.volumes import VolumeStore
from atoll.testing.waiting import eventually

SMALL = Limits(memory_bytes=128 * 1024 * 1024)


class Wanted(NamedTuple):
    """What a call of the walk names: something of the other namespace, or something that never was."""

    name: str
    id: str
    checkpoint: str
    label: str
    volume: str
    session: str
    template: str


class Two(NamedTuple):
    """Two engines over one state directory. Each has a sandbox `box` with a checkpoint `saved`, and a volume `data`."""

    mine: Engine
    theirs: Engine
    only_theirs: Wanted


@pytest.fixture(scope="module")
async def two(make_state_dir: Callable[[], Path]) -> AsyncIterator[Two]:
    state_dir = make_state_dir()
    async with atoll.open(state_dir) as mine, atoll.open(state_dir, namespace="team") as theirs:
        assert isinstance(theirs, LocalEngine)
        try:
            for engine in (mine, theirs):
                await engine.volumes.create("data")
                box = await engine.create("box", labels={"of": engine.namespace}, mounts=[mount("data")])
                await box.files.write_text("/data/whose", engine.namespace)
                await box.checkpoint("saved")
            async with theirs.pool("session") as pool:
                other = await pool.get("other")
            made = await other.checkpoint("theirs")
            await theirs.volumes.create("theirs")
            version = TemplateVersion(
                build_id="built",
                checkpoint=made.id,
                image="host",
                runtime=other.info.runtime,
                created_at=datetime.now(UTC),
            )
            await theirs.templates.put("theirs", ["default"], version)
            yield Two(mine, theirs, Wanted(other.name, other.id, made.id, "theirs", "theirs", "session", "theirs"))
        finally:
            for template in await theirs.templates.list():
                await theirs.templates.remove(template.name)
            for engine in (mine, theirs):
                await engine.remove_warm_pools()
                for info in await engine.list():
                    await engine.destroy(info.name)
                for checkpoint in await engine.checkpoints():
                    await engine.delete_checkpoint(checkpoint.id)
                for volume in await engine.volumes.list():
                    await engine.volumes.remove(volume.name)


def mount(volume: str) -> Mount:
    return Mount(source=f"volume:{volume}", target="/data")


# ---- the walk ----


async def _followed(engine: Engine, wanted: Wanted) -> object:
    return [each async for each in engine.follow_audit(wanted.name)]


async def _pooled(engine: Engine, wanted: Wanted) -> object:
    async with engine.pool(wanted.session) as pool:
        return await pool.find(wanted.name)


async def _pool_list(engine: Engine, wanted: Wanted) -> object:
    async with engine.pool(wanted.session, temporary=True) as pool:
        return await pool.list()


async def _path(engine: Engine, wanted: Wanted) -> object:
    assert isinstance(engine.volumes, VolumeStore)
    return engine.volumes.path(wanted.volume)


Call = Callable[[Engine, Wanted], Awaitable[object]]


async def _inherited(engine: Engine, checkpoint: str, sandbox: str | None = None) -> object:
    assert isinstance(engine, LocalEngine)
    return engine.inherited_spec(checkpoint, sandbox)


async def _fork_labelled(engine: Engine, wanted: Wanted) -> object:
    assert isinstance(engine, LocalEngine)
    return await engine.fork_labelled(wanted.name, ["new"], {})


async def _checkpoint_files(engine: Engine, wanted: Wanted) -> object:
    assert isinstance(engine, LocalEngine)
    return await engine.checkpoint_files(wanted.name)


async def _scratch(engine: Engine, wanted: Wanted) -> object:
    """At its end sandboxes are removed: those of the other namespace are not."""
    assert isinstance(engine, LocalEngine)
    async with engine.scratch(wanted.session):
        return await engine.list(wanted.name)


def _templates(engine: Engine) -> TemplateStore:
    assert isinstance(engine.templates, TemplateStore)
    return engine.templates


WALK: dict[str, list[Call]] = {
    "audit": [lambda e, w: e.audit(w.name)],
    "checkpoint": [lambda e, w: e.checkpoint(w.name)],
    "checkpoint_files": [_checkpoint_files],
    "checkpoints": [lambda e, w: e.checkpoints(w.name)],
    "create": [
        lambda e, w: e.create("new", image=f"template:{w.template}"),
        lambda e, w: e.create("new", from_checkpoint=w.checkpoint),
        lambda e, w: e.create("new", from_checkpoint=w.label),
        lambda e, w: e.create("new", mounts=[mount(w.volume)]),
        lambda e, w: e.create("new", mounts=[mount(f"team:{w.volume}")]),
    ],
    "delete_checkpoint": [
        lambda e, w: e.delete_checkpoint(w.checkpoint),
        lambda e, w: e.delete_checkpoint(f"team:{w.checkpoint}"),
        lambda e, w: e.delete_checkpoint(w.label),
        lambda e, w: e.delete_checkpoint(w.label, sandbox=w.name),
    ],
    "destroy": [lambda e, w: e.destroy(w.name), lambda e, w: e.destroy(w.id), lambda e, w: e.destroy(f"team:{w.name}")],
    "export": [
        lambda e, w: e.export(w.name, Path("/nowhere")),
        lambda e, w: e.export("box", Path("/nowhere"), checkpoint=w.checkpoint),
        lambda e, w: e.export(w.name, Path("/nowhere"), checkpoint=w.checkpoint),
    ],
    "follow_audit": [_followed],
    "fork": [
        lambda e, w: e.fork(w.name, names=["new"]),
        lambda e, w: e.fork(w.id, names=["new"]),
        lambda e, w: e.fork("box", checkpoint=w.checkpoint, names=["new"]),
        lambda e, w: e.fork(w.name, checkpoint=w.checkpoint, names=["new"]),
        lambda e, w: e.fork("box", checkpoint=w.label, names=["new"]),
    ],
    "fork_labelled": [_fork_labelled],
    "get": [lambda e, w: e.get(w.name), lambda e, w: e.get(w.id), lambda e, w: e.get(f"team:{w.name}")],
    "inherited_spec": [
        lambda e, w: _inherited(e, w.checkpoint),
        lambda e, w: _inherited(e, w.label, "box"),
    ],
    "list": [lambda e, w: e.list(w.name), lambda e, w: e.list(labels={"team": w.name})],
    "pause": [lambda e, w: e.pause(w.name)],
    "pool": [_pooled, _pool_list],
    "restore": [
        lambda e, w: e.restore(w.name, w.checkpoint),
        lambda e, w: e.restore("box", w.checkpoint),
        lambda e, w: e.restore("box", w.checkpoint, foreign=True),
        lambda e, w: e.restore("box", w.label),
    ],
    "resume": [lambda e, w: e.resume(w.name)],
    "scratch": [_scratch],
    "set_network": [lambda e, w: e.set_network(w.name, None)],
    "set_request_headers": [lambda e, w: e.set_request_headers(w.name, {})],
    "shutdown": [lambda e, w: e.shutdown(w.name)],
    "sleep": [lambda e, w: e.sleep(w.name), lambda e, w: e.sleep(w.id)],
    "sleep_unused": [lambda e, w: e.sleep_unused(w.name, timedelta(0))],
    "update": [lambda e, w: e.update(w.name, ttl_s=60)],
    "wake": [lambda e, w: e.wake(w.name)],
}
"""By method: calls that name what is not there."""
VOLUME_WALK: dict[str, list[Call]] = {
    "get": [lambda e, w: e.volumes.get(w.volume), lambda e, w: e.volumes.get(f"team:{w.volume}")],
    "export": [lambda e, w: e.volumes.export(w.volume, "/nowhere")],
    "path": [_path],
    "remove": [lambda e, w: e.volumes.remove(w.volume)],
}
TEMPLATE_WALK: dict[str, list[Call]] = {
    "get": [lambda e, w: e.templates.get(w.template), lambda e, w: e.templates.get(f"team:{w.template}")],
    "remove": [lambda e, w: e.templates.remove(w.template), lambda e, w: e.templates.remove(f"{w.template}:default")],
    "tag": [lambda e, w: e.templates.tag(w.template, ["more"]), lambda e, w: e.templates.tag(f"{w.template}:x", ["y"])],
    "untag": [lambda e, w: _templates(e).untag(w.template, ["default"])],
    "version": [lambda e, w: _templates(e).version(w.template)],
}
NAMES_NOTHING_OLD = {
    *("get_or_create", "import_", "warm", "warm_pools", "remove_warm_pools", "wait_refilled"),
    *("aclose", "check_options", "drivers", "runtimes", "doctor", "effective_limits", "publish_at", "list_in"),
    *("gc", "remove_abandoned", "unreadable_records"),
}
"""Methods that are told of nothing that exists. What those of the first line make and show is tested below; those of
the last are for the whole state directory."""
VOLUMES_NAME_NOTHING_OLD = {"create", "import_", "list", "references", "sizes"}
TEMPLATES_NAME_NOTHING_OLD = {"checkpoints", "list", "put"}


def public(of: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(of, inspect.isfunction) if not name.startswith("_")}


def test_the_walk_has_every_public_method() -> None:
    assert set(WALK) | NAMES_NOTHING_OLD == public(LocalEngine)
    assert set(VOLUME_WALK) | VOLUMES_NAME_NOTHING_OLD == public(VolumeStore)
    assert set(TEMPLATE_WALK) | TEMPLATES_NAME_NOTHING_OLD == public(TemplateStore)


@pytest.mark.parametrize(
    ("method", "calls"),
    [
        *WALK.items(),
        *((f"volumes.{name}", calls) for name, calls in VOLUME_WALK.items()),
        *((f"templates.{name}", calls) for name, calls in TEMPLATE_WALK.items()),
    ],
)
async def test_what_another_namespace_has_is_not_found_as_if_it_never_was(
    two: Two, method: str, calls: list[Call]
) -> None:
    never = Wanted("session.never", f"atoll-{7:016x}", f"cp-{7:012x}", "never", "never", "nobody", "never")
    before = await seen(two.theirs)
    for call in calls:
        found = await answer(call, two.mine, two.only_theirs)
        assert found == await answer(call, two.mine, never), method
        assert found == "[]" or "NotFound" in found or "InvalidRequest" in found, method
    assert await seen(two.theirs) == before
    assert [info.name for info in await two.mine.list()] == ["box"]


async def seen(engine: Engine) -> object:
    return (
        [(info.id, info.status, info.labels, info.expires_at) for info in await engine.list()],
        [(each.id, each.label) for each in await engine.checkpoints()],
        [volume.name for volume in await engine.volumes.list()],
        await engine.templates.list(),
    )


async def answer(call: Call, engine: Engine, wanted: Wanted) -> str:
    """All that a caller can see of what `call` gives, with what it named taken out."""
    try:
        said = repr(await call(engine, wanted))
    except AtollError as error:
        said = repr((type(error), error.message, error.hint, error.details))
    for value in sorted(wanted, key=len, reverse=True):
        said = said.replace(value, "WANTED")
    return said.replace("WANTED.other", "WANTED").replace("WANTED.never", "WANTED")


# ---- the same names in both ----


async def test_each_namespace_has_its_own_box_checkpoint_and_volume(two: Two) -> None:
    for engine, namespace in ((two.mine, "default"), (two.theirs, "team")):
        box = await engine.get("box")
        assert (box.info.namespace, box.info.name) == (namespace, "box")
        assert (await box.exec("hostname; cat /data/whose")).stdout.split() == ["box", namespace]
        (checkpoint,) = await engine.checkpoints("box")
        made = await engine.create("made", from_checkpoint="saved")
        assert (await made.exec("cat /data/whose")).stdout == namespace
        assert checkpoint.sandbox_id == box.id
        assert [info.name for info in await engine.list(labels={"of": namespace})] == ["box", "made"]
        assert (await engine.volumes.get("data")).sandboxes == ("box", "made")
        await made.destroy()


async def test_a_volume_is_removed_whatever_mounts_one_of_its_name_elsewhere(two: Two) -> None:
    await two.mine.volumes.create("theirs")
    user = await two.theirs.create(mounts=[mount("theirs")])
    await two.mine.volumes.remove("theirs")
    with pytest.raises(InvalidRequest, match="is mounted by"):
        await two.theirs.volumes.remove("theirs")
    await user.destroy()


async def test_a_warm_sandbox_is_claimed_only_in_its_own_namespace(two: Two) -> None:
    await two.theirs.warm(1, limits=SMALL)
    try:
        assert await two.mine.warm_pools() == []
        await two.mine.remove_warm_pools()
        await two.mine.gc()
        ready = set((two.mine.state_dir / "warm").iterdir())
        async with two.mine.create("cold", limits=SMALL) as cold:
            assert set((two.mine.state_dir / "warm").iterdir()) == ready
            assert cold.id not in {path.name.partition(".")[2] for path in ready}
        (pool,) = await two.theirs.warm_pools()
        assert pool.ready == 1
        async with two.theirs.create("claimed", limits=SMALL) as claimed:
            assert claimed.id in {path.name.partition(".")[2] for path in ready}
            assert claimed.info.namespace == "team"
    finally:
        await two.theirs.remove_warm_pools()


async def test_get_or_create_and_pools_make_their_own(two: Two) -> None:
    for make in (lambda: two.mine.get_or_create("session.other"), lambda: _of_pool(two.mine)):
        made = await make()
        assert made.id != two.only_theirs.id
        await made.destroy()


async def _of_pool(engine: Engine) -> atoll.Sandbox:
    async with engine.pool("session") as pool:
        return await pool.get("other")


async def test_a_temporary_session_may_be_open_in_both_and_ends_in_one(two: Two) -> None:
    async with two.mine.pool("passing", temporary=True) as mine:
        await mine.get("x")
        async with two.theirs.pool("passing", temporary=True) as theirs:
            await theirs.get("x")
        assert [each.name for each in await mine.list()] == ["x"]
        assert not await two.theirs.list("passing.")
    assert not await two.mine.list("passing.")


async def test_previews_of_two_namespaces_have_different_names() -> None:
    names = ["a", "a.b", "a_b", "a-b", "a_-b", "a.-b", "a_", "a.", "a__b", "b"]
    labels = {label_of(namespace, name, 80) for name in names for namespace in ("default", "a", "b", "a-b")}
    assert len(labels) == len(names) * 4
    assert label_of("default", "a.b", 80) == "80-a__b"


# ---- what is the whole state directory's ----


async def test_recovery_in_one_namespace_ends_the_abandoned_session_of_another_only(two: Two) -> None:
    for engine in (two.mine, two.theirs):
        async with engine.pool("gone") as pool:
            await (await pool.get("x")).checkpoint()
    (two.mine.state_dir / "temporary-leases" / "team:gone").touch()
    await two.mine.remove_abandoned()
    assert not await two.theirs.list("gone.")
    assert not [each for each in await two.theirs.checkpoints() if each.sandbox == "gone.x"]
    assert [info.name for info in await two.mine.list("gone.")] == ["gone.x"]
    assert len(await two.mine.checkpoints("gone.x")) == 1
    await two.mine.destroy("gone.x", checkpoints=True)


async def test_what_expires_in_one_namespace_is_removed_by_an_engine_of_another(two: Two) -> None:
    async with atoll.open(two.mine.state_dir, namespace="brief") as brief:
        box = await brief.create("box", ttl_s=1)
    await two.mine.list()  # from now on this engine watches
    await eventually(lambda: not (two.mine.state_dir / "sandboxes" / box.id).exists(), "it is removed")
    assert not (two.mine.state_dir / "names" / "brief:box").is_symlink()
    assert (await two.mine.get("box")).name == "box"


async def test_records_that_cannot_be_read_are_removed_where_they_belong(two: Two) -> None:
    box = await two.theirs.create("damaged")
    saved = await box.checkpoint("bad")
    await two.theirs.volumes.create("bad")
    state = two.mine.state_dir
    for record in (f"sandboxes/{box.id}/manifest.json", f"checkpoints/team:{saved.id}/checkpoint.json"):
        (state / record).write_text("{}")
    volume = state / "volumes" / "team:bad.json"
    whole = volume.read_bytes()
    volume.write_text("{}")
    told = {f"team:{box.id}", f"team:{saved.id}", "volume:team:bad"}
    assert set(await two.mine.unreadable_records()) == told
    assert await two.mine.checkpoints("box")
    assert [info.name for info in await two.mine.list()] == ["box"]
    assert await answer(lambda e, w: e.create("new", from_checkpoint="gone"), two.mine, two.only_theirs)
    await two.mine.volumes.create("empty")
    await two.mine.volumes.remove("empty")  # a damaged record elsewhere does not hold it
    for id in (box.id, f"team:{box.id}"):
        with pytest.raises((SandboxNotFound, InvalidRequest)):
            await two.mine.destroy(id)
    assert {info.name: info.status for info in await two.theirs.list("dam")} == {"damaged": "error"}
    await two.theirs.destroy(box.id)
    await two.theirs.delete_checkpoint(saved.id)
    volume.write_bytes(whole)
    await two.theirs.volumes.remove("bad")
    assert await two.mine.unreadable_records() == {}


async def test_garbage_collection_of_one_namespace_keeps_what_the_other_has(two: Two) -> None:
    box = await two.theirs.get("box")
    await box.files.write_text("note", "kept")
    saved = await box.checkpoint()
    await two.theirs.sleep("box")
    await two.mine.gc()
    assert await box.files.read_text("note") == "kept"
    (fork,) = await two.theirs.fork("box", checkpoint=saved.id)
    assert await fork.files.read_text("note") == "kept"
    await fork.destroy()
    await two.theirs.delete_checkpoint(saved.id)


async def test_a_handle_outlives_nothing_that_its_namespace_destroys(two: Two) -> None:
    box = await two.theirs.create("short")
    async with atoll.open(two.mine.state_dir, namespace="team") as another:
        await another.destroy("short")
    with pytest.raises(SandboxDied):
        await box.exec("true")


# ---- how one is chosen ----

CHILD = """
import asyncio, json, sys, atoll
async def main():
    async with atoll.open(sys.argv[1]) as engine:
        box = await engine.create("both")
        print(json.dumps([engine.namespace, box.id, [info.name for info in await engine.list("bo")]]))
        await engine.destroy("both")
asyncio.run(main())
"""


async def test_a_process_gets_its_namespace_from_the_environment(two: Two) -> None:
    box = await two.mine.create("both")
    command = [sys.executable, "-c", CHILD, str(two.mine.state_dir)]
    done = await anyio.run_process(command, env={"ATOLL_NAMESPACE": "team", "PATH": "/usr/bin:/usr/sbin:/bin"})
    namespace, id, names = json.loads(done.stdout)
    assert (namespace, names) == ("team", ["both", "box"])
    assert id != box.id
    assert (await two.mine.get("both")).id == box.id
    await box.destroy()


@pytest.mark.parametrize("wrong", ["", "Team", "a_b", "a.b", "a:b", "-a", "a" * 33, "../a"])
async def test_a_name_that_is_none_is_refused_with_the_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    with pytest.raises(InvalidRequest, match="is not a name for a namespace; allowed are 1 to 32 characters"):
        await atoll.open(tmp_path, namespace=wrong)
    monkeypatch.setenv("ATOLL_NAMESPACE", wrong)
    with pytest.raises(InvalidRequest, match="is not a name for a namespace"):
        await atoll.open(tmp_path)
    assert not list(tmp_path.iterdir())


# ---- what code leaves ----


async def test_approvals_of_code_belong_to_a_namespace(two: Two) -> None:
    mine, theirs = (StoredApprovals(engine.state_dir, engine.namespace) for engine in (two.mine, two.theirs))
    request = ApprovalRequest("session", "box", 1, code="await t()", cell=1, call=1, tool="t", arguments={})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(theirs.decide, request)
        await eventually(lambda: len(theirs.list()) == 1, "it is asked")
        (asked,) = theirs.list()
        assert mine.list() == []
        with pytest.raises(InvalidRequest, match=r"no approval has the id .* there are none"):
            await mine.allow(asked.id)
        await theirs.allow(asked.id)
    assert theirs.list() == []


async def test_traces_of_code_belong_to_a_namespace(two: Two) -> None:
    mine, theirs = (CodeAudit(engine.state_dir, engine.namespace) for engine in (two.mine, two.theirs))
    record = CallRecord(tool="t", arguments={}, started_at=datetime.now(UTC), duration_s=0.1, result_bytes=2)
    theirs.call("session", 1, record)
    assert (mine.sessions(), theirs.sessions()) == ([], ["session"])
    with pytest.raises(InvalidRequest, match=r"no session .* there are none"):
        mine.read("session")
    assert [entry.tool for entry in theirs.read("session")] == ["t"]
