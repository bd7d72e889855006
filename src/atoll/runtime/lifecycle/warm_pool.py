"""Sandboxes that wait to be taken: which kinds are kept ready, how many of each, and who puts up new ones.

Knows the kinds that are wanted, `warm_pools/<key>.json`, and when a sandbox that waits is of no use any more. Refuses to
know how one is made, taken or removed (`host.py`), and how it is sure to be nobody else's (`store.py`).

A kind is an image, a runtime and limits. All else that tells one sandbox from another can be given to one that runs:
its name, hostname, environment and user, and how it sleeps and ends.

There is no daemon, so those who use a shelf look after it: a program that takes one puts up another, behind what it
does and before it ends; one that has called `warm` also looks now and then whether others have taken some. One at a
time fills, whoever else wants to.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import anyio
import anyio.abc
from pydantic import ValidationError

from atoll.contract.driver import Driver
from atoll.contract.errors import AtollError, SandboxError
from atoll.contract.model import Frozen, Limits, RuntimeName, WarmPool
from atoll.drivers.locks import locked
from atoll.runtime.images.reference import Reference
from atoll.runtime.state.layers import ResolvedSpec
from atoll.runtime.state.store import Claimed, Manifest, StateStore, write_atomic

MAX_WARM = 1000
"""How many of a kind can wait."""
_AT_ONCE = 2
"""How many are made at once: they are for later, and others want to get on now."""
_BEHIND_S = 0.05
"""How long after one was taken another is made: who took it has its first command done by then."""
_LOOK_S = 1.0
_AGAIN_S = (1.0, 60.0)
"""When it is tried again what failed: after so long, then after twice as long, up to this."""
_CLOSING_S = 10.0
_PATIENCE_S = 600
_log = logging.getLogger(__name__)


class SandboxTemplate(Frozen):
    """What one sandbox that waits has in common with those who may take it."""

    image: str
    runtime: RuntimeName
    limits: Limits
    """In force, defaults filled in."""

    @property
    def key(self) -> str:
        told = [Reference.parse(self.image).name, self.runtime, self.limits.model_dump(mode="json", exclude_none=True)]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


class WarmPoolSpec(Frozen):
    """The content of a shelf's file."""

    version: int = 1
    template: SandboxTemplate
    count: int


class WarmPools:
    """`resolved` says what a sandbox of a kind stands on now, `make` puts one up and `remove` ends one that was taken."""

    def __init__(
        self,
        store: StateStore,
        tasks: anyio.abc.TaskGroup,
        *,
        resolved: Callable[[SandboxTemplate], Awaitable[tuple[Driver, ResolvedSpec]]],
        make: Callable[[SandboxTemplate, Driver, ResolvedSpec], Awaitable[None]],
        remove: Callable[[Claimed], Awaitable[None]],
    ) -> None:
        self._store = store
        self._root = store.state_dir / "warm-pools"
        self._root.mkdir(mode=0o700, exist_ok=True)
        self._lock = store.state_dir / "warm-pools.lock"
        self._tasks = tasks
        self._resolve_template = resolved
        self._make = make
        self._remove = remove
        self._asked: set[str] = set()
        self._at_work: dict[str, anyio.Event] = {}
        self._tended: set[str] = set()
        self._closing = anyio.Event()

    # ---- what is wanted ----

    def all(self) -> list[WarmPool]:
        """The shelves that are to be kept filled."""
        found = [self.read(name.removesuffix(".json")) for name in os.listdir(self._root) if name.endswith(".json")]
        return sorted(
            (self.shown(wanted) for wanted in found if wanted is not None),
            key=lambda warm_pool: (warm_pool.image, warm_pool.runtime, warm_pool.limits.model_dump_json()),
        )

    def read(self, key: str) -> WarmPoolSpec | None:
        path = self._path(key)
        try:
            return WarmPoolSpec.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise SandboxError(f"the shelf {key} cannot be read", hint=f"remove {path}: {error}") from error

    def shown(self, wanted: WarmPoolSpec) -> WarmPool:
        return WarmPool(**wanted.template.model_dump(), count=wanted.count, ready=len(self._ready(wanted.template.key)))

    def _ready(self, key: str) -> list[str]:
        return [id for id in self._store.warm(key) if self._store.is_alive(id)]

    async def warm(self, template: SandboxTemplate, count: int) -> WarmPool:
        """Want so many, and have them. When it fails, what was wanted before is wanted again."""
        key = template.key
        before = self.read(key)
        wanted = WarmPoolSpec(template=template, count=count)
        try:
            async with self._exclusive():
                self._write(key, wanted if count else None)
            if count:
                await self.fill(key)
            else:
                await self._empty(key)
        except BaseException:
            with anyio.CancelScope(shield=True):
                self._write(key, before)
                if before is None:
                    await self._empty(key)
            self.refill(key)
            raise
        if count and key not in self._tended:
            self._tended.add(key)
            self._tasks.start_soon(self._tend, key)
        return self.shown(wanted)

    def _write(self, key: str, wanted: WarmPoolSpec | None) -> None:
        if wanted is None:
            self._path(key).unlink(missing_ok=True)
        else:
            write_atomic(self._path(key), wanted.model_dump_json())

    def _path(self, key: str) -> Path:
        return self._root / f"{key}.json"

    # ---- what waits ----

    def fits(self, manifest: Manifest | None, driver: Driver, resolved: ResolvedSpec) -> bool:
        """Whether one that waits runs, and is just what would be made now. Environment and secrets it is given then."""
        return (
            manifest is not None
            and manifest.runtime == driver.name
            and {**manifest.resolved(), "env": resolved.env, "encrypted_secrets": resolved.encrypted_secrets}
            == resolved.resolved()
            and driver.pid(self._store.directory(manifest.id)) is not None
        )

    async def fill(self, key: str) -> None:
        """Have as many wait as are wanted, all of which fit.

        Raises:
            AtollError, OSError: one could not be made.
        """
        wanted = self.read(key)
        if wanted is None:
            return
        driver, resolved = await self._resolve_template(wanted.template)
        async with self._exclusive():
            wanted = self.read(key)
            if wanted is None:
                return
            while await self._remove_one(key, lambda manifest: not self.fits(manifest, driver, resolved)):
                pass
            for _ in range(len(self._ready(key)) - wanted.count):
                await self._remove_one(key, lambda _: True)
            # Who takes one meanwhile sees to it that this is done again.
            await self._create_some(wanted.count - len(self._ready(key)), wanted.template, driver, resolved)

    async def _create_some(self, count: int, template: SandboxTemplate, driver: Driver, resolved: ResolvedSpec) -> None:
        failures: list[AtollError | OSError] = []
        left = iter(range(count))

        async def work() -> None:
            for _ in left:
                try:
                    await self._make(template, driver, resolved)
                except (AtollError, OSError) as error:
                    failures.append(error)
                if failures:
                    return

        async with anyio.create_task_group() as group:
            for _ in range(_AT_ONCE):
                group.start_soon(work)
        if failures:
            raise failures[0]

    async def _empty(self, key: str) -> None:
        async with self._exclusive():
            while await self._remove_one(key, lambda _: True):
                pass

    async def tidy(self) -> None:
        """Take away what waits on a shelf that nobody wants any more."""
        for name in os.listdir(self._store.state_dir / "warm"):
            key = name.partition(".")[0]
            if key != "-" and self.read(key) is None:
                await self._empty(key)

    async def _remove_one(self, key: str, which: Callable[[Manifest | None], bool]) -> bool:
        """End one of those that wait and that are meant. Returns whether there was one."""
        with self._store.claim(key, which) as claimed:
            if claimed is not None:
                with anyio.CancelScope(shield=True):
                    await self._remove(claimed)
        return claimed is not None

    def _exclusive(self) -> AbstractAsyncContextManager[None]:
        return locked(self._lock, _PATIENCE_S, "filling the warm pools")

    # ---- refilling ----

    def refill(self, key: str) -> None:
        """Have the shelf filled, behind. Does nothing if nobody wants it."""
        if not self._path(key).exists():
            return
        self._asked.add(key)
        if key not in self._at_work:
            self._at_work[key] = anyio.Event()
            self._tasks.start_soon(self._refill, key)

    async def _refill(self, key: str) -> None:
        again_s, most_s = _AGAIN_S
        pause_s = _BEHIND_S
        try:
            while key in self._asked:
                with anyio.move_on_after(pause_s):
                    await self._closing.wait()
                self._asked.discard(key)
                pause_s = _BEHIND_S
                try:
                    await self.fill(key)
                except (AtollError, OSError):
                    _log.warning("the shelf %s could not be filled; it is tried again", key, exc_info=True)
                    if self._closing.is_set():
                        return
                    self._asked.add(key)
                    pause_s, again_s = again_s, min(again_s * 2, most_s)
        finally:
            self._at_work.pop(key).set()

    async def _tend(self, key: str) -> None:
        """Look now and then whether all are there: others take some, and some end."""
        while True:
            try:
                wanted = self.read(key)
                if wanted is None:
                    self._tended.discard(key)
                    return
                if len(self._ready(key)) != wanted.count:
                    self.refill(key)
            except (AtollError, OSError):
                _log.exception("the shelf %s could not be looked at", key)
            await anyio.sleep(_LOOK_S)

    async def finish(self) -> None:
        """Finish what is being refilled, without waiting any longer for a better moment."""
        self._closing.set()
        with anyio.move_on_after(_CLOSING_S):
            for ended in list(self._at_work.values()):
                await ended.wait()
