"""Images and warm pools over REST. Images are shared by all tenants: each sees those that its policy allows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path
from fastapi.responses import Response
from pydantic import Field

from atoll.contract.errors import Conflict, Forbidden, ImageNotFound, ImageUnavailable, InvalidRequest
from atoll.contract.frozen import Frozen
from atoll.contract.model import Limits, RuntimeName, WarmPool
from atoll.runtime.images.reference import HOST
from atoll.runtime.images.store import ImageInfo
from atoll.server.policy import check_create, check_image
from atoll.surfaces.rest.caller import ApiRoute, Caller, Reader, Writer, requires
from atoll.surfaces.rest.errors import failures
from atoll.surfaces.rest.event_stream import MEDIA_TYPE, EventStream, ServerEvent
from atoll.surfaces.rest.pages import After, JsonBody, Limit, Page, RequestBody, answer, page_answer
from atoll.surfaces.rest.sandboxes import effective_limits

router = APIRouter(prefix="/api/v1", route_class=ApiRoute)
ImageUser = Annotated[Caller, Depends(requires("images"))]
ImageOperator = Annotated[Caller, Depends(requires("images", operator=True))]
_PROGRESS_S = 0.2


class ImagePull(RequestBody):
    reference: str = Field(min_length=1, max_length=4096, examples=["python:3.12"])


class PullProgress(Frozen):
    """The `data` of the event `progress`. That of `done` is the image."""

    step: str
    done_bytes: int
    total_bytes: int | None = None


class WarmPoolSet(RequestBody):
    count: int = Field(ge=0, le=1000)
    """How many sandboxes are to be ready. 0 removes the pool."""
    image: str | None = None
    limits: Limits | None = None
    runtime: RuntimeName | None = None


def _may_use(caller: Caller, image: str) -> bool:
    try:
        check_image(caller.tenant.policy, image)
    except (Forbidden, InvalidRequest):
        return False
    return True


@router.get(
    "/images", tags=["images"], operation_id="images_list", response_model=Page[ImageInfo], responses=failures()
)
async def list_images(caller: ImageUser, limit: Limit = 100, after: After = None) -> Response:
    """The images that are present and that the tenant may use, by reference."""
    found = await caller.engine.images.list()
    return page_answer(
        [image for image in found if _may_use(caller, image.reference)], lambda each: each.reference, limit, after
    )


@router.post(
    "/images",
    tags=["images"],
    operation_id="images_pull",
    response_model=ImageInfo,
    responses={**failures(422), 200: {"content": {MEDIA_TYPE: {"schema": {"type": "string"}}}}},
)
async def pull(
    caller: ImageUser,
    body: Annotated[ImagePull, JsonBody()],
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> Response:
    """Make an image present and current. As server-sent events it tells its progress."""
    check_image(caller.tenant.policy, body.reference)
    caller.note(resource=f"images/{body.reference}")
    if MEDIA_TYPE in accept:
        return EventStream(caller, _pulling(caller, body.reference))
    return answer(await caller.engine.images.pull(body.reference))


async def _pulling(caller: Caller, reference: str) -> AsyncIterator[ServerEvent]:
    """Progress at most five times a second, then the image. A client that stops reading stops the pull."""
    latest: PullProgress | None = None

    def progress(step: str, done: int, total: int | None) -> None:
        nonlocal latest
        latest = PullProgress(step=step, done_bytes=done, total_bytes=total)

    pulling = asyncio.ensure_future(caller.engine.images.pull(reference, progress=progress))
    shown = None
    try:
        while not pulling.done():
            await asyncio.wait([pulling], timeout=_PROGRESS_S)
            if latest is not shown:
                shown = latest
                yield ServerEvent("progress", shown)
        yield ServerEvent("done", pulling.result())
    finally:
        pulling.cancel()
        await asyncio.wait([pulling])


@router.delete(
    "/images/{reference:path}",
    tags=["images"],
    status_code=204,
    operation_id="images_remove",
    responses=failures(404, 409, 422),
)
async def remove(
    caller: ImageOperator, reference: Annotated[str, Path(max_length=4096, description="As the list shows it.")]
) -> Response:
    """Remove an image, for all tenants. One that is in use is refused."""
    try:
        await caller.engine.images.remove(reference)
    except ImageUnavailable:
        raise ImageNotFound(reference) from None
    except InvalidRequest as error:
        if "digest" in error.details or reference == HOST:
            raise Conflict(error.message) from None
        raise ImageNotFound(reference) from None  # it is no reference at all
    return Response(status_code=204)


# ---------------------------------------------------------------------------------------------------------- warm pools


@router.get(
    "/warm-pools",
    tags=["warm pools"],
    operation_id="warm_pools_list",
    response_model=Page[WarmPool],
    responses=failures(),
)
async def list_pools(caller: Reader, limit: Limit = 100, after: After = None) -> Response:
    """The warm pools of the tenant."""
    found = await caller.engine.warm_pools()
    return page_answer(found, _pool_key, limit, after)


def _pool_key(pool: WarmPool) -> str:
    return f"{pool.image} {pool.runtime} {pool.limits.model_dump_json(exclude_none=True)}"


@router.put(
    "/warm-pools",
    tags=["warm pools"],
    operation_id="warm_pools_set",
    response_model=WarmPool,
    responses=failures(409, 422),
)
async def set_pool(caller: Writer, body: Annotated[WarmPoolSet, JsonBody()]) -> Response:
    """Keep sandboxes ready that creates with the same image, limits and runtime claim. It answers when they are."""
    admitted = check_create(
        caller.tenant.policy,
        image=body.image or caller.engine.default_image,
        runtime=body.runtime,
        limits=body.limits or Limits(),
    )
    runtime = admitted.runtime or caller.engine.default_runtime
    limits = effective_limits(caller, admitted.limits, runtime)
    wanted = WarmPool(image=admitted.image, runtime=runtime, limits=limits, count=body.count, ready=0)
    caller.note(count=body.count, image=admitted.image)
    async with caller.server.quotas.reserve_pool(caller.tenant, caller.engine, wanted):
        return answer(await caller.engine.warm(body.count, image=admitted.image, limits=limits, runtime=runtime))


@router.delete(
    "/warm-pools", tags=["warm pools"], status_code=204, operation_id="warm_pools_remove", responses=failures()
)
async def remove_pools(caller: Writer) -> Response:
    """Remove all warm pools of the tenant, and their sandboxes."""
    await caller.engine.remove_warm_pools()
    return Response(status_code=204)
