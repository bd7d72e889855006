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
    columns = min(_BAR_COLUMNS, max(8, width // 4))
    start = min(max((call.time.timestamp() - cell.began) / cell.duration_s, 0.0), 1.0)
    at = int(start * (columns - 1))
    length = min(max(1, round(call.duration_s / cell.duration_s * columns)), columns - at)
    bar = ("·" * at + "█" * length).ljust(columns, "·")
    about = _called(call) if call.verdict == "ok" else f"✗ {call.tool}: {call.verdict}  {_called(call)}"
    return f"  {bar} {_duration(call.duration_s):>8}  {_plain(about, width - columns - 13)}"


def _called(call: AuditEntry) -> str:
    """A call as code would write it."""
    if not isinstance(call.arguments, dict):
        return f"{call.tool}({'' if call.arguments is None else call.arguments})"
    given = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.arguments.items())
    return f"{call.tool}({', '.join(given)})"


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
h1{font-size:1.3rem;margin-bottom:0}h1+p{margin-top:.2rem;color:#555}
section{border:1px solid #d7d7d7;border-radius:6px;margin:1rem 0;padding:.8rem 1rem}
h2{font-size:1rem;margin:0 0 .5rem}h2 small{color:#555;font-weight:400;margin-left:.7rem}
pre{background:#f5f5f2;border-radius:4px;margin:.5rem 0;overflow:auto;padding:.6rem;max-height:24rem;
white-space:pre-wrap;overflow-wrap:anywhere}
pre.out{background:none;border-left:3px solid #d7d7d7;border-radius:0;color:#444;padding:.2rem .6rem}
.call{display:grid;grid-template-columns:minmax(12rem,24rem) 1fr 5rem;gap:0 .6rem;align-items:center;font-size:13px}
.call code{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}.call .t{text-align:right;color:#555}
.call .why{grid-column:1/-1;overflow-wrap:anywhere;padding-left:1rem}
.lane{background:#f0f0ec;border-radius:3px;height:.9rem;position:relative}
.bar{background:#2a6f97;border-radius:3px;height:100%;min-width:2px;position:absolute}
.failed .bar{background:#b3261e}.failed code,.bad{color:#b3261e}
@media (max-width:40rem){.call{grid-template-columns:1fr 5rem;margin-bottom:.3rem}.call code{grid-column:1/-1}}
@media (prefers-color-scheme:dark){body{background:#161616;color:#e8e8e8}section,pre.out{border-color:#3a3a3a}
pre,.lane{background:#242424}pre.out{background:none;color:#bbb}h2 small,.call .t,h1+p{color:#aaa}
.bad,.failed code{color:#ff8a80}.bar{background:#5fa8d3}.failed .bar{background:#e5736b}}
"""


def as_html(session_id: str, entries: Sequence[AuditEntry]) -> str:
    """The timeline as one page that needs nothing else."""
    cells = _cells(entries)
    calls = sum(len(cell.calls) for cell in cells)
    sections = "\n".join(map(_section, cells))
    name = html.escape(session_id)
    when = f", from {entries[0].time:%Y-%m-%d %H:%M:%S} to {entries[-1].time:%Y-%m-%d %H:%M:%S} UTC" if entries else ""
    about = f"{_counted(len(cells), 'execution')}, {_counted(calls, 'call')} of tools{when}"
    return (
        "<!doctype html>\n<html lang=en><meta charset=utf-8>\n"
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name=viewport content="width=device-width,initial-scale=1">\n'
        f"<title>Trace of {name}</title>\n<style>{_STYLE}</style>\n"
        f"<h1>Session {name}</h1>\n<p>{about}</p>\n{sections}\n</html>\n"
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _section(cell: _TracedCell) -> str:
    execution = cell.execution
    verdict = "not ended" if execution is None else execution.verdict
    bad = "" if verdict == "ok" else " class=bad"
    when = cell.calls[0].time if execution is None else execution.time
    about = f"{when:%H:%M:%S}, {_duration(cell.duration_s)}, <span{bad}>{html.escape(verdict)}</span>"
    parts = [f"<section><h2>Cell {cell.number} <small>{about}</small></h2>"]
    if execution is not None and execution.code:
        parts.append(f"<pre>{html.escape(execution.code)}</pre>")
    parts += [_bar(cell, call) for call in cell.calls[:_MAX_CALLS_DRAWN]]
    if len(cell.calls) > _MAX_CALLS_DRAWN:
        parts.append(f"<p>… {len(cell.calls) - _MAX_CALLS_DRAWN} more calls</p>")
    if execution is not None and execution.output:
        parts.append(f"<pre class=out>{html.escape(execution.output)}</pre>")
    return "\n".join([*parts, "</section>"])


def _bar(cell: _TracedCell, call: AuditEntry) -> str:
    left = min(max((call.time.timestamp() - cell.began) / cell.duration_s * 100, 0.0), 99.5)
    width = min(call.duration_s / cell.duration_s * 100, 100 - left)
    ok = call.verdict == "ok"
    about = html.escape(_called(call))
    size = "" if call.result_bytes is None or not ok else f", {call.result_bytes} bytes"
    return (
        f'<div class="call{"" if ok else " failed"}"><code title="{about}{size}">{about}</code><div class=lane>'
        f'<div class=bar style="left:{left:.2f}%;width:{width:.2f}%"></div></div>'
        f"<span class=t>{_duration(call.duration_s)}</span>"
        + ("" if ok else f'<span class="why bad">{html.escape(call.verdict)}</span>')
        + "</div>"
    )
