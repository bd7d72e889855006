"""A temporary btrfs for measurements, on a machine that has none.

Owns the loop device and the mount. It is a sparse file, mounted in a private mount namespace of this program and its
children: when they have ended, for whatever reason, the kernel removes the mount and the loop device.
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
    """This machine cannot create or mount a btrfs. The message says why."""


def keep_mounts_apart() -> None:
    """Enter a private mount namespace. Call it before there is a second thread.

    Does nothing without the privilege; `mounted` then raises `Unavailable`.
    """
    if ctypes.CDLL(None).unshare(_CLONE_NEWNS) == 0:
        _run("mount", "--make-rslave", "/")


@contextmanager
def mounted(directory: Path) -> Iterator[Path]:
    """An empty btrfs, mounted in `directory`, which is created and removed.

    Raises:
        Unavailable: it cannot be created or mounted on this machine.
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
    """Unmount, at the latest when its last user has ended. Raises nothing, so as not to hide an earlier error."""
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
