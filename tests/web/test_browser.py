"""The page of a pattern in a browser: headless Chromium, driven by Playwright. One browser for all of them.

With ATOLL_SCREENSHOTS, a directory, pages are photographed there in light and dark.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, Page, Playwright, Request, async_playwright, expect

from atoll import Engine, NetworkPolicy, reactive
from atoll.reactive import NAME, UI, Cell, Graph, Pattern, view
from atoll.reactive.patterns import load_pattern
from atoll.runtime.engine import LocalEngine
from atoll.testing.waiting import BOUND_S
from tests.egress.world import SITE
from tests.reactive.site import TYPESCRIPT, names_for, publish_repository, publish_typescript, serving_site
from tests.web.hostile import hostile
from tests.web.serving import page_of

EXAMPLES = Path(__file__).parents[2] / "examples/patterns"
CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = """
--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update
--disable-sync
""".split()
BOUND_MS = BOUND_S * 1000
VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
    window.violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sample}`));
"""
LOST = "ERR_(CONNECTION_REFUSED|CONNECTION_RESET|INCOMPLETE_CHUNKED_ENCODING|EMPTY_RESPONSE)"
"""What a browser says while a server is away."""
SHOTS = os.environ.get("ATOLL_SCREENSHOTS")


@pytest.fixture(scope="module")
async def playwright(host: Engine) -> AsyncIterator[Playwright]:
    """After the engine, whose fixtures need a thread without a loop."""
    async with async_playwright() as playwright:
        expect.set_options(timeout=BOUND_MS)
        yield playwright


@pytest.fixture(scope="module")
async def browser(playwright: Playwright) -> AsyncIterator[Browser]:
    browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
    yield browser
    await browser.close()


class Visitor:
    """Someone who opens pages, and complains about errors."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self.loaded: list[str] = []
        """The paths that were asked for."""
        self.said: list[str] = []
        """By the console, and errors of scripts."""

    @asynccontextmanager
    async def at(self, url: str, *, but: str = "nothing", **options: Any) -> AsyncIterator[Page]:
        """A page, in a context of its own. The browser says no error `but` such as match this."""
        context = await self._browser.new_context(**options)
        context.set_default_timeout(BOUND_MS)
        page = await context.new_page()
        await page.add_init_script(VIOLATIONS)
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", self._request)
        try:
            await page.goto(url)
            yield page
            assert await page.evaluate("window.violations") == []
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it fits the width"
        finally:
            await context.close()
        assert [each for each in self.said if not re.search(but, each)] == []

    def _request(self, request: Request) -> None:
        self.loaded.append(urlsplit(request.url).path)

    def has_loaded(self, name: str) -> bool:
        return any(path.endswith(name) for path in self.loaded)


@pytest.fixture
def visitor(browser: Browser) -> Visitor:
    return Visitor(browser)


@pytest.fixture
async def graph(host: Engine) -> AsyncIterator[Graph]:
    """The current graph of a test. When it has ended, no sandbox is left."""
    async with Graph(host) as graph:
        yield graph
    assert await host.list() == []


def example(name: str) -> Pattern:
    return load_pattern(str(EXAMPLES / f"{name}.py"))


async def photograph(page: Page, name: str) -> None:
    if SHOTS is not None:
        for scheme in ("light", "dark"):
            await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            await page.screenshot(path=Path(SHOTS) / f"{name}-{scheme}.png", full_page=True)


# --------------------------------------------------------------------------------------------------- without a sandbox


@reactive.pattern(number=4.0, text="", tall=False)
def fields(number: Cell[float], text: Cell[str], tall: Cell[bool]) -> dict[str, Any]:
    """What is entered, and what came of it."""
    pressed = reactive.cell(0, name="pressed")

    @reactive.handler
    def press() -> None:
        pressed.update(lambda before: before + 1)
        if pressed.get() > 1:
            raise RuntimeError("pressed too often")

    return {
        NAME: "Fields",
        UI: view.column(
            lambda: view.heading("Tall") if tall.get() else None,
            view.input(number, label="number"),
            view.input(text, label="text", multiline=True),
            view.row(view.select(tall, [False, True], label="tall"), view.button("Press", press)),
            lambda: view.text(f"number {number.get():g}, text {text.get()!r}, pressed {pressed.get()}"),
            view.table(["a", "b"], [[1, "x"], [2, "y"]]),
            view.chart(["mon", "tue", "wed"], {"in": [1, 4, 2], "out": [3, 1, 2]}, kind="bar"),
            lambda: view.chart(["mon", "tue", "wed"], {"n": [number.get(), 4, None]}),
        ),
        "double": reactive.computed(lambda: number.get() * 2, name="double"),
    }


async def test_what_is_typed_stays_as_it_was_typed_and_what_others_enter_is_seen(visitor: Visitor) -> None:
    async with reactive.Graph(), page_of(running := fields()) as url:  # noqa: SIM117
        async with visitor.at(url, but="status of 400") as page, visitor.at(url, but="status of 400") as other:
            assert not visitor.has_loaded("dagre.esm.js")
            number, text = page.get_by_label("number"), page.get_by_label("text")
            await expect(page.get_by_role("status")).to_have_text("Up to date")
            # The number that the server makes of this is written differently: 7.
            await number.fill("7.")
            await expect(other.get_by_text("number 7,")).to_be_visible()
            await expect(number).to_have_value("7.")
            await number.press("End")
            await number.press_sequentially("25")
            await expect(other.get_by_text("number 7.25,")).to_be_visible()
            await expect(number).to_have_value("7.25")
            # The caret stays where it is, though an element comes above the field.
            await text.fill("one three")
            await text.evaluate("field => field.setSelectionRange(4, 4)")
            running.set("tall", "true")
            await expect(page.get_by_role("heading", name="Tall")).to_be_visible()
            await expect(text).to_be_focused()
            await text.press_sequentially("two ")
            await expect(text).to_have_value("one two three")
            await expect(other.get_by_label("text")).to_have_value("one two three")
            # What another person enters is seen, also in the field that one is in.
            await other.get_by_label("text").fill("theirs")
            await expect(text).to_have_value("theirs")
            # What is wrong is said at the field, and stays to be mended.
            await number.fill("many")
            await number.press("Enter")
            await expect(page.get_by_role("alert")).to_contain_text("number cannot be 'many'")
            await expect(number).to_have_value("many")
            await expect(number).to_have_attribute("aria-invalid", "true")
            await number.fill("8")
            await number.press("Enter")
            await expect(page.get_by_role("alert")).to_have_count(0)
            await text.focus()
            await expect(number).to_have_value("8")
            # With the keyboard alone: a choice, then a button.
            await text.press("Tab")
            await expect(page.get_by_label("tall")).to_be_focused()
            await page.keyboard.press("ArrowUp")
            await expect(page.get_by_role("heading", name="Tall")).to_have_count(0)
            await page.keyboard.press("Tab")
            await page.keyboard.press("Enter")
            await expect(other.get_by_text("pressed 1")).to_be_visible()
            await page.get_by_role("button", name="Press").click()
            await expect(page.get_by_role("alert")).to_contain_text("pressed too often")
            await expect(page.locator("canvas")).to_have_count(2)
            await photograph(page, "fields")


async def test_a_page_comes_back_after_its_server_does(visitor: Visitor) -> None:
    async with reactive.Graph() as graph:
        running = fields()
        async with page_of(running) as url:
            stream = visitor.at(url, but=LOST, viewport={"width": 390, "height": 700})
            page = await stream.__aenter__()
            await page.get_by_label("number").fill("5")
            await expect(page.get_by_text("number 5,")).to_be_visible()
            await page.get_by_label("text").focus()
        await expect(page.get_by_role("status")).to_have_text("Connection lost; trying again…")
        await page.get_by_label("text").fill("meanwhile")
        await expect(page.get_by_role("alert")).to_contain_text("the server cannot be reached")
        await photograph(page, "lost")
        running.set("number", "6")
        # A page of another pattern, with other values: the page shows them, and sends what it could not.
        async with page_of(running, port=urlsplit(url).port or 0):
            await expect(page.get_by_text("number 6, text 'meanwhile'")).to_be_visible()
            await expect(page.get_by_label("number")).to_have_value("6")
            await expect(page.get_by_role("status")).to_have_text("Up to date")
            await photograph(page, "phone")
            await stream.__aexit__(None, None, None)
        assert graph.nodes


async def test_a_token_is_taken_out_of_the_address(visitor: Visitor) -> None:
    token = "a-token-of-enough-characters"
    async with reactive.Graph(), page_of(fields(), token=token) as url:  # noqa: SIM117
        async with visitor.at(f"{url}/?token={token}") as page:
            await expect(page.get_by_role("status")).to_have_text("Up to date")
            assert page.url == f"{url}/"
            (cookie,) = await page.context.cookies()
            assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
            await page.get_by_label("number").fill("3")
            await expect(page.get_by_text("number 3,")).to_be_visible()


async def test_what_a_sandbox_prints_does_nothing_in_a_browser(visitor: Visitor) -> None:
    async with reactive.Graph(), page_of(hostile()) as url:
        async with visitor.at(url) as page:
            await expect(page.locator("canvas")).to_be_visible()
            await page.get_by_role("button", name="Graph").click()
            await expect(page.locator(".graph svg .node")).to_have_count(2)
            await expect(page.locator(".drawing svg rect")).to_be_visible()
            assert await page.evaluate("window.hacked") is None
            assert await page.locator("main script, main a, main foreignObject, main [onload]").count() == 0
            assert await page.evaluate("document.querySelector('main').innerText.includes('<script>')")
        async with visitor.at(url, java_script_enabled=False) as page:
            await expect(page.locator("main .output")).to_have_count(6)


# --------------------------------------------------------------------------------------------------------- the examples


async def test_the_python_runner_runs_what_is_typed(visitor: Visitor, graph: Graph) -> None:
    async with page_of(example("python_runner")()) as url, visitor.at(url) as page:
        await expect(page.locator(".output")).to_contain_text("hello from Python 3.")
        code = page.get_by_label("code")
        await code.fill("import time\nprint('half', flush=True)\ntime.sleep(600)\n")
        await expect(page.locator(".output")).to_have_text("half\n")
        await expect(page.get_by_role("status")).to_have_text("Running")
        await expect(page.locator(".loader .elapsed")).to_have_text(re.compile(r"\d s"))
        await page.get_by_role("button", name="Graph").click()
        await expect(page.locator(".node.running .facts")).to_contain_text("running · 2 runs")
        await photograph(page, "running")
        await code.fill("import sys\nprint('whole')\nprint('<b>oh</b>', file=sys.stderr)\n")
        await expect(page.locator(".output.failed")).to_have_text("<b>oh</b>\n")
        await expect(page.locator(".output").first).to_have_text("whole\n")
        await expect(page.locator(".node.done")).to_have_count(2)
        await expect(code).to_be_focused()
        await photograph(page, "runner")


async def test_the_shell_remembers_what_was_entered(visitor: Visitor, graph: Graph) -> None:
    async with page_of(example("shell_repl")()) as url, visitor.at(url) as page:
        line = page.get_by_label("$")
        await line.fill("greeting=calm; echo $greeting > kept; ls")
        await line.press("Enter")
        await expect(page.locator(".output").last).to_have_text("$ greeting=calm; echo $greeting > kept; ls\nkept\n")
        await expect(line).to_have_value("")
        await expect(line).to_be_focused()
        await line.press_sequentially("cat kept; cat lost")
        await page.get_by_role("button", name="Enter").click()
        await expect(page.locator(".output.failed")).to_contain_text("No such file")
        await photograph(page, "shell")
        async with visitor.at(url) as other:  # who comes later sees the same
            await expect(other.locator(".output")).to_have_count(3)


async def test_the_csv_pipeline_draws_its_charts(visitor: Visitor, graph: Graph) -> None:
    async with serving_site() as site:
        graph.network = NetworkPolicy(allow=[site.rule])
        url_of_csv = site.page("/tides.csv", "height,wind,name\n1,7,<b>\n3,4,b\n2,6,c\n2.5,3,d\n")
        running = example("csv_pipeline")(csv_url=f"{site.url}/nothing")
        async with page_of(running) as url, visitor.at(url) as page:
            await expect(page.get_by_role("alert")).to_contain_text("404")
            await expect(page.get_by_role("status")).to_have_text("Failed")
            assert not visitor.has_loaded("uPlot.esm.js")
            await page.get_by_label("URL").fill(url_of_csv)
            await expect(page.locator(".drawing svg rect").first).to_be_visible()
            await expect(page.locator(".chart canvas")).to_be_visible()
            await expect(page.get_by_role("cell", name="height, wind, name")).to_be_visible()
            await expect(page.get_by_role("alert")).to_have_count(0)
            assert visitor.has_loaded("uPlot.esm.js")
            assert not visitor.has_loaded("dagre.esm.js")
            await page.get_by_role("button", name="Graph").click()
            await expect(page.locator(".node.done")).to_have_count(7)
            assert visitor.has_loaded("dagre.esm.js")
            await page.get_by_text("The same as a table").click()
            await expect(page.get_by_role("cell", name="fetch_data")).to_be_visible()
            await photograph(page, "csv")


async def test_the_other_examples_work_on_a_page_too(
    visitor: Visitor, graph: Graph, host: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ATOLL_MODEL", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    async with serving_site() as site:
        with names_for(graph, host, site) as world:
            for name in ("api.example.com", "git.example.com", "npm.example.com"):
                world.name(name, [SITE])
            graph.network = NetworkPolicy(allow=["*.example.com:80"])
            publish_repository(site, tmp_path)
            site.page("/repos/sea/tide", json.dumps({"name": "tide", "stargazers_count": 7}))
            inputs = {"api": "http://api.example.com", "site": "http://git.example.com", "repo_url": "sea/none"}
            async with page_of(example("repo_stats")(**inputs)) as url, visitor.at(url) as page:
                await expect(page.get_by_role("alert").first).to_be_visible()
                await page.get_by_label("repository").fill("sea/tide")
                await expect(page.get_by_role("heading", name="Repo: tide")).to_be_visible()
                await expect(page.get_by_text("TypeScript lines: 3")).to_be_visible()
                await photograph(page, "repository")
            async with page_of(example("agent")()) as url, visitor.at(url) as page:
                await expect(page.get_by_text("It has Python 3.")).to_be_visible()
                await photograph(page, "agent")
            if TYPESCRIPT.is_dir():
                publish_typescript(site)
                running = example("typescript_compiler")(registry="http://npm.example.com/")
                async with page_of(running) as url, visitor.at(url) as page:
                    await expect(page.get_by_text("compiling")).to_be_visible()
                    await graph.settled()  # npm and the compiler take their time
                    await expect(page.get_by_text("export const double = (n) => n * 2;")).to_be_visible()
                    await photograph(page, "typescript")
