"""The vocabulary `workspace`: the eight tools of `agent` and, beside them, editing, searching, destroying and saving.

Owns what it adds: `edit_file`, `grep`, `sandbox_destroy`, and `user` of `shell`. Not here: the eight (`pool.py`), how
text is replaced and found (`coding.py`), and `save_file` (`saving.py`). Used through `vocabularies.py` by the surfaces,
whose default it is, and by programs (`workspace_tools`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from atoll.runtime.provisioning import DEFAULT_USER
from atoll.runtime.sandbox_pool import SandboxPool
from atoll.tools import coding, pool as agent
from atoll.tools.coding import Grep, GrepResult, find_lines, replace_text, replaced
from atoll.tools.pool import SANDBOX_FIELD, SessionContext, session_wide_tools, with_fields
from atoll.tools.saving import SAVE_FILE, SaveDirectory
from atoll.tools.tool import Hints, Input, Result, Tool, ToolResult, ToolSet
from atoll.tools.view import last_name
from atoll.tools.vocabularies import Vocabulary

# ---------------------------------------------------------------------------------------------------------- edit_file


class EditFile(Input):
    path: str = Field(min_length=1)
    """Relative paths begin where commands do."""
    old_text: str = Field(min_length=1)
    """The text to replace, exactly as it is in the file, and with enough context to be unique."""
    new_text: str
    """The text to put in its place."""
    replace_all: bool = False
    """Replace every match instead of the only one."""


class EditFileResult(Result):
    replacements: int


async def _edit_file(args: EditFile, context: SessionContext) -> ToolResult:
    view = await context.view(args)
    count = await replace_text(
        view,
        args.path,
        args.old_text,
        args.new_text,
        all_of_them=args.replace_all,
        fields=("old_text", "replace_all"),
    )
    return EditFileResult(replacements=count).result(replaced(count, args.path))


def _file_key(args: EditFile, context: SessionContext) -> Hashable:
    return context.name(args), last_name(args.path)


# --------------------------------------------------------------------------------------------- grep, sandbox_destroy


async def _grep(args: Grep, context: SessionContext) -> ToolResult:
    return await find_lines(args, await context.view(args))


class SandboxDestroy(Input):
    sandbox: str = Field(min_length=1)
    """The name of the sandbox."""


class SandboxDestroyResult(Result):
    ok: Literal[True] = True
    sandbox: str


async def _sandbox_destroy(args: SandboxDestroy, context: SessionContext) -> ToolResult:
    await context.pool.destroy(args.sandbox, checkpoints=True)
    return SandboxDestroyResult(sandbox=args.sandbox).result(f"destroyed the sandbox {args.sandbox!r}")


# --------------------------------------------------------------------------------------------------------- vocabulary


EDIT_FILE = with_fields(
    Tool(
        "edit_file",
        "Replace text in a file. old_text has to match exactly, and only once unless replace_all is set. Files of up "
        f"to {coding.MAX_EDIT_BYTES >> 20} MiB.",
        EditFile,
        EditFileResult,
        _edit_file,
        hints=Hints(destructive=True),
        serialize_by=_file_key,
        title="Edit file",
        vocabulary="workspace",
    ),
    sandbox=SANDBOX_FIELD,
)
GREP = with_fields(
    replace(coding.GREP, result=GrepResult, handler=_grep, vocabulary="workspace"),
    sandbox=SANDBOX_FIELD,
    path=(
        str,
        Field(
            default=".",
            min_length=1,
            description="A file, or a directory to be searched with all below it. Relative paths begin as for other "
            "tools.",
        ),
    ),
)
SANDBOX_DESTROY = Tool(
    "sandbox_destroy",
    "Remove a sandbox for good: its processes, files and checkpoints. To start afresh, destroy it and create it again.",
    SandboxDestroy,
    SandboxDestroyResult,
    _sandbox_destroy,
    needs=frozenset({"pool"}),
    hints=Hints(destructive=True, idempotent=True),
    title="Destroy sandbox",
    vocabulary="workspace",
)


class SavingSessionContext(SessionContext):
    """The sandboxes of a pool, and a directory of this machine for what they make."""

    abilities = SessionContext.abilities | {"save"}

    def __init__(self, pool: SandboxPool, saves: SaveDirectory) -> None:
        super().__init__(pool)
        self.saves = saves


def workspace_tools(pool: SandboxPool, *, save_dir: Path | str | None = None) -> ToolSet:
    """The tools of the vocabulary `workspace` for the sandboxes of a session. The schemas show the pool's defaults.

    `save_dir` is the directory of this machine that `save_file` writes to; unset, there is no `save_file`.

    Raises:
        InvalidRequest: `save_dir` is not a directory that can be written to.
    """
    user: Any = (
        str,
        Field(
            default=pool.user or DEFAULT_USER,
            min_length=1,
            description="Who runs it: root can install packages, for instance with apt-get. Unset, in an image with a "
            "user of its own: that one.",
        ),
    )
    eight = {tool.name: replace(tool, vocabulary="workspace") for tool in session_wide_tools(pool)}
    eight["shell"] = with_fields(eight["shell"], user=user)
    added = {tool.name: tool for tool in (EDIT_FILE, GREP, SANDBOX_DESTROY, SAVE_FILE)}
    everything = eight | added
    context = SessionContext(pool) if save_dir is None else SavingSessionContext(pool, SaveDirectory(save_dir))
    return ToolSet((everything[name] for name in _ORDER), context)


_ORDER = (
    *("shell", "read_file", "write_file", "edit_file", "glob", "grep", "browse"),
    *("sandbox_create", "sandbox_list", "sandbox_destroy", "transfer", "save_file"),
)

VOCABULARY = Vocabulary(
    tools=lambda pool, grants: workspace_tools(pool, save_dir=grants.save_dir),
    instructions=agent.VOCABULARY.instructions,
    transcripts={**agent.VOCABULARY.transcripts, "grep": "{pattern}"},
)
