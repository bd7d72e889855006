"""The state store: which sandboxes exist, what their manifests say, and which process may work on one.

Owns the layout of the state directory, manifests, claims of names and of ranges of user ids, and the locks of a
sandbox. Not here: what a sandbox does (`lifecycle/`), layers (`layers.py`), checkpoints (`checkpoints.py`), and how a
record is written and its version checked (`records.py`). Used by the engine and by `lifecycle/`. All of it holds across
processes, and after any of them is killed:

    names/<name>        a symlink to the id. Creating it claims the name. `<namespace>:<name>` in a namespace other than
                        the default (`namespaces.py`)
    ids/<slot>          a symlink to the id. Creating it claims a range of user ids
    uncommitted/<id>    exists while a sandbox is created or removed, and while an ephemeral one lives. An entry that no
                        process works on is abandoned: the sandbox is completed or removed
    warm/<key>.<id>     a warm sandbox without a name, which is also in `uncommitted/`. `<key>` is that of its pool.
                        Renaming the entry to `-.<id>` claims it. An entry `-.<id>` that no process works on is
                        abandoned, though the sandbox runs: its creation or its claim was interrupted
    expiries/<id>       a symlink to when the sandbox's lifetime is over (`expiries.py`). From then on no lookup and no
                        list finds it, and recovery removes it; or recovery puts it to sleep. Without an entry it has no
                        end
    groups/<group>      exists while several sandboxes are created of which all or none are to exist. Their entries in
                        `uncommitted/` are symlinks to the group's name
    in-progress/<id>    exists while a sandbox is started, stopped or changed, or a checkpoint is deleted. If that is
                        interrupted, the sandbox is reconciled
    sandboxes/<id>/     manifest.json, run, busy.lock, work.lock, keeper.lock, and the driver's files

A store has a namespace: names are found and claimed in that one. Ids are those of all, for recovery and garbage
collection, which do not ask whose something is.

`busy.lock` is held while a sandbox is created, claimed or removed, `work.lock` during any operation on it,
`keeper.lock` by its keeper for as long as that lives.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from atoll.contract.errors import InvalidRequest, SandboxDied, SandboxError, SandboxExists, SandboxNotFound
from atoll.contract.model import RuntimeName, SandboxSpec
from atoll.contract.names import DEFAULT_NAMESPACE, check_name, is_name
from atoll.drivers.locks import is_held, lock_timeout, lock_within, open_lock, try_lock
from atoll.runtime.state.expiries import Expiry, now_ms
from atoll.runtime.state.layers import ResolvedSpec
from atoll.runtime.state.namespaces import entry_of, names_in, split_entry
from atoll.runtime.state.records import StoredRecord, read_record, remove_record, write_record, write_record_early
from atoll.runtime.state.running import MANIFEST_VERSION, SANDBOX_ID

ID_BASE, ID_STEP, ID_SLOTS = 0x1000_0000, 0x1_0000, 28_000
"""Host user ids of sandboxes: far above people and services, below 2**31."""
IMPORTED_IDS = ID_BASE - 2 * ID_STEP
"""The owner of the files of imported layers: an id that neither a sandbox nor a file of the machine has."""
_IN_PROGRESS = re.compile(r"(atoll|cp|layer)-[0-9a-f]+")
_GROUP = re.compile(r"[0-9a-f]{16}")
_BEFORE_FIRST_USE = {"images", "storage.img", "storage.json", "storage.lock", "lost+found"}
"""What may be in a state directory before it is first opened."""
_CLOCK_STEP_NS = 100_000_000
_BUSY_TIMEOUT_S = 60
_WORK_TIMEOUT_S = 600


class Manifest(ResolvedSpec, StoredRecord):
    """A sandbox's record on disk: all that is needed to start it again."""

    VERSION = MANIFEST_VERSION
    id: str
    namespace: str
    spec: SandboxSpec
    runtime: RuntimeName
    active_layer: str
    """The layer that the sandbox writes to. No other manifest and no checkpoint refers to it."""
    copied: str | None = None
    """The last copy that was made of the active layer, which may have been removed."""
    id_slot: int
    created_at: datetime
    state: Literal["running", "sleeping", "shutdown"] = "running"
    """The state that it is meant to be in. Whether it runs is known from its keeper."""
    ending: bool = False
    """True: its processes are being stopped, and those that still run must be stopped. Unset: they may go on."""
    run: int = 1
    """The number of its starts: no runtime is given the same id twice."""
    memory: str | None = None
    """The directory, in the sandbox's own unless it is a checkpoint's, that its processes were saved to when it went to
    sleep. Unset: it has no saved processes."""
    checkpoint: str | None = None
    """Its position in the tree of checkpoints: the last one made of it, or the one that it was made from."""

    @property
    def id_base(self) -> int:
        return ID_BASE + self.id_slot * ID_STEP

    @property
    def run_id(self) -> str:
        return f"{self.id}.{self.run}"

    @property
    def entry(self) -> str:
        """The entry of its name."""
        return entry_of(self.namespace, self.spec.name)


class References(NamedTuple):
    """What a sandbox refers to, which must not be removed."""

    namespace: str
    name: str
    image_digest: str
    layers: tuple[str, ...]
    """The ids of its committed layers, and of the one that it writes to."""
    volumes: tuple[str, ...]
    """The names of the volumes that it mounts."""
    memory: Path
    """The directory that its saved processes are in, if it has any."""

    @classmethod
    def of(cls, manifest: Manifest, directory: Path) -> References:
        layers = manifest.active_layer, *(layer.id for layer in manifest.layers)
        volumes = tuple(each.mount.volume for each in manifest.mounts if each.mount.volume is not None)
        memory = (directory / (manifest.memory or "")).parent
        return cls(manifest.namespace, manifest.spec.name, manifest.image_digest, layers, volumes, memory)


class Claimed(NamedTuple):
    """A warm sandbox that this process has claimed."""

    id: str
    manifest: Manifest | None
    """None: it cannot be read."""


class StateStore:
    def __init__(self, state_dir: Path, namespace: str = DEFAULT_NAMESPACE) -> None:
        """
        Raises:
            InvalidRequest: others can write to the state directory, or it holds something else.
            OSError: it cannot be made.
        """
        self.state_dir = state_dir
        self.namespace = namespace
        self._sandboxes = state_dir / "sandboxes"
        self._references: dict[str, tuple[tuple[int, int] | None, References]] = {}
        """What `references` returned last, with the versions of the manifests."""
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_private(state_dir)
        for name in ("names", "ids", "uncommitted", "warm", "groups", "in-progress", "expiries", "sandboxes", "run"):
            directory = state_dir / name
            directory.mkdir(mode=0o700, exist_ok=True)
            _narrow(directory)

    def _entries(self, name: str, pattern: re.Pattern[str] = SANDBOX_ID) -> list[str]:
        """The entries of a directory of the state directory that are ours. Others mean nothing, and stay."""
        return [entry for entry in os.listdir(self.state_dir / name) if pattern.fullmatch(entry)]

    def directory(self, id: str) -> Path:
        return self._sandboxes / id

    def sandbox_ids(self) -> list[str]:
        """The ids of all that is kept here, of all namespaces: also of sandboxes that are being made or removed."""
        return self._entries("sandboxes")

    def within(self, namespace: str) -> StateStore:
        """The same store, with another namespace."""
        other = copy.copy(self)
        other.namespace = namespace
        return other

    # ---- names ----

    def entry(self, name: str) -> str:
        """The entry of a name of this namespace."""
        return entry_of(self.namespace, name)

    def claim_name(self, name: str, id: str) -> None:
        """Give the name to the sandbox `id`, for all processes, in one step.

        Raises:
            SandboxExists: another sandbox has it.
        """
        try:
            os.symlink(id, self.state_dir / "names" / self.entry(name))
        except FileExistsError:
            raise SandboxExists(name) from None

    def lookup(self, name: str) -> str:
        """The id of the sandbox with this name, in this namespace.

        Raises:
            InvalidRequest: it is not a valid name.
            SandboxNotFound: no sandbox has it.
            SandboxError: its entry is damaged; `free_damaged_name` removes it.
        """
        check_name(name)
        entry = self.state_dir / "names" / self.entry(name)
        try:
            id = os.readlink(entry)
        except FileNotFoundError:
            raise SandboxNotFound(name, self.names()) from None
        except OSError:
            id = ""
        if not SANDBOX_ID.fullmatch(id):  # it becomes part of paths
            problem = "its entry is not a symlink to the id of a sandbox"
            message = f"the name {name!r} cannot be resolved: {problem}; destroy it to free the name"
            raise SandboxError(message, hint=str(entry), reason="malformed", problem=problem)
        if self.has_expired(id) or self._is_left_of_group(id):
            raise SandboxNotFound(name, [each for each, _ in self.named("") if each != name])
        return id

    def free_damaged_name(self, name: str) -> None:
        """Remove an entry that `lookup` finds damaged. Nothing that it may point to is touched."""
        remove_record(self.state_dir / "names" / self.entry(name))

    def owns(self, id: str) -> bool:
        """Whether a sandbox of this namespace has this id, whatever can be read of it.

        One that has no name is of the default namespace, unless its manifest says otherwise. For the sandbox of another
        namespace the answer takes as long as for one that does not exist.
        """
        if not SANDBOX_ID.fullmatch(id):
            return False
        if any(self.resolves_to(self.entry(name), id) for name in self.names()):
            return True
        if self.namespace != DEFAULT_NAMESPACE or not os.path.lexists(self.directory(id)) or self._owner(id):
            return False
        with contextlib.suppress(SandboxError):
            manifest = self.read(id)
            return manifest is None or manifest.namespace == self.namespace
        return True

    def qualified_id(self, id: str) -> str:
        """The id of a sandbox whose manifest cannot be read, behind the namespace of its name if that is another."""
        return entry_of(self._owner(id) or DEFAULT_NAMESPACE, id)

    def _owner(self, id: str) -> str | None:
        """The namespace of the name of this sandbox. None: it has no name."""
        return next((split_entry(entry)[0] for entry in self._entries_of_all() if self.resolves_to(entry, id)), None)

    def name_taken(self, name: str) -> bool:
        return os.path.lexists(self.state_dir / "names" / self.entry(name))

    def named(self, prefix: str) -> Iterator[tuple[str, str]]:
        """The names that begin with `prefix`, sorted, and their ids; no id if the entry is damaged.

        Without those whose lifetime is over.
        """
        names = f"{self.state_dir}/names"
        expired = set(self.expired())
        for name in self.names():
            if name.startswith(prefix):
                try:
                    id = os.readlink(f"{names}/{self.entry(name)}")
                except FileNotFoundError:
                    continue
                except OSError:
                    id = ""
                if id not in expired:
                    yield name, id if SANDBOX_ID.fullmatch(id) else ""

    def names(self) -> list[str]:
        return sorted(filter(is_name, names_in(self.namespace, os.listdir(self.state_dir / "names"))))

    def _entries_of_all(self) -> list[str]:
        """The entries of names of all namespaces."""
        return [entry for entry in os.listdir(self.state_dir / "names") if is_name(split_entry(entry)[1])]

    # ---- lifetimes ----

    def set_expiry(self, id: str, expiry: Expiry | None) -> None:
        """Set when the lifetime of a sandbox is over; None: never. The caller holds its lock."""
        entry = self.state_dir / "expiries" / id
        new = entry.with_suffix(".new")
        new.unlink(missing_ok=True)
        if expiry is None:
            entry.unlink(missing_ok=True)
            return
        new.symlink_to(str(expiry))
        new.rename(entry)

    def expiry(self, id: str) -> Expiry | None:
        """The end of the lifetime of a sandbox. None: it has none."""
        try:
            return Expiry.parse(os.readlink(f"{self.state_dir}/expiries/{id}"))
        except (OSError, ValueError):
            return None

    def expires_at(self, id: str) -> datetime | None:
        """When the lifetime of a sandbox is over, as far as is known now. None: never."""
        expiry = self.expiry(id)
        return None if expiry is None else datetime.fromtimestamp(self._end_ms(id, expiry) / 1000, UTC)

    def _end_ms(self, id: str, expiry: Expiry) -> int:
        return expiry.end_ms(f"{self._sandboxes}/{id}", lambda: self.is_alive(id))

    def expiries(self) -> dict[str, datetime]:
        """The sandboxes with a lifetime, and when it is over."""
        found = ((id, self.expires_at(id)) for id in self._entries("expiries"))
        return {id: moment for id, moment in found if moment is not None}

    def has_expired(self, id: str) -> bool:
        """Whether the lifetime of a sandbox is over, and it is to be destroyed."""
        return self._is_over(id, kept=False)

    def is_due_to_sleep(self, id: str) -> bool:
        """Whether the lifetime of a sandbox is over, and it is to be put to sleep or paused."""
        return self._is_over(id, kept=True)

    def _is_over(self, id: str, *, kept: bool) -> bool:
        expiry = self.expiry(id)
        if expiry is None or (expiry.then != "destroy") is not kept:
            return False
        return self._end_ms(id, expiry) <= now_ms()

    def expired(self) -> list[str]:
        """Ids of sandboxes whose lifetime is over, and that are to be destroyed."""
        return [id for id in self._entries("expiries") if self.has_expired(id)]

    def due_to_sleep(self) -> list[str]:
        """Ids of sandboxes whose lifetime is over, and that are to be put to sleep or paused."""
        return [id for id in self._entries("expiries") if self.is_due_to_sleep(id)]

    # ---- ranges of user ids ----

    def claim_ids(self, id: str) -> int:
        """Claim a range of user ids that no other sandbox of this state directory has. Returns its slot."""
        for _ in range(1000):
            import random

            slot = random.SystemRandom().randrange(ID_SLOTS)
            with contextlib.suppress(FileExistsError):
                os.symlink(id, self.state_dir / "ids" / str(slot))
                return slot
        raise SandboxError("no range of user ids is free; destroy some sandboxes", hint=str(self.state_dir / "ids"))

    # ---- manifests ----

    def write(self, manifest: Manifest) -> None:
        write_record(self.directory(manifest.id) / "manifest.json", manifest)

    def write_uncommitted(self, manifest: Manifest) -> Callable[[], None]:
        """Write the manifest of a sandbox that is created or claimed. Call what it returns before the commit.

        A thread brings it to disk meanwhile, which takes as long as all else that a claim does. If power fails first,
        the sandbox is abandoned, and removed whatever its manifest says.
        """
        fd = write_record_early(self.directory(manifest.id) / "manifest.json", manifest)
        syncing = self._syncs.submit(_sync_and_close, fd)
        return syncing.result

    @cached_property
    def _syncs(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(4, "atoll-sync")

    def read(self, id: str) -> Manifest | None:
        """The manifest of `id`. None: it is not written yet, or was removed.

        Raises:
            SandboxError: it cannot be read, or was written by an Atoll with another version of manifests.
        """
        return read_record(self.directory(id) / "manifest.json", Manifest, f"sandbox {id}")

    def version(self, id: str) -> tuple[int, int] | None:
        """Differs whenever the manifest of `id` has been written. None: it cannot be told, or was written just now."""
        try:
            seen = os.stat(f"{self._sandboxes}/{id}/manifest.json", follow_symlinks=False)
        except OSError:
            return None
        # A file system counts time in steps. Within one, a file may be replaced twice and have the number of the first.
        return None if time.time_ns() - seen.st_mtime_ns < _CLOCK_STEP_NS else (seen.st_ino, seen.st_mtime_ns)

    def uncommitted(self) -> set[str]:
        """Ids of the sandboxes that are created or removed, are ephemeral, or wait in a warm pool."""
        return set(self._entries("uncommitted"))

    def references(self) -> tuple[list[References], dict[str, SandboxError]]:
        """What the manifests refer to; and of those that cannot be read, the ids and the errors of `read`.

        Manifests that have not been written since the last call are not read again.
        """
        found: dict[str, tuple[tuple[int, int] | None, References]] = {}
        unreadable = {}
        for id in self._entries("sandboxes"):
            version, known = self.version(id), self._references.get(id)
            if known is not None and version is not None and known[0] == version:
                found[id] = known
                continue
            try:
                if (manifest := self.read(id)) is not None:
                    found[id] = version, References.of(manifest, self.directory(id))
                elif any(self.is_lost(entry, id) for entry in self._entries_of_all()):
                    missing = f"the record of sandbox {id} is missing"
                    unreadable[id] = SandboxError(missing, reason="missing", problem="it is missing")
            except SandboxError as error:
                unreadable[id] = error
        self._references = found
        return [each for _, each in found.values()], unreadable

    def drop_unreadable(self, id: str) -> None:
        """Remove a manifest that cannot be read. Call it in `removing`: the sandbox is abandoned then, and if its
        removal is interrupted, recovery finishes it."""
        remove_record(self.directory(id) / "manifest.json")

    def is_lost(self, entry: str, id: str) -> bool:
        """Whether a sandbox that was found to have no manifest should have one: it is neither created nor removed."""
        if os.path.lexists(self.state_dir / "uncommitted" / id) or not self.resolves_to(entry, id):
            return False
        return not os.path.lexists(self.directory(id) / "manifest.json")  # it may have been created just now

    # ---- runs ----

    def note_run(self, manifest: Manifest) -> None:
        """Note which run of a sandbox is started, so that it can be stopped if the manifest cannot be read."""
        with contextlib.suppress(OSError):  # a full disk does not prevent a start
            (self.directory(manifest.id) / "run").write_text(f"{manifest.runtime} {manifest.run}")

    def noted_run(self, id: str) -> tuple[str | None, str]:
        """The runtime and the id of the run that a sandbox was last started with, without its manifest."""
        try:
            noted = re.fullmatch(r"(\S+) ([0-9]+)", (self.directory(id) / "run").read_text(errors="replace"))
        except OSError:
            noted = None
        return (noted[1], f"{id}.{noted[2]}") if noted else (None, f"{id}.1")

    # ---- creation ----

    @contextlib.contextmanager
    def creating(self, id: str, group: str | None = None) -> Iterator[Path]:
        """The directory of a new, uncommitted sandbox, with its locks held. If this process dies, it is abandoned.

        A sandbox of a `group` stays uncommitted until the group is complete.
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
        """A group of sandboxes to be created. All are committed at once when the context ends without an error."""
        group = os.urandom(8).hex()
        path = self.state_dir / "groups" / group
        fd = open_lock(path)
        try:
            try_lock(fd)
            yield group
            path.unlink()
        finally:
            os.close(fd)
        for id in self._entries("uncommitted"):
            if self._group(id) == group:
                self.commit(id)

    def _group(self, id: str) -> str | None:
        """The group that a sandbox is created with. None: it has no group, or is committed already."""
        with contextlib.suppress(OSError):  # it does not exist, or is no symlink
            group = os.readlink(self.state_dir / "uncommitted" / id)
            return group if _GROUP.fullmatch(group) else None
        return None

    def commit(self, id: str, *, ephemeral: bool = False) -> None:
        """The sandbox is complete: it exists until it is destroyed or, if `ephemeral`, until its last client leaves."""
        if not ephemeral:
            (self.state_dir / "uncommitted" / id).unlink(missing_ok=True)
        self._warm_path("-", id).unlink(missing_ok=True)

    # ---- warm sandboxes ----

    def mark_creating(self, id: str) -> None:
        """Mark a sandbox that is being created for a warm pool."""
        self._warm_path("-", id).touch(mode=0o600)

    def mark_ready(self, id: str, key: str) -> None:
        """Mark it ready to be claimed. The caller holds its locks."""
        self._warm_path("-", id).rename(self._warm_path(key, id))

    def warm(self, key: str) -> list[str]:
        """The ids of the warm sandboxes with this key, some of which may have ended."""
        names = (name.partition(".") for name in os.listdir(self.state_dir / "warm"))
        return [id for its_key, _, id in names if its_key == key and SANDBOX_ID.fullmatch(id)]

    @contextlib.contextmanager
    def claim(self, key: str, wanted: Callable[[Manifest | None], bool]) -> Iterator[Claimed | None]:
        """Claim a warm sandbox, the first that is `wanted`. No other process can claim it then. None: there is none.

        Its locks are held as long as the context lasts; the caller commits or removes it before that. `wanted` is
        called with None for a manifest that cannot be read.
        """
        candidates = self.warm(key)
        import random

        random.shuffle(candidates)  # so that concurrent claims do not all try the same one first
        for id in candidates:
            with contextlib.ExitStack() as stack, contextlib.suppress(FileNotFoundError):
                if not self._try_locks(id, stack):
                    continue
                try:
                    manifest = self.read(id)
                except SandboxError as error:
                    if error.details.get("reason") == "newer":  # another Atoll's, which knows what to do with it
                        continue
                    manifest = None
                if wanted(manifest) and self._try_claim(key, id):
                    held = stack.pop_all()
                    break
        else:
            yield None
            return
        with held:
            yield Claimed(id, manifest)

    def _try_locks(self, id: str, stack: contextlib.ExitStack) -> bool:
        """Hold both locks of a sandbox until `stack` is closed. False: another process holds one."""
        for name in ("busy.lock", "work.lock"):
            fd = os.open(self.directory(id) / name, os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            if not try_lock(fd):
                return False
        return True

    def _try_claim(self, key: str, id: str) -> bool:
        try:
            self._warm_path(key, id).rename(self._warm_path("-", id))
        except FileNotFoundError:  # another process claimed it first
            return False
        return True

    def claim_interrupted(self, id: str) -> bool:
        """Whether it is being created for a warm pool or claimed; if no process works on it, that was interrupted."""
        return self._warm_path("-", id).exists()

    def _warm_path(self, key: str, id: str) -> Path:
        return self.state_dir / "warm" / f"{key}.{id}"

    # ---- removal and changes ----

    @contextlib.asynccontextmanager
    async def removing(
        self, id: str, entry: str | None, *, locked: bool = False, abandoned: bool = False, expired: bool = False
    ) -> AsyncIterator[Path]:
        """The directory of a sandbox that is to be removed, with its locks held. It may not exist any more.

        Before it is given, the name is freed and the sandbox uncommitted, so that an interrupted removal is finished
        later. The caller releases its user ids when nothing has them any more. `entry` is that of its name; without
        it, whichever name it has is freed. `locked`: the caller holds the locks. `abandoned` and `expired`: it is to be
        removed only if it is abandoned, or its lifetime is over.

        Raises:
            SandboxError: another process works on it for too long, or it is not abandoned, or expired, any more.
        """
        directory = self.directory(id)
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                for lock, timeout_s in (("busy.lock", _BUSY_TIMEOUT_S), ("work.lock", _WORK_TIMEOUT_S)):
                    fd = open_lock(directory / lock)
                    stack.callback(os.close, fd)
                    if not locked and not await lock_within(fd, timeout_s):
                        raise lock_timeout(timeout_s, f"working on sandbox {id}", directory / lock)
                if abandoned and not self._is_uncommitted_not_ready(id):
                    raise SandboxError(f"sandbox {id} is not abandoned any more", hint=str(directory))
                if expired and not self.has_expired(id):
                    raise SandboxError(f"the lifetime of sandbox {id} was extended", hint=str(directory))
                with contextlib.suppress(FileExistsError):
                    os.symlink(id, self.state_dir / "uncommitted" / id)
            for warm in os.listdir(self.state_dir / "warm"):
                if warm.endswith(f".{id}"):
                    self._try_claim(warm.partition(".")[0], id)
            # A process that was killed before it wrote the manifest has claimed a name that is recorded only here.
            for each in self._entries_of_all() if entry is None else [entry]:
                if self.resolves_to(each, id):
                    (self.state_dir / "names" / each).unlink(missing_ok=True)
            yield directory
        self.clear_in_progress(id)
        self.set_expiry(id, None)
        self.commit(id)

    def release_ids(self, id: str, slot: int | None) -> None:
        """Release the range of user ids of a sandbox that is removed. Without its `slot`, all are looked at."""
        for each in os.listdir(self.state_dir / "ids") if slot is None else [str(slot)]:
            with contextlib.suppress(OSError):  # released already, or no symlink
                path = self.state_dir / "ids" / each
                if os.readlink(path) == id:
                    path.unlink()

    def resolves_to(self, entry: str, id: str) -> bool:
        """Whether this is the entry of the name of this sandbox: not any more once its removal has begun."""
        try:
            return os.readlink(self.state_dir / "names" / entry) == id
        except OSError:  # it does not exist, or is no symlink
            return False

    @contextlib.asynccontextmanager
    async def working(self, id: str) -> AsyncIterator[int]:
        """Hold the lock for starting, stopping or changing a sandbox, which is in progress meanwhile.

        Gives the lock's descriptor: a program that must end before another process may work on the sandbox gets a copy.

        Raises:
            SandboxDied: it was destroyed.
            SandboxError: another process works on it for too long.
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
        """Mark the id of a sandbox, checkpoint or layer while it is changed. The mark outlives a killed process."""
        mark = self.state_dir / "in-progress" / id
        with contextlib.suppress(OSError):  # it may exist already; and garbage must be removable on a full disk
            mark.symlink_to(id)
        try:
            yield
        finally:
            mark.unlink(missing_ok=True)

    # ---- after interruptions ----

    def interrupted(self) -> list[str]:
        """Ids of sandboxes whose operation was interrupted: the process that worked on them died."""
        return [id for id in self._entries("in-progress", _IN_PROGRESS) if not self._is_in_progress(id)]

    def clear_in_progress(self, id: str) -> None:
        (self.state_dir / "in-progress" / id).unlink(missing_ok=True)

    def abandoned(self) -> list[str]:
        """Ids of uncommitted sandboxes that no process works on, except those that are ready in a warm pool."""
        return sorted(id for id in self._uncommitted_not_ready() if not self.is_being_created(id))

    def _uncommitted_not_ready(self) -> set[str]:
        """Ids of uncommitted sandboxes, except those that are ready in a warm pool."""
        entries = [name.partition(".") for name in os.listdir(self.state_dir / "warm")]
        warm = {id for key, _, id in entries if key != "-" and self.is_alive(id)}
        return (set(self._entries("uncommitted")) - warm) | set(self.warm("-"))

    def _is_uncommitted_not_ready(self, id: str) -> bool:
        """Whether `id` is one of those."""
        keys = [name.partition(".")[0] for name in os.listdir(self.state_dir / "warm") if name.endswith(f".{id}")]
        is_ready = bool(keys) and "-" not in keys and self.is_alive(id)
        return "-" in keys or (os.path.lexists(self.state_dir / "uncommitted" / id) and not is_ready)

    def is_alive(self, id: str) -> bool:
        """Whether its keeper lives."""
        return is_held(self.directory(id) / "keeper.lock")

    def in_progress_ids(self) -> set[str]:
        """Ids of sandboxes that some process creates, removes, starts, stops or changes now."""
        creating = {id for id in self._entries("uncommitted") if self.is_being_created(id)}
        return creating | {id for id in self._entries("in-progress", _IN_PROGRESS) if self._is_in_progress(id)}

    def _is_in_progress(self, id: str) -> bool:
        return is_held(self.directory(id) / "work.lock")

    def is_being_created(self, id: str) -> bool:
        """Whether some process creates or removes it, or creates its group."""
        group = self._group(id)
        return is_held(self.directory(id) / "busy.lock") or (
            group is not None and is_held(self.state_dir / "groups" / group)
        )

    def is_complete(self, manifest: Manifest, *, running: bool) -> bool:
        """Whether an abandoned sandbox only lacks its commit: it has its name and runs, or its group was complete."""
        return self.resolves_to(manifest.entry, manifest.id) and not self._is_partial(manifest.id, running=running)

    def is_undone(self, id: str, *, running: bool) -> bool:
        """Whether a sandbox that has a name is only waiting to be removed by recovery: its creation was interrupted.

        Not for ephemeral ones, which are uncommitted as long as they live.
        """
        if self.is_being_created(id) or not os.path.lexists(self.state_dir / "uncommitted" / id):
            return False
        return self._is_partial(id, running=running)

    def _is_partial(self, id: str, *, running: bool) -> bool:
        """Whether an abandoned sandbox lacks more than its commit."""
        group = self._group(id)
        if self.claim_interrupted(id) or (group is not None and (self.state_dir / "groups" / group).exists()):
            return True
        return not running and group is None

    def _is_left_of_group(self, id: str) -> bool:
        """Whether its group was never completed, and no process creates it any more."""
        group = self._group(id)
        if group is None or is_held(self.state_dir / "groups" / group):
            return False
        return (self.state_dir / "groups" / group).exists()  # it is removed before it is unlocked

    def finish_created(self, id: str) -> None:
        """Commit a complete sandbox whose creator died before it did. Does nothing while some process creates it."""
        if not os.path.lexists(self.state_dir / "uncommitted" / id) or self.is_being_created(id):
            return
        with contextlib.suppress(FileNotFoundError):
            fd = open_lock(self.directory(id) / "busy.lock")
            try:
                if try_lock(fd):
                    self.commit(id)
            finally:
                os.close(fd)

    def orphaned(self) -> list[Path]:
        """Directories without a sandbox: their creator died at once. Call it with the layers locked exclusively."""
        return [
            self.directory(id)
            for id in self._entries("sandboxes")
            if not os.path.lexists(self.state_dir / "uncommitted" / id)
            and not os.path.lexists(self.directory(id) / "manifest.json")
            and self._owner(id) is None
        ]

    def drop_groups(self) -> None:
        """Remove groups whose creators died and that have no members. Call it with the layers locked exclusively."""
        members = {self._group(id) for id in self._entries("uncommitted")}
        for group in set(self._entries("groups", _GROUP)) - members:
            path = self.state_dir / "groups" / group
            if not is_held(path):
                path.unlink(missing_ok=True)


def _require_private(state_dir: Path) -> None:
    """Have the state directory accessible to this user only.

    Raises:
        InvalidRequest: others can write to it, or it is not empty and holds something else than Atoll's state.
    """
    seen = state_dir.stat()
    if seen.st_uid != os.geteuid():
        raise InvalidRequest(
            f"the state directory {state_dir} belongs to the user {seen.st_uid}, not to {os.geteuid()}; name another "
            f"with ATOLL_STATE_DIR, or 'chown {os.geteuid()} {state_dir}'"
        )
    entries = set(os.listdir(state_dir))
    if not seen.st_mode & 0o077:
        return
    if entries and seen.st_mode & 0o022:
        raise InvalidRequest(
            f"other users can write to the state directory {state_dir} (mode {stat.S_IMODE(seen.st_mode):04o}); name "
            f"another with ATOLL_STATE_DIR, or check what is in it and 'chmod 700 {state_dir}'"
        )
    if not ("names" in entries or entries <= _BEFORE_FIRST_USE):  # not /srv or /, which others need
        raise InvalidRequest(
            f"the state directory {state_dir} holds other files, and other users can read it; name a new one with "
            f"ATOLL_STATE_DIR, or 'chmod 700 {state_dir}'"
        )
    _narrow(state_dir)
    if not entries and os.listdir(state_dir):
        raise InvalidRequest(f"another process wrote to the state directory {state_dir} while it was made; try again")


def _narrow(directory: Path) -> None:
    """Take the rights of others on a directory of this user away."""
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & 0o077:
        directory.chmod(mode & ~0o077)


def _sync_and_close(fd: int) -> None:
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


def new_id() -> str:
    """Never used twice: runtimes derive the names of sockets from it."""
    return f"atoll-{os.urandom(8).hex()}"


def now() -> datetime:
    return datetime.now(UTC)
