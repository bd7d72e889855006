"""`messages`: a server of the Messages API, for clients that were written for hosted programmatic tool calling.

Not here: the server (`surfaces/messages/`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from atoll.contract.errors import InvalidRequest
from atoll.surfaces.cli import render
from atoll.surfaces.cli.command import AtollCommand, CommandContext, CommandModule, Work, needing_extra
from atoll.surfaces.cli.grammar import Option
from atoll.surfaces.cli.sandbox_options import SandboxOptions, limits, runtime_name

if TYPE_CHECKING:
    from atoll.code.executor import CodeConfig

commands = CommandModule()


class _MessagesCommand(AtollCommand):
    resources = ("image", "runtime", "memory", "cpus", "env", "env_file", "allow")
    has_json = False


@commands.command(cls=_MessagesCommand)
def messages(
    context: CommandContext,
    listen: Annotated[str, Option("--listen", metavar="ADDRESS:PORT", help="Where to listen.")] = "127.0.0.1:8082",
    model: Annotated[
        str | None,
        Option(
            "--model",
            metavar="MODEL",
            help="The model that answers: anthropic:NAME, bedrock:NAME, openai:NAME, ollama:NAME or script:FILE."
            "  [default: $ATOLL_MODEL, else one of Anthropic's]",
        ),
    ] = None,
) -> Work:
    """Serve the Messages API, with code that runs here.

    Programs that use Anthropic's client with code execution and programmatic tool calling work with it, if their
    base_url is the URL that this prints. The model writes code; it runs in a sandbox of its own, with half a CPU and
    256 MB unless the options say otherwise. The server listens for other machines only if $ATOLL_MESSAGES_TOKEN holds a
    token, which clients must send as their API key.

    \b
    atoll messages --model openai:gpt-5 --image python:3.12
    ANTHROPIC_BASE_URL=http://127.0.0.1:8082 ANTHROPIC_API_KEY=any python program.py
    """
    from atoll.settings import where_to_listen

    try:
        address = where_to_listen(listen)
    except ValueError as error:
        raise InvalidRequest(f"--listen {listen}: {error}") from None
    return _messages(context, context.sandbox_options(), address, model)


async def _messages(
    context: CommandContext, sandbox: SandboxOptions, address: tuple[str, int], model: str | None
) -> int:
    import logging

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s: %(message)s")
    with needing_extra("the Messages API", "messages"):
        from atoll.settings import Settings
        from atoll.surfaces.messages import listen

        def announce(url: str) -> None:
            render.say(url)
            sys.stdout.flush()

        settings = Settings.from_environment()
        async with context.open_engine(settings) as engine:
            await listen(
                engine,
                model or settings.model,
                *address,
                token=settings.messages_token,
                config=_config(sandbox),
                on_ready=announce,
            )
    return 0


def _config(sandbox: SandboxOptions) -> CodeConfig:
    from atoll.code.executor import CodeConfig

    chosen = limits(sandbox)
    given = {
        "image": sandbox.image,
        "runtime": runtime_name(sandbox.runtime),
        "memory_bytes": chosen.memory_bytes,
        "cpus": chosen.cpus,
        "network": sandbox.network,
        "env": dict(sandbox.env) or None,
    }
    return CodeConfig.model_validate({name: value for name, value in given.items() if value is not None})
