"""A deep agent of LangChain works in a sandbox of Atoll, by the backend of langchain-e2b."""

from __future__ import annotations

from typing import Any

from deepagents import create_deep_agent
from e2b import Sandbox
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_e2b import E2BSandbox

from atoll.testing.server import RunningServer

CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("write_file", {"file_path": "/home/user/list.txt", "content": "pear\napple\n"}),
    ("execute", {"command": "sort list.txt -o list.txt && echo sorted"}),
    ("read_file", {"file_path": "/home/user/list.txt"}),
    ("grep", {"pattern": "pear", "path": "/home/user", "output_mode": "content"}),
)


class ScriptedModel(GenericFakeChatModel):  # type: ignore[misc]
    def bind_tools(self, *_args: Any, **_kwargs: Any) -> ScriptedModel:
        return self


def test_an_agent_writes_sorts_and_reads_a_file(e2b_drop_in: RunningServer) -> None:
    said = [
        AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": f"call_{i}", "type": "tool_call"}])
        for i, (name, arguments) in enumerate(CALLS)
    ]
    with Sandbox.create(timeout=120) as sandbox:
        backend = E2BSandbox(sandbox=sandbox)
        agent = create_deep_agent(model=ScriptedModel(messages=iter([*said, AIMessage("done")])), backend=backend)
        result = agent.invoke({"messages": [{"role": "user", "content": "Sort the list."}]})
        told = [str(each.content) for each in result["messages"] if isinstance(each, ToolMessage)]
        assert "sorted" in told[1]
        assert told[2].index("apple") < told[2].index("pear")
        assert "list.txt" in told[3]
        assert result["messages"][-1].content == "done"
        uploaded = backend.upload_files([("/home/user/data.bin", bytes(range(256)))])
        assert uploaded[0].error is None
        assert backend.download_files(["/home/user/data.bin"])[0].content == bytes(range(256))
