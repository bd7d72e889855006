"""What of an HTTP message passes a proxy, and what is between two neighbours alone."""

from __future__ import annotations

from collections.abc import Iterable

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer transfer-encoding "
    b"upgrade http2-settings".split()
)


def strip_hop_by_hop(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The headers that are not for one hop only, by the standard or by what `Connection` says.

    The length of a message is no header of one hop, whoever says so: without it, two readers could disagree.
    """
    found = list(headers)
    named = {
        word.strip().lower() for name, value in found if name.lower() == b"connection" for word in value.split(b",")
    }
    dropped = _HOP_BY_HOP | (named - {b"content-length"})
    return [(name, value) for name, value in found if name.lower() not in dropped]
