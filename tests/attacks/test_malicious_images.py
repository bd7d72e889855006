"""Images made to fool whoever imports, mounts or starts them."""

from __future__ import annotations

import io
import os
import tarfile
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from atoll.contract.errors import AtollError
from atoll.runtime.interface import Engine

SECRET = "precious"


def _image(path: Path, *entries: tuple[str, bytes, str, bytes], probe: bytes) -> Path:
    """A root file system with nothing in it but a program, /etc/passwd and `entries`."""
    usual = [
        ("bin", tarfile.DIRTYPE, "", b""),
        ("etc", tarfile.DIRTYPE, "", b""),
        ("bin/probe", tarfile.REGTYPE, "", probe),
        ("etc/passwd", tarfile.REGTYPE, "", b"root:x:0:0::/root:/bin/sh\n"),
    ]
    replaced = {name for name, *_ in entries}
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, link, content in [*(each for each in usual if each[0] not in replaced), *entries]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size, info.mode = kind, link, len(content), 0o6755
            info.devmajor, info.devminor = 254, 0
            tar.addfile(info, io.BytesIO(content))
    return path


FILE, LINK, HARD, DIRECTORY, BLOCK = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.BLKTYPE
UP = "../" * 20
TRAPS: dict[str, list[tuple[str, bytes, str, bytes]]] = {
    "proc is a symlink to the host": [("proc", LINK, f"{UP}tmp", b"")],
    "dev is a symlink to the host": [("dev", LINK, f"{UP}tmp", b"")],
    "sys is a symlink to the host": [("sys", LINK, "/tmp", b"")],
    "run is a symlink to the host": [("run", LINK, f"{UP}tmp", b"")],
    "the guest's place is a symlink": [("run", DIRECTORY, "", b""), ("run/atoll", LINK, f"{UP}tmp", b"")],
    "home is a symlink to the host": [("home", LINK, f"{UP}tmp", b"")],
    "the user's home is a symlink": [("home", DIRECTORY, "", b""), ("home/user", LINK, f"{UP}tmp", b"")],
    "etc is a symlink to the host": [("etc", LINK, f"{UP}etc", b"")],
    "passwd is a symlink to the host's": [("etc/passwd", LINK, f"{UP}etc/shadow", b"")],
    "passwd is a hard link to the host's": [("etc/passwd", HARD, f"{UP}etc/shadow", b"")],
    "passwd is a device": [("etc/passwd", BLOCK, "", b"")],
    "passwd is a pipe": [("etc/passwd", tarfile.FIFOTYPE, "", b"")],
    "passwd has no end": [("etc/passwd", FILE, "", b"x" * 3_000_000)],
    "passwd makes user root": [("etc/passwd", FILE, "", b"user:x:0:0::/:/bin/sh\nroot:x:0:0::/:/bin/sh\n")],
    "a name that leads up": [(f"{UP}tmp/atoll-escaped", FILE, "", b"x")],
    "an absolute name": [("/tmp/atoll-escaped", FILE, "", b"x")],
    "through a symlink": [("out", LINK, "/tmp", b""), ("out/atoll-escaped", FILE, "", b"x")],
    "through a symlink upwards": [("out", LINK, f"{UP}tmp", b""), ("out/atoll-escaped", FILE, "", b"x")],
    "a hard link to the host": [("etc/stolen", HARD, "/etc/shadow", b"")],
    "a whiteout of everything": [(".wh..wh..opq", FILE, "", b"")],
    "a whiteout that leads up": [(".wh...", FILE, "", b""), ("etc/.wh..", FILE, "", b"")],
    "a disk of the host": [("disk", BLOCK, "", b"")],
}


@pytest.mark.parametrize("trap", TRAPS)
async def test_an_image_with_a_trap_is_refused_or_harmless(
    engine: Engine, probe_program: bytes, tmp_path: Path, trap: str
) -> None:
    before = set(os.listdir("/tmp"))
    image = _image(tmp_path / "image.tar", *TRAPS[trap], probe=probe_program)
    shadow = Path("/etc/shadow").read_text() if os.access("/etc/shadow", os.R_OK) else "root:"
    with anyio.fail_after(15):
        try:
            async with await engine.create(image=f"tar:{image}") as sandbox:
                said = await sandbox.exec(["/bin/probe", "rights"], timeout_s=10)
                assert said.exit_code in {0, 126, 127}, said
                for path in ("/etc/passwd", "/etc/stolen", "/etc/shadow"):
                    try:
                        stolen = await sandbox.files.read_text(path, user="root")
                    except (OSError, AtollError):
                        continue
                    assert not set(stolen.splitlines()) & {
                        line for line in shadow.splitlines() if "$" in line or "*" in line
                    }
                with suppress(OSError):
                    assert not await sandbox.files.read_bytes("/disk", limit=16, user="root")
        except AtollError:
            pass  # refused
        finally:
            reference = f"tar:{image}"
            if reference in {each.reference for each in await engine.images.list()}:
                await engine.images.remove(reference)
    assert not Path("/tmp/atoll-escaped").exists()
    left = {
        name
        for name in os.listdir("/tmp")
        if name not in before and name in {"atoll", "guest", "self", "null", "pts", "user"}
    }
    assert not left, "something was made on the host where the image's links lead"
