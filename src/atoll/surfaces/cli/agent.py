"""`agent`: a conversation with a model that has sandboxes.

Knows what begins, ends and cancels a turn, what is asked of the person, and what is kept. Refuses to know how a turn
looks (`transcript`), how a model is driven (`agents`) and what its tools do.
"""

from __future__ import annotations

import os
import secrets
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from pydantic_ai.models import Model

from atoll.agents import models
from atoll.agents.children import Children
from atoll.agents.history import History
from atoll.agents.loop import Agent, Answer, Budget
from atoll.contract.errors import AtollError, BudgetSpent, InvalidRequest
from atoll.runtime.engine import open as open_engine
from atoll.runtime.sandbox_pool import SandboxPool
from atoll.settings import Settings
from atoll.surfaces.cli import FAILED, render, terminal, transcript
from atoll.surfaces.cli.sandboxes import SandboxOptions, options
from atoll.tools.tasks import TaskEvent, Tasks
from atoll.tools.tool import Tool
from atoll.tools.vocabularies import choose, session_tools

PROMPT_LIMIT_BYTES = 4 * 1024 * 1024
"""Of what is read from standard input: more than any model reads."""
_MARGIN = "    "


@dataclass(frozen=True)
class Asked:
    """A conversation as it was asked for, in the words of the command line."""

    prompt: str | None
    model: str | None
    tools: str
    instructions: str | None
    steps: int
    tokens: int | None
    session: str | None
    history: Path | None
    ask: bool
    as_json: bool


@dataclass(frozen=True)
class Plan:
    """A conversation that can begin: nothing has been done yet, and nothing of it is missing."""

    prompt: str | None
    """None: what is typed, turn by turn."""
    model: Model
    tools: tuple[str, ...]
    instructions: str
    steps: int
    budget: Budget
    session: str | None
    history: History
    history_file: Path | None
    ask: bool
    as_json: bool


def plan(asked: Asked, *, stdin_is_taken: bool = False) -> Plan:
    """Read all that a conversation needs.

    Raises:
        InvalidRequest: something is missing or means nothing.
    """
    if asked.steps < 1:
        raise InvalidRequest(f"--steps is {asked.steps}; a turn has at least one")
    if asked.tokens is not None and asked.tokens < 1:
        raise InvalidRequest(f"--tokens is {asked.tokens}; it must be above 0")
    if asked.ask and not _is_answerable():
        raise InvalidRequest(
            "--ask needs somebody who answers: standard input and standard error have to be a terminal; give the "
            "prompt as an argument"
        )
    chosen = choose(filter(None, map(str.strip, asked.tools.split(","))))
    instructions = _instructions(asked.instructions)
    history = _history(asked.history)
    model = models.resolve(Settings.from_environment().model if asked.model is None else asked.model)
    return Plan(
        prompt=_prompt(asked, stdin_is_taken=stdin_is_taken),
        model=model,
        tools=chosen,
        instructions=instructions,
        steps=asked.steps,
        budget=Budget(asked.tokens),
        session=asked.session,
        history=history,
        history_file=asked.history,
        ask=asked.ask,
        as_json=asked.as_json,
    )


def _is_answerable() -> bool:
    return os.isatty(terminal.STDIN) and os.isatty(terminal.STDERR) and terminal.stdin_offered()


def _prompt(asked: Asked, *, stdin_is_taken: bool) -> str | None:
    if asked.prompt is not None and asked.prompt != "-":
        if not asked.prompt.strip():
            raise InvalidRequest("the prompt is empty")
        return asked.prompt
    if asked.prompt is None and os.isatty(terminal.STDIN):
        if asked.as_json or not _is_answerable():
            raise InvalidRequest("no prompt was given; write it as an argument, or - to read it from standard input")
        return None
    if stdin_is_taken:
        raise InvalidRequest("standard input holds a secret; give the prompt as an argument")
    data = sys.stdin.buffer.read(PROMPT_LIMIT_BYTES + 1)
    if len(data) > PROMPT_LIMIT_BYTES:
        raise InvalidRequest(f"the prompt on standard input is longer than {PROMPT_LIMIT_BYTES >> 20} MiB")
    text = data.decode("utf-8", "replace")
    if not text.strip():
        raise InvalidRequest("the prompt on standard input is empty; write it as an argument, or pipe one into this")
    return text


def _instructions(word: str | None) -> str:
    if word is None or not word.startswith("@"):
        return word or ""
    try:
        return Path(word[1:]).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise InvalidRequest(f"the file with the instructions, {word[1:]}, cannot be read: {why}") from None


def _history(file: Path | None) -> History:
    if file is None:
        return History()
    directory = Path(os.path.realpath(file)).parent
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        raise InvalidRequest(f"the conversation cannot be kept in {file}: {directory} is no directory to write to")
    return History.load(file) if file.exists() else History()


# ------------------------------------------------------------------------------------------------------- conversation


async def converse(state_dir: Path | None, making: SandboxOptions, plan: Plan) -> int:
    """Hold the conversation. A session without a name ends with it, however that ends; one with a name sleeps."""
    given = options(making)
    async with open_engine(state_dir) as engine:
        with render.Bars() as bars:  # An image that cannot be had is not for the model to find out.
            await engine.images.resolve(making.image or engine.default_image, progress=bars)
        kept = plan.session is not None
        name = f"agent-{secrets.token_hex(6)}" if plan.session is None else plan.session
        async with engine.pool(name, temporary=not kept, sleeps=kept, **given) as pool:
            conversation = _Conversation(plan, pool)
            async with transcript.opened(conversation.shown):
                if plan.prompt is None:
                    return await conversation.turns()
                return await conversation.once(plan.prompt)


class _Conversation:
    def __init__(self, plan: Plan, pool: SandboxPool) -> None:
        self._plan = plan
        self._keyboard = terminal.Keyboard()
        approve = self._approve if plan.ask else None
        self._always: set[str] = set()
        self._served = False
        children = Children(plan.model, steps=plan.steps, budget=plan.budget, approve=approve)
        tools = session_tools(pool, plan.tools, tasks=Tasks(children, self._take_child))
        self.shown: transcript.Shown = (
            transcript.Lines() if plan.as_json else transcript.Screen(tools, plan.model.model_name)
        )
        self._agent = Agent(plan.model, tools, plan.instructions, steps=plan.steps, approve=approve)

    def _take_child(self, event: TaskEvent) -> None:
        self.shown.take_child(event)

    async def once(self, prompt: str) -> int:
        """One turn, and its exit status."""
        try:
            answer = await self._turn(prompt)
        except BudgetSpent as error:
            error.hint = self._going_on()
            raise
        if self._served:
            await self._keep_serving()
        return 0 if answer.ended == "done" else FAILED

    async def _keep_serving(self) -> None:
        """Who looks at the terminal wants to look at the page too. Others wait for the end."""
        if self._plan.as_json or not _is_answerable():
            render.note("ports were served until now; on a terminal they are until Ctrl-C")
            return
        render.note("ports are served until Ctrl-C")
        with terminal.interruptible():
            await anyio.sleep_forever()

    async def turns(self) -> int:
        """Turn by turn, until nothing is typed. Ctrl-C ends a turn and what runs in it; between turns it ends all."""
        await self.shown.say(render.styled(f"{self._greeting()}\n", render.DIM))
        while True:
            prompt = await self._typed()
            if not prompt.strip():
                return 0
            with terminal.interruptible() as turn:
                try:
                    await self._turn(prompt)
                except AtollError as error:
                    spent = isinstance(error, BudgetSpent)
                    if spent and self._plan.budget.is_spent:
                        render.failure(error, as_json=False, hint=self._going_on())
                        return FAILED
                    render.failure(error, as_json=False, hint="'go on' gives it as many steps again" if spent else None)
            if turn.cancelled_caught:
                await self.shown.say(render.styled("interrupted: what ran was ended\n", render.DIM))

    def _greeting(self) -> str:
        model, session = self._plan.model.model_name, self._plan.session
        stay = "end with this conversation" if session is None else f"stay, in the session {session}"
        tools = ", ".join(self._plan.tools)
        return render.printable(f"{model}, with {tools} tools. Sandboxes {stay}. An empty line ends it.")

    async def _typed(self) -> str:
        async with self.shown.aside():
            await self.shown.say("> ")
            typed = await self._keyboard.read()
            if not typed.endswith("\n"):
                await self.shown.say("\n")
            return typed

    async def _turn(self, prompt: str) -> Answer:
        began, steps, before = time.monotonic(), 0, self._plan.budget.spent
        answer = None
        try:
            await self.shown.begin()
            async with self._agent.stream(prompt, history=self._plan.history, budget=self._plan.budget) as stream:
                async for event in stream:
                    steps += event.type == "usage"
                    self._served |= event.type == "tool_result" and event.tool == "browse" and not event.result.is_error
                    await self.shown.take(event)
            answer = stream.answer
            return answer
        finally:
            try:
                self._keep()
            finally:
                spent = transcript.Spent(steps, self._plan.budget.spent - before, time.monotonic() - began)
                with anyio.move_on_after(1, shield=True):
                    await self.shown.end(answer, spent)

    def _keep(self) -> None:
        if self._plan.history_file is not None:
            self._plan.history.complete()
            self._plan.history.save(self._plan.history_file)

    def _going_on(self) -> str:
        plan = self._plan
        if plan.history_file is None:
            return "--steps and --tokens allow more; with --history FILE and --session NAME a later run can go on"
        words = ["atoll", "agent", "--history", str(plan.history_file)]
        words += ["--session", plan.session] if plan.session else []
        words += ["--tokens", "N"] if plan.budget.is_spent else []
        return f"go on with: {shlex.join([*words, 'go on'])}"

    # --------------------------------------------------------------------------------------------------- asking

    async def _approve(self, tool: Tool, arguments: dict[str, Any]) -> bool:
        """Ask whether a call may be made. Whatever is not a yes is a no."""
        async with self.shown.aside():
            if tool.name in self._always:
                return True
            self._keyboard.forget()  # What was typed before the question is no answer to it.
            await self.shown.say(_question(tool, arguments, *terminal.terminal_size()))
            typed = await self._keyboard.read()
            if not typed.endswith("\n"):
                await self.shown.say("\n")
            answer = typed.strip().lower()
            if answer in {"a", "always"}:
                self._always.add(tool.name)
            return answer in {"y", "yes", "a", "always"}


def _question(tool: Tool, arguments: dict[str, Any], rows: int, columns: int) -> str:
    """All that is going to be done, and not a part of it: the rest may be what matters.

    What the model wrote stands behind a margin, however long its lines are: none of them looks like one of ours.
    """
    lines = [f"The model wants to call {tool.name}:"]
    for name, value in arguments.items():
        text = value if isinstance(value, str) else repr(value)
        first, *rest = _folded(render.printable(text.expandtabs(4), lines=True), columns - len(_MARGIN))
        called = f"  {render.printable(name)}:"
        if rest or render.columns_of(called + first) >= columns:
            lines += [*(f"  {part}" for part in _folded(called.strip(), columns - 2)), f"{_MARGIN}{first}"]
        else:
            lines.append(f"{called} {first}")
        lines += [f"{_MARGIN}{line}" for line in rest]
    if len(lines) >= rows:
        lines.append(f"These are {len(lines):,} lines, more than are in sight.")
    return "\n".join(lines) + f"\nMay it? [y]es, [N]o, [a]lways for {tool.name}: "


def _folded(text: str, columns: int) -> list[str]:
    """The lines of `text`, in pieces that fit."""
    found: list[str] = []
    for line in text.split("\n"):
        room = max(columns if line.isascii() else columns // 2, 1)  # some letters take two columns
        found += [line[at : at + room] for at in range(0, len(line), room)] or [""]
    return found
