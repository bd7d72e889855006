"""`trace`: what code did, execution by execution and call by call.

Not here: the records (`code/audit.py`), and how they are drawn (`code/trace.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from atoll.contract.errors import InvalidRequest
from atoll.surfaces.cli import render
from atoll.surfaces.cli.command import CommandContext, CommandModule, Work
from atoll.surfaces.cli.grammar import Argument, Option

_PIPE_COLUMNS = 120
commands = CommandModule()


@commands.command()
def trace(
    context: CommandContext,
    session: Annotated[
        str | None,
        Argument(metavar="SESSION", help="The code session.  [default: list those with a trace]", completes="trace"),
    ] = None,
    html: Annotated[
        Path | None, Option("--html", metavar="FILE", help="Write the timeline to this file, as a page for a browser.")
    ] = None,
) -> Work:
    """Draw the timeline of a code session.

    It has the session's executions, and the calls of tools in them.

    Sessions of `atoll python`, `atoll agent --code`, `atoll mcp --tools code` and of programs that record them have
    one, and keep it when they have ended.

    \b
    atoll trace
    atoll trace code-1a2b3c4d5e
    atoll trace code-1a2b3c4d5e --html trace.html
    """
    if session is None and html is not None:
        raise InvalidRequest("--html needs a session; `atoll trace` lists them")
    return _list(context) if session is None else _draw(context, session, html)


async def _draw(context: CommandContext, session: str, html: Path | None) -> int:
    from atoll.code import trace as timeline
    from atoll.code.audit import CodeAudit

    entries = CodeAudit(*context.resolved_place()).read(session)
    if html is not None:
        html.write_text(timeline.as_html(session, entries), "utf-8")
        return context.answer({"session": session, "file": str(html)}, str(html))
    if context.as_json:
        render.emit_json([entry.model_dump(mode="json", exclude_none=True) for entry in entries])
    else:
        render.say(timeline.as_text(entries, width=render.terminal_columns() or _PIPE_COLUMNS).rstrip())
    return 0


async def _list(context: CommandContext) -> int:
    from atoll.code.audit import CodeAudit

    audit = CodeAudit(*context.resolved_place())
    found = [audit.summary(session) for session in audit.sessions()]
    if context.as_json:
        render.emit_json([each.model_dump(mode="json") for each in found])
    elif not found:
        render.note("no code session has a trace")
    else:
        rows = [(each.session_id, render.ago(each.last_at), str(each.executions), str(each.calls)) for each in found]
        render.table(("SESSION", "LAST USED", "EXECUTIONS", "CALLS"), rows, flex=0)
    return 0
