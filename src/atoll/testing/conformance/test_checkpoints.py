"""Checkpoints, going back to them, and forks: files, on every runtime."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from atoll import (
    Capabilities,
    CheckpointExists,
    CheckpointNotFound,
    Engine,
    InvalidRequest,
    Limits,
    Sandbox,
    SandboxDied,
    SandboxExists,
    SandboxNotFound,
    Unenforceable,
)
from atoll.contract.model import Mount, RuntimeName
from atoll.contract.secret import Secret
from atoll.runtime.lifecycle import lifecycle
from atoll.testing.inside import client
from atoll.testing.plugin import LeakCheck

WRITE = """
set -e
echo one > one; mkdir -p d/e; echo two > d/e/two; ln one twin; ln -s one link; mkfifo pipe
printf x > 'a name
with a newline'
rm -rf /usr/share/common-licenses; mkdir /usr/share/common-licenses; echo mine > /usr/share/common-licenses/GPL
rm /etc/nsswitch.conf; echo opt > /opt/file; chown 1234:1235 /opt/file; chmod 4755 /opt/file
chmod 711 /; truncate -s 300M sparse; touch -d '2001-02-03 04:05:06' old
"""
LOOK = """
cat one twin d/e/two; readlink link; [ one -ef twin ] && echo same; [ -p pipe ] && echo pipe; ls a*newline | wc -l
ls /usr/share/common-licenses; cat /usr/share/common-licenses/*; ls /etc/nsswitch.conf 2>&1 | grep -c 'No such'
stat -c '%a %u %g' /opt/file; stat -c %s sparse; stat -c %Y old; stat -c %a /
"""
TWO_FILES = """
import os
i = 0
while True:
    i += 1
    for name in ("first", "second"):
        with open("new", "w") as file:
            file.write(f"{i}\\n")
        os.replace("new", name)
"""
FOUND = "one\none\ntwo\none\nsame\npipe\n2\nGPL\nmine\n1\n4755 1234 1235\n314572800\n981173106\n711\n"


async def write(sandbox: Sandbox) -> None:
    result = await sandbox.exec(WRITE, user="root", cwd="/root")
    assert result.ok, result.stderr


async def look(sandbox: Sandbox) -> str:
    if sandbox.info.runtime == "runsc":
        # gVisor has named pipes in its own memory, not on disk.
        await sandbox.exec("[ -p pipe ] || mkfifo pipe", user="root", cwd="/root")
    return (await sandbox.exec(LOOK, user="root", cwd="/root")).stdout


async def clean(engine: Engine) -> None:
    for checkpoint in await engine.checkpoints():
        await engine.delete_checkpoint(checkpoint.id)


# ---- making and going back ----


@pytest.mark.parametrize("asleep", [False, True], ids=["running", "asleep"])
async def test_restore_brings_back_every_file_as_it_was(
    engine: Engine, capabilities: Capabilities, as_root: None, asleep: bool
) -> None:
    if not asleep and not capabilities.freeze:
        pytest.skip("a sandbox that cannot be frozen is not copied while it runs")
    async with await engine.create("past") as sandbox:
        await write(sandbox)
        assert await look(sandbox) == FOUND
        if asleep:
            await sandbox.sleep()
        checkpoint = await sandbox.checkpoint("before")
        assert (checkpoint.label, checkpoint.sandbox, checkpoint.parent) == ("before", "past", None)
        assert checkpoint.with_memory is capabilities.memory_checkpoint
        assert await look(sandbox) == FOUND
        await sandbox.exec("rm -rf /root/* /opt/file; echo new > /root/one; echo x > /etc/nsswitch.conf", user="root")
        await sandbox.restore(checkpoint.id)
        assert await look(sandbox) == FOUND
        # What is written after the restore is part of the next checkpoint.
        await sandbox.exec("echo changed > /root/one", user="root")
        await sandbox.restore("before")
        assert await look(sandbox) == FOUND
    await clean(engine)


@pytest.mark.core
async def test_a_checkpoint_of_one_that_sleeps_is_made_without_waking_it(
    engine: Engine, capabilities: Capabilities
) -> None:
    async with await engine.create("quiet") as sandbox:
        await sandbox.files.write_text("f", "1")
        await sandbox.sleep()
        first = await sandbox.checkpoint()
        assert {info.status for info in await engine.list() if info.name == "quiet"} == {"sleeping"}
        await sandbox.files.write_text("f", "2")
        await sandbox.sleep()
        second = await sandbox.checkpoint("second")
        third = await sandbox.checkpoint("third")
        assert [(each.id, each.parent) for each in await sandbox.checkpoints()] == [
            (first.id, None),
            (second.id, first.id),
            (third.id, second.id),
        ]
        sizes = [each.size_bytes or 0 for each in await sandbox.checkpoints()]
        assert sizes[0] > 0
        assert sizes[1] > 0
        assert second.with_memory == third.with_memory == capabilities.memory_checkpoint
        if not third.with_memory:
            assert sizes[2] == 0, "nothing was written since"
        await sandbox.restore(first.id)
        assert await sandbox.files.read_text("f") == "1"
        await sandbox.restore(third.id)
        assert await sandbox.files.read_text("f") == "2"
    await clean(engine)


@pytest.mark.usefixtures("can_freeze")
async def test_a_checkpoint_is_of_one_moment(engine: Engine, capabilities: Capabilities, as_root: None) -> None:
    """Two files that are always written in order never show a state that did not exist."""
    async with await engine.create("moment") as sandbox:
        await (await sandbox.spawn(["python3", "-c", TWO_FILES])).detach()
        await sandbox.exec("until [ -s second ]; do sleep 0.01; done; head -c 20000000 /dev/zero > bulk")
        for _ in range(1 if capabilities.memory_checkpoint else 3):
            (copy,) = await sandbox.fork(1)
            async with copy:
                first, second = (await copy.exec("cat first second")).stdout.split()
                # Where processes resume in the copy, they have written more before the files can be read.
                assert int(first) - int(second) in ((0, 1) if not capabilities.memory_checkpoint else range(-99, 2))
    await clean(engine)


@pytest.mark.core
async def test_a_running_sandbox_is_copied_if_it_can_be_frozen_or_nothing_runs_in_it(
    engine: Engine, capabilities: Capabilities
) -> None:
    async with await engine.create() as sandbox:
        await sandbox.files.write_text("f", "text")
        await sandbox.checkpoint()
        assert len(await sandbox.checkpoints()) == 1
        (fork,) = await sandbox.fork()
        async with fork:
            assert await fork.files.read_text("f") == "text"
        busy = await sandbox.spawn("exec sleep 1000")
        if not capabilities.freeze:
            with pytest.raises(Unenforceable, match="put the sandbox to sleep first"):
                await sandbox.checkpoint()
            await busy.kill()
            await busy.wait()
        await sandbox.checkpoint()
        assert len(await sandbox.checkpoints()) == 2
        assert (await sandbox.exec("cat f")).stdout == "text"
        assert await sandbox.status() == "running"
    await clean(engine)


@pytest.mark.local("changes a number in the process that merges layers")
async def test_many_checkpoints_share_their_layers(
    engine: Engine, runtime_name: RuntimeName, as_root: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = 5 if runtime_name == "runsc" else 11
    monkeypatch.setattr(lifecycle, "FLATTEN_AT", 3)
    async with await engine.create("tower") as sandbox:
        for number in range(last + 1):
            await sandbox.exec(f"echo {number} > file-{number}; rm -f file-{number - 2}; echo {number} > last")
            await sandbox.sleep()
            await sandbox.checkpoint(f"step-{number}")
        manifest = json.loads((engine.state_dir / "sandboxes" / sandbox.id / "manifest.json").read_text())
        assert len(manifest["layers"]) <= 4, "a long stack of layers is merged"
        await sandbox.restore("step-3")
        assert (await sandbox.exec("cat last; ls file-* | tr '\\n' ' '")).stdout == "3\nfile-2 file-3 "
        await sandbox.restore(f"step-{last}")
        assert (await sandbox.exec("cat last; ls file-* | wc -l")).stdout == f"{last}\n2\n"
    await clean(engine)


@pytest.mark.usefixtures("can_freeze")
async def test_the_next_checkpoint_of_one_that_runs_has_what_changed_and_what_did_not(
    engine: Engine, as_root: None
) -> None:
    async with await engine.create("writer") as sandbox:
        await sandbox.exec("mkdir d; echo kept > d/kept; echo old > changed; echo x > gone; sleep 0.3")
        await sandbox.checkpoint("first")
        await sandbox.exec("echo new > changed; rm gone; echo added > added")
        await sandbox.checkpoint("second")
        await sandbox.exec("rm -r *; echo late > changed")
        (first,) = await sandbox.fork(1, checkpoint="first")
        (second,) = await sandbox.fork(1, checkpoint="second")
        await engine.delete_checkpoint("first", sandbox="writer")
        assert (await first.exec("cat d/kept changed gone; ls")).stdout == "kept\nold\nx\nchanged\nd\ngone\n"
        assert (await second.exec("cat d/kept changed added; ls")).stdout == "kept\nnew\nadded\nadded\nchanged\nd\n"
        # Neither writes to the files that two of them share.
        await first.exec("echo mine > d/kept")
        assert (await second.exec("cat d/kept")).stdout == "kept\n"
        for fork in (first, second):
            await fork.destroy()
    await clean(engine)


# ---- forks ----


@pytest.mark.usefixtures("can_freeze")
async def test_forks_begin_alike_and_share_nothing(engine: Engine, as_root: None) -> None:
    async with await engine.create("parent", env={"WHO": "parent"}) as sandbox:
        await write(sandbox)
        forks = await sandbox.fork(3)
        assert len({fork.name for fork in forks} | {"parent"}) == 4
        for fork in forks:
            assert await look(fork) == FOUND
            assert (await fork.exec("hostname; echo $WHO")).stdout == f"{fork.name}\nparent\n"
            assert (await fork.exec(["getent", "hosts", fork.name])).stdout.split() == ["127.0.0.1", fork.name]
            await fork.exec("echo $(hostname) > /root/one; touch /root/only", user="root")
        assert await look(sandbox) == FOUND
        drawn = [(await each.exec("head -c 16 /dev/urandom | od -An -tx1")).stdout for each in (sandbox, *forks)]
        assert len(set(drawn)) == 4
        for fork in forks:
            assert (await fork.exec("cat /root/one", user="root")).stdout == f"{fork.name}\n"
        # A fork of a fork uses the same committed layers.
        (grandchild,) = await forks[0].fork(1, names=["grandchild"])
        await forks[0].destroy()
        assert (await grandchild.exec("cat /root/one; ls /root/only", user="root")).stdout == (
            f"{forks[0].name}\n/root/only\n"
        )
        for each in (*forks[1:], grandchild):
            await each.destroy()
        assert await look(sandbox) == FOUND
    assert await engine.checkpoints() == []


@pytest.mark.usefixtures("can_freeze")
async def test_a_fork_is_made_of_a_checkpoint(engine: Engine, as_root: None) -> None:
    async with await engine.create("origin") as sandbox:
        await sandbox.files.write_text("f", "then")
        checkpoint = await sandbox.checkpoint("then")
        await sandbox.files.write_text("f", "now")
        (fork,) = await sandbox.fork(1, checkpoint="then")
        assert await fork.files.read_text("f") == "then"
        (again,) = await engine.fork("origin", 1, checkpoint=checkpoint.id, names=["again"])
        assert await again.files.read_text("f") == "then"
        # The checkpoint may be deleted; the fork stays complete.
        await engine.delete_checkpoint("then", sandbox="origin")
        await fork.sleep()
        assert await fork.files.read_text("f") == "then"
        await fork.destroy()
        await again.destroy()


@pytest.mark.usefixtures("can_freeze")
async def test_forks_are_made_all_or_none(engine: Engine, as_root: None, leak_check: LeakCheck) -> None:
    async with await engine.create("whole") as sandbox, await engine.create("taken"):
        with pytest.raises(SandboxExists):
            await sandbox.fork(3, names=["left", "taken", "right"])
        assert {info.name for info in await engine.list()} >= {"whole", "taken"}
        assert not {info.name for info in await engine.list()} & {"left", "right"}
        for count, names in ((0, None), (-1, None), (2, ["one"])):
            with pytest.raises(InvalidRequest):
                await sandbox.fork(count, names=names)
    await leak_check.back_to_start()


# ---- what there is, and what goes ----


async def test_deleting_frees_layers_that_nothing_else_needs(
    engine: Engine, as_root: None, leak_check: LeakCheck
) -> None:
    sandbox = await engine.create("freed")
    layers = engine.state_dir / "layers"
    await sandbox.exec("head -c 1000000 /dev/urandom > big")
    await sandbox.sleep()
    one, two = await sandbox.checkpoint("one"), await sandbox.checkpoint("two")
    assert one.size_bytes is None or one.size_bytes > 0
    before = set(os.listdir(layers))
    await engine.delete_checkpoint("one", sandbox="freed")
    assert set(os.listdir(layers)) == before, "the other checkpoint and the sandbox use this layer"
    await sandbox.destroy()
    assert len(os.listdir(layers)) < len(before)
    (kept,) = await engine.checkpoints()
    assert kept.id == two.id
    await engine.delete_checkpoint(two.id)
    assert os.listdir(layers) == []
    await leak_check.back_to_start()


async def test_what_is_not_there_is_told(engine: Engine) -> None:
    with pytest.raises(SandboxNotFound):
        await engine.checkpoint("no-such-sandbox")
    with pytest.raises(CheckpointNotFound, match="there are none"):
        await engine.delete_checkpoint("cp-000000000000")
    async with await engine.create("here") as sandbox:
        for wanted in ("nothing", "../../names", "", "cp-1"):
            with pytest.raises(CheckpointNotFound):
                await sandbox.restore(wanted)
        assert (await sandbox.exec("echo alive")).stdout == "alive\n"
        with pytest.raises(InvalidRequest, match="'Not A Label' is not a label for a checkpoint; allowed are"):
            await sandbox.checkpoint("Not A Label")


@pytest.mark.usefixtures("can_freeze")
async def test_a_checkpoint_is_seen_by_others_and_outlives_its_sandbox(
    engine: Engine, runtime_name: RuntimeName, as_root: None
) -> None:
    async with await engine.create("author") as sandbox:
        await sandbox.files.write_text("f", "text")
        await sandbox.checkpoint("work")
    body = """
for each in await engine.checkpoints("author"):
    say(each.label, each.size_bytes > 0)
box = await engine.create("heir", from_checkpoint="work")
say(await box.files.read_text("f"))
await box.destroy()
await engine.delete_checkpoint(each.id)
"""
    async with client(engine.state_dir, runtime_name, body) as other:
        assert await other.line() == "work True"
        assert await other.line() == "text"
        await other.succeeds()
    assert await engine.checkpoints() == []


@pytest.mark.runtimes("crun", "runsc")
async def test_a_label_is_one_checkpoint_of_its_sandbox(engine: Engine, as_root: None) -> None:
    async with await engine.create("labelled") as sandbox, await engine.create("other") as other:
        await sandbox.sleep()
        await other.sleep()
        first = await sandbox.checkpoint("clean")
        with pytest.raises(CheckpointExists, match=f"the checkpoint {first.id} of this sandbox has the label 'clean'"):
            await sandbox.checkpoint("clean")
        moved = await sandbox.checkpoint("clean", move=True)
        assert {each.id: each.label for each in await sandbox.checkpoints()} == {first.id: None, moved.id: "clean"}
        theirs = await other.checkpoint("clean")
        with pytest.raises(InvalidRequest, match=f"several checkpoints .* 'clean': {moved.id} of 'labelled'"):
            await engine.delete_checkpoint("clean")
        await engine.delete_checkpoint("clean", sandbox="other")
        with pytest.raises(CheckpointNotFound):
            await engine.delete_checkpoint(theirs.id)
        await engine.delete_checkpoint("clean")  # there is one left
        assert [each.id for each in await engine.checkpoints()] == [first.id]
    await clean(engine)


@pytest.mark.runtimes("crun", "runsc")
async def test_a_checkpoint_belongs_to_the_sandbox_that_it_was_taken_of(engine: Engine, as_root: None) -> None:
    former = await engine.create("q")
    await former.files.write_text("f", "former")
    await former.sleep()
    made = await former.checkpoint("clean")
    assert made.sandbox_id == former.id
    assert await engine.destroy("q") == 1
    assert [each.id for each in await engine.checkpoints("q")] == [made.id]
    (fork,) = await engine.fork("q", names=["forked"], checkpoint="clean")  # it need not live
    async with fork, await engine.create("q") as sandbox:
        assert await fork.files.read_text("f") == "former"
        assert await sandbox.checkpoints() == []  # another sandbox, which does not inherit
        with pytest.raises(CheckpointNotFound):
            await sandbox.restore("clean")
        with pytest.raises(InvalidRequest, match=f"the checkpoint {made.id} is not of this sandbox"):
            await sandbox.restore(made.id)
        assert not await sandbox.files.exists("f")
        await sandbox.restore(made.id, foreign=True)
        assert await sandbox.files.read_text("f") == "former"
        await sandbox.sleep()
        child = await sandbox.checkpoint()
        assert (child.parent, child.sandbox_id) == (made.id, sandbox.id)
        assert await engine.destroy("q", checkpoints=True) == 1
    assert [each.id for each in await engine.checkpoints()] == [made.id]
    await clean(engine)


@pytest.mark.runtimes("crun", "runsc")
async def test_a_sandbox_is_created_from_a_checkpoint_as_from_a_template(
    engine: Engine, capabilities: Capabilities, as_root: None
) -> None:
    async with await engine.create("base", env={"A": "1", "B": "1"}, labels={"kind": "template"}) as base:
        await base.exec("echo made > f")
        await base.sleep()
        made = await base.checkpoint("template")
    template = await engine.create("one", from_checkpoint="template")
    limits = Limits(memory_bytes=200 << 20 if capabilities.memory_limit else None, open_files=256)
    given = await engine.create(
        "two", from_checkpoint=made.id, env={"B": "2"}, labels={"kind": "copy"}, limits=limits, user="root", cwd="/srv"
    )
    async with template, given:
        said = await template.exec("cat f; hostname; echo $A$B; id -un")
        assert said.stdout == "made\none\n11\nuser\n"
        assert template.info.labels == {"kind": "template"}
        said = await given.exec("cat /home/user/f; hostname; echo $A$B; id -un; pwd")
        assert said.stdout == "made\ntwo\n12\nroot\n/srv\n"
        assert given.info.labels == {"kind": "copy"}
        assert (given.info.limits.memory_bytes, given.info.limits.open_files) == (limits.memory_bytes, 256)
        with pytest.raises(SandboxExists):
            await engine.create("one", from_checkpoint="template")
    with pytest.raises(CheckpointNotFound):
        await engine.create(from_checkpoint="no-such")
    with pytest.raises(InvalidRequest, match="a sandbox from a checkpoint has its image; leave that out"):
        await engine.create(from_checkpoint="template", image="host")
    await clean(engine)


@pytest.mark.runtimes("crun", "runsc")
@pytest.mark.usefixtures("can_freeze")
async def test_a_sandbox_from_a_checkpoint_is_given_secrets_and_mounts_of_its_own(
    engine: Engine, as_root: None
) -> None:
    async with await engine.create("base") as base:
        await base.exec("echo made > f")
        await base.spawn(["sleep", "1000"])
        made = await base.checkpoint("template")
    await engine.volumes.create("data")
    mounts = [Mount(source="volume:data", target="/data")]
    secrets = {"KEY": Secret("value-of-the-key", hosts=["api.example.com"])}
    async with await engine.create(
        "one", from_checkpoint=made.id, secrets=secrets, secret_env={"TOKEN": "in clear"}, mounts=mounts
    ) as one:
        said = await one.exec(
            "cat f; echo $TOKEN; echo $KEY; test -s $SSL_CERT_FILE && echo there > /data/f; pgrep sleep || true"
        )
        words = said.stdout.split("\n")
        assert words[:2] == ["made", "in clear"]
        assert words[2].startswith("atoll_secret_")
        assert words[3:] == [""]  # it begins with the files of the checkpoint, and none of its processes
        own = await one.checkpoint("own")
    async with await engine.create("two", from_checkpoint=made.id, mounts=mounts) as two:
        assert (await two.exec("cat /data/f; echo $TOKEN")).stdout == "there\n\n"
    for given in ({"secret_env": {"A": "b"}}, {"mounts": mounts}):
        with pytest.raises(InvalidRequest, match=r"a sandbox from this checkpoint has its \w+; leave yours out"):
            await engine.create(from_checkpoint=own.id, **given)
    await clean(engine)
    await engine.volumes.remove("data")


@pytest.mark.usefixtures("can_freeze")
async def test_checkpoints_forks_and_sleep_at_once(engine: Engine, capabilities: Capabilities, as_root: None) -> None:
    async with await engine.create("busy") as sandbox:
        await sandbox.files.write_text("f", "text")

        lost = [SandboxDied] if capabilities.memory_checkpoint else []

        async def read() -> None:
            for _ in range(5):
                # Where processes are saved to disk too, a call in progress is lost and raises.
                with suppress(*lost):
                    assert await sandbox.files.read_text("f") == "text"

        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(sandbox.checkpoint, f"at-{number}")
                group.start_soon(read)
            group.start_soon(sandbox.fork, 2)
        assert len(await sandbox.checkpoints()) == 4
        for info in await engine.list():
            if info.name != "busy":
                assert await (await engine.get(info.name)).files.read_text("f") == "text"
                await engine.destroy(info.name)
    await clean(engine)


_KILLED_BEFORE_THE_LAST = """
import contextlib, signal
from atoll.runtime.state.store import StateStore
all_or_none = StateStore.create_group
@contextlib.contextmanager
def killed(store):
    with all_or_none(store) as group:
        yield group
        os.kill(os.getpid(), signal.SIGKILL)
StateStore.create_group = killed
await engine.fork("source", 2, names=["fork-a", "fork-b"])
"""


async def test_forks_whose_process_was_killed_are_not_there_and_their_names_are_free(
    state_dir: Path, engine: Engine, runtime_name: RuntimeName, as_root: None
) -> None:
    async with await engine.create("source") as source:
        await source.files.write_text("f", "text")
        await engine.list()  # it has recovered what there was, and does not look again by itself
        async with client(state_dir, runtime_name, _KILLED_BEFORE_THE_LAST) as other:
            await other.ends()
        assert [info.name for info in await engine.list()] == ["source"]
        for name in ("fork-a", "fork-b"):
            with pytest.raises(SandboxNotFound):
                await engine.get(name)
        for fork in await engine.fork("source", 2, names=["fork-a", "fork-b"]):
            assert await fork.files.read_text("f") == "text"
            await fork.destroy()
