"""What `atoll.connect` asks of a server besides its resources: what the machine is able to, and sessions.

A session of sandboxes (`Engine.pool`) is open for as long as its WebSocket: a client that is gone has ended it, as a
process that is killed has on its own machine. Not here: the way into sandboxes (`tunnel.py`).
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Annotated

import anyio
import anyio.to_thread
from fastapi import APIRouter, Depends, Query, WebSocket
from fastapi.responses import Response
from starlette.websockets import WebSocketState

from atoll.contract.driver import Capabilities
from atoll.contract.errors import AtollError, RuntimeUnavailable, Unauthenticated
from atoll.contract.frozen import Frozen
from atoll.contract.model import GcResult, RuntimeName
from atoll.runtime.images.contents import ImageContents
from atoll.server.policy import check_image, check_runtime
from atoll.surfaces.rest.caller import AnyCaller, ApiRoute, Caller, Reader, Writer, requires
from atoll.surfaces.rest.errors import answer_to, failures
from atoll.surfaces.rest.event_stream import CHECK_KEY_S
from atoll.surfaces.rest.pages import answer
from atoll.surfaces.rest.sandboxes import SandboxPath, find
from atoll.surfaces.rest.transfer import STALL_S, open_pipe, read_pipe
from atoll.surfaces.rest.tunnel import UNAUTHENTICATED

router = APIRouter(prefix="/api/v1", tags=["host"], route_class=ApiRoute)


class UsableRuntime(Frozen):
    name: RuntimeName
    capabilities: Capabilities


class HostFacts(Frozen):
    """What sandboxes of this server have, and may have."""

    version: str
    tenant: str
    """Whose sandboxes the key sees."""
    image: str
    """Of sandboxes that name none."""
    runtime: RuntimeName | None
    """Of sandboxes that name none. Null: there is none that can be used."""
    runtimes: tuple[UsableRuntime, ...]
    """Those that can be used, fastest first, then those that must be requested by name."""


class FoundContents(Frozen):
    contents: ImageContents | None
    """Null: the image is not present."""


@router.get("/host", operation_id="host_get", response_model=HostFacts, responses=failures())
async def get(caller: AnyCaller) -> Response:
    """What the server's machine is able to."""
    import atoll

    runtimes = await anyio.to_thread.run_sync(caller.engine.runtimes)
    usable = tuple(UsableRuntime(name=name, capabilities=able) for name, able in runtimes.items())
    return answer(
        HostFacts(
            version=atoll.__version__,
            tenant=caller.tenant.name,
            image=caller.engine.default_image,
            runtime=_default_runtime(caller) if usable else None,
            runtimes=usable,
        )
    )


def _default_runtime(caller: Caller) -> RuntimeName | None:
    """Null too if the one that the settings name cannot be used."""
    with suppress(RuntimeUnavailable):
        return check_runtime(caller.tenant.policy, None) or caller.engine.default_runtime
    return None


@router.get(
    "/host/image-contents", operation_id="host_image_contents", response_model=FoundContents, responses=failures(422)
)
async def image_contents(
    caller: Reader, reference: Annotated[str, Query(max_length=1024, description="Which image.")]
) -> Response:
    """What an image has, as its files say, if it is present."""
    check_image(caller.tenant.policy, reference)
    return answer(FoundContents(contents=await caller.engine.images.contents(reference)))


@router.post("/gc", operation_id="host_gc", response_model=GcResult, responses=failures())
async def gc(
    caller: Annotated[Caller, Depends(requires("sandboxes:write", operator=True))],
    abandoned_only: Annotated[bool, Query(description="Only sandboxes that were abandoned.")] = False,
) -> Response:
    """Remove what nothing refers to, of all tenants. For keys of the server itself."""
    if abandoned_only:
        return answer(GcResult(sandboxes=tuple(await caller.engine.remove_abandoned())))
    return answer(await caller.engine.gc())


@router.websocket("/sessions/{session}")
async def session(
    websocket: WebSocket, caller: Writer, session: str, *, temporary: bool = False, sleeps: bool = False
) -> None:
    """Have a session of sandboxes open. A message ends it, and is answered when that is done."""
    async with caller.engine.pool(session, temporary=temporary, sleeps=sleeps, sleep_after_s=None):
        await caller.record(websocket, "sessions_open", 101)
        await websocket.accept()
        asked = False
        async with anyio.create_task_group() as group:
            group.start_soon(_check_key, websocket, caller, group.cancel_scope)
            asked = (await websocket.receive())["type"] == "websocket.receive"
            group.cancel_scope.cancel()
    if asked and websocket.application_state is WebSocketState.CONNECTED:
        await websocket.send_bytes(b"ended")
        await websocket.close()


@router.websocket("/sandboxes/{sandbox}/archive")
async def archive(websocket: WebSocket, caller: Reader, sandbox: SandboxPath, checkpoint: str | None = None) -> None:
    """A sandbox in one file, as `sandboxes_export` gives it, and then what is in it: an `ExportResult`, or an error."""
    found = await find(caller, sandbox)
    await websocket.accept()
    told: dict[str, object] = {}
    written = anyio.Event()
    reading, writing = open_pipe()

    async def write() -> None:
        try:
            with os.fdopen(writing, "wb", buffering=0) as target:
                result = await caller.engine.export(found.name, target, checkpoint=checkpoint)
            told["result"] = result.model_dump(mode="json")
        except AtollError as error:
            told["error"] = json.loads(bytes(answer_to(error, caller.request_id).body))
        except BrokenPipeError:
            pass  # the client is gone
        written.set()

    async def watch(scope: anyio.CancelScope) -> None:
        await websocket.receive()
        scope.cancel()

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(write)
            group.start_soon(watch, group.cancel_scope)
            group.start_soon(_check_key, websocket, caller, group.cancel_scope)
            while data := await read_pipe(reading):
                with anyio.fail_after(STALL_S):
                    await websocket.send_bytes(data)
            await written.wait()
            await websocket.send_text(json.dumps(told))
            await websocket.close()
            group.cancel_scope.cancel()
    finally:
        os.close(reading)


async def _check_key(websocket: WebSocket, caller: Caller, scope: anyio.CancelScope) -> None:
    while True:
        await anyio.sleep(CHECK_KEY_S)
        try:
            await caller.require_valid()
        except Unauthenticated as error:
            await websocket.close(UNAUTHENTICATED, error.message[:100])
            scope.cancel()
            return
