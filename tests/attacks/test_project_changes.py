"""Coming out with a project: what a sandbox leaves in the copy of a directory is brought back, or refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.contract.errors import ProjectConflict
from atoll.runtime.sandbox import Sandbox

_PREPARE = r"""
cd stolen
ln -s /etc/passwd absolute
ln -s ../outside up
ln -s dir/../../outside around
ln -s .. dir/two
ln -s two/../outside dir/chain
ln -s main fine
mkfifo pipe
python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("socket")'
printf x > "$(printf 'new\nline')"
printf x > "$(printf 'escape\033[2J')"
printf x > "$(printf '\377')"
printf x > "$(printf 'right\342\200\256left')"
mkdir -p .git/hooks dir/.Git/hooks "$(printf 'bad\007')"
echo 'touch /tmp/owned' | tee .git/hooks/pre-commit dir/.Git/hooks/post-checkout "$(printf 'bad\007')/below" >/dev/null
rm -rf gone && ln -s /tmp gone
rm -rf blocked && mkfifo blocked
rm .gitignore && mkdir -p .gitignore/deep && printf '*' > .gitignore/.gitignore
rm target && ln -s ../../../../../../etc/passwd target
chmod 4755 main && echo changed >> main
mkdir secret && echo x > secret/file && chmod 000 secret
deep=. ; for i in $(seq 120); do deep=$deep/d; done; mkdir -p $deep && echo x > $deep/file
echo work > dir/work
"""
_REFUSED = {
    *(".git", "dir/.Git", "absolute", "up", "around", "dir/chain", "pipe", "socket", "new\nline", "escape\x1b[2J"),
    *(os.fsdecode(b"\xff"), "right\u202eleft", "bad\x07", "bad\x07/below", "gone", "blocked", "target", "secret"),
    "/".join("d" * 101),
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "stolen"
    for name in ("main", "dir/data", "gone/file", "blocked/file", "target"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / ".gitignore").write_text("*.log\n")
    (root / ".git/hooks").mkdir(parents=True)
    for name in ("HEAD", "config"):
        (root / ".git" / name).write_text("")
    (root / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (root / ".git/objects").mkdir()
    (root / ".git/refs").mkdir()
    return root


def listed(root: Path) -> set[str]:
    return {os.path.relpath(Path(at) / name, root) for at, below, names in os.walk(root) for name in (*below, *names)}


async def test_nothing_but_plain_files_below_the_directory_is_brought_back(prey: Sandbox, project: Path) -> None:
    before = listed(project / ".git")
    async with await prey.copy_project(project, "/home/user/stolen") as copy:
        try:
            done = await prey.exec(_PREPARE)
            assert done.ok, done.stderr
            changes = await copy.diff()
            reasons = {each.path: each.reason for each in changes.refused}
            assert set(reasons) == _REFUSED
            assert "leads out of the project" in reasons["around"]
            assert "/etc/passwd" in reasons["absolute"]
            assert all(c.isprintable() or c in "\n\t" for c in changes.diff)
            assert all(each.isprintable() for each in reasons.values())
            await copy.apply(changes)
        finally:
            await prey.exec("chmod -R u+rwx stolen; rm -rf stolen")
    assert listed(project / ".git") == before
    assert not (project / "dir/.Git").exists()
    assert (project / "main").read_text() == "mainchanged\n"
    assert (project / "main").stat().st_mode & 0o7777 == 0o755
    assert os.readlink(project / "fine") == "main"
    for name in ("gone/file", "blocked/file", "target"):  # what came in their place is refused, so they stay
        assert (project / name).read_text() == name
    for path in project.rglob("*"):
        assert path.is_dir() or path.is_file()
        assert path.resolve().is_relative_to(project.resolve())
        assert path.name.isprintable()
    assert {each.name for each in project.parent.iterdir()} == {"stolen"}
    assert not Path("/tmp/owned").exists()


async def test_a_symlink_of_the_user_leads_no_change_out_of_the_directory(
    prey: Sandbox, project: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    (project / "link").symlink_to(outside)
    async with await prey.copy_project(project, "/home/user/stolen") as copy:
        try:
            # The sandbox replaces a symlink by a directory; applying must not write to where the symlink leads.
            await prey.exec("cd stolen && rm link && mkdir link && echo owned > link/file && echo x > dir/new")
            changes = await copy.diff()
            await copy.apply(changes)
            assert (project / "link/file").read_text() == "owned\n"
            assert not (project / "link").is_symlink()
            # The user replaces a directory by a symlink meanwhile.
            await prey.exec("cd stolen && echo owned > gone/new; echo owned > gone/file")
            changes = await copy.diff()
            (project / "gone/file").unlink()
            (project / "gone").rmdir()
            (project / "gone").symlink_to(outside)
            with pytest.raises(ProjectConflict, match="gone/file, gone/new"):
                await copy.apply(changes)
        finally:
            await prey.exec("rm -rf stolen")
    assert {each.name: each.read_text() for each in outside.iterdir()} == {"file": "mine"}
