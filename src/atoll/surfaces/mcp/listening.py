"""The app of `http`, at an address of this machine.

Knows which addresses need a token, and how a server is begun and ended. Refuses to know what it serves.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
import uvicorn
from pydantic import SecretStr

from atoll.contract.errors import InvalidRequest
from atoll.runtime.engine import Engine
from atoll.surfaces.mcp.http import DEFAULT_IDLE_S, LOOPBACK, MAX_SESSIONS, PATH, app
from atoll.surfaces.mcp.session import ServerConfig
from atoll.surfaces.mcp.stdio import MAX_LAST_ANSWERS_S

MAX_CONNECTIONS = 256
"""Those above are answered with 503."""


async def listen(
    engine: Engine,
    config: ServerConfig,
    address: str,
    port: int,
    *,
    token: SecretStr | None = None,
    sessions: int = MAX_SESSIONS,
    idle_s: float = DEFAULT_IDLE_S,
    on_ready: Callable[[str], None] = lambda _url: None,
) -> None:
    """Serve at an address until this is cancelled. `on_ready` is told the URL; all else is as in `app`.

    Raises:
        InvalidRequest: other machines can reach it, and there is no token.
        OSError: nobody can listen there.
    """
    address = "127.0.0.1" if address == "localhost" else address
    if token is None and not ipaddress.ip_address(address).is_loopback:
        raise InvalidRequest(
            f"{address} can be reached from other machines, and who reaches it can run commands; set ATOLL_MCP_TOKEN "
            "to a secret that clients have to send, or listen at 127.0.0.1"
        )
    # Who has the token may come by any name, such as that of a server in front. Pages that point one here have none.
    hosts = (*LOOPBACK, address) if token is None else None
    served = app(engine, config, token=token, hosts=hosts, sessions=sessions, idle_s=idle_s)
    with socket.create_server(
        (address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=512
    ) as listening:
        host = f"[{address}]" if ":" in address else address
        on_ready(f"http://{host}:{listening.getsockname()[1]}{PATH}")
        uvicorn_config = uvicorn.Config(
            served,
            lifespan="on",
            log_config=None,
            ws="none",
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=MAX_LAST_ANSWERS_S,
        )
        server = _UvicornServer(uvicorn_config)
        told_to_end = False

        async def serve() -> None:
            # A cancellation is not for the server, which has sessions to end.
            with anyio.CancelScope(shield=True):
                await server.serve([listening])
            if not told_to_end:
                raise RuntimeError("the server has ended, and nobody told it to")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            try:
                await anyio.sleep_forever()
            finally:
                told_to_end = True
                served.state.sessions.end_all()  # streams that are open end with them
                server.should_exit = True


class _UvicornServer(uvicorn.Server):
    """Signals are the command line's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
