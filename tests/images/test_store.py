"""Directories as images, and what becomes of images in the store: listed, removed, collected."""

from __future__ import annotations

import json
import os
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from atoll.contract.errors import ImageUnavailable, InvalidRequest, SandboxError
from atoll.runtime.images.store import ImageStore
from tests.images.registry import entry, file, rootfs, write_tar


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "bin").mkdir(parents=True)
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    return root


def trees_in(root: Path) -> set[str]:
    return {f"sha256:{name}" for name in os.listdir(root / "unpacked")}


async def test_a_directory_is_used_in_place_under_the_generated_layer(store: ImageStore, tree: Path):
    layers = await store.resolve(f"dir:{tree}")
    layer, root = (each.path for each in layers.filesystems[0].layers)
    assert root == tree
    assert (layer / "etc/passwd").read_text().endswith("user:x:1000:1000:user:/home/user:/bin/sh\n")
    assert os.readlink(layer / "etc/hosts") == "/run/hosts", "it has the hostname in it"
    assert {"proc", "sys", "dev", "run", "tmp", "home", "etc"} == set(os.listdir(layer))
    assert sorted(os.listdir(tree)) == ["bin", "etc"]


async def test_a_directory_is_resolved_again_in_less_than_a_millisecond(store: ImageStore, tree: Path):
    first = await store.resolve(f"dir:{tree}")
    durations = []
    for _ in range(20):
        start = time.perf_counter()
        assert await store.resolve(f"dir:{tree}") == first
        durations.append(time.perf_counter() - start)
    assert min(durations) < 0.001


async def test_the_layer_follows_the_accounts_of_a_directory(store: ImageStore, tree: Path):
    first = await store.resolve(f"dir:{tree}")
    (tree / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\napp:x:5:5::/:/bin/sh\n")
    second = await store.resolve(f"dir:{tree}")
    assert second.digest != first.digest
    assert "app:x:5" in (second.filesystems[0].layers[0].path / "etc/passwd").read_text()
    assert "app:x:5" not in (first.filesystems[0].layers[0].path / "etc/passwd").read_text()
    assert [image.digest for image in await store.list()] == [second.digest]


async def test_a_directory_that_cannot_be_an_image_is_refused(store: ImageStore, tmp_path: Path, tree: Path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "none", tmp_path / "empty", tree / "etc/passwd"):
        with pytest.raises(ImageUnavailable) as caught:
            await store.resolve(f"dir:{path}")
        assert caught.value.details["reason"] == "not_found"
    (tmp_path / "door").symlink_to("/")
    for path in (Path("/"), tmp_path, tmp_path / "door"):
        with pytest.raises(InvalidRequest, match="cannot be an image"):
            await store.resolve(f"dir:{path}")


async def test_a_new_store_is_empty_and_makes_nothing_by_being_looked_at(store: ImageStore, tmp_path: Path):
    assert await store.list() == []
    assert await store.remove_unreferenced() == []
    assert not (tmp_path / "images").exists()


@pytest.mark.usefixtures("programs")
async def test_a_removed_image_is_gone(store: ImageStore, tmp_path: Path):
    tar = write_tar(tmp_path / "root.tar", rootfs())
    await store.import_(tar, "tools")
    await store.remove("tools")
    assert await store.list() == []
    assert trees_in(tmp_path / "images") == set()
    assert os.listdir(tmp_path / "images/tmp") == []
    with pytest.raises(ImageUnavailable, match="is not present"):
        await store.remove("tools")


@pytest.mark.usefixtures("programs")
async def test_an_image_of_a_newer_version_is_refused_and_kept(store: ImageStore, tmp_path: Path):
    image = await store.import_(write_tar(tmp_path / "root.tar", rootfs()), "tools")
    (record,) = (tmp_path / "images/references").iterdir()
    before = record.read_bytes()
    record.write_text(json.dumps({**json.loads(before), "version": 2, "invented_later": 1}))
    tree = tmp_path / "images/unpacked" / image.digest.removeprefix("sha256:")
    os.utime(tree, (0, 0))
    message = r"written by a newer Atoll \(record version 2, this one reads up to 1\)"
    with pytest.raises(SandboxError, match=f"^the image tools:latest was {message}; upgrade Atoll"):
        await store.resolve("tools")
    with pytest.raises(SandboxError, match=message):
        await store.list()
    assert await store.remove_unreferenced() == []
    assert tree.is_dir()
    record.write_bytes(before)
    assert (await store.resolve("tools")).digest == image.digest


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("content", [b'{"version": 0}', b"{}", b"\xff"], ids=["older", "without version", "garbage"])
async def test_an_image_whose_record_is_older_or_damaged_is_had_anew(store: ImageStore, tmp_path: Path, content: bytes):
    tar = write_tar(tmp_path / "root.tar", rootfs())
    first = await store.resolve(f"tar:{tar}")
    (record,) = (tmp_path / "images/references").iterdir()
    record.write_bytes(content)
    assert await store.list() == []
    assert (await store.resolve(f"tar:{tar}")).digest == first.digest
    assert [image.digest for image in await store.list()] == [first.digest]


@pytest.mark.usefixtures("programs")
async def test_what_two_references_mean_goes_with_the_second(store: ImageStore, tmp_path: Path):
    tar = write_tar(tmp_path / "root.tar", rootfs())
    digest = (await store.import_(tar, "one")).digest
    await store.import_(tar, "two")
    await store.remove("one")
    assert (await store.resolve("two")).digest == digest
    assert [image.reference for image in await store.list()] == ["docker.io/library/two:latest"]
    await store.remove("two")
    assert trees_in(tmp_path / "images") == set()


@pytest.mark.usefixtures("programs")
async def test_an_image_on_which_sandboxes_stand_is_not_removed(make_store: Callable[..., ImageStore], tmp_path: Path):
    in_use: set[str] = set()
    store = make_store(in_use=lambda: in_use)
    tar = write_tar(tmp_path / "root.tar", rootfs())
    image = await store.import_(tar, "tools")
    in_use.add(image.digest)
    with pytest.raises(InvalidRequest, match="in use"):
        await store.remove("tools")
    assert await store.list() == [image]
    await store.import_(tar, "again")
    await store.remove("tools")  # the tree stays, as another name means it
    in_use.clear()
    await store.remove("again")
    assert trees_in(tmp_path / "images") == set()


@pytest.mark.usefixtures("programs")
async def test_what_no_reference_means_any_more_is_collected_once_it_is_idle_and_unused(
    make_store: Callable[..., ImageStore], tmp_path: Path
):
    in_use: set[str] = set()
    hasty = make_store(in_use=lambda: in_use, grace_s=-1.0)
    patient = make_store(in_use=lambda: in_use)
    old = (await hasty.import_(write_tar(tmp_path / "1.tar", rootfs()), "tools")).digest
    new = (await hasty.import_(write_tar(tmp_path / "2.tar", rootfs(file("new"))), "tools")).digest
    assert await patient.remove_unreferenced() == []
    in_use.add(old)
    assert await hasty.remove_unreferenced() == []
    in_use.clear()
    assert await hasty.remove_unreferenced() == [old]
    assert trees_in(tmp_path / "images") == {new}


async def test_the_host_image_cannot_be_removed(store: ImageStore):
    with pytest.raises(InvalidRequest, match="cannot be removed"):
        await store.remove("host")


@pytest.mark.skipif(os.geteuid() != 0, reason="an unprivileged user is what all the other tests run as")
@pytest.mark.usefixtures("programs")
async def test_an_ordinary_user_has_a_store_as_well(tmp_path: Path):
    """In a user namespace in which this user is all that there is: nothing can be given to anyone else."""
    entries = rootfs(
        file("opt/theirs", b"x", uid=1234, mode=0o4755),
        entry("closed", tarfile.DIRTYPE, mode=0),
        entry("closed/further", tarfile.DIRTYPE, mode=0),
        file("closed/further/file", b"x", mode=0),
    )
    write_tar(tmp_path / "root.tar", entries)
    script = """if True:
        import os, sys, anyio
        from pathlib import Path
        from atoll.runtime.images.store import ImageStore
        async def main(base: Path):
            store = ImageStore(base / "images", rootless=True)
            for reference in ("host", f"tar:{base}/root.tar"):
                layers = await store.resolve(reference)
                for layer in layers.filesystems[0].layers:
                    print({path.lstat().st_uid for path in layer.path.rglob("*")})
            await store.remove(f"tar:{base}/root.tar")
            print(os.geteuid(), len(os.listdir(base / "images/unpacked")), os.listdir(base / "images/tmp"))
        anyio.run(main, Path(sys.argv[1]))
    """
    command = [
        "unshare",
        "--user",
        "--map-user=54321",
        "--map-group=54321",
        sys.executable,
        "-c",
        script,
        str(tmp_path),
    ]
    done = await anyio.run_process(command, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().splitlines() == ["{54321}", "{54321}", "{54321}", "54321 1 []"]
