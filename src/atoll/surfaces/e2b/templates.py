"""Templates of E2B: built by the SDK's steps, found by name and tag, and used like snapshots.

Owns the steps as the SDK sends them, the state of a build as it polls it, and the links by which it uploads the files
of copies. A template is called by its name; a tag is a version of it. A base is an image that the tenant may use, or
another template; `base` is the server's default image. Not here: a build itself (`atoll.builds`), and those that run
(`server/builds.py`).
"""

from __future__ import annotations

import hmac
import math
import os
import re
import time
from typing import Any, NamedTuple

from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from atoll.builds.builder import BuildOptions
from atoll.builds.plan import (
    MAX_STEPS,
    BuildPlan,
    BuildStep,
    CopyStep,
    EnvStep,
    RunStep,
    UserStep,
    WorkdirStep,
)
from atoll.builds.uploads import MAX_UPLOAD_BYTES
from atoll.contract.errors import AtollError, BuildFailed, InvalidRequest, TemplateNotFound
from atoll.contract.model import Limits, Template
from atoll.contract.names import DEFAULT_TAG, TEMPLATE_PREFIX, is_name
from atoll.server.builds import TemplateBuild
from atoll.server.policy import check_image, check_limits, check_runtime
from atoll.server.server import Server
from atoll.server.tenants import Tenant
from atoll.surfaces.door.middleware import BodyTooLarge, take_any_body
from atoll.surfaces.e2b.control import E2bBody, error_response, not_supported, read_body, route
from atoll.surfaces.e2b.networks import NetworkBody
from atoll.surfaces.e2b.sandboxes import ENVD_VERSION, TEMPLATES, find_template, page, split_name
from atoll.surfaces.e2b.tokens import SandboxTokens
from atoll.surfaces.rest.caller import Caller, server_of
from atoll.surfaces.rest.errors import request_id
from atoll.surfaces.rest.transfer import body_of

UPLOAD_S = 3600
"""How long a link to upload files is valid."""
MAX_LOG_ENTRIES = 100
"""In one answer."""
_BASES = re.compile(r"(docker\.io/)?e2bdev/(base|code-interpreter)(:[\w.-]+)?")
"""The images that E2B's own templates are made of: here, the server's default image is that."""
_STATUS = {"waiting": "waiting", "building": "building", "ready": "ready"}
_SHELL = 'if command -v bash > /dev/null 2>&1; then exec bash -l -c "$0"; fi; exec sh -c "$0"'
"""Commands are lines for bash as a login shell, where there is one."""


class TemplateBody(E2bBody):
    name: str | None = Field(default=None, max_length=256)
    alias: str | None = Field(default=None, max_length=256)
    tags: list[str] | None = Field(default=None, max_length=32)
    cpu_count: int | None = Field(default=None, ge=1, le=1024)
    memory_mb: int | None = Field(default=None, alias="memoryMB", ge=8)
    min_free_disk_mb: int | None = Field(default=None, ge=0)
    """Sandboxes share the disk of the machine: there is nothing to reserve."""


class StepBody(E2bBody):
    type: str = Field(max_length=32)
    args: list[str] = Field(default_factory=list, max_length=1024)
    files_hash: str | None = Field(default=None, max_length=64)
    force: bool | None = None


class BuildBody(E2bBody):
    from_image: str | None = Field(default=None, max_length=512)
    from_template: str | None = Field(default=None, max_length=512)
    force: bool | None = None
    steps: list[StepBody] = Field(default_factory=list, max_length=MAX_STEPS)
    start_cmd: str | None = None
    ready_cmd: str | None = None


class TagsBody(E2bBody):
    target: str | None = Field(default=None, max_length=256)
    name: str | None = Field(default=None, max_length=256)
    tags: list[str] = Field(min_length=1, max_length=32)


class UploadLink(NamedTuple):
    """What a link to upload says: whose files, which, until when."""

    tenant: str
    files: str
    until: str

    def signature(self, tokens: SandboxTokens) -> str:
        return tokens.of("\n".join(self), "upload")


class TemplateRoutes:
    """The routes."""

    def __init__(self, tokens: SandboxTokens) -> None:
        self._tokens = tokens

    def routes(self) -> list[Route]:
        one, build = "/templates/{template}", "/builds/{build}"
        older = not_supported("templates of older SDKs (a Dockerfile's image that the client pushes) are")
        return [
            route("/v3/templates", "POST", "request_build", "sandboxes:write", self._request),
            route("/templates", "GET", "templates", "sandboxes:read", self._list),
            route("/v2/templates", "GET", "templates", "sandboxes:read", self._list),
            route("/templates", "POST", "request_build", "sandboxes:write", older),
            route("/v2/templates", "POST", "request_build", "sandboxes:write", older),
            route("/templates/tags", "POST", "assign_tags", "sandboxes:write", self._assign),
            route("/templates/tags", "DELETE", "remove_tags", "sandboxes:write", self._remove_tags),
            route("/templates/aliases/{alias}", "GET", "alias", "sandboxes:read", self._alias),
            route(f"{one}/files/{{hash}}", "GET", "upload_link", "sandboxes:write", self._upload_link),
            route(f"/v2{one}{build}", "POST", "start_build", "sandboxes:write", self._start),
            route(f"{one}{build}/status", "GET", "build_status", "sandboxes:read", self._status),
            route(f"{one}/tags", "GET", "tags", "sandboxes:read", self._tags),
            route(one, "GET", "template", "sandboxes:read", self._get),
        ]

    def upload_routes(self) -> list[Route]:
        """The one route without a key: its link is signed."""
        return [Route("/templates/{template}/files/{hash}", self._upload, methods=["PUT"], name="upload")]

    # ---------------------------------------------------------------------------------------------------- requesting

    async def _request(self, request: Request, caller: Caller) -> Response:
        caller.key.require("sandboxes:exec")
        body = await read_body(request, TemplateBody)
        name, tag = split_name(body.name or body.alias or "")
        tags = [*dict.fromkeys([*([tag] if tag else []), *(body.tags or [])])] or [DEFAULT_TAG]
        for each in tags:
            if not is_name(each):
                raise InvalidRequest(
                    f"{each[:64]!r} is not a tag; allowed are lower-case letters, digits, '-', '_', '.'"
                )
        asked = Limits(cpus=body.cpu_count, memory_bytes=body.memory_mb and body.memory_mb << 20)
        limits = check_limits(caller.tenant.policy, asked)
        build = caller.server.builds.request(caller.tenant.name, name, tags, limits)
        caller.note(resource=f"templates/{name}", build=build.id)
        return JSONResponse(
            {
                "templateID": name,
                "buildID": build.id,
                "public": False,
                "names": [name],
                "aliases": [name],
                "tags": tags,
            },
            202,
        )

    async def _start(self, request: Request, caller: Caller) -> Response:
        caller.key.require("sandboxes:exec")
        build = await self._build(request, caller)
        body = await read_body(request, BuildBody)
        policy, engine = caller.tenant.policy, caller.engine
        image = await _base(caller, body)
        if not image.startswith(TEMPLATE_PREFIX):
            check_image(policy, image)
        try:
            plan = _plan(body, image)
        except BuildFailed as error:
            raise InvalidRequest(error.message) from None
        runtime = (await engine.templates.version(image)).runtime if image.startswith(TEMPLATE_PREFIX) else None
        options = BuildOptions(
            sudo=True,
            runtime=check_runtime(policy, runtime),
            network=NetworkBody().policy(policy, internet=None),
            uses_cache=not body.force,
        )
        caller.server.builds.start(caller.tenant, engine, build, plan, options)
        caller.note(resource=f"templates/{build.template}", build=build.id, image=image)
        return Response(status_code=202)

    async def _build(self, request: Request, caller: Caller) -> TemplateBuild:
        template, build = request.path_params["template"], request.path_params["build"]
        return await caller.server.builds.get(caller.tenant.name, template, build)

    async def _status(self, request: Request, caller: Caller) -> Response:
        build = await self._build(request, caller)
        offset = _count(request.query_params.get("logsOffset"), "logsOffset", 0)
        limit = min(MAX_LOG_ENTRIES, _count(request.query_params.get("limit"), "limit", MAX_LOG_ENTRIES))
        said: dict[str, Any] = {
            "templateID": build.template,
            "buildID": build.id,
            "status": _STATUS.get(build.status, "error"),
            "logs": [],
            "logEntries": [
                {"timestamp": line.at.isoformat(), "level": line.level, "message": line.text, "step": str(line.step)}
                for line in build.lines[offset : offset + limit]
            ],
        }
        if build.reason is not None:
            step = "base" if build.failed_step is None else str(build.failed_step)
            said["reason"] = {"message": build.reason, "step": step, "logEntries": []}
        return JSONResponse(said)

    # -------------------------------------------------------------------------------------------------------- uploads

    async def _upload_link(self, request: Request, caller: Caller) -> Response:
        template, files = request.path_params["template"], request.path_params["hash"]
        if not caller.server.builds.is_requested(caller.tenant.name, template):
            raise TemplateNotFound(template[:128], [])
        present = caller.server.builds.uploads.has(caller.tenant.name, files)
        link = UploadLink(caller.tenant.name, files, str(int(time.time()) + UPLOAD_S))
        query = f"tenant={link.tenant}&until={link.until}&signature={link.signature(self._tokens)}"
        base = str(request.base_url).rstrip("/")
        return JSONResponse({"present": present, "url": f"{base}/templates/{template}/files/{files}?{query}"}, 201)

    async def _upload(self, request: Request) -> Response:
        """PUT of an archive, by a link that was given to one who may."""
        server = server_of(request)
        try:
            link = self._signed(request)
            server.quotas.check_rate(await _enabled(server, link.tenant))
            take_any_body(request.scope)
            if (length := request.headers.get("content-length", "0")).isdigit() and int(length) > MAX_UPLOAD_BYTES:
                raise BodyTooLarge(MAX_UPLOAD_BYTES)
            await server.builds.uploads.put(link.tenant, link.files, body_of(request))
        except (AtollError, HTTPException) as error:
            return error_response(error, request)
        await _record_upload(server, request, link)
        return Response(status_code=200)

    def _signed(self, request: Request) -> UploadLink:
        query = request.query_params
        link = UploadLink(query.get("tenant", ""), request.path_params["hash"], query.get("until", ""))
        given = query.get("signature", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(link.signature(self._tokens).encode(), given):
            raise HTTPException(403, "the link is not valid")
        if int(link.until) < time.time():
            raise HTTPException(403, "the link has expired; ask for another")
        return link

    # ---------------------------------------------------------------------------------------------------------- found

    async def _list(self, request: Request, caller: Caller) -> Response:
        query = request.query_params
        found = [each for each in await caller.engine.templates.list() if each.versions]
        items, token = page(found, query.get("limit"), query.get("nextToken"), lambda each: each.name)
        shown = [_shown(caller, each) for each in items]
        return JSONResponse(shown, headers={"x-next-token": token} if token else None)

    async def _get(self, request: Request, caller: Caller) -> Response:
        template = await caller.engine.templates.get(request.path_params["template"])
        return JSONResponse({**_shown(caller, template), "builds": []})

    async def _alias(self, request: Request, caller: Caller) -> Response:
        wanted = request.path_params["alias"]
        name, tag = split_name(wanted)
        if name not in TEMPLATES:
            await caller.engine.templates.version(f"{name}:{tag or DEFAULT_TAG}")
        return JSONResponse({"templateID": name, "public": name in TEMPLATES})

    async def _tags(self, request: Request, caller: Caller) -> Response:
        template = await caller.engine.templates.get(request.path_params["template"])
        return JSONResponse(
            [
                {"tag": tag, "buildID": version.build_id, "createdAt": version.created_at.isoformat()}
                for tag, version in template.versions.items()
            ]
        )

    async def _assign(self, request: Request, caller: Caller) -> Response:
        body = await read_body(request, TagsBody)
        name, tag = split_name(body.target or "")
        version = await caller.engine.templates.version(f"{name}:{tag or DEFAULT_TAG}")
        await caller.engine.templates.put(name, body.tags, version)
        caller.note(resource=f"templates/{name}")
        return JSONResponse({"buildID": version.build_id, "tags": body.tags}, 201)

    async def _remove_tags(self, request: Request, caller: Caller) -> Response:
        body = await read_body(request, TagsBody)
        name, _ = split_name(body.name or "")
        await caller.engine.templates.untag(name, body.tags)
        caller.note(resource=f"templates/{name}")
        return Response(status_code=204)


# --------------------------------------------------------------------------------------------------------------- plans


async def _base(caller: Caller, body: BuildBody) -> str:
    """The image, or the template, that a build begins with.

    Raises:
        HTTPException: there is none, or it is not known.
    """
    if bool(body.from_image) == bool(body.from_template):
        raise HTTPException(400, "exactly one of fromImage and fromTemplate is to be given")
    if body.from_image:
        if body.from_image.startswith(TEMPLATE_PREFIX):
            raise HTTPException(400, "fromImage names a template; use fromTemplate")
        return caller.engine.default_image if _BASES.fullmatch(body.from_image) else body.from_image
    wanted = body.from_template or ""
    if wanted.removesuffix(f":{DEFAULT_TAG}") in TEMPLATES:
        return caller.engine.default_image
    found = await find_template(caller, wanted)
    if found is None:
        raise HTTPException(404, f"template {wanted[:128]!r} not found")
    return found


def _plan(body: BuildBody, image: str) -> BuildPlan:
    """
    Raises:
        BuildFailed: a step is not one.
    """
    steps = tuple(_step(number, each) for number, each in enumerate(body.steps, 1))
    is_template = image.startswith(TEMPLATE_PREFIX)
    return BuildPlan(
        image=image,
        steps=steps,
        first_user="user",
        first_cwd="/home/user",
        user=None if is_template else "user",
        start_command=_line(body.start_cmd),
        ready_command=_line(body.ready_cmd),
    )


def _step(number: int, step: StepBody) -> BuildStep:
    args = step.args
    try:
        match step.type.upper(), len(args):
            case "RUN", 1 | 2:
                user = args[1] if len(args) == 2 and args[1] else None
                return RunStep(command=_line(args[0]), shown=f"RUN {args[0]}", user=user, force=bool(step.force))
            case "COPY", 2 | 3 | 4:
                source, destination, owner, mode = [*args, "", ""][:4]
                return CopyStep(
                    archive=step.files_hash or "",
                    sources=(source,),
                    are_patterns=True,
                    destination=destination,
                    owner=owner or None,
                    owned_by_user=True,
                    mode=mode or None,
                    shown=f"COPY {source} {destination}",
                    force=bool(step.force),
                )
            case "WORKDIR", 1:
                return WorkdirStep(path=args[0])
            case "USER", 1:
                return UserStep(user=args[0])
            case "ENV", count if count and count % 2 == 0:
                return EnvStep(variables=dict(zip(args[::2], args[1::2], strict=True)))
    except ValueError as error:
        raise BuildFailed(f"step {number}, {step.type[:32]}: {_why(error)}", step=number) from None
    raise BuildFailed(
        f"step {number}, {step.type[:32]!r} with {len(args)} arguments, is not one; allowed are RUN, COPY, WORKDIR, "
        "USER and ENV",
        step=number,
    )


def _why(error: ValueError) -> str:
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)[:200]
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:200]


def _line(command: str | None) -> tuple[str, ...]:
    return ("/bin/sh", "-c", _SHELL, command) if command else ()


def _count(text: str | None, what: str, default: int) -> int:
    if text is None:
        return default
    if not text.isdecimal() or len(text) > 9:
        raise InvalidRequest(f"{what}: {text[:32]!r} is not a number")
    return int(text)


async def _enabled(server: Server, name: str) -> Tenant:
    tenant = await server.tenants.get(name)
    if tenant.disabled:
        raise HTTPException(403, "the link is not valid")
    return tenant


async def _record_upload(server: Server, request: Request, link: UploadLink) -> None:
    from atoll.server.audit import AuditEvent

    client = request.scope.get("client")
    await server.audit.record(
        AuditEvent(
            request_id=request_id(request.scope),
            tenant=link.tenant,
            client=client[0] if client else None,
            action="e2b_upload",
            resource=f"templates/{request.path_params['template'][:64]}/files/{link.files}",
            status=200,
        )
    )


def _shown(caller: Caller, template: Template) -> dict[str, Any]:
    newest = max(template.versions.values(), key=lambda each: each.created_at)
    try:
        limits = caller.engine.inherited_spec(newest.checkpoint).limits
    except AtollError:
        limits = Limits()
    memory = limits.memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "templateID": template.name,
        "buildID": newest.build_id,
        "cpuCount": math.ceil(limits.cpus or os.cpu_count() or 1),
        "memoryMB": memory >> 20,
        "diskSizeMB": (limits.disk_bytes or 0) >> 20,
        "public": False,
        "aliases": [template.name],
        "names": [template.name],
        "createdAt": template.created_at.isoformat(),
        "updatedAt": newest.created_at.isoformat(),
        "createdBy": None,
        "lastSpawnedAt": None,
        "spawnCount": 0,
        "buildCount": len({each.build_id for each in template.versions.values()}),
        "envdVersion": ENVD_VERSION,
        "buildStatus": "ready",
    }
