"""The images and volumes of a server, and its events as they come.

Owns `RemoteImages` and `RemoteVolumes`, which implement `Images` and `Volumes` (`runtime/interface.py`), and
`events_of`. Used by `engine.py`.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from atoll.client.failures import error_of
from atoll.client.http import HttpClient, path_of
from atoll.client.transfer import read_chunks, written_file
from atoll.contract.errors import InvalidRequest, SandboxError, VolumeNotFound
from atoll.contract.model import Volume
from atoll.runtime.images.contents import ImageContents
from atoll.runtime.images.reference import ImageReference
from atoll.runtime.images.store import ImageInfo, ImageLayers

if TYPE_CHECKING:
    from atoll.runtime.images.fetch import ProgressCallback


async def events_of(
    http: HttpClient,
    method: str,
    path: str,
    body: Mapping[str, object] | None = None,
    *,
    params: Mapping[str, object] | None = None,
) -> AsyncIterator[tuple[str, Any]]:
    """The name and data of each event of an answer that goes on, until the server ends it.

    Raises:
        AtollError: what the server sent, also as the last event.
        ServerUnavailable: the connection broke.
    """
    headers = {"Accept": "text/event-stream"}
    content = None
    if body is not None:
        headers["Content-Type"], content = "application/json", json.dumps(body).encode()
    async with http.stream(method, path, params=params, content=content, headers=headers) as answer:
        name, data = "message", ""
        async for line in answer.aiter_lines():
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                data += value
            elif not line and data:
                if name == "error":
                    raise error_of(500, data.encode())
                yield name, json.loads(data)
                name, data = "message", ""


class RemoteImages:
    """The images of a server."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    async def resolve(self, reference: str, *, progress: ProgressCallback | None = None) -> ImageLayers:
        """As `ImageStore.resolve`, without its file systems, which are the server's."""
        image = await self._present(reference) or await self.pull(reference, progress=progress)
        return ImageLayers(
            filesystems=(),
            env=image.env,
            user=image.user,
            working_directory=image.working_directory,
            digest=image.digest,
        )

    async def contents(self, reference: str) -> ImageContents | None:
        """As `ImageStore.contents`."""
        found = await self._http.get(path_of("host", "image-contents"), reference=reference)
        return None if found["contents"] is None else ImageContents.model_validate(found["contents"])

    async def pull(self, reference: str, *, progress: ProgressCallback | None = None) -> ImageInfo:
        """As `ImageStore.pull`."""
        async for name, data in events_of(self._http, "POST", path_of("images"), {"reference": reference}):
            if name == "progress" and progress is not None:
                progress(data["step"], data["done_bytes"], data["total_bytes"])
            elif name == "done":
                return ImageInfo.model_validate(data)
        raise SandboxError(f"the server ended its answer before the image {reference} was there")

    async def _present(self, reference: str) -> ImageInfo | None:
        wanted = ImageReference.parse(reference)
        for image in await self.list():
            if ImageReference.parse(image.reference).name == wanted.name:
                return image
        return None

    async def import_(self, source: Path, reference: str, *, progress: ProgressCallback | None = None) -> ImageInfo:  # noqa: ARG002
        """Refused: images of files of this machine cannot be sent to a server."""
        raise InvalidRequest(
            f"an image cannot be imported through a server; import {reference} on the server's machine (atoll images "
            "import), or push it to a registry and pull it"
        )

    async def remove(self, reference: str) -> None:
        """As `ImageStore.remove`."""
        await self._http.send("DELETE", f"{path_of('images')}/{quote(reference, safe='/:@')}")

    async def list(self) -> builtins.list[ImageInfo]:
        """As `ImageStore.list`."""
        return [ImageInfo.model_validate(each) for each in await self._http.items(path_of("images"))]


class RemoteVolumes:
    """The volumes of a tenant of a server."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    async def create(self, name: str, size_bytes: int | None = None) -> Volume:
        """As `VolumeStore.create`."""
        body = {"name": name} | ({} if size_bytes is None else {"size_bytes": size_bytes})
        return Volume.model_validate(await self._http.post(path_of("volumes"), body))

    async def list(self) -> builtins.list[Volume]:
        """As `VolumeStore.list`."""
        return [Volume.model_validate(each) for each in await self._http.items(path_of("volumes"))]

    async def get(self, name: str) -> Volume:
        """As `VolumeStore.get`."""
        try:
            return Volume.model_validate(await self._http.get(path_of("volumes", name)))
        except VolumeNotFound:
            raise await self._unknown(name) from None

    async def remove(self, name: str) -> None:
        """As `VolumeStore.remove`."""
        try:
            await self._http.send("DELETE", path_of("volumes", name))
        except VolumeNotFound:
            raise await self._unknown(name) from None

    async def export(self, name: str, path: Path | str) -> int:
        """As `VolumeStore.export`."""
        try:
            async with (
                self._http.stream("GET", path_of("volumes", name, "export")) as answer,
                written_file(path) as file,
            ):
                return await file.write_all(answer.aiter_bytes(), lambda _done: None)
        except VolumeNotFound:
            raise await self._unknown(name) from None

    async def import_(self, name: str, path: Path | str, size_bytes: int | None = None) -> Volume:
        """As `VolumeStore.import_`."""
        content = read_chunks(path, lambda _done: None)
        given = {"size_bytes": size_bytes}
        async with self._http.stream(
            "POST", path_of("volumes", name, "import"), params=given, content=content
        ) as answer:
            return Volume.model_validate(json.loads(await answer.aread()))

    async def _unknown(self, name: str) -> VolumeNotFound:
        return VolumeNotFound(name, [each.name for each in await self.list()])
