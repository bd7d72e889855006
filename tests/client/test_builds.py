"""Templates and builds of a server, for a client: files are sent once, logs are followed across restarts, and a build
ends with its caller."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

import anyio
import pytest

import atoll
from atoll.builds.builder import BuildOptions
from atoll.builds.context import BuildContext
from atoll.builds.dockerfile import parse_dockerfile
from atoll.builds.remote import build_on_server
from atoll.client import builds
from atoll.client.engine import RemoteEngine, connect
from atoll.contract.errors import BuildFailed, BuildNotFound, InvalidRequest, TemplateNotFound
from atoll.contract.model import BuildLogLine, TemplateVersion
from atoll.testing.server import running_server
from atoll.testing.serving import ServerProcess
from atoll.testing.waiting import BOUND_S, eventually


@pytest.fixture(scope="module")
def server(servers: Callable[[Path], ServerProcess], state_dir: Path) -> ServerProcess:
    return servers(state_dir)


@pytest.fixture
async def remote(server: ServerProcess) -> AsyncIterator[RemoteEngine]:
    async with connect(server.url, server.key) as engine:
        remote = cast("RemoteEngine", engine)
        yield remote
        for each in await remote.templates.list():
            await remote.templates.remove(each.name)
        await remote.templates.remove_unneeded()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("a\n")
    return tmp_path


async def build(
    engine: RemoteEngine, text: str, root: Path, name: str = "web", **options: object
) -> tuple[TemplateVersion, list[BuildLogLine]]:
    files, lines = BuildContext(root), list[BuildLogLine]()
    version = await build_on_server(
        engine,
        parse_dockerfile(text, pack=files.pack),
        files,
        name=name,
        tags=["default"],
        options=BuildOptions(**options),  # type: ignore[arg-type]
        on_line=lines.append,
    )
    return version, lines


async def test_a_template_is_built_from_files_here_used_tagged_and_removed(remote: RemoteEngine, root: Path) -> None:
    text = "FROM host\nCOPY . /srv/\nRUN cat /srv/a.txt\nCMD sleep 1000"
    sent: list[int] = []

    def progress(_what: str, done: int, _total: int | None) -> None:
        sent.append(done)

    version, lines = await build(remote, text, root, progress=progress)
    assert sent
    assert [line.text for line in lines if line.kind == "output"] == ["a"]
    assert await remote.templates.version("web") == version
    sent.clear()
    _, lines = await build(remote, text, root, "again", progress=progress)
    assert (sent, [line.step for line in lines if line.kind == "cached"]) == ([], [1, 2]), (
        "nothing is sent or run again"
    )
    await remote.templates.tag("web", ["v1", "v2"])
    assert set((await remote.templates.get("web")).versions) == {"default", "v1", "v2"}
    async with remote.create(image="template:web:v2") as sandbox:
        assert (await sandbox.exec("cat /srv/a.txt")).stdout == "a\n"
    await remote.templates.remove("web:v1")
    with pytest.raises(TemplateNotFound, match=r"no template 'web:v1'; there are: web:default, web:v2"):
        await remote.templates.version("web:v1")
    await remote.templates.remove("web")
    with pytest.raises(TemplateNotFound, match="no template 'web'; there are: again"):
        await remote.templates.get("web")
    with pytest.raises(TemplateNotFound, match="no template 'web'; there are: again"):
        await remote.templates.remove("web")
    with pytest.raises(BuildNotFound):
        await remote.builds.get("0")


async def test_what_fails_there_is_raised_here(remote: RemoteEngine, root: Path) -> None:
    with pytest.raises(BuildFailed, match=r"(?s)^step 1 of 1: RUN echo why; exit 3 failed .*\nwhy$") as failed:
        await build(remote, "FROM host\nRUN echo why; exit 3", root)
    assert failed.value.step == 1
    with pytest.raises(BuildFailed, match=r"did not end within 0\.5 s"):
        await build(remote, "FROM host\nRUN sleep 1000", root, step_timeout_s=0.5)
    with pytest.raises(TemplateNotFound):
        await build(remote, "FROM template:none", root)
    with pytest.raises((InvalidRequest, atoll.RuntimeUnavailable), match="docker"):
        await build(remote, "FROM host", root, runtime="docker")


async def test_a_build_ends_with_its_caller(remote: RemoteEngine, root: Path) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(build, remote, "FROM host\nRUN sleep 1000", root)

        async def runs() -> bool:
            return any(each.step == 1 for each in await remote.builds.list() if each.status == "building")

        await eventually(runs, "the step runs")
        tasks.cancel_scope.cancel()
    assert [each.status for each in await remote.builds.list()][-1] == "cancelled"
    assert await remote.list() == []


async def test_a_build_that_its_servers_end_interrupts_is_said_to_be_that(
    make_state_dir: Callable[[], Path], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "RETRY_S", BOUND_S)  # a start takes long on a busy machine
    state_dir, failures = make_state_dir(), list[BuildFailed]()
    with running_server(state_dir) as first:
        async with connect(first.url, first.key) as engine, anyio.create_task_group() as tasks:
            remote, begun = cast("RemoteEngine", engine), anyio.Event()

            async def run() -> None:
                files = BuildContext(root)
                plan = parse_dockerfile("FROM host\nRUN echo begun; sleep 1000")

                def see(line: BuildLogLine) -> None:
                    if line.text == "begun":
                        begun.set()

                try:
                    await build_on_server(remote, plan, files, name="x", tags=["a"], on_line=see)
                except BuildFailed as error:
                    failures.append(error)

            tasks.start_soon(run)
            await begun.wait()
            await anyio.to_thread.run_sync(first.kill)
            await anyio.to_thread.run_sync(first.start)

            async def told() -> bool:
                return bool(failures)

            await eventually(told, "the client has found the server again")
    assert "the build was interrupted" in failures[0].message
