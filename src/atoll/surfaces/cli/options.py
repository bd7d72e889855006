"""Options and arguments that several commands share, and the ways in which some command lines are read.

It knows their names, help texts and values. It refuses to know the commands (`grammar`), and imports as little.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from atoll.surfaces.cli import values


class CommandLast(TyperCommand):
    """A command whose last argument is another command, which keeps its own options.

    Options of ours may stand before and after the arguments that precede it; the first word that is neither begins
    the other command. `--` before it makes that plain, and is needed when it begins with a dash.
    """

    leading = 0
    """How many arguments precede it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_value = {
            name: not getattr(param, "is_flag", False)
            for param in self.get_params(ctx)
            if param.param_type_name == "option"
            for name in (*param.opts, *param.secondary_opts)
        }
        options: list[str] = []
        arguments: list[str] = []
        rest = list(args)
        while rest and rest[0] != "--":
            word = rest[0]
            if word.startswith("-") and len(word) > 1:
                options.append(rest.pop(0))
                # Of flags that are written together, only the last can take the next word as its value.
                last = word if word.startswith("--") else f"-{word[-1]}"
                if "=" not in word and takes_value.get(last) and rest and not _holds_value(word, takes_value):
                    options.append(rest.pop(0))
            elif len(arguments) < self.leading:
                arguments.append(rest.pop(0))
            else:
                break
        if rest and rest[0] == "--":
            rest.pop(0)
        return super().parse_args(ctx, [*options, "--", *arguments, *rest])


class NameThenCommand(CommandLast):
    leading = 1


class MayHaveAddress(TyperCommand):
    """A command whose `--http` may stand without an address."""

    default = "127.0.0.1:8000"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        said = list(args)
        for index, word in enumerate(args):
            if word == "--http" and (index + 1 == len(args) or args[index + 1].startswith("-")):
                said[index] = f"--http={self.default}"
        return super().parse_args(ctx, said)


def _holds_value(word: str, takes_value: dict[str, bool]) -> bool:
    """Whether a short option that takes a value has it attached: `-cLINE`."""
    return not word.startswith("--") and any(takes_value.get(f"-{letter}", False) for letter in word[1:-1])


StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        metavar="DIR",
        help="Where sandboxes and images are kept.  [default: $ATOLL_STATE_DIR, else this user's]",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, errors too.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The sandbox.", show_default=False)]
Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="COMMAND", help="The command and its arguments, as they are.", show_default=False),
]
Reference = Annotated[str, typer.Argument(metavar="REF", help="The image: python:3.12.", show_default=False)]
ShellLine = Annotated[
    str | None, typer.Option("--shell", "-c", metavar="LINE", help="Run this shell line instead of COMMAND.")
]
Image = Annotated[
    str | None,
    typer.Option(
        "--image",
        metavar="REF",
        help="What it is made from: host, dir:PATH, tar:PATH, or python:3.12 from a registry."
        "  [default: $ATOLL_IMAGE, else host]",
    ),
]
RuntimeOption = Annotated[
    str | None,
    typer.Option("--runtime", metavar="NAME", help="crun, runc or runsc.  [default: $ATOLL_RUNTIME, else the fastest]"),
]
Memory = Annotated[
    int | None,
    typer.Option("--memory", "-m", metavar="SIZE", parser=values.size, help="Memory in all: 512m, 1.5g."),
]
Cpus = Annotated[float | None, typer.Option("--cpus", metavar="N", help="Processor cores: 1.5.")]
Pids = Annotated[int | None, typer.Option("--pids", metavar="N", help="Processes and threads.")]
OpenFiles = Annotated[int | None, typer.Option("--open-files", metavar="N", help="Open files per process.")]
Disk = Annotated[
    int | None,
    typer.Option("--disk", metavar="SIZE", parser=values.size, help="What it may write, in all: 512m, 10g."),
]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", "-e", metavar="K=V", help="An environment variable; K alone passes on ours. Repeatable."),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="RULE",
        help="What may leave it: example.com, *.example.com:443, 10.0.0.0/8:5432, registries. Repeatable."
        "  [default: nothing]",
    ),
]
Secrets = Annotated[
    list[str] | None,
    typer.Option(
        "--secret",
        metavar="NAME[=FROM]@HOST",
        help="A secret that stays outside, for these hosts alone: NAME=FROM@HOST,HOST:HEADER. FROM is a variable of "
        "ours, file:PATH or - for standard input.  [default: NAME, authorization] Repeatable.",
    ),
]
SecretEnv = Annotated[
    list[str] | None,
    typer.Option(
        "--secret-env",
        metavar="NAME[=FROM]",
        help="An environment variable that nobody outside is shown; FROM as for --secret. Repeatable.",
    ),
]
User = Annotated[
    str | None, typer.Option("--user", "-u", metavar="USER", help="Who it runs as.  [default: the sandbox's user]")
]
Cwd = Annotated[str | None, typer.Option("--cwd", "-w", metavar="DIR", help="Where it runs.  [default: the home]")]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", metavar="TIME", parser=values.duration, help="Kill it after this time: 30s, 5m, 500ms."),
]
Tty = Annotated[bool, typer.Option("--tty", "-t", help="Give it a terminal.")]
Stdin = Annotated[bool, typer.Option("--stdin/--no-stdin", "-i/-n", help="Pass standard input to it.")]
