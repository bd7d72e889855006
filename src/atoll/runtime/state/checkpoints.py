"""Checkpoints on disk: what each one is, and which layers it names.

Knows `checkpoints/<id>/checkpoint.json`, written whole and put in place by a rename: a checkpoint is there or it is
not. Refuses to know how a sandbox is stopped or started for one (`life.py`).
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from atoll.contract.driver import ProcessImage
from atoll.contract.errors import CheckpointNotFound
from atoll.contract.model import Checkpoint, SandboxSpec
from atoll.runtime.state.layers import ResolvedSpec
from atoll.runtime.state.records import StoredRecord, read_record, write_record


class CheckpointRecord(ResolvedSpec, StoredRecord):
    """All that is needed to make a sandbox of a checkpoint."""

    VERSION = 2
    checkpoint: Checkpoint
    spec: SandboxSpec


class Checkpoints:
    def __init__(self, state_dir: Path) -> None:
        self._root = state_dir / "checkpoints"
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)

    @staticmethod
    def new_id() -> str:
        return f"cp-{secrets.token_hex(6)}"

    def memory(self, record: CheckpointRecord) -> ProcessImage | None:
        """The processes that are part of a checkpoint, if any are."""
        if not record.checkpoint.with_memory:
            return None
        return ProcessImage(path=self.directory(record.checkpoint.id) / "memory", hostname=record.spec.name)

    def directory(self, id: str) -> Path:
        return self._root / id

    def write(self, record: CheckpointRecord) -> None:
        """From when this returns, the checkpoint is there, whatever is killed."""
        directory = self.directory(record.checkpoint.id)
        directory.mkdir(mode=0o700, exist_ok=True)
        write_record(directory / "checkpoint.json", record)

    def read(self, id: str) -> CheckpointRecord:
        """
        Raises:
            CheckpointNotFound: there is none.
        """
        found = self._read(id) if "/" not in id else None
        if found is None:
            raise CheckpointNotFound(id, sorted(record.checkpoint.id for record in self.all()))
        return found

    def find(self, wanted: str, sandbox: str | None = None) -> CheckpointRecord:
        """The checkpoint with this id or, of one sandbox, this name; of several with the name the newest.

        Raises:
            CheckpointNotFound: there is none.
        """
        known = list(self.all())
        by_id = [record for record in known if record.checkpoint.id == wanted]
        named = [
            record for record in known if record.checkpoint.name == wanted and record.checkpoint.sandbox == sandbox
        ]
        return (by_id or named or [self.read(wanted)])[-1]

    def all(self) -> Iterator[CheckpointRecord]:
        """All that there are, the oldest first."""
        store = [record for id in os.listdir(self._root) if (record := self._read(id)) is not None]
        yield from sorted(store, key=lambda record: record.checkpoint.created_at)

    def forget(self, id: str) -> None:
        """There is no such checkpoint any more. What is left of it, `remove_unreferenced` takes away."""
        (self.directory(id) / "checkpoint.json").unlink(missing_ok=True)

    def remove_unreferenced(self, spare: set[Path]) -> None:
        """Take away what was forgotten or never finished, but for `spare`. Call it with the layers held alone."""
        for id in os.listdir(self._root):
            if self._read(id) is None and self.directory(id) not in spare:
                shutil.rmtree(self.directory(id), ignore_errors=True)

    def _read(self, id: str) -> CheckpointRecord | None:
        # A record that cannot be read is an error here, not an absent one: it names layers, which must not be removed.
        return read_record(self.directory(id) / "checkpoint.json", CheckpointRecord, f"checkpoint {id}")
