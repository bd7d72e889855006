"""Every error that Atoll raises on purpose.

    AtollError
    ├── CallerError                 what was asked cannot be done as asked; ask differently
    │   ├── InvalidRequest          (ValueError)        an argument is wrong
    │   ├── SandboxNotFound         (LookupError)       no sandbox has this name
    │   ├── SandboxExists           (FileExistsError)   the name is taken
    │   ├── SandboxAsleep                               it was shut down, and wakes only when it is told to
    │   ├── CheckpointNotFound      (LookupError)       no checkpoint has this id or name
    │   ├── ProcessNotFound         (LookupError)       no such process is known in the sandbox
    │   ├── ImageUnavailable        (LookupError)       the image cannot be had
    │   ├── ArchiveRefused          (ValueError)        a file is no sandbox that may be imported
    │   ├── RuntimeUnavailable                          no runtime on this machine can do it
    │   └── Unenforceable                               a limit or a promise that this machine cannot keep
    ├── SandboxError                the sandbox failed; nothing in it can be trusted to have happened
    │   ├── LaunchFailed                                it did not start
    │   ├── SandboxDied             (ConnectionError)   it ended, by itself or by force
    │   └── GuestProtocolError      (ConnectionError)   it broke the protocol and was ended
    ├── ExecTimeout                 (TimeoutError)      the command ran too long; its tree is dead, its output kept
    ├── ModelFailed                 a model could not be asked, or gave no answer that can be used
    │   ├── ModelUnavailable        (ConnectionError)   for now; later it may work
    │   └── ScriptFailed                                a scripted model was not shown what its script expects
    ├── BudgetSpent                 an agent used up its steps or tokens; what it did until then is kept
    ├── PortRefused                 (ConnectionRefusedError)  nothing listens there, inside
    └── FileError                   (OSError)           a file operation inside failed
        ├── PathNotFound            (FileNotFoundError)
        ├── PathExists              (FileExistsError)
        ├── PathIsDirectory         (IsADirectoryError)
        ├── PathNotDirectory        (NotADirectoryError)
        ├── PathDenied              (PermissionError)
        └── DiskFull                                    no space, or a quota is used up

`message` says what was wrong, what is allowed and how to fix it, and is safe for a model and a remote caller.
`hint` is for whoever runs the machine: commands, paths, logs.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from atoll.contract.model import ExecResult


class AtollError(Exception):
    """The root of all errors of ours. `code` is stable; surfaces and programs may switch on it."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str | None = None, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details: Mapping[str, object] = details

    def __str__(self) -> str:
        return self.message

    def to_dict(self) -> dict[str, object]:
        """What a surface may show: the code, the message and the details; the hint is the operator's."""
        return {"code": self.code, "message": self.message, "retryable": self.retryable, "details": dict(self.details)}


class CallerError(AtollError):
    """What was asked cannot be done as asked."""

    code = "caller_error"


class InvalidRequest(CallerError, ValueError):
    code = "invalid_request"


class SandboxNotFound(CallerError, LookupError):
    code = "sandbox_not_found"

    def __init__(self, name: str, known: list[str]) -> None:
        have = ", ".join(repr(n) for n in known[:8]) or "there are none"
        super().__init__(f"no sandbox is named {name!r} (sandboxes: {have})", name=name, known=known[:64])
        self.name = name
        self.known = known


class SandboxExists(CallerError, FileExistsError):
    code = "sandbox_exists"

    def __init__(self, name: str) -> None:
        super().__init__(f"a sandbox named {name!r} exists already; use it, or destroy it first", name=name)


class SandboxAsleep(CallerError):
    code = "sandbox_asleep"


class NotCheckpointable(CallerError):
    """Its processes cannot be written to disk as they are. They go on."""

    code = "cannot_save"


class CheckpointNotFound(CallerError, LookupError):
    code = "checkpoint_not_found"

    def __init__(self, wanted: str, known: list[str]) -> None:
        have = ", ".join(repr(id) for id in known[:8]) or "there are none"
        super().__init__(f"there is no checkpoint {wanted!r} (checkpoints: {have})", wanted=wanted, known=known[:64])


class ProcessNotFound(CallerError, LookupError):
    code = "process_not_found"


class ImageUnavailable(CallerError, LookupError):
    code = "image_unavailable"


class ArchiveRefused(CallerError, ValueError):
    """`details["reason"]` is one of `malformed`, `truncated`, `checksum`, `version`, `unsafe`, `too_large`, `disk_full`
    and `image`, which says that the image here has not the directories that it needs."""

    code = "archive_refused"


class RuntimeUnavailable(CallerError):
    code = "runtime_unavailable"


class Unenforceable(CallerError):
    code = "unenforceable"


class SandboxError(AtollError):
    """The sandbox failed. This is never how a command's own failure is told: that is a value, an exit code."""

    code = "sandbox_error"


class LaunchFailed(SandboxError):
    code = "launch_failed"


class SandboxDied(SandboxError, ConnectionError):
    code = "sandbox_died"


class GuestProtocolError(SandboxError, ConnectionError):
    code = "guest_protocol_error"


class ExecTimeout(AtollError, TimeoutError):
    """Raised when a command did not end in time. Its whole process tree has been killed.

    `result` holds what it printed until then, with `timed_out=True`.
    """

    code = "exec_timeout"

    def __init__(self, message: str, result: ExecResult) -> None:
        super().__init__(message)
        self.result = result


class ModelFailed(AtollError):
    code = "model_failed"


class ModelUnavailable(ModelFailed, ConnectionError):
    code = "model_unavailable"
    retryable = True


class ScriptFailed(ModelFailed):
    code = "script_failed"


class BudgetSpent(AtollError):
    """The run can go on with its history and a larger budget."""

    code = "budget_spent"


class PortRefused(AtollError, ConnectionRefusedError):
    code = "port_refused"


class FileError(AtollError, OSError):
    """A file operation inside the sandbox failed; `errno` is the kernel's, `path` the one that was asked for."""

    code = "file_error"

    def __init__(self, message: str, *, number: int, path: str | None = None) -> None:
        super().__init__(message, errno=number, path=path)
        self.errno = number
        self.path = path


class PathNotFound(FileError, FileNotFoundError):
    code = "path_not_found"


class PathExists(FileError, FileExistsError):
    code = "path_exists"


class PathIsDirectory(FileError, IsADirectoryError):
    code = "path_is_directory"


class PathNotDirectory(FileError, NotADirectoryError):
    code = "path_not_directory"


class PermissionDenied(FileError, PermissionError):
    code = "path_denied"


class DiskFull(FileError):
    code = "disk_full"


FILE_ERRORS: Mapping[int, type[FileError]] = {
    errno.ENOENT: PathNotFound,
    errno.EEXIST: PathExists,
    errno.EISDIR: PathIsDirectory,
    errno.ENOTDIR: PathNotDirectory,
    errno.EACCES: PermissionDenied,
    errno.EPERM: PermissionDenied,
    errno.EROFS: PermissionDenied,
    errno.EXDEV: PermissionDenied,
    errno.ENOSPC: DiskFull,
    errno.EDQUOT: DiskFull,
}
"""The closed table from an errno that a guest sends to the error that a caller sees."""
