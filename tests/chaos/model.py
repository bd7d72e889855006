"""What must hold of the sandboxes and checkpoints of a journal, whenever its writer was killed.

Knows what each operation does to what a sandbox is: its files, its kept processes, whether it runs. Of an operation
that was under way it knows all that may have become of it, and nothing else. Refuses to know how the state is looked
at (`test_chaos.py`), and how the operations are carried out (`worker.py`).
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

PATHS = ("/home/user/log", "/home/user/f0", "/home/user/d/f1", "/usr/share/f2")
"""Only the first is appended to. The last is in another overlay than the others."""
GLOBS = "/home/user/log* /home/user/f* /home/user/d/* /usr/share/f2*"
"""All that the worker may have made."""
MARKER = "3153"
"""What the argument of every kept process begins with; the number of its operation follows."""

State = Literal["alive", "sleeping", "shutdown"]
Files = dict[str, bytes]
Processes = dict[str, int]
"""By their marker: their process id inside."""


def content(box: str, path: str, number: int, lines: int) -> bytes:
    """What an operation writes: every line says where it belongs."""
    return f"{box} {path} {number}\n".encode() * lines


@dataclass
class Sandbox:
    runtime: str
    files: Files = field(default_factory=dict)
    processes: Processes = field(default_factory=dict)
    state: State = "alive"
    pid: int | None = None
    """On the host, if it was seen since it was last started and nothing has ended it since."""

    @property
    def keeps_processes(self) -> bool:
        return self.runtime == "runsc"


@dataclass
class Checkpoint:
    sandbox: str
    runtime: str
    files: Files
    processes: Processes | None
    """Unset: it has only files."""


@dataclass
class Expected:
    """What a sandbox may be found to be. One of each list is to be so."""

    runtime: str
    files: list[Files]
    processes: list[Processes]
    states: set[State]
    there: Literal["yes", "maybe", "no"] = "yes"
    pid: int | None = None
    grown: tuple[str, bytes, bytes] | None = None
    """A file that may have grown by any part of something: the path, what it was, and what was being appended."""

    def finds(self, files: Files) -> bool:
        if self.grown is not None:
            path, old, more = self.grown
            seen = files.get(path, b"")
            if (seen == b"" or seen.startswith(old)) and (old + more).startswith(seen) and len(seen) >= len(old):
                return any({**each, path: b""} == {**files, path: b""} for each in self.files)
        return files in self.files


class Broken(AssertionError):
    """Something is not as it must be."""


class Model:
    def __init__(self) -> None:
        self.sandboxes: dict[str, Sandbox] = {}
        self.checkpoints: dict[str, Checkpoint] = {}
        self.deleted: set[str] = set()
        self.pending: dict[int, dict[str, Any]] = {}
        self.last = 0
        self.counts: dict[str, list[int]] = {}
        """By operation: how many were done, and how many were under way at a kill."""

    # ---- what was done ----

    def read(self, journal: str) -> None:
        """Take in the lines of one life. What is under way at its end is `pending`."""
        for line in journal.splitlines():
            entry = json.loads(line)
            number = entry.pop("n")
            self.last = max(self.last, number)
            if "failed" in entry:
                raise Broken(f"an operation failed: {number} {self.pending[number]}\n{entry['failed']}")
            if "do" in entry:
                self.pending[number] = entry
            else:
                wish = self.pending.pop(number)
                self.counts.setdefault(wish["do"], [0, 0])[0] += 1
                self._apply(number, wish, entry["done"])
        for wish in self.pending.values():
            self.counts.setdefault(wish["do"], [0, 0])[1] += 1

    def _apply(self, number: int, wish: dict[str, Any], done: dict[str, Any]) -> None:
        kind = wish["do"]
        if kind == "gc":
            return
        if kind == "create":
            self.sandboxes[wish["box"]] = Sandbox(wish["runtime"])
            return
        if kind == "delete":
            del self.checkpoints[wish["checkpoint"]]
            self.deleted.add(wish["checkpoint"])
            return
        if kind == "destroy":
            del self.sandboxes[wish["box"]]
            return
        box = self.sandboxes[wish["box"]]
        if kind == "checkpoint":
            self.checkpoints[done["id"]] = self.checkpoint_of(wish["box"])
        elif kind == "fork":
            for name in wish["names"]:
                self.sandboxes[name] = self._forked(wish)
        self._change(number, wish, box, done)

    def checkpoint_of(self, name: str) -> Checkpoint:
        """A checkpoint of a sandbox as it is now."""
        box = self.sandboxes[name]
        return Checkpoint(name, box.runtime, dict(box.files), dict(box.processes) if box.keeps_processes else None)

    def _forked(self, wish: dict[str, Any]) -> Sandbox:
        source = self.checkpoints[wish["checkpoint"]] if "checkpoint" in wish else self.checkpoint_of(wish["box"])
        return Sandbox(source.runtime, dict(source.files), dict(source.processes or {}))

    def _change(self, number: int, wish: dict[str, Any], box: Sandbox, done: dict[str, Any]) -> None:
        """What an operation does to the sandbox that it is asked of."""
        kind, path = wish["do"], wish.get("path", "")
        if kind in ("write", "exec"):
            box.files[path] = content(wish["box"], path, number, wish["lines"])
        elif kind == "append":
            box.files[path] = box.files.get(path, b"") + content(wish["box"], path, number, wish["lines"])
        elif kind == "remove":
            box.files.pop(path, None)
        elif kind == "spawn":
            box.processes[f"{MARKER}{number}"] = done["pid"]
        elif kind == "restore":
            source = self.checkpoints[wish["checkpoint"]]
            box.files, box.processes = dict(source.files), dict(source.processes or {})
        if _ends_a_run(wish, box):
            box.pid = None
        if kind in ("sleep", "shutdown"):
            box.state = "sleeping" if kind == "sleep" else "shutdown"
            if not box.keeps_processes:
                box.processes = {}
        elif kind not in ("pause", "checkpoint", "fork"):
            box.state = "alive"

    # ---- what may have been done ----

    def expected(self) -> dict[str, Expected]:
        """Every sandbox that must or may be there, by its name. There is no other."""
        found = {
            name: Expected(box.runtime, [box.files], [box.processes], {box.state}, pid=box.pid)
            for name, box in self.sandboxes.items()
        }
        for number, wish in self.pending.items():
            if wish["do"] == "create":
                found[wish["box"]] = Expected(wish["runtime"], [{}], [{}], {"alive"}, "maybe")
            elif wish["do"] not in ("gc", "delete"):
                found[wish["box"]] = self._perhaps(number, wish)
            if wish["do"] == "fork":
                fork = self._forked(wish)
                for name in wish["names"]:
                    found[name] = Expected(fork.runtime, [fork.files], [fork.processes], {"alive"}, "maybe")
        return found

    def _perhaps(self, number: int, wish: dict[str, Any]) -> Expected:
        box = self.sandboxes[wish["box"]]
        kind = wish["do"]
        expected = Expected(box.runtime, [box.files], [box.processes], {box.state}, pid=box.pid)
        if kind == "destroy":
            expected.there = "maybe"
            return expected
        after = deepcopy(box)
        self._change(number, wish, after, {"pid": 0})
        expected.files.append(after.files)
        expected.processes.append(after.processes)
        expected.states.add(after.state)
        if kind == "append":
            path = wish["path"]
            expected.grown = (path, box.files.get(path, b""), content(wish["box"], path, number, wish["lines"]))
        if _ends_a_run(wish, box):
            expected.pid = None
            expected.states.add("shutdown" if "shutdown" in expected.states else "sleeping")
        if kind == "restore" or (box.keeps_processes and (box.state != "alive" or kind in ("checkpoint", "fork"))):
            # Who is killed while saved processes are taken up loses them, though never a file.
            expected.processes.append({})
        return expected

    def groups(self) -> list[list[str]]:
        """Names of sandboxes that were to be made together: all of a group are there, or none."""
        return [wish["names"] for wish in self.pending.values() if wish["do"] == "fork"]

    def perhaps_checkpoints(self) -> dict[str, str]:
        """The label of each checkpoint that there may be, though nobody knows of it, and its sandbox."""
        return {f"at-{number}": wish["box"] for number, wish in self.pending.items() if wish["do"] == "checkpoint"}

    def perhaps_deleted(self) -> set[str]:
        return {wish["checkpoint"] for wish in self.pending.values() if wish["do"] == "delete"}

    # ---- what turned out ----

    def settle(self, name: str, expected: Expected, seen: Sandbox | None) -> None:
        """Of what may have become of a sandbox, this has. None: there is none."""
        if seen is None:
            self.sandboxes.pop(name, None)
        else:
            self.sandboxes[name] = replace(seen, runtime=expected.runtime)


def _ends_a_run(wish: dict[str, Any], box: Sandbox) -> bool:
    """Whether the processes of before end with an operation, or are taken up elsewhere."""
    if wish["do"] in ("sleep", "shutdown", "restore"):
        return True
    live = "checkpoint" not in wish
    return box.keeps_processes and wish["do"] in ("checkpoint", "fork") and live
