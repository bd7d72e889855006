"""A btrfs file system for as long as something is measured on it, on a machine that has none.

Knows loop devices and mounts. Refuses to know what is kept there. It is a sparse file, mounted where nobody but this
program and what it starts sees it: when they have ended, however they did, the mount and the loop device are gone.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIZE_BYTES = 24 * 1024**3
_CLONE_NEWNS = 0x20000
_UNMOUNT_LOOKS = 50
_SEARCH = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"


class Unavailable(Exception):
    """There can be no btrfs here. The words say why."""


def keep_mounts_apart() -> None:
    """What this program mounts from now on, nobody else sees. Call it before there is a second thread.

    Who may not do this may not mount either, and is told so by `mounted`.
    """
    if ctypes.CDLL(None).unshare(_CLONE_NEWNS) == 0:
        _run("mount", "--make-rslave", "/")


@contextmanager
def mounted(directory: Path) -> Iterator[Path]:
    """An empty btrfs, mounted in `directory`, which is made and removed.

    Raises:
        Unavailable: none can be made or mounted here.
    """
    if os.geteuid() != 0:
        raise Unavailable("only root may mount")
    image, place = directory / "image", directory / "mounted"
    directory.mkdir()
    place.mkdir()
    try:
        with open(image, "wb") as file:
            file.truncate(SIZE_BYTES)
        _run("mkfs.btrfs", "--quiet", str(image))
        _run("mount", "-o", "loop,noatime", str(image), str(place))
        try:
            yield place
        finally:
            _unmount(place)
    finally:
        image.unlink(missing_ok=True)
        for each in (place, directory):
            each.rmdir()


def _unmount(place: Path) -> None:
    """Take the mount away: at the latest when the last that uses it has ended. Raises nothing, for what did before."""
    for _ in range(_UNMOUNT_LOOKS):
        if subprocess.run(["umount", str(place)], capture_output=True, check=False).returncode == 0:
            return
        time.sleep(0.1)
    subprocess.run(["umount", "--lazy", str(place)], capture_output=True, check=False)


def _run(program: str, *arguments: str) -> None:
    path = shutil.which(program, path=_SEARCH)
    if path is None:
        raise Unavailable(f"{program} is not installed")
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"{program} failed: {done.stderr.strip()[-200:]}")
