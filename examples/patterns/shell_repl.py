"""A shell in a sandbox that lasts: every command sees what the earlier ones did.

    atoll pattern run examples/patterns/shell_repl.py

The image goes with the language. Here both are this machine's own; with a registry at hand, write the names of images
that have the language, and the sandbox moves between them with its files.
"""

from __future__ import annotations

from atoll import reactive
from atoll.reactive import NAME, UI, Cell, CommandResult, view

IMAGES = {"python": "host", "node": "host"}


@reactive.pattern(language="python")
def shell_repl(language: Cell[str]) -> dict[str, object]:
    """What was entered, and what came of it."""
    box = reactive.sandbox(reactive.computed(lambda: IMAGES[language.get()], name="image"), name="sandbox")
    history: Cell[list[tuple[str, CommandResult]]] = reactive.cell([], name="history")

    @reactive.handler
    async def run(command: str) -> CommandResult:
        result = await box.exec(command)
        history.update(lambda before: [*before, (command, result)])
        return result

    return {
        NAME: "Shell",
        UI: view.column(
            view.select(language, list(IMAGES), label="language"),
            lambda: [
                [
                    view.pre(f"$ {command}\n{result.stdout}"),
                    view.pre(result.stderr, error=True) if result.stderr else None,
                ]
                for command, result in history.get()
            ],
            view.loader(run, label="running"),
            view.input(run, placeholder="$ "),
        ),
        "history": reactive.computed(lambda: [result for _, result in history.get()]),
        "run": run,
    }
