"""The elements of a view, as plain data: what a pattern shows, for terminals and pages alike.

Owns which elements there are, and what each has. Not here: how they are drawn (`rendering.py`). Used by patterns, as
`view.column(view.heading("Shell"), …)`.

Wherever an element takes a value, it takes a node or a function too. What a function reads is tracked as in `computed`:
the element is drawn again when it changes, a loader while it waits, and the error if it fails. A function may return
elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from atoll.contract.errors import InvalidRequest
from atoll.reactive.nodes import Cell, Node
from atoll.reactive.operations import Handler

Shown: TypeAlias = "str | int | float | Element | Node[Any] | Callable[[], Any] | Sequence[Any] | None"
"""What can be shown: a value, an element, a list of them, or a node or function whose value is one of these."""


@dataclass(frozen=True)
class Element:
    """One element. `values` are its properties, `children` the elements in it; both may hold nodes and functions."""

    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)
    children: tuple[Shown, ...] = ()


def text(*content: Shown) -> Element:
    """A paragraph."""
    return Element("text", {"text": content})


def heading(content: Shown, *, level: Literal[1, 2, 3] = 2) -> Element:
    return Element("heading", {"text": (content,), "level": level})


def pre(*content: Shown, error: bool = False) -> Element:
    """Text as it is, such as the output of a command; with `error`, shown as one."""
    return Element("pre", {"text": content, "error": error})


def table(columns: Shown, rows: Shown) -> Element:
    """A table. `columns` are its titles, `rows` lists of values."""
    return Element("table", {"columns": columns, "rows": rows})


def image(content: Shown | bytes, *, alt: str = "") -> Element:
    """A picture: the bytes of a PNG, JPEG, GIF or WebP file, such as one of `result.file_bytes`."""
    return Element("image", {"content": content, "alt": alt})


def svg(content: Shown) -> Element:
    """A drawing: the text of an SVG file. What is not known to be harmless is left out of it."""
    return Element("svg", {"content": content})


def chart(
    labels: Shown, series: Shown | Mapping[str, Sequence[float]], *, kind: Literal["line", "bar"] = "line"
) -> Element:
    """A chart. `series` has a list of numbers for each name, None for a gap; `labels` what is below each of them."""
    return Element("chart", {"labels": labels, "series": series, "kind": kind})


def loader(*nodes: Node[Any], label: Shown = None) -> Element:
    """Shown while one of these nodes is pending, with the elapsed time. Without nodes, always."""
    return Element("loader", {"label": label, "nodes": nodes})


def input(
    target: Cell[Any] | Handler[..., Any], *, label: str = "", placeholder: str = "", multiline: bool = False
) -> Element:
    """A field for text: it sets a cell, or calls a handler with what was entered, and is empty again then.

    What is entered is converted to the type that the cell has.
    """
    _require(target, Cell | Handler, "input", "a cell or a handler")
    return Element("input", {"target": target, "label": label, "placeholder": placeholder, "multiline": multiline})


def select(target: Cell[Any], options: Shown, *, label: str = "") -> Element:
    """A choice: it sets a cell to one of the options."""
    _require(target, Cell, "select", "a cell")
    return Element("select", {"target": target, "options": options, "label": label})


def button(label: str, target: Handler[..., Any], *values: Any) -> Element:
    """A button that calls a handler with `values`."""
    _require(target, Handler, "button", "a handler")
    return Element("button", {"label": label, "target": target, "values": values})


def row(*children: Shown) -> Element:
    """Elements beside each other."""
    return Element("row", {}, children)


def column(*children: Shown) -> Element:
    """Elements below each other."""
    return Element("column", {}, children)


def _require(target: object, kinds: Any, what: str, allowed: str) -> None:
    if not isinstance(target, kinds):
        raise InvalidRequest(f"{what} is for {allowed}, and not for {target!r:.60}")
