"""Warm pools: sandboxes without a name that run already, to be claimed by a create with the same template.

Owns which templates have a pool and of what size, `warm-pools/<key>.json`, and when a warm sandbox does not fit any
more. A pool belongs to a namespace, which is in its key unless it is the default (`state/namespaces.py`). Not here: how
a warm sandbox is created, bound and destroyed (the engine), and how a claim is made exclusive (`state/store.py`). Used
by the engine.

A template is an image, a runtime and limits. All else that distinguishes sandboxes can be given to one that runs: its
name, hostname, environment and user, and when it pauses and ends.

There is no daemon, so the processes that use a pool refill it: one that claims a sandbox creates another, after its own
work has begun and before it ends; one that has called `warm` also checks every second whether other processes have
claimed some. One process fills at a time. While claims follow each other, a pool that is at least half full is not
refilled: creating sandboxes for later would slow down those that are claimed now.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.abc

from atoll.contract.driver import Driver
from atoll.contract.errors import AtollError, InvalidRequest, SandboxError
from atoll.contract.frozen import Frozen
from atoll.contract.model import Limits, RuntimeName, WarmPool
from atoll.drivers.locks import locked
from atoll.runtime.images.reference import ImageReference
from atoll.runtime.state.layers import ResolvedSpec
from atoll.runtime.state.namespaces import names_in, split_entry
from atoll.runtime.state.records import StoredRecord, read_record, remove_record, unreadable, write_record
from atoll.runtime.state.store import Claimed, Manifest, StateStore

if TYPE_CHECKING:
    from atoll.runtime.lifetimes import BackgroundTasks

MAX_WARM = 1000
"""The size of a warm pool, at most."""
_CONCURRENT_CREATES = 2
"""Few, since they are for later, and other creates want the processors now."""
_REFILL_DELAY_S = 0.05
"""How long after a claim another sandbox is created: the claimed one has run its first command by then."""
_BURST_PAUSE_S = 0.05
"""Claims that are no further apart belong to one burst."""
_BURST_POLL_S = 0.02
_LONGEST_BURST_S = 1.0
"""How long a burst puts off the refill."""
_SWEEP_S = 10.0
"""How often all of a pool are looked at before it is refilled, if nothing says that one does not fit."""
_CHECK_INTERVAL_S = 1.0
_RETRY_S = (1.0, 60.0)
"""The first and the longest pause before a failed refill is tried again. Each is twice the one before it."""
_FINISH_TIMEOUT_S = 10.0
_LOCK_TIMEOUT_S = 600
_log = logging.getLogger(__name__)


def check_count(count: int) -> None:
    """
    Raises:
        InvalidRequest: a warm pool cannot have so many sandboxes.
    """
    if not 0 <= count <= MAX_WARM:
        raise InvalidRequest(f"the count of a warm pool is {count}; it may be 0 to {MAX_WARM}")


class SandboxTemplate(Frozen):
    """What a warm sandbox and the create that may claim it have in common."""

    image: str
    runtime: RuntimeName
    limits: Limits
    """With defaults filled in."""

    @property
    def digest(self) -> str:
        limits = self.limits.model_dump(mode="json", exclude_none=True)
        identity = [ImageReference.parse(self.image).name, self.runtime, limits]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


class WarmPoolSpec(StoredRecord):
    """The record of a warm pool: its template and its size."""

    VERSION = 2
    template: SandboxTemplate
    count: int


def rebound(resolved: ResolvedSpec) -> dict[str, object]:
    """The fields of a resolved spec that a warm sandbox gets when it is claimed."""
    return {name: getattr(resolved, name) for name in ("env", "encrypted_secrets", "user", "cwd")}


class WarmPools:
    """The warm pools of one namespace.

    `resolved` resolves a template, `make` creates a warm sandbox, and `remove` destroys a claimed one.
    """

    def __init__(
        self,
        store: StateStore,
        tasks: BackgroundTasks,
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
        self._due: set[str] = set()
        self._claimed_at: dict[str, float] = {}
        self._swept: dict[str, tuple[ResolvedSpec, float]] = {}
        self._refilling: dict[str, anyio.Event] = {}
        self._watched: set[str] = set()
        self._closing = anyio.Event()

    # ---- specs ----

    def key(self, template: SandboxTemplate) -> str:
        """The key of the pool of a template, in this namespace."""
        return self._store.entry(template.digest)

    def all(self) -> list[WarmPool]:
        """All warm pools. One whose record cannot be read has a `reason`."""
        found = []
        for key in self._keys():
            try:
                spec = self.read(key)
            except SandboxError as error:
                found.append(
                    WarmPool(
                        image="",
                        runtime="unknown",
                        limits=Limits(),
                        count=0,
                        ready=len(self._ready(key)),
                        reason=unreadable(error),
                    )
                )
            else:
                if spec is not None:
                    found.append(self.shown(spec))
        return sorted(
            found,
            key=lambda warm_pool: (warm_pool.image, warm_pool.runtime, warm_pool.limits.model_dump_json()),
        )

    def _keys(self) -> list[str]:
        keys = [name.removesuffix(".json") for name in os.listdir(self._root) if name.endswith(".json")]
        return [self._store.entry(digest) for digest in names_in(self._store.namespace, keys)]

    def read(self, key: str) -> WarmPoolSpec | None:
        """
        Raises:
            SandboxError: its record cannot be read.
        """
        return read_record(self._path(key), WarmPoolSpec, f"warm pool {split_entry(key)[1]}")

    def shown(self, spec: WarmPoolSpec) -> WarmPool:
        return WarmPool(**spec.template.model_dump(), count=spec.count, ready=len(self._ready(self.key(spec.template))))

    def _ready(self, key: str) -> list[str]:
        return [id for id in self._store.warm(key) if self._store.is_alive(id)]

    async def warm(self, template: SandboxTemplate, count: int) -> WarmPool:
        """Set the size of a warm pool, and fill or empty it. When it fails, its size is what it was before.

        A record that cannot be read is replaced, unless a newer Atoll wrote it; and removed if `count` is 0.
        """
        key = self.key(template)
        try:
            before = self.read(key)
        except SandboxError as error:
            if count and error.details["reason"] == "newer":
                raise
            remove_record(self._path(key))
            before = None
        spec = WarmPoolSpec(template=template, count=count)
        try:
            async with self._exclusive():
                self._write(key, spec if count else None)
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
        if count and key not in self._watched:
            self._watched.add(key)
            self._tasks.start_soon(self._watch, key)
        return self.shown(spec)

    def _write(self, key: str, spec: WarmPoolSpec | None) -> None:
        if spec is None:
            remove_record(self._path(key))
        else:
            write_record(self._path(key), spec)

    def _path(self, key: str) -> Path:
        return self._root / f"{key}.json"

    # ---- warm sandboxes ----

    def fits(self, manifest: Manifest | None, driver: Driver, resolved: ResolvedSpec) -> bool:
        """Whether a warm sandbox runs and is what a create would make now, except for what `rebound` gives it."""
        return (
            manifest is not None
            and manifest.runtime == driver.name
            and {**manifest.resolved(), **rebound(resolved)} == resolved.resolved()
            and driver.pid(self._store.directory(manifest.id)) is not None
        )

    async def fill(self, key: str) -> None:
        """Bring a warm pool to its size: remove sandboxes that do not fit or are too many, and create the missing ones.

        Raises:
            AtollError, OSError: one could not be created.
        """
        spec = self.read(key)
        if spec is None:
            return
        driver, resolved = await self._resolve_template(spec.template)
        async with self._exclusive():
            spec = self.read(key)
            if spec is None:
                return
            if self._needs_sweep(key, resolved):
                while await self._remove_one(key, lambda manifest: not self.fits(manifest, driver, resolved)):
                    pass
                self._swept[key] = resolved, time.monotonic()
            for _ in range(len(self._ready(key)) - spec.count):
                await self._remove_one(key, lambda _: True)
            # A process that claims one meanwhile refills the pool itself.
            await self._create_some(spec.count - len(self._ready(key)), spec.template, driver, resolved)

    def _needs_sweep(self, key: str, resolved: ResolvedSpec) -> bool:
        """Whether a sandbox of the pool may not fit. To look at each costs more than to create the one that is missing,
        in a large pool."""
        fitted, at = self._swept.get(key, (None, 0.0))
        is_recent = fitted == resolved and time.monotonic() - at < _SWEEP_S
        return not is_recent or len(self._ready(key)) < len(self._store.warm(key))

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
            for _ in range(_CONCURRENT_CREATES):
                group.start_soon(work)
        if failures:
            raise failures[0]

    async def _empty(self, key: str) -> None:
        async with self._exclusive():
            while await self._remove_one(key, lambda _: True):
                pass

    async def remove_all(self) -> None:
        """Remove all warm pools of this namespace and their sandboxes."""
        for key in self._keys():
            async with self._exclusive():
                self._write(key, None)
            await self._empty(key)

    async def remove_unwanted(self) -> None:
        """Remove warm sandboxes of all namespaces whose pool has no record any more."""
        for name in os.listdir(self._store.state_dir / "warm"):
            key = name.partition(".")[0]
            if key != "-" and not os.path.lexists(self._path(key)):
                await self._empty(key)

    async def _remove_one(self, key: str, which: Callable[[Manifest | None], bool]) -> bool:
        """Claim and destroy a warm sandbox for which `which` is true. Returns whether there was one."""
        with self._store.claim(key, which) as claimed:
            if claimed is not None:
                with anyio.CancelScope(shield=True):
                    await self._remove(claimed)
        return claimed is not None

    def _exclusive(self) -> AbstractAsyncContextManager[None]:
        return locked(self._lock, _LOCK_TIMEOUT_S, "filling the warm pool")

    # ---- refilling ----

    def refill(self, key: str) -> None:
        """Fill a warm pool in the background. Does nothing if there is none with this key, or its record is damaged."""
        if not os.path.lexists(f"{self._root}/{key}.json"):
            return
        self._due.add(key)
        self._claimed_at[key] = time.monotonic()
        if key not in self._refilling:
            self._refilling[key] = anyio.Event()
            self._tasks.start_soon(self._refill, key)

    async def _refill(self, key: str) -> None:
        retry_s, longest_s = _RETRY_S
        pause_s = _REFILL_DELAY_S
        try:
            while key in self._due:
                with anyio.move_on_after(pause_s):
                    await self._closing.wait()
                try:
                    spec = self.read(key)
                except SandboxError as error:
                    _log.warning("warm pool %s is not filled: %s", key, unreadable(error))
                    return
                if spec is not None and pause_s == _REFILL_DELAY_S:
                    await self._wait_for_quiet(key, spec.count)
                self._due.discard(key)
                pause_s = _REFILL_DELAY_S
                try:
                    await self.fill(key)
                except (AtollError, OSError):
                    _log.warning("warm pool %s could not be filled; trying again later", key, exc_info=True)
                    if self._closing.is_set():
                        return
                    self._due.add(key)
                    pause_s, retry_s = retry_s, min(retry_s * 2, longest_s)
        finally:
            self._refilling.pop(key).set()

    async def _wait_for_quiet(self, key: str, count: int) -> None:
        """Wait while claims follow each other and at least half of the pool is left."""
        latest = time.monotonic() + _LONGEST_BURST_S
        while time.monotonic() < min(latest, self._claimed_at[key] + _BURST_PAUSE_S):
            if self._closing.is_set() or 2 * len(self._store.warm(key)) < count:
                return
            await anyio.sleep(_BURST_POLL_S)

    async def _watch(self, key: str) -> None:
        """Refill a warm pool whenever sandboxes are missing: other processes claim some, and some end."""
        while True:
            try:
                spec = self.read(key)
                if spec is None:
                    self._watched.discard(key)
                    return
                if len(self._ready(key)) != spec.count:
                    self.refill(key)
            except (AtollError, OSError):
                _log.exception("warm pool %s could not be checked", key)
            await anyio.sleep(_CHECK_INTERVAL_S)

    @property
    def is_busy(self) -> bool:
        """Whether this process keeps a pool filled."""
        return bool(self._watched or self._refilling)

    async def finish(self) -> None:
        """Finish the refills that are due, without further delay, within ten seconds."""
        self._closing.set()
        with anyio.move_on_after(_FINISH_TIMEOUT_S):
            for ended in list(self._refilling.values()):
                await ended.wait()
