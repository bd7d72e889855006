"""Results of steps, kept as checkpoints, so that a step whose beginning and content are known is not run again.

Owns what identifies the result of a step, which results are kept, and which are removed when there are too many. What
identifies one is made of the result before it and of the step as it is carried out: a step that is run anew has a new
result, and so have all after it. A result that a template needs is never removed. Not here: how a step is carried out
(`builder.py`).

    builds/<checkpoint>         an empty file: when a result was last used. Without it, when it was made
    locks/build-<nn>            held while a result is made: two builds of one step run it once
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

from atoll.contract.errors import CheckpointNotFound, SandboxError
from atoll.contract.model import Checkpoint
from atoll.drivers import locks
from atoll.runtime.engine import LocalEngine
from atoll.runtime.state.namespaces import entry_of

KEPT_LAYERS = 256
"""Results that are kept of one namespace, besides those that templates need."""
LABEL = "build-"
"""How the labels of these checkpoints begin."""
_FORM = 1
"""Raise it when a step comes to mean something else."""


def is_layer(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is the result of a step of a build."""
    return (checkpoint.label or "").startswith(LABEL)


def key_of(parent: str, step: Any) -> str:
    """What identifies the result of a step after `parent`."""
    said = json.dumps([_FORM, parent, step], sort_keys=True)
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()


class LayerCache:
    """The results of steps in one namespace."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._used: list[str] = []

    async def find(self, key: str) -> str | None:
        """The checkpoint of a result. None: there is none."""
        label = self.label(key)
        found = [each for each in await self._engine.checkpoints() if each.label == label and each.reason is None]
        return found[-1].id if found else None

    @staticmethod
    def label(key: str) -> str:
        return f"{LABEL}{key[:40]}"

    @asynccontextmanager
    async def making(self, key: str) -> AsyncIterator[None]:
        """While this is entered, no other build makes this result."""
        directory = self._engine.state_dir / "locks"
        directory.mkdir(mode=0o700, exist_ok=True)
        async with locks.locked(directory / f"build-{key[:2]}", None, "running a step of a build"):
            yield

    def used(self, checkpoint: str) -> None:
        """A result is part of this build."""
        self._used.append(checkpoint)

    def finish(self) -> None:
        """All that was used was used now: so the last of a chain goes before those that it begins with."""
        directory = self._engine.state_dir / "builds"
        directory.mkdir(mode=0o700, exist_ok=True)
        for id in self._used:
            (directory / entry_of(self._engine.namespace, id)).touch(mode=0o600)
        if self._used:
            moment = (directory / entry_of(self._engine.namespace, self._used[-1])).stat().st_mtime_ns
            for id in self._used:
                os.utime(directory / entry_of(self._engine.namespace, id), ns=(moment, moment))

    async def trim(self, keep: int = KEPT_LAYERS) -> list[str]:
        """Remove the results that were not used for longest, beyond `keep`. Returns their ids."""
        try:
            needed = self._engine.templates.checkpoints()
        except SandboxError:
            return []  # a record cannot be read, and may need any of them
        layers = [each for each in await self._engine.checkpoints() if is_layer(each) and each.id not in needed]
        ages = {each.id: (self._last_used(each), -each.created_at.timestamp()) for each in layers}
        oldest_first = sorted(layers, key=lambda each: ages[each.id])
        return await self._remove(each.id for each in oldest_first[: max(0, len(layers) - keep)])

    async def _remove(self, ids: Iterable[str]) -> list[str]:
        removed = []
        for id in ids:
            with suppress(CheckpointNotFound):
                await self._engine.delete_checkpoint(id)
                removed.append(id)
            (self._engine.state_dir / "builds" / entry_of(self._engine.namespace, id)).unlink(missing_ok=True)
        return removed

    def _last_used(self, checkpoint: Checkpoint) -> float:
        try:
            return (self._engine.state_dir / "builds" / entry_of(self._engine.namespace, checkpoint.id)).stat().st_mtime
        except FileNotFoundError:
            return checkpoint.created_at.timestamp()
