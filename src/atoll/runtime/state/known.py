"""The names of what is in a state directory, read as fast as possible: for a shell that completes a word.

Nothing is locked, opened for writing or checked: what is missing or cannot be read is left out, and what is listed may
be gone a moment later. Not here: the entries themselves and what they mean (`store.py`, `checkpoints.py`,
`volumes.py`, `images/store.py`). Imports nothing of them, since importing takes longer than reading.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOST = "host"
"""The image that is always there."""


def sandboxes(state_dir: Path) -> list[str]:
    """The names of the sandboxes, sorted."""
    return sorted(names(state_dir / "names"))


def checkpoints(state_dir: Path, sandbox: str | None = None) -> list[tuple[str, str]]:
    """The labels and ids of a sandbox's checkpoints, or the ids of all, and what each is."""
    found = []
    for id in names(state_dir / "checkpoints"):
        for record in _read(state_dir / "checkpoints" / id / "checkpoint.json"):
            checkpoint = record.get("checkpoint") or {}
            label, its_sandbox = checkpoint.get("label") or "", checkpoint.get("sandbox") or ""
            if sandbox is None:
                found.append((id, f"{its_sandbox} {label}".strip()))
            elif its_sandbox == sandbox:
                found.append((id, label))
                found += [(label, id)] if label else []
    return sorted(found)


def images(state_dir: Path) -> list[str]:
    """The references of the images on this machine, sorted, behind `host`."""
    records = state_dir / "images" / "references"
    read = [record for name in names(records) for record in _read(records / name)]
    references = {(record.get("image") or {}).get("reference") for record in read}
    return [HOST, *sorted(each for each in references if isinstance(each, str))]


def volumes(state_dir: Path) -> list[str]:
    """The names of the volumes, sorted."""
    return sorted(name.removesuffix(".json") for name in names(state_dir / "volumes"))


def approvals(state_dir: Path) -> list[tuple[str, str]]:
    """The ids of approvals that are pending, and the tool of each."""
    records = state_dir / "approvals"
    found = [(name, record) for name in sorted(names(records)) for record in _read(records / name)]
    return [(name.removesuffix(".json"), str(record.get("tool"))) for name, record in found]


def traces(state_dir: Path) -> list[str]:
    """The code sessions that have a trace, sorted."""
    return sorted(name.removesuffix(".jsonl") for name in names(state_dir / "code"))


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
