"""Sandboxes as tools see them: a session's by their names, and one with paths from a directory on.

Knows what a model is told of errors in a session, how a path that it wrote is read, what a view that is scoped to a
directory refuses, when bytes are text, and how the output of a command is shown. Refuses to know any tool: the
vocabularies share this and nothing else.
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
from atoll.tools.tool import nearest, report

HOME = "/home/user"
TIMED_OUT = 124
"""The exit code of a command that ran too long, as `timeout` gives it."""
SEARCH_S = 60.0
OUTPUT_LIMIT_BYTES = 64 * 1024
"""What a model is shown of each stream of a command."""
MAX_SHOWN_LINES = 2000
MAX_SHOWN_BYTES = 50 * 1024
"""What the coding tools show of a file or an output in one result."""

_NEIGHBOURS = 1000
_LINKS = 40
"""Symlinks on the way to a file, as many as the kernel follows."""
_SNIFFED = 8192
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


class Session:
    """The sandboxes of a pool, which a model knows by their names in the session."""

    abilities = frozenset({"sandbox", "pool"})

    def __init__(self, pool: SandboxPool) -> None:
        self.pool = pool

    def explain(self, error: AtollError) -> str:
        """The error's message, with the nearest name, and without a word of other sessions."""
        prefix = f"{self.pool.session_id}."
        if isinstance(error, SandboxNotFound):
            if error.name.startswith(prefix):  # asked of the runtime, which knows the sandboxes of all
                return f"the sandbox {error.name.removeprefix(prefix)!r} is gone"
            return f"{error.message}{nearest(error.name, error.known)}"
        return error.message.replace(f"'{prefix}", "'")


# ----------------------------------------------------------------------------------------------------------- paths


@dataclass(frozen=True)
class View:
    """A sandbox, seen from a directory. With `scoped`, file tools see nothing outside of it.

    A scope keeps work where it belongs, symlinks included. It is no wall: commands run in the same sandbox, as the same
    user.
    """

    sandbox: Sandbox
    cwd: str = HOME
    scoped: bool = False

    def path(self, path: str) -> str:
        """The absolute path that is meant.

        Raises:
            InvalidRequest: it is empty, or `~`, which nobody expands.
            PathDenied: it leads out of the scope.
        """
        if not path:
            raise InvalidRequest(f"the path is empty; '.' is {self.cwd}")
        if path == "~" or path.startswith("~/"):
            raise InvalidRequest(f"{path}: '~' is not expanded; the home is {HOME}, and './{path}' a file of that name")
        joined = posixpath.join(self.cwd, path)
        if not self.scoped:
            return joined
        # What is asked of the sandbox has to be what was judged: `..` behind a symlink leads elsewhere.
        plain = posixpath.normpath(joined)
        if plain != self.cwd and not plain.startswith(self.cwd.rstrip("/") + "/"):
            raise PermissionDenied(
                f"{path}: outside of {self.cwd}, which is all that this session sees", number=1, path=path
            )
        return plain

    async def reach(self, path: str) -> str:
        """`path`, and in a scoped view the one that symlinks lead to.

        Raises:
            InvalidRequest, PathDenied: as `path`, for each symlink on the way.
        """
        meant = self.path(path)
        if not self.scoped:
            return meant
        for _ in range(_LINKS):
            following = await self._follow(meant)
            if following is None:
                return meant
            meant = self.path(following)
        raise InvalidRequest(f"{path}: too many symlinks")

    async def _follow(self, path: str) -> str | None:
        """Where the first symlink on the way from the scope's top leads. None: there is none."""
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

    def place(self, path: str) -> tuple[str, str]:
        """What two paths have in common that name the same file in other words: for taking turns."""
        return self.sandbox.id, posixpath.normpath(posixpath.join(self.cwd, path))

    @asynccontextmanager
    async def suggesting(self, path: str) -> AsyncIterator[None]:
        """Add to the error about a path that is not there what is there instead."""
        try:
            yield
        except PathNotFound as error:
            raise PathNotFound(f"{error.message}{await self._near(path)}", number=error.errno or 2, path=path) from None

    async def _near(self, path: str) -> str:
        parent, name = posixpath.split(posixpath.normpath(path))
        with contextlib.suppress(AtollError):
            entries = await self.sandbox.files.glob("*", cwd=parent, hidden=True, limit=_NEIGHBOURS)
            names = [entry.name for entry in entries]
            if guess := nearest(name, names):
                return guess
            few = ", ".join(repr(each) for each in names[:8])
            return f"; {parent} holds {few}{', …' if len(names) > 8 else ''}" if names else f"; {parent} is empty"
        return f"; there is no directory {parent} either"


@contextlib.contextmanager
def searching() -> Iterator[None]:
    """For what walks through directories: a tree has any size, and a model does not know how long it has waited.

    Raises:
        InvalidRequest: it took too long.
    """
    try:
        with anyio.fail_after(SEARCH_S):
            yield
    except TimeoutError:
        raise InvalidRequest(f"the search did not end within {SEARCH_S:g} s; look in a smaller directory") from None


# ------------------------------------------------------------------------------------------------------------ text


def as_text(data: bytes, *, head: bool = True, tail: bool = True) -> str | None:
    """`data` as text, or None where it is none. `head` and `tail` say whether it begins and ends where a text does:
    where not, up to three bytes of a character that was torn there are dropped."""
    data = whole(data, head=head, tail=tail)
    if b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def whole(data: bytes, *, head: bool = True, tail: bool = True) -> bytes:
    """`data` without the parts of characters that were torn at its ends."""
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
    """What bytes that are no text are, by how they begin or, failing that, by the name of their file."""
    for magic, kind in _MAGIC:
        if data.startswith(magic):
            return kind
    return mimetypes.guess_type(name)[0] or "application/octet-stream"


# ----------------------------------------------------------------------------------------------------------- output


@dataclass(frozen=True)
class Ran:
    """A command that has ended, and its output as a model is shown it."""

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
) -> Ran:
    """Run a command to its end. A time-out is exit code 124, with what was printed until then.

    Raises:
        PathNotFound, PathNotDirectory, PathDenied: `cwd` cannot be used.
        and what `Sandbox.exec` raises besides.
    """
    try:
        done = await sandbox.exec_bytes(
            command,
            cwd=cwd,
            timeout_s=timeout_s,
            env=env,
            output_limit_bytes=OUTPUT_LIMIT_BYTES,
            on_output=report(),
        )
    except ExecTimeout as error:
        note = f"[killed with all that it started: it did not end within {timeout_s:g} s]"
        return Ran(
            shown(error.result.stdout.encode(), None),
            after(shown(error.result.stderr.encode(), None), note),
            TIMED_OUT,
            error.result.duration_s,
        )
    stderr = shown(done.stderr, done.stderr_cut)
    if done.out_of_memory:
        stderr = after(stderr, OUT_OF_MEMORY)
    return Ran(shown(done.stdout, done.stdout_cut), stderr, done.exit_code, done.duration_s)


OUT_OF_MEMORY = "[killed: the sandbox's memory limit was reached]"


def after(text: str, note: str) -> str:
    """`text`, and a note on a line of its own, if there is one."""
    if not note or not text:
        return text + note
    return f"{text}{note}" if text.endswith("\n") else f"{text}\n{note}"


def shown(data: bytes, cut: Truncation | None) -> str:
    """The output of a command as text. What is no text is told instead, with its size."""
    if b"\0" in data:
        total = len(data) if cut is None else cut.total
        return f"[binary output, {total} bytes, {media_type(data)}: not shown; send it to a file to keep it]"
    if cut is None:
        return data.decode("utf-8", "replace")
    head, tail = whole(data[: cut.start], tail=False), whole(data[cut.start :], head=False)
    note = f"[{cut.bytes} of {cut.total} bytes left out here: send output to a file and read it in parts]"
    return f"{after(head.decode('utf-8', 'replace'), note)}\n{tail.decode('utf-8', 'replace')}"


def last_lines(data: bytes) -> bytes:
    """The last lines of `data`, at most `MAX_SHOWN_LINES` and `MAX_SHOWN_BYTES`."""
    start = max(0, len(data) - MAX_SHOWN_BYTES)
    if start:
        newline = data.find(b"\n", start - 1, -1)
        start = newline + 1 if newline >= 0 else len(data) - len(whole(data[start:], head=False))
    end = len(data)
    for _ in range(MAX_SHOWN_LINES + data.endswith(b"\n")):
        end = data.rfind(b"\n", start, end)
        if end < 0:
            return data[start:]
    return data[end + 1 :]
