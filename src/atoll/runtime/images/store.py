"""The image store: from a reference such as `python:3.12` to the read-only layers of a sandbox's image.

Owns which images are present, which digest a reference means, and how several tasks and processes share one store.
Everything is made in a directory under `tmp/` and becomes visible by one rename, so a reader sees a whole image or
none, whatever is killed when. Not here: how references are written (`reference.py`), how images are fetched and
unpacked (`fetch.py`), the layer that is generated above each image (`overlay.py`), the host image (`host.py`), and how
images are mounted (the driver). Used by the engine and by `archive/`.

    root/                       0700: images hold set-user-id programs, owned by root, that other people wrote
      references/<hash>.json    which digest a reference means
      unpacked/<digest>/        rootfs/ and layer/, or for the host image root/ and usr/; its mtime is its last use
      host.json                 the host image's digest and what it was made from
      locks/<hash>              one for each reference and digest that is being worked on
      tmp/<random>/             work in progress. Its `.lock` is held until the last process that works there has ended
"""

from __future__ import annotations

import builtins
import errno
import hashlib
import logging
import os
import posixpath
import shutil
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from anyio import from_thread, to_thread

from atoll.contract.driver import Filesystem, Layer
from atoll.contract.errors import ImageUnavailable, InvalidRequest, SandboxError
from atoll.contract.frozen import Field, Frozen
from atoll.contract.model import Env
from atoll.drivers.locks import locked, open_lock, try_lock
from atoll.runtime.images import host, overlay
from atoll.runtime.images.contents import ImageContents, read_contents
from atoll.runtime.images.reference import HOST, ImageKind, ImageReference
from atoll.runtime.state.records import StoredRecord, read_record, write_record
from atoll.runtime.state.store import now

if TYPE_CHECKING:
    from atoll.runtime.images.fetch import Fetcher, ImageConfig, ProgressCallback, Scratch

_SCRATCH_LOCK = ".lock"
_log = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.5
"""How long the machine's own files are assumed not to have changed after a check."""

FileStamp = tuple[int, int, int]
"""Time of modification, size and inode: when one of them differs, the file has changed."""


class ImageInfo(StoredRecord):
    """An image that is present."""

    VERSION = 1

    reference: str
    """The full form of its reference."""
    kind: ImageKind
    digest: str
    """`sha256:` and 64 hexadecimal digits: of the image's manifest, of the tar, or of the generated files."""
    size_bytes: int
    """Its size in the store. Files of `host` and `dir:` that are used in place do not count."""
    created_at: datetime | None = None
    """When it was built, if its configuration says so."""
    pulled_at: datetime
    env: Env = Field(default_factory=dict)
    user: str | None = None
    """`USER`, as it is in the image's configuration. Unset or empty: it has none."""
    working_directory: str | None = None
    """`WORKDIR`, likewise."""
    entrypoint: tuple[str, ...] | None = None
    """This and `command` are shown, not used."""
    command: tuple[str, ...] | None = None


class ImageLayers(Frozen):
    """An image's file systems and what its configuration says of processes, for a sandbox."""

    filesystems: tuple[Filesystem, ...]
    env: Env
    user: str | None = None
    """Unset: it names none."""
    working_directory: str | None = None
    """An absolute path. Unset: it names none, or `/`, which is what builders write if none was set."""
    digest: str


class _ReferenceRecord(StoredRecord):
    """The content of a file in `references/`."""

    VERSION = 1

    image: ImageInfo
    source: FileStamp | None = None
    """The state that the file on this machine had from which the image was made."""
    checked_ns: int
    """When the reference was last resolved to this image."""


class ImageStore:
    """The images of one state directory. Several processes may use one store at once.

    `in_use` returns the digests of images that sandboxes and checkpoints use: these are never removed. It is called in
    a thread.
    """

    def __init__(
        self,
        root: Path,
        *,
        rootless: bool,
        in_use: Callable[[], set[str]] = set,
        max_bytes: int = 20 * 1024**3,
        grace_s: float = 3600.0,
    ) -> None:
        self._root = root
        self._rootless = rootless
        self._in_use = in_use
        self._grace_s = grace_s
        self._max_bytes = max_bytes
        self._skeleton: host.Skeleton | None = None
        self._looked_at = -_LOOK_EVERY_S

    @cached_property
    def _fetcher(self) -> Fetcher:
        from atoll.runtime.images.fetch import Fetcher

        return Fetcher(rootless=self._rootless, max_bytes=self._max_bytes)

    async def resolve(self, reference: str, *, progress: ProgressCallback | None = None) -> ImageLayers:
        """The layers of an image, fetched, imported or built first if it is not present.

        An image that is present is used without network access, in less than a millisecond. A tar that has changed is
        unpacked again; a directory is used in place.

        Raises:
            InvalidRequest: it is not a valid reference.
            ImageUnavailable: it cannot be fetched, imported or built. `details["reason"]` is one of `not_found`,
                `unauthorised`, `unreachable`, `tool_missing`, `too_large`, `disk_full`, `malformed`, … ;
                `details["available"]` are the images that are present.
        """
        wanted = _parse_image(reference)
        if wanted.kind == "host":
            return self._host_layers(await self._host(progress))
        if wanted.kind == "dir":
            image, root = await self._directory(wanted)
            return self._layers(image, root)
        record = self._read_record(wanted)
        if record is None or not self._is_present(record.image.digest) or _has_changed(wanted, record):
            return self._layers(await self._obtain(wanted, progress, refresh=False))
        return self._layers(record.image)

    async def contents(self, reference: str) -> ImageContents | None:
        """What an image has, as its files say. Nothing is fetched or built: None for an image that is not present.

        Raises:
            InvalidRequest: it is not a valid reference.
        """
        wanted = ImageReference.parse(reference)
        if wanted.kind in {"host", "dir"}:
            return await to_thread.run_sync(read_contents, wanted.path or Path("/"))
        record = self._read_record(wanted)
        if record is None or not self._is_present(record.image.digest):
            return None
        layers = self._layers(record.image)
        found = await to_thread.run_sync(read_contents, self._tree(record.image.digest) / "rootfs")
        return found.configured(layers.user, layers.working_directory)

    def find(self, digest: str, reference: str) -> tuple[str, ImageLayers] | None:
        """An image that is present, by its digest and not by its reference, which may mean another by now.

        Returns its reference, `reference` if it has that one, and its layers. None: it is not present, or it is used in
        place, where a digest does not identify the content.
        """
        if not self._is_present(digest):
            return None
        described = self._describe(digest)
        names = [record.image.reference for record in self._records() if record.image.digest == digest]
        full = {ImageReference.parse(name).short: name for name in names}
        name = reference if reference in (*names, *full) else next(iter(names), described.reference)
        return name, self._layers(described)

    async def pull(self, reference: str, *, progress: ProgressCallback | None = None) -> ImageInfo:
        """Make an image present and current: ask its registry, and fetch it if it has changed.

        Concurrent calls, in any number of processes, do the work once. Cancelling leaves nothing behind.

        Raises:
            InvalidRequest, ImageUnavailable: as `resolve`.
        """
        wanted = _parse_image(reference)
        if wanted.kind == "host":
            return _host_image(await self._host(progress))
        if wanted.kind == "dir":
            return (await self._directory(wanted))[0]
        image = await self._obtain(wanted, progress, refresh=True)
        await self.remove_unreferenced()
        return image

    async def import_(self, source: Path, reference: str, *, progress: ProgressCallback | None = None) -> ImageInfo:
        """Import an image from a file under a reference, which it takes from the image that had it.

        `source` is the tar of a root file system, plain or compressed, an image saved by docker or as an OCI archive,
        or a directory that is an OCI layout. Its content decides which of these it is.

        Raises:
            InvalidRequest: the reference is not a name with a tag, or the directory is not a layout.
            ImageUnavailable: the file does not exist or cannot be unpacked.
        """
        wanted = ImageReference.parse(reference)
        if wanted.kind != "registry" or wanted.selector.startswith("@"):
            raise InvalidRequest(f"an image cannot be imported as {reference!r}; use a name such as 'team/tools:1'")
        source = source.absolute()
        if source.is_dir() and not (source / "oci-layout").is_file():
            raise InvalidRequest(f"{source} is a directory, but not an OCI layout; use it in place with 'dir:{source}'")
        async with self._lock(wanted.name, progress), self._scratch() as scratch:
            with self._available():
                return await self._load(scratch, wanted, source, "", progress)

    async def remove(self, reference: str) -> None:
        """Remove a reference, and its image unless another reference means the same.

        A create with this image that is in progress fails, or succeeds.

        Raises:
            InvalidRequest: it is the host image, or sandboxes or checkpoints use it.
            ImageUnavailable: it is not present.
        """
        wanted = ImageReference.parse(reference)
        if wanted.kind == "host":
            raise InvalidRequest("the host image cannot be removed: it is this machine itself")
        async with self._lock(wanted.name):
            record = self._read_record(wanted)
            if record is None:
                with self._available():
                    raise ImageUnavailable(f"the image {wanted.short} is not present", reason="not_found")
            digest = record.image.digest
            async with self._lock(digest), self._scratch() as scratch:
                shared = any(
                    other.image.digest == digest and other.image.reference != wanted.name for other in self._records()
                )
                if not shared and digest in await to_thread.run_sync(self._in_use):
                    raise InvalidRequest(
                        f"the image {wanted.short} is in use; destroy its sandboxes and checkpoints first, and empty "
                        "its warm pools ('atoll warm')",
                        image=wanted.name,
                        digest=digest,
                    )
                self._record_path(wanted).unlink(missing_ok=True)
                if not shared:
                    self._withdraw(digest, scratch)

    async def remove_unreferenced(self) -> builtins.list[str]:
        """Garbage collection: remove the work of processes that died, and images that no reference means any more.

        An image that was resolved within the last hour stays, as a sandbox may be about to use it. If a record cannot
        be read that may refer to an image, all images stay; so does one that cannot be moved aside because the disk is
        full. Returns what was removed: digests, and `tmp/…` of work.
        """
        freed = await to_thread.run_sync(self._remove_abandoned_scratch)
        if not (self._root / "unpacked").is_dir():
            return freed
        try:
            wanted = {record.image.digest for record in self._records()} | await to_thread.run_sync(self._in_use)
        except SandboxError as error:
            _log.warning("no image is removed: %s", error.message)
            return freed
        skeleton = self._read_skeleton()
        if skeleton is not None:
            wanted.add(skeleton.digest)
        for name in os.listdir(self._root / "unpacked"):
            digest = f"sha256:{name}"
            if digest in wanted or not self._is_idle(digest):
                continue
            try:
                if await self._remove_unwanted(digest):
                    freed.append(digest)
            except OSError as error:
                if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                    raise
                _log.warning("the image %s is not removed: no space is left to move it aside", digest)
        return freed

    async def _remove_unwanted(self, digest: str) -> bool:
        async with self._lock(digest), self._scratch() as scratch:
            still_wanted = any(record.image.digest == digest for record in self._records())
            if still_wanted or not self._is_idle(digest):
                return False
            self._withdraw(digest, scratch)
            return True

    # --- the host image ---------------------------------------------------------------------------------------

    async def _host(self, progress: ProgressCallback | None) -> host.Skeleton:
        skeleton = self._if_current(self._skeleton) or self._if_current(self._read_skeleton())
        if skeleton is None:
            async with self._lock(HOST, progress):
                skeleton = self._if_current(self._read_skeleton())
                if skeleton is None:
                    with self._available():
                        skeleton = await self._build_host(progress)
        self._skeleton = skeleton
        self._touch(skeleton.digest)
        return skeleton

    async def _build_host(self, progress: ProgressCallback | None) -> host.Skeleton:
        if progress is not None:
            progress("building the host image", 0, None)
        async with self._scratch() as scratch:
            built = scratch.path / "image"
            built.mkdir()
            skeleton = await to_thread.run_sync(
                lambda: host.build(built, rootless=self._rootless, check=from_thread.check_cancelled)
            )
            async with self._lock(skeleton.digest):
                if not self._tree(skeleton.digest).is_dir():
                    await self._publish(built, skeleton.digest)
                write_record(self._root / "host.json", skeleton)
        return skeleton

    def _if_current(self, skeleton: host.Skeleton | None) -> host.Skeleton | None:
        if skeleton is None or not (self._tree(skeleton.digest) / "root").is_dir():
            return None
        if skeleton is self._skeleton and time.monotonic() < self._looked_at + _LOOK_EVERY_S:
            return skeleton
        now = time.monotonic()
        if not skeleton.is_current(rootless=self._rootless):
            return None
        self._looked_at = now
        return skeleton

    def _read_skeleton(self) -> host.Skeleton | None:
        try:
            return read_record(self._root / "host.json", host.Skeleton, "the host image")
        except SandboxError:  # of another version: it is built again
            return None

    def _host_layers(self, skeleton: host.Skeleton) -> ImageLayers:
        tree = self._tree(skeleton.digest)
        filesystems = [Filesystem(target="/", key="root", layers=(Layer(path=tree / "root"),))]
        for name in skeleton.trees:
            layers = (Layer(path=tree / name), Layer(path=Path("/", name), owner="machine"))
            filesystems.append(Filesystem(target=f"/{name}", key=name, layers=layers))
        return ImageLayers(filesystems=tuple(filesystems), env={}, digest=skeleton.digest)

    # --- directories ------------------------------------------------------------------------------------------

    async def _directory(self, wanted: ImageReference) -> tuple[ImageInfo, Path]:
        """A directory that is used in place. Only the layer above it is generated, again when its accounts change."""
        with self._available():
            root = _check_directory(wanted.path or Path("/"), self._root)
        made_from = [overlay.RECIPE, self._rootless, str(root)]
        for path in overlay.ACCOUNT_FILES:
            place = overlay.find(root, path)
            made_from.append("" if place is None else str(_stamp(place.status)))
        digest = f"sha256:{hashlib.sha256(repr(made_from).encode()).hexdigest()}"
        image = ImageInfo(reference=wanted.name, kind="dir", digest=digest, size_bytes=0, pulled_at=now())
        if not (self._tree(digest) / "layer").is_dir():
            async with self._lock(wanted.name), self._scratch() as scratch:
                if not (self._tree(digest) / "layer").is_dir():
                    layer = scratch.path / "image/layer"
                    layer.mkdir(parents=True)
                    await to_thread.run_sync(lambda: overlay.generate(root, layer, rootless=self._rootless))
                    await self._publish(scratch.path / "image", digest)
                self._write_record(wanted, _ReferenceRecord(image=image, checked_ns=time.time_ns()))
        return image, root

    # --- images that are unpacked -----------------------------------------------------------------------------

    async def _obtain(self, wanted: ImageReference, progress: ProgressCallback | None, *, refresh: bool) -> ImageInfo:
        """Fetch or import an image, unless another process has done so meanwhile."""
        asked_ns = time.time_ns()
        async with self._lock(wanted.name, progress), self._scratch() as scratch:
            record = self._read_record(wanted)
            good = record is not None and self._is_present(record.image.digest) and not _has_changed(wanted, record)
            if record is not None and good and (not refresh or record.checked_ns >= asked_ns):
                return record.image
            with self._available():
                if wanted.path is None:
                    return await self._fetch(scratch, wanted, progress)
                return await self._load(scratch, wanted, wanted.path, wanted.selector, progress)

    async def _fetch(self, scratch: Scratch, wanted: ImageReference, progress: ProgressCallback | None) -> ImageInfo:
        digest = wanted.selector.removeprefix("@")
        if digest.startswith(":") or not self._is_present(digest):  # a digest identifies what is present
            if progress is not None:
                progress(f"looking up {wanted.short}", 0, None)
            remote = await self._fetcher.inspect(scratch, wanted.repository, wanted.selector, wanted.short)
            digest = remote.digest
            async with self._lock(digest, progress):
                if not self._is_present(digest):
                    await self._fetcher.download(scratch, remote, wanted.short, progress)
                    await self._unpack(scratch, wanted, digest, progress)
                return self._refer(wanted, digest)
        async with self._lock(digest, progress):
            return self._refer(wanted, digest)

    async def _load(
        self, scratch: Scratch, wanted: ImageReference, source: Path, tag: str, progress: ProgressCallback | None
    ) -> ImageInfo:
        from atoll.runtime.images.fetch import digest_of, kind_of_archive

        found: str = wanted.kind
        try:
            stamp = _stamp(os.stat(source / "index.json" if source.is_dir() else source))
            if found in ("registry", "tar"):
                found = "oci" if source.is_dir() else await to_thread.run_sync(kind_of_archive, source)
        except FileNotFoundError:
            raise ImageUnavailable(f"the file {source} does not exist", reason="not_found", path=str(source)) from None
        except PermissionError:
            raise ImageUnavailable(
                f"{source} cannot be read: permission denied", reason="unauthorised", path=str(source)
            ) from None
        if found == "rootfs":
            digest = await to_thread.run_sync(digest_of, source)
        else:
            digest = await self._fetcher.load(scratch, found, source, tag, wanted.short, progress)
        async with self._lock(digest, progress):
            if not self._is_present(digest):
                if found == "rootfs":
                    await self._fetcher.lay_out(scratch, source, wanted.short, progress)
                await self._unpack(scratch, wanted, digest, progress)
            return self._refer(wanted, digest, stamp)

    async def _unpack(
        self, scratch: Scratch, wanted: ImageReference, digest: str, progress: ProgressCallback | None
    ) -> None:
        configuration = await self._fetcher.unpack(scratch, wanted.short, progress)
        built = scratch.path / "image"
        (built / "layer").mkdir(parents=True)
        (scratch.path / "rootfs").rename(built / "rootfs")

        def finish() -> int:
            size_bytes = overlay.cleanse(built / "rootfs", check=from_thread.check_cancelled)
            self._fetcher.check_size(size_bytes, wanted.short)  # the watch may have missed the last tenth of a second
            overlay.generate(built / "rootfs", built / "layer", rootless=self._rootless)
            return size_bytes

        size_bytes = await to_thread.run_sync(finish)
        image = _described(wanted, digest, size_bytes, configuration)
        write_record(built / "image.json", image)
        await self._publish(built, digest)

    def _refer(self, wanted: ImageReference, digest: str, source: FileStamp | None = None) -> ImageInfo:
        """Write that the reference `wanted` means `digest`, which is present."""
        image = self._describe(digest).model_copy(
            update={"reference": wanted.name, "kind": wanted.kind, "pulled_at": now()}
        )
        self._write_record(wanted, _ReferenceRecord(image=image, source=source, checked_ns=time.time_ns()))
        return image

    def _layers(self, image: ImageInfo, root: Path | None = None) -> ImageLayers:
        tree = self._tree(image.digest)
        self._touch(image.digest)
        layers = (Layer(path=tree / "layer"), Layer(path=root or tree / "rootfs"))
        filesystem = Filesystem(target="/", key="root", layers=layers)
        directory = posixpath.normpath(image.working_directory or "/")
        return ImageLayers(
            filesystems=(filesystem,),
            env=image.env,
            user=image.user or None,
            working_directory=directory if directory.startswith("/") and directory.strip("/") else None,
            digest=image.digest,
        )

    # --- files on disk ----------------------------------------------------------------------------------------

    def _tree(self, digest: str) -> Path:
        return self._root / "unpacked" / digest.removeprefix("sha256:")

    def _is_present(self, digest: str) -> bool:
        return (self._tree(digest) / "image.json").is_file()

    def _touch(self, digest: str) -> None:
        """Mark an image as used now, which keeps it for an hour."""
        try:
            os.utime(self._tree(digest))
        except FileNotFoundError:
            raise _just_removed(digest) from None

    def _is_idle(self, digest: str) -> bool:
        try:
            return os.stat(self._tree(digest)).st_mtime < time.time() - self._grace_s
        except FileNotFoundError:
            return False

    async def _publish(self, built: Path, digest: str) -> None:
        """Make a finished image visible. All of it is on disk before its name is."""
        await to_thread.run_sync(_flush_filesystem, built)
        built.chmod(0o755)
        built.rename(self._tree(digest))

    def _withdraw(self, digest: str, scratch: Scratch) -> None:
        """Move an image to `scratch`, with which it is removed."""
        try:
            self._tree(digest).rename(scratch.path / "withdrawn")
        except FileNotFoundError:
            return

    def _record_path(self, wanted: ImageReference) -> Path:
        return self._root / "references" / f"{_hash(wanted.name)}.json"

    def _read_record(self, wanted: ImageReference) -> _ReferenceRecord | None:
        return self._read_reference(self._record_path(wanted), wanted.short)

    def _records(self) -> Iterator[_ReferenceRecord]:
        directory = self._root / "references"
        for name in sorted(os.listdir(directory)) if directory.is_dir() else ():
            if name.endswith(".json"):
                record = self._read_reference(directory / name, f"with the record {name}")
                if record is not None:
                    yield record

    def _read_reference(self, path: Path, name: str) -> _ReferenceRecord | None:
        """A file of `references/`. None: it is absent, malformed, or written by an older Atoll; the image is fetched.

        Raises:
            SandboxError: it was written by a newer Atoll, or its file cannot be read. Its image, which may exist
                nowhere else, must not be removed.
        """
        try:
            return read_record(path, _ReferenceRecord, f"the image {name}")
        except SandboxError as error:
            if error.details["reason"] in ("newer", "unreadable"):
                raise
            return None

    def _write_record(self, wanted: ImageReference, record: _ReferenceRecord) -> None:
        write_record(self._record_path(wanted), record)

    def _describe(self, digest: str) -> ImageInfo:
        """What is known of an image that is present.

        Raises:
            SandboxError: its record cannot be read.
            ImageUnavailable: it has just been removed.
        """
        image = read_record(self._tree(digest) / "image.json", ImageInfo, f"the image {digest}")
        if image is None:
            raise _just_removed(digest)
        return image

    # --- sharing ----------------------------------------------------------------------------------------------

    def _make_directories(self) -> None:
        # No other user may enter: images hold other people's set-user-id programs, owned by root.
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stat.S_IMODE(self._root.stat().st_mode) != 0o700:
            self._root.chmod(0o700)
        for name in ("references", "unpacked", "locks", "tmp"):
            (self._root / name).mkdir(mode=0o700, exist_ok=True)

    @asynccontextmanager
    async def _lock(self, key: str, progress: ProgressCallback | None = None) -> AsyncIterator[None]:
        """Lock a reference or a digest against all other tasks and processes, however long they take.

        A reference is locked before a digest, never after.
        """
        self._make_directories()

        def on_wait() -> None:
            if progress is not None:
                progress("waiting for another pull", 0, None)

        async with locked(self._root / "locks" / _hash(key), None, "working on the same image", on_wait=on_wait):
            yield

    @asynccontextmanager
    async def _scratch(self) -> AsyncIterator[Scratch]:
        """A directory for one piece of work, removed afterwards; after a kill, by `remove_unreferenced`."""
        from atoll.runtime.images.fetch import Scratch

        self._make_directories()
        while True:
            path = self._root / "tmp" / os.urandom(8).hex()
            path.mkdir(mode=0o700)
            # Another process may remove it between these steps, since it is not locked yet: then try again.
            with suppress(FileNotFoundError):
                fd = open_lock(path / _SCRATCH_LOCK)
                if try_lock(fd) and path.exists():
                    break
                os.close(fd)
        try:
            yield Scratch(path, fd)
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(remove_tree, path)
            os.close(fd)

    def _remove_abandoned_scratch(self) -> builtins.list[str]:
        freed: builtins.list[str] = []
        directory = self._root / "tmp"
        for name in os.listdir(directory) if directory.is_dir() else ():
            try:
                fd = open_lock(directory / name / _SCRATCH_LOCK)
            except FileNotFoundError:
                continue
            try:
                if try_lock(fd) and (directory / name).exists():
                    remove_tree(directory / name)
                    freed.append(f"tmp/{name}")
            finally:
                os.close(fd)
        return freed

    # --- present images ---------------------------------------------------------------------------------------

    @contextmanager
    def _available(self) -> Iterator[None]:
        """While the context lasts, an error about an unavailable image lists the images that are present.

        References with a path are left out: the caller may not be allowed to see this machine's paths.
        """
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ImageUnavailable("the disk of the image store is full", reason="disk_full") from error
        except ImageUnavailable as error:
            names = [ImageReference.parse(image.reference).short for image in self._list() if image.kind == "registry"]
            listed = ", ".join([HOST, *names[:8]]) + (", …" if len(names) > 8 else "")
            raise ImageUnavailable(
                f"{error.message}{ImageUnavailable.PRESENT}{listed})",
                hint=error.hint,
                **{**error.details, "available": [HOST, *names[:64]]},
            ) from error

    async def list(self) -> builtins.list[ImageInfo]:
        """The images that are present, by reference. The host image is among them once it has been used."""
        return await to_thread.run_sync(self._list)

    def _list(self) -> builtins.list[ImageInfo]:
        present = [record.image for record in self._records()]
        skeleton = self._read_skeleton()
        host = [_host_image(skeleton)] if skeleton is not None else []
        return [*host, *sorted(present, key=lambda image: image.reference)]


def _just_removed(digest: str) -> ImageUnavailable:
    return ImageUnavailable(f"the image {digest} has just been removed", reason="not_found")


def _described(wanted: ImageReference, digest: str, size_bytes: int, configuration: ImageConfig) -> ImageInfo:
    process = configuration.process
    return ImageInfo(
        reference=wanted.name,
        kind=wanted.kind,
        digest=digest,
        size_bytes=size_bytes,
        created_at=configuration.created,
        pulled_at=now(),
        env=configuration.env,
        user=process.user,
        working_directory=process.working_directory,
        entrypoint=process.entrypoint,
        command=process.command,
    )


def _parse_image(reference: str) -> ImageReference:
    """
    Raises:
        InvalidRequest: it is not the reference of an image.
    """
    wanted = ImageReference.parse(reference)
    if wanted.kind == "template":
        raise InvalidRequest(
            f"{reference!r} is a template, of which a sandbox can be created; here only images can be used",
            image=reference,
        )
    return wanted


def _host_image(skeleton: host.Skeleton) -> ImageInfo:
    return ImageInfo(
        reference=HOST,
        kind="host",
        digest=skeleton.digest,
        size_bytes=skeleton.size_bytes,
        pulled_at=skeleton.built_at,
    )


def _check_directory(path: Path, store: Path) -> Path:
    root = Path(os.path.realpath(path))
    if not root.is_dir():
        raise ImageUnavailable(f"the directory {path} does not exist", reason="not_found", path=str(path))
    if store.resolve().is_relative_to(root):
        raise InvalidRequest(
            f"{path} cannot be an image: it contains the state directory; the image of this machine is 'host'"
        )
    try:
        with os.scandir(root) as entries:
            empty = next(entries, None) is None
    except PermissionError:
        raise ImageUnavailable(
            f"{path} cannot be read: permission denied", reason="unauthorised", path=str(path)
        ) from None
    if empty:
        raise ImageUnavailable(f"the directory {path} is empty", reason="not_found", path=str(path))
    return root


def _has_changed(wanted: ImageReference, record: _ReferenceRecord) -> bool:
    """Whether the file that an image was made from has changed. One that was removed has not."""
    if wanted.path is None:
        return False
    try:
        return record.source != _stamp(os.stat(wanted.path / "index.json" if wanted.kind == "oci" else wanted.path))
    except OSError:
        return False


def _stamp(status: os.stat_result) -> FileStamp:
    return status.st_mtime_ns, status.st_size, status.st_ino


def _flush_filesystem(path: Path) -> None:
    """Sync the file system of `path`: faster than syncing many small files one by one."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        import ctypes

        if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(fd)


def remove_tree(path: Path) -> None:
    """Remove a directory with all that is in it, whatever the modes of the directories in it."""

    def grant_access(_function: object, failed: str, _: object) -> None:
        """The mode of a directory may deny its owner access. No other user can replace it by a link here."""
        if not os.path.lexists(failed):
            return
        for directory in (os.path.dirname(failed), failed):
            if not os.path.islink(directory) and os.path.isdir(directory):
                os.chmod(directory, 0o700)
        if os.path.isdir(failed) and not os.path.islink(failed):
            shutil.rmtree(failed)
        else:
            os.unlink(failed)

    shutil.rmtree(path, onerror=grant_access)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:40]
