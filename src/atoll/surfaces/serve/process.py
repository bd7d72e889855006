"""The life of a server's process: one per state directory, its start, its signals and its end.

Owns the lock that makes it one, the order of starting (settings, lock, data, listening) and of ending (streams,
requests, data), and that sandboxes with a network policy are served from the start. It may be killed at any time: what
it acknowledged is on disk. Not here: the app (`app.py`), certificates (`tls.py`). Used by `atoll serve`.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import anyio

from atoll.contract.errors import AtollError, InvalidRequest
from atoll.drivers import locks
from atoll.runtime.state.store import StateStore
from atoll.server.previews import PreviewAddress
from atoll.server.server import Server
from atoll.surfaces.door import listen
from atoll.surfaces.door.connection import Door, DoorLimits
from atoll.surfaces.door.listening import open_sockets
from atoll.surfaces.serve.app import ServerApp
from atoll.surfaces.serve.previews import PreviewHandler
from atoll.surfaces.serve.settings import ServerSettings
from atoll.surfaces.serve.tls import ServerTls

if TYPE_CHECKING:
    from pydantic import SecretStr

_OTHER_DESCRIPTORS = 4096
"""For sandboxes, files and the database."""
_log = logging.getLogger(__name__)


class ReadyServer(NamedTuple):
    """A server that answers."""

    url: str
    first_key: SecretStr | None
    """Of its administrator, if it was made now: to be shown once."""
    authority: Path | None
    """Of its own certificates."""


async def serve(
    settings: ServerSettings,
    *,
    on_ready: Callable[[ReadyServer], None] = lambda _ready: None,
    on_reload: Callable[[Callable[[], None]], None] = lambda _reload: None,
) -> None:
    """Serve until this is cancelled. `on_ready` is told where. `on_reload` gets what SIGHUP is to call.

    Raises:
        InvalidRequest: another server has the state directory, the address cannot be listened on, or a setting is
        wrong. DatabaseUnavailable: the database does not answer.
    """
    _raise_descriptor_limit(settings.connections)
    address, port = settings.listen_address()
    state_dir = settings.resolve_state_dir()
    async with _only_server(state_dir), Server.open(settings) as server:
        try:
            sockets = open_sockets(address, port)
        except OSError as error:
            raise InvalidRequest(
                f"cannot listen on {settings.listen}: {error.strerror}; give another address with --listen ADDRESS:PORT"
            ) from error
        has_tls = settings.tls_cert is not None or settings.tls_self_signed is not None
        tls = ServerTls(settings, state_dir) if has_tls else None
        limits = DoorLimits(
            head_timeout_s=settings.head_timeout_s,
            body_timeout_s=settings.body_timeout_s,
            connections=settings.connections,
            connections_per_client=settings.connections_per_client,
            trusted_proxies=frozenset(settings.trusted_proxies),
        )
        previews = PreviewHandler(server.previews)
        door = Door(limits, previews)
        app = ServerApp(server, settings, door)
        previews.ports = app.e2b.ports

        def ready(url: str) -> None:
            server.previews.address = PreviewAddress(settings.public_url or _for_clients(url), settings.domain)
            app.e2b.listens_at(server.previews.address)
            on_ready(ReadyServer(settings.public_url or url, server.first_key, tls.authority if tls else None))
            _log.info("serving at %s", url)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.run)
            if tls is not None:
                on_reload(tls.reload)
                tasks.start_soon(tls.watch)
            tasks.start_soon(_serve_egress, server)
            try:
                await listen(
                    app.asgi,
                    address,
                    port,
                    sockets=sockets,
                    door=door,
                    tls=tls.context if tls is not None else None,
                    websockets=True,
                    on_ready=ready,
                    on_stop=app.begin_stop,
                    grace_s=settings.shutdown_s,
                )
            finally:
                tasks.cancel_scope.cancel()


@asynccontextmanager
async def _only_server(state_dir: Path) -> AsyncIterator[None]:
    """
    Raises:
        InvalidRequest: another server has this state directory.
    """
    path = state_dir / "server" / "serving"
    try:
        StateStore(state_dir)  # makes it, for this user alone
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidRequest(
            f"the state directory {state_dir} cannot be used: {error.strerror}; name another with --state-dir"
        ) from error
    try:
        # A predecessor that is being stopped has until then: a restart is not a failure.
        if not await locks.lock_within(fd, 1.0):
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            raise InvalidRequest(
                f"another server (process {holder or 'unknown'}) serves the state directory {state_dir}; stop it, or "
                "give this one a state directory of its own with --state-dir"
            )
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def _for_clients(url: str) -> str:
    """The URL of a server that listens at all addresses, for clients on this machine."""
    return (
        url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:").replace("//localhost:", "//127.0.0.1:")
    )


async def _serve_egress(server: Server) -> None:
    """Connect to running sandboxes that have a network policy: one of the connected processes serves their egress."""
    try:
        found = await server.list_sandboxes()
    except AtollError as error:
        _log.warning("the egress of sandboxes is not served until they are used: %s", error.message)
        return
    for tenant, infos in found.items():
        for info in infos:
            if info.status != "running" or info.network is None:
                continue
            try:
                sandbox = await (await server.engines.get(tenant)).get(info.name)
                await sandbox.connect()
            except AtollError as error:
                _log.warning("the egress of the sandbox %s is not served: %s", info.name, error.message)


def _raise_descriptor_limit(connections: int) -> None:
    """Connections and sandboxes take descriptors, and the soft limit is often 1024. Not to the hard limit: sandboxes
    that name no limit of their own inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_DESCRIPTORS
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard) if hard >= 0 else wanted, hard))
