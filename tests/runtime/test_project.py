"""A project: which files it has, what was changed in its copy, and how that is brought back."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import atoll
import atoll.sync
from atoll import FileEntry, InvalidRequest, Project, ProjectChanges, ProjectConflict, Sandbox, SandboxError, Settings
from atoll.runtime.project import applying
from atoll.runtime.project.changes import ProjectChange, TreeFile, compare
from atoll.runtime.project.selection import GuestTree, HostTree, IgnoreRules, TreeEntry, host_entry, select


def git(directory: Path, *words: str, given: bytes = b"") -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "protocol.file.allow=always"]
    done = subprocess.run(["git", *who, *words], cwd=directory, input=given, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode("utf-8", "surrogateescape")


def write(root: Path, **files: str | bytes | None) -> None:
    """Files by name, with `__` for a slash. None: it is removed."""
    for name, data in files.items():
        write_at(root, name.replace("__", "/"), data)


def write_at(root: Path, name: str, data: str | bytes | None) -> None:
    path = root / name
    if data is None:
        path.unlink()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)


def tree_of(root: Path) -> dict[str, TreeFile]:
    found = {}
    for path in sorted(root.rglob("*")):
        name = os.path.relpath(path, root)
        entry = host_entry(path, path.lstat())
        if not name.startswith(".git"):
            found[name] = TreeFile(entry, path if entry.kind == "file" else None)
    return found


def described(root: Path) -> dict[str, Any]:
    return {
        name: each.entry.target if each.contents is None else (each.entry.executable, each.contents.read_bytes())
        for name, each in tree_of(root).items()
        if each.entry.kind != "directory" or not any((root / name).iterdir())
    }


async def selected(root: Path, scratch: Path) -> set[str]:
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    found = await select(HostTree(root), IgnoreRules(root, scratch), limit_files=1000)
    return {path for path, entry in found.entries.items() if entry.kind != "directory"}


# ----------------------------------------------------------------------------------------------------------- selection


async def test_a_project_has_the_files_that_git_has_and_would_add(tmp_path: Path) -> None:
    other, root = tmp_path / "other", tmp_path / "root"
    for each in (other, root):
        each.mkdir()
        git(each, "init", "-q")
    write(other, **{"in_sub": "1", "tracked.log": "2"})
    write_at(other, ".gitignore", "*.log\n")
    git(other, "add", "-f", ".")
    git(other, "commit", "-qm", "one")
    git(root, "submodule", "--quiet", "add", str(other), "sub")
    write(root / "sub", **{"new": "3", "ignored.log": "4"})
    for name in (
        *("kept", "a.o", "build/x", "build/tracked", "src/keep.o", "src/b.o", "src/local", "src/deep/local", "secret"),
        *(":colon", ":(top)magic", "*", "[a]", "new\nline", "ünï", os.fsdecode(b"\xff"), "-dash", "wide/only.tmp"),
    ):
        write_at(root, name, name.encode("utf-8", "surrogateescape"))
    write_at(root, ".gitignore", "*.o\nbuild/\n")
    write_at(root, "src/.gitignore", "!keep.o\n/local\n")
    write_at(root, ".git/info/exclude", "secret\n")
    write_at(tmp_path, "global", "*.tmp\n")
    git(root, "config", "core.excludesFile", str(tmp_path / "global"))
    (root / "link").symlink_to("src")
    (root / "gone").touch()
    git(root, "add", "gone", "kept")
    git(root, "add", "-f", "build/tracked")
    (root / "gone").unlink()

    listed = {*git(root, "ls-files", "-coz", "--exclude-standard").split("\0")} - {"", "gone", "sub"}
    listed |= {f"sub/{name}" for name in ("in_sub", "tracked.log", ".gitignore", "new")}
    assert await selected(root, tmp_path / "scratch") == listed
    inside = {path.removeprefix("src/") for path in listed if path.startswith("src/")}
    assert await selected(root / "src", tmp_path / "scratch") == inside  # the patterns above hold there


async def test_outside_of_git_what_is_made_again_is_left_out_and_gitignore_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    for name in ("data.csv", "plots/a.png", ".venv/bin/python", "a/node_modules/x/y", "a/__pycache__/z", "big.bin"):
        write_at(root, name, "1")
    write_at(root, ".gitignore", "*.bin\n")
    assert await selected(root, tmp_path / "scratch") == {"data.csv", "plots/a.png", ".gitignore"}
    monkeypatch.setenv("PATH", "/nowhere")  # without git, there is no one to ask
    assert await selected(root, tmp_path / "scratch") == {"data.csv", "plots/a.png", ".gitignore", "big.bin"}
    (root / ".git").mkdir()
    with pytest.raises(InvalidRequest, match="git is not installed"):
        await selected(root, tmp_path / "scratch")


async def test_what_git_refuses_is_said_in_its_words(tmp_path: Path) -> None:
    write_at(tmp_path, "root/.git", "gitdir: /nowhere\n")
    with pytest.raises(InvalidRequest, match=r"git does not work in .*not a git repository: /nowhere"):
        await selected(tmp_path / "root", tmp_path / "scratch")


# --------------------------------------------------------------------------------------------------------------- patch


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    """A project before and after all kinds of changes."""
    old, new = tmp_path / "old", tmp_path / "new"
    lines = [f"line {n}\n" for n in range(100)]
    write(old, changed="".join(lines), emptied="x\n", mode="#!/bin/sh\n", dir__gone="1\n", kind="to be a link\n")
    write(old, dir__renamed="renamed\n" * 10, binary=b"\0\1\2" * 100, tail="no newline", same="same")
    write_at(old, "with space", "a\n")
    write_at(old, 'quo"ted\\\n\u202e', "a\n")
    (old / "link").symlink_to("same")
    (old / "to-file").symlink_to("same")
    shutil.copytree(old, new, symlinks=True)
    lines[10], lines[90] = "another\n", "x\n"
    write(new, changed="".join(lines), emptied="", dir__gone=None, added="new\n", empty="", tail="still none")
    write(
        new, plot=b"\x89PNG\r\n\x1a\n\0" + os.urandom(5000), binary=b"\0\1\3" * 100, latin="caf\xe9".encode("latin-1")
    )
    write_at(new, "with space", "b\n")
    write_at(new, 'quo"ted\\\n\u202e', "b\n")
    write_at(new, "new dir/ünï", "b\n")
    (new / "mode").chmod(0o755)
    (new / "dir/renamed").rename(new / "moved")
    (new / "dir").rmdir()
    for name, target in (("link", "moved"), ("kind", "added")):
        (new / name).unlink()
        (new / name).symlink_to(target)
    (new / "to-file").unlink()
    write_at(new, "to-file", "a file now\n")
    return old, new


def test_a_patch_says_what_changed_in_words_that_git_applies(sides: tuple[Path, Path]) -> None:
    old, new = sides
    changes = compare(tree_of(old), tree_of(new))
    kinds = {change.path: change.kind for change in changes.changes}
    assert kinds["mode"] == "mode"
    assert kinds["moved"] == "renamed"
    assert kinds["dir/gone"] == "deleted"
    assert "same" not in kinds
    assert {change.path for change in changes.changes if change.binary} == {"binary", "plot", "latin"}
    assert changes.removed_directories == ("dir",)
    diff = changes.diff
    assert "rename from dir/renamed\nrename to moved\n" in diff
    assert "@@ -8,7 +8,7 @@\n line 7\n line 8\n line 9\n-line 10\n+another\n line 11\n" in diff
    assert "Binary files a/plot and b/plot differ\n" in diff
    assert 'diff --git "a/quo\\"ted\\\\\\n\\342\\200\\256"' in diff
    assert "-no newline\n\\ No newline at end of file\n+still none\n\\ No newline at end of file\n" in diff
    assert all(c.isprintable() or c in "\n\t" for c in diff)
    git(old, "init", "-q")
    git(old, "apply", "--whitespace=nowarn", "-", given=changes.patch.encode())
    assert described(old) == described(new)


def test_a_file_that_takes_too_long_to_compare_is_shown_as_replaced(
    sides: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = sides
    monkeypatch.setattr("atoll.runtime.project.changes._MAX_DIFF_S", 1e-6)
    (change,) = [each for each in compare(tree_of(old), tree_of(new)).changes if each.path == "changed"]
    assert "@@ -1,100 +1,100 @@\n-line 0\n" in change.diff
    git(old, "init", "-q")
    git(old, "apply", "-", given=change.patch.encode())
    assert (old / "changed").read_bytes() == (new / "changed").read_bytes()


# --------------------------------------------------------------------------------------------------------------- apply


@pytest.fixture
def here(sides: tuple[Path, Path], tmp_path: Path) -> Path:
    """The directory that was copied, as the user has it."""
    shutil.copytree(sides[0], tmp_path / "here", symlinks=True)
    return tmp_path / "here"


def test_all_changes_are_applied_and_nothing_else_is_touched(sides: tuple[Path, Path], here: Path) -> None:
    (here / "changed").chmod(0o640)
    write_at(here, "ignored", "mine")
    before = (here / "same").stat()
    changes = compare(tree_of(sides[0]), tree_of(sides[1]))
    applying.apply(here, changes)
    assert described(here) == {**described(sides[1]), "ignored": (False, b"mine")}
    assert (here / "changed").stat().st_mode & 0o777 == 0o640
    assert (here / "same").stat() == before
    applying.apply(here, changes)  # all is so already
    assert described(here) == {**described(sides[1]), "ignored": (False, b"mine")}


@pytest.mark.parametrize(
    ("name", "done"),
    [
        ("changed", lambda path: path.write_text("mine")),
        ("changed", lambda path: path.unlink()),
        ("changed", lambda path: path.chmod(0o755)),
        ("added", lambda path: path.write_text("mine")),
        ("dir/gone", lambda path: path.write_text("mine")),
        ("kind", lambda path: path.write_text("mine")),
        ("link", lambda path: (path.unlink(), path.symlink_to("/etc/passwd"))),
        ("new dir", lambda path: path.symlink_to("/tmp")),
        ("new dir", lambda path: path.write_text("mine")),
    ],
)
def test_a_file_that_the_user_changed_is_a_conflict_and_nothing_is_applied(
    sides: tuple[Path, Path], here: Path, name: str, done: Any
) -> None:
    done(here / name)
    before = described(here)
    with pytest.raises(ProjectConflict, match="nothing was applied: changed here since") as caught:
        applying.apply(here, compare(tree_of(sides[0]), tree_of(sides[1])))
    assert [path for path in caught.value.details["paths"] if path.startswith(name)]  # type: ignore[attr-defined]
    assert described(here) == before


def test_what_fails_in_the_middle_is_undone(
    sides: tuple[Path, Path], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = described(here)
    changes = compare(tree_of(sides[0]), tree_of(sides[1]))
    copy, left = applying._copy, len(changes.changes) // 2

    def fail(*arguments: Any, **named: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise OSError(28, "No space left on device")
        copy(*arguments, **named)

    monkeypatch.setattr(applying, "_copy", fail)
    with pytest.raises(OSError, match="No space left"):
        applying.apply(here, changes)
    assert described(here) == before


def test_a_directory_that_still_has_files_is_kept_or_is_a_conflict(here: Path, tmp_path: Path) -> None:
    old, new = tmp_path / "one", tmp_path / "two"
    write(old, dir__file="1", other__file="1")
    write(new, other="a file where a directory was")
    write(old, dir__ignored="mine")
    applied = compare({k: v for k, v in tree_of(old).items() if "ignored" not in k}, tree_of(new))
    shutil.copytree(old, here / "sub")
    applying.apply(here / "sub", applied)
    assert described(here / "sub") == {
        "dir/ignored": (False, b"mine"),
        "other": (False, b"a file where a directory was"),
    }
    shutil.rmtree(here / "sub")
    shutil.copytree(old, here / "sub")
    write(here / "sub", other__ignored="mine")
    before = described(here / "sub")
    with pytest.raises(ProjectConflict, match="other"):
        applying.apply(here / "sub", applied)
    assert described(here / "sub") == before


@pytest.mark.parametrize(
    "path", ["../out", "/tmp/out", "a/../../out", ".git/hooks/pre-commit", "sub/.GIT/config", "", "a//b"]
)
def test_a_change_that_leads_out_or_into_git_is_never_written(tmp_path: Path, path: str) -> None:
    write(tmp_path, source="owned")
    (tmp_path / "here/.git").mkdir(parents=True)
    change = ProjectChange(path, "added", None, TreeFile(TreeEntry("file", size=5), tmp_path / "source"))
    with pytest.raises(InvalidRequest, match=r"leads out of the project or into \.git"):
        applying.apply(tmp_path / "here", ProjectChanges((change,)))
    renamed = replace(change, path="fine", old_path=path, old=change.new)
    with pytest.raises(InvalidRequest, match=r"leads out of the project or into \.git"):
        applying.apply(tmp_path / "here", ProjectChanges((renamed,)))
    assert [each.name for each in (tmp_path / "here").iterdir()] == [".git"]


# ------------------------------------------------------------------------------------------------------------ a sandbox


@pytest.fixture(scope="module")
async def box(state_dir: Path, any_settings: Settings) -> AsyncIterator[Sandbox]:
    async with atoll.open(state_dir, settings=any_settings) as engine, engine.create() as sandbox:
        yield sandbox


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "app"
    write(root, main="print(1)\n", dir__data=b"\0\1")
    write_at(root, ".gitignore", "*.log\n")
    (root / "empty").mkdir()
    (root / "absolute").symlink_to("/etc/hostname")
    (root / "main").chmod(0o755)
    git(tmp_path / "app", "init", "-q")
    return root


async def test_a_copy_is_changed_and_brought_back_again_and_again(box: Sandbox, project: Path) -> None:
    async with await box.copy_project(project) as copy:
        assert (await copy.diff()).changes == ()
        said = await box.exec("cd app && ls -AF && ./main", env={"LC_ALL": "C"})
        assert said.stdout.split() == [".gitignore", "absolute@", "dir/", "empty/", "main*"]
        await box.exec("cd app && echo 2 > new && echo x > a.log && mkdir -p d/e && mv main dir && git init -q .")
        await box.exec("cd app && mkdir -p node_modules/x dir/__pycache__ && touch node_modules/x/y dir/__pycache__/z")
        changes = await copy.diff()
        assert [(each.path, each.kind) for each in changes.changes] == [
            *(("d/e", "added"), ("dir/main", "renamed"), ("new", "added"))
        ]
        assert [each.path for each in changes.refused] == [".git"]
        await copy.apply(changes)
        assert (project / "new").read_text() == "2\n"
        assert (project / "d/e").is_dir()
        assert (await copy.diff()).changes == ()
        await box.exec("cd app && echo 3 > new && rm -r d && rmdir empty")
        await copy.apply(await copy.diff())
        assert (project / "new").read_text() == "3\n"
        assert not (project / "d").exists()
        assert not (project / "empty").exists()
        await box.exec("rm -rf app")
        with pytest.raises(InvalidRequest, match="no longer a directory in the sandbox"):
            await copy.diff()


async def test_a_change_of_the_same_size_is_seen_however_soon_it_comes(box: Sandbox, project: Path) -> None:
    write(project, recent="1")
    os.utime(project / "main", (1e9, 1e9))
    os.utime(project / "recent", (4e9, 4e9))  # as if it was written just now, and again in the same moment
    async with await box.copy_project(project, "soon") as copy:
        await box.exec("cd soon && sed -i s/1/2/ main && echo -n 2 > recent && touch -d @4000000000 recent")
        assert [each.path for each in (await copy.diff()).changes] == ["main", "recent"]


async def test_a_copy_may_replace_an_earlier_one_and_keeps_what_is_ignored(box: Sandbox, project: Path) -> None:
    (await (await box.copy_project(project, "again")).aclose())
    await box.exec("cd again && echo work > main && echo x > more && echo y > kept.log && rm -r dir && echo z > dir")
    with pytest.raises(InvalidRequest, match="again is not empty in the sandbox"):
        await box.copy_project(project, "again")
    async with await Project(project).copy_in(box.files, "again", replace=True) as copy:
        assert (await copy.diff()).changes == ()
        said = await box.exec("cd again && ls -A && cat main", env={"LC_ALL": "C"})
        assert said.stdout.split() == [*(".gitignore", "absolute", "dir", "empty", "kept.log", "main", "print(1)")]


async def test_a_project_has_limits_and_the_error_says_how_to_raise_them(box: Sandbox, project: Path) -> None:
    with pytest.raises(
        InvalidRequest, match=r"more than 3 files and directories \(most in .* files\).*ATOLL_PROJECT_FILES"
    ):
        await box.copy_project(project, "limits", limit_files=3)
    write(project, large=b"x" * (3 << 20))
    with pytest.raises(InvalidRequest, match=r"has 3 MiB, more than 2 MiB \(most in large: 3 MiB.*ATOLL_PROJECT_MIB"):
        await box.copy_project(project, "limits", limit_bytes=2 << 20)
    with pytest.raises(InvalidRequest, match="is not a directory"):
        await box.copy_project(project / "main")
    assert not await box.files.exists("limits")
    assert Settings(project_mib=7).project_mib == 7


async def test_too_much_that_comes_back_is_refused_by_name(box: Sandbox, project: Path) -> None:
    async with await box.copy_project(project, "much", limit_bytes=1 << 20, limit_files=20) as copy:
        await box.exec("cd much && truncate -s 3T sparse && echo 2 > main")
        changes = await copy.diff()
        assert [each.path for each in changes.changes] == ["main"]
        assert [(each.path, each.reason) for each in changes.refused] == [
            ("sparse", "is too large: all that comes back may have 1 MiB")
        ]
        await box.exec("cd much && rm sparse && touch $(seq 30)")
        with pytest.raises(InvalidRequest, match="more than 20 files"):
            await copy.diff()


async def test_a_sandbox_that_lists_an_impossible_name_is_not_believed(project: Path, tmp_path: Path) -> None:
    class Liar:
        async def list(self, _path: str) -> list[FileEntry]:
            now = datetime.now(UTC)
            return [FileEntry(name=self.name, kind="file", size=1, mode=0o644, uid=0, gid=0, mtime=now)]

        def __init__(self, name: str) -> None:
            self.name = name

    (tmp_path / "scratch").mkdir()
    rules = IgnoreRules(project, tmp_path / "scratch")
    for name in ("../../etc/cron.d/x", "/etc/x", "a/b", "..", ".", ""):
        with pytest.raises(SandboxError, match="impossible name"):
            await select(GuestTree(Liar(name), "/home/user/app"), rules, limit_files=10)  # type: ignore[arg-type]


async def test_the_first_sandbox_of_a_session_has_the_copy_whoever_its_user_is(
    state_dir: Path, any_settings: Settings, project: Path
) -> None:
    async with atoll.open(state_dir, settings=any_settings) as engine:
        for user, where in ((None, "/home/user/app"), ("nobody", "/tmp/app"), ("root", "/home/user/app")):
            async with engine.pool("copies", temporary=True, project=Project(project), user=user) as pool:
                assert (await pool.describe()).project == where
                said = await (await pool.get()).exec("pwd; touch made; ls main")
                assert said.stdout == f"{where}\nmain\n", said.stderr
                assert (await (await pool.get("other")).exec("ls main")).exit_code != 0
                assert [each.path for each in (await (await pool.bring_project()).diff()).changes] == ["made"]
        async with engine.pool("plain", temporary=True) as pool:
            await pool.get()
            with pytest.raises(InvalidRequest, match="the pool has no project"):
                await pool.bring_project()
            pool.project = Project(project)
            with pytest.raises(InvalidRequest, match="was made without the project 'app'; choose another session"):
                await pool.bring_project()
    assert not (project / "made").exists()


def test_the_blocking_face_copies_and_brings_back(state_dir: Path, any_settings: Settings, project: Path) -> None:
    with (
        atoll.sync.open(state_dir, settings=any_settings) as engine,
        engine.create() as box,
        box.copy_project(project) as copy,
    ):
        box.files.write_text("app/main", "2")
        copy.apply(copy.diff())
    assert (project / "main").read_text() == "2"
