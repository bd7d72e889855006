"""Sandboxes of Atoll as workspaces of Pydantic AI: `Agent(…, capabilities=[AtollWorkspace()])`.

Owns the capability that gives each run a sandbox, and the backend that `ctx.workspace` speaks to: commands, files and
symlinks, natively. The identity of a workspace is its sandbox's name. It outlives the run, as Pydantic AI wants it:
whoever has the reference goes on with it later, in any process, or destroys it. Not here: what a sandbox promises
(`runtime/sandbox.py`), and the operator's settings, which hold for options that are left out (`settings.py`).
"""

from __future__ import annotations

import asyncio
import errno
import posixpath
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import anyio

import atoll
from atoll.contract.errors import install_extra

try:
    from pydantic_ai import RunContext
    from pydantic_ai.capabilities import AbstractCapability
    from pydantic_ai.tools import AgentDepsT
    from pydantic_ai.workspaces import (
        CommandResult,
        FileEntry,
        SupportsCommands,
        SupportsFilesystem,
        SupportsRealpath,
        WorkspaceBackend,
        WorkspaceCommand,
        WorkspaceOutputLimitError,
        WorkspaceRef,
        WorkspaceTimeoutError,
        WorkspaceUnavailableError,
    )
except ModuleNotFoundError as error:
    missing = (error.name or "a package").partition(".")[0]
    raise ImportError(f"{__name__} needs {missing}, which is not installed; {install_extra('pydantic-ai')}") from error

PROVIDER = "atoll"
MAX_OUTPUT_BYTES = 10 * 1024 * 1024
"""What a command may write, stdout and stderr together: as much as in Pydantic AI's own local workspace."""
_PREVIEW_BYTES = 64 * 1024
"""How much of each is shown of a command that wrote more."""
_MAX_SYMLINKS = 40
"""Followed in one path, as Linux does."""
_engines: WeakKeyDictionary[asyncio.AbstractEventLoop, _SharedEngine] = WeakKeyDictionary()


class _SharedEngine:
    """The engine of an event loop, for all workspaces in it that are given none. It ends with the loop."""

    def __init__(self) -> None:
        self._opening = asyncio.Lock()
        self._engine: atoll.Engine | None = None

    async def opened(self) -> atoll.Engine:
        """The engine of this machine or, where ATOLL_URL is set, that of the server."""
        async with self._opening:
            if self._engine is None:
                settings = atoll.Settings.from_environment()
                self._engine = await (
                    atoll.connect(settings=settings) if settings.url else atoll.open(settings=settings)
                )
            return self._engine


async def _shared_engine() -> atoll.Engine:
    return await _engines.setdefault(asyncio.get_running_loop(), _SharedEngine()).opened()


class AtollWorkspaceBackend(WorkspaceBackend, SupportsCommands, SupportsFilesystem, SupportsRealpath):
    """A sandbox as Pydantic AI sees it. What each method promises is said in `pydantic_ai.workspaces`.

    Nothing is done until it is first used: then it creates a sandbox with `options`, or finds the one of `ref`. It
    destroys none. After a time-out or a cancellation nothing that the command started is left, detached or not.
    """

    def __init__(
        self,
        *,
        ref: WorkspaceRef | None = None,
        engine: atoll.Engine | None = None,
        options: atoll.CreateOptions | None = None,
    ) -> None:
        """`engine` unset: one that all workspaces of the event loop share.

        Raises:
            ValueError: the reference is another provider's.
        """
        if ref is not None and ref.provider != PROVIDER:
            raise ValueError(f"the workspace {ref.id!r} is of {ref.provider!r}, not of {PROVIDER!r}")
        self._ref = ref
        self._engine = engine
        self._options = options or {}
        self._box: atoll.Sandbox | None = None
        self._working_dir: str | None = None
        self._opening = anyio.Lock()

    @property
    def ref(self) -> WorkspaceRef | None:
        return self._ref

    async def sandbox(self) -> atoll.Sandbox:
        """The sandbox itself, for what a workspace has no method for. It is created or found if need be.

        Raises:
            WorkspaceUnavailableError: there is none of this reference, or none can be created as the options say.
        """
        async with self._opening:
            if self._box is None:
                engine = self._engine or await _shared_engine()
                try:
                    if self._ref is not None:
                        self._box = await engine.get(self._ref.id)
                    else:
                        self._box = await engine.create(**self._options)
                except (
                    atoll.SandboxNotFound,
                    atoll.ImageUnavailable,
                    atoll.RuntimeUnavailable,
                    atoll.Unenforceable,
                    atoll.Unauthenticated,
                    atoll.Forbidden,
                ) as error:
                    raise WorkspaceUnavailableError(str(error)) from error
                self._ref = WorkspaceRef(provider=PROVIDER, id=self._box.name)
            return self._box

    async def working_dir(self) -> str:
        if self._working_dir is None:
            result = await self.run(["sh", "-c", "pwd -P"])
            if result.exit_code != 0 or not result.stdout.startswith("/"):
                raise WorkspaceUnavailableError(f"the working directory is not known: {result.stderr.strip()}")
            self._working_dir = result.stdout.removesuffix("\n")
        return self._working_dir

    # ------------------------------------------------------------------------------------------------- commands

    async def run(
        self,
        command: WorkspaceCommand,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        if isinstance(command, str) is not shell:
            raise TypeError("give a text with shell=True, or a sequence of texts without")
        stdout, stderr = bytearray(), bytearray()

        def keep(kept: bytearray) -> Callable[[bytes], None]:
            def take(data: bytes) -> None:
                kept.extend(data)
                if len(stdout) + len(stderr) > MAX_OUTPUT_BYTES:
                    raise WorkspaceOutputLimitError(
                        f"the command wrote more than {MAX_OUTPUT_BYTES} bytes and was killed; let it write to a file, "
                        "and read parts of that",
                        limit=MAX_OUTPUT_BYTES,
                        stdout=_text(stdout[:_PREVIEW_BYTES]),
                        stderr=_text(stderr[:_PREVIEW_BYTES]),
                    )

            return take

        try:
            async with self._usable() as box:
                ended = await box.exec_bytes(
                    command,
                    env=env,
                    timeout_s=timeout,
                    output_limit_bytes=0,
                    on_stdout=keep(stdout),
                    on_stderr=keep(stderr),
                )
        except atoll.ExecTimeout as error:
            raise WorkspaceTimeoutError(str(error), stdout=_text(stdout), stderr=_text(stderr)) from None
        return CommandResult(exit_code=ended.exit_code, stdout=_text(stdout), stderr=_text(stderr))

    # ---------------------------------------------------------------------------------------------------- files

    async def read_bytes(self, path: str) -> bytes:
        async with self._usable() as box:
            return await box.files.read_bytes(path)

    async def write_bytes(self, path: str, data: bytes) -> None:
        async with self._usable() as box:
            await box.files.write_bytes(path, data)

    async def stat(self, path: str) -> FileEntry:
        async with self._usable() as box:
            return _entry(path, await box.files.stat(path))

    async def list_dir(self, path: str) -> list[FileEntry]:
        entries = []
        async with self._usable() as box:
            for found in sorted(await box.files.list(path), key=lambda found: found.name):
                here = posixpath.join(path, found.name)
                stat: atoll.FileStat | None = found
                if found.kind == "symlink":
                    stat = None
                    with suppress(atoll.FileError):  # it leads nowhere, or back to itself
                        stat = await box.files.stat(here)
                entries.append(_entry(here, stat))
        return entries

    async def make_dir(self, path: str) -> None:
        async with self._usable() as box:
            try:
                await box.files.mkdir(path)
            except atoll.PathNotDirectory:
                with suppress(atoll.FileError):  # what is no directory may be above it
                    await box.files.stat(path)
                    raise FileExistsError(errno.EEXIST, "is not a directory", path) from None
                raise

    async def remove(self, path: str) -> None:
        path = path.rstrip("/") or "/"
        directory, name = posixpath.split(path)
        target = await self.realpath(path if name in ("", ".", "..") else directory)
        if name not in ("", ".", ".."):
            target = posixpath.join(target, name)
        if f"{await self.working_dir()}/".startswith(f"{target.rstrip('/')}/"):
            raise ValueError(f"{path} is the working directory or above it, and cannot be removed")
        async with self._usable() as box:
            await box.files.remove(target, recursive=True)

    async def exists(self, path: str) -> bool:
        async with self._usable() as box:
            try:
                return await box.files.exists(path)
            except atoll.FileError as error:
                if error.errno == errno.ELOOP:
                    return False
                raise

    async def realpath(self, path: str) -> str:
        """
        Raises:
            OSError: a loop of symlinks, or a directory that the user may not search.
        """
        resolved, followed = "", 0
        left = path.split("/")[::-1]
        async with self._usable() as box:
            while left:
                part = left.pop()
                if part == "..":
                    resolved = posixpath.dirname(resolved).rstrip("/")
                elif part not in ("", "."):
                    here = f"{resolved}/{part}"
                    target = await _target(box, here)
                    if target is None:
                        resolved = here
                        continue
                    followed += 1
                    if followed > _MAX_SYMLINKS:
                        raise OSError(errno.ELOOP, "too many levels of symbolic links", path)
                    if target.startswith("/"):
                        resolved = ""
                    left += target.split("/")[::-1]
        return resolved or "/"

    # ----------------------------------------------------------------------------------------------- its end

    @asynccontextmanager
    async def _usable(self) -> AsyncIterator[atoll.Sandbox]:
        """The sandbox, for one operation. What may work when it is tried again raises as in Atoll.

        Raises:
            WorkspaceUnavailableError: it has ended.
        """
        box = await self.sandbox()
        try:
            yield box
        except (atoll.SandboxNotFound, atoll.SandboxShutdown, atoll.LaunchFailed, atoll.GuestProtocolError) as error:
            raise WorkspaceUnavailableError(str(error)) from error
        except atoll.SandboxDied as error:
            if error.message.startswith("connection lost") and not await _has_ended(box):
                raise
            raise WorkspaceUnavailableError(str(error)) from error


@dataclass(kw_only=True)
class AtollWorkspace(AbstractCapability[AgentDepsT]):
    """Gives each run of an agent a sandbox as its workspace: a new one, or the one that the run goes on with."""

    options: atoll.CreateOptions = field(default_factory=atoll.CreateOptions)
    """Those of `Engine.create`, for a new sandbox: `{"image": "python:3.12", "ttl_s": 3600}`. Without a lifetime it
    lives until it is destroyed."""
    engine: atoll.Engine | None = field(default=None, repr=False)
    """Unset: one that all workspaces of the event loop share, of this machine or of the server of ATOLL_URL."""

    def __post_init__(self) -> None:
        if self.defer_loading:
            raise ValueError("the workspace of a run is chosen when it starts: AtollWorkspace cannot be loaded later")

    def get_workspace(self, ctx: RunContext[AgentDepsT], *, ref: WorkspaceRef | None) -> AtollWorkspaceBackend | None:
        if ref is not None and ref.provider != PROVIDER:
            return None
        return AtollWorkspaceBackend(ref=ref, engine=self.engine, options=self.options)

    def backend(self, ref: WorkspaceRef) -> AtollWorkspaceBackend:
        """The workspace of a run that has ended, to be used by a program."""
        return AtollWorkspaceBackend(ref=ref, engine=self.engine)

    async def destroy(self, ref: WorkspaceRef) -> None:
        """Destroy the sandbox of a workspace. Does nothing if it is gone.

        Raises:
            ValueError: the reference is another provider's.
        """
        if ref.provider != PROVIDER:
            raise ValueError(f"the workspace {ref.id!r} is of {ref.provider!r}, not of {PROVIDER!r}")
        engine = self.engine or await _shared_engine()
        with suppress(atoll.SandboxNotFound):
            await engine.destroy(ref.id)


def _text(output: bytes | bytearray) -> str:
    return output.decode(errors="replace")


def _entry(path: str, stat: atoll.FileStat | None) -> FileEntry:
    """`stat` is None for a symlink that leads nowhere."""
    return FileEntry(
        name=posixpath.basename(posixpath.normpath(path)),
        path=path,
        is_dir=stat is not None and stat.kind == "directory",
        size=stat.size if stat is not None and stat.kind == "file" else None,
    )


async def _target(box: atoll.Sandbox, path: str) -> str | None:
    """The target of a symlink. None: it is none, or does not exist."""
    try:
        return (await box.files.stat(path, follow=False)).target
    except (atoll.PathNotFound, atoll.PathNotDirectory):
        return None


async def _has_ended(box: atoll.Sandbox) -> bool:
    """Whether the sandbox, to which the connection was lost, is gone."""
    try:
        return await box.status() in ("error", "shutdown")
    except atoll.SandboxDied:
        return True
