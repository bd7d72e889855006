"""Whether some bytes are anywhere: in files, in the memory and environment of a sandbox's processes, in an archive."""

from __future__ import annotations

import os
import stat
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path

_CHUNK = 4 * 1024 * 1024
_PAGE = os.sysconf("SC_PAGE_SIZE")


def in_tree(root: Path, wanted: bytes) -> list[str]:
    """The files below `root` that hold it, or have it in their name."""
    found = []
    for directory, _, names in os.walk(root):
        for name in names:
            path = os.path.join(directory, name)
            if wanted in os.fsencode(name) or (stat.S_ISREG(os.lstat(path).st_mode) and _in_file(path, wanted)):
                found.append(os.path.relpath(path, root))
    return found


def _in_file(path: str, wanted: bytes) -> bool:
    with open(path, "rb") as file:
        before = b""
        while data := file.read(_CHUNK):
            if wanted in before + data:
                return True
            before = data[-len(wanted) :]
    return False


def in_archive(path: Path, wanted: bytes) -> bool:
    """Whether it is in what a file of zstd holds."""
    return wanted in subprocess.run(["zstd", "-dc", path], capture_output=True, check=True, timeout=30).stdout


def in_saved_memory(directory: Path, wanted: bytes) -> bool:
    """Whether it is in what gVisor wrote of its processes.

    Either in a file of pages, or in the state: a header, then pieces of deflate with their lengths.
    """
    if (pages := directory / "pages.img").exists():
        return wanted in pages.read_bytes() + (directory / "checkpoint.img").read_bytes()
    data = (directory / "checkpoint.img").read_bytes()
    assert data.startswith(b"gVisorSF")
    at = 16 + int.from_bytes(data[8:16], "big") + 36
    before = b""
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        piece = zlib.decompress(data[at + 4 : at + 4 + size], wbits=-15)
        if wanted in before + piece:
            return True
        before, at = piece[-len(wanted) :], at + 4 + size
    return False


def processes_of(sandbox_id: str) -> list[int]:
    """The host's ids of all processes that run in a sandbox, or for it: its runtime's and its keeper."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            about = Path("/proc", name, "cgroup").read_bytes() + Path("/proc", name, "cmdline").read_bytes()
            if sandbox_id.encode() in about:
                found.append(int(name))
    return found


def in_memory(pid: int, wanted: bytes) -> bool:
    """Whether it is in a process's memory, its arguments or its environment."""
    for part in ("environ", "cmdline"):
        with suppress(OSError):
            if wanted in Path("/proc", str(pid), part).read_bytes():
                return True
    return any(wanted in data for part in (_mapped(pid), _unnamed(pid)) for data in part)


def _mapped(pid: int) -> Iterator[bytes]:
    """What is in a process's memory: of pages that it has never touched there is nothing to see."""
    with suppress(OSError), open(f"/proc/{pid}/mem", "rb") as memory, open(f"/proc/{pid}/pagemap", "rb") as pages:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            start, end = (int(part, 16) // _PAGE for part in line.split()[0].split("-"))
            pages.seek(start * 8)
            with suppress(OSError, ValueError, OverflowError):
                seen = memoryview(pages.read((end - start) * 8)).cast("Q")
                for there, run in groupby(range(len(seen)), key=lambda page: seen[page] >> 62 != 0):
                    if there:
                        first, *rest = run
                        memory.seek((start + first) * _PAGE)
                        yield memory.read((1 + len(rest)) * _PAGE)


def _unnamed(pid: int) -> Iterator[bytes]:
    """What is in files without a name that it has open: gVisor's memory is one."""
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{name}").startswith("/memfd:"):
                    yield from _extents(f"/proc/{pid}/fd/{name}")


def _extents(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        at = 0
        while True:
            try:
                start = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:  # there is nothing more
                return
            at = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            file.seek(start)
            yield file.read(at - start)
