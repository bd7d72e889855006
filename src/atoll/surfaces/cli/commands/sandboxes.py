"""`create`, `update`, `ls`, `inspect`, `stat`, `top` and `rm`: sandboxes from their creation to their end.

Not here: the options that describe a sandbox (`sandbox_options.py`), how tables and values look (`render.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from atoll.contract.errors import AtollError, InvalidRequest, SandboxNotFound
from atoll.surfaces.cli import FAILED, render, values
from atoll.surfaces.cli.command import AtollCommand, CommandContext, CommandModule, Work
from atoll.surfaces.cli.grammar import Argument, Option
from atoll.surfaces.cli.options import LIMITS, SANDBOX, NameArgument
from atoll.surfaces.cli.sandbox_options import SandboxOptions, create_sandbox, limits

if TYPE_CHECKING:
    from atoll.contract.model import SandboxInfo, Usage

commands = CommandModule()
_SHOWN_WITH_USAGE = ("limits", "labels", "expires_at", "ttl_s", "on_expiry", "ttl_renewed_by_use", "mounts")


class _CreateCommand(AtollCommand):
    resources = (*SANDBOX, "cwd", "from_checkpoint")


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


class _UpdateCommand(AtollCommand):
    resources = (*LIMITS, "label")


@commands.command(cls=_UpdateCommand)
def update(
    context: CommandContext,
    name: NameArgument,
    ttl: Annotated[
        float | None,
        Option("--ttl", metavar="TIME", parser=values.lifetime, help="Its lifetime from now on: 8h; none: no end."),
    ] = None,
    on_expiry: Annotated[
        str | None,
        Option("--on-expiry", metavar="ACTION", help="What happens when it is over: destroy, sleep or pause."),
    ] = None,
    renewed: Annotated[
        bool | None,
        Option("--ttl-renewed-by-use/--no-ttl-renewed-by-use", help="Whether each use begins its lifetime anew."),
    ] = None,
    remove_label: Annotated[
        list[str] | None, Option("--remove-label", metavar="K", help="Remove this label. Repeatable.")
    ] = None,
) -> Work:
    """Change the limits, the labels or the lifetime of a sandbox.

    What is not given stays as it is. Limits hold at once and after it sleeps; the limit on open files can be changed
    only while it sleeps.

    \b
    atoll update box --memory 4g --cpus 2
    atoll update box --label team=search --ttl 8h
    atoll update box --ttl 20m --on-expiry sleep --ttl-renewed-by-use
    """
    options = context.sandbox_options()
    labels = {**options.labels, **dict.fromkeys(remove_label or [])}
    lifetime = {"ttl_s": ttl, "on_expiry": on_expiry, "ttl_renewed_by_use": renewed}
    lifetime = {name: value for name, value in lifetime.items() if value is not None}
    if not lifetime and not labels and not any(name in context.resources for name in LIMITS):
        raise InvalidRequest("nothing to change is given; give a limit, --label, --remove-label or --ttl")
    return _update(context, name, options, labels, lifetime)


async def _update(
    context: CommandContext,
    name: str,
    options: SandboxOptions,
    labels: Mapping[str, str | None],
    lifetime: Mapping[str, Any],
) -> int:
    wanted = limits(options)
    async with context.open_engine() as engine:
        info = await engine.update(name, labels=labels, limits=wanted, **lifetime)
    return context.answer(info.model_dump(mode="json"), f"{name} is updated")


@commands.command()
async def ls(
    context: CommandContext,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print names only.")] = False,
    label: Annotated[
        list[str] | None,
        Option("--label", metavar="K[=V]", help="Only sandboxes with this label; K alone: of any value. Repeatable."),
    ] = None,
    every: Annotated[bool, Option("--all-namespaces", "-A", help="List those of all namespaces.")] = False,
) -> int:
    """List the sandboxes."""
    pairs = [word.partition("=") for word in label or []]
    infos: list[SandboxInfo] = []
    for namespace in _all_namespaces(context) if every else [None]:
        async with context.open_engine(namespace=namespace) as engine:
            infos += await engine.list(labels={key: value if equals else None for key, equals, value in pairs})
    if context.as_json:
        render.emit_json([info.model_dump(mode="json") for info in infos])
    elif quiet:
        for info in infos:
            render.say(f"{info.namespace} {info.name}" if every else info.name)
    elif not infos:
        render.note("no sandboxes have these labels" if label else "no sandboxes; `atoll create` creates one")
    else:
        columns = {
            "NAMESPACE": [info.namespace if every else "" for info in infos],
            "NAME": [info.name for info in infos],
            "STATUS": [_status(info) for info in infos],
            "RUNTIME": [info.runtime for info in infos],
            "CREATED": [render.ago(info.created_at) for info in infos],
            "USED": [_used(info) for info in infos],
            "EXPIRES": [_expires(info) for info in infos],
            "LABELS": [_labels(info) for info in infos],
            "IMAGE": [info.image for info in infos],
        }
        # Few have a lifetime or labels: these columns are shown if any has.
        shown = [title for title, cells in columns.items() if any(cells)]
        render.table(shown, list(zip(*(columns[title] for title in shown), strict=True)), flex=len(shown) - 1)
    return 0


def _all_namespaces(context: CommandContext) -> list[str]:
    from atoll.runtime.state import known

    context.require_local()
    return known.namespaces(context.resolved_place()[0])


@commands.command()
async def inspect(context: CommandContext, name: NameArgument) -> int:
    """Show all that is known about a sandbox, as JSON.

    Its settings, status, limits, network policy, what it uses, and its checkpoints. Looking neither wakes nor resumes
    it. `atoll ps --json` shows what runs in it.
    """
    async with context.open_engine() as engine:
        sandbox = await engine.get(name)
        usage = await sandbox.stat()
        checkpoints = [each for each in await engine.checkpoints() if each.sandbox == name]
        await sandbox.status()
    render.emit_json(
        {
            **sandbox.info.model_dump(mode="json"),
            "usage": usage.model_dump(mode="json"),
            "checkpoints": [each.model_dump(mode="json") for each in checkpoints],
        }
    )
    return 0


@commands.command()
async def stat(context: CommandContext, name: NameArgument) -> int:
    """Show what a sandbox uses, and its limits."""
    async with context.open_engine() as engine:
        sandbox = await engine.get(name)
        usage = await sandbox.stat()
        info = sandbox.info
    if context.as_json:
        shown = info.model_dump(mode="json", include={*_SHOWN_WITH_USAGE})
        render.emit_json({"name": name, **usage.model_dump(mode="json"), **shown})
    else:
        render.facts(_usage_facts(info, usage))
    return 0


@commands.command()
async def top(
    context: CommandContext,
    names: Annotated[
        list[str] | None,
        Argument(metavar="NAME", help="The sandboxes.  [default: all]", completes="sandbox"),
    ] = None,
    once: Annotated[
        bool, Option("--once", help="Print it once.  [default: if standard output is not a terminal]")
    ] = False,
    interval: Annotated[
        float, Option("--interval", metavar="TIME", parser=values.duration, help="The time between two looks.")
    ] = 2.0,
) -> int:
    """Show what sandboxes use, the busiest first, until Ctrl-C.

    CPU is a percentage of one core. Looking neither wakes nor resumes a sandbox.
    """
    from atoll.surfaces.cli import usage_table

    async with context.open_engine() as engine:
        table = usage_table.UsageTable(engine, names or [])
        if once or context.as_json or render.terminal_columns() is None:
            rows = await table.measure(min(interval, 1.0))
            if context.as_json:
                render.emit_json([row.document() for row in rows])
            else:
                for line in usage_table.lines(rows):
                    render.say(line)
            return 0
        await usage_table.watch(table, interval)
    return 0


@commands.command()
def rm(
    context: CommandContext,
    names: Annotated[list[str] | None, Argument(metavar="NAME", help="The sandboxes.", completes="sandbox")] = None,
    every: Annotated[bool, Option("--all", help="Destroy all sandboxes.")] = False,
    force: Annotated[bool, Option("--force", "-f", help="Do not ask, and ignore sandboxes that do not exist.")] = False,
    checkpoints: Annotated[bool, Option("--checkpoints", help="Delete their checkpoints, too.")] = False,
) -> Work:
    """Destroy sandboxes: their processes and their files. Their checkpoints are kept.

    If one cannot be destroyed, the others are, and the exit status is 1.
    """
    if bool(names) == every:
        raise InvalidRequest("name the sandboxes to destroy, or give --all")
    return _rm(context, names or [], every=every, force=force, checkpoints=checkpoints)


async def _rm(context: CommandContext, names: Sequence[str], *, every: bool, force: bool, checkpoints: bool) -> int:
    removed: dict[str, int] = {}
    failures: list[AtollError] = []
    async with context.open_engine() as engine:
        if every:
            names = [info.name for info in await engine.list()]
            if names and not force and sys.stdin.isatty() and not await _confirmed(names):
                return FAILED
        for name in dict.fromkeys(names):
            try:
                count = await engine.destroy(name, checkpoints=checkpoints)
            except SandboxNotFound as error:
                if not force:
                    failures.append(error)
            except AtollError as error:
                failures.append(error)
            else:
                removed[name] = count
                if not context.as_json:
                    render.say(name)
    kept = {} if checkpoints else {name: count for name, count in removed.items() if count}
    if context.as_json:
        errors = [{**e.to_dict(), "hint": e.hint} for e in failures]
        render.emit_json({"removed": [*removed], "kept_checkpoints": kept, "errors": errors})
    else:
        for name, count in kept.items():
            what = "1 checkpoint of it is" if count == 1 else f"{count} checkpoints of it are"
            render.note(f"{name}: {what} kept; `atoll checkpoints {name} --delete-all` deletes them")
        for failure in failures:
            render.failure(failure, as_json=False)
        if every and not names:
            render.note("no sandboxes")
    return FAILED if failures else 0


async def _confirmed(names: Sequence[str]) -> bool:
    from atoll.surfaces.cli import terminal

    what = f"sandbox {names[0]}" if len(names) == 1 else f"all {len(names)} sandboxes ({', '.join(names)})"
    sys.stderr.write(f"Destroy {what}? [y/N]: ")
    sys.stderr.flush()
    return (await terminal.Keyboard().read()).strip().lower() in ("y", "yes")


def _used(info: SandboxInfo) -> str:
    return render.ago(info.last_used_at) if info.last_used_at else "never"


def _expires(info: SandboxInfo) -> str:
    if info.expires_at is None:
        return ""
    return render.until(info.expires_at) + {"destroy": "", "sleep": ", sleeps", "pause": ", is paused"}[info.on_expiry]


def _labels(info: SandboxInfo) -> str:
    """Without those that a server sets for itself: records for it, too long for a table."""
    from atoll.contract.model import RESERVED_LABELS

    own = sorted((key, value) for key, value in info.labels.items() if not key.startswith(RESERVED_LABELS))
    return ", ".join(f"{key}={value}" for key, value in own)


def _status(info: SandboxInfo) -> str:
    return f"{info.status}: {info.reason}" if info.reason else info.status


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
    pids += ", threads and the guest's own included"
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
        ("expires", _expires(info) or "never"),
        ("labels", _labels(info) or "none"),
        ("memory", memory),
        ("cpu time", cpu),
        ("pids", pids),
        ("disk", disk),
        *(("mount", str(mount)) for mount in info.mounts),
        ("oom kills", "?" if usage.oom_kills is None else str(usage.oom_kills)),
    ]
