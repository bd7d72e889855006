"""Lifecycle: how a sandbox that exists is started, paused, put to sleep, checkpointed and restored.

Owns the order in which manifests, layers and processes change, so that an operation that is interrupted at any moment
can be finished or undone. Not here: how a sandbox is created, named and destroyed (the engine), how processes are
isolated and saved (the driver), connections (the engine), and which sandboxes need `reconcile` (`recovery.py`).

States and operations. A status is derived from the manifest and the keeper (`state/status.py`); a cell is the status
after the operation, "-" that nothing changes, an error name that the operation is refused:

    status        use              pause   resume          sleep     shutdown  wake     checkpoint        restore
    running       -                paused  -               sleeping  shutdown  -        -                 running
    paused        running          -       running         sleeping  shutdown  running  - or running (1)  running
    sleeping      running          -       InvalidRequest  -         shutdown  running  -                 running
    shutdown      SandboxShutdown  -       InvalidRequest  sleeping  -         running  -                 running
    error         SandboxDied      -       InvalidRequest  sleeping  shutdown  running  -                 running
    provisioning  `resume` raises InvalidRequest; each other operation waits until the sandbox is created, and then
                  finds it running

"Use" is any request to the guest. `destroy` removes a sandbox of any status. A keeper with `pause_after_s` pauses a
running sandbox by itself. A sandbox whose lifetime is over and that is not to be destroyed (`on_expiry`) is put to
sleep (`sleep_at_end`); starting it begins another lifetime. A running or paused sandbox whose guest or keeper ends is
in error. A failed start leaves it sleeping or shut down. An ephemeral sandbox cannot sleep, shut down or be restored
(InvalidRequest). Processes survive `sleep`, `shutdown` and `checkpoint` with drivers that can save them
(`memory_checkpoint`); there, `sleep` and `checkpoint` raise `NotCheckpointable`, and change nothing, if saving would
lose them. A save that fails all the same leaves the sandbox running, or in error with that as its reason.
(1) With a driver that saves processes, a checkpoint restarts them: the sandbox runs then. One that cannot freeze a
    sandbox restarts it too, if nothing runs in it, and refuses the checkpoint (Unenforceable) otherwise.

What the manifest says in each status:

    status        state     ending  memory           keeper
    provisioning  running   false   unset            starts, or alive
    running       running   false   unset            alive
    paused        running   false   unset            alive, its cgroup frozen
    sleeping      sleeping  (2)     (2)              dead
    shutdown      shutdown  (2)     (2)              dead
    error         running   false   unset            dead
    (2) `ending` if its processes were ended, `memory` if they were saved, neither if it was in error before.

Order of changes. The manifest is written before what it announces is begun, except where it says that something is
finished:

    wake        the number of the new run, then the start, then `running`. Until then it sleeps, unless its keeper
                lives: then it runs, whatever the manifest says. An interrupted start is begun again.
    sleep       without saving: `sleeping` and `ending`, then the end of its processes. What still runs of a sandbox
                that is `ending` is stopped by the next operation, since a program that was started for it may end it
                yet. With saving: `sleeping` and `memory`, then the saving, which ends the processes.
    checkpoint  the committed layers with a new active layer, or a copy of the active layer; then the checkpoint's
                record, which makes it exist.
    restore     `ending`, then the end of the old processes; the committed layers of the checkpoint with a new active
                layer; the start; `running`.

All of it is done with the sandbox's `work.lock` held, and creating a layer with the lock of the layers held.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread
from anyio.abc import ByteStream

from atoll.contract.driver import Driver, Launch, Layer, LayerStore, Lifetime, ProcessImage
from atoll.contract.errors import (
    AtollError,
    CheckpointExists,
    CheckpointNotFound,
    InvalidRequest,
    LaunchFailed,
    NotCheckpointable,
    SandboxDied,
    SandboxError,
    SandboxShutdown,
    Unenforceable,
)
from atoll.contract.model import (
    Checkpoint,
    Limits,
    OnExpiry,
    ProcessInfo,
    RuntimeName,
    SandboxSpec,
    SystemProcess,
)
from atoll.contract.network import NetworkPolicy, PackageIndexes
from atoll.runtime.state.checkpoints import CheckpointRecord, Checkpoints
from atoll.runtime.state.expiries import Expiry
from atoll.runtime.state.layers import FLATTEN_AT, MAX_LAYERS, LayerRef, Layers
from atoll.runtime.state.spec import validate_spec
from atoll.runtime.state.status import record_ending
from atoll.runtime.state.store import Manifest, StateStore, now
from atoll.runtime.state.volumes import VolumeStore

_ANSWER_S = 10
"""How long a guest may take to list the processes that wait with epoll."""
_END_S = 10
"""How long the processes of a sandbox may take to end after they were saved."""
_NOTED_S = 0.5
_log = logging.getLogger(__name__)


def _refuse_ephemeral(manifest: Manifest) -> None:
    if manifest.spec.ephemeral:
        raise InvalidRequest(
            f"sandbox {manifest.spec.name!r} is ephemeral: it ends with its last client, and cannot sleep, shut down "
            "or be restored"
        )


def expiry_of(spec: SandboxSpec, begins_at: datetime) -> Expiry | None:
    """The end of a lifetime that begins then. None: it has none."""
    if spec.ttl_s is None:
        return None
    ttl_ms = round(spec.ttl_s * 1000)
    begins_ms = round(begins_at.timestamp() * 1000)
    return Expiry(begins_ms + ttl_ms, ttl_ms if spec.ttl_renewed_by_use else 0, spec.on_expiry)


def _check_end(then: OnExpiry, driver: Driver) -> None:
    """
    Raises:
        Unenforceable: it is to be paused at the end of its lifetime, and its runtime cannot freeze processes here.
    """
    if then == "pause" and not driver.capabilities.freeze:
        raise Unenforceable(
            "a sandbox cannot be paused at the end of its lifetime here: this runtime and this user have no cgroup to "
            "freeze it with; put it to sleep (on_expiry='sleep'), or run crun as root",
            hint="atoll doctor says how an unprivileged user gets cgroups",
        )


def _cannot_freeze(manifest: Manifest) -> Unenforceable:
    return Unenforceable(
        "a sandbox in which something runs cannot be copied here, since it cannot be frozen: this runtime and this "
        "user have no cgroup; end what runs, put the sandbox to sleep first, or run crun as root",
        hint=f"atoll sleep {manifest.spec.name}; atoll doctor says how an unprivileged user gets cgroups",
    )


def _changed(limits: Limits, changes: Limits) -> Limits:
    """`limits` with those of `changes` that are set."""
    return limits.model_copy(update=changes.model_dump(exclude_none=True))


class Lifecycle:
    def __init__(
        self,
        store: StateStore,
        layers: Layers,
        checkpoints: Checkpoints,
        choose: Callable[[RuntimeName | None], Driver],
        any_layers: Callable[[], LayerStore],
        epoll_waiters: Callable[[Manifest], Awaitable[Sequence[SystemProcess]]],
        live_commands: Callable[[Manifest, ByteStream | None], AbstractAsyncContextManager[Sequence[ProcessInfo]]],
        volumes: VolumeStore,
    ) -> None:
        self._store = store
        self._layers = layers
        self._checkpoints = checkpoints
        self._choose = choose
        self._any_layers = any_layers
        self._epoll_waiters = epoll_waiters
        """The processes in a sandbox that wait with epoll, which some versions of gVisor cannot save."""
        self._volumes = volumes
        self._live_commands = live_commands
        self._begun: dict[str, int] = {}
        """The runs that this process has started without processes, of sandboxes with a start command."""

    def take_begun(self, id: str) -> SandboxSpec | None:
        """The spec of a sandbox whose start command is to be run: this process has started it, without saved processes.
        It is said once."""
        run = self._begun.pop(id, None)
        manifest = self._store.read(id) if run is not None else None
        return manifest.spec if manifest is not None and manifest.run == run else None

    async def start(
        self, manifest: Manifest, driver: Driver, memory: ProcessImage | None = None, *, wait_ready: bool = False
    ) -> None:
        """Start the run that `manifest` names, with no processes or with those that were saved in `memory`."""
        self._store.note_run(manifest)
        await driver.launch(
            Launch(
                id=manifest.run_id,
                directory=self._store.directory(manifest.id),
                active_layer=self._layers.path(manifest.active_layer),
                hostname=manifest.spec.name,
                filesystems=self._layers.compose(manifest.base, manifest.layers),
                limits=manifest.limits,
                id_base=manifest.id_base,
                ephemeral=manifest.spec.ephemeral,
                memory=memory,
                pause_after_s=manifest.spec.pause_after_s,
                lifetime=self._lifetime(manifest.id, driver),
                mounts=tuple(each.bound(self._volumes.path) for each in manifest.mounts),
                wait_ready=wait_ready,
            )
        )

    def _lifetime(self, id: str, driver: Driver) -> Lifetime | None:
        """What the keeper of a sandbox is told of its lifetime."""
        expiry = self._store.expiry(id)
        if expiry is None:
            return None
        _check_end(expiry.then, driver)
        freezes = expiry.then == "pause" or (expiry.then == "sleep" and driver.capabilities.memory_checkpoint)
        return Lifetime(ends_ms=expiry.ends_ms, renewal_ms=expiry.renewal_ms, freezes=freezes)

    async def apply_lifetime(self, manifest: Manifest, driver: Driver) -> None:
        """Have the keeper of a running sandbox count its lifetime as it is now."""
        spec = manifest.spec
        await driver.keeper.reconfigure(
            self._store.directory(manifest.id),
            ephemeral=spec.ephemeral,
            pause_after_s=spec.pause_after_s,
            lifetime=self._lifetime(manifest.id, driver),
        )

    # ---- sleeping and waking ----

    async def wake(self, id: str, *, asked: bool) -> Manifest:
        """Start a sandbox that does not run, with its saved processes if it has any.

        Raises:
            SandboxShutdown: it was shut down, and the caller did not ask for it to wake (`asked`), but to use it.
            SandboxDied: it is in error, and the caller did not ask for it to wake.
            LaunchFailed: it did not start.
        """
        async with self._store.working(id):
            manifest = self._read(id)
            driver = self._choose(manifest.runtime)
            directory = self._store.directory(id)
            if await self._runs(manifest, driver):  # if it is paused, its keeper resumes it when it is used
                awake = self._write(manifest, state="running", memory=None)
                await self._drop_memory(manifest, driver)
                return awake
            if not asked and manifest.state == "shutdown":
                raise SandboxShutdown(f"sandbox {manifest.spec.name!r} was shut down; wake it first")
            if not asked and manifest.state == "running":
                raise SandboxDied(f"sandbox {manifest.spec.name!r} has ended; wake it, or destroy it")
            if manifest.memory is None:
                return await self._restart(manifest, driver)
            memory = ProcessImage(path=directory / manifest.memory, hostname=manifest.spec.name)
            try:
                woken = await self._restart(manifest, driver, memory)
            except LaunchFailed:
                # Its saving was interrupted, or another version of the runtime saved it. Its files are complete.
                _log.warning(
                    "the saved processes of sandbox %s could not be restored and are lost",
                    manifest.spec.name,
                    exc_info=True,
                )
                woken = await self._restart(self._read(id), driver)
            await self._drop_memory(manifest, driver)
            return woken

    async def _runs(self, manifest: Manifest, driver: Driver) -> bool:
        """Whether it runs and may go on. If its end was interrupted, it is finished here."""
        directory = self._store.directory(manifest.id)
        if driver.pid(directory) is None:
            return False
        if manifest.ending:
            await driver.stop(manifest.run_id, directory)
            return False
        if manifest.memory is not None and any((directory / manifest.memory).glob("*")):
            # Its processes were saved and are about to end; or saving failed, and they go on.
            with anyio.move_on_after(_END_S):
                while driver.pid(directory) is not None:  # noqa: ASYNC110 - the processes are not ours
                    await anyio.sleep(0.01)
        return driver.pid(directory) is not None

    async def reconcile(self, id: str) -> None:
        """Finish or undo an operation on a sandbox whose process died."""
        try:
            async with self._store.working(id):
                manifest = self._read(id)
                driver = self._choose(manifest.runtime)
                directory = self._store.directory(id)
                if await self._runs(manifest, driver):
                    manifest = self._write(manifest, state="running", memory=None)
                else:
                    await driver.stop(manifest.run_id, directory)
                await driver.layers.remove(
                    *(path for path in directory.glob("memory-*") if path.name != manifest.memory)
                )
        except SandboxDied:
            self._store.clear_in_progress(id)

    async def _drop_memory(self, manifest: Manifest, driver: Driver) -> None:
        """Remove the saved processes of a sandbox, unless they belong to a checkpoint."""
        directory = self._store.directory(manifest.id)
        if manifest.memory is not None and (directory / manifest.memory).parent == directory:
            await driver.layers.remove(directory / manifest.memory)

    async def _restart(
        self, manifest: Manifest, driver: Driver, saved: ProcessImage | None = None, **changes: object
    ) -> Manifest:
        """Stop its processes, and start it with `changes` to its manifest and with the processes in `saved`."""
        directory = self._store.directory(manifest.id)
        asleep = "sleeping" if manifest.state == "running" else manifest.state
        if driver.pid(directory) is not None:
            self._store.finish_created(manifest.id)
            manifest = self._write(manifest, state=asleep, memory=None, ending=True)
        await driver.stop(manifest.run_id, directory)
        # From here on it may write to its files: processes that were saved earlier must never be restored over them.
        if self._store.expiry(manifest.id) is None or self._store.is_due_to_sleep(manifest.id):
            self._store.set_expiry(manifest.id, expiry_of(manifest.spec, now()))
        begun = self._write(
            manifest, **{"run": manifest.run + 1, "state": asleep, "memory": None, "ending": False, **changes}
        )
        try:
            await self.start(begun, driver, saved, wait_ready=True)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await driver.stop(begun.run_id, directory)
                # As it was before, except for the number of the run, which must not be used again.
                self._write(manifest, run=begun.run, state=asleep)
            raise
        if saved is None and manifest.spec.start_command:
            self._begun[manifest.id] = begun.run
        with contextlib.suppress(OSError):  # on a full disk it runs all the same
            return self._write(begun, state="running")
        return begun

    async def sleep(self, id: str, state: Literal["sleeping", "shutdown"]) -> None:
        """End its processes and keep its files. Processes are saved first if the driver can do that.

        Raises:
            InvalidRequest: it is ephemeral.
            NotCheckpointable: saving would lose the processes, and `state` is not "shutdown".
        """
        async with self._store.working(id) as lock:
            await self._sleep(self._read(id), lock, state, forced=state == "shutdown")

    async def sleep_at_end(self, id: str) -> bool:
        """Put it to sleep, or pause it, if its lifetime is over, whatever runs in it. It has no lifetime then, until it
        is started or used.

        Returns whether its processes have ended.
        """
        async with self._store.working(id) as lock:
            expiry = self._store.expiry(id)
            if expiry is None or not self._store.is_due_to_sleep(id):
                return False  # it was used, or put to sleep, or has got another lifetime meanwhile
            manifest = self._read(id)
            driver = self._choose(manifest.runtime)
            if expiry.then == "pause" and await self._runs(manifest, driver):
                self._store.set_expiry(id, None)
                await self.apply_lifetime(manifest, driver)
                await driver.keeper.freeze(self._store.directory(id))
                return False
            await self._sleep(manifest, lock, "shutdown" if manifest.state == "shutdown" else "sleeping", forced=True)
            self._store.set_expiry(id, None)
            return True

    async def begin_lifetime(self, id: str) -> None:
        """A sandbox that was paused at the end of its lifetime is used: it lives as long again."""
        async with self._store.working(id):
            manifest = self._read(id)
            if manifest.spec.ttl_s is None or self._store.expiry(id) is not None:
                return
            self._store.set_expiry(id, expiry_of(manifest.spec, now()))
            driver = self._choose(manifest.runtime)
            if await self._runs(manifest, driver):
                await self.apply_lifetime(manifest, driver)

    async def _sleep(
        self, manifest: Manifest, lock: int, state: Literal["sleeping", "shutdown"], *, forced: bool
    ) -> None:
        driver = self._choose(manifest.runtime)
        _refuse_ephemeral(manifest)
        if not await self._runs(manifest, driver):
            self._write(manifest, state=state)
        elif not driver.capabilities.memory_checkpoint:
            await self._end(manifest, driver, state)
        else:
            try:
                async with self._staying_paused(manifest, driver):
                    await self._require_savable(manifest, driver)
                    await self._save(manifest, driver, lock, state)
            except NotCheckpointable as error:
                if not forced:
                    raise
                # No process inside may prevent a shutdown, or lengthen its lifetime.
                _log.warning(
                    "the processes of sandbox %s cannot be saved, and are ended: %s", manifest.spec.name, error.message
                )
                await self._end(self._read(manifest.id), driver, state)

    async def _end(self, manifest: Manifest, driver: Driver, state: Literal["sleeping", "shutdown"]) -> None:
        self._store.finish_created(manifest.id)
        self._write(manifest, state=state, ending=True)
        await driver.stop(manifest.run_id, self._store.directory(manifest.id))

    async def _save(
        self,
        manifest: Manifest,
        driver: Driver,
        lock: int,
        state: Literal["sleeping", "shutdown"],
        image: Path | None = None,
    ) -> None:
        """Save its processes to `image`, or to its own directory, and end them. The manifest names it before that.

        Raises:
            NotCheckpointable: they cannot be saved. They go on.
            SandboxError: saving failed. They go on, or it is in error, with this as its reason. Its files are complete.
        """
        directory = self._store.directory(manifest.id)
        self._store.finish_created(manifest.id)
        asleep = self._write(manifest, state=state, memory=str(image or f"memory-{manifest.run}"))
        try:
            # Saving goes on if this process dies: the lock is passed on, so the next operation waits until it is done.
            await driver.save(manifest.run_id, directory, directory / str(asleep.memory), lock=lock)
        except (NotCheckpointable, SandboxError) as error:
            with anyio.CancelScope(shield=True):
                if isinstance(error, SandboxError) and not await self._survives(manifest, driver):
                    await driver.stop(manifest.run_id, directory)
                    with contextlib.suppress(OSError):
                        record_ending(directory, error.message)
                self._write(asleep, state="running", memory=None)
                await driver.layers.remove(directory / str(asleep.memory))
            raise
        await driver.stop(manifest.run_id, directory)

    @contextlib.asynccontextmanager
    async def _staying_paused(self, manifest: Manifest, driver: Driver) -> AsyncIterator[None]:
        """If its processes cannot be saved, pause a sandbox again that was paused: looking for them has resumed it."""
        paused = driver.is_frozen(manifest.run_id)
        try:
            yield
        except NotCheckpointable:
            if paused:
                with contextlib.suppress(SandboxError):
                    await driver.keeper.freeze(self._store.directory(manifest.id))
            raise

    async def _survives(self, manifest: Manifest, driver: Driver) -> bool:
        """Whether its processes go on after a save that failed. If gVisor began it, it ends them soon, in any case."""
        directory = self._store.directory(manifest.id)
        with anyio.move_on_after(_END_S):
            while driver.pid(directory) is not None:
                with contextlib.suppress(SandboxError), anyio.move_on_after(1):
                    await self._epoll_waiters(manifest)  # any answer will do
                    return True
                await anyio.sleep(0.01)
        return driver.pid(directory) is not None

    async def _require_savable(self, manifest: Manifest, driver: Driver) -> None:
        """
        Raises:
            NotCheckpointable: the runtime would lose the processes.
        """
        if driver.capabilities.saves_epoll_waiters:
            return
        waiting: Sequence[SystemProcess] = ()
        with (
            contextlib.suppress(SandboxError),
            anyio.move_on_after(_ANSWER_S),
        ):  # if it cannot answer, assume that it can be saved
            waiting = await self._epoll_waiters(manifest)
        if waiting:
            shown = ", ".join(f"{process.pid} ({process.command[:60]})" for process in waiting[:3])
            raise NotCheckpointable(
                f"this version of {driver.name} cannot save processes that wait with epoll, as these may: {shown}; "
                "end them first, or pause the sandbox instead",
                hint=f"a newer version of {driver.name} can save them",
            )

    async def sleep_unused(self, id: str, after: timedelta) -> bool:
        """Put it to sleep if it was not used for `after`; if that would lose its processes, pause it instead.

        Returns whether it was put to sleep or paused. A client that begins to use it in this moment waits until that is
        decided, and then finds it asleep or as it was.
        """
        async with self._store.working(id) as lock:
            manifest = self._read(id)
            driver = self._choose(manifest.runtime)
            directory = self._store.directory(id)

            if manifest.spec.ephemeral:
                return False

            def unused() -> bool:
                last, in_use = driver.keeper.last_used(directory)
                since = max(last or manifest.created_at, manifest.created_at)  # it may have been warm before
                return not in_use and now() - since >= after

            if not await self._runs(manifest, driver) or not unused():
                return False
            saves, pauses = driver.capabilities.memory_checkpoint, False
            try:
                if saves:
                    await self._require_savable(manifest, driver)
            except NotCheckpointable:
                if not driver.capabilities.freeze:
                    raise
                pauses = True
            async with driver.keeper.frozen(directory) if driver.capabilities.freeze else contextlib.nullcontext():
                if not unused():
                    return False
                if not saves and not pauses:
                    await self._end(manifest, driver, "sleeping")
                    return True
            try:
                if not pauses:
                    await self._save(manifest, driver, lock, "sleeping")
            except NotCheckpointable:
                if not driver.capabilities.freeze:
                    raise
                pauses = True
            if pauses:
                if not unused():  # looking took a while
                    return False
                await driver.keeper.freeze(directory)
            return True

    async def pause(self, id: str) -> None:
        """Freeze its processes in memory until it is next used. Does nothing to a sandbox that does not run."""
        async with self._store.working(id):
            manifest = self._read(id)
            driver = self._choose(manifest.runtime)
            if await self._runs(manifest, driver):
                await driver.keeper.freeze(self._store.directory(id))

    async def set_network(self, id: str, policy: NetworkPolicy | None, indexes: PackageIndexes | None) -> None:
        """Write another policy to the manifest, from where the process that serves its egress reads it."""
        async with self._store.working(id):
            manifest = self._read(id)
            self._write(manifest, spec=manifest.spec.model_copy(update={"network": policy, "indexes": indexes}))

    async def change_secrets(self, id: str, change: Callable[[str | None], str | None]) -> None:
        """Write other secrets to the manifest, from where the process that serves its egress reads them. `change` is
        given the encrypted ones, and gives those to write."""
        async with self._store.working(id):
            manifest = self._read(id)
            self._write(manifest, encrypted_secrets=change(manifest.encrypted_secrets))

    async def update(
        self,
        id: str,
        *,
        labels: Mapping[str, str | None],
        ttl_s: float | None,
        on_expiry: OnExpiry | None,
        ttl_renewed_by_use: bool | None,
        limits: Limits,
    ) -> Manifest:
        """Change labels (None removes one), the lifetime (`inf`: it has no end) and those limits that are set.

        Raises:
            InvalidRequest: a label or the lifetime is not allowed, or it uses more memory than the new limit.
            Unenforceable: a limit cannot be enforced, or not while it runs.
        """
        async with self._store.working(id):
            manifest = self._read(id)
            driver = self._choose(manifest.runtime)
            lifetime = {"ttl_s": ttl_s, "on_expiry": on_expiry, "ttl_renewed_by_use": ttl_renewed_by_use}
            lifetime = {name: value for name, value in lifetime.items() if value is not None}
            running = bool(limits != Limits() or lifetime) and await self._runs(manifest, driver)
            changes: dict[str, object] = dict(lifetime)
            if labels:
                merged = {**manifest.spec.labels, **labels}
                changes["labels"] = {key: value for key, value in merged.items() if value is not None}
            if ttl_s == math.inf:
                changes["ttl_s"] = None
            if limits != Limits():
                changes["limits"] = _changed(manifest.spec.limits, limits)
            spec = validate_spec(**{**manifest.spec.model_dump(), **changes})
            _check_end(spec.on_expiry, driver)
            if limits != Limits():
                await self._change_limits(manifest, driver, limits, running=running)
            if lifetime:
                expiry, before = expiry_of(spec, now()), self._store.expiry(id)
                if ttl_s is None and expiry is not None:  # it ends when it would have
                    expiry = before and expiry._replace(ends_ms=before.ends_ms)
                self._store.set_expiry(id, expiry)
                if running:
                    await self.apply_lifetime(manifest.model_copy(update={"spec": spec}), driver)
            return self._write(manifest, spec=spec, limits=_changed(manifest.limits, limits))

    async def _change_limits(self, manifest: Manifest, driver: Driver, changes: Limits, *, running: bool) -> None:
        layer = self._layers.path(manifest.active_layer)
        try:
            await driver.change_limits(manifest.run_id, layer, changes, running=running)
        except BaseException:
            # Some may hold already. Those of before are in the manifest, unless there were none.
            before = {name: getattr(manifest.limits, name) for name in changes.model_dump(exclude_none=True)}
            with anyio.CancelScope(shield=True), contextlib.suppress(AtollError, OSError):
                await driver.change_limits(manifest.run_id, layer, Limits(**before), running=running)
            raise

    # ---- checkpoints ----

    async def checkpoint(
        self, id: str, label: str | None, *, keep: bool = True, move: bool = False, ends: bool = False
    ) -> CheckpointRecord:
        """Make a checkpoint of the sandbox as it is now. Its processes are frozen, or saved and restarted, meanwhile.

        Without `keep` the record is not written: it is valid as long as the caller holds the lock of the layers. With
        `move`, another checkpoint of the sandbox that has the label loses it. With `ends`, the sandbox is shut down
        first, whatever runs in it: the checkpoint has neither processes nor a network policy.

        Raises:
            CheckpointExists: another checkpoint of the sandbox has the label.
            NotCheckpointable: the driver saves processes, and would lose these.
            InvalidRequest: the driver saves processes, and the sandbox is ephemeral.
        """
        async with self._layers.lock(), self._store.working(id) as lock:
            manifest = self._read(id)
            driver = self._choose(manifest.runtime)
            directory = self._store.directory(id)
            labelled = [each for each in self._checkpoints.of_id(id) if each.checkpoint.label == label] if label else []
            if labelled and label and not move:
                raise CheckpointExists(label, labelled[-1].checkpoint.id, manifest.spec.name)
            new_id = self._checkpoints.new_id()
            saved = self._checkpoints.directory(new_id) / "memory"
            running = await self._runs(manifest, driver)
            if ends and running:
                await self._end(manifest, driver, "shutdown")
                manifest, running = self._read(id), False
            asleep = directory / manifest.memory if manifest.memory and not running else None
            with_memory = asleep is not None or (running and driver.capabilities.memory_checkpoint)
            parent = manifest.checkpoint
            if asleep is not None:
                # Hard links, one set for the sandbox and one for the checkpoint: these files are never changed.
                import shutil

                await anyio.to_thread.run_sync(partial(shutil.copytree, asleep, saved, copy_function=os.link))
            if with_memory and running:
                _refuse_ephemeral(manifest)
                try:
                    async with self._staying_paused(manifest, driver):
                        await self._require_savable(manifest, driver)
                        self._checkpoints.directory(new_id).mkdir(mode=0o700)
                        await self._save(manifest, driver, lock, "sleeping", saved)
                except (NotCheckpointable, SandboxError):
                    with contextlib.suppress(OSError):
                        self._checkpoints.directory(new_id).rmdir()
                    raise
                manifest = await self._commit_active(self._read(id), driver, new_id if keep else None)
                stack = manifest.layers
            elif running and not driver.capabilities.freeze:
                await self._end_idle(manifest, driver)
                manifest = await self._commit_active(self._read(id), driver, new_id if keep else None)
                stack = manifest.layers
            elif running:
                manifest = await self._copy_active(manifest, driver)
                stack = (LayerRef(id=str(manifest.copied), owner=manifest.id_base), *manifest.layers)
            else:
                manifest = await self._commit_active(manifest, driver, new_id if keep else None)
                stack = manifest.layers
            record = CheckpointRecord(
                checkpoint=Checkpoint(
                    id=new_id,
                    label=label,
                    sandbox=manifest.spec.name,
                    sandbox_id=id,
                    created_at=now(),
                    parent=parent,
                    with_memory=with_memory,
                    without_mounts=tuple(each.mount.target for each in manifest.mounts),
                    runtime=manifest.runtime,
                    image=manifest.spec.image,
                ),
                spec=manifest.spec.model_copy(update={"network": None, "indexes": None}) if ends else manifest.spec,
                **{**manifest.resolved(), "layers": stack},
            )
            if keep:
                self._checkpoints.write(record)
                for each in labelled:
                    without = each.checkpoint.model_copy(update={"label": None})
                    self._checkpoints.write(each.model_copy(update={"checkpoint": without}))
                manifest = self._write(manifest, checkpoint=record.checkpoint.id)
            if running and (with_memory or not driver.capabilities.freeze):
                await self._restart(self._read(id), driver, self._checkpoints.memory(record))
            return record

    async def _end_idle(self, manifest: Manifest, driver: Driver) -> None:
        """End a sandbox that cannot be frozen, if nothing runs in it and no client uses it: then nothing is lost.

        Raises:
            Unenforceable: something would be lost.
        """
        _refuse_ephemeral(manifest)
        directory = self._store.directory(manifest.id)
        with anyio.move_on_after(_NOTED_S):  # the keeper notes the end of a call after it has told the client
            while driver.keeper.last_used(directory)[1]:  # noqa: ASYNC110 - the calls may be other processes'
                await anyio.sleep(0.01)
        # Asked first without holding others back, which would reset their network streams.
        is_used = driver.keeper.last_used(directory)[1]
        async with self._live_commands(manifest, None) as live:
            if live or is_used:
                raise _cannot_freeze(manifest)
        async with driver.keeper.quiesced(directory) as stream, self._live_commands(manifest, stream) as live:
            if live:
                raise _cannot_freeze(manifest)
            await self._end(manifest, driver, "sleeping")

    async def _commit_active(self, manifest: Manifest, driver: Driver, checkpoint: str | None) -> Manifest:
        """Commit the active layer, unless it is empty. The sandbox does not run.

        The same write of the manifest names `checkpoint`, before that exists: if it is never finished, that is as if it
        had been deleted.
        """
        changes: dict[str, object] = {} if checkpoint is None else {"checkpoint": checkpoint}
        if not self._is_untouched(manifest):
            if len(manifest.layers) >= FLATTEN_AT:
                manifest = await self._flatten(manifest, driver)
            committed = LayerRef(id=manifest.active_layer, owner=manifest.id_base)
            changes |= {"layers": (committed, *manifest.layers), "active_layer": self._layers.new(), "copied": None}
        return self._write(manifest, **changes)

    async def _flatten(self, manifest: Manifest, driver: Driver) -> Manifest:
        """Merge the committed layers of a sandbox into one. Its checkpoints keep theirs."""
        try:
            async with self._new_layer(driver) as layer:
                stack = [Layer(path=self._layers.path(each.id), owner=each.owner) for each in manifest.layers]
                await driver.layers.merge(stack, self._layers.path(layer), manifest.id_base)
        except SandboxError as error:
            if len(manifest.layers) >= MAX_LAYERS:
                raise
            _log.warning("the committed layers of sandbox %s could not be merged: %s", manifest.spec.name, error)
            return manifest
        return self._write(manifest, layers=(LayerRef(id=layer, owner=manifest.id_base),))

    def _is_untouched(self, manifest: Manifest) -> bool:
        """Whether nothing was written to the active layer since it was created."""
        for filesystem in manifest.base:
            upper = self._layers.path(manifest.active_layer) / "upper" / filesystem.key
            with contextlib.suppress(FileNotFoundError):
                seen = upper.stat()
                below = self._layers.path(manifest.layers[0].id) / "upper" / filesystem.key if manifest.layers else None
                mode = stat.S_IMODE(below.stat().st_mode) if below is not None else 0o755
                if os.listdir(upper) or stat.S_IMODE(seen.st_mode) != mode:
                    return False
        return True

    async def _copy_active(self, manifest: Manifest, driver: Driver) -> Manifest:
        """Copy the active layer of a running sandbox. Files that are as in the last copy share its data."""
        async with self._new_layer(driver) as layer, driver.keeper.frozen(self._store.directory(manifest.id)):
            earlier = self._layers.path(manifest.copied) if manifest.copied else None
            await driver.layers.copy(
                self._layers.path(manifest.active_layer), self._layers.path(layer), earlier=earlier
            )
        return self._write(manifest, copied=layer)

    @contextlib.asynccontextmanager
    async def _new_layer(self, driver: Driver) -> AsyncIterator[str]:
        """The id of a layer that the driver creates. It is removed if that fails."""
        layer = self._layers.new_id()
        try:
            yield layer
        except BaseException:
            with anyio.CancelScope(shield=True):
                await driver.layers.remove(self._layers.path(layer))
            raise

    async def restore(self, id: str, record: CheckpointRecord) -> Path:
        """Take a sandbox back to a checkpoint. What it wrote since is lost, and its processes end.

        Returns the layer with what it wrote since, which is unreferenced: the caller removes it.

        Raises:
            CheckpointNotFound: it has just been deleted.
            InvalidRequest: the sandbox is ephemeral.
            LaunchFailed: it did not start.
        """
        async with self._layers.lock(), self._store.working(id):
            record = self._checkpoints.read(record.checkpoint.id)  # with the lock held, its layers stay
            manifest = self._read(id)
            _refuse_ephemeral(manifest)
            driver = self._choose(manifest.runtime)
            # Processes may hold files in mounts: they continue only where there are the same.
            resumes = driver.capabilities.memory_checkpoint and record.mounts == manifest.mounts
            await self._restart(
                manifest,
                driver,
                self._checkpoints.memory(record) if resumes else None,
                spec=manifest.spec.model_copy(update={"image": record.spec.image}),
                # What the sandbox was created with stays, also if the checkpoint is another sandbox's.
                **{
                    **record.resolved(),
                    "limits": manifest.limits,
                    "env": manifest.env,
                    "encrypted_secrets": manifest.encrypted_secrets,
                    "mounts": manifest.mounts,
                },
                active_layer=self._layers.new(),
                copied=None,
                checkpoint=record.checkpoint.id,
            )
            await self._drop_memory(manifest, driver)
            return self._layers.path(manifest.active_layer)

    # ---- parts ----

    def _read(self, id: str) -> Manifest:
        manifest = self._store.read(id)
        if manifest is None:
            raise SandboxDied("the sandbox was destroyed")
        return manifest

    def _write(self, manifest: Manifest, **changes: object) -> Manifest:
        changed = manifest.model_copy(update=changes)
        if changed != manifest:
            self._store.write(changed)
        return changed

    async def size(self, record: CheckpointRecord) -> int:
        """The bytes that a checkpoint adds to its parent, files and processes. Counted once, then read from a file."""
        cached = self._checkpoints.directory(record.checkpoint.id) / "size"
        with contextlib.suppress(OSError, ValueError):
            return int(cached.read_text())
        layers, size = self._any_layers(), 0
        if record.layers and not self._has_layers_of_parent(record):
            size += await layers.size(self._layers.path(record.layers[0].id) / "upper")
        if (memory := self._checkpoints.memory(record)) is not None:
            size += await layers.size(memory.path)
        with contextlib.suppress(OSError):
            cached.write_text(str(size))
        return size

    def _has_layers_of_parent(self, record: CheckpointRecord) -> bool:
        try:
            return record.layers == self._checkpoints.read(str(record.checkpoint.parent)).layers
        except (CheckpointNotFound, SandboxError):
            return False

    async def remove_unreferenced(self, *, timeout_s: float | None = None) -> list[Path]:
        """Remove layers that nothing refers to, and the files of deleted checkpoints and of sandboxes without a record.

        Returns what was removed. With `timeout_s`, nothing is removed if other processes hold the layers for longer:
        the last of them, or the next garbage collection, removes it. As long as the record of a sandbox, checkpoint or
        volume cannot be read, layers and the files of checkpoints stay, since it may refer to any of them.
        """
        async with self._layers.lock(exclusive=True, timeout_s=timeout_s) as held:
            if not held:
                return []
            references, unreadable = self._store.references()
            self._store.drop_groups()
            unreferenced = self._store.orphaned()
            named, damaged = self._volumes.references()
            checkpoints, damaged_checkpoints = self._checkpoints.references()
            if not (damaged or unreadable or damaged_checkpoints):
                named.update(layer.id for record in checkpoints for layer in record.layers)
                named.update(layer for each in references for layer in each.layers)
                self._checkpoints.remove_unreferenced(spare={each.memory for each in references})
                unreferenced += self._layers.unreferenced(named)
        # A process that creates a layer refers to it before it unlocks the layers. So nothing will ever refer to one of
        # these, and they can be removed without the lock.
        if unreferenced:
            await self._any_layers().remove(*unreferenced)
        return unreferenced
