"""Images from a registry: a real one, fetched by the real programs."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import anyio
import pytest

from atoll.contract.errors import ImageUnavailable
from atoll.runtime.images.store import ImageStore
from atoll.testing.waiting import eventually
from tests.images import puller
from tests.images.registry import BUSYBOX, Registry, file, free_port, gate_before, make_layout, rootfs

PULLER = str(Path(puller.__file__))


def leftovers(root: Path) -> list[str]:
    return os.listdir(root / "tmp")


async def test_a_pulled_image_is_its_files_under_the_generated_layer(
    store: ImageStore, pushed: tuple[str, str], tmp_path: Path
):
    reference, digest = pushed
    layers = await store.resolve(reference)
    (filesystem,) = layers.filesystems
    layer, root = (each.path for each in filesystem.layers)
    assert (filesystem.target, filesystem.key, layers.digest) == ("/", "root", digest)
    assert (root / "bin/busybox").read_bytes() == BUSYBOX.read_bytes()
    assert os.readlink(root / "bin/sh") == "busybox"
    assert (layer / "etc/passwd").read_text().splitlines() == [
        "root:x:0:0:root:/root:/bin/sh",
        "user:x:1000:1000:user:/home/user:/bin/sh",
    ]
    assert layers.env == {"GREETING": "hello world", "PATH": "/bin"}
    assert leftovers(tmp_path / "images") == []
    assert (tmp_path / "images").stat().st_mode & 0o777 == 0o700


async def test_what_the_image_says_about_itself_is_kept(store: ImageStore, pushed: tuple[str, str]):
    reference, digest = pushed
    image = await store.pull(reference)
    assert (image.reference, image.kind, image.digest) == (reference, "registry", digest)
    assert (image.user, image.working_directory) == ("1000", "/srv")
    assert image.size_bytes > BUSYBOX.stat().st_size
    assert image.created_at is not None
    assert await store.list() == [image]


async def test_a_present_image_is_resolved_without_the_network_in_less_than_a_millisecond(
    store: ImageStore, registry: Registry, pushed: tuple[str, str]
):
    reference, _ = pushed
    repository = reference.partition("/")[2].rpartition(":")[0]
    first = await store.resolve(reference)
    asked = registry.requests(f"{repository}/.*")
    durations = []
    for _ in range(20):
        start = time.perf_counter()
        assert await store.resolve(reference) == first
        durations.append(time.perf_counter() - start)
    assert registry.requests(f"{repository}/.*") == asked
    assert min(durations) < 0.001


async def test_a_digest_names_the_image_and_what_is_present_is_not_fetched_again(
    store: ImageStore, registry: Registry, pushed: tuple[str, str]
):
    reference, digest = pushed
    by_digest = f"{reference.rpartition(':')[0]}@{digest}"
    assert (await store.resolve(by_digest)).digest == digest
    asked = registry.requests(".*")
    assert (await store.pull(by_digest)).digest == digest
    assert registry.requests(".*") == asked
    await store.pull(reference)
    assert [image.digest for image in await store.list()] == [digest, digest]


async def test_pull_follows_a_tag_that_has_moved_and_resolve_does_not(
    store: ImageStore, registry: Registry, pushed: tuple[str, str], tmp_path: Path
):
    reference, old = pushed
    await store.pull(reference)
    layout = make_layout(tmp_path / "new", rootfs(file("etc/new", b"1")))
    new = registry.push(layout, reference.partition("/")[2])
    assert (await store.resolve(reference)).digest == old
    assert (await store.pull(reference)).digest == new
    layers = await store.resolve(reference)
    assert layers.digest == new
    assert (layers.filesystems[0].layers[1].path / "etc/new").read_text() == "1"


async def test_pull_of_an_unchanged_tag_fetches_no_blob_again(
    store: ImageStore, registry: Registry, pushed: tuple[str, str]
):
    reference, _ = pushed
    blobs = reference.partition("/")[2].rpartition(":")[0] + "/blobs/.*"
    first = await store.pull(reference)
    fetched = registry.requests(blobs)
    assert fetched > 0
    second = await store.pull(reference)
    assert second.digest == first.digest
    assert second.pulled_at > first.pulled_at
    assert registry.requests(blobs) == fetched


async def test_an_image_for_several_platforms_gives_the_one_of_this_machine(
    store: ImageStore, registry: Registry, layout: Path, tmp_path: Path
):
    machine = os.uname().machine
    ours = {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)
    index = tmp_path / "multi"
    make_layout(index, rootfs(file("etc/which", b"ours")), tag="ours")
    for tag, architecture, content in (("ours", ours, b"ours"), ("other", "s390x", b"other")):
        if tag != "ours":
            subprocess.run(["umoci", "new", "--image", f"{index}:{tag}"], check=True, capture_output=True)
            source = tmp_path / content.decode()
            source.write_bytes(content)
            subprocess.run(["umoci", "insert", "--image", f"{index}:{tag}", source, "/etc/which"], check=True)
        subprocess.run(
            ["umoci", "config", "--image", f"{index}:{tag}", f"--architecture={architecture}", "--os=linux"], check=True
        )
    digest = _push_index(registry, index, tmp_path, {"ours": ours, "other": "s390x"})
    layers = await store.resolve(f"{registry.host}/t/multi:1")
    assert (layers.filesystems[0].layers[1].path / "etc/which").read_bytes() == b"ours"
    assert layers.digest == digest


def _push_index(registry: Registry, layout: Path, tmp_path: Path, architectures: dict[str, str]) -> str:
    """Make one index of the layout's images and push all of it; returns the digest of the first image."""
    digest = ""
    whole = json.loads((layout / "index.json").read_text())
    for descriptor in whole["manifests"]:
        tag = descriptor.pop("annotations")["org.opencontainers.image.ref.name"]
        descriptor["platform"] = {"os": "linux", "architecture": architectures[tag]}
        if tag == "ours":
            digest = descriptor["digest"]
    raw = json.dumps({**whole, "mediaType": "application/vnd.oci.image.index.v1+json"}).encode()
    blob = hashlib.sha256(raw).hexdigest()
    (layout / "blobs/sha256" / blob).write_bytes(raw)
    entry = {
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "digest": f"sha256:{blob}",
        "size": len(raw),
        "annotations": {"org.opencontainers.image.ref.name": "all"},
    }
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    registry.push(layout, "t/multi:1", tag="all", extra=["--all"])
    return digest


async def test_progress_counts_the_bytes_that_come_up_to_the_announced_total(
    store: ImageStore, registry: Registry, pushed: tuple[str, str]
):
    reference, _ = pushed
    reports: list[tuple[str, int, int | None]] = []
    async with gate_before(registry) as gate, anyio.create_task_group() as tasks:
        gated = reference.replace(registry.host, gate.host)

        def progress(what: str, done: int, total: int | None) -> None:
            reports.append((what, done, total))
            if what.startswith("fetching") and done:
                gate.open()

        async def pull() -> None:
            await store.pull(gated, progress=progress)

        tasks.start_soon(pull)
    fetching = [(done, total) for what, done, total in reports if what.startswith("fetching")]
    (total,) = {total for _, total in fetching}
    assert total
    assert total > 100_000
    assert any(0 < done < total for done, _ in fetching)
    assert fetching[-1][0] == total
    assert fetching == sorted(fetching)
    assert [what.split()[0] for what, *_ in reports if what.split()[0] != "fetching"][-1] == "unpacking"


async def test_eight_pulls_at_once_do_the_work_once(store: ImageStore, registry: Registry, pushed: tuple[str, str]):
    reference, digest = pushed
    repository = reference.partition("/")[2].rpartition(":")[0]
    digests: list[str] = []
    waiting: set[int] = set()
    async with gate_before(registry) as gate, anyio.create_task_group() as tasks:
        gated = reference.replace(registry.host, gate.host)

        async def pull(number: int) -> None:
            def progress(what: str, done: int, total: int | None) -> None:
                if what.startswith("waiting"):
                    waiting.add(number)
                    if len(waiting) == 7:
                        gate.open()

            digests.append((await store.pull(gated, progress=progress)).digest)

        for number in range(8):
            tasks.start_soon(pull, number)
    assert digests == [digest] * 8
    assert registry.requests(f"{repository}/manifests/1") == 1
    assert registry.requests(f"{repository}/blobs/.*") == 2  # the configuration and the only layer


async def test_three_processes_at_once_do_the_work_once(registry: Registry, pushed: tuple[str, str], tmp_path: Path):
    reference, digest = pushed
    repository = reference.partition("/")[2].rpartition(":")[0]
    lines: list[str] = []
    async with gate_before(registry) as gate:
        gated = reference.replace(registry.host, gate.host)

        async def run() -> None:
            command = [sys.executable, PULLER, str(tmp_path / "images"), gated, "3"]
            async with await anyio.open_process(command, stderr=None) as process:
                assert process.stdout is not None
                async for chunk in process.stdout:
                    lines.extend(chunk.decode().split())
                    if lines.count("waiting") == 8:
                        gate.open()
            assert process.returncode == 0

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(run)
    assert sorted(lines) == sorted(["waiting"] * 8 + [digest] * 9)
    assert registry.requests(f"{repository}/manifests/1") == 1
    assert registry.requests(f"{repository}/blobs/.*") == 2
    assert leftovers(tmp_path / "images") == []


@pytest.mark.parametrize(
    "moment",
    ["looking up", "fetching", "unpacking", "before publishing", "after publishing", "after recording"],
)
async def test_a_pull_that_is_killed_leaves_nothing_that_breaks_the_next(
    store: ImageStore, pushed: tuple[str, str], tmp_path: Path, moment: str
):
    reference, digest = pushed
    with anyio.fail_after(30):
        killed = await anyio.run_process(
            [sys.executable, PULLER, tmp_path / "images", reference, "1", moment], check=False
        )
    assert killed.returncode == -signal.SIGKILL
    assert len(leftovers(tmp_path / "images")) == 1
    layers = await store.resolve(reference)
    assert layers.digest == digest
    assert (layers.filesystems[0].layers[1].path / "bin/busybox").read_bytes() == BUSYBOX.read_bytes()

    async def nothing_is_left() -> bool:
        await store.remove_unreferenced()
        return not leftovers(tmp_path / "images")

    await eventually(nothing_is_left, "a program of the dead is done and its directory is gone")


async def test_killing_the_group_of_a_puller_ends_what_it_has_started(
    store: ImageStore, registry: Registry, pushed: tuple[str, str], tmp_path: Path
):
    reference, digest = pushed
    async with gate_before(registry) as gate:
        gated = reference.replace(registry.host, gate.host)
        command = [sys.executable, PULLER, str(tmp_path / "images"), gated, "1"]
        async with await anyio.open_process(command, start_new_session=True) as process:
            with anyio.fail_after(20):
                await gate.held.wait()
            os.killpg(process.pid, signal.SIGKILL)
        await eventually(store.remove_unreferenced, "the directory of the dead is collected")
        assert leftovers(tmp_path / "images") == []
        gate.open()
        assert (await store.resolve(gated)).digest == digest


async def test_a_cancelled_pull_leaves_nothing_behind(
    store: ImageStore, registry: Registry, pushed: tuple[str, str], tmp_path: Path
):
    reference, digest = pushed
    async with gate_before(registry) as gate:
        gated = reference.replace(registry.host, gate.host)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.resolve, gated)
            with anyio.fail_after(20):
                await gate.held.wait()
            tasks.cancel_scope.cancel()
        assert leftovers(tmp_path / "images") == []
        assert await store.list() == []
        gate.open()
        assert (await store.resolve(gated)).digest == digest


async def test_a_waiting_pull_can_be_cancelled(store: ImageStore, registry: Registry, pushed: tuple[str, str]):
    reference, _ = pushed
    async with gate_before(registry) as gate, anyio.create_task_group() as tasks:
        gated = reference.replace(registry.host, gate.host)
        tasks.start_soon(store.resolve, gated)
        with anyio.fail_after(20):
            await gate.held.wait()
        with anyio.move_on_after(0.05) as scope:
            await store.resolve(gated)
        assert scope.cancelled_caught
        gate.open()


async def test_an_unknown_image_is_told_with_those_that_are_present(
    store: ImageStore, registry: Registry, pushed: tuple[str, str], tmp_path: Path
):
    reference, _ = pushed
    await store.pull(reference)
    with pytest.raises(ImageUnavailable, match="its registry does not have it") as caught:
        await store.resolve(f"{registry.host}/t/nobody:1")
    assert caught.value.details["reason"] == "not_found"
    assert caught.value.details["available"] == ["host", reference]
    assert f"host, {reference}" in caught.value.message
    assert leftovers(tmp_path / "images") == []


async def test_a_registry_that_is_down_is_told(store: ImageStore):
    with pytest.raises(ImageUnavailable, match="cannot be reached") as caught:
        await store.resolve(f"localhost:{free_port()}/some/image:1")
    assert caught.value.details["reason"] == "unreachable"


async def test_a_registry_that_wants_a_login_is_told(store: ImageStore, programs: None, tmp_path: Path):
    passwords = tmp_path / "passwords"
    passwords.write_text("nobody:$2y$05$c4WoMPo3SXsafkva.HHa6uXQZWr7oboPiC2bT/r7q1BB8I2s0BRqC\n")
    registry = Registry(tmp_path, password_file=passwords)
    try:
        with pytest.raises(ImageUnavailable, match="requires a login") as caught:
            await store.resolve(f"{registry.host}/some/image:1")
    finally:
        registry.close()
    assert caught.value.details["reason"] == "unauthorised"
    assert caught.value.hint is not None
    assert "skopeo login" in caught.value.hint


async def test_a_missing_program_is_told_with_the_command_that_installs_it(
    store: ImageStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImageUnavailable, match="skopeo is not installed") as caught:
        await store.resolve("python:3.12")
    assert caught.value.details["reason"] == "tool_missing"
    assert caught.value.hint is not None
    assert "apt install skopeo umoci" in caught.value.hint


async def test_an_image_that_is_larger_than_allowed_is_refused_before_it_is_fetched(
    make_store, registry: Registry, pushed: tuple[str, str], tmp_path: Path
):
    reference, _ = pushed
    store = make_store(max_bytes=100_000)
    with pytest.raises(ImageUnavailable, match="is too large") as caught:
        await store.resolve(reference)
    assert caught.value.details["reason"] == "too_large"
    assert registry.requests(reference.partition("/")[2].rpartition(":")[0] + "/blobs/.*") == 0
    assert leftovers(tmp_path / "images") == []


async def test_an_image_that_grows_beyond_what_is_allowed_when_unpacked_is_stopped(
    make_store, registry: Registry, tmp_path: Path
):
    bomb = make_layout(tmp_path / "bomb", rootfs(file("zeros", bytes(128 * 1024 * 1024))))
    registry.push(bomb, "t/bomb:1")
    store = make_store(max_bytes=16 * 1024 * 1024)
    with pytest.raises(ImageUnavailable, match="too large: an image may have at most 16 MiB"):
        await store.resolve(f"{registry.host}/t/bomb:1")
    assert leftovers(tmp_path / "images") == []
    assert await store.list() == []
