"""A sandbox in one file: how it is written, and how one is taken from a file that nobody vouches for.

Knows what a file says about the sandbox in it and which image that may stand on, and runs the two programs that do the
rest: `archive.py`, where the files' owners are who they are inside, and zstd. Refuses to know how a sandbox is made
(`host.py`).

A file is written under another name and renamed when it is whole. What is unpacked goes to layers that nobody names
before the last byte has been checked: whatever is cut short, cancelled or killed leaves nothing, or what `gc` takes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, cast, get_args

import anyio
import anyio.abc
import anyio.to_thread
from anyio.abc import ByteReceiveStream, ByteSendStream
from anyio.streams.buffered import BufferedByteReceiveStream
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atoll.contract.driver import Driver, Filesystem
from atoll.contract.errors import (
    ArchiveRefused,
    AtollError,
    ImageUnavailable,
    InvalidRequest,
    RuntimeUnavailable,
    SandboxError,
)
from atoll.contract.model import Env, ExportResult, Frozen, Limits, Name, RuntimeName
from atoll.runtime.archive import worker as archive
from atoll.runtime.images.reference import PathKind, Reference
from atoll.runtime.images.store import ImageLayers, ImageStore, Progress
from atoll.runtime.state.checkpoints import CheckpointRecord
from atoll.runtime.state.layers import MAX_LAYERS, LayerRef, Layers
from atoll.runtime.state.store import IMPORTED_IDS, now
from atoll.settings import program_environment

File = Path | str | BinaryIO
"""The path of a file, or one that is open for bytes."""

_ROOM = 3, 4
"""The part of the free disk that a file may fill when nobody says how much."""
_LINE_LIMIT_BYTES = 8 * 1024 * 1024
_CHUNK_BYTES = 1024 * 1024
_PIPE_BYTES = 1024 * 1024
_SAID_LIMIT = 2000
_NO_ROOM = "there is no room for it on the disk of the state directory"


Key = Annotated[str, Field(pattern=r"^[a-z][a-z0-9]{0,31}$")]


class Origin(Frozen):
    """The image that a sandbox in a file stands on, which is not in the file."""

    reference: str = Field(max_length=4096)
    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")


class Trees(Frozen):
    """A layer in a file."""

    trees: tuple[Key, ...] = Field(max_length=16)
    """The keys of the file systems that it has something for."""


class Contents(Frozen):
    """What a file says about the sandbox in it: the first member. Written by strangers."""

    format: Literal["atoll-sandbox"]
    version: Literal[1]
    name: Name
    """What the sandbox was called."""
    checkpoint: str | None = Field(default=None, max_length=255)
    """The checkpoint's name or id, if it is one."""
    exported_at: datetime
    image: Origin
    layers: tuple[Trees, ...] = Field(max_length=MAX_LAYERS)
    """The first on top."""
    limits: Limits
    """As they were asked for."""
    env: Env
    user: str = Field(max_length=255)
    runtime: RuntimeName | None = None
    pause_after_s: float | None = None


class _Version(BaseModel):
    """As much of a file of any version as can be understood."""

    model_config = ConfigDict(extra="ignore")

    format: str
    version: int


# --- writing ------------------------------------------------------------------------------------------------------


async def write(
    record: CheckpointRecord, layers: Layers, driver: Driver, target: File, progress: Progress | None = None
) -> ExportResult:
    """Write a checkpoint to a file. Call it with the layers held.

    Raises:
        SandboxError: it could not be read or written.
        BrokenPipeError: whoever was to read it has gone.
    """
    contents = Contents(
        format="atoll-sandbox",
        version=1,
        name=record.spec.name,
        checkpoint=record.checkpoint.name,
        exported_at=now(),
        image=Origin(reference=record.spec.image, digest=record.image_digest),
        layers=tuple(Trees(trees=tuple(each.key for each in record.base)) for _ in record.layers),
        **record.spec.model_dump(include={"limits", "env", "user", "runtime", "pause_after_s"}),
    )
    manifest = contents.model_dump_json(exclude_none=True)
    if len(manifest.encode()) > archive.MANIFEST_LIMIT_BYTES:
        raise SandboxError("the sandbox cannot be exported: its environment is too large")
    trees = []
    for number, layer in enumerate(record.layers):
        for key in contents.layers[number].trees:
            path = layers.path(layer.id) / "upper" / key
            if path.is_dir():
                trees.append((_tree(number, key), str(path), layer.owner))
    order = {"manifest": manifest, "trees": trees}
    async with _written(target) as fd, _Programs() as programs:
        reading, writing = _pipe()
        try:
            worker = await programs.start_worker(driver, "pack", writing)
            zstd = await programs.start_zstd(["-q", "-c", "-T0"], reading, fd)
        finally:
            os.close(reading)
            os.close(writing)
        await worker.tell(order)
        try:
            end = await worker.until("end", lambda done: _report(progress, f"exporting {contents.name}", done))
        except _Failed as failure:
            await zstd.wait()
            _check_writer(zstd)
            raise SandboxError(f"the sandbox could not be exported: {failure.said}") from failure
        await zstd.wait()
        _check_writer(zstd)
        size_bytes = os.fstat(fd).st_size if isinstance(target, str | Path) else None
    return ExportResult(
        sandbox=contents.name,
        checkpoint=contents.checkpoint,
        image=contents.image.reference,
        image_digest=contents.image.digest,
        layers=len(contents.layers),
        entries=cast("dict[str, int]", end)["entries"],
        size_bytes=size_bytes,
        without_processes=record.checkpoint.with_memory,
    )


def _check_writer(zstd: anyio.abc.Process) -> None:
    if zstd.returncode == -signal.SIGPIPE:
        raise BrokenPipeError
    if zstd.returncode != 0:
        raise SandboxError("the file could not be written; its disk may be full", hint=f"zstd: {zstd.returncode}")


@contextlib.asynccontextmanager
async def _written(target: File) -> AsyncIterator[int]:
    """What a program can write to. A path has its file when all is well, and until then what it had."""
    if not isinstance(target, str | Path):
        fd = _descriptor(target)
        if fd is not None:
            target.flush()
            yield fd
            return
        reading, fd = _pipe()
        carrier = _Carrier(lambda: os.read(reading, _CHUNK_BYTES), target.write, reading)
        try:
            yield fd
        finally:
            os.close(fd)
        await carrier.done()
        return
    path = Path(target)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a directory; name a file in it", str(path))
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.part")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        yield fd
        await anyio.to_thread.run_sync(os.fsync, fd)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


# --- reading ------------------------------------------------------------------------------------------------------


class Archive:
    """A file that is being read. Made by `opened`."""

    def __init__(
        self,
        contents: Contents,
        worker: _Worker,
        zstd: anyio.abc.Process,
        layers: Layers,
        limit_bytes: int | None,
        told: Callable[[int], None],
    ) -> None:
        self.contents = contents
        self._worker = worker
        self._zstd = zstd
        self._layers = layers
        self._limit_bytes = limit_bytes
        self._told = told
        self.made: list[Path] = []

    async def unpack(self, base: Iterable[Filesystem]) -> tuple[LayerRef, ...]:
        """Make layers of what is in the file, to stand on `base`. When it returns, every byte of it was checked.

        Raises:
            ArchiveRefused: there is something wrong with it.
        """
        disk = os.statvfs(self._layers.path(""))
        limit = self._limit_bytes
        if limit is None:
            limit = disk.f_bavail * disk.f_frsize * _ROOM[0] // _ROOM[1]
        keys = [filesystem.key for filesystem in base]
        imported = []
        places: dict[str, str | None] = {}
        for number, layer in enumerate(self.contents.layers):
            id = self._layers.new()
            self.made.append(self._layers.path(id))
            imported.append(LayerRef(id=id, owner=IMPORTED_IDS))
            places |= {_tree(number, key): None for key in layer.trees}
            places |= {_tree(number, key): str(self.made[-1] / "upper" / key) for key in keys}
        await self._worker.tell(
            {
                "places": places,
                "owner": IMPORTED_IDS,
                "limit_bytes": limit,
                "entry_limit": disk.f_favail * _ROOM[0] // _ROOM[1] if disk.f_files else limit,
                "lock": str(self._layers.lock_path),
            }
        )
        await self._worker.until("end", self._told)
        if await self._zstd.wait() != 0:  # it has a checksum of its own
            raise _Failed("it is damaged", reason="checksum")
        return tuple(imported)


@contextlib.asynccontextmanager
async def opened(
    source: File, layers: Layers, driver: Driver, *, limit_bytes: int | None = None, progress: Progress | None = None
) -> AsyncIterator[Archive]:
    """Read a file up to what it says about itself. Call it with the layers held.

    What was unpacked is removed when the context ends with an error.

    Raises:
        ArchiveRefused: it is not an exported sandbox, or something is wrong with it.
    """
    async with _read(source) as fd, _Programs() as programs:
        reading, writing = _pipe()
        try:
            zstd = await programs.start_zstd(["-q", "-d", "-c"], fd, writing)
            worker = await programs.start_worker(driver, "unpack", reading)
        finally:
            os.close(reading)
            os.close(writing)

        def told(done: int) -> None:
            seen, total = _position(fd)
            _report(progress, "importing", done if seen is None else seen, total)

        made: list[Path] = []
        try:
            contents = _parse(await worker.until("manifest"))
            opened = Archive(contents, worker, zstd, layers, limit_bytes, told)
            made = opened.made
            yield opened
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                refusal = await _refusal(error, zstd) if isinstance(error, _Failed) else None
                await programs.end()
                await driver.layers.remove(*made)
            if refusal is None:
                raise
            raise refusal from None


async def _refusal(failure: _Failed, zstd: anyio.abc.Process) -> AtollError:
    """What the reader's failure means to whoever wanted the file to be imported."""
    if failure.reason is None and failure.number in (errno.ENOSPC, errno.EDQUOT):
        return ArchiveRefused(f"the file cannot be imported: {_NO_ROOM}", reason="disk_full")
    if failure.reason is None:
        return SandboxError(f"the file could not be imported: {failure.said}")
    if failure.reason == "truncated":
        with anyio.move_on_after(5):
            await zstd.wait()
        if zstd.returncode:
            return ArchiveRefused(
                "the file cannot be imported: it is cut short, damaged, or was never compressed with zstd",
                reason="truncated",
            )
    hint = None
    if failure.reason == "too_large":
        hint = "a larger one is taken with limit_bytes, or `atoll import --limit`"
    return ArchiveRefused(f"the file cannot be imported: {failure.said}", hint=hint, reason=failure.reason)


def _parse(line: object) -> Contents:
    text = str(line)
    try:
        seen = _Version.model_validate_json(text)
        if seen.format == archive.FORMAT and seen.version not in archive.VERSIONS:
            known = ", ".join(map(str, archive.VERSIONS))
            raise ArchiveRefused(
                f"the file cannot be imported: it is of version {seen.version}, and this Atoll knows version {known}",
                hint="a newer Atoll reads it",
                reason="version",
            )
        return Contents.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])[:100]
        raise ArchiveRefused(
            f"the file cannot be imported: what it says about itself is malformed ({where!a})",
            hint=str(error)[:_SAID_LIMIT],
            reason="malformed",
        ) from None


def find_base_image(images: ImageStore, origin: Origin) -> tuple[str, ImageLayers]:
    """The image of this machine that a sandbox from a file stands on, when nobody names another.

    A file names no path and makes nobody fetch anything: what it wants is here already, or it is refused.

    Raises:
        ImageUnavailable: it is not here.
    """
    found = images.find(origin.digest, origin.reference)
    if found is not None:
        return found
    kind = origin.reference.partition(":")[0]
    if kind == "dir":
        raise ImageUnavailable(
            f"the sandbox stands on {origin.reference!a}, a directory of the machine that it was exported on; "
            "say which image or directory it is to stand on here (image=, or --image)",
            reason="not_found",
        )
    if kind in get_args(PathKind):
        mend = "copy that file here and take it into the store with 'atoll images import FILE NAME'"
        wanted = ascii(origin.reference)
    else:
        reference = Reference.parse(origin.reference)
        wanted = reference.short
        mend = f"fetch it with 'atoll images pull {reference.repository}@{origin.digest}'"
    raise ImageUnavailable(
        f"the sandbox stands on the image {wanted} with the digest {origin.digest}, which is not here; "
        f"{mend}, or name another (image=, or --image)",
        reason="not_found",
        digest=origin.digest,
    )


def allowed(asked: Limits, usual: Limits) -> Limits:
    """The limits that a file asks for, unless they are wider than those that a sandbox has when nobody says anything.

    Raises:
        InvalidRequest: they are.
    """
    for name, what in (("memory_bytes", "bytes of memory"), ("pids", "processes")):
        wanted, most = getattr(asked, name), getattr(usual, name)
        if wanted is not None and most is not None and wanted > most:
            raise InvalidRequest(
                f"the file asks for {wanted} {what}, and a sandbox has {most} unless somebody says otherwise; "
                f"say what it may have (limits=, or --memory and --pids)"
            )
    return asked


@contextlib.asynccontextmanager
async def _read(source: File) -> AsyncIterator[int]:
    """What a program can read from."""
    if isinstance(source, str | Path):
        if os.path.isdir(source):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(source))
        fd = await anyio.to_thread.run_sync(lambda: os.open(source, os.O_RDONLY | os.O_CLOEXEC), abandon_on_cancel=True)
        try:
            yield fd
        finally:
            os.close(fd)
        return
    known = _descriptor(source)
    if known is not None:
        if source.seekable():
            os.lseek(known, source.tell(), os.SEEK_SET)  # the object may have read ahead
        yield known
        return
    fd, writing = _pipe()
    carrier = _Carrier(lambda: source.read(_CHUNK_BYTES), lambda data: _write_all(writing, data), writing)
    try:
        yield fd
    finally:
        os.close(fd)
    await carrier.done()


def _position(fd: int) -> tuple[int | None, int | None]:
    """How much of a file has been read, and of how much. Neither is known of a pipe."""
    try:
        return os.lseek(fd, 0, os.SEEK_CUR), os.fstat(fd).st_size
    except OSError:
        return None, None


# --- the two programs ---------------------------------------------------------------------------------------------


class _Failed(Exception):
    """The worker has failed: it refuses what it reads (`reason`), or the machine refused it something (`number`)."""

    def __init__(self, said: str, reason: str | None = None, number: int | None = None) -> None:
        super().__init__(said)
        self.said = said
        self.reason = reason
        self.number = number


class _Worker:
    """`archive.py`, at work."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self._process = process
        self._orders = cast("ByteSendStream", process.stdin)
        self._lines = BufferedByteReceiveStream(cast("ByteReceiveStream", process.stdout))

    async def tell(self, order: object) -> None:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self._orders.send(json.dumps(order).encode() + b"\n")  # one that has ended has said why

    async def until(self, key: str, told: Callable[[int], None] | None = None) -> object:
        """What it says under `key`. Meanwhile `told` hears how many bytes are done.

        Raises:
            _Failed: it ends without that.
        """
        said: list[str] = []
        while True:
            try:
                line = await self._lines.receive_until(b"\n", _LINE_LIMIT_BYTES)
            except (anyio.IncompleteRead, anyio.EndOfStream, anyio.DelimiterNotFound):
                await self._process.wait()
                text = "\n".join(said)[-_SAID_LIMIT:] or f"it ended with {self._process.returncode}"
                raise _Failed(text) from None
            try:
                heard = json.loads(line)
            except ValueError:
                said.append(line.decode(errors="replace"))  # of the keeper, or of Python
                continue
            if "refused" in heard:
                raise _Failed(heard["refused"], reason=heard["reason"])
            if "failed" in heard:
                raise _Failed(heard["failed"], number=heard["errno"])
            if "done" in heard and told is not None:
                told(heard["done"])
            if key in heard:
                return heard[key]


class _Programs:
    """Those that were started, which have ended when the context has."""

    def __init__(self) -> None:
        self._started: list[anyio.abc.Process] = []

    async def __aenter__(self) -> _Programs:
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            await self.end()

    async def end(self) -> None:
        for process in self._started:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        for process in self._started:
            await process.aclose()

    async def start_worker(self, driver: Driver, verb: str, fd: int) -> _Worker:
        program = [sys.executable, "-I", "-S", "-X", "utf8", archive.__file__, verb, str(fd)]
        return _Worker(await self._start(driver.layers.owner_command(*program), subprocess.PIPE, subprocess.PIPE, fd))

    async def start_zstd(self, options: list[str], stdin: int, stdout: int) -> anyio.abc.Process:
        try:
            return await self._start(["zstd", *options], stdin, stdout)
        except FileNotFoundError:
            raise RuntimeUnavailable(
                "sandboxes cannot be exported and imported on this machine: the program zstd is not installed",
                hint="apt install zstd",
            ) from None

    async def _start(self, command: list[str], stdin: int, stdout: int, *fds: int) -> anyio.abc.Process:
        quiet = subprocess.STDOUT if fds else subprocess.DEVNULL
        # Not in our session: what a terminal sends is for us, who end them.
        process = await anyio.open_process(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=quiet,
            env=program_environment(),
            pass_fds=fds,
            start_new_session=True,
        )
        self._started.append(process)
        return process


def _pipe() -> tuple[int, int]:
    reading, writing = os.pipe2(os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # refused where a user has used up a quota: then it is only slower
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return reading, writing


class _Carrier:
    """A thread that carries bytes between a program and an object that is no file of the machine."""

    def __init__(self, take: Callable[[], bytes], give: Callable[[bytes], object], fd: int) -> None:
        self._claim_warm, self._give, self._fd = take, give, fd
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    async def done(self) -> None:
        await anyio.to_thread.run_sync(self._thread.join)
        if self._failure is not None:
            raise self._failure

    def _carry(self) -> None:
        try:
            while chunk := self._claim_warm():
                self._give(chunk)
        except BrokenPipeError:
            pass  # the program has ended, and says why
        except BaseException as error:  # noqa: BLE001 - the object's own, for whoever handed it in
            self._failure = error
        finally:
            os.close(self._fd)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _descriptor(file: BinaryIO) -> int | None:
    try:
        return file.fileno()
    except (OSError, AttributeError, io.UnsupportedOperation):
        return None


def _report(progress: Progress | None, what: str, done: int, total: int | None = None) -> None:
    if progress is not None:
        progress(what, done, total)


def _tree(number: int, key: str) -> str:
    return f"layers/{number}/{key}"
