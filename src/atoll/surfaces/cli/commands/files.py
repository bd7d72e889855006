"""`cp`: files between this machine and sandboxes.

Owns which paths are copied to where. Not here: how files cross the boundary (`Sandbox.files`), how bytes enter and
leave this process (`terminal.py`).
"""

from __future__ import annotations

import errno
import posixpath
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from atoll.contract.errors import InvalidRequest, PathNotDirectory, PathNotFound
from atoll.surfaces.cli import render, values
from atoll.surfaces.cli.command import CommandContext, CommandModule, Work
from atoll.surfaces.cli.grammar import Argument, Option
from atoll.surfaces.cli.options import UserOption

if TYPE_CHECKING:
    from atoll.runtime.guest.files import Files
    from atoll.runtime.interface import Engine

_MAX_MATCHES = 10_000
_WILDCARDS = frozenset("*?[")

commands = CommandModule()


@commands.command()
def cp(
    context: CommandContext,
    sources: Annotated[list[str], Argument(metavar="SRC", help="What to copy.", completes="place", leaves_last=True)],
    target: Annotated[str, Argument(metavar="DST", help="Where to copy it.", completes="place")],
    user: UserOption = None,
    limit: Annotated[
        int | None,
        Option(
            "--limit",
            metavar="SIZE",
            parser=values.size,
            help="Limit of what one SRC may write on this machine.  [default: 16 GiB]",
        ),
    ] = None,
) -> Work:
    """Copy files between this machine and sandboxes.

    NAME:PATH is a path in a sandbox; a relative one begins in the user's home directory. Every other path is on this
    machine, and - is standard input or output. A directory is copied with its content; if DST is a directory, SRC is
    copied into it. Several SRC are copied into DST, which must be a directory. *, ? and [...] in a SRC in a sandbox are
    matched there: quote them.

    \b
    atoll cp report.csv notes.txt box:data/
    atoll cp box:/var/log ./logs
    atoll cp 'box:results/*.json' .
    atoll cp box:model.bin other:
    """
    origins, end = values.copy_places(sources, target)
    if context.as_json and end.is_stream:
        raise InvalidRequest("--json and - both write to standard output; leave one of them out")
    if limit is not None and (end.sandbox is not None or end.is_stream):
        raise InvalidRequest("--limit is for copies to files of this machine; leave it out")
    return _cp(context, origins, end, user, limit)


async def _cp(
    context: CommandContext,
    origins: Sequence[values.Place],
    end: values.Place,
    user: str | None,
    limit_bytes: int | None,
) -> int:
    async with context.open_engine() as engine:
        copies = _Copies(engine, end, user, limit_bytes)
        found = [each for origin in origins for each in await copies.matches(origin)]
        several = len(origins) > 1 or len(found) > 1
        if several:
            await copies.require_directory()
        copied = [{"source": str(each), "target": str(end), "bytes": await copies.copy(each)} for each in found]
    if context.as_json:
        render.emit_json(copied if several else copied[0])
    return 0


class _Copies:
    """Copies to one place."""

    def __init__(self, engine: Engine, end: values.Place, user: str | None, limit_bytes: int | None) -> None:
        self._engine = engine
        self._end = end
        self._user = user
        self._limit_bytes = limit_bytes

    async def matches(self, origin: values.Place) -> list[values.Place]:
        """What an origin stands for: itself, or what its wildcards match in its sandbox.

        Raises:
            PathNotFound: nothing matches.
        """
        if origin.sandbox is None or not _WILDCARDS & set(origin.path):
            return [origin]
        files = await self._files(origin.sandbox)
        with suppress(PathNotDirectory):
            if await files.exists(origin.path, user=self._user):
                return [origin]
        parts = origin.path.split("/")
        first = next(number for number, part in enumerate(parts) if _WILDCARDS & set(part))
        base, pattern = "/".join(parts[:first]) or ("/" if first else "."), "/".join(parts[first:])
        found = await files.glob(pattern, cwd=base, limit=_MAX_MATCHES, user=self._user)
        if not found:
            raise PathNotFound(f"{origin}: nothing matches", number=errno.ENOENT, path=origin.path)
        if len(found) == _MAX_MATCHES:
            raise InvalidRequest(f"{origin} matches {_MAX_MATCHES} files or more; copy their directory")
        return [values.Place(origin.sandbox, posixpath.join(base, entry.name)) for entry in found]

    async def require_directory(self) -> None:
        """
        Raises:
            InvalidRequest: the end is not a directory. One that ends with a slash is made.
        """
        if self._end.is_stream:
            raise InvalidRequest("- is one file, and several would be copied to it")
        if self._end.sandbox is None:
            here = Path(self._end.path)
            if self._end.path.endswith("/"):
                here.mkdir(parents=True, exist_ok=True)
            is_directory = here.is_dir()
        else:
            is_directory = await self._is_directory(await self._files(self._end.sandbox), self._end.path)
        if not is_directory:
            raise InvalidRequest(
                f"{self._end} is not a directory, and several files are copied into one; with a / at its end it is made"
            )

    async def copy(self, origin: values.Place) -> int:
        """Copy one file or directory, and return how many bytes of files that were.

        Raises:
            PathNotFound: it does not exist; the message says on which side.
        """
        try:
            return await self._copy(origin)
        except PathNotFound as error:
            if origin.sandbox is None or error.path != origin.path:
                raise
            raise PathNotFound(f"{origin}: no such file or directory", number=errno.ENOENT, path=error.path) from error

    async def _copy(self, origin: values.Place) -> int:
        end, user = self._end, self._user
        if end.sandbox is None:
            files = await self._files(str(origin.sandbox))
            if end.is_stream:
                return await _to_stdout(files, origin.path, user)
            from atoll.runtime.guest.copying import MAX_DOWNLOAD_BYTES

            limit_bytes = self._limit_bytes or MAX_DOWNLOAD_BYTES
            return await files.download(origin.path, Path(end.path), user=user, limit_bytes=limit_bytes)
        files = await self._files(end.sandbox)
        if origin.is_stream:
            return await files.write_bytes(end.path, _stdin(), user=user)
        if origin.sandbox is None:
            return await files.upload(Path(origin.path), end.path, user=user)
        return await self._between(await self._files(origin.sandbox), origin, files)

    async def _between(self, source: Files, origin: values.Place, files: Files) -> int:
        """From one sandbox to another, or to another place in the same one. Nothing of it is kept on this machine."""
        status = await source.stat(origin.path, user=self._user)
        name = posixpath.basename(posixpath.normpath(origin.path))
        target = self._end.path
        if name not in ("", ".", "..") and await self._is_directory(files, target):
            target = posixpath.join(target, name)
        if origin.sandbox == self._end.sandbox and _is_within(target, origin.path):
            raise InvalidRequest(f"{origin} cannot be copied to itself or into itself")
        if status.kind == "directory":
            async with aclosing(source.tar_out(origin.path, inside=True, user=self._user)) as archive:
                return await files.tar_in(target, archive, user=self._user)
        if status.kind != "file":
            raise InvalidRequest(f"{origin} is a {status.kind}, neither a file nor a directory")
        async with aclosing(source.stream(origin.path, user=self._user)) as pieces:
            return await files.write_bytes(target, pieces, mode=status.mode & 0o777, user=self._user)

    async def _is_directory(self, files: Files, path: str) -> bool:
        try:
            return (await files.stat(path, user=self._user)).kind == "directory"
        except (PathNotFound, PathNotDirectory):
            return path.endswith("/")

    async def _files(self, sandbox: str) -> Files:
        return (await self._engine.get(sandbox)).files


def _is_within(path: str, directory: str) -> bool:
    path, directory = posixpath.normpath(path), posixpath.normpath(directory)
    return path == directory or path.startswith(directory.rstrip("/") + "/")


async def _to_stdout(files: Files, path: str, user: str | None) -> int:
    from atoll.surfaces.cli import terminal

    writer = terminal.OutputWriter(terminal.STDOUT)
    copied = 0
    async for chunk in files.stream(path, user=user):
        await writer.write(chunk)
        copied += len(chunk)
    return copied


async def _stdin() -> AsyncIterator[bytes]:
    from atoll.surfaces.cli import terminal

    if terminal.stdin_offered():
        async for chunk in terminal.stdin_chunks():
            yield chunk
