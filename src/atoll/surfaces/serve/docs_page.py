"""/docs: the API as a page of our own, made from the OpenAPI document.

Owns how it looks. It loads nothing and runs no script, so its policy forbids both; all text is escaped. Used by
`app.py`.
"""

from __future__ import annotations

import json
import re
from html import escape
from typing import Any

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_STYLE = """
:root { color-scheme: light dark; --ink: #1b2a30; --soft: #5d6f76; --ground: #f4f7f7; --line: #d5dfe0; --sea: #0f7c86; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4edee; --soft: #93a6ab; --ground: #10181b; --line: #26353a; --sea: #57c3cb; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 2rem; background: var(--ground); color: var(--ink);
  font: 1rem/1.55 system-ui, sans-serif; }
h1, h2 { line-height: 1.25; } h2 { margin-top: 2.5rem; }
a { color: var(--sea); } p, dd { color: var(--soft); }
code, pre { font: .875em/1.5 ui-monospace, monospace; }
pre { overflow-x: auto; padding: .75rem; border: 1px solid var(--line); border-radius: .4rem; }
details { border: 1px solid var(--line); border-radius: .4rem; margin: .5rem 0; padding: .5rem .8rem; }
summary { cursor: pointer; overflow-wrap: anywhere; }
summary small { display: block; margin-left: 5.6rem; color: var(--soft); }
.method { display: inline-block; min-width: 4.5rem; font-weight: 600; color: var(--sea); }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; }
td, th { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-top: 1px solid var(--line); }
"""
_CODE = re.compile(r"`([^`]+)`")
_FIRST_TAG = "sandboxes"
"""Where the reader begins; the others come in the order of the document."""
_METHODS = ("get", "post", "put", "patch", "delete", "head", "options")


def render(document: dict[str, Any]) -> str:
    """The page of an OpenAPI document."""
    info = document.get("info", {})
    title = escape(f"{info.get('title', 'API')} {info.get('version', '')}")
    by_tag: dict[str, list[str]] = {}
    for path, item in document.get("paths", {}).items():
        for method in _METHODS:
            if method in item:
                operation = item[method]
                tag = next(iter(operation.get("tags", ())), "other")
                by_tag.setdefault(tag, []).append(_operation(method, path, operation))
    tags = sorted(by_tag, key=lambda tag: tag != _FIRST_TAG)
    contents = " · ".join(f'<a href="#{_anchor(tag)}">{escape(tag)}</a>' for tag in tags)
    sections = "".join(f'<h2 id="{_anchor(tag)}">{escape(tag)}</h2>{"".join(by_tag[tag])}' for tag in tags)
    schemas = "".join(
        f'<details id="schema-{escape(name)}"><summary>{escape(name)}</summary>{_json(schema)}</details>'
        for name, schema in document.get("components", {}).get("schemas", {}).items()
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>'
        f"<h1>{title}</h1><p>{_prose(info.get('description', ''))}</p>"
        f'<p>The same for programs: <a href="/openapi.json">openapi.json</a></p><p>{contents}</p>{sections}'
        f'<h2 id="schemas">Schemas</h2>{schemas}</body></html>'
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    name = escape(operation.get("operationId", ""))
    description = operation.get("description") or operation.get("summary", "")
    parts = [f"<p>{_prose(description)}</p>"]
    parameters = [each for each in operation.get("parameters", ()) if "name" in each]
    if parameters:
        rows = "".join(
            f"<tr><td><code>{escape(each['name'])}</code></td><td>{escape(each.get('in', ''))}"
            f"{', required' if each.get('required') else ''}</td><td>{_type(each.get('schema', {}))} "
            f"{_prose(each.get('description', ''))}</td></tr>"
            for each in parameters
        )
        parts.append(f"<table><tr><th>Parameter</th><th>In</th><th></th></tr>{rows}</table>")
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(f"<p>Body: <code>{escape(kind)}</code> {_type(content.get('schema', {}))}</p>")
    rows = "".join(
        f"<tr><td><code>{escape(str(status))}</code></td>"
        f"<td>{_prose(response.get('description', ''))} {_bodies(response)}</td></tr>"
        for status, response in operation.get("responses", {}).items()
    )
    parts.append(f"<table><tr><th>Status</th><th></th></tr>{rows}</table>")
    return (
        f'<details id="{name}"><summary><span class="method">{method.upper()}</span><code>{escape(path)}</code>'
        f"<small>{_prose(_first_sentence(description))}</small></summary>{''.join(parts)}</details>"
    )


def _first_sentence(text: str) -> str:
    sentence, end, _ = " ".join(text.split()).partition(". ")
    return sentence + end.strip()


def _anchor(tag: str) -> str:
    return escape(tag.replace(" ", "-"))


def _prose(text: str) -> str:
    """Escaped, with `code` set as such."""
    return _CODE.sub(r"<code>\1</code>", escape(text))


def _bodies(response: dict[str, Any]) -> str:
    return ", ".join(_type(content.get("schema", {})) for content in response.get("content", {}).values())


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#schema-{name}"><code>{name}</code></a>'
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(map(_type, schema[several]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    kind = schema.get("format") or schema.get("type") or ""
    return f"<code>{escape(str(kind))}</code>" if kind else ""


def _json(schema: Any) -> str:
    return f"<pre>{escape(json.dumps(schema, indent=2, ensure_ascii=False))}</pre>"
