"""The agent's tools on real sandboxes: every field does what its schema says."""

from __future__ import annotations

import base64
import http.client
import os
import re
import signal
import tracemalloc
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest

from atoll import Engine
from atoll.testing.waiting import eventually
from atoll.tools import pool as pool_vocabulary, view
from atoll.tools.tool import ImagePart, ToolSet
from tests.tools.test_coding import IMAGES

if TYPE_CHECKING:
    from atoll.runtime.sandbox_pool import SandboxPool
    from tests.tools.conftest import Caller


@pytest.fixture(scope="module")
def tools(pool: SandboxPool) -> ToolSet:
    return pool.tools()


async def test_the_eight_tools_have_the_arguments_and_results_that_programs_know(tools: ToolSet) -> None:
    known = {
        "shell": ("command* sandbox='default' timeout_ms=30000 working_dir='/home/user'", "stdout stderr exit_code"),
        "read_file": ("path* sandbox='default' offset limit", "content size"),
        "write_file": ("path* content* sandbox='default' append=False", "ok size"),
        "glob": ("pattern* sandbox='default' cwd='/home/user'", "files"),
        "browse": ("port* sandbox='default'", "url"),
        "sandbox_create": ("sandbox* image sleep_after_ms=600000", "sandbox created"),
        "sandbox_list": ("", "sandboxes"),
        "transfer": ("from_sandbox* from_path* to_sandbox* to_path* recursive=False", "ok bytes"),
    }
    assert {tool.name for tool in tools} == set(known)
    for tool in tools:
        arguments, results = known[tool.name]
        schema = tool.input_schema()
        output = tool.output_schema()
        assert output is not None
        assert output["required"] == [field for field in results.split() if field != "ok"]
        assert {field.rstrip("*").partition("=")[0] for field in arguments.split()} == set(schema["properties"])
        for field in arguments.split():
            name, equals, default = field.partition("=")
            assert (name.rstrip("*") in schema.get("required", [])) == name.endswith("*")
            assert not equals or repr(schema["properties"][name]["default"]) == default


# -------------------------------------------------------------------------------------------------------------- shell


@pytest.mark.proves("shell.command", "shell.sandbox", "shell->stdout", "shell->stderr", "shell->exit_code")
async def test_a_command_gives_both_streams_and_its_exit_code(call: Caller, tools: ToolSet) -> None:
    assert await call(tools, "shell", command="echo out; echo err >&2; exit 3") == {
        "stdout": "out\n",
        "stderr": "err\n",
        "exit_code": 3,
    }
    assert (await call(tools, "shell", command="hostname", sandbox="other"))["stdout"] == "tools.other\n"
    assert (await call(tools, "shell", command="hostname", sandbox="default"))["stdout"] == "tools.default\n"


@pytest.mark.proves("shell.timeout_ms", "shell->exit_code")
async def test_a_command_that_takes_too_long_is_killed_and_its_output_kept(call: Caller, tools: ToolSet) -> None:
    ended = await call(tools, "shell", command="echo begun; (sleep 31537202 &) ; sleep 31537201", timeout_ms=300)
    assert ended["exit_code"] == 124
    assert ended["stdout"] == "begun\n"
    assert "timed out after 0.3 s" in ended["stderr"]
    assert "raise timeout_ms if it needs longer" in ended["stderr"]
    assert (await call(tools, "shell", command="ps ax | grep -c '[3]153720'"))["stdout"] == "0\n"
    assert (await call(tools, "shell", command="sleep 0.4; echo done", timeout_ms=20_000))["stdout"] == "done\n"
    assert tools["shell"].input_schema()["properties"]["timeout_ms"]["default"] == 30000


@pytest.mark.proves("shell.working_dir")
async def test_a_command_runs_in_its_working_directory(call: Caller, tools: ToolSet) -> None:
    assert (await call(tools, "shell", command="pwd"))["stdout"] == "/home/user\n"
    assert (await call(tools, "shell", command="pwd", working_dir="/tmp"))["stdout"] == "/tmp\n"
    await call(tools, "shell", command="mkdir -p project/src")
    assert (await call(tools, "shell", command="pwd", working_dir="project"))["stdout"] == "/home/user/project\n"
    said = await call.error(tools, "shell", command="pwd", working_dir="/home/user/projct")
    assert "did you mean 'project'?" in said


async def test_output_is_cut_in_the_middle_and_says_so(call: Caller, tools: ToolSet) -> None:
    ended = await call(tools, "shell", command="seq 100000")
    assert len(ended["stdout"]) < 30_200
    assert ended["stdout"].startswith("1\n2\n")
    assert ended["stdout"].endswith("99999\n100000\n")
    assert "of 588895 bytes left out here" in ended["stdout"]
    [saved] = re.findall(r"all of it is in (/tmp/tool-output/\S+)\]", ended["stdout"])
    assert (await call(tools, "shell", command=f"seq 100000 | cmp - {saved} && echo same"))["stdout"] == "same\n"
    # Every line is whole, and those of both ends are as they were.
    lines = ended["stdout"].splitlines()
    [at] = [index for index, line in enumerate(lines) if line.startswith("[")]
    assert lines[:at] == [str(n + 1) for n in range(at)]
    assert lines[at + 1 :] == [str(100_000 - n) for n in reversed(range(len(lines) - at - 1))]

    ended = await call(tools, "shell", command="seq 100000; seq 200000 >&2; exit 1")
    assert len(ended["stdout"]) + len(ended["stderr"]) < 30_500
    assert len(ended["stderr"]) > 9_000
    ended = await call(tools, "shell", command="seq 100000; echo failed >&2")
    assert ended["stderr"] == "failed\n"
    ended = await call(tools, "shell", command="yes | head -c 3000000")
    assert "its first and last 512 KiB are in /tmp/tool-output/" in ended["stdout"]
    await call(tools, "shell", command="rm -rf /tmp/tool-output; touch /tmp/tool-output")
    ended = await call(tools, "shell", command="seq 100000")
    assert "left out here: redirect output to a file to keep all of it]" in ended["stdout"]
    await call(tools, "shell", command="rm /tmp/tool-output")
    ended = await call(tools, "shell", command="head -c 3000 /dev/zero; printf 'ä\\377' >&2")
    assert ended["stdout"].startswith("[binary output, 3000 bytes")
    assert ended["stderr"] == "ä\ufffd"


async def test_a_model_reads_the_output_of_a_command_as_text(call: Caller, tools: ToolSet) -> None:
    async def text(command: str, **more: Any) -> str:
        return (await call.raw(tools, "shell", command=command, **more)).text

    assert await text("echo out") == "out\n"
    assert await text("true") == "[no output]"
    assert await text("echo out; echo err >&2") == "out\n[stderr]\nerr\n"
    assert await text("printf out; printf err >&2; exit 3") == "out\n[stderr]\nerr\n[exit code 3]"
    assert await text("echo err >&2; exit 3") == "err\n[exit code 3]"
    timed_out = await text("echo begun; sleep 31537203", timeout_ms=300)
    assert timed_out.startswith("begun\n[timed out after 0.3 s: killed with all processes that it started; raise ")
    assert timed_out.endswith("]\n[exit code 124]")


async def test_what_the_description_of_a_shell_says_is_so(call: Caller, tools: ToolSet) -> None:
    said = tools["shell"].description
    assert "cd, export and shell variables do not carry over; files do" in said
    await call(tools, "shell", command="cd /tmp; export KEPT=yes; touch /tmp/kept")
    assert (await call(tools, "shell", command="pwd; echo $KEPT; ls /tmp/kept"))["stdout"] == (
        "/home/user\n\n/tmp/kept\n"
    )
    assert "no standard input and no terminal" in said
    assert (await call(tools, "shell", command="cat; test -t 1 || echo none", timeout_ms=20_000))["stdout"] == "none\n"
    assert "`server >server.log 2>&1 &`" in said
    await call(tools, "shell", command="python3 -m http.server 8765 --bind 127.0.0.1 >server.log 2>&1 &")
    assert (
        "Directory listing"
        in (await call(tools, "shell", command="curl -s --retry 20 --retry-connrefused http://127.0.0.1:8765/"))[
            "stdout"
        ]
    )
    await call(tools, "shell", command="kill $(pgrep -f 'http.server 8765')")


# -------------------------------------------------------------------------------------------------------------- files


@pytest.mark.proves(
    "write_file.path", "write_file.content", "write_file.append", "write_file.sandbox",
    "write_file->ok", "write_file->size", "read_file.path", "read_file.sandbox", "read_file->content",
    "read_file->size",
)  # fmt: skip
async def test_what_is_written_is_read(call: Caller, tools: ToolSet) -> None:
    assert await call(tools, "write_file", path="new/notes", content="äh\r\n") == {"ok": True, "size": 5}
    assert await call(tools, "write_file", path="/home/user/new/notes", content="more", append=True) == {
        "ok": True,
        "size": 9,
    }
    assert await call(tools, "read_file", path="new/notes") == {"content": "äh\r\nmore", "size": 9}
    assert await call(tools, "write_file", path="new/notes", content="other", sandbox="other") == {
        "ok": True,
        "size": 5,
    }
    assert await call(tools, "read_file", path="new/notes", sandbox="other") == {"content": "other", "size": 5}
    assert (await call(tools, "read_file", path="new/notes", sandbox="default"))["size"] == 9
    assert await call(tools, "write_file", path="new/notes", content="") == {"ok": True, "size": 0}
    assert await call(tools, "read_file", path="new/notes") == {"content": "", "size": 0}


@pytest.mark.proves("read_file.offset", "read_file.limit", "read_file->next_offset")
async def test_a_file_is_read_in_parts_without_tearing_characters(call: Caller, tools: ToolSet) -> None:
    text = "aé€😀" * 100
    await call(tools, "write_file", path="parts", content=text)
    for limit in (4, 5, 7, 64, 999, 1000, 1001):
        offset, parts = 0, []
        while True:
            part = await call(tools, "read_file", path="parts", offset=offset, limit=limit)
            assert part["size"] == 1000
            assert len(part["content"].encode()) <= limit
            parts.append(part["content"])
            if "next_offset" not in part:
                break
            offset = part["next_offset"]
        assert "".join(parts) == text
    assert await call(tools, "read_file", path="parts", offset=5000) == {"content": "", "size": 1000}
    assert "at least 4 bytes" in await call.error(tools, "read_file", path="parts", offset=6, limit=1)
    assert (await call(tools, "read_file", path="parts", offset=7, limit=3))["content"] == ""  # the rest of a 😀


@pytest.mark.proves("read_file->binary")
async def test_a_binary_file_is_described_by_its_size_and_type(call: Caller, tools: ToolSet, pool: SandboxPool) -> None:
    files = (await pool.get()).files
    for name, data, kind in (
        ("picture", b"\x89PNG\r\n\x1a\n" + bytes(100), "image/png"),
        ("web", b"RIFF\x0c\0\0\0WEBPVP8 " + bytes(100), "image/webp"),
        ("song.mp3", b"\xff\xfb" + bytes(100), "audio/mpeg"),
        ("latin", "Grüße".encode("latin-1"), "application/octet-stream"),
    ):
        await files.write_bytes(name, data)
        assert await call(tools, "read_file", path=name) == {"content": "", "size": len(data), "binary": kind}


async def test_an_image_file_is_shown_as_an_image(call: Caller, tools: ToolSet, pool: SandboxPool) -> None:
    data, kind, _size = IMAGES["a.png"]
    await (await pool.get()).files.write_bytes("a.png", data + bytes(0))
    result = await call.raw(tools, "read_file", path="a.png")
    assert result.structured == {"content": "", "size": len(data), "binary": kind}
    assert isinstance(result.content, tuple)
    _text, image = result.content
    assert isinstance(image, ImagePart)
    assert base64.b64decode(image.data) == data
    await call(tools, "write_file", path="long", content="x" * 70_000)
    result = await call.raw(tools, "read_file", path="long")
    assert result.text == "x" * 30_000 + "\n[stopped before byte 30000 of 70000; continue with offset 30000]"
    assert (await call.raw(tools, "read_file", path="long", offset=70_000)).text == "[nothing from byte 70000 on]"
    await call(tools, "write_file", path="long", content="")
    assert (await call.raw(tools, "read_file", path="long")).text == "[empty file]"


async def test_an_error_about_a_missing_path_suggests_the_nearest_name(call: Caller, tools: ToolSet) -> None:
    await call(tools, "write_file", path="dir/settings.toml", content="")
    assert "did you mean 'settings.toml'?" in await call.error(tools, "read_file", path="dir/setings.toml")
    assert "contains 'settings.toml'" in await call.error(tools, "read_file", path="dir/qqq")
    assert "the directory /home/user/nowhere does not exist" in await call.error(tools, "read_file", path="nowhere/x")
    assert "'~' is not expanded" in await call.error(tools, "write_file", path="~/x", content="")
    assert "directory" in await call.error(tools, "read_file", path="/home/user")
    assert "permission denied" in await call.error(tools, "write_file", path="/etc/x", content="")
    assert "NUL" in await call.error(tools, "read_file", path="a\0b")


@pytest.mark.proves("glob.pattern", "glob.cwd", "glob.sandbox", "glob->files", "glob->truncated")
async def test_files_are_found_by_pattern(call: Caller, tools: ToolSet) -> None:
    await call(tools, "shell", command="mkdir -p g/h; touch g/a.py g/h/b.py g/c.txt g/.d.py g/$(printf 'x\\377').py")
    found = await call(tools, "glob", pattern="g/**/*.py")
    assert sorted(found["files"]) == ["g/a.py", "g/h/b.py", "g/x\\xff.py"]
    assert await call(tools, "glob", pattern="*.txt", cwd="/home/user/g") == {"files": ["c.txt"]}
    assert await call(tools, "glob", pattern="*.txt", cwd="g", sandbox="default") == {"files": ["c.txt"]}
    assert "is named 'oter'" in await call.error(tools, "glob", pattern="*", sandbox="oter")
    assert tools["glob"].input_schema()["properties"]["cwd"]["default"] == "/home/user"
    await call(tools, "shell", command="mkdir many; cd many; seq -f 'f%05g' 2500 | xargs touch")
    found = await call(tools, "glob", pattern="many/*")
    assert (len(found["files"]), found["truncated"]) == (2000, True)
    result = await call.raw(tools, "glob", pattern="g/*.txt")
    assert result.text == "g/c.txt"
    assert (await call.raw(tools, "glob", pattern="g/*.rs")).text == "[no files]"
    await call(tools, "shell", command="cd many; seq -f 'a%05g-with-a-much-longer-name' 2500 | xargs touch")
    result = await call.raw(tools, "glob", pattern="many/*")
    assert len(result.text) < 30_200
    assert result.text.endswith(" files; there may be more: narrow the pattern]")


async def test_a_search_that_takes_too_long_is_given_up(
    call: Caller, tools: ToolSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "MAX_SEARCH_S", 0.001)
    assert "smaller directory" in await call.error(tools, "glob", pattern="**/nothing", cwd="/")


async def test_writes_to_one_file_keep_their_order(call: Caller, tools: ToolSet) -> None:
    calls = [("write_file", {"path": path, "content": f"{n}\n", "append": n > 0})
             for n, path in enumerate(["log", "./log", "/home/user/log", "x/../log"] * 5)]  # fmt: skip
    results = await tools.handle_batch([*calls, ("read_file", {"path": "log"})])
    assert not any(result.is_error for result in results)
    assert results[-1].text == "".join(f"{n}\n" for n in range(20))


# ------------------------------------------------------------------------------------------------------------ browse


@pytest.mark.proves("browse.port", "browse.sandbox", "browse->url")
async def test_a_server_inside_can_be_reached_with_the_url(call: Caller, tools: ToolSet) -> None:
    await call(tools, "write_file", path="site/index.html", content="hello from inside")
    start = "cd site; nohup python3 -m http.server 8123 --bind 127.0.0.1 >/dev/null 2>&1 &"
    await call(tools, "shell", command=start)
    found = await call(tools, "browse", port=8123, sandbox="default")
    assert await anyio.to_thread.run_sync(fetch, found["url"]) == "hello from inside"
    text = (await tools.handle_tool_call("browse", {"port": 8123})).text
    for url in (text.split()[0], text.split()[-1]):
        assert await anyio.to_thread.run_sync(fetch, url) == "hello from inside"
    assert text.split()[-1].startswith("http://127.0.0.1:"), "for clients that cannot resolve *.localhost"


def fetch(url: str) -> str:
    """As a browser does: names below `.localhost` are this machine, and cookies are kept."""
    parts = urllib.parse.urlsplit(url)
    where, headers = f"{parts.path}?{parts.query}", {"Host": parts.netloc}
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", parts.port, timeout=10)
        connection.request("GET", where, headers=headers)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        if answer.status != 303:
            return body
        where = answer.headers["Location"]
        headers["Cookie"] = answer.headers["Set-Cookie"].partition(";")[0]


async def test_a_port_without_a_server_is_an_error(
    call: Caller, tools: ToolSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_vocabulary, "MAX_LISTEN_WAIT_S", 0.2)
    assert "start the server in the background" in await call.error(tools, "browse", port=9)


# -------------------------------------------------------------------------------------------------------- sandboxes


@pytest.mark.proves(
    "sandbox_create.sandbox", "sandbox_create->sandbox", "sandbox_create->created",
    "sandbox_list->sandboxes", "sandbox_list->sandboxes.name", "sandbox_list->sandboxes.image",
    "sandbox_list->sandboxes.status",
)  # fmt: skip
async def test_sandboxes_are_made_once_and_listed(call: Caller, tools: ToolSet, pool: SandboxPool) -> None:
    assert await call(tools, "sandbox_create", sandbox="made") == {"sandbox": "made", "created": True}
    assert await call(tools, "sandbox_create", sandbox="made", image="host") == {"sandbox": "made", "created": False}
    said = await call.error(tools, "sandbox_create", sandbox="made", image="python:3.12")
    assert "made from 'host'" in said
    listed = {each["name"]: each for each in (await call(tools, "sandbox_list"))["sandboxes"]}
    assert listed["made"] == {"name": "made", "image": "host", "status": "running"}
    await (await pool.find("made")).sleep()
    listed = {each["name"]: each for each in (await call(tools, "sandbox_list"))["sandboxes"]}
    assert listed["made"]["status"] == "sleeping"
    for wrong in ("../x", "x" * 31):
        said = await call.error(tools, "sandbox_create", sandbox=wrong)
        rule = "1 to 30 characters: lower-case letters, digits, '-', '_' and '.', beginning with a letter or a digit"
        assert f"allowed are {rule}" in said
        assert rule in tools["sandbox_create"].input_schema()["properties"]["sandbox"]["description"]
    await pool.destroy("made")


@pytest.mark.proves("sandbox_create.image", "sandbox_list->sandboxes")
async def test_a_sandbox_is_made_from_the_image_that_is_named_or_the_pools_own(
    call: Caller, host: Engine, tmp_path: Path
) -> None:
    (tmp_path / "marked").write_text("by the operator")
    own = f"dir:{tmp_path}"
    async with host.pool("imaged", image=own) as pool:
        tools = pool.tools()
        await call(tools, "sandbox_create", sandbox="a")
        await call(tools, "sandbox_create", sandbox="b", image="host")
        assert (await call(tools, "read_file", sandbox="a", path="/marked"))["content"] == "by the operator"
        assert (await call(tools, "shell", sandbox="b", command="test -e /marked"))["exit_code"] == 1
        listed = [(each["name"], each["image"]) for each in (await call(tools, "sandbox_list"))["sandboxes"]]
        assert listed == [("a", own), ("b", "host")]
        assert tools["sandbox_create"].input_schema()["properties"]["image"]["default"] == own
        # A model that could name paths of the host could read all of it.
        for image in ("dir:/", "dir:/etc", "tar:/x.tar", "oci:/x", "localhost:5000/x", "127.0.0.1/x", "[::1]:80/x"):
            assert "cannot be chosen" in await call.error(tools, "sandbox_create", sandbox="c", image=image), image
        assert "not an image reference" in await call.error(tools, "sandbox_create", sandbox="c", image="A B")
        assert [each.name for each in await pool.list()] == ["a", "b"]
        await pool.aclose()


@pytest.mark.proves("sandbox_create.sleep_after_ms")
async def test_a_sandbox_sleeps_after_the_time_that_it_was_made_with(
    call: Caller, tools: ToolSet, pool: SandboxPool
) -> None:
    await call(tools, "sandbox_create", sandbox="tired", sleep_after_ms=1000)
    await call(tools, "sandbox_create", sandbox="awake", sleep_after_ms=0)
    assert "at least 1000" in await call.error(tools, "sandbox_create", sandbox="x", sleep_after_ms=999)
    await call(tools, "write_file", sandbox="tired", path="f", content="kept")

    async def asleep() -> bool:
        return {each.name: each.status for each in await pool.list()}["tired"] == "sleeping"

    await eventually(asleep, "it sleeps")
    assert {each.name: each.status for each in await pool.list()}["awake"] == "running"
    assert (await call(tools, "read_file", sandbox="tired", path="f"))["content"] == "kept"
    for name in ("tired", "awake"):
        await pool.destroy(name)


async def test_the_defaults_that_are_shown_are_the_pools_own(host: Engine, call: Caller, tools: ToolSet) -> None:
    shown = tools["sandbox_create"].input_schema()["properties"]
    assert (shown["image"]["default"], shown["sleep_after_ms"]["default"]) == ("host", 600_000)
    async with host.pool("own", image="alpine:3.20", sleep_after_s=None) as own:
        shown = own.tools()["sandbox_create"].input_schema()["properties"]
        assert (shown["image"]["default"], shown["sleep_after_ms"]["default"]) == ("alpine:3.20", 0)
        assert own.tools()["shell"].input_schema()["properties"]["working_dir"]["default"] == "/home/user"
    async with host.pool("elsewhere", cwd="/srv") as own:
        for name, field in (("shell", "working_dir"), ("glob", "cwd")):
            assert own.tools()[name].input_schema()["properties"][field]["default"] == "/srv"


# ------------------------------------------------------------------------------------------------------------ transfer


@pytest.mark.proves(
    "transfer.from_sandbox", "transfer.from_path", "transfer.to_sandbox", "transfer.to_path", "transfer.recursive",
    "transfer->ok", "transfer->bytes",
)  # fmt: skip
async def test_files_and_trees_go_from_one_sandbox_to_another(call: Caller, tools: ToolSet) -> None:
    make = """
        mkdir -p tree/empty tree/deep/er; cd tree
        echo one > one; printf two > deep/er/two; chmod 750 deep/er/two; chmod 600 one
        ln -s ../one deep/link; ln -s /nowhere/at/all dangling; head -c 3000000 /dev/urandom > large; ln one hard
        sha256sum large > sum
    """
    assert (await call(tools, "shell", command=make, sandbox="builder"))["exit_code"] == 0
    moved = await call(
        tools, "transfer", from_sandbox="builder", from_path="tree", to_sandbox="target", to_path="/tmp/copy",
        recursive=True,
    )  # fmt: skip
    assert moved["ok"] is True
    assert moved["bytes"] >= 3_000_000
    look = "cd /tmp/copy; find . -printf '%P %y %m %l\\n' | sort; sha256sum -c sum; cat deep/link deep/er/two"
    there = (await call(tools, "shell", command=look, sandbox="target"))["stdout"]
    here = (await call(tools, "shell", command=look.replace("/tmp/copy", "tree"), sandbox="builder"))["stdout"]
    assert there == here
    again = await call(
        tools, "transfer", from_sandbox="builder", from_path="tree/", to_sandbox="target", to_path="/tmp/copy",
        recursive=True,
    )  # fmt: skip
    assert again == moved
    assert (await call(tools, "shell", command=look, sandbox="target"))["stdout"] == here

    one = {"from_sandbox": "builder", "from_path": "tree/deep/er/two", "to_sandbox": "target"}
    assert await call(tools, "transfer", **one, to_path="new/name") == {"ok": True, "bytes": 3}
    assert await call(tools, "transfer", **one, to_path="new") == {"ok": True, "bytes": 3}
    assert (await call(tools, "shell", command="cd new; stat -c '%a %n' *", sandbox="target"))["stdout"] == (
        "750 name\n750 two\n"
    )
    directory = {"from_sandbox": "builder", "from_path": "tree", "to_sandbox": "target", "to_path": "x"}
    assert "set recursive" in await call.error(tools, "transfer", **directory)
    assert "set recursive" in await call.error(tools, "transfer", **directory, recursive=False)


async def test_a_transfer_that_cannot_be_says_why(call: Caller, tools: ToolSet, pool: SandboxPool) -> None:
    await call(tools, "shell", command="mkdir -p d; echo x > d/f; mkfifo pipe")
    same = {"from_sandbox": "default", "to_sandbox": "default"}
    into_itself = await call.error(tools, "transfer", **same, from_path="d", to_path="d/e", recursive=True)
    assert "into itself" in into_itself
    assert "the same file" in await call.error(tools, "transfer", **same, from_path="d/f", to_path="d/../d/f")
    assert "the same file" in await call.error(tools, "transfer", **same, from_path="d/f", to_path="d")
    assert "a fifo" in await call.error(tools, "transfer", **same, from_path="pipe", to_path="x")
    assert "did you mean 'f'?" not in await call.error(tools, "transfer", **same, from_path="d/zzz", to_path="x")
    known = len(await pool.list())
    said = await call.error(
        tools, "transfer", from_sandbox="defaul", from_path="d", to_sandbox="unborn", to_path="x", recursive=True
    )
    assert "did you mean 'default'?" in said
    assert len(await pool.list()) == known
    assert "permission denied" in await call.error(tools, "transfer", **same, from_path="d/f", to_path="/etc/f")


async def test_a_transfer_does_not_leave_its_directory(call: Caller, tools: ToolSet, pool: SandboxPool) -> None:
    """A link that stands in the way inside of the target is not followed."""
    await call(tools, "shell", command="mkdir -p out/sub; echo evil > out/sub/file", sandbox="builder")
    await call(tools, "shell", command="mkdir -p in elsewhere; ln -s ~/elsewhere in/sub", sandbox="target")
    await tools.handle_tool_call(
        "transfer",
        {"from_sandbox": "builder", "from_path": "out", "to_sandbox": "target", "to_path": "in", "recursive": True},
    )
    assert (await call(tools, "shell", command="ls elsewhere", sandbox="target"))["stdout"] == ""


async def test_a_transfer_takes_no_more_memory_than_is_under_way(call: Caller, tools: ToolSet) -> None:
    await call(tools, "shell", sandbox="builder", command="mkdir big; head -c 64M /dev/zero > big/file")
    one = {"from_sandbox": "builder", "from_path": "big/file", "to_sandbox": "target", "to_path": "file"}
    tree = {"from_sandbox": "builder", "from_path": "big", "to_sandbox": "target", "to_path": "big", "recursive": True}
    for ask in (one, tree):
        tracemalloc.start()
        try:
            assert (await call(tools, "transfer", **ask))["bytes"] == 64 << 20
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()


# ------------------------------------------------------------------------------------------------------ one sandbox


async def test_tools_of_one_sandbox_do_not_name_it(call: Caller, pool: SandboxPool) -> None:
    sandbox = await pool.get()
    tools = sandbox.tools()
    assert [tool.name for tool in tools] == ["shell", "read_file", "write_file", "glob", "browse"]
    assert all("sandbox" not in tool.input_schema()["properties"] for tool in tools)
    assert (await call(tools, "shell", command="hostname"))["stdout"] == "tools.default\n"
    assert "no field 'sandbox'" in await call.error(tools, "shell", command="true", sandbox="default")


async def test_an_error_about_a_dead_sandbox_uses_the_names_that_the_model_knows(
    call: Caller, tools: ToolSet, pool: SandboxPool
) -> None:
    await call(tools, "sandbox_create", sandbox="doomed")
    sandbox = await pool.find("doomed")
    bound = sandbox.tools()
    async with anyio.create_task_group() as group:
        group.start_soon(_fails_with, call, tools, "'doomed'")
        await eventually_running(pool, "doomed")
        await pool.destroy("doomed")
    said = await call.error(bound, "shell", command="true")
    assert "destroyed" in said
    assert "no sandbox is named 'doomed'" in await call.error(tools, "read_file", sandbox="doomed", path="x")


async def test_a_sandbox_that_has_died_can_be_started_again(
    call: Caller, tools: ToolSet, pool: SandboxPool, host: Engine
) -> None:
    await call(tools, "write_file", sandbox="killed", path="f", content="kept")
    (pid,) = [info.pid for info in await host.list() if info.name == "tools.killed"]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    async def dead() -> bool:
        return {each.name: each.status for each in await pool.list()}["killed"] == "error"

    await eventually(dead, "it is seen to have died")
    said = await call.error(tools, "read_file", sandbox="killed", path="f")
    assert "'killed' has ended" in said
    assert "sandbox_create with its name starts it" in said
    assert await call(tools, "sandbox_create", sandbox="killed") == {"sandbox": "killed", "created": False}
    assert (await call(tools, "read_file", sandbox="killed", path="f"))["content"] == "kept"
    await pool.destroy("killed")


async def _fails_with(call: Caller, tools: ToolSet, words: str) -> None:
    said = await call.error(tools, "shell", sandbox="doomed", command="touch started; sleep 31537203")
    assert words in said, said


async def eventually_running(pool: SandboxPool, name: str) -> None:
    sandbox = await pool.find(name)

    async def started() -> bool:
        return await sandbox.files.exists("started")

    await eventually(started, "the command runs")


async def test_each_runtime_is_driven_in_the_same_way(engine: Engine, call: Caller) -> None:
    async with engine.pool("smoke") as pool:
        tools = pool.tools()
        await call(tools, "write_file", path="d/f", content="x" * 100_000)
        assert (await call(tools, "shell", command="wc -c < d/f"))["stdout"] == "100000\n"
        moved = await call(
            tools, "transfer", from_sandbox="default", from_path="d", to_sandbox="b", to_path="e", recursive=True
        )
        assert moved["bytes"] == 100_000
        assert await call(tools, "glob", sandbox="b", pattern="**/f") == {"files": ["e/f"]}
        assert (await call(tools, "read_file", sandbox="b", path="e/f", limit=10))["next_offset"] == 10
        await pool.aclose()
