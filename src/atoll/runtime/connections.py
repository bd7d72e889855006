"""The sandboxes that this process has open, and its connections to their guests.

Owns the open handles (`Sandbox`), the manifest with which each was last connected, how a keeper's socket is reached,
and the end: a guest that broke the protocol is stopped, and a sandbox that is removed is disconnected first.
`Connections` is the `SandboxOwner` of every handle.

Not here: how a sandbox is created (`provisioning.py`), how it starts, sleeps and wakes (`lifecycle/`), and what is sent
over a connection (`guest/`). Used by `engine.py` and `provisioning.py`.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.abc import ByteStream

from atoll.contract.driver import Driver
from atoll.contract.errors import AtollError, GuestProtocolError, SandboxDied, SandboxError, SandboxNotFound
from atoll.contract.model import Preview, ProcessInfo, RuntimeName, SandboxInfo, SandboxSpec, SystemProcess, Usage
from atoll.drivers import storage
from atoll.drivers.keeper_stream import KeeperStream
from atoll.runtime.egress.server import EgressServer, EgressServers
from atoll.runtime.guest.connection import GuestConnection
from atoll.runtime.guest.process import list_epoll_waiters, list_processes
from atoll.runtime.lifecycle.lifecycle import Lifecycle
from atoll.runtime.sandbox import Sandbox
from atoll.runtime.secrets.vault import SandboxSecrets, Vault
from atoll.runtime.state.checkpoints import CheckpointRecord
from atoll.runtime.state.layers import Layers
from atoll.runtime.state.namespaces import entry_of
from atoll.runtime.state.records import unreadable
from atoll.runtime.state.running import ENDINGS
from atoll.runtime.state.status import RecordedSandbox, describe, describe_unreadable, ending
from atoll.runtime.state.store import Manifest, StateStore

if TYPE_CHECKING:
    import ssl

    from atoll.runtime.engine import LocalEngine
    from atoll.runtime.lifetimes import BackgroundTasks
    from atoll.runtime.previews.forward import DialPort
    from atoll.runtime.previews.router import Previews
    from atoll.runtime.secrets.injection import SecretInjector

_MAX_LAUNCHES = 8
"""Sandboxes that this process starts at once. With more, each start takes longer and none ends earlier."""
_log = logging.getLogger(__name__)


class PortPublisher(Protocol):
    """Where ports of sandboxes are exposed in place of this engine's own address: a server, at URLs that stay."""

    async def expose(self, namespace: str, sandbox: SandboxInfo, port: int, *, wait_s: float = 0) -> Preview: ...

    async def list(self, namespace: str, sandbox: SandboxInfo | None = None) -> builtins.list[Preview]: ...

    async def take_back(self, namespace: str, sandbox_id: str, port: int | None = None) -> bool:
        """End the preview of a port, or all of a sandbox. False: there was none."""


class Connections:
    """The open sandboxes of one engine, by id. Implements `SandboxOwner`."""

    def __init__(
        self,
        engine: LocalEngine,
        store: StateStore,
        layers: Layers,
        lifecycle: Lifecycle,
        vault: Vault,
        tasks: BackgroundTasks,
        *,
        choose: Callable[[RuntimeName | None], Driver],
        preview_address: tuple[str, int],
    ) -> None:
        self.engine = engine
        self.tasks = tasks
        self.launches = anyio.CapacityLimiter(_MAX_LAUNCHES)
        """Held by each operation that starts a sandbox: create, wake and restore."""
        self.egress_servers = EgressServers(tasks)
        self._store = store
        self._layers = layers
        self._lifecycle = lifecycle
        self._vault = vault
        self._choose = choose
        self.publisher: PortPublisher | None = None
        self._preview_address = preview_address
        self._previews: Previews | None = None
        self._sandboxes: dict[str, Sandbox] = {}
        self._manifests: dict[str, Manifest] = {}
        """The manifest of each open sandbox, as it was when a connection was last made."""
        self._creating: set[str] = set()
        self._recorded: dict[str, dict[str, tuple[tuple[int, int] | None, RecordedSandbox]]] = {}
        """The sandboxes of each namespace that were listed last, with the version of their manifests."""

    @property
    def previews(self) -> Previews:
        """The ports of sandboxes that this process exposes. It listens once the first port is exposed."""
        if self._previews is None:
            from atoll.runtime.previews.router import Previews

            self._previews = Previews(self.tasks, self._preview_address)
        return self._previews

    # ---- handles ----

    @property
    def has_any(self) -> bool:
        """Whether there is a connection to a guest."""
        return any(each._is_connected for each in self._sandboxes.values())  # noqa: SLF001 - this is their owner

    def find(self, id: str) -> Sandbox | None:
        """The handle of a sandbox, if it is open here."""
        return self._sandboxes.get(id)

    def open(self, manifest: Manifest) -> Sandbox:
        """A new handle for the sandbox of a manifest. It connects when it is first used.

        Raises:
            RuntimeUnavailable: the runtime of the sandbox is not on this machine.
        """
        id = manifest.id
        capabilities = self._choose(manifest.runtime).capabilities
        self._manifests[id] = manifest
        egress = EgressServer(
            self.egress_servers,
            self._store.directory(id),
            partial(self.spec, id),
            refused_inside=capabilities.saves_epoll_waiters,
        )
        secret = (
            self._vault.open(manifest.encrypted_secrets) if manifest.encrypted_secrets is not None else SandboxSecrets()
        )
        egress.read_injector = _InjectorReader(
            partial(self._encrypted_secrets, id), self._vault, lambda: self.egress_servers.trust
        )
        # One that is being created is described when it is complete.
        info = RecordedSandbox.of(manifest).info if id in self._creating else self.info(manifest)
        sandbox = Sandbox(info, self, env={**manifest.env, **secret.env}, egress=egress)
        self._sandboxes[id] = sandbox
        return sandbox

    def info(self, manifest: Manifest) -> SandboxInfo:
        """The sandbox of a manifest as `Engine.list` shows it."""
        directory, driver = self._store.directory(manifest.id), self.engine.drivers().get(manifest.runtime)
        expires_at = self._store.expires_at(manifest.id)
        info = describe(manifest, directory, driver, expires_at=expires_at)
        if info.status == "error":  # or another process has put it to sleep since the manifest was read
            with contextlib.suppress(SandboxError):
                return describe(self._store.read(manifest.id) or manifest, directory, driver, expires_at=expires_at)
        return info

    def list(self, prefix: str, namespace: str | None = None) -> builtins.list[SandboxInfo]:
        """See `Engine.list`. Manifests that have not been written since the last call are not read again. `namespace`:
        of another one."""
        store = self._store if namespace is None else self._store.within(namespace)
        before = self._recorded.get(store.namespace, {})
        found, recorded = [], {}
        uncommitted = store.uncommitted()
        drivers, expiries = self.engine.drivers(), store.expiries()
        for name, id in store.named(prefix):
            version = store.version(id)
            known = before.get(id)
            if known is None or version is None or known[0] != version:
                try:
                    manifest = store.read(id or store.lookup(name))
                except SandboxNotFound:
                    continue
                except SandboxError as error:
                    found.append(self._describe_unreadable(store, id, name, unreadable(error)))
                    continue
                if manifest is None:
                    if store.is_lost(store.entry(name), id):
                        found.append(self._describe_unreadable(store, id, name, "its record is missing"))
                    continue
                known = version, RecordedSandbox.of(manifest)
            recorded[id] = known
            directory = store.directory(id)
            driver = drivers.get(known[1].runtime)
            is_busy = id in uncommitted and store.is_being_created(id)
            if id in uncommitted and not is_busy and not known[1].info.ephemeral:
                running = driver is not None and driver.pid(directory) is not None
                if store.is_undone(id, running=running):
                    continue
            info = known[1].now(directory, driver, is_busy=is_busy, expires_at=expiries.get(id))
            if info.status == "error":  # or another process has put it to sleep since the manifest was read
                with contextlib.suppress(SandboxError):
                    manifest = store.read(id)
                    info = self.info(manifest) if manifest else info
            found.append(info)
        self._recorded[store.namespace] = recorded if not prefix else before | recorded
        return found

    def _describe_unreadable(self, store: StateStore, id: str, name: str, reason: str) -> SandboxInfo:
        """A sandbox whose manifest cannot be read, as `Engine.list` shows it."""
        any_driver = next(iter(self.engine.drivers().values()), None)
        return describe_unreadable(id, store.namespace, name, store.directory(id), reason, any_driver)

    def spec(self, id: str) -> SandboxSpec | None:
        """The spec in the manifest as it is on disk now. None: the sandbox was removed."""
        manifest = self._manifests[id] if id in self._creating else self._store.read(id)
        return manifest.spec if manifest else None

    def _encrypted_secrets(self, id: str) -> str | None:
        """Those in the manifest as it is on disk now."""
        manifest = self._manifests[id] if id in self._creating else self._store.read(id)
        return manifest.encrypted_secrets if manifest else None

    @contextlib.contextmanager
    def creating(self, id: str) -> Iterator[None]:
        """This process creates or binds the sandbox: its connections neither wake it nor wait for its lock."""
        self._creating.add(id)
        try:
            yield
        finally:
            self._creating.discard(id)

    def release(self, id: str) -> None:
        """Close the handle of a sandbox that another process may claim from now on."""
        self._manifests.pop(id, None)
        sandbox = self._sandboxes.pop(id, None)
        if sandbox is not None:
            sandbox._disconnect()  # noqa: SLF001 - this is its owner

    def forget_failure(self, id: str) -> None:
        """The sandbox has been restarted: its handle can be used again, whatever it had failed with."""
        if id in self._sandboxes:
            self._sandboxes[id]._forget_failure()  # noqa: SLF001 - this is its owner

    async def disconnect(self, id: str) -> None:
        """Close the connection to a run that has ended, without waiting for the keeper to report the end."""
        if id in self._sandboxes:
            await self._sandboxes[id].aclose()

    async def checkpoint(
        self, id: str, label: str | None, *, keep: bool = True, move: bool = False
    ) -> CheckpointRecord:
        """Make a checkpoint. If it was restarted for that, connect to the new run where needed."""
        served = self.egress_servers.serves(id)
        before = self._manifests.get(id)
        record = await self._lifecycle.checkpoint(id, label, keep=keep, move=move)
        after = self._store.read(id)
        if before is not None and after is not None and before.run != after.run:
            await self.disconnect(id)
            if served and id in self._sandboxes:  # its processes continue, and so must their egress
                with contextlib.suppress(SandboxError):
                    await self._sandboxes[id].connect()
        return record

    # ---- SandboxOwner: what a handle asks for ----

    async def connect(self, id: str) -> ByteStream:
        """A connection to the sandbox's keeper. A sleeping sandbox is woken.

        Raises:
            SandboxDied: the sandbox was destroyed, or has ended.
            SandboxShutdown: it was shut down.
        """
        if self._store.has_expired(id):
            raise SandboxDied("the sandbox was destroyed: its lifetime (ttl) is over")
        if id not in self._creating and self._store.is_due_to_sleep(id):
            await self._lifecycle.sleep_at_end(id)  # it is woken below, and lives as long again
        await self._renew_paused(id)
        manifest = self._manifests[id] if id in self._creating else self._store.read(id)
        if manifest is None:
            raise SandboxDied("the sandbox was destroyed")
        if manifest.state != "running" and id not in self._creating:
            async with self.launches:
                manifest = await self._lifecycle.wake(id, asked=False)
        try:
            return await self._reach(manifest)
        except OSError:
            if id in self._creating:
                raise
        # It has ended, or another operation on it is in progress: `wake` waits for that one.
        reason = ending(self._store.directory(id)) or "its keeper does not answer"
        async with self.launches:
            try:
                manifest = await self._lifecycle.wake(id, asked=False)
            except SandboxDied as error:
                raise SandboxDied(
                    f"the sandbox {manifest.spec.name!r} has ended: {reason}; wake it, or destroy it"
                ) from error
        return await self._reach(manifest)

    async def _renew_paused(self, id: str) -> None:
        """Using a sandbox that was paused at the end of its lifetime begins another."""
        manifest = None if id in self._creating else self._store.read(id)
        if manifest is not None and manifest.spec.on_expiry == "pause" and self._store.expiry(id) is None:
            await self._lifecycle.begin_lifetime(id)

    def take_start(self, id: str) -> Sequence[str]:
        spec = self._lifecycle.take_begun(id)
        return () if spec is None else spec.start_command

    def oom_kills(self, id: str) -> int | None:
        manifest = self._manifests.get(id)
        return self._choose(manifest.runtime).oom_kills(manifest.run_id) if manifest else None

    async def usage(self, id: str, *, disk: bool = True) -> Usage:
        manifest = self._store.read(id)
        if manifest is None:
            raise SandboxDied("the sandbox was destroyed")
        driver = self._choose(manifest.runtime)
        return await driver.usage(manifest.run_id, self._layers.path(manifest.active_layer) if disk else None)

    async def current_info(self, info: SandboxInfo) -> SandboxInfo:
        return await anyio.to_thread.run_sync(self._current_info, info)

    def _current_info(self, info: SandboxInfo) -> SandboxInfo:
        try:
            manifest = self._store.read(info.id)
        except SandboxError as error:
            return info.model_copy(update={"status": "error", "reason": unreadable(error), "pid": None})
        if manifest is None:
            raise SandboxDied(f"the sandbox {info.name!r} was destroyed")
        return self.info(manifest)

    def why_ended(self, info: SandboxInfo) -> str | None:
        if info.id in self._creating:
            return None
        if not self._store.resolves_to(entry_of(info.namespace, info.name), info.id):
            return "was destroyed"
        try:
            manifest = self._store.read(info.id)
        except SandboxError:
            return None
        return ENDINGS[manifest.state] if manifest is not None else "was destroyed"

    async def destroy(self, info: SandboxInfo) -> None:
        await self.remove(info.id, entry_of(info.namespace, info.name), self._choose(info.runtime))

    async def expose(self, info: SandboxInfo, port: int, dial: DialPort, *, wait_s: float) -> Preview:
        if self.publisher is not None:
            return await self.publisher.expose(info.namespace, info, port, wait_s=wait_s)
        return await self.previews.expose(info, port, dial, wait_s=wait_s)

    async def unexpose(self, info: SandboxInfo, port: int) -> None:
        if self.publisher is not None:
            await self.publisher.take_back(info.namespace, info.id, port)
        else:
            self.previews.unexpose(info.id, port)
            await anyio.lowlevel.checkpoint()

    async def list_previews(self, info: SandboxInfo) -> builtins.list[Preview]:
        if self.publisher is not None:
            return await self.publisher.list(info.namespace, info)
        await anyio.lowlevel.checkpoint()
        return self.previews.of(info.id)

    async def stop(self, id: str) -> None:
        """End the processes of a guest that broke the protocol. The sandbox keeps its files; its status is `error`.

        A failure is logged, not raised: the caller is about to raise `GuestProtocolError`.
        """
        if id in self._creating:
            return  # its creation fails, and removes it
        manifest = self._manifests[id]
        with anyio.CancelScope(shield=True):
            try:
                await self._choose(manifest.runtime).stop(manifest.run_id, self._store.directory(id))
            except (AtollError, OSError):
                _log.exception("sandbox %s broke the protocol and could not be stopped", id)

    # ---- guests ----

    async def _reach(self, manifest: Manifest) -> ByteStream:
        self.tasks.require_open()  # they would serve the connection
        self._manifests[manifest.id] = manifest
        try:
            fd = os.open(self._store.directory(manifest.id), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise SandboxNotFound(manifest.spec.name, self._store.names()) from None
        try:
            return await KeeperStream.connect(f"/proc/self/fd/{fd}/sock")
        finally:
            os.close(fd)

    async def epoll_waiters(self, manifest: Manifest) -> Sequence[SystemProcess]:
        """The processes that may wait for a TCP socket with epoll, in a sandbox on which the caller holds the lock.

        Asked over a connection of its own: the task that makes the shared one may be waiting for the caller's lock.

        Raises:
            SandboxError: the guest cannot be reached, or broke the protocol.
        """
        async with self._asking(manifest, None) as connection:
            return await list_epoll_waiters(connection.open, manifest.spec.name)

    @contextlib.asynccontextmanager
    async def live_commands(
        self, manifest: Manifest, stream: ByteStream | None
    ) -> AsyncIterator[Sequence[ProcessInfo]]:
        """The commands of which some process lives, asked likewise, or over `stream`, on which HELLO was received.

        The connection lasts as long as the context.

        Raises:
            SandboxError: the guest cannot be reached, or broke the protocol.
        """
        async with self._asking(manifest, stream) as connection:
            yield [each for each in await list_processes(connection.open, manifest.spec.name) if each.live]

    @contextlib.asynccontextmanager
    async def _asking(self, manifest: Manifest, stream: ByteStream | None) -> AsyncIterator[GuestConnection]:
        name = f"sandbox {manifest.spec.name!r}"
        is_ready = stream is not None
        try:
            stream = stream or await self._reach(manifest)
        except OSError as error:
            if isinstance(error, AtollError):
                raise
            raise SandboxDied(f"{name} cannot be reached: {error}") from error
        connection = GuestConnection(stream, name, is_ready=is_ready)
        ended = anyio.Event()

        async def serve() -> None:
            try:
                await connection.run()
            finally:
                ended.set()

        try:
            if not is_ready:
                await connection.handshake()
            self.tasks.start_soon(serve)
            yield connection
        except GuestProtocolError:
            await self.stop(manifest.id)
            raise
        finally:
            connection.close()
            if is_ready:  # the caller closes the stream, which must not be read any more then
                with anyio.CancelScope(shield=True):
                    await ended.wait()

    # ---- removal ----

    async def remove(
        self,
        id: str,
        entry: str | None,
        driver: Driver | None,
        *,
        locked: bool = False,
        abandoned: bool = False,
        expired: bool = False,
        held: bool = False,
    ) -> None:
        """End a sandbox and remove all of it: previews, handle, processes, files, name. `entry` is that of its name;
        None: of whichever it has.

        `driver` None, or a manifest that cannot be read: every driver of this machine is asked. `locked`, `abandoned`
        and `expired` are those of `StateStore.removing`. With `held`, the caller holds the layers and they are not
        collected.
        """
        sandbox = None if abandoned or expired else self._sandboxes.pop(id, None)
        if self._previews is not None:
            self._previews.unexpose(id)
        async with self._store.removing(id, entry, locked=locked, abandoned=abandoned, expired=expired) as directory:
            sandbox = sandbox or self._sandboxes.pop(id, None)
            is_readable = True
            try:
                manifest = self._store.read(id)
            except SandboxError:
                manifest, driver, is_readable = None, None, False
                self._store.drop_unreadable(id)
            runtime, run_id = self._store.noted_run(id)
            more = []
            if manifest is not None:
                run_id, more = manifest.run_id, [self._layers.path(manifest.active_layer)]
            # The one that started it is asked first: only it ends the processes before their keeper, which reaps them.
            known = () if driver else self.engine.drivers().values()
            drivers = [driver] if driver else sorted(known, key=lambda each: each.name != runtime)
            # A subvolume that is deleted while it is mounted is cleaned up half a minute later.
            later = drivers and not any(map(storage.is_subvolume, more))
            with anyio.CancelScope(shield=True), _unmounting_later(drivers[0].pid(directory) if later else None):
                for each in drivers:
                    await each.stop(run_id, directory)
                if drivers:
                    await drivers[0].layers.remove(directory, *more)
                self._store.release_ids(id, manifest.id_slot if manifest else None)
        self._manifests.pop(id, None)
        if sandbox is not None:
            await sandbox.aclose()
        if self.publisher is not None and manifest is not None:
            with contextlib.suppress(AtollError):  # then they are taken back when a client asks for them
                await self.publisher.take_back(manifest.namespace, id)
        has_layers = not is_readable or (manifest is not None and manifest.layers)
        if has_layers and not (locked or held):
            await self._lifecycle.remove_unreferenced(timeout_s=1)


@contextlib.contextmanager
def _unmounting_later(pid: int | None) -> Iterator[None]:
    """Hold the mounts of a sandbox that is removed, and have a thread unmount them afterwards.

    Unmounting an overlay writes all that is dirty in the file system below it (`syncfs`). Without this, the end of the
    last process would wait for that, with nothing left that is worth writing.
    """
    held = None
    with contextlib.suppress(OSError):
        held = None if pid is None else os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        if held is not None:
            threading.Thread(target=os.close, args=(held,)).start()


class _InjectorReader:
    """What is put into the requests of one sandbox: made anew when its encrypted secrets are others."""

    def __init__(self, read: Callable[[], str | None], vault: Vault, trust: Callable[[], ssl.SSLContext]) -> None:
        self._read = read
        self._vault = vault
        self._trust = trust
        self._encrypted: str | None = None
        self._injector: SecretInjector | None = None

    def __call__(self) -> SecretInjector | None:
        """
        Raises:
            SandboxError: the secrets cannot be decrypted.
        """
        encrypted = self._read()
        if encrypted != self._encrypted:
            contents = self._vault.open(encrypted) if encrypted is not None else SandboxSecrets()
            self._injector, self._encrypted = None, encrypted
            if contents.secrets or contents.headers:
                from atoll.runtime.secrets.injection import SecretInjector

                self._injector = SecretInjector(contents, self._trust)
        return self._injector
