"""Runs Python, and again when the code changes.

atoll pattern run examples/patterns/python_runner.py --set code='print(6 * 7)'
"""

from __future__ import annotations

from atoll import reactive
from atoll.reactive import NAME, UI, Cell, view

EXAMPLE = """\
import sys
print("hello from Python", sys.version.split()[0])
"""


@reactive.pattern(code=EXAMPLE)
def python_runner(code: Cell[str]) -> dict[str, object]:
    """The output of a Python program."""
    run = reactive.exec("python3 -", stdin=code, name="run")
    return {
        NAME: "Python Runner",
        UI: view.column(
            view.input(code, label="code", multiline=True),
            view.loader(run, label="running"),
            lambda: view.pre(run.output if run.pending else run.result.stdout),
            lambda: view.pre(run.result.stderr, error=True) if run.result.stderr else None,
        ),
        "run": run,
    }
