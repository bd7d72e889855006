"""A bundle as an archive: read without trusting any of it, and packed from a directory."""

from __future__ import annotations

from pathlib import Path

from atoll.bundles.manifest import BundleManifest
from atoll.bundles.schemas import ToolSchema
from atoll.tools.tool import StrictModel

MAX_BUNDLE_BYTES = 50 * 1024 * 1024
"""The largest archive."""


class BundleContents(StrictModel):
    """What was found in an archive."""

    sha256: str
    """Of its bytes, in hexadecimal."""
    size_bytes: int
    manifest: BundleManifest
    tools: tuple[ToolSchema, ...]
    """What a model is told about its tools, in the order of the manifest."""


async def read_bundle(path: Path) -> BundleContents:
    """Read an archive to its end, with bounded memory. Nothing of it is executed or unpacked.

    Raises:
        BundleFailed: it is no bundle; `reason` is `bundle_manifest_invalid`, or `bundle_fetch_failed` if there is no
            such file. The message says what is wrong, and what is allowed.
    """
    raise NotImplementedError
