"""Who may send requests: host names, origins and tokens; and the HTTP status of an error.

Owns the check of host name, origin and bearer token (`HttpGuard`), the rule that an address which other machines can
reach needs a token, and the HTTP status of an error (`status_of`). Not here: routes, the format of error responses, and
sessions: each surface has its own. Used by `mcp/http.py`, whose errors are JSON-RPC's and have no use for `status_of`,
by `messages/http.py`, and by `middleware.py`, which has API keys in place of tokens.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from pydantic import SecretStr
from starlette.requests import Request

from atoll.contract.errors import (
    AtollError,
    CallerError,
    DatabaseUnavailable,
    DiskFull,
    FileError,
    IdempotencyMismatch,
    ImageUnavailable,
    InvalidRequest,
    ModelUnavailable,
    OutcomeUnknown,
    QuotaExceeded,
    RateLimited,
    RuntimeUnavailable,
    Unauthenticated,
)
from atoll.settings import SHORTEST_TOKEN

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_TOKEN = re.compile(rf"[^\s\x00-\x1f\x7f]{{{SHORTEST_TOKEN},}}")
_STATUSES: tuple[tuple[tuple[type[Exception], ...], int], ...] = (
    ((DatabaseUnavailable, ImageUnavailable, ModelUnavailable, RuntimeUnavailable), 503),
    ((Unauthenticated,), 401),
    ((QuotaExceeded,), 403),
    ((RateLimited,), 429),
    ((IdempotencyMismatch,), 422),
    ((OutcomeUnknown,), 409),
    ((DiskFull,), 507),
    ((LookupError, FileNotFoundError), 404),
    ((FileExistsError,), 409),
    ((PermissionError,), 403),
    ((TimeoutError,), 504),
    ((CallerError, FileError), 400),
)
"""The first row with a class of the error counts. Builtin classes are the second bases of ours (`contract/errors.py`),
so most new errors need no row."""


# --------------------------------------------------------------------------------------------------------------- guard


@dataclass(frozen=True)
class HttpRefusal:
    """Why a request is refused. The surface writes it in its own format."""

    status: int
    message: str
    headers: Mapping[str, str] = field(default_factory=dict)


class HttpGuard:
    """Decides which requests an app accepts, by their host name, origin and bearer token.

    `hosts` are the names of the server: a request for another name is refused, and one from a web page of another
    origin: scheme, host and port have to be those of the request itself. This stops DNS rebinding (a page can point a
    name of its own at this address, but cannot change the Host header), and pages on other ports of this machine, such
    as previews. None is any name, and needs a `token`. With a token, the scheme of the origin may also be https, that
    of a reverse proxy. There may be several tokens, one for each client. `token_variable` is the environment variable
    with the token, for messages. `key_header` is another header in which clients may send the token, as it is.

    Raises:
        InvalidRequest: there are neither hosts nor a token, a host is not a host name, or clients could not send the
            token.
    """

    def __init__(
        self,
        hosts: Sequence[str] | None,
        token: SecretStr | Sequence[SecretStr] | None,
        *,
        token_variable: str,
        key_header: str | None = None,
    ) -> None:
        tokens = [token] if isinstance(token, SecretStr) else [*(token or ())]
        if hosts is None and not tokens:
            raise InvalidRequest("an app that accepts any host name needs a token; give a token, or a list of hosts")
        for host in hosts or ():
            if host.lower() not in (_hostname(f"//{host}"), _hostname(f"//[{host}]")):
                raise InvalidRequest(f"{host!r} is not a host name; write it without a port, such as localhost")
        if not all(_TOKEN.fullmatch(each.get_secret_value()) for each in tokens):
            raise InvalidRequest(
                f"the token is invalid: it must have {SHORTEST_TOKEN} characters or more, without spaces and line "
                "breaks, which clients could not send"
            )
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)
        self._tokens = [each.get_secret_value().encode() for each in tokens]
        self._token_variable = token_variable
        self._key_header = key_header

    def refusal(self, request: Request) -> HttpRefusal | None:
        """Why this request is refused. None: it is accepted."""
        host, port = split_host(request.headers.get("host", ""))
        if host is None or (self._hosts is not None and host not in self._hosts):
            allowed = ", ".join(sorted(self._hosts or ())) or "any host name"
            return HttpRefusal(421, f"the Host header is missing or not accepted; allowed: {allowed}")
        origin = request.headers.get("origin")
        schemes = {request.url.scheme, "https"} if self._tokens else {request.url.scheme}
        if origin is not None and origin.lower() not in {origin_of(scheme, host, port) for scheme in schemes}:
            return HttpRefusal(403, "requests from web pages of other sites are refused")
        if self._tokens:
            given = self.credential(request).encode("latin-1")
            matches = [hmac.compare_digest(given, token) for token in self._tokens]  # all: the time tells nothing
            if True not in matches:
                also = "" if self._key_header is None else f" (or {self._key_header})"
                why = f"a token is required: Authorization: Bearer{also}, with the server's {self._token_variable}"
                return HttpRefusal(401, why, {"WWW-Authenticate": "Bearer"})
        return None

    def credential(self, request: Request) -> str:
        """The token that a request came with. Empty: none."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return given.strip()
        return "" if self._key_header is None else request.headers.get(self._key_header, "").strip()


class OpenGuard(HttpGuard):
    """Lets every request in: for an app of the server, whose door has checked it."""

    def __init__(self, key_header: str | None = None) -> None:
        super().__init__(LOOPBACK, None, token_variable="", key_header=key_header)

    def refusal(self, request: Request) -> HttpRefusal | None:  # noqa: ARG002
        return None


def split_host(header: str) -> tuple[str | None, int | None]:
    """The name and the port of a Host header. The name is None if it has anything else, such as a user."""
    if not re.search(r"[@/?#\\\s]", header):
        with suppress(ValueError):
            split = urlsplit(f"//{header}")
            return split.hostname, split.port
    return None, None


def origin_of(scheme: str, host: str, port: int | None) -> str:
    """An origin as browsers write it, which leave out the port that the scheme implies."""
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}" if port in (None, _DEFAULT_PORTS.get(scheme)) else f"{scheme}://{shown}:{port}"


def _hostname(url: str) -> str | None:
    with suppress(ValueError):
        return urlsplit(url).hostname
    return None


# -------------------------------------------------------------------------------------------------------------- errors


def status_of(error: AtollError) -> int:
    """The HTTP status for an error. 500: the sandbox or the server failed, not the request.

    The body is the surface's: `AtollError.to_dict` has what a client may see, except that the message and the details
    of `SandboxNotFound` and `CheckpointNotFound` name the sandboxes and checkpoints of all sessions. A surface with
    several tenants passes on only names of the caller's own session: `PoolContext.explain` (`tools/view.py`) does that
    for sandboxes, `SpriteContext.checkpoint` (`tools/sprites.py`) looks only among the session's checkpoints.
    """
    return next((status for kinds, status in _STATUSES if isinstance(error, kinds)), 500)


# ------------------------------------------------------------------------------------------------------------ addresses


def accepted_hosts(address: str, token: SecretStr | None, *, token_variable: str) -> tuple[str, ...] | None:
    """The `hosts` of a guard for an app that listens at this IP address. None is any name.

    With a token, clients may use any name, such as that of a reverse proxy: a web page that points a name here does not
    have the token.

    Raises:
        InvalidRequest: other machines can reach the address, and there is no token.
    """
    if token is not None:
        return None
    if not ipaddress.ip_address(address).is_loopback:
        raise InvalidRequest(
            f"{address} can be reached from other machines, whose users could run commands; set {token_variable} to a "
            "secret that clients have to send, or listen at 127.0.0.1"
        )
    return (*LOOPBACK, address)
