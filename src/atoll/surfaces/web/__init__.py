"""The web: pages of Atoll for people, and what they share.

| module | owns |
|---|---|
| `assets.py` | files that pages load: their addresses, caching, compression, the import map |
| `document.py` | the HTML around a page, and what a browser may do in it (its content security policy) |
| `web_guard.py` | who may open a page: host, origin, and a token that becomes a cookie |
| `live.py` | a state that watchers follow over server-sent events: the newest one wins |
| `static/` | scripts and styles of all pages: the theme, the live channel, charts |
| `vendor/` | upstream's own files, with licences, versions and hashes in `manifest.json` |
| `patterns/` | the page of `atoll pattern serve` |

There is no bundler: browsers load these files as native modules. Why: docs/design/0031-web.md.
"""
