"""A runtime over a state directory: makes sandboxes, finds them again, ends them.

Knows how records, images, drivers and sandboxes come together. Refuses to know how each does its work. Any number of
runtimes, in any number of processes, may be open on one state directory.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc
import anyio.to_thread
from pydantic import SecretStr

from atoll.contract.driver import Diagnostic, Driver, LayerStore, ProcessImage
from atoll.contract.errors import (
    AtollError,
    InvalidRequest,
    RuntimeUnavailable,
    SandboxDied,
    SandboxError,
    SandboxExists,
    SandboxNotFound,
)
from atoll.contract.model import (
    Checkpoint,
    ExportResult,
    Limits,
    RuntimeName,
    SandboxInfo,
    SandboxSpec,
    SystemProcess,
    Usage,
    WarmPool,
    check_name,
)
from atoll.contract.network import AuditRecord, Indexes, NetworkPolicy
from atoll.contract.secret import Secret
from atoll.drivers import registry
from atoll.runtime.egress import audit
from atoll.runtime.egress.server import EgressServer, EgressServers
from atoll.runtime.images.store import ImageStore, Progress
from atoll.runtime.lifecycle.lifecycle import Lifecycle
from atoll.runtime.lifecycle.recovery import Recovery
from atoll.runtime.lifecycle.warm_pool import MAX_WARM, SandboxTemplate, WarmPools
from atoll.runtime.sandbox import Sandbox
from atoll.runtime.secrets import ca_bundle
from atoll.runtime.secrets.authority import Authority
from atoll.runtime.secrets.vault import Contents, Vault
from atoll.runtime.state import loop_storage
from atoll.runtime.state.checkpoints import CheckpointRecord, Checkpoints
from atoll.runtime.state.layers import Layers, ResolvedSpec
from atoll.runtime.state.leases import SessionLeases
from atoll.runtime.state.spec import validate_spec, with_defaults
from atoll.runtime.state.status import describe, ending
from atoll.runtime.state.store import Claimed, Manifest, StateStore, new_id, now
from atoll.settings import Settings

if TYPE_CHECKING:
    from atoll.runtime.archive.export import File
    from atoll.runtime.previews.router import Previews
    from atoll.runtime.sandbox_pool import SandboxPool

_LAUNCHES = 8
"""How many sandboxes are started at once. More would only make all of them wait for each other."""
_log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def open(state_dir: Path | str | None = None, *, settings: Settings | None = None) -> AsyncIterator[Engine]:
    """A runtime over `state_dir`, made if it is missing.

    Sandboxes do not end with it: the next one, here or in another process, finds them by name. What a process that
    died left half done is put in order in the background.

    Raises:
        InvalidRequest: the state directory cannot be used, or a setting is wrong.
    """
    settings = settings or Settings.from_environment()
    if state_dir is not None:
        settings = settings.model_copy(update={"state_dir": Path(state_dir)})
    if settings.runtime is not None:
        registry.check_name(settings.runtime, setting="ATOLL_RUNTIME")
    path = settings.resolve_state_dir()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        store = StateStore(path)
    except OSError as error:
        raise InvalidRequest(
            f"the state directory {path} cannot be used: {error.strerror}; name another with ATOLL_STATE_DIR"
        ) from error
    await loop_storage.mount(path)
    raised: BaseException | None = None
    async with anyio.create_task_group() as tasks:
        engine = Engine(store, settings, tasks)
        engine.begin_recovery()
        try:
            yield engine
            await engine.wait_refilled()
        except BaseException as error:  # noqa: BLE001 - raised below: a task group would wrap what is the caller's own
            raised = error
        tasks.cancel_scope.cancel()
    if raised is not None:
        raise raised


class Engine:
    """Made by `atoll.open()`."""

    def __init__(self, store: StateStore, settings: Settings, tasks: anyio.abc.TaskGroup) -> None:
        self._store = store
        self._settings = settings
        self._tasks = tasks
        self._drivers: Mapping[RuntimeName, Driver] | None = None
        self._layers = Layers(store.state_dir)
        self._checkpoints = Checkpoints(store.state_dir)
        self._lifecycle = Lifecycle(
            store, self._layers, self._checkpoints, self._choose, self._any_layers, self._epoll_waiters
        )
        self._vault = Vault(store.state_dir, settings.secrets_key)
        self._open: dict[str, Sandbox] = {}
        self._current: dict[str, Manifest] = {}
        """The manifests of those that are open, as they were when a connection was last made."""
        self._making: set[str] = set()
        self._launches = anyio.CapacityLimiter(_LAUNCHES)
        self.egress_servers = EgressServers(tasks)
        self._asking_tools = anyio.Lock()
        self._known_indexes: tuple[Indexes, float] | None = None
        self._ports: Previews | None = None
        self.storage = loop_storage.LoopStorage(store.state_dir, self._layers, self._lifecycle.collect)
        self.leases = SessionLeases(
            store.state_dir,
            names=store.names,
            checkpoints=lambda: [record.checkpoint for record in self._checkpoints.all()],
            destroy=self.destroy,
            delete=self.delete_checkpoint,
        )
        self._recovery = Recovery(store, self._lifecycle, self.leases, choose=self._choose, remove=self._remove)
        self._warm_pools = WarmPools(
            store, tasks, resolved=self._resolve_template, make=self._create_warm, remove=self._destroy_claimed
        )
        self.images = ImageStore(store.state_dir / "images", rootless=os.geteuid() != 0, in_use=self._digests_in_use)

    @property
    def state_dir(self) -> Path:
        return self._store.state_dir

    @property
    def ports(self) -> Previews:
        """The ports of sandboxes that this process exposes. Nothing is listened on before there is one."""
        if self._ports is None:
            from atoll.runtime.previews.router import Previews

            self._ports = Previews(self._tasks, self._settings.preview_address())
        return self._ports

    @property
    def default_image(self) -> str:
        """The image of sandboxes that do not name one."""
        return self._settings.image

    def drivers(self) -> Mapping[RuntimeName, Driver]:
        """The runtimes that can be used on this machine, fastest first, then those that must be requested by name."""
        if self._drivers is None:
            self._drivers = registry.available(self.state_dir)
        return self._drivers

    def doctor(self) -> builtins.list[Diagnostic]:
        """What this machine offers to isolation and, for everything that is missing, the command that fixes it."""
        return registry.doctor(self.state_dir)

    # ---- making ----

    async def create(
        self,
        name: str | None = None,
        *,
        image: str | None = None,
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, Secret] | None = None,
        secret_env: Mapping[str, str | SecretStr] | None = None,
        user: str = "user",
        runtime: RuntimeName | None = None,
        ephemeral: bool = False,
        pause_after_s: float | None = None,
        network: NetworkPolicy | None = None,
        progress: Progress | None = None,
    ) -> Sandbox:
        """Make a sandbox and wait until it answers.

        It lives until it is destroyed, whatever becomes of this process; an `ephemeral` one until the last client
        leaves. Without a name it gets one. When this fails or is cancelled, nothing is left of it. `progress` hears
        of an image that is being fetched. Where one of its kind waits (`warm`), that one is taken. `network` says what
        may leave it; unset, nothing can.

        Of `secrets` the sandbox has placeholders only, in the variables that they are named by; `secret_env` are
        variables that it has as they are. Neither is shown, logged or written to disk in clear.

        Raises:
            InvalidRequest: the name, a limit, the environment or a secret is not allowed.
            SandboxExists: the name is taken.
            ImageUnavailable: the image cannot be had.
            RuntimeUnavailable: the runtime is not on this machine, or none is.
            Unenforceable: a limit cannot be kept here.
            LaunchFailed: it did not start.
        """
        kept = Contents.of(secrets or {}, secret_env or {}, env or {})
        spec = validate_spec(
            name=f"sandbox-{token_hex(4)}" if name is None else name,
            image=image or self._settings.image,
            limits=limits or Limits(),
            env=dict(env or {}),
            user=user,
            runtime=runtime or self._settings.runtime,
            ephemeral=ephemeral,
            pause_after_s=pause_after_s,
            network=network,
            indexes=await self._indexes(network),
        )
        driver = self._choose(spec.runtime)
        await self._require_free(spec.name)
        resolved = await self._resolve_base(spec.image, with_defaults(spec.limits, driver), spec.env, progress, kept)
        authority = kept.authority if kept else None
        return await self._claim_warm(spec, driver, resolved, authority) or await self._make(
            spec, driver, resolved, authority=authority
        )

    async def _require_free(self, name: str) -> None:
        """Raise `SandboxExists` at once if the name is taken, and not by what is to be collected."""
        if self._store.name_taken(name):
            await self.collect()
            if self._store.name_taken(name):
                raise SandboxExists(name)

    async def _resolve_base(
        self,
        image: str,
        limits: Limits,
        env: Mapping[str, str],
        progress: Progress | None,
        kept: Contents | None = None,
    ) -> ResolvedSpec:
        found = await self.images.resolve(image, progress=progress)
        return ResolvedSpec(
            limits=limits,
            env={**found.env, **(kept.variables() if kept else {}), **env},
            image_digest=found.digest,
            base=found.filesystems,
            encrypted_secrets=self._vault.seal(kept) if kept else None,
        )

    async def _make(
        self,
        spec: SandboxSpec,
        driver: Driver,
        resolved: ResolvedSpec,
        *,
        memory: ProcessImage | None = None,
        checkpoint: str | None = None,
        warm_pool: str | None = None,
        group: str | None = None,
        authority: Authority | None = None,
    ) -> Sandbox:
        """A new sandbox, with the processes in `memory`, and with `checkpoint` as the one that it comes from.

        With `warm_pool` it waits there, without a name. One of a `group` is there when the group is complete. `authority`
        is one that it is to trust and does not yet.
        """
        id = new_id()
        async with self._launches, self._layers.lock():
            with self._store.making(id, group):
                self._making.add(id)
                try:
                    if warm_pool is None:
                        self._store.claim_name(spec.name, id)
                    else:
                        self._store.mark_creating(id)
                    manifest = Manifest(
                        id=id,
                        spec=spec,
                        runtime=driver.name,
                        active_layer=self._layers.new(),
                        id_slot=self._store.claim_ids(id),
                        created_at=now(),
                        checkpoint=checkpoint,
                        **resolved.resolved(),
                    )
                    self._store.write(manifest)
                    await self._lifecycle.start(manifest, driver, memory)
                    sandbox = self._sandbox(manifest, driver)
                    await sandbox.connect()
                    await ca_bundle.install(sandbox.files, authority)
                except BaseException:
                    with anyio.CancelScope(shield=True):
                        await self._remove(id, spec.name, driver, locked=True)
                    raise
                finally:
                    self._making.discard(id)
                if warm_pool is not None:
                    self._let_go(id)
                    self._store.mark_ready(id, warm_pool)
                elif group is None:
                    self._store.commit(id, ephemeral=spec.ephemeral)
        sandbox.info = self._info(manifest)
        return sandbox

    # ---- keeping some ready ----

    async def warm(
        self,
        count: int,
        *,
        image: str | None = None,
        limits: Limits | None = None,
        runtime: RuntimeName | None = None,
    ) -> WarmPool:
        """Keep `count` sandboxes of one kind ready. When it returns, they are.

        From then on a `create` with this image, these limits and this runtime, in whichever program, takes one that
        waits, and another is made behind it. They wait until they are taken or fewer are asked for: 0 ends them all.
        When it fails, as many are kept as before.

        Raises:
            InvalidRequest: the count or a limit is not allowed.
            ImageUnavailable, RuntimeUnavailable, Unenforceable, LaunchFailed: as `create`.
        """
        if not 0 <= count <= MAX_WARM:
            raise InvalidRequest(f"{count} sandboxes cannot be kept ready; it may be 0 to {MAX_WARM}")
        driver = self._choose(runtime or self._settings.runtime)
        wanted = with_defaults(limits or Limits(), driver)
        template = SandboxTemplate(image=image or self._settings.image, runtime=driver.name, limits=wanted)
        return await self._warm_pools.warm(template, count)

    async def warm_pools(self) -> builtins.list[WarmPool]:
        """The kinds of sandboxes that are kept ready."""
        return self._warm_pools.all()

    async def wait_refilled(self) -> None:
        """Wait until another waits for each that was taken here. Leaving `atoll.open()` does."""
        await self._warm_pools.finish()

    async def _resolve_template(self, template: SandboxTemplate) -> tuple[Driver, ResolvedSpec]:
        return self._choose(template.runtime), await self._resolve_base(template.image, template.limits, {}, None)

    async def _create_warm(self, template: SandboxTemplate, driver: Driver, resolved: ResolvedSpec) -> None:
        spec = validate_spec(
            name=f"waiting-{token_hex(4)}", image=template.image, limits=template.limits, runtime=template.runtime
        )
        await self._make(spec, driver, resolved, warm_pool=template.key)

    async def _destroy_claimed(self, claimed: Claimed) -> None:
        driver = self._choose(claimed.manifest.runtime) if claimed.manifest else None
        await self._remove(claimed.id, None, driver, locked=True)

    async def _claim_warm(
        self, spec: SandboxSpec, driver: Driver, resolved: ResolvedSpec, authority: Authority | None
    ) -> Sandbox | None:
        """A sandbox that waited and is from now on what `spec` says. None: there is none that fits."""
        key = SandboxTemplate(image=spec.image, runtime=driver.name, limits=resolved.limits).key
        with self._store.claim(key, partial(self._warm_pools.fits, driver=driver, resolved=resolved)) as claimed:
            self._warm_pools.refill(key)
            if claimed is None or claimed.manifest is None:
                return None
            given = {
                "spec": spec,
                "env": resolved.env,
                "encrypted_secrets": resolved.encrypted_secrets,
                "created_at": now(),
            }
            manifest = claimed.manifest.model_copy(update=given)
            try:
                sandbox = await self._bind(manifest, driver)
                await ca_bundle.install(sandbox.files, authority)
            except BaseException as error:
                with anyio.CancelScope(shield=True):
                    await self._remove(claimed.id, spec.name, driver, locked=True)
                if not isinstance(error, SandboxError):
                    raise
                _log.warning("a sandbox that waited was of no use; another is made", exc_info=True)
                return None
            self._store.commit(claimed.id, ephemeral=spec.ephemeral)
        sandbox.info = sandbox.info.model_copy(update={"status": "running"})
        return sandbox

    async def _bind(self, manifest: Manifest, driver: Driver) -> Sandbox:
        """Have a sandbox that waited be what its manifest now says."""
        spec, directory = manifest.spec, self._store.directory(manifest.id)
        self._making.add(manifest.id)
        try:
            async with driver.setting_hostname(manifest.run_id, directory, spec.name, manifest.id_base):
                self._store.write(manifest)
                self._store.claim_name(spec.name, manifest.id)
                sandbox = self._sandbox(manifest, driver)
                await sandbox.connect()
            if spec.ephemeral or spec.pause_after_s is not None:
                await driver.keeper.reconfigure(directory, ephemeral=spec.ephemeral, pause_after_s=spec.pause_after_s)
        finally:
            self._making.discard(manifest.id)
        return sandbox

    def _let_go(self, id: str) -> None:
        """Have nothing to do with a sandbox any more that is to wait for somebody else."""
        self._current.pop(id, None)
        sandbox = self._open.pop(id, None)
        if sandbox is not None:
            sandbox.disconnect()

    def _choose(self, wanted: RuntimeName | None) -> Driver:
        drivers = self.drivers()
        if wanted is not None and wanted in drivers:
            return drivers[wanted]
        if wanted is not None:
            registry.check_name(wanted)
        for driver in drivers.values():
            if wanted is None and driver.capabilities.chosen_by_default:
                return driver
        have = ", ".join(drivers) or "none"
        asked = f"the runtime {wanted}" if wanted else "a container runtime"
        by_name = f", or request {next(iter(drivers))} by name" if drivers and not wanted else ""
        raise RuntimeUnavailable(
            f"{asked} cannot be used on this machine (usable: {have}); 'atoll doctor' says what is missing{by_name}",
            hint=f"apt-get install {registry.package(wanted)}",
        )

    def _imported_runtime(self, named: RuntimeName | None) -> RuntimeName | None:
        """The runtime that a file asks for. None: nothing, or one that only a caller may ask for."""
        driver = self.drivers().get(named) if named else None
        return None if driver is not None and not driver.capabilities.chosen_by_default else named

    def _any_layers(self) -> LayerStore:
        """For work on layers that is the same whichever runtime wrote them."""
        first = next(iter(self.drivers().values()), None)
        return (first or self._choose(None)).layers

    def _sandbox(self, manifest: Manifest, driver: Driver) -> Sandbox:
        id = manifest.id
        self._current[id] = manifest
        egress = EgressServer(self.egress_servers, self._store.directory(id), partial(self._spec_of, id))
        secret = self._vault.open(manifest.encrypted_secrets) if manifest.encrypted_secrets is not None else Contents()
        if secret.secrets:
            from atoll.runtime.secrets.injection import SecretInjector

            egress.intercept = SecretInjector(secret, lambda: self.egress_servers.trust)
        sandbox = Sandbox(
            self._info(manifest),
            partial(self._connect, id),
            self._tasks,
            env={**manifest.env, **secret.env},
            oom_kills=partial(self._oom_kills, id, driver),
            usage=partial(self._usage, id, driver),
            destroy=partial(self._remove, id, manifest.spec.name, driver),
            stop=partial(self._stop, id, driver),
            host=self,
            egress=egress,
        )
        self._open[id] = sandbox
        return sandbox

    def _spec_of(self, id: str) -> SandboxSpec | None:
        manifest = self._store.read(id)
        return manifest.spec if manifest else None

    async def _epoll_waiters(self, manifest: Manifest) -> Sequence[SystemProcess]:
        """Who waits in a sandbox that the caller is at work on.

        It is asked over a connection of its own: whoever makes the one that all share may be waiting for the caller.
        """
        id, driver = manifest.id, self._choose(manifest.runtime)
        sandbox = Sandbox(
            self._info(manifest),
            partial(self._reach, manifest),
            self._tasks,
            env={},
            oom_kills=lambda: None,
            usage=partial(self._usage, id, driver),
            destroy=partial(self._stop, id, driver),
        )
        try:
            return await sandbox.epoll_waiters()
        finally:
            sandbox.disconnect()

    def _oom_kills(self, id: str, driver: Driver) -> int | None:
        manifest = self._current.get(id)
        return driver.oom_kills(manifest.run_id) if manifest else None

    async def _usage(self, id: str, driver: Driver) -> Usage:
        manifest = self._store.read(id)
        if manifest is None:
            raise SandboxDied("the sandbox was destroyed")
        return await driver.usage(manifest.run_id, self._layers.path(manifest.active_layer))

    async def _connect(self, id: str) -> anyio.abc.ByteStream:
        """A client's connection to the sandbox's keeper. One that sleeps is woken."""
        manifest = self._current[id] if id in self._making else self._store.read(id)
        if manifest is None:
            raise SandboxDied("the sandbox was destroyed")
        if manifest.state != "running" and id not in self._making:
            async with self._launches:
                manifest = await self._lifecycle.wake(id, asked=False)
        try:
            return await self._reach(manifest)
        except OSError:
            if id in self._making:
                raise
        # It has ended, or somebody is at work on it: that one is waited for.
        reason = ending(self._store.directory(id)) or "its keeper does not answer"
        async with self._launches:
            try:
                manifest = await self._lifecycle.wake(id, asked=False)
            except SandboxDied as error:
                raise SandboxDied(
                    f"the sandbox {manifest.spec.name!r} has ended: {reason}; wake it, or destroy it"
                ) from error
        return await self._reach(manifest)

    async def _reach(self, manifest: Manifest) -> anyio.abc.ByteStream:
        self._current[manifest.id] = manifest
        try:
            fd = os.open(self._store.directory(manifest.id), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise SandboxNotFound(manifest.spec.name, self._store.names()) from None
        try:
            return await anyio.connect_unix(f"/proc/self/fd/{fd}/sock")
        finally:
            os.close(fd)

    # ---- sleeping and waking ----

    async def pause(self, name: str) -> None:
        """Freeze the processes of a sandbox in memory, until it is next used. Does nothing to one that does not run.

        Raises:
            SandboxNotFound: there is none of this name.
            Unenforceable: sandboxes cannot be frozen on this machine.
        """
        await self._lifecycle.pause(self._store.lookup(name))

    async def resume(self, name: str) -> Sandbox:
        """Let a paused sandbox go on. Does nothing to one that runs.

        Raises:
            SandboxNotFound: there is none of this name.
            InvalidRequest: it sleeps, was shut down or has ended; `wake` starts it.
        """
        sandbox = await self.get(name)
        manifest = self._store.read(sandbox.id)
        status = self._info(manifest).status if manifest else "error"
        if status not in ("running", "paused"):
            raise InvalidRequest(f"sandbox {name!r} is not paused, its status is {status}; wake it instead", name=name)
        return await self.wake(name)

    async def sleep(self, name: str) -> None:
        """Put a sandbox to sleep on disk, until it is next used.

        Its files stay. With runsc its processes are saved and go on when it wakes; with the other runtimes they end.
        Calls in progress raise `SandboxDied`. `pause` keeps processes in memory instead.

        Raises:
            SandboxNotFound: there is none of this name.
            InvalidRequest: it is ephemeral.
            NotCheckpointable: the runtime cannot save what a process holds.
        """
        id = self._store.lookup(name)
        await self._lifecycle.sleep(id, "sleeping")
        await self._disconnect(id)

    async def shutdown(self, name: str) -> None:
        """Put a sandbox to sleep until `wake` is called: using it raises `SandboxAsleep`.

        Raises:
            SandboxNotFound: there is none of this name.
        """
        id = self._store.lookup(name)
        await self._lifecycle.sleep(id, "shutdown")
        await self._disconnect(id)

    async def _disconnect(self, id: str) -> None:
        """Let go of the connection to a run that is over, without waiting to be told."""
        if id in self._open:
            await self._open[id].aclose()

    async def sleep_unused(self, name: str, after: timedelta) -> bool:
        """Put a sandbox to sleep, cold, if nobody has used it for so long. Returns whether it was.

        Raises:
            SandboxNotFound: there is none of this name.
        """
        id = self._store.lookup(name)
        slept = await self._lifecycle.sleep_unused(id, after)
        if slept:
            await self._disconnect(id)
        return slept

    @contextlib.asynccontextmanager
    async def pool(
        self, session_id: str, *, temporary: bool = False, sleeps: bool = False, **options: Any
    ) -> AsyncIterator[SandboxPool]:
        """The sandboxes of one session. While it is open, those that nobody uses go to sleep.

        They stay when it ends; where it `sleeps`, they go to sleep, unless somebody else has the session open. Of a
        `temporary` one, nothing stays: its sandboxes and their checkpoints go with it or, if this process is killed,
        when the state directory is next used.

        `options` are those of `SandboxPool`: `image`, `limits`, `env`, `secrets`, `secret_env`, `user`, `runtime`,
        `pause_after_s`, `network` and `sleep_after_s`, ten minutes when it is not said.

        Raises:
            InvalidRequest: an option is wrong.
            SandboxError: it is temporary, and somebody else has it.
        """
        from atoll.runtime.sandbox_pool import SandboxPool

        pool = SandboxPool(self, session_id, **options)
        scope = anyio.CancelScope()

        async def reap() -> None:
            with scope:
                await pool.reap()

        kept = partial(self.leases.kept, on_last_release=pool.sleep if sleeps else None)
        have = self.leases.temporary if temporary else kept
        async with have(session_id):
            self._tasks.start_soon(reap)
            try:
                yield pool
            finally:
                scope.cancel()

    async def wake(self, name: str) -> Sandbox:
        """Have a sandbox run that sleeps, was shut down, or has ended. Does nothing to one that runs.

        Raises:
            SandboxNotFound: there is none of this name.
            LaunchFailed: it did not start.
        """
        sandbox = await self.get(name)
        async with self._launches:
            await self._lifecycle.wake(sandbox.id, asked=True)
        sandbox.forget_failure()
        await sandbox.connect()
        return sandbox

    # ---- the network ----

    async def set_network(self, name: str, policy: NetworkPolicy | None) -> None:
        """Say what may leave a sandbox from now on, whoever serves it. None: nothing.

        It holds for the next connection; open ones that are not allowed any more are cut, within a second by another
        process. Commands that run already know of a proxy only if there was a policy when they were started. What
        `registries` stands for is found out now.

        Raises:
            SandboxNotFound: there is none of this name.
            Unenforceable: `registries` is asked for, and this machine is configured for none.
        """
        id = self._store.lookup(name)
        indexes = await self._indexes(policy)
        await self._lifecycle.set_network(id, policy, indexes)
        if id in self._open:
            sandbox = self._open[id]
            sandbox.info = sandbox.info.model_copy(update={"network": policy})
            await sandbox.apply_policy()

    async def audit(self, name: str) -> builtins.list[AuditRecord]:
        """What left a sandbox or tried to, the oldest first, as far back as records are kept.

        Raises:
            SandboxNotFound: there is none of this name.
        """
        return await anyio.to_thread.run_sync(audit.read, self._store.directory(self._store.lookup(name)))

    def follow_audit(self, name: str) -> AsyncIterator[AuditRecord]:
        """The latest records of a sandbox, and then those that come, until it is destroyed. Of an allowed connection
        there is one when it begins, and another with the same id when it has ended.

        Raises:
            SandboxNotFound: there is none of this name.
        """
        return audit.follow(self._store.directory(self._store.lookup(name)))

    async def _indexes(self, policy: NetworkPolicy | None) -> Indexes | None:
        """What the preset stands for now. Asking the tools takes a second, so it is known for a while."""
        if policy is None or not policy.has_preset:
            return None
        from atoll.runtime.egress import registries

        async with self._asking_tools:
            if self._known_indexes is None or self._known_indexes[1] < anyio.current_time():
                self._known_indexes = await registries.find(), anyio.current_time() + registries.KNOWN_FOR_S
            return self._known_indexes[0]

    # ---- checkpoints ----

    async def checkpoint(self, name: str, label: str | None = None) -> Checkpoint:
        """Remember a sandbox as it is now. It goes on; a running one stands still while its files are copied.

        Raises:
            SandboxNotFound: there is none of this name.
            InvalidRequest: the label is not allowed.
            Unenforceable: it runs, and cannot be frozen here.
        """
        if label is not None:
            check_name(label)
        return (await self._checkpoint(self._store.lookup(name), label)).checkpoint

    async def _checkpoint(self, id: str, label: str | None, *, keep: bool = True) -> CheckpointRecord:
        served = id in self._open and self._open[id].is_served_here
        record = await self._lifecycle.checkpoint(id, label, keep=keep)
        if record.checkpoint.with_memory:
            await self._disconnect(id)
            if served and id in self._open:  # its processes go on, and so does what they reach
                with contextlib.suppress(SandboxError):
                    await self._open[id].connect()
        return record

    async def checkpoints(self, name: str | None = None) -> builtins.list[Checkpoint]:
        """All checkpoints, or those of one sandbox, the oldest first."""
        found = []
        for record in self._checkpoints.all():
            if name is None or record.checkpoint.sandbox == name:
                size = await self._lifecycle.size(record)
                found.append(record.checkpoint.model_copy(update={"size_bytes": size}))
        return found

    async def restore(self, name: str, checkpoint: str) -> Sandbox:
        """Have a sandbox be again what it was at a checkpoint: its id, or its label.

        What was written since is lost, and processes end. When it fails, the sandbox sleeps and has its files.

        Raises:
            SandboxNotFound, CheckpointNotFound: there is none.
            LaunchFailed: it did not start.
        """
        sandbox = await self.get(name)
        record = self._checkpoints.find(checkpoint, name)
        async with self._launches:
            dropped = await self._lifecycle.restore(sandbox.id, record)
        self._tasks.start_soon(self._put_away, dropped)
        await self._disconnect(sandbox.id)
        sandbox.forget_failure()
        await sandbox.connect()
        return sandbox

    async def _put_away(self, layer: Path) -> None:
        """Remove a layer that nobody names any more. Many files take seconds: only the end of this runtime waits."""
        with (
            anyio.CancelScope(shield=True),
            contextlib.suppress(AtollError, OSError),
            self._store.in_progress(layer.name),
        ):
            await self._any_layers().remove(layer)

    async def fork(
        self, source: str, count: int = 1, *, checkpoint: str | None = None, names: Sequence[str] | None = None
    ) -> builtins.list[Sandbox]:
        """Make sandboxes that begin as `source` is now, or was at a checkpoint. All of them, or none.

        `source` goes on. Without `names` they are called after it.

        Raises:
            SandboxNotFound, CheckpointNotFound: there is none.
            InvalidRequest: the count is not 1 or more, or does not fit the names.
            SandboxExists: a name is taken.
        """
        names = names or [f"{source[:50]}-{token_hex(4)}" for _ in range(count)]
        if count < 1 or len(names) != count:
            raise InvalidRequest(f"{count} forks with {len(names)} names cannot be; give as many names as forks")
        async with self._as_it_was(source, checkpoint) as record:
            allowed = record.spec
            with contextlib.suppress(SandboxNotFound):  # of the sandbox whose files and secrets these are
                allowed = self._spec_of(self._store.lookup(record.checkpoint.sandbox)) or allowed
            return await self._fork(record, names, allowed=allowed, kept=checkpoint is not None)

    @contextlib.asynccontextmanager
    async def _as_it_was(self, name: str, checkpoint: str | None) -> AsyncIterator[CheckpointRecord]:
        """A sandbox at a checkpoint, or as it is now. Its layers are not taken away as long as the context lasts."""
        id = self._store.lookup(name)
        try:
            async with self._layers.lock():
                if checkpoint is not None:
                    yield self._checkpoints.find(checkpoint, name)
                else:
                    yield await self._checkpoint(id, None, keep=False)
        finally:
            with anyio.CancelScope(shield=True), contextlib.suppress(AtollError):
                await self._lifecycle.collect(patience_s=1)

    async def _fork(
        self, record: CheckpointRecord, names: Sequence[str], *, allowed: SandboxSpec, kept: bool
    ) -> builtins.list[Sandbox]:
        driver = self._choose(record.checkpoint.runtime)
        memory = self._checkpoints.memory(record)
        made: builtins.list[Sandbox] = []
        failures: builtins.list[AtollError] = []

        async def one(name: str, group: str) -> None:
            # What it may reach is a matter of now, not of then.
            changes = {"name": name, "ephemeral": False, "network": allowed.network, "indexes": allowed.indexes}
            spec = validate_spec(**{**record.spec.model_dump(), **changes})
            stands_at = record.checkpoint.id if kept else record.checkpoint.parent
            try:
                made.append(await self._make(spec, driver, record, memory=memory, checkpoint=stands_at, group=group))
            except AtollError as error:
                failures.append(error)

        with self._store.create_group() as group:
            whole = False
            try:
                async with anyio.create_task_group() as tasks:
                    for name in names:
                        tasks.start_soon(one, name, group)
                whole = not failures
            finally:
                if not whole:
                    with anyio.CancelScope(shield=True):
                        for sandbox in made:
                            await self._remove(sandbox.id, sandbox.name, driver, held=True)
            if failures:
                raise failures[0]
        return sorted(made, key=lambda sandbox: list(names).index(sandbox.name))

    async def delete_checkpoint(self, checkpoint: str, *, sandbox: str | None = None) -> None:
        """Forget a checkpoint, by its id or, with `sandbox`, by its label, and free what nobody else needs of it.

        Raises:
            CheckpointNotFound: there is none.
        """
        id = self._checkpoints.find(checkpoint, sandbox).checkpoint.id
        with self._store.in_progress(id):
            self._checkpoints.forget(id)
            await self._lifecycle.collect(patience_s=1)

    # ---- other machines ----

    async def export(
        self, name: str, target: File, *, checkpoint: str | None = None, progress: Progress | None = None
    ) -> ExportResult:
        """Write a sandbox as it is now, or as it was at a checkpoint, to one file. The sandbox goes on.

        The file holds what was written on top of the image, not the image, and no processes. A path has the file when
        it is whole, readable for this user alone. An open file is written to from where it is; `progress` hears of
        bytes before they are compressed.

        Raises:
            SandboxNotFound, CheckpointNotFound: there is none.
            Unenforceable: it runs, and cannot be frozen here.
            SandboxError: it could not be read or written.
            OSError: the path cannot be written to.
        """
        from atoll.runtime.archive import export as exporting

        async with self._as_it_was(name, checkpoint) as record:
            driver = self._choose(record.checkpoint.runtime)
            return await exporting.write(record, self._layers, driver, target, progress)

    async def import_(
        self,
        source: File,
        name: str | None = None,
        *,
        image: str | None = None,
        limits: Limits | None = None,
        runtime: RuntimeName | None = None,
        limit_bytes: int | None = None,
        progress: Progress | None = None,
    ) -> Sandbox:
        """Make a sandbox from a file that `export` wrote, here or elsewhere, and wait until it answers.

        Nothing in the file is trusted. It is unpacked and checked to its last byte before anything of it is used; when
        it is refused, or this is cancelled, nothing is left. Unset, `name`, `limits` and `runtime` are the file's, if
        the limits are no wider than those of a new sandbox, and the settings name no runtime; `image` is that of the
        same digest, or this machine's own `host`; `limit_bytes`, what it may take up unpacked, is three quarters of
        the free disk.

        Raises:
            ArchiveRefused: it is not a whole, unchanged file that `export` wrote, or it is too large.
            ImageUnavailable: the image that it stands on is not here.
            InvalidRequest: it asks for wider limits, or an argument is wrong.
            SandboxExists: the name is taken.
            RuntimeUnavailable, Unenforceable, LaunchFailed: as `create`.
            OSError: the path cannot be read.
        """
        from atoll.runtime.archive import export as exporting

        if name is not None:
            check_name(name)
        any_driver = self._choose(runtime or self._settings.runtime)
        async with (
            self._layers.lock(),
            exporting.opened(source, self._layers, any_driver, limit_bytes=limit_bytes, progress=progress) as archive,
        ):
            contents = archive.contents
            runtime = runtime or self._settings.runtime or self._imported_runtime(contents.runtime)
            driver = self._choose(runtime)
            if limits is None:
                limits = exporting.allowed(contents.limits, with_defaults(Limits(), driver))
            reference, base = image or contents.image.reference, None
            if image is None and reference != "host":
                reference, base = exporting.find_base_image(self.images, contents.image)
            spec = validate_spec(
                name=contents.name if name is None else name,
                image=reference,
                limits=limits,
                env=contents.env,
                user=contents.user,
                runtime=runtime,
                pause_after_s=contents.pause_after_s,
            )
            await self._require_free(spec.name)
            base = base or await self.images.resolve(reference, progress=progress)
            resolved = ResolvedSpec(
                limits=with_defaults(limits, driver),
                env={**base.env, **spec.env},
                image_digest=base.digest,
                base=base.filesystems,
                layers=await archive.unpack(base.filesystems),
            )
            return await self._make(spec, driver, resolved)

    # ---- finding ----

    async def get(self, name: str) -> Sandbox:
        """The sandbox of this name, made here or elsewhere.

        Raises:
            SandboxNotFound: there is none.
            RuntimeUnavailable: it was made with a runtime that is no longer on this machine.
        """
        id = self._store.lookup(name)
        if id in self._open:
            return self._open[id]
        manifest = self._store.read(id)
        if manifest is None:
            raise SandboxNotFound(name, [n for n in self._store.names() if n != name])
        return self._sandbox(manifest, self._choose(manifest.runtime))

    async def list(self, prefix: str = "") -> builtins.list[SandboxInfo]:
        """All sandboxes whose names begin with `prefix`, by name."""
        return await anyio.to_thread.run_sync(self._list, prefix)

    def _list(self, prefix: str) -> builtins.list[SandboxInfo]:
        found = []
        for name in filter(lambda name: name.startswith(prefix), self._store.names()):
            with contextlib.suppress(SandboxNotFound):
                manifest = self._store.read(self._store.lookup(name))
                if manifest is not None:
                    found.append(self._info(manifest))
        return found

    def _info(self, manifest: Manifest) -> SandboxInfo:
        return describe(manifest, self._store.directory(manifest.id), self.drivers().get(manifest.runtime))

    def _digests_in_use(self) -> set[str]:
        manifests = (self._store.read(id) for id in os.listdir(self.state_dir / "sandboxes"))
        find_base_image = {manifest.image_digest for manifest in manifests if manifest is not None}
        return find_base_image | {record.image_digest for record in self._checkpoints.all()}

    # ---- ending ----

    async def destroy(self, name: str) -> None:
        """End a sandbox and remove all of it. When it returns, nothing of it is left and the name is free.

        Raises:
            SandboxNotFound: there is none of this name.
        """
        id = self._store.lookup(name)
        manifest = self._store.read(id)
        await self._remove(id, name, self._choose(manifest.runtime) if manifest else None)

    def begin_recovery(self) -> None:
        """What processes left that died at work is put in order, beside all else."""
        self._recovery.finish_created()
        if self._recovery.is_needed():
            self._tasks.start_soon(self._recovery.recover)

    async def collect(self) -> builtins.list[str]:
        """Put in order what processes left that died at work, and ephemeral sandboxes that have ended.

        Returns the ids of what was removed.
        """
        return await self._recovery.collect()

    async def gc(self) -> builtins.list[str]:
        """`collect`, and free layers and images that nobody needs any more. Returns the ids of what was freed."""
        freed = await self.collect()
        await self._warm_pools.tidy()
        await self._recovery.reconcile()
        freed += [path.name for path in await self._lifecycle.collect()]
        return freed + await self.images.collect()

    async def _stop(self, id: str, driver: Driver) -> None:
        """End a sandbox that cannot be trusted any more. It stays, with its files, as one that is in error."""
        if id not in self._making:
            await driver.stop(self._current[id].run_id, self._store.directory(id))

    async def _remove(
        self,
        id: str,
        name: str | None,
        driver: Driver | None,
        *,
        locked: bool = False,
        abandoned: bool = False,
        held: bool = False,
    ) -> None:
        """`locked` and `abandoned` are those of `StateStore.removing`. With `held`, layers are left to who holds them."""
        sandbox = None if abandoned else self._open.pop(id, None)
        if self._ports is not None:
            self._ports.unexpose(id)
        async with self._store.removing(id, name, locked=locked, abandoned=abandoned) as directory:
            sandbox = sandbox or self._open.pop(id, None)
            manifest = self._store.read(id)
            run_id, more = (
                (manifest.run_id, [self._layers.path(manifest.active_layer)]) if manifest else (f"{id}.1", [])
            )
            drivers = [driver] if driver else list(self.drivers().values())
            with anyio.CancelScope(shield=True):
                for each in drivers:
                    await each.stop(run_id, directory)
                if drivers:
                    await drivers[0].layers.remove(directory, *more)
        self._current.pop(id, None)
        if sandbox is not None:
            await sandbox.aclose()
        if manifest is not None and manifest.layers and not (locked or held):
            await self._lifecycle.collect(patience_s=1)
