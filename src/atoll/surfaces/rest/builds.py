"""Builds of templates over REST: files are uploaded, a plan or a Dockerfile is built, and its log is followed.

Owns what a build is asked for, and what the tenant's policy says to it. A build runs in the background, whether its
client stays or not. Not here: builds that run (`atoll.server.builds`), their steps (`atoll.builds`), and what they make
(`templates.py`).
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterable
from typing import Annotated, Any

import anyio.to_thread
from fastapi import APIRouter, Header, Path, Query, Request
from fastapi.responses import Response
from pydantic import Field

from atoll.builds.builder import STEP_TIMEOUT_S, BuildOptions
from atoll.builds.dockerfile import parse_dockerfile
from atoll.builds.plan import BuildPlan, CopyStep, KeptWords, Text, VariableName
from atoll.builds.uploads import MAX_UPLOAD_BYTES
from atoll.contract.errors import BuildFailed, BuildNotFound, InvalidRequest
from atoll.contract.frozen import Frozen
from atoll.contract.model import Build, BuildLogLine, Limits, RuntimeName
from atoll.contract.names import DEFAULT_TAG
from atoll.contract.network import NetworkPolicy
from atoll.server.builds import BUILD_TIMEOUT_S, TemplateBuild
from atoll.server.policy import check_create
from atoll.surfaces.door.middleware import BodyTooLarge
from atoll.surfaces.rest.caller import ApiRoute, Caller, Reader, Writer
from atoll.surfaces.rest.errors import failures
from atoll.surfaces.rest.event_stream import EventStream, ServerEvent, streams
from atoll.surfaces.rest.events import Follow
from atoll.surfaces.rest.idempotent import IdempotencyKey, once
from atoll.surfaces.rest.pages import (
    MAX_INTEGER,
    VARIABLE_KEYS,
    After,
    AfterNumber,
    JsonBody,
    Limit,
    NameField,
    Page,
    RequestBody,
    answer,
    page,
    page_answer,
)
from atoll.surfaces.rest.sandboxes import begun_as, effective_limits
from atoll.surfaces.rest.transfer import BINARY, body_of

router = APIRouter(prefix="/api/v1/builds", tags=["builds"], route_class=ApiRoute)
MAX_DOCKERFILE_CHARS = 256 * 1024
_FILES = r"^[0-9a-f]{64}$"
_ARCHIVE_TYPE = "application/x-tar"
_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": {_ARCHIVE_TYPE: BINARY}}}
BuildPath = Annotated[str, Path(description="The id of a build.", max_length=64)]
FilesPath = Annotated[
    str,
    Path(
        pattern=_FILES,
        description="What the files are called: 64 hexadecimal digits, which the client chooses: the SHA-256, say.",
    ),
]


class BuildRequest(RequestBody):
    """A build of a template: of a plan, or of a Dockerfile."""

    name: NameField = Field(examples=["web"])
    """What the template is called: sandboxes begin as it with the image `template:NAME`."""
    tags: list[NameField] = Field(default=[DEFAULT_TAG], min_length=1, max_length=32)
    dockerfile: str | None = Field(default=None, max_length=MAX_DOCKERFILE_CHARS, examples=["FROM host\nRUN true\n"])
    """The text of a Dockerfile. Either this or `plan` is given."""
    files: str | None = Field(default=None, pattern=_FILES)
    """Of a Dockerfile: what the archive with the files of its COPY and ADD is called, which was uploaded."""
    arguments: dict[VariableName, Text] = Field(default_factory=dict, max_length=256, json_schema_extra=VARIABLE_KEYS)
    """Of a Dockerfile: values of its build arguments."""
    ready_command: KeptWords = ()
    """Of a Dockerfile: a program that succeeds once its start command is ready. A create waits for it."""
    plan: BuildPlan | None = None
    """Steps. Either this or `dockerfile` is given."""
    runtime: RuntimeName | None = None
    limits: Limits | None = None
    """Of the steps, and of the template's sandboxes that name no others."""
    network: NetworkPolicy | None = None
    """Of the steps. Unset: no connection leaves one."""
    sudo: bool = False
    """Whether `sudo` works in steps of `user`, or of the base image's own user. Sandboxes from the template have it
    if they are created with it."""
    cache: bool = True
    """False: every step is run, also those whose results are kept."""
    step_timeout_s: float | None = Field(default=None, gt=0, le=BUILD_TIMEOUT_S)
    """How long a step may take. Unset: 30 minutes."""


class UploadedFiles(Frozen):
    """An archive for copies."""

    files: str


# -------------------------------------------------------------------------------------------------------------- files


@router.put(
    "/files/{files}",
    status_code=204,
    operation_id="builds_upload",
    responses=failures(413, 422),
    openapi_extra=_BODY,
)
async def upload(request: Request, caller: Writer, files: FilesPath) -> Response:
    """Upload files that builds copy: a tar, which may be compressed with gzip. It is unpacked in the sandbox of a step
    alone. Those that were used longest ago are removed when there are too many."""
    if (length := request.headers.get("content-length", "0")).isdigit() and int(length) > MAX_UPLOAD_BYTES:
        raise BodyTooLarge(MAX_UPLOAD_BYTES)
    await caller.server.builds.uploads.put(caller.tenant.name, files, _limited(request))
    return Response(status_code=204)


async def _limited(request: Request) -> AsyncIterator[bytes]:
    size_bytes = 0
    async for data in body_of(request):
        size_bytes += len(data)
        if size_bytes > MAX_UPLOAD_BYTES:
            raise BodyTooLarge(MAX_UPLOAD_BYTES)
        yield data
    if not size_bytes:
        raise InvalidRequest("the body is empty; send the bytes of a tar (curl -T files.tar)")


@router.get("/files/{files}", operation_id="builds_files", response_model=UploadedFiles, responses=failures(404))
async def uploaded(caller: Reader, files: FilesPath) -> Response:
    """Whether files are there. They count as used now."""
    if not caller.server.builds.uploads.has(caller.tenant.name, files):
        raise BuildNotFound(files, f"no files were uploaded as {files}, or they were removed since")
    return answer(UploadedFiles(files=files))


# ------------------------------------------------------------------------------------------------------------- builds


@router.post(
    "",
    status_code=201,
    operation_id="builds_create",
    response_model=Build,
    response_description="It has begun.",
    responses=failures(404, 409, 413, 422),
)
async def create(
    request: Request, caller: Writer, body: Annotated[BuildRequest, JsonBody()], key: IdempotencyKey = None
) -> Response:
    """Begin a build. It goes on when the client is gone. The key needs the scope `sandboxes:exec`, too."""
    caller.key.require("sandboxes:exec")
    async with once(caller, request, key, resource=str(uuid.uuid4())) as made:
        if made.replay is not None:
            return made.replay
        build = await _interrupted(caller, made.name) if made.is_interrupted else None
        build = build or await _begin(caller, body, made.name)
        caller.note(resource=f"templates/{body.name}", build=build.id)
        return made.give(answer(build, 201, {"Location": f"/api/v1/builds/{build.id}"}))


async def _interrupted(caller: Caller, id: str | None) -> Build | None:
    """What an interrupted request has begun. None: nothing."""
    try:
        return (await caller.server.builds.find(caller.tenant.name, id or "")).info()
    except BuildNotFound:
        return None


async def _begin(caller: Caller, body: BuildRequest, id: str | None) -> Build:
    builds, tenant, engine = caller.server.builds, caller.tenant, caller.engine
    builds.check_room(tenant.name)
    plan = await _plan(body)
    image = plan.image or engine.default_image
    limits, runtime = await begun_as(caller, image, body.limits, body.runtime)
    admitted = check_create(tenant.policy, image=image, network=body.network, runtime=runtime, limits=limits)
    effective_limits(caller, admitted.limits, admitted.runtime)  # refuses a runtime that cannot be used
    _check_files(caller, plan)
    options = BuildOptions(
        runtime=admitted.runtime,
        network=admitted.network,
        sudo=body.sudo,
        uses_cache=body.cache,
        step_timeout_s=body.step_timeout_s or STEP_TIMEOUT_S,
    )
    build = builds.request(tenant.name, body.name, [*dict.fromkeys(body.tags)], admitted.limits, id)
    builds.start(tenant, engine, build, plan, options)
    return build.info()


async def _plan(body: BuildRequest) -> BuildPlan:
    if (body.plan is None) == (body.dockerfile is None):
        raise InvalidRequest("give one of plan and dockerfile")
    if body.plan is not None:
        if body.files is not None or body.arguments or body.ready_command:
            raise InvalidRequest("files, arguments and ready_command are for a dockerfile; a plan has its own")
        return body.plan
    text = body.dockerfile or ""

    def parse() -> BuildPlan:
        return parse_dockerfile(text, arguments=body.arguments, archive=body.files)

    plan = await anyio.to_thread.run_sync(parse)  # a long one takes long
    return plan.model_copy(update={"ready_command": body.ready_command}) if body.ready_command else plan


def _check_files(caller: Caller, plan: BuildPlan) -> None:
    for archive in {step.archive for step in plan.steps if isinstance(step, CopyStep)}:
        if not caller.server.builds.uploads.has(caller.tenant.name, archive):
            raise BuildFailed(
                f"the files {archive} of a copy are not there; upload them first: PUT /api/v1/builds/files/{archive}"
            )


@router.get("", operation_id="builds_list", response_model=Page[Build], responses=failures())
async def list_builds(caller: Reader, limit: Limit = 100, after: After = None) -> Response:
    """The builds of the tenant, from the first; the last 100 are remembered."""
    found = await caller.server.builds.list(caller.tenant.name)
    return page_answer(found, lambda each: f"{each.created_at.isoformat()} {each.id}", limit, after)


@router.get("/{build}", operation_id="builds_get", response_model=Build, responses=failures(404))
async def get(caller: Reader, build: BuildPath) -> Response:
    """One build: how far it is, why it has failed, or what it has made."""
    return answer((await _find(caller, build)).info())


async def _find(caller: Caller, build: str) -> TemplateBuild:
    return await caller.server.builds.find(caller.tenant.name, build)


@router.get("/{build}/log", operation_id="builds_log", response_model=Page[BuildLogLine], responses=failures(404))
async def log(caller: Reader, build: BuildPath, limit: Limit = 100, after: AfterNumber = None) -> Response:
    """The lines of a build's log, from the first. `after` is the number of a line."""
    lines, at = (await _find(caller, build)).lines, int(after or 0)
    shown = lines[at : at + limit]
    return page(shown, str(shown[-1].number) if at + limit < len(lines) else None)


@router.get(
    "/{build}/events",
    operation_id="builds_events",
    response_class=Response,
    responses={**failures(404), **streams(BuildLogLine | Build)},
)
async def events(
    caller: Reader,
    build: BuildPath,
    after: Annotated[
        int | None, Query(ge=0, le=MAX_INTEGER, description="The number of the last line that the client has.")
    ] = None,
    follow: Follow = True,
    last_event_id: Annotated[
        str | None, Header(alias="Last-Event-ID", pattern=r"^[0-9]{1,18}$", description="As `after`.")
    ] = None,
) -> Response:
    """A build's log as it is written: events `log`, each with a line. The last is `done`, with the build, once it has
    ended."""
    found = await _find(caller, build)
    begin = int(last_event_id) if last_event_id is not None else after or 0
    return EventStream(caller, _told(found, begin, follow=follow))


async def _told(build: TemplateBuild, after: int, *, follow: bool) -> AsyncIterator[ServerEvent]:
    if not follow:
        for event in _sent(build.lines[after:]):
            yield event
    else:
        async for line in build.follow(after):
            for event in _sent([line]):
                yield event
    if build.status not in ("waiting", "building"):
        yield ServerEvent("done", build.info())


def _sent(lines: Iterable[BuildLogLine]) -> list[ServerEvent]:
    return [ServerEvent("log", line, str(line.number)) for line in lines]


@router.post("/{build}/cancel", operation_id="builds_cancel", response_model=Build, responses=failures(404, 409))
async def cancel(caller: Writer, build: BuildPath) -> Response:
    """End a build, and answer when it has. The results of its complete steps are kept. One that has ended stays as it
    is."""
    found = await caller.server.builds.cancel(caller.tenant.name, build)
    caller.note(resource=f"templates/{found.template}", build=found.id)
    return answer(found.info())
