"""Sandboxes that last as long as their graph, and models that work in them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from atoll import Engine, InvalidRequest, PathNotFound, SandboxNotFound
from atoll.reactive import (
    Graph,
    cell,
    computed,
    generate_text,
    handler,
    read_sandbox_file,
    sandbox,
    write_sandbox_file,
)
from atoll.testing.waiting import eventually

pytestmark = pytest.mark.usefixtures("graph")


async def test_commands_of_a_lasting_sandbox_see_what_earlier_ones_did(host: Engine) -> None:
    box = sandbox()
    assert box.status == "starting"

    @handler
    async def run(command: str) -> str:
        return (await box.exec(command)).stdout

    assert await run("echo kept > file; echo done") == "done\n"
    assert await run("cat file") == "kept\n"
    assert "running" in repr(box)
    assert [info.name for info in await host.list()] == [box.name]
    box.dispose()
    assert "destroyed" in repr(box)
    await eventually(lambda: _empty(host), "the end of the sandbox")


async def _empty(host: Engine) -> bool:
    return await host.list() == []


def small_image(root: Path) -> str:
    """An image with a shell, and little else."""
    for name in ("/bin/sh", "/bin/cat"):
        libraries = subprocess.run(["ldd", name], check=True, capture_output=True, text=True).stdout
        for path in [name, *re.findall(r"(/\S+)", libraries)]:
            (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / path[1:])
    return f"dir:{root}"


async def test_a_sandbox_moves_to_another_image_with_its_files(host: Engine, tmp_path: Path) -> None:
    image = cell("host")
    box = sandbox(image)
    wrote = box.write_file("notes/today", "calm")
    listed = box.exec("cat notes/today")
    assert await wrote == {"ok": True}
    first = await box
    image.set(small_image(tmp_path))
    assert box.pending
    assert (await box).name != first.name
    assert (await listed).stdout == "calm"
    assert (await box.exec("echo /bin/*")).stdout == "/bin/cat /bin/sh\n"
    await eventually(lambda: _only(host, box.name), "the end of the first sandbox")


async def _only(host: Engine, name: str) -> bool:
    return [info.name for info in await host.list()] == [name]


async def test_a_move_that_fails_leaves_the_sandbox_where_it_is(host: Engine) -> None:
    image = cell("host")
    box = sandbox(image)
    first = await box
    image.set("dir:/nowhere")
    with pytest.raises(LookupError):
        await box
    assert box.status == "failed"
    image.set("host")
    assert (await box).id == first.id


async def test_files_are_read_and_written_by_the_name_of_a_sandbox(host: Engine) -> None:
    async with host.create("files"):
        content, path, mode = cell('{"a": [1]}'), cell("data.json"), cell("json")
        wrote = write_sandbox_file("files", path, content)
        assert await wrote == {"ok": True}
        place = cell("data.json")
        read = read_sandbox_file("files", place, mode)
        assert await read == {"a": [1]}
        content.set("[2]")
        await wrote
        read.rerun()
        assert await read == [2]
        mode.set("bytes")
        assert await read == b"[2]"
        place.set("missing")
        with pytest.raises(PathNotFound):
            await read


async def test_wrong_files_are_errors(host: Engine) -> None:
    box = sandbox()
    await box.write_file("x", b"\xff")
    for node, error in [
        (box.read_file("x"), InvalidRequest),
        (box.read_file("x", "json"), InvalidRequest),
        (box.read_file("x", cell("xml")), InvalidRequest),
        (box.write_file("x", cell(5)), InvalidRequest),
        (read_sandbox_file("nobody", "x"), SandboxNotFound),
    ]:
        with pytest.raises(error):
            await node


SCRIPT = """
[[step]]
text = "I look. "
[[step.call]]
tool = "shell"
input.command = "cat level"

[[step]]
text = "It is ${level}."
[[step.expect.result]]
keep = { level = "stdout" }
"""


async def test_a_model_works_in_a_sandbox_and_again_when_the_prompt_changes(tmp_path: Path) -> None:
    (tmp_path / "tide.toml").write_text(SCRIPT)
    box = sandbox()
    await box.write_file("level", "1.5 m")
    prompt = cell("How high is the tide?")
    answer = generate_text(prompt, box.tools(), f"script:{tmp_path}/tide.toml")
    shown = computed(lambda: answer.output)
    assert await answer == "It is 1.5 m."
    await box.write_file("level", "2 m")
    prompt.set("And now?")
    assert await answer == "It is 2 m."
    assert {tool.name for tool in box.tools().get()} == {"shell", "read_file", "write_file", "glob", "browse"}
    assert isinstance(shown.get(), str)


async def test_a_graph_without_an_engine_says_so(graph: Graph) -> None:
    async with Graph():
        node = sandbox().node
        with pytest.raises(InvalidRequest, match=r"reactive\.Graph\(engine\)"):
            await node
