"""Locks across processes that end with their holder.

Owns how a lock file is locked, waited for and inspected: everything outside of sandboxes that more than one process may
change is protected by one of these. Not here: which lock protects what (`runtime/state/store.py`, `layers.py`,
`leases.py`, `runtime/images/store.py`).

These are open file description locks. They belong to an open file, so a process can pass one on to another (the keeper)
by inheritance, and others can test one without locking it. A file that does not exist counts as not locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio

from atoll.contract.errors import SandboxError

_FLOCK = struct.Struct("hhqqi4x")
_ANY_LOCK = _FLOCK.pack(fcntl.F_WRLCK, 0, 0, 0, 0)
_POLL_S = (0.002, 0.1)
"""How often a lock is tried: at first, and at most how far apart when it has been waited for for long."""


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock the open file `fd` unless another open file holds the lock, or with `shared`, holds it exclusively.

    Closing every copy of `fd` unlocks.
    """
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, 0, 0, 0, 0))
    except BlockingIOError:
        return False
    return True


async def lock_within(
    fd: int, timeout_s: float | None, *, shared: bool = False, on_wait: Callable[[], None] | None = None
) -> bool:
    """Lock the open file `fd`, waiting for at most `timeout_s`, or for as long as it takes. Returns whether it is.

    The lock is polled, since a thread that blocks in the kernel could not be cancelled. `on_wait` is called before each
    pause.
    """
    shortest_s, longest_s = _POLL_S
    begun = anyio.current_time()
    with anyio.move_on_after(timeout_s):
        while not try_lock(fd, shared=shared):
            if on_wait is not None:
                on_wait()
            waited_s = anyio.current_time() - begun
            await anyio.sleep(min(max(shortest_s, waited_s / 20), longest_s))
        return True
    return False


@contextlib.asynccontextmanager
async def locked(
    path: Path, timeout_s: float | None, what: str, *, on_wait: Callable[[], None] | None = None
) -> AsyncIterator[None]:
    """Hold the lock file `path`, which is created if it is missing. `what` says what its holder does: "filling …".

    Raises:
        SandboxError: another process holds it for longer than `timeout_s`.
    """
    fd = open_lock(path)
    try:
        if not await lock_within(fd, timeout_s, on_wait=on_wait):
            raise lock_timeout(timeout_s, what, path)
        yield
    finally:
        os.close(fd)


def open_lock(path: Path) -> int:
    """Open a lock file, which is created if it is missing."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def lock_timeout(timeout_s: float | None, what: str, path: Path) -> SandboxError:
    """The error for a lock that was not free in time. `what` says what its holder does."""
    return SandboxError(f"timed out after {timeout_s or 0:g} s waiting for another process ({what})", hint=str(path))


def is_held(path: Path | str) -> bool:
    """Whether a living process holds the lock file `path`."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _ANY_LOCK)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
    finally:
        os.close(fd)


def read_small(path: str) -> bytes:
    """A file of at most a page, such as those that a keeper writes. Empty: it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, 4096)
    except OSError:
        return b""
    finally:
        os.close(fd)
