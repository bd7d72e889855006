"""Agent configs: what an agent is told, which model answers, which tools it has, and where they run.

Owns their form, what is checked before one is stored, its versions and its secrets. A change makes a new version; old
ones are kept, so that a conversation can say which of them each of its turns used. Secrets are encrypted, of the newest
version only, and leave this module only for a workspace (`workspaces.py`). Not here: bundles (`bundles.py`), turns of a
conversation (`chat.py`), and HTTP routes.
"""

from __future__ import annotations

import builtins
import re
import secrets as random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import sqlalchemy as sa
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_core import to_json
from sqlalchemy.ext.asyncio import AsyncConnection

from atoll.bundles.builtin import BUILTIN_TOOLS
from atoll.contract.documented import Documented
from atoll.contract.errors import ConfigNotFound, Conflict, Forbidden, InvalidRequest
from atoll.contract.frozen import Frozen
from atoll.contract.model import Limits
from atoll.contract.network import NetworkPolicy
from atoll.contract.secret import Secret, check_secret_env
from atoll.runtime.secrets.vault import SandboxSecrets, StoredSecret, Vault
from atoll.server.database import Database
from atoll.server.policy import check_create
from atoll.server.tables import agent_config_versions, agent_configs
from atoll.server.tenants import Tenant
from atoll.tools.tool import nearest
from atoll.tools.vocabularies import VOCABULARIES

if TYPE_CHECKING:
    from atoll.server.bundles import Bundles, StoredBundle
    from atoll.settings import Settings

AgentType = Literal["client-side", "sandboxed"]
MAX_CONFIGS = 1000
"""Of one tenant."""
MAX_VERSIONS = 1000
"""Of one config. An older one is forgotten with each new one."""
MAX_DEFINITION_BYTES = 1024 * 1024
"""Of one version, as JSON."""
MAX_TENANT_BYTES = 128 * 1024 * 1024
"""Of all versions of all configs of a tenant. A list of configs is held in memory."""
MAX_TOOLS = 128
MAX_PROMPT_CHARS = 100_000
MAX_SECRETS = 64
GIVEN_VARIABLES = ("tenant_name", "agent_name", "date")
"""Placeholders of a system prompt that need no `template_vars`."""
WORKSPACE_TOOLS = frozenset(
    {"shell", "read_file", "write_file", "browse", *VOCABULARIES["coding"].tool_names, "execute_code"} - {"task"}
)
"""Tools of ours that a sandboxed agent may have besides those of its bundle; they work in its workspace."""
_PLACEHOLDER = re.compile(r"(?<!\{)\{([A-Za-z_][A-Za-z0-9_]*)\}(?!\})")
_TOOL_NAME = r"^[A-Za-z0-9_-]{1,64}$"
_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]{0,63}$"


# --------------------------------------------------------------------------------------------------------------- forms


class ConfigModel(Documented):
    """The base of what a config consists of. No error repeats a value: one of them may be a secret."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, hide_input_in_errors=True)


class ModelChoice(ConfigModel):
    """The model of an agent."""

    provider: str = Field(pattern=r"^[a-z][a-z-]{0,31}$", examples=["anthropic"])
    """`anthropic`, `bedrock`, `openai`, … as the operator allows them."""
    model: str = Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x20\x7f]+$", examples=["claude-sonnet-5-5"])
    temperature: float | None = Field(default=None, ge=0, le=2)
    max_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    """Of one answer. Unset: what the provider allows."""

    @property
    def name(self) -> str:
        """As `agents/models.py` names it."""
        return f"{self.provider}:{self.model}"


class ToolDeclaration(ConfigModel):
    """A tool that the client runs, with what a model is told about it."""

    name: str = Field(pattern=_TOOL_NAME)
    description: str = Field(default="", max_length=16_384)
    input_schema: dict[str, Any] = Field(default_factory=lambda: {"type": "object"})
    """The JSON schema of its arguments, of the type `object`."""


class ProvisioningBundle(ConfigModel):
    """The tool bundle of a sandboxed agent, as its upload was answered."""

    url: str = Field(min_length=1, max_length=2000, pattern=r"^[!-~]+$", examples=["nap-bundle://bdl_0c8b4dd0f4a74b66"])
    """`nap-bundle://<bundle_id>`."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class AgentBudget(ConfigModel):
    """What an agent may spend. Unset: no limit but the tenant's quota."""

    turn_tokens: int | None = Field(default=None, ge=1, le=2**53)
    """Tokens of the model, in and out, in one turn."""
    turn_steps: int = Field(default=50, ge=1, le=1000)
    """How often the model is asked in one turn."""
    tokens: int | None = Field(default=None, ge=1, le=2**53)
    """Tokens of all turns of the config together."""


class AgentDefinition(ConfigModel):
    """What a client says an agent is, without its secrets."""

    name: str = Field(pattern=r"^[^\x00-\x1f\x7f]{1,100}$", examples=["Site Editor"])
    agent_type: AgentType = "client-side"
    """Where its tools run: in the client's program, or in a workspace here."""
    system_prompt: str = Field(default="", max_length=MAX_PROMPT_CHARS)
    """With `{tenant_name}`, `{agent_name}`, `{date}` and the names of `template_vars` as placeholders. Other braces
    stay as they are."""
    template_vars: dict[str, Annotated[str, Field(max_length=16_384)]] = Field(
        default_factory=dict, max_length=64, json_schema_extra={"propertyNames": {"pattern": _VARIABLE}}
    )
    model: ModelChoice | None = Field(default=None, alias="model_config")
    """Unset: the server's own model."""
    tools_config: tuple[Annotated[str, Field(pattern=_TOOL_NAME)] | ToolDeclaration, ...] = Field(
        default=(), max_length=MAX_TOOLS, examples=[["read_file", "write_file"]]
    )
    """The tools that the model may call, by name; those that the client runs also with a description and a schema."""
    provisioning_bundle: ProvisioningBundle | None = None
    """Of a sandboxed agent: what its own tools are in. Unset: it has built-in tools only."""
    workspace_image: str | None = Field(default=None, min_length=1, max_length=512)
    """Unset: the server's default image."""
    workspace_network: NetworkPolicy | None = None
    """What its tools may connect to. Unset: nothing."""
    workspace_limits: Limits | None = None
    """Unset: the tenant's defaults."""
    budget: AgentBudget = AgentBudget()

    @property
    def tool_names(self) -> tuple[str, ...]:
        return tuple(tool if isinstance(tool, str) else tool.name for tool in self.tools_config)

    def prompt(self, tenant: str) -> str:
        """The system prompt of a turn that begins now."""
        values = {
            **self.template_vars,
            "tenant_name": tenant,
            "agent_name": self.name,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
        }
        return _PLACEHOLDER.sub(lambda found: values[found[1]], self.system_prompt)


class AgentConfig(AgentDefinition):
    """An agent config of a tenant, in its newest version unless another was asked for."""

    id: str
    version: int
    """Counts up with each change."""
    workspace_secret_names: tuple[str, ...] = ()
    """Of the newest version. The values are written only."""
    tokens_spent: int = 0
    """By all turns of the config."""
    created_at: datetime
    updated_at: datetime
    """When this version was made."""

    @property
    def sandbox(self) -> str:
        """The name of its workspace's sandbox."""
        return f"workspace-{self.id.removeprefix('cfg_')}"


@dataclass(frozen=True)
class WorkspaceSecrets:
    """The secrets of a config. Values are not shown when it is printed."""

    in_clear: Mapping[str, SecretStr]
    """By the variable: tools see the value."""
    outside: Mapping[str, Secret]
    """By the variable: tools see a placeholder, which is replaced in requests to its hosts."""
    version: int
    """Of the config, when they were last changed."""


SecretChanges = Mapping[str, "SecretStr | Secret | None"]
"""By the variable: a value that tools see in clear, one that stays outside and is sent to its hosts only, or None,
which removes it."""


# --------------------------------------------------------------------------------------------------------------- store


class AgentConfigs:
    """The agent configs of all tenants of a server."""

    def __init__(self, database: Database, vault: Vault, bundles: Bundles, settings: Settings) -> None:
        self._database = database
        self._vault = vault
        self._bundles = bundles
        self._settings = settings

    async def create(self, tenant: Tenant, definition: AgentDefinition, secrets: SecretChanges) -> AgentConfig:
        """
        Raises:
            InvalidRequest: something of it is not allowed, or does not fit the rest; or the tenant has too many.
            Forbidden: the tenant's policy or the operator does not allow it.
            BundleFailed: the bundle is not one of the tenant's.
        """
        bundle = await self._check(tenant, definition, [*secrets])
        sealed, names = self._seal(SandboxSecrets(), secrets)
        id, now = f"cfg_{random.token_hex(8)}", datetime.now(UTC)
        async with self._database.write(durable=True) as connection:
            count = sa.select(sa.func.count()).select_from(agent_configs).where(agent_configs.c.tenant == tenant.name)
            if (await connection.execute(count)).scalar_one() >= MAX_CONFIGS:
                raise InvalidRequest(f"a tenant may have {MAX_CONFIGS} agent configs; delete one first")
            row = {
                "id": id,
                "tenant": tenant.name,
                "version": 1,
                "bundle": bundle and bundle.bundle_id,
                "secrets": sealed,
                "secrets_version": 1,
                "tokens": 0,
                "created_at": now,
            }
            await connection.execute(sa.insert(agent_configs).values(row))
            await self._add_version(connection, tenant.name, id, 1, definition, names, now)
        return _config(id, 1, definition, names, 0, now, now)

    async def get(self, tenant: str, id: str, version: int | None = None) -> AgentConfig:
        """
        Raises:
            ConfigNotFound: the tenant has none with this id, or it has no such version.
        """
        return await self._database.look(lambda connection: _get(connection, tenant, id, version))

    async def list(self, tenant: str) -> builtins.list[AgentConfig]:
        """The oldest first."""
        query = _joined().where(agent_configs.c.tenant == tenant, _is_newest()).order_by(agent_configs.c.created_at)
        async with self._database.read() as connection:
            return [_read(row) for row in await connection.execute(query)]

    async def versions(
        self, tenant: str, id: str, *, before: int | None = None, limit: int = 100
    ) -> builtins.list[AgentConfig]:
        """The newest first; those `before` one, for the next page.

        Raises:
            ConfigNotFound: the tenant has none with this id.
        """
        query = _joined().where(agent_configs.c.id == id).order_by(agent_config_versions.c.version.desc()).limit(limit)
        if before is not None:
            query = query.where(agent_config_versions.c.version < before)
        async with self._database.read() as connection:
            await connection.run_sync(_get, tenant, id)
            return [_read(row) for row in await connection.execute(query)]

    async def update(
        self,
        tenant: Tenant,
        id: str,
        changes: Mapping[str, Any],
        secrets: SecretChanges,
        *,
        version: int | None = None,
    ) -> AgentConfig:
        """A new version with what is given replaced. Without any change there is none.

        `version` is the one that the caller knows: if it is no longer the newest, nothing is changed.

        Raises:
            ConfigNotFound: the tenant has none with this id.
            Conflict: it has another version by now.
            InvalidRequest, Forbidden, BundleFailed: as `create`.
        """
        old = await self.get(tenant.name, id)
        _require_version(old, version)
        data = {**_stored(old), **{name: _plain(value) for name, value in changes.items()}}
        try:
            definition = AgentDefinition.model_validate(data)
        except ValidationError as error:
            wrong = error.errors(include_input=False, include_url=False)[0]
            raise InvalidRequest(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None
        left = {*old.workspace_secret_names, *(name for name, value in secrets.items() if value is not None)}
        bundle = await self._check(tenant, definition, left - {name for name in secrets if secrets[name] is None})
        if not secrets and _stored(definition) == _stored(old):
            return old
        now = datetime.now(UTC)
        async with self._database.write(durable=True) as connection:
            row = (await connection.execute(_of(tenant.name, id).with_for_update())).one_or_none()
            if row is None:
                raise _missing(id)
            _require_version(await connection.run_sync(_get, tenant.name, id), old.version)
            sealed, names = self._seal(self._open(row.secrets), secrets)
            values = {
                "version": old.version + 1,
                "bundle": bundle and bundle.bundle_id,
                "secrets": sealed,
                "secrets_version": old.version + 1 if secrets else row.secrets_version,
            }
            await connection.execute(sa.update(agent_configs).where(agent_configs.c.id == id).values(values))
            await self._add_version(connection, tenant.name, id, old.version + 1, definition, names, now)
            forgotten = agent_config_versions.c.version <= old.version + 1 - MAX_VERSIONS
            versions = sa.delete(agent_config_versions).where(agent_config_versions.c.config == id, forgotten)
            await connection.execute(versions)
        return _config(id, old.version + 1, definition, names, old.tokens_spent, old.created_at, now)

    async def delete(self, tenant: str, id: str) -> None:
        """Remove it with its versions and conversations. Its workspace is to be removed before.

        Raises:
            ConfigNotFound: the tenant has none with this id.
        """
        async with self._database.write(durable=True) as connection:
            of_tenant = sa.and_(agent_configs.c.id == id, agent_configs.c.tenant == tenant)
            if (await connection.execute(sa.delete(agent_configs).where(of_tenant))).rowcount == 0:
                raise _missing(id)

    async def secrets(self, tenant: str, id: str) -> WorkspaceSecrets:
        """For its workspace.

        Raises:
            ConfigNotFound: the tenant has none with this id.
        """
        async with self._database.read() as connection:
            row = (await connection.execute(_of(tenant, id))).one_or_none()
        if row is None:
            raise _missing(id)
        opened = self._open(row.secrets)
        outside = {
            name: Secret(each.value, hosts=each.hosts, header=each.header) for name, each in opened.secrets.items()
        }
        in_clear = {name: SecretStr(value) for name, value in opened.env.items()}
        return WorkspaceSecrets(in_clear, outside, row.secrets_version)

    # ---- rows ----

    async def _add_version(
        self,
        connection: AsyncConnection,
        tenant: str,
        id: str,
        version: int,
        definition: AgentDefinition,
        secret_names: Iterable[str],
        now: datetime,
    ) -> None:
        data = {**_stored(definition), "workspace_secret_names": [*secret_names]}
        size = len(to_json(data))
        if size > MAX_DEFINITION_BYTES:
            raise InvalidRequest(f"an agent config may have {MAX_DEFINITION_BYTES} bytes as JSON; this one has {size}")
        held = sa.select(sa.func.sum(sa.func.length(sa.cast(agent_config_versions.c.data, sa.Text))))
        of_tenant = held.join(agent_configs).where(agent_configs.c.tenant == tenant)
        if ((await connection.execute(of_tenant)).scalar_one() or 0) + size > MAX_TENANT_BYTES:
            raise InvalidRequest(
                f"the agent configs of a tenant may have {MAX_TENANT_BYTES} bytes with all of their versions; delete "
                "one that is not needed"
            )
        row = {"config": id, "version": version, "data": data, "created_at": now}
        await connection.execute(sa.insert(agent_config_versions).values(row))

    def _open(self, sealed: str | None) -> SandboxSecrets:
        return SandboxSecrets() if sealed is None else self._vault.open(sealed)

    def _seal(self, old: SandboxSecrets, changes: SecretChanges) -> tuple[str | None, tuple[str, ...]]:
        """The secrets with these changes, encrypted, and their names."""
        env = {name: value for name, value in old.env.items() if name not in changes}
        outside = {name: value for name, value in old.secrets.items() if name not in changes}
        for name, value in changes.items():
            if isinstance(value, Secret):
                outside[name] = StoredSecret(
                    placeholder="", value=value.value.get_secret_value(), hosts=value.hosts, header=value.header
                )
            elif value is not None:
                env |= check_secret_env({name: value})
        names = tuple(sorted([*env, *outside]))
        if len(names) > MAX_SECRETS:
            raise InvalidRequest(f"workspace_secrets: there may be {MAX_SECRETS}; {len(names)} were given")
        return (self._vault.seal(SandboxSecrets(env=env, secrets=outside)) if names else None), names

    # ---- what is allowed ----

    async def _check(
        self, tenant: Tenant, definition: AgentDefinition, secret_names: Iterable[str]
    ) -> StoredBundle | None:
        """Its bundle, if it has one and all of it is allowed."""
        _check_prompt(definition)
        if definition.model is not None:
            check_model(self._settings, definition.model.name)
        names = definition.tool_names
        if twice := [name for name in names if names.count(name) > 1]:
            raise InvalidRequest(f"tools_config: {twice[0]!r} is named twice; name each tool once")
        if definition.agent_type == "client-side":
            _check_client_side(definition, [*secret_names])
            return None
        if declared := [tool.name for tool in definition.tools_config if isinstance(tool, ToolDeclaration)]:
            raise InvalidRequest(
                f"tools_config: {declared[0]!r} is declared with a description or a schema; the tools of a sandboxed "
                "agent are named only: the bundle's manifest describes them"
            )
        check_create(
            tenant.policy,
            image=definition.workspace_image or self._settings.image,
            network=definition.workspace_network,
            limits=definition.workspace_limits,
        )
        given = definition.provisioning_bundle
        bundle = None if given is None else await self._bundles.resolve(tenant.name, given.url, given.sha256)
        _check_tools(names, [] if bundle is None else [tool.name for tool in bundle.tools], given is not None)
        return bundle


def check_model(settings: Settings, name: str) -> None:
    """
    Raises:
        Forbidden: the operator does not allow agents to have this model.
    """
    patterns = settings.agent_models.split()
    allowed = any(re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) for pattern in patterns)
    if name != settings.model and (not allowed or ".." in name.split("/")):
        raise Forbidden(
            f"model_config: the model {name!r} is not allowed on this server; allowed: "
            f"{', '.join([settings.model, *patterns])}",
            hint="the setting agent_models (ATOLL_AGENT_MODELS) lists what agents may name",
        )


def _check_prompt(definition: AgentDefinition) -> None:
    if taken := [name for name in definition.template_vars if name in GIVEN_VARIABLES]:
        raise InvalidRequest(f"template_vars: {taken[0]!r} is given by the server; use another name")
    if wrong := [name for name in definition.template_vars if not re.fullmatch(_VARIABLE, name)]:
        raise InvalidRequest(
            f"template_vars: {wrong[0][:100]!r} is not a name; allowed are letters, digits and '_', up to 64"
        )
    known = [*GIVEN_VARIABLES, *definition.template_vars]
    for name in dict.fromkeys(_PLACEHOLDER.findall(definition.system_prompt)):
        if name not in known:
            raise InvalidRequest(
                f"system_prompt: the placeholder {{{name[:100]}}} has no value; there are "
                f"{', '.join(f'{{{each}}}' for each in known)}{nearest(name, known)}. Give it in template_vars, or "
                f"write {{{{{name[:100]}}}}} for braces that stay"
            )
    # Before it is filled in: a placeholder may be in it thousands of times.
    values = {**dict.fromkeys(GIVEN_VARIABLES, ""), **definition.template_vars}
    size = len(definition.system_prompt) + sum(
        len(values[name]) for name in _PLACEHOLDER.findall(definition.system_prompt)
    )
    if size > MAX_PROMPT_CHARS:
        raise InvalidRequest(
            f"system_prompt: it has {size} characters with template_vars filled in; it may have {MAX_PROMPT_CHARS}"
        )


def _check_client_side(definition: AgentDefinition, secret_names: builtins.list[str]) -> None:
    given = {
        "provisioning_bundle": definition.provisioning_bundle,
        "workspace_image": definition.workspace_image,
        "workspace_network": definition.workspace_network,
        "workspace_limits": definition.workspace_limits,
        "workspace_secrets": secret_names or None,
    }
    if extra := [name for name, value in given.items() if value is not None]:
        raise InvalidRequest(
            f"{extra[0]}: a client-side agent has no workspace; leave it out, or set agent_type to 'sandboxed'"
        )
    for tool in definition.tools_config:
        if isinstance(tool, ToolDeclaration) and tool.input_schema.get("type") != "object":
            raise InvalidRequest(f"tools_config: the input_schema of {tool.name!r} has to be of the type 'object'")


def _check_tools(names: Iterable[str], in_bundle: builtins.list[str], has_bundle: bool) -> None:
    offered = [*in_bundle, *BUILTIN_TOOLS, *sorted(WORKSPACE_TOOLS)]
    unknown = [name for name in names if name not in offered]
    unnamed = [name for name in in_bundle if name not in names]
    if unknown:
        where = "in the bundle's manifest" if has_bundle else "known here, and there is no provisioning_bundle"
        raise InvalidRequest(
            f"tools_config: {', '.join(map(repr, unknown))} {'is' if len(unknown) == 1 else 'are'} not {where}; its "
            f"tools are {', '.join(in_bundle) or 'none'}, and built in are {', '.join(offered[len(in_bundle) :])}",
            unknown=unknown,
            unnamed=unnamed,
        )
    if unnamed:
        raise InvalidRequest(
            f"tools_config: the bundle's manifest has {', '.join(map(repr, unnamed))}, which tools_config does not "
            "name; name all of its tools, or upload a bundle without them",
            unknown=unknown,
            unnamed=unnamed,
        )


def _require_version(config: AgentConfig, version: int | None) -> None:
    if version is not None and version != config.version:
        raise Conflict(
            f"the agent config has version {config.version} by now, not {version}; read it, and send the change again "
            "with that version",
            version=config.version,
        )


def _missing(id: str) -> ConfigNotFound:
    return ConfigNotFound(f"no agent config has the id {id!r}", config=id)


def _get(connection: sa.Connection, tenant: str, id: str, version: int | None = None) -> AgentConfig:
    chosen = _is_newest() if version is None else agent_config_versions.c.version == version
    query = _joined().where(agent_configs.c.id == id, agent_configs.c.tenant == tenant, chosen)
    row = connection.execute(query).one_or_none()
    if row is not None:
        return _read(row)
    if version is None:
        raise _missing(id)
    raise ConfigNotFound(
        f"the agent config {id!r} has no version {version}, or not any more", config=id, version=version
    )


def _is_newest() -> sa.ColumnElement[bool]:
    return agent_config_versions.c.version == agent_configs.c.version


def _of(tenant: str, id: str) -> sa.Select[Any]:
    return sa.select(agent_configs).where(agent_configs.c.id == id, agent_configs.c.tenant == tenant)


def _joined() -> sa.Select[Any]:
    return sa.select(
        agent_configs.c.id,
        agent_configs.c.tokens,
        agent_configs.c.created_at,
        agent_config_versions.c.version,
        agent_config_versions.c.data,
        agent_config_versions.c.created_at.label("updated_at"),
    ).join(agent_config_versions)


def _read(row: sa.Row[Any]) -> AgentConfig:
    names = row.data["workspace_secret_names"]
    definition = AgentDefinition.model_validate({k: v for k, v in row.data.items() if k != "workspace_secret_names"})
    return _config(row.id, row.version, definition, names, row.tokens, row.created_at, row.updated_at)


def _config(
    id: str,
    version: int,
    definition: AgentDefinition,
    secret_names: Iterable[str],
    tokens: int,
    created_at: datetime,
    updated_at: datetime,
) -> AgentConfig:
    own = {name: getattr(definition, name) for name in AgentDefinition.model_fields}
    return AgentConfig(
        **own,
        id=id,
        version=version,
        workspace_secret_names=tuple(secret_names),
        tokens_spent=tokens,
        created_at=created_at,
        updated_at=updated_at,
    )


def _stored(definition: AgentDefinition) -> dict[str, Any]:
    """As a version has it: what a client sets, by the names that it uses."""
    return definition.model_dump(mode="json", by_alias=True, include={*AgentDefinition.model_fields})


def _plain(value: Any) -> Any:
    if isinstance(value, Frozen):
        return value.model_dump(mode="json")
    return value.model_dump(mode="json", by_alias=True) if isinstance(value, BaseModel) else value
