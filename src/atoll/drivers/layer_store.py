"""Copies, merges, measures and removes layers. Implements `contract.driver.LayerStore` for every driver here.

Owns the choice of method: a snapshot, where the file system has them (`storage.py`), else the keeper's program, which
runs as the owner of the files. Not here: which layers exist and what refers to them (`runtime/state/layers.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.to_thread

from atoll.contract.driver import Layer
from atoll.contract.errors import SandboxError
from atoll.drivers import storage
from atoll.drivers.keeper_command import KeeperCommand
from atoll.drivers.machine import Machine
from atoll.settings import program_environment

_REMOVE_S = 600
"""How long a million files may take to be removed."""

_FEW_ENTRIES = 200
"""What is removed without starting a program, which takes longer than to remove so many."""


class OverlayLayerStore:
    """Layers as overlayfs needs them, in `state_dir/layers`."""

    def __init__(self, state_dir: Path, machine: Machine) -> None:
        self._path = state_dir / "layers"
        self._machine = machine
        self._keeper = KeeperCommand(machine)

    @property
    def can_limit(self) -> bool:
        """Whether what is written to a layer can be limited. Another process may change the file system meanwhile."""
        return storage.probe(self._path, root=self._machine.root).limits

    async def copy(self, source: Path, target: Path, *, earlier: Path | None = None) -> None:
        if await anyio.to_thread.run_sync(storage.snapshot, source, target):
            await self.remove(target / "work")
            return
        storage.make(target)
        await self._make("copy", str(source), str(target), *([] if earlier is None else [str(earlier)]))

    async def merge(self, layers: Sequence[Layer], target: Path, owner: int) -> None:
        storage.make(target)
        lowest_first = [word for layer in reversed(layers) for word in (str(layer.path), self._owner(layer.owner))]
        await self._make("merge", str(target), self._owner(owner), *lowest_first)

    def _owner(self, id: int | str) -> str:
        """A layer's owner as the keeper sees it: without ranges of ids, all layers have the same."""
        return str(id) if self._machine.root else "0"

    async def _make(self, verb: str, *words: str) -> None:
        maps = [] if self._machine.root else self._keeper.maps(0)
        command = [*self._keeper.line(verb, *maps), "--", *words]
        done = await anyio.run_process(command, env=program_environment(), check=False)
        if done.returncode != 0:
            output = done.stderr.decode(errors="replace").strip()[-500:]
            raise SandboxError(f"the sandbox's layer could not be copied: {output}")

    async def remove(self, *paths: Path) -> None:
        projects = storage.projects(paths)
        if there := await anyio.to_thread.run_sync(self._remove_quickly, paths):
            command = ("rm", "-rf", "--one-file-system", "--", *map(str, there))
            await self._keeper.run_nsexec(*command, within_s=_REMOVE_S)
        storage.release(self._path, projects)

    def _remove_quickly(self, paths: Sequence[Path]) -> list[Path]:
        """Remove snapshots and, as their owner, small directories. Returns the others that exist."""
        return [
            path
            for path in paths
            if path.exists()
            and not storage.remove(path)
            and not (self._machine.root and storage.remove_few(path, _FEW_ENTRIES))
        ]

    async def size(self, path: Path) -> int:
        done = await self._keeper.run_nsexec("du", "-s", "--block-size=1", "--", str(path))
        return int((done.stdout.split() or [b"0"])[0])

    def owner_command(self, *command: str) -> list[str]:
        return self._keeper.nsexec_command(*command)
