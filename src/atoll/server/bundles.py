"""The tool bundles of tenants: their bytes on disk, and a row for each.

Owns which bundles a tenant has, where their bytes are, how one is found by what a config says (`url`, `sha256`), and
which URLs are fetched. A file has its digest as its name and is written before its row, removed after it: what a killed
process has left is removed later (`tidy`). Not here: what is in a bundle (`bundles/archive.py`), the sandbox that it
runs in (`bundles/workspace.py`), and HTTP routes.
"""

from __future__ import annotations

import builtins
import hashlib
import os
import re
import secrets
import shutil
import ssl
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import h11
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from atoll.bundles.archive import MAX_BUNDLE_BYTES, BundleContents, check_digest, read_bundle
from atoll.bundles.build import remove_built
from atoll.bundles.manifest import BundleManifest
from atoll.bundles.schemas import ToolSchema
from atoll.bundles.workspace import BundleFile
from atoll.contract.errors import (
    AtollError,
    BundleFailed,
    BundleNotFound,
    Conflict,
    Forbidden,
    InvalidRequest,
)
from atoll.contract.network import PRESETS, NetworkPolicy
from atoll.runtime.egress.policy import PolicyEvaluator
from atoll.server import outgoing
from atoll.server.database import Database
from atoll.server.engines import TenantEngines
from atoll.server.quotas import QuotaLedger
from atoll.server.tables import bundles
from atoll.server.tenants import Tenants
from atoll.tools.tool import StrictModel

SCHEME = "nap-bundle://"
"""The beginning of a handle: `nap-bundle://<bundle_id>`."""
MAX_BUNDLES = 200
"""Of one tenant."""
FETCH_TIMEOUT_S = 60.0
_UPLOAD = "upload-"
_ABANDONED_S = 3600.0
_TIDY_S = 3600.0
_DIGEST = re.compile(r"[0-9a-f]{64}")


class StoredBundle(StrictModel):
    """A bundle of a tenant."""

    bundle_id: str
    url: str
    """Its handle, for `provisioning_bundle`."""
    sha256: str
    size_bytes: int
    manifest: BundleManifest
    tools: tuple[ToolSchema, ...]
    """What a model is told about its tools."""
    created_at: datetime


class Bundles:
    """The bundles of all tenants of a server. A config that uses one refers to it by a foreign key, `bundles.id`, so
    that it cannot be deleted meanwhile."""

    def __init__(
        self, database: Database, tenants: Tenants, quotas: QuotaLedger, engines: TenantEngines, directory: Path
    ) -> None:
        self._database = database
        self._tenants = tenants
        self._quotas = quotas
        self._engines = engines
        self._directory = directory
        self._changing: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)

    # ---- records ----

    async def add(self, tenant: str, body: AsyncIterator[bytes]) -> tuple[StoredBundle, bool]:
        """Store an uploaded archive, and say whether it is new: the same bytes again are the same bundle.

        Raises:
            BundleFailed: it is no valid bundle.
            InvalidRequest: the tenant has too many.
            QuotaExceeded: its quota of disk has no room for it.
        """
        upload = await self._receive(tenant, body)
        try:
            contents = await read_bundle(upload)
            return await self._keep(tenant, upload, contents)
        finally:
            upload.unlink(missing_ok=True)

    async def _receive(self, tenant: str, body: AsyncIterator[bytes]) -> Path:
        """The bytes, in a file of their own that is on the disk."""
        directory = self._directory / tenant
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / f"{_UPLOAD}{secrets.token_hex(8)}"
        try:
            with path.open("xb") as file:
                async for data in _limited(body):
                    await anyio.to_thread.run_sync(file.write, data)
                file.flush()
                await anyio.to_thread.run_sync(os.fsync, file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    async def _keep(self, tenant: str, upload: Path, contents: BundleContents) -> tuple[StoredBundle, bool]:
        async with self._changing[tenant]:
            if (found := await self._find(tenant, contents.sha256)) is not None:
                if not (path := self._path(tenant, contents.sha256)).exists():  # it was lost
                    await anyio.to_thread.run_sync(_move, upload, path)
                return found, False
            reserved = self._quotas.reserve_bundle(
                await self._tenants.get(tenant), await self._engines.get(tenant), contents.sha256, contents.size_bytes
            )
            async with reserved:
                await anyio.to_thread.run_sync(_move, upload, self._path(tenant, contents.sha256))
                made = await self._insert(tenant, contents)
        return (await self.get(tenant, made), True) if made else (await self._known(tenant, contents.sha256), False)

    async def _insert(self, tenant: str, contents: BundleContents) -> str | None:
        """The id of its row. None: another process has just stored the same."""
        row = {
            "id": f"bdl_{secrets.token_hex(12)}",
            "tenant": tenant,
            "sha256": contents.sha256,
            "size_bytes": contents.size_bytes,
            "manifest": contents.manifest.model_dump(mode="json"),
            "tools": [tool.model_dump(mode="json") for tool in contents.tools],
            "created_at": datetime.now(UTC),
        }
        try:
            async with self._database.write(durable=True) as connection:
                count = sa.select(sa.func.count()).select_from(bundles).where(bundles.c.tenant == tenant)
                if (await connection.execute(count)).scalar_one() >= MAX_BUNDLES:
                    raise InvalidRequest(f"a tenant may have {MAX_BUNDLES} bundles; delete one first")
                await connection.execute(sa.insert(bundles).values(row))
        except IntegrityError:
            if await self._find(tenant, contents.sha256) is None:
                raise
            return None
        return str(row["id"])

    async def _known(self, tenant: str, sha256: str) -> StoredBundle:
        found = await self._find(tenant, sha256)
        if found is None:
            raise Conflict("the bundle was deleted while it was uploaded; upload it again")
        return found

    async def _find(self, tenant: str, sha256: str) -> StoredBundle | None:
        return await self._first(sa.and_(bundles.c.tenant == tenant, bundles.c.sha256 == sha256))

    async def _first(self, where: sa.ColumnElement[bool]) -> StoredBundle | None:
        async with self._database.read() as connection:
            row = (await connection.execute(sa.select(bundles).where(where))).one_or_none()
        return None if row is None else _stored(row)

    async def get(self, tenant: str, bundle_id: str) -> StoredBundle:
        """
        Raises:
            BundleNotFound: the tenant has no such bundle.
        """
        found = await self._first(sa.and_(bundles.c.tenant == tenant, bundles.c.id == bundle_id))
        if found is None:
            raise BundleNotFound(bundle_id)
        return found

    async def list(self, tenant: str) -> builtins.list[StoredBundle]:
        """The oldest first."""
        query = sa.select(bundles).where(bundles.c.tenant == tenant).order_by(bundles.c.created_at, bundles.c.id)
        async with self._database.read() as connection:
            return [_stored(row) for row in await connection.execute(query)]

    def file(self, tenant: str, bundle: StoredBundle) -> BundleFile:
        """What a workspace needs of it."""
        return BundleFile(
            path=self._path(tenant, bundle.sha256), sha256=bundle.sha256, manifest=bundle.manifest, tools=bundle.tools
        )

    def _path(self, tenant: str, sha256: str) -> Path:
        return self._directory / tenant / f"{sha256}.tgz"

    async def delete(self, tenant: str, bundle_id: str) -> StoredBundle:
        """Delete a bundle, its bytes, and what was built of it.

        Raises:
            BundleNotFound: the tenant has no such bundle.
            Conflict: a config uses it.
        """
        async with self._changing[tenant]:
            found = await self.get(tenant, bundle_id)
            try:
                async with self._database.write(durable=True) as connection:
                    await connection.execute(sa.delete(bundles).where(bundles.c.id == bundle_id))
            except IntegrityError:
                raise Conflict(
                    f"an agent config uses the bundle {bundle_id}; point it at another bundle, or delete it, first"
                ) from None
            await self._remove_files(tenant, found.sha256)
        return found

    async def _remove_files(self, tenant: str, sha256: str) -> None:
        """The file last: as long as it is there without a row, `tidy` does this again."""
        await remove_built(await self._engines.get(tenant), sha256)
        self._path(tenant, sha256).unlink(missing_ok=True)

    # ---- what a config names ----

    async def resolve(self, tenant: str, url: str, sha256: str) -> StoredBundle:
        """The bundle that a config names: a handle, or an `https://` URL, which is fetched once and kept by its digest.

        Raises:
            BundleFailed: `bundle_fetch_failed` (there is none, or the URL may not be fetched, or its answer was not
                200), `bundle_integrity_failed` (its bytes have another digest), or what is wrong with the archive.
        """
        if url.startswith(SCHEME):
            try:
                found = await self.get(tenant, url.removeprefix(SCHEME))
            except BundleNotFound as error:
                raise _unfetched(error.message) from None
            check_digest(found.sha256, sha256)
            return found
        if not _DIGEST.fullmatch(sha256):
            raise _unfetched(f"{sha256[:80]!r} is not a SHA-256: it has 64 digits, in lower case")
        found_already = await self._find(tenant, sha256)
        return found_already or await self._fetch(tenant, url, sha256)

    async def _fetch(self, tenant: str, url: str, sha256: str) -> StoredBundle:
        try:
            with anyio.fail_after(FETCH_TIMEOUT_S):
                upload = await self._receive(tenant, self._get(tenant, url))
        except TimeoutError:
            raise _unfetched(f"the bundle did not come within {FETCH_TIMEOUT_S:g} s") from None
        except ssl.SSLError as error:
            raise _unfetched(f"TLS failed: {error.reason or 'the connection was closed'}") from None
        except BundleFailed:
            raise
        except (AtollError, ValueError) as error:
            raise _unfetched(str(error)) from None
        except (OSError, anyio.BrokenResourceError, anyio.EndOfStream, anyio.ClosedResourceError):
            raise _unfetched("the connection to the bundle's host could not be made, or was cut") from None
        except h11.RemoteProtocolError:
            raise _unfetched("the answer of the bundle's host was not HTTP, or not complete") from None
        try:
            check_digest(await anyio.to_thread.run_sync(_digest, upload), sha256)
            kept, _ = await self._keep(tenant, upload, await read_bundle(upload))
            return kept
        finally:
            upload.unlink(missing_ok=True)

    async def _get(self, tenant: str, url: str) -> AsyncIterator[bytes]:
        """The body of an answer of 200. Nothing else of it is kept, and no redirect is followed."""
        split = outgoing.split_url(url, example=f"{SCHEME}bdl_… or https://example.com/bundle.tgz")
        if split.scheme != "https":
            raise Forbidden(f"a bundle is fetched over https only; upload it, and name its handle, {SCHEME}bdl_…")
        policy = (await self._tenants.get(tenant)).policy
        rules = [rule for rule in policy.networks if rule not in PRESETS]
        refused = f"the tenant's policy does not let the server fetch from {split.hostname}; upload the bundle instead"
        stream = await outgoing.connect(split, PolicyEvaluator(NetworkPolicy(allow=rules)), refused=refused)
        try:
            connection = h11.Connection(our_role=h11.CLIENT)
            headers = [
                ("Host", split.netloc),
                ("User-Agent", "Atoll-Bundles"),
                ("Accept-Encoding", "identity"),
                ("Connection", "close"),
            ]
            request = h11.Request(method="GET", target=outgoing.target_of(split), headers=headers)
            sent = (connection.send(request), connection.send(h11.EndOfMessage()))
            await stream.send(b"".join(part or b"" for part in sent))
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    try:
                        data = await stream.receive()
                    except anyio.EndOfStream:
                        data = b""
                    connection.receive_data(data)
                elif isinstance(event, h11.Response):
                    if event.status_code != 200:
                        raise ValueError(f"the answer of the bundle's host was {event.status_code}; it has to be 200")
                elif isinstance(event, h11.Data):
                    yield bytes(event.data)
                elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                    return
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(stream)

    # ---- what is left ----

    async def tidy(self) -> None:
        """Remove what killed processes have left: uploads, and files of bundles that were deleted. Then wait."""
        for directory in self._directory.glob("*/"):
            for path in directory.iterdir():
                with suppress(OSError):
                    if time.time() - path.stat().st_mtime > _ABANDONED_S:
                        await self._tidy_one(directory.name, path)
        await anyio.sleep(_TIDY_S)

    async def _tidy_one(self, tenant: str, path: Path) -> None:
        if path.name.startswith(_UPLOAD):
            path.unlink(missing_ok=True)
        elif _DIGEST.fullmatch(path.stem) and await self._find(tenant, path.stem) is None:
            async with self._changing[tenant]:
                if await self._find(tenant, path.stem) is None:
                    await self._remove_files(tenant, path.stem)

    async def remove_all(self, tenant: str) -> None:
        """Remove the files of a tenant that is deleted. Its rows go with it."""
        await anyio.to_thread.run_sync(lambda: shutil.rmtree(self._directory / tenant, ignore_errors=True))


async def _limited(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    size_bytes = 0
    async for data in body:
        size_bytes += len(data)
        if size_bytes > MAX_BUNDLE_BYTES:
            raise _unfetched(f"the archive is larger than {MAX_BUNDLE_BYTES} bytes")
        yield data


def _move(upload: Path, target: Path) -> None:
    upload.replace(target)
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unfetched(message: str) -> BundleFailed:
    return BundleFailed("bundle_fetch_failed", message)


def _stored(row: sa.Row[Any]) -> StoredBundle:
    return StoredBundle(
        bundle_id=row.id,
        url=SCHEME + row.id,
        sha256=row.sha256,
        size_bytes=row.size_bytes,
        manifest=BundleManifest.model_validate(row.manifest),
        tools=tuple(ToolSchema.model_validate(each) for each in row.tools),
        created_at=row.created_at,
    )
