"""A view that lives in a graph: its tree as JSON for pages, as text for terminals, and what its fields and buttons do.

Owns what each element becomes, how large it may be, that everything from a sandbox is only data, and which inputs are
accepted. Not here: the elements themselves (`view.py`), SVG (`svg.py`), and pages (`surfaces/web/`). Used by
`patterns.py`.

The tree has an object for each element, with `type` and what the type has:

    text, pre     text, and for pre error (true or false)
    heading       text, level (1 to 3)
    table         columns (a list of text), rows (a list of lists of text)
    image         url (a `data:` URL of a picture), alt
    svg           svg (harmless)
    chart         kind (line or bar), labels (a list of text), series (a list of {name, values})
    loader        label, elapsed_s (a number, or null), implied (true: in place of an element that waits)
    error         text
    input         id, label, placeholder, multiline, value, submits (true: it calls a handler, and is emptied),
                  error (what its handler failed with, or null)
    select        id, label, value, options (a list of text)
    button        id, label, pending (true: its handler runs), error (as that of an input)
    row, column   children

Something that waits for a newer value, and still shows the one before, is {"type": "stale", "elapsed_s", "children"}.
Ids are stable as long as the view is; `PatternView.act` takes one and the text of a field.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from atoll.contract.errors import InvalidRequest
from atoll.reactive.graph import Graph
from atoll.reactive.nodes import Cell, Computed, Node, describe
from atoll.reactive.operations import Handler
from atoll.reactive.svg import sanitised_svg
from atoll.reactive.view import Element

MAX_TEXT_CHARS = 256 * 1024
"""Of one element. Of longer text the end is shown."""
MAX_ROWS = 1_000
"""Of a table, and points of a chart."""
MAX_IMAGE_BYTES = 4 * 1024 * 1024
MAX_INPUT_CHARS = 64 * 1024
_PICTURES = ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"))

ViewTree = dict[str, Any]


class PatternView:
    """A view in a graph. What it shows changes with the graph; `tree` is what it shows now."""

    def __init__(self, graph: Graph, shown: Any) -> None:
        self._graph = graph
        self._root = _bind(graph, shown)
        self._actions: dict[str, Callable[[str | None], None]] = {}

    def tree(self) -> ViewTree:
        """The view as it is now."""
        self._actions.clear()
        trees = list(self._trees(self._root))
        return trees[0] if len(trees) == 1 else {"type": "column", "children": trees}

    def act(self, id: str, value: str | None = None) -> None:
        """Do what a field or a button of the present view does: set its cell, or call its handler.

        Raises:
            InvalidRequest: the view has no such field or button, or it does not take this value.
        """
        if not self._actions:
            self.tree()
        action = self._actions.get(id)
        if action is None:
            raise InvalidRequest(f"the view has no field or button {id[:40]!r} now")
        if value is not None and len(value) > MAX_INPUT_CHARS:
            raise InvalidRequest(f"the input has {len(value)} characters; it may have {MAX_INPUT_CHARS}")
        action(value)

    # ----------------------------------------------------------------------------------------------------- elements

    def _trees(self, shown: Any) -> Iterator[ViewTree]:
        """What is shown, with each node replaced by what it shows now."""
        if isinstance(shown, Node):
            yield from self._node(shown)
        elif isinstance(shown, Element):
            yield from self._element(shown)
        elif isinstance(shown, list | tuple):
            for each in shown:
                yield from self._trees(each)
        elif shown is not None and shown is not False:
            yield {"type": "text", "text": _text(shown)}

    def _node(self, node: Node[Any]) -> Iterator[ViewTree]:
        pending, result, error, latest = node.current
        if pending:
            elapsed_s = _elapsed(node)
            if latest is None:
                yield _implied_loader(node, elapsed_s)
            else:
                yield {"type": "stale", "elapsed_s": elapsed_s, "children": list(self._trees(latest))}
        elif error is not None:
            yield {"type": "error", "text": _text(describe(error))}
        else:
            yield from self._trees(result)

    def _element(self, element: Element) -> Iterator[ViewTree]:
        waits = [node for node in _nodes_in(element.values) if node.current.pending]
        failed = [node for node in _nodes_in(element.values) if node.current.error is not None]
        if failed:
            yield {"type": "error", "text": _text(describe(cast("Exception", failed[0].current.error)))}
            return
        values = {name: _now(value) for name, value in element.values.items()}
        try:
            made = getattr(self, f"_{element.kind}")(values, element)
        except (InvalidRequest, ValueError, TypeError) as error:
            if not waits:
                yield {"type": "error", "text": _text(describe(error))}
            else:
                yield _implied_loader(waits[0], _elapsed(waits[0]))
            return
        if made is None:
            return
        if waits:
            whole = all(node.current.latest_complete is not None for node in waits)
            elapsed_s = max(_elapsed(node) for node in waits)
            if not whole:
                yield _implied_loader(waits[0], elapsed_s)
            else:
                yield {"type": "stale", "elapsed_s": elapsed_s, "children": [made]}
        else:
            yield made

    def _row(self, _values: Mapping[str, Any], element: Element) -> ViewTree:
        children = [tree for child in element.children for tree in self._trees(child)]
        return {"type": element.kind, "children": children}

    _column = _row

    @staticmethod
    def _text(values: Mapping[str, Any], _element: Element) -> ViewTree:
        return {"type": "text", "text": _joined(values["text"])}

    @staticmethod
    def _pre(values: Mapping[str, Any], _element: Element) -> ViewTree | None:
        return {"type": "pre", "text": _joined(values["text"]), "error": bool(values["error"])}

    @staticmethod
    def _heading(values: Mapping[str, Any], _element: Element) -> ViewTree:
        return {"type": "heading", "level": min(max(int(values["level"]), 1), 3), "text": _joined(values["text"])}

    @staticmethod
    def _table(values: Mapping[str, Any], _element: Element) -> ViewTree:
        rows = list(itertools.islice(values["rows"], MAX_ROWS))
        return {
            "type": "table",
            "columns": [_text(each) for each in values["columns"]],
            "rows": [[_text(each) for each in row] for row in rows],
        }

    @staticmethod
    def _image(values: Mapping[str, Any], _element: Element) -> ViewTree:
        content = values["content"]
        if not isinstance(content, bytes):
            raise InvalidRequest("an image is the bytes of a PNG, JPEG, GIF or WebP file, such as of result.file_bytes")
        if len(content) > MAX_IMAGE_BYTES:
            raise InvalidRequest(f"the image has {len(content)} bytes; it may have {MAX_IMAGE_BYTES}")
        kind = next((kind for magic, kind in _PICTURES if content.startswith(magic)), None)
        if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
            kind = "webp"
        if kind is None:
            raise InvalidRequest("the image is not a PNG, JPEG, GIF or WebP file")
        encoded = base64.b64encode(content).decode()
        return {"type": "image", "url": f"data:image/{kind};base64,{encoded}", "alt": _text(values["alt"])}

    @staticmethod
    def _svg(values: Mapping[str, Any], _element: Element) -> ViewTree:
        content = values["content"]
        if not isinstance(content, str):
            raise InvalidRequest("a drawing is the text of an SVG file, such as of result.files")
        prefix = "s" + hashlib.sha256(content.encode("utf-8", "replace")).hexdigest()[:8]
        return {"type": "svg", "svg": sanitised_svg(content, prefix=prefix)}

    @staticmethod
    def _chart(values: Mapping[str, Any], _element: Element) -> ViewTree:
        series = values["series"]
        if not isinstance(series, Mapping):
            raise InvalidRequest("the series of a chart are a list of numbers for each name")
        return {
            "type": "chart",
            "kind": "bar" if values["kind"] == "bar" else "line",
            "labels": [_text(each) for each in itertools.islice(values["labels"], MAX_ROWS)],
            "series": [
                {"name": _text(name), "values": [_number(each) for each in itertools.islice(numbers, MAX_ROWS)]}
                for name, numbers in series.items()
            ],
        }

    @staticmethod
    def _loader(values: Mapping[str, Any], element: Element) -> ViewTree | None:
        nodes: Sequence[Node[Any]] = element.values["nodes"]
        waits = [node for node in nodes if node.current.pending]
        if nodes and not waits:
            return None
        elapsed_s = max((_elapsed(node) for node in waits), default=None)
        return {"type": "loader", "label": _text(values["label"] or ""), "elapsed_s": elapsed_s, "implied": False}

    def _input(self, values: Mapping[str, Any], element: Element) -> ViewTree:
        target: Cell[Any] | Handler[..., Any] = element.values["target"]
        submits = isinstance(target, Handler)

        def act(value: str | None) -> None:
            if value is None:
                raise InvalidRequest("an input needs its text")
            if isinstance(target, Handler):
                target(value)
            else:
                target.set(convert(value, target.current.result, target.name))

        return {
            "type": "input",
            "id": self._offer(f"n{target.id}", act),
            "label": _text(values["label"]),
            "placeholder": _text(values["placeholder"]),
            "multiline": bool(values["multiline"]),
            "value": "" if submits else _text(target.current.result),
            "submits": submits,
            "error": _failure(target) if submits else None,
        }

    def _select(self, values: Mapping[str, Any], element: Element) -> ViewTree:
        target: Cell[Any] = element.values["target"]
        options = {_text(each): each for each in itertools.islice(values["options"], MAX_ROWS)}

        def act(value: str | None) -> None:
            if value not in options:
                raise InvalidRequest(f"{target.name} cannot be {value!r:.60}; it may be {', '.join(options)[:200]}")
            target.set(options[value])

        return {
            "type": "select",
            "id": self._offer(f"n{target.id}", act),
            "label": _text(values["label"]),
            "value": _text(target.current.result),
            "options": list(options),
        }

    def _button(self, values: Mapping[str, Any], element: Element) -> ViewTree:
        target: Handler[..., Any] = element.values["target"]

        def act(_value: str | None) -> None:
            target(*values["values"])

        return {
            "type": "button",
            "id": self._offer(f"n{target.id}", act),
            "label": _text(values["label"]),
            "pending": target.current.pending,
            "error": _failure(target),
        }

    def _offer(self, id: str, action: Callable[[str | None], None]) -> str:
        """Take an action under this id, or, if another element has that, with a number after it."""
        names = itertools.chain([id], (f"{id}.{number}" for number in itertools.count(2)))
        free = next(name for name in names if name not in self._actions)
        self._actions[free] = action
        return free


def _bind(graph: Graph, shown: Any) -> Any:
    """What is shown, with a node in place of each function."""
    if isinstance(shown, Element):
        values = {name: value if name == "target" else _bind(graph, value) for name, value in shown.values.items()}
        return Element(shown.kind, values, tuple(_bind(graph, child) for child in shown.children))
    if isinstance(shown, list | tuple):
        return [_bind(graph, each) for each in shown]
    if callable(shown) and not isinstance(shown, Node):
        return Computed(graph, lambda: _evaluate(shown), None, kind="view")
    return shown


def _evaluate(shown: Any) -> Any:
    """What is shown, inside of a function that is tracked: with nodes and functions replaced by their values."""
    if isinstance(shown, Element):
        values = {
            name: value if name in ("target", "nodes") else _evaluate(value) for name, value in shown.values.items()
        }
        return Element(shown.kind, values, tuple(_evaluate(child) for child in shown.children))
    if isinstance(shown, list | tuple):
        return [_evaluate(each) for each in shown]
    if isinstance(shown, Node):
        return _evaluate(shown.get())
    return _evaluate(shown()) if callable(shown) else shown


def _nodes_in(values: Any) -> Iterator[Node[Any]]:
    if isinstance(values, Mapping):
        for name, value in values.items():
            if name not in ("target", "nodes"):
                yield from _nodes_in(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _nodes_in(value)
    elif isinstance(values, Node):
        yield values


def _now(value: Any) -> Any:
    """A value with nodes replaced by their last good ones."""
    if isinstance(value, Node):
        return value.current.latest_complete
    if isinstance(value, list | tuple):
        return [_now(each) for each in value]
    return value


def _implied_loader(node: Node[Any], elapsed_s: float) -> ViewTree:
    """In place of what waits for a node: named after what people know, which a function of a view is not."""
    while node.kind == "view" and (waits := [read for read in node.inputs if read.current.pending]):
        node = waits[0]
    return {
        "type": "loader",
        "label": "" if node.kind == "view" else node.name,
        "elapsed_s": elapsed_s,
        "implied": True,
    }


def _failure(node: Node[Any]) -> str | None:
    error = node.current.error
    return None if error is None else _text(describe(error))


def _elapsed(node: Node[Any]) -> float:
    return round(node.info().running_s or 0.0, 1)


def _text(value: Any) -> str:
    written = value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
    return written if len(written) <= MAX_TEXT_CHARS else f"…{written[-MAX_TEXT_CHARS:]}"


def _joined(values: Sequence[Any]) -> str:
    return _text("".join(_text(each) for each in values if each is not None))


def _number(value: Any) -> float | None:
    if value is None:
        return None  # a gap
    number = float(value)
    return number if math.isfinite(number) else None


def convert(text: str, like: object, name: str) -> Any:
    """Text as a value of the type of `like`: what is entered for a cell.

    Raises:
        InvalidRequest: it cannot be converted.
    """
    try:
        if isinstance(like, bool):
            return {"true": True, "false": False, "1": True, "0": False}[text.strip().lower()]
        if isinstance(like, int | float):
            return type(like)(text)
        if isinstance(like, list | dict):
            value = json.loads(text)
            if type(value) is not type(like):
                raise ValueError("it is other JSON")  # noqa: TRY301 - one message for all
            return value
    except (KeyError, ValueError, RecursionError):
        raise InvalidRequest(f"{name} cannot be {text!r:.60}; it has to be a {type(like).__name__}") from None
    return text


# ---------------------------------------------------------------------------------------------------------- terminals


def to_text(tree: ViewTree, *, columns: int | None = None) -> str:
    """A tree as lines for a terminal. Control characters of its texts are left out."""
    width = columns or shutil.get_terminal_size().columns
    return "\n".join(_lines(tree, max(width, 20)))


def _lines(tree: ViewTree, width: int) -> Iterator[str]:
    kind = tree["type"]
    match kind:
        case "row" | "column" | "stale":
            for number, child in enumerate(tree["children"]):
                lines = list(_lines(child, width))
                if number and lines and child["type"] == "heading":
                    yield ""
                yield from lines
            if kind == "stale":
                yield f"… {tree['elapsed_s']:g} s"
        case "text" | "pre":
            yield from _plain(tree["text"]).removesuffix("\n").split("\n")
        case "error":
            yield f"error: {_plain(tree['text'])}"
        case "heading":
            title = _plain(tree["text"]).replace("\n", " ")
            yield title
            yield ("═" if tree["level"] == 1 else "─") * min(len(title), width)
        case "table":
            yield from _table_lines([tree["columns"], *tree["rows"]])
        case "image":
            yield f"[image {_plain(tree['alt'])}]".replace(" ]", "]")
        case "svg":
            yield f"[drawing, {len(tree['svg'])} characters of SVG]"
        case "chart":
            yield from _chart_lines(tree, width)
        case "loader":
            elapsed = "" if tree["elapsed_s"] is None else f" {tree['elapsed_s']:g} s"
            yield f"… {_plain(tree['label'])}{elapsed}".rstrip()
        case "input" | "select":
            label = _plain(tree["label"] or tree.get("placeholder") or "")
            yield f"{label}: {_plain(tree['value'])}".removeprefix(": ") if not tree.get("submits") else f"{label} _"
            yield from _failure_lines(tree)
        case "button":
            yield f"[{_plain(tree['label'])}]"
            yield from _failure_lines(tree)


def _failure_lines(tree: ViewTree) -> Iterator[str]:
    if tree.get("error") is not None:
        yield f"error: {_plain(tree['error'])}"


def _plain(text: str) -> str:
    return "".join(each for each in text.replace("\r\n", "\n") if each.isprintable() or each in "\n\t")


def _table_lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    shown = [[_plain(each).replace("\n", " ") for each in row] for row in rows]
    widths = [max(map(len, column)) for column in itertools.zip_longest(*shown, fillvalue="")]
    for number, row in enumerate(shown):
        yield "  ".join(each.ljust(width) for each, width in zip(row, widths, strict=False)).rstrip()
        if number == 0:
            yield "  ".join("─" * width for width in widths)


def _chart_lines(tree: ViewTree, width: int) -> Iterator[str]:
    """A bar for each value: of a line chart too, where a terminal has no finer means."""
    for series in tree["series"]:
        yield _plain(series["name"])
        numbers = [number or 0.0 for number in series["values"]]
        labels = [_plain(label).replace("\n", " ") for label in tree["labels"]]
        space = max(map(len, labels), default=0)
        most = max(map(abs, numbers), default=0.0) or 1.0
        for label, number in itertools.zip_longest(labels, numbers, fillvalue=""):
            amount = number if isinstance(number, float) else 0.0
            bar = "█" * round(abs(amount) / most * max(width - space - 14, 5))
            yield f"{label or '':<{space}} {bar} {amount:g}".rstrip()
