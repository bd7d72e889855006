"""Networks as E2B's clients ask for them: what is denied, and headers that are set in requests.

The server trusts an authority of the test's, and reaches a server of the test's on loopback as `localhost`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from ipaddress import IPv4Address, IPv4Network, ip_address
from pathlib import Path

import anyio.to_thread
import httpx2
import pytest
from e2b import (
    CommandExitException,
    InvalidArgumentException,
    Sandbox,
    SandboxException,
    SandboxNetworkOpts,
    SandboxNetworkRule,
)
from hypothesis import given, strategies as st

from atoll.contract.network import MAX_RULES
from atoll.runtime.egress.policy import PolicyEvaluator
from atoll.server.tenants import TenantPolicy
from atoll.surfaces.e2b.networks import NetworkBody
from atoll.testing.server import RunningServer, running_server
from atoll.testing.waiting import BOUND_S
from tests.origin import Origin, TestAuthority, origin

VALUE = "Bearer hk-live-93b1c2"
CLOSED, HERE = ["0.0.0.0/0"], ["localhost", "127.0.0.1"]
CURL = "curl -sS --max-time 20 --noproxy ''"
LAST = st.integers(0, 255)
"""The last byte of an address in 198.51.100.0/24."""
RANGES = st.lists(st.tuples(LAST, st.integers(24, 32)), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    return TestAuthority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def server(make_state_dir: Callable[[], Path], authority: TestAuthority) -> Iterator[RunningServer]:
    """In a state directory of its own: the policy of its tenant stays there when it has stopped."""
    with running_server(make_state_dir(), environment={"SSL_CERT_FILE": str(authority.path)}) as server:
        with httpx2.Client(base_url=f"{server.url}/api/v1", headers=server.headers, timeout=BOUND_S) as client:
            policy = {"networks": ["*", "127.0.0.1"]}
            assert client.patch("/tenants/default", json={"policy": policy}).status_code == 200
        yield server


@pytest.fixture
async def site(authority: TestAuthority) -> AsyncIterator[Origin]:
    async with origin(authority.server_context("localhost")) as site:
        yield site


def body(denied: list[str], allowed: list[str]) -> NetworkBody:
    return NetworkBody.model_validate({"denyOut": denied, "allowOut": allowed})


def networks(ranges: list[tuple[int, int]]) -> list[IPv4Network]:
    return [IPv4Network((f"198.51.100.{last}", length), strict=False) for last, length in ranges]


@given(RANGES, RANGES, LAST)
def test_what_is_allowed_is_preferred_to_what_is_denied(
    some: list[tuple[int, int]], others: list[tuple[int, int]], last: int
) -> None:
    denied, allowed, address = networks(some), networks(others), IPv4Address(f"198.51.100.{last}")
    # These addresses are special, so that nothing else allows them.
    asked = body(["203.0.113.7"], ["198.51.100.0/24", *map(str, allowed)])
    policy = asked.policy(TenantPolicy(networks=("*",)), internet=None)
    assert policy is not None
    assert policy.deny == ("203.0.113.7",)
    asked = body([*map(str, denied)], [*map(str, allowed)])
    policy = asked.policy(TenantPolicy(networks=("*",)), internet=None)
    assert policy is not None
    is_denied = any(address in each for each in denied) and not any(address in each for each in allowed)
    refused = [rule for rule in policy.denied if rule.covers_address(address)]
    assert bool(refused) == is_denied
    assert (PolicyEvaluator(policy).check_host(address, 443) is None) == any(address in each for each in allowed)


def test_of_ipv6_too_what_is_denied_is_split_around_what_is_allowed() -> None:
    asked = body(["2606:4700::/32", "8.8.8.8"], ["2606:4700:1::1"])
    policy = asked.policy(TenantPolicy(networks=("*",)), internet=None)
    evaluator = PolicyEvaluator(policy)
    assert evaluator.check_host(ip_address("2606:4700:1::1"), 443) is None
    for address in ("2606:4700:1::2", "2606:4700::", "8.8.8.8", "64:ff9b::808:808"):
        assert "the policy denies" in str(evaluator.check_host(ip_address(address), 443))


def test_what_would_be_too_many_ranges_is_refused() -> None:
    allowed = [f"10.{i}.{i}.1" for i in range(200)]
    with pytest.raises(ValueError, match=f"the limit is {MAX_RULES}"):
        body(["10.0.0.0/8"], allowed).policy(TenantPolicy(networks=("*",)), internet=None)


def test_denied_addresses_are_refused_and_shown_and_an_update_takes_their_place() -> None:
    with Sandbox.create(timeout=120, network={"deny_out": ["8.8.8.0/24"]}) as box:
        ask = f"{CURL} -o /dev/null -v http://8.8.8.8/ 2>&1"
        assert "the policy denies 8.8.8.0/24" in box.commands.run(ask).stdout
        assert (box.get_info().network or {})["deny_out"] == ["8.8.8.0/24"]
        box.update_network({"deny_out": ["8.8.8.8", "8.8.4.4"], "allow_out": ["8.8.4.4"]})
        assert "the policy denies 8.8.8.8" in box.commands.run(ask).stdout
        with pytest.raises(SandboxException, match="only addresses and ranges"):
            box.update_network({"deny_out": ["example.com"]})
        box.update_network({"deny_out": ["0.0.0.0/0"]})
        assert "the policy denies" not in box.commands.run(f"{ask} || true").stdout


async def test_headers_are_set_in_requests_to_their_hosts_until_an_update_leaves_them_out(site: Origin) -> None:
    await anyio.to_thread.run_sync(_set_and_take_back, site)
    sent = [(asked.line.split()[1], asked.all("authorization"), asked.all("x-mode")) for asked in site.asked]
    assert sent == [
        (b"/created", [VALUE.encode()], [b"second"]),
        (b"/snapshot", [], []),
        (b"/updated", [], [b"third"]),
    ]


def _set_and_take_back(site: Origin) -> None:
    url = f"https://localhost:{site.port}"
    rules: list[SandboxNetworkRule] = [
        {"transform": {"headers": {"Authorization": VALUE, "X-Mode": "first"}}},
        {"transform": {"headers": {"x-mode": "second"}}},
    ]
    network = SandboxNetworkOpts(deny_out=CLOSED, allow_out=HERE, rules={"LocalHost": rules})
    with Sandbox.create(timeout=120, network=network) as box:
        assert "hello" in box.commands.run(f"{CURL} {url}/created -H 'Authorization: own'").stdout
        shown = (box.get_info().network or {})["rules"]
        assert VALUE not in str(shown)
        assert "Authorization" in str(shown)
        snapshot = box.create_snapshot()
        with Sandbox.create(snapshot.snapshot_id, timeout=60, network={"deny_out": CLOSED, "allow_out": HERE}) as again:
            again.commands.run(f"{CURL} -k {url}/snapshot")
        Sandbox.delete_snapshot(snapshot.snapshot_id)
        changed: list[SandboxNetworkRule] = [{"transform": {"headers": {"X-Mode": "third"}}}]
        box.update_network({"deny_out": CLOSED, "allow_out": HERE, "rules": {"localhost": changed}})
        assert "hello" in box.commands.run(f"{CURL} {url}/updated").stdout
        box.update_network({"deny_out": CLOSED, "allow_out": HERE})
        with pytest.raises(CommandExitException, match="certificate"):  # nothing is in between any more
            box.commands.run(f"{CURL} {url}/direct")
        for host, headers in (("*", {"X-A": "1"}), ("localhost", {"Host": "x"}), ("http://localhost", {"X-A": "1"})):
            with pytest.raises((SandboxException, InvalidArgumentException)):
                box.update_network({"rules": {host: [{"transform": {"headers": headers}}]}})


def test_a_host_for_ports_that_is_none_is_refused() -> None:
    for host in ("a b", "a/b", "a\r\nX: y", "${HOST}", ""):
        with pytest.raises((SandboxException, InvalidArgumentException), match="maskRequestHost"):
            Sandbox.create(timeout=60, network={"mask_request_host": host})
