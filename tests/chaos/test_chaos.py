"""A host process that is killed at any moment loses nothing that it had finished, and leaves nothing behind.

`worker.py` does at random what can be done to sandboxes, in several tasks at once, and is killed, again and again, over
one state directory. After each death the next `atoll.open()` must find what `model.py` says. The seed is printed and
can be given: `ATOLL_CHAOS_SEED`. `ATOLL_CHAOS_KILLS` is how often, 100 when it is not said; `make chaos KILLS=1000`.

A seed repeats what is drawn, not how the machine runs: a failure is likely to come again, not sure to.
"""

from __future__ import annotations

import hashlib
import os
import random
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

import atoll
from atoll.drivers import registry
from atoll.testing.leaks import Ledger
from atoll.testing.waiting import eventually
from tests.chaos.model import GLOBS, MARKER, Broken, Expected, Files, Model, Processes, Sandbox, State
from tests.chaos.orphans import orphans
from tests.chaos.worker import FEWEST_CHECKPOINTS, FEWEST_SANDBOXES, KINDS, MOST_SANDBOXES, Order, Victims
from tests.conftest import REPORTED

KILLS = int(os.environ.get("ATOLL_CHAOS_KILLS", "100"))
SEED = os.environ.get("ATOLL_CHAOS_SEED") or secrets.token_hex(4)
WHOLE_EVERY = 25
"""After so many kills everything is looked at: all files, all checkpoints, and what belongs to nobody."""
LIFE_S = 0.6
"""How long a worker lives at most, if there is something that it can begin with."""
STATES: dict[str, State] = {"running": "alive", "paused": "alive", "sleeping": "sleeping", "shutdown": "shutdown"}


class Chaos:
    def __init__(self, state_dir: Path, ledger: Ledger, journal: Path) -> None:
        self._state_dir = state_dir
        self._ledger = ledger
        self._journal = journal
        self._random = random.Random(SEED)
        self._model = Model()
        self._read = 0
        self.history: list[str] = []
        self.sandboxes = self._model.sandboxes
        self.lived_s = 0.0

    def order(self, number: int, runtimes: list[str]) -> Order:
        """The next life: killed in the middle of an operation of some kind, or at any moment."""
        draw = self._random
        aimed = draw.random() < 0.7
        spans = (0.0, 0.004, 0.03, 0.08, 0.4)
        return Order(
            state_dir=str(self._state_dir),
            journal=str(self._journal),
            seed=f"{SEED}-{number}",
            first=self._model.last,
            sandboxes={
                name: {"runtime": box.runtime, "state": box.state} for name, box in self._model.sandboxes.items()
            },
            checkpoints={id: {"runtime": each.runtime} for id, each in self._model.checkpoints.items()},
            runtimes=runtimes,
            kind=draw.choice(self._possible()) if aimed else None,
            after=draw.randrange(4) if aimed else draw.randrange(10),
            delay_s=draw.uniform(0, draw.choice(spans)),
            longest_s=LIFE_S if len(self._model.sandboxes) > 1 else 2 * LIFE_S,
        )

    def _possible(self) -> list[str]:
        """The operations that a worker can soon come to."""
        boxes, checkpoints = len(self._model.sandboxes), len(self._model.checkpoints)
        lacking = {
            "destroy": boxes < FEWEST_SANDBOXES,
            "delete": checkpoints < FEWEST_CHECKPOINTS,
            "restore": not checkpoints,
            "create": boxes >= MOST_SANDBOXES - 1,
            "fork": boxes >= MOST_SANDBOXES - 1,
        }
        return [kind for kind in KINDS if not lacking.get(kind)] if boxes else ["create"]

    def take_in(self) -> None:
        """Read what the last one wrote before it died."""
        text = self._journal.read_bytes()
        new, self._read = text[self._read :].decode(), len(text)
        self.history = [*self.history[-400:], "---- killed", *new.splitlines()]
        self._model.read(new)

    # ---- after each death ----

    async def check(self, *, whole: bool) -> None:
        expected = self._model.expected()
        async with atoll.open(self._state_dir) as engine:
            # What is half done is put in order in the background.
            await eventually(lambda: not os.listdir(self._state_dir / "uncommitted"), "what was half done is in order")
            await self._check_list(engine, expected)
            await self._check_checkpoints(engine)
            touched = {wish["box"] for wish in self._model.pending.values() if "box" in wish}
            touched |= {name for names in self._model.groups() for name in names}
            others = sorted(set(self._model.sandboxes) - touched)
            touched |= set(others if whole else self._random.sample(others, min(1, len(others))))
            for name in sorted(touched & set(self._model.sandboxes)):
                await self._check_inside(engine, name, expected[name])
            self._model.pending.clear()
            if whole:
                await self._check_whole(engine)
            for info in await engine.list():
                self._model.sandboxes[info.name].pid = info.pid

    async def _check_list(self, engine: atoll.Engine, expected: dict[str, Expected]) -> None:
        found = {info.name: info for info in await engine.list()}
        if strange := set(found) - set(expected):
            raise Broken(f"sandboxes that nobody made: {strange}")
        for names in self._model.groups():
            if len({name in found for name in names}) != 1:
                raise Broken(f"of the forks {names} only some are there: {set(names) & set(found)}")
        for name, what in expected.items():
            info = found.get(name)
            if info is None:
                if what.there == "yes":
                    raise Broken(f"the sandbox {name} is lost")
                self._model.settle(name, what, None)
                continue
            if STATES.get(info.status) not in what.states:
                raise Broken(f"the sandbox {name} is {info.status} ({info.reason}), and should be {what.states}")
            if info.runtime != what.runtime:
                raise Broken(f"the sandbox {name} is run by {info.runtime}, not {what.runtime}")
            if what.pid is not None and info.pid != what.pid:
                raise Broken(f"the sandbox {name} was process {what.pid} and is {info.pid}; nothing has ended it")
            self._model.settle(
                name, what, Sandbox(what.runtime, what.files[0], what.processes[0], STATES[info.status], info.pid)
            )

    async def _check_checkpoints(self, engine: atoll.Engine) -> None:
        model = self._model
        found = {each.id: each for each in await engine.checkpoints()}
        perhaps = model.perhaps_checkpoints()
        for id in set(found) - set(model.checkpoints):
            label = found[id].label
            if label not in perhaps:
                raise Broken(f"a checkpoint that nobody made, or that was deleted: {found[id]}")
            made = perhaps.pop(label)
            if found[id].sandbox != made:
                raise Broken(f"the checkpoint {found[id]} should be one of {made}")
            model.checkpoints[id] = model.checkpoint_of(made)
            if not found[id].with_memory:
                model.checkpoints[id].processes = None
        for id in set(model.checkpoints) - set(found):
            if id not in model.perhaps_deleted():
                raise Broken(f"the checkpoint {id} of {model.checkpoints[id].sandbox} is lost")
            del model.checkpoints[id]
            model.deleted.add(id)

    async def _check_inside(self, engine: atoll.Engine, name: str, expected: Expected) -> None:
        """The files and processes of a sandbox, which wakes it; from here on it is what it was found to be."""
        was = self._model.sandboxes[name].state
        sandbox = await engine.get(name)
        if "shutdown" in expected.states:
            await sandbox.wake()
        known = {path: data for each in expected.files for path, data in each.items()}
        files = await read_files(sandbox, [each for files in expected.files for each in files.values()])
        if not expected.finds(files):
            raise Broken(f"the files of {name} are not what they should be:\n{describe(files, expected.files, known)}")
        processes = await kept_processes(sandbox)
        allowed = list(expected.processes)
        if was != "alive" and expected.runtime != "runsc":
            allowed = [{}]
        if not any(alike(processes, each) for each in allowed):
            raise Broken(f"the processes of {name} are {processes}, and should be one of {allowed}")
        self._model.settle(name, expected, Sandbox(expected.runtime, files, processes))

    # ---- now and then ----

    async def _check_whole(self, engine: atoll.Engine) -> None:
        """All checkpoints can be forked and gone back to, and what is left then is somebody's."""
        model = self._model
        stranger = await engine.create("proof", runtime="crun")  # a checkpoint can be asked of any sandbox
        for number, (id, checkpoint) in enumerate(sorted(model.checkpoints.items())):
            source = checkpoint.sandbox if checkpoint.sandbox in model.sandboxes and number % 2 else stranger.name
            (fork,) = await engine.fork(source, checkpoint=id, names=[f"proof-{number}"])
            files = await read_files(fork, list(checkpoint.files.values()))
            if files != checkpoint.files:
                raise Broken(
                    f"the checkpoint {id} of {checkpoint.sandbox} holds other files:\n"
                    f"{describe(files, [checkpoint.files], checkpoint.files)}"
                )
            processes = await kept_processes(fork)
            if not alike(processes, checkpoint.processes or {}):
                raise Broken(f"the checkpoint {id} holds the processes {processes}, not {checkpoint.processes}")
            if (await fork.exec("hostname")).stdout.strip() != fork.name:
                raise Broken(f"the fork {fork.name} has the hostname of another")
            await fork.destroy()
        await stranger.destroy()
        await engine.gc()
        await self._nothing_is_nobodys()

    async def _nothing_is_nobodys(self) -> None:
        left: list[str] = []

        def none() -> bool:
            left[:] = orphans(self._ledger, self._state_dir)
            return not left

        try:
            await eventually(none, "nothing is left that belongs to nobody", bound_s=10)
        except AssertionError:
            raise Broken("this belongs to nobody:\n  " + "\n  ".join(left)) from None

    async def end(self) -> None:
        """Take everything away: then nothing is left."""
        async with atoll.open(self._state_dir) as engine:
            for info in await engine.list():
                await engine.destroy(info.name)
            for checkpoint in await engine.checkpoints():
                await engine.delete_checkpoint(checkpoint.id)
            await engine.gc()
        await eventually(lambda: not self._ledger.all_of(self._state_dir), "nothing at all is left")
        await self._nothing_is_nobodys()

    def told(self) -> str:
        counts = sorted(self._model.counts.items())
        return f"{self.lived_s:.0f} s of them alive: " + ", ".join(
            f"{kind} {done} (+{cut} cut short)" for kind, (done, cut) in counts
        )


# ---- looking inside ----


async def read_files(sandbox: atoll.Sandbox, likely: list[bytes]) -> Files:
    """All that the worker may have written. What is known by its sum is not read."""
    known = {hashlib.sha256(data).hexdigest(): data for data in likely}
    said = await sandbox.exec(f"sha256sum {GLOBS} 2>/dev/null", user="root")
    files = {}
    for line in said.stdout.splitlines():
        digest, path = line.split(None, 1)
        files[path] = known[digest] if digest in known else await sandbox.files.read_bytes(path, user="root")
    return files


async def kept_processes(sandbox: atoll.Sandbox) -> Processes:
    found = {}
    for process in await sandbox.ps():
        words = process.command.split()
        if len(words) == 2 and words[0] == "sleep" and words[1].startswith(MARKER) and process.state != "Z":
            found[words[1]] = process.pid
    return found


def alike(seen: Processes, expected: Processes) -> bool:
    """The same processes. One that was being started when its starter died has an id that nobody knows."""
    return seen.keys() == expected.keys() and all(pid in (0, seen[marker]) for marker, pid in expected.items())


def describe(files: Files, allowed: list[Files], known: Files) -> str:
    def short(data: bytes | None) -> str:
        if data is None:
            return "not there"
        lines = data.decode(errors="replace").splitlines()
        return f"{len(data)} bytes, {len(lines)} lines, {sorted(set(lines))[:6]}"

    lines = []
    for path in sorted({*files, *known}):
        lines.append(f"  {path}: {short(files.get(path))}")
        lines += [f"    allowed: {short(each.get(path))}" for each in allowed]
    return "\n".join(lines)


# ---- the test ----


@pytest.mark.skipif(os.geteuid() != 0, reason="copies sandboxes while they run, which takes a freezer: needs root")
@pytest.mark.timeout(120 + 4 * KILLS)
def test_a_host_that_is_killed_at_any_moment_loses_nothing_and_leaves_nothing(
    make_state_dir: Callable[[], Path],
    ledger: Ledger,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    state_dir = make_state_dir()
    chaos = Chaos(state_dir, ledger, tmp_path / "journal")
    (tmp_path / "journal").touch()
    victims = Victims(tmp_path / "errors")
    print(f"seed {SEED}, {KILLS} kills: ATOLL_CHAOS_SEED={SEED} ATOLL_CHAOS_KILLS={KILLS}", flush=True)
    began = time.monotonic()

    async def one(number: int, order: Order) -> None:
        born = time.monotonic()
        how = await anyio.to_thread.run_sync(victims.live_and_die, order)
        chaos.lived_s += time.monotonic() - born
        chaos.take_in()
        if how != "killed":
            raise Broken(f"the worker {how}:\n{(tmp_path / 'errors').read_text()[-4000:]}")
        with anyio.fail_after(60):
            await chaos.check(whole=number % WHOLE_EVERY == 0 or number == KILLS)

    async def run() -> None:
        runtimes = [
            name for name, driver in registry.available(state_dir).items() if driver.capabilities.chosen_by_default
        ]
        for number in range(1, KILLS + 1):
            order = chaos.order(number, runtimes)
            try:
                await one(number, order)
            except BaseException as error:
                error.add_note(f"at kill {number} with the seed {SEED} ({order.kind} after {order.delay_s:.4f} s)")
                error.add_note(f"the sandboxes: { {name: box.runtime for name, box in chaos.sandboxes.items()} }")
                error.add_note("the end of the journal:\n" + "\n".join(chaos.history[-150:]))
                raise
            if number % 100 == 0:
                print(f"{number} kills, {time.monotonic() - began:.0f} s, {chaos.told()}", flush=True)
        await chaos.end()

    try:
        anyio.run(run)
    finally:
        victims.close()
    record_property(REPORTED, f"seed {SEED}, {KILLS} kills, {time.monotonic() - began:.0f} s, {chaos.told()}")
