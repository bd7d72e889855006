"""Tool bundles over REST: uploaded as gzipped tars, listed, and deleted. Not here: configs that use them, and what is
in an archive (`atoll.bundles`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field
from starlette.exceptions import HTTPException

from atoll.bundles.archive import MAX_BUNDLE_BYTES
from atoll.contract.documented import Documented
from atoll.contract.errors import InvalidRequest
from atoll.server.bundles import StoredBundle
from atoll.surfaces.door.middleware import BodyTooLarge
from atoll.surfaces.rest.caller import ApiRoute, Caller, requires
from atoll.surfaces.rest.errors import failures
from atoll.surfaces.rest.pages import After, Limit, Page, answer, page_answer
from atoll.surfaces.rest.transfer import BINARY, body_of

router = APIRouter(prefix="/api/v1/bundles", tags=["bundles"], route_class=ApiRoute)
BundleUser = Annotated[Caller, Depends(requires("bundles"))]
BundlePath = Annotated[str, Path(description="The id of a bundle.", max_length=100)]
MEDIA_TYPES = ("application/gzip", "application/x-gzip", "application/octet-stream")
_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/gzip": BINARY}}}


class UploadedBundle(Documented):
    """What a config names: `nap-bundle://<bundle_id>` and the digest."""

    model_config = ConfigDict(frozen=True)

    bundle_id: str = Field(examples=["bdl_5b1f0c9e7d2a4f6380c1e2d3"])
    sha256: str = Field(examples=["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"])
    """Of the bytes that were uploaded, in hexadecimal."""
    size_bytes: int = Field(examples=[4096])


@router.post(
    "",
    status_code=201,
    operation_id="bundles_create",
    response_model=UploadedBundle,
    responses={**failures(413, 415, 422), 200: {"model": UploadedBundle, "description": "It was there already."}},
    openapi_extra=_BODY,
)
async def create(request: Request, caller: BundleUser) -> Response:
    """Upload a bundle: a gzipped tar with `manifest.json` and `tools/`. It is checked to its last byte, and nothing of
    it is executed. The same bytes again are the same bundle."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in MEDIA_TYPES:
        raise HTTPException(415, "a bundle is a gzipped tar: send it with Content-Type: application/gzip")
    if (length := request.headers.get("content-length", "0")).isdigit() and int(length) > MAX_BUNDLE_BYTES:
        raise BodyTooLarge(MAX_BUNDLE_BYTES)
    stored, is_new = await caller.server.bundles.add(caller.tenant.name, _limited(request))
    caller.note(resource=f"bundles/{stored.bundle_id}", sha256=stored.sha256)
    made = UploadedBundle(bundle_id=stored.bundle_id, sha256=stored.sha256, size_bytes=stored.size_bytes)
    return answer(made, 201 if is_new else 200, {"Location": f"/api/v1/bundles/{stored.bundle_id}"})


async def _limited(request: Request) -> AsyncIterator[bytes]:
    size_bytes = 0
    async for data in body_of(request):
        size_bytes += len(data)
        if size_bytes > MAX_BUNDLE_BYTES:
            raise BodyTooLarge(MAX_BUNDLE_BYTES)
        yield data
    if not size_bytes:
        raise InvalidRequest("the body is empty; send the bytes of the archive (curl --data-binary @bundle.tgz)")


@router.get("", operation_id="bundles_list", response_model=Page[StoredBundle], responses=failures())
async def list_bundles(caller: BundleUser, limit: Limit = 100, after: After = None) -> Response:
    """The bundles of the tenant, by id."""
    found = await caller.server.bundles.list(caller.tenant.name)
    return page_answer(found, lambda bundle: bundle.bundle_id, limit, after)


@router.get("/{bundle}", operation_id="bundles_get", response_model=StoredBundle, responses=failures(404))
async def get(caller: BundleUser, bundle: BundlePath) -> Response:
    """One bundle: its manifest, and what models are told about its tools."""
    return answer(await caller.server.bundles.get(caller.tenant.name, bundle))


@router.delete("/{bundle}", status_code=204, operation_id="bundles_delete", responses=failures(404, 409))
async def delete(caller: BundleUser, bundle: BundlePath) -> Response:
    """Delete a bundle, its bytes, and what was built of it. One that a config uses is refused."""
    await caller.server.bundles.delete(caller.tenant.name, bundle)
    return Response(status_code=204)
