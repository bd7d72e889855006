"""The registry of vocabularies, and what a vocabulary says of itself.

Owns which vocabularies exist, which tool names they reserve, and which of them can be offered together. Not here: any
tool (each vocabulary's own module) and how tools are called (`tool.py`). Used by the MCP server, by the command line
for help texts, transcripts and `atoll agent`, and by `tool.py` for the reserved names.

To add a vocabulary, write one module with its tools and a `VOCABULARY`, and add one entry to `VOCABULARIES`. Surfaces
read everything else from these two.

This module imports no other module of `tools` until a vocabulary is loaded: `atoll --help` shows the names and
descriptions, and must not wait for pydantic.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.contract.errors import InvalidRequest

if TYPE_CHECKING:
    from atoll.runtime.sandbox_pool import SandboxPool
    from atoll.tools.tasks import Tasks
    from atoll.tools.tool import ToolSet


@dataclass(frozen=True)
class SessionGrants:
    """What the tools of a session may use besides its sandboxes. What is None is not granted: its tool is missing."""

    tasks: Tasks | None = None
    """Runs child agents, for `task`."""
    save_dir: Path | None = None
    """Where `save_file` may write, on this machine."""


@dataclass(frozen=True)
class Vocabulary:
    """What a vocabulary's module says of it, as its `VOCABULARY`."""

    tools: Callable[[SandboxPool, SessionGrants], ToolSet]
    """The tools for the sandboxes of a session. A vocabulary ignores grants that it has no tool for."""
    instructions: str
    """What a model or an MCP client has to know before it calls one of the tools: one or two sentences."""
    transcripts: Mapping[str, str] = field(default_factory=dict)
    """What a transcript shows of a call, by the tool's name: text with `{argument}` in it. A tool that is not listed is
    shown with its argument `path`, if it has one."""
    sandbox_argument: str = "sandbox"
    """The argument that names the sandbox. A transcript shows it beside the tool's name, if the call has it."""


@dataclass(frozen=True)
class VocabularyEntry:
    """A vocabulary as the registry knows it before its module is imported."""

    module: str
    description: str
    """One line, for help texts."""
    tool_names: frozenset[str]
    """The names that it reserves: no other tool may have one, whether or not this vocabulary is in use."""

    def load(self) -> Vocabulary:
        """Import the module and return its `VOCABULARY`."""
        vocabulary: Vocabulary = importlib.import_module(self.module).VOCABULARY
        return vocabulary


def _entry(module: str, description: str, tool_names: str) -> VocabularyEntry:
    return VocabularyEntry(f"atoll.tools.{module}", description, frozenset(tool_names.split()))


VOCABULARIES: Mapping[str, VocabularyEntry] = {
    "workspace": _entry(
        "workspace",
        "several sandboxes by name: commands, files, search, previews",
        "shell read_file write_file edit_file grep glob browse sandbox_create sandbox_list sandbox_destroy transfer "
        "save_file",
    ),
    "agent": _entry(
        "pool",
        "eight tools of workspace, without edit_file, grep and sandbox_destroy",
        "shell read_file write_file glob browse sandbox_create sandbox_list transfer",
    ),
    "coding": _entry(
        "coding",
        "one sandbox: read, edit, bash, grep, child agents",
        "read write edit bash grep glob task",
    ),
    "sprites": _entry(
        "sprites",
        "sandboxes with checkpoints, restore and fork",
        "sprite_create sprite_exec sprite_checkpoint sprite_restore sprite_list_checkpoints sprite_list "
        "sprite_shutdown sprite_wake sprite_fork sprite_destroy",
    ),
    "code": VocabularyEntry(
        "atoll.code.vocabulary",
        "one tool: Python whose variables persist",
        frozenset({"execute_code"}),
    ),
}
"""All vocabularies, by name."""
DEFAULT = "workspace"
"""What `atoll mcp` and `atoll agent` offer unless they are told otherwise."""


def summary() -> str:
    """The vocabularies with their descriptions, and which cannot be combined: for help texts."""
    listed = ", ".join(f"{name} ({entry.description})" for name, entry in VOCABULARIES.items())
    pairs = [pair for pair in itertools.combinations(VOCABULARIES, 2) if _shared(*pair)]
    apart = dict.fromkeys(itertools.chain.from_iterable(pairs))
    return f"{listed}. Only one of {', '.join(apart)} can be offered"


def choose(names: Iterable[str]) -> tuple[str, ...]:
    """Check that these vocabularies can be offered together. Returns each once.

    Raises:
        InvalidRequest: one does not exist, none is named, or two have a tool of the same name.
    """
    chosen = tuple(dict.fromkeys(names))
    available = f"available: {', '.join(VOCABULARIES)}"
    for name in chosen:
        if name not in VOCABULARIES:
            from atoll.tools.tool import nearest

            raise InvalidRequest(f"there is no vocabulary {name!r}; {available}{nearest(name, VOCABULARIES)}")
    if not chosen:
        raise InvalidRequest(f"no vocabulary is chosen; {available}")
    for one, other in itertools.combinations(chosen, 2):
        if shared := _shared(one, other):
            others = [name for name in VOCABULARIES if not _shared(name, one) and not _shared(name, other)]
            either = f"; {', '.join(others)} can be combined with either" if others else ""
            raise InvalidRequest(
                f"{one} and {other} cannot be offered together: both have a tool {shared[0]!r}, and a model could not "
                f"tell which is which; choose one of them{either}"
            )
    return chosen


def session_tools(
    pool: SandboxPool, chosen: Iterable[str], *, tasks: Tasks | None = None, save_dir: Path | None = None
) -> ToolSet:
    """The tools of these vocabularies for the sandboxes of a session. Without `tasks` there is no `task`, and without
    `save_dir` no `save_file`.

    Raises:
        InvalidRequest: `save_dir` is not a directory that can be written to.
    """
    from atoll.tools.tool import ToolSet

    tools, grants = ToolSet(), SessionGrants(tasks, save_dir)
    for name in chosen:
        tools |= VOCABULARIES[name].load().tools(pool, grants)
    return tools


def vocabulary_of(tool: str) -> Vocabulary | None:
    """The vocabulary that has a tool of this name, or None. Where two have one (`glob`), it is the first."""
    for entry in VOCABULARIES.values():
        if tool in entry.tool_names:
            return entry.load()
    return None


def _shared(one: str, other: str) -> list[str]:
    """The names of tools that two vocabularies both have."""
    return sorted(VOCABULARIES[one].tool_names & VOCABULARIES[other].tool_names)
