"""Archives that clients have uploaded for copies: kept on disk as they came, and read without trusting any of it.

Owns where they are, how many bytes an owner may have there, and how one is uncompressed: as a stream, with limits on
its size and on how much larger it becomes. What is in one is never unpacked on this machine: the tar is read by the
guest of the build's sandbox, which refuses names that lead outside, devices and links to elsewhere. Not here: who may
upload (surfaces), and the files of a local directory (`context.py`).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import anyio.to_thread

from atoll.contract.errors import BuildFailed, Conflict, InvalidRequest

MAX_UPLOAD_BYTES = 1024**3
MAX_OWNED_BYTES = 4 * 1024**3
"""Of all archives of one owner. The ones that were used last stay."""
MAX_UNPACKED_BYTES = 8 * 1024**3
MAX_RATIO = 200
"""How many times larger than the upload the tar may be, above `_RATIO_FREE_BYTES`."""
_RATIO_FREE_BYTES = 64 * 1024**2
MAX_UNFINISHED = 16
"""Uploads of one owner at the same time."""
_UNFINISHED = "upload-"
_ABANDONED_S = 24 * 3600.0
_NAME = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 256 * 1024
_GZIP_WBITS = 31
_GZIP_MAGIC = b"\x1f\x8b"


class UploadStore:
    """The archives of all owners. A file is called by the name that its client gave it, and by its digest."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._unfinished: Counter[str] = Counter()

    def has(self, owner: str, name: str) -> bool:
        """Whether there is an archive of this name, which counts as used now.

        Raises:
            InvalidRequest: it is not a name of an archive.
        """
        found = self._find(owner, name)
        if found is not None:
            found.touch()
        return found is not None

    async def put(self, owner: str, name: str, body: AsyncIterator[bytes]) -> None:
        """Keep an archive, in place of one that has its name.

        Raises:
            InvalidRequest: it is empty or too large, or the name is not one.
            Conflict: too many are under way.
        """
        directory, digest, size = self._of(owner), hashlib.sha256(), 0
        before = self._find(owner, name)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._unfinished[owner] >= MAX_UNFINISHED:
            raise Conflict(f"{MAX_UNFINISHED} uploads are under way; wait until one has ended")
        self._unfinished[owner] += 1
        fresh = directory / f"{_UNFINISHED}{os.urandom(8).hex()}"
        try:
            with fresh.open("xb") as file:
                async for data in body:
                    size += len(data)
                    if size > MAX_UPLOAD_BYTES:
                        raise InvalidRequest(f"the archive is larger than {MAX_UPLOAD_BYTES} bytes")
                    digest.update(data)
                    await anyio.to_thread.run_sync(file.write, data)
            if not size:
                raise InvalidRequest("the archive is empty; send a tar")
            os.replace(fresh, directory / f"{name}.{digest.hexdigest()}")
        finally:
            self._unfinished[owner] -= 1
            fresh.unlink(missing_ok=True)
        if before is not None and before.name != f"{name}.{digest.hexdigest()}":
            before.unlink(missing_ok=True)
        self._trim(owner)

    def of(self, owner: str) -> OwnedArchives:
        """The archives of one owner, for a build."""
        return OwnedArchives(self, owner)

    def remove_all(self, owner: str) -> None:
        """Remove all archives of an owner."""
        shutil.rmtree(self._of(owner), ignore_errors=True)

    def path(self, owner: str, name: str) -> Path:
        """
        Raises:
            BuildFailed: there is no archive of this name.
        """
        found = self._find(owner, name)
        if found is None:
            raise BuildFailed(f"the files {name[:12]}… of a copy were not uploaded; upload them first")
        return found

    def _of(self, owner: str) -> Path:
        return self._directory / owner

    def _find(self, owner: str, name: str) -> Path | None:
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"{name[:80]!r} is not the hash of files: 64 hexadecimal digits")
        return next(iter(self._of(owner).glob(f"{name}.*")), None)

    def _trim(self, owner: str) -> None:
        kept = 0
        for path in sorted(self._of(owner).iterdir(), key=_time_of, reverse=True):
            if path.name.startswith(_UNFINISHED):
                if _time_of(path) < time.time() - _ABANDONED_S:  # of a process that was killed
                    path.unlink(missing_ok=True)
                continue
            with suppress(FileNotFoundError):
                kept += path.stat().st_size
            if kept > MAX_OWNED_BYTES:
                path.unlink(missing_ok=True)


def _time_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another upload has just ended
        return 0.0


class OwnedArchives:
    """As `ArchiveSource`."""

    def __init__(self, store: UploadStore, owner: str) -> None:
        self._store = store
        self._owner = owner

    def digest(self, archive: str) -> str:
        return self._store.path(self._owner, archive).name.rpartition(".")[2]

    async def read(self, archive: str) -> AsyncIterator[bytes]:
        path = self._store.path(self._owner, archive)
        with path.open("rb") as file:
            reader = _TarReader(file)
            while data := await anyio.to_thread.run_sync(reader.read):
                yield data


class _TarReader:
    """The bytes of a tar, uncompressed if they are compressed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        head = file.read(len(_GZIP_MAGIC))
        file.seek(0)
        self._inflate = zlib.decompressobj(_GZIP_WBITS) if head == _GZIP_MAGIC else None
        self._given = 0

    def read(self) -> bytes:
        """Some more. Empty: the end.

        Raises:
            BuildFailed: it is damaged, or becomes too large.
        """
        data = self._file.read(_CHUNK_BYTES) if self._inflate is None else self._inflated(self._inflate)
        self._given += len(data)
        if self._given > MAX_UNPACKED_BYTES:
            raise BuildFailed(f"the files of a copy unpack to more than {MAX_UNPACKED_BYTES} bytes")
        if self._given > max(_RATIO_FREE_BYTES, MAX_RATIO * self._size):
            raise BuildFailed(f"the files of a copy unpack to more than {MAX_RATIO} times the size of their archive")
        return data

    def _inflated(self, inflate: Any) -> bytes:
        while not inflate.eof:
            given = inflate.unconsumed_tail or self._file.read(_CHUNK_BYTES)
            if not given:
                raise BuildFailed("the archive of a copy ends too early; upload it again")
            try:
                data: bytes = inflate.decompress(given, _CHUNK_BYTES)
            except zlib.error as error:
                raise BuildFailed(f"the archive of a copy is damaged: {error}") from None
            if data:
                return data
        return b""
