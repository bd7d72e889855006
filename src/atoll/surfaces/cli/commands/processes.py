"""`ps`, `logs`, `wait` and `kill`: commands that run in sandboxes, or have ended there, and their output.

Not here: how commands are started (`exec.py`), how output is passed on (`streaming.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from atoll.contract.errors import InvalidRequest, ProcessNotFound
from atoll.surfaces.cli import ENGINE_FAILED, render, values
from atoll.surfaces.cli.command import AtollCommand, CommandContext, CommandModule, Work
from atoll.surfaces.cli.grammar import Argument, Option
from atoll.surfaces.cli.options import NameArgument, NumberArgument

if TYPE_CHECKING:
    from atoll.contract.model import ProcessInfo, SystemProcess
    from atoll.runtime.sandbox import Sandbox

SHOWN_ENDED = 10
"""How many ended commands `ps` shows."""
_FIRST_PROCESS = 1

commands = CommandModule()


@commands.command()
async def ps(
    context: CommandContext,
    name: Annotated[
        str | None,
        Argument(metavar="NAME", help="The sandbox.  [default: all that are running]", completes="sandbox"),
    ] = None,
    every: Annotated[
        bool, Option("--all", "-a", help="Show all ended commands, and the processes of Atoll itself.")
    ] = False,
) -> int:
    """List what runs in sandboxes, and what has ended.

    A command has an ID, which `logs`, `wait` and `kill` take; its children have none. Sandboxes that are paused or
    asleep are left as they are, and have nothing to show.
    """
    async with context.open_engine() as engine:
        found = {}
        for info in await engine.list() if name is None else [(await engine.get(name)).info]:
            sandbox = await engine.get(info.name)
            if (status := await sandbox.status()) == "running":
                found[info.name] = await _look(sandbox, every=every)
            elif name is not None:
                found[info.name] = _Processes([], [])
                if not context.as_json:
                    render.note(f"{name} is {status}: nothing runs in it")
    if context.as_json:
        documents = [{"sandbox": each, **processes.document()} for each, processes in found.items()]
        render.emit_json(documents if name is None else documents[0])
        return 0
    rows = [_row(each, command, process) for each, shown in found.items() for command, process in shown.running()]
    columns = ("SANDBOX", "ID", "PID", "PPID", "UID", "S", "MEMORY", "CPU", "COMMAND")
    first = 0 if name is None else 1
    if rows:
        render.table(columns[first:], [row[first:] for row in rows], flex=len(columns) - 1 - first)
    elif name is None or found[name].ended():
        render.note("nothing runs")
    if name is not None:
        _print_ended(found[name].ended(), limit=None if every else SHOWN_ENDED)
    return 0


class _Processes:
    """What runs in one sandbox, and what has run."""

    def __init__(self, commands: Sequence[ProcessInfo], processes: Sequence[SystemProcess]) -> None:
        self._commands = sorted(commands, key=lambda info: (info.exit_code is not None, -info.id))
        self._processes = processes

    def document(self) -> dict[str, object]:
        return {
            "commands": [info.model_dump(mode="json") for info in self._commands],
            "processes": [process.model_dump(mode="json") for process in self._processes],
        }

    def running(self) -> list[tuple[ProcessInfo | None, SystemProcess]]:
        """The processes, and which command each of them is, if it is one."""
        by_pid = {info.pid: info for info in self._commands if info.exit_code is None}
        return [(by_pid.get(process.pid), process) for process in self._processes]

    def ended(self) -> list[ProcessInfo]:
        """The commands that have ended, the latest first; before them those whose children still run."""
        ended = [info for info in self._commands if info.exit_code is not None]
        return sorted(ended, key=lambda info: not info.live)


async def _look(sandbox: Sandbox, *, every: bool) -> _Processes:
    processes = await sandbox.ps()
    # The guest is the first process, and what it forks for its work has its command line until it runs a command.
    guest = next((process.command for process in processes if process.pid == _FIRST_PROCESS), None)
    shown = [
        process
        for process in processes
        if every or process.command != guest or _FIRST_PROCESS not in (process.pid, process.ppid)
    ]
    return _Processes(await sandbox.processes(), shown)


def _row(sandbox: str, command: ProcessInfo | None, process: SystemProcess) -> tuple[str, ...]:
    return (
        sandbox,
        "" if command is None else str(command.id),
        str(process.pid),
        str(process.ppid),
        str(process.uid),
        process.state,
        render.human_bytes(process.rss_bytes),
        render.human_seconds(process.cpu_s),
        process.command,
    )


def _print_ended(ended: Sequence[ProcessInfo], limit: int | None) -> None:
    if not ended:
        return
    shown = ended[:limit]
    more = f", the latest {len(shown)} of {len(ended)}; --all shows all" if len(shown) < len(ended) else ""
    from atoll.runtime.sandbox import LOGIN_SHELL

    render.say(f"\nended commands{more}")
    rows = [
        (
            str(info.id),
            f"exit {info.exit_code}" + (", children still run" if info.live else ""),
            render.ago(info.started_at),
            "login shell" if info.command == LOGIN_SHELL else info.command,
        )
        for info in shown
    ]
    render.table(("ID", "STATE", "STARTED", "COMMAND"), rows, flex=3, indent=2)


@commands.command()
def logs(
    context: CommandContext,
    name: NameArgument,
    number: NumberArgument = None,
    follow: Annotated[bool, Option("--follow", "-f", help="Continue until the command ends.")] = False,
    since: Annotated[
        str | None,
        Option(
            "--since-offset",
            metavar="BYTES",
            help="Begin at this offset: one number for both streams, or STDOUT,STDERR.",
        ),
    ] = None,
) -> Work:
    """Print the kept output of a command."""
    return _logs(context, name, number, None if since is None else values.offsets(since), follow=follow)


async def _logs(
    context: CommandContext, name: str, number: int | None, since: tuple[int, int] | None, *, follow: bool
) -> int:
    from atoll.surfaces.cli import streaming

    async with context.open_engine() as engine:
        sandbox = await engine.get(name)
        info = _chosen(await sandbox.processes(), name, number)
        await streaming.logs(sandbox, info, since, follow=follow, as_json=context.as_json)
    return 0


class _WaitCommand(AtollCommand):
    failed_status = ENGINE_FAILED


@commands.command(cls=_WaitCommand)
async def wait(
    context: CommandContext,
    name: NameArgument,
    number: NumberArgument = None,
    output: Annotated[bool, Option("--output", "-o", help="Print its kept output, and what follows.")] = False,
    timeout: Annotated[
        float | None,
        Option(
            "--timeout",
            metavar="TIME",
            parser=values.duration,
            help="Stop waiting after this time: 30s, 5m. The command runs on.  [default: no time-out]",
        ),
    ] = None,
) -> int:
    """Wait until a command ends. The exit status is that of the command.

    It is 124 after a time-out, and 125 after an Atoll error.

    \b
    id=$(atoll exec --detach box -- make test)
    atoll wait box $id
    """
    from atoll.surfaces.cli import streaming

    async with context.open_engine() as engine:
        sandbox = await engine.get(name)
        info = _chosen(await sandbox.processes(), name, number)
        return await streaming.wait(sandbox, info, output=output, timeout_s=timeout, as_json=context.as_json)


class _KillCommand(AtollCommand):
    """A signal may also be given as `-9` or `-KILL`."""

    def prepared(self, words: list[str]) -> list[str]:
        return [f"--signal={word[1:]}" if re.fullmatch("-([0-9]+|[A-Z][A-Z0-9]{2,})", word) else word for word in words]


@commands.command(cls=_KillCommand)
def kill(
    context: CommandContext,
    name: NameArgument,
    numbers: Annotated[
        list[int] | None, Argument(metavar="ID", help="The numbers of the commands, as `atoll ps` shows them.")
    ] = None,
    signal: Annotated[
        int | None,
        Option(
            "--signal",
            "-s",
            metavar="SIGNAL",
            parser=values.signal_number,
            help="The signal: KILL, INT, 9.  [default: TERM]",
        ),
    ] = None,
) -> Work:
    """Send a signal to commands and to all their processes.

    \b
    atoll kill box 3
    atoll kill -9 box 3 4
    """
    if not numbers:
        raise InvalidRequest(
            f"no command is named; `atoll ps {name}` shows their numbers. `atoll stop {name}` ends all that runs in "
            f"the sandbox, `atoll rm {name}` destroys it"
        )
    return _kill(context, name, numbers, values.signal_number("TERM") if signal is None else signal)


async def _kill(context: CommandContext, name: str, numbers: Sequence[int], signal: int) -> int:
    async with context.open_engine() as engine:
        sandbox = await engine.get(name)
        processes = await sandbox.processes()
        for info in [_chosen(processes, name, number) for number in numbers]:
            if not info.live:
                raise ProcessNotFound(
                    f"command {info.id} of sandbox {name!r} has ended: exit {info.exit_code}", id=info.id
                )
        for number in numbers:
            await sandbox.kill(number, signal)
    value = {"sandbox": name, "ids": list(numbers), "signal": signal}
    return context.answer(value, "\n".join(map(str, numbers)))


def _chosen(processes: Sequence[ProcessInfo], name: str, number: int | None) -> ProcessInfo:
    """The command with this number, or the latest.

    Raises:
        ProcessNotFound: there is none with this number, or none at all.
    """
    if number is None:
        if not processes:
            raise ProcessNotFound(f"no command has been started in sandbox {name!r}")
        return max(processes, key=lambda info: info.id)
    for info in processes:
        if info.id == number:
            return info
    known = ", ".join(str(info.id) for info in processes[-8:]) or "none"
    raise ProcessNotFound(f"sandbox {name!r} has no command with number {number}; it has: {known}", id=number)
