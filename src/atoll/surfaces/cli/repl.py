"""A prompt for cells: `atoll python`.

Owns the prompt, its history and completion, what is one cell, and what Ctrl-C and Ctrl-D do. Not here: the arguments
(`commands/python.py`, which uses this), how results are shown (`cells.py`), and how code is run (`code/`).

The prompt is GNU readline, which blocks and has to be in the main thread for Ctrl-C to reach it. So the event loop,
with the sandbox and its kernel, is in a thread.
"""

from __future__ import annotations

import ast
import codeop
import contextlib
import re
import readline
import secrets
import signal
import tempfile
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from anyio.from_thread import BlockingPortal, start_blocking_portal

from atoll.code.executor import CodeExecutor
from atoll.code.results import ExecutionResult
from atoll.surfaces.cli import render
from atoll.surfaces.cli.cells import CellOutput, CellResult, executor_for

if TYPE_CHECKING:
    from atoll.code.languages import LanguageName
    from atoll.runtime.interface import Engine
    from atoll.runtime.sandbox import Sandbox

HISTORY = "{}-history"
"""Its file in the state directory, for a language."""
_MAX_HISTORY = 2000
_DELIMITERS = " \t\n`~!@#$%^&*()-=+[{]}\\|;:'\",<>/?"
"""What ends a word that is completed. A dot does not."""
_NAMES = {"python": "Python", "javascript": "Node", "bash": "bash"}
_LEAVING = frozenset({"exit", "exit()", "quit", "quit()"})
_PROMPT, _MORE = ">>> ", "... "
_BLOCKS = {
    "javascript": (re.compile(r"[([{]"), re.compile(r"[)\]}]")),
    "bash": (re.compile(r"\b(?:if|for|while|until|case|select)\b|\{(?=\s|$)"), re.compile(r"\b(?:fi|done|esac)\b|\}")),
}
"""What begins and ends a block that may go on in the next line, in languages that are not parsed here."""

FindSandbox = Callable[["Engine"], AbstractAsyncContextManager["Sandbox"]]


class _Ended(BaseException):
    """A signal ended the prompt."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number


def hold(opening: AbstractAsyncContextManager[Engine], find: FindSandbox, language: LanguageName, *, kept: bool) -> int:
    """Read cells from the terminal and run them, until Ctrl-D. Returns the exit status.

    `find` gives the sandbox. `kept` leaves the session running there, for the next prompt.
    """
    with _signals(), start_blocking_portal() as portal:
        try:
            with portal.wrap_async_context_manager(_opened(opening, find, language, kept=kept)) as session:
                return _Prompt(portal, session).hold()
        except _Ended as ended:
            return ended.status


@contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the prompt, so that the terminal and the sandbox are cleaned up."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise _Ended(number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _ReplSession:
    """The session behind the prompt. Its methods run in the thread of the event loop."""

    def __init__(self, executor: CodeExecutor, id: str, sandbox: Sandbox, state_dir: Path, *, kept: bool) -> None:
        self._executor = executor
        self._id = id
        self._output = CellOutput()
        self.sandbox = sandbox.name
        self.language = executor.config.language
        self.history = state_dir / HISTORY.format(self.language)
        self.is_kept = kept

    @property
    def greeting(self) -> str:
        info = self._executor.get_session(self._id)
        language = "" if info is None else f"{_NAMES[self.language]} {info.version}"
        earlier = info is not None and info.executions
        if not self.is_kept:
            fate = "which is destroyed at the end"
        else:
            fate = "with the variables of before" if earlier else "where variables stay for the next time"
        return f"{language} in the sandbox {self.sandbox}, {fate}. Ctrl-C interrupts, Ctrl-D leaves."

    async def run(self, code: str) -> ExecutionResult:
        result, _ = await self._executor.execute(code, self._id, on_output=self._output.take)
        return result

    async def interrupt(self) -> None:
        await self._executor.interrupt(self._id)

    async def complete(self, code: str) -> tuple[str, tuple[str, ...]]:
        return await self._executor.complete(self._id, code)


@asynccontextmanager
async def _opened(
    opening: AbstractAsyncContextManager[Engine], find: FindSandbox, language: LanguageName, *, kept: bool
) -> AsyncIterator[_ReplSession]:
    async with opening as engine, find(engine) as sandbox, executor_for(engine, language) as executor:
        id = await executor.open_session(sandbox, leave_running=kept)
        yield _ReplSession(executor, id, sandbox, engine.state_dir, kept=kept)


class _Prompt:
    """The prompt itself, in the main thread."""

    def __init__(self, portal: BlockingPortal, session: _ReplSession) -> None:
        self._portal = portal
        self._session = session
        self._lines: list[str] = []
        self._found: list[str] = []
        self._images = Path(tempfile.gettempdir()) / f"atoll-images-{secrets.token_hex(8)}"

    def hold(self) -> int:
        render.note(self._session.greeting)
        with self._line_editing():
            while (code := self._read()) is not None:
                if code.strip() in _LEAVING:
                    return 0
                if code.strip():
                    self._run(code)
        return 0

    def _read(self) -> str | None:
        """The next cell. None: the input has ended."""
        self._lines = []
        while True:
            try:
                self._lines.append(input(_MORE if self._lines else _PROMPT))
            except KeyboardInterrupt:
                render.say("")
                self._lines = []
                continue
            except EOFError:
                render.say("")
                return None
            if is_complete(self._lines, self._session.language):
                return "\n".join(self._lines)

    def _run(self, code: str) -> None:
        """Run a cell. The first Ctrl-C interrupts it; the next ends its process, if it does not end otherwise."""
        running = self._portal.start_task_soon(self._session.run, code)
        interrupts = 0
        while True:
            try:
                CellResult(running.result(), self._images).print()
                return
            except KeyboardInterrupt:
                interrupts += 1
                if interrupts == 1:
                    self._portal.start_task_soon(self._session.interrupt)
                else:
                    running.cancel()
            except CancelledError:
                render.note("interrupted; if it did not end by itself, its process was killed")
                return

    # ---------------------------------------------------------------------------------------------- readline

    @contextmanager
    def _line_editing(self) -> Iterator[None]:
        history = self._session.history
        with contextlib.suppress(OSError):
            readline.read_history_file(history)
        readline.set_history_length(_MAX_HISTORY)
        readline.set_completer_delims(_DELIMITERS)
        readline.set_completer(self._complete)
        readline.parse_and_bind("tab: complete")
        try:
            yield
        finally:
            readline.set_completer(None)
            with contextlib.suppress(OSError):
                history.touch(mode=0o600)
                readline.write_history_file(history)

    def _complete(self, word: str, number: int) -> str | None:
        """What readline asks for, one after the other, when Tab is pressed."""
        if number == 0:
            line = readline.get_line_buffer()[: readline.get_endidx()]
            if not line.strip():
                self._found = ["    "]
            else:
                completed, found = self._portal.call(self._session.complete, "\n".join([*self._lines, line]))
                # What the kernel says is hostile: it must not steer the terminal.
                self._found = [each for each in found if each.isprintable()] if completed == word else []
        return self._found[number] if number < len(self._found) else None


def is_complete(lines: list[str], language: LanguageName = "python") -> bool:
    """Whether these lines are a cell. Those that are wrong are: the kernel says what is wrong with them.

    A block ends with an empty line, as everywhere in Python. Lines that were pasted at once are complete when they can
    be compiled. What is no Python is not parsed: an empty line ends what seems to go on.
    """
    source, is_one_line = "\n".join(lines), len(lines) == 1 and "\n" not in lines[0]
    if language != "python":
        begins, ends = _BLOCKS[language]
        is_open = len(begins.findall(source)) > len(ends.findall(source)) or source.endswith("\\")
        return not is_open or not lines[-1].strip()
    compiler = codeop.CommandCompiler()
    compiler.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compiled = compiler(source, symbol="single" if is_one_line else "exec")
        except (SyntaxError, ValueError, OverflowError):
            return True
    if compiled is None:
        return False
    return len(lines) == 1 or not lines[-1].strip()
