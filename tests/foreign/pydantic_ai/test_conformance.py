"""Pydantic AI's conformance suite of workspaces, all of it: on this machine with two runtimes, and through a server."""

from __future__ import annotations

import contextlib

import pytest
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

import atoll
from atoll.integrations.pydantic_ai import AtollWorkspace, AtollWorkspaceBackend

PLACES = ["crun", "runsc", "server"]


@pytest.fixture(scope="module", params=PLACES)
async def workspaces(request, make_state_dir, servers):
    state_dir = make_state_dir()
    runtime = "crun" if request.param == "server" else request.param
    settings = atoll.Settings(runtime=runtime, state_dir=state_dir)
    if request.param == "server":
        server = servers(state_dir)
        opening = atoll.connect(server.url, server.key, settings=settings)
    else:
        opening = atoll.open(settings=settings)
    async with opening as engine:
        yield AtollWorkspace(engine=engine, options={"runtime": runtime})
        for info in await engine.list():
            await engine.destroy(info.name)


@pytest.fixture(scope="module")
def shared_backend(workspaces):
    return AtollWorkspaceBackend(engine=workspaces.engine, options=workspaces.options)


class TestAtollWorkspace(WorkspaceBackendSuite):
    @pytest.fixture
    def backend(self, shared_backend):
        return shared_backend

    @pytest.fixture
    def fresh_backend(self, workspaces):
        return lambda: AtollWorkspaceBackend(engine=workspaces.engine, options=workspaces.options)

    @pytest.fixture
    def attach_backend(self, workspaces):
        return workspaces.backend

    @pytest.fixture
    def destroy_environment(self, workspaces):
        async def destroy(backend):
            with contextlib.suppress(atoll.SandboxNotFound):
                await workspaces.destroy(backend.ref)

        return destroy


def test_no_rule_is_left_out():
    assert len([name for name in dir(TestAtollWorkspace) if name.startswith("test_")]) == 40
