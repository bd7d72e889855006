"""The semantics of a graph, each by itself. `test_graph_properties.py` has them in all combinations."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import AsyncIterator, Callable

import anyio
import pytest

from atoll import InvalidRequest, reactive
from atoll.reactive import Cell, Graph, Node, NodeState, batch, cell, computed, handler
from atoll.testing.waiting import eventually


@pytest.fixture(autouse=True)
async def graph() -> AsyncIterator[Graph]:
    async with Graph() as graph:
        yield graph


class Counted:
    """A function that counts its runs."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        self.runs = 0
        self.__name__ = "counted"

    def __call__(self) -> object:
        self.runs += 1
        return self.function()


class Gate:
    """An asynchronous function whose runs end when the test says so."""

    def __init__(self, source: Node[object]) -> None:
        self.source = source
        self.begun: list[object] = []
        self.cancelled: list[object] = []
        self.open: dict[object, anyio.Event] = {}

    async def __call__(self) -> object:
        value = self.source.get()
        self.begun.append(value)
        try:
            await self.open.setdefault(value, anyio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled.append(value)
            raise
        if isinstance(value, str):
            raise ValueError(value)  # noqa: TRY004 - a failure, as of a command
        return value

    def node(self) -> reactive.Operation[object]:
        async def gated() -> object:
            return await self()

        return computed(gated)

    def node_in(self, graph: Graph) -> reactive.Operation[object]:
        async def gated() -> object:
            return await self()

        return reactive.Operation(graph, gated)

    def let(self, value: object) -> None:
        self.open.setdefault(value, anyio.Event()).set()

    async def until_begun(self, *values: object) -> None:
        await eventually(lambda: self.begun == list(values), f"runs of {values}")


# ------------------------------------------------------------------------------------------------------ values


async def test_a_computed_value_follows_a_cell() -> None:
    celsius = cell(20.0)
    fahrenheit = computed(lambda: celsius.get() * 9 / 5 + 32)
    assert fahrenheit.get() == 68
    celsius.set(100.0)
    assert fahrenheit.result == 212
    celsius.update(lambda value: value - 100)
    assert fahrenheit.state == NodeState(pending=False, result=32, error=None, latest_complete=32)


async def test_nothing_runs_for_a_value_that_is_the_same() -> None:
    source = cell([1, 2])
    length = Counted(lambda: len(source.get()))
    middle = computed(length)
    last = Counted(middle.get)
    computed(last)
    source.set([1, 2])
    assert (length.runs, last.runs) == (1, 1)
    source.set([3, 4])
    assert (length.runs, last.runs) == (2, 1)


async def test_a_value_of_another_type_is_a_change() -> None:
    source: Cell[object] = cell(1)
    shown = computed(lambda: repr(source.get()))
    source.set(True)
    assert shown.get() == "True"
    source.set(1.0)
    assert shown.get() == "1.0"


async def test_values_that_cannot_be_compared_count_as_changed() -> None:
    class Array:
        def __eq__(self, other: object) -> bool:
            raise ValueError("the truth of an array is ambiguous")

        __hash__ = None  # type: ignore[assignment]

    source = cell(Array())
    counted = Counted(source.get)
    computed(counted)
    source.set(Array())
    assert counted.runs == 2


async def test_a_diamond_runs_once_and_never_sees_half_of_a_change() -> None:
    source = cell(1)
    left = computed(lambda: source.get() + 1)
    right = computed(lambda: -source.get())
    seen = []
    joined = Counted(lambda: seen.append(left.get() + right.get()))
    computed(joined)
    for value in range(2, 10):
        source.set(value)
    assert seen == [1] * 9


async def test_what_a_function_reads_may_change_with_each_run() -> None:
    first, second, which = cell("a"), cell("b"), cell(True)
    counted = Counted(lambda: first.get() if which.get() else second.get())
    chosen = computed(counted)
    second.set("B")
    assert counted.runs == 1
    which.set(False)
    assert chosen.get() == "B"
    first.set("A")
    assert counted.runs == 2
    assert {node.name for node in chosen.inputs} == {which.name, second.name}


async def test_a_node_may_begin_to_read_one_that_is_higher_and_changes_too() -> None:
    source = cell(0)
    tall: list[Node[int]] = [source]
    counted = []

    def add(below: Node[int]) -> None:
        counted.append(Counted(lambda: below.get() + 1))
        tall.append(computed(counted[-1]))  # type: ignore[arg-type]

    low = Counted(lambda: tall[-1].get() if source.get() else 0)
    low_node = computed(low)
    above = Counted(low_node.get)
    computed(above)
    for _ in range(20):
        add(tall[-1])
    source.set(1)
    assert low_node.get() == 21
    assert low.runs == above.runs == 2
    assert all(each.runs == 2 for each in counted)
    source.set(2)
    assert low_node.get() == 22
    assert low.runs == above.runs == 3


async def test_nodes_that_all_begin_to_read_the_next_do_not_exhaust_the_stack() -> None:
    """Each run is nested in the one before it, until that becomes too deep: then they are put off."""
    source = cell(0)
    nodes: list[Node[int]] = []

    def add(number: int) -> None:
        nodes.append(computed(lambda: (nodes[number + 1].get() + 1) if source.get() and number < 4_999 else 0))

    for number in range(5_000):
        add(number)
    source.set(1)
    assert nodes[0].get() == 4_999


@pytest.mark.parametrize("length", [10_000])
async def test_a_chain_of_any_length_is_computed_without_recursion(length: int) -> None:
    source = cell(0)
    node: Node[int] = source

    def add(below: Node[int]) -> Node[int]:
        return computed(lambda: below.get() + 1)

    for _ in range(length):
        node = add(node)
    assert length > sys.getrecursionlimit()
    source.set(1)
    assert node.get() == length + 1


async def test_a_batch_is_one_change() -> None:
    one, two = cell(1), cell(2)
    counted = Counted(lambda: one.get() + two.get())
    total = computed(counted)
    with batch():
        one.set(10)
        with batch():
            two.set(20)
        assert total.get() == 3
    assert total.get() == 30
    assert counted.runs == 2


# ------------------------------------------------------------------------------------------------------ errors


async def test_an_error_leaves_others_alone_and_is_cleared_by_the_next_good_input() -> None:
    source = cell(2)
    inverse = computed(lambda: 1 / source.get())
    beside = computed(lambda: source.get() + 1)
    after = computed(lambda: inverse.get() * 2)
    caught = computed(lambda: "infinite" if inverse.error else "finite")
    source.set(0)
    assert isinstance(inverse.error, ZeroDivisionError)
    assert after.error is inverse.error
    assert (beside.get(), caught.get()) == (1, "infinite")
    assert inverse.state == NodeState(pending=False, result=None, error=inverse.error, latest_complete=0.5)
    with pytest.raises(ZeroDivisionError):
        after.get()
    source.set(4)
    assert (after.get(), caught.get()) == (0.5, "finite")
    assert inverse.state.error is None


async def test_a_cycle_is_refused_with_the_names_in_it_and_ends_with_it() -> None:
    closed = cell(False)
    nodes: dict[str, Node[int]] = {}
    nodes["a"] = computed(lambda: nodes["c"].get() if closed.get() else 1, name="a")
    nodes["b"] = computed(lambda: nodes["a"].get() + 1, name="b")
    nodes["c"] = computed(lambda: nodes["b"].get() + 1, name="c")
    assert nodes["c"].get() == 3
    closed.set(True)
    error = nodes["a"].error
    assert isinstance(error, InvalidRequest)
    assert "a → c → b → a" in str(error)
    assert nodes["c"].error is error
    closed.set(False)
    assert nodes["c"].get() == 3


async def test_a_cycle_that_another_node_opens_is_gone_for_all() -> None:
    """`e` is refused, and does not read what would open the cycle: it runs again all the same."""
    closed = cell(False)
    nodes: dict[str, Node[int]] = {}
    nodes["c"] = computed(lambda: nodes["d"].get() if closed.get() else 0, name="c")
    nodes["e"] = computed(lambda: nodes["c"].get() + closed.get() * 0, name="e")
    nodes["d"] = computed(lambda: nodes["e"].get() + 1, name="d")
    closed.set(True)
    assert all(isinstance(node.error, InvalidRequest) for node in nodes.values())
    closed.set(False)
    assert [nodes[name].get() for name in "cde"] == [0, 1, 0]


async def test_a_node_that_reads_itself_is_refused() -> None:
    nodes: list[Node[int]] = []
    on = cell(False)
    nodes.append(computed(lambda: nodes[0].get() if on.get() else 0, name="self"))
    on.set(True)
    assert "self → self" in str(nodes[0].error)


async def test_computed_functions_change_nothing() -> None:
    source, target = cell(1), cell(0)
    writes = computed(lambda: target.set(source.get()), name="writes")
    assert "writes changes cell" in str(writes.error)
    makes = computed(lambda: cell(1), name="makes")
    assert "makes makes a node" in str(makes.error)
    assert target.get() == 0


async def test_a_coroutine_of_a_plain_function_is_an_error_and_not_a_warning() -> None:
    async def late() -> int:
        return 1

    def plain() -> object:
        return late()

    node = computed(plain)
    assert "async def" in str(node.error)


async def test_a_cell_is_set_in_the_thread_of_its_loop_only() -> None:
    source = cell(1)
    with pytest.raises(InvalidRequest, match="call_soon_threadsafe"):
        await anyio.to_thread.run_sync(source.set, 2)


# ------------------------------------------------------------------------------------------------------ waiting


async def test_who_reads_what_is_not_there_waits_with_it() -> None:
    source: Cell[object] = cell(1)
    gate = Gate(source)
    slow = gate.node()
    counted = Counted(lambda: f"got {slow.result}")
    reads = computed(counted)
    beyond = computed(lambda: reads.result + "!")  # type: ignore[operator]
    assert slow.pending
    assert reads.pending
    assert beyond.state == NodeState(pending=True, result=None, error=None, latest_complete=None)
    with pytest.raises(InvalidRequest, match="await it"):
        reads.get()
    gate.let(1)
    assert await beyond == "got 1!"
    source.set(2)
    assert beyond.pending
    assert beyond.latest_complete == "got 1!"
    gate.let(2)
    assert await beyond == "got 2!"
    assert counted.runs == 3  # it waited once before the first value, and was not run to wait before the second


async def test_who_reads_only_the_latest_value_runs_only_for_new_ones() -> None:
    source: Cell[object] = cell(1)
    gate = Gate(source)
    slow = gate.node()
    counted = Counted(lambda: slow.latest_complete)
    latest = computed(counted)
    for value in (1, 2):
        source.set(value)
        gate.let(value)
        await slow
    assert latest.get() == 2
    assert counted.runs == 3


async def test_a_newer_input_cancels_the_older_run_and_waits_for_its_end() -> None:
    source = cell(1)
    order = []
    may_end = anyio.Event()

    async def slow() -> int:
        value = source.get()
        order.append(f"begin {value}")
        try:
            await anyio.sleep_forever() if value == 1 else await anyio.sleep(0)
        finally:
            with anyio.CancelScope(shield=True):
                await may_end.wait()
            order.append(f"end {value}")
        return value

    node = computed(slow)
    seen = []
    node.subscribe(lambda each: seen.append(each.state))
    await eventually(lambda: order == ["begin 1"], "the first run")
    source.set(2)
    await anyio.wait_all_tasks_blocked()
    assert (order, node.status) == (["begin 1"], "running")
    may_end.set()
    assert await node == 2
    assert order == ["begin 1", "end 1", "begin 2", "end 2"]
    assert [state.result for state in seen if not state.pending] == [2]
    assert node.runs == 2


async def test_a_stale_result_is_never_shown_even_of_a_run_that_ignores_its_cancellation() -> None:
    source = cell(1)
    begun = anyio.Event()

    async def stubborn() -> int:
        value = source.get()
        begun.set()
        if value == 1:
            try:
                await anyio.sleep_forever()
            except asyncio.CancelledError:
                return 1
        return value

    node = computed(stubborn)
    shown = []
    node.subscribe(lambda each: shown.append(each.state.result))
    await begun.wait()
    source.set(2)
    assert await node == 2
    assert 1 not in shown


async def test_an_input_that_becomes_pending_cancels_what_runs_with_the_old_one() -> None:
    source: Cell[object] = cell(1)
    first, last = Gate(source), None
    upstream = first.node()
    last = Gate(upstream)
    downstream = last.node()
    first.let(1)
    await last.until_begun(1)
    source.set(2)
    await eventually(lambda: last.cancelled == [1], "the end of the run with the old value")
    assert downstream.pending
    first.let(2)
    last.let(2)
    assert await downstream == 2


async def test_an_operation_fails_and_recovers() -> None:
    source: Cell[object] = cell("no")
    gate = Gate(source)
    node = gate.node()
    after = computed(lambda: node.result)
    gate.let("no")
    with pytest.raises(ValueError, match="no"):
        await after
    assert node.status == "failed"
    source.set(1)
    assert (node.error, node.pending) == (None, True)
    gate.let(1)
    assert await after == 1


async def test_an_operation_that_is_cancelled_from_inside_has_failed() -> None:
    async def cancelled() -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    node = computed(cancelled)
    with pytest.raises(InvalidRequest, match="cancelled from inside"):
        await node


async def test_a_run_goes_on_reading_after_it_has_waited() -> None:
    first, second = cell(1), cell(10)

    async def total() -> int:
        one = first.get()
        await anyio.sleep(0)
        return one + second.get()

    node = computed(total)
    assert await node == 11
    second.set(20)
    assert await node == 21
    assert await computed(total) == 21


async def test_an_operation_awaits_another_by_waiting_for_its_turn() -> None:
    """One that held its place while it waits would keep the other from running."""
    async with Graph(max_running=1) as graph:
        source: Cell[object] = Cell(graph, 1)
        gate = Gate(source)

        async def first() -> object:
            return await gate()

        inner: reactive.Operation[object] = reactive.Operation(graph, first)

        async def second() -> object:
            return await inner

        outer: reactive.Operation[object] = reactive.Operation(graph, second)
        gate.let(1)
        assert await outer == 1


async def test_at_most_so_many_run_at_once_and_the_latest_input_wins() -> None:
    async with Graph(max_running=2) as graph:
        sources: list[Cell[object]] = [Cell(graph, number) for number in range(5)]
        gates = [Gate(source) for source in sources]
        nodes = [gate.node_in(graph) for gate in gates]
        await eventually(lambda: len([gate for gate in gates if gate.begun]) == 2, "two runs")
        assert [node.status for node in nodes] == ["running", "running", "queued", "queued", "queued"]
        for value in range(100, 150):
            sources[4].set(value)
        for number, gate in enumerate(gates[:4]):
            gate.let(number)
        gates[4].let(149)
        await graph.settled()
        assert [node.get() for node in nodes] == [0, 1, 2, 3, 149]
        assert gates[4].begun == [149]


# ------------------------------------------------------------------------------------------------- collected inputs


async def test_an_operation_does_not_run_again_for_inputs_that_are_the_same(graph: Graph) -> None:
    source: Cell[object] = cell(1)
    gate = Gate(source)
    slow = gate.node()
    ran = []

    async def body(given: object, _operation: object) -> object:
        ran.append(given)
        return given

    node: reactive.Operation[object] = reactive.Operation(graph, body, lambda: slow.get() == 0)
    gate.let(1)
    gate.let(2)
    assert await node is False
    source.set(2)
    assert node.pending
    assert await node is False
    assert ran == [False]
    node.rerun()
    assert await node is False
    assert ran == [False, False]


async def test_a_failed_run_is_tried_again_when_its_inputs_are_computed_again(graph: Graph) -> None:
    source, fails = cell(1), [True]

    async def body(given: int, _operation: object) -> int:
        if fails:
            fails.pop()
            raise OSError("down")
        return given

    node: reactive.Operation[int] = reactive.Operation(graph, body, lambda: min(source.get(), 1))
    with pytest.raises(OSError, match="down"):
        await node
    source.set(2)
    assert await node == 1


# ------------------------------------------------------------------------------------------------------ handlers


async def test_what_a_handler_sets_is_one_change() -> None:
    one, two = cell(1), cell(2)
    counted = Counted(lambda: one.get() + two.get())
    total = computed(counted)

    @handler
    def swap() -> object:
        before = one.get()
        one.set(two.get())
        two.set(before)
        return total.get()

    assert await swap() == 3
    assert (one.get(), two.get(), counted.runs, swap.runs) == (2, 1, 2, 1)


async def test_calls_of_a_handler_run_one_after_another() -> None:
    order = []

    @handler
    async def slow(number: int) -> int:
        order.append(f"begin {number}")
        await anyio.wait_all_tasks_blocked()
        order.append(f"end {number}")
        return number

    calls = [slow(number) for number in range(3)]
    assert slow.pending
    assert [await call for call in calls] == [0, 1, 2]
    assert order == ["begin 0", "end 0", "begin 1", "end 1", "begin 2", "end 2"]
    assert slow.state.result == 2


async def test_a_handler_that_fails_says_so_and_is_called_again() -> None:
    @handler
    async def divide(number: int) -> float:
        return 1 / number

    call = divide(0)
    await eventually(lambda: divide.status == "failed", "the failure")
    with pytest.raises(ZeroDivisionError):
        await call
    assert await divide(2) == 0.5


async def test_an_operation_of_a_handler_runs_once_and_is_not_kept(graph: Graph) -> None:
    source: Cell[object] = cell(1)
    ran = []

    async def body(given: object, _operation: object) -> object:
        ran.append(given)
        return given

    @handler
    async def start() -> object:
        assert graph.in_handler()
        return await reactive.Operation(graph, body, source.get, once=graph.in_handler())

    before = len(graph.nodes)
    assert await start() == 1
    source.set(2)
    await graph.settled()
    assert ran == [1]
    assert len(graph.nodes) == before


async def test_a_handler_has_no_endless_queue() -> None:
    held = anyio.Event()

    @handler
    async def slow() -> None:
        await held.wait()

    for _ in range(256):
        slow()
    await eventually(lambda: slow.runs == 1, "the first call")
    slow()
    with pytest.raises(InvalidRequest, match="256 calls of slow wait"):
        slow()
    held.set()


# ------------------------------------------------------------------------------------------------------ observation


async def test_subscribers_see_whole_changes_only(graph: Graph) -> None:
    source = cell(1, name="source")
    twice = computed(lambda: source.get() * 2, name="twice")
    thrice = computed(lambda: source.get() * 3, name="thrice")
    seen = []
    end = graph.subscribe(
        lambda nodes: seen.append(([node.name for node in nodes], source.get(), twice.get(), thrice.get()))
    )
    source.set(2)
    end()
    source.set(3)
    assert seen == [(["source", "twice", "thrice"], 2, 4, 6)]


async def test_a_subscriber_that_fails_is_logged_and_the_others_are_called(
    graph: Graph, caplog: pytest.LogCaptureFixture
) -> None:
    source, seen = cell(1), []
    graph.subscribe(lambda _: 1 / 0)  # type: ignore[arg-type]
    graph.subscribe(lambda _: seen.append(source.get()))
    source.set(2)
    assert seen == [2]
    assert "a subscriber of a graph failed" in caplog.text


async def test_a_subscriber_may_set_a_cell(graph: Graph) -> None:
    source, copy = cell(1), cell(1)
    graph.subscribe(lambda nodes: copy.set(source.get()) if source in nodes else None)
    source.set(5)
    assert copy.get() == 5


async def test_nodes_say_what_they_are_and_did(graph: Graph) -> None:
    source: Cell[object] = cell(1, name="source")
    gate = Gate(source)
    slow = gate.node()
    after = computed(slow.get, name="after")
    await gate.until_begun(1)
    info = slow.info()
    assert (info.name, info.kind, info.status, info.runs) == ("gated", "computed", "running", 1)
    assert info.running_s is not None
    assert info.inputs == (source.id,)
    assert after.info().status == "waiting"
    gate.let(1)
    await after
    info = slow.info()
    assert (info.status, info.running_s) == ("done", None)
    assert info.duration_s is not None
    assert [node.name for node in graph.nodes] == ["source", "gated", "after"]


async def test_partial_output_is_read_without_waiting(graph: Graph) -> None:
    held = anyio.Event()

    async def body(_given: object, operation: reactive.Operation[str]) -> str:
        operation.show_output("half")
        await held.wait()
        return "whole"

    node: reactive.Operation[str] = reactive.Operation(graph, body, lambda: None)
    counted = Counted(lambda: node.result)
    computed(counted)
    shown = computed(lambda: node.output)
    await eventually(lambda: shown.get() == "half", "the partial output")
    assert node.pending
    assert counted.runs == 1
    held.set()
    assert await node == "whole"


# ------------------------------------------------------------------------------------------------------ disposal


async def test_a_disposed_node_ends_what_it_runs_and_fails_who_reads_it() -> None:
    source: Cell[object] = cell(1)
    gate = Gate(source)
    node = gate.node()
    after = computed(node.get)
    await gate.until_begun(1)
    node.dispose()
    node.dispose()
    await eventually(lambda: gate.cancelled == [1], "the end of the run")
    assert "was disposed" in str(after.error)
    with pytest.raises(InvalidRequest, match="was disposed"):
        await node
    source.set(2)
    assert gate.begun == [1]


async def test_the_end_of_a_graph_ends_everything_and_waits_for_it() -> None:
    ended = []

    async def slow() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.wait_all_tasks_blocked()
            ended.append("run")

    async def release() -> None:
        ended.append("release")

    before = asyncio.all_tasks()
    async with Graph(max_running=1) as graph:
        source = cell(1)
        computed(slow)
        computed(slow)
        reactive.Operation(graph, lambda *_: anyio.sleep_forever(), lambda: 1, release=release)

        @handler
        async def handles() -> None:
            await slow()

        handles()
        handles()
        await eventually(lambda: graph.nodes[1].status == "running", "a run")
        await anyio.wait_all_tasks_blocked()
    assert sorted(ended) == ["release", "run", "run"]
    assert asyncio.all_tasks() == before
    with pytest.raises(InvalidRequest, match="was disposed"):
        source.set(2)
    with pytest.raises(InvalidRequest, match="not open"):
        Cell(graph, 1)


async def test_nothing_keeps_a_disposed_node_alive() -> None:
    source = cell(1)
    node = computed(source.get)
    gone = weakref.ref(source), weakref.ref(node)
    node.dispose()
    source.dispose()
    del node, source
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


async def test_an_error_in_the_block_is_raised_as_it_is() -> None:
    with pytest.raises(KeyError, match="x"):
        async with Graph():
            raise KeyError("x")


async def test_nodes_need_a_graph() -> None:
    from atoll.reactive.graph import _current

    _current.set(None)
    with pytest.raises(InvalidRequest, match=r"async with reactive\.Graph"):
        cell(1)
