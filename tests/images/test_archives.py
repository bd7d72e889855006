"""Images from files: tars of root file systems, plain, compressed and hostile, and what other tools save."""

from __future__ import annotations

import os
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest

from atoll.contract.errors import ImageUnavailable, InvalidRequest
from atoll.runtime.images.store import ImageStore
from tests.images.registry import BUSYBOX, entry, file, link, make_layout, rootfs, write_tar

pytestmark = pytest.mark.usefixtures("programs")


def compress(tar: Path, how: str) -> Path:
    if how == "zst":
        subprocess.run(["zstd", "-q", tar, "-o", f"{tar}.zst"], check=True, timeout=30)
        return Path(f"{tar}.zst")
    target = Path(f"{tar}.{how}")
    with tarfile.open(target, f"w:{how}") as packed, tarfile.open(tar) as plain:  # type: ignore[call-overload]
        for member in plain:
            packed.addfile(member, plain.extractfile(member) if member.isreg() else None)
    return target


async def unpacked(store: ImageStore, tar: Path) -> tuple[Path, Path]:
    """The generated layer and the root file system."""
    layers = await store.resolve(f"tar:{tar}")
    layer, root = (each.path for each in layers.filesystems[0].layers)
    return layer, root


@pytest.mark.parametrize("how", ["", "gz", "bz2", "xz", "zst"])
async def test_a_tar_is_unpacked_however_it_is_compressed(store: ImageStore, tmp_path: Path, how: str):
    tar = write_tar(tmp_path / "some: root.tar", rootfs(file("opt/suid", b"x", mode=0o4755, uid=1234)))
    layer, root = await unpacked(store, compress(tar, how) if how else tar)
    assert (root / "bin/busybox").read_bytes() == BUSYBOX.read_bytes()
    assert (root / "bin/busybox").stat().st_mode & 0o7777 == 0o755
    assert "user:x:1000:1000" in (layer / "etc/passwd").read_text()
    if os.geteuid() == 0:
        assert (root / "opt/suid").stat().st_uid == 1234
        assert (layer / "home/user").stat().st_uid == 1000
    assert (layer / "tmp").stat().st_mode & 0o7777 == 0o1777
    assert os.listdir(tmp_path / "images/tmp") == []


async def test_a_tar_is_unpacked_once_and_again_when_it_has_changed(store: ImageStore, tmp_path: Path):
    tar = write_tar(tmp_path / "root.tar", rootfs(file("version", b"1")))
    first = await store.resolve(f"tar:{tar}")
    made = (tmp_path / "images/unpacked" / first.digest.removeprefix("sha256:") / "image.json").stat().st_mtime_ns
    (tmp_path / "copy.tar").write_bytes(tar.read_bytes())
    assert (await store.resolve(f"tar:{tmp_path / 'copy.tar'}")).digest == first.digest
    again = (tmp_path / "images/unpacked" / first.digest.removeprefix("sha256:") / "image.json").stat().st_mtime_ns
    assert again == made
    write_tar(tar, rootfs(file("version", b"two")))
    second = await store.resolve(f"tar:{tar}")
    assert second.digest != first.digest
    assert (second.filesystems[0].layers[1].path / "version").read_bytes() == b"two"
    assert (first.filesystems[0].layers[1].path / "version").read_bytes() == b"1"


async def test_a_tar_that_is_gone_is_still_there_in_the_store(store: ImageStore, tmp_path: Path):
    tar = write_tar(tmp_path / "root.tar", rootfs())
    first = await store.resolve(f"tar:{tar}")
    tar.unlink()
    assert await store.resolve(f"tar:{tar}") == first


async def test_a_link_in_an_image_never_makes_us_read_a_file_of_the_machine(store: ImageStore, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("secret:x:4711:4711::/:/bin/sh\n")
    for target in (str(secret), "/etc/shadow", "../../../../../../../../etc/shadow", f"../../..{secret}"):
        tar = write_tar(
            tmp_path / "root.tar", rootfs(link("etc/passwd", target), link("etc/group", target), accounts="")
        )
        layer, _ = await unpacked(store, tar)
        assert (layer / "etc/passwd").read_text().splitlines() == [
            "root:x:0:0:root:/root:/bin/sh",
            "nobody:x:65534:65534:nobody:/nonexistent:/sbin/nologin",
            "user:x:1000:1000:user:/home/user:/bin/sh",
        ]
        assert not (layer / "etc/passwd").is_symlink()


async def test_links_within_an_image_are_followed_as_inside(store: ImageStore, tmp_path: Path):
    entries = [
        entry("usr/etc", tarfile.DIRTYPE, mode=0o750),
        link("etc", "/usr/etc"),
        file("data/passwd", b"app:x:7:7::/:/bin/sh"),
        link("usr/etc/passwd", "../../../data/passwd"),
    ]
    layer, _ = await unpacked(store, write_tar(tmp_path / "root.tar", entries))
    assert not (layer / "etc").exists()
    assert (layer / "usr/etc").stat().st_mode & 0o7777 == 0o750
    assert (layer / "usr/etc/passwd").read_text().splitlines() == [
        "app:x:7:7::/:/bin/sh",
        "user:x:1000:1000:user:/home/user:/bin/sh",
    ]


async def test_links_in_a_circle_and_files_that_are_none_do_no_harm(store: ImageStore, tmp_path: Path):
    entries = rootfs(
        link("etc/passwd", "other"), link("etc/other", "passwd"), entry("etc/group", tarfile.FIFOTYPE), accounts=""
    )
    layer, _ = await unpacked(store, write_tar(tmp_path / "root.tar", entries))
    assert "user:" in (layer / "etc/passwd").read_text()
    assert "user:" in (layer / "etc/group").read_text(), "what is not a file is replaced by one"


async def test_names_that_lead_out_of_an_image_stay_within_it(store: ImageStore, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    entries = rootfs(
        file("../../../../../../../../tmp/atoll-escape-1", b"x"),
        file(f"..{outside}/escape", b"x"),
        link("door", str(outside)),
        file("door/escape", b"x"),
        file(f"{outside}/absolute", b"x"),
    )
    await unpacked(store, write_tar(tmp_path / "root.tar", entries))
    assert list(outside.iterdir()) == []
    assert not Path("/tmp/atoll-escape-1").exists()


async def test_a_hard_link_to_a_file_of_the_machine_is_refused(store: ImageStore, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    tar = write_tar(tmp_path / "root.tar", rootfs(entry("etc/hard", tarfile.LNKTYPE, linkname=str(secret))))
    with pytest.raises(ImageUnavailable, match="cannot be unpacked") as caught:
        await store.resolve(f"tar:{tar}")
    assert caught.value.details["reason"] == "malformed"
    assert secret.stat().st_nlink == 1
    assert os.listdir(tmp_path / "images/tmp") == []


async def test_devices_and_attributes_that_steer_an_overlay_do_not_come_out_of_an_image(
    store: ImageStore, tmp_path: Path
):
    attributes = {"SCHILY.xattr.user.overlay.opaque": "y", "SCHILY.xattr.user.note": "kept"}
    entries = rootfs(
        entry("dev/disk", tarfile.BLKTYPE, devmajor=8, devminor=0, mode=0o666),
        entry("dev/none", tarfile.CHRTYPE, devmajor=0, devminor=0, mode=0o666),
        entry("opaque", tarfile.DIRTYPE, mode=0o555, pax_headers=attributes),
        file("marked", b"x", mode=0o444, pax_headers=attributes),
    )
    _, root = await unpacked(store, write_tar(tmp_path / "root.tar", entries))
    kinds = {stat.S_IFMT(path.lstat().st_mode) for path in root.rglob("*")}
    assert kinds <= {stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK}
    for path in (root / "opaque", root / "marked"):
        assert "user.overlay.opaque" not in os.listxattr(path)
        assert "user.note" in os.listxattr(path)
    assert stat.S_IMODE((root / "marked").stat().st_mode) == 0o444


async def test_a_second_name_for_1000_is_added_where_the_image_has_one(store: ImageStore, tmp_path: Path):
    accounts = "root:x:0:0:root:/root:/bin/bash\nnode:x:1000:1000::/home/node:/bin/bash"
    entries = rootfs(file("bin/bash", b"#!", mode=0o755), accounts=accounts)
    layer, _ = await unpacked(store, write_tar(tmp_path / "root.tar", entries))
    assert (layer / "etc/passwd").read_text() == f"{accounts}\nuser:x:1000:1000:user:/home/user:/bin/bash\n"


async def test_an_image_that_has_a_user_keeps_it(store: ImageStore, tmp_path: Path):
    accounts = "root:x:0:0:root:/root:/bin/sh\nuser:x:500:500::/srv:/bin/sh\n"
    layer, _ = await unpacked(store, write_tar(tmp_path / "root.tar", rootfs(accounts=accounts)))
    assert not (layer / "etc/passwd").exists()


async def test_an_account_file_that_is_too_large_is_left_alone(store: ImageStore, tmp_path: Path):
    layer, root = await unpacked(store, write_tar(tmp_path / "root.tar", rootfs(accounts="#" * 2_000_000)))
    assert not (layer / "etc/passwd").exists()
    assert (root / "etc/passwd").stat().st_size == 2_000_000


@pytest.mark.parametrize(
    "content", [b"", b"this is not a tar" * 1000, b"\x1f\x8bnot gzip", b"\x28\xb5\x2f\xfdnot zstd"]
)
async def test_a_file_that_is_not_a_tar_is_refused(store: ImageStore, tmp_path: Path, content: bytes):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ImageUnavailable) as caught:
        await store.resolve(f"tar:{tmp_path / 'file'}")
    assert caught.value.details["reason"] == "malformed"
    assert os.listdir(tmp_path / "images/tmp") == []
    assert await store.list() == []


async def test_a_tar_that_is_cut_off_is_refused(store: ImageStore, tmp_path: Path):
    tar = compress(write_tar(tmp_path / "root.tar", rootfs()), "gz")
    tar.write_bytes(tar.read_bytes()[:500_000])
    with pytest.raises(ImageUnavailable) as caught:
        await store.resolve(f"tar:{tar}")
    assert caught.value.details["reason"] == "malformed"


async def test_a_compressed_tar_that_grows_beyond_what_is_allowed_is_stopped(make_store, tmp_path: Path):
    tar = compress(write_tar(tmp_path / "root.tar", rootfs(file("zeros", bytes(40 * 1024 * 1024)))), "gz")
    with pytest.raises(ImageUnavailable, match="is too large") as caught:
        await make_store(max_bytes=16 * 1024 * 1024).resolve(f"tar:{tar}")
    assert caught.value.details["reason"] == "too_large"
    assert os.listdir(tmp_path / "images/tmp") == []


async def test_a_tar_that_does_not_exist_is_told(store: ImageStore, tmp_path: Path):
    with pytest.raises(ImageUnavailable, match="does not exist") as caught:
        await store.resolve(f"tar:{tmp_path / 'none.tar'}")
    assert caught.value.details["reason"] == "not_found"


@pytest.mark.parametrize("kind", ["rootfs", "rootfs.gz", "layout", "oci-archive", "docker-archive"])
async def test_a_file_is_imported_under_a_name_whatever_it_is(
    store: ImageStore, layout: Path, tmp_path: Path, kind: str
):
    source = tmp_path / "source"
    if kind.startswith("rootfs"):
        write_tar(source, rootfs(), "w:gz" if kind == "rootfs.gz" else "w")
    elif kind == "layout":
        source = layout
    else:
        name = ":team/tools:1" if kind == "docker-archive" else ""
        command = ["skopeo", "copy", "--quiet", f"oci:{layout}:image", f"{kind}:{source}{name}"]
        subprocess.run(command, check=True, timeout=30, capture_output=True)
    image = await store.import_(source, "team/tools:1")
    assert (image.reference, image.kind) == ("docker.io/team/tools:1", "registry")
    layers = await store.resolve("team/tools:1")  # the registry of that name is not asked
    assert layers.digest == image.digest
    assert (layers.filesystems[0].layers[1].path / "bin/busybox").read_bytes() == BUSYBOX.read_bytes()
    if not kind.startswith("rootfs"):
        assert layers.env["GREETING"] == "hello world"


@pytest.mark.parametrize("kind", ["oci", "oci-archive", "docker-archive"])
async def test_what_other_tools_save_can_be_named_by_its_path(
    store: ImageStore, layout: Path, tmp_path: Path, kind: str
):
    reference = f"oci:{layout}:image"
    if kind != "oci":
        reference = f"{kind}:{tmp_path / 'saved'}"
        command = ["skopeo", "copy", "--quiet", f"oci:{layout}:image", reference]
        subprocess.run(command, check=True, timeout=30, capture_output=True)
    layers = await store.resolve(reference)
    assert layers.env["GREETING"] == "hello world"
    assert await store.resolve(reference) == layers
    assert [image.reference for image in await store.list()] == [reference]


async def test_an_import_replaces_what_had_the_name(store: ImageStore, tmp_path: Path):
    first = await store.import_(write_tar(tmp_path / "1.tar", rootfs()), "tools")
    second = await store.import_(write_tar(tmp_path / "2.tar", rootfs(file("new", b""))), "tools")
    assert (await store.resolve("tools")).digest == second.digest != first.digest
    assert await store.list() == [second]


async def test_an_import_needs_a_name_and_something_to_import(store: ImageStore, tmp_path: Path):
    tar = write_tar(tmp_path / "root.tar", rootfs())
    for name in ("host", f"dir:{tmp_path}", f"tools@sha256:{'0' * 64}", "No Name"):
        with pytest.raises(InvalidRequest):
            await store.import_(tar, name)
    with pytest.raises(InvalidRequest, match="dir:"):
        await store.import_(tmp_path, "tools")
    with pytest.raises(ImageUnavailable, match="does not exist"):
        await store.import_(tmp_path / "none", "tools")


async def test_an_environment_that_no_process_can_have_is_dropped(store: ImageStore, tmp_path: Path):
    layout = make_layout(tmp_path / "odd", rootfs(), env=["GOOD=a=b", "with space=1", "1ST=1", "EMPTY="])
    assert (await store.resolve(f"oci:{layout}")).env == {"GOOD": "a=b", "EMPTY": ""}
