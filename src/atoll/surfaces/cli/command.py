"""What all commands share: their context, the options of the app, and how a command's work becomes an exit status.

Owns the classes that typer builds commands and groups from. `--state-dir` and `--json` are declared here once; every
command and group accepts them, so a user may write them before or after the command. A command class also names the
resource options that it takes. Not here: the commands themselves (`commands/`), what the resource options mean
(`sandbox_options.py`), arguments that some commands share (`options.py`), errors (`finish` in the package).

Imports typer and nothing heavy, because `atoll --help` imports it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from atoll.contract.errors import CallerError, InvalidRequest
from atoll.surfaces.cli import FAILED, finish, render
from atoll.surfaces.cli.sandbox_options import SandboxOptions, sandbox_options

if TYPE_CHECKING:
    from atoll.runtime.engine import Engine
    from atoll.settings import Settings

Work = Coroutine[Any, Any, int]
"""What a command does once its arguments are checked. Its value is the exit status."""


def app_options(
    state_dir: Annotated[
        Path | None,
        typer.Option(
            "--state-dir",
            metavar="DIR",
            help="The directory of sandboxes and images.  [default: $ATOLL_STATE_DIR, else one of this user]",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, also for errors.")] = False,
) -> None:
    """The options of the app. Only the signature is used: every command and group gets these parameters."""


@cache
def _parameters(declaration: Callable[..., Any]) -> dict[str, Any]:
    """The parameters that typer reads from a function's signature, by name."""
    reader = typer.Typer(add_completion=False)
    reader.command()(declaration)
    return {str(parameter.name): parameter for parameter in typer.main.get_command(reader).params}


class CommandContext(typer.Context):
    """One call of a command: the options of the app, the resource options, and the way to the engine."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.resources: dict[str, Any] = {}
        """The values of the resource options that the command takes."""

    @property
    def as_json(self) -> bool:
        return bool(self.meta.get("as_json"))

    @property
    def state_dir(self) -> Path | None:
        """None: the default of the engine."""
        return self.meta.get("state_dir")

    def sandbox_options(self) -> SandboxOptions:
        """The sandbox that the resource options describe.

        Raises:
            InvalidRequest: an option has a wrong value.
        """
        return sandbox_options(**self.resources)

    def open_engine(self, settings: Settings | None = None) -> AbstractAsyncContextManager[Engine]:
        from atoll.runtime.engine import open as open_engine

        return open_engine(self.state_dir, settings=settings)

    def answer(self, value: object, text: str) -> int:
        """Print a result, `value` as JSON or `text` for people, and return the exit status 0."""
        if self.as_json:
            render.emit_json(value)
        else:
            render.say(text)
        return 0

    def take(self, names: Iterable[str]) -> dict[str, Any]:
        """Remove parameters that the command's function does not declare, and return those that were given."""
        values = {name: self.params.pop(name, None) for name in names}
        return {name: value for name, value in values.items() if value is not None and value is not False}


class AtollCommand(TyperCommand):
    """A command. Its function is called with a `CommandContext` and returns its `Work`, or an exit status.

    An error before there is work is a wrong command line, with status 2: an `async def` function has no such errors, a
    `def` function checks its arguments and then calls an `async def` one.
    """

    context_class = CommandContext
    resources: tuple[str, ...] = ()
    """The resource options that it takes: parameters of `sandbox_options`."""
    failed_status = FAILED
    """The exit status after an Atoll error."""
    has_json = True
    """False: `--json` is refused."""
    json_help: str | None = None
    """Replaces the usual help of `--json`."""

    def __init__(self, name: str | None, *, params: list[Any] | None = None, **settings: Any) -> None:
        resources = [_parameters(sandbox_options)[each] for each in self.resources]
        common = dict(_parameters(app_options))
        json = common["as_json"] = copy.copy(common["as_json"])
        json.help, json.hidden = self.json_help or json.help, not self.has_json
        super().__init__(name, params=[*(params or []), *resources, *common.values()], **settings)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        ctx.meta.update(ctx.take(_parameters(app_options)))
        ctx.resources = ctx.take(self.resources)
        return rest

    def invoke(self, ctx: Any) -> Any:
        if ctx.as_json and not self.has_json:
            raise InvalidRequest(f"`{ctx.command_path}` has no JSON output; leave out --json")
        return _exit_status(ctx, super().invoke(ctx), self.failed_status)


class AtollGroup(TyperGroup):
    """A group of commands. Without a command, its own function is called, which may return work too."""

    context_class = CommandContext

    def __init__(self, *, params: list[Any] | None = None, **settings: Any) -> None:
        super().__init__(params=[*(params or []), *_parameters(app_options).values()], **settings)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        ctx.meta.update(ctx.take(_parameters(app_options)))
        return rest

    def invoke(self, ctx: Any) -> Any:
        return _exit_status(ctx, super().invoke(ctx), FAILED)


def _exit_status(context: CommandContext, result: Any, failed_status: int) -> int:
    if inspect.iscoroutine(result):
        return finish(result, as_json=context.as_json, failed=failed_status)
    return result or 0


def command_module(**settings: Any) -> typer.Typer:
    """What a module registers its commands with: a group if it has a `name`, else commands of the app."""
    return typer.Typer(rich_markup_mode=None, add_completion=False, **settings)


@contextmanager
def needing_extra(what: str, extra: str) -> Iterator[None]:
    """For work that imports what the extra `atoll[…]` installs. `what` is the work, in the message.

    Raises:
        CallerError: a package of the extra is not installed; the message says how to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "atoll").partition(".")[0]
        if missing == "atoll":
            raise
        raise CallerError(
            f"{what} needs {missing}, which is not installed; install the extra: pip install 'atoll[{extra}]'"
        ) from error


def help_without_command(context: CommandContext) -> None:
    """What a group's function does that has nothing else to do: print the group's help if no command was given."""
    if context.invoked_subcommand is None:
        render.say(context.get_help())
        raise typer.Exit


class CommandLast(AtollCommand):
    """A command whose last argument is another command, which keeps its own options.

    Our own options may be written before and after the arguments that precede it; the first other word begins the
    command. `--` before it makes that explicit, and is needed if it begins with a dash.
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
    """As `CommandLast`, after the name of a sandbox."""

    leading = 1


def _holds_value(word: str, takes_value: dict[str, bool]) -> bool:
    """Whether a short option that takes a value has it attached: `-cLINE`."""
    return not word.startswith("--") and any(takes_value.get(f"-{letter}", False) for letter in word[1:-1])
