"""What sandboxes use, as a table that is printed once or renewed on a terminal: `atoll top`.

Not here: how usage is measured (`Sandbox.stat`), one sandbox in detail (`stat` in `commands/sandboxes.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import anyio

from atoll.contract.errors import AtollError
from atoll.contract.model import SandboxInfo, Usage
from atoll.runtime.interface import Engine
from atoll.surfaces.cli import render, terminal

_AT_ONCE = 8
"""Sandboxes that are looked at together: measuring the files of each takes a program."""
_HEADERS = ("NAME", "STATUS", "CPU", "MEMORY", "OF", "PIDS", "DISK")
_HOME, _CLEAR_REST, _CLEAR_LINE = "\x1b[H", "\x1b[J", "\x1b[K"
_OTHER_SCREEN, _FIRST_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


class UsageRow(NamedTuple):
    """What one sandbox uses."""

    info: SandboxInfo
    usage: Usage
    cpu_percent: float | None
    """Of one core, since the look before. None: it does not run, or has just been found."""

    def document(self) -> dict[str, object]:
        usage = self.usage.model_dump(mode="json")
        limits = self.info.limits.model_dump(mode="json")
        shown = {"name": self.info.name, "status": self.info.status, "cpu_percent": self.cpu_percent}
        return {**shown, **usage, "limits": limits}


class UsageTable:
    """The usage of some sandboxes, or of all, look by look."""

    def __init__(self, engine: Engine, names: Sequence[str]) -> None:
        self._engine = engine
        self._names = names
        self._cpu: dict[str, tuple[float, float]] = {}
        """When each was looked at last, and the processor time it had used by then."""

    async def measure(self, interval_s: float) -> list[UsageRow]:
        """Two looks, so that there is something to compare with.

        Raises:
            SandboxNotFound: there is none of a name that was given.
        """
        await self.look()
        await anyio.sleep(interval_s)
        return await self.look()

    async def look(self) -> list[UsageRow]:
        """What they use now, the busiest first.

        Raises:
            SandboxNotFound: there is none of a name that was given.
        """
        for name in self._names:
            await self._engine.get(name)
        infos = [info for info in await self._engine.list() if not self._names or info.name in self._names]
        limiter = anyio.CapacityLimiter(_AT_ONCE)
        rows: list[UsageRow] = []

        async def measure_one(info: SandboxInfo) -> None:
            async with limiter:
                try:
                    usage = await (await self._engine.get(info.name)).stat()
                except AtollError:  # it was destroyed meanwhile, or cannot be read
                    return
            rows.append(UsageRow(info, usage, self._percent(info, usage)))

        async with anyio.create_task_group() as tasks:
            for info in infos:
                tasks.start_soon(measure_one, info)
        return sorted(rows, key=lambda row: (-(row.cpu_percent or 0), row.info.name))

    def _percent(self, info: SandboxInfo, usage: Usage) -> float | None:
        now, used = anyio.current_time(), usage.cpu_s
        before = self._cpu.pop(info.id, None)
        if info.status != "running" or used is None:
            return None
        self._cpu[info.id] = now, used
        if before is None or now <= before[0]:
            return None
        return round(max(used - before[1], 0.0) / (now - before[0]) * 100, 1)


def lines(rows: Sequence[UsageRow]) -> list[str]:
    """The table, line by line."""
    if not rows:
        return ["no sandboxes"]
    return render.table_lines(_HEADERS, [_cells(row) for row in rows], flex=0)


def _cells(row: UsageRow) -> tuple[str, ...]:
    usage, limits = row.usage, row.info.limits
    return (
        row.info.name,
        row.info.status,
        "-" if row.cpu_percent is None else f"{row.cpu_percent:.1f}%",
        "-" if usage.memory_bytes is None else render.human_bytes(usage.memory_bytes),
        "-" if limits.memory_bytes is None else render.human_bytes(limits.memory_bytes),
        "-" if usage.pids is None else str(usage.pids),
        render.human_bytes(usage.disk_bytes),
    )


async def watch(table: UsageTable, interval_s: float) -> None:
    """Show the table on the terminal and renew it, until Ctrl-C. The terminal is what it was before, afterwards."""
    await table.look()  # an error is shown on the screen that stays
    try:
        _write(_OTHER_SCREEN)
        with terminal.interruptible():
            await anyio.sleep(min(interval_s, 0.5))
            while True:
                shown = lines(await table.look())
                room = os.get_terminal_size(sys.stdout.fileno()).lines - 2
                left_out = f"… {len(shown) - room} more" if len(shown) > room else "Ctrl-C ends"
                shown = [*shown[:room], render.styled(left_out, render.DIM, sys.stdout.fileno())]
                _write(_HOME + "".join(f"{line}{_CLEAR_LINE}\r\n" for line in shown) + _CLEAR_REST)
                await anyio.sleep(interval_s)
    finally:
        _write(_FIRST_SCREEN)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
