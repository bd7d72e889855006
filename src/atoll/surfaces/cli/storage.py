"""`storage`, `storage init` and `storage remove`: the file system that sandboxes write to.

It knows which facts of it people ask for. It refuses to know how it is made and mounted: the runtime does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from atoll.contract.errors import InvalidRequest
from atoll.runtime.engine import open as open_engine
from atoll.runtime.state.loop_storage import StorageKind
from atoll.surfaces.cli import render

if TYPE_CHECKING:
    from atoll.contract.model import StorageInfo


async def show(state_dir: Path | None, *, as_json: bool) -> int:
    async with open_engine(state_dir) as engine:
        return _told(engine.storage.look(), as_json)


async def init(state_dir: Path | None, size_bytes: int, filesystem: str, *, as_json: bool) -> int:
    if filesystem not in get_args(StorageKind):
        raise InvalidRequest(
            f"{filesystem!r} is not a file system for this; there are {', '.join(get_args(StorageKind))}"
        )
    async with open_engine(state_dir) as engine:
        return _told(await engine.storage.init(size_bytes, cast("StorageKind", filesystem)), as_json)


async def remove(state_dir: Path | None, *, as_json: bool) -> int:
    async with open_engine(state_dir) as engine:
        await engine.storage.remove()
        return _told(engine.storage.look(), as_json)


def _told(info: StorageInfo, as_json: bool) -> int:
    if as_json:
        render.emit_json(info.model_dump(mode="json"))
        return 0
    limits = "yes" if info.disk_limit else f"no: {info.lack}"
    rows = [
        ("layers", str(info.path)),
        ("file system", info.filesystem + (f", in {info.image}" if info.image else "")),
        ("free", f"{render.human_bytes(info.free_bytes)} of {render.human_bytes(info.total_bytes)}"),
        ("reflinks", "yes" if info.reflinks else "no"),
        ("snapshots", "yes" if info.snapshots else "no"),
        ("disk limits", limits),
    ]
    if info.fix:
        rows.append(("fix", info.fix))
    render.facts(rows)
    return 0
