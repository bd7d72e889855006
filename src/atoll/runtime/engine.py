"""The engine of this machine: `open`, and `LocalEngine`, which has the sandboxes of a state directory.

Owns what the public arguments mean, their defaults, and how the parts of an engine are put together. Any number of
engines, in any number of processes, may be open on one state directory.

Not here: what its methods promise (`Engine` in `interface.py`), how a sandbox comes into being (`provisioning.py`),
which sandboxes are open in this process and how their guests are reached (`connections.py`), how a sandbox starts,
sleeps and is checkpointed (`lifecycle/`), what is on disk (`state/`), and what can be done inside a sandbox
(`sandbox.py`). Used by the layers above.
"""

from __future__ import annotations

import builtins
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
from anyio.abc import ByteStream

from atoll.contract.driver import Capabilities, Diagnostic, Driver, LayerStore
from atoll.contract.errors import (
    AtollError,
    CheckpointNotFound,
    InvalidRequest,
    RuntimeUnavailable,
    SandboxError,
    SandboxNotFound,
)
from atoll.contract.model import (
    VOLUME_PREFIX,
    Checkpoint,
    ExportResult,
    GcResult,
    Limits,
    Mount,
    OnExpiry,
    ProcessInfo,
    RuntimeName,
    SandboxInfo,
    SandboxSpec,
    SystemProcess,
    TemplateVersion,
    WarmPool,
)
from atoll.contract.names import TEMPLATE_PREFIX, check_name, check_namespace
from atoll.contract.network import AuditRecord, NetworkPolicy
from atoll.drivers import registry
from atoll.runtime.connections import Connections, PortPublisher
from atoll.runtime.egress import audit
from atoll.runtime.interface import Engine, SandboxKeywords
from atoll.runtime.lifecycle.lifecycle import Lifecycle
from atoll.runtime.lifecycle.recovery import Recovery
from atoll.runtime.lifetimes import AwaitableContext, BackgroundTasks
from atoll.runtime.sandbox import Sandbox
from atoll.runtime.secrets.vault import SandboxSecrets, Vault
from atoll.runtime.state import loop_storage
from atoll.runtime.state.checkpoints import Checkpoints
from atoll.runtime.state.layers import Layers
from atoll.runtime.state.leases import SessionLeases
from atoll.runtime.state.spec import check_lifetime, validate_spec, with_defaults
from atoll.runtime.state.store import Manifest, StateStore
from atoll.runtime.state.templates import TemplateStore
from atoll.runtime.state.volumes import VolumeStore
from atoll.settings import Settings

if TYPE_CHECKING:
    from pydantic import SecretStr

    from atoll.contract.secret import Secret
    from atoll.runtime.archive.export import ArchiveFile
    from atoll.runtime.egress.server import EgressServers
    from atoll.runtime.images.fetch import ProgressCallback
    from atoll.runtime.images.store import ImageStore
    from atoll.runtime.lifecycle.warm_pool import WarmPools
    from atoll.runtime.previews.router import Previews
    from atoll.runtime.provisioning import Provisioner
    from atoll.runtime.sandbox_pool import SandboxPool


def open(
    state_dir: Path | str | None = None, *, namespace: str | None = None, settings: Settings | None = None
) -> AwaitableContext[Engine]:
    """An engine over one namespace of `state_dir`, which is made if it is missing.

    `async with atoll.open() as engine` closes it after the block; `engine = await atoll.open()` leaves that to
    `Engine.aclose`, which any task may call. Sandboxes do not end with it: the next engine, in this process or another,
    finds them by name. Operations that were interrupted because their process died are finished or undone in the
    background.

    The names of sandboxes, volumes, sessions and warm pools, and all checkpoints, are those of the `namespace`, unset
    that of the settings (`default`). The engine finds nothing of another, neither by name nor by id. Images, storage,
    recovery and garbage collection are the whole state directory's.

    Raises:
        InvalidRequest: the state directory cannot be used, or the namespace or a setting is wrong.
    """
    return AwaitableContext(_open(state_dir, namespace, settings))


async def _open(state_dir: Path | str | None, namespace: str | None, settings: Settings | None) -> LocalEngine:
    settings = settings or Settings.from_environment()
    if state_dir is not None:
        settings = settings.model_copy(update={"state_dir": Path(state_dir)})
    if namespace is not None:
        settings = settings.model_copy(update={"namespace": check_namespace(namespace)})
    if settings.runtime is not None:
        registry.check_name(settings.runtime, setting="ATOLL_RUNTIME")
    path = settings.resolve_state_dir()
    try:
        store = StateStore(path, settings.namespace)
    except OSError as error:
        raise InvalidRequest(
            f"the state directory {path} cannot be used: {error.strerror}; name another with ATOLL_STATE_DIR"
        ) from error
    await loop_storage.mount(path)
    tasks = await BackgroundTasks.open()
    try:
        return LocalEngine(store, settings, tasks)
    except BaseException:
        await tasks.close()
        raise


class LocalEngine(Engine):
    """The sandboxes of one namespace of a state directory of this machine. Made by `atoll.open()`."""

    def __init__(self, store: StateStore, settings: Settings, tasks: BackgroundTasks) -> None:
        self._store = store
        self._settings = settings
        self._tasks = tasks
        self._drivers: Mapping[RuntimeName, Driver] | None = None
        self._layers = Layers(store.state_dir)
        self._checkpoints = Checkpoints(store)
        self._volumes = VolumeStore(store, self._layers, self._any_layers)
        self._templates = TemplateStore(store)
        self._lifecycle = Lifecycle(
            store,
            self._layers,
            self._checkpoints,
            self._choose,
            self._any_layers,
            self._epoll_waiters,
            self._live_commands,
            self._volumes,
        )
        self._leases = SessionLeases(
            store.state_dir,
            store.namespace,
            names=lambda namespace: store.within(namespace).names(),
            checkpoints=lambda namespace: [record.checkpoint for record in self._checkpoints_in(namespace).all()],
            destroy=lambda namespace, name: self._destroy(store.within(namespace), name, checkpoints=False),
            delete=lambda namespace, id: self._delete_checkpoint(self._checkpoints_in(namespace), id, None),
        )
        self._vault = Vault(store.state_dir, settings.secrets_key)
        self._connections = Connections(
            self,
            store,
            self._layers,
            self._lifecycle,
            self._vault,
            tasks,
            choose=self._choose,
            preview_address=settings.preview_address(),
        )
        self._recovery = Recovery(
            store,
            self._lifecycle,
            self._leases,
            choose=self._choose,
            remove=self._connections.remove,
            sleep=self._sleep_at_end,
        )
        self._recovery.begin(tasks)

    # Imported and made when first used: a command in a sandbox that exists needs neither.

    @cached_property
    def images(self) -> ImageStore:
        from atoll.runtime.images.store import ImageStore

        directory = self._store.state_dir / "images"
        return ImageStore(directory, rootless=os.geteuid() != 0, in_use=self._digests_in_use)

    @cached_property
    def _provisioner(self) -> Provisioner:
        from atoll.runtime.provisioning import Provisioner

        return Provisioner(
            self._store,
            self._layers,
            self._checkpoints,
            self._lifecycle,
            self._vault,
            self.images,
            self._connections,
            choose=self._choose,
            free_names=self.remove_abandoned,
            volumes=self._volumes,
        )

    @property
    def volumes(self) -> VolumeStore:
        return self._volumes

    @property
    def templates(self) -> TemplateStore:
        return self._templates

    @property
    def storage(self) -> loop_storage.LoopStorage:
        return loop_storage.LoopStorage(self.state_dir, self._layers, self._lifecycle.remove_unreferenced)

    @property
    def _warm_pools(self) -> WarmPools:
        return self._provisioner.warm_pools

    # The connections are made after the lifecycle that asks for these.

    async def _epoll_waiters(self, manifest: Manifest) -> Sequence[SystemProcess]:
        return await self._connections.epoll_waiters(manifest)

    def _live_commands(
        self, manifest: Manifest, stream: ByteStream | None
    ) -> AbstractAsyncContextManager[Sequence[ProcessInfo]]:
        return self._connections.live_commands(manifest, stream)

    def _checkpoints_in(self, namespace: str) -> Checkpoints:
        return Checkpoints(self._store.within(namespace))

    @property
    def state_dir(self) -> Path:
        return self._store.state_dir

    @property
    def namespace(self) -> str:
        return self._store.namespace

    @property
    def previews(self) -> Previews:
        """The ports of sandboxes that this process exposes. It listens once the first port is exposed."""
        return self._connections.previews

    @property
    def is_in_use(self) -> bool:
        """Whether it is connected to sandboxes, whose commands and egress it may serve, or keeps warm pools filled."""
        return self._connections.has_any or ("_provisioner" in vars(self) and self._warm_pools.is_busy)

    def publish_at(self, publisher: PortPublisher) -> None:
        """From now on expose ports there, and not at an address of this process."""
        self._connections.publisher = publisher

    @property
    def egress_servers(self) -> EgressServers:
        """The egress of the sandboxes that this process is connected to."""
        return self._connections.egress_servers

    @property
    def default_image(self) -> str:
        return self._settings.image

    @property
    def default_runtime(self) -> RuntimeName:
        return self._choose(self._settings.runtime).name

    def drivers(self) -> Mapping[RuntimeName, Driver]:
        """The runtimes that can be used on this machine, fastest first, then those that must be requested by name."""
        if self._drivers is None:
            self._drivers = registry.available(self.state_dir)
        return self._drivers

    def runtimes(self) -> Mapping[RuntimeName, Capabilities]:
        return {name: driver.capabilities for name, driver in self.drivers().items()}

    def effective_limits(self, limits: Limits, runtime: RuntimeName | None = None) -> Limits:
        return with_defaults(limits, self._choose(runtime or self._settings.runtime).capabilities)

    def doctor(self) -> builtins.list[Diagnostic]:
        return registry.doctor(self.state_dir)

    def _choose(self, wanted: RuntimeName | None) -> Driver:
        drivers = self.drivers()
        if wanted is not None and wanted in drivers:
            return drivers[wanted]
        if wanted is not None:
            registry.check_name(wanted)
        for driver in drivers.values():
            if wanted is None and driver.capabilities.chosen_by_default:
                return driver
        usable = ", ".join(drivers) or "none"
        what = f"the runtime {wanted}" if wanted else "a container runtime"
        by_name = f", or request {next(iter(drivers))} by name" if drivers and not wanted else ""
        raise RuntimeUnavailable(
            f"{what} cannot be used on this machine (usable: {usable}); 'atoll doctor' says what is missing{by_name}",
            hint=f"apt-get install {registry.package(wanted)}",
        )

    def _any_layers(self) -> LayerStore:
        """For work on layers that is the same whichever runtime wrote them."""
        first = next(iter(self.drivers().values()), None)
        return (first or self._choose(None)).layers

    # ---- creating ----

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

        async def making() -> Sandbox:
            contents = SandboxSecrets.of(secrets or {}, secret_env or {}, env or {})
            given: dict[str, object] = {
                "name": f"sandbox-{os.urandom(4).hex()}" if name is None else name,
                "limits": limits or Limits(),
                "env": dict(env or {}),
                "user": user,
                "cwd": cwd,
                "ephemeral": ephemeral,
                "pause_after_s": pause_after_s,
                "sudo": sudo,
                "network": network,
                "indexes": await self._provisioner.find_indexes(network),
                "labels": dict(labels or {}),
                "ttl_s": ttl_s,
                "on_expiry": on_expiry,
                "ttl_renewed_by_use": ttl_renewed_by_use,
                "mounts": tuple(mounts),
            }
            if image is not None and image.startswith(TEMPLATE_PREFIX):
                if from_checkpoint is not None:
                    raise InvalidRequest("a sandbox from a checkpoint has its image; leave that out")
                version = await self._template(image, runtime)
                given |= {
                    "env": {**version.env, **(env or {})},
                    "user": user or version.user,
                    "cwd": cwd or version.cwd,
                }
                given |= {"start_command": version.start_command, "ready_command": version.ready_command}
                spec = validate_spec(**given, image=version.image, runtime=version.runtime)
                check_lifetime(spec)
                created = await self._from_template(image, version, spec, contents)
                self._recovery.watch_expiries(self._tasks, created.info)
                return created
            spec = validate_spec(
                **given, image=image or self._settings.image, runtime=runtime or self._settings.runtime
            )
            check_lifetime(spec)
            if from_checkpoint is None:
                created = await self._provisioner.create(spec, contents, progress)
            else:
                refused = {"image": image, "runtime": runtime}
                if wrong := [option for option, value in refused.items() if value]:
                    raise InvalidRequest(f"a sandbox from a checkpoint has its {wrong[0]}; leave that out")
                created = await self._provisioner.create_from(from_checkpoint, spec, contents)
            self._recovery.watch_expiries(self._tasks, created.info)
            return created

        return AwaitableContext(making())

    async def _template(self, reference: str, runtime: RuntimeName | None) -> TemplateVersion:
        version = await self._templates.version(reference)
        if runtime not in (None, version.runtime):
            raise InvalidRequest(
                f"{reference} was built for {version.runtime}, and {runtime} was asked for; leave the runtime out, or "
                "build the template for it"
            )
        return version

    async def _from_template(
        self, reference: str, version: TemplateVersion, spec: SandboxSpec, secrets: SandboxSecrets | None
    ) -> Sandbox:
        try:
            return await self._provisioner.create_from(version.checkpoint, spec, secrets, template=True)
        except CheckpointNotFound:
            raise InvalidRequest(
                f"the files of {reference} (checkpoint {version.checkpoint}) were deleted; build it again"
            ) from None

    async def check_options(self, options: SandboxKeywords) -> None:
        if (image := options.get("image") or "").startswith(TEMPLATE_PREFIX):
            version = await self._template(image, options.get("runtime"))
            options = {**options, "image": version.image, "runtime": version.runtime}
        given = {name: value for name, value in options.items() if value is not None and "secret" not in name}
        defaults = {"image": self._settings.image, "runtime": self._settings.runtime}
        spec = validate_spec(**{**defaults, **given, "name": "sandbox"})
        check_lifetime(spec)
        await self._provisioner.check(spec)

    async def warm(
        self,
        count: int,
        *,
        image: str | None = None,
        limits: Limits | None = None,
        runtime: RuntimeName | None = None,
    ) -> WarmPool:
        from atoll.runtime.lifecycle.warm_pool import SandboxTemplate, check_count

        check_count(count)
        driver = self._choose(runtime or self._settings.runtime)
        wanted = with_defaults(limits or Limits(), driver.capabilities)
        template = SandboxTemplate(image=image or self._settings.image, runtime=driver.name, limits=wanted)
        return await self._warm_pools.warm(template, count)

    async def warm_pools(self) -> builtins.list[WarmPool]:
        return self._warm_pools.all()

    async def remove_warm_pools(self) -> None:
        await self._warm_pools.remove_all()

    async def wait_refilled(self) -> None:
        if "_provisioner" in vars(self):  # else it has claimed from none
            await self._warm_pools.finish()

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
        id = self._store.lookup(name)
        manifest = await self._lifecycle.update(
            id,
            labels=labels or {},
            ttl_s=ttl_s,
            on_expiry=on_expiry,
            ttl_renewed_by_use=ttl_renewed_by_use,
            limits=limits or Limits(),
        )
        info = self._connections.info(manifest)
        self._recovery.watch_expiries(self._tasks, info)
        if sandbox := self._connections.find(id):
            sandbox.info = info
        return info

    # ---- sleeping and waking ----

    async def pause(self, name: str) -> None:
        await self._lifecycle.pause(self._store.lookup(name))

    async def resume(self, name: str) -> Sandbox:
        sandbox = await self.get(name)
        manifest = self._store.read(sandbox.id)
        status = self._connections.info(manifest).status if manifest else "error"
        if status not in ("running", "paused"):
            raise InvalidRequest(f"sandbox {name!r} is not paused, its status is {status}; wake it instead", name=name)
        return await self.wake(name)

    async def sleep(self, name: str) -> None:
        id = self._store.lookup(name)
        await self._lifecycle.sleep(id, "sleeping")
        await self._connections.disconnect(id)

    async def _sleep_at_end(self, id: str) -> None:
        if await self._lifecycle.sleep_at_end(id):
            await self._connections.disconnect(id)

    async def shutdown(self, name: str) -> None:
        id = self._store.lookup(name)
        await self._lifecycle.sleep(id, "shutdown")
        await self._connections.disconnect(id)

    async def sleep_unused(self, name: str, after: timedelta) -> bool:
        id = self._store.lookup(name)
        slept = await self._lifecycle.sleep_unused(id, after)
        if slept:
            await self._connections.disconnect(id)
        return slept

    def _session(self, pool: SandboxPool, *, temporary: bool, sleeps: bool) -> AbstractAsyncContextManager[None]:
        if temporary:
            return self._leases.temporary(pool.session_id)
        return self._leases.kept(pool.session_id, on_last_release=pool.sleep if sleeps else None)

    async def wake(self, name: str) -> Sandbox:
        sandbox = await self.get(name)
        async with self._connections.launches:
            await self._lifecycle.wake(sandbox.id, asked=True)
        self._connections.forget_failure(sandbox.id)
        await sandbox.processes()  # The keeper resumes a paused one at the first request; a connection is not one.
        return sandbox

    # ---- the network ----

    async def set_network(self, name: str, policy: NetworkPolicy | None) -> None:
        id = self._store.lookup(name)
        indexes = await self._provisioner.find_indexes(policy)
        await self._lifecycle.set_network(id, policy, indexes)
        if sandbox := self._connections.find(id):
            sandbox.info = sandbox.info.model_copy(update={"network": policy})
        await self._connections.egress_servers.apply_policy(id)

    async def set_request_headers(self, name: str, headers: Mapping[str, Mapping[str, str | SecretStr]]) -> None:
        from atoll.contract.secret import check_request_headers

        id, checked = self._store.lookup(name), check_request_headers(headers)

        def change(encrypted: str | None) -> str | None:
            before = self._vault.open(encrypted) if encrypted is not None else SandboxSecrets()
            if before.headers == checked:
                return encrypted
            after = before.with_headers(checked)
            return None if after == SandboxSecrets() else self._vault.seal(after)

        await self._lifecycle.change_secrets(id, change)
        await self._connections.egress_servers.apply_policy(id)

    async def audit(self, name: str) -> builtins.list[AuditRecord]:
        return await anyio.to_thread.run_sync(audit.read, self._store.directory(self._store.lookup(name)))

    def follow_audit(self, name: str) -> AsyncIterator[AuditRecord]:
        return audit.follow(self._store.directory(self._store.lookup(name)))

    # ---- checkpoints ----

    async def checkpoint(self, name: str, label: str | None = None, *, move: bool = False) -> Checkpoint:
        if label is not None:
            check_name(label, noun="a label for a checkpoint")
        return (await self._connections.checkpoint(self._store.lookup(name), label, move=move)).checkpoint

    async def checkpoints(self, name: str | None = None) -> builtins.list[Checkpoint]:
        found = []
        if name is None:
            damaged = self._checkpoints.unreadable().items()
            found = [self._checkpoints.describe_unreadable(*each) for each in damaged]
        for record in self._checkpoints.all() if name is None else self._checkpoints.of(name):
            size = await self._lifecycle.size(record)
            found.append(record.checkpoint.model_copy(update={"size_bytes": size}))
        return sorted(found, key=lambda checkpoint: checkpoint.created_at)

    @contextlib.asynccontextmanager
    async def scratch(self, prefix: str) -> AsyncIterator[None]:
        """While the context lasts, sandboxes whose names begin with `prefix` and a dot are the caller's; at its end, or
        when this process has died, they are removed. Their checkpoints stay.

        Raises:
            SandboxError: another process uses the prefix.
        """
        async with self._leases.temporary(prefix, keeps_checkpoints=True):
            yield

    async def checkpoint_files(self, name: str, label: str | None = None) -> Checkpoint:
        """Shut a sandbox down, without saving its processes, and make a checkpoint of its files. It has no network
        policy."""
        id = self._store.lookup(name)
        record = await self._lifecycle.checkpoint(id, label, ends=True)
        await self._connections.disconnect(id)
        return record.checkpoint

    def inherited_spec(self, checkpoint: str, sandbox: str | None = None) -> SandboxSpec:
        """What a sandbox from a checkpoint has unless something else is given: for those who decide whether there may
        be one. The checkpoint is given by id or label, of `sandbox` if that is set.

        Raises:
            CheckpointNotFound: there is none.
        """
        return self._provisioner.inherited(checkpoint, sandbox)

    async def restore(self, name: str, checkpoint: str, *, foreign: bool = False) -> Sandbox:
        sandbox = await self.get(name)
        record = self._checkpoints.find(checkpoint, name)
        if record.checkpoint.sandbox_id != sandbox.id and not foreign:
            raise InvalidRequest(
                f"the checkpoint {record.checkpoint.id} is not of this sandbox, but of another, which was named "
                f"{record.checkpoint.sandbox!r}; create a sandbox from it, or ask for it explicitly (foreign)",
                hint=f"atoll create NEW --from {record.checkpoint.id}, or atoll restore {name} {checkpoint} --foreign",
            )
        async with self._connections.launches:
            dropped = await self._lifecycle.restore(sandbox.id, record)
        self._tasks.start_soon(self._remove_layer, dropped)
        await self._connections.disconnect(sandbox.id)
        self._connections.forget_failure(sandbox.id)
        await sandbox.connect()
        return sandbox

    async def _remove_layer(self, layer: Path) -> None:
        """Remove an unreferenced layer. Many files take seconds, so only the end of this engine waits for it."""
        with (
            anyio.CancelScope(shield=True),
            contextlib.suppress(AtollError, OSError),
            self._store.in_progress(layer.name),
        ):
            await self._any_layers().remove(layer)

    async def fork(
        self, source: str, count: int = 1, *, checkpoint: str | None = None, names: Sequence[str] | None = None
    ) -> builtins.list[Sandbox]:
        names = names or [f"{source[:50]}-{os.urandom(4).hex()}" for _ in range(count)]
        if count < 1 or len(names) != count:
            plural = "copy" if count == 1 else "copies"
            given = "1 name" if len(names) == 1 else f"{len(names)} names"
            raise InvalidRequest(f"fork: {count} {plural} requested, {given} given; give one name for each copy")
        return await self.fork_labelled(source, names, {}, checkpoint=checkpoint)

    async def fork_labelled(
        self, source: str, names: Sequence[str], labels: Mapping[str, str], *, checkpoint: str | None = None
    ) -> builtins.list[Sandbox]:
        """`fork`, with labels that the forks have besides those of `source`: for those who must find them again."""
        forks = await self._provisioner.fork(source, checkpoint, names, labels)
        self._recovery.watch_expiries(self._tasks, *(fork.info for fork in forks))
        return forks

    async def delete_checkpoint(self, checkpoint: str, *, sandbox: str | None = None) -> None:
        await self._delete_checkpoint(self._checkpoints, checkpoint, sandbox)

    async def _delete_checkpoint(self, checkpoints: Checkpoints, checkpoint: str, sandbox: str | None) -> None:
        damaged = checkpoint in checkpoints.unreadable()
        id = checkpoint if damaged else checkpoints.find(checkpoint, sandbox).checkpoint.id
        with self._store.in_progress(id):
            checkpoints.forget(id)
            await self._lifecycle.remove_unreferenced(timeout_s=1)

    # ---- other machines ----

    async def export(
        self, name: str, target: ArchiveFile, *, checkpoint: str | None = None, progress: ProgressCallback | None = None
    ) -> ExportResult:
        from atoll.runtime.archive import export as exporting

        async with self._provisioner.snapshot(name, checkpoint) as record:
            driver = self._choose(record.checkpoint.runtime)
            return await exporting.write(record, self._layers, driver, target, progress)

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
        return await self._provisioner.import_archive(
            source,
            name,
            image=image,
            limits=limits,
            runtime=runtime or self._settings.runtime,
            limit_bytes=limit_bytes,
            progress=progress,
        )

    # ---- finding ----

    async def get(self, name: str) -> Sandbox:
        id = self._store.lookup(name)
        if sandbox := self._connections.find(id):
            return sandbox
        manifest = self._store.read(id)
        if manifest is None:
            raise SandboxNotFound(name, [n for n in self._store.names() if n != name])
        return self._connections.open(manifest)

    async def list(
        self, prefix: str = "", *, labels: Mapping[str, str | None] | None = None
    ) -> builtins.list[SandboxInfo]:
        found = await anyio.to_thread.run_sync(self._connections.list, prefix)
        self._recovery.watch_expiries(self._tasks)
        wanted = (labels or {}).items()
        return [
            info
            for info in found
            if all(key in info.labels and value in (None, info.labels[key]) for key, value in wanted)
        ]

    async def list_in(self, namespace: str) -> builtins.list[SandboxInfo]:
        """`list`, of another namespace of the state directory: for those who watch all of them."""
        found = await anyio.to_thread.run_sync(self._connections.list, "", namespace)
        self._recovery.watch_expiries(self._tasks)
        return found

    async def unreadable_records(self) -> dict[str, str]:

        def read() -> dict[str, str]:
            volumes = {f"{VOLUME_PREFIX}{name}": error for name, error in self.volumes.references()[1].items()}
            return {id: str(error.details["problem"]) for id, error in {**self._unreadable(), **volumes}.items()}

        return await anyio.to_thread.run_sync(read)

    def _unreadable(self) -> dict[str, SandboxError]:
        """The errors of records that cannot be read, of all namespaces."""
        sandboxes = {self._store.qualified_id(id): error for id, error in self._store.references()[1].items()}
        return {**sandboxes, **self._checkpoints.references()[1]}

    def _digests_in_use(self) -> set[str]:
        for error in self._unreadable().values():
            raise error  # it may use any image
        digests = {each.image_digest for each in self._store.references()[0]}
        return digests | {record.image_digest for record in self._checkpoints.references()[0]}

    # ---- ending ----

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.wait_refilled()
        finally:
            await self._tasks.close()

    async def destroy(self, name: str, *, checkpoints: bool = False) -> int:
        return await self._destroy(self._store, name, checkpoints=checkpoints)

    async def _destroy(self, store: StateStore, name: str, *, checkpoints: bool) -> int:
        """See `destroy`. `store` is that of the namespace of the sandbox."""
        try:
            id, entry = self._find(store, name)
        except SandboxError:
            store.free_damaged_name(name)
            return 0
        try:
            manifest = store.read(id)
        except SandboxError:
            manifest = None
        if manifest is None:
            self._any_layers()  # without a driver nothing can be removed
        # With no position in the tree it never had one, and the records of all others need not be read.
        may_have = manifest is None or manifest.checkpoint is not None
        its = self._checkpoints_in(store.namespace)
        own = [record.checkpoint.id for record in its.of_id(id)] if may_have else []
        await self._connections.remove(id, entry, self._choose(manifest.runtime) if manifest else None)
        for each in own if checkpoints else []:
            with contextlib.suppress(CheckpointNotFound):  # another process was faster
                await self._delete_checkpoint(its, each, None)
        return len(own)

    @staticmethod
    def _find(store: StateStore, wanted: str) -> tuple[str, str | None]:
        """The id of the sandbox with this name, and the entry of the name; or, if none has it, of the one with this
        id."""
        try:
            return store.lookup(wanted), store.entry(wanted)
        except SandboxNotFound:
            if not store.owns(wanted):
                raise
            return wanted, None  # whichever name it has is freed

    async def remove_abandoned(self) -> builtins.list[str]:
        return await self._recovery.remove_abandoned()

    async def gc(self) -> GcResult:
        sandboxes = await self.remove_abandoned()
        await self._warm_pools.remove_unwanted()
        await self._recovery.reconcile()
        paths = await self._lifecycle.remove_unreferenced()
        images = await self.images.remove_unreferenced()
        return GcResult(
            sandboxes=(*sandboxes, *(path.name for path in paths if path.parent.name == "sandboxes")),
            layers=tuple(path.name for path in paths if path.parent.name == "layers"),
            images=tuple(digest for digest in images if digest.startswith("sha256:")),
            downloads=tuple(name for name in images if not name.startswith("sha256:")),
        )
