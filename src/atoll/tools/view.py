"""What the vocabularies share: sandboxes as tools see them.

Owns the errors of a session as a model sees them (`PoolContext`), how a path from a model is resolved and what a view
that is scoped to a directory refuses (`View`), which bytes are text, and how the output of a command is shown. Not
here: any tool. Used by `pool.py`, `coding.py`, `tasks.py`, `sprites.py` and, for resources, by the MCP server.
"""

from __future__ import annotations

import codecs
import contextlib
import mimetypes
import posixpath
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
MAX_OUTPUT_BYTES = 64 * 1024
"""How much of stdout, and of stderr, of a command a model is shown."""
MAX_SHOWN_LINES = 2000
MAX_SHOWN_BYTES = 50 * 1024
"""What the coding tools show of a file or an output in one result."""

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


async def run(
    sandbox: Sandbox,
    command: str | Sequence[str],
    *,
    cwd: str | None,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    on_output: OnOutput | None = None,
) -> CommandOutput:
    """Run a command and wait for its end. A time-out is exit code 124, with the output until then.

    Raises:
        PathNotFound, PathNotDirectory, PermissionDenied: `cwd` cannot be used.
        and what else `Sandbox.exec` raises.
    """
    try:
        done = await sandbox.exec_bytes(
            command,
            cwd=cwd,
            timeout_s=timeout_s,
            env=env,
            output_limit_bytes=MAX_OUTPUT_BYTES,
            on_stdout=on_output,
            on_stderr=on_output,
        )
    except ExecTimeout as error:
        note = f"[timed out after {timeout_s:g} s: killed with all processes that it started]"
        return CommandOutput(
            output_text(error.result.stdout.encode(), None),
            with_note(output_text(error.result.stderr.encode(), None), note),
            TIMED_OUT_EXIT_CODE,
            error.result.duration_s,
        )
    stderr = output_text(done.stderr, done.stderr_truncation)
    if done.out_of_memory:
        stderr = with_note(stderr, OUT_OF_MEMORY)
    return CommandOutput(output_text(done.stdout, done.stdout_truncation), stderr, done.exit_code, done.duration_s)


OUT_OF_MEMORY = "[killed: the sandbox's memory limit was reached]"


def with_note(text: str, note: str) -> str:
    """`text` followed by a note on a line of its own."""
    if not note or not text:
        return text + note
    return f"{text}{note}" if text.endswith("\n") else f"{text}\n{note}"


def output_text(data: bytes, cut: Truncation | None) -> str:
    """The output of a command as text. Binary output is replaced by a note with its size and type."""
    if b"\0" in data:
        total = len(data) if cut is None else cut.total
        return f"[binary output, {total} bytes, {media_type(data)}: not shown; redirect it to a file to keep it]"
    if cut is None:
        return data.decode("utf-8", "replace")
    head, tail = complete_characters(data[: cut.start], tail=False), complete_characters(data[cut.start :], head=False)
    note = f"[{cut.bytes} of {cut.total} bytes left out here: redirect output to a file and read it in parts]"
    return f"{with_note(head.decode('utf-8', 'replace'), note)}\n{tail.decode('utf-8', 'replace')}"


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
