"""The examples of docs/server.md for what happens inside a sandbox run, against a server."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from types import CodeType

import anyio
import anyio.to_thread
import httpx2
import pytest

from tests.rest.serving import Served

TEXT = (Path(__file__).parents[2] / "docs/server.md").read_text()
INSIDE = re.split(r"^## ", TEXT.partition("\n## Inside a sandbox\n")[2], flags=re.MULTILINE)[0]
SECTIONS = dict(zip(*[iter(re.split(r"^### (.*)$", INSIDE, flags=re.MULTILINE)[1:])] * 2, strict=True))


@pytest.fixture
async def demo(client: httpx2.AsyncClient) -> AsyncIterator[None]:
    """The sandbox that the page names."""
    (await client.post("/api/v1/sandboxes", json={"name": "demo"})).raise_for_status()
    yield
    (await client.delete("/api/v1/sandboxes/demo")).raise_for_status()


@pytest.mark.usefixtures("demo")
@pytest.mark.parametrize("section", SECTIONS)
async def test_the_examples_run(served: Served, section: str) -> None:
    (given,) = re.findall(r"```sh\n(.*?)```", INSIDE.partition("\n### ")[0], flags=re.DOTALL)
    if shell := re.findall(r"```sh\n(.*?)```", SECTIONS[section], flags=re.DOTALL):
        script = "set -euo pipefail\n" + given + "\n".join(shell)
        done = await anyio.to_thread.run_sync(
            lambda: subprocess.run(
                ["bash", "-c", script],
                env={"PATH": "/usr/bin:/bin", "URL": served.url, "KEY": served.key},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for snippet in re.findall(r"```python\n(.*?)```", SECTIONS[section], flags=re.DOTALL):
        code = compile(snippet, section, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        assert isinstance(code, CodeType)
        running = eval(code, {"url": served.url, "key": served.key})
        if inspect.iscoroutine(running):
            with anyio.fail_after(30):
                await running
