"""Views: what elements become as JSON and as text, what changes them, and what their fields do."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from atoll import InvalidRequest
from atoll.reactive import Graph, cell, computed, handler, view
from atoll.reactive.rendering import MAX_INPUT_CHARS, PatternView, to_text
from atoll.testing.waiting import eventually

pytestmark = pytest.mark.usefixtures("graph")
PNG = b"\x89PNG\r\n\x1a\n0000"


def shown(graph: Graph, content: Any) -> Any:
    return PatternView(graph, content).tree()


async def test_elements_are_plain_data(graph: Graph) -> None:
    tree = shown(
        graph,
        view.column(
            view.heading("Title", level=1),
            view.row(view.text("a ", 1, None, 2.5), view.pre("<b>\n", error=True)),
            view.table(["x", "y"], [[1, "<i>"], [None, 2.0]]),
            view.chart(["a", "b"], {"n": [1, float("nan")]}, kind="bar"),
            view.loader(label="later"),
            "plain",
            None,
            False,
        ),
    )
    assert tree == {
        "type": "column",
        "children": [
            {"type": "heading", "level": 1, "text": "Title"},
            {
                "type": "row",
                "children": [
                    {"type": "text", "text": "a 12.5"},
                    {"type": "pre", "text": "<b>\n", "error": True},
                ],
            },
            {"type": "table", "columns": ["x", "y"], "rows": [["1", "<i>"], ["None", "2"]]},
            {"type": "chart", "kind": "bar", "labels": ["a", "b"], "series": [{"name": "n", "values": [1.0, None]}]},
            {"type": "loader", "label": "later", "elapsed_s": None, "implied": False},
            {"type": "text", "text": "plain"},
        ],
    }


async def test_functions_and_nodes_are_drawn_again_when_they_change(graph: Graph) -> None:
    count = cell(1)
    page = PatternView(
        graph,
        view.column(
            view.text("count ", count),
            lambda: [view.text(f"twice {count.get() * 2}")] * count.get(),
            view.table(["n"], lambda: [[number] for number in range(count.get())]),
        ),
    )
    assert to_text(page.tree()) == "count 1\ntwice 2\nn\n─\n0"
    count.set(2)
    assert to_text(page.tree()) == "count 2\ntwice 4\ntwice 4\nn\n─\n0\n1"


async def test_what_waits_is_a_loader_then_stale_and_what_fails_an_error(graph: Graph) -> None:
    held, source = anyio.Event(), cell(1)

    async def slow() -> int:
        value = source.get()
        await held.wait()
        if value == 3:
            raise ValueError("three <script>")
        return value

    node = computed(slow)
    page = PatternView(graph, view.column(view.text("n = ", node), lambda: view.pre(node.result), view.loader(node)))
    first = page.tree()["children"]
    assert [each["type"] for each in first] == ["loader", "loader", "loader"]
    assert first[0]["label"] == "slow"
    assert first[0]["elapsed_s"] >= 0
    held.set()
    await node
    assert page.tree()["children"] == [
        {"type": "text", "text": "n = 1"},
        {"type": "pre", "text": "1", "error": False},
    ]
    held = anyio.Event()
    source.set(2)
    stale = page.tree()["children"]
    assert [each["type"] for each in stale] == ["stale", "stale", "loader"]
    assert stale[0]["children"] == [{"type": "text", "text": "n = 1"}]
    held.set()
    await node
    source.set(3)
    await graph.settled()
    assert page.tree()["children"] == [{"type": "error", "text": "ValueError: three <script>"}] * 2


async def test_a_loader_says_how_long_it_has_been(graph: Graph) -> None:
    async def slow() -> None:
        await anyio.sleep_forever()

    page = PatternView(graph, view.loader(computed(slow), label="working"))
    await eventually(lambda: page.tree()["elapsed_s"] >= 0.1, "some time")
    assert to_text(page.tree()).startswith("… working 0.")


async def test_pictures_are_what_they_say_they_are(graph: Graph) -> None:
    assert shown(graph, view.image(PNG, alt="x"))["url"].startswith("data:image/png;base64,iVBOR")
    assert shown(graph, view.image(lambda: b"RIFF0000WEBPxx"))["url"].startswith("data:image/webp;")
    for wrong in (b"<svg onload=alert(1)>", "text", b""):
        assert shown(graph, view.image(wrong))["type"] == "error"


async def test_drawings_are_sanitised(graph: Graph) -> None:
    tree = shown(graph, view.svg('<svg xmlns="http://www.w3.org/2000/svg"><script>1</script><rect/></svg>'))
    assert "script" not in tree["svg"]
    assert "<rect>" in tree["svg"]
    assert shown(graph, view.svg("<!DOCTYPE x [<!ENTITY a 'b'>]><x/>"))["type"] == "error"


async def test_a_field_sets_its_cell_as_the_type_that_it_has(graph: Graph) -> None:
    word, count, on, items = cell("a"), cell(1), cell(False), cell([1])
    page = PatternView(graph, view.column(*(view.input(each) for each in (word, count, on, items))))
    ids = [each["id"] for each in page.tree()["children"]]
    for id, value in zip(ids, ("<b>", "42", "true", "[2, 3]"), strict=True):
        page.act(id, value)
    assert [each.get() for each in (word, count, on, items)] == ["<b>", 42, True, [2, 3]]
    assert [each["value"] for each in page.tree()["children"]] == ["<b>", "42", "True", "[2, 3]"]
    for id, value in zip(ids[1:], ("x", "maybe", '{"a": 1}'), strict=True):
        with pytest.raises(InvalidRequest, match="it has to be a"):
            page.act(id, value)
    with pytest.raises(InvalidRequest, match="may have"):
        page.act(ids[0], "x" * (MAX_INPUT_CHARS + 1))
    with pytest.raises(InvalidRequest, match="needs its text"):
        page.act(ids[0])


async def test_a_choice_is_one_of_its_options(graph: Graph) -> None:
    choice = cell(1)
    page = PatternView(graph, view.select(choice, [1, 2], label="number"))
    tree = page.tree()
    assert (tree["value"], tree["options"]) == ("1", ["1", "2"])
    page.act(tree["id"], "2")
    assert choice.get() == 2
    with pytest.raises(InvalidRequest, match="it may be 1, 2"):
        page.act(tree["id"], "3")


async def test_buttons_and_fields_call_handlers(graph: Graph) -> None:
    called = []

    @handler
    def call(*values: object) -> None:
        called.append(values)

    count = cell(2)
    page = PatternView(
        graph,
        view.column(
            view.input(call, placeholder="$ "),
            lambda: [view.button(f"b{number}", call, number) for number in range(count.get())],
        ),
    )
    field, first, second = page.tree()["children"]
    assert (field["submits"], field["value"], first["pending"]) == (True, "", False)
    assert len({field["id"], first["id"], second["id"]}) == 3
    page.act(second["id"])
    page.act(field["id"], "ls")
    assert called == [(1,), ("ls",)]
    count.set(1)
    page.tree()
    with pytest.raises(InvalidRequest, match="no field or button"):
        page.act(second["id"])
    with pytest.raises(InvalidRequest, match="no field or button"):
        page.act(f"n{count.id}", "5")


async def test_elements_say_what_they_are_for() -> None:
    for make in (lambda: view.input("x"), lambda: view.button("x", cell(1)), lambda: view.select("x", [])):  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="is for"):
            make()


async def test_text_for_a_terminal_has_no_control_characters(graph: Graph) -> None:
    tree = shown(
        graph,
        view.column(
            view.heading("a\x1b[2Jb"),
            view.pre("x\x1b]0;title\x07\ty\r\nz"),
            view.table(["h\x1b"], [["v\nw"]]),
            view.chart(["l", "m"], {"s": [1, 2]}),
            view.image(PNG, alt="pic"),
            view.svg('<svg xmlns="http://www.w3.org/2000/svg"/>'),
        ),
    )
    text = to_text(tree, columns=40)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "x]0;title\ty\nz" in text
    assert "v w" in text
    assert "[image pic]" in text
    assert "█ 1" in text


async def test_long_text_is_shown_from_its_end(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.reactive.rendering.MAX_TEXT_CHARS", 10)
    assert shown(graph, view.pre("x" * 20 + "end"))["text"] == "…xxxxxxxend"
