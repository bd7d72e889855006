"""How a sandbox comes into being: created, claimed from a warm pool, forked from a checkpoint, or imported.

Owns the order of the steps from a spec to a sandbox that answers, and their undoing: when a step fails or is cancelled,
nothing of the sandbox is left. Owns the warm pools' callbacks too: what a template resolves to, how a warm sandbox is
created and removed.

Not here: what the public arguments mean (`engine.py`), how a sandbox starts (`lifecycle/`), how its guest is reached
and how it is removed (`connections.py`), how many warm sandboxes there are (`lifecycle/warm_pool.py`). Used by
`engine.py`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.abc

from atoll.contract.driver import Driver, Filesystem, ProcessImage
from atoll.contract.errors import (
    AtollError,
    FileError,
    InvalidRequest,
    PathNotDirectory,
    PathNotFound,
    PermissionDenied,
    SandboxError,
    SandboxExists,
    Unenforceable,
    UserNotFound,
)
from atoll.contract.model import RESERVED_LABELS, Limits, RuntimeName, SandboxSpec
from atoll.contract.names import check_name
from atoll.contract.network import REGISTRIES, NetworkPolicy, PackageIndexes
from atoll.runtime.connections import Connections
from atoll.runtime.images import overlay
from atoll.runtime.images.store import ImageStore
from atoll.runtime.lifecycle.lifecycle import Lifecycle, expiry_of
from atoll.runtime.lifecycle.warm_pool import SandboxTemplate, WarmPools, rebound
from atoll.runtime.sandbox import Sandbox
from atoll.runtime.secrets import ca_bundle
from atoll.runtime.secrets.authority import Authority
from atoll.runtime.secrets.vault import SandboxSecrets, Vault
from atoll.runtime.state.checkpoints import CheckpointRecord, Checkpoints
from atoll.runtime.state.layers import Layers, ResolvedSpec
from atoll.runtime.state.mounts import PinnedMount, pin
from atoll.runtime.state.spec import validate_spec, with_defaults
from atoll.runtime.state.store import Claimed, Manifest, StateStore, new_id, now
from atoll.runtime.state.volumes import VolumeStore

if TYPE_CHECKING:
    from atoll.runtime.archive.export import ArchiveFile
    from atoll.runtime.images.fetch import ProgressCallback

DEFAULT_USER = "user"
"""The user of a sandbox where neither its spec nor its image names one. Every image has it."""
DEFAULT_ID = 1000
"""The id of that user and of its group."""
_OF_TEMPLATES = (
    "network",
    "indexes",
    "user",
    "cwd",
    "start_command",
    "ready_command",
    "labels",
    "pause_after_s",
    "sudo",
)
"""What a sandbox from a template has of its own spec alone, and not of the checkpoint's."""
_log = logging.getLogger(__name__)


class Provisioner:
    """Creates the sandboxes of one engine. `free_names` removes what still holds a name and is abandoned."""

    def __init__(
        self,
        store: StateStore,
        layers: Layers,
        checkpoints: Checkpoints,
        lifecycle: Lifecycle,
        vault: Vault,
        images: ImageStore,
        connections: Connections,
        *,
        choose: Callable[[RuntimeName | None], Driver],
        free_names: Callable[[], Awaitable[object]],
        volumes: VolumeStore,
    ) -> None:
        self._store = store
        self._layers = layers
        self._checkpoints = checkpoints
        self._lifecycle = lifecycle
        self._vault = vault
        self._images = images
        self._connections = connections
        self._choose = choose
        self._free_names = free_names
        self._volumes = volumes
        self._finding_indexes = anyio.Lock()
        self._indexes: tuple[PackageIndexes, float] | None = None
        self.warm_pools = WarmPools(
            store,
            connections.tasks,
            resolved=self._resolve_template,
            make=self._create_warm,
            remove=self._destroy_claimed,
        )

    # ---- a new sandbox ----

    async def create(
        self, spec: SandboxSpec, secrets: SandboxSecrets | None, progress: ProgressCallback | None
    ) -> Sandbox:
        """A sandbox as `spec` says: a warm one that is claimed, or a new one."""
        driver = self._choose(spec.runtime)
        _require_sudo(spec, driver)
        await self._require_free(spec.name)
        limits = with_defaults(spec.limits, driver.capabilities)
        resolved = await self._resolve_base(spec, limits, driver, progress, secrets)
        authority = secrets.authority if secrets else None
        return await self._claim_warm(spec, driver, resolved, authority) or await self._make(
            spec, driver, resolved, authority=authority
        )

    async def check(self, spec: SandboxSpec) -> None:
        """Raise what `create` would raise of the runtime and the mounts in `spec`. Nothing is created or fetched: of an
        image that is not present, the user that mounts are for is not known, and they are not checked."""
        driver = self._choose(spec.runtime)
        _require_sudo(spec, driver)
        if spec.mounts and await self._images.contents(spec.image) is not None:
            await self._resolve_base(spec, spec.limits, driver)

    async def find_indexes(self, policy: NetworkPolicy | None) -> PackageIndexes | None:
        """The package indexes that the preset `registries` of a policy means now. None: the policy has no preset.

        pip and npm are asked for their configuration, which takes a second, so the answer is cached for a while.
        """
        if policy is None or REGISTRIES not in policy.presets:
            return None
        from atoll.runtime.egress import registries

        async with self._finding_indexes:
            if self._indexes is None or self._indexes[1] < anyio.current_time():
                self._indexes = await registries.find(), anyio.current_time() + registries.CACHE_S
            return self._indexes[0]

    async def _require_free(self, name: str) -> None:
        """Raise `SandboxExists` at once if the name is taken, unless an abandoned sandbox holds it."""
        if self._store.name_taken(name):
            await self._free_names()
            if self._store.name_taken(name):
                raise SandboxExists(name)

    async def _resolve_base(
        self,
        spec: SandboxSpec,
        limits: Limits,
        driver: Driver,
        progress: ProgressCallback | None = None,
        secrets: SandboxSecrets | None = None,
    ) -> ResolvedSpec:
        found = await self._images.resolve(spec.image, progress=progress)
        user = spec.user or (found.user if found.user and driver.capabilities.several_users else DEFAULT_USER)
        return ResolvedSpec(
            limits=limits,
            env={**found.env, **(secrets.variables() if secrets else {}), **spec.env},
            user=user,
            cwd=spec.cwd or found.working_directory,
            image_digest=found.digest,
            base=found.filesystems,
            mounts=self._pin_mounts(spec, driver, user, found.filesystems),
            encrypted_secrets=self._vault.seal(secrets) if secrets else None,
        )

    def _pin_mounts(
        self, spec: SandboxSpec, driver: Driver, user: str, base: Sequence[Filesystem]
    ) -> tuple[PinnedMount, ...]:
        if not spec.mounts:
            return ()
        root = next(each for each in base if each.target == "/")
        # A user that does not exist is refused once the sandbox runs.
        ids = overlay.find_ids([layer.path for layer in root.layers], user) or (DEFAULT_ID, DEFAULT_ID)
        return pin(spec.mounts, driver, self._store.state_dir, ids, self._volumes.path)

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
        """A new sandbox, with the processes in `memory`, and with `checkpoint` recorded as its parent.

        With `warm_pool` it is put into that pool, without a name. A sandbox of a `group` exists once the group is
        complete: it is a fork, of a sandbox whose user and directory were checked. `authority` is a certificate
        authority that it has to trust and does not trust yet.
        """
        id = new_id()
        async with self._connections.launches, self._layers.lock():
            with self._store.creating(id, group):
                with self._connections.creating(id):
                    try:
                        if warm_pool is None:
                            self._store.claim_name(spec.name, id)
                        else:
                            self._store.mark_creating(id)
                        manifest = Manifest(
                            id=id,
                            namespace=self._store.namespace,
                            spec=spec,
                            runtime=driver.name,
                            active_layer=self._layers.new(),
                            id_slot=self._store.claim_ids(id),
                            created_at=now(),
                            checkpoint=checkpoint,
                            **resolved.resolved(),
                        )
                        self._store.set_expiry(id, expiry_of(spec, manifest.created_at))
                        wait_written = self._store.write_uncommitted(manifest)
                        await self._lifecycle.start(manifest, driver, memory)
                        sandbox = self._connections.open(manifest)
                        await sandbox.connect()
                        if group is None:
                            manifest, sandbox = await self._settle(manifest, sandbox)
                        if authority is not None:
                            await ca_bundle.install(sandbox.files, authority)
                        if memory is None and (spec.start_command or spec.ready_command):
                            await sandbox._begin(spec.start_command, spec.ready_command)  # noqa: SLF001 - its maker
                        wait_written()
                    except BaseException:
                        with anyio.CancelScope(shield=True):
                            await self._connections.remove(id, self._store.entry(spec.name), driver, locked=True)
                        raise
                if warm_pool is not None:
                    self._connections.release(id)
                    self._store.mark_ready(id, warm_pool)
                elif group is None:
                    self._store.commit(id, ephemeral=spec.ephemeral)
        sandbox.info = self._connections.info(manifest)
        return sandbox

    async def _settle(self, manifest: Manifest, sandbox: Sandbox) -> tuple[Manifest, Sandbox]:
        """Check, inside, the user and the directory that commands get. Asks the guest only if there is something to
        check.

        The directory of the spec is made if it is missing. That of the image counts only if the user can enter it:
        `WORKDIR /root` is of no use to `user`.

        Raises:
            UserNotFound, InvalidRequest: the sandbox cannot have the spec's user, or the image's.
            FileError: the directory of the spec cannot be made.
        """
        spec, user = manifest.spec, manifest.user
        try:
            if spec.cwd is not None:
                await sandbox.files.mkdir(spec.cwd)
            elif manifest.cwd is not None or user not in (DEFAULT_USER, "root"):
                await sandbox.files.stat(f"{manifest.cwd or ''}/.")
        except UserNotFound:
            if spec.user is not None:
                raise
            message = f"the image {spec.image} has USER {user!r}, and no such account; name another user"
            raise UserNotFound(user, message) from None
        except (PathNotFound, PathNotDirectory, PermissionDenied):
            if spec.cwd is not None:
                raise
            manifest = manifest.model_copy(update={"cwd": None})
            self._store.write(manifest)
            self._connections.release(manifest.id)
            sandbox = self._connections.open(manifest)
            await sandbox.connect()
        except FileError as error:
            if error.errno != errno.EINVAL:
                raise
            raise InvalidRequest(
                f"the user {user!r} has an id that does not exist in a sandbox, where ids are 0 to 65535; "
                "name another user"
            ) from error
        return manifest, sandbox

    # ---- warm sandboxes ----

    async def _resolve_template(self, template: SandboxTemplate) -> tuple[Driver, ResolvedSpec]:
        driver = self._choose(template.runtime)
        return driver, await self._resolve_base(_warm_spec(template), template.limits, driver)

    async def _create_warm(self, template: SandboxTemplate, driver: Driver, resolved: ResolvedSpec) -> None:
        await self._make(_warm_spec(template), driver, resolved, warm_pool=self.warm_pools.key(template))

    async def _destroy_claimed(self, claimed: Claimed) -> None:
        driver = self._choose(claimed.manifest.runtime) if claimed.manifest else None
        await self._connections.remove(claimed.id, None, driver, locked=True)

    async def _claim_warm(
        self, spec: SandboxSpec, driver: Driver, resolved: ResolvedSpec, authority: Authority | None
    ) -> Sandbox | None:
        """Claim a warm sandbox and bind it to `spec`. None: none fits."""
        if spec.mounts:
            return None  # a running sandbox cannot be given any
        key = self.warm_pools.key(SandboxTemplate(image=spec.image, runtime=driver.name, limits=resolved.limits))
        with self._store.claim(key, partial(self.warm_pools.fits, driver=driver, resolved=resolved)) as claimed:
            self.warm_pools.refill(key)
            if claimed is None or claimed.manifest is None:
                return None
            given = {"spec": spec, "created_at": now(), **rebound(resolved)}
            manifest = claimed.manifest.model_copy(update=given)
            try:
                manifest, sandbox = await self._bind(manifest, driver)
                if authority is not None:
                    await ca_bundle.install(sandbox.files, authority)
            except BaseException as error:
                with anyio.CancelScope(shield=True):
                    await self._connections.remove(claimed.id, manifest.entry, driver, locked=True)
                if not isinstance(error, SandboxError):
                    raise
                _log.warning("a warm sandbox could not be bound; a new one is created instead", exc_info=True)
                return None
            self._store.commit(claimed.id, ephemeral=spec.ephemeral)
        sandbox.info = self._connections.info(manifest)
        return sandbox

    async def _bind(self, manifest: Manifest, driver: Driver) -> tuple[Manifest, Sandbox]:
        """Give a claimed warm sandbox the name, hostname, environment and policy of its new manifest."""
        spec, directory = manifest.spec, self._store.directory(manifest.id)
        with self._connections.creating(manifest.id):
            async with driver.setting_hostname(manifest.run_id, directory, spec.name, manifest.id_base):
                wait_written = self._store.write_uncommitted(manifest)
                self._store.claim_name(spec.name, manifest.id)
                sandbox = self._connections.open(manifest)
                await sandbox.connect()
                wait_written()
            manifest, sandbox = await self._settle(manifest, sandbox)
            self._store.set_expiry(manifest.id, expiry_of(spec, manifest.created_at))
            if spec.ephemeral or spec.pause_after_s is not None or spec.ttl_s is not None:
                await self._lifecycle.apply_lifetime(manifest, driver)
        return manifest, sandbox

    # ---- forks ----

    @contextlib.asynccontextmanager
    async def snapshot(self, name: str, checkpoint: str | None) -> AsyncIterator[CheckpointRecord]:
        """A sandbox at a checkpoint, or as it is now. Its layers are not removed while the context lasts."""
        try:
            async with self._layers.lock():
                if checkpoint is not None:
                    yield self._checkpoints.find(checkpoint, name)
                else:
                    yield await self._connections.checkpoint(self._store.lookup(name), None, keep=False)
        finally:
            with anyio.CancelScope(shield=True), contextlib.suppress(AtollError):
                await self._lifecycle.remove_unreferenced(timeout_s=1)

    async def fork(
        self, source: str, checkpoint: str | None, names: Sequence[str], labels: Mapping[str, str]
    ) -> list[Sandbox]:
        """One sandbox for each name, from `source` at a checkpoint or as it is now. All of them, or none. They have
        `labels` besides those of `source`."""
        for name in names:
            check_name(name)
            await self._require_free(name)
        async with self.snapshot(source, checkpoint) as record:
            parent = record.checkpoint.id if checkpoint is not None else record.checkpoint.parent
            return await self._fork(record, names, labels, parent=parent)

    async def create_from(
        self, checkpoint: str, given: SandboxSpec, secrets: SandboxSecrets | None = None, *, template: bool = False
    ) -> Sandbox:
        """A sandbox that begins as a checkpoint, with what is set in `given` in place of what the checkpoint has. That
        of a `template` has files alone: network, user, directory and commands are those of `given`.

        Raises:
            InvalidRequest: `secrets` or mounts are given, and the checkpoint has its own.
        """
        await self._require_free(given.name)
        async with self._layers.lock():
            record = self._checkpoints.find(checkpoint)
            for what, own, others in (
                ("secrets", record.encrypted_secrets, secrets),
                ("mounts", record.mounts, given.mounts),
            ):
                if own and others:
                    raise InvalidRequest(f"a sandbox from this checkpoint has its {what}; leave yours out")
            changes: dict[str, object] = {"name": given.name, "ephemeral": given.ephemeral}
            changes |= {
                name: value for name in ("user", "cwd", "pause_after_s", "sudo") if (value := getattr(given, name))
            }
            if given.ttl_s is not None:
                lifetime = ("ttl_s", "on_expiry", "ttl_renewed_by_use")
                changes |= {name: getattr(given, name) for name in lifetime}
            reserved = {key: value for key, value in given.labels.items() if key.startswith(RESERVED_LABELS)}
            if given.labels != reserved:
                changes["labels"] = given.labels
            elif reserved:
                changes["labels"] = {**record.spec.labels, **reserved}
            if template:
                changes |= {name: getattr(given, name) for name in _OF_TEMPLATES}
            elif given.network is not None:
                changes |= {"network": given.network, "indexes": given.indexes}
            wanted = given.limits.model_dump(exclude_none=True)
            changes["limits"] = record.spec.limits.model_copy(update=wanted)
            changes["env"] = {**record.spec.env, **given.env}
            driver = self._choose(record.checkpoint.runtime)
            _require_sudo(given, driver)
            user = given.user or record.user
            resolved: dict[str, object] = {
                "limits": record.limits.model_copy(update=wanted),
                "env": {**record.env, **(secrets.variables() if secrets else {}), **given.env},
                "user": user,
                "cwd": given.cwd or record.cwd,
            }
            if secrets is not None:
                resolved["encrypted_secrets"] = self._vault.seal(secrets)
            if given.mounts:
                changes["mounts"] = given.mounts
                resolved["mounts"] = self._pin_mounts(given, driver, user, record.base)
            # Processes were saved without these: the sandbox begins with the files alone.
            begins_anew = secrets is not None or given.mounts
            return await self._make(
                self._spec_of(record, changes),
                driver,
                record.model_copy(update=resolved),
                memory=None if begins_anew else self._checkpoints.memory(record),
                checkpoint=record.checkpoint.id,
                authority=secrets.authority if secrets else None,
            )

    def inherited(self, checkpoint: str, sandbox: str | None = None) -> SandboxSpec:
        """What a sandbox from a checkpoint has unless something else is given, with the limits in force."""
        record = self._checkpoints.find(checkpoint, sandbox)
        return self._spec_of(record, {"limits": record.limits})

    def _spec_of(self, record: CheckpointRecord, changes: Mapping[str, object]) -> SandboxSpec:
        """The spec of a sandbox from a checkpoint.

        The policy is the present one of the sandbox whose files and secrets these are, not that of back then.
        """
        policy = record.spec
        with contextlib.suppress(SandboxError):  # its record cannot be read
            policy = self._connections.spec(record.checkpoint.sandbox_id) or policy
        own = {"ephemeral": False, "network": policy.network, "indexes": policy.indexes}
        return validate_spec(**{**record.spec.model_dump(), **own, **changes})

    async def _fork(
        self, record: CheckpointRecord, names: Sequence[str], labels: Mapping[str, str], *, parent: str | None
    ) -> list[Sandbox]:
        driver = self._choose(record.checkpoint.runtime)
        memory = self._checkpoints.memory(record)
        made: list[Sandbox] = []
        failures: list[AtollError] = []

        async def one(name: str, group: str) -> None:
            spec = self._spec_of(record, {"name": name, "labels": {**record.spec.labels, **labels}})
            try:
                made.append(await self._make(spec, driver, record, memory=memory, checkpoint=parent, group=group))
            except AtollError as error:
                failures.append(error)

        with self._store.create_group() as group:
            complete = False
            try:
                async with anyio.create_task_group() as tasks:
                    for name in names:
                        tasks.start_soon(one, name, group)
                complete = not failures
            finally:
                if not complete:
                    with anyio.CancelScope(shield=True):
                        for sandbox in made:
                            await self._connections.remove(
                                sandbox.id, self._store.entry(sandbox.name), driver, held=True
                            )
            if failures:
                raise failures[0]
        return sorted(made, key=lambda sandbox: list(names).index(sandbox.name))

    # ---- archives ----

    async def import_archive(
        self,
        source: ArchiveFile,
        name: str | None,
        *,
        image: str | None,
        limits: Limits | None,
        runtime: RuntimeName | None,
        limit_bytes: int | None,
        progress: ProgressCallback | None,
    ) -> Sandbox:
        """A sandbox from an archive that `export` wrote. `runtime` None: the archive's. See `Engine.import_`."""
        from atoll.runtime.archive import export as exporting

        if name is not None:
            check_name(name)
        any_driver = self._choose(runtime)
        async with (
            self._layers.lock(),
            exporting.opened(source, self._layers, any_driver, limit_bytes=limit_bytes, progress=progress) as archive,
        ):
            contents = archive.contents
            runtime = runtime or self._requested_runtime(contents.runtime)
            driver = self._choose(runtime)
            if limits is None:
                limits = exporting.allowed(contents.limits, with_defaults(Limits(), driver.capabilities))
            reference, base = image or contents.image.reference, None
            if image is None and reference != "host":
                reference, base = exporting.find_base_image(self._images, contents.image)
            spec = validate_spec(
                name=contents.name if name is None else name,
                image=reference,
                limits=limits,
                env=contents.env,
                user=contents.user,
                cwd=contents.cwd,
                runtime=runtime,
                pause_after_s=contents.pause_after_s,
                sudo=contents.sudo,
            )
            _require_sudo(spec, driver)
            await self._require_free(spec.name)
            base = base or await self._images.resolve(reference, progress=progress)
            resolved = ResolvedSpec(
                limits=with_defaults(limits, driver.capabilities),
                env={**base.env, **spec.env},
                user=contents.user,
                cwd=contents.cwd,
                image_digest=base.digest,
                base=base.filesystems,
                layers=await archive.unpack(base.filesystems),
            )
            return await self._make(spec, driver, resolved)

    def _requested_runtime(self, named: RuntimeName | None) -> RuntimeName | None:
        """The runtime that an archive names. None: it names none, or one that only a caller may request."""
        driver = self._connections.engine.drivers().get(named) if named else None
        return None if driver is not None and not driver.capabilities.chosen_by_default else named


def _require_sudo(spec: SandboxSpec, driver: Driver) -> None:
    """
    Raises:
        Unenforceable: the spec has `sudo`, and the runtime has not.
    """
    if spec.sudo and not driver.capabilities.sudo:
        raise Unenforceable(
            f"sudo does not work in sandboxes of the runtime {driver.name}; leave it out and name user='root' where "
            "a command has to be root, or use another runtime"
        )


def _warm_spec(template: SandboxTemplate) -> SandboxSpec:
    return validate_spec(
        name=f"waiting-{os.urandom(4).hex()}", image=template.image, limits=template.limits, runtime=template.runtime
    )
