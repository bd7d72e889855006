"""The MCP Inspector's command line lists and calls every tool, over standard streams, and some over HTTP.

Node starts anew for each command. So the Inspector's `--cli` lists them and judges their schemas; all are
called by its `mcpdo`, whose daemon keeps one connection for many commands.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from atoll import Engine
from atoll.testing.plugin import STRICT
from atoll.testing.waiting import BOUND_S
from tests.mcp.serving import CHOICES, WALK, Program, listening, names

HERE = Path(__file__).parent
CPU = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
INSTALL_S = 400
pytestmark = pytest.mark.timeout(INSTALL_S + 100)


@pytest.fixture(scope="session")
def packages(pytestconfig: pytest.Config) -> Path:
    """The Inspector, and a Node that is new enough for it: installed once, and found by later runs."""
    lock = (HERE / "package-lock.json").read_bytes()
    if (cache := getattr(pytestconfig, "cache", None)) is None:
        (pytest.fail if STRICT else pytest.skip)("there is nowhere to keep what npm installs: pytest has no cache")
    root: Path = cache.mkdir(f"inspector-{hashlib.sha256(lock).hexdigest()[:12]}")
    if not (root / "whole").exists():
        _install(root)
    return root / "node_modules"


def _install(root: Path) -> None:
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name, root)
    # Not `ci`: some npms call a lock incomplete that does not name the parts for machines of other kinds.
    command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
    try:
        subprocess.run(command, cwd=root, check=True, capture_output=True, text=True, timeout=INSTALL_S)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", "") or "")[-2000:]
        (pytest.fail if STRICT else pytest.skip)(f"npm could not install the MCP Inspector: {error}\n{said}")
    (root / "whole").touch()


class Inspector:
    """Its command line, with a home of its own."""

    def __init__(self, packages: Path, home: Path, config: Path) -> None:
        self._node = packages / f"node-linux-{CPU}" / "bin" / "node"
        self._clients = packages / "@modelcontextprotocol" / "inspector" / "clients"
        self._config = config
        self._env = {
            **os.environ,
            "HOME": str(home),
            "NODE_COMPILE_CACHE": str(packages.parent / "compiled"),
            "MCP_INSPECTOR_SECRET_STORE": "memory",
        }

    async def cli(self, *arguments: str) -> Any:
        """One connection, one request."""
        where = ["--cli", "--config", str(self._config), "--server", "atoll", "--quiet"]
        return await self._run("launcher/build/index.js", *where, *arguments)

    async def do(self, *arguments: str) -> Any:
        """A request on the connection that is open, or something about it."""
        return await self._run("mcpdo/build/mcp-bin.js", "--format", "json", *arguments)

    async def _run(self, script: str, *arguments: str) -> Any:
        command = [str(self._node), str(self._clients / script), *arguments]
        with anyio.fail_after(BOUND_S):
            done = await anyio.run_process(command, env=self._env, check=False)
        assert done.returncode == 0, (arguments, done.returncode, done.stdout.decode(), done.stderr.decode())
        return json.loads(done.stdout)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        await self.do("connect", "atoll", "--config", str(self._config))
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await self.do("disconnect", "atoll")
                await self.do("daemon", "stop")


@pytest.fixture
def home() -> Iterator[Path]:
    """Near the root: there is a socket in it, whose name may not be long."""
    with tempfile.TemporaryDirectory(prefix="inspector-") as path:
        yield Path(path)


# Over HTTP it is about the transport, which does not know tools: test_every_tool.py calls all of them there.
@pytest.mark.parametrize(("transport", "tools"), [*(("stdio", each) for each in CHOICES), ("http", "coding")])
async def test_the_inspector_lists_and_calls_every_tool(
    packages: Path, host: Engine, program: Program, home: Path, transport: str, tools: str
) -> None:
    config = home / "mcp.json"
    inspector = Inspector(packages, home, config)
    async with listening(host, tools) as url:
        server: dict[str, Any] = {"type": "streamable-http", "url": url}
        if transport == "stdio":
            server = {
                "command": program.words[0],
                "args": [*program.words[1:], "--tools", tools],
                "env": {"ATOLL_STATE_DIR": str(host.state_dir)},
            }
        config.write_text(json.dumps({"mcpServers": {"atoll": server}}))
        listed = await inspector.cli("--method", "tools/list", "--strict")
        assert {tool["name"] for tool in listed["tools"]} == names(tools)
        async with inspector.connected():
            for step in WALK[tools]:
                result = await inspector.do("@atoll", "tools/call", step.tool, json.dumps(step.arguments))
                assert result["isError"] is False
                assert step.says in result["content"][0]["text"]
            (template,) = (await inspector.do("@atoll", "resources/templates/list"))["resourceTemplates"]
            assert template["uriTemplate"] == "sandbox://{sandbox}/{+path}"
