"""Integrations without their frameworks. With them: `tests/foreign/`."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "framework", "extra"),
    [("inspect_ai", "inspect_ai", "inspect"), ("pydantic_ai", "pydantic_ai", "pydantic-ai")],
)
def test_a_framework_that_is_missing_is_named_with_the_extra_that_has_it(module, framework, extra):
    program = f"import sys; sys.modules[{framework!r}] = None; import atoll.integrations.{module}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert f"needs {framework}, which is not installed" in last
    assert f"atoll[{extra}]" in last
