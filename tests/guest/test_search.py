"""GLOB and GREP."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.guest.client import Guest, N, records


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (
        "a.py", "b.txt", ".hidden.py", "src/main.py", "src/util.ts", "src/deep/er/x.py", "src/deep/y.tsx",
        ".git/config.py", "[x].md", "{x}.md", "ü.md", "docs/readme.md",
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"this is {name}\n")
    (tmp_path / "link").symlink_to("src")
    return tmp_path


def names(guest: Guest, tree: Path, pattern: str, **more: Any) -> list[str]:
    return [os.fsdecode(r["NAME"]) for r in guest.records("GLOB", PATH=str(tree), PATTERN=pattern, **more)]


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("*.py", ["a.py"]),
        (".*.py", [".hidden.py"]),
        ("**/*.py", ["a.py", "src/deep/er/x.py", "src/main.py"]),
        ("src/**", ["src/deep", "src/deep/er", "src/deep/er/x.py", "src/deep/y.tsx", "src/main.py", "src/util.ts"]),
        ("src/**/*.{ts,tsx}", ["src/deep/y.tsx", "src/util.ts"]),
        ("{src/*,*}.py", ["a.py", "src/main.py"]),
        ("s?c/m[a-c]in.py", ["src/main.py"]),
        ("src/[!m]*", ["src/deep", "src/util.ts"]),
        ("?.md", ["ü.md"]),
        ("\\[x].md", ["[x].md"]),
        ("[[]x].md", ["[x].md"]),
        ("\\{x}.md", ["{x}.md"]),
        ("{x}.md", ["{x}.md"]),
        ("*/", ["docs/", "link/", "src/"]),
        ("link/*.py", ["link/main.py"]),
        ("link/**/x.py", ["link/deep/er/x.py"]),
        ("**/deep/**/x.py", ["src/deep/er/x.py"]),
        ("./src//main.py", ["src/main.py"]),
        ("[[:alpha:]].py", ["a.py"]),
        ("nothing*", []),
        ("**/**/**/main.py", ["src/main.py"]),
    ],
)
def test_a_pattern_finds_what_it_says(guest: Guest, tree: Path, pattern: str, wanted: list[str]) -> None:
    assert names(guest, tree, pattern) == [name.rstrip("/") for name in wanted]


def test_hidden_names_are_found_when_asked_for(guest: Guest, tree: Path) -> None:
    found = names(guest, tree, "**/*.py", HIDDEN=1)
    assert ".git/config.py" in found
    assert ".hidden.py" in found


def test_matches_come_with_what_they_are_and_in_order(guest: Guest, tree: Path) -> None:
    found = guest.records("GLOB", PATH=str(tree), PATTERN="**")
    listed = [r["NAME"] for r in found]
    assert listed == sorted(listed, key=lambda name: name.split(b"/"))
    by_name = {r["NAME"]: r for r in found}
    assert by_name[b"link"]["KIND"] == N["KIND_SYMLINK"]
    assert by_name[b"link"]["TARGET"] == b"src"
    assert not any(name.startswith(b"link/") for name in listed)


def test_a_limit_cuts_and_says_so(guest: Guest, tree: Path) -> None:
    stream = guest.run("GLOB", PATH=str(tree), PATTERN="**/*.py", LIMIT=2)
    assert stream.end == {"COUNT": 2, "TRUNCATED": 1}
    assert len(records(stream.out)) == 2
    stream = guest.run("GLOB", PATH=str(tree), PATTERN="**/*.py", LIMIT=3)
    assert stream.end == {"COUNT": 3, "TRUNCATED": 0}


@pytest.mark.parametrize("pattern", ["/abs", "a/../b", "", "{a,b}" * 12, "x" * 5000])
def test_a_bad_pattern_is_einval(guest: Guest, tree: Path, pattern: str) -> None:
    assert guest.run("GLOB", PATH=str(tree), PATTERN=pattern).end["ERRNO"] == errno.EINVAL


def test_a_loop_of_links_comes_to_an_end(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(".")
    (tmp_path / "file").touch()
    assert names(guest, tmp_path, "**") == ["file", "loop"]
    assert names(guest, tmp_path, "*/*/file") == ["loop/loop/file"]


def test_a_deep_and_wide_tree_costs_few_descriptors(guest: Guest, tmp_path: Path) -> None:
    path = tmp_path
    for _ in range(150):
        path = path / "directory"
    path.mkdir(parents=True)
    (path / "found").touch()
    (found,) = names(guest, tmp_path, "**/found")
    assert found == "directory/" * 150 + "found"


def test_hostile_stars_do_not_take_for_ever(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / ("a" * 250)).touch()
    started = time.monotonic()
    assert names(guest, tmp_path, "*a" * 60 + "*b") == []
    assert time.monotonic() - started < 2


def lines(guest: Guest, path: Path, pattern: str, **more: Any) -> list[tuple[str, int, bytes]]:
    found = guest.records("GREP", PATH=str(path), PATTERN=pattern, **more)
    return [(os.fsdecode(r["NAME"]), r["LINE"], r["TEXT"]) for r in found]


def test_grep_finds_lines_in_a_tree_or_a_file(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("one\ntwo needle\nthree\n\nneedle")
    (tmp_path / "sub" / "b.py").write_text("needle = 1\n")
    (tmp_path / ".hidden").write_text("needle\n")
    (tmp_path / "binary").write_bytes(b"needle\0\n")
    (tmp_path / "link").symlink_to("a.txt")
    assert lines(guest, tmp_path, "needle") == [
        ("a.txt", 2, b"two needle"), ("a.txt", 5, b"needle"), ("sub/b.py", 1, b"needle = 1"),
    ]  # fmt: skip
    assert lines(guest, tmp_path / "a.txt", "needle") == [("", 2, b"two needle"), ("", 5, b"needle")]
    assert lines(guest, tmp_path, "needle", INCLUDE="*.{py,rs}") == [("sub/b.py", 1, b"needle = 1")]
    assert (".hidden", 1, b"needle") in lines(guest, tmp_path, "needle", HIDDEN=1)
    assert len(lines(guest, tmp_path, "NEEDLE", IGNORE_CASE=1)) == 3
    assert lines(guest, tmp_path, "NEEDLE") == []
    assert guest.run("GREP", PATH=str(tmp_path), PATTERN="needle", LIMIT=2).end == {"COUNT": 2, "TRUNCATED": 1}


@pytest.mark.parametrize(
    ("pattern", "numbers"),
    [
        ("^foo", [1, 4]), ("bar$", [1, 3]), ("^$", [5]), ("fo+ ?b", [1]), ("(foo|x)y", [6]), ("b[aeiou]r", [1, 3, 4]),
        ("a{2}", [6]), ("foo\\.x", [4]), ("z?y", [6]), ("colou?r", [7]), ("(col)?our", [7]), ("o{0,3}lour", [7]),
        ("f.*r", [1, 4]), ("\\bbar\\b", [1, 3, 4]), ("", [1, 2, 3, 4, 5, 6, 7]), ("o*", [1, 2, 3, 4, 5, 6, 7]),
    ],
)  # fmt: skip
def test_extended_expressions_match_as_grep_does(
    guest: Guest, tmp_path: Path, pattern: str, numbers: list[int]
) -> None:
    path = tmp_path / "file"
    path.write_text("foo bar\nnothing\n bar\nfoo.x bar!\n\nxyaa\ncolour\n")
    assert [line for _, line, _ in lines(guest, path, pattern)] == numbers
    grep = subprocess.run(["grep", "-nE", "--", pattern, path], capture_output=True, text=True, check=False)
    assert numbers == [int(line.split(":")[0]) for line in grep.stdout.splitlines()]


def test_long_lines_are_cut_and_counted_once(guest: Guest, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 3_000_000 + b"needle\n" + b"needle " + b"y" * 10_000 + b"\nneedle at the end")
    found = lines(guest, path, "needle")
    assert [(line, len(text)) for _, line, text in found] == [(2, 4096), (3, 17)]


def test_matches_come_with_the_lines_around_them(guest: Guest, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"needle 1\n\ntwo\nneedle 4\n" + b"x" * 20_000 + b"\nneedle 6\nlast")

    def around(context: int) -> list[tuple[bytes | None, bytes | None]]:
        found = guest.records("GREP", PATH=str(path), PATTERN="needle", CONTEXT=context)
        return [(each.get("BEFORE"), each.get("AFTER")) for each in found]

    cut = b"x" * 8191
    assert around(1) == [(None, b""), (b"two", cut + b"x"), (cut, b"last")]
    assert around(2) == [(None, b"\ntwo"), (b"\ntwo", cut + b"x"), (cut, b"last")]
    assert around(100)[1][0] == b"needle 1\n\ntwo"
    assert guest.run("GREP", PATH=str(path), PATTERN="needle", CONTEXT=2).end == {
        "COUNT": 3, "TRUNCATED": 0, "CONTEXT": 2,
    }  # fmt: skip
    for wrong in (-1, 101):
        assert guest.run("GREP", PATH=str(path), PATTERN="needle", CONTEXT=wrong).end["ERRNO"] == errno.EINVAL


def test_lines_around_a_match_are_right_across_blocks_and_long_lines(guest: Guest, tmp_path: Path) -> None:
    path = tmp_path / "file"
    numbered = [b"%d" % number for number in range(200_000)]
    path.write_bytes(b"\n".join(numbered) + b"\n" + b"y" * 2_000_000 + b"\nneedle\nafter")
    found = guest.records("GREP", PATH=str(path), PATTERN="000$", CONTEXT=1)
    assert len(found) == 199
    for each in found:
        at = int(each["TEXT"])
        assert (each["LINE"], each["BEFORE"], each["AFTER"]) == (at + 1, b"%d" % (at - 1), b"%d" % (at + 1))
    [last] = guest.records("GREP", PATH=str(path), PATTERN="needle", CONTEXT=1)
    assert (last["LINE"], last["BEFORE"], last["AFTER"]) == (200_002, b"y" * 8191, b"after")


def test_a_bad_expression_is_einval_with_a_message(guest: Guest, tmp_path: Path) -> None:
    end = guest.run("GREP", PATH=str(tmp_path), PATTERN="a(b").end
    assert end["ERRNO"] == errno.EINVAL
    assert end["MESSAGE"]


def test_a_hostile_expression_hurts_only_itself(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a" * 3000 + "\n")
    for pattern in ("((((a{1,255}){1,255}){1,255}){1,255})", "(" * 20000 + ")" * 20000, "(a*)*\\1b" * 50):
        stream = guest.open("GREP", PATH=str(tmp_path), PATTERN=pattern)
        assert guest.run("STAT", PATH="/").end["KIND"] == 2
        stream.reset()
        stream.wait()
    assert guest.status("VmRSS") < 4096


def test_many_matches_arrive_whole(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("".join(f"line {i}\n" for i in range(100_000)))
    found = lines(guest, tmp_path, "line")
    assert len(found) == 100_000
    assert found[-1] == ("file", 100_000, b"line 99999")
