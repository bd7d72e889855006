"""The TypeScript client: its generated sources are current; its README's example and its own tests run with Node,
against a running server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.testing.plugin import STRICT
from atoll.testing.server import RunningServer, running_server

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "clients" / "typescript"
OLDEST_NODE = 20


def run(*command: str | Path, cwd: Path = CLIENT, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def missing() -> str | None:
    if shutil.which("node") is None:
        return "Node is not on this machine"
    if int(run("node", "--version").strip("v\n").split(".")[0]) < OLDEST_NODE:
        return f"the client needs Node {OLDEST_NODE}"
    return None if (CLIENT / "node_modules").exists() else "its packages are not installed (scripts/bootstrap test)"


@pytest.fixture(scope="module", autouse=True)
def node() -> None:
    if (reason := missing()) is not None:
        if STRICT:
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


@pytest.fixture(scope="module")
def built() -> None:
    run("node", "node_modules/typescript/bin/tsc")


@pytest.fixture(scope="module")
def server(make_state_dir: Callable[[], Path]) -> Iterator[RunningServer]:
    with running_server(make_state_dir()) as server:
        yield server


def test_its_generated_sources_are_current() -> None:
    run(sys.executable, ROOT / "scripts" / "typescript_client.py", "--check")


@pytest.mark.usefixtures("built")
def test_a_program_of_node_can_do_all_of_it(server: RunningServer) -> None:
    flags = () if run("node", "-p", "typeof WebSocket").strip() == "function" else ("--experimental-websocket",)
    run("node", *flags, "--test", "test/", ATOLL_URL=server.url, ATOLL_API_KEY=server.key)


@pytest.mark.usefixtures("built")
def test_the_example_of_its_readme_compiles_and_runs(server: RunningServer, tmp_path: Path) -> None:
    [example] = re.findall(r"```ts\n(.*?)```", (CLIENT / "README.md").read_text(), flags=re.DOTALL)
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "atoll-client").symlink_to(CLIENT)
    (tmp_path / "package.json").write_text(json.dumps({"type": "module"}))
    (tmp_path / "node.d.ts").write_text("declare const process: { env: Record<string, string | undefined> };")
    (tmp_path / "example.ts").write_text(example)
    options = {"target": "ES2022", "module": "NodeNext", "strict": True, "types": [], "skipLibCheck": True}
    (tmp_path / "tsconfig.json").write_text(json.dumps({"compilerOptions": options}))
    run("node", CLIENT / "node_modules" / "typescript" / "bin" / "tsc", cwd=tmp_path)
    said = run("node", "example.js", cwd=tmp_path, ATOLL_URL=server.url, ATOLL_API_KEY=server.key)
    assert said.split() == ["0", "hello", "1", "2", "3", "hello", "404", "sandbox_not_found"]
