"""Patterns, and the examples of them in real sandboxes, with a server on loopback for the internet."""

from __future__ import annotations

import importlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from atoll import InvalidRequest, NetworkPolicy, reactive
from atoll.reactive import NAME, UI, Cell, Graph, RunningPattern, cell, computed, pattern, view
from atoll.reactive.drawing import graph_svg, graph_text
from atoll.reactive.patterns import load_pattern
from atoll.reactive.rendering import to_text
from atoll.reactive.svg import sanitised_svg
from atoll.runtime.engine import LocalEngine
from tests.egress.world import SITE, World
from tests.reactive.site import TYPESCRIPT, Site, names_for, publish_repository, publish_typescript

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("graph")


@pattern(word="sea", times=2)
def repeated(word: Cell[str], times: Cell[int]) -> dict[str, Any]:
    """A word, several times."""
    text = computed(lambda: word.get() * times.get())
    return {NAME: lambda: f"Repeated {word.get()}", UI: view.pre(text), "text": text, "plain": 5}


async def test_a_pattern_has_inputs_outputs_a_name_and_a_view() -> None:
    running = repeated(times=3)
    assert (running.name, running.results()) == ("Repeated sea", ({"text": "seaseasea", "plain": 5}, {}))
    assert to_text(running.view.tree()) == "seaseasea"
    assert running.outputs["text"].name == "text"
    running.set("times", "1")
    running.set("word", "tide")
    assert (running.name, to_text(running.view.tree())) == ("Repeated tide", "tide")


async def test_patterns_are_composed_by_nodes() -> None:
    word = cell("a")
    running = repeated(word=computed(lambda: word.get() + "b"))
    word.set("x")
    assert running.results()[0]["text"] == "xbxb"
    with pytest.raises(InvalidRequest, match="no input 'word' that can be set"):
        running.set("word", "y")


async def test_wrong_inputs_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="has no input 'size'; it has word, times"):
        repeated(size=1)
    with pytest.raises(InvalidRequest, match="times cannot be 'many'"):
        repeated.read_inputs({"times": "many"})

    @pattern
    def needs(url: Cell[str]) -> dict[str, Any]:
        return {}

    with pytest.raises(InvalidRequest, match="needs needs its input url"):
        needs()
    with pytest.raises(InvalidRequest, match="has no input 'ulr'"):
        pattern(ulr="x")(lambda url: {})


async def test_what_failed_is_an_error_and_no_result() -> None:
    @pattern
    def fails() -> dict[str, Any]:
        return {"bad": computed(lambda: 1 / 0), "good": computed(lambda: (1, b"x"))}

    assert fails().results() == ({"bad": None, "good": [1, "b'x'"]}, {"bad": "ZeroDivisionError: division by zero"})


async def test_a_pattern_is_loaded_from_a_file_by_name(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        "from atoll.reactive import pattern\n@pattern\ndef one(): return {}\n@pattern\ndef two(): return {}\n"
    )
    assert load_pattern(f"{file}:two").name == "two"
    for source, reason in [
        (str(file), "has several: one, two"),
        (f"{file}:three", "has no pattern 'three'; it has one, two"),
        (str(tmp_path / "none.py"), "there is no file"),
        (str(tmp_path), "there is no file"),
    ]:
        with pytest.raises(InvalidRequest, match=reason):
            load_pattern(source)


async def test_the_graph_is_drawn_with_its_edges_and_its_state(graph: Graph) -> None:
    running = repeated(word="<script>")
    running.inputs["word"].name = "<b>&amp;"
    text = graph_text(graph.nodes)
    assert [line.split()[0] for line in text.splitlines()[:4]] == ["NAME", "<b>&amp;", "times", "text"]
    assert "<b>&amp;, times" in text
    drawing = graph_svg(graph.nodes)
    assert "&lt;b&gt;&amp;amp;" in drawing
    assert drawing.count("<path") == 3
    assert sanitised_svg(drawing).count("<rect") == drawing.count("<rect")


# ------------------------------------------------------------------------------------------------------------- examples


def example(name: str) -> Any:
    return getattr(importlib.import_module(f"examples.patterns.{name}"), name)


async def settled(running: RunningPattern) -> dict[str, Any]:
    await running.graph.settled()
    results, errors = running.results()
    assert errors == {}
    return results


async def test_the_python_runner_runs_code_and_shows_what_it_wrote() -> None:
    running = example("python_runner")(code="print(6 * 7)")
    assert (await settled(running))["run"]["stdout"] == "42\n"
    assert running.name == "Python Runner"
    running.set("code", "import sys; sys.exit('wrong')")
    await settled(running)
    trees = running.view.tree()["children"]
    assert [(each["type"], each.get("error")) for each in trees[1:]] == [("pre", False), ("pre", True)]
    assert trees[2]["text"] == "wrong\n"


async def test_the_shell_keeps_what_commands_do_and_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    running = example("shell_repl")()
    field = running.view.tree()["children"][-1]
    for command in ("echo here > file", "cat file", "nonsense"):
        running.view.act(field["id"], command)
    history = (await settled(running))["history"]
    assert [entry["stdout"] for entry in history] == ["", "here\n", ""]
    assert history[2]["exit_code"] == 127
    assert "$ cat file\nhere" in to_text(running.view.tree())
    choice = running.view.tree()["children"][0]
    assert choice["options"] == ["python", "node"]
    running.view.act(choice["id"], "node")
    assert (await settled(running))["history"] == history


async def test_the_csv_pipeline_fetches_analyses_and_draws(graph: Graph, site: Site) -> None:
    graph.network = NetworkPolicy(allow=[site.rule])
    url = site.page("/t.csv", "name,a,b\nx,1,10\ny,3,<20\n")
    running = example("csv_pipeline")(csv_url=url)
    results = await settled(running)
    assert (results["stats"]["count"], results["stats"]["cols"]) == (2, ["name", "a", "b"])
    assert results["stats"]["means"] == {"a": 2.0}
    drawing = running.view.tree()["children"][-1]
    assert drawing["type"] == "svg"
    assert 'fill="#1565c0"' in drawing["svg"]
    running.set("csv_url", site.page("/u.csv", "<b>&,c\n1,2\n"))
    assert (await settled(running))["stats"]["cols"] == ["<b>&", "c"]
    running.set("csv_url", f"{site.url}/missing")
    await graph.settled()
    assert "answered 404" in running.results()[1]["stats"]
    assert running.view.tree()["children"][-1]["type"] == "error"


async def test_the_agent_works_in_a_sandbox_and_again_for_another_task(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATOLL_MODEL", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    running = example("agent")()
    assert (await settled(running))["answer"].startswith("It has Python 3.")
    running.set("task", "Once more?")
    assert (await settled(running))["answer"].startswith("It has Python 3.")


@pytest.fixture
async def world(graph: Graph, host: LocalEngine, site: Site) -> AsyncIterator[World]:
    with names_for(graph, host, site) as world:
        yield world


async def test_repo_stats_puts_together_an_api_and_a_clone(
    graph: Graph, site: Site, world: World, tmp_path: Path
) -> None:
    publish_repository(site, tmp_path)
    site.page("/repos/sea/tide", json.dumps({"name": "tide", "stargazers_count": 7}))
    for name in ("api.example.com", "git.example.com"):
        world.name(name, [SITE])
    graph.network = NetworkPolicy(allow=["*.example.com:80"])
    running = example("repo_stats")(repo_url="sea/tide", api="http://api.example.com", site="http://git.example.com")
    assert (await settled(running))["summary"] == {"name": "tide", "stars": 7, "ts_lines": 3}
    assert running.name == "Repo: tide"
    assert "Stars: 7\nTypeScript lines: 3" in to_text(running.view.tree())


@pytest.mark.skipif(not TYPESCRIPT.is_dir(), reason="the TypeScript compiler is not installed in clients/typescript")
async def test_the_typescript_compiler_returns_javascript_and_declarations(
    graph: Graph, site: Site, world: World
) -> None:
    publish_typescript(site)
    world.name("npm.example.com", [SITE])
    graph.network = NetworkPolicy(allow=["npm.example.com:80"])
    running = example("typescript_compiler")(
        source_code="export const twice = (n: number): number => n * 2;", registry="http://npm.example.com/"
    )
    results = await settled(running)
    assert results["js"] == "export const twice = (n) => n * 2;\n"
    assert results["dts"] == "export declare const twice: (n: number) => number;\n"
    running.set("source_code", "export const x: number = 'text';")
    await settled(running)
    assert "Type 'string' is not assignable" in to_text(running.view.tree())


async def test_public_names_are_exactly_these() -> None:
    """The public API is pinned: adding or removing a name is a decision, with a line in the changelog."""
    names = """
    Cell CommandResult Computed FetchFailed Graph Handler NAME Node NodeInfo NodeState Operation Pattern RunningPattern
    SandboxHandle UI batch cell computed exec fetch_data generate_text handler pattern read_sandbox_file sandbox view
    write_sandbox_file
""".split()
    assert sorted(reactive.__all__) == sorted(names)
    for name in names:
        assert getattr(reactive, name) is not None
