"""Templates over REST: listed, tagged and deleted. Not here: what makes them (`builds.py`)."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import Response
from pydantic import Field

from atoll.builds.layers import LayerCache
from atoll.contract.errors import TemplateNotFound
from atoll.contract.frozen import Frozen
from atoll.contract.model import Template
from atoll.contract.names import DEFAULT_TAG, is_name
from atoll.surfaces.rest.caller import ApiRoute, Caller, Reader, Writer
from atoll.surfaces.rest.errors import failures
from atoll.surfaces.rest.pages import After, JsonBody, Limit, NameField, Page, RequestBody, answer, page_answer

router = APIRouter(prefix="/api/v1/templates", tags=["templates"], route_class=ApiRoute)
TemplatePath = Annotated[str, Path(description="The name of a template.", max_length=63, examples=["web"])]
TagPath = Annotated[str, Path(description="One of its tags.", max_length=63, examples=["default"])]


class TagSet(RequestBody):
    version: NameField = Field(default=DEFAULT_TAG, examples=["default"])
    """A tag that the template has: the new one means the same."""


class RemovedResults(Frozen):
    removed: tuple[str, ...]
    """The checkpoints that the results of steps were."""


def _known(name: str) -> str:
    if not is_name(name):
        raise TemplateNotFound(name, [])
    return name


async def _read(caller: Caller, name: str) -> Template:
    return await caller.engine.templates.get(_known(name))


@router.get("", operation_id="templates_list", response_model=Page[Template], responses=failures())
async def list_templates(caller: Reader, limit: Limit = 100, after: After = None) -> Response:
    """The templates of the tenant, by name. One with a `reason` cannot be read, and only be deleted."""
    return page_answer(await caller.engine.templates.list(), lambda each: each.name, limit, after)


@router.post("/gc", operation_id="templates_gc", response_model=RemovedResults, responses=failures())
async def gc(caller: Writer) -> Response:
    """Remove the kept results of steps that no template needs. The next build runs these steps again."""
    removed = await LayerCache(caller.engine).trim(0)
    caller.note(removed=len(removed))
    return answer(RemovedResults(removed=tuple(removed)))


@router.get("/{template}", operation_id="templates_get", response_model=Template, responses=failures(404))
async def get(caller: Reader, template: TemplatePath) -> Response:
    """One template, with its versions by tag. `default` is the one of those who name none."""
    return answer(await _read(caller, template))


@router.delete("/{template}", status_code=204, operation_id="templates_delete", responses=failures(404))
async def delete(caller: Writer, template: TemplatePath) -> Response:
    """Delete a template, with all of its tags. Sandboxes that began as it stay, and so do the results of its steps."""
    await caller.engine.templates.remove(_known(template))
    return Response(status_code=204)


@router.put(
    "/{template}/tags/{tag}", operation_id="templates_tag", response_model=Template, responses=failures(404, 413, 422)
)
async def set_tag(
    caller: Writer,
    template: TemplatePath,
    tag: Annotated[NameField, Path(description="The tag to set.", max_length=63, examples=["v2"])],
    body: Annotated[TagSet, JsonBody()],
) -> Response:
    """Let a tag mean what another one means now, in place of what it meant."""
    await caller.engine.templates.tag(f"{_known(template)}:{body.version}", [tag])
    return answer(await _read(caller, template))


@router.delete("/{template}/tags/{tag}", status_code=204, operation_id="templates_untag", responses=failures(404))
async def remove_tag(caller: Writer, template: TemplatePath, tag: TagPath) -> Response:
    """Delete one tag of a template. Without any, it is deleted."""
    try:
        await caller.engine.templates.untag(_known(template), [tag])
    except TemplateNotFound:
        raise TemplateNotFound(f"{template}:{tag}", []) from None
    return Response(status_code=204)
