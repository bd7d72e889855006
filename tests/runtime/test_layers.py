"""Layers made of layers, against overlayfs itself: what is seen must be the same. Needs root, for mounts of its own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

KEEPER = Path(__file__).parents[2] / "src/atoll/_bin/keeper"
OWNERS = (300_000, 400_000)
NAMES = ("a", "b", "c", "d")
ROUNDS = 12

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")


def keeper(*words: object) -> None:
    done = subprocess.run([KEEPER, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def clones(path: Path) -> bool:
    """Whether the file system shares data between files by itself."""
    told = subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True).stdout
    return told.strip() in {"btrfs", "xfs"}


# ---- several layers in one ----


def mount(target: Path, lower: list[Path], upper: Path | None = None, work: Path | None = None) -> None:
    options = "lowerdir=" + ":".join(map(str, lower))
    if upper:
        options += f",upperdir={upper},workdir={work}"
    options += ",redirect_dir=off,metacopy=off"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, target], check=True)


def unmount(target: Path) -> None:
    subprocess.run(["umount", target], check=True)


def disturb(root: Path, chance: random.Random) -> None:
    """Do something to a random place below `root`, as a program would."""
    path = root.joinpath(*chance.choices(NAMES, k=chance.choice((1, 1, 2, 2, 3))))
    other = root.joinpath(*chance.choices(NAMES, k=chance.randint(1, 2)))
    try:
        match chance.randrange(10):
            case 0 | 1:
                path.write_bytes(chance.randbytes(8))
            case 2 | 3:
                path.mkdir()
            case 4:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            case 8:
                shutil.rmtree(path)
                path.mkdir()
            case 5:
                path.symlink_to(chance.choice(NAMES))
            case 6:
                os.link(path, other, follow_symlinks=False)
            case 7:
                subprocess.run(["mv", "-T", path, other], capture_output=True, check=False)
            case _:
                os.chown(path, OWNERS[0] + 1000, OWNERS[0] + 1000, follow_symlinks=False)
                os.chmod(path, 0o700 + chance.randrange(64))
                os.setxattr(path, f"user.{chance.choice(NAMES)}", chance.randbytes(3))
                os.removexattr(path, f"user.{chance.choice(NAMES)}")
    except OSError:
        pass  # there is nothing of that name, or something else


def view(root: Path) -> dict[str, object]:
    seen: dict[str, object] = {}
    for directory, directories, files in os.walk(root):
        for name in (".", *directories, *files):
            path = Path(directory, name)
            status = path.lstat()
            content: object = None
            if path.is_symlink():
                content = os.readlink(path)
            elif path.is_file():
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            attributes = {x: os.getxattr(path, x).hex() for x in os.listxattr(path, follow_symlinks=False)}
            seen[str(path.relative_to(root))] = [
                *(status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, content),
                {name: value for name, value in attributes.items() if name.startswith("user.")},
            ]
    return seen


def make_layers(base: Path, image: Path, chance: random.Random, merged: Path) -> list[Path]:
    """Layers that overlayfs has written, each above the one before; the last one on top."""
    layers: list[Path] = []
    for number in range(chance.randint(2, 6)):
        layer = base / f"layer-{number}"
        for part in ("upper/root", "work/root"):
            (layer / part).mkdir(parents=True)
        os.chown(layer / "upper/root", OWNERS[0], OWNERS[0])
        below = [each / "upper/root" for each in reversed(layers)]
        mount(merged, [*below, image], layer / "upper/root", layer / "work/root")
        for _ in range(chance.randint(4, 30)):
            disturb(merged, chance)
        unmount(merged)
        layers.append(layer)
    return layers


def compare_merged(base: Path, seed: int) -> None:
    chance = random.Random(seed)
    image, merged, target = base / "image", base / "merged", base / "target"
    for path in (image, merged, target):
        path.mkdir(parents=True)
    os.chown(image, OWNERS[0], OWNERS[0])
    for _ in range(60):
        disturb(image, chance)
    layers = make_layers(base, image, chance, merged)
    mount(merged, [*(each / "upper/root" for each in reversed(layers)), image])
    wanted = view(merged)
    unmount(merged)
    keeper("merge", "--", target, OWNERS[0], *(word for layer in layers for word in (layer, OWNERS[0])))
    mount(merged, [target / "upper/root", image])
    found = view(merged)
    unmount(merged)
    assert found == wanted, (
        f"seed {seed}: {[(k, wanted.get(k), found.get(k)) for k in wanted | found if wanted.get(k) != found.get(k)]}"
    )


@pytest.mark.parametrize("first", [0, 1000])
def test_several_layers_in_one_show_what_they_showed(tmp_path: Path, first: int) -> None:
    # In a mount namespace of its own, which takes all mounts along when it ends.
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", "tests.runtime.test_layers"]
    seeds = json.dumps(list(range(first, first + ROUNDS)))
    done = subprocess.run([*command, str(tmp_path), seeds], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_layers_of_several_owners_become_one_of_one(tmp_path: Path) -> None:
    lower, upper, target = tmp_path / "lower", tmp_path / "upper", tmp_path / "target"
    for layer, owner in ((lower, OWNERS[0]), (upper, OWNERS[1])):
        (layer / "upper/root/both").mkdir(parents=True)
        for path in (layer / "upper/root", layer / "upper/root/both", layer / "upper/root/both" / layer.name):
            if not path.exists():
                path.write_text(layer.name)
            os.chown(path, owner + 1000, owner + 100)
    target.mkdir()
    keeper("merge", "--", target, OWNERS[1], lower, OWNERS[0], upper, OWNERS[1])
    found = sorted((target / "upper/root").rglob("*"))
    assert [path.name for path in found] == ["both", "lower", "upper"]
    assert {(path.stat().st_uid, path.stat().st_gid) for path in found} == {(OWNERS[1] + 1000, OWNERS[1] + 100)}
    # What has the right owner is not there twice; what had not, is.
    assert clones(tmp_path) or (target / "upper/root/both/upper").samefile(upper / "upper/root/both/upper")
    assert (lower / "upper/root/both/lower").stat().st_uid == OWNERS[0] + 1000


# ---- the same layer again ----


def test_what_has_not_changed_since_is_not_copied_again(tmp_path: Path) -> None:
    source, first, second = tmp_path / "source", tmp_path / "first", tmp_path / "second"
    root = source / "upper/root"
    (root / "old").mkdir(parents=True)
    (root / "new").mkdir()
    for name in ("same", "written", "chmodded", "gone", "old/swapped", "new/swapped"):
        (root / name).write_text(name)
        os.utime(root / name, (1, 1))
    time.sleep(0.2)  # until what is there counts as settled
    for layer in (first, second):
        layer.mkdir()
    keeper("copy", "--", source, first)
    (root / "written").write_text("changed")  # as long as before
    os.utime(root / "written", (1, 1))
    (root / "chmodded").chmod(0o600)
    (root / "gone").unlink()
    # A directory takes another's place: its files were not touched, and look like those that were there.
    (root / "old").rename(root / "older")
    (root / "new").rename(root / "old")
    keeper("copy", "--", source, second, first)
    copied, before = second / "upper/root", first / "upper/root"
    found = {str(path.relative_to(copied)) for path in copied.rglob("*")}
    assert found == {"same", "written", "chmodded", "old", "old/swapped", "older", "older/swapped"}
    assert (copied / "written").read_text() == "changed"
    assert (copied / "chmodded").stat().st_mode & 0o777 == 0o600
    assert (before / "chmodded").stat().st_mode & 0o777 != 0o600
    assert (copied / "old/swapped").read_text() == "new/swapped"
    assert (copied / "older/swapped").read_text() == "old/swapped"
    if not clones(tmp_path):
        assert (copied / "same").samefile(before / "same")
        assert not (copied / "written").samefile(before / "written")
        assert not (copied / "old/swapped").samefile(before / "old/swapped")
    assert not (copied / "same").samefile(root / "same"), "what the sandbox writes to is nobody else's"


def test_what_was_changed_just_now_is_copied_again(tmp_path: Path) -> None:
    source, first, second = tmp_path / "source", tmp_path / "first", tmp_path / "second"
    (source / "upper/root").mkdir(parents=True)
    file = source / "upper/root/file"
    for layer in (first, second):
        layer.mkdir()
    file.write_text("one")
    keeper("copy", "--", source, first)
    keeper("copy", "--", source, second, first)
    # Its time of change would not tell of a second change within the same tick of the clock.
    assert not (second / "upper/root/file").samefile(first / "upper/root/file")


def test_an_earlier_copy_that_is_gone_or_broken_is_no_matter(tmp_path: Path) -> None:
    source, first = tmp_path / "source", tmp_path / "first"
    (source / "upper/root").mkdir(parents=True)
    (source / "upper/root/file").write_text("one")
    time.sleep(0.2)
    first.mkdir()
    keeper("copy", "--", source, first)
    harms: list[Callable[[], object]] = [
        lambda: (first / "index").write_bytes((first / "index").read_bytes()[:-1]),
        (first / "upper/root/file").unlink,
        (first / "index").unlink,
        lambda: shutil.rmtree(first),
    ]
    for number, harm in enumerate(harms):
        harm()
        target = tmp_path / f"again-{number}"
        target.mkdir()
        keeper("copy", "--", source, target, first)
        assert (target / "upper/root/file").read_text() == "one"


if __name__ == "__main__":
    for _seed in json.loads(sys.argv[2]):
        compare_merged(Path(sys.argv[1]) / str(_seed), _seed)


# ---- hard links ----


def _deep(root: Path, levels: int = 25) -> int:
    """A descriptor of a directory whose path is too long for a system call. Made if it is not there."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(levels):
        with contextlib.suppress(FileExistsError):
            os.mkdir("d" * 200, dir_fd=fd)
        inner = os.open("d" * 200, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = inner
    return fd


def _size_kib(path: Path) -> int:
    return int(subprocess.run(["du", "-sk", path], capture_output=True, text=True, check=True).stdout.split()[0])


@pytest.mark.parametrize("first", ["short", "long"])
def test_names_beyond_the_longest_path_stay_names_of_one_file(tmp_path: Path, first: str) -> None:
    source, one, two, merged = (tmp_path / name for name in ("source", "one", "two", "merged"))
    root = source / "upper/root"
    root.mkdir(parents=True)
    for layer in (one, two, merged):
        layer.mkdir()
    short = root / ("a" if first == "short" else "z")
    short.write_bytes(os.urandom(8 << 20))
    (root / "other").write_bytes(b"x" * 4096)
    deep = _deep(root)
    for i in range(60):
        os.link(short, f"n{i}", dst_dir_fd=deep)
        os.link(root / "other", f"o{i}", dst_dir_fd=deep)
    os.close(deep)
    time.sleep(0.2)  # until what is there counts as settled
    keeper("copy", "--", source, one)
    keeper("copy", "--", source, two, one)
    keeper("merge", "--", merged, OWNERS[0], two, OWNERS[1])
    for layer in (one, two, merged):
        assert not (layer / "twins").exists()
        deep = _deep(layer / "upper/root")
        names = [os.stat(f"n{i}", dir_fd=deep) for i in range(60)]
        os.close(deep)
        copy = (layer / "upper/root" / short.name).stat()
        assert {(each.st_ino, each.st_size) for each in names} == {(copy.st_ino, 8 << 20)}
        assert copy.st_nlink >= 61
        assert _size_kib(layer) < 10 << 10
