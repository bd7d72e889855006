// Fields and buttons: what is typed here, and how it gets to the server.
//
// What a person types belongs to them until the server has it: a draft. It is what the field shows, whatever states come
// meanwhile. When the server has it and the person has left the field, the field shows the server's value again, which
// may be written differently. While they are in it, only a change by another person replaces what they typed.
import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { act, connection, reached, state } from "atoll/connection.js";
import { html } from "atoll/markup.js";

const PAUSE_MS = 450; // in typing, after which what is there is sent
const drafts = new Map();

class Draft {
  constructor(id) {
    this.id = id;
    this.text = signal(null); // null: the field shows the server's value
    this.error = signal(null);
    this.sending = signal(false);
    this.unsent = false;
    this.again = false;
    this.timer = null;
    this.version = null; // of the state that has what was sent
    this.settled = null; // the server's value for what was sent
    this.value = null; // the server's value, as it was shown last
    this.shown = undefined; // the version of the state that it is of
  }

  /** Take what was typed, and send it after a pause. */
  type(text) {
    this.text.value = text;
    this.unsent = true;
    this.settled = null;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.send(), PAUSE_MS);
  }

  /** Send what is there now. One request at a time, so that the newest is the last. */
  async send() {
    clearTimeout(this.timer);
    if (!this.unsent) return;
    this.unsent = false;
    if (this.sending.value) {
      this.again = true;
      return;
    }
    this.sending.value = true;
    do {
      this.again = false;
      try {
        this.version = await act(this.id, this.text.peek());
        this.error.value = null;
      } catch (error) {
        this.error.value = error.message;
        this.version = null;
      }
    } while (this.again);
    this.sending.value = false;
    this.settle();
  }

  /** Note the server's value. */
  see(value, version) {
    this.value = value;
    this.shown = version;
    this.settle();
  }

  /** Give the field back to the server, if it has what was typed. */
  settle() {
    if (this.text.peek() === null || this.unsent || this.sending.peek() || this.error.peek() !== null) return;
    if (this.version === null || !reached(this.version, this.shown)) return;
    const focused = document.activeElement?.id === this.id;
    if (!focused || this.value === this.text.peek()) this.text.value = null;
    else if (this.settled === null) this.settled = this.value;
    else if (this.settled !== this.value) this.text.value = null;
  }
}

function draftOf(id) {
  if (!drafts.has(id)) drafts.set(id, new Draft(id));
  return drafts.get(id);
}

/** What a person has typed before the script ran. */
export function adopt(root) {
  for (const field of root.querySelectorAll("input[id], textarea[id]")) {
    if (field.value !== field.defaultValue) draftOf(field.id).type(field.value);
  }
}

function Complaint({ id, text }) {
  return text ? html`<p class="complaint" id=${`${id}-error`} role="alert">${text}</p>` : null;
}

export function Field({ tree }) {
  return tree.submits ? html`<${SubmitField} tree=${tree} />` : html`<${CellField} tree=${tree} />`;
}

function named(tree, error) {
  return {
    id: tree.id,
    "aria-label": tree.label ? undefined : tree.placeholder || "input",
    "aria-invalid": error ? "true" : undefined,
    "aria-describedby": error ? `${tree.id}-error` : undefined,
    placeholder: tree.placeholder,
    autocomplete: "off",
    autocapitalize: "off",
    spellcheck: false,
  };
}

function Label({ tree }) {
  return tree.label ? html`<label for=${tree.id}>${tree.label}</label>` : null;
}

/** A field that sets a cell. */
function CellField({ tree }) {
  const draft = draftOf(tree.id);
  const { id } = state.value ?? {};
  const isLive = connection.value === "live";
  useEffect(() => draft.see(tree.value, id), [id, tree.value]);
  useEffect(() => {
    if (isLive && draft.error.peek() !== null && draft.version === null && draft.text.peek() !== null) {
      draft.unsent = true; // it may not have been sent, as there was no connection
      draft.send();
    }
  }, [isLive]);
  const error = draft.error.value;
  const given = {
    ...named(tree, error),
    value: draft.text.value ?? tree.value,
    onInput: (event) => (event.isComposing ? (draft.text.value = event.target.value) : draft.type(event.target.value)),
    onCompositionEnd: (event) => draft.type(event.target.value),
    onBlur: () => {
      draft.send();
      draft.settle();
    },
    onKeyDown: (event) => {
      if (event.key === "Enter" && !event.isComposing && (!tree.multiline || event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        draft.send();
      }
    },
  };
  return html`<div class="field">
    <${Label} tree=${tree} />
    ${tree.multiline ? html`<textarea rows="8" ...${given}></textarea>` : html`<input type="text" ...${given} />`}
    <${Complaint} id=${tree.id} text=${error} />
  </div>`;
}

/** A field that calls a handler with what was entered, and is empty then. */
function SubmitField({ tree }) {
  const draft = draftOf(tree.id);
  const text = draft.text.value ?? "";
  async function submit(event) {
    event.preventDefault();
    const sent = draft.text.peek() ?? "";
    if (draft.sending.peek()) return;
    draft.sending.value = true;
    try {
      await act(tree.id, sent);
      draft.error.value = null;
      if (draft.text.peek() === sent) draft.text.value = null;
    } catch (error) {
      draft.error.value = error.message;
    }
    draft.sending.value = false;
  }
  const error = draft.error.value ?? tree.error;
  const given = {
    ...named(tree, error),
    value: text,
    onInput: (event) => (draft.text.value = event.target.value),
    onKeyDown: (event) => {
      if (tree.multiline && event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit(event);
    },
  };
  return html`<div class="field">
    <${Label} tree=${tree} />
    <form onSubmit=${submit}>
      ${tree.multiline ? html`<textarea rows="4" ...${given}></textarea>` : html`<input type="text" ...${given} />`}
      <button type="submit">Enter</button>
    </form>
    <${Complaint} id=${tree.id} text=${error} />
  </div>`;
}

export function Select({ tree }) {
  const draft = draftOf(tree.id);
  const { id } = state.value ?? {};
  useEffect(() => {
    if (draft.version !== null && reached(draft.version)) draft.text.value = null;
  }, [id]);
  async function choose(event) {
    const chosen = event.target.value;
    draft.text.value = chosen;
    draft.version = null;
    try {
      draft.version = await act(tree.id, chosen);
      draft.error.value = null;
      if (reached(draft.version)) draft.text.value = null;
    } catch (error) {
      draft.error.value = error.message;
      draft.text.value = null;
    }
  }
  const shown = draft.text.value ?? tree.value;
  const known = tree.options.includes(shown) ? tree.options : [shown, ...tree.options];
  return html`<div class="field">
    <${Label} tree=${tree} />
    <select id=${tree.id} aria-label=${tree.label ? undefined : "choice"} value=${shown} onChange=${choose}>
      ${known.map((each) => html`<option key=${each} value=${each} selected=${each === shown}>${each}</option>`)}
    </select>
    <${Complaint} id=${tree.id} text=${draft.error.value} />
  </div>`;
}

export function Button({ tree }) {
  const draft = draftOf(tree.id);
  const button = useRef(null);
  async function press() {
    draft.sending.value = true;
    try {
      await act(tree.id);
      draft.error.value = null;
    } catch (error) {
      draft.error.value = error.message;
    }
    draft.sending.value = false;
  }
  const busy = tree.pending || draft.sending.value;
  return html`<div class="field">
    <button type="button" id=${tree.id} ref=${button} aria-busy=${busy ? "true" : undefined} onClick=${press}>
      ${tree.label}${tree.pending ? "…" : ""}
    </button>
    <${Complaint} id=${tree.id} text=${draft.error.value ?? tree.error} />
  </div>`;
}
