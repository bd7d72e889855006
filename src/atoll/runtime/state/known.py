"""The names of what is in a state directory, read as fast as possible: for a shell that completes a word.

Nothing is locked, opened for writing or checked: what is missing or cannot be read is left out, and what is listed may
be gone a moment later. Not here: the entries themselves and what they mean (`store.py`, `checkpoints.py`,
`volumes.py`, `images/store.py`). Imports nothing of them, since importing takes longer than reading. Used by
completion, and by commands that are for all namespaces.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from atoll.contract.names import DEFAULT_NAMESPACE, is_namespace
from atoll.runtime.state.namespaces import entry_of, names_in, split_entry

HOST = "host"
"""The image that is always there."""
_NAMESPACED = ("names", "checkpoints", "volumes", "warm-pools", "approvals")


class NamespaceView(NamedTuple):
    """A namespace of a state directory."""

    state_dir: Path
    namespace: str = DEFAULT_NAMESPACE

    def names(self, directory: str) -> list[str]:
        """The names of what this namespace has in a directory of the state directory."""
        return names_in(self.namespace, names(self.state_dir / directory))

    def path(self, directory: str, name: str) -> Path:
        return self.state_dir / directory / entry_of(self.namespace, name)


def namespaces(state_dir: Path) -> list[str]:
    """The namespaces that have something, sorted, and the default."""
    found = {split_entry(entry)[0] for directory in _NAMESPACED for entry in names(state_dir / directory)}
    return sorted({DEFAULT_NAMESPACE, *filter(is_namespace, found)})


def sandboxes(view: NamespaceView) -> list[str]:
    """The names of the sandboxes, sorted."""
    return sorted(view.names("names"))


def checkpoints(view: NamespaceView, sandbox: str | None = None) -> list[tuple[str, str]]:
    """The labels and ids of a sandbox's checkpoints, or the ids of all, and what each is."""
    found = []
    for id in view.names("checkpoints"):
        for record in _read(view.path("checkpoints", id) / "checkpoint.json"):
            checkpoint = record.get("checkpoint") or {}
            label, its_sandbox = checkpoint.get("label") or "", checkpoint.get("sandbox") or ""
            if sandbox is None:
                found.append((id, f"{its_sandbox} {label}".strip()))
            elif its_sandbox == sandbox:
                found.append((id, label))
                found += [(label, id)] if label else []
    return sorted(found)


def images(view: NamespaceView) -> list[str]:
    """The references of the images on this machine, sorted, behind `host`."""
    records = view.state_dir / "images" / "references"
    read = [record for name in names(records) for record in _read(records / name)]
    references = {(record.get("image") or {}).get("reference") for record in read}
    return [HOST, *sorted(each for each in references if isinstance(each, str))]


def volumes(view: NamespaceView) -> list[str]:
    """The names of the volumes, sorted."""
    return sorted(name.removesuffix(".json") for name in view.names("volumes"))


def approvals(view: NamespaceView) -> list[tuple[str, str]]:
    """The ids of approvals that are pending, and the tool of each."""
    ids = sorted(view.names("approvals"))
    found = [(name, record) for name in ids for record in _read(view.path("approvals", name))]
    return [(name.removesuffix(".json"), str(record.get("tool"))) for name, record in found]


def traces(view: NamespaceView) -> list[str]:
    """The code sessions that have a trace, sorted."""
    return sorted(name.removesuffix(".jsonl") for name in view.names("code"))


def names(directory: Path) -> list[str]:
    """The entries of a directory of the state directory; none if there is no such directory."""
    try:
        return [name for name in os.listdir(directory) if not name.startswith(".")]
    except OSError:
        return []


def _read(path: Path) -> Iterator[dict[str, Any]]:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return
    if isinstance(record, dict):
        yield record
