"""Model names and model errors.

Owns which providers exist, what each needs (key, package, region), and how their errors map to ours. Not here: what is
requested of a model (`loop.py`), scripted models (`script.py`), and the providers' protocols (pydantic-ai). Used by
`loop.py`, `children.py` and `atoll agent`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import anyio
from pydantic_ai import exceptions
from pydantic_ai.models import Model

from atoll.agents.script import Script, scripted
from atoll.contract.errors import AtollError, InvalidRequest, ModelFailed, ModelUnavailable, install_extra

ALLOWED_NAMES = (
    "anthropic:NAME, bedrock:NAME, openai:NAME (OPENAI_BASE_URL names a server that is compatible), ollama:NAME, "
    "openai-chat:NAME, openai-responses:NAME, or script:FILE, which needs no provider"
)
_MAX_CLOSE_S = 5.0
_MAX_REASON_CHARS = 500
"""How much of a provider's message an error repeats."""
_NEEDS = {
    "anthropic": "set ANTHROPIC_API_KEY to your key",
    "bedrock": "set AWS_DEFAULT_REGION, and credentials for AWS",
    **dict.fromkeys(("openai", "openai-chat", "openai-responses"), "set OPENAI_API_KEY to your key"),
}
_OPENAI_HOST = "https://api.openai.com"
_OLLAMA_PORT = 11434


def resolve(model: str | Model, api_key: str | None = None) -> Model:
    """The model of this name. A `Model` is returned unchanged. `api_key` is used instead of the environment's.

    Raises:
        InvalidRequest: there is no such provider, or something that it needs is missing: a key, a package, the script.
            Or a key is given to a model that takes none.
    """
    if isinstance(model, Model):
        if api_key is not None:
            raise InvalidRequest("a model that is given as an object has its key already; give it there")
        return model
    kind, _, name = model.partition(":")
    make = _FACTORIES.get(kind)
    if make is None or not name:
        raise InvalidRequest(f"{model!r} is not the name of a model; allowed are {ALLOWED_NAMES}")
    if api_key is not None and kind not in _KEYED:
        raise InvalidRequest(f"{kind} takes no API key; those that take one are {', '.join(_KEYED)}")
    try:
        return make(name) if api_key is None else _KEYED[kind](name, api_key)
    except ImportError as error:
        extra = "bedrock" if kind == "bedrock" else "agents"
        raise InvalidRequest(f"{kind} needs a package that is not installed; {install_extra(extra)}") from error
    except exceptions.UserError as error:
        # pydantic-ai's message is for developers, so ours replaces it.
        needs = _NEEDS.get(kind, str(error))
        raise InvalidRequest(f"{model} cannot be used: {needs}. Other models are {ALLOWED_NAMES}") from error
    except AtollError:
        raise
    except Exception as error:
        # Providers' clients raise errors of their own for wrong settings of the environment: an address, a proxy.
        raise InvalidRequest(f"{model} cannot be used with the settings of the environment: {error}") from error


def _anthropic(name: str, api_key: str | None = None) -> Model:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    return AnthropicModel(name, provider="anthropic" if api_key is None else AnthropicProvider(api_key=api_key))


def _bedrock(name: str) -> Model:
    from pydantic_ai.models.bedrock import BedrockConverseModel

    return BedrockConverseModel(name)


def _openai(name: str, api_key: str | None = None) -> Model:
    from pydantic_ai.providers.openai import OpenAIProvider

    # Compatible servers offer chat completions; the responses API is OpenAI's own.
    own = str(OpenAIProvider(api_key=api_key).base_url).startswith(_OPENAI_HOST)
    return _openai_responses(name, api_key) if own else _openai_chat(name, api_key)


def _openai_chat(name: str, api_key: str | None = None) -> Model:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIChatModel(name, provider=OpenAIProvider(api_key=api_key))


def _openai_responses(name: str, api_key: str | None = None) -> Model:
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIResponsesModel(name, provider=OpenAIProvider(api_key=api_key))


def _ollama(name: str) -> Model:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.ollama import OllamaProvider

    address = os.environ.get("OLLAMA_BASE_URL") or ollama_address(os.environ.get("OLLAMA_HOST", ""))
    return OpenAIChatModel(name, provider=OllamaProvider(base_url=address))


def ollama_address(host: str) -> str:
    """The address of ollama's compatible API, from $OLLAMA_HOST as ollama reads it: a host, `host:port` or a URL.

    Raises:
        ValueError: it is not an address.
    """
    host = host.strip().strip("\"'")
    if host.count(":") > 1 and not host.startswith("[") and "://" not in host:
        host = f"[{host}]"  # IPv6
    parts = urlsplit(host if "://" in host else f"//{host}")
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, _OLLAMA_PORT)
    name = parts.hostname or "127.0.0.1"
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(name, name)  # noqa: S104 - where a server listens, not a client connects
    where = f"[{name}]" if ":" in name else name
    return f"{parts.scheme or 'http'}://{where}:{port}{parts.path.rstrip('/')}/v1"


def _script(path: str) -> Model:
    return scripted(Script.load(Path(path).expanduser()), name=f"script:{path}")


_KEYED: dict[str, Callable[[str, str | None], Model]] = {
    "anthropic": _anthropic,
    "openai": _openai,
    "openai-chat": _openai_chat,
    "openai-responses": _openai_responses,
}
"""The providers that a key opens."""
_FACTORIES: dict[str, Callable[[str], Model]] = {
    "anthropic": _anthropic,
    "bedrock": _bedrock,
    "openai": _openai,
    "openai-chat": _openai_chat,
    "openai-responses": _openai_responses,
    "ollama": _ollama,
    "script": _script,
}


@asynccontextmanager
async def connected(model: Model) -> AsyncIterator[None]:
    """Keep the model's connections open within this context. They are closed at its end, also when it is cancelled."""
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
"""Errors after which the same request may succeed later."""


def is_retryable(error: exceptions.ModelAPIError) -> bool:
    """Whether the same request may succeed later."""
    return isinstance(error, _RETRYABLE)


def is_refused(error: exceptions.ModelAPIError) -> bool:
    """Whether a provider refused what is in the request, rather than its length, the key or the model."""
    others = (
        exceptions.ModelContextWindowExceededError,
        exceptions.ModelAuthenticationError,
        exceptions.ModelNotFoundError,
    )
    return isinstance(error, exceptions.ModelRequestRejectedError) and not isinstance(error, others)


def is_of_request(error: Exception) -> bool:
    """Whether a `ModelFailed` is about what was requested, so that who requested it may read what the provider said.
    What it says of the key and the account is for the operator, whose they are."""
    cause = error.__cause__
    return isinstance(cause, exceptions.ModelRequestRejectedError) and not isinstance(
        cause, exceptions.ModelAuthenticationError
    )


@contextmanager
def translating(model: Model, unless: Callable[[Exception], bool]) -> Iterator[None]:
    """Translate errors of pydantic-ai and of providers' clients to ours. Errors for which `unless` is true pass.

    Raises:
        ModelUnavailable: the model cannot be reached, or is overloaded.
        ModelFailed: it refused the request, or its answer cannot be used.
    """
    name = model.model_name
    try:
        yield
    except exceptions.ModelAPIError as error:
        kind = ModelUnavailable if is_retryable(error) else ModelFailed
        raise kind(f"{name}: {reason(error, model)}", hint=str(error)[:_MAX_REASON_CHARS], model=name) from error
    except (exceptions.UserError, exceptions.AgentRunError) as error:
        raise ModelFailed(f"{name}: {error}", model=name) from error
    except AtollError:
        raise
    except Exception as error:
        if unless(error):
            raise
        # Clients do not validate answers: an invalid one raises any exception in them.
        what = f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS]
        raise ModelFailed(f"{name}: the request failed, or the answer is invalid ({what})", model=name) from error


def reason(error: exceptions.ModelAPIError, model: Model) -> str:
    """Why a request failed, with the address that was tried and a part of the provider's message."""
    for kind, words in _REASONS:
        if isinstance(error, kind):
            return words.format(where=_address(model)) + _provider_message(error)
    return f"the request failed{_provider_message(error)}"


def _address(model: Model) -> str:
    """` at …` with the address of the model's provider, without user names and passwords, or an empty string."""
    parts = urlsplit(model.base_url or "")
    host = parts.netloc.rpartition("@")[2]
    return f" at {parts.scheme}://{host}{parts.path}" if host else ""


_REASONS = (
    (exceptions.ModelAuthenticationError, "the API key was refused; check that it is set, and is for this provider"),
    (exceptions.ModelNotFoundError, "there is no model of this name, or the API key may not use it"),
    (
        exceptions.ModelContextWindowExceededError,
        "the conversation is longer than the model's context window; start a new one",
    ),
    (exceptions.ModelQuotaExceededError, "the account's quota or credit is used up"),
    (exceptions.ModelRateLimitError, "the rate limit is reached; try again later"),
    (exceptions.ModelOverloadedError, "the provider is overloaded; try again later"),
    (exceptions.ModelUnavailableError, "the provider is not available; try again later"),
    (exceptions.ModelConnectionError, "the provider cannot be reached{where}, or the connection was lost"),
    (exceptions.ModelServerError, "the provider failed; try again later"),
    (exceptions.ModelRequestRejectedError, "the request was refused"),
)


def _provider_message(error: exceptions.ModelAPIError) -> str:
    """The provider's message in parentheses, or the status, or an empty string."""
    body = error.body
    if isinstance(body, dict):
        inner = body.get("error", body)
        message = inner.get("message") if isinstance(inner, dict) else None
        if isinstance(message, str) and message:
            return f" ({message[:_MAX_REASON_CHARS]})"
    status = getattr(error, "status_code", None)
    return f" (status {status})" if status else ""
