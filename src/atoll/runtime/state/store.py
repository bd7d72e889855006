"""How sandboxes are remembered on disk, and who may work on one at a time.

Knows the state directory's layout, manifests, the claim of a name, ranges of user ids and locks. Refuses to know
what a sandbox does. Everything here holds across processes and after any of them is killed:

    names/<name>        a symlink to the id; making it claims the name
    ids/<slot>          a symlink to the id; making it claims a range of user ids
    uncommitted/<id>      present while a sandbox is being made or removed, or lives only as long as its clients;
                        what stands here without anybody at work on it is finished or collected
    warm/<key>.<id>  a sandbox of no name that waits, below `uncommitted/` too, to be taken by who wants one of its
                        kind; renaming this to `-.<id>` takes it. What stands so is being made or taken, and is
                        collected when nobody is at work on it, though it runs
    groups/<group>    present while several sandboxes are made that are to be there all or not at all; their entries
                        below uncommitted/ are symlinks to the group's name
    in-progress/<id>      present while a sandbox is started, stopped or changed, or a checkpoint is deleted: it is put in
                        order if who did that died
    sandboxes/<id>/     manifest.json, busy.lock, work.lock, keeper.lock, and what the driver keeps
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from atoll.contract.errors import SandboxDied, SandboxError, SandboxExists, SandboxNotFound
from atoll.contract.model import RuntimeName, SandboxSpec, check_name
from atoll.drivers.locks import is_held, lock_timeout, lock_within, open_lock, try_lock
from atoll.runtime.state.layers import ResolvedSpec
from atoll.runtime.state.records import StoredRecord, read_record, write_record

ID_BASE, ID_STEP, ID_SLOTS = 0x1000_0000, 0x1_0000, 28_000
"""Host user ids of sandboxes: far above people and services, below 2**31."""
IMPORTED_IDS = ID_BASE - 2 * ID_STEP
"""Whom the files of imported layers belong to: ids that no sandbox has, and the machine's own layers neither."""
_BUSY_TIMEOUT_S = 60
_WORK_TIMEOUT_S = 600


class Manifest(ResolvedSpec, StoredRecord):
    """All that must be known to take a sandbox up again."""

    VERSION = 3
    id: str
    spec: SandboxSpec
    runtime: RuntimeName
    active_layer: str
    """The layer that the sandbox writes to. No other manifest and no checkpoint names it."""
    copied: str | None = None
    """The last copy that was made of it, which may be gone."""
    id_slot: int
    created_at: datetime
    state: Literal["running", "sleeping", "shutdown"] = "running"
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


class Claimed(NamedTuple):
    """A sandbox that waited."""

    id: str
    manifest: Manifest | None
    """None: it cannot be read."""


class StateStore:
    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        for name in ("names", "ids", "uncommitted", "warm", "groups", "in-progress", "sandboxes"):
            (state_dir / name).mkdir(mode=0o700, parents=True, exist_ok=True)

    def directory(self, id: str) -> Path:
        return self.state_dir / "sandboxes" / id

    # ---- names ----

    def claim_name(self, name: str, id: str) -> None:
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

    def name_taken(self, name: str) -> bool:
        return os.path.lexists(self.state_dir / "names" / name)

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
        write_record(self.directory(manifest.id) / "manifest.json", manifest)

    def read(self, id: str) -> Manifest | None:
        """The manifest of `id`. None: it is not written yet, or was removed.

        Raises:
            SandboxError: it cannot be read, or was written by an Atoll with another version of manifests.
        """
        return read_record(self.directory(id) / "manifest.json", Manifest, f"sandbox {id}")

    # ---- life ----

    @contextlib.contextmanager
    def creating(self, id: str, group: str | None = None) -> Iterator[Path]:
        """A directory for a new sandbox, with work on it announced: if this process dies, it is collected.

        One of a `group` is announced beyond that, until the group is complete.
        """
        directory = self.directory(id)
        directory.mkdir(mode=0o700)
        locks = [open_lock(directory / name) for name in ("busy.lock", "work.lock")]
        try:
            for fd in locks:
                try_lock(fd)
            os.symlink(group or id, self.state_dir / "uncommitted" / id)
            yield directory
        finally:
            for fd in locks:
                os.close(fd)

    @contextlib.contextmanager
    def create_group(self) -> Iterator[str]:
        """A group of sandboxes to be made. They are there, all at once, when the context ends without an error."""
        group = secrets.token_hex(8)
        path = self.state_dir / "groups" / group
        fd = open_lock(path)
        try:
            try_lock(fd)
            yield group
            path.unlink()
        finally:
            os.close(fd)
        for id in os.listdir(self.state_dir / "uncommitted"):
            if self._group(id) == group:
                self.commit(id)

    def _group(self, id: str) -> str | None:
        """The group that a sandbox is made with. None: with none, or it is there already."""
        with contextlib.suppress(FileNotFoundError):
            group = os.readlink(self.state_dir / "uncommitted" / id)
            return group if group != id else None
        return None

    def commit(self, id: str, *, ephemeral: bool = False) -> None:
        """From now on it lives by itself, or with its clients."""
        if not ephemeral:
            (self.state_dir / "uncommitted" / id).unlink(missing_ok=True)
        self._warm_path("-", id).unlink(missing_ok=True)

    # ---- waiting ----

    def mark_creating(self, id: str) -> None:
        """A sandbox is being made that is to wait."""
        self._warm_path("-", id).touch(mode=0o600)

    def mark_ready(self, id: str, key: str) -> None:
        """From now on it waits. Who calls this is the one at work on it."""
        self._warm_path("-", id).rename(self._warm_path(key, id))

    def warm(self, key: str) -> list[str]:
        """The ids of those that wait, some of which may have ended."""
        names = (name.partition(".") for name in os.listdir(self.state_dir / "warm"))
        return [id for its_key, _, id in names if its_key == key]

    @contextlib.contextmanager
    def claim(self, key: str, wanted: Callable[[Manifest | None], bool]) -> Iterator[Claimed | None]:
        """One of those that wait, the first that is `wanted`, and nobody else's any more. None: there is none.

        Who takes it is at work on it as long as the context lasts, and has settled or removed it by then. A manifest
        that cannot be read is given as None.
        """
        candidates = self.warm(key)
        random.shuffle(candidates)  # many who come at once do not all try the same one first
        for id in candidates:
            with contextlib.ExitStack() as stack, contextlib.suppress(FileNotFoundError):
                if not self._try_locks(id, stack):
                    continue
                manifest = None
                with contextlib.suppress(SandboxError):
                    manifest = self.read(id)
                if wanted(manifest) and self._try_claim(key, id):
                    held = stack.pop_all()
                    break
        else:
            yield None
            return
        with held:
            yield Claimed(id, manifest)

    def _try_locks(self, id: str, stack: contextlib.ExitStack) -> bool:
        """Be the one at work on a sandbox for as long as `stack` lasts, unless another is."""
        for name in ("busy.lock", "work.lock"):
            fd = os.open(self.directory(id) / name, os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            if not try_lock(fd):
                return False
        return True

    def _try_claim(self, key: str, id: str) -> bool:
        try:
            self._warm_path(key, id).rename(self._warm_path("-", id))
        except FileNotFoundError:  # another was faster, and is done with it
            return False
        return True

    def claim_interrupted(self, id: str) -> bool:
        """Whether it is being put up or taken; and if nobody is at work on it, that was never finished."""
        return self._warm_path("-", id).exists()

    def _warm_path(self, key: str, id: str) -> Path:
        return self.state_dir / "warm" / f"{key}.{id}"

    # ---- ending ----

    @contextlib.asynccontextmanager
    async def removing(
        self, id: str, name: str | None, *, locked: bool = False, abandoned: bool = False
    ) -> AsyncIterator[Path]:
        """The directory of a sandbox, for its removal, with nobody else at work on it. It may be gone already.

        The name is free, and the sandbox sure to be collected, before the first of it is taken away. Without `name`,
        whatever name it has is. `locked` says that the caller is the one at work on it; `abandoned`, that it is to be
        removed only if it is.

        Raises:
            SandboxError: somebody else is at work on it, or it is not abandoned any more.
        """
        directory = self.directory(id)
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(FileNotFoundError):
                for lock, timeout_s in (("busy.lock", _BUSY_TIMEOUT_S), ("work.lock", _WORK_TIMEOUT_S)):
                    fd = open_lock(directory / lock)
                    stack.callback(os.close, fd)
                    if not locked and not await lock_within(fd, timeout_s):
                        raise lock_timeout(timeout_s, f"working on sandbox {id}", directory / lock)
                if abandoned and id not in self._unowned():
                    raise SandboxError("somebody has taken this sandbox up meanwhile", hint=str(directory))
                with contextlib.suppress(FileExistsError):
                    os.symlink(id, self.state_dir / "uncommitted" / id)
            for entry in os.listdir(self.state_dir / "warm"):
                if entry.endswith(f".{id}"):
                    self._try_claim(entry.partition(".")[0], id)
            # Who was killed before the manifest was written has claimed a name that nobody else knows of.
            for each in self.names() if name is None else [name]:
                if self._means(each, id):
                    (self.state_dir / "names" / each).unlink(missing_ok=True)
            yield directory
        self._release_ids(id)
        self.clear_in_progress(id)
        self.commit(id)

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
            fd = open_lock(self.directory(id) / "work.lock")
        except FileNotFoundError:
            raise SandboxDied("the sandbox was destroyed") from None
        try:
            if not await lock_within(fd, _WORK_TIMEOUT_S):
                raise lock_timeout(_WORK_TIMEOUT_S, f"working on sandbox {id}", self.directory(id) / "work.lock")
            with self.in_progress(id):
                yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def in_progress(self, id: str) -> Iterator[None]:
        """What is done inside leaves garbage if this process dies; that is then known."""
        mark = self.state_dir / "in-progress" / id
        with contextlib.suppress(OSError):  # it may stand there already; and on a full disk garbage can be deleted
            mark.symlink_to(id)
        try:
            yield
        finally:
            mark.unlink(missing_ok=True)

    # ---- what others left ----

    def interrupted(self) -> list[str]:
        """Ids of sandboxes that somebody was at work on who died."""
        return [id for id in os.listdir(self.state_dir / "in-progress") if not self._is_in_progress(id)]

    def clear_in_progress(self, id: str) -> None:
        (self.state_dir / "in-progress" / id).unlink(missing_ok=True)

    def abandoned(self) -> list[str]:
        """Ids that nobody is at work on, of what neither lives by itself nor waits."""
        return sorted(id for id in self._unowned() if not self._is_being_created(id))

    def _unowned(self) -> set[str]:
        entries = [name.partition(".") for name in os.listdir(self.state_dir / "warm")]
        warm = {id for key, _, id in entries if key != "-" and self.is_alive(id)}
        return (set(os.listdir(self.state_dir / "uncommitted")) - warm) | set(self.warm("-"))

    def is_alive(self, id: str) -> bool:
        """Whether it has a keeper."""
        return is_held(self.directory(id) / "keeper.lock")

    def at_work(self) -> set[str]:
        """Ids of sandboxes that somebody makes, removes, starts, stops or changes."""
        making = {id for id in os.listdir(self.state_dir / "uncommitted") if self._is_being_created(id)}
        return making | {id for id in os.listdir(self.state_dir / "in-progress") if self._is_in_progress(id)}

    def _is_in_progress(self, id: str) -> bool:
        return is_held(self.directory(id) / "work.lock")

    def _is_being_created(self, id: str) -> bool:
        """Whether somebody makes or removes it, or the group that it is one of."""
        group = self._group(id)
        return is_held(self.directory(id) / "busy.lock") or (
            group is not None and is_held(self.state_dir / "groups" / group)
        )

    def is_complete(self, manifest: Manifest, *, running: bool) -> bool:
        """Whether an abandoned sandbox lacks nothing: it has its name and runs, or its group was complete."""
        group = self._group(manifest.id)
        if self.claim_interrupted(manifest.id):
            return False
        if group is not None and (self.state_dir / "groups" / group).exists():
            return False
        return self._means(manifest.spec.name, manifest.id) and (running or group is not None)

    def finish_created(self, id: str) -> None:
        """Settle a sandbox that is used, though who made it died before saying so. Nothing, while somebody makes it."""
        if not os.path.lexists(self.state_dir / "uncommitted" / id) or self._is_being_created(id):
            return
        with contextlib.suppress(FileNotFoundError):
            fd = open_lock(self.directory(id) / "busy.lock")
            try:
                if try_lock(fd):
                    self.commit(id)
            finally:
                os.close(fd)

    def orphaned(self) -> list[Path]:
        """Directories that somebody made for a sandbox who died at once. Call it while nobody makes anything."""
        return [
            self.directory(id)
            for id in os.listdir(self.state_dir / "sandboxes")
            if not os.path.lexists(self.state_dir / "uncommitted" / id)
            and not (self.directory(id) / "manifest.json").exists()
        ]

    def drop_groups(self) -> None:
        """Forget groups whose makers died and of which nothing is left. Call it while nobody makes anything."""
        members = {self._group(id) for id in os.listdir(self.state_dir / "uncommitted")}
        for group in set(os.listdir(self.state_dir / "groups")) - members:
            path = self.state_dir / "groups" / group
            if not is_held(path):
                path.unlink(missing_ok=True)


def new_id() -> str:
    """Never used twice: runtimes derive the names of sockets from it."""
    return f"atoll-{secrets.token_hex(8)}"


def now() -> datetime:
    return datetime.now(UTC)
