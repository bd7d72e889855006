"""Bundles as tests need them: of a few sources, or of any entries that a tar can have."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

from atoll.bundles.archive import read_bundle
from atoll.bundles.workspace import BundleFile


def manifest(*tools: str, **more: Any) -> bytes:
    """A manifest whose tools are functions of `tools.main`."""
    declared = [{"name": name, "entrypoint": f"tools.main:{name}"} for name in tools]
    return json.dumps({"schema_version": 1, "tools": declared, **more}).encode()


def entry(name: str, content: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def tar(entries: Iterable[tuple[tarfile.TarInfo, bytes]], format: int = tarfile.PAX_FORMAT) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=format) as file:
        for info, content in entries:
            file.addfile(info, io.BytesIO(content))
    return made.getvalue()


def packed(source: str, given: bytes, files: Mapping[str, bytes] | None = None) -> bytes:
    """A bundle with `tools/main.py`, this manifest, and more files."""
    every = {
        "manifest.json": given,
        "tools/__init__.py": b"",
        "tools/main.py": dedent(source).encode(),
        **(files or {}),
    }
    return gzip.compress(tar(entry(name, content) for name, content in every.items()), mtime=0)


async def stored(path: Path, content: bytes) -> BundleFile:
    """A bundle on disk, as a workspace is given it."""
    path.write_bytes(content)
    read = await read_bundle(path)
    return BundleFile(path=path, sha256=read.sha256, manifest=read.manifest, tools=read.tools)
