"""An agent of deepagents whose files and commands are in a sandbox of Atoll.

    python examples/integrations/deepagents_backend.py

The model is scripted, so this runs offline; pass another chat model of LangChain to `play`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from deepagents import create_deep_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from atoll.integrations.deepagents import AtollBackend

PROGRAM = """\
import csv, pathlib

rows = list(csv.DictReader(pathlib.Path("/tmp/tides.csv").open()))
print(max(rows, key=lambda row: float(row["metres"]))["time"])
"""
SCRIPT = [
    ("write_file", {"file_path": "/tmp/tides.csv", "content": "time,metres\n03:10,0.9\n09:25,2.4\n15:40,1.1\n"}),
    ("write_file", {"file_path": "/tmp/highest.py", "content": PROGRAM}),
    ("execute", {"command": "python3 /tmp/highest.py"}),
]


class ScriptedModel(GenericFakeChatModel):
    """A model that makes the calls of `SCRIPT`, one after another, and then answers with what the last one gave."""

    def bind_tools(self, tools: Sequence[Any], **_options: Any) -> ScriptedModel:
        return self


def script() -> Iterator[AIMessage]:
    for number, (name, arguments) in enumerate(SCRIPT):
        yield AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": f"call-{number}"}])
    yield AIMessage("The highest tide was measured, see above.")


def play(backend: AtollBackend, model: BaseChatModel | None = None) -> list[Any]:
    """Ask the agent, and give the messages of its conversation."""
    agent = create_deep_agent(model or ScriptedModel(messages=script()), backend=backend)
    answer = agent.invoke({"messages": [{"role": "user", "content": "When was the highest of these tides?"}]})
    messages: list[Any] = answer["messages"]
    return messages


def main() -> None:
    with AtollBackend() as backend:
        for message in play(backend):
            print(f"{message.type}: {message.text or [call['name'] for call in getattr(message, 'tool_calls', [])]}")


if __name__ == "__main__":
    main()
