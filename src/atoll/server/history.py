"""What sandboxes used within the last hour: a sample every ten seconds, in memory.

Owns the samples and how often they are taken. Numbers that are cheap (memory, processor time, processes) are read for
every running sandbox each time; the disk, which takes a walk through its files, is measured for one sandbox after
another, within a small share of one core. Nothing is stored: after a restart the history begins anew. Not here: what a
sandbox uses now (`Sandbox.stat`), and metrics of the server (`surfaces/serve/`).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

import anyio
import anyio.lowlevel

from atoll.contract.errors import AtollError
from atoll.contract.frozen import Frozen
from atoll.contract.model import SandboxInfo, Usage
from atoll.runtime.sandbox import Sandbox
from atoll.server.events import ListSandboxes

SAMPLE_S = 10.0
SAMPLES = 360
"""An hour of them."""
MAX_SANDBOXES = 4096
"""Sandboxes that have a history: 24 kB each. Of more, the ones that were sampled first."""
_FIELDS = ("time", "memory_bytes", "cpu_s", "pids", "cache_bytes", "disk_bytes")
_UNKNOWN = -1.0
_DISK_SHARE = 0.02
"""Of one core, for measuring disks."""
_RUNNING = ("running", "paused")

GetSandbox = Callable[[str, str], Awaitable[Sandbox]]


class UsageSample(Frozen):
    """What a sandbox used at a moment. A number that the machine does not report is unset."""

    time: datetime
    memory_bytes: int | None = None
    cpu_s: float | None = None
    """Since it started. The difference of two samples, by that of their times, is how many cores it used."""
    pids: int | None = None
    disk_bytes: int | None = None
    """Measured less often than the rest: the last that is known."""
    cache_bytes: int | None = None
    """As in `Usage`."""


class _Ring:
    """The samples of one sandbox, the oldest replaced by the newest."""

    __slots__ = ("disk_bytes", "next", "values")

    def __init__(self) -> None:
        self.values = array("d")
        self.next = 0
        self.disk_bytes = _UNKNOWN

    def add(self, sample: Sequence[float]) -> None:
        if len(self.values) < SAMPLES * len(_FIELDS):
            self.values.extend(sample)
            return
        start = self.next * len(_FIELDS)
        self.values[start : start + len(_FIELDS)] = array("d", sample)
        self.next = (self.next + 1) % SAMPLES

    def samples(self) -> list[UsageSample]:
        width = len(_FIELDS)
        rows = [self.values[start : start + width] for start in range(0, len(self.values), width)]
        return [_sample(row) for row in (*rows[self.next :], *rows[: self.next])]


class UsageHistory:
    """The history of the sandboxes of all tenants."""

    def __init__(self, list_sandboxes: ListSandboxes, get: GetSandbox) -> None:
        self._list = list_sandboxes
        self._get = get
        self._rings: dict[str, _Ring] = {}
        self._disks: list[tuple[str, SandboxInfo]] = []

    def of(self, sandbox_id: str) -> list[UsageSample]:
        """The samples of the last hour, the oldest first."""
        ring = self._rings.get(sandbox_id)
        oldest = time.time() - SAMPLE_S * SAMPLES
        return [each for each in ring.samples() if each.time.timestamp() >= oldest] if ring is not None else []

    async def sample(self) -> None:
        """Take samples until this is cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._measure_disks)
            while True:
                began = anyio.current_time()
                await self.take()
                await anyio.sleep_until(began + SAMPLE_S)

    async def take(self) -> None:
        """Take one sample of each sandbox that runs."""
        found = await self._list()
        present: set[str] = set()
        disks = []
        for tenant, infos in found.items():
            for info in infos:
                present.add(info.id)
                await anyio.lowlevel.checkpoint()  # requests need not wait for all of them
                if info.status not in _RUNNING:
                    continue
                if info.id not in self._rings and len(self._rings) >= MAX_SANDBOXES:
                    continue
                try:
                    usage = await (await self._get(tenant, info.name)).stat(disk=False)
                except AtollError:
                    continue  # it has just ended
                ring = self._rings.setdefault(info.id, _Ring())
                ring.add(_row(usage, ring.disk_bytes))
                disks.append((tenant, info))
        self._disks = disks
        for id in [id for id in self._rings if id not in present]:
            del self._rings[id]

    async def _measure_disks(self) -> None:
        while True:
            measured = 0
            for tenant, info in list(self._disks):
                ring = self._rings.get(info.id)
                if ring is None:
                    continue
                began = time.monotonic()
                try:
                    ring.disk_bytes = (await (await self._get(tenant, info.name)).stat()).disk_bytes
                except AtollError:
                    continue
                measured += 1
                await anyio.sleep((time.monotonic() - began) / _DISK_SHARE)
            await anyio.sleep(SAMPLE_S if measured else 1.0)


def _row(usage: Usage, disk_bytes: float) -> tuple[float, ...]:
    numbers = (usage.memory_bytes, usage.cpu_s, usage.pids, usage.cache_bytes)
    return (time.time(), *(_UNKNOWN if each is None else float(each) for each in numbers), disk_bytes)


def _sample(row: Sequence[float]) -> UsageSample:
    moment, memory, cpu_s, pids, cache, disk = (None if each == _UNKNOWN else each for each in row)
    return UsageSample(
        time=datetime.fromtimestamp(moment or 0, UTC),
        memory_bytes=None if memory is None else int(memory),
        cpu_s=cpu_s,
        pids=None if pids is None else int(pids),
        disk_bytes=None if disk is None else int(disk),
        cache_bytes=None if cache is None else int(cache),
    )
