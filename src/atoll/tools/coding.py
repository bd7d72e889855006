"""The coding vocabulary: read, write, edit, bash, grep, glob and task, for one sandbox and a working directory.

Owns these tools except `task`, and how much of a file or an output a model is shown. Not here: child agents
(`tasks.py`), paths, scopes and text (`view.py`), schemas and calls (`tool.py`). Used through `vocabularies.py` by the
MCP server and the command line, by `agents/children.py` for child agents, and by programs (`coding_tools`).
"""

from __future__ import annotations

import posixpath
from collections.abc import Hashable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field

from atoll.contract.errors import (
    AtollError,
    InvalidRequest,
    PathIsDirectory,
    PermissionDenied,
)
from atoll.contract.model import FileEntry
from atoll.runtime.guest.files import MAX_CONTEXT
from atoll.runtime.provisioning import DEFAULT_USER
from atoll.runtime.sandbox import Sandbox
from atoll.runtime.sandbox_pool import SandboxPool
from atoll.tools.image_files import binary_content
from atoll.tools.tasks import Tasks, task_tool
from atoll.tools.tool import Hints, Input, OnOutput, Result, Tool, ToolResult, ToolSet
from atoll.tools.view import (
    MAX_SEARCH_S,
    MAX_SHOWN_BYTES,
    MAX_SHOWN_LINES,
    SHELL_FACTS,
    PoolContext,
    View,
    as_text,
    last_name,
    media_type,
    run,
    searching,
    start_directory,
    with_note,
)
from atoll.tools.vocabularies import Vocabulary

MAX_EDIT_BYTES = 10 * 1024 * 1024
DEFAULT_TIMEOUT_S = 120
MAX_MATCHES = 1000
MAX_SCAN_BYTES = 1024**3
"""How much of a file is read to find a line."""

_LIMITS_TEXT = f"{MAX_SHOWN_LINES} lines or {MAX_SHOWN_BYTES // 1000} KB"
_NUMBER_WIDTH = 6
_NUMBER_BYTES = _NUMBER_WIDTH + 1
"""What the number of a line adds to it."""


@dataclass(frozen=True)
class CodingView(View):
    """The tool context of one agent: a view of a sandbox, and the agent's children."""

    tasks: Tasks | None = None
    depth: int = 1
    """1 is the agent that a person started; its children have 2."""

    @property
    def abilities(self) -> frozenset[str]:
        """`tasks` is there if the agent may start child agents."""
        may_start = self.tasks is not None and self.depth < self.tasks.max_depth
        return frozenset({"sandbox", "tasks"} if may_start else {"sandbox"})

    def explain(self, error: AtollError) -> str:
        return error.message

    def tools(self) -> ToolSet:
        """The tools of the vocabulary for this view."""
        return ToolSet((*FILE_TOOLS, task_tool(self.tasks)), self)

    async def child(self, cwd: str) -> CodingView:
        """The view of a child agent: the same sandbox, scoped to a directory.

        Raises:
            PermissionDenied: the directory is outside of this view's scope.
        """
        top = posixpath.normpath(await self.reach(cwd))
        return replace(self, cwd=top, scoped=True, depth=self.depth + 1)


class DefaultContext(PoolContext):
    """The sandbox `default` of a session, which is created when a tool is first called."""

    def __init__(self, pool: SandboxPool, tasks: Tasks | None = None) -> None:
        super().__init__(pool)
        self._tasks = tasks
        if tasks is not None:
            self.abilities |= {"tasks"}

    async def view(self) -> CodingView:
        sandbox = await self.pool.get()
        return CodingView(sandbox, start_directory(sandbox), tasks=self._tasks)


def coding_tools(sandbox: Sandbox, *, cwd: str | None = None, tasks: Tasks | None = None) -> ToolSet:
    """The coding tools for a sandbox; relative paths begin at `cwd`, unset where the sandbox's commands start. Without
    `tasks` there is no `task`."""
    return CodingView(sandbox, cwd or start_directory(sandbox), tasks=tasks).tools()


def pool_coding_tools(pool: SandboxPool, *, tasks: Tasks | None = None) -> ToolSet:
    """The coding tools for the sandbox `default` of a session, which is created when a tool is first called. Without
    `tasks` there is no `task`."""
    return ToolSet(map(_in_default, (*FILE_TOOLS, task_tool(tasks))), DefaultContext(pool, tasks))


def _in_default(tool: Tool) -> Tool:
    """A tool whose context is a `DefaultContext`. Its keys do not need the sandbox, which may not exist yet."""

    async def handler(args: Input, context: DefaultContext, **options: Any) -> Result | ToolResult | str:
        return await tool.handler(args, await context.view(), **options)

    def key(args: Read | Write | Edit, _context: DefaultContext) -> Hashable:
        return last_name(args.path)

    return replace(tool, handler=handler, serialize_by=tool.serialize_by and key)


# --------------------------------------------------------------------------------------------------------------- read


class Read(Input):
    path: str = Field(min_length=1)
    """A file, or a directory to be listed. Relative paths begin at the working directory."""
    offset: int = Field(default=1, ge=1, le=2**31)
    """The number of the line to begin with, or of the entry of a directory."""
    limit: int = Field(default=MAX_SHOWN_LINES, ge=1, le=MAX_SHOWN_LINES)
    """How many lines to read at most."""


class ReadResult(Result):
    content: str
    """Without line numbers. Empty for a binary file."""
    kind: Literal["file", "directory", "binary"]
    nextOffset: int | None = None
    """Where to continue. Unset: the end was reached."""


async def _read(args: Read, view: CodingView) -> ToolResult:
    path = await view.reach(args.path)
    files = view.sandbox.files
    async with view.suggesting(path):
        try:
            window = await _window(view, path, args)
        except PathIsDirectory:
            return _listing(args, await files.list(path))
        content = as_text(window.data, tail=not window.torn)
        if content is None:
            return ReadResult(content="", kind="binary").result(
                await binary_content(view, path, window.head, args.path)
            )
    last = args.offset + window.lines - 1
    if window.torn:
        note = f"[line {last} is longer than {MAX_SHOWN_BYTES // 1000} KB and cut here; use bash to read the rest]"
    elif window.more:
        note = f"[stopped after line {last}; continue with offset {last + 1}]"
    else:
        note = "" if content else "[empty file]"
    result = ReadResult(content=content, kind="file", nextOffset=last + 1 if window.more else None)
    return result.result(with_note(_numbered(content, args.offset), note))


def _numbered(content: str, first: int) -> str:
    """As `cat -n` shows it."""
    lines = content.split("\n")
    last = lines.pop()  # what follows the last newline
    text = "".join(f"{number:>{_NUMBER_WIDTH}}\t{line}\n" for number, line in enumerate(lines, first))
    return f"{text}{first + len(lines):>{_NUMBER_WIDTH}}\t{last}" if last else text


def _listing(args: Read, entries: list[FileEntry]) -> ToolResult:
    names = sorted(f"{entry.name}/" if entry.kind == "directory" else entry.name for entry in entries)
    content, count = _fit_lines(names[args.offset - 1 :], args.limit)
    next_offset = args.offset + count if args.offset - 1 + count < len(names) else None
    note = "" if names else "[empty directory]"
    if next_offset is not None:
        note = f"[stopped after entry {next_offset - 1} of {len(names)}; continue with offset {next_offset}]"
    return ReadResult(content=content, kind="directory", nextOffset=next_offset).result(with_note(content, note))


@dataclass
class _Window:
    """Some lines of a file."""

    data: bytes
    lines: int
    more: bool
    torn: bool
    """The line is too long, and `data` is only its beginning."""
    head: bytes
    """The first bytes of the file."""


async def _window(view: View, path: str, args: Read) -> _Window:
    """Read the requested lines with bounded memory. No more of the file is read than that takes.

    Raises:
        InvalidRequest: the file has fewer lines, or they are not within its first `MAX_SCAN_BYTES`.
    """
    if args.offset == 1:
        begin = await view.sandbox.files.read_bytes(path, limit=MAX_SHOWN_BYTES + 1)
        return _cut_window(begin, args.limit, begin[:64])
    head, kept = b"", bytearray()
    to_pass, passed, within, scanned = args.offset - 1, 0, False, 0
    async with aclosing(view.sandbox.files.stream(path)) as pieces:
        async for piece in pieces:
            head = head or piece[:64]
            if passed < to_pass:
                scanned += len(piece)
                if scanned > MAX_SCAN_BYTES:
                    raise InvalidRequest(
                        f"line {args.offset} of {args.path} is not within its first {MAX_SCAN_BYTES >> 30} GiB; "
                        "use bash to read parts of it"
                    )
                passed, start = _skip_lines(piece, to_pass, passed)
                within = start < len(piece) if start else within or bool(piece)
                piece = piece[start:] if passed == to_pass else b""
            kept += piece
            # One line more than is shown proves that there is more.
            if len(kept) > MAX_SHOWN_BYTES or kept.count(b"\n") > args.limit:
                break
    if passed < to_pass or not kept:
        lines = passed + (within and passed < to_pass)
        raise InvalidRequest(f"offset is {args.offset}, but {args.path} has {lines} lines")
    return _cut_window(bytes(kept), args.limit, head)


def _skip_lines(piece: bytes, wanted: int, passed: int) -> tuple[int, int]:
    """Returns how many lines have been passed, and where in `piece` the last of them ended."""
    start = 0
    while passed < wanted and (end := piece.find(b"\n", start)) >= 0:
        passed, start = passed + 1, end + 1
    return passed, start


def _cut_window(kept: bytes, limit: int, head: bytes) -> _Window:
    end = lines = 0
    # Each line that is shown has a number too.
    while end < len(kept) and lines < limit:
        newline = kept.find(b"\n", end)
        following = newline + 1 if newline >= 0 else len(kept)
        if following + (lines + 1) * _NUMBER_BYTES > MAX_SHOWN_BYTES:
            break
        end, lines = following, lines + 1
    torn = end == 0 and len(kept) > MAX_SHOWN_BYTES - _NUMBER_BYTES
    if torn:
        end, lines = MAX_SHOWN_BYTES - _NUMBER_BYTES, 1
    return _Window(kept[:end], lines, more=end < len(kept), torn=torn, head=head)


def _fit_lines(lines: list[str], limit: int = MAX_SHOWN_LINES) -> tuple[str, int]:
    """As many of these lines as fit into a result, and their number."""
    text: list[str] = []
    size = 0
    for line in lines[:limit]:
        size += len(line.encode("utf-8", "replace")) + 1
        if size > MAX_SHOWN_BYTES:
            break
        text.append(f"{line}\n")
    return "".join(text), len(text)


# ------------------------------------------------------------------------------------------------------- write and edit


class Write(Input):
    path: str = Field(min_length=1)
    """Relative paths begin at the working directory. Missing directories are made."""
    content: str
    """The whole content of the file."""


class WriteResult(Result):
    path: str
    size: int
    """Bytes."""


async def _write(args: Write, view: CodingView) -> ToolResult:
    size = await view.sandbox.files.write_text(await view.reach(args.path), args.content)
    return WriteResult(path=args.path, size=size).result(f"wrote {size} bytes to {args.path}")


class Edit(Input):
    path: str = Field(min_length=1)
    """Relative paths begin at the working directory."""
    oldText: str = Field(min_length=1)
    """The text to replace, exactly as it is in the file, without line numbers, and with enough context to be unique."""
    newText: str
    """The text to put in its place."""
    replaceAll: bool = False
    """Replace every match instead of the only one."""


class EditResult(Result):
    path: str
    replacements: int


async def _edit(args: Edit, view: CodingView) -> ToolResult:
    count = await replace_text(
        view, args.path, args.oldText, args.newText, all_of_them=args.replaceAll, fields=("oldText", "replaceAll")
    )
    return EditResult(path=args.path, replacements=count).result(replaced(count, args.path))


async def replace_text(view: View, name: str, old: str, new: str, *, all_of_them: bool, fields: tuple[str, str]) -> int:
    """Replace text in a file. Returns how often. `fields` are the names of the arguments for `old` and `all_of_them`.

    Raises:
        InvalidRequest: there is no match, or more than one; nothing was changed.
        and what reading and writing the file raises.
    """
    path = await view.reach(name)
    files = view.sandbox.files
    async with view.suggesting(path):
        data = await files.read_bytes(path, limit=MAX_EDIT_BYTES + 1)
    if len(data) > MAX_EDIT_BYTES:
        raise InvalidRequest(f"{name}: more than {MAX_EDIT_BYTES >> 20} MiB; use a command such as sed")
    text = as_text(data)
    if text is None:
        raise InvalidRequest(f"{name}: {media_type(data, path)}, not a text file; use a command")
    count = text.count(old)
    if not count:
        raise InvalidRequest(
            f"{name}: found 0 matches for {fields[0]}, so nothing was changed{_near_match_hint(text, old)}"
        )
    if count > 1 and not all_of_them:
        raise InvalidRequest(
            f"{name}: found {count} matches for {fields[0]}, at lines {_line_numbers(text, old)}, so nothing was "
            f"changed; quote more of the text around the match, or set {fields[1]} to true"
        )
    await files.write_text(path, text.replace(old, new))
    return count


def replaced(count: int, name: str) -> str:
    """What a model is told after `replace_text`."""
    return f"replaced {count} {'match' if count == 1 else 'matches'} in {name}"


def _line_numbers(text: str, wanted: str) -> str:
    lines: list[str] = []
    start = text.find(wanted)
    while start >= 0 and len(lines) < 8:
        lines.append(str(text.count("\n", 0, start) + 1))
        start = text.find(wanted, start + len(wanted))
    return ", ".join(lines) + (", …" if start >= 0 else "")


def _near_match_hint(text: str, wanted: str) -> str:
    """A hint: the line where the text matches except for white space, if there is one."""
    look_for = [line.split() for line in wanted.strip().split("\n")]
    lines = [line.split() for line in text.split("\n")]
    if len(look_for) <= 100:
        for number in range(len(lines) - len(look_for) + 1):
            if lines[number] == look_for[0] and lines[number : number + len(look_for)] == look_for:
                return f"; at line {number + 1} it differs only in white space: read the file, and quote it exactly"
    return "; read the file, and quote it exactly"


# --------------------------------------------------------------------------------------------------------------- bash


class Bash(Input):
    command: str = Field(min_length=1)
    """A command line for bash. It begins in the working directory, in a new shell."""
    timeout: float = Field(default=DEFAULT_TIMEOUT_S, gt=0, le=3600)
    """Seconds until it is killed, with all that it started. Raise it for installs, builds and tests."""
    user: str = Field(default=DEFAULT_USER, min_length=1)
    """Who runs it: root can install packages, for instance with apt-get. Unset, in an image with a user of its own:
    that one."""


class BashResult(Result):
    output: str
    """stdout and stderr, in the order in which they were written."""
    exitCode: int
    """124: it timed out."""
    cutBytes: int = 0
    """How many bytes are missing in the middle of the output."""


async def _bash(args: Bash, view: CodingView, *, on_output: OnOutput | None) -> ToolResult:
    user = args.user if "user" in args.model_fields_set else None
    async with view.suggesting(view.cwd):
        ran = await run(
            view.sandbox,
            args.command,
            cwd=view.cwd,
            timeout_s=args.timeout,
            timeout_name="timeout",
            user=user,
            merge_stderr=True,
            on_output=on_output,
        )
    return BashResult(output=ran.stdout, exitCode=ran.exit_code, cutBytes=ran.cut_bytes).result(ran.text)


# ------------------------------------------------------------------------------------------------------ grep and glob


class Grep(Input):
    pattern: str = Field(min_length=1)
    """A regular expression as in Python or ripgrep, such as (?i)todo|\\bfix\\d+. Without look-around; no match spans
    lines."""
    path: str = Field(default=".", min_length=1)
    """A file, or a directory to be searched with all below it. Relative paths begin at the working directory."""
    include: str = Field(default="*", min_length=1)
    """A glob that the files' names have to match or, with a slash, their paths: `*.py`, `src/**/*.py`."""
    ignore_case: bool = False
    """Find upper and lower case alike, as -i."""
    context: int = Field(default=0, ge=0, le=MAX_CONTEXT)
    """Lines to show before and after each match, as -C."""


class GrepMatch(Result):
    path: str
    line: int
    text: str
    before: Sequence[str] | None = None
    """The lines before it that are not with another match. Unset: none were asked for, or there are none."""
    after: Sequence[str] | None = None
    """The lines after it, likewise."""


class GrepResult(Result):
    matches: list[GrepMatch]
    truncated: bool = False
    """There are more."""


async def _grep(args: Grep, view: CodingView) -> ToolResult:
    return await find_lines(args, view)


async def find_lines(args: Grep, view: View) -> ToolResult:
    """The lines that match, each as `path:line: text`; lines around a match as `path-line- text`, as grep shows them.

    Raises:
        InvalidRequest: the pattern is invalid, or the search took too long.
        and what `files.grep` raises.
    """
    path = await view.reach(args.path)
    async with view.suggesting(path):
        with searching():
            found = await view.sandbox.files.grep(
                args.pattern,
                path,
                ignore_case=args.ignore_case,
                context=args.context,
                include=None if args.include == "*" else args.include,
                limit=MAX_MATCHES,
            )
    matches: list[GrepMatch] = []
    for each in found:
        name = args.path if each.path == path else _joined(args.path, each.path)
        matches.append(GrepMatch(path=name, line=each.line, text=each.text, before=each.before, after=each.after))
    matches = _without_repeats(matches)
    blocks = _blocks(matches)
    text, count = _fit_lines(blocks)
    truncated = count < len(blocks) or len(matches) == MAX_MATCHES
    result = GrepResult(matches=matches[:count], truncated=truncated)
    return _search_result(result, text, count, "matches", truncated=truncated)


def _without_repeats(matches: list[GrepMatch]) -> list[GrepMatch]:
    """The matches, each line around them once: a line that is a match, or that an earlier one has, is left out."""
    lines = {(each.path, each.line) for each in matches}
    seen = ("", 0)  # the path and number of the last line
    kept: list[GrepMatch] = []
    for each in matches:
        last = seen[1] if seen[0] == each.path else 0
        before = list(each.before or ())[-min(each.line - last - 1, MAX_CONTEXT) :] if each.line > last + 1 else []
        after = list(each.after or ())
        for index in range(len(after)):
            if (each.path, each.line + 1 + index) in lines:
                after = after[:index]
                break
        kept.append(each.model_copy(update={"before": before or None, "after": after or None}))
        seen = (each.path, each.line + len(after))
    return kept


def _blocks(matches: list[GrepMatch]) -> list[str]:
    """The text of each match with the lines around it; '--' is between lines that do not follow each other."""
    separated = any(each.before or each.after for each in matches)
    blocks: list[str] = []
    following = ("", 0)
    for each in matches:
        before, after = each.before or [], each.after or []
        first = each.line - len(before)
        lines = ["--"] if separated and blocks and following != (each.path, first) else []
        lines += [f"{each.path}-{first + index}- {text}" for index, text in enumerate(before)]
        lines.append(f"{each.path}:{each.line}: {each.text}")
        lines += [f"{each.path}-{each.line + 1 + index}- {text}" for index, text in enumerate(after)]
        blocks.append("\n".join(lines))
        following = (each.path, each.line + len(after) + 1)
    return blocks


class Glob(Input):
    pattern: str = Field(min_length=1)
    """`*`, `?` and `[…]` within a name, `**` for any number of directories, `{a,b}` for either."""
    path: str = Field(default=".", min_length=1)
    """The directory to look in. Relative paths begin at the working directory."""


class GlobResult(Result):
    files: list[str]
    truncated: bool = False
    """There are more."""


async def _glob(args: Glob, view: CodingView) -> ToolResult:
    path = await view.reach(args.path)
    async with view.suggesting(path):
        with searching():
            found = await view.sandbox.files.glob(args.pattern, cwd=path, limit=MAX_SHOWN_LINES)
            names = await _in_scope(view, path, [entry.name for entry in found])
    files = [_joined(args.path, name) for name in names]
    text, count = _fit_lines(files)
    truncated = count < len(files) or len(found) == MAX_SHOWN_LINES
    return _search_result(
        GlobResult(files=files[:count], truncated=truncated), text, count, "files", truncated=truncated
    )


async def _in_scope(view: CodingView, path: str, names: list[str]) -> list[str]:
    """The names that are inside the view's scope: a pattern can follow symlinks to directories."""
    if not view.scoped:
        return names
    inside: dict[str, bool] = {}
    for directory in {posixpath.dirname(name) for name in names}:
        try:
            await view.reach(posixpath.join(path, directory))
            inside[directory] = True
        except PermissionDenied:
            inside[directory] = False
    return [name for name in names if inside[posixpath.dirname(name)]]


def _joined(directory: str, name: str) -> str:
    return name if directory in {".", "./"} else f"{directory.rstrip('/')}/{name}"


def _search_result(result: Result, text: str, count: int, what: str, *, truncated: bool) -> ToolResult:
    if truncated:
        text = with_note(text, f"[stopped after {count} {what}; there are more: narrow the search]")
    return result.result(text or f"[no {what}]")


# --------------------------------------------------------------------------------------------------------- vocabulary


def _file_key(args: Read | Write | Edit, view: CodingView) -> Hashable:
    return view.file_key(args.path)


_READ_ONLY = Hints(read_only=True, idempotent=True)
_DESTRUCTIVE = Hints(destructive=True)

READ = Tool(
    "read",
    "Read a text file with line numbers, see an image (PNG, JPEG, GIF, WebP), or list a directory. Shows up to "
    f"{_LIMITS_TEXT} and says where it stopped; offset continues there. The numbers and the tab after them are not "
    "part of the file.",
    Read,
    ReadResult,
    _read,
    hints=_READ_ONLY,
    serialize_by=_file_key,
    title="Read file",
    vocabulary="coding",
)
WRITE = Tool(
    "write",
    "Write a text file, whole or not at all. What it held is replaced; to change a part of it, use edit.",
    Write,
    WriteResult,
    _write,
    hints=Hints(destructive=True, idempotent=True),
    serialize_by=_file_key,
    title="Write file",
    vocabulary="coding",
)
EDIT = Tool(
    "edit",
    "Replace text in a file. oldText has to match exactly, and only once unless replaceAll is set. Files of up to "
    f"{MAX_EDIT_BYTES >> 20} MiB.",
    Edit,
    EditResult,
    _edit,
    hints=_DESTRUCTIVE,
    serialize_by=_file_key,
    title="Edit file",
    vocabulary="coding",
)
BASH = Tool(
    "bash",
    "Run a command in bash, or in sh where there is none, and wait for its end. Shows stdout and stderr together, and "
    "the exit code if it is not 0. " + SHELL_FACTS.format(timeout="timeout", seconds=f"{DEFAULT_TIMEOUT_S} s"),
    Bash,
    BashResult,
    _bash,
    hints=Hints(destructive=True, open_world=True),
    streams_output=True,
    title="Run command",
    vocabulary="coding",
)
GREP = Tool(
    "grep",
    f"Find lines by a regular expression; shows path:line: text. Up to {MAX_MATCHES} matches and "
    f"{MAX_SHOWN_BYTES // 1000} KB. Passes over binary and hidden files. May take {MAX_SEARCH_S:g} s.",
    Grep,
    GrepResult,
    _grep,
    hints=_READ_ONLY,
    title="Search in files",
    vocabulary="coding",
)
GLOB = Tool(
    "glob",
    f"Find files by a pattern of their names. Shows up to {_LIMITS_TEXT}. Passes over names that begin with a dot. "
    f"May take {MAX_SEARCH_S:g} s.",
    Glob,
    GlobResult,
    _glob,
    hints=_READ_ONLY,
    title="Find files",
    vocabulary="coding",
)
FILE_TOOLS = (READ, WRITE, EDIT, BASH, GREP, GLOB)

VOCABULARY = Vocabulary(
    tools=lambda pool, grants: pool_coding_tools(pool, tasks=grants.tasks),
    instructions="read, write, edit, bash, grep and glob all work in the one sandbox 'default'. Relative "
    "paths begin where commands do, in the working directory.",
    transcripts={"bash": "$ {command}", "grep": "{pattern}", "glob": "{pattern}", "task": "{role}: {prompt}"},
)
