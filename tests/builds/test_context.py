"""The files of a build: which of a directory there are, and what identifies them."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from atoll.builds.context import BuildContext, IgnorePatterns
from atoll.contract.errors import BuildFailed


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in (
        "a.txt",
        "b.txt",
        "notes.log",
        "src/main.py",
        "src/deep/x.log",
        "src/deep/keep.log",
        "node_modules/m/i.js",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".dockerignore").write_text("# comment\n**/*.log\n!src/deep/keep.log\nnode_modules\n")
    (tmp_path / "link").symlink_to("/etc/passwd")
    (tmp_path / "src" / "up").symlink_to("..")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


async def names(context: BuildContext, *patterns: str) -> dict[str, tarfile.TarInfo]:
    archive, _ = context.pack(patterns)
    content = b"".join([piece async for piece in context.read(archive)])
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        return {member.name: member for member in tar}


async def test_what_is_ignored_is_left_out_and_symlinks_are_not_followed(root: Path) -> None:
    found = await names(BuildContext(root), ".")
    assert sorted(found) == [
        ".dockerignore",
        "a.txt",
        "b.txt",
        "link",
        "src",
        "src/deep",
        "src/deep/keep.log",
        "src/main.py",
        "src/up",
    ]
    assert found["link"].issym()
    assert found["link"].linkname == "/etc/passwd"
    assert sorted(await names(BuildContext(root), "*.txt", "src/**/*.py")) == ["a.txt", "b.txt", "src/main.py"]


def test_the_same_content_has_the_same_name_and_another_has_another(root: Path) -> None:
    first, names_of_first = BuildContext(root).pack(["src"])
    assert names_of_first == ("src",)
    os.utime(root / "src" / "main.py", (1, 1))
    assert BuildContext(root).pack(["src"])[0] == first
    (root / "src" / "deep" / "x.log").write_text("ignored")
    assert BuildContext(root).pack(["src"])[0] == first
    (root / "src" / "main.py").write_text("other")
    second = BuildContext(root).pack(["src"])[0]
    assert second != first
    (root / "src" / "main.py").chmod(0o755)
    assert BuildContext(root).pack(["src"])[0] != second


@pytest.mark.parametrize("pattern", ["../x", "src/../../etc", "missing", "*.none", "node_modules", "pipe", ""])
def test_a_pattern_that_leads_outside_or_matches_nothing_is_refused(root: Path, pattern: str) -> None:
    with pytest.raises(BuildFailed):
        BuildContext(root).pack([pattern])


async def test_a_file_that_becomes_a_symlink_while_it_is_packed_is_not_followed(root: Path) -> None:
    context = BuildContext(root)
    archive, _ = context.pack(["a.txt"])
    (root / "a.txt").unlink()
    (root / "a.txt").symlink_to("/etc/passwd")
    with pytest.raises(BuildFailed, match="cannot be read"):
        _ = [piece async for piece in context.read(archive)]


def test_the_last_pattern_that_matches_decides() -> None:
    patterns = IgnorePatterns(["*", "!src", "src/*.tmp", "/build/", "a[0-9].?"])
    assert [name for name in ("x", "src", "src/a.c", "src/a.tmp", "build/x") if not patterns.match(name)] == [
        "src",
        "src/a.c",
    ]
    assert IgnorePatterns(["a[0-9].?"]).match("a1.x")
    assert not IgnorePatterns(["a[0-9].?"]).match("dir/a1.x")
    assert IgnorePatterns(["**/a"]).match("x/y/a/below")
