"""`network`, `audit`, `expose` and `forward`: the egress policy of a sandbox, its audit log, and its ports.

Not here: what a rule permits (`runtime/egress/`), how a preview is served (`runtime/previews/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from atoll.contract.errors import InvalidRequest
from atoll.surfaces.cli import render, values
from atoll.surfaces.cli.command import CommandContext, CommandModule, Work
from atoll.surfaces.cli.grammar import Argument, Option
from atoll.surfaces.cli.options import NameArgument
from atoll.surfaces.cli.sandbox_options import network_policy

if TYPE_CHECKING:
    from atoll.contract.network import AuditRecord, NetworkPolicy

COLUMNS = ("TIME", "VERDICT", "VIA", "HOST", "ADDRESS", "SENT", "RECEIVED", "WHY")

commands = CommandModule()


@commands.command()
def network(
    context: CommandContext,
    name: NameArgument,
    allow: Annotated[list[str] | None, Option("--allow", metavar="RULE", help="Add this rule. Repeatable.")] = None,
    deny: Annotated[
        list[str] | None,
        Option("--deny", metavar="RANGE", help="Deny this address or range, whatever is allowed. Repeatable."),
    ] = None,
    remove: Annotated[
        list[str] | None, Option("--remove", metavar="RULE", help="Remove this rule, of either kind. Repeatable.")
    ] = None,
    nothing: Annotated[bool, Option("--none", help="Remove all rules: no egress.")] = False,
) -> Work:
    """Show or change the egress policy of a sandbox.

    A change applies at once, also to a running sandbox. A rule is a host name (example.com), all names below one
    (*.example.com), any host (*), an address or a range, each with :PORT or :LOW-HIGH if it is for some ports only; or
    registries, the package indexes that this machine is configured for.

    \b
    atoll network box --allow registries --allow '*.example.com:443'
    atoll network box --allow '*' --deny 198.51.100.0/24
    """
    if nothing and (allow or deny or remove):
        raise InvalidRequest("--none cannot be combined with --allow, --deny or --remove: it removes all rules")
    network_policy([*(allow or []), *(remove or [])])
    return _network(context, name, allow or [], deny or [], remove or [], nothing=nothing)


async def _network(
    context: CommandContext,
    name: str,
    allow: Sequence[str],
    deny: Sequence[str],
    remove: Sequence[str],
    *,
    nothing: bool,
) -> int:
    async with context.open_engine() as engine:
        sandbox = await engine.get(name)
        if nothing:
            await engine.set_network(name, None)
        elif allow or deny or remove:
            await engine.set_network(name, _changed(sandbox.info.network, allow, deny, remove))
        policy = sandbox.info.network
    if context.as_json:
        render.emit_json({"name": name, "network": policy.model_dump(mode="json") if policy else None})
    elif policy is None:
        render.note(f"no egress is allowed; `atoll network {name} --allow RULE` adds a rule")
    else:
        for rule in policy.allow:
            render.say(rule)
        for rule in policy.deny:
            render.say(f"not {rule}")
    return 0


def _changed(
    policy: NetworkPolicy | None, allow: Sequence[str], deny: Sequence[str], remove: Sequence[str]
) -> NetworkPolicy:
    from atoll.contract.network import NetworkPolicy, parse_rule

    rules, denied = (list(policy.allow), list(policy.deny)) if policy else ([], [])
    for rule in remove:
        text = str(parse_rule(rule))
        if text not in rules and text not in denied:
            known = ", ".join([*rules, *denied]) or "none"
            raise InvalidRequest(f"{text} is not a rule of this sandbox; its rules are: {known}")
        (rules if text in rules else denied).remove(text)
    return NetworkPolicy(allow=[*rules, *allow], deny=[*denied, *deny])


@commands.command()
async def audit(
    context: CommandContext,
    name: NameArgument,
    follow: Annotated[bool, Option("--follow", "-f", help="Continue with new connections, a line each.")] = False,
) -> int:
    """Show the audit log of a sandbox.

    It has the connections to the outside, those that were allowed and those that were denied.
    """
    async with context.open_engine() as engine:
        if follow:
            async for record in engine.follow_audit(name):
                render.say(record.model_dump_json() if context.as_json else "  ".join(_row(record)))
            return 0
        records = await engine.audit(name)
    if context.as_json:
        render.emit_json([record.model_dump(mode="json") for record in records])
    elif not records:
        render.note("the audit log is empty")
    else:
        render.table(COLUMNS, [_row(record) for record in records], flex=7)
    return 0


def _row(record: AuditRecord) -> tuple[str, ...]:
    """Host names come from programs inside, so they are shown without control characters."""
    host = ascii(record.host)[1:-1] or "-"
    return (
        f"{record.time:%Y-%m-%d %H:%M:%S}",
        record.verdict if record.ended else "open",
        record.protocol,
        host if record.port is None else f"{host}:{record.port}",
        record.address or "-",
        render.human_bytes(record.sent_bytes),
        render.human_bytes(record.received_bytes),
        record.reason or "",
    )


@commands.command()
async def expose(
    context: CommandContext,
    name: NameArgument,
    port: Annotated[int, Argument(metavar="PORT", help="The port inside the sandbox.")],
    wait: Annotated[
        float | None,
        Option(
            "--wait",
            metavar="TIME",
            parser=values.duration,
            help="Wait until a server listens: 30s, 5m.  [default: do not wait]",
        ),
    ] = None,
) -> int:
    """Serve a port of a sandbox as a preview.

    Browsers and other clients can use it until this command is interrupted. Prints the URL of the preview, which
    contains an access token, and a second URL for clients that cannot resolve *.localhost. Requests are logged on
    standard error. $ATOLL_PREVIEW_LISTEN is the address that is served, by default localhost:0, which is any free port.
    """
    import anyio

    async with context.open_engine() as engine:
        sandbox = await engine.get(name)
        preview = await sandbox.expose(port, wait_s=wait or 0)
        _log_requests()
        if context.as_json:
            render.emit_json(preview.model_dump(mode="json"))
        else:
            for address in dict.fromkeys((preview.url, preview.path_url)):
                render.say(address)
            render.note("anyone who has a URL has access, by either of them; Ctrl-C ends it")
        await anyio.sleep_forever()
    return 0


@commands.command()
async def forward(
    context: CommandContext,
    name: NameArgument,
    port: Annotated[int, Argument(metavar="PORT", help="The port inside the sandbox.")],
    local: Annotated[int, Option("--local", metavar="PORT", help="The port on 127.0.0.1. 0 is any free port.")] = 0,
) -> int:
    """Forward a port on 127.0.0.1 to a port of a sandbox.

    Bytes of any protocol pass unchanged, until this command is interrupted. There is no token: every program on this
    machine can connect. For HTTP, and for browsers, expose is safer.

    \b
    atoll forward db 5432 --local 5432
    """
    import anyio

    async with context.open_engine() as engine:
        sandbox = await engine.get(name)
        async with sandbox.forward(port, local) as local_port:
            if context.as_json:
                render.emit_json({"name": name, "port": port, "local_port": local_port})
            else:
                render.say(f"127.0.0.1:{local_port}")
                render.note("every program on this machine can connect; Ctrl-C ends it")
            await anyio.sleep_forever()
    return 0


def _log_requests() -> None:
    """Print what the preview proxy logs, a line per request, on standard error."""
    import logging

    class RequestLog(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            render.note(record.getMessage())

    requests = logging.getLogger("atoll.runtime.previews.proxy")
    requests.addHandler(RequestLog())
    requests.setLevel(logging.INFO)
