"""The suite of langchain-tests for sandboxes, and what it leaves open: time limits, interruption, the end of a sandbox,
large files, and that files are found and shown exactly as by deepagents' own implementation, which runs commands.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
from deepagents.backends.sandbox import BaseSandbox
from examples.integrations import deepagents_backend as example
from langchain_tests.integration_tests import SandboxIntegrationTests

import atoll
import atoll.sync
from atoll.integrations.deepagents import SINCE_0_7, AtollBackend
from atoll.testing.server import running_server
from atoll.testing.waiting import eventually

SERVER_PYTHON = str(Path(__file__).parents[3] / ".venv/bin/python")
"""What `atoll serve` needs is not in the environment of a framework, and may be forbidden there."""
SETTLED_IN_0_7 = (
    "test_glob",
    "test_glob_basic_pattern",
    "test_glob_hidden_files_explicitly",
    "test_glob_with_character_class",
    "test_glob_with_directories",
    "test_glob_with_question_mark",
    "test_write_existing_file_fails",
)
"""Tests of langchain-tests 1.1.9 that contradict deepagents since 0.7: there, paths that are found are absolute and
files alone, and writing replaces a file."""


@pytest.fixture(scope="module", params=["crun", "runsc"])
def backend(request: pytest.FixtureRequest, state_dir: Path) -> Iterator[AtollBackend]:
    with AtollBackend(settings=atoll.Settings(state_dir=state_dir, runtime=request.param)) as backend:
        yield backend


class TestStandard(SandboxIntegrationTests):
    @pytest.fixture(scope="class")
    def sandbox(self, backend: AtollBackend) -> AtollBackend:
        return backend

    if SINCE_0_7:
        for _name in SETTLED_IN_0_7:
            locals()[_name] = pytest.mark.xfail(strict=True, reason="deepagents 0.7 says otherwise")(
                getattr(SandboxIntegrationTests, _name)
            )


class Reference(BaseSandbox):
    """deepagents' own implementation, over the commands of the same sandbox."""

    def __init__(self, backend: AtollBackend) -> None:
        self._backend = backend

    @property
    def id(self) -> str:
        return self._backend.id

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        return self._backend.execute(command, timeout=timeout)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return self._backend.upload_files(files)

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return self._backend.download_files(paths)


TREE = {
    "a.py": b"import os\nneedle = 1\n",
    "b.txt": b"needle",
    "sub/c.py": b"one\r\ntwo needle\r\nthree",
    "sub/.hidden/d.py": b"needle\n",
    "sub/.e.py": b"no\n",
    ".github/workflows/ci.yml": b"on: needle\n",
    "sub/deep/er/f.PY": b"\n\nneedle\n\n",
    "empty": b"",
    "binary": b"\xff\xfe\x00needle\n",
    "late": b"text\n" * 4000 + b"\xff\n" + b"more\n",
    "picture.png": b"\x89PNG\r\n\x1a\n",
    "wide": ("\N{SNOWMAN}" * 3000 + "\n").encode() * 3,
    "long": b"x" * 600_000 + b"\nshort\n",
    "many": b"".join(b"line %d\n" % number for number in range(200_000)),
    ".git/objects/needle": b"needle\n",
}


@pytest.fixture(scope="module")
def tree(backend: AtollBackend) -> str:
    root = "/tmp/tree"
    uploaded = backend.upload_files([(f"{root}/{name}", data) for name, data in TREE.items()])
    assert not [each for each in uploaded if each.error]
    backend.execute(f"ln -s a.py {root}/link.py; ln -s nowhere {root}/dangling.py; ln -s sub {root}/directory")
    return root


def test_pages_are_those_of_deepagents(backend: AtollBackend, tree: str) -> None:
    theirs = Reference(backend)
    names = [*set(TREE) - {"late"}, "link.py", "dangling.py", "directory", "nothing/at/all", "a.py/x"]
    for name in names:
        for offset, limit in [(0, 2000), (0, 1), (1, 1), (1, 2), (2, 5), (199_990, 100), (199_999, 1), (0, 10**6)]:
            ours, expected = (each.read(f"{tree}/{name}", offset, limit) for each in (backend, theirs))
            if name == "a.py/x":
                assert ours.error
                assert expected.error
            else:
                assert ours == expected, (name, offset, limit)
    # A byte that is no UTF-8, far from the beginning: theirs fails.
    shown = backend.read(f"{tree}/late", 3999, 3)
    assert shown.file_data is not None
    assert shown.file_data["content"] == "text\n\N{REPLACEMENT CHARACTER}\nmore"


PATTERNS = "*.py **/*.py sub/* * ** .* *.yml /*.py {a,c}.py [ab].* [!a].py ?.txt no".split()


def test_what_is_found_is_what_deepagents_finds(backend: AtollBackend, tree: str) -> None:
    theirs = Reference(backend)
    for pattern in [*PATTERNS, "../*", "/"] if SINCE_0_7 else set(PATTERNS) - {"/*.py", "**", "{a,c}.py"}:
        ours, expected = (each.glob(pattern, tree) for each in (backend, theirs))
        assert (ours.error is None) == (expected.error is None), pattern
        assert _paths(ours.matches, "directory") == _paths(expected.matches, "directory"), pattern
    for include in (None, "*.py", "*.txt", *(["sub/*.py", "**/*.yml"] if SINCE_0_7 else [])):
        ours, expected = (each.grep("needle", tree, include) for each in (backend, theirs))
        assert _lines(ours.matches) == _lines(expected.matches), include
    ours, expected = backend.ls(tree), theirs.ls(tree)
    assert _paths(ours.entries) == _paths(expected.entries)
    assert {each["path"]: each["is_dir"] for each in ours.entries} == {
        each["path"]: each["is_dir"] for each in expected.entries
    }
    for path in ("/nowhere", f"{tree}/a.py"):
        assert backend.ls(path) == theirs.ls(path)


def _paths(found: list | None, without: str = "\n") -> list[str]:
    return sorted(each["path"] for each in found or () if without not in each["path"])


def _lines(found: list) -> list[tuple]:
    # Theirs has lines of binary files, and since 0.7 none of a repository's own.
    ours = [each for each in found if ".git/" not in each["path"]]
    return sorted((each["path"], each["line"], each["text"].rstrip("\r")) for each in ours)


def test_edits_are_those_of_deepagents(backend: AtollBackend) -> None:
    theirs = Reference(backend)
    for old, new, everywhere in [
        ("two\nthree", "2\n3", False),
        ("one", "1", False),
        ("two", "2", False),
        ("two", "2", True),
        ("nothing", "x", True),
        *([("", "x", False)] if SINCE_0_7 else []),
    ]:
        after = []
        for each in (backend, theirs):
            backend.upload_files([("/tmp/edited", b"one\r\ntwo\r\nthree\r\ntwo\r\n")])
            result = dataclasses.astuple(each.edit("/tmp/edited", old, new, replace_all=everywhere))
            after.append((result, backend.download_files(["/tmp/edited"])[0].content))
        assert after[0] == after[1], old
    for path in ("/nowhere", "/tmp", "/tmp/tree/binary"):
        assert backend.edit(path, "a", "b").error
        assert theirs.edit(path, "a", "b").error
    backend.upload_files([("/tmp/edited", "\n".join(f"<{number}>" for number in range(20)).encode())])
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda number: backend.edit("/tmp/edited", f"<{number}>", "done"), range(20)))
    assert backend.download_files(["/tmp/edited"])[0].content == b"\n".join([b"done"] * 20)


def test_a_command_that_takes_too_long_is_killed_with_all_that_it_started(backend: AtollBackend) -> None:
    ran = backend.execute("echo begun; sleep 1234 & sleep 1234", timeout=1)
    assert ran.exit_code == 124
    assert ran.output.startswith("begun\n")
    assert "timed out after 1 s" in ran.output
    assert backend.execute("pgrep -fx 'sleep 1234'").exit_code == 1


async def test_cancelling_a_call_kills_its_command(backend: AtollBackend) -> None:
    call = asyncio.create_task(backend.aexecute("sleep 4321 & sleep 4321"))
    await eventually(lambda: backend.execute("pgrep -fx 'sleep 4321'").exit_code == 0, "the command runs")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert backend.execute("pgrep -fx 'sleep 4321'").exit_code == 1


def test_output_is_limited_and_what_cannot_run_says_so(backend: AtollBackend) -> None:
    ran = backend.execute("yes | head -c 20000000; exit 3")
    assert ran.truncated
    assert len(ran.output) < 2_000_000
    assert ran.exit_code == 3
    assert backend.execute("echo \0").exit_code == 126
    assert backend.execute("echo out; echo err >&2; exit 7") == ExecuteResponse("out\nerr\n", 7)


def test_large_results_of_tools_can_be_kept_where_deepagents_keeps_them(backend: AtollBackend) -> None:
    for directory in ("large_tool_results", "conversation_history", "blobs"):
        assert backend.write(f"/{directory}/{directory}", "kept").error is None


if SINCE_0_7:

    def test_deleting(backend: AtollBackend) -> None:
        backend.upload_files([("/tmp/gone/a", b""), ("/tmp/gone/b/c", b"")])
        assert backend.delete("/tmp/gone").error is None
        assert "not found" in str(backend.delete("/tmp/gone").error)
        assert backend.delete("/etc/passwd").error


def test_a_named_sandbox_stays_and_another_is_gone(make_state_dir: Callable[[], Path]) -> None:
    settings = atoll.Settings(state_dir=make_state_dir())
    with AtollBackend(settings=settings) as unnamed, AtollBackend("kept", settings=settings, cwd="/tmp") as named:
        named.write("/tmp/note", "still here")
        gone = unnamed.id
    unnamed.close()
    with atoll.sync.open(settings=settings) as engine:
        assert [each.name for each in engine.list()] == ["kept"]
        with AtollBackend("kept", settings=settings) as named:
            assert named.execute("pwd; cat note").output == "/tmp\nstill here"
        assert gone != "kept"
        engine.destroy("kept")
    with pytest.raises(atoll.ImageUnavailable):
        AtollBackend(settings=settings, image="docker-archive:/nowhere.tar")


def test_a_sandbox_that_has_died_is_an_error_and_no_output(state_dir: Path) -> None:
    with AtollBackend(settings=atoll.Settings(state_dir=state_dir)) as backend:
        with atoll.sync.open(state_dir) as engine:
            engine.destroy(backend.id)
        with pytest.raises(atoll.SandboxDied):
            backend.execute("true")
        with pytest.raises(atoll.SandboxDied):
            backend.read("/etc/passwd")


def test_the_example_runs(backend: AtollBackend) -> None:
    assert "09:25" in example.play(backend)[-2].text


def test_the_sandbox_may_be_of_a_server(make_state_dir: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server(make_state_dir(), python=SERVER_PYTHON) as server:
        monkeypatch.setenv("ATOLL_URL", server.url)
        monkeypatch.setenv("ATOLL_API_KEY", server.key)
        with AtollBackend() as backend:
            assert "09:25" in example.play(backend)[-2].text
            assert backend.execute("sleep 60", timeout=1).exit_code == 124
        with atoll.sync.connect() as engine:
            assert engine.list() == []
