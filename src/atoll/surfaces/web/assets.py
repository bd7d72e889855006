"""Files that pages load: scripts, styles and icons, of Atoll and of the projects in `vendor/`.

Owns which files there are, their addresses, how long browsers keep them, compression, and the import map. All are read
when a server starts, and nothing else is ever read: an address is looked up in a table, not in a directory. Used by
`document.py` and the pages.

The address of a file has the digest of all of them in it. So a browser may keep it for ever, and a page of another
version cannot mix its files with these.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from atoll.surfaces.door.answers import error_body, new_request_id

SHARED = Path(__file__).parent
"""The directory that `static/` and `vendor/` are in."""
_TYPES: Mapping[str, str] = MappingProxyType(
    {
        ".js": "text/javascript; charset=utf-8",
        ".mjs": "text/javascript; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".svg": "image/svg+xml; charset=utf-8",
    }
)
"""By the end of a file's name. Other files are not served."""
_FOR_EVER = "public, max-age=31536000, immutable"
_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "preact": "vendor/preact/preact.mjs",
        "preact/hooks": "vendor/preact/hooks.mjs",
        "htm": "vendor/htm/htm.mjs",
        "@preact/signals-core": "vendor/signals-core/signals-core.mjs",
        "@preact/signals": "vendor/signals/signals.mjs",
        "uplot": "vendor/uplot/uPlot.esm.js",
        "@dagrejs/dagre": "vendor/dagre/dagre.esm.js",
    }
)
"""The modules of `vendor/`, by the names with which scripts import them."""


class _Asset(NamedTuple):
    content: bytes
    compressed: bytes
    kind: str
    tag: str


class WebAssets:
    """The files of a page: the shared ones, and those of its own directories, by names such as `static/theme.css`."""

    def __init__(self, own: Mapping[str, Path] | None = None) -> None:
        """`own` has directories with the files of one page, by the first part of their names."""
        places = {"static": SHARED / "static", "vendor": SHARED / "vendor", **(own or {})}
        self._assets = dict(sorted(_read(places.items())))
        digest = hashlib.sha256()
        for name, asset in self._assets.items():
            digest.update(f"{name}\0{asset.tag}\0".encode())
        self.release = digest.hexdigest()[:16]
        """Stands for the content of all files."""

    def url(self, name: str) -> str:
        """The address of a file, relative to the page."""
        if name not in self._assets:
            raise KeyError(name)
        return f"./assets/{self.release}/{name}"

    def import_map(self) -> str:
        """How browsers find modules by name. `atoll/` is `static/`."""
        imports = {name: self.url(path) for name, path in _MODULES.items()}
        return json.dumps({"imports": {**imports, "atoll/": f"./assets/{self.release}/static/"}})

    async def answer(self, request: Request) -> Response:
        """The file of a request for `/assets/{release}/{name}`."""
        asset = self._assets.get(request.path_params["name"])
        if asset is None or request.path_params["release"] != self.release:
            return Response(
                json.dumps(error_body("not_found", "there is no such file", new_request_id())),
                404,
                media_type="application/json",
            )
        headers = {"Cache-Control": _FOR_EVER, "ETag": f'"{asset.tag}"', "Vary": "Accept-Encoding"}
        if f'"{asset.tag}"' in request.headers.get("if-none-match", ""):
            return Response(None, 304, headers)
        content = asset.content
        if "gzip" in request.headers.get("accept-encoding", ""):
            content = asset.compressed
            headers["Content-Encoding"] = "gzip"
        return Response(content, 200, {**headers, "Content-Type": asset.kind})


def _read(places: Iterable[tuple[str, Path]]) -> Iterable[tuple[str, _Asset]]:
    for first, directory in places:
        for path in directory.rglob("*"):
            kind = _TYPES.get(path.suffix)
            if kind is not None and path.is_file():
                yield f"{first}/{path.relative_to(directory).as_posix()}", _asset(path, kind)


@cache
def _asset(path: Path, kind: str) -> _Asset:
    content = path.read_bytes()
    return _Asset(content, gzip.compress(content, 6, mtime=0), kind, hashlib.sha256(content).hexdigest()[:32])
