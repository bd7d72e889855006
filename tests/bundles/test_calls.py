"""Calls of tools in a workspace: what they get, what a model sees of their results, and that none harms another."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from atoll.bundles.build import remove_built
from atoll.bundles.dispatch import BUNDLE_DIRECTORY, MAX_RESULT_BYTES
from atoll.bundles.workspace import Workspace, WorkspaceInstance, WorkspaceSpec
from atoll.contract.model import Limits
from atoll.runtime.interface import Engine
from atoll.testing.waiting import eventually
from atoll.tools.tool import ImagePart, MediaPart, TextPart, ToolResult
from tests.bundles.making import manifest, packed, stored

pytestmark = pytest.mark.runtimes("crun", "runsc")

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
SOURCE = '''
    import asyncio, os, signal, subprocess, sys, time
    from dataclasses import dataclass
    from typing import TypedDict

    STATE = []

    def give(args):
        """Return what is given."""
        return args["value"]

    def undecodable(args):
        return {"ok": True, "content": [os.fsdecode(b"a\\xffb"), chr(0x1f600)]}

    async def later(args):
        await asyncio.sleep(0.01)
        return {"ok": True, "content": "later"}

    def named(path: str, lines: int = 3, *, mode="r"):
        return {"ok": True, "content": [path, lines, mode]}

    @dataclass
    class Options:
        path: str
        lines: int = 3

    def options(args: Options):
        return {"ok": True, "content": f"{args.path}:{args.lines}"}

    class Fields(TypedDict):
        path: str

    def fields(args: Fields):
        return {"ok": True, "content": args["path"]}

    def fail(args):
        print("printed before")
        raise LookupError("nothing is known")

    def end(args):
        if args["how"] == "exit":
            os._exit(3)
        if args["how"] == "sys.exit":
            sys.exit(4)
        os.kill(os.getpid(), getattr(signal, args["how"]))

    def wait(args):
        """Wait, with a daemon that has left the session."""
        subprocess.Popen(["setsid", "sh", "-c", "sleep 1000 & exec sleep 1001"])
        with open("/workspace/waiting", "w") as file:
            file.write("now")
        time.sleep(args["seconds"])
        return {"ok": True, "content": "waited"}

    def keep(args):
        return {"ok": True, "content": str(subprocess.Popen(["sleep", "1002"]).pid)}

    def count(args):
        STATE.append(1)
        return {"ok": True, "content": len(STATE)}

    def eat(args):
        return {"ok": True, "content": len(bytearray(600 << 20))}

    def grow(args):
        return {"ok": True, "content": "," * args["size"]}

    def say(args):
        print("to stdout", flush=True)
        print("to stderr", file=sys.stderr, flush=True)
        os.write(1, b"\\xff raw\\n")
        return {"ok": True, "content": "said"}
'''
TOOLS = (
    *("give", "later", "named", "options", "fields", "fail", "end", "wait", "keep", "count", "eat", "say", "grow"),
    "undecodable",
)


@pytest.fixture(scope="module")
async def workspace(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workspace]:
    bundle = await stored(tmp_path_factory.mktemp("bundle") / "made.tgz", packed(SOURCE, manifest(*TOOLS)))

    async def record(instance: WorkspaceInstance) -> None:
        assert instance.reason is None, instance.message

    limits = Limits(memory_bytes=512 << 20)
    spec = WorkspaceSpec(sandbox="calls", bundle=bundle, call_timeout_s=30, limits=limits)
    made = Workspace(engine, spec, record)
    await made.boot()
    yield made
    await made.destroy()
    await remove_built(engine, bundle.sha256)


async def call(workspace: Workspace, tool: str, /, **arguments: Any) -> ToolResult:
    return await workspace.tools(TOOLS).handle_tool_call(tool, arguments)


async def given(workspace: Workspace, value: object) -> ToolResult:
    return await call(workspace, "give", value=value)


async def running(workspace: Workspace, command: str) -> bool:
    box = await workspace.engine.get("calls")
    return bool((await box.exec(["pgrep", "-f", f"^{command}"])).stdout.strip())


# ------------------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("text, naïve ☃", "text, naïve ☃"),
        ({"a": [1, None, "ü"]}, '{"a": [1, null, "ü"]}'),
        (None, "null"),
        ([], "[]"),
        ([{"kind": "Pod", "name": "x"}], '[{"kind": "Pod", "name": "x"}]'),
    ],
)
async def test_content_is_text_or_json(workspace: Workspace, content: object, shown: str) -> None:
    result = await given(workspace, {"ok": True, "content": content})
    assert (result.content, result.is_error) == (shown, False)


async def test_a_result_that_is_not_ok_is_an_error_to_the_model(workspace: Workspace) -> None:
    result = await given(workspace, {"ok": False, "content": "path must be a string"})
    assert (result.content, result.is_error) == ("path must be a string", True)


async def test_text_that_json_cannot_have_is_no_harm_to_other_calls(workspace: Workspace) -> None:
    async with anyio.create_task_group() as tasks:
        waiting = partial(call, workspace, "wait", seconds=0.5)
        tasks.start_soon(waiting)
        assert (await call(workspace, "undecodable")).content == '["a?b", "\U0001f600"]'
        many = await given(workspace, {"ok": True, "content": [{"kind": "text", "content": "x"}] * 5000})
        assert many.is_error
        assert "5000 parts; it may return 64" in many.text
    assert not (await call(workspace, "later")).is_error


async def test_parts_are_text_images_and_urls(workspace: Workspace) -> None:
    parts = [
        {"kind": "text", "content": "Here:"},
        {"kind": "image-url", "url": f"data:image/png;base64,{PIXEL}"},
        {"kind": "image-url", "url": "https://example.com/a.png"},
        {"kind": "audio-url", "url": "data:audio/wav;base64,AAAA"},
        {"kind": "document-url", "url": "https://example.com/a.pdf"},
        {"kind": "api-url", "url": "http://example.com/v1"},
        {"kind": "image-url", "url": "data:image/svg+xml;base64,PHN2Zy8+"},
        {"kind": "image-url", "url": "data:image/png;base64,not base64!"},
    ]
    result = await given(workspace, {"ok": True, "content": parts})
    assert result.content == (
        TextPart(text="Here:"),
        ImagePart(data=PIXEL, mime_type="image/png"),
        MediaPart(kind="image", url="https://example.com/a.png"),
        MediaPart(kind="audio", url="data:audio/wav;base64,AAAA"),
        MediaPart(kind="document", url="https://example.com/a.pdf"),
        TextPart(text="[api] http://example.com/v1"),
        TextPart(text="[image: image/svg+xml, 6 bytes] data:image/svg+xml;base64,PHN2Zy8+…"),
        TextPart(text="[image: the data: URL is not base64]"),
    )
    assert (
        "[audio: audio/wav, 3 bytes] data:audio/wav;base64,AAAA…\n[document] https://example.com/a.pdf" in result.text
    )


async def test_documents_that_are_text_are_text_and_what_no_model_takes_is_described(workspace: Workspace) -> None:
    parts = [
        {"kind": "document-url", "url": "data:text/markdown;base64," + base64.b64encode(b"# Head").decode()},
        {"kind": "document-url", "url": "data:application/json;base64,/////w=="},
        {"kind": "audio-url", "url": "data:audio/mp3;base64,AAAA"},
        {"kind": "web-url", "url": "data:application/pdf;base64,AAAA"},
    ]
    result = await given(workspace, {"ok": True, "content": parts})
    assert result.content == (
        TextPart(text="# Head"),
        TextPart(text="[document: application/json, 4 bytes] data:application/json;base64,/////w==…"),
        MediaPart(kind="audio", url="data:audio/mpeg;base64,AAAA"),
        TextPart(text="[web: application/pdf, 3 bytes] data:application/pdf;base64,AAAA…"),
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("text", "the tool returned 'text', which is no result: a tool returns {\"ok\": true or false"),
        ({"ok": True}, "which is no result"),
        ({"content": "x"}, "which is no result"),
        ({"ok": "yes", "content": "x"}, "which is no result"),
        ({"ok": True, "content": [{"kind": "video", "url": "https://example.com"}]}, "there is no part of the kind"),
        ({"ok": True, "content": [{"kind": "text", "url": "https://example.com"}]}, "has the fields kind and content"),
        ({"ok": True, "content": [{"kind": "web-url", "url": "file:///etc/passwd"}]}, "it must be http(s):// or data:"),
        ({"ok": True, "content": [{"kind": "image-url", "url": "data:image/png,raw"}]}, "it must be http(s):// or"),
    ],
)
async def test_a_wrong_shape_says_what_is_expected(workspace: Workspace, value: object, expected: str) -> None:
    result = await given(workspace, value)
    assert result.is_error
    assert expected in result.text


async def test_a_result_that_is_too_large_is_an_error(workspace: Workspace) -> None:
    assert len((await call(workspace, "grow", size=7 << 20)).text) == 7 << 20
    result = await call(workspace, "grow", size=9 << 20)
    assert result.is_error
    assert f"it may take {MAX_RESULT_BYTES}" in result.text


# ----------------------------------------------------------------------------------------------------------- arguments


async def test_functions_get_one_dict_one_object_or_names(workspace: Workspace) -> None:
    assert (await call(workspace, "later")).content == "later"
    assert (await call(workspace, "named", path="a", mode="w")).content == '["a", 3, "w"]'
    assert (await call(workspace, "options", path="a", lines=5)).content == "a:5"
    assert (await call(workspace, "fields", path="a")).content == "a"
    wrong = await call(workspace, "named", pth="a")
    assert "the tool does not take these arguments: " in wrong.text
    wrong = await call(workspace, "options", pth="a")
    assert "the tool does not take these arguments: " in wrong.text
    large = await call(workspace, "fields", path="x" * (5 << 20))
    assert "the arguments of fields take 52" in large.text


async def test_models_are_told_what_functions_take(workspace: Workspace) -> None:
    told = {tool.name: tool.input_schema() for tool in workspace.tools(TOOLS)}
    assert told["named"]["required"] == ["path"]
    assert told["options"]["properties"]["lines"] == {"type": "integer", "default": 3}
    assert told["give"] == {"type": "object", "properties": {}, "additionalProperties": True}


# ------------------------------------------------------------------------------------------------------------ failures


async def test_an_exception_is_told_and_its_traceback_is_in_the_log(workspace: Workspace) -> None:
    result = await call(workspace, "fail")
    assert (result.text, result.is_error) == ("the tool raised an error: LookupError: nothing is known", True)
    await eventually(lambda: b"LookupError: nothing is known\n" in workspace._log, "the traceback is in the log")
    assert b'/tools/main.py", line' in workspace._log
    assert b"printed before" in workspace._log


async def test_what_tools_print_is_in_the_log_and_nowhere_else(workspace: Workspace) -> None:
    assert (await call(workspace, "say")).text == "said"
    await eventually(lambda: b"\xff raw" in workspace._log, "all is in the log")
    assert b"to stdout" in workspace._log
    assert b"to stderr" in workspace._log


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("exit", "its process ended itself, with exit code 3"),
        ("sys.exit", "SystemExit: 4"),
        ("SIGSEGV", "its process died of SIGSEGV"),
        ("SIGKILL", "its process died of SIGKILL"),
    ],
)
async def test_a_crash_ends_its_call_and_no_other(workspace: Workspace, how: str, expected: str) -> None:
    other: list[ToolResult] = []

    async def wait() -> None:
        other.append(await call(workspace, "wait", seconds=1))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        result = await call(workspace, "end", how=how)
    assert result.is_error
    assert expected in result.text
    assert other[0].text == "waited"
    assert (await given(workspace, {"ok": True, "content": "still here"})).text == "still here"
    await _kill(workspace)


@pytest.mark.runtimes("crun")
async def test_a_call_that_uses_up_the_memory_is_the_one_that_ends(workspace: Workspace) -> None:
    result = await call(workspace, "eat")
    assert result.is_error
    assert "its process died of SIGKILL, probably because the workspace used up its memory" in result.text
    assert (await given(workspace, {"ok": True, "content": "still here"})).text == "still here"


async def test_the_time_limit_kills_all_that_a_call_has_started(workspace: Workspace) -> None:
    quick = Workspace(workspace.engine, workspace.spec.model_copy(update={"call_timeout_s": 1}), workspace._record)
    quick._dispatcher, quick._instance = workspace._dispatcher, workspace.instance
    began = time.monotonic()
    result = await call(quick, "wait", seconds=600)
    assert time.monotonic() - began < 20
    assert result.is_error
    assert "it did not end within 1 s, and was killed with all that it had started" in result.text
    assert not await running(workspace, "sleep 100")


async def test_a_call_that_is_cancelled_is_killed_inside(workspace: Workspace) -> None:
    box = await workspace.engine.get("calls")
    await box.files.remove("/workspace/waiting")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: call(workspace, "wait", seconds=600))
        await eventually(lambda: box.files.exists("/workspace/waiting"), "the call runs")
        tasks.cancel_scope.cancel()

    async def gone() -> bool:
        return not await running(workspace, "sleep 100")

    await eventually(gone, "all that it has started is gone")


async def test_what_a_call_leaves_running_goes_on(workspace: Workspace) -> None:
    assert (await call(workspace, "keep")).text.isdigit()
    assert (await given(workspace, {"ok": True, "content": "x"})).text == "x"
    assert await running(workspace, "sleep 1002")
    await _kill(workspace)


async def _kill(workspace: Workspace) -> None:
    box = await workspace.engine.get("calls")
    await box.exec(["pkill", "-f", "^sleep 10"])
    await box.exec(["pkill", "-f", "^sh -c sleep"])


async def test_calls_of_one_answer_run_at_the_same_time(workspace: Workspace) -> None:
    began = time.monotonic()
    results = await workspace.tools(TOOLS).handle_batch([("wait", {"seconds": 2})] * 5)
    assert [result.text for result in results] == ["waited"] * 5
    assert time.monotonic() - began < 8
    await _kill(workspace)


# -------------------------------------------------------------------------------------------------------------- edits


async def test_an_edited_module_is_loaded_before_the_next_call(workspace: Workspace) -> None:
    box = await workspace.engine.get("calls")
    path = f"{BUNDLE_DIRECTORY}/tools/main.py"
    source = await box.files.read_text(path)
    assert (await call(workspace, "count")).text == "1"
    for number in "123":  # as fast as it goes, and always of the same length
        await box.files.write_text(path, source.replace('"content": "later"', f'"content": "now {number}"'))
        assert (await call(workspace, "later")).text == f"now {number}"
    await box.files.write_text(path, "def (")
    broken = await call(workspace, "later")
    assert broken.is_error
    assert "the tool cannot be used: its module cannot be imported: SyntaxError" in broken.text
    await box.files.write_text(path, "import os\nos._exit(9)")
    results = await workspace.tools(TOOLS).handle_batch([("later", {})] * 3)
    assert ["while it was imported, its process ended itself, with exit code 9" in each.text for each in results] == [
        True
    ] * 3
    await box.files.write_text(path, source)
    assert (await call(workspace, "later")).text == "later"


async def test_a_module_with_threads_is_imported_for_each_call(workspace: Workspace) -> None:
    box = await workspace.engine.get("calls")
    path = f"{BUNDLE_DIRECTORY}/tools/main.py"
    source = await box.files.read_text(path)
    threads = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    await box.files.write_text(path, threads + source)
    await call(workspace, "later")
    first, second = [(await call(workspace, "named", path=path)).text for path in ("a", "b")]
    assert (json.loads(first)[0], json.loads(second)[0]) == ("a", "b")
    assert "exit code 3" in (await call(workspace, "end", how="exit")).text
    await box.files.write_text(path, source)
    assert (await call(workspace, "later")).text == "later"


async def test_the_dispatcher_comes_back_after_it_was_killed(workspace: Workspace) -> None:
    box = await workspace.engine.get("calls")
    await box.exec(["pkill", "-9", "-f", "#atoll-dispatcher"])
    dispatcher = workspace._dispatcher
    assert dispatcher is not None
    await eventually(lambda: not dispatcher.is_alive, "its end is noticed")
    assert (await given(workspace, {"ok": True, "content": "back"})).text == "back"


async def test_nothing_of_the_host_is_in_a_list_of_processes(workspace: Workspace, tmp_path: Path) -> None:
    shown = (await (await workspace.engine.get("calls")).exec("ps axww -o args")).stdout
    assert max(len(line) for line in shown.splitlines()) < 2000
    assert str(tmp_path) not in shown


# ----------------------------------------------------------------------------------------- what waits for the next call


PROCESSES = """
import os
parents = {}
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if "\\0#atoll-dispatcher" in open(f"/proc/{pid}/cmdline").read():
            parents[int(pid)] = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    except OSError:
        pass
chain, (found,) = [], [pid for pid in parents if parents[pid] not in parents]
while found:
    chain.append(found)
    found = next((pid for pid in parents if parents[pid] == found), 0)
print(*chain)
"""


async def waiting_chain(workspace: Workspace) -> list[str]:
    """The dispatcher, the template, and the monitor and the call that wait for a request."""
    box = await workspace.engine.get("calls")
    chain: list[str] = []

    async def is_whole() -> bool:
        chain[:] = (await box.exec(["python3", "-c", PROCESSES])).stdout.split()
        return len(chain) == 4

    await eventually(is_whole, "a process waits for the next call", bound_s=20)
    return chain


async def test_a_process_that_waits_for_the_next_call_makes_it_and_another_waits_then(workspace: Workspace) -> None:
    assert (await call(workspace, "say")).content == "said"
    before = await waiting_chain(workspace)
    assert (await call(workspace, "say")).content == "said"
    after = await waiting_chain(workspace)
    assert before[:2] == after[:2]
    assert not {*before[2:]} & {*after[2:]}


@pytest.mark.parametrize("place", [1, 2, 3], ids=["template", "monitor", "call"])
async def test_a_waiting_process_that_is_killed_costs_no_call(workspace: Workspace, place: int) -> None:
    assert (await call(workspace, "say")).content == "said"
    chain = await waiting_chain(workspace)
    box = await workspace.engine.get("calls")
    await box.exec(["kill", "-9", chain[place]])

    async def is_gone() -> bool:
        # One that nothing has waited for yet is still there by its number.
        gone = chain[1:2] if place == 1 else chain[2:]
        return not (await box.exec(["grep", "-l", "^State:.[^ZX]", *(f"/proc/{pid}/status" for pid in gone)])).stdout

    await eventually(is_gone, "it is gone", bound_s=20)
    assert (await call(workspace, "say")).content == "said"
    assert (await call(workspace, "say")).content == "said"
    assert (await waiting_chain(workspace))[0] == chain[0]
