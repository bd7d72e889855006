"""How the changes of a project are written to its directory.

Owns that nothing outside of the directory is touched, that no change of the user's is lost, and that all changes are
made or none. Each path is walked one directory at a time without following a symlink; each file is compared with what
was copied before the first is written; what was there is kept in a directory `.atoll-…` until all is done. Not here:
what the changes are (`changes.py`). Used by `ProjectCopy.apply`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from atoll.contract.errors import InvalidRequest, ProjectConflict
from atoll.runtime.project.changes import ProjectChange, ProjectChanges, TreeFile, quoted
from atoll.runtime.project.selection import host_entry, is_repository, parents

_PIECE_BYTES = 1024 * 1024
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def apply(directory: Path, changes: ProjectChanges) -> None:
    """Make all changes in a directory, or none. Blocks. What is changed there already as it should be is left as it is.

    Raises:
        ProjectConflict: something that is to be changed is no longer as it was copied. Nothing was changed.
        InvalidRequest: a change leads out of the directory, or into `.git`.
        OSError: a file cannot be written. What was written before has been undone.
    """
    for change in changes.changes:
        _check(change.path)
        if change.old_path is not None:
            _check(change.old_path)
    with _DirectoryWriter(directory) as writer:
        steps = [step for change in changes.changes for step in _steps(change)]
        todo = [(path, old, new) for path, old, new in steps if not writer.has(path, new)]
        gone = {path for path, old, _ in todo if old is not None}
        conflicts = [path for path, old, _ in todo if not writer.has(path, old) or writer.is_blocked(path, gone)]
        if conflicts:
            raise _conflict(conflicts)
        try:
            writer.change(todo, changes.removed_directories)
        except BaseException:
            writer.undo()
            raise


def _steps(change: ProjectChange) -> Iterator[tuple[str, TreeFile | None, TreeFile | None]]:
    """What is to be done: the path, what is there before, and what is to be there."""
    if change.old_path is not None:
        yield change.old_path, change.old, None
        yield change.path, None, change.new
    else:
        yield change.path, change.old, change.new


def _check(path: str) -> None:
    parts = path.split("/")
    if path.startswith("/") or not {"", ".", ".."}.isdisjoint(parts) or "\0" in path or any(map(is_repository, parts)):
        raise InvalidRequest(f"the change of {quoted(path)} leads out of the project or into .git, and is refused")


def _conflict(paths: Sequence[str]) -> ProjectConflict:
    shown = ", ".join(quoted(path) for path in paths[:8]) + (f" and {len(paths) - 8} more" if len(paths) > 8 else "")
    return ProjectConflict(
        f"nothing was applied: changed here since the project was copied: {shown}", paths=[*paths[:1000]]
    )


class _DirectoryWriter:
    """Writes below one directory, and can undo all that it wrote."""

    def __init__(self, directory: Path) -> None:
        # The directory itself is the user's choice, and may be reached through a symlink.
        self._root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._aside, self._aside_name = -1, f".atoll-{secrets.token_hex(8)}"
        self._count = 0
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> _DirectoryWriter:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._remove_aside()
        finally:
            os.close(self._root)

    # ------------------------------------------------------------------------------------------------- what is there

    @contextlib.contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """The directory of `path`, open, and the name in it.

        Raises:
            FileNotFoundError, NotADirectoryError: there is none, or a symlink is on the way.
        """
        *above, name = path.split("/")
        fd = os.dup(self._root)
        try:
            for part in above:
                below = os.open(part, _DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = below
            yield fd, name
        finally:
            os.close(fd)

    def has(self, path: str, wanted: TreeFile | None) -> bool:
        """Whether `path` is as wanted. None: it is not to exist."""
        try:
            with self._parent(path) as (parent, name):
                status = os.stat(name, dir_fd=parent, follow_symlinks=False)
                here = host_entry(name, status, dir_fd=parent)
                if wanted is None:
                    return False
                entry = wanted.entry
                if (here.kind, here.executable, here.target) != (entry.kind, entry.executable, entry.target):
                    return False
                return wanted.contents is None or _is_same(parent, name, wanted.contents)
        except (FileNotFoundError, NotADirectoryError):
            return wanted is None

    def is_blocked(self, path: str, gone: set[str]) -> bool:
        """Whether something that stays and is not a directory is where `path` needs one."""
        above = sorted(parents([path]))
        for directory in above:
            if directory in gone:
                return False
            try:
                with self._parent(directory) as (parent, name):
                    if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                        return True
            except FileNotFoundError:
                return False
        return False

    # ---------------------------------------------------------------------------------------------------- what is done

    def change(
        self, steps: Sequence[tuple[str, TreeFile | None, TreeFile | None]], removed_directories: Sequence[str]
    ) -> None:
        """Make the changes. What fails in the middle can be undone with `undo`."""
        self._make_aside()
        for path, old, new in steps:
            if old is not None and old.entry.kind != "directory" and _is_other_kind(old, new):
                self._set_aside(path)
        replaced = {path for path, old, new in steps if old is not None and old.entry.kind == "directory" and new}
        for path in sorted({*removed_directories, *replaced}, reverse=True):
            self._remove_directory(path, needed=path in replaced)
        for path, _, new in steps:
            if new is not None:
                for directory in sorted(parents([path])):
                    self._make_directory(directory)
                if new.entry.kind == "directory":
                    self._make_directory(path)
                else:
                    self._write(path, new)

    def undo(self) -> None:
        """Restore what was there, the last change first."""
        for each in reversed(self._undo):
            with contextlib.suppress(OSError):  # the others can still be restored
                each()

    def _make_aside(self) -> None:
        """Make the directory for what was there and for what is not yet in its place. Renaming needs no space."""
        os.mkdir(self._aside_name, 0o700, dir_fd=self._root)
        self._aside = os.open(self._aside_name, _DIRECTORY, dir_fd=self._root)

    def _remove_aside(self) -> None:
        if self._aside >= 0:
            for name in os.listdir(self._aside):
                os.unlink(name, dir_fd=self._aside)
            os.close(self._aside)
            os.rmdir(self._aside_name, dir_fd=self._root)

    def _new_name(self) -> str:
        self._count += 1
        return str(self._count)

    def _set_aside(self, path: str) -> None:
        """Move what is at `path` away, so that it can come back."""
        aside = self._new_name()
        with self._parent(path) as (parent, name):
            os.rename(name, aside, src_dir_fd=parent, dst_dir_fd=self._aside)

        def undo() -> None:
            with self._parent(path) as (parent, name):
                os.rename(aside, name, src_dir_fd=self._aside, dst_dir_fd=parent)

        self._undo.append(undo)

    def _remove_directory(self, path: str, *, needed: bool) -> None:
        try:
            with self._parent(path) as (parent, name):
                mode = stat.S_IMODE(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
                os.rmdir(name, dir_fd=parent)
        except OSError:  # it has files that git ignores, or is gone
            if needed:
                raise _conflict([path]) from None
            return

        def undo() -> None:
            with self._parent(path) as (parent, name):
                os.mkdir(name, mode, dir_fd=parent)
                _give_to_owner(parent, name)

        self._undo.append(undo)

    def _make_directory(self, path: str) -> None:
        with self._parent(path) as (parent, name):
            try:
                os.mkdir(name, dir_fd=parent)
            except FileExistsError:
                return
            _give_to_owner(parent, name)

        def undo() -> None:
            with self._parent(path) as (parent, name):
                os.rmdir(name, dir_fd=parent)

        self._undo.append(undo)

    def _write(self, path: str, new: TreeFile) -> None:
        made = self._new_name()
        if new.contents is None:
            os.symlink(new.entry.target, made, dir_fd=self._aside)
        else:
            _copy(new.contents, made, self._aside, executable=new.entry.executable)
        with self._parent(path) as (parent, name):
            try:
                before = os.stat(name, dir_fd=parent, follow_symlinks=False)
            except FileNotFoundError:
                _give_to_owner(parent, made, self._aside)
            else:
                _take_mode(made, self._aside, before, new)
                self._set_aside(path)
            os.rename(made, name, src_dir_fd=self._aside, dst_dir_fd=parent)

        def undo() -> None:
            with self._parent(path) as (parent, name):
                os.unlink(name, dir_fd=parent)

        self._undo.append(undo)


def _is_other_kind(old: TreeFile, new: TreeFile | None) -> bool:
    return new is None or new.entry.kind != old.entry.kind


def _is_same(parent: int, name: str, contents: Path) -> bool:
    with open(os.open(name, _OLD_FILE, dir_fd=parent), "rb") as here, contents.open("rb") as there:
        while True:
            one, two = here.read(_PIECE_BYTES), there.read(_PIECE_BYTES)
            if one != two:
                return False
            if not one:
                return True


def _copy(source: Path, name: str, parent: int, *, executable: bool) -> None:
    with (
        source.open("rb") as read,
        open(os.open(name, _NEW_FILE, 0o777 if executable else 0o666, dir_fd=parent), "wb") as written,
    ):
        while piece := read.read(_PIECE_BYTES):
            written.write(piece)


def _take_mode(name: str, parent: int, before: os.stat_result, new: TreeFile) -> None:
    """Give a new file the owner and the permissions of the one that it replaces, and its own executable bits."""
    if os.geteuid() == 0:
        os.chown(name, before.st_uid, before.st_gid, dir_fd=parent, follow_symlinks=False)
    if new.contents is not None and stat.S_ISREG(before.st_mode):
        mode = stat.S_IMODE(before.st_mode) & ~0o7000
        if new.entry.executable != bool(mode & 0o100):
            mode = mode | (mode & 0o444) >> 2 if new.entry.executable else mode & ~0o111
        os.chmod(name, mode, dir_fd=parent)


def _give_to_owner(directory: int, name: str, parent: int | None = None) -> None:
    """What root makes in a directory of another user belongs to that user. `parent` is where it is for now."""
    if os.geteuid() == 0:
        owner = os.fstat(directory)
        dir_fd = directory if parent is None else parent
        os.chown(name, owner.st_uid, owner.st_gid, dir_fd=dir_fd, follow_symlinks=False)
