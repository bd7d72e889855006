"""The audit log of code: one record for each execution and each call, a file per session.

Owns `CodeAudit`, which an executor writes to, and how records are bounded and read. Not here: what is recorded
(`executor.py`), and how a timeline is drawn (`trace.py`). Used by these and by the command line.

A file is `code/<session>.jsonl` in the state directory, with the namespace in front unless that is the default; when it
is full it becomes `<session>.older`, and what that was is lost. It outlives its session; those of the newest
`MAX_SESSIONS` are kept. What was written survives the death of this process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pydantic_core
from pydantic import BaseModel, ConfigDict

from atoll.code.results import NO_OUTPUT, CallRecord, ExecutionResult
from atoll.contract.errors import InvalidRequest
from atoll.contract.names import DEFAULT_NAMESPACE
from atoll.runtime.state.namespaces import entry_of, split_entry
from atoll.tools.tool import readable, readable_all

MAX_SESSIONS = 500
MAX_FILE_BYTES = 8 * 1024 * 1024
_MAX_TEXT_CHARS = 20_000
_MAX_ARGUMENTS_BYTES = 8192
_SESSION = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


class AuditEntry(BaseModel):
    """One line of the log."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["execution", "call"]
    time: datetime
    """When it began."""
    cell: int
    duration_s: float
    verdict: str
    """`ok`, or why it failed or was refused."""
    code: str | None = None
    """Of an execution. A long one is cut; `code_sha256` is that of the whole."""
    code_sha256: str | None = None
    output: str | None = None
    """What an execution has printed; cut if it is long."""
    tool: str | None = None
    arguments: Any = None
    result_bytes: int | None = None


class TraceSummary(BaseModel):
    """What a session's log has, without its records."""

    model_config = ConfigDict(frozen=True)

    session_id: str
    last_at: datetime
    """When something was last recorded."""
    executions: int
    calls: int


class CodeAudit:
    """Writes the records of an executor's sessions, in one namespace."""

    def __init__(self, state_dir: Path, namespace: str = DEFAULT_NAMESPACE) -> None:
        self._directory = state_dir / "code"
        self._namespace = namespace

    def execution(self, session_id: str, cell: int, code: str, result: ExecutionResult) -> None:
        """Record an execution that has ended."""
        verdict = "ok" if result.error is None else f"{result.error.type}: {result.error.message}"
        began = datetime.now(UTC).timestamp() - result.duration_s
        entry = AuditEntry(
            kind="execution",
            time=datetime.fromtimestamp(began, UTC),
            cell=cell,
            duration_s=result.duration_s,
            verdict=_cut(verdict, 1000),
            code=_cut(code),
            code_sha256=hashlib.sha256(code.encode("utf-8", "backslashreplace")).hexdigest(),
            output=None if result.text == NO_OUTPUT else _cut(result.text),
        )
        self._write(session_id, entry)

    def call(self, session_id: str, cell: int, record: CallRecord) -> None:
        """Record a call that has ended."""
        size = len(pydantic_core.to_json(record.arguments))
        arguments: Any = f"[{size} bytes]" if size > _MAX_ARGUMENTS_BYTES else readable_all(dict(record.arguments))
        entry = AuditEntry(
            kind="call",
            time=record.started_at,
            cell=cell,
            duration_s=record.duration_s,
            verdict=_cut(record.error or "ok", 1000),
            tool=readable(record.tool),
            arguments=arguments,
            result_bytes=record.result_bytes,
        )
        self._write(session_id, entry)

    def _write(self, session_id: str, entry: AuditEntry) -> None:
        path = self._path(session_id)
        if not path.exists():
            self._directory.mkdir(mode=0o700, exist_ok=True)
            self._prune()
        line = entry.model_dump_json(exclude_none=True).encode() + b"\n"
        # Without a sync: it survives this process, though not always a crash of the machine.
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, line)
            is_full = os.fstat(fd).st_size > MAX_FILE_BYTES
        finally:
            os.close(fd)
        if is_full:  # as many calls as code may make must not hide those that come after them
            path.rename(_older(path))

    def _prune(self) -> None:
        logs = [path for path in self._logs() if path.suffix == ".jsonl"]
        for old in logs[: max(0, len(logs) - MAX_SESSIONS + 1)]:
            old.unlink(missing_ok=True)
            _older(old).unlink(missing_ok=True)

    def sessions(self) -> list[str]:
        """The sessions that have a log, the newest first."""
        return list(dict.fromkeys(split_entry(path.stem)[1] for path in reversed(self._logs())))

    def clear(self) -> None:
        """Remove the logs of all sessions."""
        for path in self._logs():
            for each in (path, _older(path)):
                each.unlink(missing_ok=True)

    def _logs(self) -> list[Path]:
        """The files of this namespace, that which was last written to at the end."""
        found = [*self._directory.glob("*.jsonl"), *self._directory.glob("*.older")]
        return sorted((path for path in found if split_entry(path.stem)[0] == self._namespace), key=_changed)

    def summary(self, session_id: str) -> TraceSummary:
        """What the log of a session has.

        Raises:
            InvalidRequest: it has none.
        """
        data = self._data(session_id)
        return TraceSummary(
            session_id=session_id,
            last_at=datetime.fromtimestamp(_changed(self._path(session_id)), UTC),
            executions=data.count(b'{"kind":"execution"'),
            calls=data.count(b'{"kind":"call"'),
        )

    def read(self, session_id: str) -> list[AuditEntry]:
        """The records of a session, the oldest first.

        Raises:
            InvalidRequest: it has none.
        """
        found = []
        for line in self._data(session_id).splitlines():
            with contextlib.suppress(ValueError):  # incomplete: the disk was full
                found.append(AuditEntry.model_validate_json(line))
        return sorted(found, key=lambda entry: entry.time)

    def _data(self, session_id: str) -> bytes:
        path = self._path(session_id)
        data = b"".join(each.read_bytes() for each in (_older(path), path) if each.exists())
        if not data:
            known = ", ".join(self.sessions()[:8]) or "there are none"
            raise InvalidRequest(f"no session {session_id!r} has a trace (sessions: {known})")
        return data

    def _path(self, session_id: str) -> Path:
        if not _SESSION.fullmatch(session_id):
            raise InvalidRequest(f"{session_id!r} is not the id of a session")
        return self._directory / f"{entry_of(self._namespace, session_id)}.jsonl"


def _older(path: Path) -> Path:
    """Where the records are that were written before a log was full."""
    return path.with_suffix(".older")


def _changed(path: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0


def _cut(text: str, limit: int = _MAX_TEXT_CHARS) -> str:
    text = readable(text)
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 2 :]}"
