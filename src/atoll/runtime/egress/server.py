"""The egress server of a sandbox: which process serves its connections to the network, and by which policy.

Owns the port inside on which the proxy listens, that one process at a time serves a sandbox, reading the current
policy, and the variables that commands inside get. Not here: what is allowed (`policy.py`) and how it passes
(`proxy.py`). Used by the engine and `Sandbox`.

There is no daemon. Of the processes that are connected to a sandbox with a policy, the one that holds `egress.lock` in
the sandbox's directory listens inside. When it ends, in whatever way, the kernel releases the lock and the keeper
closes the port; each other connected process tries once a second, and one of them serves from then on. While no process
serves it, and without a policy, the guest itself answers on the port (`guest/refuse.c`): with 403, and with the command
that would allow the request.

The policy is in the manifest, which is checked for each decision: a change by any process holds from the next
connection on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.abc

from atoll.contract.errors import AtollError, PortRefused, SandboxError
from atoll.contract.inside import EGRESS_PORT, PROXY_ENV
from atoll.contract.model import SandboxSpec
from atoll.drivers.locks import try_lock
from atoll.runtime.egress.audit import AuditLog
from atoll.runtime.guest.connection import GuestConnection
from atoll.runtime.guest.ports import PortConnection

if TYPE_CHECKING:
    import ssl

    from atoll.runtime.egress.policy import PolicyEvaluator

    # Imported where something is served: most processes that open an engine never need an HTTP parser.
    from atoll.runtime.egress.proxy import Connector, EgressProxy
    from atoll.runtime.lifetimes import BackgroundTasks
    from atoll.runtime.secrets.injection import SecretInjector

LOCK = "egress.lock"
MAX_CONNECTIONS = 128
"""Of one sandbox at the same time. Further ones wait inside."""
_WATCH_INTERVAL_S = 1.0
_LISTEN_TIMEOUT_S = 5.0
_HANDOVER_TIMEOUT_S = 1.0
"""How long the previous server may still hold the port."""
_log = logging.getLogger(__name__)


class Listen(Protocol):
    """Listens inside over one connection to the guest: `ports.listen_idle`."""

    def __call__(
        self, connection: GuestConnection, port: int
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[PortConnection]]: ...


class EgressServers:
    """What the egress servers of all sandboxes of an engine share."""

    def __init__(self, tasks: BackgroundTasks) -> None:
        self.tasks = tasks
        self.connector: Connector | None = None
        """How names are resolved and connections made. Unset: by this machine's resolver and network."""
        limit = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self.connections = anyio.Semaphore(limit)
        """Each takes a descriptor of this process, which needs others for previews, files and the embedding program."""
        self.share = min(MAX_CONNECTIONS, limit // 4)
        self._watched: set[EgressServer] = set()
        self._watch_running = False

    @cached_property
    def trust(self) -> ssl.SSLContext:
        """Verifies servers to which secrets are sent: by the certificate authorities that this machine trusts."""
        import ssl

        context = ssl.create_default_context()
        context.set_alpn_protocols(["http/1.1"])
        return context

    def watch(self, egress: EgressServer) -> None:
        """Serve a sandbox whenever no other process does, as long as it is connected."""
        self._watched.add(egress)
        if not self._watch_running:
            self._watch_running = True
            self.tasks.start_soon(self._watch)

    def serves(self, id: str) -> bool:
        """Whether this process serves the egress of the sandbox with this id."""
        return any(each.is_served for each in self._of(id))

    async def apply_policy(self, id: str) -> None:
        """Apply the policy in the manifest of a sandbox at once, if this process is connected to it."""
        for each in self._of(id):
            await each.apply_policy()

    def _of(self, id: str) -> list[EgressServer]:
        return [each for each in self._watched if each.id == id]

    async def _watch(self) -> None:
        while self._watched:
            await anyio.sleep(_WATCH_INTERVAL_S)
            for egress in list(self._watched):
                try:
                    if not egress.is_connected:
                        self._watched.discard(egress)
                    elif egress.wants_serving():
                        self.tasks.start_soon(egress.try_serve)
                except Exception:  # noqa: BLE001 - a failing sandbox must end neither the watch nor the engine
                    _log.exception("checking the egress of a sandbox failed; trying again")
        self._watch_running = False


class EgressServer:
    """The egress of one sandbox, as this process serves it."""

    def __init__(
        self,
        egress_servers: EgressServers,
        directory: Path,
        spec: Callable[[], SandboxSpec | None],
        *,
        refused_inside: bool = False,
    ) -> None:
        """`refused_inside`: the guest answers while no process serves the sandbox."""
        self.id = directory.name
        """The sandbox's id."""
        self.read_injector: Callable[[], SecretInjector | None] = lambda: None
        """What is put into requests, by the manifest as it is on disk: the same object as long as that is the same."""
        self._injector: SecretInjector | None = None
        self._installed: SecretInjector | None = None
        """What programs inside trust already."""
        self._servers = egress_servers
        self._directory = directory
        self._manifest = str(directory / "manifest.json")
        self._read_spec = spec
        self._refused_inside = refused_inside
        self._seen: tuple[int, int] | None = None
        self._spec: SandboxSpec | None = None
        self._env: Mapping[str, str] = {}
        self._evaluator: PolicyEvaluator | None = None
        self._link: GuestConnection | None = None
        self._listen_inside: Listen | None = None
        self._serving: anyio.CancelScope | None = None
        self._ended = anyio.Event()
        self._last_warning = ""
        self._proxy: EgressProxy | None = None

    # ------------------------------------------------------------------------------------------------ the policy

    def evaluator(self) -> PolicyEvaluator:
        """The evaluator of the current policy."""
        from atoll.runtime.egress.policy import PolicyEvaluator

        self.reload_policy()
        if self._evaluator is None:
            spec = self._spec
            self._evaluator = PolicyEvaluator(spec.network, spec.indexes) if spec else PolicyEvaluator()
        return self._evaluator

    def env(self) -> Mapping[str, str]:
        """The variables for commands inside: the proxy and the package indexes.

        Without a policy, the guest answers on the proxy's port, and says how to allow what is refused.
        """
        return self._env

    def _make_env(self) -> Mapping[str, str]:
        if self._spec is None or not (self._has_policy or self._refused_inside):
            return {}
        trusted = self._injector.variables if self._has_policy and self._injector else {}
        return {**PROXY_ENV, **trusted, **(self._spec.indexes.env if self._has_policy and self._spec.indexes else {})}

    def reload_policy(self) -> bool:
        """Read the policy in the manifest, if that was written, and what is put into requests. Returns whether either
        has changed.

        While it cannot be read, no connection is allowed, and each call tries again.
        """
        try:
            seen = self._version()
            if seen == self._seen:
                return False
            spec, injector, self._seen = self._read_spec(), self.read_injector(), seen
        except (SandboxError, OSError) as error:
            self._warn_once("its network policy cannot be read", error)
            spec, injector, self._seen = None, None, None
        before, self._spec = self._spec, spec
        injected, self._injector = self._injector, injector
        self._env = self._make_env()
        if injector is not injected and self._proxy is not None:
            self._proxy.intercept_with(injector)
        if _rules(before) == _rules(spec):
            return injector is not injected
        self._evaluator = None
        if self._proxy is not None:
            self._proxy.recheck()
        if self._serving is not None and not self._has_policy:
            self._serving.cancel()
        return True

    def _version(self) -> tuple[int, int]:
        """Differs whenever the manifest has been written."""
        try:
            stat = os.stat(self._manifest)
        except FileNotFoundError:
            return 0, 0
        return stat.st_ino, stat.st_mtime_ns

    def _warn_once(self, what: str, error: Exception) -> None:
        """Log why there is no egress, once for each reason."""
        text = f"{what}: {error}"
        if text != self._last_warning:
            self._last_warning = text
            _log.warning("no egress from %s; trying again: %s", self._directory.name, text)

    @property
    def _has_policy(self) -> bool:
        return self._spec is not None and self._spec.network is not None

    # --------------------------------------------------------------------------------------------------- serving

    @property
    def is_connected(self) -> bool:
        return self._link is not None and self._link.failure is None

    @property
    def is_served(self) -> bool:
        """Whether this process serves it."""
        return self._proxy is not None

    def wants_serving(self) -> bool:
        """Whether it is connected and has a policy, and this process does not serve it."""
        self.reload_policy()
        return self.is_connected and self._has_policy and self._serving is None

    async def connected(self, link: GuestConnection, listen: Listen) -> None:
        """The sandbox is connected. When this returns it is served, by this process or another."""
        if self._serving is not None:  # over the previous connection, which is lost
            self._serving.cancel()
            await self._ended.wait()
        self._link, self._listen_inside = link, listen
        self._servers.watch(self)
        if self.wants_serving():
            await self._prepare(link)
            await self.try_serve()

    async def apply_policy(self) -> None:
        """Apply the current policy before a command is started, whose variables depend on it."""
        changed = self.reload_policy() or self._installed is not self._injector
        if changed and self._link is not None and self.is_connected:
            await self._prepare(self._link)
            await self.try_serve()

    async def _prepare(self, link: GuestConnection) -> None:
        """Put the CA bundles and the settings of the package indexes into the sandbox, unless they are there, and have
        its programs trust what headers are set with."""
        from atoll.runtime.guest.files import Files

        if self._injector is not None:
            try:
                with anyio.fail_after(_LISTEN_TIMEOUT_S):
                    await self._injector.install(Files(link.open, "root"))
                self._installed = self._injector
            except (AtollError, OSError):
                _log.warning("cannot install the CA certificate for headers in %s", self._directory.name, exc_info=True)
        if self._spec is None or self._spec.indexes is None:
            return
        from atoll.runtime.images.reference import HOST

        files, indexes = Files(link.open, "root"), self._spec.indexes
        wanted: dict[str, Path | str] = {inside: Path(here) for inside, here in indexes.certificates.items()}
        if self._spec.image == HOST:  # another image may be of another distribution
            wanted |= indexes.files
        for inside, content in wanted.items():
            try:
                with anyio.fail_after(_LISTEN_TIMEOUT_S):
                    if not await files.exists(inside):
                        data = content.encode() if isinstance(content, str) else await anyio.Path(content).read_bytes()
                        await files.write_bytes(inside, data)
            except (AtollError, OSError):
                _log.warning("cannot put %s into %s", inside, self._directory.name, exc_info=True)

    async def try_serve(self) -> None:
        """Serve the sandbox from now on, if no other process does. A failure is logged."""
        if self._serving is not None and self._serving.cancel_called:
            await self._ended.wait()  # by the previous policy
        if not self.wants_serving() or self._link is None or self._listen_inside is None:
            return
        scope, self._ended = anyio.CancelScope(), anyio.Event()
        self._serving = scope
        try:
            await self._servers.tasks.start(self._serve, scope, self._link, self._listen_inside)
        except Exception as error:  # noqa: BLE001 - a connection that ends meanwhile raises several types
            self._warn_once("its egress cannot be served", error)

    async def _serve(
        self,
        scope: anyio.CancelScope,
        link: GuestConnection,
        listen: Listen,
        *,
        task_status: anyio.abc.TaskStatus[None],
    ) -> None:
        from atoll.runtime.egress.proxy import Connector, EgressProxy

        started = False
        try:
            with scope, self._lock() as locked:
                if locked and self._spec is not None:
                    async with contextlib.AsyncExitStack() as stack:
                        with anyio.fail_after(_LISTEN_TIMEOUT_S):
                            listener = await self._listen(stack, link, listen)
                        audit_log = AuditLog(self._directory)
                        stack.callback(audit_log.close)
                        connector = self._servers.connector or Connector()
                        self._proxy = EgressProxy(self._spec.name, self.evaluator, audit_log, connector, self._injector)
                        self._last_warning = ""
                        started = True
                        task_status.started()
                        await self._accept(listener, self._proxy)
            if not started:
                task_status.started()
        except Exception as error:
            if not started:
                raise
            self._warn_once("serving its egress failed", error)  # must not end other sandboxes or the engine
        finally:
            self._serving = self._proxy = None
            self._ended.set()

    @contextlib.contextmanager
    def _lock(self) -> Iterator[bool]:
        """Whether this process holds the lock, as long as the context lasts: then it serves."""
        fd = os.open(self._directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield try_lock(fd)
        finally:
            os.close(fd)

    async def _listen(
        self, stack: contextlib.AsyncExitStack, link: GuestConnection, listen: Listen
    ) -> AsyncIterator[PortConnection]:
        until = anyio.current_time() + _HANDOVER_TIMEOUT_S
        while True:
            try:
                return await stack.enter_async_context(listen(link, EGRESS_PORT))
            except PortRefused:
                # The previous server has ended, and the guest may not know yet.
                if anyio.current_time() > until:
                    raise
                await anyio.sleep(0.02)

    async def _accept(self, listener: AsyncIterator[PortConnection], proxy: EgressProxy) -> None:
        """Serve each connection from inside, until the connection to the sandbox is lost."""
        from atoll.runtime.egress.proxy import LINGER_S

        slots = anyio.Semaphore(self._servers.share)

        async def one(connection: PortConnection) -> None:
            try:
                async with self._servers.connections:
                    orderly = await proxy.serve(connection)
                if orderly:
                    await connection.finish(LINGER_S)
            except Exception:  # noqa: BLE001 - a client can break its own connection, never this process
                _log.exception("serving an egress connection of %s failed; this is a bug", self._directory.name)
            finally:
                connection.abort()
                slots.release()

        async with anyio.create_task_group() as group:
            with contextlib.suppress(AtollError, StopAsyncIteration):
                while True:
                    await slots.acquire()
                    group.start_soon(one, await anext(listener))
            group.cancel_scope.cancel()


def _rules(spec: SandboxSpec | None) -> tuple[object, object]:
    """What the policy of a sandbox consists of."""
    return (spec.network, spec.indexes) if spec else (None, None)
