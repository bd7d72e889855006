"""Volumes over REST, and their files as a tar. Not here: mounts of sandboxes (`sandboxes.py`)."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response
from pydantic import Field

from atoll.contract.errors import (
    ArchiveRefused,
    Conflict,
    InvalidRequest,
    SandboxError,
    VolumeExists,
    VolumeNotFound,
)
from atoll.contract.model import Volume
from atoll.contract.names import is_name
from atoll.runtime.state.volumes import MIN_SIZE_BYTES
from atoll.surfaces.rest.caller import ApiRoute, Caller, requires
from atoll.surfaces.rest.errors import failures
from atoll.surfaces.rest.idempotent import IdempotencyKey, once
from atoll.surfaces.rest.pages import (
    MAX_INTEGER,
    After,
    JsonBody,
    Limit,
    NameField,
    Page,
    RequestBody,
    answer,
    page_answer,
)
from atoll.surfaces.rest.transfer import BINARY, BINARY_BODY, received, sent_file

router = APIRouter(prefix="/api/v1/volumes", tags=["volumes"], route_class=ApiRoute)
VolumeUser = Annotated[Caller, Depends(requires("volumes"))]
VolumePath = Annotated[str, Path(description="The name of a volume.", max_length=63)]
VolumeSize = Annotated[
    int | None, Query(ge=MIN_SIZE_BYTES, le=MAX_INTEGER, description="What may be written to it. Unset: no limit.")
]


class VolumeCreate(RequestBody):
    name: NameField = Field(examples=["cache"])
    size_bytes: int | None = Field(default=None, ge=MIN_SIZE_BYTES, le=MAX_INTEGER)
    """What may be written to it. Unset: no limit but the free space; a tenant with a quota of disk has to set it."""


async def _find(caller: Caller, name: str) -> Volume:
    if not is_name(name):
        raise VolumeNotFound(name, [])
    return await caller.engine.volumes.get(name)


@router.post(
    "",
    status_code=201,
    operation_id="volumes_create",
    response_model=Volume,
    responses=failures(409, 422),
)
async def create(
    request: Request, caller: VolumeUser, body: Annotated[VolumeCreate, JsonBody()], key: IdempotencyKey = None
) -> Response:
    """Create an empty volume."""
    async with once(caller, request, key, resource=body.name) as made:
        if made.replay is not None:
            return made.replay
        try:
            async with caller.server.quotas.reserve_volume(caller.tenant, caller.engine, body.name, body.size_bytes):
                volume = await caller.engine.volumes.create(body.name, body.size_bytes)
        except VolumeExists:
            made.require_not_interrupted()  # then it may be this request's own
            raise
        caller.note(resource=f"volumes/{volume.name}")
        return made.give(answer(volume, 201, {"Location": f"/api/v1/volumes/{volume.name}"}))


@router.get("", operation_id="volumes_list", response_model=Page[Volume], responses=failures())
async def list_volumes(caller: VolumeUser, limit: Limit = 100, after: After = None) -> Response:
    """The volumes of the tenant, by name."""
    return page_answer(await caller.engine.volumes.list(), lambda volume: volume.name, limit, after)


@router.get("/{volume}", operation_id="volumes_get", response_model=Volume, responses=failures(404))
async def get(caller: VolumeUser, volume: VolumePath) -> Response:
    """One volume. What it occupies is counted now."""
    return answer(await _find(caller, volume))


@router.delete("/{volume}", status_code=204, operation_id="volumes_delete", responses=failures(404, 409))
async def delete(caller: VolumeUser, volume: VolumePath) -> Response:
    """Remove a volume and its files. One that sandboxes mount is refused."""
    await _find(caller, volume)
    try:
        await caller.engine.volumes.remove(volume)
    except InvalidRequest as error:
        raise Conflict(error.message) from None
    return Response(status_code=204)


@router.get(
    "/{volume}/export",
    operation_id="volumes_export",
    response_class=Response,
    responses={**failures(404), 200: {"content": {"application/x-tar": BINARY}}},
)
async def export(caller: VolumeUser, volume: VolumePath) -> Response:
    """The files of a volume, as a tar."""
    found = await _find(caller, volume)
    return await sent_file(
        caller, f"{found.name}.tar", "application/x-tar", lambda path: caller.engine.volumes.export(found.name, path)
    )


@router.post(
    "/{volume}/import",
    status_code=201,
    operation_id="volumes_import",
    response_model=Volume,
    responses=failures(409, 413, 422, 507),
    openapi_extra=BINARY_BODY,
)
async def import_volume(
    request: Request,
    caller: VolumeUser,
    volume: Annotated[NameField, Path(description="The name of the new volume.")],
    size_bytes: VolumeSize = None,
) -> Response:
    """Create a volume with the files of a tar. When it fails, there is no volume."""
    reservation = caller.server.quotas.reserve_volume(caller.tenant, caller.engine, volume, size_bytes)
    async with received(caller, request) as path, reservation:
        try:
            return answer(await caller.engine.volumes.import_(volume, path, size_bytes), 201)
        except SandboxError as error:
            raise ArchiveRefused(error.message, reason="malformed") from None
