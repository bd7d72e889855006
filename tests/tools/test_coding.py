"""The coding tools on a real sandbox: every field does what its schema says, and children are children."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, ClassVar

import anyio
import pytest

from atoll.tools import coding
from atoll.tools.coding import CodingView, coding_tools, pool_coding_tools
from atoll.tools.sprites import sprite_tools
from atoll.tools.tasks import TaskEvent, TaskOutput, Tasks
from atoll.tools.tool import ImagePart, TextPart, ToolSet

if TYPE_CHECKING:
    from atoll import Engine, Sandbox
    from atoll.runtime.sandbox_pool import SandboxPool
    from tests.tools.conftest import Caller


IMAGES = {
    "a.png": (
        base64.b64decode(
            "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
        ),
        "image/png",
        (1, 1),
    ),
    "b": (base64.b64decode("R0lGODlhAgADAIAAAAAAAP///yH5BAEAAAAALAAAAAACAAMAAAICjFMAOw=="), "image/gif", (2, 3)),
    "c.jpg": (
        b"\xff\xd8\xff\xe0\0\x04AB\xff\xff\xc4\0\x02\xff\xc2\0\x0b\x08\0\x10\0\x20\x01\x01\x11\0" + b"\xff\xd9",
        "image/jpeg",
        (32, 16),
    ),
    "d": (b"RIFF\x16\0\0\0WEBPVP8L\x0a\0\0\0\x2f\x03\xc0\x01\0" + bytes(5), "image/webp", (4, 8)),
    "e": (b"RIFF\x16\0\0\0WEBPVP8 \x0a\0\0\0" + bytes(6) + b"\x05\0\x06\0", "image/webp", (5, 6)),
    "f": (b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0" + bytes(4) + b"\x06\0\0\x07\0\0", "image/webp", (7, 8)),
}
"""As small as they can be: name, content, media type, width and height."""


@pytest.fixture(scope="module")
async def box(pool: SandboxPool) -> Sandbox:
    return await pool.get()


@pytest.fixture
async def tools(box: Sandbox) -> AsyncIterator[ToolSet]:
    await box.files.mkdir("code")
    yield coding_tools(box, cwd="/home/user/code")
    await box.files.remove("code", recursive=True)


# --------------------------------------------------------------------------------------------------------------- read


@pytest.mark.proves("read.path", "read.offset", "read.limit", "read->content", "read->kind", "read->nextOffset")
async def test_a_file_is_read_by_lines_and_says_where_it_stopped(call: Caller, tools: ToolSet, box: Sandbox) -> None:
    await box.files.write_text("code/f", "".join(f"n {n}\n" for n in range(1, 5001)))
    first = await call.raw(tools, "read", path="f")
    assert first.text.startswith("     1\tn 1\n     2\tn 2\n")
    assert first.text.endswith("  2000\tn 2000\n[stopped after line 2000; continue with offset 2001]")
    assert first.structured is not None
    assert first.structured["nextOffset"] == 2001
    assert first.structured["content"].startswith("n 1\nn 2\n")
    part = await call.raw(tools, "read", path="/home/user/code/f", offset=4999, limit=1)
    assert part.text == "  4999\tn 4999\n[stopped after line 4999; continue with offset 5000]"
    assert await call(tools, "read", path="f", offset=5000) == {"content": "n 5000\n", "kind": "file"}
    assert "has 5000 lines" in await call.error(tools, "read", path="f", offset=5001)
    assert "has 5000 lines" in await call.error(tools, "read", path="f", offset=9999)

    await box.files.write_text("code/f", "a\nb")
    assert (await call.raw(tools, "read", path="f")).text == "     1\ta\n     2\tb"
    assert (await call(tools, "read", path="f", offset=2))["content"] == "b"
    for offset in (3, 4):
        assert "has 2 lines" in await call.error(tools, "read", path="f", offset=offset)
    assert await call(tools, "read", path="f", limit=1) == {"content": "a\n", "kind": "file", "nextOffset": 2}
    await box.files.write_text("code/f", "")
    assert (await call.raw(tools, "read", path="f")).text == "[empty file]"


async def test_reading_in_parts_gives_the_whole_file(call: Caller, tools: ToolSet, box: Sandbox) -> None:
    text = "".join(f"{'é' * (n * 7 % 400)}\r\n" for n in range(1500)) + "the end"
    await box.files.write_text("code/f", text)
    offset: int | None = 1
    parts = []
    while offset is not None:
        part = await call(tools, "read", path="f", offset=offset)
        assert len(part["content"].encode()) <= 30_000
        parts.append(part["content"])
        offset = part.get("nextOffset")
    assert "".join(parts) == text


async def test_a_long_line_is_cut_and_a_binary_file_is_described(
    call: Caller, tools: ToolSet, box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    await box.files.write_text("code/long", "ä" * 100_000 + "\nnext\n")
    result = await call.raw(tools, "read", path="long")
    assert result.text.endswith("[line 1 is longer than 30 KB and cut here; use bash to read the rest]")
    assert (await call(tools, "read", path="long", offset=2))["content"] == "next\n"
    await box.files.write_bytes("code/data.bin", b"\x7fELF\0\1\2")
    result = await call.raw(tools, "read", path="data.bin")
    assert result.text == "[data.bin: 7 bytes of application/x-executable, not a text file]"
    assert result.structured == {"content": "", "kind": "binary"}
    monkeypatch.setattr(coding, "MAX_SCAN_BYTES", 1000)
    assert "use bash" in await call.error(tools, "read", path="long", offset=2)
    await box.exec("mkfifo code/pipe")
    assert "not a regular file" in await call.error(tools, "read", path="pipe")


async def test_an_image_is_shown_and_what_cannot_be_is_described(call: Caller, tools: ToolSet, box: Sandbox) -> None:
    for name, (data, kind, size) in IMAGES.items():
        await box.files.write_bytes(f"code/{name}", data)
        result = await call.raw(tools, "read", path=name)
        assert result.structured == {"content": "", "kind": "binary"}
        assert isinstance(result.content, tuple)
        text, image = result.content
        assert isinstance(text, TextPart)
        assert isinstance(image, ImagePart)
        assert text.text == f"[{name}: {kind}, {size[0]}x{size[1]} pixels, {len(data)} bytes]"
        assert (image.mime_type, base64.b64decode(image.data)) == (kind, data)
    png = IMAGES["a.png"][0]
    for data, why in (
        (png[:-20], "damaged or incomplete"),
        (png[:16] + b"\0\0\x20\0" + png[20:], "8192x1 pixels"),
        (png[:16] + bytes(4) + png[20:], "0x1 pixels"),
        (png + bytes(4_000_000), "more than the 3.7 MB that can be shown"),
    ):
        await box.files.write_bytes("code/odd", data)
        result = await call.raw(tools, "read", path="odd")
        assert isinstance(result.content, str)
        assert why in result.text
        assert not result.is_error


async def test_a_directory_is_listed(call: Caller, tools: ToolSet, box: Sandbox) -> None:
    await box.exec("cd code; mkdir sub; touch b a .hidden; touch $(printf 'x\\377')")
    result = await call.raw(tools, "read", path=".")
    assert result.text == ".hidden\na\nb\nsub/\nx\\xff\n"
    part = await call.raw(tools, "read", path=".", offset=2, limit=2)
    assert part.text == "a\nb\n[stopped after entry 3 of 5; continue with offset 4]"
    assert part.structured == {"content": "a\nb\n", "kind": "directory", "nextOffset": 4}
    assert (await call.raw(tools, "read", path="sub")).text == "[empty directory]"
    assert "did you mean 'sub'?" in await call.error(tools, "read", path="sbu")


# ------------------------------------------------------------------------------------------------------ write and edit


@pytest.mark.proves("write.path", "write.content", "write->path", "write->size")
async def test_a_file_is_written_whole(call: Caller, tools: ToolSet, box: Sandbox) -> None:
    assert await call(tools, "write", path="new/f", content="é\n") == {"path": "new/f", "size": 3}
    assert await box.files.read_bytes("code/new/f") == "é\n".encode()
    await box.files.chmod("code/new/f", 0o755)
    await call(tools, "write", path="/home/user/code/new/f", content="")
    assert (await box.files.stat("code/new/f")).mode == 0o755
    assert "permission denied" in await call.error(tools, "write", path="/etc/x", content="")
    assert "directory" in await call.error(tools, "write", path="new", content="")


@pytest.mark.proves(
    "edit.path", "edit.oldText", "edit.newText", "edit.replaceAll", "edit->path", "edit->replacements"
)  # fmt: skip
async def test_an_edit_is_exact_and_unique_or_of_all(call: Caller, tools: ToolSet, box: Sandbox) -> None:
    text = "one two\r\n\ttwo three\nTWO\n"
    await box.files.write_text("code/f", text)
    said = await call.error(tools, "edit", path="f", oldText="two", newText="2")
    assert "found 2 matches" in said
    assert "at lines 1, 2" in said
    assert "found 0 matches" in await call.error(tools, "edit", path="f", oldText="four", newText="4")
    said = await call.error(tools, "edit", path="f", oldText="    two three", newText="")
    assert "at line 2 it differs only in white space" in said
    assert await box.files.read_bytes("code/f") == text.encode()
    assert await call(tools, "edit", path="f", oldText="one two\r\n", newText="x\\1$&") == {
        "path": "f",
        "replacements": 1,
    }
    assert await box.files.read_bytes("code/f") == b"x\\1$&\ttwo three\nTWO\n"
    assert (await call(tools, "edit", path="f", oldText="t", newText="tt", replaceAll=True))["replacements"] == 2
    assert await box.files.read_bytes("code/f") == b"x\\1$&\tttwo tthree\nTWO\n"
    assert "did you mean 'f'" not in await call.error(tools, "edit", path="gone", oldText="a", newText="b")
    await box.files.write_bytes("code/bin", b"a\0b")
    assert "not a text file" in await call.error(tools, "edit", path="bin", oldText="a", newText="b")


async def test_writes_and_edits_of_one_file_keep_their_order(tools: ToolSet, box: Sandbox) -> None:
    calls: list[tuple[str, object]] = [("write", {"path": "f", "content": "0"})]
    for n in range(20):
        path = ("f", "./f", "/home/user/code/f")[n % 3]
        calls.append(("edit", {"path": path, "oldText": str(n), "newText": str(n + 1)}))
    results = await tools.handle_batch([*calls, ("read", {"path": "f"}), ("write", {"path": "g", "content": "beside"})])
    assert [result.text for result in results if result.is_error] == []
    assert results[-2].text == "     1\t20"


# --------------------------------------------------------------------------------------------------------------- bash


@pytest.mark.proves("bash.command", "bash->output", "bash->exitCode", "bash->cutBytes")
async def test_a_command_shows_its_output_in_order_and_its_exit_code(call: Caller, tools: ToolSet) -> None:
    result = await call.raw(tools, "bash", command="echo a; echo b >&2; echo c; [[ $BASH_VERSION ]] && pwd; exit 7")
    assert result.text == "a\nb\nc\n/home/user/code\n[exit code 7]"
    assert result.structured == {"output": "a\nb\nc\n/home/user/code\n", "exitCode": 7, "cutBytes": 0}
    assert not result.is_error
    assert (await call.raw(tools, "bash", command="true")).text == "[no output]"
    assert (await call(tools, "bash", command='echo "$0 it\'s"'))["output"] == "bash it's\n"
    assert (await call(tools, "bash", command="head -c 10 /dev/zero"))["output"].startswith("[binary output, 10 bytes")


@pytest.mark.proves("bash->cutBytes")
async def test_output_is_cut_in_the_middle_and_the_whole_is_saved(call: Caller, tools: ToolSet) -> None:
    assert (await call(tools, "bash", command="seq 6000"))["cutBytes"] == 0
    kept = await call(tools, "bash", command="yes 0123456789012345678901234567890123456789 | head -n 5000")
    [note] = [line for line in kept["output"].splitlines() if line.startswith("[")]
    shown = kept["output"].replace(f"{note}\n", "")
    assert len(shown) <= 30_000
    assert set(shown.splitlines()) == {"0123456789" * 4}
    assert kept["cutBytes"] + len(shown) == 5000 * 41
    [saved] = re.findall(r"all of it is in (/tmp/tool-output/\S+)\]", note)
    assert (await call(tools, "bash", command=f"wc -c < {saved}"))["output"] == f"{5000 * 41}\n"
    one = await call(tools, "bash", command="yes ä | head -n 100000 | tr -d '\\n'")
    text = re.sub(r"\n\[.*\]\n", "", one["output"])
    assert 30_000 - 4 <= len(text.encode()) <= 30_000
    assert set(text) == {"ä"}


@pytest.mark.proves("bash.user")
async def test_a_command_can_be_of_root(call: Caller, tools: ToolSet) -> None:
    assert (await call(tools, "bash", command="id -un"))["output"] == "user\n"
    assert (await call(tools, "bash", command="id -un", user="root"))["output"] == "root\n"
    assert "no user 'nobody-such'" in await call.error(tools, "bash", command="true", user="nobody-such")


@pytest.mark.proves("bash.timeout", "bash->exitCode", "bash->output")
async def test_a_time_out_is_exit_code_124_with_what_was_printed(call: Caller, tools: ToolSet, box: Sandbox) -> None:
    result = await call.raw(tools, "bash", command="echo begun; (sleep 31537211 &); sleep 31537212", timeout=0.4)
    assert not result.is_error
    assert result.structured == {"output": "begun\n", "exitCode": 124, "cutBytes": 0}
    assert "timed out after 0.4 s" in result.text
    assert "raise timeout if it needs longer" in result.text
    assert "3153721" not in " ".join(process.command for process in await box.ps())
    assert (await call(tools, "bash", command="sleep 0.5; echo done", timeout=30))["output"] == "done\n"


# ------------------------------------------------------------------------------------------------------ grep and glob


@pytest.mark.proves(
    "grep.pattern", "grep.path", "grep.include", "grep->matches", "grep->truncated",
    "grep->matches.path", "grep->matches.line", "grep->matches.text",
)  # fmt: skip
async def test_lines_are_found(call: Caller, tools: ToolSet, box: Sandbox) -> None:
    await box.exec("cd code; mkdir -p src/deep; echo 'def one(): 1' > src/a.py; echo 'def two()' > src/deep/b.txt")
    result = await call.raw(tools, "grep", pattern="def [a-z]+\\(")
    assert sorted(result.text.splitlines()) == ["src/a.py:1: def one(): 1", "src/deep/b.txt:1: def two()"]
    found = await call(tools, "grep", pattern="def", path="src", include="*.py")
    assert found == {"matches": [{"path": "src/a.py", "line": 1, "text": "def one(): 1"}], "truncated": False}
    for include, names in (("src/*.py", ["src/a.py"]), ("**/*.txt", ["src/deep/b.txt"]), ("deep/*", [])):
        found = await call(tools, "grep", pattern="def", include=include)
        assert [match["path"] for match in found["matches"]] == names, include
    assert (await call(tools, "grep", pattern="def", path="src/a.py"))["matches"][0]["path"] == "src/a.py"
    assert (await call.raw(tools, "grep", pattern="nothing of it")).text == "[no matches]"
    assert "pattern" in await call.error(tools, "grep", pattern="(")
    assert (await call(tools, "grep", pattern=r"\bone\b.*\d$"))["matches"][0]["line"] == 1
    assert "look-around" in await call.error(tools, "grep", pattern="def(?= one)")
    await box.exec("cd code; seq 3000 | sed 's/$/ x/' > many")
    result = await call.raw(tools, "grep", pattern="x", path="many")
    assert result.text.endswith("[stopped after 1000 matches; there are more: narrow the search]")
    assert result.structured is not None
    assert result.structured["truncated"] is True


@pytest.mark.proves(
    "grep.ignore_case", "grep.context", "grep->matches.before", "grep->matches.after"
)  # fmt: skip
async def test_lines_are_found_in_any_case_and_shown_with_their_neighbours(
    call: Caller, tools: ToolSet, box: Sandbox
) -> None:
    await box.files.write_text("code/a", "".join(f"line {n}\n" for n in range(1, 21)))
    await box.files.write_text("code/b", "LINE 5\n")
    assert (await call.raw(tools, "grep", pattern="line 5$")).text == "a:5: line 5\n"
    result = await call.raw(tools, "grep", pattern="line 5$", ignore_case=True)
    assert result.text == "a:5: line 5\nb:1: LINE 5\n"
    result = await call.raw(tools, "grep", pattern="line (5|7|12)$", context=2, ignore_case=True)
    assert result.text.splitlines() == [
        "a-3- line 3", "a-4- line 4", "a:5: line 5", "a-6- line 6", "a:7: line 7", "a-8- line 8", "a-9- line 9",
        "a-10- line 10", "a-11- line 11", "a:12: line 12", "a-13- line 13", "a-14- line 14",
        "--", "b:1: LINE 5",
    ]  # fmt: skip
    assert result.structured is not None
    assert result.structured["matches"][0] == {
        "path": "a", "line": 5, "text": "line 5", "before": ["line 3", "line 4"], "after": ["line 6"],
    }  # fmt: skip
    # However much is asked for, each line comes once.
    result = await call.raw(tools, "grep", pattern="line", context=100)
    assert result.structured is not None
    assert [set(each) for each in result.structured["matches"]] == [{"path", "line", "text"}] * 20
    result = await call.raw(tools, "grep", pattern="line .?[05]$", context=100)
    assert result.text.count("line ") == 20
    assert str(result.structured).count("line ") == 20
    result = await call.raw(tools, "grep", pattern="line (2|9)$", context=1)
    assert result.text == "a-1- line 1\na:2: line 2\na-3- line 3\n--\na-8- line 8\na:9: line 9\na-10- line 10\n"


@pytest.mark.proves("glob.pattern", "glob.path", "glob->files", "glob->truncated")
async def test_files_are_found(call: Caller, tools: ToolSet, box: Sandbox) -> None:
    await box.exec("cd code; mkdir -p src/deep; touch src/a.py src/deep/b.py c.py")
    assert sorted((await call(tools, "glob", pattern="**/*.py"))["files"]) == ["c.py", "src/a.py", "src/deep/b.py"]
    assert await call(tools, "glob", pattern="*.py", path="src/deep") == {
        "files": ["src/deep/b.py"],
        "truncated": False,
    }
    assert (await call.raw(tools, "glob", pattern="*.rs")).text == "[no files]"
    await box.exec("cd code; mkdir many; cd many; seq -f 'f%05g' 2500 | xargs touch")
    found = await call(tools, "glob", pattern="*", path="many")
    assert (len(found["files"]), found["truncated"]) == (2000, True)


# --------------------------------------------------------------------------------------------------------------- task


class Scripted:
    """A runner whose children do what their prompts say, one call to a line, with the tools of their view."""

    roles: ClassVar = {"worker": "does things", "reviewer": "looks at things"}

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int, list[str]]] = []
        self.ended = 0
        self.blocked = anyio.Event()

    async def start(
        self, *, id: str, role: str, prompt: str, cwd: str, depth: int, view: CodingView
    ) -> AsyncGenerator[TaskEvent | TaskOutput, None]:
        tools = view.tools()
        self.seen.append((role, cwd, depth, [tool.name for tool in tools]))
        said = []
        try:
            for line in prompt.splitlines():
                tool, _, arguments = line.partition(" ")
                if tool == "wait":
                    self.blocked.set()
                    await anyio.sleep_forever()
                result = await tools.handle_tool_call(tool, arguments)
                said.append(result.text)
                yield TaskEvent(task="forged", kind="call", data={"tool": tool, "error": result.is_error})
            yield TaskOutput(output="\n".join(said))
        finally:
            self.ended += 1


@pytest.fixture
def runner() -> Scripted:
    return Scripted()


@pytest.fixture
def events() -> list[TaskEvent]:
    return []


@pytest.fixture
def tasks(runner: Scripted, events: list[TaskEvent]) -> Tasks:
    return Tasks(runner, events.append)


@pytest.fixture
def parent(box: Sandbox, tools: ToolSet, tasks: Tasks) -> ToolSet:
    return coding_tools(box, cwd="/home/user/code", tasks=tasks)


@pytest.mark.proves(
    "task.prompt", "task.role", "task.cwd", "task->id", "task->role", "task->status", "task->output"
)  # fmt: skip
async def test_a_child_works_in_its_directory_and_answers(
    call: Caller, parent: ToolSet, runner: Scripted, box: Sandbox, events: list[TaskEvent]
) -> None:
    await box.files.write_text("code/part/data", "of the part")
    await box.files.write_text("code/secret", "of the whole")
    await box.exec("cd code/part; ln -s ../secret link; ln -s .. up; ln -s data inner; mkdir d; ln -s /etc d/etc")
    prompt = """read {"path": "data"}
bash {"command": "pwd"}
write {"path": "made", "content": "by the child"}
read {"path": "../secret"}
read {"path": "/home/user/code/secret"}
glob {"pattern": "../*"}
glob {"pattern": "{..,x}/secret"}
grep {"pattern": "whole", "path": "/home/user/code"}
edit {"path": "x/../../secret", "oldText": "of", "newText": "no"}
read {"path": "link"}
write {"path": "up/secret", "content": "overwritten"}
write {"path": "link", "content": "overwritten"}
edit {"path": "link", "oldText": "of", "newText": "no"}
grep {"pattern": "whole", "path": "up"}
glob {"pattern": "up/sec*"}
glob {"pattern": "*/etc/passwd"}
task {"prompt": "x", "cwd": "up"}
read {"path": "inner"}
glob {"pattern": "in*"}"""
    done = await call(parent, "task", prompt=prompt, role="reviewer", cwd="part")
    assert done["role"] == "reviewer"
    assert done["status"] == "completed"
    assert done["id"].startswith("task-")
    lines = done["output"].splitlines()
    assert lines[0] == "     1\tof the part"
    assert lines[1] == "/home/user/code/part"
    assert await box.files.read_text("code/part/made") == "by the child"
    assert await box.files.read_text("code/secret") == "of the whole"
    assert "of the whole" not in done["output"]
    assert sum("outside of /home/user/code/part" in line for line in lines) == 10
    assert "passwd" not in done["output"]
    assert lines[-2:] == ["     1\tof the part", "inner"]
    assert runner.seen == [
        ("reviewer", "/home/user/code/part", 2, ["read", "write", "edit", "bash", "grep", "glob", "task"])
    ]
    assert [event.kind for event in events] == ["started", *["call"] * 19, "ended"]
    assert {event.task for event in events} == {done["id"]}
    assert events[0].data == {"role": "reviewer", "cwd": "/home/user/code/part", "depth": 2}
    assert events[-1].data == {"status": "completed"}
    assert (await call(parent, "task", prompt='read {"path": "secret"}'))["output"] == "     1\tof the whole"
    assert runner.seen[-1][:2] == ("worker", "/home/user/code")


async def test_a_child_that_cannot_be_is_refused(call: Caller, parent: ToolSet, events: list[TaskEvent]) -> None:
    assert "'worker' or 'reviewer'" in await call.error(parent, "task", prompt="x", role="boss")
    assert "no such file" in await call.error(parent, "task", prompt="x", cwd="nowhere")
    await call(parent, "write", path="file", content="")
    assert "not a directory" in await call.error(parent, "task", prompt="x", cwd="file")
    assert events == []


async def test_children_have_children_down_to_a_limit(call: Caller, parent: ToolSet, runner: Scripted) -> None:
    done = await call(parent, "task", prompt='task {"prompt": "task {}\\nbash {\\"command\\": \\"echo deep\\"}"}')
    assert "there is no tool 'task'" in done["output"]
    assert "deep" in done["output"]
    assert [depth for _role, _cwd, depth, _tools in runner.seen] == [2, 3]
    assert "task" not in runner.seen[1][3]


async def test_without_a_runner_there_is_no_task(tools: ToolSet) -> None:
    assert [tool.name for tool in tools] == ["read", "write", "edit", "bash", "grep", "glob"]


async def test_a_child_ends_with_its_parent(
    parent: ToolSet, runner: Scripted, tasks: Tasks, events: list[TaskEvent]
) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(parent.handle_tool_call, "task", {"prompt": "wait"})
        await runner.blocked.wait()
        assert len(tasks.running) == 1
        group.cancel_scope.cancel()
    assert runner.ended == 1
    assert tasks.running == {}
    assert events[-1].data == {"status": "cancelled"}


async def test_a_child_can_be_cancelled_and_the_parent_gets_an_error(
    call: Caller, parent: ToolSet, runner: Scripted, tasks: Tasks, events: list[TaskEvent]
) -> None:
    said: list[str] = []

    async def ask() -> None:
        said.append(await call.error(parent, "task", prompt="wait"))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await runner.blocked.wait()
            assert tasks.cancel(events[0].task)
    assert "was cancelled" in said[0]
    assert runner.ended == 1
    assert events[-1].data == {"status": "cancelled"}
    assert not tasks.cancel(events[0].task)


async def test_the_sandbox_of_a_session_is_made_when_a_tool_is_first_called(host: Engine) -> None:
    async with host.pool("lazy", temporary=True) as pool:
        tools = pool_coding_tools(pool)
        assert [tool.name for tool in tools] == ["read", "write", "edit", "bash", "grep", "glob"]
        assert await pool.list() == []
        wrong = await tools.handle_tool_call("read", {"path": "none"})
        assert wrong.text.startswith("/home/user/none: no such file or directory; /home/user contains ")
        assert [each.name for each in await pool.list()] == ["default"]
        # Paths that mean the same file take turns, as with a sandbox that is there already.
        writes = [("write", {"path": path, "content": f"{n}\n"}) for n, path in enumerate(("f", "./f", "/home/user/f"))]
        results = await tools.handle_batch([*writes, ("edit", {"path": "f", "oldText": "2", "newText": "3"})])
        assert not [result.text for result in results if result.is_error]
        assert (await tools.handle_tool_call("read", {"path": "f"})).text == "     1\t3\n"


async def test_on_output_receives_what_the_command_of_its_call_prints_and_nothing_else(host: Engine) -> None:
    async with host.pool("followed", temporary=True) as pool:
        heard = bytearray()
        for tools, name, arguments in (
            (pool.tools(), "shell", {"command": "echo out; echo err >&2"}),
            (pool_coding_tools(pool), "bash", {"command": "echo out; echo err >&2"}),
            (sprite_tools(pool), "sprite_exec", {"name": "default", "command": "echo out; echo err >&2"}),
        ):
            heard.clear()
            await tools.handle_tool_call(name, arguments, on_output=heard.extend)
            assert sorted(heard.split()) == [b"err", b"out"], name
            await tools.handle_tool_call(name, arguments)
            assert len(heard) == 8, name
