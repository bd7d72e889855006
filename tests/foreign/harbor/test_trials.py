"""Trials of Harbor in sandboxes of Atoll, with Harbor's own agents `oracle` and `nop`, and one that is scripted; and
what the environment promises besides. Harbor publishes no suite for environments.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from examples.integrations import harbor_trial as example
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.config import AgentConfig
from harbor.models.trial.paths import TrialPaths

import atoll
from atoll.integrations.harbor import AtollEnvironment
from atoll.testing.server import running_server
from atoll.testing.waiting import eventually

pytestmark = pytest.mark.anyio

SERVER_PYTHON = str(Path(__file__).parents[3] / ".venv/bin/python")
"""What `atoll serve` needs is not in the environment of a framework, and may be forbidden there."""


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def settings(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_STATE_DIR", str(state_dir))


class ScriptedAgent(BaseAgent):
    """Runs the commands of a script, as a model would ask for them."""

    def __init__(self, logs_dir: Path, commands: list[str], **kwargs: object) -> None:
        super().__init__(logs_dir=logs_dir, **kwargs)
        self._commands = commands

    @staticmethod
    def name() -> str:
        return "scripted"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        return

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        for command in self._commands:
            await environment.exec(command)


def scripted(*commands: str) -> AgentConfig:
    return AgentConfig(import_path=f"{__name__}:ScriptedAgent", kwargs={"commands": list(commands)})


async def sandboxes() -> list[str]:
    async with atoll.open() as engine:
        return [each.name for each in await engine.list()]


@pytest.mark.parametrize("runtime", ["crun", "runsc"])
async def test_a_solution_is_rewarded_and_nothing_is_not(tmp_path: Path, runtime: str) -> None:
    right, wrong = await asyncio.gather(
        example.play(tmp_path / "oracle", runtime=runtime),
        example.play(tmp_path / "nop", AgentConfig(name="nop"), runtime=runtime),
    )
    for result, reward in ((right, 1), (wrong, 0)):
        assert result.exception_info is None
        assert result.verifier_result is not None
        assert result.verifier_result.rewards == {"reward": reward}
    assert [path.read_text() for path in tmp_path.glob("oracle/*/agent/oracle.txt")] == ["solved\n"]
    assert await sandboxes() == []


async def test_an_interrupted_trial_leaves_no_sandbox(tmp_path: Path) -> None:
    trial = asyncio.create_task(example.play(tmp_path, scripted("touch /tmp/begun", "sleep 600")))

    async def begun() -> bool:
        async with atoll.open() as engine:
            for info in await engine.list():
                if await (await engine.get(info.name)).files.exists("/tmp/begun"):
                    return True
        return False

    await eventually(begun, "the agent works")
    trial.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trial
    assert await sandboxes() == []


def make(tmp_path: Path, *, files: dict[str, str] | None = None, **options: object) -> AtollEnvironment:
    directory = tmp_path / "environment"
    directory.mkdir(exist_ok=True)
    for name, text in (files or {}).items():
        (directory / name).write_text(text)
    config = options.pop("config", None) or EnvironmentConfig(docker_image="host", workdir="/app", env={"TASK": "task"})
    return AtollEnvironment(
        environment_dir=directory,
        environment_name="a-task",
        session_id="a-task__x1__env",
        trial_paths=TrialPaths(tmp_path),
        task_env_config=config,
        **options,
    )


@pytest.fixture(params=["crun", "runsc"])
async def environment(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AtollEnvironment]:
    environment = make(tmp_path, runtime=request.param, persistent_env={"RUN": "run"}, network_policy=NO_NETWORK)
    await environment.start(force_build=False)
    yield environment
    await environment.stop(delete=True)
    await environment.stop(delete=True)


NO_NETWORK = NetworkPolicy(network_mode=NetworkMode.NO_NETWORK)


async def test_what_an_environment_promises(environment: AtollEnvironment, tmp_path: Path) -> None:
    ran = await environment.exec("pwd; id -un; echo $TASK $RUN $CALL; echo error >&2; exit 3", env={"CALL": "call"})
    assert (ran.stdout, ran.stderr, ran.return_code) == ("/app\nroot\ntask run call\n", "error\n", 3)
    assert (await environment.exec("id -u; pwd", user=1000, cwd="/tmp")).stdout == "1000\n/tmp\n"
    with environment.with_default_user("user"), environment.scoped_exec_env({"CALL": "scoped"}):
        assert (await environment.exec("id -un; echo $CALL", env={"CALL": "call"})).stdout == "user\nscoped\n"
    with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
        await environment.exec("sleep 3333 & sleep 3333", timeout_sec=1)
    assert (await environment.exec("pgrep -fx 'sleep 3333'")).return_code == 1

    pieces: list[tuple[str, str]] = []

    async def told(text: str, stream: str) -> None:
        pieces.append((stream, text))

    with environment.scoped_output_callback(told):
        ran = await environment.exec("echo out; echo err >&2")
    assert sorted(pieces) == [("stderr", "err\n"), ("stdout", "out\n")]
    assert ran.stdout == "out\n"

    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub/binary").write_bytes(bytes(range(256)))
    (source / "run.sh").write_text("echo ran\n")
    (source / "run.sh").chmod(0o755)
    await environment.exec("mkdir -p /up/sub; echo old > /up/sub/kept; echo old > /up/run.sh")
    await environment.upload_dir(source, "/up")
    assert (await environment.exec("cat sub/kept; ./run.sh; wc -c < sub/binary", cwd="/up")).stdout == "old\nran\n256\n"
    await environment.upload_file(source / "run.sh", "/new/place/run")
    assert await environment.is_file("/new/place/run")
    assert await environment.is_dir("/new/place")
    target = tmp_path / "target"
    (target / "sub").mkdir(parents=True)
    (target / "sub/here").write_text("here")
    (target / "run.sh").write_text("here")
    await environment.exec("ln -s binary sub/link; mkfifo sub/pipe; chmod 700 .", cwd="/up", user="root")
    await environment.download_dir("/up", target)
    assert sorted(path.name for path in target.rglob("*")) == ["binary", "here", "kept", "link", "run.sh", "sub"]
    assert (target / "sub/binary").read_bytes() == bytes(range(256))
    assert (target / "run.sh").read_text() == "echo ran\n"
    await environment.download_file("/up/sub/kept", tmp_path / "deep/er/kept")
    assert (tmp_path / "deep/er/kept").read_text() == "old\n"

    assert (await environment.box.status(), environment.box.info.network) == ("running", None)
    hosts = NetworkPolicy(
        network_mode=NetworkMode.ALLOWLIST, allowed_hosts=["example.com", "*.example.org", "192.0.2.0/24"]
    )
    for policy, allowed in ((hosts, hosts.allowed_hosts), (NetworkPolicy(), ["*"])):
        await environment.set_network_policy(policy)
        await environment.box.status()
        network = environment.box.info.network
        assert network is not None
        assert list(network.allow) == allowed


async def test_no_symlink_leads_out_of_where_a_directory_was_downloaded_to(
    environment: AtollEnvironment, tmp_path: Path
) -> None:
    """Each download is harmless by itself; the second one's link would be placed through the first one's."""
    (tmp_path / "secret").write_text("of the host")
    target = tmp_path / "logs"
    await environment.exec("mkdir -p /l/d /l/x; ln -s ../x /l/d/e; mkdir -p /m/d/e; ln -s ../../secret /m/d/e/link")
    await environment.download_dir("/l", target)
    await environment.download_dir("/m", target)
    assert not (target / "d/e").is_symlink()
    assert [path.resolve() for path in target.rglob("link")] == [target / "secret"]
    await environment.exec("ln -s ../../../secret /m/d/e/out")
    with pytest.raises(atoll.PermissionDenied):
        await environment.download_dir("/m", target)


async def test_limits_and_images_are_the_tasks_unless_the_run_says_otherwise(tmp_path: Path) -> None:
    config = EnvironmentConfig(cpus=2, memory_mb=256)
    environment = make(tmp_path, config=config, image="host", files={"Dockerfile": "FROM x\n"})
    await environment.start(force_build=False)
    limits = environment.box.info.limits
    assert (limits.cpus, limits.memory_bytes) == (2, 256 * 1024 * 1024)
    await environment.stop(delete=False)
    (kept,) = await sandboxes()
    async with atoll.open() as engine:
        await engine.destroy(kept)
    with pytest.raises(RuntimeError, match="not running"):
        await environment.exec("true")

    with pytest.raises(ValueError, match="Dockerfile is not built by the environment 'atoll'"):
        make(tmp_path, config=EnvironmentConfig())
    (tmp_path / "environment/Dockerfile").unlink()
    with pytest.raises(FileNotFoundError, match="names no image"):
        make(tmp_path, config=EnvironmentConfig())
    missing = make(tmp_path, config=EnvironmentConfig(docker_image="docker-archive:/nowhere.tar"))
    with pytest.raises(atoll.ImageUnavailable):
        await missing.start(force_build=False)
    assert await sandboxes() == []


async def test_the_sandbox_may_be_of_a_server(
    make_state_dir: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(make_state_dir(), python=SERVER_PYTHON) as server:
        monkeypatch.setenv("ATOLL_URL", server.url)
        monkeypatch.setenv("ATOLL_API_KEY", server.key)
        result = await example.play(tmp_path)
        assert result.verifier_result is not None, result.exception_info
        assert result.verifier_result.rewards == {"reward": 1}
        async with atoll.connect() as engine:
            assert await engine.list() == []
