"""What the vocabularies share: sandboxes as tools see them.

Owns the errors of a session as a model sees them (`PoolContext`), how a path from a model is resolved and what a view
that is scoped to a directory refuses (`View`), which bytes are text, and how the output of a command is shown. Not
here: any tool. Used by `pool.py`, `coding.py`, `tasks.py`, `sprites.py` and, for resources, by the MCP server.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import mimetypes
import posixpath
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

from atoll.contract.errors import (
    AtollError,
    ExecTimeout,
    InvalidRequest,
    PathNotDirectory,
    PathNotFound,
    PermissionDenied,
    SandboxNotFound,
)
from atoll.contract.model import Truncation
from atoll.runtime.sandbox import Sandbox
from atoll.runtime.sandbox_pool import SandboxPool
from atoll.tools.tool import OnOutput, nearest

HOME = "/home/user"
TIMED_OUT_EXIT_CODE = 124
"""The exit code of a command that timed out, as with `timeout`(1)."""
MAX_SEARCH_S = 60.0
MAX_SHOWN_LINES = 2000
MAX_SHOWN_BYTES = 30_000
"""What a model is shown of a file or an output in one result: about 8,000 tokens."""
MAX_CAPTURED_BYTES = 1024 * 1024
"""How much of a stream is kept of a command. What is not shown of it is saved in the sandbox."""
OUTPUT_DIRECTORY = "/tmp/tool-output"
_MAX_SAVED_OUTPUTS = 50
"""Saved outputs of one program. The next one replaces the oldest."""

SHELL_FACTS = (
    "Each call is a new shell: cd, export and shell variables do not carry over; files do. There is no standard input "
    "and no terminal. A command that takes longer than {timeout} ({seconds} unless you raise it) is killed with all "
    "that it started, and is exit code 124. To leave a server running, start it in the background with its output in a "
    "file: `server >server.log 2>&1 &`. Of long output the head and tail are shown, "
    f"{MAX_SHOWN_BYTES // 1000} KB in all, and the rest is saved in a file that is named."
)
"""What a model has to know of a tool that runs commands."""

_MAX_NEIGHBOURS = 1000
_MAX_SYMLINKS = 40
"""Symlinks on the way to a file, as many as the kernel follows."""
_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"%PDF-", "application/pdf"),
    (b"PK\x03\x04", "application/zip"),
    (b"\x1f\x8b", "application/gzip"),
    (b"\x28\xb5\x2f\xfd", "application/zstd"),
    (b"\xfd7zXZ\x00", "application/x-xz"),
    (b"BZh", "application/x-bzip2"),
    (b"\x7fELF", "application/x-executable"),
    (b"SQLite format 3\x00", "application/vnd.sqlite3"),
    (b"\x00asm", "application/wasm"),
)


# ---------------------------------------------------------------------------------------------------------- sessions


class PoolContext:
    """A tool context over the sandboxes of a pool, which a model knows by their names in the session."""

    abilities = frozenset({"sandbox", "pool"})

    def __init__(self, pool: SandboxPool) -> None:
        self.pool = pool

    def explain(self, error: AtollError) -> str:
        """The error's message, with the most similar name. It names nothing of other sessions."""
        prefix = f"{self.pool.session_id}."
        if isinstance(error, SandboxNotFound):
            if error.name.startswith(prefix):  # from the engine, which knows the sandboxes of all sessions
                return f"the sandbox {error.name.removeprefix(prefix)!r} is gone"
            return f"{error.message}{nearest(error.name, error.known)}"
        return error.message.replace(f"'{prefix}", "'")


# ----------------------------------------------------------------------------------------------------------- paths


def start_directory(sandbox: Sandbox) -> str:
    """Where the tools start in a sandbox: in its own directory, else in the home of `user`."""
    return sandbox.info.cwd or HOME


def last_name(path: str) -> str:
    """A key for `Tool.serialize_by` that is the same for all spellings of a path, wherever relative ones begin: the
    sandbox, which knows that, may not exist yet."""
    return posixpath.basename(posixpath.normpath(posixpath.join(HOME, path)))


@dataclass(frozen=True)
class View:
    """A sandbox and a working directory. With `scoped`, file tools refuse paths outside of the directory, also through
    symlinks.

    A scope prevents mistakes. It is not a security boundary: commands run in the same sandbox, as the same user.
    """

    sandbox: Sandbox
    cwd: str
    scoped: bool = False

    @classmethod
    def whole(cls, sandbox: Sandbox) -> View:
        """A view that is not scoped, of a sandbox from the directory in which its commands start."""
        return cls(sandbox, start_directory(sandbox))

    def path(self, path: str) -> str:
        """Resolve a path to an absolute one.

        Raises:
            InvalidRequest: it is empty, or begins with `~`, which is not expanded.
            PermissionDenied: it is outside of the scope.
        """
        if not path:
            raise InvalidRequest(f"the path is empty; '.' is {self.cwd}")
        if path == "~" or path.startswith("~/"):
            raise InvalidRequest(
                f"{path}: '~' is not expanded; the home directory is {HOME}; './{path}' is a file of that name"
            )
        joined = posixpath.join(self.cwd, path)
        if not self.scoped:
            return joined
        # The sandbox must get the path that was checked: `..` after a symlink leads elsewhere.
        plain = posixpath.normpath(joined)
        if plain != self.cwd and not plain.startswith(self.cwd.rstrip("/") + "/"):
            raise PermissionDenied(
                f"{path}: outside of {self.cwd}, the only directory that this agent may use", number=1, path=path
            )
        return plain

    async def reach(self, path: str) -> str:
        """Resolve a path as `path` does and, in a scoped view, follow its symlinks.

        Raises:
            InvalidRequest, PermissionDenied: as `path`, for each symlink on the way.
        """
        resolved = self.path(path)
        if not self.scoped:
            return resolved
        for _ in range(_MAX_SYMLINKS):
            following = await self._follow_symlink(resolved)
            if following is None:
                return resolved
            resolved = self.path(following)
        raise InvalidRequest(f"{path}: more than {_MAX_SYMLINKS} symlinks on the way")

    async def _follow_symlink(self, path: str) -> str | None:
        """Where the first symlink below the scope's directory leads. None: there is none."""
        at = self.cwd
        parts = posixpath.relpath(path, self.cwd).split("/")
        for number, part in enumerate(parts, 1):
            try:
                status = await self.sandbox.files.stat(posixpath.join(at, part), follow=False)
            except (PathNotFound, PathNotDirectory):
                return None
            if status.target is not None:
                return posixpath.join(at, status.target, *parts[number:])
            at = posixpath.join(at, part)
        return None

    def file_key(self, path: str) -> tuple[str, str]:
        """A key for `Tool.serialize_by`: the same for all spellings of a path."""
        return self.sandbox.id, posixpath.normpath(posixpath.join(self.cwd, path))

    @asynccontextmanager
    async def suggesting(self, path: str) -> AsyncIterator[None]:
        """Add to a 'not found' error for this path the most similar name, or what the directory contains."""
        try:
            yield
        except PathNotFound as error:
            raise PathNotFound(
                f"{error.message}{await self._suggestion(path)}", number=error.errno or 2, path=path
            ) from None

    async def _suggestion(self, path: str) -> str:
        parent, name = posixpath.split(posixpath.normpath(path))
        with contextlib.suppress(AtollError):
            entries = await self.sandbox.files.glob("*", cwd=parent, hidden=True, limit=_MAX_NEIGHBOURS)
            names = [entry.name for entry in entries]
            if guess := nearest(name, names):
                return guess
            few = ", ".join(repr(each) for each in names[:8])
            return f"; {parent} contains {few}{', …' if len(names) > 8 else ''}" if names else f"; {parent} is empty"
        return f"; the directory {parent} does not exist either"


@contextlib.contextmanager
def searching() -> Iterator[None]:
    """Limit the time of a search: a directory tree has any size, and a model cannot see how long it has waited.

    Raises:
        InvalidRequest: the search took longer than `MAX_SEARCH_S`.
    """
    try:
        with anyio.fail_after(MAX_SEARCH_S):
            yield
    except TimeoutError:
        raise InvalidRequest(f"the search timed out after {MAX_SEARCH_S:g} s; search a smaller directory") from None


# ------------------------------------------------------------------------------------------------------------ text


def as_text(data: bytes, *, head: bool = True, tail: bool = True) -> str | None:
    """`data` as text, or None if it is not UTF-8 or contains NUL. `head` and `tail` say whether `data` begins and ends
    where the whole text does; where not, up to three bytes of an incomplete character are dropped."""
    data = complete_characters(data, head=head, tail=tail)
    if b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def complete_characters(data: bytes, *, head: bool = True, tail: bool = True) -> bytes:
    """`data` without incomplete UTF-8 characters at its beginning (unless `head`) and its end (unless `tail`)."""
    if not head:
        skip = 0
        while skip < min(3, len(data)) and data[skip] & 0xC0 == 0x80:
            skip += 1
        data = data[skip:]
    if not tail:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(data[-4:])
        data = data[: len(data) - len(decoder.getstate()[0])]
    return data


def media_type(data: bytes, name: str = "") -> str:
    """The media type of binary data, by its first bytes or else by the name of the file."""
    for magic, kind in _MAGIC:
        if data.startswith(magic):
            return kind
    return mimetypes.guess_type(name)[0] or "application/octet-stream"


# ----------------------------------------------------------------------------------------------------------- output


@dataclass(frozen=True)
class CommandOutput:
    """The result of a command, with its output as a model is shown it."""

    stdout: str
    stderr: str
    exit_code: int
    duration_s: float
    cut_bytes: int
    """How many bytes of both streams are not shown."""
    note: str
    """What is to be said of its end: that it timed out, or reached the memory limit. Empty: nothing."""

    @property
    def text(self) -> str:
        """All of it, as a terminal would show it: stdout, then stderr, then how it ended."""
        text = self.stdout
        if self.stderr:
            text = with_note(text, f"[stderr]\n{self.stderr}") if text else self.stderr
        text = with_note(text, self.note)
        if self.exit_code:
            text = with_note(text, f"[exit code {self.exit_code}]")
        return text or "[no output]"


@dataclass(frozen=True)
class _OutputStream:
    """What was captured of stdout or stderr."""

    data: bytes
    truncation: Truncation | None

    @property
    def total(self) -> int:
        return len(self.data) if self.truncation is None else self.truncation.total

    def saved(self) -> bytes:
        """For a file: with a line where something is missing."""
        cut = self.truncation
        if cut is None:
            return self.data
        return b"%b\n[%d bytes left out here]\n%b" % (self.data[: cut.start], cut.bytes, self.data[cut.start :])

    def shown(self, room: int, advice: str) -> tuple[str, int]:
        """At most `room` bytes of it, head and tail, as text, and how many are left out. Binary output is replaced by a
        note with its size and type."""
        if b"\0" in self.data:
            about = f"[binary output, {self.total} bytes, {media_type(self.data)}: not shown; {_TO_FILE}]"
            return about, self.total
        if self.truncation is None and len(self.data) <= room:
            return self.data.decode("utf-8", "replace"), 0
        start = room // 2 if self.truncation is None else min(room // 2, self.truncation.start)
        head, tail = self.data[:start], self.data[len(self.data) - room // 2 :]
        # Whole lines, unless they are long.
        if (newline := head.rfind(b"\n", len(head) // 2)) >= 0:
            head = head[: newline + 1]
        if (newline := tail.find(b"\n", 0, len(tail) // 2)) >= 0:
            tail = tail[newline + 1 :]
        head, tail = complete_characters(head, tail=False), complete_characters(tail, head=False)
        left_out = self.total - len(head) - len(tail)
        note = f"[{left_out} of {self.total} bytes left out here: {advice}]"
        return f"{with_note(head.decode('utf-8', 'replace'), note)}\n{tail.decode('utf-8', 'replace')}", left_out


async def run(
    sandbox: Sandbox,
    command: str | Sequence[str],
    *,
    cwd: str | None,
    timeout_s: float,
    timeout_name: str = "the time-out",
    user: str | None = None,
    env: Mapping[str, str] | None = None,
    merge_stderr: bool = False,
    on_output: OnOutput | None = None,
) -> CommandOutput:
    """Run a command and wait for its end. A time-out is exit code 124, with the output until then.

    Of both streams together, `MAX_SHOWN_BYTES` are returned. A stream that is cut is saved in the sandbox, and the text
    says where.

    Raises:
        PathNotFound, PathNotDirectory, PermissionDenied: `cwd` cannot be used.
        and what else `Sandbox.exec` raises.
    """
    try:
        done = await sandbox.exec_bytes(
            command,
            cwd=cwd,
            timeout_s=timeout_s,
            user=user,
            env=env,
            merge_stderr=merge_stderr,
            output_limit_bytes=MAX_CAPTURED_BYTES,
            on_stdout=on_output,
            on_stderr=on_output,
        )
    except ExecTimeout as error:
        ended = error.result
        note = f"[timed out after {timeout_s:g} s: killed with all processes that it started; raise {timeout_name} if "
        note += "it needs longer, or start it in the background with its output in a file]"
        # It is text, with a line that says how much was cut where it was long.
        streams = [_OutputStream(text.encode(), None) for text in (ended.stdout, ended.stderr)]
        return await _command_output(sandbox, streams, TIMED_OUT_EXIT_CODE, ended.duration_s, note)
    streams = [_OutputStream(done.stdout, done.stdout_truncation), _OutputStream(done.stderr, done.stderr_truncation)]
    note = OUT_OF_MEMORY if done.out_of_memory else ""
    return await _command_output(sandbox, streams, done.exit_code, done.duration_s, note)


async def _command_output(
    sandbox: Sandbox, streams: list[_OutputStream], exit_code: int, duration_s: float, note: str
) -> CommandOutput:
    out, err = streams
    rooms = [MAX_SHOWN_BYTES, MAX_SHOWN_BYTES]
    if out.total + err.total > MAX_SHOWN_BYTES:
        # stderr has a third at least, because it says what failed.
        rooms[1] = min(err.total, max(MAX_SHOWN_BYTES // 3, MAX_SHOWN_BYTES - out.total))
        rooms[0] = MAX_SHOWN_BYTES - rooms[1]
    texts, cut = [], 0
    for stream, room in zip(streams, rooms, strict=True):
        advice = _TO_FILE
        if stream.total > room and b"\0" not in stream.data:
            advice = await _save(sandbox, stream) or _TO_FILE
        text, left_out = stream.shown(room, advice)
        texts.append(text)
        cut += left_out
    return CommandOutput(texts[0], texts[1], exit_code, duration_s, cut, note)


async def _save(sandbox: Sandbox, stream: _OutputStream) -> str | None:
    """Save an output in the sandbox. Returns where it is, in words, or None if it could not be written."""
    path = f"{OUTPUT_DIRECTORY}/{next(_SAVED_NAMES)}.txt"
    try:
        await sandbox.files.write_bytes(path, stream.saved())
    except AtollError:  # its disk is full, or it has just ended
        return None
    if stream.truncation is None:
        return f"all of it is in {path}"
    return f"its first and last {MAX_CAPTURED_BYTES // 2 // 1024} KiB are in {path}; {_TO_FILE}"


_SAVED_NAMES = (
    f"{program}-{number}"
    for program in [secrets.token_hex(2)]
    for number in itertools.cycle(range(1, _MAX_SAVED_OUTPUTS + 1))
)
"""Names for saved outputs. Other programs that use the same sandbox have others."""
_TO_FILE = "redirect output to a file to keep all of it"
OUT_OF_MEMORY = "[killed: the sandbox's memory limit was reached]"


def with_note(text: str, note: str) -> str:
    """`text` followed by a note on a line of its own."""
    if not note or not text:
        return text + note
    return f"{text}{note}" if text.endswith("\n") else f"{text}\n{note}"


def last_lines(data: bytes) -> bytes:
    """The last lines of `data`, at most `MAX_SHOWN_LINES` and `MAX_SHOWN_BYTES`."""
    start = max(0, len(data) - MAX_SHOWN_BYTES)
    if start:
        newline = data.find(b"\n", start - 1, -1)
        start = newline + 1 if newline >= 0 else len(data) - len(complete_characters(data[start:], head=False))
    end = len(data)
    for _ in range(MAX_SHOWN_LINES + data.endswith(b"\n")):
        end = data.rfind(b"\n", start, end)
        if end < 0:
            return data[start:]
    return data[end + 1 :]
