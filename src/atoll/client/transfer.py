"""Files that are sent to a server, or that come from one: archives of sandboxes and volumes.

Owns that a file at a path appears when it is complete, readable for this user alone, and that files are read and
written in threads. Used by `engine.py` and `stores.py`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import anyio
import anyio.to_thread

if TYPE_CHECKING:
    from atoll.runtime.archive.export import ArchiveFile

_CHUNK_BYTES = 1024 * 1024


class WrittenFile:
    """A file that is being written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    async def write_all(self, chunks: AsyncIterator[bytes], report: Callable[[int], None]) -> int:
        """Write all chunks. Returns how many bytes they are."""
        size = 0
        async for chunk in chunks:
            await anyio.to_thread.run_sync(self._file.write, chunk)
            size += len(chunk)
            report(size)
        await anyio.to_thread.run_sync(self._file.flush)
        return size


@asynccontextmanager
async def written_file(target: ArchiveFile) -> AsyncIterator[WrittenFile]:
    """A file to write to: an open one from its position, or a new one, which appears at its path after the context."""
    if not isinstance(target, Path | str):
        yield WrittenFile(target)
        return
    path = Path(target)
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "wb") as file:
            yield WrittenFile(file)
            await anyio.to_thread.run_sync(os.fsync, file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


async def read_chunks(source: ArchiveFile, report: Callable[[int], None]) -> AsyncIterator[bytes]:
    """The content of a file, from its beginning or, if it is open, from its position."""
    file = await anyio.to_thread.run_sync(Path(source).open, "rb") if isinstance(source, Path | str) else source
    size = 0
    try:
        while chunk := await anyio.to_thread.run_sync(file.read, _CHUNK_BYTES):
            size += len(chunk)
            report(size)
            yield chunk
    finally:
        if file is not source:
            file.close()
