"""`glob`, `grep` and `watch`: find files, and see them change."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator

import anyio
import pytest

from atoll import FileChange, InvalidRequest, PathNotFound, PermissionDenied, Sandbox

TREE = {
    "a.py": "import os\nprint('ä')\n",
    "b.txt": "text\nIMPORT\n",
    ".hidden.py": "import secret\n",
    "src/c.py": "import re\n",
    "src/deep/er/d.py": "def main():\n    return 1\n",
    "src/deep/e.md": "# import\n",
    ".git/config.py": "import git\n",
    "with space/f [1].py": "x = 'import'\n",
}


@pytest.fixture(scope="module")
async def tree(shared: Sandbox) -> str:
    for name, text in TREE.items():
        await shared.files.write_text(f"tree/{name}", text)
    return "tree"


# ---- glob ----


@pytest.mark.core
@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.py", ["a.py"]),
        ("?.txt", ["b.txt"]),
        ("[ab].*", ["a.py", "b.txt"]),
        ("[!a].*", ["b.txt"]),
        ("*.{py,txt}", ["a.py", "b.txt"]),
        ("**/*.py", ["a.py", "src/c.py", "src/deep/er/d.py", "with space/f [1].py"]),
        ("src/**/*.py", ["src/c.py", "src/deep/er/d.py"]),
        ("src/*", ["src/c.py", "src/deep"]),
        ("*/*.py", ["src/c.py", "with space/f [1].py"]),
        (".*.py", [".hidden.py"]),
        (".git/*", [".git/config.py"]),
        ("src/deep/e.md", ["src/deep/e.md"]),
        ("with space/f \\[1\\].py", ["with space/f [1].py"]),
        ("nothing*", []),
    ],
)
async def test_glob_matches_as_it_says(shared: Sandbox, tree: str, pattern: str, found: list[str]) -> None:
    assert sorted(entry.name for entry in await shared.files.glob(pattern, cwd=tree)) == found


async def test_glob_with_hidden_sees_everything(shared: Sandbox, tree: str) -> None:
    names = {entry.name for entry in await shared.files.glob("**/*.py", cwd=tree, hidden=True)}
    assert names == {name for name in TREE if name.endswith(".py")}


@pytest.mark.core
async def test_glob_says_what_it_found(shared: Sandbox, tree: str, user_id: int) -> None:
    entries = {entry.name: entry for entry in await shared.files.glob("**", cwd=tree)}
    assert entries["src"].kind == "directory"
    assert entries["src/c.py"].kind == "file"
    assert entries["src/c.py"].size == len(TREE["src/c.py"])
    assert entries["src/c.py"].uid == user_id


async def test_glob_gives_names_in_byte_order_within_a_directory_and_keeps_to_its_limit(
    shared: Sandbox, here: str
) -> None:
    await shared.exec("touch b a é B 10 9", cwd=f"/home/user/{here}")
    names = [entry.name for entry in await shared.files.glob("*", cwd=here)]
    assert names == ["10", "9", "B", "a", "b", "é"]
    assert [entry.name for entry in await shared.files.glob("*", cwd=here, limit=2)] == ["10", "9"]
    with pytest.raises(InvalidRequest):
        await shared.files.glob("*", cwd=here, limit=0)


async def test_glob_keeps_names_that_are_not_utf8(shared: Sandbox, here: str) -> None:
    name = os.fsdecode(b"\xff new\nline")
    await shared.files.write_bytes(f"{here}/{name}", b"")
    assert [entry.name for entry in await shared.files.glob("*", cwd=here)] == [name]


async def test_glob_does_not_run_in_circles(shared: Sandbox, here: str) -> None:
    await shared.files.mkdir(f"{here}/a/b")
    await shared.files.symlink(f"{here}/a/b/loop", "../..")
    with anyio.fail_after(20):
        names = [entry.name for entry in await shared.files.glob("**", cwd=here)]
    assert sorted(names) == ["a", "a/b", "a/b/loop"]


async def test_glob_in_a_directory_that_is_none_is_not_found(shared: Sandbox) -> None:
    with pytest.raises(PathNotFound):
        await shared.files.glob("*", cwd="no/such")


async def test_glob_passes_over_what_the_user_may_not_read(shared: Sandbox, single_id: bool) -> None:
    if single_id:
        pytest.skip("with one id for all, the user is root")
    entries = await shared.files.glob("{root,root/*,tmp}", cwd="/")
    assert {entry.name for entry in entries} == {"root", "tmp"}
    with pytest.raises(PermissionDenied):
        await shared.files.glob("*", cwd="/root")


# ---- grep ----


@pytest.mark.core
async def test_grep_says_file_line_and_text(shared: Sandbox, tree: str) -> None:
    found = {(match.path, match.line, match.text) for match in await shared.files.grep("import", tree)}
    assert found == {
        ("a.py", 1, "import os"),
        ("src/c.py", 1, "import re"),
        ("src/deep/e.md", 1, "# import"),
        ("with space/f [1].py", 1, "x = 'import'"),
    }


async def test_grep_in_hidden_files_ignoring_case_and_only_where_told(shared: Sandbox, tree: str) -> None:
    async def paths(pattern: str, **options: object) -> set[str]:
        return {match.path for match in await shared.files.grep(pattern, tree, **options)}  # type: ignore[arg-type]

    assert await paths("^IMPORT$", ignore_case=True) == {"b.txt"}
    assert await paths("^import", hidden=True) == {"a.py", "src/c.py", ".hidden.py", ".git/config.py"}
    assert await paths("import", include="*.md") == {"src/deep/e.md"}
    assert await paths("import", include="*.{md,txt}", ignore_case=True) == {"src/deep/e.md", "b.txt"}
    assert await paths("(os|re)$") == {"a.py", "src/c.py"}
    assert await paths("no such text") == set()


@pytest.mark.parametrize(
    ("include", "found"),
    [
        ("*.py", {"a.py", "src/c.py", "with space/f [1].py"}),
        ("**/*.py", {"a.py", "src/c.py", "with space/f [1].py"}),
        ("./*.py", {"a.py"}),
        ("src/*.py", {"src/c.py"}),
        ("*/*.py", {"src/c.py", "with space/f [1].py"}),
        ("src/**", {"src/c.py", "src/deep/e.md"}),
        ("{src/deep,nothing}/*", {"src/deep/e.md"}),
        ("src/deep/*.py", set()),
        ("src", set()),
    ],
)
async def test_grep_includes_files_by_name_or_with_a_slash_by_path(
    shared: Sandbox, tree: str, include: str, found: set[str]
) -> None:
    assert {match.path for match in await shared.files.grep("import", tree, include=include)} == found


async def test_grep_with_an_include_of_a_path_keeps_out_hidden_files_unless_asked(shared: Sandbox, tree: str) -> None:
    assert await shared.files.grep("import", tree, include=".git/*") == []
    [match] = await shared.files.grep("import", tree, include=".git/*", hidden=True)
    assert match.path == ".git/config.py"


@pytest.mark.parametrize("text", ["a.b", "a*b(c)", "[x]{2}", "^a|b$", "\\d+?", "plain", "\\", "a{b,c}"])
async def test_grep_finds_a_literal_as_it_is(shared: Sandbox, here: str, text: str) -> None:
    await shared.files.write_text(f"{here}/file", f"nothing aXb abc x2 ad d\nhere {text} it is\n")
    found = await shared.files.grep(text, here, literal=True)
    assert [(match.line, match.text) for match in found] == [(2, f"here {text} it is")]
    found = await shared.files.grep(text.upper(), here, literal=True, ignore_case=True)
    assert [match.line for match in found] == [2]


@pytest.mark.core
async def test_grep_means_by_a_pattern_what_other_engines_mean(shared: Sandbox, here: str) -> None:
    await shared.files.write_text(f"{here}/file", "x = 42\nx = y\nme.you-a@b.org\nÄ\n")

    async def lines(pattern: str) -> list[int]:
        return [match.line for match in await shared.files.grep(pattern, here)]

    assert await lines(r"\d+") == [1]
    assert await lines(r"^[\w.-]+@\w+") == [3]
    assert await lines(r"^X = .*?[^\d\W]$") == []
    assert await lines(r"(?i)^X = .*?[^\d\W]$") == [2]
    assert await lines(r"(?i)^ä$") == await lines(r"^.$") == [4]
    with pytest.raises(InvalidRequest, match=r"look-around, \(\?=…\), is not supported"):
        await lines("x(?= = y)")


async def test_grep_returns_the_lines_around_a_match(shared: Sandbox, here: str) -> None:
    await shared.files.write_text(f"{here}/file", "one\ntwo\n\nfour\nfive")
    [match] = await shared.files.grep("two", here, context=2)
    assert (match.before, match.text, match.after) == (("one",), "two", ("", "four"))
    [match] = await shared.files.grep("five", here, context=1)
    assert (match.before, match.after) == (("four",), ())
    [match] = await shared.files.grep("four", here)
    assert (match.before, match.after) == ((), ())
    for wrong in (-1, 101):
        with pytest.raises(InvalidRequest, match="0 to 100 lines"):
            await shared.files.grep("two", here, context=wrong)


async def test_grep_in_one_file_names_it_as_asked(shared: Sandbox, tree: str) -> None:
    [match] = await shared.files.grep("^def", f"{tree}/src/deep/er/d.py")
    assert (match.path, match.line, match.text) == (f"{tree}/src/deep/er/d.py", 1, "def main():")


async def test_grep_passes_over_binary_files_and_long_lines_are_cut(shared: Sandbox, here: str) -> None:
    await shared.files.write_bytes(f"{here}/binary", b"needle\0needle\n")
    await shared.files.write_bytes(f"{here}/long", b"needle" + b"x" * 100_000 + b"\nneedle\xff last without newline")
    found = sorted(await shared.files.grep("needle", here), key=lambda match: match.line)
    assert [(match.path, match.line) for match in found] == [("long", 1), ("long", 2)]
    assert found[0].text == "needle" + "x" * 4090
    assert found[1].text == "needle� last without newline"


async def test_grep_keeps_to_its_limit(shared: Sandbox, here: str) -> None:
    await shared.exec(f"seq 1 5000 > {here}/numbers")
    assert len(await shared.files.grep("[0-9]", here)) == 1000
    matches = await shared.files.grep("[0-9]", here, limit=7)
    assert [match.line for match in matches] == list(range(1, 8))
    assert len(await shared.files.grep("[0-9]", here, limit=100_000)) == 5000


@pytest.mark.parametrize("pattern", ["(", "a{2,1}", "[a"])
async def test_a_pattern_that_is_none_is_an_invalid_request(shared: Sandbox, tree: str, pattern: str) -> None:
    with pytest.raises(InvalidRequest):
        await shared.files.grep(pattern, tree)


async def test_grep_of_nothing_is_not_found(shared: Sandbox) -> None:
    with pytest.raises(PathNotFound):
        await shared.files.grep("x", "no/such")


# ---- watch ----


async def changes_until(changes: AsyncIterator[FileChange], last: tuple[str, str]) -> list[tuple[str, str]]:
    """The changes that are seen, up to a certain one."""
    seen: list[tuple[str, str]] = []
    with anyio.fail_after(20):
        async for change in changes:
            seen.append((change.change, change.path))
            if seen[-1] == last:
                return seen
    raise AssertionError(f"the watch ended; it saw {seen}")


@pytest.mark.core
async def test_whatever_happens_after_entry_is_seen(shared: Sandbox, here: str) -> None:
    await shared.files.write_bytes(f"{here}/old", b"")
    async with shared.files.watch(here) as changes:
        await shared.exec("echo x > new && echo y >> old && mv new moved && chmod 600 moved && rm old", cwd=f"./{here}")
        seen = await changes_until(changes, ("deleted", "old"))
    for expected in (
        ("created", "new"),
        ("modified", "new"),
        ("modified", "old"),
        ("moved_from", "new"),
        ("moved_to", "moved"),
        ("attributes", "moved"),
    ):
        assert expected in seen
    assert seen.index(("created", "new")) < seen.index(("moved_to", "moved"))


async def test_a_watch_says_what_kind_of_file_it_is(shared: Sandbox, here: str) -> None:
    async with shared.files.watch(here) as changes:
        await shared.files.mkdir(f"{here}/directory")
        with anyio.fail_after(20):
            change = await anext(changes)
    assert (change.change, change.path, change.kind) == ("created", "directory", "directory")


async def test_a_watch_sees_what_happens_in_directories_that_are_made_meanwhile(shared: Sandbox, here: str) -> None:
    async with shared.files.watch(here) as changes:
        await shared.exec("mkdir -p a/b/c && echo x > a/b/c/file", cwd=f"./{here}")
        seen = await changes_until(changes, ("created", "a/b/c/file"))
        assert ("created", "a") in seen
        await shared.exec("echo y > a/b/c/second", cwd=f"./{here}")
        await changes_until(changes, ("created", "a/b/c/second"))


async def test_a_watch_that_is_not_recursive_sees_only_its_own_directory(shared: Sandbox, here: str) -> None:
    await shared.files.mkdir(f"{here}/below")
    async with shared.files.watch(here, recursive=False) as changes:
        await shared.files.write_bytes(f"{here}/below/deep", b"", atomic=False)
        await shared.files.write_bytes(f"{here}/last", b"", atomic=False)
        seen = await changes_until(changes, ("created", "last"))
    assert not any("deep" in path for _, path in seen)


async def test_a_file_alone_can_be_watched(shared: Sandbox, here: str) -> None:
    await shared.files.write_bytes(f"{here}/file", b"")
    async with shared.files.watch(f"{here}/file") as changes:
        await shared.files.write_bytes(f"{here}/other", b"", atomic=False)
        await shared.exec(f"echo x >> {here}/file")
        with anyio.fail_after(20):
            async for change in changes:
                if change.change == "modified":
                    break
                assert "other" not in change.path


async def test_an_atomic_write_is_seen_as_the_file_that_appears(shared: Sandbox, here: str) -> None:
    async with shared.files.watch(here) as changes:
        await shared.files.write_bytes(f"{here}/file", b"x")
        with anyio.fail_after(20):
            async for change in changes:
                if change.path == "file":
                    assert change.change in {"created", "moved_to"}
                    break


async def test_a_watch_that_is_not_read_says_that_it_lost_something_or_has_it_all(shared: Sandbox, here: str) -> None:
    async with shared.files.watch(here) as changes:
        await shared.exec("i=0; while [ $i -lt 1000 ]; do : > f$i; i=$((i + 1)); done", cwd=f"./{here}")
        seen: set[str] = set()
        with anyio.fail_after(30):
            async for change in changes:
                if change.change == "lost":
                    break
                if re.fullmatch(r"f\d+", change.path):
                    seen.add(change.path)
                if len(seen) == 1000:
                    break


async def test_watching_what_is_not_there_is_not_found(shared: Sandbox) -> None:
    with pytest.raises(PathNotFound):
        async with shared.files.watch("no/such"):
            pass


async def test_many_watches_end_without_a_trace(shared: Sandbox, here: str) -> None:
    before = len(await shared.ps())
    for _ in range(20):
        async with shared.files.watch(here):
            pass
    with anyio.fail_after(20):
        while len(await shared.ps()) > before:
            await anyio.sleep(0.01)
