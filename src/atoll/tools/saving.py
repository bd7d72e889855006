"""The tool `save_file`: a file or a directory of a sandbox becomes one of the user's.

Owns what may be written to the directory that the operator has chosen for that: new names in it and nothing else,
within a limit for each session. Not here: how a hostile sandbox's files are copied (`Files.download`). Used by
`workspace.py`; without such a directory the tool is not offered.
"""

from __future__ import annotations

import os
import posixpath
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread
from pydantic import Field

from atoll.contract.errors import AtollError, CallerError, InvalidRequest
from atoll.tools.pool import SANDBOX_FIELD, ViewContext, with_fields
from atoll.tools.tool import Hints, Input, Result, Tool, ToolResult
from atoll.tools.view import View

MAX_SAVED_BYTES = 4 * 1024**3
"""What one session may save."""
_NAME_RULE = "one name, without a slash, without control characters, and not beginning with a dot"


class SaveDirectory:
    """A directory of this machine in which a session may save files of its sandboxes.

    Raises:
        InvalidRequest: it is not a directory, or cannot be written to.
    """

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(os.path.realpath(directory))
        if not self._directory.is_dir() or not os.access(self._directory, os.W_OK | os.X_OK):
            raise InvalidRequest(f"{directory} is not a directory that can be written to")
        self._left_bytes = MAX_SAVED_BYTES
        self._lock = anyio.Lock()

    async def save(self, view: View, path: str, name: str, *, overwrite: bool) -> tuple[Path, int]:
        """Copy a file or a directory, whole or not at all. Returns where it is, and its bytes.

        Nothing that exists is touched but, with `overwrite`, a file of this name.

        Raises:
            InvalidRequest: the name is not allowed, or taken, or the session has saved too much.
            CallerError: this machine cannot write it.
        """
        target = self._directory / _check_name(name or posixpath.basename(posixpath.normpath(view.path(path))))
        part = self._directory / f".atoll-{secrets.token_hex(8)}"
        async with self._lock:
            try:
                size = await view.sandbox.files.download(view.path(path), part, limit_bytes=self._left_bytes)
                await anyio.to_thread.run_sync(_place, part, target, overwrite)
            except InvalidRequest as error:
                if "limit_bytes" not in error.details:
                    raise
                raise InvalidRequest(f"{path}: a session can save {MAX_SAVED_BYTES >> 30} GiB in all") from None
            except AtollError:
                raise
            except OSError as error:
                raise CallerError(f"{target.name} could not be saved: {error.strerror or error}") from error
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(_discard, part)
            self._left_bytes -= size
        return target, size


def _check_name(name: str) -> str:
    if not name.isprintable() or "/" in name or name.startswith(".") or not 0 < len(os.fsencode(name)) <= 200:
        raise InvalidRequest(f"{name!r} is no name for a saved file; allowed is {_NAME_RULE}")
    return name


def _place(part: Path, target: Path, overwrite: bool) -> None:
    """Give what was copied its name, if no other has it: linking and making a directory fail then."""
    taken = f"{target.name} exists already in the user's directory; choose another name"
    try:
        if part.is_dir():
            target.mkdir()
            part.rename(target)
        elif overwrite:
            part.replace(target)  # a symlink is replaced, not followed
        else:
            os.link(part, target)
    except FileExistsError:
        raise InvalidRequest(f"{taken}{'' if part.is_dir() else ', or set overwrite'}") from None
    except IsADirectoryError:
        raise InvalidRequest(taken) from None


def _discard(part: Path) -> None:
    with suppress(FileNotFoundError):
        if part.is_dir() and not part.is_symlink():
            shutil.rmtree(part)
        else:
            part.unlink()


# ---------------------------------------------------------------------------------------------------------------- tool


class SavingContext(ViewContext, Protocol):
    """A tool context with a directory to save to."""

    saves: SaveDirectory


class SaveFile(Input):
    path: str = Field(min_length=1)
    """A file or a directory in the sandbox. Relative paths begin as for other tools."""
    name: str = ""
    """What to call it for the user: one name, without a slash. Unset: its own."""
    overwrite: bool = False
    """Replace a file of this name. A directory is never replaced."""


class SaveFileResult(Result):
    path: str
    """Where it is on the user's machine."""
    bytes: int
    """Of files."""


async def _save_file(args: SaveFile, context: SavingContext) -> ToolResult:
    view = await context.view(args)
    async with view.suggesting(view.path(args.path)):
        target, size = await context.saves.save(view, args.path, args.name, overwrite=args.overwrite)
    return SaveFileResult(path=str(target), bytes=size).result(f"saved {size} bytes for the user as {target}")


SAVE_FILE = with_fields(
    Tool(
        "save_file",
        "Hand a file or a directory to the user: copy it out of the sandbox into the directory that the user has "
        "chosen for that. The result says where it is, on the user's machine; tell the user. Symlinks in a directory "
        "must not lead out of it.",
        SaveFile,
        SaveFileResult,
        _save_file,
        needs=frozenset({"save"}),
        hints=Hints(destructive=True, open_world=True),
        title="Save for the user",
        vocabulary="workspace",
    ),
    sandbox=SANDBOX_FIELD,
)
