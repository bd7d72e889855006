"""Who serves what leaves a sandbox, and by which policy.

Knows the port inside on which the proxy listens, that one process at a time serves a sandbox, where the policy that
holds now is read, and what commands inside are told of it. Refuses to know what passes (`policy.py`) and how
(`egress.py`).

There is no daemon. Of the processes that are connected to a sandbox with a policy, the one that holds `egress.lock` in
the sandbox's directory listens inside. When it goes, whatever ended it, the kernel lets go of the lock and the keeper
closes the port; another that is connected looks once a second and takes over. While nobody is connected, connections
inside are refused.

The policy is the manifest's, and it is looked at for each decision: whichever process changes it, and whoever serves,
the next connection is decided by what is written there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.abc

from atoll.contract.errors import AtollError, PortRefused, SandboxError
from atoll.contract.model import SandboxSpec
from atoll.drivers.locks import try_lock
from atoll.runtime.egress.audit import AuditLog
from atoll.runtime.egress.policy import Gate
from atoll.runtime.guest.connection import GuestConnection
from atoll.runtime.guest.files import Files
from atoll.runtime.guest.ports import PortConnection

if TYPE_CHECKING:
    # Imported where something is served: most of what opens a runtime need not wait for a parser of HTTP.
    from atoll.runtime.egress.proxy import Intercept, Outside, Proxy

PORT = 1023
"""Where the proxy is, inside, and always the same: processes that were told go on after a wake, a restore or a fork.
IANA reserves it, and of those inside only root could take it."""
LOCK = "egress.lock"
MAX_CONNECTIONS = 128
"""Of one sandbox at a time. Further ones wait inside."""
_LOOK_S = 1.0
_LISTEN_S = 5.0
_TAKEN_OVER_S = 1.0
"""How long the port may still be held by who served before."""
_URL = f"http://127.0.0.1:{PORT}"
_NAMES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy")
# SOCKS is spoken on the same port, but it is not named here: some HTTP clients refuse to start when all_proxy is
# something that they lack a package for, though they would never use it.
PROXY_ENV: Mapping[str, str] = {
    **{name: _URL for each in _NAMES for name in (each, each.upper())},
    **dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1,::1"),
}
_log = logging.getLogger(__name__)


class Listening(Protocol):
    """Listens inside over one connection to the guest: `ports.listen_idle`."""

    def __call__(
        self, connection: GuestConnection, port: int
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[PortConnection]]: ...


class EgressServers:
    """What all sandboxes of a runtime share on the way out."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self.tasks = tasks
        self.outside: Outside | None = None
        """How names are resolved and connections made, if not in this machine's way."""
        most = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self.connections = anyio.Semaphore(most)
        """Each takes a descriptor of this process: the rest are for previews, files and whoever embeds it."""
        self.share = min(MAX_CONNECTIONS, most // 4)
        self._followed: set[EgressServer] = set()
        self._watching = False

    @cached_property
    def trust(self) -> ssl.SSLContext:
        """By whom servers are known to be who they say, when a connection ends here: those that this machine trusts."""
        context = ssl.create_default_context()
        context.set_alpn_protocols(["http/1.1"])
        return context

    def follow(self, egress: EgressServer) -> None:
        """Look after a sandbox that is connected, until it is not."""
        self._followed.add(egress)
        if not self._watching:
            self._watching = True
            self.tasks.start_soon(self._watch)

    async def _watch(self) -> None:
        while self._followed:
            await anyio.sleep(_LOOK_S)
            for egress in list(self._followed):
                try:
                    if not egress.is_connected:
                        self._followed.discard(egress)
                    elif egress.wants_serving():
                        self.tasks.start_soon(egress.attend)
                except Exception:  # noqa: BLE001 - what is wrong with one sandbox ends neither the watch nor the runtime
                    _log.exception("a sandbox could not be looked after; it is tried again")
        self._watching = False


class EgressServer:
    """The way out of one sandbox, as this process sees it."""

    def __init__(self, egress_servers: EgressServers, directory: Path, spec: Callable[[], SandboxSpec | None]) -> None:
        self.intercept: Intercept | None = None
        self._servers = egress_servers
        self._directory = directory
        self._manifest = str(directory / "manifest.json")
        self._read_spec = spec
        self._seen: tuple[int, int] | None = None
        self._spec: SandboxSpec | None = None
        self._gate = Gate()
        self._link: GuestConnection | None = None
        self._listening: Listening | None = None
        self._serving: anyio.CancelScope | None = None
        self._over = anyio.Event()
        self._complaint = ""
        self._proxy: Proxy | None = None

    # ------------------------------------------------------------------------------------------------ the policy

    def gate(self) -> Gate:
        """The policy that holds now."""
        self.look()
        return self._gate

    def env(self) -> Mapping[str, str]:
        """What commands are told, so that they find the way out. Nothing, if there is none."""
        if self._spec is None or self._spec.network is None:
            return {}
        return {**PROXY_ENV, **(self._spec.indexes.env if self._spec.indexes else {})}

    def look(self) -> bool:
        """See what the manifest says. Returns whether it says something else than before.

        While it cannot be read, nothing leaves, and each look tries again.
        """
        try:
            seen = self._version()
            if seen == self._seen:
                return False
            spec, self._seen = self._read_spec(), seen
        except (SandboxError, OSError) as error:
            self._complain("its policy cannot be read", error)
            spec, self._seen = None, None
        before, self._spec = self._spec, spec
        if _rules(before) == _rules(spec):
            return False
        self._gate = Gate(spec.network, spec.indexes) if spec else Gate()
        if self._proxy is not None:
            self._proxy.recheck()
        if self._serving is not None and not self._has_policy:
            self._serving.cancel()
        return True

    def _version(self) -> tuple[int, int]:
        """What is another one whenever the manifest is written."""
        try:
            stat = os.stat(self._manifest)
        except FileNotFoundError:
            return 0, 0
        return stat.st_ino, stat.st_mtime_ns

    def _complain(self, what: str, error: Exception) -> None:
        """Say why nothing leaves for now, once for each reason."""
        text = f"{what}: {error}"
        if text != self._complaint:
            self._complaint = text
            _log.warning("nothing leaves %s for now; it is tried again: %s", self._directory.name, text)

    @property
    def _has_policy(self) -> bool:
        return self._spec is not None and self._spec.network is not None

    # --------------------------------------------------------------------------------------------------- serving

    @property
    def is_connected(self) -> bool:
        return self._link is not None and self._link.failure is None

    @property
    def is_served(self) -> bool:
        """Whether it is served from here."""
        return self._proxy is not None

    def wants_serving(self) -> bool:
        """Whether it is connected, has a policy, and is not served from here."""
        self.look()
        return self.is_connected and self._has_policy and self._serving is None

    async def connected(self, link: GuestConnection, listening: Listening) -> None:
        """There is a connection to the sandbox. When this returns it is served, by this process or another."""
        if self._serving is not None:  # over the connection before, which is lost
            self._serving.cancel()
            await self._over.wait()
        self._link, self._listening = link, listening
        self._servers.follow(self)
        if self.wants_serving():
            await self._prepare(link)
            await self.attend()

    async def follow(self) -> None:
        """Do what the policy says that holds now, before a command is started that is told of it."""
        if self.look() and self._link is not None and self.is_connected:
            await self._prepare(self._link)
            await self.attend()

    async def _prepare(self, link: GuestConnection) -> None:
        """Put inside by whom the package indexes are trusted, unless it is there."""
        files = Files(link.open, "root")
        certificates = self._spec.indexes.certificates if self._spec and self._spec.indexes else {}
        for inside, here in certificates.items():
            try:
                with anyio.fail_after(_LISTEN_S):
                    if not await files.exists(inside):
                        await files.write_bytes(inside, await anyio.Path(here).read_bytes())
            except (AtollError, OSError):
                _log.warning("%s could not be put into %s", here, self._directory.name, exc_info=True)

    async def attend(self) -> None:
        """Serve the sandbox from now on, unless another process does or it cannot be."""
        if self._serving is not None and self._serving.cancel_called:
            await self._over.wait()  # by the policy before, which is over
        if not self.wants_serving() or self._link is None or self._listening is None:
            return
        scope, self._over = anyio.CancelScope(), anyio.Event()
        self._serving = scope
        try:
            await self._servers.tasks.start(self._serve, scope, self._link, self._listening)
        except Exception as error:  # noqa: BLE001 - a connection that ends meanwhile raises this and that
            self._complain("it cannot be served", error)

    async def _serve(
        self,
        scope: anyio.CancelScope,
        link: GuestConnection,
        listening: Listening,
        *,
        task_status: anyio.abc.TaskStatus[None],
    ) -> None:
        from atoll.runtime.egress.proxy import Outside, Proxy

        started = False
        try:
            with scope, self._alone() as alone:
                if alone and self._spec is not None:
                    async with contextlib.AsyncExitStack() as stack:
                        with anyio.fail_after(_LISTEN_S):
                            listener = await self._listen(stack, link, listening)
                        trail = AuditLog(self._directory)
                        stack.callback(trail.close)
                        outside = self._servers.outside or Outside()
                        self._proxy = Proxy(self._spec.name, self.gate, trail, outside, self.intercept)
                        self._complaint = ""
                        started = True
                        task_status.started()
                        await self._accept(listener, self._proxy)
            if not started:
                task_status.started()
        except Exception as error:
            if not started:
                raise
            self._complain("it is not served any more", error)  # it ends neither others nor the runtime
        finally:
            self._serving = self._proxy = None
            self._over.set()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Whether this process is the one that serves, for as long as the context lasts."""
        fd = os.open(self._directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield try_lock(fd)
        finally:
            os.close(fd)

    async def _listen(
        self, stack: contextlib.AsyncExitStack, link: GuestConnection, listening: Listening
    ) -> AsyncIterator[PortConnection]:
        until = anyio.current_time() + _TAKEN_OVER_S
        while True:
            try:
                return await stack.enter_async_context(listening(link, PORT))
            except PortRefused:
                # Who served before is gone, and the guest may be about to hear of it.
                if anyio.current_time() > until:
                    raise
                await anyio.sleep(0.02)

    async def _accept(self, listener: AsyncIterator[PortConnection], proxy: Proxy) -> None:
        """Serve each connection from inside, until there is no connection to the sandbox any more."""
        from atoll.runtime.egress.proxy import LINGER_S

        slots = anyio.Semaphore(self._servers.share)

        async def one(connection: PortConnection) -> None:
            try:
                async with self._servers.connections:
                    orderly = await proxy.serve(connection)
                if orderly:
                    await connection.finish(LINGER_S)
            except Exception:  # noqa: BLE001 - whatever a client brings about ends its connection, never this process
                _log.exception("a connection out of %s failed", self._directory.name)
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
    """What of a sandbox decides what may leave it."""
    return (spec.network, spec.indexes) if spec else (None, None)
