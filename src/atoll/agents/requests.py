"""One answer of a model: requested, streamed or whole, requested again when it was interrupted, and made safe to keep.

Owns when an answer counts as complete, retries, and the form in which an answer can be sent again. Not here: what is
done with an answer, and what errors of providers mean (`models.py`). Used by `loop.py` and `surfaces/messages/`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import pydantic_core
from pydantic_ai import direct, exceptions
from pydantic_ai.messages import (
    ModelMessage,
    ModelResponse,
    ModelResponseStreamEvent,
    TextPart,
    ThinkingPart,
    ToolCallPart,
)
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.settings import ModelSettings

from atoll.agents import media, models
from atoll.tools.tool import readable, readable_all

_RETRY_WAITS_S = (0.5, 2.0)
"""Pauses before an interrupted answer is requested again, unless the provider says how long to wait."""
_MAX_RETRY_WAIT_S = 30.0
_NOT_IN_TOOL_NAMES = re.compile(r"[^A-Za-z0-9_-]")
_MAX_TOOL_NAME_CHARS = 64
"""The longest tool name that all providers accept. A model may call tools that do not exist, by any name."""
CUT_OFF_REASONS = {
    "length": "call with less: the answer reached the output limit",
    "content_filter": "the provider withheld the rest of the answer",
}
"""Finish reasons that may cut an answer in the middle of a call."""

OnStreamed = Callable[[ModelResponseStreamEvent], Awaitable[None]]
OnRetry = Callable[[str, float], Awaitable[None]]


class AnswerRequester:
    """Requests answers of a model.

    `on_streamed` receives the events of an answer as they come; without it, answers come whole. An interrupted answer
    is requested again, as providers' clients only retry before the first byte: `on_retry` receives the reason and the
    pause before, and what was streamed of the answer is void then. Without `on_retry` an answer of which something was
    streamed is not requested again.
    """

    def __init__(
        self,
        model: Model,
        parameters: ModelRequestParameters,
        settings: ModelSettings,
        *,
        on_streamed: OnStreamed | None = None,
        on_retry: OnRetry | None = None,
    ) -> None:
        self._model = model
        self._parameters = parameters
        self._settings = settings
        self._on_streamed = on_streamed
        self._on_retry = on_retry
        self._accepted = media.accepted_by(model)
        self._begun = False
        """Whether a part of the requested answer has arrived."""
        self._listener_error: Exception | None = None
        """What the receiver of events raised."""

    async def request(self, messages: Sequence[ModelMessage]) -> ModelResponse:
        """The model's next answer, in a form that can be sent again.

        Of what tools have returned, it is shown what it takes. If its provider refuses a request, perhaps because of
        an image, a document or a URL in it, it is sent once more with their text instead.

        Raises:
            ModelFailed, ModelUnavailable: the request failed. What the receivers of events raise passes.
        """
        with models.translating(self._model, unless=lambda error: error is self._listener_error):
            try:
                return await self._complete(media.shown(messages, self._accepted))
            except exceptions.ModelAPIError as error:
                if self._begun or not (models.is_refused(error) and media.has_media(messages)):
                    raise
                self._accepted = media.NOTHING  # for the rest of the run: the next requests have the same in them
                return await self._complete(media.shown(messages, self._accepted))

    async def _complete(self, messages: list[ModelMessage]) -> ModelResponse:
        for wait_s in (*_RETRY_WAITS_S, None):
            self._begun = False
            try:
                response = await self._request(messages)
                if self._is_incomplete(response):
                    raise exceptions.ModelConnectionError(
                        self._model.model_name, "the answer ended before it was complete", in_stream=True
                    )
                return _sanitized(response)
            except exceptions.ModelAPIError as error:
                interrupted_answer = self._begun or error.in_stream
                void = self._begun and self._on_streamed is not None
                if wait_s is None or not (interrupted_answer and models.is_retryable(error)):
                    raise
                if void and self._on_retry is None:
                    raise
                wait_s = min(error.retry_after or wait_s, _MAX_RETRY_WAIT_S)
                if self._on_retry is not None:
                    await self._guarded(self._on_retry(models.reason(error, self._model), wait_s))
                await anyio.sleep(wait_s)
        raise AssertionError("the last try returns or raises")

    async def _request(self, messages: list[ModelMessage]) -> ModelResponse:
        if self._on_streamed is None:
            return await direct.model_request(
                self._model, messages, model_settings=self._settings, model_request_parameters=self._parameters
            )
        async with direct.model_request_stream(
            self._model, messages, model_settings=self._settings, model_request_parameters=self._parameters
        ) as stream:
            async for event in stream:
                self._begun = True
                await self._guarded(self._on_streamed(event))
            return stream.get()

    async def _guarded(self, receiving: Awaitable[None]) -> None:
        """Call a receiver within a request. Its error must not be taken for one of the model."""
        try:
            await receiving
        except Exception as error:
            self._listener_error = error
            raise

    def _is_incomplete(self, response: ModelResponse) -> bool:
        """Whether the answer is incomplete. Every provider ends a stream with a finish reason: without one, the
        connection was cut on the way."""
        if response.finish_reason is not None:
            return response.finish_reason == "error"
        # One that pydantic-ai does not know is in the details.
        has_reason = "finish_reason" in (response.provider_details or {})
        return self._on_streamed is not None and self._model.provider is not None and not has_reason


def arguments_of(call: ToolCallPart) -> dict[str, Any] | None:
    """The arguments of a call, or None if they are not a JSON object."""
    if not isinstance(call.args, str):
        return call.args or {}
    try:
        found = pydantic_core.from_json(call.args or "{}")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _sanitized(response: ModelResponse) -> ModelResponse:
    """The answer in a form that can be sent again. Models produce output that their own providers refuse as input, and
    a conversation with it could not be continued."""
    response.parts = [part for part in response.parts if not isinstance(part, TextPart) or part.content.strip()]
    ids: set[str] = set()
    for part in response.parts:
        if isinstance(part, TextPart | ThinkingPart):
            part.content = readable(part.content)
        elif isinstance(part, ToolCallPart):
            part.tool_name = _NOT_IN_TOOL_NAMES.sub("_", str(part.tool_name))[:_MAX_TOOL_NAME_CHARS] or "_"
            part.args = _sanitized_arguments(part.args)
            part.tool_call_id = readable(part.tool_call_id)
            while part.tool_call_id in ids:
                part.tool_call_id += "_"
            ids.add(part.tool_call_id)
    return response


def _sanitized_arguments(args: Any) -> dict[str, Any] | str | None:
    """Arguments that a request can carry: without surrogates, and as a string if they are not valid JSON."""
    try:
        args = readable_all(args)
        text = args if isinstance(args, str) else json.dumps(args)
    except (ValueError, RecursionError):  # a number of thousands of digits, or lists nested too deep
        return "arguments that are too large to repeat"
    try:
        found = pydantic_core.from_json(text or "{}")
    except ValueError:
        return text  # incomplete JSON, for instance
    try:
        json.dumps(found, allow_nan=False)
    except ValueError:
        return json.dumps(text)
    return args if isinstance(args, dict | str) or args is None else text
