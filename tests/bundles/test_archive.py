"""Archives of bundles: what is accepted, what is found in them, and how they are packed and written anew."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from atoll.bundles.archive import MAX_BUNDLE_BYTES, pack, read_bundle, repack, verify
from atoll.bundles.manifest import BundleManifest
from atoll.contract.errors import BundleFailed
from tests.bundles.making import entry, manifest, packed, stored, tar

RUN = "def run(args):\n    '''Does it.'''\n"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    root = tmp_path / "bundle"
    (root / "tools").mkdir(parents=True)
    (root / "manifest.json").write_bytes(manifest("run"))
    (root / "tools" / "__init__.py").touch()
    (root / "tools" / "main.py").write_text(RUN)
    long = root / "template" / ("n" * 70) / ("m" * 70)
    long.mkdir(parents=True)
    (long / "page.html").write_text("<p>")
    (root / "template" / "link").symlink_to("../tools/main.py")
    return root


@pytest.mark.parametrize("options", ["--format=gnu", "--format=pax", "--format=ustar", "--format=oldgnu"])
async def test_what_tar_writes_in_any_format_is_read(directory: Path, options: str, tmp_path: Path) -> None:
    made = tmp_path / "made.tgz"
    subprocess.run(
        ["tar", options, "-czf", str(made), "./manifest.json", "tools", "template/"], cwd=directory, check=True
    )
    read = await read_bundle(made)
    assert [tool.name for tool in read.tools] == ["run"]
    assert read.size_bytes == made.stat().st_size
    await verify(made, read.sha256)


async def test_the_same_files_are_packed_to_the_same_bytes(directory: Path, tmp_path: Path) -> None:
    (directory / "tools" / "__pycache__").mkdir()
    (directory / "tools" / "__pycache__" / "main.pyc").write_bytes(b"\0")
    made = []
    for _ in range(2):
        target = io.BytesIO()
        pack(directory, target)
        made.append(target.getvalue())
        (directory / "tools" / "main.py").write_text(RUN)  # another time of change
    assert made[0] == made[1]
    (tmp_path / "made.tgz").write_bytes(made[0])
    assert (await read_bundle(tmp_path / "made.tgz")).tools[0].description == "Does it."
    with tarfile.open(fileobj=io.BytesIO(made[0])) as read:
        assert not [name for name in read.getnames() if "__pycache__" in name]


async def test_what_goes_into_a_sandbox_is_written_anew(tmp_path: Path) -> None:
    given = tar(
        [
            entry("manifest.json", manifest("run"), uid=7, uname="mallory"),
            entry("tools/main.py", RUN.encode(), mode=0o4755 & 0o777, gid=9),
            entry("template/run.sh", b"#!/bin/sh\n", mode=0o777),
            entry("template/link", type=tarfile.SYMTYPE, linkname="run.sh"),
        ]
    )
    bundle = await stored(tmp_path / "made.tgz", gzip.compress(given))
    again = b"".join(repack(bundle.path, bundle.sha256, below="template", owner=1000))
    with tarfile.open(fileobj=io.BytesIO(again)) as read:
        assert {each.name: (each.uid, each.gid, each.mode, each.uname) for each in read} == {
            "run.sh": (1000, 1000, 0o755, ""),
            "link": (1000, 1000, 0o644, ""),
        }
    with pytest.raises(BundleFailed) as failed:
        list(repack(bundle.path, "0" * 64))
    assert failed.value.reason == "bundle_integrity_failed"


async def test_bytes_that_are_gone_or_others_are_named_as_such(tmp_path: Path) -> None:
    bundle = await stored(tmp_path / "made.tgz", packed(RUN, manifest("run")))
    bundle.path.write_bytes(bundle.path.read_bytes() + b"\0")
    with pytest.raises(BundleFailed, match="the bytes of the bundle have the SHA-256") as failed:
        await verify(bundle.path, bundle.sha256)
    assert failed.value.reason == "bundle_integrity_failed"
    bundle.path.unlink()
    with pytest.raises(BundleFailed) as failed:
        await verify(bundle.path, bundle.sha256)
    assert failed.value.reason == "bundle_fetch_failed"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "the archive ends too early"),
        (b"not gzip", "the archive is not gzip"),
        (gzip.compress(b"no tar" * 200), "the archive is damaged, or is not a gzipped tar"),
        (packed(RUN, manifest("run"))[:-20], "the archive ends too early"),
        (packed(RUN, manifest("run")) + b"more", "data follows the end of the archive"),
        (gzip.compress(tar([entry("tools/main.py")])), "the archive has no manifest.json at its top"),
        (gzip.compress(tar([entry("mine/manifest.json", manifest("run"))])), "no manifest.json at its top"),
        (gzip.compress(tar([entry("manifest.json", manifest("run"))])), "the archive has no directory tools/"),
    ],
    ids=lambda value: "content" if isinstance(value, bytes) else None,
)
async def test_what_is_no_bundle_is_refused_in_words(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "made.tgz").write_bytes(content)
    with pytest.raises(BundleFailed, match=expected) as failed:
        await read_bundle(tmp_path / "made.tgz")
    assert failed.value.reason == "bundle_manifest_invalid"


async def test_an_archive_above_the_cap_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "made.tgz").open("wb") as file:
        file.write(packed(RUN, manifest("run")))
        file.truncate(MAX_BUNDLE_BYTES + 1)
    with pytest.raises(BundleFailed, match=f"larger than {MAX_BUNDLE_BYTES} bytes"):
        await read_bundle(tmp_path / "made.tgz")


async def test_an_entrypoint_without_a_file_is_refused(tmp_path: Path) -> None:
    tools = [{"name": "run", "entrypoint": "tools.other:run"}]
    (tmp_path / "made.tgz").write_bytes(packed(RUN, manifest(tools=tools)))
    with pytest.raises(
        BundleFailed, match=r"no file for the module tools\.other; it would be tools/other\.py"
    ) as failed:
        await read_bundle(tmp_path / "made.tgz")
    assert failed.value.reason == "bundle_entrypoint_invalid"


RIGHT = {"name": "run", "entrypoint": "tools.main:run"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("[]", "manifest.json must be an object"),
        ("{", "manifest.json is not JSON"),
        ({"tools": [RIGHT]}, "schema_version is missing"),
        ({"schema_version": 2, "tools": [RIGHT]}, "schema_version is 2; this server reads version 1"),
        ({"schema_version": 1}, "tools is missing"),
        ({"schema_version": 1, "tools": []}, "tools has 0 items; it may have no fewer than 1"),
        ({"schema_version": 1, "tools": [RIGHT, RIGHT]}, "two tools are named 'run'"),
        ({"schema_version": 1, "tools": [{**RIGHT, "name": "a b"}]}, "a tool cannot be called 'a b'; allowed are"),
        ({"schema_version": 1, "tools": [{**RIGHT, "entrypoint": "os:system"}]}, "'os:system' is no entrypoint"),
        ({"schema_version": 1, "tools": [{**RIGHT, "entrypoint": "tools..x:run"}]}, "is no entrypoint"),
        ({"schema_version": 1, "tools": [{**RIGHT, "input_schema": {"type": "string"}}]}, "must describe an object"),
        ({"schema_version": 1, "tools": [RIGHT], "requirements": ["httpx"]}, "'httpx' is no requirement with a pinned"),
        ({"schema_version": 1, "tools": [RIGHT], "requirements": ["httpx==1.*"]}, "no requirement with a pinned"),
        ({"schema_version": 1, "tools": [RIGHT], "requirements": ["--index-url=x"]}, "without options, URLs or paths"),
        ({"schema_version": 1, "tools": [RIGHT], "requirements": ["a @ file:///etc"]}, "without options, URLs"),
        ({"schema_version": 1, "tools": [RIGHT], "requirements": ["a==1\n-e ."]}, "no requirement with a pinned"),
        ({"schema_version": 1, "tools": [RIGHT], "node_modules": ["left-pad"]}, "write one such as 'left-pad@1.3.0'"),
        ({"schema_version": 1, "tools": [RIGHT], "node_modules": ["../x@1.0.0"]}, "is no package of npm"),
        ({"schema_version": 1, "tools": [RIGHT], "extra": 1}, "there is no field 'extra'"),
    ],
)
def test_a_manifest_that_is_wrong_says_where_and_what_is_allowed(given: object, expected: str) -> None:
    text = given if isinstance(given, str) else json.dumps(given)
    with pytest.raises(BundleFailed) as failed:
        BundleManifest.parse(text.encode())
    assert expected in failed.value.message
    assert failed.value.reason == "bundle_manifest_invalid"


def test_a_manifest_as_people_write_it_is_read() -> None:
    read = BundleManifest.parse(
        manifest(
            "run",
            requirements=["httpx[http2]==0.28.1", "tomli == 2.0.1 ; python_version < '3.11'"],
            node_modules=["left-pad@1.3.0", "@types/node@22.1.0"],
            build_command="make -C tools",
        )
    )
    assert (read.tools[0].module, read.tools[0].function) == ("tools.main", "run")
    assert len(read.requirements) == len(read.node_modules) == 2
