"""The page about E2B runs, and its calls are those that the surface has."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/e2b.md").read_text()


def test_the_programs_of_the_page_run() -> None:
    programs = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert programs
    for program in programs:
        exec(compile(program, "docs/e2b.md", "exec"), {})
