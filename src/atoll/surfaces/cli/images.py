"""`images ls`, `pull`, `rm` and `import`: what sandboxes are made from.

It knows what of an image people want to see. It refuses to know registries, layers and formats: the store does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.runtime.engine import open as open_engine
from atoll.surfaces.cli import render

if TYPE_CHECKING:
    from atoll.runtime.images.store import ImageInfo


async def ls(state_dir: Path | None, *, quiet: bool, as_json: bool) -> int:
    async with open_engine(state_dir) as engine:
        found = engine.images.list()
    if as_json:
        render.emit_json([image.model_dump(mode="json") for image in found])
    elif quiet:
        for image in found:
            render.say(image.reference)
    elif not found:
        render.note("there are no images yet; `atoll images pull REF` fetches one")
    else:
        rows = [
            (
                image.reference,
                image.digest.removeprefix("sha256:")[:12],
                render.human_bytes(image.size_bytes),
                render.ago(image.pulled_at),
            )
            for image in found
        ]
        render.table(("REFERENCE", "DIGEST", "SIZE", "FETCHED"), rows, flex=0)
    return 0


async def pull(state_dir: Path | None, reference: str, *, as_json: bool) -> int:
    async with open_engine(state_dir) as engine:
        with render.Bars() as bars:
            image = await engine.images.pull(reference, progress=bars)
    return _told(image, as_json)


async def import_(state_dir: Path | None, source: Path, reference: str, *, as_json: bool) -> int:
    async with open_engine(state_dir) as engine:
        with render.Bars() as bars:
            image = await engine.images.import_(source, reference, progress=bars)
    return _told(image, as_json)


async def rm(state_dir: Path | None, references: Sequence[str], *, as_json: bool) -> int:
    async with open_engine(state_dir) as engine:
        for reference in references:
            await engine.images.remove(reference)
            if not as_json:
                render.say(reference)
    if as_json:
        render.emit_json({"removed": list(references)})
    return 0


def _told(image: ImageInfo, as_json: bool) -> int:
    if as_json:
        render.emit_json(image.model_dump(mode="json"))
    else:
        render.say(image.reference)
    return 0
