"""Requests to a server: one client for all of them, and when a request is sent again.

Owns the key, the pool of connections, and what a broken connection means. A request is repeated where that is safe: it
only reads, or it has an `Idempotency-Key`, with which the server does nothing twice; any request, if the connection was
never made to a server that has answered before. For `RETRY_S`, so that a server may be restarted meanwhile. Errors that
the server sends are raised as the classes that a local engine raises (`failures.py`). Used by the rest of the package.
"""

from __future__ import annotations

import json
import secrets
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import anyio
import httpx2

from atoll.client.failures import error_of, unreachable
from atoll.contract.errors import InvalidRequest

if TYPE_CHECKING:
    from pydantic import SecretStr

RETRY_S = 15.0
"""For how long a request is repeated that can be."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_CONNECT_S, _ANSWER_S = 10.0, 900.0
_PAGE = 1000
_MAX_CONNECTIONS = 128

Body = Mapping[str, object]


def path_of(*parts: str) -> str:
    """A path below /api/v1, with each part quoted."""
    return "/api/v1/" + "/".join(quote(part, safe="") for part in parts)


def new_key() -> str:
    """An `Idempotency-Key`: of one request, however often it is sent."""
    return secrets.token_hex(16)


class HttpClient:
    """Requests to one server, with one key."""

    def __init__(
        self,
        url: str,
        key: SecretStr,
        *,
        tenant: str | None,
        trust: ssl.SSLContext | None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """`transport` takes the place of the network."""
        self.url = _checked(url)
        self.trust = trust
        self._reached = False
        self._headers = {"X-API-Key": key.get_secret_value(), "Atoll-Tunnel": "true"}
        if tenant is not None:
            self._headers["Atoll-Tenant"] = tenant
        self._client = httpx2.AsyncClient(
            base_url=self.url,
            headers=self._headers,
            timeout=httpx2.Timeout(_ANSWER_S, connect=_CONNECT_S, pool=None),
            limits=httpx2.Limits(max_connections=_MAX_CONNECTIONS, max_keepalive_connections=16),
            verify=trust if trust is not None else True,
            trust_env=False,
            transport=transport,
        )

    @property
    def headers(self) -> Mapping[str, str]:
        """Those of every request, for a WebSocket."""
        return self._headers

    def websocket_url(self, path: str) -> str:
        return f"ws{self.url.removeprefix('http')}{path}"

    async def aclose(self) -> None:
        await self._client.aclose()

    async def get(self, path: str, **params: object) -> Any:
        return (await self.send("GET", path, params=params)).json()

    async def items(self, path: str, **params: object) -> list[Any]:
        """All items of a list, whose pages are fetched one after the other."""
        found: list[Any] = []
        after: str | None = None
        while True:
            page = await self.get(path, limit=_PAGE, after=after, **params)
            found += page["items"]
            after = page["next"]
            if after is None:
                return found

    async def post(self, path: str, body: Body | None = None, *, key: str | None = None, **params: object) -> Any:
        """With an `Idempotency-Key`, `key`, it may be repeated."""
        answer = await self.send("POST", path, body, key=key, params=params)
        return answer.json() if answer.content else None

    async def send(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        key: str | None = None,
        params: Mapping[str, object] | None = None,
    ) -> httpx2.Response:
        """
        Raises:
            AtollError: what the server sent.
            ServerUnavailable: it cannot be reached, or went away before it answered. At once if it never answered
                this client, whose address of it may be wrong.
        """
        repeatable, repeated = key is not None or method in ("GET", "PUT", "DELETE"), False
        request = self._client.build_request(
            method,
            path,
            params=_query(params),
            content=None if body is None else json.dumps(body).encode(),
            headers=({"Content-Type": "application/json"} if body is not None else {})
            | ({"Idempotency-Key": key} if key is not None else {}),
        )
        pause_s = _FIRST_PAUSE_S
        deadline = anyio.current_time() + RETRY_S
        while True:
            try:
                answer = await self._client.send(request)
            except httpx2.TransportError as error:
                never_sent = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout)
                repeated |= not never_sent
                waits = self._reached if never_sent else repeatable
                if not waits or anyio.current_time() + pause_s > deadline:
                    raise unreachable(error, self.url, sent=repeated) from error
                await anyio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            self._reached = True
            done_before = method == "DELETE" and answer.status_code == 404 and repeated  # by the request that was lost
            if answer.is_success or done_before:
                return answer
            raise error_of(answer.status_code, answer.content)

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, object] | None = None,
        content: AsyncIterator[bytes] | bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[httpx2.Response]:
        """A request whose answer is read as it comes. It is not repeated.

        Raises:
            what `send` raises.
        """
        given = {"Content-Type": "application/octet-stream"} if content is not None else {}
        try:
            async with self._client.stream(
                method, path, params=_query(params), content=content, headers={**given, **(headers or {})}
            ) as answer:
                if not answer.is_success:
                    raise error_of(answer.status_code, await answer.aread())
                yield answer
        except httpx2.TransportError as error:
            raise unreachable(error, self.url) from error


def _query(params: Mapping[str, object] | None) -> dict[str, Any]:
    """Without what is unset; truth in lower case."""
    given = {name: value for name, value in (params or {}).items() if value is not None}
    return {name: str(value).lower() if isinstance(value, bool) else value for name, value in given.items()}


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise InvalidRequest(f"{url!r} is no address of a server; write one such as 'https://atoll.example.com'")
    return url.rstrip("/")
