"""Snapshots and forks of E2B's control plane, as checkpoints and forks of the engine.

Owns their ids: a snapshot is called by the checkpoint's id, or by the label that it was given as a name, each with the
tag `default`; both can be used as a template. Not here: templates that are built (`templates.py`).
"""

from __future__ import annotations

import os
from typing import Any

from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from atoll.builds.layers import is_layer
from atoll.contract.errors import AtollError, CheckpointNotFound, Forbidden, InvalidRequest
from atoll.contract.model import MAX_TTL_S, Checkpoint
from atoll.contract.names import is_name
from atoll.server.policy import check_create, check_ttl
from atoll.surfaces.e2b.control import E2bBody, error_body, not_supported, read_body, route
from atoll.surfaces.e2b.sandboxes import (
    DEFAULT_TAG,
    TEMPLATES,
    SandboxRoutes,
    describe_all,
    find,
    find_template,
    page,
    set_timeout,
)
from atoll.surfaces.e2b.tokens import public_id
from atoll.surfaces.rest.caller import Caller
from atoll.surfaces.rest.sandboxes import describe, find_checkpoint, reserved

MAX_FORKS = 64
DEFAULT_FORK_S = 15


class SnapshotBody(E2bBody):
    name: str | None = Field(default=None, max_length=128)
    memory: bool | None = None


class ForkBody(E2bBody):
    timeout: int | None = Field(default=None, ge=0, le=int(MAX_TTL_S))
    count: int | None = Field(default=None, ge=1, le=MAX_FORKS)


class SnapshotRoutes:
    """The routes. Forks are shown as sandboxes are."""

    def __init__(self, sandboxes: SandboxRoutes) -> None:
        self._sandboxes = sandboxes

    def routes(self) -> list[Route]:
        one = "/sandboxes/{sandbox}"
        logs = not_supported("logs of sandboxes are")
        return [
            route(f"{one}/fork", "POST", "fork", "sandboxes:write", self._fork),
            route(f"{one}/snapshots", "POST", "snapshot", "sandboxes:write", self._snapshot),
            route("/snapshots", "GET", "snapshots", "sandboxes:read", self._list),
            route("/templates/{template:path}", "DELETE", "delete_template", "sandboxes:write", self._delete),
            route(f"{one}/logs", "GET", "logs", "sandboxes:read", logs),
            route(f"/v2{one}/logs", "GET", "logs", "sandboxes:read", logs),
        ]

    async def _snapshot(self, request: Request, caller: Caller) -> Response:
        body = await read_body(request, SnapshotBody)
        sandbox = await find(caller, request.path_params["sandbox"])
        label = None
        if body.name is not None:
            label = body.name.removesuffix(DEFAULT_TAG).rpartition("/")[2]
            if not is_name(label) or label in TEMPLATES:
                raise InvalidRequest(
                    f"{body.name!r} is not a name for a snapshot; allowed are lower-case letters, digits, '-', '_' and "
                    f"'.', and none of {', '.join(TEMPLATES)}"
                )
            await self._free(caller, label)
        checkpoint = await caller.engine.checkpoint(sandbox.name, label, move=True)
        info = await describe(sandbox)
        await caller.server.events.record(caller.tenant.name, "checkpointed", info, checkpoint=checkpoint.id)
        return JSONResponse(_shown(checkpoint), 201)

    async def _free(self, caller: Caller, label: str) -> None:
        """A name means the newest snapshot that has it: an older one of another sandbox would make it ambiguous."""
        others = [each for each in await caller.engine.checkpoints() if each.label == label]
        if others:
            raise HTTPException(409, f"a snapshot named {label!r} exists already; delete it first, or use another name")

    async def _list(self, request: Request, caller: Caller) -> Response:
        query = request.query_params
        found = [each for each in await caller.engine.checkpoints() if each.reason is None and not is_layer(each)]
        if (wanted := query.get("sandboxID")) is not None:
            found = [each for each in found if public_id(each.sandbox_id) == wanted]
        if (name := query.get("name")) is not None:
            found = [each for each in found if each.label == name.removesuffix(DEFAULT_TAG)]
        found.sort(key=lambda each: (each.created_at, each.id), reverse=True)
        items, token = page(found, query.get("limit"), query.get("nextToken"), lambda each: each.id)
        return JSONResponse([_shown(each) for each in items], headers={"x-next-token": token} if token else None)

    async def _delete(self, request: Request, caller: Caller) -> Response:
        wanted: str = request.path_params["template"]
        name = wanted.removesuffix(DEFAULT_TAG)
        if name in TEMPLATES:
            raise Forbidden(f"the template {name!r} is the server's, and cannot be deleted")
        if await find_template(caller, wanted) is not None:
            await caller.engine.templates.remove(wanted.rpartition("/")[2])
            return Response(status_code=204)
        try:
            found = await find_checkpoint(caller, name)
        except CheckpointNotFound:
            raise HTTPException(404, f"template {wanted!r} not found") from None
        await caller.engine.delete_checkpoint(found.id)
        return Response(status_code=204)

    async def _fork(self, request: Request, caller: Caller) -> Response:
        """All forks begin as the sandbox is at one moment. Each entry of the answer is a sandbox or an error."""
        caller.key.require("sandboxes:exec")
        body = await read_body(request, ForkBody)
        source = await find(caller, request.path_params["sandbox"])
        count = body.count or 1
        info = source.info
        check_ttl(caller.tenant.policy, body.timeout or DEFAULT_FORK_S)
        try:
            limits = check_create(
                caller.tenant.policy,
                image=info.image,
                mounts=info.mounts,
                network=info.network,
                runtime=info.runtime,
                limits=info.limits,
            ).limits
            names = [f"e2b-{os.urandom(6).hex()}" for _ in range(count)]
            async with reserved(caller, dict.fromkeys(names, limits)):
                forks = await caller.engine.fork(source.name, count, names=names)
        except AtollError as error:
            _, said, _ = error_body(error, caller.request_id)
            return JSONResponse([{"error": said}] * count, 201)
        shown: list[dict[str, Any]] = []
        for fork in forks:
            await set_timeout(caller.tenant, fork, body.timeout or DEFAULT_FORK_S)
            made = await describe_all(fork)
            await caller.server.events.saw(caller.tenant.name, made)
            shown.append({"sandbox": self._sandboxes.shown(made)})
        return JSONResponse(shown, 201)


def _shown(checkpoint: Checkpoint) -> dict[str, Any]:
    named = [] if checkpoint.label is None else [f"{checkpoint.label}{DEFAULT_TAG}"]
    return {"snapshotID": f"{checkpoint.label or checkpoint.id}{DEFAULT_TAG}", "names": named}
