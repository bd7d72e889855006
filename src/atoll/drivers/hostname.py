"""Setting the hostname of a running sandbox as root, by entering its UTS namespace.

Owns how namespaces are entered and how their owner is checked. Run it in a thread that does nothing else: a thread has
namespaces of its own, and Python runs no signal handler in it, so that it always returns to its own. An ordinary user
must enter the user namespace too, which no thread can; for that case the keeper does the same (`keeper/hostname.c`).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct

_CLONE_NEWUTS = 0x0400_0000
_NS_GET_USERNS, _NS_GET_OWNER_UID = 0xB701, 0xB704
_libc = ctypes.CDLL(None, use_errno=True)


def set_hostname(pid: int | None, owner: int, hostname: str) -> str | None:
    """Name the sandbox whose process is `pid`. Returns why that could not be done; None: it was.

    A process id may be another's by now, were it the host's own: only a namespace whose user namespace was made by the
    host user `owner`, which is the sandbox's root, is touched.
    """
    if pid is None:
        return "it has ended"
    try:
        uts = os.open(f"/proc/{pid}/ns/uts", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _owner_of(uts) != owner:
                return "it has ended"
            own = os.open("/proc/thread-self/ns/uts", os.O_RDONLY | os.O_CLOEXEC)
            try:
                _enter(uts)
                try:
                    name = os.fsencode(hostname)
                    _check(_libc.sethostname(name, len(name)))
                finally:
                    _enter(own)
            finally:
                os.close(own)
        finally:
            os.close(uts)
    except OSError as error:
        return str(error)
    return None


def _owner_of(namespace: int) -> int:
    """The host user who made the user namespace that a namespace belongs to."""
    user = fcntl.ioctl(namespace, _NS_GET_USERNS)
    try:
        return int(struct.unpack("I", fcntl.ioctl(user, _NS_GET_OWNER_UID, bytes(4)))[0])
    finally:
        os.close(user)


def _enter(namespace: int) -> None:
    _check(_libc.setns(namespace, _CLONE_NEWUTS))


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
