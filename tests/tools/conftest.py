"""A pool and its tools for each module, and the proof that every field of every schema does something.

A test says with `@pytest.mark.proves("shell.timeout_ms", "shell->exit_code")` which fields of the input and of the
result it is about. That it has really sent and received them is checked here; that no field of any vocabulary lacks
such a test, in `test_promises.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from atoll import Engine
    from atoll.runtime.sandbox_pool import SandboxPool
    from atoll.tools.tool import ToolResult, ToolSet


@pytest.fixture(scope="module")
async def pool(host: Engine) -> AsyncIterator[SandboxPool]:
    """One session for all tests of a module."""
    async with host.pool("tools") as pool:
        yield pool
        await pool.aclose()
        for checkpoint in await host.checkpoints():
            await host.delete_checkpoint(checkpoint.id)


class Caller:
    """Calls tools, checks what comes back against the schemas, and remembers which fields went in and out."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    async def __call__(self, tools: ToolSet, name: str, /, **arguments: Any) -> dict[str, Any]:
        """The data of a call that went well."""
        result = await self.raw(tools, name, **arguments)
        assert not result.is_error, result.text
        assert result.structured is not None
        return result.structured

    async def error(self, tools: ToolSet, name: str, /, **arguments: Any) -> str:
        """What was said of a call that did not."""
        result = await self.raw(tools, name, **arguments)
        assert result.is_error, result.text
        assert "Traceback" not in result.text
        assert result.structured is not None
        assert result.structured["error"]["code"] != "internal", result.text
        return result.text

    async def raw(self, tools: ToolSet, name: str, /, **arguments: Any) -> ToolResult:
        result = await tools.handle_tool_call(name, arguments)
        self.seen |= {f"{name}.{field}" for field in arguments}
        model = tools[name].result
        if not result.is_error and model is not None:
            model.model_validate(result.structured)
            self.seen |= {f"{name}->{field}" for field in _fields(result.structured or {})}
        return result


def _fields(data: dict[str, Any]) -> Iterator[str]:
    """The fields of a result, and `list.field` of those in its lists."""
    for name, value in data.items():
        yield name
        if isinstance(value, list):
            yield from {f"{name}.{inner}" for item in value if isinstance(item, dict) for inner in item}


@pytest.fixture
def call(request: pytest.FixtureRequest) -> Iterator[Caller]:
    caller = Caller()
    yield caller
    mark = request.node.get_closest_marker("proves")
    missing = set(mark.args if mark else ()) - caller.seen
    assert not missing, f"the test says that it proves {sorted(missing)}, and did not use them"
