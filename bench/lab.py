"""The sandboxes that are measured, in a temporary state directory.

Owns how many of them are created, the check that nothing of them is left, and progress bars. Not here: what is
measured (the modules of the subjects).
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import anyio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import atoll
from atoll.contract.model import RuntimeName
from bench import btrfs
from bench.footprint import ProcessKey, lives, sandbox_processes, still_alive
from bench.sampling import Advance, at_most

CLEANUP_S = 300
CGROUPS = Path("/sys/fs/cgroup")


class Lab:
    many: int | None = None
    """How many sandboxes are to be alive at once, instead of a thousand."""

    def __init__(self, engine: atoll.Engine, console: Console, *, quick: bool, runtimes: Iterable[RuntimeName]) -> None:
        self.engine = engine
        self.console = console
        self.quick = quick
        usable = engine.runtimes()
        self.runtimes: tuple[RuntimeName, ...] = tuple(name for name in usable if name in set(runtimes))
        """The chosen runtimes that work on this machine, fastest first."""
        if not self.runtimes:
            raise RuntimeError("none of these runtimes can be used on this machine; `atoll doctor` says why")
        self.fastest = self.runtimes[0]
        self._lives: dict[str, set[ProcessKey]] = {}

    @property
    def scratch(self) -> Path:
        """A directory on the sandboxes' file system, for measurements on the host."""
        path = self.engine.state_dir.parent / "scratch"
        path.mkdir(exist_ok=True)
        return path

    def amount(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Advance]:
        """Show the progress of a long step: a bar on a terminal, one line elsewhere."""
        if not self.console.is_terminal:
            self.console.print(f"  {what} …", highlight=False)
            yield lambda: None
            return
        columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)

    @asynccontextmanager
    async def on_btrfs(self) -> AsyncIterator[Lab]:
        """Another lab like this one, with its state directory on a temporary btrfs.

        Raises:
            btrfs.Unavailable: this machine cannot create or mount a btrfs.
        """
        with btrfs.mounted(self.engine.state_dir.parent / "btrfs") as place:
            async with _opened(place / "state", self.console, quick=self.quick, runtimes=self.runtimes) as lab:
                yield lab

    # ---- sandboxes ----

    async def create(self, runtime: RuntimeName | None = None) -> atoll.Sandbox:
        return await self.engine.create(runtime=runtime or self.fastest)

    @asynccontextmanager
    async def sandbox(self, runtime: RuntimeName | None = None) -> AsyncIterator[atoll.Sandbox]:
        async with await self.create(runtime) as sandbox:
            await sandbox.exec(["true"])
            yield sandbox

    async def destroy(self, sandboxes: Iterable[atoll.Sandbox], advance: Advance | None = None) -> None:
        """Destroy all of them, several at once."""

        async def end(sandbox: atoll.Sandbox) -> None:
            await sandbox.destroy()
            if advance is not None:
                advance()

        with anyio.CancelScope(shield=True):
            async with at_most(8) as start:
                for sandbox in sandboxes:
                    await start(partial(end, sandbox))

    # ---- nothing is left ----

    def remember(self, sandboxes: Iterable[atoll.Sandbox]) -> None:
        """Remember the processes of these sandboxes, so that `leftovers` can search for them."""
        for id, pids in sandbox_processes(self.engine.state_dir, [sandbox.id for sandbox in sandboxes]).items():
            self._lives[id] = lives(pids)

    def leftovers(self) -> list[str]:
        """What is left of sandboxes after all have been destroyed. Empty: nothing."""
        state = self.engine.state_dir
        found = [
            f"{part}/{name}"
            for part in ("sandboxes", "names", "ids", "uncommitted", "warm", "warm-pools", "layers", "checkpoints")
            for name in _names(state / part)
        ]
        found += [
            f"run/{name}/{id}"
            for name in _names(state / "run")
            for id in _names(state / "run" / name)
            if id.startswith("atoll-")
        ]
        found += [f"process {pid}" for seen in self._lives.values() for pid in still_alive(seen)]
        hierarchies = [CGROUPS, *(path for path in CGROUPS.iterdir() if path.is_dir())] if CGROUPS.is_dir() else []
        cgroups = [parent / "atoll" / f"{id}.1" for parent in hierarchies for id in self._lives]
        found += [f"cgroup {path}" for path in cgroups if path.exists()]
        found += [
            f"mount {line.split()[4]}"
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
            if str(state) in line
        ]
        return found


def _names(path: Path) -> list[str]:
    return sorted(os.listdir(path)) if path.is_dir() else []


@asynccontextmanager
async def open_lab(console: Console, *, quick: bool, runtimes: Iterable[RuntimeName]) -> AsyncIterator[Lab]:
    """A lab in a temporary directory. At the end, also after an error, no sandbox and no directory is left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    base = Path(tempfile.mkdtemp(prefix="atoll-bench-", dir="/var/tmp" if os.access("/var/tmp", os.W_OK) else None))
    try:
        async with _opened(base / "state", console, quick=quick, runtimes=runtimes) as lab:
            yield lab
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        _remove(base, console)


@asynccontextmanager
async def _opened(
    state_dir: Path, console: Console, *, quick: bool, runtimes: Iterable[RuntimeName]
) -> AsyncIterator[Lab]:
    async with atoll.open(state_dir) as engine:
        lab = Lab(engine, console, quick=quick, runtimes=runtimes)
        try:
            yield lab
        finally:
            await _clear(lab)


async def _clear(lab: Lab) -> None:
    with anyio.move_on_after(CLEANUP_S, shield=True):
        left = [await lab.engine.get(info.name) for info in await lab.engine.list()]
        if left:
            lab.console.print(f"destroying the remaining {len(left)} sandboxes …", highlight=False)
            await lab.destroy(left)
        await lab.engine.remove_abandoned()


def _remove(base: Path, console: Console) -> None:
    if _names(base / "state" / "sandboxes"):
        console.print(f"[red]sandboxes could not be destroyed; their state is kept in {base}[/red]", highlight=False)
        return
    shutil.rmtree(base, ignore_errors=True)
