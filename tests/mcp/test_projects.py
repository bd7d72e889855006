"""A directory that each session begins with a copy of, and one that files of sandboxes can be saved in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from mcp import Client

from atoll import Engine, Project
from atoll.surfaces.mcp import ServerConfig
from tests.mcp.serving import Program, listening, shell


@pytest.fixture
def app(tmp_path: Path) -> Path:
    root = tmp_path / "app"
    (root / "src").mkdir(parents=True)
    (root / "src/main.py").write_text("print(1)\n")
    (root / "notes.log").write_text("")
    (root / ".gitignore").write_text("*.log\n")
    return root


async def test_a_client_works_on_a_copy_of_the_operators_directory_and_hands_files_out(
    program: Program, app: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    async with Client(program("--upload", str(app), "--save-dir", str(out))) as client:
        said = client.instructions or ""
        assert "a copy of the user's project in /home/user/app" in said
        assert "save_file hands a file or a directory to the user" in said
        assert await shell(client, "pwd; find . -type f | sort") == "/home/user/app\n./.gitignore\n./src/main.py\n"
        await shell(client, "echo 2 > src/main.py; printf png > plot.png")
        result = await client.call_tool("save_file", {"path": "plot.png"})
        assert result.structured_content == {"path": str(out / "plot.png"), "bytes": 3}
        # A sandbox that was destroyed begins again with the copy; others have none.
        await client.call_tool("sandbox_destroy", {"sandbox": "default"})
        assert await shell(client, "cat src/main.py") == "print(1)\n"
        assert await shell(client, "pwd; ls", sandbox="other") == "/home/user\n"
        copied = {"from_sandbox": "default", "from_path": "src/main.py", "to_sandbox": "other", "to_path": "copy.py"}
        await client.call_tool("transfer", copied)
        assert await shell(client, "ls", sandbox="other") == "copy.py\n"
    assert (out / "plot.png").read_text() == "png"
    assert (app / "src/main.py").read_text() == "print(1)\n"


async def test_a_client_starts_in_the_operators_directory_if_it_may_write_to_it(program: Program, app: Path) -> None:
    user = [] if os.geteuid() == 0 else ["--user", "root"]
    async with Client(program("--mount", f"{app}:/work:rw", *user)) as client:
        assert ", in /work unless you say otherwise" in (client.instructions or "")
        assert await shell(client, "pwd; echo 3 > src/main.py") == "/work\n"
    assert (app / "src/main.py").read_text() == "3\n"


async def test_each_session_over_http_has_a_copy_of_its_own_as_it_is_then(host: Engine, app: Path) -> None:
    config = ServerConfig(["coding"], project=Project(app))
    async with listening(host, config=config) as url:
        async with Client(url) as one, Client(url) as other:
            for client in (one, other):
                text = (await client.call_tool("bash", {"command": "cat src/main.py; echo x >> src/main.py"})).content[
                    0
                ]
                assert getattr(text, "text", "") == "print(1)\n"
        (app / "src/main.py").write_text("print(2)\n")
        async with Client(url) as later:
            text = (await later.call_tool("read", {"path": "src/main.py"})).content[0]
            assert "print(2)" in getattr(text, "text", "")
        assert (app / "src/main.py").read_text() == "print(2)\n"
