"""The loop with the real clients of OpenAI and Bedrock against servers that speak their protocols, and wrong names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import atoll
from atoll.agents import models
from tests.agents.other_apis import DONE, OtherApi, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atoll.runtime.sandbox_pool import SandboxPool

pytestmark = pytest.mark.anyio


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtherApi]:
    with serving() as api:
        monkeypatch.setenv("OPENAI_API_KEY", "test-key")
        monkeypatch.setenv("OPENAI_BASE_URL", f"{api.url}/v1")
        monkeypatch.setenv("AWS_ENDPOINT_URL_BEDROCK_RUNTIME", api.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield api


@pytest.mark.parametrize("streams", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("openai:some-model", "/v1/chat/completions"),
        ("openai-chat:some-model", "/v1/chat/completions"),
        ("openai-responses:some-model", "/v1/responses"),
        ("bedrock:us.anthropic.claude-sonnet-4-5-20250929-v1:0", "/model/us.anthropic.claude-sonnet-4-5"),
    ],
)
async def test_every_kind_of_model_calls_a_tool_and_answers(
    pool: SandboxPool, api: OtherApi, model: str, path: str, streams: bool
) -> None:
    agent = atoll.Agent(model, pool.tools(), "Be brief.")
    if streams:
        async with agent.stream("Look inside") as stream:
            _ = [event async for event in stream]
        answer = stream.answer
    else:
        answer = await agent.run("Look inside")
    assert (answer.text, answer.steps) == (DONE, 2)
    assert answer.tokens == atoll.Tokens(input=20, output=10)
    assert all(each.startswith(path) for each in api.paths)
    first, second = api.requests
    assert "Be brief." in str(first)
    assert "sandbox_create" in str(first)
    assert "from inside" in str(second)


async def test_openais_own_server_is_asked_for_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "test-key")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert "Responses" in type(models.resolve("openai:some-model")).__name__


async def test_ollama_is_called_at_the_address_that_its_own_client_uses(
    pool: SandboxPool, api: OtherApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    monkeypatch.delenv("OPENAI_BASE_URL")
    monkeypatch.setenv("OLLAMA_HOST", api.url.removeprefix("http://"))
    answer = await atoll.Agent("ollama:qwen3", pool.tools()).run("Look inside")
    assert (answer.text, answer.steps) == (DONE, 2)
    assert set(api.paths) == {"/v1/chat/completions"}
    assert api.requests[0]["model"] == "qwen3"


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("", "http://127.0.0.1:11434/v1"),
        ("0.0.0.0", "http://127.0.0.1:11434/v1"),
        ("0.0.0.0:8080", "http://127.0.0.1:8080/v1"),
        (":8080", "http://127.0.0.1:8080/v1"),
        ("gpu.example.com", "http://gpu.example.com:11434/v1"),
        ("https://gpu.example.com", "https://gpu.example.com:443/v1"),
        ("http://gpu.example.com:1/ollama/", "http://gpu.example.com:1/ollama/v1"),
        ("::1", "http://[::1]:11434/v1"),
        ("[::]:5", "http://[::1]:5/v1"),
        ("'localhost'", "http://localhost:11434/v1"),
    ],
)
def test_the_address_of_ollama_is_read_as_ollama_reads_it(host: str, address: str) -> None:
    assert models.ollama_address(host) == address


async def test_a_provider_that_cannot_be_reached_is_named_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_BASE_URL", "http://me:secret@127.0.0.1:9/v1")
    with pytest.raises(
        atoll.ModelUnavailable, match=r"qwen3: the provider cannot be reached at http://127\.0\.0\.1:9/v1"
    ):
        await atoll.Agent("ollama:qwen3").run("hi")


@pytest.mark.parametrize("name", ["", "claude", "anthropic:", "no-such-provider:x", ":x"])
def test_a_name_that_is_no_models_says_which_there_are(name: str) -> None:
    with pytest.raises(atoll.InvalidRequest, match="allowed are anthropic:NAME, bedrock:NAME, openai:NAME"):
        atoll.Agent(name)


@pytest.mark.parametrize(("model", "variable"), [("anthropic:x", "ANTHROPIC_API_KEY"), ("openai:x", "OPENAI_API_KEY")])
def test_a_key_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, model: str, variable: str) -> None:
    for name in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(atoll.InvalidRequest, match=f"(?s){variable}.*script:FILE"):
        atoll.Agent(model)


@pytest.mark.parametrize(
    ("model", "variable", "value"),
    [
        ("anthropic:x", "ANTHROPIC_BASE_URL", "http://[::1"),
        ("openai:x", "OPENAI_BASE_URL", "::"),
        ("anthropic:x", "ALL_PROXY", "wat://x"),
        ("ollama:x", "OLLAMA_HOST", "http://[::1"),
        ("bedrock:x", "AWS_DEFAULT_REGION", "no such region"),
    ],
)
def test_invalid_settings_of_the_environment_are_an_error(
    monkeypatch: pytest.MonkeyPatch, model: str, variable: str, value: str
) -> None:
    for name in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "test-key")
    monkeypatch.setenv(variable, value)
    with pytest.raises(atoll.InvalidRequest, match=f"{model} cannot be used with the settings of the environment"):
        atoll.Agent(model)
