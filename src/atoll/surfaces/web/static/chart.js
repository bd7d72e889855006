// Charts, drawn by uPlot. Loaded when a page shows the first one.
import uPlot from "uplot";
import { useEffect, useRef } from "preact/hooks";
import { html } from "atoll/markup.js";

const HEIGHT = 260;
const SERIES_COLOURS = 6;
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500];

const sheet = document.createElement("link");
sheet.rel = "stylesheet";
sheet.href = new URL("../vendor/uplot/uPlot.min.css", import.meta.url);
const styled = new Promise((resolve) => sheet.addEventListener("load", resolve));
document.head.append(sheet);
await styled;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Beside each other, where there are several series. */
function bars(number, count) {
  const width = 0.8 / count;
  return uPlot.paths.bars({
    disp: {
      x0: {
        unit: 1,
        values: (plot, _series, first, last) => plot.data[0].map((x) => x - 0.4 + number * width),
      },
      size: { unit: 1, values: (plot) => plot.data[0].map(() => width) },
    },
  });
}

function options(tree, width) {
  const isBar = tree.kind === "bar";
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
  const label = (position) => (Number.isInteger(position) ? (tree.labels[position] ?? "") : "");
  return {
    width,
    height: HEIGHT,
    scales: {
      x: { time: false, ...(isBar ? { range: (_plot, min, max) => [min - 0.5, max + 0.5] } : {}) },
      y: isBar ? { range: { min: { pad: 0.1, soft: 0, mode: 1 }, max: { pad: 0.1, soft: 0, mode: 1 } } } : {},
    },
    axes: [
      { ...axis, incrs: STEPS, grid: { show: false }, values: (_plot, splits) => splits.map(label) },
      { ...axis, size: 56 },
    ],
    series: [
      { label: "", value: (_plot, position) => (position === null ? "–" : label(position)) },
      ...tree.series.map((each, number) => {
        const stroke = colour(`--series-${(number % SERIES_COLOURS) + 1}`);
        const points = { show: tree.labels.length <= 60 && !isBar, size: 6, fill: stroke };
        const shape = isBar ? { paths: bars(number, tree.series.length), fill: stroke, width: 0 } : { width: 2 };
        return { label: each.name, stroke, points, ...shape };
      }),
    ],
    cursor: { drag: { x: false, y: false }, points: { show: !isBar } },
  };
}

function aligned(tree) {
  const most = Math.max(tree.labels.length, 1, ...tree.series.map((each) => each.values.length));
  const positions = Array.from({ length: most }, (_, position) => position);
  return [positions, ...tree.series.map((each) => positions.map((position) => each.values[position] ?? null))];
}

/** A chart in an element, as wide as that. Drawn again for other data, another width or another theme. */
export function Plot({ tree }) {
  const place = useRef(null);
  const plot = useRef(null);
  const form = JSON.stringify([tree.kind, tree.labels, tree.series.map((each) => each.name)]);
  useEffect(() => {
    const draw = () => {
      plot.current?.destroy();
      plot.current = new uPlot(options(tree, place.current.clientWidth || 300), aligned(tree), place.current);
    };
    draw();
    const resized = new ResizeObserver(() => {
      const width = place.current.clientWidth;
      if (width && plot.current.width !== width) plot.current.setSize({ width, height: HEIGHT });
    });
    resized.observe(place.current);
    const theme = matchMedia("(prefers-color-scheme: dark)");
    theme.addEventListener("change", draw);
    return () => {
      resized.disconnect();
      theme.removeEventListener("change", draw);
      plot.current?.destroy();
      plot.current = null;
    };
  }, [form]);
  useEffect(() => plot.current?.setData(aligned(tree)), [JSON.stringify(tree.series)]);
  return html`<div class="plot" aria-hidden="true" ref=${place}></div>`;
}
