"""Arguments and options that several commands share: their names, help texts and parsers.

Not here: `--state-dir`, `--namespace` and `--json` (`command.py`), the options that describe a sandbox
(`sandbox_options.py`), how values are written (`values.py`). Imports nothing heavy, because `atoll --help` imports it.
"""

from __future__ import annotations

from typing import Annotated

from atoll.surfaces.cli import values
from atoll.surfaces.cli.grammar import Argument, Option

RUNTIMES = ("crun", "runc", "runsc", "bwrap")
"""The runtimes that come with Atoll: `registry.BUILT_IN`, which help must not wait for. A test compares."""

NameArgument = Annotated[str, Argument(metavar="NAME", help="The sandbox.", completes="sandbox")]
NumberArgument = Annotated[
    int | None,
    Argument(metavar="ID", help="The command's number, as `atoll ps` shows it.  [default: the latest]"),
]
CommandArgument = Annotated[
    list[str] | None,
    Argument(metavar="COMMAND", help="The command and its arguments."),
]
CheckpointArgument = Annotated[
    str, Argument(metavar="CHECKPOINT", help="The checkpoint: its id, or its label.", completes="checkpoint")
]
CheckpointOption = Annotated[
    str | None,
    Option(
        "--checkpoint",
        metavar="CHECKPOINT",
        help="Use this checkpoint.  [default: the sandbox as it is now]",
        completes="checkpoint",
    ),
]
ReferenceArgument = Annotated[str, Argument(metavar="REF", help="The image reference: python:3.12.")]
ShellLineOption = Annotated[
    str | None, Option("--shell", "-c", metavar="LINE", help="Run this shell line instead of COMMAND.")
]
CodeOption = Annotated[
    str | None,
    Option(
        "--code",
        metavar="FILE",
        help="Run the code in this file instead of COMMAND; - reads standard input. Top-level await works, the value "
        "of the last line and a traceback are shown, and the exit status is 0, 1, or that of exit(n).",
    ),
]
LanguageOption = Annotated[
    str | None,
    Option(
        "--language",
        metavar="NAME",
        help="The language of the code: python, javascript or bash; the image needs python3, node or bash."
        "  [default: by the suffix of a file, else python]",
    ),
]
OutOption = Annotated[
    str | None,
    Option("--out", metavar="DIR", help="With --code: save images that are shown, and files in ./outbox, here."),
]
EnvOption = Annotated[
    list[str] | None,
    Option(
        "--env",
        "-e",
        metavar="K=V",
        help="Set an environment variable; K alone takes the value from our environment. Repeatable.",
    ),
]
LabelOption = Annotated[
    list[str] | None,
    Option("--label", metavar="K=V", help="A label, to find the sandbox by: team=search. Repeatable."),
]
EnvFileOption = Annotated[
    list[str] | None,
    Option(
        "--env-file",
        metavar="FILE",
        help="Set the variables in this file: K=V or K on each line; # begins a comment. --env overrides them. "
        "Repeatable.",
    ),
]
UserOption = Annotated[
    str | None,
    Option("--user", "-u", metavar="USER", help="The user inside the sandbox.  [default: the sandbox's user]"),
]
CwdOption = Annotated[
    str | None, Option("--cwd", "-w", metavar="DIR", help="The working directory.  [default: the sandbox's]")
]
TimeoutOption = Annotated[
    float | None,
    Option(
        "--timeout",
        metavar="TIME",
        parser=values.duration,
        help="Kill the command after this time: 30s, 5m, 500ms.  [default: no time-out]",
    ),
]
TtyOption = Annotated[bool, Option("--tty", "-t", help="Give the command a terminal, and what is typed.")]
StdinOption = Annotated[
    bool | None,
    Option(
        "--stdin/--no-stdin",
        "-i/-n",
        help="Pass standard input to the command. Without it the command's input is empty.  [default: only with --tty]",
    ),
]


LIMITS = ("memory", "cpus", "pids", "open_files", "disk")
TEMPLATE = ("image", "runtime", *LIMITS)
"""The resource options (`sandbox_options.py`) of what a warm pool keeps sandboxes of."""
SANDBOX = (
    *TEMPLATE,
    *("mount", "env", "env_file", "allow", "secret", "secret_env", "user", "pause_after", "sudo", "label"),
    *("ttl", "on_expiry", "ttl_renewed_by_use"),
)
"""All of them."""
DEFAULT_TOOLS = "workspace"
"""The vocabulary of commands that name none: `vocabularies.DEFAULT`, which help must not wait for. A test compares."""


def tools_option() -> Option:
    """`--tools`, in the annotation of a parameter: evaluated for the commands that have it."""
    from atoll.tools.vocabularies import summary

    return Option("--tools", metavar="NAMES", help=f"Vocabularies, separated by commas: {summary()}.")
