"""The descriptors of this process's standard streams, read and written without blocking.

Not here: waiting for them, in an event loop (`terminal.py`) or in `poll` (`direct_exec.py`). Imports nothing heavy,
because `atoll exec` imports it.
"""

from __future__ import annotations

import errno
import os
import stat

CHUNK_BYTES = 65536
_DONTWAIT = 0x40  # MSG_DONTWAIT; the module `socket` takes long to import
STDIN, STDOUT, STDERR = 0, 1, 2


class OutputClosed(Exception):
    """Our output is no longer read, so no error can be shown either."""


class OutputDescriptor:
    """Standard output or standard error, as bytes."""

    def __init__(self, fd: int) -> None:
        self.fd = unblocked(fd, os.O_WRONLY)
        self._socket = None
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            import socket

            # It cannot be reopened, but each write to it can be non-blocking.
            self._socket = socket.socket(fileno=os.dup(fd))

    def write(self, data: memoryview) -> int:
        """Write as much as is taken at once, and return how much that was.

        Raises:
            BlockingIOError: nothing is taken now.
            OutputClosed: it is no longer read.
        """
        try:
            if self._socket is not None:
                return self._socket.send(data, _DONTWAIT)
            return os.write(self.fd, data)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO, errno.EBADF):
                raise OutputClosed from None
            raise


def read_input(fd: int, most: int = CHUNK_BYTES) -> bytes:
    """Read what there is of the input, up to `most` bytes. Empty: it has ended, or its terminal has hung up.

    Raises:
        BlockingIOError: there is nothing now.
    """
    try:
        return os.read(fd, min(most, CHUNK_BYTES))
    except OSError as error:
        if error.errno == errno.EIO:
            return b""
        raise


def stdin_offered() -> bool:
    """Whether there is input to pass on: false if it is closed, or is a terminal that another job uses.

    A job in the background that reads its terminal is stopped by the kernel; so it must not read.
    """
    try:
        os.fstat(STDIN)
    except OSError:
        return False
    if not os.isatty(STDIN):
        return True
    try:
        return os.tcgetpgrp(STDIN) == os.getpgrp()
    except OSError:
        return True


def unblocked(fd: int, access: int) -> int:
    """Reopen `fd` without blocking, or return it as it is.

    `O_NONBLOCK` belongs to the open file, which we share with our parent and its other children, so it must not be
    set on what we inherited. A pipe or a terminal can be reopened; a file cannot (its position would be lost), but
    never blocks for long.
    """
    try:
        if stat.S_ISFIFO(os.fstat(fd).st_mode) or os.isatty(fd):
            return os.open(f"/proc/self/fd/{fd}", access | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        pass
    return fd
