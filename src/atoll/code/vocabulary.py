"""The vocabulary `code`: `execute_code` in the sandbox `default` of a session.

Owns what code in a session may call, and which of these calls a person is asked about. Not here: the tool (`tool.py`).
Used through `tools/vocabularies.py` by the MCP server and `atoll agent`, and by `atoll agent --code`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.code.audit import CodeAudit
from atoll.code.executor import CodeConfig, CodeExecutor, ExecutionAudit
from atoll.code.registry import ToolRegistry
from atoll.code.tool import execute_code_tools
from atoll.tools.view import MAX_SHOWN_BYTES
from atoll.tools.vocabularies import Vocabulary

if TYPE_CHECKING:
    from atoll.code.approvals import Approver
    from atoll.runtime.sandbox_pool import SandboxPool
    from atoll.tools.tool import ToolSet
    from atoll.tools.vocabularies import SessionGrants


def code_tools(
    pool: SandboxPool,
    tools: ToolSet | None = None,
    *,
    approver: Approver | None = None,
    audit: ExecutionAudit | None = None,
) -> ToolSet:
    """`execute_code` for a session. Its code may call `tools`; with an `approver`, it is asked before those that may
    destroy something. Without an `audit`, records go to the state directory."""
    registry = ToolRegistry()
    if tools is not None:
        destructive = [tool.name for tool in tools if tool.hints.destructive]
        registry.add(tools.without(*destructive))
        registry.add(tools.only(*destructive), needs_approval=approver is not None)
    engine = pool.engine
    executor = CodeExecutor(
        registry,
        CodeConfig(output_limit_bytes=MAX_SHOWN_BYTES),
        engine=engine,
        approver=approver,
        audit=CodeAudit(engine.state_dir, engine.namespace) if audit is None else audit,
    )
    pool.on_end(executor.aclose)
    made, _ = execute_code_tools(executor, pool.get)
    return made


def _tools(pool: SandboxPool, _grants: SessionGrants) -> ToolSet:
    return code_tools(pool)


VOCABULARY = Vocabulary(
    tools=_tools,
    instructions=(
        "`execute_code` runs Python in the sandbox `default`: variables, functions and imports persist between calls, "
        "and its files are those of the other tools there."
    ),
    transcripts={"execute_code": "{code}"},
)
