"""What HTTP surfaces share, without a server. Which requests are accepted is in `tests/mcp/test_door.py`."""

from __future__ import annotations

import errno

import pytest

from atoll.contract import errors
from atoll.contract.model import ExecResult
from atoll.surfaces.door import status_of

TIMED_OUT = ExecResult(exit_code=137, duration_s=1, timed_out=True, stdout="", stderr="")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InvalidRequest("wrong"), 400),
        (errors.Unenforceable("not here"), 400),
        (errors.ArchiveRefused("malformed"), 400),
        (errors.SandboxNotFound("box", []), 404),
        (errors.CheckpointNotFound("label", {}), 404),
        (errors.ProcessNotFound("gone"), 404),
        (errors.SandboxExists("box"), 409),
        (errors.Unauthenticated("no key"), 401),
        (errors.Forbidden("not yours"), 403),
        (errors.QuotaExceeded("sandboxes", used=3, asked=1, allowed=3), 403),
        (errors.RateLimited(60, 1.0), 429),
        (errors.IdempotencyMismatch("another request"), 422),
        (errors.OutcomeUnknown("interrupted"), 409),
        (errors.TenantNotFound("acme"), 404),
        (errors.TenantExists("acme"), 409),
        (errors.KeyNotFound("k1"), 404),
        (errors.WebhookNotFound("w1"), 404),
        (errors.ConfigNotFound("none"), 404),
        (errors.ConversationNotFound("none"), 404),
        (errors.DatabaseUnavailable("gone"), 503),
        (errors.ImageUnavailable("unreachable"), 503),
        (errors.RuntimeUnavailable("not installed"), 503),
        (errors.ModelUnavailable("overloaded"), 503),
        (errors.ExecTimeout("timed out", TIMED_OUT), 504),
        (errors.PathNotFound("no file", number=errno.ENOENT), 404),
        (errors.PathExists("a file", number=errno.EEXIST), 409),
        (errors.PermissionDenied("not allowed", number=errno.EACCES), 403),
        (errors.PathIsDirectory("a directory", number=errno.EISDIR), 400),
        (errors.DiskFull("full", number=errno.ENOSPC), 507),
        (errors.LaunchFailed("failed"), 500),
        (errors.SandboxDied("ended"), 500),
        (errors.GuestProtocolError("broken"), 500),
        (errors.AtollError("any other"), 500),
    ],
    ids=lambda value: value.code if isinstance(value, errors.AtollError) else str(value),
)
def test_an_error_has_an_http_status(error: errors.AtollError, status: int) -> None:
    assert status_of(error) == status
