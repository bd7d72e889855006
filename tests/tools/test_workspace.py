"""What the vocabulary `workspace` adds to the eight tools of `agent`, on real sandboxes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from atoll import Engine, InvalidRequest
from atoll.tools.tool import ToolSet
from atoll.tools.workspace import workspace_tools

if TYPE_CHECKING:
    from atoll.runtime.sandbox_pool import SandboxPool
    from tests.tools.conftest import Caller


@pytest.fixture(scope="module")
def tools(pool: SandboxPool) -> ToolSet:
    return workspace_tools(pool)


async def test_the_eight_tools_of_agent_are_among_them_with_the_same_arguments_and_results(
    tools: ToolSet, pool: SandboxPool
) -> None:
    for tool in pool.tools():
        schema = tools[tool.name].input_schema()
        if tool.name == "shell":
            assert schema["properties"].pop("user")["default"] == "user"
        assert schema == tool.input_schema()
        assert tools[tool.name].output_schema() == tool.output_schema()
        assert tools[tool.name].description == tool.description


@pytest.mark.proves("shell.user")
async def test_a_command_can_be_of_root(call: Caller, tools: ToolSet, host: Engine) -> None:
    assert (await call(tools, "shell", command="id -un"))["stdout"] == "user\n"
    assert (await call(tools, "shell", command="id -un", user="root"))["stdout"] == "root\n"
    assert "no user 'nobody-such'" in await call.error(tools, "shell", command="true", user="nobody-such")
    async with host.pool("rooted", user="root", temporary=True) as pool:
        rooted = workspace_tools(pool)
        assert rooted["shell"].input_schema()["properties"]["user"]["default"] == "root"
        assert (await call(rooted, "shell", command="id -un"))["stdout"] == "root\n"


@pytest.mark.proves(
    "edit_file.path", "edit_file.old_text", "edit_file.new_text", "edit_file.replace_all", "edit_file.sandbox",
    "edit_file->replacements",
)  # fmt: skip
async def test_an_edit_is_exact_and_unique_or_of_all(call: Caller, tools: ToolSet, pool: SandboxPool) -> None:
    files = (await pool.get("edited")).files
    await files.write_text("f", "one two\ntwo three\n")
    here = {"path": "f", "sandbox": "edited"}
    said = await call.error(tools, "edit_file", **here, old_text="two", new_text="2")
    assert "found 2 matches for old_text, at lines 1, 2, so nothing was changed" in said
    assert "set replace_all to true" in said
    assert "found 0 matches" in await call.error(tools, "edit_file", **here, old_text="four", new_text="")
    result = await call.raw(tools, "edit_file", **here, old_text="one two", new_text="1")
    assert (result.text, result.structured) == ("replaced 1 match in f", {"replacements": 1})
    assert await call(tools, "edit_file", **here, old_text="t", new_text="T", replace_all=True) == {"replacements": 2}
    assert await files.read_text("f") == "1\nTwo Three\n"
    assert "did you mean 'f'" not in await call.error(tools, "edit_file", path="/nowhere", old_text="a", new_text="b")


@pytest.mark.proves(
    "grep.pattern", "grep.path", "grep.include", "grep.ignore_case", "grep.context", "grep.sandbox", "grep->matches",
    "grep->truncated", "grep->matches.path", "grep->matches.line", "grep->matches.text", "grep->matches.before",
    "grep->matches.after",
)  # fmt: skip
async def test_lines_are_found_in_the_sandbox_that_is_named(call: Caller, tools: ToolSet, pool: SandboxPool) -> None:
    files = (await pool.get("searched")).files
    await files.write_text("src/a.py", "import os\n# TODO 42\nx = 1\n")
    await files.write_text("src/b.txt", "todo 7\n")
    found = await call.raw(
        tools, "grep", pattern=r"todo \d+", path="src", include="*.py", ignore_case=True, context=1, sandbox="searched"
    )
    assert found.text == "src/a.py-1- import os\nsrc/a.py:2: # TODO 42\nsrc/a.py-3- x = 1\n"
    assert found.structured == {
        "matches": [
            {"path": "src/a.py", "line": 2, "text": "# TODO 42", "before": ["import os"], "after": ["x = 1"]},
        ],
        "truncated": False,
    }
    assert (await call.raw(tools, "grep", pattern=r"todo \d+", sandbox="searched")).text == "src/b.txt:1: todo 7\n"
    assert (await call.raw(tools, "grep", pattern="nothing", sandbox="searched")).text == "[no matches]"


@pytest.mark.proves("sandbox_destroy.sandbox", "sandbox_destroy->ok", "sandbox_destroy->sandbox")
async def test_a_sandbox_is_destroyed_with_its_checkpoints(
    call: Caller, tools: ToolSet, pool: SandboxPool, host: Engine
) -> None:
    box = await pool.get("doomed")
    await box.files.write_text("f", "")
    kept = await (await pool.get()).checkpoint("kept")
    await box.checkpoint("gone")
    assert await call(tools, "sandbox_destroy", sandbox="doomed") == {"ok": True, "sandbox": "doomed"}
    assert "doomed" not in {each.name for each in await pool.list()}
    assert [each.id for each in await host.checkpoints()] == [kept.id]
    assert "no sandbox is named 'doomed'" in await call.error(tools, "sandbox_destroy", sandbox="doomed")
    assert (await call(tools, "glob", pattern="*", sandbox="default"))["files"] == []


@pytest.mark.proves(
    "save_file.path", "save_file.name", "save_file.overwrite", "save_file.sandbox", "save_file->path",
    "save_file->bytes",
)  # fmt: skip
async def test_a_file_is_handed_to_the_user_in_one_directory_and_nowhere_else(
    call: Caller, tools: ToolSet, pool: SandboxPool, tmp_path: Path
) -> None:
    assert "save_file" not in tools
    out = tmp_path / "out"
    with pytest.raises(InvalidRequest, match="is not a directory that can be written to"):
        workspace_tools(pool, save_dir=out)
    out.mkdir()
    saving = workspace_tools(pool, save_dir=out)
    box = await pool.get("plots")
    await box.exec(
        "printf png > plot.png; mkdir -p dir/sub; echo x > dir/sub/x; ln -s sub dir/in; ln -s /etc/passwd dir2"
    )
    here = {"sandbox": "plots"}
    assert await call(saving, "save_file", path="plot.png", **here) == {"path": str(out / "plot.png"), "bytes": 3}
    said = await call.error(saving, "save_file", path="plot.png", **here)
    assert "plot.png exists already in the user's directory; choose another name, or set overwrite" in said
    await box.files.write_text("plot.png", "second")
    assert (await call(saving, "save_file", path="plot.png", overwrite=True, **here))["bytes"] == 6
    assert (await call(saving, "save_file", path="dir", name="all", **here)) == {"path": str(out / "all"), "bytes": 2}
    for overwrite in (False, True):
        said = await call.error(saving, "save_file", path="dir", name="all", overwrite=overwrite, **here)
        assert "all exists already in the user's directory; choose another name" in said
    assert "all exists already" in await call.error(
        saving, "save_file", path="plot.png", name="all", overwrite=True, **here
    )
    for name in ("../x", "a/b", ".profile", "..", "a\nb", "\x1b[2J", "x" * 300, "\udcff"):
        assert "is no name for a saved file" in await call.error(
            saving, "save_file", path="plot.png", name=name, **here
        )
    assert "no such file" in await call.error(saving, "save_file", path="none", **here)
    assert "did you mean 'plot.png'" in await call.error(saving, "save_file", path="plot.pn", **here)
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (out / "link").symlink_to(outside)
    assert "exists already" in await call.error(saving, "save_file", path="plot.png", name="link", **here)
    await call(saving, "save_file", path="plot.png", name="link", overwrite=True, **here)
    assert outside.read_text() == "mine"
    await box.exec("ln -s /etc/passwd dir/out")
    assert "leads outside" in await call.error(saving, "save_file", path="dir", name="bad", **here)
    assert {each.name: each.is_dir() or each.read_text() for each in out.iterdir()} == {
        "plot.png": "second",
        "link": "second",
        "all": True,
    }
    assert (out / "all/in/x").read_text() == "x\n"


async def test_what_a_session_may_save_is_limited_and_what_is_too_large_leaves_nothing(
    call: Caller, pool: SandboxPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.tools.saving.MAX_SAVED_BYTES", 1 << 25)
    saving = workspace_tools(pool, save_dir=tmp_path)
    await (await pool.get()).exec("truncate -s 2T sparse; mkdir -p many; truncate -s 2T many/sparse")
    for path in ("sparse", "many"):
        assert "a session can save " in await call.error(saving, "save_file", path=path)
    assert list(tmp_path.iterdir()) == []
