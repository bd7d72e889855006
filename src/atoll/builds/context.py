"""The files of a build: a directory of this machine, of which steps copy parts.

Owns which files there are (`.dockerignore`), which of them a pattern means, what identifies their content, and the tar
of them. Symlinks are copied as such and never followed, so nothing outside of the directory is read. Not here: archives
that others made (`uploads.py`).
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tarfile
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import anyio.to_thread

from atoll.contract.errors import BuildFailed

MAX_CONTEXT_FILES = 100_000
MAX_CONTEXT_BYTES = 8 * 1024**3
IGNORE_FILE = ".dockerignore"
_MAX_IGNORE_BYTES = 256 * 1024
_MAX_DEPTH = 128
_CHUNK_BYTES = 256 * 1024
_CHUNKS = 16


class ContextFile(NamedTuple):
    """A file, a directory or a symlink of the context, by its name relative to it."""

    name: str
    mode: int
    size: int
    mtime: float
    target: str = ""


class BuildContext:
    """A directory. What of it is packed is remembered, and its files are read when they are copied."""

    def __init__(self, directory: Path) -> None:
        """
        Raises:
            BuildFailed: it is not a directory, or its `.dockerignore` cannot be read.
        """
        if not directory.is_dir():
            raise BuildFailed(f"{directory} is not a directory")
        self._root = directory.resolve()
        self._ignored = IgnorePatterns(_read_ignore_file(self._root))
        self._packed: dict[str, tuple[ContextFile, ...]] = {}

    @cached_property
    def _files(self) -> dict[str, ContextFile]:
        found: dict[str, ContextFile] = {}
        size = 0
        for each in self._walk("", 0):
            found[each.name] = each
            size += each.size
            if len(found) > MAX_CONTEXT_FILES or size > MAX_CONTEXT_BYTES:
                raise BuildFailed(
                    f"{self._root} has more than {MAX_CONTEXT_FILES} files or {MAX_CONTEXT_BYTES >> 30} GiB; name what "
                    f"a build does not need in {IGNORE_FILE}"
                )
        return found

    def _walk(self, below: str, depth: int) -> Iterator[ContextFile]:
        if depth > _MAX_DEPTH:
            raise BuildFailed(f"{below[:200]} is more than {_MAX_DEPTH} directories deep")
        with os.scandir(self._root / below) as entries:
            listed = sorted(entries, key=lambda each: each.name)
        for entry in listed:
            name = f"{below}/{entry.name}" if below else entry.name
            ignored = self._ignored.match(name)
            is_directory = entry.is_dir(follow_symlinks=False)
            if not ignored:
                seen = entry.stat(follow_symlinks=False)
                kept = seen.st_mode & (stat.S_IFMT(seen.st_mode) | 0o777)
                if entry.is_symlink():
                    yield ContextFile(name, kept, 0, seen.st_mtime, os.readlink(entry.path))
                elif is_directory:
                    yield ContextFile(name, kept, 0, seen.st_mtime)
                elif stat.S_ISREG(seen.st_mode):
                    yield ContextFile(name, kept, seen.st_size, seen.st_mtime)
            if is_directory and (not ignored or self._ignored.has_exceptions):
                yield from self._walk(name, depth + 1)

    def pack(self, patterns: Sequence[str], excluded: Sequence[str] = ()) -> tuple[str, tuple[str, ...]]:
        """Choose files by patterns. Returns what the archive of them is called, which is made of their names, modes and
        contents, and the names that the patterns mean.

        Raises:
            BuildFailed: a pattern matches nothing, or leads outside.
        """
        names: list[str] = []
        for pattern in patterns:
            found = self._match(pattern)
            if not found:
                raise BuildFailed(
                    f"{pattern!r} matches no file of {self._root}, or {IGNORE_FILE} leaves all of them out"
                )
            names += [each for each in found if each not in names]
        without = IgnorePatterns(excluded)
        chosen = {
            file.name: file
            for name in names
            for file in self._below(name)
            if not (without.patterns and without.match(file.name))
        }
        files = tuple(chosen[name] for name in sorted(chosen))
        digest = hashlib.sha256()
        for file in files:
            digest.update(f"{len(file.name.encode())} {file.name} {file.mode:o} {file.size} {file.target!r}\n".encode())
            if stat.S_ISREG(file.mode):
                for chunk in self._read(file):
                    digest.update(chunk)
        self._packed[digest.hexdigest()] = files
        return digest.hexdigest(), tuple(names)

    def _match(self, pattern: str) -> list[str]:
        parts = [part for part in pattern.split("/") if part not in ("", ".")]
        if not pattern:
            raise BuildFailed("a source of a copy is empty; is a variable not set?")
        if ".." in parts:
            raise BuildFailed(f"{pattern!r} leads outside of {self._root}, which is all that a build can copy")
        if not parts:
            return ["."]
        wanted = re.compile(_glob("/".join(parts)), re.DOTALL)
        return [name for name in self._files if wanted.fullmatch(name)]

    def _below(self, name: str) -> Iterator[ContextFile]:
        if name == ".":
            yield from self._files.values()
            return
        yield self._files[name]
        if stat.S_ISDIR(self._files[name].mode):
            yield from (file for other, file in self._files.items() if other.startswith(f"{name}/"))

    # ------------------------------------------------------------------------------------------ as `ArchiveSource`

    def digest(self, archive: str) -> str:
        """What identifies the content of an archive: its name does."""
        return archive

    async def read(self, archive: str) -> AsyncIterator[bytes]:
        """The bytes of an archive that was packed: a tar."""
        pieces = self._tar(self._packed[archive])
        while piece := await anyio.to_thread.run_sync(lambda: b"".join(islice(pieces, _CHUNKS))):
            yield piece

    def _tar(self, files: Sequence[ContextFile]) -> Iterator[bytes]:
        for file in files:
            info = tarfile.TarInfo(file.name)
            info.mode, info.mtime = stat.S_IMODE(file.mode), int(file.mtime)
            if stat.S_ISLNK(file.mode):
                info.type, info.linkname = tarfile.SYMTYPE, file.target
            elif stat.S_ISDIR(file.mode):
                info.type = tarfile.DIRTYPE
            else:
                info.size = file.size
            try:
                yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
            except UnicodeEncodeError:
                raise BuildFailed(f"the name {file.name!r} is not UTF-8; leave it out with {IGNORE_FILE}") from None
            if info.size:
                yield from self._read(file)
                yield b"\0" * (-info.size % tarfile.BLOCKSIZE)
        yield b"\0" * (2 * tarfile.BLOCKSIZE)

    def _read(self, file: ContextFile) -> Iterator[bytes]:
        try:
            fd = os.open(self._root / file.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise BuildFailed(f"{file.name} cannot be read: {error.strerror}") from None
        left = file.size
        with open(fd, "rb", buffering=0) as opened:
            while left:
                chunk = opened.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    raise BuildFailed(f"{file.name} became shorter while it was read")
                left -= len(chunk)
                yield chunk


class IgnorePatterns:
    """Patterns as in `.dockerignore`: the last that matches a name, or one above it, decides; `!` lets it in."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.patterns: list[tuple[re.Pattern[str], bool]] = []
        for line in lines:
            text = line.strip()
            lets_in = text.startswith("!")
            parts = [part for part in text.removeprefix("!").strip().split("/") if part not in ("", ".")]
            if text.startswith("#") or not parts:
                continue
            self.patterns.append((re.compile(_glob("/".join(parts)), re.DOTALL), lets_in))
        self.has_exceptions = any(lets_in for _, lets_in in self.patterns)

    def match(self, name: str) -> bool:
        """Whether a name is left out."""
        parts = name.split("/")
        above = ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        ignored = False
        for pattern, lets_in in self.patterns:
            if ignored == lets_in and any(pattern.fullmatch(each) for each in above):
                ignored = not lets_in
        return ignored


def _glob(pattern: str) -> str:
    """A regular expression for a pattern: `*`, `?` and `[…]` within a name, `**` any number of directories."""
    said, at = "", 0
    while at < len(pattern):
        if pattern.startswith("**/", at):
            said, at = said + "(?:.*/)?", at + 3
        elif pattern.startswith("**", at):
            said, at = said + ".*", at + 2
        elif pattern[at] == "*":
            said, at = said + "[^/]*", at + 1
        elif pattern[at] == "?":
            said, at = said + "[^/]", at + 1
        elif found := re.compile(r"\[(\^?)([^\]/]+)\]").match(pattern, at):
            inside = re.sub(r"([\\\[&~|])", r"\\\1", found[2])
            said, at = said + f"[{found[1]}{inside}]", found.end()
        else:
            at += pattern[at] == "\\" and at + 1 < len(pattern)
            said, at = said + re.escape(pattern[at]), at + 1
    try:
        re.compile(said)
    except re.error:
        raise BuildFailed(f"{pattern!r} is not a pattern") from None
    return said


def _read_ignore_file(root: Path) -> list[str]:
    try:
        fd = os.open(root / IGNORE_FILE, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BuildFailed(f"{root / IGNORE_FILE} cannot be read: {error.strerror}") from None
    with open(fd, "rb") as file:
        content = file.read(_MAX_IGNORE_BYTES + 1) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    if len(content) > _MAX_IGNORE_BYTES:
        raise BuildFailed(f"{root / IGNORE_FILE} is larger than {_MAX_IGNORE_BYTES} bytes")
    return content.decode("utf-8-sig", "replace").splitlines()
