"""Workspaces: bundles that are built once, booted by the first call, kept, and put to sleep."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest

from atoll import NetworkPolicy
from atoll.bundles import workspace as workspace_module
from atoll.bundles.build import remove_built
from atoll.bundles.dispatch import BUNDLE_DIRECTORY
from atoll.bundles.workspace import MAX_LOG_BYTES, BundleFile
from atoll.contract.errors import BundleFailed, InvalidRequest, QuotaExceeded, TooManyProcesses
from atoll.contract.model import Limits
from atoll.runtime.engine import LocalEngine
from atoll.runtime.interface import Engine
from atoll.testing.plugin import STRICT
from atoll.testing.waiting import eventually
from atoll.tools.tool import ToolResult
from tests.bundles.conftest import MakeWorkspace
from tests.bundles.making import manifest, packed, stored

pytestmark = pytest.mark.runtimes("crun", "runsc")

SOURCE = """
    import os, subprocess

    def read(args):
        print("reading", args["path"])
        with open(args["path"]) as file:
            return {"ok": True, "content": file.read()}

    def write(path: str, text: str):
        with open(path, "w") as file:
            file.write(text)
        return {"ok": True, "content": os.getcwd()}

    def variable(args):
        return {"ok": True, "content": os.environ.get(args["name"], "unset")}

    def versions(args):
        import six
        script = "console.log(require('left-pad')('x', 4, '-'))"
        padded = subprocess.run(["node", "-e", script], capture_output=True, text=True).stdout
        return {"ok": True, "content": [six.__version__, padded]}
"""
TOOLS = ("read", "write", "variable")


@pytest.fixture
async def bundle(archive: Path) -> BundleFile:
    return await stored(archive, packed(SOURCE, manifest(*TOOLS), {"template/page.html": b"<p>"}))


async def installs(engine: Engine) -> int:
    return len([each for each in await engine.checkpoints() if (each.label or "").startswith("bundle-")])


async def test_the_first_call_boots_and_other_workspaces_install_nothing(
    engine: Engine, workspaces: MakeWorkspace, bundle: BundleFile
) -> None:
    one, recorded = workspaces("one", bundle)
    tools = one.tools(["read", "write", "echo"])
    assert (await tools.handle_tool_call("echo", {"text": "hello"})).content == "hello"
    assert not [each.name for each in await engine.list()]  # neither the list of tools nor a built-in one boots
    assert (await tools.handle_tool_call("read", {"path": "page.html"})).content == "<p>"
    assert recorded.states == ["provisioning", "running"]
    first = recorded.instances[-1]
    assert first.ready_at is not None
    assert first.ready_at >= first.created_at
    assert {each.external_id for each in recorded.instances} == {first.external_id}
    assert [each.name for each in await engine.list()] == ["one"]  # nothing is left of the build

    two, other = workspaces("two", bundle)
    began = time.monotonic()
    result = await two.tools(["read"]).handle_tool_call("read", {"path": "page.html"})
    print(f"first call of a second boot: {(time.monotonic() - began) * 1000:.0f} ms")
    assert result.content == "<p>"
    assert await installs(engine) == 1
    assert other.instances[0].external_id != first.external_id
    assert "reading page.html" in two._log.decode()


async def test_a_requirement_and_a_node_module_are_installed_from_the_machines_indexes(
    engine: LocalEngine, workspaces: MakeWorkspace, archive: Path
) -> None:
    await _require_index(engine)
    packages = {"requirements": ["six==1.17.0"], "node_modules": ["left-pad@1.3.0"]}
    made = packed(
        SOURCE, manifest("versions", "read", **packages, build_command="echo $PWD > built; six-free 2>&1 || :")
    )
    workspace, recorded = workspaces("packages", await stored(archive, made))
    tools = workspace.tools(["versions", "read"])
    assert (await tools.handle_tool_call("versions")).content == '["1.17.0", "---x\\n"]'
    built = await tools.handle_tool_call("read", {"path": f"{BUNDLE_DIRECTORY}/built"})
    assert built.content == f"{BUNDLE_DIRECTORY}\n"
    assert "six-1.17.0" in recorded.instances[-1].log
    assert (await engine.get("packages")).info.network is None  # the build's policy is not the workspace's
    again, other = workspaces("again", workspace.spec.bundle)
    assert (await again.tools(["versions"]).handle_tool_call("versions")).content == '["1.17.0", "---x\\n"]'
    assert "six-1.17.0" not in other.instances[-1].log


async def _require_index(engine: LocalEngine) -> None:
    found = await engine._provisioner.find_indexes(NetworkPolicy(allow="registries"))
    assert found is not None
    host, _, port = found.allow[-1].rpartition(":")
    try:
        with anyio.fail_after(10):
            await (await anyio.connect_tcp(host, int(port))).aclose()
    except OSError as error:
        if STRICT:
            raise
        pytest.skip(f"a package index does not answer: {error}")


async def test_boots_at_the_same_time_build_once(engine: Engine, workspaces: MakeWorkspace, bundle: BundleFile) -> None:
    made = [workspaces(f"at-once-{number}", bundle)[0] for number in range(3)]
    async with anyio.create_task_group() as tasks:
        for each in made:
            tasks.start_soon(each.boot)
        tasks.start_soon(made[0].boot)
    assert await installs(engine) == 1


KILLED = """
import anyio, sys
from pathlib import Path
import atoll
from atoll.bundles.workspace import BundleFile, Workspace, WorkspaceSpec

async def record(instance):
    pass

async def main():
    async with atoll.open(sys.argv[1], settings=atoll.Settings(runtime=sys.argv[2])) as engine:
        bundle = BundleFile.model_validate_json(sys.argv[3])
        await Workspace(engine, WorkspaceSpec(sandbox="half", bundle=bundle), record).boot()

anyio.run(main)
"""


async def test_a_process_that_is_killed_while_it_builds_leaves_nothing_that_is_used(
    engine: Engine, runtime_name: str, workspaces: MakeWorkspace, archive: Path
) -> None:
    slow = "for i in 1 2 3 4 5 6 7 8; do echo $i >> steps; sleep 0.2; done"
    made = packed(SOURCE, manifest("read", build_command=slow))
    bundle = await stored(archive, made)
    words = [sys.executable, "-c", KILLED, str(engine.state_dir), runtime_name, bundle.model_dump_json()]
    async with await anyio.open_process(words) as process:

        async def half_done() -> bool:
            for info in await engine.list("bundle-build-"):
                box = await engine.get(info.name)
                return info.status == "running" and await box.files.exists(f"{BUNDLE_DIRECTORY}/steps")
            return False

        await eventually(half_done, "it is in the middle of the build")
        process.kill()
    assert await engine.checkpoints() == []
    workspace, _ = workspaces("half", bundle)
    steps = await workspace.tools(["read"]).handle_tool_call("read", {"path": f"{BUNDLE_DIRECTORY}/steps"})
    assert steps.content == "".join(f"{number}\n" for number in range(1, 9))
    assert [each.name for each in await engine.list()] == ["half"]


async def test_files_outlive_the_sandbox_when_the_bundle_changes(
    engine: Engine, workspaces: MakeWorkspace, bundle: BundleFile, tmp_path: Path
) -> None:
    before, recorded = workspaces("kept", bundle)
    wrote = await before.tools(["write"]).handle_tool_call("write", {"path": "mine.txt", "text": "mine"})
    assert wrote.content == "/workspace"
    await before.aclose()
    changed = packed(SOURCE + "\n    # another\n", manifest(*TOOLS), {"template/page.html": b"other"})
    after, others = workspaces("kept", await stored(tmp_path / "other.tgz", changed), last=recorded.instances[-1])
    tools = after.tools(["read"])
    assert (await tools.handle_tool_call("read", {"path": "mine.txt"})).content == "mine"
    assert (await tools.handle_tool_call("read", {"path": "page.html"})).content == "<p>"  # only on the first boot
    assert others.states == ["destroyed", "provisioning", "running"]
    assert others.instances[0].external_id == recorded.instances[-1].external_id


async def test_a_later_process_goes_on_with_the_same_instance(workspaces: MakeWorkspace, bundle: BundleFile) -> None:
    first, recorded = workspaces("later", bundle)
    await first.boot()
    await first.aclose()
    second, others = workspaces(
        "later", bundle, last=recorded.instances[-1], network=NetworkPolicy(allow="example.com")
    )
    booted = await second.boot()
    assert booted.external_id == recorded.instances[-1].external_id
    assert others.states == ["running"]
    assert (await second.engine.get("later")).info.network == NetworkPolicy(allow="example.com")


async def test_limits_that_cannot_be_changed_while_it_runs_make_a_new_sandbox(
    workspaces: MakeWorkspace, bundle: BundleFile
) -> None:
    first, recorded = workspaces("limited", bundle)
    await first.boot()
    await first.aclose()
    last = recorded.instances[-1]
    second, _ = workspaces("limited", bundle, last=last, limits=Limits(open_files=200, memory_bytes=300 << 20))
    assert (await second.boot()).external_id != last.external_id
    limits = (await second.engine.get("limited")).info.limits
    assert (limits.open_files, limits.memory_bytes) == (200, 300 << 20)


async def test_an_instance_whose_process_was_killed_while_it_booted_has_failed(
    workspaces: MakeWorkspace, bundle: BundleFile
) -> None:
    killed, recorded = workspaces("killed", bundle)
    await killed._begin()
    later, others = workspaces("killed", bundle, last=recorded.instances[-1])
    await later.boot()
    assert others.states == ["failed", "provisioning", "running"]
    assert others.instances[0].message == "its process was interrupted"


async def test_a_workspace_sleeps_when_it_is_unused_and_the_next_call_wakes_it(
    engine: Engine, workspaces: MakeWorkspace, bundle: BundleFile
) -> None:
    workspace, recorded = workspaces("sleepy", bundle, sleep_after_s=1)
    tools = workspace.tools(["write", "read"])
    await tools.handle_tool_call("write", {"path": "mine.txt", "text": "mine"})
    await eventually(lambda: recorded.instances[-1].state == "sleeping", "it sleeps")
    assert [each.status for each in await engine.list()] == ["sleeping"]
    assert (await tools.handle_tool_call("read", {"path": "mine.txt"})).content == "mine"
    assert recorded.states == ["provisioning", "running", "sleeping", "running"]


async def test_secrets_are_seen_by_tools_and_not_built_in(
    engine: LocalEngine, workspaces: MakeWorkspace, bundle: BundleFile
) -> None:
    secret_env = {"TOKEN": "s3cret-value-of-the-tenant"}
    workspace, recorded = workspaces("secret", bundle, secret_env=secret_env, environment={"PLAIN": "text"})
    tools = workspace.tools(["variable"])
    assert (await tools.handle_tool_call("variable", {"name": "TOKEN"})).content == "s3cret-value-of-the-tenant"
    assert (await tools.handle_tool_call("variable", {"name": "PLAIN"})).content == "text"
    other, _ = workspaces("other", bundle)
    assert (await other.tools(["variable"]).handle_tool_call("variable", {"name": "TOKEN"})).content == "unset"
    assert "s3cret" not in repr(workspace.spec) + recorded.instances[-1].log
    for record in engine.state_dir.glob("*/*/*.json"):
        assert b"s3cret" not in record.read_bytes()


async def test_secrets_that_change_make_a_new_sandbox(workspaces: MakeWorkspace, bundle: BundleFile) -> None:
    before, _ = workspaces("rotated", bundle, secret_env={"TOKEN": "old-value"}, revision="1")
    await before.boot()
    await before.aclose()
    after, _ = workspaces("rotated", bundle, secret_env={"TOKEN": "new-value"}, revision="2")
    assert (await after.tools(["variable"]).handle_tool_call("variable", {"name": "TOKEN"})).content == "new-value"


async def test_what_is_built_is_removed_with_the_bundle(
    engine: Engine, workspaces: MakeWorkspace, bundle: BundleFile
) -> None:
    workspace, _ = workspaces("removed", bundle)
    await workspace.boot()
    assert await remove_built(engine, bundle.sha256) == 1
    assert (await workspace.tools(["read"]).handle_tool_call("read", {"path": "page.html"})).content == "<p>"
    await workspace.destroy()
    assert await engine.list() == []
    assert await engine.volumes.list() == []
    assert await engine.checkpoints() == []


async def test_a_boot_that_is_not_admitted_leaves_nothing(
    engine: Engine, workspaces: MakeWorkspace, bundle: BundleFile
) -> None:
    asked: list[Limits] = []

    @asynccontextmanager
    async def refuse(_name: str, limits: Limits) -> AsyncIterator[None]:
        asked.append(limits)
        if asked:
            raise QuotaExceeded("sandboxes", used=1, asked=1, allowed=1)
        yield

    workspace, recorded = workspaces("refused", bundle, admit=refuse)
    result = await workspace.tools(["read"]).handle_tool_call("read", {"path": "x"})
    assert result.is_error
    assert "sandboxes" in result.text
    assert asked[0].memory_bytes == engine.effective_limits(Limits()).memory_bytes
    assert recorded.states == ["provisioning", "failed"]
    assert recorded.instances[-1].reason is None
    assert await engine.list() == []
    assert await engine.volumes.list() == []


async def test_a_workspace_that_is_removed_while_it_boots_does_not_wait_for_the_build(
    engine: Engine, workspaces: MakeWorkspace, archive: Path
) -> None:
    made = packed(SOURCE, manifest("read", build_command="sleep 500"))
    workspace, recorded = workspaces("removed", await stored(archive, made))
    results: list[ToolResult] = []

    async def call() -> None:
        results.append(await workspace.tools(["read"]).handle_tool_call("read", {"path": "x"}))

    async def is_building() -> bool:
        return any(each.name.startswith("bundle-build-") for each in await engine.list())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await eventually(is_building, "it is being built")
        await workspace.destroy()
    assert "the workspace was removed while it was booted" in results[0].text
    assert (recorded.states, recorded.instances[-1].reason) == (["provisioning", "failed"], None)
    assert (await engine.list(), await engine.volumes.list(), await engine.checkpoints()) == ([], [], [])


async def test_files_for_which_there_is_no_room_are_not_begun(
    engine: Engine, workspaces: MakeWorkspace, bundle: BundleFile
) -> None:
    asked: list[tuple[str, int | None]] = []

    @asynccontextmanager
    async def refuse(name: str, size_bytes: int | None) -> AsyncIterator[None]:
        asked.append((name, size_bytes))
        if asked:
            raise QuotaExceeded("disk_bytes", used=1, asked=1, allowed=1)
        yield

    workspace, recorded = workspaces("full", bundle, admit_volume=refuse)
    result = await workspace.tools(["read"]).handle_tool_call("read", {"path": "x"})
    assert "quota of disk_bytes" in result.text
    assert asked == [("full", None)]
    assert recorded.states == ["provisioning", "failed"]
    assert (await engine.list(), await engine.volumes.list()) == ([], [])


# ----------------------------------------------------------------------------------------------------------- failures


async def failed_boot(engine: Engine, workspaces: MakeWorkspace, bundle: BundleFile, reason: str) -> str:
    workspace, recorded = workspaces("fails", bundle)
    with pytest.raises(BundleFailed) as failed:
        await workspace.boot()
    instance = recorded.instances[-1]
    assert (failed.value.reason, instance.reason, instance.state) == (reason, reason, "failed")
    assert instance.ended_at is not None
    assert instance.message == failed.value.message
    called = await workspace.tools([bundle.tools[0].name]).handle_tool_call(bundle.tools[0].name, {})
    assert called.is_error
    assert reason in called.text
    assert len(recorded.instances) == 2  # it was not booted again
    assert [each.name for each in await engine.list()] == []
    assert await engine.volumes.list() == []
    assert len(instance.log.encode()) <= MAX_LOG_BYTES
    return failed.value.message


async def test_bytes_that_are_gone_fail_to_be_fetched(
    engine: Engine, workspaces: MakeWorkspace, bundle: BundleFile
) -> None:
    bundle.path.unlink()
    message = await failed_boot(engine, workspaces, bundle, "bundle_fetch_failed")
    assert message == "the bytes of the bundle are not on the server; upload it again"


async def test_bytes_that_were_changed_fail_the_check_of_integrity(
    engine: Engine, workspaces: MakeWorkspace, bundle: BundleFile
) -> None:
    bundle.path.write_bytes(packed("def run(args): ...", manifest("run")))
    assert "the bytes of the bundle have the SHA-256" in await failed_boot(
        engine, workspaces, bundle, "bundle_integrity_failed"
    )


async def test_a_manifest_that_is_invalid_is_found_when_the_bundle_is_built(
    engine: Engine, workspaces: MakeWorkspace, bundle: BundleFile, tmp_path: Path
) -> None:
    import hashlib

    path = tmp_path / "old.tgz"
    path.write_bytes(packed(SOURCE, manifest("read").replace(b'"schema_version": 1', b'"schema_version": 9')))
    old = bundle.model_copy(update={"path": path, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
    message = await failed_boot(engine, workspaces, old, "bundle_manifest_invalid")
    assert message == "manifest.json: schema_version is 9; this server reads version 1"


async def test_a_build_command_that_fails_says_what_it_printed(
    engine: Engine, workspaces: MakeWorkspace, archive: Path
) -> None:
    made = packed(SOURCE, manifest("read", build_command="echo the reason; yes | head -c 100000; echo end >&2; exit 3"))
    message = await failed_boot(engine, workspaces, await stored(archive, made), "bundle_build_failed")
    assert message.startswith("the build_command failed with exit code 3:\n")
    assert message.endswith("end")
    assert await installs(engine) == 0


async def test_a_module_that_cannot_be_imported_says_why(
    engine: Engine, workspaces: MakeWorkspace, archive: Path
) -> None:
    made = packed("import no_such_module\ndef run(args): ...", manifest("run"))
    message = await failed_boot(engine, workspaces, await stored(archive, made), "bundle_entrypoint_invalid")
    assert message.startswith("the module of the tool run cannot be imported:\nTraceback")
    assert message.endswith("ModuleNotFoundError: No module named 'no_such_module'")


@pytest.mark.parametrize(
    "source", ["import os\nos._exit(7)\ndef run(args): ...", "raise SystemExit(7)\ndef run(args): ..."]
)
async def test_a_module_that_ends_its_process_is_an_entrypoint_that_is_invalid(
    engine: Engine, workspaces: MakeWorkspace, archive: Path, source: str
) -> None:
    bundle = await stored(archive, packed(source, manifest("run")))
    message = await failed_boot(engine, workspaces, bundle, "bundle_entrypoint_invalid")
    assert "7" in message


async def test_a_failed_boot_does_not_keep_the_template(
    workspaces: MakeWorkspace, archive: Path, tmp_path: Path
) -> None:
    broken = packed("import no_such_module\ndef read(args): ...", manifest("read"), {"template/page.html": b"broken"})
    workspace, _ = workspaces("repaired", await stored(archive, broken))
    with pytest.raises(BundleFailed):
        await workspace.boot()
    whole = packed(SOURCE, manifest("read"), {"template/page.html": b"whole"})
    repaired, _ = workspaces("repaired", await stored(tmp_path / "whole.tgz", whole))
    assert (await repaired.tools(["read"]).handle_tool_call("read", {"path": "page.html"})).content == "whole"


async def test_a_name_that_the_bundle_does_not_have_is_refused(workspaces: MakeWorkspace, bundle: BundleFile) -> None:
    workspace, _ = workspaces("names", bundle)
    with pytest.raises(
        InvalidRequest, match=r"the bundle has no tool 'reed' \(tools: read, write, .*did you mean 'read'"
    ):
        workspace.tools(["reed"])
    assert {tool.name for tool in workspace.tools(["read", "get_current_time"])} == {"read", "get_current_time"}


async def test_a_call_of_an_unknown_name_is_an_error_to_the_model(
    workspaces: MakeWorkspace, bundle: BundleFile
) -> None:
    result = await workspaces("unknown", bundle)[0].tools(["read"]).handle_tool_call("no_such", {})
    assert result.is_error
    assert "there is no tool 'no_such' (tools: read)" in result.text


@pytest.mark.runtimes("crun")  # runsc has no limit of processes
async def test_a_workspace_that_is_full_of_processes_is_made_anew_when_its_tools_cannot_start(
    engine: Engine, workspaces: MakeWorkspace, bundle: BundleFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace_module, "RETRY_S", 0.0)
    workspace, _ = workspaces("filled", bundle, limits=Limits(pids=64, memory_bytes=512 << 20))
    tools = workspace.tools(["read"])
    assert (await tools.handle_tool_call("read", {"path": "page.html"})).content == "<p>"
    box = await engine.get("filled")
    await box.spawn("while :; do sleep 1000 & done 2> /dev/null")

    async def is_full() -> bool:
        with suppress(TooManyProcesses):
            await box.exec("true")
            return False
        return True

    await eventually(is_full, "no process can be started")
    assert workspace._dispatcher is not None
    await workspace._dispatcher.aclose()
    await eventually(is_full, "no process can be started")
    assert (await tools.handle_tool_call("read", {"path": "page.html"})).is_error
    assert (await tools.handle_tool_call("read", {"path": "page.html"})).content == "<p>"
