"""`create`, `ls`, `ps`, `stat` and `rm`: sandboxes are created, listed, shown and destroyed.

Not here: the options that describe a sandbox (`sandbox_options.py`), how tables and values look (`render.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from atoll.contract.errors import AtollError, InvalidRequest, SandboxNotFound
from atoll.surfaces.cli import FAILED, render
from atoll.surfaces.cli.command import AtollCommand, CommandContext, CommandModule, Work
from atoll.surfaces.cli.grammar import Argument, Option
from atoll.surfaces.cli.options import SANDBOX, NameArgument
from atoll.surfaces.cli.sandbox_options import SandboxOptions, create_sandbox

if TYPE_CHECKING:
    from atoll.contract.model import ProcessInfo, SandboxInfo, SystemProcess, Usage

commands = CommandModule()


class _CreateCommand(AtollCommand):
    resources = (*SANDBOX, "cwd")


@commands.command(cls=_CreateCommand)
def create(
    context: CommandContext,
    name: Annotated[str | None, Argument(metavar="NAME", help="Its name.  [default: generated]")] = None,
) -> Work:
    """Create a sandbox and print its name."""
    return _create(context, context.sandbox_options(), name)


async def _create(context: CommandContext, options: SandboxOptions, name: str | None) -> int:
    async with context.open_engine() as engine:
        sandbox = await create_sandbox(engine, options, name, ephemeral=False)
        return context.answer(sandbox.info.model_dump(mode="json"), sandbox.name)


@commands.command()
async def ls(
    context: CommandContext,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print names only.")] = False,
) -> int:
    """List the sandboxes."""
    async with context.open_engine() as engine:
        infos = await engine.list()
    if context.as_json:
        render.emit_json([info.model_dump(mode="json") for info in infos])
    elif quiet:
        for info in infos:
            render.say(info.name)
    elif not infos:
        render.note("no sandboxes; `atoll create` creates one")
    else:
        rows = [
            (info.name, _status(info), info.runtime, render.ago(info.created_at), _used(info), info.image)
            for info in sorted(infos, key=lambda info: info.created_at)
        ]
        render.table(("NAME", "STATUS", "RUNTIME", "CREATED", "USED", "IMAGE"), rows, flex=5)
    return 0


@commands.command()
async def ps(context: CommandContext, name: NameArgument) -> int:
    """List the commands and processes of a sandbox."""
    async with context.open_engine() as engine:
        sandbox = await engine.get(name)
        started = sorted(await sandbox.processes(), key=lambda info: -info.id)
        processes = await sandbox.ps()
    if context.as_json:
        render.emit_json(
            {
                "commands": [info.model_dump(mode="json") for info in started],
                "processes": [process.model_dump(mode="json") for process in processes],
            }
        )
        return 0
    if started:
        render.say("commands; `atoll logs` takes their ID")
        rows = [_command_row(info) for info in started]
        render.table(("ID", "PID", "STATE", "STARTED", "COMMAND"), rows, flex=4, indent=2)
        render.say("")
    render.say("processes")
    header = ("PID", "PPID", "UID", "S", "MEMORY", "CPU", "COMMAND")
    render.table(header, [_process_row(process) for process in processes], flex=6, indent=2)
    return 0


@commands.command()
async def stat(context: CommandContext, name: NameArgument) -> int:
    """Show what a sandbox uses, and its limits."""
    async with context.open_engine() as engine:
        sandbox = await engine.get(name)
        usage = await sandbox.stat()
        info = sandbox.info
    if context.as_json:
        limits = info.limits.model_dump(mode="json")
        render.emit_json({"name": name, **usage.model_dump(mode="json"), "limits": limits})
    else:
        render.facts(_usage_facts(info, usage))
    return 0


@commands.command()
def rm(
    context: CommandContext,
    names: Annotated[list[str] | None, Argument(metavar="NAME", help="The sandboxes.")] = None,
    every: Annotated[bool, Option("--all", help="Destroy all sandboxes.")] = False,
    force: Annotated[bool, Option("--force", "-f", help="Do not ask, and ignore sandboxes that do not exist.")] = False,
) -> Work | int:
    """Destroy sandboxes: their processes and their files.

    If one cannot be destroyed, the others are, and the exit status is 1.
    """
    if bool(names) == every:
        raise InvalidRequest("name the sandboxes to destroy, or give --all")
    if every and not force and sys.stdin.isatty():
        sys.stderr.write("Destroy all sandboxes? [y/N]: ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return FAILED
    return _rm(context, names or [], every=every, force=force)


async def _rm(context: CommandContext, names: Sequence[str], *, every: bool, force: bool) -> int:
    removed: list[str] = []
    failures: list[AtollError] = []
    async with context.open_engine() as engine:
        if every:
            names = [info.name for info in await engine.list()]
        for name in dict.fromkeys(names):
            try:
                await engine.destroy(name)
            except SandboxNotFound as error:
                if not force:
                    failures.append(error)
            except AtollError as error:
                failures.append(error)
            else:
                removed.append(name)
                if not context.as_json:
                    render.say(name)
    if context.as_json:
        render.emit_json({"removed": removed, "errors": [{**e.to_dict(), "hint": e.hint} for e in failures]})
    else:
        for failure in failures:
            render.failure(failure, as_json=False)
    return FAILED if failures else 0


def _used(info: SandboxInfo) -> str:
    return render.ago(info.last_used_at) if info.last_used_at else "never"


def _status(info: SandboxInfo) -> str:
    return f"{info.status}: {info.reason}" if info.reason else info.status


def _command_row(info: ProcessInfo) -> tuple[str, ...]:
    ended = f"exit {info.exit_code}" + (", children still run" if info.live else "")
    state = "running" if info.exit_code is None else ended
    return str(info.id), str(info.pid), state, render.ago(info.started_at), info.command


def _process_row(process: SystemProcess) -> tuple[str, ...]:
    return (
        str(process.pid),
        str(process.ppid),
        str(process.uid),
        process.state,
        render.human_bytes(process.rss_bytes),
        render.human_seconds(process.cpu_s),
        process.command,
    )


def _usage_facts(info: SandboxInfo, usage: Usage) -> list[tuple[str, str]]:
    limits = info.limits
    memory = render.human_bytes(usage.memory_bytes)
    if limits.memory_bytes is not None:
        memory += f" of {render.human_bytes(limits.memory_bytes)}"
    if usage.memory_peak_bytes is not None:
        memory += f", peak {render.human_bytes(usage.memory_peak_bytes)}"
    cpu = "?" if usage.cpu_s is None else render.human_seconds(usage.cpu_s)
    if limits.cpus is not None:
        cpu += f", limited to {limits.cpus:g} cores"
    pids = "?" if usage.pids is None else str(usage.pids)
    if limits.pids is not None:
        pids += f" of {limits.pids}"
    disk = f"{render.human_bytes(usage.disk_bytes)} written"
    if limits.disk_bytes is not None:
        disk += f" of {render.human_bytes(limits.disk_bytes)}"
    return [
        ("name", info.name),
        ("status", _status(info)),
        ("image", info.image),
        ("runtime", info.runtime),
        ("created", render.ago(info.created_at)),
        ("used", _used(info)),
        ("memory", memory),
        ("cpu time", cpu),
        ("processes", pids),
        ("disk", disk),
        ("oom kills", "?" if usage.oom_kills is None else str(usage.oom_kills)),
    ]
