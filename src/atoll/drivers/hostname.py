"""Changes the hostname of a running sandbox by entering its UTS namespace.

Root does that in a thread that does nothing else: namespaces belong to a thread, and Python runs no signal handler in
it, so it always returns to its own namespace. An unprivileged user has to enter the user namespace too, which no
thread of a process with several can; for them the keeper's program does the same (`keeper/hostname.c`). Not here:
gVisor, whose hostname the host's kernel does not know (`oci.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from atoll.contract.errors import LaunchFailed
from atoll.drivers.keeper_client import KeeperSocket
from atoll.drivers.keeper_command import BIN
from atoll.drivers.machine import Machine, libc

_CLONE_NEWUTS = 0x0400_0000
_NS_GET_USERNS, _NS_GET_OWNER_UID = 0xB701, 0xB704


class Hostnames:
    """Sets hostnames of sandboxes that the host's kernel runs."""

    def __init__(self, machine: Machine, keeper: KeeperSocket) -> None:
        self._machine = machine
        self._keeper = keeper

    @contextlib.asynccontextmanager
    async def setting(self, directory: Path, hostname: str, id_base: int) -> AsyncIterator[None]:
        """As `Driver.setting_hostname`."""
        error: str | None
        if self._machine.root:
            # Root can enter the namespace alone, which a thread does for itself: no process has to be started.
            naming = self._thread.submit(set_hostname, self._keeper.pid(directory), id_base, hostname)
            try:
                yield
            finally:
                error = naming.result()  # finished by now
        else:
            child = self._start_child(directory, hostname)
            try:
                yield
            finally:  # it takes a millisecond, and has ended by now or is about to
                error = f"see {directory}/keeper.log" if child.wait() != 0 else None
        if error is not None:
            raise LaunchFailed(f"the sandbox's hostname could not be set: {error}")

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "atoll-hostname")

    def _start_child(self, directory: Path, hostname: str) -> subprocess.Popen[bytes]:
        pid = self._keeper.pid(directory)
        words = [str(BIN / "keeper"), "hostname", "--owner", str(os.getuid()), "--", str(pid), hostname]
        with open(directory / "keeper.log", "ab") as log:
            # Without descriptors to close, Python starts it in the fastest way; ours are closed on exec.
            return subprocess.Popen(words, stderr=log, env={}, close_fds=False)


def set_hostname(pid: int | None, owner: int, hostname: str) -> str | None:
    """Set the hostname of the sandbox whose process is `pid`. Returns the error; None: it was set.

    A process id may belong to another process by now, even to one of the host: only a namespace whose user namespace
    was made by the host user `owner`, which is the sandbox's root, is changed.
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
                    _check(libc().sethostname(name, len(name)))
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
    _check(libc().setns(namespace, _CLONE_NEWUTS))


def _check(result: int) -> None:
    if result < 0:
        import ctypes

        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
