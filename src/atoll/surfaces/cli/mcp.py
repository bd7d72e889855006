"""`mcp`: sandboxes for a client that speaks MCP, on this process's standard streams or at an address.

It knows where the streams go while they are the protocol's. It refuses to know what is served, and how.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.contract.errors import CallerError
from atoll.runtime.engine import open as open_engine
from atoll.settings import Settings
from atoll.surfaces.cli import render, terminal
from atoll.surfaces.cli.sandboxes import SandboxOptions, options

if TYPE_CHECKING:
    from atoll.surfaces.mcp.session import ServerConfig


@dataclass(frozen=True)
class McpOptions:
    """A server as it was asked for."""

    tools: Sequence[str]
    session: str | None = None
    """Of standard streams. Unset: a session that ends with them."""
    http: tuple[str, int] | None = None
    """An address and a port. Unset: standard streams."""
    idle_s: float | None = None


async def mcp(state_dir: Path | None, making: SandboxOptions, serving: McpOptions) -> int:
    """Serve one client until its input ends, or many over HTTP until we are told to end.

    Raises:
        InvalidRequest: what is asked for is not possible.
        CallerError: the extra is not installed.
    """
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s: %(message)s")
    with _needing_the_extra():
        from atoll.surfaces.mcp.session import ServerConfig

        config = ServerConfig(serving.tools, options(making))
        if serving.http is not None:
            await _over_http(state_dir, config, serving.http, serving.idle_s)
        else:
            await _on_streams(state_dir, config, serving.session)
    return 0


@contextmanager
def _needing_the_extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "atoll").partition(".")[0]
        if missing == "atoll":
            raise
        raise CallerError(
            f"MCP needs {missing}, which is not installed here; it comes with the extra: pip install 'atoll[mcp]'"
        ) from error


async def _on_streams(state_dir: Path | None, config: ServerConfig, session: str | None) -> None:
    from atoll.surfaces.mcp.session import open_session
    from atoll.surfaces.mcp.stdio import serve

    if os.isatty(terminal.STDIN):
        render.note("this speaks MCP with the program that starts it, and waits for its messages; Ctrl-D ends it")
    # Whatever else would read or write here, in this program or in one that it starts, must not do so in the midst of
    # messages.
    received, sent = os.dup(terminal.STDIN), terminal.Outlet(os.dup(terminal.STDOUT))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, terminal.STDIN)
    os.close(nothing)
    os.dup2(terminal.STDERR, terminal.STDOUT)
    async with open_engine(state_dir) as engine, open_session(engine, config, session) as server:
        await serve(server, terminal.stdin_chunks(received), sent.write)


async def _over_http(
    state_dir: Path | None, config: ServerConfig, where: tuple[str, int], idle_s: float | None
) -> None:
    from atoll.surfaces.mcp.http import DEFAULT_IDLE_S, listen

    def tell(url: str) -> None:
        render.say(url)
        sys.stdout.flush()

    settings = Settings.from_environment()
    async with open_engine(state_dir, settings=settings) as engine:
        await listen(engine, config, *where, token=settings.mcp_token, idle_s=idle_s or DEFAULT_IDLE_S, on_ready=tell)
