"""Programs that are started beside sandboxes: what they find in their environment."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

import atoll
from atoll.settings import program_environment

_STARTING = {"anyio.open_process", "anyio.run_process", "subprocess.Popen", "subprocess.run"}


def test_a_program_has_our_environment_without_what_is_ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_SECRETS_KEY", "k" * 32)
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.test/simple")
    done = subprocess.run(["env"], capture_output=True, text=True, env=program_environment(), check=True)
    assert "PIP_INDEX_URL=https://index.test/simple" in done.stdout.splitlines()
    assert "ATOLL_" not in done.stdout


def test_no_program_is_started_with_all_of_our_environment() -> None:
    root = Path(atoll.__file__).parent
    started, wrong = 0, []
    for file in set(root.rglob("*.py")) - set((root / "testing").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in _STARTING:
                started += 1
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if given.get("env", "None") in ("None", "os.environ"):
                    wrong.append(f"{file.relative_to(root)}:{node.lineno}")
    assert started >= 8
    assert wrong == []
