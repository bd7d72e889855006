"""The evaluation of a network policy: whether a sandbox may connect to a host, by its rules.

Owns which addresses are not on the public internet, and which rules allow them. Not here: DNS lookups and connections
(`proxy.py`), how rules are written (`contract/network.py`), and the policy that is in force (`server.py`). Used by
`proxy.py` and `server.py`.

A name needs a rule that covers it before it is resolved: a DNS lookup is a message to the name's own server. Then every
address of the name is checked. A public one is allowed. A special one (private, loopback, metadata …) needs a rule for
that address, or for a range inside the same special block, so that `0.0.0.0/0` is the internet and not this machine's
own network. An address that the policy denies is refused before anything else, whatever allows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Network, ip_network

from atoll.contract.network import (
    ANY,
    REGISTRIES,
    Address,
    Network,
    NetworkPolicy,
    PackageIndexes,
    Rule,
    read_host,
    unmap_ipv4,
)

_BLOCKS: tuple[tuple[str, str], ...] = (
    # Metadata services, which give out the credentials of a cloud machine. Each needs a rule of its own.
    ("169.254.169.254/32", "metadata"),  # most clouds
    ("169.254.170.2/32", "metadata"),  # AWS ECS
    ("169.254.170.23/32", "metadata"),  # AWS EKS
    ("169.254.42.42/32", "metadata"),  # Scaleway
    ("169.254.0.23/32", "metadata"),  # Tencent
    ("100.100.100.200/32", "metadata"),  # Alibaba
    ("192.0.0.192/32", "metadata"),  # Oracle
    ("168.63.129.16/32", "metadata"),  # Azure
    ("fd00:ec2::254/128", "metadata"),  # AWS
    ("fd00:ec2::23/128", "metadata"),  # AWS EKS
    ("fd20:ce::254/128", "metadata"),  # Google
    ("fd00:c1::a9fe:a9fe/128", "metadata"),  # Oracle
    ("fd00:42::42/128", "metadata"),  # Scaleway
    ("fd00:a9fe:a9fe::1/128", "metadata"),  # Akamai
    ("fd00:100::100:200/128", "metadata"),  # Alibaba
    # IANA's registries of special-purpose addresses.
    ("255.255.255.255/32", "broadcast"),
    ("0.0.0.0/8", "unspecified"),
    ("10.0.0.0/8", "private"),
    ("100.64.0.0/10", "private"),
    ("127.0.0.0/8", "loopback"),
    ("169.254.0.0/16", "link-local"),
    ("172.16.0.0/12", "private"),
    ("192.0.0.0/24", "reserved"),
    ("192.0.2.0/24", "reserved"),
    ("192.88.99.0/24", "reserved"),
    ("192.168.0.0/16", "private"),
    ("198.18.0.0/15", "reserved"),
    ("198.51.100.0/24", "reserved"),
    ("203.0.113.0/24", "reserved"),
    ("224.0.0.0/4", "multicast"),
    ("240.0.0.0/4", "reserved"),
    ("::/128", "unspecified"),
    ("::1/128", "loopback"),
    ("::/96", "reserved"),
    ("64:ff9b:1::/48", "private"),
    ("100::/64", "reserved"),
    ("2001::/23", "reserved"),
    ("2001:db8::/32", "reserved"),
    ("2002::/16", "reserved"),
    ("3fff::/20", "reserved"),
    ("5f00::/16", "reserved"),
    ("fc00::/7", "private"),
    ("fe80::/10", "link-local"),
    ("fec0::/10", "private"),
    ("ff00::/8", "multicast"),
    # The rest of IPv6 but 2000::/3, of which IANA assigns all public addresses: SIIT (::ffff:0:a.b.c.d), and ranges
    # that private networks use.
    ("::/3", "reserved"),
    ("4000::/2", "reserved"),
    ("8000::/1", "reserved"),
)
SPECIAL: tuple[tuple[Network, str], ...] = tuple((ip_network(block), kind) for block, kind in _BLOCKS)
"""Blocks of addresses that are not on the public internet, and their kinds. The first match counts.

Of IPv6 only 2000::/3 without its special blocks is public, and NAT64 (`NAT64`) of public IPv4 addresses."""

_SPANS = tuple((block.version, int(block[0]), int(block[-1]), block, kind) for block, kind in SPECIAL)
NAT64 = IPv6Network("64:ff9b::/96")
_NOT_FOR_INDEXES = frozenset({"metadata", "link-local", "unspecified", "broadcast", "multicast"})
"""Kinds of addresses that a package index never has: the preset does not allow them."""


def special(address: Address) -> tuple[Network, str] | None:
    """The special block that contains `address`, and its kind. None: the address is public."""
    address = _connected(address)
    version, number = address.version, int(address)
    for of, first, last, block, kind in _SPANS:
        if of == version and first <= number <= last:
            return block, kind
    return None


def _connected(address: Address) -> Address:
    """The address at the other end: a NAT64 gateway connects to the IPv4 address in it."""
    if isinstance(address, IPv6Address) and address in NAT64:
        return unmap_ipv4(IPv6Address((0xFFFF << 32) | (int(address) & 0xFFFF_FFFF)))
    return address


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a connection is denied."""

    reason: str
    missing: str
    """A rule that would allow it. Empty: none would, because another one denies it."""
    address: Address | None = None

    def __str__(self) -> str:
        return f"{self.reason}; to allow it, add the rule {self.missing}" if self.missing else self.reason


class PolicyEvaluator:
    """Decides by one policy. Without a policy nothing is allowed."""

    def __init__(self, policy: NetworkPolicy | None = None, indexes: PackageIndexes | None = None) -> None:
        self._rules: Sequence[Rule] = policy.rules if policy else ()
        self._denied: Sequence[Rule] = policy.denied if policy else ()
        self._index_rules: Sequence[Rule] = indexes.rules if indexes and policy and REGISTRIES in policy.presets else ()

    def check_host(self, host: str | Address, port: int) -> Refusal | None:
        """Why `host` must not even be resolved. None: it may be; `allowed_addresses` checks each of its addresses."""
        if isinstance(host, str):
            if self._covers_name(self._rules, host, port) or self._covers_name(self._index_rules, host, port):
                return None
            return Refusal(f"no rule allows {host}:{port}", str(Rule(name=host, ports=(port, port))))
        return self._check_address(host, port, named=False, by_indexes=_covers(self._index_rules, host, port))

    def allowed_addresses(
        self, host: str | Address, port: int, addresses: Iterable[Address]
    ) -> list[Address] | Refusal:
        """The addresses of a host that are allowed, in the same order. A `Refusal`: none is."""
        if (refusal := self.check_host(host, port)) is not None:
            return refusal
        if not isinstance(host, str):
            return [host]
        named, by_indexes = self._covers_name(self._rules, host, port), self._covers_name(self._index_rules, host, port)
        good = []
        for address in dict.fromkeys(map(unmap_ipv4, addresses)):
            refused = self._check_address(address, port, named=named, by_indexes=by_indexes)
            if refused is None:
                good.append(address)
            elif refusal is None:
                refusal = Refusal(f"{host} resolves to {address}: {refused.reason}", refused.missing, address)
        return good or refusal or Refusal(f"{host} has no address", str(Rule(name=host, ports=(port, port))))

    def _check_address(self, address: Address, port: int, *, named: bool, by_indexes: bool) -> Refusal | None:
        """`named`: a rule covers the name of the host. `by_indexes`: one of the package indexes' rules does."""
        for rule in self._denied:
            if rule.covers_port(port) and (rule.covers_address(address) or rule.covers_address(_connected(address))):
                return Refusal(f"the policy denies {rule}", "", address)
        block = special(address)
        if block is None:
            if named or by_indexes or self._allows_any(port) or _covers(self._rules, address, port):
                return None
            return Refusal(f"no rule allows {_shown(address)}:{port}", _rule_for(address, port), address)
        if by_indexes and block[1] not in _NOT_FOR_INDEXES:
            return None
        for rule in self._rules:
            if rule.covers_port(port) and rule.covers_address(address) and _within(rule.network, block[0]):
                return None
        return Refusal(
            f"{address} is a {block[1]} address, which only a rule for that address allows",
            _rule_for(address, port),
            address,
        )

    def _allows_any(self, port: int) -> bool:
        return any(rule.name == ANY and rule.covers_port(port) for rule in self._rules)

    @staticmethod
    def _covers_name(rules: Iterable[Rule], name: str, port: int) -> bool:
        return any(rule.covers_name(name) and rule.covers_port(port) for rule in rules)


def _covers(rules: Iterable[Rule], address: Address, port: int) -> bool:
    return any(rule.covers_address(address) and rule.covers_port(port) for rule in rules)


def _within(network: Network | None, block: Network) -> bool:
    # For a NAT64 address the block is an IPv4 one, and the rule may be written in either version.
    if network is None:
        return False
    if network.version == block.version:
        return network.subnet_of(block)  # type: ignore[arg-type] # of one version, which mypy cannot know
    return network.version == 6 and network.prefixlen >= 96 + block.prefixlen


def _rule_for(address: Address, port: int) -> str:
    return str(Rule(network=ip_network(address), ports=(port, port)))


def _shown(address: Address) -> str:
    return f"[{address}]" if address.version == 6 else str(address)


def read_target(host: str, port: int) -> tuple[str | Address, int]:
    """A host and a port as a client writes them.

    Raises:
        ValueError: the host or the port is not valid.
    """
    if not 1 <= port <= 65535:
        raise ValueError(f"{port} is not a port from 1 to 65535")
    return read_host(host), port
