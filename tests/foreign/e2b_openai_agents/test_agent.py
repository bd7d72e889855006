"""A sandbox agent of openai-agents works in a sandbox of Atoll, by its own E2B client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agents import Model, ModelResponse, RunConfig, Runner, Usage, set_tracing_disabled
from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions, E2BSandboxType
from agents.run_config import SandboxRunConfig
from agents.sandbox import Manifest, SandboxAgent
from agents.sandbox.entries import File
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

from atoll.testing.server import RunningServer

COMMANDS = ("wc -l < notes.txt > count.txt; cat count.txt", "exit 3")


class ScriptedModel(Model):  # type: ignore[misc]
    """Runs one command after the other, then answers with what the last but one printed."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def get_response(self, *, input: Any, **_kwargs: Any) -> ModelResponse:
        results = [each["output"] for each in input if each.get("type") == "function_call_output"]
        self.told = [str(each) for each in results]
        step = len(results)
        output: Any
        if step < len(COMMANDS):
            arguments = json.dumps({"cmd": COMMANDS[step]})
            output = ResponseFunctionToolCall(
                call_id=f"call_{step}", name="exec_command", arguments=arguments, type="function_call"
            )
        else:
            text = ResponseOutputText(text="It has three lines.", type="output_text", annotations=[])
            output = ResponseOutputMessage(
                id="message", role="assistant", status="completed", type="message", content=[text]
            )
        return ModelResponse(output=[output], usage=Usage(), response_id=None)

    def stream_response(self, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("kind", [E2BSandboxType.E2B, E2BSandboxType.CODE_INTERPRETER])
async def test_an_agent_works_on_its_files_with_commands(e2b_drop_in: RunningServer, kind: E2BSandboxType) -> None:
    set_tracing_disabled(True)
    model = ScriptedModel()
    manifest = Manifest(entries={"notes.txt": File(content=b"one\ntwo\nthree\n")})
    client = E2BSandboxClient()
    session = await client.create(manifest=manifest, options=E2BSandboxClientOptions(sandbox_type=kind, timeout=120))
    try:
        async with session:
            agent = SandboxAgent(name="counter", model=model, instructions="Count.", default_manifest=manifest)
            done = await Runner.run(
                agent, "How many lines?", run_config=RunConfig(sandbox=SandboxRunConfig(session=session))
            )
            assert done.final_output == "It has three lines."
            assert "3" in model.told[0]
            assert "3" in model.told[1]
            read = await session.read(Path("count.txt"))
            assert read.read().strip() == b"3"
    finally:
        await client.delete(session)
