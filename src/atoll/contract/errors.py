"""Every error that Atoll raises on purpose.

    AtollError
    ├── CallerError                 the request cannot be fulfilled; change it
    │   ├── InvalidRequest          (ValueError)        an argument is wrong
    │   │   ├── UserNotFound        (LookupError)       the sandbox has no user of this name
    │   │   └── Conflict                                of a server: it is in use, or in a state that forbids it
    │   ├── SandboxNotFound         (LookupError)       no sandbox has this name
    │   ├── SandboxExists           (FileExistsError)   the name is taken
    │   ├── SandboxShutdown                             it was shut down; only `wake` starts it
    │   ├── NotCheckpointable                           the runtime cannot save its processes; they go on
    │   ├── CheckpointNotFound      (LookupError)       no checkpoint has this id or label
    │   ├── VolumeNotFound          (LookupError)       no volume has this name
    │   ├── VolumeExists            (FileExistsError)   the name is taken
    │   ├── CheckpointExists        (FileExistsError)   another checkpoint of the sandbox has the label
    │   ├── ProcessNotFound         (LookupError)       no such process is known in the sandbox
    │   ├── ImageUnavailable        (LookupError)       the image cannot be fetched or read
    │   ├── ImageNotFound           (LookupError)       no image of this reference is on the machine
    │   ├── ArchiveRefused          (ValueError)        the file is not an archive that can be imported
    │   ├── BuildFailed             (ValueError)        a step of a build failed, or it cannot be built
    │   ├── TemplateNotFound        (LookupError)       no template has this name, or not this tag
    │   ├── BuildNotFound           (LookupError)       no build of a server has this id
    │   ├── BundleFailed            (ValueError)        a tool bundle cannot be used; `reason` says at which step
    │   ├── BundleNotFound          (LookupError)       no tool bundle has this id
    │   ├── ProjectConflict                             files of a project were changed since it was copied
    │   ├── RuntimeUnavailable                          the runtime, or any, is not on this machine
    │   ├── Unenforceable                               this machine cannot enforce a limit or a guarantee
    │   ├── Unauthenticated                             the server needs an API key, and this is none of its keys
    │   ├── Forbidden               (PermissionError)   the key, or the tenant's policy, does not allow it
    │   ├── QuotaExceeded                               the tenant would use more than its quota
    │   ├── RateLimited                                 the tenant has sent too many requests; it may wait and retry
    │   ├── IdempotencyMismatch                         the idempotency key was used for another request
    │   ├── OutcomeUnknown                              whether an interrupted request was carried out is not known
    │   ├── TenantNotFound          (LookupError)       no tenant has this name
    │   ├── TenantExists            (FileExistsError)   the name is taken
    │   ├── KeyNotFound             (LookupError)       no API key has this id
    │   ├── WebhookNotFound         (LookupError)       no webhook has this id
    │   ├── ConfigNotFound          (LookupError)       no agent config has this id, or not this version or instance
    │   ├── ConversationNotFound    (LookupError)       no conversation has this id, or no turn in it
    │   ├── CodeSessionNotFound     (LookupError)       no session of code, or execution in it, has this id
    │   ├── CodeSessionBusy                             the session runs code, or waits for the client
    │   └── ApprovalNotFound        (LookupError)       no call waits for this approval
    ├── SandboxError                the sandbox failed; nothing in it can be trusted to have happened
    │   ├── LaunchFailed                                it did not start
    │   ├── SandboxDied             (ConnectionError)   it ended, or the connection to it was lost
    │   ├── GuestUnresponsive       (ConnectionError)   it runs and does not answer; it may answer later
    │   └── GuestProtocolError      (ConnectionError)   it broke the protocol and was stopped
    ├── ExecTimeout                 (TimeoutError)      the command timed out; its process tree is killed
    ├── ServerUnavailable           (ConnectionError)   the server of `atoll.connect` cannot be reached, or went away
    ├── FetchFailed                 (ConnectionError)   `fetch_data` was refused, or its request failed
    ├── ModelFailed                 the model request failed, or its answer is unusable
    │   ├── ModelUnavailable        (ConnectionError)   temporarily; it may be retried
    │   └── ScriptFailed                                a scripted model got another input than its script
    ├── BudgetExceeded              an agent used up its steps or tokens; its history is kept
    ├── ToolCallError               a call of a registered tool failed, or was refused
    ├── DatabaseUnavailable         (ConnectionError)   the server's database does not answer; it may be retried
    ├── PortRefused                 (ConnectionRefusedError)  nothing listens there, inside
    ├── TooManyProcesses            (BlockingIOError)   the sandbox runs as many as its limits allow
    └── FileError                   (OSError)           a file operation inside failed
        ├── PathNotFound            (FileNotFoundError)
        ├── PathExists              (FileExistsError)
        ├── PathIsDirectory         (IsADirectoryError)
        ├── PathNotDirectory        (NotADirectoryError)
        ├── PermissionDenied        (PermissionError)
        └── DiskFull                                    no space, or the quota is used up

`message` says what was wrong, what is allowed and how to fix it, and is safe for a model and a remote caller.
`hint` is for the operator of the machine: commands, paths, logs. A test compares the tree with the classes.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from atoll.contract.model import ExecResult


def told_elsewhere(error: AtollError) -> str:
    """The message of an error as clients of a server may see it: without the images that its machine has."""
    return error.message.partition(ImageUnavailable.PRESENT)[0]


def install_extra(extra: str) -> str:
    """How to install what an extra of Atoll brings, for messages. Not by a bare name, which would be another's package
    on a public index."""
    return (
        f"install Atoll with its extra {extra!r}, from the directory of its sources or from a wheel: "
        f"pip install '/path/to/atoll[{extra}]'"
    )


class AtollError(Exception):
    """The root of all errors of Atoll. `code` is stable; surfaces and programs may switch on it."""

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
        """What a surface may show: the code, the message and the details. Not the hint, which is for the operator."""
        return {"code": self.code, "message": self.message, "retryable": self.retryable, "details": dict(self.details)}


class CallerError(AtollError):
    """The request cannot be fulfilled as it is."""

    code = "caller_error"


class InvalidRequest(CallerError, ValueError):
    code = "invalid_request"


class UserNotFound(InvalidRequest, LookupError):
    code = "user_not_found"

    def __init__(self, user: str, message: str | None = None) -> None:
        super().__init__(message or f"there is no user {user!r} in the sandbox", user=user)
        self.user = user


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


class SandboxShutdown(CallerError):
    code = "sandbox_shutdown"


class NotCheckpointable(CallerError):
    """The runtime cannot save the processes of the sandbox to disk. They go on."""

    code = "not_checkpointable"


class CheckpointNotFound(CallerError, LookupError):
    code = "checkpoint_not_found"

    def __init__(self, wanted: str, known: Mapping[str, str | None]) -> None:
        """`known` maps the id of each checkpoint to the label that would find it, if there is one."""
        shown = [id if label is None else f"{id} with the label {label!r}" for id, label in known.items()]
        have = ", ".join(shown[:8]) or "there are none"
        super().__init__(
            f"no checkpoint has the id or label {wanted!r} (checkpoints: {have})",
            wanted=wanted,
            known=[*known][:64],
            labels=[label for label in known.values() if label is not None][:64],
        )


class VolumeNotFound(CallerError, LookupError):
    code = "volume_not_found"

    def __init__(self, name: str, known: list[str], *, hint: str | None = None) -> None:
        have = ", ".join(repr(n) for n in known[:8]) or "there are none"
        super().__init__(f"no volume is named {name!r} (volumes: {have})", hint=hint, name=name, known=known[:64])


class VolumeExists(CallerError, FileExistsError):
    code = "volume_exists"

    def __init__(self, name: str) -> None:
        super().__init__(f"a volume named {name!r} exists already; use it, or remove it first", name=name)


class CheckpointExists(CallerError, FileExistsError):
    code = "checkpoint_exists"

    def __init__(self, label: str, id: str, sandbox: str) -> None:
        super().__init__(
            f"the checkpoint {id} of this sandbox has the label {label!r} already; choose another label, delete that "
            "checkpoint, or move the label to the new one",
            hint=f"atoll checkpoint {sandbox} {label} --move",
            label=label,
            id=id,
        )


class ProcessNotFound(CallerError, LookupError):
    code = "process_not_found"


class ImageUnavailable(CallerError, LookupError):
    """Where images of the machine are listed, that is the end of the message, after `PRESENT`: not for clients of a
    server (`told_elsewhere`)."""

    code = "image_unavailable"
    PRESENT: ClassVar[str] = " (present here: "


class ImageNotFound(CallerError, LookupError):
    """An image cannot be removed that is not there. One that a sandbox needs is `ImageUnavailable`."""

    code = "image_not_found"

    def __init__(self, reference: str) -> None:
        super().__init__(f"no image is present as {reference!r}", reference=reference)


class ArchiveRefused(CallerError, ValueError):
    """`details["reason"]` is one of `malformed`, `truncated`, `checksum`, `version`, `unsafe`, `too_large`, `disk_full`
    and `image`: the image on this machine lacks directories that the archive needs."""

    code = "archive_refused"


class BuildFailed(CallerError, ValueError):
    """A template cannot be built. `step` is the number of the step, from 1; unset: it is none of them."""

    code = "build_failed"

    def __init__(self, message: str, *, step: int | None = None, hint: str | None = None, **details: object) -> None:
        super().__init__(message, hint=hint, step=step, **details)
        self.step = step


class TemplateNotFound(CallerError, LookupError):
    code = "template_not_found"

    def __init__(self, wanted: str, there: Sequence[str]) -> None:
        shown = ", ".join(there[:16]) or "none"
        super().__init__(f"there is no template {wanted!r}; there are: {shown}", template=wanted)


class BuildNotFound(CallerError, LookupError):
    code = "build_not_found"

    def __init__(self, build: str, message: str | None = None) -> None:
        super().__init__(message or f"no build has the id {build!r}; those of long ago are forgotten", build=build)


class BundleFailed(CallerError, ValueError):
    """`reason` is a `BundleReason`: which step of fetching, checking, building or importing a bundle failed."""

    code = "bundle_failed"

    def __init__(self, reason: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint, reason=reason)
        self.reason = reason


class BundleNotFound(CallerError, LookupError):
    code = "bundle_not_found"

    def __init__(self, bundle_id: str) -> None:
        super().__init__(f"there is no bundle {bundle_id!r}; upload one with POST /api/v1/bundles", bundle_id=bundle_id)


class ProjectConflict(CallerError):
    """Changes of a project were not applied, none of them. `details["paths"]` are files that were changed meanwhile."""

    code = "project_conflict"


class RuntimeUnavailable(CallerError):
    code = "runtime_unavailable"


class Unenforceable(CallerError):
    code = "unenforceable"


class Unauthenticated(CallerError):
    """The request has no API key, or one that is unknown, expired or revoked. The message does not say which."""

    code = "unauthenticated"


class Forbidden(CallerError, PermissionError):
    """The API key lacks the scope, or the policy of its tenant does not allow what was asked for."""

    code = "forbidden"


class QuotaExceeded(CallerError):
    """`details` has the `quota`, and what is `used`, was `asked` for and is `allowed`."""

    code = "quota_exceeded"

    def __init__(self, quota: str, *, used: float, asked: float, allowed: float, message: str | None = None) -> None:
        holders = "sandboxes, volumes or tool bundles" if quota == "disk_bytes" else "sandboxes"
        super().__init__(
            message
            or f"the tenant's quota of {quota} does not suffice: {used:,g} used, {asked:,g} asked for, {allowed:,g} "
            f"allowed; remove {holders} that are not needed, ask for less, or have the quota raised",
            quota=quota,
            used=used,
            asked=asked,
            allowed=allowed,
        )


class RateLimited(CallerError):
    """`retry_after_s` is when the next request will be accepted."""

    code = "rate_limited"
    retryable = True

    def __init__(self, requests_per_minute: int, retry_after_s: float) -> None:
        super().__init__(
            f"this tenant may send {requests_per_minute} requests per minute; try again in {retry_after_s:.1f} s",
            requests_per_minute=requests_per_minute,
            retry_after_s=retry_after_s,
        )
        self.retry_after_s = retry_after_s


class IdempotencyMismatch(CallerError):
    code = "idempotency_mismatch"


class Conflict(InvalidRequest):
    """A server's refusal of a request that is right by itself: something is in use, or in another state."""

    code = "conflict"


class OutcomeUnknown(CallerError):
    code = "outcome_unknown"


class TenantNotFound(CallerError, LookupError):
    code = "tenant_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(f"no tenant is named {name!r}", hint="atoll tenants ls", name=name)


class TenantExists(CallerError, FileExistsError):
    code = "tenant_exists"

    def __init__(self, name: str) -> None:
        super().__init__(f"a tenant named {name!r} exists already; choose another name, or update it", name=name)


class KeyNotFound(CallerError, LookupError):
    code = "key_not_found"

    def __init__(self, id: str) -> None:
        super().__init__(f"no API key has the id {id!r}", id=id)


class WebhookNotFound(CallerError, LookupError):
    code = "webhook_not_found"

    def __init__(self, id: str) -> None:
        super().__init__(f"no webhook has the id {id!r}", id=id)


class ConfigNotFound(CallerError, LookupError):
    code = "config_not_found"


class ConversationNotFound(CallerError, LookupError):
    code = "conversation_not_found"


class CodeSessionNotFound(CallerError, LookupError):
    code = "code_session_not_found"


class CodeSessionBusy(CallerError):
    code = "code_session_busy"


class ApprovalNotFound(CallerError, LookupError):
    code = "approval_not_found"


class SandboxError(AtollError):
    """The sandbox failed. A command's own failure never raises this: it is a value, the exit code."""

    code = "sandbox_error"


class LaunchFailed(SandboxError):
    code = "launch_failed"


class SandboxDied(SandboxError, ConnectionError):
    code = "sandbox_died"


class GuestUnresponsive(SandboxError, ConnectionError):
    """The sandbox runs, but its guest has not answered for too long, not even to a ping: root inside may have stopped
    it. Whether the operation was carried out is not known. Destroying the sandbox works."""

    code = "guest_unresponsive"
    retryable = True


class GuestProtocolError(SandboxError, ConnectionError):
    code = "guest_protocol_error"


class ExecTimeout(AtollError, TimeoutError):
    """The command timed out. Its whole process tree has been killed.

    `result` holds its output until then, with `timed_out=True`.
    """

    code = "exec_timeout"

    def __init__(self, message: str, result: ExecResult) -> None:
        super().__init__(message)
        self.result = result


class ServerUnavailable(AtollError, ConnectionError):
    """The server cannot be reached, or the connection broke before it answered: what was asked for may be done.
    Requests that may be repeated have been, for a while."""

    code = "server_unavailable"
    retryable = True


class FetchFailed(AtollError, ConnectionError):
    """A request of `fetch_data` is not allowed, or has failed. `status` is the server's, if there was an answer."""

    code = "fetch_failed"

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message, status=status)
        self.status = status


class ModelFailed(AtollError):
    code = "model_failed"


class ModelUnavailable(ModelFailed, ConnectionError):
    code = "model_unavailable"
    retryable = True


class ScriptFailed(ModelFailed):
    code = "script_failed"


class BudgetExceeded(AtollError):
    """The agent used up its budget. The run can continue with its history and a larger budget."""

    code = "budget_exceeded"


class ToolCallError(AtollError):
    """A call of a registered tool failed. `type` is the name of the exception that the tool raised, or one of
    `UnknownTool`, `NotAllowed`, `InvalidArguments`, `TimeoutError` and `InvalidResult`; code gets both."""

    code = "tool_call_failed"

    def __init__(self, type: str, message: str) -> None:
        super().__init__(message, type=type)
        self.type = type


class DatabaseUnavailable(AtollError, ConnectionError):
    """Whether what was asked for is stored is not known."""

    code = "database_unavailable"
    retryable = True


class PortRefused(AtollError, ConnectionRefusedError):
    code = "port_refused"


class TooManyProcesses(AtollError, BlockingIOError):
    code = "too_many_processes"
    retryable = True


class FileError(AtollError, OSError):
    """A file operation inside the sandbox failed; `errno` is the kernel's, `path` the requested one."""

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
    code = "permission_denied"


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
"""From an errno that a guest sends to the error that the caller gets. Any other errno is a plain `FileError`."""
