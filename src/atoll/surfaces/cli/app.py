"""The app: `atoll` itself, and which module has which command.

Only the module of the command that is called is imported. Not here: the commands (`commands/`), and what all of them
share (`command.py`). Used by `main` in the package.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Annotated

import atoll
from atoll.surfaces.cli import render
from atoll.surfaces.cli.command import (
    AtollCommand,
    AtollGroup,
    CommandContext,
    CommandModule,
    app_parameters,
    help_without_command,
)
from atoll.surfaces.cli.grammar import Option, Parameter, UsageError, parameters_of, similar

MODULES = {
    "exec": ("run", "exec", "shell"),
    "processes": ("ps", "logs", "wait", "kill"),
    "sandboxes": ("create", "update", "ls", "inspect", "stat", "top", "rm"),
    "files": ("cp",),
    "lifecycle": ("sleep", "wake", "pause", "resume", "warm", "gc"),
    "checkpoints": ("checkpoint", "checkpoints", "restore", "fork", "export", "import"),
    "network": ("network", "audit", "expose", "forward"),
    "images": ("images",),
    "build": ("build",),
    "templates": ("templates",),
    "volumes": ("volumes",),
    "storage": ("storage",),
    "agent": ("agent",),
    "mcp": ("mcp",),
    "messages": ("messages",),
    "python": ("python",),
    "approvals": ("approvals",),
    "trace": ("trace",),
    "pattern": ("pattern",),
    "serve": ("serve", "config"),
    "tenants": ("tenants",),
    "keys": ("keys",),
    "bundle": ("bundle",),
    "configs": ("configs",),
    "chat": ("chat",),
    "doctor": ("doctor", "version", "uninstall"),
}
"""The modules in `commands/`, in the order of the help, and an index of their commands."""
HEADINGS = {
    "exec": "Run commands",
    "sandboxes": "Sandboxes",
    "checkpoints": "Checkpoints and copies",
    "network": "Network",
    "images": "Images and storage",
    "agent": "Models",
    "python": "Code that calls tools",
    "serve": "Server",
    "bundle": "Agents of a server",
    "doctor": "This installation",
}
"""The headings of the help, and the modules that they stand before."""
_DESCRIPTION = """Give every AI agent its own Linux machine, on your own hardware.

With ATOLL_URL and ATOLL_API_KEY set, commands work with the sandboxes of that server (`atoll serve`)."""
ALIASES = {
    "delete": ("rm",),
    "list": ("ls",),
    "start": ("wake",),
    "stop": ("sleep", "--shutdown"),
}
"""Other names of commands, which the help does not list: as other tools call them."""
_SYNONYMS = {
    "approve": ("approvals allow",),
    "attach": ("logs --follow", "shell"),
    "clone": ("fork",),
    "commit": ("checkpoint",),
    "deny": ("approvals deny",),
    "destroy": ("rm",),
    "info": ("inspect", "doctor"),
    "pool": ("warm",),
    "port": ("expose", "forward"),
    "prewarm": ("warm",),
    "prune": ("gc",),
    "pull": ("images pull",),
    "remove": ("rm",),
    "rename": ("fork NAME NEW-NAME",),
    "repl": ("python",),
    "show": ("inspect",),
    "snapshot": ("checkpoint",),
    "snapshots": ("checkpoints",),
    "ssh": ("shell",),
    "stats": ("top", "stat"),
    "terminate": ("rm",),
    "unpause": ("resume",),
}
"""What the words of other tools are called here."""
_HABITS: tuple[tuple[str, str, str], ...] = (
    ("run create agent mcp", "-v --volume", "`--mount SRC:DST` mounts a directory, with `:rw` after it to write"),
    ("run create", "-p --publish", "`atoll expose NAME PORT` and `atoll forward NAME PORT` open a port"),
    ("run create agent mcp", "--net --network", "`--allow RULE` allows egress; without it there is none"),
    ("run create exec shell agent mcp", "--workdir", "`--cwd DIR` is where commands start"),
    ("run", "--rm", "leave it out: the sandbox of `atoll run` is always removed"),
    ("run", "-d --detach", "`atoll create NAME` and `atoll exec --detach NAME -- COMMAND` run it in the background"),
    ("cp", "-r -R -a --recursive --archive", "leave it out: a directory is copied with its content"),
    ("ls", "-a --all", "leave it out: all are listed"),
)
"""Options that other tools have: the commands and options that are meant, and what does it here."""


def root(
    context: CommandContext,
    show_version: Annotated[bool, Option("--version", help="Print the version and exit.")] = False,
    install_completion: Annotated[
        bool, Option("--install-completion", help="Install completion for the current shell.")
    ] = False,
    show_completion: Annotated[
        bool,
        Option(
            "--show-completion", help="Show completion for the current shell, to copy it or customize the installation."
        ),
    ] = False,
) -> int | None:
    if show_version:
        render.say(f"atoll {atoll.__version__}")
        return 0
    if install_completion or show_completion:
        from atoll.surfaces.cli import completion

        shell = completion.current_shell()
        if show_completion:
            render.say(completion.script(shell).rstrip())
        else:
            render.say(f"{shell} completion installed in {completion.install(shell)}; it works in new terminals")
        return 0
    return help_without_command(context)


class App(AtollGroup):
    """The commands of all modules."""

    def __init__(self) -> None:
        super().__init__("atoll", _DESCRIPTION, root)

    def shown_parameters(self) -> list[Parameter]:
        version, *completions = parameters_of(root).values()
        return [version, *app_parameters().values(), *completions]

    def commands(self) -> dict[str, AtollCommand | AtollGroup]:
        return {name: command for module in MODULES for name, command in _load(module).items()}

    def sections(self) -> dict[str, list[AtollCommand | AtollGroup]]:
        sections: dict[str, list[AtollCommand | AtollGroup]] = {}
        heading = ""
        for module in MODULES:
            heading = HEADINGS.get(module, heading)
            sections.setdefault(heading, []).extend(_load(module).values())
        return sections

    def expanded(self, words: list[str]) -> list[str]:
        return [*ALIASES.get(words[0], words[:1]), *words[1:]] if words else words

    def suggested(self, name: str) -> list[str]:
        names = [name for names in MODULES.values() for name in names]
        return [*_SYNONYMS.get(name, ())] or similar(name, [*names, *ALIASES])

    def find(self, name: str) -> AtollCommand | AtollGroup | None:
        for module, names in MODULES.items():
            if name in names:
                return _load(module)[name]
        return None

    def completions(self, words: list[str], last: str) -> list[tuple[str, str]]:
        """The words that begin with `last` and may follow `words`, and their descriptions. None: files may follow."""
        from atoll.surfaces.cli.completion import TypedLine

        command: AtollCommand | AtollGroup = self
        line = TypedLine()
        while isinstance(command, AtollGroup):
            words = command.expanded(line.take(command.shown_parameters(), words, leading=0))
            found = command.find(words[0]) if words else None
            if found is None:
                return line.of_group(command, last) if not words else []
            command, words = found, words[1:]
        line.take(command.shown_parameters(), words, leading=command.leading)
        return line.of_command(command, last)


def usage_hint(error: UsageError) -> str:
    """What helps with words that cannot be parsed."""
    command = error.command_path.removeprefix("atoll ")
    for commands, options, hint in _HABITS:
        if command in commands.split() and error.option in options.split():
            return hint
    return f"`{error.command_path} --help` shows the arguments and options"


def _load(module: str) -> dict[str, AtollCommand | AtollGroup]:
    commands: CommandModule = import_module(f"atoll.surfaces.cli.commands.{module}").commands
    return commands.commands


def run(words: list[str]) -> int:
    """Run the command line, or answer a shell that completes one.

    Raises:
        UsageError, InvalidRequest: the words are wrong.
    """
    app = App()
    asked, _, shell = os.environ.get("_ATOLL_COMPLETE", "").partition("_")
    if asked not in ("complete", "source"):
        return app.run(words)
    from atoll.surfaces.cli import completion

    if asked == "source":
        render.say(completion.script(shell).rstrip())
    else:
        render.say(completion.answer(shell, app.completions(*completion.typed_words())))
    return 0
