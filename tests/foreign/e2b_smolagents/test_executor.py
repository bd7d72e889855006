"""smolagents runs what its model writes in a sandbox of Atoll, by its own `E2BExecutor`."""

from __future__ import annotations

from typing import Any

from smolagents import CodeAgent, tool
from smolagents.models import ChatMessage, MessageRole, Model

from atoll.testing.server import RunningServer

STEPS = (
    "import platform\nhost = platform.node()\nprint('on', host)\nrows = [double(n) for n in range(4)]",
    "open('/tmp/rows', 'w').write(repr(rows))\nundefined_name",
    "final_answer({'rows': rows, 'kept': open('/tmp/rows').read(), 'host': host})",
)


class ScriptedModel(Model):  # type: ignore[misc]
    """Says one step after the other, and keeps what it was told."""

    def __init__(self) -> None:
        super().__init__(model_id="scripted")
        self.told: list[str] = []

    def generate(self, messages: list[ChatMessage], *_args: Any, **_kwargs: Any) -> ChatMessage:
        step = len(self.told)
        self.told.append(str(messages[-1].content))
        return ChatMessage(role=MessageRole.ASSISTANT, content=f"Next.\n<code>\n{STEPS[step]}\n</code>")


@tool  # type: ignore[misc]
def double(number: int) -> int:
    """Twice a number.

    Args:
        number: The number.
    """
    return number * 2


def test_an_agent_keeps_its_variables_and_sees_its_errors_until_its_answer(e2b_drop_in: RunningServer) -> None:
    model = ScriptedModel()
    with CodeAgent(tools=[double], model=model, executor_type="e2b", max_steps=4) as agent:
        answer = agent.run("Double some numbers.")
        inside = agent.python_executor.sandbox.commands.run("hostname").stdout.strip()
    assert answer == {"rows": [0, 2, 4, 6], "kept": "[0, 2, 4, 6]", "host": inside}
    assert f"on {inside}" in model.told[1]
    assert "NameError" in model.told[2]
