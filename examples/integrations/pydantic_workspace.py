"""An agent of Pydantic AI whose workspace is a sandbox of Atoll. A script stands for the model, so it runs offline.

    pip install '/path/to/atoll[pydantic-ai]'
    python examples/integrations/pydantic_workspace.py

The second run goes on in the sandbox of the first.
"""

from __future__ import annotations

import asyncio

from pydantic_ai import Agent, ModelMessage, ModelResponse, RunContext, TextPart, ToolCallPart
from pydantic_ai.messages import ToolReturnPart, UserPromptPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

import atoll
from atoll.integrations.pydantic_ai import AtollWorkspace

WORKSPACE = AtollWorkspace[None](
    options={"limits": atoll.Limits(memory_bytes=512 << 20, pids=128), "ttl_s": 3600, "ttl_renewed_by_use": True}
)


def answer(messages: list[ModelMessage], _info: AgentInfo) -> ModelResponse:
    """What a model would say: it runs the command that the prompt has, and repeats what that wrote."""
    last = messages[-1].parts[-1]
    if isinstance(last, ToolReturnPart):
        return ModelResponse(parts=[TextPart(f"It wrote: {last.content}")])
    assert isinstance(last, UserPromptPart)
    assert isinstance(last.content, str)
    return ModelResponse(parts=[ToolCallPart("shell", {"line": last.content.partition(": ")[2]})])


agent = Agent(FunctionModel(answer), capabilities=[WORKSPACE])


@agent.tool
async def shell(ctx: RunContext[None], line: str) -> str:
    """Run a line of shell in the workspace."""
    result = await ctx.workspace.run(line, shell=True, timeout=30)
    return (result.stdout + result.stderr).strip()


async def main() -> None:
    first = await agent.run("Run this: echo 'a note' > note; hostname | wc -l")
    print(first.output)
    ref = first.workspace.ref
    assert ref is not None
    try:
        second = await agent.run("Run this: cat note", workspace=ref)
        print(second.output)
    finally:
        await WORKSPACE.destroy(ref)


if __name__ == "__main__":
    asyncio.run(main())
