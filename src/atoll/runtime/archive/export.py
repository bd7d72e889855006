"""Export and import: a sandbox in one file, and reading such a file as untrusted input.

Owns the description of a sandbox in the file, the choice of its image at import, and the two programs that do the rest:
`worker.py`, which runs in a user namespace where files have the owners that they have inside, and zstd. Not here: the
format of the file and the checks of its content (`worker.py`), and how a sandbox is created (the engine).

A file is written under a temporary name and renamed when it is complete. It is unpacked into layers that nothing refers
to until its last byte was checked: an import that is interrupted, cancelled or killed leaves nothing, or unreferenced
layers for garbage collection.
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
from pydantic import BaseModel, ConfigDict, ValidationError

from atoll.contract.driver import Driver, Filesystem
from atoll.contract.errors import (
    ArchiveRefused,
    AtollError,
    ImageUnavailable,
    InvalidRequest,
    RuntimeUnavailable,
    SandboxError,
)
from atoll.contract.frozen import Field, Frozen
from atoll.contract.model import Env, ExportResult, Limits, Name, RuntimeName
from atoll.runtime.archive import worker
from atoll.runtime.images.fetch import ProgressCallback
from atoll.runtime.images.reference import ImageReference, PathKind
from atoll.runtime.images.store import ImageLayers, ImageStore
from atoll.runtime.state.checkpoints import CheckpointRecord
from atoll.runtime.state.layers import MAX_LAYERS, LayerRef, Layers
from atoll.runtime.state.store import IMPORTED_IDS, now
from atoll.settings import program_environment

ArchiveFile = Path | str | BinaryIO
"""The path of a file, or a binary file object."""

_FREE_DISK_PART = 3, 4
"""The part of the free disk that an import may fill if the caller sets no limit."""
_MAX_LINE_BYTES = 8 * 1024 * 1024
_CHUNK_BYTES = 1024 * 1024
_PIPE_BYTES = 1024 * 1024
_MAX_OUTPUT_CHARS = 2000


FilesystemKey = Annotated[str, Field(pattern=r"^[a-z][a-z0-9]{0,31}$")]


class BaseImageRef(Frozen):
    """The image of an exported sandbox, which is not in the file."""

    reference: str = Field(max_length=4096)
    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")


class ArchiveLayer(Frozen):
    """A layer in a file."""

    trees: tuple[FilesystemKey, ...] = Field(max_length=16)
    """The keys of the file systems that it has a tree for."""


class ArchiveContents(Frozen):
    """The description of the sandbox in a file: its first member. Untrusted input."""

    format: Literal["atoll-sandbox"]
    version: Literal[1, 2, 3]
    name: Name
    """The sandbox's name when it was exported."""
    checkpoint: str | None = Field(default=None, max_length=255)
    """The label of the checkpoint that was exported, if it has one."""
    exported_at: datetime
    image: BaseImageRef
    layers: tuple[ArchiveLayer, ...] = Field(max_length=MAX_LAYERS)
    """The first on top."""
    limits: Limits
    """As the sandbox's spec has them, without defaults."""
    env: Env
    user: str = Field(min_length=1, max_length=255)
    cwd: str | None = Field(default=None, max_length=4095)
    """Since version 2."""
    runtime: RuntimeName | None = None
    pause_after_s: float | None = None
    sudo: bool = False
    """Since version 3."""


class _ContentsVersion(BaseModel):
    """The fields that a description of any version has."""

    model_config = ConfigDict(extra="ignore")

    format: str
    version: int


# --- writing ------------------------------------------------------------------------------------------------------


async def write(
    record: CheckpointRecord,
    layers: Layers,
    driver: Driver,
    target: ArchiveFile,
    progress: ProgressCallback | None = None,
) -> ExportResult:
    """Write a checkpoint to a file. Call it with the lock of the layers held.

    Raises:
        SandboxError: it could not be read or written.
        BrokenPipeError: the reader of the pipe `target` has ended.
    """
    contents = ArchiveContents(
        format="atoll-sandbox",
        version=3,
        name=record.spec.name,
        checkpoint=record.checkpoint.label,
        exported_at=now(),
        image=BaseImageRef(reference=record.spec.image, digest=record.image_digest),
        layers=tuple(ArchiveLayer(trees=tuple(each.key for each in record.base)) for _ in record.layers),
        user=record.user,
        cwd=record.cwd,
        **record.spec.model_dump(include={"limits", "env", "runtime", "pause_after_s", "sudo"}),
    )
    manifest = contents.model_dump_json(exclude_none=True)
    if len(manifest.encode()) > worker.MANIFEST_LIMIT_BYTES:
        raise SandboxError(
            f"the sandbox cannot be exported: its description, with its environment, has more than "
            f"{worker.MANIFEST_LIMIT_BYTES} bytes"
        )
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
            packer = await programs.start_worker(driver, "pack", writing)
            zstd = await programs.start_zstd(["-q", "-c", "-T0"], reading, fd)
        finally:
            os.close(reading)
            os.close(writing)
        await packer.send(order)
        try:
            end = await packer.until("end", lambda done: _report(progress, f"exporting {contents.name}", done))
        except _WorkerFailed as failure:
            await zstd.wait()
            _check_writer(zstd)
            raise SandboxError(f"the sandbox could not be exported: {failure.message}") from failure
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
        without_mounts=tuple(each.mount.target for each in record.mounts),
        without_processes=record.checkpoint.with_memory,
    )


def _check_writer(zstd: anyio.abc.Process) -> None:
    if zstd.returncode == -signal.SIGPIPE:
        raise BrokenPipeError
    if zstd.returncode != 0:
        raise SandboxError(
            "the file could not be written; its disk may be full", hint=f"zstd exited with {zstd.returncode}"
        )


@contextlib.asynccontextmanager
async def _written(target: ArchiveFile) -> AsyncIterator[int]:
    """A descriptor for a program to write to. A path gets its new file when the context ends without an error."""
    if not isinstance(target, str | Path):
        fd = _descriptor(target)
        if fd is not None:
            target.flush()
            yield fd
            return
        reading, fd = _pipe()
        copier = _PipeThread(lambda: os.read(reading, _CHUNK_BYTES), target.write, reading)
        try:
            yield fd
        finally:
            os.close(fd)
        await copier.done()
        return
    path = Path(target)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a directory; give the path of a file", str(path))
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


class OpenArchive:
    """A file that is being imported. Made by `opened`."""

    def __init__(
        self,
        contents: ArchiveContents,
        worker: _Worker,
        zstd: anyio.abc.Process,
        layers: Layers,
        limit_bytes: int | None,
        on_progress: Callable[[int], None],
    ) -> None:
        self.contents = contents
        self._worker = worker
        self._zstd = zstd
        self._layers = layers
        self._limit_bytes = limit_bytes
        self._on_progress = on_progress
        self.made: list[Path] = []

    async def unpack(self, base: Iterable[Filesystem]) -> tuple[LayerRef, ...]:
        """Unpack the file into new layers above `base`. When it returns, every byte of the file was checked.

        Raises:
            ArchiveRefused: its content is not what `export` writes, or too large.
        """
        disk = os.statvfs(self._layers.path(""))
        limit = self._limit_bytes
        if limit is None:
            limit = disk.f_bavail * disk.f_frsize * _FREE_DISK_PART[0] // _FREE_DISK_PART[1]
        keys = [filesystem.key for filesystem in base]
        imported = []
        places: dict[str, str | None] = {}
        for number, layer in enumerate(self.contents.layers):
            id = self._layers.new()
            self.made.append(self._layers.path(id))
            imported.append(LayerRef(id=id, owner=IMPORTED_IDS))
            places |= {_tree(number, key): None for key in layer.trees}
            places |= {_tree(number, key): str(self.made[-1] / "upper" / key) for key in keys}
        await self._worker.send(
            {
                "places": places,
                "owner": IMPORTED_IDS,
                "limit_bytes": limit,
                "entry_limit": disk.f_favail * _FREE_DISK_PART[0] // _FREE_DISK_PART[1] if disk.f_files else limit,
                "lock": str(self._layers.lock_path),
            }
        )
        await self._worker.until("end", self._on_progress)
        if await self._zstd.wait() != 0:  # zstd has its own checksum
            raise _WorkerFailed("its compressed data is damaged", reason="checksum")
        return tuple(imported)


@contextlib.asynccontextmanager
async def opened(
    source: ArchiveFile,
    layers: Layers,
    driver: Driver,
    *,
    limit_bytes: int | None = None,
    progress: ProgressCallback | None = None,
) -> AsyncIterator[OpenArchive]:
    """Read a file up to its description. Call it with the lock of the layers held.

    Unpacked layers are removed when the context ends with an error.

    Raises:
        ArchiveRefused: it is not an exported sandbox, or it is damaged.
    """
    async with _read(source) as fd, _Programs() as programs:
        reading, writing = _pipe()
        try:
            zstd = await programs.start_zstd(["-q", "-d", "-c"], fd, writing)
            unpacker = await programs.start_worker(driver, "unpack", reading)
        finally:
            os.close(reading)
            os.close(writing)

        def on_progress(done: int) -> None:
            read_bytes, total = _position(fd)
            _report(progress, "importing", done if read_bytes is None else read_bytes, total)

        made: list[Path] = []
        try:
            contents = _parse(await unpacker.until("manifest"))
            opened = OpenArchive(contents, unpacker, zstd, layers, limit_bytes, on_progress)
            made = opened.made
            yield opened
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                refusal = await _refusal(error, zstd) if isinstance(error, _WorkerFailed) else None
                await programs.end()
                await driver.layers.remove(*made)
            if refusal is None:
                raise
            raise refusal from None


async def _refusal(failure: _WorkerFailed, zstd: anyio.abc.Process) -> AtollError:
    """The error of an import for a failure of the worker."""
    if failure.reason is None and failure.number in (errno.ENOSPC, errno.EDQUOT):
        return ArchiveRefused(
            "the file cannot be imported: the disk of the state directory is full", reason="disk_full"
        )
    if failure.reason is None:
        return SandboxError(f"the file could not be imported: {failure.message}")
    if failure.reason == "truncated":
        with anyio.move_on_after(5):
            await zstd.wait()
        if zstd.returncode:
            return ArchiveRefused(
                "the file cannot be imported: it is truncated, damaged, or not compressed with zstd",
                reason="truncated",
            )
    hint = None
    if failure.reason == "too_large":
        hint = "raise the limit with limit_bytes, or `atoll import --limit`"
    return ArchiveRefused(f"the file cannot be imported: {failure.message}", hint=hint, reason=failure.reason)


def _parse(line: object) -> ArchiveContents:
    text = str(line)
    try:
        seen = _ContentsVersion.model_validate_json(text)
        if seen.format == worker.FORMAT and seen.version not in worker.VERSIONS:
            known = ", ".join(map(str, worker.VERSIONS))
            raise ArchiveRefused(
                f"the file cannot be imported: its format version is {seen.version}, and this Atoll reads {known}; "
                "upgrade Atoll to import it",
                reason="version",
            )
        return ArchiveContents.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])[:100]
        raise ArchiveRefused(
            f"the file cannot be imported: its description is malformed (field {where!a})",
            hint=str(error)[:_MAX_OUTPUT_CHARS],
            reason="malformed",
        ) from None


def find_base_image(images: ImageStore, origin: BaseImageRef) -> tuple[str, ImageLayers]:
    """The image on this machine for an imported sandbox, if the caller names none.

    A file cannot make the engine use a path or fetch an image: its image must be present.

    Raises:
        ImageUnavailable: it is not present.
    """
    found = images.find(origin.digest, origin.reference)
    if found is not None:
        return found
    kind = origin.reference.partition(":")[0]
    if kind == "dir":
        raise ImageUnavailable(
            f"the image of the sandbox is {origin.reference!a}, a directory of the machine that exported it; "
            "name the image or directory to use here (image=, or --image)",
            reason="not_found",
        )
    if kind in get_args(PathKind):
        mend = "copy that file to this machine and import it with 'atoll images import FILE NAME'"
        wanted = ascii(origin.reference)
    else:
        reference = ImageReference.parse(origin.reference)
        wanted = reference.short
        mend = f"fetch it with 'atoll images pull {reference.repository}@{origin.digest}'"
    raise ImageUnavailable(
        f"the image of the sandbox, {wanted} with the digest {origin.digest}, is not present; "
        f"{mend}, or name another (image=, or --image)",
        reason="not_found",
        digest=origin.digest,
    )


def allowed(asked: Limits, usual: Limits) -> Limits:
    """The limits that a file asks for, unless they are wider than the defaults of a new sandbox.

    Raises:
        InvalidRequest: they are wider.
    """
    for name, what in (("memory_bytes", "bytes of memory"), ("pids", "processes")):
        wanted, most = getattr(asked, name), getattr(usual, name)
        if wanted is not None and most is not None and wanted > most:
            raise InvalidRequest(
                f"the file asks for {wanted} {what}, more than the default of {most}; "
                "set the limit explicitly (limits=, or --memory and --pids)"
            )
    return asked


@contextlib.asynccontextmanager
async def _read(source: ArchiveFile) -> AsyncIterator[int]:
    """A descriptor for a program to read from."""
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
    copier = _PipeThread(lambda: source.read(_CHUNK_BYTES), lambda data: _write_all(writing, data), writing)
    try:
        yield fd
    finally:
        os.close(fd)
    await copier.done()


def _position(fd: int) -> tuple[int | None, int | None]:
    """The bytes of a file that have been read, and its size. Neither is known for a pipe."""
    try:
        return os.lseek(fd, 0, os.SEEK_CUR), os.fstat(fd).st_size
    except OSError:
        return None, None


# --- the two programs ---------------------------------------------------------------------------------------------


class _WorkerFailed(Exception):
    """The worker has failed: its input is invalid (`reason`), or a system call failed (`number`, an errno)."""

    def __init__(self, message: str, reason: str | None = None, number: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.number = number


class _Worker:
    """A running `worker.py`."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self._process = process
        self._orders = cast("ByteSendStream", process.stdin)
        self._lines = BufferedByteReceiveStream(cast("ByteReceiveStream", process.stdout))

    async def send(self, order: object) -> None:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self._orders.send(json.dumps(order).encode() + b"\n")  # if it has ended, `until` raises why

    async def until(self, key: str, on_progress: Callable[[int], None] | None = None) -> object:
        """The value of the first line with `key`. Until then `on_progress` is called with the bytes that are done.

        Raises:
            _WorkerFailed: it failed, or ended without such a line.
        """
        output: list[str] = []
        while True:
            try:
                line = await self._lines.receive_until(b"\n", _MAX_LINE_BYTES)
            except (anyio.IncompleteRead, anyio.EndOfStream, anyio.DelimiterNotFound):
                await self._process.wait()
                text = "\n".join(output)[-_MAX_OUTPUT_CHARS:] or f"the worker exited with {self._process.returncode}"
                raise _WorkerFailed(text) from None
            try:
                answer = json.loads(line)
            except ValueError:
                output.append(line.decode(errors="replace"))  # from the keeper, or from Python
                continue
            if "refused" in answer:
                raise _WorkerFailed(answer["refused"], reason=answer["reason"])
            if "failed" in answer:
                raise _WorkerFailed(answer["failed"], number=answer["errno"])
            if "done" in answer and on_progress is not None:
                on_progress(answer["done"])
            if key in answer:
                return answer[key]


class _Programs:
    """The programs that were started. They are killed when the context ends."""

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
        program = [sys.executable, "-I", "-S", "-B", "-X", "utf8", worker.__file__, verb, str(fd)]
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
        # In a session of their own: signals from a terminal are for this process, which ends them.
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
    with contextlib.suppress(OSError):  # refused if the user's quota of pipe memory is used up; that is only slower
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return reading, writing


class _PipeThread:
    """A thread that copies bytes between a program's pipe and a file object without a descriptor."""

    def __init__(self, read: Callable[[], bytes], write: Callable[[bytes], object], fd: int) -> None:
        self._read, self._write, self._fd = read, write, fd
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    async def done(self) -> None:
        await anyio.to_thread.run_sync(self._thread.join)
        if self._failure is not None:
            raise self._failure

    def _copy(self) -> None:
        try:
            while chunk := self._read():
                self._write(chunk)
        except BrokenPipeError:
            pass  # the program has ended, and its exit status says why
        except BaseException as error:  # noqa: BLE001 - of the caller's file object, raised by `done`
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


def _report(progress: ProgressCallback | None, what: str, done: int, total: int | None = None) -> None:
    if progress is not None:
        progress(what, done, total)


def _tree(number: int, key: str) -> str:
    return f"layers/{number}/{key}"
