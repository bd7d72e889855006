"""Limits of a sandbox and what it uses, now and within the last hour, over REST."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import Response

from atoll.contract.frozen import Frozen
from atoll.contract.model import Limits, Usage
from atoll.server.history import SAMPLE_S, UsageSample
from atoll.surfaces.rest.caller import ApiRoute, Reader, Writer
from atoll.surfaces.rest.errors import failures
from atoll.surfaces.rest.pages import JsonBody, RequestBody, answer
from atoll.surfaces.rest.sandboxes import SandboxPath, changed, describe, find

router = APIRouter(prefix="/api/v1/sandboxes/{sandbox}", tags=["usage"], route_class=ApiRoute)


class SandboxLimits(RequestBody):
    """Those that are set hold from now on; the others stay."""

    limits: Limits


class SampledUsage(Frozen):
    interval_s: float
    samples: tuple[UsageSample, ...]
    """Of the last hour, the oldest first. None of the time in which the sandbox or the server did not run."""


@router.get("/limits", operation_id="sandboxes_get_limits", response_model=Limits, responses=failures(404))
async def get_limits(caller: Reader, sandbox: SandboxPath) -> Response:
    """The limits in force."""
    return answer((await describe(await find(caller, sandbox))).limits)


@router.patch("/limits", operation_id="sandboxes_set_limits", response_model=Limits, responses=failures(404, 409, 422))
async def set_limits(caller: Writer, sandbox: SandboxPath, body: Annotated[SandboxLimits, JsonBody()]) -> Response:
    """Change limits, of a running sandbox too. No process is ended for a lower one."""
    found = await find(caller, sandbox)
    await changed(caller, found, limits=body.limits)
    return answer((await describe(found)).limits)


@router.get("/stats", operation_id="sandboxes_stats", response_model=Usage, responses=failures(404))
async def stats(
    caller: Reader,
    sandbox: SandboxPath,
    disk: Annotated[bool, Query(description="Whether its files are counted, one by one. Without, that is 0.")] = True,
) -> Response:
    """What it uses now."""
    return answer(await (await find(caller, sandbox)).stat(disk=disk))


@router.get(
    "/stats/history", operation_id="sandboxes_stats_history", response_model=SampledUsage, responses=failures(404)
)
async def stats_history(caller: Reader, sandbox: SandboxPath) -> Response:
    """What it used within the last hour."""
    found = await find(caller, sandbox)
    return answer(SampledUsage(interval_s=SAMPLE_S, samples=tuple(caller.server.history.of(found.id))))
