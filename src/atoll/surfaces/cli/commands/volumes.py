"""`volumes ls`, `create`, `rm`, `export` and `import`: directories that outlive sandboxes.

Not here: where their files are (`runtime/state/volumes.py`), and how a sandbox mounts one (`--mount`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from atoll.contract.errors import AtollError
from atoll.surfaces.cli import FAILED, render, values
from atoll.surfaces.cli.command import CommandContext, CommandModule, Work
from atoll.surfaces.cli.grammar import Argument, Option

VolumeArgument = Annotated[str, Argument(metavar="NAME", help="The volume.", completes="volume")]
NewArgument = Annotated[str, Argument(metavar="NAME", help="Its name.")]
SizeOption = Annotated[
    int | None,
    Option("--size", metavar="SIZE", parser=values.size, help="Limit of what is written to it: 512m, 10g."),
]


def volumes(context: CommandContext) -> Work | None:
    return _ls(context) if context.invoked_subcommand is None else None


commands = CommandModule("volumes", "List, create, export, import and remove volumes.", volumes)


@commands.command()
async def ls(
    context: CommandContext,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print names only.")] = False,
) -> int:
    """List the volumes, what they occupy, and the sandboxes that mount them."""
    return await _ls(context, quiet=quiet)


async def _ls(context: CommandContext, *, quiet: bool = False) -> int:
    async with context.open_engine() as engine:
        found = await engine.volumes.list()
    if context.as_json:
        render.emit_json([volume.model_dump(mode="json") for volume in found])
    elif quiet:
        for volume in found:
            render.say(volume.name)
    elif not found:
        render.note("no volumes; `atoll volumes create NAME` creates one")
    else:
        rows = [
            (
                volume.name,
                f"error: {volume.reason}" if volume.reason else render.human_bytes(volume.used_bytes),
                render.human_bytes(volume.size_bytes) if volume.size_bytes is not None else "none",
                render.ago(volume.created_at),
                ", ".join(volume.sandboxes),
            )
            for volume in found
        ]
        render.table(("NAME", "SIZE", "LIMIT", "CREATED", "SANDBOXES"), rows, flex=4)
    return 0


@commands.command()
async def create(context: CommandContext, name: NewArgument, size: SizeOption = None) -> int:
    """Create an empty volume. A sandbox mounts it with --mount volume:NAME:/data."""
    async with context.open_engine() as engine:
        volume = await engine.volumes.create(name, size)
    return context.answer(volume.model_dump(mode="json"), volume.name)


@commands.command()
async def rm(
    context: CommandContext,
    names: Annotated[list[str], Argument(metavar="NAME", help="The volumes.", completes="volume")],
) -> int:
    """Remove volumes and their files. One that a sandbox mounts is not removed, and the exit status is 1."""
    removed: list[str] = []
    failures: list[AtollError] = []
    async with context.open_engine() as engine:
        for name in dict.fromkeys(names):
            try:
                await engine.volumes.remove(name)
            except AtollError as error:
                failures.append(error)
            else:
                removed.append(name)
                if not context.as_json:
                    render.say(name)
    render.removal(removed, failures, as_json=context.as_json)
    return FAILED if failures else 0


@commands.command()
async def export(
    context: CommandContext,
    name: VolumeArgument,
    file: Annotated[Path | None, Argument(metavar="FILE", help="The tar to write.  [default: NAME.tar]")] = None,
) -> int:
    """Write the files of a volume to a tar."""
    target = file or Path(f"{name}.tar")
    async with context.open_engine() as engine:
        size = await engine.volumes.export(name, target)
    return context.answer({"volume": name, "file": str(target), "size_bytes": size}, str(target))


@commands.command("import")
async def import_(
    context: CommandContext,
    file: Annotated[Path, Argument(metavar="FILE", help="A tar, such as `atoll volumes export` writes.")],
    name: NewArgument,
    size: SizeOption = None,
) -> int:
    """Create a volume with the files of a tar."""
    async with context.open_engine() as engine:
        volume = await engine.volumes.import_(name, file, size)
    return context.answer(volume.model_dump(mode="json"), volume.name)
