"""`doctor`, `version` and `uninstall`: this machine, and this installation.

Not here: what is examined and how packages are installed (`drivers/doctor.py`), and how the program itself is installed
and removed (`scripts/install`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import atoll
from atoll.contract.errors import CheckpointNotFound, InvalidRequest, SandboxError, SandboxNotFound
from atoll.runtime.state.namespaces import names_in
from atoll.surfaces.cli import FAILED, render
from atoll.surfaces.cli.command import CommandContext, CommandModule, Work
from atoll.surfaces.cli.grammar import Option

if TYPE_CHECKING:
    from atoll.runtime.interface import Engine

commands = CommandModule()
_KINDS = (("sandboxes", "sandbox"), ("checkpoints", "checkpoint"), ("volumes", "volume"))
"""What users have in a state directory, by the name of its directory, and one of it."""


@commands.command()
def doctor(
    context: CommandContext,
    fix: Annotated[
        bool, Option("--fix", help="First install the distribution packages that are missing, after asking.")
    ] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="With --fix: do not ask.")] = False,
) -> Work:
    """Show what works on this machine, and how to fix the rest.

    With --fix it shows the commands that install what Atoll uses of the distribution (Debian, Ubuntu), and runs them if
    you agree. It needs root or sudo. The exit status is 1 if no runtime works.
    """
    context.require_local()
    if yes and not fix:
        raise InvalidRequest("--yes is for --fix")
    if fix:
        _install_packages(yes=yes)
    return _doctor(context)


def _install_packages(*, yes: bool) -> None:
    from atoll.drivers.doctor import install_packages, missing_packages, package_commands

    missing = missing_packages()
    if not missing:
        render.note("no distribution package is missing")
        return
    for line in package_commands(missing):
        render.note(f"  {line}")
    if yes or _agreed("Run these commands?"):
        install_packages(missing)


async def _doctor(context: CommandContext) -> int:
    async with context.open_engine() as engine:
        found = engine.doctor()
        runtimes = engine.runtimes()
        working = list(runtimes)
        by_name = {name for name, able in runtimes.items() if not able.chosen_by_default}
        state_dir = engine.state_dir
    if context.as_json:
        diagnostics = [each.model_dump(mode="json") for each in found]
        render.emit_json({"runtimes": working, "state_dir": str(state_dir), "diagnostics": diagnostics})
    else:
        render.diagnostics([(each.ok, each.topic, each.detail, each.fix) for each in found])
        render.say("")
        if working:
            shown = [f"{name} (only by name)" if name in by_name else name for name in working]
            render.say(f"runtimes that work: {', '.join(shown)}")
        else:
            render.say("no runtime works, so no sandbox can be created; apply the fixes above")
    return 0 if working else FAILED


@commands.command()
def version(context: CommandContext) -> int:
    """Print the version."""
    return context.answer({"version": atoll.__version__}, f"atoll {atoll.__version__}")


@commands.command()
def uninstall(
    context: CommandContext,
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask.")] = False,
) -> Work | int:
    """Remove all that Atoll keeps for this user.

    That is every sandbox, checkpoint, volume, warm pool and image, their file system (`atoll storage`), the state
    directory, Atoll's cgroups, and shell completion. Then it says how to remove the program; distribution packages
    stay. Stop programs that use sandboxes first, such as `atoll mcp --http`.
    """
    from atoll.settings import Settings

    context.require_local()
    settings = Settings.from_environment()
    given = context.state_dir
    state_dir = (settings.resolve_state_dir() if given is None else Path(given)).absolute()
    try:
        counts = [len(os.listdir(state_dir / kind)) for kind, _ in _KINDS]
    except FileNotFoundError:
        return _say_removed(context, [])
    except OSError as error:
        raise InvalidRequest(f"the state directory {state_dir} cannot be read: {error.strerror}") from error
    told = [f"{count} {one if count == 1 else several}" for count, (several, one) in zip(counts, _KINDS, strict=True)]
    if not yes and not _agreed(f"Destroy {', '.join(told)}, and remove {state_dir} with all images?"):
        return FAILED
    return _uninstall(context, state_dir)


async def _uninstall(context: CommandContext, state_dir: Path) -> int:
    from atoll.drivers.cgroups import Cgroups
    from atoll.drivers.machine import read_machine
    from atoll.runtime.state import known
    from atoll.settings import Settings
    from atoll.surfaces.cli import completion

    for namespace in known.namespaces(state_dir):
        async with context.open_engine(namespace=namespace) as engine:
            await _destroy_all(engine)
    async with context.open_engine() as engine:
        left = os.listdir(state_dir / "sandboxes")
        if left:
            raise SandboxError(
                f"the state directory stays: {len(left)} sandboxes are still in it, as a program has just created "
                "them; end the programs that use Atoll, and try again"
            )
        if engine.storage.info().image is not None:
            await engine.storage.remove()
    _remove_state(state_dir)
    removed = [state_dir]
    if state_dir == Settings().resolve_state_dir():  # else it is one of several
        Cgroups(read_machine()).remove_parents()
        removed += completion.remove()
    return _say_removed(context, removed)


async def _destroy_all(engine: Engine) -> None:
    """Destroy what the namespace of an engine has.

    Raises:
        AtollError: a sandbox cannot be destroyed.
    """
    await engine.remove_warm_pools()
    for info in await engine.list():
        await engine.destroy(info.name)
    for id in names_in(engine.namespace, await engine.unreadable_records()):
        with suppress(SandboxNotFound, CheckpointNotFound):  # `volume:NAME`, in a namespace of that name
            await (engine.delete_checkpoint(id) if id.startswith("cp-") else engine.destroy(id))
    for checkpoint in await engine.checkpoints():
        await engine.delete_checkpoint(checkpoint.id)
    for volume in await engine.volumes.list():
        await engine.volumes.remove(volume.name)
    await engine.gc()


def _remove_state(state_dir: Path) -> None:
    """
    Raises:
        SandboxError: a file system is mounted in it.
    """
    from atoll.runtime.images.store import remove_tree

    with open("/proc/self/mountinfo") as file:
        mounted = [line.split()[4] for line in file if line.split()[4].startswith(f"{state_dir.resolve()}/")]
    if mounted:
        raise SandboxError(
            f"{state_dir} stays: file systems are mounted in it: {', '.join(mounted)}; unmount them first"
        )
    if state_dir.is_mount():  # the administrator's own disk for it
        for entry in state_dir.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                remove_tree(entry)
            else:
                entry.unlink()
    else:
        remove_tree(state_dir)


def _say_removed(context: CommandContext, paths: Sequence[Path]) -> int:
    removed, program = [str(path) for path in paths], _removal()
    text = f"removed {', '.join(removed)}" if removed else "there is no state directory of this user"
    value = {"removed": removed, "program": program}
    return context.answer(value, f"{text}\nthe program itself is removed with: {program}")


def _removal() -> str:
    """The command that removes the program."""
    import shutil
    from shlex import join

    if sys.prefix == sys.base_prefix:
        return join([sys.executable, "-m", "pip", "uninstall", "atoll"])
    link = shutil.which("atoll")
    links = [link] if link and os.path.islink(link) and os.path.realpath(link).startswith(sys.prefix) else []
    return join(["rm", "-r", sys.prefix, *links])


def _agreed(question: str) -> bool:
    """
    Raises:
        InvalidRequest: nothing can be asked here.
    """
    if not sys.stdin.isatty():
        raise InvalidRequest(f"standard input is not a terminal, so this cannot be asked: {question} Give --yes")
    sys.stderr.write(f"{question} [y/N]: ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
