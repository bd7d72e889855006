"""`images ls`, `pull`, `rm` and `import`: the images that sandboxes are created from.

Not here: registries, layers and formats (`runtime/images/`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from atoll.surfaces.cli import render
from atoll.surfaces.cli.command import CommandContext, CommandModule
from atoll.surfaces.cli.grammar import Argument, Option
from atoll.surfaces.cli.options import ReferenceArgument

commands = CommandModule("images", "Pull, import, list and remove images.")


@commands.command()
async def ls(
    context: CommandContext,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print references only.")] = False,
) -> int:
    """List the images on this machine."""
    async with context.open_engine() as engine:
        found = await engine.images.list()
    if context.as_json:
        render.emit_json([image.model_dump(mode="json") for image in found])
    elif quiet:
        for image in found:
            render.say(image.reference)
    elif not found:
        render.note("no images; `atoll images pull REF` pulls one")
    else:
        rows = [
            (
                image.reference,
                image.digest.removeprefix("sha256:")[:12],
                render.human_bytes(image.size_bytes),
                render.ago(image.pulled_at),
            )
            for image in found
        ]
        render.table(("REFERENCE", "DIGEST", "SIZE", "PULLED"), rows, flex=0)
    return 0


@commands.command()
async def pull(context: CommandContext, reference: ReferenceArgument) -> int:
    """Pull an image from a registry, before a sandbox needs it."""
    async with context.open_engine() as engine:
        with render.ProgressBars() as bars:
            image = await engine.images.pull(reference, progress=bars)
    return context.answer(image.model_dump(mode="json"), image.reference)


@commands.command()
async def rm(
    context: CommandContext,
    references: Annotated[list[str], Argument(metavar="REF", help="The images.", completes="image")],
) -> int:
    """Remove images that no sandbox uses."""
    async with context.open_engine() as engine:
        for reference in references:
            await engine.images.remove(reference)
            if not context.as_json:
                render.say(reference)
    if context.as_json:
        render.emit_json({"removed": references})
    return 0


@commands.command("import")
async def import_(
    context: CommandContext,
    source: Annotated[Path, Argument(metavar="FILE", help="A tar of a root file system, or a saved image.")],
    reference: ReferenceArgument,
) -> int:
    """Make an image from a file."""
    async with context.open_engine() as engine:
        with render.ProgressBars() as bars:
            image = await engine.images.import_(source, reference, progress=bars)
    return context.answer(image.model_dump(mode="json"), image.reference)
