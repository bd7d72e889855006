"""Random graphs, random changes: the end is what recomputation from scratch gives, and nothing runs twice or is left.

A graph has cells, computed values, and operations of both kinds. Each node adds up some of the nodes before it, which
ones depends on what it reads first; some sums are failures. Between changes the event loop gets a few turns, so runs
are cancelled at any point, or not at all.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
from hypothesis import given, settings, strategies as st

from atoll.contract.errors import InvalidRequest
from atoll.reactive.graph import Graph
from atoll.reactive.nodes import Cell, Computed, Node, NotReady
from atoll.reactive.operations import Operation

CELLS = 4
Kind = str
PLAIN, TRACKED, COLLECTED = "plain", "tracked", "collected"


@dataclass(frozen=True)
class Made:
    """One node: it reads `first`, and then one of the other two."""

    kind: Kind
    first: int
    odd: int
    even: int
    fails_at: int
    turns: int
    """How many turns of the event loop an operation takes."""


@st.composite
def graphs(draw: st.DrawFn) -> list[Made]:
    made: list[Made] = []
    for number in range(draw(st.integers(1, 14))):
        before = st.integers(0, CELLS + number - 1)
        made.append(
            Made(
                draw(st.sampled_from([PLAIN, PLAIN, TRACKED, COLLECTED])),
                draw(before),
                draw(before),
                draw(before),
                draw(st.integers(0, 6)),
                draw(st.integers(0, 3)),
            )
        )
    return made


values = st.integers(0, 5)
steps = st.one_of(
    st.tuples(st.just("set"), st.integers(0, CELLS - 1), values),
    st.tuples(st.just("batch"), st.lists(st.tuples(st.integers(0, CELLS - 1), values), max_size=4)),
    st.tuples(st.just("turns"), st.integers(0, 4)),
    st.tuples(st.just("rerun"), st.integers(0, 20)),
    st.tuples(st.just("dispose"), st.integers(0, 20)),
)


class CountingGraph(Graph):
    """Counts changes, so that runs can be counted by change."""

    change = 0

    def flush(self) -> None:
        if not self._flushing and not self._batches:
            self.change += 1
        super().flush()


@dataclass
class Bench:
    """The graph under test, and what it may do."""

    graph: CountingGraph
    made: list[Made]
    nodes: list[Node[int]] = field(default_factory=list)
    ran: Counter[tuple[int, int]] = field(default_factory=Counter)
    active: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """What a function saw that must not be. An exception would become the state of its node."""

    def build(self) -> None:
        self.nodes = [Cell(self.graph, number) for number in range(CELLS)]
        for number, made in enumerate(self.made, CELLS):
            self.nodes.append(self._node(number, made))

    def _node(self, number: int, made: Made) -> Node[int]:
        def compute() -> int:
            self.ran[number, self.graph.change] += 1
            self.expect(self.ran[number, self.graph.change] == 1, f"node {number} ran twice for one change")
            return self.sum_of(number, made, self.checked)

        async def finish(total: int) -> int:
            self.active[number] += 1
            self.expect(self.active[number] == 1, f"two runs of node {number} at once")
            try:
                for _ in range(made.turns):
                    await anyio.sleep(0)
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0)
                self.active[number] -= 1
            if total % 7 == made.fails_at:
                raise ValueError(total)
            return total

        if made.kind == PLAIN:

            def plain() -> int:
                total = compute()
                if total % 7 == made.fails_at:
                    raise ValueError(total)
                return total

            return Computed(self.graph, plain)
        if made.kind == COLLECTED:
            return Operation(self.graph, lambda total, _: finish(total), compute)

        async def body() -> int:
            return await finish(self.sum_of(number, made, lambda each: self.nodes[each].get()))

        return Operation(self.graph, body)

    def expect(self, condition: bool, otherwise: str) -> None:
        if not condition:
            self.wrong.append(otherwise)

    @staticmethod
    def sum_of(number: int, made: Made, read: Callable[[int], int]) -> int:
        first = read(made.first)
        return (first + read(made.odd if first % 2 else made.even) + number) % 50

    def checked(self, number: int) -> int:
        """What a plain function reads: it must be of the present change."""
        try:
            value: int | BaseException = self.nodes[number].get()
        except (NotReady, ValueError, InvalidRequest) as error:
            value = error
        expected = self.expected(number)
        if isinstance(value, BaseException):
            self.expect(type(value) is type(expected), f"node {number}: {value!r} is not {expected!r}")
            raise value
        self.expect(value == expected, f"a glitch: node {number} is {value}, and should be {expected}")
        return value

    def expected(self, number: int) -> int | BaseException:
        """The value of a node from scratch: of the present cells, and of operations as they are."""
        if number < CELLS or self.made[number - CELLS].kind != PLAIN or self.nodes[number].disposed:
            pending, result, error, _ = self.nodes[number].current
            return NotReady() if pending else error or result  # type: ignore[return-value]
        return self.scratch(number, self.made[number - CELLS], self.expected)

    def scratch(self, number: int, made: Made, read: Callable[[int], int | BaseException]) -> int | BaseException:
        def value(each: int) -> int:
            found = read(each)
            if isinstance(found, BaseException):
                raise found
            return found

        try:
            total = self.sum_of(number, made, value)
        except (NotReady, ValueError, InvalidRequest) as error:
            return error
        return ValueError(total) if total % 7 == made.fails_at else total

    def final(self, number: int) -> int | BaseException:
        if number < CELLS or self.nodes[number].disposed:
            return self.expected(number)
        return self.scratch(number, self.made[number - CELLS], self.final)

    async def apply(self, step: Any) -> None:
        cells: list[Cell[int]] = self.nodes[:CELLS]  # type: ignore[assignment]
        match step:
            case "set", number, value:
                cells[number].set(value)
            case "batch", changes:
                with self.graph.batch():
                    for number, value in changes:
                        cells[number].set(value)
            case "turns", count:
                for _ in range(count):
                    await anyio.sleep(0)
            case "rerun", number:
                node = self.nodes[number % len(self.nodes)]
                if isinstance(node, Operation) and not node.disposed:
                    node.rerun()
            case "dispose", number:
                if number >= CELLS:
                    self.nodes[number % len(self.nodes)].dispose() if number % len(self.nodes) >= CELLS else None

    def check(self) -> None:
        assert not self.wrong
        for number, node in enumerate(self.nodes):
            expected = self.final(number)
            pending, result, error, _ = node.current
            assert not pending, f"node {number} waits for ever"
            if isinstance(expected, BaseException):
                assert (type(error), str(error)) == (type(expected), str(expected))
            else:
                assert (result, error) == (expected, None), f"node {number} lost an update"


async def _play(made: list[Made], sequence: list[Any], max_running: int) -> None:
    before = asyncio.all_tasks()
    async with CountingGraph(max_running=max_running) as graph:
        bench = Bench(graph, made)
        bench.build()
        for step in sequence:
            await bench.apply(step)
        await graph.settled()
        bench.check()
        cells: list[Cell[int]] = bench.nodes[:CELLS]  # type: ignore[assignment]
        cells[0].update(lambda value: value + 1)  # something runs when it ends
    assert asyncio.all_tasks() == before, "a task is left"
    assert not any(bench.active.values()), "a run is left"


@settings(max_examples=300, deadline=None)
@given(graphs(), st.lists(steps, max_size=30), st.integers(1, 4))
def test_the_end_is_what_recomputation_from_scratch_gives(made: list[Made], sequence: list[Any], running: int) -> None:
    asyncio.run(_play(made, sequence, running))
