"""Integrations without their frameworks. With them: `tests/foreign/`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"


@pytest.mark.parametrize(
    ("module", "framework", "extra"),
    [
        ("deepagents", "deepagents", "deepagents"),
        ("harbor", "harbor", "harbor"),
        ("inspect_ai", "inspect_ai", "inspect"),
        ("openai_agents", "agents", "openai-agents"),
        ("pydantic_ai", "pydantic_ai", "pydantic-ai"),
    ],
)
def test_a_framework_that_is_missing_is_named_with_the_extra_that_has_it(module, framework, extra):
    program = f"import sys; sys.modules[{framework!r}] = None; import atoll.integrations.{module}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert f"needs {framework}, which is not installed" in last
    assert f"atoll[{extra}]" in last


@pytest.mark.parametrize("package", ["httpx2", "websockets"])
def test_a_server_without_the_extra_client_is_refused_with_the_extra(package):
    program = f"import sys; sys.modules[{package!r}] = None; import atoll; atoll.connect"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert f"needs {package}, which is not installed" in last
    assert "atoll[client]" in last


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_does_not_hide_a_package_that_it_imports(example):
    """`python examples/integrations/NAME.py` looks for modules beside the example first."""
    tree = ast.parse(example.read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    names |= {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
    beside = {path.stem for path in EXAMPLES.iterdir()}
    assert {name.partition(".")[0] for name in names}.isdisjoint(beside)
