"""This process's own standard streams, signals and terminal modes.

Owns waiting for the descriptors (`descriptors.py`), and termios. Nothing here blocks the event loop where the kernel
offers a way not to, because a loop that hangs in a write to a pager can handle neither a signal nor a time-out. Not
here: sandboxes (`streaming.py` connects a command to these streams).
"""

from __future__ import annotations

import os
import select
import signal
import termios
import tty
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import anyio
import anyio.lowlevel

from atoll.surfaces.cli import render
from atoll.surfaces.cli.descriptors import (
    STDERR,
    STDIN,
    STDOUT,
    OutputClosed,
    OutputDescriptor,
    read_input,
    stdin_offered,
    unblocked,
)

__all__ = [
    "STDERR",
    "STDIN",
    "STDOUT",
    "Keyboard",
    "OutputClosed",
    "OutputWriter",
    "instead_of_ending",
    "interruptible",
    "raw",
    "run",
    "size_changes",
    "stdin_chunks",
    "stdin_offered",
    "terminal_size",
]


class OutputWriter:
    """Standard output or standard error, as bytes."""

    def __init__(self, fd: int) -> None:
        self._output = OutputDescriptor(fd)

    async def write(self, data: bytes) -> None:
        """Write all of `data`, however slowly it is read.

        Raises:
            OutputClosed: it is no longer read.
        """
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._output.write(rest) :]
            except BlockingIOError:
                await anyio.wait_writable(self._output.fd)


async def stdin_chunks(fd: int = STDIN) -> AsyncIterator[bytes]:
    """Yield standard input, or a copy of it, as it comes, until it ends. Waiting for it can be cancelled."""
    fd = unblocked(fd, os.O_RDONLY)
    waits = True
    while True:
        try:
            if waits:
                await anyio.wait_readable(fd)
            else:
                await anyio.lowlevel.checkpoint()
        except PermissionError:
            waits = False  # A file or /dev/null: always ready, and epoll refuses it.
        try:
            data = read_input(fd)
        except BlockingIOError:
            continue
        if not data:
            return
        yield data


class Keyboard:
    """The terminal on standard input, line by line."""

    def __init__(self) -> None:
        self._fd = unblocked(STDIN, os.O_RDONLY)

    async def read(self) -> str:
        """What is typed next: a line, and further lines that are there already, so that pasted text is one answer.
        Empty: the input has ended, or the terminal has hung up."""
        typed = b""
        while not typed.endswith(b"\n") or self._is_readable():
            await anyio.wait_readable(self._fd)
            try:
                data = read_input(self._fd)
            except BlockingIOError:
                continue
            if not data:
                break
            typed += data
        return typed.decode("utf-8", "replace")

    def _is_readable(self) -> bool:
        return bool(select.select([self._fd], [], [], 0)[0])

    def forget(self) -> None:
        """Discard what has been typed and not yet read."""
        with suppress(termios.error):
            termios.tcflush(STDIN, termios.TCIFLUSH)


def terminal_size() -> tuple[int, int]:
    """Return rows and columns of the terminal we are on, 24 and 80 if there is none."""
    for fd in (STDIN, STDOUT, STDERR):
        try:
            size = os.get_terminal_size(fd)
        except OSError:
            continue
        if size.lines and size.columns:
            return size.lines, size.columns
    return 24, 80


class _TerminalMode:
    """The mode of the terminal on standard input, and what it was before we changed it."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def set_raw(self) -> None:
        self._before = self._before or termios.tcgetattr(STDIN)
        tty.setraw(STDIN, termios.TCSADRAIN)  # Not TCSAFLUSH: what was typed ahead is for the command.

    def renew(self) -> None:
        """Set raw mode again: a shell may have changed it while we were stopped."""
        if self._before is not None:
            self.set_raw()

    def restore(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            with suppress(termios.error):  # The terminal has hung up.
                termios.tcsetattr(STDIN, termios.TCSADRAIN, before)


_mode = _TerminalMode()


@contextmanager
def raw() -> Iterator[None]:
    """Raw mode: every key is read as it is typed. The old mode is restored however the block is left.

    Without a terminal on standard input this does nothing.
    """
    if not os.isatty(STDIN):
        yield
        return
    try:
        _mode.set_raw()
        yield
    finally:
        _mode.restore()


async def size_changes() -> AsyncIterator[tuple[int, int]]:
    """Yield rows and columns each time that the size of the terminal changes.

    After a stop (SIGSTOP, or a shell's own job control) the mode that `raw` had set is set again.
    """
    with anyio.open_signal_receiver(signal.SIGWINCH, signal.SIGCONT) as signals:
        async for number in signals:
            if number == signal.SIGCONT:
                _mode.renew()
            yield terminal_size()


_interruptible: list[anyio.CancelScope] = []


@contextmanager
def interruptible() -> Iterator[anyio.CancelScope]:
    """A scope that SIGINT cancels instead of all of `run`. A second SIGINT, while it is cancelled, cancels all."""
    with anyio.CancelScope() as scope:
        _interruptible.append(scope)
        try:
            yield scope
        finally:
            _interruptible.pop()


_taken: dict[int, list[Callable[[], None]]] = {}


@contextmanager
def instead_of_ending(number: signal.Signals) -> Iterator[list[Callable[[], None]]]:
    """A signal calls what is in the list that this gives, in place of cancelling all of `run`."""
    _taken[number] = []
    try:
        yield _taken[number]
    finally:
        del _taken[number]


def run(main: Callable[[], Awaitable[int]]) -> int:
    """Run `main` to its exit status. SIGINT, SIGTERM and SIGHUP cancel it and give 128+n once it has cleaned up.

    A second signal ends the process at once. A signal that our parent set to be ignored stays ignored (`nohup`).

    Raises:
        whatever `main` raises, never wrapped in a group of one.
    """
    try:
        return anyio.run(_under_signals, main)
    except BaseExceptionGroup as group:
        raise _primary_error(group) from group


async def _under_signals(main: Callable[[], Awaitable[int]]) -> int:
    wanted = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    received: signal.Signals | None = None
    status = 0

    async def watch(signals: AsyncIterator[signal.Signals]) -> None:
        nonlocal received
        async for number in signals:
            if number in _taken:
                for call in _taken[number]:
                    call()
                continue
            if number == signal.SIGINT and _interruptible and not _interruptible[-1].cancel_called:
                _interruptible[-1].cancel()
                continue
            if received is not None:
                _mode.restore()
                os._exit(128 + number)
            received = number
            scope.cancel()

    with anyio.open_signal_receiver(*wanted) as signals:
        async with anyio.create_task_group() as tasks:
            scope = anyio.CancelScope()
            tasks.start_soon(watch, signals)
            with scope:
                status = await main()
            tasks.cancel_scope.cancel()
    if received is not None and scope.cancelled_caught:
        if received == signal.SIGINT:
            render.end_line()
        return 128 + received
    return status


def _primary_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The most informative error of a group: first a bug of ours, then a closed output, then other errors."""
    from atoll.contract.errors import AtollError

    leaves: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            leaves.append(error)
    return min(leaves, key=lambda leaf: (isinstance(leaf, OutputClosed | AtollError), isinstance(leaf, AtollError)))
