"""`ProgrammaticToolOrchestrator`: with scripted models, and through Anthropic's real client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from atoll import InvalidRequest, ProgrammaticToolOrchestrator, TextEvent, ToolCallEvent
from atoll.agents import models
from atoll.agents.script import Script, scripted
from tests.agents.conftest import Anthropic
from tests.agents.messages_api import Say

if TYPE_CHECKING:
    from pydantic_ai.models import Model

    from atoll import Engine

pytestmark = pytest.mark.anyio
SUM = "rows = [await sales(region) for region in ('east', 'west')]\nprint(sum(row['amount'] for row in rows))"


def says(*steps: dict[str, Any]) -> Model:
    return scripted(Script.model_validate({"step": steps}))


def runs(code: str, **expect: Any) -> dict[str, Any]:
    return {"call": [{"tool": "execute_code", "input": {"code": code}}], "expect": expect}


def answers(text: str, *results: str, **expect: Any) -> dict[str, Any]:
    return {"text": text, "expect": {"result": [{"contains": [each], "error": "any"} for each in results], **expect}}


def with_sales(orchestrator: ProgrammaticToolOrchestrator) -> list[str]:
    asked: list[str] = []

    @orchestrator.register_tool(description="The sales of a region.")
    def sales(region: str) -> dict[str, Any]:
        asked.append(region)
        return {"region": region, "amount": len(asked)}

    return asked


async def test_code_calls_tools_and_only_what_it_prints_reaches_the_model(host: Engine) -> None:
    model = says(runs(SUM, instructions=["writing code", "Be brief."]), answers("3 in all.", "3"))
    async with ProgrammaticToolOrchestrator(model, instructions="Be brief.", engine=host) as orchestrator:
        asked = with_sales(orchestrator)
        assert await orchestrator.run("How much was sold?") == "3 in all."
        assert asked == ["east", "west"]
        assert orchestrator.answer is not None
        assert orchestrator.answer.steps == 2
        assert '"amount"' not in orchestrator.history.dump()
        assert orchestrator.executor.active_sessions == {}
    assert await host.list("code-") == []


async def test_a_tool_for_the_model_itself_is_offered_beside_execute_code(host: Engine) -> None:
    model = says({"call": [{"tool": "now"}], "expect": {"tools": ["execute_code", "now"]}}, answers("Noon.", "12:00"))
    async with ProgrammaticToolOrchestrator(model, engine=host) as orchestrator:

        @orchestrator.register_tool(allowed_callers=["direct"])
        def now() -> str:
            """The time."""
            return "12:00"

        assert await orchestrator.run("How late is it?") == "Noon."


async def test_runs_continue_one_conversation_until_it_is_cleared(host: Engine) -> None:
    model = says(answers("Hello.", prompt=["hello"]), answers("You said hello.", prompt=["what"]))
    async with ProgrammaticToolOrchestrator(model, engine=host) as orchestrator:
        assert await orchestrator.run("hello") == "Hello."
        assert await orchestrator.run("what did I say?") == "You said hello."
        assert len(orchestrator.history) == 4
        orchestrator.clear_history()
        assert await orchestrator.run("hello") == "Hello."


@pytest.mark.parametrize(("reuse", "printed"), [(True, "42"), (False, "NameError")])
async def test_variables_outlive_a_run_only_when_asked_for(host: Engine, reuse: bool, printed: str) -> None:
    model = says(runs("x = 42"), answers("Set."), runs("print(x)"), answers("Seen.", printed))
    async with ProgrammaticToolOrchestrator(model, reuse_session=reuse, engine=host) as orchestrator:
        await orchestrator.run("set it")
        await orchestrator.run("look")


async def test_a_tool_that_is_registered_between_runs_is_known_to_a_session_that_goes_on(host: Engine) -> None:
    model = says(runs("x = 1"), answers("Set."), runs(SUM), answers("3.", "3"))
    async with ProgrammaticToolOrchestrator(model, reuse_session=True, engine=host) as orchestrator:
        await orchestrator.run("begin")
        with_sales(orchestrator)
        assert await orchestrator.run("sum") == "3."


async def test_a_run_can_be_streamed(host: Engine) -> None:
    model = says({"text": "I add them up.", **runs(SUM)}, answers("3 in all.", "3"))
    async with ProgrammaticToolOrchestrator(model, engine=host) as orchestrator:
        with_sales(orchestrator)
        async with orchestrator.stream("How much was sold?") as stream:
            events = [event async for event in stream]
        assert [event.tool for event in events if isinstance(event, ToolCallEvent)] == ["execute_code"]
        assert "".join(event.text for event in events if isinstance(event, TextEvent)).endswith("3 in all.")
        assert orchestrator.answer is stream.answer


async def test_anthropics_client_is_shown_the_tools_and_gets_the_key(host: Engine, anthropic: Anthropic) -> None:
    api = anthropic([Say("", [("execute_code", {"code": SUM})]), Say("3 in all.")])
    model = "anthropic:claude-of-the-tests"
    async with ProgrammaticToolOrchestrator(model, api_key="test-key", engine=host) as orchestrator:
        with_sales(orchestrator)
        assert await orchestrator.run("How much was sold?") == "3 in all."
    assert api.complaints == []
    [tool] = api.requests[0]["tools"]
    assert "async def sales(region: str) -> dict[str, Any]" in tool["description"]


def test_a_key_is_for_models_that_take_one() -> None:
    assert models.resolve("openai:gpt-5", "sk-test").model_name == "gpt-5"
    assert models.resolve("openai-chat:gpt-5", "sk-test").model_name == "gpt-5"
    with pytest.raises(InvalidRequest, match="bedrock takes no API key"):
        ProgrammaticToolOrchestrator("bedrock:claude", api_key="sk-test")
    with pytest.raises(InvalidRequest, match="has its key already"):
        ProgrammaticToolOrchestrator(says(answers("")), api_key="sk-test")
