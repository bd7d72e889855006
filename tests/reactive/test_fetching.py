"""`fetch_data`: by the same rules as a sandbox's egress."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from anyio.abc import ByteStream
from anyio.streams.tls import TLSStream

from atoll import FetchFailed, InvalidRequest, NetworkPolicy
from atoll.reactive import Graph, cell, computed, fetch_data
from atoll.reactive.fetching import PolicyFetcher
from atoll.testing.waiting import eventually
from tests.egress.world import SITE, World, serving
from tests.origin import TestAuthority
from tests.reactive.site import Site


@pytest.fixture
def allowed(graph: Graph, site: Site) -> Site:
    graph.network = NetworkPolicy(allow=[site.rule])
    return site


async def test_text_and_json_are_fetched_and_again_when_the_url_changes(allowed: Site) -> None:
    url = cell(allowed.page("/one", '{"name": "one", "stars": [1, 2]}'))
    allowed.page("/two", '{"name": "zwei ü"}'.encode("latin-1"), kind="application/json; charset=latin-1")
    text, data = fetch_data(url), fetch_data(url, "json")
    assert await text == '{"name": "one", "stars": [1, 2]}'
    name = computed(lambda: data.result["name"])
    assert await name == "one"
    url.set(f"{allowed.url}/two")
    assert name.pending
    assert await name == "zwei ü"
    assert allowed.asked == ["/one", "/one", "/two", "/two"]


async def test_nothing_may_be_fetched_without_a_policy(graph: Graph, site: Site) -> None:
    node = fetch_data(site.page("/", "secret"))
    with pytest.raises(
        FetchFailed, match=r"only a rule for that address allows; to allow it, add the rule 127\.0\.0\.1"
    ):
        await node
    assert site.asked == []


async def test_a_node_may_have_a_policy_of_its_own(graph: Graph, site: Site) -> None:
    assert await fetch_data(site.page("/", "ok"), network=NetworkPolicy(allow=site.rule)) == "ok"


@pytest.mark.parametrize(
    ("host", "addresses", "reason"),
    [
        ("inside.example.com", ["10.0.0.7"], "10.0.0.7 is a private address"),
        ("metadata.example.com", ["169.254.169.254"], "169.254.169.254 is a"),
        ("loop.example.com", ["::ffff:127.0.0.1"], "127.0.0.1 is a loopback address"),
        ("other.org", [SITE], "no rule allows other.org:80"),
    ],
)
async def test_names_and_the_addresses_behind_them_are_checked(host: str, addresses: list[str], reason: str) -> None:
    world = World()
    world.name(host, addresses)
    fetcher = PolicyFetcher(NetworkPolicy(allow=["*.example.com", "0.0.0.0/0"]), connector=world.connector)
    with pytest.raises(FetchFailed, match=reason.replace(".", r"\.")):
        await fetcher.fetch(f"http://{host}/")
    assert world.dialled == []


async def test_a_redirect_must_be_allowed_too(allowed: Site) -> None:
    allowed.page("/here", "moved")
    assert await fetch_data(allowed.redirect("/a", "/here")) == "moved"
    node = fetch_data(allowed.redirect("/b", "http://127.0.0.1:1/"))
    with pytest.raises(FetchFailed, match="only a rule for that address"):
        await node
    node = fetch_data(allowed.redirect("/c", "/c"))
    with pytest.raises(FetchFailed, match="more than 5 redirects"):
        await node
    node = fetch_data(allowed.redirect("/d", "file:///etc/passwd"))
    with pytest.raises(InvalidRequest, match="http://"):
        await node


async def test_what_is_too_large_or_too_slow_fails(allowed: Site) -> None:
    node = fetch_data(allowed.page("/", "x" * 1001), limit_bytes=1000)
    with pytest.raises(FetchFailed, match="larger than 1000 bytes"):
        await node
    allowed.held = anyio.Event()
    slow = fetch_data(f"{allowed.url}/", timeout_s=0.1)
    with pytest.raises(FetchFailed, match=r"within 0\.1 s"):
        await slow


async def test_an_error_of_the_server_is_an_error_with_its_status(allowed: Site) -> None:
    node = fetch_data(allowed.page("/?key=hush", "no", status=503))
    with pytest.raises(FetchFailed, match="answered 503") as raised:
        await node
    assert raised.value.status == 503
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (b"\x00\x01\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 300 + b"\r\n", "header lines"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 0\r\n\r\n", "compressed"),
        (b"", "closed before it"),
    ],
)
async def test_an_answer_that_is_not_plain_http_fails(allowed: Site, page: bytes, reason: str) -> None:
    allowed.pages["/"] = page
    node = fetch_data(f"{allowed.url}/")
    with pytest.raises(FetchFailed, match=reason):
        await node


async def test_what_is_not_json_fails(allowed: Site) -> None:
    node = fetch_data(allowed.page("/", "[" * 100_000), "json")
    with pytest.raises(FetchFailed, match="not JSON"):
        await node


@pytest.mark.parametrize(
    "url",
    ["ftp://example.com/", "http://", "/etc/passwd", "http://user:key@example.com/", "http://0177.1/", "http://a b/"],
)
async def test_what_is_no_url_is_refused(allowed: Site, url: str) -> None:
    node = fetch_data(url)
    with pytest.raises(InvalidRequest, match="is not a URL that can be fetched"):
        await node


async def test_a_mode_that_does_not_exist_is_refused(allowed: Site) -> None:
    node = fetch_data(allowed.url, cell("xml"))
    with pytest.raises(InvalidRequest, match="'text' or 'json'"):
        await node


async def test_a_newer_url_cancels_the_older_request(allowed: Site) -> None:
    allowed.held = anyio.Event()
    url = cell(allowed.page("/slow", "old"))
    node = fetch_data(url)
    await eventually(lambda: allowed.asked == ["/slow"], "the first request")
    url.set(allowed.page("/fast", "new"))
    allowed.held.set()
    assert await node == "new"


async def test_certificates_are_verified(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    context = authority.server_context("example.com")
    world = World()
    world.name("example.com", [SITE])
    world.name("wrong.example.com", [SITE])

    async def answer(stream: ByteStream) -> None:
        try:
            tls = await TLSStream.wrap(stream, server_side=True, ssl_context=context, standard_compatible=False)
            await tls.receive()
            await tls.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nsafe")
        except (OSError, anyio.BrokenResourceError, anyio.EndOfStream):
            return

    async with serving(answer) as port:
        world.servers = {("*", 443): port}
        policy = NetworkPolicy(allow=["example.com", "*.example.com"])
        fetcher = PolicyFetcher(policy, connector=world.connector, trust=authority.client_context())
        assert (await fetcher.fetch("https://example.com/")).text() == "safe"
        with pytest.raises(FetchFailed, match=r"TLS with wrong\.example\.com failed"):
            await fetcher.fetch("https://wrong.example.com/")
        with pytest.raises(FetchFailed, match=r"TLS with example\.com failed"):
            await PolicyFetcher(policy, connector=world.connector).fetch("https://example.com/")
