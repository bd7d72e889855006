"""What was changed in the copy of a project, as data and as a patch.

Owns what counts as a change, which changes are refused because they would lead out of the project or cannot be brought
back as they are, and the patch: in git's format, for `git apply`, with binary files and modes. Not here: where the two
sides come from (`project.py`), how changes are written to the directory (`applying.py`).

The new side is hostile. A change is refused whose symlink leads out of the directory, whose name could pass for another
one on a terminal, or which is neither a file, a directory nor a symlink.
"""

from __future__ import annotations

import base64
import filecmp
import hashlib
import subprocess
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from atoll.runtime.project.selection import TreeEntry, parents
from atoll.settings import program_environment

MAX_TEXT_BYTES = 4 * 1024 * 1024
"""A larger file is shown as a binary one."""
_MAX_DIFF_S = 20.0
_MAX_RENAME_CANDIDATES = 100
"""Removed files of one size that an added file is compared with."""
_PATCH_LINE_BYTES = 52
_ESCAPES = {ord("\t"): "\\t", ord("\n"): "\\n", ord("\r"): "\\r", ord('"'): '\\"', ord("\\"): "\\\\"}

ChangeKind = Literal["added", "modified", "deleted", "renamed", "mode"]


@dataclass(frozen=True)
class TreeFile:
    """What is at a path, and of a file where this machine has a copy of its contents."""

    entry: TreeEntry
    contents: Path | None = None

    def read(self) -> bytes:
        """The contents as git sees them: of a symlink, its target."""
        if self.contents is not None:
            return self.contents.read_bytes()
        return self.entry.target.encode("utf-8", "surrogateescape")

    def is_text(self) -> bool:
        if self.entry.size > MAX_TEXT_BYTES:
            return False
        data = self.read()
        try:
            data.decode()
        except UnicodeDecodeError:
            return False
        return b"\0" not in data

    def is_same(self, other: TreeFile) -> bool:
        """Whether nothing differs that is brought back."""
        one, two = self.entry, other.entry
        return (one.kind, one.executable, one.target) == (two.kind, two.executable, two.target) and self.has_same(other)

    def has_same(self, other: TreeFile) -> bool:
        """Whether the contents are the same."""
        if self.contents is None or other.contents is None:
            return self.contents is other.contents and self.entry.target == other.entry.target
        return self.contents == other.contents or filecmp.cmp(self.contents, other.contents, shallow=False)

    @property
    def mode(self) -> str:
        """As git writes it."""
        return "120000" if self.entry.kind == "symlink" else "100755" if self.entry.executable else "100644"


# ------------------------------------------------------------------------------------------------------------- changes


@dataclass(frozen=True)
class RefusedChange:
    """A change that is not brought back."""

    path: str
    reason: str


@dataclass(frozen=True)
class ProjectChange:
    """The change of one path. A side that is None did not exist, or does not any more."""

    path: str
    kind: ChangeKind
    old: TreeFile | None
    new: TreeFile | None
    old_path: str | None = None
    """Where a renamed file was. None: it was not renamed."""
    binary: bool = False
    """Whether a side is not UTF-8 text, or too large to be compared."""

    @property
    def diff(self) -> str:
        """As a unified diff. Of a binary file it says no more than that it differs. Empty for a directory."""
        return "".join(_sections(self, complete=False))

    @property
    def patch(self) -> str:
        """As `git apply` reads it, with the contents of a binary file."""
        return "".join(_sections(self, complete=True))


@dataclass(frozen=True)
class ProjectChanges:
    """What was changed in the copy of a project. It is of use until the copy is closed."""

    changes: tuple[ProjectChange, ...]
    """By path."""
    refused: tuple[RefusedChange, ...] = ()
    """What is not brought back, and why."""
    removed_directories: tuple[str, ...] = ()
    """Directories that the copy no longer has. They are removed if they are empty then."""

    @property
    def diff(self) -> str:
        """All changes as a unified diff, without the contents of binary files."""
        return "".join(each.diff for each in self.changes)

    @property
    def patch(self) -> str:
        """All changes as `git apply` reads them. Empty directories are not in it."""
        return "".join(each.patch for each in self.changes)


def compare(old: Mapping[str, TreeFile], new: Mapping[str, TreeFile]) -> ProjectChanges:
    """What makes `old` into `new`; the caller has left out of `new` what is refused. Blocks."""
    found: list[ProjectChange] = []
    removed: list[str] = []
    inhabited = parents(new)
    for path in sorted({*old, *new}):
        one, two = old.get(path), new.get(path)
        if one is not None and two is not None and one.is_same(two):
            continue
        if two is None and one is not None and one.entry.kind == "directory":
            removed.append(path)
        elif one is not None or path not in inhabited:
            found.append(_change(path, one, two))
    changes = sorted(_with_renames(found), key=lambda change: change.path)
    return ProjectChanges(tuple(changes), removed_directories=tuple(removed))


def _change(path: str, old: TreeFile | None, new: TreeFile | None) -> ProjectChange:
    kind: ChangeKind = "modified"
    if old is None or new is None:
        kind = "added" if old is None else "deleted"
    elif old.entry.kind == new.entry.kind == "file" and old.has_same(new):
        kind = "mode"
    sides = [side for side in (old, new) if side is not None and side.entry.kind != "directory"]
    binary = kind != "mode" and not all(side.is_text() for side in sides)
    return ProjectChange(path, kind, old, new, binary=binary)


def _with_renames(changes: list[ProjectChange]) -> list[ProjectChange]:
    """A file that was removed and one that was added with the same contents are one change."""
    removed: dict[int, list[tuple[ProjectChange, TreeFile]]] = {}
    for change in changes:
        if change.kind == "deleted" and change.old is not None and change.old.entry.size:
            removed.setdefault(change.old.entry.size, []).append((change, change.old))
    found = {change.path: change for change in changes}
    for change in changes:
        if change.kind != "added" or change.new is None:
            continue
        candidates = removed.get(change.new.entry.size, [])
        for number, (before, old) in enumerate(candidates[:_MAX_RENAME_CANDIDATES]):
            if old.has_same(change.new):
                del candidates[number], found[before.path]
                found[change.path] = replace(change, kind="renamed", old=old, old_path=before.path)
                break
    return list(found.values())


def refusal(path: str, entry: TreeEntry, old: TreeEntry | None) -> str | None:
    """Why what the sandbox has at `path` is not brought back. None: it is."""
    if entry.kind == "other":
        return "is neither a file, a directory nor a symlink"
    if old is None and not all(part.isprintable() for part in path.split("/")):
        return "has a name with control characters, or one that is not UTF-8"
    if entry.kind == "symlink" and (old is None or old.target != entry.target) and _leads_out(path, entry.target):
        return f"is a symlink to {quoted(entry.target)[:200]}, which leads out of the project"
    return None


def _leads_out(path: str, target: str) -> bool:
    """Whether a symlink may lead out of the project, also through others. All `..` must come first: they are then taken
    from real directories, of which there are enough above."""
    steps = [step for step in target.split("/") if step not in {"", "."}]
    ups = next((i for i, step in enumerate(steps) if step != ".."), len(steps))
    return target.startswith("/") or ".." in steps[ups:] or ups > path.count("/") or not target


# --------------------------------------------------------------------------------------------------------------- patch


def _sections(change: ProjectChange, *, complete: bool) -> Iterator[str]:
    old, new = (None if side is None or side.entry.kind == "directory" else side for side in (change.old, change.new))
    if old is not None and new is not None and old.entry.kind != new.entry.kind:
        # As git writes it: a file that becomes a symlink is another one.
        yield from _sections(replace(change, new=None), complete=complete)
        yield from _sections(replace(change, old=None), complete=complete)
        return
    if old is None and new is None:
        return  # git does not know directories
    before, after = quoted(f"a/{change.old_path or change.path}"), quoted(f"b/{change.path}")
    yield f"diff --git {before} {after}\n"
    yield _mode_lines(old, new)
    if change.old_path is not None:
        yield f"similarity index 100%\nrename from {quoted(change.old_path)}\nrename to {quoted(change.path)}\n"
    if old is not None and new is not None and old.has_same(new):
        return
    source, target = (None if side is None else side.read() for side in (old, new))
    mode = f" {new.mode}" if old is not None and new is not None and old.mode == new.mode else ""
    yield f"index {_digest(source)}..{_digest(target)}{mode}\n"
    if change.binary:
        yield _binary_patch(target or b"") if complete else f"Binary files {before} and {after} differ\n"
    elif source or target:
        yield f"--- {_named(before, source)}\n+++ {_named(after, target)}\n"
        yield _hunks(old, new) or _replacement(source or b"", target or b"")


def _mode_lines(old: TreeFile | None, new: TreeFile | None) -> str:
    if old is None:
        return f"new file mode {new.mode}\n" if new is not None else ""
    if new is None:
        return f"deleted file mode {old.mode}\n"
    return f"old mode {old.mode}\nnew mode {new.mode}\n" if old.mode != new.mode else ""


def _hunks(old: TreeFile | None, new: TreeFile | None) -> str | None:
    """The hunks of two text files. None: not both are files, there is no diff(1), or it takes too long."""
    if old is None or new is None or old.contents is None or new.contents is None:
        return None
    words = ["diff", "-u", "-a", "--label", "a", "--label", "b", "--", str(old.contents), str(new.contents)]
    try:
        done = subprocess.run(words, capture_output=True, env=program_environment(), timeout=_MAX_DIFF_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split(b"\n", 2)[2].decode() if done.returncode == 1 else None


def _replacement(source: bytes, target: bytes) -> str:
    """One hunk, in which all lines are replaced."""
    removed, added = _lines(source), _lines(target)
    spans = ["0,0" if not lines else f"1,{len(lines)}" for lines in (removed, added)]
    shown = [f"{sign}{line}" for sign, lines in (("-", removed), ("+", added)) for line in lines]
    return "".join((f"@@ -{spans[0]} +{spans[1]} @@\n", *shown))


def _lines(data: bytes) -> list[str]:
    """The lines of a text with their newlines. A last one without is followed by a note, as in every diff."""
    if not data:
        return []
    lines = [f"{line}\n" for line in data.decode().split("\n")]
    if lines[-1] == "\n":
        lines.pop()
    else:
        lines[-1] += "\\ No newline at end of file\n"
    return lines


def _digest(data: bytes | None) -> str:
    """Git's name for contents."""
    if data is None:
        return "0" * 40
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _binary_patch(data: bytes) -> str:
    lines = [f"GIT binary patch\nliteral {len(data)}\n"]
    packed = zlib.compress(data)
    for start in range(0, len(packed), _PATCH_LINE_BYTES):
        piece = packed[start : start + _PATCH_LINE_BYTES]
        length = chr(ord("A") + len(piece) - 1) if len(piece) <= 26 else chr(ord("a") + len(piece) - 27)
        lines.append(f"{length}{base64.b85encode(piece, pad=True).decode()}\n")
    return "".join((*lines, "\n"))


def quoted(path: str) -> str:
    """A path as git writes it: between quotation marks if a character in it could be taken for something else."""
    if path.isprintable() and '"' not in path and "\\" not in path:
        return path
    return '"' + "".join(map(_escaped, path.encode("utf-8", "surrogateescape"))) + '"'


def _escaped(byte: int) -> str:
    return _ESCAPES.get(byte) or (chr(byte) if 0x20 <= byte < 0x7F else f"\\{byte:03o}")


def _named(path: str, contents: bytes | None) -> str:
    """How a side is named above the hunks. A name with a space has a tab after it, as patch(1) sees where it ends."""
    if contents is None:
        return "/dev/null"
    return f"{path}\t" if " " in path else path
