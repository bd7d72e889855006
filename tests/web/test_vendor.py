"""What is vendored is what its manifest says, and upstream's licences are with it."""

from __future__ import annotations

import hashlib
import json
import re

from atoll.surfaces.web.assets import SHARED, WebAssets

VENDOR = SHARED / "vendor"


def manifest() -> list[dict]:
    return json.loads((VENDOR / "manifest.json").read_text())


def test_every_vendored_file_is_the_one_of_the_manifest() -> None:
    expected = {f"{each['directory']}/{name}": digest for each in manifest() for name, digest in each["files"].items()}
    found = {
        str(path.relative_to(VENDOR)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    assert found == expected


def test_every_package_has_a_version_and_its_licence() -> None:
    for each in manifest():
        assert re.fullmatch(r"\d+\.\d+\.\d+", each["version"])
        text = (VENDOR / each["directory"] / "LICENSE").read_text()
        assert {"MIT": "Permission is hereby granted", "Apache-2.0": "Apache License"}[each["licence"]] in text


def test_every_module_is_found_by_the_import_map_or_beside_the_one_that_imports_it() -> None:
    """Browsers would find out only when they run it."""
    places = {"static": SHARED / "static", "vendor": VENDOR, "pattern": SHARED / "patterns/static"}
    imports = json.loads(WebAssets().import_map())["imports"]
    scripts = [path for place in places.values() for path in [*place.rglob("*.js"), *place.rglob("*.mjs")]]
    assert len(scripts) > 12
    for path in scripts:
        for name in re.findall(r"""(?:\bfrom|\bimport\()\s*["']([^"'\s]+)["']""", path.read_text()):
            if name.startswith("./"):
                assert (path.parent / name).is_file(), f"{path.name} imports {name}"
            elif name.startswith("atoll/"):
                assert (places["static"] / name.removeprefix("atoll/")).is_file(), f"{path.name} imports {name}"
            else:
                assert name in imports, f"{path.name} imports {name}"


def test_the_first_load_is_small() -> None:
    """Of what others wrote, what is loaded before a chart or the graph is opened, compressed."""
    import gzip

    from atoll.surfaces.web.patterns.page import EARLY

    first = [VENDOR.parent / name for name in EARLY if name.startswith("vendor/")]
    assert sum(len(gzip.compress(path.read_bytes(), 9)) for path in first) < 12_000
    assert not any("uplot" in str(path) or "dagre" in str(path) for path in first)
