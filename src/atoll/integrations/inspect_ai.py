"""Sandboxes of Atoll for Inspect: `sandbox="atoll"` in a task, a sample or on the command line of `inspect eval`.

Owns the provider that Inspect finds through the entry point `atoll` in the group `inspect_ai`, and its configuration.
All samples of an event loop share one engine: that of this machine or, where ATOLL_URL is set, that of the server. Each
sample has sandboxes of its own, which end with the sample, and at the latest with this process, however that ends. Not
here: what a sandbox promises (`runtime/sandbox.py`), and the operator's settings, which hold for what the configuration
leaves out (`settings.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, overload
from weakref import WeakKeyDictionary

import anyio
from pydantic import BaseModel, ConfigDict, Field

import atoll
from atoll.contract.errors import install_extra

try:
    import yaml
    from inspect_ai.util import (
        ExecResult,
        OutputLimitExceededError,
        SandboxConnection,
        SandboxEnvironment,
        SandboxEnvironmentConfigType,
        SandboxEnvironmentLimits,
        SandboxUnavailableError,
        sandboxenv,
    )
except ModuleNotFoundError as error:
    missing = (error.name or "a package").partition(".")[0]
    raise ImportError(f"{__name__} needs {missing}, which is not installed; {install_extra('inspect')}") from error

logger = logging.getLogger(__name__)

_DEFAULT = "default"
"""The sandbox that Inspect uses where none is named."""
_SERVICE, _TASK, _SAMPLE = "inspect-ai/service", "inspect-ai/task", "inspect-ai/sample"
"""Labels. Every sandbox that Inspect has made has all three."""
_NOT_STARTED = 126
"""The exit code of a command that could not be started, as in a shell."""


class HostVariable(BaseModel):
    """A secret whose value is a variable of the process that runs Inspect. The value is in no log and no sandbox."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    variable: str = Field(min_length=1)
    """The name of the variable."""
    hosts: tuple[str, ...] = Field(min_length=1)
    """The hosts that the value is sent to, as in `atoll.Secret`."""
    header: str = "authorization"
    """The only header in which it is sent."""


class AtollService(BaseModel):
    """One sandbox of a sample. What is unset is as in `Engine.create`: what the operator's settings say, else Atoll's
    defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str | None = None
    runtime: str | None = None
    limits: atoll.Limits | None = None
    env: dict[str, str] = Field(default_factory=dict)
    """For every command. It is in the log of the evaluation: values that must not be seen there are `secrets`."""
    secrets: dict[str, HostVariable] = Field(default_factory=dict)
    """By the variable that has the placeholder inside."""
    user: str | None = None
    cwd: str | None = None
    """Where commands start and relative paths begin. Unset: the image's directory, else the user's home."""
    network: atoll.NetworkPolicy | None = None
    """Unset: no connection leaves the sandbox."""
    mounts: tuple[atoll.Mount, ...] = ()
    from_checkpoint: str | None = None
    """The checkpoint that it begins as, by id or label. `image` and `runtime` cannot be given then."""

    def __hash__(self) -> int:  # Inspect keeps configurations in sets
        return hash(self.model_dump_json())


class AtollSandboxConfig(AtollService):
    """The sandboxes of a sample: the one that the fields describe, which Inspect calls `default`, and `services`.

    `SandboxEnvironmentSpec("atoll", AtollSandboxConfig(…))`, or the same in a YAML file: `("atoll", "atoll.yaml")`.
    """

    services: dict[str, AtollService] = Field(default_factory=dict)
    """More sandboxes, by the name that `sandbox(NAME)` has for them. No network connects them."""


class _Shared:
    """The engine that all samples of an event loop share, and the sandboxes that it has for them."""

    by_loop: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.tasks = 0
        """How often `task_init` was called without its `task_cleanup`."""
        self.sandboxes: dict[str, atoll.Sandbox] = {}
        """Those that exist, by id."""
        self._engine: atoll.Engine | None = None
        self._opening = asyncio.Lock()

    @classmethod
    def here(cls) -> _Shared:
        """
        Raises:
            RuntimeError: the event loop is not asyncio's.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError("the sandbox 'atoll' needs Inspect's async backend 'asyncio'") from None
        return cls.by_loop.setdefault(loop, cls())

    async def engine(self) -> atoll.Engine:
        async with self._opening:
            if self._engine is None:
                self._engine = await _open()
            return self._engine

    async def destroy(self, sandboxes: list[atoll.Sandbox]) -> None:
        async with anyio.create_task_group() as group:
            for box in sandboxes:
                group.start_soon(self._destroy, box)

    async def _destroy(self, box: atoll.Sandbox) -> None:
        await box.destroy()
        self.sandboxes.pop(box.id, None)

    async def close_if_unused(self) -> None:
        if self.tasks or self.sandboxes:
            return
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.aclose()


@sandboxenv(name="atoll")
class AtollSandboxEnvironment(SandboxEnvironment):
    """A sandbox of Atoll as Inspect sees it. What each method promises is said in `SandboxEnvironment`."""

    def __init__(self, box: atoll.Sandbox) -> None:
        super().__init__()
        self.box = box
        """The sandbox itself, for what Inspect has no method for: `sandbox().as_type(AtollSandboxEnvironment).box`."""

    # ----------------------------------------------------------------------------------------------- its life

    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:
        """Check the configuration and fetch its images, once for all samples.

        Raises:
            TypeError, ValueError: it is no configuration, or a variable that it names is not set.
            What `Engine.create` would raise of it.
        """
        shared = _Shared.here()
        shared.tasks += 1
        try:
            engine = await shared.engine()
            for service in _services(config).values():
                options = _options(service)
                if service.from_checkpoint is None:
                    await engine.check_options(options)
                    await engine.images.resolve(service.image or engine.default_image)
        except BaseException:
            shared.tasks -= 1
            with anyio.CancelScope(shield=True):
                await shared.close_if_unused()
            raise

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        shared = _Shared.here()
        made: dict[str, SandboxEnvironment] = {}
        try:
            engine = await shared.engine()
            for name, service in _services(config).items():
                labels = {
                    _SERVICE: _label(name),
                    _TASK: _label(task_name),
                    _SAMPLE: _label(metadata.get("__sample_id__", "")),
                }
                options = _options(service)
                box = await engine.create(
                    **options, from_checkpoint=service.from_checkpoint, labels=labels, ephemeral=True
                )
                shared.sandboxes[box.id] = box
                made[name] = cls(box)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await cls._end(made)
            raise
        return made

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Destroy the sandboxes of a sample, whether it has ended or was interrupted."""
        await cls._end(environments)

    @classmethod
    async def _end(cls, environments: Mapping[str, SandboxEnvironment]) -> None:
        shared = _Shared.here()
        await shared.destroy([environment.as_type(cls).box for environment in environments.values()])
        await shared.close_if_unused()

    @classmethod
    async def task_cleanup(cls, task_name: str, config: SandboxEnvironmentConfigType | None, cleanup: bool) -> None:
        """Destroy what is left; or, with `--no-sandbox-cleanup`, keep a fork of it, since the sandboxes of samples end
        with this process. The last one closes the engine."""
        shared = _Shared.here()
        shared.tasks -= 1
        if shared.tasks > 0:
            return
        left = list(shared.sandboxes.values())
        if not cleanup:
            for box in left:
                try:
                    [kept] = await box.fork()
                except atoll.AtollError as error:
                    logger.warning("sandbox %s cannot be kept: %s", box.name, error)
                    continue
                logger.warning(
                    "sandbox %s is kept: `%s` opens a shell, `inspect sandbox cleanup atoll %s` destroys it",
                    kept.name,
                    _shell(kept, None),
                    kept.name,
                )
        await shared.destroy(left)
        await shared.close_if_unused()

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """Destroy the sandboxes that Inspect has left, or the one of this name. Those of evaluations that run end with
        them, and are destroyed by name only.

        Raises:
            SandboxNotFound: Inspect has made none of this name.
        """
        async with await _open() as engine:
            found = {info.name: info for info in await engine.list(labels={_SERVICE: None})}
            if id is not None and id not in found:
                raise atoll.SandboxNotFound(id, list(found))
            for name, info in found.items():
                if name == id or (id is None and not info.ephemeral):
                    await engine.destroy(name)

    # ------------------------------------------------------------------------------------------------ its use

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command to its end. After a time-out nothing that it started is left, and it is not tried again: here a
        time-out is the command's own. A user or a directory that does not exist is a failed result, as in a shell.
        """
        limit_bytes = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        try:
            with _alive():
                ended = await self.box.exec(
                    cmd,
                    stdin=input,
                    cwd=cwd,
                    env=env,
                    user=user,
                    timeout_s=timeout,
                    output_limit_bytes=limit_bytes,
                )
        except atoll.ExecTimeout as error:
            raise CommandTimeout(error) from None
        except (atoll.UserNotFound, atoll.FileError) as error:  # of `cwd`
            return ExecResult(False, _NOT_STARTED, "", f"{error}\n")
        if ended.stdout_truncation is not None or ended.stderr_truncation is not None:
            raise OutputLimitExceededError(
                SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, f"{ended.stdout}{ended.stderr}"
            )
        if ended.exit_code == _NOT_STARTED and ended.stderr == f"{cmd[0]}: Permission denied\n":
            raise PermissionError(f"{cmd[0]}: permission denied executing the command")
        return ExecResult(ended.ok, ended.exit_code, ended.stdout, ended.stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        data = contents.encode() if isinstance(contents, str) else contents
        with _alive():
            await self.box.files.write_bytes(file, data)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        limit_bytes = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        data = bytearray()
        with _alive():
            async for chunk in self.box.files.stream(file, limit=limit_bytes + 1):
                data += chunk
        if len(data) > limit_bytes:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode() if text else bytes(data)

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """
        Raises:
            ConnectionError: the sandbox has ended.
        """
        if await self.box.status() == "error":
            raise ConnectionError(f"sandbox {self.box.name!r} has ended")
        return SandboxConnection(type="atoll", command=_shell(self.box, user), container=self.box.name)

    def default_polling_interval(self) -> float:
        return 0.2

    # ---------------------------------------------------------------------------------------- its configuration

    @classmethod
    def config_files(cls) -> list[str]:
        return ["atoll.yaml"]

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return AtollSandboxConfig.model_validate(config)


class CommandTimeout(TimeoutError):
    """A command timed out. `truncated_output` is what it wrote, which Inspect shows."""

    def __init__(self, error: atoll.ExecTimeout) -> None:
        super().__init__(str(error))
        self.truncated_output = f"{error.result.stdout}{error.result.stderr}"


async def _open() -> atoll.Engine:
    settings = atoll.Settings.from_environment()
    return await (atoll.connect(settings=settings) if settings.url else atoll.open(settings=settings))


def _services(config: SandboxEnvironmentConfigType | None) -> dict[str, AtollService]:
    """The sandboxes of a sample by name, the default one first.

    Raises:
        TypeError, ValueError: it is no configuration of Atoll's.
    """
    if config is None:
        config = AtollSandboxConfig()
    elif isinstance(config, str):
        config = AtollSandboxConfig.model_validate(yaml.safe_load(Path(config).read_text()) or {})
    if not isinstance(config, AtollSandboxConfig):
        raise TypeError(
            f"the sandbox 'atoll' cannot use a {type(config).__name__}; give an AtollSandboxConfig, or a YAML file "
            "with its fields"
        )
    if _DEFAULT in config.services:
        raise ValueError(f"the service {_DEFAULT!r} is described by the fields of the configuration itself")
    return {_DEFAULT: config, **config.services}


def _options(service: AtollService) -> Any:
    """The options of `Engine.create`. What is empty is left out."""
    secrets = {}
    for name, secret in service.secrets.items():
        if secret.variable not in os.environ:
            raise ValueError(f"the secret {name} is the variable {secret.variable}, which is not set; set it")
        secrets[name] = atoll.Secret(os.environ[secret.variable], hosts=secret.hosts, header=secret.header)
    given = {name: getattr(service, name) for name in ("image", "runtime", "limits", "env", "user", "cwd", "network")}
    given |= {"secrets": secrets, "mounts": service.mounts}
    return {name: value for name, value in given.items() if value}


def _label(text: object) -> str:
    """`text` as the value of a label can be."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", str(text))[:63].strip("-_.")


def _shell(box: atoll.Sandbox, user: str | None) -> str:
    return shlex.join(["atoll", "shell", *(["--user", user] if user else []), box.name])


@contextmanager
def _alive() -> Iterator[None]:
    """For what is done to a sandbox: its end is Inspect's `SandboxUnavailableError`, never a result."""
    try:
        yield
    except (
        atoll.SandboxError,
        atoll.SandboxNotFound,
        atoll.SandboxShutdown,
        atoll.ServerUnavailable,
        atoll.TooManyProcesses,
    ) as error:
        raise SandboxUnavailableError(str(error)) from error
