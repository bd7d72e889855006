"""Watches of `filesystem.Filesystem` of E2B's daemon.

Owns what changes are as E2B's events, and watchers that clients ask for events (`CreateWatcher`): each is a task of
this server, with a bounded number of events that wait. Not here: names and attributes (`filesystem.py`), and the
protocol (`connect.py`).
"""

from __future__ import annotations

import asyncio
import json
import posixpath
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Collection
from contextlib import suppress

import anyio

from atoll.contract.errors import AtollError, FileError
from atoll.contract.model import FileChange
from atoll.surfaces.e2b.accounts import SandboxAccounts
from atoll.surfaces.e2b.connect import RpcCall, RpcError, RpcMessage, RpcMethods, next_or_ping, parse
from atoll.surfaces.e2b.control import E2bBody
from atoll.surfaces.e2b.filesystem import SERVICE, FilesystemService, PathRequest
from atoll.tools.tool import readable

MAX_WATCHERS = 64
"""Of one sandbox."""
MAX_EVENTS = 10_000
"""Of one watcher: of more, the oldest are dropped."""
MAX_WAITING_BYTES = 1024 * 1024
"""Of one watcher's events, as JSON: a name alone may have 4 KiB. Of more, the oldest are dropped."""
_SETTLE_S = 0.03
_SETTLE_AT_MOST_S = 0.3
_CHANGES = {
    "created": "EVENT_TYPE_CREATE",
    "modified": "EVENT_TYPE_WRITE",
    "deleted": "EVENT_TYPE_REMOVE",
    "moved_from": "EVENT_TYPE_RENAME",
    "moved_to": "EVENT_TYPE_CREATE",
    "attributes": "EVENT_TYPE_CHMOD",
}


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
        self.events: deque[bytes] = deque()
        self._waiting_bytes = 0
        self.task: asyncio.Task[None] | None = None
        self.failure: AtollError | RpcError | None = None
        self.came = anyio.Event()

    def add(self, event: RpcMessage) -> None:
        """One write may be several changes, of which the client needs to be told once."""
        data = json.dumps(event, separators=(",", ":")).encode()
        is_repetition = event["type"] == _CHANGES["modified"] and self.events and self.events[-1] == data
        if not is_repetition:
            self.events.append(data)
            self._waiting_bytes += len(data)
        while len(self.events) > MAX_EVENTS or self._waiting_bytes > MAX_WAITING_BYTES:
            self._take()
        self.came.set()

    def _take(self) -> bytes:
        data = self.events.popleft()
        self._waiting_bytes -= len(data)
        return data

    def take_all(self) -> list[RpcMessage]:
        """The events that wait, which no longer do."""
        return [json.loads(self._take()) for _ in range(len(self.events))]

    def end(self) -> None:
        """Stop collecting."""
        if self.task is not None:
            self.task.cancel()

    async def settle(self) -> None:
        """Wait until nothing came for a moment: clients ask for what they have just done, and expect it."""
        with anyio.move_on_after(_SETTLE_AT_MOST_S):
            while self.failure is None:
                self.came = anyio.Event()
                with anyio.move_on_after(_SETTLE_S) as quiet:
                    await self.came.wait()
                if quiet.cancelled_caught:
                    return


class WatchService:
    """Its calls about watches, for all sandboxes."""

    def __init__(self, accounts: SandboxAccounts, filesystem: FilesystemService) -> None:
        self._accounts = accounts
        self._filesystem = filesystem
        self._watchers: dict[str, _Watcher] = {}

    def methods(self) -> RpcMethods:
        return RpcMethods(
            {
                f"{SERVICE}/CreateWatcher": self._create_watcher,
                f"{SERVICE}/GetWatcherEvents": self._watcher_events,
                f"{SERVICE}/RemoveWatcher": self._remove_watcher,
            },
            {f"{SERVICE}/WatchDir": self._watch_dir},
            {},
        )

    def aclose(self) -> None:
        self.forget_gone(())

    def forget_gone(self, sandboxes: Collection[str]) -> None:
        """Forget the watchers of all other sandboxes."""
        for id in [id for id, watcher in self._watchers.items() if watcher.sandbox_id not in sandboxes]:
            self._watchers.pop(id).end()

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
        id, watcher = secrets.token_hex(12), _Watcher(call.sandbox.id)
        began: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def collect() -> None:
            try:
                async with call.sandbox.files.watch(path, recursive=wanted.recursive, user=call.user) as changes:
                    if not began.done():
                        began.set_result(None)
                    async for change in changes:
                        if (event := await self._event(call, path, change, wanted)) is not None:
                            watcher.add(event)
            except (AtollError, RpcError) as error:
                watcher.failure = error
                if not began.done():
                    began.set_exception(error)

        watcher.task = asyncio.get_running_loop().create_task(collect())
        self._watchers[id] = watcher  # it counts from now on
        try:
            await began
        except BaseException:
            self._watchers.pop(id, watcher).end()
            raise
        return {"watcherId": id}

    async def _watcher_events(self, call: RpcCall, body: bytes) -> RpcMessage:
        watcher = self._watcher(call, parse(WatcherRequest, body).watcher_id)
        await watcher.settle()
        events = watcher.take_all()
        if watcher.failure is not None and not events:
            raise watcher.failure
        return {"events": events}

    async def _remove_watcher(self, call: RpcCall, body: bytes) -> RpcMessage:
        id = parse(WatcherRequest, body).watcher_id
        self._watcher(call, id).end()
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
                event["entry"] = await self._filesystem.entry(
                    call.sandbox, posixpath.join(path, change.path), call.user
                )
        return event
