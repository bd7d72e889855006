"""`mcp`: an MCP server that gives its clients sandboxes, on standard streams or over HTTP.

Owns what happens to this process's streams while the protocol uses them. Not here: the server (`surfaces/mcp/`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, cast

from atoll.contract.errors import InvalidRequest
from atoll.surfaces.cli import render, values
from atoll.surfaces.cli.command import AtollCommand, CommandContext, CommandModule, Work, needing_extra
from atoll.surfaces.cli.grammar import Option
from atoll.surfaces.cli.options import DEFAULT_TOOLS, SANDBOX, tools_option
from atoll.surfaces.cli.sandbox_options import SandboxOptions, engine_arguments, starting_in_mount

if TYPE_CHECKING:
    from atoll.runtime.interface import SandboxKeywords
    from atoll.runtime.project.project import Project
    from atoll.surfaces.mcp.session import ServerConfig

commands = CommandModule()


class _McpCommand(AtollCommand):
    """Its `--http` may be given without an address."""

    resources = (*SANDBOX, "cwd")
    has_json = False
    default_address = "127.0.0.1:8000"

    def prepared(self, words: list[str]) -> list[str]:
        prepared = list(words)
        for index, word in enumerate(words):
            if word == "--http" and (index + 1 == len(words) or words[index + 1].startswith("-")):
                prepared[index] = f"--http={self.default_address}"
        return prepared


class McpOptions(NamedTuple):
    """An MCP server as the command line describes it."""

    tools: Sequence[str]
    session: str | None = None
    """The session on standard streams. None: a temporary one."""
    http: tuple[str, int] | None = None
    """The address and port to listen on. None: standard streams."""
    idle_s: float | None = None
    project: Project | None = None
    """What the sandbox `default` of each session begins with a copy of."""
    save_dir: Path | None = None
    """Where clients may save files."""


@commands.command(cls=_McpCommand)
def mcp(
    context: CommandContext,
    tools: Annotated[str, tools_option()] = DEFAULT_TOOLS,
    http: Annotated[
        str | None,
        Option(
            "--http",
            metavar="[ADDRESS:PORT]",
            help="Serve clients over HTTP, at /mcp; without an address, on 127.0.0.1:8000."
            "  [default: serve one client on standard streams]",
        ),
    ] = None,
    session: Annotated[
        str | None,
        Option(
            "--session",
            metavar="NAME",
            help="Keep the sandboxes for the next time.  [default: destroy them when the client leaves]",
        ),
    ] = None,
    idle: Annotated[
        float | None,
        Option(
            "--idle",
            metavar="TIME",
            parser=values.duration,
            help="With --http: end a session that is unused for this time.  [default: 30m]",
        ),
    ] = None,
    upload: Annotated[
        Path | None,
        Option(
            "--upload",
            metavar="DIR",
            help="Begin the sandbox 'default' of each session with a copy of this directory, without what git ignores.",
        ),
    ] = None,
    save_dir: Annotated[
        Path | None,
        Option(
            "--save-dir",
            metavar="DIR",
            help="Let clients save files of sandboxes in this directory, with the tool save_file.  [default: they "
            "cannot]",
        ),
    ] = None,
) -> Work:
    """Serve sandboxes to MCP clients.

    An MCP client starts this command and speaks MCP with it. Each client has a session; no other client sees the
    sandboxes in it. With --http the server has many clients. It listens for other machines only if $ATOLL_MCP_TOKEN
    holds a token, which clients must send.

    \b
    atoll mcp --tools coding --allow registries
    atoll mcp --mount ~/src/app:/work:rw
    atoll mcp --upload ~/src/app --save-dir ~/Downloads
    atoll mcp --http 127.0.0.1:9000 --tools agent,sprites
    """
    if http is not None and session is not None:
        raise InvalidRequest("--session is for one client; with --http each client has a session of its own")
    if http is None and idle is not None:
        raise InvalidRequest("--idle needs --http; on standard streams a session ends with its client")
    sandbox = context.sandbox_options()
    if upload is None:
        sandbox = starting_in_mount(sandbox)
    if http is None and sandbox.reads_stdin:
        raise InvalidRequest(
            "standard input is for the MCP client, so a secret cannot be read from it; use a variable or file:PATH"
        )
    from atoll.settings import where_to_listen
    from atoll.tools.vocabularies import choose

    chosen = choose(filter(None, map(str.strip, tools.split(","))))
    try:
        address = None if http is None else where_to_listen(http)
    except ValueError as error:
        raise InvalidRequest(f"--http {http}: {error}") from None
    if save_dir is not None:
        from atoll.tools.saving import SaveDirectory

        if "workspace" not in chosen:
            raise InvalidRequest(
                "--save-dir is for the tool save_file, which only the vocabulary workspace has; add it to --tools"
            )
        SaveDirectory(save_dir)  # the error of a wrong one, now
    return _mcp(
        context,
        sandbox,
        McpOptions(
            tools=chosen,
            session=session,
            http=address,
            idle_s=idle,
            project=None if upload is None else _project(upload),
            save_dir=save_dir,
        ),
    )


def _project(directory: Path) -> Project:
    from atoll.runtime.project.project import Project
    from atoll.settings import Settings

    settings = Settings.from_environment()
    return Project(directory, limit_bytes=settings.project_mib << 20, limit_files=settings.project_files)


async def _mcp(context: CommandContext, sandbox: SandboxOptions, options: McpOptions) -> int:
    """Serve one client until its input ends, or many over HTTP until a signal.

    Raises:
        InvalidRequest: an option has a wrong value.
        CallerError: the extra is not installed.
    """
    import logging

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s: %(message)s")
    with needing_extra("MCP", "mcp"):
        from atoll.surfaces.mcp.session import ServerConfig

        config = ServerConfig(options.tools, engine_arguments(sandbox), options.project, options.save_dir)
        if options.http is not None:
            await _serve_http(context, config, options.http, options.idle_s)
        else:
            await _serve_streams(context, config, options.session)
    return 0


async def _serve_streams(context: CommandContext, config: ServerConfig, session: str | None) -> None:
    from atoll.surfaces.cli import terminal
    from atoll.surfaces.mcp.session import open_session
    from atoll.surfaces.mcp.stdio import serve

    if os.isatty(terminal.STDIN):
        render.note("this command waits for messages of the MCP client that starts it; Ctrl-D ends it")
    # Nothing else in this process, or in one that it starts, may read or write between the messages.
    received, sent = os.dup(terminal.STDIN), terminal.OutputWriter(os.dup(terminal.STDOUT))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, terminal.STDIN)
    os.close(nothing)
    os.dup2(terminal.STDERR, terminal.STDOUT)
    async with context.open_engine() as engine, open_session(engine, config, session) as server:
        await serve(server, terminal.stdin_chunks(received), sent.write)


async def _serve_http(
    context: CommandContext, config: ServerConfig, address: tuple[str, int], idle_s: float | None
) -> None:
    from atoll.settings import Settings
    from atoll.surfaces.mcp.http import DEFAULT_IDLE_S, listen

    def announce(url: str) -> None:
        render.say(url)
        sys.stdout.flush()

    settings = Settings.from_environment()
    async with context.open_engine(settings) as engine:
        await engine.check_options(cast("SandboxKeywords", config.options))  # told now, and not to the first client
        await listen(
            engine, config, *address, token=settings.mcp_token, idle_s=idle_s or DEFAULT_IDLE_S, on_ready=announce
        )
