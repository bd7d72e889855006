"""A bundle as an archive: read without trusting any of it, and packed from a directory.

Owns which archives are bundles (a gzipped tar with `manifest.json` and `tools/`), the limits on them, and the bytes of
an archive that `pack` makes. An archive is read as a stream, with bounded memory, by a parser that accepts what tar and
Python write and refuses the rest; nothing of it is written to this machine. What goes into a sandbox is
written anew (`repack`), with owners, modes and types of our own. Not here: what the manifest says (`manifest.py`), and
what is read from sources (`schemas.py`). Used by `workspace.py`, `server/bundles.py` and `atoll bundle`.

`tarfile` reads headers of any size into memory, and takes the last of two entries of one name: it is not used to read.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import stat
import tarfile
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import anyio.to_thread

from atoll.bundles.manifest import MAX_MANIFEST_BYTES, BundleManifest, invalid
from atoll.bundles.schemas import MAX_SOURCE_BYTES, MAX_SOURCES_BYTES, ToolSchema, describe, parse
from atoll.contract.errors import BundleFailed
from atoll.runtime import pax
from atoll.tools.tool import StrictModel

MAX_BUNDLE_BYTES = 50 * 1024 * 1024
"""The largest archive."""
MAX_UNPACKED_BYTES = 512 * 1024 * 1024
"""Of all files of an archive, and of the tar around them."""
MAX_ENTRIES = 10_000
MAX_DEPTH = 32
MAX_PATH_BYTES = 1024
MAX_RATIO = 100
"""How many times larger than its archive the content may be, above `_RATIO_FREE_BYTES`. Sources have 3 to 10."""
MANIFEST = "manifest.json"
_RATIO_FREE_BYTES = 16 * 1024 * 1024
_MAX_EXTENSION_BYTES = 64 * 1024
_BLOCK = 512
TAR_END_BYTES = 2 * _BLOCK
"""Of the zeros after the last entry, and of a tar without any."""
_CHUNK_BYTES = 64 * 1024
_GZIP_WBITS = 31
_OCTAL = re.compile(rb" *([0-7]*)[ \0]*")
_LONG_NAME, _LONG_LINK = b"L", b"K"
_KINDS: dict[bytes, EntryKind] = {b"0": "file", b"\0": "file", b"7": "file", b"5": "directory", b"2": "symlink"}
_REFUSED = {
    b"1": "a hard link; pack it with --hard-dereference",
    b"3": "a device",
    b"4": "a device",
    b"6": "a FIFO",
    b"S": "a sparse file; pack it without --sparse",
}
_SKIPPED = frozenset({"__pycache__", ".git", ".venv", "node_modules", ".DS_Store"})
"""What `pack` leaves out of a directory."""

EntryKind = Literal["file", "directory", "symlink"]


@dataclass(frozen=True)
class ArchiveLimits:
    """How much an archive may have in it."""

    entries: int = MAX_ENTRIES
    unpacked_bytes: int = MAX_UNPACKED_BYTES
    ratio: int = MAX_RATIO
    """Applies above `_RATIO_FREE_BYTES`."""


LIMITS = ArchiveLimits()
"""Of every archive that is not a test's."""


class BundleContents(StrictModel):
    """What was found in an archive."""

    sha256: str
    """Of its bytes, in hexadecimal."""
    size_bytes: int
    manifest: BundleManifest
    tools: tuple[ToolSchema, ...]
    """What a model is told about its tools, in the order of the manifest."""


async def read_bundle(path: Path, limits: ArchiveLimits = LIMITS) -> BundleContents:
    """Read an archive to its end, with bounded memory. Nothing of it is executed or unpacked.

    Raises:
        BundleFailed: it is no bundle; `reason` is `bundle_manifest_invalid`, `bundle_entrypoint_invalid` if it has no
            file for an entrypoint's module, or `bundle_fetch_failed` if it cannot be read. The message says what is
            wrong, and what is allowed.
    """
    return await anyio.to_thread.run_sync(_read, path, limits, abandon_on_cancel=True)


def _read(path: Path, limits: ArchiveLimits) -> BundleContents:
    with _opened(path) as file:
        reader = BundleReader(file, limits)
        manifest, names = None, set[str]()
        for entry in reader:
            names.add(entry.path)
            if entry.path == MANIFEST:
                manifest = _read_manifest(reader, entry)
        if manifest is None:
            raise invalid(
                "the archive has no manifest.json at its top; pack it with: tar -czf bundle.tgz manifest.json tools/"
            )
        if not any(name.startswith("tools/") for name in names):
            raise invalid("the archive has no directory tools/ with the sources of its tools")
        sources = {tool.name: _source_path(tool.module, names) for tool in manifest.tools}
        texts = _read_sources(file, set(sources.values()), limits)
        modules = {name: parse(text) for name, text in texts.items()}  # each once: any number of tools may be in one
        described = tuple(describe(tool, modules[sources[tool.name]]) for tool in manifest.tools)
        return BundleContents(sha256=reader.sha256(), size_bytes=reader.size_bytes, manifest=manifest, tools=described)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise BundleFailed(
            "bundle_fetch_failed", "the bytes of the bundle are not on the server; upload it again", hint=str(error)
        ) from None


def _read_manifest(reader: BundleReader, entry: BundleEntry) -> BundleManifest:
    if entry.kind != "file" or entry.size > MAX_MANIFEST_BYTES:
        raise invalid(f"manifest.json must be a file of at most {MAX_MANIFEST_BYTES} bytes")
    return BundleManifest.parse(b"".join(reader.data()))


def _source_path(module: str, names: set[str]) -> str:
    path = module.replace(".", "/")
    for candidate in (f"{path}.py", f"{path}/__init__.py"):
        if candidate in names:
            return candidate
    raise BundleFailed(
        "bundle_entrypoint_invalid", f"the archive has no file for the module {module}; it would be {path}.py"
    )


def _read_sources(file: BinaryIO, wanted: set[str], limits: ArchiveLimits) -> dict[str, str]:
    """The texts of these files. One that is too large is empty, as are those beyond what is parsed of one bundle."""
    file.seek(0)
    reader = BundleReader(file, limits)
    found, left_bytes = dict.fromkeys(wanted, ""), MAX_SOURCES_BYTES
    for entry in reader:
        if entry.path in wanted and entry.kind == "file" and entry.size <= min(MAX_SOURCE_BYTES, left_bytes):
            left_bytes -= entry.size
            found[entry.path] = b"".join(reader.data()).decode("utf-8", "replace")
    return found


# ----------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class BundleEntry:
    """An entry of an archive, checked: its path leads nowhere else, and no other entry has it."""

    path: str
    kind: EntryKind
    size: int = 0
    executable: bool = False
    target: str = ""
    """Of a symlink: relative, and inside the archive."""


class BundleReader:
    """The entries of an archive, one after the other. `data` has the content of the last one.

    Raises:
        BundleFailed: while entries are read; the archive is not what a bundle may be.
    """

    def __init__(self, file: BinaryIO, limits: ArchiveLimits = LIMITS) -> None:
        self._file = file
        self._limits = limits
        self._digest = hashlib.sha256()
        self.size_bytes = 0
        self._inflate = zlib.decompressobj(_GZIP_WBITS)
        self._pending = b""
        self._buffer = bytearray()
        self._unpacked = 0
        self._left = 0
        self._padding = 0
        self._entries = 0
        self._kinds: dict[str, EntryKind] = {}
        self._folded: dict[str, str] = {}

    def sha256(self) -> str:
        """Of all bytes, once every entry was read."""
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[BundleEntry]:
        while True:
            for _ in self.data():
                pass
            self._take(self._padding)
            self._padding = 0
            entry = self._next()
            if entry is None:
                self._finish()
                return
            if entry.path:
                yield entry

    def data(self) -> Iterator[bytes]:
        """The content of the entry that was read last, in pieces."""
        while self._left:
            piece = self._take(min(self._left, _CHUNK_BYTES))
            self._left -= len(piece)
            yield piece

    # ---- entries ----

    def _next(self) -> BundleEntry | None:
        """The next entry, or None at the end. Its path is empty if it is the root."""
        records: dict[bytes, bytes] = {}
        while True:
            block = self._take(_BLOCK)
            if not any(block):
                return None
            if block[257:262] != b"ustar" or _number(block[148:156]) != _checksum(block):
                raise invalid("the archive is damaged, or is not a gzipped tar; make it with tar -czf")
            kind, size = block[156:157], _number(block[124:136])
            if kind in {b"x", b"g", _LONG_NAME, _LONG_LINK}:
                self._extend(records, kind, size)
                continue
            return self._entry(block, kind, size, records)

    def _extend(self, records: dict[bytes, bytes], kind: bytes, size: int) -> None:
        if not 0 < size <= _MAX_EXTENSION_BYTES:
            raise invalid(f"a header of the archive has {size} bytes; it may have 1 to {_MAX_EXTENSION_BYTES}")
        content = self._take(size + -size % _BLOCK)[:size]
        if kind in {_LONG_NAME, _LONG_LINK}:
            records[b"path" if kind == _LONG_NAME else b"linkpath"] = content.rstrip(b"\0")
            return
        try:
            found = pax.parse_records(content)
        except pax.MalformedPax as error:
            raise invalid(f"the archive is damaged: {error}") from None
        if kind == b"g" and found.keys() & {b"path", b"linkpath", b"size"}:
            raise invalid("the archive has a global header that names or sizes files; make it with tar -czf")
        if kind == b"x":
            records.update(found)

    def _entry(self, block: bytes, kind: bytes, size: int, records: dict[bytes, bytes]) -> BundleEntry:
        prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else b""
        name = _text(block[:100])
        raw = records.get(b"path", prefix + b"/" + name if prefix else name)
        path = _clean(raw)
        if any(key.startswith(b"GNU.sparse") for key in records):
            kind = b"S"
        if kind not in _KINDS:
            raise invalid(
                f"{_shown(raw)} is {_REFUSED.get(kind, 'of an unknown type')}; a bundle has files and directories"
            )
        if b"size" in records:
            try:
                size = pax.parse_number(records[b"size"])
            except pax.MalformedPax as error:
                raise invalid(f"the archive is damaged: {error}") from None
        if _KINDS[kind] != "file" and size:
            raise invalid(f"{_shown(raw)} is not a file, but has content; the archive is damaged")
        mode = _number(block[100:108])
        if mode & (stat.S_ISUID | stat.S_ISGID) and _KINDS[kind] == "file":
            raise invalid(f"{_shown(raw)} has a set-id bit, which no file of a bundle may have; remove it with chmod")
        target = ""
        if _KINDS[kind] == "symlink":
            target = _inner_target(path, records.get(b"linkpath", _text(block[157:257])))
        self._left, self._padding = size, -size % _BLOCK
        entry = BundleEntry(path, _KINDS[kind], size, bool(mode & 0o100), target)
        self._admit(entry)
        return entry

    def _admit(self, entry: BundleEntry) -> None:
        """Check an entry against those before it."""
        self._entries += 1
        if self._entries > self._limits.entries:
            raise invalid(f"the archive has more than {self._limits.entries} entries")
        if not entry.path:
            if entry.kind != "directory":
                raise invalid("an entry of the archive has no name")
            return
        known = self._kinds.get(entry.path)
        if known is not None and not known == entry.kind == "directory":
            raise invalid(f"{entry.path} is in the archive twice")
        parts = entry.path.split("/")
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            if self._kinds.setdefault(above, "directory") != "directory":
                raise invalid(f"{above} is not a directory, but the archive has {entry.path}")
            self._fold(above)
        self._kinds[entry.path] = entry.kind
        self._fold(entry.path)

    def _fold(self, path: str) -> None:
        folded = unicodedata.normalize("NFKC", path).casefold()
        if (other := self._folded.setdefault(folded, path)) != path:
            raise invalid(f"{path} and {other} differ only in case or form; rename one of them")

    def _finish(self) -> None:
        """Read to the end: only zeros may follow the last entry, and nothing the compressed data."""
        piece = bytes(self._buffer) or self._more()
        while piece:
            if piece.strip(b"\0"):
                raise invalid("data follows the end of the archive")
            piece = self._more()
        if not self._inflate.eof:
            raise invalid("the archive ends too early; upload all of it")
        while data := self._pending or self._raw():
            self._pending = b""
            if data.strip(b"\0"):
                raise invalid("data follows the end of the archive")

    # ---- bytes ----

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            piece = self._more()
            if not piece:
                raise invalid("the archive ends too early, or is not a gzipped tar; make it with tar -czf")
            self._buffer += piece
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def _more(self) -> bytes:
        """Some more of the tar. Empty: the compressed data has ended."""
        while not self._inflate.eof:
            data = self._inflate.unconsumed_tail or self._raw()
            if not data:
                return b""
            try:
                piece = self._inflate.decompress(data, _CHUNK_BYTES)
            except zlib.error as error:
                raise invalid(f"the archive is not gzip: {error}") from None
            self._pending = self._inflate.unused_data
            self._unpacked += len(piece)
            if self._unpacked > self._limits.unpacked_bytes:
                raise invalid(f"the archive unpacks to more than {self._limits.unpacked_bytes} bytes")
            if self._unpacked > max(_RATIO_FREE_BYTES, self._limits.ratio * self.size_bytes):
                raise invalid(f"the archive unpacks to more than {self._limits.ratio} times its size")
            if piece:
                return piece
        return b""

    def _raw(self) -> bytes:
        data = self._file.read(_CHUNK_BYTES)
        self._digest.update(data)
        self.size_bytes += len(data)
        if self.size_bytes > MAX_BUNDLE_BYTES:
            raise invalid(f"the archive is larger than {MAX_BUNDLE_BYTES} bytes")
        return data


def _clean(raw: bytes) -> str:
    """A path of the archive as text, without `.` and slashes that mean nothing.

    Raises:
        BundleFailed: it leads outside, is too long or too deep, or has characters that no source has.
    """
    if len(raw) > MAX_PATH_BYTES:
        raise invalid(f"a path of the archive has {len(raw)} bytes; it may have {MAX_PATH_BYTES}")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise invalid(f"the path {_shown(raw)} is not UTF-8") from None
    parts = [part for part in text.split("/") if part not in {"", "."}]
    if text.startswith("/") or ".." in parts:
        raise invalid(f"the path {_shown(raw)} leads outside of the archive")
    if "\\" in text or not text.isprintable():
        raise invalid(f"the path {_shown(raw)} has a character that names of files in a bundle may not have")
    if len(parts) > MAX_DEPTH:
        raise invalid(f"the path {_shown(raw)} is more than {MAX_DEPTH} directories deep")
    return "/".join(parts)


def _inner_target(path: str, target: bytes) -> str:
    """`target`, if a symlink at `path` cannot lead outside with it: all `..` come first, where they are taken from real
    directories, and what follows goes down through symlinks that were checked in the same way."""
    text = target.decode("utf-8", "replace")
    steps = [step for step in text.split("/") if step not in {"", "."}]
    ups = next((at for at, step in enumerate(steps) if step != ".."), len(steps))
    if (
        not steps
        or text.startswith("/")
        or ".." in steps[ups:]
        or ups >= len(path.split("/"))
        or not text.isprintable()
        or len(target) > MAX_PATH_BYTES
    ):
        raise invalid(f"the symlink {path} leads to {_shown(target)}, outside of the archive")
    return text


def _checksum(block: bytes) -> int:
    return sum(block) - sum(block[148:156]) + 8 * 0x20


def _number(field: bytes) -> int:
    found = _OCTAL.fullmatch(field)
    if found is None:
        raise invalid("the archive is damaged: a number is malformed, or a file is larger than 8 GiB")
    return int(found[1] or b"0", 8)


def _text(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def _shown(name: bytes) -> str:
    return repr(name[:200].decode("utf-8", "backslashreplace"))


# ----------------------------------------------------------------------------------------------------------- writing


def repack(path: Path, sha256: str, *, below: str = "", owner: int = 0) -> Iterator[bytes]:
    """A plain tar of an archive's files, checked again, with `owner` and with modes of our own; with `below`, of the
    files in that directory, as if it were the root.

    Raises:
        BundleFailed: `bundle_integrity_failed` at the end if the bytes have another digest; else as `read_bundle`.
    """
    prefix = below and below + "/"
    with _opened(path) as file:
        reader = BundleReader(file)
        for entry in reader:
            if not entry.path.startswith(prefix):
                continue
            info = tarfile.TarInfo(entry.path.removeprefix(prefix))
            info.uid = info.gid = owner
            info.mode = 0o755 if entry.executable or entry.kind == "directory" else 0o644
            info.type = {"file": tarfile.REGTYPE, "directory": tarfile.DIRTYPE, "symlink": tarfile.SYMTYPE}[entry.kind]
            info.size, info.linkname = entry.size, entry.target
            yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
            yield from reader.data()
            yield b"\0" * (-entry.size % _BLOCK)
        check_digest(reader.sha256(), sha256)
    yield b"\0" * TAR_END_BYTES


def check_digest(found: str, expected: str) -> None:
    """
    Raises:
        BundleFailed: `bundle_integrity_failed`.
    """
    if found != expected:
        raise BundleFailed(
            "bundle_integrity_failed",
            f"the bytes of the bundle have the SHA-256 {found}, not {expected}; upload it again, and name the digest "
            "that the answer has",
        )


async def verify(path: Path, sha256: str) -> None:
    """Check the digest of an archive's bytes.

    Raises:
        BundleFailed: `bundle_integrity_failed`, or `bundle_fetch_failed` if they cannot be read.
    """

    def check() -> None:
        digest = hashlib.sha256()
        with _opened(path) as file:
            while data := file.read(1 << 20):
                digest.update(data)
        check_digest(digest.hexdigest(), sha256)

    await anyio.to_thread.run_sync(check, abandon_on_cancel=True)


def pack(directory: Path, target: BinaryIO, *, names: Sequence[str] | None = None) -> None:
    """Pack a directory as a bundle. The same files give the same bytes, at any time and for any user.

    Raises:
        BundleFailed: it has no `manifest.json`, or has files that a bundle cannot have.
        OSError: a file cannot be read.
    """
    if not (directory / MANIFEST).is_file():
        raise invalid(f"{directory} has no manifest.json; `atoll bundle init` writes an example")
    with gzip.GzipFile("", "wb", 9, target, mtime=0) as packed:
        for relative in names if names is not None else _files(directory):
            path = directory / relative
            info = tarfile.TarInfo(relative)
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode):
                info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
                packed.write(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
                continue
            if not stat.S_ISREG(status.st_mode):
                raise invalid(f"{relative} is not a file; a bundle has files and directories")
            content = path.read_bytes()
            info.size, info.mode = len(content), 0o755 if status.st_mode & 0o100 else 0o644
            packed.write(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
            packed.write(content + b"\0" * (-len(content) % _BLOCK))
        packed.write(b"\0" * TAR_END_BYTES)


def _files(directory: Path) -> list[str]:
    found: list[str] = []
    for above, directories, files in os.walk(directory):
        directories[:] = sorted(name for name in directories if name not in _SKIPPED)
        links = [name for name in directories if os.path.islink(os.path.join(above, name))]
        names = [name for name in (*files, *links) if name not in _SKIPPED]
        found += [os.path.relpath(os.path.join(above, name), directory) for name in names]
    return sorted(found)
