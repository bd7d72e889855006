"""The end of a process, as the guest reports it, and the order that brings it about.

Owns what END of a process means. No exit code is invented here: a command whose end the guest did not report raises.
Not here: waiting for it (`process.py`, `surfaces/cli/direct_exec.py`). Imports nothing heavy, because `atoll exec`
imports it.
"""

# Without `from __future__ import annotations`: the fields of a `NamedTuple` would be text that has to be compiled, and
# the first time that takes 1 ms.

import errno
from typing import TYPE_CHECKING, NamedTuple

from atoll.contract.errors import (
    FILE_ERRORS,
    AtollError,
    ExecTimeout,
    GuestUnresponsive,
    InvalidRequest,
    SandboxError,
    TooManyProcesses,
    UserNotFound,
)
from atoll.contract.protocol import Action, Fields, Problem, Tag, encode_fields
from atoll.runtime.guest.exec_request import ExecRequest

if TYPE_CHECKING:
    from atoll.contract.model import ExecResult

SIGKILL = 9
KILL_S = 10.0
"""How long a killed command may take to end."""
KILL_TREE = ((Tag.ACTION, Action.SIGNAL), (Tag.SIGNAL, SIGKILL), (Tag.TREE, 1))
"""The fields of CONTROL that kill a command with all that it started."""


class ProcessEnd(NamedTuple):
    """How a process ended."""

    exit_code: int
    """128+n if signal n ended it."""
    signal: int | None
    duration_s: float
    stdout_total: int
    stderr_total: int
    killed: bool
    """Whether the host had asked for it."""


def decode_end(result: Fields, request: ExecRequest) -> ProcessEnd:
    """How a process ended, from the fields of END.

    Raises:
        InvalidRequest: the request was wrong.
        UserNotFound: there is no such user.
        FileError: the working directory cannot be used.
        SandboxError: how it ended is not known.
        GuestProtocolError: END is malformed.
    """
    if problem := result.problem():
        raise _start_error(problem, request)
    signal = result.within(Tag.SIGNAL, 1, 64) if Tag.SIGNAL in result else None
    return ProcessEnd(
        exit_code=128 + signal if signal is not None else result.within(Tag.EXIT_CODE, 0, 255),
        signal=signal,
        duration_s=result.count(Tag.DURATION_US) / 1e6,
        stdout_total=result.count(Tag.OUT_TOTAL),
        stderr_total=result.count(Tag.ERR_TOTAL),
        killed=result.flag(Tag.KILLED),
    )


def timed_out(timeout_s: float, result: "ExecResult") -> ExecTimeout:
    """The error of a command that was killed when its time was over. `result` has its output until then."""
    return ExecTimeout(
        f"the command timed out after {timeout_s:g} s; it and all that it started have been killed", result
    )


def not_started(timeout_s: float) -> ExecTimeout:
    """The error of a command that had not started when its time was over, and was killed."""
    message = f"the command timed out after {timeout_s:g} s, before it had started"
    return ExecTimeout(message, silent_result(128 + SIGKILL, SIGKILL, 0))


def start_unanswered(timeout_s: float) -> GuestUnresponsive:
    """The error of a command of which it is not known whether it has started."""
    return GuestUnresponsive(
        f"the sandbox does not answer: the command had not started after {timeout_s:g} s, and an order to kill it was "
        "not answered"
    )


def silent_result(exit_code: int, signal: int | None, duration_s: float) -> "ExecResult":
    """The result of a command that was killed when its time was over, without its output."""
    from atoll.contract.model import ExecResult

    return ExecResult(exit_code=exit_code, signal=signal, duration_s=duration_s, timed_out=True, stdout="", stderr="")


def encode_tree_kill(result: Fields) -> bytes | None:
    """The fields of SIGNAL that kills what is left of a command's tree. It is answered when the tree is empty: END
    reports the main process alone. None: END names no process, so nothing was started.

    Raises:
        GuestProtocolError: END is malformed.
    """
    if Tag.PROC not in result:
        return None
    return encode_fields(((Tag.PROC, result.integer(Tag.PROC)), (Tag.SIGNAL, SIGKILL), (Tag.TREE, 1)))


def too_many_processes(what: str) -> TooManyProcesses:
    return TooManyProcesses(
        f"{what}: the sandbox runs as many processes as it may; end some, or raise its limit of pids"
    )


def _start_error(problem: Problem, request: ExecRequest) -> AtollError:
    command, cwd, user = request.command, request.cwd, request.user
    what = command if isinstance(command, str) else " ".join(command)
    what = what if len(what) <= 80 else what[:77] + "..."
    number = problem.number
    if number == errno.ECHILD:
        return SandboxError(f"{what!r} was lost: its supervisor was killed, so how it ended is not known")
    if number == errno.ECANCELED:
        return SandboxError(f"{what!r} was cancelled before it ended, so how it ended is not known")
    if problem.no_such_user:
        return UserNotFound(user)
    if number == errno.EAGAIN:
        return too_many_processes(f"{what!r} could not be started")
    if number in FILE_ERRORS and cwd is not None:
        return FILE_ERRORS[number](f"{cwd}: cannot be the working directory: {problem.words}", number=number, path=cwd)
    if number == errno.EINVAL:
        return InvalidRequest(f"{what!r} cannot be started as {user!r}: {problem.reason}")
    return SandboxError(f"{what!r} could not be started: {problem.reason}")
