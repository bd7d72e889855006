"""What stands on the machine and in a state directory that belongs to no sandbox and no checkpoint.

Knows where everything of a sandbox can be seen, and whose it is by the ids in it. Refuses to know the API, and what
sandboxes there should be: it takes the manifests at their word.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll.testing.leaks import Ledger

_ID = re.compile(r"atoll-[0-9a-f]{16}")
_RUN = re.compile(r"(atoll-[0-9a-f]{16})(\.\d+)?")


def orphans(ledger: Ledger, state_dir: Path) -> list[str]:
    """What belongs to nobody, a line each. For when nobody is at work and the garbage has been collected."""
    manifests = {
        name: json.loads((state_dir / "sandboxes" / name / "manifest.json").read_text())
        for name in os.listdir(state_dir / "sandboxes")
        if (state_dir / "sandboxes" / name / "manifest.json").exists()
    }
    alive = {
        f"{id}.{manifest['run']}"
        for id, manifest in manifests.items()
        if any(line.startswith("process") for line in _processes_of(state_dir, id))
    }
    lines = [line for line in ledger.all_of(state_dir) if not _is_somebodys(line, state_dir, manifests, alive)]
    return lines + _unnamed(state_dir, manifests) + _nameless(state_dir, manifests) + _loops(state_dir)


def _processes_of(state_dir: Path, id: str) -> list[str]:
    """The keeper of a sandbox, if it lives."""
    with suppress(OSError, ValueError):
        pid = int((state_dir / "sandboxes" / id / "keeper.lock").read_text())
        if id.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            return [f"process {pid}"]
    return []


def _is_somebodys(line: str, state_dir: Path, manifests: dict[str, Any], alive: set[str]) -> bool:
    kind, _, rest = line.partition(" ")
    if kind == "process":
        return bool(_runs_of(int(rest.split()[0])) & (alive | {run.partition(".")[0] for run in alive}))
    place = rest.removeprefix("entry ")
    if kind == "directory" and any(
        f"{state_dir}/{kept}/" in place for kept in ("names", "ids", "layers", "checkpoints", "volumes")
    ):
        return True  # seen to below
    if kind == "directory" and f"{state_dir}/sandboxes/" in place:
        return Path(place).name in manifests
    return any(found[0] in alive for found in _RUN.finditer(place.removeprefix(str(state_dir))))


def _runs_of(pid: int) -> set[str]:
    """The ids that a process has to do with."""
    found = set()
    for name in ("cmdline", "cgroup"):
        with suppress(OSError):
            text = Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
            found |= {match[0] for match in _RUN.finditer(text)}
    return found


def _unnamed(state_dir: Path, manifests: dict[str, Any]) -> list[str]:
    """Layers and checkpoints that nobody names, or that somebody names and that are not there."""
    named = {manifest["active_layer"] for manifest in manifests.values()}
    stacks = [manifest["layers"] for manifest in manifests.values()]
    checkpoints = set()
    spared = {Path(manifest["memory"]).parent.name for manifest in manifests.values() if manifest["memory"]}
    for id in os.listdir(state_dir / "checkpoints"):
        with suppress(FileNotFoundError):
            record = json.loads((state_dir / "checkpoints" / id / "checkpoint.json").read_text())
            stacks.append(record["layers"])
            checkpoints.add(id)
    named |= {layer["id"] for stack in stacks for layer in stack}
    named |= {json.loads(path.read_text())["layer"] for path in (state_dir / "volumes").glob("*.json")}
    there = set(os.listdir(state_dir / "layers"))
    lines = [f"a layer of nobody: {id}" for id in there - named]
    lines += [f"a layer that is named and gone: {id}" for id in named - there]
    left = set(os.listdir(state_dir / "checkpoints")) - checkpoints - spared
    return lines + [f"a checkpoint of nobody: {id}" for id in left]


def _nameless(state_dir: Path, manifests: dict[str, Any]) -> list[str]:
    names = {name: os.readlink(state_dir / "names" / name) for name in os.listdir(state_dir / "names")}
    slots = {name: os.readlink(state_dir / "ids" / name) for name in os.listdir(state_dir / "ids")}
    lines = [f"a name of nobody: {name}" for name, id in names.items() if id not in manifests]
    lines += [f"a sandbox without a name: {id}" for id in manifests if id not in names.values()]
    lines += [f"a range of ids of nobody: {slot}" for slot, id in slots.items() if id not in manifests]
    for id, manifest in manifests.items():
        left = {path.name for path in (state_dir / "sandboxes" / id).glob("memory-*")} - {manifest["memory"]}
        lines += [f"saved processes of nobody: {id}/{name}" for name in left]
    return lines


def _loops(state_dir: Path) -> list[str]:
    found = []
    for device in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):
            if str(state_dir) in (backing := device.read_text()):
                found.append(f"loop device {device.parts[3]} of {backing.strip()}")
    return found
