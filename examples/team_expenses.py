"""Questions about team expenses, by direct and by programmatic tool calling, and what the second one saves.

    python -m examples.team_expenses                # the same questions both ways, and a table of turns and tokens
    python -m examples.team_expenses -i             # ask; each question has a session of its own
    python -m examples.team_expenses -s             # three questions in one session, whose variables stay (also: -i -s)
    python -m examples.team_expenses --low-level    # CodeExecutor alone, without a model
    python -m examples.team_expenses --approval     # calls that wait until you allow them
    python -m examples.team_expenses --chart        # a chart that comes back, written to a file

Without a key the model is scripted (`team_expenses.toml`, `team_expenses_direct.toml`); everything else is real. With
ANTHROPIC_API_KEY it is Claude; ATOLL_MODEL or `--model` selects any other model.
"""

from __future__ import annotations

import argparse
import base64
import json
import logging
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from examples.team_expense_api import Company, registry
from examples.workflow import line
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart, ToolReturnPart, UserPromptPart
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

import atoll
from atoll import TextEvent, ToolCallEvent, ToolResultEvent, UsageEvent

SCRIPT = Path(__file__).with_suffix(".toml")
DIRECT_SCRIPT = SCRIPT.with_name("team_expenses_direct.toml")
INSTRUCTIONS = "You answer questions about the expenses of a company in 2025. Only approved expenses count. Be brief."
QUESTION = "Which engineers went over their travel budget in Q3, and by how much?"
SMALL_QUESTION = "What is the travel budget of a senior?"
FOLLOW_UPS = (
    "Which three most expensive trips or stays were among those?",
    "What is the share of each category in what engineering spent in Q3?",
)
RAISE = "Raise the travel budget of Farid (eng-06) and of Elif (eng-05) by what they are over: 3174.57 and 854.90."
DRAW = "Draw a bar chart of what each engineer spent on travel and lodging in Q3: an object with `_repr_svg_`."
CHARS_PER_TOKEN = 4


@dataclass
class Executions:
    """Is told of every execution, and keeps the results: an `audit` of the executor."""

    results: list[atoll.ExecutionResult] = field(default_factory=list)

    def execution(self, session_id: str, cell: int, code: str, result: atoll.ExecutionResult) -> None:
        self.results.append(result)

    def call(self, session_id: str, cell: int, record: atoll.CallRecord) -> None: ...


@dataclass(frozen=True)
class Spent:
    """What one question cost."""

    turns: int
    """Requests to the model."""
    calls: int
    """Calls of the company's tools."""
    input: int
    """Tokens that the model was sent, in all requests together."""
    output: int

    @property
    def total(self) -> int:
        return self.input + self.output

    @classmethod
    def of(cls, answer: atoll.Answer, tools: Iterable[atoll.Tool], calls: int, *, counted_by_provider: bool) -> Spent:
        """From the messages of a conversation, of four characters a token: each request sends the instructions, the
        definitions of the tools and all messages so far. A real provider has counted itself."""
        if counted_by_provider:
            return cls(answer.steps, calls, answer.tokens.input, answer.tokens.output)
        before = len(INSTRUCTIONS) + len(json.dumps(atoll.export.definitions(tools, "anthropic")))
        sent = received = 0
        for message in answer.history.messages:
            size = sum(len(text) for part in message.parts for text in _texts(part))
            if isinstance(message, ModelResponse):
                sent, received = sent + before, received + size
            before += size
        return cls(answer.steps, calls, sent // CHARS_PER_TOKEN, received // CHARS_PER_TOKEN)


def _texts(part: object) -> list[str]:
    match part:
        case UserPromptPart(content=str(content)) | TextPart(content=content):
            return [content]
        case ToolCallPart():
            return [part.tool_name, part.args_as_json_str()]
        case ToolReturnPart():
            return [part.model_response_str()]
    return []


@dataclass
class Example:
    engine: atoll.Engine
    console: Console
    model: str | None = None
    """None: the scripted one."""
    company: Company = field(default_factory=Company)
    executions: Executions = field(default_factory=Executions)

    # ------------------------------------------------------------------------------------------------- both ways

    async def compare(self) -> dict[str, tuple[Spent, Spent]]:
        """Ask two questions both ways, and show what each cost. Returns that, for each question."""
        records = sum(map(len, self.company.expenses.values()))
        self.say(f"{len(self.company.members)} members, {records} expenses; model: {self.model or 'scripted'}")
        spent = {}
        for question in (QUESTION, SMALL_QUESTION):
            direct = await self.ask_directly(question)
            async with self.code() as tools:
                spent[question] = direct, (await self.ask(question, tools))[1]
        for question, (direct, in_code) in spent.items():
            self.console.print()
            self.console.print(_table(question, direct, in_code))
        how = "as the provider counts" if self.model else f"of {CHARS_PER_TOKEN} characters, in all requests together"
        self.say(f"Tokens {how}. Code pays where much data passes by; for one small fact it costs more.")
        return spent

    async def ask_directly(self, question: str) -> Spent:
        self.title(question, "direct")
        tools = registry(self.company).direct_tools()
        called = 0
        async with self.agent(DIRECT_SCRIPT, tools).stream(question) as stream:
            async for event in stream:
                called += isinstance(event, ToolCallEvent)
                self.tell(event)
        return Spent.of(stream.answer, tools, called, counted_by_provider=self.model is not None)

    async def ask(
        self, question: str, tools: atoll.ToolSet, history: atoll.History | None = None
    ) -> tuple[atoll.Answer, Spent]:
        """Ask a model that may write code."""
        self.title(question, "in code")
        self.executions.results.clear()
        async with self.agent(SCRIPT, tools).stream(question, history=history) as stream:
            async for event in stream:
                self.tell(event)
        called = sum(len(result.calls) for result in self.executions.results)
        spent = Spent.of(stream.answer, tools, called, counted_by_provider=self.model is not None)
        self.say(f"calls of tools: {called}, turns: {spent.turns}")
        return stream.answer, spent

    def agent(self, script: Path, tools: atoll.ToolSet) -> atoll.Agent:
        return atoll.Agent(self.model or f"script:{script}", tools, INSTRUCTIONS)

    @asynccontextmanager
    async def code(self, approver: atoll.Approver | None = None) -> AsyncIterator[atoll.ToolSet]:
        """The tool `execute_code` with a session of its own."""
        async with self.executor(approver) as executor, atoll.code_tool(executor=executor) as tools:
            yield tools

    def executor(self, approver: atoll.Approver | None = None) -> atoll.CodeExecutor:
        tools = registry(self.company, lambda member, amount: self.say(f"(on the host: {member} + {amount:.2f} USD)"))
        return atoll.CodeExecutor(tools, engine=self.engine, approver=approver, audit=self.executions)

    # ------------------------------------------------------------------------------------------------ other modes

    async def reuse_a_session(self) -> list[int]:
        """Three questions in one session. Returns how many calls of tools each needed."""
        calls = []
        history = atoll.History()
        async with self.code() as tools:
            for question in (QUESTION, *FOLLOW_UPS):
                _, spent = await self.ask(question, tools, history)
                calls.append(spent.calls)
        self.say("The records were fetched once: they are variables of the session.")
        return calls

    async def interact(self, *, one_session: bool) -> None:
        """Answer questions of the terminal until it ends."""
        known = [QUESTION, *(FOLLOW_UPS if one_session else (SMALL_QUESTION, DRAW))]
        history = atoll.History()
        async with self.code() as shared:
            while True:
                hint = f"Enter asks: {known[0]}" if known else "Ctrl-D ends"
                typed = await self.read(f"[bold]?[/] [dim]({hint})[/] ")
                if typed is None or not (typed or known):
                    return
                question = typed or known[0]
                known = [each for each in known if each != question]
                try:
                    if one_session:
                        history = (await self.ask(question, shared, atoll.History(history.messages)))[0].history
                    else:
                        async with self.code() as tools:
                            await self.ask(question, tools)
                except atoll.ScriptFailed:
                    self.say("The scripted model knows only the questions that Enter asks; --model has others.")

    async def low_level(self) -> None:
        """Code without a model: results, errors, limits, sessions."""
        async with self.executor() as executor:
            session: str | None = None
            for title, code, timeout_s in (
                ("variables stay in a session", "members = await get_team_members('sales')\nlen(members)", 10.0),
                ("what they were", "sorted({member.level for member in members})", 10.0),
                ("a call that fails is an exception", "await get_expenses('sal-99', 'Q3')", 10.0),
                ("the time limit interrupts, and names the line", "n = 0\nwhile True:\n    n += 1", 0.5),
                ("the session goes on", "n > 0, len(members)", 10.0),
            ):
                self.title(title, "CodeExecutor")
                self.show_code(code)
                result, session = await executor.execute(code, session, reuse_session=True, timeout_s=timeout_s)
                self.console.print(result.text, markup=False)
                self.say(f"success={result.success}, {len(result.calls)} calls, {result.duration_s * 1000:.0f} ms")
            for info in executor.active_sessions.values():
                self.say(f"session {info.id}: {info.executions} executions, sandbox {info.sandbox}")

    async def approve(self) -> None:
        """Calls that wait until they are allowed in the terminal."""

        async def ask(request: atoll.ApprovalRequest) -> atoll.ApprovalDecision:
            self.console.print(f"[yellow]The code asks for[/] {request.tool} {json.dumps(dict(request.arguments))}")
            said = await self.read("[yellow]allow it?[/] y, n, or another amount: ")
            if said is None or said.lower() in {"", "n", "no"}:
                return atoll.ApprovalDecision(allowed=False, reason="the manager said no")
            try:
                return atoll.ApprovalDecision(True, arguments={**request.arguments, "amount": float(said)})
            except ValueError:
                return atoll.ApprovalDecision(said.lower() in {"y", "yes"}, f"the manager said {said!r}")

        async with self.code(atoll.AskingApprover(ask)) as tools:
            await self.ask(RAISE, tools)

    async def draw(self, file: Path) -> None:
        """A chart of the code's, written to a file."""
        async with self.code() as tools:
            await self.ask(DRAW, tools)
        for part in (part for result in self.executions.results for part in result.parts):
            for kind, suffix in (("image/svg+xml", ".svg"), ("image/png", ".png")):
                if kind in part.data:
                    data = str(part.data[kind])
                    written = file.with_suffix(suffix)
                    written.write_bytes(data.encode() if suffix == ".svg" else base64.b64decode(data))
                    self.say(f"{written}: {written.stat().st_size} bytes")
                    return
        raise SystemExit("the code has shown no chart")

    # ------------------------------------------------------------------------------------------------ the terminal

    async def read(self, prompt: str) -> str | None:
        """A line that is typed. None: there are no more."""
        try:
            return (await anyio.to_thread.run_sync(self.console.input, prompt, abandon_on_cancel=True)).strip()
        except EOFError:
            return None

    def title(self, text: str, how: str) -> None:
        self.console.print(f"\n[bold]{text}[/]  [cyan]{how}[/]")

    def say(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False)

    def show_code(self, code: str) -> None:
        self.console.print(
            Syntax(
                code.strip(), "python", theme="ansi_dark", background_color="default", padding=(0, 2), word_wrap=True
            )
        )

    def tell(self, event: atoll.AgentEvent) -> None:
        match event:
            case TextEvent(text=text):
                self.console.print(text, end="", markup=False, soft_wrap=True)
            case UsageEvent():
                self.console.print()  # ends the line of the streamed text
            case ToolCallEvent(tool="execute_code", input=dict(given)):
                self.show_code(str(given.get("code")))
            case ToolCallEvent(tool=tool, input=given):
                line(self.console, f"  → {tool} {json.dumps(given)}", "cyan")
            case ToolResultEvent(tool=tool, result=result):
                mark, style = ("✗", "red") if result.is_error else ("✓", "green")
                line(
                    self.console,
                    f"  {mark} {len(result.text):>5} characters for the model: {' '.join(result.text.split())}",
                    style,
                )


def _table(question: str, direct: Spent, in_code: Spent) -> Table:
    table = Table("", title=question, title_justify="left", title_style="bold")
    for name in ("turns", "calls of tools", "tokens in", "tokens out", "together"):
        table.add_column(name, justify="right")
    for label, each in (("direct", direct), ("in code", in_code)):
        figures = (each.turns, each.calls, each.input, each.output, each.total)
        table.add_row(label, *(f"{figure:,}" for figure in figures))
    change = f"{in_code.total / direct.total - 1:+.0%}"
    table.add_row("[bold]change", f"[bold]{in_code.turns - direct.turns:+}", "", "", "", f"[bold]{change}")
    return table


def choose_model(named: str | None = None) -> str | None:
    """None: the scripted one."""
    if named or "ATOLL_MODEL" in os.environ or "ANTHROPIC_API_KEY" in os.environ:
        return named or atoll.Settings.from_environment().model
    return None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.team_expenses", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("-i", "--interactive", action="store_true", help="answer questions that you type")
    parser.add_argument("-s", "--session", action="store_true", help="keep one session for all questions")
    parser.add_argument("--low-level", action="store_true", help="CodeExecutor alone, without a model")
    parser.add_argument("--approval", action="store_true", help="calls that wait until you allow them")
    parser.add_argument(
        "--chart", nargs="?", type=Path, const=Path("team_expenses.svg"), metavar="FILE", help="draw one"
    )
    parser.add_argument("--model", help="a model such as anthropic:NAME; without a key, a scripted one")
    return parser.parse_args()


async def main(options: argparse.Namespace) -> None:
    logging.getLogger("atoll.code").addHandler(logging.NullHandler())  # tools that fail are shown as the code sees them
    async with atoll.open() as engine:
        example = Example(engine, Console(highlight=False), choose_model(options.model))
        if options.interactive:
            await example.interact(one_session=options.session)
        elif options.session:
            await example.reuse_a_session()
        elif options.low_level:
            await example.low_level()
        elif options.approval:
            await example.approve()
        elif options.chart:
            await example.draw(options.chart)
        else:
            await example.compare()


if __name__ == "__main__":
    anyio.run(main, _options())
