"""Which model a name means, and what its failures mean to us.

Knows the providers, what each needs, and how their errors map onto ours. Refuses to know what a model is asked
(`loop.py`) and what a scripted one answers (`script.py`). How a provider is spoken to is pydantic-ai's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
from pydantic_ai import exceptions
from pydantic_ai.models import Model

from atoll.agents.script import Script, scripted
from atoll.contract.errors import AtollError, InvalidRequest, ModelFailed, ModelUnavailable

KINDS = (
    "anthropic:NAME, bedrock:NAME, openai:NAME (OPENAI_BASE_URL names a server that is compatible), "
    "openai-chat:NAME, openai-responses:NAME, or script:FILE, which needs no model at all"
)
_MAX_CLOSE_S = 5.0
_MAX_REASON_CHARS = 500
"""How much is told of what a provider says."""
_NEEDS = {
    "anthropic": "set ANTHROPIC_API_KEY to your key",
    "bedrock": "set AWS_DEFAULT_REGION, and credentials for AWS",
    **dict.fromkeys(("openai", "openai-chat", "openai-responses"), "set OPENAI_API_KEY to your key"),
}
_OPENAI_HOST = "https://api.openai.com"


def resolve(model: str | Model) -> Model:
    """The model of this name. One that is a model already stays as it is.

    Raises:
        InvalidRequest: there is no such kind, or something that it needs is missing: a key, a package, the script.
    """
    if isinstance(model, Model):
        return model
    kind, _, name = model.partition(":")
    make = _FACTORIES.get(kind)
    if make is None or not name:
        raise InvalidRequest(f"{model!r} names no model; allowed are {KINDS}")
    try:
        return make(name)
    except ImportError as error:
        extra = "bedrock" if kind == "bedrock" else "agents"
        raise InvalidRequest(f"{kind}: needs a package that is not installed: pip install 'atoll[{extra}]'") from error
    except exceptions.UserError as error:
        # What pydantic-ai says is for who writes programs with it.
        needs = _NEEDS.get(kind, str(error))
        raise InvalidRequest(f"{model} cannot be used: {needs}. Other models are {KINDS}") from error
    except AtollError:
        raise
    except Exception as error:
        # Clients fail in their own ways at settings of the environment: an address, a proxy, a region.
        raise InvalidRequest(f"{model} cannot be used as the environment is: {error}") from error


def _anthropic(name: str) -> Model:
    from pydantic_ai.models.anthropic import AnthropicModel

    return AnthropicModel(name)


def _bedrock(name: str) -> Model:
    from pydantic_ai.models.bedrock import BedrockConverseModel

    return BedrockConverseModel(name)


def _openai(name: str) -> Model:
    from pydantic_ai.providers.openai import OpenAIProvider

    # Others that are compatible speak chat completions; responses are OpenAI's own.
    own = str(OpenAIProvider().base_url).startswith(_OPENAI_HOST)
    return _openai_responses(name) if own else _openai_chat(name)


def _openai_chat(name: str) -> Model:
    from pydantic_ai.models.openai import OpenAIChatModel

    return OpenAIChatModel(name)


def _openai_responses(name: str) -> Model:
    from pydantic_ai.models.openai import OpenAIResponsesModel

    return OpenAIResponsesModel(name)


def _script(path: str) -> Model:
    return scripted(Script.load(Path(path).expanduser()), name=f"script:{path}")


_FACTORIES = {
    "anthropic": _anthropic,
    "bedrock": _bedrock,
    "openai": _openai,
    "openai-chat": _openai_chat,
    "openai-responses": _openai_responses,
    "script": _script,
}


@asynccontextmanager
async def connected(model: Model) -> AsyncIterator[None]:
    """While this is open, the model's connections are kept. Afterwards they are closed, a cancellation or not."""
    await model.__aenter__()
    try:
        yield
    finally:
        with anyio.move_on_after(_MAX_CLOSE_S, shield=True):
            await model.__aexit__(None, None, None)


# -------------------------------------------------------------------------------------------------------------- errors

_RETRYABLE = (
    exceptions.ModelRateLimitError,
    exceptions.ModelUnavailableError,
    exceptions.ModelServerError,
    exceptions.ModelConnectionError,
)
"""What may work when it is tried again."""


def is_retryable(error: exceptions.ModelAPIError) -> bool:
    """Whether the same request may work later."""
    return isinstance(error, _RETRYABLE)


@contextmanager
def translating(model: Model, unless: Callable[[Exception], bool]) -> Iterator[None]:
    """Errors of pydantic-ai and of providers' clients as ours, and what `unless` knows as it is.

    Raises:
        ModelUnavailable: the model cannot be reached, or has too much to do.
        ModelFailed: it refused the request, or its answer cannot be used.
    """
    name = model.model_name
    try:
        yield
    except exceptions.ModelAPIError as error:
        kind = ModelUnavailable if is_retryable(error) else ModelFailed
        raise kind(f"{name}: {reason(error)}", hint=str(error)[:_MAX_REASON_CHARS], model=name) from error
    except (exceptions.UserError, exceptions.AgentRunError) as error:
        raise ModelFailed(f"{name}: {error}", model=name) from error
    except AtollError:
        raise
    except Exception as error:
        if unless(error):
            raise
        # Clients take for granted that an answer is one: what else comes fails in them, each time in another way.
        what = f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS]
        raise ModelFailed(f"{name}: asking it failed, or its answer is none ({what})", model=name) from error


def reason(error: exceptions.ModelAPIError) -> str:
    """What went wrong, in our words, with some of the provider's."""
    for kind, words in _REASONS:
        if isinstance(error, kind):
            return words + _provider_message(error)
    return f"the request failed{_provider_message(error)}"


_REASONS = (
    (exceptions.ModelAuthenticationError, "the key was not accepted; is it set, and for this provider?"),
    (exceptions.ModelNotFoundError, "there is no model of this name, or the key may not use it"),
    (exceptions.ModelContextWindowExceededError, "the conversation is longer than the model can read; begin a new one"),
    (exceptions.ModelQuotaExceededError, "the account's quota or credit is used up"),
    (exceptions.ModelRateLimitError, "too many requests for now; try again later"),
    (exceptions.ModelOverloadedError, "the provider is overloaded; try again later"),
    (exceptions.ModelUnavailableError, "the provider is not available; try again later"),
    (exceptions.ModelConnectionError, "the provider cannot be reached, or the connection broke"),
    (exceptions.ModelServerError, "the provider failed; try again later"),
    (exceptions.ModelRequestRejectedError, "the request was refused"),
)


def _provider_message(error: exceptions.ModelAPIError) -> str:
    """What the provider said of it, where it said something."""
    body = error.body
    if isinstance(body, dict):
        inner = body.get("error", body)
        message = inner.get("message") if isinstance(inner, dict) else None
        if isinstance(message, str) and message:
            return f" ({message[:_MAX_REASON_CHARS]})"
    status = getattr(error, "status_code", None)
    return f" (status {status})" if status else ""
