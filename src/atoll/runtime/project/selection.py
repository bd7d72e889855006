"""Which files of a directory belong to the project in it.

Owns the walk, the same on this machine and in a sandbox, and what it leaves out: `.git`, and what git ignores. Git
itself decides that (`git check-ignore`), in a repository of our own with nothing in it but the `.gitignore` files that
the walk meets: a name from a sandbox is compared with patterns and never with the user's files, and submodules and
symlinks of the project are no obstacle. Not here: what is copied (`project.py`) and compared (`changes.py`).
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import shutil
import stat
import subprocess
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import anyio.to_thread

from atoll.contract.errors import FileError, InvalidRequest, SandboxError
from atoll.settings import program_environment

if TYPE_CHECKING:
    from atoll.runtime.guest.files import Files

MAX_DEPTH = 100
"""Directories inside each other that are looked into."""
_MAX_GITIGNORE_BYTES = 1024 * 1024
_MAX_GIT_S = 60.0
"""How long git may take: patterns that a sandbox wrote can be slow to match."""
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MADE_AGAIN = frozenset(
    ".hg .svn .venv node_modules __pycache__ .mypy_cache .pytest_cache .ruff_cache .tox .nox .ipynb_checkpoints "
    ".DS_Store".split()
)
"""What programs make again: left out of a directory that is not in a git work tree, and of what comes back."""
_REPOSITORY_VARIABLES = frozenset(
    "GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_PREFIX GIT_COMMON_DIR GIT_OBJECT_DIRECTORY "
    "GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_NAMESPACE".split()
)
"""They would make git work in another repository than the one of the directory."""


@dataclass(frozen=True)
class TreeEntry:
    """What is at a path: in the directory here, or in its copy in a sandbox."""

    kind: Literal["file", "directory", "symlink", "other"]
    executable: bool = False
    size: int = 0
    mtime_s: float = 0
    target: str = ""
    """Of a symlink."""


class Tree(Protocol):
    """A directory that can be walked."""

    async def list(self, path: str) -> Mapping[str, TreeEntry]:
        """The entries of the directory at `path`, by name. Symlinks are not followed.

        Raises:
            OSError: it cannot be read.
        """

    async def read(self, path: str) -> bytes:
        """The beginning of a small file: at most `_MAX_GITIGNORE_BYTES`."""


class HostTree:
    """A directory of this machine."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def list(self, path: str) -> Mapping[str, TreeEntry]:
        return await anyio.to_thread.run_sync(self._list, path)

    def _list(self, path: str) -> dict[str, TreeEntry]:
        found = {}
        with os.scandir(self._root / path) as entries:
            for entry in entries:
                found[entry.name] = host_entry(entry.path, entry.stat(follow_symlinks=False))
        return found

    async def read(self, path: str) -> bytes:
        return await anyio.to_thread.run_sync(self._read, path)

    def _read(self, path: str) -> bytes:
        with open(os.open(self._root / path, _FILE), "rb") as file:
            return file.read(_MAX_GITIGNORE_BYTES)


def host_entry(path: str | Path, status: os.stat_result, *, dir_fd: int | None = None) -> TreeEntry:
    """The entry at a path of this machine, of which `status` is known."""
    mode, size, mtime_s = status.st_mode, status.st_size, status.st_mtime
    if stat.S_ISREG(mode):
        return TreeEntry("file", bool(mode & 0o100), size, mtime_s)
    if stat.S_ISDIR(mode):
        return TreeEntry("directory")
    if stat.S_ISLNK(mode):
        return TreeEntry("symlink", target=os.readlink(path, dir_fd=dir_fd))
    return TreeEntry("other")


class GuestTree:
    """A directory in a sandbox. All that it says may be a lie."""

    def __init__(self, files: Files, root: str) -> None:
        self._files = files
        self._root = root

    async def list(self, path: str) -> Mapping[str, TreeEntry]:
        found = {}
        for entry in await self._files.list(posixpath.join(self._root, path)):
            if "/" in entry.name or entry.name in {"", ".", ".."}:
                raise SandboxError(f"the sandbox listed a file with the impossible name {entry.name[:200]!r}")
            if entry.kind == "file":
                made = TreeEntry("file", bool(entry.mode & 0o100), entry.size, entry.mtime.timestamp())
            elif entry.kind == "directory":
                made = TreeEntry("directory")
            elif entry.kind == "symlink":
                made = TreeEntry("symlink", target=entry.target or "")
            else:
                made = TreeEntry("other")
            found[entry.name] = made
        return found

    async def read(self, path: str) -> bytes:
        return await self._files.read_bytes(posixpath.join(self._root, path), limit=_MAX_GITIGNORE_BYTES)


# --------------------------------------------------------------------------------------------------------------- rules


class IgnoreRules:
    """What git ignores in a directory, or would if it were in a work tree. `repository` is an empty directory, for our
    own repository.

    Raises:
        InvalidRequest: the directory is in a git work tree, and git is missing, or refuses to work in it.
    """

    def __init__(self, directory: Path, repository: Path) -> None:
        self.tracked: frozenset[str] = frozenset()
        """The files that git tracks, and the directories above them: they belong to the project whatever is ignored."""
        self._names = _MADE_AGAIN
        self._repository = repository
        self._has_git = shutil.which("git") is not None
        self._prefix = ""
        self._settings: list[str] = []
        in_work_tree = any(os.path.lexists(each / ".git") for each in (directory, *directory.parents))
        if not self._has_git:
            if in_work_tree:
                raise InvalidRequest(f"{directory} is in a git work tree, and git is not installed; install it")
            return
        _git(repository, "init", "--quiet", "--template=")
        if in_work_tree:
            self._take_work_tree(directory)

    def _take_work_tree(self, directory: Path) -> None:
        top, prefix, exclude = (
            _git(directory, "rev-parse", "--show-toplevel", "--show-prefix", "--git-path", "info/exclude")
            .decode("utf-8", "surrogateescape")
            .split("\n")[:3]
        )
        tracked = _git(directory, "ls-files", "-z", "--cached", "--recurse-submodules").split(b"\0")
        files = {os.fsdecode(each) for each in tracked if each}
        self.tracked = frozenset(files | parents(files))
        self._names = frozenset()
        at = Path(top)
        for part in prefix.split("/")[:-1]:  # the directories above, which have patterns too
            self._take_file(at / ".gitignore", self._prefix + ".gitignore")
            self._prefix += f"{part}/"
            at /= part
        self._take_file(directory / exclude, ".git/info/exclude")
        configured = _git(directory, "config", "--type=path", "--get", "core.excludesFile", may_fail=True)
        if chosen := os.fsdecode(configured).rstrip("\n"):
            self._settings = ["-c", f"core.excludesFile={directory / chosen}"]

    def leave_out_made_again(self) -> None:
        """From now on ignore what programs make again (`node_modules`), in a git work tree too: what a project has of
        it was found before."""
        self._names = _MADE_AGAIN

    def _take_file(self, path: Path, name: str) -> None:
        with contextlib.suppress(OSError):  # there is none
            self._write(name, path.read_bytes())

    def add(self, directory: str, contents: bytes) -> None:
        """Note the `.gitignore` in a directory, instead of what was noted before."""
        with contextlib.suppress(OSError):  # a sandbox may have a directory where the project has a file
            self._write(posixpath.join(self._prefix + directory, ".gitignore"), contents)

    def _write(self, name: str, contents: bytes) -> None:
        file = self._repository / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(contents)

    def ignored(self, paths: Iterable[tuple[str, bool]]) -> set[str]:
        """Those of the paths that are ignored; with each, whether it is a directory.

        Raises:
            InvalidRequest: git does not answer in time.
        """
        asked = [(path, is_directory) for path, is_directory in paths if path not in self.tracked]
        found = {path for path, _ in asked if posixpath.basename(path) in self._names}
        if not self._has_git or not asked:
            return found
        # "./" because a colon at the beginning is magic, and "/" because there is no directory that git could look at.
        words = {f"./{self._prefix}{path}{'/' * is_directory}": path for path, is_directory in asked}
        said = _git(
            self._repository,
            *self._settings,
            *("check-ignore", "-z", "--stdin", "--no-index"),
            given=b"".join(os.fsencode(word) + b"\0" for word in words),
            may_fail=True,
        )
        return found | {words[os.fsdecode(word)] for word in said.split(b"\0") if word}


def parents(paths: Iterable[str]) -> set[str]:
    """All directories above some paths."""
    found: set[str] = set()
    for path in paths:
        while (path := posixpath.dirname(path)) and path not in found:
            found.add(path)
    return found


def _git(directory: Path, *words: str, given: bytes = b"", may_fail: bool = False) -> bytes:
    """What git prints. With `may_fail`, exit status 1 is an answer too.

    Raises:
        InvalidRequest: it fails or takes too long.
    """
    environment = {
        name: value for name, value in program_environment().items() if name not in _REPOSITORY_VARIABLES
    } | {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", os.fspath(directory), "-c", "core.fsmonitor=false", *words],
            input=given,
            capture_output=True,
            env=environment,
            timeout=_MAX_GIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InvalidRequest(f"git {words[0]} did not end within {_MAX_GIT_S:g} s in {directory}") from None
    if done.returncode > may_fail:
        why = done.stderr.decode("utf-8", "replace").strip()
        raise InvalidRequest(f"git does not work in {directory}: {why[:1000]}")
    return done.stdout


# ---------------------------------------------------------------------------------------------------------------- walk


@dataclass
class Selection:
    """What a walk found."""

    entries: dict[str, TreeEntry] = field(default_factory=dict)
    """The project: by path relative to its directory, with directories before what is in them."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Directories that were not looked into, and why."""
    repositories: list[str] = field(default_factory=list)
    """Paths called `.git`, which are never looked into."""


async def select(tree: Tree, rules: IgnoreRules, kept: Collection[str] = (), *, limit_files: int) -> Selection:
    """The files and directories that belong to a project: those that git does not ignore, and those of `kept`.

    Raises:
        InvalidRequest: there are more than `limit_files`.
        OSError: the directory itself cannot be read.
    """
    found = Selection()
    level = [""]
    for depth in range(MAX_DEPTH + 1):
        entries: dict[str, TreeEntry] = {}
        for directory in level:
            try:
                listed = await tree.list(directory)
                if (here := listed.get(".gitignore")) is not None and here.kind == "file":
                    rules.add(directory, await tree.read(posixpath.join(directory, ".gitignore")))
            except (OSError, FileError) as error:
                if not directory:
                    raise
                found.unreadable[directory] = str(error.strerror or error)
                continue
            for name, entry in listed.items():
                path = posixpath.join(directory, name)
                if is_repository(name):
                    found.repositories.append(path)
                else:
                    entries[path] = entry
        asked = [(path, entry.kind == "directory") for path, entry in entries.items() if path not in kept]
        ignored = await anyio.to_thread.run_sync(rules.ignored, asked)
        found.entries |= {path: entry for path, entry in entries.items() if path not in ignored}
        if len(found.entries) > limit_files:
            raise too_many_files(found.entries, limit_files)
        level = [path for path, entry in entries.items() if entry.kind == "directory" and path not in ignored]
        if not level:
            return found
        if depth == MAX_DEPTH:
            found.unreadable |= dict.fromkeys(level, f"more than {MAX_DEPTH} directories deep")
    return found


def is_repository(name: str) -> bool:
    """Whether a name is git's own, on file systems of other machines too: without cases, or with short names."""
    return name.lower() in {".git", "git~1"}


def too_many_files(entries: Mapping[str, TreeEntry], limit_files: int) -> InvalidRequest:
    return InvalidRequest(
        f"the project has more than {limit_files} files and directories ({most(dict.fromkeys(entries, 1), 'files')}); "
        "add what is not needed to .gitignore, or raise the limit with ATOLL_PROJECT_FILES (limit_files)"
    )


def most(amounts: Mapping[str, int], unit: str) -> str:
    """Below which names of the project's directory most of an amount is, in words."""
    sums: dict[str, int] = {}
    for path, amount in amounts.items():
        first = path.partition("/")[0]
        sums[first] = sums.get(first, 0) + amount
    largest = sorted(sums.items(), key=lambda each: -each[1])[:3]
    return f"most in {', '.join(f'{name}: {amount} {unit}' for name, amount in largest)}"
