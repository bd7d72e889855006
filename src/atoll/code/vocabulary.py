"""The vocabulary `code`: `execute_code` in the sandbox `default` of a session.

Not here: the tool (`tool.py`). Used through `tools/vocabularies.py`, by the MCP server and `atoll agent`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.code.executor import CodeExecutor
from atoll.code.registry import ToolRegistry
from atoll.code.tool import execute_code_tools
from atoll.tools.vocabularies import Vocabulary

if TYPE_CHECKING:
    from atoll.runtime.sandbox_pool import SandboxPool
    from atoll.tools.tool import ToolSet
    from atoll.tools.vocabularies import SessionGrants


def _tools(pool: SandboxPool, _grants: SessionGrants) -> ToolSet:
    executor = CodeExecutor(ToolRegistry(), engine=pool.engine)
    pool.on_end(executor.aclose)
    tools, _ = execute_code_tools(executor, pool.get)
    return tools


VOCABULARY = Vocabulary(
    tools=_tools,
    instructions=(
        "`execute_code` runs Python in the sandbox `default`: variables, functions and imports persist between calls, "
        "and its files are those of the other tools there."
    ),
    transcripts={"execute_code": "{code}"},
)
