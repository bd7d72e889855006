"""`checkpoint`, `checkpoints`, `restore`, `fork`, `export` and `import`: a sandbox as it was, or in another place.

Owns how the tree of checkpoints is drawn. Not here: `sleep`, `wake` and garbage collection (`lifecycle.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from atoll.contract.errors import InvalidRequest, SandboxNotFound
from atoll.surfaces.cli import render, values
from atoll.surfaces.cli.command import AtollCommand, CommandContext, CommandModule, Work
from atoll.surfaces.cli.grammar import Argument, Option
from atoll.surfaces.cli.options import LIMITS, CheckpointArgument, CheckpointOption, NameArgument
from atoll.surfaces.cli.sandbox_options import SandboxOptions, limits, runtime_name

if TYPE_CHECKING:
    from atoll.contract.model import Checkpoint

commands = CommandModule()


class _ImportCommand(AtollCommand):
    resources = LIMITS


@commands.command()
async def checkpoint(
    context: CommandContext,
    name: NameArgument,
    label: Annotated[str | None, Argument(metavar="LABEL", help="Its label.  [default: none]")] = None,
) -> int:
    """Make a checkpoint of a sandbox, and print its id."""
    async with context.open_engine() as engine:
        made = await engine.checkpoint(name, label)
    return context.answer(made.model_dump(mode="json"), made.id)


@commands.command()
async def checkpoints(
    context: CommandContext,
    name: Annotated[
        str | None,
        Argument(metavar="NAME", help="The sandbox.  [default: all sandboxes]"),
    ] = None,
    delete: Annotated[
        list[str] | None, Option("--delete", metavar="CHECKPOINT", help="Delete this checkpoint. Repeatable.")
    ] = None,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print ids only.")] = False,
) -> int:
    """Show the tree of checkpoints, or delete some. Those of a destroyed sandbox are found by its name."""
    async with context.open_engine() as engine:
        for each in delete or []:
            await engine.delete_checkpoint(each, sandbox=name)
        try:
            found = await engine.checkpoints(name)
        except SandboxNotFound:
            if not delete:
                raise
            found = []  # the last one of a destroyed sandbox is deleted
    if context.as_json:
        render.emit_json([each.model_dump(mode="json") for each in found])
    elif quiet or delete:
        for line in delete or [each.id for each in found]:
            render.say(line)
    elif not found:
        render.note("no checkpoints; `atoll checkpoint NAME` makes one")
    else:
        rows = [
            (
                drawn,
                each.label or "",
                each.sandbox,
                render.ago(each.created_at),
                f"error: {each.reason}" if each.reason else render.human_bytes(each.size_bytes),
            )
            for drawn, each in _tree(found)
        ]
        render.table(("CHECKPOINT", "LABEL", "SANDBOX", "CREATED", "SIZE"), rows)
    return 0


@commands.command()
async def restore(context: CommandContext, name: NameArgument, checkpoint: CheckpointArgument) -> int:
    """Restore a sandbox to a checkpoint. What was written since is lost."""
    async with context.open_engine() as engine:
        await engine.restore(name, checkpoint)
    value = {"name": name, "checkpoint": checkpoint, "status": "running"}
    return context.answer(value, f"{name} is restored to {checkpoint}")


@commands.command()
async def fork(
    context: CommandContext,
    name: NameArgument,
    names: Annotated[
        list[str] | None,
        Argument(metavar="NEW", help="The names of the forks.  [default: generated]"),
    ] = None,
    count: Annotated[
        int,
        Option("--count", "-n", metavar="N", help="How many forks, if no names are given."),
    ] = 1,
    checkpoint: CheckpointOption = None,
) -> int:
    """Create copies of a sandbox. Their names are printed."""
    async with context.open_engine() as engine:
        made = await engine.fork(name, len(names or []) or count, checkpoint=checkpoint, names=names or None)
        infos = [sandbox.info for sandbox in made]
    return context.answer([info.model_dump(mode="json") for info in infos], "\n".join(info.name for info in infos))


@commands.command()
def export(
    context: CommandContext,
    name: NameArgument,
    file: Annotated[
        Path | None,
        Argument(metavar="FILE", help="The file to write; - is standard output.  [default: NAME.tar.zst]"),
    ] = None,
    checkpoint: CheckpointOption = None,
) -> Work:
    """Write a sandbox to one file.

    `atoll import` reads it, here or on another machine. The file holds the files that were written on top of the image,
    and the environment. It does not hold the image and the processes.

    \b
    atoll export box box.tar.zst
    atoll export box - | ssh other atoll import -
    """
    target = file or Path(f"{name}.tar.zst")
    if str(target) == "-":
        if context.as_json:
            raise InvalidRequest("--json and - both write to standard output; leave one of them out")
        if sys.stdout.isatty():
            raise InvalidRequest("standard output is a terminal; name a file, or redirect the output")
    return _export(context, name, target, checkpoint)


async def _export(context: CommandContext, name: str, target: Path, checkpoint: str | None) -> int:
    to_stream = str(target) == "-"
    async with context.open_engine() as engine:
        with render.ProgressBars() as bars:
            file = sys.stdout.buffer if to_stream else target
            made = await engine.export(name, file, checkpoint=checkpoint, progress=bars)
    if context.as_json:
        render.emit_json({"file": str(target), **made.model_dump(mode="json")})
        return 0
    if made.without_processes:
        render.note("processes are not exported; a sandbox that is imported from this file has the files only")
    if not to_stream:
        render.say(str(target))
    return 0


@commands.command("import", cls=_ImportCommand)
def import_(
    context: CommandContext,
    file: Annotated[
        Path,
        Argument(metavar="FILE", help="A file that `atoll export` wrote; - is standard input."),
    ],
    name: Annotated[str | None, Argument(metavar="NAME", help="Its name.  [default: its old name]")] = None,
    image: Annotated[
        str | None,
        Option("--image", metavar="REF", help="The image of the sandbox.  [default: the image in the file]"),
    ] = None,
    runtime: Annotated[
        str | None,
        Option(
            "--runtime",
            metavar="NAME",
            help="The runtime: crun, runc, runsc, or bwrap (only by name)."
            "  [default: $ATOLL_RUNTIME, else the file's, else the fastest]",
        ),
    ] = None,
    default_limits: Annotated[
        bool, Option("--default-limits", help="Use the default limits, not those in the file.")
    ] = False,
    limit: Annotated[
        int | None,
        Option(
            "--limit",
            metavar="SIZE",
            parser=values.size,
            help="Limit of the unpacked size.  [default: three quarters of the free disk]",
        ),
    ] = None,
) -> Work:
    """Create a sandbox from an exported file.

    Its name is printed. Nothing in the file is trusted, and a damaged file leaves nothing behind. The image has to be
    on this machine already; `host` is this machine's own. A limit that is given here replaces all limits in the file.
    """
    if str(file) == "-" and sys.stdin.isatty():
        raise InvalidRequest("standard input is a terminal; name a file, or pipe one into this command")
    options = context.sandbox_options()._replace(image=image, runtime=runtime)
    return _import(context, file, name, options, default_limits=default_limits, limit_bytes=limit)


async def _import(
    context: CommandContext,
    source: Path,
    name: str | None,
    options: SandboxOptions,
    *,
    default_limits: bool,
    limit_bytes: int | None,
) -> int:
    from atoll.contract.model import Limits

    given = limits(options)
    async with context.open_engine() as engine:
        with render.ProgressBars() as bars:
            sandbox = await engine.import_(
                sys.stdin.buffer if str(source) == "-" else source,
                name,
                image=options.image,
                limits=given if default_limits or given != Limits() else None,
                runtime=runtime_name(options.runtime),
                limit_bytes=limit_bytes,
                progress=bars,
            )
        info = sandbox.info
    return context.answer(info.model_dump(mode="json"), info.name)


def _tree(found: Sequence[Checkpoint]) -> list[tuple[str, Checkpoint]]:
    """Each checkpoint below its parent, the oldest first, with the lines that show it."""
    known = {each.id for each in found}
    drawn: list[tuple[str, Checkpoint]] = []
    # Not by recursion: a chain of checkpoints may be longer than Python's stack.
    roots = [each for each in found if each.parent not in known]
    waiting = [(each, "", "") for each in reversed(roots)]
    while waiting:
        each, before, branch = waiting.pop()
        drawn.append((before + branch + each.id, each))
        below = [child for child in found if child.parent == each.id]
        lines = before + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
        # An only child stays in its parent's column: a chain is a column, a fork is a branch.
        if len(below) == 1:
            waiting.append((below[0], lines, ""))
            continue
        for number, child in enumerate(reversed(below)):
            waiting.append((child, lines, "├─ " if number else "└─ "))
    return drawn
