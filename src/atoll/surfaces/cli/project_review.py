"""The end of `atoll agent --here`: the work of the model is shown as a diff, and brought back.

Owns what the user sees before the question, the question, and what happens to changes that are not applied: they are
saved in a patch, because the sandbox with them may end with the command. All names and lines come from a sandbox and
are hostile. Not here: what a change is and how it is applied (`runtime/project/`), the conversation
(`conversation.py`, which uses this).
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import anyio
import anyio.to_thread

from atoll.contract.errors import AtollError, InvalidRequest, ProjectConflict
from atoll.runtime.project.changes import ProjectChange, ProjectChanges, quoted
from atoll.runtime.project.project import Project, ProjectCopy
from atoll.runtime.sandbox_pool import SandboxPool
from atoll.surfaces.cli import render
from atoll.surfaces.cli.transcript import Display

_MAX_SHOWN_LINES = 2000
_MAX_SHOWN_CHARS = 400
"""How many lines of a diff, and how much of each, are shown."""
_MAX_LISTED = 100
_MAX_RESCUE_S = 15.0
"""How long an interrupted command may take to save the changes."""
_CYAN = "36"
_STYLES = (("@@", _CYAN), ("+", render.GREEN), ("-", render.RED), ("diff --git ", render.BOLD))

WayBack = Literal["ask", "apply", "show", "patch"]


class ProjectOptions(NamedTuple):
    """A project that a conversation is about, and what becomes of the changes."""

    project: Project
    way_back: WayBack
    patch: Path | None = None
    """The file for `patch`."""


def project_options(
    here: Path | None, *, apply: bool, no_apply: bool, patch: Path | None, limit_bytes: int, limit_files: int
) -> ProjectOptions | None:
    """What the options of the command line mean.

    Raises:
        InvalidRequest: an option needs another one, or excludes it, or names no directory.
    """
    chosen = [name for name, given in (("--apply", apply), ("--no-apply", no_apply), ("--patch", patch)) if given]
    if here is None:
        if chosen:
            raise InvalidRequest(f"{chosen[0]} needs --here: without it there is no directory to change")
        return None
    if len(chosen) > 1:
        raise InvalidRequest(f"{chosen[0]} and {chosen[1]} exclude each other; choose one")
    if patch is not None and not os.access(Path(os.path.realpath(patch)).parent, os.W_OK):
        raise InvalidRequest(f"--patch {patch}: its directory does not exist or is not writable")
    project = Project(here, limit_bytes=limit_bytes, limit_files=limit_files)
    return ProjectOptions(project, "apply" if apply else "show" if no_apply else "patch" if patch else "ask", patch)


class _Outcome(NamedTuple):
    applied: bool = False
    saved: Path | None = None
    """The patch. None: there is none."""
    conflict: ProjectConflict | None = None


class ProjectReview:
    """What becomes of the changes of one conversation, in the sandboxes of `pool`. `ask` puts a question and gives the
    answer; None: no one can answer."""

    def __init__(
        self,
        pool: SandboxPool,
        options: ProjectOptions,
        display: Display,
        ask: Callable[[str], Awaitable[bool]] | None,
    ) -> None:
        self._pool = pool
        self._options = options
        self._display = display
        self._ask = ask

    async def finish(self) -> None:
        """Show the changes, and apply or save them as the options say.

        Raises:
            ProjectConflict: they cannot be applied, and are saved; the hint says where.
            AtollError: the copy is gone.
            OSError: they could not be written.
        """
        copy = await self._pool.bring_project()
        changes = await copy.diff()
        for text in _shown(changes, copy.project.directory):
            await self._display.tell(text)
        outcome = await self._bring_back(copy, changes) if changes.changes else _Outcome()
        await self._display.emit(_event(changes, copy.project.directory, outcome))
        if outcome.conflict is not None:
            raise outcome.conflict

    async def rescue(self) -> None:
        """Save the changes of a conversation that is interrupted, if there are any and time allows."""
        if self._options.way_back == "show":
            return
        with anyio.move_on_after(_MAX_RESCUE_S, shield=True):
            try:
                changes = await (await self._pool.bring_project()).diff()
                if changes.changes:
                    await self._save(changes, self._options.patch)
            except (AtollError, OSError) as error:
                render.note(f"the changes could not be saved: {error}")

    async def _bring_back(self, copy: ProjectCopy, changes: ProjectChanges) -> _Outcome:
        way_back = self._options.way_back
        if way_back == "show":
            return _Outcome()
        if way_back == "patch":
            return _Outcome(saved=await self._save(changes, self._options.patch))
        where = copy.project.directory
        if way_back == "ask" and (
            self._ask is None or not await self._ask(f"Apply to {render.printable(str(where))}?")
        ):
            return _Outcome(saved=await self._save(changes, None))
        try:
            await copy.apply(changes)
        except ProjectConflict as conflict:
            saved = await self._save(changes, None)
            conflict.hint = (
                f"in {where}, this applies what fits: {shlex.join(['git', 'apply', '--reject', str(saved)])}"
            )
            return _Outcome(saved=saved, conflict=conflict)
        await self._display.tell(f"applied to {render.printable(str(where))}\n")
        return _Outcome(applied=True)

    async def _save(self, changes: ProjectChanges, file: Path | None) -> Path:
        """Write the patch to a file, of which only this user can read a new one, and say where it is."""
        if file is None:
            fd, name = tempfile.mkstemp(prefix=f"atoll-{self._options.project.name}-", suffix=".patch")
            os.close(fd)
            file = Path(name)
        await anyio.to_thread.run_sync(_write_patch, file, changes)
        await self._display.tell(
            f"the changes are saved, not applied; git apply {shlex.quote(str(file))} applies them\n"
        )
        return file


def _write_patch(file: Path, changes: ProjectChanges) -> None:
    with file.open("w", encoding="utf-8", newline="") as opened:
        for change in changes.changes:  # not all at once: a patch has the contents of binary files
            opened.write(change.patch)


def _event(changes: ProjectChanges, directory: Path, outcome: _Outcome) -> dict[str, Any]:
    """The last event but an error, for programs."""
    return {
        "type": "changes",
        "directory": str(directory),
        "files": [
            {"path": each.path, "change": each.kind, "old_path": each.old_path, "binary": each.binary}
            for each in changes.changes
        ],
        "refused": [{"path": each.path, "reason": each.reason} for each in changes.refused],
        "diff": changes.diff,
        "applied": outcome.applied,
        "patch_file": None if outcome.saved is None else str(outcome.saved),
        "conflicts": [] if outcome.conflict is None else outcome.conflict.details["paths"],
    }


# ----------------------------------------------------------------------------------------------------------- for people


def _shown(changes: ProjectChanges, directory: Path) -> Iterator[str]:
    """The diff, then all that was changed by name, so that this is what stands above the question."""
    where = render.printable(str(directory))
    if not changes.changes:
        yield render.styled(f"nothing was changed in the copy of {where}\n", render.DIM)
    left = _MAX_SHOWN_LINES
    for change in changes.changes:
        lines = _lines(change)
        yield "".join(f"{_coloured(line)}\n" for line in lines[:left])
        left -= len(lines)
        if left < 0:
            shown = f"The diff goes on; its first {_MAX_SHOWN_LINES} lines are shown. --patch FILE saves all of it.\n"
            yield render.styled(shown, render.DIM)
            break
    if changes.changes:
        count = len(changes.changes)
        yield f"\nChanged in the copy of {where}: {count} {'path' if count == 1 else 'paths'}\n"
    for change in changes.changes[:_MAX_LISTED]:
        yield f"  {change.kind:<9} {_listed(change)}\n"
    for refused in changes.refused[:_MAX_LISTED]:
        yield f"  {render.styled('refused', render.RED)}   {quoted(refused.path)}: {render.printable(refused.reason)}\n"
    hidden = max(len(changes.changes) - _MAX_LISTED, 0) + max(len(changes.refused) - _MAX_LISTED, 0)
    if hidden:
        yield f"  and {hidden} more\n"


def _lines(change: ProjectChange) -> list[str]:
    """Not `splitlines`, for which a carriage return in a file would end a line, and begin one without a sign."""
    return change.diff.removesuffix("\n").split("\n") if change.diff else []


def _coloured(line: str) -> str:
    shown = render.printable(line.expandtabs(4))
    if len(shown) > _MAX_SHOWN_CHARS:
        shown = f"{shown[:_MAX_SHOWN_CHARS]} … {len(shown) - _MAX_SHOWN_CHARS} more characters"
    for start, style in _STYLES:
        if line.startswith(start):
            return render.styled(shown, style)
    return shown


def _listed(change: ProjectChange) -> str:
    name = quoted(change.path)
    if change.old_path is not None:
        return f"{quoted(change.old_path)} → {name}"
    side = change.new or change.old
    if side is None or side.entry.kind == "directory":
        return f"{name}/"
    if change.kind == "mode":
        return f"{name} (is {'now' if side.entry.executable else 'no longer'} executable)"
    facts = []
    if side.entry.kind == "symlink":
        facts.append(f"symlink to {quoted(side.entry.target)}")
    elif change.binary:
        facts.append(f"binary, {render.human_bytes(side.entry.size)}")
    else:
        lines = _lines(change)
        added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
        facts.append(f"+{max(added - 1, 0)} −{max(removed - 1, 0)}")
    if (
        change.new is not None
        and change.new.entry.executable
        and (change.old is None or not change.old.entry.executable)
    ):
        facts.append("executable")
    return f"{name} ({', '.join(facts)})"
