// How long something has been going on: a clock that ticks only while a page shows it.
import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";

const TICK_MS = 100;
const now = signal(performance.now());
let shown = 0;
let timer = null;

export function useNow() {
  useEffect(() => {
    now.value = performance.now();
    if (shown++ === 0) timer = setInterval(() => (now.value = performance.now()), TICK_MS);
    return () => {
      if (--shown === 0) clearInterval(timer);
    };
  }, []);
  return now.value;
}

export function duration(seconds) {
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
  return elapsed(seconds);
}

export function elapsed(seconds) {
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
}
