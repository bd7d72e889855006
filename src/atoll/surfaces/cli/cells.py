"""Code that a kernel in a sandbox runs, connected to the streams of this process.

Owns how output, values, images and errors of a cell are shown, and how one file of code becomes an exit status. Not
here: the arguments (`commands/exec.py`, `commands/python.py`), a prompt for cells (`repl.py`), and how code is run
(`code/`).
"""

from __future__ import annotations

import base64
import binascii
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import anyio

from atoll.code.audit import CodeAudit
from atoll.code.executor import CodeConfig, CodeExecutor
from atoll.code.languages import LanguageName
from atoll.code.registry import ToolRegistry
from atoll.code.results import ExecutionResult, OutboxFile, RichPart
from atoll.contract.errors import InvalidRequest
from atoll.surfaces.cli import FAILED, TIMED_OUT, render, terminal
from atoll.surfaces.cli.streaming import CAPTURE_BYTES
from atoll.tools.image_files import image_type

if TYPE_CHECKING:
    from atoll.code.session import StreamName
    from atoll.runtime.interface import Engine
    from atoll.runtime.sandbox import Sandbox

MAX_CODE_BYTES = 8 * 1024 * 1024
_LANGUAGES: Mapping[str, LanguageName] = {".js": "javascript", ".mjs": "javascript", ".sh": "bash"}
"""By the suffix of a file. Others are Python."""
_SUFFIXES = {"image/png": "png", "image/jpeg": "jpg", "image/gif": "gif", "image/webp": "webp"}


class CodeOptions(NamedTuple):
    """A file of code as the command line describes it."""

    code: str
    language: LanguageName = "python"
    env: Mapping[str, str] = MappingProxyType({})
    user: str | None = None
    cwd: str | None = None
    timeout_s: float | None = None
    out: Path | None = None
    """Where images, and files that the code leaves in its outbox, are saved."""
    as_json: bool = False


def read_code(file: str) -> str:
    """The code in a file; `-` is standard input.

    Raises:
        InvalidRequest: it cannot be read, is not text, or is too long.
    """
    try:
        if file == "-":
            data = sys.stdin.buffer.read(MAX_CODE_BYTES + 1)
        else:
            with open(file, "rb") as opened:
                data = opened.read(MAX_CODE_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"cannot read the code from {file}: {error.strerror}") from None
    if len(data) > MAX_CODE_BYTES:
        raise InvalidRequest(f"the code in {file} is longer than {MAX_CODE_BYTES >> 20} MiB; import most of it")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the code in {file} is not UTF-8: {error.reason} at byte {error.start}") from None


def language_of(name: str | None, file: str = "-") -> LanguageName:
    """The language of this name or, without one, that of a file with this name.

    Raises:
        InvalidRequest: there is no such language.
    """
    known: tuple[LanguageName, ...] = get_args(LanguageName)
    if name is None:
        return _LANGUAGES.get(Path(file).suffix, "python")
    for each in known:
        if each == name:
            return each
    raise InvalidRequest(f"--language is {name}; there are {', '.join(known)}")


def executor_for(engine: Engine, language: LanguageName, env: Mapping[str, str] | None = None) -> CodeExecutor:
    """An executor for code that a person runs: no tools, no time limit, and a trace."""
    config = CodeConfig(language=language, timeout_s=None, output_limit_bytes=CAPTURE_BYTES, env=env or {})
    return CodeExecutor(ToolRegistry(), config, engine=engine, audit=CodeAudit(engine.state_dir, engine.namespace))


async def run(engine: Engine, sandbox: Sandbox, options: CodeOptions) -> int:
    """Run a file of code as one cell, with a kernel of its own, and return the exit status: 0, 1 if it failed, that of
    `exit(n)`, or 124 after a time-out. Leaving early, for any reason, ends the kernel and all that it started.

    Raises:
        OutputClosed: our output is no longer read.
    """
    output = None if options.as_json else CellOutput()
    async with executor_for(engine, options.language, options.env) as executor:
        session = await executor.open_session(sandbox, user=options.user, cwd=options.cwd)
        with anyio.CancelScope() as scope:
            if output is not None:
                output.on_closed = scope.cancel
            result, _ = await executor.execute(
                options.code,
                session,
                timeout_s=options.timeout_s,
                on_output=None if output is None else output.take,
            )
        if scope.cancelled_caught:
            raise terminal.OutputClosed
    shown = CellResult(result, options.out)
    if options.as_json:
        files = shown.save()
        data: dict[str, Any] = result.model_dump(mode="json", exclude={"files": {"__all__": {"data"}}})
        render.emit_json({"sandbox": sandbox.name, **data, "saved": [str(file) for file in files]})
    else:
        shown.print()
        if result.timed_out:
            render.note(f"the code was interrupted after {options.timeout_s:g} s (--timeout)")
    return _status(result)


def _status(result: ExecutionResult) -> int:
    if result.timed_out:
        return TIMED_OUT
    error = result.error
    if error is not None and error.type == "SystemExit" and error.message.isdecimal():
        return min(int(error.message), 255)
    return 0 if result.success else FAILED


class CellOutput:
    """Output of cells that is written to our own streams as it comes."""

    def __init__(self) -> None:
        self._writers = {
            "stdout": terminal.OutputWriter(terminal.STDOUT),
            "stderr": terminal.OutputWriter(terminal.STDERR),
        }
        self._is_closed = False
        self.on_closed: Any = lambda: None
        """Called once when our output is no longer read."""

    async def take(self, stream: StreamName, data: bytes) -> None:
        if self._is_closed:
            return
        try:
            await self._writers[stream].write(data)
        except terminal.OutputClosed:
            self._is_closed = True
            self.on_closed()


class CellResult:
    """What is shown of a cell when it has ended: all but its output, which has been written.

    Everything in it is hostile. With a directory `out`, images that were shown and files of the outbox are saved there;
    nothing that exists is overwritten, and no name that begins with a dot is used.
    """

    def __init__(self, result: ExecutionResult, out: Path | None) -> None:
        self._result = result
        self._out = out

    def print(self) -> None:
        result = self._result
        for part in result.parts:
            saved = self._save_image(part)
            if saved is not None:
                render.say(str(saved))
            elif "text/plain" in part.data:
                render.say(render.printable(str(part.data["text/plain"]), lines=True))
        if result.error is not None and result.error.type != "SystemExit":
            text = result.error.traceback.rstrip() or f"{result.error.type}: {result.error.message}"
            sys.stderr.write(render.printable(text, lines=True) + "\n")
        elif result.error is not None and not result.error.message.isdecimal():
            sys.stderr.write(render.printable(result.error.message, lines=True) + "\n")
        for warning in result.warnings:
            render.note(f"warning: {warning}")
        if result.session_replaced:
            render.note("the session's process is gone, and its variables with it; files are there")
        for saved in self._save_files():
            render.say(str(saved))

    def save(self) -> list[Path]:
        """Save what there is to save, and return where."""
        images = [self._save_image(part) for part in self._result.parts]
        return [*(image for image in images if image is not None), *self._save_files()]

    def _save_image(self, part: RichPart) -> Path | None:
        if self._out is None:
            return None
        for kind, data in part.data.items():
            if kind not in _SUFFIXES or not isinstance(data, str):
                continue
            with suppress(binascii.Error, ValueError):
                image = base64.b64decode(data, validate=True)
                if (found := image_type(image)) is not None:
                    return self._save_new(f"image-{{}}.{_SUFFIXES[found]}", image)
        return None

    def _save_new(self, template: str, data: bytes) -> Path:
        """Save a file by the first of these names that none has."""
        assert self._out is not None  # noqa: S101 - for the type checker
        self._out.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            path = self._out / template.format(number)
            with suppress(FileExistsError), path.open("xb") as file:
                file.write(data)
                return path
            number += 1

    def _save_files(self) -> list[Path]:
        saved: list[Path] = []
        for each in self._result.files if self._out is not None else ():
            assert self._out is not None  # noqa: S101 - for the type checker
            path, why = self._out / each.path, _refusal(each)
            if why is None:
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("xb") as file:
                        file.write(each.data or b"")
                    saved.append(path)
                except OSError as error:
                    why = f"{path}: {error.strerror}"
            if why is not None:
                render.note(f"outbox/{each.path} is not saved: {why}")
        return saved


def _refusal(file: OutboxFile) -> str | None:
    """Why a file of the outbox is not saved. None: it may be."""
    if file.data is None:
        return f"{render.human_bytes(file.size_bytes)} are too much; `atoll cp` copies it"
    if not file.path.isprintable() or any(not part or part.startswith(".") for part in file.path.split("/")):
        return "its name begins with a dot, or has characters that cannot be printed"
    return None
