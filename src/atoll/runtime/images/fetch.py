"""Fetching and unpacking images with skopeo and umoci.

Owns the two programs, the meaning of their error messages, and the OCI layout between them. They talk to registries and
handle hostile archives in processes of their own. Their progress is measured from outside: bytes are counted as they
arrive, so that progress is real, and an image that is too large is stopped at the limit, before the disk is full.

Not here: the image store (`store.py`), which provides a scratch directory and makes the result visible or removes it.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import platform
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Literal, NamedTuple, TypeVar, cast

import anyio
from anyio import from_thread, to_thread
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atoll.contract.errors import ImageUnavailable, InvalidRequest
from atoll.contract.names import check_env
from atoll.settings import program_environment

ProgressCallback = Callable[[str, int, int | None], None]
"""Called with a description of the step, the bytes done, and the total if that is known."""

INSTALL_HINT = "install the programs that fetch and unpack images: apt install skopeo umoci"

_POLL_S = 0.1
_INSPECT_TIMEOUT_S = 60.0
_STALL_TIMEOUT_S = 180.0
_JSON_LIMIT_BYTES = 8 * 1024 * 1024
_ERROR_LIMIT_BYTES = 16 * 1024
_SPARE_BYTES = 256 * 1024 * 1024
_SPARE_INODES = 10_000
_CHUNK_BYTES = 1024 * 1024
_ENV_LIMIT = 1000

_ROOT_NAMES = ("bin", "boot", "dev", "etc", "home", "lib", "lib64", "opt", "root", "sbin", "srv", "usr", "var")
_NAMES_LIMIT = 10_000

ImageArchiveKind = Literal["rootfs", "docker-archive", "oci-archive"]


class Scratch(NamedTuple):
    """A directory for one piece of work, and the descriptor that holds its lock."""

    path: Path
    lock: int
    """Passed to every program that works in the directory: the lock is held until the last of them has ended."""


class ImageConfig(BaseModel):
    """An image's configuration. It is untrusted input: all other fields are ignored."""

    model_config = ConfigDict(frozen=True)

    class ProcessConfig(BaseModel):
        model_config = ConfigDict(frozen=True)

        environment: tuple[str, ...] | None = Field(default=None, alias="Env", max_length=_ENV_LIMIT)
        user: str | None = Field(default=None, alias="User")
        working_directory: str | None = Field(default=None, alias="WorkingDir")
        entrypoint: tuple[str, ...] | None = Field(default=None, alias="Entrypoint")
        command: tuple[str, ...] | None = Field(default=None, alias="Cmd")

    created: datetime | None = None
    config: ProcessConfig | None = None

    @property
    def process(self) -> ProcessConfig:
        return self.config or self.ProcessConfig()

    @property
    def env(self) -> dict[str, str]:
        """Its environment, without variables that are not valid."""
        found: dict[str, str] = {}
        for line in self.process.environment or ():
            name, _, value = line.partition("=")
            try:
                found.update(check_env({name: value}))
            except InvalidRequest:
                continue
        return found


class _Descriptor(BaseModel):
    class Platform(BaseModel):
        architecture: str = ""
        os: str = ""

    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    size: int = Field(ge=0)
    platform: Platform | None = None
    annotations: dict[str, str] | None = None


class _ImageManifest(BaseModel):
    """A manifest, or an index of manifests for several platforms."""

    manifests: tuple[_Descriptor, ...] = ()
    config: _Descriptor | None = None
    layers: tuple[_Descriptor, ...] = ()


class RemoteImage(NamedTuple):
    """An image in a registry, as it was found."""

    repository: str
    digest: str
    """Of the manifest for this machine's platform, or of the index, if skopeo is to choose from it."""
    size_bytes: int | None
    """The size of the download. None: it is not known before."""


class Fetcher:
    """Runs skopeo and umoci. `max_bytes` limits what is downloaded, and what is unpacked."""

    def __init__(self, *, rootless: bool, max_bytes: int) -> None:
        self._rootless = rootless
        self._max_bytes = max_bytes

    async def inspect(self, scratch: Scratch, repository: str, selector: str, name: str) -> RemoteImage:
        """Ask the registry for the image `repository` with `selector` (`:tag` or `@digest`).

        Raises:
            ImageUnavailable: the registry does not have it, or cannot be reached.
        """
        raw = await self._inspect_raw(scratch, repository, selector, name)
        manifest = _parse(_ImageManifest, raw, name)
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        if manifest.manifests:
            ours = [each for each in manifest.manifests if _is_ours(each)]
            if len(ours) != 1:  # none, or several variants of one architecture: skopeo chooses
                return RemoteImage(repository, digest, None)
            digest = ours[0].digest
            manifest = _parse(_ImageManifest, await self._inspect_raw(scratch, repository, f"@{digest}", name), name)
        return RemoteImage(repository, digest, sum(layer.size for layer in manifest.layers))

    async def download(
        self, scratch: Scratch, remote: RemoteImage, name: str, progress: ProgressCallback | None
    ) -> None:
        """Copy the image that `inspect` has found into an OCI layout in `scratch`.

        Raises:
            ImageUnavailable: the registry failed, or it is too large.
        """
        self._check_room(scratch, remote.size_bytes, name)
        source = f"docker://{remote.repository}@{remote.digest}"
        arguments = [*_tls("--src-tls-verify", remote.repository), source]
        await self._copy(scratch, arguments, remote.size_bytes, name, progress)

    async def load(
        self, scratch: Scratch, kind: str, source: Path, tag: str, name: str, progress: ProgressCallback | None
    ) -> str:
        """Copy an image from a file or a directory into an OCI layout in `scratch`; returns the manifest's digest.

        Raises:
            ImageUnavailable: it holds no image, or more than one.
        """
        # skopeo reads a colon in a path as the beginning of a tag, so it gets a path without one.
        os.symlink(source.absolute(), scratch.path / "source")
        await self._copy(scratch, [f"{kind}:source{tag}"], None, name, progress)
        return _layout_manifest(scratch, name).digest

    async def lay_out(self, scratch: Scratch, source: Path, name: str, progress: ProgressCallback | None) -> None:
        """Make an OCI layout of one layer in `scratch` from the tar of a root file system, compressed or not.

        Raises:
            ImageUnavailable: it cannot be read, or is too large unpacked.
        """
        await to_thread.run_sync(self._lay_out, scratch, source, name, progress)

    async def unpack(self, scratch: Scratch, name: str, progress: ProgressCallback | None) -> ImageConfig:
        """Unpack the OCI layout in `scratch` into the new directory `rootfs` beside it.

        Raises:
            ImageUnavailable: it cannot be unpacked, or is too large.
        """
        what = f"unpacking {name}"

        def watch(pid: int) -> None:
            written = _written_bytes(pid)
            self.check_size(written, name)
            self._check_room(scratch, 0, name)
            if progress is not None and written:
                progress(what, written, None)

        if progress is not None:
            progress(what, 0, None)
        rootless = ["--rootless"] if self._rootless else []
        command = ["umoci", "--log=error", "raw", "unpack", *rootless, "--image", "layout:image", "rootfs"]
        code, _, errors = await _run(command, scratch, watch)
        if code != 0:
            raise _unpack_failure(name, errors)
        return _layout_configuration(scratch, name)

    def check_size(self, size_bytes: int, name: str) -> None:
        """Check the size of an image.

        Raises:
            ImageUnavailable: it is too large.
        """
        if size_bytes > self._max_bytes:
            raise ImageUnavailable(
                f"the image {name} is too large: an image may have at most {self._max_bytes // 2**20} MiB",
                reason="too_large",
                image=name,
                limit_bytes=self._max_bytes,
            )

    async def _inspect_raw(self, scratch: Scratch, repository: str, selector: str, name: str) -> bytes:
        deadline = time.monotonic() + _INSPECT_TIMEOUT_S

        def watch(_: int) -> None:
            if time.monotonic() > deadline:
                raise ImageUnavailable(
                    f"the image {name} cannot be fetched: its registry timed out after {_INSPECT_TIMEOUT_S:.0f} s",
                    reason="unreachable",
                    image=name,
                )

        command = ["skopeo", "inspect", "--raw", *_tls("--tls-verify", repository), f"docker://{repository}{selector}"]
        code, output, errors = await _run(command, scratch, watch)
        if code != 0:
            raise _fetch_failure(name, errors)
        return output

    async def _copy(
        self, scratch: Scratch, source: Sequence[str], total: int | None, name: str, progress: ProgressCallback | None
    ) -> None:
        what = f"fetching {name}"
        most = 0
        moved = time.monotonic()

        def watch(_: int) -> None:
            nonlocal most, moved
            done = _bytes_in(scratch.path)
            if done > most:
                most, moved = done, time.monotonic()
            elif time.monotonic() > moved + _STALL_TIMEOUT_S:
                raise ImageUnavailable(
                    f"the image {name} cannot be fetched: no data was received for {_STALL_TIMEOUT_S:.0f} s",
                    reason="unreachable",
                    image=name,
                )
            self.check_size(most, name)
            self._check_room(scratch, 0, name)
            if progress is not None:
                progress(what, most if total is None else min(most, total), total)

        code, _, errors = await _run(["skopeo", "copy", "--quiet", *source, "oci:layout:image"], scratch, watch)
        if code != 0:
            raise _fetch_failure(name, errors)
        if progress is not None and total is not None:
            progress(what, total, total)

    def _lay_out(self, scratch: Scratch, source: Path, name: str, progress: ProgressCallback | None) -> None:
        blobs = scratch.path / "layout/blobs/sha256"
        blobs.mkdir(parents=True)
        layer = blobs / "layer"
        content = hashlib.sha256()
        size = 0
        with _uncompressed(source, name) as (stream, is_plain), open(layer, "wb") as target:
            for chunk in _chunks(stream, name):
                from_thread.check_cancelled()
                content.update(chunk)
                size += len(chunk)
                self.check_size(size, name)
                if not is_plain:  # an uncompressed file is read in place
                    target.write(chunk)
                    self._check_room(scratch, 0, name)
                if progress is not None:
                    from_thread.run_sync(progress, f"reading {name}", size, None)
        digest = content.hexdigest()
        if is_plain:
            layer.unlink()
            os.symlink(source.absolute(), blobs / digest)
        else:
            layer.rename(blobs / digest)
        _write_layout(scratch.path / "layout", f"sha256:{digest}", size)

    def _check_room(self, scratch: Scratch, needed_bytes: int | None, name: str) -> None:
        self.check_size(needed_bytes or 0, name)
        disk = os.statvfs(scratch.path)
        free = disk.f_bavail * disk.f_frsize
        # An unpacked image is about two and a half times as large as a packed one, and both exist for a while.
        if free < _SPARE_BYTES + (needed_bytes or 0) * 7 // 2 or (disk.f_files and disk.f_favail < _SPARE_INODES):
            raise ImageUnavailable(
                f"the image {name} cannot be fetched: the disk of the image store is too full",
                hint=f"{free // 2**20} MiB and {disk.f_favail} inodes are free on the disk of {scratch.path.parent}",
                reason="disk_full",
                image=name,
            )


def kind_of_archive(source: Path) -> ImageArchiveKind:
    """The kind of a tar, by the names in it: an image saved by Docker or by an OCI tool, or a root file system.

    Runs in a thread. Reads until the first name that decides.

    Raises:
        ImageUnavailable: it is not a tar, or compressed with an unknown method.
    """
    found: ImageArchiveKind = "rootfs"
    with _uncompressed(source, str(source)) as (stream, _):
        try:
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                for count, member in enumerate(tar):
                    from_thread.check_cancelled()
                    path = member.name.removeprefix("./").rstrip("/")
                    if path in ("oci-layout", "index.json"):
                        return "oci-archive"
                    if path == "manifest.json":
                        return "docker-archive"
                    if path.partition("/")[0] in _ROOT_NAMES or count > _NAMES_LIMIT:
                        break
        except (tarfile.TarError, OSError, EOFError, lzma.LZMAError) as error:
            raise _unreadable(str(source)) from error
    return found


def digest_of(source: Path) -> str:
    """The sha256 of a file. Runs in a thread."""
    content = hashlib.sha256()
    with open(source, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            from_thread.check_cancelled()
            content.update(chunk)
    return f"sha256:{content.hexdigest()}"


# --- running the programs -------------------------------------------------------------------------------------


async def _run(command: Sequence[str], scratch: Scratch, watch: Callable[[int], None]) -> tuple[int, bytes, str]:
    """Run a program in `scratch`: its exit code, its output, and the end of its error output.

    `watch` is called ten times a second with its process id; when it raises, or on cancellation, the program is
    killed and has ended before this returns.

    Raises:
        ImageUnavailable: the program is not installed.
    """
    output, errors = scratch.path / "output", scratch.path / "errors"
    env = {**program_environment(), "LC_ALL": "C", "TMPDIR": str(scratch.path)}
    with ExitStack() as files:
        try:
            process = await anyio.open_process(
                command,
                stdin=subprocess.DEVNULL,
                stdout=files.enter_context(_written(output)),
                stderr=files.enter_context(_written(errors)),
                cwd=scratch.path,
                env=env,
                pass_fds=(scratch.lock,),
            )
        except FileNotFoundError:
            raise ImageUnavailable(
                f"images cannot be fetched on this machine: the program {command[0]} is not installed",
                hint=INSTALL_HINT,
                reason="tool_missing",
                tool=command[0],
            ) from None
    try:
        while process.returncode is None:
            with anyio.move_on_after(_POLL_S):
                await process.wait()
            watch(process.pid)
            if output.stat().st_size > _JSON_LIMIT_BYTES or errors.stat().st_size > _JSON_LIMIT_BYTES:
                break
    finally:
        if process.returncode is None:
            process.kill()
        with anyio.CancelScope(shield=True):
            await process.aclose()
    code = -1 if process.returncode is None else process.returncode
    return code, _read_capped(output), _read_capped(errors)[-_ERROR_LIMIT_BYTES:].decode(errors="replace")


def _written(path: Path) -> IO[bytes]:
    return open(path, "wb")


def _written_bytes(pid: int) -> int:
    """The bytes that a process has written to any file: for umoci, what it has unpacked."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            return int(dict(line.split(b": ") for line in file.read().splitlines())[b"wchar"])
    except (OSError, KeyError):  # it has just ended
        return 0


def _bytes_in(directory: Path) -> int:
    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _tls(option: str, repository: str) -> list[str]:
    """Plain HTTP and self-signed certificates are allowed for registries on this machine only."""
    host = repository.partition("/")[0]
    name = host[: host.index("]") + 1] if host.startswith("[") else host.partition(":")[0]
    return [f"{option}=false"] if name in ("localhost", "127.0.0.1", "[::1]") else []


# --- error messages -------------------------------------------------------------------------------------------

_FETCH_FAILURES: Mapping[str, tuple[str, str]] = {
    r"no such host|connection refused|connection reset|timeout|unreachable|no route|dial tcp|unexpected EOF": (
        "unreachable",
        "its registry cannot be reached",
    ),
    r"no image found in (manifest list|image index)": (
        "no_platform",
        "it has no variant for this machine's architecture",
    ),
    r"manifest unknown|name unknown|not found|no such file|does not exist|repository name not known": (
        "not_found",
        "its registry does not have it",
    ),
    r"unauthorized|denied|authentication required|no basic auth credentials|status: 403": (
        "unauthorised",
        "its registry requires a login, or does not have it",
    ),
    r"too ?many ?requests": ("rate_limited", "its registry limits the rate of requests; try again later"),
    r"certificate|tls:|HTTP response to HTTPS": ("insecure", "the certificate of its registry cannot be verified"),
    r"trust policy|policy\.json|rejected by policy|signature": ("policy", "this machine's signature policy rejects it"),
    r"no space left": ("disk_full", "the disk of the image store is full"),
    r"more than one image|multiple images|choose": ("ambiguous", "there is more than one image in it"),
}
"""Patterns in skopeo's error output, of which the first match counts: `details["reason"]`, and the message."""

_FETCH_HINTS = {
    "unauthorised": "log in with: skopeo login REGISTRY",
    "insecure": "only registries on this machine may be used without a trusted certificate",
    "policy": "see /etc/containers/policy.json, which comes with: apt install skopeo",
    "unreachable": "check the network and the proxy settings of this machine",
}


def _fetch_failure(name: str, errors: str) -> ImageUnavailable:
    text = errors.strip()
    reason, cause = "failed", "skopeo failed"
    for pattern, meaning in _FETCH_FAILURES.items():
        if re.search(pattern, text, re.IGNORECASE):
            reason, cause = meaning
            break
    hint = "; ".join(part for part in (_FETCH_HINTS.get(reason), f"skopeo: {text[-2000:]}") if part)
    return ImageUnavailable(f"the image {name} cannot be fetched: {cause}", hint=hint, reason=reason, image=name)


def _unpack_failure(name: str, errors: str) -> ImageUnavailable:
    full = "no space left" in errors
    cause = "the disk of the image store is full" if full else "its content is malformed"
    return ImageUnavailable(
        f"the image {name} cannot be unpacked: {cause}",
        hint=f"umoci: {errors.strip()[-2000:]}",
        reason="disk_full" if full else "malformed",
        image=name,
    )


def _unreadable(name: str) -> ImageUnavailable:
    return ImageUnavailable(
        f"{name} is not a readable tar; allowed are tars without compression and with gzip, bzip2, xz or zstd",
        reason="malformed",
        image=name,
    )


# --- the OCI layout -------------------------------------------------------------------------------------------

_M = TypeVar("_M", bound=BaseModel)


def _parse(model: type[_M], raw: bytes, name: str) -> _M:
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise ImageUnavailable(
            f"the image {name} cannot be fetched: its manifest or configuration is malformed",
            hint=str(error)[:2000],
            reason="malformed",
            image=name,
        ) from None


def _is_ours(manifest: _Descriptor) -> bool:
    machine = platform.machine()
    architecture = {"x86_64": "amd64", "aarch64": "arm64", "i686": "386", "armv7l": "arm"}.get(machine, machine)
    found = manifest.platform
    return found is not None and (found.os, found.architecture) == ("linux", architecture)


def _layout_manifest(scratch: Scratch, name: str) -> _Descriptor:
    index = _parse(_ImageManifest, _read_capped(scratch.path / "layout/index.json"), name)
    if len(index.manifests) != 1:
        raise ImageUnavailable(
            f"the image {name} cannot be imported: there must be exactly one image in it", reason="ambiguous"
        )
    return index.manifests[0]


def _layout_configuration(scratch: Scratch, name: str) -> ImageConfig:
    manifest = _parse(_ImageManifest, _read_blob(scratch, _layout_manifest(scratch, name)), name)
    if manifest.config is None:
        return ImageConfig()
    return _parse(ImageConfig, _read_blob(scratch, manifest.config), name)


def _read_blob(scratch: Scratch, blob: _Descriptor) -> bytes:
    return _read_capped(scratch.path / "layout/blobs/sha256" / blob.digest.removeprefix("sha256:"))


def _read_capped(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(_JSON_LIMIT_BYTES)


def _write_layout(layout: Path, layer_digest: str, layer_bytes: int) -> None:
    """Write the configuration and the manifest of an image with one layer, which is among the blobs of `layout`."""

    def put(kind: str, content: object) -> dict[str, object]:
        raw = json.dumps(content).encode()
        digest = hashlib.sha256(raw).hexdigest()
        (layout / "blobs/sha256" / digest).write_bytes(raw)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(raw)}

    rootfs = {"type": "layers", "diff_ids": [layer_digest]}
    config = put("config.v1+json", {"architecture": "", "os": "linux", "config": {}, "rootfs": rootfs})
    layer = {"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": layer_digest, "size": layer_bytes}
    manifest = put("manifest.v1+json", {"schemaVersion": 2, "config": config, "layers": [layer]})
    manifest["annotations"] = {"org.opencontainers.image.ref.name": "image"}
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [manifest]}))


# --- compressed files -----------------------------------------------------------------------------------------


@contextmanager
def _uncompressed(source: Path, name: str) -> Iterator[tuple[IO[bytes], bool]]:
    """A file's uncompressed content, and whether the file is uncompressed. Its first bytes decide, not its name."""
    with open(source, "rb") as file:
        magic = file.read(6)
        file.seek(0)
        if magic.startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=file) as unzipped:
                yield cast("IO[bytes]", unzipped), False
        elif magic.startswith(b"BZh"):
            with bz2.BZ2File(file) as unzipped:
                yield unzipped, False
        elif magic.startswith(b"\xfd7zXZ"):
            with lzma.LZMAFile(file) as unzipped:
                yield unzipped, False
        elif magic.startswith(b"\x28\xb5\x2f\xfd"):
            if shutil.which("zstd") is None:
                raise ImageUnavailable(
                    f"{name} cannot be read: the program zstd is not installed",
                    hint="apt install zstd",
                    reason="tool_missing",
                    tool="zstd",
                )
            os.lseek(file.fileno(), 0, os.SEEK_SET)  # the program gets the descriptor, without our buffer
            with subprocess.Popen(
                ["zstd", "-dcq"],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=program_environment(),
            ) as process:
                stream = cast("IO[bytes]", process.stdout)
                try:
                    yield stream, False
                    if not stream.read(1) and process.wait() != 0:
                        raise _unreadable(name)
                finally:
                    process.kill()
        else:
            yield file, True


def _chunks(stream: IO[bytes], name: str) -> Iterator[bytes]:
    try:
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise _unreadable(name) from error
