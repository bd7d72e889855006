"""Results of commands, kept by what they depend on: for `exec(cache=True)`.

Owns the key of a result, its file, and how many there are. Not here: when a result may be kept (`builtins.py`). A file
is named after the digest of everything that a run depends on: the commands, the digest of the image, the environment,
standard input, the network policy and which files come back. So it never has to be invalidated. Files are written
under a name of their own and renamed: any process on the machine may read and write at any moment.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from atoll.contract.frozen import Frozen

MAX_CACHE_BYTES = 256 * 1024 * 1024
"""Of all results of a state directory. The ones that were used longest ago are removed first."""
MAX_ENTRY_BYTES = 32 * 1024 * 1024
"""A larger result is not kept."""
_VERSION = 1
"""Of the content of a file: it is part of the key."""
_COLLECT_EVERY = 32
"""Writes of a process between two looks at the size of all files."""

_R = TypeVar("_R", bound=Frozen)


def cache_key(*parts: object) -> str:
    """The key of a result that depends on these, which are what JSON has."""
    return hashlib.sha256(json.dumps([_VERSION, *parts], sort_keys=True, ensure_ascii=True).encode()).hexdigest()


class ResultCache:
    """The results below one directory. What cannot be read or written counts as not there."""

    def __init__(self, root: Path, *, limit_bytes: int = MAX_CACHE_BYTES) -> None:
        self._root = root
        self._limit_bytes = limit_bytes
        self._writes = 0

    def get(self, key: str, model: type[_R]) -> _R | None:
        """The result with this key. None: it is not kept."""
        path = self._root / key
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(fd, "rb") as file:
                content = file.read(MAX_ENTRY_BYTES + 1)
            os.utime(path)  # it was used now
        except OSError:
            return None
        digest, _, body = content.partition(b"\n")
        if digest != hashlib.sha256(body).hexdigest().encode():  # damaged, such as by a power failure
            return None
        try:
            return model.model_validate_json(body)
        except ValidationError:
            return None

    def put(self, key: str, result: Frozen) -> None:
        """Keep a result. Does nothing if it is too large, or the disk is full."""
        body = result.model_dump_json().encode()
        if len(body) > MAX_ENTRY_BYTES:
            return
        temporary = self._root / f".{key}.{secrets.token_hex(4)}"
        with contextlib.suppress(OSError):
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                    file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
                os.rename(temporary, self._root / key)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        if self._writes % _COLLECT_EVERY == 0:
            self.collect()
        self._writes += 1

    def collect(self) -> None:
        """Remove what was used longest ago, until the rest is within the limit. Called by several at once, too."""
        found: list[tuple[float, int, str]] = []
        with contextlib.suppress(OSError), os.scandir(self._root) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime, status.st_size, entry.path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._limit_bytes:
                return
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size
