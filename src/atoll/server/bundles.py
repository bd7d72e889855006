"""The tool bundles of tenants: their bytes on disk, and a row for each.

Owns which bundles a tenant has, where their bytes are, and how one is found by what a config says (`url`, `sha256`). Not
here: what is in one (`bundles/archive.py`), the sandbox that it runs in (`bundles/workspace.py`), and HTTP routes.
"""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path

from atoll.bundles.manifest import BundleManifest
from atoll.bundles.schemas import ToolSchema
from atoll.bundles.workspace import BundleFile
from atoll.server.database import Database
from atoll.tools.tool import StrictModel

SCHEME = "nap-bundle://"
"""The beginning of a handle: `nap-bundle://<bundle_id>`."""


class StoredBundle(StrictModel):
    """A bundle of a tenant."""

    bundle_id: str
    sha256: str
    size_bytes: int
    manifest: BundleManifest
    tools: tuple[ToolSchema, ...]
    """What a model is told about its tools."""
    created_at: datetime

    @property
    def url(self) -> str:
        """Its handle, for `provisioning_bundle`."""
        return SCHEME + self.bundle_id


class Bundles:
    """The bundles of all tenants of a server. A config that uses one refers to it by a foreign key, `bundles.id`, so
    that it cannot be deleted meanwhile."""

    def __init__(self, database: Database, directory: Path) -> None:
        self._database = database
        self._directory = directory

    async def add(self, tenant: str, body: AsyncIterator[bytes]) -> tuple[StoredBundle, bool]:
        """Store an uploaded archive, and say whether it is new: the same bytes again are the same bundle.

        Raises:
            BundleFailed: it is no valid bundle.
            RequestTooLarge: it is larger than `MAX_BUNDLE_BYTES`.
        """
        raise NotImplementedError

    async def get(self, tenant: str, bundle_id: str) -> StoredBundle:
        """
        Raises:
            BundleNotFound: the tenant has no such bundle.
        """
        raise NotImplementedError

    async def list(self, tenant: str) -> builtins.list[StoredBundle]:
        """The oldest first."""
        raise NotImplementedError

    async def resolve(self, tenant: str, url: str, sha256: str) -> StoredBundle:
        """The bundle that a config names: a handle, or an `https://` URL, which is fetched once and kept by its digest.

        Raises:
            BundleFailed: `bundle_fetch_failed` (there is none, or the URL may not be fetched, or its answer was not
                200), `bundle_integrity_failed` (its bytes have another digest), or what is wrong with the archive.
        """
        raise NotImplementedError

    def file(self, tenant: str, bundle: StoredBundle) -> BundleFile:
        """What a workspace needs of it."""
        raise NotImplementedError

    async def delete(self, tenant: str, bundle_id: str) -> StoredBundle:
        """Delete a bundle and its bytes.

        Raises:
            BundleNotFound: the tenant has no such bundle.
            Conflict: a config uses it.
        """
        raise NotImplementedError
