"""Checkpoints over REST: take, list and delete them, restore a sandbox, and fork others from it.

`legacy_router` has the one path of an older API: `GET /api/sandboxes/{name}/checkpoints`. Not here: sandboxes that are
created from a checkpoint (`sandboxes.py`), and archives (`transfer.py`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Annotated

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response
from pydantic import Field

from atoll.contract.errors import CheckpointNotFound, InvalidRequest
from atoll.contract.model import Checkpoint, SandboxInfo
from atoll.runtime.sandbox import Sandbox
from atoll.server.policy import check_create, check_image, check_inherited
from atoll.surfaces.rest.caller import ApiRoute, Caller, Reader, Writer
from atoll.surfaces.rest.errors import failures
from atoll.surfaces.rest.idempotent import IdempotencyKey, once
from atoll.surfaces.rest.pages import After, JsonBody, Limit, NameField, Page, RequestBody, answer, page_answer
from atoll.surfaces.rest.sandboxes import (
    SandboxPath,
    describe,
    find,
    find_checkpoint,
    find_interrupted,
    request_labels,
    reserved,
    shown,
)
from atoll.tools.sprites import SpriteCheckpoint, sprite_checkpoint

router = APIRouter(prefix="/api/v1", tags=["checkpoints"], route_class=ApiRoute)
legacy_router = APIRouter(prefix="/api/sandboxes", tags=["checkpoints"], route_class=ApiRoute)

CheckpointPath = Annotated[str, Path(description="The id of a checkpoint.", max_length=255)]
MAX_FORKS = 64


class CheckpointCreate(RequestBody):
    label: NameField | None = None
    """Unique among the checkpoints of the sandbox. Unset: it is found by its id only."""
    move: bool = False
    """Take the label from the checkpoint that has it."""


class SandboxRestore(RequestBody):
    checkpoint: str = Field(min_length=1, max_length=255)
    """Its id, or a label of the sandbox's own."""
    foreign: bool = False
    """The checkpoint may be another sandbox's, given by id."""


class SandboxFork(RequestBody):
    count: int | None = Field(default=None, ge=1, le=MAX_FORKS)
    """Unset: as many as names, or one."""
    names: list[NameField] | None = Field(default=None, min_length=1, max_length=MAX_FORKS)
    """Unset: names that begin with that of the sandbox."""
    checkpoint: str | None = None
    """Its id or label. Unset: the sandbox as it is now."""


async def _by_id(caller: Caller, id: str) -> Checkpoint:
    for each in await caller.engine.checkpoints():
        if each.id == id:
            return each
    raise CheckpointNotFound(id, {})


def _when(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.created_at.timestamp():017.6f} {checkpoint.id}"


@router.get("/checkpoints", operation_id="checkpoints_list", response_model=Page[Checkpoint], responses=failures())
async def list_all(caller: Reader, limit: Limit = 100, after: After = None) -> Response:
    """All checkpoints of the tenant, the oldest first."""
    return page_answer(await caller.engine.checkpoints(), _when, limit, after)


@router.get(
    "/checkpoints/{checkpoint}", operation_id="checkpoints_get", response_model=Checkpoint, responses=failures(404)
)
async def get(caller: Reader, checkpoint: CheckpointPath) -> Response:
    """One checkpoint."""
    return answer(await _by_id(caller, checkpoint))


@router.delete("/checkpoints/{checkpoint}", status_code=204, operation_id="checkpoints_delete", responses=failures(404))
async def delete(caller: Writer, checkpoint: CheckpointPath) -> Response:
    """Delete a checkpoint. What others are built on stays."""
    found = await _by_id(caller, checkpoint)
    await caller.engine.delete_checkpoint(found.id)
    return Response(status_code=204)


@router.get(
    "/sandboxes/{sandbox}/checkpoints",
    operation_id="sandboxes_checkpoints",
    response_model=Page[Checkpoint],
    responses=failures(404),
)
async def list_of_one(caller: Reader, sandbox: SandboxPath, limit: Limit = 100, after: After = None) -> Response:
    """The checkpoints of a sandbox, the oldest first."""
    found = await find(caller, sandbox)
    return page_answer(await caller.engine.checkpoints(found.name), _when, limit, after)


@router.post(
    "/sandboxes/{sandbox}/checkpoints",
    status_code=201,
    operation_id="checkpoints_create",
    response_model=Checkpoint,
    responses=failures(404, 409, 422),
)
async def create(
    request: Request,
    caller: Writer,
    sandbox: SandboxPath,
    body: Annotated[CheckpointCreate, JsonBody()],
    key: IdempotencyKey = None,
) -> Response:
    """Save a sandbox as it is now. It goes on."""
    async with once(caller, request, key) as made:
        if made.replay is not None:
            return made.replay
        made.require_not_interrupted()
        found = await find(caller, sandbox)
        checkpoint = await caller.engine.checkpoint(found.name, body.label, move=body.move)
        details = {"checkpoint": checkpoint.id, **({"label": body.label} if body.label else {})}
        await caller.server.events.record(caller.tenant.name, "checkpointed", await describe(found), **details)
        caller.note(**details)
        return made.give(answer(checkpoint, 201, {"Location": f"/api/v1/checkpoints/{checkpoint.id}"}))


@router.post(
    "/sandboxes/{sandbox}/restore",
    operation_id="sandboxes_restore",
    response_model=SandboxInfo,
    responses=failures(404, 409, 422),
)
async def restore(caller: Writer, sandbox: SandboxPath, body: Annotated[SandboxRestore, JsonBody()]) -> Response:
    """Restore a sandbox to a checkpoint. What was written since is lost, and processes end."""
    found = await find(caller, sandbox)
    if body.foreign:
        check_image(caller.tenant.policy, (await _by_id(caller, body.checkpoint)).image)
    restored = await caller.engine.restore(found.name, body.checkpoint, foreign=body.foreign)
    info = await describe(restored)
    await caller.server.events.saw(caller.tenant.name, info)
    await caller.server.events.record(caller.tenant.name, "restored", info, checkpoint=body.checkpoint)
    caller.note(checkpoint=body.checkpoint)
    return answer(info)


@router.post(
    "/sandboxes/{sandbox}/fork",
    status_code=201,
    operation_id="sandboxes_fork",
    response_model=Page[SandboxInfo],
    responses=failures(404, 409, 422),
)
async def fork(
    request: Request,
    caller: Writer,
    sandbox: SandboxPath,
    body: Annotated[SandboxFork, JsonBody()],
    key: IdempotencyKey = None,
) -> Response:
    """Create sandboxes that begin as this one is now, or was at a checkpoint. All of them, or none."""
    count = body.count or len(body.names or ("",))
    if body.names is not None and len(body.names) != count:
        raise InvalidRequest(f"names: {count} forks and {len(body.names)} names; give one name for each")
    async with once(caller, request, key) as made:
        if made.replay is not None:
            return made.replay
        labels = request_labels(caller, key)
        names = body.names or _fork_names((await find(caller, sandbox)).name, count, made.name)
        forks = await find_interrupted(caller, names, labels) if made.is_interrupted else []
        if not forks:
            forks = await _fork(caller, sandbox, names, labels, body.checkpoint)
        for each in forks:
            await caller.server.events.saw(caller.tenant.name, each.info)
        caller.note(forks=", ".join(names[:8]))
        return made.give(answer({"items": [shown(each.info) for each in forks], "next": None}, 201))


def _fork_names(source: str, count: int, request: str | None) -> list[str]:
    """Names that nobody has; for a `request` that is sent again, the same ones."""
    request = request or os.urandom(8).hex()
    digests = (hashlib.sha256(f"{request} {number}".encode()).hexdigest() for number in range(count))
    return [f"{source[:50]}-{digest[:8]}" for digest in digests]


async def _fork(
    caller: Caller, sandbox: str, names: Sequence[str], labels: Mapping[str, str], wanted: str | None
) -> list[Sandbox]:
    source = await describe(await find(caller, sandbox))
    if wanted is None:
        limits = check_create(
            caller.tenant.policy,
            image=source.image,
            mounts=source.mounts,
            network=source.network,
            runtime=source.runtime,
            limits=source.limits,
        ).limits
    else:
        checkpoint = await _own(caller, source, wanted)
        limits = check_inherited(caller.tenant.policy, caller.engine.inherited_spec(checkpoint.id)).limits
    async with reserved(caller, dict.fromkeys(names, limits)):
        return await caller.engine.fork_labelled(source.name, names, labels, checkpoint=wanted)


async def _own(caller: Caller, source: SandboxInfo, wanted: str) -> Checkpoint:
    """A checkpoint that a sandbox can be forked from: one of its own by label, or any of the tenant by id."""
    own = [each for each in await caller.engine.checkpoints(source.name) if each.label == wanted]
    return own[0] if own else await find_checkpoint(caller, wanted)


@legacy_router.get(
    "/{name}/checkpoints",
    operation_id="sprites_checkpoints",
    response_model=list[SpriteCheckpoint],
    responses=failures(404),
)
async def list_sprite(
    caller: Reader, name: Annotated[str, Path(description="The name or the id of a sandbox.", max_length=255)]
) -> Response:
    """The checkpoints of a sandbox, the oldest first, as clients of Sprites know them."""
    found = await find(caller, name)
    every = await caller.engine.checkpoints(found.name)
    return answer([sprite_checkpoint(each, found.id).model_dump() for each in every])
