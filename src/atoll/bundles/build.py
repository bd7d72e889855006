"""Building a bundle: its files and packages in a sandbox, kept as a checkpoint that workspaces begin from.

Owns what is installed where, under which policy, and that each bundle is built once for an image and a runtime: a
checkpoint's label is made of the three. It has no secrets and no policy in it, and is there whole or not at all: of a
build that is interrupted a sandbox is left, which the next build or the end of its lifetime removes, and nothing else.
Not here: the sandbox of a workspace (`workspace.py`), and when a bundle is deleted (`server/bundles.py`).
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from itertools import islice
from pathlib import Path

import anyio
import anyio.to_thread

from atoll.bundles.archive import check_digest, read_bundle, repack
from atoll.bundles.dispatch import BUNDLE_DIRECTORY
from atoll.bundles.manifest import BundleManifest
from atoll.contract.errors import (
    BundleFailed,
    CheckpointNotFound,
    DiskFull,
    ExecTimeout,
    SandboxNotFound,
    Unenforceable,
)
from atoll.contract.model import Limits, RuntimeName
from atoll.contract.network import REGISTRIES, NetworkPolicy
from atoll.drivers import locks
from atoll.runtime.interface import Engine
from atoll.runtime.sandbox import Sandbox
from atoll.tools.tool import StrictModel

BUILD_TIMEOUT_S = 600.0
"""Of one step of a build: the packages of Python, those of npm, the command."""
BUILD_LIFETIME_S = 3600.0
"""After which the sandbox of a build ends, whatever became of who began it."""
VENV = f"{BUNDLE_DIRECTORY}/venv"
NODE = f"{BUNDLE_DIRECTORY}/node"
_MAX_SHOWN_CHARS = 2000
"""Of the output of a failed step, in the message."""
_CHUNKS = 64
_LABEL = "bundle-"

Admission = Callable[[str, Limits], AbstractAsyncContextManager[object]]
"""A context in which a sandbox of this name may be made, with these limits in force."""
OnBuildOutput = Callable[[bytes], None]


class BuildSpec(StrictModel):
    """What a bundle is built with."""

    path: Path
    sha256: str
    image: str
    runtime: RuntimeName
    limits: Limits = Limits()
    network: NetworkPolicy | None = NetworkPolicy(allow=REGISTRIES)
    """The policy while packages are installed and the command runs. Unset: no connection leaves the sandbox."""


async def label_of(engine: Engine, spec: BuildSpec) -> str:
    """The label of the checkpoint of a built bundle, whether it has been built or not. An image that is not on the
    machine is fetched.

    Raises:
        ImageUnavailable: it cannot be.
    """
    image = await engine.images.resolve(spec.image)
    base = hashlib.sha256(f"{image.digest} {spec.runtime}".encode()).hexdigest()
    return f"{_label_prefix(spec.sha256)}{base[:12]}"


async def built_sizes(engine: Engine) -> dict[str, int]:
    """What the checkpoints of built bundles take on the disk, by their labels."""
    found = await engine.checkpoints()
    return {each.label: each.size_bytes or 0 for each in found if each.label and each.label.startswith(_LABEL)}


async def remove_built(engine: Engine, sha256: str) -> int:
    """Remove what was built of a bundle. Returns how many checkpoints there were."""
    labelled = [each for each in await engine.checkpoints() if (each.label or "").startswith(_label_prefix(sha256))]
    for each in labelled:
        with suppress(CheckpointNotFound):
            await engine.delete_checkpoint(each.id)
    for lock in (engine.state_dir / "locks").glob(f"{engine.namespace}-{_label_prefix(sha256)}*"):
        lock.unlink(missing_ok=True)
    return len(labelled)


def _label_prefix(sha256: str) -> str:
    return f"{_LABEL}{sha256[:32]}-"


async def build(
    engine: Engine, spec: BuildSpec, label: str, on_output: OnBuildOutput, *, admit: Admission | None = None
) -> None:
    """Build a bundle, unless it has been built meanwhile. Of several that build the same, one does.

    Raises:
        BundleFailed: the archive is invalid, or a step failed; the message has the end of what it printed.
        AtollError: the sandbox could not be made.
    """
    directory = engine.state_dir / "locks"
    directory.mkdir(mode=0o700, exist_ok=True)
    async with locks.locked(directory / f"{engine.namespace}-{label}", None, "building a bundle"):
        if any(each.label == label for each in await engine.checkpoints()):
            return
        contents = await read_bundle(spec.path)
        check_digest(contents.sha256, spec.sha256)
        name = f"{_LABEL}build-{hashlib.sha256(label.encode()).hexdigest()[:16]}"
        with suppress(SandboxNotFound):  # of a process that was killed
            await engine.destroy(name)
        async with _sandbox(engine, name, spec, contents.manifest, admit) as sandbox:
            await sandbox.files.mkdir(BUNDLE_DIRECTORY)
            await push(sandbox, BUNDLE_DIRECTORY, repack(spec.path, spec.sha256))
            await _install(sandbox, contents.manifest, on_output)
            # The checkpoint has neither the policy nor processes.
            await engine.set_network(sandbox.name, None)
            await engine.shutdown(sandbox.name)
            await engine.checkpoint(sandbox.name, label)


@asynccontextmanager
async def _sandbox(
    engine: Engine, name: str, spec: BuildSpec, manifest: BundleManifest, admit: Admission | None
) -> AsyncIterator[Sandbox]:
    needs_network = bool(manifest.requirements or manifest.node_modules or manifest.build_command)
    limits = engine.effective_limits(spec.limits, spec.runtime)
    async with nullcontext() if admit is None else admit(name, limits):
        try:
            sandbox = await engine.create(
                name,
                image=spec.image,
                runtime=spec.runtime,
                limits=spec.limits,
                network=spec.network if needs_network else None,
                user="user",
                ttl_s=BUILD_LIFETIME_S,
            )
        except Unenforceable as error:
            if not needs_network or REGISTRIES not in error.message:
                raise
            raise _failed(f"packages cannot be installed on this machine: {error.message}") from error
    try:
        yield sandbox
    finally:
        with anyio.CancelScope(shield=True), suppress(SandboxNotFound):
            await engine.destroy(name)


async def _install(sandbox: Sandbox, manifest: BundleManifest, on_output: OnBuildOutput) -> None:
    if manifest.requirements:
        wanted = "".join(f"{each}\n" for each in manifest.requirements)
        await sandbox.files.write_text(f"{BUNDLE_DIRECTORY}/requirements.lock", wanted)
        await _step(sandbox, "installing the requirements", _PIP, on_output)
    if manifest.node_modules:
        modules = " ".join(map(shlex.quote, manifest.node_modules))
        command = f"npm install --global --prefix {NODE} --no-audit --no-fund --no-update-notifier -- {modules}"
        await _step(sandbox, "installing the node_modules", command, on_output)
    if manifest.build_command:
        command = f'PATH="{VENV}/bin:{NODE}/bin:$PATH"; export PATH\n{manifest.build_command}'
        await _step(sandbox, "the build_command", command, on_output)


_PIP = f"""
set -e
python3 -m venv --system-site-packages --without-pip {VENV}
if python3 -m pip --version > /dev/null 2>&1; then
    pip="python3 -m pip --python {VENV}/bin/python"
else
    python3 -m venv --system-site-packages {VENV}
    pip="{VENV}/bin/python -m pip"
fi
$pip install --no-input --disable-pip-version-check --no-cache-dir --no-warn-script-location -r requirements.lock
"""
"""pip of the image installs into the environment where it can (since version 22.3): making another takes seconds."""


async def _step(sandbox: Sandbox, what: str, command: str, on_output: OnBuildOutput) -> None:
    try:
        done = await sandbox.exec_bytes(
            ["sh", "-c", command],
            cwd=BUNDLE_DIRECTORY,
            merge_stderr=True,
            timeout_s=BUILD_TIMEOUT_S,
            output_limit_bytes=1 << 16,
            on_stdout=on_output,
        )
    except ExecTimeout:
        raise _failed(f"{what} did not end within {BUILD_TIMEOUT_S:g} s") from None
    if done.exit_code == 0:
        return
    said = done.stdout.decode("utf-8", "replace").strip()[-_MAX_SHOWN_CHARS:]
    why = "used up its memory" if done.out_of_memory else f"failed with exit code {done.exit_code}"
    raise _failed(f"{what} {why}:\n{said}" if said else f"{what} {why}, and printed nothing")


def _failed(message: str) -> BundleFailed:
    return BundleFailed("bundle_build_failed", message)


async def push(sandbox: Sandbox, path: str, tar: Iterator[bytes]) -> None:
    """Unpack a tar into a directory of a sandbox.

    Raises:
        BundleFailed: it has no room for it.
    """
    try:
        await sandbox.files.tar_in(path, chunks(tar))
    except DiskFull:
        raise _failed("the files of the bundle do not fit on the sandbox's disk") from None


async def chunks(tar: Iterator[bytes]) -> AsyncIterator[bytes]:
    """The pieces of `tar`, read in a thread."""
    while piece := await anyio.to_thread.run_sync(lambda: b"".join(islice(tar, _CHUNKS))):
        yield piece
