"""A project and its copy in a sandbox.

Owns what is kept on this machine for the comparison: the files as they were copied, and those that came back, in a
directory of its own that only its owner can read. So a file that the user changes meanwhile is noticed, and a diff
shows what was done in the sandbox and nothing else. Not here: which files those are (`selection.py`), how they are
compared (`changes.py`) and written (`applying.py`). Used by `Sandbox.copy_project` and `SandboxPool`.
"""

from __future__ import annotations

import dataclasses
import os
import posixpath
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio
import anyio.to_thread

from atoll.contract.errors import FileError, InvalidRequest, PathNotDirectory, PathNotFound
from atoll.runtime.project import applying
from atoll.runtime.project.changes import ProjectChanges, RefusedChange, TreeFile, compare, refusal
from atoll.runtime.project.selection import (
    GuestTree,
    HostTree,
    IgnoreRules,
    Selection,
    TreeEntry,
    most,
    parents,
    select,
)

if TYPE_CHECKING:
    from atoll.runtime.guest.files import Files

MAX_PROJECT_BYTES = 512 * 1024**2
"""What a copy may have, and what may come back, unless `limit_bytes` is given."""
MAX_PROJECT_FILES = 50_000
"""Files and directories of a copy, unless `limit_files` is given."""
_RECENT_S = 2.0
"""A file that was changed so shortly before it was copied may be changed again without a new time."""
_PIECE_BYTES = 1024 * 1024
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Project:
    """A directory of this machine whose files can be copied into sandboxes: those that git does not ignore.

    Outside of a git work tree these are all but `.git` and what is made again (`node_modules`, `__pycache__`, …).

    Raises:
        InvalidRequest: it is not a directory.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        limit_bytes: int = MAX_PROJECT_BYTES,
        limit_files: int = MAX_PROJECT_FILES,
    ) -> None:
        self.directory = Path(os.path.abspath(Path(directory).expanduser()))
        if not self.directory.is_dir():
            raise InvalidRequest(f"{directory} is not a directory")
        self.limit_bytes = limit_bytes
        self.limit_files = limit_files
        plain = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", self.directory.name)
        self.name: str = self.directory.name if plain else "project"
        """What its copy is called: as the directory, if that is plain, else `project`."""

    async def copy_in(self, files: Files, path: str, *, replace: bool = False) -> ProjectCopy:
        """Copy the project into a sandbox, to be `path` there. Its git history is not copied.

        The copy has files, directories and symlinks, with their times and executable bits. A directory that exists at
        `path` must be empty, or with `replace` it becomes the project: what git does not ignore is removed from it
        unless the project has it.

        Raises:
            InvalidRequest: the project is too large, git refuses to work, or something is at `path`.
            OSError: a file here cannot be read.
        """
        scratch = tempfile.TemporaryDirectory(prefix="atoll-project-")
        copy = ProjectCopy(self, files, path, scratch)
        try:
            await copy.fill(replace=replace)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await copy.aclose()
            raise
        return copy


class ProjectCopy:
    """The copy of a project in a sandbox. Closing it forgets what was copied; the copy stays as it is."""

    def __init__(self, project: Project, files: Files, path: str, scratch: tempfile.TemporaryDirectory[str]) -> None:
        self.project = project
        self.path = path
        """Where it is in the sandbox."""
        self._files = files
        self._scratch = scratch
        self._root = Path(scratch.name)
        self._rules: IgnoreRules
        self._old: dict[str, TreeFile] = {}
        """The project as it was copied, or as it was after changes were last applied."""
        self._copied_at_s = time.time()
        self._fetched = 0

    async def fill(self, *, replace: bool) -> None:
        """As `Project.copy_in`, which calls this once."""
        project = self.project
        rules = self._root / "rules"
        rules.mkdir()
        self._rules = await anyio.to_thread.run_sync(IgnoreRules, project.directory, rules)
        found = await select(HostTree(project.directory), self._rules, limit_files=project.limit_files)
        for path, why in found.unreadable.items():
            raise InvalidRequest(
                f"{project.directory / path} cannot be copied: {why}; add it to .gitignore if it must not"
            )
        self._rules.leave_out_made_again()
        kept = self._root / "old" / posixpath.basename(self.path)
        kept.mkdir(parents=True)
        await anyio.to_thread.run_sync(self._keep, found, kept)
        await self._make_room(replace=replace)
        self._copied_at_s = time.time()
        await self._files.upload(kept, f"{posixpath.dirname(self.path) or '.'}/")

    def _keep(self, found: Selection, kept: Path) -> None:
        """Copy what was found, so that it can be compared later. Links, times and modes are those of the project."""
        limit = self.project.limit_bytes
        sizes = {path: entry.size for path, entry in found.entries.items() if entry.kind == "file"}
        if sum(sizes.values()) > limit:
            raise _too_large(sizes, limit)
        for path, entry in found.entries.items():
            source, target = self.project.directory / path, kept / path
            if entry.kind == "directory":
                target.mkdir(mode=0o755)
                self._old[path] = TreeFile(entry)
            elif entry.kind == "symlink":
                target.symlink_to(entry.target)
                self._old[path] = TreeFile(entry)
            elif entry.kind == "file":
                with suppress(FileNotFoundError):  # it was removed just now
                    self._old[path] = _keep_file(source, target)
        if sum(each.entry.size for each in self._old.values()) > limit:  # some grew meanwhile
            raise _too_large({path: each.entry.size for path, each in self._old.items()}, limit)

    async def _make_room(self, *, replace: bool) -> None:
        try:
            if not await self._files.list(self.path):
                return
        except PathNotFound:
            return
        if not replace:
            raise InvalidRequest(f"{self.path} is not empty in the sandbox; choose another path, or replace it")
        found = await select(self._tree, self._rules, self._old, limit_files=self.project.limit_files)
        for path, entry in found.entries.items():
            mine = self._old.get(path)
            if mine is None or mine.entry.kind != entry.kind:
                await self._files.remove(posixpath.join(self.path, path), recursive=True, missing_ok=True)

    @property
    def _tree(self) -> GuestTree:
        return GuestTree(self._files, self.path)

    # ----------------------------------------------------------------------------------------------------- the way back

    async def diff(self) -> ProjectChanges:
        """What was changed in the copy since it was made, or since changes were last applied.

        New files that git would ignore are left out, by the patterns of the project and of the copy, and so is what is
        made again, such as `node_modules`. Every file whose size or time is another one is read and compared.

        Raises:
            InvalidRequest: the copy is gone, or has too many files.
            SandboxDied: the sandbox is gone.
        """
        try:
            found = await select(self._tree, self._rules, self._old, limit_files=self.project.limit_files)
        except (PathNotFound, PathNotDirectory):
            raise InvalidRequest(
                f"{self.path} is no longer a directory in the sandbox, so there is nothing to compare"
            ) from None
        refused = dict.fromkeys(found.repositories, "is git's own, which is never brought back")
        refused |= found.unreadable
        new: dict[str, TreeFile] = {}
        room = self.project.limit_bytes
        for path, entry in found.entries.items():
            old = self._old.get(path)
            why = refusal(path, entry, old.entry if old is not None else None)
            if why is not None:
                refused[path] = why
            elif entry.kind != "file":
                new[path] = TreeFile(entry)
            elif old is not None and self._is_untouched(entry, old.entry):
                new[path] = TreeFile(entry, old.contents)
            else:
                try:
                    new[path] = await self._fetch(path, entry, room)
                    room -= new[path].entry.size
                except (InvalidRequest, FileError) as error:
                    refused[path] = error.message
        new |= self._untouchable(refused)
        changes = await anyio.to_thread.run_sync(compare, self._old, new)
        return dataclasses.replace(changes, refused=tuple(RefusedChange(*each) for each in sorted(refused.items())))

    def _is_untouched(self, entry: TreeEntry, old: TreeEntry) -> bool:
        """Whether a file need not be read, as rsync decides it: it has the size and the time with which it came."""
        return (entry.size, entry.mtime_s) == (old.size, old.mtime_s) and old.mtime_s < self._copied_at_s - _RECENT_S

    def _untouchable(self, refused: Collection[str]) -> dict[str, TreeFile]:
        """What stays as it is because what came in its place is refused."""
        return {
            path: each for path, each in self._old.items() if path in refused or not parents([path]).isdisjoint(refused)
        }

    async def _fetch(self, path: str, entry: TreeEntry, room: int) -> TreeFile:
        """Read a file of the sandbox.

        Raises:
            InvalidRequest: it is larger than `room`, or than its entry said.
            FileError: it cannot be read.
        """
        if entry.size > room:
            raise InvalidRequest(f"is too large: all that comes back may have {self.project.limit_bytes >> 20} MiB")
        self._fetched += 1
        target = self._root / f"new-{self._fetched}"
        size = 0
        with target.open("wb", buffering=0) as file:
            async with aclosing(self._files.stream(posixpath.join(self.path, path))) as pieces:
                async for piece in pieces:
                    size += len(piece)
                    if size > entry.size:
                        raise InvalidRequest("was written to while it was read")
                    await anyio.to_thread.run_sync(file.write, piece)
        return TreeFile(dataclasses.replace(entry, size=size), target)

    async def apply(self, changes: ProjectChanges) -> None:
        """Make changes of this copy in the project's directory, all or none. `diff` begins with them from then on.

        Nothing outside of the directory is written, nothing through a symlink, and nothing in `.git`. A file that is
        replaced keeps its owner and permissions.

        Raises:
            ProjectConflict: files were changed there since the project was copied. Nothing was applied.
            OSError: a file cannot be written. Nothing was applied.
        """
        await anyio.to_thread.run_sync(applying.apply, self.project.directory, changes)
        for change in changes.changes:
            if change.old_path is not None:
                self._old.pop(change.old_path, None)
            self._old.pop(change.path, None)
        for path in changes.removed_directories:
            self._old.pop(path, None)
        for change in changes.changes:
            if change.new is not None:
                self._old |= {above: TreeFile(TreeEntry("directory")) for above in parents([change.path])}
                self._old[change.path] = change.new

    async def aclose(self) -> None:
        """Remove what this machine has kept of it."""
        await anyio.to_thread.run_sync(self._scratch.cleanup)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.aclose()


def _keep_file(source: Path, target: Path) -> TreeFile:
    with open(os.open(source, _FILE), "rb") as read:
        status = os.fstat(read.fileno())
        with target.open("wb") as written:
            if stat.S_ISREG(status.st_mode):  # it may have been replaced by a pipe
                shutil.copyfileobj(read, written, _PIECE_BYTES)
            size = written.tell()
    target.chmod(0o755 if status.st_mode & 0o100 else 0o644)
    mtime_s = int(status.st_mtime)
    os.utime(target, (mtime_s, mtime_s))
    return TreeFile(TreeEntry("file", bool(status.st_mode & 0o100), size, mtime_s), target)


def _too_large(sizes: Mapping[str, int], limit_bytes: int) -> InvalidRequest:
    total = sum(sizes.values())
    large = most({path: size >> 20 for path, size in sizes.items()}, "MiB")
    return InvalidRequest(
        f"the project has {total >> 20} MiB, more than {limit_bytes >> 20} MiB ({large}); add what is not needed to "
        ".gitignore, or raise the limit with ATOLL_PROJECT_MIB (limit_bytes)"
    )
