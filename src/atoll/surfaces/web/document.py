"""The HTML around a page, and what a browser may do in it.

Owns the content security policy and the other headers of pages. Not here: what is in a page, and who may open one
(`web_guard.py`). Used by all pages.

The policy allows files of this server and nothing else: no script or style in the page itself (the import map is
allowed by its hash), no form that is sent, no frame, and no text that becomes markup except through the one policy for
drawings, whose source was made harmless by the server (`reactive/svg.py`).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from types import MappingProxyType

from starlette.responses import Response

from atoll.surfaces.web.assets import WebAssets

DRAWINGS = "atoll-drawing"
"""The name of the trusted types policy of `static/drawing.js`."""
SECURITY_HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
)
"""Of all answers of a server of pages."""
NOTHING_ALLOWED = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""The policy of answers that load nothing."""


def policy(import_map: str) -> str:
    """The content security policy of a page with this import map."""
    digest = base64.b64encode(hashlib.sha256(import_map.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self'; img-src 'self' data:; "
        f"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        f"require-trusted-types-for 'script'; trusted-types {DRAWINGS}"
    )


def document(
    assets: WebAssets,
    body: str,
    *,
    title: str,
    script: str,
    styles: Sequence[str] = (),
    early: Sequence[str] = (),
) -> Response:
    """A page. `body` is HTML; `script` is the asset that begins it, `early` are those that it needs at once."""
    import_map = assets.import_map()
    sheets = "".join(f'<link rel="stylesheet" href="{assets.url(name)}">' for name in ("static/theme.css", *styles))
    loads = "".join(f'<link rel="modulepreload" href="{assets.url(name)}">' for name in (script, *early))
    html = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title>"
        f'<link rel="icon" href="{assets.url("static/icon.svg")}">{sheets}'
        f'<script type="importmap">{import_map}</script>{loads}'
        f'<script type="module" src="{assets.url(script)}"></script>'
        f'</head><body data-release="{assets.release}">{body}</body></html>'
    )
    return Response(
        html.encode("utf-8", "replace"),
        headers={
            "Content-Type": "text/html; charset=utf-8",
            "Content-Security-Policy": policy(import_map),
            "Cache-Control": "no-store",
        },
    )


def plain_page(title: str, text: str, *, status: int = 200, refresh: str | None = None) -> Response:
    """A page of one paragraph, which loads nothing. `refresh`: where the browser goes at once."""
    onward = "" if refresh is None else f'<meta http-equiv="refresh" content="0; url={escape(refresh)}">'
    html = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{onward}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title></head>'
        f"<body><h1>{escape(title)}</h1><p>{escape(text)}</p></body></html>"
    )
    return Response(
        html,
        status,
        {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Security-Policy": NOTHING_ALLOWED,
            "Cache-Control": "no-store",
        },
    )
