"""An HTTP client that does just what a test says: connections of its own, headers as given, pieces as they come."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import anyio
import h11
from anyio.abc import SocketStream

from atoll import Preview


def port_of(preview: Preview) -> int:
    """Where previews are served."""
    return urlsplit(preview.url).port or 0


def host_of(preview: Preview) -> str:
    return urlsplit(preview.url).netloc


class Response:
    def __init__(self, status: int, headers: list[tuple[str, str]], body: bytes = b"") -> None:
        self.status = status
        self.headers = headers
        self.body = body

    def all(self, name: str) -> list[str]:
        return [value for found, value in self.headers if found == name]

    def header(self, name: str) -> str:
        (value,) = self.all(name)
        return value

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """One connection to where a preview is served, with its host and, unless told otherwise, its token."""

    def __init__(self, preview: Preview, *, token: bool = True) -> None:
        self.preview = preview
        self._default = {"Host": host_of(preview)} | ({"Atoll-Token": preview.token} if token else {})

    async def __aenter__(self) -> Self:
        self.stream: SocketStream = await anyio.connect_tcp("127.0.0.1", port_of(self.preview))
        self._http = h11.Connection(h11.CLIENT)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.stream.aclose()

    async def ask(self, target: str = "/", *, method: str = "GET", body: bytes = b"", **headers: str) -> Response:
        """One request and the whole of its response."""
        if body:
            headers["Content_Length"] = str(len(body))
        await self.begin(target, method=method, **headers)
        if body:
            await self.send(body)
        await self.end()
        response = await self.head()
        response.body = b"".join([piece async for piece in self.pieces()])
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        return response

    async def begin(self, target: str, *, method: str = "GET", **headers: str) -> None:
        given = {**self._default, **{name.replace("_", "-"): value for name, value in headers.items()}}
        head = h11.Request(method=method, target=target, headers=list(given.items()))
        await self.stream.send(self._http.send(head))

    async def send(self, data: bytes) -> None:
        await self.stream.send(self._http.send(h11.Data(data=data)))

    async def end(self) -> None:
        if data := self._http.send(h11.EndOfMessage()):
            await self.stream.send(data)

    async def head(self) -> Response:
        while not isinstance(event := await self._next(), h11.Response):
            assert isinstance(event, h11.InformationalResponse), event
        return Response(event.status_code, [(name.decode(), value.decode()) for name, value in event.headers])

    async def pieces(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)

    async def _next(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            try:
                self._http.receive_data(await self.stream.receive())
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                self._http.receive_data(b"")
        return event


async def ask(preview: Preview, target: str = "/", *, token: bool = True, **options: Any) -> Response:
    """One request on a connection of its own."""
    async with Client(preview, token=token) as client:
        return await client.ask(target, **options)


async def say(preview: Preview, text: bytes) -> bytes:
    """Send bytes as they are, and return all that comes back until the other side closes.

    Raises:
        anyio.BrokenResourceError: it broke the connection off.
    """
    async with await anyio.connect_tcp("127.0.0.1", port_of(preview)) as stream:
        await stream.send(text)
        return b"".join([data async for data in stream])
