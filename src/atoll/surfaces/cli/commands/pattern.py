"""`pattern run`, `graph` and `serve`: a reactive pattern of a Python file, run to rest, its graph, and its page.

Owns what is shown while a pattern runs. Not here: patterns and their views (`reactive/`), and the page
(`surfaces/web/`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from atoll.contract.errors import InvalidRequest
from atoll.surfaces.cli import FAILED, render
from atoll.surfaces.cli.command import AtollCommand, CommandContext, CommandModule, Work, needing_extra
from atoll.surfaces.cli.grammar import Argument, Option

if TYPE_CHECKING:
    from atoll.reactive.patterns import RunningPattern

_REDRAW_S = 0.1
_SHOWN_OUTPUT_LINES = 3
_MOST_LINES = 12

commands = CommandModule("pattern", "Run reactive patterns: steps that follow changed inputs.")

PatternFileArgument = Annotated[
    str, Argument(metavar="FILE[:NAME]", help="A Python file, and which of its patterns.  [default: its only one]")
]
SetOption = Annotated[
    list[str] | None, Option("--set", metavar="NAME=VALUE", help="The value of an input; may be repeated.")
]
AllowOption = Annotated[
    list[str] | None,
    Option(
        "--allow",
        metavar="RULE",
        help="What its commands and requests may connect to: example.com, *.example.com:443, registries, …; may be "
        "repeated.  [default: nothing]",
    ),
]


class PatternOptions(NamedTuple):
    """A pattern as the command line describes it."""

    source: str
    inputs: dict[str, str]
    allow: Sequence[str]


@commands.command()
def run(context: CommandContext, file: PatternFileArgument, set_: SetOption = None, allow: AllowOption = None) -> Work:
    """Run a pattern until nothing is left to do, and print its view.

    While it runs, what is in progress is shown on a terminal, with the end of its output. --json prints the outputs
    instead. The exit status is 1 if an output has failed.

    \b
    atoll pattern run examples/patterns/python_runner.py --set code='print(6 * 7)'
    atoll pattern run stats.py --set repo_url=https://example.com/x.git --allow example.com --json
    """
    return _run(context, _options(file, set_, allow))


@commands.command()
def graph(
    context: CommandContext,
    file: PatternFileArgument,
    set_: SetOption = None,
    allow: AllowOption = None,
    svg: Annotated[bool, Option("--svg", help="Print a drawing.  [default: a line for each node]")] = False,
) -> Work:
    """Run a pattern, and print its graph.

    A line for each node: what it reads, its state, its runs and how long the last one took.
    """
    return _graph(context, _options(file, set_, allow), svg=svg)


class _ServedCommand(AtollCommand):
    has_json = False


@commands.command(cls=_ServedCommand)
def serve(
    context: CommandContext,
    file: PatternFileArgument,
    listen: Annotated[
        str, Option("--listen", metavar="ADDRESS:PORT", help="Where to listen; port 0 is any that is free.")
    ] = "127.0.0.1:8083",
    set_: SetOption = None,
    allow: AllowOption = None,
) -> Work:
    """Serve a page with a pattern, which shows its view live.

    Prints the URL of the page. All who open it see the same pattern, and what one of them enters, all see. It listens
    for other machines only if $ATOLL_PATTERN_TOKEN holds a token; a browser opens the page with /?token=TOKEN once.

    \b
    atoll pattern serve examples/patterns/python_runner.py
    atoll pattern serve stats.py --set repo_url=https://example.com/x.git --allow example.com --listen 127.0.0.1:9000
    """
    from atoll.settings import where_to_listen

    try:
        address = where_to_listen(listen)
    except ValueError as error:
        raise InvalidRequest(f"--listen {listen}: {error}") from None
    return _serve(context, _options(file, set_, allow), address)


def _options(file: str, inputs: Sequence[str] | None, allow: Sequence[str] | None) -> PatternOptions:
    given = {}
    for each in inputs or ():
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise InvalidRequest(f"--set {each}: write NAME=VALUE, such as --set code='print(6 * 7)'")
        given[name] = value
    return PatternOptions(file, given, tuple(allow or ()))


@asynccontextmanager
async def _started(
    context: CommandContext, options: PatternOptions, *, is_page: bool = False
) -> AsyncIterator[RunningPattern]:
    """On a page an input without a default begins empty: it can be entered there."""
    from atoll.contract.network import NetworkPolicy
    from atoll.reactive.graph import Graph
    from atoll.reactive.patterns import load_pattern

    network = NetworkPolicy(allow=options.allow) if options.allow else None
    sys.path.insert(0, str(Path(options.source.partition(":")[0]).resolve().parent))  # as `python FILE` does
    with needing_extra("this pattern", "all"):
        pattern = load_pattern(options.source)
        async with context.open_engine() as engine, Graph(engine, network=network):
            empty = dict.fromkeys(pattern.required, "") if is_page else {}
            yield pattern(**empty | pattern.read_inputs(options.inputs))


async def _run(context: CommandContext, options: PatternOptions) -> int:
    async with _started(context, options) as running:
        await _settled(running)
        results, errors = running.results()
        if context.as_json:
            render.emit_json({"name": running.name, "outputs": results, "errors": errors})
        else:
            from atoll.reactive.rendering import to_text

            columns = render.terminal_columns() or 80
            text = to_text({"type": "heading", "level": 1, "text": running.name}, columns=columns)
            render.say(f"{text}\n{to_text(running.view.tree(), columns=columns)}")
            for name, error in errors.items():
                render.note(f"{name}: {error}")
        return FAILED if errors else 0


async def _graph(context: CommandContext, options: PatternOptions, *, svg: bool) -> int:
    from atoll.reactive.drawing import graph_svg, graph_text

    async with _started(context, options) as running:
        await _settled(running)
        nodes = running.graph.nodes
        if context.as_json:
            render.emit_json([node.info()._asdict() for node in nodes])
        else:
            render.say(graph_svg(nodes) if svg else render.printable(graph_text(nodes), lines=True))
        return 0


async def _serve(context: CommandContext, options: PatternOptions, address: tuple[str, int]) -> int:
    import logging

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s: %(message)s")
    with needing_extra("the page of a pattern", "web"):
        from atoll.settings import Settings
        from atoll.surfaces.web import patterns

    token = Settings.from_environment().pattern_token

    def announce(url: str) -> None:
        render.say(url)
        sys.stdout.flush()
        if token is not None:
            render.note(f"a browser opens it once as {url}?token=TOKEN, with the value of $ATOLL_PATTERN_TOKEN")

    patterns.accepted_hosts(address[0], token)  # refused before anything runs
    async with _started(context, options, is_page=True) as running:
        await patterns.listen(running, *address, token=token, on_ready=announce)
    return 0


async def _settled(running: RunningPattern) -> None:
    """Wait until nothing runs. On a terminal, show what does."""
    if not os.isatty(sys.stderr.fileno()):
        await running.graph.settled()
        return
    import anyio

    drawn = 0
    try:
        async with anyio.create_task_group() as group:

            async def draw() -> None:
                nonlocal drawn
                while True:
                    await anyio.sleep(_REDRAW_S)
                    lines = _progress(running)
                    sys.stderr.write(_erased(drawn) + "".join(f"{line}\n" for line in lines))
                    sys.stderr.flush()
                    drawn = len(lines)

            group.start_soon(draw)
            await running.graph.settled()
            group.cancel_scope.cancel()
    finally:
        sys.stderr.write(_erased(drawn))
        sys.stderr.flush()


def _erased(lines: int) -> str:
    return "\x1b[1A\x1b[2K" * lines


def _progress(running: RunningPattern) -> list[str]:
    from atoll.reactive.operations import Operation

    columns = (render.terminal_columns() or 80) - 1
    lines: list[str] = []
    for node in running.graph.nodes:
        info = node.info()
        if info.status in ("running", "queued"):
            lines.append(render.styled(f"{info.name}  {info.status}  {info.running_s or 0:.1f} s", render.BOLD))
            if isinstance(node, Operation) and node.output:
                tail = render.printable(node.output, lines=True).rstrip("\n").expandtabs().split("\n")
                shown = tail[-_SHOWN_OUTPUT_LINES:]
                lines += [render.styled(render.shortened(f"  {line}", columns), render.DIM) for line in shown]
    return lines[:_MOST_LINES]
