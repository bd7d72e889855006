"""Rules as they are written, and what they permit: for all names and addresses that hypothesis can think of."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import pytest
from hypothesis import given, strategies as st

from atoll import InvalidRequest, NetworkPolicy
from atoll.contract.network import REGISTRIES, Rule, parse_rule, read_host, unmap_ipv4
from atoll.runtime.egress.policy import SPECIAL, PolicyEvaluator, Refusal, special

LABELS = st.from_regex(r"[a-z][a-z0-9-]{0,8}[a-z0-9]", fullmatch=True)
NAMES = st.lists(LABELS, min_size=1, max_size=4).map(".".join).filter(lambda name: name != "registries")
PORTS = st.integers(1, 65535)
ADDRESSES = st.ip_addresses()
SPECIAL_ADDRESSES = (
    st.sampled_from(SPECIAL)
    .flatmap(lambda each: st.ip_addresses(network=each[0]))
    .filter(lambda address: special(unmap_ipv4(address)) is not None)  # not NAT64 or mapped, of a public address
)
SPANS = st.tuples(PORTS, PORTS).map(lambda pair: (min(pair), max(pair)))
NETWORKS = st.one_of(
    st.tuples(st.ip_addresses(v=4), st.integers(0, 32)), st.tuples(st.ip_addresses(v=6), st.integers(0, 128))
).map(lambda pair: ip_network(pair, strict=False))
RULES = st.one_of(
    st.builds(Rule, name=st.one_of(NAMES, NAMES.map("*.{}".format), st.just("*")), ports=SPANS),
    st.builds(Rule, network=NETWORKS.filter(lambda n: not str(n).startswith("::ffff:")), ports=SPANS),
    st.just(Rule(preset=REGISTRIES)),
)


def evaluator(*rules: str) -> PolicyEvaluator:
    return PolicyEvaluator(NetworkPolicy(allow=rules))


@given(NETWORKS, ADDRESSES, PORTS)
def test_an_address_that_is_denied_is_refused_whatever_allows_it(
    denied: IPv4Network | IPv6Network, address: IPv4Address | IPv6Address, port: int
) -> None:
    allow = ["*", str(address), "127.0.0.0/8", "example.com", REGISTRIES]
    address = unmap_ipv4(address)
    before = PolicyEvaluator(NetworkPolicy(allow=allow))
    after = PolicyEvaluator(NetworkPolicy(allow=allow, deny=[str(denied)]))
    is_denied = parse_rule(str(denied)).covers_address(address)
    for check in (
        lambda evaluator: evaluator.check_host(address, port) is None,
        lambda evaluator: not isinstance(evaluator.allowed_addresses("example.com", port, [address]), Refusal),
    ):
        if is_denied:
            assert not check(after)
        elif address not in ip_network("64:ff9b::/96"):
            assert check(after) == check(before)


def test_a_denied_address_is_denied_behind_nat64_too_and_on_its_ports_alone() -> None:
    evaluator = PolicyEvaluator(NetworkPolicy(allow="*", deny=["8.8.8.0/24:443"]))
    for address in ("8.8.8.8", "64:ff9b::808:808"):
        refusal = evaluator.check_host(ip_address(address), 443)
        assert str(refusal) == "the policy denies 8.8.8.0/24:443"
        assert evaluator.check_host(ip_address(address), 80) is None
    assert evaluator.check_host(ip_address("8.8.9.8"), 443) is None


@pytest.mark.parametrize("rule", ["example.com", "*.example.com", "*", REGISTRIES])
def test_a_name_cannot_be_denied(rule: str) -> None:
    with pytest.raises(InvalidRequest, match="could be reached by its address"):
        NetworkPolicy(allow="*", deny=rule)


@given(RULES)
def test_a_rule_is_read_as_it_is_written(rule: Rule) -> None:
    assert parse_rule(str(rule)) == rule


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("Example.COM.", "example.com"),
        ("*.Bücher.example:443", "*.xn--bcher-kva.example:443"),
        ("[fd00::1]:443", "[fd00::1]:443"),
        ("fd00::/8", "fd00::/8"),
        ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
        ("10.0.0.0/8:5432", "10.0.0.0/8:5432"),
        (" host_1:8000-8010 ", "host_1:8000-8010"),
        ("registries:80", "registries:80"),
    ],
)
def test_rules_have_one_form(text: str, meant: str) -> None:
    assert NetworkPolicy(allow=text).allow == (meant,)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "a b",
        "x" * 64,
        "exa\nmple.com",
        *"""https://example.com  example.com:0  example.com:65536  example.com:9-3  a*.example.com  *.*.com  10.0.0.1/8
    010.0.0.1  0x7f.0.0.1  2130706433  127.1  1.2.3.4.5  fe80::1%eth0  [::1  [::1]443  -a.com  a..b  ex@mple.com
    example.com:http  [example.com]:80  /  :80""".split(),
    ],
)
def test_what_is_no_rule_is_refused_with_what_would_be_one(text: str) -> None:
    with pytest.raises(InvalidRequest, match="a rule is a name"):
        parse_rule(text)
    with pytest.raises(InvalidRequest, match="a rule is a name"):
        NetworkPolicy(allow=[text])


@given(st.text(max_size=40))
def test_any_text_is_a_rule_or_is_refused(text: str) -> None:
    try:
        rule = parse_rule(text)
    except InvalidRequest:
        return
    assert parse_rule(str(rule)) == rule


@given(ADDRESSES, PORTS)
def test_without_a_rule_nothing_passes(address: IPv4Address | IPv6Address, port: int) -> None:
    for closed in (PolicyEvaluator(), evaluator()):
        assert closed.check_host("example.com", port) is not None
        assert closed.check_host(address, port) is not None


@given(SPECIAL_ADDRESSES, PORTS)
def test_no_address_that_is_not_public_is_reached_by_a_name_or_by_everything(
    address: IPv4Address | IPv6Address, port: int
) -> None:
    open_wide = evaluator("*", "0.0.0.0/0", "::/0", "example.com")
    address = unmap_ipv4(address)
    assert isinstance(open_wide.allowed_addresses("example.com", port, [address]), Refusal)
    assert open_wide.check_host(address, port) is not None
    refusal = open_wide.allowed_addresses("example.com", port, [address])
    assert isinstance(refusal, Refusal)
    # The rule that is said to be missing is the one that is missing.
    assert evaluator("example.com", refusal.missing).allowed_addresses("example.com", port, [address]) == [address]
    assert evaluator(refusal.missing).check_host(address, port) is None
    other = port % 65535 + 1
    assert evaluator(refusal.missing).check_host(address, other) is not None


@given(ADDRESSES.filter(lambda a: special(unmap_ipv4(a)) is None), PORTS)
def test_public_addresses_are_reached_by_a_rule_for_the_name_the_address_or_everything(
    address: IPv4Address | IPv6Address, port: int
) -> None:
    address = unmap_ipv4(address)
    assert evaluator("example.com").allowed_addresses("example.com", port, [address]) == [address]
    assert evaluator("*").check_host(address, port) is None
    assert evaluator("example.com").check_host(address, port) is not None
    assert isinstance(evaluator(str(address)).allowed_addresses("example.com", port, [address]), Refusal), (
        "the name was never allowed"
    )


@given(NAMES, NAMES, PORTS)
def test_a_wildcard_is_all_names_below_one_and_not_that_one(below: str, name: str, port: int) -> None:
    wild = evaluator(f"*.{name}")
    assert wild.check_host(f"{below}.{name}", port) is None
    assert wild.check_host(name, port) is not None
    assert wild.check_host(f"x{name}", port) is not None


@given(ADDRESSES)
def test_python_thinks_no_address_private_that_we_think_public(address: IPv4Address | IPv6Address) -> None:
    if special(unmap_ipv4(address)) is None:
        assert unmap_ipv4(address).is_global or address in ip_network("64:ff9b::/96")


STRICTER = {
    "168.63.129.16/32": "Azure's metadata service has a public address",
    "192.0.0.0/24": "protocol assignments; some are global, none is a server",
    "192.88.99.0/24": "6to4 relays, deprecated",
    "224.0.0.0/4": "multicast; Python calls most of it global",
    "::/3": "not assigned, or special: SIIT and private networks",
    "4000::/2": "not assigned",
    "8000::/1": "not assigned, or special",
    "::/96": "IPv4-compatible addresses, deprecated: ::127.0.0.1",
    "64:ff9b:1::/48": "NAT64 of the local network: leads to IPv4 addresses of any kind",
    "2001::/23": "Teredo, ORCHID and other assignments; Teredo leads to IPv4 addresses of any kind",
    "2002::/16": "6to4: leads to IPv4 addresses of any kind",
    "3fff::/20": "documentation, since RFC 9637; unknown to older Pythons",
    "5f00::/16": "segment routing, since RFC 9602; unknown to older Pythons",
    "fec0::/10": "site-local, deprecated, but still routed on private networks",
    "ff00::/8": "multicast; Python calls some of it global",
}
"""Blocks that are special here though `ipaddress.is_global` of some Python is true for addresses in them, and why."""


def test_the_special_addresses_are_those_that_are_not_global_in_python_and_the_intended_differences() -> None:
    stricter = [ip_network(block) for block in STRICTER]
    blocks = [*stricter, *(block for block, _ in SPECIAL)]
    edges = {
        type(block[0])(number)
        for block in blocks
        for number in (int(block[0]) - 1, int(block[0]), int(block[-1]), int(block[-1]) + 1)
        if 0 <= number < 2**block.max_prefixlen
    }
    for address in map(unmap_ipv4, edges):
        is_public = special(address) is None
        assert is_public == address.is_global or any(address in block for block in stricter), address
    for block in stricter:
        assert special(block[0]) is not None, f"{block} is not special"
        assert special(block[-1]) is not None, f"{block} is not special"


@given(st.ip_addresses(v=6))
def test_of_ipv6_only_what_is_assigned_for_the_internet_and_nat64_of_it_is_public(address: IPv6Address) -> None:
    if address.ipv4_mapped is None and special(address) is None:
        assert address in ip_network("2000::/3") or address in ip_network("64:ff9b::/96")


@given(SPECIAL_ADDRESSES)
def test_an_address_that_is_special_here_and_global_in_python_is_an_intended_difference(
    address: IPv4Address | IPv6Address,
) -> None:
    if unmap_ipv4(address).is_global:
        assert any(address in ip_network(block) for block in STRICTER)


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("169.254.169.254", "metadata"),
        ("fd00:ec2::254", "metadata"),
        ("100.64.0.1", "private"),
        ("fd12:3456::1", "private"),
        ("0.0.0.0", "unspecified"),
        ("255.255.255.255", "broadcast"),
        ("64:ff9b::7f00:1", "loopback"),
        ("64:ff9b::a9fe:a9fe", "metadata"),
        ("64:ff9b:1::1", "private"),
        ("2002:7f00:1::1", "reserved"),
        ("::127.0.0.1", "reserved"),
        ("2001::1", "reserved"),
        ("fe80::1", "link-local"),
        ("224.0.0.1", "multicast"),
        ("::ffff:0:7f00:1", "reserved"),
        ("::ffff:0:93.184.216.34", "reserved"),
        ("200::1", "reserved"),
        ("64:ff9a:ffff::1", "reserved"),
        ("1fff:ffff::1", "reserved"),
        ("4000::1", "reserved"),
        ("7fff::1", "reserved"),
        ("8000::1", "reserved"),
        ("fbff::1", "reserved"),
    ],
)
def test_what_special_addresses_are(address: str, kind: str) -> None:
    found = special(ip_address(address))
    assert found is not None
    assert found[1] == kind


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "3ffe::1", "64:ff9b::93.184.216.34"])
def test_what_is_public(address: str) -> None:
    assert special(ip_address(address)) is None


def test_a_network_that_is_not_public_is_reached_by_a_rule_for_its_range() -> None:
    mesh = ip_address("200:1234::1")
    assert evaluator("*", "::/0").check_host(mesh, 80) is not None
    assert evaluator("200::/7").check_host(mesh, 80) is None


def test_a_range_around_metadata_does_not_name_it() -> None:
    assert evaluator("169.254.0.0/16").check_host(ip_address("169.254.1.1"), 80) is None
    assert evaluator("169.254.0.0/16").check_host(ip_address("169.254.169.254"), 80) is not None
    assert evaluator("169.254.169.254:80").check_host(ip_address("169.254.169.254"), 80) is None


@pytest.mark.parametrize(
    "address",
    """169.254.169.254 169.254.170.2 169.254.170.23 169.254.42.42 169.254.0.23 100.100.100.200 192.0.0.192
    168.63.129.16 fd00:ec2::254 fd00:ec2::23 fd20:ce::254 fd00:c1::a9fe:a9fe fd00:42::42 fd00:a9fe:a9fe::1
    fd00:100::100:200""".split(),
)
def test_no_range_reaches_a_metadata_service(address: str) -> None:
    ranges = ("*", "169.254.0.0/16", "100.64.0.0/10", "192.0.0.0/24", "168.63.129.0/24", "fc00::/7", "fd00::/16")
    assert evaluator(*ranges).check_host(ip_address(address), 80) is not None
    assert evaluator(address).check_host(ip_address(address), 80) is None


@pytest.mark.parametrize(
    "text",
    ["", *"2130706433 0177.0.0.1 0x7f000001 127.1 127.0.0.01 0x7f.1 1.2.3 ①②⑦.0.0.1 ::1%lo [::1] a..b -a".split()],
)
def test_an_address_in_another_spelling_is_no_host(text: str) -> None:
    with pytest.raises(ValueError, match="it "):
        read_host(text)


def test_mapped_addresses_are_what_they_map() -> None:
    assert read_host("::ffff:127.0.0.1") == ip_address("127.0.0.1")
    assert read_host("::FFFF:7f00:1") == ip_address("127.0.0.1")
    assert read_host("EXAMPLE.com.") == "example.com"
