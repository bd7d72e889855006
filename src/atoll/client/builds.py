"""The templates of a server, and its builds: files are uploaded, a plan is sent, and the log is followed.

Owns `RemoteTemplates`, which implements `Templates` (`runtime/interface.py`), and `RemoteBuilds`. A log that breaks off
is followed again from the line after the last, for as long as a server may take to come back. Not here: what a plan is,
and which files it copies (`atoll.builds`, which sends them: `builds/remote.py`). Used by `engine.py`.
"""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio

from atoll.client.http import RETRY_S, new_key, path_of
from atoll.client.stores import events_of
from atoll.contract.errors import AtollError, BuildNotFound, ServerUnavailable, TemplateNotFound
from atoll.contract.model import Build, BuildLogLine, Template, TemplateVersion
from atoll.contract.names import TEMPLATE_PREFIX, split_template

if TYPE_CHECKING:
    from atoll.client.http import HttpClient

CANCEL_S = 30.0
"""How long a build may take to end, for a caller that is cancelled."""
_PAUSE_S = 0.5


class RemoteTemplates:
    """The templates of a tenant of a server."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    async def list(self) -> builtins.list[Template]:
        """As `TemplateStore.list`."""
        return [Template.model_validate(each) for each in await self._http.items(path_of("templates"))]

    async def get(self, name: str) -> Template:
        """As `TemplateStore.get`."""
        try:
            return Template.model_validate(await self._http.get(path_of("templates", name)))
        except TemplateNotFound:
            raise await self._unknown(name) from None

    async def version(self, reference: str) -> TemplateVersion:
        """As `TemplateStore.version`."""
        name, tag = split_template(reference)
        template = await self.get(name)
        if tag not in template.versions:
            raise TemplateNotFound(f"{name}:{tag}", [f"{name}:{each}" for each in template.versions])
        return template.versions[tag]

    async def tag(self, reference: str, tags: Sequence[str]) -> None:
        """As `TemplateStore.tag`."""
        name, tag = split_template(reference)
        await self.version(reference)
        for each in tags:
            await self._http.send("PUT", path_of("templates", name, "tags", each), {"version": tag})

    async def remove(self, reference: str) -> None:
        """As `TemplateStore.remove`."""
        name, tag = split_template(reference)
        has_tag = ":" in reference.removeprefix(TEMPLATE_PREFIX)
        path = path_of("templates", name, "tags", tag) if has_tag else path_of("templates", name)
        try:
            await self._http.send("DELETE", path)
        except TemplateNotFound:
            raise await self._unknown(f"{name}:{tag}" if has_tag else name) from None

    async def remove_unneeded(self) -> builtins.list[str]:
        """Remove the kept results of steps that no template needs. Returns the ids of the checkpoints."""
        removed: builtins.list[str] = (await self._http.post(path_of("templates", "gc")))["removed"]
        return removed

    async def _unknown(self, wanted: str) -> TemplateNotFound:
        return TemplateNotFound(wanted, [each.name for each in await self.list()])


class RemoteBuilds:
    """The builds of a tenant of a server."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    async def has_files(self, name: str) -> bool:
        """Whether an archive for copies was uploaded under this name and is still there."""
        try:
            await self._http.get(path_of("builds", "files", name))
        except BuildNotFound:
            return False
        return True

    async def upload_files(
        self, name: str, chunks: AsyncIterator[bytes], report: Callable[[int], None] = lambda _done: None
    ) -> None:
        """Upload an archive, a tar, under a name of 64 hexadecimal digits. `report` is told how many bytes were sent.

        Raises:
            InvalidRequest: it is too large.
        """

        async def told() -> AsyncIterator[bytes]:
            size = 0
            async for chunk in chunks:
                yield chunk
                size += len(chunk)
                report(size)

        tar = {"Content-Type": "application/x-tar"}
        async with self._http.stream("PUT", path_of("builds", "files", name), content=told(), headers=tar) as answer:
            await answer.aread()

    async def create(self, request: Mapping[str, Any]) -> Build:
        """Begin a build: the body of `POST /api/v1/builds`. One whose request is cancelled is cancelled.

        Raises:
            BuildFailed: the plan cannot be built, or its files are not there.
        """
        key = new_key()
        try:
            return Build.model_validate(await self._http.post(path_of("builds"), request, key=key))
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(CANCEL_S, shield=True), suppress(AtollError):
                begun = await self._http.post(path_of("builds"), request, key=key)  # what the first has begun
                await self.cancel(begun["id"])
            raise

    async def list(self) -> builtins.list[Build]:
        """The builds that are remembered, from the first."""
        return [Build.model_validate(each) for each in await self._http.items(path_of("builds"))]

    async def get(self, id: str) -> Build:
        """
        Raises:
            BuildNotFound: there is none of this id.
        """
        return Build.model_validate(await self._http.get(path_of("builds", id)))

    async def cancel(self, id: str) -> Build:
        """End a build, and return when it has. One that has ended stays as it is.

        Raises:
            BuildNotFound: there is none of this id.
        """
        return Build.model_validate((await self._http.send("POST", path_of("builds", id, "cancel"))).json())

    async def follow(self, id: str) -> AsyncIterator[BuildLogLine | Build]:
        """The lines of a build's log as they are written; last, the build, once it has ended.

        Raises:
            BuildNotFound: there is none of this id.
            ServerUnavailable: the server went away, and did not come back.
        """
        last, deadline = 0, anyio.current_time() + RETRY_S
        while True:
            try:
                path = path_of("builds", id, "events")
                async for event, data in events_of(self._http, "GET", path, params={"after": last}):
                    deadline = anyio.current_time() + RETRY_S
                    if event == "done":
                        yield Build.model_validate(data)
                        return
                    line = BuildLogLine.model_validate(data)
                    last = line.number
                    yield line
            except ServerUnavailable:
                if anyio.current_time() > deadline:
                    raise
            await anyio.sleep(_PAUSE_S)
