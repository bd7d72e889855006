"""What an image has, as its files say: the operating system, and the programs that people ask for by name.

Owns which programs are worth a mention. Nothing is started or fetched, and files of an image are hostile: paths are
followed as if the image were the root, and what is passed on has few characters. Not here: images themselves
(`store.py`). Used by `ImageStore.contents`.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from atoll.contract.frozen import Frozen
from atoll.runtime.images import overlay

_DIRECTORIES = ("usr/local/bin", "usr/bin", "bin", "usr/local/sbin", "usr/sbin", "sbin", "usr/local/go/bin")
_PROGRAMS = (
    *("bash", "python3", "pip", "uv", "node", "npm", "go", "cargo", "java", "ruby", "perl", "php", "R", "gcc", "make"),
    *("cmake", "git", "curl", "wget", "jq", "rg", "sqlite3", "ffmpeg", "pandoc", "psql", "chromium"),
    *("apt-get", "apk", "dnf"),
)
_MAX_ENTRIES = 20_000
_PYTHON = re.compile(r"python(3\.\d{1,2})")
_PLAIN = re.compile(r"[A-Za-z0-9_.:/-]{1,100}")
_OS_NAME = re.compile(r'^PRETTY_NAME="?([A-Za-z0-9 .()/_-]{1,60})', re.MULTILINE)


class ImageContents(Frozen):
    """What an image has."""

    os: str | None
    """Its operating system, as `Debian GNU/Linux 12 (bookworm)`. None: it does not say."""
    programs: tuple[str, ...]
    """Programs that it has, of those that are worth a mention; Python with its version."""
    user: str | None = None
    """The user that it names for commands. None: none."""
    working_directory: str | None = None
    """Where it says that commands start. None: nowhere."""

    def configured(self, user: str | None, working_directory: str | None) -> ImageContents:
        """With what the image's configuration says, unless that is no plain word."""
        words = {"user": user, "working_directory": working_directory}
        return self.model_copy(
            update={name: word for name, word in words.items() if word is not None and _PLAIN.fullmatch(word)}
        )


def read_contents(root: Path) -> ImageContents:
    """What the root file system `root` has. What cannot be read is left out."""
    names: set[str] = set()
    for directory in _DIRECTORIES:
        with suppress(OSError):
            found = overlay.find(root, directory)
            if found is not None and found.is_directory:
                with os.scandir(root.joinpath(*found.path)) as entries:
                    names.update(entry.name for entry, _ in zip(entries, range(_MAX_ENTRIES), strict=False))
    programs = [name for name in _PROGRAMS if name in names]
    versions = [match[1] for match in map(_PYTHON.fullmatch, names) if match]
    if "python3" in programs and len(versions) == 1:
        programs[programs.index("python3")] = f"python3 ({versions[0]})"
    return ImageContents(os=_os_name(root), programs=tuple(programs))


def _os_name(root: Path) -> str | None:
    for path in ("etc/os-release", "usr/lib/os-release"):
        with suppress(OSError):
            found = overlay.find(root, path, read=True)
            if found is not None and found.content is not None:
                name = _OS_NAME.search(found.content.decode("utf-8", "replace"))
                return None if name is None else name[1].strip()
    return None
