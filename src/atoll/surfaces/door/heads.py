"""The head of a request as the door reads it: strictly, before any other parser sees it.

Owns which heads are refused: where two readers could disagree on what a request is or where it ends, one of them may
see a second request in it (request smuggling), so what is ambiguous is refused and never repaired. Not here: bodies,
time-outs and connections (`connection.py`), and which host names are accepted (`guard.py`). Used by `connection.py` for
every request of every HTTP surface, previews included.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_HEAD_BYTES = 32 * 1024
"""Of a request's line and headers together."""
MAX_HEADERS = 100
MAX_TARGET_BYTES = 16 * 1024

_REQUEST_LINE = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]{1,32}) ([\x21-\x7e]+) HTTP/1\.([01])")
_BEGINNING = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]{0,32}(?: |\r?\Z)")
_TLS_HANDSHAKE = b"\x16\x03"
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
_HOST = re.compile(rb"([A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::([0-9]{1,5}))?")
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?#]*)(/[^#]*|\?[^#]*)?")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_ONCE = frozenset(
    b"host content-length transfer-encoding authorization x-api-key origin content-type content-encoding expect "
    b"atoll-tenant atoll-token idempotency-key last-event-id range upgrade sec-websocket-key "
    b"sec-websocket-version e2b-sandbox-id e2b-sandbox-port x-access-token e2b-traffic-access-token".split()
)
"""Headers that mean one thing: of two, one reader would take the first and another the last."""
_UNPACKING = frozenset({b"/files"})
"""Paths whose route unpacks a compressed body itself, piece by piece."""
_SLOW = frozenset({b"/process.Process/StreamInput"})
"""Paths with a body that comes as someone types it."""


class RequestRefused(Exception):
    """The request is answered with this status and the connection is closed. The message holds nothing of it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A head that can be read in one way only."""

    method: bytes
    target: bytes
    """As it was sent, but without the scheme and host of an absolute form."""
    is_http10: bool
    headers: list[tuple[bytes, bytes]]
    """Names in lower case."""
    host: bytes
    """The name of the Host header in lower case, without its port. Empty: HTTP/1.0 without one."""
    length: int
    """Of the body. Zero with `is_chunked`."""
    is_chunked: bool
    size: int
    """Of the head itself."""

    @property
    def has_body(self) -> bool:
        return self.is_chunked or self.length > 0

    @property
    def wants_websocket(self) -> bool:
        return any(name == b"upgrade" and value.lower() == b"websocket" for name, value in self.headers)

    @property
    def path(self) -> bytes:
        """Of the target, without its query."""
        return self.target.partition(b"?")[0]

    @property
    def has_slow_body(self) -> bool:
        """Whether its body has no pace that could be asked for."""
        return self.path in _SLOW

    def check_ours(self) -> None:
        """Refuse what Atoll's own routes do not take, though a server in a sandbox may.

        Raises:
            RequestRefused: the body is compressed, or something other than 100-continue is expected.
        """
        for name, value in self.headers:
            packed = name == b"content-encoding" and value.lower() not in (b"", b"identity")
            if packed and self.path not in _UNPACKING:
                message = "Content-Encoding: a compressed request is not accepted; send the body as it is"
                raise RequestRefused(415, "unsupported_encoding", message)
            if name == b"expect" and value.lower() != b"100-continue":
                raise RequestRefused(417, "invalid_request", "Expect: only 100-continue can be expected")

    def encode(self, *, upgrade: bool) -> bytes:
        """The head for the parser behind the door. An upgrade to anything but WebSocket is left out, as if the client
        had not offered it; without `upgrade`, that too."""
        version = b"1.0" if self.is_http10 else b"1.1"
        lines = [b"%s %s HTTP/%s\r\n" % (self.method, self.target, version)]
        websocket = upgrade and self.wants_websocket
        lines += [b"%s: %s\r\n" % each for each in self.headers if websocket or each[0] != b"upgrade"]
        return b"".join([*lines, b"\r\n"])


def check_beginning(data: bytes) -> None:
    """Refuse at once what begins as no head does: no more of it has to be waited for.

    Raises:
        RequestRefused: it is TLS, or not HTTP.
    """
    if data.startswith(_TLS_HANDSHAKE):
        raise _malformed("it is TLS, and this port is plain HTTP; use http://, or serve with a certificate")
    if not _BEGINNING.match(data):
        raise _malformed("it does not begin with a method")


def parse_head(data: bytes) -> RequestHead:
    """The head in `data`, which ends with its empty line.

    Raises:
        RequestRefused: it is malformed, ambiguous or too large.
    """
    first, *lines = data[:-4].split(b"\r\n")
    if len(lines) > MAX_HEADERS:
        raise RequestRefused(431, "headers_too_large", f"the request has more than {MAX_HEADERS} headers")
    line = _REQUEST_LINE.fullmatch(first)
    if line is None:
        raise _malformed("the request line is not METHOD TARGET HTTP/1.1, or a line does not end with CR LF")
    method, target, is_http10 = line[1], line[2], line[3] == b"0"
    if len(target) > MAX_TARGET_BYTES:
        raise RequestRefused(414, "headers_too_large", f"the URL is longer than {MAX_TARGET_BYTES} bytes")
    headers = []
    seen: dict[bytes, bytes] = {}
    for each in lines:
        header = _HEADER.fullmatch(each)
        if header is None:
            raise _malformed(
                "a header is not NAME: VALUE: no space before the colon, no line that continues another, and CR LF at "
                "the end"
            )
        name, value = header[1].lower(), header[2].rstrip(b" \t")
        if name in _ONCE:
            if name in seen:
                raise _malformed(f"the header {name.decode()} is there twice")
            seen[name] = value
        headers.append((name, value))
    host = _host(seen, is_http10=is_http10)
    length, is_chunked = _framing(seen, is_http10=is_http10)
    return RequestHead(
        method=method,
        target=_origin_form(method, target, seen.get(b"host", b"")),
        is_http10=is_http10,
        headers=headers,
        host=host,
        length=length,
        is_chunked=is_chunked,
        size=len(data),
    )


def _host(seen: dict[bytes, bytes], *, is_http10: bool) -> bytes:
    given = seen.get(b"host")
    if given is None:
        if is_http10:
            return b""
        raise _malformed("the Host header is missing")
    found = _HOST.fullmatch(given)
    if found is None or (found[2] is not None and int(found[2]) > 65535):
        raise _malformed("the Host header is not a host name, or a name and a port")
    return found[1].lower()


def _framing(seen: dict[bytes, bytes], *, is_http10: bool) -> tuple[int, bool]:
    length, coding = seen.get(b"content-length"), seen.get(b"transfer-encoding")
    if coding is not None:
        if length is not None:
            raise _malformed("it has both Content-Length and Transfer-Encoding")
        if is_http10 or coding.lower() != b"chunked":
            raise _malformed("Transfer-Encoding: only chunked is accepted, and only in HTTP/1.1")
    if length is not None and not _LENGTH.fullmatch(length):
        raise _malformed("Content-Length is not one number")
    if b"upgrade" in seen and (coding is not None or int(length or 0) > 0) and seen[b"upgrade"].lower() == b"websocket":
        raise _malformed("a request for a WebSocket has no body")
    return int(length or 0), coding is not None


def _origin_form(method: bytes, target: bytes, host: bytes) -> bytes:
    if method in (b"CONNECT", b"TRACE"):
        raise RequestRefused(405, "method_not_allowed", f"the method {method.decode()} is not allowed")
    if target.startswith(b"/"):
        if b"#" in target:
            raise _malformed("the request target has a fragment")
        return target
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None:
        raise _malformed("the request target must be a path that begins with '/'")
    if absolute[1].lower() != host.lower():
        raise _malformed("the host of the request target is not that of the Host header")
    rest = absolute[2] or b"/"
    return rest if rest.startswith(b"/") else b"/" + rest


def _malformed(why: str) -> RequestRefused:
    return RequestRefused(400, "invalid_request", f"malformed HTTP request: {why}")
