"""Agents of Pydantic AI in sandboxes of Atoll: what its conformance suite does not see."""

from __future__ import annotations

import ast
import contextlib
import errno
import re
import runpy
from pathlib import Path

import anyio
import pytest
from pydantic_ai import Agent, ModelResponse, TextPart
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.workspaces import (
    WorkspaceOutputLimitError,
    WorkspaceRef,
    WorkspaceTimeoutError,
    WorkspaceUnavailableError,
)

import atoll
from atoll.integrations.pydantic_ai import MAX_OUTPUT_BYTES, AtollWorkspace, AtollWorkspaceBackend

EXAMPLE = Path(__file__).parents[3] / "examples" / "integrations" / "pydantic_workspace.py"
PAGE = EXAMPLE.parents[2] / "docs" / "integrations.md"


@pytest.fixture
async def backend(host):
    backend = AtollWorkspaceBackend(engine=host)
    yield backend
    if backend.ref is not None:
        with contextlib.suppress(atoll.SandboxNotFound):
            await host.destroy(backend.ref.id)


async def test_nothing_of_a_command_is_left_that_was_stopped(backend):
    async def running():
        return (await backend.run(["ps", "ax"])).stdout

    with pytest.raises(WorkspaceTimeoutError) as timeout:
        await backend.run("echo begun; echo bad >&2; setsid sleep 987 & sleep 987", shell=True, timeout=1)
    assert (timeout.value.stdout, timeout.value.stderr) == ("begun\n", "bad\n")
    with pytest.raises(WorkspaceOutputLimitError) as limit:
        await backend.run("setsid sleep 987 & yes", shell=True, timeout=60)
    assert limit.value.limit == MAX_OUTPUT_BYTES
    assert limit.value.stdout.startswith("y\ny\n")
    with anyio.move_on_after(0.5):
        await backend.run("setsid sleep 987 & sleep 987", shell=True)
    assert "987" not in await running()
    assert len((await backend.run(["head", "-c", str(MAX_OUTPUT_BYTES), "/dev/zero"])).stdout) == MAX_OUTPUT_BYTES


async def test_paths_that_are_not_what_they_seem(backend):
    home = await backend.working_dir()
    await backend.run(
        "mkdir d; ln -s / root; ln -s . here; ln -s loop loop; touch d/f; ln -s ../d/f d/link", shell=True
    )
    for path in (f"{home}/", f"{home}/d/..", f"{home}/here/.", f"{home}/root{home}", "/", "//"):
        with pytest.raises(ValueError, match="cannot be removed"):
            await backend.remove(path)
    with pytest.raises(OSError) as error:  # noqa: PT011 - its number says which
        await backend.realpath(f"{home}/loop/x")
    assert error.value.errno == errno.ELOOP
    assert not await backend.exists(f"{home}/loop")
    assert await backend.realpath(f"{home}/d/link") == f"{home}/d/f"
    await backend.remove(f"{home}/root")
    assert await backend.exists("/etc/passwd")
    with pytest.raises(NotADirectoryError):
        await backend.make_dir(f"{home}/d/f/below")
    for timeout in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout"):
            await backend.run(["true"], timeout=timeout)


async def test_a_workspace_that_cannot_be_had_says_why(host, backend):
    for options in ({"image": "tar:/nowhere.tar"}, {"runtime": "bwrap", "limits": atoll.Limits(disk_bytes=1 << 30)}):
        with pytest.raises((WorkspaceUnavailableError, ValueError)):
            await AtollWorkspaceBackend(engine=host, options=options).working_dir()
    other = WorkspaceRef(provider="docker", id="x")
    workspace = AtollWorkspace(engine=host)
    assert workspace.get_workspace(None, ref=other) is None
    for refused in (workspace.backend, lambda ref: AtollWorkspaceBackend(ref=ref)):
        with pytest.raises(ValueError, match="docker"):
            refused(other)
    with pytest.raises(ValueError, match="docker"):
        await workspace.destroy(other)

    await backend.working_dir()
    await workspace.destroy(backend.ref)
    await workspace.destroy(backend.ref)
    for use in (backend.run(["true"]), backend.read_bytes("/etc/passwd"), workspace.backend(backend.ref).working_dir()):
        with pytest.raises(WorkspaceUnavailableError):
            await use


async def test_runs_share_an_engine_and_have_a_sandbox_each(state_dir, servers, monkeypatch, make_state_dir):
    """Engines that nobody gives: that of this machine's settings, then that of a server."""
    agent = Agent(FunctionModel(lambda messages, info: ModelResponse(parts=[TextPart("done")])))
    workspace = AtollWorkspace()

    async def run(names):
        result = await agent.run("go", capabilities=[workspace])
        await result.workspace.write_bytes("note", b"x")
        names.append(result.workspace.ref)

    async def both():
        refs = []
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(run, refs)
        assert len({ref.id for ref in refs}) == 2
        for ref in refs:
            await workspace.destroy(ref)

    monkeypatch.setenv("ATOLL_STATE_DIR", str(state_dir))
    await anyio.to_thread.run_sync(anyio.run, both)
    server = servers(make_state_dir())
    monkeypatch.setenv("ATOLL_STATE_DIR", "/nowhere")
    monkeypatch.setenv("ATOLL_URL", server.url)
    monkeypatch.setenv("ATOLL_API_KEY", server.key)
    await anyio.to_thread.run_sync(anyio.run, both)


async def test_the_page_is_true(host, state_dir, monkeypatch):
    monkeypatch.setenv("ATOLL_STATE_DIR", str(state_dir))
    section = PAGE.read_text().partition("\n## Pydantic AI\n")[2].partition("\n## ")[0]
    [snippet] = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    names = {"__name__": "page"}
    await eval(compile(snippet, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    assert names["first"].workspace.ref == names["second"].workspace.ref
    with pytest.raises(atoll.SandboxNotFound):
        await host.get(names["ref"].id)


def test_the_example_runs_offline(state_dir, monkeypatch, capsys):
    monkeypatch.setenv("ATOLL_STATE_DIR", str(state_dir))
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out == "It wrote: 1\nIt wrote: a note\n"
