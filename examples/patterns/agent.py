"""A model that works in a sandbox which lasts, and begins again when its task changes.

    atoll pattern run examples/patterns/agent.py --set task='Which Python is installed?'

Without a key the model is scripted (`agent.toml`). With ANTHROPIC_API_KEY it is Claude, and ATOLL_MODEL selects any
other model.
"""

from __future__ import annotations

import os
from pathlib import Path

import atoll
from atoll import reactive
from atoll.reactive import NAME, UI, Cell, view

TASK = "Which Python is installed in the sandbox?"


def choose_model() -> str:
    if "ATOLL_MODEL" in os.environ or "ANTHROPIC_API_KEY" in os.environ:
        return atoll.Settings.from_environment().model
    return f"script:{Path(__file__).with_suffix('.toml')}"


@reactive.pattern(task=TASK)
def agent(task: Cell[str]) -> dict[str, object]:
    """The answer of a model to a task."""
    box = reactive.sandbox(name="sandbox")
    answer = reactive.generate_text(task, box.tools(), choose_model(), name="answer")
    return {
        NAME: "Agent",
        UI: view.column(
            view.input(task, label="task", multiline=True),
            view.loader(answer, label="thinking"),
            lambda: view.pre(answer.output) if answer.pending else view.text(answer.result),
        ),
        "answer": answer,
    }
