"""`sleep`, `wake`, `checkpoint`, `checkpoints`, `restore`, `fork`, `export`, `import` and `gc`: a sandbox in time.

It knows how the tree of checkpoints is drawn. It refuses to know how any of them is made.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from atoll.contract.model import Checkpoint, Limits
from atoll.runtime.engine import open as open_engine
from atoll.surfaces.cli import render, sandboxes


async def sleep(state_dir: Path | None, name: str, *, warm: bool, until_woken: bool, as_json: bool) -> int:
    async with open_engine(state_dir) as engine:
        if until_woken:
            await engine.shutdown(name)
        else:
            await (engine.pause(name) if warm else engine.sleep(name))
        (info,) = [info for info in await engine.list() if info.name == name]
    _tell({"name": name, "status": info.status}, f"{name} is {info.status}", as_json=as_json)
    return 0


async def wake(state_dir: Path | None, name: str, *, as_json: bool) -> int:
    async with open_engine(state_dir) as engine:
        await engine.wake(name)
    _tell({"name": name, "status": "running"}, f"{name} is running", as_json=as_json)
    return 0


async def checkpoint(state_dir: Path | None, name: str, label: str | None, *, as_json: bool) -> int:
    async with open_engine(state_dir) as engine:
        made = await engine.checkpoint(name, label)
    _tell(made.model_dump(mode="json"), made.id, as_json=as_json)
    return 0


async def checkpoints(
    state_dir: Path | None, name: str | None, *, delete: Sequence[str], quiet: bool, as_json: bool
) -> int:
    async with open_engine(state_dir) as engine:
        for each in delete:
            await engine.delete_checkpoint(each, sandbox=name)
        found = await engine.checkpoints(name)
    if as_json:
        render.emit_json([each.model_dump(mode="json") for each in found])
    elif quiet or delete:
        for line in delete or [each.id for each in found]:
            render.say(line)
    elif not found:
        render.note("there are no checkpoints; `atoll checkpoint NAME` makes one")
    else:
        rows = [
            (drawn, each.name or "", each.sandbox, render.ago(each.created_at), render.human_bytes(each.size_bytes))
            for drawn, each in _tree(found)
        ]
        render.table(("CHECKPOINT", "LABEL", "SANDBOX", "CREATED", "SIZE"), rows)
    return 0


async def restore(state_dir: Path | None, name: str, checkpoint: str, *, as_json: bool) -> int:
    async with open_engine(state_dir) as engine:
        await engine.restore(name, checkpoint)
    told = {"name": name, "checkpoint": checkpoint, "status": "running"}
    _tell(told, f"{name} is what it was at {checkpoint}", as_json=as_json)
    return 0


async def fork(
    state_dir: Path | None, name: str, names: Sequence[str], *, count: int, checkpoint: str | None, as_json: bool
) -> int:
    async with open_engine(state_dir) as engine:
        made = await engine.fork(name, len(names) or count, checkpoint=checkpoint, names=names or None)
        infos = [sandbox.info for sandbox in made]
    if as_json:
        render.emit_json([info.model_dump(mode="json") for info in infos])
    else:
        for info in infos:
            render.say(info.name)
    return 0


async def export(state_dir: Path | None, name: str, target: Path, *, checkpoint: str | None, as_json: bool) -> int:
    to_stream = str(target) == "-"
    async with open_engine(state_dir) as engine:
        with render.Bars() as bars:
            file = sys.stdout.buffer if to_stream else target
            made = await engine.export(name, file, checkpoint=checkpoint, progress=bars)
    if as_json:
        render.emit_json({"file": str(target), **made.model_dump(mode="json")})
        return 0
    if made.without_processes:
        render.note("its processes are not in the file; a sandbox that is made from it begins with its files alone")
    if not to_stream:
        render.say(str(target))
    return 0


async def import_(
    state_dir: Path | None,
    source: Path,
    name: str | None,
    making: sandboxes.SandboxOptions,
    *,
    default_limits: bool,
    limit_bytes: int | None,
    as_json: bool,
) -> int:
    limits = sandboxes.limits_of(making)
    async with open_engine(state_dir) as engine:
        with render.Bars() as bars:
            sandbox = await engine.import_(
                sys.stdin.buffer if str(source) == "-" else source,
                name,
                image=making.image,
                limits=limits if default_limits or limits != Limits() else None,
                runtime=sandboxes.runtime_name(making.runtime),
                limit_bytes=limit_bytes,
                progress=bars,
            )
        info = sandbox.info
    _tell(info.model_dump(mode="json"), info.name, as_json=as_json)
    return 0


async def gc(state_dir: Path | None, *, as_json: bool) -> int:
    async with open_engine(state_dir) as engine:
        freed = await engine.gc()
    _tell({"freed": freed}, f"{len(freed)} freed" if freed else "there is nothing to free", as_json=as_json)
    return 0


def _tell(value: object, text: str, *, as_json: bool) -> None:
    if as_json:
        render.emit_json(value)
    else:
        render.say(text)


def _tree(found: Sequence[Checkpoint]) -> list[tuple[str, Checkpoint]]:
    """Each checkpoint below its parent, the oldest first, with the lines that show it."""
    known = {each.id for each in found}
    drawn: list[tuple[str, Checkpoint]] = []
    # Not by recursion: a chain of checkpoints may be longer than Python's stack.
    roots = [each for each in found if each.parent not in known]
    waiting = [(each, "", "") for each in reversed(roots)]
    while waiting:
        each, before, branch = waiting.pop()
        drawn.append((before + branch + each.id, each))
        below = [child for child in found if child.parent == each.id]
        lines = before + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
        # An only child goes on in its parent's column: a chain is a column, a fork is a branch.
        if len(below) == 1:
            waiting.append((below[0], lines, ""))
            continue
        for number, child in enumerate(reversed(below)):
            waiting.append((child, lines, "├─ " if number else "└─ "))
    return drawn
