"""Lock files across processes. A lock ends with the process that holds it.

Open file description locks: they belong to an open file, so a process can pass one on to another (the keeper) by
inheritance, and others can test a lock without taking it. A file that does not exist counts as not held.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import anyio

from atoll.contract.errors import SandboxError

_FLOCK = struct.Struct("hhqqi4x")
_POLL_S = 0.002


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock the open file `fd`, exclusively or shared, unless another holder conflicts. False: it does.

    Closing every copy of `fd` unlocks.
    """
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, 0, 0, 0, 0))
    except BlockingIOError:
        return False
    return True


async def lock_within(fd: int, patience_s: float, *, shared: bool = False) -> bool:
    """Lock the open file `fd`, waiting for at most `patience_s`."""
    with anyio.move_on_after(patience_s):
        while not try_lock(fd, shared=shared):  # noqa: ASYNC110 - the holder is another process
            await anyio.sleep(_POLL_S)
        return True
    return False


@contextlib.asynccontextmanager
async def locked(path: Path, patience_s: float, what: str) -> AsyncIterator[None]:
    """Hold the lock file `path`, made if it is missing. `what` says what a holder does, such as "filling a warm pool".

    Raises:
        SandboxError: another process held it for longer than `patience_s`.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not await lock_within(fd, patience_s):
            raise SandboxError(f"timed out after {patience_s:g} s waiting for another process ({what})", hint=str(path))
        yield
    finally:
        os.close(fd)


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock file `path`."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, 0, 0, 0))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
    finally:
        os.close(fd)
