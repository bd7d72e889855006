"""Arguments and options that several commands share: their names, help texts and parsers.

Not here: `--state-dir` and `--json` (`command.py`), the options that describe a sandbox (`sandbox_options.py`), how
values are written (`values.py`). Imports nothing heavy, because `atoll --help` imports it.
"""

from __future__ import annotations

from typing import Annotated

import typer

from atoll.surfaces.cli import values
from atoll.tools.vocabularies import summary

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The sandbox.", show_default=False)]
CommandArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="COMMAND", help="The command and its arguments.", show_default=False),
]
CheckpointArgument = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="The checkpoint: its id, or its label.", show_default=False)
]
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint", metavar="CHECKPOINT", help="Use this checkpoint.  [default: the sandbox as it is now]"
    ),
]
ReferenceArgument = Annotated[
    str, typer.Argument(metavar="REF", help="The image reference: python:3.12.", show_default=False)
]
ShellLineOption = Annotated[
    str | None, typer.Option("--shell", "-c", metavar="LINE", help="Run this shell line instead of COMMAND.")
]
EnvOption = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        "-e",
        metavar="K=V",
        help="Set an environment variable; K alone takes the value from our environment. Repeatable.",
    ),
]
UserOption = Annotated[
    str | None,
    typer.Option("--user", "-u", metavar="USER", help="The user inside the sandbox.  [default: the sandbox's user]"),
]
CwdOption = Annotated[
    str | None, typer.Option("--cwd", "-w", metavar="DIR", help="The working directory.  [default: the sandbox's]")
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="TIME",
        parser=values.duration,
        help="Kill the command after this time: 30s, 5m, 500ms.  [default: no time-out]",
    ),
]
TtyOption = Annotated[bool, typer.Option("--tty", "-t", help="Give the command a terminal.")]
StdinOption = Annotated[bool, typer.Option("--stdin/--no-stdin", "-i/-n", help="Pass standard input to the command.")]
ToolsOption = Annotated[
    str,
    typer.Option("--tools", metavar="NAMES", help=f"Vocabularies, separated by commas: {summary()}."),
]
