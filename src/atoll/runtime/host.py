"""A runtime over a state directory: makes sandboxes, finds them again, ends them.

Knows how records, images, drivers and sandboxes come together. Refuses to know how each does its work. Any number of
runtimes, in any number of processes, may be open on one state directory.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread
from pydantic import ValidationError

from atoll.contract.driver import Driver, Finding, Launch
from atoll.contract.errors import AtollError, InvalidRequest, RuntimeUnavailable, SandboxDied, SandboxNotFound
from atoll.contract.model import Limits, RuntimeName, SandboxInfo, SandboxSpec, Status
from atoll.drivers import oci
from atoll.drivers.locks import is_held
from atoll.runtime.images import ImageLayers, ImageStore, Progress
from atoll.runtime.records import Manifest, Records, new_id, now
from atoll.runtime.sandbox import Sandbox
from atoll.settings import Settings

_DEFAULT_MEMORY_BYTES = 2 * 1024**3
_DEFAULT_PIDS = 1024
_LAUNCHES = 8
"""How many sandboxes are started at once. More would only make all of them wait for each other."""


@contextlib.asynccontextmanager
async def open(state_dir: Path | str | None = None, *, settings: Settings | None = None) -> AsyncIterator[Runtime]:
    """A runtime over `state_dir`, made if it is missing.

    Sandboxes do not end with it: the next one, here or in another process, finds them by name. What a process that
    died left half done is put in order in the background.

    Raises:
        InvalidRequest: the state directory cannot be used, or a setting is wrong.
    """
    settings = settings or Settings.from_environment()
    if state_dir is not None:
        settings = settings.model_copy(update={"state_dir": Path(state_dir)})
    path = settings.resolve_state_dir()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        records = Records(path)
    except OSError as error:
        raise InvalidRequest(
            f"the state directory {path} cannot be used: {error.strerror}; name another with ATOLL_STATE_DIR"
        ) from error
    raised: BaseException | None = None
    async with anyio.create_task_group() as tasks:
        runtime = Runtime(records, settings, tasks)
        if records.abandoned():
            tasks.start_soon(runtime.collect)
        try:
            yield runtime
        except BaseException as error:  # noqa: BLE001 - raised below: a task group would wrap what is the caller's own
            raised = error
        tasks.cancel_scope.cancel()
    if raised is not None:
        raise raised


class Runtime:
    """Made by `atoll.open()`."""

    def __init__(self, records: Records, settings: Settings, tasks: anyio.abc.TaskGroup) -> None:
        self._records = records
        self._settings = settings
        self._tasks = tasks
        self._drivers: dict[RuntimeName, oci.OciDriver] | None = None
        self._open: dict[str, Sandbox] = {}
        self._making: set[str] = set()
        self._launches = anyio.CapacityLimiter(_LAUNCHES)
        self.images = ImageStore(records.state_dir / "images", rootless=os.geteuid() != 0, in_use=self._digests_in_use)

    @property
    def state_dir(self) -> Path:
        return self._records.state_dir

    def drivers(self) -> Mapping[RuntimeName, Driver]:
        """The runtimes that can be used on this machine, fastest first."""
        if self._drivers is None:
            self._drivers = oci.find_drivers(self.state_dir)
        return self._drivers

    def doctor(self) -> builtins.list[Finding]:
        """What this machine can do and, for each lack, the command that mends it."""
        return oci.examine()

    # ---- making ----

    async def create(
        self,
        name: str | None = None,
        *,
        image: str | None = None,
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        user: str = "user",
        runtime: RuntimeName | None = None,
        ephemeral: bool = False,
        progress: Progress | None = None,
    ) -> Sandbox:
        """Make a sandbox and wait until it answers.

        It lives until it is destroyed, whatever becomes of this process; an `ephemeral` one until the last client
        leaves. Without a name it gets one. When this fails or is cancelled, nothing is left of it. `progress` hears
        of an image that is being fetched.

        Raises:
            InvalidRequest: the name, a limit or the environment is not allowed.
            SandboxExists: the name is taken.
            ImageUnavailable: the image cannot be had.
            RuntimeUnavailable: the runtime is not on this machine, or none is.
            Unenforceable: a limit cannot be kept here.
            LaunchFailed: it did not start.
        """
        spec = _spec(
            name=f"sandbox-{secrets.token_hex(4)}" if name is None else name,
            image=image or self._settings.image,
            limits=limits or Limits(),
            env=dict(env or {}),
            user=user,
            runtime=runtime or self._settings.runtime,
            ephemeral=ephemeral,
        )
        driver = self._choose(spec.runtime)
        if spec.name in self._records.names():
            await self.collect()
        layers = await self.images.resolve(spec.image, progress=progress)
        id = new_id()
        async with self._launches:
            return await self._launch(id, spec, driver, layers)

    async def _launch(self, id: str, spec: SandboxSpec, driver: Driver, layers: ImageLayers) -> Sandbox:
        with self._records.making(id) as directory:
            self._making.add(id)
            try:
                self._records.claim(spec.name, id)
                manifest = Manifest(
                    id=id,
                    spec=spec,
                    runtime=driver.name,
                    limits=_resolve_limits(spec.limits, driver),
                    env={**layers.env, **spec.env},
                    image_digest=layers.digest,
                    id_slot=self._records.claim_ids(id),
                    created_at=now(),
                )
                self._records.write(manifest)
                launch = Launch(
                    id=id,
                    directory=directory,
                    hostname=spec.name,
                    filesystems=layers.filesystems,
                    limits=manifest.limits,
                    id_base=manifest.id_base,
                    ephemeral=spec.ephemeral,
                )
                await driver.launch(launch)
                sandbox = self._sandbox(manifest, driver)
                await sandbox.connect()
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await self._remove(id, spec.name, driver, locked=True)
                raise
            finally:
                self._making.discard(id)
            if not spec.ephemeral:
                self._records.settle(id)
        sandbox.info = self._info(manifest)
        return sandbox

    def _choose(self, wanted: RuntimeName | None) -> Driver:
        drivers = self.drivers()
        if wanted is None and drivers:
            return next(iter(drivers.values()))
        if wanted is not None and wanted in drivers:
            return drivers[wanted]
        have = ", ".join(drivers) or "none"
        asked = f"the runtime {wanted}" if wanted else "a container runtime"
        raise RuntimeUnavailable(
            f"{asked} cannot be used on this machine (usable: {have}); 'atoll doctor' says what is missing",
            hint=f"apt-get install {wanted or 'crun'}",
        )

    def _sandbox(self, manifest: Manifest, driver: Driver) -> Sandbox:
        directory = self._records.directory(manifest.id)
        sandbox = Sandbox(
            self._info(manifest),
            partial(self._connect, manifest, directory),
            self._tasks,
            env=manifest.env,
            oom_kills=partial(driver.oom_kills, manifest.id),
            usage=partial(driver.usage, manifest.id, directory),
            destroy=partial(self._remove, manifest.id, manifest.spec.name, driver),
            stop=partial(self._stop, manifest.id, driver),
        )
        self._open[manifest.id] = sandbox
        return sandbox

    async def _connect(self, manifest: Manifest, directory: Path) -> anyio.abc.ByteStream:
        """A client's connection to the sandbox's keeper."""
        try:
            fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise SandboxNotFound(manifest.spec.name, self._records.names()) from None
        try:
            return await anyio.connect_unix(f"/proc/self/fd/{fd}/sock")
        except OSError as error:
            reason = _ending(directory) or "its keeper does not answer"
            raise SandboxDied(f"the sandbox {manifest.spec.name!r} has ended: {reason}; destroy it") from error
        finally:
            os.close(fd)

    # ---- finding ----

    async def get(self, name: str) -> Sandbox:
        """The sandbox of this name, made here or elsewhere.

        Raises:
            SandboxNotFound: there is none.
            RuntimeUnavailable: it was made with a runtime that is no longer on this machine.
        """
        id = self._records.lookup(name)
        if id in self._open:
            return self._open[id]
        manifest = self._records.read(id)
        if manifest is None:
            raise SandboxNotFound(name, [n for n in self._records.names() if n != name])
        return self._sandbox(manifest, self._choose(manifest.runtime))

    async def list(self) -> builtins.list[SandboxInfo]:
        """All sandboxes, by name."""
        return await anyio.to_thread.run_sync(self._list)

    def _list(self) -> builtins.list[SandboxInfo]:
        found = []
        for name in self._records.names():
            with contextlib.suppress(SandboxNotFound):
                manifest = self._records.read(self._records.lookup(name))
                if manifest is not None:
                    found.append(self._info(manifest))
        return found

    def _info(self, manifest: Manifest) -> SandboxInfo:
        directory = self._records.directory(manifest.id)
        driver = self.drivers().get(manifest.runtime)
        pid = driver.pid(directory) if driver else None
        status: Status = "running"
        reason = _ending(directory)
        if is_held(directory / "busy.lock"):
            status, reason = "provisioning", None
        elif pid is None or reason is not None:
            status, reason, pid = "error", reason or "its keeper has ended", None
        return SandboxInfo(
            id=manifest.id,
            name=manifest.spec.name,
            status=status,
            reason=reason,
            image=manifest.spec.image,
            runtime=manifest.runtime,
            limits=manifest.limits,
            user=manifest.spec.user,
            created_at=manifest.created_at,
            pid=pid,
        )

    def _digests_in_use(self) -> set[str]:
        manifests = (self._records.read(id) for id in os.listdir(self.state_dir / "sandboxes"))
        return {manifest.image_digest for manifest in manifests if manifest is not None}

    # ---- ending ----

    async def destroy(self, name: str) -> None:
        """End a sandbox and remove all of it. When it returns, nothing of it is left and the name is free.

        Raises:
            SandboxNotFound: there is none of this name.
        """
        id = self._records.lookup(name)
        manifest = self._records.read(id)
        await self._remove(id, name, self._choose(manifest.runtime) if manifest else None)

    async def collect(self) -> builtins.list[str]:
        """Put in order what processes left that died at work, and ephemeral sandboxes that have ended.

        Returns the ids of what was removed.
        """
        collected = []
        for id in self._records.abandoned():
            manifest = self._records.read(id)
            with contextlib.suppress(AtollError):
                driver = self._choose(manifest.runtime) if manifest else None
                await self._remove(id, manifest.spec.name if manifest else None, driver)
                collected.append(id)
        return collected

    async def _stop(self, id: str, driver: Driver) -> None:
        """End a sandbox that cannot be trusted any more. It stays, with its files, as one that is in error."""
        if id not in self._making:
            await driver.stop(id, self._records.directory(id))

    async def _remove(self, id: str, name: str | None, driver: Driver | None, *, locked: bool = False) -> None:
        sandbox = self._open.pop(id, None)
        async with self._records.removing(id, name, locked=locked) as directory:
            for each in [driver] if driver else list(self.drivers().values()):
                await each.destroy(id, directory)
        if sandbox is not None:
            await sandbox.aclose()


def _spec(**fields: object) -> SandboxSpec:
    try:
        return SandboxSpec.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(str(cause) if cause else f"{where}: {first['msg']}", field=where) from error


def _resolve_limits(limits: Limits, driver: Driver) -> Limits:
    able = driver.capabilities
    defaults: dict[str, object] = {}
    if limits.memory_bytes is None and able.memory_limit:
        defaults["memory_bytes"] = _DEFAULT_MEMORY_BYTES
    if limits.pids is None and able.pids_limit:
        defaults["pids"] = _DEFAULT_PIDS
    return limits.model_copy(update=defaults)


def _ending(directory: Path) -> str | None:
    """Why a sandbox has ended, as its keeper wrote it down."""
    try:
        return (directory / "ended").read_text(errors="replace")[:300].strip() or None
    except OSError:
        return None
