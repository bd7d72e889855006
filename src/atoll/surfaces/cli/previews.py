"""`expose`: a port of a sandbox, served for as long as this command runs.

It knows what is told of a preview and of each request to it. It refuses to know how either is served.
"""

from __future__ import annotations

import logging
from pathlib import Path

import anyio

from atoll.runtime.engine import open as open_engine
from atoll.surfaces.cli import render


async def expose(state_dir: Path | None, name: str, port: int, *, wait_s: float, as_json: bool) -> int:
    """Serve a port until we are told to end. Requests are noted on standard error, a line each."""
    async with open_engine(state_dir) as engine:
        sandbox = await engine.get(name)
        preview = await sandbox.expose(port, wait_s=wait_s)
        requests = logging.getLogger("atoll.runtime.previews.proxy")
        requests.addHandler(_Notes())
        requests.setLevel(logging.INFO)
        if as_json:
            render.emit_json(preview.model_dump(mode="json"))
        else:
            for address in dict.fromkeys((preview.url, preview.path_url)):
                render.say(address)
            render.note("whoever has the address may come in, by either of them; Ctrl-C ends it")
        await anyio.sleep_forever()
    return 0


class _Notes(logging.Handler):
    """Tells people what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        render.note(record.getMessage())
