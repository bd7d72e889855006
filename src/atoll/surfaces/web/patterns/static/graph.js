// The graph of a pattern: its nodes, what each reads, and how each is doing. Loaded when it is opened.
import { Graph as Layout, layout } from "@dagrejs/dagre";
import { useMemo } from "preact/hooks";
import { state } from "atoll/connection.js";
import { duration, elapsed, useNow } from "atoll/elapsed.js";
import { html } from "atoll/markup.js";
import { Table } from "./elements.js";

const HEIGHT = 46;
const BESIDE_PX = 60; // of the window, what is beside the drawing
const PAGE_PX = 832;
const NAME_PX = 7.6;
const LONGEST_NAME = 28;

const shortened = (name) => (name.length > LONGEST_NAME ? `${name.slice(0, LONGEST_NAME - 1)}…` : name);

/** From left to right, or from top to bottom where that is too wide. */
function place(nodes) {
  const beside = arranged(nodes, "LR");
  return beside.width <= Math.min(innerWidth, PAGE_PX) - BESIDE_PX ? beside : arranged(nodes, "TB");
}

function arranged(nodes, direction) {
  const made = new Layout();
  made.setGraph({ rankdir: direction, nodesep: 18, ranksep: 44, marginx: 16, marginy: 16 });
  made.setDefaultEdgeLabel(() => ({}));
  const known = new Set(nodes.map((node) => node.id));
  for (const node of nodes) {
    const width = Math.max(shortened(node.name).length * NAME_PX + 28, 164);
    made.setNode(String(node.id), { width, height: HEIGHT });
  }
  for (const node of nodes) {
    for (const read of node.inputs) if (known.has(read)) made.setEdge(String(read), String(node.id));
  }
  layout(made);
  return {
    width: made.graph().width || 0,
    height: made.graph().height || 0,
    places: new Map(nodes.map((node) => [node.id, made.node(String(node.id))])),
    edges: made.edges().map((edge) => ({ key: `${edge.v}-${edge.w}`, points: made.edge(edge).points })),
  };
}

function path(points) {
  const [first, ...rest] = points;
  let drawn = `M${first.x},${first.y}`;
  for (let at = 0; at < rest.length - 1; at += 1) {
    const [control, next] = [rest[at], rest[at + 1]];
    const end = at === rest.length - 2 ? next : { x: (control.x + next.x) / 2, y: (control.y + next.y) / 2 };
    drawn += `Q${control.x},${control.y} ${end.x},${end.y}`;
  }
  return rest.length === 1 ? `${drawn}L${rest[0].x},${rest[0].y}` : drawn;
}

function facts(node, since) {
  const runs = node.kind === "cell" ? [] : [`${node.runs} ${node.runs === 1 ? "run" : "runs"}`];
  const pending = node.status === "running" && node.running_s !== null;
  if (pending) runs.push(elapsed(node.running_s + since));
  else if (node.duration_s !== null) runs.push(duration(node.duration_s));
  return [node.kind === "cell" ? "cell" : node.status, ...runs].join(" · ");
}

function NodeShape({ node, at, since }) {
  return html`<g class=${`node ${node.status}`} transform=${`translate(${at.x - at.width / 2},${at.y - HEIGHT / 2})`}>
    <title>${`${node.kind} ${node.name}${node.error ? `: ${node.error}` : ""}`}</title>
    <rect width=${at.width} height=${HEIGHT} rx="8" />
    <text class="name" x="14" y="19">${shortened(node.name)}</text>
    <text class="facts" x="14" y="36">${facts(node, since)}</text>
  </g>`;
}

export function Graph({ nodes, more }) {
  const now = useNow();
  const since = Math.max((now - state.value.at) / 1000, 0);
  const shape = JSON.stringify(nodes.map((node) => [node.id, node.name, node.inputs]));
  const { width, height, places, edges } = useMemo(() => place(nodes), [shape]);
  const names = new Map(nodes.map((node) => [node.id, node.name]));
  const rows = nodes.map((node) => [
    node.name,
    node.kind,
    node.status,
    node.runs,
    node.duration_s === null ? "" : duration(node.duration_s),
    node.inputs.map((each) => names.get(each) ?? `#${each}`).join(", "),
  ]);
  return html`
    <h2>Graph</h2>
    <div class="paper" tabindex="0" role="region" aria-label="drawing of the graph">
      <svg width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`} role="img"
        aria-label=${`${nodes.length} nodes; the table below has them all`}>
        <defs>
          <marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
            <path class="arrow" d="M0,0L8,4L0,8z" />
          </marker>
        </defs>
        ${edges.map((edge) => html`<path key=${edge.key} class="edge" d=${path(edge.points)} marker-end="url(#arrow)" />`)}
        ${nodes.map((node) => html`<${NodeShape} key=${node.id} node=${node} at=${places.get(node.id)} since=${since} />`)}
      </svg>
    </div>
    ${more ? html`<p class="notice">${`${more} more nodes are not drawn.`}</p>` : null}
    <details>
      <summary>The same as a table</summary>
      <${Table} label="nodes of the graph" columns=${["Name", "Kind", "State", "Runs", "Last run", "Reads"]} rows=${rows} />
    </details>
  `;
}
