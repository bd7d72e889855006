"""`python`: a prompt on a code session.

Not here: the prompt (`repl.py`), code in a file (`exec --code`).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

from atoll.contract.errors import InvalidRequest, SandboxNotFound
from atoll.surfaces.cli import FAILED, render, report
from atoll.surfaces.cli.command import AtollCommand, CommandContext, CommandModule, Work
from atoll.surfaces.cli.grammar import Argument
from atoll.surfaces.cli.options import SANDBOX, LanguageOption
from atoll.surfaces.cli.sandbox_options import SandboxOptions, create_sandbox

if TYPE_CHECKING:
    from atoll.code.languages import LanguageName
    from atoll.runtime.interface import Engine
    from atoll.runtime.sandbox import Sandbox

commands = CommandModule()


class _PythonCommand(AtollCommand):
    resources = (*SANDBOX, "cwd")
    has_json = False


@commands.command(cls=_PythonCommand)
def python(
    context: CommandContext,
    name: Annotated[
        str | None,
        Argument(
            metavar="NAME",
            help="The sandbox; it is created if there is none.  [default: a temporary one]",
            completes="sandbox",
        ),
    ] = None,
    language: LanguageOption = None,
) -> Work | int:
    """Type Python, or another language, that runs in a sandbox.

    Top-level await works. Tab completes, the arrows go through the history. Ctrl-C interrupts what runs, Ctrl-D leaves.
    Images that are shown are saved, and their paths printed. In the sandbox NAME, variables are there the next time.
    Without a terminal on standard input, all of it is one piece of code.

    \b
    atoll python
    atoll python box --image python:3.12
    atoll python < script.py
    atoll python --language javascript
    """
    options = context.sandbox_options()
    from atoll.surfaces.cli import cells, terminal

    spoken = cells.language_of(language)
    if options.reads_stdin:
        raise InvalidRequest("the value of a secret cannot be read from standard input, which has the code")
    if not os.isatty(terminal.STDIN):
        return _once(context, name, options, spoken)
    from atoll.surfaces.cli import repl

    @asynccontextmanager
    async def find(engine: Engine) -> AsyncIterator[Sandbox]:
        async with _sandbox(engine, context, name, options) as sandbox:
            yield sandbox

    return report(
        lambda: repl.hold(context.open_engine(), find, spoken, kept=name is not None), as_json=False, failed=FAILED
    )


async def _once(context: CommandContext, name: str | None, options: SandboxOptions, language: LanguageName) -> int:
    from atoll.surfaces.cli import cells

    code = cells.CodeOptions(language=language, code=cells.read_code("-"))
    async with context.open_engine() as engine, _sandbox(engine, context, name, options) as sandbox:
        return await cells.run(engine, sandbox, code)


@asynccontextmanager
async def _sandbox(
    engine: Engine, context: CommandContext, name: str | None, options: SandboxOptions
) -> AsyncIterator[Sandbox]:
    """The sandbox NAME, which stays, or a new one, which does not."""
    if name is None:
        async with await create_sandbox(engine, options, None, ephemeral=True) as sandbox:
            yield sandbox
        return
    try:
        found = await engine.get(name)
    except SandboxNotFound:
        found = await create_sandbox(engine, options, name, ephemeral=False)
        render.note(f"created the sandbox {name}")
    else:
        if context.resources:
            raise InvalidRequest(f"the sandbox {name!r} exists; leave out the options that describe a new one")
    yield found
