"""What the attacks share: programs to attack with, and a bystander that no attack may harm.

Every test here ends with the same question to the bystander, a sandbox of the same runtime that took no part, and to
the module's shared sandbox where the test used it: do you still answer, and are you still the same process?
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll.runtime.host import Runtime
from atoll.runtime.sandbox import Sandbox
from tests.attacks.programs import PROBE, build


@pytest.fixture(scope="session")
def probe_program(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """`probe.c`, compiled: static, so that it runs in any image."""
    return build(Path(__file__).parent / "probe.c", tmp_path_factory.mktemp("probe"))


@pytest.fixture(scope="session")
def hostile_program(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """`hostile.c`, compiled: a guest that plays a script."""
    return build(Path(__file__).parent / "hostile.c", tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="module")
async def bystander(runtime: Runtime) -> AsyncIterator[Sandbox]:
    """A sandbox that takes no part."""
    async with await runtime.create() as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
async def prey(shared: Sandbox, probe_program: bytes) -> Sandbox:
    """The module's shared sandbox, with the probe in it. It has to survive every test that uses it."""
    await shared.files.write_bytes(PROBE, probe_program, mode=0o755)
    return shared


@pytest.fixture
async def victim(sandbox: Sandbox, probe_program: bytes) -> Sandbox:
    """A fresh sandbox with the probe in it, which the test may break."""
    await sandbox.files.write_bytes(PROBE, probe_program, mode=0o755)
    return sandbox


@pytest.fixture(autouse=True)
async def _nobody_else_is_harmed(request: pytest.FixtureRequest, bystander: Sandbox) -> AsyncIterator[None]:
    watched = [bystander]
    if "prey" in request.fixturenames:
        watched.append(request.getfixturevalue("prey"))
    before = [sandbox.info.pid for sandbox in watched]
    yield
    for sandbox, pid in zip(watched, before, strict=True):
        said = await sandbox.exec(["echo", "alive"], timeout_s=20)
        assert said.stdout == "alive\n"
        assert sandbox.info.pid == pid
