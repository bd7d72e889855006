"""`run`, `exec` and `shell`: commands in a sandbox.

Not here: how a command's streams are connected to this process's, and when it is killed (`streaming.py`), those of code
(`--code`, `cells.py`); commands that run already (`processes.py`).
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated, Any

from atoll.contract.errors import InvalidRequest
from atoll.surfaces.cli import ENGINE_FAILED, render, values
from atoll.surfaces.cli.command import AtollCommand, CommandContext, CommandModule, Work
from atoll.surfaces.cli.grammar import Option
from atoll.surfaces.cli.options import (
    SANDBOX,
    CodeOption,
    CommandArgument,
    CwdOption,
    EnvFileOption,
    EnvOption,
    LanguageOption,
    NameArgument,
    OutOption,
    ShellLineOption,
    StdinOption,
    TimeoutOption,
    TtyOption,
    UserOption,
)

if TYPE_CHECKING:
    from atoll.runtime.interface import Engine
    from atoll.runtime.sandbox import Sandbox
    from atoll.surfaces.cli.cells import CodeOptions
    from atoll.surfaces.cli.sandbox_options import SandboxOptions
    from atoll.surfaces.cli.streaming import ExecOptions

commands = CommandModule()


class _RunCommand(AtollCommand):
    leading = 0
    resources = (*SANDBOX, "from_checkpoint")
    failed_status = ENGINE_FAILED


class _ExecCommand(AtollCommand):
    leading = 1
    failed_status = ENGINE_FAILED


class _ShellCommand(AtollCommand):
    leading = 1
    failed_status = ENGINE_FAILED
    has_json = False


@commands.command(cls=_RunCommand)
def run(
    context: CommandContext,
    command: CommandArgument = None,
    line: ShellLineOption = None,
    cwd: CwdOption = None,
    timeout: TimeoutOption = None,
    tty: TtyOption = False,
    stdin: StdinOption = None,
    keep: Annotated[bool, Option("--keep", help="Keep the sandbox when the command has ended.")] = False,
    name: Annotated[
        str | None, Option("--name", metavar="NAME", help="The sandbox's name.  [default: generated]")
    ] = None,
    code: CodeOption = None,
    language: LanguageOption = None,
    out: OutOption = None,
) -> Work:
    """Run a command in a new sandbox.

    The sandbox is destroyed when the command has ended, unless --keep is given. Output and exit status are those of the
    command; its input is empty without -i. Ctrl-C and SIGTERM kill the command and all its processes. The exit status
    is 124 after a time-out, 125 after an Atoll error and 2 after a wrong command line.

    \b
    atoll run -- python3 -c 'print(1)'
    atoll run -c 'echo $HOME | tr a-z A-Z'
    atoll run -i -- python3 - < script.py
    atoll run -t -- bash
    atoll run --code analysis.py --out figures
    """
    sandbox = context.sandbox_options()
    if _is_code(code, out or language, command, line, others=tty or stdin):
        given = _code(code, language, out, timeout_s=timeout, cwd=cwd, as_json=context.as_json)
        return _run(context, sandbox, given, name=name, keep=keep)
    words = _command(command, line)
    from atoll.surfaces.cli.streaming import ExecOptions

    options = ExecOptions(
        command=words, cwd=cwd, timeout_s=timeout, tty=tty, stdin=_passes_stdin(stdin, tty), as_json=context.as_json
    )
    return _run(context, sandbox, options, name=name, keep=keep)


async def _run(
    context: CommandContext,
    sandbox_options: SandboxOptions,
    options: ExecOptions | CodeOptions,
    *,
    name: str | None,
    keep: bool,
) -> int:
    from atoll.surfaces.cli.sandbox_options import create_sandbox

    async with context.open_engine() as engine, AsyncExitStack() as stack:
        sandbox = await create_sandbox(engine, sandbox_options, name, ephemeral=not keep)
        if keep:
            if name is None:
                render.note(f"the sandbox is kept as {sandbox.name}")
        else:
            await stack.enter_async_context(sandbox)
        return await _in_sandbox(engine, sandbox, options)


@commands.command(cls=_ExecCommand)
def exec(  # noqa: PLR0913, PLR0917 - each is an option of the command
    context: CommandContext,
    name: NameArgument,
    command: CommandArgument = None,
    line: ShellLineOption = None,
    env: EnvOption = None,
    env_file: EnvFileOption = None,
    user: UserOption = None,
    cwd: CwdOption = None,
    timeout: TimeoutOption = None,
    tty: TtyOption = False,
    stdin: StdinOption = None,
    detach: Annotated[bool, Option("--detach", "-d", help="Leave the command running and print its number.")] = False,
    code: CodeOption = None,
    language: LanguageOption = None,
    out: OutOption = None,
) -> Work | int:
    """Run a command in a sandbox.

    Output and exit status are those of the command; its input is empty without -i. Ctrl-C and SIGTERM kill the command
    and all its processes. The exit status is 124 after a time-out, 125 after an Atoll error and 2 after a wrong command
    line.

    \b
    atoll exec box -- make -j4
    tar c src | atoll exec -i box -- tar x
    atoll exec box --user root -c 'apt-get update && apt-get install -y jq'
    atoll exec box --detach -- python3 -m http.server
    atoll exec box --code analysis.py
    """
    variables = values.environment(env or [], env_file or [])
    if _is_code(code, out or language, command, line, others=tty or stdin or detach):
        given = _code(
            code, language, out, env=variables, user=user, cwd=cwd, timeout_s=timeout, as_json=context.as_json
        )
        return _exec(context, name, given)
    words = _command(command, line)
    if detach and timeout is not None:
        raise InvalidRequest("--timeout and --detach cannot be combined: a detached command has no time-out")
    if not (detach or tty or context.as_json):
        from atoll.surfaces.cli import direct_exec

        status = direct_exec.attempt(
            context.state_dir,
            context.namespace,
            name,
            words,
            env=variables,
            user=user,
            cwd=cwd,
            timeout_s=timeout,
            stdin=_passes_stdin(stdin, tty),
        )
        if status is not None:
            return status
    from atoll.surfaces.cli.streaming import ExecOptions

    options = ExecOptions(
        command=words,
        env=variables,
        user=user,
        cwd=cwd,
        timeout_s=timeout,
        tty=tty,
        stdin=_passes_stdin(stdin, tty),
        as_json=context.as_json,
    )
    return _detach(context, name, options) if detach else _exec(context, name, options)


async def _exec(context: CommandContext, name: str, options: ExecOptions | CodeOptions) -> int:
    async with context.open_engine() as engine:
        return await _in_sandbox(engine, await engine.get(name), options)


async def _in_sandbox(engine: Engine, sandbox: Sandbox, options: ExecOptions | CodeOptions) -> int:
    from atoll.surfaces.cli import streaming

    if isinstance(options, streaming.ExecOptions):
        return await streaming.run(sandbox, options)
    from atoll.surfaces.cli import cells

    return await cells.run(engine, sandbox, options)


async def _detach(context: CommandContext, name: str, options: ExecOptions) -> int:
    """Start a command, leave it running, and print its number."""
    from atoll.surfaces.cli import streaming

    async with context.open_engine() as engine:
        process = await streaming.detach(await engine.get(name), options)
    return context.answer({"sandbox": name, "id": process.id, "pid": process.pid}, str(process.id))


def _is_code(
    code: str | None, only_code: str | None, words: list[str] | None, line: str | None, *, others: object
) -> bool:
    """Whether a file of code is to be run instead of a command.

    Raises:
        InvalidRequest: both are given, or an option that is for the other.
    """
    if code is None:
        if only_code is not None:
            raise InvalidRequest("--out and --language are for --code FILE; give that too")
        return False
    if words or line is not None:
        raise InvalidRequest("both code (--code) and a command were given; give one of them")
    if others:
        raise InvalidRequest("--tty, --stdin and --detach are for commands; leave them out with --code")
    return True


def _code(file: str | None, language: str | None, out: str | None, **options: Any) -> CodeOptions:
    from pathlib import Path

    from atoll.surfaces.cli.cells import CodeOptions, language_of, read_code

    file, spoken = file or "-", language_of(language, file or "-")
    return CodeOptions(read_code(file), spoken, out=None if out is None else Path(out), **options)


def _passes_stdin(asked: bool | None, tty: bool) -> bool:
    """Whether the command gets our input. Not unless it is asked for: the input may be that of the loop we are in."""
    return tty if asked is None else asked


def _command(words: list[str] | None, line: str | None) -> str | list[str]:
    """The words of a command or a shell line: exactly one of them is given."""
    if words and line is not None:
        raise InvalidRequest(f"both a shell line (-c) and a command ({words[0]}) were given; give one of them")
    if line is not None:
        return line
    if not words:
        raise InvalidRequest("no command was given; write it after --, or a shell line after -c")
    return words


@commands.command(cls=_ShellCommand)
def shell(
    context: CommandContext,
    name: NameArgument,
    command: CommandArgument = None,
    env: EnvOption = None,
    env_file: EnvFileOption = None,
    user: UserOption = None,
    cwd: CwdOption = None,
) -> Work:
    """Open a shell in a sandbox, on this terminal.

    COMMAND is run instead, if given. If standard input is not a terminal, the shell has none either: it runs the
    commands that it reads, and ends with them.

    \b
    atoll shell box
    atoll shell box < setup.sh
    """
    variables = values.environment(env or [], env_file or [])
    from atoll.surfaces.cli.streaming import ExecOptions

    options = ExecOptions(command=command or "", env=variables, user=user, cwd=cwd, tty=True)
    return _shell(context, name, options)


async def _shell(context: CommandContext, name: str, options: ExecOptions) -> int:
    from atoll.surfaces.cli import streaming

    async with context.open_engine() as engine:
        return await streaming.shell(await engine.get(name), options)
