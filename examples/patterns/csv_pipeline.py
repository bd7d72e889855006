"""A pipeline: fetch a table, analyse it, draw it. Each stage waits for the one before it, without saying so.

atoll pattern run examples/patterns/csv_pipeline.py --set csv_url=https://example.com/x.csv --allow example.com
"""

from __future__ import annotations

import json
from typing import Any

from atoll import reactive
from atoll.reactive import NAME, UI, Cell, view

ANALYSE = """\
import csv, json, sys
rows = list(csv.DictReader(sys.stdin))
cols = list(rows[0]) if rows else []
def numbers(col):
    try:
        return [float(row[col]) for row in rows]
    except ValueError:
        return None
numeric = {col: numbers(col) for col in cols}
numeric = {col: values for col, values in numeric.items() if values}
print(json.dumps({
    "count": len(rows), "cols": cols, "numeric": numeric,
    "means": {col: sum(values) / len(values) for col, values in numeric.items()},
}))
"""

CHART = """\
import json, sys
means = json.load(sys.stdin)["means"]
most = max(map(abs, means.values()), default=0) or 1
bars = []
for number, (name, mean) in enumerate(means.items()):
    name = name.replace("&", "&amp;").replace("<", "&lt;")
    y, width = 10 + number * 30, abs(mean) / most * 300
    bars.append(f'<rect x="120" y="{y}" width="{width:.1f}" height="20" style="fill: #1565c0"/>'
                f'<text x="110" y="{y + 15}" text-anchor="end">{name}</text>'
                f'<text x="{125 + width:.1f}" y="{y + 15}">{mean:g}</text>')
height = 20 + 30 * len(means)
with open("/tmp/chart.svg", "w") as file:
    file.write(f'<svg xmlns="http://www.w3.org/2000/svg" width="500" height="{height}">{"".join(bars)}</svg>')
"""


@reactive.pattern
def csv_pipeline(csv_url: Cell[str]) -> dict[str, object]:
    """How many rows and which columns a CSV file has, and the means of those that are numbers, as a chart."""
    csv = reactive.fetch_data(csv_url, "text", name="csv")
    analysis = reactive.exec('python3 -c "$PROGRAM"', stdin=csv, env={"PROGRAM": ANALYSE}, name="analysis")

    def facts() -> dict[str, Any]:
        if not analysis.result.ok:
            raise RuntimeError(analysis.result.stderr.strip())
        found: dict[str, Any] = json.loads(analysis.result.stdout)
        return found

    stats = reactive.computed(facts, name="stats")
    chart = reactive.exec(
        'python3 -c "$PROGRAM"',
        files=["/tmp/chart.svg"],
        stdin=reactive.computed(lambda: json.dumps(stats.result), name="table"),
        env={"PROGRAM": CHART},
        name="drawing",
    )
    return {
        NAME: "CSV Analyzer",
        UI: view.column(
            view.input(csv_url, label="URL"),
            view.loader(csv, label="Fetching CSV"),
            view.loader(analysis, label="Analyzing"),
            view.loader(chart, label="Charting"),
            lambda: view.table(["rows", "columns"], [[stats.result["count"], ", ".join(stats.result["cols"])]]),
            view.chart(lambda: range(1, stats.result["count"] + 1), lambda: stats.result["numeric"]),
            view.svg(lambda: chart.result.files["/tmp/chart.svg"]),
        ),
        "stats": stats,
        "chart": reactive.computed(lambda: chart.result.files["/tmp/chart.svg"]),
    }
