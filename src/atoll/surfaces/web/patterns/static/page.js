// The page of a pattern: its title, how it is doing, its view, and its graph on request.
import { signal } from "@preact/signals";
import { render } from "preact";
import { connection, follow, state } from "atoll/connection.js";
import { html } from "atoll/markup.js";
import { Elements } from "./elements.js";
import { adopt } from "./fields.js";

const graph = signal(null); // what draws the graph, once it was asked for
const isOpen = signal(false);
const about = document.querySelector(".titles p")?.textContent;
const CONNECTIONS = { connecting: "Connecting…", lost: "Connection lost; trying again…", paused: "Paused" };

async function toggle() {
  isOpen.value = !isOpen.value;
  if (isOpen.value && graph.value === null) graph.value = (await import("./graph.js")).Graph;
}

function Status() {
  const { nodes } = state.value;
  const count = (...kinds) => nodes.filter((node) => kinds.includes(node.status)).length;
  let [kind, text] = ["done", "Up to date"];
  if (connection.value !== "live") [kind, text] = ["lost", CONNECTIONS[connection.value]];
  else if (count("running", "queued")) [kind, text] = ["busy", "Running"];
  else if (count("failed")) [kind, text] = ["failed", "Failed"];
  return html`<span class=${`status ${kind}`} role="status">${text}</span>`;
}

function Page() {
  const { title, view, nodes, more_nodes } = state.value;
  const Graph = graph.value;
  return html`
    <header class="masthead">
      <div class="titles">
        <h1>${title}</h1>
        ${about && html`<p>${about}</p>`}
      </div>
      <div class="tools">
        <${Status} />
        <button type="button" class="quiet" aria-expanded=${isOpen.value ? "true" : "false"} aria-controls="graph"
          onClick=${toggle}>Graph</button>
      </div>
    </header>
    <main class="view"><${Elements} trees=${view.type === "column" ? view.children : [view]} /></main>
    <section id="graph" class="graph" aria-label="graph" hidden=${!isOpen.value}>
      ${isOpen.value && Graph && html`<${Graph} nodes=${nodes} more=${more_nodes} />`}
    </section>
  `;
}

const root = document.getElementById("app");
const stop = state.subscribe((first) => {
  if (first === null) return;
  queueMicrotask(() => stop());
  // What the server has drawn is replaced in one step; a person who is in a field already stays there.
  const field = document.activeElement;
  const at = field?.id && root.contains(field) ? [field.id, field.selectionStart, field.selectionEnd] : null;
  adopt(root);
  root.replaceChildren();
  render(html`<${Page} />`, root);
  if (at) {
    const same = document.getElementById(at[0]);
    same?.focus();
    if (typeof at[1] === "number") same?.setSelectionRange?.(at[1], at[2]);
  }
});
state.subscribe((now) => {
  if (now !== null) document.title = now.title;
});
follow("./events");
