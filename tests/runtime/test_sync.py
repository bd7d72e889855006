"""The blocking face: what is particular to it. The conformance suite runs through it besides (`test_face.py`)."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import atoll.sync
from atoll import AtollError, ExecTimeout, InvalidRequest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def engine(state_dir: Path) -> Iterator[atoll.sync.Engine]:
    with atoll.sync.open(state_dir) as engine:
        yield engine


@pytest.fixture(scope="module")
def box(engine: atoll.sync.Engine) -> Iterator[atoll.sync.Sandbox]:
    with engine.create() as box:
        yield box


def test_a_sandbox_is_used_without_a_word_of_async(engine: atoll.sync.Engine) -> None:
    with engine.create("plain") as box:
        box.files.write_text("a", "one\ntwo\n")
        assert box.exec("cat a; exit 3").exit_code == 3
        assert [match.line for match in box.files.grep("two")] == [2]
        assert b"".join(box.files.stream("a")) == b"one\ntwo\n"
        assert "plain" in [info.name for info in engine.list()]
        [copy] = box.fork(1)
        assert copy.exec("cat a").stdout == "one\ntwo\n"
        copy.destroy()
        assert engine.get("plain") == box
    with pytest.raises(AtollError):
        engine.get("plain")


def test_a_process_is_written_to_and_iterated_over(box: atoll.sync.Sandbox) -> None:
    with box.spawn("cat", stdin=True, keep=False) as process:
        process.stdin.send(b"line\n")
        process.stdin.close()
        events = list(process)
    assert [event.data for event in events if isinstance(event, atoll.Output)] == [b"line\n"]
    assert isinstance(events[-1], atoll.Exited)


def test_context_managers_of_the_api_are_entered_and_left(engine: atoll.sync.Engine, box: atoll.sync.Sandbox) -> None:
    with box.files.watch(".") as changes:
        box.files.write_text("new", "", atomic=False)
        assert next(iter(changes)).path == "new"
    with engine.pool("blocking", temporary=True) as pool:
        assert pool.get("a").exec("hostname").stdout == "blocking.a\n"
    assert not engine.list("blocking")


def test_a_blocking_iterator_is_an_argument(box: atoll.sync.Sandbox) -> None:
    box.files.write_text("tree/a", "from a", parents=True)
    chunks = list(box.files.tar_out("tree", inside=True))
    assert box.files.tar_in("again", iter(chunks)) > 0
    assert box.files.read_text("again/a") == "from a"


def test_an_error_is_raised_as_it_is(box: atoll.sync.Sandbox) -> None:
    with pytest.raises(ExecTimeout) as raised:
        box.exec("echo begun; sleep 31536000", timeout_s=0.2)
    assert raised.value.result.stdout == "begun\n"


def test_several_threads_call_at_the_same_time(box: atoll.sync.Sandbox) -> None:
    met = "mkdir -p met; touch met/$N; until [ $(ls met | wc -l) = 8 ]; do sleep 0.01; done; echo $N"
    with ThreadPoolExecutor(8) as threads:
        results = threads.map(lambda n: box.exec(met, env={"N": str(n)}, timeout_s=30).stdout, range(8))
    assert list(results) == [f"{n}\n" for n in range(8)]


def test_an_interrupt_kills_the_command(box: atoll.sync.Sandbox) -> None:
    started = threading.Event()

    def interrupt() -> None:
        while not any("31537001" in each.command for each in box.ps()):
            pass
        started.set()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        box.exec(["sleep", "31537001"])
    thread.join()
    assert started.is_set()
    assert not any("31537001" in each.command for each in box.ps())


def test_a_callback_that_calls_the_engine_is_told_so(box: atoll.sync.Sandbox) -> None:
    errors: list[InvalidRequest] = []

    def call(_: bytes) -> None:
        try:
            box.exec("true")
        except InvalidRequest as error:
            errors.append(error)

    box.exec_bytes("echo x", on_stdout=call)
    assert "a callback cannot call the engine" in str(errors[0])


def test_a_closed_engine_refuses(state_dir: Path) -> None:
    engine = atoll.sync.open(state_dir)
    engine.close()
    engine.close()
    with pytest.raises(InvalidRequest, match="the engine is closed"):
        engine.list()


def test_a_forked_copy_of_the_program_refuses(engine: atoll.sync.Engine) -> None:
    copy = os.fork()
    if copy == 0:
        try:
            engine.list()
        except InvalidRequest as error:
            os._exit(0 if "before this process was forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == 0


def test_no_thread_is_left(state_dir: Path) -> None:
    before = set(threading.enumerate())
    with atoll.sync.open(state_dir) as engine:
        engine.list()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "atoll engine"]


def test_a_program_that_forgets_to_close_ends(state_dir: Path) -> None:
    code = """
import atoll.sync, sys
box = atoll.sync.open(sys.argv[1]).create()
print(box.exec("echo hi").stdout, end="")
box.destroy()
box = atoll.sync.open(sys.argv[1])
"""
    command = [sys.executable, "-c", code, str(state_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert (done.stdout, done.stderr) == ("hi\n", "")


def test_what_the_types_name_can_be_used_in_annotations_and_isinstance(
    engine: atoll.sync.Engine, box: atoll.sync.Sandbox
) -> None:
    for name in ("Blocking", *atoll.sync.CLASSES):
        assert isinstance(getattr(atoll.sync, name), type), name
    assert isinstance(engine, atoll.sync.Engine)
    assert isinstance(box, atoll.sync.Sandbox)
    assert isinstance(box.files, atoll.sync.Files)
    assert not hasattr(atoll.sync, "Sandboxes")


def test_the_types_name_every_attribute_of_what_they_describe(
    engine: atoll.sync.Engine, box: atoll.sync.Sandbox
) -> None:
    stub = ast.parse((ROOT / "src/atoll/sync.pyi").read_text())
    described = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    with box.spawn("cat", stdin=True, keep=False) as process, engine.pool("described") as pool:
        for given in (engine, box, box.files, process, process.stdin, pool, engine.images, engine.storage):
            node = described[type(given).__name__.removeprefix("_Blocking")]
            names = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            names |= {ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)}
            assert {name for name in dir(given) if not name.startswith("_")} <= names | _NOT_DESCRIBED, node.name


_NOT_DESCRIBED = {
    *("drivers", "egress_servers", "extra", "extra_attributes", "fork_labelled", "inherited_spec", "previews"),
    *("checkpoint_files", "is_in_use", "list_in", "publish_at", "scratch"),
}
"""Parts of a local engine that are not in the interface, and what anyio's streams have besides."""
