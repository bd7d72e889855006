"""What left a sandbox and what was kept from it, on disk: one line of JSON each, in the sandbox's directory.

Knows how records are written, bounded and read again. Refuses to know what a connection is. One process at a time
writes, the one that serves the sandbox (`outlet.py`); any may read.

A connection that is allowed is written down before its first byte, and once more, with the same id, when it has ended:
whoever is killed in between has not hidden it. What was written is the kernel's from then on, so it survives the death
of this process, though not always that of the machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
from pydantic import ValidationError

from atoll.contract.network import AuditRecord

LIMIT_BYTES = 4 * 1024 * 1024
"""Of one file. There are two at most, so a sandbox's records take up twice as much, and the last 4 MiB are there."""
CURRENT, EARLIER = "audit.jsonl", "audit.1.jsonl"
_LOOK_S = 0.1


class AuditLog:
    """The records of one sandbox, for the one who writes them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = self._open()

    def write(self, record: AuditRecord) -> None:
        """Add a record.

        Raises:
            OSError: there is no room, or the sandbox is gone.
        """
        line = record.model_dump_json(exclude_none=True).encode() + b"\n"
        size = os.fstat(self._fd).st_size
        if size + len(line) > LIMIT_BYTES:
            self._begin_anew()
            size = 0
        if os.write(self._fd, line) < len(line):  # of a disk that is full, what is left of it is written
            os.ftruncate(self._fd, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        os.close(self._fd)

    def _begin_anew(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # it was moved before, and then the new one could not be opened
            os.replace(self._directory / CURRENT, self._directory / EARLIER)
        fresh = self._open()
        self.close()
        self._fd = fresh

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(self._directory / CURRENT, flags, 0o600)


def read(directory: Path) -> list[AuditRecord]:
    """The records that are kept, the oldest first; of one that was written twice, what was written last."""
    found: dict[str, AuditRecord] = {}
    for name in (EARLIER, CURRENT):
        with contextlib.suppress(FileNotFoundError):
            for record in _records((directory / name).read_bytes()):
                found[record.id] = record
    return sorted(found.values(), key=lambda record: record.time)


async def follow(directory: Path) -> AsyncIterator[AuditRecord]:
    """The latest records, and then those that come, as they are written: of an allowed connection, one when it begins
    and one with the same id when it has ended. Until the sandbox is destroyed."""
    tail = _Tail(directory / CURRENT)
    while directory.exists():
        for record in tail.read():
            yield record
        await anyio.sleep(_LOOK_S)


class _Tail:
    """What is added to a file, and to the one that takes its place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._offset = 0

    def read(self) -> list[AuditRecord]:
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._file:
                self._file, self._offset = inode, 0
            file.seek(self._offset)
            whole, newline, _ = file.read(LIMIT_BYTES).rpartition(b"\n")
            self._offset += len(whole) + len(newline)
            return list(_records(whole))
        return []


def _records(data: bytes) -> Iterator[AuditRecord]:
    for line in data.splitlines():
        with contextlib.suppress(ValidationError):  # cut short by whatever killed its writer
            yield AuditRecord.model_validate_json(line)
