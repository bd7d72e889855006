"""Network policies and audit records, as they are written: rules, policies and what became of connections.

Owns the written form of a rule. Not here: what a rule allows (`runtime/egress/policy.py`), what a preset expands to
(`runtime/egress/registries.py`), and connections (`runtime/egress/proxy.py`). Used by all layers above.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Annotated, Literal

from atoll.contract.errors import InvalidRequest
from atoll.contract.frozen import AfterValidator, Field, Frozen, FrozenRequest

REGISTRIES = "registries"
"""The preset for the package indexes that this machine is configured for."""
PRESETS = frozenset({REGISTRIES})
"""Names that are written as a rule and stand for several."""
ANY = "*"
RULE_SYNTAX = (
    "a name (example.com), any name below one (*.example.com), any host (*), an address or a range (192.0.2.7, "
    "10.0.0.0/8, fd00::/8), each with an optional :PORT or :LOW-HIGH ([fd00::1]:443), "
    f"or the preset {REGISTRIES}"
)
MAX_RULES = 1000
ALL_PORTS = (1, 65535)

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_LOOKS_LIKE_A_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORTS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_ADDRESS_CHARACTERS = re.compile(r"[0-9a-f.:]+", re.ASCII)

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


def read_name(text: str) -> str:
    """A host's name as it is compared: lower case, no dot at the end.

    Raises:
        ValueError: it is not a name. One that ends in a number is not: resolvers read `0177.1` or `2130706433` as an
            address.
    """
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if not name.isascii() or len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("it is neither a host name nor an IP address")
    if _LOOKS_LIKE_A_NUMBER.fullmatch(labels[-1]):
        raise ValueError("it ends in a number but is not an IP address such as 192.0.2.7")
    return name


def read_host(text: str) -> str | Address:
    """A host as a client writes it: an address, where an IPv4-mapped IPv6 address is the IPv4 one, or a name.

    Raises:
        ValueError: it is neither.
    """
    if _ADDRESS_CHARACTERS.fullmatch(text.lower()):
        try:
            return unmap_ipv4(ip_address(text))
        except ValueError:
            pass
    return read_name(text)


def unmap_ipv4(address: Address) -> Address:
    """`::ffff:192.0.2.7` as 192.0.2.7, which is what the kernel connects to."""
    return getattr(address, "ipv4_mapped", None) or address


@dataclass(frozen=True, slots=True)
class Rule:
    """What one rule allows: hosts by name, addresses, or a preset; on all ports or some. Exactly one of the three is
    set."""

    name: str | None = None
    """`example.com`, `*.example.com` or `*`."""
    network: Network | None = None
    ports: tuple[int, int] = ALL_PORTS
    """The first and the last."""
    preset: str | None = None
    """One of `PRESETS`, always on the ports that the preset says."""

    def __str__(self) -> str:
        if self.network is not None:
            single = self.network.num_addresses == 1
            host = str(self.network.network_address if single else self.network)
            host = f"[{host}]" if self.network.version == 6 and self.ports != ALL_PORTS else host
        else:
            host = self.name or self.preset or ""
        low, high = self.ports
        if self.ports == ALL_PORTS:
            return host
        return f"{host}:{low}" if low == high else f"{host}:{low}-{high}"

    def covers_port(self, port: int) -> bool:
        return self.ports[0] <= port <= self.ports[1]

    def covers_name(self, name: str) -> bool:
        if self.name is None or self.name == ANY:
            return self.name == ANY
        return name.endswith(self.name[1:]) if self.name.startswith("*.") else name == self.name

    def covers_address(self, address: Address) -> bool:
        return self.network is not None and address in self.network


@lru_cache(maxsize=4096)
def parse_rule(text: str) -> Rule:
    """The rule that `text` is the written form of.

    Raises:
        InvalidRequest: it is not a rule; the message says how one is written.
    """
    try:
        return _parse(text.strip())
    except ValueError as error:
        raise InvalidRequest(f"{text!r} is not a network rule: {error}; a rule is {RULE_SYNTAX}") from None


def _parse(text: str) -> Rule:
    if text in PRESETS:
        return Rule(preset=text)
    if "://" in text:
        raise ValueError("it is a URL, but rules are for hosts and ports")
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError("brackets must enclose an IPv6 address or range")
        return Rule(network=_network(host), ports=_ports(rest[1:]) if rest else ALL_PORTS)
    if text.count(":") > 1:
        return Rule(network=_network(text))
    host, colon, ports = text.partition(":")
    span = _ports(ports) if colon else ALL_PORTS
    if "/" in host or re.fullmatch(r"[0-9.]+", host):
        return Rule(network=_network(host), ports=span)
    return Rule(name=_pattern(host), ports=span)


def _network(text: str) -> Network:
    if "%" in text:
        raise ValueError("an address with an interface (%) is valid on one machine only")
    network = ip_network(text)
    if network.version == 6 and network.subnet_of(_MAPPED):
        return ip_network((int(network.network_address) & 0xFFFF_FFFF, network.prefixlen - 96))
    return network


_MAPPED = IPv6Network("::ffff:0:0/96")


def _pattern(text: str) -> str:
    if text == ANY:
        return ANY
    wild = text.startswith("*.")
    name = text[2:] if wild else text
    if "*" in name:
        raise ValueError("* is any host, and *.example.com any name below one; it cannot be elsewhere")
    if not name.isascii():
        import idna

        try:
            name = idna.encode(name, uts46=True).decode()
        except idna.IDNAError as error:
            raise ValueError(f"it is not a valid internationalised name: {error}") from None
    return ("*." if wild else "") + read_name(name)


def _ports(text: str) -> tuple[int, int]:
    found = _PORTS.fullmatch(text)
    low = int(found[1]) if found else 0
    high = int(found[2] or low) if found else 0
    if not 1 <= low <= high <= 65535:
        raise ValueError(f"{text!r} is neither a port from 1 to 65535 nor a range LOW-HIGH")
    return low, high


def _check_rules(rules: Sequence[str] | str) -> tuple[str, ...]:
    texts = [rules] if isinstance(rules, str) else rules
    if len(texts) > MAX_RULES:
        raise InvalidRequest(f"the policy has {len(texts)} rules; the limit is {MAX_RULES}")
    return tuple(dict.fromkeys(str(parse_rule(text)) for text in texts))


def _check_denied(rules: Sequence[str] | str) -> tuple[str, ...]:
    checked = _check_rules(rules)
    for text in checked:
        if parse_rule(text).network is None:
            raise InvalidRequest(
                f"{text!r} cannot be denied: what is denied is an address or a range (192.0.2.7, 10.0.0.0/8), since a "
                "host that is denied by its name could be reached by its address"
            )
    return checked


class NetworkPolicy(FrozenRequest):
    """The network connections that a sandbox may make. What no rule allows is refused."""

    allow: Annotated[Sequence[str] | str, AfterValidator(_check_rules)] = ()
    """The rules, one or several, as `parse_rule` reads them. Empty: every connection is refused, with the reason."""
    deny: Annotated[Sequence[str] | str, AfterValidator(_check_denied)] = ()
    """Addresses and ranges that are refused whatever `allow` says, also when a name that is allowed leads there."""

    @property
    def rules(self) -> tuple[Rule, ...]:
        return tuple(parse_rule(rule) for rule in self.allow)

    @property
    def denied(self) -> tuple[Rule, ...]:
        return tuple(parse_rule(rule) for rule in self.deny)

    @property
    def presets(self) -> frozenset[str]:
        return frozenset(rule.preset for rule in self.rules if rule.preset is not None)


class PackageIndexes(Frozen):
    """The package indexes that the machine was configured for when a policy with `registries` was set."""

    allow: tuple[str, ...]
    """Their hosts and ports, as rules. They may have private addresses: this machine is configured to use them."""
    env: dict[str, str]
    """The variables that configure pip and npm inside. Without user names and passwords."""
    certificates: dict[str, str]
    """CA bundles for them: the path of the file inside, and that on this machine."""
    files: dict[str, str] = Field(default_factory=dict)
    """Files that configure apt inside, in sandboxes of the image `host`: path and content. Without user names and
    passwords."""

    @property
    def rules(self) -> tuple[Rule, ...]:
        return tuple(parse_rule(rule) for rule in self.allow)


class AuditRecord(Frozen):
    """A connection that a program in a sandbox asked for; with plain HTTP, a request."""

    id: str
    time: datetime
    sandbox: str
    """Its name at that time."""
    protocol: Literal["http", "connect", "socks"]
    host: str
    """As the client wrote it, at most 255 characters. It may contain anything: the client is not trusted."""
    port: int | None = None
    """Unset: the request was malformed."""
    address: str | None = None
    """The address that was connected to, or refused. Unset: the name was not resolved, or has no address."""
    verdict: Literal["allowed", "denied", "failed"]
    """`failed`: it was allowed, but the connection or the exchange failed."""
    reason: str | None = None
    """Why it was denied, failed, or cut by a change of the policy. Unset: none of these."""
    sent_bytes: int = 0
    received_bytes: int = 0
    ended: datetime | None = None
    """Unset: it is open, or the process that served it died; then its byte counts are not known."""
