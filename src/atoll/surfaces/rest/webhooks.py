"""Webhooks over REST. Not here: how they are delivered (`atoll.server.webhooks`)."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request
from fastapi.responses import Response
from pydantic import Field

from atoll.contract.frozen import Frozen
from atoll.server.events import EventType
from atoll.server.webhooks import Webhook, WebhookDelivery
from atoll.surfaces.rest.caller import ApiRoute, Caller, requires
from atoll.surfaces.rest.errors import failures
from atoll.surfaces.rest.idempotent import IdempotencyKey, once
from atoll.surfaces.rest.pages import (
    After,
    AfterNumber,
    JsonBody,
    Limit,
    Page,
    RequestBody,
    answer,
    page,
    page_answer,
)

router = APIRouter(prefix="/api/v1/webhooks", tags=["webhooks"], route_class=ApiRoute)
WebhookUser = Annotated[Caller, Depends(requires("webhooks"))]
WebhookPath = Annotated[str, Path(description="The id of a webhook.", max_length=64)]


_NAME = r"([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_PORT = r"([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
URL_PATTERN = rf"^https?://({_NAME}|{_BYTE}(\.{_BYTE}){{3}})(:{_PORT})?(/[!$-~]*)?$"


class WebhookCreate(RequestBody):
    url: str = Field(max_length=250, pattern=URL_PATTERN, examples=["https://example.com/hook"])
    types: list[EventType] = Field(default_factory=list, max_length=32)
    """Empty: all."""


class WebhookUpdate(RequestBody):
    """What is left out stays as it is."""

    url: str | None = Field(default=None, max_length=250, pattern=URL_PATTERN)
    types: list[EventType] | None = Field(default=None, max_length=32)
    disabled: bool | None = None


class NewWebhook(Frozen):
    webhook: Webhook
    secret: str | None
    """Signs its deliveries. Shown this once: null when the answer is repeated for an idempotency key."""


@router.post(
    "",
    status_code=201,
    operation_id="webhooks_create",
    response_model=NewWebhook,
    responses=failures(409, 422),
)
async def create(
    request: Request, caller: WebhookUser, body: Annotated[WebhookCreate, JsonBody()], key: IdempotencyKey = None
) -> Response:
    """Have events sent to a URL."""
    async with once(caller, request, key) as made:
        if made.replay is not None:
            return made.replay
        made.require_not_interrupted()
        webhook, secret = await caller.server.webhooks.create(caller.tenant.name, body.url, body.types)
        caller.note(resource=f"webhooks/{webhook.id}")
        return made.give(
            answer(NewWebhook(webhook=webhook, secret=secret.get_secret_value()), 201),
            stored=answer(NewWebhook(webhook=webhook, secret=None), 201),
        )


@router.get("", operation_id="webhooks_list", response_model=Page[Webhook], responses=failures())
async def list_webhooks(caller: WebhookUser, limit: Limit = 100, after: After = None) -> Response:
    """The webhooks of the tenant."""
    return page_answer(await caller.server.webhooks.list(caller.tenant.name), lambda each: each.id, limit, after)


@router.get("/{webhook}", operation_id="webhooks_get", response_model=Webhook, responses=failures(404))
async def get(caller: WebhookUser, webhook: WebhookPath) -> Response:
    """One webhook, without its secret."""
    return answer(await caller.server.webhooks.get(caller.tenant.name, webhook))


@router.patch("/{webhook}", operation_id="webhooks_update", response_model=Webhook, responses=failures(404))
async def update(caller: WebhookUser, webhook: WebhookPath, body: Annotated[WebhookUpdate, JsonBody()]) -> Response:
    """Change a webhook."""
    changed = await caller.server.webhooks.update(
        caller.tenant.name, webhook, url=body.url, types=body.types, disabled=body.disabled
    )
    return answer(changed)


@router.delete("/{webhook}", status_code=204, operation_id="webhooks_delete", responses=failures(404))
async def delete(caller: WebhookUser, webhook: WebhookPath) -> Response:
    """Delete a webhook and its deliveries."""
    await caller.server.webhooks.delete(caller.tenant.name, webhook)
    return Response(status_code=204)


@router.get(
    "/{webhook}/deliveries",
    operation_id="webhooks_deliveries",
    response_model=Page[WebhookDelivery],
    responses=failures(404),
)
async def deliveries(
    caller: WebhookUser, webhook: WebhookPath, limit: Limit = 100, after: AfterNumber = None
) -> Response:
    """What was sent, or is to be, the latest first."""
    before = None if after is None else int(after)
    found = await caller.server.webhooks.deliveries(caller.tenant.name, webhook, before=before, limit=limit + 1)
    return page(found[:limit], str(found[limit - 1].id) if len(found) > limit else None)


@router.post(
    "/{webhook}/test",
    status_code=202,
    operation_id="webhooks_test",
    response_model=WebhookDelivery,
    responses=failures(404),
)
async def test(caller: WebhookUser, webhook: WebhookPath) -> Response:
    """Send something of the type `test`. The deliveries tell what became of it."""
    return answer(await caller.server.webhooks.test(caller.tenant.name, webhook), 202)
