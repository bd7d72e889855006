"""Volumes: named directories that outlive sandboxes, and that several of them mount at once.

Owns `volumes/<name>.json`, where a volume's files are, its size limit, and when it may be removed; `<name>` has the
namespace in it, unless that is the default (`namespaces.py`). `engine.volumes`.
Not here: how a volume is mounted (`mounts.py`, `drivers/`), and quotas (`drivers/storage.py`).

    volumes/<name>.json           the record: which layer holds the files. It makes the volume exist
    layers/<id>/files             the files; no sandbox writes to anything else of this layer

The files are in a layer because they need what layers have: the file system with quotas, and garbage collection. A
volume whose creation or removal was interrupted is a layer that nothing refers to. On disk, as root, owners begin at
`MOUNT_IDS`, whichever sandbox wrote a file: all of them see the same owners.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import subprocess
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from pathlib import Path

import anyio

from atoll.contract.driver import LayerStore
from atoll.contract.errors import ArchiveRefused, InvalidRequest, SandboxError, VolumeExists, VolumeNotFound
from atoll.contract.model import Volume
from atoll.contract.names import check_name, is_name
from atoll.drivers import storage
from atoll.drivers.keeper_command import MOUNT_IDS, KeeperCommand
from atoll.drivers.locks import locked
from atoll.drivers.machine import PROGRAM_PATH, read_machine
from atoll.runtime.state.layers import Layers
from atoll.runtime.state.namespaces import names_in, split_entry
from atoll.runtime.state.records import StoredRecord, read_record, remove_record, unreadable, write_record
from atoll.runtime.state.status import modified
from atoll.runtime.state.store import StateStore, now

MIN_SIZE_BYTES = 16 * 1024 * 1024
_FILES = "files"
_USER_ID = 1000
"""The user inside that owns a new volume: `user`, unless there is one id only."""
_LOCK_TIMEOUT_S = 600
_TAR = ("tar", "--numeric-owner", "--xattrs", "--acls", "--file=-")


class VolumeRecord(StoredRecord):
    """The record of a volume."""

    VERSION = 1
    layer: str
    """The layer that holds its files."""
    size_bytes: int | None
    created_at: datetime


class VolumeStore:
    """The volumes of one namespace of a state directory."""

    def __init__(self, store: StateStore, layers: Layers, any_layers: Callable[[], LayerStore]) -> None:
        self._store = store
        self._layers = layers
        self._any_layers = any_layers
        self._root = store.state_dir / "volumes"
        self._root.mkdir(mode=0o700, exist_ok=True)

    # ---- public ----

    async def create(self, name: str, size_bytes: int | None = None) -> Volume:
        """Create an empty volume, which belongs to `user` inside. `size_bytes` limits what is written to it.

        Raises:
            InvalidRequest: the name or the size is not allowed.
            VolumeExists: the name is taken.
            Unenforceable: a size cannot be enforced here; `engine.storage` says why.
        """
        await self._create(name, size_bytes)
        return await self.get(name)

    async def list(self) -> builtins.list[Volume]:
        """All volumes, by name. One whose record cannot be read has a `reason`, and can only be removed."""
        users, _ = self._users()
        return [await self._describe(name, users.get(name, ())) for name in self._names()]

    async def get(self, name: str) -> Volume:
        """The volume of this name. What it occupies is counted now.

        Raises:
            VolumeNotFound: there is none.
        """
        if name not in self._names():
            raise VolumeNotFound(name, self._names())
        return await self._describe(name, self._users()[0].get(name, ()))

    async def remove(self, name: str) -> None:
        """Remove a volume and its files.

        Raises:
            VolumeNotFound: there is none.
            InvalidRequest: sandboxes use it, running or not; the message names them.
            SandboxError: the record of a sandbox cannot be read, which may use it.
        """
        async with self._layers.lock(exclusive=True), self._locked():
            if name not in self._names():
                raise VolumeNotFound(name, self._names())
            users, damaged = self._users()
            if found := users.get(name):
                shown = ", ".join(map(repr, found[:8])) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
                raise InvalidRequest(
                    f"the volume {name!r} is mounted by {shown}; destroy them first", name=name, sandboxes=found
                )
            for error in damaged.values():
                raise error
            record = None
            with contextlib.suppress(SandboxError):
                record = self._read(name)
            remove_record(self._path(name))
        if record is not None:
            with anyio.CancelScope(shield=True), self._store.in_progress(record.layer):
                await self._any_layers().remove(self._layers.path(record.layer))

    async def export(self, name: str, path: Path | str) -> int:
        """Write the files of a volume to a tar, with the owners that they have inside. Returns its size in bytes.

        The file appears when it is complete, readable for this user alone. A sandbox that writes to the volume
        meanwhile goes on: a file that changes is in the tar as it was read.

        Raises:
            VolumeNotFound: there is none.
            SandboxError: it could not be read.
            OSError: the path cannot be written to.
        """
        source, target = self.path(name), Path(path)
        partial = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            async with self._layers.lock():  # it is not removed meanwhile
                # 1: a file changed while it was read.
                await self._tar(source, "--create", "--sparse", ".", stdout=file, accepted=(0, 1))
            size = os.fstat(file).st_size
            partial.rename(target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        return size

    async def import_(self, name: str, path: Path | str, size_bytes: int | None = None) -> Volume:
        """Create a volume from a tar, such as `export` writes. When it fails, there is no volume.

        The tar is unpacked by a program that has no rights on the host but those on the volume.

        Raises:
            InvalidRequest, VolumeExists, Unenforceable: as `create`.
            ArchiveRefused: it is not a tar, or does not fit.
            OSError: the path cannot be read.
        """
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            await self._create(name, size_bytes, fill=file)
        finally:
            os.close(file)
        return await self.get(name)

    # ---- for the runtime ----

    def path(self, name: str) -> Path:
        """The directory with the files of a volume, without symlinks in it.

        Raises:
            VolumeNotFound: there is none.
            SandboxError: its record cannot be read.
        """
        record = self._read(name) if is_name(name) else None
        if record is None:
            hint = f"atoll volumes create {name}" if is_name(name) else None
            raise VolumeNotFound(name, self._names(), hint=hint)
        return Path(os.path.realpath(self._layers.path(record.layer))) / _FILES

    def sizes(self) -> dict[str, int | None]:
        """The size limits of all volumes, by name, without counting what they occupy. One whose record cannot be read
        is left out."""
        found: dict[str, int | None] = {}
        for name in self._names():
            with contextlib.suppress(SandboxError):
                if (record := self._read(name)) is not None:
                    found[name] = record.size_bytes
        return found

    def references(self) -> tuple[set[str], dict[str, SandboxError]]:
        """The layers that volumes of all namespaces name; and of the records that cannot be read, the entries and the
        errors."""
        found: set[str] = set()
        damaged: dict[str, SandboxError] = {}
        for entry in self._entries():
            try:
                if is_name(split_entry(entry)[1]) and (record := self._read_entry(entry)) is not None:
                    found.add(record.layer)
            except SandboxError as error:
                damaged[entry] = error
        return found, damaged

    # ---- parts ----

    async def _create(self, name: str, size_bytes: int | None, *, fill: int | None = None) -> None:
        check_name(name, noun="a name for a volume")
        if size_bytes is not None and size_bytes < MIN_SIZE_BYTES:
            raise InvalidRequest(f"the size of a volume is {size_bytes} bytes; it must be at least {MIN_SIZE_BYTES}")
        layer = self._layers.new_id()
        path = self._layers.path(layer)
        async with self._layers.lock(), self._locked():
            if os.path.lexists(self._path(name)):
                raise VolumeExists(name)
            with self._store.in_progress(layer):
                try:
                    storage.make(path)
                    if size_bytes is not None:
                        storage.limit(path, size_bytes, root=os.geteuid() == 0)
                    await self._make_files(path / _FILES)
                    if fill is not None:
                        unpack = ("--extract", "--same-owner", "--preserve-permissions")
                        try:
                            await self._tar(path / _FILES, *unpack, stdin=fill)
                        except SandboxError as error:
                            raise ArchiveRefused(error.message, reason="malformed") from None
                    record = VolumeRecord(layer=layer, size_bytes=size_bytes, created_at=now())
                    write_record(self._path(name), record, durable=True)
                except BaseException:
                    with anyio.CancelScope(shield=True):
                        await self._any_layers().remove(path)
                    raise

    async def _make_files(self, path: Path) -> None:
        machine = read_machine()
        if machine.root:
            path.mkdir(mode=0o755)
            os.chown(path, MOUNT_IDS + _USER_ID, MOUNT_IDS + _USER_ID)
            return
        owner = "0" if machine.single_id else str(_USER_ID)
        command = ("install", "--directory", "--mode=755", f"--owner={owner}", f"--group={owner}", str(path))
        await self._run(KeeperCommand(machine).nsexec_command(*command))

    async def _tar(
        self,
        directory: Path,
        *words: str,
        stdin: int | None = None,
        stdout: int | None = None,
        accepted: tuple[int, ...] = (0,),
    ) -> None:
        command = KeeperCommand(read_machine()).volume_command(*_TAR, *words)
        await self._run(command, cwd=directory, stdin=stdin, stdout=stdout, accepted=accepted)

    async def _run(
        self,
        command: builtins.list[str],
        *,
        cwd: Path | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        accepted: tuple[int, ...] = (0,),
    ) -> None:
        done = await anyio.run_process(
            command,
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=subprocess.DEVNULL if stdout is None else stdout,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env={"PATH": PROGRAM_PATH},
            check=False,
        )
        if done.returncode not in accepted:
            output = done.stderr.decode(errors="replace").strip()[-500:]
            raise SandboxError(f"the files of the volume could not be written or read: {output}")

    async def _describe(self, name: str, sandboxes: builtins.list[str] | tuple[str, ...]) -> Volume:
        used, reason, record = 0, None, None
        try:
            record = self._read(name)
        except SandboxError as error:
            reason = unreadable(error)
        if record is not None:
            used = await self._any_layers().size(self._layers.path(record.layer))
        return Volume(
            name=name,
            size_bytes=record.size_bytes if record else None,
            used_bytes=used,
            created_at=record.created_at if record else modified(self._path(name)),
            sandboxes=tuple(sandboxes),
            reason=reason,
        )

    def _users(self) -> tuple[dict[str, builtins.list[str]], dict[str, SandboxError]]:
        """The names of the sandboxes that mount each volume; and the records of sandboxes that cannot be read."""
        found: dict[str, builtins.list[str]] = {}
        references, damaged = self._store.references()
        for each in sorted(references, key=lambda each: each.name):
            for volume in each.volumes if each.namespace == self._store.namespace else ():
                found.setdefault(volume, []).append(each.name)
        return found, {id: error for id, error in damaged.items() if self._store.owns(id)}

    def _names(self) -> builtins.list[str]:
        return sorted(filter(is_name, names_in(self._store.namespace, self._entries())))

    def _entries(self) -> builtins.list[str]:
        """The entries of the volumes of all namespaces."""
        return [entry.removesuffix(".json") for entry in os.listdir(self._root) if entry.endswith(".json")]

    def _path(self, name: str) -> Path:
        return self._root / f"{self._store.entry(name)}.json"

    def _read(self, name: str) -> VolumeRecord | None:
        return self._read_entry(self._store.entry(name))

    def _read_entry(self, entry: str) -> VolumeRecord | None:
        return read_record(self._root / f"{entry}.json", VolumeRecord, f"volume {split_entry(entry)[1]}")

    def _locked(self) -> AbstractAsyncContextManager[None]:
        return locked(self._store.state_dir / "volumes.lock", _LOCK_TIMEOUT_S, "creating or removing a volume")
