"""Approvals: calls that wait until a person, or a program, has decided on them.

Owns `Approver`, which an executor asks, and `StoredApprovals`, one that writes requests to the state directory, so that
they outlive the process that asked: `atoll approvals` and any other program can decide. Not here: the call itself and
the time that it waits (`executor.py`). Used by `executor.py` and by the command line.

A request is one record, `approvals/<id>.json`, with the namespace in front of the id unless that is the default. The
one who decides writes it again, under the lock `approvals.lock`; the process that asked polls it. Asked again for the
same call of the same kernel, by a process that resumed its session, the record is found again with its decision:
nothing is asked twice. A call that no longer waits is withdrawn, so that no decision on it is asked for.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import anyio
import anyio.to_thread
from pydantic_core import to_json

from atoll.contract.errors import InvalidRequest, SandboxError, ToolCallError
from atoll.contract.names import DEFAULT_NAMESPACE
from atoll.drivers.locks import locked
from atoll.runtime.state.namespaces import entry_of, names_in
from atoll.runtime.state.records import StoredRecord, read_record, remove_record, write_record

_log = logging.getLogger(__name__)
_POLL_S = 0.1
_LOCK_S = 10.0
_MAX_PENDING = 10_000


@dataclass(frozen=True)
class ApprovalRequest:
    """A call that needs an approval, with all that is known of it. Everything but the ids comes from the code."""

    session_id: str
    sandbox: str
    process_id: int
    code: str
    cell: int
    call: int
    tool: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ApprovalDecision:
    """A decision on a request."""

    allowed: bool
    reason: str = ""
    """Why not; the code sees it."""
    arguments: Mapping[str, Any] | None = None
    """The arguments to use instead. Unset: those of the code."""


class Approver(Protocol):
    """Decides on calls of tools with `needs_approval`."""

    async def decide(self, request: ApprovalRequest) -> ApprovalDecision:
        """The decision. May wait for as long as it takes: the time does not count as time of the code."""

    async def withdraw(self, request: ApprovalRequest) -> None:
        """No call waits for this decision any more: the code was interrupted, or its session is closed. Called after
        `decide` was cancelled. It is not called when the session goes on elsewhere, where `decide` is asked again."""


class AskingApprover:
    """An approver that asks a function of the program."""

    def __init__(self, ask: Callable[[ApprovalRequest], Awaitable[ApprovalDecision | bool]]) -> None:
        self._ask = ask

    async def decide(self, request: ApprovalRequest) -> ApprovalDecision:
        decision = await self._ask(request)
        return ApprovalDecision(decision) if isinstance(decision, bool) else decision

    async def withdraw(self, request: ApprovalRequest) -> None:
        pass  # the function was cancelled


def denial(request: ApprovalRequest, decision: ApprovalDecision) -> ToolCallError:
    """The error that the code gets for a call that was denied."""
    why = f": {decision.reason}" if decision.reason else ""
    return ToolCallError("ApprovalDenied", f"{request.tool} was not approved{why}")


async def try_to_withdraw(approver: Approver, request: ApprovalRequest) -> None:
    """Withdraw a request. What goes wrong is only in the log: nothing waits for it."""
    try:
        await approver.withdraw(request)
    except Exception as error:  # noqa: BLE001 - the approver is the caller's own
        _log.error("a request for %s could not be withdrawn", request.tool, exc_info=error)


class Approval(StoredRecord):
    """A request on disk, with its decision once there is one."""

    VERSION: ClassVar[int] = 1

    id: str
    session_id: str
    sandbox: str
    process_id: int
    code: str
    cell: int
    call: int
    tool: str
    arguments: dict[str, Any]
    asked_at: datetime
    status: Literal["pending", "allowed", "denied"] = "pending"
    reason: str = ""
    changed_arguments: dict[str, Any] | None = None
    decided_at: datetime | None = None

    @property
    def decision(self) -> ApprovalDecision | None:
        if self.status == "pending":
            return None
        return ApprovalDecision(self.status == "allowed", self.reason, self.changed_arguments)


class StoredApprovals:
    """An approver whose requests are records in a state directory, those of one namespace."""

    def __init__(self, state_dir: Path, namespace: str = DEFAULT_NAMESPACE) -> None:
        self._namespace = namespace
        self._directory = state_dir / "approvals"
        self._lock = state_dir / "approvals.lock"
        self._names = state_dir / "names"

    async def decide(self, request: ApprovalRequest) -> ApprovalDecision:
        """Write the request, and wait until it is decided. Its record is removed then; if this is cancelled, or its
        process ends, the record stays."""
        found = await anyio.to_thread.run_sync(self._find, request)
        approval = found or await self._write_request(request)
        seen = None
        while (decision := approval.decision) is None:
            await anyio.sleep(_POLL_S)
            if (now := _version(self._path(approval.id))) == seen:
                continue
            seen, read = now, self._read(approval.id)
            if read is None:
                return ApprovalDecision(allowed=False, reason="the request was removed")
            approval = read
        remove_record(self._path(approval.id))
        return decision

    async def withdraw(self, request: ApprovalRequest) -> None:
        found = await anyio.to_thread.run_sync(self._find, request)
        if found is not None:
            async with self._locked():
                remove_record(self._path(found.id))

    def list(self, session_id: str | None = None) -> list[Approval]:
        """The requests that are kept, the oldest first. Records that cannot be read are left out, and those whose
        sandbox is gone are removed: nothing can go on there."""
        found = []
        for id in sorted(self._ids()):
            try:
                approval = self._read(id)
            except SandboxError:
                continue
            if approval is not None and not os.path.lexists(self._names / entry_of(self._namespace, approval.sandbox)):
                remove_record(self._path(id))
            elif approval is not None and session_id in (None, approval.session_id):
                found.append(approval)
        return sorted(found, key=lambda each: each.asked_at)

    def get(self, id: str) -> Approval:
        """The request with this id, or with an id that begins so.

        Raises:
            InvalidRequest: there is none, or more than one.
        """
        found = [each for each in self.list() if each.id.startswith(id)]
        if len(found) == 1 and id:
            return found[0]
        known = ", ".join(each.id for each in self.list()[:8]) or "there are none"
        problem = "no approval has" if not found else "several approvals have ids that begin with"
        raise InvalidRequest(f"{problem} the id {id!r} (approvals: {known})")

    async def allow(self, id: str, arguments: Mapping[str, Any] | None = None) -> Approval:
        """Let the call be made, with other arguments if they are given.

        Raises:
            InvalidRequest: there is no such request, or it is decided already.
        """
        return await self._settle(
            id, status="allowed", changed_arguments=None if arguments is None else dict(arguments)
        )

    async def deny(self, id: str, reason: str = "") -> Approval:
        """Refuse the call. The code gets an error with the reason.

        Raises:
            InvalidRequest: there is no such request, or it is decided already.
        """
        return await self._settle(id, status="denied", reason=reason)

    async def _settle(self, id: str, **changes: Any) -> Approval:
        self.get(id)  # where there is none, there may be no directory either
        async with self._locked():
            approval = self.get(id)
            if approval.status != "pending":
                raise InvalidRequest(f"the approval {approval.id} is {approval.status} already")
            decided = approval.model_copy(update={"decided_at": datetime.now(UTC), **changes})
            write_record(self._path(approval.id), decided, durable=True)
            return decided

    async def _write_request(self, request: ApprovalRequest) -> Approval:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        async with self._locked():
            if len(self._ids()) > _MAX_PENDING:
                raise InvalidRequest(f"{_MAX_PENDING} approvals are pending; decide on some with `atoll approvals`")
            approval = Approval(
                id=secrets.token_hex(4),
                session_id=request.session_id,
                sandbox=request.sandbox,
                process_id=request.process_id,
                code=request.code,
                cell=request.cell,
                call=request.call,
                tool=request.tool,
                arguments=dict(request.arguments),
                asked_at=datetime.now(UTC),
            )
            write_record(self._path(approval.id), approval, durable=True)
            return approval

    def _find(self, request: ApprovalRequest) -> Approval | None:
        """The record of the same call, which a process that is gone has asked for."""
        for each in self.list(request.session_id):
            asked = (each.process_id, each.cell, each.call, each.tool)
            same = asked == (request.process_id, request.cell, request.call, request.tool)
            if same and to_json(each.arguments) == to_json(request.arguments):  # 1 is not true
                return each
        return None

    def _ids(self) -> Sequence[str]:
        entries = [path.stem for path in self._directory.glob("*.json")] if self._directory.is_dir() else []
        return names_in(self._namespace, entries)

    def _read(self, id: str) -> Approval | None:
        return read_record(self._path(id), Approval, f"the approval {id}")

    def _path(self, id: str) -> Path:
        return self._directory / f"{entry_of(self._namespace, id)}.json"

    def _locked(self) -> AbstractAsyncContextManager[None]:
        return locked(self._lock, _LOCK_S, "changing approvals")


def _version(path: Path) -> tuple[int, int] | None:
    """Differs when a record was written again. None: it is gone."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns
