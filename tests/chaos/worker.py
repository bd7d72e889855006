"""The program that is killed: several tasks that do to sandboxes what comes to their mind, and write down what.

Knows how each operation of the journal is carried out, and which make sense now. Refuses to know what they should come
to: that is the model's. What it is about to do it writes down before, and how it went afterwards, each with a single
write to a file that is open for appending, so that whoever kills it knows all but what was under way.

It is a process that has imported everything and makes copies of itself: `Victims` orders one after the other, each with
the moment of its death.
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

import atoll
from tests.chaos.model import MARKER, PATHS, content

TASKS = 3
NAMES = [f"n{number}" for number in range(8)]
MOST_SANDBOXES, MOST_SLOW, MOST_CHECKPOINTS = 6, 1, 8
FEWEST_SANDBOXES, FEWEST_CHECKPOINTS = 3, 4
"""Below so many, none is taken away."""
WEIGHTS = {
    "create": 4,
    "write": 6,
    "exec": 4,
    "append": 2,
    "remove": 1,
    "spawn": 3,
    "checkpoint": 4,
    "restore": 3,
    "fork": 3,
    "sleep": 4,
    "pause": 1,
    "shutdown": 1,
    "wake": 2,
    "destroy": 2,
    "delete": 2,
    "gc": 1,
}
KINDS = tuple(WEIGHTS)
_FAVOUR = 8
"""How much likelier an operation is that the process is to be killed in."""
_PATIENCE = 6
"""After how many other operations it is killed in whatever it is at."""


@dataclass(frozen=True)
class Order:
    """A life: what is there when it begins, and when it ends."""

    state_dir: str
    journal: str
    seed: str
    first: int
    """The number of the first operation."""
    sandboxes: dict[str, dict[str, str]]
    """By name: the runtime, and the state: `alive`, `cold` or `shutdown`."""
    checkpoints: dict[str, dict[str, str]]
    """By id: the runtime."""
    runtimes: list[str]
    kind: str | None
    """The operation that it is killed in. Unset: whatever it is at."""
    after: int
    """How many operations are done before it is."""
    delay_s: float
    """From the beginning of that operation, or from the end of the last of those before it."""
    longest_s: float
    """How long it lives if it never comes to that."""


class Victims:
    """The process that makes the copies, as the test sees it."""

    def __init__(self, log: Path) -> None:
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def live_and_die(self, order: Order) -> str:
        """Have one live until it is killed. Returns how it ended: `killed`, or what it did of itself."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order.__dict__) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip() or f"nobody made it: {self._log.read_text()[-2000:]}"

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def serve() -> None:
    """Make copies, kill them and say how they ended, until standard input ends."""
    for line in sys.stdin:
        order = Order(**json.loads(line))
        bell, ring = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(bell)
            _live(order, ring)
        os.close(ring)
        deadline = time.monotonic() + order.longest_s
        select.select([bell], [], [], order.longest_s)
        time.sleep(max(0.0, min(order.delay_s, deadline - time.monotonic())))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(bell)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        print("killed" if killed else f"ended with {os.waitstatus_to_exitcode(status)}", flush=True)


def _live(order: Order, ring: int) -> None:
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        anyio.run(Worker(order, ring).live)
    except BaseException:  # noqa: BLE001 - a copy must never come to where its original is
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@dataclass
class Box:
    runtime: str
    state: str
    busy: bool = False


class Worker:
    def __init__(self, order: Order, ring: int) -> None:
        self._order = order
        self._ring = ring
        self._random = random.Random(order.seed)
        self._number = order.first
        self._done = 0
        self._boxes = {name: Box(box["runtime"], box["state"]) for name, box in order.sandboxes.items()}
        self._checkpoints = {id: Box(each["runtime"], "") for id, each in order.checkpoints.items()}
        self._taken: set[str] = set()
        """Names of sandboxes that are being made."""
        self._journal = os.open(order.journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    async def live(self) -> None:
        async with atoll.open(self._order.state_dir) as self._engine, anyio.create_task_group() as group:
            for _ in range(TASKS):
                group.start_soon(self._work)

    async def _work(self) -> None:
        while True:
            wish = self._choose()
            if wish is None:
                await anyio.sleep(0.005)
                continue
            self._number += 1
            number = self._number
            self._write({"n": number, **wish})
            self._await_death(wish["do"] == self._order.kind)
            held = self._hold(wish)
            try:
                result = await getattr(self, f"_do_{wish['do']}")(
                    number, **{k: v for k, v in wish.items() if k != "do"}
                )
            except (atoll.AtollError, OSError) as error:
                self._write({"n": number, "failed": "".join(traceback.format_exception(error))})
                raise
            self._write({"n": number, "done": result or {}})
            self._done += 1
            self._await_death(self._order.kind is None or self._done >= self._order.after + _PATIENCE)
            for each in held:
                each.busy = False

    def _await_death(self, now: bool) -> None:
        if now and self._done >= self._order.after:
            os.write(self._ring, b"!")

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._journal, json.dumps(line).encode() + b"\n")

    def _hold(self, wish: dict[str, Any]) -> list[Box]:
        """What nobody else may touch meanwhile: the model has one operation at a time for each."""
        held = [self._boxes[wish["box"]]] if "box" in wish and wish["box"] in self._boxes else []
        if "checkpoint" in wish:
            held.append(self._checkpoints[wish["checkpoint"]])
        for each in held:
            each.busy = True
        self._taken |= {wish["box"]} if wish["do"] == "create" else set(wish.get("names", ()))
        return held

    # ---- choosing ----

    def _choose(self) -> dict[str, Any] | None:
        kinds = list(WEIGHTS)
        weights = [weight * (_FAVOUR if kind == self._order.kind else 1) for kind, weight in WEIGHTS.items()]
        if len(self._boxes) + len(self._taken) >= MOST_SANDBOXES:
            weights[kinds.index("destroy")] *= 6
        for kind in self._random.choices(kinds, weights, k=4):
            wish = self._wish(kind)
            if wish is not None:
                return {"do": kind, **wish}
        return None

    def _wish(self, kind: str) -> dict[str, Any] | None:
        if kind == "gc":
            return {} if self._boxes else None
        if kind == "create":
            name, runtime = self._new_name(), self._draw_runtime()
            return {"box": name, "runtime": runtime} if name else None
        ids = [id for id, each in self._checkpoints.items() if not each.busy]
        if kind == "delete":
            enough = len(self._checkpoints) >= FEWEST_CHECKPOINTS
            return {"checkpoint": self._random.choice(ids)} if ids and enough else None
        shut = ("wake", "checkpoint", "restore", "fork", "destroy", "sleep", "shutdown")
        names = [
            name for name, box in self._boxes.items() if not box.busy and (box.state != "shutdown" or kind in shut)
        ]
        if not names:
            return None
        name = self._random.choice(names)
        return self._wish_for(kind, name, self._boxes[name], ids)

    def _wish_for(self, kind: str, name: str, box: Box, ids: list[str]) -> dict[str, Any] | None:
        path = self._random.choice(PATHS)
        lines = self._random.choice([1, 40, 1500])
        alike = [id for id in ids if (self._checkpoints[id].runtime == "runsc") == (box.runtime == "runsc")]
        match kind:
            case "write" | "exec":
                return {"box": name, "path": path, "lines": lines}
            case "append":
                return {"box": name, "path": PATHS[0], "lines": lines}
            case "remove":
                return {"box": name, "path": path}
            case "checkpoint":
                return {"box": name} if len(self._checkpoints) < MOST_CHECKPOINTS else None
            case "restore":
                return {"box": name, "checkpoint": self._random.choice(alike)} if alike else None
            case "fork":
                return self._wish_fork(name, box, alike)
            case "destroy":
                return {"box": name} if len(self._boxes) >= FEWEST_SANDBOXES else None
        return {"box": name}

    def _wish_fork(self, name: str, box: Box, alike: list[str]) -> dict[str, Any] | None:
        if box.runtime == "runsc" and self._slow() > MOST_SLOW:
            return None
        names = [self._new_name()]
        if box.runtime != "runsc" and self._random.random() < 0.5:
            names.append(self._new_name(names[0]))
        if None in names:
            return None
        some = {"checkpoint": self._random.choice(alike)} if alike and self._random.random() < 0.5 else {}
        return {"box": name, "names": names, **some}

    def _new_name(self, *but: str | None) -> str | None:
        if len(self._boxes) + len(self._taken) >= MOST_SANDBOXES:
            return None
        free = [name for name in NAMES if name not in self._boxes and name not in self._taken and name not in but]
        return self._random.choice(free) if free else None

    def _slow(self) -> int:
        return sum(box.runtime == "runsc" for box in self._boxes.values())

    def _draw_runtime(self) -> str:
        weights = {"crun": 16, "runc": 4, "runsc": 2 if self._slow() < MOST_SLOW else 0}
        usable = self._order.runtimes
        return self._random.choices(usable, [weights.get(name, 1) for name in usable])[0]

    # ---- doing ----

    async def _do_create(self, number: int, box: str, runtime: str) -> None:
        await self._engine.create(box, runtime=runtime)
        self._add(box, runtime)

    def _add(self, name: str, runtime: str) -> None:
        self._taken.discard(name)
        self._boxes[name] = Box(runtime, "alive")

    async def _do_write(self, number: int, box: str, path: str, lines: int) -> None:
        sandbox = await self._use(box)
        await sandbox.files.write_bytes(path, content(box, path, number, lines), user="root")

    async def _do_append(self, number: int, box: str, path: str, lines: int) -> None:
        sandbox = await self._use(box)
        await sandbox.files.write_bytes(path, content(box, path, number, lines), append=True, user="root")

    async def _do_exec(self, number: int, box: str, path: str, lines: int) -> None:
        line = content(box, path, number, 1).decode().strip()
        sandbox = await self._use(box)
        # In the same directory: only there is a rename a change at once.
        put = f"d=$(dirname {path}); mkdir -p $d; yes '{line}' | head -n {lines} > $d/.new && mv $d/.new {path}"
        result = await sandbox.exec(put, user="root")
        if not result.ok:
            raise OSError(f"{put}: exit code {result.exit_code}: {result.stderr}")

    async def _do_remove(self, number: int, box: str, path: str) -> None:
        sandbox = await self._use(box)
        await sandbox.files.remove(path, missing_ok=True, user="root")

    async def _do_spawn(self, number: int, box: str) -> dict[str, Any]:
        sandbox = await self._use(box)
        process = await sandbox.spawn(["sleep", f"{MARKER}{number}"])
        await process.detach()
        return {"pid": process.pid}

    async def _use(self, name: str) -> atoll.Sandbox:
        self._boxes[name].state = "alive"
        return await self._engine.get(name)

    async def _do_checkpoint(self, number: int, box: str) -> dict[str, Any]:
        made = await self._engine.checkpoint(box, f"at-{number}")
        self._checkpoints[made.id] = Box(self._boxes[box].runtime, "")
        return {"id": made.id}

    async def _do_restore(self, number: int, box: str, checkpoint: str) -> None:
        await self._engine.restore(box, checkpoint, foreign=True)
        self._boxes[box].state = "alive"

    async def _do_fork(self, number: int, box: str, names: list[str], checkpoint: str | None = None) -> None:
        # A checkpoint of another sandbox is as good: it goes by its id.
        await self._engine.fork(box, len(names), checkpoint=checkpoint, names=names)
        for name in names:
            self._add(name, self._boxes[box].runtime if checkpoint is None else self._checkpoints[checkpoint].runtime)

    async def _do_sleep(self, number: int, box: str) -> None:
        await self._engine.sleep(box)
        self._boxes[box].state = "sleeping"

    async def _do_pause(self, number: int, box: str) -> None:
        await self._engine.pause(box)

    async def _do_shutdown(self, number: int, box: str) -> None:
        await self._engine.shutdown(box)
        self._boxes[box].state = "shutdown"

    async def _do_wake(self, number: int, box: str) -> None:
        await self._engine.wake(box)
        self._boxes[box].state = "alive"

    async def _do_destroy(self, number: int, box: str) -> None:
        await self._engine.destroy(box)
        del self._boxes[box]

    async def _do_delete(self, number: int, checkpoint: str) -> None:
        await self._engine.delete_checkpoint(checkpoint)
        del self._checkpoints[checkpoint]

    async def _do_gc(self, number: int) -> None:
        await self._engine.gc()


if __name__ == "__main__":
    anyio.run(anyio.sleep, 0)  # what is imported when it is first needed is imported now
    gc.collect()
    gc.freeze()
    serve()
