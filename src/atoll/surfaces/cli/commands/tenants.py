"""`tenants ls`, `show`, `create`, `update` and `rm`: who shares a server, on the database of the state directory.

No server needs to run; one that runs sees a change within a second. Not here: what policies and quotas mean
(`server/tenants.py`), and keys (`keys.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from atoll.contract.errors import InvalidRequest
from atoll.surfaces.cli import render, values
from atoll.surfaces.cli.command import AtollCommand, CommandContext, CommandModule, Work
from atoll.surfaces.cli.grammar import Argument, Option, Parameter, parameters_of

if TYPE_CHECKING:
    from atoll.server.tenants import Quotas, Tenant, TenantPolicy

T = TypeVar("T", "TenantPolicy", "Quotas")

TenantArgument = Annotated[str, Argument(metavar="NAME", help="The tenant.")]
NONE = "none"


def _or_none(parser: Callable[[str], float]) -> Callable[[str], float]:
    """A parser that takes `none` too, as infinity: no limit."""
    return lambda word: math.inf if word.strip().lower() == NONE else parser(word)


def _count(word: str) -> float:
    if not word.isascii() or not word.isdigit():
        raise InvalidRequest(f"{word!r} is not a whole number")
    return int(word)


def tenant_options(  # noqa: PLR0913, PLR0917 - options of a tenant
    image: Annotated[
        list[str] | None,
        Option("--image", metavar="PATTERN", help="Allow images: host, 'python:3.*', 'ghcr.io/acme/*'. Repeatable."),
    ] = None,
    mount: Annotated[
        list[str] | None,
        Option("--mount", metavar="DIR[:rw]", help="Allow mounts of this directory, read-only or not. Repeatable."),
    ] = None,
    network: Annotated[
        list[str] | None,
        Option("--network", metavar="RULE", help="Allow network rules up to this one: '*.example.com'. Repeatable."),
    ] = None,
    runtime: Annotated[
        list[str] | None, Option("--runtime", metavar="NAME", help="Allow this runtime. Repeatable.")
    ] = None,
    max_ttl: Annotated[
        float | None,
        Option("--max-ttl", metavar="TIME", parser=values.lifetime, help="The longest lifetime of a sandbox: 8h."),
    ] = None,
    max_memory: Annotated[
        float | None,
        Option("--max-memory", metavar="SIZE", parser=_or_none(values.size), help="The most memory of one sandbox."),
    ] = None,
    max_cpus: Annotated[
        float | None,
        Option("--max-cpus", metavar="N", parser=_or_none(float), help="The most CPUs of one sandbox."),
    ] = None,
    max_disk: Annotated[
        float | None,
        Option("--max-disk", metavar="SIZE", parser=_or_none(values.size), help="The most disk of one sandbox."),
    ] = None,
    default_memory: Annotated[
        float | None,
        Option("--default-memory", metavar="SIZE", parser=_or_none(values.size), help="Of a sandbox that says none."),
    ] = None,
    default_cpus: Annotated[
        float | None,
        Option("--default-cpus", metavar="N", parser=_or_none(float), help="Of a sandbox that says none."),
    ] = None,
    default_disk: Annotated[
        float | None,
        Option("--default-disk", metavar="SIZE", parser=_or_none(values.size), help="Of a sandbox that says none."),
    ] = None,
    sandboxes: Annotated[
        float | None,
        Option("--sandboxes", metavar="N", parser=_or_none(_count), help="Quota: how many sandboxes."),
    ] = None,
    memory: Annotated[
        float | None,
        Option("--memory", metavar="SIZE", parser=_or_none(values.size), help="Quota: memory of all that run."),
    ] = None,
    cpus: Annotated[
        float | None, Option("--cpus", metavar="N", parser=_or_none(float), help="Quota: CPUs of all that run.")
    ] = None,
    disk: Annotated[
        float | None, Option("--disk", metavar="SIZE", parser=_or_none(values.size), help="Quota: disk of all.")
    ] = None,
    requests_per_minute: Annotated[
        float | None,
        Option("--requests-per-minute", metavar="N", parser=_or_none(_count), help="Quota: requests to the server."),
    ] = None,
    model_tokens: Annotated[
        float | None,
        Option("--model-tokens", metavar="N", parser=_or_none(_count), help="Quota: tokens of models in a month."),
    ] = None,
) -> None:
    """The options of a tenant. Only the signature is used."""


class TenantCommand(AtollCommand):
    """A command that takes the options of a tenant, and gives its function those that were written."""

    def parameters(self) -> list[Parameter]:
        own = len(parameters_of(self._function))
        inherited = super().parameters()
        return [*inherited[:own], *parameters_of(tenant_options).values(), *inherited[own:]]


_FIELDS: dict[str, tuple[str, ...]] = {
    "image": ("policy", "images"),
    "mount": ("policy", "mounts"),
    "network": ("policy", "networks"),
    "runtime": ("policy", "runtimes"),
    "max_ttl": ("policy", "max_ttl_s"),
    "max_memory": ("policy", "max_limits", "memory_bytes"),
    "max_cpus": ("policy", "max_limits", "cpus"),
    "max_disk": ("policy", "max_limits", "disk_bytes"),
    "default_memory": ("policy", "default_limits", "memory_bytes"),
    "default_cpus": ("policy", "default_limits", "cpus"),
    "default_disk": ("policy", "default_limits", "disk_bytes"),
    "sandboxes": ("quotas", "sandboxes"),
    "memory": ("quotas", "memory_bytes"),
    "cpus": ("quotas", "cpus"),
    "disk": ("quotas", "disk_bytes"),
    "requests_per_minute": ("quotas", "requests_per_minute"),
    "model_tokens": ("quotas", "model_tokens"),
}
"""Where each option is in a `Tenant`."""


def tenants(context: CommandContext) -> Work | None:
    return _ls(context) if context.invoked_subcommand is None else None


commands = CommandModule("tenants", "List, show, create, change and remove tenants of a server.", tenants)


@commands.command()
async def ls(context: CommandContext) -> int:
    """List the tenants and their quotas."""
    return await _ls(context)


async def _ls(context: CommandContext) -> int:
    async with context.open_server() as server:
        found = await server.tenants.list()
    if context.as_json:
        render.emit_json([tenant.model_dump(mode="json") for tenant in found])
        return 0
    rows = [
        (
            tenant.name,
            "disabled" if tenant.disabled else "active",
            render.ago(tenant.created_at),
            _shown(tenant.quotas.sandboxes),
            _shown_size(tenant.quotas.memory_bytes),
            _shown(tenant.quotas.cpus),
            _shown_size(tenant.quotas.disk_bytes),
            ", ".join(tenant.policy.images),
        )
        for tenant in found
    ]
    render.table(("NAME", "STATUS", "CREATED", "SANDBOXES", "MEMORY", "CPUS", "DISK", "IMAGES"), rows, flex=7)
    return 0


@commands.command()
async def show(context: CommandContext, name: TenantArgument) -> int:
    """Show what a tenant may ask for, and how much of it."""
    async with context.open_server() as server:
        tenant = await server.tenants.get(name)
    if context.as_json:
        render.emit_json(tenant.model_dump(mode="json"))
    else:
        render.facts(_facts(tenant))
    return 0


@commands.command(cls=TenantCommand)
def create(context: CommandContext, name: TenantArgument, **given: Any) -> Work:
    """Create a tenant. It may use the image host and no network unless you say more.

    Its keys are made with `atoll keys create --tenant NAME`. Its sandboxes are those of the namespace of its name.

    \b
    atoll tenants create acme --image host --image 'python:3.*' --network '*.example.com'
    atoll tenants create acme --sandboxes 10 --memory 16g --cpus 8 --max-ttl 8h
    """
    return _create(context, name, _changes(given))


async def _create(context: CommandContext, name: str, changes: dict[str, dict[str, Any]]) -> int:
    async with context.open_server() as server:
        from atoll.server.tenants import Quotas, TenantPolicy

        policy, quotas = _changed(TenantPolicy(), changes["policy"]), _changed(Quotas(), changes["quotas"])
        tenant = await server.tenants.create(name, policy=policy, quotas=quotas)
        await server.record_local("tenants_create", f"tenants/{name}", name)
    return context.answer(tenant.model_dump(mode="json"), tenant.name)


@commands.command(cls=TenantCommand)
def update(
    context: CommandContext,
    name: TenantArgument,
    disabled: Annotated[
        bool | None, Option("--disable/--enable", help="Refuse its keys, or accept them again. Its sandboxes go on.")
    ] = None,
    **given: Any,
) -> Work:
    """Change what a tenant may ask for, or its quotas.

    What is not given stays as it is. A list that is given replaces the old one; none empties a list and removes a
    limit. Sandboxes that exist keep what they have.

    \b
    atoll tenants update acme --sandboxes 20 --memory none
    atoll tenants update acme --mount none
    """
    changes = _changes(given)
    if disabled is None and not any(changes.values()):
        raise InvalidRequest("nothing to change is given; `atoll tenants update --help` lists what there is")
    return _update(context, name, disabled, changes)


async def _update(context: CommandContext, name: str, disabled: bool | None, changes: dict[str, dict[str, Any]]) -> int:
    async with context.open_server() as server:
        tenant = await server.tenants.get(name)
        policy = _changed(tenant.policy, changes["policy"]) if changes["policy"] else None
        quotas = _changed(tenant.quotas, changes["quotas"]) if changes["quotas"] else None
        tenant = await server.tenants.update(name, disabled=disabled, policy=policy, quotas=quotas)
        await server.record_local("tenants_update", f"tenants/{name}", name)
    return context.answer(tenant.model_dump(mode="json"), f"{tenant.name} is updated")


@commands.command()
async def rm(
    context: CommandContext,
    name: TenantArgument,
    destroy: Annotated[
        bool, Option("--destroy", help="Destroy its sandboxes, checkpoints, volumes and warm pools too.")
    ] = False,
) -> int:
    """Remove a tenant and its keys. One that has sandboxes or volumes is not removed without --destroy."""
    async with context.open_server() as server:
        await server.delete_tenant(name, destroy=destroy)
        await server.record_local("tenants_delete", f"tenants/{name}", name)
    return context.answer({"removed": [name]}, name)


# ---- options, and how a tenant is shown ----


def _changes(given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The fields that options set, of policy and quotas. None: the field is unset, or the list is emptied."""
    changes: dict[str, dict[str, Any]] = {"policy": {}, "quotas": {}}
    for option, value in given.items():
        if value is None:
            continue
        part, *path, field = _FIELDS[option]
        fields = changes[part]
        for name in path:
            fields = fields.setdefault(name, {})
        fields[field] = _value(option, value)
    return changes


def _value(option: str, value: Any) -> Any:
    if isinstance(value, list):
        empty = None if option == "runtime" else ()
        return empty if [word.lower() for word in value] == [NONE] else tuple(value)
    return None if value == math.inf else value


def _changed(model: T, changes: dict[str, Any]) -> T:
    """
    Raises:
        InvalidRequest: a value is not allowed.
    """
    from atoll.contract.frozen import refusal

    fields: dict[str, Any] = model.model_dump()
    for name, value in changes.items():
        fields[name] = {**fields[name], **value} if isinstance(value, dict) else value
    try:
        return type(model).model_validate(fields)
    except ValueError as error:
        raise refusal(type(model), error) from None


def _facts(tenant: Tenant) -> list[tuple[str, str]]:
    policy, quotas = tenant.policy, tenant.quotas
    limits = {"most": policy.max_limits, "default": policy.default_limits}
    return [
        ("name", tenant.name),
        ("status", "disabled" if tenant.disabled else "active"),
        ("created", f"{tenant.created_at:%Y-%m-%d %H:%M:%S} UTC, {render.ago(tenant.created_at)}"),
        ("images", ", ".join(policy.images) or NONE),
        ("mounts", ", ".join(policy.mounts) or NONE),
        ("networks", ", ".join(policy.networks) or NONE),
        ("runtimes", "any" if policy.runtimes is None else ", ".join(policy.runtimes)),
        ("lifetime", "any" if policy.max_ttl_s is None else f"at most {policy.max_ttl_s:g} s"),
        *((f"{which} memory", _shown_size(each.memory_bytes)) for which, each in limits.items()),
        *((f"{which} cpus", _shown(each.cpus)) for which, each in limits.items()),
        *((f"{which} disk", _shown_size(each.disk_bytes)) for which, each in limits.items()),
        ("quota of sandboxes", _shown(quotas.sandboxes)),
        ("quota of memory", _shown_size(quotas.memory_bytes)),
        ("quota of cpus", _shown(quotas.cpus)),
        ("quota of disk", _shown_size(quotas.disk_bytes)),
        ("requests per minute", _shown(quotas.requests_per_minute)),
        ("model tokens a month", _shown(quotas.model_tokens)),
    ]


def _shown(amount: float | None) -> str:
    return NONE if amount is None else f"{amount:,g}" if amount != int(amount) else f"{int(amount):,}"


def _shown_size(amount: int | None) -> str:
    return NONE if amount is None else render.human_bytes(amount)
