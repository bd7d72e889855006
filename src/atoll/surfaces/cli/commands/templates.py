"""`templates ls`, `show`, `tag`, `rm` and `gc`: what builds have made.

Not here: a build (`build.py`), and where templates are kept (`runtime/state/templates.py`).
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, cast

from atoll.contract.errors import AtollError
from atoll.contract.names import split_template
from atoll.surfaces.cli import FAILED, render
from atoll.surfaces.cli.command import CommandContext, CommandModule, Work
from atoll.surfaces.cli.grammar import Argument, Option

if TYPE_CHECKING:
    from atoll.client.engine import RemoteEngine
    from atoll.runtime.engine import LocalEngine

TemplateArgument = Annotated[str, Argument(metavar="NAME", help="The template.")]


def templates(context: CommandContext) -> Work | None:
    return _ls(context) if context.invoked_subcommand is None else None


commands = CommandModule("templates", "List, show and remove templates, which `atoll build` makes.", templates)


@commands.command()
async def ls(
    context: CommandContext,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print references only.")] = False,
) -> int:
    """List the templates."""
    return await _ls(context, quiet=quiet)


async def _ls(context: CommandContext, *, quiet: bool = False) -> int:
    async with context.open_engine() as engine:
        found = await engine.templates.list()
    if context.as_json:
        render.emit_json([each.model_dump(mode="json") for each in found])
    elif quiet:
        for each in found:
            for tag in each.versions or ["default"]:
                render.say(_reference(each.name, tag))
    elif not found:
        render.note("no templates; `atoll build DIR --name NAME` builds one")
    else:
        rows = [
            (_reference(each.name, tag), version.image, version.runtime, render.ago(version.created_at))
            for each in found
            for tag, version in each.versions.items()
        ]
        rows += [(each.name, f"error: {each.reason}", "", "") for each in found if each.reason]
        render.table(("TEMPLATE", "IMAGE", "RUNTIME", "BUILT"), rows, flex=1)
    return 0


@commands.command()
async def show(context: CommandContext, name: TemplateArgument) -> int:
    """Show what sandboxes of a template have."""
    async with context.open_engine() as engine:
        template = await engine.templates.get(name)
    if context.as_json:
        render.emit_json(template.model_dump(mode="json"))
        return 0
    for tag, version in template.versions.items():
        said = {
            "template": _reference(name, tag),
            "image": version.image,
            "runtime": version.runtime,
            "checkpoint": version.checkpoint,
            "built": render.ago(version.created_at),
            "user": version.user or "the image's",
            "directory": version.cwd or "the image's",
            "environment": ", ".join(version.env) or "the image's",
            "start": shlex.join(version.start_command) or "nothing",
            "ready": shlex.join(version.ready_command) or "at once",
        }
        render.facts([(key, render.printable(value)) for key, value in said.items()])
    return 0


@commands.command()
async def tag(
    context: CommandContext,
    name: Annotated[str, Argument(metavar="NAME[:TAG]", help="The template.")],
    tags: Annotated[list[str], Argument(metavar="TAG", help="The new tags.")],
) -> int:
    """Give a version of a template more tags, in place of what had them."""
    async with context.open_engine() as engine:
        await engine.templates.tag(name, tags)
        template = await engine.templates.get(split_template(name)[0])
    shown = "\n".join(_reference(template.name, each) for each in tags)
    return context.answer(template.model_dump(mode="json"), shown)


@commands.command()
async def rm(
    context: CommandContext,
    names: Annotated[list[str], Argument(metavar="NAME[:TAG]", help="The templates.")],
) -> int:
    """Remove templates, or one tag of them. Sandboxes that began as them stay."""
    removed: list[str] = []
    failures: list[AtollError] = []
    async with context.open_engine() as engine:
        for name in dict.fromkeys(names):
            try:
                await engine.templates.remove(name)
            except AtollError as error:
                failures.append(error)
            else:
                removed.append(name)
                if not context.as_json:
                    render.say(name)
    render.removal(removed, failures, as_json=context.as_json)
    return FAILED if failures else 0


@commands.command()
async def gc(context: CommandContext) -> int:
    """Remove the kept results of steps that no template needs. The next build runs these steps again."""
    async with context.open_engine() as engine:
        if context.server is not None:
            removed = await cast("RemoteEngine", engine).templates.remove_unneeded()
        else:
            from atoll.builds.layers import LayerCache

            removed = await LayerCache(cast("LocalEngine", engine)).trim(0)
    plural = "result" if len(removed) == 1 else "results"
    return context.answer({"removed": removed}, f"{len(removed)} {plural} of steps removed")


def _reference(name: str, tag: str) -> str:
    return name if tag == "default" else f"{name}:{tag}"
