"""`keys ls`, `show`, `create` and `revoke`: API keys of a server, on the database of the state directory.

No server needs to run; one that runs sees a change within a second. Not here: how keys are stored and checked
(`server/keys.py`), and tenants (`tenants.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from atoll.contract.errors import InvalidRequest
from atoll.surfaces.cli import render, values
from atoll.surfaces.cli.command import CommandContext, CommandModule, Work
from atoll.surfaces.cli.grammar import Argument, Option

if TYPE_CHECKING:
    from atoll.server.keys import ApiKey

KeyArgument = Annotated[str, Argument(metavar="ID", help="The key's id, which `atoll keys ls` shows.")]


def keys(context: CommandContext) -> Work | None:
    return _ls(context) if context.invoked_subcommand is None else None


commands = CommandModule("keys", "List, show, create and revoke API keys of a server.", keys)


@commands.command()
async def ls(
    context: CommandContext,
    tenant: Annotated[str | None, Option("--tenant", metavar="NAME", help="Only those of this tenant.")] = None,
) -> int:
    """List the keys, the oldest first."""
    return await _ls(context, tenant)


async def _ls(context: CommandContext, tenant: str | None = None) -> int:
    async with context.open_server() as server:
        found = await server.keys.list(tenant, everyone=tenant is None)
    if context.as_json:
        render.emit_json([key.model_dump(mode="json") for key in found])
    elif not found:
        render.note("no keys; `atoll keys create NAME` creates one")
    else:
        rows = [
            (
                key.id,
                key.name,
                key.tenant or "(server)",
                key.role,
                _status(key),
                render.ago(key.created_at),
                "never" if key.last_used_at is None else render.ago(key.last_used_at),
            )
            for key in found
        ]
        render.table(("ID", "NAME", "TENANT", "ROLE", "STATUS", "CREATED", "USED"), rows, flex=1)
    return 0


@commands.command()
async def show(context: CommandContext, id: KeyArgument) -> int:
    """Show what a key may do. Its secret is not stored, and cannot be shown again."""
    async with context.open_server() as server:
        key = await server.keys.get(id)
    if context.as_json:
        render.emit_json(key.model_dump(mode="json"))
        return 0
    moments = {
        "created": key.created_at,
        "expires": key.expires_at,
        "revoked": key.revoked_at,
        "used": key.last_used_at,
    }
    render.facts(
        [
            ("id", key.id),
            ("name", key.name),
            ("tenant", key.tenant or "none: of the server's administrators"),
            ("role", key.role),
            ("scopes", ", ".join(key.scopes)),
            ("status", _status(key)),
            *((what, "never" if at is None else f"{at:%Y-%m-%d %H:%M:%S} UTC") for what, at in moments.items()),
        ]
    )
    return 0


@commands.command()
def create(
    context: CommandContext,
    name: Annotated[str, Argument(metavar="NAME", help="What it is for: ci, alice.")],
    tenant: Annotated[str | None, Option("--tenant", metavar="NAME", help="Whose it is.  [default: default]")] = None,
    admin: Annotated[
        bool, Option("--admin", help="It may make and revoke keys of its tenant, and read its audit log.")
    ] = False,
    server: Annotated[
        bool, Option("--server", help="It is of the server's administrators, who may act in every tenant.")
    ] = False,
    scope: Annotated[
        list[str] | None,
        Option(
            "--scope",
            metavar="SCOPE",
            help="It may do only this: sandboxes:read, sandboxes:exec, chat, …; a wrong one is answered with all that "
            "there are. Repeatable.  [default: all]",
        ),
    ] = None,
    ttl: Annotated[
        float | None,
        Option("--ttl", metavar="TIME", parser=values.duration, help="When it expires: 30d.  [default: never]"),
    ] = None,
) -> Work:
    """Create a key and print it. It is shown this once, and stored nowhere.

    Clients send it as X-API-Key, or as the bearer token.

    \b
    atoll keys create ci --tenant acme --ttl 90d
    atoll keys create dashboard --scope sandboxes:read
    """
    if server and tenant is not None:
        raise InvalidRequest("a key of the server's administrators has no tenant; leave out --tenant or --server")
    options = {
        "tenant": None if server else tenant or "default",
        "role": "admin" if admin or server else "member",
        "scopes": scope,
        "ttl_s": ttl,
    }
    return _create(context, name, options)


async def _create(context: CommandContext, name: str, options: dict[str, Any]) -> int:
    async with context.open_server() as server:
        key, text = await server.keys.create(name, **options)
        await server.record_local("keys_create", f"keys/{key.id}", key.tenant)
    return context.answer({**key.model_dump(mode="json"), "key": text.get_secret_value()}, text.get_secret_value())


@commands.command()
async def revoke(context: CommandContext, id: KeyArgument) -> int:
    """Have a key refused from now on. Requests and streams that have begun with it end within two seconds."""
    async with context.open_server() as server:
        key = await server.keys.revoke(id)
        await server.record_local("keys_revoke", f"keys/{key.id}", key.tenant)
    return context.answer(key.model_dump(mode="json"), key.id)


def _status(key: ApiKey) -> str:
    from datetime import UTC, datetime

    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= datetime.now(UTC) else "active"
