"""What may leave a sandbox, as it is written down, and what did: rules, policies and audit records.

Knows how a rule is written. Refuses to know what a rule permits (`runtime/egress/policy.py`), what stands behind a preset
(`runtime/egress/registries.py`), and connections.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

from atoll.contract.errors import InvalidRequest

REGISTRIES = "registries"
"""The preset: the package indexes that this machine is configured for."""
ANY = "*"
RULE_RULE = (
    "a name (example.com), any name below one (*.example.com), any host (*), an address or a range (192.0.2.7, "
    "10.0.0.0/8, fd00::/8), each with :PORT or :LOW-HIGH after it if it is for some ports alone ([fd00::1]:443), "
    f"and {REGISTRIES}"
)
MAX_RULES = 1000
ALL_PORTS = (1, 65535)

_STRICT = ConfigDict(frozen=True, extra="forbid")  # as `model.Frozen`, whose specs hold these
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_LOOKS_LIKE_A_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORTS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_ADDRESS_CHARACTERS = re.compile(r"[0-9a-f.:]+", re.ASCII)

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


def read_name(text: str) -> str:
    """A host's name as it is compared: lower case, no dot at the end.

    Raises:
        ValueError: it is none. What ends in a number is not: resolvers take `0177.1` or `2130706433` for an address.
    """
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if not name.isascii() or len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("it is neither a name nor an address")
    if _LOOKS_LIKE_A_NUMBER.fullmatch(labels[-1]):
        raise ValueError("it ends in a number and is no address in the usual form, such as 192.0.2.7")
    return name


def read_host(text: str) -> str | Address:
    """A host as a client names it: an address, an IPv4 one inside IPv6 being itself, or a name.

    Raises:
        ValueError: it is neither.
    """
    if _ADDRESS_CHARACTERS.fullmatch(text.lower()):
        try:
            return plain(ip_address(text))
        except ValueError:
            pass
    return read_name(text)


def plain(address: Address) -> Address:
    """`::ffff:192.0.2.7` is 192.0.2.7: the kernel connects to that one."""
    return getattr(address, "ipv4_mapped", None) or address


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that is allowed: hosts by their names, or addresses; on all ports or some."""

    name: str | None = None
    """`example.com`, `*.example.com` or `*`."""
    network: Network | None = None
    ports: tuple[int, int] = ALL_PORTS
    """The first and the last."""

    def __str__(self) -> str:
        if self.network is not None:
            single = self.network.num_addresses == 1
            host = str(self.network.network_address if single else self.network)
            host = f"[{host}]" if self.network.version == 6 and self.ports != ALL_PORTS else host
        else:
            host = self.name or REGISTRIES
        low, high = self.ports
        if self.ports == ALL_PORTS:
            return host
        return f"{host}:{low}" if low == high else f"{host}:{low}-{high}"

    @property
    def is_preset(self) -> bool:
        return self.name is None and self.network is None

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
    """The rule that `text` stands for.

    Raises:
        InvalidRequest: it stands for none; the message says what could.
    """
    try:
        return _parse(text.strip())
    except ValueError as error:
        raise InvalidRequest(f"{text!r} is not a rule for the network: {error}; a rule is {RULE_RULE}") from None


def _parse(text: str) -> Rule:
    if text == REGISTRIES:
        return Rule()
    if "://" in text:
        raise ValueError("it is a URL, and rules are about hosts and ports")
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError("what begins with [ is an IPv6 address or range up to ]")
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
        raise ValueError("an address with an interface (%) means nothing outside this machine")
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
        raise ValueError("* stands for everything, or with a dot for all below a name: *.example.com")
    if not name.isascii():
        import idna

        try:
            name = idna.encode(name, uts46=True).decode()
        except idna.IDNAError as error:
            raise ValueError(f"its name cannot be looked up: {error}") from None
    return ("*." if wild else "") + read_name(name)


def _ports(text: str) -> tuple[int, int]:
    found = _PORTS.fullmatch(text)
    low = int(found[1]) if found else 0
    high = int(found[2] or low) if found else 0
    if not 1 <= low <= high <= 65535:
        raise ValueError(f"{text!r} is not a port from 1 to 65535, nor LOW-HIGH")
    return low, high


def _check_rules(rules: Sequence[str] | str) -> tuple[str, ...]:
    texts = [rules] if isinstance(rules, str) else rules
    if len(texts) > MAX_RULES:
        raise InvalidRequest(f"{len(texts)} rules are too many; a policy may have {MAX_RULES}")
    return tuple(dict.fromkeys(str(parse_rule(text)) for text in texts))


class NetworkPolicy(BaseModel):
    """What may leave a sandbox. What no rule allows is refused."""

    model_config = _STRICT

    allow: Annotated[Sequence[str] | str, AfterValidator(_check_rules)] = ()
    """The rules, one or several, as `parse_rule` reads them. Empty: nothing leaves, and who tries is told so."""

    @property
    def rules(self) -> tuple[Rule, ...]:
        return tuple(parse_rule(rule) for rule in self.allow)

    @property
    def has_preset(self) -> bool:
        return any(rule.is_preset for rule in self.rules)


class Indexes(BaseModel):
    """The package indexes that the machine was configured for when a policy with `registries` was set."""

    model_config = _STRICT

    allow: tuple[str, ...]
    """Their hosts and ports, as rules. These may be at private addresses: this machine was told to go there."""
    env: dict[str, str]
    """What tells pip and npm inside of them. Without user names and passwords."""
    certificates: dict[str, str]
    """Whom they are to trust: the path of the file inside, and that on this machine."""

    @property
    def rules(self) -> tuple[Rule, ...]:
        return tuple(parse_rule(rule) for rule in self.allow)


class AuditRecord(BaseModel):
    """A connection that something in a sandbox wanted to make; with plain HTTP, a request."""

    model_config = ConfigDict(**_STRICT, defer_build=True)  # most who import this never make one

    id: str
    time: datetime
    sandbox: str
    """Its name then."""
    protocol: Literal["http", "connect", "socks"]
    host: str
    """As it was asked for, at most 255 characters of it. Anything may be in here: who asked is not trusted."""
    port: int | None = None
    """Unset: what was said was no request."""
    address: str | None = None
    """The address that was connected to, or refused. Unset: the name was not looked up, or has none."""
    verdict: Literal["allowed", "denied", "failed"]
    """`failed`: it was allowed, and no connection came about."""
    reason: str | None = None
    """Why it was denied, failed, or cut. Unset: it was none of these."""
    sent_bytes: int = 0
    received_bytes: int = 0
    ended: datetime | None = None
    """Unset: it is open, or who served it died before it ended. What it carried until then is not known."""
