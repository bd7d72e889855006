"""`cp`: files between this machine and a sandbox.

Not here: how files cross the boundary (`Sandbox.files`), how bytes enter and leave this process (`terminal.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from atoll.contract.errors import InvalidRequest
from atoll.surfaces.cli import render, values
from atoll.surfaces.cli.command import CommandContext, CommandModule, Work
from atoll.surfaces.cli.grammar import Argument
from atoll.surfaces.cli.options import UserOption

if TYPE_CHECKING:
    from atoll.runtime.guest.files import Files

commands = CommandModule()


@commands.command()
def cp(
    context: CommandContext,
    source: Annotated[str, Argument(metavar="SRC", help="What to copy.")],
    target: Annotated[str, Argument(metavar="DST", help="Where to copy it.")],
    user: UserOption = None,
) -> Work:
    """Copy files between this machine and a sandbox.

    NAME:PATH is a path in a sandbox; a relative one begins in the user's home directory. Every other path is on this
    machine, and - is standard input or output. A directory is copied with its content; if DST is a directory, SRC is
    copied into it.

    \b
    atoll cp report.csv box:data/
    atoll cp box:/var/log ./logs
    """
    spec = values.copy_spec(source, target)
    if context.as_json and spec.is_stream and not spec.inward:
        raise InvalidRequest("--json and - both write to standard output; leave one of them out")
    return _cp(context, spec, user)


async def _cp(context: CommandContext, spec: values.CopySpec, user: str | None) -> int:
    async with context.open_engine() as engine:
        files = (await engine.get(spec.sandbox)).files
        if spec.inward and spec.is_stream:
            copied = await files.write_bytes(spec.inside, _stdin(), user=user)
        elif spec.inward:
            copied = await files.upload(Path(spec.here), spec.inside, user=user)
        elif spec.is_stream:
            copied = await _to_stdout(files, spec.inside, user)
        else:
            copied = await files.download(spec.inside, Path(spec.here), user=user)
    if context.as_json:
        ends = (spec.here, f"{spec.sandbox}:{spec.inside}")
        source, target = ends if spec.inward else ends[::-1]
        render.emit_json({"source": source, "target": target, "bytes": copied})
    return 0


async def _to_stdout(files: Files, path: str, user: str | None) -> int:
    from atoll.surfaces.cli import terminal

    writer = terminal.OutputWriter(terminal.STDOUT)
    copied = 0
    async for chunk in files.stream(path, user=user):
        await writer.write(chunk)
        copied += len(chunk)
    return copied


async def _stdin() -> AsyncIterator[bytes]:
    from atoll.surfaces.cli import terminal

    if terminal.stdin_offered():
        async for chunk in terminal.stdin_chunks():
            yield chunk
