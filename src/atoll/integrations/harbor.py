"""Sandboxes of Atoll as the environments of Harbor's trials: `--env atoll.integrations.harbor:AtollEnvironment`.

Owns how a task's configuration becomes a sandbox: image, limits, network, users; and copies of files and directories.
Each environment has a sandbox of its own, which ends with the trial, and at the latest with this process, however that
ends. Not here: what a sandbox promises (`runtime/sandbox.py`), and the operator's settings, which hold for what neither
the task nor the options say (`settings.py`). Images are not built here: a task names one, or the option `image` does.
"""

from __future__ import annotations

import asyncio
import posixpath
import shutil
import tempfile
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

import atoll
from atoll.contract.errors import install_extra

try:
    from harbor.environments.base import BaseEnvironment, ExecResult, OutputCallback
    from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
    from harbor.environments.definition import COMPOSE_FILE_NAME, DOCKERFILE_NAME
    from harbor.models.task.config import NetworkMode, NetworkPolicy
    from harbor.models.trial.config import ResourceMode
except ModuleNotFoundError as error:
    missing = f"{__name__} needs {error.name}, which is not installed; {install_extra('harbor')}"
    raise ImportError(missing) from error

_SESSION = "harbor/session"
_MIB = 1024 * 1024
_MAX_PENDING_OUTPUT = 1000
"""Pieces of output that a callback has not taken yet. Those that follow are in the result only."""


class AtollEnvironment(BaseEnvironment):
    """A sandbox as Harbor sees one. What each method promises is said in `BaseEnvironment`.

    The task's `docker_image` is the image; the options (`environment.kwargs`, or `--ek NAME=VALUE`) are:

    image: instead of it, which a task with a Dockerfile needs: an image or a template that was built of it
    runtime: as in `Engine.create`
    user: whom commands run as that name no user; unset, root, who is nobody outside
    limit_storage: whether the task's `storage_mb` is enforced, which not every machine can
    """

    def __init__(
        self,
        *args: Any,
        image: str | None = None,
        runtime: str | None = None,
        user: str = "root",
        limit_storage: bool = False,
        **kwargs: Any,
    ) -> None:
        self._image = image
        self._runtime = runtime
        self._user = user
        self._limit_storage = limit_storage
        self._engine: atoll.Engine | None = None
        self._box: atoll.Sandbox | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "atoll"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_hostnames=True,
            network_allowlist_wildcard_hostnames=True,
            network_allowlist_ipv4_addresses=True,
            network_allowlist_ipv6_addresses=True,
            network_allowlist_ipv4_cidrs=True,
            network_allowlist_ipv6_cidrs=True,
            dynamic_network_policy=True,
        )

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True)

    def _validate_definition(self) -> None:
        if self._image is not None:
            return
        for name in (COMPOSE_FILE_NAME, DOCKERFILE_NAME):
            if (self.environment_dir / name).exists() and not self.task_env_config.docker_image:
                raise ValueError(
                    f"{self.environment_dir / name} is not built by the environment 'atoll': make an image or a "
                    "template of it, and name that with the option image (--ek image=NAME)"
                )
        if not self.task_env_config.docker_image:
            raise FileNotFoundError(
                f"the task of {self.environment_dir} names no image: set docker_image in its task.toml, or the option "
                "image (--ek image=NAME)"
            )

    # ----------------------------------------------------------------------------------------------------- its life

    @property
    def box(self) -> atoll.Sandbox:
        """The sandbox itself, for what Harbor has no method for.

        Raises:
            RuntimeError: the environment was not started, or has been stopped.
        """
        if self._box is None:
            raise RuntimeError(f"the environment {self.session_id!r} is not running; start it first")
        return self._box

    async def start(self, force_build: bool) -> None:
        """Make the sandbox. There is nothing that `force_build` would build."""
        settings = atoll.Settings.from_environment()
        self._engine = await (atoll.connect(settings=settings) if settings.url else atoll.open(settings=settings))
        try:
            self._box = await self._engine.create(
                image=self._image or self.task_env_config.docker_image,
                runtime=self._runtime,
                limits=self._limits(),
                user=self._user,
                cwd=self.task_env_config.workdir,
                network=_policy(self.network_policy),
                labels={_SESSION: "".join(each if each.isalnum() else "-" for each in self.session_id)[:63].strip("-")},
                ephemeral=True,
            )
            await self.ensure_dirs(self._mount_targets(writable_only=True))
            await self._upload_environment_dir_after_start()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.stop(delete=True)
            raise

    def _limits(self) -> atoll.Limits:
        memory_mb = self._resource_limit_value("memory", auto_mode=ResourceMode.LIMIT)
        storage_mb = self._effective_storage_mb if self._limit_storage else None
        return atoll.Limits(
            cpus=self._resource_limit_value("cpu", auto_mode=ResourceMode.LIMIT),
            memory_bytes=None if memory_mb is None else memory_mb * _MIB,
            disk_bytes=None if storage_mb is None else storage_mb * _MIB,
        )

    async def stop(self, delete: bool) -> None:
        """Destroy the sandbox; without `delete`, keep a fork of it, which the log names."""
        engine, self._engine = self._engine, None
        box, self._box = self._box, None
        if engine is None:
            return
        try:
            if box is not None:
                if not delete:
                    (kept,) = await box.fork()
                    self.logger.info("the sandbox of %s is kept as %s", self.session_id, kept.name)
                await box.destroy()
        finally:
            await engine.aclose()

    async def _apply_network_policy(self, network_policy: NetworkPolicy) -> None:
        await self.box.set_network(_policy(network_policy))

    # ----------------------------------------------------------------------------------------------------- commands

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a line for the shell: bash where there is one.

        Raises:
            RuntimeError: it did not end within `timeout_sec`; all that it started is killed.
        """
        who = self._resolve_user(user)
        callback = self._output_callback()
        output: MemoryObjectSendStream[tuple[str, str]] | None = None
        told: asyncio.Task[None] | None = None
        if callback is not None:
            output, pieces = anyio.create_memory_object_stream[tuple[str, str]](_MAX_PENDING_OUTPUT)
            told = asyncio.create_task(_tell(pieces, callback))

        def on(stream: str, text: str) -> None:
            if output is not None:
                try:
                    output.send_nowait((text, stream))
                except (anyio.WouldBlock, anyio.BrokenResourceError):
                    return

        try:
            ran = await self.box.exec(
                command,
                cwd=cwd,
                env=self._merge_env(env),
                timeout_s=timeout_sec,
                user=None if who is None else str(who),
                on_stdout=None if output is None else lambda text: on("stdout", text),
                on_stderr=None if output is None else lambda text: on("stderr", text),
            )
        except atoll.ExecTimeout as error:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from error
        finally:
            if output is not None and told is not None:
                output.close()
                await told
        return ExecResult(stdout=ran.stdout, stderr=ran.stderr, return_code=ran.exit_code)

    # -------------------------------------------------------------------------------------------------------- files

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self.box.files.mkdir(posixpath.dirname(target_path) or ".", user="root")
        await self.box.files.upload(source_path, target_path, user="root")

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy what is in a directory into another, on top of what is there."""
        await self.box.files.mkdir(target_dir, user="root")
        for entry in sorted(Path(source_dir).iterdir()):
            await self.box.files.upload(entry, f"{target_dir.rstrip('/')}/", user="root")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self.box.files.download(source_path, target_path, user="root")

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy what is in a directory of the sandbox into one of this machine, on top of what is there."""
        target = Path(target_dir)
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target, prefix=".atoll-") as scratch:
            copy = Path(scratch, "copy")
            await self.box.files.download(source_dir, copy, user="root")

            def merge() -> None:
                shutil.copytree(copy, target, symlinks=True, dirs_exist_ok=True, copy_function=shutil.move)

            await anyio.to_thread.run_sync(merge)


async def _tell(pieces: MemoryObjectReceiveStream[tuple[str, str]], callback: OutputCallback) -> None:
    async with pieces:
        async for text, stream in pieces:
            await callback(text, stream)


def _policy(policy: NetworkPolicy) -> atoll.NetworkPolicy | None:
    """Atoll's policy for one of Harbor's. Private addresses are refused in all but an allowlist that names them."""
    if policy.network_mode == NetworkMode.NO_NETWORK:
        return None
    if policy.network_mode == NetworkMode.ALLOWLIST:
        return atoll.NetworkPolicy(allow=tuple(policy.allowed_hosts))
    return atoll.NetworkPolicy(allow=("*",))
