"""The audit log of a sandbox's egress: allowed, denied and failed attempts, one line of JSON each, in its directory.

Owns how records are written, bounded and read. Not here: what is recorded (`proxy.py`). One process at a time writes,
the one that serves the sandbox (`server.py`); any process may read.

An allowed connection is recorded before its first byte is sent, and again, with the same id, when it has ended: killing
the writer in between does not hide it. What was written survives the death of this process, though not always a crash
of the machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio

from atoll.contract.network import AuditRecord

MAX_FILE_BYTES = 4 * 1024 * 1024
"""Of one file. There are at most two, so the records of a sandbox take twice as much, and the last 4 MiB are kept."""
CURRENT, EARLIER = "audit.jsonl", "audit.1.jsonl"
_POLL_INTERVAL_S = 0.1


class AuditLog:
    """Writes the records of one sandbox."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = self._open()

    def write(self, record: AuditRecord) -> None:
        """Add a record.

        Raises:
            OSError: the disk is full, or the sandbox is destroyed.
        """
        line = record.model_dump_json(exclude_none=True).encode() + b"\n"
        size = os.fstat(self._fd).st_size
        if size + len(line) > MAX_FILE_BYTES:
            self._rotate()
            size = 0
        if os.write(self._fd, line) < len(line):  # a full disk takes a part of it
            os.ftruncate(self._fd, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        os.close(self._fd)

    def _rotate(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # an earlier rotation moved it and could not open the new one
            os.replace(self._directory / CURRENT, self._directory / EARLIER)
        fresh = self._open()
        self.close()
        self._fd = fresh

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(self._directory / CURRENT, flags, 0o600)


def read(directory: Path) -> list[AuditRecord]:
    """The records that are kept, the oldest first; of two with the same id, the later one."""
    found: dict[str, AuditRecord] = {}
    for name in (EARLIER, CURRENT):
        with contextlib.suppress(FileNotFoundError):
            for record in _records((directory / name).read_bytes()):
                found[record.id] = record
    return sorted(found.values(), key=lambda record: record.time)


async def follow(directory: Path) -> AsyncIterator[AuditRecord]:
    """The latest records, and then new ones as they are written: of an allowed connection, one when it begins and one
    with the same id when it has ended. Until the sandbox is destroyed."""
    tail = _Tail(directory / CURRENT)
    while directory.exists():
        for record in tail.read():
            yield record
        await anyio.sleep(_POLL_INTERVAL_S)


class _Tail:
    """Reads what is appended to a file, and to its successor after a rotation."""

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
            whole, newline, _ = file.read(MAX_FILE_BYTES).rpartition(b"\n")
            self._offset += len(whole) + len(newline)
            return list(_records(whole))
        return []


def _records(data: bytes) -> Iterator[AuditRecord]:
    for line in data.splitlines():
        with contextlib.suppress(ValueError):  # incomplete, as its writer was killed
            yield AuditRecord.model_validate_json(line)
