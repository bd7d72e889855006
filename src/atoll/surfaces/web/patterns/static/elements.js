// The elements of a view, from its tree (`reactive/rendering.py` describes it). All text is text: preact makes no markup
// of it. `view_html.py` makes the same elements on the server.
import { signal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import { state } from "atoll/connection.js";
import { Drawing } from "atoll/drawing.js";
import { elapsed, useNow } from "atoll/elapsed.js";
import { html } from "atoll/markup.js";
import { Button, Field, Select } from "./fields.js";

const plot = signal(null); // what draws charts, once there is one
let wanted = false;

/** Children, with what is out of date beside what is not: so an element stays itself when it gets so. */
function* flat(trees, stale) {
  for (const tree of trees) {
    if (tree.type === "stale") {
      yield* flat(tree.children, true);
      yield { type: "loader", label: "", elapsed_s: tree.elapsed_s, implied: true };
    } else {
      yield { ...tree, stale };
    }
  }
}

/** Elements beside or below each other. One failure reaches many of them, and is shown once; what waits has no loader
 * of its own where there is one for it. */
export function Elements({ trees, stale = false }) {
  const all = [...flat(trees, stale)];
  const hasLoader = all.some((tree) => tree.type === "loader" && !tree.implied);
  const failures = new Set();
  const counts = {};
  const shown = all.filter((tree) => {
    if (tree.type === "loader") return !(tree.implied && hasLoader);
    if (tree.type !== "error") return true;
    const isNew = !failures.has(tree.text);
    failures.add(tree.text);
    return isNew;
  });
  return shown.map((tree) => {
    const number = (counts[tree.type] = (counts[tree.type] ?? 0) + 1);
    return html`<${Shown} key=${tree.id ?? `${tree.type}.${number}`} tree=${tree} />`;
  });
}

function Shown({ tree }) {
  const also = tree.stale ? " stale" : "";
  switch (tree.type) {
    case "row":
    case "column":
      return html`<div class=${tree.type}><${Elements} trees=${tree.children} stale=${tree.stale} /></div>`;
    case "text":
      return html`<p class=${`text${also}`}>${tree.text}</p>`;
    case "heading":
      return html`<${`h${tree.level + 1}`} class=${`heading${also}`}>${tree.text}<//>`;
    case "pre":
      return html`<${Output} tree=${tree} also=${also} />`;
    case "table":
      return html`<${Table} columns=${tree.columns} rows=${tree.rows} also=${also} />`;
    case "image":
      return html`<img class=${`picture${also}`} src=${tree.url} alt=${tree.alt} />`;
    case "svg":
      return html`<${Drawing} svg=${tree.svg} also=${also} />`;
    case "chart":
      return html`<${Chart} tree=${tree} also=${also} />`;
    case "loader":
      return html`<${Loader} tree=${tree} />`;
    case "error":
      return html`<div class="failure" role="alert">${tree.text}</div>`;
    case "input":
      return html`<${Field} tree=${tree} />`;
    case "select":
      return html`<${Select} tree=${tree} />`;
    case "button":
      return html`<${Button} tree=${tree} />`;
    default:
      return null;
  }
}

/** The output of a command: who has scrolled to its end stays there while it grows. */
function Output({ tree, also }) {
  const place = useRef(null);
  const atEnd = useRef(true);
  useLayoutEffect(() => {
    if (atEnd.current) place.current.scrollTop = place.current.scrollHeight;
  }, [tree.text]);
  const scrolled = ({ target }) => {
    atEnd.current = target.scrollTop + target.clientHeight >= target.scrollHeight - 4;
  };
  const kind = `output${tree.error ? " failed" : ""}${also}`;
  return html`<pre class=${kind} tabindex="0" ref=${place} onScroll=${scrolled}>${tree.text}</pre>`;
}

export function Table({ columns, rows, also = "", label = "table" }) {
  return html`<div class=${`scroll${also}`} role="region" tabindex="0" aria-label=${label}>
    <table>
      <thead>
        <tr>
          ${columns.map((each) => html`<th scope="col">${each}</th>`)}
        </tr>
      </thead>
      <tbody>
        ${rows.map((row) => html`<tr>${row.map((each) => html`<td>${each}</td>`)}</tr>`)}
      </tbody>
    </table>
  </div>`;
}

function Loader({ tree }) {
  const now = useNow();
  const since = (now - (state.value?.at ?? now)) / 1000;
  const time = tree.elapsed_s === null ? null : elapsed(Math.max(tree.elapsed_s + since, 0));
  return html`<p class="loader">
    <span class="spinner" aria-hidden="true"></span><span>${tree.label}</span>
    ${time && html`<span class="elapsed">${time}</span>`}
  </p>`;
}

/** A chart, and its values as a table. What draws it is loaded when it is first needed. */
function Chart({ tree, also }) {
  if (!wanted) {
    wanted = true;
    import("atoll/chart.js").then((loaded) => (plot.value = loaded.Plot));
  }
  const names = tree.series.map((each) => each.name);
  const most = Math.max(tree.labels.length, ...tree.series.map((each) => each.values.length), 0);
  const rows = Array.from({ length: most }, (_, at) => [
    tree.labels[at] ?? "",
    ...tree.series.map((each) => each.values[at] ?? ""),
  ]);
  return html`<figure class=${`chart${also}`} role="group" aria-label=${`chart of ${names.join(", ")}`}>
    ${plot.value ? html`<${plot.value} tree=${tree} />` : html`<div class="plot"></div>`}
    <details>
      <summary>Values</summary>
      <${Table} columns=${["", ...names]} rows=${rows} label="values of the chart" />
    </details>
  </figure>`;
}
