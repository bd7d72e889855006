"""Inspect's own checks of a sandbox, all of them: on this machine with two runtimes, and through a server."""

from __future__ import annotations

import pytest
from inspect_ai.util._sandbox import self_check
from inspect_ai.util._sandbox.self_check import *  # noqa: F403 - the checks, as Inspect says to run them

from atoll.integrations.inspect_ai import AtollSandboxConfig, AtollSandboxEnvironment

PLACES = ["crun", "runsc", "server"]


@pytest.fixture(scope="module", params=PLACES)
async def sample(request, make_state_dir, servers):
    """A sample's sandbox, made as Inspect makes it."""
    state_dir = make_state_dir()
    runtime = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATOLL_STATE_DIR", str(state_dir))
        if request.param == "server":
            runtime = "crun"
            server = servers(state_dir)
            patch.setenv("ATOLL_URL", server.url)
            patch.setenv("ATOLL_API_KEY", server.key)
        config = AtollSandboxConfig(runtime=runtime)
        await AtollSandboxEnvironment.task_init("startup", config)
        environments = await AtollSandboxEnvironment.sample_init("checks", config, {"__sample_id__": "1"})
        yield environments["default"]
        await AtollSandboxEnvironment.sample_cleanup("checks", config, environments, interrupted=False)
        await AtollSandboxEnvironment.task_cleanup("shutdown", config, cleanup=True)


@pytest.fixture
def sandbox_env(sample):
    return sample


def test_no_check_is_left_out():
    assert len(self_check.__all__) == 44
