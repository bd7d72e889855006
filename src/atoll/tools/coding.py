"""The coding vocabulary: read, write, edit, bash, grep, glob and task, over one sandbox seen from a directory.

Knows what each does, how much of it a model is shown, and how a child session is started, followed and ended. Refuses
to know how a child thinks: that is a `Runner`'s, and without one there is no `task`.
"""

from __future__ import annotations

import posixpath
import secrets
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import anyio
from pydantic import Field, create_model

from atoll.contract.errors import (
    AtollError,
    ExecTimeout,
    InvalidRequest,
    PathIsDirectory,
    PathNotDirectory,
    PermissionDenied,
)
from atoll.contract.model import FileEntry, Frozen
from atoll.runtime.guest.exec_request import shell_line
from atoll.runtime.sandbox import Sandbox
from atoll.runtime.sandbox_pool import SandboxPool
from atoll.tools.tool import Hints, Input, Result, Tool, ToolResult, ToolSet, readable, report
from atoll.tools.view import (
    HOME,
    OUT_OF_MEMORY,
    SEARCH_S,
    TIMED_OUT,
    Session,
    View,
    after,
    as_text,
    media_type,
    searching,
    shown,
    whole,
)

LINES = 2000
BYTES = 50 * 1024
"""What a model is shown of anything at once."""
EDIT_LIMIT_BYTES = 10 * 1024 * 1024
TIMEOUT_S = 120
MATCHES = 1000
SCAN_LIMIT_BYTES = 1024**3
"""How much of a file is passed over to come to a line."""
DEPTH = 3
"""How many sessions may stand below each other, the first one included."""

# stderr where stdout is, so that a model sees both in the order in which they were written.
IN_BASH = shell_line('-c "$0" 2>&1')
_LIMITS = f"{LINES} lines or {BYTES // 1024} KB"


# ------------------------------------------------------------------------------------------------------ child sessions


class TaskEvent(Frozen):
    """Something that happens in a child session."""

    task: str
    """The child's id."""
    kind: str
    """`started`, `ended`, or whatever the runner tells of."""
    data: dict[str, Any] = Field(default_factory=dict)


class TaskOutput(Frozen):
    """What a child has to say at its end. The last thing that its runner yields."""

    output: str


class Runner(Protocol):
    """Runs child sessions."""

    @property
    def roles(self) -> Mapping[str, str]:
        """The roles that a child may have, and what each is for. The first is the default."""

    def start(
        self, *, id: str, role: str, prompt: str, cwd: str, depth: int, view: CodingView
    ) -> AsyncGenerator[TaskEvent | TaskOutput, None]:
        """Run a session to its end: events as they come, then its output.

        `view.tools()` are the child's tools, scoped to `cwd`. Being cancelled or closed ends the session.
        """


@dataclass(frozen=True)
class Tasks:
    """The children of a session: who they are, and how to end them."""

    runner: Runner
    on_event: Callable[[TaskEvent], None] = lambda _event: None
    depth_limit: int = DEPTH
    running: dict[str, anyio.CancelScope] = field(default_factory=dict)

    def cancel(self, id: str) -> bool:
        """End a child, and the call that waits for it. Returns whether there was one."""
        scope = self.running.get(id)
        if scope is None:
            return False
        scope.cancel()
        return True


@dataclass(frozen=True)
class CodingView(View):
    """What the tools of one session work on."""

    tasks: Tasks | None = None
    depth: int = 1
    """1 is a session that a person began."""

    @property
    def abilities(self) -> frozenset[str]:
        """`task` is offered to who may have children."""
        may = self.tasks is not None and self.depth < self.tasks.depth_limit
        return frozenset({"sandbox", "tasks"} if may else {"sandbox"})

    def explain(self, error: AtollError) -> str:
        return error.message

    def tools(self) -> ToolSet:
        """The vocabulary, for this view."""
        task = TASK if self.tasks is None else _with_roles(self.tasks.runner.roles)
        return ToolSet((READ, WRITE, EDIT, BASH, GREP, GLOB, task), self)

    async def child(self, cwd: str) -> CodingView:
        """The view of a child: this sandbox, scoped to a directory in it.

        Raises:
            PathDenied: it leads out of this view.
        """
        top = posixpath.normpath(await self.reach(cwd))
        return replace(self, cwd=top, scoped=True, depth=self.depth + 1)


class DefaultContext(Session):
    """A session whose sandbox `default` the tools work in, made when one of them is first called."""

    def __init__(self, pool: SandboxPool, tasks: Tasks | None = None) -> None:
        super().__init__(pool)
        self._tasks = tasks
        if tasks is not None:
            self.abilities |= {"tasks"}

    async def view(self) -> CodingView:
        return CodingView(await self.pool.get(), tasks=self._tasks)


def coding_tools(sandbox: Sandbox, *, cwd: str = HOME, tasks: Tasks | None = None) -> ToolSet:
    """The coding tools for a sandbox, with paths from `cwd` on. Without `tasks` there is no `task`."""
    return CodingView(sandbox, cwd, tasks=tasks).tools()


def pool_coding_tools(pool: SandboxPool, *, tasks: Tasks | None = None) -> ToolSet:
    """The coding tools for the sandbox `default` of a session, which is made when it is first used. Without `tasks`
    there is no `task`."""
    task = TASK if tasks is None else _with_roles(tasks.runner.roles)
    return ToolSet(map(_in_default, (READ, WRITE, EDIT, BASH, GREP, GLOB, task)), DefaultContext(pool, tasks))


def _in_default(tool: Tool) -> Tool:
    async def handler(ask: Input, session: DefaultContext) -> Result | ToolResult | str:
        return await tool.handler(ask, await session.view())

    def turn(ask: Read | Write | Edit, _session: DefaultContext) -> Hashable:
        return posixpath.normpath(posixpath.join(HOME, ask.path))

    return replace(tool, handler=handler, turn=tool.turn and turn)


# --------------------------------------------------------------------------------------------------------------- read


class Read(Input):
    path: str = Field(min_length=1)
    """A file, or a directory to be listed."""
    offset: int = Field(default=1, ge=1, le=2**31)
    """The line, or the entry of a directory, to begin with."""
    limit: int = Field(default=LINES, ge=1, le=LINES)
    """Most lines."""


class ReadResult(Result):
    content: str
    kind: Literal["file", "directory", "binary"]
    nextOffset: int | None = None
    """Where to go on. Unset: the end was reached."""


async def _read(ask: Read, view: CodingView) -> ToolResult:
    path = await view.reach(ask.path)
    files = view.sandbox.files
    async with view.suggesting(path):
        try:
            window = await _window(view, path, ask)
        except PathIsDirectory:
            return _listing(ask, await files.list(path))
        content = as_text(window.data, tail=not window.torn)
        if content is None:
            about = f"[{(await files.stat(path)).size} bytes of {media_type(window.head, path)}, which is no text]"
            return _read_result(about, ReadResult(content="", kind="binary"))
    last = ask.offset + window.lines - 1
    if window.torn:
        note = f"[line {last} is longer than {BYTES // 1024} KB and cut here; bash can read the rest of it]"
    elif window.more:
        note = f"[stopped after line {last}; go on with offset {last + 1}]"
    else:
        note = "" if content else "[an empty file]"
    result = ReadResult(content=content, kind="file", nextOffset=last + 1 if window.more else None)
    return _read_result(after(content, note), result)


def _read_result(text: str, result: ReadResult) -> ToolResult:
    return result.result().model_copy(update={"content": readable(text)})


def _listing(ask: Read, entries: list[FileEntry]) -> ToolResult:
    names = sorted(f"{entry.name}/" if entry.kind == "directory" else entry.name for entry in entries)
    content, count = _fitting(names[ask.offset - 1 :], ask.limit)
    going_on = ask.offset + count if ask.offset - 1 + count < len(names) else None
    note = "" if names else "[an empty directory]"
    if going_on is not None:
        note = f"[stopped after entry {going_on - 1} of {len(names)}; go on with offset {going_on}]"
    return _read_result(after(content, note), ReadResult(content=content, kind="directory", nextOffset=going_on))


@dataclass
class _Window:
    """Some lines of a file."""

    data: bytes
    lines: int
    more: bool
    torn: bool
    """The line is too long, and only its beginning is there."""
    head: bytes
    """How the file begins."""


async def _window(view: View, path: str, ask: Read) -> _Window:
    """The lines that were asked for, with bounded memory. No more of the file is read than that takes.

    Raises:
        InvalidRequest: there are not so many lines, or not within what is looked through.
    """
    if ask.offset == 1:
        begin = await view.sandbox.files.read_bytes(path, limit=BYTES + 1)
        return _cut(begin, ask.limit, begin[:64])
    head, kept = b"", bytearray()
    to_pass, passed, within, scanned = ask.offset - 1, 0, False, 0
    async with aclosing(view.sandbox.files.stream(path)) as pieces:
        async for piece in pieces:
            head = head or piece[:64]
            if passed < to_pass:
                scanned += len(piece)
                if scanned > SCAN_LIMIT_BYTES:
                    raise InvalidRequest(
                        f"line {ask.offset} of {ask.path} is not within its first {SCAN_LIMIT_BYTES >> 30} GiB; "
                        "use bash to look at parts of it"
                    )
                passed, start = _pass(piece, to_pass, passed)
                within = start < len(piece) if start else within or bool(piece)
                piece = piece[start:] if passed == to_pass else b""
            kept += piece
            # One line more than is shown tells that there is more.
            if len(kept) > BYTES or kept.count(b"\n") > ask.limit:
                break
    if passed < to_pass or not kept:
        lines = passed + (within and passed < to_pass)
        raise InvalidRequest(f"offset is {ask.offset}, and {ask.path} has {lines} lines")
    return _cut(bytes(kept), ask.limit, head)


def _pass(piece: bytes, wanted: int, passed: int) -> tuple[int, int]:
    """How many lines have been passed, and where in `piece` the last of those ended."""
    start = 0
    while passed < wanted and (end := piece.find(b"\n", start)) >= 0:
        passed, start = passed + 1, end + 1
    return passed, start


def _cut(kept: bytes, limit: int, head: bytes) -> _Window:
    end = lines = 0
    while end < len(kept) and lines < limit:
        newline = kept.find(b"\n", end)
        following = newline + 1 if newline >= 0 else len(kept)
        if following > BYTES:
            break
        end, lines = following, lines + 1
    torn = end == 0 and len(kept) > BYTES
    if torn:
        end, lines = BYTES, 1
    return _Window(kept[:end], lines, more=end < len(kept), torn=torn, head=head)


def _fitting(lines: list[str], limit: int = LINES) -> tuple[str, int]:
    """As many of these lines as a model is shown, and their number."""
    text: list[str] = []
    size = 0
    for line in lines[:limit]:
        size += len(line.encode("utf-8", "replace")) + 1
        if size > BYTES:
            break
        text.append(f"{line}\n")
    return "".join(text), len(text)


# ------------------------------------------------------------------------------------------------------- write and edit


class Write(Input):
    path: str = Field(min_length=1)
    """Missing directories are made."""
    content: str
    """All that the file will hold."""


class WriteResult(Result):
    path: str
    size: int
    """Bytes."""


async def _write(ask: Write, view: CodingView) -> ToolResult:
    size = await view.sandbox.files.write_text(await view.reach(ask.path), ask.content)
    result = WriteResult(path=ask.path, size=size).result()
    return result.model_copy(update={"content": readable(f"wrote {size} bytes to {ask.path}")})


class Edit(Input):
    path: str = Field(min_length=1)
    oldText: str = Field(min_length=1)
    """What is replaced: exactly as it stands in the file, and often enough quoted to be unique."""
    newText: str
    """What stands there afterwards."""
    replaceAll: bool = False
    """Replace every match instead of the only one."""


class EditResult(Result):
    path: str
    replacements: int


async def _edit(ask: Edit, view: CodingView) -> ToolResult:
    path = await view.reach(ask.path)
    files = view.sandbox.files
    async with view.suggesting(path):
        data = await files.read_bytes(path, limit=EDIT_LIMIT_BYTES + 1)
    if len(data) > EDIT_LIMIT_BYTES:
        raise InvalidRequest(f"{ask.path}: more than {EDIT_LIMIT_BYTES >> 20} MiB; use bash and sed")
    text = as_text(data)
    if text is None:
        raise InvalidRequest(f"{ask.path}: {media_type(data, path)}, which is no text; use bash")
    count = text.count(ask.oldText)
    if not count:
        raise InvalidRequest(
            f"{ask.path}: found 0 matches for oldText, so nothing was changed{_almost(text, ask.oldText)}"
        )
    if count > 1 and not ask.replaceAll:
        raise InvalidRequest(
            f"{ask.path}: found {count} matches for oldText, at lines {_places(text, ask.oldText)}, so nothing was "
            "changed; quote more of what is around the one that is meant, or set replaceAll to true"
        )
    await files.write_text(path, text.replace(ask.oldText, ask.newText))
    result = EditResult(path=ask.path, replacements=count).result()
    words = f"replaced {count} {'match' if count == 1 else 'matches'} in {ask.path}"
    return result.model_copy(update={"content": readable(words)})


def _places(text: str, wanted: str) -> str:
    lines: list[str] = []
    start = text.find(wanted)
    while start >= 0 and len(lines) < 8:
        lines.append(str(text.count("\n", 0, start) + 1))
        start = text.find(wanted, start + len(wanted))
    return ", ".join(lines) + (", …" if start >= 0 else "")


def _almost(text: str, wanted: str) -> str:
    """Where the text would match if white space did not count."""
    look_for = [line.split() for line in wanted.strip().split("\n")]
    lines = [line.split() for line in text.split("\n")]
    if len(look_for) <= 100:
        for number in range(len(lines) - len(look_for) + 1):
            if lines[number] == look_for[0] and lines[number : number + len(look_for)] == look_for:
                return f"; at line {number + 1} it differs in white space alone: read it, and quote it as it is"
    return "; read the file, and quote it exactly"


# --------------------------------------------------------------------------------------------------------------- bash


class Bash(Input):
    command: str = Field(min_length=1)
    timeout: float = Field(default=TIMEOUT_S, gt=0, le=3600)
    """Seconds until it is killed, with all that it started."""


class BashResult(Result):
    output: str
    """stdout and stderr, in the order in which they were written."""
    exitCode: int
    """124: it ran into its time limit."""
    cutBytes: int = 0
    """How much of the output is missing at its beginning."""


async def _bash(ask: Bash, view: CodingView) -> ToolResult:
    async with view.suggesting(view.cwd):
        try:
            done = await view.sandbox.exec_bytes(
                ["sh", "-c", IN_BASH, ask.command],
                cwd=view.cwd,
                timeout_s=ask.timeout,
                output_limit_bytes=2 * BYTES,
                on_output=report(),
            )
        except ExecTimeout as error:
            # As text, with a line in it that says what was left out where it was long.
            partial = error.result.stdout.encode()
            cut = error.result.stdout_cut
            note = f"[killed with all that it started: it did not end within {ask.timeout:g} s; exit code {TIMED_OUT}]"
            return _output(partial, len(partial) if cut is None else cut.total, TIMED_OUT, note)
    total = len(done.stdout) if done.stdout_cut is None else done.stdout_cut.total
    note = f"[exit code {done.exit_code}]" if done.exit_code else ""
    if done.out_of_memory:
        note = f"{OUT_OF_MEMORY}\n{note}"
    return _output(done.stdout, total, done.exit_code, note)


def _output(data: bytes, total: int, exit_code: int, note: str) -> ToolResult:
    if b"\0" in data:
        text, cut = shown(data, None), 0
    else:
        kept = _last(data)
        text, cut = kept.decode("utf-8", "replace"), total - len(kept)
    words = after(text, note) if note else text or "[no output]"
    if cut:
        note = f"[the first {cut} of {total} bytes are cut; send output to a file to keep all of it]"
        words = f"{note}\n{words}"
    result = BashResult(output=text, exitCode=exit_code, cutBytes=cut).result()
    return result.model_copy(update={"content": words})


def _last(data: bytes) -> bytes:
    """The last lines, as many as a model is shown."""
    start = max(0, len(data) - BYTES)
    if start:
        newline = data.find(b"\n", start - 1, -1)
        start = newline + 1 if newline >= 0 else len(data) - len(whole(data[start:], head=False))
    end = len(data)
    for _ in range(LINES + data.endswith(b"\n")):
        end = data.rfind(b"\n", start, end)
        if end < 0:
            return data[start:]
    return data[end + 1 :]


# ------------------------------------------------------------------------------------------------------ grep and glob


class Grep(Input):
    pattern: str = Field(min_length=1)
    """A POSIX extended regular expression."""
    path: str = Field(default=".", min_length=1)
    """A file, or a directory to be searched with all below it."""
    include: str = Field(default="*", min_length=1)
    """A glob that the files' names have to match."""


class Found(Result):
    path: str
    line: int
    text: str


class GrepResult(Result):
    matches: list[Found]
    truncated: bool = False
    """There are more."""


async def _grep(ask: Grep, view: CodingView) -> ToolResult:
    path = await view.reach(ask.path)
    async with view.suggesting(path):
        with searching():
            include = None if ask.include == "*" else ask.include
            found = await view.sandbox.files.grep(ask.pattern, path, include=include, limit=MATCHES)
    matches = [
        Found(path=ask.path if each.path == path else _below(ask.path, each.path), line=each.line, text=each.text)
        for each in found
    ]
    lines = [f"{each.path}:{each.line}: {each.text}" for each in matches]
    text, count = _fitting(lines)
    truncated = count < len(lines) or len(lines) == MATCHES
    result = GrepResult(matches=matches[:count], truncated=truncated).result()
    return _found(result, text, count, "matches", truncated=truncated)


class Glob(Input):
    pattern: str = Field(min_length=1)
    """`*`, `?` and `[…]` within a name, `**` for any number of directories, `{a,b}` for either."""
    path: str = Field(default=".", min_length=1)
    """Where to look."""


class GlobResult(Result):
    files: list[str]
    truncated: bool = False
    """There are more."""


async def _glob(ask: Glob, view: CodingView) -> ToolResult:
    path = await view.reach(ask.path)
    async with view.suggesting(path):
        with searching():
            found = await view.sandbox.files.glob(ask.pattern, cwd=path, limit=LINES)
            names = await _visible(view, path, [entry.name for entry in found])
    files = [_below(ask.path, name) for name in names]
    text, count = _fitting(files)
    truncated = count < len(files) or len(found) == LINES
    return _found(
        GlobResult(files=files[:count], truncated=truncated).result(), text, count, "files", truncated=truncated
    )


async def _visible(view: CodingView, path: str, names: list[str]) -> list[str]:
    """Those that are in the view: a pattern goes through symlinks to directories too."""
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


def _below(directory: str, name: str) -> str:
    return name if directory in {".", "./"} else f"{directory.rstrip('/')}/{name}"


def _found(result: ToolResult, text: str, count: int, what: str, *, truncated: bool) -> ToolResult:
    if truncated:
        text = after(text, f"[stopped after {count} {what}; there are more: ask for less]")
    return result.model_copy(update={"content": readable(text) or f"[no {what}]"})


# --------------------------------------------------------------------------------------------------------------- task


class Task(Input):
    prompt: str = Field(min_length=1)
    """All that the child is told: it has not seen this conversation."""
    role: str = Field(default="", min_length=1)
    cwd: str = Field(default=".", min_length=1)
    """The directory that the child works in and sees."""


class TaskResult(Result):
    id: str
    role: str
    status: Literal["completed"]
    output: str


async def _task(ask: Task, view: CodingView) -> ToolResult:
    tasks = view.tasks
    if tasks is None:
        raise InvalidRequest("this session can have no children")
    child = await view.child(ask.cwd)
    async with view.suggesting(child.cwd):
        if (await view.sandbox.files.stat(child.cwd)).kind != "directory":
            raise PathNotDirectory(f"{ask.cwd}: not a directory", number=20, path=ask.cwd)
    id = f"task-{secrets.token_hex(4)}"
    about = {"role": ask.role, "cwd": child.cwd, "depth": child.depth}
    tasks.on_event(TaskEvent(task=id, kind="started", data=about))
    status, output = "failed", None
    try:
        output = await _follow(tasks, id, ask, child)
        status = "cancelled" if output is None else "completed"
    except anyio.get_cancelled_exc_class():
        status = "cancelled"
        raise
    finally:
        tasks.on_event(TaskEvent(task=id, kind="ended", data={"status": status}))
    if output is None:
        raise InvalidRequest(f"the child session {id} was cancelled, or ended without saying anything")
    data = output.encode("utf-8", "replace")
    kept = _last(data)
    shown_output = kept.decode("utf-8", "replace")
    if len(kept) < len(data):
        shown_output = f"[the first {len(data) - len(kept)} bytes are cut]\n{shown_output}"
    result = TaskResult(id=id, role=ask.role, status="completed", output=shown_output).result()
    return result.model_copy(update={"content": f"[{id}, {ask.role}: completed]\n{shown_output}"})


async def _follow(tasks: Tasks, id: str, ask: Task, child: CodingView) -> str | None:
    """The output of a child, or None of one that was cancelled."""
    output = None
    with anyio.CancelScope() as scope:
        tasks.running[id] = scope
        try:
            session = tasks.runner.start(
                id=id, role=ask.role, prompt=ask.prompt, cwd=child.cwd, depth=child.depth, view=child
            )
            async with aclosing(session) as updates:
                async for update in updates:
                    if isinstance(update, TaskOutput):
                        output = update.output
                    else:
                        tasks.on_event(update.model_copy(update={"task": id}))
        finally:
            del tasks.running[id]
    return output


def _with_roles(roles: Mapping[str, str]) -> Tool:
    """`task`, with the roles that there are."""
    if not roles:
        raise InvalidRequest("a runner of child sessions needs at least one role")
    names = tuple(roles)
    about = "; ".join(f"{name}: {what}" for name, what in roles.items())
    roles_field: Any = (Literal[names], Field(default=names[0], description=about))
    model: type[Input] = create_model("Task", __base__=Task, role=roles_field)
    return replace(TASK, input=model)


# --------------------------------------------------------------------------------------------------------- vocabulary


def _file(ask: Read | Write | Edit, view: CodingView) -> Hashable:
    return view.place(ask.path)


_LOOKS = Hints(read_only=True, idempotent=True)
_CHANGES = Hints(destructive=True)

READ = Tool(
    "read",
    f"Read a text file by lines, or list a directory. Shows up to {_LIMITS} and says where it stopped.",
    Read,
    ReadResult,
    _read,
    hints=_LOOKS,
    turn=_file,
    vocabulary="coding",
)
WRITE = Tool(
    "write",
    "Write a text file, whole or not at all. What it held is replaced.",
    Write,
    WriteResult,
    _write,
    hints=Hints(destructive=True, idempotent=True),
    turn=_file,
    vocabulary="coding",
)
EDIT = Tool(
    "edit",
    "Replace text in a file. oldText has to match exactly, and only once unless replaceAll is set. Files of up to "
    f"{EDIT_LIMIT_BYTES >> 20} MiB.",
    Edit,
    EditResult,
    _edit,
    hints=_CHANGES,
    turn=_file,
    vocabulary="coding",
)
BASH = Tool(
    "bash",
    f"Run a command in bash, or in sh where there is none, and wait for its end. Shows the last {_LIMITS} of stdout "
    "and stderr together. A command that takes too long is exit code 124, with what it printed.",
    Bash,
    BashResult,
    _bash,
    hints=Hints(destructive=True, open_world=True),
    vocabulary="coding",
)
GREP = Tool(
    "grep",
    f"Find lines by a regular expression. Shows up to {MATCHES} matches and {BYTES // 1024} KB. Passes over binary and "
    f"hidden files. May take {SEARCH_S:g} s.",
    Grep,
    GrepResult,
    _grep,
    hints=_LOOKS,
    vocabulary="coding",
)
GLOB = Tool(
    "glob",
    f"Find files by a pattern of their names. Shows up to {_LIMITS}. Passes over names that begin with a dot. May take "
    f"{SEARCH_S:g} s.",
    Glob,
    GlobResult,
    _glob,
    hints=_LOOKS,
    vocabulary="coding",
)
TASK = Tool(
    "task",
    "Have a child session do a piece of work in this sandbox, and get its answer. It sees the files below cwd alone.",
    Task,
    TaskResult,
    _task,
    needs=frozenset({"tasks"}),
    hints=Hints(destructive=True, open_world=True),
    vocabulary="coding",
)
