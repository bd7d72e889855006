"""`approvals ls`, `show`, `allow` and `deny`: calls of tools by code that wait for a person.

Not here: how requests are stored, and what becomes of a decision (`code/approvals.py`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from atoll.contract.errors import InvalidRequest
from atoll.surfaces.cli import render
from atoll.surfaces.cli.command import CommandContext, CommandModule, Work
from atoll.surfaces.cli.grammar import Argument, Option

if TYPE_CHECKING:
    from atoll.code.approvals import Approval, StoredApprovals

ApprovalArgument = Annotated[
    str, Argument(metavar="ID", help="The approval: its id, or how that begins.", completes="approval")
]


def approvals(context: CommandContext) -> Work | None:
    return _ls(context) if context.invoked_subcommand is None else None


commands = CommandModule("approvals", "List, allow and deny calls of tools that wait for a person.", approvals)


@commands.command()
async def ls(
    context: CommandContext,
    session: Annotated[str | None, Option("--session", metavar="ID", help="Only those of this code session.")] = None,
) -> int:
    """List the calls that wait, the oldest first."""
    return await _ls(context, session)


async def _ls(context: CommandContext, session: str | None = None) -> int:
    found = _stored(context).list(session)
    if context.as_json:
        render.emit_json([each.model_dump(mode="json") for each in found])
    elif not found:
        render.note("no call waits for an approval")
    else:
        rows = [
            (each.id, each.session_id, each.status, render.ago(each.asked_at), f"{each.tool}({_compact(each)})")
            for each in found
        ]
        render.table(("ID", "SESSION", "STATUS", "ASKED", "CALL"), rows, flex=4)
    return 0


@commands.command()
async def show(context: CommandContext, id: ApprovalArgument) -> int:
    """Show a call that waits: its arguments, and the code that makes it."""
    approval = _stored(context).get(id)
    if context.as_json:
        render.emit_json(approval.model_dump(mode="json"))
        return 0
    pairs = [
        ("id", approval.id),
        ("session", approval.session_id),
        ("sandbox", approval.sandbox),
        ("asked", f"{approval.asked_at:%Y-%m-%d %H:%M:%S} UTC, {render.ago(approval.asked_at)}"),
        ("status", approval.status),
        ("tool", approval.tool),
    ]
    if approval.reason:
        pairs.append(("reason", approval.reason))
    render.facts(pairs)
    render.say("arguments")
    render.say(_indented(_pretty(approval.arguments)))
    if approval.changed_arguments is not None:
        render.say("allowed with")
        render.say(_indented(_pretty(approval.changed_arguments)))
    render.say(f"code of cell {approval.cell}")
    render.say(_indented(approval.code))
    return 0


@commands.command()
def allow(
    context: CommandContext,
    id: ApprovalArgument,
    arguments: Annotated[
        str | None,
        Option("--arguments", metavar="JSON", help="Make the call with these arguments instead: an object."),
    ] = None,
) -> Work:
    """Let a call be made.

    The program that runs the code makes it, now or, if that program is gone, when another goes on with the session.
    """
    changed = None if arguments is None else _object(arguments)
    return _allow(context, id, changed)


async def _allow(context: CommandContext, id: str, arguments: dict[str, Any] | None) -> int:
    return _decided(context, await _stored(context).allow(id, arguments))


@commands.command()
async def deny(
    context: CommandContext,
    id: ApprovalArgument,
    reason: Annotated[str, Option("--reason", metavar="TEXT", help="Why; the code and the model see it.")] = "",
) -> int:
    """Refuse a call. The code gets an error, with the reason."""
    return _decided(context, await _stored(context).deny(id, reason))


def _decided(context: CommandContext, approval: Approval) -> int:
    return context.answer(approval.model_dump(mode="json"), f"{approval.id}  {approval.status}  {approval.tool}")


def _stored(context: CommandContext) -> StoredApprovals:
    from atoll.code.approvals import StoredApprovals

    return StoredApprovals(*context.resolved_place())


def _object(text: str) -> dict[str, Any]:
    """Raises:
    InvalidRequest: it is not a JSON object.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"--arguments is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f'--arguments is {text}; it must be an object: {{"name": value}}')
    return value


def _compact(approval: Approval) -> str:
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in approval.arguments.items())


def _pretty(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _indented(text: str) -> str:
    """What code wrote, so that no line of it looks like one of ours."""
    return "\n".join(f"  {line}" for line in render.printable(text, lines=True).split("\n"))
