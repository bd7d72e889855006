"""The page that a preview shows when no server inside responds: HTML, or plain text for a client that wants no HTML.

Owns how it looks. Not here: when it is shown (`router.py`). It loads nothing, and all text is escaped.
"""

from __future__ import annotations

import html as markup

from atoll.runtime.previews.proxy import PreviewResponse

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark;
  --ink: #1b2a30; --soft: #5d6f76; --ground: #f4f7f7; --line: #d5dfe0; --sea: #0f7c86; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e4edee; --soft: #93a6ab; --ground: #10181b; --line: #26353a; --sea: #57c3cb; }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; min-height: 100vh; display: grid; place-items: center; padding: 2rem; background: var(--ground);
  color: var(--ink); font: 1rem/1.55 system-ui, sans-serif; }}
main {{ max-width: 34rem; width: 100%; }}
svg {{ display: block; margin-bottom: 1.5rem; color: var(--sea); }}
h1 {{ margin: 0 0 .6rem; font-size: 1.45rem; line-height: 1.25; font-weight: 600; text-wrap: balance; }}
p {{ margin: 0; color: var(--soft); overflow-wrap: anywhere; }}
footer {{ display: flex; justify-content: space-between; gap: 1rem; margin-top: 1.75rem; padding-top: .9rem;
  border-top: 1px solid var(--line); color: var(--soft); font-size: .85rem; }}
a {{ color: var(--sea); text-underline-offset: .2em; }}
</style>
</head>
<body>
<main>
<svg width="44" height="44" viewBox="0 0 44 44" fill="none" stroke="currentColor" stroke-width="4"
  stroke-linecap="round" aria-hidden="true"><circle cx="22" cy="22" r="17" stroke-dasharray="19 9 30 8 24 17"/></svg>
<h1>{title}</h1>
<p>{text}</p>
<footer><span>Atoll · {status}</span>{again}</footer>
</main>
</body>
</html>
"""
_AGAIN = '<a href="">Try again</a>'


def page(status: int, title: str, text: str, *, html: bool) -> PreviewResponse:
    """A page as a response that is not cached, runs no scripts and is not sniffed as another type."""
    if html:
        again = _AGAIN if status >= 500 else ""
        body = _PAGE.format(title=markup.escape(title), text=markup.escape(text), status=status, again=again)
        kind = b"text/html; charset=utf-8"
    else:
        body, kind = f"{title}. {text}\n", b"text/plain; charset=utf-8"
    headers = [
        (b"Content-Type", kind),
        (b"Cache-Control", b"no-store"),
        (b"Content-Security-Policy", b"default-src 'none'; style-src 'unsafe-inline'"),
        (b"Referrer-Policy", b"no-referrer"),
        (b"X-Content-Type-Options", b"nosniff"),
    ]
    return PreviewResponse(status, headers, body.encode("utf-8", "replace"))
