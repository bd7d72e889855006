"""How sandboxes are remembered on disk, and who may work on one at a time.

Knows the state directory's layout, manifests, the claim of a name, ranges of user ids and locks. Refuses to know
what a sandbox does. Everything here holds across processes and after any of them is killed:

    names/<name>        a symlink to the id; making it claims the name
    ids/<slot>          a symlink to the id; making it claims a range of user ids
    transient/<id>      present while a sandbox is being made or removed, or lives only as long as its clients;
                        what stands here without anybody at work on it is finished or collected
    together/<group>    present while several sandboxes are made that are to be there all or not at all; their entries
                        below transient/ are symlinks to the group's name
    under-way/<id>      present while a sandbox is started, stopped or changed, or a checkpoint is deleted: it is put in
                        order if who did that died
    sandboxes/<id>/     manifest.json, busy.lock, work.lock, keeper.lock, and what the driver keeps
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from atoll.contract.errors import SandboxDied, SandboxError, SandboxExists, SandboxNotFound
from atoll.contract.model import RuntimeName, SandboxSpec, check_name
from atoll.drivers.locks import is_held, lock_within, try_lock
from atoll.runtime.layers import Ground

ID_BASE, ID_STEP, ID_SLOTS = 0x1000_0000, 0x1_0000, 28_000
"""Host user ids of sandboxes: far above people and services, below 2**31."""
IMPORTED_IDS = ID_BASE - 2 * ID_STEP
"""Whom the files of imported layers belong to: ids that no sandbox has, and the machine's own layers neither."""
_PATIENCE_S = 60
_WORK_S = 600


class Manifest(Ground):
    """All that must be known to take a sandbox up again."""

    version: int = 2
    id: str
    spec: SandboxSpec
    runtime: RuntimeName
    top: str
    """The layer that the sandbox writes to. No other manifest and no checkpoint names it."""
    copied: str | None = None
    """The last copy that was made of it, which may be gone."""
    id_slot: int
    created_at: datetime
    state: Literal["running", "cold", "shutdown"] = "running"
    """What it is meant to be. Whether it runs, its keeper tells."""
    ending: bool = False
    """True: it is not to run, and what runs of it all the same is being ended. Unset: what runs of it may go on."""
    run: int = 1
    """Counts its starts: no runtime is given the same id twice."""
    memory: str | None = None
    """The directory, in the sandbox's own, that its processes were written to when it went to sleep. Unset: it has none
    that could go on."""
    checkpoint: str | None = None
    """Where it stands in the tree of its checkpoints: the last that was made of it, or that it was made of."""

    @property
    def id_base(self) -> int:
        return ID_BASE + self.id_slot * ID_STEP

    @property
    def run_id(self) -> str:
        return f"{self.id}.{self.run}"


class Records:
    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        for name in ("names", "ids", "transient", "together", "under-way", "sandboxes"):
            (state_dir / name).mkdir(mode=0o700, parents=True, exist_ok=True)

    def directory(self, id: str) -> Path:
        return self.state_dir / "sandboxes" / id

    # ---- names ----

    def claim(self, name: str, id: str) -> None:
        """Make `name` mean `id`, for everybody, at once.

        Raises:
            SandboxExists: it means another one.
        """
        try:
            os.symlink(id, self.state_dir / "names" / name)
        except FileExistsError:
            raise SandboxExists(name) from None

    def lookup(self, name: str) -> str:
        """The id behind a name.

        Raises:
            InvalidRequest: it cannot be a name.
            SandboxNotFound: it is none.
        """
        check_name(name)
        try:
            return os.readlink(self.state_dir / "names" / name)
        except FileNotFoundError:
            raise SandboxNotFound(name, self.names()) from None

    def names(self) -> list[str]:
        return sorted(os.listdir(self.state_dir / "names"))

    # ---- ranges of ids ----

    def claim_ids(self, id: str) -> int:
        """A slot of user ids that no other sandbox of this state directory has."""
        for _ in range(1000):
            slot = secrets.randbelow(ID_SLOTS)
            with contextlib.suppress(FileExistsError):
                os.symlink(id, self.state_dir / "ids" / str(slot))
                return slot
        raise SandboxError("no range of user ids is free", hint=f"see {self.state_dir / 'ids'}")

    # ---- manifests ----

    def write(self, manifest: Manifest) -> None:
        directory = self.directory(manifest.id)
        temporary = directory / "manifest.new"
        with open(temporary, "w") as file:
            file.write(manifest.model_dump_json())
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(directory / "manifest.json")

    def read(self, id: str) -> Manifest | None:
        """The manifest of `id`. None: it is not written yet, or not there any more."""
        path = self.directory(id) / "manifest.json"
        try:
            return Manifest.model_validate(json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (ValidationError, ValueError) as error:
            raise SandboxError(f"the manifest of the sandbox {id} cannot be read", hint=f"{path}: {error}") from error

    # ---- life ----

    @contextlib.contextmanager
    def making(self, id: str, group: str | None = None) -> Iterator[Path]:
        """A directory for a new sandbox, with work on it announced: if this process dies, it is collected.

        One of a `group` is announced beyond that, until the group is complete.
        """
        directory = self.directory(id)
        directory.mkdir(mode=0o700)
        locks = [_open_lock(directory, name) for name in ("busy.lock", "work.lock")]
        try:
            for fd in locks:
                try_lock(fd)
            os.symlink(group or id, self.state_dir / "transient" / id)
            yield directory
        finally:
            for fd in locks:
                os.close(fd)

    @contextlib.contextmanager
    def together(self) -> Iterator[str]:
        """A group of sandboxes to be made. They are there, all at once, when the context ends without an error."""
        group = secrets.token_hex(8)
        path = self.state_dir / "together" / group
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try_lock(fd)
            yield group
            path.unlink()
        finally:
            os.close(fd)
        for id in os.listdir(self.state_dir / "transient"):
            if self._group(id) == group:
                self.settle(id)

    def _group(self, id: str) -> str | None:
        """The group that a sandbox is made with. None: with none, or it is there already."""
        with contextlib.suppress(FileNotFoundError):
            group = os.readlink(self.state_dir / "transient" / id)
            return group if group != id else None
        return None

    def settle(self, id: str) -> None:
        """From now on it lives by itself."""
        (self.state_dir / "transient" / id).unlink(missing_ok=True)

    @contextlib.asynccontextmanager
    async def removing(self, id: str, name: str | None, *, locked: bool = False) -> AsyncIterator[Path]:
        """The directory of a sandbox, for its removal, with nobody else at work on it. It may be gone already.

        The name is free, and the sandbox sure to be collected, before the first of it is taken away. Without `name`,
        whatever name it has is. `locked` says that the caller is the one at work on it.
        """
        directory = self.directory(id)
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(FileNotFoundError):
                for lock, patience_s in (("busy.lock", _PATIENCE_S), ("work.lock", _WORK_S)):
                    fd = _open_lock(directory, lock)
                    stack.callback(os.close, fd)
                    if not locked and not await lock_within(fd, patience_s):
                        raise SandboxError(
                            "somebody else is at work on this sandbox and does not end", hint=str(directory)
                        )
                with contextlib.suppress(FileExistsError):
                    os.symlink(id, self.state_dir / "transient" / id)
            for each in self.names() if name is None else [name]:
                if self._means(each, id):
                    (self.state_dir / "names" / each).unlink(missing_ok=True)
            yield directory
        self._release_ids(id)
        self.forget_interruption(id)
        self.settle(id)

    def _release_ids(self, id: str) -> None:
        for slot in os.listdir(self.state_dir / "ids"):
            with contextlib.suppress(FileNotFoundError):
                path = self.state_dir / "ids" / slot
                if os.readlink(path) == id:
                    path.unlink()

    def _means(self, name: str, id: str) -> bool:
        try:
            return os.readlink(self.state_dir / "names" / name) == id
        except FileNotFoundError:
            return False

    @contextlib.asynccontextmanager
    async def working(self, id: str) -> AsyncIterator[int]:
        """Be the only one who starts, stops or changes a sandbox that exists.

        Gives the lock: a program that must have ended before anybody else may work on it is handed a copy.

        Raises:
            SandboxError: somebody else does, and does not end.
        """
        try:
            fd = _open_lock(self.directory(id), "work.lock")
        except FileNotFoundError:
            raise SandboxDied("the sandbox was destroyed") from None
        try:
            if not await lock_within(fd, _WORK_S):
                raise SandboxError("somebody else is at work on this sandbox and does not end", hint=id)
            with self.announced(id):
                yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def announced(self, id: str) -> Iterator[None]:
        """What is done inside leaves garbage if this process dies; that is then known."""
        mark = self.state_dir / "under-way" / id
        with contextlib.suppress(OSError):  # it may stand there already; and on a full disk garbage can be deleted
            mark.symlink_to(id)
        try:
            yield
        finally:
            mark.unlink(missing_ok=True)

    # ---- what others left ----

    def interrupted(self) -> list[str]:
        """Ids of sandboxes that somebody was at work on who died."""
        return [id for id in os.listdir(self.state_dir / "under-way") if not self._is_worked_on(id)]

    def forget_interruption(self, id: str) -> None:
        (self.state_dir / "under-way" / id).unlink(missing_ok=True)

    def abandoned(self) -> list[str]:
        """Ids below `transient/` that nobody is at work on."""
        return [id for id in os.listdir(self.state_dir / "transient") if not self._is_made(id)]

    def at_work(self) -> set[str]:
        """Ids of sandboxes that somebody makes, removes, starts, stops or changes."""
        making = {id for id in os.listdir(self.state_dir / "transient") if self._is_made(id)}
        return making | {id for id in os.listdir(self.state_dir / "under-way") if self._is_worked_on(id)}

    def _is_worked_on(self, id: str) -> bool:
        return is_held(self.directory(id) / "work.lock")

    def _is_made(self, id: str) -> bool:
        """Whether somebody makes or removes it, or the group that it is one of."""
        group = self._group(id)
        return is_held(self.directory(id) / "busy.lock") or (
            group is not None and is_held(self.state_dir / "together" / group)
        )

    def was_made(self, manifest: Manifest, *, running: bool) -> bool:
        """Whether an abandoned sandbox lacks nothing: it has its name and runs, or its group was complete."""
        group = self._group(manifest.id)
        if group is not None and (self.state_dir / "together" / group).exists():
            return False
        return self._means(manifest.spec.name, manifest.id) and (running or group is not None)

    def adopt(self, id: str) -> None:
        """Settle a sandbox that is used, though who made it died before saying so. Nothing, while somebody makes it."""
        if not os.path.lexists(self.state_dir / "transient" / id) or self._is_made(id):
            return
        with contextlib.suppress(FileNotFoundError):
            fd = _open_lock(self.directory(id), "busy.lock")
            try:
                if try_lock(fd):
                    self.settle(id)
            finally:
                os.close(fd)

    def unannounced(self) -> list[Path]:
        """Directories that somebody made for a sandbox who died at once. Call it while nobody makes anything."""
        return [
            self.directory(id)
            for id in os.listdir(self.state_dir / "sandboxes")
            if not os.path.lexists(self.state_dir / "transient" / id)
            and not (self.directory(id) / "manifest.json").exists()
        ]

    def drop_groups(self) -> None:
        """Forget groups whose makers died and of which nothing is left. Call it while nobody makes anything."""
        members = {self._group(id) for id in os.listdir(self.state_dir / "transient")}
        for group in set(os.listdir(self.state_dir / "together")) - members:
            path = self.state_dir / "together" / group
            if not is_held(path):
                path.unlink(missing_ok=True)


def _open_lock(directory: Path, name: str) -> int:
    return os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def new_id() -> str:
    """Never used twice: runtimes derive the names of sockets from it."""
    return f"atoll-{secrets.token_hex(8)}"


def now() -> datetime:
    return datetime.now(UTC)
