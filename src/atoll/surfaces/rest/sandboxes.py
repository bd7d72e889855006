"""Sandboxes over REST: create, list, get, update, delete, and the verbs of their life.

Owns the fields of a create, idempotent creation (a sandbox is found again by a reserved label, which no answer shows),
and what the tenant's policy and quotas are asked. Not here: checkpoints and forks (`checkpoints.py`), what happens
inside (`exec.py`, `files.py`, …), network and ports (`network.py`), usage (`usage.py`).
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Header, Path, Query, Request
from fastapi.responses import Response
from pydantic import Field, SecretStr

from atoll.contract.errors import (
    CheckpointNotFound,
    Conflict,
    InvalidRequest,
    RuntimeUnavailable,
    SandboxDied,
    SandboxExists,
    SandboxNotFound,
    Unenforceable,
)
from atoll.contract.model import (
    MAX_LABELS,
    MAX_TTL_S,
    RESERVED_LABELS,
    Checkpoint,
    Limits,
    Mount,
    OnExpiry,
    RuntimeName,
    SandboxInfo,
    Status,
)
from atoll.contract.names import TEMPLATE_PREFIX, is_name
from atoll.contract.network import NetworkPolicy
from atoll.contract.secret import Secret
from atoll.runtime.sandbox import Sandbox
from atoll.server.policy import AdmittedSandbox, check_create, check_inherited, check_limits, check_ttl
from atoll.surfaces.rest.caller import ApiRoute, Caller, Reader, Writer
from atoll.surfaces.rest.errors import failures
from atoll.surfaces.rest.idempotent import IdempotencyKey, once
from atoll.surfaces.rest.pages import (
    LABEL_KEYS,
    VARIABLE_KEYS,
    After,
    JsonBody,
    LabelValueField,
    Limit,
    NameField,
    Page,
    RequestBody,
    TextField,
    answer,
    page_answer,
)

REQUEST_LABEL = "atoll.dev/request"
TUNNEL_HEADER = "Atoll-Tunnel"
"""Sent by `atoll.connect`, whose connection to the sandbox an ephemeral one can be tied to."""
router = APIRouter(prefix="/api/v1/sandboxes", tags=["sandboxes"], route_class=ApiRoute)

SandboxPath = Annotated[str, Path(description="The name or the id of a sandbox.", max_length=255, examples=["demo"])]
Verb = TypeVar("Verb", bound=Callable[..., Coroutine[Any, Any, Response]])


class SecretInput(RequestBody):
    """A value that stays outside: the sandbox has a placeholder, which is replaced only in requests to `hosts`."""

    value: Annotated[
        SecretStr,
        Field(json_schema_extra={"minLength": 8, "maxLength": 8192, "pattern": "^[!-~]([ -~]*[!-~])?$"}),
    ]
    """Never shown again."""
    hosts: list[str] = Field(min_length=1, max_length=64)
    header: str = "authorization"


class SandboxRequest(RequestBody):
    """The options of a sandbox. What is left out is the tenant's, or the server's default."""

    name: NameField | None = Field(default=None, examples=["demo"])
    """Unset: the server chooses one."""
    image: str | None = None
    limits: Limits | None = None
    env: dict[str, TextField] = Field(default_factory=dict, json_schema_extra=VARIABLE_KEYS)
    secrets: dict[str, SecretInput] = Field(default_factory=dict, json_schema_extra=VARIABLE_KEYS)
    """By the variable that has the placeholder inside. Written only: no answer shows them."""
    secret_env: dict[str, SecretStr] = Field(default_factory=dict, json_schema_extra=VARIABLE_KEYS)
    """Variables that it has in clear. Written only."""
    user: str | None = Field(default=None, min_length=1, max_length=255)
    cwd: str | None = Field(default=None, pattern=r"^/[^\x00]*$", max_length=4095)
    runtime: RuntimeName | None = None
    pause_after_s: float | None = Field(default=None, gt=0, le=1_000_000)
    sudo: bool = False
    """Whether `sudo` works inside, without a password, for the user of commands that name none."""
    network: NetworkPolicy | None = None
    """Unset: no connection leaves it."""
    labels: dict[str, LabelValueField] = Field(
        default_factory=dict, max_length=MAX_LABELS, json_schema_extra=LABEL_KEYS
    )
    ttl_s: float | None = Field(default=None, ge=1, le=MAX_TTL_S)
    """Its lifetime. Unset: the tenant's maximum, if there is one, else until it is deleted."""
    on_expiry: OnExpiry = "destroy"
    """What happens at the end of its lifetime."""
    ttl_renewed_by_use: bool = False
    """Whether each use begins the lifetime anew."""
    mounts: list[Mount] = Field(default_factory=list, max_length=16)
    from_checkpoint: str | None = None
    ephemeral: bool = False
    """It ends with the client's connection: for clients that have one, which send the header Atoll-Tunnel."""


class SandboxUpdate(RequestBody):
    """What is left out stays as it is."""

    labels: dict[str, LabelValueField | None] = Field(
        default_factory=dict, max_length=MAX_LABELS, json_schema_extra=LABEL_KEYS
    )
    """Set; null removes one."""
    ttl_s: float | None = Field(default=None, ge=1, le=MAX_TTL_S)
    """Its lifetime from now on. Null: until it is deleted, or the longest that the tenant's policy allows."""
    on_expiry: OnExpiry | None = None
    ttl_renewed_by_use: bool | None = None
    limits: Limits | None = None


class SandboxExtend(RequestBody):
    ttl_s: float = Field(ge=1, le=MAX_TTL_S)
    """Its lifetime from now on."""


# --------------------------------------------------------------------------------------------------------------- names


async def find(caller: Caller, wanted: str) -> Sandbox:
    """The sandbox of this name or id.

    Raises:
        SandboxNotFound: the tenant has none.
    """
    try:
        return await caller.engine.get(wanted)
    except (SandboxNotFound, InvalidRequest):
        name = next((each.name for each in await caller.engine.list() if each.id == wanted), None)
        if name is None:
            raise SandboxNotFound(wanted, []) from None
        return await caller.engine.get(name)


async def find_listed(caller: Caller, wanted: str) -> SandboxInfo:
    """As `list` shows it, also if its record cannot be read.

    Raises:
        SandboxNotFound: the tenant has none.
    """
    found = await caller.engine.list(wanted if is_name(wanted) else "")
    info = next((each for each in found if each.name == wanted), None)
    info = info or next((each for each in await caller.engine.list() if each.id == wanted), None)
    if info is None:
        raise SandboxNotFound(wanted, [])
    return info


async def find_checkpoint(caller: Caller, wanted: str) -> Checkpoint:
    """The tenant's checkpoint with this id, or with this label if only one has it.

    Raises:
        CheckpointNotFound: there is none.
    """
    every = await caller.engine.checkpoints()
    found = [each for each in every if each.id == wanted] or [each for each in every if each.label == wanted]
    if len(found) > 1:
        raise InvalidRequest(f"{len(found)} checkpoints have the label {wanted!r}; give the id of one")
    if not found:
        raise CheckpointNotFound(wanted, {})
    return found[0]


def effective_limits(caller: Caller, limits: Limits, runtime: RuntimeName | None) -> Limits:
    """The limits that a sandbox created with these has.

    Raises:
        RuntimeUnavailable: there is no such runtime here.
    """
    try:
        return caller.engine.effective_limits(limits, runtime)
    except InvalidRequest as error:  # there is none of this name anywhere
        raise RuntimeUnavailable(error.message) from None


@asynccontextmanager
async def reserved(caller: Caller, wanted: Mapping[str, Limits]) -> AsyncIterator[None]:
    """Count these sandboxes, by name, as running with these limits while the block runs.

    Raises:
        QuotaExceeded: there is no room.
    """
    async with caller.server.quotas.reserve(caller.tenant, caller.engine, wanted):
        yield


async def describe(sandbox: Sandbox) -> SandboxInfo:
    """A sandbox as it is now.

    Raises:
        SandboxNotFound: it has just been destroyed.
    """
    try:
        await sandbox.status()
    except SandboxDied:
        raise SandboxNotFound(sandbox.name, []) from None
    return shown(sandbox.info)


def shown(info: SandboxInfo) -> SandboxInfo:
    """As an answer shows it: without reserved labels."""
    if not any(label.startswith(RESERVED_LABELS) for label in info.labels):
        return info
    labels = {name: value for name, value in info.labels.items() if not name.startswith(RESERVED_LABELS)}
    return info.model_copy(update={"labels": labels})


def check_labels_given(labels: dict[str, str] | dict[str, str | None]) -> None:
    """
    Raises:
        InvalidRequest: one is reserved.
    """
    for label in labels:
        if label.startswith(RESERVED_LABELS):
            raise InvalidRequest(
                f"the label {label!r} is reserved: labels may not begin with {RESERVED_LABELS}", label=label
            )


# -------------------------------------------------------------------------------------------------------------- routes


@router.post(
    "",
    status_code=201,
    operation_id="sandboxes_create",
    response_model=SandboxInfo,
    response_description="It was created, and answers.",
    responses=failures(404, 409, 413, 422),
)
async def create(
    request: Request,
    caller: Writer,
    body: Annotated[SandboxRequest, JsonBody()],
    key: IdempotencyKey = None,
    tunnel: Annotated[bool, Header(alias=TUNNEL_HEADER, description="Sent by atoll.connect.")] = False,
) -> Response:
    """Create a sandbox and wait until it answers."""
    if body.ephemeral and not tunnel:
        raise Unenforceable(
            "ephemeral: a REST client has no connection that the sandbox could end with; set ttl_s instead, or use "
            "atoll.connect"
        )
    check_labels_given(body.labels)
    async with once(caller, request, key, resource=body.name) as made:
        if made.replay is not None:
            return made.replay
        labels = request_labels(caller, key)
        found = await find_interrupted(caller, [made.name or ""], labels) if made.is_interrupted else []
        sandbox = found[0] if found else await _create(caller, body, made.name or body.name, labels)
        await caller.server.events.saw(caller.tenant.name, sandbox.info)
        caller.note(resource=f"sandboxes/{sandbox.name}")
        return made.give(answer(shown(sandbox.info), 201, {"Location": f"/api/v1/sandboxes/{sandbox.name}"}))


def request_labels(caller: Caller, key: str | None) -> dict[str, str]:
    """What the sandboxes that a request makes are found again by, if it is interrupted. Empty: it has no key."""
    if key is None:
        return {}
    return {REQUEST_LABEL: hashlib.sha256(f"{caller.tenant.name}\n{key}".encode()).hexdigest()[:32]}


async def find_interrupted(caller: Caller, names: Sequence[str], labels: Mapping[str, str]) -> list[Sandbox]:
    """What an interrupted request has made, of these names. Empty: nothing, and it can be carried out.

    Raises:
        SandboxExists: another request has made one of them.
    """
    found = []
    for name in names:
        try:
            await caller.engine.get(name)
            await caller.engine.remove_abandoned()  # what was made in part
            sandbox = await caller.engine.get(name)
        except SandboxNotFound:
            continue
        await sandbox.status()
        if not labels.items() <= sandbox.info.labels.items():
            raise SandboxExists(name)
        await sandbox.connect()
        found.append(sandbox)
    return found


async def begun_as(
    caller: Caller, image: str | None, limits: Limits | None, runtime: RuntimeName | None
) -> tuple[Limits, RuntimeName | None]:
    """The limits and the runtime of a sandbox of this image: what is asked for, on top of what a template has.

    Raises:
        TemplateNotFound: it is a template that there is not.
        InvalidRequest: its files were deleted.
    """
    limits = limits or Limits()
    if image is None or not image.startswith(TEMPLATE_PREFIX):
        return limits, runtime
    version = await caller.engine.templates.version(image)
    try:
        own = caller.engine.inherited_spec(version.checkpoint).limits
    except CheckpointNotFound:
        raise InvalidRequest(f"the files of {image} were deleted; build it again") from None
    return own.model_copy(update=limits.model_dump(exclude_none=True)), runtime or version.runtime


async def _admit(caller: Caller, body: SandboxRequest) -> AdmittedSandbox:
    limits, runtime = await begun_as(caller, body.image, body.limits, body.runtime)
    return check_create(
        caller.tenant.policy,
        image=body.image or caller.engine.default_image,
        mounts=body.mounts,
        network=body.network,
        runtime=runtime,
        limits=limits,
        ttl_s=body.ttl_s,
    )


@router.post("/check", status_code=204, operation_id="sandboxes_check", responses=failures(404, 422))
async def check(caller: Writer, body: Annotated[SandboxRequest, JsonBody()]) -> Response:
    """Check the options of a sandbox, as far as they can be without creating it. What is wrong is answered as a create
    answers it. Secrets are not looked at, and quotas are not asked."""
    check_labels_given(body.labels)
    if body.from_checkpoint is not None:
        raise InvalidRequest("from_checkpoint: the options of a sandbox from a checkpoint are checked when it is made")
    admitted = await _admit(caller, body)
    effective_limits(caller, admitted.limits, admitted.runtime)
    await caller.engine.check_options(
        {
            "image": admitted.image,
            "limits": admitted.limits,
            "env": body.env,
            "user": body.user,
            "cwd": body.cwd,
            "runtime": admitted.runtime,
            "pause_after_s": body.pause_after_s,
            "sudo": body.sudo,
            "network": admitted.network,
            "labels": body.labels,
            "ttl_s": admitted.ttl_s,
            "on_expiry": body.on_expiry,
            "ttl_renewed_by_use": body.ttl_renewed_by_use,
            "mounts": admitted.mounts,
        }
    )
    return Response(status_code=204)


async def _create(caller: Caller, body: SandboxRequest, name: str | None, labels: Mapping[str, str]) -> Sandbox:
    name = name or f"sandbox-{os.urandom(4).hex()}"
    policy, fresh = caller.tenant.policy, body.from_checkpoint is None
    if body.from_checkpoint is None:
        admitted = await _admit(caller, body)
        limits = effective_limits(caller, admitted.limits, admitted.runtime)
    else:
        inherited = caller.engine.inherited_spec((await find_checkpoint(caller, body.from_checkpoint)).id)
        admitted = check_inherited(
            policy, inherited, mounts=body.mounts, network=body.network, limits=body.limits, ttl_s=body.ttl_s
        )
        limits = admitted.limits
    async with reserved(caller, {name: limits}):
        return await caller.engine.create(
            name,
            image=admitted.image if fresh else body.image,
            limits=admitted.limits,
            env=body.env,
            secrets={each: Secret(one.value, hosts=one.hosts, header=one.header) for each, one in body.secrets.items()},
            secret_env=body.secret_env,
            user=body.user,
            cwd=body.cwd,
            runtime=admitted.runtime if fresh else body.runtime,
            pause_after_s=body.pause_after_s,
            sudo=body.sudo,
            network=admitted.network,
            labels={**body.labels, **labels},
            ttl_s=admitted.ttl_s,
            on_expiry=body.on_expiry,
            ttl_renewed_by_use=body.ttl_renewed_by_use,
            mounts=admitted.mounts,
            from_checkpoint=body.from_checkpoint,
            ephemeral=body.ephemeral,
        )


@router.get("", operation_id="sandboxes_list", response_model=Page[SandboxInfo], responses=failures())
async def list_sandboxes(
    caller: Reader,
    prefix: Annotated[str, Query(max_length=63, description="What the name begins with.")] = "",
    label: Annotated[list[str], Query(max_length=64, description="`KEY` or `KEY=VALUE`; several: all of them.")] = [],  # noqa: B006 - FastAPI copies it
    status: Annotated[list[Status], Query(max_length=6, description="Several: one of them.")] = [],  # noqa: B006
    limit: Limit = 100,
    after: After = None,
) -> Response:
    """The sandboxes of the tenant, by name."""
    wanted = [each.partition("=") for each in label]
    check_labels_given(dict.fromkeys(key for key, _, _ in wanted))
    found = await caller.engine.list(prefix)
    chosen = [
        shown(info)
        for info in found
        if (not status or info.status in status)
        and all(key in info.labels and (not given or info.labels[key] == value) for key, given, value in wanted)
    ]
    return page_answer(chosen, lambda info: info.name, limit, after)


@router.get("/{sandbox}", operation_id="sandboxes_get", response_model=SandboxInfo, responses=failures(404))
async def get(caller: Reader, sandbox: SandboxPath) -> Response:
    """A sandbox as it is now. It is not woken."""
    return answer(await describe(await find(caller, sandbox)))


@router.patch(
    "/{sandbox}", operation_id="sandboxes_update", response_model=SandboxInfo, responses=failures(404, 409, 422)
)
async def update(caller: Writer, sandbox: SandboxPath, body: Annotated[SandboxUpdate, JsonBody()]) -> Response:
    """Change labels, the lifetime or limits. When it fails, nothing is changed."""
    check_labels_given(body.labels)
    found = await find(caller, sandbox)
    ttl_s = None
    if "ttl_s" in body.model_fields_set:
        longest = check_ttl(caller.tenant.policy, body.ttl_s)
        ttl_s = math.inf if longest is None else longest
    return await changed(
        caller,
        found,
        labels=body.labels,
        ttl_s=ttl_s,
        on_expiry=body.on_expiry,
        ttl_renewed_by_use=body.ttl_renewed_by_use,
        limits=body.limits,
    )


async def changed(
    caller: Caller,
    found: Sandbox,
    *,
    labels: dict[str, str | None] | None = None,
    ttl_s: float | None = None,
    on_expiry: OnExpiry | None = None,
    ttl_renewed_by_use: bool | None = None,
    limits: Limits | None = None,
) -> Response:
    """Change a sandbox within the tenant's policy and quotas, and answer how it is."""
    async with AsyncExitStack() as stack:
        if limits is not None:
            given = {name: value for name, value in limits.model_dump().items() if value is not None}
            check_limits(caller.tenant.policy, limits)
            await found.status()
            limits = Limits.model_validate(given)
            await stack.enter_async_context(reserved(caller, {found.name: found.info.limits.model_copy(update=given)}))
        info = await caller.engine.update(
            found.name,
            labels=labels,
            ttl_s=ttl_s,
            on_expiry=on_expiry,
            ttl_renewed_by_use=ttl_renewed_by_use,
            limits=limits,
        )
    await caller.server.events.saw(caller.tenant.name, info)
    await caller.server.events.record(caller.tenant.name, "updated", info)
    return answer(shown(info))


@router.delete("/{sandbox}", status_code=204, operation_id="sandboxes_delete", responses=failures(404))
async def delete(
    caller: Writer,
    sandbox: SandboxPath,
    checkpoints: Annotated[bool, Query(description="Whether its checkpoints are deleted too.")] = False,
) -> Response:
    """End a sandbox and remove all of it. Its checkpoints stay, unless they are to be deleted too."""
    info = await find_listed(caller, sandbox)
    had = await caller.engine.destroy(info.id if info.runtime == "unknown" else info.name, checkpoints=checkpoints)
    await caller.server.previews.take_back(caller.tenant.name, info.id)
    await caller.server.events.gone(caller.tenant.name, info.id)
    return Response(status_code=204, headers={"Atoll-Sandbox": info.id, "Atoll-Checkpoints": str(had)})


# --------------------------------------------------------------------------------------------------------------- verbs


def _verb(name: str, *statuses: int) -> Callable[[Verb], Verb]:
    return router.post(
        f"/{{sandbox}}/{name}",
        operation_id=f"sandboxes_{name}",
        response_model=SandboxInfo,
        responses=failures(404, 409, 422, *statuses),
    )


async def _seen(caller: Caller, sandbox: Sandbox, headers: dict[str, str] | None = None) -> Response:
    info = await describe(sandbox)
    await caller.server.events.saw(caller.tenant.name, info)
    return answer(info, headers=headers)


@_verb("pause")
async def pause(caller: Writer, sandbox: SandboxPath) -> Response:
    """Freeze its processes in memory, until it is next used."""
    found = await find(caller, sandbox)
    await caller.engine.pause(found.name)
    return await _seen(caller, found)


@_verb("resume")
async def resume(caller: Writer, sandbox: SandboxPath) -> Response:
    """Resume a paused sandbox. One that sleeps is refused: wake it."""
    found = await find(caller, sandbox)
    try:
        return await _seen(caller, await caller.engine.resume(found.name))
    except InvalidRequest as error:
        raise Conflict(error.message) from None


@_verb("sleep")
async def sleep(
    caller: Writer,
    sandbox: SandboxPath,
    unused_for_s: Annotated[
        float | None, Query(ge=0, le=1e9, description="Only if it has not been used for so long.")
    ] = None,
) -> Response:
    """Put it to sleep on disk, until it is next used. The header Atoll-Slept says whether that was done now; if it
    would lose processes of one that is unused, that is paused instead."""
    found = await find(caller, sandbox)
    slept = True
    if unused_for_s is None:
        await caller.engine.sleep(found.name)
    else:
        slept = await caller.engine.sleep_unused(found.name, timedelta(seconds=unused_for_s))
    return await _seen(caller, found, {"Atoll-Slept": str(slept).lower()})


@_verb("wake")
async def wake(caller: Writer, sandbox: SandboxPath) -> Response:
    """Start a sandbox that sleeps, was shut down or has ended, and resume a paused one."""
    found = await find(caller, sandbox)
    return await _seen(caller, await caller.engine.wake(found.name))


@_verb("shutdown")
async def shutdown(caller: Writer, sandbox: SandboxPath) -> Response:
    """Put it to sleep until it is woken: using it is refused."""
    found = await find(caller, sandbox)
    await caller.engine.shutdown(found.name)
    return await _seen(caller, found)


@_verb("extend")
async def extend(caller: Writer, sandbox: SandboxPath, body: Annotated[SandboxExtend, JsonBody()]) -> Response:
    """Give it a lifetime from now on."""
    ttl_s = check_ttl(caller.tenant.policy, body.ttl_s)
    return await changed(caller, await find(caller, sandbox), ttl_s=ttl_s)
