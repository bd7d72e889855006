"""The page of a pattern over HTTP: what it shows, who may do what, and how watchers follow it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from html.parser import HTMLParser
from typing import Any

import httpx2
import pytest
from pydantic import SecretStr

from atoll import InvalidRequest, reactive
from atoll.reactive import NAME, UI, Cell, RunningPattern, view
from atoll.surfaces.web import patterns
from atoll.surfaces.web.live import LiveState
from atoll.surfaces.web.patterns.page import MAX_ACTION_BYTES
from atoll.testing.waiting import BOUND_S, eventually
from tests.web.hostile import hostile
from tests.web.serving import page_of

TOKEN = "a-token-of-enough-characters"
JSON = {"Content-Type": "application/json"}


@reactive.pattern(number=4)
def squares(number: Cell[int]) -> dict[str, Any]:
    """The square of a number.

    And more about it.
    """
    square = reactive.computed(lambda: number.get() ** 2, name="square")

    @reactive.handler
    def fail() -> None:
        raise RuntimeError("out of order")

    return {
        NAME: lambda: f"Square of {number.get()}",
        UI: view.column(
            view.input(number, label="number"),
            view.text("is ", square),
            view.select(number, [1, 2, 3], label="choice"),
            view.button("Fail", fail),
        ),
        "square": square,
    }


@pytest.fixture
async def running() -> AsyncIterator[RunningPattern]:
    async with reactive.Graph():
        yield squares()


@pytest.fixture
async def url(running: RunningPattern) -> AsyncIterator[str]:
    async with page_of(running) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=url, timeout=BOUND_S) as client:
        yield client


class Watcher:
    """A client of `/events`."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines
        self.id = ""

    async def next(self) -> dict[str, Any]:
        """The next state."""
        async for line in self._lines:
            if line.startswith("id: "):
                self.id = line.removeprefix("id: ")
            if line.startswith("data: "):
                return json.loads(line.removeprefix("data: "))
        raise EOFError

    async def until(self, text: str) -> dict[str, Any]:
        """The first state that has this text in it."""
        while text not in json.dumps(state := await self.next()):
            pass
        return state

    async def rest(self) -> list[str]:
        return [line async for line in self._lines]


@asynccontextmanager
async def watching(client: httpx2.AsyncClient, **headers: str) -> AsyncIterator[Watcher]:
    async with client.stream("GET", "/events", headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Watcher(response.aiter_lines())


class Tags(HTMLParser):
    """The elements of a page, and the texts of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts.append(data)


def field(state: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(each for each in state["view"]["children"] if each["type"] == kind)


# ------------------------------------------------------------------------------------------------------------- the page


async def test_the_page_has_its_content_before_any_script_runs(client: httpx2.AsyncClient) -> None:
    page = (await client.get("/")).text
    assert "<h1>Square of 4</h1><p>The square of a number.</p>" in page
    assert '<p class="text">is 16</p>' in page
    assert 'value="4"' in page
    assert '<button type="button"' in page
    assert "<noscript>" in page


async def test_a_page_may_run_only_what_this_server_serves(client: httpx2.AsyncClient) -> None:
    answer = await client.get("/")
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    (import_map,) = Tags(answer.text).scripts
    digest = base64.b64encode(hashlib.sha256(import_map.encode()).digest()).decode()
    assert policy == {
        "default-src": "'none'",
        "script-src": f"'self' 'sha256-{digest}'",
        "style-src": "'self'",
        "img-src": "'self' data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "atoll-drawing",
    }
    for name, value in (
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("cross-origin-resource-policy", "same-origin"),
        ("cross-origin-opener-policy", "same-origin"),
    ):
        assert answer.headers[name] == value
    error = await client.get("/nothing")
    assert error.status_code == 404
    assert error.headers["content-security-policy"].startswith("default-src 'none'")


async def test_assets_are_kept_for_ever_and_have_an_address_for_each_release(client: httpx2.AsyncClient) -> None:
    page = (await client.get("/")).text
    addresses = re.findall(r'"\./(assets/[0-9a-f]{16}/[^"]+)"', page)
    assert len(addresses) > 12
    for address in addresses:
        if address.endswith("/static/"):
            continue  # where the import map finds scripts of Atoll
        answer = await client.get(f"/{address}")
        assert answer.status_code == 200, address
        assert "immutable" in answer.headers["cache-control"]
        tag = answer.headers["etag"]
        assert (await client.get(f"/{address}", headers={"If-None-Match": tag})).status_code == 304
    script = next(each for each in addresses if each.endswith("page.js"))
    plain = await client.get(f"/{script}", headers={"Accept-Encoding": "identity"})
    assert plain.headers["content-type"] == "text/javascript; charset=utf-8"
    assert "content-encoding" not in plain.headers
    async with client.stream("GET", f"/{script}", headers={"Accept-Encoding": "gzip"}) as packed:
        assert gzip.decompress(b"".join([piece async for piece in packed.aiter_raw()])) == plain.content
    release = script.split("/")[1]
    for wrong in (
        script.replace(release, "0" * 16),
        f"assets/{release}/static/../page.py",
        f"assets/{release}/static/%2e%2e/live.py",
        f"assets/{release}/vendor/manifest.json",
        f"assets/{release}/",
    ):
        assert (await client.get(f"/{wrong}")).status_code == 404, wrong


async def test_nothing_from_a_sandbox_becomes_markup() -> None:
    async with reactive.Graph(), page_of(hostile()) as url, httpx2.AsyncClient(base_url=url) as client:
        tags = Tags((await client.get("/")).text)
        scripts = [given for tag, given in tags.tags if tag == "script"]
        assert [given.get("type") for given in scripts] == ["importmap", "module"]
        allowed = """
        html head meta title link script body div header h1 p main h3 pre table thead tr th tbody td svg rect text img
        figure figcaption label input textarea select option span noscript
        """.split()
        assert {tag for tag, _ in tags.tags} <= set(allowed)
        for tag, given in tags.tags:
            assert not [name for name in given if name.startswith("on") or name in ("style", "srcdoc")], tag
            for name in ("href", "src", "xlink:href"):
                assert re.match(r"\./assets/|data:image/(png|jpeg|gif|webp);base64,", given.get(name) or "./assets/")
        async with watching(client) as watcher:
            state = await watcher.next()
        drawing = field(state, "svg")["svg"]
        assert 'fill="red"' in drawing
        assert not re.search(r"<script|javascript:|onload|foreign|animate|http://127", drawing)
        # An error of a function of the view is shown, and is as harmless.
        answer = await client.post("/actions", json={"id": field(state, "input")["id"], "value": "fail"})
        assert answer.status_code == 200
        assert "ZeroDivisionError: division by zero" in (await client.get("/")).text


# ------------------------------------------------------------------------------------------------------------- watchers


async def test_watchers_follow_the_state_and_what_one_enters_all_see(
    client: httpx2.AsyncClient, running: RunningPattern
) -> None:
    async with watching(client) as one, watching(client) as other:
        first = await one.next()
        assert first["title"] == "Square of 4"
        assert {node["name"] for node in first["nodes"]} >= {"number", "square"}
        assert await other.next() == first
        answer = await client.post("/actions", json={"id": field(first, "input")["id"], "value": "9"})
        for watcher in (one, other):
            state = await watcher.until("is 81")
            assert state["title"] == "Square of 9"
            assert watcher.id == answer.json()["state"]
        running.set("number", "2")  # by the program, not by a page
        assert field(await one.until("is 4"), "select")["value"] == "2"


async def test_who_comes_again_gets_what_is_new(client: httpx2.AsyncClient, running: RunningPattern) -> None:
    async with watching(client) as watcher:
        before = await watcher.next()
        id = watcher.id
    running.set("number", "5")
    async with watching(client, **{"Last-Event-ID": id}) as watcher:
        assert (await watcher.next())["title"] == "Square of 5"
        id = watcher.id
    async with watching(client, **{"Last-Event-ID": id}) as watcher:
        running.set("number", "6")
        assert (await watcher.next())["title"] == "Square of 6"
    async with watching(client, **{"Last-Event-ID": "another-1"}) as watcher:  # of a server before this one
        assert (await watcher.next())["release"] == before["release"]


async def test_a_server_that_stops_ends_its_streams(running: RunningPattern) -> None:
    async with httpx2.AsyncClient(timeout=BOUND_S) as client:
        async with page_of(running) as url:
            client.base_url = httpx2.URL(url)
            stream = watching(client)
            watcher = await stream.__aenter__()
            await watcher.next()
        assert [line for line in await watcher.rest() if line.strip(": ")] == []
        await stream.__aexit__(None, None, None)


async def test_a_slow_watcher_gets_the_newest_state_and_nothing_is_queued() -> None:
    made: list[int] = []
    number = 0

    def make() -> dict[str, Any]:
        made.append(number)
        return {"number": number}

    live = LiveState(make, lambda size: {"size": size}, interval_s=0)
    async with aclosing(live.events(None)) as events:
        assert (await anext(events)).startswith(b"retry: ")
        assert b'{"number":0}' in await anext(events)
        for _ in range(999):
            number += 1
            live.changed()
        assert b'{"number":999}' in await anext(events)
        assert made == [0, 999]
        live.close()
        assert [event async for event in events] == []


async def test_a_state_that_is_too_large_says_so(monkeypatch: pytest.MonkeyPatch, running: RunningPattern) -> None:
    monkeypatch.setattr("atoll.surfaces.web.live.MAX_STATE_BYTES", 100)
    monkeypatch.setattr("atoll.surfaces.web.patterns.page.MAX_WATCHERS", 1)
    async with page_of(running) as url, httpx2.AsyncClient(base_url=url) as client:
        async with watching(client) as watcher:
            assert "more than a page can show" in (await watcher.next())["view"]["text"]
            refused = await client.get("/events")
            assert (refused.status_code, refused.json()["code"]) == (503, "too_many_watchers")

        async def has_left() -> bool:
            async with client.stream("GET", "/events") as answer:
                return answer.status_code == 200

        assert await eventually(has_left, "the place of a watcher that has left is free")


# -------------------------------------------------------------------------------------------------------------- actions


async def test_actions_that_are_wrong_are_refused(client: httpx2.AsyncClient) -> None:
    async with watching(client) as watcher:
        state = await watcher.next()
        number, choice = field(state, "input")["id"], field(state, "select")["id"]
        for body, message in (
            ({"id": "n999", "value": "1"}, "no field or button 'n999'"),
            ({"id": number, "value": "four"}, "number cannot be 'four'; it has to be a int"),
            ({"id": number}, "an input needs its text"),
            ({"id": number, "value": 4}, "value: Input should be a valid string"),
            ({"id": number, "value": "4", "more": 1}, "more: Extra inputs"),
            ({"id": number, "value": "4" * 70_000}, "it may have 65536"),
            ({"id": "n" * 200, "value": ""}, "id: String should have at most 100"),
            ({"id": choice, "value": "7"}, "it may be 1, 2, 3"),
            ({"value": "4"}, "id: Field required"),
            ([], "not an action"),
        ):
            answer = await client.post("/actions", json=body)
            assert answer.status_code == 400, body
            assert message in answer.json()["message"]
        for content, headers, status in (
            (b"{", JSON, 400),
            (b'{"id": "n1", "value": "\xff"}', JSON, 400),
            (b"[" * 100_000, JSON, 400),
            (b" " * (MAX_ACTION_BYTES + 1), JSON, 413),
            (b'{"id": "n1", "value": "1"}', {"Content-Type": "text/plain"}, 415),
            (b"id=n1&value=1", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ):
            assert (await client.post("/actions", content=content, headers=headers)).status_code == status
        assert (await client.get("/actions")).status_code == 405
        assert (await client.get("/")).text.count('value="4"') == 1, "none of this changed anything"
        # A handler that fails is shown where it was called.
        await client.post("/actions", json={"id": field(state, "button")["id"]})
        assert field(await watcher.until("out of order"), "button")["error"] == "RuntimeError: out of order"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example.com"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),  # another port of this machine, such as a preview
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Host": "evil.example.com"}, 421),
        ({"Host": "127.0.0.1@evil.example.com"}, 400),
    ],
)
async def test_a_page_of_another_origin_can_do_nothing(
    client: httpx2.AsyncClient, headers: dict[str, str], status: int
) -> None:
    action = {"id": "n1", "value": "5"}
    assert (await client.post("/actions", json=action, headers=headers)).status_code == status
    if "Sec-Fetch-Site" not in headers:
        for path in ("/", "/events"):
            assert (await client.get(path, headers=headers)).status_code == status
    own = {"Origin": str(client.base_url).rstrip("/"), "Sec-Fetch-Site": "same-origin"}
    assert (await client.post("/actions", json=action, headers=own)).status_code == 200


async def test_a_token_becomes_a_cookie_and_leaves_the_address(running: RunningPattern) -> None:
    async with page_of(running, token=TOKEN) as url, httpx2.AsyncClient(base_url=url) as client:
        for path in ("/", "/events", "/assets/x/y", "/?token=wrong", f"/?token={TOKEN}x", "/?token=%ff"):
            assert (await client.get(path)).status_code == 401, path
        shown = await client.get("/", headers={"Accept": "text/html"})
        assert "This page needs its token" in shown.text
        answer = await client.get("/", params={"token": TOKEN})
        assert '<meta http-equiv="refresh" content="0; url=/">' in answer.text
        assert TOKEN not in answer.text + str(answer.headers)
        cookie = answer.headers["set-cookie"]
        assert {"HttpOnly", "Path=/", "SameSite=strict"} <= set(cookie.split("; "))
        assert (await client.get("/")).status_code == 200
        action = {"id": "n1", "value": "5"}
        assert (await client.post("/actions", json=action)).status_code == 403, "with a cookie, the origin is needed"
        own = {"Origin": url}
        assert (await client.post("/actions", json=action, headers=own)).status_code == 200
        assert (await client.post("/actions", json=action, headers={"Origin": "http://x.example.com"})).is_error
        async with watching(client) as watcher:
            assert (await watcher.next())["title"] == "Square of 5"
        kept = dict(client.cookies)
        client.cookies.clear()
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        assert (await client.post("/actions", json=action, headers=bearer)).status_code == 200
        (value,) = kept.values()
        stolen = {"Authorization": f"Bearer {value}"}
        assert (await client.get("/", headers=stolen)).status_code == 401, "the cookie is no token"
    async with page_of(running, token=TOKEN) as url, httpx2.AsyncClient(base_url=url, cookies=kept) as client:
        assert (await client.get("/")).status_code == 200, "also after the server was started again"
    async with page_of(running, token=f"{TOKEN}2") as url, httpx2.AsyncClient(base_url=url, cookies=kept) as client:
        assert (await client.get("/")).status_code == 401


async def test_what_others_could_reach_needs_a_token(running: RunningPattern) -> None:
    for address in ("0.0.0.0", "::"):
        with pytest.raises(InvalidRequest, match="ATOLL_PATTERN_TOKEN"):
            patterns.accepted_hosts(address, None)
        assert patterns.accepted_hosts(address, SecretStr(TOKEN)) is None
    assert "localhost" in (patterns.accepted_hosts("localhost", None) or ())
