"""A graph as a drawing: its nodes, what each reads, and how each is doing; as text and as SVG.

Owns where nodes stand and how they look. Not here: what is known of a node (`nodes.py`, `NodeInfo`). Used by
`atoll pattern graph`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

from atoll.reactive.nodes import Node, NodeInfo

_WIDTH, _HEIGHT = 190, 44
_GAP_X, _GAP_Y = 60, 18
_MARGIN = 16
_COLOURS = {
    "done": "#2e7d32",
    "failed": "#c62828",
    "running": "#1565c0",
    "queued": "#6a1b9a",
    "waiting": "#616161",
    "disposed": "#9e9e9e",
}


def graph_text(nodes: Iterable[Node[object]]) -> str:
    """A line for each node, those that others read before them: name, kind, state, runs, duration, what it reads."""
    infos, _ = _ordered(nodes)
    names = {info.id: info.name for info in infos}
    rows = [("NAME", "KIND", "STATE", "RUNS", "LAST RUN", "READS")]
    rows += [
        (
            info.name,
            info.kind,
            info.status,
            str(info.runs),
            duration(info),
            ", ".join(names.get(each, f"#{each}") for each in info.inputs),
        )
        for info in infos
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def duration(info: NodeInfo) -> str:
    """How long the last run of a node took, for people."""
    seconds = info.duration_s
    if seconds is None:
        return ""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def graph_svg(nodes: Iterable[Node[object]]) -> str:
    """A drawing of the graph: nodes from left to right, each to the right of all that it reads."""
    infos, columns = _ordered(nodes)
    places: dict[int, tuple[int, int]] = {}
    for number, column in enumerate(columns):
        for line, info in enumerate(column):
            places[info.id] = (_MARGIN + number * (_WIDTH + _GAP_X), _MARGIN + line * (_HEIGHT + _GAP_Y))
    width = 2 * _MARGIN + max(len(columns), 1) * (_WIDTH + _GAP_X) - _GAP_X
    height = 2 * _MARGIN + max(map(len, columns), default=1) * (_HEIGHT + _GAP_Y) - _GAP_Y
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for info in infos:
        x, y = places[info.id]
        for each in info.inputs:
            if each in places:
                left, top = places[each]
                begin, middle, end = left + _WIDTH, (left + _WIDTH + x) // 2, y + _HEIGHT // 2
                start = top + _HEIGHT // 2
                parts.append(
                    f'<path d="M{begin} {start}C{middle} {start} {middle} {end} {x} {end}" fill="none" '
                    'stroke="#9e9e9e" stroke-width="1.5"/>'
                )
    for info in infos:
        x, y = places[info.id]
        facts = f"{info.status} · {info.runs} runs" + (f" · {duration(info)}" if info.duration_s is not None else "")
        parts.append(
            f'<g><rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="#fafafa" '
            f'stroke="{_COLOURS[info.status]}" stroke-width="2"/>'
            f'<text x="{x + 10}" y="{y + 18}" fill="#212121">{_escaped(info.name)}</text>'
            f'<text x="{x + 10}" y="{y + 35}" fill="{_COLOURS[info.status]}" font-size="10">{_escaped(facts)}</text>'
            f"<title>{_escaped(f'{info.kind} {info.name}')}{_escaped(f': {info.error}') if info.error else ''}</title>"
            "</g>"
        )
    return "".join([*parts, "</svg>"])


def _escaped(text: str) -> str:
    shown = text if len(text) <= 200 else f"{text[:200]}…"
    return escape("".join(each for each in shown if each.isprintable()))


def _ordered(nodes: Iterable[Node[object]]) -> tuple[list[NodeInfo], Sequence[list[NodeInfo]]]:
    """All nodes in an order in which each comes after those that it reads, and the same in columns."""
    columns: defaultdict[int, list[NodeInfo]] = defaultdict(list)
    for node in nodes:
        columns[node.height].append(node.info())
    ordered = [columns[height] for height in sorted(columns)]
    return [info for column in ordered for info in column], ordered
