"""The engine as programs see it: `Engine`, what `atoll.open()` and `atoll.connect()` give.

Owns the public names of an engine, their arguments and their documentation, and what every engine does in the same way.
Two classes implement it: `LocalEngine` (`engine.py`), which has a state directory of this machine, and `RemoteEngine`
(`client/engine.py`), which asks a server for the same. A test compares their signatures. Code that names `Engine` takes
both. Used by `sandbox_pool.py` and by all layers above.
"""

from __future__ import annotations

import builtins
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypedDict, Unpack

import anyio

from atoll.contract.errors import SandboxExists, SandboxNotFound

if TYPE_CHECKING:
    from pydantic import SecretStr

    from atoll.contract.driver import Capabilities, Diagnostic
    from atoll.contract.model import (
        Checkpoint,
        ExportResult,
        GcResult,
        Limits,
        Mount,
        OnExpiry,
        RuntimeName,
        SandboxInfo,
        Template,
        TemplateVersion,
        Volume,
        WarmPool,
    )
    from atoll.contract.network import AuditRecord, NetworkPolicy
    from atoll.contract.secret import Secret
    from atoll.runtime.archive.export import ArchiveFile
    from atoll.runtime.images.contents import ImageContents
    from atoll.runtime.images.fetch import ProgressCallback
    from atoll.runtime.images.store import ImageInfo, ImageLayers
    from atoll.runtime.lifetimes import AwaitableContext, BackgroundTasks
    from atoll.runtime.project.project import Project
    from atoll.runtime.sandbox import Sandbox
    from atoll.runtime.sandbox_pool import SandboxPool
    from atoll.runtime.state.loop_storage import LoopStorage


class SandboxKeywords(TypedDict, total=False):
    """The options of a sandbox that `Engine.create` and `Engine.pool` have in common. Each is as in `create`."""

    image: str | None
    limits: Limits | None
    env: Mapping[str, str] | None
    secrets: Mapping[str, Secret] | None
    secret_env: Mapping[str, str | SecretStr] | None
    user: str | None
    cwd: str | None
    runtime: RuntimeName | None
    pause_after_s: float | None
    sudo: bool
    network: NetworkPolicy | None
    labels: Mapping[str, str] | None
    ttl_s: float | None
    on_expiry: OnExpiry
    ttl_renewed_by_use: bool
    mounts: Sequence[Mount]


class CreateOptions(SandboxKeywords, total=False):
    """The options of `Engine.create`, for what passes them on."""

    ephemeral: bool
    from_checkpoint: str | None
    progress: ProgressCallback | None


class PoolOptions(SandboxKeywords, total=False):
    """The options of `Engine.pool`: those of its sandboxes, unless `SandboxPool.get` or `create` override them."""

    sleep_after_s: float | None
    """How long a sandbox may be unused before it is put to sleep. Unset: ten minutes. None: for ever."""


class Images(Protocol):
    """The images of an engine. What each method does is said in `ImageStore`, which has them on this machine."""

    async def resolve(self, reference: str, *, progress: ProgressCallback | None = None) -> ImageLayers: ...

    async def contents(self, reference: str) -> ImageContents | None: ...

    async def pull(self, reference: str, *, progress: ProgressCallback | None = None) -> ImageInfo: ...

    async def import_(self, source: Path, reference: str, *, progress: ProgressCallback | None = None) -> ImageInfo: ...

    async def remove(self, reference: str) -> None: ...

    async def list(self) -> builtins.list[ImageInfo]: ...


class Volumes(Protocol):
    """The volumes of an engine. What each method does is said in `VolumeStore`, which has them on this machine."""

    async def create(self, name: str, size_bytes: int | None = None) -> Volume: ...

    async def list(self) -> builtins.list[Volume]: ...

    async def get(self, name: str) -> Volume: ...

    async def remove(self, name: str) -> None: ...

    async def export(self, name: str, path: Path | str) -> int: ...

    async def import_(self, name: str, path: Path | str, size_bytes: int | None = None) -> Volume: ...


class Templates(Protocol):
    """The templates of an engine. What each method does is said in `TemplateStore`, which has them on this machine."""

    async def list(self) -> builtins.list[Template]: ...

    async def get(self, name: str) -> Template: ...

    async def version(self, reference: str) -> TemplateVersion: ...

    async def tag(self, reference: str, tags: Sequence[str]) -> None: ...

    async def remove(self, reference: str) -> None: ...


class Engine(ABC):
    """Sandboxes, by name. Made by `atoll.open()`, those of a namespace of a state directory of this machine; or by
    `atoll.connect()`, those of a server. As a context manager it is closed at the end."""

    _tasks: BackgroundTasks

    @property
    @abstractmethod
    def images(self) -> Images:
        """The images that sandboxes are made of."""

    @property
    @abstractmethod
    def volumes(self) -> Volumes:
        """Directories that sandboxes mount, and that outlive them."""

    @property
    @abstractmethod
    def templates(self) -> Templates:
        """Named beginnings of sandboxes, which builds make. `create` takes one as the image `template:NAME[:TAG]`."""

    @property
    @abstractmethod
    def storage(self) -> LoopStorage:
        """The file system of the state directory's layers.

        Raises:
            InvalidRequest: it is another machine's; the message says where it can be used.
        """

    @property
    @abstractmethod
    def namespace(self) -> str:
        """Where the names of its sandboxes, volumes, sessions and warm pools are their own."""

    @property
    @abstractmethod
    def state_dir(self) -> Path:
        """The state directory of this machine: all that the sandboxes are, or, of those of a server, what this program
        keeps of its work with them, such as the audit log of code."""

    @property
    @abstractmethod
    def default_image(self) -> str:
        """The image of sandboxes that do not name one."""

    @property
    @abstractmethod
    def default_runtime(self) -> RuntimeName:
        """The runtime of sandboxes that do not name one.

        Raises:
            RuntimeUnavailable: it cannot be used on this machine, or none can.
        """

    @abstractmethod
    def runtimes(self) -> Mapping[RuntimeName, Capabilities]:
        """The runtimes that can be used, and what each is able to: fastest first, then those that must be requested by
        name."""

    @abstractmethod
    def doctor(self) -> builtins.list[Diagnostic]:
        """What this machine can do and, for each thing that it lacks, the command that fixes it.

        Raises:
            InvalidRequest: it is another machine's; the message says where it can be used.
        """

    @abstractmethod
    def effective_limits(self, limits: Limits, runtime: RuntimeName | None = None) -> Limits:
        """The limits that a sandbox created with these has: with the defaults that this machine can enforce.

        Raises:
            RuntimeUnavailable: the runtime cannot be used on this machine.
        """

    @abstractmethod
    def create(  # noqa: PLR0913 - the options of a sandbox, by keyword
        self,
        name: str | None = None,
        *,
        image: str | None = None,
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, Secret] | None = None,
        secret_env: Mapping[str, str | SecretStr] | None = None,
        user: str | None = None,
        cwd: str | None = None,
        runtime: RuntimeName | None = None,
        ephemeral: bool = False,
        pause_after_s: float | None = None,
        sudo: bool = False,
        network: NetworkPolicy | None = None,
        labels: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        on_expiry: OnExpiry = "destroy",
        ttl_renewed_by_use: bool = False,
        mounts: Sequence[Mount] = (),
        from_checkpoint: str | None = None,
        progress: ProgressCallback | None = None,
    ) -> AwaitableContext[Sandbox]:
        """Create a sandbox and wait until it answers.

        `await` gives the sandbox; `async with` gives it too, and destroys it after the block. Otherwise it lives until
        it is destroyed, also after this process has ended; an `ephemeral` one until its last client disconnects.
        Without a name it gets one. When this fails or is cancelled, nothing is left of it. `progress` is called while
        an image is fetched. Where a warm sandbox matches (`warm`), that one is claimed. `network` is the policy of its
        egress; unset, no connection leaves it.

        `labels` are for its users: `list` filters by them, forks have them too. After `ttl_s`, at least a second, it is
        destroyed, whether or not it is in use and any process of the host lives: its processes end then, calls in
        progress raise `SandboxDied`, and its files are removed at once or when the state directory is next used. Its
        checkpoints stay. With `on_expiry="sleep"` it is put to sleep instead, as by `sleep`; processes that cannot be
        saved end. With `on_expiry="pause"` it is paused, as by `pause`. Using it wakes it, and it lives as long again.
        With `ttl_renewed_by_use` each use begins its lifetime anew, and it does not end while it is in use. `update`
        changes all of this.

        With `from_checkpoint`, an id or a label that only one checkpoint has, it begins as that checkpoint, whosever it
        is: with its image and runtime, which cannot be given then, and all else that is not given. An `env` and
        `limits` that are given go on top. Secrets and mounts can be given if the checkpoint has none of these: the
        sandbox then begins with the files of the checkpoint, without its processes.

        Commands and file operations that name no `user` and no `cwd` get these, unset those of the image's
        configuration, and where it has none, `user` and the home of the command's user. A `cwd` that does not exist is
        made, as `user`.

        With `sudo`, the program `sudo` works inside, without a password, for processes of the user that commands run as
        when they name none: they can be root there, as a caller of `exec` can with `user="root"`. Without, no process
        inside becomes another user. A sandbox from a checkpoint has it if the checkpoint has.

        `mounts` are directories of the host and volumes that it sees, a directory read-only unless its mount says
        otherwise. Nothing outside of them can be reached through them. Their files are not in checkpoints.

        For each of `secrets` the sandbox has a placeholder, in the variable of that name; `secret_env` are variables
        that it has in clear. Neither is shown, logged or written to disk in clear.

        Raises:
            InvalidRequest: the name, a limit, the environment, a secret or a mount is not allowed.
            CheckpointNotFound: no checkpoint has this id or label.
            UserNotFound: there is no such user; or the image's configuration names one that it does not have.
            PermissionDenied, FileError: `cwd` cannot be made.
            SandboxExists: the name is taken.
            VolumeNotFound: a mount names a volume that does not exist.
            ImageUnavailable: the image cannot be fetched or read.
            RuntimeUnavailable: the runtime is not on this machine, or no runtime is.
            Unenforceable: this machine cannot enforce a limit, or mount a directory for writing.
            LaunchFailed: it did not start.
        """

    @abstractmethod
    async def check_options(self, options: SandboxKeywords) -> None:
        """Raise what `create` would raise of these options, as far as that is known without creating a sandbox."""

    async def get_or_create(self, name: str, **options: Unpack[CreateOptions]) -> Sandbox:
        """The sandbox of this name, created with `options` if there is none. They change nothing of one that exists.

        Called at once by several tasks or processes, it gives all of them the same sandbox.

        Raises:
            What `get` and `create` raise, but neither SandboxNotFound nor SandboxExists.
        """
        while True:
            with contextlib.suppress(SandboxNotFound):
                return await self.get(name)
            with contextlib.suppress(SandboxExists):
                return await self.create(name, **options)

    @abstractmethod
    async def warm(
        self,
        count: int,
        *,
        image: str | None = None,
        limits: Limits | None = None,
        runtime: RuntimeName | None = None,
    ) -> WarmPool:
        """Keep a warm pool of `count` sandboxes. When it returns, all of them are ready.

        From then on a `create` with this image, these limits and this runtime, in any process, claims a warm sandbox,
        and another is created in the background. They stay until they are claimed or a smaller count is set: 0 removes
        the pool. When it fails, the pool is as it was before.

        Raises:
            InvalidRequest: the count or a limit is not allowed.
            ImageUnavailable, RuntimeUnavailable, Unenforceable, LaunchFailed: as `create`.
        """

    @abstractmethod
    async def warm_pools(self) -> builtins.list[WarmPool]:
        """The warm pools of this namespace."""

    @abstractmethod
    async def remove_warm_pools(self) -> None:
        """Remove all warm pools, also those whose records cannot be read, and their sandboxes."""

    @abstractmethod
    async def wait_refilled(self) -> None:
        """Wait until the warm pools that this engine claimed from are full again. `atoll.open()` does so at its end."""

    @abstractmethod
    async def update(
        self,
        name: str,
        *,
        labels: Mapping[str, str | None] | None = None,
        ttl_s: float | None = None,
        on_expiry: OnExpiry | None = None,
        ttl_renewed_by_use: bool | None = None,
        limits: Limits | None = None,
    ) -> SandboxInfo:
        """Change a sandbox, running or not. What is left out stays as it is.

        `labels` are set, and a label that is None is removed. `ttl_s` is its lifetime from now on; `math.inf`: until it
        is destroyed. `on_expiry` and `ttl_renewed_by_use`, each as in `create`, do not change when it ends. Of
        `limits`, those that are set hold from now on, also after it sleeps: memory, processor time and processes while
        it runs, the disk where its layer has a quota, open files only while it sleeps. No process is ended for a lower
        limit. When this fails, nothing is changed.

        Raises:
            SandboxNotFound: there is none of this name.
            InvalidRequest: a value is not allowed, or it uses more memory than the new limit.
            Unenforceable: a limit cannot be enforced here, or not while it runs.
        """

    @abstractmethod
    async def pause(self, name: str) -> None:
        """Freeze the processes of a sandbox in memory, until it is next used. Does nothing to one that does not run.

        Raises:
            SandboxNotFound: there is none of this name.
            Unenforceable: sandboxes cannot be frozen on this machine.
        """

    @abstractmethod
    async def resume(self, name: str) -> Sandbox:
        """Resume a paused sandbox. Does nothing to one that runs.

        Raises:
            SandboxNotFound: there is none of this name.
            InvalidRequest: it sleeps, was shut down or has ended; `wake` starts it.
        """

    @abstractmethod
    async def sleep(self, name: str) -> None:
        """Put a sandbox to sleep on disk, until it is next used.

        Its files stay. With runsc its processes are saved and continue when it wakes; with the other runtimes they
        end. Calls in progress raise `SandboxDied`. `pause` keeps processes in memory instead.

        Raises:
            SandboxNotFound: there is none of this name.
            InvalidRequest: it is ephemeral.
            NotCheckpointable: the runtime cannot save what a process holds.
        """

    @abstractmethod
    async def shutdown(self, name: str) -> None:
        """Put a sandbox to sleep until `wake` is called: using it raises `SandboxShutdown`.

        Raises:
            SandboxNotFound: there is none of this name.
        """

    @abstractmethod
    async def sleep_unused(self, name: str, after: timedelta) -> bool:
        """Put a sandbox to sleep if it has been unused for so long. Returns whether it was put to sleep.

        Raises:
            SandboxNotFound: there is none of this name.
        """

    @contextlib.asynccontextmanager
    async def pool(
        self,
        session_id: str,
        *,
        temporary: bool = False,
        sleeps: bool = False,
        project: Project | None = None,
        **options: Unpack[PoolOptions],
    ) -> AsyncIterator[SandboxPool]:
        """The sandboxes of one session. While the pool is open, those that are unused go to sleep.

        They stay when it ends. With `sleeps`, they go to sleep then, unless another process has the session open. Of a
        `temporary` session nothing stays: its sandboxes and their checkpoints are removed when the pool ends or, if
        this process is killed, when the state directory is next used.

        `options` are those of every sandbox, as in `create`: `image`, `limits`, `env`, `secrets`, `secret_env`, `user`,
        `cwd`, `runtime`, `pause_after_s`, `sudo`, `network`, `labels`, `ttl_s`, `on_expiry`, `ttl_renewed_by_use` and
        `mounts`; and `sleep_after_s` (unset: ten minutes).

        With a `project`, the sandbox `default` has a copy of it when it is created, where its commands start.

        Raises:
            InvalidRequest: an option is wrong.
            SandboxError: it is temporary, and another process has it open.
        """
        from atoll.runtime.sandbox_pool import SandboxPool

        pool = SandboxPool(self, session_id, **options)
        pool.project = project
        scope = anyio.CancelScope()

        async def reap() -> None:
            with scope:
                await pool.reap()

        async with self._session(pool, temporary=temporary, sleeps=sleeps):
            self._tasks.start_soon(reap)
            try:
                yield pool
            finally:
                scope.cancel()
                await pool.end()

    @abstractmethod
    def _session(self, pool: SandboxPool, *, temporary: bool, sleeps: bool) -> AbstractAsyncContextManager[None]:
        """A context in which this program has the session of `pool` open; `temporary` and `sleeps` say what its end
        does."""

    @abstractmethod
    async def wake(self, name: str) -> Sandbox:
        """Start a sandbox that sleeps, was shut down, or has ended, and resume a paused one.

        Does nothing to one that runs.

        Raises:
            SandboxNotFound: there is none of this name.
            LaunchFailed: it did not start.
        """

    @abstractmethod
    async def set_network(self, name: str, policy: NetworkPolicy | None) -> None:
        """Set the policy of a sandbox's egress, whichever process serves it. None: no connection leaves it.

        It decides the next connection. Open connections that it does not allow are cut, within a second if another
        process serves them. Commands that already run know of a proxy only if there was a policy when they were
        started. The preset `registries` is resolved now.

        Raises:
            SandboxNotFound: there is none of this name.
            Unenforceable: the policy has `registries`, and this machine is configured for no package index.
        """

    @abstractmethod
    async def audit(self, name: str) -> builtins.list[AuditRecord]:
        """The audit log of a sandbox's egress, the oldest record first, as far back as records are kept.

        Raises:
            SandboxNotFound: there is none of this name.
        """

    @abstractmethod
    def follow_audit(self, name: str) -> AsyncIterator[AuditRecord]:
        """The latest audit records of a sandbox, then new ones as they are written, until it is destroyed.

        An allowed connection has one record when it begins, and another with the same id when it has ended.

        Raises:
            SandboxNotFound: there is none of this name.
        """

    @abstractmethod
    async def checkpoint(self, name: str, label: str | None = None, *, move: bool = False) -> Checkpoint:
        """Save a sandbox as it is now. It goes on; a running one is frozen while its files are copied.

        The checkpoint belongs to this sandbox and outlives it. A label is unique among its checkpoints: with `move`,
        the one that has it stays and loses it.

        Raises:
            SandboxNotFound: there is none of this name.
            InvalidRequest: the label is not allowed.
            CheckpointExists: another checkpoint of the sandbox has the label.
            Unenforceable: something runs in it, and it cannot be frozen here. If nothing runs, it is restarted.
        """

    @abstractmethod
    async def checkpoints(self, name: str | None = None) -> builtins.list[Checkpoint]:
        """All checkpoints, or those of one sandbox, the oldest first.

        If no sandbox has the name, they are those of destroyed ones that had it. One whose record cannot be read has a
        `reason`, and is only among all checkpoints.

        Raises:
            SandboxNotFound: no sandbox has this name, and no checkpoint is of one that had it.
        """

    @abstractmethod
    async def restore(self, name: str, checkpoint: str, *, foreign: bool = False) -> Sandbox:
        """Restore a sandbox to one of its checkpoints, given by id or label.

        What was written since is lost, and processes end. When it fails, the sandbox sleeps and has its files. With
        `foreign`, the checkpoint, given by id, may be another sandbox's: this one then has the other's files and image.

        Raises:
            SandboxNotFound, CheckpointNotFound: there is none.
            InvalidRequest: the checkpoint is another sandbox's.
            LaunchFailed: it did not start.
        """

    @abstractmethod
    async def fork(
        self, source: str, count: int = 1, *, checkpoint: str | None = None, names: Sequence[str] | None = None
    ) -> builtins.list[Sandbox]:
        """Create sandboxes that begin as `source` is now, or was at a checkpoint. All of them, or none.

        `source` goes on. For a checkpoint, given by label or id, it may have been destroyed: `create(from_checkpoint=)`
        does not even need its name. Without `names` they get names that begin with that of `source`. They have its
        labels, its present network policy, and a lifetime as long as its own.

        Raises:
            SandboxNotFound, CheckpointNotFound: there is none.
            InvalidRequest: the count is below 1, or is not the number of names.
            SandboxExists: a name is taken.
        """

    @abstractmethod
    async def delete_checkpoint(self, checkpoint: str, *, sandbox: str | None = None) -> None:
        """Delete a checkpoint, given by id or label, and remove its unreferenced layers.

        With `sandbox`, the label is one of that sandbox, which may have been destroyed. A checkpoint whose record
        cannot be read is deleted by its id.

        Raises:
            SandboxNotFound, CheckpointNotFound: there is none.
            InvalidRequest: checkpoints of several sandboxes have the label.
        """

    @abstractmethod
    async def export(
        self, name: str, target: ArchiveFile, *, checkpoint: str | None = None, progress: ProgressCallback | None = None
    ) -> ExportResult:
        """Write a sandbox as it is now, or as it was at a checkpoint, to one file. The sandbox goes on.

        The file holds what was written on top of the image; it holds neither the image nor processes. At a path the
        file appears when it is complete, readable for this user alone. An open file is written to from its position;
        `progress` counts bytes before compression.

        Raises:
            SandboxNotFound, CheckpointNotFound: there is none.
            Unenforceable: it runs, and cannot be frozen here.
            SandboxError: it could not be read or written.
            OSError: the path cannot be written to.
        """

    @abstractmethod
    async def import_(
        self,
        source: ArchiveFile,
        name: str | None = None,
        *,
        image: str | None = None,
        limits: Limits | None = None,
        runtime: RuntimeName | None = None,
        limit_bytes: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> Sandbox:
        """Create a sandbox from a file that `export` wrote, on any machine, and wait until it answers.

        Nothing in the file is trusted. It is unpacked and checked to its last byte before any of it is used; when it is
        refused, or this is cancelled, nothing is left. Unset: `name`, `limits` and `runtime` are the file's, if its
        limits are no wider than those of a new sandbox and the settings name no runtime; `image` is the one with the
        file's digest, or this machine's own `host`; `limit_bytes`, the size when unpacked, is three quarters of the
        free disk.

        Raises:
            ArchiveRefused: it is not a complete, unchanged file that `export` wrote, or it is too large.
            ImageUnavailable: its image is not on this machine.
            InvalidRequest: it asks for wider limits, or an argument is wrong.
            SandboxExists: the name is taken.
            RuntimeUnavailable, Unenforceable, LaunchFailed: as `create`.
            OSError: the path cannot be read.
        """

    @abstractmethod
    async def get(self, name: str) -> Sandbox:
        """The sandbox of this name, whichever process created it.

        Raises:
            SandboxNotFound: there is none.
            RuntimeUnavailable: it was created with a runtime that is no longer on this machine.
        """

    @abstractmethod
    async def list(
        self, prefix: str = "", *, labels: Mapping[str, str | None] | None = None
    ) -> builtins.list[SandboxInfo]:
        """All sandboxes whose names begin with `prefix` and that have all of `labels`, by name. None: any value.

        One whose record cannot be read has the status `error`, and a `reason` that says so. One whose lifetime is over
        is not among them.
        """

    @abstractmethod
    async def unreadable_records(self) -> dict[str, str]:
        """The sandboxes and checkpoints whose records cannot be read, by id, volumes as `volume:NAME`, and why.

        Those of the whole state directory: what belongs to a namespace that is not the default has it in front, as
        `NAMESPACE:ID` and `volume:NAMESPACE:NAME`, and is removed by an engine of that namespace.
        As long as there are any, `gc` keeps layers, and images unless it is a volume. `destroy`, `delete_checkpoint`
        and `volumes.remove` remove them.
        """

    async def aclose(self) -> None:
        """Close the engine, from any task: wait until the warm pools that it claimed from are full again, then end its
        connections, previews and egress. Sandboxes go on. Closing twice does nothing.
        """
        await self.__aexit__(None, None, None)

    async def __aenter__(self) -> Self:
        return self

    @abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    async def destroy(self, name: str, *, checkpoints: bool = False) -> int:
        """End a sandbox, given by name or id, and remove all of it: nothing of it is left, and the name is free.

        Its checkpoints stay, unless `checkpoints` is set: then they are deleted too. Returns how many it had. It works
        also if its record cannot be read.

        Raises:
            SandboxNotFound: there is none of this name.
        """

    @abstractmethod
    async def remove_abandoned(self) -> builtins.list[str]:
        """Remove, in all namespaces, abandoned sandboxes, those whose lifetime is over, ephemeral ones that have ended,
        and sessions whose process died.

        Returns the ids of the removed sandboxes.
        """

    @abstractmethod
    async def gc(self) -> GcResult:
        """`remove_abandoned`, and remove unreferenced layers and images, of all namespaces. Returns what was removed.

        Layers and images stay as long as there are `unreadable_records`, which may refer to any of them.
        """
