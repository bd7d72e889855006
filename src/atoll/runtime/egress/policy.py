"""Whether a sandbox may connect to a host: rules against names and addresses, and nothing else.

Knows which addresses are not the public internet, and what it takes for each to be reached. Refuses to know how a name
becomes addresses and how one connects (`egress.py`), and how rules are written (`contract/network.py`).

A name needs a rule that covers it before it is looked up: a lookup is a message to whoever runs that name's server.
Then every address that it has is judged. A public one is fine. One that is not needs a rule that names it: an address,
or a range that lies in the same special block, so that `0.0.0.0/0` is the internet and not this machine's neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Network, ip_network

from atoll.contract.network import ANY, Address, Indexes, Network, NetworkPolicy, Rule, plain, read_host

_BLOCKS: tuple[tuple[str, str], ...] = (
    # Where clouds hand credentials to who asks. Each has to be named by itself.
    ("169.254.169.254/32", "metadata"),
    ("169.254.170.2/32", "metadata"),
    ("169.254.170.23/32", "metadata"),
    ("100.100.100.200/32", "metadata"),
    ("192.0.0.192/32", "metadata"),
    ("168.63.129.16/32", "metadata"),
    ("fd00:ec2::254/128", "metadata"),
    ("fd00:ec2::23/128", "metadata"),
    ("fd20:ce::254/128", "metadata"),
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
)
SPECIAL: tuple[tuple[Network, str], ...] = tuple((ip_network(block), kind) for block, kind in _BLOCKS)
"""Addresses that are not of the public internet, and what they are. The first that holds an address is what counts."""

_SPANS = tuple((block.version, int(block[0]), int(block[-1]), block, kind) for block, kind in SPECIAL)
_NAT64 = IPv6Network("64:ff9b::/96")
_NOT_FOR_INDEXES = frozenset({"metadata", "link-local", "unspecified", "broadcast", "multicast"})
"""Where no package index can be, whatever its name resolves to."""


def special(address: Address) -> tuple[Network, str] | None:
    """The block of special addresses that `address` is in, and what these are. None: it is a public one."""
    if isinstance(address, IPv6Address) and address in _NAT64:
        address = plain(IPv6Address((0xFFFF << 32) | (int(address) & 0xFFFF_FFFF)))  # who translates goes there
    version, number = address.version, int(address)
    for of, first, last, block, kind in _SPANS:
        if of == version and first <= number <= last:
            return block, kind
    return None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a connection is denied."""

    reason: str
    missing: str
    """The rule that would have allowed it."""
    address: Address | None = None

    def __str__(self) -> str:
        return f"{self.reason}; the rule that is missing: {self.missing}"


class Gate:
    """A policy, ready to decide. Without one, nothing passes."""

    def __init__(self, policy: NetworkPolicy | None = None, indexes: Indexes | None = None) -> None:
        self._rules: Sequence[Rule] = policy.rules if policy else ()
        self._own: Sequence[Rule] = indexes.rules if indexes and policy and policy.has_preset else ()

    def asked(self, host: str | Address, port: int) -> Refusal | None:
        """Why `host` may not even be looked up. None: it may; `among` says which of its addresses may be used."""
        if isinstance(host, str):
            if self._names(self._rules, host, port) or self._names(self._own, host, port):
                return None
            return Refusal(f"{host}:{port} is not allowed", str(Rule(name=host, ports=(port, port))))
        return self._judge(host, port, named=False, by_indexes=_covers(self._own, host, port))

    def among(self, host: str | Address, port: int, addresses: Iterable[Address]) -> list[Address] | Refusal:
        """Those of a host's addresses that may be connected to, in their order. A `Refusal`: none of them."""
        if (refusal := self.asked(host, port)) is not None:
            return refusal
        if not isinstance(host, str):
            return [host]
        named, by_indexes = self._names(self._rules, host, port), self._names(self._own, host, port)
        good = []
        for address in dict.fromkeys(map(plain, addresses)):
            judged = self._judge(address, port, named=named, by_indexes=by_indexes)
            if judged is None:
                good.append(address)
            elif refusal is None:
                refusal = Refusal(f"{host} is at {address}: {judged.reason}", judged.missing, address)
        return good or refusal or Refusal(f"{host} has no address", str(Rule(name=host, ports=(port, port))))

    def _judge(self, address: Address, port: int, *, named: bool, by_indexes: bool) -> Refusal | None:
        """`named` says that a rule covers the name that it came from, `by_indexes` that one of the indexes' does."""
        block = special(address)
        if block is None:
            if named or by_indexes or self._any(port) or _covers(self._rules, address, port):
                return None
            return Refusal(f"{_shown(address)}:{port} is not allowed", _naming(address, port), address)
        if by_indexes and block[1] not in _NOT_FOR_INDEXES:
            return None
        for rule in self._rules:
            if rule.covers_port(port) and rule.covers_address(address) and _within(rule.network, block[0]):
                return None
        return Refusal(
            f"{address} is a {block[1]} address, which has to be named by a rule of its own",
            _naming(address, port),
            address,
        )

    def _any(self, port: int) -> bool:
        return any(rule.name == ANY and rule.covers_port(port) for rule in self._rules)

    @staticmethod
    def _names(rules: Iterable[Rule], name: str, port: int) -> bool:
        return any(rule.covers_name(name) and rule.covers_port(port) for rule in rules)


def _covers(rules: Iterable[Rule], address: Address, port: int) -> bool:
    return any(rule.covers_address(address) and rule.covers_port(port) for rule in rules)


def _within(network: Network | None, block: Network) -> bool:
    # Of an address that NAT64 hides, the block is IPv4's, and the rule that names it may be of either kind.
    if network is None:
        return False
    if network.version == block.version:
        return network.subnet_of(block)  # type: ignore[arg-type] # of one version, which mypy cannot know
    return network.version == 6 and network.prefixlen >= 96 + block.prefixlen


def _naming(address: Address, port: int) -> str:
    return str(Rule(network=ip_network(address), ports=(port, port)))


def _shown(address: Address) -> str:
    return f"[{address}]" if address.version == 6 else str(address)


def read_target(host: str, port: int) -> tuple[str | Address, int]:
    """A host and a port as a client names them.

    Raises:
        ValueError: that is no host, or no port.
    """
    if not 1 <= port <= 65535:
        raise ValueError(f"{port} is not a port from 1 to 65535")
    return read_host(host), port
