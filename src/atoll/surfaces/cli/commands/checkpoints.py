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
_MAX_INDENT = 24


class _ImportCommand(AtollCommand):
    resources = LIMITS


@commands.command()
async def checkpoint(
    context: CommandContext,
    name: NameArgument,
    label: Annotated[
        str | None, Argument(metavar="LABEL", help="Its label, unique among those of the sandbox.  [default: none]")
    ] = None,
    move: Annotated[
        bool, Option("--move", help="Take the label from the checkpoint of the sandbox that has it, which is kept.")
    ] = False,
) -> int:
    """Make a checkpoint of a sandbox, and print its id.

    It outlives the sandbox. `atoll restore` takes the sandbox back to it; `atoll create --from` and `atoll fork` create
    others from it.
    """
    async with context.open_engine() as engine:
        made = await engine.checkpoint(name, label, move=move)
    if made.without_mounts and not context.as_json:
        render.note(f"mounts are not in the checkpoint: {', '.join(made.without_mounts)}")
    return context.answer(made.model_dump(mode="json"), made.id)


@commands.command()
async def checkpoints(
    context: CommandContext,
    name: Annotated[
        str | None,
        Argument(metavar="NAME", help="The sandbox.  [default: all sandboxes]", completes="sandbox"),
    ] = None,
    delete: Annotated[
        list[str] | None,
        Option(
            "--delete",
            metavar="CHECKPOINT",
            help="Delete this checkpoint: its id, or its label. Repeatable.",
            completes="checkpoint",
        ),
    ] = None,
    delete_all: Annotated[bool, Option("--delete-all", help="Delete all checkpoints of the sandbox.")] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print ids only.")] = False,
) -> int:
    """Show the tree of checkpoints, or delete some.

    Each is below the one that came before it. Those of a destroyed sandbox are found by its name, until another sandbox
    has that name; then by their ids.
    """
    if delete_all and (name is None or delete):
        raise InvalidRequest("--delete-all needs the name of a sandbox, and no --delete")
    async with context.open_engine() as engine:
        if delete_all:
            delete = [each.id for each in await engine.checkpoints(name)]
        for each in delete or []:
            await engine.delete_checkpoint(each, sandbox=name)
        try:
            found = await engine.checkpoints(name)
        except SandboxNotFound:
            if not delete:
                raise
            found = []  # the last one of a destroyed sandbox is deleted
        living = {info.id for info in await engine.list()}
    if context.as_json:
        render.emit_json([each.model_dump(mode="json") for each in found])
    elif quiet or delete or delete_all:
        for line in delete or [each.id for each in found]:
            render.say(line)
    elif not found:
        render.note("no checkpoints; `atoll checkpoint NAME` makes one")
    else:
        rows = [
            (
                drawn,
                each.label or "",
                each.sandbox if each.reason or each.sandbox_id in living else f"{each.sandbox} (destroyed)",
                render.ago(each.created_at),
                f"error: {each.reason}" if each.reason else render.human_bytes(each.size_bytes),
            )
            for drawn, each in _tree(found)
        ]
        render.table(("CHECKPOINT", "LABEL", "SANDBOX", "CREATED", "SIZE"), rows)
    return 0


@commands.command()
async def restore(
    context: CommandContext,
    name: NameArgument,
    checkpoint: CheckpointArgument,
    foreign: Annotated[bool, Option("--foreign", help="The checkpoint may be another sandbox's.")] = False,
) -> int:
    """Restore a sandbox to one of its checkpoints. What was written since is lost."""
    async with context.open_engine() as engine:
        await engine.restore(name, checkpoint, foreign=foreign)
    value = {"name": name, "checkpoint": checkpoint, "status": "running"}
    return context.answer(value, f"{name} is restored to {checkpoint}")


@commands.command()
def fork(
    context: CommandContext,
    name: NameArgument,
    names: Annotated[
        list[str] | None,
        Argument(metavar="NEW", help="The names of the forks.  [default: generated]"),
    ] = None,
    count: Annotated[
        int | None,
        Option("--count", "-n", metavar="N", help="How many forks, if no names are given.  [default: 1]"),
    ] = None,
    checkpoint: CheckpointOption = None,
) -> Work:
    """Create copies of a sandbox. Their names are printed.

    With --checkpoint the sandbox may have been destroyed.
    """
    if names and count is not None:
        raise InvalidRequest(f"--count {count} and names ({', '.join(names)}) were given; give one of them")
    if count is not None and count < 1:
        raise InvalidRequest(f"--count is {count}; it must be at least 1")
    return _fork(context, name, names or [], count or 1, checkpoint)


async def _fork(context: CommandContext, name: str, names: Sequence[str], count: int, checkpoint: str | None) -> int:
    async with context.open_engine() as engine:
        made = await engine.fork(name, len(names) or count, checkpoint=checkpoint, names=names or None)
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
    and the environment. It does not hold the image, the processes and mounts.

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
    if made.without_mounts:
        render.note(f"mounts are not exported: {', '.join(made.without_mounts)}")
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
        # A long chain would not fit on a terminal: from some depth on, an only child stays in its parent's column.
        if len(below) == 1 and len(lines) >= _MAX_INDENT:
            waiting.append((below[0], lines, ""))
            continue
        for number, child in enumerate(reversed(below)):
            waiting.append((child, lines, "├─ " if number else "└─ "))
    return drawn
