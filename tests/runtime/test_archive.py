"""What of a layer is written to a file, where no sandbox is needed to see it."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

from atoll.runtime.archive.worker import ArchiveWriter, ParentPipe


class Silent(ParentPipe):
    def is_due(self) -> bool:
        return False


def test_what_nobody_inside_could_read_does_not_travel(tmp_path: Path) -> None:
    """A file of the machine that was renamed inside lies in a layer, whether or not anybody inside may read it."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name, mode in (("secret", 0o4640), ("public", 0o4644)):
        (tree / name).write_text("precious")
        (tree / name).chmod(mode)
    with open(tmp_path / "file", "wb") as file:
        # Ids of the sandbox that begin above ours: so what we have made is another's.
        ArchiveWriter(file.fileno(), Silent()).pack(b"{}", [("layers/0/root", str(tree), os.getuid() + 1)])
    with tarfile.open(tmp_path / "file") as tar:  # which other programs can read too
        found = {member.name.rpartition("/")[2]: member for member in tar}
        assert [member.uid for member in (found["secret"], found["public"])] == [65534, 65534]
        assert [oct(member.mode) for member in (found["secret"], found["public"])] == ["0o640", "0o644"]
        assert (found["secret"].size, found["public"].size) == (0, 8)
        assert list(found)[-1] == "sha256"
