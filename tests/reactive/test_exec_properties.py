"""Random changes, cancellations and failures of commands in a sandbox: the end is right, and no process is left.

As `test_graph_properties.py`, with real commands, each with a tree of processes, some of which would never end. The
nodes share one sandbox, so that what a cancelled run leaves behind is seen.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from hypothesis import Phase, given, settings, strategies as st

from atoll import Engine, Sandbox
from atoll.reactive import Cell, Computed, Graph, NodeState
from atoll.reactive.builtins import CommandResult, command_in
from atoll.reactive.operations import Operation
from atoll.testing.waiting import eventually

NODES = 3
ENDLESS = 4
"""With this value a command never ends; with the one above, it fails."""
TREE = "(setsid sleep 1234 & sleep 1234 & exec sleep 1234) >/dev/null & sh -c 'sleep 1234 & wait' >/dev/null &"
LEFT = "grep -lsa '^sleep.1234' /proc/[0-9]*/cmdline | wc -l"

values = st.integers(0, ENDLESS + 1)
steps = st.one_of(
    st.tuples(st.just("set"), st.integers(0, 1), values),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.005, 0.03])),
    st.tuples(st.just("rerun"), st.integers(0, NODES - 1)),
    st.tuples(st.just("dispose"), st.integers(0, NODES - 1)),
)


@pytest.fixture(scope="module")
async def box(host: Engine) -> AsyncIterator[Sandbox]:
    async with await host.create() as box:
        yield box


def _command(number: int, value: int) -> str:
    end = {ENDLESS: f"{TREE} wait", ENDLESS + 1: "exit 3"}.get(value, f"sh -c 'sleep 0.0{value}'")
    return f"echo {number}:{value}; {end}"


async def _apply(step: Any, cells: list[Cell[int]], nodes: list[Operation[CommandResult]]) -> None:
    match step:
        case "set", number, value:
            cells[number].set(value)
        case "wait", seconds:
            await anyio.sleep(seconds)  # so that commands are cancelled at any point
        case "rerun", number if not nodes[number].disposed:
            nodes[number].rerun()
        case "dispose", number:
            nodes[number].dispose()


@settings(max_examples=15, deadline=None, phases=[Phase.generate])
@given(sequence=st.lists(steps, min_size=3, max_size=12), last=st.sampled_from([0, 1, ENDLESS + 1]))
async def test_commands_that_are_cancelled_leave_no_process_and_no_result(
    box: Sandbox, sequence: list[Any], last: int
) -> None:
    async with Graph(max_running=2) as graph:
        cells = [Cell(graph, 0, f"cell {number}") for number in range(2)]
        shown: list[tuple[int, str, int]] = []

        def node(number: int) -> Operation[CommandResult]:
            read = cells[number % 2]
            command = Computed(graph, lambda: _command(number, read.get()))
            return command_in(graph, lambda: box, command, ())

        nodes = [node(number) for number in range(NODES)]

        def note(changed: tuple[Any, ...]) -> None:
            for number, each in enumerate(nodes):
                state: NodeState[CommandResult] = each.current
                if each in changed and not state.pending and state.result is not None:
                    shown.append((number, state.result.stdout, cells[number % 2].get()))

        graph.subscribe(note)
        for step in sequence:
            await _apply(step, cells, nodes)
        for cell in cells:
            cell.set(last)
        await graph.settled()
        for number, each in enumerate(nodes):
            if not each.disposed:
                result = await each
                assert result.stdout == f"{number}:{last}\n"
                assert result.exit_code == (3 if last == ENDLESS + 1 else 0)
        assert [entry for entry in shown if entry[1] != f"{entry[0]}:{entry[2]}\n"] == [], "a stale result was shown"
        for cell in cells:
            cell.set(ENDLESS)  # something runs when the graph ends
        await anyio.sleep(0)

    async def left() -> bool:
        return (await box.exec(LEFT)).stdout == "0\n"

    assert await eventually(left, "no process of a run is left")
