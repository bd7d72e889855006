"""The app: `atoll` itself, and which module has which command.

Only the module of the command that is called is imported: all of them take a tenth of a short command's time. Not here:
the commands (`commands/`), and what all of them share (`command.py`). Used by `main` in the package.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

from atoll.surfaces.cli import render
from atoll.surfaces.cli.command import AtollGroup, CommandContext, help_without_command

MODULES = {
    "exec": ("run", "exec", "shell", "logs"),
    "sandboxes": ("create", "ls", "ps", "stat", "rm"),
    "files": ("cp",),
    "lifecycle": ("sleep", "wake", "pause", "resume", "warm", "gc"),
    "checkpoints": ("checkpoint", "checkpoints", "restore", "fork", "export", "import"),
    "network": ("network", "audit", "expose", "forward"),
    "images": ("images",),
    "storage": ("storage",),
    "agent": ("agent",),
    "mcp": ("mcp",),
    "doctor": ("doctor", "version"),
}
"""The modules in `commands/`, in the order of the help, and an index of their commands."""


class _App(AtollGroup):
    """The commands of all modules. One that the index lacks is found too, by importing all modules."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._loaded: list[typer.Typer] = []

    def list_commands(self, ctx: Any) -> list[str]:
        for module in MODULES:
            self._load(module)
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        for module in [module for module, names in MODULES.items() if cmd_name in names] or MODULES:
            self._load(module)
        return super().get_command(ctx, cmd_name)

    def _load(self, module: str) -> None:
        commands = import_module(f"atoll.surfaces.cli.commands.{module}").commands
        if commands not in self._loaded:
            self._loaded.append(commands)
            group = typer.main.get_group(commands)
            self.commands.update({group.name: group} if group.name else group.commands)


app = typer.Typer(
    name="atoll",
    cls=_App,
    help="Give every AI agent its own Linux machine, on your own hardware.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback(invoke_without_command=True)
def root(
    context: CommandContext,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if show_version:
        render.say(f"atoll {installed_version()}")
        raise typer.Exit
    help_without_command(context)


def installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("atoll")
    except PackageNotFoundError:
        return "unknown (not installed)"
