"""smolagents runs what its model writes in a sandbox of Atoll, by its own `E2BExecutor`."""

from __future__ import annotations

import io
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2b import Sandbox
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


@pytest.fixture
def template(e2b_drop_in: RunningServer) -> Iterator[str]:
    """A snapshot with numpy and Pillow, which smolagents expects in a sandbox, or installs from the internet."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in ("numpy", "numpy.libs", "PIL", "pillow.libs"):
            archive.add(Path(sysconfig.get_path("platlib"), name), name)
    with Sandbox.create(timeout=120) as sandbox:
        sandbox.files.write("/tmp/packages.tar", packed.getvalue())
        sandbox.commands.run("d=$(python3 -m site --user-site); mkdir -p $d; tar -C $d -xf /tmp/packages.tar")
        snapshot = sandbox.create_snapshot()
    yield snapshot.snapshot_id
    Sandbox.delete_snapshot(snapshot.snapshot_id)


def test_an_agent_keeps_its_variables_and_sees_its_errors_until_its_answer(template: str) -> None:
    model = ScriptedModel()
    with CodeAgent(
        tools=[double], model=model, executor_type="e2b", executor_kwargs={"template": template}, max_steps=4
    ) as agent:
        answer = agent.run("Double some numbers.")
        inside = agent.python_executor.sandbox.commands.run("hostname").stdout.strip()
    assert answer == {"rows": [0, 2, 4, 6], "kept": "[0, 2, 4, 6]", "host": inside}
    assert f"on {inside}" in model.told[1]
    assert "NameError" in model.told[2]
