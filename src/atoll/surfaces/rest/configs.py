"""Agent configs and their workspaces over REST.

Not here: what is checked and stored (`atoll.server.configs`), workspaces (`atoll.server.workspaces`), and turns
(`chat.py`).
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Request
from fastapi.responses import Response
from pydantic import Field, SecretStr

from atoll.bundles.workspace import WorkspaceInstance, WorkspaceState
from atoll.contract.errors import InvalidRequest
from atoll.contract.model import Limits
from atoll.contract.network import NetworkPolicy
from atoll.contract.secret import Secret
from atoll.server.configs import (
    MAX_PROMPT_CHARS,
    MAX_SECRETS,
    MAX_TOOLS,
    AgentBudget,
    AgentConfig,
    AgentDefinition,
    AgentType,
    ModelChoice,
    ProvisioningBundle,
    SecretChanges,
    ToolDeclaration,
)
from atoll.surfaces.rest.caller import ApiRoute, Caller, requires
from atoll.surfaces.rest.errors import failures
from atoll.surfaces.rest.idempotent import IdempotencyKey, once
from atoll.surfaces.rest.pages import (
    VARIABLE_KEYS,
    After,
    AfterNumber,
    JsonBody,
    Limit,
    Page,
    RequestBody,
    answer,
    page,
    page_answer,
)
from atoll.surfaces.rest.sandboxes import SecretInput
from atoll.tools.tool import StrictModel

router = APIRouter(prefix="/api/v1/configs", tags=["agents"], route_class=ApiRoute)
AgentReader = Annotated[Caller, Depends(requires("agents:read"))]
AgentWriter = Annotated[Caller, Depends(requires("agents:write"))]
ConfigPath = Annotated[str, Path(description="The id of an agent config.", max_length=64)]
IfMatch = Annotated[
    str | None,
    Header(
        alias="If-Match",
        max_length=32,
        pattern=r'^(\*|(W/)?"?[0-9]{1,9}"?)$',
        description='The version that the client knows, as the header ETag has it: "3". Another is refused.',
    ),
]
SecretField = Annotated[SecretStr, Field(min_length=1, max_length=65_536)] | SecretInput


class ConfigCreate(AgentDefinition):
    """A new agent config."""

    workspace_secrets: dict[str, SecretField] = Field(
        default_factory=dict, max_length=MAX_SECRETS, json_schema_extra=VARIABLE_KEYS
    )
    """By the variable. A value is seen by tools in clear; with `hosts`, they have a placeholder instead, which is
    replaced in requests to these only. Written only: no answer shows them."""


def _without_default(schema: dict[str, Any]) -> None:
    """What is left out is kept as it is: it does not become the default."""
    schema.pop("default", None)


class ConfigUpdate(RequestBody):
    """What is left out stays as it is; what is given is replaced as a whole, but for secrets."""

    name: str = Field(default="", pattern=r"^[^\x00-\x1f\x7f]{1,100}$", json_schema_extra=_without_default)
    agent_type: AgentType = Field(default="client-side", json_schema_extra=_without_default)
    system_prompt: str = Field(default="", max_length=MAX_PROMPT_CHARS, json_schema_extra=_without_default)
    template_vars: dict[str, str] | None = Field(default=None, max_length=64)
    model: ModelChoice | None = Field(default=None, alias="model_config")
    """Null: the server's own model."""
    tools_config: list[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | ToolDeclaration] | None = Field(
        default=None, max_length=MAX_TOOLS
    )
    provisioning_bundle: ProvisioningBundle | None = None
    """Null: none."""
    workspace_image: str | None = Field(default=None, min_length=1, max_length=512)
    workspace_network: NetworkPolicy | None = None
    workspace_limits: Limits | None = None
    budget: AgentBudget | None = None
    workspace_secrets: dict[str, SecretField | None] = Field(
        default_factory=dict, max_length=MAX_SECRETS, json_schema_extra=VARIABLE_KEYS
    )
    """Set; null removes one. Those that are left out stay."""
    version: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """The version that the client knows. If there is a newer one, nothing is changed (409)."""


class WorkspaceBody(StrictModel):
    """The workspace of a config."""

    config_id: str
    state: WorkspaceState | None
    """Unset: it has never been booted; the first call of a tool does that."""
    sandbox: str
    """The name of its sandbox."""
    instance: WorkspaceInstance | None
    """Its newest one."""


@router.post(
    "",
    status_code=201,
    operation_id="configs_create",
    response_model=AgentConfig,
    responses=failures(404, 409, 413, 422),
)
async def create(
    request: Request, caller: AgentWriter, body: Annotated[ConfigCreate, JsonBody()], key: IdempotencyKey = None
) -> Response:
    """Create an agent config."""
    async with once(caller, request, key) as made:
        if made.replay is not None:
            return made.replay
        made.require_not_interrupted()
        given = {name: getattr(body, name) for name in AgentDefinition.model_fields}
        config = await caller.server.configs.create(
            caller.tenant, AgentDefinition(**given), _secrets(body.workspace_secrets)
        )
        caller.note(resource=f"configs/{config.id}", agent_type=config.agent_type)
        return made.give(_answer(config, 201))


@router.get("", operation_id="configs_list", response_model=Page[AgentConfig], responses=failures())
async def list_configs(caller: AgentReader, limit: Limit = 100, after: After = None) -> Response:
    """The agent configs of the tenant, the oldest first."""
    found = await caller.server.configs.list(caller.tenant.name)
    return page_answer(found, lambda each: f"{each.created_at.timestamp():017.6f} {each.id}", limit, after)


@router.get("/{config}", operation_id="configs_get", response_model=AgentConfig, responses=failures(404))
async def get(caller: AgentReader, config: ConfigPath) -> Response:
    """An agent config, without the values of its secrets."""
    return _answer(await caller.server.configs.get(caller.tenant.name, config))


@router.patch(
    "/{config}", operation_id="configs_update", response_model=AgentConfig, responses=failures(404, 409, 413, 422)
)
async def update(
    caller: AgentWriter,
    config: ConfigPath,
    body: Annotated[ConfigUpdate, JsonBody()],
    if_match: IfMatch = None,
) -> Response:
    """Change an agent config, which makes a new version of it. Turns that are under way keep theirs."""
    known = body.version if if_match is None else _version(if_match)
    fields = body.model_fields_set - {"workspace_secrets", "version"}
    changes = {("model_config" if name == "model" else name): getattr(body, name) for name in fields}
    for name, empty in (("template_vars", {}), ("tools_config", []), ("budget", AgentBudget())):
        if name in changes and changes[name] is None:
            changes[name] = empty
    changed = await caller.server.configs.update(
        caller.tenant, config, changes, _secrets(body.workspace_secrets), version=known
    )
    caller.note(version=changed.version)
    return _answer(changed)


@router.delete("/{config}", status_code=204, operation_id="configs_delete", responses=failures(404, 409))
async def delete(caller: AgentWriter, config: ConfigPath) -> Response:
    """Delete an agent config with its versions, its workspace and its conversations. Turns under way are cancelled."""
    await caller.server.load_chat()
    await caller.server.chat.delete_config(caller.tenant.name, config)
    return Response(status_code=204)


@router.get(
    "/{config}/versions", operation_id="configs_versions", response_model=Page[AgentConfig], responses=failures(404)
)
async def versions(caller: AgentReader, config: ConfigPath, limit: Limit = 100, after: AfterNumber = None) -> Response:
    """The versions of an agent config, the newest first."""
    found = await caller.server.configs.versions(
        caller.tenant.name, config, before=None if after is None else min(int(after), 2**31 - 1), limit=limit + 1
    )
    return page(found[:limit], str(found[limit - 1].version) if len(found) > limit else None)


# ----------------------------------------------------------------------------------------------------------- workspaces


@router.get(
    "/{config}/workspace", operation_id="workspaces_get", response_model=WorkspaceBody, responses=failures(404, 422)
)
async def workspace(caller: AgentReader, config: ConfigPath) -> Response:
    """The workspace of a sandboxed agent."""
    found = await _sandboxed(caller, config)
    newest = await caller.server.workspaces.newest(caller.tenant.name, found)
    return answer(
        WorkspaceBody(
            config_id=found.id,
            state=None if newest is None else newest.state,
            sandbox=found.sandbox,
            instance=newest,
        )
    )


@router.delete(
    "/{config}/workspace", status_code=204, operation_id="workspaces_delete", responses=failures(404, 409, 422)
)
async def delete_workspace(caller: AgentWriter, config: ConfigPath) -> Response:
    """Remove the workspace of an agent with its files. The next call of a tool makes another."""
    await caller.server.workspaces.destroy(caller.tenant.name, await _sandboxed(caller, config))
    return Response(status_code=204)


@router.get(
    "/{config}/workspace/instances",
    operation_id="workspaces_instances",
    response_model=Page[WorkspaceInstance],
    responses=failures(404, 422),
)
async def instances(caller: AgentReader, config: ConfigPath, limit: Limit = 100, after: After = None) -> Response:
    """The lives of an agent's workspace, the oldest first: how each began and ended, and the end of its log."""
    found = await caller.server.workspaces.instances((await _sandboxed(caller, config)).id)
    return page_answer(found, lambda each: f"{each.created_at.timestamp():017.6f} {each.external_id}", limit, after)


@router.get(
    "/{config}/workspace/instances/{external_id}",
    operation_id="workspaces_instance",
    response_model=WorkspaceInstance,
    responses=failures(404, 422),
)
async def instance(
    caller: AgentReader, config: ConfigPath, external_id: Annotated[str, Path(max_length=128)]
) -> Response:
    """One life of an agent's workspace; if it failed, with the reason."""
    found = await _sandboxed(caller, config)
    return answer(await caller.server.workspaces.instance(found.id, external_id))


async def _sandboxed(caller: Caller, config: str) -> AgentConfig:
    found = await caller.server.configs.get(caller.tenant.name, config)
    if found.agent_type != "sandboxed":
        raise InvalidRequest("the agent is client-side, and has no workspace")
    return found


# --------------------------------------------------------------------------------------------------------------- bodies


def _answer(config: AgentConfig, status: int = 200) -> Response:
    headers = {"ETag": f'"{config.version}"'}
    if status == 201:
        headers["Location"] = f"/api/v1/configs/{config.id}"
    return answer(config, status, headers)


def _version(if_match: str) -> int | None:
    if if_match == "*":
        return None
    return int(if_match.removeprefix("W/").strip('"'))


def _secrets(given: dict[str, Any]) -> SecretChanges:
    return {
        name: Secret(value.value, hosts=value.hosts, header=value.header) if isinstance(value, SecretInput) else value
        for name, value in given.items()
    }
