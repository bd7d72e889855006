"""Sandboxes of E2B's control plane: create, connect, list, get, delete, and the verbs of their life.

Owns what E2B's fields mean here and how a sandbox is shown. A time-out is a lifetime (`ttl_s`), at whose end the
sandbox is destroyed or, with `autoPause`, put to sleep. `pause` keeps processes: on disk where the runtime can save
them, else frozen in memory; a paused sandbox has no lifetime. Not here: snapshots and forks (`snapshots.py`), and what
the tenant's policy and quotas allow (`atoll.server`), which are asked as REST asks them.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

import anyio
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from atoll.contract.errors import (
    AtollError,
    CheckpointNotFound,
    Conflict,
    Forbidden,
    ImageUnavailable,
    InvalidRequest,
    SandboxNotFound,
    TemplateNotFound,
    Unenforceable,
    told_elsewhere,
)
from atoll.contract.model import MAX_TTL_S, Checkpoint, Mount, OnExpiry, RuntimeName, SandboxInfo
from atoll.contract.names import DEFAULT_TAG as TAG, TEMPLATE_PREFIX, split_template
from atoll.runtime.sandbox import Sandbox
from atoll.server.policy import check_create, check_inherited, check_network, check_ttl
from atoll.server.previews import PreviewAddress
from atoll.server.server import Server
from atoll.server.tenants import Tenant
from atoll.surfaces.e2b.control import E2bBody, read_body, route
from atoll.surfaces.e2b.networks import NetworkBody
from atoll.surfaces.e2b.record import E2bRecord
from atoll.surfaces.e2b.tokens import SandboxTokens, public_id, sandbox_id
from atoll.surfaces.rest.caller import Caller
from atoll.surfaces.rest.idempotent import once
from atoll.surfaces.rest.sandboxes import begun_as, describe, effective_limits, find_checkpoint, reserved

ENVD_VERSION = "0.6.13"
"""The version of E2B's daemon that this surface behaves as. SDKs switch features off for older ones."""
TEMPLATES = ("base", "code-interpreter-v1")
"""Exist from the start: the server's default image."""
DEFAULT_TAG = f":{TAG}"
PAUSED = frozenset({"paused", "sleeping", "shutdown"})
_MAX_PAGE = 100
_MAX_FILTERS = 64
_OF_PORTS = frozenset({"allowPublicTraffic", "maskRequestHost", "httpsPorts"})
"""Parts of a network that an update does not change: how ports are reached."""
_NEVER = datetime(9999, 12, 31, tzinfo=UTC)


class AutoResumeBody(E2bBody):
    enabled: bool = False


class VolumeMountBody(E2bBody):
    name: str
    path: str


class CreateBody(E2bBody):
    template_id: str = Field(alias="templateID", min_length=1, max_length=512)
    timeout: int | None = Field(default=None, ge=0, le=int(MAX_TTL_S))
    metadata: dict[str, str] | None = None
    env_vars: dict[str, str] | None = None
    auto_pause: bool = False
    auto_pause_memory: bool | None = None
    auto_resume: AutoResumeBody | None = None
    secure: bool | None = None
    allow_internet_access: bool | None = Field(default=None, alias="allow_internet_access")
    network: NetworkBody | None = None
    volume_mounts: list[VolumeMountBody] | None = Field(default=None, max_length=16)
    mcp: dict[str, Any] | None = None
    """For E2B's statistics. The SDK itself starts the gateway in the sandbox, if the image has one."""


class TimeoutBody(E2bBody):
    timeout: int | None = Field(default=None, ge=0, le=int(MAX_TTL_S))


class ConnectBody(TimeoutBody):
    memory: bool | None = None


class ResumeBody(TimeoutBody):
    auto_pause: bool | None = None


class RefreshBody(E2bBody):
    duration: int | None = Field(default=None, ge=0, le=3600)


class PauseBody(E2bBody):
    memory: bool | None = None
    require_healthy_guest: bool | None = None


class SandboxRoutes:
    """The routes, with what their answers need: the tokens of this server, and where it is."""

    def __init__(self, tokens: SandboxTokens) -> None:
        self._tokens = tokens

    def routes(self) -> list[Route]:
        one = "/sandboxes/{sandbox}"
        found = [
            route("/sandboxes", "POST", "create", "sandboxes:write", self._create_old),
            route("/v2/sandboxes", "POST", "create", "sandboxes:write", self._create_new),
            route("/sandboxes", "GET", "list", "sandboxes:read", self._list_running),
            route("/v2/sandboxes", "GET", "list", "sandboxes:read", self._list),
            route("/sandboxes/metrics", "GET", "metrics_of_all", "sandboxes:read", self._metrics_of_all),
            route(one, "GET", "get", "sandboxes:read", self._get),
            route(one, "DELETE", "delete", "sandboxes:write", self._delete),
            route(f"{one}/timeout", "POST", "timeout", "sandboxes:write", self._set_timeout),
            route(f"{one}/refreshes", "POST", "refresh", "sandboxes:write", self._refresh),
            route(f"{one}/pause", "POST", "pause", "sandboxes:write", self._pause),
            route(f"{one}/resume", "POST", "resume", "sandboxes:write", self._resume),
            route(f"{one}/metrics", "GET", "metrics", "sandboxes:read", self._metrics),
            route(f"{one}/network", "PUT", "network", "sandboxes:write", self._set_network),
        ]
        for prefix in ("", "/v2"):
            path = f"{prefix}{one}/connect"
            found.append(route(path, "POST", "connect", "sandboxes:write", self._connect))
        return found

    # ------------------------------------------------------------------------------------------------------- create

    async def _create_old(self, request: Request, caller: Caller) -> Response:
        return await self._create(request, caller, default_timeout_s=15)

    async def _create_new(self, request: Request, caller: Caller) -> Response:
        return await self._create(request, caller, default_timeout_s=300)

    async def _create(self, request: Request, caller: Caller, *, default_timeout_s: int) -> Response:
        caller.key.require("sandboxes:exec")
        body = await read_body(request, CreateBody)
        key = request.headers.get("idempotency-key")
        if key is not None and not (key.isascii() and key.isprintable() and 1 <= len(key) <= 255):
            raise InvalidRequest("Idempotency-Key: allowed are 1 to 255 printable characters")
        async with once(caller, request, key) as made:
            name = made.name or f"e2b-{os.urandom(6).hex()}"
            if made.replay is not None:
                return self._created(await self._made_before(caller, name))
            sandbox = None
            if made.is_interrupted:
                try:
                    sandbox = await caller.engine.get(name)
                    await sandbox.connect()
                except SandboxNotFound:
                    sandbox = None
            if sandbox is None:
                sandbox = await self._make(caller, body, name, body.timeout or default_timeout_s)
            await caller.server.events.saw(caller.tenant.name, sandbox.info)
            caller.note(resource=f"sandboxes/{sandbox.name}")
            # Stored without its token: the answer is made anew, and has no secret until then.
            return made.give(self._created(sandbox.info), stored=Response(b"{}", 201))

    async def _made_before(self, caller: Caller, name: str) -> SandboxInfo:
        try:
            return await describe(await caller.engine.get(name))
        except SandboxNotFound:
            raise Conflict("the sandbox that this Idempotency-Key made is gone; use a new key") from None

    async def _make(self, caller: Caller, body: CreateBody, name: str, timeout_s: int) -> Sandbox:
        asked = body.network or NetworkBody()
        internet = body.allow_internet_access
        headers = asked.headers()
        record = E2bRecord(
            template=body.template_id,
            metadata=body.metadata or {},
            timeout_s=timeout_s,
            auto_resume=body.auto_resume is not None and body.auto_resume.enabled,
            keeps_memory=body.auto_pause_memory is not False,
            public_ports=asked.allow_public_traffic is not False,
            internet=internet,
            network=asked.shown(),
        )
        policy = caller.tenant.policy
        image, checkpoint = await template(caller, body.template_id)
        network = asked.policy(policy, internet=internet)
        mounts = [Mount(source=f"volume:{each.name}", target=each.path) for each in body.volume_mounts or ()]
        ttl_s = max(1, min(timeout_s, policy.max_ttl_s or timeout_s))
        if checkpoint is None:
            begun = await begun_as(caller, image, None, None)
            admitted = check_create(
                policy, image=image, mounts=mounts, network=network, limits=begun[0], runtime=begun[1], ttl_s=ttl_s
            )
            limits = effective_limits(caller, admitted.limits, admitted.runtime)
        else:
            if mounts:
                raise HTTPException(501, "volumeMounts with a snapshot are not supported by this server")
            inherited = caller.engine.inherited_spec(checkpoint.id)
            admitted = check_inherited(policy, inherited, network=network, ttl_s=ttl_s)
            limits = admitted.limits
        async with reserved(caller, {name: limits}), _named(body.template_id, image):
            runtime = checkpoint.runtime if checkpoint else admitted.runtime
            sandbox = await caller.engine.create(
                name,
                image=None if checkpoint else admitted.image,
                limits=admitted.limits,
                env=body.env_vars,
                runtime=None if checkpoint else admitted.runtime,
                network=admitted.network,
                labels={label: value for label, value in record.labels().items() if value is not None},
                sudo=True,
                ttl_s=admitted.ttl_s,
                on_expiry=_end_of(caller, record, runtime) if body.auto_pause else "destroy",
                mounts=() if checkpoint else admitted.mounts,
                from_checkpoint=checkpoint.id if checkpoint else None,
            )
            try:
                if checkpoint is not None:
                    await self._settle_inherited(caller, sandbox, record, network is None)
                if headers or checkpoint is not None:
                    await caller.engine.set_request_headers(sandbox.name, headers)
            except BaseException:
                with anyio.CancelScope(shield=True), suppress(AtollError):
                    await caller.engine.destroy(sandbox.name)
                raise
        return sandbox

    async def _settle_inherited(self, caller: Caller, sandbox: Sandbox, record: E2bRecord, is_offline: bool) -> None:
        """A sandbox from a checkpoint has that one's labels and network: those of the request take their place."""
        labels = record.labels(sandbox.info.labels)
        if {name: value for name, value in sandbox.info.labels.items() if name in labels} != labels:
            await caller.engine.update(sandbox.name, labels=labels)
        if is_offline and sandbox.info.network is not None:
            await caller.engine.set_network(sandbox.name, None)
        await sandbox.status()

    # --------------------------------------------------------------------------------------------------------- shown

    def _created(self, info: SandboxInfo, status: int = 201) -> Response:
        return JSONResponse(self.shown(info), status)

    def shown(self, info: SandboxInfo) -> dict[str, Any]:
        """A sandbox for the client that may use it: with its tokens."""
        record = E2bRecord.of(info)
        return {
            "sandboxID": public_id(info.id),
            "templateID": record.template,
            "alias": record.template,
            "clientID": "atoll",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": self._tokens.of(info.id),
            "trafficAccessToken": None if record.public_ports else self._tokens.of(info.id, "traffic"),
            "domain": self.domain,
        }

    domain: str = ""
    """Where ports of sandboxes are: `{port}-{id}.{domain}`. Set when the server listens."""

    def _listed(self, info: SandboxInfo, caller: Caller) -> dict[str, Any]:
        record = E2bRecord.of(info)
        machine = shutil.disk_usage(caller.engine.state_dir)
        memory = info.limits.memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {
            "sandboxID": public_id(info.id),
            "templateID": record.template,
            "alias": record.template,
            "clientID": "atoll",
            "startedAt": info.created_at.isoformat(),
            "endAt": _end(info).isoformat(),
            "cpuCount": math.ceil(info.limits.cpus or os.cpu_count() or 1),
            "memoryMB": memory // 2**20,
            "diskSizeMB": (info.limits.disk_bytes or machine.total) // 2**20,
            "state": state_of(info),
            "metadata": record.metadata,
            "envdVersion": ENVD_VERSION,
            "volumeMounts": [
                {"name": mount.volume, "path": mount.target} for mount in info.mounts if mount.volume is not None
            ],
        }

    # ---------------------------------------------------------------------------------------------------------- read

    async def _list_running(self, request: Request, caller: Caller) -> Response:
        """The list of older SDKs: what runs, in one page."""
        wanted = _metadata(request.query_params.get("metadata"))
        found = [info for info in await listed(caller) if state_of(info) == "running" and _has(info, wanted)]
        return JSONResponse([self._listed(info, caller) for info in _by_start(found, newest_first=True)])

    async def _list(self, request: Request, caller: Caller) -> Response:
        query = request.query_params
        wanted = _metadata(query.get("metadata"))
        states = {*filter(None, ",".join(query.getlist("state")).split(","))} or {"running", "paused"}
        if unknown := states - {"running", "paused"}:
            raise InvalidRequest(f"state: {min(unknown)[:64]!r} is not one; allowed are running and paused")
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest(f"order: {order[:64]!r} is not one; allowed are asc and desc")
        after = _moment(query.get("startedAfter"))
        chosen = [
            info
            for info in await listed(caller)
            if state_of(info) in states
            and _has(info, wanted)
            and (after is None or info.created_at > after)
            and query.get("template", E2bRecord.of(info).template) == E2bRecord.of(info).template
        ]
        items, token = page(
            _by_start(chosen, newest_first=order == "desc"),
            query.get("limit"),
            query.get("nextToken"),
            lambda info: info.id,
        )
        shown = [self._listed(info, caller) for info in items]
        return JSONResponse(shown, headers={"x-next-token": token} if token else None)

    async def _get(self, request: Request, caller: Caller) -> Response:
        info = (await find(caller, request.path_params["sandbox"])).info
        record = E2bRecord.of(info)
        detail = self._listed(info, caller)
        detail |= {
            "domain": self.domain,
            "network": record.network,
            "allowInternetAccess": record.internet,
            "lifecycle": {
                "autoResume": record.auto_resume,
                "onTimeout": "kill" if info.on_expiry == "destroy" else "pause",
            },
        }
        if state_of(info) == "paused":
            detail["pauseMode"] = "full" if _has_memory(caller, info) else "filesystem"
        if "sandboxes:exec" in caller.key.scopes:
            detail["envdAccessToken"] = self._tokens.of(info.id)
        return JSONResponse(detail)

    async def _metrics(self, request: Request, caller: Caller) -> Response:
        sandbox = await find(caller, request.path_params["sandbox"])
        begin, end = (_seconds(request.query_params.get(name)) for name in ("start", "end"))
        found = await metrics(caller, sandbox)
        return JSONResponse(
            [
                each
                for each in found
                if (begin is None or each["timestampUnix"] >= begin) and (end is None or each["timestampUnix"] <= end)
            ]
        )

    async def _metrics_of_all(self, request: Request, caller: Caller) -> Response:
        wanted = [*filter(None, ",".join(request.query_params.getlist("sandbox_ids")).split(","))][:_MAX_PAGE]
        latest: dict[str, Any] = {}
        for each in wanted:
            try:
                latest[each] = (await metrics(caller, await find(caller, each)))[-1]
            except SandboxNotFound:
                continue
        return JSONResponse({"sandboxes": latest})

    # ---------------------------------------------------------------------------------------------------------- life

    async def _connect(self, request: Request, caller: Caller) -> Response:
        """Resume it if it is paused. Its time-out only ever gets longer."""
        caller.key.require("sandboxes:exec")
        body = await read_body(request, ConnectBody)
        sandbox = await find(caller, request.path_params["sandbox"])
        was_paused = state_of(sandbox.info) == "paused"
        timeout_s = body.timeout or 300
        if was_paused:
            await resume(caller.server, caller.tenant, sandbox, timeout_s)
        elif sandbox.info.expires_at is None or _left_s(sandbox.info) < timeout_s:
            await set_timeout(caller.tenant, sandbox, timeout_s)
        return self._created(await describe_all(sandbox), 201 if was_paused else 200)

    async def _resume(self, request: Request, caller: Caller) -> Response:
        caller.key.require("sandboxes:exec")
        body = await read_body(request, ResumeBody)
        sandbox = await find(caller, request.path_params["sandbox"])
        if state_of(sandbox.info) != "paused":
            raise Conflict(f"sandbox {public_id(sandbox.id)} is already running")
        await resume(caller.server, caller.tenant, sandbox, body.timeout or 15)
        if body.auto_pause is not None:
            record = E2bRecord.of(sandbox.info)
            then = _end_of(caller, record, sandbox.info.runtime) if body.auto_pause else "destroy"
            await caller.engine.update(sandbox.name, on_expiry=then)
        return self._created(await describe_all(sandbox))

    async def _pause(self, request: Request, caller: Caller) -> Response:
        body = await read_body(request, PauseBody)
        sandbox = await find(caller, request.path_params["sandbox"])
        if state_of(sandbox.info) == "paused":
            raise Conflict(f"sandbox {public_id(sandbox.id)} is already paused")
        await pause(caller, sandbox, keeps_memory=body.memory is not False)
        await caller.server.events.saw(caller.tenant.name, await describe(sandbox))
        return Response(status_code=204)

    async def _set_timeout(self, request: Request, caller: Caller) -> Response:
        body = await read_body(request, TimeoutBody)
        if body.timeout is None:
            raise InvalidRequest("timeout is missing: seconds from now on")
        sandbox = await find(caller, request.path_params["sandbox"])
        if state_of(sandbox.info) == "paused":
            raise SandboxNotFound(public_id(sandbox.id), [])
        await set_timeout(caller.tenant, sandbox, body.timeout)
        return Response(status_code=204)

    async def _refresh(self, request: Request, caller: Caller) -> Response:
        body = await read_body(request, RefreshBody)
        sandbox = await find(caller, request.path_params["sandbox"])
        if _left_s(sandbox.info) < (body.duration or 15):
            await set_timeout(caller.tenant, sandbox, body.duration or 15)
        return Response(status_code=204)

    async def _delete(self, request: Request, caller: Caller) -> Response:
        sandbox = await find(caller, request.path_params["sandbox"], broken=True)
        await caller.engine.destroy(sandbox.name)
        await caller.server.previews.take_back(caller.tenant.name, sandbox.id)
        await caller.server.events.gone(caller.tenant.name, sandbox.id)
        return Response(status_code=204)

    async def _set_network(self, request: Request, caller: Caller) -> Response:
        """It replaces all that was set before."""
        asked = await read_body(request, NetworkBody)
        sandbox = await find(caller, request.path_params["sandbox"])
        policy = check_network(
            caller.tenant.policy, asked.policy(caller.tenant.policy, internet=asked.allow_internet_access)
        )
        headers = asked.headers()
        before = E2bRecord.of(sandbox.info)
        kept = {name: value for name, value in before.network.items() if name in _OF_PORTS}
        record = before.model_copy(
            update={"network": {**kept, **asked.shown()}, "internet": asked.allow_internet_access}
        )
        labels = record.labels(sandbox.info.labels)  # or it is refused, before anything has changed
        await caller.engine.set_request_headers(sandbox.name, headers)
        await caller.engine.set_network(sandbox.name, policy)
        info = await caller.engine.update(sandbox.name, labels=labels)
        await caller.server.events.record(caller.tenant.name, "updated", info, what="network")
        return Response(status_code=204)


# --------------------------------------------------------------------------------------------------------------- found


async def find(caller: Caller, public: str, *, broken: bool = False) -> Sandbox:
    """The tenant's sandbox of this id, as it is now. With `broken`, also one that has failed.

    Raises:
        SandboxNotFound: there is none.
    """
    # Whether there is none, or one of another tenant, looks the same.
    with suppress(SandboxNotFound, Forbidden):
        tenant, sandbox = await caller.server.find_sandbox(sandbox_id(public) or "")
        if tenant.name == caller.tenant.name:
            info = await describe_all(sandbox)
            if broken or info.status != "error":
                return sandbox
    raise SandboxNotFound(public[:64], [])


async def describe_all(sandbox: Sandbox) -> SandboxInfo:
    """A sandbox as it is now, with the labels that are Atoll's own.

    Raises:
        SandboxNotFound: it has just been destroyed.
    """
    await describe(sandbox)
    return sandbox.info


async def listed(caller: Caller) -> list[SandboxInfo]:
    """The tenant's sandboxes that a client could use."""
    return [info for info in await caller.engine.list() if info.status != "error"]


async def template(caller: Caller, wanted: str) -> tuple[str, Checkpoint | None]:
    """The image, and the checkpoint, that a template's name stands for.

    Raises:
        InvalidRequest: several checkpoints have the name.
    """
    name = wanted.removesuffix(DEFAULT_TAG)
    if name in TEMPLATES:
        return caller.engine.default_image, None
    if (built := await find_template(caller, wanted)) is not None:
        return built, None
    for each in (name, wanted):
        try:
            found = await find_checkpoint(caller, each)
        except CheckpointNotFound:
            continue
        return found.image, found
    return wanted, None


@asynccontextmanager
async def _named(wanted: str, image: str) -> AsyncIterator[None]:
    """While the context lasts, an image that is missing is said to be no template either: a name may be wrong."""
    try:
        yield
    except ImageUnavailable as error:
        if wanted != image:
            raise
        message = f"there is no template or snapshot {wanted!r}, and {told_elsewhere(error)}"
        raise ImageUnavailable(message, hint=error.hint, **error.details) from error


async def find_template(caller: Caller, wanted: str) -> str | None:
    """The image that a template's name means for the engine. None: the tenant has no such template."""
    try:
        name, tag = split_name(wanted)
        reference = f"{TEMPLATE_PREFIX}{name}:{tag or TAG}"
        await caller.engine.templates.version(reference)
    except (InvalidRequest, TemplateNotFound):
        return None
    return reference


def split_name(wanted: str) -> tuple[str, str | None]:
    """The name and the tag of `NAME`, `NAME:TAG`, or either after a team's name.

    Raises:
        InvalidRequest: it is not a name.
    """
    plain = wanted.rpartition("/")[2]
    name, tag = split_template(plain)
    return name, tag if ":" in plain else None


# ---------------------------------------------------------------------------------------------------------------- life


async def pause(caller: Caller, sandbox: Sandbox, *, keeps_memory: bool) -> None:
    """Pause a sandbox: on disk if the runtime saves processes or none are to be kept, else frozen in memory. It has no
    lifetime while it is paused, or the longest that the tenant's policy allows: other surfaces resume it as it is."""
    record = E2bRecord.of(sandbox.info).model_copy(update={"keeps_memory": keeps_memory})
    labels = record.labels(sandbox.info.labels)
    ttl_s = check_ttl(caller.tenant.policy, None) or math.inf
    saves = caller.engine.runtimes()[sandbox.info.runtime].memory_checkpoint
    if keeps_memory and not saves:
        await caller.engine.update(sandbox.name, labels=labels, ttl_s=ttl_s)
        try:
            await caller.engine.pause(sandbox.name)
            return
        except Unenforceable:
            pass
    await caller.engine.sleep(sandbox.name)
    await caller.engine.update(sandbox.name, labels=labels, ttl_s=ttl_s)


async def resume(server: Server, tenant: Tenant, sandbox: Sandbox, timeout_s: int) -> None:
    """Let a paused sandbox run again, for so long.

    Raises:
        LaunchFailed: it does not start.
        Forbidden: the time is longer than the tenant's policy allows.
    """
    check_ttl(tenant.policy, max(1, timeout_s))
    await sandbox.wake()
    await set_timeout(tenant, sandbox, timeout_s)
    await server.events.saw(tenant.name, await describe(sandbox))


async def set_timeout(tenant: Tenant, sandbox: Sandbox, timeout_s: int) -> None:
    """Give a sandbox a lifetime from now on. None is shorter than a second.

    Raises:
        Forbidden: it is longer than the tenant's policy allows.
    """
    ttl_s = check_ttl(tenant.policy, max(1, timeout_s))
    record = E2bRecord.of(sandbox.info).model_copy(update={"timeout_s": max(1, timeout_s)})
    await sandbox.update(ttl_s=ttl_s, labels=record.labels(sandbox.info.labels))


async def metrics(caller: Caller, sandbox: Sandbox) -> list[dict[str, Any]]:
    """What a sandbox used within the last hour, and uses now."""
    info = sandbox.info
    samples = [
        (each.time, each.memory_bytes, each.cpu_s, each.disk_bytes, each.cache_bytes)
        for each in caller.server.history.of(sandbox.id)
    ]
    if state_of(info) == "running":
        used = await sandbox.stat(disk=False)
        disk_bytes = samples[-1][3] if samples else None
        samples.append((datetime.now(UTC), used.memory_bytes, used.cpu_s, disk_bytes, used.cache_bytes))
    cores = math.ceil(info.limits.cpus or os.cpu_count() or 1)
    memory = info.limits.memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    disk = info.limits.disk_bytes or shutil.disk_usage(caller.engine.state_dir).total
    shown, before = [], None
    for time, used_bytes, cpu_s, disk_bytes, cache_bytes in samples:
        share = 0.0
        if before is not None and cpu_s is not None and before[1] is not None and time > before[0]:
            share = max(0.0, (cpu_s - before[1]) / (time - before[0]).total_seconds() / cores * 100)
        before = time, cpu_s
        shown.append(
            {
                "timestamp": time.isoformat(),
                "timestampUnix": int(time.timestamp()),
                "cpuCount": cores,
                "cpuUsedPct": round(share, 2),
                "memUsed": used_bytes or 0,
                "memTotal": memory,
                "memCache": cache_bytes or 0,
                "diskUsed": disk_bytes or 0,
                "diskTotal": disk,
            }
        )
    return shown


# --------------------------------------------------------------------------------------------------------------- parts


def _end_of(caller: Caller, record: E2bRecord, runtime: RuntimeName | None) -> OnExpiry:
    """What is done at the end of a time-out to pause a sandbox: as `pause` does it."""
    able = caller.engine.runtimes()[runtime or caller.engine.default_runtime]
    return "pause" if record.keeps_memory and able.freeze and not able.memory_checkpoint else "sleep"


def state_of(info: SandboxInfo) -> Literal["running", "paused"]:
    return "paused" if info.status in PAUSED else "running"


def port_domain(address: PreviewAddress) -> str:
    """The domain below which ports of sandboxes are, with the server's port if clients have to name it."""
    split = urlsplit(address.url)
    usual = {"http": 80, "https": 443}.get(split.scheme)
    return address.domain if split.port in (None, usual) else f"{address.domain}:{split.port}"


def page(
    items: list[Any], limit: str | None, token: str | None, key: Any, *, most: int = _MAX_PAGE
) -> tuple[list[Any], str | None]:
    """A page of items that are sorted already: it begins after the one that the token names.

    Raises:
        InvalidRequest: the limit is not one, or the token is none of ours.
    """
    if limit is not None and not (limit.isdecimal() and len(limit) <= 9 and 1 <= int(limit) <= most):
        raise InvalidRequest(f"limit: {limit[:64]!r} is not one; allowed are 1 to {most}")
    size = int(limit) if limit is not None else most
    keys = [key(each) for each in items]
    if token and token not in keys:
        raise InvalidRequest("nextToken is not one of this list, or what it names is gone; begin with the first page")
    begin = keys.index(token) + 1 if token else 0
    chosen = items[begin : begin + size]
    return chosen, keys[begin + size - 1] if len(items) > begin + size else None


def _by_start(infos: Iterable[SandboxInfo], *, newest_first: bool) -> list[SandboxInfo]:
    return sorted(infos, key=lambda info: (info.created_at, info.id), reverse=newest_first)


def _metadata(query: str | None) -> dict[str, str]:
    """Metadata to filter by: a query string whose names and values are quoted once more."""
    try:
        pairs = parse_qsl(query or "", keep_blank_values=True, max_num_fields=_MAX_FILTERS)
    except ValueError:
        raise InvalidRequest(f"metadata has more than {_MAX_FILTERS} values to filter by") from None
    return {unquote(name): unquote(value) for name, value in pairs}


def _has(info: SandboxInfo, wanted: dict[str, str]) -> bool:
    metadata = E2bRecord.of(info).metadata if wanted else {}
    return all(metadata.get(name) == value for name, value in wanted.items())


def _has_memory(caller: Caller, info: SandboxInfo) -> bool:
    return info.status == "paused" or (
        E2bRecord.of(info).keeps_memory and caller.engine.runtimes()[info.runtime].memory_checkpoint
    )


def _end(info: SandboxInfo) -> datetime:
    if state_of(info) == "paused":
        return info.last_used_at or info.created_at
    return info.expires_at or _NEVER


def _left_s(info: SandboxInfo) -> float:
    return math.inf if info.expires_at is None else (info.expires_at - datetime.now(UTC)).total_seconds()


def _moment(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"startedAfter: {text[:64]!r} is not a time such as 2026-01-31T12:00:00Z") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _seconds(text: str | None) -> int | None:
    if text is not None and not (text.isdecimal() and len(text) <= 12):
        raise InvalidRequest(f"{text[:64]!r} is not a number of seconds since 1970")
    return None if text is None else int(text)
