"""`network` and `audit`, and what `--allow` means: what may leave a sandbox, and what did.

It knows which facts of a connection people ask for. It refuses to know what a rule permits and who serves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atoll.contract.errors import InvalidRequest
from atoll.contract.network import AuditRecord, NetworkPolicy, parse_rule
from atoll.runtime.engine import open as open_engine
from atoll.surfaces.cli import render

COLUMNS = ("TIME", "VERDICT", "VIA", "HOST", "ADDRESS", "SENT", "RECEIVED", "WHY")


def policy(allow: Sequence[str]) -> NetworkPolicy | None:
    """The policy of so many `--allow`. None: none was given.

    Raises:
        InvalidRequest: one is not a rule.
    """
    for rule in allow:
        parse_rule(rule)
    return NetworkPolicy(allow=allow) if allow else None


async def network(
    state_dir: Path | None, name: str, allow: Sequence[str], remove: Sequence[str], *, nothing: bool, as_json: bool
) -> int:
    """Change what may leave a sandbox, if anything is to change, and show what holds then."""
    async with open_engine(state_dir) as engine:
        sandbox = await engine.get(name)
        if nothing:
            await engine.set_network(name, None)
        elif allow or remove:
            await engine.set_network(name, _changed(sandbox.info.network, allow, remove))
        holds = sandbox.info.network
    if as_json:
        render.emit_json({"name": name, "network": holds.model_dump(mode="json") if holds else None})
    elif holds is None:
        render.note(f"nothing leaves it; `atoll network {name} --allow RULE` changes that")
    else:
        for rule in holds.allow:
            render.say(rule)
    return 0


def _changed(holds: NetworkPolicy | None, allow: Sequence[str], remove: Sequence[str]) -> NetworkPolicy:
    rules = list(holds.allow) if holds else []
    for rule in remove:
        shown = str(parse_rule(rule))
        if shown not in rules:
            raise InvalidRequest(f"{shown} is not one of its rules, which are: {', '.join(rules) or 'none'}")
        rules.remove(shown)
    return NetworkPolicy(allow=[*rules, *allow])


async def audit(state_dir: Path | None, name: str, *, follow: bool, as_json: bool) -> int:
    async with open_engine(state_dir) as engine:
        if follow:
            async for record in engine.follow_audit(name):
                render.say(record.model_dump_json() if as_json else "  ".join(_row(record)))
            return 0
        records = await engine.audit(name)
    if as_json:
        render.emit_json([record.model_dump(mode="json") for record in records])
    elif not records:
        render.note("nothing has left it or tried to")
    else:
        render.table(COLUMNS, [_row(record) for record in records], flex=7)
    return 0


def _row(record: AuditRecord) -> tuple[str, ...]:
    """Whatever a program inside asked for is shown without what could move a cursor."""
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
