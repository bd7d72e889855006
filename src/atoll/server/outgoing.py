"""Connections that the server makes to addresses of tenants: webhooks, and bundles behind a URL.

Owns which URLs are called at all, and that a connection goes to an address that was checked: a tenant's URL is hostile.
Its name is resolved once, each address is checked against the policy, and no message tells an address. Not here: which
policy holds, and what is sent. Used by `webhooks.py` and `bundles.py`.
"""

from __future__ import annotations

import socket
import ssl
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

import anyio
import anyio.abc
from anyio.streams.tls import TLSStream

from atoll.contract.errors import Forbidden, InvalidRequest
from atoll.contract.network import Address, read_host
from atoll.runtime.egress.policy import PolicyEvaluator, Refusal

MAX_URL_CHARS = 2000


def split_url(url: str, *, example: str) -> SplitResult:
    """A URL that can be called.

    Raises:
        InvalidRequest: it is not one; the message has the `example`.
    """
    wrong = None
    try:
        split = urlsplit(url)
        port_of(split)
        read_host(split.hostname or "")
    except ValueError as error:
        wrong = str(error)
    else:
        if split.scheme not in ("http", "https"):
            wrong = "the scheme has to be https or http"
        elif split.username is not None or split.password is not None or split.fragment:
            wrong = "it must have neither a user nor a fragment"
        elif not url.isascii() or not url.isprintable() or " " in url or len(url) > MAX_URL_CHARS:
            wrong = f"it must have at most {MAX_URL_CHARS} characters of ASCII, without spaces"
        else:
            return split
    raise InvalidRequest(f"url: {url[:200]!r} cannot be called: {wrong}; write one such as {example}")


def port_of(split: SplitResult) -> int:
    port = split.port
    if port == 0:
        raise ValueError("0 is not a port")
    return port or (443 if split.scheme == "https" else 80)


def target_of(split: SplitResult) -> str:
    """What a request names, in its first line."""
    return (split.path or "/") + (f"?{split.query}" if split.query else "")


async def connect(split: SplitResult, policy: PolicyEvaluator, *, refused: str) -> anyio.abc.ByteStream:
    """A connection to the host of a URL, with TLS if it is https.

    Raises:
        Forbidden: the policy allows none of its addresses; `refused` says what to do about it.
        ValueError: its name cannot be resolved.
        OSError: the connection could not be made.
    """
    address, port = await _resolve(split, policy, refused), port_of(split)
    stream: anyio.abc.ByteStream = await anyio.connect_tcp(str(address), port)
    if split.scheme != "https":
        return stream
    try:
        return await TLSStream.wrap(
            stream, hostname=split.hostname, ssl_context=ssl.create_default_context(), standard_compatible=False
        )
    except BaseException:
        await anyio.aclose_forcefully(stream)
        raise


async def _resolve(split: SplitResult, policy: PolicyEvaluator, refused: str) -> Address:
    host, port = read_host(split.hostname or ""), port_of(split)
    if policy.check_host(host, port) is not None:
        raise Forbidden(refused)
    if isinstance(host, str):
        try:
            found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError:
            raise ValueError(f"the name {host} could not be resolved") from None
        addresses = [ip_address(str(each[4][0]).partition("%")[0]) for each in found]
    else:
        addresses = [host]
    allowed = policy.allowed_addresses(host, port, addresses)
    if isinstance(allowed, Refusal):
        raise Forbidden(refused)
    return allowed[0]
