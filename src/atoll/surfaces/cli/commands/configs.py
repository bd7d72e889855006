"""`configs ls`, `show`, `create`, `update` and `rm`: agent configs, of a server or of the data of this machine.

Not here: what a config may say (`server/configs.py`), and talking to an agent (`chat.py`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from atoll.contract.errors import InvalidRequest
from atoll.surfaces.cli import render
from atoll.surfaces.cli.command import CommandContext, CommandModule, Work, needing_extra
from atoll.surfaces.cli.grammar import Argument, Option

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from atoll.client.http import HttpClient

ConfigArgument = Annotated[str, Argument(metavar="ID", help="The config, which `atoll configs ls` lists.")]
ConfigFileArgument = Annotated[str, Argument(metavar="FILE", help="Its fields as JSON; - reads standard input.")]
_MAX_FILE_BYTES = 4 * 1024 * 1024


def configs(context: CommandContext) -> Work | None:
    return _ls(context) if context.invoked_subcommand is None else None


commands = CommandModule("configs", "List, show, create, change and remove configs of agents.", configs)


def open_api(context: CommandContext) -> AbstractAsyncContextManager[HttpClient]:
    """
    Raises:
        CallerError: what this needs is not installed.
    """
    with needing_extra(f"`{context.command_path}`", "server" if context.server is None else "client"):
        if context.server is None:
            from atoll.surfaces.cli.local_api import api

            return api(context)
        from atoll.client.engine import http_client
    return _closing(http_client(tenant=context.namespace))


def _closing(client: HttpClient) -> AbstractAsyncContextManager[HttpClient]:
    from contextlib import aclosing

    return aclosing(client)


@commands.command()
async def ls(context: CommandContext) -> int:
    """List the configs of agents, the oldest first."""
    return await _ls(context)


async def _ls(context: CommandContext) -> int:
    async with open_api(context) as api:
        found = await api.items("/api/v1/configs")
    if context.as_json:
        render.emit_json(found)
    elif not found:
        render.note("no configs; `atoll configs create FILE` creates one")
    else:
        rows = [
            (
                each["id"],
                each["name"],
                each["agent_type"],
                _model(each),
                str(each["version"]),
                f"{each['tokens_spent']:,}",
                ", ".join(tool if isinstance(tool, str) else tool["name"] for tool in each["tools_config"]),
            )
            for each in found
        ]
        render.table(("ID", "NAME", "TYPE", "MODEL", "VERSION", "TOKENS", "TOOLS"), rows, flex=6)
    return 0


def _model(config: dict[str, Any]) -> str:
    chosen = config["model_config"]
    return "(server's)" if chosen is None else f"{chosen['provider']}:{chosen['model']}"


@commands.command()
async def show(context: CommandContext, id: ConfigArgument) -> int:
    """Show a config as JSON, without the values of its secrets."""
    async with open_api(context) as api:
        found = await api.get(_path(id))
    render.say(json.dumps(found, indent=None if context.as_json else 2, ensure_ascii=False))
    return 0


@commands.command()
async def create(context: CommandContext, file: ConfigFileArgument) -> int:
    """Create a config of an agent.

    \b
    atoll configs create agent.json
    echo '{"name": "Helper", "tools_config": ["search"]}' | atoll configs create -
    """
    body = _read(file)
    async with open_api(context) as api:
        made = await api.post("/api/v1/configs", body)
    return context.answer(made, made["id"])


@commands.command()
async def update(
    context: CommandContext,
    id: ConfigArgument,
    file: ConfigFileArgument,
    version: Annotated[
        int | None, Option("--version", metavar="N", help="Refuse the change if the config has another version by now.")
    ] = None,
) -> int:
    """Change a config, which makes a new version of it. What the file leaves out stays as it is."""
    body = _read(file)
    if version is not None:
        body["version"] = version
    async with open_api(context) as api:
        changed = (await api.send("PATCH", _path(id), body)).json()
    return context.answer(changed, f"{changed['id']} has version {changed['version']}")


@commands.command()
async def rm(
    context: CommandContext,
    ids: Annotated[list[str], Argument(metavar="ID…", help="The configs.")],
) -> int:
    """Remove configs with their workspaces and conversations."""
    async with open_api(context) as api:
        for id in ids:
            await api.send("DELETE", _path(id))
    return context.answer({"removed": ids}, "\n".join(ids))


def _path(id: str) -> str:
    from atoll.client.http import path_of

    return path_of("configs", id)


def _read(file: str) -> dict[str, Any]:
    try:
        with sys.stdin.buffer if file == "-" else Path(file).open("rb") as source:
            data = source.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise InvalidRequest(f"{file} has more than {_MAX_FILE_BYTES >> 20} MiB")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{file} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{file} is not a JSON object with the fields of a config")
    return found
