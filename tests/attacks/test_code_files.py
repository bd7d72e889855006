"""Files and images that code hands to a person: names that lead out, names that are run, overwriting, lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll import CodeExecutor, Engine, ToolRegistry
from atoll.surfaces.cli.cells import CellResult

pytestmark = pytest.mark.runtimes("crun")

FORGES = """
import os
os.makedirs("outbox/.git/hooks", exist_ok=True)
os.makedirs("outbox/sub", exist_ok=True)
for name in ("there", ".profile", ".git/hooks/post-commit", "sub/fine", "new\\nline"):
    open(f"outbox/{name}", "w").write("from inside")
os.symlink("/etc/passwd", "outbox/link")
open("secret", "w").write("from inside")
kernel = display.__self__
names = [
    "../secret", "sub/../../secret", "/etc/passwd", "/home/user/secret", "", ".", "..", "link", "there", ".profile",
    ".git/hooks/post-commit", "sub/fine", "sub/none", "x" * 300, "new\\nline", "a" + chr(0) + "b",
]
for kind, data in (("image/png", "%%%"), ("image/png", "bm8gaW1hZ2U="), ("image/../../x", "iVBORw0KGgo=")):
    kernel.publish({kind: data})
kernel.channel.send({
    "t": "done", "cell": 1, "error": None, "warnings": [], "streams": [],
    "outbox": [{"path": name, "size": 1} for name in names],
})
"""


async def test_nothing_is_written_but_new_files_below_the_directory(engine: Engine, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "sub").mkdir(parents=True)
    (out / "there").write_text("mine")
    async with CodeExecutor(ToolRegistry(), engine=engine) as executor:
        result, _ = await executor.execute(FORGES)
    saved = CellResult(result, out).save()
    assert sorted(str(path.relative_to(out)) for path in saved) == ["sub/fine"]
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        "out/sub/fine",
        "out/there",
    ]
    assert (out / "there").read_text() == "mine"
    assert all(part.type == "text" for part in result.content), "no model is sent what is no image"
