"""`storage`, `storage init` and `storage remove`: the file system that holds the layers of sandboxes.

Not here: how it is made and mounted (`runtime/state/loop_storage.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast, get_args

from atoll.contract.errors import InvalidRequest
from atoll.surfaces.cli import render, values
from atoll.surfaces.cli.command import CommandContext, CommandModule, Work
from atoll.surfaces.cli.grammar import Option

if TYPE_CHECKING:
    from atoll.contract.model import StorageInfo


def storage(context: CommandContext) -> Work | None:
    return _storage(context) if context.invoked_subcommand is None else None


commands = CommandModule("storage", "Show or create the file system of sandboxes.", storage)


async def _storage(context: CommandContext) -> int:
    async with context.open_engine() as engine:
        return _show(context, engine.storage.info())


@commands.command()
async def init(
    context: CommandContext,
    size: Annotated[
        int, Option("--size", metavar="SIZE", parser=values.size, help="The size of the file system: 50g.")
    ],
    filesystem: Annotated[str, Option("--fs", metavar="KIND", help="btrfs or xfs.")] = "btrfs",
) -> int:
    """Create a file system for what sandboxes write, in a file in the state directory.

    With btrfs, checkpoint and fork of a running sandbox take the same short time whatever its size, and --disk is
    enforced. The file grows and shrinks with its content. It is mounted whenever the state directory is used.
    """
    from atoll.runtime.state.loop_storage import StorageKind

    if filesystem not in get_args(StorageKind):
        raise InvalidRequest(f"--fs is {filesystem!r}; it must be one of {', '.join(get_args(StorageKind))}")
    async with context.open_engine() as engine:
        return _show(context, await engine.storage.init(size, cast("StorageKind", filesystem)))


@commands.command()
async def remove(context: CommandContext) -> int:
    """Remove that file system. There must be no sandboxes, checkpoints and volumes."""
    async with context.open_engine() as engine:
        await engine.storage.remove()
        return _show(context, engine.storage.info())


def _show(context: CommandContext, info: StorageInfo) -> int:
    if context.as_json:
        render.emit_json(info.model_dump(mode="json"))
        return 0
    limits = "yes" if info.disk_limit else f"no: {info.missing}"
    rows = [
        ("layers", str(info.path)),
        ("file system", info.filesystem + (f", in {info.image}" if info.image else "")),
        ("free", f"{render.human_bytes(info.free_bytes)} of {render.human_bytes(info.total_bytes)}"),
        ("reflinks", "yes" if info.reflinks else "no"),
        ("snapshots", "yes" if info.snapshots else "no"),
        ("disk limits", limits),
    ]
    if info.fix:
        rows.append(("fix", info.fix))
    render.facts(rows)
    return 0
