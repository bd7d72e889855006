"""`filesystem.Filesystem` of E2B's daemon: names, attributes and watches.

Owns the translation, and watchers that clients ask for events (`CreateWatcher`): each is a task of this server, with a
bounded number of events that wait. Not here: contents of files (`transfer.py`), and the protocol (`connect.py`).
"""

from __future__ import annotations

import asyncio
import posixpath
import secrets
import stat
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress

from pydantic import Field

from atoll.contract.errors import AtollError, FileError, PathNotDirectory, PathNotFound
from atoll.contract.model import FileChange, FileStat
from atoll.runtime.sandbox import Sandbox
from atoll.surfaces.e2b.accounts import ROOT, Accounts, SandboxAccounts, as_user
from atoll.surfaces.e2b.connect import RpcCall, RpcError, RpcMessage, RpcMethods, next_or_ping, parse
from atoll.surfaces.e2b.control import E2bBody
from atoll.tools.tool import readable

SERVICE = "/filesystem.Filesystem"
MAX_ENTRIES = 100_000
"""Of one listing."""
MAX_WATCHERS = 64
"""Of one sandbox."""
MAX_EVENTS = 10_000
"""Of one watcher: of more, the oldest are dropped."""
_TYPES = {"file": "FILE_TYPE_FILE", "directory": "FILE_TYPE_DIRECTORY", "symlink": "FILE_TYPE_SYMLINK"}
_CHANGES = {
    "created": "EVENT_TYPE_CREATE",
    "modified": "EVENT_TYPE_WRITE",
    "deleted": "EVENT_TYPE_REMOVE",
    "moved_from": "EVENT_TYPE_RENAME",
    "moved_to": "EVENT_TYPE_CREATE",
    "attributes": "EVENT_TYPE_CHMOD",
}


class PathRequest(E2bBody):
    path: str = ""


class ListRequest(PathRequest):
    depth: int = Field(default=1, ge=0, le=1000)


class MoveRequest(E2bBody):
    source: str = ""
    destination: str = ""


class WatchRequest(PathRequest):
    recursive: bool = False
    include_entry: bool = False
    allow_network_mounts: bool = False


class WatcherRequest(E2bBody):
    watcher_id: str = ""


class _Watcher:
    """A watch whose events wait for their client."""

    def __init__(self, sandbox_id: str) -> None:
        self.sandbox_id = sandbox_id
        self.events: deque[RpcMessage] = deque(maxlen=MAX_EVENTS)
        self.task: asyncio.Task[None] | None = None
        self.failure: AtollError | RpcError | None = None


class FilesystemService:
    """The service, for all sandboxes."""

    def __init__(self, accounts: SandboxAccounts) -> None:
        self._accounts = accounts
        self._watchers: dict[str, _Watcher] = {}

    def methods(self) -> RpcMethods:
        return RpcMethods(
            {
                f"{SERVICE}/Stat": self._stat,
                f"{SERVICE}/MakeDir": self._make_dir,
                f"{SERVICE}/Move": self._move,
                f"{SERVICE}/ListDir": self._list_dir,
                f"{SERVICE}/Remove": self._remove,
                f"{SERVICE}/CreateWatcher": self._create_watcher,
                f"{SERVICE}/GetWatcherEvents": self._watcher_events,
                f"{SERVICE}/RemoveWatcher": self._remove_watcher,
            },
            {f"{SERVICE}/WatchDir": self._watch_dir},
            {},
        )

    def aclose(self) -> None:
        for watcher in self._watchers.values():
            if watcher.task is not None:
                watcher.task.cancel()
        self._watchers.clear()

    # ---------------------------------------------------------------------------------------------------- names

    async def _stat(self, call: RpcCall, body: bytes) -> RpcMessage:
        path = await self._accounts.resolve(call.sandbox, parse(PathRequest, body).path, call.user)
        return {"entry": await self.entry(call.sandbox, path, call.user)}

    async def _make_dir(self, call: RpcCall, body: bytes) -> RpcMessage:
        files = call.sandbox.files
        path = await self._accounts.resolve(call.sandbox, parse(PathRequest, body).path, call.user)
        try:
            found = await as_user(call.user, lambda user: files.stat(path, user=user))
        except (PathNotFound, PathNotDirectory):
            found = None
        if found is not None and found.kind == "directory":
            raise RpcError("already_exists", f"directory already exists: {path}")
        if found is not None:
            raise RpcError("invalid_argument", f"path already exists but it is not a directory: {path}")
        await self.make_parents(call.sandbox, posixpath.join(path, "."), call.user)
        return {"entry": await self.entry(call.sandbox, path, call.user)}

    async def make_parents(self, sandbox: Sandbox, path: str, user: str | None) -> None:
        """Make the directories above a path. They are the user's, also where only root may make them."""
        files, owner = sandbox.files, user or sandbox.info.user
        missing: list[str] = []

        async def make(who: str | None) -> None:
            directory = posixpath.dirname(path)
            missing.clear()
            while directory not in ("", "/") and not await files.exists(directory, user=who):
                missing.append(directory)
                directory = posixpath.dirname(directory)
            if missing:
                await files.mkdir(missing[0], user=who)
                if who == ROOT and owner != ROOT:
                    for each in missing:
                        await files.chown(each, owner, user=ROOT)

        await as_user(user, make)

    async def _move(self, call: RpcCall, body: bytes) -> RpcMessage:
        wanted = parse(MoveRequest, body)
        source, target = [
            await self._accounts.resolve(call.sandbox, each, call.user) for each in (wanted.source, wanted.destination)
        ]
        files = call.sandbox.files
        await as_user(call.user, lambda user: files.stat(source, follow=False, user=user))
        await self.make_parents(call.sandbox, target, call.user)
        await as_user(call.user, lambda user: files.rename(source, target, user=user))
        return {"entry": await self.entry(call.sandbox, target, call.user)}

    async def _remove(self, call: RpcCall, body: bytes) -> RpcMessage:
        path = await self._accounts.resolve(call.sandbox, parse(PathRequest, body).path, call.user)
        files = call.sandbox.files
        await as_user(call.user, lambda user: files.remove(path, recursive=True, missing_ok=True, user=user))
        return {}

    async def _list_dir(self, call: RpcCall, body: bytes) -> RpcMessage:
        wanted = parse(ListRequest, body)
        path = await self._accounts.resolve(call.sandbox, wanted.path, call.user)
        files = call.sandbox.files
        accounts = await self._accounts.of(call.sandbox)
        shown: list[RpcMessage] = []
        ahead = [(path, 1)]
        while ahead:
            directory, depth = ahead.pop()
            try:
                found = await as_user(call.user, lambda user: files.list(directory, user=user))  # noqa: B023 - awaited
            except PathNotDirectory:
                raise RpcError("invalid_argument", f"path is not a directory: {directory}") from None
            if len(shown) + len(found) > MAX_ENTRIES:
                raise RpcError("resource_exhausted", f"the listing has more than {MAX_ENTRIES} entries")
            for each in found:
                below = posixpath.join(directory, each.name)
                shown.append(await self._shown(call.sandbox, below, each, call.user, accounts))
                if each.kind == "directory" and depth < max(1, wanted.depth):
                    ahead.append((below, depth + 1))
        shown.sort(key=lambda each: each["path"])
        return {"entries": shown}

    # ------------------------------------------------------------------------------------------------ attributes

    async def entry(self, sandbox: Sandbox, path: str, user: str | None) -> RpcMessage:
        """What is at a path.

        Raises:
            PathNotFound: nothing is.
        """
        found = await as_user(user, lambda who: sandbox.files.stat(path, follow=False, user=who))
        return await self._shown(sandbox, path, found, user, await self._accounts.of(sandbox))

    async def _shown(
        self, sandbox: Sandbox, path: str, found: FileStat, user: str | None, accounts: Accounts
    ) -> RpcMessage:
        """A symlink has the type of what it leads to, if that is there."""
        kind, extra = found.kind, {}
        if found.kind == "symlink":
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), found.target or ""))
            extra = {"symlinkTarget": readable(target), "isSymlink": True}
            try:
                kind = (await as_user(user, lambda who: sandbox.files.stat(path, user=who))).kind
            except FileError:
                kind = "symlink"
        bits = {"directory": stat.S_IFDIR, "symlink": stat.S_IFLNK}.get(found.kind, stat.S_IFREG)
        return {
            "name": readable(posixpath.basename(path) or "/"),
            "type": _TYPES.get(kind, "FILE_TYPE_UNSPECIFIED"),
            "path": readable(path),
            "size": str(found.size),
            "mode": found.mode,
            "permissions": stat.filemode(bits | found.mode),
            "owner": accounts.users.get(found.uid, str(found.uid)),
            "group": accounts.groups.get(found.gid, str(found.gid)),
            "modifiedTime": found.mtime.isoformat().replace("+00:00", "Z"),
            **extra,
        }

    # --------------------------------------------------------------------------------------------------- watches

    async def _watch_dir(self, call: RpcCall, body: bytes) -> AsyncGenerator[RpcMessage, None]:
        wanted = parse(WatchRequest, body)
        path = await self._directory(call, wanted.path)
        async with call.sandbox.files.watch(path, recursive=wanted.recursive, user=call.user) as changes:
            yield {"start": {}}
            while True:
                try:
                    change = await next_or_ping(changes, call.ping_s)
                except StopAsyncIteration:
                    return
                if change is None:
                    yield {"keepalive": {}}
                elif (event := await self._event(call, path, change, wanted)) is not None:
                    yield {"filesystem": event}

    async def _create_watcher(self, call: RpcCall, body: bytes) -> RpcMessage:
        wanted = parse(WatchRequest, body)
        path = await self._directory(call, wanted.path)
        self._watchers = {id: each for id, each in self._watchers.items() if each.failure is None or each.events}
        if sum(each.sandbox_id == call.sandbox.id for each in self._watchers.values()) >= MAX_WATCHERS:
            raise RpcError("resource_exhausted", f"the sandbox has {MAX_WATCHERS} watchers; remove one first")
        watcher = _Watcher(call.sandbox.id)
        began: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def collect() -> None:
            try:
                async with call.sandbox.files.watch(path, recursive=wanted.recursive, user=call.user) as changes:
                    began.set_result(None)
                    async for change in changes:
                        if (event := await self._event(call, path, change, wanted)) is not None:
                            watcher.events.append(event)
            except (AtollError, RpcError) as error:
                watcher.failure = error
                if not began.done():
                    began.set_exception(error)

        watcher.task = asyncio.get_running_loop().create_task(collect())
        await began
        id = secrets.token_hex(12)
        self._watchers[id] = watcher
        return {"watcherId": id}

    async def _watcher_events(self, call: RpcCall, body: bytes) -> RpcMessage:
        watcher = self._watcher(call, parse(WatcherRequest, body).watcher_id)
        events = [*watcher.events]
        watcher.events.clear()
        if watcher.failure is not None and not events:
            raise watcher.failure
        return {"events": events}

    async def _remove_watcher(self, call: RpcCall, body: bytes) -> RpcMessage:
        id = parse(WatcherRequest, body).watcher_id
        watcher = self._watcher(call, id)
        if watcher.task is not None:
            watcher.task.cancel()
        del self._watchers[id]
        return {}

    def _watcher(self, call: RpcCall, id: str) -> _Watcher:
        watcher = self._watchers.get(id)
        if watcher is None or watcher.sandbox_id != call.sandbox.id:
            raise RpcError("not_found", f"watcher with id {id[:64]} not found")
        return watcher

    async def _directory(self, call: RpcCall, path: str) -> str:
        absolute = await self._accounts.resolve(call.sandbox, path, call.user)
        found = await call.sandbox.files.stat(absolute, user=call.user)
        if found.kind != "directory":
            raise RpcError("invalid_argument", f"path {absolute} not a directory")
        return absolute

    async def _event(self, call: RpcCall, path: str, change: FileChange, wanted: WatchRequest) -> RpcMessage | None:
        type = _CHANGES.get(change.change)
        if type is None or not change.path:
            return None
        event: RpcMessage = {"name": readable(change.path), "type": type}
        if wanted.include_entry and change.change not in ("deleted", "moved_from"):
            with suppress(FileError):  # it is gone again
                event["entry"] = await self.entry(call.sandbox, posixpath.join(path, change.path), call.user)
        return event
