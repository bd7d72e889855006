"""A process that pulls: `puller.py STORE REFERENCE TASKS [DIE_AT]`. What its tasks do, it prints, a line each.

With DIE_AT it kills itself, without a chance to clean up, when a progress report begins so, or in the named step.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import anyio

from atoll.runtime.images.store import ImageStore


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Mortal(ImageStore):
    die_at = ""

    async def _publish(self, built: Path, digest: str) -> None:
        if self.die_at == "before publishing":
            die()
        await super()._publish(built, digest)
        if self.die_at == "after publishing":
            die()

    def _write_record(self, wanted, record) -> None:
        super()._write_record(wanted, record)
        if self.die_at == "after recording":
            die()


async def main(store: str, reference: str, tasks: int, die_at: str) -> None:
    images = Mortal(Path(store), rootless=os.geteuid() != 0)
    images.die_at = die_at

    async def pull() -> None:
        waits = False

        def progress(what: str, done: int, total: int | None) -> None:
            nonlocal waits
            if die_at and what.startswith(die_at):
                die()
            if what.startswith("waiting") and not waits:
                waits = True
                print("waiting", flush=True)

        image = await images.pull(reference, progress=progress)
        print(image.digest, flush=True)

    async with anyio.create_task_group() as group:
        for _ in range(tasks):
            group.start_soon(pull)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2], int(sys.argv[3]), "".join(sys.argv[4:]))
