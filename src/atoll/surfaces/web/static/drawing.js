// A drawing (SVG) from the server, which has made it harmless. The only text that becomes markup on a page.
import { useLayoutEffect, useRef } from "preact/hooks";
import { html } from "atoll/markup.js";

// Named in the page's content security policy. Browsers without trusted types take the text itself.
const trusted = globalThis.trustedTypes?.createPolicy("atoll-drawing", { createHTML: (svg) => svg });

/** Parsed as XML: what it means cannot differ from what the server has looked at. */
function parse(svg) {
  const parsed = new DOMParser().parseFromString(trusted ? trusted.createHTML(svg) : svg, "image/svg+xml");
  const root = parsed.documentElement;
  return root.localName === "svg" ? document.importNode(root, true) : document.createTextNode("");
}

export function Drawing({ svg, also }) {
  const place = useRef(null);
  useLayoutEffect(() => place.current.replaceChildren(parse(svg)), [svg]);
  return html`<div class=${`drawing${also}`} ref=${place}></div>`;
}
