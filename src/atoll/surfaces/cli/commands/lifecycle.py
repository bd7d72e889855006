"""`sleep`, `wake`, `pause`, `resume`, `warm` and `gc`: the lifecycle of sandboxes, warm pools, garbage collection.

Not here: `create` and `rm` (`sandboxes.py`), checkpoints (`checkpoints.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from atoll.contract.errors import InvalidRequest
from atoll.contract.names import DEFAULT_NAMESPACE
from atoll.runtime.state.namespaces import split_entry
from atoll.surfaces.cli import render
from atoll.surfaces.cli.command import AtollCommand, CommandContext, CommandModule, Work
from atoll.surfaces.cli.grammar import Option
from atoll.surfaces.cli.options import TEMPLATE, NameArgument
from atoll.surfaces.cli.sandbox_options import SandboxOptions, limits, runtime_name

if TYPE_CHECKING:
    from atoll.contract.model import Limits
    from atoll.runtime.interface import Engine

_SINGULAR = {"sandboxes": "sandbox", "layers": "layer", "images": "image", "downloads": "download"}

commands = CommandModule()


class _TemplateCommand(AtollCommand):
    resources = TEMPLATE


@commands.command()
async def sleep(
    context: CommandContext,
    name: NameArgument,
    shutdown: Annotated[
        bool, Option("--shutdown", help="Sleep until `atoll wake`; using the sandbox is an error until then.")
    ] = False,
) -> int:
    """Put a sandbox to sleep on disk, until it is next used.

    Its files stay. With runsc its processes are saved and continue when it wakes; with other runtimes they end. `atoll
    pause` keeps processes in memory.
    """
    async with context.open_engine() as engine:
        await (engine.shutdown(name) if shutdown else engine.sleep(name))
        return await _show_status(context, engine, name)


@commands.command()
async def wake(context: CommandContext, name: NameArgument) -> int:
    """Start a sandbox that sleeps, was shut down, or has ended."""
    async with context.open_engine() as engine:
        await engine.wake(name)
    return context.answer({"name": name, "status": "running"}, f"{name} is running")


@commands.command()
async def pause(context: CommandContext, name: NameArgument) -> int:
    """Freeze the processes of a sandbox in memory.

    They continue when the sandbox is next used, or with `atoll resume`.
    """
    async with context.open_engine() as engine:
        await engine.pause(name)
        return await _show_status(context, engine, name)


@commands.command()
async def resume(context: CommandContext, name: NameArgument) -> int:
    """Let the processes of a paused sandbox continue."""
    async with context.open_engine() as engine:
        await engine.resume(name)
        return await _show_status(context, engine, name)


async def _show_status(context: CommandContext, engine: Engine, name: str) -> int:
    (info,) = [info for info in await engine.list() if info.name == name]
    return context.answer({"name": name, "status": info.status}, f"{name} is {info.status}")


@commands.command(cls=_TemplateCommand)
def warm(
    context: CommandContext,
    count: Annotated[
        int | None,
        Option(
            "--count",
            "-n",
            metavar="N",
            help="The size of the warm pool; 0 removes it.  [default: show the warm pools]",
        ),
    ] = None,
    every: Annotated[bool, Option("--all", help="With --count 0: remove all warm pools.")] = False,
) -> Work:
    """Show warm pools, or keep one.

    A warm pool keeps sandboxes ready, so that `create` and `run` do not wait for one to start. It has one template:
    image, runtime and limits. A sandbox that is created with the same ones is claimed from the pool, and the pool is
    refilled.

    \b
    atoll warm --image python:3.12 --count 4
    """
    if every and count != 0:
        raise InvalidRequest("--all needs --count 0, and removes all warm pools")
    return _warm(context, context.sandbox_options(), count, every=every)


async def _warm(context: CommandContext, template: SandboxOptions, count: int | None, *, every: bool) -> int:
    async with context.open_engine() as engine:
        if every:
            await engine.remove_warm_pools()
        elif count is not None:
            runtime = runtime_name(template.runtime)
            await engine.warm(count, image=template.image, limits=limits(template), runtime=runtime)
        pools = await engine.warm_pools()
    if context.as_json:
        render.emit_json([pool.model_dump(mode="json") for pool in pools])
    elif not pools:
        render.note("no warm pools; `atoll warm --count N` keeps sandboxes ready")
    else:
        rows = [
            (f"{pool.ready} of {pool.count}", pool.runtime, _limits_text(pool.limits), pool.reason or pool.image)
            for pool in pools
        ]
        render.table(("READY", "RUNTIME", "LIMITS", "IMAGE"), rows, flex=3)
    return 0


def _limits_text(limits: Limits) -> str:
    texts = [
        limits.memory_bytes and render.human_bytes(limits.memory_bytes),
        limits.cpus and f"{limits.cpus:g} cores",
        limits.pids and f"{limits.pids} processes",
        limits.open_files and f"{limits.open_files} open files",
    ]
    return ", ".join(text for text in texts if text) or "none"


@commands.command()
async def gc(context: CommandContext) -> int:
    """Remove abandoned sandboxes, unused layers and images.

    A layer is unused if no sandbox, checkpoint or volume refers to it, an image if it has no reference either.
    Interrupted operations are finished or undone.
    """
    async with context.open_engine() as engine:
        removed = await engine.gc()
        unreadable = await engine.unreadable_records()
    if not context.as_json:
        for id, reason in unreadable.items():
            from atoll.contract.model import VOLUME_PREFIX

            namespace, name = split_entry(id.removeprefix(VOLUME_PREFIX))
            what = "checkpoints --delete" if name.startswith("cp-") else "rm"
            what = "volumes rm" if id.startswith(VOLUME_PREFIX) else what
            within = "" if namespace == DEFAULT_NAMESPACE else f" --namespace {namespace}"
            remove = f"atoll {what} {name}{within}"
            render.note(
                f"layers and images are kept: the record of {id} cannot be read: {reason} (`{remove}` removes it)"
            )
    counts = ((len(ids), noun) for noun, ids in removed.model_dump().items())
    text = ", ".join(f"{count} {_SINGULAR[noun] if count == 1 else noun}" for count, noun in counts if count)
    value = {**removed.model_dump(mode="json"), "unreadable": unreadable}
    return context.answer(value, f"removed {text}" if text else "nothing to remove")
