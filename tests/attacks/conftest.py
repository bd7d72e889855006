"""What the attacks share: programs to attack with, and a bystander that no attack may harm.

Every test here ends with the same question to the bystander, a sandbox of the same runtime that took no part, and to
the sandbox that most attacks share, where the test used it: do you still answer, and are you still the same process?
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import atoll
from atoll.contract.errors import SandboxNotFound
from atoll.contract.model import RuntimeName
from atoll.runtime.interface import Engine
from atoll.runtime.sandbox import Sandbox
from atoll.settings import Settings
from tests.attacks.programs import PROBE, build


@pytest.fixture(scope="session")
def probe_program(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """`probe.c`, compiled: static, so that it runs in any image."""
    return build(Path(__file__).parent / "probe.c", tmp_path_factory.mktemp("probe"))


@pytest.fixture(scope="session")
def hostile_program(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """`hostile.c`, compiled: a guest that plays a script."""
    return build(Path(__file__).parent / "hostile.c", tmp_path_factory.mktemp("hostile"))


async def _settle(sandbox: Sandbox, most: int) -> None:
    """Let gVisor make the processes that it holds for programs on the host. It keeps them for the next: no leak."""
    if sandbox.info.runtime == "runsc":
        await sandbox.exec(f"for i in $(seq {most}); do sleep 0.2 & done; wait", timeout_s=20)


@pytest.fixture(scope="package")
async def engine(runtime_name: RuntimeName, state_dir: Path) -> AsyncIterator[Engine]:
    """One for all attacks: most of them leave no trace, so that the same two sandboxes serve all files."""
    async with atoll.open(state_dir, settings=Settings(runtime=runtime_name)) as engine:
        yield engine
        for info in await engine.list():
            with suppress(SandboxNotFound):
                await engine.destroy(info.name)
        await engine.remove_abandoned()


@pytest.fixture(scope="package")
async def bystander(engine: Engine) -> AsyncIterator[Sandbox]:
    """A sandbox that takes no part."""
    async with await engine.create() as sandbox:
        await _settle(sandbox, 6)
        yield sandbox


@pytest.fixture(scope="package")
async def prey(engine: Engine, probe_program: bytes) -> AsyncIterator[Sandbox]:
    """A sandbox with the probe in it that all attacks share. It has to survive every test that uses it."""
    async with await engine.create() as sandbox:
        await _settle(sandbox, 16)
        await sandbox.files.write_bytes(PROBE, probe_program, mode=0o755)
        yield sandbox


@pytest.fixture(scope="package")
async def listening(prey: Sandbox) -> None:
    """Somebody listens for clients of previews, from before the first test that needs it to the end of the runtime."""
    await prey.expose(1)


@pytest.fixture
def no_bugs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a client or a server of a preview does is an error of ours."""
    yield
    assert [
        record.getMessage() for record in caplog.records if record.name.startswith("atoll.runtime.previews.router")
    ] == []


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
