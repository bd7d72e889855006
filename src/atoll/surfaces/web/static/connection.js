// The state of a page, which follows that of its server; and what the page sends.
//
// Owns connecting, connecting again, and when a page is too old for its server. `state` is what the server last said,
// with `id` (its version) and `at` (when it came). `connection` is "connecting", "live", "lost" or "paused".
import { signal } from "@preact/signals";

const FIRST_DELAY_MS = 500;
const LONGEST_DELAY_MS = 8000;
const RELOADED = "atoll-reloaded-for";

export const state = signal(null);
export const connection = signal("connecting");

/** Follow the state at this address for as long as the page is shown. */
export function follow(url) {
  let source = null;
  let timer = null;
  let delay = FIRST_DELAY_MS;

  function close() {
    clearTimeout(timer);
    source?.close();
    source = null;
  }

  function open() {
    close();
    const opened = (source = new EventSource(url));
    opened.addEventListener("open", () => {
      delay = FIRST_DELAY_MS;
      connection.value = "live";
    });
    opened.addEventListener("state", (event) => {
      const next = JSON.parse(event.data);
      if (next.release !== document.body.dataset.release && sessionStorage.getItem(RELOADED) !== next.release) {
        sessionStorage.setItem(RELOADED, next.release); // once: a cache in between may have kept the old page
        location.reload();
        return;
      }
      state.value = { ...next, id: event.lastEventId, at: performance.now() };
    });
    opened.addEventListener("error", () => {
      if (source !== opened) return;
      connection.value = "lost";
      if (opened.readyState === EventSource.CLOSED) {
        // The server answered, but not with events: browsers give up then.
        timer = setTimeout(open, delay);
        delay = Math.min(2 * delay, LONGEST_DELAY_MS);
      }
    });
  }

  // A browser has few connections to a server: pages that are not shown give theirs back.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      close();
      connection.value = "paused";
    } else if (source === null) {
      connection.value = "connecting";
      open();
    }
  });
  open();
}

/** Do what a field or a button does. Returns the version of the state that has it done. */
export async function act(id, value = null) {
  let answer;
  try {
    answer = await fetch("./actions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ id, value }),
    });
  } catch {
    throw new Error("the server cannot be reached; this was not sent");
  }
  const said = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(said.message ?? `the server answered with status ${answer.status}`);
  return said.state;
}

/** Whether a version of the state, by default the present one, has what that other version has. */
export function reached(version, shown = state.peek()?.id) {
  const [server, number] = version.split("-");
  const [present, latest] = (shown ?? "-0").split("-");
  return server !== present || Number(latest) >= Number(number);
}
