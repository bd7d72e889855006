"""`agent`: a conversation with a model that works in sandboxes.

Not here: the turns (`conversation.py`), how they are shown (`transcript.py`), how a model is called (`agents/`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from atoll.contract.errors import InvalidRequest
from atoll.surfaces.cli import render
from atoll.surfaces.cli.command import AtollCommand, CommandContext, CommandModule, Work
from atoll.surfaces.cli.grammar import Argument, Option
from atoll.surfaces.cli.options import DEFAULT_TOOLS, SANDBOX, tools_option
from atoll.surfaces.cli.sandbox_options import starting_in_mount

commands = CommandModule()


class _AgentCommand(AtollCommand):
    """Its `--here` may be given without a directory."""

    resources = (*SANDBOX, "cwd")
    json_help = "Print each event as a line of JSON, also errors."

    def prepared(self, words: list[str]) -> list[str]:
        """`--here`, then a directory or what comes next: a word that is a directory, or looks like a path, is one."""
        prepared = list(words)
        for index, word in enumerate(words):
            if word == "--here" and not (index + 1 < len(words) and _is_directory(words[index + 1])):
                prepared[index] = "--here=."
        return prepared


def _is_directory(word: str) -> bool:
    return os.path.isdir(word) or (word.startswith(("/", "./", "../")) and " " not in word)


@commands.command(cls=_AgentCommand)
def agent(  # noqa: PLR0913, PLR0917 - each is an option
    context: CommandContext,
    prompt: Annotated[
        str | None,
        Argument(
            metavar="PROMPT",
            help="The prompt; - reads standard input.  [default: standard input, or a conversation on a terminal]",
        ),
    ] = None,
    model: Annotated[
        str | None,
        Option(
            "--model",
            metavar="MODEL",
            help="anthropic:NAME, bedrock:NAME, openai:NAME, ollama:NAME or script:FILE.  [default: $ATOLL_MODEL, else "
            "one of Anthropic's]",
        ),
    ] = None,
    tools: Annotated[str, tools_option()] = DEFAULT_TOOLS,
    code: Annotated[
        bool,
        Option(
            "--code",
            help="Let the model also write Python that calls these tools: results stay in the code, and only what it "
            "prints is sent to the model.",
        ),
    ] = False,
    instructions: Annotated[
        str | None,
        Option("--instructions", metavar="TEXT", help="Add this to the system prompt; @FILE reads it from a file."),
    ] = None,
    system: Annotated[
        str | None,
        Option(
            "--system",
            metavar="TEXT",
            help="The system prompt; @FILE reads it from a file.  [default: one that describes the sandboxes]",
        ),
    ] = None,
    steps: Annotated[
        int,
        Option("--steps", metavar="N", help="Limit of requests to the model in a turn."),
    ] = 50,
    tokens: Annotated[
        int | None,
        Option("--tokens", metavar="N", help="Limit of tokens, those of child sessions included.  [default: no limit]"),
    ] = None,
    session: Annotated[
        str | None,
        Option(
            "--session",
            metavar="NAME",
            help="Keep the sandboxes for the next time.  [default: destroy them at the end]",
        ),
    ] = None,
    history: Annotated[
        Path | None,
        Option("--history", metavar="FILE", help="Continue the conversation in this file, and save it there."),
    ] = None,
    ask: Annotated[bool, Option("--ask", help="Ask before each tool call that may destroy something.")] = False,
    here: Annotated[
        Path | None,
        Option(
            "--here",
            metavar="[DIR]",
            help="Copy this directory, or DIR, into the sandbox, without what git ignores, and let the model work on "
            "the copy. At the end its changes are shown as a diff, and applied if you say yes.",
        ),
    ] = None,
    apply: Annotated[bool, Option("--apply", help="With --here: apply the changes without asking.")] = False,
    no_apply: Annotated[bool, Option("--no-apply", help="With --here: only show the changes.")] = False,
    patch: Annotated[
        Path | None,
        Option("--patch", metavar="FILE", help="With --here: write the changes to a patch file instead."),
    ] = None,
) -> Work:
    """Let a model work in sandboxes of its own, and watch it.

    The model's text goes to standard output, everything else to standard error. Without PROMPT, on a terminal, this is
    a conversation: Ctrl-C ends a turn and what runs in it, an empty line ends the conversation.

    There are two ways to give it a directory of yours. With --here it works on a copy, and you decide about its changes
    at the end. With --mount DIR:/work:rw it works in the directory itself, and changes are made at once.

    \b
    atoll agent "How fast is this machine's disk?"
    atoll agent --here "Make the tests pass"
    atoll agent --mount .:/work:rw "Make the tests pass"
    atoll agent --code "Which of these 500 log files has the slowest request?"
    atoll agent --tools coding --session fix --history fix.json --ask "Build a web server"
    """
    sandbox = context.sandbox_options()
    if here is None:
        sandbox = starting_in_mount(sandbox)
    if not context.as_json and sys.stderr.isatty():
        render.note("starting …")  # the packages for models take a second or more to load
    try:
        import atoll.agents  # noqa: F401
    except ImportError as error:
        raise InvalidRequest(str(error)) from error
    from atoll.surfaces.cli import conversation

    options = conversation.AgentOptions(
        prompt=prompt,
        model=model,
        tools=tools,
        code=code,
        instructions=instructions,
        system=system,
        steps=steps,
        tokens=tokens,
        session=session,
        history=history,
        ask=ask,
        as_json=context.as_json,
        here=here,
        apply=apply,
        no_apply=no_apply,
        patch=patch,
    )
    plan = conversation.plan(options, stdin_is_taken=sandbox.reads_stdin)
    return conversation.converse(context.open_engine, sandbox, plan)
