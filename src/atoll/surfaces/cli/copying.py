"""`cp`: files and directories between this machine and a sandbox.

It knows the two directions and what `-` means in each. It refuses to know where a copy lands and how files cross the
boundary: `Files.upload` and `Files.download` decide that as `cp -r` would, and treat what comes out as hostile.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.runtime.host import open as open_runtime
from atoll.surfaces.cli import render, terminal
from atoll.surfaces.cli.values import Journey

if TYPE_CHECKING:
    from atoll.runtime.files import Files


async def cp(state_dir: Path | None, journey: Journey, *, user: str | None, as_json: bool) -> int:
    """Copy a file or a directory, or one file from standard input or to standard output."""
    async with open_runtime(state_dir) as runtime:
        files = (await runtime.get(journey.sandbox)).files
        if journey.inward and journey.is_stream:
            copied = await files.write_bytes(journey.inside, _stdin(), user=user)
        elif journey.inward:
            copied = await files.upload(Path(journey.here), journey.inside, user=user)
        elif journey.is_stream:
            copied = await _to_stdout(files, journey.inside, user)
        else:
            copied = await files.download(journey.inside, Path(journey.here), user=user)
    if as_json:
        ends = (journey.here, f"{journey.sandbox}:{journey.inside}")
        source, target = ends if journey.inward else ends[::-1]
        render.emit_json({"source": source, "target": target, "bytes": copied})
    return 0


async def _to_stdout(files: Files, path: str, user: str | None) -> int:
    outlet = terminal.Outlet(terminal.STDOUT)
    copied = 0
    async with aclosing(files.stream(path, user=user)) as chunks:
        async for chunk in chunks:
            await outlet.write(chunk)
            copied += len(chunk)
    return copied


async def _stdin() -> AsyncIterator[bytes]:
    if terminal.stdin_offered():
        async for chunk in terminal.stdin_chunks():
            yield chunk
