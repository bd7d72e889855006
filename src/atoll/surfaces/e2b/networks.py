"""Networks as E2B writes them, as policies of Atoll and as headers that are set in requests.

Owns the translation. E2B allows all that is not denied, and what is allowed is preferred to what is denied; a policy
of Atoll refuses all that is not allowed, and what is denied is preferred. What has no equal is refused with 501, never
left out. Not here: what a tenant may allow (`atoll.server.policy`), and how ports are reached (`ports.py`).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Network, IPv6Network, collapse_addresses, summarize_address_range
from typing import Annotated, Any, TypeVar

from pydantic import Field

from atoll.contract.errors import InvalidRequest
from atoll.contract.network import ALL_PORTS, ANY, MAX_RULES, PRESETS, Network, NetworkPolicy, parse_rule
from atoll.contract.secret import PLAIN_HTTP, check_request_headers
from atoll.server.tenants import TenantPolicy
from atoll.surfaces.e2b.control import E2bBody

_EVERYTHING = frozenset({"0.0.0.0/0", "::/0"})
_ADDRESS = re.compile(r"[0-9a-fA-F:.]+(/[0-9]+)?")
_MASK = re.compile(r"(?:[a-zA-Z0-9.:_-]|\$\{PORT\}){1,255}")
_HIDDEN = "***"
N = TypeVar("N", IPv4Network, IPv6Network)


class TransformBody(E2bBody):
    headers: dict[str, str] = Field(default_factory=dict)


class RuleBody(E2bBody):
    transform: TransformBody | None = None


class NetworkBody(E2bBody):
    """The network of a sandbox. What is unset is E2B's default."""

    allow_out: list[str] | None = Field(default=None, max_length=MAX_RULES)
    deny_out: list[str] | None = Field(default=None, max_length=MAX_RULES)
    rules: dict[str, list[RuleBody]] | None = None
    allow_public_traffic: bool | None = None
    allow_internet_access: bool | None = Field(default=None, alias="allow_internet_access")
    mask_request_host: str | None = None
    https_ports: list[Annotated[int, Field(ge=1, le=65535)]] | None = Field(default=None, max_length=100)

    def shown(self) -> dict[str, Any]:
        """As it was asked for. Values of headers are not shown.

        Raises:
            InvalidRequest: the host that ports are to be told of is not one.
        """
        if self.mask_request_host is not None and not _MASK.fullmatch(self.mask_request_host):
            raise InvalidRequest(
                f"maskRequestHost is {self.mask_request_host[:300]!r}; it must be a host of letters, digits and .:_- "
                "with ${PORT} in place of the port, of at most 255 characters"
            )
        fields = {"allow_out", "deny_out", "allow_public_traffic", "mask_request_host", "https_ports"}
        found = self.model_dump(by_alias=True, exclude_none=True, include=fields)
        if self.rules:
            found["rules"] = {
                host: [
                    {"transform": {"headers": dict.fromkeys(rule.transform.headers, _HIDDEN)}}
                    for rule in rules
                    if rule.transform is not None
                ]
                for host, rules in self.rules.items()
            }
        return found

    def headers(self) -> dict[str, dict[str, str]]:
        """The headers that are set in requests over TLS, by host. Of several rules for one host the last counts.

        Raises:
            InvalidRequest: a host, a header or a value is not allowed.
        """
        found: dict[str, dict[str, str]] = {}
        for host, rules in (self.rules or {}).items():
            headers: dict[str, tuple[str, str]] = {}
            for rule in rules:
                given = rule.transform.headers if rule.transform is not None else {}
                headers |= {name.lower(): (name, value) for name, value in given.items()}
            if headers:
                found[host] = dict(headers.values())
        if plain := [host for host in found if host.lower().startswith(PLAIN_HTTP)]:
            raise InvalidRequest(f"rules has {plain[0][:253]!r}: a rule is for a domain, whose requests use TLS")
        return check_request_headers(found)

    def policy(self, tenant: TenantPolicy, *, internet: bool | None) -> NetworkPolicy | None:
        """The policy that it means. None: no connection leaves the sandbox.

        Without a word about it, a sandbox reaches what its tenant may reach.

        Raises:
            InvalidRequest: a rule is not one.
        """
        allowed, denied = self.allow_out or [], self.deny_out or []
        wanted = [ANY if rule in _EVERYTHING else rule for rule in allowed]
        if internet is False or _EVERYTHING & {*denied}:
            return NetworkPolicy(allow=tuple(wanted)) if wanted else None
        if names := [rule for rule in allowed if not _ADDRESS.fullmatch(rule)]:
            raise InvalidRequest(
                f"allowOut has the domain {names[0][:253]!r}: when specifying allowed domains, deny all other traffic "
                "with denyOut: ['0.0.0.0/0']"
            )
        everything = [ANY] if ANY in tenant.networks else [rule for rule in tenant.networks if rule not in PRESETS]
        if not everything + wanted:
            return None
        return NetworkPolicy(allow=tuple(everything + wanted), deny=_denied(denied, allowed))


def _denied(denied: Iterable[str], allowed: Iterable[str]) -> tuple[str, ...]:
    """What is denied and not allowed, which E2B prefers."""
    refused = [_network(rule, "denyOut") for rule in denied]
    if not refused:
        return ()
    kept = [_network(rule, "allowOut") for rule in allowed]
    found: list[Network] = [
        *_difference(_of_kind(IPv4Network, refused), _of_kind(IPv4Network, kept)),
        *_difference(_of_kind(IPv6Network, refused), _of_kind(IPv6Network, kept)),
    ]
    if len(found) > MAX_RULES:
        raise InvalidRequest(
            f"denyOut without allowOut is {len(found)} ranges of addresses; the limit is {MAX_RULES}: allow whole "
            "ranges"
        )
    return tuple(map(str, found))


def _network(rule: str, field: str) -> Network:
    parsed = parse_rule(rule) if _ADDRESS.fullmatch(rule) else None
    if parsed is None or parsed.network is None or parsed.ports != ALL_PORTS:
        raise InvalidRequest(f"{field} has {rule[:253]!r}: with denyOut, only addresses and ranges are allowed there")
    return parsed.network


def _of_kind(kind: type[N], networks: Iterable[Network]) -> list[N]:
    return [each for each in networks if isinstance(each, kind)]


def _difference(wide: list[N], without: list[N]) -> Iterator[N]:
    """The networks that cover `wide` and nothing of `without`."""
    holes = [(int(each[0]), int(each[-1])) for each in collapse_addresses(without)]
    for network in collapse_addresses(wide):
        kind = type(network[0])
        begin, last = int(network[0]), int(network[-1])
        for first, end in holes[bisect_left(holes, begin, key=lambda hole: hole[1]) :]:
            if first > last or begin > last:
                break
            if begin < first:
                yield from summarize_address_range(kind(begin), kind(first - 1))
            begin = max(begin, end + 1)
        if begin <= last:
            yield from summarize_address_range(kind(begin), kind(last))
