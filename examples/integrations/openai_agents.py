"""A sandbox agent of the OpenAI Agents SDK, whose sandbox is Atoll's.

    python examples/integrations/openai_agents.py

The model is scripted, so this runs offline; pass another model of the SDK to `play`.
"""

from __future__ import annotations

import asyncio

from agents import RunConfig, Runner
from agents.models.interface import Model
from agents.sandbox import Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox.entries import File
from agents.testing import ScriptedModel, assistant_message, function_call
from openai.types.responses import ResponseCustomToolCall

from atoll.integrations.openai_agents import AtollSandboxClient, AtollSandboxClientOptions

TIDES = b"time,metres\n03:10,0.9\n09:25,2.4\n15:40,1.1\n"
PATCH = """\
*** Begin Patch
*** Add File: highest.py
+import csv
+
+with open("tides.csv") as file:
+    print(max(csv.DictReader(file), key=lambda row: float(row["metres"]))["time"])
*** End Patch
"""


def script() -> ScriptedModel:
    """A model that writes a program, runs it, and says that it did."""
    patch = ResponseCustomToolCall(
        type="custom_tool_call", id="patch", call_id="patch", name="apply_patch", input=PATCH
    )
    return ScriptedModel(
        [
            [patch],
            [function_call("exec_command", {"cmd": "python3 highest.py"}, call_id="run")],
            [assistant_message("The program above says when the tide was highest.")],
        ]
    )


async def play(
    client: AtollSandboxClient, options: AtollSandboxClientOptions | None = None, model: Model | None = None
) -> list[str]:
    """Ask the agent, and give what its tools answered and then its own answer."""
    agent = SandboxAgent(name="Tides", instructions="Answer by programs.", model=model or script())
    config = RunConfig(
        tracing_disabled=True,
        sandbox=SandboxRunConfig(
            client=client, options=options, manifest=Manifest(entries={"tides.csv": File(content=TIDES)})
        ),
    )
    result = await Runner.run(agent, "When was the highest tide in tides.csv?", run_config=config)
    answers = [str(item.output) for item in result.new_items if item.type == "tool_call_output_item"]
    return [*answers, str(result.final_output)]


async def main() -> None:
    async with AtollSandboxClient() as client:
        print(*await play(client), sep="\n")


if __name__ == "__main__":
    asyncio.run(main())
