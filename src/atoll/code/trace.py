"""The timeline of a session: executions and the calls in them, as text and as one HTML page.

Owns how records are drawn. Not here: the records (`audit.py`). Used by `atoll trace`.

Everything in a record may come from hostile code: text is stripped of control characters, and the page escapes
everything, has no script, and forbids by its policy what it does not need.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from atoll.code.audit import AuditEntry

_BAR_COLUMNS = 32
_MAX_CALLS_DRAWN = 2000


@dataclass(frozen=True)
class _TracedCell:
    number: int
    execution: AuditEntry | None
    """None: it has not ended, or its process was killed."""
    calls: list[AuditEntry]

    @property
    def began(self) -> float:
        first = self.execution or self.calls[0]
        return min([first.time.timestamp(), *(call.time.timestamp() for call in self.calls[:1])])

    @property
    def duration_s(self) -> float:
        ends = [call.time.timestamp() + call.duration_s for call in self.calls]
        if self.execution is not None:
            ends.append(self.execution.time.timestamp() + self.execution.duration_s)
        return max(max(ends) - self.began, 1e-6)


def _cells(entries: Sequence[AuditEntry]) -> list[_TracedCell]:
    cells = []
    for number, group in groupby(sorted(entries, key=lambda entry: (entry.cell, entry.time)), lambda one: one.cell):
        of_cell = list(group)
        executions = [entry for entry in of_cell if entry.kind == "execution"]
        calls = [entry for entry in of_cell if entry.kind == "call"]
        cells.append(_TracedCell(number, executions[0] if executions else None, calls))
    return cells


def as_text(entries: Sequence[AuditEntry], *, width: int = 100) -> str:
    """The timeline for a terminal: each execution with its code, and a bar for each call."""
    lines: list[str] = []
    for cell in _cells(entries):
        verdict = "not ended" if cell.execution is None else cell.execution.verdict
        mark = "✓" if verdict == "ok" else "✗"
        lines.append(f"{mark} cell {cell.number}  {_duration(cell.duration_s)}  {_plain(verdict, width - 24)}")
        code = "" if cell.execution is None or cell.execution.code is None else cell.execution.code
        shown = code.splitlines()
        lines += [f"  │ {_plain(line, width - 4)}" for line in shown[:8]]
        if len(shown) > 8:
            lines.append(f"  │ … {len(shown) - 8} more lines")
        for call in cell.calls[:_MAX_CALLS_DRAWN]:
            lines.append(_call_line(cell, call, width))
        if len(cell.calls) > _MAX_CALLS_DRAWN:
            lines.append(f"  … {len(cell.calls) - _MAX_CALLS_DRAWN} more calls")
        if cell.execution is not None and cell.execution.output:
            printed = cell.execution.output.splitlines()
            lines += [f"  → {_plain(line, width - 4)}" for line in printed[:6]]
            if len(printed) > 6:
                lines.append(f"  → … {len(printed) - 6} more lines")
        lines.append("")
    return "\n".join(lines)


def _call_line(cell: _TracedCell, call: AuditEntry, width: int) -> str:
    start = min(max((call.time.timestamp() - cell.began) / cell.duration_s, 0.0), 1.0)
    at = int(start * (_BAR_COLUMNS - 1))
    length = min(max(1, round(call.duration_s / cell.duration_s * _BAR_COLUMNS)), _BAR_COLUMNS - at)
    bar = ("·" * at + "█" * length).ljust(_BAR_COLUMNS, "·")
    failed = "" if call.verdict == "ok" else f"  ✗ {call.verdict}"
    arguments = json.dumps(call.arguments, ensure_ascii=False) if call.arguments is not None else ""
    text = f"{call.tool}({arguments}){failed}"
    return f"  {bar} {_duration(call.duration_s):>8}  {_plain(text, width - _BAR_COLUMNS - 14)}"


def _plain(text: str, limit: int) -> str:
    """Text without what a terminal would act on."""
    clean = "".join(each if each.isprintable() else "�" for each in text.replace("\t", "    "))
    return clean if len(clean) <= limit else clean[: max(1, limit - 1)] + "…"


def _duration(seconds: float) -> str:
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


_STYLE = """
body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#1a1a1a;background:#fff}
h1{font-size:1.3rem}section{border:1px solid #d7d7d7;border-radius:6px;margin:1rem 0;padding:.8rem 1rem}
h2{font-size:1rem;margin:0 0 .5rem}h2 small{color:#555;font-weight:400;margin-left:.7rem}
pre{background:#f5f5f2;border-radius:4px;margin:.5rem 0;overflow:auto;padding:.6rem;max-height:24rem}
.call{display:grid;grid-template-columns:16rem 1fr 6rem;gap:.6rem;align-items:center;font-size:13px}
.call code{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}.call .t{text-align:right;color:#555}
.lane{background:#f0f0ec;border-radius:3px;height:.9rem;position:relative}
.bar{background:#2a6f97;border-radius:3px;height:100%;min-width:2px;position:absolute}
.failed .bar{background:#b3261e}.failed code{color:#b3261e}.bad{color:#b3261e}
@media (prefers-color-scheme:dark){body{background:#161616;color:#e8e8e8}section{border-color:#3a3a3a}
pre,.lane{background:#242424}h2 small,.call .t{color:#aaa}.bad,.failed code{color:#ff8a80}}
"""


def as_html(session_id: str, entries: Sequence[AuditEntry]) -> str:
    """The timeline as one page that needs nothing else."""
    cells = _cells(entries)
    calls = sum(len(cell.calls) for cell in cells)
    sections = "\n".join(map(_section, cells))
    name = html.escape(session_id)
    return (
        "<!doctype html>\n<html lang=en><meta charset=utf-8>\n"
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name=viewport content="width=device-width,initial-scale=1">\n'
        f"<title>Trace of {name}</title>\n<style>{_STYLE}</style>\n"
        f"<h1>Session {name}</h1>\n<p>{len(cells)} executions, {calls} calls of tools</p>\n{sections}\n</html>\n"
    )


def _section(cell: _TracedCell) -> str:
    execution = cell.execution
    verdict = "not ended" if execution is None else execution.verdict
    bad = "" if verdict == "ok" else " class=bad"
    when = cell.calls[0].time if execution is None else execution.time
    about = f"{when:%Y-%m-%d %H:%M:%S} UTC, {_duration(cell.duration_s)}, <span{bad}>{html.escape(verdict)}</span>"
    parts = [f"<section><h2>Cell {cell.number} <small>{about}</small></h2>"]
    if execution is not None and execution.code:
        parts.append(f"<pre>{html.escape(execution.code)}</pre>")
    parts += [_bar(cell, call) for call in cell.calls[:_MAX_CALLS_DRAWN]]
    if len(cell.calls) > _MAX_CALLS_DRAWN:
        parts.append(f"<p>… {len(cell.calls) - _MAX_CALLS_DRAWN} more calls</p>")
    if execution is not None and execution.output:
        parts.append(f"<pre>{html.escape(execution.output)}</pre>")
    return "\n".join([*parts, "</section>"])


def _bar(cell: _TracedCell, call: AuditEntry) -> str:
    left = min(max((call.time.timestamp() - cell.began) / cell.duration_s * 100, 0.0), 99.5)
    width = min(call.duration_s / cell.duration_s * 100, 100 - left)
    failed = "" if call.verdict == "ok" else " failed"
    arguments = "" if call.arguments is None else json.dumps(call.arguments, ensure_ascii=False)
    about = html.escape(f"{call.tool}({arguments})" + ("" if call.verdict == "ok" else f": {call.verdict}"))
    return (
        f'<div class="call{failed}"><code title="{about}">{about}</code><div class=lane>'
        f'<div class=bar style="left:{left:.2f}%;width:{width:.2f}%"></div></div>'
        f"<span class=t>{_duration(call.duration_s)}</span></div>"
    )
