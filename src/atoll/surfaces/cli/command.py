"""What all commands share: their context, the options of the app, and how a command's work becomes an exit status.

Owns the classes of commands and groups. `--state-dir`, `--namespace` and `--json` are declared here once; every command
and group accepts them, so a user may write them before or after the command. A command class also names the resource
options that it takes. Not here: the commands themselves (`commands/`), how words are parsed (`grammar.py`), what the
resource options mean (`sandbox_options.py`), arguments that some commands share (`options.py`), errors (`finish` in the
package).

Imports nothing heavy, because `atoll --help` imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import cache
from types import CoroutineType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

from atoll import state_directory
from atoll.contract.errors import CallerError, InvalidRequest, install_extra
from atoll.contract.names import check_namespace
from atoll.surfaces.cli import FAILED, finish, render
from atoll.surfaces.cli.grammar import Option, Parameter, Parser, UsageError, parameters_of, similar

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.runtime.engine import LocalEngine
    from atoll.runtime.interface import Engine
    from atoll.server.server import Server
    from atoll.settings import Settings
    from atoll.surfaces.cli.sandbox_options import SandboxOptions

Work = Coroutine[Any, Any, int]
"""What a command does once its arguments are checked. Its value is the exit status."""
_F = TypeVar("_F", bound=Callable[..., Any])


def app_options(
    state_dir: Annotated[
        str | None,
        Option(
            "--state-dir",
            metavar="DIR",
            help="The directory of sandboxes and images.  [default: $ATOLL_STATE_DIR, else one of this user]",
        ),
    ] = None,
    namespace: Annotated[
        str | None,
        Option(
            "--namespace",
            metavar="NS",
            parser=check_namespace,
            help="Whose sandboxes, checkpoints and volumes.  [default: $ATOLL_NAMESPACE, else default]",
            completes="namespace",
        ),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON, also for errors.")] = False,
) -> None:
    """The options of the app. Only the signature is used: every command and group gets these parameters."""


@cache
def app_parameters() -> dict[str, Parameter]:
    return parameters_of(app_options)


@cache
def _resource_parameters() -> dict[str, Parameter]:
    from atoll.surfaces.cli.sandbox_options import sandbox_options

    return parameters_of(sandbox_options)


class CommandContext:
    """One call of a command: the options of the app, the resource options, and the way to the engine."""

    def __init__(self, command: AtollCommand | AtollGroup, parent: CommandContext | None) -> None:
        self._command = command
        self.command_path: str = f"{parent.command_path} {command.name}" if parent is not None else command.name
        self.as_json: bool = parent.as_json if parent is not None else False
        self.state_dir: str | None = parent.state_dir if parent is not None else None
        """None: the default of the engine."""
        self.namespace: str | None = parent.namespace if parent is not None else None
        """None: likewise."""
        self.resources: dict[str, Any] = {}
        """The values of the resource options that the command takes."""
        self.invoked_subcommand: str | None = None
        """The command of a group that is called next. None: none is."""

    def take_app_options(self, values: dict[str, Any]) -> dict[str, Any]:
        """Note the options of the app, and return the other values."""
        rest = {name: value for name, value in values.items() if name not in app_parameters()}
        self.as_json = self.as_json or values["as_json"]
        self.state_dir = self.state_dir if values["state_dir"] is None else values["state_dir"]
        self.namespace = self.namespace if values["namespace"] is None else values["namespace"]
        return rest

    def sandbox_options(self) -> SandboxOptions:
        """The sandbox that the resource options describe.

        Raises:
            InvalidRequest: an option has a wrong value.
        """
        from atoll.surfaces.cli.sandbox_options import sandbox_options

        return sandbox_options(**self.resources)

    def resolved_place(self) -> tuple[Path, str]:
        """The state directory, which may not exist, and the namespace, for what needs no engine."""
        from pathlib import Path

        from atoll.settings import Settings

        settings = Settings.from_environment()
        return Path(self.state_dir or settings.resolve_state_dir()), self.namespace or settings.namespace

    @property
    def server(self) -> str | None:
        """The address of the server whose sandboxes the command works with (ATOLL_URL). None: with those of this
        machine, as always if there is `--state-dir`."""
        return None if self.state_dir is not None else state_directory.server_url()

    def require_local(self) -> None:
        """For a command that is about this machine, or about the state directory itself.

        Raises:
            InvalidRequest: sandboxes are those of a server.
        """
        if (server := self.server) is not None:
            raise InvalidRequest(
                f"`{self.command_path}` works on the machine of the sandboxes; ATOLL_URL is {server}: run it there, "
                "or unset ATOLL_URL"
            )

    def open_engine(
        self, settings: Settings | None = None, *, namespace: str | None = None
    ) -> AbstractAsyncContextManager[Engine]:
        """An engine over the state directory and the namespace of the options, or over another namespace; or that of
        the server of ATOLL_URL, where a namespace is a tenant."""
        if self.server is not None:
            with needing_extra("a server (ATOLL_URL)", "client"):
                from atoll.client.engine import connect
            return connect(tenant=namespace or self.namespace, settings=settings)
        from atoll.runtime.engine import open as open_engine

        return open_engine(self.state_dir, namespace=namespace or self.namespace, settings=settings)

    def open_local_engine(self) -> AbstractAsyncContextManager[LocalEngine]:
        """As `open_engine`, for a command that works on this machine alone.

        Raises:
            InvalidRequest: ATOLL_URL names a server.
        """
        self.require_local()
        return cast("AbstractAsyncContextManager[LocalEngine]", self.open_engine())

    def open_server(self) -> AbstractAsyncContextManager[Server]:
        """The data of a server over the state directory, which need not run. Its first start still makes the first key.

        Raises:
            CallerError: what the server needs is not installed.
            InvalidRequest: ATOLL_URL names a server, whose data may be elsewhere.
        """
        self.require_local()
        from pathlib import Path

        from atoll.settings import Settings

        settings = Settings.from_environment()
        if self.state_dir is not None:
            settings = settings.model_copy(update={"state_dir": Path(self.state_dir)})
        with needing_extra(f"`{self.command_path}`", "server"):
            from atoll.server.server import Server
        return Server.open(settings, makes_key=False)

    def answer(self, value: object, text: str) -> int:
        """Print a result, `value` as JSON or `text` for people, and return the exit status 0."""
        if self.as_json:
            render.emit_json(value)
        else:
            render.say(text)
        return 0

    def print_help(self) -> int:
        render.say(self._command.help(self.command_path))
        return 0


class AtollCommand:
    """A command. Its function is called with a `CommandContext` and returns its `Work`, or an exit status.

    An error before there is work is a wrong command line, with status 2: an `async def` function has no such errors, a
    `def` function checks its arguments and then calls an `async def` one.
    """

    resources: tuple[str, ...] = ()
    """The resource options that it takes: parameters of `sandbox_options`."""
    failed_status = FAILED
    """The exit status after an Atoll error."""
    has_json = True
    """False: `--json` is refused."""
    json_help: str | None = None
    """Replaces the usual help of `--json`."""
    leading: int | None = None
    """Of a command whose last argument is another command, which keeps its own options: how many arguments precede it.
    Our own options may be written before and after these; the first other word begins the command. `--` before it makes
    that explicit, and is needed if it begins with a dash."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.description = function.__doc__ or ""
        self._function = function

    def parameters(self) -> list[Parameter]:
        """All of them, those with `has_json` false included."""
        common = dict(app_parameters())
        if self.json_help is not None:
            import copy

            common["as_json"] = copy.copy(common["as_json"])
            common["as_json"].help = self.json_help
        resources = [_resource_parameters()[each] for each in self.resources]
        return [*parameters_of(self._function).values(), *resources, *common.values()]

    def shown_parameters(self) -> list[Parameter]:
        return [each for each in self.parameters() if self.has_json or each.name != "as_json"]

    def help(self, path: str) -> str:
        from atoll.surfaces.cli.usage import command_help

        return command_help(path, self.description, self.shown_parameters())

    def prepared(self, words: list[str]) -> list[str]:
        """The words as they are parsed. For a command with a grammar of its own."""
        return words

    def run(self, words: list[str], parent: CommandContext) -> int:
        """
        Raises:
            UsageError, InvalidRequest: the words are wrong.
        """
        context = CommandContext(self, parent)
        parser = Parser(self.parameters(), context.command_path)
        own, rest = parser.split(self.prepared(words), self.leading)
        if parser.wants_help:
            return context.print_help()
        values = context.take_app_options(parser.values([*own, *rest]))
        if context.as_json and not self.has_json:
            raise InvalidRequest(f"`{context.command_path}` has no JSON output; leave out --json")
        given = {name: values.pop(name) for name in self.resources}
        context.resources = {name: value for name, value in given.items() if value is not None}
        return _exit_status(context, self._function(context, **values), self.failed_status)


class AtollGroup:
    """A group of commands. Its function is called before a command of it, or alone if none is given: then it may return
    work too. A status that it returns is the end."""

    def __init__(self, name: str, description: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.description = description
        self._function = function
        self._commands: dict[str, AtollCommand | AtollGroup] = {}

    def add(self, command: AtollCommand | AtollGroup) -> None:
        self._commands[command.name] = command

    def commands(self) -> dict[str, AtollCommand | AtollGroup]:
        """All of them, in the order of the help."""
        return self._commands

    def find(self, name: str) -> AtollCommand | AtollGroup | None:
        return self._commands.get(name)

    def sections(self) -> dict[str, list[AtollCommand | AtollGroup]]:
        """The commands, below the headings of the help."""
        return {"Commands": [*self.commands().values()]}

    def expanded(self, words: list[str]) -> list[str]:
        """The words of a command, the first of which may be another name for it."""
        return words

    def suggested(self, name: str) -> list[str]:
        """The commands that may have been meant by a name that none has."""
        return similar(name, list(self.commands()))

    def shown_parameters(self) -> list[Parameter]:
        return [*parameters_of(self._function).values(), *app_parameters().values()]

    def help(self, path: str) -> str:
        from atoll.surfaces.cli.usage import command_help

        listed = {
            heading: [(each.name, each.description) for each in commands]
            for heading, commands in self.sections().items()
        }
        return command_help(path, self.description, self.shown_parameters(), listed)

    def run(self, words: list[str], parent: CommandContext | None = None) -> int:
        """
        Raises:
            UsageError, InvalidRequest: the words are wrong.
        """
        context = CommandContext(self, parent)
        parser = Parser(self.shown_parameters(), context.command_path)
        _, rest = parser.split(words, 0)
        if parser.wants_help:
            return context.print_help()
        rest = self.expanded(rest)
        values = context.take_app_options(parser.values([]))
        found = self.find(rest[0]) if rest else None
        context.invoked_subcommand = rest[0] if rest else None
        result = self._function(context, **values)
        if result is not None or not rest:
            return _exit_status(context, result, FAILED)
        if found is None:
            near = " or ".join(f"`{context.command_path} {each}`" for each in self.suggested(rest[0]))
            meant = f" Did you mean {near}?" if near else ""
            raise UsageError(f"No such command {rest[0]!r}.{meant}", context.command_path)
        return found.run(rest[1:], context)


def _exit_status(context: CommandContext, result: Any, failed_status: int) -> int:
    if isinstance(result, CoroutineType):
        return finish(result, as_json=context.as_json, failed=failed_status)
    return result or 0


def help_without_command(context: CommandContext) -> int | None:
    """What a group's function does that has nothing else to do: print the group's help if no command was given."""
    return context.print_help() if context.invoked_subcommand is None else None


class CommandModule:
    """What a module registers its commands with: a group if it has a `name`, else commands of the app."""

    def __init__(
        self, name: str | None = None, description: str = "", function: Callable[..., Any] = help_without_command
    ) -> None:
        self.group = AtollGroup(name, description, function) if name is not None else None
        self.commands: dict[str, AtollCommand | AtollGroup] = {name: self.group} if name and self.group else {}

    def command(self, name: str | None = None, cls: type[AtollCommand] = AtollCommand) -> Callable[[_F], _F]:
        """Register the decorated function as a command, by its own name if none is given."""

        def register(function: _F) -> _F:
            command = cls(name or function.__name__, function)
            if self.group is not None:
                self.group.add(command)
            else:
                self.commands[command.name] = command
            return function

        return register


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
        raise CallerError(f"{what} needs {missing}, which is not installed; {install_extra(extra)}") from error
