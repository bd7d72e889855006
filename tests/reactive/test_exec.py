"""Commands in a graph, in real sandboxes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import atoll
from atoll import Engine, ExecTimeout, InvalidRequest, reactive
from atoll.reactive import Graph, Operation, cell, computed, handler
from atoll.testing.waiting import eventually

pytestmark = pytest.mark.usefixtures("graph")


async def test_a_command_runs_again_when_an_input_changes(graph: Graph) -> None:
    name = cell("world")
    run = reactive.exec(computed(lambda: f"echo hello {name.get()}"))
    assert run.pending
    result = await run
    assert (result.stdout, result.stderr, result.exit_code, result.files) == ("hello world\n", "", 0, {})
    name.set("sea")
    assert run.latest_complete == result
    assert (await run).stdout == "hello sea\n"
    assert run.runs == 2


async def test_a_failing_command_is_a_result() -> None:
    run = reactive.exec("echo on purpose >&2; exit 3")
    result = await run
    assert (result.exit_code, result.stderr, run.error) == (3, "on purpose\n", None)


async def test_a_sequence_stops_at_the_first_failure_and_has_all_output() -> None:
    word = cell("one")
    run = reactive.exec(
        ["mkdir dist", computed(lambda: f"echo {word.get()} | tee dist/a"), "exit 4", "echo never"], files=["dist/a"]
    )
    result = await run
    assert (result.stdout, result.exit_code) == ("one\n", 4)
    assert result.files == {"dist/a": "one\n"}
    word.set("two")
    assert (await run).files["dist/a"] == "two\n"


async def test_files_come_back_as_text_and_as_bytes() -> None:
    run = reactive.exec(r"printf '\377\000x' > raw; echo text > /tmp/text", files=["raw", "/tmp/text", "missing"])
    result = await run
    assert result.file_bytes == {"raw": b"\xff\x00x", "/tmp/text": b"text\n"}
    assert result.files == {"raw": "\ufffd\x00x", "/tmp/text": "text\n"}


async def test_a_file_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.reactive.builtins.MAX_FILE_BYTES", 1000)
    run = reactive.exec("head -c 1001 /dev/zero > zeros", files=["zeros"])
    with pytest.raises(InvalidRequest, match="zeros is larger than 1000 bytes"):
        await run


async def test_standard_input_and_the_environment_are_inputs_too() -> None:
    code = cell("print(6 * 7)")
    run = reactive.exec("cat; echo $WORD", stdin=code, env={"WORD": computed(lambda: code.get()[:5])})
    assert (await run).stdout == "print(6 * 7)print\n"
    code.set("other")
    assert (await run).stdout == "otherother\n"


async def test_each_run_has_a_sandbox_of_its_own() -> None:
    number = cell(1)
    run = reactive.exec(computed(lambda: f"ls; touch seen-{number.get()}"))
    assert (await run).stdout == ""
    number.set(2)
    assert (await run).stdout == ""


async def test_a_newer_input_kills_the_older_command_with_its_whole_tree(graph: Graph, host: Engine) -> None:
    seconds = cell(1000)
    run = reactive.exec(computed(lambda: f"(setsid sleep 999 &); echo begun; sleep {seconds.get()}; echo done"))
    await eventually(lambda: "begun" in run.output, "the first run")
    (older,) = await host.list()
    seconds.set(0)
    assert run.pending
    assert (await run).stdout == "begun\ndone\n"
    await eventually(lambda: _gone(host, older.name), "the end of the older sandbox")


async def _gone(host: Engine, name: str) -> bool:
    return name not in {info.name for info in await host.list()}


async def test_partial_output_is_seen_while_a_command_runs() -> None:
    run = reactive.exec("echo half; cat /dev/zero | head -c 1 > /dev/null; sleep 1000", timeout_s=100)
    shown = computed(lambda: run.output)
    await eventually(lambda: shown.get() == "half\n", "the first half")
    assert run.pending


async def test_a_command_that_takes_too_long_is_an_error() -> None:
    run = reactive.exec("sleep 1000", timeout_s=0.1)
    with pytest.raises(ExecTimeout):
        await run


async def test_an_image_that_does_not_exist_is_an_error_that_the_next_one_clears() -> None:
    image = cell("dir:/nowhere")
    run = reactive.exec("echo here", image)
    with pytest.raises(atoll.ImageUnavailable):
        await run
    image.set("host")
    assert (await run).stdout == "here\n"


@pytest.mark.parametrize("command", [[], 5, ["true", 5]])
async def test_what_is_no_command_is_refused(command: Sequence[str]) -> None:
    run = reactive.exec(command)
    with pytest.raises(InvalidRequest, match="exec needs a command"):
        await run


async def test_a_stage_waits_for_the_one_before_it_without_an_if() -> None:
    source = cell("a b c")
    words = reactive.exec(computed(lambda: f"echo {source.get()} | wc -w"))
    count = computed(lambda: int(words.result.stdout))
    bars = reactive.exec(computed(lambda: f"printf '#%.0s' $(seq {count.result})"))
    assert count.pending
    assert (await bars).stdout == "###"
    source.set("a")
    assert (await bars).stdout == "#"
    assert bars.runs == 2


async def test_a_handler_runs_a_command_once(graph: Graph) -> None:
    word = cell("one")

    @handler
    async def run(times: int) -> str:
        result = await reactive.exec(computed_word(word, times))
        return result.stdout

    assert await run(2) == "one\none\n"
    before = len(graph.nodes)
    word.set("two")
    await graph.settled()
    assert await run(1) == "two\n"
    assert len(graph.nodes) == before


def computed_word(word: reactive.Cell[str], times: int) -> str:
    return f"for i in $(seq {times}); do echo {word.get()}; done"


async def test_a_warm_sandbox_is_used(graph: Graph, host: Engine) -> None:
    await host.warm(1)
    try:
        number = cell(1)
        run = reactive.exec(computed(lambda: f"cat /proc/uptime; echo {number.get()}"))
        await run
        assert (await host.warm_pools())[0].count == 1
        await host.wait_refilled()
    finally:
        await host.warm(0)


# -------------------------------------------------------------------------------------------------------------- cache

NOW = "date +%s%N; head -c 8 /dev/urandom > random"


async def test_a_result_is_kept_across_restarts(state_dir: Path, host: Engine) -> None:
    async def once(command: str = NOW, **options: object) -> tuple[str, Operation[reactive.CommandResult]]:
        async with Graph(host):
            run = reactive.exec(command, files=["random"], cache=True, **options)  # type: ignore[arg-type]
            return str(await run), run

    first, _ = await once()
    again, _ = await once()
    assert again == first
    assert (await once(NOW + ";"))[0] != first
    assert (await once(stdin="other"))[0] != first
    assert (await once(env={"OTHER": "1"}))[0] != first
    assert (await once(network=atoll.NetworkPolicy(allow="example.com")))[0] != first
    assert (await once())[0] == first


async def test_a_failed_command_is_not_kept(state_dir: Path) -> None:
    node = reactive.exec("date +%s%N; exit 1", cache=True)
    first = (await node).stdout
    node.rerun()
    assert (await node).stdout != first


async def test_a_damaged_result_is_made_again(state_dir: Path) -> None:
    node = reactive.exec("date +%s%N # damaged", cache=True)
    first = (await node).stdout
    for path in (state_dir / "reactive").iterdir():
        path.write_bytes(path.read_bytes()[:-3])
    node.rerun()
    assert (await node).stdout != first


# ----------------------------------------------------------------------------------------------------- many changes


async def test_random_changes_of_commands_leave_nothing_and_end_with_the_last(host: Engine, state_dir: Path) -> None:
    dice = random.Random(16)
    async with Graph(host, max_running=3):
        number = cell(0)
        runs = [reactive.exec(_busy(number.get, part)) for part in range(5)]
        for value in range(1, 25):
            number.set(value)
            if dice.random() < 0.3:
                await runs[dice.randrange(5)]
        assert [(await run).stdout for run in runs] == [f"{part} 24\n" for part in range(5)]
        number.set(25)  # they run when the graph ends
    assert await host.list() == []


def _busy(number: Callable[[], int], part: int) -> reactive.Computed[str]:
    return computed(lambda: f"(setsid sleep 1000 &); sleep 0.0{number() % 5}; echo {part} {number()}")
