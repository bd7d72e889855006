"""The memory of sandboxes, process by process, from /proc.

A sandbox's processes are its keeper and all its descendants: the guest, and other processes of the runtime.
Their *proportional set size* counts a page that n processes share as 1/n for each, so the sizes of all add up.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ProcessKey = tuple[int, str]
"""A process id and its start time: together they identify a process."""


@dataclass(frozen=True)
class Footprint:
    """Proportional set sizes of many sandboxes together, in bytes."""

    keepers: int
    guests: int
    others: int
    """Other processes of the runtime for a sandbox, such as gVisor's kernel."""
    processes: int

    @property
    def total(self) -> int:
        return self.keepers + self.guests + self.others


def sandbox_processes(state_dir: Path, ids: Iterable[str]) -> dict[str, list[int]]:
    """The processes of each sandbox: the keeper, the guest, then all others."""
    children = _children()
    found = {}
    for id in ids:
        directory = state_dir / "sandboxes" / id
        keeper = int((directory / "keeper.lock").read_text())
        guest = int((directory / "pid").read_text())
        below = _below(keeper, children)
        found[id] = [keeper, guest, *(pid for pid in below if pid != guest)]
    return found


def measure(processes: Mapping[str, list[int]]) -> Footprint:
    keepers = guests = others = count = 0
    for keeper, guest, *rest in processes.values():
        keepers += pss_bytes(keeper)
        guests += pss_bytes(guest)
        others += sum(map(pss_bytes, rest))
        count += 2 + len(rest)
    return Footprint(keepers=keepers, guests=guests, others=others, processes=count)


def pss_bytes(pid: int) -> int:
    """The proportional set size of a process. 0: it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return 0


def lives(pids: Iterable[int]) -> set[ProcessKey]:
    return {(pid, began) for pid in pids if (began := _began(pid)) is not None}


def still_alive(seen: Iterable[ProcessKey]) -> list[int]:
    return [pid for pid, began in seen if _began(pid) == began]


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()


def _began(pid: int) -> str | None:
    stat = _stat(pid)
    return None if stat is None or stat[0] == "Z" else stat[19]


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _stat(int(name))) is not None:
            children.setdefault(int(stat[1]), []).append(int(name))
    return children


def _below(pid: int, children: Mapping[int, list[int]]) -> list[int]:
    found = []
    waiting = [pid]
    while waiting:
        more = children.get(waiting.pop(), [])
        found += more
        waiting += more
    return found
