"""Checkpoints on disk: the record of each, and which layers it names.

Owns `checkpoints/<id>/checkpoint.json`, written in one step: a checkpoint exists or does not; and whose one is: that of
the sandbox with whose id it was taken, whatever sandbox has the name later, in the same namespace (`namespaces.py`).
Not here: how a sandbox is stopped or
started for one (`lifecycle/lifecycle.py`). Used by the engine and by `lifecycle/`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from atoll.contract.driver import ProcessImage
from atoll.contract.errors import CheckpointNotFound, InvalidRequest, SandboxError, SandboxNotFound
from atoll.contract.model import Checkpoint, SandboxSpec
from atoll.runtime.state.layers import ResolvedSpec
from atoll.runtime.state.namespaces import names_in, split_entry
from atoll.runtime.state.records import StoredRecord, read_record, remove_record, unreadable, write_record
from atoll.runtime.state.status import modified
from atoll.runtime.state.store import StateStore

_ID = re.compile(r"cp-[0-9a-f]+")


class CheckpointRecord(ResolvedSpec, StoredRecord):
    """All that is needed to create a sandbox from a checkpoint."""

    VERSION = 8
    checkpoint: Checkpoint
    spec: SandboxSpec


class Checkpoints:
    """The checkpoints of one namespace of a state directory: that of `store`."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._root = store.state_dir / "checkpoints"
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)

    @staticmethod
    def new_id() -> str:
        return f"cp-{os.urandom(6).hex()}"

    def memory(self, record: CheckpointRecord) -> ProcessImage | None:
        """The saved processes of a checkpoint, if it has any."""
        if not record.checkpoint.with_memory:
            return None
        return ProcessImage(path=self.directory(record.checkpoint.id) / "memory", hostname=record.spec.name)

    def directory(self, id: str) -> Path:
        return self._root / self._store.entry(id)

    def write(self, record: CheckpointRecord) -> None:
        """When this returns the checkpoint exists, whatever is killed."""
        directory = self.directory(record.checkpoint.id)
        directory.mkdir(mode=0o700, exist_ok=True)
        write_record(directory / "checkpoint.json", record)

    def read(self, id: str) -> CheckpointRecord:
        """
        Raises:
            CheckpointNotFound: no checkpoint has this id.
            SandboxError: its record cannot be read.
        """
        found = self._read(id) if _ID.fullmatch(id) else None
        if found is None:
            raise CheckpointNotFound(id, dict.fromkeys(sorted(record.checkpoint.id for record in self.all())))
        return found

    def find(self, wanted: str, sandbox: str | None = None) -> CheckpointRecord:
        """The checkpoint with this id, whosever it is, or this label. With `sandbox`, a name, only its labels count.

        Raises:
            CheckpointNotFound: no checkpoint has this id or label.
            InvalidRequest: checkpoints of several sandboxes have this label.
            SandboxNotFound: as `of`.
            SandboxError: its record cannot be read; or no checkpoint has this label, and there are records that cannot
                be read.
        """
        known, damaged = self._read_all()
        for record in known:
            if record.checkpoint.id == wanted:
                return record
        own = known if sandbox is None else self._of(sandbox, known)
        labelled = [record for record in own if record.checkpoint.label == wanted]
        if len({record.checkpoint.sandbox_id for record in labelled}) > 1:
            these = ", ".join(f"{each.checkpoint.id} of {each.checkpoint.sandbox!r}" for each in labelled[:8])
            raise InvalidRequest(f"several checkpoints have the label {wanted!r}: {these}; use the id of one")
        if labelled:
            return labelled[-1]  # of two, if moving a label was interrupted
        if damaged:
            raise damaged.get(wanted, next(iter(damaged.values())))
        labels = {record.checkpoint.id: record.checkpoint.label for record in own}
        raise CheckpointNotFound(wanted, labels | {r.checkpoint.id: None for r in known if r not in own})

    def of(self, sandbox: str) -> list[CheckpointRecord]:
        """The checkpoints of the sandbox with this name or, if none has it, of destroyed ones that had it, the oldest
        first.

        Raises:
            SandboxNotFound: no sandbox has this name, and no checkpoint is of one that had it.
        """
        return self._of(sandbox, self._read_all()[0])

    def _of(self, sandbox: str, known: Iterable[CheckpointRecord]) -> list[CheckpointRecord]:
        try:
            id = self._store.lookup(sandbox)
        except SandboxNotFound:
            former = [record for record in known if record.checkpoint.sandbox == sandbox]
            if not former:
                raise
            return former
        return [record for record in known if record.checkpoint.sandbox_id == id]

    def of_id(self, sandbox_id: str) -> list[CheckpointRecord]:
        """The checkpoints of the sandbox with this id, which may have been destroyed, the oldest first."""
        return [record for record in self.all() if record.checkpoint.sandbox_id == sandbox_id]

    def all(self) -> Iterator[CheckpointRecord]:
        """All checkpoints whose records can be read, the oldest first."""
        yield from self._read_all()[0]

    def unreadable(self) -> dict[str, SandboxError]:
        """The ids of the checkpoints whose records cannot be read, and the errors of `read`."""
        return self._read_all()[1]

    def describe_unreadable(self, id: str, error: SandboxError) -> Checkpoint:
        """One of `unreadable`, as `Engine.checkpoints` shows it."""
        directory = self.directory(id)
        return Checkpoint(
            id=id,
            sandbox="",
            sandbox_id="",
            created_at=modified(directory / "checkpoint.json", directory),
            with_memory=(directory / "memory").exists(),
            runtime="unknown",
            image="",
            reason=unreadable(error),
        )

    def references(self) -> tuple[list[CheckpointRecord], dict[str, SandboxError]]:
        """The checkpoints of all namespaces; and of those whose records cannot be read, the entries and the errors."""
        return self._read_entries(os.listdir(self._root))

    def _read_all(self) -> tuple[list[CheckpointRecord], dict[str, SandboxError]]:
        """The checkpoints of this namespace; and of those whose records cannot be read, the ids and the errors."""
        ids = names_in(self._store.namespace, os.listdir(self._root))
        records, damaged = self._read_entries(self._store.entry(id) for id in ids)
        return records, {split_entry(entry)[1]: error for entry, error in damaged.items()}

    def _read_entries(self, entries: Iterable[str]) -> tuple[list[CheckpointRecord], dict[str, SandboxError]]:
        records, damaged = [], {}
        for entry in entries:
            try:
                if (record := self._read_entry(entry)) is not None:
                    records.append(record)
            except SandboxError as error:
                damaged[entry] = error
        return sorted(records, key=lambda record: record.checkpoint.created_at), damaged

    def forget(self, id: str) -> None:
        """Delete a checkpoint's record. `remove_unreferenced` removes its other files."""
        remove_record(self.directory(id) / "checkpoint.json")

    def remove_unreferenced(self, spare: set[Path]) -> None:
        """Remove the files of deleted and unfinished checkpoints of all namespaces, except `spare`.

        Those whose records cannot be read stay. Call it with the layers locked exclusively.
        """
        import shutil

        for entry in os.listdir(self._root):
            directory = self._root / entry
            if directory not in spare and not os.path.lexists(directory / "checkpoint.json"):
                shutil.rmtree(directory, ignore_errors=True)

    def _read(self, id: str) -> CheckpointRecord | None:
        return self._read_entry(self._store.entry(id))

    def _read_entry(self, entry: str) -> CheckpointRecord | None:
        # A record that cannot be read is an error here, not an absent one: it names layers, which must not be removed.
        path = self._root / entry / "checkpoint.json"
        return read_record(path, CheckpointRecord, f"checkpoint {split_entry(entry)[1]}")
