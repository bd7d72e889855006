"""The sprites' tools on real sandboxes: every field does what its schema says."""

from __future__ import annotations

import functools
import http.server
import json
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

import atoll
from atoll.runtime.engine import LocalEngine
from atoll.tools.sprites import sprite_tools
from atoll.tools.tool import ToolSet
from tests.egress.world import SITE, World

if TYPE_CHECKING:
    from atoll.runtime.sandbox_pool import SandboxPool
    from tests.tools.conftest import Caller


@pytest.fixture(scope="module")
async def tools(pool: SandboxPool) -> ToolSet:
    tools = sprite_tools(pool)
    await tools.handle_tool_call("sprite_create", {"name": "first"})
    return tools


@pytest.mark.proves(
    "sprite_create.name", "sprite_create->id", "sprite_create->name", "sprite_create->status",
    "sprite_create->lastActivityAt", "sprite_create->createdAt", "sprite_list->sprites", "sprite_list->sprites.id",
    "sprite_list->sprites.name", "sprite_list->sprites.status", "sprite_list->sprites.lastActivityAt",
    "sprite_list->sprites.createdAt",
)  # fmt: skip
async def test_sprites_are_made_and_listed(call: Caller, tools: ToolSet, pool: SandboxPool) -> None:
    result = await call.raw(tools, "sprite_create", name="made")
    made = json.loads(result.text)
    assert made == result.structured
    assert (made["name"], made["status"]) == ("made", "running")
    assert made["id"] == (await pool.find("made")).id
    for moment in ("createdAt", "lastActivityAt"):
        assert made[moment].endswith("Z")
        assert datetime.now(UTC) - datetime.fromisoformat(made[moment]) < timedelta(minutes=2)
    listed = await call.raw(tools, "sprite_list")
    assert [sprite["name"] for sprite in json.loads(listed.text)] == ["first", "made"]
    assert listed.structured == {"sprites": json.loads(listed.text)}
    said = await call.error(tools, "sprite_create", name="made")
    assert said.startswith("Error: a sandbox named 'made' exists already")
    assert "allowed are" in await call.error(tools, "sprite_create", name="No Name")
    await pool.destroy("made")


@pytest.mark.proves(
    "sprite_exec.name", "sprite_exec.command", "sprite_exec.timeout", "sprite_exec->stdout", "sprite_exec->stderr",
    "sprite_exec->exitCode", "sprite_exec->durationMs",
)  # fmt: skip
async def test_a_command_runs_in_a_sprite_by_name_or_id(call: Caller, tools: ToolSet, pool: SandboxPool) -> None:
    ran = await call(tools, "sprite_exec", name="first", command="pwd; echo err >&2; sleep 0.2; exit 4")
    assert (ran["stdout"], ran["stderr"], ran["exitCode"]) == ("/home/user\n", "err\n", 4)
    assert 200 <= ran["durationMs"] < 30_000
    by_id = await call(tools, "sprite_exec", name=(await pool.find("first")).id, command="hostname")
    assert by_id["stdout"] == "tools.first\n"
    ran = await call(tools, "sprite_exec", name="first", command="echo begun; sleep 31537221", timeout=300)
    assert (ran["stdout"], ran["exitCode"]) == ("begun\n", 124)
    assert tools["sprite_exec"].input_schema()["properties"]["timeout"]["default"] == 30000
    said = await call.error(tools, "sprite_exec", name="fist", command="true")
    assert said == "Error: no sandbox is named 'fist' (sandboxes: 'first'); did you mean 'first'?"
    assert (await call.error(tools, "sprite_exec", name="first")).startswith("Error: the arguments of sprite_exec")


@pytest.mark.proves(
    "sprite_checkpoint.name", "sprite_checkpoint.checkpointName", "sprite_checkpoint->id",
    "sprite_checkpoint->spriteId", "sprite_checkpoint->name", "sprite_checkpoint->createdAt",
    "sprite_checkpoint->sizeBytes", "sprite_list_checkpoints->checkpoints.id",
    "sprite_list_checkpoints->checkpoints.spriteId", "sprite_list_checkpoints->checkpoints.name",
    "sprite_list_checkpoints->checkpoints.createdAt", "sprite_list_checkpoints->checkpoints.sizeBytes",
    "sprite_restore.name", "sprite_restore.checkpointId", "sprite_restore->message", "sprite_restore->id",
    "sprite_restore->name", "sprite_restore->status", "sprite_restore->lastActivityAt", "sprite_restore->createdAt",
    "sprite_list_checkpoints.name", "sprite_list_checkpoints->checkpoints", "sprite_fork.name", "sprite_fork.newName",
    "sprite_fork.checkpointId", "sprite_fork->id", "sprite_fork->name", "sprite_fork->status",
    "sprite_fork->lastActivityAt", "sprite_fork->createdAt",
)  # fmt: skip
async def test_a_sprite_goes_back_and_is_forked(call: Caller, tools: ToolSet, pool: SandboxPool) -> None:
    sprite = (await call(tools, "sprite_create", name="work"))["id"]
    await call(tools, "sprite_exec", name="work", command="echo one > state")
    one = await call(tools, "sprite_checkpoint", name="work", checkpointName="before")
    assert (one["spriteId"], one["name"]) == (sprite, "before")
    assert one["sizeBytes"] > 0
    await call(tools, "sprite_exec", name="work", command="echo two > state")
    two = await call(tools, "sprite_checkpoint", name="work")
    assert "name" not in two
    listed = await call.raw(tools, "sprite_list_checkpoints", name="work")
    assert [(each["id"], each.get("name")) for each in json.loads(listed.text)] == [
        (one["id"], "before"),
        (two["id"], None),
    ]
    assert all(each["sizeBytes"] > 0 for each in json.loads(listed.text))
    await call(tools, "sprite_exec", name="work", command="echo three > state")

    now = await call(tools, "sprite_fork", name="work", newName="now")
    assert (now["name"], now["status"]) == ("now", "running")
    assert now["id"] != sprite
    await call(tools, "sprite_fork", name="work", newName="then", checkpointId=two["id"])
    restored = await call(tools, "sprite_restore", name="work", checkpointId="before")
    assert restored["id"] == sprite
    assert one["id"] in restored["message"]
    for name, state in (("work", "one"), ("now", "three"), ("then", "two")):
        assert (await call(tools, "sprite_exec", name=name, command="cat state"))["stdout"] == f"{state}\n"

    assert "no checkpoint has the id or label 'befor'" in await call.error(
        tools, "sprite_restore", name="work", checkpointId="befor"
    )
    # A checkpoint is one sprite's, also by its id.
    assert "no checkpoint" in await call.error(tools, "sprite_restore", name="first", checkpointId=one["id"])
    said = await call.error(tools, "sprite_fork", name="first", newName="x", checkpointId=one["id"])
    assert "no checkpoint" in said
    assert "'now' exists already" in await call.error(tools, "sprite_fork", name="work", newName="now")
    assert "allowed are" in await call.error(tools, "sprite_checkpoint", name="work", checkpointName="A b")
    for name in ("work", "now", "then"):
        await pool.destroy(name)


@pytest.mark.proves(
    "sprite_shutdown.name", "sprite_shutdown->id", "sprite_shutdown->name", "sprite_shutdown->status",
    "sprite_shutdown->lastActivityAt", "sprite_shutdown->createdAt", "sprite_shutdown->message",
    "sprite_wake.name", "sprite_wake->id", "sprite_wake->name", "sprite_wake->status",
    "sprite_wake->lastActivityAt", "sprite_wake->createdAt", "sprite_wake->message",
)  # fmt: skip
async def test_a_sprite_is_shut_down_and_woken(call: Caller, tools: ToolSet) -> None:
    await call(tools, "sprite_exec", name="first", command="echo kept > kept")
    assert (await call(tools, "sprite_shutdown", name="first"))["status"] == "shutdown"
    assert [each["status"] for each in (await call(tools, "sprite_list"))["sprites"]] == ["shutdown"]
    assert "call sprite_wake" in await call.error(tools, "sprite_exec", name="first", command="true")
    assert (await call(tools, "sprite_wake", name="first"))["status"] == "running"
    assert (await call(tools, "sprite_exec", name="first", command="cat kept"))["stdout"] == "kept\n"


@pytest.mark.proves("sprite_destroy.name", "sprite_destroy->name", "sprite_destroy->message")
async def test_a_sprite_is_destroyed_with_its_checkpoints_and_its_forks_stay(
    call: Caller, tools: ToolSet, host: LocalEngine
) -> None:
    await call(tools, "sprite_create", name="old")
    await call(tools, "sprite_exec", name="old", command="echo kept > file")
    await call(tools, "sprite_checkpoint", name="old", checkpointName="one")
    await call(tools, "sprite_fork", name="old", newName="new", checkpointId="one")
    others = {each.id for each in await host.checkpoints() if not each.sandbox.endswith(".old")}
    done = await call(tools, "sprite_destroy", name="old")
    assert done == {"name": "old", "message": "old is destroyed, with its files and 1 checkpoint"}
    assert {each.id for each in await host.checkpoints()} == others
    assert "no sandbox is named 'old'" in await call.error(tools, "sprite_destroy", name="old")
    assert (await call(tools, "sprite_exec", name="new", command="cat file"))["stdout"] == "kept\n"
    await call(tools, "sprite_destroy", name="new")


async def test_sprites_of_another_session_are_not_there(call: Caller, tools: ToolSet, host: LocalEngine) -> None:
    async with host.pool("others") as others:
        theirs = sprite_tools(others)
        await call(theirs, "sprite_create", name="secret")
        made = await call(theirs, "sprite_checkpoint", name="secret")
        id = (await others.find("secret")).id
        assert [each["name"] for each in (await call(tools, "sprite_list"))["sprites"]] == ["first"]
        for name in ("secret", "others.secret", id, "../secret"):
            said = await call.error(tools, "sprite_exec", name=name, command="true")
            assert said == f"Error: no sandbox is named {name!r} (sandboxes: 'first')"
        said = await call.error(tools, "sprite_restore", name="first", checkpointId=made["id"])
        assert said == f"Error: no checkpoint has the id or label {made['id']!r} (checkpoints: there are none)"
        await others.aclose()


# -------------------------------------------------------------------------------------------------------- repositories


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A Git repository behind a web server; gives the server's port."""
    base = tmp_path_factory.mktemp("repository")
    make = """
        git -c init.defaultBranch=main init -q project && cd project && echo 'hello from git' > README
        git add . && git -c user.name=t -c user.email=t@example.com commit -qm first
        cd .. && git clone -q --bare project project.git && cd project.git && git update-server-info
    """
    subprocess.run(["sh", "-ec", make], cwd=base, check=True)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(base))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture
async def online(host: LocalEngine, repository: int) -> AsyncIterator[SandboxPool]:
    """A session that may reach `git.example.com` and nothing else."""
    world = World()
    world.name("git.example.com", [SITE])
    world.name("elsewhere.example.com", [SITE])
    world.servers = {("*", 80): repository}
    host.egress_servers.connector = world.connector
    async with host.pool("online", network=atoll.NetworkPolicy(allow=["git.example.com"])) as pool:
        yield pool
        await pool.aclose()
    host.egress_servers.connector = None


@pytest.mark.proves("sprite_create.repoUrl", "sprite_create->directory")
async def test_a_repository_is_cloned_through_the_policy(call: Caller, online: SandboxPool) -> None:
    tools = sprite_tools(online)
    made = await call(tools, "sprite_create", name="cloned", repoUrl="http://git.example.com/project.git")
    assert made["directory"] == "/home/user/project"
    ran = await call(tools, "sprite_exec", name="cloned", command="cat project/README; git -C project status -s")
    assert (ran["stdout"], ran["stderr"]) == ("hello from git\n", "")

    said = await call.error(tools, "sprite_create", name="not", repoUrl="http://elsewhere.example.com/project.git")
    assert "no sprite was created" in said
    assert "network policy" in said
    said = await call.error(tools, "sprite_create", name="not", repoUrl="http://git.example.com/absent.git")
    assert "git printed" in said
    for url in ("ext::sh -c id", "--upload-pack=id", "file:///etc", "git@x:y", "ssh://x/y", "http://", "http://[", "x"):
        assert "must be an https or http URL" in await call.error(tools, "sprite_create", name="not", repoUrl=url), url
    assert [each.name for each in await online.list()] == ["cloned"]


async def test_without_a_network_no_sprite_is_left_half_made(call: Caller, tools: ToolSet, pool: SandboxPool) -> None:
    said = await call.error(tools, "sprite_create", name="half", repoUrl="https://git.example.com/project.git")
    assert "have no network" in said
    assert "git.example.com" in said
    assert [each.name for each in await pool.list()] == ["first"]
