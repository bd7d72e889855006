"""A conversation with a model that works in sandboxes: `atoll agent`.

Owns what begins, ends and cancels a turn, the questions to the user, and what is saved. Not here: the arguments
(`commands/agent.py`, which uses this), how a turn looks (`transcript.py`), how a model is called (`agents/`),
what its tools do (`tools/`).
"""

from __future__ import annotations

import os
import secrets
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from pydantic_ai.models import Model

from atoll.agents import models
from atoll.agents.children import Children
from atoll.agents.history import History
from atoll.agents.loop import Agent, Answer, Budget
from atoll.code.approvals import ApprovalRequest, AskingApprover
from atoll.code.audit import CodeAudit
from atoll.code.results import CallRecord, ExecutionResult
from atoll.code.vocabulary import code_tools
from atoll.contract.errors import AtollError, BudgetExceeded, InvalidRequest
from atoll.contract.names import TEMPLATE_PREFIX
from atoll.runtime.sandbox_pool import SandboxPool
from atoll.settings import Settings
from atoll.surfaces.cli import FAILED, render, terminal, transcript
from atoll.surfaces.cli.project_review import ProjectOptions, ProjectReview, project_options
from atoll.surfaces.cli.sandbox_options import SandboxOptions, engine_arguments
from atoll.tools.briefing import briefing
from atoll.tools.tasks import TaskEvent, Tasks
from atoll.tools.tool import Tool
from atoll.tools.vocabularies import choose, session_tools

if TYPE_CHECKING:
    from atoll.runtime.interface import Engine

MAX_PROMPT_BYTES = 4 * 1024 * 1024
"""Limit of a prompt on standard input: more than any model reads."""
_MARGIN = "    "
_PREAMBLE = (
    "You work for a user with the tools that you are given. Do the work rather than describe it, check what you did, "
    "and say plainly what you did not do or what failed."
)
"""How the system prompt begins. What follows describes the sandboxes."""


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """A conversation as the command line describes it."""

    prompt: str | None
    model: str | None
    tools: str
    code: bool
    instructions: str | None
    system: str | None
    steps: int
    tokens: int | None
    session: str | None
    history: Path | None
    ask: bool
    as_json: bool
    here: Path | None
    apply: bool
    no_apply: bool
    patch: Path | None


@dataclass(frozen=True)
class ConversationPlan:
    """A conversation that can begin: all input has been read and checked, and nothing has been started."""

    prompt: str | None
    """None: the user types one for each turn."""
    model: Model
    tools: tuple[str, ...]
    """Vocabularies."""
    code: bool
    """Whether code may call their tools."""
    instructions: str
    """What is added to the system prompt."""
    system: str | None
    """The system prompt. None: the default one, which describes the sandboxes."""
    steps: int
    budget: Budget
    session: str | None
    history: History
    history_file: Path | None
    ask: bool
    as_json: bool
    project: ProjectOptions | None
    """The directory that the conversation is about. None: there is none."""


def plan(options: AgentOptions, *, stdin_is_taken: bool = False) -> ConversationPlan:
    """Read and check all that a conversation needs.

    Raises:
        InvalidRequest: an option is missing or has a wrong value.
    """
    if options.steps < 1:
        raise InvalidRequest(f"--steps is {options.steps}; it must be at least 1")
    if options.tokens is not None and options.tokens < 1:
        raise InvalidRequest(f"--tokens is {options.tokens}; it must be at least 1")
    if options.ask and not _is_answerable():
        raise InvalidRequest(
            "--ask needs a terminal on standard input and standard error; give the prompt as an argument"
        )
    settings = Settings.from_environment()
    project = project_options(
        options.here,
        apply=options.apply,
        no_apply=options.no_apply,
        patch=options.patch,
        limit_bytes=settings.project_mib << 20,
        limit_files=settings.project_files,
    )
    names = [name for name in map(str.strip, options.tools.split(",")) if name]
    chosen = choose([*names, "code"] if options.code else names)
    instructions = _text(options.instructions, "instructions") or ""
    system = _text(options.system, "system prompt")
    history = _history(options.history)
    model = models.resolve(settings.model if options.model is None else options.model)
    return ConversationPlan(
        prompt=_prompt(options, stdin_is_taken=stdin_is_taken),
        model=model,
        tools=chosen,
        code=options.code,
        instructions=instructions,
        system=system,
        steps=options.steps,
        budget=Budget(options.tokens),
        session=options.session,
        history=history,
        history_file=options.history,
        ask=options.ask,
        as_json=options.as_json,
        project=project,
    )


def _is_answerable() -> bool:
    return os.isatty(terminal.STDIN) and os.isatty(terminal.STDERR) and terminal.stdin_offered()


def _prompt(options: AgentOptions, *, stdin_is_taken: bool) -> str | None:
    if options.prompt is not None and options.prompt != "-":
        if not options.prompt.strip():
            raise InvalidRequest("the prompt is empty")
        return options.prompt
    if options.prompt is None and os.isatty(terminal.STDIN):
        if options.as_json or not _is_answerable():
            raise InvalidRequest("no prompt was given; give it as an argument, or - to read it from standard input")
        return None
    if stdin_is_taken:
        raise InvalidRequest(
            "the prompt cannot be read from standard input, which holds a secret; give it as an argument"
        )
    data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(data) > MAX_PROMPT_BYTES:
        raise InvalidRequest(f"the prompt on standard input is longer than {MAX_PROMPT_BYTES >> 20} MiB")
    text = data.decode("utf-8", "replace")
    if not text.strip():
        raise InvalidRequest(
            "the prompt on standard input is empty; give it as an argument, or pipe one into this command"
        )
    return text


def _text(word: str | None, what: str) -> str | None:
    if word is None or not word.startswith("@"):
        return word
    try:
        return Path(word[1:]).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise InvalidRequest(f"cannot read the {what} from {word[1:]}: {why}") from None


def _history(file: Path | None) -> History:
    if file is None:
        return History()
    directory = Path(os.path.realpath(file)).parent
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        raise InvalidRequest(f"cannot save the conversation in {file}: {directory} is not a writable directory")
    return History.load(file) if file.exists() else History()


# ------------------------------------------------------------------------------------------------------- conversation


async def converse(
    opening: Callable[[], AbstractAsyncContextManager[Engine]], sandbox: SandboxOptions, plan: ConversationPlan
) -> int:
    """Hold the conversation. A session without a name ends with it, however that ends; one with a name sleeps."""
    arguments = engine_arguments(sandbox)
    async with opening() as engine:
        with render.ProgressBars() as bars:  # A missing image is an error now, not one that the model meets later.
            image = sandbox.image or engine.default_image
            if image.startswith(TEMPLATE_PREFIX):
                await engine.templates.version(image)
            else:
                await engine.images.resolve(image, progress=bars)
        kept = plan.session is not None
        name = f"agent-{secrets.token_hex(6)}" if plan.session is None else plan.session
        project = None if plan.project is None else plan.project.project
        async with engine.pool(name, temporary=not kept, sleeps=kept, project=project, **arguments) as pool:
            await pool.check()
            if project is not None:
                await pool.bring_project()
            about = briefing(
                await pool.describe(), plan.tools, kept=kept, until="conversation", brings_back=project is not None
            )
            conversation = _AgentConversation(plan, pool, about)
            async with transcript.opened(conversation.display):
                if plan.project is None:
                    return await conversation.hold()
                return await _reviewed(conversation, conversation.review(pool, plan.project))


async def _reviewed(conversation: _AgentConversation, review: ProjectReview) -> int:
    """Hold a conversation about a project. However it ends, what was done in it is not lost."""
    try:
        status = await conversation.hold()
    except AtollError as error:
        render.failure(error, as_json=conversation.as_json)
        status = FAILED
    except BaseException:
        await review.rescue()
        raise
    try:
        await review.finish()
    except anyio.get_cancelled_exc_class():
        render.end_line()
        await review.rescue()
        raise
    return status


class _AgentConversation:
    def __init__(self, plan: ConversationPlan, pool: SandboxPool, about: str) -> None:
        self._plan = plan
        self.as_json: bool = plan.as_json
        self._keyboard = terminal.Keyboard()
        approve = self._approve if plan.ask else None
        self._always: set[str] = set()
        self._served = False
        children = Children(plan.model, steps=plan.steps, budget=plan.budget, approve=approve, briefing=about)
        tasks = Tasks(children, self._take_child)
        if plan.code:
            callable_tools = session_tools(pool, [name for name in plan.tools if name != "code"], tasks=tasks)
            audit = _ToldAudit(CodeAudit(pool.engine.state_dir, pool.engine.namespace), self._take_call)
            asking = AskingApprover(self._approve_in_code) if plan.ask else None
            tools = callable_tools | code_tools(pool, callable_tools, approver=asking, audit=audit)
        else:
            tools = session_tools(pool, plan.tools, tasks=tasks)
        self._tools = tools
        self.display: transcript.Display = (
            transcript.JsonLines() if plan.as_json else transcript.Screen(tools, plan.model.model_name)
        )
        system = f"{_PREAMBLE} {about}" if plan.system is None else plan.system
        instructions = "\n\n".join(filter(None, (system, plan.instructions)))
        self._agent = Agent(plan.model, tools, instructions, steps=plan.steps, approve=approve)

    async def hold(self) -> int:
        """The whole conversation, and its exit status."""
        return await self.turns() if self._plan.prompt is None else await self.once(self._plan.prompt)

    def review(self, pool: SandboxPool, options: ProjectOptions) -> ProjectReview:
        """What becomes of the changes in a copy of the user's project at the end."""
        can_ask = _is_answerable() and not self._plan.as_json
        return ProjectReview(pool, options, self.display, self._confirm if can_ask else None)

    def _take_child(self, event: TaskEvent) -> None:
        self.display.take_child(event)

    def _take_call(self, call: CallRecord) -> None:
        self.display.take_call(call)

    async def once(self, prompt: str) -> int:
        """One turn, and its exit status."""
        try:
            answer = await self._turn(prompt)
        except BudgetExceeded as error:
            error.hint = self._going_on()
            raise
        if self._served:
            await self._keep_serving()
        return 0 if answer.ended == "done" else FAILED

    async def _keep_serving(self) -> None:
        """On a terminal, serve ports until Ctrl-C: the user wants to look at the page. A program waits for the end."""
        if self._plan.as_json or not _is_answerable():
            render.note("ports are no longer served; on a terminal they are served until Ctrl-C")
            return
        render.note("ports are served until Ctrl-C")
        with terminal.interruptible():
            await anyio.sleep_forever()
        render.end_line()

    async def turns(self) -> int:
        """Turn by turn, until an empty line. Ctrl-C ends a turn and what runs in it; between turns it ends all."""
        self._keyboard.forget()  # What was typed while it started is not a prompt.
        await self.display.say(render.styled(f"{self._greeting()}\n", render.DIM))
        while True:
            prompt = await self._typed()
            if not prompt.strip():
                return 0
            with terminal.interruptible() as turn:
                try:
                    await self._turn(prompt)
                except AtollError as error:
                    spent = isinstance(error, BudgetExceeded)
                    if spent and self._plan.budget.is_spent:
                        render.failure(error, as_json=False, hint=self._going_on())
                        return FAILED
                    render.failure(error, as_json=False, hint="type 'go on' for as many steps again" if spent else None)
            if turn.cancelled_caught:
                await self.display.say(render.styled("interrupted; what ran was ended\n", render.DIM))

    def _greeting(self) -> str:
        model, session = self._plan.model.model_name, self._plan.session
        stay = "end with this conversation" if session is None else f"are kept in session {session}"
        tools = ", ".join(self._plan.tools)
        return render.printable(f"{model}, with {tools} tools. Sandboxes {stay}. An empty line ends the conversation.")

    async def _typed(self) -> str:
        async with self.display.aside():
            await self.display.say("> ")
            typed = await self._keyboard.read()
            if not typed.endswith("\n"):
                await self.display.say("\n")
            return typed

    async def _turn(self, prompt: str) -> Answer:
        began, steps, before = time.monotonic(), 0, self._plan.budget.spent
        answer = None
        try:
            await self.display.begin()
            async with self._agent.stream(prompt, history=self._plan.history, budget=self._plan.budget) as stream:
                async for event in stream:
                    steps += event.type == "usage"
                    self._served |= event.type == "tool_result" and event.tool == "browse" and not event.result.is_error
                    await self.display.take(event)
            answer = stream.answer
            return answer
        finally:
            try:
                self._keep()
            finally:
                spent = transcript.TurnUsage(steps, self._plan.budget.spent - before, time.monotonic() - began)
                with anyio.move_on_after(1, shield=True):
                    await self.display.end(answer, spent)

    def _keep(self) -> None:
        if self._plan.history_file is not None:
            self._plan.history.complete()
            self._plan.history.save(self._plan.history_file)

    def _going_on(self) -> str:
        plan = self._plan
        if plan.history_file is None:
            return "--steps and --tokens allow more; with --history FILE and --session NAME a later run can continue"
        words = ["atoll", "agent", "--history", str(plan.history_file)]
        words += ["--session", plan.session] if plan.session else []
        words += ["--tokens", "N"] if plan.budget.is_spent else []
        return f"continue with: {shlex.join([*words, 'go on'])}"

    # --------------------------------------------------------------------------------------------------- asking

    async def _confirm(self, question: str) -> bool:
        """Ask until the answer is yes or no. No answer is no."""
        async with self.display.aside():
            self._keyboard.forget()  # What was typed before the question is not an answer to it.
            while True:
                await self.display.say(f"{question} [y]es, [N]o: ")
                answer = await self._answer()
                if answer in _ANSWERS and answer not in _ALWAYS:
                    return _ANSWERS[answer]

    async def _answer(self) -> str:
        typed = await self._keyboard.read()
        if not typed.endswith("\n"):
            await self.display.say("\n")
        return typed.strip().lower()

    async def _approve_in_code(self, request: ApprovalRequest) -> bool:
        return await self._approve(self._tools[request.tool], dict(request.arguments), who="The model's code")

    async def _approve(self, tool: Tool, arguments: dict[str, Any], who: str = "The model") -> bool:
        """Ask whether a call may be made, until the answer is yes or no. No answer is no."""
        async with self.display.aside():
            if tool.name in self._always:
                return True
            self._keyboard.forget()  # What was typed before the question is not an answer to it.
            await self.display.say(_question(tool, arguments, *terminal.terminal_size(), who=who))
            while True:
                answer = await self._answer()
                if answer in _ALWAYS:
                    self._always.add(tool.name)
                if answer in _ANSWERS:
                    return _ANSWERS[answer]
                await self.display.say(f"Answer y, n or a. {_choices(tool)}")


class _ToldAudit:
    """Records executions and calls, and tells of the calls."""

    def __init__(self, audit: CodeAudit, on_call: Callable[[CallRecord], None]) -> None:
        self._audit = audit
        self._on_call = on_call

    def execution(self, session_id: str, cell: int, code: str, result: ExecutionResult) -> None:
        self._audit.execution(session_id, cell, code, result)

    def call(self, session_id: str, cell: int, record: CallRecord) -> None:
        self._audit.call(session_id, cell, record)
        self._on_call(record)


def _question(tool: Tool, arguments: dict[str, Any], rows: int, columns: int, who: str = "The model") -> str:
    """The question, with the whole call: the part that is left out may be what matters.

    What the model wrote is indented, however long its lines are, so that no line of it looks like one of ours.
    """
    lines = [f"{who} wants to call {tool.name}:"]
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
        lines.append(f"These are {len(lines):,} lines, more than the terminal shows.")
    return "\n".join(lines) + f"\n{_choices(tool)}"


def _choices(tool: Tool) -> str:
    return f"May it? [y]es, [N]o, [a]lways for {tool.name}: "


_ALWAYS = frozenset({"a", "always"})
_ANSWERS = {"y": True, "yes": True, "a": True, "always": True, "n": False, "no": False, "": False}


def _folded(text: str, columns: int) -> list[str]:
    """The lines of `text`, in pieces that fit."""
    found: list[str] = []
    for line in text.split("\n"):
        room = max(columns if line.isascii() else columns // 2, 1)  # some letters take two columns
        found += [line[at : at + room] for at in range(0, len(line), room)] or [""]
    return found
