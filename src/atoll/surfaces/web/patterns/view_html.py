"""A view as HTML: what a page shows before its script runs, and where none runs.

Owns the HTML of each element. `static/elements.js` makes the same elements in the browser. Everything is escaped but
drawings, which `reactive/svg.py` has made harmless. Used by `page.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import zip_longest
from typing import Any

from atoll.reactive.rendering import ViewTree

_SCROLLS = 'class="scroll" role="region" tabindex="0"'


def view_html(title: str, about: str, tree: ViewTree) -> str:
    """The body of the page."""
    shown = tree["children"] if tree["type"] == "column" else [tree]
    first = escape(" ".join(about.split("\n\n", 1)[0].split()))
    return (
        '<div id="app"><header class="masthead"><div class="titles">'
        f"<h1>{escape(title)}</h1>{f'<p>{first}</p>' if first else ''}</div></header>"
        f'<main class="view">{"".join(_elements(shown, ""))}</main>'
        '<noscript><p class="notice">Scripts are off. This is how things were when the page was loaded.</p></noscript>'
        "</div>"
    )


def _elements(trees: Sequence[ViewTree], also: str) -> Iterator[str]:
    """Elements beside or below each other. One failure reaches many of them, and is shown once; what waits has no
    loader of its own where there is one for it."""
    flat = list(_flat(trees, also))
    has_loader = any(tree["type"] == "loader" and not tree["implied"] for tree, _ in flat)
    failures: set[str] = set()
    for tree, classes in flat:
        if tree["type"] == "loader" and tree["implied"] and has_loader:
            continue
        if tree["type"] == "error":
            if tree["text"] in failures:
                continue
            failures.add(tree["text"])
        yield from _html(tree, classes)


def _flat(trees: Sequence[ViewTree], also: str) -> Iterator[tuple[ViewTree, str]]:
    for tree in trees:
        if tree["type"] == "stale":
            yield from _flat(tree["children"], " stale")
            yield {"type": "loader", "label": "", "elapsed_s": tree["elapsed_s"], "implied": True}, ""
        else:
            yield tree, also


def _html(tree: ViewTree, also: str) -> Iterator[str]:
    """`also` are classes."""
    match tree["type"]:
        case "row" | "column" as kind:
            yield f'<div class="{kind}">{"".join(_elements(tree["children"], also))}</div>'
        case "stale":
            yield from _elements([tree], also)
        case "text":
            yield f'<p class="text{also}">{escape(tree["text"])}</p>'
        case "pre":
            error = " failed" if tree["error"] else ""
            yield f'<pre class="output{error}{also}" tabindex="0">{escape(tree["text"])}</pre>'
        case "heading":
            level = tree["level"] + 1
            yield f'<h{level} class="heading{also}">{escape(tree["text"])}</h{level}>'
        case "table":
            yield from _table(tree["columns"], tree["rows"])
        case "image":
            yield f'<img class="picture{also}" src="{escape(tree["url"])}" alt="{escape(tree["alt"])}">'
        case "svg":
            yield f'<div class="drawing{also}">{tree["svg"]}</div>'
        case "chart":
            series = tree["series"]
            columns = ["", *(each["name"] for each in series)]
            values = zip_longest(tree["labels"], *(each["values"] for each in series), fillvalue="")
            yield '<figure class="chart"><figcaption>Chart</figcaption>'
            yield from _table(columns, [["" if each is None else str(each) for each in row] for row in values])
            yield "</figure>"
        case "loader":
            yield _loader(tree["label"], tree["elapsed_s"])
        case "error":
            yield f'<div class="failure" role="alert">{escape(tree["text"])}</div>'
        case "input" | "select" | "button" as kind:
            yield from _field(tree, kind)


def _loader(label: str, elapsed_s: float | None) -> str:
    elapsed = "" if elapsed_s is None else f'<span class="elapsed">{elapsed_s:.1f} s</span>'
    return f'<p class="loader"><span class="spinner"></span><span>{escape(label)}</span> {elapsed}</p>'


def _table(columns: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f'<div {_SCROLLS} aria-label="table"><table><thead><tr>'
    yield "".join(f'<th scope="col">{escape(each)}</th>' for each in columns)
    yield "</tr></thead><tbody>"
    for row in rows:
        yield f"<tr>{''.join(f'<td>{escape(each)}</td>' for each in row)}</tr>"
    yield "</tbody></table></div>"


def _field(tree: dict[str, Any], kind: str) -> Iterator[str]:
    id = escape(tree["id"])
    failure = f'<p class="complaint">{escape(tree["error"])}</p>' if tree.get("error") else ""
    if kind == "button":
        yield f'<div class="field"><button type="button" id="{id}">{escape(tree["label"])}</button>{failure}</div>'
        return
    label = tree["label"]
    name = tree.get("placeholder") or "input"
    named = "" if label else f' aria-label="{escape(name)}"'
    yield '<div class="field">'
    if label:
        yield f'<label for="{id}">{escape(label)}</label>'
    if kind == "select":
        options = "".join(
            f"<option{' selected' if each == tree['value'] else ''}>{escape(each)}</option>" for each in tree["options"]
        )
        yield f'<select id="{id}"{named}>{options}</select>'
    elif tree["multiline"]:
        yield f'<textarea id="{id}" rows="8" placeholder="{escape(tree["placeholder"])}"{named} spellcheck="false">'
        yield f"\n{escape(tree['value'])}</textarea>"
    else:
        value, placeholder = escape(tree["value"]), escape(tree["placeholder"])
        yield f'<input id="{id}" type="text" value="{value}" placeholder="{placeholder}"{named} autocomplete="off">'
    yield f"{failure}</div>"
