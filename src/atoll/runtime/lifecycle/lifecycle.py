"""How a sandbox that exists is started, put to sleep, checkpointed and taken back.

Knows the order in which manifests, layers and processes change, so that whoever is killed in between leaves something
that the next one can finish or undo. Refuses to know how a sandbox is made and named (`host.py`), how processes are
isolated and copied (the driver), and connections.

The manifest is written before what it announces is begun, except where it says that something is finished:

    wake        the number of the new run, then the start, then `running`. Until then it sleeps, unless its keeper
                lives: that one runs, whatever the manifest says. A start that was cut short is begun anew.
    sleep       `cold` and `ending`, then the end of its processes. What still runs of one that is `ending` is ended by
                whoever comes next: somebody may be about to do so who cannot be held back.
    checkpoint  the sealed stack with a new top, or a copy of the top; then the checkpoint, which is what counts.
    restore     `ending`, then the end of the old processes, the new stack with a new top, and the start.

All of it is done with the sandbox's `work.lock` held; what makes a layer, with the layers held. `reconcile` puts in order
what was under way when somebody died.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread

from atoll.contract.driver import Driver, Launch, Layer, LayerStore, ProcessImage
from atoll.contract.errors import (
    CheckpointNotFound,
    InvalidRequest,
    LaunchFailed,
    NotCheckpointable,
    SandboxAsleep,
    SandboxDied,
    SandboxError,
)
from atoll.contract.model import Checkpoint, RuntimeName, SystemProcess
from atoll.contract.network import Indexes, NetworkPolicy
from atoll.runtime.state.checkpoints import CheckpointRecord, Checkpoints
from atoll.runtime.state.layers import FLATTEN_AT, MAX_LAYERS, LayerRef, Layers
from atoll.runtime.state.store import Manifest, StateStore, now

_ANSWER_S = 10
"""How long a sandbox may take to say who waits in it."""
_END_S = 10
"""How long a sandbox whose processes have been written to disk may take to end."""
_log = logging.getLogger(__name__)


def _require_lasting(manifest: Manifest) -> None:
    if manifest.spec.ephemeral:
        raise InvalidRequest(
            f"the sandbox {manifest.spec.name!r} is ephemeral: it ends with its last client, and cannot sleep"
        )


class Lifecycle:
    def __init__(
        self,
        store: StateStore,
        layers: Layers,
        checkpoints: Checkpoints,
        choose: Callable[[RuntimeName | None], Driver],
        any_layers: Callable[[], LayerStore],
        waiting: Callable[[Manifest], Awaitable[Sequence[SystemProcess]]],
    ) -> None:
        self._store = store
        self._layers = layers
        self._checkpoints = checkpoints
        self._choose = choose
        self._any_layers = any_layers
        self._waiting = waiting
        """Who in a sandbox waits for sockets, in a way that some runtimes cannot write to disk."""

    async def start(
        self, manifest: Manifest, driver: Driver, memory: ProcessImage | None = None, *, wait_ready: bool = False
    ) -> None:
        """Start the run that `manifest` names, with no process in it or with those that were saved in `memory`."""
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
                wait_ready=wait_ready,
            )
        )

    # ---- sleeping and waking ----

    async def wake(self, id: str, *, asked: bool) -> Manifest:
        """Have it run, whoever else wants that too.

        Raises:
            SandboxAsleep: it was shut down, and nobody `asked` for it to wake.
            SandboxDied: it was not asleep but has ended, and nobody asked.
            LaunchFailed: it did not start.
        """
        async with self._store.working(id):
            manifest = self._read(id)
            driver = self._choose(manifest.runtime)
            directory = self._store.directory(id)
            if await self._runs(manifest, driver):  # its keeper lets it go on, should it stand still
                awake = self._write(manifest, state="running", memory=None)
                await self._drop_memory(manifest, driver)
                return awake
            if not asked and manifest.state == "shutdown":
                raise SandboxAsleep(f"the sandbox {manifest.spec.name!r} was shut down; wake it first")
            if not asked and manifest.state == "running":
                raise SandboxDied(f"the sandbox {manifest.spec.name!r} has ended; wake it, or destroy it")
            if manifest.memory is None:
                return await self._restart(manifest, driver)
            memory = ProcessImage(path=directory / manifest.memory, hostname=manifest.spec.name)
            try:
                woken = await self._restart(manifest, driver, memory)
            except LaunchFailed:
                # Cut short when it was written, or of another version of the runtime. The files are there all the same.
                _log.warning("the processes of %s could not go on and are lost", manifest.spec.name, exc_info=True)
                woken = await self._restart(self._read(id), driver)
            await self._drop_memory(manifest, driver)
            return woken

    async def _runs(self, manifest: Manifest, driver: Driver) -> bool:
        """Whether it runs and may go on. What was to end, and whose end was cut short, does not from here on."""
        directory = self._store.directory(manifest.id)
        if driver.pid(directory) is None:
            return False
        if manifest.ending:
            await driver.stop(manifest.run_id, directory)
            return False
        if manifest.memory is not None and any((directory / manifest.memory).glob("*")):
            # Its processes have been written to disk, and end any moment; or that failed, and they go on.
            with anyio.move_on_after(_END_S):
                while driver.pid(directory) is not None:  # noqa: ASYNC110 - the processes are not ours
                    await anyio.sleep(0.01)
        return driver.pid(directory) is not None

    async def reconcile(self, id: str) -> None:
        """Put a sandbox in order that somebody was at work on who died."""
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
        """What was written of its processes is of no more use, unless it is a checkpoint's."""
        directory = self._store.directory(manifest.id)
        if manifest.memory is not None and (directory / manifest.memory).parent == directory:
            await driver.layers.remove(directory / manifest.memory)

    async def _restart(
        self, manifest: Manifest, driver: Driver, saved: ProcessImage | None = None, **changes: object
    ) -> Manifest:
        """Stop what there is, and start the sandbox as it is with `changes`, with the processes that were saved."""
        directory = self._store.directory(manifest.id)
        asleep = "sleeping" if manifest.state == "running" else manifest.state
        if driver.pid(directory) is not None:
            self._store.finish_created(manifest.id)
            manifest = self._write(manifest, state=asleep, memory=None, ending=True)
        await driver.stop(manifest.run_id, directory)
        # From here on it may write to its files: processes of before must never be put on top of them.
        begun = self._write(
            manifest, **{"run": manifest.run + 1, "state": asleep, "memory": None, "ending": False, **changes}
        )
        try:
            await self.start(begun, driver, saved, wait_ready=True)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await driver.stop(begun.run_id, directory)
                # As it was, but for what no run is to be called again.
                self._write(manifest, run=begun.run, state=asleep)
            raise
        with contextlib.suppress(OSError):  # it runs, whether there is room for saying so or not
            return self._write(begun, state="running")
        return begun

    async def sleep(self, id: str, state: Literal["sleeping", "shutdown"]) -> None:
        """End its processes and keep its files; where the runtime can, the processes are kept too."""
        async with self._store.working(id) as lock:
            manifest = self._read(id)
            driver = self._choose(manifest.runtime)
            _require_lasting(manifest)
            if not await self._runs(manifest, driver):
                self._write(manifest, state=state)
            elif await self._keeps_processes(manifest, driver, state):
                await self._save(manifest, driver, lock, state)
            else:
                await self._end(manifest, driver, state)

    async def _keeps_processes(
        self, manifest: Manifest, driver: Driver, state: Literal["sleeping", "shutdown"]
    ) -> bool:
        """Whether its processes are written to disk when they end.

        Raises:
            CannotSave: they would be lost, and nobody has said that they may be.
        """
        if not driver.capabilities.memory_checkpoint:
            return False
        try:
            await self._require_savable(manifest, driver)
        except NotCheckpointable as error:
            if state != "shutdown":
                raise
            # Nobody inside is to be able to keep a sandbox from being shut down.
            _log.warning("the processes of %s end with its shutdown: %s", manifest.spec.name, error.message)
            return False
        return True

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
        """Write its processes to `image`, or to a place of its own, and end them. The manifest names it before that."""
        directory = self._store.directory(manifest.id)
        self._store.finish_created(manifest.id)
        asleep = self._write(manifest, state=state, memory=str(image or f"memory-{manifest.run}"))
        try:
            # It is not undone by our end: who comes next waits until it is done.
            await driver.save(manifest.run_id, directory, directory / str(asleep.memory), lock=lock)
        except SandboxError:
            if driver.pid(directory) is not None:
                self._write(asleep, state="running", memory=None)
            raise
        await driver.stop(manifest.run_id, directory)

    async def _require_savable(self, manifest: Manifest, driver: Driver) -> None:
        """
        Raises:
            CannotSave: the runtime would lose the processes in trying.
        """
        if driver.capabilities.saves_epoll_waiters:
            return
        waiting: Sequence[SystemProcess] = ()
        with contextlib.suppress(SandboxError), anyio.move_on_after(_ANSWER_S):  # who cannot say is taken at its best
            waiting = await self._waiting(manifest)
        if waiting:
            shown = ", ".join(f"{process.pid} ({process.command[:60]})" for process in waiting[:3])
            raise NotCheckpointable(
                f"this version of {driver.name} cannot write processes to disk that wait for connections with epoll, "
                f"as these may: {shown}",
                hint="end them first, let the sandbox sleep in memory (warm), or install a newer runtime",
            )

    async def sleep_unused(self, id: str, after: timedelta) -> bool:
        """Put it to sleep if nobody has used it for so long, cold unless that would lose its processes, else warm.

        Returns whether it was.

        Who begins to use it in this very moment waits until it is known, and then finds it asleep or as it was.
        """
        async with self._store.working(id) as lock:
            manifest = self._read(id)
            driver = self._choose(manifest.runtime)
            directory = self._store.directory(id)

            if manifest.spec.ephemeral:
                return False

            def unused() -> bool:
                last, at_work = driver.keeper.last_used(directory)
                since = max(last or manifest.created_at, manifest.created_at)  # it may have waited before it was made
                return not at_work and now() - since >= after

            if not await self._runs(manifest, driver) or not unused():
                return False
            saves = stays = False
            try:
                saves = await self._keeps_processes(manifest, driver, "sleeping")
            except NotCheckpointable:
                if not driver.capabilities.freeze:
                    raise
                stays = True
            async with driver.keeper.frozen(directory) if driver.capabilities.freeze else contextlib.nullcontext():
                if not unused():
                    return False
                if not saves and not stays:
                    await self._end(manifest, driver, "sleeping")
                    return True
            if stays:
                await driver.keeper.freeze(directory)
            else:
                await self._save(manifest, driver, lock, "sleeping")
            return True

    async def pause(self, id: str) -> None:
        """Freeze its processes in memory, until it is next used."""
        async with self._store.working(id):
            manifest = self._read(id)
            driver = self._choose(manifest.runtime)
            if await self._runs(manifest, driver):
                await driver.keeper.freeze(self._store.directory(id))

    async def set_network(self, id: str, policy: NetworkPolicy | None, indexes: Indexes | None) -> None:
        """Have another policy hold, from the moment in which the manifest says so."""
        async with self._store.working(id):
            manifest = self._read(id)
            self._write(manifest, spec=manifest.spec.model_copy(update={"network": policy, "indexes": indexes}))

    # ---- checkpoints ----

    async def checkpoint(self, id: str, name: str | None, *, keep: bool = True) -> CheckpointRecord:
        """Remember the sandbox as it is now. Its processes stand still meanwhile.

        One that is not to be kept is nowhere on disk: it lasts as long as the caller holds the layers.
        """
        async with self._layers.lock(), self._store.working(id) as lock:
            manifest = self._read(id)
            driver = self._choose(manifest.runtime)
            directory = self._store.directory(id)
            new_id = self._checkpoints.new_id()
            saved = self._checkpoints.directory(new_id) / "memory"
            running = await self._runs(manifest, driver)
            asleep = directory / manifest.memory if manifest.memory and not running else None
            with_memory = asleep is not None or (running and driver.capabilities.memory_checkpoint)
            parent = manifest.checkpoint
            if asleep is not None:
                # The sandbox and the checkpoint each have their own names for what is never changed.
                await anyio.to_thread.run_sync(partial(shutil.copytree, asleep, saved, copy_function=os.link))
            if with_memory and running:
                _require_lasting(manifest)
                await self._require_savable(manifest, driver)
                self._checkpoints.directory(new_id).mkdir(mode=0o700)
                await self._save(manifest, driver, lock, "sleeping", saved)
                manifest = await self._seal(self._read(id), driver, new_id if keep else None)
                stack = manifest.layers
            elif running:
                manifest = await self._copy_active(manifest, driver)
                stack = (LayerRef(id=str(manifest.copied), owner=manifest.id_base), *manifest.layers)
            else:
                manifest = await self._seal(manifest, driver, new_id if keep else None)
                stack = manifest.layers
            record = CheckpointRecord(
                checkpoint=Checkpoint(
                    id=new_id,
                    name=name,
                    sandbox=manifest.spec.name,
                    created_at=now(),
                    parent=parent,
                    with_memory=with_memory,
                    runtime=manifest.runtime,
                    image=manifest.spec.image,
                ),
                spec=manifest.spec,
                **{**manifest.resolved(), "layers": stack},
            )
            if keep:
                self._checkpoints.write(record)
                manifest = self._write(manifest, checkpoint=record.checkpoint.id)
            if with_memory and running:
                await self._restart(self._read(id), driver, self._checkpoints.memory(record))
            return record

    async def _seal(self, manifest: Manifest, driver: Driver, checkpoint: str | None) -> Manifest:
        """What was written so far becomes a layer; nothing that runs writes to it.

        The sandbox is said to stand at `checkpoint` with the same write, before there is one: if it is never finished,
        that is as if it had been deleted.
        """
        changes: dict[str, object] = {} if checkpoint is None else {"checkpoint": checkpoint}
        if not self._is_untouched(manifest):
            if len(manifest.layers) >= FLATTEN_AT:
                manifest = await self._flatten(manifest, driver)
            committed = LayerRef(id=manifest.active_layer, owner=manifest.id_base)
            changes |= {"layers": (committed, *manifest.layers), "active_layer": self._layers.new(), "copied": None}
        return self._write(manifest, **changes)

    async def _flatten(self, manifest: Manifest, driver: Driver) -> Manifest:
        """Make one layer of those that it stands on. Its checkpoints keep theirs."""
        try:
            async with self._new_layer(driver) as layer:
                stack = [Layer(path=self._layers.path(each.id), owner=each.owner) for each in manifest.layers]
                await driver.layers.merge(stack, self._layers.path(layer), manifest.id_base)
        except SandboxError as error:
            if len(manifest.layers) >= MAX_LAYERS:
                raise
            _log.warning("the layers of %s stay as many as they are: %s", manifest.spec.name, error)
            return manifest
        return self._write(manifest, layers=(LayerRef(id=layer, owner=manifest.id_base),))

    def _is_untouched(self, manifest: Manifest) -> bool:
        """Whether nothing was written to the top since it was made."""
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
        """Make a layer of what the sandbox has written by now. What has not changed since the last is not copied."""
        async with self._new_layer(driver) as layer, driver.keeper.frozen(self._store.directory(manifest.id)):
            earlier = self._layers.path(manifest.copied) if manifest.copied else None
            await driver.layers.copy(
                self._layers.path(manifest.active_layer), self._layers.path(layer), earlier=earlier
            )
        return self._write(manifest, copied=layer)

    @contextlib.asynccontextmanager
    async def _new_layer(self, driver: Driver) -> AsyncIterator[str]:
        """A layer for the driver to make, of which nothing is left if that fails."""
        layer = self._layers.new_id()
        try:
            yield layer
        except BaseException:
            with anyio.CancelScope(shield=True):
                await driver.layers.remove(self._layers.path(layer))
            raise

    async def restore(self, id: str, record: CheckpointRecord) -> Path:
        """Have the sandbox be what it was at a checkpoint. What it wrote since is lost, and its processes end.

        Returns the layer with what it wrote since: nobody's any more, and the caller's to remove.
        """
        async with self._layers.lock(), self._store.working(id):
            record = self._checkpoints.read(record.checkpoint.id)  # nobody can take its layers away from here on
            manifest = self._read(id)
            _require_lasting(manifest)
            driver = self._choose(manifest.runtime)
            await self._restart(
                manifest,
                driver,
                self._checkpoints.memory(record) if driver.capabilities.memory_checkpoint else None,
                spec=manifest.spec.model_copy(update={"image": record.spec.image}),
                # What it was given when it was made stays its own, whosever checkpoint it is.
                **{
                    **record.resolved(),
                    "limits": manifest.limits,
                    "env": manifest.env,
                    "encrypted_secrets": manifest.encrypted_secrets,
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
        """What a checkpoint holds beyond the one before it, files and processes. Counted once."""
        noted = self._checkpoints.directory(record.checkpoint.id) / "size"
        with contextlib.suppress(OSError, ValueError):
            return int(noted.read_text())
        layers, size = self._any_layers(), 0
        if record.layers and not self._is_like_its_parent(record):
            size += await layers.size(self._layers.path(record.layers[0].id) / "upper")
        if (memory := self._checkpoints.memory(record)) is not None:
            size += await layers.size(memory.path)
        with contextlib.suppress(OSError):
            noted.write_text(str(size))
        return size

    def _is_like_its_parent(self, record: CheckpointRecord) -> bool:
        try:
            return record.layers == self._checkpoints.read(str(record.checkpoint.parent)).layers
        except CheckpointNotFound:
            return False

    async def collect(self, *, patience_s: float | None = None) -> list[Path]:
        """Take away the layers, and what else of sandboxes, that nobody names any more. Returns what was taken away.

        With `patience_s`, it is left to somebody else when others are at work for longer.
        """
        async with self._layers.lock(exclusive=True, patience_s=patience_s) as held:
            if not held:
                return []
            named = {layer.id for record in self._checkpoints.all() for layer in record.layers}
            memories = set()
            for id in os.listdir(self._store.state_dir / "sandboxes"):
                manifest = self._store.read(id)
                if manifest is not None:
                    named |= {manifest.active_layer, *(layer.id for layer in manifest.layers)}
                    memories.add((self._store.directory(id) / (manifest.memory or "")).parent)
            self._checkpoints.collect(spare=memories)
            self._store.drop_groups()
            unreferenced = self._layers.unreferenced(named) + self._store.orphaned()
        # Whoever makes a layer names it before letting go of the store: nobody will name one of these again, and
        # nobody has to wait until they are gone.
        if unreferenced:
            await self._any_layers().remove(*unreferenced)
        return unreferenced
